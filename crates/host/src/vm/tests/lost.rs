//! Sockets, balloons and orders that are not what they were.

use std::os::unix::net::UnixListener;

use super::shared::{leave, proxmox};
use super::*;
use crate::testing::tree;
use crate::vm::questions::TOLD_WITHIN;

/// Ticks until its balloon is known, as if the time between two tries were over.
fn finds_balloon(vm: &mut Vm) -> bool {
    until(vm, |vm| {
        vm.retry_at = None;
        vm.actual.is_some()
    })
}

#[test]
fn a_socket_that_nobody_serves_is_left_for_another_one_also_where_something_is_owed() {
    for owed in [false, true] {
        let tree = tree(&[]);
        let [dead, live] = ["/dead", "/live"].map(|path| tree.path(path));
        drop(tree.listen("/dead"));
        Qemu::serve(tree.listen("/live"), |_| ());
        let mut vm = vm(live.clone());
        if owed {
            vm.owed_at = Some(dead);
        } else {
            vm.process.args.qmp = QmpAddress::Paths(vec![dead, live]);
        }
        assert!(finds_balloon(&mut vm), "owed: {owed}");
    }
}

#[test]
fn a_socket_of_ebbs_own_that_was_not_served_is_tried_again_after_a_while() {
    let (_tree, listener, managers) = proxmox();
    Qemu::serve(listener, |_| ());
    let own = managers.with_file_name("100-ebb.qmp");
    let mut vm = vm(managers.clone());
    vm.access.sockets = SocketUse::Known;
    vm.process.args.qmp = QmpAddress::Paths(vec![own.clone(), managers]);
    assert!(finds_balloon(&mut vm) && vm.is_shared(), "its own is not there");
    Qemu::serve(UnixListener::bind(&own).unwrap(), |_| ());
    assert!(!until(&mut vm, |vm| !vm.is_shared()), "not yet");
    vm.adopted = Some(Instant::now() - Duration::from_secs(601));
    assert!(until(&mut vm, |vm| !vm.is_shared() && vm.ready));
    assert!(finds_balloon(&mut vm));
}

/// libvirt may refuse statistics for good, and answer all else.
#[test]
fn a_connection_that_ends_soon_each_time_is_tried_again_later_and_later() {
    let (_dir, _qemu, mut vm) = with_balloon();
    let mut waits = |lasted: u64| {
        let now = Instant::now();
        vm.adopted = Some(now - Duration::from_secs(lasted));
        let client = vm.client.as_mut().unwrap();
        client.protocol.fail(QmpError::Failed("libvirt".into(), "refused".into()));
        vm.reap(now);
        let wait = vm.retry_at.unwrap() - now;
        vm.retry_at = None;
        assert!(until(&mut vm, |vm| vm.ready));
        wait.as_secs()
    };
    assert_eq!([waits(1), waits(1), waits(1), waits(60), waits(1)], [1, 2, 4, 1, 2]);
}

#[test]
fn of_a_balloon_that_was_unplugged_nothing_is_told_any_more() {
    let (_dir, qemu, mut vm) = with_balloon();
    vm.order(Bytes::mib(600), false).unwrap();
    assert!(until(&mut vm, |vm| vm.orders.is_empty() && vm.shrinks(true)));
    qemu.it().unplugged = true;
    hears(&mut vm, &qemu, "DEVICE_DELETED");
    assert!(until(&mut vm, |vm| vm.device.is_none()));
    assert_eq!((tick(&mut vm).balloon, vm.shrinks(true)), (None, false));
    qemu.it().unplugged = false;
    vm.looked_up = None;
    assert!(until(&mut vm, |vm| vm.actual.is_some()));
    assert!(tick(&mut vm).balloon.is_some() && vm.ordered.is_none());
}

/// A larger size was set before the guest had followed, or its driver has deflated.
#[test]
fn an_order_to_shrink_that_the_balloon_does_not_follow_is_withdrawn() {
    let (_dir, qemu, mut vm) = with_balloon();
    vm.order(Bytes::mib(600), false).unwrap();
    assert!(until(&mut vm, |vm| vm.orders.is_empty() && vm.shrinks(false)));
    vm.moved = Some(Instant::now());
    vm.withdraw(Instant::now());
    assert_eq!(qemu.it().orders, [600], "while it moves, it may follow another's order");
    vm.moved = None;
    assert!(until(&mut vm, |vm| {
        vm.withdraw(Instant::now());
        !vm.shrinks(false) && qemu.it().orders.last() == Some(&1024)
    }));
}

/// The daemon has begun anew, and an operator's larger size is on its way.
#[test]
fn what_an_earlier_daemon_may_have_left_is_withdrawn_once_the_balloon_grows_no_more() {
    let (_dir, _qemu, mut vm) = with_balloon();
    assert!(until(&mut vm, |vm| vm.size().is_some()));
    (vm.loose, vm.grew) = (true, Some(Instant::now()));
    vm.withdraw(Instant::now());
    assert!(vm.orders.is_empty() && vm.shrinks(true));
    vm.withdraw(Instant::now() + 2 * TOLD_WITHIN);
    assert_eq!(vm.orders.len(), 1);
    assert!(until(&mut vm, |vm| !vm.shrinks(true)));
}

/// QEMU does not carry out what it has not read when the connection is closed.
#[test]
fn a_connection_is_kept_until_qemu_has_put_the_interval_back() {
    let (_dir, qemu, mut vm) = with_balloon();
    (vm.interval_was, vm.access.managed) = (Some(7), false);
    vm.ask(Instant::now(), Stamp(0), false);
    assert!(vm.client.is_some() && vm.interval_was == Some(7));
    leave(&mut vm);
    assert!(vm.client.is_none());
    assert_eq!((qemu.it().interval, vm.interval_was), (7, None));
}
