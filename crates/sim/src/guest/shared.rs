//! What the host's kernel makes of a guest's pages beside swap: merged ones, zero pages that were
//! freed, and huge pages of which a balloon took a part.
//!
//! Merged pages are idle memory of processes, of which the host keeps one copy for all guests. To
//! write one, or to take a guest out of KSM, takes memory of the host. A merged page that its guest
//! frees is one that was never touched.

use ebb_core::units::Bytes;

use super::{Guest, seconds};
use crate::step_budget::{Room, Time};

/// Breaking merges on order, bytes a second.
const BREAK_RATE: f64 = 1e9;
const HUGE_PAGE: u64 = 2 << 20;

impl Guest {
    /// What of its memory other guests hold alike, if theirs is as large.
    pub(crate) fn alike(&self) -> Bytes {
        let idle = self.used() - self.hot_anon();
        self.spec.alike.min(self.merged + self.by_coldness()[1].min(idle - self.merged))
    }

    /// KSM merges `bytes` more, up to `most` in all.
    pub(crate) fn merge(&mut self, bytes: Bytes, most: Bytes) {
        let idle = self.by_coldness()[1];
        self.merged += bytes.min(most - self.merged).min(idle);
    }

    /// Processes have freed `bytes` of idle memory, or swapped it out: what of it was merged, and is
    /// as if it was never touched.
    pub(super) fn free_merged(&mut self, bytes: Bytes, of: Bytes) -> Bytes {
        let merged = bytes.share(self.merged.fraction_of(of)).min(self.merged);
        self.merged = self.merged - merged;
        merged
    }

    /// Writes break merges: the guest waits for the page. Those of one that was closed to KSM are
    /// broken as well.
    pub(super) fn break_merges(&mut self, dt_ms: u64, time: &mut Time, room: &mut Room) {
        let written = self.merged.min(Bytes((self.spec.rewrites * seconds(dt_ms)) as u64));
        let broken = room.take(written, time);
        self.merged = self.merged - broken;
        if broken < written {
            time.wait_in_vain(true);
        }
        // Beyond what is idle: it is touched all the time now.
        let idle = self.used() - self.hot_anon();
        let most = if self.open { idle } else { Bytes::ZERO };
        let rate = Bytes((BREAK_RATE * seconds(dt_ms)) as u64);
        // QEMU does this in the background, and no program of the guest waits.
        let broken = room.take((self.merged - most).min(rate), &mut Time::of(dt_ms));
        self.merged = self.merged - broken;
        if self.merged == Bytes::ZERO && !self.open {
            self.scans = 0;
        }
    }

    /// The balloon took these bytes that the host held: a part stays in huge pages until they are
    /// split.
    pub(super) fn leave_partial(&mut self, taken: Bytes) {
        self.partial += taken.share(self.spec.huge);
    }

    /// Partially mapped huge pages are split; returns what the host has of it.
    pub(crate) fn split(&mut self) -> Bytes {
        std::mem::take(&mut self.partial)
    }

    /// The same on Ebb's order.
    pub(crate) fn split_on_order(&mut self) {
        let freed = self.split();
        let tasks = self.tasks.partial_thp.get_or_insert_default();
        tasks.freed += freed;
        tasks.split += freed.0.div_ceil(HUGE_PAGE);
    }

    /// These bytes of it are read to find zeros, and those are freed.
    pub(crate) fn free_zeros(&mut self, read: Bytes) {
        let held = self.private();
        let read = read.min(held);
        let freed = self.zeros.min(self.held()).share(read.fraction_of(held));
        (self.stale, self.zeros) = (self.stale - freed, self.zeros - freed);
        let tasks = self.tasks.zeros.get_or_insert_default();
        (tasks.read, tasks.freed) = (tasks.read + read, tasks.freed + freed);
        tasks.chosen += freed;
        tasks.rounds = tasks.read.0 / held.0.max(1);
    }
}
