//! Splits huge pages of which a balloon took a part, so that the host has that part.
//!
//! Page tables tell which: of a huge page's 512 frames some are mapped no more
//! (`/proc/PID/pagemap`), and they are of a huge page still (`/proc/kpageflags`). The
//! kernel is told that one page that is mapped is cold (MADV_COLD), for which it splits
//! the huge page and frees what is not mapped. Contents are neither read nor changed.

use std::time::{Duration, Instant};

use ebb_core::task::{PartialThpOrder, PartialThpSample};
use ebb_core::units::{Bytes, PAGE};

use super::background_jobs::{At, TaskSample};
use super::process::{Advice, Process, rest, there};
use crate::probe::maps::read_ram_mappings;
use crate::probe::pagemap::{Entry, Flags, FrameFlags, Pagemap};
use crate::root::is_absent;
use crate::sys::Range;

const HUGE: u64 = 2 << 20;
const PAGES: usize = (HUGE / PAGE) as usize;
/// The kernel is told of this many at a time.
const BATCH: usize = 32;
/// A huge page that lacks fewer pages is left: to split it takes as long as for many.
const LEAST: usize = 16;
/// Most huge pages whose frames are looked up in the place of one.
const LOOKUPS: usize = 4;
/// How many huge pages of the host are partially mapped, from Linux 6.12 on.
const PARTIAL: &str =
    "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/stats/nr_anon_partially_mapped";

impl TaskSample for PartialThpSample {
    fn add(&mut self, done: PartialThpSample) {
        self.split += done.split;
        self.freed += done.freed;
        self.more = done.more;
    }
}

/// Splits a VM's partially mapped huge pages; kept is the address where the last order ended.
pub(super) fn carry_out(
    At { root, vm, .. }: At<'_>,
    order: &PartialThpOrder,
    cursor: &mut u64,
) -> Result<PartialThpSample, String> {
    let mut done = PartialThpSample::default();
    // Where the kernel counts them, and there is none, no look is needed.
    if std::fs::read_to_string(root.path(PARTIAL)).is_ok_and(|n| n.trim() == "0") {
        return Ok(done);
    }
    let process = Process::open(root, vm)?;
    let ram = there(read_ram_mappings(root, vm.pid))?;
    let pagemap = Pagemap::open(root, vm.pid);
    let pagemap = pagemap.map_err(|e| format!("/proc/{}/pagemap: {e}", vm.pid))?;
    let flags = FrameFlags::open(root).map_err(|e| format!("/proc/kpageflags: {e}"))?;
    let until = Instant::now() + Duration::from_millis(order.ms);
    let mut found: Vec<Partial> = Vec::new();
    for block in rest(&ram, *cursor, HUGE).filter(|block| block.len == HUGE) {
        if Instant::now() >= until {
            done.more = true;
            break;
        }
        let mut entries = Vec::with_capacity(PAGES);
        match pagemap.each(block, |_, e| entries.push(e)) {
            // It has ended: of a block that was read in part nothing is known.
            Err(e) if is_absent(&e) => entries.clear(),
            read => read.map_err(|e| e.to_string())?,
        }
        let of = |frame| flags.of(frame).unwrap_or_default();
        found.extend(partially_mapped(block.start, &entries, of));
        if found.len() >= BATCH {
            split(&process, &flags, &mut found, &mut done)?;
        }
        *cursor = block.end();
    }
    split(&process, &flags, &mut found, &mut done)?;
    if !done.more {
        *cursor = 0;
    }
    Ok(done)
}

fn split(
    process: &Process<'_>,
    flags: &FrameFlags,
    found: &mut Vec<Partial>,
    done: &mut PartialThpSample,
) -> Result<(), String> {
    let places: Vec<Range> = found.iter().map(|t| Range { start: t.place, len: PAGE }).collect();
    process.advise(&places, Advice::Cold)?;
    for t in found.drain(..) {
        // What is still a huge page was not split: it was in use.
        if flags.of(t.frame).is_some_and(|f| !f.is_of_thp()) {
            done.split += 1;
            done.freed += Bytes::pages(t.missing as u64);
        }
    }
    Ok(())
}

/// A huge page of which a part is mapped: where, by which frame, and what is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Partial {
    place: u64,
    frame: u64,
    missing: usize,
}

/// The partially mapped huge pages of a place, by its entries and what is known of frames. None
/// where entries are missing: the process has ended.
fn partially_mapped(block: u64, entries: &[Entry], flags: impl Fn(u64) -> Flags) -> Vec<Partial> {
    if entries.len() < PAGES {
        return Vec::new();
    }
    // By the huge page that a frame would be of.
    let huge = |frame: u64| frame / PAGES as u64;
    let mut mapped: Vec<Partial> = Vec::new();
    for (n, entry) in entries.iter().enumerate() {
        // Of shared memory what is not mapped is not free.
        let Some(frame) = entry.frame().filter(|_| entry.is_anonymous()) else { continue };
        match mapped.iter_mut().rev().find(|t| huge(t.frame) == huge(frame)) {
            Some(t) => t.missing -= 1,
            None => {
                let place = block + n as u64 * PAGE;
                mapped.push(Partial { place, frame, missing: PAGES - 1 });
            }
        }
    }
    // A huge page has more frames here than what lies in between by chance.
    mapped.sort_by_key(|t| t.missing);
    mapped.truncate(LOOKUPS);
    mapped.retain(|t| t.missing >= LEAST && flags(t.frame).is_of_thp());
    mapped
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries(of: impl Fn(usize) -> Option<u64>) -> Vec<Entry> {
        (0..PAGES).map(|n| Entry(of(n).map_or(0, |frame| Entry::PRESENT | frame))).collect()
    }

    #[test]
    fn a_huge_page_is_partial_when_some_of_its_frames_are_mapped_no_more() {
        let block = 7 * HUGE;
        let thp = |frame: u64| Flags(if frame / 512 == 9 { Flags::THP } else { 0 });
        let own = |n: usize| Some(9 * 512 + n as u64);
        assert_eq!(partially_mapped(block, &entries(own), thp), [], "whole");
        let most = |n: usize| own(n).filter(|_| n > 3);
        assert_eq!(partially_mapped(block, &entries(most), thp), [], "hardly partial");
        let half = |n: usize| own(n).filter(|_| n % 2 == 1);
        let found = Partial { place: block + PAGE, frame: 9 * 512 + 1, missing: 256 };
        assert_eq!(partially_mapped(block, &entries(half), thp), [found]);
        // Small pages with holes between, and huge pages of another kind.
        for flags in [0, Flags::THP | Flags::HUGETLB, Flags::THP | Flags::ZERO_PAGE] {
            assert_eq!(partially_mapped(block, &entries(half), |_| Flags(flags)), []);
        }
        // The guest has used the holes again: small pages lie in them.
        let mixed = |n: usize| half(n).or(Some(1 << 20 | (n as u64 * 512)));
        assert_eq!(partially_mapped(block, &entries(mixed), thp), [found]);
        assert_eq!(partially_mapped(block, &entries(|_| None), thp), []);
        let of_file = |n: usize| half(n).map(|frame| frame | Entry::FILE);
        assert_eq!(partially_mapped(block, &entries(of_file), thp), []);
    }

    proptest! {
        #[test]
        fn whatever_page_tables_say_one_mapped_page_of_each_is_named(
            words in prop::collection::vec(any::<u64>(), PAGES), few in any::<bool>(),
        ) {
            let keep = if few { Entry::PRESENT | 0xfff } else { u64::MAX };
            let all: Vec<Entry> = words.iter().map(|w| Entry(w & keep)).collect();
            let found = partially_mapped(HUGE, &all, |_| Flags(Flags::THP));
            prop_assert!(found.len() <= LOOKUPS);
            for t in found {
                let entry = all[((t.place - HUGE) / PAGE) as usize];
                prop_assert!(entry.is_anonymous() && entry.frame() == Some(t.frame));
                prop_assert!((LEAST..PAGES).contains(&t.missing));
            }
        }
    }
}
