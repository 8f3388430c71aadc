//! QMP as a state machine: bytes in, messages and bytes out, no socket and no
//! clock, so that tests and the fuzzer drive all of it.
//!
//! QEMU sends one JSON object per message, on one line or (`pretty=on`) on
//! many; messages are therefore cut by nesting, not by newline. Anything that
//! is not QMP ends the connection: after garbage nothing that follows can be
//! trusted. Source: QEMU `docs/interop/qmp-spec.rst`, `monitor/qmp.c`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::path::Path;

use serde_json::Value;

use super::message::{Cut, Cutter, Event, Message, encode, excerpt, parse_message};
use crate::probe::managers::is_ebbs;

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
/// Bytes not yet written; a full socket buffer is noticed by then.
pub const MAX_OUTBOX: usize = 1 << 20;
/// What can go wrong, with what to do about it. The first field is the socket's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QmpError {
    /// QEMU serves one client at a time and this is not it; what was seen.
    #[error(
        "{0}: QEMU serves one client per QMP socket and does not serve us: {1}{how}", how = own_socket(.0)
    )]
    Taken(String, String),
    /// The socket is shared, and nothing was sent: QEMU did not serve Ebb, and why.
    #[error("{0}: {1}")]
    Busy(String, String),
    /// QEMU answered with an error; the connection is fine.
    #[error("{command}: {desc} ({class})")]
    Command {
        command: String,
        /// QEMU's error class, nearly always `GenericError`.
        class: String,
        desc: String,
    },
    /// Anything else. Without an answer in time, or with too much under way, the connection stays.
    #[error("{0}: {1}")]
    Failed(String, String),
}

/// What to do where others use this socket; it is no remedy for one that only Ebb is to use.
fn own_socket(path: &str) -> &'static str {
    match is_ebbs(Path::new(path)) {
        true => "",
        false => {
            "; give Ebb a socket of its own (a second -qmp \
             unix:/run/NAME-ebb.qmp,server=on,wait=off)"
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Greeting,
    /// `qmp_capabilities` is under way.
    Negotiating,
    Ready,
    /// Over; [`Protocol::failure`] says why.
    Failed,
    /// There is no connection now, and the next command makes one: the socket is shared.
    Away,
}

impl State {
    /// Whether a command that is sent now is served.
    pub fn serves(self) -> bool {
        matches!(self, State::Ready | State::Away)
    }
}

#[derive(Debug)]
struct Pending {
    command: String,
    /// The answer is not wanted any more: it is dropped.
    forgotten: bool,
    /// The answer is wanted whenever it comes; until then nothing is held up.
    late: bool,
}

/// The state machine of one connection, without the connection.
#[derive(Debug, Default)]
pub struct Protocol {
    path: String,
    state: State,
    failure: Option<QmpError>,
    inbox: Vec<u8>,
    cutter: Cutter,
    /// What is to be written.
    pub outbox: Vec<u8>,
    /// Commands that were sent before the connection was ready, by their ids.
    early: BTreeMap<u64, Vec<u8>>,
    next_id: u64,
    pending: BTreeMap<u64, Pending>,
    replies: BTreeMap<u64, (Result<Value, QmpError>, usize)>,
    reply_bytes: usize,
    events: VecDeque<Event>,
    /// Connections come and go: what is to be sent goes out in one piece.
    shared: bool,
}

/// The id of `qmp_capabilities`; callers' ids start at 1.
const NEGOTIATE: u64 = 0;

impl Protocol {
    /// A connection that waits for the greeting. `path` only serves messages.
    pub fn new(path: impl Into<String>) -> Protocol {
        Protocol { path: path.into(), next_id: NEGOTIATE + 1, ..Protocol::default() }
    }

    /// One whose socket is shared: it has no connection until [`Protocol::begin`].
    pub fn shared(path: impl Into<String>) -> Protocol {
        Protocol { state: State::Away, shared: true, ..Protocol::new(path) }
    }

    pub fn wants_connection(&self) -> bool {
        self.state == State::Away && !self.early.is_empty()
    }

    /// A connection was made, which waits for the greeting.
    pub fn begin(&mut self) {
        self.state = State::Greeting;
    }

    /// Whether all that was sent is answered, so that the connection may end.
    pub fn is_done(&self) -> bool {
        self.state == State::Ready && self.pending.is_empty() && self.outbox.is_empty()
    }

    /// The connection ends, and another may be made. What is not answered fails with `why`.
    pub fn leave(&mut self, why: &QmpError) {
        if self.state == State::Failed {
            return;
        }
        self.drop_pending(why);
        self.state = State::Away;
    }

    fn drop_pending(&mut self, why: &QmpError) {
        for (id, p) in std::mem::take(&mut self.pending) {
            if !p.forgotten {
                self.replies.insert(id, (Err(why.clone()), 0));
            }
        }
        self.inbox = Vec::new();
        self.cutter = Cutter::default();
        self.outbox = Vec::new();
        self.early = BTreeMap::new();
    }

    pub fn state(&self) -> State {
        self.state
    }

    pub fn failure(&self) -> Option<&QmpError> {
        self.failure.as_ref()
    }

    /// Ends the connection; every command under way fails with `error`.
    pub fn fail(&mut self, error: QmpError) {
        if self.state == State::Failed {
            return;
        }
        self.state = State::Failed;
        self.drop_pending(&error);
        self.failure = Some(error);
    }

    pub fn end_of_file(&mut self) {
        let during = match self.pending.values().next() {
            Some(p) => format!(" during {}", p.command),
            None if self.state == State::Greeting => " before it greeted".into(),
            None => String::new(),
        };
        let why = format!("QEMU closed the connection{during}");
        self.fail(QmpError::Failed(self.path.clone(), why));
    }

    fn garbage(&mut self, what: impl Display) {
        let why = format!("not QMP: {what}; connection dropped");
        self.fail(QmpError::Failed(self.path.clone(), why));
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
        debug_assert!(self.reply_bytes <= MAX_REPLY_BYTES && self.pending.len() <= MAX_PENDING + 1);
    }

    fn too_long(&mut self) {
        self.garbage(format!("a message of more than {MAX_MESSAGE} bytes"));
    }

    fn message(&mut self, bytes: &[u8]) {
        let message = match parse_message(bytes) {
            Ok(m) => m,
            Err(why) => return self.garbage(why),
        };
        match (self.state, message) {
            (State::Greeting, Message::Greeting) => {
                self.state = State::Negotiating;
                let command = "qmp_capabilities".into();
                self.pending.insert(NEGOTIATE, Pending { command, forgotten: true, late: false });
                encode(&mut self.outbox, "qmp_capabilities", None, NEGOTIATE);
                // QEMU carries out what it is sent in this order, so nothing need be waited for.
                if self.shared {
                    self.send_early();
                }
            }
            (State::Greeting, _) => self.garbage("no greeting"),
            (_, Message::Greeting) => self.garbage("a second greeting"),
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
                    self.send_early();
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
        let full = |what, limit: usize| {
            Err(QmpError::Failed(self.path.clone(), format!("more than {limit} {what}")))
        };
        if self.pending.len() + self.replies.len() >= MAX_PENDING {
            return full("commands without an answer", MAX_PENDING);
        }
        let early = self.early.values().map(Vec::len).sum::<usize>();
        if self.outbox.len() + early > MAX_OUTBOX {
            return full("bytes not yet written", MAX_OUTBOX);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.pending
            .insert(id, Pending { command: command.to_owned(), forgotten: false, late: false });
        let now = match self.state {
            State::Negotiating => self.shared,
            state => state == State::Ready,
        };
        let out = if now { &mut self.outbox } else { self.early.entry(id).or_default() };
        encode(out, command, arguments, id);
        Ok(id)
    }

    fn send_early(&mut self) {
        let early = std::mem::take(&mut self.early);
        early.into_values().for_each(|command| self.outbox.extend(command));
    }

    /// Takes a command back that waits for the connection; whether it did.
    pub fn take_back(&mut self, id: u64) -> bool {
        let waits = self.early.remove(&id).is_some();
        if waits {
            self.pending.remove(&id);
        }
        waits
    }

    /// The answer to a command, once.
    pub fn take_reply(&mut self, id: u64) -> Option<Result<Value, QmpError>> {
        let (answer, length) = self.replies.remove(&id)?;
        self.reply_bytes -= length;
        Some(answer)
    }

    /// This answer is not wanted any more; a late one is dropped.
    pub fn forget(&mut self, id: u64) {
        let _ = self.take_reply(id);
        if let Some(p) = self.pending.get_mut(&id) {
            p.forgotten = true;
        }
    }

    /// This answer is not waited for any more, and kept when it comes.
    pub fn not_wait(&mut self, id: u64) {
        if let Some(p) = self.pending.get_mut(&id) {
            p.late = true;
        }
    }

    pub fn is_pending(&self, id: u64) -> bool {
        self.pending.contains_key(&id)
    }

    /// Commands whose answers are waited for.
    pub fn waiting(&self) -> usize {
        self.pending.values().filter(|p| !p.forgotten && !p.late).count()
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// Whether an event is queued of which this is true.
    pub fn any_event(&self, is: impl FnMut(&Event) -> bool) -> bool {
        self.events.iter().any(is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_socket_of_ebbs_own_is_not_told_to_be_given() {
        let said = |path: &str| QmpError::Taken(path.into(), "no greeting".into()).to_string();
        assert!(said("/run/a.qmp").contains("give Ebb a socket of its own"));
        assert!(said("/run/a-ebb.qmp").ends_with("does not serve us: no greeting"));
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_stay_within_the_limits(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..20),
            greeted in any::<bool>(),
        ) {
            let mut p = Protocol::new("test");
            if greeted {
                p.feed(b"{\"QMP\": {}} {\"return\": {}, \"id\": 0}");
                prop_assert_eq!(p.state(), State::Ready);
            }
            for piece in &pieces {
                p.feed(piece);
                prop_assert!(p.inbox.len() + p.reply_bytes <= MAX_MESSAGE + MAX_REPLY_BYTES);
            }
            let _ = parse_message(&pieces.concat());
        }
    }
}
