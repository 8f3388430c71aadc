//! Ebb, its agent and its module on real VMs, and the lab that boots them. Each file is about
//! one part, and takes from here what most of them use; each test holds the arena, and says
//! beside whom it may run.

mod ebb;
mod libvirt;
mod lifecycle;
mod limits;
mod merge;
mod module;
mod offload;
mod owed;
mod partial_thp;
mod plug;
mod ram_files;
mod recycle;
mod shared;
mod smoke;
mod standin;
mod systemd;
mod tier;
mod ways_in;
mod zeros;

use std::fs;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_host::agent::Agent;
use ebb_host::root::Root;
use ebb_lab::agent_requests::Requests as _;
use ebb_lab::arena::{Arena, ArenaConfig, Beside, SwapConfig, SwapKind};
use ebb_lab::ebb::{Daemon, of, run_in};
use ebb_lab::image::{Image, Kernel};
use ebb_lab::vm::{Backing, Balloon, Vm, VmConfig};
use ebb_lab::{guest_stack, in_pairs, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

const MINUTE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65534;
/// Merging as fast as `ksmd` can; a scan's time is to be added.
const MERGING: &str = "[merge]\nmode = \"on\"\ncpu = \"100%\"\ncpu_clear = \"100%\"\n";

/// The machine, for tests that measure or that start several VMs.
fn held() -> Arena {
    Arena::beside(Beside::Tests).unwrap()
}

/// A number that the environment sets.
fn set<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// How long guests are stressed; 20 s where nobody says.
fn seconds() -> u64 {
    set("EBB_STRESS_SECONDS").unwrap_or(20)
}

/// `make soak`: every form, on both kernels.
fn soak() -> bool {
    seconds() >= 60
}

/// The kernels of a test that takes long: this one, with `make soak` both.
fn kernels(short: Kernel) -> Vec<Kernel> {
    Kernel::ALL.into_iter().filter(|k| soak() || *k == short).collect()
}

/// A name that no other VM of this run has: daemons go by names.
fn unique(name: &str) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("{name}-{}", COUNT.fetch_add(1, Relaxed))
}

/// A VM of 6.1 that deflates when its guest runs out of memory, and that KSM does not look at.
fn stock(name: &str, ram: Bytes) -> VmConfig {
    let mut config = VmConfig::new(name, ram);
    config.balloon = Some(Balloon { reporting: false, deflate_on_oom: true });
    config.mergeable = false;
    config
}

/// What `verify` checked until now is what it wrote.
fn stop_verify(vm: &Vm) {
    let end = vm.tool().stop("v").unwrap();
    assert!(end.u64("errors") == 0 && end.u64("checks") > 0, "{}: {end:?}", vm.name);
}

/// What `hold` holds is what it wrote.
fn holds_what_it_wrote(vm: &Vm) {
    let held = vm.poked("h", 2 * MINUTE).unwrap();
    assert!(held.u64("errors") == 0 && held.u64("checks") > 0, "{}: {held:?}", vm.name);
}

/// Both.
fn all_is_there(vm: &Vm) {
    holds_what_it_wrote(vm);
    stop_verify(vm);
}

/// Puts the agent where a QEMU of any user can load it, and have its socket.
fn agent_for_all(dir: &Path) -> PathBuf {
    fs::set_permissions(dir, PermissionsExt::from_mode(0o777)).unwrap();
    let library = dir.join("libebb_vmm.so");
    fs::copy(guest_stack::plugin().unwrap(), &library).unwrap();
    library
}

/// Has a guest touch memory of this size, and free it.
fn touch_and_free(vm: &Vm, size: Bytes) {
    vm.tool().start_ready("h", "hold", &format!("size={}", size.0), MINUTE).unwrap();
    vm.tool().stop("h").unwrap();
}

/// What the agent of one VM in the daemon's state has given back, bytes.
fn recycled(vm: &Value) -> u64 {
    vm["agent"]["counters"]["recycled"].as_u64().unwrap_or(0)
}

/// What the daemon's state has of a cgroup `slice` with a limit.
fn limit_of_slice(state: &Value) -> Option<&Value> {
    let mut limits = state["host"]["limits"].as_array()?.iter();
    limits.find(|l| l["name"].as_str().is_some_and(|name| name.ends_with("/slice")))
}

/// Waits until its balloon leaves the guest about so much.
fn wait_size(vm: &Vm, size: Bytes) {
    let there = |vm: &Vm| vm.balloon().unwrap().abs_diff(size) <= Bytes::mib(1);
    vm.wait_for(&format!("its balloon to leave {size}"), MINUTE, there).unwrap();
}

/// `ebb` with the configuration that lies in `dir` does what it is told; what it says.
fn ebb_says(dir: &Path, args: &[&str]) -> String {
    let (code, out, err) = ebb_lab::ebb::run_in(dir, args).unwrap();
    assert_eq!(code, 0, "ebb {args:?}: {out}{err}");
    out
}

/// Begins to migrate a VM to nowhere, so slowly that it does not come to its end.
fn begin_migration(vm: &Vm) {
    let slow = json!({ "max-bandwidth": 64 << 10 });
    vm.qmp("migrate-set-parameters", Some(slow)).unwrap();
    vm.qmp("migrate", Some(json!({ "uri": "exec:cat > /dev/null" }))).unwrap();
}

/// It still goes on, and ends now.
fn end_migration(vm: &Vm) {
    assert_eq!(vm.qmp("query-migrate", None).unwrap()["status"], "active");
    vm.qmp("migrate_cancel", None).unwrap();
}

/// A daemon that watches these VMs, in a directory of its own.
fn watch(names: &[&str], config: &str) -> (TempDir, Daemon) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), names, config).unwrap();
    (dir, daemon)
}

/// Waits until a VM's guest has told the daemon of itself, which may take long beside other VMs.
fn wait_up(daemon: &Daemon, name: &str) {
    wait_up_for(daemon, name, 3 * MINUTE);
}

fn wait_up_for(daemon: &Daemon, name: &str, deadline: Duration) {
    daemon.wait_for_vm(name, "statistics", deadline, is_up).unwrap();
}

/// Whether the daemon hears a VM and its guest.
fn is_up(vm: &Value) -> bool {
    vm["link"]["state"] == "up" && vm["available"].as_u64().is_some()
}

/// Waits until it is done; `said` is what is told where it does not come to that.
fn wait_until(done: impl FnMut() -> bool, said: impl Fn() -> String) {
    ebb_lab::poll(MINUTE, done).unwrap_or_else(|| panic!("{}", said()));
}

/// Waits for a line of a daemon's log: a thread writes it, and another one reads it here.
fn said(daemon: &Daemon, text: &str) {
    wait_until(|| daemon.log().contains(text), || daemon.log());
}

/// The daemon has ordered something by this rule.
fn decided_by(daemon: &Daemon, rule: &str) {
    let decisions = daemon.decisions().unwrap();
    assert!(decisions.iter().any(|d| d["action"]["reason"]["rule"] == rule), "{decisions:?}");
}

/// The record that a daemon left there is decided again to the same plans.
fn replays(dir: &Path) {
    let record = dir.join("record.jsonl");
    let (code, out, err) = ebb_lab::ebb::run(&["replay", record.to_str().unwrap()]).unwrap();
    assert_eq!(code, 0, "{out}{err}");
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// The ticks of the record that a daemon left there.
fn recorded_ticks(dir: &Path) -> Vec<Value> {
    let record = fs::read_to_string(dir.join("record.jsonl")).unwrap();
    let lines = record.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    lines.filter(|tick| tick["plan"]["actions"].is_array()).collect()
}

/// The orders of a recorded tick to balloons.
fn orders_of(tick: &Value) -> &[Value] {
    tick["plan"]["actions"].as_array().unwrap()
}
