//! Tests of the governor.

use proptest::prelude::*;

use super::*;

const PLAN: Candidates = Candidates { pages: 100_000, zeros: 0, duplicates: 80_000 };

fn facts(at: u64, cpu_ms: u64, scans: u64, saved: u64) -> Facts {
    let (planned, plan) = (PLAN, 1);
    Facts { at: Stamp(at), planned, plan, cpu_ms, scans, saved, ..Facts::default() }
}

fn rests(order: &KsmdOrder, with: &str) -> bool {
    matches!(order, KsmdOrder::Rest { why } if why.contains(with))
}

#[test]
fn nothing_runs_before_a_scan_has_found_enough() {
    let mut m = BurstMemory::default();
    let s = Settings::default();
    let none = Facts::default();
    assert!(rests(&govern(&none, &s, &mut m), "nothing was scanned"));
    let little = Candidates { pages: 9000, zeros: 0, duplicates: 4000 };
    let little = Facts { planned: little, ..facts(0, 0, 0, 0) };
    assert!(rests(&govern(&little, &s, &mut m), "less than 16 MiB"));
    let thin = Candidates { pages: 10_000_000, zeros: 0, duplicates: 200_000 };
    let thin = Facts { planned: thin, ..facts(0, 0, 0, 0) };
    assert!(rests(&govern(&thin, &s, &mut m), "less than the floor"));
    assert!(matches!(govern(&facts(0, 0, 0, 0), &s, &mut m), KsmdOrder::Run { .. }));
}

#[test]
fn a_burst_ends_when_it_no_longer_pays_and_does_not_begin_again_for_the_same_plan() {
    let mut m = BurstMemory::default();
    let s = Settings::default();
    let mut step = |f: Facts| govern(&f, &s, &mut m);
    assert!(matches!(step(facts(0, 0, 10, 0)), KsmdOrder::Run { .. }));
    assert!(matches!(step(facts(1000, 5000, 11, 0)), KsmdOrder::Run { .. }), "not seen twice yet");
    assert!(matches!(step(facts(2000, 7000, 12, 78_000)), KsmdOrder::Run { .. }));
    let done = step(facts(3000, 9500, 13, 78_100));
    assert!(rests(&done, "saves less than the floor now: 305 MiB saved in 9.5 s"), "{done:?}");
    assert!(rests(&step(facts(4000, 9500, 13, 78_100)), "until the next scan"));
    let again = Facts { plan: 2, ..facts(5000, 9500, 13, 78_100) };
    assert!(matches!(step(again), KsmdOrder::Run { .. }));
}

#[test]
fn a_burst_that_did_not_pay_is_followed_by_ever_longer_rests() {
    let mut m = BurstMemory::default();
    let s = Settings::default();
    for n in 0..8u64 {
        let at = n * 10_000_000;
        let begin = Facts { plan: n + 1, ..facts(at, n * 9000, n * 9, 0) };
        assert!(matches!(govern(&begin, &s, &mut m), KsmdOrder::Run { .. }), "{n}");
        let end = Facts { plan: n + 1, ..facts(at + 1, n * 9000 + 8000, n * 9 + 3, 0) };
        assert!(rests(&govern(&end, &s, &mut m), "saves less"), "{n}");
        let held = m.hold_until.unwrap().since(Stamp(at + 1));
        assert_eq!(held, (60_000 << n).min(3_600_000));
        let soon = Facts { plan: 99, ..facts(at + 2, n * 9000 + 8000, n * 9 + 3, 0) };
        assert!(rests(&govern(&soon, &s, &mut m), "did not pay"));
    }
    let short = Facts { plan: 99, state: Pressure::Hard, ..facts(70_000_003, 71_000, 66, 0) };
    assert!(matches!(govern(&short, &s, &mut m), KsmdOrder::Run { .. }), "a short host tries");
}

#[test]
fn a_burst_goes_on_while_scans_bring_something_and_ends_after_one_that_does_not() {
    let mut m = BurstMemory::default();
    let s = Settings::default();
    let mut step = |f: Facts| govern(&f, &s, &mut m);
    step(facts(0, 0, 0, 0));
    assert!(
        matches!(step(facts(1, 300, 4, 18_000)), KsmdOrder::Run { .. }),
        "little CPU, much saved"
    );
    assert!(matches!(step(facts(2, 400, 4, 18_000)), KsmdOrder::Run { .. }), "the same scan");
    assert!(matches!(step(facts(3, 600, 5, 32_000)), KsmdOrder::Run { .. }));
    assert!(rests(&step(facts(4, 700, 6, 32_010)), "less than the floor now: 125 MiB"));
    govern(&Facts { plan: 2, ..facts(5, 700, 6, 32_010) }, &s, &mut m);
    let many = Facts { plan: 2, ..facts(6, 800, 70, 90_000) };
    assert!(rests(&govern(&many, &s, &mut m), "often enough"));
}

#[test]
fn vms_that_are_opened_during_a_burst_or_after_it_are_merged_as_well() {
    let s = Settings::default();
    let half = Candidates { pages: 50_000, zeros: 0, duplicates: 40_000 };
    let one = |at, cpu_ms, scans, saved| Facts { planned: half, ..facts(at, cpu_ms, scans, saved) };
    // During it: all is to be seen twice again.
    let mut m = BurstMemory::default();
    let mut step = |f: Facts| govern(&f, &s, &mut m);
    step(one(0, 0, 0, 0));
    assert!(matches!(step(one(1, 800, 2, 10)), KsmdOrder::Run { scans: 3, .. }));
    assert!(matches!(step(facts(2, 900, 3, 20)), KsmdOrder::Run { scans: 5, .. }));
    assert!(matches!(step(facts(3, 950, 4, 20)), KsmdOrder::Run { scans: 5, .. }));
    assert!(rests(&step(facts(4, 1500, 5, 80_000)), "all that was found is merged: 312 MiB"));
    // One that is closed meanwhile and opened again; what was saved of it is no loss.
    let mut m = BurstMemory::default();
    govern(&facts(0, 0, 0, 0), &s, &mut m);
    assert!(matches!(govern(&facts(1, 500, 2, 50_000), &s, &mut m), KsmdOrder::Run { .. }));
    m.note_closed(&half, 20_000);
    let closed = govern(&one(2, 600, 3, 25_000), &s, &mut m);
    assert!(matches!(closed, KsmdOrder::Run { scans: 4, .. }), "{closed:?}");
    let opened = govern(&facts(3, 700, 4, 30_000), &s, &mut m);
    assert!(matches!(opened, KsmdOrder::Run { scans: 6, .. }), "{opened:?}");
    // After it, also with the next plan and where one VM is closed for a while.
    let mut m = BurstMemory::default();
    let mut step = |f: Facts| govern(&f, &s, &mut m);
    step(one(0, 0, 0, 0));
    assert!(rests(&step(one(1, 900, 2, 40_000)), "all that was found"));
    assert!(rests(&step(one(2, 900, 2, 40_000)), "until the next scan"));
    assert!(matches!(step(facts(3, 900, 2, 40_000)), KsmdOrder::Run { scans: 4, .. }));
    assert!(matches!(step(facts(4, 1700, 4, 80_000)), KsmdOrder::Run { scans: 5, .. }));
    assert!(rests(&step(facts(5, 1800, 5, 80_000)), "less than the floor now: 156 MiB"));
    assert!(rests(&step(one(6, 1800, 5, 40_000)), "until the next scan"));
    assert!(rests(&step(facts(7, 1800, 5, 80_000)), "until the next scan"));
    // Nor where two scans of all that is open would cost more than that is worth.
    let alone = Candidates { pages: 20_000_000, ..PLAN };
    let before = Candidates { duplicates: 8_000_000, ..alone };
    let after = Candidates { duplicates: 8_010_000, ..alone };
    let vast = Facts { planned: after, ..facts(0, 0, 0, 0) };
    let pays = |floor| vast.has_more_than(before.saves(), floor);
    assert_eq!([pays(s.floor), pays(Bytes::kib(100))], [false, true]);
    // A later plan does not begin a burst anew.
    step(Facts { plan: 2, ..one(8, 1800, 5, 40_000) });
    let grown = Facts { plan: 3, ..facts(9, 1900, 7, 80_000) };
    assert!(matches!(step(grown), KsmdOrder::Run { scans: 8, .. }));
}

#[test]
fn a_burst_ends_at_once_when_all_that_was_found_is_merged() {
    let mut m = BurstMemory::default();
    let mut step = |f: Facts| govern(&f, &Settings::default(), &mut m);
    let KsmdOrder::Run { scans, .. } = step(facts(0, 0, 7, 5_000)) else { panic!() };
    assert_eq!(scans, 9, "two scans, then it is judged");
    assert!(rests(&step(facts(1, 900, 9, 85_000)), "all that was found is merged: 312 MiB"));
    assert!(m.unpaid == 0 && m.hold_until.is_none());
}

#[test]
fn counters_that_fall_because_guests_wrote_end_no_burst() {
    let mut m = BurstMemory::default();
    let mut step = |f: Facts| govern(&f, &Settings::default(), &mut m);
    step(facts(0, 0, 0, 90_000));
    // What was broken long ago leaves the counters while the rest is merged.
    assert!(matches!(step(facts(1, 1500, 1, 30_000)), KsmdOrder::Run { scans: 2, .. }));
    assert!(matches!(step(facts(2, 4000, 2, 60_000)), KsmdOrder::Run { scans: 3, .. }));
    assert!(matches!(step(facts(3, 5000, 3, 100_000)), KsmdOrder::Run { scans: 4, .. }));
    assert!(rests(&step(facts(4, 5200, 4, 110_500)), "all that was found is merged: 314 MiB"));
}

#[test]
fn the_speed_follows_what_pages_cost_of_late() {
    let mut m = BurstMemory::default();
    let s = Settings { cores: 0.5, clear_cores: 0.5, ..Settings::default() };
    let mut batch = |f: Facts| match govern(&f, &s, &mut m) {
        KsmdOrder::Run { batch, cores, .. } => (batch, cores),
        KsmdOrder::Rest { why } => panic!("{why}"),
    };
    let at = |cpu, scanned| Facts { scanned: Some(scanned), ..facts(cpu, cpu, 0, 0) };
    assert_eq!(batch(at(0, 0)), (20_000, 0.5), "first looks are cheap");
    assert_eq!(batch(at(600, 100_000)).0, 3333, "6 µs a page");
    assert_eq!(batch(at(605, 100_100)).0, 3333, "too little to tell");
    assert_eq!(batch(at(700, 200_000)).0, 20_000);
}

#[test]
fn costs_and_gains_are_what_was_measured() {
    // 2 GiB with 20 % duplicates: 4.6 s of CPU for plain KSM with its further scan.
    let all = Candidates { pages: 524_288, zeros: 0, duplicates: 104_858 };
    assert!((2.5..4.7).contains(&all.cost_s()), "{}", all.cost_s());
    let dense = Candidates { pages: 104_858, ..all };
    assert!((0.4..0.7).contains(&dense.cost_s()), "{}", dense.cost_s());
    assert_eq!(dense.again_s(), 0.0);
    let lonely = Candidates { pages: 1 << 20, zeros: 0, duplicates: 0 };
    assert_eq!(lonely.saves(), Bytes::ZERO, "metadata is no gain");
}

#[test]
fn a_storm_is_more_breaking_than_merging() {
    assert!(is_storm(100_000, 21_000, 1000));
    assert!(!is_storm(100_000, 1_000, 0), "a hundredth");
    assert!(!is_storm(1_000_000, 50_000, 0), "a twentieth");
    assert!(!is_storm(100_000, 15_000, 15_000), "as many came");
    assert!(!is_storm(100, 100, 0), "next to nothing");
}

#[test]
fn nobody_is_to_notice_while_nobody_is_short() {
    let s = Settings::default();
    let shares = [Pressure::Clear, Pressure::Soft, Pressure::Hard, Pressure::Critical]
        .map(|state| s.share(state));
    assert_eq!(shares, [0.008, 0.4, 0.8, 1.0]);
    let all_the_same = Settings { clear_cores: 2.0, ..s };
    assert_eq!(all_the_same.share(Pressure::Clear), 0.4, "never more than on a short one");
    for each in [0.5, 1.0, 5.0, 8.0] {
        let (batch, sleep) = speed(s.share(Pressure::Clear), each);
        assert!(batch as f64 * each <= 33.0 && sleep <= 5, "{batch} of {each} µs, {sleep} ms");
    }
}

proptest! {
    #[test]
    fn knobs_stay_responsive_and_within_the_budget(cores in 0.0f64..2.0, each in 0.05f64..100.0) {
        let (batch, sleep) = speed(cores, each);
        let least = if is_gentle(cores) { BATCH_LEAST.1 } else { BATCH_LEAST.0 };
        prop_assert!((least..=BATCH_MOST).contains(&batch) && sleep >= 1);
        let busy = batch as f64 * each / 1000.0;
        let share = busy / (busy + sleep as f64);
        prop_assert!(share <= cores.clamp(0.001, 0.95) + 1e-9, "{batch} {sleep} {share}");
    }

    #[test]
    fn any_facts_give_an_order(
        at in 0u64..1 << 40, cpu in 0u64..1 << 40, scans in 0u64..100, saved in any::<u64>(),
        pages in any::<u64>(), plan in 0u64..4, steps in 1usize..5,
    ) {
        let mut m = BurstMemory::default();
        for i in 0..steps as u64 {
            let planned = Candidates { pages, zeros: pages / 3, duplicates: pages / 4 };
            let f = Facts { planned, plan: plan + i % 2, ..facts(at + i, cpu, scans * i, saved) };
            if let KsmdOrder::Run { batch, sleep_ms, .. } = govern(&f, &Settings::default(), &mut m) {
                prop_assert!(batch <= BATCH_MOST && sleep_ms >= 1);
            }
        }
    }
}
