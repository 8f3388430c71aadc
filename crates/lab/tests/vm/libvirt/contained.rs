//! A domain whose libvirt is in a container: mount and pid namespaces of their own, as KubeVirt's
//! pods have them. Ebb runs outside.

use super::*;

#[test]
fn vm_a_domain_in_a_container_is_ballooned_where_that_is_allowed() {
    let (_arena, libvirtd) = host(Kind::Contained);
    let _domain = boot(&libvirtd, "pod");
    let (dir, daemon) = watch(&["pod"], "");
    std::thread::sleep(Duration::from_secs(3));
    let state = daemon.state().unwrap();
    assert!(state["vms"].is_array());
    assert!(of(&state, "pod").is_null(), "it is no VM of the host's: {state}");
    assert!(daemon.stop());

    let daemon = Daemon::start(dir.path(), &["pod"], "containers = true").unwrap();
    wait_up(&daemon, "pod");
    daemon.squeeze("pod", Bytes::mib(300)).unwrap();
    let left = size(&libvirtd, "pod");
    assert!(left <= Bytes::mib(300), "{left}: {}", daemon.log());
    libvirtd.virsh(&["suspend", "pod"]).unwrap();
    wait_vm(&daemon, "pod", "a suspended domain", |vm| vm["run"] == "paused");
    libvirtd.virsh(&["resume", "pod"]).unwrap();
    wait_up(&daemon, "pod");
    wait_whole(&libvirtd, daemon, &["pod"]);
}
