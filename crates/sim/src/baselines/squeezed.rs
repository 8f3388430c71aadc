//! squeezed, xapi's memory daemon: every guest gets the same fraction of its range.
//!
//! `γ = clamp(surplus / Σ(max − min))`, `target = min + γ · (max − min)`, where the
//! surplus is what would be left if every guest were at its minimum. It frees before
//! it grants. A guest that makes no progress for 5 s is stuck, for 20 s
//! uncooperative: its size is then taken as it is, and it is asked no more until it
//! moves.
//!
//! Carried over from Xen, where all of a guest's memory is the host's expense from
//! the start: the surplus is reckoned from sizes, not from what is touched. The
//! host keeps the same reserve as with Ebb.

use std::collections::BTreeMap;

use ebb_core::model::default_reserve;
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, Stamp};

use super::{GuestView, Observation, Policy, bytes, signed};

const STUCK_MS: u64 = 5_000;
const UNCOOPERATIVE_MS: u64 = 20_000;
/// Near enough to the target.
const NEAR: Bytes = Bytes::mib(4);

/// How a guest moved lately.
#[derive(Clone, Copy)]
struct Progress {
    actual: Bytes,
    target: Bytes,
    moved: Stamp,
}

#[derive(Default)]
pub struct Squeezed {
    progress: BTreeMap<VmId, Progress>,
}

impl Policy for Squeezed {
    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let Some(m) = observation.sample.host.memory else { return Vec::new() };
        let at = observation.sample.at;
        let guests = observation.guests();
        self.progress.retain(|id, _| guests.iter().any(|g| g.id == *id));
        let (fixed, able): (Vec<&GuestView>, Vec<&GuestView>) =
            guests.iter().partition(|g| self.idle_ms(g, at) >= UNCOOPERATIVE_MS);
        let Some(whole) = observation.for_vms() else { return Vec::new() };
        let whole = whole - signed(default_reserve(m.total));
        let mins: f64 = able.iter().map(|g| signed(g.min)).sum();
        let taken: f64 = fixed.iter().map(|g| signed(g.actual)).sum();
        let ranges: f64 = able.iter().map(|g| signed(g.ram - g.min)).sum();
        let gamma =
            if ranges > 0.0 { ((whole - mins - taken) / ranges).clamp(0.0, 1.0) } else { 0.0 };
        let goals: Vec<(&GuestView, Bytes)> =
            able.iter().map(|g| (*g, g.min + bytes(gamma * signed(g.ram - g.min)))).collect();
        self.free_then_grant(&goals, at)
    }
}

impl Squeezed {
    /// How long a guest that should move has not.
    fn idle_ms(&mut self, g: &GuestView, at: Stamp) -> u64 {
        let Some(p) = self.progress.get_mut(&g.id) else { return 0 };
        if g.actual.abs_diff(p.actual) >= Bytes::mib(1) || g.actual.abs_diff(p.target) <= NEAR {
            p.actual = g.actual;
            p.moved = at;
        }
        at.since(p.moved)
    }

    /// Grants wait while a guest that still moves has more than it should.
    fn free_then_grant(&mut self, goals: &[(&GuestView, Bytes)], at: Stamp) -> Vec<(VmId, Bytes)> {
        let waits = goals.iter().any(|(g, to)| {
            let idle = self.progress.get(&g.id).map_or(0, |p| at.since(p.moved));
            g.actual > *to + NEAR && idle < STUCK_MS
        });
        let mut orders = Vec::new();
        for (g, to) in goals {
            let order = if waits { g.actual.min(*to) } else { *to };
            let known = self.progress.get(&g.id).map(|p| p.target);
            if known.unwrap_or(g.ram).abs_diff(order) > NEAR {
                let p = Progress { actual: g.actual, target: order, moved: at };
                self.progress.insert(g.id, p);
                orders.push((g.id, order));
            }
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{ask, sample};
    use ebb_core::sample::Sample;

    /// The first has this size, the second 1,000 MiB. Of 4,000 MiB a fifth is the reserve.
    fn now(t: u64, size: u64) -> Sample {
        let guests = [(2000, size, 100, 0), (2000, 1000, 100, 0)];
        Sample { at: Stamp(t), ..sample(4000, 0, &guests) }
    }

    #[test]
    fn it_frees_before_it_grants() {
        let mut s = Squeezed::default();
        assert_eq!(ask(&mut s, &now(0, 2000)), [(1, 1600), (2, 1000)]);
        assert_eq!(ask(&mut s, &now(1000, 1700)), [], "still freeing");
        assert_eq!(ask(&mut s, &now(2000, 1600)), [(2, 1600)]);
    }

    #[test]
    fn one_that_does_not_move_is_passed_over_after_five_and_written_off_after_twenty_seconds() {
        let mut s = Squeezed::default();
        assert_eq!(ask(&mut s, &now(0, 2000)), [(1, 1600), (2, 1000)]);
        assert_eq!(ask(&mut s, &now(4_000, 2000)), []);
        assert_eq!(ask(&mut s, &now(5_000, 2000)), [(2, 1600)], "stuck");
        // Uncooperative: 3200 − 2000 − 500 = 700 of a range of 1500.
        assert_eq!(ask(&mut s, &now(20_000, 2000)), [(2, 1200)]);
    }
}
