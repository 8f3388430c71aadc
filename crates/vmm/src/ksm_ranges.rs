//! RAM that is recycled is closed to KSM first; what is open to KSM is not recycled.
//!
//! When KSM replaces a page by a merged one, or by the zero page, the new mapping
//! has lost its userfaultfd write-protection (`mm/ksm.c`, `replace_page`; found on
//! Linux 6.18: 63 of 64 protected pages were written without a fault after they
//! had been merged). A guest could then write to a page between our second look at
//! the map and the discard, and a tripwire could vanish, because the first pages are alike
//! in many VMs. So an agent takes the RAM it is given out of KSM
//! before it protects anything. QEMU opens it by default (`mem-merge=on`).
//!
//! The daemon may then name ranges that are worth merging: [`Open`]. They are taken
//! out of recycling, and only then opened; on the way back they are closed, which
//! breaks their merges, and only then recycled again. One thread does this and the
//! recycling, so no window is open meanwhile. `tests/model.rs` has both orders. What a guest
//! frees in such ranges is closed before memory is given back, in stretches of 64 KiB and more:
//! ranges last until the next scan, which may be ten minutes away.
//!
//! Closing breaks what is merged already, which takes memory: where it is not
//! there, the agent stands aside until it is, or leaves a range as it is.

use std::io;
use std::time::{Duration, Instant};

use ebb_core::mapping::Mapping;
use ebb_core::range;
use ebb_core::units::Bytes;
use ebb_core::wire::Advise;
use ebb_core::wire::abi::{self, PAGE};
use ebb_core::wire::firmware::NEVER_OPEN;

use crate::faults::Faults;
use crate::ram::{Bits, Kind, Part, Ram};
use crate::sys::{self, Range};

/// Shorter runs of free pages, in pages, stay open: each makes two more mappings.
pub const LEAST_CLOSED: usize = 16;
/// No ranges are closed in parts where there would be more than this. Linux gives a process 65,530
/// mappings.
const MOST_RANGES: usize = 8192;
/// What must stay free beside what breaking merges takes, pages.
const SPARE: u64 = (256 << 20) / PAGE;
/// What must stay free where what is closed is discarded a moment later, pages.
const SPARE_FOR_FREE: u64 = (32 << 20) / PAGE;
/// What must stay free below a cgroup's limit, pages: others below it may take that meanwhile.
const SPARE_BELOW: u64 = (64 << 20) / PAGE;

/// Why the agent is to stand aside.
#[derive(Debug)]
pub struct Objection {
    pub why: String,
    /// It may pass, as a lack of memory does.
    pub passes: bool,
}

impl From<String> for Objection {
    fn from(why: String) -> Objection {
        Objection { why, passes: false }
    }
}

/// Takes all of it out of KSM but what is to stay open; the error is a reason to stand
/// aside. `below`: what may be taken below the VM's limits, if there are any.
pub fn leave_ksm(ram: &Ram, open: &Open, below: Option<Bytes>) -> Result<(), Objection> {
    has_room(merged_in(&without(anonymous(ram), &open.ranges)), (SPARE, below))?;
    open.keep_rest_out(ram)
}

/// Anonymous RAM; pieces that adjoin in this process are one range, as the scanner sees them.
fn anonymous(ram: &Ram) -> Vec<Range> {
    let pieces = ram.pieces.iter().filter(|p| matches!(p.kind, Kind::Anonymous));
    let mut ranges: Vec<Range> = pieces.map(|p| Range { start: p.hva, len: p.size }).collect();
    ranges.sort_unstable_by_key(|r| r.start);
    let mut joined = Vec::new();
    ranges.into_iter().for_each(|r| range::push(&mut joined, r));
    joined
}

/// Takes ranges out of KSM and breaks what is merged of them; their contents stay.
fn close(ranges: &[Range]) -> Result<(), Objection> {
    for range in ranges {
        match sys::advise(*range, libc::MADV_UNMERGEABLE) {
            // A kernel without KSM does not know the advice.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
            Err(e) => return Err(not_closed(&e)),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// `madvise` tells a lack of memory for the copies by EAGAIN, and by ENOMEM too.
fn not_closed(error: &io::Error) -> Objection {
    let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::OutOfMemory, io::ErrorKind::Interrupted];
    let why = format!("RAM cannot be taken out of KSM: {error}");
    Objection { why, passes: kinds.contains(&error.kind()) }
}

/// What is open to KSM: ranges of anonymous RAM, sorted and apart.
#[derive(Debug, Default)]
pub struct Open {
    pub ranges: Vec<Range>,
    /// When what was free in them could not be closed.
    kept: Option<Instant>,
}

/// How long what could not be closed counts as what will not be.
const KEPT: Duration = Duration::from_secs(5);

impl Open {
    /// What of this may stay open where RAM is now that; the rest is forgotten.
    pub fn still(&self, ram: &Ram) -> Open {
        let good = |r: &&Range| check(ram, &[**r]).is_ok();
        Open { ranges: self.ranges.iter().filter(good).copied().collect(), kept: None }
    }

    /// Opens these ranges of a stretch and no others there. `below`: what may be taken below the
    /// VM's limits; what closing took goes off it.
    pub fn set(
        &mut self,
        ram: &Ram,
        advise: &Advise,
        below: &mut Option<Bytes>,
    ) -> Result<Bytes, String> {
        self.set_with(ram, advise, below, merged_in)
    }

    fn set_with(
        &mut self,
        ram: &Ram,
        advise: &Advise,
        below: &mut Option<Bytes>,
        merged_in: impl Fn(&[Range]) -> u64,
    ) -> Result<Bytes, String> {
        let named = advise.ranges().ok_or("this cannot be opened to KSM: no such ranges")?;
        let mut want = check(ram, &named)?;
        let (from, to) = advise.within;
        let stretch = [Range { start: from, len: to.saturating_sub(from) }];
        let rest = without(self.ranges.clone(), &stretch);
        let before: Vec<Range> = rest.iter().filter(|r| r.start < from).copied().collect();
        want.splice(0..0, before);
        want.extend(rest.iter().filter(|r| r.start >= to));
        let closing = without(self.ranges.clone(), &want);
        let merged = merged_in(&closing);
        has_room(merged, (SPARE, *below)).map_err(|b| b.why)?;
        close(&closing).map_err(|b| b.why)?;
        below.iter_mut().for_each(|below| *below = *below - Bytes::pages(merged));
        let opening = without(want.clone(), &self.ranges);
        // From here on nothing of it is recycled, whatever becomes of the advice.
        self.ranges = want;
        opening.iter().try_for_each(|r| sys::mergeable(*r)).map_err(|e| e.to_string())?;
        Ok(self.size())
    }

    /// Closes these ranges, which lie in what is open: their pages are free. All of them or, as far
    /// as this knows, none.
    pub fn close_free(&mut self, mut free: Vec<Range>, faults: Faults) {
        if free.is_empty() {
            return;
        }
        free.sort_unstable_by_key(|r| r.start);
        let few = self.ranges.len() + free.len() <= MOST_RANGES;
        let closed = few
            && has_room(merged_at_most(&free, &read(KSM_STAT)), (SPARE_FOR_FREE, None)).is_ok()
            && (faults.no_close() || close(&free).is_ok());
        if closed {
            range::subtract(&mut self.ranges, &free);
        }
        self.kept = (!closed).then(Instant::now);
    }

    /// There is no room to close what is free.
    pub fn keep_free(&mut self) {
        self.kept = Some(Instant::now());
    }

    pub fn close_all(&self, below: Option<Bytes>) -> Result<(), Objection> {
        has_room(merged_in(&self.ranges), (SPARE, below))?;
        close(&self.ranges)
    }

    /// Closes the rest once more: another program may have opened it again. Costs a
    /// microsecond for each stretch of it that is still closed.
    pub fn keep_rest_out(&self, ram: &Ram) -> Result<(), Objection> {
        close(&without(anonymous(ram), &self.ranges))
    }

    /// Closes once more what is never open, as it is protected all the time.
    pub fn keep_tripwires_out(&self, ram: &Ram) -> Result<(), Objection> {
        close(&never_open(ram))
    }

    /// Those of these bits that are open.
    pub fn of(&self, part: &Part, bits: &Bits) -> Bits {
        let (mut closed, mut open) = (*bits, *bits);
        self.mask(part, &mut closed);
        open.iter_mut().zip(&closed).for_each(|(open, closed)| *open &= !closed);
        open
    }

    /// Clears the bits of what is open and will not be closed, though it is free: runs that are too
    /// short, and all of it where it could not be closed.
    pub fn clear_kept(&self, part: &Part, bits: &mut Bits) {
        let stays = self.kept.is_some_and(|at| at.elapsed() < KEPT);
        let least = if stays { usize::MAX } else { LEAST_CLOSED };
        for (first, len) in abi::runs(&self.of(part, bits)).filter(|r| r.1 < least) {
            abi::fill(bits, first, len, false);
        }
    }

    pub fn size(&self) -> Bytes {
        Bytes(self.ranges.iter().map(|r| r.len).sum())
    }

    /// Clears the bits of what is open.
    pub fn mask(&self, part: &Part, bits: &mut Bits) {
        let all = part.range(part.first, part.len);
        let first = self.ranges.partition_point(|r| r.end() <= all.start);
        for r in self.ranges[first..].iter().take_while(|r| r.start < all.end()) {
            let (from, to) = (r.start.max(all.start), r.end().min(all.end()));
            if from < to {
                abi::fill(bits, part.bit(from), ((to - from) / PAGE) as usize, false);
            }
        }
    }
}

/// Ranges as they were named, if they are whole pages of anonymous RAM, sorted and
/// apart; without what is never open.
fn check(ram: &Ram, want: &[Range]) -> Result<Vec<Range>, String> {
    let anonymous = anonymous(ram);
    let mut ranges: Vec<Range> = Vec::with_capacity(want.len());
    for &Range { start, len } in want {
        let stop = start.checked_add(len).ok_or("no such addresses")?;
        let within = anonymous.iter().any(|r| r.start <= start && stop <= r.end());
        let whole = start.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0;
        if !within || !whole || ranges.last().is_some_and(|r| start < r.end()) {
            return Err(format!("{start:#x}+{len:#x} cannot be opened to KSM"));
        }
        ranges.push(Range { start, len });
    }
    Ok(without(ranges, &never_open(ram)))
}

/// Where tripwires may be, as we have it, sorted and apart.
fn never_open(ram: &Ram) -> Vec<Range> {
    let here =
        |(gpa, end): &(u64, u64)| Some(Range { start: ram.hva(*gpa, end - gpa)?, len: end - gpa });
    if !ram.pieces.first().is_some_and(|p| matches!(p.kind, Kind::Anonymous)) {
        return Vec::new();
    }
    NEVER_OPEN.iter().filter_map(here).collect()
}

/// What of `a` is not in `b`; both sorted and apart.
fn without(mut a: Vec<Range>, b: &[Range]) -> Vec<Range> {
    range::subtract(&mut a, b);
    a
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// How many merged pages of these ranges are to be broken. Page tables are walked where anything of
/// this process is merged.
fn merged_in(ranges: &[Range]) -> u64 {
    let stat = read(KSM_STAT);
    match merged_at_most(ranges, &stat) {
        0 => 0,
        most => merged_by_mappings(ranges, &read("/proc/self/smaps"))
            .map_or(most, |(pages, open)| pages + zero_pages(&stat).min(open)),
    }
}

/// The most merged pages of these ranges that are to be broken: KSM counts what was broken since
/// only when it scans again.
fn merged_at_most(ranges: &[Range], ksm_stat: &str) -> u64 {
    let pages = ranges.iter().map(|r| r.len / PAGE).sum();
    (number(ksm_stat, "ksm_merging_pages ") + zero_pages(ksm_stat)).min(pages)
}

const KSM_STAT: &str = "/proc/self/ksm_stat";

fn zero_pages(ksm_stat: &str) -> u64 {
    number(ksm_stat, "ksm_zero_pages ")
}

/// A number at the beginning of a line; 0 where there is none.
fn number(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(key));
    line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}

/// Of the mappings that lie in these ranges in part and are open to KSM: their merged pages, zeros
/// left out, and all of their pages. `None` where the kernel does not tell (before Linux 6.7).
fn merged_by_mappings(ranges: &[Range], smaps: &str) -> Option<(u64, u64)> {
    let (mut told, mut pages, mut open, mut here, mut its) = (false, 0, 0, 0u64, 0);
    for line in smaps.lines() {
        if let Some(m) = Mapping::parse(line) {
            let is_here = ranges.iter().any(|r| r.overlaps(m.start, m.end));
            here = if is_here { m.end.saturating_sub(m.start) / PAGE } else { 0 };
        } else if let Some(kib) = line.strip_prefix("KSM:") {
            told = true;
            its = number(kib, "") >> 2;
        } else if here > 0 && line.starts_with("VmFlags:") && line.split(' ').any(|f| f == "mg") {
            (pages, open) = (pages + its, open + here);
        }
    }
    told.then_some((pages, open))
}

/// Whether there is memory to break the merges of this many pages: on the host and to spare, in
/// pages, and below the VM's limits. Where a limit is reached, the kernel may kill the VM.
fn has_room(merged: u64, memory: (u64, Option<Bytes>)) -> Result<(), Objection> {
    let found = if merged == 0 { Ok(()) } else { room(merged, memory, &read("/proc/meminfo")) };
    found.map_err(|why| Objection { why, passes: true })
}

/// An unknown number of available pages counts as none.
fn room(merged: u64, (spare, below): (u64, Option<Bytes>), meminfo: &str) -> Result<(), String> {
    let available = number(meminfo, "MemAvailable:") / 4;
    let below = below.map_or(u64::MAX, |bytes| bytes.0 / PAGE);
    let few = match merged {
        0 => return Ok(()),
        _ if merged + SPARE_BELOW > below => {
            format!("{} that its limits leave", Bytes::pages(below))
        }
        _ if merged + spare > available => {
            format!("{} of available memory", Bytes::pages(available))
        }
        _ => return Ok(()),
    };
    Err(format!(
        "KSM has merged {} of this VM that are to be private again, and {few} are too few for it: \
         free some",
        Bytes::pages(merged)
    ))
}

#[cfg(test)]
mod tests {
    use ebb_core::wire::Segment;

    use super::*;

    #[test]
    fn a_lack_of_memory_while_merges_are_broken_passes() {
        for (error, passes) in [(libc::EAGAIN, true), (libc::ENOMEM, true), (libc::EPERM, false)] {
            let by = not_closed(&io::Error::from_raw_os_error(error));
            assert!(by.passes == passes && by.why.contains("out of KSM"), "{by:?}");
        }
    }

    #[test]
    fn merges_are_undone_only_where_there_is_room() {
        let mem = |kib: u64| format!("MemTotal: 1 kB\nMemAvailable:  {kib} kB\n");
        let all = |below, mem: &str| room(100_000, (SPARE, below), mem);
        let why = all(None, &mem(600_000)).unwrap_err();
        assert!(why.contains("391 MiB of this VM") && why.contains("586 MiB of avail"), "{why}");
        assert_eq!(all(None, &mem(700_000)), Ok(()));
        assert_eq!(all(Some(Bytes::mib(455)), &mem(700_000)), Ok(()));
        let why = all(Some(Bytes::mib(454)), &mem(700_000)).unwrap_err();
        assert!(why.contains("454 MiB that its limits leave"), "{why}");
        assert_eq!(room(0, (SPARE, Some(Bytes::ZERO)), ""), Ok(()), "nothing is merged");
        assert!(room(1, (SPARE, None), "").is_err(), "what is available is not known");
        let some = |mem: &str| room(8192, (SPARE_FOR_FREE, None), mem);
        assert_eq!(some(&mem(65_536)), Ok(()));
        assert!(some(&mem(65_532)).is_err());
    }

    /// Here all that is closed is merged.
    #[test]
    fn what_closing_takes_goes_off_what_is_left_below_the_limits() {
        let mib = 1 << 20;
        let memory = sys::Mapping::anonymous(16 * mib).unwrap();
        let hva = memory.address();
        let segment = Segment { gpa: 0, size: 16 * mib as u64, hva };
        let ram = Ram::check(&[segment]).unwrap();
        let [a, b, c] = [10, 12, 14].map(|at| Range { start: hva + (at << 20), len: 1 << 20 });
        let mut open = Open { ranges: vec![a, b, c], kept: None };
        let mut leave = |ranges: &[Range], below: &mut Option<Bytes>| {
            let advise = Advise::all(ranges).remove(0);
            let all = |closing: &[Range]| closing.iter().map(|r| r.len / PAGE).sum::<u64>();
            open.set_with(&ram, &advise, below, all).map(|open| open.0 >> 20)
        };
        let spare = Bytes::pages(SPARE_BELOW);
        let mut below = Some(spare + Bytes::kib(1536));
        assert_eq!(leave(&[b, c], &mut below), Ok(2));
        assert_eq!(below, Some(spare + Bytes::kib(512)), "a MiB is private again");
        let why = leave(&[c], &mut below).unwrap_err();
        assert!(why.contains("that its limits leave"), "{why}");
        assert_eq!((leave(&[b, c], &mut below), below), (Ok(2), Some(spare + Bytes::kib(512))));
        assert_eq!((leave(&[c], &mut None), leave(&[], &mut None)), (Ok(1), Ok(0)), "no limit");
    }

    #[test]
    fn what_is_merged_of_ranges_is_what_their_open_mappings_say() {
        let mapping = |at: &str, kib: u64, flags: &str| {
            format!(
                "{at} rw-p 00000000 00:00 0 \nRss: 9 kB\nKSM:  {kib} kB\nVmFlags: rd wr {flags}\n"
            )
        };
        let smaps = mapping("1000-3000", 8, "mg") + &mapping("3000-9000", 20, "mg nh");
        let smaps = smaps + &mapping("9000-a000", 4, "") + &mapping("f000-10000", 4, "mg");
        let merged = |start, len| merged_by_mappings(&[Range { start, len }], &smaps);
        assert_eq!(merged(0x1000, 0x9000), Some((7, 8)), "what is closed has nothing to break");
        assert_eq!((merged(0x2000, 0x1000), merged(0x3000, 0x1000)), (Some((2, 2)), Some((5, 6))));
        assert_eq!((merged(0xa000, 0x1000), merged_by_mappings(&[], "")), (Some((0, 0)), None));
    }
}
