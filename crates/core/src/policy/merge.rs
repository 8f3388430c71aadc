//! Merging: when KSM may work, how hard, and when it is to stop.
//!
//! KSM's own knobs count pages, and an operator does not know what a page is
//! worth. Here there is a budget (CPU time of `ksmd`) and a floor (memory saved
//! for a second of it). The scanner says beforehand what a burst would save; the
//! burst goes on while the memory saved since its last look pays for the CPU it
//! took, and afterwards nothing runs until the scanner has found more. A host that
//! is short pays more for memory.
//!
//! On a clear host merging must not slow VMs: what reads memory takes caches from the VMs
//! beside it, so there it is done in pulses of some 30 µs ([`is_gentle`]), 0.8 % of a core
//! by default.
//!
//! Costs per page were measured on a 2-vCPU machine under Linux 6.18; they only
//! order alternatives, and what `ksmd` really used decides when to stop.

mod order;
mod ranges;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::order::{MergeCounts, MergeMemory, VmMergeMemory, merge, saved};
pub use self::ranges::{Block, RANGES_MAX, WORDS, ranges};
use crate::model::Pressure;
use crate::units::{Bytes, PAGE, Stamp, doubled};

/// CPU microseconds of `ksmd` for a page that it hashes for the first time.
const FIRST_LOOK_US: f64 = 0.8;
/// To look a page up that has no duplicate, each scan.
const ALONE_US: f64 = 6.0;
/// To merge a page.
const MERGE_US: f64 = 3.6;
/// To replace a page of zeros.
const ZERO_US: f64 = 2.5;
/// Scans until everything is merged that can be: a page must be unchanged in two.
const SCANS: f64 = SCANS_LEAST as f64;
/// KSM's own memory for each page that it looks at.
pub const METADATA: u64 = 64;

/// Most pages between two sleeps: `run` can be written only between batches, and
/// a batch of 20,000 pages takes a tenth of a second.
const BATCH_MOST: u64 = 20_000;
/// The least that is worth waking `ksmd`, on a host that is short and on another.
const BATCH_LEAST: (u64, u64) = (100, 4);
/// Sleep between batches, ms. Never 0: the scan would not release its lock.
const SLEEP_MS: u64 = 20;
/// Sleep between pulses, ms: one timer tick at CONFIG_HZ=250.
const PULSE_SLEEP_MS: u64 = 4;
/// Up to this share of a core work is done in pulses.
const GENTLE: f64 = 0.02;
/// Less than this is not worth a burst, and less that breaks is no storm.
const WORTH_A_BURST: Bytes = Bytes::mib(16);
/// A burst is judged each time that it has used this much CPU, also within a scan.
const JUDGE_CPU_MS: u64 = 2_000;
/// The cost of a page is measured from at least this number of pages and this CPU time: counters
/// in milliseconds are coarse.
pub const MEASURED_FROM: (u64, Duration) = (1_000, Duration::from_millis(10));
/// Nothing is merged before all was seen twice.
const SCANS_LEAST: u64 = 2;
/// A burst ends after this many scans in any case.
const SCANS_MOST: u64 = 64;
/// A burst ends when this share of what was planned is saved: guests go on writing.
const ENOUGH_SAVED: f64 = 0.99;
/// A burst ends after a whole scan that brings less than this share of what was planned.
const SCAN_TOO_POOR: f64 = 0.01;
/// No burst begins for this time after one that did not pay: at first and at most, doubled each
/// time.
const HOLD_MS: (u64, u64) = (60_000, 3_600_000);

/// Pages that KSM would look at, and what comes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Candidates {
    pub pages: u64,
    /// Of those, zeros.
    pub zeros: u64,
    /// Of those, pages that go because of a duplicate.
    #[serde(alias = "twins")]
    pub duplicates: u64,
}

impl Candidates {
    /// What merging them saves, less KSM's own memory for them.
    pub fn saves(&self) -> Bytes {
        let own = self.pages.saturating_sub(self.zeros).saturating_mul(METADATA);
        Bytes::pages(self.zeros.saturating_add(self.duplicates)) - Bytes(own)
    }

    fn alone(&self) -> u64 {
        self.pages.saturating_sub(self.zeros.saturating_add(self.duplicates))
    }

    /// CPU seconds of `ksmd` until it is done.
    pub fn cost_s(&self) -> f64 {
        let alone = self.alone() as f64;
        let merged = self.duplicates as f64 * (FIRST_LOOK_US + MERGE_US);
        let look = alone * (FIRST_LOOK_US + ALONE_US * (SCANS - 1.0));
        (merged + look + self.zeros as f64 * ZERO_US) / 1e6
    }

    /// CPU seconds of each scan afterwards that finds nothing new.
    pub fn again_s(&self) -> f64 {
        self.alone() as f64 * ALONE_US / 1e6
    }

    /// Whether they save this much for a second of CPU.
    pub fn pays(&self, floor: Bytes) -> bool {
        self.saves() > Bytes::ZERO && self.saves() >= floor.share(self.cost_s())
    }

    pub fn add(&mut self, other: &Candidates) {
        self.pages = self.pages.saturating_add(other.pages);
        self.zeros = self.zeros.saturating_add(other.zeros);
        self.duplicates = self.duplicates.saturating_add(other.duplicates);
    }
}

impl<'a> std::iter::Sum<&'a Candidates> for Candidates {
    fn sum<I: Iterator<Item = &'a Candidates>>(parts: I) -> Candidates {
        let mut all = Candidates::default();
        parts.for_each(|part| all.add(part));
        all
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Share of one core that `ksmd` may use while the host is short; on a hard host twice
    /// that, on a critical one two and a half times.
    pub cores: f64,
    /// Share of one core that `ksmd` may use while the host is not short, at most `cores`.
    pub clear_cores: f64,
    /// Memory that a second of its CPU must save while the host is not short.
    pub floor: Bytes,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { cores: 0.4, clear_cores: 0.008, floor: Bytes::mib(32) }
    }
}

impl Settings {
    /// Share of a core in this state: for `ksmd`, for a scan, for looking for zeros.
    pub fn share(&self, state: Pressure) -> f64 {
        match state {
            Pressure::Clear => self.clear_cores.min(self.cores),
            state => self.cores * worth(state) / worth(Pressure::Soft),
        }
    }
}

/// What is known now. All counters since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    pub at: Stamp,
    pub state: Pressure,
    /// What the last plan made mergeable, as the scanner saw it.
    pub planned: Candidates,
    /// A number that grows with each plan.
    pub plan: u64,
    /// CPU time of `ksmd`, ms.
    pub cpu_ms: u64,
    /// Pages it looked at; `None` before Linux 6.12.
    pub scanned: Option<u64>,
    pub scans: u64,
    /// Pages saved: `pages_sharing` and zero pages.
    pub saved: u64,
}

impl Facts {
    /// Whether what is to be had beyond `saves` is worth two scans of all that is open.
    fn has_more_than(&self, saves: Bytes, floor: Bytes) -> bool {
        let (more, cost_s) = (self.planned.saves() - saves, SCANS * self.planned.again_s());
        more >= WORTH_A_BURST && more >= floor.share(cost_s)
    }
}

/// What is remembered of bursts between ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BurstMemory {
    pub burst: Option<Burst>,
    /// The plan whose burst ended last.
    pub done: u64,
    /// What that burst was to save.
    pub done_of: Option<Bytes>,
    /// Nothing before this, whatever is planned.
    pub hold_until: Option<Stamp>,
    /// Bursts in a row that did not pay.
    pub unpaid: u32,
}

impl BurstMemory {
    /// Takes in what is to be had of the VMs that are open now, and what is saved of them, pages.
    /// VMs that were closed are merged anew when they are opened again, and what was saved of them
    /// is no loss of the burst.
    pub fn note_closed(&mut self, planned: &Candidates, saved: u64) {
        self.done_of = self.done_of.map(|before| before.min(planned.saves()));
        let burst = self.burst.as_mut().filter(|b| planned.saves() < b.began.planned.saves());
        if let Some(burst) = burst {
            burst.began.planned = *planned;
            burst.judged.iter_mut().for_each(|judged| judged.saved = judged.saved.min(saved));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    pub plan: u64,
    pub began: Facts,
    /// Facts when it was judged last; `None`: not all was seen twice yet.
    pub judged: Option<Facts>,
    /// The least that was saved since it began. KSM's counters keep what guests broke by
    /// writing until `ksmd` comes by again, so they fall while pages are merged.
    pub least: u64,
    /// Facts at the last tick, and what a page cost then, µs.
    pub last: (Facts, f64),
}

impl Burst {
    fn begin(facts: &Facts, cores: f64) -> Burst {
        // Measured in a moment; until then an error must not slow VMs.
        let each = if is_gentle(cores) { ALONE_US } else { FIRST_LOOK_US };
        let (began, last) = (*facts, (*facts, each));
        Burst { plan: facts.plan, began, judged: None, least: facts.saved, last }
    }

    /// What it saved, at least.
    fn gained(&self, facts: &Facts) -> Bytes {
        Bytes::pages(facts.saved.saturating_sub(self.least))
    }

    /// Whether VMs were opened since it began, so that more of the same plan is to be had.
    fn has_grown(&self, facts: &Facts, floor: Bytes) -> bool {
        self.plan == facts.plan && facts.has_more_than(self.began.planned.saves(), floor)
    }

    fn scans(&self, facts: &Facts) -> u64 {
        facts.scans.saturating_sub(self.began.scans)
    }

    fn cpu_s(&self, facts: &Facts) -> f64 {
        facts.cpu_ms.saturating_sub(self.began.cpu_ms) as f64 / 1000.0
    }

    fn look(&mut self, facts: &Facts) {
        self.least = self.least.min(facts.saved);
        let last = self.last.0;
        let pages = facts.scanned.zip(last.scanned).map_or(0, |(a, b)| a.saturating_sub(b));
        let cpu_ms = facts.cpu_ms.saturating_sub(last.cpu_ms);
        if let Some(now) = each_us(Duration::from_millis(cpu_ms), pages, MEASURED_FROM) {
            self.last = (*facts, now);
        } else if facts.scanned.is_none() {
            self.last = (*facts, (ALONE_US + MERGE_US) / 2.0);
        }
    }
}

/// What `ksmd` is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KsmdOrder {
    Run {
        /// `pages_to_scan`.
        batch: u64,
        /// `sleep_millisecs`.
        sleep_ms: u64,
        /// Share of a core that this is for: the speed may be corrected as soon as the cost
        /// of a page is known ([`speed`]).
        #[serde(default)]
        cores: f64,
        /// Until this many full scans since boot are done, then rest and look again.
        #[serde(default = "for_ever")]
        scans: u64,
        why: String,
    },
    /// Keep what is merged, and look at nothing.
    Rest { why: String },
}

fn for_ever() -> u64 {
    u64::MAX
}

/// How much dearer memory is in this state: the budget grows, the floor falls.
fn worth(state: Pressure) -> f64 {
    match state {
        Pressure::Clear => 1.0,
        Pressure::Soft => 2.0,
        Pressure::Hard => 4.0,
        Pressure::Critical => 5.0,
    }
}

pub fn govern(facts: &Facts, settings: &Settings, memory: &mut BurstMemory) -> KsmdOrder {
    let floor = settings.floor.share(1.0 / worth(facts.state));
    let cores = settings.share(facts.state);
    if let Some(mut burst) = memory.burst {
        burst.look(facts);
        if burst.has_grown(facts, floor) {
            burst = Burst { last: burst.last, ..Burst::begin(facts, cores) };
        }
        return match reason_to_end(facts, &burst, floor) {
            Some(why) => end(facts, floor, memory, &burst, why),
            None => run(facts, cores, memory, burst),
        };
    }
    if let Some(why) = reason_to_wait(facts, floor, memory) {
        return KsmdOrder::Rest { why };
    }
    run(facts, cores, memory, Burst::begin(facts, cores))
}

/// Why no burst is to begin.
fn reason_to_wait(facts: &Facts, floor: Bytes, memory: &BurstMemory) -> Option<String> {
    let (saves, cost) = (facts.planned.saves(), facts.planned.cost_s());
    let each = saves.share(1.0 / cost.max(0.001));
    let hold = memory.hold_until.filter(|u| facts.at < *u && facts.state < Pressure::Hard);
    let left = hold.map(|until| until.since(facts.at) / 1000);
    let opened = memory.done_of.is_some_and(|done_of| facts.has_more_than(done_of, floor));
    let is_done = facts.plan == memory.done && !opened;
    let whys = [
        (facts.plan == 0).then(|| "nothing was scanned yet".into()),
        is_done.then(|| "what was found is merged; until the next scan".into()),
        left.map(|left| format!("the last burst did not pay: not for another {left} s")),
        (saves < WORTH_A_BURST).then(|| format!("{saves} to be had: less than {WORTH_A_BURST}")),
        (each < floor).then(|| {
            format!(
                "{saves} for {cost:.1} s of CPU is {each} a second: less than the floor {floor}"
            )
        }),
    ];
    whys.into_iter().flatten().next()
}

/// Why a burst is to end, if it is.
fn reason_to_end(facts: &Facts, burst: &Burst, floor: Bytes) -> Option<&'static str> {
    let scans = burst.scans(facts);
    if scans >= SCANS_MOST {
        return Some("all of it was scanned often enough");
    }
    let planned = Bytes::pages(facts.planned.zeros.saturating_add(facts.planned.duplicates));
    if scans >= SCANS_LEAST && burst.gained(facts) >= planned.share(ENOUGH_SAVED) {
        return Some("all that was found is merged");
    }
    let judged = match burst.judged {
        Some(judged) => judged,
        // More than a tick ago: what it has done so far counts as a whole.
        None if scans > SCANS_LEAST => Facts { saved: burst.least, ..burst.began },
        None => return None,
    };
    if !is_due(facts, &judged) {
        return None;
    }
    let used_ms = facts.cpu_ms.saturating_sub(judged.cpu_ms).max(1);
    let saved = Bytes::pages(facts.saved.saturating_sub(judged.saved));
    if saved < floor.share(used_ms as f64 / 1000.0) {
        return Some("it saves less than the floor now");
    }
    let whole = facts.scans > judged.scans;
    (whole && saved < planned.share(SCAN_TOO_POOR))
        .then_some("a whole scan brought next to nothing")
}

/// Whether a burst that was judged then is to be judged again.
fn is_due(facts: &Facts, judged: &Facts) -> bool {
    let used_ms = facts.cpu_ms.saturating_sub(judged.cpu_ms);
    used_ms >= JUDGE_CPU_MS || facts.scans > judged.scans
}

fn end(
    facts: &Facts,
    floor: Bytes,
    memory: &mut BurstMemory,
    burst: &Burst,
    why: &str,
) -> KsmdOrder {
    let (saved, cpu_s) = (burst.gained(facts), burst.cpu_s(facts));
    memory.burst = None;
    (memory.done, memory.done_of) = (burst.plan, Some(burst.began.planned.saves()));
    memory.unpaid = if saved < floor.share(cpu_s) { memory.unpaid + 1 } else { 0 };
    memory.hold_until =
        (memory.unpaid > 0).then(|| facts.at.plus(doubled(HOLD_MS, memory.unpaid - 1)));
    KsmdOrder::Rest { why: format!("{why}: {saved} saved in {cpu_s:.1} s of CPU") }
}

fn run(facts: &Facts, cores: f64, memory: &mut BurstMemory, mut burst: Burst) -> KsmdOrder {
    let scans = burst.scans(facts);
    if scans >= SCANS_LEAST && burst.judged.is_none_or(|judged| is_due(facts, &judged)) {
        burst.judged = Some(*facts);
    }
    memory.burst = Some(burst);
    let (batch, sleep_ms) = speed(cores, burst.last.1);
    let (saves, cost_s) = (facts.planned.saves(), facts.planned.cost_s());
    let percent = (cores.min(1.0) * 1000.0).round() / 10.0;
    let why = format!("{saves} planned for {cost_s:.1} s of CPU, within {percent} % of a core");
    // After the second it is judged whether another is worth it, and so on.
    let more = SCANS_LEAST.saturating_sub(scans).max(1);
    KsmdOrder::Run { batch, sleep_ms, cores, scans: facts.scans.saturating_add(more), why }
}

/// What a page cost `ksmd`, microseconds; `None`: fewer pages than `enough`, or less time.
pub fn each_us(cpu: Duration, pages: u64, enough: (u64, Duration)) -> Option<f64> {
    let enough = pages >= enough.0 && cpu >= enough.1;
    enough.then(|| cpu.as_micros() as f64 / pages as f64)
}

/// Whether work within this share of a core is to be done in pulses so short that they
/// do not slow what runs on the core beside it.
pub fn is_gentle(cores: f64) -> bool {
    cores <= GENTLE
}

/// Batch and sleep that use this share of a core: as many pages as fit beside a
/// short sleep; a longer sleep where that would be too few, and the longest batch
/// with the shortest sleep where even that is too slow. Whole numbers are rounded
/// so that the share is not exceeded.
pub fn speed(cores: f64, each_us: f64) -> (u64, u64) {
    let (share, each_us) = (cores.clamp(0.001, 0.95), each_us.clamp(0.05, 100.0));
    let (least, sleep_ms) = match is_gentle(cores) {
        true => (BATCH_LEAST.1, PULSE_SLEEP_MS),
        false => (BATCH_LEAST.0, SLEEP_MS),
    };
    let beside = |batch: u64| batch as f64 * each_us / 1000.0 * (1.0 - share) / share;
    let pages = (sleep_ms as f64 * share / (1.0 - share) * 1000.0 / each_us) as u64;
    match pages {
        p if p < least => (least, (beside(least).ceil() as u64).clamp(1, 10_000)),
        p if p > BATCH_MOST => (BATCH_MOST, (beside(BATCH_MOST).ceil() as u64).max(1)),
        p => (p, sleep_ms),
    }
}

/// Whether a VM's merges break in a storm: `ksmd` merges, the guest writes, and both pay.
///
/// Compared are two looks at the VM, up to a minute apart: the pages that were merged at the
/// first, those broken out of merges since (copied on a write), and those merged anew since. It is
/// a storm where more than 16 MiB are broken, more than a tenth of what was merged, and more than
/// were merged anew. The VM is then closed to KSM for a while.
pub fn is_storm(merged_before: u64, broken: u64, newly_merged: u64) -> bool {
    broken > WORTH_A_BURST.0 / PAGE && broken > merged_before / 10 && broken > newly_merged
}
