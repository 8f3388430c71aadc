//! Windows and pieces: into what a VM's RAM is cut for the threads, and which parts of it a
//! sample or a spot check reads. How large they are is set here.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ebb_core::range::parts;

use super::Job;
use crate::scan::Target;
use crate::sys::Range;

/// What a thread takes at a time. Its pages are listed right before they are
/// read, so few have gone when their turn comes.
pub(super) const WINDOW: u64 = 32 << 20;
/// What a thread takes at a time where work is gentle: a huge page, which is not cut.
pub(super) const GENTLE_WINDOW: u64 = 2 << 20;
/// What is copied at a time: fits the second-level cache.
pub(super) const PIECE: u64 = 1 << 20;
/// What is copied at a time where work is gentle: ten to thirty microseconds.
pub(super) const GENTLE_PIECE: u64 = 64 << 10;
/// What is read at a time where work is gentle and only lines are read.
pub(super) const GENTLE_LINES: u64 = 512 << 10;
/// What a sample reads at a time.
pub(super) const SAMPLE: u64 = 64 << 10;
/// What a spot check reads at a time.
const SPOT_CHECK: u64 = 16 << 10;
/// What a thread takes at a time of a spot check with an agent: a few hundred pieces.
pub(super) const SPOT_CHECK_WINDOW: u64 = 1 << 30;

/// What of a VM is still to be done.
pub(super) struct Windows {
    all: Vec<Range>,
    next: AtomicUsize,
}

impl Windows {
    /// None is partly in one of these ranges.
    pub(super) fn of(target: &Target, ranges: &[Range], size: u64) -> Windows {
        let parts = target.ram.iter().flat_map(|r| parts(*r, ranges));
        // Aligned, so that no block and no huge page is cut.
        let all = parts.flat_map(|(range, _)| range.pieces(size)).collect();
        Windows { all, next: AtomicUsize::new(0) }
    }

    pub(super) fn take(&self) -> Option<Range> {
        self.all.get(self.next.fetch_add(1, Relaxed)).copied()
    }
}

impl Job<'_> {
    /// The pieces of a sample, chosen by the key: no guest can tell which.
    pub(super) fn sample(&self, vm: usize, runs: &[Range], size: u64) -> Vec<Range> {
        let one_in = self.options.one_in();
        let place = |start: u64| (start / size).wrapping_add(self.options.salt << 48);
        let chosen =
            |piece: &Range| self.key.mix(vm as u64, place(piece.start)).is_multiple_of(one_in);
        runs.iter().flat_map(|run| run.pieces(size)).filter(chosen).collect()
    }

    /// The pieces of a spot check: one of each stretch, so that all of a stretch cannot change
    /// unseen.
    pub(super) fn spot_check_pieces(&self, vm: usize, window: Range) -> Vec<Range> {
        let one_in = self.options.one_in();
        let stretch = SPOT_CHECK * one_in;
        let piece = |start: u64| {
            let place = (start / stretch).wrapping_add(self.options.salt << 48);
            let chosen = self.key.mix(vm as u64, place) % one_in;
            let from = (start + chosen * SPOT_CHECK).max(window.start);
            let end = (start + (chosen + 1) * SPOT_CHECK).min(window.end());
            (from < end).then(|| Range { start: from, len: end - from })
        };
        let first = window.start / stretch * stretch;
        (first..window.end()).step_by(stretch as usize).filter_map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::VmId;
    use ebb_core::units::{Bytes, PAGE};

    use super::*;

    #[test]
    fn windows_cover_all_ram_once_and_end_where_blocks_do() {
        let mut target = Target {
            id: VmId { pid: 1, start: 1 },
            name: "a".into(),
            group: "g".into(),
            ram: vec![
                Range { start: WINDOW - PAGE, len: 2 * WINDOW },
                Range { start: 9 * WINDOW, len: PAGE },
            ],
            merged: Vec::new(),
            open: Vec::new(),
            held: Bytes::ZERO,
        };
        let windows = Windows::of(&target, &[], WINDOW);
        let all: Vec<Range> = std::iter::from_fn(|| windows.take()).collect();
        assert_eq!(all.iter().map(|w| w.len).sum::<u64>(), 2 * WINDOW + PAGE);
        assert_eq!(all.len(), 4);
        assert!(all[..3].windows(2).all(|w| w[0].end() == w[1].start));
        assert_eq!(all[1].start % WINDOW, 0);
        target.ram.clear();
        assert!(Windows::of(&target, &[], WINDOW).take().is_none());
    }
}
