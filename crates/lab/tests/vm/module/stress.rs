//! No bit is false while a kernel does all that moves pages about, nor while its CPUs come
//! and go.

use super::faults::wrong;
use super::*;

#[test]
fn vm_no_false_bit_under_stress() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        stress(kernel, "rescan_ms=2000");
        if soak() {
            stress(kernel, "rescan_ms=2000 order=3");
        }
    });
}

fn stress(kernel: Kernel, arguments: &str) {
    let reporting = |c: &mut VmConfig| {
        c.balloon = Some(Balloon { reporting: true, deflate_on_oom: false });
    };
    let guest = Guest::boot(kernel, false, reporting);
    guest.insmod(arguments);
    let tool = guest.vm.tool();
    tool.request("swapon dev=/dev/zram0 size=134217728", MINUTE).unwrap();
    tool.start("v", "verify", "size=200000000 seconds=100000 threads=2").unwrap();
    // Its answer comes when /tmp/go is gone.
    let all = escape("sh /tmp/stress all >/dev/null 2>&1 </dev/null");
    tool.send(&format!("sh oom=-900 cmd={all}")).unwrap();
    let until = Instant::now() + Duration::from_secs(seconds());
    let (mut audits, mut worst) = (0, 0.0f64);
    while Instant::now() < until {
        let audit = guest.numbers("audit");
        assert_eq!(audit["false"], 0, "{kernel} {arguments}: {audit:?}");
        assert!(audit["set"] > 0, "{audit:?}");
        worst = worst.max(audit["missed"] as f64 / audit["free"].max(1) as f64);
        audits += 1;
    }
    let verify = tool.stat("v").unwrap();
    assert_eq!(verify.u64("errors"), 0, "{verify:?}");
    let said = guest.sh("rm /tmp/go; cat /tmp/offlined");
    let ended = |_: &Vm| guest.sh("ls /tmp/ended 2>&1").starts_with("/tmp/ended\n");
    guest.vm.wait_for("the stress to end", MINUTE, ended).unwrap();
    guest.sh("rm -rf /tmp/s");
    tool.stop("v").unwrap();
    let stats = guest.numbers("stats");
    assert_eq!((stats["state"], stats["leaked"]), (RUNNING, 0), "{stats:?}");
    // A full pass repairs whatever was missed, once it is quiet.
    let quiet = |_: &Vm| {
        let audit = guest.numbers("audit");
        assert_eq!(audit["false"], 0, "{kernel} {arguments}: {audit:?}");
        (audit["missed"] * 1000 <= audit["free"]).then_some(audit)
    };
    let end = guest.vm.wait_for("the re-scan to repair", MINUTE, quiet).unwrap();
    println!(
        "{kernel} {arguments}: {audits} audits, worst missed {:.2} %, offlined {}, {} pages \
         checked; end {end:?}, {stats:?}",
        worst * 100.0,
        said.trim(),
        verify.u64("checks")
    );
    assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
    assert_eq!(guest.complaints(), "", "{kernel}");
}

/// One page allocation that no hook sees is enough; tests build the module so that a
/// CPU makes some whenever it is neither online nor dead.
#[test]
fn vm_cpus_that_come_and_go_leave_no_false_bit() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        let said = guest.insmod(&format!("fault={DYING}"));
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
        let cpus = escape("sh /tmp/stress cpus >/dev/null 2>&1 </dev/null");
        guest.vm.tool().send(&format!("sh oom=-900 cmd={cpus}")).unwrap();
        let rounds = if soak() { 15 } else { 3 };
        for round in 0..rounds {
            for online in [0, 1] {
                let before = guest.numbers("stats")["taken_between"];
                guest.sh(&format!("echo {online} > /sys/devices/system/cpu/cpu1/online"));
                let running = |_: &Vm| guest.numbers("stats")["state"] == RUNNING;
                guest.vm.wait_for("the map to count again", MINUTE, running).unwrap();
                let (audit, after) = (guest.numbers("audit"), guest.numbers("stats"));
                let at = format!("{kernel}, round {round}, online {online}");
                assert_eq!(audit["false"], 0, "{at}: {audit:?}");
                assert!(audit["set"] > 50_000, "{at}: {audit:?}");
                assert!(after["taken_between"] > before, "{at}: {after:?}");
                assert_eq!(after["leaked"], 0, "{at}: {after:?}");
            }
        }
        println!("{kernel}: {rounds} rounds, {:?}", guest.numbers("stats"));
        guest.sh("rm /tmp/go; sleep 2; rm -rf /tmp/s");
        assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
        assert_eq!(guest.complaints(), "", "{kernel}");
        // What the audit says of a module that does not watch CPUs.
        guest.insmod(&format!("rescan_ms=0 fault={}", DYING | NO_CPUS));
        assert_eq!(guest.numbers("audit")["false"], 0, "{kernel}");
        guest.sh("echo 0 > /sys/devices/system/cpu/cpu1/online");
        let audit = guest.numbers("audit");
        assert!(wrong(&audit), "{kernel}: unwatched CPUs are not found: {audit:?}");
    });
}
