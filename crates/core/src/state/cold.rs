//! How quiet a VM is, and what it read back of what was paged out: for paging out.

use serde::{Deserialize, Serialize};

use crate::sample::ProcessMemory;
use crate::units::{Bytes, Stamp};

/// Need or residency that moves by more than this share of RAM is work.
const QUIET_SHARE: f64 = 0.01;
/// A VM that has read back this share of what was paged out is left alone.
const READ_BACK: f64 = 0.2;
/// How long, at first; doubled each time.
const READ_BACK_MS: u64 = 300_000;

/// How quiet a VM is: for paging out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cold {
    /// Since when need and residency stand still and nothing is read from swap.
    pub since: Stamp,
    /// Need and all that the host holds, where it stood still.
    pub mark: (Bytes, Bytes),
    /// What would be in the host's swap if nothing had been read back since the last look.
    pub swap: Bytes,
    /// What was paged out on order a tick ago, as the host counts it.
    pub paged_out: Bytes,
    /// Shared memory that was resident when no order was under way. In swap it is in no process's
    /// count: what was paged out since, and what was paged out and has not come back.
    pub shared: Bytes,
    pub going: Bytes,
    pub away: Bytes,
    /// Read back since it was last paged out, and paged out before.
    pub back: Bytes,
    pub out: Bytes,
    /// Not paged out until then, because it read back what was.
    pub back_until: Option<Stamp>,
    pub count: u32,
}

impl Cold {
    /// `need` as far as it is known. While an order is `busy`, what left and what came back cannot
    /// be told apart.
    pub(super) fn observe(
        &mut self,
        at: Stamp,
        ram: Bytes,
        (need, process): (Bytes, &ProcessMemory),
        (paged_out, busy): (Bytes, bool),
    ) {
        let far = |a: Bytes, b: Bytes| a.abs_diff(b) > ram.share(QUIET_SHARE).max(Bytes::mib(4));
        let out = paged_out - self.paged_out;
        self.out += out;
        self.swap += out;
        self.paged_out = paged_out;
        self.going += out;
        if !busy {
            self.follow_shared(process);
        }
        let swap = process.swap + self.away;
        let held = process.resident() + swap;
        let mut back = Bytes::ZERO;
        if !busy {
            back = self.swap - swap;
            self.back += back;
            self.swap = swap;
        }
        if far(self.mark.0, need) || far(self.mark.1, held) || back > Bytes::mib(4) {
            (self.since, self.mark) = (at, (need, held));
        }
        let much = self.out.share(READ_BACK).max(Bytes::mib(8));
        if self.out > Bytes::ZERO && self.back > much {
            let pause = READ_BACK_MS << self.count.min(6);
            self.back_until = Some(at.plus(pause));
            self.count = (self.count + 1).min(16);
            (self.out, self.back) = (Bytes::ZERO, Bytes::ZERO);
        }
    }

    fn follow_shared(&mut self, process: &ProcessMemory) {
        let (was, gone) = (self.shared, std::mem::take(&mut self.going));
        self.shared = process.shmem;
        if process.is_shared() || self.away > Bytes::ZERO {
            self.away = (self.away + gone) - (self.shared - was);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM of 1 GiB that holds so much in memory, of which so much is in swap by its process's
    /// count; and so much was paged out on order in all. All in MiB.
    fn see(c: &mut Cold, s: u64, (anon, shmem, swap): (u64, u64, u64), out: u64) {
        let [anon, shmem, swap, out] = [anon, shmem, swap, out].map(Bytes::mib);
        let process = ProcessMemory { anon, shmem, swap, ..ProcessMemory::default() };
        c.observe(Stamp(s * 1000), Bytes::gib(1), (Bytes::mib(100), &process), (out, false));
    }

    #[test]
    fn shared_memory_that_was_paged_out_is_away_until_it_comes_back() {
        let mut c = Cold::default();
        see(&mut c, 1, (30, 800, 0), 0);
        see(&mut c, 200, (30, 800, 0), 0);
        let quiet = c.since;
        see(&mut c, 201, (30, 500, 0), 300);
        assert_eq!((c.away, c.back, c.back_until), (Bytes::mib(300), Bytes::ZERO, None));
        assert_eq!(c.since, quiet, "it is as quiet as before");
        see(&mut c, 202, (30, 200, 0), 600);
        assert_eq!((c.away, c.since), (Bytes::mib(600), quiet));
        see(&mut c, 203, (30, 400, 0), 600);
        assert_eq!((c.away, c.since), (Bytes::mib(400), Stamp(203_000)), "read back");
        assert!(c.back_until.is_some(), "a third of it");
    }

    #[test]
    fn private_memory_is_in_swap_by_its_process_s_count() {
        let mut c = Cold::default();
        see(&mut c, 1, (800, 9, 0), 0);
        see(&mut c, 200, (500, 5, 300), 300);
        assert_eq!((c.away, c.back), (Bytes::ZERO, Bytes::ZERO));
        see(&mut c, 201, (600, 9, 200), 300);
        assert_eq!((c.away, c.back_until.is_some()), (Bytes::ZERO, true));
    }
}
