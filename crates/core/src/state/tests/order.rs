//! Orders and returns over several ticks: who follows, who does not, who was asked too much.

use super::*;

#[test]
fn who_was_short_soon_after_it_was_asked_is_asked_more_gently_for_a_while() {
    let mut memory = taken(900);
    give(&mut memory, 4_000, vm(900, 20, 900), 1024);
    let model = look(&mut memory, 5_000, vm(1024, 600, 900));
    assert_eq!(only(&model).trust.level, 0.5);
    assert_eq!(memory.vms[0].harm, 1, "once for a take");
    let model = look(&mut memory, 70_000, vm(1024, 600, 900));
    assert_eq!(only(&model).trust.level, 1.0);
    // Long after a take it is the guest's own doing.
    give(&mut memory, 90_000, vm(900, 20, 900), 1024);
    assert_eq!(memory.vms[0].harm, 0);
}

#[test]
fn convergence_tells_speed_and_time_and_who_does_not_move() {
    let mut memory = taken(524);
    let model = look(&mut memory, 2_000, vm(924, 500, 800));
    let c = only(&model).convergence;
    assert_eq!((c.state, c.target), (Progress::Shrinking, Some(Bytes::mib(524))));
    assert!(c.rate > 0.0 && c.eta_ms.is_some_and(|ms| ms > 1_000), "{c:?}");
    let states = [3_000, 4_000, 5_000, 6_000, 7_000, 8_000, 12_500]
        .map(|at| only(&look(&mut memory, at, vm(924, 500, 800))).convergence.state);
    assert_eq!(states.last(), Some(&Progress::Stuck), "{states:?}");
    assert!(states.contains(&Progress::Slow), "{states:?}");
    assert_eq!(memory.vms[0].arriving(Stamp(12_500), Bytes::mib(924)), Bytes::ZERO);
    look(&mut memory, 13_000, vm(524, 100, 400));
    assert!(memory.vms[0].order.is_none());
}

#[test]
fn a_tick_that_took_half_a_minute_makes_nobody_stuck() {
    let mut memory = taken(900);
    let model = look(&mut memory, 31_000, vm(1024, 600, 900));
    assert!(!memory.vms[0].stalled(only(&model)), "it was looked at once");
    assert_ne!(only(&model).convergence.state, Progress::Stuck);
}

#[test]
fn an_order_that_failed_is_not_remembered_as_given() {
    let mut memory = Memory::default();
    let s = sample(1_000, vec![vm(1024, 600, 900)]);
    memory.observe(&s);
    let model = Model::new(&Config::default(), &s, &memory);
    let actions = vec![action(only(&model), 900, short())];
    let plan = Plan { actions, ..Plan::default() };
    let gone = Outcome { vm: ID, error: Some("gone".into()), ..Outcome::default() };
    for outcomes in [vec![], vec![gone]] {
        memory.learn(&model, &decided(&plan), &outcomes, true);
        assert!(memory.vms[0].order.is_none() && memory.vms[0].last_take.is_none());
    }
    memory.learn(&model, &decided(&plan), &carried_out(&plan), false);
    assert!(memory.vms[0].order.is_none(), "a dry run has given none");
}

/// When the first of two was asked, whose orders fail, and how often the other.
fn asked_of_one_that_fails(refused: bool) -> (Vec<u64>, usize) {
    let mut memory = Memory::default();
    let other = VmId { pid: 8, start: 9 };
    let (mut asked, mut others) = (Vec::new(), 0);
    for second in 1..100 {
        let two =
            [ID, other].map(|id| VmSample { id, name: id.pid.to_string(), ..vm(1024, 600, 900) });
        let seen = with_left(Bytes::mib(300), sample(second * 1_000, two.to_vec()));
        let fails = |a: &Action| Outcome {
            vm: a.vm,
            error: (a.vm == ID).then(|| "Parameter 'target' expects a size".into()),
            refused: refused && a.vm == ID,
            ..Outcome::default()
        };
        let (_, plan) =
            decides(&mut memory, &seen, |_, _, plan| plan.actions.iter().map(fails).collect());
        asked.extend(plan.actions.iter().filter(|a| a.vm == ID).map(|_| second));
        others += usize::from(plan.actions.iter().any(|a| a.vm == other && !a.gives()));
        let m = memory.of(ID);
        assert!(m.order.is_none() && m.stuck_until.is_none());
    }
    (asked, others)
}

#[test]
fn a_vm_whose_qemu_refuses_to_take_from_it_is_asked_again_after_30_s_and_others_at_once() {
    let (asked, others) = asked_of_one_that_fails(true);
    let gaps: Vec<u64> = asked.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps.len() >= 2 && gaps.iter().all(|gap| (30..=32).contains(gap)), "{asked:?}");
    assert!(others > 0);
}

#[test]
fn an_order_that_fails_otherwise_is_given_again_at_once() {
    let (asked, others) = asked_of_one_that_fails(false);
    assert!(asked.len() > 20 && asked.windows(2).all(|w| w[1] - w[0] <= 2), "{asked:?}");
    assert!(others > 0);
}

/// It is short, and there is a tick each 200 ms.
#[test]
fn an_order_to_grow_that_is_refused_is_given_again_after_a_second() {
    let mut memory = taken_to(600, &|| vm(600, 300, 590), 3);
    let mut asked = Vec::new();
    for ms in (4_000..8_000).step_by(200) {
        let refuses = |a: &Action| {
            let error = Some("no".into());
            Outcome { vm: a.vm, error, refused: true, ..Outcome::default() }
        };
        let seen = sample(ms, vec![vm(600, 5, 590)]);
        let (_, plan) =
            decides(&mut memory, &seen, |_, _, plan| plan.actions.iter().map(refuses).collect());
        asked.extend(plan.actions.iter().map(|_| ms));
    }
    assert_eq!(asked, [4_000, 5_000, 6_000, 7_000]);
}

#[test]
fn who_does_not_follow_is_left_alone_twice_as_long_each_time() {
    let mut memory = Memory::default();
    for (at, left) in (1..8).zip([30, 60, 120, 240, 480, 600, 600]) {
        let s = sample(at * 1_000_000, vec![vm(1024, 600, 900)]);
        act(&mut memory, &s, Some((1024, Reason::Withdrawn)));
        assert_eq!(memory.vms[0].stuck_until.unwrap().since(s.at), left * 1000);
    }
}

#[test]
fn what_was_given_and_never_came_is_ordered_again() {
    let mut memory = taken_to(400, &|| vm(400, 100, 400), 3);
    give(&mut memory, 30_000, vm(400, 10, 400), 656);
    // QEMU has not got it, or was told something else since: nothing moves.
    let mut ordered = false;
    for s in 31..=90u64 {
        let model = look(&mut memory, s * 1_000, vm(400, 10, 400));
        ordered |= plan(&memory, &model).actions.iter().any(|a| a.to > Bytes::mib(400));
    }
    assert!(ordered, "it has 10 MiB available, the host 8 GiB");
}

#[test]
fn a_balloon_that_is_where_it_was_told_to_be_grows_no_more() {
    let inflates = |orders: &[(u64, u64)], then: u64| {
        let mut memory = Memory::default();
        for (n, (size, to)) in orders.iter().enumerate() {
            take(&mut memory, 1_000 + 100 * n as u64, vm(*size, 600, 900), *to);
        }
        look(&mut memory, 2_000, vm(then, 500, 800));
        assert!(memory.vms[0].inflates(Stamp(2_200), Some(Bytes::mib(then))));
        memory.vms[0].inflates(Stamp(2_250), Some(Bytes::mib(then)))
    };
    assert!(!inflates(&[(1024, 924)], 924));
    assert!(inflates(&[(1024, 924)], 930), "on its way");
    assert!(!inflates(&[(1024, 924), (1000, 800)], 800), "told to go on");
    // The guest may have read the first order, and be at it.
    assert!(inflates(&[(1024, 824), (1000, 924)], 924), "told to stop before");
    assert!(inflates(&[(1024, 824), (1000, 924), (980, 900)], 900), "and then to go on");
}

#[test]
fn the_next_word_shows_whether_an_operator_or_the_guest_raised_a_size() {
    let left_alone = |left: u64, touched: u64| {
        let mut memory = Memory::default();
        look(&mut memory, 1_000, vm(900, 300, 800));
        for (at, size) in [(2_000, 950), (2_100, 1000)] {
            look(&mut memory, at, aged(size, 300, 800, at - 1_000));
            assert!(is_left_alone(&memory, at), "it seemed to have enough");
        }
        look(&mut memory, 3_000, aged(1000, left, 800 + touched, 500));
        is_left_alone(&memory, 3_000)
    };
    assert!(left_alone(400, 0), "an operator raised its size");
    assert!(left_alone(400, 40), "and the guest uses little of that");
    assert!(!left_alone(5, 0), "it was out of memory at 900 MiB");
    assert!(!left_alone(110, 0), "it would have been out of memory at 900 MiB");
    assert!(!left_alone(400, 60), "it was out of memory for a moment");
}

/// What the host holds of it before, when its balloon is seen smaller, and at its next word.
#[test]
fn a_guest_that_was_out_of_memory_for_a_moment_is_known_by_what_it_touched() {
    let left_alone = |held: [(u64, u64); 3], caches: [u64; 2]| {
        let mut memory = Memory::default();
        let ticks = [(1_000, 900, 0, 0), (2_000, 1000, 1_000, 0), (3_000, 1000, 500, 1)];
        for ((at, size, age_ms, word), (resident, swap)) in ticks.into_iter().zip(held) {
            let mut vm = aged(size, 400, resident, age_ms);
            vm.process.as_mut().unwrap().swap = Bytes::mib(swap);
            let said = vm.balloon.as_mut().unwrap().guest.as_mut().unwrap();
            said.caches = Some(Bytes::mib(caches[word]));
            look(&mut memory, at, vm);
        }
        is_left_alone(&memory, 3_000)
    };
    assert!(left_alone([(800, 0), (800, 0), (800, 0)], [100, 100]), "it touched nothing");
    assert!(!left_alone([(800, 0), (880, 0), (880, 0)], [100, 100]));
    assert!(!left_alone([(800, 0), (880, 0), (800, 0)], [100, 100]), "its freed pages are back");
    assert!(!left_alone([(800, 0), (700, 180), (700, 180)], [100, 100]), "the host swaps");
    assert!(!left_alone([(800, 0), (880, 0), (880, 0)], [100, 50]), "and its cache was dropped");
    assert!(left_alone([(800, 0), (830, 0), (880, 0)], [100, 180]), "it reads files");
}

/// Its balloon is 16 MiB smaller than before, by no order of Ebb.
#[test]
fn a_guest_that_grows_fast_may_have_deflated_its_balloon_though_its_last_word_says_it_has_enough() {
    let left_alone = |grew: u64| {
        let mut memory = Memory::default();
        look(&mut memory, 1_000, vm(900, 200 + grew, 900));
        look(&mut memory, 2_000, vm(900, 200, 900));
        look(&mut memory, 2_500, aged(916, 200, 916, 500));
        is_left_alone(&memory, 2_500)
    };
    assert!(left_alone(10), "somebody raised its size");
    assert!(!left_alone(300), "150 of 200 MiB may have been used up in half a second");
}

/// The guest may shrink its balloon itself, and has not.
#[test]
fn a_size_that_an_operator_raised_and_lowers_again_is_theirs() {
    for (then, owed) in [(800, 0), (500, 0)] {
        let mut memory = taken_to(600, &|| vm(600, 200, 400), 9);
        for s in 10..40 {
            let size = if s < 20 { 1000 } else { then };
            look(&mut memory, s * 1000, vm(size, size - 400, 400));
        }
        let model = look(&mut memory, 40_000, vm(then, then - 400, 400));
        assert_eq!(only(&model).owed, Bytes::mib(owed), "{then}");
        let left = memory.vms[0].ledger.left_ms(Stamp(40_000));
        assert!(left > Some(570_000), "{left:?}");
    }
}

/// It has as little as Ebb leaves to a guest when an operator raises its size.
#[test]
fn a_guest_that_has_little_left_and_touches_nothing_has_not_deflated_its_balloon() {
    let owed = |touched: u64| {
        let mut memory = taken(500);
        for s in 2..40 {
            let held = 450 + touched;
            let its = match s {
                ..10 => vm(500, 110, 450),
                // Its word is from before.
                10 => aged(900, 110, held, 1000),
                11..20 => vm(900, 510 - touched, held),
                _ => vm(800, 410 - touched, held),
            };
            look(&mut memory, s * 1000, its);
            let alone = is_left_alone(&memory, s * 1000);
            assert_eq!(alone, s > 10 && touched == 0, "{s}: {touched}");
        }
        memory.vms[0].ledger.owed(Bytes::mib(1024), Bytes::mib(800)).0 >> 20
    };
    assert_eq!((owed(0), owed(300)), (0, 224));
}

/// Its balloon gives up 20 MiB, and Ebb gives it much more at once.
#[test]
fn what_ebb_gives_to_a_guest_that_deflated_its_balloon_makes_no_operator() {
    let mut memory = taken_to(500, &|| vm(500, 60, 450), 9);
    give(&mut memory, 10_000, aged(520, 60, 470, 1000), 900);
    for s in 11..14 {
        look(&mut memory, s * 1000, vm(900, 420, 480));
        assert!(!is_left_alone(&memory, s * 1000), "{s}");
    }
}

/// What Ebb orders beside an operator's size, and what the driver gives on the way, undo nothing.
#[test]
fn a_size_that_an_operator_raised_stays_theirs_though_the_balloon_passes_an_order_of_ebb() {
    let mut memory = Memory::default();
    look(&mut memory, 1_000, vm(900, 300, 800));
    give(&mut memory, 2_000, aged(950, 300, 800, 1_000), 1000);
    look(&mut memory, 2_100, aged(1010, 300, 800, 1_100));
    assert!(is_left_alone(&memory, 2_100));
}

/// It has hung: what it is owed is ordered again and again.
#[test]
fn what_a_guest_was_given_that_does_not_follow_does_not_count_as_spent_for_good() {
    let mut memory = taken(400);
    let mut orders = 0;
    for s in 2..60 {
        let age_ms = if s < 5 { 0 } else { (s - 4) * 1000 };
        let seen = sample(s * 1000, vec![aged(400, 200, 300, age_ms)]);
        let (model, plan) = decides(&mut memory, &seen, |_, _, plan| {
            plan.actions.retain(|_| s >= 10);
            carried_out(plan)
        });
        orders += plan.actions.len();
        let spent = only(&model).outstanding;
        assert!(s < 26 || spent == Bytes::ZERO, "{s}: for 10 s, and not again for each order");
    }
    assert!(orders > 2, "it may follow when it lives again");
}
