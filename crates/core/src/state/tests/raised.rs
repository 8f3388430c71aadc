//! Balloons that shrink without an order of Ebb's: by an operator, or by a guest's driver.

use super::*;
use crate::sample::HandsOff;

/// A tick in which Ebb decides, on a host with this many MiB available: the size that it orders.
fn ordered(memory: &mut Memory, seen: Sample, available: u64) -> Option<u64> {
    let seen = with_left(Bytes::mib(available), seen);
    let (_, plan) = decides(memory, &seen, |_, _, plan| carried_out(plan));
    plan.actions.first().map(|a| a.to.0 >> 20)
}

/// QEMU has one target: an order of Ebb's in between would be the last.
#[test]
fn an_operators_larger_size_is_reached_though_the_guest_has_little_left() {
    let end = |need: u64, deflates: bool, left_alone: bool| {
        let its = |size: u64, said: u64| {
            let hands_off = left_alone.then_some(HandsOff { left_ms: 500_000, done: true });
            let mut its = aged(size, said - need, need + 60, 50);
            its.balloon.as_mut().unwrap().deflate_on_oom = Some(deflates);
            VmSample { ram: Some(Bytes::gib(4)), hands_off, ..its }
        };
        let mut memory = taken_to(1024, &|| its(1024, 1024), 69);
        let (mut target, mut size) = (3072, 1024);
        for n in 0..100 {
            let said = size;
            size += (target - size).min(100);
            let seen = sample(70_000 + n * 100, vec![its(size, said)]);
            target = ordered(&mut memory, seen, 900).map_or(target, |to| to.max(size));
        }
        size
    };
    for need in [600, 700, 900] {
        for (deflates, hands_off) in [(true, false), (true, true), (false, false), (false, true)] {
            let size = end(need, deflates, hands_off);
            assert!(size >= 3072, "need {need}, {deflates}, hands off {hands_off}: {size}");
        }
    }
}

/// It is out of memory, and its driver gives it 20 MiB in each tick: there are many VMs.
#[test]
fn a_guest_that_goes_on_deflating_its_balloon_is_given_memory_meanwhile() {
    let given = |touches: bool| {
        let its = |size: u64| {
            let held = if touches { size - 8 } else { 1016 };
            VmSample { ram: Some(Bytes::gib(4)), ..aged(size, 8, held, 50) }
        };
        let mut memory = taken_to(1024, &|| its(1024), 69);
        (1..=10).find_map(|n| {
            let seen = sample(69_000 + n * 200, vec![its(1024 + n * 20)]);
            Some((n, ordered(&mut memory, seen, 8_000)?))
        })
    };
    // An operator's larger size is reached within a second.
    assert!(given(true).is_some_and(|(n, to)| n == 6 && to > 1200), "{:?}", given(true));
    assert_eq!(given(false), None, "an operator raises its size");
}

#[test]
fn a_critical_host_takes_nothing_of_a_size_that_is_on_its_way_up() {
    let mut memory = taken_to(600, &|| vm(600, 110, 590), 99);
    let (mut target, mut size) = (900, 600);
    for n in 1..40u64 {
        let said = size;
        size = if size < target { (size + 150).min(target) } else { (size - 100).max(target) };
        let seen = sample(99_000 + n * 100, vec![aged(size, said - 490, 590, 90)]);
        target = ordered(&mut memory, seen, 250).unwrap_or(target);
    }
    assert!(size >= 900, "{size}");
}

#[test]
fn an_operators_size_is_theirs_in_one_step_and_in_two() {
    for sizes in [&[900][..], &[700, 900]] {
        let mut memory = taken_to(500, &|| vm(500, 110, 450), 9);
        let (mut at, mut was) = (10_000, 500);
        for size in sizes.iter().chain([&900; 20]) {
            look(&mut memory, at, aged(*size, was - 390, 450, 90));
            (at, was) = (at + 100, *size);
        }
        assert!(is_left_alone(&memory, at), "{sizes:?}");
    }
}

#[test]
fn what_a_guest_deflates_later_ends_no_operators_ten_minutes() {
    let mut memory = taken_to(500, &|| vm(500, 200, 400), 9);
    for s in 10..=60 {
        look(&mut memory, s * 1000, vm(800, 500, 400));
    }
    let left = |memory: &Memory, s: u64| memory.vms[0].ledger.left_ms(Stamp(s * 1000));
    assert!(left(&memory, 60) > Some(540_000));
    look(&mut memory, 61_000, aged(820, 500, 820, 1_000));
    look(&mut memory, 62_000, vm(820, 5, 820));
    assert!(left(&memory, 62).is_some_and(|ms| ms < 550_000), "of the operator's move");
}

/// On a new connection QEMU has told the size, and not yet what its balloon does.
#[test]
fn what_a_guest_deflates_before_qemu_tells_that_it_may_stays_owed() {
    let cases = [(None, false), (Some(true), false), (Some(true), true), (Some(false), false)];
    for (deflates, seems_windows) in cases {
        let mut memory = taken_to(500, &|| vm(500, 20, 490), 10);
        for (s, size) in [(11, 540), (12, 580), (13, 580), (14, 580)] {
            let mut its = aged(size, 20, size - 10, (s - 10) * 1000);
            let balloon = its.balloon.as_mut().unwrap();
            balloon.deflate_on_oom = deflates;
            balloon.guest.as_mut().unwrap().is_windows = seems_windows;
            look(&mut memory, s * 1000, its);
        }
        let owed = memory.vms[0].ledger.owed(Bytes::mib(1024), Bytes::mib(580));
        assert_eq!(owed, Bytes::mib(if deflates == Some(false) { 0 } else { 444 }), "{deflates:?}");
    }
}

/// `/proc` tells each tick what a process holds, QEMU only tells the size when it answers.
#[test]
fn what_a_guest_touched_while_qemu_did_not_answer_counts_as_touched() {
    for (slow, left) in [(false, 60), (false, 200), (true, 60), (true, 200)] {
        let mut memory = taken_to(500, &|| vm(500, left, 450), 10);
        for (ms, held) in [(400, 550), (800, 650), (1200, 750)].into_iter().filter(|_| slow) {
            let mut its = aged(500, left, held, ms);
            its.balloon.as_mut().unwrap().age_ms = ms;
            its.link = Link::Slow("no answer".into());
            look(&mut memory, 10_000 + ms, its);
        }
        look(&mut memory, 11_300, aged(800, left, 750, 1_300));
        look(&mut memory, 12_300, vm(800, 500, 750));
        assert!(!is_left_alone(&memory, 12_300), "slow: {slow}, {left} left: it touched all of it");
    }
}

#[test]
fn what_is_plugged_no_balloon_gave_up() {
    for plugged in [0, 1024] {
        let mut memory = taken_to(500, &|| vm(500, 20, 490), 10);
        let ram = Some(Bytes::mib(1024 + plugged));
        let size = 540 + plugged;
        let its = VmSample { ram, ..aged(size, 20, 530, 1_000) };
        look(&mut memory, 11_000, its);
        look(&mut memory, 12_000, VmSample { ram, ..vm(size, 20 + plugged, 530) });
        assert!(!is_left_alone(&memory, 12_000), "{plugged} plugged: it touched all of its 40 MiB");
    }
}

/// RAM and size are two answers of QEMU.
#[test]
fn memory_that_is_plugged_between_two_answers_adds_nothing_to_what_is_owed() {
    for deflates in [false, true] {
        let mut memory = Memory::default();
        let its = |ram: u64, size: u64, left: u64| {
            let mut its = VmSample { ram: Some(Bytes::mib(ram)), ..vm(size, left, 500) };
            its.balloon.as_mut().unwrap().deflate_on_oom = Some(deflates);
            its
        };
        take(&mut memory, 1_000, its(1024, 824, 400), 600);
        (2..=10).for_each(|s| drop(look(&mut memory, s * 1000, its(1024, 600, 200))));
        look(&mut memory, 10_100, its(1024, 1624, 200));
        let mut model = Model::default();
        for s in 11..16 {
            model = look(&mut memory, s * 1000, its(2048, 1624, 1200));
        }
        assert_eq!(only(&model).owed, Bytes::mib(224), "deflates: {deflates}");
    }
}

#[test]
fn what_ebb_gave_and_the_guest_touched_tells_nothing_of_an_operators_later_size() {
    for beyond in [0, 4] {
        let mut memory = taken_to(300, &|| vm(300, 40, 290), 9);
        give(&mut memory, 10_000, vm(300, 40, 290), 500);
        let size = 500 + beyond;
        look(&mut memory, 10_100, aged(size, 40, 290, 100));
        look(&mut memory, 10_300, vm(size, size - 300, 490));
        look(&mut memory, 11_000, vm(size, size - 300, 490));
        look(&mut memory, 11_500, aged(800, size - 300, 490, 100));
        look(&mut memory, 11_700, vm(800, 500, 490));
        assert!(is_left_alone(&memory, 11_700), "{beyond} beyond Ebb's order");
    }
}

/// A driver that gives its guest pages while it follows an order ends beyond that.
#[test]
fn a_guest_that_deflates_its_balloon_on_the_way_to_its_order_makes_no_operator() {
    let left_alone = |sizes: &[u64]| {
        let mut memory = taken_to(300, &|| vm(300, 40, 290), 9);
        give(&mut memory, 10_000, vm(300, 40, 290), 441);
        let mut at = 10_000;
        for size in sizes {
            at += 100;
            look(&mut memory, at, vm(*size, 200, 300));
        }
        let to = sizes[sizes.len() - 1];
        look(&mut memory, at + 900, vm(to, to - 150, 300));
        is_left_alone(&memory, at + 900)
    };
    for guests in [[400, 441], [400, 450], [445, 450], [441, 450]] {
        assert!(!left_alone(&guests), "{guests:?}");
    }
    let slowly: Vec<u64> = (44..=60).map(|tens| tens * 10).collect();
    for operators in [&[400, 600][..], &[441, 600], &slowly, &[441, 461, 468]] {
        assert!(left_alone(operators), "{operators:?}");
    }
}

/// It takes the last of it in several steps and touches each at once.
#[test]
fn a_guest_that_deflates_its_balloon_beyond_its_order_and_touches_it_makes_no_operator() {
    let mut memory = taken_to(300, &|| vm(300, 8, 290), 9);
    give(&mut memory, 10_000, vm(300, 8, 290), 441);
    for (at, size, held) in [(10_100, 441, 441), (10_200, 456, 456), (10_300, 458, 457)] {
        look(&mut memory, at, vm(size, 8, held));
    }
    look(&mut memory, 11_400, vm(458, 200, 457));
    assert!(!is_left_alone(&memory, 11_400), "it has touched the most of it");
}
