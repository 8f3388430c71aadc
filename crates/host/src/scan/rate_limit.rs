//! How fast a scan may go: bytes and CPU time a second, and not at all while the
//! host's tasks stall for memory.
//!
//! Threads report what they used and sleep what they are ahead. The rule is
//! [`ahead`], a pure function; the rest counts. The share of a core may be changed while a
//! scan is under way: it counts from then on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_core::policy::merge::is_gentle;

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
    stretch: Mutex<Stretch>,
    bytes: AtomicU64,
    cpu_ns: AtomicU64,
    paused: AtomicBool,
    /// Since when it is paused, and how long it was before.
    pauses: Mutex<(Option<Instant>, Duration)>,
}

/// A time with the same limits, and what had been used when it began.
#[derive(Debug)]
struct Stretch {
    limits: Limits,
    started: Instant,
    paused: Duration,
    bytes: u64,
    cpu: Duration,
}

impl Stretch {
    fn begin(limits: Limits, pace: Option<&Pace>) -> Stretch {
        let used = pace.map(|p| (p.paused(), p.bytes(), p.cpu()));
        let (paused, bytes, cpu) = used.unwrap_or_default();
        Stretch { limits, started: Instant::now(), paused, bytes, cpu }
    }

    fn ahead(&self, pace: &Pace) -> Duration {
        let paused = pace.paused().saturating_sub(self.paused);
        let elapsed = self.started.elapsed().saturating_sub(paused);
        let (bytes, cpu) = (pace.bytes() - self.bytes, pace.cpu().saturating_sub(self.cpu));
        ahead(&self.limits, elapsed, bytes, cpu)
    }
}

impl Pace {
    /// Starts the clock. What the dial says goes before the limit of CPU time.
    pub fn new(limits: Limits, dial: Option<Arc<Dial>>) -> Pace {
        Pace {
            dial,
            stretch: Mutex::new(Stretch::begin(limits, None)),
            bytes: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            pauses: Mutex::default(),
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

    /// Memory read so far, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Relaxed))
    }

    /// The limits now; with others than before a new stretch begins.
    fn stretch(&self) -> MutexGuard<'_, Stretch> {
        let mut stretch = self.stretch.lock().unwrap_or_else(PoisonError::into_inner);
        let cores = self.dial.as_ref().map_or(stretch.limits.cores, |d| Some(d.get()));
        if cores != stretch.limits.cores {
            *stretch = Stretch::begin(Limits { cores, ..stretch.limits }, Some(self));
        }
        stretch
    }

    /// Whether pieces are to be so small that one slows nothing beside it.
    pub fn is_gentle(&self) -> bool {
        self.stretch().limits.cores.is_some_and(is_gentle)
    }

    /// Notes what a thread used, and sleeps as long as it must.
    pub fn used(&self, bytes: u64, cpu: Duration) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.cpu_ns.fetch_add(cpu.as_nanos() as u64, Relaxed);
        while self.paused.load(Relaxed) {
            std::thread::sleep(NAP);
        }
        loop {
            let sleep = self.stretch().ahead(self);
            if sleep.is_zero() {
                return;
            }
            std::thread::sleep(sleep.min(NAP));
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
        pace.cpu_ns.store(3_000_000_000, Relaxed);
        let sleep = pace.stretch().ahead(&pace);
        assert!(sleep > S * 5 && sleep <= S * 6, "{sleep:?}");
        dial.set(0.01);
        assert!(pace.is_gentle());
        assert_eq!(pace.stretch().ahead(&pace), Duration::ZERO, "nothing is owed from before");
        pace.cpu_ns.fetch_add(20_000_000, Relaxed);
        let sleep = pace.stretch().ahead(&pace);
        assert!(sleep > S && sleep <= S * 2, "{sleep:?}");
        dial.set(1.0);
        assert_eq!(pace.stretch().ahead(&pace), Duration::ZERO);
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
        assert_eq!(pace.bytes(), 1);
    }
}
