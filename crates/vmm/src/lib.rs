//! Ebb's agent inside a VMM: `libebb_vmm.so`.
//!
//! It gives free guest memory back from within, where the page tables are: the
//! daemon tells it where RAM is and how much to give, the guest's map says what
//! is free, and `recycle` proves each page before it discards it. Nothing happens
//! before a daemon speaks. When it goes, all protection is lifted; what was opened to KSM or
//! closed to it stays so.
//!
//! It is loaded by QEMU's `-plugin file=…/libebb_vmm.so,socket=PATH`, which works
//! with every accelerator, or by `LD_PRELOAD` with `EBB_AGENT_SOCKET=PATH` (not
//! together with `-daemonize`: QEMU forks away from what was preloaded). The
//! plug-in interface is used for loading only.
//!
//! It must never harm the VM that it is in: no panic leaves its threads, memory
//! is bounded by the VM's RAM (a few KiB per GiB), it waits for no lock of the
//! VMM, and a guest write waits for one window at most, about a millisecond by the clock; longer
//! where its thread loses its CPU (real-time priority prevents that where it may have it).
// System calls on raw addresses, symbols for the VMM's loader, and a constructor
// are what this crate is for. Each block says why it is sound.
#![allow(unsafe_code)]

pub mod agent;
pub mod blockers;
pub mod device_watch;
pub mod faults;
pub mod find_module;
pub mod guard;
pub mod hasher;
pub mod ksm_ranges;
pub mod madvise_hook;
pub mod priority;
pub mod ram;
pub mod recycle;
pub mod selftest;
pub mod server;
pub mod sys;
pub mod uffd;

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use crate::faults::Faults;
use crate::server::{Peers, Server, complain};

/// Version of the plug-in interface that we claim. QEMU reads it when it has
/// loaded us, after the constructor ran, and refuses what lies outside of its own
/// MIN..CURRENT; no number fits all. We use nothing of the interface, so the
/// constructor claims what `version_for` finds this QEMU to know.
// SAFETY: the name is QEMU's for exactly this; an AtomicI32 is laid out as an int.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static qemu_plugin_version: AtomicI32 = AtomicI32::new(OLDEST);

/// Accepted by QEMU before 9.0, which takes 0 and 1.
const OLDEST: i32 = 1;

/// Functions that came with a version of the interface or after it, newest first:
/// who exports one knows that version. Not `qemu_plugin_register_vcpu_discon_cb`:
/// QEMU 10.2.0 has it and still is at 5. The table of releases is in
/// docs/internals.md.
const MARKS: [(&CStr, i32); 4] = [
    (c"qemu_plugin_set_pc", 6),
    (c"qemu_plugin_write_register", 5),
    (c"qemu_plugin_read_memory_vaddr", 4),
    (c"qemu_plugin_num_vcpus", 2),
];

/// The highest version that a QEMU with these exports surely knows: least likely
/// to be below the MIN of one that came after this was written.
fn version_for(exports: impl Fn(&CStr) -> bool) -> i32 {
    MARKS.iter().find(|(name, _)| exports(name)).map_or(OLDEST, |m| m.1)
}

/// Keeps the server for the life of the process.
static SERVER: Mutex<Option<Server>> = Mutex::new(None);

extern "C" fn at_load() {
    // No panic may leave: the caller is the dynamic loader.
    let _ = std::panic::catch_unwind(|| {
        qemu_plugin_version.store(version_for(|name| sys::symbol(name) != 0), SeqCst);
        if let Some(path) = std::env::var_os("EBB_AGENT_SOCKET").filter(|_| in_qemu()) {
            // What this process starts is not a VMM.
            // SAFETY: constructors run before the process has a second thread.
            unsafe { std::env::remove_var("EBB_AGENT_SOCKET") };
            let own = std::env::var_os("EBB_AGENT_PEER").is_some_and(|v| v == "own");
            start(Path::new(&path), if own { Peers::Own } else { Peers::Root }, "");
        }
    });
}

#[used]
// SAFETY: the section is a list of such functions; it has no other meaning.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

/// By the name of the executable: `LD_PRELOAD` reaches shells and wrappers too.
fn in_qemu() -> bool {
    let exe = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let name = exe.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.starts_with("qemu") || name.starts_with("kvm")
}

/// Starts the server; a failure is printed and otherwise ignored.
fn start(path: &Path, peers: Peers, faults: &str) {
    let Some(faults) = Faults::parse(faults) else {
        return eprintln!("ebb agent: this build knows no faults `{faults}`");
    };
    match (Server::start(path, peers, faults), SERVER.lock()) {
        (Ok(server), Ok(mut held)) => *held = Some(server),
        (Err(e), _) => complain(&path.display().to_string(), &e),
        (_, Err(_)) => {}
    }
}

/// QEMU's entry point. 0: loaded. Only a missing `socket=` or a wrong `peer=` is an error,
/// which ends QEMU before it has a guest; what goes wrong later costs the agent alone.
///
/// # Safety
/// QEMU passes `argc` strings that end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    _id: u64,
    _info: *const c_void,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    let count = usize::try_from(argc).unwrap_or(0);
    // SAFETY: as promised above; nothing is kept.
    let arguments = (0..count).map(|i| unsafe { CStr::from_ptr(*argv.add(i)).to_bytes() });
    let arguments: Vec<&[u8]> = arguments.collect();
    let find = |key: &[u8]| arguments.iter().find_map(|a| a.strip_prefix(key));
    let Some(path) = find(b"socket=").filter(|p| !p.is_empty()) else {
        eprintln!("ebb agent: say where to listen: -plugin file=…/libebb_vmm.so,socket=PATH");
        return -1;
    };
    let faults = String::from_utf8_lossy(find(b"faults=").unwrap_or_default()).into_owned();
    let peers = match find(b"peer=") {
        None | Some(b"root") => Peers::Root,
        Some(b"own") => Peers::Own,
        Some(other) => {
            let other = String::from_utf8_lossy(other);
            eprintln!("ebb agent: peer={other} is neither root nor own");
            return -1;
        }
    };
    let path = Path::new(OsStr::from_bytes(path)).to_path_buf();
    let _ = std::panic::catch_unwind(|| start(&path, peers, &faults));
    0
}
