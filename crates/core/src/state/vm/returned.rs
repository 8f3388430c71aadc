//! What came back to the host of a VM, by what took it, and what its VMM holds itself.
//!
//! A new mechanism that frees memory takes its part here, the surest first; what is left
//! counts as free page reporting's, or as other.

use serde::{Deserialize, Serialize};

use super::VmMemory;
use crate::sample::VmSample;
use crate::task::StageName;
use crate::units::{Bytes, Stamp};

/// See [`VmMemory::own_seen`].
const OWN_LIFE_MS: f64 = 600_000.0;

/// Size and residency at a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Footprint {
    /// Balloon size (RAM less balloon).
    pub actual: Option<Bytes>,
    pub resident: Bytes,
    pub swap: Bytes,
    /// Recycled by the agent so far.
    pub recycled: Bytes,
    /// RAM; older records do not tell.
    pub ram: Option<Bytes>,
    /// By how much residency fell while the agent was at work: what of that it recycled is not
    /// counted yet.
    pub waiting: Bytes,
    /// What the host held, also in swap, when QEMU last told the size.
    pub held: Option<Bytes>,
}

/// Bytes that left a VM's residency, by what took them. A lower bound: growth in
/// the same tick hides a release. The host's own free memory is the proof, these
/// only divide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Returned {
    /// The balloon was inflated meanwhile.
    pub balloon: Bytes,
    /// Went to swap.
    pub swap: Bytes,
    /// Zero pages that were freed on order.
    pub zeros: Bytes,
    /// The agent recycled it, page by page, as it counts itself.
    pub recycled: Bytes,
    /// Neither, and the guest has free page reporting.
    pub reporting: Bytes,
    /// Neither, and it has not (the VMM itself shrank, KSM, another tool).
    pub other: Bytes,
    /// The reverse: deflated for the guest to use again.
    pub given_back: Bytes,
}

impl VmMemory {
    /// What a stage has brought of it so far. What merging brought is told by scans.
    pub(in crate::state) fn came(&self, stage: StageName) -> Bytes {
        match stage {
            StageName::Recycle => self.returned.recycled,
            StageName::Zeros => self.returned.zeros,
            StageName::Balloon => self.returned.balloon,
            StageName::Offload => self.cold.paged_out,
            StageName::Merge | StageName::Protect => Bytes::ZERO,
        }
    }

    /// What the host holds for its VMM itself, at least.
    pub fn own(&self) -> Bytes {
        self.own_counted.map_or(Bytes::ZERO, |own| own.resident).max(self.own_seen)
    }

    pub(super) fn account(&mut self, at: Stamp, dt_ms: u64, vm: &VmSample, actual: Option<Bytes>) {
        let Some(p) = vm.process else { return };
        // Where QEMU does not tell the size, or tells that of the kernel before, the guest may have
        // more.
        let size = self.sizes.most().filter(|_| actual.is_some() && !self.boots(at));
        let beyond = size.map_or(Bytes::ZERO, |size| p.resident() - size);
        let left = 1.0 - (dt_ms as f64 / OWN_LIFE_MS).min(1.0);
        let seen = beyond.max(self.own_seen.share(left));
        // What is resident beyond its size is what its balloon has, and does not bring.
        let is_pinned = vm.pinned.is_some() && p.own.is_some();
        self.own_seen = if is_pinned { Bytes::ZERO } else { seen };
        self.own_counted = p.own;
        let recycled = vm.agent.as_ref().map(|a| a.counters.recycled).unwrap_or_default();
        let works = vm.agent.as_ref().is_some_and(|a| a.busy);
        let held = actual.map(|_| p.resident() + p.swap).or(self.footprint.and_then(|s| s.held));
        let actual = actual.or(self.footprint.and_then(|s| s.actual));
        let (ram, resident, swap) = (vm.ram, p.resident(), p.swap);
        let now = Footprint { actual, resident, swap, recycled, ram, waiting: Bytes::ZERO, held };
        if let Some(was) = self.footprint.replace(now) {
            // What is plugged in or out moves the size, and the balloon not.
            let plugged = was.ram.is_some_and(|was| ram.is_some_and(|ram| ram != was));
            let moved = was.actual.zip(now.actual).filter(|_| !plugged);
            let moved = moved.map(|(was, now)| (was - now, now - was));
            let (inflated, deflated) = moved.unwrap_or_default();
            self.inflated += inflated;
            self.returned.given_back += deflated;
            // Only what was resident can come; by orders of others nothing is judged.
            let held = (was.resident - self.own()).min(was.actual.unwrap_or_default());
            let free = was.actual.unwrap_or_default() - held;
            let grew = inflated - free;
            let fell = was.resident - now.resident;
            self.yields.observe(at, vm.ram.unwrap_or_default(), grew, fell);
            let (zeros, fell) = self.zeros.divide(at, vm, fell);
            self.returned.zeros += zeros;
            let mut left = fell;
            self.returned.swap += part(&mut left, now.swap - was.swap);
            left += was.waiting;
            if works {
                self.footprint.iter_mut().for_each(|f| f.waiting = left);
                return;
            }
            self.returned.recycled += part(&mut left, now.recycled - was.recycled);
            self.returned.balloon += part(&mut left, inflated);
            if vm.balloon.as_ref().and_then(|b| b.reporting) == Some(true) {
                self.returned.reporting += left;
            } else {
                self.returned.other += left;
            }
        }
    }
}

/// Takes `most` off `left`, or all of `left` if that is less; returns what was taken.
fn part(left: &mut Bytes, most: Bytes) -> Bytes {
    let took = most.min(*left);
    *left = *left - took;
    took
}
