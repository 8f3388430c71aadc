//! VMs that libvirt manages and that have no QMP socket for Ebb: their QMP clients speak to a
//! thread of Ebb, which speaks libvirt's protocol with libvirt's daemon.
//!
//! `Libvirt::find` tells which daemon has a VM, `Libvirt::attach` makes its QMP client. The thread
//! connects to a libvirt daemon when the first VM needs it. Why Ebb has a libvirt client of its own
//! stands in ARCHITECTURE.md.
//!
//! `xdr.rs` is the encoding, `rpc.rs` the protocol, `calls.rs` its procedures, `bridge.rs` QMP on
//! one side and libvirt's calls on the other, `watch.rs` and `metadata.rs` a domain's settings, `worker.rs`
//! the thread.

mod bridge;
pub mod calls;
pub mod description;
pub mod metadata;
pub mod rpc;
mod watch;
mod worker;
pub mod xdr;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::probe::qemu::QemuProcess;
use crate::qmp::{Client, Words};
use crate::root::Root;
use crate::waker::Waker;

pub(crate) use self::watch::Watch;

/// Which libvirt daemon manages a domain, and the domain's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    socket: PathBuf,
    uri: &'static str,
    domain: String,
    /// The user that libvirt's daemon runs as.
    owner: u32,
}

impl Address {
    /// The daemon is the system's, not that of a user's session.
    pub fn is_systems(&self) -> bool {
        self.owner == 0
    }
}

#[derive(Debug)]
enum Ask {
    Attach(Attach),
    /// To follow this domain's metadata.
    Watch(Address, Watch),
}

/// A VM's QMP client that wants to speak with a domain, as the thread gets it.
#[derive(Debug)]
struct Attach {
    address: Address,
    end: OwnedFd,
    words: Words,
    monitor: bool,
}

/// The handle by which VMs reach the thread.
#[derive(Clone, Debug)]
pub(crate) struct Libvirt {
    root: Root,
    asks: Sender<Ask>,
    waker: Waker,
}

impl Libvirt {
    /// Starts the thread, which waits for the first VM.
    pub fn new(root: Root) -> std::io::Result<Libvirt> {
        let (asks, asked) = channel();
        let waker = Waker::new()?;
        let woken = waker.clone();
        let name = std::thread::Builder::new().name("libvirt".into());
        name.spawn(move || worker::work(&asked, &woken))?;
        Ok(Libvirt { root, asks, waker })
    }

    /// Which libvirt started this process: the one that wrote its pid file.
    pub fn find(&self, process: &QemuProcess) -> Option<Address> {
        let name = process.given.as_str();
        if name.contains('/') || name.starts_with('.') {
            return None;
        }
        let pid = process.id.pid;
        let uid = self.root.metadata(format!("/proc/{pid}")).ok()??.uid();
        let session = PathBuf::from(format!("/run/user/{uid}/libvirt"));
        let system = PathBuf::from("/run/libvirt");
        let places = [
            (&system, "qemu", "qemu:///system", 0),
            (&session, "qemu/run", "qemu:///session", uid),
        ];
        places.into_iter().find_map(|(dir, pids, uri, owner)| {
            let file = dir.join(pids).join(format!("{name}.pid"));
            let its = pid_in(&self.root.path(&file), owner) == Some(pid);
            let socket = its.then(|| self.socket(dir))?;
            Some(Address { socket: self.root.path(socket), uri, domain: name.to_owned(), owner })
        })
    }

    /// The daemon's socket: that of QEMU's driver, or of all drivers together. A daemon that does
    /// not run may have none.
    fn socket(&self, dir: &Path) -> PathBuf {
        let [driver, all] = ["virtqemud-sock", "libvirt-sock"].map(|name| dir.join(name));
        let is_there = matches!(self.root.metadata(&driver), Ok(Some(_)));
        if is_there { driver } else { all }
    }

    /// A client that speaks with this domain. `monitor`: see [`bridge::Bridge::new`].
    pub fn attach(&self, address: Address, monitor: bool) -> std::io::Result<Client> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, end) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let words = Words::default();
        let label = PathBuf::from(format!("libvirt domain {}", address.domain));
        let client = Client::over(ours, label, words.clone());
        self.ask(Ask::Attach(Attach { address, end, words, monitor }))?;
        Ok(client)
    }

    /// Follows this domain's metadata until the result is dropped.
    pub fn watch(&self, address: Address) -> std::io::Result<Watch> {
        let watch = Watch::default();
        self.ask(Ask::Watch(address, watch.clone()))?;
        Ok(watch)
    }

    fn ask(&self, ask: Ask) -> std::io::Result<()> {
        let ended = |_| std::io::Error::other("Ebb's thread for it has ended");
        self.asks.send(ask).map_err(ended)?;
        self.waker.wake();
        Ok(())
    }
}

/// The pid in a pid file of this user. A user may have put anything in its place. So a link is not
/// followed, and only a regular file that belongs to the user is read.
fn pid_in(file: &Path, owner: u32) -> Option<u32> {
    use rustix::fs::{FileType, Mode, OFlags, fstat, open};
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = open(file, OFlags::RDONLY | flags, Mode::empty()).ok()?;
    let stat = fstat(&fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_uid != owner {
        return None;
    }
    let mut text = [0; 16];
    let n = rustix::io::read(&fd, &mut text).ok()?;
    str::from_utf8(&text[..n]).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_pid_file_is_a_file_of_its_owner_and_nothing_else() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let me = rustix::process::getuid().as_raw();
        fs::write(at("a"), "4711\n").unwrap();
        assert_eq!(pid_in(&at("a"), me), Some(4711));
        assert_eq!(pid_in(&at("a"), me + 1), None, "another's");
        symlink(at("a"), at("link")).unwrap();
        assert_eq!(pid_in(&at("link"), me), None);
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(pid_in(&at("fifo"), me), None, "and does not wait");
        fs::write(at("b"), "4711".repeat(1000)).unwrap();
        assert_eq!(pid_in(&at("b"), me), None);
    }

    /// Its settings may say that nothing is to be taken from it.
    #[test]
    fn a_domain_is_found_although_its_libvirt_does_not_run() {
        use ebb_core::sample::VmId;
        let dir = tempfile::tempdir().unwrap();
        let me = rustix::process::getuid().as_raw();
        let pids = dir.path().join(format!("run/user/{me}/libvirt/qemu/run"));
        fs::create_dir_all(dir.path().join("proc/10")).unwrap();
        fs::create_dir_all(&pids).unwrap();
        let libvirt = Libvirt::new(Root::at(dir.path())).unwrap();
        let vm = QemuProcess::plain(VmId { pid: 10, start: 7 }, "a".into());
        assert_eq!(libvirt.find(&vm), None);
        fs::write(pids.join("a.pid"), "10\n").unwrap();
        assert_eq!(libvirt.find(&vm).unwrap().domain, "a");
    }
}
