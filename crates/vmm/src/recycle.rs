//! The handshake: from "the guest says it is free" to "the host has it".
//!
//! For each batch of runs that the map calls free and the host holds:
//!
//! 1. protect them against writes,
//! 2. read their bits again, and after that the state word, generation and beat,
//! 3. look whether a device that writes past the page tables has been opened,
//! 4. discard what is still free,
//! 5. lift the protection, which wakes who waits.
//!
//! The guest clears a bit before it writes, we protect before we read: one of
//! the two always sees the other. The map page is read once before the protection, so
//! that no page of it has to come from swap while writers wait.
//!
//! A write that meets an open window waits for it, so a window is short: the
//! number of pages in it follows the time that the last one took. Whole 2 MiB
//! blocks come first, then longer runs before shorter ones where there is a limit.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use ebb_core::histogram::Histogram;
use ebb_core::units::Bytes;
use ebb_core::wire::abi::{
    self, GuestState, HEADER_BYTES, Header, Layout, LivePart, MapPage, PAGE,
};
use ebb_core::wire::{Counters, HugePages, Recycle, Recycled};

use crate::blockers::{Devices, New};
use crate::faults::Faults;
use crate::guard::Guard;
use crate::ksm_ranges::Open;
use crate::priority::Bursts;
use crate::ram::{Bits, Kind, Part, Ram, blocks};
use crate::sys;

/// Windows are as large as takes so long; a vCPU waits no more than about one window.
const WINDOW_GOAL: Duration = Duration::from_micros(1100);
/// A map whose beat is this many times its own tick old is not used while vCPUs run.
const BEATS_MISSED: u32 = 3;
/// Protecting takes no longer than this and a few runs: the runs that are left have a window of
/// their own. A run takes 1 µs, and ten times as long where other CPUs have to be interrupted
/// for it.
const PROTECT_LONG: Duration = Duration::from_micros(400);
/// So many runs are protected between two looks at the clock.
const PROTECT_RUNS: usize = 8;
/// Pages that a call costs as much as, beyond those it is about.
const RUN_COST: usize = 8;
/// Smallest and largest window, in pages and [`RUN_COST`]s: 1 MiB, 128 MiB.
const WEIGHT: std::ops::RangeInclusive<usize> = 256..=32768;
/// Most runs in a window.
const RUNS_MAX: usize = sys::VECTOR_MAX;
const BLOCK: usize = 512;
/// Runs no further apart are lifted with one call: it costs as much as looking at
/// four pages in between (300 and 1,300 cycles on Linux 6.18).
const GAP: usize = 3;

/// A run of pages: first bit of the map page, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: usize,
    len: usize,
}

/// What the map pages said at the last mark, in the layout's order.
#[derive(Clone, Debug, Default)]
pub struct Marks(pub Vec<(u64, Box<Bits>)>);

impl Marks {
    fn of(&self, pfn: u64) -> Option<&Bits> {
        let at = self.0.binary_search_by_key(&pfn, |m| m.0).ok()?;
        Some(&self.0[at].1)
    }
}

/// Two window sizes (huge pages go a hundred times faster), and the pfn where the
/// next call begins.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    whole: usize,
    rest: usize,
    next: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { whole: 1040, rest: 1024, next: 0 }
    }
}

/// What one call works with.
pub struct Recycler<'a> {
    /// The VM's memory.
    pub ram: &'a Ram,
    /// Window and tripwire.
    pub guard: &'a Guard,
    /// As it was proven alive.
    pub header: &'a Header,
    /// Its map.
    pub layout: &'a Layout,
    /// The last mark.
    pub marks: &'a Marks,
    /// What is open to KSM and therefore stays.
    pub open: &'a Open,
    /// Window sizes, kept from call to call.
    pub pace: &'a mut Pace,
    /// Since attach.
    pub counters: &'a mut Counters,
    /// The same, of windows.
    pub windows: &'a mut Histogram,
    /// Devices that were found harmless.
    pub devices: &'a mut Devices,
    /// While vCPUs run: the last beat, and when it was new.
    pub beat: Option<(u64, Instant)>,
    /// What is never given back: first address, and the first after it.
    pub early: (u64, u64),
    /// A device was found that writes past the page tables.
    pub found: Option<String>,
    /// Steps left out, in test builds.
    pub faults: Faults,
}

/// What the firmware's management mode has on q35; video memory, ROM and what that mode has
/// elsewhere: RAM, but not the guest's.
const BELOW_1M: [std::ops::Range<u64>; 2] = [0x30..0x50, 0xa0..0x100];

/// Why a pass ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Enough, or out of time, or interrupted.
    Enough,
    /// The map must not be used any more.
    Doubt,
}

/// State of one call.
struct Call<'a> {
    want: &'a Recycle,
    until: Instant,
    left: u64,
    interrupt: &'a mut dyn FnMut() -> bool,
    done: Recycled,
    bursts: Bursts,
    /// What of the current part was discarded.
    taken: Box<Bits>,
}

/// Which runs a pass takes.
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
            taken: Box::new([0; abi::MAP_WORDS]),
        };
        // With a limit, what is whole anywhere comes before pieces.
        let passes: &[Pass] =
            if want.max_bytes.is_some() { &[Pass::Whole, Pass::Rest] } else { &[Pass::All] };
        // From where the last call ended, so that short budgets come round too.
        let pages = &self.layout.pages;
        let (before, after) = pages.split_at(pages.partition_point(|p| p.pfn < self.pace.next));
        self.pace.next = 0;
        'all: for pass in passes {
            for page in after.iter().chain(before) {
                let late = Instant::now() >= call.until || (call.interrupt)();
                if late || self.page(page, *pass, &mut call).is_err() {
                    self.pace.next = page.pfn;
                    call.done.more = true;
                    break 'all;
                }
            }
        }
        call.done.ns = begun.elapsed().as_nanos() as u64;
        call.done.cpu_ns = cpu_ns().saturating_sub(cpu);
        call.done
    }

    fn page(&mut self, page: &MapPage, pass: Pass, call: &mut Call<'_>) -> Result<(), Stop> {
        let Some(mut free) = self.ram.bits(page.gpa) else { return Err(Stop::Doubt) };
        self.keep_usable(page, &mut free);
        if call.want.marked {
            let Some(marked) = self.marks.of(page.pfn) else { return Ok(()) };
            free.iter_mut().zip(marked).for_each(|(f, m)| *f &= m);
        }
        for part in self.ram.parts(page.pfn) {
            let choice = self.choose(&part, &free, call.want);
            if pass != Pass::Rest {
                self.take(page, &part, &choice.whole, true, call)?;
            }
            if pass != Pass::Whole {
                call.taken.fill(0);
                let taken = self.take(page, &part, &choice.rest, false, call);
                self.split(&part, &choice, call);
                taken?;
            }
        }
        Ok(())
    }

    /// What of a part is free, held, and worth it.
    fn choose(&self, part: &Part, free: &Bits, want: &Recycle) -> Choice {
        let mut mask = Box::new([0; abi::MAP_WORDS]);
        abi::fill(&mut mask[..], part.first, part.len, true);
        mask.iter_mut().zip(free).for_each(|(m, f)| *m &= f);
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
                match choice.whole.last_mut() {
                    Some(r) if r.first + r.len == first => r.len += len,
                    _ => choice.whole.push(Run { first, len }),
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
        choice.rest = rest.map(|(first, len)| Run { first, len }).collect();
        if want.max_bytes.is_some() {
            choice.rest.sort_by_key(|r| Reverse(r.len));
        }
        choice.held = held;
        choice
    }

    /// Takes runs, window by window.
    fn take(
        &mut self,
        page: &MapPage,
        part: &Part,
        runs: &[Run],
        whole: bool,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let mut batch: Vec<Run> = Vec::new();
        let mut weight = 0;
        for run in runs {
            let mut run = *run;
            while run.len > 0 {
                let limit = if whole { self.pace.whole } else { self.pace.rest };
                let room = limit.saturating_sub(weight + RUN_COST);
                let room = if whole { room / BLOCK * BLOCK } else { room };
                let left = usize::try_from(call.left).unwrap_or(usize::MAX);
                let left = if whole { left / BLOCK * BLOCK } else { left };
                let len = run.len.min(room).min(left);
                if len > 0 && batch.len() < RUNS_MAX {
                    batch.push(Run { first: run.first, len });
                    weight += len + RUN_COST;
                    call.left -= len as u64;
                    run = Run { first: run.first + len, len: run.len - len };
                } else if batch.is_empty() {
                    // Less than a block is left to take: pieces may still fit.
                    return if whole { Ok(()) } else { Err(Stop::Enough) };
                } else {
                    self.flush(page, part, &mut batch, whole, call)?;
                    weight = 0;
                }
            }
        }
        if batch.is_empty() { Ok(()) } else { self.flush(page, part, &mut batch, whole, call) }
    }

    /// Takes all runs of a batch.
    fn flush(
        &mut self,
        page: &MapPage,
        part: &Part,
        batch: &mut Vec<Run>,
        whole: bool,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let mut left = &batch[..];
        while !left.is_empty() {
            let taken = self.flush_some(page, part, left, whole, call)?;
            left = &left[taken..];
        }
        batch.clear();
        Ok(())
    }

    /// Takes runs of a batch in one window; gives their number, at least one.
    fn flush_some(
        &mut self,
        page: &MapPage,
        part: &Part,
        batch: &[Run],
        whole: bool,
        call: &mut Call<'_>,
    ) -> Result<usize, Stop> {
        // Brings the map's pages in, so that nothing in the window waits for them.
        if let Err(stop) = self.read_again(page, batch) {
            self.counters.dropped_batches += 1;
            return Err(stop);
        }
        call.bursts.before_window();
        let open = self.guard.open();
        let begun = Instant::now();
        let found = self.window(page, part, batch, call);
        let took = begun.elapsed();
        drop(open);
        call.bursts.after_window();
        self.windows.add(took.as_nanos() as u64);
        call.done.window_ns += took.as_nanos() as u64;
        self.counters.batches += 1;
        self.counters.window_max_ns = self.counters.window_max_ns.max(took.as_nanos() as u64);
        let done = found.map_or(0, |taken| weight_of(&batch[..taken]));
        let (pace, floor) = match whole {
            true => (&mut self.pace.whole, BLOCK + RUN_COST),
            false => (&mut self.pace.rest, *WEIGHT.start()),
        };
        *pace = next_pace(*pace, (done, done < weight_of(batch)), took).clamp(floor, *WEIGHT.end());
        if found.is_err() {
            self.counters.dropped_batches += 1;
        }
        let taken = found?;
        if Instant::now() >= call.until || (call.interrupt)() {
            return Err(Stop::Enough);
        }
        Ok(taken)
    }

    /// What is done in a window that is open: protect, read again, discard, lift. Gives how many
    /// runs of the batch it was about.
    fn window(
        &mut self,
        page: &MapPage,
        part: &Part,
        batch: &[Run],
        call: &mut Call<'_>,
    ) -> Result<usize, Stop> {
        let guard = self.guard;
        let mut lifted = Lift { guard, part, runs: batch, wake_only: false };
        let batch = &batch[..self.protect(part, batch)?];
        lifted.runs = batch;
        let bits = self.read_again(page, batch)?;
        self.look_for_devices()?;
        self.faults.widen();
        let (mut ranges, mut kept) = (Vec::with_capacity(batch.len()), Vec::new());
        let mut pages = 0;
        for run in batch {
            let before = pages;
            still_free(&bits, run, |first, len| {
                pages += len;
                ranges.push(part.range(first, len));
                abi::fill(&mut call.taken[..], first, len, true);
            });
            if pages - before < run.len {
                kept.push(*run);
            }
        }
        let all: usize = batch.iter().map(|r| r.len).sum();
        let whole = self.ram.discard(part.piece, &ranges);
        // Nothing of anonymous memory that was discarded is protected any more.
        let anonymous = matches!(self.ram.pieces()[part.piece].kind, Kind::Anonymous);
        let lift = |run: &Run| guard.uffd().lift(part.range(run.first, run.len)).is_ok();
        lifted.wake_only = whole && anonymous && kept.iter().all(lift);
        drop(lifted);
        if !whole {
            return Err(Stop::Doubt);
        }
        let bytes = Bytes::pages(pages as u64);
        let saved = (all - pages) as u64;
        call.done.bytes += bytes;
        call.done.runs += ranges.len() as u64;
        call.done.saved_pages += saved;
        self.counters.recycled += bytes;
        self.counters.runs += ranges.len() as u64;
        self.counters.saved_pages += saved;
        Ok(batch.len())
    }

    /// Protects runs, as many as there is time for; gives their number.
    fn protect(&self, part: &Part, batch: &[Run]) -> Result<usize, Stop> {
        if self.faults.no_protect() {
            return Ok(batch.len());
        }
        let begun = Instant::now();
        for (i, run) in batch.iter().enumerate() {
            if i > 0 && i.is_multiple_of(PROTECT_RUNS) && begun.elapsed() > PROTECT_LONG {
                return Ok(i);
            }
            let range = part.range(run.first, run.len);
            self.guard.uffd().protect(range).map_err(|_| Stop::Doubt)?;
        }
        Ok(batch.len())
    }

    /// What pins memory from now on waits for the end of the window; what did before is
    /// seen here.
    fn look_for_devices(&mut self) -> Result<(), Stop> {
        match self.devices.whats_new().filter(|_| !self.faults.no_devices()) {
            None => Ok(()),
            Some(New::Socket) => Err(Stop::Doubt),
            Some(New::Device) => {
                self.found = self.devices.look();
                // A harmless one may have come with a socket.
                let clear = self.found.is_none() && self.devices.whats_new().is_none();
                if clear { Ok(()) } else { Err(Stop::Doubt) }
            }
        }
    }

    /// The bits of a batch and then the header's word on them, in this order.
    fn read_again(&mut self, page: &MapPage, batch: &[Run]) -> Result<Box<Bits>, Stop> {
        let mut bits = Box::new([u64::MAX; abi::MAP_WORDS]);
        let first = batch.iter().map(|r| r.first).min().unwrap_or(0) / 64;
        let end = batch.iter().map(|r| r.first + r.len).max().unwrap_or(0).div_ceil(64);
        let len = (end - first) * 8;
        let map = self.ram.hva(page.gpa, PAGE).ok_or(Stop::Doubt)? + first as u64 * 8;
        let at = self.ram.hva(self.header.gpa, PAGE).ok_or(Stop::Doubt)?;
        let mut bytes = [0u8; PAGE as usize + HEADER_BYTES];
        sys::copy_from(&[(map, len), (at, HEADER_BYTES)], &mut bytes).map_err(|_| Stop::Doubt)?;
        let header: &[u8; HEADER_BYTES] =
            bytes[len..len + HEADER_BYTES].try_into().map_err(|_| Stop::Doubt)?;
        if !self.faults.no_reread() {
            for (word, eight) in bits[first..end].iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_le_bytes(eight.try_into().unwrap_or_default());
            }
        }
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

    /// What firmware writes before its first write is noticed is never ours to give, nor
    /// are the tripwires.
    fn keep_usable(&self, page: &MapPage, bits: &mut Bits) {
        let (first, end) = (self.early.0 / PAGE, self.early.1.div_ceil(PAGE));
        let wires = self.guard.wires();
        let kept = wires.iter().map(|(gpa, _)| gpa / PAGE).chain(first..end);
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
                self.counters.splits += 1;
            }
        }
    }

    /// Free by the map, in bytes; with `held`, how much of it the host holds.
    pub fn free(&self, held: bool) -> Option<(Bytes, Option<Bytes>)> {
        let (mut free, mut kept) = (0, 0);
        for page in &self.layout.pages {
            let mut bits = self.ram.bits(page.gpa)?;
            self.keep_usable(page, &mut bits);
            for part in self.ram.parts(page.pfn) {
                let mut mask = [0; abi::MAP_WORDS];
                abi::fill(&mut mask, part.first, part.len, true);
                mask.iter_mut().zip(&bits).for_each(|(m, b)| *m &= b);
                free += abi::count(&mask);
                if held {
                    let (mut here, mut huge) = ([0; abi::MAP_WORDS], [0; abi::MAP_WORDS]);
                    for some in stretches(&part, &mask) {
                        self.ram.held(&some, &mut here, &mut huge).ok()?;
                    }
                    mask.iter_mut().zip(&here).for_each(|(m, h)| *m &= h);
                    kept += abi::count(&mask);
                }
            }
        }
        Some((Bytes::pages(free), held.then_some(Bytes::pages(kept))))
    }

    /// Copies the map, for `marked`.
    pub fn mark(&self) -> Option<Marks> {
        let copy = |p: &MapPage| Some((p.pfn, Box::new(self.ram.bits(p.gpa)?)));
        Some(Marks(self.layout.pages.iter().map(copy).collect::<Option<_>>()?))
    }
}

fn weight_of(runs: &[Run]) -> usize {
    runs.iter().map(|r| r.len + RUN_COST).sum()
}

/// The size of the next window, where the last one did so much, or less than it was to.
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

/// The stretches of a part that have bits set: page tables of the others need not be walked.
/// Few pages between two are walked as well, which takes less than another call.
fn stretches(part: &Part, mask: &Bits) -> Vec<Part> {
    let mut found: Vec<Part> = Vec::new();
    for (first, len) in abi::runs(mask) {
        match found.last_mut() {
            Some(last) if first <= last.first + last.len + 128 => {
                last.len = first + len - last.first;
            }
            _ => found.push(Part { first, len, ..*part }),
        }
    }
    found
}

fn bit(bits: &Bits, at: usize) -> bool {
    bits[at / 64] >> (at % 64) & 1 == 1
}

fn count_in(bits: &Bits, first: usize, len: usize) -> usize {
    (first..first + len).filter(|b| bit(bits, *b)).count()
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
    part: &'a Part,
    runs: &'a [Run],
    wake_only: bool,
}

impl Drop for Lift<'_> {
    fn drop(&mut self) {
        let uffd = self.guard.uffd();
        let first = self.runs.iter().map(|r| r.first).min().unwrap_or(0);
        let end = self.runs.iter().map(|r| r.first + r.len).max().unwrap_or(first);
        if self.wake_only && end > first {
            let _ = uffd.wake(self.part.range(first, end - first));
            return;
        }
        // Lifting what is not protected does no harm and costs less than a call.
        let mut runs: Vec<Run> = self.runs.to_vec();
        runs.sort_unstable_by_key(|r| r.first);
        let mut runs = runs.into_iter().peekable();
        while let Some(mut span) = runs.next() {
            while let Some(next) = runs.next_if(|n| n.first <= span.first + span.len + GAP) {
                span.len = next.first + next.len - span.first;
            }
            let _ = uffd.lift(self.part.range(span.first, span.len));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn stretches_hold_every_bit_of_a_part_and_no_other_part(
            bits in prop::collection::vec(0..abi::MAP_PFNS as usize, 0..40),
            first in 0..abi::MAP_PFNS as usize, len in 1..abi::MAP_PFNS as usize,
        ) {
            let len = len.min(abi::MAP_PFNS as usize - first);
            let part = Part { piece: 0, first, len, base: 0 };
            let mut mask: Bits = [0; abi::MAP_WORDS];
            let inside = |b: &&usize| (first..first + len).contains(*b);
            bits.iter().filter(inside).for_each(|b| abi::fill(&mut mask, *b, 1, true));
            let found = stretches(&part, &mask);
            for b in bits.iter().filter(inside) {
                let of = |s: &Part| (s.first..s.first + s.len).contains(b);
                prop_assert_eq!(found.iter().filter(|s| of(s)).count(), 1);
            }
            for s in &found {
                prop_assert!(s.len > 0 && s.first >= first && s.first + s.len <= first + len);
                prop_assert!((s.first..s.first + s.len).any(|b| bit(&mask, b)));
            }
        }
    }
}
