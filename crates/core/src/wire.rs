//! The daemon's word with the agent inside a VMM: one JSON object per line.
//!
//! The agent listens, one daemon at a time connects, asks, and gets one answer
//! per request, in order. Lines are bounded both ways. An agent does nothing
//! before it is asked, and when the daemon goes it undoes whatever protection it
//! holds and forgets the VM: there is nothing to keep in step.
//!
//! ```text
//! → {"id":1,"command":"attach","segments":[{"gpa":0,"size":1073741824,"hva":140..}]}
//! ← {"id":1,"ok":{"answer":"done"}}
//! → {"id":2,"command":"recycle","budget_ms":100}
//! ← {"id":2,"ok":{"answer":"recycled","bytes":268435456,…}}
//! ← {"id":3,"error":{"kind":"not_ready","text":"…"}}
//! ```
//!
//! [`abi`] holds the other thing that is read across a wall of trust: what the
//! guest shows.

pub mod abi;
pub mod firmware;
pub mod hashes;

use serde::{Deserialize, Serialize};

use self::abi::Facts;
use self::firmware::Firmware;
use crate::histogram::Histogram;
use crate::units::{Bytes, PAGE};

/// Version of this protocol; the agent says which it speaks.
pub const PROTOCOL: u32 = 2;
/// Longest line either way, bytes; 64 segments with 20-digit numbers take 6 KiB.
pub const LINE_MAX: usize = 16 << 10;
/// Most pieces of RAM: a VM has one or two, and one for each DIMM.
pub const SEGMENTS_MAX: usize = 64;
/// Most ranges in one [`Advise`]: a line holds no more of ten digits each.
pub const SPANS_MAX: usize = 640;
/// Most reasons to stand aside in one request, and characters of each.
pub const OBJECTIONS_MAX: usize = 16;
/// The objection to VMs whose QEMU discards pages on the guest's word too (free
/// page reporting, virtio-mem, a balloon that moves): in anonymous memory that
/// takes our protection with it in the middle of a window, and the guest may
/// write before we discard. An agent with shared RAM only takes no notice, nor
/// does one that was preloaded: it has QEMU's discards wait for its windows.
pub const OTHERS_DISCARD: &str = "QEMU discards pages of this VM as well (free page reporting or \
    virtio-mem), which is not safe together in anonymous memory: switch that off, back the RAM \
    with a shared memfd, or load the agent by LD_PRELOAD instead of -plugin";
/// Pages of a block of 2 MiB.
pub const BLOCK_PAGES: u32 = 512;
/// Longest text that is passed on from the other side, characters.
pub const TEXT_MAX: usize = 300;
/// Longest `budget_ms` taken, so that a daemon's slip does not bind the agent.
pub const BUDGET_MS_MAX: u64 = 10_000;

/// What the daemon asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back in the answer.
    pub id: u64,
    /// What is asked.
    #[serde(flatten)]
    pub command: Command,
}

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Who are you? Answer: [`Answer::Hello`].
    Hello,
    /// This is the VM's RAM: look for its map. Answer: [`Answer::Done`], or an
    /// error of kind [`Refused::Aside`].
    Attach(Attach),
    /// How are you? Answer: [`Answer::Status`].
    Status {
        /// Also find out what is held of the free pages: 5–10 ns a page.
        #[serde(default)]
        held: bool,
    },
    /// Give free pages back. Answer: [`Answer::Recycled`].
    Recycle(Recycle),
    /// Remember which pages are free now, for `marked` of a later
    /// [`Recycle`]. Answer: [`Answer::Marked`].
    Mark,
    /// The VM's vCPUs run, or not. Answer: [`Answer::Done`].
    RunState {
        /// Whether they run.
        running: bool,
    },
    /// The VM was reset, loaded, migrated: nothing known holds. Answer:
    /// [`Answer::Done`].
    ResetSeen,
    /// The guest's facts block. Answer: [`Answer::Facts`].
    Facts,
    /// Let KSM look at just these ranges of a stretch, which are not recycled meanwhile.
    /// What was open there before and is not named is closed first, which breaks its
    /// merges. Answer: [`Answer::Advised`].
    Advise(Advise),
    /// With this line comes a socket on which the scanner asks for [`hashes`], until it is
    /// closed or the VM is forgotten. Answer: [`Answer::Done`].
    Hashes,
    /// What [`Status::unclear`] told of is harmless. Answer: [`Answer::Done`].
    Cleared {
        /// As it was told.
        generation: u64,
    },
    /// Give up all protection and forget the VM; `attach` begins anew. Answer:
    /// [`Answer::Done`].
    StandDown,
}

/// A piece of the VM's RAM as QEMU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
    /// Where it is in the VMM.
    pub hva: u64,
}

/// Everything an agent has to know of its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attach {
    /// RAM; ROM, video memory and the like left out.
    pub segments: Vec<Segment>,
    /// What the daemon knows that speaks against it (memory encryption,
    /// vhost-user on shared RAM, [`OTHERS_DISCARD`]): the agent stands aside.
    pub objections: Vec<String>,
    /// What starts the guest after a reset; one that is not known: the agent stands aside.
    pub firmware: Firmware,
    /// The map is only read: nothing is protected, written or given back.
    pub observe: bool,
    /// Windows longer than this, ms, have the agent stand aside; 0: none do.
    pub window_limit_ms: u64,
    /// Whether the vCPUs run.
    pub running: bool,
    /// What this agent has opened to KSM before stays open: it will be advised on.
    pub keep_open: bool,
    /// With this line comes a descriptor of `/dev/userfaultfd` (SCM_RIGHTS).
    pub descriptor: bool,
}

/// What KSM may look at: never what is recycled, since a merged page has lost its
/// protection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Advise {
    /// The stretch: first address in the VMM, and the first after it.
    pub within: (u64, u64),
    /// Pages that stay closed, and then pages that are open, from the beginning of the
    /// stretch on; all in anonymous RAM.
    pub open: Vec<(u64, u64)>,
}

impl Advise {
    /// All that is to be open, as address and length, sorted and apart, in as many
    /// requests as that takes.
    pub fn all(open: &[(u64, u64)]) -> Vec<Advise> {
        let mut from = 0;
        let mut parts: Vec<&[(u64, u64)]> = open.chunks(SPANS_MAX).collect();
        if parts.is_empty() {
            parts.push(&[]);
        }
        let last = parts.len() - 1;
        let part = |(i, part): (usize, &&[(u64, u64)])| {
            let to = match part.last() {
                Some((start, len)) if i < last => start.saturating_add(*len),
                _ => u64::MAX / PAGE * PAGE,
            };
            let mut at = from;
            let relative = |(start, len): &(u64, u64)| {
                let gap = start.saturating_sub(at) / PAGE;
                at = start.saturating_add(*len);
                (gap, len / PAGE)
            };
            let advise = Advise { within: (from, to), open: part.iter().map(relative).collect() };
            from = to;
            advise
        };
        parts.iter().enumerate().map(part).collect()
    }

    /// As address and length; `None` where it goes beyond all addresses or the stretch,
    /// or names nothing between two.
    pub fn ranges(&self) -> Option<Vec<(u64, u64)>> {
        let (mut at, to) = self.within;
        let mut ranges = Vec::with_capacity(self.open.len());
        for (i, (gap, pages)) in self.open.iter().enumerate() {
            let start = at.checked_add(gap.checked_mul(PAGE)?)?;
            let len = pages.checked_mul(PAGE)?;
            at = start.checked_add(len)?;
            if at > to || len == 0 || (*gap == 0 && i > 0) {
                return None;
            }
            ranges.push((start, len));
        }
        Some(ranges)
    }
}

/// What to do with huge pages that are free in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HugePages {
    /// Leave them whole.
    #[default]
    Keep,
    /// Give back what is free of them and split them at once, so that the host
    /// really has it.
    Split,
}

/// How much to give back, and of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recycle {
    /// At most so much; `None`: all. Blocks of 2 MiB that are free as a whole are
    /// not broken for it.
    pub max_bytes: Option<Bytes>,
    /// Shortest run of free pages worth a call, at least 1. In a block of 2 MiB that is free
    /// as a whole any run is worth one: what comes back to it is a huge page.
    pub min_run_pages: u32,
    /// At most so long, ms, up to [`BUDGET_MS_MAX`].
    pub budget_ms: u64,
    /// Huge pages that are free in part.
    pub huge: HugePages,
    /// With [`HugePages::Split`]: from so many free pages on.
    pub split_min_pages: u32,
    /// Only pages that were free at the last [`Command::Mark`] as well.
    pub marked: bool,
}

impl Recycle {
    /// Only blocks that are free as a whole, and runs as long as one.
    pub fn is_whole(&self) -> bool {
        self.min_run_pages >= BLOCK_PAGES
    }
}

impl Default for Recycle {
    fn default() -> Recycle {
        Recycle {
            max_bytes: None,
            min_run_pages: 1,
            budget_ms: 100,
            huge: HugePages::Keep,
            split_min_pages: 32,
            marked: false,
        }
    }
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Of the request; 0 where that could not be read.
    pub id: u64,
    /// The answer.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Yes or no.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "one is made, sent or read, and dropped")]
pub enum Outcome {
    /// It was done.
    Ok(Answer),
    /// It was not.
    Error(Refusal),
}

/// The answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// Nothing to say.
    Done,
    /// To [`Command::Hello`].
    Hello(Hello),
    /// To [`Command::Status`].
    Status(Status),
    /// To [`Command::Recycle`].
    Recycled(Recycled),
    /// To [`Command::Mark`].
    Marked {
        /// Free now, in the guest's eyes.
        free: Bytes,
    },
    /// To [`Command::Facts`].
    Facts(Facts),
    /// To [`Command::Advise`].
    Advised {
        /// Open to KSM now.
        open: Bytes,
    },
}

/// Who the agent is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Of the agent.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// What of the kernel it uses.
    pub kernel: KernelParts,
    /// It knows [`Command::Advise`].
    #[serde(default)]
    pub advises: bool,
    /// It knows [`Command::Hashes`], and can do it on this kernel.
    #[serde(default)]
    pub hashes: bool,
    /// It may not make a userfaultfd that sees faults of KVM itself: `attach` wants a
    /// descriptor of `/dev/userfaultfd`.
    #[serde(default)]
    pub wants_descriptor: bool,
}

/// What the kernel has, and the agent therefore uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelParts {
    /// Vectored discards (6.13).
    pub process_madvise: bool,
    /// Which pages are held (6.7); else `mincore`.
    pub pagemap_scan: bool,
}

/// How far the agent has come with its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentState {
    /// Knows of no RAM.
    #[default]
    Idle,
    /// Must not touch this VM.
    Aside,
    /// Looks for the header of the guest module.
    Searching,
    /// Found one; watches whether it lives.
    Checking,
    /// The map may be used.
    Ready,
    /// It may not right now: no beat for a while, or not recording.
    Silent,
}

/// How the agent does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// How far it has come.
    pub state: AgentState,
    /// Why it is there, where that is not plain.
    pub why: Option<String>,
    /// It stands aside for something that may pass: a device that is open.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub passes: bool,
    /// The guest's module.
    pub module: Option<Module>,
    /// Free in the guest, from its map.
    pub free: Option<Bytes>,
    /// Of that, still held by the host; where it was asked for.
    pub held: Option<Bytes>,
    /// What was done since `attach`.
    pub counters: Counters,
    /// RAM is shared, and a socket was opened over which another process may be given it:
    /// nothing is given back before the daemon has looked and told [`Command::Cleared`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unclear: Option<u64>,
    /// Guest pages whose first write after a reset drops the map, and how often each did.
    pub wires: Vec<(u64, u64)>,
    /// How long windows of protection were open.
    pub windows: Histogram,
    /// How long writes of vCPUs waited for one, at most.
    pub waits: Histogram,
}

/// The guest's module, as its header says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Version of the module.
    pub version: String,
    /// Kernel series, `6.12`.
    pub linux: String,
    /// Guest-physical address of its header.
    pub gpa: u64,
    /// Smallest block it records, as an order.
    pub order: u32,
    /// Map pages in use.
    pub map_pages: u32,
    /// A test build that may lie.
    pub faulty: bool,
}

/// Since `attach`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Given back.
    pub recycled: Bytes,
    /// Runs of pages.
    pub runs: u64,
    /// Windows of protection.
    pub batches: u64,
    /// Pages that the second reading found taken.
    pub saved_pages: u64,
    /// Batches dropped whole: the guest stopped, or extents changed.
    pub dropped_batches: u64,
    /// Huge pages split on purpose.
    pub splits: u64,
    /// Longest window, ns.
    pub window_max_ns: u64,
    /// Guest writes that had to wait and that the handler thread saw.
    pub faults: u64,
    /// Writes to a tripwire that made us drop a map.
    pub trips: u64,
    /// Challenges that were answered.
    pub challenges: u64,
}

/// What one [`Recycle`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recycled {
    /// Given back; all of it was held before.
    pub bytes: Bytes,
    /// In so many runs.
    pub runs: u64,
    /// Pages that the second reading found taken.
    pub saved_pages: u64,
    /// Huge pages split.
    pub splits: u64,
    /// How long it took.
    pub ns: u64,
    /// Of that, how long windows were open.
    pub window_ns: u64,
    /// Processor time of it: what it cost, however busy the host was.
    pub cpu_ns: u64,
    /// It ended early: budget, `max_bytes`, or another request came.
    pub more: bool,
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For the program.
    pub kind: Refused,
    /// For people.
    pub text: String,
}

/// Kinds of no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refused {
    /// Not a request, or one out of bounds.
    Request,
    /// Not now; [`Status::state`] says how far it is.
    NotReady,
    /// Not this VM, and why.
    Aside,
    /// The system refused.
    System,
}

/// A line that is not of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a line of the agent's protocol: {0}")]
pub struct BadLine(pub String);

fn parse<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, BadLine> {
    if line.len() > LINE_MAX {
        return Err(BadLine(format!("{} bytes", line.len())));
    }
    // The error quotes what it stumbled over.
    serde_json::from_slice(line).map_err(|e| BadLine(clip(&e.to_string())))
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    // Cannot fail: no maps, no foreign Serialize.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

/// A text from the other side, cut to [`TEXT_MAX`] and made printable.
pub fn clip(text: &str) -> String {
    text.chars().take(TEXT_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

impl Request {
    /// Reads a line (without its end) and checks its limits.
    pub fn parse(line: &[u8]) -> Result<Request, BadLine> {
        let request: Request = parse(line)?;
        if let Command::Attach(a) = &request.command
            && (a.segments.len() > SEGMENTS_MAX || a.objections.len() > OBJECTIONS_MAX)
        {
            return Err(BadLine("too many segments or objections".into()));
        }
        if matches!(&request.command, Command::Advise(a) if a.open.len() > SPANS_MAX) {
            return Err(BadLine("too many ranges".into()));
        }
        Ok(request)
    }

    /// The line, with its end.
    pub fn line(&self) -> Vec<u8> {
        encode(self)
    }
}

impl Reply {
    /// Reads a line (without its end). Its texts are made fit to be shown: a guest
    /// that took over its VMM may write them.
    pub fn parse(line: &[u8]) -> Result<Reply, BadLine> {
        let mut reply: Reply = parse(line)?;
        match &mut reply.outcome {
            Outcome::Error(no) => no.text = clip(&no.text),
            Outcome::Ok(Answer::Hello(hello)) => hello.version = clip(&hello.version),
            Outcome::Ok(Answer::Status(status)) => {
                status.why = status.why.as_deref().map(clip);
                if let Some(m) = &mut status.module {
                    (m.version, m.linux) = (clip(&m.version), clip(&m.linux));
                }
            }
            Outcome::Ok(_) => {}
        }
        Ok(reply)
    }

    /// The line, with its end.
    pub fn line(&self) -> Vec<u8> {
        encode(self)
    }
}

/// Takes bytes as they come and gives whole lines of at most [`LINE_MAX`] bytes.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    held: Vec<u8>,
}

impl Lines {
    /// Adds bytes; `each` gets every line that is now whole. An error: the line
    /// is too long, and nothing that follows can be trusted.
    pub fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), BadLine> {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.hold(&bytes[..end])?;
            each(&self.held);
            self.held.clear();
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes)
    }

    fn hold(&mut self, bytes: &[u8]) -> Result<(), BadLine> {
        if self.held.len() + bytes.len() > LINE_MAX {
            return Err(BadLine(format!("longer than {LINE_MAX} bytes")));
        }
        self.held.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_read_as_documented() {
        let attach = br#"{"id":1,"command":"attach","segments":[{"gpa":0,"size":4096,"hva":7}]}"#;
        let Ok(Request { id: 1, command: Command::Attach(a) }) = Request::parse(attach) else {
            panic!("{:?}", Request::parse(attach))
        };
        assert_eq!(a.segments, [Segment { gpa: 0, size: 4096, hva: 7 }]);
        let recycle = Request::parse(br#"{"id":2,"command":"recycle","budget_ms":7}"#).unwrap();
        let want = Recycle { budget_ms: 7, ..Recycle::default() };
        assert_eq!(recycle.command, Command::Recycle(want));
        let status = Request::parse(br#"{"id":3,"command":"status"}"#).unwrap();
        assert_eq!(status.command, Command::Status { held: false });
    }

    #[test]
    fn replies_read_as_documented() {
        let done = Reply { id: 1, outcome: Outcome::Ok(Answer::Done) };
        assert_eq!(done.line(), b"{\"id\":1,\"ok\":{\"answer\":\"done\"}}\n");
        let refusal = Refusal { kind: Refused::NotReady, text: "x".into() };
        let no = Reply { id: 3, outcome: Outcome::Error(refusal) };
        assert_eq!(no.line(), b"{\"id\":3,\"error\":{\"kind\":\"not_ready\",\"text\":\"x\"}}\n");
        for reply in [done, no] {
            let line = reply.line();
            assert_eq!(Reply::parse(&line[..line.len() - 1]), Ok(reply));
        }
    }

    #[test]
    fn every_command_survives_its_line() {
        let segment = Segment { gpa: u64::MAX, size: u64::MAX, hva: u64::MAX };
        let full = Attach {
            segments: vec![segment; SEGMENTS_MAX],
            objections: vec!["x".repeat(TEXT_MAX); OBJECTIONS_MAX],
            running: true,
            keep_open: true,
            descriptor: true,
            firmware: Firmware::Edk2,
            observe: true,
            window_limit_ms: 5,
        };
        let most = u64::from(u32::MAX);
        let advise = Advise { within: (0, u64::MAX), open: vec![(most, most); SPANS_MAX] };
        for command in [
            Command::Hello,
            Command::Attach(full),
            Command::Status { held: true },
            Command::Recycle(Recycle { max_bytes: Some(Bytes::mib(7)), ..Recycle::default() }),
            Command::Mark,
            Command::RunState { running: false },
            Command::ResetSeen,
            Command::Facts,
            Command::Advise(advise),
            Command::Hashes,
            Command::StandDown,
        ] {
            let request = Request { id: u64::MAX, command };
            let line = request.line();
            assert!(line.len() <= LINE_MAX, "{}", line.len());
            assert_eq!(Request::parse(&line[..line.len() - 1]), Ok(request));
        }
    }

    #[test]
    fn texts_of_an_agent_are_fit_to_be_shown() {
        let long = "x".repeat(5000);
        for line in [
            r#"{"id":1,"error":{"kind":"aside","text":"\u001b[2Jgone\n"}}"#.to_string(),
            format!(r#"{{"id":1,"error":{{"kind":"aside","text":"{long}"}}}}"#),
            r#"{"id":1,"ok":{"answer":"status","why":"\u001b]0;x\u0007"}}"#.into(),
            r#"{"id":1,"ok":{"answer":"status","module":{"version":"\u001b","linux":"\u0000","gpa":0,
                "order":0,"map_pages":0,"faulty":false}}}"#.into(),
            r#"{"id":1,"ok":{"answer":"\u001b[2J"}}"#.into(),
        ] {
            let text = match Reply::parse(line.as_bytes()) {
                Ok(Reply { outcome: Outcome::Error(no), .. }) => no.text,
                Ok(Reply { outcome: Outcome::Ok(Answer::Status(s)), .. }) => {
                    let module = s.module.map(|m| m.version + &m.linux);
                    s.why.or(module).unwrap()
                }
                Ok(other) => panic!("{other:?}"),
                Err(e) => e.0,
            };
            assert!(!text.is_empty() && text.chars().count() <= TEXT_MAX, "{line}");
            assert!(!text.chars().any(char::is_control), "{line}: {text:?}");
        }
    }

    #[test]
    fn more_than_the_limits_is_refused() {
        let segment = Segment { gpa: 0, size: 1, hva: 0 };
        let many = Attach { segments: vec![segment; SEGMENTS_MAX + 1], ..Attach::default() };
        let spans = Advise { open: vec![(0, 1); SPANS_MAX + 1], ..Advise::default() };
        for command in [Command::Attach(many), Command::Advise(spans)] {
            let line = Request { id: 1, command }.line();
            assert!(Request::parse(&line[..line.len() - 1]).is_err());
        }
        assert!(Request::parse(&vec![b' '; LINE_MAX + 1]).is_err());
        let mut lines = Lines::default();
        assert!(lines.feed(&vec![b'x'; LINE_MAX], |_| ()).is_ok());
        assert!(lines.feed(b"x", |_| ()).is_err());
    }

    proptest! {
        #[test]
        fn what_is_to_be_open_survives_its_requests(
            list in prop::collection::vec((1u64..99, 1u64..99), 0..2000),
        ) {
            let mut at = 0x7f00_0000_0000;
            let open: Vec<(u64, u64)> = list.iter().map(|(gap, pages)| {
                let start = at + gap * PAGE;
                at = start + pages * PAGE;
                (start, pages * PAGE)
            }).collect();
            let all = Advise::all(&open);
            prop_assert_eq!(all.len(), open.len().div_ceil(SPANS_MAX).max(1));
            // The stretches are all there is, and no place is in two.
            prop_assert_eq!((all[0].within.0, all[all.len() - 1].within.1 > at), (0, true));
            prop_assert!(all.windows(2).all(|w| w[0].within.1 == w[1].within.0));
            let found: Vec<_> = all.iter().flat_map(|a| a.ranges().unwrap()).collect();
            prop_assert_eq!(found, open);
        }

        #[test]
        fn any_numbers_are_ranges_of_the_stretch_or_refused(
            within in any::<(u64, u64)>(), open in prop::collection::vec(any::<(u64, u64)>(), 0..4),
            small in prop::collection::vec((0u64..9, 0u64..9), 0..9),
        ) {
            for open in [open, small] {
                let advise = Advise { within, open };
                for (start, len) in advise.ranges().unwrap_or_default() {
                    prop_assert!(start >= within.0 && start + len <= within.1 && len > 0);
                }
            }
        }

        #[test]
        fn any_bytes_are_a_line_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Request::parse(&bytes);
            let _ = Reply::parse(&bytes);
        }

        #[test]
        fn lines_survive_any_cut(text in "[a-z\n]{0,200}", cut in 1usize..20) {
            let mut whole = Vec::new();
            Lines::default().feed(text.as_bytes(), |l| whole.push(l.to_vec())).unwrap();
            let mut pieces = Vec::new();
            let mut lines = Lines::default();
            for piece in text.as_bytes().chunks(cut) {
                lines.feed(piece, |l| pieces.push(l.to_vec())).unwrap();
            }
            prop_assert_eq!(whole, pieces);
        }
    }
}
