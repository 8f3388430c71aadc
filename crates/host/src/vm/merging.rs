//! A VM's RAM opened to KSM or closed, and when its mappings are looked at for what has come
//! of that. How QEMU is told is `merge_link.rs`'s; how often is looked is decided here.

use std::time::{Duration, Instant};

use ebb_core::units::Bytes;

use super::Vm;
use crate::act::ksm_worker::Look;
use crate::qmp::Client;

/// A VM's mappings are looked at again after this, or after a thousand times as long as a
/// look takes: the kernel walks all page tables for one, 25 ms a GiB of small pages.
const LOOK_EVERY: (Duration, u32) = (Duration::from_secs(60), 1000);
/// And when this many merged pages were copied on the host since the last look at it (16 MiB).
const LOOK_COPIES: u64 = 4096;
/// But not before this, or a hundred times as long as a look takes, and not much later.
const LOOK_CALM: (Duration, u32, Duration) = (Duration::from_secs(1), 100, Duration::from_secs(30));

impl Vm {
    pub fn switch_merging(&mut self, open: bool) {
        let mut merging = std::mem::take(&mut self.merging);
        match self.usable() {
            Ok(client) => {
                merging.order(open, client);
                client.flush();
            }
            Err(_) => merging.refuse("no QMP connection".into()),
        }
        self.merging = merging;
    }

    pub fn go_on_merging(&mut self, look: Option<&Look>) {
        let client = self.client.as_mut().filter(|c| c.takes_late());
        self.merging.go_on(client, look);
        self.client.iter_mut().for_each(Client::flush);
    }

    /// Whether its mappings are to be looked at: never yet, because an order waits
    /// for it, because pages were merged or merged pages copied, or because it is time.
    /// `working`: `ksmd` is at it.
    pub fn decide_look(
        &mut self,
        look: Option<&Look>,
        copied: Option<u64>,
        merged: Option<u64>,
        working: bool,
    ) -> bool {
        let opened = self.agent.as_ref().is_some_and(|a| a.open() > Bytes::ZERO);
        let Some(look) = look else {
            (self.copied, self.opened, self.merged) = (copied, opened, merged);
            return true;
        };
        let grown = copied.zip(self.copied).map_or(0, |(now, was)| now.saturating_sub(was));
        let ordered = self.merging.waits_for_look().is_some_and(|since| look.begun < since);
        let storm = grown >= LOOK_COPIES;
        // What is lost later is lost of what was seen merged.
        let more = merged.zip(self.merged).map_or(0, |(now, was)| now.saturating_sub(was));
        // While there is more to come, when it has doubled.
        let least = if working { self.merged.unwrap_or(0) } else { 0 };
        let more = more >= LOOK_COPIES.max(least);
        // What its agent opened it says; that nothing is open any more is to be seen.
        if self.opened && !opened {
            self.closed = Some(Instant::now());
        }
        self.opened = opened;
        let closed = self.closed.is_some_and(|since| look.begun < since);
        let news = storm || more;
        let wants = ordered || closed || look_is_due(news, look.begun.elapsed(), look.took);
        if wants {
            (self.copied, self.merged) = (copied, merged);
        }
        wants
    }
}

/// Whether a new look is due, by the age of the last and the processor time that it took.
pub(super) fn look_is_due(news: bool, age: Duration, took: Duration) -> bool {
    let (least, times, most) = LOOK_CALM;
    let calm = (took * times).clamp(least, most);
    news && age >= calm || age >= (took * LOOK_EVERY.1).max(LOOK_EVERY.0)
}
