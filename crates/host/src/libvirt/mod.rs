//! VMs that libvirt manages and that have no QMP socket for Ebb: their QMP clients speak to a
//! thread of Ebb, which speaks libvirt's protocol with libvirt's daemon.
//!
//! `Libvirt::find` tells which daemon has a VM, `Libvirt::attach` makes its QMP client. The thread
//! connects to a libvirt daemon when the first VM needs it. Why Ebb has a libvirt client of its own
//! stands in ARCHITECTURE.md.
//!
//! `xdr.rs` is the encoding, `rpc.rs` the protocol, `calls.rs` its procedures, `bridge.rs` QMP on
//! one side and libvirt's calls on the other, `watch.rs` and `metadata.rs` a domain's metadata,
//! `worker.rs` the thread.

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
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::background_look::BackgroundLook;
use crate::probe::process::read_credentials;
use crate::probe::qemu::QemuProcess;
use crate::qmp::{Client, Words};
use crate::root::Root;
use crate::sockets::{self, fd_path};
use crate::waker::Waker;

pub(crate) use self::watch::Watch;

/// How long a look into a container is awaited.
const PATIENCE: Duration = Duration::from_millis(50);
/// The class of an error that is libvirt's, not QEMU's: QEMU was not asked.
pub const NOT_ASKED: &str = "NotAsked";
/// The socket of QEMU's driver, and that of all drivers together.
const SOCKETS: [&str; 2] = ["virtqemud-sock", "libvirt-sock"];

/// Which libvirt daemon manages a domain, and the domain's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    socket: PathBuf,
    /// Equal for all domains of one daemon.
    key: PathBuf,
    uri: &'static str,
    domain: String,
    /// The user that libvirt's daemon runs as; `None`: any, in a container.
    owner: Option<u32>,
    /// The root directory of the container that the daemon is in.
    container: Option<PathBuf>,
}

impl Address {
    /// The daemon is the system's, not that of a user's session.
    pub fn is_systems(&self) -> bool {
        self.owner == Some(0)
    }

    fn connect(&self) -> rustix::io::Result<OwnedFd> {
        let Some(container) = &self.container else {
            return self.connect_here();
        };
        let path = self.socket.strip_prefix(container).map_err(|_| Errno::INVAL)?;
        let path = open_inside(container, path)?;
        // The process may have ended, and its number may be another's by now.
        if inode(&path)? != self.key {
            return Err(Errno::STALE);
        }
        sockets::connect(&fd_path(&path))
    }

    /// A daemon that was killed leaves its socket behind: then one listens at the other, if any does.
    fn connect_here(&self) -> rustix::io::Result<OwnedFd> {
        let others = SOCKETS.map(|name| self.socket.with_file_name(name));
        match sockets::connect(&self.socket) {
            Err(e @ (Errno::NOENT | Errno::CONNREFUSED)) => {
                let mut others = others.iter().filter(|path| **path != self.socket);
                others.find_map(|path| sockets::connect(path).ok()).ok_or(e)
            }
            connected => connected,
        }
    }

    /// Whether the pid file in its container can have been written by the daemon that the process
    /// `peer` is: it is in QEMU's pid namespace.
    fn is_of(&self, peer: u32) -> bool {
        let Some(qemu) = self.container.as_ref().and_then(|c| c.parent()) else { return true };
        let namespace = |process: &Path| std::fs::read_link(process.join("ns/pid")).ok();
        let its = namespace(qemu);
        its.is_some() && namespace(&qemu.with_file_name(peer.to_string())) == its
    }
}

/// What the thread is asked to do.
#[derive(Debug)]
enum WorkerRequest {
    /// A VM's QMP client wants to speak with a domain; `end` is the thread's end of its socket.
    Attach { address: Address, end: OwnedFd, words: Words, monitor: bool },
    /// To follow this domain's metadata.
    Watch(Address, Watch),
}

/// The handle by which VMs reach the thread.
#[derive(Clone, Debug)]
pub(crate) struct Libvirt {
    root: Root,
    containers: bool,
    requests: Sender<WorkerRequest>,
    waker: Waker,
}

impl Libvirt {
    /// Starts the thread, which waits for the first VM. `containers`: VMs in containers may be
    /// reached through a libvirt in there.
    pub fn new(root: Root, containers: bool) -> std::io::Result<Libvirt> {
        let (requests, received) = channel();
        let waker = Waker::new()?;
        let woken = waker.clone();
        let name = std::thread::Builder::new().name("libvirt".into());
        name.spawn(move || worker::work(&received, &woken))?;
        Ok(Libvirt { root, containers, requests, waker })
    }

    /// Which libvirt started this process: the one that wrote its pid file. What a container has
    /// mounted may keep a look at it waiting: that look is `inside`, for each process its own.
    pub fn find(
        &self,
        process: &QemuProcess,
        inside: &mut BackgroundLook<Option<Address>>,
    ) -> Option<Address> {
        self.find_here(process).or_else(|| {
            if !self.containers {
                return None;
            }
            let (libvirt, process) = (self.clone(), process.clone());
            inside.look(move || libvirt.find_inside(&process), PATIENCE).flatten()
        })
    }

    /// Which libvirt started this process, where it is not in a container.
    pub fn find_here(&self, process: &QemuProcess) -> Option<Address> {
        here(&self.root, process)
    }

    /// The libvirt in the container that the process is in; KubeVirt has one for each VM. The
    /// files in there are the container's: no path among them is followed out of it.
    fn find_inside(&self, process: &QemuProcess) -> Option<Address> {
        let (pid, name) = (process.id.pid, name(process)?);
        let namespace = |of: &str| self.root.read_link(format!("/proc/{of}/ns/mnt")).ok()?;
        if namespace(&pid.to_string())? == namespace("self")? {
            return None;
        }
        let inner = read_credentials(&self.root, pid).ok()??.inner.unwrap_or(pid);
        let container = self.root.path(format!("/proc/{pid}/root"));
        let dir = Path::new("run/libvirt");
        let places = [("qemu", "qemu:///system"), ("qemu/run", "qemu:///session")];
        places.into_iter().find_map(|(pids, uri)| {
            let file = dir.join(pids).join(pid_file(name));
            if pid_of(&open_inside(&container, &file).ok()?, None) != Some(inner) {
                return None;
            }
            let mut sockets = SOCKETS.map(|name| dir.join(name)).into_iter();
            let (path, socket) =
                sockets.find_map(|path| Some((open_inside(&container, &path).ok()?, path)))?;
            let key = inode(&path).ok()?;
            let (socket, domain) = (container.join(socket), name.to_owned());
            let container = Some(container.clone());
            Some(Address { socket, key, uri, domain, owner: None, container })
        })
    }

    /// A client that speaks with this domain. `monitor`: see [`bridge::Bridge::new`].
    pub fn attach(&self, address: Address, monitor: bool) -> std::io::Result<Client> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, end) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let words = Words::default();
        let label = PathBuf::from(format!("libvirt domain {}", address.domain));
        let client = Client::over(ours, label, words.clone());
        self.ask(WorkerRequest::Attach { address, end, words, monitor })?;
        Ok(client)
    }

    /// Follows this domain's metadata until the result is dropped.
    pub fn watch(&self, address: Address) -> std::io::Result<Watch> {
        let watch = Watch::default();
        self.ask(WorkerRequest::Watch(address, watch.clone()))?;
        Ok(watch)
    }

    pub fn wake(&self) {
        self.waker.wake();
    }

    fn ask(&self, request: WorkerRequest) -> std::io::Result<()> {
        let ended = |_| std::io::Error::other("Ebb's thread for it has ended");
        self.requests.send(request).map_err(ended)?;
        self.waker.wake();
        Ok(())
    }
}

/// The name of the domain that this process is of a libvirt that is not in a container.
pub fn domain_of(root: &Root, process: &QemuProcess) -> Option<String> {
    Some(here(root, process)?.domain)
}

fn here(root: &Root, process: &QemuProcess) -> Option<Address> {
    let (pid, name) = (process.id.pid, name(process)?);
    let uid = root.metadata(format!("/proc/{pid}")).ok()??.uid();
    let session = PathBuf::from(format!("/run/user/{uid}/libvirt"));
    let system = PathBuf::from("/run/libvirt");
    let places =
        [(&system, "qemu", "qemu:///system", 0), (&session, "qemu/run", "qemu:///session", uid)];
    places.into_iter().find_map(|(dir, pids, uri, owner)| {
        let file = dir.join(pids).join(pid_file(name));
        let its = pid_in(&root.path(&file), owner) == Some(pid);
        let socket = root.path(its.then(|| socket(root, dir))?);
        let (key, domain) = (socket.clone(), name.to_owned());
        Some(Address { socket, key, uri, domain, owner: Some(owner), container: None })
    })
}

/// The daemon's socket: that of QEMU's driver, or of all drivers together. A daemon that does
/// not run may have none.
fn socket(root: &Root, dir: &Path) -> PathBuf {
    let [driver, all] = SOCKETS.map(|name| dir.join(name));
    let is_there = matches!(root.metadata(&driver), Ok(Some(_)));
    if is_there { driver } else { all }
}

/// The pid in a pid file of this user. A user may have put anything in its place. So a link is not
/// followed, and only a regular file that belongs to the user is read.
fn pid_in(file: &Path, owner: u32) -> Option<u32> {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    pid_of(&open(file, OFlags::PATH | flags, Mode::empty()).ok()?, Some(owner))
}

/// The pid in a file, which was opened as a path only: to open a device may have an effect.
fn pid_of(path: &OwnedFd, owner: Option<u32>) -> Option<u32> {
    let stat = fstat(path).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || owner.is_some_and(|owner| stat.st_uid != owner) {
        return None;
    }
    // Its owner may hold a lease on it, which a waiting open waits for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(fd_path(path), flags, Mode::empty()).ok()?;
    let mut text = [0; 16];
    let n = rustix::io::read(&file, &mut text).ok()?;
    str::from_utf8(&text[..n]).ok()?.trim().parse().ok()
}

/// Opens what is below a directory, as a path only; no link in it leads out of the directory.
fn open_inside(directory: &Path, path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = open(directory, flags, Mode::empty())?;
    openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)
}

/// The name of a domain, where that can be part of a file's name.
fn name(process: &QemuProcess) -> Option<&str> {
    let name = process.own_name.as_str();
    (!name.contains('/')).then_some(name)
}

/// The name of a domain's pid file: libvirt writes the domain's name in it as in XML.
fn pid_file(name: &str) -> String {
    let escaped = |c| match c {
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '&' => "&amp;".into(),
        '"' => "&quot;".into(),
        '\'' => "&apos;".into(),
        _ => String::from(c),
    };
    name.chars().map(escaped).collect::<String>() + ".pid"
}

fn inode(file: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let stat = fstat(file)?;
    Ok(PathBuf::from(format!("{}:{}", stat.st_dev, stat.st_ino)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ebb_core::sample::VmId;

    use super::*;
    use crate::testing::tree;

    fn vm(name: &str) -> QemuProcess {
        QemuProcess::plain(VmId { pid: 10, start: 7 }, name.into())
    }

    fn libvirt(root: &Root, containers: bool) -> Libvirt {
        Libvirt::new(root.clone(), containers).unwrap()
    }

    #[test]
    fn a_pid_file_is_a_file_of_its_owner_and_nothing_else() {
        let root = tree(&[("a", "4711\n")]);
        let at = |name: &str| root.path(name);
        let me = rustix::process::getuid().as_raw();
        assert_eq!(pid_in(&at("a"), me), Some(4711));
        assert_eq!(pid_in(&at("a"), me + 1), None, "another's");
        root.link(at("a"), "link");
        assert_eq!(pid_in(&at("link"), me), None);
        assert_eq!(pid_in(&root.pipe("pipe"), me), None, "and does not wait");
        // Who holds a lease on it makes others wait.
        let leased = fs::File::open(at("a")).unwrap();
        crate::sys::lease(&leased).unwrap();
        assert_eq!(pid_in(&at("a"), me), None, "and does not wait");
        drop(leased);
        root.put("b", "4711".repeat(1000));
        assert_eq!(pid_in(&at("b"), me), None);
    }

    #[test]
    fn a_domain_is_found_whatever_its_name_is() {
        // The pid file must be root's.
        if !rustix::process::getuid().is_root() {
            return;
        }
        let root = tree(&[]);
        root.dir("/proc/10");
        let libvirt = libvirt(&root, false);
        // As libvirt 9.0 names them.
        for (name, file) in [
            ("web 1", "web 1.pid"),
            (".dot\\", ".dot\\.pid"),
            ("q\"uo'te", "q&quot;uo&apos;te.pid"),
            ("<b>&amp;", "&lt;b&gt;&amp;amp;.pid"),
        ] {
            let file = format!("/run/libvirt/qemu/{file}");
            root.put(&file, "10\n");
            let found = libvirt.find_here(&vm(name)).map(|address| address.domain);
            assert_eq!(found.as_deref(), Some(name));
            root.remove(file);
        }
    }

    #[test]
    fn a_domain_in_a_container_is_found_there_where_that_is_allowed_and_nothing_leads_out() {
        let root = tree(&[
            ("/proc/10/status", "Uid: 107 107 107 107\nNSpid: 10 7\n"),
            ("/proc/10/root/run/libvirt/qemu/run/a.pid", "7\n"),
            ("/out/a.pid", "7\n"),
        ]);
        root.link("mnt:[1]", "/proc/self/ns/mnt");
        root.link("mnt:[2]", "/proc/10/ns/mnt");
        let inside = "/proc/10/root/run/libvirt";
        let pid_file = format!("{inside}/qemu/run/a.pid");
        let (of, vm) = (|containers| libvirt(&root, containers), vm("a"));
        assert_eq!(of(true).find_inside(&vm), None, "without a socket");
        let listener = root.listen(format!("{inside}/{}", SOCKETS[0]));
        let found = of(true).find_inside(&vm).unwrap();
        assert_eq!((found.domain.as_str(), found.uri), ("a", "qemu:///session"));
        assert!(!found.is_systems());
        found.connect().unwrap();
        listener.accept().unwrap();
        // The number is another process's by now, with a libvirt of its own.
        let other = Address { key: "1:1".into(), ..found.clone() };
        assert_eq!(other.connect().err(), Some(Errno::STALE));
        // A process of a namespace below the container's can have any pid there.
        for (peer, namespace) in [(10, "pid:[2]"), (20, "pid:[2]"), (21, "pid:[3]")] {
            root.link(namespace, format!("/proc/{peer}/ns/pid"));
        }
        assert_eq!([20, 21, 22].map(|peer| found.is_of(peer)), [true, false, false]);
        assert_eq!(of(false).find(&vm, &mut BackgroundLook::default()), None);
        // Its pid file leads to one outside.
        let target = root.path(&pid_file);
        for out in [root.path("/out/a.pid"), "../../../../../../../out/a.pid".into()] {
            root.link(&out, &pid_file);
            assert!(out.is_relative() || fs::read(&target).is_ok());
            assert_eq!(of(true).find_inside(&vm), None, "{out:?}");
        }
        // A device is not opened.
        root.remove(&pid_file);
        root.pipe(&pid_file);
        assert_eq!(of(true).find_inside(&vm), None);
        root.remove(&pid_file);
        // It is another process's.
        root.put(&pid_file, "10\n");
        assert_eq!(of(true).find_inside(&vm), None);
    }

    /// A virtqemud that was killed leaves its socket behind.
    #[test]
    fn where_nothing_listens_at_one_socket_the_other_one_is_used() {
        let root = tree(&[]);
        let of = |socket: &str| Address {
            socket: root.path(format!("/run/libvirt/{socket}")),
            ..Address::default()
        };
        root.dir("/run/libvirt");
        assert_eq!(of(SOCKETS[0]).connect().err(), Some(Errno::NOENT));
        drop(root.listen(format!("/run/libvirt/{}", SOCKETS[0])));
        assert_eq!(of(SOCKETS[0]).connect().err(), Some(Errno::CONNREFUSED));
        let all = root.listen(format!("/run/libvirt/{}", SOCKETS[1]));
        of(SOCKETS[0]).connect().unwrap();
        all.accept().unwrap();
        // It was not there yet when the address was found, and has taken over since.
        drop(all);
        root.remove(format!("/run/libvirt/{}", SOCKETS[0]));
        let driver = root.listen(format!("/run/libvirt/{}", SOCKETS[0]));
        of(SOCKETS[1]).connect().unwrap();
        driver.accept().unwrap();
    }

    /// Its settings may say that nothing is to be taken from it.
    #[test]
    fn a_domain_is_found_although_its_libvirt_does_not_run() {
        let root = tree(&[]);
        root.dir("/proc/10");
        let me = rustix::process::getuid().as_raw();
        let (libvirt, vm) = (libvirt(&root, false), vm("a"));
        assert_eq!(libvirt.find_here(&vm), None);
        root.put(format!("/run/user/{me}/libvirt/qemu/run/a.pid"), "10\n");
        assert_eq!(libvirt.find_here(&vm).unwrap().domain, "a");
        // The configuration may have its socket in a section of another name.
        let mut named = vm.clone();
        named.call("front".into()).unwrap();
        assert_eq!(libvirt.find_here(&named).unwrap().domain, "a");
    }
}
