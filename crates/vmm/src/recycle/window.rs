//! One window: protect, read again, look for devices, discard, lift.
//!
//! Guest data is safe because of the order of these steps; `recycle/mod.rs` says why. If the
//! order changes, `tests/model.rs` must change with it. A new step needs a switch in `faults.rs`
//! that leaves it out, so that a test can show what it prevents.

use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_core::wire::abi::{self, GuestState, HEADER_BYTES, LivePart, MapPage, PAGE};

use super::{Call, Recycler, Stop, bit};
use crate::guard::Guard;
use crate::ram::{Bits, Kind, Part};
use crate::sys;

/// A map whose beat is this many times its own tick old is not used while vCPUs run.
const BEATS_MISSED: u32 = 3;
/// When protecting has taken so long, no more runs are protected. The runs that are left stay in
/// the batch for the next window. To protect a run takes 1 µs, and ten times as long where other
/// CPUs have to be interrupted for it.
const PROTECT_LONG: Duration = Duration::from_micros(550);
/// After so much the clock is read, in single pages of a long run.
const PROTECT_LOOK: usize = 8 * RUN_COST;
/// Runs no further apart are lifted with one call: it costs as much as looking at
/// four pages in between (300 and 1,300 cycles on Linux 6.18).
pub(super) const GAP: usize = 3;
/// What each run costs beside its pages (system calls), in pages.
const RUN_COST: usize = 8;
/// What another part costs as much as: its bits are read apart, and it is woken apart.
const PART_COST: usize = 16;
/// Pages in a block of 2 MiB.
pub(super) const BLOCK: usize = 512;

/// The unit in which a run is cut, and what a unit costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grain {
    /// Pages of 4 KiB, any number of them.
    Pages,
    /// Whole blocks that pages of 4 KiB map.
    Blocks,
    /// Whole blocks that huge pages map.
    Huge,
}

impl Grain {
    /// A run is a multiple of so many pages.
    pub(super) fn unit(self) -> usize {
        if self == Grain::Pages { 1 } else { BLOCK }
    }

    /// What a unit costs as much as, in single pages of a long run. A huge page takes 17,000
    /// cycles and a page 1,000 (Linux 6.18).
    pub(super) fn cost(self) -> usize {
        match self {
            Grain::Pages => 1,
            Grain::Blocks => BLOCK,
            Grain::Huge => 20,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Which part of the batch it lies in.
    pub at: usize,
    /// First bit of the map page.
    pub first: usize,
    pub len: usize,
    pub grain: Grain,
}

impl Run {
    /// What it costs, in pages.
    fn weight(&self) -> usize {
        self.len / self.grain.unit() * self.grain.cost() + RUN_COST
    }
}

/// The runs that the next window is to take: of one part or of several.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Parts with their map pages.
    pub parts: Vec<(MapPage, Part)>,
    /// In the order of their parts.
    pub runs: Vec<Run>,
    /// Of all of them.
    pub weight: usize,
}

impl Batch {
    fn is_last(&self, page: &MapPage, part: &Part) -> bool {
        let same = |(p, of): &(MapPage, Part)| p.pfn == page.pfn && of.piece == part.piece;
        !self.runs.is_empty() && self.parts.last().is_some_and(same)
    }

    /// What it weighs with a run of no pages of this part.
    pub(super) fn weight_with(&self, page: &MapPage, part: &Part) -> usize {
        let part = if self.is_last(page, part) { 0 } else { PART_COST };
        self.weight + part + RUN_COST
    }

    /// Adds a run of a part.
    pub(super) fn add(&mut self, page: &MapPage, part: &Part, run: Run) {
        if !self.is_last(page, part) {
            self.parts.push((*page, *part));
            self.weight += PART_COST;
        }
        self.weight += run.weight();
        self.runs.push(Run { at: self.parts.len() - 1, ..run });
    }

    /// Those from the front that are no heavier than that, and one at least.
    pub(super) fn first_runs(&self, weight: usize) -> &[Run] {
        let mut all = 0;
        let mut last = None;
        let fits = self.runs.iter().take_while(|run| {
            let part = if last.replace(run.at) == Some(run.at) { 0 } else { PART_COST };
            all += run.weight() + part;
            all <= weight
        });
        &self.runs[..fits.count().max(1).min(self.runs.len())]
    }

    /// Forgets the first runs, which are done.
    pub(super) fn done(&mut self, runs: usize) {
        self.runs.drain(..runs);
        self.weight = weight_of(&self.runs);
        // Parts before the first run that is left stay, so that the others keep their places.
        if self.runs.is_empty() {
            self.parts.clear();
        }
    }

    /// The map page of the first run.
    pub(super) fn first(&self) -> Option<&MapPage> {
        self.runs.first().map(|r| &self.parts[r.at].0)
    }
}

/// What runs weigh, in single pages of a long run.
pub(super) fn weight_of(runs: &[Run]) -> usize {
    runs.iter().map(Run::weight).sum::<usize>() + by_part(runs).count() * PART_COST
}

/// The runs of each part.
fn by_part(runs: &[Run]) -> impl Iterator<Item = &[Run]> {
    runs.chunk_by(|a, b| a.at == b.at)
}

impl Recycler<'_> {
    /// What is done in a window that is open: protect, read again, look, discard, lift. Gives how
    /// many of these runs of the batch it was about.
    pub(super) fn window(
        &mut self,
        batch: &Batch,
        runs: &[Run],
        call: &mut Call<'_>,
    ) -> Result<usize, Stop> {
        let mut lifted = Lift { guard: self.guard, batch, runs, discarded: Vec::new() };
        let runs = &runs[..self.protect(batch, runs)?];
        lifted.runs = runs;
        let bits = self.read_again(batch, runs)?;
        self.look_for_devices()?;
        self.faults.widen();
        for (runs, bits) in by_part(runs).zip(&bits) {
            let discarded = self.discard(batch, runs, bits, call)?;
            lifted.discarded.push(discarded);
        }
        Ok(runs.len())
    }

    /// Discards what is still free of some runs of one part. Gives whether nothing of them is
    /// protected any more.
    fn discard(
        &mut self,
        batch: &Batch,
        runs: &[Run],
        bits: &Bits,
        call: &mut Call<'_>,
    ) -> Result<bool, Stop> {
        let part = &batch.parts[runs[0].at].1;
        let (mut ranges, mut kept) = (Vec::with_capacity(runs.len()), Vec::new());
        let mut pages = 0;
        for run in runs {
            let before = pages;
            still_free(bits, run, |first, len| {
                pages += len;
                ranges.push(part.range(first, len));
                abi::fill(&mut call.taken[..], first, len, true);
            });
            if pages - before < run.len {
                kept.push(*run);
            }
        }
        if !self.ram.discard(part.piece, &ranges) {
            return Err(Stop::Doubt);
        }
        let all: usize = runs.iter().map(|r| r.len).sum();
        let bytes = Bytes::pages(pages as u64);
        call.done.bytes += bytes;
        call.done.runs += ranges.len() as u64;
        self.work.counters.recycled += bytes;
        self.work.counters.runs += ranges.len() as u64;
        self.work.counters.saved_pages += (all - pages) as u64;
        // Nothing of anonymous memory that was discarded is protected any more.
        let anonymous = matches!(self.ram.pieces[part.piece].kind, Kind::Anonymous);
        let lift = |run: &Run| self.guard.uffd.lift(part.range(run.first, run.len)).is_ok();
        Ok(anonymous && kept.iter().all(lift))
    }

    /// Protects runs, as many as there is time for; gives their number.
    fn protect(&self, batch: &Batch, runs: &[Run]) -> Result<usize, Stop> {
        if self.faults.no_protect() {
            return Ok(runs.len());
        }
        let begun = Instant::now();
        let mut unlooked = 0;
        for (i, run) in runs.iter().enumerate() {
            if unlooked >= PROTECT_LOOK {
                if begun.elapsed() > PROTECT_LONG {
                    return Ok(i);
                }
                unlooked = 0;
            }
            unlooked += run.weight();
            let range = batch.parts[run.at].1.range(run.first, run.len);
            self.guard.uffd.protect(range).map_err(|_| Stop::Doubt)?;
        }
        Ok(runs.len())
    }

    /// A device that has pinned a page before the protection has its file open by now: it is
    /// seen here. A later pin of a protected page fails or waits (`device_watch.rs`). Beside shared RAM
    /// a new Unix socket ends the window too.
    fn look_for_devices(&mut self) -> Result<(), Stop> {
        if self.faults.no_devices() {
            return Ok(());
        }
        self.devices.look_at_new().map_err(|found| {
            self.found = found;
            Stop::Doubt
        })
    }

    /// The bits of each part of a batch and then the header's word on them, in this order.
    pub(super) fn read_again(
        &mut self,
        batch: &Batch,
        runs: &[Run],
    ) -> Result<Vec<Box<Bits>>, Stop> {
        let (mut places, mut words) = (Vec::new(), Vec::new());
        for runs in by_part(runs) {
            let first = runs.iter().map(|r| r.first).min().unwrap_or(0) / 64;
            let end = runs.iter().map(|r| r.first + r.len).max().unwrap_or(0).div_ceil(64);
            let (page, _) = &batch.parts[runs[0].at];
            let map = self.ram.hva(page.gpa, PAGE).ok_or(Stop::Doubt)?;
            places.push(sys::place(map + first as u64 * 8, (end - first) * 8));
            words.push(first..end);
        }
        let header = self.ram.hva(self.proven.header.gpa, PAGE).ok_or(Stop::Doubt)?;
        places.push(sys::place(header, HEADER_BYTES));
        let mut bytes = vec![0; places.iter().map(|p| p.iov_len).sum()];
        sys::copy_from(&places, &mut bytes).map_err(|_| Stop::Doubt)?;
        let (maps, header) = bytes.split_last_chunk::<HEADER_BYTES>().ok_or(Stop::Doubt)?;
        let mut read = maps.chunks_exact(8);
        let bits = words.into_iter().map(|words| {
            let mut bits = Box::new([u64::MAX; abi::MAP_WORDS]);
            for (word, eight) in bits[words].iter_mut().zip(&mut read) {
                if !self.faults.no_reread() {
                    *word = u64::from_le_bytes(eight.try_into().unwrap_or_default());
                }
            }
            bits
        });
        let bits = bits.collect();
        self.still_good(header).then_some(bits).ok_or(Stop::Doubt)
    }

    /// Whether the header is the one that was proven alive, and records.
    fn still_good(&mut self, bytes: &[u8; HEADER_BYTES]) -> bool {
        let live = LivePart::parse(bytes);
        self.faults.no_doubt()
            || (!self.guard.tripped()
                && self.beats(&live)
                && bytes[..abi::STATIC_BYTES] == self.proven.header.fixed
                && live.state == GuestState::Running
                && live.generation == self.proven.layout.generation)
    }

    /// Whether the module has beaten lately, if the daemon says that the vCPUs run. If it has
    /// not, the vCPUs may have stopped before the daemon said so, and QEMU may be loading a
    /// snapshot over this map.
    fn beats(&mut self, live: &LivePart) -> bool {
        let Some((last, at)) = &mut self.beat else { return true };
        let now = Instant::now();
        if live.beat != *last && live.beats_right(self.proven.header.key) {
            (*last, *at) = (live.beat, now);
        }
        let most = Duration::from_millis(live.tick_ms.into()) * BEATS_MISSED;
        self.faults.no_beats() || now.duration_since(*at) <= most
    }
}

/// The parts of a run whose bits are set. Of a huge page all are, or it stays as it is.
fn still_free(bits: &Bits, run: &Run, mut each: impl FnMut(usize, usize)) {
    let (mut at, end) = (run.first, run.first + run.len);
    if abi::all_set(bits, run.first, run.len) {
        return each(run.first, run.len);
    }
    if run.grain == Grain::Huge {
        let whole = |first: &usize| abi::all_set(bits, *first, BLOCK);
        return (at..end).step_by(BLOCK).filter(whole).for_each(|first| each(first, BLOCK));
    }
    while at < end {
        let set = |b: &usize| bit(bits, *b);
        let first = (at..end).find(set).unwrap_or(end);
        let stop = (first..end).find(|b| !set(b)).unwrap_or(end);
        if stop > first {
            each(first, stop - first);
        }
        at = stop;
    }
}

/// Lifts the protection of a batch, whatever happened in between.
struct Lift<'a> {
    guard: &'a Guard,
    batch: &'a Batch,
    runs: &'a [Run],
    /// Of the first parts: whether nothing of them is protected any more.
    discarded: Vec<bool>,
}

impl Drop for Lift<'_> {
    fn drop(&mut self) {
        for (i, runs) in by_part(self.runs).enumerate() {
            let part = &self.batch.parts[runs[0].at].1;
            self.lift(part, runs, self.discarded.get(i).is_some_and(|d| *d));
        }
    }
}

impl Lift<'_> {
    fn lift(&self, part: &Part, runs: &[Run], wake_only: bool) {
        let uffd = &self.guard.uffd;
        let first = runs.iter().map(|r| r.first).min().unwrap_or(0);
        let end = runs.iter().map(|r| r.first + r.len).max().unwrap_or(first);
        if wake_only && end > first {
            let _ = uffd.wake(part.range(first, end - first));
            return;
        }
        // Lifting what is not protected does no harm and costs less than a call.
        let mut runs: Vec<Run> = runs.to_vec();
        runs.sort_unstable_by_key(|r| r.first);
        let mut runs = runs.into_iter().peekable();
        while let Some(mut span) = runs.next() {
            while let Some(next) = runs.next_if(|n| n.first <= span.first + span.len + GAP) {
                span.len = next.first + next.len - span.first;
            }
            let _ = uffd.lift(part.range(span.first, span.len));
        }
    }
}
