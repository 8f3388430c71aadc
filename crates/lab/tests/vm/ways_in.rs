//! Ways into a real QEMU besides `-plugin` as root: by LD_PRELOAD, and as an
//! unprivileged user in QEMU's sandbox, as libvirt runs it. In each the daemon
//! finds the agent, recycles for a few seconds under `verify`, and nothing is lost.

use ebb_lab::ebb;
use ebb_lab::vm::Accel;

use super::*;

const SCHED_BATCH: i32 = 3;
/// What libvirt gives a QEMU that can.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Boots a guest with the module in a QEMU that `load` puts the library into (its
/// path, and one for the socket, in a directory that all may use), and recycles.
fn works(kernel: Kernel, load: impl FnOnce(&mut VmConfig, &Path, &Path)) {
    let arena = Arena::within(Bytes::gib(2), Beside::KsmIsMine).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let library = agent_for_all(dir.path());
    let image = Image::get(kernel).unwrap();
    let mut config = VmConfig::new("load", Bytes::mib(512));
    (config.kernel, config.cpus) = (kernel, 2);
    config.balloon = Some(Balloon { reporting: false, deflate_on_oom: true });
    config.cgroup = arena.cgroup().map(|c| c.dir.clone());
    config.files = vec![("ebb.ko".into(), guest_stack::module(&image, false).unwrap())];
    load(&mut config, &library, &dir.path().join("load.agent"));
    let vm = Vm::start(&config).unwrap();
    if config.user.is_some() {
        unprivileged(vm.pid);
    }
    guest_stack::load(&vm).unwrap();

    let state_dir = dir.path().join("daemon");
    let daemon = Daemon::start(&state_dir, &["load"], "users = [65534]").unwrap();
    if let Err(e) = daemon.wait_for_tier("guest") {
        panic!("{e}\n{:?}", ebb::run_in(&state_dir, &["doctor"]));
    }
    vm.tool().start("v", "verify", "size=100000000 seconds=5 threads=2").unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        daemon.reclaim().unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    let end = vm.tool().wait_end("v", MINUTE).unwrap();
    assert_eq!(end.u64("errors"), 0, "{end:?}");
    // How much it freed meanwhile is the machine's doing: this is more than enough.
    let state = || daemon.state().unwrap();
    let until = Instant::now() + MINUTE;
    while recycled(&state()["vms"][0]) <= 50 << 20 {
        assert!(Instant::now() < until, "{:#}", state());
        touch_and_free(&vm, Bytes::mib(96));
        daemon.reclaim().unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(daemon.stop());
    if config.user.is_some() {
        hashes_with_weight(&arena, &state_dir, vm.pid);
    }
    vm.request("ping", MINUTE).unwrap();
}

/// The sandbox lets the thread that hashes run when nobody else wants the CPU, or as any
/// other; a daemon whose host needs the memory gives it the weight of `ksmd`.
fn hashes_with_weight(arena: &Arena, state: &Path, pid: u32) {
    // The daemon steers it, and it is put back whatever comes.
    arena.set(Path::new("/sys/kernel/mm/ksm/run"), "0").unwrap();
    let config = format!("users = [65534]\n{MERGING}scan = \"2s\"\n");
    let daemon = Daemon::start(state, &["load"], &config).unwrap();
    // Policy, and nice: fields 41 and 19 of proc(5).
    let weight = || {
        let stats = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let mut stats = stats.map(|t| std::fs::read_to_string(t.unwrap().path().join("stat")));
        let stat = stats.find_map(|s| s.ok().filter(|s| s.contains("(ebb-hash)")))?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        Some((fields[38].parse::<i32>().unwrap(), fields[16].parse::<i32>().unwrap()))
    };
    let scanned = |s: &Value| {
        let scan = &s["host"]["merge"]["scan"];
        (scan["number"].as_u64()? > 1).then(|| (scan["by_agents"].as_u64(), weight()))
    };
    let (by_agents, weight) = daemon.wait_for("two scans", 3 * MINUTE, scanned).unwrap();
    assert!(by_agents.is_some_and(|b| b > 1 << 20), "{by_agents:?}");
    assert_eq!(weight, Some((SCHED_BATCH, 5)), "{}", daemon.log());
    assert!(daemon.stop());
}

/// Every thread of a process, the agent's too, is nobody's and in the sandbox.
fn unprivileged(pid: u32) {
    let threads: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|t| std::fs::read_to_string(t.unwrap().path().join("status")).unwrap())
        .collect();
    assert!(threads.iter().any(|t| t.starts_with("Name:\tebb-agent")), "{threads:?}");
    for t in &threads {
        let uid = format!("Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}\n");
        assert!(t.contains(&uid) && t.contains("Seccomp:\t2\n"), "{t}");
        assert!(t.contains("CapEff:\t0000000000000000\n"), "{t}");
    }
}

#[test]
fn vm_a_preloaded_agent_is_found_and_recycles_beside_free_page_reporting() {
    works(Kernel::V6_12, |config, library, socket| {
        // A plug-in would stand aside: see `turns` in the agent.
        config.balloon = Some(Balloon { reporting: true, deflate_on_oom: true });
        let text = |path: &Path| path.display().to_string();
        config.env =
            vec![("LD_PRELOAD".into(), text(library)), ("EBB_AGENT_SOCKET".into(), text(socket))];
    });
}

#[test]
fn vm_an_unprivileged_qemu_in_its_sandbox_recycles_with_the_daemons_descriptor() {
    works(Kernel::V6_1, |config, library, socket| {
        config.user = Some(NOBODY);
        // /dev/kvm is not nobody's.
        config.accel = Some(Accel::Tcg);
        let plugin = format!("file={},socket={}", library.display(), socket.display());
        config.args = ["-sandbox", SANDBOX, "-plugin", &plugin].map(String::from).to_vec();
    });
}
