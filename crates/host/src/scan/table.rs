//! The table of pages: 16 bytes each, filled by many threads, read once, sorted.
//!
//! An entry is 76 bits of the page's hash, the VM (16 bits) and the page's number
//! in that VM's addresses (36 bits). The hash's lowest byte chooses one of 256
//! shards, so 84 bits of it count: two of 2^32 different pages (16 TiB) look alike
//! with a probability of 2^-21. Nothing is looked up while pages are read: threads
//! collect blocks and hand them over whole, and only in the end each shard is
//! sorted, which brings equal pages together. That needs no room for growth, no
//! load factor and no lock per page.

use std::sync::Mutex;

use crate::lock;

/// How many shards; a power of two.
pub(super) const SHARDS: usize = 256;
/// Entries of a block: 4 KiB.
const BLOCK: usize = 256;
const VM_BITS: u32 = 16;
const PAGE_BITS: u32 = 36;
const PLACE_BITS: u32 = VM_BITS + PAGE_BITS;

pub const VMS_MAX: usize = 1 << VM_BITS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry(u128);

impl Entry {
    /// `page` is the address divided by the page size; both numbers are cut to
    /// their widths (65,536 VMs, 48-bit addresses).
    pub fn new(hash: u128, vm: u32, page: u64) -> Entry {
        let vm = u128::from(vm) & ((1 << VM_BITS) - 1);
        let page = u128::from(page) & ((1 << PAGE_BITS) - 1);
        Entry(hash >> PLACE_BITS << PLACE_BITS | vm << PAGE_BITS | page)
    }

    fn content(self) -> u128 {
        self.0 >> PLACE_BITS
    }

    pub fn vm(self) -> usize {
        (self.0 >> PAGE_BITS) as usize & (VMS_MAX - 1)
    }

    pub fn page(self) -> u64 {
        self.0 as u64 & ((1 << PAGE_BITS) - 1)
    }
}

type Blocks = Vec<Vec<Entry>>;

#[derive(Debug)]
pub struct Table {
    shards: Vec<Mutex<Blocks>>,
}

impl Default for Table {
    fn default() -> Table {
        Table { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

/// One thread's way into a table. What it holds goes in when it is dropped.
#[derive(Debug)]
pub struct Filler<'a> {
    table: &'a Table,
    open: Vec<Vec<Entry>>,
}

impl Table {
    pub fn filler(&self) -> Filler<'_> {
        Filler { table: self, open: vec![Vec::new(); SHARDS] }
    }

    pub fn bytes(&self) -> u64 {
        let size = |shard: &Mutex<Blocks>| {
            let blocks = lock(shard);
            blocks.iter().map(|b| b.capacity() * size_of::<Entry>()).sum::<usize>() as u64
        };
        self.shards.iter().map(size).sum()
    }

    /// Empties one shard and calls `each` with every content in it: all of its
    /// pages, sorted by VM and page.
    pub fn drain(&self, shard: usize, mut each: impl FnMut(&[Entry])) {
        let blocks = std::mem::take(&mut *lock(&self.shards[shard]));
        let mut all = Vec::with_capacity(blocks.iter().map(Vec::len).sum());
        blocks.into_iter().for_each(|block| all.extend(block));
        all.sort_unstable();
        all.chunk_by(|a: &Entry, b| a.content() == b.content()).for_each(&mut each);
    }
}

impl Filler<'_> {
    pub fn push(&mut self, hash: u128, vm: u32, page: u64) {
        let shard = hash as usize % SHARDS;
        let block = &mut self.open[shard];
        if block.capacity() == 0 {
            block.reserve_exact(BLOCK);
        }
        block.push(Entry::new(hash, vm, page));
        if block.len() == BLOCK {
            let full = std::mem::take(block);
            self.hand_over(shard, full);
        }
    }

    fn hand_over(&self, shard: usize, block: Vec<Entry>) {
        lock(&self.table.shards[shard]).push(block);
    }
}

impl Drop for Filler<'_> {
    fn drop(&mut self) {
        for shard in 0..SHARDS {
            let mut rest = std::mem::take(&mut self.open[shard]);
            if !rest.is_empty() {
                rest.shrink_to_fit();
                self.hand_over(shard, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Spreads small numbers over the whole width, as a hash does.
    fn spread(content: u64) -> u128 {
        u128::from(content).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
    }

    #[test]
    fn an_entry_takes_sixteen_bytes_and_keeps_its_place() {
        assert_eq!(size_of::<Entry>(), 16);
        for (vm, page) in [(0, 0), (65_535, (1 << 36) - 1), (77, 0x7_ffff_ffff)] {
            let e = Entry::new(u128::MAX, vm, page);
            assert_eq!((e.vm() as u32, e.page()), (vm, page));
        }
    }

    #[test]
    fn threads_fill_one_table() {
        let table = Table::default();
        std::thread::scope(|s| {
            for vm in 0..4u32 {
                let mut filler = table.filler();
                s.spawn(move || {
                    (0..10_000).for_each(|page| filler.push(spread(page), vm, page));
                });
            }
        });
        assert!(table.bytes() < 40_000 * 16 + 4 * 256 * 4096, "{}", table.bytes());
        let mut contents = 0;
        for shard in 0..SHARDS {
            table.drain(shard, |pages| {
                contents += 1;
                let vms: Vec<usize> = pages.iter().map(|e| e.vm()).collect();
                assert_eq!(vms, [0, 1, 2, 3]);
                assert!(pages.iter().all(|e| e.page() == pages[0].page()));
            });
        }
        assert_eq!((contents, table.bytes()), (10_000, 0));
    }

    proptest! {
        #[test]
        fn equal_pages_come_together_and_no_others(
            pages in prop::collection::vec((0u64..40, 0u32..5, 0u64..1000), 0..600)
        ) {
            let table = Table::default();
            let mut expected: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
            for half in pages.chunks(300) {
                let mut filler = table.filler();
                for (content, vm, page) in half {
                    filler.push(spread(*content), *vm, *page);
                    expected.entry(*content).or_default().push((*vm as usize, *page));
                }
            }
            let mut expected: Vec<_> = expected.into_values().collect();
            expected.iter_mut().for_each(|e| e.sort_unstable());
            expected.sort_unstable();
            let mut found = Vec::new();
            for shard in 0..SHARDS {
                table.drain(shard, |e| found.push(e.iter().map(|e| (e.vm(), e.page())).collect::<Vec<_>>()));
            }
            found.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
