//! The limit: a controller that knows what every guest will want.
//!
//! Each tenth of a second it gives every guest what it will want at most within the next
//! seconds, and divides the rest. It cannot do what no controller can: balloons move no faster,
//! what does not fit does not fit, and floors are kept.

use ebb_core::units::Bytes;

use crate::guest::Spec;
use crate::host::OWN_SHARE;
use crate::misbehaviour::Misbehaviour;
use crate::score::Score;
use crate::world::{Setup, World};

/// How far it looks, ms: a balloon of 4 GiB is inflated within this.
const AHEAD_MS: u64 = 5_000;
const LOOK_MS: u64 = 100;
/// Changes below this are left out.
const LEAST: Bytes = Bytes::mib(4);

/// Most that others than VMs use within the next seconds.
fn others(setup: &Setup, at: u64) -> Bytes {
    let steps = (0..=AHEAD_MS).step_by(500);
    steps.map(|ms| setup.others.at(at + ms)).max().unwrap_or_default()
}

/// What would have been possible.
pub fn run(setup: &Setup) -> Score {
    let mut world = World::new(setup);
    let moments: Vec<Vec<u64>> = setup.guests.iter().map(|g| g.need.moments()).collect();
    while !world.over() {
        let sample = world.look();
        let at = world.at_ms();
        let keeps = setup.host.share(setup.marks.1 + 0.01) + others(setup, at);
        let fixed = |m: Misbehaviour| {
            matches!(m, Misbehaviour::Pinned | Misbehaviour::Bare | Misbehaviour::Stuck)
        };
        let mut room = setup.host - setup.host.share(OWN_SHARE) - keeps;
        let mut wants = Vec::new();
        let most = |i: usize| {
            let from = moments[i].partition_point(|m| *m <= at);
            let soon = moments[i][from..].iter().take_while(|m| **m <= at + AHEAD_MS);
            let need = &setup.guests[i].need;
            std::iter::once(&at).chain(soon).map(|m| need.sum_at(*m)).max().unwrap_or_default()
        };
        // Those that are about to start.
        let soon = |g: &Spec| g.starts_ms > at && g.starts_ms <= at + AHEAD_MS;
        for (i, _) in setup.guests.iter().enumerate().filter(|(_, g)| soon(g)) {
            room = room - most(i);
        }
        for vm in &sample.vms {
            let Some(i) = world.index(vm.id) else { continue };
            let g = &world.guests[i];
            // One that is paused does not shrink, and needs no more than it has until it goes on.
            let rests = g.paused && g.spec.is_paused(at + AHEAD_MS);
            if fixed(g.spec.misbehaviour) || rests {
                room = room - g.resident();
                continue;
            }
            let want = most(i).max(g.used()) + g.spec.ram.share(0.02);
            let (floor, ram) = (setup.min.of(g.spec.ram), g.spec.ram);
            wants.push((vm.id, g.actual, want.max(floor).min(ram), (floor, ram)));
        }
        let sum: Bytes = wants.iter().map(|w| w.2).sum();
        let part = if sum > room { room.fraction_of(sum) } else { 1.0 };
        let spare = (room - sum).0 / wants.len().max(1) as u64;
        let mut orders: Vec<_> = wants
            .into_iter()
            .map(|(id, actual, want, (floor, ram))| {
                (id, actual, (want.share(part) + Bytes(spare)).max(floor).min(ram))
            })
            .filter(|(_, actual, to)| actual.abs_diff(*to) >= LEAST)
            .collect();
        orders.sort_by_key(|(_, actual, to)| to >= actual);
        for (id, _, to) in orders {
            let _ = world.order(id, to);
        }
        world.pass(LOOK_MS);
    }
    world.score()
}
