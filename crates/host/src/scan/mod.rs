//! The page scanner: finds out what is worth merging, without changing anything.
//!
//! A scan goes over the RAM of many VMs with many threads. Each takes a window of
//! 32 MiB, asks the kernel which of its pages are in memory (`walk`), copies those
//! in pieces of 1 MiB (`process_vm_readv`), or has the VM's agent do that (`agents`),
//! and notes a keyed hash of each (`ebb_core::page_hash`) in a table of 16 bytes a page
//! (`table`). Agents may be asked for four cache lines of each page first, and then whole only
//! for pages whose lines have a duplicate (`duplicate_filter`). Then equal pages are counted: zero
//! pages, duplicates within a VM, between VMs of a share group, between groups (`savings`).
//! `sampling` decides how much to read. Nothing is ever written to a VM. Threads run at
//! SCHED_IDLE or, where the host needs the memory, with the weight of `ksmd`, within limits
//! (`rate_limit`), and pause while tasks stall for memory.
//!
//! VMs live on meanwhile: one that ends is dropped from the result, one that may
//! not be read is named with the reason, a page that changes while it is read has
//! a hash that matches nothing. A scanner that is kept can tell what has changed since
//! its last scan (4 bytes a page more).

pub mod agents;
mod duplicate_filter;
pub mod memory_limit;
mod page_hashes;
pub mod rate_limit;
pub mod readers;
pub mod sampling;
mod savings;
mod steps;
pub mod table;
pub mod walk;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::page_hash::{Key, SECRET};
use ebb_core::range::push;
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, PAGE};

use self::agents::HashLink;
use self::page_hashes::PageHashes;
use self::rate_limit::Pace;
pub use self::rate_limit::{Dial, Limits};
use self::readers::Readers;
pub use self::savings::{BLOCK, Blocks, Moments, Pages, Split};
use crate::probe::ksm::read_ksm_stat;
use crate::probe::meminfo::read_meminfo;
use crate::probe::psi;
use crate::probe::regions::{Region, guest_ram, read_smaps, unmergeable};
use crate::root::{Probed, Root};
use crate::sys::Range;

/// Most threads; more gain nothing where memory is the limit.
const THREADS_MAX: usize = 32;
/// How often the host's pressure is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// A scan pauses while tasks stall for memory for more than this share of time.
const PAUSE_ABOVE: f64 = 0.1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub id: VmId,
    pub name: String,
    pub group: String,
    /// Its RAM in that process, disjoint and sorted.
    pub ram: Vec<Range>,
    /// Where KSM has merged some of it, likewise.
    pub merged: Vec<Range>,
    /// What of it is open to KSM, likewise.
    pub open: Vec<Range>,
    pub held: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// To scan; `None` where nothing of it can be merged.
    pub target: Option<Target>,
    /// Resident RAM, marked for KSM (`VmFlags: mg`).
    pub mergeable: Bytes,
    /// Resident RAM that is not scanned, and why.
    pub refused: Option<(Bytes, &'static str)>,
}

/// Its RAM is larger than [`most_ram`].
pub(crate) const TOO_LARGE: &str = "its RAM is more than 16 times the host's memory";

/// The largest RAM of a VM that is scanned on a host with this much memory. Tables are allocated for
/// all of RAM; the kernel fills in what is used of them, but may refuse what is very large.
fn most_ram(total: Bytes) -> Bytes {
    Bytes(total.0.saturating_mul(16))
}

impl Found {
    /// Looks at a VM's mappings; `None` where it has ended.
    pub fn look(root: &Root, id: VmId, name: &str, group: &str) -> Probed<Found> {
        let Some(regions) = read_smaps(root, id.pid)? else { return Ok(None) };
        let ram = guest_ram(&regions);
        let merging = read_ksm_stat(root, id.pid)?.is_some_and(|s| s.merging_pages > Some(0));
        // Before Linux 6.7 smaps does not tell, and all that is open may hold some.
        let told = ram.iter().any(|r| r.ksm > Some(Bytes::ZERO));
        let merged = |r: &Region| r.ksm > Some(Bytes::ZERO) || merging && !told;
        let sum = |f: fn(&Region) -> Bytes| ram.iter().map(|r| f(r)).sum();
        let total = read_meminfo(root)?.map(|host| host.total);
        let too_large = sum(|r| Bytes(r.range.len)) > total.map_or(Bytes(u64::MAX), most_ram);
        let target = (!ram.is_empty() && !too_large).then(|| Target {
            id,
            name: name.into(),
            group: group.into(),
            ram: joined(&ram, |_| true),
            merged: joined(&ram, merged),
            open: joined(&ram, |r| r.mergeable),
            held: sum(|r| r.resident),
        });
        Ok(Some(Found {
            target,
            mergeable: sum(|r| if r.mergeable { r.resident } else { Bytes::ZERO }),
            refused: match too_large {
                true => Some((sum(|r| r.resident), TOO_LARGE)),
                false => unmergeable(&regions),
            },
        }))
    }

    /// Resident RAM that could be merged.
    pub fn held(&self) -> Bytes {
        self.target.as_ref().map_or(Bytes::ZERO, |t| t.held)
    }
}

/// Mappings of this kind, neighbours as one: which parts of RAM are open to KSM makes
/// them many.
fn joined(ram: &[&Region], of: impl Fn(&Region) -> bool) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    ram.iter().filter(|r| of(r)).for_each(|r| push(&mut all, r.range));
    all
}

/// What a scan does about pages that are not as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// Nothing: what they were is neither known nor noted.
    #[default]
    Ignore,
    /// Notes what they are, for later scans; all count.
    Note,
    /// Tells only how many have changed since that was noted; counts and notes nothing.
    /// Its pieces are of 16 KiB, and others are not even listed.
    SpotCheck,
}

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Threads; `None`: as many as there are idle cores.
    pub threads: Option<usize>,
    /// Read one of this many pieces of 64 KiB, chosen at random; 0 or 1: all.
    pub one_in: u32,
    /// Other pieces for each number.
    pub salt: u64,
    pub limits: Limits,
    /// The share of a core instead, where it may change meanwhile.
    pub dial: Option<Arc<Dial>>,
    /// Run like any other program. Else only when nothing else needs the CPU; with a dial, only
    /// while that is gentle.
    pub hurry: bool,
    /// What is done about pages that are not as this scanner saw them last.
    pub changes: Changes,
    /// Agents read four lines of each page first, and whole only pages that have a duplicate by
    /// those. What pages are is noted by their lines then, and checked by them; nothing else
    /// differs. For [`Changes::Note`] of all, and [`Changes::SpotCheck`].
    pub filter: bool,
    /// Lists pages as for kernels before 6.7 also where this one has better.
    pub entries: bool,
    /// VMs that are to be left alone from some time on count as ended.
    pub readers: Arc<Readers>,
}

impl Options {
    fn one_in(&self) -> u64 {
        self.one_in.max(1).into()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScanOutcome {
    Scanned,
    /// It ended meanwhile, or is to be left alone; nothing of it counts.
    Ended,
    /// It cannot be read, and why; what was read of it before counts.
    Refused(String),
}

#[derive(Debug)]
pub struct VmResult {
    pub target: Target,
    pub outcome: ScanOutcome,
    pub pages: Pages,
    /// What merging it would save: its part of what it shares with others.
    pub split: Split,
    /// Read pages that have a duplicate in the same share group, zeros not counted.
    pub duplicates: u64,
    /// Where they lie, in blocks of 2 MiB.
    pub blocks: Blocks,
}

#[derive(Debug)]
pub struct Scan {
    /// The VMs, in the order of the targets.
    pub vms: Vec<VmResult>,
    /// What merging all would save.
    pub split: Split,
    /// Numbers to estimate from, where not all was read.
    pub moments: Moments,
    /// How long it took, pauses included.
    pub time: Duration,
    /// Of that, paused because the host was short.
    pub paused: Duration,
    /// CPU time of all threads, and of agents for them.
    pub cpu: Duration,
    pub threads: usize,
    pub read: Bytes,
    /// Of that, by the VMs' own agents.
    pub by_agents: Bytes,
    /// Of that, no more than a few lines of each page.
    pub by_lines: Bytes,
    /// The table at its largest.
    pub table: Bytes,
}

/// Scans, and remembers its last scan.
#[derive(Debug)]
pub struct Scanner {
    root: Root,
    key: Key,
    tags: HashMap<VmId, PageHashes>,
    agents: HashMap<VmId, Arc<HashLink>>,
}

impl Scanner {
    /// With a key of its own.
    pub fn new(root: Root) -> io::Result<Scanner> {
        Ok(Scanner { root, key: random_key()?, tags: HashMap::new(), agents: HashMap::new() })
    }

    /// From now on these agents hash the pages of their VMs. They are told the key.
    pub fn use_agents(&mut self, agents: HashMap<VmId, Arc<HashLink>>) {
        self.agents = agents;
    }

    pub fn scan(&mut self, targets: &[Target], options: &Options) -> Scan {
        let started = Instant::now();
        let threads = options.threads.unwrap_or_else(|| idle_cores(&self.root));
        let threads = threads.clamp(1, THREADS_MAX);
        if options.changes == Changes::Note {
            let ids: Vec<VmId> = targets.iter().map(|t| t.id).collect();
            self.tags.retain(|id, _| ids.contains(id));
            for t in targets {
                let tags = self.tags.entry(t.id).or_default();
                tags.fit(&t.ram);
            }
        }
        let pace = Pace::new(options.limits, options.dial.clone());
        let mut job = steps::Job::new(self, targets, options, &pace);
        let watch = |done: &dyn Fn() -> bool| self.watch(&pace, done);
        let table = job.read(threads, watch);
        let (read, by_agents, by_lines) = job.read_bytes();
        let tally = job.count(threads);
        Scan {
            split: tally.split,
            moments: tally.moments,
            vms: job.results(tally.vms),
            time: started.elapsed(),
            paused: pace.paused(),
            cpu: pace.cpu(),
            threads,
            read,
            by_agents,
            by_lines,
            table: Bytes(table),
        }
    }

    /// Pauses and resumes the threads until they are done.
    fn watch(&self, pace: &Pace, done: &dyn Fn() -> bool) {
        let stalled = || {
            let psi = self.root.parse(psi::MEMORY, psi::parse_psi).ok().flatten()?;
            Some(Duration::from_micros(psi.some.total_us))
        };
        let (mut before, mut at) = (stalled(), Instant::now());
        while !done() {
            std::thread::park_timeout(LOOK);
            if at.elapsed() < LOOK {
                continue;
            }
            let now = stalled();
            if let (Some(before), Some(now)) = (before, now) {
                let share = now.saturating_sub(before).as_secs_f64() / at.elapsed().as_secs_f64();
                pace.pause(share > PAUSE_ABOVE);
            }
            (before, at) = (now, Instant::now());
        }
        pace.pause(false);
    }
}

pub fn random_key() -> io::Result<Key> {
    let mut secret = [0; SECRET];
    File::open("/dev/urandom")?.read_exact(&mut secret)?;
    Ok(Key::new(secret))
}

/// Cores that were idle lately: all less the load average of the last
/// minute, at least one.
pub fn idle_cores(root: &Root) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = root.read("/proc/loadavg").ok().flatten();
    let load = load.and_then(|t| t.split(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0);
    cores.saturating_sub(load.round().max(0.0) as usize).max(1)
}

/// A number of pages in bytes; pages of a share may be split, hence the fraction.
fn bytes_of(pages: f64) -> Bytes {
    Bytes((pages * PAGE as f64).round() as u64)
}

#[cfg(test)]
mod tests;
