//! Merging on real VMs: the report against every page read one by one; and the daemon
//! that merges, lets go of a guest that writes, and puts back what it changed. What
//! guests hold is what they wrote. KSM is the whole machine's: the arena holds it, and only
//! guests beside that KSM does not look at.

mod full;
mod huge;
mod orders;
mod pulses;

use std::os::fd::AsFd;

use ebb_core::sample::VmId;
use ebb_core::units::PAGE;
use ebb_core::wire::Attach;
use ebb_core::wire::hashes::HashRequest;
use ebb_host::act::vm_mergeable::{MemoryBlock, ksm_state};
use ebb_host::probe::process::read_stat;
use ebb_host::probe::regions::read_smaps;
use ebb_host::scan::random_key;
use ebb_host::sys::{Range, pagemap_scan};
use ebb_lab::ground_truth::Truth;

use super::*;

const KSM: &str = "/sys/kernel/mm/ksm";
const KNOBS: [&str; 5] =
    ["run", "pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages"];

/// The machine with KSM set as an operator might have it, at a snail's pace.
fn held() -> Arena {
    held_with(ArenaConfig::default())
}

fn held_with(config: ArenaConfig) -> Arena {
    let arena = Arena::enter(&ArenaConfig { beside: Beside::KsmIsMine, ..config }).unwrap();
    for (knob, value) in KNOBS.iter().zip(["1", "7", "5000", "1", "0"]) {
        set_knob(&arena, knob, value);
    }
    // Else khugepaged copies merged pages, and fills holes with zeros, at any moment (`huge`).
    for name in ["max_ptes_shared", "max_ptes_none"] {
        arena.set(&huge::knob(name), "0").unwrap();
    }
    arena
}

/// With `agents`, the agent's sockets there and the module in each guest.
fn boot(names: &[(&str, Kernel)], agents: Option<&Path>) -> Vec<Vm> {
    let config = |(name, kernel): &(&str, Kernel)| {
        let mut config = VmConfig::new(*name, Bytes::mib(224));
        config.kernel = *kernel;
        // QEMU marks its memory for KSM, too, and does not close it.
        config.args = ["-device", "VGA,vgamem_mb=64"].map(String::from).to_vec();
        if let Some(dir) = agents {
            guest_stack::prepare(&mut config, dir).unwrap();
        }
        config
    };
    let vms = guest_stack::boot(&names.iter().map(config).collect::<Vec<_>>()).unwrap();
    for (n, vm) in vms.iter().enumerate() {
        let tool = vm.tool();
        // Memory that moves by itself is no matter of this test.
        tool.write("/sys/kernel/mm/transparent_hugepage/enabled", "never").unwrap();
        tool.start_ready("v", "verify", "size=8388608 seconds=86400", MINUTE).unwrap();
        let held = format!("size=67108864 seed={n} pattern=template share=0.8 cluster=262144");
        tool.start_ready("h", "hold", &held, MINUTE).unwrap();
        tool.start_ready("z", "hold", "size=8388608 pattern=zero", MINUTE).unwrap();
    }
    vms
}

/// Names of two VMs that hold many equal pages.
const PAIR: [&str; 2] = ["mg1", "mg2"];

fn boot_pair(agents: Option<&Path>) -> Vec<Vm> {
    boot(&PAIR.map(|name| (name, Kernel::V6_1)), agents)
}

/// A daemon that merges the pair, with this time between two scans.
fn merging(dir: &Path, scan: &str) -> Daemon {
    Daemon::start(dir, &PAIR, &merge_config(scan)).unwrap()
}

fn merge_config(scan: &str) -> String {
    format!("{MERGING}floor = \"1MiB\"\nscan = \"{scan}\"\n")
}

/// Waits until more than `pages` pages of each VM are merged; the daemon's state then.
fn wait_merged(daemon: &Daemon, pages: u64, deadline: Duration) -> Value {
    let many = |s: &Value| merged(s).iter().all(|n| *n > pages).then(|| s.clone());
    daemon.wait_for("merged pages", deadline, many).unwrap()
}

/// KSM is set as it was, and no file says otherwise.
fn is_put_back(before: &[String], dir: &Path) {
    assert_eq!((knobs().as_slice(), dir.join("ksm.json").exists()), (before, false));
}

/// Each VM by its name in this group; others on this machine are not looked at.
fn configure(dir: &Path, groups: &[(&str, &str)]) {
    let vm = |(name, group): &(&str, &str)| {
        format!("[vm.{name}]\nuser = \"root\"\ngroup = \"{group}\"\n")
    };
    let text =
        "[host]\nvms = \"listed\"\n".to_string() + &groups.iter().map(vm).collect::<String>();
    std::fs::write(dir.join("ebb.toml"), text).unwrap();
}

fn report(dir: &Path, more: &[&str]) -> Value {
    let said = ebb_says(dir, &[&["merge", "report", "--json", "--hurry"], more].concat());
    serde_json::from_str(&said).unwrap()
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
    let _arena = Arena::beside(Beside::Tests).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot(&[("mg1", Kernel::V6_1), ("mg2", Kernel::V6_1), ("mg3", Kernel::V6_12)], None);
    configure(dir.path(), &[("mg1", "a"), ("mg2", "a"), ("mg3", "b")]);
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let truth = Truth::of(&pids(&vms)).unwrap();
    let said = report(dir.path(), &["--full"]);
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
    let alone = report(dir.path(), &["--full", "mg1"]);
    let own = Truth::of(&[vms[0].pid]).unwrap();
    assert!(everything(&alone).abs_diff(own.ideal()) <= own.ideal().share(0.01), "{alone:#}");
    assert_eq!(bytes(&alone["split"]["between"]) + bytes(&alone["split"]["across"]), Bytes::ZERO);
}

/// The whole way: found, merged, broken by writes, released, put back; and put back
/// after a crash too. KSM is the whole machine's and merges what else is open to it,
/// so everything is judged by what is of these VMs.
#[test]
fn vm_the_daemon_merges_identical_guests_and_puts_back_what_it_changed() {
    let _arena = held();
    let before = knobs();
    let dir = tempfile::tempdir().unwrap();
    let vms = boot_pair(None);
    let before_all = truth(&vms);
    let daemon = merging(dir.path(), "2s");
    // Each content is mapped twice at least, so half of the places save a page. Guests
    // move memory about meanwhile, and what they move is found by the next scan.
    let mut scans = 0;
    let recall = (0..10).find_map(|_| {
        let done = |state: &Value| {
            let number = state["host"]["merge"]["scan"]["number"].as_u64().unwrap_or(0);
            let rests = state["host"]["ksm"]["run"] == 0 && number > scans;
            let burst = merged(state).iter().sum::<u64>() > 20_000;
            (rests && burst).then(|| (number, state.clone()))
        };
        let (number, state) = daemon.wait_for("end of a burst", 3 * MINUTE, done).unwrap();
        scans = number;
        let saved = Bytes::pages(merged(&state).iter().sum::<u64>() / 2);
        let after = truth(&vms);
        let recall = saved.fraction_of(saved + after.ideal());
        println!("scan {number}: saved {saved}, left {}: recall {recall:.3}", after.ideal());
        (recall > 0.9).then_some(recall)
    });
    println!("{before_all:?}; {}", daemon.log());
    assert!(recall.is_some(), "{}", daemon.log());
    looking_breaks_no_merge(dir.path(), &vms);
    let metrics = daemon.metrics().unwrap();
    for name in ["ebb_host_ksm_saved_bytes", "ebb_host_ksm_profit_bytes", "ebb_host_merge_scans"] {
        assert!(metrics.contains(name), "{metrics}");
    }
    assert!(metrics.contains("ebb_vm_merged_bytes{vm=\"mg1\"}"), "{metrics}");

    // One guest writes what was seen to be merged: it is released, the other is not.
    let seen = |state: &Value| {
        let merged = Bytes::pages(merged(state)[0]);
        state["vms"][0]["merge"]["seen"][1].as_u64() >= Some(merged.share(0.75).0)
    };
    daemon.wait_for("a look at what is merged", 3 * MINUTE, seen).unwrap();
    let tool = vms[0].tool();
    tool.stop("h").unwrap();
    tool.start_ready("w", "hold", "size=125829120 seed=99 pattern=random", MINUTE).unwrap();
    let part = |state: &Value, i: usize| state["vms"][i]["merge"].clone();
    let out = |state: &Value| (part(state, 0)["open"] == false).then(|| part(state, 1));
    let other = daemon.wait_for("release of mg1", MINUTE, out).unwrap();
    assert!(other["open"] == true, "{}", daemon.log());
    said(&daemon, "mg1: out of KSM: its merged pages are written");
    for vm in &vms {
        stop_verify(vm);
    }
    assert_ne!(knobs(), before);
    assert!(daemon.stop(), "ends well");
    is_put_back(&before, dir.path());
    assert!(vms.iter().all(open), "as QEMU was started");

    // A crash leaves it to the next start.
    let daemon = merging(dir.path(), "2s");
    let stopped = |_: &Value| knob("run") != before[0];
    daemon.wait_for("KSM's own run to end", MINUTE, stopped).unwrap();
    daemon.crash();
    assert_ne!(knobs(), before);
    let daemon = Daemon::start(dir.path(), &PAIR, "").unwrap();
    is_put_back(&before, dir.path());
    said(&daemon, "an earlier daemon had steered KSM");
    assert!(daemon.stop());
}

/// Reading a page so that it is pinned gives its process a copy of its own: each look
/// at merged memory would break a merge of every content.
fn looking_breaks_no_merge(dir: &Path, vms: &[Vm]) {
    let looks = tempfile::tempdir_in(dir).unwrap();
    configure(looks.path(), &[("mg1", "default"), ("mg2", "default")]);
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let before = Truth::of(&pids(vms)).unwrap();
    for _ in 0..2 {
        report(looks.path(), &["--full"]);
    }
    let after = Truth::of(&pids(vms)).unwrap();
    vms.iter().for_each(|vm| vm.resume().unwrap());
    println!("looked at: {before:?}, then {after:?}");
    assert!(before.merged() > Bytes::mib(16), "something is merged: {before:?}");
    assert!(after.frames <= before.frames + 64, "{before:?}, then {after:?}");
}

/// With the agent: what is alike is merged range by range, what is freed elsewhere is
/// recycled page by page, and nobody loses anything.
#[test]
fn vm_with_the_agent_ranges_are_merged_and_the_rest_is_recycled() {
    let _arena = held();
    let dir = tempfile::tempdir().unwrap();
    let agents = tempfile::tempdir().unwrap();
    let vms = boot_pair(Some(agents.path()));
    let daemon = merging(dir.path(), "2s");
    let all = |state: &Value, has: &dyn Fn(&Value) -> bool| {
        state["vms"].as_array().is_some_and(|vms| vms.iter().all(has))
    };
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    let open = |state: &Value| all(state, &|v| number(&v["agent"]["open"]) > 0);
    let merges = |state: &Value| open(state) && merged(state).iter().all(|pages| *pages > 6000);
    daemon.wait_for("merged ranges", 3 * MINUTE, merges).unwrap();
    // Scans of what is merged close none of it: neither would its merges survive that.
    let full = |state: &Value| state["host"]["merge"]["scan"]["number"].as_u64();
    let (first, scans) = (truth(&vms), full(&daemon.state().unwrap()).unwrap());
    let two_more =
        |s: &Value| s["host"]["ksm"]["run"] == 0 && full(s).is_some_and(|n| n >= scans + 2);
    daemon.wait_for("two more scans", 3 * MINUTE, two_more).unwrap();
    let later = truth(&vms);
    println!("{first:?}, two scans later {later:?}");
    let state = daemon.state().unwrap();
    let scan = &state["host"]["merge"]["scan"];
    let (read, by_agents) = (bytes(&scan["read"]), bytes(&scan["by_agents"]));
    assert!(read > Bytes::mib(64) && by_agents > read.share(0.8), "{scan}");
    assert!(first.merged() > Bytes::mib(16), "{first:?}");
    assert!(later.merged() >= first.merged().share(0.9), "{first:?}, then {later:?}");
    let before = daemon.state().unwrap();
    for vm in &vms {
        let free = "size=50331648 seed=5 pattern=random";
        vm.tool().start_ready("f", "hold", free, MINUTE).unwrap();
        vm.tool().stop("f").unwrap();
    }
    let more = |state: &Value| {
        let came = |i: usize| recycled(&state["vms"][i]) > recycled(&before["vms"][i]) + (16 << 20);
        (came(0) && came(1)).then(|| state.clone())
    };
    let state = daemon.wait_for("recycling beside it", MINUTE, more).unwrap();
    for (i, vm) in vms.iter().enumerate() {
        let open = number(&state["vms"][i]["agent"]["open"]);
        let (merged, again) = (merged(&state)[i], recycled(&state["vms"][i]));
        println!("{}: {} open, {merged} pages merged, {again} recycled", vm.name, Bytes(open));
        assert!(open < vm.memory.0, "never as a whole");
        stop_verify(vm);
    }
    assert!(!daemon.log().contains("out of KSM"), "{}", daemon.log());
    // At the daemon's end what is merged stays so, and the next one goes on with it.
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let before = Truth::of(&pids(&vms)).unwrap();
    assert!(daemon.stop());
    let after = Truth::of(&pids(&vms)).unwrap();
    let daemon = merging(dir.path(), "2s");
    daemon.wait_for("ranges again", MINUTE, open).unwrap();
    let again = Truth::of(&pids(&vms)).unwrap();
    println!("{before:?}, its end: {after:?}, the next: {again:?}");
    let counted = |s: &Value| all(s, &|v| number(&v["vmm"]) > 0);
    daemon.wait_for("what QEMU itself holds", MINUTE, counted).unwrap();
    let state = daemon.state().unwrap();
    state["vms"].as_array().unwrap().iter().for_each(what_qemu_itself_holds_is_right);
    for later in [after, again] {
        assert!(later.merged() >= before.merged().share(0.99), "{before:?}, then {later:?}");
    }
    assert!(daemon.stop());
    what_agents_tell_is_what_is_there(agents.path(), &vms);
}

/// It is counted although ranges that are open to KSM cut RAM up, against what lies outside of
/// what QEMU marks as guest RAM.
fn what_qemu_itself_holds_is_right(vm: &Value) {
    let pid = vm["pid"].as_u64().unwrap() as u32;
    let regions = read_smaps(&Root::default(), pid).unwrap().unwrap();
    let own: Bytes = regions.iter().filter(|r| !r.dontfork).map(|r| r.resident).sum();
    let counted = bytes(&vm["vmm"]);
    println!("{counted} counted as QEMU's own, {own} by its mappings ({})", regions.len());
    // What happens to lie beside RAM is not told from it; translated code alone is half of all.
    assert!(counted > own.share(0.5) && counted < own + Bytes::mib(16), "{counted} of {own}");
}

/// What a guest frees in ranges that are open does not wait for the next scan, which closes them.
/// What the other guest holds of the same is what it wrote.
#[test]
fn vm_what_is_freed_in_open_ranges_is_recycled_before_the_next_scan() {
    let _arena = held();
    let (dir, agents) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let vms = boot_pair(Some(agents.path()));
    let daemon = merging(dir.path(), "1h");
    let open = |state: &Value| state["vms"][0]["agent"]["open"].as_u64().unwrap_or(0);
    let scans = |state: &Value| state["host"]["merge"]["scan"]["number"].as_u64();
    let before = daemon
        .wait_for("merged ranges", 3 * MINUTE, |state| {
            let merges = merged(state).iter().all(|pages| *pages > 6000);
            (merges && open(state) > 48 << 20).then(|| state.clone())
        })
        .unwrap();
    vms.iter().for_each(holds_what_it_wrote);
    vms[0].tool().stop("h").unwrap();
    // Up to a tenth of RAM is left to a guest that allocates fast, as it does to verify.
    stop_verify(&vms[0]);
    let after = daemon
        .wait_for("recycled ranges", MINUTE, |state| {
            let came = recycled(&state["vms"][0]) > recycled(&before["vms"][0]) + (40 << 20);
            let closed = open(&before).saturating_sub(open(state));
            (came && closed > 40 << 20).then(|| state.clone())
        })
        .unwrap();
    println!("{} open, then {}", Bytes(open(&before)), Bytes(open(&after)));
    assert!(scans(&before).is_some());
    assert_eq!(scans(&after), scans(&before), "no scan has closed them");
    assert!(merged(&after)[1] > 1000, "the other's stay merged: {after:#}");
    holds_what_it_wrote(&vms[1]);
    assert!(daemon.stop());
}

/// Hashes by the agents of paused VMs, some of whose pages are merged, against every page
/// read from outside; and that it leaves everything as it was.
fn what_agents_tell_is_what_is_there(sockets: &Path, vms: &[Vm]) {
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let before = Truth::of(&pids(vms)).unwrap();
    let key = random_key().unwrap();
    for vm in vms {
        let mut agent = Agent::connect(sockets.join(format!("{}.agent", vm.name))).unwrap();
        let attachment = guest_stack::attachment(vm).unwrap();
        let segments = attachment.segments.clone();
        let attach = Attach { running: false, keep_open: true, ..attachment };
        agent.attach(attach, None, MINUTE).unwrap();
        let link = agent.hashes(&segments, MINUTE).unwrap();
        let memory = File::open(format!("/proc/{}/mem", vm.pid)).unwrap();
        let pagemap = File::open(format!("/proc/{}/pagemap", vm.pid)).unwrap();
        let mut compared = 0;
        for s in &segments {
            for start in (s.hva..s.hva + s.size).step_by(32 << 20) {
                let range = Range { start, len: (s.hva + s.size - start).min(32 << 20) };
                let mut present = Vec::new();
                let pages = |r: Range| r.start / 4096..r.end() / 4096;
                pagemap_scan(pagemap.as_fd(), range, |r, _| present.extend(pages(r))).unwrap();
                for lines in [false, true] {
                    let ranges = vec![range];
                    let told =
                        link.ask(&HashRequest { secret: *key.secret(), lines, ranges }).unwrap();
                    assert_eq!((told.held, told.free), (present.len() as u64, 0), "{}", vm.name);
                    let numbers: Vec<u64> = told.pages.iter().map(|p| p.0).collect();
                    assert_eq!(numbers, present, "{}", vm.name);
                    for (number, hash) in told.pages {
                        let mut page = [0; 4096];
                        memory.read_exact_at(&mut page, number * 4096).unwrap();
                        let want = match lines {
                            true => key.of_page_lines(&page),
                            false => key.page(&page).unwrap_or(0),
                        };
                        assert_eq!(hash, want, "{}: {number:#x}", vm.name);
                        compared += 1;
                    }
                }
            }
        }
        println!("{}: {compared} pages hashed as from outside", vm.name);
        assert!(compared > 20_000, "{compared}");
    }
    let after = Truth::of(&pids(vms)).unwrap();
    println!("hashed by agents: {before:?}, then {after:?}");
    assert!(before.merged() > Bytes::mib(16), "{before:?}");
    assert_eq!(before, after);
}

/// Merged pages of each VM, by its own counters.
fn merged(state: &Value) -> Vec<u64> {
    let vms = state["vms"].as_array().unwrap();
    let stat = |v: &Value, key: &str| v["merge"]["stat"][key].as_u64().unwrap_or(0);
    vms.iter().map(|v| stat(v, "merging_pages") + stat(v, "zero_pages")).collect()
}

/// Every page of VMs that stand still meanwhile.
fn truth(vms: &[Vm]) -> Truth {
    vms.iter().for_each(|vm| vm.pause().unwrap());
    let truth = Truth::of(&pids(vms)).unwrap();
    vms.iter().for_each(|vm| vm.resume().unwrap());
    truth
}

/// What a VM's mappings show of its RAM, its largest piece of memory.
fn mapped(vm: &Vm) -> MemoryBlock {
    let start = read_stat(&Root::default(), vm.pid).unwrap().unwrap().start;
    let blocks = ksm_state(&Root::default(), VmId { pid: vm.pid, start }).unwrap().blocks;
    blocks.into_iter().max_by_key(|b| b.range.len).unwrap()
}

fn open(vm: &Vm) -> bool {
    mapped(vm).open
}

fn pids(vms: &[Vm]) -> Vec<u32> {
    vms.iter().map(|vm| vm.pid).collect()
}

/// Sets one of KSM's knobs until the arena puts it back.
fn set_knob(arena: &Arena, name: &str, value: &str) {
    arena.set(&Path::new(KSM).join(name), value).unwrap();
}

fn knobs() -> Vec<String> {
    KNOBS.iter().map(|k| knob(k)).collect()
}

fn knob(name: &str) -> String {
    std::fs::read_to_string(Path::new(KSM).join(name)).unwrap().trim().to_string()
}
