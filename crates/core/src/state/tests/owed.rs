//! What VMs are owed, through plugged memory, renames, clocks that jump, ends, and a daemon that
//! takes over.

use super::*;
use crate::config::Metadata;

/// What a daemon has that starts then: what was written down, and nothing else.
fn next_daemon(memory: &Memory, model: &Model) -> Memory {
    let mut next = Memory::default();
    next.adopt(&owned(memory, model));
    next
}

fn owned(memory: &Memory, model: &Model) -> Owned {
    memory.owned(model, &Plan::default(), &[])
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
            model = look(&mut memory, 1_000 * (i as u64 + 1), its);
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
        let model = look(&mut memory, at, its);
        let known: Vec<_> = memory.notes(&owned(&memory, &model).vms);
        let expected = if actual == 900 { vec![(memory.vms[0].id, noted)] } else { Vec::new() };
        assert_eq!(known, expected, "nothing is noted with a VM before its balloon is known");
    }
    assert_eq!(memory.owed_ids().len(), 1);
}

#[test]
fn a_renamed_vm_is_the_same_with_other_settings() {
    let config = Config::parse("f", "[vm.b]\nmin = \"512MiB\"\n").unwrap();
    let mut memory = taken(900);
    let renamed = sample(2_000, vec![VmSample { name: "b".into(), ..vm(900, 500, 900) }]);
    memory.observe(&renamed);
    let model = Model::new(&config, &renamed, &memory);
    assert_eq!(only(&model).floor, Bytes::mib(512));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024), "what is owed is remembered");
    assert_eq!(memory.vms[0].name, "b");
}

#[test]
fn a_vm_that_vanished_is_forgotten_and_a_new_one_with_its_pid_is_new() {
    let mut memory = taken(900);
    let (id, ram) = (VmId { start: 10, ..ID }, Some(Bytes::mib(2048)));
    let other = VmSample { id, ram, ..vm(2048, 600, 900) };
    let model = look(&mut memory, 1_500, other.clone());
    assert_eq!((memory.vms.len(), memory.owed_ids()), (2, vec![ID]), "not seen is not gone");
    assert_eq!(owned(&memory, &model).vms[0].name, "a");
    assert!(model.host.warnings[0].contains("a (process 7) is owed memory"), "{model:?}");
    let model = tick(&mut memory, &Sample { ended: vec![ID], ..sample(2_000, vec![other]) });
    assert_eq!(memory.vms.len(), 1);
    assert!(memory.vms[0].order.is_none());
    assert_eq!(only(&model).ceiling, Bytes::mib(2048));
}

/// The next version may read nothing of it where this one wrote something.
#[test]
fn what_a_hand_over_does_not_tell_the_state_file_does() {
    let (others, ordered) = (Some(Bytes::ZERO), Some(Bytes::mib(124)));
    let owed = OwnedVm { id: ID, others, ordered, ..OwnedVm::default() };
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
    look(&mut memory, 1_000, vm(900, 500, 800));
    memory.adopt(&owned);
    assert_eq!(memory.owed_ids(), []);
}

#[test]
fn a_vm_that_is_owed_and_says_nothing_to_the_next_daemon_is_silent_once_it_is_reached() {
    let mut memory = Memory::default();
    let owed = OwnedVm { id: ID, ordered: Some(Bytes::mib(124)), ..OwnedVm::default() };
    memory.adopt(&Owned { vms: vec![owed], ..Owned::default() });
    let mut its = vm(900, 0, 800);
    its.balloon.as_mut().unwrap().guest = None;
    let mut unseen = |seconds: std::ops::Range<u64>, link: Link| {
        let its = VmSample { link, ..its.clone() };
        let model = seconds.map(|s| look(&mut memory, s * 1_000, its.clone())).last().unwrap();
        only(&model).unseen.clone()
    };
    assert_eq!(unseen(1..20, Link::Down("not there yet".into())), "");
    assert!(unseen(20..30, Link::Up).contains("silent"));
}

/// What is owed is a process's, not a name's.
#[test]
fn two_vms_of_one_name_are_owed_apart() {
    let mut memory = Memory::default();
    let duplicate = || VmSample { id: VmId { pid: 8, ..ID }, ..vm(1024, 600, 900) };
    let both = |size| sample(1_000, vec![vm(size, 600, 900), duplicate()]);
    act(&mut memory, &both(1024), Some((900, short())));
    let model = tick(&mut memory, &both(900));
    let ids: Vec<_> = owned(&memory, &model).vms.iter().map(|v| v.id).collect();
    assert_eq!(ids, [ID]);
    let left = Sample { ended: vec![ID], ..sample(2_000, vec![duplicate()]) };
    assert_eq!(tick(&mut memory, &left).vms[0].owed, Bytes::ZERO);
}

/// Returns go out before the disk is written: what is written then tells of them.
#[test]
fn what_was_given_is_written_down_in_the_same_tick() {
    let mut memory = taken(900);
    let model = look(&mut memory, 2_000, vm(950, 600, 900));
    let reason = Reason::GuestShort { signs: String::new() };
    let plan = Plan { actions: vec![action(only(&model), 1000, reason)], ..Plan::default() };
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
    let its = |size| VmSample { through_libvirt: true, ..vm(size, 800, 900) };
    take(&mut memory, 1_000, its(1024), 700);
    let after = with_left(Bytes::mib(600), sample(2_000, vec![its(700)]));
    memory.observe(&after);
    let orders = |config: &str| {
        let config = Config::parse("f", config).unwrap();
        let model = Model::new(&config, &after, &memory);
        let plan = plan(&memory, &model);
        let sizes = plan.actions.iter().map(|a| a.to.0 >> 20).collect::<Vec<_>>();
        (sizes, only(&model).standing.why().to_owned())
    };
    assert!(orders("").0.iter().all(|to| *to < 1024), "{:?}", orders(""));
    let (sizes, why) = orders("[host]\nlibvirt = false\n");
    assert_eq!((sizes, &*why), (vec![1023], "host.libvirt = false in the configuration"));
}

/// A guest that sleeps, or whose driver is unloaded, for ten minutes: the driver has deflated
/// the balloon, and follows QEMU's last target when it starts again.
#[test]
fn a_driver_that_was_gone_for_long_leaves_the_debt() {
    for (run, daemons) in [(RunState::Paused, 1), (RunState::Running, 1), (RunState::Paused, 2)] {
        let mut memory = Memory::default();
        let its = |actual, silent_s: u64, run: &RunState| {
            let mut vm = aged(actual, 500, 900, silent_s * 1000);
            vm.balloon.as_mut().unwrap().deflate_on_oom = Some(false);
            VmSample { run: Some(run.clone()), ..vm }
        };
        let awake = RunState::Running;
        take(&mut memory, 1_000, its(1024, 0, &awake), 600);
        look(&mut memory, 2_000, its(600, 0, &awake));
        let mut model = Model::default();
        for s in 3..600 {
            model = look(&mut memory, s * 1000, its(1024, s - 2, &run));
        }
        // An Ebb that stops now takes its order back.
        assert!(owned(&memory, &model).vms.iter().any(OwnedVm::is_ordered), "{run:?}");
        if daemons == 2 {
            memory = next_daemon(&memory, &model);
        }
        for (s, actual) in [(600, 1024), (601, 800), (602, 700), (603, 600), (604, 600)] {
            model = look(&mut memory, s * 1000, its(actual, 0, &awake));
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
        model = look(&mut memory, s * 1000, its);
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
        model = look(&mut memory, s * 1000, its);
    }
    assert_eq!(only(&model).owed, Bytes::ZERO);
    assert!(is_left_alone(&memory, 19_000));
}

/// A daemon was killed, its VM given all its memory before the next one started.
#[test]
fn a_size_that_is_lowered_after_a_vm_was_found_whole_is_the_operators() {
    let owed = |moves: &[(u64, u64)]| {
        let mut memory = taken(600);
        let mut model = look(&mut memory, 2_000, vm(600, 200, 500));
        let mut memory = next_daemon(&memory, &model);
        for s in 3..60 {
            let size = moves.iter().rev().find(|(from, _)| *from <= s).map_or(1024, |(_, to)| *to);
            model = look(&mut memory, s * 1000, vm(size, size - 400, 500));
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
        let seen = with_left(Bytes::mib(300), sample(s * 1000, vec![its]));
        decides(&mut memory, &seen, |memory, model, plan| {
            if let Some(a) = plan.actions.iter().find(|a| a.to < a.from) {
                (actual, took) = (a.to.0 >> 20, true);
                let written = memory.owned(model, plan, &[]);
                assert!(written.vms.iter().any(|o| o.id == ID), "{s}: {a:?}");
            }
            carried_out(plan)
        });
    }
    assert!(!took || !memory.owed_ids().is_empty());
}
