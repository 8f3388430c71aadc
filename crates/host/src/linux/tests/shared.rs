//! A VM whose only QMP socket is its manager's, which this process serves.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use super::*;
use crate::vm::tests::shared::{Qemu, socket};

const LONG: Duration = Duration::from_secs(10);

/// A process tree in which this process is the VM.
fn a_vm(dir: &Path, socket: &Path) {
    let proc = dir.join(format!("proc/{}", std::process::id()));
    std::fs::create_dir_all(&proc).unwrap();
    let line = format!("kvm\0-name\0a\0-qmp\0unix:{},server\0", socket.display());
    std::fs::write(proc.join("cmdline"), line).unwrap();
    let stat = format!("{} (kvm) S{} 7 0", std::process::id(), " 0".repeat(18));
    std::fs::write(proc.join("stat"), stat).unwrap();
}

struct Scene {
    host: LinuxHost,
    qemu: Qemu,
    vm: VmId,
    socket: PathBuf,
    dir: tempfile::TempDir,
}

/// A VM that was met.
fn scene() -> Scene {
    scene_with("")
}

/// The same, with a file of this name for intervals.
fn scene_with(intervals: &str) -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let (listener, socket) = socket(dir.path());
    let qemu = Qemu::default();
    qemu.0.lock().unwrap().interval = 7;
    qemu.serve(listener);
    a_vm(dir.path(), &socket);
    let intervals = (!intervals.is_empty()).then(|| dir.path().join(intervals));
    let mut host = host(dir.path(), Options { intervals, ..Options::default() });
    let until = Instant::now() + LONG;
    let vm = loop {
        let vm = host.sample().vms.remove(0);
        if vm.balloon.is_some() && qemu.0.lock().unwrap().interval == 2 {
            break vm.id;
        }
        assert!(Instant::now() < until, "{vm:?}");
        std::thread::sleep(Duration::from_millis(20));
    };
    Scene { host, qemu, vm, socket, dir }
}

impl Scene {
    fn order(&mut self, to: u64, gives: bool, wait: Duration) -> Result<(), ActError> {
        let order = BalloonOrder { vm: self.vm, to: Bytes::mib(to), gives };
        self.host.set_balloons(&[order], wait).remove(0)
    }

    fn orders(&self) -> Vec<u64> {
        self.qemu.0.lock().unwrap().orders.clone()
    }
}

/// While its manager is served, an order is over with its time.
#[test]
fn an_order_is_never_sent_late_over_a_shared_socket() {
    let mut scene = scene();
    let wait = scene.host.options.deadline;
    let manager = UnixStream::connect(&scene.socket).unwrap();
    for (to, gives) in [(600, false), (700, true)] {
        let said = scene.order(to, gives, wait).unwrap_err();
        assert!(matches!(said, ActError::NoLink(_)), "{said:?}");
    }
    drop(manager);
    let until = Instant::now() + LONG;
    while scene.order(800, true, LONG).is_err() && Instant::now() < until {
        scene.host.wait(Instant::now() + Duration::from_millis(20));
    }
    assert_eq!(scene.orders(), [800]);
}

/// A daemon that begins anew with a configuration in which the VM is not managed.
#[test]
fn a_vm_that_is_not_managed_any_more_gets_its_interval_back_from_the_next_daemon() {
    let Scene { host: first, qemu, vm, socket, dir } = scene_with("intervals");
    drop(first);
    let text = "[vm.a]\nmanage = false\n";
    let config = ebb_core::config::Config::parse("f", text).unwrap();
    let file = dir.path().join("intervals");
    let options = Options { config, intervals: Some(file.clone()), ..Options::default() };
    let mut host = host(dir.path(), options);
    let until = Instant::now() + LONG;
    while (qemu.0.lock().unwrap().interval != 7 || file.exists()) && Instant::now() < until {
        host.sample();
        host.wait(Instant::now() + Duration::from_millis(20));
    }
    assert_eq!((qemu.0.lock().unwrap().interval, file.exists()), (7, false));
    let before = qemu.0.lock().unwrap().visits;
    (0..5).for_each(|_| drop(host.sample()));
    assert_eq!(qemu.0.lock().unwrap().visits, before, "then it is let be");
    assert!(host.vms.contains_key(&vm) && socket.exists());
}

/// An order that may have been carried out is withdrawn where its VM is to be left alone, also
/// where the connection that it was sent on has ended.
#[test]
fn an_order_that_was_lost_on_a_shared_socket_is_withdrawn() {
    let mut scene = scene();
    scene.qemu.0.lock().unwrap().hangs_at_orders = true;
    let said = scene.order(600, false, LONG).unwrap_err();
    assert!(matches!(said, ActError::Lost(_)), "{said:?}");
    scene.qemu.0.lock().unwrap().hangs_at_orders = false;
    let until = Instant::now() + LONG;
    while scene.orders().len() < 2 && Instant::now() < until {
        scene.host.sample();
        scene.host.vms.get_mut(&scene.vm).unwrap().withdraw(Instant::now());
        scene.host.wait(Instant::now() + Duration::from_millis(20));
    }
    assert_eq!(scene.orders(), [600, 1024]);
}

#[test]
fn the_interval_is_put_back_at_the_end_although_the_manager_is_served_just_then() {
    let mut scene = scene();
    let manager = UnixStream::connect(&scene.socket).unwrap();
    let missed = |scene: &Scene| {
        let client = scene.host.vms[&scene.vm].client.as_ref();
        client.is_some_and(|c| c.missed().is_some() && c.fd().is_none())
    };
    let until = Instant::now() + LONG;
    while !missed(&scene) && Instant::now() < until {
        scene.host.sample();
        std::thread::sleep(Duration::from_millis(20));
    }
    let manager = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(manager);
    });
    scene.host.restore_intervals();
    manager.join().unwrap();
    assert_eq!(scene.qemu.0.lock().unwrap().interval, 7);
}

/// To ask a guest out of turn, QEMU is given two settings. If the daemon is killed between both, the
/// first stays, unless the period to be put back was written down before.
#[test]
fn before_a_guest_is_asked_out_of_turn_its_interval_is_written_down() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, socket) = socket(dir.path());
    let qemu = Qemu::default();
    // As Ebb wants it, so there is nothing to put back so far.
    qemu.0.lock().unwrap().interval = 2;
    qemu.serve(listener);
    a_vm(dir.path(), &socket);
    let file = dir.path().join("intervals");
    let options = || Options { intervals: Some(file.clone()), ..Options::default() };
    let mut host = host(dir.path(), options());
    let until = Instant::now() + LONG;
    let vm = loop {
        let vm = host.sample().vms.remove(0);
        if vm.balloon.is_some_and(|b| b.guest.is_some()) {
            break vm.id;
        }
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(Intervals::load(Some(file.clone())).of(vm), None);
    host.kick_stats(&[vm]);
    assert_eq!(Intervals::load(Some(file)).of(vm), Some(2));
}

/// QEMU's queue has room for two clients. A process that is no VM of Ebb's is asked for who it is
/// at each scan.
#[test]
fn a_named_socket_whose_manager_is_served_has_one_client_of_ebbs_in_its_queue() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, socket) = socket(dir.path());
    std::fs::create_dir_all(dir.path().join("proc")).unwrap();
    let manager = UnixStream::connect(&socket).unwrap();
    let served = listener.accept().unwrap();
    let text = format!("[vm.a]\nqmp = {socket:?}\n");
    let options = Options { scan_every: Duration::ZERO, ..configured(&text) };
    let mut host = host(dir.path(), options);
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
