//! What a VM's pages were at the last scan: 32 bits of each page's hash, or of that of its
//! lines, by place.
//!
//! A changed page passes for unchanged once in four billion times, which costs one
//! page offered to KSM in vain. Memory for pages that were never in memory is
//! never touched.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use ebb_core::units::PAGE;

use crate::sys::Range;

pub(super) fn tag(hash: u128) -> u32 {
    ((hash >> 8) as u32).max(1)
}

/// The tags of one VM; 0: not known.
#[derive(Debug, Default)]
pub(super) struct PageHashes {
    ranges: Vec<(Range, Vec<AtomicU32>)>,
}

impl PageHashes {
    /// Covers just these ranges; what was known of others is forgotten.
    pub fn fit(&mut self, ram: &[Range]) {
        let mut old = std::mem::take(&mut self.ranges);
        for range in ram {
            let known = old.iter().position(|(r, _)| r == range).map(|i| old.swap_remove(i));
            self.ranges.push(known.unwrap_or_else(|| {
                // Zeroed by the kernel when it is first touched, page by page.
                let zeros = vec![0u32; (range.len / PAGE) as usize];
                (*range, zeros.into_iter().map(AtomicU32::new).collect())
            }));
        }
    }

    /// Whether a page's hash is what it was; where it is not, it is noted.
    pub fn same(&self, address: u64, hash: u128) -> bool {
        self.compare(address, hash, true)
    }

    pub fn still(&self, address: u64, hash: u128) -> bool {
        self.compare(address, hash, false)
    }

    /// What was noted of a page; 0: nothing.
    pub fn at(&self, address: u64) -> Option<u32> {
        self.cell(address).map(|cell| cell.load(Relaxed))
    }

    fn cell(&self, address: u64) -> Option<&AtomicU32> {
        let (range, tags) = self.ranges.iter().find(|(r, _)| r.contains(address))?;
        tags.get(((address - range.start) / PAGE) as usize)
    }

    fn compare(&self, address: u64, hash: u128, note: bool) -> bool {
        let Some(cell) = self.cell(address) else { return false };
        let (tag, old) = (tag(hash), cell.load(Relaxed));
        if old != tag && note {
            cell.store(tag, Relaxed);
        }
        old == tag
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_unchanged_only_if_it_was_seen_and_is_the_same() {
        let range = |start, pages| Range { start, len: pages * PAGE };
        let ram = [range(0x10_0000, 8), range(0x40_0000, 1)];
        let mut tags = PageHashes::default();
        tags.fit(&ram);
        for page in [0x10_0000, 0x10_7000, 0x40_0000] {
            assert!(!tags.same(page, 5 << 8), "never seen");
            assert!(tags.same(page, 5 << 8), "seen");
            assert!(!tags.still(page, 4 << 8) && tags.still(page, 5 << 8), "not noted");
            assert!(!tags.same(page, 6 << 8), "changed");
        }
        assert!(!tags.same(0x10_8000, 1) && !tags.same(0x10_8000, 1), "not RAM");
        tags.fit(&ram[..1]);
        assert!(tags.same(0x10_7000, 6 << 8), "kept");
        assert_eq!(tags.at(0x40_0000), None, "forgotten");
    }

    #[test]
    fn a_hash_of_zero_bits_is_still_a_hash() {
        let mut tags = PageHashes::default();
        tags.fit(&[Range { start: 0, len: PAGE }]);
        assert!(!tags.same(0, 0xff) && tags.same(0, 0xff));
    }
}
