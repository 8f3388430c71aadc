//! Writes `ksmd`'s speed, corrects it each 100 ms, and stops it at the scan ordered as its last.
//!
//! A tick is too long for the last two. What a page costs `ksmd` changes by a factor of ten
//! from one scan to the next, and a small VM is scanned many times in a second.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_core::config::MergeConfig;
use ebb_core::policy::merge::{KsmdOrder, MEASURED_FROM, each_us, is_gentle, speed};

use super::ksm::{KsmError, KsmOwner};
use crate::probe::ksm::{ksmd, number};
use crate::probe::process::read_run_time;
use crate::root::Root;
use crate::waker::Waker;

/// Between two looks whether the last scan is done.
const PAUSE: Duration = Duration::from_millis(10);
/// Between two corrections of the speed by what a page costs.
const PACE: Duration = Duration::from_millis(100);
/// In pulses there are few pages in that time: the cost of one is computed from this many and
/// this much time, which is counted in nanoseconds here.
const PULSED: (u64, Duration) = (100, Duration::from_micros(500));

#[derive(Debug)]
pub struct KsmdThrottle {
    pub root: Root,
    note: PathBuf,
    config: MergeConfig,
    wake: Waker,
    owner: Option<KsmOwner>,
    burst: Option<Burst>,
}

#[derive(Debug)]
struct Burst {
    cores: f64,
    scans: u64,
    ksmd: Option<u32>,
    speed: (u64, u64),
    /// When, CPU time of `ksmd`, and pages that it had looked at.
    seen: Option<(Instant, Duration, u64)>,
}

impl KsmdThrottle {
    /// Takes nothing yet; see [`KsmOwner::take`].
    pub fn new(root: Root, note: PathBuf, config: MergeConfig, wake: Waker) -> KsmdThrottle {
        KsmdThrottle { root, note, config, wake, owner: None, burst: None }
    }

    pub fn order(&mut self, order: &KsmdOrder) -> Result<(), KsmError> {
        self.burst = None;
        let KsmdOrder::Run { batch, sleep_ms, cores, scans, .. } = order else {
            return self.apply(order);
        };
        if self.scans()? >= *scans {
            // Ordered again by a tick that has not seen the end.
            self.wake.wake();
            return self.rest();
        }
        self.apply(order)?;
        let (ksmd, speed) = (ksmd(&self.root), (*batch, *sleep_ms));
        self.burst = Some(Burst { cores: *cores, scans: *scans, ksmd, speed, seen: None });
        Ok(())
    }

    fn apply(&mut self, order: &KsmdOrder) -> Result<(), KsmError> {
        if self.owner.is_none() {
            self.owner = Some(KsmOwner::take(self.root.clone(), &self.note, self.config.clone())?);
        }
        self.owner.iter().try_for_each(|o| o.apply(order))
    }

    fn rest(&mut self) -> Result<(), KsmError> {
        self.apply(&KsmdOrder::Rest { why: String::new() })
    }

    fn scans(&self) -> Result<u64, KsmError> {
        Ok(number(&self.root, "full_scans")?.unwrap_or_default())
    }

    /// How soon [`KsmdThrottle::keep`] is to be called; `None`: nothing is under way.
    pub fn pause(&self) -> Option<Duration> {
        self.burst.as_ref().map(|b| if is_gentle(b.cores) { PACE } else { PAUSE })
    }

    pub fn keep(&mut self) -> Result<(), KsmError> {
        let scans = self.scans()?;
        let Some(burst) = &mut self.burst else { return Ok(()) };
        if scans >= burst.scans {
            self.burst = None;
            let done = self.rest();
            self.wake.wake();
            return done;
        }
        let due = burst.seen.is_none_or(|(at, ..)| at.elapsed() >= PACE);
        let new = if due { burst.pace(&self.root) } else { None };
        match (new, &self.owner) {
            (Some((batch, sleep_ms)), Some(owner)) => owner.speed(batch, sleep_ms),
            _ => Ok(()),
        }
    }

    pub fn release(&mut self) -> Result<(), KsmError> {
        self.burst = None;
        self.owner.take().map_or(Ok(()), KsmOwner::release)
    }
}

impl Burst {
    /// The speed by what pages cost since the last look, where it is another one.
    fn pace(&mut self, root: &Root) -> Option<(u64, u64)> {
        let cpu = read_run_time(root, self.ksmd?).ok()??;
        let scanned = number(root, "pages_scanned").ok()??;
        let Some((_, before, pages)) = self.seen else {
            self.seen = Some((Instant::now(), cpu, scanned));
            return None;
        };
        let enough = if is_gentle(self.cores) { PULSED } else { MEASURED_FROM };
        let (used, looked_at) = (cpu.saturating_sub(before), scanned.saturating_sub(pages));
        let each = each_us(used, looked_at, enough)?;
        self.seen = Some((Instant::now(), cpu, scanned));
        let new = speed(self.cores, each);
        let other = new.1 != self.speed.1 || new.0.abs_diff(self.speed.0) > self.speed.0 / 10;
        other.then(|| {
            self.speed = new;
            new
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ksm::{self, tests::knob};
    use super::*;
    use crate::testing::Tree;

    fn scene() -> (Tree, KsmdThrottle) {
        let knobs = [("run", "0"), ("pages_to_scan", "77"), ("sleep_millisecs", "9")];
        let (tree, wake) = (ksm::tests::tree(&knobs), Waker::new().unwrap());
        tree.put("/proc/77/comm", "ksmd\n");
        worked(&tree, 5, 0, 0);
        let note = tree.path("/ksm.json");
        let keeper = KsmdThrottle::new(tree.clone(), note, MergeConfig::default(), wake);
        (tree, keeper)
    }

    /// What `ksmd` has done since boot.
    fn worked(root: &Root, scans: u64, pages: u64, cpu_ms: u64) {
        root.put("/sys/kernel/mm/ksm/full_scans", scans.to_string());
        root.put("/sys/kernel/mm/ksm/pages_scanned", pages.to_string());
        root.put("/proc/77/schedstat", format!("{} 0 9\n", cpu_ms * 1_000_000));
    }

    fn run(scans: u64) -> KsmdOrder {
        KsmdOrder::Run { batch: 20_000, sleep_ms: 20, cores: 0.5, scans, why: String::new() }
    }

    #[test]
    fn ksmd_stops_at_the_scan_that_was_ordered_and_a_late_order_does_not_start_it() {
        let (root, mut keeper) = scene();
        keeper.order(&run(7)).unwrap();
        assert!(keeper.pause().is_some());
        worked(&root, 6, 1000, 10);
        keeper.keep().unwrap();
        assert_eq!(knob(&root, "run"), "1");
        worked(&root, 7, 2000, 20);
        keeper.keep().unwrap();
        assert_eq!((knob(&root, "run"), keeper.pause()), ("0".into(), None));
        keeper.order(&run(7)).unwrap();
        assert_eq!((knob(&root, "run"), keeper.pause()), ("0".into(), None));
        keeper.order(&run(8)).unwrap();
        assert_eq!(knob(&root, "run"), "1");
        keeper.release().unwrap();
        assert_eq!((knob(&root, "run"), knob(&root, "pages_to_scan")), ("0".into(), "77".into()));
    }

    #[test]
    fn in_pulses_what_a_page_costs_is_known_after_a_hundred() {
        let (root, mut keeper) = scene();
        let (batch, sleep_ms) = speed(0.008, 6.0);
        let order = KsmdOrder::Run { batch, sleep_ms, cores: 0.008, scans: 9, why: String::new() };
        keeper.order(&order).unwrap();
        keeper.keep().unwrap();
        let mut after = |pages, cpu_ms| {
            worked(&root, 5, pages, cpu_ms);
            std::thread::sleep(PACE);
            keeper.keep().unwrap();
            knob(&root, "pages_to_scan").parse::<u64>().unwrap()
        };
        assert_eq!(after(99, 1), batch, "too few to tell");
        assert!(after(1_250, 1) > 6 * batch, "0.8 µs a page");
    }

    #[test]
    fn ksmd_is_kept_to_its_share_when_pages_become_dearer() {
        let (root, mut keeper) = scene();
        keeper.order(&run(u64::MAX)).unwrap();
        assert_eq!(knob(&root, "pages_to_scan"), "20000");
        keeper.keep().unwrap();
        let mut after = |pages, cpu_ms| {
            worked(&root, 5, pages, cpu_ms);
            std::thread::sleep(PACE);
            keeper.keep().unwrap();
            knob(&root, "pages_to_scan")
        };
        assert_eq!(after(100_000, 500), "4000", "5 µs a page, 20 ms of work beside 20 of sleep");
        assert_eq!(after(100_500, 900), "4000", "too few to tell");
        assert_eq!(after(200_000, 1000), "4000", "the same");
        assert_eq!(after(300_000, 1100), "20000");
    }
}
