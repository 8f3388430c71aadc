//! Which VMs there are: those that ended are dropped, new ones found among the processes and
//! behind configured sockets. What is opened to be told of the host's pressure is opened with
//! that.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;

use ebb_core::config::{Metadata, VmSettings, by_uuid};
use ebb_core::sample::{Claim, Problem, VmId};

use super::{KEPT_OPEN, LinuxHost, RAM_FILES_EVERY, RAM_FILES_LOOKS, access};
use crate::probe::cgroup::read_hierarchy;
use crate::probe::discovery::{make_names_unique, serving};
use crate::probe::identity::{claim, name_by_socket};
use crate::probe::managers::{SocketKind, kind};
use crate::probe::process::Life;
use crate::probe::psi::{self, PsiTrigger};
use crate::probe::qemu::{QemuProcess, QmpAddress};
use crate::probe::ram_files::{RamFiles, read_ram_files, without_room};
use crate::probe::vmpressure::PressureEvents;
use crate::qmp::Client;
use crate::vm::{Access, Vm, noted, problem};

impl LinuxHost {
    /// Drops VMs that ended; looks for new ones when one did or it is time.
    pub(super) fn refresh(&mut self, now: Instant) {
        let before = self.vms.len();
        let root = &self.options.root;
        let (resting, keep) = (&self.resting, before <= KEPT_OPEN);
        self.vms.retain(|id, vm| resting.contains(id) || vm.look(root, keep) != Life::Ended);
        self.background.iter_mut().for_each(|b| b.keep(&|id| self.vms.contains_key(id)));
        self.merger.iter_mut().for_each(|m| m.keep(|id| self.vms.contains_key(id)));
        let due = self.scanned.is_none_or(|at| now - at >= self.options.scan_every);
        if due || self.vms.len() < before {
            self.scanned = Some(now);
            self.scan();
        }
    }

    /// Finds the VMs whose RAM lies in a mount without room for all of it. Also what could not be
    /// read is a reason to take nothing.
    pub(super) fn look_at_ram_files(&mut self, now: Instant) {
        if self.ram_files.is_some_and(|at| now - at < RAM_FILES_EVERY) {
            return;
        }
        self.ram_files = Some(now);
        let root = &self.options.root;
        let looked_at = self.vms.iter().filter(|(_, vm)| vm.elsewhere < RAM_FILES_LOOKS);
        let read = |(id, vm): (&VmId, &Vm)| (*id, read_ram_files(root, &vm.process));
        let (mut files, mut why) = (BTreeMap::new(), BTreeMap::new());
        for (id, read) in looked_at.map(read) {
            match read {
                Ok(its) => drop(files.insert(id, its)),
                Err(e) => drop(why.insert(id, format!("the mount of its RAM is unknown: {e}"))),
            }
        }
        why.extend(without_room(&files));
        for (id, vm) in &mut self.vms {
            vm.no_room = why.remove(id);
            let elsewhere = |its: &RamFiles| its.free.is_empty() && its.disk.is_none();
            vm.elsewhere += u32::from(files.get(id).is_some_and(elsewhere));
        }
    }

    fn scan(&mut self) {
        let mut problems = Vec::new();
        let root = self.options.root.clone();
        let lives = |id| self.vms.contains_key(&id);
        let scan =
            noted(&mut problems, "/proc", self.scanner.scan(&root, &self.owed, lives).map(Some));
        let Some(scan) = scan else { return self.scan_problems = problems };
        problems.extend(scan.problems.into_iter().map(|(source, why)| problem(None, source, why)));
        self.open_trigger(&mut problems);
        // Whose cgroup a section asks for can be told at the first scan already.
        if self.limits.hierarchy.is_none() {
            let read = noted(&mut problems, "memory cgroups", read_hierarchy(&root));
            self.limits.hierarchy = read;
        }
        self.bind_sockets(&mut problems);
        let named: HashSet<VmId> = self.named.values().copied().collect();
        let gone: HashSet<VmId> = scan.gone.into_iter().collect();
        self.vms.retain(|id, _| named.contains(id) || !gone.contains(id));
        for mut process in scan.found {
            if self.vms.contains_key(&process.id) {
                continue;
            }
            name_by_socket(&self.options.config, &mut process);
            let config = &self.options.config;
            let has_section =
                config.section(&process.given, process.args.uuid.as_deref()).is_some();
            if has_section || !config.listed_only || self.owed.contains(&process.id) {
                self.take_in(process);
            }
        }
        make_names_unique(self.vms.values_mut().map(|vm| &mut vm.process).collect());
        self.limits.find(&root, Instant::now(), self.vms.values_mut(), &mut problems);
        self.open_notifications(&mut problems);
        self.scan_problems = problems;
    }

    /// Configured sockets tell by their peer which process they are.
    fn bind_sockets(&mut self, problems: &mut Vec<Problem>) {
        let named = |(name, vm): (&String, &VmSettings)| {
            Some((name.clone(), PathBuf::from(vm.qmp.as_ref()?), vm.manage))
        };
        let named: Vec<_> = self.options.config.vms.iter().filter_map(named).collect();
        for (name, path, managed) in named {
            if self.named.get(&name).is_some_and(|id| self.vms.contains_key(id)) {
                continue;
            }
            // One that is owed something is reached where it was before.
            let owed = |id: &VmId| self.owed_at.get(id).is_none_or(|at| *at == path);
            if !managed && !self.owed.iter().any(owed) {
                continue;
            }
            self.named.remove(&name);
            match self.bind(name.clone(), path.clone()) {
                Ok(id) => drop(self.named.insert(name, id)),
                Err(why) => {
                    let meant = |vm: &&Vm| {
                        let by_uuid = vm.process.args.uuid.as_deref().map(by_uuid);
                        vm.process.given == name || by_uuid.as_ref() == Some(&name)
                    };
                    let vm = self.vms.values().find(meant).map(|vm| vm.process.id);
                    // Errors of a socket begin with its path.
                    let path = path.display().to_string();
                    let why = if why.starts_with(&path) { why } else { format!("{path}: {why}") };
                    problems.push(problem(vm, format!("[vm.{name}] qmp"), why));
                }
            }
        }
    }

    fn bind(&mut self, name: String, path: PathBuf) -> Result<VmId, String> {
        let root = &self.options.root;
        let at_it = |vm: &&Vm| vm.client.as_ref().is_some_and(|c| c.path() == path);
        if let Some(vm) = self.vms.values().find(at_it) {
            let mut called = vm.process.clone();
            called.call(name)?;
            return match called.given == vm.process.given {
                true => Ok(called.id),
                false => Err(format!("it is the socket of {} already", vm.process.name)),
            };
        }
        let client = match kind(&path, true, self.options.config.sockets) {
            SocketKind::Own => Client::new(path),
            SocketKind::Shared => Client::knock(path).map_err(|e| e.to_string())?,
            SocketKind::Others => {
                return Err("its manager stays connected to it: name a socket of Ebb's own".into());
            }
        };
        if let Some(error) = client.protocol.failure() {
            return Err(error.to_string());
        }
        let pid = client.peer_pid().ok_or("the process behind it is in another pid namespace")?;
        let mut process = serving(root, &self.options.trust, &self.owed, pid)?;
        process.call(name)?;
        let claim = claim(root, &self.options.config, self.cgroups(), &process);
        if let Claim::Refused(why) = &claim {
            return Err(format!("the VM there is not that of the section: {why}"));
        }
        process.args.qmp = QmpAddress::Paths(vec![client.path().to_owned()]);
        let id = process.id;
        let access = access(&self.options, &self.owed, &process, (&claim, &Metadata::None));
        let vm = self.take_in(process.clone());
        (vm.process, vm.named, vm.access) = (process, true, access);
        vm.claim = Some(claim);
        vm.adopt(client);
        Ok(id)
    }

    /// The VM of this process, which may be new. What may be done to it is said before anything is
    /// (`allow`).
    fn take_in(&mut self, process: QemuProcess) -> &mut Vm {
        let id = process.id;
        self.ram_files = self.ram_files.filter(|_| process.args.mem_paths.is_empty());
        let (was, libvirt) = (self.intervals.of(id), &self.libvirt);
        let new = || Vm::new(process, Access::default()).with(was, libvirt);
        self.vms.entry(id).or_insert_with(new)
    }

    fn open_trigger(&mut self, problems: &mut Vec<Problem>) {
        let Some((stall, window)) = self.options.psi_trigger_us else { return };
        if self.trigger.is_none() && !self.no_trigger {
            let open =
                |stall, window| PsiTrigger::open(&self.options.root, psi::MEMORY, stall, window);
            // Without CAP_SYS_RESOURCE the kernel takes windows of whole 2 s only.
            let opened = open(stall, window).or_else(|_| open(stall.saturating_mul(2), 2_000_000));
            self.trigger = noted(problems, "PSI trigger", opened);
            self.no_trigger = self.trigger.is_none();
        }
    }

    /// Without PSI of its own (cgroup v1) the pool tells by notifications.
    fn open_notifications(&mut self, problems: &mut Vec<Problem>) {
        let (Some(h), Some(pool)) = (&self.limits.hierarchy, &self.limits.pool) else {
            self.notifications = None;
            return;
        };
        if self.options.psi_trigger_us.is_none()
            || self.notifications.as_ref().is_some_and(|n| n.cgroup == *pool)
        {
            return;
        }
        let opened = PressureEvents::open(&self.options.root, h, pool);
        self.notifications = noted(problems, "memory.pressure_level", opened);
    }
}
