//! Where a guest's memory is, as others read it; what host and agent do to it; and how free
//! pages are made and used. Who wants them is in `programs` and `balloon`.
//!
//! A new kind of page belongs here and into the laws at the end of `tests`.

use ebb_core::units::{Bytes, PAGE};

use super::{Guest, LEAST_CACHE, SWAP_IN_RATE};
use crate::demand::Want;
use crate::misbehaviour::Misbehaviour;
use crate::step_budget::{Room, Time};

impl Guest {
    /// What its programs want now.
    pub fn wants(&self) -> Want {
        self.want
    }

    /// Memory of processes and kernel in its RAM.
    pub fn used(&self) -> Bytes {
        self.alloc - self.guest_swapped
    }

    pub fn cache(&self) -> Bytes {
        self.hot_cache + self.cold_cache
    }

    /// Free as its kernel counts.
    pub fn free(&self) -> Bytes {
        self.actual - self.used() - self.cache()
    }

    /// What it has touched and not returned.
    pub fn touched(&self) -> Bytes {
        self.used() + self.cache() + self.stale
    }

    /// What the host holds for it in DRAM.
    pub fn resident(&self) -> Bytes {
        match (self.power, self.spec.misbehaviour) {
            (false, _) => Bytes::ZERO,
            (true, Misbehaviour::Pinned) => self.spec.ram,
            (true, _) => self.private() + self.partial,
        }
    }

    /// What it maps of its own: neither swapped out nor merged.
    pub fn private(&self) -> Bytes {
        self.touched() - self.out - self.merged
    }

    /// What its process maps, as its status tells: with what is merged, and without what only lies in
    /// huge pages.
    pub fn mapped(&self) -> Bytes {
        self.resident() - self.partial + self.merged
    }

    /// Faults that had to read, as Linux counts them. A fault reads ahead eight pages.
    pub fn major_faults(&self) -> u64 {
        let mapped = (self.counts.refaults as f64 * self.spec.mapped) as u64;
        (mapped + self.counts.anon_refaults) / 8
    }

    /// Free, and the host holds it.
    pub fn held(&self) -> Bytes {
        self.stale - self.out
    }

    /// What it has and neither uses nor would miss.
    pub fn idle(&self) -> Bytes {
        self.spec.ram - self.alloc.max(self.want.anon) - self.known_files
    }

    /// What of its processes' memory is touched all the time, swapped or not.
    pub(super) fn hot_anon(&self) -> Bytes {
        self.alloc.share(self.want.hot.fraction_of(self.want.anon)).min(self.want.hot)
    }

    /// What of its RAM is touched all the time.
    pub(super) fn hot(&self) -> Bytes {
        self.hot_anon().min(self.used()) + self.hot_cache
    }

    /// Resident pages by how soon the host would swap them: stale, idle, hot.
    pub fn by_coldness(&self) -> [Bytes; 3] {
        if self.spec.misbehaviour == Misbehaviour::Pinned || !self.power {
            return [Bytes::ZERO; 3];
        }
        // One that is paused touches nothing.
        let hot = if self.paused { Bytes::ZERO } else { self.hot() };
        let idle = self.used() + self.cache() - hot - self.merged;
        let mut out = self.out;
        [self.stale, idle, hot].map(|class| {
            let gone = out.min(class);
            out = out - gone;
            class - gone
        })
    }

    /// The host swaps some of it out.
    pub fn swap_out(&mut self, bytes: Bytes) {
        let bytes = bytes.min(self.private());
        self.out += bytes;
        self.counts.host_swap_out += bytes;
    }

    /// The host pages some of it out on order. Every second VMM has a cgroup of its
    /// own, where the kernel chooses what is cold and errs in `misjudged` of it; of the
    /// others RAM is walked in turn, hot or not.
    pub fn page_out(&mut self, bytes: Bytes, misjudged: f64) {
        let [stale, idle, hot] = self.by_coldness();
        let blind = if self.index.is_multiple_of(2) { misjudged } else { 1.0 };
        let bytes = bytes.min(self.private());
        self.astray += bytes.share(blind * hot.fraction_of(stale + idle + hot)).min(hot);
        self.swap_out(bytes);
        self.paging = self.paging - bytes;
        self.counts.paged_out += bytes;
    }

    /// An order; QEMU tells the driver even where the size is the same.
    pub fn order(&mut self, to: Bytes) {
        self.target = to.min(self.spec.ram);
        self.following = true;
    }

    /// The agent returns free pages that the host holds.
    pub fn recycle(&mut self, most: Option<Bytes>, marked: bool) {
        let mut bytes = self.held().min(most.unwrap_or(Bytes(u64::MAX)));
        if marked {
            bytes = bytes.min(self.marked.unwrap_or_default());
        }
        self.stale = self.stale - bytes;
        self.counts.recycled += bytes;
        self.mark_at_most(self.held());
    }

    pub(super) fn mark_at_most(&mut self, most: Bytes) {
        self.marked = self.marked.map(|m| m.min(most));
    }

    pub(crate) fn watermark(&self) -> Bytes {
        self.spec.ram.share(1.0 / 128.0)
    }

    /// Whether it has no free memory but what its kernel keeps.
    pub fn is_full(&self) -> bool {
        self.free() <= self.watermark() + Bytes::mib(1)
    }

    /// Makes so much free, from cold cache and, if `hard`, from hot cache; tells
    /// how much is to be had.
    pub(super) fn make_free(&mut self, bytes: Bytes, hard: bool) -> Bytes {
        let lacking = |g: &Guest| bytes - (g.free() - g.watermark());
        let cold = lacking(self).min(self.cold_cache);
        self.cold_cache = self.cold_cache - cold;
        let mut dropped = cold;
        if hard {
            let hot = lacking(self).min(self.hot_cache - LEAST_CACHE);
            self.hot_cache = self.hot_cache - hot;
            dropped += hot;
        }
        // A page that was cache and is free now is still the host's.
        self.stale += dropped;
        self.counts.direct_reclaim += dropped.0 / PAGE;
        bytes.min(self.free() - self.watermark())
    }

    /// The host swaps `bytes` in again, as far as there is time and room; returns what it swapped in.
    pub(super) fn swap_in(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let bytes = bytes.min(time.at(SWAP_IN_RATE)).min(room.can_swap_in);
        let got = room.take(bytes, time);
        room.can_swap_in = room.can_swap_in - got;
        self.out = self.out - got;
        self.counts.host_swap_in += got;
        time.wait_for_host(got, SWAP_IN_RATE);
        got
    }

    /// `bytes` of what its processes have go to its own swap.
    pub(super) fn swap_out_own(&mut self, bytes: Bytes) {
        let merged = self.free_merged(bytes, self.used() - self.hot_anon());
        self.guest_swapped += bytes;
        self.stale += bytes - merged;
        self.counts.swap_out += bytes;
    }

    /// Uses so much free memory: pages the host still holds first (they were freed
    /// last), then swapped and untouched ones as they come.
    pub(super) fn touch(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        if self.spec.misbehaviour == Misbehaviour::Pinned {
            self.stale = self.stale - bytes;
            return bytes;
        }
        let held = bytes.min(self.held());
        self.zeros = self.zeros - held.share(self.zeros.fraction_of(self.held()));
        self.stale = self.stale - held;
        let rest = bytes - held;
        if rest == Bytes::ZERO {
            return held;
        }
        // All stale pages left are swapped out.
        let untouched = self.free() - held - self.stale;
        let swapped = rest.share(self.stale.fraction_of(self.stale + untouched)).min(self.stale);
        let read = self.swap_in(swapped, time, room);
        self.stale = self.stale - read;
        held + read + room.take((rest - swapped).min(untouched), time)
    }
}
