//! Merging, zero pages and partially mapped huge pages in Ebb's own loop.

use ebb_core::tick::{Engine, Host};
use ebb_core::units::Bytes;
use ebb_sim::guest::Guest;
use ebb_sim::scenario::{MECHANISMS, scenario};
use ebb_sim::{Controller, Setup, World};

/// Some ten seconds.
const LAST_LOOKS: usize = 100;
const SEEDS: std::ops::Range<u64> = 0..3;

/// What became of a run, and what all balloons have taken.
fn ran(setup: &Setup) -> (World, Bytes) {
    ran_seen(setup, |_| ())
}

/// The same, and shows the world after each tick.
fn ran_seen(setup: &Setup, mut see: impl FnMut(&World)) -> (World, Bytes) {
    let mut world = World::new(setup);
    let mut engine = Engine::new(setup.config(), false);
    loop {
        let (_, model) = engine.step(&mut world);
        see(&world);
        if !world.wait(&engine.next(&model)) {
            let taken = engine.memory.vms.iter().map(|m| m.inflated).sum();
            return (world, taken);
        }
    }
}

fn setups(name: &str) -> impl Iterator<Item = Setup> {
    let scenario = scenario(name).unwrap();
    SEEDS.map(|seed| scenario.setup(seed))
}

#[test]
fn the_laws_hold_and_memory_is_neither_made_nor_lost() {
    for s in &MECHANISMS {
        for setup in SEEDS.map(|seed| s.setup(seed)) {
            let mut unsound = Ok(());
            let result = Controller::Ebb.run_seen(&setup, &mut |world| {
                if unsound.is_ok() {
                    unsound = world.sound();
                }
            });
            assert_eq!(unsound, Ok(()), "{} {}", s.name, setup.seed);
            assert!(result.broken.is_empty(), "{} {}: {}", s.name, setup.seed, result.broken[0]);
        }
    }
}

/// The same world in which Ebb has none of these.
fn without(setup: &Setup) -> Setup {
    let mut setup = Setup { merge: false, zeros: false, ..setup.clone() };
    setup.guests.iter_mut().for_each(|g| g.huge = 0.0);
    setup
}

fn sum(world: &World, of: impl Fn(&Guest) -> Bytes) -> Bytes {
    world.guests.iter().map(of).sum()
}

#[test]
fn what_is_alike_is_merged_and_harms_no_guest() {
    for mut setup in setups("alike") {
        // The first scan comes after nine minutes.
        setup.run_ms += 300_000;
        let (mut merged, seed) = (Bytes::ZERO, setup.seed);
        let mut see = |world: &World| merged = merged.max(sum(world, |g| g.merged));
        let with = Controller::Ebb.run_seen(&setup, &mut see).score;
        let bare = ran(&without(&setup)).0.score();
        assert!(merged > Bytes::gib(1), "{seed}: {merged}");
        assert_eq!((with.held, with.ooms), (with.vms, 0), "{seed}");
        // A second of eight guests in a quarter of an hour.
        assert!(with.stall_s < bare.stall_s + 1.0, "{seed}: {} {}", with.stall_s, bare.stall_s);
    }
}

#[test]
fn guests_that_write_their_merged_pages_are_taken_out_of_ksm() {
    for mut setup in setups("alike") {
        setup.guests.iter_mut().for_each(|g| g.rewrites = 20e6);
        let world = ran(&setup).0;
        let open = world.guests.iter().filter(|g| g.open).count();
        assert!(open <= 2, "{}: {open} of {}", setup.seed, world.guests.len());
        assert_eq!(world.score().ooms, 0);
    }
}

#[test]
fn zero_pages_are_freed_before_anything_is_swapped_out_for_them() {
    let (mut swapped, mut stall_s) = ([Bytes::ZERO; 2], [0.0; 2]);
    for setup in setups("zeros") {
        let (with, bare) = (ran(&setup).0, ran(&without(&setup)).0);
        let freed = sum(&with, |g| g.tasks.zeros.as_ref().map_or(Bytes::ZERO, |z| z.freed));
        assert!(freed > Bytes::gib(1), "{}: {freed}", setup.seed);
        for (i, score) in [with.score(), bare.score()].into_iter().enumerate() {
            (swapped[i], stall_s[i]) = (swapped[i] + score.swapped, stall_s[i] + score.stall_s);
        }
    }
    assert!(swapped[0] < swapped[1] && stall_s[0] < stall_s[1], "{swapped:?} {stall_s:?}");
}

/// What a balloon took of huge pages the host has only when they are split. It is not taken again
/// meanwhile.
#[test]
fn what_comes_when_huge_pages_are_split_is_not_taken_twice() {
    for setup in setups("huge-pages") {
        let mut partial = Vec::new();
        let (with, taken) = ran_seen(&setup, |world| partial.push(sum(world, |g| g.partial)));
        let bare = ran(&without(&setup)).1;
        let split = sum(&with, |g| g.tasks.partial_thp.as_ref().map_or(Bytes::ZERO, |p| p.freed));
        // Balloons go on to take some.
        let left = partial.iter().rev().take(LAST_LOOKS).min().copied().unwrap();
        assert!(split > Bytes::gib(8) && left < Bytes::mib(256), "{split} {left}");
        assert!(taken < bare.share(1.1), "{}: {taken}, {bare} without them", setup.seed);
        assert_eq!(with.score().ooms, 0);
    }
}
