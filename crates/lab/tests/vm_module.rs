//! ebb.ko in real guests: it loads, tells the truth under stress, is found out
//! when a hook is left out, and goes without a trace.
//!
//! Needs `cargo lab setup --headers`. `EBB_STRESS_SECONDS` sets how long the
//! guests are stressed (20 by default). The module and a stress script travel on
//! a disk, as a tar archive; guests have a ZONE_MOVABLE, so that memory can go
//! offline.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_lab::arena::Arena;
use ebb_lab::guest::{ToolError, escape};
use ebb_lab::image::{Cache, Image, Kernel};
use ebb_lab::vm::{Backing, Balloon, Vm, VmConfig, VmError};
use ebb_lab::{guest_stack, in_pairs};

const MINUTE: Duration = Duration::from_secs(60);
const RUNNING: u64 = 2;
const STOPPED: u64 = 4;

/// Bits of `enum ebb_fault` besides those of single hooks.
const NO_SELF_TEST: u32 = 1 << 10;
const NO_CPUS: u32 = 1 << 11;
const DYING: u32 = 1 << 12;
const STUCK: u32 = 1 << 13;
const VENDOR: u32 = 1 << 14;
const HELD: u32 = 1 << 15;

/// Loops until /tmp/go is gone: what moves pages about, besides `verify`.
const STRESS: &str = r#"
mkdir -p /tmp/s; touch /tmp/go
# Processes that go first when there is no memory left: this script goes on.
weak() { echo 1000 > /proc/self/oom_score_adj; exec "$@"; }
hog() { ( weak dd if=/dev/zero of=/dev/null bs=$1 count=1 ) }
movable() { for m in /sys/devices/system/memory/memory*; do
	case "$(cat $m/valid_zones)" in Movable*) echo $m; break;; esac; done; }
# Memory in pieces: every other file goes, and what is left lies between holes.
pieces() { for i in 1 2 3 4 5 6; do weak dd if=/dev/zero of=/tmp/s/h$i bs=4k count=$1 & done; wait
	rm -f /tmp/s/h1 /tmp/s/h3 /tmp/s/h5; }
case "$1" in
all)
	( while [ -f /tmp/go ]; do pieces 9000; rm -f /tmp/s/h*; done ) &
	( while [ -f /tmp/go ]; do hog 80M; done ) &
	( while [ -f /tmp/go ]; do echo 220 > /proc/sys/vm/nr_hugepages
		echo 0 > /proc/sys/vm/nr_hugepages; done ) &
	( while [ -f /tmp/go ]; do echo 1 > /proc/sys/vm/compact_memory
		echo 3 > /proc/sys/vm/drop_caches; sleep 0.2; done ) &
	( while [ -f /tmp/go ]; do for i in 1 2 3 4 5 6 7 8; do ls -l /bin & done; wait; done ) &
	( n=0; while [ -f /tmp/go ]; do m=$(movable); echo offline > $m/state && n=$((n+1))
		echo online_movable > $m/state; echo $n > /tmp/offlined; sleep 0.5; done ) &
	wait ;;
huge)	# compaction on behalf of huge pages, which are then held
	pieces 22000; echo 300 > /proc/sys/vm/nr_hugepages ;;
compact)
	pieces 22000; echo 1 > /proc/sys/vm/compact_memory ;;
steal)	# movable blocks with holes of single pages; `Guest::stress` goes on
	pieces 26000 ;;
offline)
	echo offline > $(movable)/state ;;
soft)
	for a in 8 9 a b c d e f; do
		echo 0x1${a}000000 > /sys/devices/system/memory/soft_offline_page; done ;;
report)
	pieces 22000; rm -f /tmp/s/h*; sleep 8 ;;
fill)
	pieces 15000; rm -f /tmp/s/h* ;;
cpus)	# memory and loopback at work, while CPUs come and go
	ifconfig lo 127.0.0.1 up
	( while [ -f /tmp/go ]; do weak nc -l -p 99 > /dev/null; done ) &
	( while [ -f /tmp/go ]; do weak dd if=/dev/zero bs=64k count=200 | nc 127.0.0.1 99; done ) &
	( while [ -f /tmp/go ]; do pieces 4000; rm -f /tmp/s/h*; done ) &
	( while [ -f /tmp/go ]; do for i in 1 2 3 4; do ls -l /bin & done; wait; done ) &
	wait ;;
esac
"#;

/// A guest with the module at /tmp/ebb.ko.
struct Guest {
    vm: Vm,
    _disk: tempfile::NamedTempFile,
}

type Numbers = BTreeMap<String, u64>;

impl Guest {
    fn boot(kernel: Kernel, faults: bool, change: impl FnOnce(&mut VmConfig)) -> Guest {
        let image = Image::get(&Cache::from_env(), kernel).unwrap();
        let module = guest_stack::module(&image, faults).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::copy(module, dir.path().join("ebb.ko")).unwrap();
        fs::write(dir.path().join("stress"), STRESS).unwrap();
        let disk = tempfile::NamedTempFile::new().unwrap();
        let mut tar = Command::new("tar");
        tar.arg("cf").arg(disk.path()).arg("-C").arg(dir.path()).args(["ebb.ko", "stress"]);
        assert!(tar.status().unwrap().success());
        let mut config = VmConfig::new(format!("module-{kernel}"), Bytes::gib(1));
        config.kernel = kernel;
        config.cpus = 2;
        config.append = "movablecore=384M".into();
        config.disks = vec![disk.path().into()];
        change(&mut config);
        let vm = Vm::start(&config).unwrap();
        let guest = Guest { vm, _disk: disk };
        guest.sh("tar xf /dev/vda -C /tmp");
        guest
    }

    /// Runs a shell command that the OOM killer spares.
    fn sh(&self, command: &str) -> String {
        let command = format!("sh oom=-900 cmd={}", escape(command));
        self.vm.request(&command, 5 * MINUTE).unwrap().str("text").to_string()
    }

    /// What insmod and the kernel said; the module's state is the judge.
    fn insmod(&self, arguments: &str) -> String {
        self.sh(&format!("insmod /tmp/ebb.ko {arguments} 2>&1; dmesg | grep ebb: | tail -n 3"))
    }

    fn numbers(&self, name: &str) -> Numbers {
        let text = self.sh(&format!("cat /sys/kernel/debug/ebb/{name}"));
        let pair = |l: &str| {
            let (name, value) = l.split_once(' ')?;
            Some((name.to_string(), value.parse().ok()?))
        };
        let found: Numbers = text.lines().filter_map(pair).collect();
        assert!(!found.is_empty(), "no {name}: {text}");
        found
    }

    /// The audit and the leaks the module itself has noticed.
    fn judged(&self) -> Numbers {
        let mut audit = self.numbers("audit");
        audit.insert("leaked".into(), self.numbers("stats")["leaked"]);
        audit
    }

    /// A stress that fills memory to the brim may end with its shell killed, when nothing
    /// else is left to kill: what it did is done.
    fn stress(&self, kind: &str) {
        let command = escape(&format!("sh /tmp/stress {kind} >/dev/null 2>&1 </dev/null"));
        match self.vm.request(&format!("sh oom=-900 cmd={command}"), 5 * MINUTE) {
            Ok(_) => {}
            Err(VmError::Tool { error: ToolError::Refused { why, .. }, .. }) if why == "killed" => {
                println!("{}: {kind} was killed", self.vm.name());
            }
            Err(e) => panic!("{e}"),
        }
        if kind == "steal" {
            // No block is free: for what cannot be moved single pages are taken from movable ones.
            let tool = self.vm.tool();
            tool.start_ready("p", "pipes", "size=50331648", MINUTE).unwrap();
            tool.stop("p").unwrap();
        }
    }

    /// Puts back what a stress has taken.
    fn tidy(&self) {
        self.sh("rm -rf /tmp/s/*; echo 0 > /proc/sys/vm/nr_hugepages");
    }

    fn complaints(&self) -> String {
        self.sh("dmesg | grep -E 'BUG|WARNING|Oops|please report|refused' | head -n 5")
    }
}

/// The machine, for tests that start VMs.
fn held() -> Arena {
    Arena::beside().unwrap()
}

fn seconds() -> u64 {
    std::env::var("EBB_STRESS_SECONDS").ok().and_then(|v| v.parse().ok()).unwrap_or(20)
}

/// `make soak`: every form, on both kernels.
fn soak() -> bool {
    seconds() >= 60
}

#[test]
fn vm_the_module_loads_by_insmod_alone_and_leaves_no_trace() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |_| ());
        for round in 0..3 {
            let said = guest.insmod("");
            // What is freed while the first scan goes on is found by the next.
            let whole = |_: &Vm| {
                let audit = guest.numbers("audit");
                assert_eq!(audit["false"], 0, "{kernel}: {audit:?} {said}");
                let most = audit["set"] > 150_000 && audit["missed"] * 100 < audit["free"];
                most.then_some(())
            };
            guest.vm.wait_for("a map of what is free", Duration::from_secs(5), whole).unwrap();
            assert!(guest.insmod("").contains("File exists"));
            assert_eq!(guest.numbers("stats")["state"], RUNNING, "round {round}");
            // Nobody can switch the hooks off behind our back.
            let off = "f=/proc/sys/kernel/ftrace_enabled; echo 0 > $f; cat $f";
            assert_eq!(guest.sh(off).trim(), "1");
            let gone = guest.sh("rmmod ebb && ls /sys/module/ebb /sys/kernel/debug/ebb 2>&1");
            assert_eq!(gone.matches("No such file").count(), 2, "{gone}");
        }
        assert_eq!(guest.complaints(), "", "{kernel}");
    });
}

#[test]
fn vm_the_module_refuses_what_it_cannot_trust() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |c| c.append += " init_on_free=1");
        let said = guest.insmod("");
        assert!(said.contains("refused: init_on_free"), "{kernel}: {said}");
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
    });
    let guest = Guest::boot(Kernel::V6_12, false, |_| ());
    assert!(guest.insmod("order=11").contains("order is at most"));
    assert!(guest.insmod("fault=1").contains("unknown parameter"));
}

#[test]
fn vm_a_kernel_that_somebody_else_built_is_loaded_on_demand_only() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        let said = guest.insmod(&format!("fault={VENDOR}"));
        assert!(said.contains("refused: this kernel is not a build by Debian"), "{kernel}: {said}");
        assert!(said.contains("force_unknown=1"), "{kernel}: {said}");
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
        let said = guest.insmod(&format!("fault={VENDOR} force_unknown=1"));
        assert!(said.contains("this guest can lose data"), "{kernel}: {said}");
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
    });
}

/// Options of a kernel under which the hooks cannot be trusted.
const DISTRUSTED: [&str; 3] = ["LTO_CLANG", "CFI_CLANG", "KEXEC_JUMP"];

fn sources() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest"))
}

/// `make`, where the headers say so.
fn refused_by_make() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["scripts/basic", "include/config"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    for path in ["Makefile", "Module.symvers", "scripts/basic/fixdep"] {
        fs::write(dir.path().join(path), "").unwrap();
    }
    let check = |config: &str| {
        fs::write(dir.path().join("include/config/auto.conf"), config).unwrap();
        let mut make = Command::new("make");
        make.arg("-C").arg(sources()).arg("check-kdir");
        let out = make.arg(format!("KDIR={}", dir.path().display())).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    assert!(check("CONFIG_LTO_NONE=y\nCONFIG_KEXEC=y\n").0);
    for option in DISTRUSTED {
        let (built, said) = check(&format!("CONFIG_KEXEC=y\nCONFIG_{option}=y\n"));
        assert!(!built && said.contains(&format!("built with CONFIG_{option}")), "{said}");
    }
}

/// A module that kbuild made without our Makefile refuses when it is loaded.
#[test]
fn vm_kernels_that_cannot_be_trusted_are_refused_by_make_and_at_load() {
    let _arena = held();
    refused_by_make();
    in_pairs(&Kernel::ALL, |&kernel| {
        let image = Image::get(&Cache::from_env(), kernel).unwrap();
        let headers = image.headers.clone().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let build = dir.path().join("build");
        let modules = DISTRUSTED.map(|option| {
            let mut make = Command::new("make");
            make.arg("-s").arg("-C").arg(sources()).arg(format!("KDIR={}", headers.display()));
            make.arg(format!("BUILD={}", build.display()));
            make.arg(format!("CFLAGS_hooks.o=-DCONFIG_{option}=1"));
            assert!(make.output().unwrap().status.success(), "{kernel}: {option}");
            let kept = dir.path().join(option);
            fs::rename(build.join("ebb.ko"), &kept).unwrap();
            (format!("{option}.ko"), kept)
        });
        let guest = Guest::boot(kernel, false, |c| c.files.extend(modules));
        for option in DISTRUSTED {
            let said =
                guest.sh(&format!("insmod /{option}.ko 2>&1; dmesg | grep ebb: | tail -n 1"));
            let message = format!("refused: this kernel is built with CONFIG_{option}");
            assert!(said.contains(&message), "{kernel}: {said}");
        }
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
    });
}

#[test]
fn vm_no_false_bit_under_stress() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        stress(kernel, "rescan_ms=2000");
        if soak() {
            stress(kernel, "rescan_ms=2000 order=3");
        }
    });
}

fn stress(kernel: Kernel, arguments: &str) {
    let reporting = |c: &mut VmConfig| {
        c.balloon = Some(Balloon { reporting: true, deflate_on_oom: false });
    };
    let guest = Guest::boot(kernel, false, reporting);
    guest.insmod(arguments);
    let tool = guest.vm.tool();
    tool.request("swapon dev=/dev/zram0 size=134217728", MINUTE).unwrap();
    tool.start("v", "verify", "size=200000000 seconds=100000 threads=2").unwrap();
    // Its answer comes when /tmp/go is gone.
    let all = escape("sh /tmp/stress all >/dev/null 2>&1 </dev/null");
    tool.send(&format!("sh oom=-900 cmd={all}")).unwrap();
    let until = Instant::now() + Duration::from_secs(seconds());
    let (mut audits, mut worst) = (0, 0.0f64);
    while Instant::now() < until {
        let audit = guest.numbers("audit");
        assert_eq!(audit["false"], 0, "{kernel} {arguments}: {audit:?}");
        assert!(audit["set"] > 0, "{audit:?}");
        worst = worst.max(audit["missed"] as f64 / audit["free"].max(1) as f64);
        audits += 1;
    }
    let verify = tool.stat("v").unwrap();
    assert_eq!(verify.u64("errors"), 0, "{verify:?}");
    let said = guest.sh("rm /tmp/go; cat /tmp/offlined; sleep 5; rm -rf /tmp/s");
    tool.stop("v").unwrap();
    let stats = guest.numbers("stats");
    assert_eq!((stats["state"], stats["leaked"]), (RUNNING, 0), "{stats:?}");
    // A full pass repairs whatever was missed, once it is quiet.
    let quiet = |_: &Vm| {
        let audit = guest.numbers("audit");
        assert_eq!(audit["false"], 0, "{kernel} {arguments}: {audit:?}");
        (audit["missed"] * 1000 <= audit["free"]).then_some(audit)
    };
    let end = guest.vm.wait_for("the re-scan to repair", MINUTE, quiet).unwrap();
    println!(
        "{kernel} {arguments}: {audits} audits, worst missed {:.2} %, offlined {}, {} pages \
         checked; end {end:?}, {stats:?}",
        worst * 100.0,
        said.trim(),
        verify.u64("checks")
    );
    assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
    assert_eq!(guest.complaints(), "", "{kernel}");
}

/// What is left out, what is done then, and what the audit (with the module's
/// counters) must find.
struct Fault {
    bit: u32,
    name: &'static str,
    stress: &'static str,
    kernels: &'static [Kernel],
    found: fn(&Numbers) -> bool,
}

const ALL: &[Kernel] = &Kernel::ALL;
const NEW: &[Kernel] = &[Kernel::V6_12];

fn wrong(audit: &Numbers) -> bool {
    audit["false"] > 0
}

/// Such pages wait in per-CPU lists until the backstop finds them.
fn leaked(audit: &Numbers) -> bool {
    audit["false"] + audit["leaked"] > 0
}

fn missed(audit: &Numbers) -> bool {
    audit["missed"] * 50 > audit["free"]
}

fn fault(
    bit: u32,
    name: &'static str,
    stress: &'static str,
    kernels: &'static [Kernel],
    found: fn(&Numbers) -> bool,
) -> Fault {
    Fault { bit, name, stress, kernels, found }
}

#[test]
fn vm_every_hook_left_out_is_found_by_the_audit() {
    let _arena = held();
    let faults = [
        fault(1, "zone_locked", "compact", ALL, wrong),
        // Before 6.10 every removal fires the other one as well.
        fault(2, "extfrag", "steal", NEW, leaked),
        fault(4, "backstop", "huge", ALL, wrong),
        fault(8, "isolate", "compact", ALL, wrong),
        fault(16, "offline", "offline", ALL, wrong),
        // Debian's 6.1 has no CONFIG_MEMORY_FAILURE.
        fault(32, "takeoff", "soft", NEW, wrong),
        fault(64, "drain", "fill", ALL, missed),
        fault(128, "putback", "report", ALL, missed),
    ];
    for kernel in Kernel::ALL.into_iter().filter(|k| soak() || *k == Kernel::V6_12) {
        let here: Vec<&Fault> = faults.iter().filter(|f| f.kernels.contains(&kernel)).collect();
        let mut guests = vec![None];
        guests.extend(here.iter().map(Some));
        in_pairs(&guests, |fault| match fault {
            None => nothing_left_out(kernel, &here),
            Some(f) => {
                let audit = left_out(kernel, f);
                println!("{kernel} {} left out: {audit:?}", f.name);
                assert!((f.found)(&audit), "{kernel} {} left out: {audit:?}", f.name);
            }
        });
    }
}

fn faulty(kernel: Kernel, reporting: bool, bit: u32) -> Guest {
    let guest = Guest::boot(kernel, true, |c: &mut VmConfig| {
        c.balloon = Some(Balloon { reporting, deflate_on_oom: false });
    });
    let bits = if bit == 0 { 0 } else { bit | NO_SELF_TEST };
    guest.insmod(&format!("rescan_ms=0 fault={bits}"));
    guest
}

/// The same module with every hook in place is innocent under every stress: what
/// the faults show is theirs.
fn nothing_left_out(kernel: Kernel, faults: &[&Fault]) {
    let guest = faulty(kernel, true, 0);
    for f in faults {
        guest.stress(f.stress);
        let audit = guest.judged();
        println!("{kernel} {} in place: {audit:?}", f.name);
        assert!(!(f.found)(&audit) && !leaked(&audit), "{kernel} {} in place: {audit:?}", f.name);
        guest.tidy();
    }
}

fn left_out(kernel: Kernel, f: &Fault) -> Numbers {
    let guest = faulty(kernel, f.name == "putback", f.bit);
    for _ in 0..10 {
        guest.stress(f.stress);
        let audit = guest.judged();
        if (f.found)(&audit) {
            return audit;
        }
        guest.tidy();
    }
    guest.judged()
}

/// One page allocation that no hook sees is enough; tests build the module so that a
/// CPU makes some whenever it is neither online nor dead.
#[test]
fn vm_cpus_that_come_and_go_leave_no_false_bit() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        let said = guest.insmod(&format!("fault={DYING}"));
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
        let cpus = escape("sh /tmp/stress cpus >/dev/null 2>&1 </dev/null");
        guest.vm.tool().send(&format!("sh oom=-900 cmd={cpus}")).unwrap();
        let rounds = if soak() { 15 } else { 6 };
        for round in 0..rounds {
            for online in [0, 1] {
                let before = guest.numbers("stats")["taken_between"];
                guest.sh(&format!("echo {online} > /sys/devices/system/cpu/cpu1/online"));
                let running = |_: &Vm| (guest.numbers("stats")["state"] == RUNNING).then_some(());
                guest.vm.wait_for("the map to count again", MINUTE, running).unwrap();
                let (audit, after) = (guest.numbers("audit"), guest.numbers("stats"));
                let at = format!("{kernel}, round {round}, online {online}");
                assert_eq!(audit["false"], 0, "{at}: {audit:?}");
                assert!(audit["set"] > 50_000, "{at}: {audit:?}");
                assert!(after["taken_between"] > before, "{at}: {after:?}");
                assert_eq!(after["leaked"], 0, "{at}: {after:?}");
            }
        }
        println!("{kernel}: {rounds} rounds, {:?}", guest.numbers("stats"));
        guest.sh("rm /tmp/go; sleep 2; rm -rf /tmp/s");
        assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
        assert_eq!(guest.complaints(), "", "{kernel}");
        // What the audit says of a module that does not watch CPUs.
        guest.insmod(&format!("rescan_ms=0 fault={}", DYING | NO_CPUS));
        assert_eq!(guest.numbers("audit")["false"], 0, "{kernel}");
        guest.sh("echo 0 > /sys/devices/system/cpu/cpu1/online");
        let audit = guest.numbers("audit");
        assert!(wrong(&audit), "{kernel}: unwatched CPUs are not found: {audit:?}");
    });
}

#[test]
fn vm_the_self_test_finds_a_hook_left_out_at_load() {
    let _arena = held();
    let hooks = [
        (1, "mm_page_alloc_zone_locked", ALL),
        (4, "mm_page_alloc", ALL),
        (8, "__isolate_free_page", ALL),
        (2, "mm_page_alloc_extfrag", NEW),
    ];
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        for (bit, name, _) in hooks.iter().filter(|h| h.2.contains(&kernel)) {
            let said = guest.insmod(&format!("fault={bit}"));
            let message = format!("refused: self-test of the hooks: {name} was not seen");
            assert!(said.contains(&message), "{kernel}: {said}");
            assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
        }
        for _ in 0..5 {
            let said = guest.insmod("");
            assert!(!said.contains("no free block"), "{kernel}: {said}");
            assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
            assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
        }
    });
}

/// After an error of its own ftrace removes nothing; what it still calls must be there.
#[test]
fn vm_hooks_that_cannot_be_removed_keep_the_module() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        const LOADED: &str = "cat /sys/module/ebb/initstate";
        const SAID: &str = "dmesg | grep -c 'its hooks cannot be removed: the module stays'";
        let guest = Guest::boot(kernel, true, |_| ());
        // A load that fails: refused by the self-test, and with a hook that stays.
        guest.insmod(&format!("fault={}", STUCK | 1));
        assert_eq!((guest.sh(LOADED).trim(), guest.sh(SAID).trim()), ("live", "1"), "{kernel}");
        guest.stress("compact");
        let said = guest.sh("rmmod ebb 2>&1");
        assert!(said.contains("temporarily unavailable"), "{kernel}: {said}");
        assert_eq!(guest.sh(LOADED).trim(), "live");

        let guest = Guest::boot(kernel, true, |_| ());
        guest.insmod(&format!("fault={STUCK}"));
        guest.sh("rmmod ebb >/dev/null 2>&1 </dev/null & sleep 5");
        assert_eq!((guest.sh(LOADED).trim(), guest.sh(SAID).trim()), ("going", "1"), "{kernel}");
        guest.stress("compact");
        assert_eq!(guest.sh("dmesg | grep -E 'BUG|WARNING|Oops' | head -n 5"), "", "{kernel}");
    });
}

/// The host's side of the header: guest RAM is a file, guest-physical addresses
/// below 3 GiB are offsets in it.
struct Ram(File);

impl Ram {
    fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn u64(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    fn u32(&self, at: u64) -> u64 {
        u32::from_le_bytes(self.bytes(at)).into()
    }

    fn headers(&self) -> Vec<u64> {
        const MAGIC: [u8; 16] = [
            0xeb, 0xb1, 0x66, 0x72, 0x65, 0x65, 0x6d, 0x61, 0x70, 0x9d, 0x1c, 0x40, 0xd3, 0x7a,
            0x05, 0xf4,
        ];
        (0..4096).map(|p| p * 4096).filter(|p| self.bytes(*p) == MAGIC).collect()
    }

    fn checksum(&self, header: u64) -> u64 {
        let mut bytes: [u8; 128] = self.bytes(header);
        bytes[32..40].fill(0);
        let step = |sum: u64, b: &u8| (sum ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// Address and first pfn of every map page.
    fn map(&self, header: u64) -> Vec<(u64, u64)> {
        let mut pages = Vec::new();
        let mut list = self.u64(header + 264);
        while list != 0 {
            for i in 0..self.u32(list + 8).min(255) {
                let extent = list + 16 + i * 16;
                let (gpa, first) = (self.u64(extent), self.u32(extent + 8));
                let each = |k| (gpa + k * 4096, (first + k) * 32768);
                pages.extend((0..self.u32(extent + 12)).map(each));
            }
            list = self.u64(list);
        }
        pages
    }

    fn set_bits(&self, map: &[(u64, u64)]) -> u64 {
        let ones = |(at, _): &(u64, u64)| -> u64 {
            self.bytes::<4096>(*at).iter().map(|b| u64::from(b.count_ones())).sum()
        };
        map.iter().map(ones).sum()
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn seen_from_outside(kernel: Kernel, faults: bool) -> (Guest, Ram, tempfile::NamedTempFile) {
    let shm = Path::new("/dev/shm");
    let dir = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
    let file = tempfile::NamedTempFile::new_in(dir).unwrap();
    let guest = Guest::boot(kernel, faults, |c| {
        c.backing = Backing::File(file.path().into());
        c.memory = Bytes::mib(512);
        c.append.clear();
    });
    let ram = Ram(File::options().read(true).write(true).open(file.path()).unwrap());
    (guest, ram, file)
}

#[test]
fn vm_the_host_finds_believes_and_loses_the_header() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let (guest, ram, _file) = seen_from_outside(kernel, false);
        assert!(ram.headers().is_empty());
        guest.insmod("");
        let found = ram.headers();
        let [h] = found[..] else { panic!("{kernel}: {found:?}") };
        assert_eq!((ram.u32(h + 16), ram.u64(h + 24)), (1, h));
        assert_eq!(ram.u64(h + 32), ram.checksum(h));
        assert_eq!(ram.u32(h + 128), RUNNING);
        let key = ram.u64(h + 40);

        // It beats.
        let beat = ram.u64(h + 192);
        guest
            .vm
            .wait_for("beats", MINUTE, |_| (ram.u64(h + 192) > beat + 3).then_some(()))
            .unwrap();
        // Not more seldom than it says, as far as this machine's load allows to tell.
        let tick = Duration::from_millis(ram.u32(h + 136));
        let (begun, mut last) = (Instant::now(), (Instant::now(), ram.u64(h + 192)));
        let mut longest = Duration::ZERO;
        while begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(2));
            longest = longest.max(last.0.elapsed());
            if ram.u64(h + 192) != last.1 {
                last = (Instant::now(), ram.u64(h + 192));
            }
        }
        println!("{kernel}: idle for up to {longest:?} between beats, tick_ms {tick:?}");
        assert!(tick <= Duration::from_secs(1) && longest < tick * 3, "{kernel}: {longest:?}");
        let right =
            |_: &Vm| (ram.u64(h + 200) == mix(ram.u64(h + 192).wrapping_add(key))).then_some(());
        guest.vm.wait_for("a right beat", MINUTE, right).unwrap();

        // It answers, and does so faster once it is asked often; not when paused.
        let mut slowest = Duration::ZERO;
        for challenge in 1..=10u64 {
            let challenge = challenge.wrapping_mul(0x1234_5678_9abc_def1);
            let begun = Instant::now();
            ram.0.write_all_at(&challenge.to_le_bytes(), h + 208).unwrap();
            let answer = mix(!challenge ^ key);
            guest
                .vm
                .wait_for("an answer", MINUTE, |_| (ram.u64(h + 216) == answer).then_some(()))
                .unwrap();
            if challenge > 0x1234_5678_9abc_def1 {
                slowest = slowest.max(begun.elapsed());
            }
        }
        println!("{kernel}: slowest answer but for the first {slowest:?}");
        guest.vm.pause().unwrap();
        let (beat, answer) = (ram.u64(h + 192), ram.u64(h + 216));
        ram.0.write_all_at(&7u64.to_le_bytes(), h + 208).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!((ram.u64(h + 192), ram.u64(h + 216)), (beat, answer));
        guest.vm.resume().unwrap();

        // Map and facts say the same as the guest.
        let map = ram.map(h);
        assert_eq!((map.len() as u64, ram.u32(h + 276)), (4, 4));
        let (audit, bits) = (guest.numbers("audit"), ram.set_bits(&map));
        assert!(bits.abs_diff(audit["set"]) < 2000, "{bits} {audit:?}");
        let meminfo = guest.vm.request("meminfo", MINUTE).unwrap();
        let (total, free) = (ram.u64(h + 512 + 16) * 4096, ram.u64(h + 512 + 24) * 4096);
        assert_eq!(total, meminfo.u64("MemTotal"));
        assert!(free.abs_diff(meminfo.u64("MemFree")) < 16 << 20, "{free} {meminfo:?}");
        assert_eq!(ram.u32(h + 512) % 2, 0);

        // It follows what the guest does.
        let tool = guest.vm.tool();
        tool.start_ready("h", "hold", "size=104857600", MINUTE).unwrap();
        let full = ram.set_bits(&map);
        assert!(bits - full > 24_000, "{bits} {full}");
        tool.stop("h").unwrap();
        let begun = Instant::now();
        let back = |_: &Vm| (ram.set_bits(&map) > full + 24_000).then_some(());
        guest.vm.wait_for("the bits to come back", MINUTE, back).unwrap();
        println!("{kernel}: 100 MiB freed are in the map after {:?}", begun.elapsed());

        guest.sh("rmmod ebb");
        assert!(ram.headers().is_empty());
        assert_eq!(ram.bytes::<776>(h), [0; 776]);
    });
}

/// Timer interrupts of all vCPUs in a second, over `seconds` in which the guest does nothing.
fn woken(guest: &Guest, seconds: u32) -> f64 {
    const COUNT: &str = "$(awk '/LOC:/ { print $2 + $3 }' /proc/interrupts)";
    let said = guest.sh(&format!("a={COUNT}; sleep {seconds}; echo $(({COUNT} - a))"));
    said.trim().parse::<f64>().unwrap() / f64::from(seconds)
}

#[test]
fn vm_an_idle_guest_is_hardly_woken() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |_| ());
        guest.sh("sleep 10");
        let without = woken(&guest, 30);
        guest.insmod("");
        guest.sh("sleep 5");
        let with = woken(&guest, 30);
        println!("{kernel}: {without:.1} timer interrupts a second, with the module {with:.1}");
        assert!(with < without + 5.0, "{kernel}: {without} without the module, {with} with it");
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}");
    });
}

#[test]
fn vm_what_a_dying_guest_leaves_in_ram_is_marked_as_dead() {
    let _arena = held();
    for kernel in Kernel::ALL.into_iter().filter(|k| soak() || *k == Kernel::V6_12) {
        // One of them while the module's thread waits for memory with its lock held.
        let ends = [("poweroff", 2, 0), ("reboot", 2, 0), ("sysrq c=c", 3, 0), ("reboot", 2, HELD)];
        in_pairs(&ends, |&(command, reason, fault)| {
            let (guest, ram, _file) = seen_from_outside(kernel, fault != 0);
            guest.insmod(&if fault == 0 { String::new() } else { format!("fault={fault}") });
            // Firmware would write over what the guest left.
            let pause = serde_json::json!({"reboot": "shutdown", "shutdown": "pause"});
            guest.vm.qmp("set-action", Some(pause)).unwrap();
            let h = ram.headers()[0];
            let map = ram.map(h);
            assert!(ram.set_bits(&map) > 10_000);
            guest.vm.request(command, MINUTE).unwrap();
            let until = Instant::now() + MINUTE;
            while ram.u32(h + 128) == RUNNING && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            // An atomic notifier clears a moment after the word.
            std::thread::sleep(Duration::from_millis(300));
            let end = (ram.u32(h + 128), ram.u32(h + 132), ram.set_bits(&map));
            assert_eq!(end, (STOPPED, reason, 0), "{kernel} {command}");
        });
    }
}
