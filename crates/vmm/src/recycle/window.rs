//! One window: protect, read again, look for devices, discard, lift.
//!
//! The order is what keeps guest data; `recycle/mod.rs` tells why.

use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_core::wire::abi::{self, GuestState, HEADER_BYTES, LivePart, MapPage, PAGE};

use super::{Call, Recycler, Stop, bit};
use crate::guard::Guard;
use crate::ram::{Bits, Kind, Part};
use crate::sys;

/// A map whose beat is this many times its own tick old is not used while vCPUs run.
const BEATS_MISSED: u32 = 3;
/// Protecting takes no longer than this and a few runs: the runs that are left have a window of
/// their own. A run takes 1 µs, and ten times as long where other CPUs have to be interrupted
/// for it.
const PROTECT_LONG: Duration = Duration::from_micros(600);
/// So many runs are protected between two looks at the clock.
const PROTECT_RUNS: usize = 8;
/// Runs no further apart are lifted with one call: it costs as much as looking at
/// four pages in between (300 and 1,300 cycles on Linux 6.18).
const GAP: usize = 3;
/// What a call costs as much as, in pages, beyond those it is about.
pub(super) const RUN_COST: usize = 8;
/// Pages in a block of 2 MiB.
pub(super) const BLOCK: usize = 512;

/// In what a run is counted, and what that costs.
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

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Which part of the batch it lies in.
    pub at: usize,
    /// First bit of the map page.
    pub first: usize,
    /// How many pages.
    pub len: usize,
    pub grain: Grain,
}

impl Run {
    /// What it costs, in pages.
    pub(super) fn weight(&self) -> usize {
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
    /// Adds a run of a part.
    pub(super) fn add(&mut self, page: &MapPage, part: &Part, run: Run) {
        let same = |(p, of): &&(MapPage, Part)| p.pfn == page.pfn && of.piece == part.piece;
        if self.parts.last().filter(same).is_none() {
            self.parts.push((*page, *part));
        }
        self.weight += run.weight();
        self.runs.push(Run { at: self.parts.len() - 1, ..run });
    }

    /// Forgets the first runs, which are done.
    pub(super) fn done(&mut self, runs: usize) {
        let done: usize = self.runs.drain(..runs).map(|r| r.weight()).sum();
        self.weight -= done;
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

/// The runs of each part.
fn by_part(runs: &[Run]) -> impl Iterator<Item = &[Run]> {
    runs.chunk_by(|a, b| a.at == b.at)
}

impl Recycler<'_> {
    /// What is done in a window that is open: protect, read again, look, discard, lift. Gives how
    /// many runs of the batch it was about.
    pub(super) fn window(&mut self, batch: &Batch, call: &mut Call<'_>) -> Result<usize, Stop> {
        let mut lifted =
            Lift { guard: self.guard, batch, runs: &batch.runs, discarded: Vec::new() };
        let runs = &batch.runs[..self.protect(batch)?];
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
        let (bytes, saved) = (Bytes::pages(pages as u64), (all - pages) as u64);
        call.done.bytes += bytes;
        call.done.runs += ranges.len() as u64;
        call.done.saved_pages += saved;
        self.counters.recycled += bytes;
        self.counters.runs += ranges.len() as u64;
        self.counters.saved_pages += saved;
        // Nothing of anonymous memory that was discarded is protected any more.
        let anonymous = matches!(self.ram.pieces()[part.piece].kind, Kind::Anonymous);
        let lift = |run: &Run| self.guard.uffd().lift(part.range(run.first, run.len)).is_ok();
        Ok(anonymous && kept.iter().all(lift))
    }

    /// Protects runs, as many as there is time for; gives their number.
    fn protect(&self, batch: &Batch) -> Result<usize, Stop> {
        if self.faults.no_protect() {
            return Ok(batch.runs.len());
        }
        let begun = Instant::now();
        for (i, run) in batch.runs.iter().enumerate() {
            if i > 0 && i.is_multiple_of(PROTECT_RUNS) && begun.elapsed() > PROTECT_LONG {
                return Ok(i);
            }
            let range = batch.parts[run.at].1.range(run.first, run.len);
            self.guard.uffd().protect(range).map_err(|_| Stop::Doubt)?;
        }
        Ok(batch.runs.len())
    }

    /// What pins memory from now on waits for the end of the window; what did before is
    /// seen here.
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
            places.push((map + first as u64 * 8, (end - first) * 8));
            words.push(first..end);
        }
        places.push((self.ram.hva(self.header.gpa, PAGE).ok_or(Stop::Doubt)?, HEADER_BYTES));
        let mut bytes = vec![0; places.iter().map(|p| p.1).sum()];
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
                && bytes[..abi::STATIC_BYTES] == self.header.fixed
                && live.state == GuestState::Running
                && live.generation == self.layout.generation)
    }

    /// Whether the guest has beaten lately, if its vCPUs run. Where they stand still
    /// unknown to the daemon, a snapshot may be being loaded over this map.
    fn beats(&mut self, live: &LivePart) -> bool {
        let Some((last, at)) = &mut self.beat else { return true };
        let now = Instant::now();
        if live.beat != *last && live.beats_right(self.header.key) {
            (*last, *at) = (live.beat, now);
        }
        let most = Duration::from_millis(live.tick_ms.into()) * BEATS_MISSED;
        self.faults.no_beats() || now.duration_since(*at) <= most
    }
}

/// The parts of a run whose bits are set.
fn still_free(bits: &Bits, run: &Run, mut each: impl FnMut(usize, usize)) {
    let (mut at, end) = (run.first, run.first + run.len);
    if abi::all_set(bits, run.first, run.len) {
        return each(run.first, run.len);
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
        let uffd = self.guard.uffd();
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
