//! What an agent at work is told to do: give free pages back, open ranges to KSM, hash pages
//! for a scan.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::plan::RecycleOrder;
use ebb_core::units::Bytes;
use ebb_core::wire::{Advise, Command};

use super::{AgentLink, Ask, Stage, Waiting};
use crate::scan::agents::HashLink;

/// Nothing is given back when QEMU has not told for this time what can write to RAM, and no order
/// waits longer.
pub(super) const VERDICT_OLD: Duration = Duration::from_secs(3);

impl AgentLink {
    /// Hands over what the policy ordered; what it did shows in the counters. Memory is given back
    /// when QEMU has told what can write to RAM: [`AgentLink::order_waits`].
    pub fn order(&mut self, order: &RecycleOrder) {
        if self.stage != Stage::Attached {
            return;
        }
        self.drop_expired();
        match (order.recycle, &mut self.waiting) {
            (Some(recycle), waiting) => {
                let mark = order.mark || waiting.is_some_and(|w| w.mark);
                *waiting = Some(Waiting { since: Instant::now(), recycle, mark });
            }
            (None, Some(waiting)) => waiting.mark |= order.mark,
            (None, None) if order.mark => self.send(Ask::Other, Command::Mark),
            (None, None) => {}
        }
        self.send_waiting();
        if let Some(agent) = self.agent.as_mut() {
            agent.pump();
        }
    }

    pub fn order_waits(&self) -> bool {
        self.waiting.is_some()
    }

    fn drop_expired(&mut self) {
        self.waiting.take_if(|w| w.since.elapsed() >= VERDICT_OLD);
    }

    /// Sends it, where QEMU has told in this tick, and not long ago.
    pub(super) fn send_waiting(&mut self) {
        self.drop_expired();
        let known = self.known_now && self.known_at.is_some_and(|at| at.elapsed() < VERDICT_OLD);
        let Some(order) = self.waiting.take_if(|_| known) else { return };
        self.send(Ask::Recycle, Command::Recycle(order.recycle));
        if order.mark {
            self.send(Ask::Other, Command::Mark);
        }
        // What is held is news afterwards.
        self.held_at = None;
    }

    /// Has it open these ranges to KSM, and no others, unless it was told so last and no further
    /// scan has ended: the agent closes what the guest frees in them. Whether it was told now.
    pub fn advise(&mut self, open: &[(u64, u64)], scans: u64) -> bool {
        let same = self.told.as_ref().is_some_and(|(told, by)| told == open && *by == scans);
        if self.stage != Stage::Attached || !self.advises || self.terms.observe || same {
            return false;
        }
        self.told = Some((open.to_vec(), scans));
        for part in Advise::all(open) {
            self.send(Ask::Advise, Command::Advise(part));
        }
        if let Some(agent) = self.agent.as_mut() {
            agent.pump();
        }
        true
    }

    /// Where a scan asks it for hashes of pages, if it can do that. What it does not take
    /// on shows there.
    pub fn scanner(&mut self) -> Option<Arc<HashLink>> {
        if self.stage != Stage::Attached || !self.hashes {
            return None;
        }
        if self.scanner.as_ref().is_none_or(|s| s.failure().is_some()) {
            let (ours, theirs) = HashLink::pair(&self.segments).ok()?;
            self.send_with(Ask::Other, Command::Hashes, Some(theirs));
            self.agent.as_mut()?.pump();
            self.scanner = Some(Arc::new(ours));
        }
        self.scanner.clone()
    }

    pub fn open(&self) -> Bytes {
        self.open.unwrap_or_default()
    }

    /// Why it did not do what it was told of merging.
    pub fn refused(&self) -> Option<&String> {
        self.refused.as_ref()
    }
}
