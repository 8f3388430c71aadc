//! What the daemon asks of an agent, and the order it gives with each question.
//!
//! A new command is a variant of [`Command`], with its answer in `reply.rs`; its limits are
//! checked in [`Request::parse`]. An agent that does not know it refuses the line: the daemon
//! asks only those of which it knows that they do, e.g. by their [`Hello`].

use serde::{Deserialize, Serialize};

use super::firmware::Firmware;
use super::lines::parse;
#[cfg(doc)]
use super::{Answer, BUDGET_MS_MAX, Hello, OTHERS_DISCARD, Refused, Status, hashes};
use super::{BLOCK_PAGES, BadLine, OBJECTIONS_MAX, SEGMENTS_MAX, SPANS_MAX};
use crate::range::Range;
use crate::text::json_line;
use crate::units::{Bytes, PAGE};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back in the answer.
    pub id: u64,
    #[serde(flatten)]
    pub command: Command,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Asks who it is. Answer: [`Answer::Hello`].
    Hello,
    /// This is the VM's RAM: look for its map. Answer: [`Answer::Done`], or an
    /// error of kind [`Refused::Aside`].
    Attach(Attach),
    /// Asks for its state. Answer: [`Answer::Status`].
    Status {
        /// Also find out what is held of the free pages: 5–10 ns a page.
        #[serde(default)]
        held: bool,
        /// As of [`Attach`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        room: Option<Bytes>,
    },
    /// Give free pages back. Answer: [`Answer::Recycled`].
    Recycle(Recycle),
    /// Remember which pages are free now, for `marked` of a later
    /// [`Recycle`]. Answer: [`Answer::Marked`].
    Mark,
    /// The VM's vCPUs run, or not. Answer: [`Answer::Done`].
    RunState { running: bool },
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
    Cleared { generation: u64 },
    /// Give up all protection and forget the VM; `attach` begins anew. Answer:
    /// [`Answer::Done`].
    StandDown,
}

/// A piece of the VM's RAM as QEMU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    pub gpa: u64,
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
    pub running: bool,
    /// What this agent has opened to KSM before stays open: it will be advised on.
    pub keep_open: bool,
    /// With this line comes a descriptor of `/dev/userfaultfd` (SCM_RIGHTS).
    pub descriptor: bool,
    /// What breaking merges may take below the limits of the VM's cgroups; `None`: none limits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room: Option<Bytes>,
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
    /// All that is to be open, sorted and apart, in as many requests as that takes.
    pub fn all(open: &[Range]) -> Vec<Advise> {
        let mut from = 0;
        let mut parts: Vec<&[Range]> = open.chunks(SPANS_MAX).collect();
        if parts.is_empty() {
            parts.push(&[]);
        }
        let last = parts.len() - 1;
        let part = |(i, part): (usize, &&[Range])| {
            let to = match part.last() {
                Some(r) if i < last => r.end(),
                _ => u64::MAX / PAGE * PAGE,
            };
            let mut at = from;
            let relative = |r: &Range| {
                let gap = r.start.saturating_sub(at) / PAGE;
                at = r.end();
                (gap, r.len / PAGE)
            };
            let advise = Advise { within: (from, to), open: part.iter().map(relative).collect() };
            from = to;
            advise
        };
        parts.iter().enumerate().map(part).collect()
    }

    /// `None` where it goes beyond all addresses or the stretch, or names nothing between two.
    pub fn ranges(&self) -> Option<Vec<Range>> {
        let (mut at, to) = self.within;
        let mut ranges = Vec::with_capacity(self.open.len());
        for (i, (gap, pages)) in self.open.iter().enumerate() {
            let start = at.checked_add(gap.checked_mul(PAGE)?)?;
            let len = pages.checked_mul(PAGE)?;
            at = start.checked_add(len)?;
            if at > to || len == 0 || (*gap == 0 && i > 0) {
                return None;
            }
            ranges.push(Range { start, len });
        }
        Some(ranges)
    }
}

/// What to do with huge pages that are free in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HugePages {
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
    /// The most to give back; `None`: all. Blocks of 2 MiB that are free as a whole are
    /// not broken for it.
    pub max_bytes: Option<Bytes>,
    /// Shortest run of free pages worth a call, at least 1. In a block of 2 MiB that is free
    /// as a whole any run is worth one: what comes back to it is a huge page.
    pub min_run_pages: u32,
    /// The time limit, ms, up to [`BUDGET_MS_MAX`].
    pub budget_ms: u64,
    /// Huge pages that are free in part.
    pub huge: HugePages,
    /// With [`HugePages::Split`]: the least number of free pages.
    pub split_min_pages: u32,
    /// Only pages that were free at the last [`Command::Mark`] as well.
    pub marked: bool,
    /// How much may be closed to KSM for it, as breaking merges takes as much; `None`:
    /// [`MOST_CLOSED`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_closed: Option<Bytes>,
}

/// What an agent closes to KSM for one call of recycling at most.
pub const MOST_CLOSED: Bytes = Bytes::mib(32);

impl Recycle {
    /// How much may be closed to KSM for it.
    pub fn room_to_close(&self) -> Bytes {
        self.most_closed.map_or(MOST_CLOSED, |most| most.min(MOST_CLOSED))
    }

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
            most_closed: None,
        }
    }
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
        json_line(self)
    }
}
