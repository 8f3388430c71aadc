//! VMs whose only QMP socket is their manager's.

use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};

use ebb_core::sample::VmEvent;

use super::*;
use crate::testing::{Tree, tree, within_a_minute};

/// Where Proxmox VE has it.
pub(crate) const SOCKET: &str = "/run/qemu-server/100.qmp";

pub(super) fn proxmox() -> (Tree, UnixListener, PathBuf) {
    let tree = tree(&[]);
    let listener = tree.listen(SOCKET);
    let path = tree.path(SOCKET);
    (tree, listener, path)
}

fn shared_vm(path: PathBuf) -> Vm {
    let mut vm = vm(path);
    vm.access.sockets = SocketUse::Known;
    vm
}

/// A VM on Proxmox's socket whose QEMU is so.
fn shared(but: impl FnOnce(&mut State)) -> (Tree, Qemu, Vm) {
    let (tree, listener, path) = proxmox();
    (tree, Qemu::serve(listener, but), shared_vm(path))
}

/// A tick, so long after the last visit that all is asked.
fn visit(vm: &mut Vm) -> VmSample {
    visit_at(vm, Instant::now())
}

fn visit_at(vm: &mut Vm, now: Instant) -> VmSample {
    asks_all(vm, now);
    hear_all(vm, Duration::from_secs(5));
    vm.sample(Stamp(1_000_000), 0, &mut Vec::new())
}

fn asks_all(vm: &mut Vm, now: Instant) {
    (vm.asked_at, vm.stats_new, vm.ran_asked) = (Stamp(0), None, None);
    vm.ask(now, Stamp(1_000_000), false);
}

/// Waits for what became of its orders.
fn take_late(vm: &mut Vm) {
    eventually(|| {
        vm.client.iter_mut().for_each(Client::pump);
        vm.take_late();
        vm.orders.is_empty()
    });
}

/// A VM whose statistics were asked for every 7 s before Ebb came, after some ticks.
fn met() -> (Tree, Qemu, Vm) {
    let (tree, qemu, mut vm) = shared(|it| it.interval = 7);
    (0..5).for_each(|_| drop(visit(&mut vm)));
    (tree, qemu, vm)
}

#[test]
fn a_managers_socket_is_visited_for_a_tick_and_free_between_two() {
    let (_dir, qemu, mut vm) = met();
    let sample = visit(&mut vm);
    assert_eq!(sample.shared.unwrap().with.as_deref(), Some("Proxmox VE"));
    assert!(sample.balloon.is_some() && sample.link == Link::Up);
    assert!(vm.client.as_ref().unwrap().fd().is_none(), "it is left");
    assert!(qemu.it().visits >= 5);
    assert_eq!((qemu.it().interval, vm.interval_was), (2, Some(7)));
    // It is not managed any more.
    vm.access.managed = false;
    leave(&mut vm);
    assert_eq!((qemu.it().interval, vm.client.is_none()), (7, true), "put back");
    let visits = qemu.it().visits;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!(qemu.it().visits, visits);
}

/// Ticks until it has no connection.
pub(super) fn leave(vm: &mut Vm) {
    eventually(|| {
        visit(vm);
        vm.client.iter_mut().for_each(Client::pump);
        vm.client.is_none()
    });
}

#[test]
fn a_vm_that_is_let_go_while_its_manager_is_served_gets_its_interval_back() {
    let (tree, qemu, mut vm) = met();
    let manager = UnixStream::connect(tree.path(SOCKET)).unwrap();
    asks_all(&mut vm, Instant::now());
    vm.client.iter_mut().for_each(Client::pump);
    assert!(vm.client.as_ref().unwrap().fd().is_some(), "it waits to be served");
    vm.access.managed = false;
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    assert!(vm.client.is_some());
    drop(manager);
    leave(&mut vm);
    assert_eq!((qemu.it().interval, vm.client.is_none()), (7, true));
}

#[test]
fn a_qemu_that_refuses_the_interval_is_asked_once_and_the_vm_let_go() {
    let (_dir, qemu, mut vm) = met();
    qemu.it().refuses = Some("qom-set");
    vm.access.managed = false;
    let mut problems = Vec::new();
    eventually(|| {
        vm.ask(Instant::now(), Stamp(1_000_000), false);
        vm.client.iter_mut().for_each(Client::pump);
        vm.sample(Stamp(1_000_000), 0, &mut problems);
        vm.client.is_none()
    });
    assert!(!vm.is_not_restored());
    assert!(problems.iter().any(|p| p.message.contains("qom-set: no")), "{problems:?}");
}

/// A VM whose socket serves its manager at the moment. An order of 900 MiB is in force.
fn busy() -> (Tree, UnixListener, Vm, [UnixStream; 2]) {
    let (tree, listener, path) = proxmox();
    let mut vm = shared_vm(path.clone());
    let manager = UnixStream::connect(&path).unwrap();
    let served = listener.accept().unwrap().0;
    vm.connect();
    (vm.ordered, vm.loose) = (Some(Bytes::mib(900)), false);
    (tree, listener, vm, [manager, served])
}

#[test]
fn of_two_orders_that_were_not_sent_neither_is_in_force() {
    let (_tree, _listener, mut vm, _busy) = busy();
    for size in [600, 700] {
        let command = vm.order(Bytes::mib(size), true).unwrap();
        vm.not_answered(command);
    }
    take_late(&mut vm);
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(900)), false));
    // The first one was carried out, and the second was not sent.
    let order = |command, size| PendingOrder {
        command,
        to: Bytes::mib(size),
        before: (Some(Bytes::mib(900)), true),
    };
    (vm.orders, vm.ordered, vm.loose) =
        (vec![order(1, 600), order(2, 700)], Some(Bytes::mib(700)), true);
    vm.answered(1, true);
    vm.not_sent(2);
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(600)), false));
}

/// Answers that nobody takes would fill what a connection holds, and it would end for good.
#[test]
fn the_answer_to_an_order_that_a_later_one_ended_is_not_kept() {
    let (_dir, qemu, mut vm) = met();
    for size in 1..200 {
        let late = vm.order(Bytes::mib(700 + size), true).unwrap();
        vm.not_answered(late);
        let last = vm.order(Bytes::mib(400 + size), true).unwrap();
        let answer = within_a_minute(|| {
            vm.client.iter_mut().for_each(Client::pump);
            vm.client.as_mut().unwrap().protocol.take_reply(last)
        });
        vm.answered(last, answer.is_ok());
    }
    assert_eq!(qemu.it().orders.len(), 398);
}

#[test]
fn a_vm_that_is_managed_again_is_asked_for_its_interval() {
    let (_dir, qemu, mut vm) = met();
    vm.access.managed = false;
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    assert!(vm.restoring.is_some());
    let until = Instant::now() + Duration::from_secs(5);
    crate::qmp::poll_all(&mut [vm.client.as_mut().unwrap()], until);
    assert_eq!(qemu.it().interval, 7);
    vm.access.managed = true;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!((qemu.it().interval, vm.interval_was), (2, Some(7)));
    vm.access.managed = false;
    leave(&mut vm);
    assert_eq!(qemu.it().interval, 7);
}

/// Two managers' sockets, and who is connected to the first stays there.
#[test]
fn a_socket_whose_manager_stays_is_left_for_another_one() {
    let (_tree, _first, path) = proxmox();
    let second = path.with_file_name("101.qmp");
    Qemu::serve(UnixListener::bind(&second).unwrap(), |_| ());
    let mut vm = shared_vm(path.clone());
    vm.process.args.qmp = QmpAddress::Paths(vec![path, second]);
    let mut now = Instant::now();
    let met = (0..20).any(|_| {
        now += Duration::from_secs(3);
        visit_at(&mut vm, now).balloon.is_some()
    });
    assert!(met);
}

#[test]
fn nobody_connects_to_the_socket_of_a_vm_that_is_not_managed() {
    let (_tree, listener, path) = proxmox();
    let mut vm = shared_vm(path);
    listener.set_nonblocking(true).unwrap();
    for (managed, sockets) in [(false, SocketUse::Known), (true, SocketUse::Own)] {
        vm.allow(Access { managed, sockets, ..vm.access });
        (0..3).for_each(|_| assert!(tick(&mut vm).let_be));
        let said = listener.accept();
        assert!(matches!(said, Err(e) if e.kind() == ErrorKind::WouldBlock), "{managed}");
    }
}

#[test]
fn a_socket_of_ebbs_own_is_used_rather_than_the_managers() {
    let (_tree, theirs, path) = proxmox();
    let own = path.with_file_name("100-ebb.qmp");
    let qemu = Qemu::serve(UnixListener::bind(&own).unwrap(), |_| ());
    let mut vm = shared_vm(path.clone());
    vm.process.args.qmp = QmpAddress::Paths(vec![path, own]);
    let sample = (0..5).map(|_| visit(&mut vm)).last().unwrap();
    assert!(sample.shared.is_none() && sample.link == Link::Up, "{sample:?}");
    assert_eq!(qemu.it().visits, 1, "it stays");
    theirs.set_nonblocking(true).unwrap();
    assert!(theirs.accept().is_err());
}

/// QEMU tells of a reset only who is connected.
#[test]
fn a_reset_between_two_visits_is_seen_by_the_guests_counters() {
    let (_tree, _qemu, mut vm) = shared(|it| it.faults = [9000, 9000, 9001, 9002, 40, 50].into());
    let resets = (0..10).filter(|_| visit(&mut vm).events.contains(&VmEvent::Reset)).count();
    assert_eq!(resets, 1);
}

#[test]
fn an_order_that_was_not_sent_is_not_in_force() {
    let (_tree, listener, mut vm, busy) = busy();
    let command = vm.order(Bytes::mib(600), true).unwrap();
    vm.not_answered(command);
    assert_eq!(vm.ordered, Some(Bytes::mib(600)));
    take_late(&mut vm);
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(900)), false));
    assert!(matches!(vm.link(), Link::Slow(_)));
    assert!(vm.order(Bytes::mib(600), false).is_err(), "nothing is taken over a busy socket");
    drop(busy);
    let qemu = Qemu::serve(listener, |_| ());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(qemu.it().orders, [0u64; 0]);
}

/// The guest is asked out of turn by two settings; QEMU may be left with the first.
#[test]
fn an_interval_that_was_left_at_none_is_set_again_and_not_taken_for_the_managers() {
    let (_tree, qemu, mut vm) = shared(|it| (it.interval, it.faults) = (2, [7].into()));
    (0..4).for_each(|_| drop(visit(&mut vm)));
    qemu.it().sets = Some(1);
    vm.prepare_kick();
    vm.kick(Stamp(1));
    visit(&mut vm);
    assert_eq!(qemu.it().interval, 0, "the second setting was not carried out");
    qemu.it().sets = None;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!((qemu.it().interval, vm.interval_was), (2, Some(2)));
}

/// What an agent waits for is asked anew, where a round was not answered.
#[test]
fn a_round_of_questions_that_was_not_answered_begins_anew() {
    let (_tree, _listener, path) = proxmox();
    let mut vm = shared_vm(path.clone());
    vm.connect();
    let begins = |vm: &mut Vm| !vm.inventory.questions(Instant::now()).is_empty();
    assert!(begins(&mut vm) && !begins(&mut vm), "one round at a time");
    vm.send(Query::Inventory(Inquiry::Tree), "human-monitor-command", None);
    let busy = QmpError::Busy(path.display().to_string(), "another client is served".into());
    vm.client.as_mut().unwrap().protocol.leave(&busy);
    vm.hear();
    assert!(begins(&mut vm));
}

/// No event tells that a DIMM was replaced by one of its size.
#[test]
fn where_its_ram_is_is_asked_each_minute_where_no_event_would_tell() {
    let (_dir, qemu, mut vm) = met();
    vm.agent = Some(AgentLink::new("/nowhere/agent".into(), std::process::id()));
    let begun = Instant::now();
    eventually(|| {
        visit(&mut vm);
        qemu.was_asked("info mtree") > 0
    });
    let mut asked_at = |seconds| {
        let was = qemu.was_asked("info mtree");
        visit_at(&mut vm, begun + Duration::from_secs(seconds));
        qemu.was_asked("info mtree") - was
    };
    assert_eq!((asked_at(50), asked_at(180), asked_at(190)), (0, 1, 0));
}
