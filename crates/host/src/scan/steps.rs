//! The threads of a scan: rounds, the work of a thread, and what goes wrong with it.
//!
//! A [`Job`] is one scan; in each of its rounds every [`Worker`] takes window after window. What
//! each [`Round`] does with one window of one VM stands here: read what is in memory, sift what
//! is known by lines, read the rest whole. How pages are read and counted has files in `steps/`.

mod counts;
mod reading;
mod windows;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Error, Result};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ebb_core::page_hash::Key;
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, PAGE};
use rustix::io::Errno;

use self::windows::{GENTLE_WINDOW, PIECE, SAMPLE, SPOT_CHECK_WINDOW, WINDOW, Windows};
use super::agents::HashLink;
use super::duplicate_filter::DuplicateFilter;
use super::page_hashes::PageHashes;
use super::rate_limit::{Pace, thread_cpu};
use super::savings::Blocks;
use super::table::{Filler, Table, VMS_MAX};
use super::walk::{ListedPages, Runs, Walker};
use super::{Changes, Options, Pages, ScanOutcome, Scanner, Target};
use crate::probe::process::{Life, life};
use crate::root::{Root, is_absent};
use crate::sys::{Range, set_idle};

/// What is done window by window, for all VMs, before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    /// What is in memory is read, by agents perhaps no more than lines of it.
    All,
    /// Pages of which only lines were read are dropped if those show no duplicate.
    Sift,
    Whole,
}

pub(super) struct Job<'a> {
    root: &'a Root,
    key: &'a Key,
    /// What is known of each VM's pages, where that is asked for.
    tags: Vec<Option<&'a PageHashes>>,
    agents: &'a HashMap<VmId, Arc<HashLink>>,
    /// Memory gone through, that by agents, and that by lines alone, pages.
    read: AtomicU64,
    by_agents: AtomicU64,
    by_lines: AtomicU64,
    round: Round,
    /// What is known by lines.
    filter: Option<DuplicateFilter>,
    targets: &'a [Target],
    options: &'a Options,
    pace: &'a Pace,
    vms: Vec<VmState>,
    groups: Vec<usize>,
    blocks: Vec<Blocks>,
    windows: Vec<Windows>,
    /// Threads so far: each begins with a VM of its own.
    threads: AtomicUsize,
    table: Table,
    listed: ListedPages,
}

#[derive(Default)]
struct VmState {
    /// Set when it is over before all of it was read.
    outcome: OnceLock<ScanOutcome>,
    counts: [AtomicU64; 7],
}

impl VmState {
    /// The first outcome counts.
    fn end(&self, outcome: ScanOutcome) {
        let _ = self.outcome.set(outcome);
    }

    fn outcome(&self) -> ScanOutcome {
        self.outcome.get().cloned().unwrap_or(ScanOutcome::Scanned)
    }

    fn add(&self, p: &Pages) {
        let fields = [p.held, p.merged, p.free, p.read, p.zero, p.changed, p.lost];
        for (cell, n) in self.counts.iter().zip(fields) {
            cell.fetch_add(n, Relaxed);
        }
    }

    fn pages(&self) -> Pages {
        let [held, merged, free, read, zero, changed, lost] =
            std::array::from_fn(|i| self.counts[i].load(Relaxed));
        Pages { held, merged, free, read, zero, changed, lost }
    }
}

struct Worker<'j, 'a> {
    job: &'j Job<'a>,
    filler: Filler<'j>,
    /// The VM at hand, and what was seen of it in the window at hand.
    vm: usize,
    pages: Pages,
    walker: Option<(usize, Walker)>,
    runs: Runs,
    /// The memory of the VM at hand, where some of it is merged.
    memory: Option<File>,
    buffer: Vec<u8>,
    cpu: Duration,
    /// Whether it runs only when nothing else needs the CPU, once that is settled.
    idle: Option<bool>,
}

impl<'a> Job<'a> {
    pub fn new(
        scanner: &'a Scanner,
        targets: &'a [Target],
        options: &'a Options,
        pace: &'a Pace,
    ) -> Job<'a> {
        let Scanner { root, key, tags, agents } = scanner;
        let targets = &targets[..targets.len().min(VMS_MAX)];
        let mut numbers = BTreeMap::new();
        let mut number = |name: &'a str| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        let noted = options.changes != Changes::Ignore;
        let all = options.changes == Changes::Note && options.one_in() == 1;
        let by_agents = targets.iter().any(|t| agents.contains_key(&t.id));
        let held = targets.iter().map(|t| t.held).sum::<Bytes>();
        let filter =
            (options.filter && all && by_agents).then(|| DuplicateFilter::new(held.0 / PAGE));
        Job {
            root,
            key,
            tags: targets.iter().map(|t| tags.get(&t.id).filter(|_| noted)).collect(),
            agents,
            read: AtomicU64::new(0),
            by_agents: AtomicU64::new(0),
            by_lines: AtomicU64::new(0),
            round: Round::All,
            filter,
            targets,
            options,
            pace,
            vms: targets.iter().map(|_| VmState::default()).collect(),
            groups: targets.iter().map(|t| number(&t.group)).collect(),
            blocks: targets.iter().map(|t| Blocks::new(&t.ram)).collect(),
            windows: Vec::new(),
            threads: AtomicUsize::new(0),
            table: Table::default(),
            listed: ListedPages::default(),
        }
    }

    /// Reads everything; `watch` runs beside the threads until they are done. Returns the
    /// size of the tables at their largest, bytes.
    pub fn read(&mut self, threads: usize, watch: impl Fn(&dyn Fn() -> bool)) -> u64 {
        self.go_over(Round::All, threads, &watch);
        let filter = self.filter.as_ref().map_or(0, DuplicateFilter::bytes);
        let size = self.table_bytes() + filter;
        if self.filter.is_some() {
            self.go_over(Round::Sift, threads, &watch);
            self.filter = None;
            self.go_over(Round::Whole, threads, &watch);
        }
        size.max(self.table_bytes())
    }

    fn go_over(&mut self, round: Round, threads: usize, watch: impl Fn(&dyn Fn() -> bool)) {
        let size = if self.pace.is_gentle() { GENTLE_WINDOW } else { WINDOW };
        let windows = |t: &Target| match (self.agents.get(&t.id), self.options.changes) {
            (Some(agent), Changes::SpotCheck) => Windows::of(t, &agent.ram, SPOT_CHECK_WINDOW),
            (agent, _) => Windows::of(t, agent.map_or(&[][..], |a| &a.ram[..]), size),
        };
        self.windows = self.targets.iter().map(windows).collect();
        self.round = round;
        let job = &*self;
        let running = AtomicUsize::new(threads);
        let watcher = std::thread::current();
        std::thread::scope(|s| {
            for _ in 0..threads {
                let (running, watcher) = (&running, watcher.clone());
                s.spawn(move || {
                    Worker::new(job).work();
                    running.fetch_sub(1, Relaxed);
                    watcher.unpark();
                });
            }
            watch(&|| running.load(Relaxed) == 0);
        });
    }

    /// Gives this thread its weight, where that is to be another than `now`.
    fn settle(&self, now: &mut Option<bool>) {
        // A host that is short waits for what is found, and guests may take all CPUs.
        let idle = self.options.dial.as_ref().is_none_or(|d| d.is_gentle());
        if !self.options.hurry && *now != Some(idle) {
            // Refused in some containers; the scan is then an ordinary load.
            let _ = set_idle(None, idle);
            *now = Some(idle);
        }
    }

    /// Memory gone through, of that by agents, and of that by lines alone.
    pub fn read_bytes(&self) -> (Bytes, Bytes, Bytes) {
        let pages = |n: &AtomicU64| Bytes::pages(n.load(Relaxed));
        (pages(&self.read), pages(&self.by_agents), pages(&self.by_lines))
    }

    fn table_bytes(&self) -> u64 {
        // A frame number takes eight bytes and as much again in a hash set.
        self.table.bytes() + self.listed.count() as u64 * 16
    }
}

impl<'j, 'a> Worker<'j, 'a> {
    fn new(job: &'j Job<'a>) -> Worker<'j, 'a> {
        Worker {
            job,
            filler: job.table.filler(),
            vm: 0,
            pages: Pages::default(),
            walker: None,
            runs: Runs::default(),
            memory: None,
            buffer: vec![0; PIECE as usize],
            cpu: thread_cpu(),
            idle: None,
        }
    }

    fn work(mut self) {
        let job = self.job;
        job.settle(&mut self.idle);
        let first = job.threads.fetch_add(1, Relaxed);
        // An agent does one window at a time: where there are several VMs no thread waits.
        for i in 0..job.targets.len() {
            let vm = (first + i) % job.targets.len();
            while let Some(window) = job.windows[vm].take() {
                if job.vms[vm].outcome.get().is_some() {
                    break;
                }
                let Some(_inside) = job.options.readers.enter(job.targets[vm].id) else {
                    job.vms[vm].end(ScanOutcome::Ended);
                    break;
                };
                (self.vm, self.pages) = (vm, Pages::default());
                let done = match job.round {
                    Round::All => self.window(window),
                    Round::Sift => self.sift(window),
                    Round::Whole => self.whole(window),
                };
                if let Err(e) = done {
                    job.vms[vm].end(outcome_of(&e, &job.targets[vm]));
                }
                if life(job.root, job.targets[vm].id) != Life::Alive {
                    // What was read last may be another process's.
                    job.vms[vm].end(ScanOutcome::Ended);
                }
                job.vms[vm].add(&self.pages);
                job.read.fetch_add(self.pages.read, Relaxed);
            }
        }
    }

    /// Bytes that were read; `others`: processor time beside this thread's.
    fn account(&mut self, bytes: u64, others: Duration) {
        let cpu = thread_cpu();
        let used = cpu.saturating_sub(self.cpu);
        self.cpu = cpu;
        self.job.pace.used(bytes, used + others);
        self.job.settle(&mut self.idle);
    }
}

impl Worker<'_, '_> {
    fn window(&mut self, window: Range) -> Result<()> {
        let (job, vm) = (self.job, self.vm);
        let target = &job.targets[vm];
        let spot_check = job.options.changes == Changes::SpotCheck;
        if spot_check && let Some(agent) = job.agent(vm, window) {
            // It lists pages itself, and pins none.
            let pieces = job.spot_check_pieces(vm, window);
            // What it leaves out when it fails others will look at.
            return self.ask(Some(agent), &pieces, false).map(drop);
        }
        if self.walker.as_ref().is_none_or(|(of, _)| *of != vm) {
            let (pid, merged) = (target.id.pid, !target.merged.is_empty());
            self.memory = None;
            if merged {
                self.memory = Some(File::open(job.root.path(format!("/proc/{pid}/mem")))?);
            }
            self.walker = Some((vm, Walker::open(job.root, pid, merged, job.options.entries)?));
        }
        let Some((_, walker)) = self.walker.as_mut() else { return Ok(()) };
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        let chosen = if spot_check { job.spot_check_pieces(vm, window) } else { vec![window] };
        for part in chosen {
            self.pages.merged += walker.runs(part, &target.merged, &job.listed, &mut runs)?;
        }
        self.pages.held += runs.pages();
        if job.options.one_in > 1 && !spot_check {
            let sample = |runs: &[Range]| job.sample(vm, runs, SAMPLE);
            runs = Runs { own: sample(&runs.own), shared: sample(&runs.shared) };
        }
        let agent = job.agent(vm, window);
        let done = self.read(agent, &runs.own, false);
        let done = done.and_then(|()| self.read(agent, &runs.shared, true));
        self.runs = runs;
        done
    }

    /// Leaves out pages that are alone by their lines.
    fn sift(&mut self, window: Range) -> Result<()> {
        let (job, vm) = (self.job, self.vm);
        if let (Some(filter), Some(tags)) = (&job.filter, job.tags[vm]) {
            let alone = job.blocks[vm].sift(window, tags, filter);
            job.by_lines.fetch_add(alone, Relaxed);
            self.account(0, Duration::ZERO);
        }
        Ok(())
    }

    /// Has pages read whole of which only lines were read.
    fn whole(&mut self, window: Range) -> Result<()> {
        let (job, vm) = (self.job, self.vm);
        let runs = job.blocks[vm].lines_read(window);
        let rest = self.ask(job.agent(vm, window), &runs, false)?;
        if !rest.is_empty() {
            // Its agent has failed meanwhile. Some of it may be merged.
            let pid = job.targets[vm].id.pid;
            self.memory = Some(File::open(job.root.path(format!("/proc/{pid}/mem")))?);
            self.read_from_outside(&rest, true)?;
        }
        Ok(())
    }

    /// Reads runs, or has them read; `shared`: without pinning a page.
    fn read(&mut self, agent: Option<&HashLink>, runs: &[Range], shared: bool) -> Result<()> {
        let rest = self.ask(agent, runs, shared)?;
        self.read_from_outside(&rest, shared)
    }
}

pub(super) fn outcome_of(error: &Error, target: &Target) -> ScanOutcome {
    if is_absent(error) {
        return ScanOutcome::Ended;
    }
    let pid = target.id.pid;
    ScanOutcome::Refused(match Errno::from_io_error(error).unwrap_or(Errno::IO) {
        Errno::PERM | Errno::ACCESS => format!(
            "process {pid} may not be read: run as root, or with CAP_SYS_PTRACE and CAP_SYS_ADMIN \
             (a security module or kernel.yama.ptrace_scope may forbid it too)"
        ),
        e => format!("process {pid} cannot be read: {e}"),
    })
}
