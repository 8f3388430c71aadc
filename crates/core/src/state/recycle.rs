//! What the recycler remembers of one VM: how fast its guest allocates, and how much of what
//! was recycled it took back.

use serde::{Deserialize, Serialize};

use crate::sample::AgentSample;
use crate::units::{Bytes, Stamp};
use crate::wire::AgentState;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecycleMemory {
    /// When the agent was last ordered to remember free pages. It does so after what was ordered
    /// before, up to three seconds later.
    pub marked: Option<Stamp>,
    /// Bytes a second that the guest allocates, averaged over two seconds: a quarter of
    /// how long pages must have been free, so that a burst that is over does not hold
    /// back what it freed.
    pub alloc_rate: f64,
    /// Its allocations and the recycled bytes a tick ago.
    pub was: Option<(Stamp, Bytes, Bytes)>,
    /// How often slack was doubled because recycled memory was taken back.
    pub backoff: u32,
    /// What was recycled since `since`, and what residency was after it.
    pub batch: Option<Batch>,
    /// The last order for whole blocks.
    pub whole: Option<Whole>,
    /// Recycled, and not taken back yet.
    pub away: Bytes,
    /// Bytes a second that the guest takes back of what was recycled, averaged over
    /// `BACK_S`.
    pub back_rate: f64,
    /// What was resident a tick ago.
    pub resident: Bytes,
}

/// An order for whole blocks, and what became free since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Whole {
    pub at: Stamp,
    /// The least that was free in the guest since then: what is free beyond it was freed later.
    pub free: Bytes,
    /// What it brought; one that brought a block is followed by another.
    pub brought: Bytes,
}

impl Whole {
    /// An order to take at most `most` (`None`: all) of what was freed since the one before.
    /// What it leaves counts as freed later.
    pub fn ordered(was: Option<Whole>, at: Stamp, free: Bytes, most: Option<Bytes>) -> Whole {
        let freed = Whole::freed(was, free);
        let left = most.map_or(Bytes::ZERO, |most| freed - most);
        Whole { at, free: free - left, brought: Bytes::ZERO }
    }

    /// What became free since the last order; all that is free where there was none.
    pub fn freed(was: Option<Whole>, free: Bytes) -> Bytes {
        free - was.map_or(Bytes::ZERO, |w| w.free)
    }
}

/// A spell of recycling that is watched for what comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    pub at: Stamp,
    pub bytes: Bytes,
    /// The lowest residency since.
    pub low: Bytes,
}

/// Recycled memory that is back within this time was recycled in vain.
const REFAULT_MS: u64 = 5_000;
/// From this share of it on, more slack is left.
const REFAULT_SHARE: f64 = 0.3;
/// Seconds over which the rate of what comes back is averaged.
const BACK_S: f64 = 10.0;

impl RecycleMemory {
    pub(super) fn observe(&mut self, at: Stamp, agent: &AgentSample, resident: Bytes) {
        let allocated = agent.allocated.unwrap_or_default();
        let recycled = agent.counters.recycled;
        if agent.state != AgentState::Ready {
            (self.marked, self.whole) = (None, None);
        }
        if agent.busy {
            // What its work brought is not counted yet.
            return;
        }
        if let Some((was_at, was_allocated, was_recycled)) =
            self.was.replace((at, allocated, recycled))
        {
            let seconds = (at.since(was_at) as f64 / 1000.0).max(0.001);
            let weight = (seconds / 2.0).min(1.0);
            let rate = (allocated - was_allocated).0 as f64 / seconds;
            self.alloc_rate = self.alloc_rate * (1.0 - weight) + rate * weight;
            let more = recycled - was_recycled;
            self.count_back(seconds, more, resident);
            self.watch(at, more, resident);
            if let (Some(whole), Some(free)) = (self.whole.as_mut(), agent.free) {
                whole.free = whole.free.min(free);
                whole.brought += more;
            }
        }
        self.resident = resident;
    }

    /// What was faulted in is what residency grew by and what was recycled meanwhile. As much
    /// of it as was recycled before would not have cost the guest a fault otherwise.
    fn count_back(&mut self, seconds: f64, recycled: Bytes, resident: Bytes) {
        let taken = (resident + recycled) - self.resident;
        self.away += recycled;
        let back = taken.min(self.away);
        self.away = self.away - back;
        let weight = (seconds / BACK_S).min(1.0);
        self.back_rate = self.back_rate * (1.0 - weight) + back.0 as f64 / seconds * weight;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Counters;

    fn look(m: &mut RecycleMemory, at_s: u64, resident: u64, recycled: u64, busy: bool) {
        let agent = AgentSample {
            state: AgentState::Ready,
            counters: Counters { recycled: Bytes::mib(recycled), ..Counters::default() },
            busy,
            ..AgentSample::default()
        };
        m.observe(Stamp(at_s * 1000), &agent, Bytes::mib(resident));
    }

    #[test]
    fn what_a_guest_takes_back_counts_and_what_it_takes_anew_does_not() {
        let mut m = RecycleMemory::default();
        look(&mut m, 1, 100, 0, false);
        look(&mut m, 2, 400, 0, false);
        assert_eq!((m.back_rate, m.away), (0.0, Bytes::ZERO), "nothing was recycled before");
        look(&mut m, 3, 100, 300, false);
        assert_eq!((m.back_rate, m.away), (0.0, Bytes::mib(300)));
        look(&mut m, 4, 300, 300, false);
        assert_eq!((m.back_rate as u64 >> 20, m.away), (20, Bytes::mib(100)));
        look(&mut m, 5, 700, 300, false);
        assert_eq!((m.back_rate as u64 >> 20, m.away), (28, Bytes::ZERO));
    }

    #[test]
    fn what_is_recycled_and_taken_back_within_a_tick_counts_too() {
        let mut m = RecycleMemory::default();
        look(&mut m, 1, 400, 0, false);
        for s in 2..40 {
            look(&mut m, s, 400, 200 * (s - 1), false);
        }
        assert!((180 << 20..=200 << 20).contains(&(m.back_rate as u64)), "{}", m.back_rate);
    }

    #[test]
    fn what_an_order_leaves_counts_as_freed_later() {
        let mib = Bytes::mib;
        let first = Whole::ordered(None, Stamp(1), mib(400), Some(mib(300)));
        assert_eq!(Whole::freed(Some(first), mib(420)), mib(120));
        let all = Whole::ordered(Some(first), Stamp(2), mib(420), None);
        assert_eq!(Whole::freed(Some(all), mib(420)), Bytes::ZERO);
    }

    #[test]
    fn an_agent_at_work_is_counted_when_it_has_done() {
        let mut m = RecycleMemory::default();
        look(&mut m, 1, 400, 0, false);
        // Residency is read in the middle of its work, its counters are from before.
        look(&mut m, 2, 200, 0, true);
        look(&mut m, 3, 100, 300, false);
        assert_eq!((m.back_rate, m.away), (0.0, Bytes::mib(300)));
    }
}
