//! The units as they ship, run by a real systemd with a real VM: however the daemon ends,
//! the guest gets its memory back.
//!
//! Each test ends with the balloon's size as QEMU tells the lab.

use std::time::Duration;

use ebb_core::units::Bytes;
use ebb_lab::arena::{Arena, ArenaConfig};
use ebb_lab::systemd::Systemd;
use ebb_lab::vm::{Balloon, Vm, VmConfig};

const MINUTE: Duration = Duration::from_secs(60);
const RAM: Bytes = Bytes::mib(512);
/// What is left to a guest whose idle memory was taken, at most.
const SQUEEZED: Bytes = Bytes::mib(300);

/// A systemd, and a VM beside it of which Ebb has taken memory.
struct Host {
    vm: Vm,
    systemd: Systemd,
    _arena: Arena,
}

impl Host {
    fn start() -> Host {
        let arena = Arena::enter(&ArenaConfig::default()).unwrap();
        let systemd = Systemd::start(&arena, "").unwrap();
        let mut config = VmConfig::new("guest", RAM);
        config.balloon = Some(Balloon { reporting: false, deflate_on_oom: true });
        config.within = systemd.within();
        config.cgroup = Some(systemd.machine_slice().unwrap());
        let vm = Vm::start(&config).unwrap();
        let host = Host { vm, systemd, _arena: arena };
        host.systemctl(&["start", "ebb"]);
        host
    }

    fn squeezed() -> Host {
        let host = Host::start();
        host.squeeze();
        host
    }

    /// A wish is for one tick, and the guest's statistics may just then be too old.
    fn squeeze(&self) {
        self.systemd
            .wait("a squeezed guest", |s| {
                s.run(&["ebb", "reclaim", "guest"]);
                self.vm.balloon().unwrap() <= SQUEEZED
            })
            .unwrap();
    }

    fn systemctl(&self, args: &[&str]) {
        let (code, out, err) = self.systemd.systemctl(args);
        assert_eq!(code, 0, "systemctl {args:?}: {out}{err}\n{}", self.systemd.log());
    }

    fn is(&self, unit: &str, property: &str, value: &str) -> bool {
        self.systemd.property(unit, property) == value
    }

    fn wait_is(&self, unit: &str, property: &str, value: &str) {
        let what = format!("{unit}: {property}={value}");
        self.systemd.wait(&what, |_| self.is(unit, property, value)).unwrap();
    }

    fn main_pid(&self) -> String {
        self.systemd.property("ebb", "MainPID")
    }

    fn whole(&self) {
        let all = |vm: &Vm| (vm.balloon().unwrap() == RAM).then_some(());
        if let Err(e) = self.vm.wait_for("all its memory", MINUTE, all) {
            panic!("{e}\n{}", self.systemd.log());
        }
    }
}

#[test]
fn vm_a_daemon_that_cannot_be_started_again_leaves_no_balloon_inflated() {
    let host = Host::squeezed();
    let socket = host.systemd.path("/run/ebb/ebb.sock");
    std::fs::remove_file(&socket).unwrap();
    std::fs::create_dir(&socket).unwrap();
    host.systemctl(&["kill", "--signal=KILL", "ebb"]);
    host.wait_is("ebb", "ActiveState", "failed");
    host.whole();
    host.wait_is("ebb-release", "ActiveState", "inactive");
    assert!(host.is("ebb-release", "Result", "success"), "{}", host.systemd.log());
}
