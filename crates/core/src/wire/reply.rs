//! What an agent answers: its identity, its status, results and refusals.
//!
//! A field that is added has a default, as the agent may be older than the daemon. The agent
//! is taken for hostile: a text that is added is clipped in [`Reply::parse`].

use serde::{Deserialize, Serialize};

use super::abi::Facts;
use super::lines::parse;
use super::{BadLine, clip};
#[cfg(doc)]
use super::{Command, PROTOCOL, Recycle};
use crate::histogram::Histogram;
use crate::text::json_line;
use crate::units::Bytes;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Of the request; 0 where that could not be read.
    pub id: u64,
    #[serde(flatten)]
    pub result: ReplyResult,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "one is made, sent or read, and dropped")]
pub enum ReplyResult {
    Ok(Answer),
    Error(Refusal),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    Done,
    Hello(Hello),
    Status(Status),
    /// To [`Command::Recycle`].
    Recycled(Recycled),
    /// To [`Command::Mark`].
    Marked,
    Facts(Facts),
    /// To [`Command::Advise`].
    Advised {
        /// Open to KSM now.
        open: Bytes,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    /// Of the agent.
    pub version: String,
    pub pid: u32,
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    pub state: AgentState,
    /// Why it is in that state, where that is not plain.
    pub why: Option<String>,
    /// It stands aside for something that may pass: a device that is open, or want of memory.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub passes: bool,
    pub module: Option<Module>,
    /// Free in the guest, from its map.
    pub free: Option<Bytes>,
    /// Of that, held by the host and recyclable; where it was asked for.
    pub held: Option<Bytes>,
    /// Of that, in huge pages that the guest uses in part; where this kernel tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_partial: Option<Bytes>,
    /// Open to KSM.
    pub open: Option<Bytes>,
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    pub version: String,
    /// Kernel series, `6.12`.
    pub linux: String,
}

/// Since `attach`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    pub recycled: Bytes,
    pub runs: u64,
    pub batches: u64,
    /// Pages that the second reading found taken.
    pub saved_pages: u64,
    /// Batches dropped whole: the guest stopped, or extents changed.
    pub dropped_batches: u64,
    /// Huge pages split on purpose.
    pub splits: u64,
    pub window_max_ns: u64,
    /// Guest writes that had to wait and that the handler thread saw.
    pub faults: u64,
    /// Writes to a tripwire that made us drop a map.
    pub trips: u64,
    pub challenges: u64,
}

/// What one [`Recycle`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recycled {
    /// Given back; all of it was held before.
    pub bytes: Bytes,
    pub runs: u64,
    pub splits: u64,
    pub ns: u64,
    /// Of that, how long windows were open.
    pub window_ns: u64,
    /// Processor time of it: what it cost, however busy the host was.
    pub cpu_ns: u64,
    /// It ended early: budget, `max_bytes`, or another request came.
    pub more: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    pub kind: Refused,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refused {
    /// Not a request, or one out of bounds.
    Request,
    /// Not now; [`Status::state`] says how far it is.
    NotReady,
    /// Not this VM, and why.
    Aside,
    System,
}

impl Reply {
    /// Reads a line (without its end). Its texts are made fit to be shown: a guest
    /// that took over its VMM may write them.
    pub fn parse(line: &[u8]) -> Result<Reply, BadLine> {
        let mut reply: Reply = parse(line)?;
        match &mut reply.result {
            ReplyResult::Error(no) => no.text = clip(&no.text),
            ReplyResult::Ok(Answer::Hello(hello)) => hello.version = clip(&hello.version),
            ReplyResult::Ok(Answer::Status(status)) => {
                status.why = status.why.as_deref().map(clip);
                if let Some(m) = &mut status.module {
                    (m.version, m.linux) = (clip(&m.version), clip(&m.linux));
                }
            }
            ReplyResult::Ok(_) => {}
        }
        Ok(reply)
    }

    /// The line, with its end.
    pub fn line(&self) -> Vec<u8> {
        json_line(self)
    }
}
