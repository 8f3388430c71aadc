//! ebb.ko in real guests: it loads (`loading`), tells the truth under stress (`stress`), is
//! found out when a hook is left out (`faults`), tells the host what it may rely on (`host`),
//! and goes without a trace.
//!
//! Needs `cargo lab setup --headers`. `EBB_STRESS_SECONDS` sets how long the
//! guests are stressed (20 by default). The module and a stress script travel on
//! a disk, as a tar archive; guests have a ZONE_MOVABLE, so that memory can go
//! offline.
//!
//! This file has the guest with the module, and what all tests ask of it.

mod faults;
mod host;
mod loading;
mod stress;

use std::collections::BTreeMap;

use ebb_lab::guest::{ToolError, escape};
use ebb_lab::vm::VmError;

use super::*;

const RUNNING: u64 = 2;
const STOPPED: u64 = 4;

/// Bits of `enum ebb_fault` besides those of single hooks.
const NO_SELF_TEST: u32 = 1 << 10;
const NO_CPUS: u32 = 1 << 11;
const DYING: u32 = 1 << 12;
const STUCK: u32 = 1 << 13;
const VENDOR: u32 = 1 << 14;
const HELD: u32 = 1 << 15;

const STRESS: &str = include_str!("module/stress.sh");

/// A guest with the module at /tmp/ebb.ko.
struct Guest {
    vm: Vm,
    _disk: tempfile::NamedTempFile,
}

type Numbers = BTreeMap<String, u64>;

impl Guest {
    fn boot(kernel: Kernel, faults: bool, change: impl FnOnce(&mut VmConfig)) -> Guest {
        let image = Image::get(kernel).unwrap();
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
                println!("{}: {kind} was killed", self.vm.name);
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
