//! The handshake in one process: no VM, but real memory, real userfaultfd, and a
//! guest that allocates at full speed. With each step left out (feature `faults`)
//! pages are lost; with all of them none is.

#![allow(unsafe_code)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use common::*;
use ebb_core::units::Bytes;
use ebb_core::wire::abi::PAGE;
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{AgentState, Answer, Attach, BLOCK_PAGES, Command};
use ebb_core::wire::{HugePages, Recycle, Refused, Segment};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use ebb_vmm::sys::{self, Range};

/// Recycles against working threads; returns allocations, losses and pages
/// recycled. Ends at the first loss.
fn contest(memory: RamKind, faults: Faults, huge: HugePages, time: Duration) -> (u64, u64, u64) {
    let (guest, mut agent, _beats) = Guest::attached(64, memory, faults);
    let threads: Vec<_> = (0..2).map(|t| guest.working(t, 2)).collect();
    let all = Recycle { huge, split_min_pages: 8, ..Recycle::default() };
    let limited = Recycle { max_bytes: Some(Bytes::mib(32)), ..all };
    guest.recycle_for(&mut agent, time, &[limited, all]);
    drop(threads);
    guest.outcome(&mut agent, &format!("{memory:?} {faults:?}"))
}

#[test]
fn nothing_is_lost_at_full_speed() {
    for (memory, huge) in [
        (RamKind::Small, HugePages::Keep),
        (RamKind::Huge, HugePages::Split),
        (RamKind::Memfd, HugePages::Keep),
    ] {
        let (made, lost, recycled) = contest(memory, Faults::default(), huge, seconds(4));
        assert_eq!(lost, 0, "{memory:?}");
        assert!(made > 10_000 && recycled > 1000, "{memory:?}: {made} {recycled}");
    }
}

#[cfg(feature = "faults")]
#[test]
fn each_step_left_out_loses_pages() {
    for (memory, faults) in LEFT_OUT {
        let parsed = Faults::parse(faults).unwrap();
        let (_, lost, _) = contest(memory, parsed, HugePages::Keep, Duration::from_secs(20));
        assert!(lost > 0, "{memory:?} {faults}: nothing was lost");
    }
    // What only makes it worse loses nothing by itself.
    for faults in ["wide", "any_page", "wide+any_page"] {
        let parsed = Faults::parse(faults).unwrap();
        let (_, lost, _) = contest(RamKind::Small, parsed, HugePages::Keep, Duration::from_secs(3));
        assert_eq!(lost, 0, "{faults}");
    }
}

/// A guest whose pages the VMM discards too (free page reporting): taken out (bit
/// clear), discarded, put back, perhaps allocated at once and written to.
fn reporting(guest: &Arc<Guest>) -> Beside {
    guest.beside(|guest| {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut holds = vec![0; 256];
        let mut serial = 0;
        while !guest.stop.load(SeqCst) {
            let at = rng.usize(..holds.len());
            let page = FIRST + at as u64;
            if holds[at] != 0 {
                if !guest.holds(page, holds[at]) {
                    guest.lost.fetch_add(1, SeqCst);
                }
                holds[at] = 0;
                guest.set(page, true);
                continue;
            }
            if rng.bool() {
                guest.set(page, false);
                let address = (guest.memory.address() + page * 4096) as *mut _;
                // SAFETY: a page of the guest's mapping, free and read as words only.
                unsafe { ebb_vmm::madvise_hook::madvise(address, 4096, libc::MADV_DONTNEED) };
                guest.set(page, true);
            }
            serial += 1;
            holds[at] = serial;
            guest.set(page, false);
            guest.write(page, serial);
            guest.allocations.fetch_add(1, SeqCst);
        }
    })
}

/// Recycles against [`reporting`]; what was allocated, lost, and recycled. Ends at
/// the first loss.
fn reported(faults: Faults, time: Duration) -> (u64, u64, u64) {
    let (guest, mut agent, _beats) = Guest::attached(16, RamKind::Small, faults);
    let thread = reporting(&guest);
    guest.recycle_for(&mut agent, time, &[Recycle::default()]);
    drop(thread);
    guest.outcome(&mut agent, &format!("reporting, {faults:?}"))
}

#[test]
fn discards_of_the_vmm_that_take_turns_lose_nothing() {
    let (made, lost, recycled) = reported(Faults::default(), seconds(4));
    assert!(lost == 0 && made > 1000 && recycled > 1000, "{made} {lost} {recycled}");
}

#[cfg(feature = "faults")]
#[test]
fn discards_of_the_vmm_with_turns_left_out_lose_pages() {
    let faults = Faults::parse("no_turns+wide").unwrap();
    let (_, lost, _) = reported(faults, Duration::from_secs(60));
    assert!(lost > 0, "nothing was lost");
    // The time between reading and discarding is not what loses them.
    let (_, lost, _) = reported(Faults::parse("wide").unwrap(), Duration::from_secs(3));
    assert_eq!(lost, 0);
}

/// A reset: firmware writes to page 0, then another kernel uses all memory and
/// knows of no map. Returns how many of its pages were lost.
fn reset(faults: Faults) -> usize {
    let (guest, mut agent, beats) = Guest::attached(64, RamKind::Small, faults);
    let pages = guest.pages;
    guest.fill_and_free(FIRST, pages - FIRST);
    drop(beats);
    let theirs = Arc::clone(&guest);
    let kernel = std::thread::spawn(move || {
        theirs.write(0, 7);
        let pages = FIRST..theirs.pages;
        for round in 0..20 {
            pages.clone().for_each(|p| theirs.write(p, p + round));
            std::thread::sleep(Duration::from_millis(10));
            let lost = pages.clone().filter(|p| !theirs.holds(*p, p + round)).count();
            if lost > 0 {
                return lost;
            }
        }
        0
    });
    while !kernel.is_finished() {
        let _ = recycle(&mut agent, Recycle::default());
    }
    let trips = status(&mut agent, false).counters.trips;
    let lost = kernel.join().unwrap();
    println!("{faults:?}: {lost} pages lost, {trips} trips");
    lost
}

#[test]
fn the_tripwire_drops_the_map_at_a_reset() {
    for _ in 0..10 {
        assert_eq!(reset(Faults::default()), 0);
    }
    #[cfg(feature = "faults")]
    for faults in ["no_tripwire", "no_doubt"] {
        assert!(reset(Faults::parse(faults).unwrap()) > 0, "{faults}");
    }
}

/// A snapshot that is loaded over a map, of which the pages with the tripwires come last.
/// Returns how many of its pages are lost.
fn loaded(faults: Faults) -> usize {
    let (guest, mut agent, beats) = Guest::attached(64, RamKind::Small, faults);
    guest.fill_and_free(FIRST, 4096);
    // The vCPUs stand still from here, and nobody says so.
    drop(beats);
    for _ in 0..6 {
        status(&mut agent, false);
        std::thread::sleep(Duration::from_millis(100));
    }
    (FIRST..FIRST + 4096).for_each(|p| guest.write(p, p + 1));
    let _ = recycle(&mut agent, Recycle { budget_ms: 2000, ..Recycle::default() });
    (FIRST..FIRST + 4096).filter(|p| !guest.holds(*p, p + 1)).count()
}

#[test]
fn a_map_that_does_not_beat_is_not_used() {
    assert_eq!(loaded(Faults::default()), 0);
    #[cfg(feature = "faults")]
    assert!(loaded(Faults::parse("no_beats").unwrap()) > 1000);
}

#[test]
fn what_the_firmware_has_below_one_mebibyte_is_never_given_back() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(0x20, 0xe0);
    recycle(&mut agent, Recycle::default()).unwrap();
    let held = |pages: std::ops::Range<u64>| pages.filter(|p| guest.holds(*p, !p)).count();
    assert_eq!((held(0x20..0x30), held(0x30..0x50)), (0, 0x20));
    assert_eq!((held(0x50..0xa0), held(0xa0..0x100)), (0, 0x60));
}

#[test]
fn memory_is_guarded_only_while_there_is_a_map() {
    let guest = Guest::new(64, RamKind::Small);
    let mut agent = agent_of(guest.attach(), Faults::default());
    // The header does not beat yet.
    assert!(!ready(&mut agent, Duration::from_millis(300)) && !guest.registered());
    let beats = guest.beating();
    assert!(ready(&mut agent, Duration::from_secs(10)) && guest.registered());
    let wires: Vec<u64> = status(&mut agent, false).wires.iter().map(|w| w.0).collect();
    assert_eq!(wires, [0x6000, 0]);
    // SeaBIOS's first write is to its stack.
    guest.word(0x6ff8).store(1, SeqCst);
    let seen = status(&mut agent, false);
    assert_eq!(seen.wires.iter().find(|w| w.1 > 0).map(|w| w.0), Some(0x6000), "{seen:?}");
    assert!(seen.why.unwrap_or_default().contains("page 0x6000"));
    drop(beats);
    assert!(within(Duration::from_secs(40), || {
        status(&mut agent, false);
        !guest.registered()
    }));
}

/// The pages that the agent gave back of a guest with UEFI, before its tripwire and after it, where
/// the page of the tripwire holds this; `None`: it stood aside.
fn given_back_with_uefi(filled_with: u64, faults: Faults) -> Option<(usize, usize)> {
    let guest = Guest::new(64, RamKind::Small);
    guest.keeps(0x81_0000);
    guest.write(0x810, filled_with);
    let _beats = guest.beating();
    let mut agent = agent_of(Attach { firmware: Firmware::Edk2, ..guest.attach() }, faults);
    let works = ready(&mut agent, Duration::from_secs(if filled_with == 0 { 1 } else { 10 }));
    let why = status(&mut agent, false).why.unwrap_or_default();
    assert!(works || why.contains("0x810000 is zero"), "{why}");
    let (before, after) = (FIRST..0x800, 0x820..0x1000);
    guest.fill_and_free(FIRST, before.end - FIRST);
    guest.fill_and_free(after.start, after.end - after.start);
    works.then(|| {
        recycle(&mut agent, Recycle::default()).unwrap();
        let gone = |pages: std::ops::Range<u64>| pages.filter(|p| !guest.holds(*p, !p)).count();
        (gone(before), gone(after))
    })
}

/// QEMU loads a snapshot from address 0 on, and does not write a page that is zero in it and in RAM.
#[test]
fn a_tripwire_of_uefi_is_no_page_of_zeros_and_nothing_before_it_is_given_back() {
    assert_eq!(given_back_with_uefi(0, Faults::default()), None);
    assert_eq!(given_back_with_uefi(7, Faults::default()), Some((0, 0x7e0)));
    #[cfg(feature = "faults")]
    {
        let fault = |name| Faults::parse(name).unwrap();
        assert!(given_back_with_uefi(0, fault("zero_wire")).is_some());
        let all = Some((0x800 - FIRST as usize, 0x7e0));
        assert_eq!(given_back_with_uefi(7, fault("no_early")), all);
    }
}

/// A guest whose RAM has just been registered, and whose tripwires are armed. It beats no more.
fn armed(faults: Faults) -> (Arc<Guest>, Agent) {
    let guest = Guest::new(64, RamKind::Small);
    let mut agent = agent_of(guest.attach(), faults);
    assert!(within(Duration::from_secs(10), || {
        guest.beat();
        status(&mut agent, false);
        guest.registered()
    }));
    (guest, agent)
}

/// Whether the agent writes its number to a header that has not beaten since the tripwires were
/// armed: the guest was reset while RAM was registered.
fn writes_to_what_is_gone(faults: Faults) -> bool {
    let (guest, mut agent) = armed(faults);
    assert!(!ready(&mut agent, Duration::from_millis(300)));
    let number = || guest.word(HEADER + 208).load(SeqCst);
    let written = number() != 0;
    guest.beat();
    status(&mut agent, false);
    assert!(number() != 0, "alive again, it is asked");
    written
}

#[test]
fn what_does_not_beat_once_the_tripwires_are_armed_is_not_written_to() {
    assert!(!writes_to_what_is_gone(Faults::default()));
    #[cfg(feature = "faults")]
    assert!(writes_to_what_is_gone(Faults::parse("no_late_beat").unwrap()));
}

/// Whether the agent writes its number to a header whose module has stopped since the tripwires
/// were armed: the page may be another's in a moment.
fn writes_to_what_has_stopped(faults: Faults) -> bool {
    let (guest, mut agent) = armed(faults);
    guest.put32(HEADER + 128, 4);
    guest.beat();
    status(&mut agent, false);
    guest.word(HEADER + 208).load(SeqCst) != 0
}

#[test]
fn what_has_stopped_once_the_tripwires_are_armed_is_not_written_to() {
    assert!(!writes_to_what_has_stopped(Faults::default()));
    #[cfg(feature = "faults")]
    assert!(writes_to_what_has_stopped(Faults::parse("no_state").unwrap()));
}

/// Whether RAM is registered of which a part was unmapped before the guest's header was there: a
/// DIMM was replaced, and its place in this process is another's.
fn registers_what_has_gone(faults: Faults) -> bool {
    let guest = Guest::new(64, RamKind::Small);
    guest.word(HEADER).store(0, SeqCst);
    let [half, hva] = [guest.pages * PAGE / 2, guest.memory.address()];
    let dimm = Segment { gpa: 4 << 30, size: half, hva: hva + half };
    let segments = vec![Segment { gpa: 0, size: half, hva }, dimm];
    let mut agent = agent_of(Attach { segments, ..guest.attach() }, faults);
    status(&mut agent, false);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let at = dimm.hva as *mut libc::c_void;
    // SAFETY: a part of the guest's own memory, to which there are no references.
    let new = unsafe { libc::mmap(at, half as usize, libc::PROT_NONE, flags, -1, 0) };
    assert_eq!(new, at);
    guest.write_header();
    assert!(within(Duration::from_secs(10), || {
        guest.beat();
        let why = status(&mut agent, false).why.unwrap_or_default();
        guest.registered() || why.contains("not writable in this process")
    }));
    guest.registered()
}

#[test]
fn what_was_replaced_since_the_daemon_told_of_it_is_not_registered() {
    assert!(!registers_what_has_gone(Faults::default()));
    #[cfg(feature = "faults")]
    assert!(registers_what_has_gone(Faults::parse("moved_ram").unwrap()));
}

/// Pages that are given back of a map although a tripwire has lost its protection, as KSM takes it
/// of what it merges: a reset would have gone unnoticed.
fn given_back_without_a_wire(faults: Faults) -> u64 {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, faults);
    assert!(ready(&mut agent, Duration::from_secs(10)));
    guest.fill_and_free(FIRST, 1024);
    sys::discard(Range { start: guest.memory.address(), len: PAGE }).unwrap();
    let _ = recycle(&mut agent, Recycle { budget_ms: 10_000, ..Recycle::default() });
    (FIRST..FIRST + 1024).filter(|page| !guest.holds(*page, !*page)).count() as u64
}

#[test]
fn nothing_is_given_back_once_a_tripwire_is_not_protected() {
    assert_eq!(given_back_without_a_wire(Faults::default()), 0);
    #[cfg(feature = "faults")]
    assert_eq!(given_back_without_a_wire(Faults::parse("no_look_at_wires").unwrap()), 1024);
}

/// The agent writes its number there, and would wait for itself.
#[test]
fn a_header_on_a_tripwire_is_none() {
    let guest = Guest::new(64, RamKind::Small);
    guest.word(HEADER).store(0, SeqCst);
    guest.write_header_at(0x6000);
    let mut agent = agent_of(guest.attach(), Faults::default());
    assert!(within(Duration::from_secs(10), || {
        let why = status(&mut agent, false).why.unwrap_or_default();
        why.contains("a header at 0x6000, where its firmware writes first")
    }));
}

#[test]
fn who_only_observes_touches_nothing() {
    let guest = Guest::new(64, RamKind::Small);
    let _beats = guest.beating();
    let mut agent = agent_of(Attach { observe: true, ..guest.attach() }, Faults::default());
    assert!(ready(&mut agent, Duration::from_secs(10)));
    guest.fill_and_free(FIRST, 4096);
    let status = status(&mut agent, true);
    assert_eq!((status.free, status.held), (Some(Bytes::mib(16)), Some(Bytes::mib(16))));
    assert!(recycle(&mut agent, Recycle::default()).is_err());
    assert!((FIRST..FIRST + 4096).all(|p| guest.holds(p, !p)) && !guest.registered());
    assert_eq!(guest.word(HEADER + 208).load(SeqCst), 0, "no challenge");
    assert!(status.wires.is_empty());
}

/// A header whose module is gone: the picture of one.
fn picture(faults: Faults) -> bool {
    let guest = Guest::new(64, RamKind::Small);
    guest.beat();
    guest.fill_and_free(FIRST, 1024);
    let mut agent = agent_of(guest.attach(), faults);
    ready(&mut agent, Duration::from_secs(2));
    let refused = recycle(&mut agent, Recycle::default()).is_err();
    refused && (FIRST..FIRST + 1024).all(|p| guest.holds(p, !p))
}

#[test]
fn a_picture_of_a_header_is_not_believed() {
    assert!(picture(Faults::default()));
    #[cfg(feature = "faults")]
    assert!(!picture(Faults::parse("no_challenge").unwrap()));
}

#[test]
fn what_is_free_and_held_comes_back_and_nothing_else() {
    for memory in [RamKind::Small, RamKind::Huge, RamKind::Memfd] {
        let (guest, mut agent, _beats) = Guest::attached(128, memory, Faults::default());
        // A block, half of one, single pages, and two that are not free.
        let pages = FIRST..FIRST + 1600;
        pages.clone().for_each(|p| guest.write(p, p));
        let free = |p: u64| p < FIRST + 768 || (p >= FIRST + 1024 && p.is_multiple_of(2));
        pages.clone().filter(|p| free(*p)).for_each(|p| guest.set(p, true));
        // Absent ones are free too, and cost nothing.
        (20_000..30_000).for_each(|p| guest.set(p, true));
        let before = status(&mut agent, true);
        let count = pages.clone().filter(|p| free(*p)).count() as u64;
        assert_eq!(before.free, Some(Bytes::pages(count + 10_000)), "{memory:?}");
        assert_eq!(before.held, Some(Bytes::pages(count)), "{memory:?}");
        let limited = Recycle { max_bytes: Some(Bytes::mib(2)), ..Recycle::default() };
        let first = recycle(&mut agent, limited).unwrap();
        assert_eq!((first.bytes, first.runs), (Bytes::mib(2), 1), "{memory:?} {first:?}");
        let kept = recycle(&mut agent, Recycle { min_run_pages: 2, ..Recycle::default() });
        let want = if memory == RamKind::Huge { 0 } else { 256 };
        assert_eq!(kept.unwrap().bytes, Bytes::pages(want), "{memory:?}");
        let split = Recycle { huge: HugePages::Split, ..Recycle::default() };
        let all = recycle(&mut agent, split).unwrap();
        assert_eq!(all.bytes, Bytes::pages(count - 512 - want), "{memory:?} {all:?}");
        assert_eq!(all.splits > 0, memory == RamKind::Huge, "{all:?}");
        // Before we look: reading a hole in a memfd fills it.
        assert_eq!(status(&mut agent, true).held, Some(Bytes::ZERO), "{memory:?}");
        for p in pages {
            assert!(guest.holds(p, if free(p) { 0 } else { p }), "{memory:?} {p}");
        }
    }
}

/// Pages of a block.
const BLOCK: u64 = BLOCK_PAGES as u64;

/// A block that is whole in the first pass and is not any more in the second. Returns how many
/// of its pages were discarded, each time that its first page was taken a little later.
fn allocated_between(faults: Faults) -> Vec<u64> {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, faults);
    let discard = |when| {
        guest.fill_and_free(FIRST, BLOCK);
        let mut asked = 0;
        let mut interrupt = || {
            if asked == when {
                guest.set(FIRST, false);
            }
            asked += 1;
            false
        };
        let limited = Recycle { max_bytes: Some(Bytes::gib(1)), ..Recycle::default() };
        let command = Command::Recycle(limited);
        let answer = agent.execute(&command, None, &mut interrupt).unwrap();
        let Answer::Recycled(done) = answer else { unreachable!() };
        done.bytes.0 / 4096
    };
    (0..8).map(discard).collect()
}

#[test]
fn no_page_is_discarded_twice_in_a_window() {
    let discarded = allocated_between(Faults::default());
    assert!(discarded.contains(&BLOCK) && discarded.contains(&(BLOCK - 1)));
    assert!(discarded.iter().all(|n| *n <= BLOCK), "{discarded:?}");
    #[cfg(feature = "faults")]
    {
        let discarded = allocated_between(Faults::parse("no_flush").unwrap());
        assert!(discarded.iter().any(|n| *n > BLOCK), "{discarded:?}");
    }
}

#[test]
fn small_limits_and_budgets_come_round() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(FIRST, 512);
    guest.fill_and_free(FIRST + 1024, 300);
    let small = Recycle { max_bytes: Some(Bytes::kib(400)), ..Recycle::default() };
    let sizes: Vec<_> = (0..4).map(|_| recycle(&mut agent, small).unwrap().bytes.0 >> 12).collect();
    assert_eq!(sizes, [100, 100, 100, 0]);
    let nothing = recycle(&mut agent, Recycle { budget_ms: 0, ..Recycle::default() }).unwrap();
    assert!(nothing.more && nothing.bytes == Bytes::ZERO);
    // A millisecond may pass before anything is done: then it is tried again.
    let of_a_ms = Recycle { budget_ms: 1, ..Recycle::default() };
    let mut rest = (0..100).map(|_| recycle(&mut agent, of_a_ms).unwrap().bytes);
    assert_eq!(rest.find(|bytes| *bytes > Bytes::ZERO), Some(Bytes::mib(2)));
}

#[test]
fn what_is_held_of_a_block_that_is_free_as_a_whole_goes_with_the_whole_blocks() {
    for memory in [RamKind::Small, RamKind::Memfd] {
        let (guest, mut agent, _beats) = Guest::attached(64, memory, Faults::default());
        guest.fill_and_free(FIRST, 512);
        // The host holds 300 pages of this one in two runs, and all of it is free.
        guest.fill_and_free(FIRST + 1024, 100);
        guest.fill_and_free(FIRST + 1224, 200);
        (FIRST + 1024..FIRST + 1536).for_each(|p| guest.set(p, true));
        // Of this one a part is free.
        guest.fill_and_free(FIRST + 2048, 300);
        let whole = Recycle { min_run_pages: BLOCK_PAGES, ..Recycle::default() };
        assert!(whole.is_whole());
        let done = recycle(&mut agent, whole).unwrap();
        assert_eq!((done.bytes, done.runs), (Bytes::pages(812), 3), "{memory:?}");
        assert_eq!(status(&mut agent, true).held, Some(Bytes::pages(300)), "{memory:?}");
    }
}

#[test]
fn only_what_was_marked_is_taken_when_asked_so() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(FIRST, 100);
    assert_eq!(status(&mut agent, false).free, Some(Bytes::pages(100)));
    assert_eq!(ask(&mut agent, Command::Mark), Ok(Answer::Marked));
    guest.fill_and_free(FIRST + 200, 100);
    let want = Recycle { marked: true, ..Recycle::default() };
    assert_eq!(recycle(&mut agent, want).unwrap().bytes, Bytes::pages(100));
    assert_eq!(recycle(&mut agent, Recycle::default()).unwrap().bytes, Bytes::pages(100));
}

#[test]
fn what_was_in_use_between_two_marks_is_not_taken() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(FIRST, 300);
    assert_eq!(ask(&mut agent, Command::Mark), Ok(Answer::Marked));
    let used = FIRST + 100..FIRST + 200;
    used.clone().for_each(|p| guest.set(p, false));
    // What it does when it is awake, a while after it has marked.
    std::thread::sleep(Duration::from_millis(200));
    agent.step();
    used.for_each(|p| guest.set(p, true));
    let want = Recycle { marked: true, ..Recycle::default() };
    assert_eq!(recycle(&mut agent, want).unwrap().bytes, Bytes::pages(200));
    assert_eq!(recycle(&mut agent, Recycle::default()).unwrap().bytes, Bytes::pages(100));
}

#[test]
fn after_standing_down_nothing_is_protected_or_known() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(FIRST, 100);
    assert_eq!(ask(&mut agent, Command::StandDown), Ok(Answer::Done));
    guest.write(0, 9);
    let refusal = recycle(&mut agent, Recycle::default()).unwrap_err();
    assert_eq!(refusal.kind, Refused::NotReady);
    assert!((FIRST..FIRST + 100).all(|p| guest.holds(p, !p)));
    // It begins anew, and two agents do not share one VM's memory.
    attach(&mut agent, guest.attach()).unwrap();
    assert!(ready(&mut agent, Duration::from_secs(5)));
    let mut other = agent_of(guest.attach(), Faults::default());
    assert!(!ready(&mut other, Duration::from_secs(2)));
    let seen = status(&mut other, false);
    assert_eq!(seen.state, AgentState::Aside);
    assert!(seen.why.unwrap_or_default().contains("another userfaultfd"));
}

#[test]
fn a_silent_guest_is_doubted_a_paused_one_is_not() {
    let (guest, mut agent, beats) = Guest::attached(64, RamKind::Small, Faults::default());
    guest.fill_and_free(FIRST, 100);
    drop(beats);
    ask(&mut agent, Command::RunState { running: false }).unwrap();
    std::thread::sleep(Duration::from_millis(3500));
    assert_eq!(status(&mut agent, false).state, AgentState::Ready);
    assert_eq!(recycle(&mut agent, Recycle::default()).unwrap().bytes, Bytes::pages(100));
    ask(&mut agent, Command::RunState { running: true }).unwrap();
    assert_eq!(status(&mut agent, false).state, AgentState::Ready);
    std::thread::sleep(Duration::from_millis(3500));
    assert_eq!(status(&mut agent, false).state, AgentState::Silent);
    // It beats again: asked once more, and believed.
    guest.stop.store(false, SeqCst);
    let _beats = guest.beating();
    assert!(ready(&mut agent, Duration::from_secs(5)));
    assert_eq!(status(&mut agent, false).counters.challenges, 2);
    ask(&mut agent, Command::ResetSeen).unwrap();
    assert_eq!(status(&mut agent, false).state, AgentState::Checking);
    assert!(ready(&mut agent, Duration::from_secs(5)));
}
