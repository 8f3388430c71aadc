//! Which pages of a process are worth reading, without touching one.
//!
//! Only pages in memory are listed: reading an absent page would bring it in.
//! Pages that the zero page backs hold nothing and are left out. Of pages that
//! KSM merged already, each physical one is listed once, whoever maps it, so that
//! a newcomer that could join it is seen; the others hold no memory of their own.
//!
//! Linux 6.7+ lists by PAGEMAP_SCAN; before, `/proc/PID/pagemap` is read entry by
//! entry, and it cannot tell the zero page: [`Walker::holds_nothing`] asks
//! `/proc/kpageflags` for the pages that turn out to be zeros.

use std::collections::HashSet;
use std::io::Result;
use std::sync::Mutex;

use ebb_core::range::{parts, push};
use ebb_core::units::PAGE;

use crate::lock;
use crate::probe::pagemap::{Entry, FrameFlags, Pagemap};
use crate::root::Root;
use crate::sys::Range;

/// Physical pages that several places map, and that were listed already.
#[derive(Debug)]
pub struct ListedPages(Vec<Mutex<HashSet<u64>>>);

impl Default for ListedPages {
    fn default() -> ListedPages {
        ListedPages((0..64).map(|_| Mutex::default()).collect())
    }
}

impl ListedPages {
    fn first(&self, pfn: u64) -> bool {
        lock(&self.0[pfn as usize % self.0.len()]).insert(pfn)
    }

    pub fn count(&self) -> usize {
        self.0.iter().map(|shard| lock(shard).len()).sum()
    }
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
    pagemap: Pagemap,
    flags: Option<FrameFlags>,
    /// Else entry by entry.
    scans: bool,
}

impl Walker {
    /// Opens a process. `merged`: KSM has merged some of its pages; `entries`: they are listed
    /// entry by entry in any case.
    pub fn open(root: &Root, pid: u32, merged: bool, entries: bool) -> Result<Walker> {
        let pagemap = Pagemap::open(root, pid)?;
        let scans = !entries && pagemap.can_scan();
        let flags = (merged || !scans).then(|| FrameFlags::open(root).ok());
        Ok(Walker { pagemap, flags: flags.flatten(), scans })
    }

    /// Adds to `runs` the pages to read of a range. Nothing where the process
    /// has ended. `merged`: where KSM has merged some, disjoint and sorted. Returns the number of
    /// pages merged with one that is listed: they hold no memory.
    pub fn runs(
        &self,
        range: Range,
        merged: &[Range],
        listed: &ListedPages,
        runs: &mut Runs,
    ) -> Result<u64> {
        let mut held = Vec::new();
        match self.scans {
            true => self.pagemap.scan(range, |run, _huge| held.push(run))?,
            false => held.push(range),
        }
        let mut passed = 0;
        for (part, merged) in held.into_iter().flat_map(|run| parts(run, merged)) {
            match merged || !self.scans {
                true => self.sift(part, merged.then_some(listed), runs, &mut passed)?,
                false => runs.own.push(part),
            }
        }
        Ok(passed)
    }

    /// Adds to `runs` what the pagemap says is to be read of a range; `listed`: some of
    /// it is merged.
    fn sift(
        &self,
        range: Range,
        listed: Option<&ListedPages>,
        runs: &mut Runs,
        passed: &mut u64,
    ) -> Result<()> {
        self.pagemap.each(range, |start, entry| {
            if !entry.is_anonymous() {
                return;
            }
            let page = Range { start, len: PAGE };
            match (listed, entry.frame()) {
                // Where frame numbers are hidden each of its mappings counts as a page.
                (Some(_), None) => push(&mut runs.shared, page),
                (Some(listed), Some(frame)) if self.is_shared(entry, frame) => {
                    if listed.first(frame) { push(&mut runs.shared, page) } else { *passed += 1 }
                }
                _ => push(&mut runs.own, page),
            }
        })
    }

    /// Whether several places map a page. Those that KSM made do not always say so
    /// in the pagemap (seen on Linux 6.18), so they are asked for by frame.
    fn is_shared(&self, entry: Entry, frame: u64) -> bool {
        let is_of_ksm =
            || self.flags.as_ref().and_then(|f| f.of(frame)).is_some_and(|f| f.is_of_ksm());
        !entry.is_exclusive() || is_of_ksm()
    }

    /// Whether a page that reads as zeros is the zero page, as far as that is not
    /// already certain; errs towards no.
    pub fn holds_nothing(&self, address: u64) -> bool {
        let Some(flags) = &self.flags else { return false };
        let frame = self.pagemap.entry(address).and_then(Entry::frame);
        frame.and_then(|frame| flags.of(frame)).is_some_and(|f| f.is_zero_page())
    }
}
