//! How quiet a VM is, and what it read back of what was paged out: for paging out.

use serde::{Deserialize, Serialize};

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
    /// Read back since it was last paged out, and paged out before.
    pub back: Bytes,
    pub out: Bytes,
    /// Not paged out until then, because it read back what was.
    pub back_until: Option<Stamp>,
    pub count: u32,
}

impl Cold {
    /// `need` as far as it is known; `held` in DRAM and swap. While an order is `busy`,
    /// what left and what came back cannot be told apart.
    pub(super) fn observe(
        &mut self,
        at: Stamp,
        ram: Bytes,
        (need, held, swap): (Bytes, Bytes, Bytes),
        (paged_out, busy): (Bytes, bool),
    ) {
        let far = |a: Bytes, b: Bytes| a.abs_diff(b) > ram.share(QUIET_SHARE).max(Bytes::mib(4));
        let out = paged_out - self.paged_out;
        self.out += out;
        self.swap += out;
        self.paged_out = paged_out;
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
}
