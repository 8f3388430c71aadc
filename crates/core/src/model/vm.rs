//! One VM, understood: its sizes and bounds, how far it has followed its last order, and all other
//! facts that policies use.
//!
//! [`VmModel::new`] puts together what the other files of this folder find out; a new fact
//! for the policies is a field here.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::guest::{distress, trust};
use super::merge::{untouchable, zeros_stay};
use super::standing::{beyond_balloon, left_alone, standing, unread};
use super::{GuestModel, Limit, MergeVm, Standing, Trust};
use crate::config::{Config, LEAST_FLOOR};
use crate::sample::{AgentSample, HandsOff, RunState, Sample, VmId, VmSample, is_below};
use crate::state::Memory;
use crate::task::Tasks;
use crate::units::Bytes;

/// QEMU refuses to leave a guest nothing of the memory that a balloon can hold.
const LEAST_ORDER: Bytes = Bytes::mib(1);
/// For this long it counts as a sign of distress that a guest's driver deflated its balloon.
pub(crate) const DEFLATED_LIFE_MS: u64 = 2_000;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmModel {
    pub id: VmId,
    pub name: String,
    pub ram: Option<Bytes>,
    /// RAM less balloon.
    pub actual: Option<Bytes>,
    /// Never asked to go below.
    pub floor: Bytes,
    /// Never given more than this: `max`, else its RAM.
    pub ceiling: Bytes,
    /// The size that it has without Ebb.
    pub whole: Bytes,
    /// What Ebb has taken from it and not given back yet.
    pub owed: Bytes,
    /// Whether Ebb may act on it at all (`manage`).
    pub managed: bool,
    /// Which of its settings come from its manager's metadata, in words.
    pub by_metadata: String,
    /// Not below the limit that is shown as the host.
    pub outside: bool,
    pub weight: f64,
    pub cgroup: Option<String>,
    /// The NUMA nodes that its memory is bound to; empty: it may be on all.
    pub nodes: Vec<u32>,
    pub resident: Option<Bytes>,
    /// What of it is the VMM's own, at least; and whether it was counted.
    pub own: Bytes,
    pub own_is_counted: bool,
    /// In the host's swap, and what of that is the VMM's own.
    pub swap: Option<Bytes>,
    pub own_swap: Bytes,
    /// Shared memory that Ebb has paged out, which the kernel does not count for a process: what of it
    /// has not come back, at most.
    pub shared_away: Bytes,
    pub agent: Option<AgentSample>,
    /// What the guest says, if it can be believed.
    pub guest: Option<GuestModel>,
    /// Whether and why it can be acted upon.
    pub standing: Standing,
    /// Signs that the guest is short, for people; empty when it is not.
    pub distress: String,
    /// Why it should have what it may need although it shows no need, for people.
    pub unseen: String,
    /// Its share group is proven by more than its own name; or there is one group.
    pub group_is_proven: bool,
    pub group: String,
    pub trust: Trust,
    pub convergence: Convergence,
    /// Swap that it may still use by its cgroups' limits; `None`: they have none.
    pub swap_left: Option<Bytes>,
    pub paused: bool,
    pub hands_off: Option<HandsOff>,
    /// It has just started: what it may still take of what it was promised.
    pub promised: Bytes,
    /// Given to it lately and not touched yet.
    pub outstanding: Bytes,
    /// Its balloon can bring nothing: there is none, no driver in the guest, it does not
    /// follow, or its numbers are not believed. It runs and answers.
    pub beyond_balloon: bool,
    /// Why it cannot be paged out.
    pub pinned: Option<String>,
    /// Its RAM is in a pool of huge pages.
    pub in_pool: bool,
    /// What was done to it beside the loop.
    pub tasks: Tasks,
    /// The kernel may be advised about its RAM.
    pub advisable: bool,
    pub merge: Option<MergeVm>,
    /// Why its pages of zeros are left where they are; empty: they need not be.
    pub zeros_stay: String,
}

/// How far a VM has followed its last order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Convergence {
    pub state: Progress,
    /// The size that was ordered, until it has it.
    pub target: Option<Bytes>,
    /// How fast it moves, bytes a second, averaged over two seconds.
    pub rate: f64,
    /// When it will be there at that rate, milliseconds; `None`: not known.
    pub eta_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// It has the size that was ordered.
    #[default]
    Settled,
    Shrinking,
    Growing,
    /// On its way, but below [`SLOW_RATE`](crate::state::SLOW_RATE).
    Slow,
    /// It does not move, or did not and is left alone for a while.
    Stuck,
    /// Its numbers contradict what the host sees: it is not asked.
    Lying,
    /// It rebooted and is not whole yet.
    Rebooting,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What a VMM holds beside its guest's RAM, as long as that was not counted and no more was seen.
const VMM_OWN: Bytes = Bytes::mib(64);

impl VmModel {
    /// Whether a limit holds for it: the machine's does for all.
    pub fn is_below(&self, limit: &Limit) -> bool {
        let own = (self.cgroup.as_deref(), &self.nodes[..]);
        limit.is_host() || is_below(own, (&limit.name, &limit.nodes))
    }

    /// What the host holds of its guest's memory, at most. A pool holds all.
    pub fn guest_held(&self) -> Option<Bytes> {
        if self.in_pool { self.actual.or(self.ram) } else { self.resident.map(|r| r - self.own) }
    }

    /// What the host holds of its guest's memory, at least. A VMM may hold more itself than was seen,
    /// unless that was counted. A guest has touched what it needs.
    pub fn guest_held_at_least(&self) -> Option<Bytes> {
        let unseen = if self.own_is_counted { Bytes::ZERO } else { VMM_OWN };
        let held = match self.in_pool {
            true => self.guest_held()?,
            false => self.resident? - self.own.max(unseen),
        };
        Some(held.max(self.guest.map_or(held, |g| g.need - self.guest_swap())))
    }

    /// What the host holds of it beside merged pages. Of those, its process counts all but zeros.
    pub fn unmerged(&self) -> Option<Bytes> {
        let merged = self.merge.as_ref().and_then(|part| part.sample.stat.merging_pages);
        Some(self.resident? - Bytes::pages(merged.unwrap_or(0)))
    }

    /// What of its guest's memory is in the host's swap.
    pub fn guest_swap(&self) -> Bytes {
        self.swap.unwrap_or_default() - self.own_swap
    }

    pub(super) fn new(config: &Config, sample: &Sample, vm: &VmSample, memory: &Memory) -> VmModel {
        let settings = &*config.settings_of(vm);
        let m = memory.of(vm.id);
        let actual = vm.balloon.as_ref().map(|b| b.actual);
        let ram = vm.ram.or(actual).unwrap_or_default();
        let whole = m.ledger.whole(ram).unwrap_or(ram);
        let ceiling = settings.max.map_or(ram, |max| max.of(ram)).max(LEAST_FLOOR.min(ram));
        // A floor above the ceiling gives way to it.
        let floor = settings.min.of(ram).max(LEAST_FLOOR).min(ceiling);
        let beyond = vm.balloon.as_ref().map_or(Bytes::ZERO, |b| b.beyond_balloon);
        let floor = if beyond == Bytes::ZERO { floor } else { floor.max(beyond + LEAST_ORDER) };
        let limits = sample.host.pool.iter().chain(&sample.host.other_limits);
        let above = limits.filter(|p| p.holds(vm.cgroup.as_deref(), &vm.nodes));
        let unmanaged = left_alone(config, settings, vm);
        let fixed = untouchable(unmanaged.clone(), vm);
        let (wanted, age_ms) = (settings.merge, vm.age_ms);
        let mut model = VmModel {
            id: vm.id,
            name: vm.name.clone(),
            ram: vm.ram,
            actual,
            floor,
            ceiling,
            whole,
            owed: actual.map_or(Bytes::ZERO, |a| m.ledger.owed(ram, a)),
            managed: unmanaged.is_none() && unread(vm).is_none(),
            by_metadata: config.metadata_words(vm),
            // The configuration's reader refuses others; a record may hold any.
            weight: Some(settings.weight).filter(|w| *w > 0.0 && w.is_finite()).unwrap_or(1.0),
            group: settings.group.clone(),
            pinned: vm.pinned.clone(),
            in_pool: vm.in_pool,
            cgroup: vm.cgroup.clone(),
            nodes: vm.nodes.clone(),
            paused: vm.run == Some(RunState::Paused),
            hands_off: vm.hands_off,
            tasks: vm.tasks.clone(),
            advisable: vm.pinned.is_none() && fixed.is_none(),
            resident: vm.process.map(|p| p.resident()),
            swap: vm.process.map(|p| p.swap),
            shared_away: m.cold.away,
            agent: vm.agent.clone(),
            swap_left: above.filter_map(|p| p.swap_left).min(),
            zeros_stay: zeros_stay(config, settings, vm).or(fixed.clone()).unwrap_or_default(),
            merge: vm.merge.clone().map(|sample| MergeVm { wanted, fixed, age_ms, sample }),
            ..VmModel::default()
        };
        if let (Some(actual), Some(stats)) = (actual, m.believed_stats(sample.at, vm)) {
            let deflate_on_oom = vm.balloon.as_ref().is_some_and(|b| b.deflates_on_oom());
            let rates = m.rates_at(sample.at);
            model.guest = GuestModel::new((ram, actual), deflate_on_oom, &stats, m, rates);
        }
        model.trust = trust(model.guest.as_ref(), m);
        model.standing = standing(unmanaged, vm, &model, m, sample.at);
        model.beyond_balloon = model.managed && beyond_balloon(vm, m, sample.at);
        let inflating = m.inflates(sample.at, actual);
        let signs = model.guest.as_ref().map(|g| distress(g, model.owed, inflating));
        model.distress = signs.unwrap_or_default();
        if !model.distress.is_empty() && model.guest.is_some_and(|g| g.by_module) {
            model.distress += ", by its module's facts";
        }
        if model.distress.is_empty()
            && model.guest.is_none_or(|g| g.available < g.buffer)
            && m.deflated_on_oom.is_some_and(|t| sample.at.since(t) < DEFLATED_LIFE_MS)
        {
            model.distress = "it was out of memory and deflated its balloon itself".into();
        }
        model.own = m.own().min(model.resident.unwrap_or_default());
        model.own_is_counted = m.own_counted.is_some();
        model.own_swap = m.own_counted.map_or(Bytes::ZERO, |own| own.swap);
        model.unseen = m.contact.unseen(sample.at);
        if model.unseen.is_empty() && vm.run == Some(RunState::Migrating) {
            model.unseen = "it is being migrated or saved: the other side may not know what \
                            it is owed"
                .into();
        }
        model.convergence = m.convergence(sample.at, actual, model.trust.level);
        let host_side = model.guest_held().unwrap_or_default() + model.guest_swap();
        if m.start.is_some() && model.resident.is_some() {
            model.promised = model.actual.unwrap_or(ram) - host_side;
        }
        model.outstanding = m.outstanding(sample.at, actual, host_side);
        model
    }
}
