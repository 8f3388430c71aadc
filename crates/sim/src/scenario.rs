//! The catalogue: what is compared, each scenario named by what it tests.
//!
//! A scenario makes a [`Setup`] from a seed. What all guests need at once always
//! fits the host (else no controller could prevent harm), but what they were promised
//! does not, nor does all they ever touched.

use ebb_core::units::Bytes;

use crate::demand::{Curve, Need, fit};
use crate::guest::Spec;
use crate::misbehaviour::{Misbehaviour, ODD};
use crate::world::{Measured, Probe, Setup};

type Make = fn(&mut fastrand::Rng) -> Setup;

#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub about: &'static str,
    make: Make,
}

const fn of(name: &'static str, about: &'static str, make: Make) -> Scenario {
    Scenario { name, about, make }
}

impl Scenario {
    /// The world of this seed.
    pub fn setup(&self, seed: u64) -> Setup {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed_0000);
        let mut setup = (self.make)(&mut rng);
        setup.seed = seed;
        // Pinned RAM is gone whatever its guest needs.
        let pinned = |g: &&mut Spec| g.misbehaviour == Misbehaviour::Pinned;
        let gone: Bytes = setup.guests.iter_mut().filter(pinned).map(|g| g.ram).sum();
        let others = setup.guests.iter_mut().filter(|g| !pinned(g));
        let mut needs: Vec<&mut Need> = others.map(|g| &mut g.need).collect();
        fit(&mut needs, setup.host.share(NEED_MOST) - gone);
        setup
    }
}

/// What all guests need at any moment is at most this share of the host: the rest
/// is the host's own, QEMU's, and cache.
const NEED_MOST: f64 = 0.82;

/// The run of most scenarios, ms.
const RUN_MS: u64 = 600_000;

pub const SCENARIOS: [Scenario; 19] = [
    of("idle-giver", "an idle guest must give 8 GiB", idle_giver),
    of("burst-headroom", "a shrunk guest bursts, the host has room", |rng| burst(rng, 190_000)),
    of("burst-squeeze", "a shrunk guest bursts, another must give", burst_squeeze),
    of("boot-storm", "twelve guests start within ten seconds", boot_storm),
    of("page-cache", "guests full of cache, a part of it hot", page_cache),
    of("leak", "one guest leaks, the others work in phases", leak),
    of("one-stuck", "the idlest guest never shrinks", one_stuck),
    of("one-lying", "a busy guest claims all its memory is available", |rng| {
        company(rng, (8, 4, 0.7), 18, 8, |_, g| g.misbehaviour = Misbehaviour::Lying)
    }),
    of("intermittent", "a third of the guests is stuck now and then", |rng| {
        company(rng, (12, 2, 0.75), 14, 3, |_, g| g.misbehaviour = Misbehaviour::Intermittent)
    }),
    of("day-night", "guests are busy one after another", day_night),
    of("overcommit-1.5", "phases, promised 1.5 times the host", |rng| overcommit(rng, 1.5)),
    of("overcommit-2.0", "phases, promised twice the host", |rng| overcommit(rng, 2.0)),
    of("spikes", "steady guests with short spikes, 1.6 times the host", spikes),
    of("churn", "guests come and go", churn),
    of("mixed-weights", "sizes from 1 to 8 GiB, weights from 0.5 to 4", mixed_weights),
    of("vfio-share", "a quarter of the guests has pinned RAM", |rng| {
        company(rng, (12, 2, 0.7), 17, 4, |_, g| g.misbehaviour = Misbehaviour::Pinned)
    }),
    of(
        "odd-company",
        "every third guest is slow, stuck, lying, silent, rebooting, migrating, pinned or flaky",
        |rng| company(rng, (15, 2, 0.7), 20, 3, |rng, g| g.misbehaviour = odd(rng)),
    ),
    of("tier-guest", "half of the guests have module and agent", |rng| {
        company(rng, (14, 2, 0.8), 15, 2, |_, g| g.agent = true)
    }),
    of(
        "no-balloon",
        "half of the guests have no balloon or a stuck one, and cold memory",
        no_balloon,
    ),
];

/// Worlds for what no rival does: the laws hold in them, and the comparison leaves them out.
pub const MECHANISMS: [Scenario; 3] = [
    of("alike", "guests with idle memory that is alike: Ebb steers KSM", alike),
    of("zeros", "guests without a balloon that zero what they free: Ebb frees zero pages", zeros),
    of("huge-pages", "overcommit-1.5 on huge pages: balloons leave some mapped in part", |rng| {
        let mut setup = overcommit(rng, 1.5);
        setup.guests.iter_mut().for_each(|g| g.huge = 0.5);
        setup
    }),
];

/// Of the comparison, or of [`MECHANISMS`].
pub fn scenario(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().chain(&MECHANISMS).find(|s| s.name == name)
}

fn setup(host: Bytes, run_ms: u64, guests: Vec<Spec>) -> Setup {
    let swap = host.share(0.5);
    Setup::of(host, swap, run_ms, guests)
}

/// What guests differ in whatever they do.
fn vary(rng: &mut fastrand::Rng, mut spec: Spec) -> Spec {
    spec.deflate_on_oom = rng.bool();
    spec.reporting = rng.bool();
    if rng.bool() {
        spec.swap = spec.ram.share(0.25);
    }
    spec
}

fn jitter(rng: &mut fastrand::Rng, size: Bytes) -> Bytes {
    size.share(0.9 + rng.f64() * 0.2)
}

/// One that works in phases, all from the seed.
fn phased(rng: &mut fastrand::Rng, ram: Bytes, most: f64) -> Spec {
    let mut need = Need::of(Curve::phases(rng, RUN_MS, ram.share(0.1), ram.share(most)));
    need.files = Curve::flat(ram.share(0.02 + rng.f64() * 0.06));
    need.stream = 2e6 + rng.f64() * 10e6;
    vary(rng, Spec::new(ram, need))
}

fn idle_giver(rng: &mut fastrand::Rng) -> Setup {
    let gib = Bytes::gib;
    let used = Curve::flat(jitter(rng, Bytes::mib(1500)));
    let mut idle = vary(rng, Spec::new(gib(16), Need::of(used)));
    idle.stale = gib(15);
    idle.reporting = false;
    let at = 120_000 + rng.u64(0..20_000);
    let low = jitter(rng, Bytes::mib(2500));
    let mut grow = Need::of(Curve::flat(low).plus(&Curve::burst(at, RUN_MS, gib(10))));
    grow.rate = 1.5e9;
    let steady = Need::of(Curve::flat(jitter(rng, Bytes::mib(8800))));
    let guests =
        vec![idle, vary(rng, Spec::new(gib(16), grow)), vary(rng, Spec::new(gib(10), steady))];
    let probes = vec![Probe { what: Measured::Take, vm: 0, bytes: gib(8), at_ms: at }];
    Setup { probes, ..setup(gib(32), 300_000, guests) }
}

/// Guest 0 is shrunk because guest 1 needs the host for a while, then bursts.
fn burst(rng: &mut fastrand::Rng, ends_ms: u64) -> Setup {
    let gib = Bytes::gib;
    let at = 230_000 + rng.u64(0..15_000);
    let low = jitter(rng, Bytes::mib(1500));
    let mut bursts = Need::of(Curve::flat(low).plus(&Curve::burst(at, 60_000, gib(4))));
    bursts.rate = 1e9;
    let mut first = vary(rng, Spec::new(gib(8), bursts));
    first.stale = gib(6);
    let busy =
        Curve::burst(60_000, ends_ms - 60_000, jitter(rng, gib(8))).plus(&Curve::flat(gib(1)));
    let mut second = vary(rng, Spec::new(gib(12), Need::of(busy)));
    second.reporting = true;
    let mut third = vary(rng, Spec::new(gib(4), Need::of(Curve::flat(gib(1)))));
    third.stale = gib(3);
    third.reporting = false;
    let probes = vec![Probe { what: Measured::Give, vm: 0, bytes: gib(4), at_ms: at }];
    Setup { probes, ..setup(gib(16), 360_000, vec![first, second, third]) }
}

/// The second guest's load ends for its programs only just before: its memory is
/// idle then, but the host has none until it is taken.
fn burst_squeeze(rng: &mut fastrand::Rng) -> Setup {
    let mut s = burst(rng, 225_000);
    s.guests[1].reporting = false;
    s
}

fn boot_storm(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let guests = (0..12).map(|_| {
        let starts = 20_000 + rng.u64(0..10_000);
        let (boot, work) = (jitter(rng, Bytes::mib(1000)), jitter(rng, Bytes::mib(450)));
        let boots = starts + rng.u64(15_000..30_000);
        let anon = Curve::new(vec![(0, boot), (boots, work)]).plus(&Curve::spikes(
            rng,
            RUN_MS,
            120_000,
            Bytes::mib(500),
        ));
        let mut need = Need::of(anon);
        need.stream = 20e6;
        Spec { starts_ms: starts, ..vary(rng, Spec::new(ram, need)) }
    });
    setup(Bytes::gib(16), 400_000, guests.collect())
}

fn page_cache(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(4);
    let guests = (0..8).map(|_| {
        let anon = Curve::phases(rng, RUN_MS, ram.share(0.08), ram.share(0.5));
        let mut need = Need::of(anon);
        need.files = Curve::flat(ram.share(0.1 + rng.f64() * 0.25));
        need.stream = 50e6;
        vary(rng, Spec::new(ram, need))
    });
    setup(Bytes::gib(20), RUN_MS, guests.collect())
}

fn leak(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(4);
    let rate = 10e6 + rng.f64() * 30e6;
    let leaks = Need::of(Curve::flat(Bytes::mib(400)).plus(&Curve::leak(
        RUN_MS,
        30_000,
        rate,
        Bytes::gib(3),
    )));
    let mut guests = vec![vary(rng, Spec::new(ram, leaks))];
    guests.extend((0..7).map(|_| phased(rng, ram, 0.7)));
    setup(Bytes::gib(18), RUN_MS, guests)
}

fn one_stuck(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(4);
    let mut idle = vary(rng, Spec::new(ram, Need::of(Curve::flat(Bytes::mib(400)))));
    idle.misbehaviour = Misbehaviour::Stuck;
    idle.stale = Bytes::mib(3300);
    idle.reporting = false;
    let mut guests = vec![idle];
    guests.extend((0..7).map(|_| phased(rng, ram, 0.7)));
    setup(Bytes::gib(20), RUN_MS, guests)
}

/// A host of `host_gib` GiB with `count` guests of `gib` GiB, which work in phases up to the share
/// `most` of their RAM; each guest whose number is a multiple of `every` gets `change`.
fn company(
    rng: &mut fastrand::Rng,
    (count, gib, most): (u32, u64, f64),
    host_gib: u64,
    every: usize,
    change: fn(&mut fastrand::Rng, &mut Spec),
) -> Setup {
    let mut guests: Vec<Spec> = (0..count).map(|_| phased(rng, Bytes::gib(gib), most)).collect();
    guests.iter_mut().step_by(every).for_each(|g| change(rng, g));
    setup(Bytes::gib(host_gib), RUN_MS, guests)
}

fn odd(rng: &mut fastrand::Rng) -> Misbehaviour {
    ODD[rng.usize(0..ODD.len())]
}

fn day_night(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(4);
    let n = 8;
    let period = 240_000;
    let guests = (0..n).map(|i| {
        let offset = period * i / n + rng.u64(0..10_000);
        let (low, high) = (jitter(rng, ram.share(0.12)), jitter(rng, ram.share(0.7)));
        let mut need = Need::of(Curve::wave(RUN_MS, period, offset, low, high));
        need.files = Curve::flat(ram.share(0.05));
        need.stream = 5e6;
        vary(rng, Spec::new(ram, need))
    });
    setup(Bytes::gib(19), RUN_MS, guests.collect())
}

fn overcommit(rng: &mut fastrand::Rng, times: f64) -> Setup {
    let ram = Bytes::gib(2);
    let guests: Vec<Spec> = (0..16).map(|_| phased(rng, ram, 0.8)).collect();
    let promised: Bytes = guests.iter().map(|g| g.ram).sum();
    setup(promised.share(1.0 / times), RUN_MS, guests)
}

fn spikes(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let guests = (0..12).map(|_| {
        let base = Curve::flat(jitter(rng, ram.share(0.25)));
        let anon = base.plus(&Curve::spikes(rng, RUN_MS, 60_000, ram.share(0.5)));
        vary(rng, Spec::new(ram, Need::of(anon)))
    });
    setup(Bytes::gib(15), RUN_MS, guests.collect())
}

fn churn(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let guests = (0..18).map(|_| {
        let starts = if rng.u32(0..3) == 0 { 0 } else { rng.u64(0..RUN_MS - 120_000) };
        let stops = starts + rng.u64(90_000..360_000);
        Spec { starts_ms: starts, stops_ms: stops, ..phased(rng, ram, 0.75) }
    });
    setup(Bytes::gib(10), RUN_MS, guests.collect())
}

fn mixed_weights(rng: &mut fastrand::Rng) -> Setup {
    let guests: Vec<Spec> = (0..12)
        .map(|_| {
            let ram = Bytes::gib([1, 2, 4, 8][rng.usize(0..4)]);
            let mut spec = phased(rng, ram, 0.6);
            spec.weight = [0.5, 1.0, 2.0, 4.0][rng.usize(0..4)];
            spec.stale = ram.share(0.5);
            spec
        })
        .collect();
    let promised: Bytes = guests.iter().map(|g| g.ram).sum();
    setup(promised.share(0.6), RUN_MS, guests)
}

fn no_balloon(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let mut guests: Vec<Spec> = (0..6).map(|_| phased(rng, ram, 0.7)).collect();
    for i in 0..6 {
        // Much of what it has it looks at no more, or has freed long ago.
        let mut need = Need::of(Curve::flat(jitter(rng, ram.share(0.35))));
        need.hot_share = 0.2 + rng.f64() * 0.3;
        let mut cold = vary(rng, Spec::new(ram, need));
        (cold.stale, cold.reporting) = (ram.share(0.3 + rng.f64() * 0.3), false);
        cold.misbehaviour = if i % 3 == 2 { Misbehaviour::Stuck } else { Misbehaviour::Bare };
        guests.push(cold);
    }
    setup(Bytes::gib(12), RUN_MS, guests)
}

fn alike(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let guests = (0..8).map(|_| {
        let base = Curve::flat(jitter(rng, ram.share(0.5)));
        let mut need = Need::of(base.plus(&Curve::spikes(rng, RUN_MS, 120_000, ram.share(0.2))));
        need.hot_share = 0.3;
        let mut spec = vary(rng, Spec::new(ram, need));
        (spec.alike, spec.rewrites) = (ram.share(0.25), rng.f64() * 3e5);
        spec
    });
    Setup { merge: true, ..setup(Bytes::gib(9), RUN_MS, guests.collect()) }
}

fn zeros(rng: &mut fastrand::Rng) -> Setup {
    let ram = Bytes::gib(2);
    let guests = (0..8).map(|i| {
        let mut spec = phased(rng, ram, 0.6);
        (spec.zeros, spec.stale, spec.reporting) = (0.9, ram.share(0.6), false);
        if i % 2 == 0 {
            spec.misbehaviour = Misbehaviour::Bare;
        }
        spec
    });
    Setup { zeros: true, ..setup(Bytes::gib(10), RUN_MS, guests.collect()) }
}

/// Many guests of one size, for scale: one in `odd_one_in` is not ideal (0: all are).
/// No more RAM is pinned than a host would start.
pub fn crowd(vms: u32, ram: Bytes, host: Bytes, seed: u64, odd_one_in: u32) -> Setup {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut pinned = Bytes::ZERO;
    let guests = (0..vms).map(|_| {
        let mut spec = phased(&mut rng, ram, 0.9);
        if odd_one_in > 0 && rng.u32(0..odd_one_in) == 0 {
            spec.misbehaviour = odd(&mut rng);
        }
        if spec.misbehaviour == Misbehaviour::Pinned {
            pinned += ram;
            if pinned > host.share(PINNED_MOST) {
                spec.misbehaviour = Misbehaviour::Ideal;
            }
        }
        spec
    });
    Setup { seed, ..setup(host, RUN_MS, guests.collect()) }
}

/// What of a host's memory guests in a crowd may pin.
const PINNED_MOST: f64 = 0.4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_world_and_another_another() {
        for s in &SCENARIOS {
            let text = |seed| format!("{:?}", s.setup(seed));
            assert_eq!(text(3), text(3), "{}", s.name);
            assert_ne!(text(3), text(4), "{}", s.name);
        }
    }

    #[test]
    fn every_host_is_promised_away_and_can_hold_what_is_needed() {
        for s in &SCENARIOS {
            let setup = s.setup(1);
            let promised: Bytes = setup.guests.iter().map(|g| g.ram).sum();
            assert!(promised > setup.host, "{}: {promised}", s.name);
            for ms in (0..setup.run_ms).step_by(1000) {
                let need = |g: &Spec| match g.misbehaviour {
                    Misbehaviour::Pinned => g.ram,
                    _ => g.need.sum_at(ms),
                };
                let need: Bytes = setup.guests.iter().map(need).sum();
                assert!(need <= setup.host.share(NEED_MOST + 0.001), "{} at {ms}", s.name);
            }
        }
    }
}
