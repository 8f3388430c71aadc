//! The guest of a stand-in: RAM, a balloon that follows orders at a speed, and a need.
//!
//! Nothing runs while nobody asks: it is brought up to date by each look at it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// How long a reset takes until the new kernel's driver looks at its balloon.
const BOOT: Duration = Duration::from_millis(800);
/// The driver tells what the balloon holds after each so many bytes (256 pages).
const PIECE: u64 = 1 << 20;

/// See the top. All sizes are bytes; a balloon's are what it holds.
pub struct Guest {
    pub ram: u64,
    /// Properties of the device.
    pub deflates: bool,
    pub reports: bool,
    pub interval_s: u64,
    pub need: u64,
    /// Each time it speaks it needs up to 32 MiB more than `need`, by this number.
    pub moves: Option<u64>,
    /// Bytes a second.
    pub speed: u64,
    /// Its driver does what it is told.
    pub follows: bool,
    pub run: String,
    target: u64,
    held: u64,
    /// What its driver told QEMU last: a reset leaves it as it was.
    told: u64,
    /// It helped itself: it stays so until it is ordered anything.
    rests: bool,
    boots: Option<Instant>,
    looked: Instant,
    /// When it sent statistics last, by both clocks, and what.
    said: Option<(Instant, u64, Words)>,
    /// Since its boot.
    faults: u64,
}

/// What it says of itself.
#[derive(Clone, Copy)]
struct Words {
    size: u64,
    need: u64,
    faults: u64,
}

impl Guest {
    pub fn new(ram: u64, deflates: bool, reports: bool) -> Guest {
        Guest {
            ram,
            deflates,
            reports,
            interval_s: 0,
            need: ram / 8,
            moves: None,
            speed: 1 << 30,
            follows: true,
            run: "running".into(),
            target: 0,
            held: 0,
            told: 0,
            rests: false,
            boots: None,
            looked: Instant::now(),
            said: None,
            faults: 0,
        }
    }

    /// Lets time pass. `frozen`: QEMU serves neither its guest nor anybody.
    pub fn pass(&mut self, now: Instant, frozen: bool) {
        let mut left = now.saturating_duration_since(self.looked);
        self.looked = now;
        if let Some(boots) = self.boots {
            if frozen {
                self.boots = Some(boots + left);
                return;
            }
            let Some(since) = now.checked_duration_since(boots) else { return };
            (self.boots, left) = (None, since);
        }
        self.faults += left.as_millis() as u64;
        if frozen || !self.runs() || self.rests || self.held == self.target {
            return;
        }
        let most = (self.speed as f64 * left.as_secs_f64()) as u64;
        let held = match self.target > self.held {
            // A driver gets no page that is in use.
            true => self.held.saturating_add(most).min(self.target).min(self.room()),
            false => self.held.saturating_sub(most).max(self.target),
        };
        if held == self.target || held.abs_diff(self.told) >= PIECE {
            self.told = held;
        }
        self.held = held;
    }

    fn runs(&self) -> bool {
        self.follows && self.run == "running"
    }

    fn room(&self) -> u64 {
        self.ram.saturating_sub(self.need).max(self.held)
    }

    /// When its balloon will be where it is told to be, unless something changes.
    pub fn arrives(&self) -> Option<Instant> {
        if let Some(boots) = self.boots {
            return Some(boots);
        }
        let goal = if self.target > self.held { self.target.min(self.room()) } else { self.target };
        let left = goal.abs_diff(self.held);
        let moves = self.runs() && !self.rests && left > 0 && self.speed > 0;
        moves
            .then(|| self.looked + Duration::from_secs_f64(left as f64 / self.speed as f64 + 0.001))
    }

    /// QEMU is told the size that it shall have.
    pub fn order(&mut self, size: u64) {
        self.target = self.ram - size.min(self.ram);
        self.rests = false;
    }

    /// It takes so much from its balloon itself, as a driver with `deflate-on-oom` does.
    pub fn help_itself(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
        self.told = self.held;
        self.rests = true;
    }

    /// All of RAM is the new kernel's; its driver goes where the old one was told to be.
    pub fn reset(&mut self, now: Instant) {
        (self.held, self.rests, self.faults) = (0, false, 0);
        self.boots = Some(now + BOOT);
    }

    /// What it really has, what QEMU believes, and what it was told.
    pub fn sizes(&self) -> (u64, u64, u64) {
        (self.ram - self.held, self.ram - self.told, self.ram - self.target)
    }

    /// QEMU asks it for statistics every so often, and at once.
    pub fn set_interval(&mut self, seconds: u64, now: Instant) {
        self.interval_s = seconds;
        if seconds > 0 {
            self.speak(now);
        }
    }

    fn speak(&mut self, now: Instant) {
        if !self.runs() || self.boots.is_some() {
            return;
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let more = self.moves.as_mut().map_or(0, |number| {
            *number = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (*number >> 40 << 12) % (32 << 20)
        });
        let (size, need) = (self.ram - self.held, self.need + more);
        let words = Words { size, need, faults: self.faults };
        self.said = Some((now, wall, words));
    }

    /// `guest-stats`.
    pub fn statistics(&mut self, now: Instant) -> Value {
        let interval = Duration::from_secs(self.interval_s);
        let due = self.said.is_none_or(|(at, ..)| now.saturating_duration_since(at) >= interval);
        if due && self.interval_s > 0 {
            self.speak(now);
        }
        let Some((_, wall, w)) = self.said else {
            return json!({ "last-update": 0, "stats": {} });
        };
        if self.boots.is_some() {
            let unset = json!({ "stat-free-memory": -1, "stat-available-memory": -1 });
            return json!({ "last-update": wall, "stats": unset });
        }
        let available = w.size.saturating_sub(w.need);
        json!({ "last-update": wall, "stats": {
            "stat-total-memory": if self.deflates { self.ram } else { w.size },
            "stat-free-memory": available,
            "stat-available-memory": available,
            "stat-disk-caches": 0,
            "stat-swap-in": 0,
            "stat-swap-out": 0,
            "stat-major-faults": 1,
            "stat-minor-faults": w.faults,
            "stat-htlb-pgalloc": 0,
            "stat-htlb-pgfail": 0,
        } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn guest() -> (Guest, Instant) {
        let mut guest = Guest::new(512 * MIB, true, false);
        guest.speed = 100 * MIB;
        let now = guest.looked;
        (guest, now)
    }

    fn after(ms: u64, now: Instant) -> Instant {
        now + Duration::from_millis(ms)
    }

    fn sizes(guest: &Guest) -> (u64, u64) {
        let (size, told, _) = guest.sizes();
        (size / MIB, told / MIB)
    }

    #[test]
    fn a_balloon_follows_at_its_speed_and_not_while_it_is_kept_from_it() {
        let (mut guest, now) = guest();
        guest.order(312 * MIB);
        guest.pass(after(1000, now), false);
        assert_eq!(sizes(&guest), (412, 412));
        guest.pass(after(1500, now), true);
        assert_eq!(sizes(&guest), (412, 412), "QEMU hangs");
        guest.follows = false;
        guest.pass(after(1600, now), false);
        guest.follows = true;
        guest.run = "paused".into();
        guest.pass(after(1700, now), false);
        assert_eq!(sizes(&guest), (412, 412));
        guest.run = "running".into();
        guest.pass(after(9000, now), false);
        assert_eq!((sizes(&guest), guest.arrives()), ((312, 312), None));
    }

    #[test]
    fn what_is_in_use_does_not_go_into_the_balloon() {
        let (mut guest, now) = guest();
        guest.need = 400 * MIB;
        guest.order(128 * MIB);
        guest.pass(after(60_000, now), false);
        assert_eq!(sizes(&guest), (400, 400));
        guest.need = 100 * MIB;
        guest.pass(after(61_000, now), false);
        assert_eq!(sizes(&guest), (300, 300));
    }

    #[test]
    fn a_reset_leaves_what_qemu_believes_until_the_new_driver_speaks() {
        let (mut guest, now) = guest();
        guest.order(312 * MIB);
        guest.pass(after(9000, now), false);
        guest.reset(after(9000, now));
        assert_eq!(sizes(&guest), (512, 312));
        guest.pass(after(9900, now), false);
        assert_eq!(sizes(&guest), (502, 502), "it goes where it was told to be");
        guest.order(512 * MIB);
        guest.pass(after(19_000, now), false);
        guest.reset(after(19_000, now));
        guest.order(512 * MIB);
        guest.pass(after(29_000, now), false);
        assert_eq!(sizes(&guest), (512, 512));
    }

    #[test]
    fn one_that_helped_itself_stays_so_until_it_is_ordered() {
        let (mut guest, now) = guest();
        guest.order(312 * MIB);
        guest.pass(after(9000, now), false);
        guest.help_itself(50 * MIB);
        guest.pass(after(10_000, now), false);
        assert_eq!(sizes(&guest), (362, 362));
        guest.order(312 * MIB);
        guest.pass(after(11_000, now), false);
        assert_eq!(sizes(&guest), (312, 312));
    }
}
