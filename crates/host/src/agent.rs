//! The daemon's end of the agent inside a VMM.
//!
//! [`Agent`] speaks [`wire`](ebb_core::wire) on a non-blocking Unix socket: one
//! JSON object per line, answers in the order of the requests. Nothing blocks.
//! A peer that breaks the protocol is dropped; everything that it can make us hold is
//! bounded. Where QEMU has the guest's RAM, which the agent has to be told, is in `ram`.

mod ram;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ebb_core::wire::{Answer, Command, Lines, Refusal, Reply, ReplyResult, Request};
use rustix::io::Errno;

pub use self::ram::{FlatRange, main_ram, parse_gpa2hva, parse_mtree};
use crate::sockets::{self, Descriptor};

/// Requests without an answer; the agent does one at a time. What is to be open to KSM
/// may take seven.
pub const MAX_PENDING: usize = 32;
/// Bytes not yet written.
const MAX_OUTBOX: usize = 256 << 10;
/// Bytes that are parsed at once.
const MAX_FEED: usize = 4 << 10;

/// What can go wrong, with what to do about it. The first field is the socket's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    #[error("{0}: no agent there: the VM was started without libebb_vmm.so, or has ended")]
    None(String),
    /// The agent said no; the connection is fine.
    #[error("{0}: {1}")]
    Refused(String, Refusal),
    /// Anything else. With too much under way the connection is fine.
    #[error("{0}: {1}")]
    Failed(String, String),
}

#[derive(Debug, Default)]
pub struct Agent {
    path: PathBuf,
    socket: Option<OwnedFd>,
    failure: Option<AgentError>,
    next_id: u64,
    /// Requests without an answer, in order.
    pending: VecDeque<u64>,
    replies: BTreeMap<u64, ReplyResult>,
    lines: Lines,
    outbox: Vec<u8>,
    descriptor: Descriptor,
}

impl Agent {
    /// Connects; Unix sockets do so at once or not at all.
    pub fn connect(path: impl Into<PathBuf>) -> Result<Agent, AgentError> {
        let path = path.into();
        let named = path.display().to_string();
        let socket = sockets::connect(&path).map_err(|e| match e {
            Errno::NOENT | Errno::CONNREFUSED => AgentError::None(named),
            Errno::ACCESS | Errno::PERM => {
                let why = "permission denied: run Ebb as root or as the VMM's user";
                AgentError::Failed(named, why.into())
            }
            e => io_error(&path, "connect", e),
        })?;
        Ok(Agent::over(socket, path))
    }

    /// Speaks on a socket that is connected already and does not block.
    pub fn over(socket: OwnedFd, path: PathBuf) -> Agent {
        Agent { path, socket: Some(socket), next_id: 1, ..Agent::default() }
    }

    /// The process that listens (`SO_PEERCRED`): compare it with the VM's.
    pub fn peer_pid(&self) -> Option<u32> {
        sockets::peer_pid(self.socket.as_ref()?)
    }

    /// For `poll`; `None` after a failure.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    pub fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub fn failure(&self) -> Option<&AgentError> {
        self.failure.as_ref()
    }

    fn named(&self) -> String {
        self.path.display().to_string()
    }

    fn fail(&mut self, error: AgentError) {
        self.socket = None;
        self.descriptor = None;
        self.pending.clear();
        self.failure.get_or_insert(error);
    }

    /// Queues a request and returns its id; written by the next [`Agent::pump`].
    /// Word of a reset, of the run state, or to stand down ends a recycle early;
    /// other requests wait for its end.
    pub fn send(&mut self, command: Command) -> Result<u64, AgentError> {
        self.send_with(command, None)
    }

    /// Queues a request with a descriptor, which goes with the first byte of the line.
    pub fn send_with(
        &mut self,
        command: Command,
        descriptor: Option<OwnedFd>,
    ) -> Result<u64, AgentError> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let full = self.pending.len() + self.replies.len() >= MAX_PENDING;
        let taken = descriptor.is_some() && self.descriptor.is_some();
        if full || taken || self.outbox.len() > MAX_OUTBOX {
            let why = format!("more than {MAX_PENDING} requests without an answer");
            return Err(AgentError::Failed(self.named(), why));
        }
        self.descriptor = descriptor.map(|fd| (self.outbox.len(), fd)).or(self.descriptor.take());
        let id = self.next_id;
        self.next_id += 1;
        self.outbox.extend(Request { id, command }.line());
        self.pending.push_back(id);
        Ok(id)
    }

    /// The answer to a request, once.
    pub fn take_reply(&mut self, id: u64) -> Option<Result<Answer, AgentError>> {
        match self.replies.remove(&id)? {
            ReplyResult::Ok(answer) => Some(Ok(answer)),
            ReplyResult::Error(refusal) => Some(Err(AgentError::Refused(self.named(), refusal))),
        }
    }

    /// All reading and writing that is possible without blocking.
    pub fn pump(&mut self) {
        self.write_some();
        self.read_some();
    }

    fn read_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        match sockets::receive(socket) {
            Ok((bytes, there)) => {
                // In pieces: what follows a bad answer is not parsed.
                for part in bytes.chunks(MAX_FEED) {
                    self.feed(part);
                    if self.failure.is_some() {
                        return;
                    }
                }
                if !there {
                    let why = "the agent closed the connection".into();
                    self.fail(AgentError::Failed(self.named(), why));
                }
            }
            Err(e) => self.fail(io_error(&self.path, "recv", e)),
        }
    }

    fn feed(&mut self, bytes: &[u8]) {
        let mut replies = Vec::new();
        let fed = self.lines.feed(bytes, |line| replies.push(Reply::parse(line)));
        for reply in replies.into_iter().chain(fed.err().map(Err)) {
            let what = match reply {
                Ok(r) if self.pending.front() == Some(&r.id) => {
                    self.replies.insert(r.id, r.result);
                    self.pending.pop_front();
                    continue;
                }
                // To a line that it could not read, or before it hangs up.
                Ok(Reply { result: ReplyResult::Error(no), .. }) => {
                    return self.fail(AgentError::Refused(self.named(), no));
                }
                Ok(Reply { id, .. }) => format!("an answer to request {id}, which was not asked"),
                Err(e) => e.0,
            };
            let why = format!("not the agent's protocol: {what}; connection dropped");
            return self.fail(AgentError::Failed(self.named(), why));
        }
    }

    fn write_some(&mut self) {
        let Some(socket) = &self.socket else { return };
        match sockets::send(socket, &mut self.outbox, &mut self.descriptor) {
            Ok(()) => {}
            // What it said before it hung up is still to be read.
            Err(Errno::PIPE | Errno::CONNRESET) => {
                self.descriptor = None;
                self.outbox.clear();
            }
            Err(e) => self.fail(io_error(&self.path, "send", e)),
        }
    }
}

fn io_error(path: &Path, call: &str, e: Errno) -> AgentError {
    AgentError::Failed(path.display().to_string(), format!("{call}: {e}"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::testing::{socket, within_a_minute};

    /// An agent that reads a line and says `answers`, one after each line.
    fn scripted(answers: &'static [&'static str]) -> (Agent, std::thread::JoinHandle<()>) {
        let (dir, listener, path) = socket();
        let thread = std::thread::spawn(move || {
            let _dir = dir;
            let (mut socket, _) = listener.accept().unwrap();
            for answer in answers {
                let mut byte = [0];
                while socket.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {}
                socket.write_all(answer.as_bytes()).unwrap();
            }
        });
        (Agent::connect(path).unwrap(), thread)
    }

    fn answer(agent: &mut Agent, command: Command) -> Result<Answer, AgentError> {
        let id = agent.send(command)?;
        within_a_minute(|| {
            agent.pump();
            agent.take_reply(id).or_else(|| agent.failure().cloned().map(Err))
        })
    }

    const STATUS: Command = Command::Status { held: false, room: None };

    #[test]
    fn answers_and_refusals_arrive() {
        let (mut agent, thread) = scripted(&[
            "{\"id\":1,\"ok\":{\"answer\":\"status\",\"state\":\"ready\",\"free\":8192}}\n",
            "{\"id\":2,\"error\":{\"kind\":\"aside\",\"text\":\"vfio\"}}\n",
        ]);
        assert_eq!(agent.peer_pid(), Some(std::process::id()));
        let Answer::Status(status) = answer(&mut agent, STATUS).unwrap() else { panic!() };
        assert_eq!(status.free.unwrap().0, 8192);
        let refused = answer(&mut agent, Command::StandDown).unwrap_err();
        assert!(matches!(&refused, AgentError::Refused(_, r) if r.text == "vfio"), "{refused}");
        thread.join().unwrap();
        let ended = answer(&mut agent, Command::Facts).unwrap_err().to_string();
        assert!(ended.ends_with(": the agent closed the connection"), "{ended}");
    }

    #[test]
    fn a_peer_that_breaks_the_protocol_is_dropped() {
        for bad in ["nonsense\n", "{\"id\":7,\"ok\":{\"answer\":\"done\"}}\n"] {
            let answers: &'static [&'static str] = Box::leak(Box::new([bad]));
            let (mut agent, thread) = scripted(answers);
            let error = answer(&mut agent, STATUS).unwrap_err();
            assert!(error.to_string().contains(": not the agent's protocol: "), "{bad}: {error}");
            thread.join().unwrap();
        }
        let missing = Agent::connect("/nonexistent/agent").unwrap_err();
        assert!(matches!(missing, AgentError::None(_)));
    }
}
