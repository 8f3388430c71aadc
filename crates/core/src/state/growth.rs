//! How fast a guest's need grows, by statistics that a moving balloon makes unsure, and the fastest
//! that it grew lately.
//!
//! While a balloon moves, a guest's statistics allow for several needs (`sizes.rs`). How fast the
//! need grew before says which of them is likely, as far as the statistics since the last sure ones
//! allow.
//! So a need that grows beside a moving balloon neither seems to stand still nor to leap when the
//! balloon stops.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// A sure need that is older says nothing of how fast it grows now.
const SURE_LIFE_MS: u64 = 2_000;
/// The fastest is forgotten with this time constant, milliseconds.
const FASTEST_LIFE_MS: f64 = 600_000.0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// When its need was last known to the byte, and how much it was.
    sure: Option<(Stamp, Bytes)>,
    /// Bytes a second; below zero where it sinks.
    pub(super) rate: f64,
}

impl Growth {
    /// The need that goes with statistics which allow for `low` to `high`; `was`: the need by the
    /// statistics before, and when those came.
    pub(super) fn see(
        &mut self,
        at: Stamp,
        was: Option<(Stamp, Bytes)>,
        (low, high): (Bytes, Bytes),
    ) -> Bytes {
        if let Some((since, sure)) = self.sure {
            let seconds = at.since(since).max(1) as f64 / 1000.0;
            let rate = |need: Bytes| (need.0 as f64 - sure.0 as f64) / seconds;
            self.rate = self.rate.clamp(rate(low), rate(high));
        }
        let need = was.map_or(low, |(then, was)| {
            let grown = self.rate.max(0.0) * at.since(then) as f64 / 1000.0;
            (was + Bytes(grown as u64)).clamp(low, high)
        });
        if low == high || self.sure.is_none_or(|(t, _)| at.since(t) > SURE_LIFE_MS) {
            self.sure = Some((at, need));
        }
        need
    }
}

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
        self.bytes.share((-(at.since(self.at) as f64) / FASTEST_LIFE_MS).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Statistics as (ms, least need, most need) in MiB; the needs and rates (MiB/s) that they give.
    fn see(stats: &[(u64, u64, u64)]) -> Vec<(u64, i64)> {
        let (mut growth, mut was) = (Growth::default(), None);
        let one = |(ms, low, high): &(u64, u64, u64)| {
            let at = Stamp(*ms);
            let need = growth.see(at, was, (Bytes::mib(*low), Bytes::mib(*high)));
            was = Some((at, need));
            (need.0 >> 20, (growth.rate / f64::from(1 << 20)).round() as i64)
        };
        stats.iter().map(one).collect()
    }

    #[test]
    fn where_statistics_are_sure_the_rate_is_of_the_last_two() {
        let stats = [(0, 100, 100), (100, 140, 140), (200, 150, 150), (300, 130, 130)];
        assert_eq!(see(&stats), [(100, 0), (140, 400), (150, 100), (130, -200)]);
    }

    #[test]
    fn a_need_that_grows_beside_a_moving_balloon_goes_on_as_far_as_statistics_allow() {
        let grows = [(0, 100, 100), (100, 140, 140)];
        let then = |stats: &[(u64, u64, u64)]| see(&[&grows[..], stats].concat())[2..].to_vec();
        assert_eq!(then(&[(200, 0, 400), (300, 220, 220)]), [(180, 400), (220, 400)]);
        assert_eq!(then(&[(200, 0, 150)]), [(150, 100)], "it has slowed down");
        assert_eq!(then(&[(200, 240, 400)]), [(240, 1000)], "it is faster");
        assert_eq!(then(&[(200, 0, 400), (300, 140, 140)])[1], (140, 0), "it had stopped");
    }

    #[test]
    fn a_balloon_that_moves_for_long_hides_no_change() {
        let stats: Vec<_> = (0..60).map(|i| (100 * i, 100 + 10 * i, 150 + 10 * i)).collect();
        let (need, rate) = *see(&stats).last().unwrap();
        assert!((690..=740).contains(&need) && (60..=140).contains(&rate), "{need} {rate}");
    }

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
