//! Tier guest from end to end, as a user has it: `ebb run` finds the agent in QEMU
//! and through it the module in the guest, and gives back what the guest frees.

use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_lab::arena::{Arena, Beside};
use ebb_lab::ebb::Daemon;
use ebb_lab::experiment::stage::write_noise;
use ebb_lab::guest_stack;
use ebb_lab::image::Kernel;
use ebb_lab::vm::Vm;
use ebb_lab::wall_ms;
use serde_json::Value;

use crate::{MINUTE, ebb_says, stock, unique};

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
        let daemon = Daemon::start(self.dir.path(), &[self.vm.name()], config).unwrap();
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
            || daemon.get("/v1/state").unwrap()["vms"][0]["agent"]["counters"]["recycled"].as_u64();
        let was = recycled().unwrap();
        let full = place.fill_and_free();
        let asked = Instant::now();
        let out = ebb_says(place.dir.path(), &["reclaim", place.vm.name(), "--json"]);
        let came: Value = serde_json::from_str(&out).unwrap();
        let share = (full - place.usage()).fraction_of(full - before);
        println!("{kernel}: asked for: {:.1} % back, {:?}; {came}", share * 100.0, asked.elapsed());
        assert!(share >= 0.95, "{share}: {came}");
        // Some of it may have been recycled before it was asked for.
        let much = |_: &Value| (recycled()? - was > 200 << 20).then_some(());
        daemon.wait_for("that it was recycled", MINUTE, much).unwrap();
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

    let now = |key| agent(&daemon.get("/v1/state").unwrap(), key);
    let freed_and_paused = || {
        place.vm.tool().start_ready("h", "hold", "size=268435456", MINUTE).unwrap();
        // Pages that are free already and still held come back as well. What the daemon knows of
        // them is a second or two old: they are counted when nothing comes back any more.
        let mut before = (0, Bytes::ZERO);
        let counted = |_: &Vm| {
            std::thread::sleep(Duration::from_secs(4));
            let state = daemon.get("/v1/state").unwrap();
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

/// A guest full of cache, made small on a short host, bursts: it runs
/// into direct reclaim, and is given memory by what its module says, with the next
/// look. What it wrote is read again and compared, before and after.
#[test]
fn vm_a_guest_in_direct_reclaim_is_given_memory_at_once_by_its_modules_facts() {
    // Below a larger limit Ebb leaves the guest its page cache.
    let place = Place::within(Kernel::V6_12, Bytes::mib(740), Some(Bytes::mib(400)));
    let tool = place.vm.tool();
    tool.start_ready("base", "hold", "size=134217728", MINUTE).unwrap();
    tool.start_ready("read", "read", "size=419430400", MINUTE).unwrap();
    let daemon = place.daemon("reserve = \"450MiB\"");
    // As small as Ebb makes it: with more cache to drop it would not be short.
    let (mut size, mut since) = (0, Instant::now());
    let small = |s: &Value| {
        let actual = s["vms"][0]["actual"].as_u64()?;
        if size != actual {
            (size, since) = (actual, Instant::now());
        }
        let is_small = actual < 640 << 20 && since.elapsed() > Duration::from_secs(2);
        is_small.then(|| s["vms"][0]["available"].as_u64())?
    };
    let available = daemon.wait_for("a small guest", 3 * MINUTE, small).unwrap();

    // Hardly anything is kept free, so that kswapd comes too late.
    tool.write("/proc/sys/vm/min_free_kbytes", "512").unwrap();
    let (before, began_ms) = (direct_reclaim(&place.vm), wall_ms());
    let all_of_it = format!("size={} seconds=100000 threads=2", available - (8 << 20));
    tool.start("v", "verify", &all_of_it).unwrap();
    let stalls_of = |s: &Value| s["vms"][0]["agent"]["facts"]["alloc_stall"].as_u64().unwrap_or(0);
    let (calm, mut short) = (stalls_of(&daemon.get("/v1/state").unwrap()), None);
    let order = daemon
        .wait_for("order to grow", MINUTE, |s| {
            // A guest with page cache left drops that, and is not short.
            let available = s["vms"][0]["available"].as_u64().unwrap_or(0);
            if stalls_of(s) > calm && available < 100 << 20 {
                short.get_or_insert_with(Instant::now);
            }
            let decisions = daemon.get("/v1/decisions").ok()?;
            decisions.as_array()?.iter().find_map(|d| {
                // By what it likely needs next where Ebb was there before it was short.
                let rule = d["action"]["reason"]["rule"].as_str()?;
                let given = ["guest_short", "likely"].contains(&rule);
                (given && d["wall_ms"].as_u64()? >= began_ms).then(|| d.clone())
            })
        })
        .unwrap();
    let late = short.map(|at: Instant| at.elapsed());
    let end = tool.finish("v", 3 * MINUTE).unwrap();
    let stalls = direct_reclaim(&place.vm) - before;
    let is_ahead = order["action"]["reason"]["rule"] == "likely";
    let guest = order["guest"].as_str().unwrap();
    let after_ms = order["wall_ms"].as_u64().unwrap() - began_ms;
    println!("{after_ms} ms after the burst began: {order}; {stalls} times in direct reclaim");
    assert!(guest.contains("by its module"), "{order}");
    let [from, to] = ["from", "to"].map(|key| order["action"][key].as_u64().unwrap());
    assert!(to > from, "{order}");
    assert!(stalls > 0 || is_ahead, "the burst must be one that its kernel has to reclaim for");
    // How long it touches memory before it is short is the machine's doing.
    assert!(late.is_none_or(|late| late < Duration::from_secs(5)), "{late:?}: {order}");
    assert_eq!(end.u64("errors"), 0, "{end:?}");
    tool.poke("base").unwrap();
    let held = tool.wait_event("base", "progress", MINUTE).unwrap();
    assert_eq!(held.u64("errors"), 0, "{held:?}");
    assert!(held.u64("checks") > 0, "{held:?}");
    assert!(daemon.stop());
}
