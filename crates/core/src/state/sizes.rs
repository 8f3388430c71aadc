//! The sizes that a VM had lately, and what its guest's statistics mean beside them.
//!
//! QEMU tells a balloon's size of this moment, and the guest's statistics of some moment
//! before, up to a second or two ago. While the balloon moves the two do not belong
//! together: one that grows would look like a need that grows, and one that shrinks
//! like a need that falls. What a guest needs is not moved by its balloon, so it is
//! computed with the size that it had when it spoke. Where that is not known to the byte, the
//! sizes of that time allow for several needs; which of them is likely says `growth.rs`.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// Older sizes go with no statistics that are still believed.
const LIFE_MS: u64 = 6_000;
/// From when a guest counts its pages to when QEMU has its statistics.
const GATHER_MS: u64 = 300;
const MOST: usize = 64;

/// Sizes and since when, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes(Vec<(Stamp, Bytes)>);

impl Sizes {
    pub(super) fn see(&mut self, at: Stamp, actual: Bytes) {
        if self.0.last().is_none_or(|s| s.1 != actual) {
            self.0.push((at, actual));
        }
        // The last one before that time still held at its begin.
        let old = self.0.iter().filter(|s| at.since(s.0) >= LIFE_MS).count().saturating_sub(1);
        self.0.drain(..old.max(self.0.len().saturating_sub(MOST)));
    }

    /// The least and the greatest size that statistics of `said` or later may go with.
    pub(super) fn of_stats(&self, said: Stamp) -> Option<(Bytes, Bytes)> {
        self.range(Stamp(said.0.saturating_sub(GATHER_MS)))
    }

    /// The least and the greatest size since a moment.
    fn range(&self, since: Stamp) -> Option<(Bytes, Bytes)> {
        let first = self.0.iter().rposition(|s| s.0 <= since).unwrap_or(0);
        let sizes = || self.0.get(first..).unwrap_or_default().iter().map(|s| s.1);
        Some((sizes().min()?, sizes().max()?))
    }

    /// Since when it has the size of now.
    pub(super) fn since(&self) -> Option<Stamp> {
        self.0.last().map(|s| s.0)
    }

    /// The greatest size of late.
    pub(super) fn most(&self) -> Option<Bytes> {
        Some(self.range(Stamp(0))?.1)
    }

    /// The least and the most that a guest may need that has said, at `said` or later, that so
    /// much is available to it.
    pub(super) fn needs(&self, said: Stamp, available: Bytes) -> Option<(Bytes, Bytes)> {
        let (mut low, mut high) = self.of_stats(said)?;
        if available > high {
            // It spoke before that.
            (low, high) = self.range(Stamp(0))?;
        }
        Some((low - available, high - available))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(seen: &[(u64, u64)]) -> Sizes {
        let mut s = Sizes::default();
        seen.iter().for_each(|(at, mib)| s.see(Stamp(*at), Bytes::mib(*mib)));
        s
    }

    fn needs(s: &Sizes, said: u64, available: u64) -> (u64, u64) {
        let (low, high) = s.needs(Stamp(said), Bytes::mib(available)).unwrap();
        (low.0 >> 20, high.0 >> 20)
    }

    #[test]
    fn where_the_size_stands_still_need_is_what_is_not_available() {
        let s = sizes(&[(1_000, 500), (2_000, 500)]);
        assert_eq!(needs(&s, 1_500, 300), (200, 200));
    }

    #[test]
    fn a_balloon_that_grows_hides_no_more_of_a_growing_need_than_it_took_meanwhile() {
        let s = sizes(&[(10_000, 500), (11_000, 450), (12_000, 400)]);
        // Said between 11 and 12 s, at a size of 400 to 450.
        assert_eq!(needs(&s, 11_500, 300), (100, 150));
        assert_eq!(needs(&s, 11_500, 200), (200, 250), "80 more at least than 120");
        assert_eq!(needs(&s, 11_500, 340), (60, 110));
        assert_eq!(needs(&s, 9_000, 340), (60, 160), "it may have spoken at 500");
    }

    #[test]
    fn a_balloon_that_shrinks_is_no_need() {
        let s = sizes(&[(10_000, 200), (11_000, 500)]);
        assert_eq!(needs(&s, 10_400, 50), (150, 450));
        assert_eq!(needs(&s, 10_400, 350), (0, 150), "the same, said later");
        assert_eq!(needs(&s, 11_400, 300), (200, 200), "that is one");
    }

    #[test]
    fn more_available_than_its_size_was_said_before() {
        let s = sizes(&[(10_000, 500), (12_000, 170)]);
        assert_eq!(needs(&s, 12_500, 250), (0, 250));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut s = Sizes::default();
        for i in 0..10_000 {
            s.see(Stamp(i * 100), Bytes(i % 7));
        }
        assert!(s.0.len() <= MOST, "{}", s.0.len());
        let mut s = Sizes::default();
        (0..10_000).for_each(|i| s.see(Stamp(i), Bytes(i)));
        assert_eq!(s.0.len(), MOST);
    }
}
