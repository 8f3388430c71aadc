//! Which ranges of a VM are worth opening to KSM, where its agent can open ranges.
//!
//! The scan of pages without a duplicate is what KSM costs, so just those pages are open
//! that have one, or are zeros. Each range costs the VMM two mappings, some 500 bytes,
//! and microseconds to make: so what lies close together is opened with what lies
//! between, closer or less close, until there are few enough.
//!
//! A page that is open stays so: what is merged is not read by a scan, and closing it
//! would break that. It is closed when a scan reads it and finds it alone, and by the agent when
//! its guest has freed it.

use super::Candidates;
use crate::range::Range;
use crate::units::{Bytes, PAGE};

/// Most ranges of a VM that a scan names: Linux gives a process 65,530 mappings, and the check that
/// nothing else is open takes a call for each.
pub const RANGES_MAX: usize = 4096;
/// Pages without a duplicate that are opened rather than one range more: KSM's own memory
/// for them is less than that for its mappings.
const GAP: u64 = 4;
/// Pages without a duplicate that stay open, where they are, rather than one range more: to close
/// them and perhaps open them again costs more.
const GAP_OPEN: u64 = 32;
/// Never open, at the beginning of RAM: guest page 0 tells of resets, and is alike in
/// many VMs.
const FIRST: u64 = 16 * PAGE;
/// Words of 64 pages in a block.
pub const WORDS: usize = 8;
/// Bytes of a block.
const BLOCK: u64 = WORDS as u64 * 64 * PAGE;

/// What a scan found in 2 MiB, page by page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Address of its first page; a multiple of its size.
    pub start: u64,
    pub read: [u64; WORDS],
    /// Of those, with a duplicate in the group.
    pub duplicates: [u64; WORDS],
    pub zeros: [u64; WORDS],
}

impl Block {
    pub fn found(&self) -> Candidates {
        let count = |bits: &[u64; WORDS]| bits.iter().map(|w| u64::from(w.count_ones())).sum();
        Candidates {
            pages: count(&self.read),
            zeros: count(&self.zeros),
            duplicates: count(&self.duplicates),
        }
    }
}

/// A range, and what a scan found in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Run {
    start: u64,
    end: u64,
    found: Candidates,
    /// All of the gap before it is open.
    gap_open: bool,
    /// The first of a block of RAM: what lies between it and the run before is not all RAM.
    first: bool,
}

/// The ranges to open, sorted and apart; and what is to be had in them. `before`: what is open
/// now, likewise. `ram`: where ranges may be opened.
/// `goes`: the part of the pages with a duplicate that goes; one of each content stays.
pub fn ranges(
    blocks: &[Block],
    before: &[Range],
    ram: &[Range],
    goes: f64,
) -> (Vec<Range>, Candidates) {
    let mut runs = runs(blocks, before, ram);
    let mut gap = GAP;
    while runs.len() > RANGES_MAX && gap < BLOCK / PAGE {
        gap *= 2;
        join(&mut runs, gap);
    }
    if runs.len() > RANGES_MAX {
        // What is open and was not read is merged: it counts as if it all went.
        let worth = |r: &Run| {
            let read = Bytes::pages(r.found.pages);
            r.found.saves() + (Bytes(r.end - r.start) - read)
        };
        runs.sort_by_key(|r| std::cmp::Reverse(worth(r)));
        runs.truncate(RANGES_MAX);
        runs.sort_by_key(|r| r.start);
    }
    let mut all: Candidates = runs.iter().map(|r| &r.found).sum();
    all.duplicates = (all.duplicates as f64 * goes.clamp(0.0, 1.0)) as u64;
    (runs.into_iter().map(|r| Range { start: r.start, len: r.end - r.start }).collect(), all)
}

/// Pages that are to be open, those close together as one.
fn runs(blocks: &[Block], before: &[Range], ram: &[Range]) -> Vec<Run> {
    let mut runs = Vec::new();
    for Range { start, len } in ram {
        let usable = Range { start: start.saturating_add(FIRST), len: len.saturating_sub(FIRST) };
        let mut at = start / BLOCK * BLOCK;
        // Whether all since the last run is open.
        let mut gap_open = false;
        let before_these = runs.len();
        while at < usable.end() {
            let open = opened(at, before);
            let known = blocks.binary_search_by_key(&at, |b| b.start);
            if known.is_err() && open == [0; WORDS] {
                // Most of a large VM: nothing was found there, and none of it is open.
                gap_open = false;
            } else {
                let block = known.map_or(Block { start: at, ..Block::default() }, |i| blocks[i]);
                self::block(&block, &open, usable, (&mut runs, &mut gap_open));
            }
            at += BLOCK;
        }
        if let Some(run) = runs.get_mut(before_these) {
            run.first = true;
        }
    }
    join(&mut runs, GAP);
    runs
}

/// Which pages of a block are open now.
fn opened(start: u64, before: &[Range]) -> [u64; WORDS] {
    let mut bits = [0; WORDS];
    let first = before.partition_point(|r| r.end() <= start);
    for r in before[first..].iter().take_while(|r| r.start < start + BLOCK) {
        let page = |at: u64| (at.clamp(start, start + BLOCK) - start) / PAGE;
        (page(r.start)..page(r.end())).for_each(|p| bits[p as usize / 64] |= 1 << (p % 64));
    }
    bits
}

fn block(
    b: &Block,
    open: &[u64; WORDS],
    usable: Range,
    (runs, gap_open): (&mut Vec<Run>, &mut bool),
) {
    for i in 0..WORDS * 64 {
        let bit = |bits: &[u64; WORDS]| bits[i / 64] >> (i % 64) & 1 == 1;
        let (duplicate, zero, read) = (bit(&b.duplicates), bit(&b.zeros), bit(&b.read));
        let start = b.start + i as u64 * PAGE;
        if !usable.contains(start) || !(duplicate || zero || bit(open) && !read) {
            *gap_open &= bit(open);
            continue;
        }
        let one = |yes| u64::from(yes);
        let found = Candidates { pages: one(read), zeros: one(zero), duplicates: one(duplicate) };
        match runs.last_mut() {
            Some(run) if run.end == start => {
                run.end += PAGE;
                run.found.add(&found);
            }
            _ => {
                let (end, gap_open) = (start + PAGE, *gap_open);
                runs.push(Run { start, end, found, gap_open, first: false });
            }
        }
        *gap_open = true;
    }
}

/// Joins runs no further apart than `gap` pages, where RAM lies between.
fn join(runs: &mut Vec<Run>, gap: u64) {
    runs.dedup_by(|next, run| {
        let between = (next.start - run.end) / PAGE;
        let close = between <= gap || between <= GAP_OPEN && next.gap_open;
        let near = close && !next.first;
        if near {
            run.found.add(&next.found);
            // Alone, or not in memory: counted as the former.
            run.found.pages += between;
            run.end = next.end;
        }
        near
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const B: u64 = BLOCK;
    const RAM: [Range; 1] = [r(0, 1000 * B)];

    const fn r(start: u64, len: u64) -> Range {
        Range { start, len }
    }

    /// All of a block was read; these pages have duplicates.
    fn block(n: u64, duplicates: impl IntoIterator<Item = u64>) -> Block {
        let mut b = Block { start: n * B, read: [u64::MAX; WORDS], ..Block::default() };
        duplicates.into_iter().for_each(|p| b.duplicates[p as usize / 64] |= 1 << (p % 64));
        b
    }

    fn pages(list: &[Range]) -> Vec<(u64, u64)> {
        list.iter().map(|r| (r.start / PAGE, r.len / PAGE)).collect()
    }

    #[test]
    fn pages_with_duplicates_are_opened_and_the_first_of_all_are_not() {
        let blocks = [block(0, 0..40), block(3, 500..512), block(4, (0..10).chain([12, 40]))];
        let (open, found) = ranges(&blocks, &[], &RAM, 0.5);
        // What is two pages apart is opened with those.
        assert_eq!(pages(&open), [(16, 24), (3 * 512 + 500, 12 + 13), (4 * 512 + 40, 1)]);
        assert_eq!((found.pages, found.duplicates), (24 + 12 + 13 + 1, 24));
        // Only where the agent has it.
        let (open, _) = ranges(&blocks, &[], &[r(2 * B, 2 * B)], 1.0);
        assert_eq!(pages(&open), [(3 * 512 + 500, 12)]);
        let zeros = Block { zeros: [1, 0, 0, 0, 0, 0, 0, 0], ..block(7, []) };
        let (open, found) = ranges(&[zeros], &[], &RAM, 0.0);
        assert_eq!((pages(&open), found.zeros), (vec![(7 * 512, 1)], 1));
    }

    #[test]
    fn what_is_open_stays_while_it_is_merged_and_goes_when_it_is_read_and_alone() {
        let before = [r(3 * B, 2 * B)];
        // 3 was not read at all; of 4 the first half was.
        let half =
            Block { read: [u64::MAX, u64::MAX, u64::MAX, u64::MAX, 0, 0, 0, 0], ..block(4, []) };
        assert_eq!(
            pages(&ranges(&[half], &before, &RAM, 1.0).0),
            [(3 * 512, 512), (4 * 512 + 256, 256)]
        );
        assert_eq!(ranges(&[half], &[], &RAM, 1.0).0, [], "none of it would be chosen now");
        assert_eq!(ranges(&[], &before, &RAM, 1.0).0, before);
        // A few that are alone again are not worth two mappings.
        let few = Block { read: [0xff_ffff, 0, 0, 0, 0, 0, 0, 0], ..block(4, []) };
        assert_eq!(ranges(&[few], &before, &RAM, 1.0).0, before);
        // Across blocks too.
        let end = Block { read: [0, 0, 0, 0, 0, 0, 0, u64::MAX << 54], ..block(3, []) };
        assert_eq!(ranges(&[end], &before, &RAM, 1.0).0, before);
    }

    #[test]
    fn beyond_the_budget_what_is_close_is_joined_and_then_those_that_bring_most_are_kept() {
        let blocks: Vec<Block> = (1..900).map(|n| block(n, (0..512).step_by(20))).collect();
        let (open, found) = ranges(&blocks, &[], &RAM, 1.0);
        assert!(open.len() <= RANGES_MAX && !open.is_empty(), "{}", open.len());
        assert_eq!(found.duplicates, 899 * 26, "nothing is lost by joining");
        let far: Vec<Block> = (1..20_000).map(|n| block(2 * n, 0..1 + n % 400)).collect();
        let kept = [r(2 * B, PAGE)];
        let ram = [r(0, 40_001 * B)];
        let (open, found) = ranges(&far, &kept, &ram, 1.0);
        assert_eq!(open.len(), RANGES_MAX);
        assert!(open.is_sorted() && found.duplicates > 300 * RANGES_MAX as u64, "{found:?}");
    }

    #[test]
    fn no_range_lies_in_two_blocks_of_ram() {
        // A page that no block has lies between them.
        let ram = [r(0, 700 * B), r(700 * B + PAGE, 700 * B)];
        let blocks: Vec<Block> = (0..1400).map(|n| block(n, (0..512).step_by(20))).collect();
        let (open, _) = ranges(&blocks, &[], &ram, 1.0);
        assert_eq!(open.len(), 2);
        for range in &open {
            let within = |ram: &Range| ram.start + FIRST <= range.start && range.end() <= ram.end();
            assert!(ram.iter().any(within), "{range:?}");
        }
    }

    proptest! {
        #[test]
        fn any_blocks_give_ranges_that_are_sorted_apart_and_inside(
            list in prop::collection::vec((0u64..80, any::<[u64; 3]>()), 0..80),
            before in prop::collection::vec((0u64..80, 1u64..4), 0..8),
        ) {
            let make = |(n, [a, b, c]): &(u64, [u64; 3])| Block {
                start: n * B,
                read: [*a | *b, *a | *c, *c, *a, *b, 0, u64::MAX, *a],
                duplicates: [*b, *c & *a, 0, *a, 0, 0, *c & *b, *a],
                zeros: [*a & !*b, 0, *c, 0, *b, 0, 0, 0],
            };
            let mut blocks: Vec<Block> = list.iter().map(make).collect();
            blocks.sort_by_key(|b| b.start);
            blocks.dedup_by_key(|b| b.start);
            let mut at = 0;
            let before: Vec<_> = before.iter().map(|(gap, l)| {
                let start = at + (gap + 1) * PAGE * 37;
                at = start + l * PAGE * 50;
                r(start, l * PAGE * 50)
            }).collect();
            let ram = [r(0, 40 * B), r(50 * B, 20 * B)];
            let (open, found) = ranges(&blocks, &before, &ram, 1.0);
            prop_assert!(open.len() <= RANGES_MAX);
            prop_assert!(open.windows(2).all(|w| w[0].end() < w[1].start));
            let inside = |at: u64| open.iter().any(|r| r.contains(at));
            for r in &open {
                prop_assert!(ram.iter().any(|m| r.start > m.start && r.end() <= m.end()));
            }
            // Every page that brings something, and is not one of the first, is open.
            let mut duplicates = 0;
            for b in &blocks {
                let usable = |p: &usize| {
                    let at = b.start + *p as u64 * PAGE;
                    ram.iter().any(|m| at >= m.start + FIRST && at < m.end())
                };
                let duplicate = |p: &usize| b.duplicates[p / 64] >> (p % 64) & 1 == 1;
                for p in (0..512usize).filter(usable).filter(duplicate) {
                    duplicates += 1;
                    prop_assert!(inside(b.start + p as u64 * PAGE));
                }
            }
            prop_assert_eq!(found.duplicates, duplicates);
        }
    }
}
