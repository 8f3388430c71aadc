//! What a guest's programs do in a step: give back, touch, read files, allocate, and die
//! where memory stays away.
//!
//! The order in which a guest helps itself ([`Guest::grow`]) is here.

use ebb_core::units::{Bytes, PAGE};

use super::{
    DISK_RATE, FREE_RATE, GUEST_SWAP_RATE, Guest, OOM_AFTER_MS, RESTART_MS, SELF_HELP_RATE,
    SHRINKER_RATE, seconds,
};
use crate::misbehaviour::Misbehaviour;
use crate::step_budget::{Room, Time};

impl Guest {
    /// What programs no longer want becomes free; what the host holds of it is stale.
    pub(super) fn release(&mut self, dt_ms: u64) {
        let drop = (self.alloc - self.want.anon).min(Bytes((FREE_RATE * seconds(dt_ms)) as u64));
        if drop > Bytes::ZERO {
            let swapped =
                drop.share(self.guest_swapped.fraction_of(self.alloc)).min(self.guest_swapped);
            self.guest_swapped = self.guest_swapped - swapped;
            let merged = self.free_merged(drop - swapped, self.used());
            self.alloc = self.alloc - drop;
            let freed = drop - swapped - merged;
            self.stale += freed;
            self.zeros += freed.share(self.spec.zeros);
        }
        let forgotten = self.known_files - self.want.files;
        self.known_files = self.known_files - forgotten;
        let cooled = self.hot_cache - self.known_files;
        self.hot_cache = self.hot_cache - cooled;
        self.cold_cache += cooled;
    }

    /// Hot pages that are swapped out come back in, on the host and in the guest.
    pub(super) fn touch_hot(&mut self, time: &mut Time, room: &mut Room) {
        let idle = self.touched() - self.merged - self.hot();
        self.astray = self.astray.min(self.out).min(self.hot());
        let missing = (self.out - idle).max(self.astray);
        if missing > Bytes::ZERO && self.spec.misbehaviour != Misbehaviour::Pinned {
            let got = self.swap_in(missing, time, room);
            self.astray = self.astray - got;
            if got < missing {
                time.wait_in_vain(true);
            }
        }
        let missing = self.guest_swapped - (self.alloc - self.hot_anon());
        if missing > Bytes::ZERO {
            let free = self.make_free(missing.min(time.at(GUEST_SWAP_RATE)), true);
            let got = self.touch(free, time, room);
            self.guest_swapped = self.guest_swapped - got;
            self.counts.swap_in += got;
            self.counts.anon_refaults += got.0 / PAGE;
            time.wait(got, GUEST_SWAP_RATE);
            if got < missing {
                // It swaps hot pages against hot pages.
                let thrashed = time.at(GUEST_SWAP_RATE / 2.0);
                self.counts.swap_in += thrashed;
                self.counts.swap_out += thrashed;
                self.counts.anon_refaults += thrashed.0 / PAGE;
                time.wait_in_vain(false);
            }
        }
    }

    /// Hot files that were dropped are read again; that is waited for. Files new to
    /// it are read as well, which is work.
    pub(super) fn read_hot_files(&mut self, time: &mut Time, room: &mut Room) {
        let missing = self.known_files - self.hot_cache;
        if missing > Bytes::ZERO {
            let wanted = missing.min(time.at(DISK_RATE));
            let first = self.cache_more(wanted, time, room);
            self.hot_cache += first;
            let second = self.trade_idle_for_cache(wanted - first, time, room);
            self.hot_cache += second;
            let got = first + second;
            time.wait(got, DISK_RATE);
            // Reads of what does not fit go to the disk each time.
            let before = time.spent();
            time.wait_share((missing - got).fraction_of(self.known_files));
            let again = Bytes((DISK_RATE * (time.spent() - before) / 1000.0) as u64);
            self.counts.refaults += (got + again).0 / PAGE;
        }
        let new = (self.want.files - self.known_files).min(time.at(DISK_RATE));
        let got = self.cache_more(new, time, room);
        self.hot_cache += got;
        self.known_files += got;
    }

    fn cache_more(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let free = self.make_free(bytes, false);
        self.touch(free, time, room)
    }

    /// Reclaim weighs cache that is missed against idle memory: that goes to swap.
    fn trade_idle_for_cache(&mut self, most: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let idle = self.used() - self.hot_anon();
        let left = (self.spec.swap - self.guest_swapped).min(idle);
        let out = most.min(left).min(time.at(GUEST_SWAP_RATE));
        self.swap_out_own(out);
        self.cache_more(out, time, room)
    }

    /// Files read once: into free memory while there is some.
    pub(super) fn read_once(&mut self, time: &mut Time, room: &mut Room) {
        let spare = self.free() - self.watermark();
        let bytes = time.at(self.spec.need.stream).min(spare);
        let got = self.touch(bytes, time, room);
        self.cold_cache += got;
    }

    /// Programs allocate.
    pub(super) fn grow(&mut self, dt_ms: u64, time: &mut Time, room: &mut Room) {
        let want = (self.want.anon - self.alloc).min(time.at(self.spec.need.rate));
        if want == Bytes::ZERO {
            return;
        }
        let mut got = self.allocate(want, time, room, false);
        if got < want {
            got += self.allocate(want - got, time, room, true);
        }
        // One that has free memory waits for the host alone: its kernel misses nothing.
        let lacks = self.is_full();
        if got < want && lacks {
            self.counts.alloc_stalls += 1;
            got += self.swap_for_room(want - got, time, room);
        }
        if got < want && lacks && self.shrinker {
            got += self.deflate_by_itself(want - got, SHRINKER_RATE, dt_ms, time, room);
        }
        if got < want && lacks && self.spec.deflate_on_oom {
            got += self.deflate_by_itself(want - got, SELF_HELP_RATE, dt_ms, time, room);
        }
        if got < want {
            time.wait_in_vain(room.refused > Bytes::ZERO);
        }
        // Waiting for the host is not running out.
        let in_vain = got == Bytes::ZERO && room.refused == Bytes::ZERO;
        self.in_vain_ms = if in_vain { self.in_vain_ms + dt_ms } else { 0 };
    }

    pub(super) fn allocate(
        &mut self,
        bytes: Bytes,
        time: &mut Time,
        room: &mut Room,
        hard: bool,
    ) -> Bytes {
        let free = self.make_free(bytes, hard);
        let got = self.touch(free, time, room);
        self.alloc += got;
        self.counts.allocated += got;
        got
    }

    /// Pushes idle memory, then hot memory, out to the guest's own swap.
    fn swap_for_room(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let left = (self.spec.swap - self.guest_swapped).min(self.used());
        let out = bytes.min(left).min(time.at(GUEST_SWAP_RATE));
        self.swap_out_own(out);
        time.wait(out, GUEST_SWAP_RATE);
        self.allocate(out, time, room, false)
    }

    pub(super) fn give_up_if_in_vain(&mut self, at_ms: u64) {
        if self.in_vain_ms < OOM_AFTER_MS {
            return;
        }
        self.in_vain_ms = 0;
        self.counts.kills += 1;
        self.kill(at_ms);
    }

    /// The largest process dies: half of what is allocated, back after a while.
    pub fn kill(&mut self, at_ms: u64) {
        self.counts.ooms += 1;
        self.held_down_until = at_ms + RESTART_MS;
        self.held_down_to = self.alloc.share(0.5);
    }
}
