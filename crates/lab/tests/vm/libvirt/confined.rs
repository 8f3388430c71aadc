//! Tier guest in a domain as Debian's libvirt starts it: QEMU as `libvirt-qemu`, with a mount
//! namespace of its own and seccomp's sandbox. AppArmor is not part of it.

use super::*;

#[test]
fn vm_the_agent_works_in_a_confined_domain_and_loses_nothing() {
    let (_arena, libvirtd) = host(Kind::Confined);
    let domain = libvirtd.boot_with_agent("confined", RAM, BALLOON).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", domain.pid)).unwrap();
    let has = |line: &str| status.lines().any(|l| l == line);
    assert!(has("Seccomp:\t2") && !has("Uid:\t0\t0\t0\t0"), "{status}");
    let namespace = |pid| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
    assert_ne!(namespace(domain.pid), namespace(libvirtd.pid()));
    domain.tool.sh("insmod /ebb.ko", MINUTE).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let daemon = start(&libvirtd, dir.path(), &["confined"]);
    daemon.wait_for_tier("guest").unwrap();
    domain.tool.start("v", "verify", "size=104857600 seconds=100000 threads=2").unwrap();
    domain.tool.start_ready("hog", "hold", HOG, PATIENCE).unwrap();
    domain.tool.stop("hog").unwrap();
    // A host that is clear keeps huge pages whole in which the other job has a page; an order of
    // an operator splits them. It is for what is free then.
    let recycled = |least: u64| {
        wait_vm(&daemon, "confined", "what was freed", |vm| {
            let enough = vm["agent"]["counters"]["recycled"].as_u64() > Some(least << 20);
            if !enough {
                daemon.reclaim_vm("confined").unwrap();
            }
            enough
        });
    };
    recycled(150);
    let checked = domain.tool.finish("v", PATIENCE).unwrap();
    recycled(250);
    assert_eq!(checked.u64("errors"), 0, "{checked:?}");
    assert!(checked.u64("checks") > 0, "{checked:?}");
    wait_whole(&libvirtd, daemon, &["confined"]);
}
