//! Proxmox VE's auto-ballooning, every 10 s.
//!
//! `goal = 0.80 · total − used`. Beyond 10 MiB it is shared out: each guest is to
//! have `min + (Σ(size − min) + goal) · shares / Σ shares`, clamped to min and max,
//! at most 100 MiB from its present size, over and over until nothing moves.
//! Shrinking asks guests that have more than a quarter of their minimum free,
//! growing the others; all of them where those bring nothing.

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{GuestView, Observation, Policy, bytes, signed};

const MIB: f64 = 1048576.0;
const TARGET: f64 = 0.80;
const LEAST: f64 = 10.0 * MIB;
const STEP: f64 = 100.0 * MIB;
/// A bound where the original runs until nothing moves.
const ROUNDS: usize = 50;

/// Proxmox's balloon algorithm.
pub struct Proxmox;

impl Policy for Proxmox {
    fn period_ms(&self) -> u64 {
        10_000
    }

    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let Some(m) = observation.sample.host.memory else { return Vec::new() };
        let goal = TARGET * signed(m.total) - signed(m.total - m.available);
        if goal.abs() <= LEAST {
            return Vec::new();
        }
        let mut guests: Vec<Place> = observation.guests().into_iter().map(Place::new).collect();
        let asked = |g: &Place| (goal < 0.0) == g.roomy;
        let rest = share_out(&mut guests, goal, asked);
        if (goal - rest).abs() < 1.0 {
            share_out(&mut guests, goal, |_| true);
        }
        let moved = guests.iter().filter(|g| g.to != signed(g.seen.actual));
        moved.map(|g| (g.seen.id, bytes(g.to))).collect()
    }
}

/// A guest and the size found for it so far.
struct Place {
    seen: GuestView,
    to: f64,
    roomy: bool,
}

impl Place {
    fn new(seen: GuestView) -> Place {
        let quarter = 0.25 * signed(seen.min);
        let roomy = seen.free.is_some_and(|f| signed(f) > quarter) && seen.actual >= seen.min;
        Place { seen, to: signed(seen.actual), roomy }
    }

    /// Where it goes if this is what it should have; `None`: it stays for good.
    fn step(&self, desired: f64, growing: bool) -> Option<f64> {
        let actual = signed(self.seen.actual);
        match desired - actual {
            d if d > 0.0 && growing => Some(desired.min(actual + STEP)),
            d if d < 0.0 => Some(desired.max(actual - STEP)),
            _ => None,
        }
    }
}

/// Shares `goal` out among those that are asked; returns what is left of it.
fn share_out(guests: &mut [Place], goal: f64, asked: impl Fn(&Place) -> bool) -> f64 {
    let mut rest = goal;
    let mut open: Vec<&mut Place> = guests.iter_mut().filter(|g| asked(g)).collect();
    for _ in 0..ROUNDS {
        let shares: f64 = open.iter().map(|g| g.seen.weight).sum();
        let above: f64 = open.iter().map(|g| g.to - signed(g.seen.min)).sum::<f64>() + rest;
        let mut moved = 0.0;
        let mut any = false;
        open.retain_mut(|g| {
            let (min, max) = (signed(g.seen.min), signed(g.seen.ram));
            let desired = (min + above * g.seen.weight / shares).clamp(min, max.max(min));
            let Some(to) = g.step(desired, goal > 0.0) else { return false };
            any |= to != g.to;
            moved += to - g.to;
            g.to = to;
            true
        });
        rest -= moved;
        if !any || rest.abs() < 1.0 {
            break;
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{id, sample};
    use ebb_core::config::{Config, VmSettings};

    #[test]
    fn shares_divide_what_is_above_the_minimum() {
        let mut config = Config::default();
        let heavy = VmSettings { weight: 3.0, ..config.defaults.clone() };
        config.vms.insert("vm2".into(), heavy);
        // Goal −80; above: 550 + 550 − 80 = 1020; 250 + 255 = 505 → 700 at most 100 down;
        // 250 + 765 → 1000: above its present size, and this is no time to grow.
        let s = sample(10_000, 1920, &[(1000, 800, 500, 0), (1000, 800, 500, 0)]);
        let observation = Observation { sample: &s, config: &config, vmpressure: None };
        let sizes = Proxmox.decide(&observation);
        assert_eq!(sizes.len(), 1, "{sizes:?}");
        assert_eq!((sizes[0].0, sizes[0].1.0 >> 20), (id(1), 720), "what is left of the goal");
    }
}
