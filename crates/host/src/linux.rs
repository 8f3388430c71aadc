//! The Linux host: one [`LinuxHost::sample`] per tick, balloon commands, and a
//! sleep that ends early when the host or a VM needs attention.
//!
//! What is read of VMs in a tick shares one deadline. Orders, and the questions before an agent's
//! order, have one of the same length each. A source that fails becomes a [`Problem`]; nothing here
//! ends the tick. Connections are `vm.rs`'s; what is read of the kernel is `probe/`'s; this file
//! only joins.
//!
//! Here is what is kept between ticks and what a sample is made of; the steps of a tick and
//! what can be ordered have files of their own in `linux/`.

mod merging;
mod orders;
mod query;
mod refresh;
mod wait;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebb_core::config::{AgentUse, Config, Metadata};
use ebb_core::sample::{
    Claim, HostSample, Ksm, KsmStat, Problem, Sample, VmId, VmSample, ZeroWays,
};
use ebb_core::units::{Bytes, Stamp};

use crate::act::ksm_worker::KsmWorker;
use crate::act::zeros;
use crate::act::{self, Background};
use crate::hands_off::HandsOffs;
use crate::intervals::Intervals;
use crate::libvirt::Libvirt;
use crate::limits::MemoryLimits;
use crate::probe::cgroup::Version;
use crate::probe::discovery::Scanner;
use crate::probe::identity::claim;
use crate::probe::mappers::Search;
use crate::probe::process::{Life, life};
use crate::probe::psi::{self, PsiTrigger};
use crate::probe::qemu::QemuProcess;
use crate::probe::trust::TrustRules;
use crate::probe::vmpressure::PressureEvents;
use crate::probe::{ksm, meminfo, swaps, vmstat, zfs};
use crate::qmp::Client;
use crate::root::Root;
use crate::sys;
use crate::vm::{Access, Vm, noted, problem};
use crate::waker::Waker;

pub use self::orders::{ActError, BalloonOrder};

/// Most counts of what VMMs hold themselves that are begun in a second: each takes a thread.
const COUNTS: usize = 4;
/// Up to this many VMs, their files in `/proc` are kept open; with more, descriptors are for
/// their sockets.
const KEPT_OPEN: usize = 1000;

/// The mounts of RAM in files are looked at this often.
const RAM_FILES_EVERY: Duration = Duration::from_secs(5);
/// After this number of looks that found none, a VM is not looked at any more. A QEMU that starts may
/// not have its files yet.
const RAM_FILES_LOOKS: u32 = 3;
/// What touching new memory takes is measured this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// What the host is to be watched with.
#[derive(Clone, Debug)]
pub struct Options {
    pub root: Root,
    /// How long all VMs together may take to answer in a tick.
    pub deadline: Duration,
    /// Stall and window of the PSI trigger, microseconds; `None` for no trigger.
    pub psi_trigger_us: Option<(u32, u32)>,
    /// Where it is written down what KSM's knobs were; `None`: merging is off.
    pub ksm_note: Option<PathBuf>,
    pub config: Config,
    /// Nothing is set in any QEMU: for commands and dry runs that only look.
    pub look_only: bool,
    pub trust: TrustRules,
    /// How often `/proc` is scanned for new VMs; at once when one vanishes.
    pub scan_every: Duration,
    /// Where it is written down which VMs are left alone at the operator's request.
    pub hands_off: Option<PathBuf>,
    /// Where it is written down how often QEMU asked guests for statistics before.
    pub intervals: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            root: Root::default(),
            deadline: Duration::from_millis(200),
            psi_trigger_us: Some((100_000, 1_000_000)),
            ksm_note: None,
            config: Config::default(),
            look_only: false,
            trust: TrustRules::default(),
            scan_every: Duration::from_secs(2),
            hands_off: None,
            intervals: None,
        }
    }
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
    named: BTreeMap<String, VmId>,
    /// When the mounts of RAM in files were looked at.
    ram_files: Option<Instant>,
    /// The VMs that Ebb owes something.
    owed: HashSet<VmId>,
    /// The VMs that need not be asked in the next sample.
    resting: HashSet<VmId>,
    /// Where they were heard, by an earlier daemon.
    owed_at: BTreeMap<VmId, PathBuf>,
    scanner: Scanner,
    /// For VMs without a socket for Ebb.
    libvirt: Libvirt,
    scanned: Option<Instant>,
    scan_problems: Vec<Problem>,
    limits: MemoryLimits,
    trigger: Option<PsiTrigger>,
    /// The kernel gives none: said once, as PSI's averages are read each tick all the same.
    no_trigger: bool,
    /// Where there is no PSI of the pool, and when they last ended a sleep.
    notifications: Option<PressureEvents>,
    notified: Option<Instant>,
    /// What works beside the loop, by mechanism.
    background: Vec<Box<dyn Background>>,
    /// How this kernel can free zero pages, where that is wanted.
    zeros: Option<ZeroWays>,
    merger: Option<KsmWorker>,
    mappers: Search,
    /// `ksmd`, who else sets KSM, and when that was looked up.
    other_processes: ksm::OtherProcesses,
    /// Its counters of each VM.
    ksm_stats: ksm::Stats,
    /// What others merged when that was last read, and when.
    others_ksm: Option<(Instant, Option<Ksm>, BTreeMap<VmId, KsmStat>)>,
    /// When counts of what VMMs hold were last begun.
    counted: Option<Instant>,
    /// What a MiB of new memory costs, and when that was measured.
    touch: Option<(Instant, Option<u32>)>,
    /// When an agent was handed its VM's RAM last, and whose turn it was.
    attached_at: Option<Instant>,
    turn: Option<VmId>,
    waker: Waker,
}

impl LinuxHost {
    /// Opens what is kept open. VMs are looked for by the first sample. Fails
    /// only where the system has no file descriptor left.
    pub fn new(options: Options) -> std::io::Result<LinuxHost> {
        let (hands_off, unread) = HandsOffs::load(options.hands_off.clone(), LinuxHost::now());
        let waker = Waker::new()?;
        let merge = &options.config.merge;
        let merger = options.ksm_note.as_ref().map(|note| {
            KsmWorker::new(options.root.clone(), note.clone(), merge.clone(), waker.clone())
        });
        let libvirt = Libvirt::new(options.root.clone(), options.trust.containers)?;
        Ok(LinuxHost {
            trigger: None,
            no_trigger: false,
            notifications: None,
            notified: None,
            background: act::background(&options.root),
            zeros: merge.zeros.then(|| zeros::ways(&options.root)),
            merger,
            mappers: Search::default(),
            other_processes: ksm::OtherProcesses::default(),
            ksm_stats: ksm::Stats::default(),
            others_ksm: None,
            counted: None,
            touch: None,
            attached_at: None,
            turn: None,
            scanner: Scanner::new(options.trust.clone()),
            libvirt,
            limits: MemoryLimits::new(options.config.pool.clone()),
            intervals: Intervals::load(options.intervals.clone()),
            options,
            vms: BTreeMap::new(),
            hands_off,
            unread,
            named: BTreeMap::new(),
            ram_files: None,
            owed: HashSet::new(),
            resting: HashSet::new(),
            owed_at: BTreeMap::new(),
            scanned: None,
            scan_problems: Vec::new(),
            waker,
        })
    }

    pub fn now() -> Stamp {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Stamp(t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000)
    }

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

    /// Reads a sample where Ebb owes something to these processes: they are read whatever the
    /// configuration says of them. The sample names those that have certainly ended.
    pub fn sample_owed(&mut self, owed: &[VmId]) -> Sample {
        let (at, started) = (LinuxHost::now(), Instant::now());
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ms = wall.as_millis() as u64;
        let mut problems = Vec::new();
        let mut host = self.sample_host(&mut problems);
        self.owed = owed.iter().copied().collect();
        self.refresh(started);
        self.look_at_ram_files(started);
        self.allow(at, started);
        for id in owed {
            self.vms.get_mut(id).into_iter().for_each(|vm| vm.hurry(started));
        }
        problems.extend(self.scan_problems.iter().cloned());
        let unread = self.unread.iter().filter(|_| self.hands_off.is_unknown());
        problems.extend(unread.map(|why| problem(None, "hands-off".into(), why.clone())));
        self.limits.sample(&self.options.root, started, &mut host, &mut problems);
        self.query(started, at);
        self.keep_intervals();
        let vms = self.sample_vms(at, wall_ms, &mut problems);
        let root = &self.options.root;
        let gone = |id: &&VmId| !self.vms.contains_key(id) && life(root, **id) == Life::Ended;
        let ended = owed.iter().filter(gone).copied().collect();
        let mut sample = Sample { at, wall_ms, host, vms, ended, problems };
        self.sample_merging(&mut sample);
        self.resting.clear();
        sample
    }

    /// What may be done to each VM: nothing to one that is not managed, unless it is owed
    /// something.
    fn allow(&mut self, at: Stamp, now: Instant) {
        let (vms, root) = (&self.vms, &self.options.root);
        let is_there = |id: &VmId| vms.contains_key(id) || life(root, *id) != Life::Ended;
        self.hands_off.keep(at, is_there);
        let version = self.cgroups();
        for (id, vm) in &mut self.vms {
            let rests = self.resting.contains(id);
            let claim = match vm.claim.take() {
                Some(was) if rests => was,
                was => {
                    let claim = claim(root, &self.options.config, version, &vm.process);
                    // What was read of this process before holds where it cannot be read for a
                    // moment.
                    was.filter(|was| claim.is_unread() && !was.is_unread()).unwrap_or(claim)
                }
            };
            let claim = vm.claim.insert(claim).clone();
            let counts = has_metadata(&self.options, &vm.process) || self.owed.contains(id);
            vm.look_at_metadata(counts, now);
            vm.named = self.named.values().any(|named| named == id);
            vm.owed_at = self.owed_at.get(id).filter(|_| self.owed.contains(id)).cloned();
            vm.allow(Access {
                hands_off_ms: self.hands_off.left_ms(*id, at),
                ..access(&self.options, &self.owed, &vm.process, (&claim, vm.metadata()))
            });
        }
        if let Some(merger) = &self.merger {
            let left = |id: &&VmId| self.hands_off.left_ms(**id, at).is_some();
            merger.readers.leave_alone(self.vms.keys().filter(left).copied().collect());
        }
    }

    /// Where memory cgroups are, so that a VM's is found.
    fn cgroups(&self) -> Version {
        self.limits.hierarchy.as_ref().map_or(Version::V2, |h| h.version)
    }

    /// Measured anew each minute: it takes less than a millisecond. A tree of tests has none.
    fn touch_us(&mut self) -> Option<u32> {
        if !self.options.root.is_machine() {
            return None;
        }
        if self.touch.is_none_or(|(at, _)| at.elapsed() >= TOUCH_EVERY) {
            let time = sys::touch_time().ok();
            let us = time.and_then(|t| u32::try_from(t.as_micros()).ok());
            self.touch = Some((Instant::now(), us));
        }
        self.touch?.1
    }

    fn sample_host(&mut self, problems: &mut Vec<Problem>) -> HostSample {
        let touch_us = self.touch_us();
        let root = &self.options.root;
        HostSample {
            memory: noted(problems, "/proc/meminfo", meminfo::read_meminfo(root)),
            psi: noted(problems, psi::MEMORY, root.parse(psi::MEMORY, psi::parse_psi)),
            vmstat: noted(problems, "/proc/vmstat", vmstat::read_vmstat(root)),
            swaps: noted(problems, "/proc/swaps", swaps::read_swaps(root)).unwrap_or_default(),
            zeros: self.zeros,
            zfs_arc: noted(problems, "arcstats", zfs::read_arcstats(root)),
            zswap: noted(problems, "zswap", swaps::read_zswap(root).map(Some)).unwrap_or_default(),
            vmpressure: self.notifications.as_ref().map(PressureEvents::take),
            touch_us,
            ..HostSample::default()
        }
    }

    fn sample_vms(
        &mut self,
        at: Stamp,
        wall_ms: u64,
        problems: &mut Vec<Problem>,
    ) -> Vec<VmSample> {
        let (root, keep) = (&self.options.root, self.vms.len() <= KEPT_OPEN);
        let now = Instant::now();
        let counts = counts_due(&self.vms, &mut self.counted, now);
        let one = |(id, vm): (&VmId, &mut Vm)| {
            // One that was just found.
            if !vm.seen && !self.resting.contains(id) {
                vm.look(root, keep);
            }
            vm.count_own(root, now, counts.contains(id));
            let mut sample = vm.sample(at, wall_ms, problems);
            self.background.iter().for_each(|b| b.tell(*id, &mut sample.tasks));
            let busy = vm.shrinks(self.owed.contains(id))
                || vm.merging.acts()
                || self.merger.as_ref().is_some_and(|m| m.readers.reads(*id))
                || sample.tasks.is_busy();
            sample.hands_off.iter_mut().for_each(|h| h.done &= !busy);
            sample
        };
        self.vms.iter_mut().map(one).collect()
    }
}

/// The VMs whose VMMs' own memory is to be counted now, each second anew. Those that are due longest
/// come first.
fn counts_due(vms: &BTreeMap<VmId, Vm>, last: &mut Option<Instant>, now: Instant) -> Vec<VmId> {
    if last.is_some_and(|at| now - at < Duration::from_secs(1)) {
        return Vec::new();
    }
    *last = Some(now);
    let waits = |(id, vm): (&VmId, &Vm)| Some((vm.own_is_due(now)?, *id));
    let mut due: Vec<_> = vms.iter().filter_map(waits).collect();
    due.sort_unstable();
    due.into_iter().map(|(_, id)| id).take(COUNTS).collect()
}

/// Whether settings of this VM may stand in its libvirt's metadata and count.
fn has_metadata(options: &Options, process: &QemuProcess) -> bool {
    let section = options.config.settings(&process.given, process.args.uuid.as_deref());
    options.config.libvirt && section.own.manage != Some(false)
}

/// What may be done to the VM of this process.
fn access(
    options: &Options,
    owed: &HashSet<VmId>,
    process: &QemuProcess,
    (claim, metadata): (&Claim, &Metadata),
) -> Access {
    let settings = options.config.settings(&process.given, process.args.uuid.as_deref());
    let settings = settings.with(metadata, Bytes::ZERO);
    let refused = matches!(claim, Claim::Refused(_)) || matches!(metadata, Metadata::Wrong(_));
    let manage = settings.manage && !refused;
    let unread = matches!(metadata, Metadata::Unread(_)) || claim.is_unread();
    Access {
        managed: manage || owed.contains(&process.id),
        sockets: options.config.sockets,
        libvirt: options.config.libvirt || owed.contains(&process.id),
        look_only: options.look_only || unread || !(manage || owed.contains(&process.id)),
        agent: if manage && !unread { settings.agent } else { AgentUse::Off },
        agent_then: if manage { settings.agent } else { AgentUse::Off },
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

#[cfg(test)]
mod tests;
