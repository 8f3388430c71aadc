//! How fast a scan may go: bytes and CPU time a second, and not at all while the
//! host's tasks stall for memory.
//!
//! Threads report what they used and sleep what they are ahead. The rule is
//! [`ahead`], a pure function; the rest counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep in one go, so that a stop or a pause is noticed.
const NAP: Duration = Duration::from_millis(100);

/// Limits of a scan, all its threads together. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Memory read, bytes a second.
    pub bytes_per_second: Option<f64>,
    /// CPU time, seconds a second: 0.2 is a fifth of one core.
    pub cores: Option<f64>,
}

/// How long to sleep so that `bytes` and `cpu` used since the start are no more
/// than the limits allow after `elapsed`.
pub fn ahead(limits: &Limits, elapsed: Duration, bytes: u64, cpu: Duration) -> Duration {
    let due = |used: f64, rate: Option<f64>| rate.filter(|r| *r > 0.0).map_or(0.0, |r| used / r);
    let due = due(bytes as f64, limits.bytes_per_second).max(due(cpu.as_secs_f64(), limits.cores));
    // A day is for ever here, and what no Duration holds is a panic.
    Duration::from_secs_f64((due - elapsed.as_secs_f64()).clamp(0.0, 86_400.0))
}

/// What all threads of a scan have used.
#[derive(Debug)]
pub struct Pace {
    limits: Limits,
    started: Instant,
    bytes: AtomicU64,
    cpu_ns: AtomicU64,
    paused: AtomicBool,
    /// Since when it is paused, and how long it was before.
    pauses: Mutex<(Option<Instant>, Duration)>,
    stopped: AtomicBool,
}

impl Pace {
    /// Starts the clock.
    pub fn new(limits: Limits) -> Pace {
        Pace {
            limits,
            started: Instant::now(),
            bytes: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            pauses: Mutex::default(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Holds all threads, or lets them go on.
    pub fn pause(&self, on: bool) {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        match (on, pauses.0) {
            (true, None) => pauses.0 = Some(Instant::now()),
            (false, Some(since)) => *pauses = (None, pauses.1 + since.elapsed()),
            _ => {}
        }
        self.paused.store(on, Relaxed);
    }

    /// How long it was paused in all; what was not allowed to run is not owed.
    pub fn paused(&self) -> Duration {
        let pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.1 + pauses.0.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Ends the scan: threads return at their next piece.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Whether it was ended.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Memory read so far, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// CPU time used so far.
    pub fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Relaxed))
    }

    /// Notes what a thread used, and sleeps as long as it must; `false`: stop.
    pub fn used(&self, bytes: u64, cpu: Duration) -> bool {
        self.bytes.fetch_add(bytes, Relaxed);
        self.cpu_ns.fetch_add(cpu.as_nanos() as u64, Relaxed);
        while self.paused.load(Relaxed) && !self.is_stopped() {
            std::thread::sleep(NAP);
        }
        loop {
            let elapsed = self.started.elapsed().saturating_sub(self.paused());
            let sleep = ahead(&self.limits, elapsed, self.bytes(), self.cpu());
            if sleep.is_zero() || self.is_stopped() {
                return !self.is_stopped();
            }
            std::thread::sleep(sleep.min(NAP));
        }
    }
}

/// CPU time of this thread.
pub fn thread_cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_tighter_limit_counts_and_none_is_none() {
        let limits = Limits { bytes_per_second: Some(100.0), cores: Some(0.5) };
        for (elapsed, bytes, cpu_s, sleep_s) in
            [(1, 100, 0.5, 0.0), (1, 300, 0.5, 2.0), (1, 100, 2.0, 3.0), (10, 100, 2.0, 0.0)]
        {
            let sleep = ahead(&limits, S * elapsed, bytes, S.mul_f64(cpu_s));
            assert!((sleep.as_secs_f64() - sleep_s).abs() < 1e-9, "{elapsed} {bytes}: {sleep:?}");
        }
        assert_eq!(ahead(&Limits::default(), S, u64::MAX, S), Duration::ZERO);
        let tiny = Limits { cores: Some(1e-300), ..Limits::default() };
        assert_eq!(ahead(&tiny, S, 0, S), Duration::from_secs(86_400));
    }

    #[test]
    fn who_is_paused_goes_on_when_it_is_over_or_stopped() {
        let pace = Pace::new(Limits::default());
        pace.pause(true);
        std::thread::scope(|s| {
            let held = s.spawn(|| pace.used(1, Duration::ZERO));
            pace.pause(false);
            assert!(held.join().unwrap());
            pace.pause(true);
            let held = s.spawn(|| pace.used(1, Duration::ZERO));
            pace.stop();
            assert!(!held.join().unwrap());
        });
        assert_eq!(pace.bytes(), 2);
    }
}
