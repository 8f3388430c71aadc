//! How a guest or its VMM misbehaves.

use serde::Serialize;

/// How a guest behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Misbehaviour {
    /// Follows orders at full speed.
    #[default]
    Ideal,
    /// Follows at a tenth of the speed.
    Slow,
    /// Never shrinks.
    Stuck,
    /// Does not shrink for a while, then does again: 5 to 40 s of each minute.
    Intermittent,
    /// Claims that all its memory is available.
    Lying,
    /// Sends no statistics but for the first minute.
    Silent,
    /// Reboots every two minutes.
    Rebooting,
    /// Is being migrated for half a minute in every three.
    Migrating,
    /// Has a device that pins its RAM: the balloon moves and frees nothing.
    Pinned,
    /// QMP answers nothing every other minute.
    Flaky,
    /// Has no balloon.
    Bare,
}

/// What odd company there is among guests with a balloon.
pub const ODD: [Misbehaviour; 9] = [
    Misbehaviour::Slow,
    Misbehaviour::Stuck,
    Misbehaviour::Intermittent,
    Misbehaviour::Lying,
    Misbehaviour::Silent,
    Misbehaviour::Rebooting,
    Misbehaviour::Migrating,
    Misbehaviour::Pinned,
    Misbehaviour::Flaky,
];

impl Misbehaviour {
    /// What of full speed its balloon inflates with, `at_ms` into the run.
    pub fn speed(self, at_ms: u64, seed: u64) -> f64 {
        match self {
            Misbehaviour::Stuck => 0.0,
            Misbehaviour::Slow => 0.1,
            Misbehaviour::Intermittent if stuck_now(at_ms, seed) => 0.0,
            _ => 1.0,
        }
    }

    pub fn answers(self, at_ms: u64) -> bool {
        self != Misbehaviour::Flaky || (at_ms / 60_000).is_multiple_of(2)
    }

    /// Whether it sends statistics.
    pub fn speaks(self, at_ms: u64) -> bool {
        self != Misbehaviour::Silent || at_ms < 60_000
    }

    pub fn migrates(self, at_ms: u64) -> bool {
        self == Misbehaviour::Migrating && at_ms % 180_000 >= 150_000
    }

    /// How often it has rebooted by then.
    pub fn boots(self, at_ms: u64) -> u64 {
        if self == Misbehaviour::Rebooting { at_ms / 120_000 } else { 0 }
    }
}

fn stuck_now(at_ms: u64, seed: u64) -> bool {
    let minute = at_ms / 60_000;
    let mut rng = fastrand::Rng::with_seed(seed ^ minute.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    at_ms % 60_000 < rng.u64(5_000..40_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_intermittent_guest_is_stuck_for_a_part_of_each_minute() {
        for minute in 0..20 {
            let stuck = (0..600)
                .filter(|i| Misbehaviour::Intermittent.speed(minute * 60_000 + i * 100, 7) == 0.0)
                .count();
            assert!((50..=400).contains(&stuck), "minute {minute}: {stuck}");
        }
    }
}
