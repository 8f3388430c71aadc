//! Ballooning, both ways, on small hosts.

use super::*;
use crate::model::{GuestModel, HostModel, Limit};
use crate::sample::VmId;
use crate::state::{Order, Recent, Yields};
use crate::units::Stamp;

const NOW: Stamp = Stamp(1_000_000);

/// A host that keeps 2 GiB, lacks so much of it or has so much beyond it.
fn host(state: Pressure, shortage: u64, surplus: u64) -> HostModel {
    HostModel {
        state,
        stalled: state,
        shortage: Bytes::mib(shortage),
        reserve: Bytes::gib(2),
        headroom: Bytes::gib(2) + Bytes::mib(surplus) - Bytes::mib(shortage),
        known: true,
        ..HostModel::default()
    }
}

/// The same under one limit with 1 GiB of swap.
fn limited(host: HostModel, headroom: u64, reserve: u64) -> HostModel {
    let (headroom, reserve) = (Bytes::mib(headroom), Bytes::mib(reserve));
    let name = "host".to_string();
    let limit = Limit { name, headroom, reserve, swap_left: Bytes::gib(1) };
    HostModel { headroom, reserve, limits: vec![limit], ..host }
}

/// A ready 1 GiB guest, all of it resident, floor 256 MiB.
fn vm(pid: u32, actual: u64, available: u64) -> VmModel {
    let g = GuestModel {
        available: Bytes::mib(available),
        need: Bytes::mib(actual - available),
        working_set: Bytes::mib(actual - available),
        idle: Bytes::mib(available),
        buffer: Bytes::mib(80),
        short_mark: Bytes::mib(40),
        deflate_on_oom: true,
        ..GuestModel::default()
    };
    VmModel {
        id: VmId { pid, start: 1 },
        name: format!("vm{pid}"),
        ram: Some(Bytes::gib(1)),
        actual: Some(Bytes::mib(actual)),
        floor: Bytes::mib(256),
        ceiling: Bytes::gib(1),
        whole: Bytes::gib(1),
        owed: Bytes::gib(1) - Bytes::mib(actual),
        managed: true,
        weight: 1.0,
        resident: Some(Bytes::mib(actual)),
        guest: Some(g),
        standing: Standing::Ready,
        ..VmModel::default()
    }
}

fn decide(host: HostModel, vms: Vec<VmModel>, remembered: Vec<VmMemory>) -> Vec<Verdict> {
    let model = Model { at: NOW, dt_ms: 1000, host, vms };
    let memory = Memory { vms: remembered, ..Memory::default() };
    balloon(&model, &memory, &[], Bytes::ZERO).verdicts
}

fn remembered(pid: u32) -> VmMemory {
    VmMemory { id: VmId { pid, start: 1 }, ..VmMemory::default() }
}

fn size(v: &Verdict) -> Option<u64> {
    match v {
        Verdict::Set { to, .. } => Some(to.0 >> 20),
        Verdict::Hold(_) => None,
    }
}

#[test]
fn a_size_that_was_just_set_by_others_is_not_set_back() {
    let mut m = remembered(1);
    let size = |m: &VmMemory, change: fn(&mut VmModel)| {
        let mut vm = vm(1, 600, 300);
        change(&mut vm);
        size(&decide(host(Pressure::Clear, 0, 4000), vec![vm], vec![m.clone()])[0])
    };
    let off = |vm: &mut VmModel| {
        (vm.managed, vm.standing) = (false, Standing::Off("manage = false".into()));
    };
    assert_eq!((size(&m, |_| ()), size(&m, off)), (Some(949), Some(1024)), "Ebb took it");
    m.ledger.suspect = true;
    assert_eq!((size(&m, |_| ()), size(&m, off)), (None, None), "it is not known who did");
    assert_eq!(size(&m, |vm| vm.unseen = "silent".into()), None);
    assert_eq!(size(&m, |vm| vm.distress = "short".into()), None, "for one tick");
}

/// It needed so much so long ago.
fn needed(mib: u64, ms: u64) -> Recent {
    let mut recent = Recent::default();
    recent.see(Stamp(NOW.0 - ms), Bytes::mib(mib));
    recent
}

#[test]
fn who_brings_nothing_is_not_asked() {
    let pinned = VmModel { pinned: Some("a VFIO device pins it".into()), ..vm(1, 1024, 900) };
    let vms = || vec![pinned.clone(), vm(2, 1024, 900)];
    let v = decide(host(Pressure::Critical, 400, 0), vms(), vec![]);
    assert_eq!((size(&v[0]), size(&v[1])), (None, Some(624)), "nothing is expected of it");
    assert_eq!(v[0], Verdict::Hold("ballooning it frees nothing: a VFIO device pins it".into()));
    let model = Model { at: NOW, dt_ms: 1000, host: host(Pressure::Clear, 0, 0), vms: vms() };
    let v = balloon(&model, &Memory::default(), &[Reclaim::default()], Bytes::ZERO).verdicts;
    assert!(size(&v[0]).is_none() && size(&v[1]).is_some(), "nor by the operator");
    let yields = Yields { barren_until: Some(NOW.plus(120_000)), ..Yields::default() };
    let m = VmMemory { yields, ..remembered(1) };
    let v = decide(host(Pressure::Critical, 400, 0), vec![vm(1, 1024, 900)], vec![m]);
    let Verdict::Hold(why) = &v[0] else { panic!("{v:?}") };
    assert!(why.contains("had nothing of it: asked again in 2 min"), "{why}");
}

#[test]
fn a_reset_brings_what_headroom_allows_and_often_nothing_more() {
    let ask = |headroom, resets| {
        let vm = VmModel { standing: Standing::GiveOnly("rebooted".into()), ..vm(1, 400, 300) };
        let (reboot, reset_at) = (Some(Reboot::default()), Some(NOW));
        let m = VmMemory { reboot, resets, reset_at, ..remembered(1) };
        let host = limited(host(Pressure::Soft, 500, 0), headroom, 200);
        size(&decide(host, vec![vm], vec![m])[0])
    };
    assert_eq!(ask(2000, 1), Some(1024));
    assert_eq!(ask(350, 1), Some(400 + 300), "down to the mark of critical");
    assert_eq!(ask(0, 1), Some(400 + 64), "swap is there for so much");
    assert_eq!(ask(2000, 3), Some(400), "it resets again and again");
}

#[test]
fn what_others_ordered_is_not_given_back_by_a_clear_host() {
    let theirs = VmModel { whole: Bytes::mib(700), owed: Bytes::ZERO, ..vm(1, 700, 500) };
    let v = decide(host(Pressure::Clear, 0, 1000), vec![theirs.clone()], vec![]);
    assert_eq!(v[0], Verdict::Hold("host is clear, nothing is owed to it".into()));
    let mut short = VmModel { distress: "short".into(), ..theirs };
    short.guest.as_mut().unwrap().available = Bytes::mib(10);
    let v = decide(limited(host(Pressure::Clear, 0, 0), 4000, 100), vec![short], vec![]);
    assert!(size(&v[0]) >= Some(764), "what it needs it is given: {v:?}");
}

#[test]
fn a_ceiling_holds_for_a_guest_in_distress_too() {
    let mut short = VmModel { distress: "short".into(), ..vm(1, 500, 10) };
    short.guest.as_mut().unwrap().need = Bytes::mib(900);
    let ask = |ceiling| {
        let one = VmModel { ceiling: Bytes::mib(ceiling), ..short.clone() };
        size(&decide(limited(host(Pressure::Clear, 0, 0), 4000, 100), vec![one], vec![])[0])
    };
    assert_eq!((ask(600), ask(500)), (Some(600), None));
    assert!(ask(1024) > Some(900));
}

#[test]
fn who_is_not_managed_any_more_has_what_was_taken_returned() {
    let off = Standing::Off("manage = false in the configuration".into());
    let one = VmModel { managed: false, standing: off, ..vm(1, 400, 300) };
    let v = decide(host(Pressure::Critical, 500, 0), vec![one.clone()], vec![]);
    assert_eq!(v[0], Verdict::Set { to: Bytes::gib(1), reason: Reason::Returned });
    let v = decide(
        host(Pressure::Critical, 500, 0),
        vec![VmModel { owed: Bytes::ZERO, ..one }],
        vec![],
    );
    assert!(size(&v[0]).is_none());
}

#[test]
fn an_order_that_moves_nothing_is_withdrawn_and_one_under_way_is_waited_for() {
    let order = |to, age| VmMemory {
        order: Some(Order {
            to: Bytes::mib(to),
            moved_from: Bytes::mib(1024),
            moved_at: Stamp(NOW.0 - age),
            still_ms: age,
            since: Stamp(NOW.0 - age),
        }),
        ..remembered(1)
    };
    let ask = |m| decide(host(Pressure::Soft, 500, 0), vec![vm(1, 1024, 900)], vec![m]);
    let v = ask(order(900, 11_000));
    assert_eq!(v[0], Verdict::Set { to: Bytes::mib(1024), reason: Reason::Withdrawn });
    assert_eq!(size(&ask(order(900, 1_000))[0]), None, "still shrinking");
    assert_eq!(size(&ask(order(1010, 1_000))[0]), Some(1010 - 102), "nearly there");
}

#[test]
fn after_a_reboot_everything_is_returned_and_qemus_stale_size_refreshed() {
    let fresh = |actual| {
        let mut fresh = vm(1, actual, 300);
        fresh.standing = Standing::GiveOnly("rebooted".into());
        fresh
    };
    let ask = |r: Reboot, actual| {
        let m = VmMemory { reboot: Some(r), ..remembered(1) };
        decide(host(Pressure::Critical, 500, 0), vec![fresh(actual)], vec![m]).remove(0)
    };
    let all = Verdict::Set { to: Bytes::gib(1), reason: Reason::Rebooted };
    let mut r = Reboot::default();
    assert_eq!(ask(r, 1024), all, "even where QEMU shows all: an order may be open");
    (r.given, r.to) = (Some(Stamp(NOW.0 - 5_000)), Some(Bytes::gib(1)));
    assert_eq!(size(&ask(r, 400)), None, "the new kernel has not spoken");
    r.speaks = true;
    let nudge = Verdict::Set { to: Bytes::mib(1023), reason: Reason::Refresh };
    assert_eq!(ask(r, 400), nudge);
    // Not while others handle its memory.
    let mut alone = fresh(400);
    alone.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: true });
    let m = VmMemory { reboot: Some(r), ..remembered(1) };
    let said = decide(host(Pressure::Critical, 500, 0), vec![alone], vec![m]).remove(0);
    assert_eq!(size(&said), None, "{said:?}");
    r.nudged = Some(NOW);
    assert_eq!(size(&ask(r, 400)), None, "on its way");
    assert_eq!(ask(r, 1023), all);
}

#[test]
fn a_request_takes_all_idle_memory_at_once_or_just_so_much() {
    let ask = |request: Reclaim| {
        let host = host(Pressure::Clear, 0, 0);
        let model =
            Model { at: NOW, dt_ms: 1000, host, vms: vec![vm(1, 1024, 624), vm(2, 1024, 224)] };
        let verdicts = balloon(&model, &Memory::default(), &[request], Bytes::ZERO).verdicts;
        (size(&verdicts[0]), size(&verdicts[1]))
    };
    assert_eq!(ask(Reclaim::default()), (Some(480), Some(880)), "need and a full buffer stay");
    let one = Reclaim { vm: Some("vm2".into()), bytes: None };
    assert_eq!(ask(one), (None, Some(880)));
    let some = Reclaim { vm: None, bytes: Some(Bytes::mib(172)) };
    assert_eq!(ask(some), (Some(1024 - 172), None), "from who pays most for it");
}

#[test]
fn a_request_takes_what_the_guest_needed_a_moment_ago_and_has_freed() {
    let m = VmMemory { recent: needed(900, 2_000), ..remembered(1) };
    let host = host(Pressure::Clear, 0, 2000);
    let model = Model { at: NOW, dt_ms: 1000, host, vms: vec![vm(1, 1024, 624)] };
    let memory = Memory { vms: vec![m], ..Memory::default() };
    let done = balloon(&model, &memory, &[Reclaim::default()], Bytes::ZERO);
    assert_eq!(size(&done.verdicts[0]), Some(400 + 80), "its need and its buffer stay");
}

#[test]
fn what_an_operator_asked_for_is_not_given_back_at_once() {
    let ask = |ago_ms: Option<u64>| {
        let m = VmMemory {
            recent: needed(700, 30_000),
            requested: ago_ms.map(|ms| Stamp(NOW.0 - ms)),
            last_take: ago_ms.map(|ms| Stamp(NOW.0 - ms)),
            ..remembered(1)
        };
        size(
            &decide(
                limited(host(Pressure::Clear, 0, 2000), 4000, 1000),
                vec![vm(1, 400, 300)],
                vec![m],
            )[0],
        )
    };
    assert!(ask(None).is_some_and(|to| to >= 700), "it needed so much lately");
    assert_eq!(ask(Some(1_000)), None);
    assert!(ask(Some(61_000)).is_some());
}

#[test]
fn nobody_is_asked_for_what_it_may_need_by_a_word_from_while_its_balloon_moved() {
    let ask = |unsure| {
        let m = VmMemory { unsure: Bytes::mib(unsure), ..remembered(1) };
        size(&decide(host(Pressure::Critical, 2048, 0), vec![vm(1, 1024, 624)], vec![m])[0])
    };
    assert_eq!((ask(0), ask(40), ask(200)), (Some(512), Some(512), Some(600)));
    // Nor by an operator who wants what is idle, or has set a lower size for it.
    let reclaim = |unsure| {
        let m = VmMemory { unsure: Bytes::mib(unsure), ..remembered(1) };
        let host = host(Pressure::Clear, 0, 2048);
        let model = Model { at: NOW, dt_ms: 1000, host, vms: vec![vm(1, 1024, 624)] };
        let memory = Memory { vms: vec![m], ..Memory::default() };
        let done = balloon(&model, &memory, &[Reclaim::default()], Bytes::ZERO);
        size(&done.verdicts[0]).unwrap()
    };
    assert!(reclaim(0) < 600 && reclaim(300) == 700, "{} {}", reclaim(0), reclaim(300));
    let lower = |unsure| {
        let m = VmMemory { unsure: Bytes::mib(unsure), ..remembered(1) };
        let one = VmModel { ceiling: Bytes::mib(600), ..vm(1, 800, 300) };
        size(&decide(host(Pressure::Clear, 0, 2048), vec![one], vec![m])[0])
    };
    assert!(lower(0).is_some_and(|to| to < 790) && lower(290) == Some(790), "{:?}", lower(0));
    assert_eq!(lower(300), None);
}

/// What was ordered before would go on for as long as the guest takes.
#[test]
fn an_order_to_shrink_ends_where_the_vm_is_to_be_left_alone() {
    let mut one = vm(1, 800, 300);
    one.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: false });
    one.standing = Standing::GiveOnly("hands off".into());
    let at = Stamp(1000);
    let moves = |to: u64| crate::state::Order {
        to: Bytes::mib(to),
        moved_from: Bytes::mib(900),
        moved_at: at,
        still_ms: 0,
        since: at,
    };
    let ordered = |to| {
        let mut m = remembered(1);
        m.order = Some(moves(to));
        decide(host(Pressure::Hard, 500, 0), vec![one.clone()], vec![m]).remove(0)
    };
    let to = Bytes::mib(800);
    assert_eq!(ordered(500), Verdict::Set { to, reason: Reason::HandsOff });
    assert_ne!(ordered(1000), Verdict::Set { to, reason: Reason::HandsOff }, "it grows");
}

#[test]
fn hands_off_means_hands_off() {
    let mut gone = vm(1, 400, 10);
    gone.distress = "short".into();
    gone.standing = Standing::Off("migrating".into());
    let v = decide(host(Pressure::Critical, 500, 0), vec![gone], vec![]);
    assert_eq!(v[0], Verdict::Hold("migrating".into()));
}

/// What is taken of the first, MiB.
fn taken(verdicts: &[Verdict], i: usize) -> u64 {
    size(&verdicts[i]).map_or(0, |to| 1024 - to)
}

#[test]
fn who_pays_most_for_idle_memory_is_asked_first_by_weight() {
    let mut heavy = vm(3, 1024, 600);
    heavy.weight = 2.0;
    let ask = |shortage| {
        let vms = vec![vm(1, 1024, 600), vm(2, 1024, 200), heavy.clone()];
        let v = decide(host(Pressure::Soft, shortage, 0), vms, vec![]);
        [taken(&v, 0), taken(&v, 1), taken(&v, 2)]
    };
    assert_eq!(ask(40), [40, 0, 0]);
    assert_eq!(
        ask(160),
        [102, 16, 43],
        "a tenth of RAM a second; with twice the weight, the second to be asked"
    );
}

#[test]
fn steps_are_larger_on_a_shorter_host_and_end_at_what_is_to_be_kept() {
    let ask = |state, shortage, available| {
        taken(&decide(host(state, shortage, 0), vec![vm(1, 1024, available)], vec![]), 0)
    };
    assert_eq!(ask(Pressure::Soft, 1400, 900), 102);
    assert_eq!(ask(Pressure::Hard, 1400, 900), 256);
    assert_eq!(ask(Pressure::Critical, 1400, 900), 512, "half of RAM at once");
    assert_eq!(ask(Pressure::Critical, 2048, 100), 100 - 24, "four tenths of a margin stay");
    let at = |actual, available| {
        let v = decide(host(Pressure::Critical, 2048, 0), vec![vm(1, actual, available)], vec![]);
        size(&v[0])
    };
    assert_eq!((at(300, 290), at(256, 250)), (Some(256), None), "never below the floor");
}

#[test]
fn where_all_are_short_what_was_given_is_not_taken_back_at_once() {
    let asked = |ago_ms, shortage, available| {
        let last_give = Some(Stamp(NOW.0 - ago_ms));
        let m = VmMemory { last_give, ..remembered(1) };
        let host = host(Pressure::Critical, shortage, 0);
        taken(&decide(host, vec![vm(1, 1024, available)], vec![m]), 0)
    };
    assert_eq!((asked(1000, 2048, 100), asked(4000, 2048, 100)), (100 - 80, 100 - 24));
    assert!(asked(1000, 1000, 900) > 0, "needs and least margins fit");
}

#[test]
fn what_keeps_a_guest_from_harm_is_given_whatever_the_hosts_state() {
    for state in [Pressure::Clear, Pressure::Soft, Pressure::Hard, Pressure::Critical] {
        let mut poor = vm(1, 400, 20);
        poor.distress = "20 MiB available".into();
        let v = decide(host(state, 2048, 0), vec![poor, vm(2, 1024, 900)], vec![]);
        assert!(size(&v[0]) >= Some(464), "{state}: {v:?}");
        assert!(matches!(&v[0], Verdict::Set { reason: Reason::GuestShort { .. }, .. }));
    }
    let given = |again: bool| {
        let mut poor = vm(1, 400, 20);
        poor.distress = "still".into();
        let last_give = again.then_some(Stamp(NOW.0 - 1000));
        let m = VmMemory { last_give, ..remembered(1) };
        size(&decide(host(Pressure::Clear, 0, 4000), vec![poor], vec![m])[0]).unwrap()
    };
    assert!(given(true) >= 380 + 160 && given(true) >= given(false), "short again: more");
}

#[test]
fn what_headroom_does_not_cover_waits_until_others_have_freed_it() {
    let mut poor = vm(1, 400, 30);
    poor.distress = "30 MiB available".into();
    let at = |headroom| {
        let h = limited(host(Pressure::Clear, 0, 0), headroom, 400);
        let model =
            Model { at: NOW, dt_ms: 1000, host: h, vms: vec![poor.clone(), vm(2, 1024, 900)] };
        balloon(&model, &Memory::default(), &[], Bytes::ZERO)
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
        size(&decide(host, vec![one], vec![m])[0])
    };
    let clear = || host(Pressure::Clear, 0, 400);
    assert_eq!(ask(clear(), 1024, Standing::Ready), Some(700));
    assert_eq!(ask(clear(), 650, Standing::Ready), Some(650), "no more than others gave it");
    let only = || Standing::GiveOnly("its size was set, not by Ebb".into());
    assert_eq!(ask(clear(), 1024, only()), None, "it is left alone");
    let empty = limited(host(Pressure::Critical, 0, 0), 100, 2000);
    assert!(ask(empty, 1024, Standing::Ready) < Some(500), "not from what others need");
}

/// A host with 2 GiB of reserve, and one guest with 500 MiB of page cache and 200 MiB free.
#[test]
fn cache_is_taken_below_three_quarters_of_the_reserve_and_free_memory_below_all_of_it() {
    let ask = |shortage, swap| {
        let mut one = vm(1, 1024, 700);
        one.guest.as_mut().unwrap().cache = Bytes::mib(500);
        let mut host = limited(host(Pressure::Hard, shortage, 0), 2048 - shortage, 2048);
        host.limits[0].swap_left = Bytes::mib(swap);
        taken(&decide(host, vec![one], vec![]), 0)
    };
    assert_eq!(ask(480, 0), 200 - 60, "what is free, but for a margin");
    assert_eq!(ask(800, 0), 256, "a step, cache with it");
    assert_eq!((ask(800, 2048), ask(1200, 2048)), (140, 176), "with swap below a half");
    assert_eq!(ask(0, 0), 0);
}

#[test]
fn cache_that_nobody_was_seen_to_read_again_is_not_all_idle() {
    let ask = |cache| {
        let mut one = vm(1, 1024, 900);
        one.guest.as_mut().unwrap().cache = Bytes::mib(cache);
        let v = decide(host(Pressure::Critical, 1100, 0), vec![one, vm(2, 1024, 900)], vec![]);
        (taken(&v, 0), taken(&v, 1))
    };
    let (none, some) = (ask(0), ask(900));
    assert_eq!(none.0, none.1);
    assert!(some.0 < none.0 && some.1 > none.1, "{none:?} {some:?}");
}

#[test]
fn doubted_guests_are_asked_gently_and_followers_faster() {
    let ask = |level, pace| {
        let mut one = vm(1, 1024, 900);
        one.trust.level = level;
        let m = VmMemory { pace, ..remembered(1) };
        taken(&decide(host(Pressure::Soft, 1400, 0), vec![one], vec![m]), 0)
    };
    assert_eq!((ask(1.0, 0), ask(0.5, 0), ask(1.0, 1), ask(1.0, 2)), (102, 51, 204, 409));
}

#[test]
fn what_a_slow_or_stuck_guest_does_not_bring_others_are_asked_for() {
    let ask = |still_ms, rate| {
        let order = Order {
            to: Bytes::mib(600),
            moved_from: Bytes::mib(1024),
            moved_at: Stamp(NOW.0 - still_ms),
            still_ms,
            since: Stamp(NOW.0 - 4_000),
        };
        let m = VmMemory { order: Some(order), rate, ..remembered(1) };
        let vms = vec![vm(1, 1024, 900), vm(2, 1024, 900)];
        taken(&decide(host(Pressure::Hard, 400, 0), vms, vec![m]), 1)
    };
    assert_eq!(ask(0, 1e9), 0, "424 MiB are on their way");
    assert_eq!(ask(0, (20 << 20) as f64), 256, "100 of them within five seconds");
    assert_eq!(ask(3_000, 1e9), 256, "none");
}

#[test]
fn what_was_needed_lately_is_kept_as_long_as_all_fits_and_the_oldest_goes_first() {
    let ask = |shortage| {
        let vms = vec![vm(1, 1024, 900), vm(2, 1024, 900)];
        let m = |pid, s: u64| VmMemory { recent: needed(900, s * 1000), ..remembered(pid) };
        let v = decide(host(Pressure::Critical, shortage, 0), vms, vec![m(1, 100), m(2, 10)]);
        (taken(&v, 0), taken(&v, 1))
    };
    assert_eq!(ask(100), (50, 50), "what is idle, of both alike");
    let (old, young) = ask(2000);
    assert!(old >= 420 && young <= 1024 - 900, "{old} {young}");
}

/// A guest that needed all that it has some time ago.
fn at_its_peak(pid: u32, ms: u64) -> (VmModel, VmMemory) {
    (vm(pid, 700, 600), VmMemory { recent: needed(700, ms), ..remembered(pid) })
}

#[test]
fn guests_stay_at_their_peaks_where_all_fit_though_margins_and_reserve_do_not() {
    let ((one, m), (two, n)) = (at_its_peak(1, 300_000), at_its_peak(2, 200_000));
    let ask = |headroom| {
        let host = limited(host(Pressure::Critical, 0, 0), headroom, 2000);
        let v = decide(host, vec![one.clone(), two.clone()], vec![m.clone(), n.clone()]);
        (taken(&v, 0), taken(&v, 1))
    };
    assert_eq!(ask(400), (0, 0), "a fifth of the reserve is there");
    assert!(ask(300).0 > 0, "the older peak does not fit");
}

#[test]
fn what_others_than_vms_used_lately_counts_as_a_guests_peak_does() {
    let ask = |peak: u64| {
        let (one, m) = at_its_peak(1, 300_000);
        let host = limited(host(Pressure::Critical, 0, 0), 500, 2000);
        let host = HostModel { capacity: Bytes::mib(500 + 700 + 100), ..host };
        let model = Model { at: NOW, dt_ms: 1000, host, vms: vec![one] };
        let memory = Memory { vms: vec![m], others: needed(peak, 60_000), ..Memory::default() };
        taken(&balloon(&model, &memory, &[], Bytes::ZERO).verdicts, 0)
    };
    assert_eq!(ask(100), 0);
    assert!(ask(500) > 0, "400 more than now");
}

#[test]
fn where_not_even_margins_fit_all_have_less_of_them() {
    let mut short = vm(1, 500, 10);
    short.distress = "short".into();
    let mut host = limited(host(Pressure::Critical, 0, 0), 0, 200);
    host.limits[0].swap_left = Bytes::ZERO;
    // Each of the others has its margin and no more.
    let vms = (2..8).map(|pid| vm(pid, 500, 60));
    let v = decide(host, std::iter::once(short).chain(vms).collect(), vec![]);
    assert!((1..7).all(|i| taken(&v, i) > 0), "{v:?}");
    assert!((1..7).all(|i| size(&v[i]) >= Some(440 + 24)), "less, not nothing: {v:?}");
}

#[test]
fn a_guest_whose_need_grows_keeps_what_it_will_need_in_a_moment() {
    let ask = |growth: u64, reserve| {
        let mut grows = vm(1, 1024, 500);
        let need = Bytes::mib(growth).0 as f64;
        let rates = crate::state::GuestRates { need, ..Default::default() };
        grows.guest.as_mut().unwrap().rates = Some(rates);
        // What the host keeps at least is what the guest can do without.
        let mut host = limited(host(Pressure::Critical, 0, 0), 0, reserve);
        host.limits[0].swap_left = Bytes::ZERO;
        size(&decide(host, vec![grows], vec![])[0])
    };
    // Sizes are whole MiB, and rounded up.
    let keeps = |size: u64, growth| {
        let to = ask(growth, (1024 - size) * 10 / 3);
        (Some(size)..=Some(size + 1)).contains(&to)
    };
    assert!(keeps(524 + 60, 0), "one and a half marks of shortage");
    assert!(keeps(524 + 180 + 60, 120), "for a second and a half");
}

#[test]
fn a_word_from_before_a_gift_brings_no_second_one() {
    let ask = |age_ms| {
        let mut poor = vm(1, 400, 60);
        poor.distress = "swapping in".into();
        poor.guest.as_mut().unwrap().age_ms = age_ms;
        // It spoke at 300 MiB.
        let words = (NOW, Bytes::mib(300), crate::sample::GuestStats::default());
        let last_give = Some(Stamp(NOW.0 - 500));
        let m = VmMemory { last_give, stats: Some(words), ..remembered(1) };
        poor.guest.as_mut().unwrap().need = Bytes::mib(280);
        // Swap alone is left: for what keeps it from harm.
        size(&decide(limited(host(Pressure::Critical, 500, 0), 0, 0), vec![poor], vec![m])[0])
    };
    assert_eq!((ask(200), ask(900)), (Some(400), Some(400)), "it has what its need asks for");
}

#[test]
fn rungs_above_are_waited_for() {
    let v = |above| {
        let model = Model {
            at: NOW,
            dt_ms: 1000,
            host: host(Pressure::Critical, 200, 0),
            vms: vec![vm(1, 1024, 900)],
        };
        taken(&balloon(&model, &Memory::default(), &[], Bytes::mib(above)).verdicts, 0)
    };
    assert_eq!((v(0), v(150), v(300)), (200, 50, 0));
}

#[test]
fn a_clear_host_gives_back_slowly_and_first_to_the_tight() {
    let vms = || vec![vm(1, 700, 500), vm(2, 700, 300)];
    let v = decide(host(Pressure::Clear, 0, 700), vms(), vec![]);
    // A tenth of what is beyond one and a quarter reserves, 188 MiB.
    assert_eq!((size(&v[0]), size(&v[1])), (None, Some(719)));
    let m = VmMemory { last_take: Some(Stamp(NOW.0 - 30_000)), ..remembered(2) };
    let v = decide(host(Pressure::Clear, 0, 1000), vec![vm(2, 700, 300)], vec![m]);
    assert_eq!(size(&v[0]), None, "shrunk half a minute ago");
    let v = decide(host(Pressure::Clear, 0, 0), vec![vm(1, 700, 300)], vec![]);
    assert_eq!(size(&v[0]), None, "no surplus");
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
fn what_is_free_already_is_recycled_before_a_guest_is_ballooned() {
    let agent = |held, busy| crate::sample::AgentSample {
        link: crate::sample::Link::Up,
        state: crate::wire::AgentState::Ready,
        held: Some(Bytes::mib(held)),
        busy,
        ..Default::default()
    };
    let ask = |agent| {
        let vm = VmModel { agent: Some(agent), ..vm(1, 1024, 900) };
        taken(&decide(host(Pressure::Critical, 500, 0), vec![vm], vec![]), 0)
    };
    assert_eq!((ask(agent(100, false)), ask(agent(0, true)), ask(agent(5, false))), (0, 0, 500));
}

#[test]
fn an_order_to_shrink_ends_where_the_guest_needs_what_it_has_though_nothing_can_be_given() {
    let kept = |available, change: fn(&mut VmModel)| {
        let order = Order {
            to: Bytes::mib(512),
            moved_from: Bytes::mib(700),
            moved_at: Stamp(NOW.0 - 500),
            still_ms: 500,
            since: Stamp(NOW.0 - 4_000),
        };
        let m = VmMemory { order: Some(order), ..remembered(1) };
        let mut one = vm(1, 700, available);
        change(&mut one);
        let mut host = limited(host(Pressure::Critical, 2048, 0), 0, 2000);
        host.limits[0].swap_left = Bytes::ZERO;
        let model = Model { at: NOW, dt_ms: 500, host, vms: vec![one] };
        let memory = Memory { vms: vec![m], ..Memory::default() };
        let plan = crate::policy::decide(&model, &memory, &[], &Default::default()).plan;
        plan.actions.iter().any(|a| a.to >= Bytes::mib(600))
    };
    assert!(kept(10, |vm| vm.distress = "10 MiB available".into()));
    assert!(kept(300, |vm| {
        vm.unseen = "silent".into();
        vm.guest = None;
        vm.standing = Standing::GiveOnly("no statistics".into());
    }));
    assert!(kept(100, |_| ()), "it needs 600 by its last word, and is on its way to 512");
    assert!(!kept(300, |_| ()), "it needs 400");
}

#[test]
fn a_vm_whose_ram_is_of_a_pool_takes_nothing_of_what_the_others_share() {
    let of_a_pool = || {
        let mut one = VmModel {
            ram: Some(Bytes::gib(16)),
            ceiling: Bytes::gib(16),
            whole: Bytes::gib(16),
            owed: Bytes::ZERO,
            floor: Bytes::gib(4),
            resident: Some(Bytes::mib(60)),
            pinned: Some("its RAM is huge pages of a pool".into()),
            ..vm(2, 16 << 10, 12 << 10)
        };
        let g = one.guest.as_mut().unwrap();
        (g.buffer, g.short_mark) = (Bytes::gib(2), Bytes::mib(655));
        one
    };
    let ask = |vms| taken(&decide(host(Pressure::Soft, 800, 0), vms, vec![]), 0);
    assert_eq!(ask(vec![vm(1, 1024, 900)]), 102);
    assert_eq!(ask(vec![vm(1, 1024, 900), of_a_pool()]), 102);
}

#[test]
fn a_host_with_much_free_memory_gives_back_though_not_everybodys_margins_fit() {
    let thin = |pid, actual: u64| {
        let mut one = VmModel { resident: Some(Bytes::mib(100)), ..vm(pid, actual, actual - 60) };
        let g = one.guest.as_mut().unwrap();
        (g.buffer, g.deflate_on_oom) = (Bytes::mib(256), false);
        one
    };
    let vms = (1..10).map(|pid| thin(pid, if pid == 1 { 500 } else { 1024 })).collect();
    // Five reserves are there; all guests together need 540 MiB.
    let v = decide(limited(host(Pressure::Clear, 0, 0), 4000, 800), vms, vec![]);
    assert!(size(&v[0]) > Some(500), "{:?}", v[0]);
}

#[test]
fn a_lower_ceiling_leaves_a_guest_a_margin() {
    let lower = |available, change: fn(&mut VmModel)| {
        let mut one = VmModel { ceiling: Bytes::mib(600), ..vm(1, 900, available) };
        change(&mut one);
        size(&decide(host(Pressure::Clear, 0, 2048), vec![one], vec![])[0])
    };
    assert_eq!(lower(100, |_| ()), Some(800 + 80), "its need and a buffer");
    assert!(lower(250, |_| ()).is_some_and(|to| to >= 650 + 80));
    assert_eq!(lower(250, |vm| vm.guest.as_mut().unwrap().age_ms = 4_000), None, "an old word");
    let unknown = HostModel { known: false, ..host(Pressure::Clear, 0, 2048) };
    let one = VmModel { ceiling: Bytes::mib(600), ..vm(1, 900, 250) };
    assert_eq!(size(&decide(unknown, vec![one], vec![])[0]), None, "the host cannot be read");
}

#[test]
fn a_request_takes_nothing_by_old_words() {
    let mut one = vm(1, 1024, 624);
    one.guest.as_mut().unwrap().age_ms = 4_000;
    let model = Model { at: NOW, dt_ms: 1000, host: host(Pressure::Clear, 0, 0), vms: vec![one] };
    let v = balloon(&model, &Memory::default(), &[Reclaim::default()], Bytes::ZERO).verdicts;
    assert_eq!(size(&v[0]), None);
}

/// What is owed may be less than what is else worth an order.
#[test]
fn the_last_mebibytes_that_are_owed_are_given_back() {
    let one = VmModel { whole: Bytes::mib(800), owed: Bytes::mib(2), ..vm(1, 798, 500) };
    let host = host(Pressure::Clear, 0, 4000);
    let model = Model { at: NOW, dt_ms: 1000, host, vms: vec![one] };
    let memory = Memory { vms: vec![remembered(1)], ..Memory::default() };
    let plan = crate::policy::decide(&model, &memory, &[], &Default::default()).plan;
    assert_eq!(plan.actions.iter().map(|a| a.to).collect::<Vec<_>>(), [Bytes::mib(800)]);
}

#[test]
fn a_clear_host_gives_nothing_to_who_is_to_be_left_alone() {
    let ask = |change: fn(&mut VmModel, &mut VmMemory)| {
        let (mut one, mut m) = (vm(1, 600, 300), remembered(1));
        change(&mut one, &mut m);
        size(&decide(host(Pressure::Clear, 0, 4000), vec![one], vec![m])[0])
    };
    assert!(ask(|_, _| ()).is_some());
    assert_eq!(ask(|_, m| m.ledger.foreign = Some(Stamp(NOW.0 - 1000))), None, "others set it");
    assert_eq!(
        ask(|vm, _| {
            vm.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: false });
            vm.standing = Standing::GiveOnly("hands off".into());
        }),
        None
    );
}

#[test]
fn a_vm_outside_of_the_full_cgroup_is_given_back_what_the_machine_can_spare() {
    let limit = |name: &str, headroom, reserve| Limit {
        name: name.into(),
        headroom: Bytes::mib(headroom),
        reserve: Bytes::mib(reserve),
        swap_left: Bytes::ZERO,
    };
    let ask = |machine| {
        let full = HostModel {
            bound: "/pool".into(),
            headroom: Bytes::mib(600),
            reserve: Bytes::mib(1000),
            limits: vec![limit("host", machine, 2_000), limit("/pool", 600, 1_000)],
            ..host(Pressure::Soft, 400, 0)
        };
        let one = VmModel { outside: true, cgroup: Some("/other".into()), ..vm(1, 400, 300) };
        let inside = VmModel { cgroup: Some("/pool/a".into()), ..vm(2, 1024, 100) };
        let v = decide(full, vec![one, inside], vec![]);
        assert!(size(&v[1]) <= Some(1024));
        size(&v[0])
    };
    assert!(ask(20_000) > Some(400));
    assert_eq!(ask(2_400), None, "the machine has no more than it is to keep");
}
