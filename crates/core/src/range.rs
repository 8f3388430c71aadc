//! Ranges of addresses, and lists of them: sorted, and no two overlap.

use serde::{Deserialize, Serialize};

/// A range of addresses, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Range {
    pub start: u64,
    pub len: u64,
}

impl Range {
    /// The address after the last.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    pub fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end()
    }

    /// Whether all of `[start, start + len)` lies inside.
    pub fn holds(&self, start: u64, len: u64) -> bool {
        start >= self.start && start.checked_add(len).is_some_and(|end| end <= self.end())
    }

    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end()
    }

    /// Its pieces between multiples of a size.
    pub fn pieces(self, size: u64) -> impl Iterator<Item = Range> {
        let first = (self.start / size + 1) * size;
        let starts = std::iter::once(self.start).chain((first..self.end()).step_by(size as usize));
        starts.filter(move |_| self.len > 0).map(move |start| {
            let end = ((start / size + 1) * size).min(self.end());
            Range { start, len: end - start }
        })
    }
}

/// Adds a range behind all others; one that follows the last directly makes that longer.
pub fn push(ranges: &mut Vec<Range>, next: Range) {
    match ranges.last_mut() {
        Some(last) if last.end() == next.start => last.len += next.len,
        _ => ranges.push(next),
    }
}

/// Divides ranges among batches, each of `bytes` and of `count` ranges at most. A range that is too
/// long for what is left of one is cut there.
pub fn batches(
    ranges: impl IntoIterator<Item = Range>,
    bytes: u64,
    count: usize,
) -> Vec<Vec<Range>> {
    let mut batches: Vec<Vec<Range>> = Vec::new();
    let mut left = 0;
    for mut range in ranges {
        while range.len > 0 {
            if left == 0 || batches.last().is_none_or(|batch| batch.len() == count) {
                batches.push(Vec::new());
                left = bytes;
            }
            let len = range.len.min(left);
            batches.last_mut().into_iter().for_each(|b| b.push(Range { len, ..range }));
            left -= len;
            range = Range { start: range.start + len, len: range.len - len };
        }
    }
    batches
}

/// A range cut where others begin and end, and which parts are in one of those.
pub fn parts(range: Range, others: &[Range]) -> Vec<(Range, bool)> {
    let (mut parts, mut start) = (Vec::new(), range.start);
    let first = others.partition_point(|r| r.end() <= range.start);
    for r in others[first..].iter().take_while(|r| r.start < range.end()) {
        if r.start > start {
            parts.push((Range { start, len: r.start - start }, false));
        }
        let (from, end) = (start.max(r.start), r.end().min(range.end()));
        parts.push((Range { start: from, len: end - from }, true));
        start = end;
    }
    if start < range.end() {
        parts.push((Range { start, len: range.end() - start }, false));
    }
    parts
}

/// Takes `holes` out of `ranges`; returns how many bytes that were.
pub fn subtract(ranges: &mut Vec<Range>, holes: &[Range]) -> u64 {
    if holes.is_empty() {
        return 0;
    }
    let (mut left, mut taken) = (Vec::with_capacity(ranges.len()), 0);
    for (part, within) in ranges.iter().flat_map(|range| parts(*range, holes)) {
        if within { taken += part.len } else { left.push(part) }
    }
    *ranges = left;
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::PAGE;

    fn disjoint(lengths: &[(u64, u64)]) -> Vec<Range> {
        let mut at = 0;
        let next = |&(gap, len): &(u64, u64)| {
            let start = at + gap * PAGE;
            at = start + len * PAGE;
            Range { start, len: len * PAGE }
        };
        lengths.iter().map(next).collect()
    }

    fn pages(ranges: &[Range]) -> Vec<u64> {
        ranges.iter().flat_map(|r| (r.start..r.end()).step_by(PAGE as usize)).collect()
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_is_in_no_hole(
            runs in prop::collection::vec((0u64..5, 1u64..8), 0..20),
            holes in prop::collection::vec((0u64..5, 1u64..8), 0..20),
        ) {
            let (mut runs, holes) = (disjoint(&runs), disjoint(&holes));
            let (before, out) = (pages(&runs), pages(&holes));
            let taken = subtract(&mut runs, &holes);
            let want: Vec<u64> = before.iter().copied().filter(|p| !out.contains(p)).collect();
            prop_assert_eq!(taken, (before.len() - want.len()) as u64 * PAGE);
            prop_assert_eq!(pages(&runs), want);
        }

        #[test]
        fn batches_hold_all_in_order_and_each_but_the_last_is_full(
            runs in prop::collection::vec((0u64..5, 1u64..8), 0..20),
            most in 1u64..10, count in 1usize..5,
        ) {
            let runs = disjoint(&runs);
            let batches = batches(runs.iter().copied(), most * PAGE, count);
            prop_assert_eq!(pages(&batches.concat()), pages(&runs));
            let is_full = |b: &Vec<Range>| pages(b).len() as u64 == most || b.len() == count;
            prop_assert!(batches.iter().rev().skip(1).all(is_full));
            let fits = |b: &Vec<Range>| pages(b).len() as u64 <= most && b.len() <= count;
            prop_assert!(batches.iter().all(fits));
        }

        #[test]
        fn a_run_is_cut_into_what_is_in_a_range_and_what_is_not(
            start in 0u64..40, len in 1u64..60,
            ranges in prop::collection::vec((0u64..5, 1u64..8), 0..20),
        ) {
            let (run, ranges) = (Range { start: start * PAGE, len: len * PAGE }, disjoint(&ranges));
            let cut = parts(run, &ranges);
            let all: Vec<Range> = cut.iter().map(|c| c.0).collect();
            prop_assert_eq!(pages(&all), pages(&[run]));
            let within = pages(&ranges);
            for (part, merged) in cut {
                prop_assert!(pages(&[part]).iter().all(|p| within.contains(p) == merged));
            }
        }
    }
}
