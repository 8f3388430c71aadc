//! Ebb, its agent and its module on real VMs, and the lab that boots them. Each file is about
//! one part; each test holds the arena, and says beside whom it may run.

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
mod recycle;
mod shared;
mod smoke;
mod standin;
mod systemd;
mod tier;
mod ways_in;
mod zeros;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use ebb_core::units::Bytes;
use ebb_lab::ebb::Daemon;
use ebb_lab::image::Kernel;
use ebb_lab::vm::{Balloon, Vm, VmConfig};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);

/// A number that the environment sets.
fn set<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
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

/// One VM in the daemon's state; null where it is not there.
fn of<'a>(state: &'a Value, name: &str) -> &'a Value {
    let vms = state["vms"].as_array().unwrap();
    vms.iter().find(|v| v["name"] == name).unwrap_or(&Value::Null)
}

/// What `verify` checked until now is what it wrote.
fn stop_verify(vm: &Vm) {
    let end = vm.tool().stop("v").unwrap();
    assert!(end.u64("errors") == 0 && end.u64("checks") > 0, "{}: {end:?}", vm.name());
}

/// The same, and so is what `hold` holds.
fn all_is_there(vm: &Vm) {
    let held = vm.poked("h", 2 * MINUTE).unwrap();
    assert!(held.u64("errors") == 0 && held.u64("checks") > 0, "{}: {held:?}", vm.name());
    stop_verify(vm);
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

/// Waits until it is done; `said` is what is told where it does not come to that.
fn wait_until(done: impl FnMut() -> bool, said: impl Fn() -> String) {
    ebb_lab::poll(MINUTE, done).unwrap_or_else(|| panic!("{}", said()));
}

/// Waits for a line of a daemon's log: a thread writes it, and another one reads it here.
fn said(daemon: &Daemon, text: &str) {
    wait_until(|| daemon.log().contains(text), || daemon.log());
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
