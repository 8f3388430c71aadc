//! VMs of a real libvirtd, which has their only monitor: Ebb sees them, takes and gives memory,
//! and respects what is done with `virsh` meanwhile.

use std::time::Duration;

use ebb_core::units::Bytes;
use ebb_lab::arena::Arena;
use ebb_lab::ebb::Daemon;
use ebb_lab::libvirt::{Domain, Libvirtd};
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);
const RAM: Bytes = Bytes::mib(512);
const BALLOON: &str = "<memballoon model='virtio' autodeflate='on' freePageReporting='off'/>";

fn boot(libvirtd: &Libvirtd, name: &str) -> Domain {
    libvirtd.boot(name, RAM, BALLOON, "").unwrap()
}

fn is_up(state: &Value, name: &str) -> Option<()> {
    let vms = state["vms"].as_array()?;
    let vm = vms.iter().find(|v| v["name"] == name)?;
    (vm["link"]["state"] == "up" && vm["available"].as_u64().is_some()).then_some(())
}

#[test]
fn vm_domains_of_libvirt_are_seen_and_their_balloons_moved() {
    let _arena = Arena::beside().unwrap();
    let libvirtd = Libvirtd::start().unwrap();
    let domain = boot(&libvirtd, "tame");
    let dir = tempfile::tempdir().unwrap();
    Daemon::configure(dir.path(), &["tame"], "").unwrap();
    let daemon = Daemon::start_program(&libvirtd.program().unwrap(), dir.path(), &[]).unwrap();
    daemon.wait_for("the domain's statistics", MINUTE, |s| is_up(s, "tame")).unwrap();
    let vm = daemon.vm("tame").unwrap();
    assert_eq!(vm["pid"].as_u64(), Some(u64::from(domain.pid())), "{vm}");
    assert_eq!((vm["ram"].as_u64(), vm["deflate_on_oom"].as_bool()), (Some(RAM.0), Some(true)));
}
