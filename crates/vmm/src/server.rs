//! The socket on which the agent waits for its daemon.
//!
//! One thread, one daemon at a time, one request after the other. The peer must
//! be root; with `peer=own` our own user may as well. Under libvirt that is every other
//! VM's QEMU, so it is never the default. When it goes, or says something that is not of the
//! protocol, all protection is lifted and the agent waits for the next one.
//!
//! The thread keeps the VMM's priority, and has more while a window is open (`priority`).

use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::wire::{Command, Lines, Refusal, Refused, Reply, ReplyResult, Request};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};

use crate::agent::Agent;
use crate::faults::Faults;
use crate::sys;

/// How long an answer may take to go out before its daemon is given up.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// A call that could not be taken is tried again after this: the VMM may have no descriptor left.
const CALL_AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    #[default]
    Root,
    /// Root and the VMM's own user.
    Own,
}

/// A listening agent. In a VMM it lives as long as the process; in tests,
/// dropping it ends it.
#[derive(Debug)]
pub struct Server {
    quit: Arc<OwnedFd>,
    thread: Option<std::thread::JoinHandle<()>>,
    path: PathBuf,
}

impl Server {
    /// Listens at `path` (mode 0600) on a thread of its own. A socket that no process
    /// serves any more is replaced.
    pub fn start(path: &Path, peers: Peers, faults: Faults) -> Result<Server> {
        let listener = listen(path)?;
        sys::close_in_children(Some(listener.as_fd()));
        let quit = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let theirs = Arc::clone(&quit);
        let thread = std::thread::Builder::new().name("ebb-agent".into()).spawn(move || {
            sys::block_signals();
            // A panic ends the agent, not the VMM: unwinding closes the
            // userfaultfd, which lifts all protection.
            let serve = || serve(&listener, &theirs, peers, faults);
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve));
            sys::close_in_children(None);
        })?;
        Ok(Server { quit, thread: Some(thread), path: path.into() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.quit, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn listen(path: &Path) -> Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let listener = socket()?;
    // The file gets this mode when it is made: a path may be another file's by the next call.
    rustix::fs::fchmod(&listener, Mode::from_raw_mode(0o600))?;
    if let Err(e) = rustix::net::bind(&listener, &address) {
        let served = rustix::net::connect(&socket()?, &address) != Err(Errno::CONNREFUSED);
        let file = rustix::fs::lstat(path)?;
        let socket = FileType::from_raw_mode(file.st_mode).is_socket();
        if e != Errno::ADDRINUSE || served || !socket {
            return Err(e.into());
        }
        std::fs::remove_file(path)?;
        rustix::net::bind(&listener, &address)?;
    }
    rustix::net::listen(&listener, 4)?;
    Ok(listener)
}

/// What a daemon sent and what is to be done for it, without the socket.
#[derive(Debug, Default)]
pub struct Session {
    lines: Lines,
    /// Descriptors that came since the last request that takes one, the first two: one is meant for
    /// the next.
    arrived: Vec<OwnedFd>,
}

impl Session {
    /// Takes bytes as they come and does what is asked in whole lines: `each`
    /// gets the line of each answer, in order, and says whether to go on.
    /// `interrupt` as for [`Agent::execute`]. `false`: this is no daemon of ours.
    pub fn take(
        &mut self,
        bytes: &[u8],
        agent: &mut Agent,
        interrupt: &mut dyn FnMut() -> bool,
        each: &mut dyn FnMut(&[u8]) -> bool,
    ) -> bool {
        let mut requests = Vec::new();
        let fed = self.lines.feed(bytes, |line| requests.push(Request::parse(line)));
        for request in requests {
            let reply = match request {
                Ok(r) => Reply { id: r.id, result: self.execute(&r.command, agent, interrupt) },
                Err(e) => Reply { id: 0, result: no(&ebb_core::wire::clip(&e.0)) },
            };
            if !each(&reply.line()) {
                return false;
            }
        }
        fed.is_ok()
    }

    /// A descriptor came.
    pub fn arrive(&mut self, fd: OwnedFd) {
        if self.arrived.len() < 2 {
            self.arrived.push(fd);
        }
    }

    fn execute(
        &mut self,
        command: &Command,
        agent: &mut Agent,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> ReplyResult {
        let takes_one = matches!(command, Command::Attach(_) | Command::Hashes);
        let mut arrived = if takes_one { std::mem::take(&mut self.arrived) } else { Vec::new() };
        if arrived.len() > 1 {
            agent.detach();
            return no("several descriptors came, one is taken: all were closed");
        }
        match agent.execute(command, arrived.pop(), interrupt) {
            Ok(answer) => ReplyResult::Ok(answer),
            Err(refusal) => ReplyResult::Error(refusal),
        }
    }
}

struct Peer {
    socket: OwnedFd,
    session: Session,
}

fn serve(listener: &OwnedFd, quit: &OwnedFd, peers: Peers, faults: Faults) {
    let mut agent = Agent::new(faults);
    let mut peer: Option<Peer> = None;
    // Until when no calls are looked for.
    let mut deaf: Option<Instant> = None;
    loop {
        let now = Instant::now();
        deaf = deaf.filter(|until| now < *until);
        let calls = if deaf.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![
            PollFd::from_borrowed_fd(quit.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), calls),
        ];
        fds.extend(peer.iter().map(|p| PollFd::from_borrowed_fd(p.socket.as_fd(), PollFlags::IN)));
        let pause = agent.pause().into_iter().chain(deaf.map(|until| until - now)).min();
        let pause = pause.and_then(|p| Timespec::try_from(p).ok());
        match poll(&mut fds, pause.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        let ready = |i: usize| fds.get(i).is_some_and(|f| !f.revents().is_empty());
        let (ended, called, spoke) = (ready(0), ready(1), ready(2));
        if ended {
            return;
        }
        if let (true, Some(p)) = (spoke, &mut peer)
            && !p.hear(&mut agent)
        {
            peer = None;
            agent.detach();
        }
        match called.then(|| accept(listener, peers)) {
            Some(Ok(Some(new))) if peer.is_none() => peer = Some(new),
            Some(Ok(Some(new))) => new.refuse("another daemon is connected"),
            Some(Err(_)) => deaf = Some(Instant::now() + CALL_AGAIN),
            Some(Ok(None)) | None => {}
        }
        agent.step();
    }
}

/// Accepts a peer, if it may speak with us. After an error its call still waits.
fn accept(listener: &OwnedFd, peers: Peers) -> Result<Option<Peer>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = match rustix::net::accept_with(listener, flags) {
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
        socket => socket?,
    };
    let Ok(peercred) = sockopt::socket_peercred(&socket) else { return Ok(None) };
    let uid = peercred.uid;
    let peer = Peer { socket, session: Session::default() };
    if uid.is_root() || peers == Peers::Own && uid == rustix::process::geteuid() {
        return Ok(Some(peer));
    }
    peer.refuse("only root may (the VMM's own user as well with peer=own)");
    Ok(None)
}

fn no(text: &str) -> ReplyResult {
    ReplyResult::Error(Refusal { kind: Refused::Request, text: text.into() })
}

impl Peer {
    /// Reads what is there and does it. `false`: the peer is gone, or was not
    /// ours.
    fn hear(&mut self, agent: &mut Agent) -> bool {
        let mut buffer = [0u8; 4096];
        match self.receive(&mut buffer) {
            Ok(0) => false,
            Ok(n) => {
                let socket = &self.socket;
                let mut interrupt = || urgent(socket);
                let mut each = |line: &[u8]| send(socket, line);
                self.session.take(&buffer[..n], agent, &mut interrupt, &mut each)
            }
            Err(e) => {
                matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
            }
        }
    }

    /// Bytes, and descriptors that may come with them.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        // One is expected; with more room others are seen as well, and whatever
        // does not fit the kernel closes.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [std::io::IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fds.for_each(|fd| self.session.arrive(fd));
            }
        }
        Ok(got.bytes)
    }

    fn refuse(&self, why: &str) {
        send(&self.socket, &Reply { id: 0, result: no(why) }.line());
    }
}

/// Sends a whole line, or gives the peer up.
fn send(socket: &OwnedFd, mut line: &[u8]) -> bool {
    let timeout = Timespec::try_from(SEND_TIMEOUT).ok();
    while !line.is_empty() {
        match rustix::net::send(socket, line, SendFlags::NOSIGNAL) {
            Ok(n) => line = &line[n..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)];
                if !poll(&mut fds, timeout.as_ref()).is_ok_and(|n| n > 0) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// Whether something waits that a recycle must not keep waiting: the end of the
/// connection, also behind what was asked before it, or word that the VM stops, resets or is
/// to be left alone. Only looked at, not taken; whatever a look misses waits for the budget's
/// end.
fn urgent(socket: &OwnedFd) -> bool {
    let mut ended = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut ended, Some(&now)).is_ok_and(|n| n > 0) {
        return true;
    }
    let mut bytes = [0u8; 2048];
    match rustix::net::recv(socket, &mut bytes[..], RecvFlags::PEEK) {
        Ok((0, _)) => true,
        Ok((n, _)) => {
            let has = |word: &[u8]| bytes[..n].windows(word.len()).any(|w| w == word);
            has(b"stand_down") || has(b"reset_seen") || has(b"run_state")
        }
        Err(e) => e != Errno::AGAIN && e != Errno::INTR,
    }
}

/// What went wrong, for the VMM's log.
pub fn complain(what: &str, error: &Error) {
    eprintln!("ebb agent: {what}: {error}; this VM goes on without it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_is_gone_ends_a_recycle_also_when_it_had_asked_for_more() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let ours = OwnedFd::from(ours);
        assert!(!urgent(&ours));
        let theirs = OwnedFd::from(theirs);
        assert!(send(&theirs, b"{\"id\":7,\"command\":\"status\"}\n"));
        assert!(!urgent(&ours));
        drop(theirs);
        assert!(urgent(&ours));
    }
}
