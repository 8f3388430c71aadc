//! A domain of a user's session: libvirtd and QEMU run as an ordinary user, Ebb as root.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use ebb_core::config::NAMESPACE;
use ebb_lab::libvirt::USER;

use super::*;

#[test]
fn vm_a_domain_of_a_users_session_is_ballooned_and_sets_nothing() {
    let (_arena, libvirtd) = host(Kind::Session);
    let metadata = format!(
        "<metadata><ebb:memory xmlns:ebb='{NAMESPACE}' min='400MiB' manage='no'/></metadata>"
    );
    let domain = libvirtd.boot("mine", RAM, BALLOON, &metadata).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", domain.pid)).unwrap();
    assert!(status.contains(&format!("Uid:\t{USER}\t{USER}\t{USER}\t{USER}")), "{status}");

    let dir = tempfile::tempdir().unwrap();
    let users = format!("users = [{USER}]");
    let daemon = start_with(&libvirtd, dir.path(), &["mine"], &users);
    wait_up(&daemon, "mine");
    squeeze_balloon(&libvirtd, &daemon, "mine", Bytes::mib(300));
    let vm = daemon.vm("mine").unwrap();
    assert!(vm["by_metadata"].is_null(), "{vm}");
    // libvirt may have been slow to answer in the tick of that look.
    wait_up(&daemon, "mine");
    let xml = libvirtd.virsh(&["dumpxml", "mine"]).unwrap();
    assert!(!xml.contains("urn:ebb:balloon:1"), "no note in a user's domain: {xml}");
    libvirtd.kill_and_start().unwrap();
    wait_up(&daemon, "mine");
    wait_whole(&libvirtd, daemon, &["mine"]);
    assert!(!asks_for_statistics(&libvirtd, "mine"), "the interval is as it was");

    // A socket in its place that another user serves, as a link to the system's is.
    let socket = libvirtd.dir().join(format!("run/user/{USER}/libvirt/libvirt-sock"));
    let other = libvirtd.dir().join("other");
    let aside = socket.with_extension("aside");
    fs::rename(&socket, &aside).unwrap();
    let _listener = UnixListener::bind(&other).unwrap();
    symlink(&other, &socket).unwrap();
    let daemon = start_with(&libvirtd, dir.path(), &["mine"], &users);
    let told = format!("libvirt-sock: served by a process of uid 0, not of uid {USER}");
    let refused = |vm: &Value| vm["link"]["why"].as_str().is_some_and(|why| why.contains(&told));
    let found = daemon.wait_for_vm("mine", "a socket that is refused", PATIENCE, refused);
    // So that the domain can be ended.
    fs::rename(&aside, &socket).unwrap();
    found.unwrap();
    assert!(daemon.stop());
}
