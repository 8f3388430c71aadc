//! Merging: when KSM may work, how hard, and when it is to stop.
//!
//! KSM's own knobs count pages, and nobody who sets them knows what a page is
//! worth. Here there is a budget (CPU time of `ksmd`) and a floor (memory saved
//! for a second of it). The scanner says beforehand what a burst would save; the
//! burst goes on while the memory saved since its last look pays for the CPU it
//! took, and afterwards nothing runs until the scanner has found more. A host that
//! is short pays more for memory.
//!
//! Costs per page were measured on a 2-vCPU machine under Linux 6.18; they only
//! order alternatives, and what `ksmd` really used decides when to stop.

use serde::{Deserialize, Serialize};

use crate::model::Pressure;
use crate::units::{Bytes, PAGE, Stamp};

/// CPU microseconds of `ksmd` for a page that it hashes for the first time.
const FIRST_LOOK_US: f64 = 0.8;
/// To look a page up that has no twin, each scan.
const ALONE_US: f64 = 6.0;
/// To merge a page.
const MERGE_US: f64 = 3.6;
/// To replace a page of zeros.
const ZERO_US: f64 = 2.5;
/// Scans until everything is merged that can be: a page must be unchanged in two.
const SCANS: f64 = 2.0;
/// KSM's own memory for each page that it looks at.
pub const METADATA: u64 = 64;

/// Most pages between two sleeps: `run` can be written only between batches, and
/// a batch of 20,000 pages takes a tenth of a second.
const BATCH_MOST: u64 = 20_000;
/// The least that is worth waking `ksmd`.
const BATCH_LEAST: u64 = 100;
/// Sleep between batches, ms. Never 0: the scan would not let go of its lock.
const SLEEP_MS: u64 = 20;
/// Less than this is not worth a burst.
const LEAST: Bytes = Bytes::mib(16);
/// A burst is judged after so many seconds of CPU, again and again.
const JUDGE_CPU_MS: u64 = 2_000;
/// From so many full scans on a burst is judged after each, however little CPU it
/// took: by then everything was seen often enough to be merged.
const SCANS_JUDGED: u64 = 4;
/// A burst ends after so many in any case.
const SCANS_MOST: u64 = 64;
/// After a burst that did not pay; doubled each time.
const HOLD_MS: (u64, u64) = (60_000, 3_600_000);

/// Pages that KSM would look at, and what comes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Candidates {
    /// All of them.
    pub pages: u64,
    /// Of those, zeros.
    pub zeros: u64,
    /// Of those, pages that go because of a twin.
    pub twins: u64,
}

impl Candidates {
    /// What merging them saves, less KSM's own memory for them.
    pub fn saves(&self) -> Bytes {
        let own = self.pages.saturating_sub(self.zeros).saturating_mul(METADATA);
        Bytes::pages(self.zeros.saturating_add(self.twins)) - Bytes(own)
    }

    fn alone(&self) -> u64 {
        self.pages.saturating_sub(self.zeros.saturating_add(self.twins))
    }

    /// CPU seconds of `ksmd` until it is done.
    pub fn cost_s(&self) -> f64 {
        let alone = self.alone() as f64;
        let merged = self.twins as f64 * (FIRST_LOOK_US + MERGE_US);
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

    /// Adds others.
    pub fn add(&mut self, other: &Candidates) {
        self.pages = self.pages.saturating_add(other.pages);
        self.zeros = self.zeros.saturating_add(other.zeros);
        self.twins = self.twins.saturating_add(other.twins);
    }
}

/// What the operator decided.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Share of one core that `ksmd` may use while the host is not short.
    pub cores: f64,
    /// Memory that a second of its CPU must save while the host is not short.
    pub floor: Bytes,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { cores: 0.2, floor: Bytes::mib(32) }
    }
}

/// What is known now. All counters since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// When.
    pub at: Stamp,
    /// The host's state.
    pub state: Pressure,
    /// What the last plan made mergeable, as the scanner saw it.
    pub planned: Candidates,
    /// A number that grows with each plan.
    pub plan: u64,
    /// CPU time of `ksmd`, ms.
    pub cpu_ms: u64,
    /// Pages it looked at; `None` before Linux 6.12.
    pub scanned: Option<u64>,
    /// Full scans.
    pub scans: u64,
    /// Pages saved: `pages_sharing` and zero pages.
    pub saved: u64,
}

/// What is remembered between ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// The burst that runs.
    pub burst: Option<Burst>,
    /// The plan whose burst ended last.
    pub done: u64,
    /// Nothing before this, whatever is planned.
    pub hold_until: Option<Stamp>,
    /// Bursts in a row that did not pay.
    pub unpaid: u32,
}

/// A burst of `ksmd`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    /// For this plan.
    pub plan: u64,
    /// Facts when it began.
    pub began: Facts,
    /// Facts when it was judged last.
    pub judged: Facts,
}

/// What `ksmd` is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Work, at this speed.
    Run {
        /// `pages_to_scan`.
        batch: u64,
        /// `sleep_millisecs`.
        sleep_ms: u64,
        /// Why.
        why: String,
    },
    /// Keep what is merged, and look at nothing.
    Rest {
        /// Why.
        why: String,
    },
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

/// Decides a tick.
pub fn govern(facts: &Facts, settings: &Settings, memory: &mut Memory) -> Order {
    let worth = worth(facts.state);
    let floor = settings.floor.share(1.0 / worth);
    if let Some(burst) = memory.burst {
        return match verdict(facts, &burst, floor) {
            Some(why) => end(facts, floor, memory, &burst, why),
            None => run(facts, settings.cores * worth, memory, burst),
        };
    }
    if let Some(why) = idle(facts, floor, memory) {
        return Order::Rest { why };
    }
    let burst = Burst { plan: facts.plan, began: *facts, judged: *facts };
    run(facts, settings.cores * worth, memory, burst)
}

/// Why no burst is to begin.
fn idle(facts: &Facts, floor: Bytes, memory: &Memory) -> Option<String> {
    let saves = facts.planned.saves();
    if facts.plan == 0 {
        return Some("nothing was scanned yet".into());
    }
    if facts.plan == memory.done {
        return Some("what was found is merged; until the next scan".into());
    }
    if let Some(until) = memory.hold_until.filter(|u| facts.at < *u && facts.state < Pressure::Hard)
    {
        let left = until.since(facts.at) / 1000;
        return Some(format!("the last burst did not pay: not for another {left} s"));
    }
    if saves < LEAST {
        return Some(format!("{saves} to be had: less than {LEAST}"));
    }
    let cost = facts.planned.cost_s();
    let each = saves.share(1.0 / cost.max(0.001));
    (each < floor).then(|| {
        format!("{saves} for {cost:.1} s of CPU is {each} a second: less than the floor {floor}")
    })
}

/// Why a burst is to end, if it is.
fn verdict(facts: &Facts, burst: &Burst, floor: Bytes) -> Option<&'static str> {
    let scans = facts.scans.saturating_sub(burst.began.scans);
    if scans >= SCANS_MOST {
        return Some("all of it was scanned often enough");
    }
    if !is_due(facts, burst) {
        return None;
    }
    let used_ms = facts.cpu_ms.saturating_sub(burst.judged.cpu_ms).max(1);
    let saved = Bytes::pages(facts.saved.saturating_sub(burst.judged.saved));
    (saved < floor.share(used_ms as f64 / 1000.0)).then_some("it saves less than the floor now")
}

/// Whether a burst is to be judged now. Nothing is merged before all was seen twice.
fn is_due(facts: &Facts, burst: &Burst) -> bool {
    let scans = facts.scans.saturating_sub(burst.began.scans);
    let used_ms = facts.cpu_ms.saturating_sub(burst.judged.cpu_ms);
    let scanned = scans >= SCANS_JUDGED && facts.scans > burst.judged.scans;
    scans >= SCANS as u64 && (used_ms >= JUDGE_CPU_MS || scanned)
}

fn end(facts: &Facts, floor: Bytes, memory: &mut Memory, burst: &Burst, why: &str) -> Order {
    let saved = Bytes::pages(facts.saved.saturating_sub(burst.began.saved));
    let cpu_s = facts.cpu_ms.saturating_sub(burst.began.cpu_ms) as f64 / 1000.0;
    memory.burst = None;
    memory.done = burst.plan;
    memory.unpaid = if saved < floor.share(cpu_s) { memory.unpaid + 1 } else { 0 };
    memory.hold_until = (memory.unpaid > 0).then(|| {
        let hold = HOLD_MS.0 << (memory.unpaid - 1).min(16);
        facts.at.plus(hold.min(HOLD_MS.1))
    });
    Order::Rest { why: format!("{why}: {saved} saved in {cpu_s:.1} s of CPU") }
}

fn run(facts: &Facts, cores: f64, memory: &mut Memory, mut burst: Burst) -> Order {
    if is_due(facts, &burst) {
        burst.judged = *facts;
    }
    memory.burst = Some(burst);
    let each_us = page_us(facts, &burst.began);
    let (batch, sleep_ms) = speed(cores, each_us);
    let planned = facts.planned;
    let why = format!(
        "{} planned for {:.1} s of CPU, within {:.0} % of a core",
        planned.saves(),
        planned.cost_s(),
        cores.min(1.0) * 100.0
    );
    Order::Run { batch, sleep_ms, why }
}

/// What a page cost `ksmd` in this burst, µs; what pages cost on average until
/// enough was seen.
fn page_us(facts: &Facts, began: &Facts) -> f64 {
    let pages = facts.scanned.zip(began.scanned).map_or(0, |(a, b)| a.saturating_sub(b));
    let cpu_ms = facts.cpu_ms.saturating_sub(began.cpu_ms);
    match (pages, cpu_ms) {
        (10_000.., 100..) => (cpu_ms as f64 * 1000.0 / pages as f64).clamp(0.05, 100.0),
        _ => (ALONE_US + MERGE_US) / 2.0,
    }
}

/// Batch and sleep that use this share of a core: as many pages as fit beside a
/// short sleep; a longer sleep where that would be too few, and the longest batch
/// with the shortest sleep where even that is too slow.
fn speed(cores: f64, each_us: f64) -> (u64, u64) {
    let share = cores.clamp(0.001, 0.95);
    let busy_ms = |sleep: u64| sleep as f64 * share / (1.0 - share);
    let pages = (busy_ms(SLEEP_MS) * 1000.0 / each_us) as u64;
    if pages < BATCH_LEAST {
        let busy_ms = BATCH_LEAST as f64 * each_us / 1000.0;
        return (BATCH_LEAST, ((busy_ms * (1.0 - share) / share) as u64).clamp(1, 10_000));
    }
    if pages > BATCH_MOST {
        let busy_ms = BATCH_MOST as f64 * each_us / 1000.0;
        return (BATCH_MOST, ((busy_ms * (1.0 - share) / share) as u64).max(1));
    }
    (pages, SLEEP_MS)
}

/// Pages that break away again: `ksmd` merges and guests write, and both pay.
///
/// A storm: in this time more pages were broken out of merges (copy-on-write)
/// than a tenth of what is merged, and more than were merged anew. Its ranges are
/// to be released.
pub fn is_storm(merged_before: u64, merged_now: u64, newly_merged: u64) -> bool {
    let broken = (merged_before + newly_merged).saturating_sub(merged_now);
    broken > LEAST.0 / PAGE && broken > merged_before / 10 && broken > newly_merged
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLAN: Candidates = Candidates { pages: 100_000, zeros: 0, twins: 80_000 };

    fn facts(at: u64, cpu_ms: u64, scans: u64, saved: u64) -> Facts {
        let (planned, plan) = (PLAN, 1);
        Facts { at: Stamp(at), planned, plan, cpu_ms, scans, saved, ..Facts::default() }
    }

    fn rests(order: &Order, with: &str) -> bool {
        matches!(order, Order::Rest { why } if why.contains(with))
    }

    #[test]
    fn nothing_runs_before_a_scan_has_found_enough() {
        let mut m = Memory::default();
        let s = Settings::default();
        let none = Facts::default();
        assert!(rests(&govern(&none, &s, &mut m), "nothing was scanned"));
        let little = Candidates { pages: 9000, zeros: 0, twins: 4000 };
        let little = Facts { planned: little, ..facts(0, 0, 0, 0) };
        assert!(rests(&govern(&little, &s, &mut m), "less than 16 MiB"));
        let thin = Candidates { pages: 10_000_000, zeros: 0, twins: 200_000 };
        let thin = Facts { planned: thin, ..facts(0, 0, 0, 0) };
        assert!(rests(&govern(&thin, &s, &mut m), "less than the floor"));
        assert!(matches!(govern(&facts(0, 0, 0, 0), &s, &mut m), Order::Run { .. }));
    }

    #[test]
    fn a_burst_ends_when_it_no_longer_pays_and_does_not_begin_again_for_the_same_plan() {
        let mut m = Memory::default();
        let s = Settings::default();
        let mut step = |f: Facts| govern(&f, &s, &mut m);
        assert!(matches!(step(facts(0, 0, 10, 0)), Order::Run { .. }));
        assert!(matches!(step(facts(1000, 5000, 11, 0)), Order::Run { .. }), "not seen twice yet");
        assert!(matches!(step(facts(2000, 7000, 12, 78_000)), Order::Run { .. }));
        let done = step(facts(3000, 9500, 13, 78_100));
        assert!(rests(&done, "saves less than the floor now: 305 MiB saved in 9.5 s"), "{done:?}");
        assert!(rests(&step(facts(4000, 9500, 13, 78_100)), "until the next scan"));
        let again = Facts { plan: 2, ..facts(5000, 9500, 13, 78_100) };
        assert!(matches!(step(again), Order::Run { .. }));
    }

    #[test]
    fn a_burst_that_did_not_pay_is_followed_by_ever_longer_rests() {
        let mut m = Memory::default();
        let s = Settings::default();
        for n in 0..8u64 {
            let at = n * 10_000_000;
            let begin = Facts { plan: n + 1, ..facts(at, n * 9000, n * 9, 0) };
            assert!(matches!(govern(&begin, &s, &mut m), Order::Run { .. }), "{n}");
            let end = Facts { plan: n + 1, ..facts(at + 1, n * 9000 + 8000, n * 9 + 2, 0) };
            assert!(rests(&govern(&end, &s, &mut m), "saves less"), "{n}");
            let held = m.hold_until.unwrap().since(Stamp(at + 1));
            assert_eq!(held, (60_000 << n).min(3_600_000));
            let soon = Facts { plan: 99, ..facts(at + 2, n * 9000 + 8000, n * 9 + 2, 0) };
            assert!(rests(&govern(&soon, &s, &mut m), "did not pay"));
        }
        let short = Facts { plan: 99, state: Pressure::Hard, ..facts(70_000_003, 71_000, 66, 0) };
        assert!(matches!(govern(&short, &s, &mut m), Order::Run { .. }), "a short host tries");
    }

    #[test]
    fn a_burst_goes_on_while_scans_bring_something_and_ends_after_one_that_does_not() {
        let mut m = Memory::default();
        let s = Settings::default();
        let mut step = |f: Facts| govern(&f, &s, &mut m);
        step(facts(0, 0, 0, 0));
        assert!(
            matches!(step(facts(1, 300, 4, 18_000)), Order::Run { .. }),
            "little CPU, much saved"
        );
        assert!(matches!(step(facts(2, 400, 4, 18_000)), Order::Run { .. }), "the same scan");
        assert!(matches!(step(facts(3, 600, 5, 32_000)), Order::Run { .. }));
        assert!(rests(&step(facts(4, 700, 6, 32_010)), "less than the floor now: 125 MiB"));
        govern(&Facts { plan: 2, ..facts(5, 700, 6, 32_010) }, &s, &mut m);
        let many = Facts { plan: 2, ..facts(6, 800, 70, 90_000) };
        assert!(rests(&govern(&many, &s, &mut m), "often enough"));
    }

    #[test]
    fn costs_and_gains_are_what_was_measured() {
        // 2 GiB with 20 % twins: 4.6 s of CPU for plain KSM with its further scan.
        let all = Candidates { pages: 524_288, zeros: 0, twins: 104_858 };
        assert!((2.5..4.7).contains(&all.cost_s()), "{}", all.cost_s());
        let dense = Candidates { pages: 104_858, ..all };
        assert!((0.4..0.7).contains(&dense.cost_s()), "{}", dense.cost_s());
        assert_eq!(dense.again_s(), 0.0);
        let lonely = Candidates { pages: 1 << 20, zeros: 0, twins: 0 };
        assert_eq!(lonely.saves(), Bytes::ZERO, "metadata is no gain");
    }

    #[test]
    fn a_storm_is_more_breaking_than_merging() {
        assert!(is_storm(100_000, 80_000, 1000));
        assert!(!is_storm(100_000, 99_000, 0), "a hundredth");
        assert!(!is_storm(1_000_000, 950_000, 0), "a twentieth");
        assert!(!is_storm(100_000, 100_000, 15_000), "as many came");
        assert!(!is_storm(100, 0, 0), "nothing");
    }

    proptest! {
        #[test]
        fn knobs_stay_responsive_and_near_the_budget(cores in 0.0f64..2.0, each in 0.05f64..100.0) {
            let (batch, sleep) = speed(cores, each);
            prop_assert!((BATCH_LEAST..=BATCH_MOST).contains(&batch) && sleep >= 1);
            let busy = batch as f64 * each / 1000.0;
            let share = busy / (busy + sleep as f64);
            // A least sleep of 1 ms and whole milliseconds bend small numbers.
            prop_assert!(share <= cores.clamp(0.001, 0.95) * 1.3 + 0.02, "{batch} {sleep} {share}");
        }

        #[test]
        fn any_facts_give_an_order(
            at in 0u64..1 << 40, cpu in 0u64..1 << 40, scans in 0u64..100, saved in any::<u64>(),
            pages in any::<u64>(), plan in 0u64..4, steps in 1usize..5,
        ) {
            let mut m = Memory::default();
            for i in 0..steps as u64 {
                let planned = Candidates { pages, zeros: pages / 3, twins: pages / 4 };
                let f = Facts { planned, plan: plan + i % 2, ..facts(at + i, cpu, scans * i, saved) };
                if let Order::Run { batch, sleep_ms, .. } = govern(&f, &Settings::default(), &mut m) {
                    prop_assert!(batch <= BATCH_MOST && sleep_ms >= 1);
                }
            }
        }
    }
}
