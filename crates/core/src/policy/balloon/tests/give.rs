//! Who is given memory, how much and when: in distress, before it asks, back on a clear host.

use super::*;
use crate::state::LimitMemory;

#[test]
fn a_reset_brings_what_headroom_allows_and_often_nothing_more() {
    let ask = |headroom, resets| {
        let vm = VmModel { standing: Standing::GiveOnly("rebooted".into()), ..vm(1, 400, 300) };
        let (reboot, reset_at) = (Some(Reboot::default()), Some(NOW));
        let m = VmMemory { reboot, resets, reset_at, ..remembered(1) };
        sized(limited(host(Pressure::Soft, 500, 0), headroom, 200), vm, m)
    };
    assert_eq!(ask(2000, 1), Some(1023), "a driver that is to hold nothing writes no size");
    assert_eq!(ask(350, 1), Some(400 + 300), "down to the mark of critical");
    assert_eq!(ask(0, 1), Some(400 + 64), "swap is there for so much");
    // One that QEMU does not show already: then the new driver writes its size.
    assert_eq!(ask(2000, 3), Some(401), "it resets again and again");
}

/// Each time it would be told the same, and the journal would fill.
#[test]
fn one_that_cannot_move_is_told_to_grow_once() {
    let ask = |change: fn(&mut VmModel, &mut VmMemory)| {
        let (mut vm, mut m) = (vm(1, 400, 300), remembered(1));
        (m.unmoved, m.last_give) = (true, ago(11_000));
        change(&mut vm, &mut m);
        sized(host(Pressure::Clear, 0, 4000), vm, m)
    };
    assert!(ask(|_, _| ()).is_some(), "QEMU may not have got it");
    assert_eq!(ask(|vm, _| vm.paused = true), None);
    assert!(ask(|vm, m| (vm.paused, m.unmoved) = (true, false)).is_some());
    assert!(ask(|vm, m| (vm.paused, m.last_give) = (true, ago(600_000))).is_some());
}

#[test]
fn what_others_ordered_is_not_given_back_by_a_clear_host() {
    let theirs = VmModel { whole: Bytes::mib(700), owed: Bytes::ZERO, ..vm(1, 700, 500) };
    let v = decide(host(Pressure::Clear, 0, 1000), vec![theirs.clone()], vec![]);
    assert_eq!(v[0], Verdict::Hold("host is clear, nothing is owed to it".into()));
    let theirs = VmModel { distress: "short".into(), ..theirs };
    let theirs = says(theirs, |g| g.available = Bytes::mib(10));
    let to = sized(limited(host(Pressure::Clear, 0, 0), 4000, 100), theirs, remembered(1));
    assert!(to >= Some(764), "what it needs it is given: {to:?}");
}

#[test]
fn a_ceiling_holds_for_a_guest_in_distress_too() {
    let ask = |ceiling| {
        let one = says(short(1, 500, 10), |g| g.need = Bytes::mib(900));
        let one = VmModel { ceiling: Bytes::mib(ceiling), ..one };
        sized(limited(host(Pressure::Clear, 0, 0), 4000, 100), one, remembered(1))
    };
    assert_eq!((ask(600), ask(500)), (Some(600), None));
    assert!(ask(1024) > Some(900));
}

#[test]
fn what_keeps_a_guest_from_harm_is_given_whatever_the_hosts_state() {
    for state in [Pressure::Clear, Pressure::Soft, Pressure::Hard, Pressure::Critical] {
        let v = decide(host(state, 2048, 0), vec![short(1, 400, 20), vm(2, 1024, 900)], vec![]);
        assert!(size(&v[0]) >= Some(464), "{state}: {v:?}");
        assert!(matches!(&v[0], Verdict::Set { reason: Reason::GuestShort { .. }, .. }));
    }
    let given = |again: bool| {
        let last_give = ago(1000).filter(|_| again);
        let m = VmMemory { last_give, ..remembered(1) };
        sized(host(Pressure::Clear, 0, 4000), short(1, 400, 20), m).unwrap()
    };
    assert!(given(true) >= 380 + 160 && given(true) >= given(false), "short again: more");
}

#[test]
fn what_headroom_does_not_cover_waits_until_others_have_freed_it() {
    let at = |headroom| {
        let host = limited(host(Pressure::Clear, 0, 0), headroom, 400);
        let model = model(host, vec![short(1, 400, 30), vm(2, 1024, 900)]);
        balloon(&model, &Memory::default(), &[], &[])
    };
    let none = at(0);
    assert_eq!(size(&none.verdicts[0]), Some(464), "kept from harm at once, by swap");
    assert!(size(&none.verdicts[1]).is_some(), "the idle are asked though the host is clear");
    let some = at(200);
    assert!(size(&some.verdicts[0]) >= Some(464));
    let enough = at(2000);
    assert!(size(&enough.verdicts[0]) > Some(464) && enough.deferred == Bytes::ZERO);
    assert_eq!(size(&enough.verdicts[1]), None, "nobody is asked in vain");
}

#[test]
fn who_has_less_than_it_needed_lately_is_given_it_before_it_asks() {
    let ask = |host: HostModel, whole: u64, standing: Standing| {
        let m = VmMemory { recent: needed(700, 8_000), ..remembered(1) };
        let one = VmModel { whole: Bytes::mib(whole), standing, ..vm(1, 500, 200) };
        sized(host, one, m)
    };
    let clear = || host(Pressure::Clear, 0, 400);
    assert_eq!(ask(clear(), 1024, Standing::Ready), Some(700));
    assert_eq!(ask(clear(), 650, Standing::Ready), Some(650), "no more than others gave it");
    let only = || Standing::GiveOnly("its size was set, not by Ebb".into());
    assert_eq!(ask(clear(), 1024, only()), None, "it is left alone");
    let empty = limited(host(Pressure::Critical, 0, 0), 100, 2000);
    assert!(ask(empty, 1024, Standing::Ready) < Some(500), "not from what others need");
}

/// What is given to a guest that is short, and to another of ten times its weight.
fn beside_a_heavy_one(headroom: u64, heavy: VmModel, m: VmMemory) -> [u64; 2] {
    let short = says(short(1, 400, 10), |g| g.highest = Bytes::mib(700));
    let heavy = VmModel { weight: 10.0, ..heavy };
    let had = heavy.actual.unwrap().0 >> 20;
    let host = with_swap(limited(host(Pressure::Hard, 0, 0), headroom, 400), 0);
    let v = decide(host, vec![short, heavy], vec![remembered(1), m]);
    [size(&v[0]).unwrap_or(400) - 400, size(&v[1]).unwrap_or(had) - had]
}

#[test]
fn who_is_short_comes_before_who_is_only_likely_to_need_more() {
    // It needed 1000 MiB three seconds ago, and has touched 150 of 800.
    let likely = VmModel { resident: Some(Bytes::mib(150)), ..vm(2, 800, 700) };
    let m = VmMemory { recent: needed(1000, 3_000), ..remembered(2) };
    assert_eq!(beside_a_heavy_one(1100, likely, m)[0], 380, "all that it needed before");
    // One that is silent may be short as well.
    let silent = VmModel { unseen: "silent".into(), ..vm(2, 400, 300) };
    let given = beside_a_heavy_one(300, silent, remembered(2));
    assert!(given[1] > 0, "{given:?}");
}

/// It holds half of what it could touch, and grows.
#[test]
fn one_that_is_given_more_takes_what_it_had_before_too() {
    let size_of = |need: u64, (resident, own, counted, swap): (u64, u64, bool, u64)| {
        let growing = says(short(1, 400, 30), |g| {
            (g.need, g.highest) = (Bytes::mib(need), Bytes::mib(800));
        });
        let (resident, own) = (Some(Bytes::mib(resident)), Bytes::mib(own));
        let growing = VmModel { resident, own, own_is_counted: counted, ..growing };
        let host = with_swap(limited(host(Pressure::Soft, 0, 0), 300, 200), swap);
        sized(host, growing, remembered(1))
    };
    let given_at = |need, (resident, own, swap)| size_of(need, (resident, own, false, swap));
    let given = |resident, own, swap| given_at(200, (resident, own, swap));
    // A quarter of the reserve is kept.
    assert_eq!(given(500, 64, 0), Some(400 + 250), "all of its size is held");
    assert_eq!(given(380, 80, 0), Some(400 + 250 - 100));
    assert_eq!(given(300, 0, 1024), Some(400 + 250 - 100), "as far as was seen");
    assert_eq!(given(300, 0, 0), Some(400 + 250 - 164), "its VMM may hold 64 MiB");
    assert_eq!(given(300, 0, 40), Some(400 + 250 - 124), "which swap covers in part");
    assert_eq!(given_at(260, (264, 0, 0)), Some(400 + 250 - 140), "what it needs it has touched");
    assert_eq!(given(200, 0, 0), Some(464), "what keeps it from harm it is given in any case");
    let counted = size_of(200, (300, 0, true, 0));
    assert_eq!(counted, Some(400 + 250 - 100), "its VMM was counted, and holds nothing");
}

/// Its part is 500 MiB beyond its need of 200.
#[test]
fn what_is_missing_of_a_part_is_given_where_it_is_worth_an_order() {
    let given = |actual| {
        let m = VmMemory { recent: needed(700, 8_000), ..remembered(1) };
        sized(host(Pressure::Clear, 0, 400), vm(1, actual, actual - 200), m)
    };
    assert_eq!(given(700 - 76), Some(700), "15 % of it are 75");
    assert_eq!(given(700 - 74), None);
}

/// It needs 350 MiB, had 200 of page cache, and holds 500. The host has 60 beyond what it keeps.
#[test]
fn one_whose_need_has_grown_since_it_was_asked_is_given_its_whole_part() {
    let given = |need_then: Option<u64>, by_module| {
        let need_then = need_then.map(Bytes::mib);
        let recent = needed(350, 0);
        let m = VmMemory { recent, cached: needed(200, 0), need_then, ..remembered(1) };
        let one = says(vm(1, 500, 150), |g| g.by_module = by_module);
        sized(limited(host(Pressure::Soft, 0, 0), 260, 1000), one, m)
    };
    assert_eq!(given(Some(240), false), Some(560), "by more than a tenth of its RAM");
    assert_eq!(given(Some(260), false), None, "by less");
    assert_eq!(given(None, false), None, "it was never asked");
    assert_eq!(given(Some(240), true), None, "it reports what it reads again");
}

#[test]
fn statistics_from_before_it_was_given_memory_bring_no_more() {
    let ask = |age_ms| {
        let poor = says(short(1, 400, 60), |g| (g.age_ms, g.need) = (age_ms, Bytes::mib(280)));
        // It spoke at 300 MiB.
        let stats = Some((NOW, Bytes::mib(300), crate::sample::GuestStats::default()));
        let m = VmMemory { last_give: ago(500), stats, ..remembered(1) };
        // Swap alone is left: for what keeps it from harm.
        sized(limited(host(Pressure::Critical, 500, 0), 0, 0), poor, m)
    };
    assert_eq!((ask(200), ask(900)), (Some(400), Some(400)), "it has what its need asks for");
}

#[test]
fn a_clear_host_gives_back_slowly_and_first_to_the_tight() {
    let vms = || vec![vm(1, 700, 500), vm(2, 700, 300)];
    let v = decide(host(Pressure::Clear, 0, 700), vms(), vec![]);
    // A tenth of what is beyond one and a quarter reserves, 188 MiB.
    assert_eq!((size(&v[0]), size(&v[1])), (None, Some(719)));
    let m = VmMemory { last_take: ago(30_000), ..remembered(2) };
    let to = sized(host(Pressure::Clear, 0, 1000), vm(2, 700, 300), m);
    assert_eq!(to, None, "shrunk half a minute ago");
    let to = sized(host(Pressure::Clear, 0, 0), vm(1, 700, 300), remembered(1));
    assert_eq!(to, None, "no surplus");
}

#[test]
fn a_clear_host_gives_back_first_to_those_of_the_largest_weight() {
    let given = |weight, available| {
        let heavy = VmModel { weight, ..vm(2, 700, 500) };
        let v = decide(host(Pressure::Clear, 0, 700), vec![vm(1, 700, available), heavy], vec![]);
        [size(&v[0]).is_some(), size(&v[1]).is_some()]
    };
    assert_eq!((given(1.0, 490), given(2.0, 490)), ([true, false], [false, true]));
}

#[test]
fn a_host_with_much_free_memory_gives_back_though_not_everybodys_margins_fit() {
    let thin = |pid, actual: u64| {
        let one = VmModel { resident: Some(Bytes::mib(100)), ..vm(pid, actual, actual - 60) };
        says(one, |g| (g.buffer, g.deflate_on_oom) = (Bytes::mib(256), false))
    };
    let vms = (1..10).map(|pid| thin(pid, if pid == 1 { 500 } else { 1024 })).collect();
    // Five reserves are there; all guests together need 540 MiB.
    let v = decide(limited(host(Pressure::Clear, 0, 0), 4000, 800), vms, vec![]);
    assert!(size(&v[0]) > Some(500), "{:?}", v[0]);
}

/// Neither headroom nor swap is left. What the host holds of it, its VMM has 40 MiB of.
#[test]
fn what_the_host_holds_whatever_a_balloon_does_is_given_back_at_once() {
    let given = |pinned: bool, resident: u64| {
        let pinned = pinned.then(|| "a VFIO device pins it".into());
        let (own, resident) = (Bytes::mib(40), Some(Bytes::mib(resident)));
        let one = VmModel { pinned, own, own_is_counted: true, resident, ..short(1, 400, 10) };
        sized(dry(0, 200), one, remembered(1))
    };
    assert_eq!(given(true, 1064), Some(1024));
    assert_eq!(given(true, 840), Some(800), "a part of it is gone");
    assert!(given(true, 440) <= Some(400) && given(false, 1064) <= Some(400));
}

/// What is owed may be less than what is else worth an order.
#[test]
fn the_last_mebibytes_that_are_owed_are_given_back() {
    let one = VmModel { whole: Bytes::mib(800), owed: Bytes::mib(2), ..vm(1, 798, 500) };
    let all = actions(host(Pressure::Clear, 0, 4000), one, remembered(1));
    assert_eq!(all.iter().map(|a| a.to).collect::<Vec<_>>(), [Bytes::mib(800)]);
}

#[test]
fn one_that_waits_for_its_memory_is_told_for_what() {
    let why = |spare: u64, vms: Vec<VmModel>| {
        let host = limited(host(Pressure::Clear, 0, 0), 200 + 50 + spare, 200);
        match decide(host, vms, vec![]).pop() {
            Some(Verdict::Hold(why)) => why,
            other => panic!("{other:?}"),
        }
    };
    let nothing = "13 MiB ballooned; host has nothing to spare beside its reserve and a margin";
    assert_eq!(why(0, vec![vm(1, 1011, 500)]), nothing);
    let second = why(100, vec![vm(1, 1011, 500), vm(2, 1011, 500)]);
    assert_eq!(second, "13 MiB ballooned; the host gives back slowly, others first");
}

#[test]
fn a_clear_host_gives_nothing_to_who_is_to_be_left_alone() {
    let ask = |change: fn(&mut VmModel, &mut VmMemory)| {
        let (mut one, mut m) = (vm(1, 600, 300), remembered(1));
        change(&mut one, &mut m);
        sized(host(Pressure::Clear, 0, 4000), one, m)
    };
    assert!(ask(|_, _| ()).is_some());
    assert_eq!(ask(|_, m| m.ledger.foreign = ago(1000)), None, "others set it");
    let hands_off = ask(|vm, _| {
        vm.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: false });
        vm.standing = Standing::GiveOnly("hands off".into());
    });
    assert_eq!(hands_off, None);
}

#[test]
fn a_vm_outside_of_the_full_cgroup_is_given_back_what_the_machine_can_spare() {
    let limit = |name: &str, headroom, reserve| {
        let (headroom, reserve) = (Bytes::mib(headroom), Bytes::mib(reserve));
        Limit { name: name.into(), headroom, reserve, ..Limit::default() }
    };
    let ask = |machine| {
        let pool = limit("/pool", 600, 1_000);
        let shown = Limit { state: Pressure::Soft, shortage: Bytes::mib(400), vms: 1, ..pool };
        let limits = vec![limit("host", machine, 2_000), shown.clone()];
        let full = HostModel { shown, limits, ..host(Pressure::Soft, 400, 0) };
        let one = VmModel { outside: true, cgroup: Some("/other".into()), ..vm(1, 400, 300) };
        let inside = VmModel { cgroup: Some("/pool/a".into()), ..vm(2, 1024, 100) };
        let v = decide(full, vec![one, inside], vec![]);
        assert!(size(&v[1]) <= Some(1024));
        size(&v[0])
    };
    assert!(ask(20_000) > Some(400));
    assert_eq!(ask(2_400), None, "the machine has no more than it is to keep");
}

/// A machine with headroom, and limits without: slices, and node 0. Below `/b` and `/a/x` and on node
/// 0 there is a guest each that is short, and is to have 110 MiB more, from swap. The machine has
/// `swap` MiB of it, and each limit may use what stands beside its name. `outstanding`: what the first
/// guest was given a moment ago, if it is not short.
fn beyond_full_limits(full: &[(&str, u64)], swap: u64, outstanding: u64) -> [u64; 2] {
    let limit = |name: &str, headroom, its: u64| Limit {
        name: name.into(),
        nodes: if name == "node 0" { vec![0] } else { vec![] },
        headroom: Bytes::mib(headroom),
        reserve: Bytes::mib(100),
        swap_left: Bytes::mib(its.min(swap)),
        state: Pressure::Critical,
        ..Limit::default()
    };
    let full = full.iter().map(|(name, its)| limit(name, 10, *its));
    let limits: Vec<_> = std::iter::once(limit("host", 5_000, swap)).chain(full).collect();
    let host = HostModel { shown: limits[1].clone(), limits, ..host(Pressure::Critical, 0, 0) };
    let one = |pid, slice: &str| {
        let its = short(pid, 400, 0);
        let guest = its.guest.map(|g| GuestModel { short_mark: Bytes::mib(55), ..g });
        VmModel { guest, cgroup: Some(format!("{slice}/{pid}")), ..its }
    };
    let first = match outstanding {
        0 => VmModel { nodes: vec![0], ..one(1, "/a/x") },
        // It was given that a moment ago, and grows.
        mib => VmModel {
            outstanding: Bytes::mib(mib),
            distress: String::new(),
            cgroup: Some("/a/x/1".into()),
            resident: Some(Bytes::mib(400)),
            ..grows(vm(1, 400 + mib, mib), 400)
        },
    };
    let v = decide(host, vec![first, one(2, "/b")], vec![]);
    [0, 1].map(|i| size(&v[i]).unwrap_or(400) - 400)
}

#[test]
fn swap_of_the_machine_is_granted_once_where_guests_of_several_slices_are_short() {
    let given = |of_each, swap, outstanding| {
        beyond_full_limits(&[("/a", of_each), ("/b", of_each)], swap, outstanding)
    };
    assert_eq!(given(150, 1_000, 0), [110, 110]);
    let [a, b] = given(1_000, 150, 0);
    assert!(a + b <= 150 && a.min(b) >= 20, "{a} {b}");
    let [_, b] = given(1_000, 150, 110);
    assert!(b <= 42, "the first will touch 110 of it: {b}");
}

#[test]
fn swap_that_is_drawn_under_several_limits_of_a_guest_is_drawn_once() {
    for inner in ["/a/x", "node 0"] {
        let full = [("/a", 150), (inner, 150)];
        assert_eq!(beyond_full_limits(&full, 150, 0)[0], 110, "{inner}");
    }
    // The first will touch 110 MiB.
    assert_eq!(beyond_full_limits(&[("/a", 250), ("/a/x", 250), ("/b", 250)], 250, 110)[1], 110);
}

/// The first guest will touch 110 MiB of what it has.
#[test]
fn guests_that_may_not_swap_draw_no_swap_of_the_machine() {
    assert_eq!(beyond_full_limits(&[("/a", 0), ("/b", 150)], 150, 110)[1], 110);
}

/// The size of a guest that is short. Another one was given all that it has left, and grows.
fn beside_one_that_was_given(
    (actual, left): (u64, u64),
    rate: u64,
    mut host: HostModel,
) -> Option<u64> {
    let (resident, outstanding) = (Some(Bytes::mib(400)), Bytes::mib(left));
    let other = VmModel { resident, outstanding, ..grows(vm(2, actual, left), rate) };
    host.shown.outstanding = outstanding;
    size(&decide(host, vec![short(1, 400, 10), other], vec![])[0])
}

/// Another was given 200 MiB a moment ago. It needs all that the host holds for it, and no more.
#[test]
fn one_that_has_nothing_left_does_not_wait_for_the_margin_of_another() {
    let given = |rate: u64| beside_one_that_was_given((600, 200), rate, dry(100, 200));
    assert!(given(0) >= Some(464), "80 MiB but for the last tenth: {:?}", given(0));
    assert_eq!(given(100), Some(400), "the other will touch 150 MiB in a moment");
}

/// Swap is all that there is: 540 MiB, of which another was given 500 a moment ago.
#[test]
fn swap_that_another_was_given_and_will_touch_is_given_to_nobody_else() {
    let given =
        |rate: u64| beside_one_that_was_given((900, 500), rate, with_swap(dry(0, 200), 540));
    assert!(given(0) >= Some(464), "the other needs nothing of it: {:?}", given(0));
    assert!(given(400) <= Some(420), "it will touch all of it: {:?}", given(400));
}

#[test]
fn an_order_to_grow_that_was_refused_is_sent_again_after_a_second() {
    let given = |ms: u64| {
        let m = VmMemory { grow_refused: ago(ms), ..remembered(1) };
        sized(limited(host(Pressure::Clear, 0, 0), 4000, 200), short(1, 400, 10), m)
    };
    assert_eq!(given(100), None);
    assert!(given(1_000) > Some(400));
}

#[test]
fn one_that_is_below_its_floor_is_given_it_though_little_is_missing() {
    let with = |floor| {
        let one = VmModel { floor: Bytes::mib(floor), ..vm(1, 820, 620) };
        sized(limited(host(Pressure::Clear, 0, 0), 400, 400), one, remembered(1))
    };
    assert_eq!((with(800), with(824)), (None, None));
    assert!(with(900).is_some_and(|to| to >= 900), "{:?}", with(900));
}

/// Eight guests that need 100 MiB, and 700 at times, on a host with 2500 MiB beyond what they hold.
#[test]
fn a_host_gives_back_where_what_is_needed_by_turns_fits_though_all_peaks_together_do_not() {
    let given = |together: u64, came: u32| {
        let vms = (1..9).map(|pid| vm(pid, 400, 300)).collect();
        let m = |pid| VmMemory { recent: needed(700, 300_000), ..remembered(pid) };
        let (name, needs) = ("host".into(), needed(together, 300_000));
        let joined = (1..=came).map(|pid| (VmId { pid, start: 1 }, NOW)).collect();
        let limits = vec![LimitMemory { name, needs, joined, ..LimitMemory::default() }];
        let memory = Memory { limits, ..memory((1..9).map(m).collect()) };
        let model = model(limited(host(Pressure::Clear, 0, 0), 2500, 800), vms);
        let v = balloon(&model, &memory, &[], &[]).verdicts;
        v.iter().filter_map(size).collect::<Vec<_>>()
    };
    assert_eq!(given(8 * 700, 0), [0; 0], "all at once");
    assert_eq!(given(700 + 7 * 100, 0), [430], "one at a time: a tenth of 300 MiB");
    assert_eq!(given(700 + 7 * 100, 1), [0; 0], "one came since: it may need 700 beside that");
}
