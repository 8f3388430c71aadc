//! Whole guests through whole steps; the last test has what must hold whatever is ordered.

use proptest::prelude::*;

use super::*;
use crate::demand::Curve;

fn plenty() -> Room {
    Room {
        free: Bytes::gib(64),
        can_swap_out: Bytes::ZERO,
        can_swap_in: Bytes::gib(1),
        ..Room::default()
    }
}

fn lived(guest: &mut Guest, from_ms: u64, seconds: u64) {
    for i in 1..=seconds * 10 {
        guest.live(from_ms + i * 100, 100, &mut plenty());
    }
}

fn guest(need: Curve) -> Guest {
    let mut g = Guest::new(0, 1, Spec::new(Bytes::gib(4), Need::of(need)));
    g.switch(0);
    g
}

#[test]
fn a_guest_that_is_on_uses_what_its_kernel_does() {
    assert_eq!(guest(Curve::flat(Bytes::gib(1))).used().0 >> 20, 64 + 65);
    assert_eq!(guest(Curve::flat(Bytes::mib(50))).used(), Bytes::mib(50), "or what it wants");
}

#[test]
fn free_memory_is_given_to_the_balloon_at_its_rate_and_frees_what_was_touched() {
    let mut g = guest(Curve::flat(Bytes::gib(1)));
    g.stale = Bytes::gib(2);
    lived(&mut g, 0, 5);
    let before = g.resident();
    g.order(Bytes::gib(2));
    lived(&mut g, 5_000, 1);
    assert!(g.actual.abs_diff(Bytes::gib(3)) < Bytes::mib(2), "{}", g.actual);
    lived(&mut g, 6_000, 2);
    assert_eq!(g.actual, Bytes::gib(2));
    assert!(before - g.resident() > Bytes::mib(600), "{} {}", before, g.resident());
    assert_eq!(g.counts.stall_ms, 0.0);
}

#[test]
fn a_balloon_stops_at_what_is_in_use() {
    let mut g = guest(Curve::flat(Bytes::gib(3)));
    lived(&mut g, 0, 10);
    g.order(Bytes::gib(1));
    lived(&mut g, 10_000, 10);
    assert!(g.actual > Bytes::gib(3) && g.actual < Bytes::mib(3200), "{}", g.actual);
}

#[test]
fn one_that_cannot_help_itself_kills_and_one_that_can_waits() {
    let grown = |deflate_on_oom| {
        let mut g = guest(Curve::burst(20_000, 60_000, Bytes::gib(3)));
        g.spec.deflate_on_oom = deflate_on_oom;
        g.order(Bytes::gib(1));
        lived(&mut g, 0, 60);
        (g.counts.ooms, g.counts.stall_ms, g.alloc)
    };
    let (ooms, _, _) = grown(false);
    assert!(ooms > 0);
    let (ooms, stall, alloc) = grown(true);
    assert_eq!((ooms, alloc), (0, Bytes::gib(3)));
    // 2 GiB at 100 MB/s.
    assert!((20_000.0..24_000.0).contains(&stall), "{stall}");
}

#[test]
fn one_that_waits_for_the_host_neither_swaps_nor_helps_itself() {
    let mut g = guest(Curve::flat(Bytes::gib(3)));
    g.spec.swap = Bytes::gib(1);
    (g.actual, g.target) = (Bytes::mib(3500), Bytes::mib(3500));
    for i in 1..=50 {
        g.live(i * 100, 100, &mut Room::default());
    }
    assert_eq!((g.actual, g.counts.swap_out, g.counts.ooms), (g.target, Bytes::ZERO, 0));
    assert!(g.counts.host_stall_ms > 4_900.0, "{:?}", g.counts);
}

#[test]
fn dropped_files_are_read_again_and_waited_for() {
    let mut g = guest(Curve::flat(Bytes::mib(100)));
    g.spec.need.files = Curve::flat(Bytes::gib(2));
    lived(&mut g, 0, 20);
    assert_eq!((g.hot_cache, g.counts.stall_ms), (Bytes::gib(2), 0.0));
    g.order(Bytes::gib(1));
    lived(&mut g, 20_000, 20);
    assert!(g.counts.stall_ms > 5_000.0 && g.counts.refaults > 1000);
    let before = g.counts.stall_ms;
    g.order(Bytes::gib(4));
    lived(&mut g, 40_000, 20);
    let took = g.counts.stall_ms - before;
    assert!((2_000.0..8_000.0).contains(&took), "{took}");
}

#[test]
fn hot_pages_swapped_out_by_the_host_stall_the_guest_and_idle_ones_do_not() {
    let mut g = guest(Curve::flat(Bytes::gib(2)));
    lived(&mut g, 0, 10);
    g.swap_out(Bytes::gib(1));
    lived(&mut g, 10_000, 5);
    assert_eq!(g.counts.host_stall_ms, 0.0, "the idle half");
    g.swap_out(Bytes::mib(200));
    lived(&mut g, 15_000, 5);
    assert!((1_000.0..1_200.0).contains(&g.counts.host_stall_ms), "{:?}", g.counts);
    assert_eq!(g.counts.host_swap_in, Bytes::mib(200));
}

#[test]
fn one_that_is_paused_wants_nothing_and_its_balloon_does_not_move() {
    let mut g =
        guest(Curve::flat(Bytes::gib(1)).plus(&Curve::burst(12_000, 60_000, Bytes::gib(1))));
    g.spec.paused = (10_000, 20_000);
    lived(&mut g, 0, 9);
    assert!(g.by_coldness()[2] > Bytes::mib(500), "{:?}", g.by_coldness());
    g.order(Bytes::gib(2));
    let before = (Bytes::gib(3), Bytes::gib(1));
    lived(&mut g, 9_000, 1);
    assert!(g.paused && g.actual.abs_diff(before.0) < Bytes::mib(120), "{}", g.actual);
    let actual = g.actual;
    lived(&mut g, 10_000, 9);
    assert_eq!((g.actual, g.alloc, g.by_coldness()[2]), (actual, before.1, Bytes::ZERO));
    lived(&mut g, 19_000, 6);
    assert!(!g.paused && g.alloc == Bytes::gib(2) && g.actual < Bytes::mib(2300), "{}", g.actual);
}

/// A guest that is started during the run has no balloon until its kernel is up.
#[test]
fn one_that_boots_follows_no_order_yet() {
    let mut g = guest(Curve::flat(Bytes::gib(1)));
    (g.spec.boots, g.booted_ms) = (true, 0);
    g.order(Bytes::gib(3));
    lived(&mut g, 0, 7);
    assert_eq!(g.actual, Bytes::gib(4));
    lived(&mut g, 7_000, 3);
    assert_eq!(g.actual, Bytes::gib(3));
}

proptest! {
    #[test]
    fn bytes_are_conserved_whatever_is_ordered(
        seed in any::<u64>(), orders in proptest::collection::vec(0u64..5000, 1..40),
        swap in 0u64..1000, free in 0u64..4000, deflate in any::<bool>(), alike in 0u64..2000,
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut need = Need::of(Curve::phases(&mut rng, 200_000, Bytes::mib(50), Bytes::gib(4)));
        need.files = Curve::phases(&mut rng, 200_000, Bytes::ZERO, Bytes::gib(2));
        need.stream = 30e6;
        let mut spec = Spec::new(Bytes::gib(4), need);
        spec.swap = Bytes::mib(swap);
        spec.deflate_on_oom = deflate;
        (spec.alike, spec.rewrites) = (Bytes::mib(alike), 10e6);
        (spec.huge, spec.zeros) = (0.5, 0.5);
        let mut g = Guest::new(0, seed, spec);
        g.switch(0);
        for (i, to) in orders.iter().enumerate() {
            g.order(Bytes::mib(*to));
            if i % 3 == 0 {
                let cold: Bytes = g.by_coldness().into_iter().sum();
                prop_assert_eq!(cold, g.private());
                prop_assert_eq!(g.private() + g.partial, g.resident());
                g.swap_out(cold.share(0.3));
            }
            if i % 5 == 0 {
                let (before, most) = (g.private() + g.merged, g.alike());
                g.merge(most.share(0.5), most);
                prop_assert_eq!(g.private() + g.merged, before);
                let held = g.resident();
                prop_assert_eq!(g.split() + g.resident(), held);
                let (zeros, stale) = (g.zeros, g.stale);
                g.free_zeros(Bytes::mib(512));
                prop_assert_eq!(stale - g.stale, zeros - g.zeros);
                g.open = i % 10 == 0;
            }
            for s in 0..20 {
                let mut room = Room {
                    free: Bytes::mib(free) - g.resident(),
                    can_swap_in: Bytes::mib(50),
                    ..Room::default()
                };
                let before = (room.free, g.resident());
                g.live(i as u64 * 2_000 + s * 100, 100, &mut room);
                // What became resident came out of the room.
                prop_assert!(g.resident() <= before.1 + (before.0 - room.free) + Bytes(64));
                prop_assert!(g.touched() <= g.actual + Bytes(64), "{g:?}");
                prop_assert!(g.out + g.merged <= g.touched(), "{g:?}");
                prop_assert!(g.zeros <= g.held(), "{g:?}");
                prop_assert!(g.actual <= g.spec.ram);
                prop_assert!(g.guest_swapped <= g.spec.swap.min(g.alloc));
                prop_assert!(g.counts.host_stall_ms <= g.counts.stall_ms + 1.0);
            }
        }
    }
}
