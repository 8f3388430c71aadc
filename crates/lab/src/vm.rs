//! VMs: QEMU processes that boot an [`Image`] and are driven by the guest tool.
//!
//! A VM has a run directory of its own with its console, QEMU's messages, the
//! tool's socket and two QMP sockets: `ebb-qmp.sock` is the product's (Ebb connects
//! to sockets with `ebb` in their file name), `lab-qmp.sock` the lab's. It dies with the lab: `setpriv` has the
//! kernel kill QEMU when the thread that started it ends, so one thread, which
//! never ends, starts them all. Nothing waits for time to pass: every wait is for
//! a state, with a deadline that is stretched on slow machines. A VM that died or
//! whose kernel gave up is [`VmError::Lost`], which is another thing than a
//! failed test.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_host::qmp::{self, QmpError};
use rustix::thread::disable_transparent_huge_pages;
use serde_json::{Value, json};

use crate::guest::{Fields, Tool, ToolError};
use crate::image::{Cache, Image, Kernel, with_files};
use crate::{LabError, tail};

const READY: &str = "ebb-guest-tool: ready on";
/// What the console shows when a guest kernel is at its end.
const LAST_WORDS: [&str; 3] = ["Kernel panic - not syncing", "Oops: ", "kernel BUG at"];
/// What tells where a guest stands that never said a word: RIP of each vCPU.
const REGISTERS: &str = "info registers -a";
const POLL: Duration = Duration::from_millis(20);
/// QEMU's own answer to a QMP command.
const QMP_DEADLINE: Duration = Duration::from_secs(10);
/// The value of `-accel` where instructions are counted.
const COUNTED: &str = "tcg,tb-size=64,thread=single";
/// The processor of a translated guest: QEMU's default without `cmpxchg16b`. QEMU 7.2
/// translates this instruction wrongly: it leaves other bits of EFLAGS undefined, and an
/// interrupt right after it kills the guest's kernel. Kernels use it only if CPUID
/// reports it.
const TRANSLATED_CPU: &str = "qemu64,-cx16";
/// Added to the command line of translated guests with several vCPUs: they boot with one,
/// and the guest tool starts the others once its modules are loaded.
///
/// A kernel patches itself by writing a breakpoint, the rest and the first byte in turn.
/// QEMU before 8.1 translates code without locking its page, so one vCPU's translation can
/// keep a breakpoint that another vCPU has overwritten already. Linux 6.12 then dies of
/// “Oops: int3”, Linux 6.1 executes it again for ever. Most of this happens while kernels
/// boot. `thread=single` would be safe as well, but costs what tests are about: vCPUs that
/// run at the same time, and atomic operations that are atomic for QEMU's other threads.
const ONE_CPU_AT_BOOT: &str = "maxcpus=1 noreplace-smp";
/// UEFI for VMs as Debian has it: code, and the variables of a VM that never ran.
const UEFI: (&str, &str) = ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd");
/// A VM's own variables.
const UEFI_VARIABLES: &str = "uefi-variables";
/// From start to the tool's ready line, under KVM.
const BOOT_DEADLINE: Duration = Duration::from_secs(20);

/// What runs the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accel {
    /// The value of `-accel`, with a translation buffer of this size.
    pub fn option(self, buffer: Bytes) -> String {
        match self {
            Accel::Kvm => "kvm".into(),
            // The default translation buffer (1 GiB) would drown what is measured.
            Accel::Tcg => format!("tcg,tb-size={},thread=multi", buffer.0 >> 20),
        }
    }

    /// `kvm` or `tcg`.
    pub fn name(self) -> &'static str {
        if self == Accel::Kvm { "kvm" } else { "tcg" }
    }

    /// What deadlines are multiplied by; `EBB_LAB_PATIENCE` multiplies again.
    pub fn patience(self) -> f64 {
        let more = std::env::var("EBB_LAB_PATIENCE").ok().and_then(|v| v.parse().ok());
        let own = if self == Accel::Kvm { 1.0 } else { 4.0 };
        own * more.filter(|v| (0.1..=100.0).contains(v)).unwrap_or(1.0)
    }

    /// The best this machine boots our image with: KVM is tried for real, once
    /// per boot of the machine. `EBB_LAB_ACCEL` decides instead, if set.
    pub fn detect(cache: &Cache) -> Accel {
        match std::env::var("EBB_LAB_ACCEL").as_deref() {
            Ok("kvm") => return Accel::Kvm,
            Ok("tcg") => return Accel::Tcg,
            _ => {}
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let known = cache.path(format!("accel-{}", boot.trim()));
        match fs::read_to_string(&known).as_deref() {
            Ok("kvm") => return Accel::Kvm,
            Ok("tcg") => return Accel::Tcg,
            _ => {}
        }
        let accel = if kvm_boots(cache) { Accel::Kvm } else { Accel::Tcg };
        let _ = fs::write(known, accel.name());
        accel
    }
}

fn kvm_boots(cache: &Cache) -> bool {
    if fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return false;
    }
    let mut config = VmConfig::new("kvm-trial", Bytes::mib(256));
    config.cache = cache.clone();
    config.accel = Some(Accel::Kvm);
    Vm::start(&config).is_ok()
}

/// What guest RAM is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous memory, QEMU's default.
    #[default]
    Anonymous,
    /// A shared memfd.
    Memfd,
    /// A shared file, e.g. on tmpfs or hugetlbfs.
    File(PathBuf),
}

/// A virtio balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balloon {
    /// Free page reporting.
    pub reporting: bool,
    /// Deflate when the guest runs out of memory.
    pub deflate_on_oom: bool,
}

/// How a VM is to be.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Its name for QEMU (`-name`), unique by the caller's care.
    pub name: String,
    /// RAM.
    pub memory: Bytes,
    /// vCPUs.
    pub cpus: u32,
    /// Guest kernel.
    pub kernel: Kernel,
    /// Its balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// What its RAM is made of.
    pub backing: Backing,
    /// QEMU gets no transparent huge pages, whatever this machine's setting.
    pub small_pages: bool,
    /// It starts by UEFI (OVMF) rather than by QEMU's BIOS.
    pub uefi: bool,
    /// Emulation whose guest clock counts instructions: one nanosecond each, one
    /// thread for all vCPUs, the same run after run.
    pub counted: bool,
    /// `None`: the best that works.
    pub accel: Option<Accel>,
    /// Translated code that QEMU keeps. Of a small VM it is the largest part of QEMU's own memory.
    pub translations: Bytes,
    /// Raw disk images, `/dev/vda` first.
    pub disks: Vec<PathBuf>,
    /// A cgroup directory to run in, from the first page on.
    pub cgroup: Option<PathBuf>,
    /// A command that runs QEMU instead of the lab itself, in other namespaces for
    /// instance. QEMU must end with it.
    pub within: Vec<String>,
    /// Files put into the guest, as (path there, file here): modules, data.
    pub files: Vec<(String, PathBuf)>,
    /// Words added to the guest's command line.
    pub append: String,
    /// Further arguments for QEMU.
    pub args: Vec<String>,
    /// Environment for QEMU, e.g. `LD_PRELOAD`.
    pub env: Vec<(String, String)>,
    /// User and group that QEMU runs as from its first instruction on, as libvirt
    /// has it; the lab's own if `None`.
    pub user: Option<u32>,
    /// Where images come from.
    pub cache: Cache,
}

impl VmConfig {
    /// A VM with one vCPU, a plain balloon and the older kernel.
    pub fn new(name: impl Into<String>, memory: Bytes) -> VmConfig {
        VmConfig {
            name: name.into(),
            memory,
            cpus: 1,
            kernel: Kernel::V6_1,
            balloon: Some(Balloon::default()),
            backing: Backing::default(),
            small_pages: false,
            uefi: false,
            counted: false,
            accel: None,
            translations: Bytes::mib(64),
            disks: Vec::new(),
            cgroup: None,
            within: Vec::new(),
            files: Vec::new(),
            append: String::new(),
            args: Vec::new(),
            env: Vec::new(),
            user: None,
            cache: Cache::from_env(),
        }
    }

    /// QEMU's arguments.
    fn arguments(&self, image: &Image, accel: Accel, dir: &Path) -> Vec<String> {
        let path = |name: &str| dir.join(name).display().to_string();
        let socket = |name: &str| format!("{},server=on,wait=off", path(name));
        let mib = self.memory.0 >> 20;
        let text = |words: &[&str]| words.iter().map(|w| w.to_string()).collect::<Vec<_>>();
        let mut a = text(&["-name", &self.name, "-nodefaults", "-no-user-config"]);
        let best = accel.option(self.translations);
        let option = if self.counted { COUNTED } else { &best };
        a.extend(text(&["-display", "none", "-accel", option, "-m", &format!("{mib}M")]));
        if self.counted {
            a.extend(text(&["-icount", "shift=0,sleep=off"]));
        }
        a.extend(text(&["-smp", &self.cpus.to_string(), "-kernel"]));
        a.extend([image.vmlinuz.display().to_string(), "-initrd".into()]);
        let words = self.command_line(accel);
        a.extend([image.initramfs.display().to_string(), "-append".into(), words]);
        a.extend(text(&["-cpu", if accel == Accel::Kvm { "host" } else { TRANSLATED_CPU }]));
        a.extend(self.backing_arguments(mib));
        if self.uefi {
            let flash = |unit, rest: &str, file: &str| {
                format!("if=pflash,unit={unit},format=raw,{rest}file={file}")
            };
            let vars = path(UEFI_VARIABLES);
            a.extend(["-drive".into(), flash(0, "readonly=on,", UEFI.0)]);
            a.extend(["-drive".into(), flash(1, "", &vars)]);
        }
        a.extend([
            "-serial".into(),
            format!("file:{}", path("console")),
            "-qmp".into(),
            format!("unix:{}", socket("ebb-qmp.sock")),
            "-qmp".into(),
            format!("unix:{}", socket("lab-qmp.sock")),
            "-device".into(),
            "virtio-serial-pci".into(),
            "-chardev".into(),
            format!("socket,id=tool,path={}", socket("tool.sock")),
            "-device".into(),
            "virtserialport,chardev=tool,name=ebb.tool".into(),
        ]);
        if let Some(b) = self.balloon {
            let on = |v| if v { "on" } else { "off" };
            a.push("-device".into());
            a.push(format!(
                "virtio-balloon-pci,id=balloon0,free-page-reporting={},deflate-on-oom={}",
                on(b.reporting),
                on(b.deflate_on_oom)
            ));
        }
        for disk in &self.disks {
            let disk = disk.display();
            a.extend(["-drive".into(), format!("file={disk},if=virtio,format=raw,cache=none")]);
        }
        a.extend(self.args.iter().cloned());
        a
    }

    fn backing_arguments(&self, mib: u64) -> Vec<String> {
        let object = match &self.backing {
            Backing::Anonymous => return vec!["-machine".into(), "pc".into()],
            Backing::Memfd => format!("memory-backend-memfd,id=ram,size={mib}M,share=on"),
            Backing::File(path) => {
                let path = path.display();
                format!("memory-backend-file,id=ram,size={mib}M,share=on,mem-path={path}")
            }
        };
        let machine = "pc,memory-backend=ram".to_string();
        vec!["-object".into(), object, "-machine".into(), machine]
    }

    /// Timer checks and watchdogs misfire where a vCPU may not run for a while.
    fn command_line(&self, accel: Accel) -> String {
        let own = "console=ttyS0 quiet panic=0 oops=panic no_timer_check nowatchdog nokaslr";
        let boot = if accel == Accel::Tcg && self.cpus > 1 { ONE_CPU_AT_BOOT } else { "" };
        format!("{own} {boot} {}", self.append).trim().to_string()
    }
}

/// What can go wrong with a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// QEMU ended or the guest's kernel gave up: neither passed nor failed.
    #[error("VM {name} was lost: {why}\n--- end of its console:\n{console}")]
    Lost {
        /// Which.
        name: String,
        /// What is known.
        why: String,
        /// The last lines on its console.
        console: String,
    },
    /// The VM lives, but a state was not reached in time.
    #[error("VM {name}: {what}: not within {after:.1?}\n--- end of its console:\n{console}")]
    Timeout {
        /// Which.
        name: String,
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
        /// The last lines on its console.
        console: String,
    },
    /// The guest tool refused a command.
    #[error("VM {name}: {error}")]
    Tool {
        /// Which.
        name: String,
        /// Why.
        error: ToolError,
    },
    /// A QMP command failed.
    #[error("VM {name}: {error}")]
    Qmp {
        /// Which.
        name: String,
        /// Why.
        error: QmpError,
    },
    /// It could not be started.
    #[error(transparent)]
    Lab(#[from] LabError),
}

/// A running VM. Dropping it kills it and removes its run directory, which
/// `EBB_LAB_KEEP=1` leaves in place.
#[derive(Debug)]
pub struct Vm {
    name: String,
    dir: Option<tempfile::TempDir>,
    run_dir: PathBuf,
    child: Mutex<Child>,
    pid: u32,
    memory: Bytes,
    accel: Accel,
    release: String,
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
        let mut image = Image::get(&config.cache, config.kernel)?;
        let best = || config.accel.unwrap_or_else(|| Accel::detect(&config.cache));
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
            (vm.console().matches(READY).count() >= want).then_some(())
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
    pub fn wait_for<T>(
        &self,
        what: &str,
        deadline: Duration,
        mut state: impl FnMut(&Vm) -> Option<T>,
    ) -> Result<T, VmError> {
        let after = deadline.mul_f64(self.accel.patience());
        let until = Instant::now() + after;
        loop {
            if let Some(found) = state(self) {
                return Ok(found);
            }
            self.check()?;
            if Instant::now() >= until {
                let (name, console) = (self.name.clone(), tail(&self.console(), 15));
                return Err(VmError::Timeout { name, what: what.into(), after, console });
            }
            thread::sleep(POLL);
        }
    }

    /// Whether it is there and its kernel well.
    pub fn check(&self) -> Result<(), VmError> {
        let console = self.console();
        let recent = console.get(self.console_before.load(Relaxed)..).unwrap_or(&console);
        let ended = self.child().try_wait();
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

    /// Asks the guest tool; when no answer comes, says what became of the VM.
    pub fn request(&self, command: &str, deadline: Duration) -> Result<Fields, VmError> {
        self.tool().request(command, deadline).map_err(|e| self.explain(e))
    }

    /// What a tool's error means for this VM.
    pub fn explain(&self, error: ToolError) -> VmError {
        if matches!(error, ToolError::Closed) {
            // QEMU closes its sockets a moment before it has ended.
            let until = Instant::now() + Duration::from_secs(5);
            while self.check().is_ok() && Instant::now() < until {
                thread::sleep(POLL);
            }
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
        let mut held = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        let error = |error| match self.check() {
            Err(lost) => lost,
            Ok(()) => VmError::Qmp { name: self.name.clone(), error },
        };
        let patient = QMP_DEADLINE.mul_f64(self.accel.patience());
        if held.is_none() {
            let path = self.run_dir.join("lab-qmp.sock");
            *held = Some(qmp::Client::connect(path, patient).map_err(error)?);
        }
        let client = held.as_mut().expect("connected above");
        client.execute(command, arguments, patient).map_err(error)
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

    /// Stops its vCPUs.
    pub fn pause(&self) -> Result<(), VmError> {
        self.qmp("stop", None).map(drop)
    }

    /// Lets its vCPUs run.
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
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The RAM it was given.
    pub fn memory(&self) -> Bytes {
        self.memory
    }

    /// What runs it.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// `uname -r` of its kernel.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The QMP socket for the product.
    pub fn qmp_path(&self) -> PathBuf {
        self.run_dir.join("ebb-qmp.sock")
    }

    /// Its run directory.
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// What QEMU holds of the host's memory, itself included; 0 when it is gone.
    pub fn resident(&self) -> Bytes {
        resident(self.pid)
    }
}

/// `VmRSS` of a process; 0 when it is gone.
pub fn resident(pid: u32) -> Bytes {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse().ok());
    Bytes::kib(kib.unwrap_or(0))
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.kill();
        self.dir.take();
    }
}

/// Starts QEMU so that it dies with the lab, in its cgroup from the beginning.
/// Makes a run directory a user's own, with copies of the image: the cache may lie
/// where only the lab's user may look.
fn hand_over(image: &mut Image, dir: &Path, user: u32) -> std::io::Result<()> {
    for (file, name) in [(&mut image.vmlinuz, "vmlinuz"), (&mut image.initramfs, "initramfs")] {
        let copy = dir.join(name);
        if *file != copy {
            fs::copy(&*file, &copy)?;
            *file = copy;
        }
        std::os::unix::fs::chown(&*file, Some(user), Some(user))?;
    }
    std::os::unix::fs::chown(dir, Some(user), Some(user))
}

fn spawn_qemu(config: &VmConfig, args: &[String], dir: &Path) -> Result<Child, LabError> {
    let log = fs::File::create(dir.join("qemu.log")).map_err(LabError::file(dir))?;
    let mut command = match &config.cgroup {
        Some(cgroup) => {
            let mut c = Command::new("sh");
            c.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(cgroup.join("cgroup.procs"));
            c.arg("setpriv");
            c
        }
        None => Command::new("setpriv"),
    };
    command.args(["--pdeathsig", "KILL"]);
    if !config.within.is_empty() {
        command.args(&config.within).args(["setpriv", "--pdeathsig", "KILL"]);
    }
    if let Some(user) = config.user.map(|u| u.to_string()) {
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
    }
    command.arg("qemu-system-x86_64").args(args);
    command.envs(config.env.iter().map(|(k, v)| (k, v)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    on_lasting_thread(command, config.small_pages).map_err(|e| LabError::Command {
        command: "qemu-system-x86_64".into(),
        message: e.to_string(),
    })
}

/// The kernel's parent-death signal goes by the *thread* that forked, and tests
/// run in threads that end.
///
/// Whether a process gets huge pages is inherited over fork and exec, so it is
/// switched off here for the moment of the fork.
pub(crate) fn on_lasting_thread(command: Command, small_pages: bool) -> std::io::Result<Child> {
    type Order = (Command, bool, Sender<std::io::Result<Child>>);
    static STARTER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        thread::spawn(move || {
            for (mut command, small_pages, answer) in orders {
                let switched = disable_transparent_huge_pages(small_pages);
                let child = switched.map_err(Into::into).and_then(|()| command.spawn());
                let _ = disable_transparent_huge_pages(false);
                let _ = answer.send(child);
            }
        });
        Mutex::new(sender)
    });
    let (answer, answered) = channel();
    let gone = |_| std::io::Error::other("the thread that starts VMs is gone");
    let sender = starter.lock().unwrap_or_else(PoisonError::into_inner).clone();
    sender.send((command, small_pages, answer)).map_err(|e| gone(e.to_string()))?;
    answered.recv().map_err(|e| gone(e.to_string()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(accel: Accel, counted: bool) -> Vec<String> {
        let mut config = VmConfig::new("x", Bytes::mib(256));
        (config.cache, config.counted) = (Cache::at("/cache"), counted);
        let file = PathBuf::from("/cache/file");
        let (vmlinuz, initramfs) = (file.clone(), file);
        let (kernel, release) = (config.kernel, String::new());
        let image = Image { kernel, release, vmlinuz, initramfs, headers: None };
        config.arguments(&image, accel, Path::new("/run/vm"))
    }

    #[test]
    fn translated_guests_are_not_offered_cmpxchg16b() {
        let cpus = |a: &[String]| -> Vec<String> {
            a.windows(2).filter(|w| w[0] == "-cpu").map(|w| w[1].clone()).collect()
        };
        assert_eq!(cpus(&arguments(Accel::Tcg, false)), ["qemu64,-cx16"]);
        assert_eq!(cpus(&arguments(Accel::Tcg, true)), ["qemu64,-cx16"]);
        assert_eq!(cpus(&arguments(Accel::Kvm, false)), ["host"]);
    }

    #[test]
    fn translated_guests_boot_with_one_of_their_vcpus() {
        let line = |accel, cpus| {
            let mut config = VmConfig::new("x", Bytes::mib(256));
            config.cpus = cpus;
            config.command_line(accel)
        };
        assert!(line(Accel::Tcg, 2).contains("maxcpus=1"));
        assert!(!line(Accel::Tcg, 1).contains("maxcpus"), "it has no other");
        assert!(!line(Accel::Kvm, 2).contains("maxcpus"), "processors patch as they should");
    }

    #[test]
    fn of_the_two_qmp_sockets_one_is_named_as_ebbs() {
        let all = arguments(Accel::Tcg, false);
        let names = all.windows(2).filter(|w| w[0] == "-qmp").map(|w| {
            let path = w[1].split(',').next().unwrap_or_default();
            path.rsplit('/').next().unwrap_or_default().contains("ebb")
        });
        assert_eq!(names.collect::<Vec<_>>(), [true, false]);
    }
}
