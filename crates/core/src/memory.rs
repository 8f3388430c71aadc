//! What the controller remembers from tick to tick, and how it learns.
//!
//! Small, serialisable and owned by the loop: a record that starts with a
//! [`Memory`] replays to the same plans. Only [`Memory::learn`] and
//! [`Memory::adopt`] change it.

use serde::{Deserialize, Serialize};

use crate::model::{Model, Pressure, VmModel};
use crate::plan::{Outcome, Plan, Reason};
use crate::sample::{AgentSample, GuestStats, Sample, VmEvent, VmId, VmSample, Vmstat};
use crate::units::{Bytes, Stamp};
use crate::wire::AgentState;

/// After a reset or first sight a guest is left alone for so long: its numbers
/// are those of a booting kernel.
pub const SETTLE_MS: u64 = 20_000;
/// An order to shrink that moved nothing for so long makes the guest “stuck”.
pub const STUCK_AFTER_MS: u64 = 10_000;
/// A stuck guest is asked again after this, doubling up to [`STUCK_MOST_MS`].
pub const STUCK_FIRST_MS: u64 = 30_000;
/// The longest pause for a guest that never follows.
pub const STUCK_MOST_MS: u64 = 600_000;
/// A balloon that still moves up so long after a gift follows the gift.
const GIVE_ECHO_MS: u64 = 10_000;
/// A balloon that grew so long ago has been dealt with by QEMU.
const INFLATE_ECHO_MS: u64 = 2_000;
/// Rates older than this say nothing of now.
const RATE_LIFE_MS: u64 = 5_000;

/// All that is remembered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// When the last tick was.
    pub at: Option<Stamp>,
    /// The host's state then.
    pub state: Pressure,
    /// Since when it is in that state.
    pub state_since: Stamp,
    /// The host's counters then.
    pub vmstat: Option<Vmstat>,
    /// The VMs, sorted by id.
    pub vms: Vec<VmMemory>,
}

/// What is remembered of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmMemory {
    /// Which.
    pub id: VmId,
    /// Its name when last seen.
    pub name: String,
    /// Its size before Ebb ever touched it: what it is given back.
    pub baseline: Option<Bytes>,
    /// The last order, until it is fulfilled or overtaken.
    pub order: Option<Order>,
    /// When it was last made smaller.
    pub last_take: Option<Stamp>,
    /// When it was last made larger.
    pub last_give: Option<Stamp>,
    /// Left alone until then.
    pub settle_until: Option<Stamp>,
    /// Not asked until then, because it did not follow.
    pub stuck_until: Option<Stamp>,
    /// How often in a row it did not follow.
    pub stuck_count: u32,
    /// When its balloon last shrank without an order: the guest was out of memory
    /// and helped itself (`deflate-on-oom`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub helped_itself: Option<Stamp>,
    /// It rebooted while it was ballooned and is not whole again yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reboot: Option<Reboot>,
    /// Its last statistics that differed from those before, when they came, and
    /// its size then.
    pub stats: Option<(Stamp, Bytes, GuestStats)>,
    /// Rates from the last two statistics.
    pub rates: Option<GuestRates>,
    /// The guest's recent peaks of need, slow and fast in forgetting.
    #[serde(default)]
    pub peaks: Peaks,
    /// When its balloon was last seen to grow, whoever ordered that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shrunk: Option<Stamp>,
    /// What the recycler remembers.
    #[serde(default)]
    pub recycle: RecycleMemory,
    /// Size and residency a tick ago.
    pub seen: Option<Seen>,
    /// What came back to the host, since Ebb first saw the VM.
    pub returned: Returned,
}

/// How far a reboot is dealt with. QEMU goes on showing the size from before a
/// reset until the new driver writes it, and a driver that is where it is told to
/// be writes nothing: so once the guest speaks it is moved by one MiB and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reboot {
    /// When the reset was heard of, seconds since 1970: older statistics are the
    /// old kernel's.
    pub wall_s: u64,
    /// When it was ordered to have everything.
    pub given: Option<Stamp>,
    /// When it was moved by one MiB.
    pub nudged: Option<Stamp>,
    /// The new kernel's driver has sent statistics.
    pub speaks: bool,
}

/// An order to a balloon that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The size ordered.
    pub to: Bytes,
    /// The size when it last moved.
    pub moved_from: Bytes,
    /// When it last moved (or was given).
    pub moved_at: Stamp,
}

/// What a guest needed lately: peaks that sink towards its present need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// When they were brought up to date.
    pub at: Stamp,
    /// Forgets over a minute.
    pub slow: Bytes,
    /// Forgets over ten seconds.
    pub fast: Bytes,
}

impl Peaks {
    fn update(&mut self, at: Stamp, need: Bytes) {
        let ms = at.since(self.at) as f64;
        let sink = |peak: Bytes, over_ms: f64| {
            (peak - (peak - need).share((ms / over_ms).min(1.0))).max(need)
        };
        *self = Peaks { at, slow: sink(self.slow, 60_000.0), fast: sink(self.fast, 10_000.0) };
    }
}

/// What the recycler remembers of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleMemory {
    /// When free pages were last remembered by the agent.
    pub marked: Option<Stamp>,
    /// The guest allocates so many bytes a second, averaged over three seconds:
    /// shorter than pages must have been free, so that one burst that is over
    /// does not hold back what it freed.
    pub alloc_rate: f64,
    /// Its allocations and the recycled bytes a tick ago.
    pub was: Option<(Stamp, Bytes, Bytes)>,
    /// How often slack was doubled because recycled memory was taken back.
    pub backoff: u32,
    /// What was recycled since `since`, and what residency was after it.
    pub batch: Option<Batch>,
}

/// A spell of recycling that is watched for what comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// When it began.
    pub at: Stamp,
    /// Recycled in it.
    pub bytes: Bytes,
    /// The lowest residency since.
    pub low: Bytes,
}

/// Recycled memory that is back within this time was recycled in vain.
const REFAULT_MS: u64 = 5_000;
/// From this share of it on, more slack is left.
const REFAULT_SHARE: f64 = 0.3;

impl RecycleMemory {
    fn observe(&mut self, at: Stamp, agent: &AgentSample, resident: Bytes) {
        let allocated = agent.allocated.unwrap_or_default();
        let recycled = agent.counters.recycled;
        if agent.state != AgentState::Ready {
            self.marked = None;
        }
        if let Some((was_at, was_allocated, was_recycled)) =
            self.was.replace((at, allocated, recycled))
        {
            let seconds = (at.since(was_at) as f64 / 1000.0).max(0.001);
            let weight = (seconds / 3.0).min(1.0);
            let rate = (allocated - was_allocated).0 as f64 / seconds;
            self.alloc_rate = self.alloc_rate * (1.0 - weight) + rate * weight;
            self.watch(at, recycled - was_recycled, resident);
        }
    }

    /// Doubles the slack where what was recycled is soon resident again, halves it
    /// where it stays away.
    fn watch(&mut self, at: Stamp, recycled: Bytes, resident: Bytes) {
        if let Some(b) = self.batch.as_mut() {
            b.bytes += recycled;
            b.low = b.low.min(resident);
            if at.since(b.at) >= REFAULT_MS {
                let back = (resident - b.low).min(b.bytes).fraction_of(b.bytes);
                self.backoff = if back >= REFAULT_SHARE {
                    (self.backoff + 1).min(6)
                } else {
                    self.backoff.saturating_sub(1)
                };
                self.batch = None;
            }
        } else if recycled > Bytes::mib(1) {
            self.batch = Some(Batch { at, bytes: recycled, low: resident });
        }
    }
}

/// How fast a guest's counters move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestRates {
    /// When the later of the two statistics came.
    pub at: Stamp,
    /// Major faults a second.
    pub major_faults: f64,
    /// Swapped in, bytes a second.
    pub swap_in: f64,
    /// Allocation stalls a second, where known.
    pub alloc_stalls: f64,
    /// OOM kills between the two.
    pub oom_kills: u64,
    /// Change of its need (size less available), bytes a second. Unlike the change
    /// of available memory this is not moved by the balloon itself.
    pub need: f64,
}

/// Size and residency at a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Balloon size (RAM less balloon).
    pub actual: Option<Bytes>,
    /// Resident.
    pub resident: Bytes,
    /// In swap.
    pub swap: Bytes,
    /// Recycled by the agent so far.
    #[serde(default)]
    pub recycled: Bytes,
}

/// Bytes that left a VM's residency, by what took them. A lower bound: growth in
/// the same tick hides a release. The host's own free memory is the proof, these
/// only divide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returned {
    /// The balloon was inflated meanwhile.
    pub balloon: Bytes,
    /// Went to swap.
    pub swap: Bytes,
    /// The agent recycled it, page by page, as it counts itself.
    #[serde(default)]
    pub recycled: Bytes,
    /// Neither, and the guest has free page reporting.
    pub reporting: Bytes,
    /// Neither, and it has not (the VMM itself shrank, KSM, another tool).
    pub other: Bytes,
    /// The reverse: deflated for the guest to use again.
    pub given_back: Bytes,
}

/// What a daemon has taken from whom: written down before it is taken, so that a
/// crash leaks nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Each VM whose balloon Ebb has inflated.
    pub vms: Vec<OwnedVm>,
}

/// One VM in [`Owned`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedVm {
    /// Which process.
    pub id: VmId,
    /// Its name, for people.
    pub name: String,
    /// What it is to be given back.
    pub baseline: Bytes,
}

impl Memory {
    /// What is remembered of this VM.
    pub fn vm(&self, id: VmId) -> Option<&VmMemory> {
        self.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &self.vms[i])
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

    /// Takes over what an earlier daemon had taken. Entries of processes that
    /// are gone do no harm: they are forgotten at the first tick.
    pub fn adopt(&mut self, owned: &Owned) {
        for o in &owned.vms {
            let vm = self.vm_mut(o.id);
            vm.name = o.name.clone();
            vm.baseline = Some(o.baseline);
        }
    }

    /// Takes in the sample before it is judged: who came, went, rebooted, moved.
    pub fn observe(&mut self, sample: &Sample) {
        let known: Vec<VmId> = sample.vms.iter().map(|v| v.id).collect();
        self.vms.retain(|v| known.binary_search(&v.id).is_ok());
        for vm in &sample.vms {
            let at = sample.at;
            let m = self.vm_mut(vm.id);
            m.name.clone_from(&vm.name);
            m.observe(at, sample.wall_ms / 1000, vm);
        }
    }

    /// Takes in what was decided and what became of it.
    pub fn learn(&mut self, model: &Model, plan: &Plan, outcomes: &[Outcome], applied: bool) {
        let first = self.at.replace(model.at).is_none();
        if model.host.state != self.state || first {
            self.state = model.host.state;
            self.state_since = model.at;
        }
        self.vmstat = model.host.vmstat;
        if !applied {
            return;
        }
        for order in &plan.recycle {
            let m = self.vm_mut(order.vm);
            m.recycle.marked = order.mark.then_some(model.at);
        }
        for action in &plan.actions {
            let failed =
                outcomes.iter().find(|o| o.vm == action.vm).is_none_or(|o| o.error.is_some());
            if failed {
                continue;
            }
            let m = self.vm_mut(action.vm);
            m.order = Some(Order { to: action.to, moved_from: action.from, moved_at: model.at });
            match action.reason {
                // Neither gives nor takes: the guest keeps the size it has.
                Reason::Withdrawn => {
                    m.order = None;
                    m.stuck_count = (m.stuck_count + 1).min(16);
                    let pause = STUCK_FIRST_MS << (m.stuck_count - 1).min(8);
                    m.stuck_until = Some(model.at.plus(pause.min(STUCK_MOST_MS)));
                }
                // What was taken went with the old kernel.
                Reason::Rebooted => {
                    if let Some(r) = m.reboot.as_mut() {
                        r.given = Some(model.at);
                    }
                    m.last_take = None;
                    m.last_give = Some(model.at);
                }
                Reason::Refresh => {
                    if let Some(r) = m.reboot.as_mut() {
                        r.nudged = Some(model.at);
                    }
                }
                _ if action.gives() => m.last_give = Some(model.at),
                _ => m.last_take = Some(model.at),
            }
        }
    }

    /// What must be on disk before `plan` is applied: every VM that is smaller
    /// than its baseline, or is about to be.
    pub fn owned(&self, model: &Model, plan: &Plan) -> Owned {
        let vms =
            model.vms.iter().filter_map(|v| {
                let m = self.vm(v.id)?;
                let baseline = m.baseline?;
                let shrinks = plan.actions.iter().any(|a| a.vm == v.id && a.to < baseline);
                let ordered = m.order.is_some_and(|o| o.to < baseline);
                let small = v.actual.is_some_and(|a| a < baseline);
                (shrinks || ordered || small || v.actual.is_none() && self.took(m))
                    .then(|| OwnedVm { id: v.id, name: v.name.clone(), baseline })
            });
        Owned { vms: vms.collect() }
    }

    /// Whether Ebb ever shrank it and cannot tell that it has given all back.
    fn took(&self, m: &VmMemory) -> bool {
        m.last_take.is_some() || m.seen.and_then(|s| s.actual) < m.baseline
    }
}

impl VmMemory {
    fn observe(&mut self, at: Stamp, wall_s: u64, vm: &VmSample) {
        let actual = vm.balloon.as_ref().map(|b| b.actual);
        if self.baseline.is_none() {
            // First sight: what it has now is what it is owed, whoever set it.
            self.baseline = actual;
        }
        let reset = vm.events.contains(&VmEvent::Reset);
        if reset {
            self.forget_guest(at, wall_s);
        }
        self.follow_reboot(at, vm);
        if let Some((actual, stats)) = vm.balloon.as_ref().and_then(|b| Some((b.actual, b.guest?)))
        {
            if let Some(available) = stats.available.or(stats.free) {
                self.peaks.update(at, actual - available);
            }
            self.take_stats(at, wall_s, actual, stats);
        }
        if let (Some(agent), Some(p)) = (vm.agent.as_ref(), vm.process) {
            self.recycle.observe(at, agent, p.resident());
        }
        if let (Some(was), Some(now)) = (self.seen.and_then(|s| s.actual), actual)
            && now < was
        {
            self.shrunk = Some(at);
        }
        self.notice_help(at, actual);
        self.follow_order(at, actual);
        self.account(vm, actual);
    }

    /// The guest rebooted: nothing known of it holds any more.
    fn forget_guest(&mut self, at: Stamp, wall_s: u64) {
        let seen = self.seen.and_then(|s| s.actual);
        let small = self.baseline.is_some() && seen < self.baseline;
        if small || self.order.is_some() || self.reboot.is_some() {
            self.reboot = Some(Reboot { wall_s, ..Reboot::default() });
        }
        self.settle_until = Some(at.plus(SETTLE_MS));
        self.stats = None;
        self.rates = None;
        self.order = None;
        self.helped_itself = None;
        self.peaks = Peaks::default();
        self.stuck_until = None;
        self.stuck_count = 0;
    }

    fn follow_reboot(&mut self, at: Stamp, vm: &VmSample) {
        let (Some(r), Some(b)) = (self.reboot.as_mut(), vm.balloon.as_ref()) else { return };
        // A second apart, as QEMU counts in whole ones.
        r.speaks |= b.guest.is_some_and(|g| g.updated_s > r.wall_s + 1);
        let whole = self.baseline.is_none_or(|base| b.actual >= base);
        let given_up = r.nudged.is_some_and(|t| at.since(t) >= STUCK_AFTER_MS);
        if r.given.is_some() && (whole || given_up) {
            self.reboot = None;
        }
    }

    fn take_stats(&mut self, at: Stamp, wall_s: u64, actual: Bytes, now: GuestStats) {
        if self.stats.is_some_and(|(_, _, was)| same_words(&was, &now)) {
            return;
        }
        let Some((was_at, was_actual, was)) = self.stats.replace((at, actual, now)) else { return };
        let backwards =
            |b: Option<u64>, n: Option<u64>| matches!((b, n), (Some(b), Some(n)) if n < b);
        if backwards(was.minor_faults, now.minor_faults)
            && backwards(was.major_faults, now.major_faults)
        {
            // Counters since boot went back: it rebooted unseen.
            self.forget_guest(at, wall_s);
            return;
        }
        self.rates = GuestRates::between((was_at, was_actual, &was), (at, actual, &now));
    }

    /// A balloon that shrinks although nobody told it to.
    fn notice_help(&mut self, at: Stamp, actual: Option<Bytes>) {
        let (Some(was), Some(now)) = (self.seen.and_then(|s| s.actual), actual) else { return };
        let ordered = self.order.is_some_and(|o| o.to > was);
        let given = self.last_give.is_some_and(|t| at.since(t) < GIVE_ECHO_MS);
        if now > was + Bytes::mib(1) && !ordered && !given && self.reboot.is_none() {
            self.helped_itself = Some(at);
        }
    }

    fn follow_order(&mut self, at: Stamp, actual: Option<Bytes>) {
        let (Some(order), Some(actual)) = (self.order.as_mut(), actual) else { return };
        if actual.abs_diff(order.to) < Bytes::mib(1) {
            self.order = None;
            self.stuck_count = 0;
            self.stuck_until = None;
        } else if actual.abs_diff(order.moved_from) >= Bytes::mib(1) {
            order.moved_from = actual;
            order.moved_at = at;
        }
    }

    fn account(&mut self, vm: &VmSample, actual: Option<Bytes>) {
        let Some(p) = vm.process else { return };
        let recycled = vm.agent.as_ref().map(|a| a.counters.recycled).unwrap_or_default();
        let now = Seen { actual, resident: p.resident(), swap: p.swap, recycled };
        if let Some(was) = self.seen.replace(now) {
            let inflated = match (was.actual, now.actual) {
                (Some(w), Some(n)) => w - n,
                _ => Bytes::ZERO,
            };
            if let (Some(w), Some(n)) = (was.actual, now.actual) {
                self.returned.given_back += n - w;
            }
            let mut left = was.resident - now.resident;
            let mut part = |most: Bytes| {
                let took = left.min(most);
                left = left - took;
                took
            };
            self.returned.swap += part(now.swap - was.swap);
            self.returned.recycled += part(now.recycled - was.recycled);
            self.returned.balloon += part(inflated);
            if vm.balloon.as_ref().and_then(|b| b.reporting) == Some(true) {
                self.returned.reporting += left;
            } else {
                self.returned.other += left;
            }
        }
    }

    /// The rates, unless they are too old to mean anything.
    pub fn rates_at(&self, at: Stamp) -> Option<GuestRates> {
        self.rates.filter(|r| at.since(r.at) <= RATE_LIFE_MS)
    }

    /// Whether QEMU may be discarding pages of this VM itself: its balloon grows,
    /// or grew a moment ago.
    pub fn inflates(&self, at: Stamp, actual: Option<Bytes>) -> bool {
        self.order.is_some_and(|o| actual.is_none_or(|a| o.to < a))
            || self.shrunk.is_some_and(|t| at.since(t) < INFLATE_ECHO_MS)
            || self.reboot.is_some()
    }

    /// Whether an order to shrink has moved nothing for too long.
    pub fn stalled(&self, vm: &VmModel, at: Stamp) -> bool {
        match (self.order, vm.actual) {
            (Some(o), Some(actual)) => o.to < actual && at.since(o.moved_at) >= STUCK_AFTER_MS,
            _ => false,
        }
    }
}

/// Whether the guest said nothing new (age and update time apart).
fn same_words(a: &GuestStats, b: &GuestStats) -> bool {
    GuestStats { updated_s: 0, age_ms: 0, ..*a } == GuestStats { updated_s: 0, age_ms: 0, ..*b }
}

impl GuestRates {
    fn between(
        (was_at, was_actual, was): (Stamp, Bytes, &GuestStats),
        (at, actual, now): (Stamp, Bytes, &GuestStats),
    ) -> Option<GuestRates> {
        let ms = at.since(was_at);
        if ms == 0 {
            return None;
        }
        let seconds = ms as f64 / 1000.0;
        let grown = |b: Option<u64>, n: Option<u64>| match (b, n) {
            (Some(b), Some(n)) => n.saturating_sub(b),
            _ => 0,
        };
        let rate = |b, n| grown(b, n) as f64 / seconds;
        Some(GuestRates {
            at,
            major_faults: rate(was.major_faults, now.major_faults),
            swap_in: rate(was.swap_in.map(|b| b.0), now.swap_in.map(|b| b.0)),
            alloc_stalls: rate(was.alloc_stalls, now.alloc_stalls),
            oom_kills: grown(was.oom_kills, now.oom_kills),
            need: match (was.available, now.available) {
                (Some(b), Some(n)) => ((actual - n).0 as f64 - (was_actual - b).0 as f64) / seconds,
                _ => 0.0,
            },
        })
    }
}
