//! Which ranges of a VM are worth opening to KSM, where its agent can open ranges.
//!
//! The scan of pages without a twin is what KSM costs, so blocks of 2 MiB are chosen
//! in which enough is to be had for that. A block that is open stays so: what is
//! merged in it is not read by a scan any more, and closing it would break that. It
//! is closed when a scan reads nearly all of it again and finds little. Each range may
//! cost the VMM two mappings, so they are few: those that bring most.

use super::Candidates;
use crate::units::Bytes;
use crate::wire::SPANS_MAX;

/// Of the 512 pages of a block that is open: so many read means that little of it is
/// merged.
const UNMERGED: u64 = 448;
/// What was chosen pays so much less before it is closed.
const LEAVE: f64 = 0.5;

/// Blocks by their first address, with what a scan found in each.
pub type Blocks<'a> = &'a [(u64, Candidates)];

/// The ranges to open, as address and length, sorted and apart; and what is to be had
/// in them. `before`: what is open now. `ram`: where blocks may be opened.
pub fn ranges(
    blocks: Blocks<'_>,
    before: &[(u64, u64)],
    ram: &[(u64, u64)],
    block: u64,
    floor: Bytes,
) -> (Vec<(u64, u64)>, Candidates) {
    let inside = |start: u64| {
        ram.iter().any(|(from, len)| {
            // Never the first: guest page 0 tells of resets, and is alike in many VMs.
            start >= from.saturating_add(block) && start + block <= from + len
        })
    };
    let open = |start: u64| before.iter().any(|(from, len)| *from <= start && start < from + len);
    let stays = |c: &Candidates| c.pages < UNMERGED || c.pays(floor.share(LEAVE));
    let mut chosen: Vec<(u64, Candidates)> = Vec::new();
    for (start, found) in blocks.iter().filter(|(start, _)| inside(*start)) {
        if if open(*start) { stays(found) } else { found.pays(floor) } {
            chosen.push((*start, *found));
        }
    }
    // All merged: nothing of it was read.
    for (from, len) in before {
        let starts = (*from..from + len).step_by(block as usize);
        let unread = |s: &u64| inside(*s) && !blocks.iter().any(|(b, _)| b == s);
        chosen.extend(starts.filter(unread).map(|s| (s, Candidates::default())));
    }
    chosen.sort_by_key(|(start, _)| *start);
    chosen.dedup_by_key(|(start, _)| *start);
    let mut runs: Vec<(u64, u64, Candidates)> = Vec::new();
    for (start, found) in chosen {
        match runs.last_mut() {
            Some((from, len, all)) if *from + *len == start => {
                *len += block;
                all.add(&found);
            }
            _ => runs.push((start, block, found)),
        }
    }
    if runs.len() > SPANS_MAX {
        // What is open counts as if it brought all that it holds.
        let worth = |r: &(u64, u64, Candidates)| if open(r.0) { Bytes(r.1) } else { r.2.saves() };
        runs.sort_by_key(|r| std::cmp::Reverse(worth(r)));
        runs.truncate(SPANS_MAX);
        runs.sort_by_key(|r| r.0);
    }
    let mut all = Candidates::default();
    runs.iter().for_each(|(_, _, found)| all.add(found));
    (runs.into_iter().map(|(start, len, _)| (start, len)).collect(), all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const B: u64 = 2 << 20;
    const FLOOR: Bytes = Bytes::mib(32);
    const RAM: [(u64, u64); 1] = [(0, 1000 * B)];

    fn block(n: u64, pages: u64, twins: u64) -> (u64, Candidates) {
        (n * B, Candidates { pages, zeros: 0, twins })
    }

    #[test]
    fn dense_blocks_are_joined_and_thin_ones_and_the_first_left_out() {
        let blocks = [block(0, 512, 512), block(3, 512, 300), block(4, 512, 500), block(6, 512, 5)];
        let (open, found) = ranges(&blocks, &[], &RAM, B, FLOOR);
        assert_eq!(open, [(3 * B, 2 * B)]);
        assert_eq!((found.pages, found.twins), (1024, 800));
        // Only where the agent has it.
        let (open, _) = ranges(&blocks, &[], &[(2 * B, 2 * B)], B, FLOOR);
        assert_eq!(open, [(3 * B, B)]);
    }

    #[test]
    fn what_is_open_stays_while_it_is_merged_and_goes_when_it_was_all_rewritten() {
        let before = [(3 * B, 4 * B)];
        // 3 was merged whole, 4 in part, 5 is just above half of what pays, 6 is new.
        let blocks = [block(4, 100, 0), block(5, 512, 30), block(6, 512, 2)];
        assert_eq!(ranges(&blocks, &before, &RAM, B, FLOOR).0, [(3 * B, 3 * B)]);
        assert_eq!(ranges(&blocks, &[], &RAM, B, FLOOR).0, [], "none of it would be chosen now");
        assert_eq!(ranges(&[], &before, &RAM, B, FLOOR).0, before);
    }

    #[test]
    fn beyond_the_budget_those_that_bring_most_are_kept() {
        let blocks: Vec<_> = (1..600).map(|n| block(2 * n, 512, 100 + n % 400)).collect();
        let ram = [(0, 4000 * B)];
        let (open, found) = ranges(&blocks, &[], &ram, B, FLOOR);
        assert_eq!(open.len(), SPANS_MAX);
        assert!(open.is_sorted() && found.twins > 250 * SPANS_MAX as u64, "{found:?}");
        let kept = [(2 * B, B)];
        assert!(ranges(&blocks, &kept, &ram, B, FLOOR).0.contains(&kept[0]), "open, and little");
    }

    proptest! {
        #[test]
        fn any_blocks_give_ranges_that_are_sorted_apart_and_inside(
            list in prop::collection::vec((0u64..80, 0u64..600, 0u64..600), 0..80),
            before in prop::collection::vec((0u64..80, 1u64..4), 0..8),
        ) {
            let mut blocks: Vec<_> = list.iter().map(|(n, p, t)| block(*n, *p, *t)).collect();
            blocks.sort_by_key(|b| b.0);
            let before: Vec<_> = before.iter().map(|(n, l)| (n * B, l * B)).collect();
            let ram = [(0, 40 * B), (50 * B, 20 * B)];
            let (open, _) = ranges(&blocks, &before, &ram, B, FLOOR);
            prop_assert!(open.len() <= SPANS_MAX);
            prop_assert!(open.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0));
            for (start, len) in open {
                prop_assert!(ram.iter().any(|(f, l)| start > *f && start + len <= f + l));
            }
        }
    }
}
