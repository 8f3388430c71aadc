//! How an arm went: looked at again and again, and what follows from that.
//!
//! What is merged is read from the VMs' page tables (`smaps_rollup`): KSM's counters
//! keep pages whose merge was broken by a write until `ksmd` comes by again.

use std::time::Instant;

use anyhow::{Context, Result};
use ebb_core::units::Bytes;
use ebb_host::probe::ksm::{ksmd, read_ksm, read_ksm_stat};
use ebb_host::probe::process::read_run_time;
use ebb_host::root::Root;

/// An arm has come to its end where it has this share of what it saves in the end.
const ALL: f64 = 0.995;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Seconds since the arm began.
    pub at: f64,
    /// Processor time since then: `ksmd`, scanner, daemon.
    pub cpu: f64,
    /// Guest RAM that KSM has merged, each place that maps a frame.
    pub merged: Bytes,
    /// Full scans of `ksmd` since then.
    pub scans: u64,
}

/// All looks at an arm, the first from before it began.
#[derive(Clone, Debug, Default)]
pub struct Course(pub Vec<Point>);

impl Course {
    fn first(&self) -> Point {
        self.0.first().copied().unwrap_or_default()
    }

    pub fn last(&self) -> Point {
        self.0.last().copied().unwrap_or_default()
    }

    /// What the arm itself merged until then.
    fn gained(&self, point: &Point) -> Bytes {
        point.merged - self.first().merged
    }

    /// The first look at which this share of all that it merged was merged; `None`
    /// for more than all.
    pub fn reached(&self, share: f64) -> Option<Point> {
        // Merges may be broken again: more than in the end there was is not enough.
        if share > 1.0 {
            return None;
        }
        let goal = self.gained(&self.last()).0 as f64 * share;
        self.0.iter().find(|p| self.gained(p).0 as f64 >= goal).copied()
    }

    /// When it had all but nothing more to come.
    pub fn converged(&self) -> Point {
        self.reached(ALL).unwrap_or(self.last())
    }

    /// The mean over time of what was merged.
    pub fn mean(&self) -> Bytes {
        let area: f64 = self
            .0
            .windows(2)
            .map(|w| (w[1].at - w[0].at) * (w[0].merged.0 + w[1].merged.0) as f64 / 2.0)
            .sum();
        Bytes((area / (self.last().at - self.first().at).max(1e-9)) as u64)
    }

    /// Whether the last so many full scans brought next to nothing.
    pub fn is_still(&self, scans: u64, least: Bytes) -> bool {
        let last = self.last();
        let Some(then) = last.scans.checked_sub(scans) else { return false };
        let before = self.0.iter().rev().find(|p| p.scans <= then);
        before.is_some_and(|p| last.merged <= p.merged + least)
    }
}

#[derive(Debug)]
pub struct Meter {
    pids: Vec<u32>,
    ksmd: u32,
    began: Instant,
    cpu: f64,
    scans: u64,
}

impl Meter {
    /// Everything counts from now on.
    pub fn begin(pids: Vec<u32>) -> Result<Meter> {
        let ksmd = ksmd(&Root::default()).context("no ksmd")?;
        let scans = read_ksm(&Root::default())?.context("no KSM")?.full_scans;
        Ok(Meter { pids, ksmd, began: Instant::now(), cpu: run_time(ksmd)?, scans })
    }

    /// One look; `own`: processor time that the arm used beside `ksmd`.
    pub fn look(&self, own: f64) -> Result<Point> {
        let now = read_ksm(&Root::default())?.context("no KSM")?;
        let merged = self.pids.iter().map(|pid| merged(*pid)).sum::<Result<Bytes>>()?;
        Ok(Point {
            at: self.began.elapsed().as_secs_f64(),
            cpu: run_time(self.ksmd)? - self.cpu + own,
            merged,
            scans: now.full_scans - self.scans,
        })
    }
}

/// What of a process is merged, by its page tables; the zero page is not counted
/// there, but by KSM, and that at once.
fn merged(pid: u32) -> Result<Bytes> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).context(path.clone())?;
    let kib = text.lines().find_map(|l| l.strip_prefix("KSM:")?.split_whitespace().next());
    let kib: u64 = kib.and_then(|n| n.parse().ok()).context(path)?;
    let stat = read_ksm_stat(&Root::default(), pid)?.unwrap_or_default();
    Ok(Bytes::kib(kib) + Bytes::pages(stat.zero_pages.unwrap_or(0)))
}

/// How long a task has run, seconds.
pub fn run_time(pid: u32) -> Result<f64> {
    let time = read_run_time(&Root::default(), pid)?;
    Ok(time.with_context(|| format!("no schedstat of task {pid}"))?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course() -> Course {
        let point = |(at, cpu, mib, scans)| Point { at, cpu, merged: Bytes::mib(mib), scans };
        Course(
            [(0.0, 0.0, 10, 0), (1.0, 0.5, 10, 1), (2.0, 1.0, 110, 2), (3.0, 1.5, 209, 3)]
                .into_iter()
                .chain([(4.0, 2.0, 210, 4), (5.0, 2.5, 210, 5), (6.0, 3.0, 210, 6)])
                .map(point)
                .collect(),
        )
    }

    #[test]
    fn what_was_merged_before_is_not_the_arms() {
        let c = course();
        assert_eq!(c.gained(&c.last()), Bytes::mib(200));
        assert_eq!(c.reached(0.45).map(|p| p.cpu), Some(1.0));
        assert_eq!(c.reached(1.01), None);
        assert_eq!(c.converged().at, 3.0, "199 of 200 is all but nothing");
    }

    #[test]
    fn it_is_still_when_whole_scans_bring_nothing() {
        let mut c = course();
        assert!(c.is_still(2, Bytes::mib(1)) && !c.is_still(4, Bytes::mib(1)));
        c.0.truncate(4);
        assert!(!c.is_still(2, Bytes::mib(1)) && !c.is_still(9, Bytes::mib(1)));
    }

    #[test]
    fn the_mean_is_over_time() {
        let c = course();
        let want = 10.0 + 60.0 + 159.5 + 209.5 + 210.0 + 210.0;
        assert!((c.mean().0 as f64 / 1048576.0 - want / 6.0).abs() < 0.01, "{}", c.mean());
        assert_eq!(Course::default().mean(), Bytes::ZERO);
    }
}
