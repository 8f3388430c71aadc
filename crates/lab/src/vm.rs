//! VMs: QEMU processes that boot an [`Image`] and are driven by the guest tool.
//!
//! A VM has a run directory of its own with its console, QEMU's messages, the tool's socket and two
//! QMP sockets: `ebb-qmp.sock` is the product's (Ebb connects to sockets with `ebb` in their file
//! name), `lab-qmp.sock` the lab's. It dies with the lab: `setpriv` has the kernel kill QEMU when
//! the thread that started it ends, so one thread, which never ends, starts them all. Nothing waits
//! for time to pass: every wait is for a state, with a deadline that is stretched on slow machines.
//! A VM that died or whose kernel gave up is [`VmError::Lost`], which is another thing than a
//! failed test.
//!
//! This file has a VM's life and the ways to ask it; how it is to be is in `config`, how QEMU
//! is started in `process`.

mod accel;
mod config;
mod process;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::units::Bytes;
use ebb_host::probe::process::{read_run_time, read_stat, read_status};
use ebb_host::qmp::{self, QmpError};
use ebb_host::root::Root;
use serde_json::{Value, json};

pub use self::accel::Accel;
pub use self::config::{Backing, Balloon, VmConfig};
use self::config::{UEFI, UEFI_VARIABLES};
pub(crate) use self::process::on_lasting_thread;
use self::process::{hand_over, spawn_qemu};
use crate::guest::{Fields, Tool, ToolError};
use crate::image::{Image, with_files};
use crate::{LabError, Sought, lock, poll, tail};

pub(crate) const READY: &str = "ebb-guest-tool: ready on";
/// What the console shows when a guest kernel is at its end.
const LAST_WORDS: [&str; 3] = ["Kernel panic - not syncing", "Oops: ", "kernel BUG at"];
/// What tells where a guest stands that never said a word: RIP of each vCPU.
const REGISTERS: &str = "info registers -a";
const POLL: Duration = Duration::from_millis(20);
/// QEMU's own answer to a QMP command.
const QMP_DEADLINE: Duration = Duration::from_secs(10);
/// From start to the tool's ready line, under KVM.
const BOOT_DEADLINE: Duration = Duration::from_secs(45);

/// What can go wrong with a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// QEMU ended or the guest's kernel gave up: neither passed nor failed.
    #[error("VM {name} was lost: {why}\n--- end of its console:\n{console}")]
    Lost {
        name: String,
        why: String,
        /// The last lines on its console.
        console: String,
    },
    /// The VM lives, but a state was not reached in time.
    #[error("VM {name}: {what}: not within {after:.1?}\n--- end of its console:\n{console}")]
    Timeout {
        name: String,
        what: String,
        after: Duration,
        /// The last lines on its console.
        console: String,
    },
    /// The guest tool refused a command.
    #[error("VM {name}: {error}")]
    Tool { name: String, error: ToolError },
    #[error("VM {name}: {error}")]
    Qmp { name: String, error: QmpError },
    /// It could not be started.
    #[error(transparent)]
    Lab(#[from] LabError),
}

/// A running VM. Dropping it kills it and removes its run directory, which
/// `EBB_LAB_KEEP=1` leaves in place.
#[derive(Debug)]
pub struct Vm {
    pub name: String,
    dir: Option<tempfile::TempDir>,
    pub run_dir: PathBuf,
    child: Mutex<Child>,
    pub pid: u32,
    /// The RAM it was given.
    pub memory: Bytes,
    pub accel: Accel,
    /// The QMP socket for the product.
    pub qmp_path: PathBuf,
    /// `uname -r` of its kernel.
    pub release: String,
    tool: Option<Tool>,
    qmp: Mutex<Option<qmp::Client>>,
    boots: usize,
    spawned: Instant,
    /// Length of the console at the last reset: older last words are forgiven.
    console_before: AtomicUsize,
    /// Its kernel is about to die on purpose: last words are its duty.
    doomed: AtomicBool,
    /// From start (a reboot: from the call of [`Vm::wait_ready`]) to the tool's
    /// ready line.
    pub boot_time: Duration,
}

impl Vm {
    /// Starts a VM and waits until its tool answers.
    pub fn start(config: &VmConfig) -> Result<Vm, VmError> {
        let mut vm = Vm::spawn(config)?;
        vm.wait_ready()?;
        Ok(vm)
    }

    /// Where its vCPUs stand, twice: whether it goes round in circles or sleeps.
    pub fn stand(&self) -> String {
        let look = || {
            let monitor = json!({ "command-line": REGISTERS });
            let said = self.qmp("human-monitor-command", Some(monitor)).ok()?;
            let lines = said.as_str()?.lines().filter(|l| l.contains("RIP=")).map(str::trim);
            Some(lines.collect::<Vec<_>>().join("\n"))
        };
        let first = look().unwrap_or_default();
        thread::sleep(POLL);
        format!("{first}\n{}", look().unwrap_or_default())
    }

    /// Starts a VM; [`Vm::wait_ready`] has still to be called. So several boot at
    /// the same time.
    pub fn spawn(config: &VmConfig) -> Result<Vm, VmError> {
        let mut image = Image::get(config.kernel)?;
        let best = || config.accel.unwrap_or_else(Accel::detect);
        let accel = if config.counted { Accel::Tcg } else { best() };
        let dir = tempfile::Builder::new().prefix("ebb-lab-").tempdir();
        let dir = dir.map_err(LabError::file(std::env::temp_dir()))?;
        let run_dir = dir.path().to_path_buf();
        if !config.files.is_empty() {
            let more = run_dir.join("initramfs");
            with_files(&image.initramfs, &config.files, &more)?;
            image.initramfs = more;
        }
        if config.uefi {
            let own = run_dir.join(UEFI_VARIABLES);
            fs::copy(UEFI.1, &own).map_err(LabError::file(&own))?;
        }
        if let Some(user) = config.user {
            hand_over(&mut image, &run_dir, user).map_err(LabError::file(&run_dir))?;
        }
        let qmp_path = config.product_socket(&run_dir);
        let place = qmp_path.parent().unwrap_or(&run_dir);
        fs::create_dir_all(place).map_err(LabError::file(place))?;
        let child = spawn_qemu(config, &config.arguments(&image, accel, &run_dir), &run_dir)?;
        let keep = std::env::var_os("EBB_LAB_KEEP").is_some_and(|v| v == "1");
        let dir = if keep {
            let _ = dir.keep();
            None
        } else {
            Some(dir)
        };
        let mut vm = Vm {
            name: config.name.clone(),
            dir,
            run_dir,
            pid: child.id(),
            child: Mutex::new(child),
            memory: config.memory,
            accel,
            qmp_path,
            release: image.release,
            tool: None,
            qmp: Mutex::new(None),
            boots: 0,
            spawned: Instant::now(),
            console_before: AtomicUsize::new(0),
            doomed: AtomicBool::new(false),
            boot_time: Duration::ZERO,
        };
        vm.connect_tool()?;
        Ok(vm)
    }

    fn connect_tool(&mut self) -> Result<(), VmError> {
        let path = self.run_dir.join("tool.sock");
        let socket = self.wait_for("QEMU to listen", Duration::from_secs(10), |_| {
            UnixStream::connect(&path).ok()
        })?;
        let tool = Tool::new(socket, self.accel.patience()).map_err(LabError::file(&path))?;
        self.tool = Some(tool);
        Ok(())
    }

    /// Waits until the tool is ready for the first time, or once more since the
    /// last call (after a reboot).
    pub fn wait_ready(&mut self) -> Result<(), VmError> {
        self.wait_ready_within(BOOT_DEADLINE)
    }

    /// The same with a deadline of the caller's, which is stretched like all others.
    pub fn wait_ready_within(&mut self, deadline: Duration) -> Result<(), VmError> {
        let begun = if self.boots == 0 { self.spawned } else { Instant::now() };
        let want = self.boots + 1;
        let ready = self.wait_for("the guest tool to be ready", deadline, |vm| {
            vm.console().matches(READY).count() >= want
        });
        ready.map_err(|failed| match failed {
            VmError::Timeout { name, what, after, console } => {
                let console = format!("{console}\n--- its vCPUs, twice:\n{}", self.stand());
                VmError::Timeout { name, what, after, console }
            }
            other => other,
        })?;
        self.boots = want;
        if self.doomed.swap(false, Relaxed) {
            self.console_before.store(self.console().len(), Relaxed);
        }
        self.boot_time = begun.elapsed();
        self.request("ping", deadline).map(drop)
    }

    /// Polls for a state until `deadline` (stretched), or until the VM is lost.
    pub fn wait_for<S: Sought>(
        &self,
        what: &str,
        deadline: Duration,
        mut state: impl FnMut(&Vm) -> S,
    ) -> Result<S::Found, VmError> {
        let after = deadline.mul_f64(self.accel.patience());
        let look = || state(self).found().map(Ok).or_else(|| self.check().err().map(Err));
        poll(after, look).unwrap_or_else(|| {
            let (name, console) = (self.name.clone(), tail(&self.console(), 15));
            Err(VmError::Timeout { name, what: what.into(), after, console })
        })
    }

    /// Whether it is there and its kernel well.
    pub fn check(&self) -> Result<(), VmError> {
        let console = self.console();
        let recent = console.get(self.console_before.load(Relaxed)..).unwrap_or(&console);
        let ended = lock(&self.child).try_wait();
        let why = match ended {
            Ok(Some(status)) => {
                let log = fs::read_to_string(self.run_dir.join("qemu.log")).unwrap_or_default();
                format!("QEMU ended with {status} {}", tail(&log, 5))
            }
            _ => match LAST_WORDS.iter().find(|w| recent.contains(*w)) {
                Some(_) if self.doomed.load(Relaxed) => return Ok(()),
                Some(words) => format!("its kernel said “{words}”"),
                None => return Ok(()),
            },
        };
        Err(VmError::Lost { name: self.name.clone(), why, console: tail(&console, 30) })
    }

    /// Everything on its console so far.
    pub fn console(&self) -> String {
        let bytes = fs::read(self.run_dir.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The guest tool. Errors say nothing of the VM's fate: [`Vm::request`] does.
    pub fn tool(&self) -> &Tool {
        self.tool.as_ref().expect("a VM that was spawned is connected")
    }

    /// Asks the guest tool; where it says no or nothing, says what became of the VM.
    pub fn ask<T>(&self, ask: impl FnOnce(&Tool) -> Result<T, ToolError>) -> Result<T, VmError> {
        ask(self.tool()).map_err(|e| self.explain(e))
    }

    /// The same in the tool's own words.
    pub fn request(&self, command: &str, deadline: Duration) -> Result<Fields, VmError> {
        self.ask(|tool| tool.request(command, deadline))
    }

    /// Tells a job to go on; what it says then.
    pub fn poked(&self, job: &str, deadline: Duration) -> Result<Fields, VmError> {
        self.ask(|tool| {
            tool.poke(job)?;
            tool.wait_event(job, "progress", deadline)
        })
    }

    /// What a tool's error means for this VM.
    pub fn explain(&self, error: ToolError) -> VmError {
        if matches!(error, ToolError::Closed) {
            // QEMU closes its sockets a moment before it has ended.
            poll(Duration::from_secs(5), || self.check().is_err());
        }
        let (name, console) = (self.name.clone(), tail(&self.console(), 15));
        match (self.check(), error) {
            (Err(lost), _) => lost,
            (_, ToolError::Timeout { what, after }) => {
                VmError::Timeout { name, what, after, console }
            }
            (_, error) => VmError::Tool { name, error },
        }
    }

    /// A QMP command on the lab's own socket.
    pub fn qmp(&self, command: &str, arguments: Option<Value>) -> Result<Value, VmError> {
        let mut held = lock(&self.qmp);
        let error = |error| match self.check() {
            Err(lost) => lost,
            Ok(()) => VmError::Qmp { name: self.name.clone(), error },
        };
        let patient = QMP_DEADLINE.mul_f64(self.accel.patience());
        let path = self.run_dir.join("lab-qmp.sock");
        let client = held.get_or_insert_with(|| qmp::Client::new(path));
        let answer = client.execute(command, arguments, patient);
        if client.protocol.state() != qmp::State::Ready {
            *held = None;
        }
        answer.map_err(error)
    }

    /// Sets the balloon's target: the RAM the guest is left with.
    pub fn set_balloon(&self, target: Bytes) -> Result<(), VmError> {
        self.qmp("balloon", Some(json!({ "value": target.0 }))).map(drop)
    }

    /// The RAM the guest is left with now.
    pub fn balloon(&self) -> Result<Bytes, VmError> {
        let said = self.qmp("query-balloon", None)?;
        Ok(Bytes(said["actual"].as_u64().unwrap_or(0)))
    }

    pub fn pause(&self) -> Result<(), VmError> {
        self.qmp("stop", None).map(drop)
    }

    pub fn resume(&self) -> Result<(), VmError> {
        self.qmp("cont", None).map(drop)
    }

    /// Resets it, as its button would; [`Vm::wait_ready`] waits for the new boot.
    pub fn reset(&self) -> Result<(), VmError> {
        self.console_before.store(self.console().len(), Relaxed);
        self.qmp("system_reset", None).map(drop)
    }

    /// From now until the next [`Vm::wait_ready`] its kernel may panic: the
    /// caller has it do so, with `panic=` on its command line to boot again.
    pub fn doom(&self) {
        self.doomed.store(true, Relaxed);
    }

    /// Kills QEMU and waits for its end.
    pub fn kill(&self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }

    /// What QEMU holds of the host's memory, itself included; 0 when it is gone.
    pub fn resident(&self) -> Bytes {
        resident(self.pid)
    }
}

/// `VmRSS` of a process; 0 when it is gone.
pub fn resident(pid: u32) -> Bytes {
    let memory = read_status(&Root::default(), pid).ok().flatten();
    memory.map_or(Bytes::ZERO, |m| m.resident())
}

/// Processor time of a process so far, seconds.
pub fn cpu_s(pid: u32) -> Result<f64> {
    let stat = read_stat(&Root::default(), pid)?;
    let stat = stat.with_context(|| format!("process {pid} has ended"))?;
    Ok((stat.user_ticks + stat.system_ticks) as f64 / 100.0)
}

/// The threads of a process: id, name, processor seconds.
pub fn threads(pid: u32) -> Result<Vec<(u32, String, f64)>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if let Some(ran) = read_run_time(&Root::default(), id)? {
            threads.push((id, name.trim().to_string(), ran.as_secs_f64()));
        }
    }
    Ok(threads)
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.kill();
        self.dir.take();
    }
}
