//! Domains that change their name, their process or their host while Ebb has memory of theirs.

use ebb_lab::libvirt::{Domain, Libvirtd};

use super::*;

const SMALL: Bytes = Bytes::mib(300);
const VERIFY: &str = "size=104857600 seconds=100000 seed=5";

/// Ebb has read what the Ebb before noted, and may have given it back already.
fn wait_owed(daemon: &Daemon, name: &str) {
    wait_vm(daemon, name, "what is owed", |vm| {
        vm["ballooned"].as_u64() > Some(0) || vm["actual"] == RAM.0
    });
}

/// Its guest has written what it checks from then on, and Ebb has seen that it needs that and no
/// more: one that seems to grow is given more than [`SMALL`] at once.
fn begin_checks(domain: &Domain, daemon: &Daemon, name: &str) {
    domain.tool.start_ready("v", "verify", VERIFY, PATIENCE).unwrap();
    let needs = |vm: &Value| vm["need"].as_u64() > Some(Bytes::mib(150).0);
    wait_vm(daemon, name, "what the guest needs", needs);
    // Its speed is forgotten.
    std::thread::sleep(Duration::from_secs(6));
}

/// The guest, in another QEMU by now, goes on checking what it wrote.
fn check_data(libvirtd: &Libvirtd, name: &str) {
    let tool = libvirtd.tool(name).unwrap();
    let checks = || tool.stat("v").unwrap();
    let before = checks().u64("checks");
    let goes_on = |_: &Libvirtd| checks().u64("checks") > before;
    libvirtd.wait("the next check", goes_on).unwrap();
    assert_eq!(checks().u64("errors"), 0, "{:?}", checks());
}

/// libvirt renames only domains that do not run.
#[test]
fn vm_a_domain_that_is_renamed_is_owed_nothing_and_followed_by_its_new_name() {
    let (_arena, libvirtd) = host(Kind::Root);
    let _domain = boot(&libvirtd, "before");
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(&libvirtd, dir.path(), &["before", "after"]);
    wait_up(&daemon, "before");
    daemon.squeeze("before", SMALL).unwrap();
    assert!(libvirtd.virsh(&["domrename", "before", "after"]).is_err(), "while it runs");
    libvirtd.virsh(&["destroy", "before"]).unwrap();
    wait_gone(&daemon, "before");
    libvirtd.virsh(&["domrename", "before", "after"]).unwrap();
    libvirtd.virsh(&["start", "after"]).unwrap();
    wait_up(&daemon, "after");
    assert_eq!(size(&libvirtd, "after"), RAM);
    daemon.squeeze("after", SMALL).unwrap();
    wait_whole(&libvirtd, daemon, &["after"]);
}

#[test]
fn vm_a_domain_with_a_managed_save_starts_with_its_memory() {
    let (_arena, libvirtd) = host(Kind::Root);
    let (domain, _dir, daemon) = watched(&libvirtd, "kept");
    begin_checks(&domain, &daemon, "kept");
    daemon.squeeze("kept", SMALL).unwrap();
    libvirtd.virsh(&["managedsave", "kept"]).unwrap();
    wait_gone(&daemon, "kept");
    libvirtd.virsh(&["start", "kept"]).unwrap();
    wait_up(&daemon, "kept");
    assert_ne!(daemon.vm("kept").unwrap()["pid"].as_u64(), Some(u64::from(domain.pid)));
    wait_owed(&daemon, "kept");
    wait_whole(&libvirtd, daemon, &["kept"]);
    check_data(&libvirtd, "kept");
}

/// What is owed is in the note alone: the daemon's state file has gone, too.
#[test]
fn vm_a_domain_that_is_reverted_to_a_snapshot_has_its_memory() {
    let (_arena, libvirtd) = host(Kind::Root);
    let disk = libvirtd.dir().join("snap.qcow2").display().to_string();
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &disk, "16M"]).status();
    assert!(made.unwrap().success());
    let devices = format!(
        "{BALLOON}<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>\
         <source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
    );
    let domain = libvirtd.boot("snap", RAM, &devices, "").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(&libvirtd, dir.path(), &["snap"]);
    wait_up(&daemon, "snap");
    begin_checks(&domain, &daemon, "snap");
    daemon.squeeze("snap", SMALL).unwrap();
    // A daemon that sees the domain saved gives it what it is owed.
    daemon.crash();
    libvirtd.virsh(&["snapshot-create-as", "snap", "s1"]).unwrap();
    libvirtd.virsh(&["snapshot-revert", "snap", "s1"]).unwrap();
    // Ebb may have given some of it back right before it was killed.
    let reverted = size(&libvirtd, "snap");
    assert!(reverted < RAM, "{reverted}: the domain is owed nothing");
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(&libvirtd, dir.path(), &["snap"]);
    wait_up(&daemon, "snap");
    wait_owed(&daemon, "snap");
    wait_whole(&libvirtd, daemon, &["snap"]);
    check_data(&libvirtd, "snap");
}

#[test]
fn vm_a_domain_that_migrates_has_its_memory_on_the_other_host() {
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let (from, to) = (Libvirtd::start().unwrap(), Libvirtd::start().unwrap());
    let domain = boot(&from, "mover");
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let here = start(&from, dirs[0].path(), &["mover"]);
    let there = start(&to, dirs[1].path(), &["mover"]);
    wait_up(&here, "mover");
    begin_checks(&domain, &here, "mover");
    here.squeeze("mover", SMALL).unwrap();
    let socket = to.dir().join("run/libvirt/libvirt-sock");
    let uri = format!("qemu+unix:///system?socket={}", socket.display());
    let address = "tcp://127.0.0.1";
    // The source removes its own socket when it ends.
    let xml = from.virsh(&["dumpxml", "--migratable", "mover"]).unwrap();
    let dir = |of: &Libvirtd| of.dir().display().to_string();
    let file = from.dir().join("moved.xml");
    fs::write(&file, xml.replace(&dir(&from), &dir(&to))).unwrap();
    let file = file.display().to_string();
    let mut how = vec!["migrate", "mover", &uri, "--migrateuri", address, "--xml", &file];
    if from.migrates_live() {
        how.push("--live");
    }
    from.virsh(&how).unwrap();
    wait_owed(&there, "mover");
    here.end_well().unwrap();
    there.end_well().unwrap();
    wait_size(&to, "mover", |b| b == RAM);
    check_data(&to, "mover");
}
