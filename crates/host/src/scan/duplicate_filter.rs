//! Which pages may have a duplicate, by four lines of each.
//!
//! To read a page whole costs several times what four lines of it do, and most pages have no
//! duplicate. So where agents read for us, they first read the lines of all pages
//! ([`ebb_core::page_hash::Key::lines`]); each page's tag, 32 bits of their hash, is put in a
//! field of two bits a place, some sixteen places a page: seen once, seen twice. A page
//! alone in its place has no duplicate and is not read any further. What is left are
//! pages with a duplicate, or that look like one (half empty, say), and one of twenty others
//! that share a place by chance.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_core::range::push;
use ebb_core::units::PAGE;

use super::page_hashes::PageHashes;
use super::savings::{Blocks, LINES_READ};
use crate::sys::{Range, fetch};

/// Places for a page, at least.
const PLACES: u64 = 16;
/// More are of no use: a tag has 32 bits.
const PLACES_MAX: u64 = 1 << 32;
/// How many pages ahead the field is prefetched.
pub(super) const AHEAD: usize = 16;
/// Places in a word.
const WORD: usize = 32;

/// How often tags were seen, all VMs together.
#[derive(Debug)]
pub(super) struct DuplicateFilter(Vec<AtomicU64>);

impl DuplicateFilter {
    pub fn new(pages: u64) -> DuplicateFilter {
        let places =
            pages.saturating_mul(PLACES).clamp(WORD as u64, PLACES_MAX).next_power_of_two();
        // Zeroed by the kernel when it is first touched.
        let words = vec![0u64; places as usize / WORD];
        DuplicateFilter(words.into_iter().map(AtomicU64::new).collect())
    }

    fn place(&self, tag: u32) -> (&AtomicU64, u32) {
        // The number of words is a power of two.
        let word = (tag as usize / WORD) & (self.0.len() - 1);
        (&self.0[word], tag % WORD as u32 * 2)
    }

    /// This tag will be needed soon: its place is in no cache.
    pub fn fetch(&self, tag: u32) {
        fetch(self.place(tag).0);
    }

    pub fn put(&self, tag: u32) {
        let (word, shift) = self.place(tag);
        if word.fetch_or(1 << shift, Relaxed) >> shift & 1 == 1 {
            word.fetch_or(2 << shift, Relaxed);
        }
    }

    /// Whether another page may be like this one, which was noted too.
    fn holds_two(&self, tag: u32) -> bool {
        let (word, shift) = self.place(tag);
        word.load(Relaxed) >> shift & 2 == 2
    }

    pub fn bytes(&self) -> u64 {
        self.0.len() as u64 * 8
    }
}

/// Pages of which lines were read.
impl Blocks {
    /// Leaves those in a window that may have a duplicate; returns how many went.
    pub(super) fn sift(&self, window: Range, tags: &PageHashes, filter: &DuplicateFilter) -> u64 {
        let mut gone = 0;
        for run in self.lines_read(window) {
            for address in (run.start..run.end()).step_by(PAGE as usize) {
                let ahead = tags.at(address + AHEAD as u64 * PAGE);
                ahead.into_iter().for_each(|tag| filter.fetch(tag));
                let duplicate = tags.at(address).is_some_and(|tag| filter.holds_two(tag));
                if let Some((word, bit)) = self.bit(address, LINES_READ).filter(|_| !duplicate) {
                    word.fetch_and(!bit, Relaxed);
                    gone += 1;
                }
            }
        }
        gone
    }

    pub(super) fn lines_read(&self, window: Range) -> Vec<Range> {
        let mut runs = Vec::new();
        for address in (window.start..window.end()).step_by(PAGE as usize) {
            let bit = self.bit(address, LINES_READ);
            if bit.is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0) {
                push(&mut runs, Range { start: address, len: PAGE });
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_twice_is_known_and_hardly_anything_else() {
        let filter = DuplicateFilter::new(1 << 12);
        assert!(filter.bytes() <= (1 << 12) * 8);
        let mut x = 1u64;
        let mut tag = || {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 32) as u32
        };
        let tags: Vec<u32> = (0..4096).map(|_| tag()).collect();
        tags.iter().for_each(|t| filter.put(*t));
        let alone = tags.iter().filter(|t| filter.holds_two(**t)).count();
        // One in 16 to 32 by chance.
        assert!((60..400).contains(&alone), "{alone}");
        tags[..100].iter().for_each(|t| filter.put(*t));
        assert!(tags[..100].iter().all(|t| filter.holds_two(*t)));
        assert!(!DuplicateFilter::new(0).holds_two(u32::MAX));
        DuplicateFilter::new(0).put(u32::MAX);
    }

    #[test]
    fn only_marked_pages_that_may_have_a_duplicate_are_left() {
        let ram = [Range { start: PAGE, len: 100 * PAGE }, Range { start: 1 << 30, len: PAGE }];
        let (set, filter, mut tags) =
            (Blocks::new(&ram), DuplicateFilter::new(200), PageHashes::default());
        tags.fit(&ram);
        let all = Range { start: 0, len: 1 << 31 };
        assert!(set.lines_read(all).is_empty());
        // Two alike, one alone, and one that is marked twice alone.
        let pages = [(2 * PAGE, 5), (3 * PAGE, 6), (9 * PAGE, 7), (1 << 30, 5)];
        for (address, hash) in pages {
            tags.same(address, hash << 8);
            set.set(address, LINES_READ);
            filter.put(tags.at(address).unwrap());
        }
        set.set(0, LINES_READ);
        set.set(1 << 40, LINES_READ);
        let page = |start| Range { start, len: PAGE };
        let two = Range { start: 2 * PAGE, len: 2 * PAGE };
        assert_eq!(set.lines_read(all), [two, page(9 * PAGE), page(1 << 30)]);
        assert_eq!(set.sift(page(9 * PAGE), &tags, &filter), 1);
        assert_eq!(set.sift(all, &tags, &filter), 1);
        assert_eq!(set.lines_read(all), [page(2 * PAGE), page(1 << 30)]);
    }
}
