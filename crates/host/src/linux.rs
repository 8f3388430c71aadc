//! The Linux host: one [`LinuxHost::sample`] per tick, balloon commands, and a
//! sleep that ends early when the host or a VM needs attention.
//!
//! Everything that is asked of VMs in a tick shares one deadline. A source that
//! fails becomes a [`Problem`]; nothing here ends the tick. Connections are
//! `vm.rs`'s; what is read of the kernel is `probe/`'s; this file only joins.

mod options;
mod wait;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebb_core::config::{AgentUse, SocketUse};
use ebb_core::plan::{
    Action, MergePlan, OffloadOrder, Outcome, PartialThpOrder, RecycleOrder, ZeroOrder,
};
use ebb_core::sample::{
    Claim, HostSample, Ksm, KsmStat, MergeSample, Problem, Sample, VmId, VmSample, ZeroWays,
};
use ebb_core::units::{Bytes, Stamp};
use rustix::event::{PollFd, PollFlags};

use crate::act::ksm::has_room;
use crate::act::ksm_worker::KsmWorker;
use crate::act::offload::Offloader;
use crate::act::partial_thp::{self, Splitter};
use crate::act::zeros::{self, ZeroFinder};
use crate::agent_link::AgentLink;
use crate::bound::Bounds;
use crate::hands_off::HandsOffs;
use crate::intervals::Intervals;
use crate::probe::cgroup::Version;
use crate::probe::discovery::{Scanner, make_names_unique, serving};
use crate::probe::identity::claim;
use crate::probe::mappers::Search;
use crate::probe::process::{Life, life};
use crate::probe::psi::{self, PsiTrigger};
use crate::probe::qemu::{QemuProcess, QmpAddress};
use crate::probe::vmpressure::PressureEvents;
use crate::probe::{ksm, meminfo, swaps, vmstat, zfs};
use crate::qmp::{Client, QmpError, poll_all, pump_ready};
use crate::root::ProbeError;
use crate::sys;
use crate::vm::{Access, Vm, problem};
use crate::waker::Waker;

pub use self::options::{MergeOptions, Options};
pub use self::wait::Wake;

/// How long a tick waits for answers of agents that are not at work.
const AGENTS: Duration = Duration::from_millis(20);

/// Of so many VMs the files in `/proc` are kept open; where there are more, descriptors are for
/// their sockets.
const KEPT_OPEN: usize = 1000;

/// Where nothing is merged by Ebb, what others merge is read this often: a dozen files
/// and one of each VM, for people only.
const OTHERS_KSM_EVERY: Duration = Duration::from_secs(10);

/// What touching new memory takes is measured this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// An order to a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonOrder {
    /// Whom it concerns.
    pub vm: VmId,
    /// What the guest shall be left with.
    pub to: Bytes,
    /// Whether that is more than it has.
    pub gives: bool,
}

/// Why a balloon was not set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActError {
    /// The process has ended; its pid may be another's by now.
    #[error("the VM's process {pid} has ended")]
    Gone {
        /// Its pid.
        pid: u32,
    },
    /// QMP cannot be used now.
    #[error("no QMP connection: {0}")]
    NoLink(String),
    /// QEMU was told and has not answered in time: it may still follow.
    #[error("QEMU has not answered within {ms} ms: it may still follow")]
    Unanswered {
        /// How long was waited, milliseconds.
        ms: u64,
    },
    /// The connection ended before QEMU answered: it may have done it.
    #[error("{0} before QEMU answered: it may have done it")]
    Lost(String),
    /// QEMU refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// The machine, with everything that is kept between ticks.
#[derive(Debug)]
pub struct LinuxHost {
    options: Options,
    vms: BTreeMap<VmId, Vm>,
    hands_off: HandsOffs,
    intervals: Intervals,
    /// Why it is not known which VMs were to be left alone.
    unread: Option<String>,
    /// Which VM each configured socket turned out to be.
    bound: Vec<Option<VmId>>,
    /// The VMs that Ebb owes something.
    owed: HashSet<VmId>,
    /// The VMs that need not be asked in the next sample.
    resting: HashSet<VmId>,
    /// Where they were heard, by an earlier daemon.
    owed_at: BTreeMap<VmId, PathBuf>,
    scanner: Scanner,
    scanned: Option<Instant>,
    scan_problems: Vec<Problem>,
    bounds: Bounds,
    trigger: Option<PsiTrigger>,
    /// Where there is no PSI of the pool, and when they last ended a sleep.
    notifications: Option<PressureEvents>,
    notified: Option<Instant>,
    offloader: Offloader,
    splitter: Splitter,
    /// Where that is wanted, with what this kernel can do.
    zeros: Option<(ZeroWays, ZeroFinder)>,
    merger: Option<KsmWorker>,
    mappers: Search,
    /// `ksmd`, who else sets KSM, and when that was looked up.
    ksm_around: ksm::Around,
    /// Its counters of each VM.
    ksm_stats: ksm::Stats,
    /// What others merged when that was last read, and when.
    others_ksm: Option<(Instant, Option<Ksm>, BTreeMap<VmId, KsmStat>)>,
    /// What a MiB of new memory costs, and when that was measured.
    touch: Option<(Instant, Option<u32>)>,
    waker: Waker,
}

impl LinuxHost {
    /// Opens what is kept open. VMs are looked for by the first sample. Fails
    /// only where the system has no file descriptor left.
    pub fn new(mut options: Options) -> std::io::Result<LinuxHost> {
        let (hands_off, unread) = HandsOffs::load(options.hands_off.clone(), LinuxHost::now());
        options.stats_interval_s = options.stats_interval_s.max(1);
        let waker = Waker::new()?;
        let merger = options.merge.as_ref().map(|m| {
            KsmWorker::new(options.root.clone(), m.note.clone(), m.manners, waker.clone())
        });
        let bound = vec![None; options.sockets.len()];
        Ok(LinuxHost {
            trigger: None,
            notifications: None,
            notified: None,
            offloader: Offloader::new(options.root.clone()),
            splitter: partial_thp::splitter(options.root.clone()),
            zeros: options
                .zeros
                .then(|| (zeros::ways(&options.root), zeros::finder(options.root.clone()))),
            merger,
            mappers: Search::default(),
            ksm_around: ksm::Around::default(),
            ksm_stats: ksm::Stats::default(),
            others_ksm: None,
            touch: None,
            scanner: Scanner::new(options.trust.clone()),
            bounds: Bounds::new(options.pool.clone()),
            intervals: Intervals::load(options.intervals.clone()),
            options,
            vms: BTreeMap::new(),
            hands_off,
            unread,
            bound,
            owed: HashSet::new(),
            resting: HashSet::new(),
            owed_at: BTreeMap::new(),
            scanned: None,
            scan_problems: Vec::new(),
            waker,
        })
    }

    /// The host's monotonic clock.
    pub fn now() -> Stamp {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Stamp(t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000)
    }

    /// For ending [`LinuxHost::wait`] from elsewhere.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// VMs that are owed something are reached over these sockets as long as they are, also
    /// where the configuration does not name them (any more).
    pub fn reach_at(&mut self, sockets: impl IntoIterator<Item = (VmId, PathBuf)>) {
        self.owed_at.extend(sockets);
    }

    /// These VMs need not be asked in the next sample: of them it tells what is known, with its
    /// age.
    pub fn rest(&mut self, vms: &[VmId]) {
        self.resting = vms.iter().copied().collect();
    }

    /// Reads everything. Takes at most the deadline, plus what `/proc` takes.
    pub fn sample(&mut self) -> Sample {
        self.sample_owed(&[])
    }

    /// The same where Ebb owes something to these processes: they are looked at whatever the
    /// configuration says of them, and those that are proven to have ended are told.
    pub fn sample_owed(&mut self, owed: &[VmId]) -> Sample {
        let (at, started) = (LinuxHost::now(), Instant::now());
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ms = wall.as_millis() as u64;
        let mut problems = Vec::new();
        let mut host = self.sample_host(&mut problems);
        self.owed = owed.iter().copied().collect();
        self.refresh(started);
        self.allow(at);
        for id in owed {
            self.vms.get_mut(id).into_iter().for_each(|vm| vm.hurry(started));
        }
        problems.extend(self.scan_problems.iter().cloned());
        let unread = self.unread.iter().map(|why| problem(None, "hands-off".into(), why.clone()));
        problems.extend(unread);
        self.query(started, at);
        self.keep_intervals();
        let mut vms = self.sample_vms(at, wall_ms, &mut problems);
        self.sample_merging(&mut host, &mut vms, &mut problems);
        (host.pool, host.vms_psi) = self.bounds.sample(&self.options.root, started, &mut problems);
        let root = &self.options.root;
        let gone = |id: &&VmId| !self.vms.contains_key(id) && life(root, **id) == Life::Ended;
        let ended = owed.iter().filter(gone).copied().collect();
        self.resting.clear();
        Sample { at, wall_ms, host, vms, ended, problems }
    }

    /// What may be done to each VM: nothing to one that is not managed, unless it is owed
    /// something.
    fn allow(&mut self, at: Stamp) {
        let (vms, root) = (&self.vms, &self.options.root);
        let is_there = |id: &VmId| vms.contains_key(id) || life(root, *id) != Life::Ended;
        self.hands_off.keep(at, is_there);
        let version = self.cgroups();
        for (id, vm) in &mut self.vms {
            vm.claim = claim(root, &self.options.config, version, &vm.process);
            vm.access = Access {
                hands_off_ms: self.hands_off.left_ms(*id, at),
                ..access(&self.options, &self.owed, &vm.process, &vm.claim)
            };
            vm.named = self.bound.contains(&Some(*id));
            vm.owed_at = self.owed_at.get(id).filter(|_| self.owed.contains(id)).cloned();
        }
    }

    /// Where memory cgroups are, so that a VM's is found.
    fn cgroups(&self) -> Version {
        self.bounds.hierarchy().map_or(Version::V2, |h| h.version)
    }

    /// Measured anew each minute: it takes less than a millisecond. A tree of tests has none.
    fn touch_us(&mut self) -> Option<u32> {
        if !self.options.root.is_machine() {
            return None;
        }
        let fresh = self.touch.filter(|(at, _)| at.elapsed() < TOUCH_EVERY);
        let measure = || {
            let time = sys::touch_time().ok();
            (Instant::now(), time.and_then(|t| u32::try_from(t.as_micros()).ok()))
        };
        self.touch = fresh.or_else(|| Some(measure()));
        self.touch?.1
    }

    fn sample_host(&mut self, problems: &mut Vec<Problem>) -> HostSample {
        let touch_us = self.touch_us();
        let root = &self.options.root;
        HostSample {
            memory: noted(problems, "/proc/meminfo", meminfo::read_meminfo(root)),
            psi: noted(problems, psi::MEMORY, psi::read_psi(root, psi::MEMORY)),
            vmstat: noted(problems, "/proc/vmstat", vmstat::read_vmstat(root)),
            swaps: noted(problems, "/proc/swaps", swaps::read_swaps(root)).unwrap_or_default(),
            ksm: None,
            scan: None,
            zeros: self.zeros.as_ref().map(|(ways, _)| *ways),
            zfs_arc: noted(problems, "arcstats", zfs::read_arcstats(root)),
            pool: None,
            vms_psi: None,
            zswap: noted(problems, "zswap", swaps::read_zswap(root).map(Some)).unwrap_or_default(),
            vmpressure: self.notifications.as_ref().map(PressureEvents::take),
            touch_us,
        }
    }

    /// Drops VMs that ended; looks for new ones when one did or it is time.
    fn refresh(&mut self, now: Instant) {
        let before = self.vms.len();
        let root = &self.options.root;
        let (resting, keep) = (&self.resting, before <= KEPT_OPEN);
        self.vms.retain(|id, vm| resting.contains(id) || vm.look(root, keep) != Life::Ended);
        self.offloader.keep(|id| self.vms.contains_key(id));
        self.splitter.keep(|id| self.vms.contains_key(id));
        self.zeros.iter_mut().for_each(|(_, z)| z.keep(|id| self.vms.contains_key(id)));
        self.merger.iter_mut().for_each(|m| m.keep(|id| self.vms.contains_key(id)));
        let due = self.scanned.is_none_or(|at| now - at >= self.options.scan_every);
        if due || self.vms.len() < before {
            self.scanned = Some(now);
            self.scan();
        }
    }

    fn scan(&mut self) {
        let mut problems = Vec::new();
        let root = self.options.root.clone();
        let scan = noted(&mut problems, "/proc", self.scanner.scan(&root, &self.owed).map(Some));
        let Some(scan) = scan else { return self.scan_problems = problems };
        problems.extend(scan.problems.into_iter().map(|(source, why)| problem(None, source, why)));
        self.open_trigger(&mut problems);
        self.bind_sockets(&mut problems);
        let bound: HashSet<VmId> = self.bound.iter().copied().flatten().collect();
        let gone: HashSet<VmId> = scan.gone.into_iter().collect();
        self.vms.retain(|id, _| bound.contains(id) || !gone.contains(id));
        for process in scan.found {
            let (id, interval_s) = (process.id, self.options.stats_interval_s);
            let listed = self.options.only.as_ref().is_none_or(|only| process.is_one_of(only));
            if listed || self.owed.contains(&id) {
                // What may be done to it is said before anything is (`allow`).
                let was = self.intervals.of(id);
                let new = || Vm::new(process, interval_s, Access::default()).with_interval(was);
                self.vms.entry(id).or_insert_with(new);
            }
        }
        make_names_unique(self.vms.values_mut().map(|vm| &mut vm.process).collect());
        self.bounds.find(&root, Instant::now(), self.vms.values_mut(), &mut problems);
        self.open_notifications(&mut problems);
        self.scan_problems = problems;
    }

    fn open_trigger(&mut self, problems: &mut Vec<Problem>) {
        let Some((stall, window)) = self.options.psi_trigger_us else { return };
        if self.trigger.is_none() {
            let open =
                |stall, window| PsiTrigger::open(&self.options.root, psi::MEMORY, stall, window);
            // Without CAP_SYS_RESOURCE the kernel takes windows of whole 2 s only.
            let opened = open(stall, window).or_else(|_| open(stall.saturating_mul(2), 2_000_000));
            self.trigger = noted(problems, "PSI trigger", opened);
            if self.trigger.is_none() {
                // Said once: PSI's averages are read each tick all the same.
                self.options.psi_trigger_us = None;
            }
        }
    }

    /// Configured sockets tell by their peer which process they are.
    fn bind_sockets(&mut self, problems: &mut Vec<Problem>) {
        for i in 0..self.bound.len() {
            if self.bound[i].is_some_and(|id| self.vms.contains_key(&id)) {
                continue;
            }
            let (name, path) = self.options.sockets[i].clone();
            let section = self.options.config.vms.get(&name);
            // One that is owed something is reached where it was before.
            let owed = |id: &VmId| self.owed_at.get(id).is_none_or(|at| *at == path);
            if section.is_some_and(|s| !s.manage) && !self.owed.iter().any(owed) {
                continue;
            }
            let source = path.display().to_string();
            self.bound[i] = match self.bind(name, path) {
                Ok(id) => Some(id),
                Err(why) => {
                    problems.push(problem(None, source, why));
                    None
                }
            };
        }
    }

    fn bind(&mut self, name: String, path: PathBuf) -> Result<VmId, String> {
        let root = &self.options.root;
        let client = Client::new(path);
        if let Some(error) = client.failure() {
            return Err(error.to_string());
        }
        let pid = client.peer_pid().ok_or("the process behind it is in another pid namespace")?;
        let mut process = serving(root, &self.options.trust, &self.owed, pid)?;
        process.call(name)?;
        let claim = claim(root, &self.options.config, self.cgroups(), &process);
        if let Claim::Refused(why) = &claim {
            return Err(format!("the VM there is not that of the section: {why}"));
        }
        process.qmp = QmpAddress::Paths(vec![client.path().to_owned()]);
        let id = process.id;
        let interval_s = self.options.stats_interval_s;
        let access = access(&self.options, &self.owed, &process, &claim);
        let was = self.intervals.of(id);
        let new = || Vm::new(process.clone(), interval_s, access).with_interval(was);
        let vm = self.vms.entry(id).or_insert_with(new);
        (vm.process, vm.named) = (process, true);
        vm.adopt(client);
        Ok(id)
    }

    /// Without PSI of its own (cgroup v1) the pool tells by notifications.
    fn open_notifications(&mut self, problems: &mut Vec<Problem>) {
        let (Some(h), Some(pool)) = (self.bounds.hierarchy(), self.bounds.pool()) else {
            self.notifications = None;
            return;
        };
        if self.options.psi_trigger_us.is_none()
            || self.notifications.as_ref().is_some_and(|n| n.cgroup() == pool)
        {
            return;
        }
        let opened = PressureEvents::open(&self.options.root, h, pool);
        self.notifications = noted(problems, "memory.pressure_level", opened);
    }

    /// Leaves a VM alone for so long; 0 ms: no longer. The error is for people.
    pub fn hands_off(&mut self, name: &str, ms: u64) -> Result<(), String> {
        let named = |vm: &Vm| vm.process.name == name;
        let found = self.vms.iter().find(|(_, vm)| named(vm)).map(|(id, _)| *id);
        let id = found.ok_or_else(|| format!("no VM is called “{name}”"))?;
        self.hands_off.set(id, LinuxHost::now(), ms)
    }

    fn query(&mut self, started: Instant, at: Stamp) {
        pump_ready(&mut clients(&mut self.vms));
        let resting = &self.resting;
        self.vms.iter_mut().for_each(|(id, vm)| vm.ask(started, at, resting.contains(id)));
        // From here: what reading took is not QEMU's doing.
        let deadline = Instant::now() + self.options.deadline;
        // A balloon that was just found is asked at once, and then set up.
        for _ in 0..3 {
            poll_all(&mut clients(&mut self.vms), deadline);
            if !self.vms.values_mut().map(Vm::hear).fold(false, |a, b| a | b) {
                break;
            }
        }
        for (_, vm) in self.vms.iter_mut().filter(|(id, _)| self.owed.contains(id)) {
            if vm.access.hands_off_ms.is_some() && !vm.access.look_only {
                vm.withdraw();
            }
        }
        self.query_agents(started, deadline);
    }

    /// The agents answer in microseconds, unless they are at work. One that was just
    /// met is handed its RAM at once, and then asked how it does.
    fn query_agents(&mut self, started: Instant, deadline: Instant) {
        let keep_open = self.options.merge.as_ref().is_some_and(|m| m.steer);
        let questions = self.vms.values_mut().filter_map(Vm::asks_for_mappers).collect();
        let waker = self.waker.clone();
        let found = self.mappers.go_on(&self.options.root, questions, move || waker.wake());
        for (vm, generation, found) in found {
            let agent = self.vms.get_mut(&vm).and_then(|vm| vm.agent.as_mut());
            agent.into_iter().for_each(|agent| agent.mappers(generation, found.clone()));
        }
        for _ in 0..3 {
            self.vms.values_mut().for_each(|vm| vm.ask_agent(started, keep_open));
            let new = self.vms.values().filter_map(|vm| vm.agent.as_ref()).any(AgentLink::is_new);
            // To be handed its RAM takes one longer, and much waits for that.
            let patience = if new { self.options.deadline } else { AGENTS };
            self.hear_agents(deadline.min(Instant::now() + patience));
            if !self.vms.values().filter_map(|vm| vm.agent.as_ref()).any(AgentLink::goes_on) {
                break;
            }
        }
    }

    fn hear_agents(&mut self, deadline: Instant) {
        loop {
            let now = Instant::now();
            let mut owed = false;
            for agent in self.vms.values_mut().filter_map(|vm| vm.agent.as_mut()) {
                owed |= agent.hear(now);
            }
            let Ok(left) = deadline.saturating_duration_since(now).try_into() else { return };
            if !owed || now >= deadline {
                return;
            }
            let agents = self.vms.values().filter_map(|vm| vm.agent.as_ref()?.agent());
            let fds = agents.filter_map(|a| Some((a.fd()?, a.wants_write())));
            let mut fds: Vec<PollFd<'_>> = fds
                .map(|(fd, write)| {
                    let out = if write { PollFlags::OUT } else { PollFlags::empty() };
                    PollFd::from_borrowed_fd(fd, PollFlags::IN | out)
                })
                .collect();
            let _ = rustix::event::poll(&mut fds, Some(&left));
        }
    }

    /// Hands orders to the agents; what they did shows in later samples.
    pub fn recycle(&mut self, orders: &[RecycleOrder]) {
        for order in orders {
            if let Some(agent) = self.vms.get_mut(&order.vm).and_then(|vm| vm.agent.as_mut()) {
                agent.order(order);
            }
        }
    }

    /// Has cold memory paged out, beside the loop; later samples tell what came.
    pub fn offload(&mut self, orders: &[OffloadOrder]) {
        for order in orders {
            let cgroup = self.vms.get(&order.vm).and_then(|vm| vm.cgroup.as_deref());
            self.offloader.order(order.vm, order.bytes, self.bounds.hierarchy(), cgroup);
        }
    }

    /// Queues a scan that frees zero pages; it runs beside the loop.
    pub fn zeros(&mut self, orders: &[ZeroOrder]) {
        self.zeros
            .iter_mut()
            .for_each(|(_, z)| orders.iter().for_each(|o| z.order(o.vm, o.clone())));
    }

    /// Has partially mapped huge pages split, likewise.
    pub fn partial_thp(&mut self, orders: &[PartialThpOrder]) {
        orders.iter().for_each(|o| self.splitter.order(o.vm, o.clone()));
    }

    /// Steers KSM, opens and closes VMs, has them scanned: beside the loop.
    pub fn merge(&mut self, plan: &MergePlan) {
        let Some(merger) = &mut self.merger else { return };
        plan.ksmd.iter().for_each(|order| merger.order(order));
        plan.scan_cores.iter().for_each(|cores| merger.pace(*cores));
        for order in &plan.vms {
            let Some(vm) = self.vms.get_mut(&order.vm) else { continue };
            let root = &self.options.root;
            let room = |pages| has_room(root, Bytes::pages(pages)).map_err(|e| e.to_string());
            match if order.open { Ok(()) } else { self.ksm_stats.merged(order.vm).and_then(room) } {
                Ok(()) => vm.switch_merging(order.open),
                Err(why) => vm.merging.refuse(why),
            }
        }
        for (id, vm) in &mut self.vms {
            let Some(agent) = &mut vm.agent else { continue };
            let told = match plan.ranged.contains(id) {
                // Before the first scan what is open stays so.
                true => merger.ranges(*id).is_some_and(|(open, _)| agent.advise(&open)),
                false => agent.advise(&[]),
            };
            if told {
                // The answer is there in a moment, and something follows from it.
                self.waker.wake();
            }
        }
        if let Some(scan) = &plan.scan {
            merger.scan(scan, |id| {
                let vm = self.vms.get_mut(&id)?;
                let agent = vm.agent.as_mut().and_then(AgentLink::scanner);
                Some((vm.process.name.clone(), agent))
            });
        }
    }

    /// Puts KSM's knobs back, where they were taken.
    pub fn release_ksm(&mut self, patience: Duration) -> Result<(), String> {
        self.merger.as_mut().map_or(Ok(()), |m| m.release(patience))
    }

    /// What is known of merging; has looked at what is not known any more.
    fn sample_merging(
        &mut self,
        host: &mut HostSample,
        vms: &mut [VmSample],
        problems: &mut Vec<Problem>,
    ) {
        if self.merger.is_none() {
            return self.sample_others_merging(host, vms, problems);
        }
        self.sample_ksm(host, vms, problems);
        let Some(merger) = &mut self.merger else { return };
        let (scan, knobs) = merger.sample();
        let refused = scan.error.clone();
        problems.extend(refused.map(|why| problem(None, "scan for equal pages".into(), why)));
        host.scan = Some(scan);
        problems.extend(knobs.map(|why| problem(None, "/sys/kernel/mm/ksm".into(), why)));
        let copied = host.vmstat.and_then(|v| v.cow_ksm);
        let working = host.ksm.as_ref().is_some_and(|k| k.run != 0);
        let steer = self.options.merge.as_ref().is_some_and(|m| m.steer);
        for sample in vms.iter_mut() {
            let (Some(vm), Some(part)) = (self.vms.get_mut(&sample.id), &mut sample.merge) else {
                continue;
            };
            let (look, found) = merger.vm(sample.id);
            vm.go_on_merging(look.as_ref());
            if steer && vm.wants_look(look.as_ref(), copied, part.stat.merging_pages, working) {
                merger.look(sample.id);
            }
            // By ranges, only what lies in them is to be had.
            let ranged = vm.agent.as_ref().and_then(|_| merger.ranges(sample.id));
            part.found = ranged.map(|(_, found)| found).or(found);
            part.busy = vm.merging.is_busy();
            part.error =
                vm.merging.error().or(vm.agent.as_ref().and_then(|a| a.refused())).cloned();
            if let Some(look) = look {
                // Who says that it has opened something has, whatever was seen before that;
                // that nothing is open is believed when it is seen.
                let says = vm.agent.as_ref().is_some_and(|a| a.open() > Bytes::ZERO);
                part.open = look.open.as_ref().ok().map(|open| *open || says);
                part.seen = part.open.map(|_| (look.at, look.merged));
                part.error = part.error.take().or(look.open.err());
            }
        }
    }

    /// What is merged where Ebb has no part in it: read now and then, and shown until
    /// it is read again.
    fn sample_others_merging(
        &mut self,
        host: &mut HostSample,
        vms: &mut [VmSample],
        problems: &mut Vec<Problem>,
    ) {
        if let Some((_, ksm, stats)) =
            self.others_ksm.as_ref().filter(|o| o.0.elapsed() < OTHERS_KSM_EVERY)
        {
            host.ksm = *ksm;
            for vm in vms.iter_mut() {
                let stat = stats.get(&vm.id).copied();
                vm.merge = stat.map(|stat| MergeSample { stat, ..MergeSample::default() });
            }
            return;
        }
        self.sample_ksm(host, vms, problems);
        let stats = vms.iter().filter_map(|v| Some((v.id, v.merge.as_ref()?.stat))).collect();
        self.others_ksm = Some((Instant::now(), host.ksm, stats));
    }

    /// Reads KSM's counters, and those of each VM where anything is merged at all.
    fn sample_ksm(
        &mut self,
        host: &mut HostSample,
        vms: &mut [VmSample],
        problems: &mut Vec<Problem>,
    ) {
        let root = &self.options.root;
        host.ksm = noted(problems, "/sys/kernel/mm/ksm", ksm::read_ksm(root));
        let merges = host.ksm.is_some_and(|k| k.run != 0 || k.pages_shared > 0);
        if self.merger.is_none() && !merges {
            return;
        }
        self.ksm_stats.read(root, vms);
        for vm in vms.iter_mut() {
            let read = self.ksm_stats.of(vm.id);
            if let Some(Err(why)) = read {
                problems.push(problem(None, format!("/proc/{}/ksm_stat", vm.id.pid), why.clone()));
            }
            let stat = read.and_then(|read| *read.as_ref().ok()?);
            vm.merge = Some(MergeSample { stat: stat.unwrap_or_default(), ..Default::default() });
        }
        host.ksm.iter_mut().for_each(|ksm| self.ksm_around.tell(root, ksm, vms));
    }

    fn sample_vms(
        &mut self,
        at: Stamp,
        wall_ms: u64,
        problems: &mut Vec<Problem>,
    ) -> Vec<VmSample> {
        let (root, keep) = (&self.options.root, self.vms.len() <= KEPT_OPEN);
        let one = |(id, vm): (&VmId, &mut Vm)| {
            // One that was just found.
            if vm.is_unseen() && !self.resting.contains(id) {
                vm.look(root, keep);
            }
            let mut sample = vm.sample(at, wall_ms, problems);
            sample.offload = self.offloader.sample(*id);
            sample.partial_thp = self.splitter.sample(*id);
            sample.zeros = self.zeros.as_ref().and_then(|(_, z)| z.sample(*id));
            let busy = vm.shrinks(self.owed.contains(id))
                || vm.merging.is_busy()
                || self.merger.as_ref().is_some_and(|m| m.reads(*id))
                || sample.offload.as_ref().is_some_and(|o| o.busy)
                || sample.partial_thp.as_ref().is_some_and(|t| t.busy)
                || sample.zeros.as_ref().is_some_and(|z| z.busy);
            sample.hands_off.iter_mut().for_each(|h| h.done &= !busy);
            sample
        };
        self.vms.iter_mut().map(one).collect()
    }

    /// Carries out what the policy decided; outcomes in the order of the actions.
    pub fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        let order = |a: &Action| BalloonOrder { vm: a.vm, to: a.to, gives: a.gives() };
        let orders: Vec<BalloonOrder> = actions.iter().map(order).collect();
        let outcome = |(a, r): (&Action, Result<(), ActError>)| Outcome {
            vm: a.vm,
            unanswered: matches!(r, Err(ActError::Unanswered { .. } | ActError::Lost(_))),
            error: r.err().map(|e| e.to_string()),
        };
        actions.iter().zip(self.set_balloons(&orders)).map(outcome).collect()
    }

    /// Tells QEMU what each guest shall be left with (whole MiB make sense).
    /// Every VM's process is checked right before. All share one deadline;
    /// results are in the order of the orders. `Ok` means that QEMU has asked
    /// the guest, not that the guest has done it.
    pub fn set_balloons(&mut self, orders: &[BalloonOrder]) -> Vec<Result<(), ActError>> {
        self.set_balloons_within(orders, self.options.deadline)
    }

    /// The same; QEMU has the time `wait` to answer.
    pub fn set_balloons_within(
        &mut self,
        orders: &[BalloonOrder],
        wait: Duration,
    ) -> Vec<Result<(), ActError>> {
        let sent: Vec<_> = orders.iter().map(|order| self.send_order(order)).collect();
        poll_all(&mut clients(&mut self.vms), Instant::now() + wait);
        let result = |(sent, order): (Result<u64, ActError>, &BalloonOrder)| {
            let command = sent?;
            let gone = ActError::Gone { pid: order.vm.pid };
            let vm = self.vms.get_mut(&order.vm).ok_or(gone)?;
            match vm.client.as_mut().and_then(|c| c.take_reply(command)) {
                Some(Err(e)) if !matches!(e, QmpError::Command { .. }) => {
                    Err(ActError::Lost(e.to_string()))
                }
                Some(answer) => {
                    vm.answered(command, answer.is_ok());
                    Ok(answer.map(drop)?)
                }
                None => {
                    vm.not_answered(command);
                    Err(ActError::Unanswered { ms: wait.as_millis() as u64 })
                }
            }
        };
        sent.into_iter().zip(orders).map(result).collect()
    }

    /// The size of the last order to a VM, if QEMU answered after its time was up that it has
    /// carried it out.
    pub fn done_late(&self, id: VmId) -> Option<Bytes> {
        self.vms.get(&id)?.done_late
    }

    fn send_order(&mut self, order: &BalloonOrder) -> Result<u64, ActError> {
        let gone = ActError::Gone { pid: order.vm.pid };
        let vm = self.vms.get_mut(&order.vm).ok_or_else(|| gone.clone())?;
        match life(&self.options.root, order.vm) {
            Life::Ended => Err(gone),
            // What cannot be looked at may still be given memory through its own connection.
            Life::Unknown if !order.gives => {
                Err(ActError::NoLink("its process cannot be looked at".into()))
            }
            Life::Alive | Life::Unknown => vm.order(order.to, order.gives),
        }
    }

    /// Puts back how often QEMU asked the guests for statistics before.
    pub fn restore_intervals(&mut self) {
        self.vms.values_mut().for_each(Vm::restore_interval);
        self.keep_intervals();
    }

    fn keep_intervals(&mut self) {
        let root = &self.options.root;
        let here = self.vms.iter().map(|(id, vm)| (*id, vm.interval_was));
        self.intervals.keep(here, |id| life(root, id) != Life::Ended);
    }

    /// Has QEMU ask these guests for statistics now rather than at the next
    /// interval. The answers are in a later sample.
    pub fn kick_stats(&mut self, vms: &[VmId]) {
        let at = LinuxHost::now();
        for id in vms {
            if let Some(vm) = self.vms.get_mut(id) {
                vm.kick(at);
            }
        }
    }
}

/// What may be done to the VM of this process.
fn access(options: &Options, owed: &HashSet<VmId>, process: &QemuProcess, claim: &Claim) -> Access {
    let settings = options.config.settings(&process.given, process.uuid.as_deref());
    let manage = settings.manage && !matches!(claim, Claim::Refused(_));
    Access {
        managed: manage || owed.contains(&process.id),
        any_socket: options.config.sockets == SocketUse::Any,
        look_only: options.look_only,
        agent: if manage { settings.agent } else { AgentUse::Off },
        private_ram: settings.private_ram,
        window_limit_ms: settings.window_limit_ms.unwrap_or(0),
        hands_off_ms: None,
    }
}

fn clients_of(vms: &mut BTreeMap<VmId, Vm>) -> impl Iterator<Item = &mut Client> {
    vms.values_mut().filter_map(|v| v.client.as_mut())
}

fn clients(vms: &mut BTreeMap<VmId, Vm>) -> Vec<&mut Client> {
    clients_of(vms).collect()
}

/// A failure becomes a problem of the host, and the value unknown.
fn noted<T>(
    problems: &mut Vec<Problem>,
    source: &str,
    result: Result<Option<T>, ProbeError>,
) -> Option<T> {
    let note = |e: &dyn Display| problem(None, source.to_owned(), e.to_string());
    result.unwrap_or_else(|e| {
        problems.push(note(&e));
        None
    })
}

#[cfg(test)]
mod tests;
