//! Which pages of a process are worth reading, without touching one.
//!
//! Only pages in memory are listed: reading an absent page would bring it in.
//! Pages that the zero page backs hold nothing and are left out. Of pages that
//! KSM merged already, each physical one is listed once, whoever maps it, so that
//! a newcomer that could join it is seen; the others hold no memory of their own.
//!
//! Linux 6.7+ lists by PAGEMAP_SCAN; before, `/proc/PID/pagemap` is read entry by
//! entry, and it cannot tell the zero page: [`Walker::holds_nothing`] asks
//! `/proc/kpageflags` for the pages that turn out to be zeros. Sources: Linux
//! `Documentation/admin-guide/mm/pagemap.rst`, `fs/proc/task_mmu.c`.

use std::collections::HashSet;
use std::fs::File;
use std::io::Result;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use ebb_core::range::{parts, push};
use ebb_core::units::PAGE;
use rustix::io::Errno;

use crate::root::Root;
use crate::sys::{Range, pagemap_scan};

/// Bits of `/proc/PID/pagemap`.
pub(crate) const PRESENT: u64 = 1 << 63;
pub(crate) const SWAPPED: u64 = 1 << 62;
/// Of a file, or shared memory.
pub(crate) const FILE: u64 = 1 << 61;
/// No other place maps it.
pub(crate) const EXCLUSIVE: u64 = 1 << 56;
/// Page frame number; 0 where we may not know (no CAP_SYS_ADMIN).
pub(crate) const PFN: u64 = (1 << 55) - 1;
/// `/proc/kpageflags`: it is the zero page.
pub(crate) const ZERO_PAGE: u64 = 1 << 24;
/// `/proc/kpageflags`: KSM made it.
const KSM: u64 = 1 << 21;

/// Physical pages that several places map, and that were listed already.
#[derive(Debug)]
pub struct Seen(Vec<Mutex<HashSet<u64>>>);

impl Default for Seen {
    fn default() -> Seen {
        Seen((0..64).map(|_| Mutex::default()).collect())
    }
}

impl Seen {
    fn first(&self, pfn: u64) -> bool {
        let shard = &self.0[pfn as usize % self.0.len()];
        shard.lock().unwrap_or_else(PoisonError::into_inner).insert(pfn)
    }

    pub fn count(&self) -> usize {
        let len = |s: &Mutex<HashSet<u64>>| s.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.0.iter().map(len).sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listing {
    Scan,
    /// `/proc/PID/pagemap`, for kernels before 6.7.
    Entries,
}

#[derive(Debug, Default)]
pub struct Runs {
    /// Of the process alone.
    pub own: Vec<Range>,
    /// That others may map too: to be read without pinning them, which would give the
    /// process a copy of its own (Linux 5.19 on, `mm/gup.c`, `gup_must_unshare`).
    pub shared: Vec<Range>,
}

impl Runs {
    pub fn clear(&mut self) {
        self.own.clear();
        self.shared.clear();
    }

    pub fn pages(&self) -> u64 {
        self.own.iter().chain(&self.shared).map(|r| r.len / PAGE).sum()
    }
}

#[derive(Debug)]
pub struct Walker {
    pagemap: File,
    flags: Option<File>,
    listing: Listing,
    entries: Vec<u8>,
}

impl Walker {
    /// Opens a process. The descriptor means this very process, also when its
    /// pid is another's later. `merged`: KSM has merged some of its pages.
    pub fn open(root: &Root, pid: u32, merged: bool, listing: Option<Listing>) -> Result<Walker> {
        let pagemap = File::open(root.path(format!("/proc/{pid}/pagemap")))?;
        let listing = match listing {
            Some(listing) => listing,
            None => match pagemap_scan(pagemap.as_fd(), Range { start: 0, len: PAGE }, |_, _| ()) {
                Err(e) if Errno::from_io_error(&e) == Some(Errno::NOTTY) => Listing::Entries,
                _ => Listing::Scan,
            },
        };
        let flags = (merged || listing == Listing::Entries)
            .then(|| File::open(root.path("/proc/kpageflags")).ok())
            .flatten();
        Ok(Walker { pagemap, flags, listing, entries: Vec::new() })
    }

    /// Adds to `runs` the pages to read of a range. Nothing where the process
    /// has ended. `merged`: where KSM has merged some, disjoint and sorted. Returns the number of
    /// pages merged with one that is listed: they hold no memory.
    pub fn runs(
        &mut self,
        range: Range,
        merged: &[Range],
        seen: &Seen,
        runs: &mut Runs,
    ) -> Result<u64> {
        let mut passed = 0;
        match self.listing {
            Listing::Scan => {
                let mut held = Vec::new();
                pagemap_scan(self.pagemap.as_fd(), range, |run, _huge| held.push(run))?;
                for part in held.into_iter().flat_map(|run| parts(run, merged)) {
                    match part {
                        (part, true) => self.sift(part, Some(seen), runs, &mut passed)?,
                        (part, false) => runs.own.push(part),
                    }
                }
            }
            Listing::Entries => {
                for (part, merged) in parts(range, merged) {
                    self.sift(part, merged.then_some(seen), runs, &mut passed)?;
                }
            }
        }
        Ok(passed)
    }

    /// Adds to `runs` what the pagemap says is to be read of a range; `seen`: some of
    /// it is merged.
    fn sift(
        &mut self,
        range: Range,
        seen: Option<&Seen>,
        runs: &mut Runs,
        passed: &mut u64,
    ) -> Result<()> {
        self.entries.resize((range.len / PAGE * 8) as usize, 0);
        let n = self.pagemap.read_at(&mut self.entries, range.start / PAGE * 8)?;
        for (i, word) in self.entries[..n].chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            if entry & (PRESENT | SWAPPED | FILE) != PRESENT {
                continue;
            }
            let page = Range { start: range.start + i as u64 * PAGE, len: PAGE };
            let pfn = entry & PFN;
            match seen {
                // Where frame numbers are hidden each of its mappings counts as a page.
                Some(_) if pfn == 0 => push(&mut runs.shared, page),
                Some(seen) if self.is_shared(entry, pfn) => match seen.first(pfn) {
                    true => push(&mut runs.shared, page),
                    false => *passed += 1,
                },
                _ => push(&mut runs.own, page),
            }
        }
        Ok(())
    }

    /// Whether several places map a page. Those that KSM made do not always say so
    /// in the pagemap (seen on Linux 6.18), so they are asked for by frame.
    fn is_shared(&self, entry: u64, pfn: u64) -> bool {
        let flags = || self.flags.as_ref().and_then(|f| word(f, pfn));
        entry & EXCLUSIVE == 0 || flags().is_some_and(|f| f & KSM != 0)
    }

    /// Whether a page that reads as zeros is the zero page, as far as that is not
    /// already certain; errs towards no.
    pub fn holds_nothing(&self, address: u64) -> bool {
        let Some(flags) = &self.flags else { return false };
        let pfn = word(&self.pagemap, address / PAGE).map(|e| e & PFN).filter(|pfn| *pfn != 0);
        let found = pfn.and_then(|pfn| word(flags, pfn));
        found.is_some_and(|f| f & ZERO_PAGE != 0)
    }
}

/// The word at `index` in a file of 64-bit words.
pub(crate) fn word(file: &File, index: u64) -> Option<u64> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, index * 8).ok()?;
    Some(u64::from_ne_bytes(word))
}
