//! How fast a scan may go: bytes and CPU time a second, and not at all while the
//! host's tasks stall for memory.
//!
//! Threads report what they used and sleep what they are ahead. The rule is
//! [`ahead`], a pure function; the rest counts. The share of a core may be changed while a
//! scan is under way: it counts from then on.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebb_core::policy::merge::is_gentle;

use crate::lock;

/// Longest sleep in one go, so that a pause and its end are noticed.
const NAP: Duration = Duration::from_millis(100);

/// Limits of a scan, all its threads together. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Memory read, bytes a second.
    pub bytes_per_second: Option<f64>,
    /// CPU time, seconds a second: 0.2 is a fifth of one core.
    pub cores: Option<f64>,
}

/// A share of a core that may be changed at any time.
#[derive(Debug)]
pub struct Dial(AtomicU64);

impl Dial {
    pub fn new(cores: f64) -> Dial {
        Dial(AtomicU64::new(cores.to_bits()))
    }

    pub fn set(&self, cores: f64) {
        self.0.store(cores.to_bits(), Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// Whether that is little enough to be used in pulses.
    pub fn is_gentle(&self) -> bool {
        is_gentle(self.get())
    }
}

/// How long to sleep so that `bytes` and `cpu` used since the start are no more
/// than the limits allow after `elapsed`.
pub fn ahead(limits: &Limits, elapsed: Duration, bytes: u64, cpu: Duration) -> Duration {
    let due = |used: f64, rate: Option<f64>| rate.filter(|r| *r > 0.0).map_or(0.0, |r| used / r);
    let due = due(bytes as f64, limits.bytes_per_second).max(due(cpu.as_secs_f64(), limits.cores));
    // A day is long enough here, and a value that no Duration holds would panic.
    Duration::from_secs_f64((due - elapsed.as_secs_f64()).clamp(0.0, 86_400.0))
}

/// What all threads of a scan have used.
#[derive(Debug)]
pub struct Pace {
    dial: Option<Arc<Dial>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limits: Limits,
    /// Since when these are the limits, and what had been used by then.
    started: Instant,
    before: Used,
    used: Used,
    /// Since when it is paused, where it is.
    paused: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Used {
    bytes: u64,
    cpu: Duration,
    /// In pauses: what was not allowed to run is not owed.
    paused: Duration,
}

impl State {
    fn used(&self) -> Used {
        let paused = self.paused.map_or(Duration::ZERO, |since| since.elapsed());
        Used { paused: self.used.paused + paused, ..self.used }
    }

    fn ahead(&self) -> Duration {
        let (before, now) = (&self.before, self.used());
        let paused = now.paused.saturating_sub(before.paused);
        let elapsed = self.started.elapsed().saturating_sub(paused);
        ahead(&self.limits, elapsed, now.bytes - before.bytes, now.cpu - before.cpu)
    }
}

impl Pace {
    /// Starts the clock. What the dial says goes before the limit of CPU time.
    pub fn new(limits: Limits, dial: Option<Arc<Dial>>) -> Pace {
        let (before, used, started) = (Used::default(), Used::default(), Instant::now());
        Pace { dial, state: Mutex::new(State { limits, started, before, used, paused: None }) }
    }

    /// Holds all threads, or lets them go on.
    pub fn pause(&self, on: bool) {
        let mut state = lock(&self.state);
        match (on, state.paused) {
            (true, None) => state.paused = Some(Instant::now()),
            (false, Some(_)) => (state.used, state.paused) = (state.used(), None),
            _ => {}
        }
    }

    /// How long it was paused in all.
    pub fn paused(&self) -> Duration {
        lock(&self.state).used().paused
    }

    pub fn cpu(&self) -> Duration {
        lock(&self.state).used.cpu
    }

    /// The limits now. Where they have changed, counting begins anew.
    fn limited(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let cores = self.dial.as_ref().map_or(state.limits.cores, |d| Some(d.get()));
        if cores != state.limits.cores {
            state.limits.cores = cores;
            (state.started, state.before) = (Instant::now(), state.used());
        }
        state
    }

    /// Whether pieces are to be so small that one slows nothing beside it.
    pub fn is_gentle(&self) -> bool {
        self.limited().limits.cores.is_some_and(is_gentle)
    }

    /// Notes what a thread used, and sleeps as long as it must.
    pub fn used(&self, bytes: u64, cpu: Duration) {
        let mut state = lock(&self.state);
        state.used.bytes += bytes;
        state.used.cpu += cpu;
        drop(state);
        loop {
            let state = self.limited();
            let sleep = if state.paused.is_some() { NAP } else { state.ahead().min(NAP) };
            drop(state);
            if sleep.is_zero() {
                return;
            }
            std::thread::sleep(sleep);
        }
    }
}

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
    fn another_share_counts_from_when_it_is_set() {
        let dial = Arc::new(Dial::new(0.5));
        let pace = Pace::new(Limits::default(), Some(Arc::clone(&dial)));
        assert!(!pace.is_gentle());
        lock(&pace.state).used.cpu = S * 3;
        let sleep = pace.limited().ahead();
        assert!(sleep > S * 5 && sleep <= S * 6, "{sleep:?}");
        dial.set(0.01);
        // Returns at once: what was used before the change is not owed.
        pace.used(0, S);
        assert!(pace.is_gentle());
        assert_eq!(pace.limited().ahead(), Duration::ZERO, "nothing is owed from before");
        lock(&pace.state).used.cpu += Duration::from_millis(20);
        let sleep = pace.limited().ahead();
        assert!(sleep > S && sleep <= S * 2, "{sleep:?}");
        dial.set(1.0);
        assert_eq!(pace.limited().ahead(), Duration::ZERO);
    }

    #[test]
    fn who_is_paused_goes_on_when_it_is_over() {
        let pace = Pace::new(Limits::default(), None);
        pace.pause(true);
        std::thread::scope(|s| {
            let held = s.spawn(|| pace.used(1, Duration::ZERO));
            std::thread::sleep(NAP);
            assert!(!held.is_finished());
            pace.pause(false);
            held.join().unwrap();
        });
        assert_eq!(lock(&pace.state).used.bytes, 1);
    }
}
