//! What an operator orders, and who else sets KSM: out and in again, all broken, released
//! after a crash, and taken over from the `ksmtuned` that distributions have.

use ebb_core::sample::KsmStat;
use ebb_host::probe::ksm::{read_ksm, read_ksm_stat};
use ebb_lab::baselines::Ksmtuned;
use ebb_lab::ebb::binary;

use super::*;

fn stat(vm: &Vm) -> KsmStat {
    read_ksm_stat(&Root::default(), vm.pid).unwrap().unwrap()
}

/// What KSM saves, host-wide, of pages that are not zeros.
fn sharing() -> u64 {
    read_ksm(&Root::default()).unwrap().unwrap().pages_sharing
}

fn wait(what: &str, done: impl FnMut() -> bool) {
    poll(2 * MINUTE, done).unwrap_or_else(|| panic!("{what}: not in two minutes"));
}

/// `ebb merge off --all` where the kernel tells this size as available; whether it was done.
fn off_on_a_host_with(available: Bytes, dir: &Path) -> (bool, String) {
    let real = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = |l: &str| match l.starts_with("MemAvailable:") {
        true => format!("MemAvailable: {} kB\n", available.0 >> 10),
        false => format!("{l}\n"),
    };
    let told = dir.join("meminfo");
    std::fs::write(&told, real.lines().map(line).collect::<String>()).unwrap();
    let out = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount --bind \"$0\" /proc/meminfo && exec \"$@\""])
        .arg(told)
        .arg(binary().unwrap())
        .args(["merge", "off", "--all", "--config"])
        .arg(dir.join("ebb.toml"))
        .output()
        .unwrap();
    (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
}

/// Without a daemon: KSM works as somebody has set it.
#[test]
fn vm_merge_off_takes_one_out_on_brings_it_in_and_off_alone_breaks_all() {
    let arena = held();
    let vms = boot_pair(None);
    for (knob, value) in KNOBS.iter().zip(["1", "20000", "10", "0", "1"]) {
        set_knob(&arena, knob, value);
    }
    let dir = tempfile::tempdir().unwrap();
    configure(dir.path(), &[("mg1", "a"), ("mg2", "a")]);
    // The process's own counters keep what was broken until ksmd comes by again.
    let merged = |vm: &Vm| mapped(vm).merged.0 / PAGE;
    wait("merging", || vms.iter().all(|vm| merged(vm) > 8000));

    ebb_says(dir.path(), &["merge", "off", "mg1"]);
    println!("off mg1: {:?}, {:?}", mapped(&vms[0]), mapped(&vms[1]));
    assert!(!open(&vms[0]) && open(&vms[1]));
    assert!(merged(&vms[0]) == 0 && merged(&vms[1]) > 1000);
    ebb_says(dir.path(), &["merge", "on", "mg1"]);
    assert!(open(&vms[0]));
    wait("merging again", || merged(&vms[0]) > 8000);

    let before = sharing();
    let (done, said) = off_on_a_host_with(Bytes::mib(280), dir.path());
    assert!(!done && said.contains("and 256 MiB must stay free, but 280 MiB"), "{said}");
    assert!(sharing() > before / 2 && knob("run") == "1", "nothing is broken: {}", sharing());
    let said = ebb_says(dir.path(), &["merge", "off", "--all"]);
    println!("off: {before} pages saved, then {}; {said}", sharing());
    assert!(before > 4000 && sharing() == 0 && knob("run") == "2");
    assert!(vms.iter().all(|vm| merged(vm) == 0), "{:?}, {:?}", stat(&vms[0]), stat(&vms[1]));
    vms.iter().for_each(all_is_there);
}

/// A daemon that is gone for good: what it changed is put back without it, and what was
/// merged stays so.
#[test]
fn vm_release_puts_back_ksm_and_who_was_open_and_breaks_no_merge() {
    let _arena = held();
    let before = knobs();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot_pair(None);
    let daemon = merging(dir.path(), "2s");
    wait_merged(&daemon, 8000, 3 * MINUTE);
    ebb_says(dir.path(), &["merge", "off", "mg2"]);
    let closed = |s: &Value| s["vms"][1]["merge"]["open"] == false;
    daemon.wait_for("mg2 to be out", MINUTE, closed).unwrap();
    assert!(!open(&vms[1]) && open(&vms[0]));
    daemon.crash();
    let kept = stat(&vms[0]);
    assert!(knobs() != before && dir.path().join("ksm.json").exists());
    let said = ebb_says(dir.path(), &["release"]);
    println!("{said}; {kept:?}, then {:?}", stat(&vms[0]));
    is_put_back(&before, dir.path());
    assert!(vms.iter().all(open), "as QEMU was started");
    assert!(stat(&vms[0]).merged() >= kept.merged() * 9 / 10 && kept.merged() > 1000);
    vms.iter().for_each(all_is_there);
}

#[test]
fn vm_a_running_ksmtuned_is_overruled_named_and_left_as_it_was() {
    let _arena = held();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot_pair(None);
    const PAGES: &str = "333";
    let settings = [
        ("KSM_MONITOR_INTERVAL", "1"),
        // Every host is one that is short.
        ("KSM_THRES_COEF", "100"),
        ("KSM_NPAGES_MIN", PAGES),
        ("KSM_NPAGES_MAX", PAGES),
    ];
    let tuned = Ksmtuned::start(dir.path(), &settings).unwrap();
    wait("ksmtuned", || knob("pages_to_scan") == PAGES && knob("run") == "1");
    let before = knobs();
    let daemon = merging(dir.path(), "2s");
    let state = wait_merged(&daemon, 8000, 3 * MINUTE);
    let pid = tuned.0.as_raw_nonzero().get();
    let warned = |s: &Value| s["host"]["warnings"].to_string().contains(&format!("process {pid})"));
    assert!(warned(&state), "{:#}", state["host"]["warnings"]);
    // It goes on writing each second, and between bursts ksmd rests all the same.
    let mut back = 0;
    wait("three times that it is set back", || {
        let theirs = || knob("run") == "1" && knob("pages_to_scan") == PAGES;
        if theirs() {
            wait("its settings to be set back", || !theirs());
            back += 1;
        }
        back == 3
    });
    drop(tuned);
    let rests = |s: &Value| {
        let idle = s["host"]["merge"]["why"].as_str().is_some_and(|w| w.starts_with("ksmd rests"));
        idle && s["host"]["ksm"]["run"] == 0
    };
    daemon.wait_for("rest", MINUTE, rests).unwrap();
    assert!(daemon.stop());
    is_put_back(&before, dir.path());
    vms.iter().for_each(all_is_there);
}
