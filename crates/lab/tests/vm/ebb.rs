//! Ebb on real VMs: memory flows back, guests get it again, nobody is harmed,
//! whatever dies meanwhile.
//!
//! Each test runs the built `ebb` with a configuration that looks at its own VMs only.

use ebb_host::qmp_balloon;
use ebb_lab::ebb::run;

use super::*;

const RAM: Bytes = Bytes::mib(512);
/// What a guest of 512 MiB and its QEMU hold that has touched 256 MiB, and hardly more.
const TIGHT: Bytes = Bytes::mib(512);
/// With [`TIGHT`]: so much is to be free that most of what the guest does not need
/// must be taken.
const SHORT: &str = "reserve = \"250MiB\"";
const FLOOR: u64 = 128 << 20;

/// A place where the host is as small as `budget`.
fn arena(budget: Option<Bytes>) -> Arena {
    let swap = budget.map(|_| SwapConfig { size: RAM, kind: SwapKind::Any, priority: 100 });
    let beside = Beside::AnyTest;
    Arena::enter(&ArenaConfig { budget, swap, beside, ..Default::default() }).unwrap()
}

fn config(name: &str, kernel: Kernel, reporting: bool, arena: &Arena) -> VmConfig {
    let mut config = stock(name, RAM);
    config.kernel = kernel;
    config.balloon = Some(Balloon { reporting, deflate_on_oom: true });
    config.cgroup = arena.cgroup().map(|c| c.dir.clone());
    config
}

/// A guest that has touched 256 MiB and freed them, without reporting: it holds
/// what it does not need.
fn start_holding(name: &str, kernel: Kernel, arena: &Arena) -> Vm {
    let vm = Vm::start(&config(name, kernel, false, arena)).unwrap();
    touch_and_free(&vm, Bytes::mib(256));
    renew_word(&vm);
    vm
}

/// Has a guest say anew how it is. QEMU keeps what it said when it booted, and for five seconds
/// Ebb believes that.
fn renew_word(vm: &Vm) {
    const BALLOON: &str = "/machine/peripheral/balloon0";
    let set = |arguments| drop(vm.qmp("qom-set", Some(arguments)).unwrap());
    let stats = || vm.qmp("qom-get", Some(qmp_balloon::get(BALLOON, qmp_balloon::STATS))).unwrap();
    let asked = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let renewed = || stats()["last-update"].as_u64() > Some(asked);
    qmp_balloon::ask_now(BALLOON, 1).into_iter().for_each(set);
    vm.wait_for("a new word", MINUTE, |_| renewed()).unwrap();
    set(qmp_balloon::set(BALLOON, qmp_balloon::INTERVAL, json!(0)));
}

fn bytes(v: &Value, key: &str) -> u64 {
    v[key].as_u64().unwrap_or(0)
}

fn state_file(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("state.json")).unwrap()).unwrap()
}

/// Waits until the VM is no larger than `most`. Ebb does not ask a guest that was silent for two
/// minutes.
fn wait_taken(daemon: &Daemon, name: &str, most: Bytes) -> u64 {
    daemon
        .wait_for("shrunk VM", 3 * MINUTE, |s| {
            let actual = bytes(of(s, name), "actual");
            (actual > 0 && actual <= most.0).then_some(actual)
        })
        .unwrap()
}

/// Has a guest touch more than it was left with.
fn begin_burst(vm: &Vm, hold_ms: u64) {
    let args = format!("size=314572800 period_ms=1000 hold_ms={hold_ms} count=1");
    vm.tool().start("burst", "cycle", &args).unwrap();
}

fn burst_is_survived(vm: &Vm) {
    assert_eq!(vm.tool().wait_end("burst", MINUTE).unwrap().u64("cycles"), 1);
    nothing_was_killed(vm);
}

fn nothing_was_killed(vm: &Vm) {
    assert_eq!(vm.request("meminfo", MINUTE).unwrap().u64("oom_kill"), 0);
}

/// Whatever else happened: no guest was ever ordered below its floor, or seen
/// below it, and the run replays to the same decisions.
fn check_record(dir: &Path) {
    let ticks = recorded_ticks(dir);
    for tick in &ticks {
        for a in orders_of(tick) {
            assert!(bytes(a, "to") >= FLOOR, "ordered below the floor: {a}");
        }
        for vm in tick["sample"]["vms"].as_array().unwrap() {
            let actual = bytes(&vm["balloon"], "actual");
            assert!(actual == 0 || actual >= FLOOR, "seen below the floor: {vm}");
        }
    }
    assert!(!ticks.is_empty(), "nothing was recorded");
    replays(dir);
}

#[test]
fn vm_freed_memory_returns_by_reporting_and_is_accounted_on_both_kernels() {
    let arena = arena(None);
    in_pairs(&Kernel::ALL, |&kernel| {
        let name = &format!("rep-{kernel}");
        let vm = Vm::start(&config(name, kernel, true, &arena)).unwrap();
        let (dir, daemon) = watch(&[name], "");
        assert_eq!(daemon.vm(name).unwrap()["reporting"], true);
        vm.tool().start_ready("h", "hold", "size=268435456", MINUTE).unwrap();
        let held = vm.resident();
        // A peak between two ticks cannot be accounted for.
        let seen = |s: &Value| bytes(of(s, name), "resident") + (8 << 20) >= held.0;
        daemon.wait_for("a tick that sees it all", MINUTE, seen).unwrap();
        vm.tool().stop("h").unwrap();
        let goal = held - Bytes::mib(200);
        vm.wait_for("reporting", MINUTE, |vm| vm.resident() < goal).unwrap();
        let returned = |s: &Value| bytes(&of(s, name)["returned"], "reporting") >= 190 << 20;
        daemon.wait_for("accounted bytes", MINUTE, returned).unwrap();
        let state = daemon.vm(name).unwrap();
        assert_eq!(bytes(&state, "actual"), RAM.0, "a clear host takes nothing: {state}");
        assert!(daemon.stop());
        check_record(dir.path());
    });
}

/// One guest: a dry run, then one that takes, gives before the guest is short, and stops.
#[test]
fn vm_a_dry_run_changes_nothing_and_then_memory_is_taken_given_in_time_and_given_back() {
    for kernel in kernels(Kernel::V6_12) {
        let arena = arena(Some(TIGHT));
        let vm = start_holding("vm", kernel, &arena);
        let dir = tempfile::tempdir().unwrap();
        dry_run(&vm, dir.path());

        let cgroup = arena.cgroup().unwrap();
        let (held, charged) = (vm.resident(), cgroup.usage() + cgroup.swap());
        let daemon = Daemon::start(dir.path(), &["vm"], SHORT).unwrap();
        wait_taken(&daemon, "vm", Bytes::mib(340));
        vm.wait_for("less residency", MINUTE, |vm| {
            let less = vm.resident() + Bytes::mib(80) < held;
            let proof = cgroup.usage() + cgroup.swap() + Bytes::mib(80) < charged;
            less && proof
        })
        .unwrap();
        // What was decided can be asked for.
        let out = ebb_says(dir.path(), &["explain", "vm"]);
        assert!(out.contains("host") && out.contains("idle"), "{out}");

        // More than it has; the host has room for it.
        begin_burst(&vm, 3000);
        let more = |s: &Value| bytes(of(s, "vm"), "actual") > 360 << 20;
        daemon.wait_for("more memory", MINUTE, more).unwrap();
        burst_is_survived(&vm);
        // Something is owed when it stops.
        wait_taken(&daemon, "vm", Bytes::mib(480));
        assert!(daemon.stop());
        wait_size(&vm, RAM);
        assert_eq!(state_file(dir.path())["vms"], json!([]), "nothing is owed any more");
        check_record(dir.path());
        // How long it takes on the clock, `cargo lab handback` measures.
        ordered_before_it_is_short(dir.path());
    }
}

fn dry_run(vm: &Vm, dir: &Path) {
    // A dry run does not have guests asked for statistics: it sees those that are asked anyway.
    let interval = |command: &str, mut arguments: Value| {
        arguments["path"] = json!("/machine/peripheral/balloon0");
        arguments["property"] = json!("guest-stats-polling-interval");
        vm.qmp(command, Some(arguments)).unwrap()
    };
    interval("qom-set", json!({ "value": 3 }));
    Daemon::configure(dir, &["vm"], SHORT).unwrap();
    let daemon = Daemon::start_again(dir, &["--dry-run"]).unwrap();
    let decided = |s: &Value| of(s, "vm")["verdict"].to_string().contains("dry run");
    daemon.wait_for("a decision", MINUTE, decided).unwrap();
    assert_eq!(vm.balloon().unwrap(), RAM);
    assert!(!dir.join("state.json").exists());
    assert!(daemon.stop());
    assert_eq!(interval("qom-get", json!({})), 3, "nor how often the guest is asked");
    check_record(dir);
}

/// A recorded order to grow comes no later than the first answer that shows the guest with
/// less than an eighth of its memory available.
fn ordered_before_it_is_short(dir: &Path) {
    for tick in recorded_ticks(dir) {
        if orders_of(&tick).iter().any(|a| bytes(a, "to") > bytes(a, "from")) {
            return;
        }
        let balloon = &tick["sample"]["vms"][0]["balloon"];
        let (actual, guest) = (bytes(balloon, "actual"), &balloon["guest"]);
        assert!(
            guest.is_null() || bytes(guest, "available") >= actual / 8,
            "short of memory, and nothing was ordered: {tick}"
        );
    }
    panic!("no order to grow was recorded");
}

/// Two guests at work on memory that they check all the time; one of them is squeezed by the
/// operator, the host is full with what the other does not use, and then the squeezed one
/// needs its own.
#[test]
fn vm_a_squeezed_guest_gets_memory_back_by_squeezing_an_idle_other() {
    // Room for both guests' RAM, and for what QEMU holds beside it.
    let arena = arena(Some(Bytes::mib(1400)));
    let names = ["needs", "idles"];
    let vms: Vec<Vm> = names.iter().map(|n| start_holding(n, Kernel::V6_1, &arena)).collect();
    for (seed, vm) in vms.iter().enumerate() {
        let args = format!("size=33554432 seconds=100000 seed={seed}");
        vm.tool().start("v", "verify", &args).unwrap();
    }
    let (dir, daemon) = watch(&names, "reserve = \"64MiB\"");
    daemon.squeeze("needs", Bytes::mib(280)).unwrap();
    let idle = bytes(&daemon.vm("idles").unwrap(), "actual");
    assert_eq!(idle, RAM.0, "nobody is short: the other is left alone");
    // Only now the host is small: what it has left is less than the squeezed one will need.
    let cgroup = arena.cgroup().unwrap();
    cgroup.resize(cgroup.usage() + Bytes::mib(100)).unwrap();

    begin_burst(&vms[0], 2000);
    // It may be given back soon after.
    let (mut squeezed, mut given) = (idle, 0);
    let enough = |s: &Value| {
        squeezed = squeezed.min(bytes(of(s, "idles"), "actual"));
        given = given.max(bytes(of(s, "needs"), "actual"));
        squeezed <= idle - (48 << 20) && given >= 360 << 20
    };
    daemon.wait_for("more memory, of the other's", 3 * MINUTE, enough).unwrap();
    println!("{} given; the other went from {} to {}", Bytes(given), Bytes(idle), Bytes(squeezed));
    burst_is_survived(&vms[0]);
    for vm in &vms {
        stop_verify(vm);
        nothing_was_killed(vm);
    }
    assert!(daemon.stop());
    check_record(dir.path());
}

#[test]
fn vm_release_gives_back_what_a_dead_daemon_took_and_keeps_what_it_could_not() {
    let arena = arena(Some(TIGHT));
    let vm = start_holding("rel", Kernel::V6_12, &arena);
    let (dir, daemon) = watch(&["rel"], SHORT);
    wait_taken(&daemon, "rel", Bytes::mib(420));
    daemon.crash();
    // The state file counts, not which VMs the configuration lists.
    let (config, state) = (dir.path().join("none.toml"), dir.path().join("state.json"));
    fs::write(&config, "[host]\nvms = \"listed\"\n").unwrap();
    let release = |seconds: &str| {
        let (config, state) = (config.to_str().unwrap(), state.to_str().unwrap());
        let args = ["release", "--config", config, "--state", state, "--seconds", seconds];
        run(&args).unwrap()
    };
    // QEMU takes an order for a guest that does not run: that is not the memory.
    vm.pause().unwrap();
    let (code, _, err) = release("2");
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("rel: has ") && err.contains("the VM is paused"), "{err}");
    assert_eq!(state_file(dir.path())["vms"][0]["name"], "rel", "still written down");
    vm.resume().unwrap();
    let (code, _, err) = release("60");
    assert_eq!((code, vm.balloon().unwrap()), (0, RAM), "{err}");
    assert_eq!(release("60").0, 0, "a second time nothing is owed");
    fs::remove_file(&state).unwrap();
    assert_eq!(release("60").0, 1, "without the file nothing is known");
}

#[test]
fn vm_a_qemu_that_stops_or_ends_is_noticed_and_does_not_touch_the_others() {
    let arena = arena(None);
    let names = ["stop1", "stop2", "stop3"];
    let vms = guest_stack::boot(&names.map(|n| config(n, Kernel::V6_12, true, &arena))).unwrap();
    let (dir, daemon) = watch(&names, "");
    let link = |s: &Value, name: &str| of(s, name)["link"]["state"].as_str().map(String::from);
    let wait_link = |which: &[&str], state: &str| {
        let all = |s: &Value| which.iter().all(|n| link(s, n).as_deref() == Some(state));
        daemon.wait_for(state, MINUTE, all).unwrap();
    };
    let ready = |s: &Value| names.iter().all(|n| of(s, n)["standing"]["is"] == "ready");
    let wait_ready = || daemon.wait_for("ready", MINUTE, ready).unwrap();
    wait_ready();
    let silence = || std::thread::sleep(Duration::from_secs(8));
    // All of them: the host has stood still, and they are asked again at once.
    vms.iter().for_each(|vm| signal(vm.pid, Signal::STOP));
    wait_link(&names, "slow");
    silence();
    vms.iter().for_each(|vm| signal(vm.pid, Signal::CONT));
    wait_link(&names, "up");
    wait_ready();
    // One alone.
    signal(vms[0].pid, Signal::STOP);
    wait_link(&["stop1"], "slow");
    let state = daemon.state().unwrap();
    assert_eq!(link(&state, "stop2").as_deref(), Some("up"), "the other goes on: {state}");
    let tick = bytes(&state, "tick");
    daemon.wait_for("more ticks", MINUTE, |s| bytes(s, "tick") > tick + 3).unwrap();
    assert!(
        daemon.state().unwrap()["daemon"]["tick_ms"].as_f64().unwrap() < 1000.0,
        "a hung QEMU must not hold the tick"
    );
    silence();
    signal(vms[0].pid, Signal::CONT);
    wait_link(&["stop1"], "up");
    let left_alone = |s: &Value| of(s, "stop1")["standing"].to_string().contains("not heard");
    daemon.wait_for("left alone", MINUTE, left_alone).unwrap();

    // One as if it crashed, one that closes its sockets on its own.
    let only = |s: &Value, names: &[&str]| {
        let vms = s["vms"].as_array().unwrap();
        vms.len() == names.len() && names.iter().all(|n| link(s, n).as_deref() == Some("up"))
    };
    vms[0].kill();
    daemon.wait_for("two VMs", MINUTE, |s| only(s, &names[1..])).unwrap();
    let _ = vms[1].qmp("quit", None);
    daemon.wait_for("one VM", MINUTE, |s| only(s, &names[2..])).unwrap();
    assert_eq!(daemon.vm("stop3").unwrap()["run"], "running");
    assert!(daemon.stop());
    check_record(dir.path());
}

#[test]
fn vm_a_ballooned_guest_reboots_with_all_its_memory() {
    // A quarter of the reserve is kept back from a guest that boots. What is left beside that
    // is more than was taken, however much of it that was when the guest rebooted.
    let arena = arena(Some(TIGHT + Bytes::mib(192)));
    let mut vm = start_holding("boot", Kernel::V6_1, &arena);
    let (dir, daemon) = watch(&["boot"], "reserve = \"320MiB\"");
    daemon.squeeze("boot", Bytes::mib(470)).unwrap();
    vm.request("reboot", MINUTE).unwrap();
    vm.wait_ready().unwrap();
    let given = |s: &Value| bytes(of(s, "boot"), "actual") == RAM.0;
    daemon.wait_for("all its memory after the reboot", MINUTE, given).unwrap();
    decided_by(&daemon, "rebooted");
    assert!(daemon.stop());
    check_record(dir.path());
}

/// QEMU shows the size from before a reset until the new driver writes its own.
#[test]
fn vm_a_guest_that_boots_while_ebb_stops_is_shown_at_its_true_size() {
    let arena = arena(Some(TIGHT + Bytes::mib(192)));
    let mut vm = start_holding("size", Kernel::V6_1, &arena);
    let (_dir, daemon) = watch(&["size"], "reserve = \"320MiB\"");
    daemon.squeeze("size", Bytes::mib(470)).unwrap();
    vm.reset().unwrap();
    // It may boot for longer than Ebb waits.
    println!("gave all back: {}", daemon.stop());
    vm.wait_ready().unwrap();
    let shown = |vm: &Vm| vm.balloon().unwrap() + Bytes::mib(1) >= RAM;
    vm.wait_for("its true size", MINUTE, shown).unwrap();
}

#[test]
fn vm_reclaim_takes_idle_memory_at_once_and_measures_it() {
    let arena = arena(None);
    let vm = start_holding("want", Kernel::V6_1, &arena);
    let (dir, daemon) = watch(&["want"], "");
    daemon.wait_for("statistics", MINUTE, |s| of(s, "want")["available"].as_u64()).unwrap();
    let held = vm.resident();
    let out = ebb_says(dir.path(), &["reclaim", "want", "--json"]);
    let came: Value = serde_json::from_str(&out).unwrap();
    let fell = (held - vm.resident()).0;
    assert!(bytes(&came, "ballooned") > 200 << 20 && fell > 200 << 20, "{came}, fell {fell}");
    assert!(bytes(&came, "resident").abs_diff(fell) < 20 << 20, "it measures: {came}, {fell}");
    let (code, _, err) = run_in(dir.path(), &["reclaim", "nobody"]).unwrap();
    assert_eq!(code, 2);
    assert!(err.contains("there are: want"), "{err}");
    assert!(daemon.stop());
    check_record(dir.path());
}
