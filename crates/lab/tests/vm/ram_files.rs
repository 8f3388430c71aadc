//! RAM that is a file in a tmpfs with a size limit: what Ebb gives back must have room there when
//! the guest takes it again, or QEMU is killed by SIGBUS.

use super::*;

const RAM: Bytes = Bytes::mib(512);
/// Also where not every process may be asked what it maps.
const PRIVATE: &str = "[defaults]\nprivate_ram = true\n";

/// A tmpfs of its own.
struct Mount(TempDir);

impl Mount {
    fn new(size: Bytes) -> Mount {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={}", size.0), "ebb-lab"])
            .arg(dir.path())
            .status();
        assert!(done.unwrap().success(), "mount");
        Mount(dir)
    }

    fn free(&self) -> Bytes {
        let mount = rustix::fs::statfs(self.0.path()).unwrap();
        Bytes(mount.f_bavail * mount.f_bsize as u64)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(self.0.path()).status());
    }
}

/// Another file fills the mount until not all of the VM's RAM has room there. Nothing of it is
/// given back until that file is gone.
#[test]
fn vm_what_a_full_tmpfs_cannot_hold_again_is_not_given_back() {
    use std::os::unix::fs::MetadataExt;
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let mount = Mount::new(Bytes::mib(900));
    let ram = mount.0.path().join("ram");
    let held = || Bytes(fs::metadata(&ram).unwrap().blocks() * 512);
    let dir = tempfile::tempdir().unwrap();
    let mut config = stock(&unique("file"), RAM);
    config.backing = Backing::File(ram.clone());
    guest_stack::prepare(&mut config, dir.path()).unwrap();
    let vm = guest_stack::boot(&[config]).unwrap().remove(0);
    vm.tool().start("v", "verify", "size=33554432 seconds=100000").unwrap();
    let daemon = Daemon::start(dir.path(), &[&vm.name], PRIVATE).unwrap();
    daemon.wait_for_tier("guest").unwrap();

    // What is free before another program comes is given back.
    touch_and_free(&vm, Bytes::mib(250));
    let full = held();
    let given = |full: Bytes| {
        daemon.reclaim().unwrap();
        full - held() > Bytes::mib(200)
    };
    let state = || format!("{}: {}\n{}", held(), daemon.state().unwrap(), daemon.log());
    wait_until(|| given(full), state);

    vm.tool().start_ready("h", "hold", "size=262144000", MINUTE).unwrap();
    let other = File::create(mount.0.path().join("other")).unwrap();
    let lacks = (RAM - held()).min(mount.free()) - Bytes::mib(32);
    rustix::fs::fallocate(&other, rustix::fs::FallocateFlags::empty(), 0, (mount.free() - lacks).0)
        .unwrap();
    let is_told = |vm: &Value| vm["pinned"].to_string().contains("tmpfs with a size limit");
    daemon.wait_for_vm(&vm.name, "a mount that is too full", MINUTE, is_told).unwrap();
    let text = ebb_says(dir.path(), &["explain", &vm.name]);
    assert!(text.contains("and VMs may still touch"), "{text}");
    vm.tool().stop("h").unwrap();
    let (full, size) = (held(), vm.balloon().unwrap());
    for _ in 0..3 {
        ebb_lab::ebb::run_in(dir.path(), &["reclaim", &vm.name]).unwrap();
    }
    assert!(held() >= full - Bytes::mib(8), "{full}, {}; {}", held(), daemon.log());
    assert!(vm.balloon().unwrap() >= size, "{}", daemon.log());
    // A guest that takes pages which were never allocated has QEMU killed, whatever Ebb does.
    touch_and_free(&vm, mount.free().share(0.5));

    drop(other);
    fs::remove_file(mount.0.path().join("other")).unwrap();
    touch_and_free(&vm, Bytes::mib(250));
    wait_until(|| given(full), state);
    stop_verify(&vm);
    assert!(daemon.stop());
    vm.check().unwrap();
}
