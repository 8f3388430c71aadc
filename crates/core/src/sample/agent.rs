//! What the agent inside a VMM tells of itself and of the guest's map.
//!
//! A field here follows one of the agent's answers (`wire/reply.rs`).

use serde::{Deserialize, Serialize};

use super::Link;
use crate::histogram::Histogram;
use crate::units::Bytes;
use crate::wire::abi::Facts;
use crate::wire::{AgentState, Counters};

/// The agent inside the VMM, and what it says of the guest's module. The numbers
/// come from a map that the guest writes: exact where it is honest, bounded where
/// it is not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentSample {
    pub link: Link,
    pub state: AgentState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The guest's module: its version and kernel series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Free in the guest.
    pub free: Option<Bytes>,
    /// Of that, held by the host and recyclable.
    pub held: Option<Bytes>,
    /// Of that, in huge pages that the guest uses in part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_partial: Option<Bytes>,
    /// Allocated in the guest since its boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Bytes>,
    /// What the module says of the guest's memory, without an exit: hints too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Facts>,
    /// It still works on an order to recycle, or is about to.
    pub busy: bool,
    /// The last order did not come to the end of the map: its time was up, or it had enough.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// What was done since the agent was attached.
    pub counters: Counters,
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub windows: Histogram,
    /// How long writes of vCPUs waited for one, at most.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub waits: Histogram,
    /// Its tripwires, by guest address, and how often each was the first to tell of a reset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wires: Vec<(u64, u64)>,
    /// It only looks (`agent = "observe"`): nothing of the VM's memory is touched by it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observes: bool,
    /// It can open ranges to KSM that it does not recycle.
    pub advises: bool,
    /// How much is open to KSM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<Bytes>,
}

impl AgentSample {
    /// Whether it answers and has a map that holds.
    pub fn is_ready(&self) -> bool {
        self.link == Link::Up && self.state == AgentState::Ready
    }

    /// One whose map shows `held` MiB that are free in the guest and held by the host.
    #[cfg(test)]
    pub fn ready(held: u64) -> AgentSample {
        let (held, state) = (Some(Bytes::mib(held)), AgentState::Ready);
        AgentSample { link: Link::Up, state, held, ..AgentSample::default() }
    }
}
