//! The daemon's end of the agent inside a VMM.
//!
//! [`Agent`] speaks [`wire`](ebb_core::wire) on a non-blocking Unix socket: one
//! JSON object per line, answers in the order of the requests. Nothing blocks
//! except [`Agent::request`], and that not past its timeout. A peer that breaks
//! the protocol is dropped; everything that it can make us hold is bounded.
//!
//! [`segments`] asks QEMU by QMP where it has the guest's RAM, which the agent
//! has to be told.

use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_core::wire::{
    Answer, Attach, Command, Hello, Lines, Outcome, Recycle, Recycled, Refusal, Refused, Reply,
    Request, SEGMENTS_MAX, Segment, Status, abi::Facts,
};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde_json::json;

use crate::qmp::{self, QmpError};
use crate::scan::agents::HashLink;

/// Requests without an answer; the agent does one at a time. What is to be open to KSM
/// may take seven.
pub const MAX_PENDING: usize = 32;
/// Bytes not yet written.
const MAX_OUTBOX: usize = 256 << 10;

/// What can go wrong, each with what to do about it. The first field is the
/// socket's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// No such socket, or nobody listens.
    #[error("{0}: no agent there: the VM was started without libebb_vmm.so, or has ended")]
    None(String),
    /// EACCES, EPERM.
    #[error("{0}: permission denied: run Ebb as root or as the VMM's user")]
    Denied(String),
    /// Another system call that failed.
    #[error("{0}: {1}: {2}")]
    Io(String, &'static str, String),
    /// End of file.
    #[error("{0}: the agent closed the connection")]
    Closed(String),
    /// Not our protocol; the connection is gone.
    #[error("{0}: not the agent's protocol: {1}; connection dropped")]
    Garbage(String, String),
    /// No answer within so many milliseconds.
    #[error("{0}: no answer within {1} ms")]
    Timeout(String, u64),
    /// [`MAX_PENDING`] requests wait already.
    #[error("{0}: more than {MAX_PENDING} requests without an answer")]
    Full(String),
    /// The agent said no; the connection is fine.
    #[error("{0}: {1}")]
    Refused(String, Refusal),
}

/// A connection to the agent of one VM.
#[derive(Debug)]
pub struct Agent {
    path: PathBuf,
    socket: Option<OwnedFd>,
    failure: Option<AgentError>,
    next_id: u64,
    /// Requests in order, and whether somebody still waits for the answer.
    pending: VecDeque<(u64, bool)>,
    replies: BTreeMap<u64, Outcome>,
    lines: Lines,
    outbox: Vec<u8>,
    /// A descriptor that goes with a byte of the outbox, and that byte's place.
    descriptor: Option<(usize, OwnedFd)>,
}

impl Agent {
    /// Connects; Unix sockets do so at once or not at all.
    pub fn connect(path: impl Into<PathBuf>) -> Result<Agent, AgentError> {
        let path = path.into();
        let socket = open_socket(&path)?;
        Ok(Agent::over(socket, path))
    }

    /// Speaks on a socket that is connected already and does not block.
    pub fn over(socket: OwnedFd, path: PathBuf) -> Agent {
        Agent {
            path,
            socket: Some(socket),
            failure: None,
            next_id: 1,
            pending: VecDeque::new(),
            replies: BTreeMap::new(),
            lines: Lines::default(),
            outbox: Vec::new(),
            descriptor: None,
        }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process that listens (`SO_PEERCRED`): compare it with the VM's.
    pub fn peer_pid(&self) -> Option<u32> {
        let cred = rustix::net::sockopt::socket_peercred(self.socket.as_ref()?).ok()?;
        u32::try_from(rustix::process::Pid::as_raw(Some(cred.pid))).ok().filter(|pid| *pid > 0)
    }

    /// For `poll`; `None` after a failure.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Whether to poll for writing too.
    pub fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Why it is over, if it is.
    pub fn failure(&self) -> Option<&AgentError> {
        self.failure.as_ref()
    }

    /// Requests that somebody still waits for.
    pub fn waiting(&self) -> usize {
        self.pending.iter().filter(|p| p.1).count()
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

    /// The same, with a descriptor that goes with the first byte of the line.
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
            return Err(AgentError::Full(self.named()));
        }
        self.descriptor = descriptor.map(|fd| (self.outbox.len(), fd)).or(self.descriptor.take());
        let id = self.next_id;
        self.next_id += 1;
        self.outbox.extend(Request { id, command }.line());
        self.pending.push_back((id, true));
        Ok(id)
    }

    /// The answer to a request, once.
    pub fn take_reply(&mut self, id: u64) -> Option<Result<Answer, AgentError>> {
        match self.replies.remove(&id)? {
            Outcome::Ok(answer) => Some(Ok(answer)),
            Outcome::Error(refusal) => Some(Err(AgentError::Refused(self.named(), refusal))),
        }
    }

    /// Nobody waits for this answer any more.
    pub fn forget(&mut self, id: u64) {
        self.replies.remove(&id);
        self.pending.iter_mut().filter(|p| p.0 == id).for_each(|p| p.1 = false);
    }

    /// All reading and writing that is possible without blocking.
    pub fn pump(&mut self) {
        self.write_some();
        self.read_some();
    }

    fn read_some(&mut self) {
        let mut buffer = [0u8; 4096];
        // Bounded: each line answers a request, of which there are few.
        while let Some(socket) = &self.socket {
            match rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return self.fail(AgentError::Closed(self.named())),
                Ok((n, _)) => self.feed(&buffer[..n]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNRESET) => return self.fail(AgentError::Closed(self.named())),
                Err(e) => return self.fail(io_error(&self.path, "recv", e)),
            }
        }
    }

    fn feed(&mut self, bytes: &[u8]) {
        let mut replies = Vec::new();
        let fed = self.lines.feed(bytes, |line| replies.push(Reply::parse(line)));
        for reply in replies.into_iter().chain(fed.err().map(Err)) {
            let error = match reply {
                Ok(r) => match self.pending.front() {
                    Some((id, wanted)) if *id == r.id => {
                        if *wanted {
                            self.replies.insert(r.id, r.outcome);
                        }
                        self.pending.pop_front();
                        continue;
                    }
                    _ => match r.outcome {
                        // To a line that it could not read, or before it hangs up.
                        Outcome::Error(no) => AgentError::Refused(self.named(), no),
                        Outcome::Ok(_) => AgentError::Garbage(
                            self.named(),
                            format!("an answer to request {}, which was not asked", r.id),
                        ),
                    },
                },
                Err(e) => AgentError::Garbage(self.named(), e.0),
            };
            return self.fail(error);
        }
    }

    fn write_some(&mut self) {
        while let Some(socket) = self.socket.as_ref().filter(|_| !self.outbox.is_empty()) {
            let sent = match &self.descriptor {
                Some((0, fd)) => send_descriptor(socket, &self.outbox, fd.as_fd()),
                Some((at, _)) => {
                    rustix::net::send(socket, &self.outbox[..*at], SendFlags::NOSIGNAL)
                }
                None => rustix::net::send(socket, &self.outbox, SendFlags::NOSIGNAL),
            };
            match sent {
                Ok(n) => {
                    self.outbox.drain(..n);
                    // Gone with its byte, or nearer to it.
                    let left = self.descriptor.take().filter(|(at, _)| *at > 0);
                    self.descriptor = left.map(|(at, fd)| (at - n, fd));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // What it said before it hung up is still to be read.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.descriptor = None;
                    return self.outbox.clear();
                }
                Err(e) => return self.fail(io_error(&self.path, "send", e)),
            }
        }
    }

    /// Sends a request and waits for its answer, at most `timeout` long.
    pub fn request(&mut self, command: Command, timeout: Duration) -> Result<Answer, AgentError> {
        let id = self.send(command)?;
        self.wait(id, timeout)
    }

    fn wait(&mut self, id: u64, timeout: Duration) -> Result<Answer, AgentError> {
        let until = Instant::now() + timeout;
        loop {
            self.pump();
            if let Some(answer) = self.take_reply(id) {
                return answer;
            }
            if let Some(error) = &self.failure {
                return Err(error.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.forget(id);
                return Err(AgentError::Timeout(self.named(), timeout.as_millis() as u64));
            }
            let Some(fd) = self.fd() else { continue };
            let flags =
                if self.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let Ok(left) = left.try_into() else { continue };
            let _ = rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&left));
        }
    }

    /// Who is there.
    pub fn hello(&mut self, timeout: Duration) -> Result<Hello, AgentError> {
        match self.request(Command::Hello, timeout)? {
            Answer::Hello(hello) => Ok(hello),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Hands over the VM's RAM, with a descriptor of `/dev/userfaultfd` for a
    /// VMM that may not open it itself.
    pub fn attach(
        &mut self,
        attach: Attach,
        device: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(), AgentError> {
        let attach = Attach { descriptor: device.is_some(), ..attach };
        let device = device.map(|d| d.try_clone_to_owned()).transpose();
        let device = device
            .map_err(|e| AgentError::Io(self.named(), "dup of a descriptor", e.to_string()))?;
        let id = self.send_with(Command::Attach(attach), device)?;
        self.wait(id, timeout).map(drop)
    }

    /// How it does; with `held`, also what the host holds of the free pages.
    pub fn status(&mut self, held: bool, timeout: Duration) -> Result<Status, AgentError> {
        match self.request(Command::Status { held }, timeout)? {
            Answer::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Gives free pages back; the timeout is on top of the budget. For lab and tests, as all
    /// that waits here is.
    pub fn recycle(&mut self, want: Recycle, timeout: Duration) -> Result<Recycled, AgentError> {
        let timeout = timeout.saturating_add(Duration::from_millis(want.budget_ms));
        let mut done = self.request(Command::Recycle(want), timeout);
        // Who runs the VM by hand knows that nobody else is given its RAM.
        if matches!(&done, Err(AgentError::Refused(_, no)) if no.kind == Refused::NotReady)
            && let Some(generation) = self.status(false, timeout)?.unclear
        {
            self.request(Command::Cleared { generation }, timeout)?;
            done = self.request(Command::Recycle(want), timeout);
        }
        match done? {
            Answer::Recycled(done) => Ok(done),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What the guest says of itself.
    pub fn facts(&mut self, timeout: Duration) -> Result<Facts, AgentError> {
        match self.request(Command::Facts, timeout)? {
            Answer::Facts(facts) => Ok(facts),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Has it hash pages of the RAM it was handed for a scan; who asks it does so at what is
    /// returned.
    pub fn hashes(
        &mut self,
        segments: &[Segment],
        timeout: Duration,
    ) -> Result<HashLink, AgentError> {
        let pair = HashLink::pair(segments);
        let (ours, theirs) =
            pair.map_err(|e| AgentError::Io(self.named(), "socketpair", e.to_string()))?;
        let id = self.send_with(Command::Hashes, Some(theirs))?;
        self.wait(id, timeout).map(|_| ours)
    }

    /// Relays that the vCPUs run, or not.
    pub fn run_state(&mut self, running: bool, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::RunState { running }, timeout).map(drop)
    }

    /// Relays a reset (or load, or migration).
    pub fn reset_seen(&mut self, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::ResetSeen, timeout).map(drop)
    }

    /// Has it give up all protection.
    pub fn stand_down(&mut self, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::StandDown, timeout).map(drop)
    }

    fn unexpected(&self, answer: &Answer) -> AgentError {
        AgentError::Garbage(
            self.named(),
            format!("unexpected {answer:?}").chars().take(80).collect(),
        )
    }
}

/// Sends bytes, and a descriptor with the first of them.
fn send_descriptor(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
) -> Result<usize, Errno> {
    let fds = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

fn io_error(path: &Path, call: &'static str, e: Errno) -> AgentError {
    AgentError::Io(path.display().to_string(), call, e.to_string())
}

fn open_socket(path: &Path) -> Result<OwnedFd, AgentError> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| io_error(path, "socket", e))?;
    let address = SocketAddrUnix::new(path).map_err(|e| io_error(path, "address", e))?;
    let named = path.display().to_string();
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Err(AgentError::None(named)),
        Err(Errno::ACCESS | Errno::PERM) => Err(AgentError::Denied(named)),
        Err(e) => Err(io_error(path, "connect", e)),
    }
}

/// A stretch of guest-physical memory as `info mtree -f` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatRange {
    /// First address.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// Name of the memory region, e.g. `pc.ram`.
    pub name: String,
    /// Offset in that region.
    pub offset: u64,
}

/// The RAM of the view `memory` (what the CPUs see), in the text of `info mtree -f`.
///
/// Lines are `  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM`, with
/// ` @0000000000100000` after the name where the offset is not 0. ROM and
/// devices have another word than `ram`. Source: QEMU `softmmu/memory.c`,
/// `mtree_print_flatview`.
pub fn parse_mtree(text: &str) -> Vec<FlatRange> {
    let mut found = Vec::new();
    let (mut ours, mut done) = (false, false);
    for line in text.lines() {
        if line.starts_with("FlatView") {
            done |= !found.is_empty();
            ours = false;
        } else if line.trim_start().starts_with("AS \"memory\"") {
            ours = true;
        }
        if let Some(range) = parse_flat_range(line).filter(|_| ours && !done) {
            found.push(range);
        }
    }
    found
}

fn parse_flat_range(line: &str) -> Option<FlatRange> {
    let (range, rest) = line.trim_start().split_once(" (prio ")?;
    let (start, last) = range.split_once('-')?;
    let (_, name) = rest.split_once(", ram): ")?;
    let hex = |t: &str| u64::from_str_radix(t, 16).ok();
    let (name, rest) = name.split_once(" @").unwrap_or((name, "0"));
    let offset = hex(rest.split(' ').next()?)?;
    let name = name.trim_end().strip_suffix(" KVM").unwrap_or(name.trim_end());
    let (start, end) = (hex(start)?, hex(last)?.checked_add(1)?);
    (start < end).then(|| FlatRange { start, end, name: name.to_string(), offset })
}

/// Joins stretches of one region that follow each other (PAM and SMRAM cut holes
/// below 1 MiB), and leaves out what is too small to be the VM's RAM.
pub(crate) fn main_ram(ranges: &[FlatRange]) -> Vec<FlatRange> {
    // The region at 0 is RAM; DIMMs and the like are large.
    let first = ranges.iter().find(|r| r.start == 0).map(|r| r.name.clone());
    let mut joined: Vec<FlatRange> = Vec::new();
    for r in ranges {
        let main = Some(&r.name) == first.as_ref();
        if !main && (r.end - r.start) < 128 << 20 {
            continue;
        }
        match joined.last_mut() {
            // A hole with the same delta: firmware and video memory below 1 MiB.
            Some(l)
                if l.name == r.name
                    && r.start.wrapping_sub(r.offset) == l.start.wrapping_sub(l.offset)
                    && (r.start == l.end || r.start <= 1 << 20) =>
            {
                l.end = r.end;
            }
            _ => joined.push(r.clone()),
        }
    }
    joined
}

/// The address in `Host virtual address for 0x0 (pc.ram) is 0x7f…`.
pub fn parse_gpa2hva(text: &str) -> Option<u64> {
    let (_, address) = text.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address.trim(), 16).ok()
}

/// Where QEMU has the guest's RAM, by two commands of its human monitor, all within the
/// timeout. For the lab; the daemon waits for nothing (`inventory`).
pub fn segments(qmp: &mut qmp::Client, timeout: Duration) -> Result<Vec<Segment>, QmpError> {
    let until = Instant::now() + timeout;
    let mut ask = |line: String| -> Result<String, QmpError> {
        let arguments = json!({ "command-line": line });
        let left = until.saturating_duration_since(Instant::now());
        let said = qmp.execute("human-monitor-command", Some(arguments), left)?;
        Ok(said.as_str().unwrap_or_default().to_string())
    };
    let ranges = main_ram(&parse_mtree(&ask("info mtree -f".into())?));
    let mut segments = Vec::new();
    for r in ranges.iter().take(SEGMENTS_MAX) {
        // Unmapped, or the address is refused: no segment; the agent says so.
        if let Some(hva) = parse_gpa2hva(&ask(format!("gpa2hva {:#x}", r.start))?) {
            segments.push(Segment { gpa: r.start, size: r.end - r.start, hva });
        }
    }
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    const MTREE: &str = "FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000 KVM
  00000000000cb000-00000000000fffff (prio 0, ram): pc.ram @00000000000cb000 KVM
  0000000000100000-00000000bfffffff (prio 0, ram): pc.ram @0000000000100000 KVM
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
  0000000100000000-000000013fffffff (prio 0, ram): pc.ram @00000000c0000000 KVM

FlatView #2
 AS \"piix3-ide\", root: bus master container
  0000000000000000-0000000000000fff (prio 0, ram): nothing
";

    #[test]
    fn ram_is_found_in_the_memory_tree() {
        let all = parse_mtree(MTREE);
        assert_eq!(all.len(), 5);
        let ram = main_ram(&all);
        let found: Vec<_> = ram.iter().map(|r| (r.start, r.end, r.offset)).collect();
        assert_eq!(found, [(0, 3 << 30, 0), (4 << 30, 5 << 30, 3 << 30)]);
        assert_eq!(parse_mtree("nonsense\n (prio 0, ram): x\n"), []);
    }

    #[test]
    fn host_addresses_are_read() {
        let said = "Host virtual address for 0x0 (pc.ram) is 0x7f12a0000000\r\n";
        assert_eq!(parse_gpa2hva(said), Some(0x7f12_a000_0000));
        assert_eq!(parse_gpa2hva("No memory is mapped at address 0x0"), None);
    }

    /// An agent that reads a line and says `answers`, one after each line.
    fn scripted(answers: &'static [&'static str]) -> (Agent, std::thread::JoinHandle<()>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
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

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn answers_and_refusals_arrive() {
        let (mut agent, thread) = scripted(&[
            "{\"id\":1,\"ok\":{\"answer\":\"status\",\"state\":\"ready\",\"free\":8192}}\n",
            "{\"id\":2,\"error\":{\"kind\":\"aside\",\"text\":\"vfio\"}}\n",
        ]);
        assert_eq!(agent.peer_pid(), Some(std::process::id()));
        assert_eq!(agent.status(false, SOON).unwrap().free.unwrap().0, 8192);
        let refused = agent.stand_down(SOON).unwrap_err();
        assert!(matches!(&refused, AgentError::Refused(_, r) if r.text == "vfio"), "{refused}");
        thread.join().unwrap();
        assert!(matches!(agent.facts(SOON), Err(AgentError::Closed(_))));
    }

    #[test]
    fn a_peer_that_breaks_the_protocol_is_dropped() {
        for bad in [
            "nonsense\n",
            "{\"id\":7,\"ok\":{\"answer\":\"done\"}}\n",
            "{\"id\":1,\"ok\":{\"answer\":\"facts\"}}\n",
        ] {
            let answers: &'static [&'static str] = Box::leak(Box::new([bad]));
            let (mut agent, thread) = scripted(answers);
            let error = agent.status(false, SOON).unwrap_err();
            assert!(matches!(error, AgentError::Garbage(..)), "{bad}: {error}");
            thread.join().unwrap();
        }
        let missing = Agent::connect("/nonexistent/agent").unwrap_err();
        assert!(matches!(missing, AgentError::None(_)));
    }
}
