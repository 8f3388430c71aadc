//! Counting: from equal pages to what merging them would save, and for whom.
//!
//! Of N equal pages one stays. The N−1 that go are told apart by how far one must
//! look for the duplicate: within a VM, in another VM of the group, in another group.
//! What several VMs save together is divided among them equally, so that the parts
//! add up to the whole.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_core::policy::merge::{Block, WORDS};
use ebb_core::units::{Bytes, PAGE};
use serde::Serialize;

use super::bytes_of;
use super::table::Entry;
use crate::sys::Range;

/// A block of [`Blocks`], as a power of two.
const BLOCK_SHIFT: u32 = 21;
/// A block of [`Blocks`], bytes.
pub const BLOCK: u64 = 1 << BLOCK_SHIFT;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Split {
    pub zero: Bytes,
    /// Duplicates within a VM.
    pub within: Bytes,
    /// Duplicates in another VM of the same share group.
    pub between: Bytes,
    /// Duplicates in other groups only: what keeping groups apart costs.
    pub across: Bytes,
}

impl Split {
    /// What can be saved without crossing groups.
    pub fn allowed(&self) -> Bytes {
        self.zero + self.within + self.between
    }

    pub fn add(&mut self, other: &Split) {
        self.zero += other.zero;
        self.within += other.within;
        self.between += other.between;
        self.across += other.across;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pages {
    /// In memory, and holding some: the zero page and what is merged left out.
    pub held: u64,
    /// Merged by KSM already with a page that counts elsewhere.
    pub merged: u64,
    /// Left out because the guest has them free.
    pub free: u64,
    pub read: u64,
    /// Read, and zeros.
    pub zero: u64,
    /// Read, but changed since the last scan, or new; where that was asked for.
    pub changed: u64,
    /// Went away before they could be read.
    pub lost: u64,
}

/// Numbers of a sample that [`super::sampling`] estimates from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// Pages read, zeros left out.
    pub pages: f64,
    /// Different contents among them.
    pub distinct: f64,
    /// Pages that are alone.
    pub single: f64,
    /// Pairs of equal pages.
    pub pairs: f64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VmTally {
    pub within: u64,
    pub between: f64,
    pub across: f64,
    pub duplicates: u64,
}

impl VmTally {
    pub fn split(&self, zero: u64) -> Split {
        Split {
            zero: Bytes::pages(zero),
            within: Bytes::pages(self.within),
            between: bytes_of(self.between),
            across: bytes_of(self.across),
        }
    }
}

/// What one thread, and in the end all, counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Savings {
    pub vms: Vec<VmTally>,
    pub split: Split,
    pub moments: Moments,
    /// Each VM with the content at hand, and how many pages of it.
    runs: Vec<(usize, u64)>,
}

pub(super) struct Rules<'a> {
    pub groups: &'a [usize],
    /// VMs that ended: their pages do not count.
    pub ended: &'a [bool],
    /// Where a duplicate is, for each VM.
    pub blocks: &'a [Blocks],
}

impl Savings {
    pub fn new(vms: usize) -> Savings {
        Savings { vms: vec![VmTally::default(); vms], ..Savings::default() }
    }

    /// Counts all pages of one content, sorted by VM.
    pub fn content(&mut self, pages: &[Entry], rules: &Rules<'_>) {
        if let [one] = pages {
            if !rules.ended[one.vm()] {
                self.moments.pages += 1.0;
                self.moments.distinct += 1.0;
                self.moments.single += 1.0;
            }
            return;
        }
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        for run in pages.chunk_by(|a, b| a.vm() == b.vm()) {
            if !rules.ended[run[0].vm()] {
                runs.push((run[0].vm(), run.len() as u64));
            }
        }
        // VMs of a group side by side; there are few of them.
        runs.sort_unstable_by_key(|(vm, _)| (rules.groups[*vm], *vm));
        self.count(&runs, rules, pages);
        self.runs = runs;
    }

    fn count(&mut self, runs: &[(usize, u64)], rules: &Rules<'_>, pages: &[Entry]) {
        let all: u64 = runs.iter().map(|r| r.1).sum();
        if all == 0 {
            return;
        }
        self.moments.pages += all as f64;
        self.moments.distinct += 1.0;
        self.moments.single += if all == 1 { 1.0 } else { 0.0 };
        self.moments.pairs += all as f64 * (all - 1) as f64 / 2.0;
        let mut groups = 0;
        for group in runs.chunk_by(|a, b| rules.groups[a.0] == rules.groups[b.0]) {
            groups += 1;
            self.group(group, rules, pages);
        }
        let across = Bytes::pages(groups - 1);
        self.split.across += across;
        for (vm, _) in runs.iter().filter(|_| groups > 1) {
            self.vms[*vm].across += (groups - 1) as f64 / runs.len() as f64;
        }
    }

    /// The VMs of one group that have the content at hand.
    fn group(&mut self, runs: &[(usize, u64)], rules: &Rules<'_>, pages: &[Entry]) {
        let vms = runs.len() as u64;
        let alone = vms == 1 && runs[0].1 == 1;
        self.split.between += Bytes::pages(vms - 1);
        for (vm, n) in runs {
            let tally = &mut self.vms[*vm];
            tally.within += n - 1;
            tally.between += (vms - 1) as f64 / vms as f64;
            self.split.within += Bytes::pages(n - 1);
            if !alone {
                tally.duplicates += n;
                let first = pages.partition_point(|e| e.vm() < *vm);
                let own = &pages[first..first + *n as usize];
                own.iter().for_each(|e| rules.blocks[*vm].set(e.page() * PAGE, 1));
            }
        }
    }

    pub fn add(&mut self, other: &Savings) {
        for (mine, theirs) in self.vms.iter_mut().zip(&other.vms) {
            mine.within += theirs.within;
            mine.between += theirs.between;
            mine.across += theirs.across;
            mine.duplicates += theirs.duplicates;
        }
        self.split.add(&other.split);
        self.moments.pages += other.moments.pages;
        self.moments.distinct += other.moments.distinct;
        self.moments.single += other.moments.single;
        self.moments.pairs += other.moments.pairs;
    }
}

/// What is known of a page: it was read, it has a duplicate, it is zeros, and [`LINES_READ`].
const KINDS: usize = 4;
/// No more than lines of it were read.
pub(super) const LINES_READ: usize = 3;
/// Words of a block: [`WORDS`] for each kind.
const CELLS: usize = KINDS * WORDS;

/// A VM's RAM in blocks of 2 MiB, page by page: 4 bits each.
#[derive(Debug, Default)]
pub struct Blocks {
    ranges: Vec<(Range, Vec<AtomicU64>)>,
}

impl Blocks {
    pub(super) fn new(ram: &[Range]) -> Blocks {
        let cells = |r: &Range| {
            let n = ((r.end() - 1) >> BLOCK_SHIFT) - (r.start >> BLOCK_SHIFT) + 1;
            // Zeroed by the kernel when it is first touched, page by page.
            let zeros = vec![0; n as usize * CELLS];
            zeros.into_iter().map(AtomicU64::new).collect()
        };
        let ram = ram.iter().filter(|r| r.len > 0);
        Blocks { ranges: ram.map(|r| (*r, cells(r))).collect() }
    }

    /// Where a bit of a page is.
    pub(super) fn bit(&self, address: u64, kind: usize) -> Option<(&AtomicU64, u64)> {
        let (range, cells) = self.ranges.iter().find(|(r, _)| r.contains(address))?;
        let block = ((address >> BLOCK_SHIFT) - (range.start >> BLOCK_SHIFT)) as usize;
        let page = (address % BLOCK / PAGE) as usize;
        Some((&cells[block * CELLS + kind * WORDS + page / 64], 1 << (page % 64)))
    }

    pub(super) fn set(&self, address: u64, kind: usize) {
        if let Some((word, bit)) = self.bit(address, kind) {
            word.fetch_or(bit, Relaxed);
        }
    }

    pub(super) fn read(&self, address: u64, zero: bool) {
        self.set(address, 0);
        if zero {
            self.set(address, 2);
        }
    }

    /// The blocks of which more is known than lines, in the order of their addresses. The first
    /// of a range may begin before it.
    pub fn iter(&self) -> impl Iterator<Item = Block> + '_ {
        self.ranges.iter().flat_map(|(range, cells)| {
            let first = range.start >> BLOCK_SHIFT;
            cells.chunks_exact(CELLS).enumerate().filter_map(move |(i, cells)| {
                let bits = |kind: usize| {
                    std::array::from_fn(|word| cells[kind * WORDS + word].load(Relaxed))
                };
                let start = (first + i as u64) << BLOCK_SHIFT;
                let block = Block { start, read: bits(0), duplicates: bits(1), zeros: bits(2) };
                (block != Block { start, ..Block::default() }).then_some(block)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::scan::table::{SHARDS, Table};

    fn ram() -> Vec<Range> {
        vec![Range { start: 0, len: 1 << 24 }]
    }

    fn tally(
        pages: &[(u64, u32, u64)],
        groups: &[usize],
        ended: &[bool],
    ) -> (Savings, Vec<Blocks>) {
        let table = Table::default();
        let mut filler = table.filler();
        for (content, vm, page) in pages {
            let hash = u128::from(*content).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
            filler.push(hash, *vm, *page);
        }
        drop(filler);
        let blocks: Vec<Blocks> = groups.iter().map(|_| Blocks::new(&ram())).collect();
        let rules = Rules { groups, ended, blocks: &blocks };
        let mut tally = Savings::new(groups.len());
        (0..SHARDS).for_each(|s| table.drain(s, |pages| tally.content(pages, &rules)));
        (tally, blocks)
    }

    #[test]
    fn each_page_that_goes_is_counted_where_its_nearest_duplicate_is() {
        // VMs 0 and 1 are of one group, 2 of another.
        let groups = [0, 0, 1];
        let pages = [
            (1, 0, 0), // three in VM 0, one in VM 1, two in VM 2
            (1, 0, 1),
            (1, 0, 600),
            (1, 1, 0),
            (1, 2, 0),
            (1, 2, 9),
            (2, 0, 2), // only across
            (2, 2, 2),
            (3, 1, 3), // alone
        ];
        let (t, blocks) = tally(&pages, &groups, &[false; 3]);
        let pages_of = |b: Bytes| b.0 / PAGE;
        assert_eq!(pages_of(t.split.within), 2 + 1);
        assert_eq!(pages_of(t.split.between), 1);
        assert_eq!(pages_of(t.split.across), 2);
        assert_eq!(t.vms.iter().map(|v| v.duplicates).collect::<Vec<_>>(), [3, 1, 2]);
        assert_eq!(t.vms[0].split(7).zero, Bytes::pages(7));
        assert_eq!((t.moments.pages, t.moments.distinct, t.moments.single), (9.0, 3.0, 1.0));
        assert_eq!(t.moments.pairs, 15.0 + 1.0);
        let found: Vec<(u64, u64)> =
            blocks[0].iter().map(|b| (b.start, b.found().duplicates)).collect();
        assert_eq!(found, [(0, 2), (2 << 20, 1)]);
    }

    proptest! {
        #[test]
        fn the_parts_add_up_to_all_pages_less_the_different_ones(
            pages in prop::collection::vec((0u64..30, 0u32..6, 0u64..4000), 0..300),
            groups in prop::collection::vec(0usize..3, 6),
            gone in 0usize..12,
        ) {
            let ended: Vec<bool> = (0..6).map(|i| i == gone).collect();
            let (t, _) = tally(&pages, &groups, &ended);
            let mut contents: BTreeMap<u64, u64> = BTreeMap::new();
            for (content, vm, _) in &pages {
                if *vm as usize != gone {
                    *contents.entry(*content).or_default() += 1;
                }
            }
            let ideal: u64 = contents.values().map(|n| n - 1).sum();
            let s = t.split;
            prop_assert_eq!((s.within + s.between + s.across).0 / PAGE, ideal);
            prop_assert_eq!(t.moments.distinct as usize, contents.len());
            let parts: f64 = t.vms.iter().map(|v| v.within as f64 + v.between + v.across).sum();
            prop_assert!((parts - ideal as f64).abs() < 1e-6);
        }
    }
}
