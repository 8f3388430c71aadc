//! What VMs are owed, through plugged memory, renames, clocks that jump, ends, and a daemon that
//! takes over.

use super::*;
use crate::config::Metadata;

#[test]
fn plugged_memory_moves_what_is_owed() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let plugged = VmSample { ram: Some(Bytes::mib(2048)), ..vm(2048, 1600, 900) };
    let model = tick(&mut memory, &sample(2_000, vec![plugged]));
    assert_eq!(only(&model).ceiling, Bytes::mib(2048));
    let model = tick(&mut memory, &sample(3_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024), "and out again");
}

#[test]
fn what_an_ebb_noted_that_had_the_vm_before_is_owed_once_the_metadata_is_read() {
    let of = |read: &[Option<Option<u64>>]| {
        let mut memory = Memory::default();
        let mut model = Model::default();
        for (i, noted) in read.iter().enumerate() {
            let metadata = match noted {
                None => Metadata::Unread("libvirt has not answered yet".into()),
                Some(_) => Metadata::None,
            };
            let noted = noted.flatten().map(Bytes::mib);
            let its = VmSample { metadata, noted, ..vm(900, 500, 900) };
            model = tick(&mut memory, &sample(1_000 * (i as u64 + 1), vec![its]));
        }
        (only(&model).owed.0 >> 20, memory.owed_ids().len())
    };
    assert_eq!(of(&[None]), (0, 0));
    assert_eq!(of(&[None, Some(Some(0)), Some(Some(0))]), (124, 1));
    assert_eq!(of(&[Some(Some(100))]), (24, 1), "100 MiB are the operator's");
    assert_eq!(of(&[Some(Some(500))]), (0, 0));
    assert_eq!(of(&[None, Some(None)]), (0, 0), "its size is the operator's");
    assert_eq!(of(&[Some(None), Some(Some(0))]), (0, 0), "and stays that");
    // A QEMU that has not taken up the state yet tells the full size.
    let mut memory = Memory::default();
    let noted = Some(Bytes::ZERO);
    for (at, actual, run) in [
        (1_000, 1024, RunState::Migrating),
        (2_000, 900, RunState::Running),
        (3_000, 900, RunState::Running),
    ] {
        let its = VmSample { noted, run: Some(run), ..vm(actual, 500, 900) };
        let model = tick(&mut memory, &sample(at, vec![its]));
        let known: Vec<_> = memory.notes(&memory.owned(&model, &Plan::default(), &[]).vms);
        let expected = if actual == 900 { vec![(memory.vms[0].id, noted)] } else { Vec::new() };
        assert_eq!(known, expected, "nothing is noted with a VM before its balloon is known");
    }
    assert_eq!(memory.owed_ids().len(), 1);
}

#[test]
fn a_renamed_vm_is_the_same_with_other_settings() {
    let config = Config::parse("f", "[vm.b]\nmin = \"512MiB\"\n").unwrap();
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let renamed = sample(2_000, vec![VmSample { name: "b".into(), ..vm(900, 500, 900) }]);
    memory.observe(&renamed);
    let model = Model::new(&config, &renamed, &memory);
    assert_eq!(only(&model).floor, Bytes::mib(512));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024), "what is owed is remembered");
    assert_eq!(memory.vms[0].name, "b");
}

#[test]
fn a_clock_that_goes_back_forgets_moments_and_keeps_debts() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(900_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    memory.vms[0].stuck_until = Some(Stamp(990_000));
    memory.vms[0].socket = Some("/run/a".into());
    let paged_out = OffloadSample { paged_out: Bytes::mib(70), ..OffloadSample::default() };
    let tasks = Tasks { offload: Some(paged_out), ..Tasks::default() };
    let paged = VmSample { tasks, ..vm(900, 500, 800) };
    tick(&mut memory, &sample(901_000, vec![paged.clone()]));
    let model = tick(&mut memory, &sample(5_000, vec![paged]));
    let came = memory.stages.iter().find(|t| t.name == StageName::Offload).unwrap().came;
    assert_eq!(came, Bytes::mib(70), "a counter that goes on is counted once");
    assert_eq!(memory.vms[0].socket.as_deref(), Some("/run/a"), "`ebb release` may need it");
    assert_eq!(only(&model).standing, Standing::Ready);
    assert_eq!(only(&model).ceiling, Bytes::mib(1024));
    let owned = memory.owned(&model, &Plan::default(), &[]);
    assert_eq!(owned.vms[0].whole(Bytes::mib(1024)), Bytes::mib(1024));
    // And one that leaps ahead neither takes nor forgets.
    let model = tick(&mut memory, &sample(9_000_000, vec![vm(900, 500, 800)]));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024));
}

#[test]
fn a_vm_that_vanished_is_forgotten_and_a_new_one_with_its_pid_is_new() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let other = VmSample { id: VmId { start: 10, ..ID }, ..vm(2048, 600, 900) };
    let other = VmSample { ram: Some(Bytes::mib(2048)), ..other };
    let unproven = sample(1_500, vec![other.clone()]);
    let model = tick(&mut memory, &unproven);
    assert_eq!((memory.vms.len(), memory.owed_ids()), (2, vec![ID]), "not seen is not gone");
    assert_eq!(memory.owned(&model, &Plan::default(), &[]).vms[0].name, "a");
    assert!(model.host.warnings[0].contains("a (process 7) is owed memory"), "{model:?}");
    let model = tick(&mut memory, &Sample { ended: vec![ID], ..sample(2_000, vec![other]) });
    assert_eq!(memory.vms.len(), 1);
    assert!(memory.vms[0].order.is_none());
    assert_eq!(only(&model).ceiling, Bytes::mib(2048));
}

/// The next version may read nothing of it where this one wrote something.
#[test]
fn what_a_hand_over_does_not_tell_the_state_file_does() {
    let owed = OwnedVm { id: ID, others: Some(Bytes::ZERO), ..OwnedVm::default() };
    let owed = OwnedVm { ordered: Some(Bytes::mib(124)), ..owed };
    let owned = Owned { vms: vec![owed], ..Owned::default() };
    let known = VmMemory { id: ID, name: "a".into(), ..VmMemory::default() };
    for vms in [vec![], vec![known]] {
        let memory = Memory { vms, ..Memory::default() };
        let mut engine = crate::tick::Engine::new(Config::default(), false);
        engine.adopt(owned.clone(), Some(memory));
        assert_eq!(engine.memory.owed_ids(), [ID]);
    }
    // What it tells counts more.
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(900, 500, 800)]));
    memory.adopt(&owned);
    assert_eq!(memory.owed_ids(), []);
}

/// What is owed is a process's, not a name's.
#[test]
fn two_vms_of_one_name_are_owed_apart() {
    let mut memory = Memory::default();
    let duplicate = VmId { pid: 8, ..ID };
    let both = |size| {
        sample(1_000, vec![vm(size, 600, 900), VmSample { id: duplicate, ..vm(1024, 600, 900) }])
    };
    act(&mut memory, &both(1024), Some((1024, 900, short(Pressure::Hard))));
    let model = tick(&mut memory, &both(900));
    let owned = memory.owned(&model, &Plan::default(), &[]);
    assert_eq!(owned.vms.iter().map(|v| v.id).collect::<Vec<_>>(), [ID]);
    let left = Sample {
        ended: vec![ID],
        ..sample(2_000, vec![VmSample { id: duplicate, ..vm(1024, 600, 900) }])
    };
    assert_eq!(tick(&mut memory, &left).vms[0].owed, Bytes::ZERO);
}

/// Returns go out before the disk is written: what is written then tells of them.
#[test]
fn what_was_given_is_written_down_in_the_same_tick() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(2_000, vec![vm(950, 600, 900)]));
    let reason = Reason::GuestShort { signs: String::new() };
    let (from, to) = (Bytes::mib(950), Bytes::mib(1000));
    let plan = Plan {
        actions: vec![Action { vm: ID, name: "a".into(), from, to, reason }],
        ..Plan::default()
    };
    let written = |error: Option<&str>, unanswered| {
        let error = error.map(Into::into);
        let outcome = Outcome { vm: ID, error, unanswered, ..Outcome::default() };
        let vm = memory.owned(&model, &plan, &[outcome]).vms.remove(0);
        (vm.ordered.map(|b| b.0 >> 20), vm.most.map(|b| b.0 >> 20), vm.unsure)
    };
    assert_eq!(written(None, false), (Some(24), Some(124), false));
    assert_eq!(written(Some("late"), true), (Some(24), Some(124), true));
    assert_eq!(written(Some("no"), false), (Some(124), Some(124), false));
}

/// `host.libvirt = false` and a reload.
#[test]
fn a_vm_that_libvirt_is_not_to_be_asked_for_any_more_is_given_back_and_asked_for_nothing() {
    let mut memory = Memory::default();
    let seen = |at| {
        let vm = VmSample { through_libvirt: true, ..vm(1024, 800, 900) };
        sample(at, vec![vm])
    };
    act(&mut memory, &seen(1_000), Some((1024, 700, short(Pressure::Hard))));
    let mut after = seen(2_000);
    after.vms[0].balloon.as_mut().unwrap().actual = Bytes::mib(700);
    after.host.memory.as_mut().unwrap().available = Bytes::mib(600);
    memory.observe(&after);
    let orders = |config: &str| {
        let config = Config::parse("f", config).unwrap();
        let model = Model::new(&config, &after, &memory);
        let plan = crate::policy::decide(&model, &memory, &[]).plan;
        let sizes = plan.actions.iter().map(|a| a.to.0 >> 20).collect::<Vec<_>>();
        (sizes, only(&model).standing.why().to_owned())
    };
    assert!(orders("").0.iter().all(|to| *to < 1024), "{:?}", orders(""));
    let (sizes, why) = orders("[host]\nlibvirt = false\n");
    assert_eq!((sizes, &*why), (vec![1024], "host.libvirt = false in the configuration"));
}

/// A guest that sleeps, or whose driver is unloaded, for ten minutes: the driver has deflated
/// the balloon, and follows QEMU's last target when it starts again.
#[test]
fn a_driver_that_was_gone_for_long_leaves_the_debt() {
    for (run, daemons) in [(RunState::Paused, 1), (RunState::Running, 1), (RunState::Paused, 2)] {
        let mut memory = Memory::default();
        let its = |actual, silent_s: u64, run: &RunState| {
            let mut vm = VmSample { run: Some(run.clone()), ..vm(actual, 500, 900) };
            let balloon = vm.balloon.as_mut().unwrap();
            balloon.deflate_on_oom = Some(false);
            balloon.guest.as_mut().unwrap().age_ms = silent_s * 1000;
            vm
        };
        let awake = RunState::Running;
        let take = Some((1024, 600, short(Pressure::Hard)));
        act(&mut memory, &sample(1_000, vec![its(1024, 0, &awake)]), take);
        tick(&mut memory, &sample(2_000, vec![its(600, 0, &awake)]));
        let mut model = Model::default();
        for s in 3..600 {
            model = tick(&mut memory, &sample(s * 1000, vec![its(1024, s - 2, &run)]));
        }
        // An Ebb that stops now takes its order back.
        let owned = memory.owned(&model, &Plan::default(), &[]);
        assert!(owned.vms.iter().any(OwnedVm::is_ordered), "{run:?}");
        if daemons == 2 {
            memory = Memory::default();
            memory.adopt(&owned);
        }
        for (s, actual) in [(600, 1024), (601, 800), (602, 700), (603, 600), (604, 600)] {
            model = tick(&mut memory, &sample(s * 1000, vec![its(actual, 0, &awake)]));
        }
        assert_eq!(only(&model).owed, Bytes::mib(424), "{run:?} {daemons}");
    }
}

/// It was saved while its balloon grew, is restored paused, and goes on a minute later.
#[test]
fn a_balloon_that_still_grows_when_its_vm_goes_on_leaves_the_debt() {
    let mut memory = Memory::default();
    let mut model = Model::default();
    for (s, actual) in (1..60).map(|s| (s, 900)).chain([(60, 900), (61, 700), (62, 600)]) {
        let run = Some(if s < 60 { RunState::Paused } else { RunState::Running });
        let its = VmSample { run, noted: Some(Bytes::ZERO), ..vm(actual, 500, 900) };
        model = tick(&mut memory, &sample(s * 1000, vec![its]));
    }
    assert_eq!(only(&model).owed, Bytes::mib(424));
}

/// A VM was restored; long after that QEMU is slow for a second, and an operator lowers its size.
#[test]
fn a_size_that_is_set_long_after_a_vm_arrived_is_the_operators() {
    let mut memory = Memory::default();
    let mut model = Model::default();
    for s in 1..20 {
        let actual = if s < 17 { 1024 } else { 700 };
        let link = if s == 16 { Link::Slow("silent".into()) } else { Link::Up };
        let its = VmSample { link, noted: Some(Bytes::ZERO), ..vm(actual, 500, 900) };
        model = tick(&mut memory, &sample(s * 1000, vec![its]));
    }
    assert_eq!(only(&model).owed, Bytes::ZERO);
    assert!(memory.vms[0].ledger.left_ms(Stamp(19_000)).is_some());
}

/// A daemon was killed, its VM given all its memory before the next one started.
#[test]
fn a_size_that_is_lowered_after_a_vm_was_found_whole_is_the_operators() {
    let owed = |moves: &[(u64, u64)]| {
        let mut memory = Memory::default();
        let all = sample(1_000, vec![vm(1024, 600, 900)]);
        act(&mut memory, &all, Some((1024, 600, short(Pressure::Hard))));
        let mut model = tick(&mut memory, &sample(2_000, vec![vm(600, 200, 500)]));
        let owned = memory.owned(&model, &Plan::default(), &[]);
        let mut memory = Memory::default();
        memory.adopt(&owned);
        for s in 3..60 {
            let size = moves.iter().rev().find(|(from, _)| *from <= s).map_or(1024, |(_, to)| *to);
            model = tick(&mut memory, &sample(s * 1000, vec![vm(size, size - 400, 500)]));
        }
        only(&model).owed.0 >> 20
    };
    assert_eq!(owed(&[(20, 800)]), 0, "an operator lowered it");
    assert_eq!(owed(&[(4, 800), (5, 600)]), 424, "the order was under way");
    assert_eq!(owed(&[(20, 800), (22, 600)]), 424, "its driver started late");
}

/// QEMU has not answered how much RAM it has, or is too old to tell.
#[test]
fn nothing_is_taken_that_cannot_be_written_down() {
    let mut memory = Memory::default();
    let (mut actual, mut took) = (1024, false);
    for s in 1..30 {
        let its = VmSample { ram: None, ..vm(actual, actual - 300, actual) };
        let mut seen = sample(s * 1000, vec![its]);
        seen.host.memory.as_mut().unwrap().available = Bytes::mib(300);
        memory.observe(&seen);
        let model = Model::new(&Config::default(), &seen, &memory);
        let decided = crate::policy::decide(&model, &memory, &[]);
        let written = memory.owned(&model, &decided.plan, &[]);
        if let Some(a) = decided.plan.actions.iter().find(|a| a.to < a.from) {
            (actual, took) = (a.to.0 >> 20, true);
            assert!(written.vms.iter().any(|o| o.id == ID), "{s}: {a:?}");
        }
        memory.learn(&model, &decided, &carried_out(&decided.plan), true);
    }
    assert!(!took || !memory.owed_ids().is_empty());
}
