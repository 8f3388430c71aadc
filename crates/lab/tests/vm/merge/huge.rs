//! Huge pages and merging: khugepaged copies merged pages into huge ones, which undoes
//! their merges, unless it is held.

use super::*;

const KHUGEPAGED: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged";
/// The kernel's own settings, and a khugepaged that sleeps until it is woken.
const HUGE: [(&str, &str); 4] = [
    ("max_ptes_shared", "256"),
    ("max_ptes_none", "511"),
    ("pages_to_scan", "65536"),
    ("scan_sleep_millisecs", "3600000"),
];

/// A setting of khugepaged.
pub fn knob(name: &str) -> PathBuf {
    Path::new(KHUGEPAGED).join(name)
}

/// Has khugepaged look at all there is, and at all of it again.
fn khugepaged_goes_over_it() {
    let scans =
        || -> u64 { fs::read_to_string(knob("full_scans")).unwrap().trim().parse().unwrap() };
    let goal = scans() + 3;
    fs::write(knob("scan_sleep_millisecs"), "10").unwrap();
    let done = ebb_lab::poll(MINUTE, || scans() >= goal);
    fs::write(knob("scan_sleep_millisecs"), HUGE[3].1).unwrap();
    assert!(done.is_some(), "khugepaged has come by");
}

#[test]
fn vm_khugepaged_undoes_merges_unless_it_is_held() {
    let arena = held();
    for (name, value) in HUGE {
        arena.set(&knob(name), value).unwrap();
    }
    let vms = boot_pair(None);
    for (n, vm) in vms.iter().enumerate() {
        // Blocks of 2 MiB of which less than half is alike: the others khugepaged leaves.
        let few = format!("size=50331648 seed={n} pattern=template share=0.25 cluster=65536");
        vm.tool().start_ready("k", "hold", &few, MINUTE).unwrap();
        vm.pause().unwrap();
    }
    for hold in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let text = merge_config("1h") + &format!("hold_khugepaged = {hold}\n");
        let daemon = Daemon::start(dir.path(), &PAIR, &text).unwrap();
        let done = |state: &Value| {
            let rests = state["host"]["ksm"]["run"] == 0;
            let known = rests && merged(state).iter().sum::<u64>() > 20_000;
            let truth = known.then(|| Truth::of(&pids(&vms)).unwrap())?;
            (truth.ideal() < Bytes::mib(4)).then_some(truth)
        };
        let before = daemon.wait_for("all that is alike merged", 6 * MINUTE, done).unwrap();
        khugepaged_goes_over_it();
        let after = Truth::of(&pids(&vms)).unwrap();
        println!("held {hold}: {before:?}, then {after:?}");
        let undone = Bytes::pages(after.frames.saturating_sub(before.frames));
        match hold {
            false => assert!(undone > Bytes::mib(8), "{before:?}, then {after:?}"),
            true => assert!(undone < Bytes::mib(1), "{before:?}, then {after:?}"),
        }
        assert!(daemon.stop());
        assert_eq!(fs::read_to_string(knob("max_ptes_shared")).unwrap().trim(), HUGE[0].1);
    }
    vms.iter().for_each(|vm| vm.resume().unwrap());
    vms.iter().for_each(all_is_there);
}
