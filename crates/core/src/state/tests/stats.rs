//! The guest's word over several ticks: contradictions, speed, and what a moving balloon does
//! to it.

use super::*;

#[test]
fn who_contradicts_what_is_known_is_not_asked_and_forgiven_later() {
    let mut memory = Memory::default();
    let level = |m: &Model| only(m).trust.level;
    let model = look(&mut memory, 1_000, vm(1024, 1024, 900));
    assert_eq!(level(&model), 0.5, "gently");
    let model = look(&mut memory, 2_000, vm(1024, 1024, 900));
    assert_eq!(level(&model), 0.0);
    assert_eq!(only(&model).convergence.state, Progress::Lying);
    let Standing::GiveOnly(why) = &only(&model).standing else { panic!("{model:?}") };
    assert!(why.contains("not believed: it claims 1 GiB available of 1 GiB"), "{why}");
    for (at, honest) in [(5_000, 0.0), (12_000, 1.0)] {
        assert_eq!(level(&look(&mut memory, at, vm(1024, 700, 900))), honest);
    }
}

#[test]
fn what_cannot_be_is_no_need_that_is_remembered() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(1024, 900, 100));
    let highest = |memory: &Memory| memory.vms[0].recent.highest();
    for at in [2_000, 2_500, 3_000] {
        look(&mut memory, at, vm(1024, 0, 100));
        assert_eq!(memory.vms[0].rates.map_or(0.0, |r| r.need), 0.0, "at {at}");
    }
    assert!(highest(&memory) < Bytes::mib(200), "{}", highest(&memory));
    // One that contradicts its map only may need it all the same: the map is newer.
    let mut its = vm(1024, 500, 900);
    its.balloon.as_mut().unwrap().guest.as_mut().unwrap().free = Some(Bytes::mib(500));
    its.agent = Some(AgentSample { free: Some(Bytes::ZERO), ..AgentSample::ready(0) });
    look(&mut memory, 15_000, its);
    assert!(memory.vms[0].doubt.is_some());
    assert_eq!(highest(&memory), Bytes::mib(524));
    // The host holds what it needs.
    look(&mut memory, 20_000, vm(1024, 0, 1000));
    assert_eq!(highest(&memory), Bytes::mib(1024));
}

/// QEMU tells its size at once and the guest's word up to a second late.
#[test]
fn a_balloon_that_grows_is_no_guest_that_needs_memory() {
    let mut memory = Memory::default();
    look(&mut memory, 1000, vm(512, 400, 900));
    // 112 MiB are needed all the time; the balloon takes 340 within a tick or two.
    let seen =
        [(2000, 300, 400, 900), (2300, 172, 400, 1200), (3000, 172, 250, 0), (3300, 172, 60, 0)];
    for (at, actual, available, age) in seen {
        let model = look(&mut memory, at, aged(actual, available, 900, age));
        let need = memory.vm(ID).unwrap().rates.map_or(0.0, |r| r.need);
        let grown = model.vms[0].distress.contains("grows");
        assert!(!grown && need < 1.0, "{at}: {need} {}", model.vms[0].distress);
    }
}

/// An operator's order is carried out between two looks; the guest's word is of before.
#[test]
fn a_balloon_that_others_grow_is_no_guest_that_needs_memory() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(512, 440, 900));
    // 80 MiB are needed all the time.
    for (at, available, age) in
        [(2_000, 440, 500), (2_500, 440, 1_000), (3_000, 120, 0), (4_000, 120, 0)]
    {
        let model = look(&mut memory, at, aged(200, available, 900, age));
        assert_eq!(only(&model).distress, "", "{at}");
        assert_eq!(only(&model).trust.level, 1.0, "{at}: {}", only(&model).trust.why);
        assert_eq!(plan(&memory, &model).actions, [], "{at}");
    }
    assert_eq!(only(&look(&mut memory, 5_000, vm(200, 120, 900))).owed, Bytes::ZERO);
    // Just before the first look.
    let mut memory = Memory::default();
    for (at, available, age) in
        [(1_000, 440, 0), (1_500, 440, 500), (2_000, 120, 0), (3_000, 120, 0)]
    {
        let model = look(&mut memory, at, aged(200, available, 900, age));
        assert_eq!(only(&model).distress, "", "{at}");
        assert_eq!(only(&model).trust.level, 0.5, "{at}: one word, doubted once");
    }
}

/// One that waits in vain says the same before and after a return.
#[test]
fn a_word_that_stands_at_a_larger_size_is_of_that_size() {
    let mut memory = Memory::default();
    let mut look = |at, actual, available, age_ms| {
        let model = look(&mut memory, at, aged(actual, available, 900, age_ms));
        only(&model).guest.unwrap().need.0 >> 20
    };
    assert_eq!(look(1_000, 512, 8, 0), 504);
    assert_eq!(look(1_100, 612, 9, 0), 504, "it may have spoken before the return");
    assert_eq!([look(1_200, 612, 9, 100), look(1_300, 612, 9, 200)], [504; 2]);
    assert_eq!(look(1_400, 612, 9, 300), 603, "it has used that up");
    // A smaller size: nothing is taken by that.
    assert_eq!(look(5_000, 612, 300, 0), 312);
    assert_eq!(look(5_100, 512, 299, 0), 312);
    let again = [200, 300, 400, 500].map(|ms| look(5_000 + ms, 512, 299, ms - 100));
    assert_eq!(again, [312; 4]);
}

/// One whose need grows while its balloon does: seen as it happens, not when the balloon stops.
#[test]
fn a_need_that_grows_behind_a_growing_balloon_is_seen() {
    let mut memory = Memory::default();
    // 50 MiB a half second by the balloon, 60 by its programs, said half a second ago.
    let mut need = 0;
    for i in 0..6 {
        let (actual, was) = (1024 - 50 * i, 1024 - 50 * i.max(1) + 50);
        let its = aged(actual, was - 100 - 60 * i, 900, 500);
        let model = look(&mut memory, 1_000 + 500 * i, its);
        need = only(&model).guest.unwrap().need.0 >> 20;
    }
    assert!((350..=400).contains(&need), "{need}");
}

#[test]
fn a_quiet_guest_that_begins_to_need_memory_is_as_fast_as_it_is() {
    let mut memory = Memory::default();
    for at in [1_000, 2_000, 3_000, 4_000] {
        look(&mut memory, at, vm(1024, 600, 1024));
    }
    // Looked at again, but not said again.
    look(&mut memory, 4_400, aged(1024, 600, 1024, 400));
    look(&mut memory, 4_500, vm(1024, 550, 1024));
    let rate = |m: &Memory| m.vm(ID).unwrap().rates.unwrap().need / Bytes::mib(1).0 as f64;
    assert_eq!(rate(&memory), 100.0, "50 MiB since it last said 600, half a second ago");
    look(&mut memory, 5_000, vm(1024, 550, 1024));
    assert_eq!(rate(&memory), 0.0, "and it has stopped");
}

/// The agent of a guest of 512 MiB whose module says that 100 are available.
fn with_facts(time_ms: u64, alloc_stall: u64) -> AgentSample {
    let facts = Some(crate::wire::abi::Facts {
        time_ns: time_ms * 1_000_000,
        total: 512 << 8,
        free: 50 << 8,
        available: 100 << 8,
        alloc_stall,
        ..Default::default()
    });
    AgentSample { facts, ..AgentSample::ready(0) }
}

#[test]
fn a_module_tells_of_direct_reclaim_before_the_balloons_statistics_do() {
    let mut memory = Memory::default();
    let mut look = |at: u64, stalls: u64, agent: bool| {
        let agent = agent.then(|| with_facts(at, stalls));
        // The balloon's say the same all the time.
        let model = look(&mut memory, at, VmSample { agent, ..vm(512, 100, 500) });
        only(&model).distress.clone()
    };
    assert_eq!([look(1_000, 7, true), look(1_500, 7, true)], ["", ""]);
    assert_eq!(look(2_000, 9, true), "4 allocation stalls a second, by its module's facts");
    assert_eq!([look(2_500, 30, false), look(3_000, 90, false)], ["", ""], "without the module");
}

/// Its module's thread gets no processor time, and its balloon's driver answers.
#[test]
fn statistics_of_now_count_more_than_facts_that_stand_still() {
    let mut memory = Memory::default();
    let mut available = |at: u64, time_ms: u64, age_ms: u64| {
        let agent = Some(with_facts(time_ms, 0));
        let model = look(&mut memory, at, VmSample { agent, ..aged(512, 10, 500, age_ms) });
        only(&model).guest.unwrap().available.0 >> 20
    };
    assert_eq!([available(1_000, 1_000, 900), available(1_900, 1_000, 100)], [100; 2]);
    assert_eq!(available(2_100, 1_000, 1_500), 100, "they are older");
    assert_eq!(available(2_200, 1_000, 100), 10);
    assert_eq!(available(2_300, 2_300, 100), 100, "it tells again");
}

#[test]
fn a_guest_that_cannot_answer_is_not_late() {
    let late_ms = |resets: bool, run: RunState| {
        let mut memory = Memory::default();
        for s in 1..=20 {
            let its = VmSample { run: Some(run.clone()), ..aged(1024, 600, 900, 4_000) };
            // It is silent for some seconds before.
            let its = if resets && s == 10 { reset(its) } else { its };
            look(&mut memory, s * 1_000, its);
        }
        memory.vms[0].late_ms
    };
    assert!(late_ms(false, RunState::Running) > 3_000.0);
    assert_eq!(late_ms(false, RunState::Paused), 0.0);
    assert_eq!(late_ms(true, RunState::Running), 0.0, "its new kernel boots");
}

/// Its balloon is 20 MiB smaller at each look, by no order of Ebb.
#[test]
fn the_need_of_a_guest_that_deflates_its_balloon_itself_goes_on_growing() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(500, 30, 900));
    look(&mut memory, 1_100, vm(500, 20, 900));
    for i in 1..5 {
        let model = look(&mut memory, 1_100 + 100 * i, vm(500 + 20 * i, 20 - i, 900));
        assert!(memory.vms[0].ledger.foreign.is_none());
        assert!(!model.vms[0].distress.is_empty());
    }
    let rate = memory.vms[0].rates.unwrap().need / f64::from(1 << 20);
    assert!(rate > 50.0, "as fast as before at least: {rate}");
}

/// `manage = false`, or `manage='no'` in its metadata.
#[test]
fn the_time_in_which_a_vm_is_not_managed_is_no_silence_of_its_guest() {
    let pauses = |let_be| {
        let mut memory = Memory::default();
        for s in 1..=40 {
            let heard = vm(1024, 600, 900);
            let link = Link::Down("not connected to".into());
            let alone = VmSample { let_be, link, run: None, balloon: None, ..heard.clone() };
            let vm = if (10..30).contains(&s) { alone } else { heard };
            look(&mut memory, s * 1_000, vm);
        }
        memory.vms[0].contact.left_ms(Stamp(40_000)).is_some()
    };
    assert!(!pauses(true));
    assert!(pauses(false), "its socket was gone");
}

/// QEMU tells at once that memory was plugged, and the guest some seconds later.
#[test]
fn memory_that_is_plugged_is_no_guest_that_needs_memory() {
    let mut memory = Memory::default();
    for (at, plugged, left) in
        [(1_000, 0, 300), (2_000, 0, 301), (2_300, 256, 300), (3_000, 256, 301)]
    {
        let ram = Some(Bytes::mib(1024 + plugged));
        let its = VmSample { ram, ..vm(512 + plugged, left, 512) };
        let model = look(&mut memory, at, its);
        let grows = memory.vm(ID).unwrap().rates.map_or(0.0, |r| r.need);
        assert!(grows < 8e6 && model.vms[0].distress.is_empty(), "{at}: {grows}");
    }
}

/// libvirt restarts; the VM was paused before.
#[test]
fn a_vm_that_is_paused_is_not_silent() {
    let mut memory = Memory::default();
    for s in 1..=60 {
        let its = vm(600, 300, 500);
        let paused = VmSample { run: Some(RunState::Paused), ..its.clone() };
        let link = Link::Down("libvirt is gone".into());
        let its = match s {
            ..10 => its,
            20..40 => VmSample { link, run: None, balloon: None, ..paused },
            _ => paused,
        };
        let model = look(&mut memory, s * 1_000, its);
        if s > 41 {
            assert_eq!(only(&model).unseen, "", "{s}");
        }
    }
}

/// Three of five have hung, and `manage='no'` is set in their metadata.
#[test]
fn vms_that_are_not_managed_share_no_silence_with_others() {
    let mut memory = Memory::default();
    for s in 1..=60 {
        let its = |pid| {
            let silent = if pid <= 3 { s >= 5 } else { pid == 4 && (30..45).contains(&s) };
            let heard = aged(1024, 600, 900, if silent { 9_000 } else { 0 });
            let heard = VmSample { id: VmId { pid, start: 1 }, ..heard };
            let link = Link::Down("not connected to".into());
            match pid <= 3 && s >= 20 {
                true => VmSample { let_be: true, link, run: None, balloon: None, ..heard },
                false => heard,
            }
        };
        tick(&mut memory, &sample(s * 1_000, (1..=5).map(its).collect()));
    }
    let left_alone = |i: usize| memory.vms[i].contact.left_ms(Stamp(60_000)).is_some();
    assert!(left_alone(3) && !left_alone(4), "it was silent by itself");
}
