//! The handshake: from "the guest says it is free" to "the host has it".
//!
//! For each batch of runs that the map calls free and the host holds:
//!
//! 1. protect them against writes,
//! 2. read their bits again, and after that the state word, generation and beat,
//! 3. look whether a device that writes past the page tables has been opened, or, beside shared
//!    RAM, a Unix socket,
//! 4. discard what is still free,
//! 5. lift the protection, which wakes the threads that wait.
//!
//! (`docs/internals.md` and `ebb_abi.h` count the choice of runs as step 1.)
//!
//! The guest clears a bit before it writes; the host protects before it reads. So either the
//! host sees the cleared bit, or the guest's write waits. The map page is read once before the
//! protection, so that no page of it has to come from swap while writers wait.
//!
//! A *window* is open from step 1 to step 5. A write to a protected page waits until the window
//! closes, so windows are short: the size of the next one follows from the time that the last
//! one took. A window takes runs of several map pages if they fit. Where an order has a limit,
//! whole 2 MiB blocks come first in the whole map, then the rest, longer runs of a map page
//! before shorter ones.
//!
//! This file chooses what is taken, in which order and how much at once: that may change. The
//! steps are in `window.rs`, and their order must not change. `tests/model.rs`, `handshake.rs` and
//! `devices.rs` show what is lost without each.

mod marks;
mod window;

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use ebb_core::histogram::Histogram;
use ebb_core::units::Bytes;
use ebb_core::wire::abi::{self, MapPage, PAGE};
use ebb_core::wire::{Counters, HugePages, MOST_CLOSED, Recycle, Recycled};

use self::marks::Marks;
use self::window::{BLOCK, Batch, GAP, Grain, Run, weight_of};
use crate::blockers::Devices;
use crate::faults::Faults;
use crate::find_module::Live;
use crate::guard::Guard;
use crate::ksm_ranges::{LEAST_CLOSED, Open};
use crate::priority::Bursts;
use crate::ram::{Bits, Part, Ram, blocks, stretches, within};
use crate::sys::{self, Range};

/// How long a window is to take; a vCPU waits for about one window at most.
const WINDOW_GOAL: Duration = Duration::from_micros(1000);
/// Smallest and largest window, in what single pages cost.
const WEIGHT: std::ops::RangeInclusive<usize> = 256..=32768;
/// Most runs in a window: each may need a place of its own when their bits are read, and the
/// header needs one.
const RUNS_MAX: usize = sys::VECTOR_MAX - 1;

/// The size of the next window, in what single pages cost, and the pfn where the next call
/// begins.
#[derive(Clone, Copy, Debug)]
struct Pace {
    window: usize,
    next: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { window: 1024, next: 0 }
    }
}

/// What is kept from call to call.
#[derive(Debug, Default)]
pub struct Work {
    /// What has been free since the last mark.
    pub marks: Marks,
    pace: Pace,
    /// Since attach.
    pub counters: Counters,
    pub windows: Histogram,
}

/// What one call works with.
pub struct Recycler<'a> {
    pub ram: &'a Ram,
    pub guard: &'a Guard,
    /// The map, and its header as it was proven alive.
    pub proven: &'a Live,
    /// What is open to KSM: [`Recycler::run`] leaves it.
    pub open: &'a Open,
    pub work: &'a mut Work,
    /// Devices that were found harmless.
    pub devices: &'a mut Devices,
    /// While vCPUs run: the last beat, and when it was new.
    pub beat: Option<(u64, Instant)>,
    /// Nothing below this address is ever given back.
    pub early_end: u64,
    /// A device was found that writes past the page tables.
    pub found: Option<String>,
    /// Steps left out, in test builds.
    pub faults: Faults,
}

/// Pages that are never given back, whatever the map says: the RAM at these addresses is not the
/// guest's own. 192 to 320 KiB: SMRAM of q35. 640 KiB to 1 MiB: video memory, ROM, and SMRAM of
/// other machines.
const BELOW_1M: [std::ops::Range<u64>; 2] = [0x30..0x50, 0xa0..0x100];

/// Why a pass ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// As much was taken as was asked for.
    Enough,
    /// No window may be opened any more: time is up, or something more urgent waits.
    Late,
    /// Nothing more may be discarded in this call: the map is in doubt, a device or socket was
    /// opened, or a system call failed.
    Doubt,
}

struct Call<'a> {
    want: &'a Recycle,
    until: Instant,
    left: u64,
    interrupt: &'a mut dyn FnMut() -> bool,
    done: Recycled,
    bursts: Bursts,
    batch: Batch,
    /// What was discarded of the part whose huge pages are to be split.
    taken: Box<Bits>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    All,
    Whole,
    Rest,
}

/// What of a map page can be taken.
struct Choice {
    whole: Vec<Run>,
    rest: Vec<Run>,
    /// Huge pages that `rest` takes parts of, by their first bit.
    split: Vec<usize>,
    held: Box<Bits>,
}

impl Recycler<'_> {
    /// Gives back what `want` asks for. `interrupt` is asked between windows.
    pub fn run(&mut self, want: &Recycle, interrupt: &mut dyn FnMut() -> bool) -> Recycled {
        let (begun, cpu) = (Instant::now(), cpu_ns());
        self.found = None;
        let budget = want.budget_ms.min(ebb_core::wire::BUDGET_MS_MAX);
        let mut call = Call {
            want,
            until: begun + Duration::from_millis(budget),
            left: want.max_bytes.map_or(u64::MAX, |b| b.0 / PAGE),
            interrupt,
            done: Recycled::default(),
            bursts: Bursts::default(),
            batch: Batch::default(),
            taken: Box::new([0; abi::MAP_WORDS]),
        };
        // With a limit, what is whole anywhere comes before pieces.
        let passes: &[Pass] =
            if want.max_bytes.is_some() { &[Pass::Whole, Pass::Rest] } else { &[Pass::All] };
        // From where the last call ended, so that short budgets come round too.
        let pages = &self.proven.layout.pages;
        let (before, after) =
            pages.split_at(pages.partition_point(|p| p.pfn < self.work.pace.next));
        self.work.pace.next = 0;
        let one = |pass: &Pass| self.pass(*pass, after.iter().chain(before), &mut call);
        let stopped = passes.iter().find_map(one);
        if let Some(pfn) = stopped {
            self.work.pace.next = call.batch.first().map_or(pfn, |page| page.pfn);
            call.done.more = true;
        }
        call.done.ns = begun.elapsed().as_nanos() as u64;
        call.done.cpu_ns = cpu_ns().saturating_sub(cpu);
        call.done
    }

    /// One pass over the map pages. All that it found is taken before the next pass begins: a
    /// page that both found would be discarded twice in one window, the second time without
    /// protection. Gives the pfn of the map page where the pass had to stop.
    fn pass<'p>(
        &mut self,
        pass: Pass,
        pages: impl Iterator<Item = &'p MapPage>,
        call: &mut Call<'_>,
    ) -> Option<u64> {
        let mut last = 0;
        for page in pages {
            last = page.pfn;
            // Others may run between two windows, also where much is looked at in between.
            call.bursts.after_window();
            if (call.interrupt)() {
                return Some(last);
            }
            if Instant::now() >= call.until {
                // Each call gets on, however short its time is.
                if !call.batch.runs.is_empty() {
                    let _ = self.flush_once(call);
                }
                return Some(last);
            }
            if self.page(page, pass, call).is_err() {
                return Some(last);
            }
        }
        if pass == Pass::Whole && self.faults.no_flush() {
            return None;
        }
        match self.flush(call) {
            Ok(()) => None,
            Err(Stop::Late) if call.batch.runs.is_empty() => None,
            Err(_) => Some(last),
        }
    }

    fn page(&mut self, page: &MapPage, pass: Pass, call: &mut Call<'_>) -> Result<(), Stop> {
        let Some(bits) = self.ram.bits(page.gpa) else { return Err(Stop::Doubt) };
        let Some(free) = self.usable(page, bits, call.want) else { return Ok(()) };
        for part in self.ram.parts(page.pfn) {
            let choice = self.choose(&part, &free, call.want);
            if pass != Pass::Rest {
                self.take(page, &part, &choice.whole, call)?;
            }
            if pass != Pass::Whole && choice.split.is_empty() {
                self.take(page, &part, &choice.rest, call)?;
            } else if pass != Pass::Whole {
                self.flush(call)?;
                call.taken.fill(0);
                let taken = self.take(page, &part, &choice.rest, call);
                let taken = taken.and_then(|()| self.flush(call));
                self.split(&part, &choice, call);
                if taken.is_err() {
                    // What would be taken later would not be split; the next call finds it.
                    call.batch = Batch::default();
                }
                taken?;
            }
        }
        Ok(())
    }

    /// What of a part is free, held, and worth it.
    fn choose(&self, part: &Part, free: &Bits, want: &Recycle) -> Choice {
        let mut mask = Box::new(within(part, free));
        if !self.faults.no_apart() {
            self.open.mask(part, &mut mask);
        }
        let mut held = Box::new([0; abi::MAP_WORDS]);
        let mut huge = [0; abi::MAP_WORDS];
        let mut choice =
            Choice { whole: Vec::new(), rest: Vec::new(), split: Vec::new(), held: mask.clone() };
        if abi::count(&mask[..]) == 0 {
            return choice;
        }
        if self.faults.any_page() {
            held.fill(u64::MAX);
        } else if self.ram.held(part, &mut held, &mut huge).is_err() {
            return choice;
        }
        let offered = mask.clone();
        let mut emptied = Vec::new();
        mask.iter_mut().zip(held.iter()).for_each(|(m, h)| *m &= h);
        for (first, len) in blocks(part) {
            if abi::all_set(&offered[..], first, len) {
                emptied.push(first..first + len);
            }
            if abi::all_set(&mask[..], first, len) {
                abi::fill(&mut mask[..], first, len, false);
                let is_huge = self.ram.tells_huge(part) && abi::all_set(&huge, first, len);
                let grain = if is_huge { Grain::Huge } else { Grain::Blocks };
                match choice.whole.last_mut() {
                    Some(r) if r.first + r.len == first && r.grain == grain => r.len += len,
                    _ => choice.whole.push(Run { at: 0, first, len, grain }),
                }
            } else if abi::all_set(&huge, first, 1) {
                let n = count_in(&mask, first, len);
                if want.huge == HugePages::Split && n >= want.split_min_pages.max(1) as usize {
                    choice.split.push(first);
                } else if n > 0 {
                    abi::fill(&mut mask[..], first, len, false);
                }
            }
        }
        let min = want.min_run_pages.max(1) as usize;
        // What is left in a block that is free as a whole goes too: the next write to it finds
        // a huge page.
        let whole = |first: &usize| {
            let at = emptied.partition_point(|b| b.end <= *first);
            emptied.get(at).is_some_and(|b| b.contains(first))
        };
        let rest = abi::runs(&mask[..]).filter(|r| r.1 >= min || whole(&r.0));
        let run = |(first, len)| Run { at: 0, first, len, grain: Grain::Pages };
        choice.rest = rest.map(run).collect();
        if want.max_bytes.is_some() {
            choice.rest.sort_by_key(|r| Reverse(r.len));
        }
        choice.held = held;
        choice
    }

    /// Takes runs of a part: puts them into the batch, and takes that whenever it is full.
    fn take(
        &mut self,
        page: &MapPage,
        part: &Part,
        runs: &[Run],
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        for run in runs {
            let (unit, cost) = (run.grain.unit(), run.grain.cost());
            let mut run = *run;
            while run.len > 0 {
                let empty = call.batch.runs.is_empty();
                let weight = call.batch.weight_with(page, part);
                // One unit goes, however small a window is to be.
                let least = if empty { cost } else { 0 };
                let room = self.work.pace.window.saturating_sub(weight).max(least) / cost * unit;
                let left = usize::try_from(call.left).unwrap_or(usize::MAX) / unit * unit;
                let len = run.len.min(room).min(left);
                if len > 0 && call.batch.runs.len() < RUNS_MAX {
                    call.batch.add(page, part, Run { len, ..run });
                    call.left -= len as u64;
                    run = Run { first: run.first + len, len: run.len - len, ..run };
                } else if empty {
                    // Less than a block is left to take: pieces may still fit.
                    return if unit > 1 { Ok(()) } else { Err(Stop::Enough) };
                } else {
                    // What one window leaves goes with what comes.
                    self.flush_once(call)?;
                }
            }
        }
        Ok(())
    }

    /// Takes all runs of the batch.
    fn flush(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        while !call.batch.runs.is_empty() {
            self.flush_once(call)?;
        }
        Ok(())
    }

    /// Takes as many as one window can, at least one.
    fn flush_once(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let batch = std::mem::take(&mut call.batch);
        let taken = self.one_window(&batch, call);
        call.batch = batch;
        call.batch.done(taken?);
        let late = (call.interrupt)() || Instant::now() >= call.until;
        if late { Err(Stop::Late) } else { Ok(()) }
    }

    /// Takes runs of a batch, as many as fit; gives their number.
    fn one_window(&mut self, batch: &Batch, call: &mut Call<'_>) -> Result<usize, Stop> {
        let runs = batch.first_runs(self.work.pace.window);
        // Brings the map's pages in, so that nothing in the window waits for them.
        if let Err(stop) = self.read_again(batch, runs) {
            self.work.counters.dropped_batches += 1;
            return Err(stop);
        }
        call.bursts.before_window();
        let open = self.guard.open();
        let begun = Instant::now();
        let found = self.window(batch, runs, call);
        let took = begun.elapsed();
        drop(open);
        call.bursts.after_window();
        let took_ns = took.as_nanos() as u64;
        call.done.window_ns += took_ns;
        let work = &mut *self.work;
        work.windows.add(took_ns);
        work.counters.batches += 1;
        work.counters.window_max_ns = work.counters.window_max_ns.max(took_ns);
        let taken = found.unwrap_or(0);
        let done = weight_of(&runs[..taken]);
        let next = next_pace(work.pace.window, (done, taken < runs.len()), took);
        work.pace.window = next.clamp(*WEIGHT.start(), *WEIGHT.end());
        if found.is_err() {
            work.counters.dropped_batches += 1;
        }
        found
    }

    /// Clears the bits of pages that are never given back: those that may be written before a
    /// tripwire is, the tripwires, and [`BELOW_1M`].
    fn keep_usable(&self, page: &MapPage, bits: &mut Bits) {
        let early = 0..if self.faults.no_early() { 0 } else { self.early_end.div_ceil(PAGE) };
        let wires = self.guard.wires();
        // Nor what lies so near to one that lifting it might lift the tripwire.
        let near = |pfn: u64| pfn.saturating_sub(GAP as u64)..=pfn + GAP as u64;
        let kept = wires.iter().flat_map(|(gpa, _)| near(gpa / PAGE)).chain(early);
        let kept = kept.chain(BELOW_1M.into_iter().flatten());
        for pfn in kept.filter(|pfn| (page.pfn..page.pfn + abi::MAP_PFNS).contains(pfn)) {
            let at = (pfn - page.pfn) as usize;
            bits[at / 64] &= !(1 << (at % 64));
        }
    }

    /// Splits the huge pages that were given back in part: the host has those
    /// parts only then. One page of each that is still mapped is marked cold.
    fn split(&mut self, part: &Part, choice: &Choice, call: &mut Call<'_>) {
        for block in &choice.split {
            let mut bits = *block..*block + BLOCK;
            let touched = count_in(&call.taken, *block, BLOCK) > 0;
            let one = bits.find(|b| touched && bit(&choice.held, *b) && !bit(&call.taken, *b));
            if one.is_some_and(|bit| sys::cold(part.range(bit, 1)).is_ok()) {
                call.done.splits += 1;
                self.work.counters.splits += 1;
            }
        }
    }

    /// What is free by the map; with `held`, how much of it the host holds and can be recycled, and
    /// how much of that is in huge pages that the guest uses in part.
    pub fn free(&self, held: bool) -> Option<(Bytes, Option<(Bytes, Bytes)>)> {
        let (mut free, mut kept, mut partial) = (0, 0, 0);
        for page in &self.proven.layout.pages {
            let mut bits = self.ram.bits(page.gpa)?;
            self.keep_usable(page, &mut bits);
            for part in self.ram.parts(page.pfn) {
                let mut mask = within(&part, &bits);
                free += abi::count(&mask);
                if held {
                    let (here, huge) = self.held(&part, &mask)?;
                    mask.iter_mut().zip(&here).for_each(|(m, h)| *m &= h);
                    self.open.clear_kept(&part, &mut mask);
                    kept += abi::count(&mask);
                    let partly = |&(first, len): &(usize, usize)| {
                        count_in(&huge, first, len) > 0 && !abi::all_set(&mask, first, len)
                    };
                    let some = blocks(&part).filter(|b| self.ram.tells_huge(&part) && partly(b));
                    partial += some.map(|(first, len)| count_in(&mask, first, len)).sum::<usize>();
                }
            }
        }
        let kept = (Bytes::pages(kept), Bytes::pages(partial as u64));
        Some((Bytes::pages(free), held.then_some(kept)))
    }

    /// What is open to KSM, free and held, as far as `want` may take it: ranges, in the map's order.
    /// No more than `want` takes, and than [`MOST_CLOSED`].
    pub fn free_and_open(&self, want: &Recycle) -> Vec<Range> {
        let least = LEAST_CLOSED.max(want.min_run_pages as usize);
        let most = want.max_bytes.unwrap_or(MOST_CLOSED).min(want.room_to_close());
        let (mut found, mut left) = (Vec::new(), (most.0 / PAGE) as usize);
        for page in &self.proven.layout.pages {
            let free = self.ram.bits(page.gpa).and_then(|bits| self.usable(page, bits, want));
            let Some(free) = free else { continue };
            for part in self.ram.parts(page.pfn) {
                let mut open = self.open.of(&part, &within(&part, &free));
                let Some((here, _)) = self.held(&part, &open) else { continue };
                open.iter_mut().zip(&here).for_each(|(o, h)| *o &= h);
                for (first, len) in abi::runs(&open).filter(|r| r.1 >= least) {
                    if left < least {
                        return found;
                    }
                    let len = len.min(left);
                    left -= len;
                    found.push(part.range(first, len));
                }
            }
        }
        found
    }

    /// What the host holds of the stretches of a part in which these bits are, and what of it is
    /// in huge pages.
    fn held(&self, part: &Part, bits: &Bits) -> Option<(Bits, Bits)> {
        let (mut here, mut huge) = ([0; abi::MAP_WORDS], [0; abi::MAP_WORDS]);
        for some in stretches(part, bits) {
            self.ram.held(&some, &mut here, &mut huge).ok()?;
        }
        Some((here, huge))
    }

    /// The free pages of a map page that `want` may take; `None`: the last mark had no such page.
    fn usable(&self, page: &MapPage, mut free: Bits, want: &Recycle) -> Option<Bits> {
        self.keep_usable(page, &mut free);
        if want.marked {
            self.work.marks.keep_marked(page.pfn, &mut free)?;
        }
        Some(free)
    }

    /// Remembers what is free now, for `marked`; `None`: the map cannot be read.
    pub fn mark(&mut self) -> Option<()> {
        self.work.marks.mark(self.ram, &self.proven.layout.pages, Instant::now())
    }

    /// Forgets what is in use now of what was marked.
    pub fn look_at_marks(&mut self, now: Instant) {
        self.work.marks.look(self.ram, &self.proven.layout.pages, now);
    }
}

/// The size of the next window. `done`: how much the last one handled; `less`: that it did not
/// come to the end of its batch.
fn next_pace(pace: usize, (done, less): (usize, bool), took: Duration) -> usize {
    if done == 0 {
        return if took > WINDOW_GOAL { pace / 8 } else { pace };
    }
    let fits = (done as f64 * WINDOW_GOAL.as_secs_f64() / took.as_secs_f64().max(1e-6)) as usize;
    if less || took > WINDOW_GOAL {
        fits.clamp(pace / 8, pace)
    } else {
        // One that had little to do tells nothing of larger ones.
        fits.clamp(pace, pace * 2)
    }
}

/// Processor time of this thread so far.
pub fn cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn bit(bits: &Bits, at: usize) -> bool {
    bits[at / 64] >> (at % 64) & 1 == 1
}

fn count_in(bits: &Bits, first: usize, len: usize) -> usize {
    (first..first + len).filter(|b| bit(bits, *b)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_as_large_as_takes_the_time_that_they_may() {
        let next =
            |done, less, of_goal: f64| next_pace(1000, (done, less), WINDOW_GOAL.mul_f64(of_goal));
        assert_eq!((next(1000, false, 0.8), next(1000, false, 0.1)), (1250, 2000));
        assert_eq!((next(1000, false, 2.0), next(1000, false, 50.0)), (500, 125));
        assert_eq!(next(100, false, 0.5), 1000, "one that had little to do tells nothing");
        assert_eq!(next(300, true, 0.5), 600, "protecting took all the time there was");
        assert_eq!((next(0, true, 0.5), next(0, true, 2.0)), (1000, 125), "one that failed");
    }
}
