//! What a VM's own state demands, whatever the host's is.
//!
//! Laws of `own_case`: sizes that others set, hands off, reboots, orders that are withdrawn.

use super::*;

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
        order: Some(BalloonOrder {
            to: Bytes::mib(to),
            moved_from: Bytes::mib(1024),
            still_ms: age,
            since: Stamp(NOW.0 - age),
            cuts_short: false,
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

/// What was ordered before would go on for as long as the guest takes.
#[test]
fn an_order_to_shrink_ends_where_the_vm_is_to_be_left_alone() {
    let mut one = vm(1, 800, 300);
    one.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: false });
    one.standing = Standing::GiveOnly("hands off".into());
    let at = Stamp(1000);
    let moves = |to: u64| crate::state::BalloonOrder {
        to: Bytes::mib(to),
        moved_from: Bytes::mib(900),
        still_ms: 0,
        since: at,
        cuts_short: false,
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

#[test]
fn an_order_to_shrink_ends_where_the_guest_needs_what_it_has_though_nothing_can_be_given() {
    let kept = |available, change: fn(&mut VmModel)| {
        let order = BalloonOrder {
            to: Bytes::mib(512),
            moved_from: Bytes::mib(700),
            still_ms: 500,
            since: Stamp(NOW.0 - 4_000),
            cuts_short: false,
        };
        let m = VmMemory { order: Some(order), ..remembered(1) };
        let mut one = vm(1, 700, available);
        change(&mut one);
        let mut host = limited(host(Pressure::Critical, 2048, 0), 0, 2000);
        host.shown.swap_left = Bytes::ZERO;
        let model = Model { at: NOW, dt_ms: 500, host, vms: vec![one] };
        let memory = Memory { vms: vec![m], ..Memory::default() };
        let plan = crate::policy::decide(&model, &memory, &[]).plan;
        plan.actions.iter().any(|a| a.to >= Bytes::mib(600))
    };
    assert!(kept(10, |vm| vm.distress = "10 MiB available".into()));
    assert!(kept(300, |vm| {
        vm.unseen = "silent".into();
        vm.guest = None;
        vm.standing = Standing::GiveOnly("no statistics".into());
    }));
    assert!(kept(100, |_| ()), "it needs 600 by its last statistics, and is on its way to 512");
    assert!(!kept(300, |_| ()), "it needs 400");
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
    assert_eq!(lower(250, |vm| vm.guest.as_mut().unwrap().age_ms = 4_000), None, "old statistics");
    let unknown = HostModel { known: false, ..host(Pressure::Clear, 0, 2048) };
    let one = VmModel { ceiling: Bytes::mib(600), ..vm(1, 900, 250) };
    assert_eq!(size(&decide(unknown, vec![one], vec![])[0]), None, "the host cannot be read");
}

/// Neither headroom nor swap is left, and it has more than its part: it may be asked for that.
#[test]
fn an_order_to_shrink_below_its_need_ends_though_the_host_has_nothing_left() {
    let at = |to| {
        let mut short = vm(1, 600, 38);
        short.distress = "38 MiB available".into();
        let (to, moved_from) = (Bytes::mib(to), Bytes::mib(700));
        let order =
            BalloonOrder { to, moved_from, since: Stamp(NOW.0 - 1000), ..BalloonOrder::default() };
        let m = VmMemory { order: Some(order), ..remembered(1) };
        let mut host = limited(host(Pressure::Critical, 0, 0), 0, 200);
        host.shown.swap_left = Bytes::ZERO;
        size(&decide(host, vec![short, vm(2, 600, 10)], vec![m])[0])
    };
    assert!(at(500) >= Some(562), "it needs 562 MiB by its last statistics: {:?}", at(500));
}
