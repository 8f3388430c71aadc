//! The sample, understood: how short is the host, what does each guest need.
//!
//! A pure function of configuration, sample and memory. The policies see only
//! this. Formulas stand here once, with their reasons; `docs/policies.md` tells
//! them to operators.
//!
//! The host is understood in `host.rs` (how much its tasks suffer: `stall.rs`), a VM in
//! `vm.rs` (whether it may be acted upon: `standing.rs`), its guest in `guest.rs`. Here they
//! are put together, and warned of what cannot work out.

pub(crate) mod guest;
mod host;
mod merge;
mod stall;
mod standing;
mod vm;
mod zeros;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::guest::{FRESH_MS, GuestModel, STALE_MS, Trust};
pub use self::host::{HostModel, Limit, default_reserve};
pub use self::merge::{MergeHost, MergeVm};
pub use self::standing::Standing;
pub(crate) use self::vm::DEFLATED_LIFE_MS;
pub use self::vm::{Convergence, Progress, VmModel};
use crate::config::{Config, Metadata};
use crate::sample::{Claim, Sample, VmId, VmSample};
use crate::state::{Memory, VmMemory};
use crate::units::{Bytes, Stamp};

/// How short of memory the host is. Ordered.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Pressure {
    #[default]
    Clear,
    /// Below the reserve: idle memory is collected gently.
    Soft,
    /// Half the reserve is gone: collected with force.
    Hard,
    /// Nearly nothing left: everything that no guest needs, at once.
    Critical,
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pressure::Clear => "clear",
            Pressure::Soft => "soft",
            Pressure::Hard => "hard",
            Pressure::Critical => "critical",
        })
    }
}

/// Everything the policies decide on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// When the sample was taken.
    pub at: Stamp,
    /// Since the last tick, milliseconds; 0 at the first.
    pub dt_ms: u64,
    pub host: HostModel,
    /// The VMs, in the sample's order.
    pub vms: Vec<VmModel>,
}

impl Model {
    /// A VM by its process.
    pub fn vm(&self, id: VmId) -> Option<&VmModel> {
        self.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &self.vms[i])
    }

    /// What others than VMs use of the tightest bound.
    pub fn others(&self) -> Bytes {
        let vms: Bytes = self.vms.iter().filter(|v| !v.outside).filter_map(|v| v.resident).sum();
        (self.host.capacity - self.host.headroom) - vms
    }

    /// Understands a sample. `memory` must have [observed](Memory::observe) it.
    pub fn new(config: &Config, sample: &Sample, memory: &Memory) -> Model {
        let dt_ms = memory.at.map_or(0, |at| sample.at.since(at));
        let others = |vm: &VmSample| {
            config.group_by_metadata(vm).is_some_and(|its| its != config.defaults.group)
        };
        let one_group = config.has_one_group() && !sample.vms.iter().any(others);
        let one = |vm: &VmSample| {
            // Metadata is the word of the host's libvirt on this process.
            let by_libvirt = config.group_by_metadata(vm).is_some();
            let unknown = matches!(vm.metadata, Metadata::Unread(_) | Metadata::Wrong(_));
            let group_is_proven =
                !unknown && (one_group || by_libvirt || vm.claim == Claim::Proven);
            VmModel { group_is_proven, ..VmModel::new(config, sample, vm, memory) }
        };
        let mut vms: Vec<VmModel> = sample.vms.iter().map(one).collect();
        let mut host = HostModel::new(config, sample, memory, (dt_ms, &vms));
        for vm in &mut vms {
            vm.outside =
                host.bound != "host" && !host.limits.iter().skip(1).any(|l| vm.is_below(l));
        }
        host.warnings = warnings(&host, &vms, memory);
        Model { at: sample.at, dt_ms, host, vms }
    }
}

/// What cannot work out, whatever is decided.
fn warnings(host: &HostModel, vms: &[VmModel], memory: &Memory) -> Vec<String> {
    let mut warnings = Vec::new();
    if host.stalls_elsewhere {
        warnings.push(format!(
            "tasks stall or swap much although there is memory: {}. A limit that Ebb does not see \
             is full, e.g. a NUMA node (numastat -m) or a cgroup's own memory.high",
            host.why
        ));
    }
    let outside: Vec<&str> = vms.iter().filter(|v| v.outside).map(|v| v.name.as_str()).collect();
    if !outside.is_empty() {
        warnings.push(format!(
            "the limit of {} is the tightest, but these VMs are outside of it: {}",
            host.bound,
            outside.join(", ")
        ));
    }
    let unseen =
        |m: &&VmMemory| m.ledger.owes() && vms.binary_search_by_key(&m.id, |v| v.id).is_err();
    for m in memory.vms.iter().filter(unseen) {
        warnings.push(format!(
            "{} (process {}) is owed memory and cannot be looked at: it stays written down",
            m.name, m.id.pid
        ));
    }
    let managed = |v: &&VmModel| v.actual.is_some();
    let floors: Bytes = vms.iter().filter(managed).map(|v| v.floor).sum();
    if host.known && floors > host.capacity - host.reserve.min(host.capacity) {
        warnings.push(format!(
            "the floors of all VMs add up to {floors}, but {} less a reserve of {} is all there \
             is: lower `min`, or the host will swap when they are needed",
            host.capacity, host.reserve
        ));
    }
    let on = host.merge.as_ref().filter(|m| m.config.mode == crate::config::MergeMode::On);
    if let Some(pid) = on.and_then(|m| m.ksm?.ksmtuned) {
        warnings.push(format!(
            "ksmtuned (process {pid}) sets KSM too; Ebb sets back what it changes: systemctl \
             disable --now ksmtuned"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests;
