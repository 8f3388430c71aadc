//! The sample, understood: how short is the host, what does each guest need.
//!
//! A pure function of configuration, sample and memory. The policies see only
//! this. Formulas stand here once, with their reasons; `docs/policies.md` tells
//! them to operators.
//!
//! Here host and VMs are put together. A setting that cannot be kept gives a warning.

pub(crate) mod guest;
mod host;
mod merge;
mod stall;
mod standing;
mod vm;

use std::cmp::Reverse;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::guest::{FRESH_MS, GuestModel, STALE_MS, Trust};
pub(crate) use self::host::HOST;
use self::host::tightest;
pub use self::host::{HostModel, Limit, default_reserve};
pub use self::merge::{MergeHost, MergeVm};
pub use self::standing::{MOVED, Standing};
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
    /// Below three quarters of the reserve, or tasks stall: idle memory is collected gently.
    Soft,
    /// Below half of it, or tasks stall more: idle memory is collected with force.
    Hard,
    /// Below a quarter of it, or tasks stall most of the time: all that no guest needs is
    /// collected at once.
    Critical,
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Everything the policies decide on.
#[derive(Clone, Debug, Default, PartialEq)]
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

    /// What others than VMs use of the tightest limit.
    pub fn others(&self) -> Bytes {
        let vms: Bytes = self.vms.iter().filter(|v| !v.outside).filter_map(|v| v.resident).sum();
        (self.host.shown.capacity - self.host.shown.headroom) - vms
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
        mark_outside(&host, &mut vms);
        host.warnings = warnings(&host, &vms, memory);
        Model { at: sample.at, dt_ms, host, vms }
    }

    /// Shows this limit as the host, and the VMs that are not below it as outside.
    pub fn aim(&mut self, limit: usize) {
        self.host.aim(limit);
        mark_outside(&self.host, &mut self.vms);
    }

    /// The limit that counts for a VM to come: of those that most VMs are below the tightest.
    pub fn common_limit(&self) -> usize {
        // One without VMs is the pool that the configuration names.
        // A limit above one VM is most likely its own, unless it is a slice or the pool.
        let shared = |l: &Limit| l.is_named || l.vms > 1 || l.name.ends_with(".slice");
        let most =
            |l: &&Limit| l.is_host() || l.vms == 0 || 2 * l.vms > self.vms.len() && shared(l);
        let limit = tightest(self.host.limits.iter().filter(most));
        let is_it = |l: &Limit| limit.is_some_and(|limit| limit.name == l.name);
        self.host.limits.iter().position(is_it).unwrap_or(0)
    }

    /// The limits, those first that are inside of others; the machine's is last.
    pub fn inner_first(&self) -> Vec<usize> {
        let limits = &self.host.limits;
        let mut order: Vec<usize> = (0..limits.len()).collect();
        let depth = |l: &Limit| l.name.matches('/').count();
        order.sort_by_key(|i| {
            let l = &limits[*i];
            (l.is_host(), !l.nodes.is_empty(), Reverse(depth(l)), l.vms, Reverse(*i))
        });
        order
    }

    /// The limit that is tightest for a VM: of those above it the one in the worst state.
    pub fn limit_of(&self, vm: &VmModel) -> Option<&Limit> {
        tightest(self.host.limits.iter().filter(|l| vm.is_below(l)))
    }

    /// The state of that limit.
    pub fn state_of(&self, vm: &VmModel) -> Pressure {
        match self.host.limits.len() {
            0 | 1 => self.host.shown.state,
            _ => self.limit_of(vm).map_or(Pressure::Clear, |l| l.state),
        }
    }
}

fn mark_outside(host: &HostModel, vms: &mut [VmModel]) {
    for vm in vms {
        vm.outside = !host.limits.is_empty() && !vm.is_below(&host.shown);
    }
}

/// What cannot work out, whatever is decided.
fn warnings(host: &HostModel, vms: &[VmModel], memory: &Memory) -> Vec<String> {
    let mut warnings = Vec::new();
    if host.shown.stalls_elsewhere {
        warnings.push(format!(
            "tasks stall or swap much although there is memory: {}. A limit that Ebb does not see \
             is full, e.g. a NUMA node (numastat -m) or a cgroup's own memory.high",
            host.shown.why
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
    for limit in &host.limits {
        let below = vms.iter().filter(|v| v.actual.is_some() && v.is_below(limit));
        let floors: Bytes = below.map(|v| v.floor).sum();
        if floors > limit.capacity - limit.reserve.min(limit.capacity) {
            let (whose, who) = match limit.is_host() {
                true => ("all VMs".to_owned(), "the host"),
                false => (format!("the VMs below {}", limit.name), "its VMs"),
            };
            warnings.push(format!(
                "the floors of {whose} add up to {floors}, but {} less a reserve of {} is all \
                 there is: lower `min`, or {who} will swap when they are needed",
                limit.capacity, limit.reserve
            ));
        }
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
