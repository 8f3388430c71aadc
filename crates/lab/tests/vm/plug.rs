//! A device whose backend writes to guest memory past QEMU is plugged into a running VM
//! of tier guest: a vhost-user disk, served by QEMU's storage daemon. What such a backend
//! loses where nobody looks is shown in one process (`crates/vmm/tests/devices.rs`).

use std::process::Child;

use ebb_lab::experiment::stage::write_noise;

use super::*;

/// Here some process, init of this machine perhaps, may not let anybody see what it maps.
const PRIVATE: &str = "[defaults]\nprivate_ram = true\n";
/// What the disk holds.
const DISK: Bytes = Bytes::mib(64);

/// Serves a disk over vhost-user; ends with this.
struct Backend {
    child: Child,
    socket: PathBuf,
    disk: PathBuf,
}

impl Backend {
    fn start(dir: &Path) -> Backend {
        let (socket, disk) = (dir.join("vhost-blk"), dir.join("plugged"));
        write_noise(&disk, DISK).unwrap();
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &format!("driver=file,node-name=f,filename={}", disk.display())])
            .args(["--blockdev", "driver=raw,node-name=d,file=f", "--export"])
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path={}",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        wait_until(|| socket.exists(), || "the storage daemon does not listen".into());
        Backend { child, socket, disk }
    }

    /// What a guest has to read.
    fn sum(&self) -> String {
        let out = Command::new("md5sum").arg(&self.disk).output().unwrap();
        String::from_utf8(out.stdout).unwrap()[..32].into()
    }

    fn plug(&self, vm: &Vm) {
        let address = json!({ "type": "unix", "data": { "path": self.socket } });
        let socket = json!({ "addr": address, "server": false });
        let backend = json!({ "type": "socket", "data": socket });
        vm.qmp("chardev-add", Some(json!({ "id": "plug", "backend": backend }))).unwrap();
        let device = json!({ "driver": "vhost-user-blk-pci", "chardev": "plug", "id": "plugged" });
        vm.qmp("device_add", Some(device)).unwrap();
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest of shared memory with module and agent, a daemon that has the agent work, and the
/// agent's socket.
fn at_work() -> (Arena, Vm, TempDir, Daemon, PathBuf) {
    let arena = Arena::beside(Beside::AnyTest).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut config = stock(&unique("plug"), Bytes::mib(512));
    (config.kernel, config.backing) = (Kernel::V6_12, Backing::Memfd);
    let socket = guest_stack::prepare(&mut config, dir.path()).unwrap();
    let vm = guest_stack::boot(&[config]).unwrap().remove(0);
    let daemon = Daemon::start(dir.path(), &[&vm.name], PRIVATE).unwrap();
    daemon.wait_for_tier("guest").unwrap();
    (arena, vm, dir, daemon, socket)
}

/// The disk as the guest reads it, `times` over, past its page cache; what differs.
fn wrong_reads(vm: &Vm, right: &str, times: u32) -> u32 {
    let there = "for i in $(seq 100); do [ -b /dev/vda ] && break; sleep 0.1; done; ls /dev/vda";
    assert_eq!(vm.tool().sh(there, MINUTE).unwrap().trim(), "/dev/vda");
    let read = "echo 3 > /proc/sys/vm/drop_caches; md5sum /dev/vda | cut -c1-32";
    let one = |_| vm.tool().sh(read, MINUTE).unwrap();
    (0..times).map(one).filter(|sum| sum.trim() != right).count() as u32
}

#[test]
fn vm_hands_off_holds_and_devices_that_are_plugged_in_lose_nothing() {
    let (_arena, vm, dir, daemon, socket) = at_work();
    let daemon =
        hands_off_ends_when_nothing_touches_the_vm_any_more(&vm, dir.path(), daemon, &socket);
    vm.tool().start_ready("v", "verify", "size=100000000 seconds=100000", MINUTE).unwrap();
    tripwires_are_lifted_before_a_device_pins_memory(&vm, &daemon);
    a_vhost_user_disk_loses_nothing(&vm, dir.path(), &daemon);
    stop_verify(&vm);
    assert!(daemon.stop());
}

fn a_vhost_user_disk_loses_nothing(vm: &Vm, dir: &Path, daemon: &Daemon) {
    let backend = Backend::start(dir);
    // All that is free, at once, again and again, while the device comes.
    let was = recycled(&daemon.vm(&vm.name).unwrap());
    let again = |s: &Value| {
        touch_and_free(vm, Bytes::mib(64));
        daemon.reclaim().unwrap();
        recycled(&s["vms"][0]) > was + (32 << 20)
    };
    daemon.wait_for("recycling", MINUTE, again).unwrap();
    let right = backend.sum();
    let wrong = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            backend.plug(vm);
            wrong_reads(vm, &right, 6)
        });
        while !reader.is_finished() {
            daemon.reclaim().unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
        reader.join().unwrap()
    });
    assert_eq!(wrong, 0);
    let why = daemon.vm(&vm.name).unwrap()["agent"]["why"].to_string();
    assert!(why.contains("vhost-user"), "{why}");
    // Plugged out, the agent works again.
    vm.qmp("device_del", Some(json!({ "id": "plugged" }))).unwrap();
    daemon.wait_for_tier("guest").unwrap();
}

/// A device node that is called as VFIO's are, and is `/dev/full`.
struct Node(PathBuf);

impl Node {
    fn new() -> Node {
        std::fs::create_dir_all("/dev/vfio").unwrap();
        let path = PathBuf::from(format!("/dev/vfio/ebb-test-{}", std::process::id()));
        let made = Command::new("mknod").arg(&path).args(["c", "1", "7"]).status();
        assert!(made.unwrap().success());
        Node(path)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        // Not where the machine has VFIO.
        let _ = std::fs::remove_dir("/dev/vfio");
    }
}

/// QEMU opens a device that pins guest memory. There is none on this machine: the kernel pins
/// without waiting for userfaultfd, as it does for the writer of `/proc/PID/mem`.
fn tripwires_are_lifted_before_a_device_pins_memory(vm: &Vm, daemon: &Daemon) {
    let address = |gpa: u64| {
        let line = json!({ "command-line": format!("gpa2hva {gpa:#x}") });
        let said = vm.qmp("human-monitor-command", Some(line)).unwrap();
        let said = said.as_str().unwrap();
        let hex = said.rsplit("0x").next().unwrap().trim().to_owned();
        u64::from_str_radix(&hex, 16).unwrap_or_else(|_| panic!("{said}"))
    };
    let wires = [address(0), address(0x6000)];
    let open = || File::options().read(true).write(true).open(format!("/proc/{}/mem", vm.pid));
    let memory = open().unwrap();
    let pin = |at: u64| {
        let mut byte = [0];
        memory.read_at(&mut byte, at).unwrap();
        memory.write_at(&byte, at).is_ok()
    };
    assert_eq!(wires.map(pin), [false, false], "a page that is protected cannot be pinned");
    let node = Node::new();
    let backend = json!({ "type": "file", "data": { "out": node.0 } });
    vm.qmp("chardev-add", Some(json!({ "id": "group", "backend": backend }))).unwrap();
    assert_eq!(wires.map(pin), [true, true]);
    let aside = |s: &Value| s["vms"][0]["agent"]["why"].to_string().contains("VFIO");
    daemon.wait_for("the agent to stand aside", MINUTE, aside).unwrap();
    vm.qmp("chardev-remove", Some(json!({ "id": "group" }))).unwrap();
    drop(node);
    daemon.wait_for_tier("guest").unwrap();
    assert_eq!(wires.map(pin), [false, false]);
}

/// The word that a manager gives before it plugs, and the one after.
fn hands_off_ends_when_nothing_touches_the_vm_any_more(
    vm: &Vm,
    dir: &Path,
    daemon: Daemon,
    socket: &Path,
) -> Daemon {
    ebb_says(dir, &["hands-off", &vm.name, "--for", "5min"]);
    // The agent is free: it would serve another daemon now, and guards nothing.
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid)).unwrap();
    assert!(!maps.lines().any(|l| l.starts_with("VmFlags:") && l.contains(" uw")));
    let mut other = Agent::connect(socket).unwrap();
    other.hello(MINUTE).unwrap();
    drop(other);
    daemon.reclaim().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let shown = daemon.vm(&vm.name).unwrap();
    assert_eq!(shown["hands_off"]["done"], true, "{shown}");
    assert!(shown["standing"].to_string().contains("hands off"), "{shown}");
    // It holds for a daemon that is killed in between.
    daemon.crash();
    let daemon = Daemon::start_again(dir, &[]).unwrap();
    let held = |s: &Value| s["vms"][0]["hands_off"]["done"] == true;
    daemon.wait_for("hands off", MINUTE, held).unwrap();
    ebb_says(dir, &["hands-on", &vm.name]);
    daemon.wait_for_tier("guest").unwrap();
    let (code, _, err) = run_in(dir, &["hands-off", "nobody"]).unwrap();
    assert!(code != 0 && err.contains("nobody"), "{err}");
    daemon
}
