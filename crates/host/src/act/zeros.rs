//! Frees zero pages of a process, without its help and without merging.
//!
//! RAM is scanned in pieces, each order going on where the one before ended. Of
//! each piece the pages in memory are copied out and looked at, and at once the kernel
//! is told of those that were zeros, and of no other:
//!
//! - in a huge page with many of them it is told that one is cold (MADV_COLD). It
//!   splits a huge page that is named in part, and from Linux 6.12 on maps the zero
//!   page where a part is zeros (`mm/migrate.c`, `try_to_map_unused_to_zeropage`).
//! - others are paged out (MADV_PAGEOUT). From 6.12 on a page of zeros takes a place in
//!   swap and a bit, and nothing is written (`mm/page_io.c`, `swap_writeout`).
//!
//! A guest may write in between. The kernel looks at the contents itself, in both ways
//! when the page is not mapped any more, so nothing is lost: at worst a page that is
//! zeros no longer is really written to swap. What is merged already is left out: to copy
//! it would break the merge.
#![cfg_attr(test, allow(unsafe_code))]

use std::time::{Duration, Instant};

use ebb_core::range::{batches, push, subtract};
use ebb_core::sample::ZeroWays;
use ebb_core::task::{ZeroOrder, ZeroSample};
use ebb_core::units::{Bytes, PAGE};
use rustix::io::Errno;

use super::background_jobs::{At, TaskSample};
use super::process::{Advice, Process, rest, there};
use crate::probe::pagemap::Pagemap;
use crate::probe::vmstat::zeros_are_not_written;
use crate::root::{Root, is_absent};
use crate::scan::Found;
use crate::sys::{Range, VECTOR_MAX, read_process};

/// A huge page; also what is copied at a time.
const HUGE: u64 = 2 << 20;
/// What is listed at a time: its pages are looked at right afterwards.
const WINDOW: u64 = 32 << 20;
const PAGES: usize = (HUGE / PAGE) as usize;

pub fn ways(root: &Root) -> ZeroWays {
    // Came with the splitting that maps the zero page.
    let split = root.path("/sys/kernel/mm/transparent_hugepage/shrink_underused").exists();
    ZeroWays { split, pageout: zeros_are_not_written(root) }
}

impl TaskSample for ZeroSample {
    fn add(&mut self, done: ZeroSample) {
        self.read += done.read;
        self.chosen += done.chosen;
        self.freed += done.freed;
        self.rounds += done.rounds;
    }
}

/// Scans a VM's memory; kept is the address where the last order ended.
pub(super) fn carry_out(
    At { root, vm, .. }: At<'_>,
    order: &ZeroOrder,
    cursor: &mut u64,
) -> Result<ZeroSample, String> {
    let process = Process::open(root, vm)?;
    let found = there(Found::look(root, vm, &order.name, ""))?;
    let target = found.target.ok_or("it has no RAM of its own: huge or shared pages")?;
    let mut ram = target.ram;
    subtract(&mut ram, &target.merged);
    let before = process.memory()?.resident();
    let mut scan = ZeroScan::open(root, vm.pid, order)?;
    let until = Instant::now() + Duration::from_millis(order.ms);
    let mut round = true;
    for window in rest(&ram, *cursor, WINDOW) {
        if scan.done.read >= order.read || Instant::now() >= until {
            round = false;
            break;
        }
        scan.window(window, &process)?;
        *cursor = window.end();
    }
    if round {
        *cursor = 0;
    }
    let freed = before - process.memory()?.resident();
    let (freed, rounds) = (freed.min(scan.done.chosen), u64::from(round));
    Ok(ZeroSample { freed, rounds, ..scan.done })
}

/// An order while it is carried out.
struct ZeroScan<'a> {
    pid: u32,
    pagemap: Pagemap,
    order: &'a ZeroOrder,
    buffer: Vec<u8>,
    done: ZeroSample,
    swap: Bytes,
}

impl ZeroScan<'_> {
    fn open<'a>(root: &Root, pid: u32, order: &'a ZeroOrder) -> Result<ZeroScan<'a>, String> {
        let pagemap = Pagemap::open(root, pid).map_err(|e| format!("/proc/{pid}/pagemap: {e}"))?;
        let (buffer, done) = (vec![0; HUGE as usize], ZeroSample::default());
        Ok(ZeroScan { pid, pagemap, order, buffer, done, swap: order.swap })
    }

    fn window(&mut self, window: Range, process: &Process<'_>) -> Result<(), String> {
        let (mut small, mut huge) = (Vec::new(), Vec::new());
        let each = |run: Range, is_huge| if is_huge { huge.push(run) } else { small.push(run) };
        self.pagemap.scan(window, each).map_err(|e| match e {
            e if Errno::from_io_error(&e) == Some(Errno::NOTTY) => {
                "this kernel cannot list pages (Linux 6.7 or later can)".into()
            }
            e => format!("its pages cannot be listed: {e}"),
        })?;
        if self.order.split.is_some() {
            for block in huge.into_iter().flat_map(|run| run.pieces(HUGE)) {
                self.piece(&[block], true, process)?;
            }
        }
        for piece in batches(small, HUGE, VECTOR_MAX) {
            if self.swap < Bytes(HUGE) {
                break;
            }
            self.piece(&piece, false, process)?;
        }
        Ok(())
    }

    /// Looks at a piece, of huge pages or of others, and does what is to be done.
    fn piece(&mut self, piece: &[Range], huge: bool, process: &Process<'_>) -> Result<(), String> {
        let read = match read_process(self.pid, piece, &mut self.buffer) {
            Ok(n) => n,
            // Gone, or its first page is.
            Err(e) if Errno::from_io_error(&e) == Some(Errno::FAULT) || is_absent(&e) => 0,
            Err(e) => return Err(format!("process {} cannot be read: {e}", self.pid)),
        };
        self.done.read += Bytes(read as u64);
        let zero: Vec<bool> =
            self.buffer[..read].chunks_exact(PAGE as usize).map(is_zero).collect();
        let places: Vec<u64> =
            piece.iter().flat_map(|r| (r.start..r.end()).step_by(PAGE as usize)).collect();
        let split = self.order.split.filter(|_| huge);
        let (advice, chosen) = choose(&places, &zero, split);
        if chosen.is_empty() {
            return Ok(());
        }
        let zeros = zero.iter().filter(|z| **z).count() as u64;
        self.done.chosen += Bytes::pages(zeros);
        if advice == Advice::PageOut {
            self.swap = self.swap - Bytes::pages(zeros);
        }
        process.advise(&chosen, advice)
    }
}

fn is_zero(page: &[u8]) -> bool {
    // By words of 16 bytes, which compilers turn into the widest there are; most pages
    // end it at the first.
    page.chunks_exact(128).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

/// What the kernel is told of pages at these places, by whether each was zeros: never
/// of one that was not. `split`: they are a huge page, worth it from this number on.
fn choose(places: &[u64], zero: &[bool], split: Option<u64>) -> (Advice, Vec<Range>) {
    let zeros = places.iter().zip(zero).filter(|(_, zero)| **zero).map(|(place, _)| *place);
    let Some(least) = split else {
        let mut runs: Vec<Range> = Vec::new();
        zeros.for_each(|start| push(&mut runs, Range { start, len: PAGE }));
        return (Advice::PageOut, runs);
    };
    // All of them, and it would not be split.
    let worth = zero.len() == PAGES && zeros.clone().count() as u64 >= least.max(1);
    let one = zeros.take(usize::from(worth)).map(|start| Range { start, len: PAGE });
    (Advice::Cold, one.collect())
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::VmId;
    use proptest::prelude::*;

    use super::*;
    use crate::probe::process::read_stat;
    use crate::probe::regions::{Region, read_smaps};

    proptest! {
        #[test]
        fn only_pages_that_were_zeros_are_told_of(
            zero in prop::collection::vec(any::<bool>(), 0..600),
            huge in any::<bool>(), least in 0u64..600, from in 0u64..100,
        ) {
            let places: Vec<u64> = (from..).map(|n| n * PAGE).take(zero.len()).collect();
            let (advice, chosen) = choose(&places, &zero, huge.then_some(least));
            let told: Vec<u64> =
                chosen.iter().flat_map(|r| (r.start..r.end()).step_by(PAGE as usize)).collect();
            let all: Vec<u64> =
                places.iter().zip(&zero).filter(|(_, z)| **z).map(|(p, _)| *p).collect();
            prop_assert!(told.iter().all(|p| all.contains(p)));
            prop_assert_eq!(advice == Advice::Cold, huge);
            match huge {
                false => prop_assert_eq!(told, all),
                true => {
                    let worth = zero.len() == PAGES && all.len() as u64 >= least.max(1);
                    prop_assert_eq!(told.len(), usize::from(worth));
                }
            }
        }
    }

    #[test]
    fn a_page_is_zeros_when_each_of_its_bytes_is() {
        let mut page = vec![0; PAGE as usize];
        assert!(is_zero(&page));
        for at in [0, 1, 127, 128, 2049, 4095] {
            page[at] = 1;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
    }

    /// Memory of this very process. Needs nothing but the right to ask (PAGEMAP_SCAN's
    /// kernel, and no seccomp in the way); without it nothing is shown and it says so.
    #[test]
    fn zeros_of_huge_pages_go_and_everything_reads_as_before() {
        const BLOCKS: usize = 32;
        let root = Root::default();
        if !ways(&root).split {
            return eprintln!("not tried: a kernel before 6.12");
        }
        let mut memory = Huge::new(BLOCKS);
        // Of every second huge page a twentieth is left; the others are full.
        let content = |n: usize| {
            let full = n / PAGES % 2 == 1 || n.is_multiple_of(20);
            if full { (n % 250) as u8 + 1 } else { 0 }
        };
        memory.pages().enumerate().for_each(|(n, page)| page.fill(content(n)));
        let huge = memory.in_huge_pages();
        if huge < Bytes::mib(60) {
            return eprintln!("not tried: only {huge} in huge pages");
        }
        let id = std::process::id();
        let vm = VmId { pid: id, start: read_stat(&root, id).unwrap().unwrap().start };
        let order = ZeroOrder {
            vm,
            name: String::new(),
            read: Bytes(u64::MAX),
            ms: 60_000,
            split: Some(256),
            swap: Bytes::ZERO,
            reason: String::new(),
        };
        let process = Process::open(&root, vm).unwrap();
        let mut scan = ZeroScan::open(&root, id, &order).unwrap();
        let before = memory.resident();
        // The kernel leaves out a huge page that somebody holds at the moment: a process
        // forked beside this test, for one. Those are met again in the next round.
        for round in 1..=5 {
            rest(&[memory.range], 0, WINDOW).for_each(|w| scan.window(w, &process).unwrap());
            let now = memory.resident();
            println!("round {round}: {:?}; resident {before} → {now}", scan.done);
            if round == 1 {
                assert_eq!(scan.done.read, Bytes(BLOCKS as u64 * HUGE));
            }
            if before - now >= Bytes::mib(28) {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        let (after, whole) = (memory.resident(), memory.in_huge_pages());
        println!("{huge} → {whole} in huge pages");
        assert!(scan.done.chosen >= Bytes::mib(30), "{:?}", scan.done);
        assert!(before - after >= Bytes::mib(28), "{before} → {after}");
        // Who holds no zeros is not split.
        assert!(whole >= Bytes::mib(30), "{whole}");
        for (n, page) in memory.pages().enumerate() {
            let want = content(n);
            assert!(page.iter().all(|b| *b == want), "page {n}");
        }
    }

    /// Memory in huge pages, as far as there are any.
    struct Huge {
        range: Range,
    }

    impl Huge {
        fn new(blocks: usize) -> Huge {
            let len = (blocks + 1) * HUGE as usize;
            let (read, how) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
            // SAFETY: a new mapping, at no address that we ask for.
            let new = unsafe {
                libc::mmap(std::ptr::null_mut(), len, read, how | libc::MAP_ANONYMOUS, -1, 0)
            };
            assert_ne!(new, libc::MAP_FAILED);
            // SAFETY: all of it is the mapping just made.
            unsafe { libc::madvise(new, len, libc::MADV_HUGEPAGE) };
            // Its last huge page is left over, and it is never unmapped.
            let start = (new as u64).next_multiple_of(HUGE);
            Huge { range: Range { start, len: blocks as u64 * HUGE } }
        }

        fn pages(&mut self) -> std::slice::ChunksExactMut<'_, u8> {
            let (start, len) = (self.range.start as *mut u8, self.range.len as usize);
            // SAFETY: mapped for good, and only `self` names it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
            bytes.chunks_exact_mut(PAGE as usize)
        }

        fn sum(&self, of: fn(&Region) -> Bytes) -> Bytes {
            let all = read_smaps(&Root::default(), std::process::id()).unwrap().unwrap();
            let end = self.range.end();
            let ours = |r: &&Region| r.range.start < end && r.range.end() > self.range.start;
            all.iter().filter(ours).map(of).sum()
        }

        fn resident(&self) -> Bytes {
            self.sum(|r| r.resident)
        }

        fn in_huge_pages(&self) -> Bytes {
            self.sum(|r| r.huge)
        }
    }
}
