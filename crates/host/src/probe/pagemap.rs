//! A process's page tables (`/proc/PID/pagemap`), and what frames are (`/proc/kpageflags`).
//!
//! Source: Linux `Documentation/admin-guide/mm/pagemap.rst`. Both are files of 64-bit words.

use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use ebb_core::units::PAGE;
use rustix::io::Errno;

use crate::root::Root;
use crate::sys::{self, Range};

/// Entries read at a time.
const ENTRIES: u64 = 1024;

/// What is at the place of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry(pub(crate) u64);

impl Entry {
    pub(crate) const PRESENT: u64 = 1 << 63;
    pub(crate) const SWAPPED: u64 = 1 << 62;
    pub(crate) const FILE: u64 = 1 << 61;
    pub(crate) const EXCLUSIVE: u64 = 1 << 56;
    pub(crate) const FRAME: u64 = (1 << 55) - 1;

    pub fn is_swapped(self) -> bool {
        self.0 & Entry::SWAPPED != 0
    }

    /// It is in memory, and neither of a file nor shared memory.
    pub fn is_anonymous(self) -> bool {
        self.0 & (Entry::PRESENT | Entry::SWAPPED | Entry::FILE) == Entry::PRESENT
    }

    /// It is of a file, or shared memory, and in memory.
    pub fn is_of_file(self) -> bool {
        self.0 & (Entry::PRESENT | Entry::SWAPPED | Entry::FILE) == Entry::PRESENT | Entry::FILE
    }

    /// No other place maps it.
    pub fn is_exclusive(self) -> bool {
        self.0 & Entry::EXCLUSIVE != 0
    }

    /// Number of its frame; `None` where we may not know (no CAP_SYS_ADMIN).
    pub fn frame(self) -> Option<u64> {
        Some(self.0 & Entry::FRAME).filter(|frame| *frame != 0)
    }
}

/// The page tables of a process. The descriptor means this very process, also when its pid is
/// another's later.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    pub fn open(root: &Root, pid: u32) -> Result<Pagemap> {
        File::open(root.path(format!("/proc/{pid}/pagemap"))).map(Pagemap)
    }

    /// Calls `each` with every page of a range; with fewer where the process has ended, or its
    /// address space does.
    pub fn each(&self, range: Range, mut each: impl FnMut(u64, Entry)) -> Result<()> {
        let mut words = [0; 8 * ENTRIES as usize];
        let (mut page, end) = (range.start / PAGE, range.end() / PAGE);
        while page < end {
            let wanted = 8 * (end - page).min(ENTRIES) as usize;
            let read = match self.0.read_at(&mut words[..wanted], page * 8) {
                Ok(n) if n >= 8 => n / 8,
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            for (n, word) in words[..8 * read].chunks_exact(8).enumerate() {
                let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
                each((page + n as u64) * PAGE, Entry(word));
            }
            page += read as u64;
        }
        Ok(())
    }

    /// Of the page at this address.
    pub fn entry(&self, address: u64) -> Option<Entry> {
        word(&self.0, address / PAGE).map(Entry)
    }

    /// Calls `each` as [`sys::pagemap_scan`] does.
    pub fn scan(&self, range: Range, each: impl FnMut(Range, bool)) -> Result<()> {
        sys::pagemap_scan(self.0.as_fd(), range, each)
    }

    /// Whether [`Pagemap::scan`] works: from Linux 6.7 on.
    pub fn can_scan(&self) -> bool {
        let tried = self.scan(Range { start: 0, len: PAGE }, |_, _| ());
        !tried.is_err_and(|e| Errno::from_io_error(&e) == Some(Errno::NOTTY))
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub(crate) u64);

impl Flags {
    pub(crate) const HUGETLB: u64 = 1 << 17;
    pub(crate) const KSM: u64 = 1 << 21;
    pub(crate) const THP: u64 = 1 << 22;
    pub(crate) const ZERO_PAGE: u64 = 1 << 24;

    pub fn is_of_ksm(self) -> bool {
        self.0 & Flags::KSM != 0
    }

    pub fn is_zero_page(self) -> bool {
        self.0 & Flags::ZERO_PAGE != 0
    }

    /// A part of a transparent huge page, the huge zero page left out.
    pub fn is_of_thp(self) -> bool {
        self.0 & (Flags::THP | Flags::HUGETLB | Flags::ZERO_PAGE) == Flags::THP
    }
}

/// What the machine's frames are.
#[derive(Debug)]
pub struct FrameFlags(File);

impl FrameFlags {
    pub fn open(root: &Root) -> Result<FrameFlags> {
        File::open(root.path("/proc/kpageflags")).map(FrameFlags)
    }

    pub fn of(&self, frame: u64) -> Option<Flags> {
        word(&self.0, frame).map(Flags)
    }
}

fn word(file: &File, index: u64) -> Option<u64> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, index.checked_mul(8)?).ok()?;
    Some(u64::from_ne_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    #[test]
    fn pages_are_told_with_their_addresses_as_far_as_there_are_any() {
        let root = tree(&[]);
        let words: Vec<u8> = (0..20_000u64).flat_map(u64::to_ne_bytes).collect();
        root.put("/proc/7/pagemap", [&words[..], &[1; 7]].concat());
        let pagemap = Pagemap::open(&root, 7).unwrap();
        let told = |start, pages| {
            let mut told = Vec::new();
            let range = Range { start: start * PAGE, len: pages * PAGE };
            pagemap.each(range, |at, entry| told.push((at / PAGE, entry.0))).unwrap();
            told
        };
        let same = |pages: std::ops::Range<u64>| pages.map(|n| (n, n)).collect::<Vec<_>>();
        assert_eq!(told(3, 2), same(3..5));
        assert_eq!(told(5, 19_000), same(5..19_005), "more than one read");
        assert_eq!(told(19_990, 100), same(19_990..20_000), "no half word");
        assert_eq!(told(30_000, 1), []);
        assert_eq!(pagemap.entry(19_999 * PAGE), Some(Entry(19_999)));
        assert_eq!((pagemap.entry(20_000 * PAGE), pagemap.entry(u64::MAX)), (None, None));
        assert!(Pagemap::open(&root, 8).is_err());
    }

    #[test]
    fn an_entry_is_in_memory_or_in_swap() {
        let of = |bits| Entry(bits | 77);
        let tell = |e: Entry| [e.is_anonymous(), e.is_of_file(), e.is_swapped(), e.is_exclusive()];
        assert_eq!(tell(of(Entry::PRESENT)), [true, false, false, false]);
        assert_eq!(tell(of(Entry::PRESENT | Entry::EXCLUSIVE)), [true, false, false, true]);
        assert_eq!(tell(of(Entry::PRESENT | Entry::FILE)), [false, true, false, false]);
        assert_eq!(tell(of(Entry::SWAPPED)), [false, false, true, false]);
        assert_eq!((tell(of(0)), Entry(0).frame(), of(0).frame()), ([false; 4], None, Some(77)));
    }
}
