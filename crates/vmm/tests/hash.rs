//! What the agent tells the scanner of merging: hashes of the pages that are in memory
//! and not free, and nothing is changed by telling.

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use common::*;
use ebb_core::page_hash::{Key, SECRET};
use ebb_core::wire::abi::PAGE;
use ebb_core::wire::hashes::{HashReply, HashRequest};
use ebb_core::wire::{Command, HugePages, Recycle};
use ebb_host::scan::agents::HashLink;
use ebb_host::sys::{Range, pagemap_scan};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;

const KEY: [u8; SECRET] = [3; SECRET];

fn link(agent: &mut Agent) -> HashLink {
    let (ours, theirs) = HashLink::pair(&[]).unwrap();
    agent.execute(&Command::Hashes, Some(theirs), &mut || false).unwrap();
    ours
}

/// Asks for pages of the guest, by number.
fn told(link: &HashLink, guest: &Guest, spans: &[(u64, u64)]) -> std::io::Result<HashReply> {
    link.ask(&request(guest, spans, false))
}

/// The question after whole pages, or after their lines.
fn request(guest: &Guest, spans: &[(u64, u64)], lines: bool) -> HashRequest {
    let base = guest.memory.address();
    let at = |(first, pages): &(u64, u64)| Range { start: base + first * PAGE, len: pages * PAGE };
    HashRequest { secret: KEY, lines, ranges: spans.iter().map(at).collect() }
}

/// By the number of the page in the guest.
fn pages(told: HashReply, guest: &Guest) -> BTreeMap<u64, u128> {
    let first = guest.memory.address() / PAGE;
    told.pages.into_iter().map(|(number, hash)| (number - first, hash)).collect()
}

/// The pages that are in memory, the zero page not counted.
fn present(guest: &Guest) -> Vec<u64> {
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let all = Range { start: guest.memory.address(), len: guest.pages * PAGE };
    let mut pages = Vec::new();
    let page = |at: u64| (at - all.start) / PAGE;
    pagemap_scan(pagemap.as_fd(), all, |r, _| pages.extend(page(r.start)..page(r.end()))).unwrap();
    pages
}

/// Places that have an entry in the page table at all.
fn mapped(guest: &Guest) -> usize {
    let file = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0; guest.pages as usize * 8];
    file.read_exact_at(&mut entries, guest.memory.address() / PAGE * 8).unwrap();
    let entry = |e: &[u8]| u64::from_ne_bytes(e.try_into().unwrap());
    entries.chunks_exact(8).filter(|e| entry(e) >> 63 == 1).count()
}

#[test]
fn pages_in_memory_are_hashed_others_are_not_and_stay_where_they_are() {
    for memory in [RamKind::Small, RamKind::Huge] {
        let (guest, mut agent, _beats) = Guest::attached(32, memory, Faults::default());
        let link = link(&mut agent);
        (2048..3000).for_each(|p| guest.write(p, p));
        (2560..2570).for_each(|p| guest.write(p, 7));
        (2600..2610).for_each(|p| guest.write(p, 0));
        (2100..2200).for_each(|p| guest.set(p, true));
        // What is free is left out as soon as the thread was told of the map.
        agent.step();
        let (before, entries) = (present(&guest), mapped(&guest));
        let all = told(&link, &guest, &[(512, 8192 - 512)]).unwrap();
        let lines = link.ask(&request(&guest, &[(512, 8192 - 512)], true)).unwrap();
        assert_eq!((lines.held, lines.free), (all.held, all.free), "{memory:?}");
        let lines = pages(lines, &guest);
        let held = before.iter().filter(|p| **p >= 512).count() as u64;
        assert_eq!((all.held, all.free), (held, 100), "{memory:?}");
        assert!(all.cpu_ns > 0);
        let found = pages(all, &guest);
        let key = Key::new(KEY);
        for page in before.iter().filter(|p| **p >= 512) {
            let words = guest.memory.words();
            let words = &words[(page * 512) as usize..][..512];
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(SeqCst).to_ne_bytes()).collect();
            let hashes = (key.page(&bytes).unwrap_or(0), key.of_page_lines(&bytes));
            let want = (!(2100..2200).contains(page)).then_some(hashes);
            let got = found.get(page).copied().zip(lines.get(page).copied());
            assert_eq!(got, want, "{memory:?}: page {page}");
        }
        assert!(found.values().filter(|h| **h == 0).count() >= 10, "zeros are told as such");
        assert_eq!((found[&2560], found[&2561]), (found[&2565], found[&2565]));
        assert_eq!((present(&guest), mapped(&guest)), (before, entries), "{memory:?}");
        // Only the pages that were asked for.
        let some = told(&link, &guest, &[(2048, 3), (2560, 1)]).unwrap();
        assert_eq!(pages(some, &guest).into_keys().collect::<Vec<_>>(), [2048, 2049, 2050, 2560]);
    }
}

#[test]
fn what_is_no_anonymous_ram_is_refused_and_no_hole_is_filled() {
    let (guest, mut agent, _beats) = Guest::attached(32, RamKind::Memfd, Faults::default());
    let link = link(&mut agent);
    let before = guest.resident();
    assert!(told(&link, &guest, &[(0, 4096)]).is_err());
    assert_eq!(guest.resident(), before);

    let (guest, mut agent, _beats) = Guest::attached(32, RamKind::Small, Faults::default());
    for spans in [[(8000, 400)], [(1 << 20, 1)]] {
        let link = self::link(&mut agent);
        assert!(told(&link, &guest, &spans).is_err());
        assert!(link.failure().is_some());
    }
    // A new socket is a new beginning, and one that is none is refused.
    let again = self::link(&mut agent);
    assert!(told(&again, &guest, &[(0, 512)]).is_ok());
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(agent.execute(&Command::Hashes, Some(file.into()), &mut || false).is_err());
    assert!(agent.execute(&Command::Hashes, None, &mut || false).is_err());
    let last = self::link(&mut agent);
    agent.detach();
    assert!(told(&last, &guest, &[(0, 512)]).is_err(), "it goes with the daemon");
}

/// While pages are hashed without a pause nothing is lost, and recycling goes on.
#[test]
fn hashing_beside_recycling_loses_nothing() {
    for memory in [RamKind::Small, RamKind::Huge] {
        let (guest, mut agent, _beats) = Guest::attached(64, memory, Faults::default());
        let (link, theirs) = (link(&mut agent), Arc::clone(&guest));
        let threads: Vec<_> = (0..2).map(|t| guest.working(t, 2)).collect();
        let scans = std::thread::spawn(move || {
            let mut scans = 0;
            while !theirs.stop.load(SeqCst) {
                // A piece of memory: the thread runs when nobody else wants to.
                told(&link, &theirs, &[(scans * 64 % theirs.pages, 64)]).unwrap();
                scans += 1;
            }
            scans
        });
        let want = Recycle { huge: HugePages::Split, split_min_pages: 8, ..Recycle::default() };
        guest.recycle_for(&mut agent, Duration::from_secs(4), &[want]);
        drop(threads);
        let scans = scans.join().unwrap();
        let (_, lost, recycled) = guest.outcome(&mut agent, &format!("{memory:?}, {scans} hashed"));
        assert_eq!(lost, 0, "{memory:?}");
        assert!(scans > 10 && recycled > 1 << 10, "{memory:?}: {scans} {recycled}");
    }
}

/// Left out, absent pages are read, which brings them in: what the first test would see.
#[cfg(feature = "faults")]
#[test]
fn without_asking_what_is_there_pages_are_brought_in() {
    let any = Faults::parse("any_page").unwrap();
    let (guest, mut agent, _beats) = Guest::attached(32, RamKind::Small, any);
    let link = link(&mut agent);
    let entries = mapped(&guest);
    for (at, lines, before) in [(4096, false, 0), (6144, true, 512)] {
        let all = link.ask(&request(&guest, &[(at, 512)], lines)).unwrap();
        assert_eq!(all.pages.len(), 512);
        assert_eq!(mapped(&guest), entries + before + 512, "{lines}");
    }
}
