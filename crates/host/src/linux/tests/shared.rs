//! A VM whose only QMP socket is its manager's, which this process serves.

use std::os::unix::net::UnixStream;

use super::*;
use crate::testing::{Tree, eventually, tree, within_a_minute};
use crate::vm::tests::qemu::{ORDER, Qemu};
use crate::vm::tests::shared::SOCKET;

const LONG: Duration = Duration::from_secs(10);
const INTERVALS: &str = "/intervals";

struct Scene {
    host: LinuxHost,
    qemu: Qemu,
    vm: VmId,
    tree: Tree,
}

/// A VM that was met. Its QEMU asked its guest this often.
fn scene(interval: u64) -> Scene {
    let tree = tree(&[]);
    let qemu = Qemu::serve(tree.listen(SOCKET), |it| it.interval = interval);
    let socket = tree.path(SOCKET);
    let arguments = format!("-name\0a\0-qmp\0unix:{},server", socket.display());
    tree.vm(std::process::id(), 7, &arguments);
    let intervals = Some(tree.path(INTERVALS));
    let mut host = host(&tree, Options { intervals, ..Options::default() });
    let vm = within_a_minute(|| {
        let vm = host.sample().vms.remove(0);
        let met = vm.balloon.is_some_and(|b| b.guest.is_some()) && qemu.it().interval == 2;
        met.then_some(vm.id)
    });
    Scene { host, qemu, vm, tree }
}

impl Scene {
    fn order(&mut self, to: u64, gives: bool, wait: Duration) -> Result<(), ActError> {
        let order = BalloonOrder { vm: self.vm, to: Bytes::mib(to), gives };
        self.host.set_balloons(&[order], wait).remove(0)
    }

    /// Its manager, connected to its socket.
    fn manager(&self) -> UnixStream {
        UnixStream::connect(self.tree.path(SOCKET)).unwrap()
    }
}

/// While its manager is served, an order is over with its time.
#[test]
fn an_order_is_never_sent_late_over_a_shared_socket() {
    let mut scene = scene(7);
    let wait = scene.host.options.deadline;
    let manager = scene.manager();
    for (to, gives) in [(600, false), (700, true)] {
        let said = scene.order(to, gives, wait).unwrap_err();
        assert!(matches!(said, ActError::NoLink(_)), "{said:?}");
    }
    drop(manager);
    eventually(|| {
        scene.host.wait(Instant::now() + Duration::from_millis(20));
        scene.order(800, true, LONG).is_ok()
    });
    assert_eq!(scene.qemu.it().orders, [800]);
}

/// A daemon that begins anew with a configuration in which the VM is not managed.
#[test]
fn a_vm_that_is_not_managed_any_more_gets_its_interval_back_from_the_next_daemon() {
    let Scene { host: first, qemu, vm, tree } = scene(7);
    drop(first);
    let file = tree.path(INTERVALS);
    let options = configured("[vm.a]\nmanage = false\n");
    let mut host = host(&tree, Options { intervals: Some(file.clone()), ..options });
    eventually(|| {
        host.sample();
        host.wait(Instant::now() + Duration::from_millis(20));
        qemu.it().interval == 7 && !file.exists()
    });
    let before = qemu.it().visits;
    (0..5).for_each(|_| drop(host.sample()));
    assert_eq!(qemu.it().visits, before, "then it is let be");
    assert!(host.vms.contains_key(&vm) && tree.path(SOCKET).exists());
}

/// An order that may have been carried out is withdrawn where its VM is to be left alone, also
/// where the connection that it was sent on has ended.
#[test]
fn an_order_that_was_lost_on_a_shared_socket_is_withdrawn() {
    let mut scene = scene(7);
    scene.qemu.it().holds = Some(ORDER);
    let said = scene.order(600, false, LONG).unwrap_err();
    assert!(matches!(said, ActError::Lost(_)), "{said:?}");
    scene.qemu.it().holds = None;
    eventually(|| {
        scene.host.sample();
        scene.host.vms.get_mut(&scene.vm).unwrap().withdraw(Instant::now());
        scene.host.wait(Instant::now() + Duration::from_millis(20));
        scene.qemu.it().orders.len() >= 2
    });
    assert_eq!(scene.qemu.it().orders, [600, 1024]);
}

#[test]
fn the_interval_is_put_back_at_the_end_although_the_manager_is_served_just_then() {
    let mut scene = scene(7);
    let manager = scene.manager();
    eventually(|| {
        scene.host.sample();
        let client = scene.host.vms[&scene.vm].client.as_ref();
        client.is_some_and(|c| c.missed().is_some() && c.fd().is_none())
    });
    let manager = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(manager);
    });
    scene.host.restore_intervals();
    manager.join().unwrap();
    assert_eq!(scene.qemu.it().interval, 7);
}

/// To ask a guest out of turn, QEMU is given two settings. If the daemon is killed between both, the
/// first stays, unless the period to be put back was written down before.
#[test]
fn before_a_guest_is_asked_out_of_turn_its_interval_is_written_down() {
    // As Ebb wants it, so there is nothing to put back so far.
    let Scene { mut host, vm, tree, .. } = scene(2);
    let file = tree.path(INTERVALS);
    assert_eq!(Intervals::load(Some(file.clone())).of(vm), None);
    host.kick_stats(&[vm]);
    assert_eq!(Intervals::load(Some(file)).of(vm), Some(2));
}

/// QEMU's queue has room for two clients. A process that is no VM of Ebb's is asked for who it is
/// at each scan.
#[test]
fn a_named_socket_whose_manager_is_served_has_one_client_of_ebbs_in_its_queue() {
    let tree = tree(&[]);
    let (listener, socket) = (tree.listen(SOCKET), tree.path(SOCKET));
    let manager = UnixStream::connect(&socket).unwrap();
    let served = listener.accept().unwrap();
    let text = format!("[vm.a]\nqmp = {socket:?}\n");
    let options = Options { scan_every: Duration::ZERO, ..configured(&text) };
    let mut host = host(&tree, options);
    let said: Vec<Sample> = (0..4).map(|_| host.sample()).collect();
    let problems = &said[3].problems;
    assert!(
        problems.iter().any(|p| p.message.contains("another client is served")),
        "{problems:?}"
    );
    drop((manager, served));
    listener.set_nonblocking(true).unwrap();
    let queue = std::iter::from_fn(|| listener.accept().ok()).count();
    assert_eq!(queue, 1);
}
