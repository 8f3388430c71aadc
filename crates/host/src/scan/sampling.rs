//! How much to read: a sample where reading all would take long, then all of the
//! VMs in which the sample found duplicates.
//!
//! A page and its duplicate are both in a sample of one in n only once in n² times, so
//! a sample shows few of the duplicates there are. Two numbers of it are enough for an
//! estimate: how many pages had a duplicate in it, and how many pairs there were. They
//! fix the share of pages that have duplicates, q, and how many duplicates each has, m, if
//! all have the same number. Where that is not so the estimate is off, so it comes
//! with bounds that hold whatever the pages are: every page that was alone in the
//! sample stands for n different ones, or for none.

use ebb_core::units::{Bytes, PAGE};
use serde::Serialize;

use super::{Moments, Options, Scan, Scanner, Target};

/// A sample reads one of this many pieces of 64 KiB.
pub const ONE_IN: u32 = 8;
/// What each thread reads in about two seconds is read without a sample before.
const AT_ONCE: u64 = 10 << 30;
/// All of a VM is read where at least this share of its pages may have duplicates.
const PAYS: f64 = 0.005;

/// What a sample says of the whole; zeros left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    pub low: Bytes,
    /// If all pages that have duplicates have equally many.
    pub likely: Bytes,
    pub high: Bytes,
}

/// A survey: the deepest scan that was made, and what a sample said.
#[derive(Debug)]
pub struct Sampling {
    /// What was found. Of VMs that were not read whole: only the sample's part.
    pub scan: Scan,
    /// One flag for each target: it was read whole.
    pub whole: Vec<bool>,
    /// What VMs that were not read whole may save, from the sample.
    pub estimate: Option<Estimate>,
}

/// Scans as deep as it pays; `full`: all in any case. `held` is what the targets
/// hold together.
pub fn survey(
    scanner: &mut Scanner,
    targets: &[Target],
    held: Bytes,
    full: bool,
    options: &Options,
) -> Sampling {
    let threads = options.threads.unwrap_or_else(|| super::idle_cores(&scanner.root));
    let all = Options { one_in: 1, ..options.clone() };
    if full || held.0 <= AT_ONCE * threads as u64 {
        let scan = scanner.scan(targets, &all);
        return Sampling { scan, whole: vec![true; targets.len()], estimate: None };
    }
    let sample = scanner.scan(targets, &Options { one_in: ONE_IN, ..options.clone() });
    let whole: Vec<bool> = sample.vms.iter().map(|v| pays(v.duplicates, v.pages.read)).collect();
    let chosen: Vec<Target> =
        targets.iter().zip(&whole).filter(|(_, w)| **w).map(|(t, _)| t.clone()).collect();
    let estimate = estimate(&sample.moments, ONE_IN);
    if chosen.is_empty() {
        return Sampling { scan: scaled(sample), whole, estimate: Some(estimate) };
    }
    let deep = scanner.scan(&chosen, &all);
    let estimate = (chosen.len() < targets.len()).then_some(estimate);
    Sampling { scan: joined(scaled(sample), deep, &whole), whole, estimate }
}

/// Whether enough pages of a sample had duplicates in it to read all. Most duplicates of a
/// page are not in the sample, so each that is stands for up to [`ONE_IN`].
fn pays(duplicates: u64, read: u64) -> bool {
    read > 0 && duplicates as f64 * f64::from(ONE_IN) >= PAYS * read as f64
}

/// A sample's zeros, for the whole; duplicates cannot be scaled like that.
fn scaled(mut sample: Scan) -> Scan {
    sample.split = super::Split::default();
    for vm in &mut sample.vms {
        let zeros = vm.pages.zero as f64 / vm.pages.read.max(1) as f64 * vm.pages.held as f64;
        vm.split = super::Split { zero: Bytes::pages(zeros as u64), ..Default::default() };
        sample.split.add(&vm.split);
    }
    sample
}

/// What a second scan read whole replaces what the first had of it.
fn joined(mut sample: Scan, deep: Scan, whole: &[bool]) -> Scan {
    let mut split = deep.split;
    let mut vms = deep.vms.into_iter();
    for (vm, whole) in sample.vms.iter_mut().zip(whole) {
        match (*whole).then(|| vms.next()).flatten() {
            Some(read) => *vm = read,
            None => split.add(&vm.split),
        }
    }
    Scan {
        split,
        vms: sample.vms,
        time: sample.time + deep.time,
        paused: sample.paused + deep.paused,
        cpu: sample.cpu + deep.cpu,
        read: sample.read + deep.read,
        by_agents: sample.by_agents + deep.by_agents,
        by_lines: sample.by_lines + deep.by_lines,
        table: sample.table.max(deep.table),
        ..deep
    }
}

/// What merging everything would save, from a sample of one page in `one_in`.
pub fn estimate(m: &Moments, one_in: u32) -> Estimate {
    if m.pages < 1.0 {
        return Estimate::default();
    }
    let n = f64::from(one_in);
    let pages = m.pages * n;
    let bytes = |saved: f64| Bytes((saved.max(0.0) * PAGE as f64) as u64);
    // Different contents: those seen at least, those seen alone n times at most.
    let low = pages - (m.single * n + (m.distinct - m.single));
    let high = pages - m.distinct;
    let likely = share_saved(m, 1.0 / n) * pages;
    Estimate { low: bytes(low), likely: bytes(likely.clamp(low.max(0.0), high)), high: bytes(high) }
}

/// The share of pages that merging saves, if each page that has duplicates has m of
/// them: q·m/(m+1). In a sample of rate r a page sees one of its m duplicates with
/// probability 1−(1−r)^m, and r·m of them on average.
fn share_saved(m: &Moments, r: f64) -> f64 {
    let seen = (m.pages - m.single) / m.pages;
    let duplicates = 2.0 * m.pairs / m.pages;
    if seen <= 0.0 || duplicates <= 0.0 {
        return 0.0;
    }
    // Falls from 1 at one duplicate towards 0: found by halving.
    let ratio = |t: f64| (1.0 - (1.0 - r).powf(t)) / (r * t);
    let (mut few, mut many) = (1.0, 1e9);
    for _ in 0..200 {
        let middle = f64::sqrt(few * many);
        if ratio(middle) > seen / duplicates { few = middle } else { many = middle }
    }
    let q = (duplicates / (r * few)).min(1.0);
    q * few / (few + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages that have `m` duplicates each and pages that have none, sampled.
    fn sampled(alone: u32, sets: u32, m: u32, rng: &mut u64) -> Moments {
        let mut draw = || {
            *rng = rng.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (*rng >> 33).is_multiple_of(u64::from(ONE_IN))
        };
        let mut out = Moments::default();
        let mut content = |n: u32| {
            let k = (0..n).filter(|_| draw()).count() as f64;
            out.pages += k;
            out.distinct += if k > 0.0 { 1.0 } else { 0.0 };
            out.single += if k == 1.0 { 1.0 } else { 0.0 };
            out.pairs += k * (k - 1.0) / 2.0;
        };
        (0..alone).for_each(|_| content(1));
        (0..sets).for_each(|_| content(m + 1));
        out
    }

    #[test]
    fn the_estimate_is_near_and_its_bounds_hold() {
        let mut rng = 1;
        for (alone, sets, m) in [
            (100_000, 0, 1),
            (90_000, 5_000, 1),
            (50_000, 25_000, 1),
            (50_000, 10_000, 4),
            (0, 2_000, 49),
            (100_000, 100, 999),
        ] {
            let e = estimate(&sampled(alone, sets, m, &mut rng), ONE_IN);
            let truth = Bytes::pages(u64::from(sets * m));
            let pages = Bytes::pages(u64::from(alone + sets * (m + 1)));
            let slack = pages.share(0.02);
            assert!(e.low <= truth + slack && truth <= e.high + slack, "{alone} {sets} {m}: {e:?}");
            let off = e.likely.abs_diff(truth);
            assert!(off <= slack + truth.share(0.1), "{alone} {sets} {m}: {e:?} {truth}");
        }
        assert_eq!(estimate(&Moments::default(), ONE_IN), Estimate::default());
    }

    #[test]
    fn a_sample_without_duplicates_does_not_pay_and_one_with_few_does() {
        assert!(!pays(0, 0) && !pays(0, 10_000) && !pays(6, 10_000));
        assert!(pays(7, 10_000));
    }
}
