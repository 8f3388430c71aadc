//! Against a real QEMU without a guest: `qemu-system-x86_64` must be installed.
//! Each test starts its own and ends it, also when it fails, and its host sees
//! no other: a tree of links to the one process stands for `/proc`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_core::config::{Config, SocketUse};
use ebb_core::model::{Model, Standing};
use ebb_core::sample::{Claim, Link, Problem, RunState, Sample, VmEvent, VmId, VmSample};
use ebb_core::state::Memory;
use ebb_core::units::Bytes;
use ebb_host::linux::{ActError, BalloonOrder, LinuxHost, Options};
use ebb_host::probe::cgroup::{Version, read_hierarchy, read_process_cgroup};
use ebb_host::qmp::{Client, QmpError};
use ebb_host::qmp_balloon;
use ebb_host::root::Root;
use serde_json::Value;

const LONG: Duration = Duration::from_secs(20);

struct Qemu {
    child: Child,
    socket: PathBuf,
    name: String,
    root: Root,
    _dir: tempfile::TempDir,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tree of links to this machine, with one process.
fn links(dir: &Path, pid: u32) -> Root {
    let root = Root::at(dir.join("root"));
    std::fs::create_dir_all(root.path("/proc")).unwrap();
    for file in ["meminfo", "vmstat", "swaps", "pressure", "self", &pid.to_string()] {
        symlink(format!("/proc/{file}"), root.path(format!("/proc/{file}"))).unwrap();
    }
    symlink("/sys", root.path("/sys")).unwrap();
    root
}

/// A paused QEMU with 64 MiB; `extra` options come last.
fn qemu(name: &str, extra: &[&str]) -> Qemu {
    let dir = tempfile::tempdir().unwrap();
    let name = format!("ebb-test-{name}-{}", std::process::id());
    let file = name.replace("ebb-", "");
    let socket = dir.path().join(&file);
    let child = Command::new("qemu-system-x86_64")
        .args("-accel tcg -display none -nodefaults -S -m 64 -name".split(' '))
        .arg(format!("guest={name},debug-threads=on"))
        .args(["-device", "virtio-balloon-pci,id=balloon0,free-page-reporting=on"])
        .args(["-uuid", "11111111-2222-3333-4444-555555555555"])
        .args(["-qmp", &format!("unix:{file},server=on,wait=off")])
        .args(extra)
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .spawn()
        .expect("qemu-system-x86_64 must be installed for the vm_ tests");
    let until = Instant::now() + LONG;
    while !socket.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(socket.exists(), "QEMU did not open its QMP socket");
    let root = links(dir.path(), child.id());
    Qemu { child, socket, name, root, _dir: dir }
}

impl Qemu {
    fn options(&self) -> Options {
        let deadline = Duration::from_secs(2);
        let config = Config { sockets: SocketUse::Any, ..Config::default() };
        // Without a trigger: pressure of other tests' doing would wake us.
        let psi_trigger_us = None;
        Options { root: self.root.clone(), deadline, psi_trigger_us, config, ..Options::default() }
    }

    fn host(&self) -> LinuxHost {
        LinuxHost::new(self.options()).unwrap()
    }
}

fn set(host: &mut LinuxHost, vm: VmId, to: Bytes) -> Result<(), ActError> {
    let order = BalloonOrder { vm, to, gives: false };
    host.set_balloons(&[order], Duration::from_secs(2)).remove(0)
}

/// Samples until the VM satisfies `good`.
fn sample_until(host: &mut LinuxHost, pid: u32, good: impl Fn(&VmSample) -> bool) -> VmSample {
    let until = Instant::now() + LONG;
    loop {
        let sample = host.sample();
        let found = sample.vms.iter().find(|v| v.id.pid == pid);
        match found {
            Some(v) if good(v) => return v.clone(),
            _ if Instant::now() > until => panic!("never came: {found:?} {:?}", sample.problems),
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Connects to a socket that QEMU may not have opened yet, or opened and not listened at.
fn connect(path: &Path) -> Client {
    let until = Instant::now() + LONG;
    loop {
        let mut client = Client::new(path);
        match client.execute("query-status", None, LONG) {
            Ok(_) => return client,
            Err(e) => assert!(Instant::now() < until, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How often QEMU asks its guest.
fn interval(socket: &Path) -> Value {
    let get = qmp_balloon::get("/machine/peripheral/balloon0", qmp_balloon::INTERVAL);
    connect(socket).execute("qom-get", Some(get), LONG).unwrap()
}

#[test]
fn vm_qmp_commands_events_and_a_second_client() {
    let vm = qemu("qmp", &[]);
    let mut client = connect(&vm.socket);
    assert_eq!(client.peer_pid(), Some(vm.child.id()));
    let status = client.execute("query-status", None, LONG).unwrap();
    assert_eq!(status["status"], "prelaunch");
    let error = client.execute("no-such", None, LONG).unwrap_err();
    assert!(matches!(error, QmpError::Command { .. }), "{error}");
    let soon = Duration::from_millis(100);
    let second = Client::new(&vm.socket).execute("query-status", None, soon).unwrap_err();
    assert!(second.to_string().contains("another client is served"), "{second}");
    client.execute("cont", None, LONG).unwrap();
    let until = Instant::now() + LONG;
    while !client.protocol.any_event(|e| e.name == "RESUME") {
        assert!(Instant::now() < until, "no RESUME");
        client.pump();
        std::thread::sleep(Duration::from_millis(5));
    }
    client.execute("query-qmp-schema", None, LONG).unwrap();
}

#[test]
fn vm_pretty_qmp_is_understood() {
    let vm = qemu("pretty", &["-qmp-pretty", "unix:p.sock,server=on,wait=off"]);
    let mut client = connect(&vm.socket.with_file_name("p.sock"));
    assert!(client.execute("query-version", None, LONG).unwrap()["qemu"].is_object());
}

#[test]
fn vm_a_vm_that_claims_the_section_of_another_is_left_alone() {
    let vm = qemu("claim", &[]);
    let root = Root::default();
    let version = read_hierarchy(&root).unwrap().map_or(Version::V2, |h| h.version);
    let cgroup = read_process_cgroup(&root, version, vm.child.id()).unwrap().unwrap();
    let uid = rustix::process::geteuid().as_raw();
    for (says, is) in [
        ("", Ok(Claim::Open)),
        ("uuid = \"11111111-2222-3333-4444-555555555555\"", Ok(Claim::Open)),
        (&format!("user = {uid}"), Ok(Claim::Proven)),
        (&format!("cgroup = \"{cgroup}\""), Ok(Claim::Proven)),
        (&format!("user = {}", uid + 1), Err("it runs as uid")),
        ("cgroup = \"/nowhere\"", Err("not below /nowhere")),
        ("uuid = \"21111111-2222-3333-4444-555555555555\"", Err("its uuid is 1")),
    ] {
        let text = format!("[host]\nsockets = \"any\"\n[vm.{}]\n{says}\n", vm.name);
        let config = Config::parse("f", &text).unwrap();
        let mut host = LinuxHost::new(Options { config: config.clone(), ..vm.options() }).unwrap();
        let seen = sample_until(&mut host, vm.child.id(), |v| {
            v.balloon.is_some() || matches!(v.link, Link::Down(_))
        });
        let sample = host.sample();
        let model = Model::new(&config, &sample, &Memory::default());
        match is {
            Ok(claim) => assert_eq!((seen.claim, model.vms[0].managed), (claim, true), "{says}"),
            Err(why) => {
                let Standing::Off(told) = &model.vms[0].standing else {
                    panic!("{says}: {seen:?}")
                };
                assert!(told.contains(why) && told.contains("it calls itself"), "{told}");
                assert!(!model.vms[0].managed && seen.balloon.is_none(), "not connected to");
            }
        }
    }
}

#[test]
fn vm_a_sample_tells_what_qemu_and_proc_know() {
    let vm = qemu("sample", &[]);
    let mut host = vm.host();
    let v = sample_until(&mut host, vm.child.id(), |v| v.balloon.is_some());
    assert_eq!((v.name.as_str(), v.link.clone()), (vm.name.as_str(), Link::Up));
    assert_eq!((v.ram, v.run), (Some(Bytes::mib(64)), Some(RunState::Paused)));
    assert!(v.uuid.is_some() && v.process.unwrap().resident() > Bytes::mib(1));
    let balloon = v.balloon.unwrap();
    assert_eq!((balloon.actual, balloon.guest), (Bytes::mib(64), None));
    assert_eq!((balloon.reporting, balloon.deflate_on_oom), (Some(true), Some(false)));
    // The daemon's connection gone, another may look.
    drop(host);
    assert_eq!(interval(&vm.socket), 2);
}

#[test]
fn vm_events_wake_and_a_dead_vm_is_not_acted_on() {
    let mut vm = qemu("wake", &["-qmp", "unix:second.sock,server=on,wait=off"]);
    let mut host = vm.host();
    let v = sample_until(&mut host, vm.child.id(), |v| v.link == Link::Up);
    assert_eq!(v.events.first(), Some(&VmEvent::Connected));
    host.kick_stats(&[v.id]);
    // No driver in the guest: QEMU takes the wish all the same.
    set(&mut host, v.id, Bytes::mib(48)).unwrap();
    let mut other = connect(&vm.socket.with_file_name("second.sock"));
    other.execute("system_reset", None, LONG).unwrap();
    assert!(host.wait(Instant::now() + LONG));
    sample_until(&mut host, vm.child.id(), |v| v.events.contains(&VmEvent::Reset));
    vm.child.kill().unwrap();
    vm.child.wait().unwrap();
    assert!(host.wait(Instant::now() + LONG));
    let error = set(&mut host, v.id, Bytes::mib(64)).unwrap_err();
    assert_eq!(error, ActError::Gone { pid: v.id.pid });
    assert!(host.sample().vms.iter().all(|s| s.id != v.id));
}

#[test]
fn vm_a_stopped_qemu_is_slow_and_costs_one_deadline() {
    let vm = qemu("hung", &[]);
    let options = Options { deadline: Duration::from_millis(300), ..vm.options() };
    let mut host = LinuxHost::new(options).unwrap();
    let v = sample_until(&mut host, vm.child.id(), |v| v.link == Link::Up);
    let pid = rustix::process::Pid::from_raw(vm.child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    sample_until(&mut host, vm.child.id(), |v| matches!(v.link, Link::Slow(_)));
    let start = Instant::now();
    let link = host.sample().vms.into_iter().find(|s| s.id == v.id).unwrap().link;
    assert!(matches!(link, Link::Slow(_)) && start.elapsed() < Duration::from_millis(250));
    assert!(matches!(set(&mut host, v.id, Bytes::mib(48)), Err(ActError::NoLink(_))));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    sample_until(&mut host, vm.child.id(), |v| v.link == Link::Up && v.run.is_some());
}

#[test]
fn vm_a_configured_socket_names_its_vm_and_a_held_one_is_told() {
    let vm = qemu("configured", &["-qmp", "unix:ebb.sock,server=on,wait=off"]);
    let text = format!("[vm.mine]\nqmp = {:?}\n[vm.no]\nqmp = \"/nonexistent\"\n", vm.socket);
    let config = Config::parse("f", &text).unwrap();
    let mut host = LinuxHost::new(Options { config, ..vm.options() }).unwrap();
    let v = sample_until(&mut host, vm.child.id(), |v| v.link == Link::Up);
    assert_eq!(v.name, "mine");
    let sample: Sample = host.sample();
    let told = |p: &Problem| p.source == "[vm.no] qmp" && p.message.starts_with("/nonexistent");
    assert!(sample.problems.iter().any(told), "{:?}", sample.problems);
    // That one was used where QEMU had bound the configured one and did not listen yet.
    drop(host);
    // Without configuration the socket with `ebb` in its name comes first.
    let _held = connect(&vm.socket.with_file_name("ebb.sock"));
    let mut host = vm.host();
    let v = sample_until(&mut host, vm.child.id(), |v| matches!(v.link, Link::Taken(_)));
    assert_eq!(v.run, None);
}

#[test]
fn vm_a_held_socket_is_told_as_such_until_it_is_free() {
    let vm = qemu("held", &[]);
    let held = connect(&vm.socket);
    let mut host = vm.host();
    sample_until(&mut host, vm.child.id(), |v| matches!(v.link, Link::Taken(_)));
    // Also while Ebb tries again.
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        let link = host.sample().vms.into_iter().find(|v| v.id.pid == vm.child.id()).unwrap().link;
        assert!(matches!(link, Link::Taken(_)), "{link:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(held);
    sample_until(&mut host, vm.child.id(), |v| v.link == Link::Up);
}

/// The process that it ends when it is dropped: QEMU in the background is nobody's child.
struct Ends(u32);

impl Drop for Ends {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0 as i32).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// The monitors of qemu-server's `config_to_command`, with a stand-in for `qmeventd`.
#[test]
fn vm_a_qemu_in_the_background_as_proxmox_starts_it_is_visited_and_free_for_its_manager() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("run/qemu-server");
    std::fs::create_dir_all(&place).unwrap();
    let file = |name: &str| place.join(name).display().to_string();
    let (socket, pid_file, events) = (file("100.qmp"), file("100.pid"), file("qmeventd.sock"));
    let qmeventd = std::os::unix::net::UnixListener::bind(&events).unwrap();
    let status = Command::new("qemu-system-x86_64")
        .args("-accel tcg -display none -nodefaults -S -m 64 -no-shutdown -daemonize".split(' '))
        .args(["-name", "vm100,debug-threads=on", "-pidfile", &pid_file])
        .args(["-chardev", &format!("socket,id=qmp,path={socket},server=on,wait=off")])
        .args(["-mon", "chardev=qmp,mode=control"])
        .args(["-chardev", &format!("socket,id=qmp-event,path={events},reconnect=5")])
        .args(["-mon", "chardev=qmp-event,mode=control"])
        .args(["-device", "virtio-balloon-pci,id=balloon0,free-page-reporting=on"])
        .stdin(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let pid: u32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let _ends = Ends(pid);
    // As qmeventd does: QEMU 7.2 at times ends with a fault when it is closed at once.
    let _held = qmeventd.accept().expect("its second monitor connects out");
    let root = links(dir.path(), pid);
    let options = Options { root, psi_trigger_us: None, ..Options::default() };
    let mut host = LinuxHost::new(options).unwrap();
    let seen = sample_until(&mut host, pid, |vm| vm.balloon.is_some());
    assert_eq!((seen.name.as_str(), seen.link), ("vm100", Link::Up));
    assert_eq!(seen.shared.unwrap().with.as_deref(), Some("Proxmox VE"));
    set(&mut host, seen.id, Bytes::mib(48)).unwrap();
    // The daemon is there, and the manager is served at once.
    let mut manager = connect(Path::new(&socket));
    manager.execute("query-status", None, LONG).unwrap();
    // It is still served when the daemon puts the interval back.
    let served = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(manager);
    });
    host.restore_intervals();
    served.join().unwrap();
    assert_eq!(interval(Path::new(&socket)), 0);
}
