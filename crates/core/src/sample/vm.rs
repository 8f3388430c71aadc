//! A VM as the host sees it: which process it is, what that holds, how QEMU answers, and what
//! was done to its memory on order ([`crate::task`]).

use serde::{Deserialize, Serialize};

use super::{AgentSample, BalloonSample, GuestStats, MergeSample};
use crate::config::Metadata;
use crate::task::Tasks;
use crate::units::Bytes;

/// Which QEMU process this is: `pid` and its start time in clock ticks since
/// boot, so that a recycled pid is never taken for the same VM.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct VmId {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub start: u64,
}

/// What a VM's claim to a section of the configuration is worth: its own QEMU chooses the
/// name by which it has one ([`crate::config::Identity`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// Nothing that it cannot change is asked for.
    #[default]
    Open,
    /// Its user or its cgroup is the one that is asked for.
    Proven,
    /// It is another VM: why.
    Refused(String),
    /// What is asked for could not be read yet: why.
    Unread(String),
}

impl Claim {
    pub fn is_unread(&self) -> bool {
        matches!(self, Claim::Unread(_))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmSample {
    pub id: VmId,
    /// Name (`-name`, or `pid-N`), unique among the VMs of one sample.
    pub name: String,
    /// `-name` as typed, or what the configuration calls it, where `name` was made from it
    /// to be unique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<String>,
    /// `-uuid`, where given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// What its claim to its section of the configuration is worth.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub claim: Claim,
    /// What its manager's metadata sets for it.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub metadata: Metadata,
    /// What its balloon held without Ebb, as an Ebb noted that had it before it was saved or
    /// migrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noted: Option<Bytes>,
    /// RAM the guest was given at start plus what was plugged since.
    pub ram: Option<Bytes>,
    /// What the process holds of the host's memory.
    pub process: Option<ProcessMemory>,
    /// Memory cgroup path, e.g. `/machine.slice/vm1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The NUMA nodes that its memory is bound to; empty: it may be on all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<u32>,
    /// Whether QMP can be used.
    pub link: Link,
    /// Ebb does not speak with it, because it is not to, or has no way to by its configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub let_be: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub through_libvirt: bool,
    /// The QMP socket over which it was heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// That socket is shared with other programs; `None`: it is Ebb's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedSocket>,
    /// `query-status`, where QMP answered.
    pub run: Option<RunState>,
    /// The balloon; `None` where there is no device or QMP did not answer.
    pub balloon: Option<BalloonSample>,
    /// The agent inside the VMM, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentSample>,
    /// What QMP told since the last sample, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<VmEvent>,
    /// How long its process has run, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// Why its memory can neither be ballooned with effect nor paged out: pinned by a
    /// device, locked, encrypted, huge pages of a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
    /// Why what it gives back might not have room when its guest takes it again: nothing is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_room: Option<String>,
    /// Most of its RAM is in a pool of huge pages, and not in the host's other memory.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub in_pool: bool,
    /// It is left alone at the operator's request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hands_off: Option<HandsOff>,
    /// What was done to it beside the loop.
    #[serde(flatten)]
    pub tasks: Tasks,
    /// Its part in merging; `None`: nothing is merged here, nor is that wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeSample>,
}

/// A VM that the operator wants left alone (`ebb hands-off`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandsOff {
    /// How much longer, ms.
    pub left_ms: u64,
    /// Nothing of Ebb's touches its memory any more.
    pub done: bool,
}

impl VmSample {
    /// One that runs, and whose QEMU answers.
    #[cfg(test)]
    pub fn running(pid: u32, name: &str) -> VmSample {
        let (link, run) = (Link::Up, Some(RunState::Running));
        VmSample { id: VmId { pid, start: 1 }, name: name.into(), link, run, ..Default::default() }
    }

    /// Whether it runs, as far as is known: it is not paused, and not migrated or saved.
    pub fn may_run(&self) -> bool {
        matches!(self.run, None | Some(RunState::Running))
    }

    /// The name that the configuration knows it by: two VMs can have the same while one is
    /// migrated into the other.
    pub fn given_name(&self) -> &str {
        self.given.as_deref().unwrap_or(&self.name)
    }

    /// The statistics of its guest, by its balloon.
    pub fn guest_stats(&self) -> Option<GuestStats> {
        self.balloon.as_ref()?.guest
    }
}

/// A QMP socket that other programs use as well. Ebb is connected to it only while it has commands
/// under way, so it hears no events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedSocket {
    /// The manager whose socket it is, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// The longest time that Ebb was connected, microseconds.
    #[serde(default)]
    pub longest_us: u64,
}

/// `/proc/PID/status` of the VMM: cheap, read each tick. Includes QEMU itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// `RssAnon`.
    pub anon: Bytes,
    /// `RssFile`.
    pub file: Bytes,
    /// `RssShmem`.
    pub shmem: Bytes,
    /// `VmSwap`.
    pub swap: Bytes,
    /// `VmLck`.
    #[serde(default)]
    pub locked: Bytes,
    /// `HugetlbPages`: of pools of huge pages, and in none of the others.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub hugetlb: Bytes,
    /// `None`: not counted lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnMemory>,
}

/// What of a VMM's memory is not guest RAM, as it was counted last: up to some minutes old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnMemory {
    pub resident: Bytes,
    pub swap: Bytes,
}

impl ProcessMemory {
    /// What is in DRAM now. Lies on partly discarded huge pages: prove savings
    /// by the host's free memory or the cgroup's usage.
    pub fn resident(&self) -> Bytes {
        self.anon + self.file + self.shmem
    }

    /// Whether most of it is shared memory, as where a VM's RAM is. What of that is in swap is in no
    /// process's count, nor is what only others have mapped.
    pub fn is_shared(&self) -> bool {
        self.shmem > self.anon
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state", content = "why")]
pub enum Link {
    /// Commands are answered.
    Up,
    /// Connected, but the last command was not answered in time.
    Slow(String),
    /// The socket is held by another client (QEMU serves one at a time).
    Taken(String),
    /// There is no socket that Ebb could use, or it was refused or lost.
    Down(String),
    #[default]
    Unknown,
}

/// QEMU's run state, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    Running,
    /// vCPUs are stopped (`paused`, `suspended`, `debug`, …): no guest code runs.
    Paused,
    /// Incoming or outgoing migration, snapshot: nothing is taken, nothing discarded.
    Migrating,
    /// Shut down, panicked or failed; the process is still there.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmEvent {
    /// `RESET`: the guest rebooted; nothing known of it holds any more.
    Reset,
    Shutdown,
    Stop,
    Resume,
    /// `BALLOON_CHANGE`, with the new size.
    Balloon(Bytes),
    /// `MIGRATION` changed state.
    Migration,
    /// The QMP connection was made (again): all prior knowledge is old.
    Connected,
}
