//! A QMP client that cannot be hung, flooded or confused by the QEMU it talks to.
//!
//! [`Protocol`] is the state machine; [`Client`] puts it on a non-blocking Unix
//! socket; [`poll_all`] drives many clients against one deadline, so that one
//! hung QEMU delays nobody. What commands *mean* stands in `qmp_balloon.rs`; only
//! transport belongs here.

mod message;
mod protocol;
mod sharing;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::Value;

pub use self::message::{Event, Message, parse_message};
pub use self::protocol::*;
use self::sharing::Sharing;
use crate::sockets;

/// QEMU greets at once; silence this long means that it does not serve us.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// Most shared sockets that [`poll_all`] is connected to at a time: each is left sooner.
const MOST_VISITS: usize = 32;

/// A QMP connection on a Unix socket. Nothing blocks except [`Client::execute`], and that not
/// past its timeout.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    socket: Option<OwnedFd>,
    /// The state machine: what it is to send, [`Client::pump`] writes.
    pub protocol: Protocol,
    opened: Instant,
    /// When QEMU last said anything, or when the connection was made.
    pub(crate) heard: Instant,
    /// The reason for which the peer that stands in for QEMU closed the connection.
    words: Option<Words>,
    /// Where it is connected only while it has commands under way.
    sharing: Option<Sharing>,
}

/// Where the peer that stands in for QEMU writes why it closes the connection, for people.
pub(crate) type Words = Arc<OnceLock<String>>;

impl Client {
    /// Starts to connect; a failure shows in [`Protocol::state`].
    pub fn new(path: impl Into<PathBuf>) -> Client {
        let mut client = Client::without(path.into(), Protocol::new);
        match open_socket(&client.path) {
            Ok(socket) => client.socket = Some(socket),
            Err(e) => client.protocol.fail(e),
        }
        client
    }

    /// One that has no connection yet.
    fn without(path: PathBuf, protocol: fn(String) -> Protocol) -> Client {
        let (protocol, now) = (protocol(path.display().to_string()), Instant::now());
        Client { path, socket: None, protocol, opened: now, heard: now, words: None, sharing: None }
    }

    /// Over a connected socket whose peer speaks in QEMU's place, and is called so.
    pub(crate) fn over(socket: OwnedFd, called: PathBuf, words: Words) -> Client {
        let mut client = Client::without(called, Protocol::new);
        (client.socket, client.words) = (Some(socket), Some(words));
        client
    }

    /// Whether it speaks with QEMU itself, over the socket at its path.
    pub fn is_direct(&self) -> bool {
        self.words.is_none()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn named(&self) -> String {
        self.path.display().to_string()
    }

    /// The process that opened the listening socket (`SO_PEERCRED`); `None`
    /// when not connected.
    pub fn peer_pid(&self) -> Option<u32> {
        sockets::peer_pid(self.socket.as_ref()?)
    }

    /// Ends a connection that another process serves than this one.
    pub fn check_peer(&mut self, pid: u32) {
        if let Some(peer) = self.peer_pid().filter(|peer| *peer != pid) {
            let why = format!("served by process {peer}, not by this VM's {pid}");
            self.protocol.fail(QmpError::Failed(self.named(), why));
        }
    }

    /// For `poll`; `None` after a failure.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// All reading and writing that is possible without blocking, up to
    /// 4 MiB read.
    pub fn pump(&mut self) {
        self.read_some();
        self.flush();
    }

    /// All writing that is possible without blocking: what there is to read, `poll` tells.
    pub fn flush(&mut self) {
        self.visit();
        self.write_some();
        self.tidy();
        if self.protocol.state() == State::Greeting && !self.is_shared() {
            let silent = self.opened.elapsed();
            if silent >= GREETING_TIMEOUT {
                let error = self.taken(silent);
                self.protocol.fail(error);
            }
        }
        if self.protocol.state() == State::Failed {
            self.close();
        }
    }

    fn read_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        match sockets::receive(socket) {
            Ok((bytes, there)) => {
                if !bytes.is_empty() {
                    self.heard = Instant::now();
                    self.protocol.feed(&bytes);
                }
                if !there {
                    self.closed();
                }
            }
            Err(e) => self.protocol.fail(io_error(&self.path, "recv", e)),
        }
    }

    fn closed(&mut self) {
        match self.words.as_ref().and_then(|words| words.get()) {
            Some(why) => self.protocol.fail(QmpError::Failed(self.named(), why.clone())),
            None => self.protocol.end_of_file(),
        }
    }

    fn write_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        match sockets::send(socket, &mut self.protocol.outbox, &mut None) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => self.closed(),
            Err(e) => self.protocol.fail(io_error(&self.path, "send", e)),
        }
    }

    /// Sends a command and waits for its answer, at most `timeout` long.
    pub fn execute(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.protocol.send(command, arguments)?;
        let until = Instant::now() + timeout;
        loop {
            self.pump();
            // A failure of the connection is the answer, too.
            if let Some(answer) = self.protocol.take_reply(id) {
                return answer;
            }
            if Instant::now() >= until {
                self.protocol.forget(id);
                if self.protocol.state() == State::Greeting {
                    return Err(self.taken(timeout));
                }
                let why = format!("{command}: no answer within {} ms", timeout.as_millis());
                return Err(QmpError::Failed(self.named(), why));
            }
            poll_once(&[self], until, |_| true);
        }
    }

    fn taken(&self, silent: Duration) -> QmpError {
        let s = silent.as_secs_f64();
        if !self.is_direct() {
            return QmpError::Failed(self.named(), format!("no answer within {s:.1} s"));
        }
        let detail =
            format!("no greeting within {s:.1} s: another client is served, or QEMU hangs");
        QmpError::Taken(self.named(), detail)
    }
}

/// Drives many clients until none is waited for, or until `deadline`. Returns
/// how many are still waited for. A client whose commands were all forgotten
/// is read from but not waited for, so a hung QEMU costs one deadline, once.
pub fn poll_all(clients: &mut [&mut Client], deadline: Instant) -> usize {
    clients.iter_mut().filter(|c| !c.is_shared()).for_each(|c| c.flush());
    visit_some(clients);
    loop {
        let waiting = clients.iter().filter(|c| c.protocol.waiting() > 0).count();
        if waiting == 0 || Instant::now() >= deadline {
            return waiting;
        }
        let ready = poll_once(clients, deadline, |c| c.protocol.waiting() > 0 || c.is_shared());
        // Where Ebb itself was stopped meanwhile, nothing more is sent: it may be taken back.
        if Instant::now() >= deadline {
            continue;
        }
        ready.into_iter().for_each(|i| clients[i].pump());
        visit_some(clients);
    }
}

/// Goes on with shared sockets, not with too many at a time.
fn visit_some(clients: &mut [&mut Client]) {
    let mut open = clients.iter().filter(|c| c.is_shared() && c.socket.is_some()).count();
    for client in clients.iter_mut().filter(|c| c.is_shared()) {
        if client.protocol.wants_connection() {
            if open >= MOST_VISITS {
                continue;
            }
            open += 1;
        }
        client.flush();
    }
}

/// Reads what the clients' peers have said already, without waiting.
pub fn pump_ready(clients: &mut [&mut Client]) {
    for i in poll_once(clients, Instant::now(), |_| true) {
        clients[i].pump();
    }
}

/// Sleeps until some of the wanted clients can be pumped (returns which), or
/// `deadline`, or a second (so that a missing greeting is noticed).
fn poll_once(
    clients: &[&mut Client],
    deadline: Instant,
    wanted: impl Fn(&Client) -> bool,
) -> Vec<usize> {
    let deadline = clients.iter().filter_map(|c| c.tidy_at()).fold(deadline, Instant::min);
    let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(1));
    let (indices, mut fds): (Vec<usize>, Vec<PollFd<'_>>) = clients
        .iter()
        .enumerate()
        .filter(|(_, c)| wanted(c))
        .filter_map(|(i, c)| Some((i, PollFd::from_borrowed_fd(c.fd()?, interest(c)))))
        .unzip();
    let ready = sockets::ready(&mut fds, left);
    indices.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(i, _)| i).collect()
}

pub fn interest(client: &Client) -> PollFlags {
    sockets::interest(!client.protocol.outbox.is_empty())
}

fn io_error(path: &Path, call: &str, e: Errno) -> QmpError {
    QmpError::Failed(path.display().to_string(), format!("{call}: {e}"))
}

/// A non-blocking connect; Unix sockets connect at once or not at all.
fn open_socket(path: &Path) -> Result<OwnedFd, QmpError> {
    let named = path.display().to_string();
    sockets::connect(path).map_err(|e| {
        let why = match e {
            Errno::AGAIN => {
                let why = "its queue of waiting clients is full: QEMU hangs, or another is served";
                return QmpError::Taken(named, why.into());
            }
            Errno::NOENT => "no such socket: the VM has ended, or its -qmp path is another one",
            Errno::CONNREFUSED => {
                "no process listens there: QEMU has ended and left its socket behind, \
                 or this is not a QMP server socket"
            }
            Errno::ACCESS | Errno::PERM => {
                "permission denied: run Ebb as root or as the owner of the socket"
            }
            e => return io_error(path, "connect", e),
        };
        QmpError::Failed(named, why.into())
    })
}
