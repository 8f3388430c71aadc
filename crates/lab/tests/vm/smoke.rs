//! The lab on this machine: kernels boot, the tool answers, memory is what it
//! was, a VM that dies is *lost*, and the arena is restored whatever happens.
//!
//! Needs `cargo lab setup`; the arena's tests need root and say so if it is missing.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::Child;

use ebb_lab::arena;
use ebb_lab::arena::Places;
use ebb_lab::vm::{Accel, VmError};

use super::*;

const KSM_SLEEP: &str = "/sys/kernel/mm/ksm/sleep_millisecs";

fn config(name: &str, kernel: Kernel) -> VmConfig {
    let mut config = VmConfig::new(name, Bytes::mib(256));
    config.kernel = kernel;
    config.balloon = Some(Balloon { reporting: true, deflate_on_oom: false });
    config
}

#[test]
fn vm_both_kernels_boot_with_every_vcpu_and_keep_their_memory() {
    let _arena = held();
    for kernel in Kernel::ALL {
        let mut config = config("keep", kernel);
        config.cpus = 3;
        let mut vm = Vm::start(&config).unwrap();
        let ping = vm.request("ping", MINUTE).unwrap();
        assert_eq!(ping.str("kernel"), vm.release);
        let online = |vm: &Vm| vm.tool().sh("cat /sys/devices/system/cpu/online", MINUTE).unwrap();
        assert_eq!(online(&vm), "0-2\n");
        let tool = vm.tool();
        tool.start("v", "verify", "size=100000000 seconds=2 threads=2").unwrap();
        let end = tool.wait_end("v", MINUTE).unwrap();
        assert_eq!(end.u64("errors"), 0, "{end:?}");
        assert!(end.u64("checks") > 1000, "{end:?}");
        vm.set_balloon(Bytes::mib(160)).unwrap();
        let small = |vm: &Vm| vm.balloon().unwrap() == Bytes::mib(160);
        vm.wait_for("the balloon to fill", MINUTE, small).unwrap();
        vm.set_balloon(Bytes::mib(256)).unwrap();
        vm.reset().unwrap();
        vm.wait_ready().unwrap();
        assert_eq!(online(&vm), "0-2\n", "after a reset");
    }
}

/// What a guest's kernel is told that its processor can do.
fn cpu_flags(config: &VmConfig) -> BTreeSet<String> {
    let vm = Vm::start(config).unwrap();
    let text = vm.tool().sh("cat /proc/cpuinfo", MINUTE).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("flags")?.split_once(": "));
    line.unwrap_or_else(|| panic!("{text}")).1.split(' ').map(String::from).collect()
}

#[test]
fn vm_translated_guests_have_every_default_cpu_flag_but_cx16() {
    let _arena = held();
    let mut config = config("flags", Kernel::V6_12);
    config.accel = Some(Accel::Tcg);
    let ours = cpu_flags(&config);
    assert!(!ours.contains("cx16"), "{ours:?}");
    // QEMU takes the last one: this is its default.
    config.args = vec!["-cpu".into(), "qemu64".into()];
    let default = cpu_flags(&config);
    let lacks: Vec<&String> = default.symmetric_difference(&ours).collect();
    assert_eq!(lacks, ["cx16"], "{default:?}");
}

#[test]
fn vm_the_tool_refuses_nonsense_and_survives_its_jobs() {
    let _arena = held();
    let vm = Vm::start(&config("tool", Kernel::V6_1)).unwrap();
    for command in ["frobnicate", "ping x=1", "wait job=none", "start job=a kind=none", "readfile"]
    {
        assert!(vm.tool().request(command, MINUTE).is_err(), "{command}");
    }
    let long = format!("echo text={}", "x".repeat(10_000));
    vm.tool().send(&long).unwrap();
    let odd = vm.request("echo text=%22%0a%c3%a9%25", MINUTE).unwrap();
    assert_eq!(odd.str("text"), "\"\n\u{c3}\u{a9}%");
    assert_eq!(vm.tool().bad_lines(), 0);

    // More than there is: the job is killed, the tool is not.
    let hog = vm.tool().start_ready("hog", "hold", "size=1073741824", MINUTE);
    let hog = hog.unwrap_err().to_string();
    assert!(hog.contains("killed"), "{hog}");
    let typo = vm.tool().start_ready("typo", "hold", "size=4096 patern=zero", MINUTE);
    assert!(typo.unwrap_err().to_string().contains("patern"));

    vm.tool().start_ready("c", "cycle", "size=8388608 period_ms=20 count=3", MINUTE).unwrap();
    assert_eq!(vm.tool().wait_end("c", MINUTE).unwrap().u64("cycles"), 3);
    vm.tool().start("s", "sort", "n=100000").unwrap();
    assert!(vm.tool().wait_end("s", MINUTE).unwrap().f64("seconds") > 0.0);
    vm.tool().start("f", "faultloop", "size=4194304 iterations=3 period_ms=20").unwrap();
    assert_eq!(vm.tool().wait_end("f", MINUTE).unwrap().u64("pages"), 3072);
    vm.tool().start("m", "memhog", "size=4194304").unwrap();
    vm.tool().wait_end("m", MINUTE).unwrap();
    assert!(vm.request("meminfo", MINUTE).unwrap().u64("oom_kill") > 0);
    assert!(vm.request("psi", MINUTE).unwrap().0.contains_key("some_avg10"));
    assert_eq!(vm.tool().sh("echo hello; exit 3", MINUTE).unwrap(), "hello\n");
    vm.tool().write("/proc/sys/vm/swappiness", "10").unwrap();
    let knob = vm.request("readfile path=/proc/sys/vm/swappiness", MINUTE).unwrap();
    assert_eq!(knob.str("text"), "10\n");
    vm.request("drop", MINUTE).unwrap();
    vm.request("compact", MINUTE).unwrap();
    assert!(vm.request("modprobe name=virtio_mem", MINUTE).is_ok());
    vm.request("swapon dev=/dev/zram0 size=33554432", MINUTE).unwrap();
    assert!(vm.request("meminfo", MINUTE).unwrap().u64("SwapTotal") > 30 << 20);
}

#[test]
fn vm_a_disk_fills_the_page_cache() {
    let _arena = held();
    let disk = tempfile::NamedTempFile::new().unwrap();
    fs::write(disk.path(), vec![7; 32 << 20]).unwrap();
    let mut config = config("disk", Kernel::V6_12);
    config.disks = vec![disk.path().into()];
    config.backing = Backing::Memfd;
    let note = tempfile::NamedTempFile::new().unwrap();
    fs::write(note.path(), "from the host").unwrap();
    config.files = vec![("/etc/note".into(), note.path().into())];
    let vm = Vm::start(&config).unwrap();
    assert_eq!(vm.tool().sh("cat /etc/note", MINUTE).unwrap(), "from the host");
    let before = vm.request("meminfo", MINUTE).unwrap();
    let read = "dev=/dev/vda size=33554432";
    vm.tool().start_ready("r", "read", read, MINUTE).unwrap();
    let after = vm.request("meminfo", MINUTE).unwrap();
    let cache = |f: &ebb_lab::guest::Fields| f.u64("Cached") + f.u64("Buffers");
    assert!(cache(&after) - cache(&before) >= 30 << 20, "{before:?} {after:?}");
}

#[test]
fn vm_that_dies_is_lost_and_not_a_failure() {
    let _arena = held();
    let vm = Vm::start(&config("killed", Kernel::V6_1)).unwrap();
    let dir = vm.run_dir.clone();
    let pid = vm.pid;
    vm.kill();
    assert!(matches!(vm.request("ping", MINUTE), Err(VmError::Lost { .. })));
    assert!(matches!(vm.balloon(), Err(VmError::Lost { .. })));
    drop(vm);
    assert!(!dir.exists() && !PathBuf::from(format!("/proc/{pid}")).exists());

    let mut vm = Vm::start(&config("crashed", Kernel::V6_1)).unwrap();
    // The panic may be seen before the tool's answer, or after it.
    let lost = match vm.request("sysrq c=c", MINUTE) {
        Ok(_) => vm.wait_for("its end", MINUTE, |_| None::<()>).unwrap_err(),
        Err(lost) => lost,
    };
    let VmError::Lost { why, .. } = lost else { panic!("{lost:?}") };
    assert!(why.contains("panic") || why.contains("Oops"), "{why}");
    // What it says after the reset would be the next kernel's words.
    wait_until(|| vm.console().contains("---[ end Kernel panic"), || vm.console());
    vm.reset().unwrap();
    vm.wait_ready().unwrap();
}

/// Flips one bit in guest pages that `verify` has sealed; returns how many.
fn flip_bits(vm: &Vm, seed_word: u64) -> usize {
    let maps = fs::read_to_string(format!("/proc/{}/maps", vm.pid)).unwrap();
    let ram = maps.lines().find_map(|line| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let parse = |v| u64::from_str_radix(v, 16).ok();
        let (from, to) = (parse(from)?, parse(to)?);
        (to - from == vm.memory.0).then_some(from)
    });
    let file = format!("/proc/{}/mem", vm.pid);
    let memory = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let (ram, mut flipped) = (ram.expect("guest RAM is one mapping"), 0);
    for page in (ram..ram + vm.memory.0).step_by(4096) {
        let mut head = [0; 8];
        if memory.read_at(&mut head, page).is_ok() && u64::from_le_bytes(head) == seed_word {
            memory.read_at(&mut head, page + 800).unwrap();
            head[3] ^= 0x10;
            memory.write_at(&head, page + 800).unwrap();
            flipped += 1;
        }
    }
    flipped
}

#[test]
fn vm_verify_finds_a_flipped_bit_and_a_reboot_and_a_reset_bring_the_tool_back() {
    let _arena = held();
    let mut vm = Vm::start(&config("flip", Kernel::V6_12)).unwrap();
    vm.tool().start_ready("v", "verify", "size=67108864 seconds=60 seed=1", MINUTE).unwrap();
    let checks = |vm: &Vm| vm.tool().stat("v").is_ok_and(|stat| stat.u64("checks") > 9999);
    vm.wait_for("pages", MINUTE, checks).unwrap();
    // mix64(1), the seed of the first thread.
    assert!(flip_bits(&vm, 0x910a_2dec_8902_5cc1) > 0);
    let end = vm.request("wait job=v", MINUTE).unwrap();
    assert_eq!((end.str("state"), end.str("what")), ("failed", "checksum"), "{end:?}");
    assert!(end.u64("errors") > 0 && end.u64("expected") != end.u64("found"), "{end:?}");

    let boot_id = |vm: &Vm| vm.request("ping", MINUTE).unwrap().str("boot_id").to_string();
    let first = boot_id(&vm);
    vm.request("reboot", MINUTE).unwrap();
    vm.wait_ready().unwrap();
    let second = boot_id(&vm);
    vm.reset().unwrap();
    vm.wait_ready().unwrap();
    let third = boot_id(&vm);
    assert!(first != second && second != third, "{first} {second} {third}");
    vm.pause().unwrap();
    assert!(vm.tool().request("ping", Duration::from_millis(100)).is_err());
    vm.resume().unwrap();
    assert_eq!(boot_id(&vm), third);
}

/// A lab at work, and the first line that it says.
fn lab(args: &[&str]) -> (Child, String) {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_ebb-lab"));
    let mut child = lab.args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

/// Only root may set up what an arena has.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: needs root");
    }
    is_root
}

#[test]
fn vm_dies_with_a_lab_that_is_killed() {
    let (mut lab, line) = lab(&["boot", "--memory", "256MiB"]);
    let word = |key: &str| line.split_whitespace().skip_while(|w| *w != key).nth(1).unwrap();
    let qemu = PathBuf::from(format!("/proc/{}/cmdline", word("pid")));
    let run_dir = PathBuf::from(word("qmp")).parent().unwrap().to_path_buf();
    let alive = || fs::read(&qemu).is_ok_and(|c| !c.is_empty());
    assert!(alive(), "{line}");
    lab.kill().unwrap();
    lab.wait().unwrap();
    wait_until(|| !alive(), || format!("QEMU outlived the lab: {line}"));
    // What a killed lab cannot remove itself.
    fs::remove_dir_all(run_dir).unwrap();
}

fn swaps() -> usize {
    fs::read_to_string("/proc/swaps").unwrap().lines().count()
}

#[test]
fn vm_arena_is_restored_after_sigkill_and_sigterm() {
    if !is_root() {
        return;
    }
    let knob = format!("--knob={KSM_SLEEP}=77");
    let args = ["hold-arena", "--budget=64MiB", "--swap=32MiB", &knob];
    let arena = Arena::beside(Beside::Alone).unwrap();
    let (old, before) = (fs::read_to_string(KSM_SLEEP).unwrap(), swaps());
    drop(arena);
    for signal in [Signal::KILL, Signal::TERM] {
        let (mut child, line) = lab(&args);
        let cgroup = line.trim().trim_start_matches("held ");
        assert_eq!(fs::read_to_string(KSM_SLEEP).unwrap().trim(), "77");
        assert_eq!(swaps(), before + 1);
        assert!(Path::new(cgroup).is_dir(), "{cgroup}");
        crate::signal(child.id(), signal);
        child.wait().unwrap();
        // After SIGKILL it is this that restores; and it keeps others away.
        let _arena = Arena::beside(Beside::Alone).unwrap();
        assert_eq!(fs::read_to_string(KSM_SLEEP).unwrap(), old);
        assert_eq!(swaps(), before);
        assert!(!Path::new(cgroup).exists(), "{cgroup}");
    }
    assert_eq!(arena::clean(&Places::here()).unwrap(), Ok(0));
}

#[test]
fn vm_a_budget_makes_vms_swap_and_leaves_no_trace() {
    if !is_root() {
        return;
    }
    let swap = SwapConfig { size: Bytes::mib(512), kind: SwapKind::Any, priority: 5 };
    // Alone: others may have swap of their own.
    let arena = Arena::beside(Beside::Alone).unwrap();
    let before = swaps();
    drop(arena);
    let budget = Some(Bytes::mib(250));
    let arena =
        Arena::enter(&ArenaConfig { budget, swap: Some(swap), ..ArenaConfig::default() }).unwrap();
    let cgroup = arena.cgroup().unwrap().clone();
    let mut config = config("squeezed", Kernel::V6_1);
    config.cgroup = Some(cgroup.dir.clone());
    let vm = Vm::start(&config).unwrap();
    vm.tool().start_ready("h", "hold", "size=167772160", MINUTE).unwrap();
    assert!(cgroup.usage() <= Bytes::mib(250));
    assert!(cgroup.swap() > Bytes::mib(10), "{}", cgroup.swap());
    let begun = Instant::now();
    drop(arena);
    assert!(begun.elapsed() < MINUTE && !cgroup.dir.exists());
    let _arena = Arena::beside(Beside::Alone).unwrap();
    assert_eq!(swaps(), before);
    assert!(matches!(vm.request("ping", MINUTE), Err(VmError::Lost { .. })));
}
