//! What the recycler remembers of one VM: how fast its guest allocates, and whether what was
//! recycled came back soon.

use serde::{Deserialize, Serialize};

use crate::sample::AgentSample;
use crate::units::{Bytes, Stamp};
use crate::wire::AgentState;

/// What the recycler remembers of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleMemory {
    /// When free pages were last remembered by the agent.
    pub marked: Option<Stamp>,
    /// The guest allocates so many bytes a second, averaged over two seconds: a
    /// quarter of what pages must have been free, so that one burst that is over
    /// does not hold back what it freed.
    pub alloc_rate: f64,
    /// Its allocations and the recycled bytes a tick ago.
    pub was: Option<(Stamp, Bytes, Bytes)>,
    /// How often slack was doubled because recycled memory was taken back.
    pub backoff: u32,
    /// What was recycled since `since`, and what residency was after it.
    pub batch: Option<Batch>,
}

/// A spell of recycling that is watched for what comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// When it began.
    pub at: Stamp,
    /// Recycled in it.
    pub bytes: Bytes,
    /// The lowest residency since.
    pub low: Bytes,
}

/// Recycled memory that is back within this time was recycled in vain.
const REFAULT_MS: u64 = 5_000;
/// From this share of it on, more slack is left.
const REFAULT_SHARE: f64 = 0.3;

impl RecycleMemory {
    pub(super) fn observe(&mut self, at: Stamp, agent: &AgentSample, resident: Bytes) {
        let allocated = agent.allocated.unwrap_or_default();
        let recycled = agent.counters.recycled;
        if agent.state != AgentState::Ready {
            self.marked = None;
        }
        if let Some((was_at, was_allocated, was_recycled)) =
            self.was.replace((at, allocated, recycled))
        {
            let seconds = (at.since(was_at) as f64 / 1000.0).max(0.001);
            let weight = (seconds / 2.0).min(1.0);
            let rate = (allocated - was_allocated).0 as f64 / seconds;
            self.alloc_rate = self.alloc_rate * (1.0 - weight) + rate * weight;
            self.watch(at, recycled - was_recycled, resident);
        }
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
