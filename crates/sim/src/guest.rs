//! A synthetic guest: working set, page cache, balloon driver, moods.
//!
//! A stand-in for scale and laws, never for claims about real guests. All
//! numbers come from the seed; the clock is the simulator's.

use ebb_core::sample::{
    BalloonSample, GuestStats, Link, ProcessMemory, RunState, VmEvent, VmId, VmSample,
};
use ebb_core::units::Bytes;

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Follows orders at full speed.
    Ideal,
    /// Follows at a tenth of the speed.
    Slow,
    /// Never shrinks.
    Stuck,
    /// Claims that all its memory is available.
    Lying,
    /// Sends no statistics.
    Silent,
    /// Reboots every two minutes.
    Rebooting,
    /// QMP answers nothing every other minute.
    Flaky,
}

/// All moods.
pub const MOODS: [Mood; 7] =
    [Mood::Ideal, Mood::Slow, Mood::Stuck, Mood::Lying, Mood::Silent, Mood::Rebooting, Mood::Flaky];

/// One guest.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Identity.
    pub id: VmId,
    /// Name.
    pub name: String,
    /// RAM.
    pub ram: Bytes,
    /// RAM less balloon.
    pub actual: Bytes,
    /// The size last ordered.
    pub target: Bytes,
    /// Behaviour.
    pub mood: Mood,
    /// Memory that processes and kernel need now.
    pub used: Bytes,
    /// Page cache.
    pub cache: Bytes,
    /// What the host holds for it.
    pub resident: Bytes,
    /// Free page reporting.
    pub reporting: bool,
    /// Milliseconds in which it wanted memory that it did not have.
    pub stalled_ms: u64,
    /// Times it ran out altogether.
    pub ooms: u64,
    /// How often its size changed direction, and the last direction.
    pub reversals: u64,
    direction: i8,
    steady: bool,
    rng: fastrand::Rng,
    phase_ends: u64,
    wanted: Bytes,
    stats: Option<GuestStats>,
    boots: u64,
    events: Vec<VmEvent>,
}

/// How fast a working set grows or shrinks, bytes a second.
const WORK_RATE: f64 = 400e6;
/// How fast a balloon moves, bytes a second.
const BALLOON_RATE: f64 = 1e9;

impl Guest {
    /// A guest with a life of its own, all from the seed.
    pub fn new(index: u32, seed: u64, ram: Bytes, mood: Mood) -> Guest {
        Guest {
            id: VmId { pid: 1000 + index, start: seed },
            name: format!("vm{index:04}"),
            ram,
            actual: ram,
            target: ram,
            mood,
            used: ram.share(0.15),
            cache: Bytes::ZERO,
            resident: ram.share(0.15),
            reporting: index.is_multiple_of(2),
            stalled_ms: 0,
            ooms: 0,
            reversals: 0,
            direction: 0,
            steady: false,
            rng: fastrand::Rng::with_seed(seed ^ (u64::from(index) << 32)),
            phase_ends: 0,
            wanted: ram.share(0.15),
            stats: None,
            boots: 0,
            events: vec![VmEvent::Connected],
        }
    }

    /// Has it keep the first working set it chooses.
    pub fn settle(&mut self) {
        self.steady = true;
    }

    /// Lives `dt_ms` up to `now_ms`.
    pub fn live(&mut self, now_ms: u64, dt_ms: u64) {
        if self.mood == Mood::Rebooting && now_ms / 120_000 > self.boots {
            self.reboot(now_ms / 120_000);
        }
        self.choose_phase(now_ms);
        self.work(dt_ms);
        self.follow_balloon(dt_ms);
        self.touch(dt_ms);
    }

    fn reboot(&mut self, boots: u64) {
        self.boots = boots;
        self.events.push(VmEvent::Reset);
        self.actual = self.ram;
        self.used = self.ram.share(0.1);
        self.cache = Bytes::ZERO;
        self.stats = None;
    }

    fn choose_phase(&mut self, now_ms: u64) {
        if now_ms >= self.phase_ends && !(self.steady && self.phase_ends > 0) {
            self.phase_ends = now_ms + self.rng.u64(5_000..90_000);
            // Mostly idle, at times nearly all of it.
            let share = self.rng.f64().powi(3) * 0.8 + 0.1;
            self.wanted = self.ram.share(share);
        }
    }

    fn work(&mut self, dt_ms: u64) {
        let most = Bytes((WORK_RATE * dt_ms as f64 / 1000.0) as u64);
        if self.used > self.wanted {
            self.used = self.used - (self.used - self.wanted).min(most);
        }
        let want = (self.wanted - self.used).min(most);
        // Free memory first, then cache, then it waits.
        let free = self.actual - self.used - self.cache;
        let from_cache = (want - free).min(self.cache.share(0.9));
        self.cache = self.cache - from_cache;
        let got = want.min(free + from_cache);
        self.used += got;
        if got < want {
            self.stalled_ms += dt_ms;
        }
        if self.used > self.actual {
            self.ooms += 1;
            self.used = self.actual.share(0.5);
        }
        let room = (self.actual - self.used - self.cache).share(0.5);
        self.cache += Bytes((20e6 * dt_ms as f64 / 1000.0) as u64).min(room);
    }

    fn follow_balloon(&mut self, dt_ms: u64) {
        let speed = match self.mood {
            Mood::Slow => 0.1,
            _ => 1.0,
        };
        let most = Bytes((BALLOON_RATE * speed * dt_ms as f64 / 1000.0) as u64);
        let before = self.actual;
        if self.target > self.actual {
            self.actual += (self.target - self.actual).min(most);
        } else if self.mood != Mood::Stuck {
            let room = self.actual - self.used;
            let step = (self.actual - self.target).min(most).min(room);
            // The balloon takes free pages as they come: touched ones and others.
            let touched = self.used + self.cache;
            let dirty =
                (self.resident - touched).fraction_of((self.actual - touched).max(Bytes(1)));
            self.resident = self.resident - step.share(dirty);
            self.actual = self.actual - step;
            self.cache = self.cache.min(self.actual - self.used);
        }
        self.resident = self.resident.min(self.actual);
        let direction = (self.actual > before) as i8 - (self.actual < before) as i8;
        if direction != 0 {
            if self.direction == -direction {
                self.reversals += 1;
            }
            self.direction = direction;
        }
    }

    fn touch(&mut self, dt_ms: u64) {
        let touched = self.used + self.cache;
        if touched > self.resident {
            self.resident = touched;
        } else if self.reporting {
            let over = self.resident - touched;
            self.resident = self.resident - over.share(0.05 * dt_ms as f64 / 1000.0);
        }
    }

    /// The guest answers the host's question for its numbers.
    pub fn speak(&mut self, now_ms: u64) {
        if self.mood == Mood::Silent {
            return;
        }
        let free = self.actual - self.used - self.cache;
        let available = match self.mood {
            Mood::Lying => self.actual,
            _ => free + self.cache.share(0.9),
        };
        self.stats = Some(GuestStats {
            updated_s: now_ms / 1000,
            age_ms: 0,
            total: Some(self.actual),
            free: Some(free),
            available: Some(available),
            caches: Some(self.cache),
            swap_in: Some(Bytes::ZERO),
            swap_out: Some(Bytes::ZERO),
            major_faults: Some(self.stalled_ms / 10),
            minor_faults: Some(now_ms - self.boots * 120_000),
            ..GuestStats::default()
        });
    }

    /// Whether QMP answers now.
    pub fn answers(&self, now_ms: u64) -> bool {
        self.mood != Mood::Flaky || (now_ms / 60_000).is_multiple_of(2)
    }

    /// What the host sees of it.
    pub fn sample(&mut self, now_ms: u64) -> VmSample {
        let answers = self.answers(now_ms);
        let guest = self
            .stats
            .map(|s| GuestStats { age_ms: now_ms.saturating_sub(s.updated_s * 1000 + 999), ..s });
        VmSample {
            id: self.id,
            name: self.name.clone(),
            ram: Some(self.ram),
            process: Some(ProcessMemory { anon: self.resident, ..ProcessMemory::default() }),
            link: if answers { Link::Up } else { Link::Slow("no answer for 200 ms".into()) },
            run: answers.then_some(RunState::Running),
            balloon: answers.then_some(BalloonSample {
                actual: self.actual,
                reporting: Some(self.reporting),
                deflate_on_oom: Some(true),
                guest,
            }),
            events: if answers { std::mem::take(&mut self.events) } else { Vec::new() },
            ..VmSample::default()
        }
    }
}
