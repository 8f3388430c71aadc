//! An agent in a process without privilege, as libvirt runs QEMU: it cannot make
//! a userfaultfd that sees faults of the kernel, so the daemon passes on what it
//! opened. The process is a stand-in for QEMU (`standin.c`) run as nobody; kernel,
//! socket and descriptors are real. Needs root; skipped, with the reason, without.
#![allow(unsafe_code)]

mod common;
#[allow(dead_code)]
#[path = "../../lab/src/agent_requests.rs"]
mod requests;
#[path = "common/standin.rs"]
mod standin;

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::*;
use ebb_core::wire::{AgentState, Attach, Command, Recycle};
use ebb_core::wire::{Refused, Reply, ReplyResult, Request};
use ebb_host::agent::{Agent, AgentError};
use requests::Requests as _;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use standin::{Place, Standin};

const NOBODY: u32 = 65534;
const MIB: u64 = 64;
const SOON: Duration = Duration::from_secs(10);

/// One test at a time: a child that the other one forks holds copies of our
/// connections until it is QEMU's stand-in, and the agent serves one. `None`: it cannot be tried
/// here.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let why = if !rustix::process::geteuid().is_root() {
        "only root can start a process of another user"
    } else if sysctl.map_or(true, |s| s.trim() != "0") {
        "vm.unprivileged_userfaultfd is not 0: every process may make a userfaultfd"
    } else if device().is_none() {
        "/dev/userfaultfd cannot be opened (Linux 6.1 has it)"
    } else {
        return Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner));
    };
    println!("skipped: {why}");
    None
}

fn device() -> Option<File> {
    File::options().read(true).write(true).open("/dev/userfaultfd").ok()
}

/// A VMM of nobody's whose RAM is the guest's memory.
struct Vmm {
    standin: Standin,
    guest: Arc<Guest>,
    attach: Attach,
    place: Place,
}

impl Vmm {
    fn start(name: &str) -> Vmm {
        let place = Place::new(name);
        let guest = Guest::new(MIB, RamKind::Memfd);
        let program = place.compile(&["-DEXPORTS=1"]);
        let mut command = place.command(&program, 0, 1);
        command.arg((MIB << 20).to_string()).uid(NOBODY).gid(NOBODY);
        let ram = guest.file.as_ref().unwrap().as_raw_fd();
        assert!(ram != 100, "a copy of a descriptor onto itself would be closed");
        // SAFETY: one call that is allowed after fork; the file outlives it.
        unsafe {
            command.pre_exec(move || match libc::dup2(ram, 100) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let mut standin = Standin::start(command);
        assert_eq!(standin.says().0, "loaded");
        let (word, hva) = standin.says();
        assert_eq!(word, "ram");
        let mut attach = guest.attach();
        attach.segments[0].hva = hva;
        Vmm { standin, guest, attach, place }
    }

    fn agent(&self) -> Agent {
        let agent = Agent::connect(self.place.socket()).unwrap();
        assert_eq!(agent.peer_pid(), Some(self.standin.child.id()));
        agent
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.standin.child.id())).unwrap().count()
    }

    /// Refused, with what kind and in what words.
    fn refusal(&self, device: Option<BorrowedFd<'_>>) -> (Refused, String) {
        match self.agent().attach(self.attach.clone(), device, SOON) {
            Err(AgentError::Refused(_, no)) => (no.kind, no.text),
            other => panic!("{other:?}"),
        }
    }

    /// Attach as a daemon that breaks the rules would: any descriptors with it.
    fn raw(&self, announced: bool, descriptors: &[BorrowedFd<'_>]) -> Reply {
        let socket = UnixStream::connect(self.place.socket()).unwrap();
        let attach = Attach { descriptor: announced, ..self.attach.clone() };
        let line = Request { id: 9, command: Command::Attach(attach) }.line();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let parts = [IoSlice::new(&line)];
        rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
        let mut text = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(socket), &mut text).unwrap();
        Reply::parse(text.trim_end().as_bytes()).unwrap()
    }
}

fn until(agent: &mut Agent, what: &str, good: impl Fn(&ebb_core::wire::Status) -> bool) {
    let is = within(SOON, || good(&agent.status(false, SOON).unwrap()));
    assert!(is, "{what}: {:?}", agent.status(false, SOON));
}

#[test]
fn what_the_daemon_opened_makes_an_unprivileged_vmm_recycle() {
    let Some(_alone) = alone() else { return };
    let mut vmm = Vmm::start("unprivileged");
    let (kind, text) = vmm.refusal(None);
    assert!(kind == Refused::Aside && text.contains("may not make a userfaultfd"), "{text}");
    let before = vmm.descriptors();
    let _beats = vmm.guest.beating();
    let mut agent = vmm.agent();
    let device = device().unwrap();
    agent.attach(vmm.attach.clone(), Some(device.as_fd()), SOON).unwrap();
    until(&mut agent, "ready", |s| s.state == AgentState::Ready);
    vmm.guest.fill_and_free(FIRST, 3000);
    let done = agent.recycle(Recycle { budget_ms: 5000, ..Recycle::default() }, SOON).unwrap();
    assert_eq!(done.bytes.0, 3000 * 4096);
    assert!((FIRST..FIRST + 3000).all(|p| vmm.guest.holds(p, 0)));
    // A write of the kernel to guest page 0 waits for the agent too: it would fail
    // with a userfaultfd that any process may make.
    vmm.standin.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    until(&mut agent, "the tripwire", |s| s.counters.trips == 1);
    until(&mut agent, "ready again", |s| s.state == AgentState::Ready);
    assert_eq!(vmm.guest.word(0).load(SeqCst), u64::from(b'x'));
    // The daemon goes: what it brought goes with it.
    drop(agent);
    let closed = within(SOON, || vmm.descriptors() <= before);
    assert!(closed, "{} descriptors, {before}", vmm.descriptors());
}

#[test]
fn descriptors_of_anything_else_are_closed_refused_and_said() {
    let Some(_alone) = alone() else { return };
    let vmm = Vmm::start("foreign");
    vmm.refusal(None);
    let before = vmm.descriptors();
    let (good, null) = (device().unwrap(), File::open("/dev/null").unwrap());
    let memfd = vmm.guest.file.as_ref().unwrap();
    let uffd = ebb_vmm::uffd::Uffd::open(Some(good.as_fd()), true).unwrap();
    for other in [null.as_fd(), memfd.as_fd(), uffd.fd()] {
        let (kind, text) = vmm.refusal(Some(other));
        assert!(kind == Refused::Aside && text.contains("not one of /dev/userfaultfd"), "{text}");
    }
    let good = good.as_fd();
    for (announced, list, words) in [
        (true, &[][..], "did not arrive"),
        (false, &[good], "does not name"),
        (true, &[good, good], "several descriptors"),
        (false, &[good; 5], "several descriptors"),
        (true, &[good; 60], "several descriptors"),
    ] {
        match vmm.raw(announced, list).result {
            ReplyResult::Error(no) => assert!(no.text.contains(words), "{words}: {no}"),
            other => panic!("{words}: {other:?}"),
        }
    }
    // Nothing stays open; the agent is as good as new.
    assert!(vmm.descriptors() <= before + 1, "{} descriptors, {before}", vmm.descriptors());
    let _beats = vmm.guest.beating();
    let mut agent = vmm.agent();
    agent.attach(vmm.attach.clone(), Some(good), SOON).unwrap();
    until(&mut agent, "ready", |s| s.state == AgentState::Ready);
}
