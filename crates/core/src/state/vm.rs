//! What is remembered of one VM, and how it learns from what it sees.
//!
//! [`VmMemory::observe`] takes in a tick's facts before they are judged: orders
//! that move or do not, reboots, rates, peaks of need, contradictions, what came
//! back to the host. What was decided is taken in by [`super::Memory::learn`].
//!
//! A new field has a default, as an older daemon's record lacks it, and one that is of the guest
//! and not of its process is forgotten in `boot.rs`.

mod boot;
mod order;
mod returned;
mod stats;

use serde::{Deserialize, Serialize};

pub use self::{boot::*, order::*, returned::*, stats::*};
use super::{
    Cold, Contact, Fastest, Growth, GuestRates, Ledger, Recent, RecycleMemory, Sizes, Yields,
    ZeroMemory,
};
use crate::policy::merge::VmMergeMemory;
use crate::sample::{GuestStats, OwnMemory, VmEvent, VmId, VmSample};
use crate::units::{Bytes, Stamp};

/// One harm is forgotten in this time, and the known hot cache decays over it.
const FORGIVE_MS: u64 = 60_000;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmMemory {
    pub id: VmId,
    pub name: String,
    /// The QMP socket over which it was heard last.
    pub socket: Option<String>,
    pub ledger: Ledger,
    /// The last order, until it is fulfilled or overtaken.
    pub order: Option<BalloonOrder>,
    /// The last order to grow.
    pub grew_to: Option<GrewTo>,
    pub last_take: Option<Stamp>,
    /// What its guest needed when it was last asked.
    pub need_then: Option<Bytes>,
    pub last_give: Option<Stamp>,
    /// When it was last given what the host had too much of.
    pub last_returned: Option<Stamp>,
    pub settle_until: Option<Stamp>,
    /// Not asked until then, because it did not follow.
    pub stuck_until: Option<Stamp>,
    /// Not asked until then, because QEMU or libvirt refused an order to shrink.
    pub refused_until: Option<Stamp>,
    /// When QEMU or libvirt last refused an order to grow, or to keep its size.
    pub grow_refused: Option<Stamp>,
    /// How often in a row it did not follow.
    pub stuck_count: u32,
    /// When its balloon last shrank without an order: the guest was out of memory
    /// and its driver deflated it (`deflate-on-oom`).
    #[serde(alias = "helped_itself")]
    pub deflated_on_oom: Option<Stamp>,
    /// Its balloon shrank without an order, and its guest had seemed to have enough.
    pub raised: Option<Raised>,
    /// It rebooted while it was ballooned and is not where its new kernel may start yet.
    pub reboot: Option<Reboot>,
    /// Resets, each within ten minutes of the one before, and when the last was.
    pub resets: u32,
    pub reset_at: Option<Stamp>,
    /// Its last statistics that differed from those before, when they came, and
    /// the size that goes with them.
    pub stats: Option<(Stamp, Bytes, GuestStats)>,
    /// Rates from the last two statistics.
    pub rates: Option<GuestRates>,
    /// What the guest needed lately: how much, and when last.
    pub recent: Recent,
    /// The page cache that it had lately, likewise.
    pub cached: Recent,
    /// What its guest may need beyond [`VmMemory::need`]: its balloon moved while it spoke, so
    /// its size at that moment is not known.
    pub unsure: Bytes,
    /// The number of samples in a row with the same statistics and the same balloon size.
    pub again: u32,
    pub sizes: Sizes,
    /// What is resident beyond the guest's size, which cannot be the guest's. Forgotten with a time
    /// constant of ten minutes.
    pub own_seen: Bytes,
    /// What was counted as the VMM's own.
    pub own_counted: Option<OwnMemory>,
    /// When its balloon last moved by another's order than Ebb's.
    pub strayed: Option<Stamp>,
    /// When the VM was last seen to shrink, by an order of Ebb or of another program.
    pub shrunk: Option<Stamp>,
    /// Its balloon has come to rest where the last order told it to.
    pub landed: bool,
    pub recycle: RecycleMemory,
    pub merge: VmMergeMemory,
    /// What is remembered of freeing zero pages.
    pub zeros: ZeroMemory,
    /// All that the balloon took, whether residency fell by it or the guest grew meanwhile.
    /// Older records have what it took since an order (`partial_thp`, `torn`).
    #[serde(alias = "partial_thp", alias = "torn")]
    pub inflated: Bytes,
    /// What that was when splitting its partially mapped huge pages was last ordered.
    pub inflated_split: Bytes,
    /// Size and residency a tick ago.
    #[serde(rename = "seen")]
    pub footprint: Option<Footprint>,
    /// What came back to the host, since Ebb first saw the VM.
    pub returned: Returned,
    /// It has just started and still takes what it was promised.
    pub start: Option<Start>,
    /// The facts of the guest's module, and when they last changed.
    pub facts: Option<(Stamp, u64)>,
    /// Cache that it reads again and again.
    pub hot: Hot,
    /// What in its statistics contradicts what is known.
    pub doubt: Option<Doubt>,
    /// How often lately it was short soon after it had been asked, and when.
    pub harm: u32,
    pub harm_at: Option<Stamp>,
    /// Its balloon has not moved by the last order to grow: what it was given it cannot touch.
    pub unmoved: bool,
    /// What was given last: it may be touched any moment.
    #[serde(alias = "gift")]
    pub given: Option<Given>,
    /// When an operator last asked for its idle memory.
    pub requested: Option<Stamp>,
    #[serde(alias = "reach")]
    pub contact: Contact,
    /// Whether its balloon brings the host anything.
    pub yields: Yields,
    /// Since when it is quiet.
    pub cold: Cold,
    /// How fast it follows, bytes a second, averaged over two seconds.
    pub rate: f64,
    /// How often in a row it followed at once, at most two: each time doubles its steps.
    #[serde(alias = "pace")]
    pub doublings: u32,
    /// When QEMU last told its size.
    #[serde(alias = "asked")]
    pub size_seen_at: Option<Stamp>,
    pub growth: Growth,
    pub fastest: Fastest,
    /// How late its guest's answers are: in 19 of 20 moments its statistics are younger, ms.
    pub late_ms: f64,
}

impl VmMemory {
    pub(super) fn observe(
        &mut self,
        at: Stamp,
        (dt_ms, first): (u64, bool),
        wall_s: u64,
        vm: &VmSample,
    ) {
        // What QEMU said in an earlier tick tells of no move.
        let actual = vm.balloon.as_ref().filter(|b| b.age_ms == 0).map(|b| b.actual);
        if actual.is_some() {
            self.size_seen_at = Some(at);
        }
        if vm.socket.is_some() {
            self.socket.clone_from(&vm.socket);
        }
        self.follow_start(at, first, vm);
        self.follow_facts(at, vm);
        if vm.events.contains(&VmEvent::Reset) {
            self.forget_guest(at, wall_s);
        }
        self.follow_reboot(at, wall_s, vm);
        self.follow_balloon(at, vm, actual);
        self.listen(at, dt_ms, vm);
        if let (Some(actual), Some(stats)) = (actual, self.believed_stats(at, vm)) {
            let can_be = self.weigh_stats(at, vm, &stats);
            self.take_stats(at, wall_s, actual, (stats, can_be));
            if let Some(need) = self.need().filter(|_| can_be) {
                self.recent.see(at, need);
            }
            self.cached.see(at, stats.caches.unwrap_or_default());
            // One that is paused or boots is silent for a reason.
            if vm.may_run() && !self.boots(at) {
                self.late_ms = later(self.late_ms, stats.age_ms, dt_ms);
            }
        }
        if let Some(p) = vm.process {
            let need = self.need().unwrap_or_default();
            let paged =
                vm.tasks.offload.as_ref().map_or((Bytes::ZERO, false), |o| (o.paged_out, o.busy));
            self.cold.observe(at, vm.ram.unwrap_or_default(), (need, &p), paged);
        }
        if self.harm > 0 && self.harm_at.is_none_or(|t| at.since(t) >= FORGIVE_MS) {
            (self.harm, self.harm_at) = (self.harm - 1, Some(at));
        }
        if let (Some(agent), Some(p)) = (vm.agent.as_ref(), vm.process) {
            self.recycle.observe(at, agent, p.resident());
        }
        self.follow_order(dt_ms, actual);
        self.account(at, dt_ms, vm, actual);
    }

    /// Whether Ebb has changed something of it that is to be put back: its size, or whether
    /// KSM may merge its pages.
    pub fn is_owed(&self) -> bool {
        self.ledger.owes() || self.merge.was.is_some()
    }
}
