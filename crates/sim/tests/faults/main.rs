//! Each safety feature switched off breaks its law: what no test notices is not
//! there. With all of them on, the same worlds break none.

mod fault;

use ebb_core::units::Bytes;
use ebb_sim::law::Law;
use ebb_sim::misbehaviour::Misbehaviour;
use ebb_sim::scenario::{crowd, scenario};
use ebb_sim::{SCENARIOS, Setup};

use fault::{FAULTS, Fault, run};

/// The law that holds only with the feature, and worlds that ask for it.
fn trial(fault: Fault) -> (Law, Vec<Setup>) {
    let named = |name: &str| (0..3).map(|seed| scenario(name).unwrap().setup(seed)).collect();
    match fault {
        Fault::Floors => (Law::Floor, named("overcommit-2.0")),
        Fault::WriteDown => (Law::WrittenDown, named("spikes")),
        Fault::MustNotBeOrdered => (Law::MustNotBeOrdered, all_are(Misbehaviour::Flaky)),
        Fault::OldNumbers => (Law::OldNumbers, all_are(Misbehaviour::Silent)),
        Fault::Withdrawal => (Law::Stuck, named("one-stuck")),
        Fault::Reboots => (Law::Reboot, all_are(Misbehaviour::Rebooting)),
        Fault::Distress => (Law::Relief, named("leak")),
        Fault::Holds => (Law::Turned, named("churn")),
        Fault::Headroom => (Law::FreeBeforeGrant, named("overcommit-2.0")),
        Fault::Contact => (Law::Contact, all_are(Misbehaviour::Flaky)),
        Fault::Need => (Law::InUse, named("overcommit-2.0")),
    }
}

/// A tight host where every second guest has this misbehaviour.
fn all_are(misbehaviour: Misbehaviour) -> Vec<Setup> {
    let world = |seed| {
        let mut setup = crowd(12, Bytes::gib(2), Bytes::gib(12), seed, 0);
        setup.guests.iter_mut().step_by(2).for_each(|g| g.misbehaviour = misbehaviour);
        Setup { run_ms: 400_000, ..setup }
    };
    (0..3).map(world).collect()
}

#[test]
fn every_safety_feature_that_is_switched_off_breaks_its_law() {
    for fault in FAULTS {
        let (law, worlds) = trial(fault);
        let off: Vec<Law> =
            worlds.iter().flat_map(|w| run(w, Some(fault)).broken).map(|b| b.law).collect();
        assert!(off.contains(&law), "{fault:?} off, and {law:?} still holds");
    }
}

/// The scenarios among them, with the same seeds, are in comparison.rs.
#[test]
fn with_all_safety_features_on_the_same_worlds_keep_every_law() {
    for all in [Misbehaviour::Flaky, Misbehaviour::Silent, Misbehaviour::Rebooting] {
        for world in all_are(all) {
            let broken = run(&world, None).broken;
            assert!(broken.is_empty(), "{all:?}: {}", broken[0]);
        }
    }
}

/// Harm is the measure that needs no law: without it features could only be for show.
#[test]
fn without_distress_or_need_guests_come_to_harm() {
    let setup = scenario("day-night").unwrap().setup(1);
    let stall = |fault| run(&setup, fault).world.score().stall_s;
    let whole = stall(None);
    for fault in [Fault::Distress, Fault::Need] {
        let without = stall(Some(fault));
        assert!(without > whole * 10.0 + 10.0, "{fault:?} off: {without} s, on: {whole} s");
    }
}

#[test]
fn there_is_a_scenario_for_every_mood_in_the_catalogue() {
    let mut seen: Vec<Misbehaviour> = Vec::new();
    for s in &SCENARIOS {
        seen.extend((0..20).flat_map(|seed| s.setup(seed).guests).map(|g| g.misbehaviour));
    }
    for misbehaviour in ebb_sim::misbehaviour::ODD {
        assert!(seen.contains(&misbehaviour), "{misbehaviour:?}");
    }
}
