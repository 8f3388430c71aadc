//! What a guest needed lately: an LRU list of its own memory.
//!
//! For each size the moment is remembered at which the guest last needed it. [`Recent::peak`]
//! is the most that it needed within a given time.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// Needs of this age are forgotten, milliseconds.
pub(super) const LIFE_MS: u64 = 1_800_000;
/// No more steps are remembered: those of about the same age become one.
const MOST: usize = 24;

/// Moments and needs, oldest first; each need is smaller than the one before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recent(Vec<(Stamp, Bytes)>);

impl Recent {
    pub(crate) fn see(&mut self, at: Stamp, need: Bytes) {
        while self.0.last().is_some_and(|s| s.1 <= need) {
            self.0.pop();
        }
        self.0.push((at, need));
        let old = self.0.iter().take_while(|s| at.since(s.0) > LIFE_MS).count();
        self.0.drain(..old);
        if self.0.len() > MOST {
            self.join(at);
        }
    }

    /// Of two steps of about the same age the younger is dropped: none may seem younger than
    /// it is.
    fn join(&mut self, at: Stamp) {
        let age = |s: &(Stamp, Bytes)| (at.since(s.0) + 1_000) as f64;
        let apart = |i: &usize| age(&self.0[*i]) / age(&self.0[i + 1]);
        // Not the last: what it needs now is known.
        let closest = (0..self.0.len() - 2).min_by(|a, b| apart(a).total_cmp(&apart(b)));
        if let Some(i) = closest {
            self.0.remove(i + 1);
        }
    }

    /// Lowers what was seen within the last `within_ms` by this much.
    pub(crate) fn lower(&mut self, at: Stamp, within_ms: u64, by: Bytes) {
        self.0.iter_mut().filter(|s| at.since(s.0) <= within_ms).for_each(|s| s.1 = s.1 - by);
    }

    /// The most that is remembered.
    pub fn highest(&self) -> Bytes {
        self.0.first().map_or(Bytes::ZERO, |s| s.1)
    }

    /// The most that it needed within the last `within_ms`.
    pub fn peak(&self, at: Stamp, within_ms: u64) -> Bytes {
        let first = self.0.iter().find(|s| at.since(s.0) <= within_ms);
        first.map_or(Bytes::ZERO, |s| s.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_any_time_is_known() {
        let mut r = Recent::default();
        let needs = [(0, 900), (10, 100), (20, 600), (30, 200), (40, 300), (50, 100)];
        for (s, mib) in needs {
            r.see(Stamp(s * 1000), Bytes::mib(mib));
        }
        let peaks = [0, 9, 10, 29, 30, 49, 50].map(|s| r.peak(Stamp(50_000), s * 1000).0 >> 20);
        assert_eq!(peaks, [100, 100, 300, 300, 600, 600, 900]);
        let mut long = r.clone();
        long.see(Stamp(LIFE_MS + 45_000), Bytes::mib(50));
        assert_eq!(long.peak(Stamp(LIFE_MS + 45_000), u64::MAX), Bytes::mib(100));
    }

    #[test]
    fn a_need_that_sinks_slowly_takes_little_room_and_never_seems_younger() {
        let (mut r, mut all) = (Recent::default(), Vec::new());
        for i in 0..2_000u64 {
            let (at, need) = (Stamp(i * 250), Bytes::mib(3_000 - i));
            r.see(at, need);
            all.push((at, need));
        }
        assert!(r.0.len() <= MOST);
        let now = Stamp(1_999 * 250);
        for within in [0, 1_000, 10_000, 60_000, 300_000] {
            let most = all.iter().find(|s| now.since(s.0) <= within).unwrap().1;
            let least = all.iter().find(|s| now.since(s.0) <= within / 2).unwrap().1;
            let peak = r.peak(now, within);
            assert!((least..=most).contains(&peak), "{within}: {peak} of {least} to {most}");
        }
    }
}
