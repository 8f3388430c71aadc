//! Orders and returns over several ticks: who follows, who does not, who was asked too much.

use super::*;

#[test]
fn who_was_short_soon_after_it_was_asked_is_asked_more_gently_for_a_while() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Soft))),
    );
    let given = Reason::GuestShort { signs: String::new() };
    act(&mut memory, &sample(4_000, vec![vm(900, 20, 900)]), Some((900, 1024, given.clone())));
    let model = tick(&mut memory, &sample(5_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).trust.level, 0.5);
    assert_eq!(memory.vms[0].harm, 1, "once for a take");
    let model = tick(&mut memory, &sample(70_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).trust.level, 1.0);
    // Long after a take it is the guest's own doing.
    act(&mut memory, &sample(90_000, vec![vm(900, 20, 900)]), Some((900, 1024, given)));
    assert_eq!(memory.vms[0].harm, 0);
}

#[test]
fn convergence_tells_speed_and_time_and_who_does_not_move() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 524, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(2_000, vec![vm(924, 500, 800)]));
    let c = only(&model).convergence;
    assert_eq!((c.state, c.target), (Progress::Shrinking, Some(Bytes::mib(524))));
    assert!(c.rate > 0.0 && c.eta_ms.is_some_and(|ms| ms > 1_000), "{c:?}");
    let mut states = Vec::new();
    for at in [3_000, 4_000, 5_000, 6_000, 7_000, 8_000, 12_500] {
        states
            .push(only(&tick(&mut memory, &sample(at, vec![vm(924, 500, 800)]))).convergence.state);
    }
    assert_eq!(states.last(), Some(&Progress::Stuck), "{states:?}");
    assert!(states.contains(&Progress::Slow), "{states:?}");
    assert_eq!(memory.vms[0].arriving(Stamp(12_500), Bytes::mib(924)), Bytes::ZERO);
    tick(&mut memory, &sample(13_000, vec![vm(524, 100, 400)]));
    assert!(memory.vms[0].order.is_none());
}

#[test]
fn a_tick_that_took_half_a_minute_makes_nobody_stuck() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(31_000, vec![vm(1024, 600, 900)]));
    assert!(!memory.vms[0].stalled(only(&model)), "it was looked at once");
    assert_ne!(only(&model).convergence.state, Progress::Stuck);
}

#[test]
fn an_order_that_failed_is_not_remembered_as_given() {
    let mut memory = Memory::default();
    let s = sample(1_000, vec![vm(1024, 600, 900)]);
    memory.observe(&s);
    let model = Model::new(&Config::default(), &s, &memory);
    let action = Action {
        vm: ID,
        name: "a".into(),
        from: Bytes::mib(1024),
        to: Bytes::mib(900),
        reason: short(Pressure::Soft),
    };
    let plan = Plan { actions: vec![action], ..Plan::default() };
    for outcomes in
        [vec![], vec![Outcome { vm: ID, error: Some("gone".into()), ..Outcome::default() }]]
    {
        memory.learn(&model, &decided(&plan), &outcomes, true);
        assert!(memory.vms[0].order.is_none() && memory.vms[0].last_take.is_none());
    }
    memory.learn(
        &model,
        &decided(&plan),
        &[Outcome { vm: ID, error: None, ..Outcome::default() }],
        false,
    );
    assert!(memory.vms[0].order.is_none(), "a dry run has given none");
}

#[test]
fn a_vm_whose_qemu_refuses_to_take_from_it_is_asked_again_after_30_s_and_others_at_once() {
    let (mut memory, config) = (Memory::default(), Config::default());
    let other = VmId { pid: 8, start: 9 };
    let (mut asked, mut others) = (Vec::new(), 0);
    for second in 1..100 {
        let two =
            [ID, other].map(|id| VmSample { id, name: id.pid.to_string(), ..vm(1024, 600, 900) });
        let mut s = sample(second * 1_000, two.to_vec());
        s.host.memory.iter_mut().for_each(|m| m.available = Bytes::mib(300));
        memory.observe(&s);
        let model = Model::new(&config, &s, &memory);
        let decided = crate::policy::decide(&model, &memory, &[]);
        let refused = |a: &Action| Outcome {
            vm: a.vm,
            error: (a.vm == ID).then(|| "Parameter 'target' expects a size".into()),
            refused: a.vm == ID,
            ..Outcome::default()
        };
        let outcomes: Vec<Outcome> = decided.plan.actions.iter().map(refused).collect();
        asked.extend(decided.plan.actions.iter().filter(|a| a.vm == ID).map(|_| second));
        others += usize::from(decided.plan.actions.iter().any(|a| a.vm == other && !a.gives()));
        memory.learn(&model, &decided, &outcomes, true);
        let m = memory.of(ID);
        assert!(m.order.is_none() && m.stuck_until.is_none());
    }
    let gaps: Vec<u64> = asked.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps.len() >= 2 && gaps.iter().all(|gap| (30..=32).contains(gap)), "{asked:?}");
    assert!(others > 0);
}

#[test]
fn who_does_not_follow_is_left_alone_twice_as_long_each_time() {
    let mut memory = Memory::default();
    let mut left = Vec::new();
    for at in [10_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000, 6_000_000] {
        let s = sample(at, vec![vm(1024, 600, 900)]);
        act(&mut memory, &s, Some((1024, 1024, Reason::Withdrawn)));
        left.push(memory.vms[0].stuck_until.unwrap().since(Stamp(at)) / 1000);
    }
    assert_eq!(left, [30, 60, 120, 240, 480, 600, 600]);
}

#[test]
fn what_was_given_and_never_came_is_ordered_again() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let take = short(Pressure::Hard);
    act(&mut memory, &sample(2_000, vec![vm(1024, 600, 900)]), Some((1024, 400, take)));
    tick(&mut memory, &sample(3_000, vec![vm(400, 100, 400)]));
    let given = Reason::GuestShort { signs: String::new() };
    act(&mut memory, &sample(30_000, vec![vm(400, 10, 400)]), Some((400, 656, given)));
    // QEMU has not got it, or was told something else since: nothing moves.
    let mut ordered = false;
    for s in 31..=90u64 {
        let model = tick(&mut memory, &sample(s * 1_000, vec![vm(400, 10, 400)]));
        let plan = crate::policy::decide(&model, &memory, &[]).plan;
        ordered |= plan.actions.iter().any(|a| a.to > Bytes::mib(400));
    }
    assert!(ordered, "it has 10 MiB available, the host 8 GiB");
}

#[test]
fn a_balloon_that_is_where_it_was_told_to_be_grows_no_more() {
    let inflates = |orders: &[(u64, u64)], then: u64| {
        let mut memory = Memory::default();
        for (n, (size, to)) in orders.iter().enumerate() {
            let s = sample(1_000 + 100 * n as u64, vec![vm(*size, 600, 900)]);
            act(&mut memory, &s, Some((*size, *to, short(Pressure::Hard))));
        }
        tick(&mut memory, &sample(2_000, vec![vm(then, 500, 800)]));
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
        let said = |size: u64, free: u64, age_ms: u64, resident: u64| {
            let mut vm = vm(size, free, resident);
            vm.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = age_ms;
            vm
        };
        tick(&mut memory, &sample(1_000, vec![said(900, 300, 0, 800)]));
        for (at, size) in [(2_000, 950), (2_100, 1000)] {
            tick(&mut memory, &sample(at, vec![said(size, 300, at - 1_000, 800)]));
            assert!(memory.vms[0].ledger.left_ms(Stamp(at)).is_some(), "it seemed to have enough");
        }
        tick(&mut memory, &sample(3_000, vec![said(1000, left, 500, 800 + touched)]));
        memory.vms[0].ledger.left_ms(Stamp(3_000)).is_some()
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
            let mut vm = vm(size, 400, resident);
            vm.process.as_mut().unwrap().swap = Bytes::mib(swap);
            let said = vm.balloon.as_mut().unwrap().guest.as_mut().unwrap();
            (said.age_ms, said.caches) = (age_ms, Some(Bytes::mib(caches[word])));
            tick(&mut memory, &sample(at, vec![vm]));
        }
        memory.vms[0].ledger.left_ms(Stamp(3_000)).is_some()
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
        tick(&mut memory, &sample(1_000, vec![vm(900, 200 + grew, 900)]));
        tick(&mut memory, &sample(2_000, vec![vm(900, 200, 900)]));
        let mut moved = vm(916, 200, 916);
        moved.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = 500;
        tick(&mut memory, &sample(2_500, vec![moved]));
        memory.vms[0].ledger.left_ms(Stamp(2_500)).is_some()
    };
    assert!(left_alone(10), "somebody raised its size");
    assert!(!left_alone(300), "150 of 200 MiB may have been used up in half a second");
}

/// The guest may shrink its balloon itself, and has not.
#[test]
fn a_size_that_an_operator_raised_and_lowers_again_is_theirs() {
    for (then, owed) in [(800, 0), (500, 0)] {
        let mut memory = Memory::default();
        let whole = sample(1_000, vec![vm(1024, 600, 900)]);
        act(&mut memory, &whole, Some((1024, 600, short(Pressure::Hard))));
        for s in 2..40 {
            let size = match s {
                ..10 => 600,
                10..20 => 1000,
                _ => then,
            };
            tick(&mut memory, &sample(s * 1000, vec![vm(size, size - 400, 400)]));
        }
        let model = tick(&mut memory, &sample(40_000, vec![vm(then, then - 400, 400)]));
        assert_eq!(only(&model).owed, Bytes::mib(owed), "{then}");
        let left = memory.vms[0].ledger.left_ms(Stamp(40_000));
        assert!(left > Some(570_000), "{left:?}");
    }
}

/// It has as little as Ebb leaves to a guest when an operator raises its size.
#[test]
fn a_guest_that_has_little_left_and_touches_nothing_has_not_deflated_its_balloon() {
    let owed = |touched: u64| {
        let mut memory = Memory::default();
        let whole = sample(1_000, vec![vm(1024, 600, 900)]);
        act(&mut memory, &whole, Some((1024, 500, short(Pressure::Hard))));
        for s in 2..40 {
            let (size, left, held) = match s {
                ..10 => (500, 110, 450),
                // Its word is from before.
                10 => (900, 110, 450 + touched),
                11..20 => (900, 510 - touched, 450 + touched),
                _ => (800, 410 - touched, 450 + touched),
            };
            let mut its = vm(size, left, held);
            let age_ms = if s == 10 { 1000 } else { 0 };
            its.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = age_ms;
            tick(&mut memory, &sample(s * 1000, vec![its]));
            let alone = memory.vms[0].ledger.left_ms(Stamp(s * 1000)).is_some();
            assert_eq!(alone, s > 10 && touched == 0, "{s}: {touched}");
        }
        memory.vms[0].ledger.owed(Bytes::mib(1024), Bytes::mib(800)).0 >> 20
    };
    assert_eq!((owed(0), owed(300)), (0, 224));
}

/// Its balloon gives up 20 MiB, and Ebb gives it much more at once.
#[test]
fn what_ebb_gives_to_a_guest_that_deflated_its_balloon_makes_no_operator() {
    let mut memory = Memory::default();
    let whole = sample(1_000, vec![vm(1024, 600, 900)]);
    act(&mut memory, &whole, Some((1024, 500, short(Pressure::Hard))));
    for s in 2..10 {
        tick(&mut memory, &sample(s * 1000, vec![vm(500, 60, 450)]));
    }
    let mut its = vm(520, 60, 470);
    its.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = 1000;
    let given = Some((520, 900, Reason::GuestShort { signs: String::new() }));
    act(&mut memory, &sample(10_000, vec![its]), given);
    for s in 11..14 {
        tick(&mut memory, &sample(s * 1000, vec![vm(900, 420, 480)]));
        assert_eq!(memory.vms[0].ledger.left_ms(Stamp(s * 1000)), None, "{s}");
    }
}

/// What Ebb orders beside an operator's size, and what the driver gives on the way, undo nothing.
#[test]
fn a_size_that_an_operator_raised_stays_theirs_though_the_balloon_passes_an_order_of_ebb() {
    let mut memory = Memory::default();
    let look = |at: u64, size: u64| {
        let mut its = vm(size, 300, 800);
        its.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = at - 1_000;
        sample(at, vec![its])
    };
    tick(&mut memory, &look(1_000, 900));
    let given = Some((950, 1000, Reason::GuestShort { signs: String::new() }));
    act(&mut memory, &look(2_000, 950), given);
    tick(&mut memory, &look(2_100, 1010));
    assert!(memory.vms[0].ledger.left_ms(Stamp(2_100)).is_some());
}

/// It has hung: what it is owed is ordered again and again.
#[test]
fn what_a_guest_was_given_that_does_not_follow_does_not_count_as_spent_for_good() {
    let mut memory = Memory::default();
    let all = sample(1_000, vec![vm(1024, 600, 900)]);
    act(&mut memory, &all, Some((1024, 400, short(Pressure::Hard))));
    let (mut orders, mut spent) = (0, Vec::new());
    for s in 2..60 {
        let mut its = vm(400, 200, 300);
        let said = its.balloon.as_mut().unwrap().guest.as_mut().unwrap();
        said.age_ms = if s < 5 { 0 } else { (s - 4) * 1000 };
        let seen = sample(s * 1000, vec![its]);
        memory.observe(&seen);
        let model = Model::new(&Config::default(), &seen, &memory);
        let mut decided = crate::policy::decide(&model, &memory, &[]);
        if s < 10 {
            decided.plan.actions.clear();
        }
        orders += decided.plan.actions.len();
        memory.learn(&model, &decided, &carried_out(&decided.plan), true);
        if s >= 26 && only(&model).outstanding > Bytes::ZERO {
            spent.push(s);
        }
    }
    assert!(orders > 2, "it may follow when it lives again");
    assert_eq!(spent, [0; 0], "for 10 s, and not again for each order");
}
