//! What a VMM holds beside its guest's RAM: the pages of its other mappings that are in memory or in
//! swap (`/proc/PID/maps`, `/proc/PID/pagemap`).
//!
//! `/proc/PID/status` tells the sum of both only. A look takes a few milliseconds, whatever the
//! guest's size is. It may wait for the VMM's mmap lock, so it is taken beside the loop.

use std::time::{Duration, Instant};

use ebb_core::sample::OwnMemory;
use ebb_core::units::{Bytes, PAGE};

use super::maps::read_own_mappings;
use super::pagemap::Pagemap;
use crate::background_look::BackgroundLook;
use crate::root::{Probed, Root, probed};

/// Most that is looked at: a process that reserves terabytes would keep us busy. What of more is
/// held is not known.
const MOST: u64 = 16 << 30;
/// From one look to the next: at first, and at most. A VMM grows while its guest starts.
const EVERY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));
/// A count that is older than this says nothing.
const LIFE: Duration = Duration::from_secs(300);

/// What of a process is counted, again and again.
#[derive(Debug, Default)]
pub struct OwnCount {
    /// Under way; with the time when it was begun.
    look: BackgroundLook<(Instant, Probed<OwnMemory>)>,
    due: Option<Instant>,
    every: Duration,
    counted: Option<(Instant, OwnMemory)>,
    /// Why it could not be counted.
    pub error: Option<String>,
}

impl OwnCount {
    /// Whether a count is due, and since when; `None` inside: it was never counted.
    pub fn is_due(&self, now: Instant) -> Option<Option<Instant>> {
        let is_due = self.look.is_idle() && self.due.is_none_or(|at| now >= at);
        is_due.then_some(self.due)
    }

    /// What was counted last. Begins to count where that is due and it may.
    pub fn count(
        &mut self,
        root: &Root,
        pid: u32,
        (now, begins): (Instant, bool),
    ) -> Option<OwnMemory> {
        let due = begins && self.is_due(now).is_some();
        if due {
            self.every = (self.every * 2).clamp(EVERY.0, EVERY.1);
            self.due = Some(now + self.every);
        }
        if due || !self.look.is_idle() {
            let root = root.clone();
            let look = move || (now, count(&root, pid));
            if let Some((begun, found)) = self.look.look(look, Duration::ZERO) {
                self.error = found.as_ref().err().map(ToString::to_string);
                if self.error.is_some() {
                    (self.every, self.due) = (Duration::ZERO, Some(now + EVERY.0));
                }
                self.counted = found.ok().flatten().map(|own| (begun, own));
            }
        }
        self.counted.filter(|(at, _)| now.duration_since(*at) < LIFE).map(|(_, own)| own)
    }
}

/// Counts once; `None` where the process has ended, or there is too much to look at.
pub fn count(root: &Root, pid: u32) -> Probed<OwnMemory> {
    let Some(own) = read_own_mappings(root, pid)? else { return Ok(None) };
    let all = own.iter().fold(0u64, |sum, r| sum.saturating_add(r.len));
    if all == 0 || all > MOST {
        return Ok(None);
    }
    let mut counted = OwnMemory::default();
    let read = Pagemap::open(root, pid).and_then(|pagemap| {
        let each = |range| {
            pagemap.each(range, |_, page| {
                // The zero page is of no file, and others map it, too.
                if page.is_swapped() {
                    counted.swap += Bytes(PAGE);
                } else if page.is_of_file() || (page.is_anonymous() && page.is_exclusive()) {
                    counted.resident += Bytes(PAGE);
                }
            })
        };
        own.into_iter().try_for_each(each)
    });
    probed(&root.path(format!("/proc/{pid}/pagemap")), read.map(|()| counted))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::probe::pagemap::Entry;
    use crate::probe::process::read_status;
    use crate::testing::{Tree, tree};

    /// A process that has read 256 MiB into one buffer, which looks like RAM, and waits for its reader.
    #[test]
    fn what_is_not_ram_is_counted() {
        let root = Root::default();
        let mut dd = Command::new("dd");
        let dd = dd.args(["if=/dev/zero", "bs=256M", "count=1"]).stderr(Stdio::null());
        let mut child = dd.stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let resident = || read_status(&root, pid).unwrap().unwrap().resident();
        while resident() < Bytes::mib(256) {
            std::thread::yield_now();
        }
        let counted = count(&root, pid).unwrap().unwrap().resident;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(counted > Bytes(512 << 10), "{counted}: the program is not counted");
        assert!(counted < Bytes::mib(8), "{counted}: what could be RAM is counted");
        assert_eq!(count(&root, u32::MAX - 1).unwrap(), None, "there is no such process");
    }

    fn mapped(maps: &str, entries: &[u64]) -> Tree {
        let root = tree(&[("/proc/7/maps", maps)]);
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_ne_bytes()).collect();
        root.put("/proc/7/pagemap", bytes);
        root
    }

    #[test]
    fn swap_is_told_apart_and_the_zero_page_holds_nothing() {
        let maps = "00001000-00006000 rw-p 00000000 00:00 0 \n";
        let (present, swapped) = (Entry::PRESENT, Entry::SWAPPED);
        let own = present | Entry::EXCLUSIVE;
        let root = mapped(maps, &[own, own, swapped, present, present | Entry::FILE, 0, own]);
        let pages = |n| Bytes(n * PAGE);
        let counted = OwnMemory { resident: pages(2), swap: pages(1) };
        assert_eq!(count(&root, 7).unwrap(), Some(counted), "page 1 to 5");
    }

    #[test]
    fn a_process_that_reserves_terabytes_or_has_nothing_is_not_counted() {
        let large = "000000000000-7fffffffffff r--p 00000000 00:00 0 \n";
        for root in [mapped(large, &[Entry::PRESENT]), mapped("", &[])] {
            assert_eq!(count(&root, 7).unwrap(), None);
        }
        assert!(count(&mapped("nonsense\n", &[]), 7).is_err());
    }

    #[test]
    fn what_could_not_be_counted_is_counted_again_soon() {
        let root = mapped("nonsense\n", &[]);
        let (mut own, begun) = (OwnCount::default(), Instant::now());
        for s in [0, 2, 4, 6] {
            let now = begun + Duration::from_secs(s);
            while own.count(&root, 7, (now, true)).is_some() || !own.look.is_idle() {
                std::thread::yield_now();
            }
            assert!(own.error.is_some());
            assert_eq!(own.due, Some(now + EVERY.0));
        }
    }

    #[test]
    fn it_is_counted_beside_less_and_less_often_and_forgotten_where_it_is_not() {
        let root = Root::default();
        let (mut own, begun) = (OwnCount::default(), Instant::now());
        let at = |s| begun + Duration::from_secs(s);
        let known = |own: &mut OwnCount, now| loop {
            let counted = own.count(&root, std::process::id(), (now, true));
            if own.look.is_idle() {
                return counted;
            }
            std::thread::yield_now();
        };
        assert_eq!(own.count(&root, 1, (begun, false)), None, "it may not begin");
        assert!(own.look.is_idle() && own.due.is_none());
        assert!(known(&mut own, begun).unwrap().resident > Bytes::mib(1));
        for (now, then) in
            [(1, 2), (2, 6), (6, 14), (14, 30), (30, 62), (62, 126), (126, 246), (246, 366)]
        {
            assert!(known(&mut own, at(now)).is_some());
            assert_eq!(own.due, Some(at(then)));
        }
        let mut later = |now| own.count(&root, std::process::id(), (at(now), false));
        assert!(later(545).is_some());
        assert_eq!(later(547), None, "counted 300 s ago");
    }
}
