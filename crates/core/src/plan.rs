//! What is to be done, and why: the output of the policies, the input of hosts.
//!
//! A [`Plan`] is complete: for every VM it holds either an action or the reason
//! why there is none, so that `ebb explain` never has to guess.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::model::Pressure;
use crate::policy::merge::KsmdOrder;
use crate::sample::VmId;
use crate::task::{Orders, StageName};
use crate::units::Bytes;
use crate::wire::Recycle;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What to do, gives before takes.
    pub actions: Vec<Action>,
    /// What to ask of the agents inside the VMMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recycle: Vec<RecycleOrder>,
    /// What is begun beside the loop.
    #[serde(flatten)]
    pub orders: Orders,
    /// Merging; absent where it is off.
    pub merge: Option<MergePlan>,
    /// VMs that nothing is done about, and why; same order as the sample's.
    pub held: Vec<Held>,
    /// Stage by stage: what each mechanism is expected to bring of what is missing, in
    /// their order. Empty while nothing is missing and nothing is done.
    #[serde(default, alias = "rungs", skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<Stage>,
    /// What an operator could do if all of that is not enough, best first. Never
    /// done by Ebb.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_resort: Vec<LastResort>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    pub name: StageName,
    /// What the host lacks before it.
    pub missing: Bytes,
    /// What this plan's orders of it are expected to bring the host.
    pub expected: Bytes,
    /// How, or why not, for people.
    pub why: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MergePlan {
    /// What `ksmd` is to do; `None`: KSM is not Ebb's.
    pub ksmd: Option<KsmdOrder>,
    /// VMs to open to KSM, or to close.
    pub vms: Vec<MergeOrder>,
    /// VMs whose agents open to KSM the ranges that the last scan found worth it. All
    /// other agents close theirs.
    pub ranged: Vec<VmId>,
    /// VMs whose agents leave open what is: there is no room to break what is merged of them.
    pub kept: Vec<VmId>,
    /// VMs whose memory is to be scanned now.
    pub scan: Option<ScanOrder>,
    /// Cores that a scan which is under way may use from now on.
    pub scan_cores: Option<f64>,
    pub why: String,
}

/// Marks a VM's RAM mergeable for KSM, or unmarks it, which breaks its merges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MergeOrder {
    pub vm: VmId,
    pub name: String,
    /// Whether it is marked.
    pub open: bool,
    pub reason: String,
}

/// Has memory scanned for equal pages, beside the loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScanOrder {
    /// The VMs, with their share groups.
    pub vms: Vec<(VmId, String)>,
    /// Reads a few pages only, to compare them with the last scan.
    #[serde(default, rename = "glance")]
    pub spot_check: bool,
    /// Cores that all threads together may use, until another tick says otherwise.
    pub cores: f64,
    /// Threads, enough for a host that becomes short of memory before the scan ends.
    #[serde(default = "one")]
    pub threads: u32,
    /// Bytes a second that they may read.
    pub bytes_per_second: f64,
    pub reason: String,
}

fn one() -> u32 {
    1
}

/// The operator's request about merging (`ebb merge on`, `off`), until the daemon ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeWish {
    /// Of this VM; `None`: of all.
    pub vm: Option<String>,
    /// Whether to merge.
    pub on: bool,
}

/// What an operator could do in the worst case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastResort {
    pub vm: VmId,
    pub name: String,
    /// What that would free.
    pub frees: Bytes,
    /// What, and why this one.
    pub what: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Action {
    pub vm: VmId,
    pub name: String,
    /// The guest's size when this was decided.
    pub from: Bytes,
    /// The size it is to have: RAM less balloon.
    pub to: Bytes,
    pub reason: Reason,
}

impl Action {
    /// Whether the guest gets memory (else the host does).
    pub fn gives(&self) -> bool {
        self.to > self.from
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum Reason {
    /// The host or another limit is short, or other guests wait; idle memory is taken in
    /// proportion.
    HostShort {
        /// The host's state; on a clear one needs grow.
        state: Pressure,
        shortage: Bytes,
        /// What guests wait for, or will in a moment.
        #[serde(default)]
        waits: Bytes,
        /// What this guest could spare.
        idle: Bytes,
        /// The limit that is short, where it is not the machine's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// The guest is short of memory.
    GuestShort { signs: String },
    /// It has less than it needed a moment ago, and the host can give that.
    Likely,
    /// Its need is not known: it is given what it may need, as far as the host has it.
    Unseen { why: String },
    /// The host holds it whatever the balloon does.
    HeldAnyway,
    /// The guest rebooted: a kernel that boots needs all it was promised.
    Rebooted,
    /// QEMU still shows the size from before a reboot; moving the balloon by one
    /// MiB makes the new driver tell its own.
    Refresh,
    /// The host has memory to spare.
    HostClear {
        /// Beyond what the host keeps for itself.
        surplus: Bytes,
    },
    /// The operator's `max` is below the guest's size.
    AboveCeiling,
    /// The guest did not follow an order to shrink: the order is withdrawn, so
    /// that it is not followed later.
    Withdrawn,
    /// The VM is to be left alone while it was shrinking: the order is withdrawn.
    HandsOff,
    /// Its guest may need what it would give: the order to shrink that is under way is withdrawn.
    Needed,
    /// The operator asked for it (`ebb reclaim`).
    Requested,
    /// Ebb stops, or an earlier daemon left the balloon inflated.
    Returned,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::HostShort { state, shortage, waits, idle, limit } => match (waits, limit) {
                (Bytes(0), _) => {
                    let limit = limit.as_deref().unwrap_or("host");
                    let soon = if *state == Pressure::Clear { "soon " } else { "" };
                    write!(f, "{limit} {state}, {soon}short of {shortage}; guest has {idle} idle")
                }
                (waits, None) => write!(f, "others are short of {waits}; guest has {idle} idle"),
                (waits, Some(limit)) => {
                    write!(f, "others below {limit} are short of {waits}; guest has {idle} idle")
                }
            },
            Reason::GuestShort { signs } => write!(f, "guest is short: {signs}"),
            Reason::Likely => f.write_str("it has less than it needed lately, and a margin"),
            Reason::Unseen { why } => write!(f, "given while it can be reached: {why}"),
            Reason::HeldAnyway => f.write_str("the host holds that whatever its balloon does"),
            Reason::Rebooted => f.write_str("guest rebooted: it gets memory to boot"),
            Reason::Refresh => f.write_str(
                "QEMU still shows the size from before the reboot: moved by 1 MiB to hear the new one",
            ),
            Reason::HostClear { surplus } => write!(f, "host has {surplus} to spare"),
            Reason::AboveCeiling => f.write_str("guest is above its configured max"),
            Reason::Withdrawn => f.write_str("guest did not shrink: order withdrawn"),
            Reason::HandsOff => f.write_str("hands off: the order to shrink is withdrawn"),
            Reason::Needed => {
                f.write_str("guest may need what it would give: the order to shrink is withdrawn")
            }
            Reason::Requested => f.write_str("the operator asked for its idle memory"),
            Reason::Returned => f.write_str("what was taken is returned"),
        }
    }
}

/// The operator's wish to have idle memory back now (`ebb reclaim`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reclaim {
    /// Of this VM; `None`: of all.
    pub vm: Option<String>,
    /// How much in all; `None`: all that is idle.
    pub bytes: Option<Bytes>,
}

impl Reclaim {
    /// Whether this VM is meant.
    pub fn means(&self, name: &str) -> bool {
        self.vm.as_deref().is_none_or(|vm| vm == name)
    }
}

/// Has one VM's agent give free pages back. It proves each page free itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecycleOrder {
    pub vm: VmId,
    pub name: String,
    /// How much and how finely; `None`: only look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recycle: Option<Recycle>,
    /// Then remember which pages are free now, for the next time.
    pub mark: bool,
    pub reason: String,
}

/// Why a VM is left as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub vm: VmId,
    pub name: String,
    pub why: String,
}

/// The result of an [`Action`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub vm: VmId,
    /// `None`: QEMU took the order (the guest follows in its own time).
    pub error: Option<String>,
    /// QEMU has the order and has not answered yet: it may still take it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unanswered: bool,
    /// QEMU or libvirt answered with an error: the order is not carried out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
}

impl Outcome {
    /// Whether QEMU has answered that it took the order; `None` where it surely did not.
    pub fn answered(&self) -> Option<bool> {
        (self.error.is_none() || self.unanswered).then_some(self.error.is_none())
    }
}

/// The smallest change of a size that is worth an order.
pub const DEADBAND: Bytes = Bytes::mib(4);
/// The most actions in one plan: a tick must end.
pub const MOST_ACTIONS: usize = 4096;
