//! RAM that an agent recycles is closed to KSM, however often it is opened, and what
//! is open is not recycled before it is closed: a merged page has lost its write-protection.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use ebb_core::range::Range;
use ebb_core::units::Bytes;
use ebb_core::wire::abi::PAGE;
use ebb_core::wire::{Advise, Answer, Attach, Command, Recycle, Refusal, Segment};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;

/// Whether any mapping within the guest's memory is marked for KSM (`mg`).
fn open(guest: &Guest) -> bool {
    open_among(guest, 0, guest.pages)
}

/// The same of the mappings of `pages` pages from the `first` on.
fn open_among(guest: &Guest, first: u64, pages: u64) -> bool {
    let start = guest.memory.address() + first * PAGE;
    let end = start + pages * PAGE;
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    smaps.lines().any(|line| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let hex = |t| u64::from_str_radix(t, 16).ok();
        if let Some((Some(from), Some(to))) = range.map(|(a, b)| (hex(a), hex(b))) {
            within = from < end && to > start;
        }
        within && line.starts_with("VmFlags:") && line.split(' ').any(|f| f == "mg")
    })
}

/// A guest all of whose RAM is open to KSM, as QEMU opens it.
fn mergeable(mib: u64, memory: RamKind) -> Option<Arc<Guest>> {
    let guest = Guest::new(mib, memory);
    match guest.mergeable() {
        Ok(()) => Some(guest),
        Err(e) => {
            eprintln!("skipped: this kernel has no KSM: {e}");
            None
        }
    }
}

/// The same with its beats, and an agent that may use its map and leaves this out.
fn merging(mib: u64, memory: RamKind, left_out: &str) -> Option<(Arc<Guest>, Agent, Beside)> {
    let guest = mergeable(mib, memory)?;
    let (agent, beats) = attached(&guest, Faults::parse(left_out).unwrap());
    Some((guest, agent, beats))
}

#[test]
fn an_agent_takes_ram_out_of_ksm_before_it_protects_and_keeps_it_out() {
    for memory in [RamKind::Small, RamKind::Huge] {
        let Some(guest) = mergeable(32, memory) else { return };
        assert!(open(&guest), "as QEMU opens it");
        let (mut agent, _beats) = attached(&guest, Faults::default());
        assert!(!open(&guest));
        guest.mergeable().unwrap();
        assert!(open(&guest), "somebody opened it again");
        assert!(within(Duration::from_secs(20), || {
            agent.step();
            !open(&guest)
        }));
    }
}

/// A daemon that does not merge leaves alone what QEMU opened, as long as the guest has no
/// module. One that does says what is to be open, and takes what it sees open for its own.
#[test]
fn without_a_map_ram_stays_open_unless_the_daemon_merges() {
    let Some(guest) = mergeable(32, RamKind::Small) else { return };
    let mut agent = Agent::default();
    for keep_open in [false, true] {
        attach(&mut agent, Attach { keep_open, ..guest.attach() }).unwrap();
        agent.step();
        assert_eq!(open(&guest), !keep_open);
    }
}

/// QEMU has one mapping for the RAM on both sides of the hole below 4 GiB. The scanner names ranges by
/// address and does not know of the hole.
#[test]
fn a_range_may_cross_the_hole_below_4_gib() {
    let Some(guest) = mergeable(32, RamKind::Small) else { return };
    let [half, hva] = [guest.pages * PAGE / 2, guest.memory.address()];
    let segments = vec![
        Segment { gpa: 0, size: half, hva },
        Segment { gpa: 4 << 30, size: half, hva: hva + half },
    ];
    let attach = Attach { segments, keep_open: true, ..guest.attach() };
    let mut agent = agent_of(attach, Faults::default());
    let middle = guest.pages / 2;
    assert_eq!(advise(&mut agent, &guest, &[(middle - 64, 128)]).unwrap(), 128 * PAGE);
    assert!(open_among(&guest, middle - 64, 64) && open_among(&guest, middle, 64));
    let beyond = (guest.pages - 64, 128);
    assert!(advise(&mut agent, &guest, &[beyond]).is_err());
}

#[test]
fn shared_ram_is_no_matter_of_ksm() {
    let (guest, _agent, _beats) = Guest::attached(32, RamKind::Memfd, Faults::default());
    assert!(!open(&guest));
}

/// Opens these pages of a guest to KSM and no others.
fn advise(agent: &mut Agent, guest: &Guest, spans: &[(u64, u64)]) -> Result<u64, Refusal> {
    let base = guest.memory.address();
    let range = |(page, pages): &(u64, u64)| Range { start: base + page * PAGE, len: pages * PAGE };
    let open: Vec<_> = spans.iter().map(range).collect();
    Advise::all(&open).into_iter().map(|a| advise_one(agent, a)).last().unwrap()
}

fn advise_one(agent: &mut Agent, advise: Advise) -> Result<u64, Refusal> {
    match ask(agent, Command::Advise(advise))? {
        Answer::Advised { open } => Ok(open.0),
        other => panic!("{other:?}"),
    }
}

/// What of these pages is there after all that is free was recycled.
fn left(agent: &mut Agent, guest: &Guest, first: u64, pages: u64) -> u64 {
    recycle(agent, Recycle { budget_ms: 10_000, ..Recycle::default() }).unwrap();
    (first..first + pages).filter(|p| guest.holds(*p, !*p)).count() as u64
}

/// The pages that can be recycled, and those that are open, as the agent says.
fn held_and_open(agent: &mut Agent) -> (u64, u64) {
    let status = status(agent, true);
    (status.held.unwrap().0 >> 12, status.open.unwrap().0 >> 12)
}

/// Of a run that is longer than is closed at once a part goes with each order, and no more is closed
/// than an order takes. Blocks go whole.
#[test]
fn a_long_free_run_that_is_open_goes_part_by_part() {
    for memory in [RamKind::Small, RamKind::Huge] {
        let Some((guest, mut agent, _beats)) = merging(64, memory, "") else { return };
        // 46 MiB.
        let (first, pages) = (4096, 11_776);
        advise(&mut agent, &guest, &[(first, pages)]).unwrap();
        guest.fill_and_free(first, pages);
        let small = Recycle { max_bytes: Some(Bytes::mib(2)), ..Recycle::default() };
        recycle(&mut agent, small).unwrap();
        assert_eq!(held_and_open(&mut agent), (pages - 512, pages - 512));
        assert_eq!(left(&mut agent, &guest, first, pages), pages - 512 - 8192);
        assert_eq!(left(&mut agent, &guest, first, pages), 0);
        assert!(!open(&guest));
    }
}

/// Where little memory is left, to close a range that is merged has the kernel kill a process.
#[test]
fn no_more_is_closed_than_there_is_room_for() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "") else { return };
    advise(&mut agent, &guest, &[(4096, 2048)]).unwrap();
    guest.fill_and_free(4096, 2048);
    let closing = |mib| Recycle { most_closed: Some(Bytes::mib(mib)), ..Recycle::default() };
    let mut with = |mib| {
        recycle(&mut agent, closing(mib)).unwrap();
        held_and_open(&mut agent)
    };
    assert_eq!(with(2), (1536, 1536));
    assert_eq!(with(0), (0, 1536), "it is not promised");
    within(Duration::from_secs(20), || held_and_open(&mut agent).0 > 0);
    assert_eq!(held_and_open(&mut agent), (1536, 1536), "nobody has asked meanwhile");
    recycle(&mut agent, closing(8)).unwrap();
    assert_eq!(held_and_open(&mut agent), (0, 0));
}

/// What a guest frees in ranges that are open is closed, 64 KiB and more at a time, and recycled.
/// What it has in use there stays open.
#[test]
fn what_is_free_in_open_ranges_is_closed_and_then_recycled() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "") else { return };
    // In use, free, in use, and fifteen free pages.
    assert_eq!(advise(&mut agent, &guest, &[(4096, 4096)]).unwrap(), 4096 << 12);
    guest.fill_and_free(4600, 2000);
    guest.fill_and_free(7000, 15);
    assert_eq!(held_and_open(&mut agent), (2000, 4096), "what is too short is not promised");
    assert_eq!(left(&mut agent, &guest, 4600, 2000), 0);
    assert_eq!(left(&mut agent, &guest, 7000, 15), 15);
    assert_eq!(held_and_open(&mut agent), (0, 2096));
    assert!(!open_among(&guest, 4600, 2000));
    assert!(open_among(&guest, 4096, 504) && open_among(&guest, 6600, 1592));
}

/// Left out, pages are discarded that are open: this is what the test above would see.
#[cfg(feature = "faults")]
#[test]
fn without_closing_what_is_recycled_is_open() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "no_close") else { return };
    advise(&mut agent, &guest, &[(4096, 4096)]).unwrap();
    guest.fill_and_free(4600, 2000);
    assert_eq!(left(&mut agent, &guest, 4600, 2000), 0);
    assert!(open_among(&guest, 4600, 2000));
}

#[test]
fn what_is_open_to_ksm_is_not_recycled_and_the_other_way_round() {
    for memory in [RamKind::Small, RamKind::Huge] {
        let Some((guest, mut agent, _beats)) = merging(32, memory, "") else { return };
        guest.fill_and_free(1024, 4096);
        // Two spans, both too short to be closed for what is free.
        assert_eq!(advise(&mut agent, &guest, &[(1100, 8), (1536, 15)]).unwrap(), 23 << 12);
        assert!(open(&guest));
        assert_eq!(left(&mut agent, &guest, 1024, 4096), 23);
        // It stays open, and the rest closed, when the agent looks again.
        guest.mergeable().unwrap();
        std::thread::sleep(Duration::from_millis(1100));
        agent.step();
        assert!(open(&guest));
        // Closed in part, then whole: recycled again.
        assert_eq!(advise(&mut agent, &guest, &[(1536, 12)]).unwrap(), 12 << 12);
        assert_eq!(left(&mut agent, &guest, 1024, 4096), 12);
        assert_eq!(advise(&mut agent, &guest, &[]).unwrap(), 0);
        assert!(!open(&guest));
        assert_eq!(left(&mut agent, &guest, 1024, 4096), 0);
        // Not the tripwire, not what is no RAM, nothing odd; and nothing is changed.
        assert_eq!(advise(&mut agent, &guest, &[(0, 8)]), Ok(0));
        let bad: [&[(u64, u64)]; 3] = [&[(8190, 8)], &[(9, 8), (17, 8)], &[(8, 0)]];
        for spans in bad {
            let no = advise(&mut agent, &guest, spans).unwrap_err();
            assert!(no.text.contains("cannot be opened"), "{no:?}");
        }
        assert!(!open(&guest));
        // Stretch by stretch: what lies in others stays as it is.
        advise(&mut agent, &guest, &[(1100, 8), (2100, 100), (3000, 8)]).unwrap();
        let at = |page: u64| guest.memory.address() + page * PAGE;
        let within = |from, to, open| Advise { within: (at(from), at(to)), open };
        assert_eq!(
            advise_one(&mut agent, within(1104, 2150, vec![(96, 4)])),
            Ok((4 + 4 + 50 + 8) << 12)
        );
        assert_eq!(advise_one(&mut agent, within(1500, 3008, vec![])), Ok((4 + 4) << 12));
        assert_eq!(advise(&mut agent, &guest, &[]), Ok(0));
    }
}

/// With many ranges open the rest is closed again only now and then, which takes long; but
/// always before anything of it is recycled, and guest page 0 each second.
#[test]
fn beside_many_open_ranges_nothing_is_recycled_that_somebody_opened() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "") else { return };
    guest.fill_and_free(4096, 2048);
    let spans: Vec<(u64, u64)> = (0..200).map(|n| (1024 + 8 * n, 4)).collect();
    // All but those where UEFI's first pages are.
    assert_eq!(advise(&mut agent, &guest, &spans).unwrap(), (800 - 16) << 12);
    guest.mergeable().unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    agent.step();
    assert!(!open_among(&guest, 0, 1), "the tripwire");
    assert!(open_among(&guest, 4096, 1), "or this test shows nothing");
    assert_eq!(left(&mut agent, &guest, 4096, 2048), 0);
    assert!(!open_among(&guest, 4096, 2048));
    assert!(open_among(&guest, 1024, 1600) && open_among(&guest, 1024, 1));
}

#[test]
fn what_is_open_outlives_the_daemon_that_opened_it_unless_the_next_one_does_not_merge() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "") else { return };
    let again = |agent: &mut Agent, keep_open| {
        agent.detach();
        attach(agent, Attach { keep_open, ..guest.attach() }).unwrap();
    };
    guest.fill_and_free(1024, 4096);
    advise(&mut agent, &guest, &[(1100, 8), (1536, 15)]).unwrap();
    agent.detach();
    assert!(open(&guest), "merged stays merged");
    // An attachment that fails forgets nothing of it.
    let wrong = Attach { segments: Vec::new(), keep_open: true, ..guest.attach() };
    assert!(attach(&mut agent, wrong).is_err());
    again(&mut agent, true);
    assert!(open(&guest));
    // It is known what is: the rest is recycled, this is not, and it can be closed.
    assert!(ready(&mut agent, Duration::from_secs(10)));
    assert_eq!(left(&mut agent, &guest, 1024, 4096), 23);
    assert_eq!(advise(&mut agent, &guest, &[(1536, 15)]).unwrap(), 15 << 12);
    again(&mut agent, false);
    assert!(!open(&guest));
}

/// Left out, a page is open to both: this is what the test above would see.
#[cfg(feature = "faults")]
#[test]
fn without_keeping_them_apart_what_is_open_is_recycled() {
    let Some((guest, mut agent, _beats)) = merging(32, RamKind::Small, "no_apart") else { return };
    guest.fill_and_free(1024, 2048);
    advise(&mut agent, &guest, &[(1536, 512)]).unwrap();
    assert_eq!(left(&mut agent, &guest, 1024, 2048), 0);
}
