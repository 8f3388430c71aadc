//! What a VMM holds beside its guest's RAM: the pages in memory of its other mappings
//! (`/proc/PID/maps`, `/proc/PID/pagemap`, Linux `Documentation/admin-guide/mm/pagemap.rst`).
//!
//! `/proc/PID/status` tells the sum of both only. A look takes a few milliseconds, whatever the
//! guest's size is. It may wait for the VMM's mmap lock, so it is taken beside the loop.

use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ebb_core::units::{Bytes, PAGE};

use super::maps::read_own_mappings;
use crate::beside::Beside;
use crate::root::{ProbeError, Root, is_absent};
use crate::scan::walk::PRESENT;
use crate::sys::Range;

/// Larger mappings are passed over, and not more than this is looked at in all: a process that
/// reserves terabytes would keep us busy.
const LEAST_LEFT_OUT: u64 = 2 << 30;
const MOST: u64 = 8 << 30;
/// Entries read at a time.
const ENTRIES: u64 = 8192;
/// From one look to the next: at first, and at most. A VMM grows while its guest starts.
const EVERY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// What of a process is counted, again and again.
#[derive(Debug, Default)]
pub struct OwnMemory {
    look: Beside<Option<Bytes>>,
    due: Option<Instant>,
    every: Duration,
    counted: Option<Bytes>,
}

impl OwnMemory {
    /// What was counted last; begins to count where that is due. `None`: it is not known.
    pub fn count(&mut self, root: &Root, pid: u32, now: Instant) -> Option<Bytes> {
        let due = self.due.is_none_or(|at| now >= at);
        if due || !self.look.is_idle() {
            let root = root.clone();
            // What cannot be read is not known. The rest of what is told of the VM stands.
            let look = move || count(&root, pid).ok().flatten();
            if let Some(counted) = self.look.look(look, Duration::ZERO) {
                self.counted = counted;
            }
        }
        if due {
            self.every = (self.every * 2).clamp(EVERY.0, EVERY.1);
            self.due = Some(now + self.every);
        }
        self.counted
    }
}

/// Counts once; `None` where the process has ended.
pub fn count(root: &Root, pid: u32) -> std::result::Result<Option<Bytes>, ProbeError> {
    let Some(own) = read_own_mappings(root, pid)? else { return Ok(None) };
    let path = root.path(format!("/proc/{pid}/pagemap"));
    let counted = File::open(&path).and_then(|pagemap| {
        let mut left = MOST;
        let mut pages = 0;
        for range in own.into_iter().filter(|r| r.len < LEAST_LEFT_OUT) {
            left = left.saturating_sub(range.len);
            if left == 0 {
                break;
            }
            pages += present(&pagemap, range)?;
        }
        Ok(Some(Bytes(pages * PAGE)))
    });
    match counted {
        Err(e) if is_absent(&e) => Ok(None),
        counted => counted.map_err(|error| ProbeError::Io { path, error }),
    }
}

/// Pages of a range that are in memory.
fn present(pagemap: &File, range: Range) -> Result<u64> {
    let mut entries = [0; 8 * ENTRIES as usize];
    let (mut page, end) = (range.start / PAGE, range.end() / PAGE);
    let mut found = 0;
    while page < end {
        let wanted = 8 * (end - page).min(ENTRIES) as usize;
        let read = match pagemap.read_at(&mut entries[..wanted], page * 8) {
            Ok(n) if n >= 8 => n / 8,
            // The process has ended, or it is beyond its address space.
            Ok(_) => break,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let words = entries[..8 * read].chunks_exact(8);
        let word = |w: &[u8]| u64::from_ne_bytes(w.try_into().unwrap_or_default());
        found += words.filter(|w| word(w) & PRESENT != 0).count() as u64;
        page += read as u64;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine's own /proc, of this very process: memory that looks like RAM does not count.
    #[test]
    fn what_is_not_ram_is_counted() {
        let root = Root::default();
        let me = std::process::id();
        let of_me = || count(&root, me).unwrap().unwrap();
        let before = of_me();
        assert!(before > Bytes::mib(1), "{before}: the program itself");
        let ram = vec![1u8; 256 << 20];
        let small: Vec<Vec<u8>> = (0..64).map(|_| vec![1u8; 64 << 10]).collect();
        let grown = of_me() - before;
        assert!(grown < Bytes::mib(64), "{grown}: RAM was counted");
        assert!(grown >= Bytes::mib(3), "{grown}: 4 MiB of the heap were not counted");
        drop((ram, small));
        assert_eq!(count(&root, u32::MAX - 1).unwrap(), None, "there is no such process");
    }

    #[test]
    fn it_is_counted_beside_and_less_and_less_often() {
        let root = Root::default();
        let (mut own, begun) = (OwnMemory::default(), Instant::now());
        let known = |own: &mut OwnMemory, at| loop {
            if let Some(counted) = own.count(&root, std::process::id(), at) {
                return counted;
            }
            std::thread::yield_now();
        };
        assert!(known(&mut own, begun) > Bytes::mib(1));
        let due = |own: &OwnMemory| (own.due.unwrap() - begun).as_secs();
        assert_eq!(due(&own), 2);
        for (now, then) in [(1, 2), (2, 6), (6, 14), (14, 30), (30, 62), (62, 122), (122, 182)] {
            known(&mut own, begun + Duration::from_secs(now));
            assert_eq!(due(&own), then);
        }
    }
}
