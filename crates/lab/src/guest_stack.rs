//! What the tiers above stock need: the guest's module, built for the guest's
//! kernel, and the agent that QEMU loads.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ebb_core::wire::Attach;
use ebb_core::wire::firmware::Firmware;
use ebb_host::qmp::{self, QmpError};
use rustix::fs::{FlockOperation, flock};

use crate::image::Image;
use crate::vm::{Vm, VmConfig, VmError};
use crate::{LabError, agent_requests, lock, run};

const MINUTE: Duration = Duration::from_secs(60);

const MODULE: &str = "ebb.ko";

/// Loads the module in a guest whose image has it.
pub(crate) const LOAD: &str =
    "insmod /ebb.ko 2>&1 && grep -q ^ebb /proc/modules || { dmesg | tail -n 5; false; }";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds a file once in the life of this program; `make` and `cargo` take a second to find
/// that there is nothing to do.
fn once(file: PathBuf, build: impl FnOnce() -> Result<(), LabError>) -> Result<PathBuf, LabError> {
    static BUILT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut built = lock(&BUILT);
    if !built.contains(&file) {
        build()?;
        built.push(file.clone());
    }
    Ok(file)
}

/// `ebb.ko` for a guest kernel, stripped of debugging information; built where
/// sources are newer. `faults`: with the switches that leave hooks out.
pub fn module(image: &Image, faults: bool) -> Result<PathBuf, LabError> {
    let headers = image.headers.as_ref().ok_or_else(|| {
        LabError::Missing("no headers of the guest kernels: cargo lab setup --headers".into())
    })?;
    let kind = if faults { "-faults" } else { "" };
    let out = repository().join("target/lab").join(format!("module-{}{kind}", image.release));
    std::fs::create_dir_all(&out).map_err(LabError::file(&out))?;
    let out = out.canonicalize().map_err(LabError::file(&out))?;
    let stripped = out.join("stripped.ko");
    once(stripped.clone(), || {
        // One at a time: several programs may boot guests, and `make` writes in one folder.
        let path = out.join("lock");
        let lock = File::create(&path).map_err(LabError::file(&path))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| LabError::file(&path)(e.into()))?;
        let mut make = Command::new("make");
        make.arg("-C").arg(repository().join("guest"));
        make.arg(format!("KDIR={}", headers.display())).arg(format!("BUILD={}", out.display()));
        if faults {
            make.arg("EBB_FAULTS=1");
        }
        run(&mut make)?;
        // Replaced as a whole: somebody may be reading the last one.
        let new = out.join("stripped.new");
        run(Command::new("strip").arg("-g").arg("-o").arg(&new).arg(out.join("ebb.ko")))?;
        std::fs::rename(&new, &stripped).map_err(LabError::file(&stripped))
    })
}

/// Boots VMs at the same time, and loads the module in those whose image has it.
pub fn boot(configs: &[VmConfig]) -> Result<Vec<Vm>, VmError> {
    let mut vms = configs.iter().map(Vm::spawn).collect::<Result<Vec<_>, _>>()?;
    for (vm, config) in vms.iter_mut().zip(configs) {
        vm.wait_ready()?;
        if config.files.iter().any(|(name, _)| name == MODULE) {
            load(vm)?;
        }
    }
    Ok(vms)
}

/// Loads the module in a guest whose image has it ([`prepare`]). The error has what the
/// guest said.
pub fn load(vm: &Vm) -> Result<(), VmError> {
    vm.ask(|tool| tool.sh(LOAD, MINUTE)).map(drop)
}

/// What a daemon tells the agent of a VM that runs.
pub fn attachment(vm: &Vm) -> Result<Attach, QmpError> {
    let until = Instant::now() + MINUTE;
    // On a busy machine QEMU may greet late.
    let segments = loop {
        match agent_requests::segments(&mut qmp::Client::new(&vm.qmp_path), MINUTE) {
            Err(QmpError::Taken(..)) if Instant::now() < until => {}
            segments => break segments?,
        }
    };
    Ok(Attach { segments, running: true, firmware: Firmware::Seabios, ..Attach::default() })
}

/// `libebb_vmm.so`: `$EBB_AGENT`, else beside this program.
pub fn plugin() -> Result<PathBuf, LabError> {
    crate::ebb::built("EBB_AGENT", "libebb_vmm.so", "ebb-vmm")
}

/// The agent with the switches that break it, built into a folder of its own: no
/// agent that can lose pages comes near the real one.
fn faulty_plugin() -> Result<PathBuf, LabError> {
    let root = repository();
    let out = root.join("target/faults");
    once(out.join("release/deps/libebb_vmm.so"), || {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut cargo = Command::new(cargo);
        // As `make check` builds it for the agent's own tests.
        cargo.args(["test", "--no-run", "--release", "--quiet", "-p", "ebb-vmm"]);
        cargo.args(["--test", "handshake", "--features", "faults", "--target-dir"]);
        cargo.arg(&out).current_dir(root);
        cargo.envs([
            ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"),
            ("CARGO_PROFILE_RELEASE_DEBUG", "false"),
        ]);
        run(&mut cargo).map(drop)
    })
}

/// Makes a VM ready for tier guest: the agent in QEMU, listening at the returned
/// socket in `dir`, and the module at `/ebb.ko` of the guest.
pub fn prepare(config: &mut VmConfig, dir: &Path) -> Result<PathBuf, LabError> {
    let socket = dir.join(format!("{}.agent", config.name));
    config.files.push((MODULE.into(), module(&Image::get(config.kernel)?, false)?));
    config.args.push("-plugin".into());
    config.args.push(format!("file={},socket={}", plugin()?.display(), socket.display()));
    Ok(socket)
}

/// Gives a VM that is ready for tier guest an agent that leaves steps out, by their
/// names in `ebb_vmm::faults`.
pub fn leave_out(config: &mut VmConfig, faults: &str) -> Result<(), LabError> {
    let library = faulty_plugin()?;
    for argument in &mut config.args {
        if let Some((_, socket)) = argument.split_once(",socket=") {
            *argument = format!("file={},socket={socket},faults={faults}", library.display());
        }
    }
    Ok(())
}
