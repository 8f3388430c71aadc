//! Beginnings: VMs that start, guests that reboot.

use super::*;

#[test]
fn a_vm_that_starts_has_its_memory_promised_until_it_has_settled() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    let model = look(&mut memory, 2_000, vm(1024, 600, 300));
    assert_eq!([only(&model).promised, model.host.shown.promised], [Bytes::mib(724); 2]);
    assert!(model.host.shown.why.contains("724 MiB set aside"), "{}", model.host.shown.why);
    // It still grows after ten seconds; ten more without growth, and it has settled.
    for (at, resident, promised) in [(12_000, 600, 424), (17_000, 600, 424), (22_000, 605, 0)] {
        let model = look(&mut memory, at, vm(1024, 400, resident));
        assert_eq!(only(&model).promised, Bytes::mib(promised), "at {at}");
    }
}

#[test]
fn what_a_vm_was_promised_that_is_paused_waits_until_it_runs() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    for (at, run) in [(2_000, RunState::Paused), (3_000, RunState::Running)] {
        let waiting = if run == RunState::Paused { Bytes::mib(724) } else { Bytes::ZERO };
        let model = look(&mut memory, at, VmSample { run: Some(run), ..vm(1024, 600, 300) });
        let host = &model.host.shown;
        assert_eq!((host.promised, host.waiting), (Bytes::mib(724), waiting));
    }
}

#[test]
fn ram_in_a_pool_of_huge_pages_is_not_promised() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    let in_pool = VmSample { in_pool: true, ..vm(1024, 1000, 100) };
    let model = look(&mut memory, 2_000, in_pool);
    assert_eq!([only(&model).promised, model.host.shown.promised], [Bytes::ZERO; 2]);
}

/// One whose balloon's driver starts after a reset at 2 s and sends no statistics any more. It has
/// `size`, and is ordered to have `to`.
fn silent_after_a_reset(size: u64, to: u64) -> (Memory, VmSample) {
    let mut memory = taken(400);
    look(&mut memory, 2_000, reset(vm(400, 100, 400)));
    let mut its = vm(size, 0, size);
    its.balloon.as_mut().unwrap().guest = None;
    act(&mut memory, &sample(3_000, vec![its.clone()]), Some((to, Reason::Rebooted)));
    (memory, its)
}

#[test]
fn a_guest_that_says_nothing_after_a_reset_is_silent_and_given_what_it_may_need() {
    let (mut memory, its) = silent_after_a_reset(512, 700);
    for s in 4..120 {
        let model = look(&mut memory, s * 1_000, its.clone());
        assert_eq!(only(&model).unseen, "", "it boots, {s}");
    }
    let model = (120..140).map(|s| look(&mut memory, s * 1_000, its.clone())).last().unwrap();
    assert!(only(&model).unseen.contains("silent"), "{:?}", memory.vms[0].contact);
}

#[test]
fn a_boot_that_is_slow_on_a_full_host_is_no_silence() {
    let (mut memory, its) = silent_after_a_reset(400, 400);
    let model = (4..100).map(|s| look(&mut memory, s * 1_000, its.clone())).last().unwrap();
    assert_eq!(only(&model).unseen, "");
}

#[test]
fn a_large_vm_whose_migration_fills_it_slowly_has_not_settled() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    for (at, resident) in [(2_000, 0), (12_000, 1_170), (22_000, 2_340), (32_000, 2_341)] {
        let model = look(&mut memory, at, vm(65_536, 65_536, resident));
        let promised = if at < 32_000 { 65_536 - resident } else { 0 };
        assert_eq!(only(&model).promised, Bytes::mib(promised), "at {at}");
    }
}

#[test]
fn who_was_there_before_the_daemon_has_settled_unless_it_is_young() {
    for (age_ms, promised) in [(None, 0), (Some(3_600_000), 0), (Some(5_000), 724)] {
        let vm = VmSample { age_ms, ..vm(1024, 600, 300) };
        let model = look(&mut Memory::default(), 1_000, vm);
        assert_eq!(only(&model).promised, Bytes::mib(promised), "{age_ms:?}");
    }
}

#[test]
fn a_storm_of_starting_vms_makes_a_host_soft_and_not_worse() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    let big = |pid| VmSample {
        id: VmId { pid, start: 1 },
        ram: Some(Bytes::gib(8)),
        balloon: Some(BalloonSample { actual: Bytes::gib(8), ..BalloonSample::default() }),
        ..vm(0, 0, 100)
    };
    let model = tick(&mut memory, &sample(2_000, (1..6).map(big).collect()));
    assert_eq!(model.host.shown.state, Pressure::Soft, "{}", model.host.shown.why);
    assert!(model.host.shown.shortage > Bytes::mib(500));
    assert_eq!(model.host.shown.headroom, Bytes::gib(8), "nothing has happened yet");
}

#[test]
fn who_was_reset_is_left_alone_for_20_s_and_resets_often_from_the_third_time_on() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(1024, 600, 900));
    let mut reset = |at| {
        look(&mut memory, at, reset(vm(1024, 600, 900)));
        let mut seen = |at| look(&mut memory, at, vm(1024, 600, 900));
        let Standing::GiveOnly(why) = &only(&seen(at + 1_000)).standing.clone() else { panic!() };
        assert!(why.contains("left alone for 19 s more"), "{why}");
        seen(at + 19_900);
        assert_eq!(only(&seen(at + 20_000)).standing, Standing::Ready);
        memory.vms[0].resets_often(Stamp(at))
    };
    assert_eq!([10_000, 500_000, 900_000].map(&mut reset), [false, false, true]);
    assert!(!reset(1_600_000), "ten minutes later");
}

/// QEMU tells of each of the resets of one reboot, and they come in several ticks.
#[test]
fn the_resets_of_one_reboot_count_once() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(1024, 600, 900));
    let mut reset = |at| {
        look(&mut memory, at, reset(vm(1024, 600, 900)));
        memory.vms[0].resets
    };
    assert_eq!([10_000, 10_100, 11_300].map(&mut reset), [1, 1, 1]);
    assert_eq!([70_000, 70_100].map(&mut reset), [2, 2]);
}

/// It has booted something that sends no statistics: QEMU shows the old size for good.
#[test]
fn a_guest_that_says_nothing_after_a_reboot_is_waited_for_for_two_minutes() {
    let mut memory = taken_to(400, &|| vm(400, 100, 400), 2);
    let mut silent = vm(400, 100, 400);
    silent.balloon.as_mut().unwrap().guest = None;
    let seen = sample(3_000, vec![reset(silent.clone())]);
    act(&mut memory, &seen, Some((1024, Reason::Rebooted)));
    let mut waits = |at| {
        look(&mut memory, at, silent.clone());
        memory.vms[0].reboot.is_some()
    };
    assert_eq!([4_000, 122_900, 123_000].map(&mut waits), [true, true, false]);
}

#[test]
fn a_size_that_an_operator_sets_while_a_guest_boots_is_theirs() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(1024, 600, 900));
    memory.vms[0].unsure = Bytes::mib(200);
    let mut boots = reset(vm(1024, 600, 900));
    boots.balloon.iter_mut().for_each(|b| b.guest = None);
    look(&mut memory, 2_000, boots);
    assert_eq!(memory.vms[0].unsure, Bytes::ZERO, "that was of the guest before");
    for at in [12_000, 13_000, 14_000, 25_000, 26_000] {
        let model = look(&mut memory, at, vm(512, 200, 500));
        assert_eq!(plan(&memory, &model).actions, [], "at {at}");
    }
    assert_eq!(memory.owed_ids(), []);
}

/// Two guests that Ebb has 624 MiB of each reset one second apart. The host has 700 MiB beyond the
/// mark of critical.
#[test]
fn what_one_guest_was_given_to_boot_is_not_given_to_the_next_that_boots() {
    let mut memory = Memory::default();
    let other = VmId { pid: 8, start: 9 };
    let mut given = [0, 0];
    for s in 1..10 {
        let vms = [ID, other].map(|id| {
            let size = if s == 1 { 1024 } else { 400 };
            // Its new kernel has not said anything yet.
            let its = aged(size, size - 200, 300, if s < 5 { 0 } else { (s - 4) * 1000 });
            let its = VmSample { id, ..its };
            let resets = (id == ID && s == 5) || (id == other && s == 6);
            if resets { reset(its) } else { its }
        });
        let left = if s < 5 { Bytes::gib(8) } else { Bytes::mib(451 + 700) };
        let seen = with_left(left, sample(s * 1000, vms.to_vec()));
        let (_, plan) = decides(&mut memory, &seen, |_, model, plan| {
            if s == 1 {
                plan.actions = model.vms.iter().map(|vm| action(vm, 400, short())).collect();
            } else if s < 5 {
                plan.actions.clear();
            }
            carried_out(plan)
        });
        for a in plan.actions.iter().filter(|a| a.reason == Reason::Rebooted) {
            given[usize::from(a.vm == other)] = (a.to - a.from).0 >> 20;
        }
    }
    assert!(given[0] > 500, "{given:?}");
    assert!(given[0] + given[1] <= 700 + 64, "{given:?}: none of it has been touched yet");
}

/// QEMU shows the size from before the reset until the new kernel's driver tells its own.
#[test]
fn what_a_new_kernel_touches_before_its_driver_tells_its_size_is_no_memory_of_the_vmm() {
    let mut memory = taken_to(400, &|| vm(400, 100, 400), 2);
    let seen = sample(3_000, vec![reset(vm(400, 100, 400))]);
    act(&mut memory, &seen, Some((1024, Reason::Rebooted)));
    for (s, held) in [(4, 600), (5, 800), (6, 1000)] {
        look(&mut memory, s * 1000, vm(400, 100, held));
    }
    let model = look(&mut memory, 7_000, vm(1024, 100, 1000));
    assert_eq!(only(&model).guest_held(), Some(Bytes::mib(1000)), "own: {}", only(&model).own);
}

/// Its driver gives memory back to it while QEMU does not answer.
#[test]
fn what_a_guest_touches_while_its_size_is_not_told_is_no_memory_of_the_vmm() {
    let mut memory = taken_to(400, &|| vm(400, 100, 400), 11);
    for s in 12..20 {
        let link = Link::Down("its socket is gone".into());
        let lost = VmSample { link, run: None, balloon: None, ..vm(400, 100, 50 * s) };
        look(&mut memory, s * 1000, lost);
    }
    let model = look(&mut memory, 20_000, vm(1000, 100, 950));
    assert_eq!(only(&model).guest_held(), Some(Bytes::mib(950)), "own: {}", only(&model).own);
}

#[test]
fn nothing_is_taken_of_ram_whose_mount_has_no_room() {
    let full = VmSample { no_room: Some("the mount is full".into()), ..vm(1024, 1000, 900) };
    let model = look(&mut Memory::default(), 1_000, full);
    let Standing::GiveOnly(why) = &only(&model).standing else { panic!("{model:?}") };
    assert_eq!(why, "its balloon is left alone: the mount is full");
}

#[test]
fn one_that_is_started_and_does_not_run_yet_keeps_what_it_was_promised() {
    let promised = |waits_s: u64| {
        let mut memory = Memory::default();
        tick(&mut memory, &sample(1_000, vec![]));
        for s in 2..2 + waits_s {
            let waits = VmSample { run: Some(RunState::Paused), ..vm(1024, 600, 100) };
            look(&mut memory, s * 1_000, waits);
        }
        let model = look(&mut memory, (2 + waits_s) * 1_000, vm(1024, 600, 100));
        only(&model).promised
    };
    assert_eq!((promised(60), promised(590)), (Bytes::mib(924), Bytes::mib(924)));
    assert_eq!(promised(700), Bytes::ZERO, "not for ever");
}
