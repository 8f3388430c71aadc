//! Whether a VM's balloon brings the host anything: what was to come of it beside what came.
//!
//! QEMU may keep what a balloon took: for a device that pins memory, for encrypted guests,
//! where memory is locked. Not all of these can be recognised; that nothing comes can.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// This much, and this share of RAM, must have been expected before anything is concluded.
const LEAST: (Bytes, f64) = (Bytes::mib(128), 0.02);
/// A balloon that brings less than this share of what was expected brings nothing.
const BRINGS_NOTHING: f64 = 0.1;
/// It is asked again after this.
const PAUSE_MS: u64 = 3_600_000;
/// What a balloon took leaves residency within this time.
const COMES_MS: u64 = 15_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Yields {
    /// By how much the balloon has grown on order, of memory that the host held.
    pub expected: Bytes,
    /// What left residency meanwhile.
    pub came: Bytes,
    /// When the balloon last grew.
    pub grew: Option<Stamp>,
    /// It is not asked until then: it brought nothing.
    #[serde(alias = "barren_until")]
    pub brings_nothing_until: Option<Stamp>,
}

impl Yields {
    /// The balloon grew by `grew` (of memory that the host held), and residency fell by
    /// `fell`.
    pub(super) fn observe(&mut self, at: Stamp, ram: Bytes, grew: Bytes, fell: Bytes) {
        if self.brings_nothing_until.is_some_and(|t| t <= at) {
            *self = Yields::default();
        }
        if grew > Bytes::ZERO {
            self.grew = Some(at);
        }
        self.expected += grew;
        self.came += fell;
        let settled = self.grew.is_some_and(|t| at.since(t) >= COMES_MS);
        if !settled || self.expected < ram.share(LEAST.1).max(LEAST.0) {
            return;
        }
        let nothing = self.came < self.expected.share(BRINGS_NOTHING);
        let brings_nothing_until = nothing.then(|| at.plus(PAUSE_MS));
        *self = Yields { brings_nothing_until, ..Yields::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(orders: &[(u64, u64)]) -> Option<Stamp> {
        let mut y = Yields::default();
        for (i, (grew, fell)) in orders.iter().enumerate() {
            let at = Stamp(1000 * i as u64);
            y.observe(at, Bytes::gib(1), Bytes::mib(*grew), Bytes::mib(*fell));
        }
        y.brings_nothing_until
    }

    #[test]
    fn a_balloon_that_brings_nothing_is_not_asked_for_an_hour() {
        let still = [(0, 0); 16];
        let with = |orders: &[(u64, u64)]| live(&[orders, &still].concat());
        assert_eq!(with(&[(100, 0)]), None, "too little to tell");
        let until = with(&[(100, 0), (100, 5)]).unwrap();
        assert!((PAUSE_MS..PAUSE_MS + 20_000).contains(&until.0), "{until:?}");
        assert_eq!(with(&[(100, 60), (100, 5)]), None);
        assert_eq!(live(&[(100, 0), (100, 0)]), None, "it may come in a moment");
        let mut y = Yields { brings_nothing_until: Some(Stamp(5)), ..Yields::default() };
        y.observe(Stamp(6), Bytes::gib(1), Bytes::ZERO, Bytes::ZERO);
        assert_eq!(y.brings_nothing_until, None, "asked again");
    }
}
