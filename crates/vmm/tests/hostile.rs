//! A guest that lies: its map flips all the time, its header and extents hold
//! anything. It may lose its own pages; the agent ends no process, touches
//! nothing outside of the RAM it was given, and takes bounded time.

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::*;
use ebb_core::wire::abi::PAGE;
use ebb_core::wire::{Attach, Command, HugePages, Recycle, Segment};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use ebb_vmm::recycle::cpu_ns;
use proptest::prelude::*;

/// RAM is all but the last `BEYOND` bytes, which are somebody else's.
const BEYOND: u64 = 2 << 20;

fn attach_part(guest: &Guest) -> Attach {
    let mut attach = guest.attach();
    attach.segments[0].size -= BEYOND;
    attach
}

fn beyond(guest: &Guest) -> std::ops::Range<u64> {
    guest.pages - BEYOND / PAGE..guest.pages
}

#[test]
fn a_map_that_flips_at_full_speed_costs_only_its_own_pages() {
    for memory in [RamKind::Small, RamKind::Memfd] {
        let guest = Guest::new(32, memory);
        (0..guest.pages).for_each(|p| {
            if p != 0 && !(16..19).contains(&p) {
                guest.write(p, !p);
            }
        });
        let _beats = guest.beating();
        let mut agent = agent_of(attach_part(&guest), Faults::default());
        assert!(ready(&mut agent, Duration::from_secs(10)));
        let liar = guest.beside(|theirs| {
            let mut rng = fastrand::Rng::with_seed(7);
            while !theirs.stop.load(SeqCst) {
                // The whole map, also the bits of pages that are no RAM.
                theirs.word(MAP + rng.u64(..512) * 8).store(rng.u64(..), SeqCst);
                if rng.u32(..1000) == 0 {
                    theirs.word(HEADER + 256 + rng.u64(..3) * 8).store(rng.u64(..), SeqCst);
                    std::thread::yield_now();
                    theirs.write_header();
                    theirs.word(HEADER + 256).store(0, SeqCst);
                }
                let page = rng.u64(FIRST..theirs.pages - BEYOND / PAGE);
                theirs.write(page, 1);
            }
        });
        let until = Instant::now() + Duration::from_secs(3);
        // Processor time: how long a call waits for its turn does not depend on the map.
        let mut longest = 0;
        while Instant::now() < until {
            let (begun, at) = (cpu_ns(), Instant::now());
            let huge = HugePages::Split;
            let _ = recycle(&mut agent, Recycle { huge, budget_ms: 50, ..Recycle::default() });
            longest = longest.max(cpu_ns() - begun);
            assert!(at.elapsed() < Duration::from_secs(60), "a call does not end");
        }
        drop(liar);
        println!("{memory:?}: longest call {longest} ns, {:?}", status(&mut agent, true));
        assert!(longest < 1_000_000_000, "{longest} ns");
        assert!(beyond(&guest).all(|p| guest.holds(p, !p)), "{memory:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    /// Whatever the changing part and the extents say, also after the module was
    /// believed.
    #[test]
    fn any_header_and_extents_stay_inside(
        words in prop::collection::vec((0..97u64, prop_oneof![any::<u64>(), 0..8u64]), 0..6),
        extents in prop::collection::vec((0..9u64, prop_oneof![
            any::<u64>(), (0..0x4000u64).prop_map(|p| p * PAGE)]), 0..6),
        late in any::<bool>(),
    ) {
        let guest = Guest::new(16 + 4, RamKind::Small);
        beyond(&guest).for_each(|p| guest.write(p, !p));
        guest.fill_and_free(FIRST, 1000);
        let mut agent = agent_of(attach_part(&guest), Faults::default());
        let spoil = || {
            for (at, value) in &words {
                guest.word(HEADER + at * 8).store(*value, SeqCst);
            }
            for (at, value) in &extents {
                guest.word(EXTENTS + at * 8).store(*value, SeqCst);
            }
        };
        if !late {
            spoil();
        }
        for step in 0..12 {
            guest.beat();
            if late && step == 6 {
                spoil();
            }
            let _ = recycle(&mut agent, Recycle { budget_ms: 20, ..Recycle::default() });
            status(&mut agent, true);
            let _ = ask(&mut agent, Command::Facts);
        }
        prop_assert!(beyond(&guest).all(|p| guest.holds(p, !p)));
    }

    /// Segments are the daemon's word, but checked all the same.
    #[test]
    fn any_segments_are_refused_or_our_own_memory(
        list in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..4),
        near in any::<bool>(),
    ) {
        let guest = Guest::new(20, RamKind::Small);
        let base = guest.memory.address();
        let place = |v: u64| if near { base.wrapping_add(v % (32 << 20)) & !4095 } else { v };
        let segments = list.iter().map(|(gpa, size, hva)| Segment {
            gpa: *gpa & !4095,
            size: (size % (64 << 20)) & !4095,
            hva: place(*hva),
        });
        let mut agent = Agent::default();
        let _ = attach(&mut agent, Attach { segments: segments.collect(), ..guest.attach() });
        status(&mut agent, true);
    }
}
