//! Rules that are a line each: what a newcomer has to beat.
//!
//! - *none*: every guest keeps what it was given.
//! - *static split*: every guest has its part of the host, by RAM, for good.
//! - *demand + 20 %*: what a guest uses and a fifth more (Hyper-V's documented rule: demand
//!   and a buffer of 20 %), each second; where that does not fit, all get the same part less.
//! - *balance available*: the host and each guest are to have as much available above what is
//!   critical (ChromeOS's balloon policy): each second half of the difference is moved.

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{GuestView, Observation, Policy, bytes, signed};

/// What all of them leave to the host.
const HOST_KEEPS: f64 = 0.06;
const BUFFER: f64 = 1.2;
/// ChromeOS has 400 MiB for hosts and guests of some GiB.
const CRITICAL_SHARE: f64 = 0.05;
const CHANGE_LEAST: f64 = 16.0 * 1048576.0;

fn for_guests(observation: &Observation<'_>) -> Option<f64> {
    Some(observation.for_vms()? - signed(observation.sample.host.memory?.total) * HOST_KEEPS)
}

/// The sizes that `to` wants, as far as they change anything; those that shrink come first.
fn plan(guests: &[GuestView], mut to: impl FnMut(&GuestView) -> Option<f64>) -> Vec<(VmId, Bytes)> {
    let order = |g: &GuestView| {
        let to = to(g)?.clamp(signed(g.min).min(signed(g.ram)), signed(g.ram));
        let changes = (to - signed(g.actual)).abs() >= CHANGE_LEAST;
        changes.then(|| (g.id, bytes(to), bytes(to) >= g.actual))
    };
    let mut orders: Vec<_> = guests.iter().filter_map(order).collect();
    orders.sort_by_key(|o| o.2);
    orders.into_iter().map(|(id, to, _)| (id, to)).collect()
}

/// Never sets a balloon.
pub struct NoController;

impl Policy for NoController {
    fn period_ms(&self) -> u64 {
        10_000
    }

    fn decide(&mut self, _: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        Vec::new()
    }
}

/// Every guest has its part.
pub struct StaticSplit;

impl Policy for StaticSplit {
    fn period_ms(&self) -> u64 {
        5_000
    }

    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let guests = observation.guests();
        let Some(room) = for_guests(observation) else { return Vec::new() };
        let ram: f64 = guests.iter().map(|g| signed(g.ram)).sum();
        let part = (room / ram.max(1.0)).min(1.0);
        plan(&guests, |g| Some(signed(g.ram) * part))
    }
}

/// What is used, and a fifth more.
pub struct Demand;

impl Policy for Demand {
    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let guests = observation.guests();
        let Some(room) = for_guests(observation) else { return Vec::new() };
        let wants = |g: &GuestView| {
            let used = signed(g.actual) - signed(g.free?) - signed(g.caches);
            Some((used * BUFFER).clamp(signed(g.min), signed(g.ram)))
        };
        let want: Vec<f64> = guests.iter().map(|g| wants(g).unwrap_or(signed(g.actual))).collect();
        let sum: f64 = want.iter().sum();
        // What is left over is divided alike: cache is of use.
        let (part, more) = match room >= sum {
            true => (1.0, (room - sum) / guests.len().max(1) as f64),
            false => (room / sum, 0.0),
        };
        let mut want = want.into_iter();
        plan(&guests, |_| Some(want.next()? * part + more))
    }
}

/// As much available here as there.
pub struct BalanceAvailable;

impl Policy for BalanceAvailable {
    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let guests = observation.guests();
        let Some(m) = observation.sample.host.memory else { return Vec::new() };
        let host = signed(m.available) - CRITICAL_SHARE * signed(m.total);
        let one = |g: &GuestView| {
            let available = signed(g.free?) + signed(g.caches);
            let guest = available - CRITICAL_SHARE * signed(g.ram);
            // What the host has is for all: each guest weighs its part of it.
            let delta = (guest - host / guests.len() as f64) / 2.0;
            Some(signed(g.actual) - delta)
        };
        plan(&guests, one)
    }
}
