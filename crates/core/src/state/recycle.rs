//! What the recycler remembers of one VM: how fast its guest allocates, and how much of what
//! was recycled it took back.

use serde::{Deserialize, Serialize};

use crate::model::Pressure;
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
    /// Its allocations, where they were known, and the recycled bytes a tick ago.
    pub was: Option<(Stamp, Option<Bytes>, Bytes)>,
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
    /// The last order, until it is carried out.
    pub ordered: Option<RecycleOrdered>,
    /// What such orders leave of what is free and held.
    pub left: Option<Left>,
    /// How often an order for pieces brought less than half of what was expected, less how often one
    /// did not.
    pub doubt: u32,
}

/// An order that is not carried out yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleOrdered {
    /// It goes as far as one on a host in this state.
    pub state: Pressure,
    pub expected: Bytes,
    /// The most that it is to bring.
    pub most: Option<Bytes>,
    /// What it leaves others may take: it is for whole blocks only, or for as much as an operator
    /// wants.
    pub part: bool,
}

/// What an order has left: pieces that are too small, and what the guest keeps as slack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Left {
    /// One on a host in this state, or a better one, leaves as much.
    pub state: Pressure,
    pub bytes: Bytes,
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
/// The most halvings of what is expected of an order.
const DOUBT_MOST: u32 = 16;
/// An order that brought all but this of its most has ended for that: blocks are not cut.
const ENOUGH: Bytes = Bytes::mib(2);
/// One that brought this much may have ended for want of time.
const MUCH: Bytes = Bytes::mib(16);

impl RecycleMemory {
    pub(super) fn observe(&mut self, at: Stamp, agent: &AgentSample, resident: Bytes) {
        let allocated = agent.allocated;
        let recycled = agent.counters.recycled;
        if agent.state != AgentState::Ready {
            (self.marked, self.whole) = (None, None);
            (self.ordered, self.left) = (None, None);
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
            // The first word is all that it has allocated since its boot.
            if let (Some(now), Some(was)) = (allocated, was_allocated) {
                let rate = (now - was).0 as f64 / seconds;
                self.alloc_rate = self.alloc_rate * (1.0 - weight) + rate * weight;
            }
            let more = recycled - was_recycled;
            self.count_back(seconds, more, resident);
            self.watch(at, more, resident);
            if let (Some(whole), Some(free)) = (self.whole.as_mut(), agent.free) {
                whole.free = whole.free.min(free);
                whole.brought += more;
            }
            self.see_left(more, agent);
        }
        self.resident = resident;
    }

    /// Takes in what the last order brought, and what is held now.
    fn see_left(&mut self, brought: Bytes, agent: &AgentSample) {
        let held = agent.held.unwrap_or_default();
        let Some(ordered) = self.ordered.take() else {
            self.left.iter_mut().for_each(|left| left.bytes = left.bytes.min(held));
            return;
        };
        if ordered.part {
            return;
        }
        let enough = ordered.most.is_some_and(|most| brought + ENOUGH >= most);
        let late = agent.more && brought >= MUCH && !enough;
        if !late {
            self.left = Some(Left { state: ordered.state, bytes: held });
        }
        if brought < ordered.expected.share(0.5) {
            self.doubt = (self.doubt + 1).min(DOUBT_MOST);
        } else if brought > Bytes::ZERO {
            self.doubt = self.doubt.saturating_sub(1);
        }
    }

    /// What an order on a host in this state is likely to bring, if the guest's map shows `held` as
    /// free and held: less what such orders have left, and halved for each doubt.
    pub fn to_come(&self, state: Pressure, held: Bytes) -> Bytes {
        let left = self.left.filter(|left| state <= left.state).map_or(Bytes::ZERO, |l| l.bytes);
        Bytes((held - left).0 >> self.doubt.min(DOUBT_MOST))
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
        let counters = Counters { recycled: Bytes::mib(recycled), ..Counters::default() };
        let agent = AgentSample { counters, busy, ..AgentSample::ready(0) };
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

    #[test]
    fn what_was_allocated_before_the_first_word_of_it_is_no_rate() {
        let mut m = RecycleMemory::default();
        let mut see = |at_s: u64, allocated: Option<u64>| {
            let allocated = allocated.map(Bytes::mib);
            let agent = AgentSample { allocated, ..AgentSample::ready(0) };
            m.observe(Stamp(at_s * 1000), &agent, Bytes::mib(100));
            m.alloc_rate as u64 >> 20
        };
        // The module is queried for its facts a tick after its map was found.
        assert_eq!([see(1, None), see(2, Some(500_000)), see(3, Some(500_010))], [0, 0, 5]);
        assert_eq!([see(4, None), see(5, Some(500_030)), see(6, Some(500_030))], [5, 5, 2]);
    }

    /// An order that brought `brought` MiB, after which `held` MiB are free and held.
    fn order(m: &mut RecycleMemory, state: Pressure, part: bool, (brought, held): (u64, u64)) {
        let order = RecycleOrdered { state, part, ..RecycleOrdered::default() };
        carried_out(m, order, (brought, held), false);
    }

    /// The same; `more`: the agent did not come to the end of its map.
    fn carried_out(
        m: &mut RecycleMemory,
        order: RecycleOrdered,
        (brought, held): (u64, u64),
        more: bool,
    ) {
        let (at, allocated, recycled) = m.was.unwrap_or_default();
        let (at, recycled) = (at.plus(1000), recycled + Bytes::mib(brought));
        m.was.get_or_insert((at, allocated, Bytes::ZERO));
        let expected = m.to_come(order.state, Bytes::mib(1000));
        m.ordered = Some(RecycleOrdered { expected, ..order });
        let counters = Counters { recycled, ..Counters::default() };
        let agent = AgentSample { counters, more, ..AgentSample::ready(held) };
        m.observe(at, &agent, Bytes::gib(2));
    }

    #[test]
    fn what_orders_leave_is_not_expected_of_the_next_unless_that_goes_further() {
        let mut m = RecycleMemory::default();
        let to_come = |m: &RecycleMemory, state| m.to_come(state, Bytes::mib(1000)).0 >> 20;
        assert_eq!(to_come(&m, Pressure::Soft), 1000);
        order(&mut m, Pressure::Soft, true, (500, 1000));
        assert_eq!(to_come(&m, Pressure::Soft), 1000, "pieces are not tried yet");
        order(&mut m, Pressure::Soft, false, (600, 400));
        assert_eq!([Pressure::Clear, Pressure::Soft].map(|s| to_come(&m, s)), [600; 2]);
        assert_eq!([Pressure::Hard, Pressure::Critical].map(|s| to_come(&m, s)), [1000; 2]);
        // The guest has used a part of it since.
        m.observe(Stamp(9000), &AgentSample::ready(100), Bytes::gib(2));
        assert_eq!(to_come(&m, Pressure::Soft), 900);
        m.observe(Stamp(9100), &AgentSample::default(), Bytes::gib(2));
        assert_eq!(to_come(&m, Pressure::Soft), 1000, "another map");
    }

    #[test]
    fn what_an_order_had_no_time_for_comes_of_the_next() {
        let left = |most: Option<u64>, brought, more| {
            let mut m = RecycleMemory::default();
            let most = most.map(Bytes::mib);
            let order = RecycleOrdered { most, ..RecycleOrdered::default() };
            carried_out(&mut m, order, (brought, 1000 - brought), more);
            m.left.map(|left| left.bytes.0 >> 20)
        };
        assert_eq!((left(None, 300, true), left(Some(900), 300, true)), (None, None));
        assert_eq!(left(None, 300, false), Some(700), "it has seen all of the map");
        let wanted = left(Some(301), 300, true);
        assert_eq!(wanted, Some(700), "as much as was wanted: the rest is slack");
        assert_eq!(left(None, 3, true), Some(997), "no time was lacking for so little");
    }

    #[test]
    fn a_guest_whose_map_promises_more_than_comes_is_believed_ever_less() {
        let mut m = RecycleMemory::default();
        let mut expected = Vec::new();
        for _ in 0..12 {
            expected.push(m.to_come(Pressure::Critical, Bytes::mib(1000)).0 >> 20);
            // It calls its pages free again once they were looked at.
            order(&mut m, Pressure::Critical, false, (0, 0));
        }
        assert_eq!((&expected[..3], expected[11]), (&[1000, 500, 250][..], 0));
        for _ in 0..12 {
            let half = m.to_come(Pressure::Critical, Bytes::mib(1000)).0 >> 20;
            order(&mut m, Pressure::Critical, false, (half / 2 + 1, 0));
        }
        assert_eq!(m.to_come(Pressure::Critical, Bytes::mib(1000)), Bytes::mib(1000));
    }
}
