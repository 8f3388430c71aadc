//! qmemman of Qubes OS: memory in proportion to what is used.
//!
//! `pref = 1.3 · used`, at least 200 MiB. While all can have their preference, what
//! is left is shared out in proportion to it (times 0.999 against rounding, never
//! above the maximum). Else those above their preference are brought to it, and the
//! others share what that and the free memory give, by preference. Plans that move
//! less than 150 MiB in all are dropped, unless a guest below its preference would
//! get 15 MiB, or the host is below its 50 MiB. One that does not move for 3 s at
//! 100 MB/s makes no progress and is left out.
//!
//! Carried over from Xen: free memory is the host's less all guests' sizes, and may
//! be negative here.

use std::collections::BTreeMap;

use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, Stamp};

use super::{GuestView, Observation, Policy, bytes, signed};
use crate::guest_stats::ASKED_EVERY_MS;

const MIB: f64 = 1048576.0;
const CACHE_FACTOR: f64 = 1.3;
const PREF_LEAST: f64 = 200.0 * MIB;
const ROUNDING: f64 = 0.999;
const TRANSFER_LEAST: f64 = 150.0 * MIB;
const CHANGE_LEAST: f64 = 15.0 * MIB;
const LEFT_FREE: f64 = 50.0 * MIB;
const DONOR_LEAST: f64 = 10.0 * MIB;
const NO_PROGRESS_MS: u64 = 3_000;
const NO_PROGRESS_RATE: f64 = 100e6;

/// A guest in its terms.
#[derive(Clone, Copy)]
struct Domain {
    id: VmId,
    actual: f64,
    max: f64,
    min: f64,
    pref: f64,
}

impl Domain {
    fn new(g: &GuestView) -> Option<Domain> {
        let used = signed(g.actual) - signed(g.free?) - signed(g.caches);
        let max = signed(g.ram);
        let pref = (CACHE_FACTOR * used).min(max).max(PREF_LEAST).max(signed(g.min));
        Some(Domain { id: g.id, actual: signed(g.actual), max, min: signed(g.min), pref })
    }
}

#[derive(Default)]
pub struct Qmemman {
    /// Last orders to shrink: the target, and the size and moment last looked at.
    ordered: BTreeMap<VmId, (f64, f64, Stamp)>,
    pushed: bool,
}

/// As in Qubes OS: guests tell each change of 30 MB within a tenth of a second, and it
/// decides at once.
const PUSHED_MS: u64 = 100;

impl Policy for Qmemman {
    fn period_ms(&self) -> u64 {
        if self.pushed { PUSHED_MS } else { 1_000 }
    }

    fn told_every_ms(&self) -> u64 {
        if self.pushed { PUSHED_MS } else { ASKED_EVERY_MS }
    }

    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let Some(whole) = observation.for_vms() else { return Vec::new() };
        let seen = observation.guests();
        let free = whole - seen.iter().map(|g| signed(g.actual)).sum::<f64>() - LEFT_FREE;
        let at = observation.sample.at;
        let domains: Vec<Domain> =
            seen.iter().filter_map(Domain::new).filter(|d| self.progresses(d, at)).collect();
        let plan = balance(free, &domains);
        if !self.significant(&plan, &domains, free) {
            return Vec::new();
        }
        for (id, to) in &plan {
            let actual = domains.iter().find(|d| d.id == *id).map_or(0.0, |d| d.actual);
            self.ordered.insert(*id, (*to, actual, at));
        }
        plan.into_iter().map(|(id, to)| (id, bytes(to))).collect()
    }
}

impl Qmemman {
    /// With guests that tell it at once.
    pub fn pushed() -> Qmemman {
        Qmemman { pushed: true, ..Qmemman::default() }
    }

    fn progresses(&mut self, d: &Domain, at: Stamp) -> bool {
        let Some((to, was, since)) = self.ordered.get_mut(&d.id) else { return true };
        let elapsed = at.since(*since);
        if d.actual - *to < DONOR_LEAST || elapsed < NO_PROGRESS_MS {
            return true;
        }
        let moved = *was - d.actual;
        let fast = moved >= NO_PROGRESS_RATE * elapsed as f64 / 1000.0;
        if fast {
            (*was, *since) = (d.actual, at);
        }
        fast
    }

    fn significant(&self, plan: &[(VmId, f64)], domains: &[Domain], free: f64) -> bool {
        if free < -CHANGE_LEAST {
            return true;
        }
        let mut total = free.abs();
        for (id, to) in plan {
            let Some(d) = domains.iter().find(|d| d.id == *id) else { continue };
            let last = self.ordered.get(id).map_or(d.actual, |o| o.0);
            total += (to - last).abs();
            if last < d.pref && to - last > CHANGE_LEAST {
                return true;
            }
        }
        total > TRANSFER_LEAST
    }
}

/// Donors first, then acceptors.
fn balance(free: f64, domains: &[Domain]) -> Vec<(VmId, f64)> {
    let needed: f64 = domains.iter().map(|d| d.pref - d.actual).sum();
    let mut plan = if free - needed > 0.0 {
        enough(free - needed, domains)
    } else {
        too_little(free, domains)
    };
    // The same floors as all controllers here.
    for (id, to) in &mut plan {
        if let Some(d) = domains.iter().find(|d| d.id == *id) {
            *to = to.max(d.min).min(d.max);
        }
    }
    let gives = |p: &(VmId, f64)| domains.iter().any(|d| d.id == p.0 && p.1 >= d.actual);
    plan.sort_by_key(gives);
    plan
}

fn enough(available: f64, domains: &[Domain]) -> Vec<(VmId, f64)> {
    let prefs: f64 = domains.iter().map(|d| d.pref).sum();
    let mut left = 0.0;
    let mut sizes: Vec<f64> = Vec::new();
    for d in domains {
        let to = ROUNDING * (d.pref + d.pref / prefs * available);
        left += (to - d.max).max(0.0);
        sizes.push(to.min(d.max));
    }
    for _ in 0..domains.len() {
        let open = sizes.iter().zip(domains).filter(|(to, d)| **to < d.max).count();
        if left < 1.0 || open == 0 {
            break;
        }
        let bonus = ROUNDING * left / open as f64;
        left = 0.0;
        for (to, d) in sizes.iter_mut().zip(domains).filter(|(to, d)| **to < d.max) {
            left += (*to + bonus - d.max).max(0.0);
            *to = (*to + bonus).min(d.max);
        }
    }
    domains.iter().map(|d| d.id).zip(sizes).collect()
}

fn too_little(free: f64, domains: &[Domain]) -> Vec<(VmId, f64)> {
    let (donors, acceptors): (Vec<&Domain>, Vec<&Domain>) =
        domains.iter().partition(|d| d.pref < d.actual || d.actual >= d.max);
    let donors: Vec<_> = donors.iter().filter(|d| d.actual - d.pref >= DONOR_LEAST).collect();
    // The original subtracts here what donors give, and so gives acceptors nothing
    // in the same round; they get it in the next, when it is free.
    let squeezed = free - donors.iter().map(|d| d.actual - d.pref).sum::<f64>();
    let mut plan: Vec<(VmId, f64)> = donors.iter().map(|d| (d.id, d.pref)).collect();
    if squeezed >= 0.0 {
        let prefs: f64 = acceptors.iter().map(|d| d.pref).sum();
        let to = |d: &Domain| (ROUNDING * (d.actual + d.pref / prefs * squeezed)).min(d.max);
        plan.extend(acceptors.into_iter().map(|d| (d.id, to(d))));
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{ask, sample};

    #[test]
    fn one_that_does_not_follow_is_left_out() {
        let mut q = Qmemman::default();
        let now = |t| {
            let mut s = sample(1200, 0, &[(1000, 1000, 900, 0), (1000, 900, 0, 0)]);
            s.at = Stamp(t);
            s
        };
        assert_eq!(ask(&mut q, &now(0)).first(), Some(&(1, 250)));
        let later = ask(&mut q, &now(3000));
        assert!(later.iter().all(|o| o.0 != 1), "{later:?}");
    }
}
