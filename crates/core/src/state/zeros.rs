//! What is remembered of freeing a VM's zero pages: whether it brings anything.

use serde::{Deserialize, Serialize};

use crate::sample::VmSample;
use crate::task::ZeroSample;
use crate::units::{Bytes, Stamp, doubled};

/// All of a VM is looked through no more often than this; doubled each time that it
/// brought next to nothing.
const REST_MS: (u64, u64) = (60_000, 3_600_000);
/// Less than this of what was looked through is next to nothing; so is less than
/// [`LITTLE`].
const LITTLE_SHARE: f64 = 1.0 / 256.0;
const LITTLE: Bytes = Bytes::mib(4);

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ZeroMemory {
    /// Freed until a tick ago.
    pub freed: Bytes,
    /// Rounds, what they had freed and what was read when the last one ended.
    pub round: (u64, Bytes, Bytes),
    /// By how much residency fell while an order was carried out.
    pub waiting: Bytes,
    pub rest_until: Option<Stamp>,
    /// Rounds in a row that brought next to nothing.
    #[serde(rename = "lean")]
    pub fruitless: u32,
}

impl ZeroMemory {
    /// Takes in a tick in which residency fell by `fell`. Returns what of that were zeros
    /// that were freed, and what is left for other causes: while an order is carried
    /// out it is not known yet, and waits for its end.
    pub(super) fn divide(&mut self, at: Stamp, vm: &VmSample, fell: Bytes) -> (Bytes, Bytes) {
        let gained = self.observe(vm.tasks.zeros.as_ref(), at);
        self.waiting += fell;
        if vm.tasks.zeros.as_ref().is_some_and(|z| z.busy) {
            return (gained, Bytes::ZERO);
        }
        (gained, std::mem::take(&mut self.waiting) - gained)
    }

    /// Takes in a tick; returns what was freed since the last.
    fn observe(&mut self, sample: Option<&ZeroSample>, at: Stamp) -> Bytes {
        let Some(now) = sample else { return Bytes::ZERO };
        let gained = now.freed - self.freed;
        self.freed = now.freed;
        let (rounds, freed, read) = self.round;
        if now.rounds != rounds {
            let (brought, looked) = (now.freed - freed, now.read - read);
            self.round = (now.rounds, now.freed, now.read);
            let fruitless = brought < looked.share(LITTLE_SHARE).max(LITTLE);
            self.rest(at, fruitless);
        } else if now.error.is_some() && !now.busy && self.rest_until.is_none_or(|t| t <= at) {
            self.rest(at, true);
        }
        gained
    }

    fn rest(&mut self, at: Stamp, fruitless: bool) {
        self.fruitless = if fruitless { (self.fruitless + 1).min(16) } else { 0 };
        self.rest_until = Some(at.plus(doubled(REST_MS, self.fruitless)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Tasks;

    #[test]
    fn a_vm_that_brings_nothing_is_looked_through_ever_more_seldom() {
        let mut m = ZeroMemory::default();
        let mut sample = ZeroSample::default();
        let mut round = |m: &mut ZeroMemory, at: u64, brought: u64| {
            sample.rounds += 1;
            sample.read += Bytes::gib(1);
            sample.freed += Bytes::mib(brought);
            let gained = m.observe(Some(&sample), Stamp(at));
            assert_eq!(gained, Bytes::mib(brought));
            m.rest_until.unwrap().0 - at
        };
        assert_eq!(round(&mut m, 0, 100), 60_000);
        assert_eq!(round(&mut m, 100_000, 1), 120_000);
        assert_eq!(round(&mut m, 300_000, 3), 240_000);
        for n in 0..20 {
            round(&mut m, 1_000_000 + n, 0);
        }
        assert_eq!(round(&mut m, 2_000_000, 0), 3_600_000);
        assert_eq!(round(&mut m, 9_000_000, 5), 60_000);
    }

    #[test]
    fn one_that_cannot_be_looked_through_is_left_alone_as_long() {
        let mut m = ZeroMemory::default();
        let error = Some("no".to_string());
        let sample = ZeroSample { error, ..ZeroSample::default() };
        m.observe(Some(&sample), Stamp(1000));
        assert_eq!(m.rest_until, Some(Stamp(121_000)));
        m.observe(Some(&sample), Stamp(100_000));
        assert_eq!(m.rest_until, Some(Stamp(121_000)), "once for each time that it was tried");
    }

    #[test]
    fn what_fell_while_zeros_went_is_put_down_to_them_at_the_end() {
        let mut m = ZeroMemory::default();
        let mut look = |busy, freed, fell| {
            let freed = Bytes::mib(freed);
            let zeros = Some(ZeroSample { busy, freed, ..ZeroSample::default() });
            let tasks = Tasks { zeros, ..Tasks::default() };
            let vm = VmSample { tasks, ..VmSample::default() };
            let (zeros, other) = m.divide(Stamp(0), &vm, Bytes::mib(fell));
            (zeros.0 >> 20, other.0 >> 20)
        };
        assert_eq!(look(false, 0, 5), (0, 5));
        assert_eq!(look(true, 0, 60), (0, 0));
        assert_eq!(look(true, 0, 30), (0, 0));
        assert_eq!(look(false, 80, 4), (80, 14));
        assert_eq!(look(false, 80, 1), (0, 1));
    }
}
