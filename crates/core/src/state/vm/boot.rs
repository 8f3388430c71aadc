//! Beginnings: a VM that has just started, and a guest that rebooted under its balloon.
//!
//! How long a beginning lasts is set here, and what of a VM is the guest's and goes with it.

use serde::{Deserialize, Serialize};

use super::{Hot, STUCK_AFTER_MS, VmMemory};
use crate::sample::{RunState, VmSample};
use crate::state::{Growth, Recent, Sizes};
use crate::units::{Bytes, Stamp};

/// How long a guest is left alone after a reset or first sight: its numbers are those
/// of a booting kernel.
pub const SETTLE_MS: u64 = 20_000;
/// How long it is left alone on a host that is not clear, if the new kernel has sent statistics.
const SETTLE_LEAST_MS: u64 = 10_000;
/// A VM that has run for less than this has just started.
const YOUNG_MS: u64 = 60_000;
/// A VM has settled when its residency grows by less than this share of RAM, at most by this
/// much (a migration at 1 Gbit/s fills four times as much), in this time, or after
/// [`START_MOST_MS`].
const START_LOOK_MS: u64 = 10_000;
const SETTLED_GROWTH: (f64, Bytes) = (0.02, Bytes::mib(256));
const START_MOST_MS: u64 = 180_000;
/// A VM that is started and does not run keeps what it was promised for this time.
const START_WAITS_MS: u64 = 600_000;
/// A guest that resets this often within this time, milliseconds, is given no more than it had.
const RESETS: (u32, u64) = (3, 600_000);
/// Resets that follow within this time, before the new kernel has sent statistics, are one reboot:
/// SeaBIOS resets the machine once or twice more, and QEMU tells of each.
const ONE_REBOOT_MS: u64 = 5_000;
/// A guest that sends no statistics within this time after its reboot is taken for one that sends
/// none.
const NO_STATS_MS: u64 = 120_000;

/// A VM that has just started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// When it began to run.
    pub since: Stamp,
    /// When `resident` was looked at.
    pub at: Stamp,
    pub resident: Bytes,
    /// How long it was not running before, milliseconds.
    #[serde(default)]
    pub waited_ms: u64,
}

/// How far a reboot is dealt with. QEMU goes on showing the size from before a
/// reset until the new driver writes it, and a driver whose size is already the ordered
/// one writes nothing: so once the guest speaks it is moved by one MiB and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reboot {
    /// When the reset was heard of, seconds since 1970: older statistics are the
    /// old kernel's.
    pub wall_s: u64,
    /// The moment of the old kernel's last statistics, by the same clock.
    pub updated_s: u64,
    /// The size that it was given for its new kernel, and when.
    pub to: Option<Bytes>,
    pub given: Option<Stamp>,
    /// When it was moved by one MiB.
    pub nudged: Option<Stamp>,
    /// The new kernel's driver has sent statistics.
    pub speaks: bool,
}

impl VmMemory {
    /// The host is not clear: a guest whose new kernel has sent statistics is left alone for
    /// [`SETTLE_LEAST_MS`] only.
    pub(in crate::state) fn end_settling(&mut self, at: Stamp) {
        if self.reboot.is_none() && self.stats.is_some() {
            let rest = SETTLE_MS - SETTLE_LEAST_MS;
            self.settle_until.take_if(|until| until.since(at) <= rest);
        }
    }

    /// Whether its guest was reset a moment ago.
    pub(crate) fn boots(&self, at: Stamp) -> bool {
        self.reboot.is_some() || self.settle_until.is_some_and(|t| t > at)
    }

    /// The guest rebooted: nothing known of it holds any more.
    pub(super) fn forget_guest(&mut self, at: Stamp, wall_s: u64) {
        let spoke = self.reboot.is_some_and(|r| r.speaks);
        self.resets = match self.reset_at.replace(at) {
            Some(was) if at.since(was) < ONE_REBOOT_MS && !spoke => self.resets,
            Some(was) if at.since(was) < RESETS.1 => (self.resets + 1).min(16),
            _ => 1,
        };
        if self.ledger.owes() || self.order.is_some() || self.reboot.is_some() {
            let updated_s = self.stats.map_or(0, |(.., s)| s.updated_s);
            self.reboot = Some(Reboot { wall_s, updated_s, ..Reboot::default() });
        }
        self.settle_until = Some(at.plus(SETTLE_MS));
        (self.stats, self.unsure) = (None, Bytes::ZERO);
        self.again = 0;
        (self.rates, self.growth) = (None, Growth::default());
        self.order = None;
        (self.deflated_on_oom, self.raised) = (None, None);
        (self.recent, self.cached) = (Recent::default(), Recent::default());
        self.stuck_until = None;
        (self.stuck_count, self.unmoved) = (0, false);
        self.facts = None;
        self.sizes = Sizes::default();
        self.contact.forget_guest();
        self.doubt = None;
        self.hot = Hot::default();
        self.late_ms = 0.0;
        (self.rate, self.doublings) = (0.0, 0);
    }

    /// Whether it still takes what it was promised at its start.
    pub(super) fn follow_start(&mut self, at: Stamp, first: bool, vm: &VmSample) {
        let Some(p) = vm.process else { return };
        let resident = p.resident() + p.swap;
        if first && vm.age_ms.is_none_or(|age| age < YOUNG_MS) {
            self.start = Some(Start { since: at, at, resident, waited_ms: 0 });
        }
        let Some(s) = self.start.as_mut() else { return };
        // One that waits for `cont`, or for a migration to begin, has not taken anything yet.
        let waits = matches!(vm.run, Some(RunState::Paused | RunState::Migrating));
        if waits && s.waited_ms < START_WAITS_MS {
            let ms = at.since(s.at);
            (s.waited_ms, s.since) = (s.waited_ms + ms, s.since.plus(ms));
            (s.at, s.resident) = (at, resident);
            return;
        }
        if at.since(s.at) < START_LOOK_MS {
            return;
        }
        let (share, most) = SETTLED_GROWTH;
        let calm = resident - s.resident <= vm.ram.unwrap_or_default().share(share).min(most);
        (s.at, s.resident) = (at, resident);
        if calm || at.since(s.since) >= START_MOST_MS {
            self.start = None;
        }
    }

    pub(super) fn follow_reboot(&mut self, at: Stamp, wall_s: u64, vm: &VmSample) {
        let (Some(r), Some(b)) = (self.reboot.as_mut(), vm.balloon.as_ref()) else { return };
        // A second apart, as QEMU counts in whole ones. Where the clock was set back since,
        // other statistics than the old kernel's last are the new one's.
        r.speaks |= b.guest.is_some_and(|g| {
            g.updated_s > r.wall_s + 1 || wall_s + 1 < r.wall_s && g.updated_s < r.updated_s
        });
        let there = r.to.is_some_and(|to| b.actual >= to);
        let given_up = match r.nudged {
            Some(t) => at.since(t) >= STUCK_AFTER_MS,
            None => !r.speaks && r.given.is_some_and(|t| at.since(t) >= NO_STATS_MS),
        };
        if r.given.is_some() && (there || given_up) {
            // One that sends no statistics for this time is silent from now on.
            self.contact.spoke |= given_up && !r.speaks;
            self.reboot = None;
        }
    }

    /// Whether it resets so often that a reset brings it nothing more.
    pub fn resets_often(&self, at: Stamp) -> bool {
        self.resets >= RESETS.0 && self.reset_at.is_some_and(|t| at.since(t) < RESETS.1)
    }
}
