//! What becomes of a guest's memory when its life takes a turn while the host
//! recycles as fast as it can: resets of every kind (`resets`), the first moments of firmware
//! after one (`firmware`), steps of the
//! defence left out (`faults`), module, agent and daemon coming and going
//! (`life`), migration, snapshots and hibernation (`moves`), and all of a kernel's
//! work at once (`soak`).
//!
//! Needs `cargo lab setup --headers`. This file has the guest, with module and
//! agent, and the thread that plays the daemon. `EBB_STRESS_SECONDS` and
//! `EBB_RESETS` make the tests long; then they run on every kernel.

mod faults;
mod firmware;
mod life;
mod moves;
mod parts;
mod resets;
mod soak;

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::thread::sleep;

use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{AgentState, Attach, HugePages, Recycle, Status};
use ebb_host::agent::AgentError;
use ebb_host::qmp;
use ebb_lab::vm::VmError;
use ebb_lab::{Background, lock};

use super::*;

const SOON: Duration = Duration::from_secs(10);

/// How often a turn is taken in each guest.
fn rounds() -> u64 {
    (seconds() / 30).clamp(3, 20)
}

/// A VM with the module at /ebb.ko and the agent listening.
struct Guest {
    vm: Vm,
    socket: PathBuf,
    dir: tempfile::TempDir,
}

impl Guest {
    /// One vCPU: the guests here boot, load and patch themselves all the time, which
    /// QEMU's translator survives only so.
    fn config(kernel: Kernel, dir: &Path) -> (VmConfig, PathBuf) {
        let mut config = VmConfig::new(unique("life"), Bytes::mib(512));
        config.kernel = kernel;
        let socket = guest_stack::prepare(&mut config, dir).unwrap();
        (config, socket)
    }

    fn boot(kernel: Kernel, change: impl FnOnce(&mut VmConfig)) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let (mut config, socket) = Guest::config(kernel, dir.path());
        change(&mut config);
        Guest { vm: Vm::start(&config).unwrap(), socket, dir }
    }

    /// With steps of the defence left out, by the names in `ebb_vmm::faults`.
    fn boot_with_faults(kernel: Kernel, faults: &str, change: impl FnOnce(&mut VmConfig)) -> Guest {
        Guest::boot(kernel, |c| {
            guest_stack::leave_out(c, faults).unwrap();
            change(c);
        })
    }

    fn sh(&self, command: &str) -> String {
        self.try_sh(command).unwrap()
    }

    fn try_sh(&self, command: &str) -> Result<String, VmError> {
        self.vm.ask(|tool| tool.sh(command, 5 * MINUTE))
    }

    fn insmod(&self) {
        guest_stack::load(&self.vm).unwrap();
    }

    /// Recycles from the moment on in which the agent uses the module's map.
    fn recycle(&self) -> Recycling {
        let recycling = Recycling::start(&self.vm, &self.socket);
        recycling.wait_ready(&self.vm);
        recycling
    }

    /// Starts what checks its own memory until it is stopped.
    fn start_verify(&self, size: u64, arguments: &str) {
        let all = format!("size={size} seconds=100000 {arguments}");
        self.vm.tool().start_ready("v", "verify", &all, MINUTE).unwrap();
    }

    /// Pages checked so far; none may be wrong.
    fn verified(&self) -> u64 {
        let stat = self.vm.ask(|tool| tool.stat("v")).unwrap();
        assert_eq!((stat.u64("errors"), stat.str("state")), (0, "running"), "{stat:?}");
        stat.u64("checks")
    }

    /// Until so many more pages were checked, none of them wrong.
    fn verify_on(&self, more: u64) {
        let begun = self.verified();
        let enough = |_: &Vm| self.verified() > begun + more;
        self.vm.wait_for("verify to go on", MINUTE, enough).unwrap();
    }

    fn stop_verify(&self) -> u64 {
        let stat = self.vm.ask(|tool| tool.stop("v")).unwrap();
        assert_eq!(stat.u64("errors"), 0, "{stat:?}");
        stat.u64("checks")
    }

    /// What its kernel says that is wrong.
    fn complaints(&self) -> String {
        self.sh("dmesg | grep -E 'BUG|WARNING|Oops|please report' | head -n 3")
    }

    /// The module's own comparison of each bit with the allocator.
    fn audit_false(&self) -> u64 {
        let text = self.sh("cat /sys/kernel/debug/ebb/audit");
        let line = text.lines().find_map(|l| l.strip_prefix("false "));
        line.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no audit: {text}"))
    }
}

/// Waits until it has booted again; a boot that hangs is told with all that is known of it.
fn wait_booted(guest: &mut Guest, recycling: &Recycling, after: &str) {
    if let Err(e) = guest.vm.wait_ready() {
        panic!("{after}: {e}\n{:?}\n{}", recycling.seen(), registers(&guest.vm));
    }
}

/// What its vCPUs are at: all that is to be had of a boot that hangs.
fn registers(vm: &Vm) -> String {
    let line = json!({ "command-line": "info registers" });
    let said = vm.qmp("human-monitor-command", Some(line)).unwrap_or_default();
    said.as_str().unwrap_or_default().to_string()
}

/// What the recycling thread has seen so far.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// The agent's last word.
    status: Status,
    /// Calls, and those that were refused for want of a map.
    calls: u64,
    refused: u64,
    recycled: Bytes,
    /// Why the connection ended, if it did.
    failure: Option<String>,
}

/// A thread that plays the daemon: recycles everything, without a pause, and
/// tells the agent nothing of what becomes of the VM.
struct Recycling {
    seen: Arc<Mutex<Seen>>,
    thread: Background<Agent>,
}

impl Recycling {
    /// Connects, hands RAM over, and begins.
    fn start(vm: &Vm, socket: &Path) -> Recycling {
        Recycling::go_on(attached(vm, socket))
    }

    fn start_by(vm: &Vm, socket: &Path, firmware: Firmware) -> Recycling {
        Recycling::go_on(attached_by(vm, socket, firmware))
    }

    fn go_on(mut agent: Agent) -> Recycling {
        let seen = Arc::default();
        let theirs = Arc::clone(&seen);
        let thread = Background::start(move |quit| {
            while !quit.load(SeqCst) {
                if let Err(e) = Recycling::once(&mut agent, &theirs) {
                    lock(&theirs).failure = Some(e.to_string());
                    break;
                }
            }
            agent
        });
        Recycling { seen, thread }
    }

    fn once(agent: &mut Agent, seen: &Mutex<Seen>) -> Result<(), AgentError> {
        let want = Recycle {
            budget_ms: 50,
            huge: HugePages::Split,
            split_min_pages: 1,
            ..Recycle::default()
        };
        let done = agent.recycle(want, SOON);
        let status = agent.status(false, SOON)?;
        let mut seen = lock(seen);
        seen.calls += 1;
        seen.status = status;
        match done {
            Ok(done) => seen.recycled += done.bytes,
            Err(AgentError::Refused(..)) => {
                seen.refused += 1;
                drop(seen);
                sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    fn is(&self, state: AgentState) -> bool {
        self.seen().status.state == state
    }

    /// Until the agent has found the module's map and uses it.
    fn wait_ready(&self, vm: &Vm) {
        let ready = |_: &Vm| {
            let seen = self.seen();
            assert_eq!(seen.failure, None, "{seen:?}");
            seen.status.state == AgentState::Ready
        };
        vm.wait_for("the agent to use the map", MINUTE, ready)
            .unwrap_or_else(|e| panic!("{e}\n{:?}", self.seen()));
    }

    /// Until so much more was recycled, of what the guest goes on to free.
    fn wait_more(&self, vm: &Vm, more: Bytes) {
        self.wait_recycled(vm, self.seen().recycled + more);
    }

    /// Until so much was recycled in all.
    fn wait_recycled(&self, vm: &Vm, goal: Bytes) {
        vm.wait_for("recycling to go on", MINUTE, |_| self.seen().recycled >= goal)
            .unwrap_or_else(|e| panic!("{e}\n{:?}", self.seen()));
    }

    /// Ends, and gives the connection back.
    fn stop(mut self) -> Agent {
        self.thread.end()
    }
}

/// A connection to a VM's agent that has been told where RAM is.
fn attached(vm: &Vm, socket: &Path) -> Agent {
    attached_by(vm, socket, Firmware::Seabios)
}

/// The same with the firmware that starts the guest.
fn attached_by(vm: &Vm, socket: &Path, firmware: Firmware) -> Agent {
    let attachment = Attach { firmware, ..guest_stack::attachment(vm).unwrap() };
    let until = Instant::now() + SOON;
    loop {
        // The agent lets one daemon in, and sees a moment later that one has gone.
        let mut agent = Agent::connect(socket).unwrap();
        match agent.attach(attachment.clone(), None, SOON) {
            Ok(()) => return agent,
            Err(e) if Instant::now() > until => panic!("{e}"),
            Err(_) => sleep(Duration::from_millis(20)),
        }
    }
}
