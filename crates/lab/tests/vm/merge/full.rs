//! A cgroup without swap that is nearly full: to take a VM out of KSM, or to give back what a guest
//! frees of merged memory, breaks merges, and that takes memory there.

use ebb_lab::arena::MemoryCgroup;

use super::*;

const NAMES: [&str; 2] = ["full-1", "full-2"];
const RESERVE: &str = "reserve = \"16MiB\"\n";
const ALIKE: Bytes = Bytes::mib(160);

/// Guests with module and agent that hold the same, in a cgroup.
struct Place {
    vms: Vec<Vm>,
    dir: tempfile::TempDir,
    slice: MemoryCgroup,
    arena: Arena,
}

impl Place {
    fn with_guests_alike() -> Place {
        let budget = Some(Bytes::gib(8));
        let arena = held_with(ArenaConfig { budget, ..ArenaConfig::default() });
        let slice = arena.cgroup().unwrap().child("slice", Bytes::gib(4)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let vms = boot_alike(&slice, dir.path());
        Place { vms, dir, slice, arena }
    }
}

fn boot_alike(slice: &MemoryCgroup, dir: &Path) -> Vec<Vm> {
    let config = |name| {
        let mut config = VmConfig::new(name, Bytes::mib(448));
        guest_stack::prepare(&mut config, dir).unwrap();
        config.balloon = Some(Balloon { reporting: false, deflate_on_oom: true });
        config.cgroup = Some(slice.dir.clone());
        config
    };
    let vms = guest_stack::boot(&NAMES.map(config)).unwrap();
    for vm in &vms {
        let tool = vm.tool();
        tool.write("/sys/kernel/mm/transparent_hugepage/enabled", "never").unwrap();
        tool.start_ready("v", "verify", "size=8388608 seconds=86400", MINUTE).unwrap();
        let alike = format!("size={} pattern=template share=1.0", ALIKE.0);
        tool.start_ready("h", "hold", &alike, MINUTE).unwrap();
    }
    vms
}

/// All at once it would take 160 MiB in the VM's own cgroup, where 14 are left: the kernel's OOM
/// killer would end the VM.
#[test]
fn vm_what_is_merged_and_freed_in_a_full_cgroup_has_no_vm_killed() {
    let Place { arena: _arena, slice, dir, vms } = Place::with_guests_alike();
    let text = RESERVE.to_string() + &merge_config("1h");
    let daemon = Daemon::start(dir.path(), &NAMES, &text).unwrap();
    let merged = |s: &Value| {
        let most = NAMES.iter().all(|name| {
            let stat = &of(s, name)["merge"]["stat"];
            let pages = |key: &str| stat[key].as_u64().unwrap_or(0);
            pages("merging_pages") + pages("zero_pages") > ALIKE.0 / PAGE * 95 / 100
        });
        most && s["host"]["ksm"]["run"] == 0
    };
    // Scans pause while tasks of the machine stall for memory, as those of other tests do.
    daemon.wait_for("memory that is merged, and KSM at rest", 8 * MINUTE, merged).unwrap();
    // Agents go on giving back what is free: until there is little to give.
    let left = |s: &Value| {
        slice.resize(slice.usage() + Bytes::mib(14)).unwrap();
        std::thread::sleep(Duration::from_secs(3));
        let headroom = limit_of_slice(s)?["headroom"].as_u64()?;
        (headroom < Bytes::mib(24).0).then_some(())
    };
    daemon.wait_for("a limit that is nearly reached", 3 * MINUTE, left).unwrap();

    // A VM that is to go out of KSM stays where it would have to be broken as a whole.
    let off = |name: &str| run_in(dir.path(), &["merge", "off", name]).unwrap();
    println!("{:?}", off(NAMES[1]));
    let told = |s: &Value| {
        let why = s["host"]["merge"]["why"].as_str()?;
        why.contains("no room to break").then(|| why.to_string())
    };
    println!("{}", daemon.wait_for("why it stays", MINUTE, told).unwrap());
    assert_eq!(of(&daemon.state().unwrap(), NAMES[1])["merge"]["open"], true);

    // What the other frees comes back by its agent and by the balloon.
    let was = vms[0].resident();
    vms[0].tool().stop("h").unwrap();
    let back = |s: &Value| {
        assert_eq!(slice.oom_kills(), 0, "{s}");
        vms[0].resident() + Bytes(ALIKE.0 / 2) < was
    };
    daemon.wait_for("what was freed, part by part", 4 * MINUTE, back).unwrap();
    slice.resize(Bytes::gib(4)).unwrap();
    let closed = |s: &Value| of(s, NAMES[1])["agent"]["open"] == 0;
    daemon.wait_for("a VM that goes where there is room", MINUTE, closed).unwrap();
    nothing_is_lost(&vms);
    assert!(daemon.stop());
    assert_eq!(slice.oom_kills(), 0);
}

fn nothing_is_lost(vms: &[Vm]) {
    for vm in vms {
        vm.check().unwrap();
        vm.tool().poke("v").unwrap();
        assert_eq!(vm.tool().wait_end("v", MINUTE).unwrap().u64("errors"), 0);
    }
}

/// QEMU makes RAM mergeable by default, and KSM has merged it before Ebb starts. An agent breaks
/// all merges before it recycles; without room below the limit the kernel would kill a VM.
#[test]
fn vm_what_others_merged_in_a_full_cgroup_is_taken_out_when_there_is_room() {
    let Place { arena, slice, dir, vms } = Place::with_guests_alike();
    set_knob(&arena, "pages_to_scan", "20000");
    set_knob(&arena, "sleep_millisecs", "10");
    let merged = || vms.iter().all(|vm| mapped(vm).merged > ALIKE.share(0.95));
    assert_eq!(poll(4 * MINUTE, merged), Some(()), "{:?}, {:?}", mapped(&vms[0]), mapped(&vms[1]));
    // What is alike for a moment only, as guests boot, does not count: the rest is merged as well.
    let scans = || knob("full_scans").parse::<u64>().unwrap();
    let then = scans();
    assert_eq!(poll(MINUTE, || scans() >= then + 2), Some(()), "two more passes");
    set_knob(&arena, "run", "0");
    slice.resize(slice.usage() + ALIKE.share(0.5)).unwrap();

    let daemon = Daemon::start(dir.path(), &NAMES, RESERVE).unwrap();
    let told = |s: &Value| {
        let why = NAMES.map(|name| of(s, name)["agent"]["why"].as_str().map(str::to_string));
        let all = why.iter().all(|w| w.as_ref().is_some_and(|w| w.contains("its limits leave")));
        all.then_some(why)
    };
    println!("{:?}", daemon.wait_for("why they stay merged", MINUTE, told).unwrap());
    assert!(vms.iter().all(|vm| mapped(vm).merged > ALIKE.share(0.9)));
    slice.resize(Bytes::gib(4)).unwrap();
    let ready = |s: &Value| NAMES.iter().all(|n| of(s, n)["tier"] == "guest");
    daemon.wait_for("agents at work where there is room", MINUTE, ready).unwrap();
    assert!(vms.iter().all(|vm| mapped(vm).merged == Bytes::ZERO));
    nothing_is_lost(&vms);
    assert!(daemon.stop());
    assert_eq!(slice.oom_kills(), 0);
}
