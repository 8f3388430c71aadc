//! A thread that writes down what the machine holds, several times a second.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_host::probe::meminfo::read_meminfo;
use ebb_host::root::Root;

use crate::arena::MemoryCgroup;
use crate::vm::resident;
use crate::{Background, lock};

/// What was seen at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Point {
    /// Since the sampler began.
    pub at: Duration,
    /// `MemFree` of the host.
    pub free: Bytes,
    /// Swap in use on the host.
    pub swap: Bytes,
    /// Memory charged to the arena's cgroup.
    pub cgroup: Bytes,
    /// Of that, what is in huge pages of no file.
    pub cgroup_huge: Bytes,
    /// Swap charged to it.
    pub cgroup_swap: Bytes,
    /// Resident memory of each VM, in the order of [`Series::vms`].
    pub resident: Vec<Bytes>,
}

impl Point {
    /// Resident memory of all VMs.
    pub fn total_resident(&self) -> Bytes {
        self.resident.iter().copied().sum()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    pub vms: Vec<String>,
    /// In order of time.
    pub points: Vec<Point>,
}

/// A number over a series.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stat {
    pub n: usize,
    pub min: f64,
    pub max: f64,
    /// Mean, weighted by the time each point stood.
    pub mean: f64,
}

impl Series {
    /// What `value` says of each point, e.g. `|p| p.total_resident().0 as f64`.
    pub fn stat(&self, value: impl Fn(&Point) -> f64) -> Stat {
        let Some(first) = self.points.first() else { return Stat::default() };
        let v = value(first);
        let mut stat = Stat { n: self.points.len(), min: v, max: v, mean: v };
        let (mut sum, mut time) = (0.0, 0.0);
        for pair in self.points.windows(2) {
            let stood = (pair[1].at.saturating_sub(pair[0].at)).as_secs_f64();
            sum += value(&pair[0]) * stood;
            time += stood;
            let v = value(&pair[1]);
            stat.min = stat.min.min(v);
            stat.max = stat.max.max(v);
        }
        if time > 0.0 {
            stat.mean = sum / time;
        }
        stat
    }

    /// When `value` first held, from `since` on.
    pub fn first(&self, since: Duration, value: impl Fn(&Point) -> bool) -> Option<Duration> {
        self.points.iter().find(|p| p.at >= since && value(p)).map(|p| p.at)
    }
}

#[derive(Debug, Default)]
struct Watched {
    vms: Vec<(String, u32)>,
    points: Vec<Point>,
}

#[derive(Debug)]
pub struct Sampler {
    watched: Arc<Mutex<Watched>>,
    began: Instant,
    thread: Background<()>,
}

impl Sampler {
    /// Begins, `per_second` times a second (at most 100).
    pub fn start(per_second: u32, cgroup: Option<MemoryCgroup>) -> Sampler {
        let watched = Arc::new(Mutex::new(Watched::default()));
        let began = Instant::now();
        let period = Duration::from_secs(1) / per_second.clamp(1, 100);
        let theirs = Arc::clone(&watched);
        let thread = Background::start(move |quit| {
            let mut next = began;
            while !quit.load(SeqCst) {
                look(&theirs, began, cgroup.as_ref());
                next = (next + period).max(Instant::now());
                thread::park_timeout(next.saturating_duration_since(Instant::now()));
            }
        });
        Sampler { watched, began, thread }
    }

    /// Watches a VM from now on.
    pub fn watch(&self, name: &str, pid: u32) {
        lock(&self.watched).vms.push((name.to_string(), pid));
    }

    /// Time since it began, to compare with [`Point::at`].
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was seen so far.
    pub fn series(&self) -> Series {
        let watched = lock(&self.watched);
        Series {
            vms: watched.vms.iter().map(|(name, _)| name.clone()).collect(),
            points: watched.points.clone(),
        }
    }

    /// Ends it; all that was seen.
    pub fn stop(mut self) -> Series {
        self.thread.end();
        self.series()
    }
}

fn look(watched: &Mutex<Watched>, began: Instant, cgroup: Option<&MemoryCgroup>) {
    let memory = read_meminfo(&Root::default()).ok().flatten().unwrap_or_default();
    let mut watched = lock(watched);
    let point = Point {
        at: began.elapsed(),
        free: memory.free,
        swap: memory.swap_total - memory.swap_free,
        cgroup: cgroup.map(MemoryCgroup::usage).unwrap_or_default(),
        cgroup_huge: cgroup.map(MemoryCgroup::huge).unwrap_or_default(),
        cgroup_swap: cgroup.map(MemoryCgroup::swap).unwrap_or_default(),
        resident: watched.vms.iter().map(|(_, pid)| resident(*pid)).collect(),
    };
    watched.points.push(point);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_weighted_by_time() {
        let point = |ms, free| Point { at: Duration::from_millis(ms), free, ..Point::default() };
        let points = vec![point(0, Bytes(10)), point(900, Bytes(20)), point(1000, Bytes(30))];
        let series = Series { vms: Vec::new(), points };
        let stat = series.stat(|p| p.free.0 as f64);
        assert_eq!((stat.n, stat.min, stat.max), (3, 10.0, 30.0));
        assert!((stat.mean - 11.0).abs() < 1e-9, "{stat:?}");
        let late = Duration::from_millis(1);
        assert_eq!(series.first(late, |p| p.free.0 < 25), Some(Duration::from_millis(900)));
        assert_eq!(Series::default().stat(|_| 1.0), Stat::default());
    }

    #[test]
    fn a_sampler_sees_this_process() {
        let sampler = Sampler::start(100, None);
        sampler.watch("self", std::process::id());
        let until = Instant::now() + Duration::from_secs(10);
        while sampler.series().points.iter().all(|p| p.total_resident() == Bytes::ZERO) {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(5));
        }
        let series = sampler.stop();
        assert!(series.points[0].free > Bytes::ZERO);
        assert_eq!(series.vms, ["self"]);
    }
}
