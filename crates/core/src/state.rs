//! What the controller remembers from tick to tick, and how it learns.
//!
//! Small, serialisable and owned by the loop: a record that starts with a
//! [`Memory`] replays to the same plans. [`Memory::observe`] takes in a sample,
//! [`Memory::learn`] what was decided and done, [`Memory::adopt`] what an earlier
//! daemon left.

mod cold;
mod contact;
mod growth;
mod ledger;
mod rates;
mod recent;
mod recycle;
mod sizes;
mod vm;
mod yields;
mod zeros;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

pub use self::{
    cold::*, contact::*, growth::*, ledger::*, rates::*, recent::*, recycle::*, sizes::*, vm::*,
    yields::*, zeros::*,
};
use crate::model::{HOST, Limit, Model, Pressure, VmModel};
use crate::plan::{Action, MergeWish, Outcome, Plan, Stage};
use crate::policy::Decided;
use crate::policy::merge::{self, BurstMemory, Candidates, MergeMemory};
use crate::policy::recycle as recycling;
use crate::sample::{Sample, VmId, VmSample, Vmstat};
use crate::task::StageName;
use crate::units::{Bytes, Stamp};

/// A VM whose QEMU, or libvirt, refused to take from it is asked again after this.
const REFUSED_MS: u64 = 30_000;
/// How long a notification of cgroup v1 counts: it comes at most a few times a
/// second, and only while something is reclaimed.
const NOTIFIED_LIFE_MS: u64 = 2_000;
/// A VM is found within this time after its process has started, milliseconds: new ones are looked
/// for every 2 s. What it held meanwhile was taken for others'.
const FOUND_MS: u64 = 5_000;
/// No more VMs that were taken out of KSM are kept in mind for when they are started again.
const MOST_MERGE_OFF: usize = 1000;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    pub at: Option<Stamp>,
    pub state: Pressure,
    /// Since when it is in that state.
    pub state_since: Stamp,
    pub vmstat: Option<Vmstat>,
    pub vms: Vec<VmMemory>,
    /// What each stage was expected to bring, and brought.
    #[serde(alias = "ladder")]
    pub stages: Vec<Tally>,
    /// The limits at the last tick, and those that were there lately.
    #[serde(rename = "bounds")]
    pub limits: Vec<LimitMemory>,
    /// Since when something has been missing that no stage before paging out brings.
    pub beyond_since: Option<Stamp>,
    /// The last notification of cgroup v1, and the state it stands for.
    pub notified: Option<(Stamp, Pressure)>,
    pub merge: MergeMemory,
    /// VMs that the operator took out of KSM, by name: one may be started again.
    pub merge_off: BTreeSet<String>,
}

/// What is remembered of one limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitMemory {
    pub name: String,
    pub state: Pressure,
    /// How much tasks suffered there.
    pub urgency: f64,
    /// What others than VMs used of it lately.
    pub others: Recent,
    /// What all guests below it needed at one moment lately.
    pub needs: Recent,
    /// The VMs that were below it: where another one comes, what it holds may count as others' for a
    /// moment.
    pub vms: Vec<VmId>,
    /// Those of them that came lately, and when: `needs` of before is without them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<(VmId, Stamp)>,
    pub seen: Stamp,
}

/// What a stage was expected to bring the host, and what the host saw come, since
/// the daemon's start. What came is a lower bound, like [`Returned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub name: StageName,
    /// Sum of what plans expected.
    pub expected: Bytes,
    /// Sum of what was seen.
    pub came: Bytes,
}

/// What a daemon has taken from each VM: written down before it is taken, so that a
/// crash leaks nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Each VM whose balloon Ebb has inflated.
    pub vms: Vec<OwnedVm>,
    /// Each VM that Ebb has opened to KSM or closed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<OwnedMark>,
}

impl Owned {
    pub fn is_empty(&self) -> bool {
        self.vms.is_empty() && self.marks.is_empty()
    }
}

/// One VM in [`Owned::marks`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedMark {
    pub id: VmId,
    pub name: String,
    /// Whether it was open to KSM before.
    pub open: bool,
}

/// One VM in [`Owned`]: what of its balloon is Ebb's. See [`Ledger`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedVm {
    pub id: VmId,
    pub name: String,
    /// The QMP socket over which it was heard last: a configuration that cannot be read any
    /// more does not tell.
    pub socket: Option<String>,
    /// What the balloon holds that Ebb did not order: all beyond that is owed.
    pub others: Option<Bytes>,
    /// What QEMU may have been told by Ebb that the balloon shall hold.
    pub ordered: Option<Bytes>,
    /// The most that it may come to hold by this order or earlier ones. Older versions do not
    /// tell.
    pub most: Option<Bytes>,
    /// QEMU may not have the last order: its answer was lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsure: bool,
    /// The size that is owed, as older versions wrote it.
    pub baseline: Option<Bytes>,
}

impl OwnedVm {
    fn new(m: &VmMemory, ledger: &Ledger) -> OwnedVm {
        let Ledger { others, baseline, unsure, .. } = *ledger;
        let ordered = ledger.target();
        let (name, socket) = (m.name.clone(), m.socket.clone());
        let most = ledger.most.max(ordered);
        OwnedVm { id: m.id, name, socket, others, ordered, most, unsure, baseline }
    }

    fn ledger(&self) -> Ledger {
        let OwnedVm { others, ordered, most, unsure, baseline, .. } = *self;
        // On its way to the last order it may be anywhere.
        let prior = most.filter(|m| ordered.is_none_or(|o| *m > o));
        Ledger { others, ordered, most, unsure, prior, baseline, ..Ledger::default() }
    }

    /// Whether QEMU may have the order to make it smaller than it would be without Ebb.
    pub fn is_ordered(&self) -> bool {
        self.ordered.max(self.most) > self.others
    }

    /// As it stands while it is given back what it is owed, and may not have heard of it.
    pub fn given_back(&self) -> OwnedVm {
        let most = self.most.max(self.ordered);
        OwnedVm { ordered: self.others, most, unsure: true, ..self.clone() }
    }

    /// Where it was heard.
    pub fn reached_at(&self) -> Option<(VmId, PathBuf)> {
        Some((self.id, PathBuf::from(self.socket.as_ref()?)))
    }

    /// The size that the VM is owed, where it has this much RAM.
    pub fn whole(&self, ram: Bytes) -> Bytes {
        self.ledger().whole(ram).unwrap_or(ram)
    }
}

impl Memory {
    pub fn vm(&self, id: VmId) -> Option<&VmMemory> {
        self.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &self.vms[i])
    }

    /// What is remembered of a VM; the default where it was not [observed](Memory::observe).
    pub fn of(&self, id: VmId) -> &VmMemory {
        static NOTHING: LazyLock<VmMemory> = LazyLock::new(VmMemory::default);
        self.vm(id).unwrap_or(&NOTHING)
    }

    fn vm_mut(&mut self, id: VmId) -> &mut VmMemory {
        match self.vms.binary_search_by_key(&id, |v| v.id) {
            Ok(i) => &mut self.vms[i],
            Err(i) => {
                self.vms.insert(i, VmMemory { id, ..VmMemory::default() });
                &mut self.vms[i]
            }
        }
    }

    /// Takes over what an earlier daemon had taken. An entry stays until its VM is seen
    /// whole or its process is proven to have ended. What is remembered of a balloon counts
    /// more: it was handed over.
    pub fn adopt(&mut self, owned: &Owned) {
        let unknown = |m: &VmMemory| m.ledger == Ledger::default();
        for o in &owned.vms {
            if !self.vm(o.id).is_none_or(unknown) {
                continue;
            }
            let vm = self.vm_mut(o.id);
            vm.name = o.name.clone();
            vm.socket.clone_from(&o.socket);
            vm.ledger = o.ledger();
            // It told its numbers, or nothing would have been taken of it.
            vm.contact.spoke = true;
        }
        // What is not written down was put back before this start.
        let is_marked = |id: VmId| owned.marks.iter().any(|o| o.id == id);
        self.vms.iter_mut().filter(|m| !is_marked(m.id)).for_each(|m| m.merge.was = None);
        for o in &owned.marks {
            let vm = self.vm_mut(o.id);
            vm.name = o.name.clone();
            vm.merge.was.get_or_insert(o.open);
        }
        // Scans are counted anew, and so are the plans that follow from them.
        let BurstMemory { hold_until, unpaid, .. } = self.merge.govern;
        self.merge.govern = BurstMemory { hold_until, unpaid, ..BurstMemory::default() };
        self.merge.scans = 0;
    }

    /// Takes in the operator's requests about merging.
    pub fn wish(&mut self, wishes: &[MergeWish]) {
        for wish in wishes {
            match &wish.vm {
                None => {
                    self.merge.asked = Some(wish.on);
                    self.merge_off.clear();
                    self.vms.iter_mut().for_each(|v| v.merge.asked = None);
                }
                Some(name) => {
                    // Another VM of this name must not be opened by it.
                    if wish.on {
                        self.merge_off.remove(name);
                    } else if self.merge_off.len() < MOST_MERGE_OFF {
                        self.merge_off.insert(name.clone());
                    }
                    let named = self.vms.iter_mut().filter(|v| v.name == *name);
                    named.for_each(|v| v.merge.asked = Some(wish.on));
                }
            }
        }
    }

    /// Takes in the sample before it is judged: which VMs came, went, rebooted, moved.
    pub fn observe(&mut self, sample: &Sample) {
        let known: Vec<VmId> = sample.vms.iter().map(|v| v.id).collect();
        // What was not seen is not gone: a debt is forgotten with its process only.
        self.vms.retain(|v| {
            let owes = v.is_owed() && !sample.ended.contains(&v.id);
            owes || known.binary_search(&v.id).is_ok()
        });
        let dt_ms = self.at.map_or(0, |was| sample.at.since(was));
        let short = self.state > Pressure::Clear;
        for vm in &sample.vms {
            let at = sample.at;
            // A VM that is older than the daemon has settled, unless it is known to be
            // young.
            let new = self.vm(vm.id).is_none_or(|m| m.footprint.is_none());
            let first = new && (self.at.is_some() || vm.age_ms.is_some());
            let is_off = self.vm(vm.id).is_none() && self.merge_off.contains(vm.given_name());
            let m = self.vm_mut(vm.id);
            m.merge.asked = m.merge.asked.or(is_off.then_some(false));
            m.name.clone_from(&vm.name);
            let mut all_came = StageName::ALL.map(|name| (name, m.came(name)));
            m.observe(at, (dt_ms, first), sample.wall_ms / 1000, vm);
            if short {
                m.end_settling(at);
            }
            all_came.iter_mut().for_each(|(name, came)| *came = m.came(*name) - *came);
            for (name, came) in all_came {
                self.tally(name, |t| t.came += came);
            }
        }
        // One that is paused or migrates is not silent, nor is one that Ebb does not speak with.
        let may_speak = |vm: &&VmSample| vm.may_run() && !vm.let_be;
        let listened: Vec<VmId> = sample.vms.iter().filter(may_speak).map(|vm| vm.id).collect();
        let is_listened = |m: &&mut VmMemory| listened.binary_search(&m.id).is_ok();
        let mut contacts: Vec<_> =
            self.vms.iter_mut().filter(is_listened).map(|m| &mut m.contact).collect();
        contact::compare(&mut contacts);
        self.observe_merging(sample);
        let notified = sample.host.vmpressure.unwrap_or_default();
        if notified.critical > 0 {
            self.notified = Some((sample.at, Pressure::Hard));
        } else if notified.medium > 0 && self.notified_at(sample.at) < Some(Pressure::Hard) {
            self.notified = Some((sample.at, Pressure::Soft));
        }
    }

    fn observe_merging(&mut self, sample: &Sample) {
        let copied = sample.host.vmstat.and_then(|v| v.cow_ksm);
        let ksm = sample.host.ksm.unwrap_or_default();
        let (mut found, mut saved) = (Candidates::default(), 0);
        for (vm, part) in sample.vms.iter().filter_map(|v| Some((v, v.merge.as_ref()?))) {
            part.found.iter().for_each(|f| found.add(f));
            saved += merge::saved(part, &ksm);
            let opened = vm.agent.as_ref().and_then(|agent| agent.open);
            self.vm_mut(vm.id).merge.observe(sample.at, part, copied, opened);
        }
        if let Some(scan) = &sample.host.scan {
            self.merge.observe(scan.number, &found);
            let came = Bytes::pages(saved.saturating_sub(self.merge.saved));
            self.tally(StageName::Merge, |t| t.came += came);
            self.merge.saved = saved;
        }
    }

    fn tally(&mut self, name: StageName, add: impl FnOnce(&mut Tally)) {
        if self.stages.is_empty() {
            let none = |name| Tally { name, expected: Bytes::ZERO, came: Bytes::ZERO };
            self.stages = StageName::ALL.map(none).to_vec();
        }
        if let Some(t) = self.stages.iter_mut().find(|t| t.name == name) {
            add(t);
        }
    }

    /// What cgroup v1 notified a moment ago.
    pub fn notified_at(&self, at: Stamp) -> Option<Pressure> {
        let (when, state) = self.notified?;
        (at.since(when) < NOTIFIED_LIFE_MS).then_some(state)
    }

    /// What is remembered of a limit; `None`: it is new.
    pub fn past(&self, limit: &str) -> Option<&LimitMemory> {
        self.limits.iter().find(|l| l.name == limit)
    }

    /// Takes in the limits, and what others than VMs use of each, where it is known.
    fn see_limits(&mut self, model: &Model) {
        let one = |limit: &Limit| {
            let below = || model.vms.iter().filter(|v| v.is_below(limit));
            let vms: Vec<VmId> = below().map(|v| v.id).collect();
            let was = self.limits.iter().find(|l| l.name == limit.name);
            let mut needs = was.map(|l| l.needs.clone()).unwrap_or_default();
            // As needs are added up where memory is divided (`allot`).
            let need = |v: &VmModel| v.guest.filter(|_| v.pinned.is_none()).map(|g| g.need);
            needs.see(model.at, below().filter_map(need).sum());
            let mut others = was.map(|l| l.others.clone()).unwrap_or_default();
            let new = below().filter(|v| was.is_some_and(|l| !l.vms.contains(&v.id)));
            others.lower(model.at, FOUND_MS, new.filter_map(|v| v.resident).sum());
            let held: Option<Bytes> = below().map(|v| v.resident).sum();
            if let Some(held) = held.filter(|_| was.is_some_and(|l| l.vms == vms)) {
                others.see(model.at, (limit.capacity - limit.headroom) - held);
            }
            let mut joined = was.map(|l| l.joined.clone()).unwrap_or_default();
            joined.retain(|(id, at)| model.at.since(*at) < recent::LIFE_MS && vms.contains(id));
            let came = |id: &&VmId| was.is_some_and(|l| !l.vms.contains(id));
            joined.extend(vms.iter().filter(came).map(|id| (*id, model.at)));
            let (name, state, urgency) = (limit.name.clone(), limit.state, limit.urgency);
            LimitMemory { name, state, urgency, others, needs, vms, joined, seen: model.at }
        };
        let now = &model.host.limits;
        // One that can be reached at times only keeps what others used of it, as long as peaks are
        // kept. A limit of a single VM has no others.
        let kept = |l: &&LimitMemory| {
            model.at.since(l.seen) < recent::LIFE_MS
                && (l.vms.len() != 1 || l.name == HOST)
                && now.iter().all(|n| n.name != l.name)
        };
        let absent =
            |l: &LimitMemory| LimitMemory { state: Pressure::Clear, urgency: 0.0, ..l.clone() };
        let kept = self.limits.iter().filter(kept).map(absent);
        self.limits = now.iter().map(one).chain(kept).collect();
    }

    /// Takes in what was decided and the results.
    pub fn learn(&mut self, model: &Model, decided: &Decided, outcomes: &[Outcome], applied: bool) {
        let plan = &decided.plan;
        let first = self.at.replace(model.at).is_none();
        if model.host.shown.state != self.state || first {
            self.state = model.host.shown.state;
            self.state_since = model.at;
        }
        self.vmstat = model.host.vmstat;
        self.see_limits(model);
        let beyond = |r: &Stage| r.name == StageName::Offload && r.missing > Bytes::ZERO;
        let beyond = plan.stages.iter().any(beyond);
        self.beyond_since = beyond.then(|| self.beyond_since.unwrap_or(model.at));
        if !applied {
            return;
        }
        for stage in &plan.stages {
            self.tally(stage.name, |t| t.expected += stage.expected);
        }
        self.merge = decided.merging.unwrap_or(self.merge);
        for order in plan.merge.iter().flat_map(|m| &m.vms) {
            let m = &mut self.vm_mut(order.vm).merge;
            m.ordered = Some((model.at, order.open));
            m.was.get_or_insert(!order.open);
        }
        for order in &plan.orders.partial_thp {
            let m = self.vm_mut(order.vm);
            m.inflated_split = m.inflated;
        }
        for order in &plan.recycle {
            let vm = model.vm(order.vm);
            let ordered = vm.zip(order.recycle).map(|(vm, job)| {
                let expected = recycling::expected(model, vm, self.of(vm.id), &job);
                let (state, most) = (recycling::reach(model, vm, &job), job.max_bytes);
                let part = job.is_whole() || state == Pressure::Critical && most.is_some();
                RecycleOrdered { state, expected, most, part }
            });
            let m = self.vm_mut(order.vm);
            m.recycle.ordered = ordered.or(m.recycle.ordered);
            if let Some(job) = order.recycle.filter(|r| !r.marked && r.is_whole()) {
                let (was, most) = (m.recycle.whole, job.max_bytes);
                let free = vm.and_then(|vm| vm.agent.as_ref()?.free).unwrap_or_default();
                m.recycle.whole = Some(Whole::ordered(was, model.at, free, most));
            } else {
                m.recycle.marked = order.mark.then_some(model.at);
            }
        }
        let outcomes: BTreeMap<VmId, &Outcome> = outcomes.iter().map(|o| (o.vm, o)).collect();
        for action in &plan.actions {
            let outcome = outcomes.get(&action.vm);
            if outcome.is_some_and(|o| o.refused) {
                let m = self.vm_mut(action.vm);
                match action.to < action.from {
                    true => m.refused_until = Some(model.at.plus(REFUSED_MS)),
                    false => m.grow_refused = Some(model.at),
                }
            }
            let Some(answered) = outcome.and_then(|o| o.answered()) else { continue };
            let ram = model.vm(action.vm).and_then(|v| v.ram);
            self.vm_mut(action.vm).learn(model.at, ram, action, answered);
        }
    }

    /// What is to be noted with each VM whose balloon is known, where these are owed something:
    /// what it holds without Ebb.
    pub fn notes(&self, owed: &[OwnedVm]) -> Vec<(VmId, Option<Bytes>)> {
        let others: BTreeMap<VmId, Option<Bytes>> = owed.iter().map(|o| (o.id, o.others)).collect();
        let known = self.vms.iter().filter(|m| !m.ledger.is_new());
        known.map(|m| (m.id, others.get(&m.id).copied().flatten())).collect()
    }

    /// The processes to which something is owed, sorted: the host tells which have ended.
    pub fn owed_ids(&self) -> Vec<VmId> {
        self.vms.iter().filter(|m| m.is_owed()).map(|m| m.id).collect()
    }

    /// What must be on disk before what `plan` takes is applied: every VM whose balloon holds
    /// more than what others ordered, or is about to. What it gives was ordered already, with
    /// these outcomes.
    pub fn owned(&self, model: &Model, plan: &Plan, given: &[Outcome]) -> Owned {
        let answered = |a: &Action| match a.gives() {
            true => given.iter().find(|o| o.vm == a.vm)?.answered(),
            false => Some(true),
        };
        let orders = plan.actions.iter().filter_map(|a| Some((a.vm, (a.to, answered(a)?))));
        let orders: BTreeMap<VmId, (Bytes, bool)> = orders.collect();
        let vms = self.vms.iter().filter_map(|m| {
            let mut ledger = m.ledger;
            let ram = model.vm(m.id).and_then(|v| v.ram);
            if let (Some((to, answered)), Some(ram)) = (orders.get(&m.id), ram) {
                ledger.order(ram, *to, *answered);
            }
            ledger.owes().then(|| OwnedVm::new(m, &ledger))
        });
        let unseen = self.vms.iter().filter(|m| model.vm(m.id).is_none());
        let unseen = unseen
            .filter_map(|m| Some(OwnedMark { id: m.id, name: m.name.clone(), open: m.merge.was? }));
        let marks = model.vms.iter().filter_map(|v| {
            // Where Ebb does not steer KSM any more, a sample does not tell.
            let open = v.merge.as_ref().and_then(|m| m.sample.open);
            let order = plan.merge.iter().flat_map(|m| &m.vms).find(|o| o.vm == v.id);
            let was = match (self.vm(v.id)?.merge.was, order) {
                // It stays written down until it is seen to be as it was.
                (Some(was), _) => (order.is_some() || open != Some(was)).then_some(was),
                (None, order) => order.map(|o| !o.open),
            };
            Some(OwnedMark { id: v.id, name: v.name.clone(), open: was? })
        });
        Owned { vms: vms.collect(), marks: marks.chain(unseen).collect() }
    }
}

#[cfg(test)]
mod tests;
