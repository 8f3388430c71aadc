//! Merging as it is by default while the host is not short: in pulses, within less than a
//! hundredth of a core, and to its end all the same.

use ebb_host::probe::ksm::ksmd;
use ebb_host::probe::process::read_run_time;

use super::*;

/// What `merge.cpu_clear` is by default, of a core.
const SHARE: f64 = 0.008;

fn ksmd_used() -> Duration {
    let root = Root::default();
    read_run_time(&root, ksmd(&root).unwrap()).unwrap().unwrap()
}

fn number(name: &str) -> u64 {
    knob(name).parse().unwrap()
}

#[test]
fn vm_pulses_merge_what_there_is_and_take_no_more_than_they_may() {
    let _arena = held();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot_pair(None);
    let daemon = Daemon::start(dir.path(), &PAIR, "[merge]\nmode = \"on\"\n").unwrap();
    let works = |s: &Value| s["host"]["ksm"]["run"] == 1;
    daemon.wait_for("a burst", 5 * MINUTE, works).unwrap();
    let (begun, before) = (Instant::now(), ksmd_used());
    let mut pulses = Vec::new();
    let done = |state: &Value| {
        if knob("run") == "1" {
            let (pages, sleep_ms) = (number("pages_to_scan"), number("sleep_millisecs"));
            assert!(sleep_ms >= 4 && pages <= 100, "{pages} pages, {sleep_ms} ms");
            pulses.push(pages);
        }
        merged(state).iter().sum::<u64>() > 20_000
    };
    daemon.wait_for("pages merged in pulses", 8 * MINUTE, done).unwrap();
    let used = (ksmd_used() - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!(
        "{:?}: {:.2} % of a core, {:?} to {:?} pages a pulse",
        begun.elapsed(),
        used * 100.0,
        pulses.iter().min(),
        pulses.iter().max()
    );
    // Known by what a page cost a tenth of a second ago.
    assert!(used < 2.0 * SHARE, "{used}");
    assert!(pulses.iter().any(|p| *p > 8), "a first look is cheap, and known to be: {pulses:?}");
    vms.iter().for_each(all_is_there);
    assert!(daemon.stop());
}
