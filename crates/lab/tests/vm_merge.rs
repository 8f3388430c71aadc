//! Merging on real VMs: the report against every page read one by one, before and
//! after KSM has merged; and what guests hold is what
//! they wrote. KSM is the whole machine's: the arena holds it and puts it back. It
//! works on every VM that is there, so the second test takes long beside others.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_core::model::Pressure;
use ebb_core::policy::merge::{Candidates, Order, Settings};
use ebb_core::units::Bytes;
use ebb_host::act::governor::Governor;
use ebb_host::act::ksm;
use ebb_host::linux::LinuxHost;
use ebb_host::probe::ksm::read_ksm;
use ebb_host::root::Root;
use ebb_lab::arena::{Arena, ArenaConfig};
use ebb_lab::ebb::run;
use ebb_lab::image::Kernel;
use ebb_lab::truth::Truth;
use ebb_lab::vm::{Vm, VmConfig};
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);
const KNOBS: [&str; 5] =
    ["run", "pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages"];

/// The machine with KSM at rest.
fn held() -> Arena {
    let arena = Arena::enter(&ArenaConfig::default()).unwrap();
    for knob in KNOBS {
        let path = PathBuf::from(format!("/sys/kernel/mm/ksm/{knob}"));
        let now = std::fs::read_to_string(&path).unwrap();
        let value = if knob == "run" { "0" } else { now.trim() };
        arena.set(&path, value).unwrap();
    }
    arena
}

fn boot(names: &[(&str, Kernel)]) -> Vec<Vm> {
    let start = |(name, kernel): &(&str, Kernel)| {
        let mut config = VmConfig::new(*name, Bytes::mib(224));
        config.kernel = *kernel;
        Vm::spawn(&config).unwrap()
    };
    let mut vms: Vec<Vm> = names.iter().map(start).collect();
    for (n, vm) in vms.iter_mut().enumerate() {
        vm.wait_ready().unwrap();
        let tool = vm.tool();
        tool.start_ready("v", "verify", "size=8388608 seconds=86400", MINUTE).unwrap();
        let held = format!("size=50331648 seed={n} pattern=template share=0.6 cluster=262144");
        tool.start_ready("h", "hold", &held, MINUTE).unwrap();
        tool.start_ready("z", "hold", "size=8388608 pattern=zero", MINUTE).unwrap();
    }
    vms
}

/// Each VM by its name in this group; others on this machine are not looked at.
fn config(dir: &Path, groups: &[(&str, &str)]) -> String {
    let file = dir.join("ebb.toml");
    let vm = |(name, group): &(&str, &str)| format!("[vm.{name}]\ngroup = \"{group}\"\n");
    let text =
        "[host]\nvms = \"listed\"\n".to_string() + &groups.iter().map(vm).collect::<String>();
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_string()
}

fn report(config: &str, more: &[&str]) -> Value {
    let mut args = vec!["merge", "report", "--config", config, "--json", "--hurry"];
    args.extend(more);
    let (code, out, err) = run(&args).unwrap();
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

fn bytes(v: &Value) -> Bytes {
    Bytes(v.as_u64().unwrap_or_else(|| panic!("{v} is no size")))
}

/// What a report says can be saved, groups or not.
fn everything(report: &Value) -> Bytes {
    bytes(&report["saves"]) + bytes(&report["split"]["across"])
}

#[test]
fn vm_a_report_says_what_every_page_read_one_by_one_says() {
    let _arena = Arena::enter(&ArenaConfig::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot(&[("mg1", Kernel::V6_1), ("mg2", Kernel::V6_1), ("mg3", Kernel::V6_12)]);
    let config = config(dir.path(), &[("mg1", "a"), ("mg2", "a"), ("mg3", "b")]);
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let truth = Truth::of(&pids(&vms)).unwrap();
    let said = report(&config, &["--full"]);
    let scan = &said["scan"];
    println!(
        "{truth:?}: ideal {}, said {}; {:.2} GB/s a core, {} of table for {} read",
        truth.ideal(),
        everything(&said),
        scan["bytes_per_cpu_second"].as_f64().unwrap() / 1e9,
        bytes(&scan["table"]),
        bytes(&scan["read"])
    );
    assert!(everything(&said).abs_diff(truth.ideal()) <= truth.ideal().share(0.01), "{said:#}");
    assert_eq!(bytes(&said["split"]["zero"]), Bytes::pages(truth.zeros));
    // The two of one group have most in common, and zeros each their own.
    assert!(bytes(&said["split"]["between"]) > Bytes::mib(24), "{said:#}");
    assert!(bytes(&said["split"]["across"]) > Bytes::mib(8), "{said:#}");
    // One VM alone has no neighbours.
    let alone = report(&config, &["--full", "mg1"]);
    let own = Truth::of(&[vms[0].pid()]).unwrap();
    assert!(everything(&alone).abs_diff(own.ideal()) <= own.ideal().share(0.01), "{alone:#}");
    assert_eq!(bytes(&alone["split"]["between"]) + bytes(&alone["split"]["across"]), Bytes::ZERO);
}

#[test]
#[ignore = "KSM works on every VM of the machine: other VMs beside it end the burst early"]
fn vm_ksm_merges_what_the_report_found_and_the_guests_notice_nothing() {
    let _arena = held();
    let root = Root::default();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot(&[("mg1", Kernel::V6_1), ("mg2", Kernel::V6_1), ("mg3", Kernel::V6_12)]);
    let config = config(dir.path(), &[("mg1", "a"), ("mg2", "a"), ("mg3", "b")]);
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let before = Truth::of(&pids(&vms)).unwrap();
    merge_all(&report(&config, &["--full"]));
    let after = Truth::of(&pids(&vms)).unwrap();
    let saved = Bytes::pages(before.frames - after.frames);
    let recall = saved.fraction_of(before.ideal());
    println!("ideal {}, saved {saved}: recall {recall:.3}", before.ideal());
    assert!(recall > 0.95, "{recall}");
    // What is merged is not counted again.
    let said = report(&config, &["--full"]);
    println!("left: ideal {}, said {}", after.ideal(), everything(&said));
    let off = everything(&said).abs_diff(after.ideal());
    assert!(off <= before.ideal().share(0.01), "{after:?} {said:#}");
    let merged = |v: &Value| bytes(&v["ksm"]["merged"]) + bytes(&v["ksm"]["zero"]);
    assert!(said["vms"].as_array().unwrap().iter().all(|v| merged(v) > Bytes::mib(8)), "{said:#}");

    vms.iter().for_each(|vm| vm.resume().unwrap());
    let (code, out, err) = run(&["merge", "off"]).unwrap();
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("private again"), "{out}");
    assert_eq!(ksm::saved(&read_ksm(&root).unwrap().unwrap()), Bytes::ZERO);
    for vm in &vms {
        let v = vm.tool().stop("v").unwrap();
        assert!(v.u64("errors") == 0 && v.u64("checks") > 0, "{}: {v:?}", vm.name());
    }
}

fn pids(vms: &[Vm]) -> Vec<u32> {
    vms.iter().map(Vm::pid).collect()
}

/// The governor, with what the report found, until it rests.
fn merge_all(said: &Value) {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { cores: 1.0, ..Settings::default() };
    let state = dir.path().join("ksm.json");
    let before: Vec<String> = KNOBS.iter().map(|k| knob(k)).collect();
    let mut governor = Governor::take(Root::default(), &state, settings, false).unwrap();
    let pages = |v: &Value| bytes(v).0 / 4096;
    let held = said["vms"].as_array().unwrap().iter().map(|v| v["pages"]["read"].as_u64().unwrap());
    governor.plan(Candidates {
        pages: held.sum(),
        zeros: pages(&said["split"]["zero"]),
        twins: pages(&said["split"]["within"]) + pages(&said["split"]["between"]),
    });
    let until = Instant::now() + 10 * MINUTE;
    let mut ran = false;
    loop {
        match governor.step(LinuxHost::now(), Pressure::Clear).unwrap() {
            Order::Run { .. } => ran = true,
            Order::Rest { why } => {
                println!("{why}");
                assert!(ran, "{why}");
                break;
            }
        }
        assert!(Instant::now() < until, "KSM does not come to an end");
        std::thread::sleep(Duration::from_millis(100));
    }
    governor.release().unwrap();
    assert_eq!(KNOBS.iter().map(|k| knob(k)).collect::<Vec<_>>(), before, "put back");
}

fn knob(name: &str) -> String {
    std::fs::read_to_string(format!("/sys/kernel/mm/ksm/{name}")).unwrap().trim().to_string()
}
