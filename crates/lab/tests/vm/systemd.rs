//! The units as they ship, run by a real systemd beside a real VM: however the daemon ends,
//! the guest gets its memory back, and the units' sandbox keeps nothing from the daemon.
//!
//! What a guest has is asked of QEMU by the lab, on a socket of its own.

use ebb_host::daemon_client;
use ebb_lab::systemd::Systemd;
use ebb_lab::vm::Accel;
use rustix::process::{Pid, kill_process};

use super::*;

const RAM: Bytes = Bytes::mib(512);
/// What is left to a guest whose idle memory was taken, at most.
const SQUEEZED: Bytes = Bytes::mib(448);

/// A systemd, and a VM that its `ebb` sees.
struct Host {
    vm: Vm,
    systemd: Systemd,
    _arena: Arena,
}

impl Host {
    /// With the daemon running, and some of the guest's memory taken.
    fn squeezed() -> Host {
        let arena = Arena::beside(Beside::AnyTest).unwrap();
        let systemd = Systemd::start(&arena, "").unwrap();
        let vm = Vm::start(&config("guest", &systemd)).unwrap();
        let host = Host { vm, systemd, _arena: arena };
        host.systemctl(&["start", "ebb"]);
        host.squeeze();
        host
    }

    /// Has the guest hold and free memory, and the daemon take it: asked again, as a request is
    /// for one tick, and the guest's statistics may then be too old.
    fn squeeze(&self) {
        touch_and_free(&self.vm, Bytes::mib(256));
        let squeezed = |s: &Systemd| {
            s.run(&["ebb", "reclaim", "guest"]);
            self.size() <= SQUEEZED
        };
        self.systemd.wait("a guest without its idle memory", squeezed).unwrap();
    }

    fn size(&self) -> Bytes {
        self.vm.balloon().unwrap()
    }

    fn systemctl(&self, args: &[&str]) {
        let (code, out, err) = self.systemd.systemctl(args);
        assert_eq!(code, 0, "systemctl {args:?}: {out}{err}\n{}", self.systemd.log());
    }

    fn is(&self, unit: &str, property: &str) -> String {
        self.systemd.property(unit, property)
    }

    fn wait_is(&self, unit: &str, property: &str, value: &str) {
        let what = format!("{unit}: {property}={value}");
        self.systemd.wait(&what, |_| self.is(unit, property) == value).unwrap();
    }

    /// The VM's own pid is `nsenter`'s.
    fn signal_vm(&self, signal: Signal) {
        let procs = self.systemd.cgroup().join("machine.slice/cgroup.procs");
        for pid in std::fs::read_to_string(procs).unwrap().lines() {
            let _ = kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), signal);
        }
    }

    fn whole(&self) {
        let all = |_: &Systemd| self.size() == RAM;
        self.systemd.wait("all its memory", all).unwrap();
    }

    /// `ebb-release.service` gave everything back, and has ended.
    fn released(&self) {
        self.whole();
        self.wait_is("ebb-release", "ActiveState", "inactive");
        assert_eq!(self.is("ebb-release", "Result"), "success", "{}", self.systemd.log());
    }
}

fn config(name: &str, systemd: &Systemd) -> VmConfig {
    let mut config = stock(name, RAM);
    config.within = systemd.within();
    config.cgroup = Some(systemd.machine_slice().unwrap());
    config
}

#[test]
fn vm_a_daemon_that_cannot_be_started_again_leaves_no_balloon_inflated() {
    let host = Host::squeezed();
    let (socket, file) = ("/run/ebb/ebb.sock", "/etc/ebb/ebb.toml");
    let [socket, file] = [socket, file].map(|p| host.systemd.path(p));
    // Another program serves its socket.
    std::fs::remove_file(&socket).unwrap();
    let taken = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    host.systemctl(&["kill", "--signal=KILL", "ebb"]);
    host.wait_is("ebb", "ActiveState", "failed");
    host.released();

    // Its configuration cannot be read any more.
    drop(taken);
    std::fs::remove_file(&socket).unwrap();
    host.systemctl(&["reset-failed"]);
    host.systemctl(&["start", "ebb"]);
    host.squeeze();
    std::fs::write(&file, "[daemon]\ntikc = \"1s\"\n").unwrap();
    host.systemctl(&["kill", "--signal=KILL", "ebb"]);
    host.wait_is("ebb", "ActiveState", "failed");
    host.released();
    assert!(host.systemd.log().contains("ebb-release.service: /etc/ebb/ebb.toml:2"));
}

#[test]
fn vm_a_daemon_that_is_killed_or_started_anew_owns_what_it_took_and_one_that_stops_gives_back() {
    let host = Host::squeezed();
    host.systemctl(&["kill", "--signal=KILL", "ebb"]);
    host.wait_is("ebb", "NRestarts", "1");
    host.wait_is("ebb", "ActiveState", "active");
    assert!(host.systemd.log().contains("owned again"), "{}", host.systemd.log());
    assert!(host.size() <= SQUEEZED, "a crash gives nothing back");

    // An upgrade by package managers that restart: all back, and taken anew.
    host.systemctl(&["restart", "ebb"]);
    host.whole();
    host.squeeze();

    host.systemctl(&["stop", "ebb"]);
    host.whole();
    let state = std::fs::read_to_string(host.systemd.path("/run/ebb/state.json")).unwrap();
    assert!(!state.contains("guest"), "{state}");
    assert_eq!(host.is("ebb", "Result"), "success", "{}", host.systemd.log());

    // Stopped after a crash, before the next start.
    host.systemctl(&["start", "ebb"]);
    host.squeeze();
    host.systemctl(&["kill", "--signal=KILL", "ebb"]);
    host.wait_is("ebb", "SubState", "auto-restart");
    host.systemctl(&["stop", "ebb"]);
    host.released();
}

#[test]
fn vm_a_reload_keeps_process_and_balloons_and_one_with_a_bad_configuration_fails() {
    let host = Host::squeezed();
    let pid = host.is("ebb", "MainPID");
    let file = host.systemd.path("/etc/ebb/ebb.toml");
    let anew = || host.systemd.log().matches("watches 1 VMs").count() - 1;
    std::fs::write(&file, "[daemon]\ntikc = \"2s\"\n").unwrap();
    assert_ne!(host.systemd.systemctl(&["reload", "ebb"]).0, 0);
    assert!(host.systemd.log().contains("tikc"), "{}", host.systemd.log());
    // Without the file VMs that it excludes would be served.
    std::fs::remove_file(&file).unwrap();
    host.systemctl(&["kill", "--signal=HUP", "ebb"]);
    let gone = "cannot read /etc/ebb/ebb.toml";
    host.systemd.wait("the missing file", |s| s.log().contains(gone)).unwrap();
    std::fs::write(&file, "[vm.guest]\nmin = \"200MiB\"\n").unwrap();
    assert_eq!(anew(), 0);
    host.systemctl(&["reload", "ebb"]);
    host.systemd.wait("the daemon to begin anew", |_| anew() == 1).unwrap();
    host.wait_is("ebb", "ActiveState", "active");
    assert_eq!((&host.is("ebb", "MainPID"), host.is("ebb", "NRestarts")), (&pid, "0".into()));
    let socket = host.systemd.path("/run/ebb/ebb.sock");
    let state = || daemon_client::get_json::<Value>(&socket, "/v1/state").unwrap_or_default();
    let floor = |_: &Systemd| state()["vms"][0]["floor"] == json!(200u64 << 20);
    host.systemd.wait("the new floor", floor).unwrap();
    assert!(host.size() <= SQUEEZED, "a reload gives nothing back");
    // One upon another, at any moment of the one before.
    for _ in 0..20 {
        host.systemctl(&["kill", "--signal=HUP", "ebb"]);
    }
    let quiet = |_: &Systemd| host.is("ebb", "ActiveState") == "active";
    host.systemd.wait("the daemon to have begun anew", quiet).unwrap();
    assert_eq!((&host.is("ebb", "MainPID"), host.is("ebb", "NRestarts")), (&pid, "0".into()));
    assert!(host.size() <= SQUEEZED, "nor do many");
    // It still answers, tells of its ticks, and stops as ever.
    let told = || host.is("ebb", "WatchdogTimestampMonotonic");
    let before = told();
    host.systemd.wait("a tick that is told of", |_| told() != before).unwrap();
    assert_eq!(host.is("ebb", "WatchdogUSec"), "30s");
    host.squeeze();
    host.systemctl(&["stop", "ebb"]);
    host.whole();
}

/// The daemon has a few seconds to stop in, `ebb-release` a minute: a QEMU that does not answer
/// gives back what it can then.
#[test]
fn vm_what_a_stop_could_not_give_back_is_given_back_after_it() {
    let host = Host::squeezed();
    host.signal_vm(Signal::STOP);
    host.systemctl(&["stop", "ebb"]);
    assert_eq!(host.is("ebb", "ExecMainStatus"), "2", "{}", host.systemd.log());
    host.wait_is("ebb-release", "ActiveState", "activating");
    host.signal_vm(Signal::CONT);
    host.released();

    // The next daemon is not kept waiting for what the one before owes: it owns it. Not even where
    // `ebb-guard` asks for `ebb-release` after the start was asked for.
    let drop_in = host.systemd.path("/run/units/ebb-guard.service.d");
    std::fs::create_dir(&drop_in).unwrap();
    let late = host.systemd.path("/run/units/ebb-guard.service");
    let late = std::fs::read_to_string(late).unwrap();
    let asks = late.lines().find(|l| l.starts_with("ExecStop=")).unwrap();
    let late = format!("[Service]\nExecStop=\nExecStop=sleep 2\n{asks}\n");
    std::fs::write(drop_in.join("late.conf"), late).unwrap();
    host.systemctl(&["daemon-reload"]);
    host.systemctl(&["start", "ebb"]);
    host.squeeze();
    host.signal_vm(Signal::STOP);
    host.systemctl(&["stop", "ebb"]);
    host.wait_is("ebb-release", "ActiveState", "activating");
    let run = || host.is("ebb-release", "ExecMainStartTimestampMonotonic");
    let before = run();
    host.systemctl(&["start", "ebb"]);
    host.wait_is("ebb-release", "ActiveState", "inactive");
    assert_eq!(run(), before, "not a second time");
    host.signal_vm(Signal::CONT);
    assert!(host.systemd.log().contains("owned again"), "{}", host.systemd.log());

    // A daemon that takes longer than it may is killed, and what it owes is given back as well.
    let drop_in = host.systemd.path("/run/units/ebb.service.d");
    std::fs::create_dir(&drop_in).unwrap();
    std::fs::write(drop_in.join("stop.conf"), "[Service]\nTimeoutStopSec=100ms\n").unwrap();
    host.systemctl(&["daemon-reload"]);
    host.squeeze();
    host.signal_vm(Signal::STOP);
    host.systemctl(&["stop", "ebb"]);
    host.wait_is("ebb-release", "ActiveState", "activating");
    host.signal_vm(Signal::CONT);
    assert_eq!(host.is("ebb", "Result"), "timeout", "{}", host.systemd.log());
    host.released();
}

/// All that the daemon does to others: balloons, paging out and splitting huge pages, reading
/// VMs' memory, KSM's settings, priorities, the descriptor that an unprivileged QEMU is handed.
#[test]
fn vm_the_units_sandbox_keeps_nothing_from_the_daemon_that_it_needs() {
    let arena = Arena::beside(Beside::KsmIsMine).unwrap();
    // The daemon steers it, and it is put back whatever comes.
    arena.set(Path::new("/sys/kernel/mm/ksm/run"), "0").unwrap();
    let config_file = format!("[host]\nusers = [\"nobody\"]\n{MERGING}scan = \"2s\"\n");
    let systemd = Systemd::start(&arena, &config_file).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let library = agent_for_all(dir.path());
    let image = Image::get(Kernel::V6_1).unwrap();
    let mut with_agent = config("agent", &systemd);
    let mut guest = config("guest", &systemd);
    (with_agent.mergeable, guest.mergeable) = (true, true);
    with_agent.files = vec![("ebb.ko".into(), guest_stack::module(&image, false).unwrap())];
    (with_agent.user, with_agent.accel) = (Some(NOBODY), Some(Accel::Tcg));
    let plugin = format!("file={},socket={}/agent", library.display(), dir.path().display());
    with_agent.args = ["-plugin", &plugin].map(String::from).to_vec();
    let vms = guest_stack::boot(&[with_agent, guest]).unwrap();
    systemd.systemctl(&["start", "ebb"]);
    let socket = systemd.path("/run/ebb/ebb.sock");
    let state = || daemon_client::get_json::<Value>(&socket, "/v1/state").unwrap();
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    let seen = |what: &str, seen: &dyn Fn(&Value) -> bool| {
        if let Err(e) = systemd.wait(what, |_| seen(&state())) {
            panic!("{e}\n{:#}", state());
        }
    };
    let done = |v: &Value| number(&v["merge"]["stat"]["merging_pages"]) > 1000;
    seen("merged pages", &|s| s["vms"].as_array().unwrap().iter().all(done));
    let scan = &state()["host"]["merge"]["scan"];
    let (read, by_agents) = (number(&scan["read"]), number(&scan["by_agents"]));
    assert!(by_agents > 1 << 20 && read > by_agents + (1 << 20), "from within and outside: {scan}");
    vms.iter().for_each(|vm| touch_and_free(vm, Bytes::mib(256)));
    let asked = |vm: &str| systemd.run(&["ebb", "reclaim", vm]);
    seen("recycled pages", &|s| {
        asked("agent");
        recycled(&s["vms"][0]) > 64 << 20
    });
    seen("split huge pages", &|s| {
        asked("guest");
        vms[1].balloon().unwrap() <= SQUEEZED
            && number(&s["vms"][1]["partial_thp"]["freed"]) > 1 << 20
    });
    let (state, log) = (state(), systemd.log());
    for vm in state["vms"].as_array().unwrap() {
        assert!(number(&vm["vmm"]) > 16 << 20, "what QEMU itself holds is counted: {vm:#}");
    }
    assert_eq!(state["problems"].as_array().unwrap().len(), 0, "{state:#}");
    assert!(!log.contains("denied") && !log.contains("not permitted"), "{log}");
    assert_eq!(systemd.systemctl(&["stop", "ebb"]).0, 0);
    systemd.wait("all its memory", |_| vms[1].balloon().unwrap() == RAM).unwrap();
    assert_eq!(systemd.property("ebb", "Result"), "success", "{}", systemd.log());
}
