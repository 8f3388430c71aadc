//! Merging beside the loop: KSM's knobs, looks at mappings, scans.
//!
//! What can take long never holds up a tick. One thread writes KSM's knobs (a write
//! waits for `ksmd`'s batch), one looks into VMs' mappings (the kernel walks their
//! page tables for it), one scans. Each tick hands over what the policy decided
//! and takes what is there. Threads that read VMs run when nothing else needs the CPU, or,
//! on a host that is short, with the weight of `ksmd`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebb_core::config::MergeConfig;
use ebb_core::plan::ScanOrder;
use ebb_core::policy::merge::{Block, Candidates, KsmdOrder, ranges};
use ebb_core::range::parts;
use ebb_core::sample::{ScanSample, VmId};
use ebb_core::units::{Bytes, PAGE, Stamp};

use super::ksmd_throttle::KsmdThrottle;
use super::vm_mergeable::{KsmState, LEAST_RAM, ksm_state};
use super::worker;
use crate::linux::LinuxHost;
use crate::lock;
use crate::root::Root;
use crate::scan::agents::{HashLink, lift};
use crate::scan::memory_limit::{one_in, room};
use crate::scan::rate_limit::thread_cpu;
use crate::scan::readers::Readers;
use crate::scan::sampling::estimate;
use crate::scan::{
    Changes, Dial, Found, Limits, Options, Scan, ScanOutcome, Scanner, TOO_LARGE, Target,
};
use crate::sys::{Range, trim_heap};
use crate::waker::Waker;

/// Looks that may wait: one for each of many VMs.
const LOOKS: usize = 1024;
/// Orders that may wait: where more do, the thread does not come to them.
const ORDERS: usize = 16;
/// A look that takes longer than this holds up those at other VMs.
const LOOK_HANGS: Duration = Duration::from_secs(30);
/// Orders are repeated after this: another program may set the knobs too.
const REPEAT: Duration = Duration::from_secs(5);
/// Tables of this size suffice to estimate the share of duplicates in 20 GiB.
const SAMPLED: Bytes = Bytes::mib(96);
/// Pieces of RAM that an agent may have; what it says of more does not count.
const SEGMENTS_MOST: usize = 256;
/// A spot check reads one of this many pieces of 16 KiB: of 16 MiB that have changed, four.
const SPOT_CHECK_ONE_IN: u32 = 256;

/// What a look into a VM's mappings showed.
#[derive(Clone, Debug)]
pub struct MappingsLook {
    /// When it began; what was ordered later is not in it.
    pub begun: Instant,
    /// When it began, for the sample.
    pub at: Stamp,
    /// Processor time that it took.
    pub took: Duration,
    /// What they show, or why that is not known.
    pub state: Result<KsmState, String>,
}

#[derive(Debug)]
enum Job {
    Order(KsmdOrder),
    Release(Sender<Result<(), String>>),
}

#[derive(Debug)]
struct ScanJob {
    /// With name and share group.
    vms: Vec<(VmId, String, String)>,
    /// Those that hash their VM's pages.
    agents: HashMap<VmId, Arc<HashLink>>,
    order: ScanOrder,
    dial: Arc<Dial>,
    readers: Arc<Readers>,
}

/// Ranges, and what is to be had in them.
pub type Worth = (Vec<Range>, Candidates);

/// What the threads have found and done.
#[derive(Debug, Default)]
pub struct WorkerResults {
    pub scan: ScanSample,
    /// What the last scan found, by VM.
    pub found: BTreeMap<VmId, Candidates>,
    /// What is worth opening range by range, and what is to be had in that.
    pub ranges: BTreeMap<VmId, Worth>,
    pub looks: BTreeMap<VmId, MappingsLook>,
    looking: BTreeSet<VmId>,
    /// The look under way.
    look_since: Option<(VmId, Instant)>,
    /// What is wrong with KSM's knobs.
    pub knobs: Option<String>,
}

type Shared = Arc<Mutex<WorkerResults>>;

/// Takes orders and tells the results. Nothing runs before the first.
#[derive(Debug)]
pub struct KsmWorker {
    root: Root,
    note: PathBuf,
    config: MergeConfig,
    wake: Waker,
    jobs: Option<SyncSender<Job>>,
    looks: Option<SyncSender<VmId>>,
    scans: Option<SyncSender<ScanJob>>,
    results: Shared,
    sent: Option<(KsmdOrder, Instant)>,
    dial: Arc<Dial>,
    pub readers: Arc<Readers>,
}

impl KsmWorker {
    /// `note`: where what KSM's knobs were is written down. `wake` is used when something
    /// has come to its end.
    pub fn new(root: Root, note: PathBuf, config: MergeConfig, wake: Waker) -> KsmWorker {
        let (jobs, looks, scans, results) = (None, None, None, Shared::default());
        let (dial, readers, sent) = (Arc::new(Dial::new(0.0)), Arc::default(), None);
        KsmWorker { root, note, config, wake, jobs, looks, scans, results, sent, dial, readers }
    }

    /// The share of a core that a scan may use from now on, also one that is under way.
    pub fn pace(&self, cores: f64) {
        self.dial.set(cores);
    }

    pub fn order(&mut self, order: &KsmdOrder) {
        let same =
            self.sent.as_ref().is_some_and(|(o, at)| alike(o, order) && at.elapsed() < REPEAT);
        if !same && self.send(Job::Order(order.clone())) {
            self.sent = Some((order.clone(), Instant::now()));
        }
    }

    /// Has a VM's mappings looked at, unless that is under way.
    pub fn look(&mut self, vm: VmId) {
        let looks = self.looks.get_or_insert_with(|| {
            let (root, results) = (self.root.clone(), self.results.clone());
            worker("merge-looks", LOOKS, move |vms| look_at_all(&root, &vms, &results))
        });
        let mut results = lock(&self.results);
        if results.looking.insert(vm) && looks.try_send(vm).is_err() {
            results.looking.remove(&vm);
        }
    }

    /// Has VMs scanned, unless a scan is under way; `known`: a VM's name, and its agent if
    /// that hashes pages.
    pub fn scan(
        &mut self,
        order: &ScanOrder,
        mut known: impl FnMut(VmId) -> Option<(String, Option<Arc<HashLink>>)>,
    ) {
        let (mut vms, mut agents) = (Vec::new(), HashMap::new());
        for (id, group) in &order.vms {
            let Some((name, agent)) = known(*id) else { continue };
            vms.push((*id, name, group.clone()));
            agents.extend(agent.map(|a| (*id, a)));
        }
        self.pace(order.cores);
        let (order, dial, readers) = (order.clone(), self.dial.clone(), self.readers.clone());
        let job = ScanJob { vms, agents, order, dial, readers };
        let scans = self.scans.get_or_insert_with(|| {
            let (root, results, wake) =
                (self.root.clone(), self.results.clone(), self.wake.clone());
            worker("merge-scan", 1, move |jobs| scan(&root, &jobs, &results, &wake))
        });
        let mut results = lock(&self.results);
        if results.scan.busy {
            return;
        }
        match scans.try_send(job) {
            Ok(()) => results.scan.busy = true,
            Err(e) => results.scan.error = Some(format!("cannot be ordered: {e}")),
        }
    }

    /// What is known. The threads wait as long as it is held.
    pub fn results(&self) -> MutexGuard<'_, WorkerResults> {
        lock(&self.results)
    }

    /// The VM whose mappings the kernel does not tell for [`LOOK_HANGS`].
    pub fn hangs_at(&self) -> Option<VmId> {
        let (vm, since) = lock(&self.results).look_since?;
        (since.elapsed() >= LOOK_HANGS).then_some(vm)
    }

    pub fn keep(&mut self, alive: impl Fn(&VmId) -> bool) {
        let mut results = lock(&self.results);
        results.looks.retain(|id, _| alive(id));
        results.found.retain(|id, _| alive(id));
        results.ranges.retain(|id, _| alive(id));
    }

    pub fn release(&mut self, patience: Duration) -> Result<(), String> {
        self.sent = None;
        if self.jobs.is_none() {
            return Ok(());
        }
        let (send, receive) = channel();
        if !self.send(Job::Release(send)) {
            return Err("too much is under way".into());
        }
        receive.recv_timeout(patience).map_err(|e| format!("not done in {patience:?}: {e}"))?
    }

    fn send(&mut self, job: Job) -> bool {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (note, results) = (self.note.clone(), self.results.clone());
            let keeper =
                KsmdThrottle::new(self.root.clone(), note, self.config.clone(), self.wake.clone());
            worker("ksm", ORDERS, move |jobs| work(keeper, &jobs, &results))
        });
        jobs.try_send(job).is_ok()
    }
}

/// Whether two orders are the same. The speed is left out: [`KsmdThrottle`] corrects it.
fn alike(a: &KsmdOrder, b: &KsmdOrder) -> bool {
    let what = |order: &KsmdOrder| match order {
        KsmdOrder::Rest { .. } => None,
        KsmdOrder::Run { cores, scans, .. } => Some((*cores, *scans)),
    };
    what(a) == what(b)
}

fn work(mut keeper: KsmdThrottle, jobs: &Receiver<Job>, results: &Mutex<WorkerResults>) {
    loop {
        let job = match keeper.pause() {
            None => jobs.recv().map_err(RecvTimeoutError::from),
            Some(pause) => jobs.recv_timeout(pause),
        };
        match job {
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(e) = keeper.keep() {
                    lock(results).knobs = Some(e.to_string());
                }
            }
            Ok(Job::Order(order)) => {
                let done = keeper.order(&order);
                lock(results).knobs = done.err().map(|e| e.to_string());
            }
            Ok(Job::Release(done)) => {
                let _ = done.send(keeper.release().map_err(|e| e.to_string()));
            }
        }
    }
}

fn look_at_all(root: &Root, vms: &Receiver<VmId>, results: &Mutex<WorkerResults>) {
    while let Ok(vm) = vms.recv() {
        lock(results).look_since = Some((vm, Instant::now()));
        let look = look(root, vm);
        let mut results = lock(results);
        results.look_since = None;
        results.looking.remove(&vm);
        results.looks.insert(vm, look);
    }
}

fn look(root: &Root, vm: VmId) -> MappingsLook {
    let (begun, at, used) = (Instant::now(), LinuxHost::now(), thread_cpu());
    let state = ksm_state(root, vm).map_err(|e| e.to_string());
    MappingsLook { begun, at, took: thread_cpu().saturating_sub(used), state }
}

fn scan(root: &Root, jobs: &Receiver<ScanJob>, results: &Mutex<WorkerResults>, wake: &Waker) {
    let mut scanner = None;
    let mut last: Vec<Target> = Vec::new();
    while let Ok(job) = jobs.recv() {
        if scanner.is_none() {
            match Scanner::new(root.clone()) {
                Ok(new) => scanner = Some(new),
                Err(e) => lock(results).scan.error = Some(format!("no random bytes: {e}")),
            }
        }
        if let Some(scanner) = &mut scanner {
            scanner.use_agents(job.agents.clone());
            if !job.dial.is_gentle() {
                job.agents.keys().for_each(|id| lift(root, *id));
            }
            match job.order.spot_check {
                true => spot_check(scanner, &last, &job, results),
                false => {
                    last = carry_out(root, scanner, &job, results);
                    trim_heap();
                }
            }
        }
        lock(results).scan.busy = false;
        wake.wake();
    }
}

fn options(job: &ScanJob) -> Options {
    let limits = Limits { cores: None, bytes_per_second: Some(job.order.bytes_per_second) };
    let (threads, dial) = (Some(job.order.threads as usize), Some(Arc::clone(&job.dial)));
    let readers = Arc::clone(&job.readers);
    Options { threads, limits, dial, readers, filter: true, ..Options::default() }
}

/// Looks whether pages are as the last scan saw them; what it found of where they are
/// is used again, since to read that costs more than the check.
fn spot_check(
    scanner: &mut Scanner,
    last: &[Target],
    job: &ScanJob,
    results: &Mutex<WorkerResults>,
) {
    // What was opened since may be merged by now.
    let target = |t: &Target| {
        let mut open = t.open.clone();
        if let Some((ranges, _)) = lock(results).ranges.get(&t.id) {
            open.extend(ranges);
        }
        Target { merged: united(open), ..t.clone() }
    };
    let targets: Vec<Target> = last.iter().map(target).collect();
    let salt = lock(results).scan.spot_checks + 1;
    let (one_in, changes, threads) = (SPOT_CHECK_ONE_IN, Changes::SpotCheck, Some(1));
    let scan = scanner.scan(&targets, &Options { threads, one_in, salt, changes, ..options(job) });
    let changed: u64 = scan.vms.iter().map(|v| v.pages.changed).sum();
    let sample = &mut lock(results).scan;
    sample.spot_checks = salt;
    sample.spot_checks_since += 1;
    sample.changed = Some(Bytes::pages(changed * u64::from(one_in)));
    sample.at = LinuxHost::now();
    sample.cpu_s += scan.cpu.as_secs_f64();
}

/// All of these places, sorted and apart.
fn united(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_by_key(|r| r.start);
    ranges.dedup_by(|next, last| {
        let joins = next.start <= last.end();
        if joins {
            last.len = last.len.max(next.end() - last.start);
        }
        joins
    });
    ranges
}

fn carry_out(
    root: &Root,
    scanner: &mut Scanner,
    job: &ScanJob,
    results: &Mutex<WorkerResults>,
) -> Vec<Target> {
    let (mut held, mut targets) = (Bytes::ZERO, Vec::new());
    let (mut without, mut too_large) = (Vec::new(), None);
    for (id, name, group) in &job.vms {
        let Ok(Some(found)) = Found::look(root, *id, name, group) else {
            without.push(*id);
            continue;
        };
        held += found.held();
        if let Some((_, why @ TOO_LARGE)) = found.refused {
            too_large = Some(format!("{name}: {why}"));
        }
        match found.target {
            Some(target) => targets.push(target),
            None => without.push(*id),
        }
    }
    // Whole VMs are opened where there is no agent, and a sample tells which.
    let most = if job.agents.is_empty() { SAMPLED } else { Bytes(u64::MAX) };
    let one_in = one_in(held, room(root).min(most));
    let changes = if one_in == 1 { Changes::Note } else { Changes::Ignore };
    let scan = scanner.scan(&targets, &Options { one_in, changes, ..options(job) });
    let refused = scan.vms.iter().find_map(|v| match &v.outcome {
        ScanOutcome::Refused(why) => Some(format!("{}: {why}", v.target.name)),
        _ => {
            let why = job.agents.get(&v.target.id).and_then(|a| a.failure())?;
            Some(format!("{}: {why}: read from outside", v.target.name))
        }
    });
    let mut found = candidates(&scan, one_in);
    // Nothing of these can be scanned. Without an entry a new scan would be due for them at once,
    // and so it would for those that cannot be read.
    found.extend(without.into_iter().map(|id| (id, Candidates::default())));
    // A sample does not tell where duplicates lie. To choose takes seconds where there is much RAM,
    // and the loop waits for the results.
    let ranges = (one_in == 1).then(|| worth_opening(&scan, &job.agents));
    let mut results = lock(results);
    if let Some(ranges) = ranges {
        results.ranges = ranges;
    }
    results.found = found;
    results.scan = ScanSample {
        number: results.scan.number + 1,
        busy: true,
        at: LinuxHost::now(),
        seconds: scan.time.as_secs_f64(),
        cpu_s: results.scan.cpu_s + scan.cpu.as_secs_f64(),
        read: scan.read,
        by_agents: scan.by_agents,
        by_lines: scan.by_lines,
        table: scan.table,
        one_in,
        spot_checks: results.scan.spot_checks,
        error: refused.or(too_large),
        ..ScanSample::default()
    };
    targets
}

/// What lies in one of the mappings and in what an agent says that it has: RAM, and not the memory
/// of devices.
fn common(mappings: &[Range], of_agent: &[Range]) -> Vec<Range> {
    let said = united(of_agent[..of_agent.len().min(SEGMENTS_MOST)].to_vec());
    let parts = mappings.iter().flat_map(|mapping| parts(*mapping, &said));
    parts.filter_map(|(part, is_said)| is_said.then_some(part)).collect()
}

/// What of each VM is worth opening range by range.
fn worth_opening(scan: &Scan, agents: &HashMap<VmId, Arc<HashLink>>) -> BTreeMap<VmId, Worth> {
    let scanned = scan.vms.iter().filter(|v| v.outcome == ScanOutcome::Scanned);
    let one = |v: &crate::scan::VmResult| {
        let blocks: Vec<Block> = v.blocks.iter().collect();
        let agent = agents.get(&v.target.id);
        let ram = agent.map_or_else(|| v.target.ram.clone(), |a| common(&v.target.ram, a.ram()));
        let ram: Vec<Range> = ram.into_iter().filter(|r| r.len >= LEAST_RAM).collect();
        let goes = (v.split.within + v.split.between).0 / PAGE;
        let goes = goes as f64 / v.duplicates.max(1) as f64;
        (v.target.id, ranges(&blocks, &v.target.open, &ram, goes))
    };
    scanned.map(one).collect()
}

/// What was found of each VM, nothing where it cannot be read. From a sample: the likely number of
/// duplicates, divided as the duplicates that were seen.
fn candidates(scan: &Scan, one_in: u32) -> BTreeMap<VmId, Candidates> {
    let seen: u64 = scan.vms.iter().map(|v| v.duplicates).sum();
    let likely = estimate(&scan.moments, one_in).likely.0 / PAGE;
    let part = |duplicates: u64| (likely as f64 * duplicates as f64 / seen.max(1) as f64) as u64;
    let scanned = |v: &crate::scan::VmResult| Candidates {
        pages: v.pages.read.saturating_mul(one_in.into()),
        zeros: v.pages.zero.saturating_mul(one_in.into()),
        duplicates: match one_in {
            1 => (v.split.within + v.split.between).0 / PAGE,
            _ => part(v.duplicates),
        },
    };
    let there = scan.vms.iter().filter(|v| v.outcome != ScanOutcome::Ended);
    let one = |v: &crate::scan::VmResult| match v.outcome {
        ScanOutcome::Scanned => scanned(v),
        _ => Candidates::default(),
    };
    there.map(|v| (v.target.id, one(v))).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::ksm::{self, tests::knob};
    use super::*;
    use crate::testing::{Tree, eventually, within_a_minute};

    fn scene() -> (Tree, KsmWorker) {
        let knobs = [("run", "1"), ("pages_to_scan", "77"), ("sleep_millisecs", "9")];
        let (tree, wake) = (ksm::tests::tree(&knobs), Waker::new().unwrap());
        let note = tree.path("/ksm.json");
        let merger = KsmWorker::new(tree.clone(), note, MergeConfig::default(), wake);
        (tree, merger)
    }

    const REST: KsmdOrder = KsmdOrder::Rest { why: String::new() };

    #[test]
    fn orders_reach_the_knobs_and_release_puts_them_back() {
        let (root, mut merger) = scene();
        let (batch, sleep_ms, cores, scans, why) = (500, 20, 0.1, u64::MAX, String::new());
        merger.order(&KsmdOrder::Run { batch, sleep_ms, cores, scans, why });
        eventually(|| knob(&root, "pages_to_scan") == "500");
        assert!(merger.note.exists(), "written down before");
        // Somebody else sets it; the order comes again.
        merger.sent = None;
        root.put("/sys/kernel/mm/ksm/run", "1");
        merger.order(&REST);
        eventually(|| knob(&root, "run") == "0");
        merger.release(Duration::from_secs(20)).unwrap();
        assert_eq!((knob(&root, "run"), knob(&root, "pages_to_scan")), ("1".into(), "77".into()));
        assert!(!merger.note.exists());
    }

    #[test]
    fn a_vm_whose_mappings_the_kernel_does_not_tell_holds_up_no_order() {
        let (root, mut merger) = scene();
        let vm = VmId { pid: 4_000_000, start: 1 };
        let smaps = root.pipe("/proc/4000000/smaps");
        merger.look(vm);
        within_a_minute(|| merger.results().look_since);
        assert_eq!(merger.hangs_at(), None);
        merger.order(&REST);
        eventually(|| knob(&root, "run") == "0");
        lock(&merger.results).look_since = Some((vm, Instant::now() - LOOK_HANGS));
        assert_eq!(merger.hangs_at(), Some(vm));
        drop(File::options().write(true).open(&smaps).unwrap());
        within_a_minute(|| merger.results().looks.get(&vm).cloned());
        assert_eq!(merger.hangs_at(), None);
    }

    #[test]
    fn what_cannot_be_looked_at_is_told_and_nothing_is_a_scan_too() {
        let (_root, mut merger) = scene();
        let vm = VmId { pid: 4_000_000, start: 1 };
        merger.look(vm);
        let look = within_a_minute(|| merger.results().looks.get(&vm).cloned());
        assert!(look.state.unwrap_err().contains("has ended"));
        let order = ScanOrder {
            vms: vec![(vm, "g".into())],
            spot_check: false,
            cores: 1.0,
            threads: 1,
            bytes_per_second: 1e9,
            reason: String::new(),
        };
        merger.scan(&order, |_| Some(("a".into(), None)));
        let scan = within_a_minute(|| {
            let scan = merger.results().scan.clone();
            (scan.number == 1 && !scan.busy).then_some(scan)
        });
        // Else it would be scanned as a new one again and again.
        let nothing = Candidates::default();
        assert_eq!((scan.read, merger.results().found.get(&vm)), (Bytes::ZERO, Some(&nothing)));
        merger.keep(|_| false);
        assert!(merger.results().looks.is_empty());
    }

    #[test]
    fn what_an_agent_says_of_its_ram_counts_where_there_is_a_mapping() {
        let r = |start, len| Range { start, len };
        let mappings = [r(10, 20), r(40, 10), r(1 << 40, 64)];
        let said = [r(0, 15), r(15, 5), r(25, 20), r(45, u64::MAX)];
        let both = [r(10, 10), r(25, 5), r(40, 10), r(1 << 40, 64)];
        assert_eq!(common(&mappings, &said), both);
        assert_eq!(common(&mappings, &[]), []);
    }

    #[test]
    fn places_that_overlap_are_united() {
        let ranges = |list: &[(u64, u64)]| -> Vec<Range> {
            list.iter().map(|&(start, end)| Range { start, len: end - start }).collect()
        };
        let all = united(ranges(&[(5, 9), (0, 2), (1, 3), (8, 12), (9, 10), (20, 21), (12, 13)]));
        assert_eq!(all, ranges(&[(0, 3), (5, 13), (20, 21)]));
        assert_eq!(united(Vec::new()), []);
    }
}
