//! hypeman's active ballooning: guests give in proportion to what is above their floors, while
//! the host is low.
//!
//! Every 2 s. The host is *low* from 10 % of its memory available, or as soon as tasks stall,
//! until 15 % are available and none stalls. While it is low all guests together are to give
//! `15 % · total − available`; where that is nothing and tasks stall, what they give now; else
//! nothing. A guest's part is by `RAM − floor`. Changes below 64 MiB are not made; one order
//! moves a guest by 256 MiB at most, and the next comes after 5 s at the earliest.
//! The original's floor is half of RAM, and 512 MiB at least; here it is the same as all's.

use std::collections::BTreeMap;

use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, Stamp};

use super::{GuestView, Observation, Policy, bytes, signed};

const LOW: f64 = 0.10;
const LOW_ENDS: f64 = 0.15;
const CHANGE_LEAST: f64 = 64.0 * 1048576.0;
const STEP: f64 = 256.0 * 1048576.0;
const PAUSE_MS: u64 = 5_000;
/// What `/proc/pressure/memory` prints as more than 0.00.
const STALLS: f64 = 0.01;

/// hypeman's controller.
#[derive(Default)]
pub struct Hypeman {
    low: bool,
    ordered: BTreeMap<VmId, Stamp>,
}

impl Policy for Hypeman {
    fn period_ms(&self) -> u64 {
        2_000
    }

    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let Some(m) = observation.sample.host.memory else { return Vec::new() };
        let guests = observation.guests();
        let (total, available) = (signed(m.total), signed(m.available));
        let stalls = observation.sample.host.psi.is_some_and(|psi| psi.some.avg10 >= STALLS);
        self.low = match self.low {
            true => available < LOW_ENDS * total || stalls,
            false => available <= LOW * total || stalls,
        };

        let above = |g: &GuestView| (signed(g.ram) - signed(g.min)).max(0.0);
        let most: f64 = guests.iter().map(above).sum();
        let missing = LOW_ENDS * total - available;
        let all = match (self.low, missing > 0.0, stalls) {
            (true, true, _) => missing.min(most),
            (true, false, true) => guests.iter().map(|g| signed(g.ram - g.actual)).sum(),
            _ => 0.0,
        };

        let at = observation.sample.at;
        self.ordered.retain(|id, _| guests.iter().any(|g| g.id == *id));
        let mut orders = Vec::new();
        for g in guests.iter().filter(|g| above(g) > 0.0) {
            let change = signed(g.ram) - all / most * above(g) - signed(g.actual);
            let waits = self.ordered.get(&g.id).is_some_and(|last| at.since(*last) < PAUSE_MS);
            if change.abs() >= CHANGE_LEAST && !waits {
                self.ordered.insert(g.id, at);
                let to = signed(g.actual) + change.clamp(-STEP, STEP);
                orders.push((g.id, bytes(to).clamp(g.min, g.ram)));
            }
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{ask, sample};
    use ebb_core::sample::{Psi, PsiLine};

    const GAVE: [(u64, u64, u64, u64); 2] = [(1000, 900, 0, 0), (2000, 1800, 0, 0)];

    #[test]
    fn a_guest_is_asked_every_five_seconds_and_gets_all_back() {
        let mut h = Hypeman::default();
        let s = sample(4000, 300, &[(1000, 1000, 0, 0), (2000, 2000, 0, 0)]);
        assert_eq!(ask(&mut h, &s), [(1, 900), (2, 1800)]);
        let mut s = sample(4000, 700, &GAVE);
        s.at = Stamp(4_999);
        assert_eq!(ask(&mut h, &s), []);
        s.at = Stamp(5_000);
        assert_eq!(ask(&mut h, &s), [(1, 1000), (2, 2000)]);
    }

    #[test]
    fn while_tasks_stall_guests_keep_giving() {
        let mut s = sample(4000, 700, &GAVE);
        let some = PsiLine { avg10: 0.01, ..PsiLine::default() };
        s.host.psi = Some(Psi { some, ..Psi::default() });
        assert_eq!(ask(&mut Hypeman::default(), &s), []);
        s.host.psi = None;
        assert_eq!(ask(&mut Hypeman::default(), &s), [(1, 1000), (2, 2000)]);
    }
}
