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
        sized(host(Pressure::Clear, 0, 4000), vm, m.clone())
    };
    let off = |vm: &mut VmModel| {
        (vm.managed, vm.standing) = (false, Standing::Off("manage = false".into()));
    };
    assert_eq!((size(&m, |_| ()), size(&m, off)), (Some(949), Some(1023)), "Ebb took it");
    m.ledger.suspect = true;
    assert_eq!((size(&m, |_| ()), size(&m, off)), (None, None), "it is not known who did");
    assert_eq!(size(&m, |vm| vm.unseen = "silent".into()), None);
    assert_eq!(size(&m, |vm| vm.distress = "short".into()), None, "for one tick");
}

#[test]
fn who_is_not_managed_any_more_has_what_was_taken_returned() {
    let off = Standing::Off("manage = false in the configuration".into());
    let one = VmModel { managed: false, standing: off, ..vm(1, 400, 300) };
    let at = |actual: u64| {
        let one = VmModel { actual: Some(Bytes::mib(actual)), ..one.clone() };
        let v = decide(host(Pressure::Critical, 500, 0), vec![one.clone()], vec![]).remove(0);
        let action = crate::policy::within_limits(&one, v).unwrap();
        (action.to.0 >> 20, action.reason)
    };
    // Its guest may be booting, and a driver that is to hold nothing writes no size.
    for (actual, to) in [(400, 1023), (1021, 1023), (1023, 1024)] {
        assert_eq!(at(actual), (to, Reason::Returned), "{actual}");
    }
    let whole = VmModel { owed: Bytes::ZERO, ..one };
    assert_eq!(sized(host(Pressure::Critical, 500, 0), whole, remembered(1)), None);
}

#[test]
fn an_order_that_moves_nothing_is_withdrawn_and_one_under_way_is_waited_for() {
    let ask = |to, ago| {
        let m = VmMemory { order: ordered((1024, to), ago, ago), ..remembered(1) };
        decide(host(Pressure::Soft, 500, 0), vec![vm(1, 1024, 900)], vec![m]).remove(0)
    };
    let back = Verdict::Set { to: Bytes::mib(1024), reason: Reason::Withdrawn };
    assert_eq!(ask(900, 11_000), back);
    assert_eq!(size(&ask(900, 1_000)), None, "still shrinking");
    assert_eq!(size(&ask(1010, 1_000)), Some(1010 - 102), "nearly there");
}

#[test]
fn after_a_reboot_everything_is_returned_and_qemus_stale_size_refreshed() {
    let fresh =
        |actual| VmModel { standing: Standing::GiveOnly("rebooted".into()), ..vm(1, actual, 300) };
    let ask = |r: Reboot, actual| {
        let m = VmMemory { reboot: Some(r), ..remembered(1) };
        decide(host(Pressure::Critical, 500, 0), vec![fresh(actual)], vec![m]).remove(0)
    };
    let all = Verdict::Set { to: Bytes::gib(1), reason: Reason::Rebooted };
    let mut r = Reboot::default();
    assert_eq!(ask(r, 1024), all, "even where QEMU shows all: an order may be open");
    (r.given, r.to) = (ago(5_000), Some(Bytes::gib(1)));
    assert_eq!(size(&ask(r, 400)), None, "the new kernel has not spoken");
    r.speaks = true;
    let nudge = Verdict::Set { to: Bytes::mib(1023), reason: Reason::Refresh };
    assert_eq!(ask(r, 400), nudge);
    // Not while others handle its memory.
    let hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: true });
    let alone = VmModel { hands_off, ..fresh(400) };
    let m = VmMemory { reboot: Some(r), ..remembered(1) };
    assert_eq!(sized(host(Pressure::Critical, 500, 0), alone, m), None);
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
    let ordered = |to| {
        let m = VmMemory { order: ordered((900, to), 0, NOW.0 - 1000), ..remembered(1) };
        decide(host(Pressure::Hard, 500, 0), vec![one.clone()], vec![m]).remove(0)
    };
    let to = Bytes::mib(800);
    assert_eq!(ordered(500), Verdict::Set { to, reason: Reason::HandsOff });
    assert_ne!(ordered(1000), Verdict::Set { to, reason: Reason::HandsOff }, "it grows");
}

#[test]
fn hands_off_means_hands_off() {
    let gone = VmModel { standing: Standing::Off("migrating".into()), ..short(1, 400, 10) };
    let v = decide(host(Pressure::Critical, 500, 0), vec![gone], vec![]);
    assert_eq!(v[0], Verdict::Hold("migrating".into()));
}

#[test]
fn an_order_to_shrink_ends_where_the_guest_needs_what_it_has_though_nothing_can_be_given() {
    let kept = |available, change: fn(&mut VmModel)| {
        let m = VmMemory { order: ordered((700, 512), 500, 4_000), ..remembered(1) };
        let mut one = vm(1, 700, available);
        change(&mut one);
        let host = with_swap(limited(host(Pressure::Critical, 2048, 0), 0, 2000), 0);
        actions(host, one, m).iter().any(|a| a.to >= Bytes::mib(600))
    };
    assert!(kept(10, |vm| vm.distress = "10 MiB available".into()));
    assert!(kept(300, |vm| {
        (vm.unseen, vm.guest) = ("silent".into(), None);
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
        sized(host(Pressure::Clear, 0, 2048), one, remembered(1))
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
        let m = VmMemory { order: ordered((700, to), 0, 1000), ..remembered(1) };
        size(&decide(dry(0, 200), vec![short(1, 600, 38), vm(2, 600, 10)], vec![m])[0])
    };
    assert!(at(500) >= Some(562), "it needs 562 MiB by its last statistics: {:?}", at(500));
}
