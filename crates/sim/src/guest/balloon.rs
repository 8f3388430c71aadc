//! A guest's virtio balloon: how it follows its target, what it gives back when the guest
//! is short, and free page reporting.

use ebb_core::units::Bytes;

use super::{
    DEFLATE_RATE, FRAGMENTS, GUEST_SWAP_RATE, Guest, INFLATE_RATE, REPORTING_SHARE, SWAP_IN_RATE,
    seconds,
};
use crate::misbehaviour::Misbehaviour;
use crate::step_budget::{Room, Time};

impl Guest {
    pub(super) fn follow_balloon(&mut self, at_ms: u64, dt_ms: u64, room: &mut Room) {
        if self.is_booting(at_ms) || !self.following {
            return;
        }
        if self.target == self.actual {
            self.following = false;
        } else if self.target > self.actual {
            let most = Bytes((DEFLATE_RATE * seconds(dt_ms)) as u64);
            self.actual += (self.target - self.actual).min(most);
        } else {
            let speed = self.spec.misbehaviour.speed(at_ms, self.seed);
            self.inflate(INFLATE_RATE * speed * seconds(dt_ms), dt_ms, room);
        }
    }

    /// The balloon takes free pages, cache as reclaim yields it, and idle memory as
    /// fast as it goes to guest swap; the rest it does not get.
    fn inflate(&mut self, most: f64, dt_ms: u64, room: &mut Room) {
        let step = (self.actual - self.target).min(Bytes(most as u64));
        let mut free = self.make_free(step, false);
        if free < step {
            let quarter = (step - free).min(step.share(0.25));
            free = self.make_free(free + quarter, true).max(free);
        }
        if free < step {
            let idle = (self.used() - self.hot_anon()).min(self.spec.swap - self.guest_swapped);
            let out = (step - free).min(idle).min(Bytes((GUEST_SWAP_RATE * seconds(dt_ms)) as u64));
            self.swap_out_own(out);
            free = self.make_free(free + out, false);
        }
        let mut taken = free.min(step);
        // Touched and untouched pages as they come. Distribution kernels zero each
        // page that is allocated, so those that the host has swapped are read first.
        let touched = self.stale.fraction_of(self.free());
        let swapped = self.out.min(self.stale).fraction_of(self.stale) * touched;
        let most = Bytes((SWAP_IN_RATE * seconds(dt_ms)) as u64).min(room.can_swap_in);
        if swapped > 0.0 && taken.share(swapped) > most {
            taken = Bytes((most.0 as f64 / swapped) as u64).min(taken);
        }
        let stale = taken.share(touched).min(self.stale);
        let out = taken.share(swapped).min(self.out);
        room.can_swap_in = room.can_swap_in - out;
        self.counts.host_swap_in += out;
        self.leave_partial(stale - out);
        self.stale = self.stale - stale;
        self.out = self.out - out;
        self.actual = self.actual - taken;
    }

    pub(super) fn report_free_pages(&mut self, dt_ms: u64) {
        if self.spec.reporting && self.spec.misbehaviour != Misbehaviour::Pinned {
            let kept = self.free().share(FRAGMENTS);
            let gone = (self.stale - kept).share(REPORTING_SHARE * seconds(dt_ms));
            let out = gone.share(self.out.min(self.stale).fraction_of(self.stale));
            self.stale = self.stale - gone;
            self.out = self.out - out;
        }
    }

    pub(super) fn deflate_by_itself(
        &mut self,
        bytes: Bytes,
        rate: f64,
        dt_ms: u64,
        time: &mut Time,
        room: &mut Room,
    ) -> Bytes {
        let balloon = self.spec.ram - self.actual;
        let most = Bytes((rate * seconds(dt_ms)) as u64);
        let help = bytes.min(balloon).min(most).min(time.at(rate));
        if help == Bytes::ZERO {
            return help;
        }
        self.actual += help;
        if self.shrinker {
            self.target = self.actual;
        }
        time.wait(help, rate);
        self.allocate(help, time, room, false)
    }
}
