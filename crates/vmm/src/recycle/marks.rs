//! Which pages have been free since the last mark.
//!
//! A mark copies the map. Between two marks the agent looks at the map again each time that it is
//! awake, and forgets what is in use. So a guest that takes and frees the same pages all the time
//! keeps them, if it has them at one of the looks.

use std::time::{Duration, Instant};

use ebb_core::wire::abi::MapPage;

use super::cpu_ns;
use crate::ram::{Bits, Ram};

/// Looks take at most this part of a processor's time, and are this far apart at least.
const SHARE: u64 = 500;
const APART: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub struct Marks {
    /// By pfn.
    pages: Vec<(u64, Box<Bits>)>,
    next: Option<Instant>,
}

impl Marks {
    /// Marks all that is free now; `None`: the map cannot be read.
    pub fn mark(&mut self, ram: &Ram, map: &[MapPage], now: Instant) -> Option<()> {
        let copy = |p: &MapPage| Some((p.pfn, Box::new(ram.bits(p.gpa)?)));
        self.pages = map.iter().map(copy).collect::<Option<_>>()?;
        self.next = self.next.max(Some(now + APART));
        Some(())
    }

    /// Forgets what is in use now, unless the last look was a short time ago.
    pub fn look(&mut self, ram: &Ram, map: &[MapPage], now: Instant) {
        if self.pages.is_empty() || self.next.is_some_and(|next| now < next) {
            return;
        }
        let begun = cpu_ns();
        let at = |pfn| map.binary_search_by_key(&pfn, |p| p.pfn).ok().map(|i| map[i].gpa);
        self.pages.retain_mut(|(pfn, marked)| {
            let free = at(*pfn).and_then(|gpa| ram.bits(gpa));
            free.map(|free| keep(marked, &free)).is_some()
        });
        self.next = Some(now + APART.max(Duration::from_nanos((cpu_ns() - begun) * SHARE)));
    }

    /// Leaves of `free` what has been free since the mark; `None`: the mark had no such page.
    pub fn keep_marked(&self, pfn: u64, free: &mut Bits) -> Option<()> {
        let at = self.pages.binary_search_by_key(&pfn, |m| m.0).ok()?;
        keep(free, &self.pages[at].1);
        Some(())
    }
}

/// Leaves of `bits` what is also in `those`.
fn keep(bits: &mut Bits, those: &Bits) {
    bits.iter_mut().zip(those).for_each(|(bit, that)| *bit &= that);
}
