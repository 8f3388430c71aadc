//! A QMP client that cannot be hung, flooded or confused by the QEMU it talks to.
//!
//! Two layers. [`Protocol`] is the state machine: bytes in, messages and bytes
//! out, no socket and no clock, so that tests and the fuzzer drive all of it.
//! [`Client`] puts it on a non-blocking Unix socket; [`poll_all`] drives many
//! clients against one deadline, so that one hung QEMU delays nobody.
//!
//! QEMU sends one JSON object per message, on one line or (`pretty=on`) on
//! many; messages are therefore cut by nesting, not by newline. Anything that
//! is not QMP ends the connection: after garbage nothing that follows can be
//! trusted. Source: QEMU `docs/interop/qmp-spec.rst`, `monitor/qmp.c`.
//!
//! What commands *mean* stands in `balloon.rs`; only transport belongs here.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::root::Root;

/// Longest message accepted, bytes. The longest real one, `query-qmp-schema`,
/// is about 250 KB.
pub const MAX_MESSAGE: usize = 1 << 20;
/// Commands without an answer. QEMU itself queues 8 and then stops reading.
pub const MAX_PENDING: usize = 64;
/// Answers not yet taken, bytes of JSON: parsed they grow up to thirtyfold.
pub const MAX_REPLY_BYTES: usize = 2 << 20;
/// Events not yet taken; the oldest is dropped and counted. A reset of a big
/// VM brings about ten.
pub const MAX_EVENTS: usize = 256;
/// An event whose JSON is longer keeps its name and loses its data.
pub const MAX_EVENT_BYTES: usize = 4 << 10;
/// Bytes not yet written; a full socket buffer (208 KiB) has long been noticed.
pub const MAX_OUTBOX: usize = 1 << 20;
/// Most bytes one [`Client::pump`] reads, so that a flood does not keep it.
const MAX_PUMP: usize = 4 << 20;
/// QEMU greets at once; silence this long means that it does not serve us.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(2);

/// What can go wrong, each with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// ENOENT.
    #[error("{path}: no such socket: the VM has ended, or its -qmp path is another one")]
    NoSocket {
        /// The socket.
        path: String,
    },
    /// ECONNREFUSED.
    #[error(
        "{path}: nobody listens there: QEMU has ended and left its socket behind, \
         or this is not a QMP server socket"
    )]
    Refused {
        /// The socket.
        path: String,
    },
    /// EACCES, EPERM.
    #[error("{path}: permission denied: run Ebb as root or as the owner of the socket")]
    Denied {
        /// The socket.
        path: String,
    },
    /// QEMU serves one client at a time and this is not it.
    #[error(
        "{path}: QEMU serves one client per QMP socket and does not serve us: {detail}; \
         give Ebb a socket of its own (a further -qmp unix:PATH,server=on,wait=off)"
    )]
    Taken {
        /// The socket.
        path: String,
        /// What was seen.
        detail: String,
    },
    /// Any other system call that failed.
    #[error("{path}: {call}: {message}")]
    Io {
        /// The socket.
        path: String,
        /// The call.
        call: &'static str,
        /// The system's words.
        message: String,
    },
    /// End of file.
    #[error("{path}: QEMU closed the connection{during}")]
    Closed {
        /// The socket.
        path: String,
        /// Which command was under way, as ` during x`, or empty.
        during: String,
    },
    /// The peer does not speak QMP; the connection is gone.
    #[error("{path}: not QMP: {why}; connection dropped")]
    Garbage {
        /// The socket.
        path: String,
        /// What was wrong.
        why: String,
    },
    /// QEMU answered with an error; the connection is fine.
    #[error("{command}: {desc} ({class})")]
    Command {
        /// The command.
        command: String,
        /// QEMU's error class, nearly always `GenericError`.
        class: String,
        /// QEMU's words.
        desc: String,
    },
    /// No answer in time; the connection stays, a late answer is dropped.
    #[error("{path}: {what}: no answer within {ms} ms")]
    Timeout {
        /// The socket.
        path: String,
        /// The command or event waited for.
        what: String,
        /// How long, milliseconds.
        ms: u64,
    },
    /// A limit of this file was reached.
    #[error("{path}: more than {limit} {what}")]
    Full {
        /// The socket.
        path: String,
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// One message from QEMU.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first one.
    Greeting(Version),
    /// An asynchronous event.
    Event(Event),
    /// A command succeeded.
    Return {
        /// The id it was sent with.
        id: Option<u64>,
        /// What it returned.
        value: Value,
    },
    /// A command failed.
    Error {
        /// The id it was sent with.
        id: Option<u64>,
        /// Error class.
        class: String,
        /// Error text.
        desc: String,
    },
}

/// QEMU's version, from the greeting.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// E.g. 7.
    pub major: u64,
    /// E.g. 2.
    pub minor: u64,
    /// E.g. 22.
    pub micro: u64,
    /// The distribution's words.
    pub package: String,
}

/// An event, e.g. `RESET`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Name.
    pub name: String,
    /// Data; `Null` where there is none or it was longer than [`MAX_EVENT_BYTES`].
    pub data: Value,
    /// QEMU's clock, microseconds since 1970, where given.
    pub at_us: Option<u64>,
}

/// What was wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadMessage(String);

/// Parses one message. Pure; any bytes are safe.
pub fn parse_message(bytes: &[u8]) -> Result<Message, BadMessage> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|e| BadMessage(format!("{e} in “{}”", excerpt(bytes))))?;
    let Value::Object(mut map) = value else {
        return Err(BadMessage(format!("not a JSON object: “{}”", excerpt(bytes))));
    };
    let id = match map.remove("id") {
        None => None,
        Some(id) => Some(id.as_u64().ok_or_else(|| BadMessage(format!("reply with id {id}")))?),
    };
    if let Some(value) = map.remove("return") {
        return Ok(Message::Return { id, value });
    }
    let text = |v: &Value, key: &str| v.get(key).and_then(Value::as_str).map(str::to_owned);
    if let Some(error) = map.remove("error") {
        return match (text(&error, "class"), text(&error, "desc")) {
            (Some(class), Some(desc)) => Ok(Message::Error { id, class, desc: clip(&desc, 300) }),
            _ => Err(BadMessage("an error reply without class and desc".into())),
        };
    }
    if let Some(name) = map.remove("event") {
        let name = name.as_str().ok_or_else(|| BadMessage("an event without a name".into()))?;
        let at = map.get("timestamp");
        let part = |key| at.and_then(|t| t.get(key)).and_then(Value::as_u64);
        let at_us = part("seconds")
            .and_then(|s| s.checked_mul(1_000_000)?.checked_add(part("microseconds")?));
        let data = map.remove("data").unwrap_or(Value::Null);
        return Ok(Message::Event(Event { name: clip(name, 64), data, at_us }));
    }
    if let Some(greeting) = map.remove("QMP") {
        let version = greeting.get("version").unwrap_or(&Value::Null);
        let part = |key| version.get("qemu").and_then(|q| q.get(key)).and_then(Value::as_u64);
        return Ok(Message::Greeting(Version {
            major: part("major").unwrap_or(0),
            minor: part("minor").unwrap_or(0),
            micro: part("micro").unwrap_or(0),
            package: clip(&text(version, "package").unwrap_or_default(), 100),
        }));
    }
    Err(BadMessage(format!("neither reply nor event: “{}”", excerpt(bytes))))
}

fn clip(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}

fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]);
    text.chars().map(|c| if c.is_control() { '·' } else { c }).collect()
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// QEMU has not greeted yet.
    Greeting,
    /// `qmp_capabilities` is under way.
    Negotiating,
    /// Commands are served.
    Ready,
    /// Over; [`Protocol::failure`] says why.
    Failed,
}

#[derive(Debug)]
struct Pending {
    command: String,
    /// Nobody waits any more: drop the answer.
    forgotten: bool,
}

/// The state machine of one connection, without the connection.
#[derive(Debug)]
pub struct Protocol {
    path: String,
    state: State,
    failure: Option<QmpError>,
    version: Option<Version>,
    inbox: Vec<u8>,
    cutter: Cutter,
    outbox: Vec<u8>,
    /// Commands sent before the connection was ready.
    early: Vec<u8>,
    next_id: u64,
    pending: BTreeMap<u64, Pending>,
    replies: BTreeMap<u64, (Result<Value, QmpError>, usize)>,
    reply_bytes: usize,
    events: VecDeque<Event>,
    events_dropped: u64,
}

/// Where messages end: counts nesting outside strings.
#[derive(Clone, Copy, Debug, Default)]
struct Cutter {
    depth: u32,
    string: bool,
    escape: bool,
}

/// What one byte meant to the [`Cutter`].
enum Cut {
    Between,
    Inside,
    End,
    Garbage,
}

impl Cutter {
    fn byte(&mut self, b: u8) -> Cut {
        if self.string {
            match b {
                _ if self.escape => self.escape = false,
                b'\\' => self.escape = true,
                b'"' => self.string = false,
                _ => {}
            }
            return Cut::Inside;
        }
        match b {
            b'{' => self.depth += 1,
            b' ' | b'\t' | b'\r' | b'\n' if self.depth == 0 => return Cut::Between,
            _ if self.depth == 0 => return Cut::Garbage,
            b'[' => self.depth += 1,
            b'"' => self.string = true,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Cut::End;
                }
            }
            _ => {}
        }
        Cut::Inside
    }
}

/// The id of `qmp_capabilities`; callers' ids start at 1.
const NEGOTIATE: u64 = 0;

impl Protocol {
    /// A connection that waits for the greeting. `path` only serves messages.
    pub fn new(path: impl Into<String>) -> Protocol {
        Protocol {
            path: path.into(),
            state: State::Greeting,
            failure: None,
            version: None,
            inbox: Vec::new(),
            cutter: Cutter::default(),
            outbox: Vec::new(),
            early: Vec::new(),
            next_id: NEGOTIATE + 1,
            pending: BTreeMap::new(),
            replies: BTreeMap::new(),
            reply_bytes: 0,
            events: VecDeque::new(),
            events_dropped: 0,
        }
    }

    /// How far the connection has come.
    pub fn state(&self) -> State {
        self.state
    }

    /// Why it is over, if it is.
    pub fn failure(&self) -> Option<&QmpError> {
        self.failure.as_ref()
    }

    /// QEMU's version, once greeted.
    pub fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// Ends the connection; every command under way fails with `error`.
    pub fn fail(&mut self, error: QmpError) {
        if self.state == State::Failed {
            return;
        }
        self.state = State::Failed;
        for (id, p) in std::mem::take(&mut self.pending) {
            if !p.forgotten {
                self.replies.insert(id, (Err(error.clone()), 0));
            }
        }
        self.failure = Some(error);
        self.inbox = Vec::new();
        self.outbox = Vec::new();
        self.early = Vec::new();
    }

    /// Ends the connection because the peer did.
    pub fn end_of_file(&mut self) {
        let during = self.pending.values().next();
        let during = match during {
            Some(p) => format!(" during {}", p.command),
            None if self.state == State::Greeting => " before it greeted".into(),
            None => String::new(),
        };
        self.fail(QmpError::Closed { path: self.path.clone(), during });
    }

    fn garbage(&mut self, why: impl Into<String>) {
        self.fail(QmpError::Garbage { path: self.path.clone(), why: why.into() });
    }

    /// Takes bytes from the peer, in any pieces.
    pub fn feed(&mut self, bytes: &[u8]) {
        let mut start = 0;
        for (i, &b) in bytes.iter().enumerate() {
            match self.cutter.byte(b) {
                Cut::Inside => continue,
                Cut::Between => start = i + 1,
                Cut::Garbage => {
                    let why = format!("no JSON object but “{}”", excerpt(&bytes[i..]));
                    return self.garbage(why);
                }
                Cut::End => {
                    let piece = &bytes[start..=i];
                    start = i + 1;
                    if self.inbox.len() + piece.len() > MAX_MESSAGE {
                        return self.too_long();
                    }
                    if self.inbox.is_empty() {
                        self.message(piece);
                    } else {
                        self.inbox.extend_from_slice(piece);
                        let whole = std::mem::take(&mut self.inbox);
                        self.message(&whole);
                    }
                }
            }
            if self.state == State::Failed {
                return;
            }
        }
        if self.state == State::Failed {
            return;
        }
        if self.inbox.len() + (bytes.len() - start) > MAX_MESSAGE {
            return self.too_long();
        }
        self.inbox.extend_from_slice(&bytes[start..]);
    }

    fn too_long(&mut self) {
        self.garbage(format!("a message of more than {MAX_MESSAGE} bytes"));
    }

    fn message(&mut self, bytes: &[u8]) {
        let message = match parse_message(bytes) {
            Ok(m) => m,
            Err(e) => return self.garbage(e.to_string()),
        };
        match (self.state, message) {
            (State::Greeting, Message::Greeting(version)) => {
                self.version = Some(version);
                self.state = State::Negotiating;
                self.pending.insert(
                    NEGOTIATE,
                    Pending { command: "qmp_capabilities".into(), forgotten: true },
                );
                encode(&mut self.outbox, "qmp_capabilities", None, NEGOTIATE);
            }
            (State::Greeting, _) => self.garbage("no greeting"),
            (_, Message::Greeting(_)) => self.garbage("a second greeting"),
            (_, Message::Event(event)) => self.event(event, bytes.len()),
            (_, Message::Return { id, value }) => self.reply(id, Ok(value), bytes.len()),
            (_, Message::Error { id, class, desc }) => self.reply(id, Err((class, desc)), 0),
        }
    }

    fn event(&mut self, mut event: Event, length: usize) {
        if length > MAX_EVENT_BYTES {
            event.data = Value::Null;
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.events_dropped += 1;
        }
        self.events.push_back(event);
    }

    fn reply(&mut self, id: Option<u64>, answer: Result<Value, (String, String)>, length: usize) {
        let Some(id) = id else {
            let what = answer.err().map_or(String::new(), |(_, desc)| format!(": {desc}"));
            return self.garbage(format!("a reply without an id{what}"));
        };
        let Some(pending) = self.pending.remove(&id) else {
            return self.garbage(format!("a reply to command {id}, which was not asked"));
        };
        if id == NEGOTIATE {
            match answer {
                Ok(_) => {
                    self.state = State::Ready;
                    self.outbox.append(&mut self.early);
                }
                Err((_, desc)) => self.garbage(format!("qmp_capabilities refused: {desc}")),
            }
        } else if !pending.forgotten {
            self.reply_bytes += length;
            if self.reply_bytes > MAX_REPLY_BYTES {
                return self.garbage(format!("more than {MAX_REPLY_BYTES} bytes of replies"));
            }
            let answer = answer.map_err(|(class, desc)| QmpError::Command {
                command: pending.command,
                class,
                desc,
            });
            self.replies.insert(id, (answer, length));
        }
    }

    /// Queues a command and returns its id. Before the connection is ready the
    /// command waits; after it failed this returns the failure.
    pub fn send(&mut self, command: &str, arguments: Option<Value>) -> Result<u64, QmpError> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let full = |what, limit| QmpError::Full { path: self.path.clone(), what, limit };
        if self.pending.len() + self.replies.len() >= MAX_PENDING {
            return Err(full("commands without an answer", MAX_PENDING));
        }
        if self.outbox.len() + self.early.len() > MAX_OUTBOX {
            return Err(full("bytes not yet written", MAX_OUTBOX));
        }
        let id = self.next_id;
        self.next_id += 1;
        self.pending.insert(id, Pending { command: command.to_owned(), forgotten: false });
        let out = if self.state == State::Ready { &mut self.outbox } else { &mut self.early };
        encode(out, command, arguments, id);
        Ok(id)
    }

    /// The answer to a command, once.
    pub fn take_reply(&mut self, id: u64) -> Option<Result<Value, QmpError>> {
        let (answer, length) = self.replies.remove(&id)?;
        self.reply_bytes -= length;
        Some(answer)
    }

    /// Nobody waits for this answer any more; a late one is dropped quietly.
    pub fn forget(&mut self, id: u64) {
        let _ = self.take_reply(id);
        if let Some(p) = self.pending.get_mut(&id) {
            p.forgotten = true;
        }
    }

    /// Commands that somebody still waits for.
    pub fn waiting(&self) -> usize {
        self.pending.values().filter(|p| !p.forgotten).count()
    }

    /// Commands without an answer, forgotten ones included.
    pub fn unanswered(&self) -> usize {
        self.pending.len()
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// The first queued event that matches, out of turn.
    pub fn take_event(&mut self, name: &str) -> Option<Event> {
        let at = self.events.iter().position(|e| e.name == name)?;
        self.events.remove(at)
    }

    /// Whether an event of one of these names is queued.
    pub fn has_event(&self, names: &[&str]) -> bool {
        self.events.iter().any(|e| names.contains(&e.name.as_str()))
    }

    /// How many events were dropped because nobody took them.
    pub fn events_dropped(&self) -> u64 {
        self.events_dropped
    }

    /// Bytes for the peer.
    pub fn outgoing(&self) -> &[u8] {
        &self.outbox
    }

    /// The first `n` bytes of [`Protocol::outgoing`] were written.
    pub fn written(&mut self, n: usize) {
        self.outbox.drain(..n.min(self.outbox.len()));
    }

    /// Bytes held for the peer's unfinished message and untaken replies; the
    /// property tests check that it stays within the limits.
    pub fn held_bytes(&self) -> usize {
        self.inbox.len() + self.reply_bytes
    }
}

fn encode(out: &mut Vec<u8>, command: &str, arguments: Option<Value>, id: u64) {
    let mut message = json!({ "execute": command, "id": id });
    if let Some(arguments) = arguments {
        message["arguments"] = arguments;
    }
    out.extend_from_slice(message.to_string().as_bytes());
    out.push(b'\n');
}

/// A QMP connection on a Unix socket. Nothing blocks except [`Client::connect`],
/// [`Client::execute`] and [`Client::wait_event`], and those not past their timeout.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    socket: Option<OwnedFd>,
    protocol: Protocol,
    opened: Instant,
    heard: Instant,
}

impl Client {
    /// Starts to connect; a failure shows in [`Client::state`].
    pub fn new(path: impl Into<PathBuf>) -> Client {
        let path = path.into();
        let mut protocol = Protocol::new(path.display().to_string());
        let socket = match open_socket(&path) {
            Ok(s) => Some(s),
            Err(e) => {
                protocol.fail(e);
                None
            }
        };
        let now = Instant::now();
        Client { path, socket, protocol, opened: now, heard: now }
    }

    /// Connects and negotiates, at most `timeout` long.
    pub fn connect(path: impl Into<PathBuf>, timeout: Duration) -> Result<Client, QmpError> {
        let mut client = Client::new(path);
        let until = Instant::now() + timeout;
        client.wait(until, |p| p.state() == State::Ready)?.then_some(()).ok_or_else(
            || match client.state() {
                State::Greeting => client.taken(timeout),
                _ => client.timed_out("qmp_capabilities", timeout),
            },
        )?;
        Ok(client)
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How far the connection has come.
    pub fn state(&self) -> State {
        self.protocol.state()
    }

    /// Why it is over, if it is.
    pub fn failure(&self) -> Option<&QmpError> {
        self.protocol.failure()
    }

    /// QEMU's version, once greeted.
    pub fn version(&self) -> Option<&Version> {
        self.protocol.version()
    }

    /// When QEMU last said anything, or when the connection was made.
    pub fn last_heard(&self) -> Instant {
        self.heard
    }

    /// The process that opened the listening socket (`SO_PEERCRED`); `None`
    /// when not connected.
    pub fn peer_pid(&self) -> Option<u32> {
        let socket = self.socket.as_ref()?;
        let cred = rustix::net::sockopt::socket_peercred(socket).ok()?;
        // 0 stands for a process of another pid namespace.
        u32::try_from(rustix::process::Pid::as_raw(Some(cred.pid))).ok().filter(|pid| *pid > 0)
    }

    /// For `poll`; `None` after a failure.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Whether to poll for writing too.
    pub fn wants_write(&self) -> bool {
        !self.protocol.outgoing().is_empty()
    }

    /// The state machine, for what needs no socket.
    pub fn protocol(&mut self) -> &mut Protocol {
        &mut self.protocol
    }

    /// See [`Protocol::send`]. Written by the next [`Client::pump`].
    pub fn send(&mut self, command: &str, arguments: Option<Value>) -> Result<u64, QmpError> {
        self.protocol.send(command, arguments)
    }

    /// See [`Protocol::take_reply`].
    pub fn take_reply(&mut self, id: u64) -> Option<Result<Value, QmpError>> {
        self.protocol.take_reply(id)
    }

    /// See [`Protocol::take_events`].
    pub fn take_events(&mut self) -> Vec<Event> {
        self.protocol.take_events()
    }

    /// All reading and writing that is possible without blocking, up to
    /// `MAX_PUMP` (4 MiB) read.
    pub fn pump(&mut self) {
        self.read_some();
        self.write_some();
        let silent = self.opened.elapsed();
        if self.state() == State::Greeting && silent >= GREETING_TIMEOUT {
            let error = self.taken(silent);
            self.protocol.fail(error);
        }
        if self.state() == State::Failed {
            self.socket = None;
        }
    }

    fn read_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        let mut buffer = [0u8; 16 << 10];
        let mut total = 0;
        while total < MAX_PUMP && self.protocol.state() != State::Failed {
            match rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return self.protocol.end_of_file(),
                Ok((n, _)) => {
                    total += n;
                    self.heard = Instant::now();
                    self.protocol.feed(&buffer[..n]);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNRESET) => return self.protocol.end_of_file(),
                Err(e) => return self.protocol.fail(io_error(&self.path, "recv", e)),
            }
        }
    }

    fn write_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        while !self.protocol.outgoing().is_empty() {
            match rustix::net::send(socket, self.protocol.outgoing(), SendFlags::NOSIGNAL) {
                Ok(n) => self.protocol.written(n),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(Errno::PIPE | Errno::CONNRESET) => return self.protocol.end_of_file(),
                Err(e) => return self.protocol.fail(io_error(&self.path, "send", e)),
            }
        }
    }

    /// Sends a command and waits for its answer, at most `timeout` long.
    pub fn execute(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.send(command, arguments)?;
        let until = Instant::now() + timeout;
        // A failure of the connection is the answer too: it is in `replies`.
        let _ = self.wait(until, |p| p.replies.contains_key(&id));
        self.take_reply(id).unwrap_or_else(|| {
            self.protocol.forget(id);
            Err(self.timed_out(command, timeout))
        })
    }

    /// Waits for an event of this name (or takes one that is queued), at most
    /// `timeout` long. Other events stay queued.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<Event, QmpError> {
        let until = Instant::now() + timeout;
        let result = self.wait(until, |p| p.has_event(&[name]));
        if let Some(event) = self.protocol.take_event(name) {
            return Ok(event);
        }
        result?;
        Err(self.timed_out(name, timeout))
    }

    /// Pumps until `done` (true), `until` (false), or failure.
    fn wait(&mut self, until: Instant, done: impl Fn(&Protocol) -> bool) -> Result<bool, QmpError> {
        loop {
            self.pump();
            if done(&self.protocol) {
                return Ok(true);
            }
            if let Some(error) = self.failure() {
                return Err(error.clone());
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            poll_once(&mut [self], until);
        }
    }

    fn timed_out(&self, what: &str, timeout: Duration) -> QmpError {
        QmpError::Timeout {
            path: self.path.display().to_string(),
            what: what.to_owned(),
            ms: timeout.as_millis() as u64,
        }
    }

    fn taken(&self, silent: Duration) -> QmpError {
        let seen = match is_serving(&self.path) {
            true => "another client is connected (see /proc/net/unix)",
            false => "another client holds it, or QEMU hangs",
        };
        let detail = format!("no greeting within {:.1} s: {seen}", silent.as_secs_f64());
        QmpError::Taken { path: self.path.display().to_string(), detail }
    }
}

/// Drives many clients until none is waited for, or until `deadline`. Returns
/// how many are still waited for. A client whose commands were all forgotten
/// is read from but not waited for, so a hung QEMU costs one deadline, once.
pub fn poll_all(clients: &mut [&mut Client], deadline: Instant) -> usize {
    loop {
        clients.iter_mut().for_each(|c| c.pump());
        let waiting = clients.iter().filter(|c| c.protocol.waiting() > 0).count();
        if waiting == 0 || Instant::now() >= deadline {
            return waiting;
        }
        poll_once(clients, deadline);
    }
}

/// Sleeps until one of the clients can be pumped, or `deadline`, or a second
/// (so that a missing greeting is noticed).
fn poll_once(clients: &mut [&mut Client], deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(1));
    let mut fds: Vec<PollFd<'_>> = clients
        .iter()
        .filter(|c| c.protocol.waiting() > 0 || clients.len() == 1)
        .filter_map(|c| Some(PollFd::from_borrowed_fd(c.fd()?, interest(c))))
        .collect();
    if let Ok(timeout) = left.try_into() {
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }
}

/// The poll flags that suit a client now.
pub fn interest(client: &Client) -> PollFlags {
    if client.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
}

fn io_error(path: &Path, call: &'static str, e: Errno) -> QmpError {
    QmpError::Io { path: path.display().to_string(), call, message: e.to_string() }
}

/// A non-blocking connect; Unix sockets connect at once or not at all.
fn open_socket(path: &Path) -> Result<OwnedFd, QmpError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| io_error(path, "socket", e))?;
    let named = path.display().to_string();
    let connected = match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => connect_long(&socket, path),
        Err(e) => Err(e),
        Ok(address) => rustix::net::connect(&socket, &address),
    };
    connected.map_err(|e| match e {
        Errno::NOENT => QmpError::NoSocket { path: named },
        Errno::CONNREFUSED => QmpError::Refused { path: named },
        Errno::ACCESS | Errno::PERM => QmpError::Denied { path: named },
        Errno::AGAIN => {
            QmpError::Taken { path: named, detail: "the queue of waiting clients is full".into() }
        }
        e => io_error(path, "connect", e),
    })?;
    Ok(socket)
}

/// Socket addresses hold 108 bytes; a longer path goes through its directory.
fn connect_long(socket: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::AsRawFd;
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::NAMETOOLONG);
    };
    let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
    rustix::net::connect(socket, &SocketAddrUnix::new(short)?)
}

/// Whether the server on `path` has accepted a client, as far as that can be
/// told: `/proc/net/unix` lists the server's end of each connection with the
/// server's path and state 03 (02 while it waits). QEMU may have bound the
/// path relative to its own directory; then no other server may look alike.
/// Source: Linux `net/unix/af_unix.c`, `unix_seq_show`.
fn is_serving(path: &Path) -> bool {
    let text = Root::default().read("/proc/net/unix");
    text.ok().flatten().is_some_and(|text| serves(&text, &path.to_string_lossy()))
}

fn serves(text: &str, path: &str) -> bool {
    let same = |bound: &str| {
        bound == path || !bound.starts_with('/') && path.ends_with(&format!("/{bound}"))
    };
    let states: Vec<&str> = text
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(2, ": ").nth(1)?.split_ascii_whitespace();
            let (_flags, state) = (fields.nth(2)?, fields.nth(1)?);
            let bound = fields.nth(1)?;
            (line.ends_with(bound) && same(bound)).then_some(state)
        })
        .collect();
    states.iter().filter(|s| **s == "01").count() == 1 && states.contains(&"03")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_served_client_is_seen_unless_two_servers_look_alike() {
        let line =
            |state, path| format!("0000: 00000002 00000000 00010000 0001 {state}  1126 {path}\n");
        let one =
            ["Num RefCount Protocol Flags Type St Inode Path\n", &line("01", "q.sock")].concat();
        assert!(!serves(&one, "/run/q.sock"));
        assert!(!serves(&(one.clone() + &line("02", "q.sock")), "/run/q.sock"));
        let two = one + &line("03", "q.sock");
        assert!(serves(&two, "/run/q.sock") && !serves(&two, "/run/xq.sock"));
        assert!(!serves(&(two + &line("01", "q.sock")), "/run/q.sock"));
    }
}
