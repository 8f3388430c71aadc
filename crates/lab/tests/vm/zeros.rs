//! Pages of zeros of real VMs are freed without their help: the host has the memory,
//! the guest has every page as it was, and pages that are no zeros stay where they are.

use ebb_core::units::PAGE;
use ebb_host::probe::regions::{Region, guest_ram, read_smaps};

use super::*;

const RAM: Bytes = Bytes::mib(384);
/// Nine of ten clusters of 16 KiB are zeros, and all of it is held.
const HELD: &str = "size=201326592 pattern=zero share=0.9 cluster=16384 seed=3";

/// VMs that nobody can ask for anything: without a balloon. In each a job holds
/// [`HELD`], and another writes, frees and checks pages all the time.
fn boot(names: &[&str], small_pages: bool, arena: &Arena) -> Vec<Vm> {
    let config = |name: &&str| {
        let mut config = stock(name, RAM);
        (config.balloon, config.small_pages) = (None, small_pages);
        config.cgroup = arena.cgroup().map(|c| c.dir.clone());
        config
    };
    let vms = guest_stack::boot(&names.iter().map(config).collect::<Vec<_>>()).unwrap();
    for vm in &vms {
        let tool = vm.tool();
        tool.write("/sys/kernel/mm/transparent_hugepage/enabled", "never").unwrap();
        tool.start_ready("h", "hold", HELD, MINUTE).unwrap();
        tool.start_ready("v", "verify", "size=16777216 seconds=86400", MINUTE).unwrap();
    }
    vms
}

fn ram(vm: &Vm) -> Vec<Region> {
    let all = read_smaps(&Root::default(), vm.pid).unwrap().unwrap();
    guest_ram(&all).into_iter().cloned().collect()
}

fn in_huge_pages(vm: &Vm) -> Bytes {
    ram(vm).iter().map(|r| r.huge).sum()
}

/// Pages of a paused VM that are in swap, and how many of those are no zeros.
fn swapped(vm: &Vm) -> (u64, u64) {
    const SWAPPED: u64 = 1 << 62;
    let open = |name| File::open(format!("/proc/{}/{name}", vm.pid)).unwrap();
    let (map, mem) = (open("pagemap"), open("mem"));
    let (mut word, mut page, mut all) = ([0; 8], [0; PAGE as usize], (0, 0));
    for r in ram(vm) {
        for address in (r.range.start..r.range.end()).step_by(PAGE as usize) {
            map.read_exact_at(&mut word, address / PAGE * 8).unwrap();
            if u64::from_ne_bytes(word) & SWAPPED != 0 {
                mem.read_exact_at(&mut page, address).unwrap();
                all.0 += 1;
                all.1 += u64::from(page.iter().any(|b| *b != 0));
            }
        }
    }
    all
}

fn zeros(state: &Value, i: usize, key: &str) -> Bytes {
    Bytes(state["vms"][i]["zeros"][key].as_u64().unwrap_or(0))
}

/// What was done is shown everywhere, and decided again from the record.
fn check_words(daemon: Daemon, name: &str, dir: &Path) {
    let explain = ebb_says(dir, &["explain", name]);
    assert!(explain.contains(" freed, "), "{explain}");
    let status = run_in(dir, &["status"]).unwrap().1;
    assert!(status.contains("zero pages freed without merging: "), "{status}");
    let metrics = daemon.metrics().unwrap();
    assert!(metrics.contains(&format!("ebb_vm_zeros_freed_bytes_total{{vm=\"{name}\"}}")));
    assert!(metrics.contains("ebb_host_zeros_came_bytes_total"), "{metrics}");
    assert!(daemon.stop());
    replays(dir);
}

/// On a short host, by splitting huge pages: no swap is needed.
#[test]
fn vm_zeros_in_huge_pages_go_when_the_host_is_short() {
    // Less than the VM and its QEMU may come to hold: else nothing would be short.
    let arena = Arena::within(Bytes::mib(440), Beside::AnyTest).unwrap();
    let vms = boot(&["zeros"], false, &arena);
    let usage = || arena.cgroup().unwrap().usage();
    let (before, huge) = (usage(), in_huge_pages(&vms[0]));
    assert!(huge >= Bytes::mib(128), "of its RAM only {huge} is in huge pages");
    let dir = tempfile::tempdir().unwrap();
    let short = "reserve = \"280MiB\"\n[merge]\nzeros = true\n";
    let daemon = Daemon::start(dir.path(), &["zeros"], short).unwrap();
    let began = Instant::now();
    let done = |state: &Value| (zeros(state, 0, "freed") >= Bytes::mib(100)).then(|| state.clone());
    let state = daemon.wait_for("100 MiB of zeros", MINUTE, done).unwrap();
    let (after, seconds) = (usage(), began.elapsed().as_secs_f64());
    println!("in {seconds:.1} s: cgroup {before} → {after}, {}", state["vms"][0]["zeros"]);
    assert!(before - after >= Bytes::mib(80), "{before} → {after}");
    assert_eq!(state["vms"][0]["swap"], 0);
    all_is_there(&vms[0]);
    let later = usage();
    println!("read by the guest again: {later}, {} in huge pages", in_huge_pages(&vms[0]));
    assert!(before - later >= Bytes::mib(80), "to read them brings none back: {before} → {later}");
    check_words(daemon, "zeros", dir.path());
}

/// When the operator asks, by places in swap to which nothing is written; and not of a
/// VM whose zeros are to stay.
#[test]
fn vm_zeros_in_small_pages_go_on_request_and_nothing_else_does() {
    let swap = SwapConfig { size: Bytes::gib(1), kind: SwapKind::File, priority: 100 };
    let (budget, swap, beside) = (Some(Bytes::gib(3)), Some(swap), Beside::AnyTest);
    let config = ArenaConfig { budget, swap, beside, ..Default::default() };
    let arena = Arena::enter(&config).unwrap();
    let vms = boot(&["asked", "stays"], true, &arena);
    assert_eq!(in_huge_pages(&vms[0]), Bytes::ZERO);
    let usage = || arena.cgroup().unwrap().usage();
    let dir = tempfile::tempdir().unwrap();
    let wanted = "[merge]\nzeros = true\n[vm.stays]\nzeros = false\n";
    let daemon = Daemon::start(dir.path(), &["asked"], wanted).unwrap();
    let both = |s: &Value| s["vms"].as_array().is_some_and(|vms| vms.len() == 2);
    daemon.wait_for("both VMs", MINUTE, both).unwrap();
    let before = usage();
    daemon.reclaim().unwrap();
    let asked = |state: &Value| {
        let vms = state["vms"].as_array()?;
        let i = vms.iter().position(|v| v["name"] == "asked")?;
        let z = &vms[i]["zeros"];
        (z["busy"] == false && z["rounds"].as_u64() > Some(0)).then(|| (i, state.clone()))
    };
    let (i, state) = daemon.wait_for("a whole round", MINUTE, asked).unwrap();
    let (after, freed) = (usage(), zeros(&state, i, "freed"));
    println!("cgroup {before} → {after}; {}", state["vms"][i]["zeros"]);
    assert!(before - after >= Bytes::mib(120), "{before} → {after}");
    assert!(freed >= Bytes::mib(120), "{state:#}");
    let stays = &state["vms"][1 - i];
    assert_eq!((&stays["zeros"], &stays["swap"]), (&Value::Null, &Value::from(0)), "{stays:#}");
    assert!(stays["zeros_stay"].as_str().unwrap().contains("zeros = false"), "{stays:#}");
    vms[0].pause().unwrap();
    let (places, others) = swapped(&vms[0]);
    println!("{places} pages in swap, {others} of them no zeros");
    vms[0].resume().unwrap();
    // What the guest wrote between look and order, a page or two.
    assert!(places >= (80 << 20) / PAGE && others <= 16, "{places}, {others} no zeros");
    assert_eq!(swapped(&vms[1]), (0, 0));
    vms.iter().for_each(all_is_there);
    check_words(daemon, "asked", dir.path());
}
