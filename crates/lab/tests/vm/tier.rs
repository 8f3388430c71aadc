//! Tier guest from end to end, as a user has it: `ebb run` finds the agent in QEMU
//! and through it the module in the guest, and gives back what the guest frees.

use ebb_lab::experiment::stage::write_noise;
use ebb_lab::wall_ms;

use super::*;

struct Place {
    arena: Arena,
    vm: Vm,
    dir: tempfile::TempDir,
}

impl Place {
    /// A guest with module and agent, in a cgroup of its own with room.
    fn boot(kernel: Kernel) -> Place {
        Place::within(kernel, Bytes::gib(2), None)
    }

    /// The same within a budget, with a disk that is full of noise.
    fn within(kernel: Kernel, budget: Bytes, disk: Option<Bytes>) -> Place {
        let arena = Arena::within(budget, Beside::AnyTest).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut config = stock(&unique("tier"), Bytes::mib(768));
        (config.kernel, config.cpus) = (kernel, 2);
        config.cgroup = arena.cgroup().map(|c| c.dir.clone());
        if let Some(size) = disk {
            let path = dir.path().join("disk");
            write_noise(&path, size).unwrap();
            config.disks = vec![path];
            config.args.push("-snapshot".into());
        }
        guest_stack::prepare(&mut config, dir.path()).unwrap();
        let vm = guest_stack::boot(&[config]).unwrap().remove(0);
        Place { arena, vm, dir }
    }

    fn usage(&self) -> Bytes {
        self.arena.cgroup().unwrap().usage()
    }

    fn daemon(&self, config: &str) -> Daemon {
        let daemon = Daemon::start(self.dir.path(), &[&self.vm.name], config).unwrap();
        daemon.wait_for_tier("guest").unwrap();
        daemon
    }

    /// Fills 256 MiB and frees them; what the host held when they were full.
    fn fill_and_free(&self) -> Bytes {
        self.vm.tool().start_ready("h", "hold", "size=268435456", MINUTE).unwrap();
        let full = self.usage();
        self.vm.tool().stop("h").unwrap();
        full
    }
}

fn agent(state: &Value, key: &str) -> u64 {
    state["vms"][0]["agent"][key].as_u64().unwrap_or(0)
}

#[test]
fn vm_what_a_guest_frees_returns_by_itself_and_at_once_when_asked_for() {
    for kernel in Kernel::ALL {
        let place = Place::boot(kernel);
        let daemon = place.daemon("");
        // Whatever boot left is recycled first, so that what follows is the burst.
        daemon.wait_for("calm", MINUTE, |s| agent(s, "held") < 24 << 20).unwrap();
        let before = place.usage();
        let full = place.fill_and_free();
        let freed = Instant::now();
        let back = || (full - place.usage()).fraction_of(full - before);
        place.vm.wait_for("95 %", MINUTE, |_| back() >= 0.95).unwrap();
        println!("{kernel}: 95 % of {} back {:?} after the free", full - before, freed.elapsed());

        let recycled =
            || daemon.state().unwrap()["vms"][0]["agent"]["counters"]["recycled"].as_u64();
        let was = recycled().unwrap();
        let full = place.fill_and_free();
        let asked = Instant::now();
        let out = ebb_says(place.dir.path(), &["reclaim", &place.vm.name, "--json"]);
        let came: Value = serde_json::from_str(&out).unwrap();
        let share = (full - place.usage()).fraction_of(full - before);
        println!("{kernel}: asked for: {:.1} % back, {:?}; {came}", share * 100.0, asked.elapsed());
        assert!(share >= 0.95, "{share}: {came}");
        // Some of it may have been recycled before it was asked for.
        let much = |_: &Value| (recycled()? - was > 200 << 20).then_some(());
        daemon.wait_for("that it was recycled", MINUTE, much).unwrap();
        place.vm.tool().sh("rmmod ebb", MINUTE).unwrap();
        let unloaded = |s: &Value| s["vms"][0]["tier"] != "guest";
        daemon.wait_for("a module that is unloaded", MINUTE, unloaded).unwrap();
        assert!(daemon.stop());
    }
}

#[test]
fn vm_a_paused_guest_gives_back_and_a_verified_one_loses_nothing() {
    let place = Place::boot(Kernel::V6_12);
    let daemon = place.daemon("");
    place.vm.tool().start("v", "verify", "size=100000000 seconds=100000 threads=2").unwrap();
    // Everything that is free, at once, again and again, while the guest works.
    let began = Instant::now();
    let recycled = |s: &Value| s["vms"][0]["agent"]["counters"]["recycled"].as_u64();
    let much = |s: &Value| {
        daemon.reclaim().unwrap();
        (began.elapsed() > Duration::from_secs(8) && recycled(s)? > 100 << 20).then_some(())
    };
    daemon.wait_for("much recycling", MINUTE, much).unwrap();
    let end = place.vm.tool().finish("v", 3 * MINUTE).unwrap();
    assert_eq!(end.u64("errors"), 0, "{end:?}");

    let now = |key| agent(&daemon.state().unwrap(), key);
    let freed_and_paused = || {
        place.vm.tool().start_ready("h", "hold", "size=268435456", MINUTE).unwrap();
        // Pages that are free already and still held come back as well. What the daemon knows of
        // them is a second or two old: they are counted when nothing comes back any more.
        let mut before = (0, Bytes::ZERO);
        let counted = |_: &Vm| {
            std::thread::sleep(Duration::from_secs(4));
            let state = daemon.state().unwrap();
            let given = agent(&state, "free").saturating_sub(agent(&state, "held"));
            let was = std::mem::replace(&mut before, (given, place.usage()));
            let moved = was.0.abs_diff(before.0).max(was.1.0.abs_diff(before.1.0));
            moved < 2 << 20
        };
        place.vm.wait_for("a guest at rest", 2 * MINUTE, counted).unwrap();
        let (kept, full) = before;
        place.vm.tool().stop("h").unwrap();
        place.vm.pause().unwrap();
        // A tick may have fallen in between.
        let early = full - place.usage();
        if early >= Bytes::mib(64) {
            place.vm.resume().unwrap();
            return None;
        }
        Some((kept, full))
    };
    let (kept, full) = (0..5).find_map(|_| freed_and_paused()).expect("freed and then paused");
    // What lies in lists of each CPU when the guest is stopped, up to a sixteenth of
    // its memory, is not in its map, and stays.
    let came = || (full - place.usage(), Bytes(now("free").saturating_sub(kept)));
    place
        .vm
        .wait_for("a paused guest's memory", MINUTE, |_| {
            let (back, freed) = came();
            freed > Bytes::mib(160) && back.fraction_of(freed) >= 0.95
        })
        .unwrap_or_else(|e| panic!("{e}: (back, freed) {:?}", came()));
    println!("{:?} came back of what was freed, paused", came());
    place.vm.resume().unwrap();
    assert!(daemon.stop());
    place.vm.request("ping", MINUTE).unwrap();
}

#[test]
fn vm_reboots_drop_the_map_and_a_new_module_is_found_again() {
    let mut place = Place::boot(Kernel::V6_1);
    let daemon = place.daemon("");
    daemon.reclaim().unwrap();
    place.vm.reset().unwrap();
    place.vm.wait_ready().unwrap();
    daemon.wait_for("no map", MINUTE, |s| s["vms"][0]["tier"] != "guest").unwrap();
    place.vm.tool().start("v", "verify", "size=50000000 seconds=2").unwrap();
    assert_eq!(place.vm.tool().wait_end("v", MINUTE).unwrap().u64("errors"), 0);
    guest_stack::load(&place.vm).unwrap();
    daemon.wait_for_tier("guest").unwrap();
    daemon.crash();
    place.vm.tool().start("w", "verify", "size=50000000 seconds=2").unwrap();
    assert_eq!(place.vm.tool().wait_end("w", MINUTE).unwrap().u64("errors"), 0);
    let daemon = place.daemon("");
    assert!(daemon.stop());
}

/// Times that tasks of the guest went into direct reclaim since it booted.
fn direct_reclaim(vm: &Vm) -> u64 {
    let said = vm.tool().sh("grep ^allocstall /proc/vmstat", MINUTE).unwrap();
    said.lines().filter_map(|l| l.split(' ').nth(1)?.trim().parse::<u64>().ok()).sum()
}

fn available_of(vm: &Vm) -> Bytes {
    let said = vm.tool().sh("grep ^MemAvailable /proc/meminfo", MINUTE).unwrap();
    Bytes(said.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10)
}

/// The daemon looks away while a small guest takes all that it has, so that its kernel
/// reclaims page cache in the tasks that allocate. With the next look it is given
/// memory, by what its module says. What it wrote is read again and compared.
#[test]
fn vm_a_guest_in_direct_reclaim_is_given_memory_at_once_by_its_modules_facts() {
    let room = Bytes::gib(1);
    let place = Place::within(Kernel::V6_12, room, Some(Bytes::mib(400)));
    let (tool, cgroup) = (place.vm.tool(), place.arena.cgroup().unwrap());
    tool.start_ready("base", "hold", "size=134217728", MINUTE).unwrap();
    let daemon = place.daemon("reserve = \"450MiB\"");
    // What QEMU holds beside the guest differs by the machine: the limit follows it.
    let mut limit = room;
    let small = |s: &Value| {
        limit = limit.min(cgroup.anon() + Bytes::mib(60));
        cgroup.resize(limit).unwrap();
        s["vms"][0]["actual"].as_u64().is_some_and(|actual| actual < 450 << 20)
    };
    daemon.wait_for("a small guest", 3 * MINUTE, small).unwrap();
    daemon.signal(Signal::STOP);
    cgroup.resize(room).unwrap();

    tool.start_ready("read", "read", "size=419430400", MINUTE).unwrap();
    // Hardly anything is kept free, so that kswapd comes too late.
    tool.write("/proc/sys/vm/min_free_kbytes", "512").unwrap();
    let available = available_of(&place.vm);
    // Room for less than it has given.
    cgroup.resize(cgroup.anon() + Bytes::mib(160)).unwrap();
    let before = direct_reclaim(&place.vm);
    let all_of_it = format!("size={} seconds=100000 threads=2", available.0 - (8 << 20));
    tool.start("v", "verify", &all_of_it).unwrap();
    let stalls = || direct_reclaim(&place.vm) - before;
    let is_short = |_: &Vm| stalls() > 0 && available_of(&place.vm) < Bytes::mib(48);
    place.vm.wait_for("direct reclaim", MINUTE, is_short).unwrap();

    let (looked, looked_ms) = (Instant::now(), wall_ms());
    daemon.signal(Signal::CONT);
    let order = daemon
        .wait_for("order to grow", MINUTE, |_| {
            daemon.decisions().ok()?.iter().find_map(|d| {
                let is_short = d["action"]["reason"]["rule"] == "guest_short";
                (is_short && d["wall_ms"].as_u64()? >= looked_ms).then(|| d.clone())
            })
        })
        .unwrap();
    let late = looked.elapsed();
    println!("{late:?} after Ebb looked again: {order}; {} times in direct reclaim", stalls());
    assert!(order["guest"].as_str().unwrap().contains("by its module"), "{order}");
    let [from, to] = ["from", "to"].map(|key| order["action"][key].as_u64().unwrap());
    assert!(to > from, "{order}");
    assert!(late < Duration::from_secs(5), "{late:?}: {order}");
    let end = tool.finish("v", 3 * MINUTE).unwrap();
    assert_eq!(end.u64("errors"), 0, "{end:?}");
    tool.poke("base").unwrap();
    let held = tool.wait_event("base", "progress", MINUTE).unwrap();
    assert_eq!(held.u64("errors"), 0, "{held:?}");
    assert!(held.u64("checks") > 0, "{held:?}");
    assert!(daemon.stop());
}
