//! How fast a guest's need can grow, as far as it has been seen.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// Forgotten with this time constant, milliseconds.
const LIFE_MS: f64 = 600_000.0;

/// The fastest that the need grew between two of the guest's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fastest {
    /// When that was.
    at: Stamp,
    /// Bytes a second.
    bytes: Bytes,
}

impl Fastest {
    /// Takes in a rate, bytes a second.
    pub(crate) fn see(&mut self, at: Stamp, rate: f64) {
        let rate = Bytes(rate.max(0.0) as u64);
        if rate >= self.rate(at) {
            *self = Fastest { at, bytes: rate };
        }
    }

    /// What is left of it, bytes a second.
    pub fn rate(&self, at: Stamp) -> Bytes {
        self.bytes.share((-(at.since(self.at) as f64) / LIFE_MS).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_counts_until_it_is_old() {
        let mut fastest = Fastest::default();
        fastest.see(Stamp(1_000), 4e6);
        fastest.see(Stamp(2_000), -9e9);
        fastest.see(Stamp(3_000), 3e6);
        let rate = |ms| fastest.rate(Stamp(ms)).0;
        assert!((3_980_000..4_000_000).contains(&rate(3_000)), "{}", rate(3_000));
        assert!(rate(601_000) < 1_500_000 && rate(10_000_000) == 0);
    }
}
