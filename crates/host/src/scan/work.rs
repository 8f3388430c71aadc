//! The threads of a scan: rounds, windows, pieces, and what goes wrong with them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Error, Result};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebb_core::page_hash::{Key, LINE, LINES};
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, PAGE};
use ebb_core::wire::hashes::{Ask, PAGES_MAX, RANGES_MAX};
use rustix::io::Errno;

use super::agents::HashLink;
use super::duplicate_filter::{AHEAD, DuplicateFilter, Marks};
use super::page_hashes::{PageHashes, tag};
use super::rate_limit::{Pace, thread_cpu};
use super::savings::{Blocks, Rules, Savings, VmTally};
use super::table::{Filler, Table, VMS_MAX};
use super::walk::{Passed, Runs, Seen, Walker, parts, subtract};
use super::{Changes, Fate, Options, Pages, Scanner, Target, VmResult};
use crate::probe::process::{Life, life};
use crate::root::{Root, is_absent};
use crate::sys::{Range, VECTOR_MAX, read_process, set_idle};

/// What a thread takes at a time. Its pages are listed right before they are
/// read, so few have gone when their turn comes.
const WINDOW: u64 = 32 << 20;
/// The same where that takes longer: see [`GENTLE_PIECE`]. A huge page, which is not cut.
const GENTLE_WINDOW: u64 = 2 << 20;
/// What is copied at a time: fits the second-level cache.
const PIECE: usize = 1 << 20;
/// The same where nobody is to notice: ten to thirty microseconds.
const GENTLE_PIECE: usize = 64 << 10;
/// The same where only lines are read.
const GENTLE_LINES: usize = 512 << 10;
/// What a sample reads at a time.
const SAMPLE: u64 = 64 << 10;
/// What a look reads at a time.
const GLANCE: u64 = 16 << 10;
/// What a thread takes at a time of a look with an agent: a few hundred pieces.
const GLANCE_WINDOW: u64 = 1 << 30;

/// What is done window by window, for all VMs, before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    /// What is in memory is read, by agents perhaps no more than lines of it.
    All,
    /// Of pages of which only lines were read, those that may have a duplicate are left.
    Sift,
    /// These are read whole.
    Whole,
}

/// One scan.
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
    /// What is known by lines, and of which pages of each VM.
    filter: Option<DuplicateFilter>,
    marks: Vec<Marks>,
    targets: &'a [Target],
    options: &'a Options,
    pace: &'a Pace,
    vms: Vec<VmState>,
    groups: Vec<usize>,
    masks: Vec<u128>,
    blocks: Vec<Blocks>,
    windows: Vec<Windows>,
    /// Threads so far: each begins with a VM of its own.
    threads: AtomicUsize,
    table: Table,
    seen: Seen,
}

#[derive(Default)]
struct VmState {
    over: AtomicBool,
    fate: Mutex<Option<Fate>>,
    counts: [AtomicU64; 7],
}

impl VmState {
    fn end(&self, fate: Fate) {
        self.over.store(true, Relaxed);
        self.fate.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fate);
    }

    fn fate(&self) -> Fate {
        let fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        fate.clone().unwrap_or(Fate::Scanned)
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

/// One thread's own.
struct Worker<'j, 'a> {
    job: &'j Job<'a>,
    filler: Filler<'j>,
    walker: Option<(usize, Walker)>,
    runs: Runs,
    /// The memory of the VM at hand, where some of it is merged.
    memory: Option<File>,
    buffer: Vec<u8>,
    cpu: Duration,
    /// Whether it runs only when nobody else wants the CPU, once that is settled.
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
        let mask = |t: &Target| if options.separate { key.group(&t.group) } else { 0 };
        let noted = options.changes != Changes::Ignore;
        let all = options.changes == Changes::Note && options.one_in == 1;
        let by_agents = targets.iter().any(|t| agents.contains_key(&t.id));
        let held = targets.iter().map(|t| t.held).sum::<Bytes>();
        let filter =
            (options.filter && all && by_agents).then(|| DuplicateFilter::new(held.0 / PAGE));
        let marks = |t: &Target| Marks::new(if filter.is_some() { &t.ram } else { &[] });
        Job {
            root,
            key,
            tags: targets.iter().map(|t| tags.get(&t.id).filter(|_| noted)).collect(),
            agents,
            read: AtomicU64::new(0),
            by_agents: AtomicU64::new(0),
            by_lines: AtomicU64::new(0),
            round: Round::All,
            marks: targets.iter().map(marks).collect(),
            filter,
            targets,
            options,
            pace,
            vms: targets.iter().map(|_| VmState::default()).collect(),
            groups: targets.iter().map(|t| number(&t.group)).collect(),
            masks: targets.iter().map(mask).collect(),
            blocks: targets.iter().map(|t| Blocks::new(&t.ram)).collect(),
            windows: Vec::new(),
            threads: AtomicUsize::new(0),
            table: Table::default(),
            seen: Seen::default(),
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

    /// Whether agents read no more than lines now.
    fn reads_lines(&self) -> bool {
        let look = self.options.filter && self.options.changes == Changes::Look;
        look || self.filter.is_some() && self.round == Round::All
    }

    /// One round.
    fn go_over(&mut self, round: Round, threads: usize, watch: impl Fn(&dyn Fn() -> bool)) {
        let size = if self.pace.is_gentle() { GENTLE_WINDOW } else { WINDOW };
        let windows = |t: &Target| match (self.agents.get(&t.id), self.options.changes) {
            (Some(agent), Changes::Look) => Windows::of(t, agent.ram(), GLANCE_WINDOW),
            (agent, _) => Windows::of(t, agent.map_or(&[][..], |a| a.ram()), size),
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
        if self.options.idle && *now != Some(idle) {
            // Refused in some containers; the scan is then an ordinary load.
            let _ = set_idle(None, idle);
            *now = Some(idle);
        }
    }

    /// The pieces of a sample, chosen by the key: no guest can tell which.
    fn sample(&self, vm: usize, runs: &[Range], size: u64) -> Vec<Range> {
        let one_in = u64::from(self.options.one_in);
        let place = |start: u64| (start / size).wrapping_add(self.options.salt << 48);
        let mut chosen: Vec<Range> = Vec::new();
        for run in runs {
            let mut start = run.start;
            while start < run.end() {
                let end = ((start / size + 1) * size).min(run.end());
                if self.key.mix(vm as u64, place(start)).is_multiple_of(one_in) {
                    chosen.push(Range { start, len: end - start });
                }
                start = end;
            }
        }
        chosen
    }

    /// The pieces of a look: one of each stretch, so that all of a stretch cannot change
    /// unseen.
    fn glances(&self, vm: usize, window: Range) -> Vec<Range> {
        let stretch = GLANCE * u64::from(self.options.one_in);
        let piece = |start: u64| {
            let place = (start / stretch).wrapping_add(self.options.salt << 48);
            let chosen = self.key.mix(vm as u64, place) % u64::from(self.options.one_in);
            let from = (start + chosen * GLANCE).max(window.start);
            let end = (start + (chosen + 1) * GLANCE).min(window.end());
            (from < end).then(|| Range { start: from, len: end - from })
        };
        let first = window.start / stretch * stretch;
        (first..window.end()).step_by(stretch as usize).filter_map(piece).collect()
    }

    /// The agent that hashes pages of a window, if one does.
    fn agent(&self, vm: usize, window: Range) -> Option<&'a HashLink> {
        let agent = self.agents.get(&self.targets[vm].id)?;
        let has = |r: &Range| r.start <= window.start && window.end() <= r.end();
        (agent.ram().iter().any(has) && agent.failure().is_none()).then_some(agent)
    }

    /// Memory gone through, of that by agents, and of that by lines alone.
    pub fn read_bytes(&self) -> (Bytes, Bytes, Bytes) {
        let pages = |n: &AtomicU64| Bytes::pages(n.load(Relaxed));
        (pages(&self.read), pages(&self.by_agents), pages(&self.by_lines))
    }

    /// Counts what was read.
    pub fn count(&self, threads: usize) -> Savings {
        if self.options.changes == Changes::Look {
            return Savings::new(self.targets.len());
        }
        let ended: Vec<bool> = self.vms.iter().map(|v| v.fate() == Fate::Ended).collect();
        let rules = Rules { groups: &self.groups, ended: &ended, blocks: &self.blocks };
        let next = AtomicUsize::new(0);
        let all = Mutex::new(Savings::new(self.targets.len()));
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    self.settle(&mut None);
                    let mut tally = Savings::new(self.targets.len());
                    loop {
                        let (shard, before) = (next.fetch_add(1, Relaxed), thread_cpu());
                        if shard >= self.table.shards() {
                            break;
                        }
                        self.table.drain(shard, |pages| tally.content(pages, &rules));
                        self.pace.used(0, thread_cpu().saturating_sub(before));
                    }
                    all.lock().unwrap_or_else(PoisonError::into_inner).add(&tally);
                });
            }
        });
        let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (vm, state) in self.vms.iter().enumerate().filter(|(vm, _)| !ended[*vm]) {
            let split = all.vms[vm].split(state.pages().zero);
            all.split.zero += split.zero;
        }
        // Whose lines are alone is alone.
        let alone = self.by_lines.load(Relaxed) as f64;
        all.moments.pages += alone;
        all.moments.distinct += alone;
        all.moments.single += alone;
        all
    }

    fn table_bytes(&self) -> u64 {
        // A frame number takes eight bytes and as much again in a hash set.
        self.table.bytes() + self.seen.count() as u64 * 16
    }

    pub fn results(self, tallies: Vec<VmTally>) -> Vec<VmResult> {
        let parts = self.targets.iter().zip(self.vms).zip(tallies).zip(self.blocks);
        let one = |(((target, state), tally), blocks): (((&Target, VmState), VmTally), Blocks)| {
            let (fate, mut pages) = (state.fate(), state.pages());
            if fate == Fate::Ended {
                pages = Pages::default();
            }
            VmResult {
                target: target.clone(),
                fate,
                pages,
                split: tally.split(pages.zero),
                duplicates: tally.duplicates,
                blocks,
            }
        };
        parts.map(one).collect()
    }
}

/// What of a VM is still to be done.
struct Windows {
    all: Vec<Range>,
    next: AtomicUsize,
}

impl Windows {
    /// None is partly in one of these ranges.
    fn of(target: &Target, ranges: &[Range], size: u64) -> Windows {
        let mut all = Vec::new();
        for (range, _) in target.ram.iter().flat_map(|r| parts(*r, ranges)) {
            let mut start = range.start;
            while start < range.end() {
                // Aligned, so that no block and no huge page is cut.
                let end = ((start / size + 1) * size).min(range.end());
                all.push(Range { start, len: end - start });
                start = end;
            }
        }
        Windows { all, next: AtomicUsize::new(0) }
    }

    fn take(&self) -> Option<Range> {
        self.all.get(self.next.fetch_add(1, Relaxed)).copied()
    }
}

impl<'j, 'a> Worker<'j, 'a> {
    fn new(job: &'j Job<'a>) -> Worker<'j, 'a> {
        Worker {
            job,
            filler: job.table.filler(),
            walker: None,
            runs: Runs::default(),
            memory: None,
            buffer: vec![0; PIECE],
            cpu: thread_cpu(),
            idle: None,
        }
    }

    fn work(mut self) {
        let job = self.job;
        job.settle(&mut self.idle);
        let first = job.threads.fetch_add(1, Relaxed);
        // An agent does one window at a time: where there are several VMs nobody waits.
        for i in 0..job.targets.len() {
            let vm = (first + i) % job.targets.len();
            while let Some(window) = job.windows[vm].take() {
                if job.vms[vm].over.load(Relaxed) {
                    break;
                }
                let mut pages = Pages::default();
                let done = match job.round {
                    Round::All => self.window(vm, window, &mut pages),
                    Round::Sift => self.sift(vm, window),
                    Round::Whole => self.whole(vm, window, &mut pages),
                };
                if let Err(e) = done {
                    job.vms[vm].end(fate_of(&e, &job.targets[vm]));
                }
                if !self.is_alive(vm) {
                    // What was read last may be another process's.
                    job.vms[vm].end(Fate::Ended);
                }
                job.vms[vm].add(&pages);
                job.read.fetch_add(pages.read, Relaxed);
                if job.pace.is_stopped() {
                    return;
                }
            }
        }
    }

    fn is_alive(&self, vm: usize) -> bool {
        life(self.job.root, self.job.targets[vm].id) == Life::Alive
    }

    fn window(&mut self, vm: usize, window: Range, pages: &mut Pages) -> Result<()> {
        let (job, target) = (self.job, &self.job.targets[vm]);
        let look = job.options.changes == Changes::Look;
        if look && let Some(agent) = job.agent(vm, window) {
            // It lists pages itself, and pins none.
            let mut pieces = job.glances(vm, window);
            subtract(&mut pieces, &target.skip);
            // What it leaves out when it fails others will look at.
            return self.ask(vm, agent, &pieces, false, pages).map(drop);
        }
        if self.walker.as_ref().is_none_or(|(of, _)| *of != vm) {
            let (pid, merged) = (target.id.pid, !target.merged.is_empty());
            self.memory = None;
            if merged {
                self.memory = Some(File::open(job.root.path(format!("/proc/{pid}/mem")))?);
            }
            self.walker = Some((vm, Walker::open(job.root, pid, merged, job.options.listing)?));
        }
        let Some((_, walker)) = self.walker.as_mut() else { return Ok(()) };
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        let chosen = if look { job.glances(vm, window) } else { vec![window] };
        for part in chosen {
            let Passed { merged } = walker.runs(part, &target.merged, &job.seen, &mut runs)?;
            pages.merged += merged;
        }
        pages.held += runs.pages();
        pages.free += runs.subtract(&target.skip) / PAGE;
        if job.options.one_in > 1 && !look {
            let sample = |runs: &[Range]| job.sample(vm, runs, SAMPLE);
            runs = Runs { own: sample(&runs.own), shared: sample(&runs.shared) };
        }
        let agent = job.agent(vm, window);
        let done = self.read(vm, agent, &runs.own, false, pages);
        let done = done.and_then(|()| self.read(vm, agent, &runs.shared, true, pages));
        self.runs = runs;
        done
    }

    /// Leaves out pages that are alone by their lines.
    fn sift(&mut self, vm: usize, window: Range) -> Result<()> {
        let job = self.job;
        if let (Some(filter), Some(tags)) = (&job.filter, job.tags[vm]) {
            let alone = job.marks[vm].sift(window, tags, job.masks[vm] as u32, filter);
            job.by_lines.fetch_add(alone, Relaxed);
            self.account(0, Duration::ZERO);
        }
        Ok(())
    }

    /// Has pages read whole of which only lines were read.
    fn whole(&mut self, vm: usize, window: Range, pages: &mut Pages) -> Result<()> {
        let runs = self.job.marks[vm].runs(window);
        let rest = match self.job.agent(vm, window) {
            Some(agent) => self.ask(vm, agent, &runs, false, pages)?,
            None => runs,
        };
        if !rest.is_empty() {
            // Its agent has failed meanwhile. Some of it may be merged.
            let pid = self.job.targets[vm].id.pid;
            self.memory = Some(File::open(self.job.root.path(format!("/proc/{pid}/mem")))?);
            self.read_from_outside(vm, &rest, true, pages)?;
        }
        Ok(())
    }

    /// Reads runs, or has them read; `shared`: without pinning a page.
    fn read(
        &mut self,
        vm: usize,
        agent: Option<&HashLink>,
        runs: &[Range],
        shared: bool,
        pages: &mut Pages,
    ) -> Result<()> {
        let rest = match agent {
            Some(agent) => self.ask(vm, agent, runs, shared, pages)?,
            None => runs.to_vec(),
        };
        self.read_from_outside(vm, &rest, shared, pages)
    }

    /// Has the agent hash runs, and notes them. What is left when it fails is returned.
    fn ask(
        &mut self,
        vm: usize,
        agent: &HashLink,
        runs: &[Range],
        shared: bool,
        pages: &mut Pages,
    ) -> Result<Vec<Range>> {
        let job = self.job;
        let lines = job.reads_lines();
        // Looked at once: runs that are longer than a question would never be asked for.
        let most = match job.pace.is_gentle() {
            true if lines => GENTLE_LINES,
            true => GENTLE_PIECE,
            false => (PAGES_MAX * PAGE) as usize,
        };
        let runs: Vec<Range> = runs.iter().flat_map(|r| cut(*r, most)).collect();
        let mut rest = &runs[..];
        while !rest.is_empty() {
            let mut size = 0;
            let fits = |r: &&Range| {
                size += r.len;
                size <= most as u64
            };
            let count = rest.iter().take(RANGES_MAX).take_while(fits).count();
            let (now, after) = rest.split_at(count);
            let ranges: Vec<(u64, u64)> = now.iter().map(|r| (r.start, r.len)).collect();
            let Ok(told) = agent.ask(&Ask { secret: *job.key.secret(), lines, ranges }) else {
                return Ok(rest.to_vec());
            };
            rest = after;
            let asked: u64 = now.iter().map(|r| r.len / PAGE).sum();
            let read = told.pages.len() as u64;
            if job.round == Round::All {
                match job.options.changes {
                    Changes::Look => pages.held += told.held,
                    // Not in memory any more.
                    _ => pages.lost += asked - told.held,
                }
                pages.free += told.free;
                pages.lost += told.held - told.free - read;
                job.by_agents.fetch_add(read, Relaxed);
            }
            for (i, &(number, hash)) in told.pages.iter().enumerate() {
                if let (Some(filter), Some(ahead)) = (&job.filter, told.pages.get(i + AHEAD)) {
                    filter.fetch(tag(ahead.1) ^ job.masks[vm] as u32);
                }
                let address = number * PAGE;
                match self.note(vm, address, hash, shared, pages) {
                    true if lines => job.marks[vm].set(address),
                    true => self.keep(vm, address, Some(hash).filter(|h| *h != 0), pages),
                    false => {}
                }
            }
            let of_page = if lines { (LINES * LINE) as u64 } else { PAGE };
            self.account(read * of_page, Duration::from_nanos(told.cpu_ns));
        }
        Ok(Vec::new())
    }

    /// Reads runs, piece by piece; `shared`: without pinning a page.
    fn read_from_outside(
        &mut self,
        vm: usize,
        runs: &[Range],
        shared: bool,
        pages: &mut Pages,
    ) -> Result<()> {
        let mut piece = Vec::new();
        let most = if self.job.pace.is_gentle() { GENTLE_PIECE } else { PIECE };
        let mut rest = runs.iter().copied().flat_map(|r| cut(r, most));
        let mut next = rest.next();
        while let Some(run) = next {
            piece.push(run);
            next = rest.next();
            let size: u64 = piece.iter().map(|r| r.len).sum();
            let full = next.is_none_or(|n| size + n.len > most as u64);
            if full || piece.len() == VECTOR_MAX {
                self.piece(vm, &mut piece, shared, pages)?;
            }
        }
        Ok(())
    }

    /// Copies and notes a piece; pages that went away are passed over.
    fn piece(
        &mut self,
        vm: usize,
        piece: &mut Vec<Range>,
        shared: bool,
        pages: &mut Pages,
    ) -> Result<()> {
        let pid = self.job.targets[vm].id.pid;
        let mut bytes = 0;
        while !piece.is_empty() {
            let copied = match self.memory.as_ref().filter(|_| shared) {
                Some(memory) => read_gently(memory, piece, &mut self.buffer),
                None => read_process(pid, piece, &mut self.buffer),
            };
            let n = match copied {
                Ok(n) => n as u64 / PAGE * PAGE,
                Err(e) if Errno::from_io_error(&e) == Some(Errno::FAULT) => 0,
                Err(e) => return Err(e),
            };
            bytes += n;
            self.note_all(vm, piece, n, shared, pages);
            if n < piece.iter().map(|r| r.len).sum() {
                // The page at which it ended cannot be read.
                drop_front(piece, n + PAGE);
                pages.lost += 1;
            } else {
                piece.clear();
            }
        }
        self.account(bytes, Duration::ZERO);
        Ok(())
    }

    /// Bytes that were read; `others`: processor time beside this thread's.
    fn account(&mut self, bytes: u64, others: Duration) {
        let cpu = thread_cpu();
        let used = cpu.saturating_sub(self.cpu);
        self.cpu = cpu;
        self.job.pace.used(bytes, used + others);
        self.job.settle(&mut self.idle);
    }

    /// Notes the first `n` bytes of the buffer, which came from these places.
    fn note_all(&mut self, vm: usize, places: &[Range], n: u64, shared: bool, pages: &mut Pages) {
        let addresses = places.iter().flat_map(|p| (p.start..p.end()).step_by(PAGE as usize));
        let count = (n / PAGE) as usize;
        let job = self.job;
        for (i, address) in addresses.take(count).enumerate() {
            let page = &self.buffer[i * PAGE as usize..(i + 1) * PAGE as usize];
            let hash = job.key.page(page);
            if hash.is_none() && self.walker.as_ref().is_some_and(|(_, w)| w.holds_nothing(address))
            {
                pages.held -= 1;
                continue;
            }
            let noted = match job.options.filter {
                true => job.key.glance(page),
                false => hash.unwrap_or(0),
            };
            if self.note(vm, address, noted, shared, pages) {
                self.keep(vm, address, hash, pages);
            }
        }
    }

    /// Notes a page by what stands for it; whether it counts.
    fn note(
        &mut self,
        vm: usize,
        address: u64,
        hash: u128,
        shared: bool,
        pages: &mut Pages,
    ) -> bool {
        let job = self.job;
        if job.round == Round::Whole {
            // It was, by its lines.
            return true;
        }
        let changes = job.options.changes;
        let tags = job.tags[vm];
        pages.read += 1;
        if changes == Changes::Look {
            pages.changed += u64::from(!tags.is_some_and(|t| t.still(address, hash)));
            return false;
        }
        if tags.is_some_and(|t| !t.same(address, hash)) {
            pages.changed += 1;
            if changes == Changes::LeaveOut {
                job.blocks[vm].read(address, false);
                return false;
            }
        }
        if let Some(filter) = &job.filter {
            filter.put(tag(hash) ^ job.masks[vm] as u32);
        }
        // What is merged already is no page of this place alone, duplicate or not.
        if !shared {
            job.blocks[vm].read(address, false);
        }
        true
    }

    /// Puts a page that was read whole where it is compared with others; `None`: it is of
    /// zeros.
    fn keep(&mut self, vm: usize, address: u64, hash: Option<u128>, pages: &mut Pages) {
        let job = self.job;
        match hash {
            Some(hash) => self.filler.push(hash ^ job.masks[vm], vm as u32, address / PAGE),
            None => {
                pages.zero += 1;
                job.blocks[vm].read(address, true);
            }
        }
    }
}

/// Copies from places of a process, as [`read_process`] does, through its `mem`: pages
/// are looked at and not pinned, so what is merged stays merged.
fn read_gently(memory: &File, places: &[Range], to: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    for place in places {
        let end = done + place.len as usize;
        while done < end {
            let at = place.end() - (end - done) as u64;
            match memory.read_at(&mut to[done..end], at) {
                Ok(n) if n > 0 => done += n,
                // Gone, or the process is: what was copied before counts.
                Ok(_) => return Ok(done),
                Err(e) if Errno::from_io_error(&e) == Some(Errno::IO) => return Ok(done),
                Err(e) => return Err(e),
            }
        }
    }
    Ok(done)
}

/// Pieces of a run, so large at most.
fn cut(run: Range, most: usize) -> impl Iterator<Item = Range> {
    (run.start..run.end())
        .step_by(most)
        .map(move |start| Range { start, len: (run.end() - start).min(most as u64) })
}

/// Takes bytes off the front of a list of ranges.
fn drop_front(ranges: &mut Vec<Range>, mut bytes: u64) {
    ranges.retain_mut(|r| {
        let cut = bytes.min(r.len);
        bytes -= cut;
        *r = Range { start: r.start + cut, len: r.len - cut };
        r.len > 0
    });
}

fn fate_of(error: &Error, target: &Target) -> Fate {
    if is_absent(error) {
        return Fate::Ended;
    }
    refusal(Errno::from_io_error(error).unwrap_or(Errno::IO), target)
}

/// Why a process cannot be read, and what to do.
pub(super) fn refusal(errno: Errno, target: &Target) -> Fate {
    let pid = target.id.pid;
    Fate::Refused(match errno {
        Errno::PERM | Errno::ACCESS => format!(
            "process {pid} may not be read: run as root, or with CAP_SYS_PTRACE and CAP_SYS_ADMIN \
             (a security module or kernel.yama.ptrace_scope may forbid it too)"
        ),
        e => format!("process {pid} cannot be read: {e}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_all_ram_once_and_end_where_blocks_do() {
        let mut target = Target {
            id: VmId { pid: 1, start: 1 },
            name: "a".into(),
            group: "g".into(),
            ram: vec![
                Range { start: WINDOW - PAGE, len: 2 * WINDOW },
                Range { start: 9 * WINDOW, len: PAGE },
            ],
            merged: Vec::new(),
            open: Vec::new(),
            held: Bytes::ZERO,
            skip: Vec::new(),
        };
        let windows = Windows::of(&target, &[], WINDOW);
        let all: Vec<Range> = std::iter::from_fn(|| windows.take()).collect();
        assert_eq!(all.iter().map(|w| w.len).sum::<u64>(), 2 * WINDOW + PAGE);
        assert_eq!(all.len(), 4);
        assert!(all[..3].windows(2).all(|w| w[0].end() == w[1].start));
        assert_eq!(all[1].start % WINDOW, 0);
        target.ram.clear();
        assert!(Windows::of(&target, &[], WINDOW).take().is_none());
    }

    #[test]
    fn the_front_of_a_list_is_taken_off() {
        let r = |start, len| Range { start, len };
        for (bytes, left) in [
            (0, vec![r(0, 8), r(16, 8)]),
            (4, vec![r(4, 4), r(16, 8)]),
            (8, vec![r(16, 8)]),
            (12, vec![r(20, 4)]),
            (99, vec![]),
        ] {
            let mut ranges = vec![r(0, 8), r(16, 8)];
            drop_front(&mut ranges, bytes);
            assert_eq!(ranges, left, "{bytes}");
        }
        let cut: Vec<u64> = cut(r(PAGE, 2 * PIECE as u64 + 1), PIECE).map(|r| r.len).collect();
        assert_eq!(cut, [PIECE as u64, PIECE as u64, 1]);
    }
}
