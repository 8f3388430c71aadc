//! What a balloon takes in pieces out of huge pages is the host's, by its own counters.

use super::*;

#[test]
fn vm_what_a_balloon_takes_of_huge_pages_is_the_hosts_and_the_rest_is_whole() {
    let arena = Arena::within(Bytes::gib(3), Beside::AnyTest).unwrap();
    let cgroup = arena.cgroup().unwrap();
    let mut config = stock("partial_thp", Bytes::mib(640));
    config.balloon = Some(Balloon { reporting: true, deflate_on_oom: true });
    config.cgroup = Some(cgroup.dir.clone());
    let vm = Vm::start(&config).unwrap();
    let tool = vm.tool();
    tool.write("/sys/kernel/mm/transparent_hugepage/enabled", "never").unwrap();
    // Every second piece of 256 KiB is freed, too small for free page reporting.
    tool.start_ready("p", "pieces", "size=314572800 piece=262144", MINUTE).unwrap();
    tool.start_ready("h", "hold", "size=67108864 pattern=random seed=5", MINUTE).unwrap();
    tool.start_ready("v", "verify", "size=16777216 seconds=86400", MINUTE).unwrap();
    tool.poke("p").unwrap();
    tool.wait_event("p", "progress", MINUTE).unwrap();
    let before = cgroup.usage();
    let (dir, daemon) = watch(&["partial_thp"], "");
    daemon.wait_for_tier("stock").unwrap();
    let freed = |s: &Value| Bytes(s["vms"][0]["partial_thp"]["freed"].as_u64().unwrap_or(0));
    let enough = |s: &Value| {
        // Asked again until the guest has said what is idle.
        daemon.reclaim().unwrap();
        (freed(s) >= Bytes::mib(64)).then(|| s.clone())
    };
    let state =
        daemon.wait_for("64 MiB of partially mapped huge pages", 3 * MINUTE, enough).unwrap();
    let after = cgroup.usage();
    println!("cgroup {before} → {after}, {}", state["vms"][0]["partial_thp"]);
    // Less what the balloon took outside of them: the proof is the host's own counter.
    assert!(before - after >= Bytes::mib(64), "{before} → {after}");
    all_is_there(&vm);
    let explain = ebb_says(dir.path(), &["explain", "partial_thp"]);
    assert!(explain.contains("huge pages split"), "{explain}");
    let metrics = daemon.metrics().unwrap();
    assert!(metrics.contains("ebb_vm_partial_thp_freed_bytes_total{vm=\"partial_thp\"}"));
    assert!(daemon.stop());
    replays(dir.path());
}
