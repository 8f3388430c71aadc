//! Who is asked for how much on a short host, and what every guest keeps.

use super::*;
use crate::sample::AgentSample;
use crate::state::{Left, LimitMemory};

fn without_swap(mut host: HostModel) -> HostModel {
    host.limits.clear();
    host.shown.swap_left = Bytes::ZERO;
    host
}

#[test]
fn who_brings_nothing_is_not_asked() {
    let pinned = VmModel { pinned: Some("a VFIO device pins it".into()), ..vm(1, 1024, 900) };
    let vms = || vec![pinned.clone(), vm(2, 1024, 900)];
    let v = decide(host(Pressure::Critical, 400, 0), vms(), vec![]);
    assert_eq!((size(&v[0]), size(&v[1])), (None, Some(624)), "nothing is expected of it");
    assert_eq!(v[0], Verdict::Hold("its balloon is left alone: a VFIO device pins it".into()));
    let model = model(host(Pressure::Clear, 0, 0), vms());
    let v = balloon(&model, &Memory::default(), &[Reclaim::default()], &[]).verdicts;
    assert!(size(&v[0]).is_none() && size(&v[1]).is_some(), "nor by the operator");
    let yields = Yields { brings_nothing_until: Some(NOW.plus(120_000)), ..Yields::default() };
    let m = VmMemory { yields, ..remembered(1) };
    let v = decide(host(Pressure::Critical, 400, 0), vec![vm(1, 1024, 900)], vec![m]);
    let Verdict::Hold(why) = &v[0] else { panic!("{v:?}") };
    assert!(why.contains("had nothing of it: asked again in 2 min"), "{why}");
}

#[test]
fn nobody_is_asked_for_what_it_may_need_by_a_word_from_while_its_balloon_moved() {
    let m = |unsure| VmMemory { unsure: Bytes::mib(unsure), ..remembered(1) };
    let ask = |unsure| sized(host(Pressure::Critical, 2048, 0), vm(1, 1024, 624), m(unsure));
    assert_eq!((ask(0), ask(40), ask(200)), (Some(512), Some(512), Some(600)));
    // Nor by an operator who wants what is idle, or has set a lower size for it.
    let clear = || host(Pressure::Clear, 0, 2048);
    let reclaim = |unsure| reclaimed(clear(), vm(1, 1024, 624), m(unsure)).unwrap();
    assert!(reclaim(0) < 600 && reclaim(300) == 700, "{} {}", reclaim(0), reclaim(300));
    let lower = |unsure| {
        let one = VmModel { ceiling: Bytes::mib(600), ..vm(1, 800, 300) };
        sized(clear(), one, m(unsure))
    };
    assert!(lower(0).is_some_and(|to| to < 790) && lower(290) == Some(790), "{:?}", lower(0));
    assert_eq!(lower(300), None);
}

#[test]
fn nobody_that_rests_is_asked_for_what_it_may_have_grown_by_since_it_spoke() {
    let ask = |mib_a_second, asked_ms| {
        let mut m = VmMemory { size_seen_at: ago(asked_ms), ..remembered(1) };
        m.fastest.see(NOW, (mib_a_second << 20) as f64);
        sized(host(Pressure::Critical, 2048, 0), says(vm(1, 1024, 724), |g| g.age_ms = 300), m)
    };
    assert_eq!(ask(1000, 0), Some(512), "it was asked just now");
    assert_eq!(ask(100, 200), Some(512), "half of its RAM at once");
    assert_eq!(ask(1000, 200), Some(600), "300 MiB beyond its need of 300");
}

/// What is taken of this one, MiB.
fn taken(verdicts: &[Verdict], i: usize) -> u64 {
    size(&verdicts[i]).map_or(0, |to| 1024 - to)
}

/// The same of one alone.
fn taken_of(host: HostModel, vm: VmModel, m: VmMemory) -> u64 {
    taken(&decide(host, vec![vm], vec![m]), 0)
}

/// The same of two.
fn taken_of_two(host: HostModel, vms: [VmModel; 2], remembered: Vec<VmMemory>) -> (u64, u64) {
    let v = decide(host, vms.into(), remembered);
    (taken(&v, 0), taken(&v, 1))
}

/// One with 900 MiB available, of which `mib` are page cache.
fn caching(pid: u32, mib: u64) -> VmModel {
    says(vm(pid, 1024, 900), |g| g.cache = Bytes::mib(mib))
}

#[test]
fn who_pays_most_for_idle_memory_is_asked_first_by_weight() {
    let ask = |shortage| {
        let heavy = VmModel { weight: 2.0, ..vm(3, 1024, 600) };
        let vms = vec![vm(1, 1024, 600), vm(2, 1024, 200), heavy];
        let v = decide(host(Pressure::Soft, shortage, 0), vms, vec![]);
        [taken(&v, 0), taken(&v, 1), taken(&v, 2)]
    };
    assert_eq!(ask(40), [40, 0, 0]);
    // A tenth of RAM a second; with twice the weight, the second to be asked.
    assert_eq!(ask(160), [102, 16, 43]);
}

#[test]
fn steps_are_larger_on_a_shorter_host_and_end_at_what_is_to_be_kept() {
    let ask = |state, shortage, available| {
        taken_of(host(state, shortage, 0), vm(1, 1024, available), remembered(1))
    };
    assert_eq!(ask(Pressure::Soft, 1400, 900), 102);
    assert_eq!(ask(Pressure::Hard, 1400, 900), 256);
    assert_eq!(ask(Pressure::Critical, 1400, 900), 512, "half of RAM at once");
    assert_eq!(ask(Pressure::Critical, 2048, 100), 100 - 12, "a fifth of a margin stays");
    let at = |actual, available| {
        sized(host(Pressure::Critical, 2048, 0), vm(1, actual, available), remembered(1))
    };
    assert_eq!((at(300, 290), at(256, 250)), (Some(256), None), "never below the floor");
}

#[test]
fn where_all_are_short_what_was_given_is_not_taken_back_at_once() {
    let asked = |ago_ms, shortage, available| {
        let m = VmMemory { last_give: ago(ago_ms), ..remembered(1) };
        taken_of(host(Pressure::Critical, shortage, 0), vm(1, 1024, available), m)
    };
    assert_eq!((asked(1000, 2048, 100), asked(4000, 2048, 100)), (100 - 80, 100 - 12));
    assert!(asked(1000, 1000, 900) > 0, "needs and least margins fit");
}

/// No guest waits. Headroom is below what the host is to keep for needs, or only below its reserve.
#[test]
fn what_a_guest_needed_twenty_seconds_ago_is_taken_where_the_host_lacks_it_for_others() {
    let asked = |(given_s, returned_s): (u64, u64), lacks_for_needs: bool| {
        let (last_give, returned) = (ago(given_s * 1000), ago(returned_s * 1000));
        let last_returned = returned.filter(|_| returned_s > 0);
        let m = VmMemory { last_give, last_returned, ..remembered(1) };
        let short = if lacks_for_needs { 1100 } else { 300 };
        taken_of(host(Pressure::Soft, short, 0), vm(1, 1024, 900), m)
    };
    assert_eq!((asked((19, 0), true), asked((59, 0), false)), (0, 0));
    assert!(asked((21, 0), true) > 0 && asked((61, 0), false) > 0);
    assert_eq!(asked((59, 59), true), 0, "what the host had too much of is not taken back as soon");
    assert!(asked((61, 61), true) > 0);
}

#[test]
fn what_a_guest_was_given_and_the_host_cannot_back_is_taken_back_at_once() {
    let asked = |resident: u64, headroom: u64| {
        let m = VmMemory { last_give: ago(1000), ..remembered(1) };
        let one = VmModel { resident: Some(Bytes::mib(resident)), ..vm(1, 1024, 100) };
        taken_of(host(Pressure::Critical, 2048 - headroom, 0), one, m)
    };
    assert_eq!((asked(1024, 0), asked(980, 0)), (100 - 80, 44), "nothing is there for the 44 MiB");
    assert_eq!(asked(980, 10), 34);
}

#[test]
fn with_swap_a_guest_keeps_a_short_mark_and_without_a_fifth_of_a_margin_whatever_its_weight() {
    let left = |weight: f64, swap: u64| {
        let one = VmModel { weight, ..vm(1, 1024, 100) };
        100 - taken_of(with_swap(dry(0, 2048), swap), one, remembered(1))
    };
    let all = |swap| [left(0.5, swap), left(1.0, swap), left(4.0, swap)];
    assert_eq!(all(1024), [40, 40, 51], "the host can swap");
    assert_eq!(all(0), [12; 3]);
}

/// A host with 2 GiB of reserve, and one guest with 500 MiB of page cache and 200 MiB free.
#[test]
fn cache_is_taken_below_three_quarters_of_the_reserve_and_free_memory_below_all_of_it() {
    let ask = |shortage, swap| {
        let one = says(vm(1, 1024, 700), |g| g.cache = Bytes::mib(500));
        let host = limited(host(Pressure::Hard, shortage, 0), 2048 - shortage, 2048);
        taken_of(with_swap(host, swap), one, remembered(1))
    };
    assert_eq!(ask(480, 0), 200 - 60, "what is free, but for a margin");
    assert_eq!(ask(800, 0), 211, "cache with it, but for the part that counts as read again");
    assert_eq!((ask(800, 2048), ask(1200, 2048)), (140, 176), "with swap below a half");
    assert_eq!(ask(0, 0), 0);
}

/// Two guests whose page cache is all that the host holds beyond their needs, and an idle one.
#[test]
fn free_memory_is_taken_before_guests_that_keep_their_cache_grow_to_their_peaks() {
    let ask = |peak| {
        let one = |pid| {
            let one = says(vm(pid, 1024, 824), |g| g.cache = Bytes::mib(300));
            VmModel { resident: Some(Bytes::mib(500)), ..one }
        };
        let m = |pid| VmMemory { recent: needed(peak, 100_000), ..remembered(pid) };
        let host = without_swap(limited(host(Pressure::Clear, 0, 52), 2100, 2048));
        let v = decide(host, vec![one(1), one(2), vm(3, 1024, 900)], vec![m(1), m(2)]);
        taken(&v, 2)
    };
    assert_eq!(ask(200), 0, "more than the reserve is there");
    assert_eq!(ask(500), 36, "1536 are kept, 600 come to be touched");
}

/// An idle guest with `cache` MiB of page cache, and one whose need grows by `rate` MiB a second
/// into its free memory, which the host does not hold.
fn beside_one_that_grows(cache: u64, rate: u64, last_give: Option<Stamp>) -> Vec<Verdict> {
    let grows = VmModel { resident: Some(Bytes::mib(300)), ..grows(vm(2, 1024, 800), rate) };
    let host = without_swap(limited(host(Pressure::Clear, 0, 0), 500, 400));
    let m = VmMemory { last_give, ..remembered(1) };
    decide(host, vec![caching(1, cache), grows], vec![m])
}

#[test]
fn before_growing_guests_use_up_the_hosts_memory_others_are_asked_at_full_pace() {
    assert_eq!(taken(&beside_one_that_grows(0, 600, None), 0), 512);
    let caches = |rate| taken(&beside_one_that_grows(850, rate, None), 0);
    assert!(caches(50) == 0 && caches(600) > 0);
    let was_given = |rate| beside_one_that_grows(0, rate, ago(20_000));
    assert_eq!(taken(&was_given(50), 0), 0, "left alone for a minute");
    let v = was_given(600);
    assert!(taken(&v, 0) > 0, "500 MiB are gone in a second: {v:?}");
    let waits = |v: &Verdict| match v {
        Verdict::Set { reason: Reason::HostShort { waits, .. }, .. } => *waits,
        _ => Bytes::ZERO,
    };
    assert!(waits(&v[0]) > Bytes::mib(200), "the other will be short of it: {v:?}");
}

/// The same beside a VM that was started and is paused, and was promised this many MiB.
fn beside_one_that_waits(cache: u64, rate: u64, waiting: u64) -> u64 {
    let grows = VmModel { resident: Some(Bytes::mib(300)), ..grows(vm(2, 1024, 800), rate) };
    let mut host = without_swap(limited(host(Pressure::Clear, 0, 0), 500, 400));
    (host.shown.promised, host.shown.waiting) = (Bytes::mib(waiting), Bytes::mib(waiting));
    taken(&decide(host, vec![caching(1, cache), grows], vec![]), 0)
}

#[test]
fn for_a_vm_that_is_paused_nobody_is_hurried_nor_gives_up_its_page_cache() {
    // The other grows by this much a second, which is missing soon, or at once.
    for (cache, rate) in [(0, 200), (850, 300)] {
        let asked = [0, 1000].map(|waiting| beside_one_that_waits(cache, rate, waiting));
        assert!(asked[0] > 0 && asked[0] == asked[1], "{cache} {rate}: {asked:?}");
    }
}

#[test]
fn where_one_starves_one_that_lives_gives_what_it_has_beyond_its_part() {
    let asked = |available, actual: u64, ceiling: u64| {
        let lives = VmModel { ceiling: Bytes::mib(ceiling), ..short(2, actual, 150) };
        size(&decide(dry(20, 200), vec![short(1, 400, available), lives], vec![])[1])
    };
    let part = asked(5, 600, 1024);
    assert!(part.is_some_and(|to| (450..600).contains(&to)), "{part:?}");
    assert_eq!(asked(30, 600, 1024), Some(600), "the first has what it lives by");
    // One that has all the memory that it may have gives as well.
    assert!(
        asked(5, 600, 600).is_some_and(|to| to < 600),
        "at its `max`: {:?}",
        asked(5, 600, 600)
    );
    let whole = asked(5, 1024, 1024);
    assert!(whole.is_some_and(|to| to < 1024), "{whole:?}");
}

#[test]
fn where_the_host_has_nothing_left_one_that_is_short_gives_what_it_has_beyond_its_part() {
    // The host has this headroom and swap, `other` is what another guest has available.
    let asked = |available, (headroom, swap), other| {
        let vms = vec![short(1, 600, available), vm(2, 600, other)];
        size(&decide(with_swap(dry(headroom, 200), swap), vms, vec![])[0])
    };
    // It is short below 40 MiB, and a fifth of its margin is some 20.
    assert_eq!(asked(38, (20, 0), 10), Some(600), "a tenth of the reserve is left");
    assert!(asked(38, (0, 1024), 10) >= Some(600), "the host can swap");
    let to = asked(38, (0, 0), 10);
    assert!(to.is_some_and(|to| (562 + 12..600).contains(&to)), "{to:?}");
    // Needs fit; it reads again what it dropped.
    assert_eq!(asked(300, (20, 0), 300), Some(600));
    let to = asked(300, (0, 0), 300);
    assert!(to.is_some_and(|to| to < 600), "{to:?}");
}

#[test]
fn cache_that_nobody_was_seen_to_read_again_is_not_all_idle() {
    let ask = |cache| {
        let two = [caching(1, cache), vm(2, 1024, 900)];
        taken_of_two(host(Pressure::Critical, 1100, 0), two, vec![])
    };
    let (none, some) = (ask(0), ask(900));
    assert_eq!(none.0, none.1);
    assert!(some.0 < none.0 && some.1 > none.1, "{none:?} {some:?}");
}

#[test]
fn a_guest_whose_cache_was_taken_counts_with_as_much_as_one_that_has_its_own() {
    let ask = |had| {
        let m = VmMemory { cached: needed(had, 60_000), ..remembered(1) };
        let two = [caching(1, 0), caching(2, 150)];
        taken_of_two(host(Pressure::Critical, 1100, 0), two, vec![m])
    };
    let (never, once) = (ask(0), ask(150));
    assert!(never.0 > never.1, "{never:?}");
    assert_eq!(once.0, once.1);
}

#[test]
fn doubted_guests_are_asked_gently_and_followers_faster() {
    let ask = |level, doublings| {
        let mut one = vm(1, 1024, 900);
        one.trust.level = level;
        let m = VmMemory { doublings, ..remembered(1) };
        taken_of(host(Pressure::Soft, 1400, 0), one, m)
    };
    assert_eq!((ask(1.0, 0), ask(0.5, 0), ask(1.0, 1), ask(1.0, 2)), (102, 51, 204, 409));
}

#[test]
fn what_a_slow_or_stuck_guest_does_not_bring_others_are_asked_for() {
    let ask = |still_ms, rate| {
        let m = VmMemory { order: ordered((1024, 600), still_ms, 4_000), rate, ..remembered(1) };
        let two = [vm(1, 1024, 900), vm(2, 1024, 900)];
        taken_of_two(host(Pressure::Hard, 400, 0), two, vec![m]).1
    };
    assert_eq!(ask(0, 1e9), 0, "424 MiB are on their way");
    assert_eq!(ask(0, (20 << 20) as f64), 256, "100 of them within five seconds");
    assert_eq!(ask(3_000, 1e9), 256, "none");
}

#[test]
fn a_balloon_brings_what_the_host_holds_of_it() {
    let held = |mib| VmModel { resident: Some(Bytes::mib(mib)), ..vm(1, 1024, 900) };
    let ask = |resident, hot| {
        let one = says(held(resident), |g| g.working_set += Bytes::mib(hot));
        let m = VmMemory { order: ordered((1024, 600), 0, NOW.0), rate: 1e9, ..remembered(1) };
        taken_of_two(host(Pressure::Hard, 400, 0), [one, vm(2, 1024, 900)], vec![m]).1
    };
    assert_eq!(ask(1024, 0), 0, "424 MiB are on their way");
    assert_eq!(ask(1000, 880), 0, "page cache that it reads again, too");
    assert_eq!(ask(224, 0), 256, "47 of them");
    let alone = |mib| taken_of(host(Pressure::Soft, 40, 0), held(mib), remembered(1));
    assert_eq!((alone(1024), alone(224)), (40, 102), "a ninth of it is held: a whole step");
}

#[test]
fn what_was_needed_lately_is_kept_as_long_as_all_fits_and_the_oldest_goes_first() {
    let ask = |shortage| {
        let two = [vm(1, 1024, 900), vm(2, 1024, 900)];
        let m = |pid, s: u64| VmMemory { recent: needed(900, s * 1000), ..remembered(pid) };
        taken_of_two(host(Pressure::Critical, shortage, 0), two, vec![m(1, 100), m(2, 10)])
    };
    assert_eq!(ask(100), (50, 50), "what is idle, of both alike");
    let (old, young) = ask(2000);
    assert!(old >= 420 && young <= 1024 - 900, "{old} {young}");
}

/// A guest that needed all that it has some time ago.
fn at_its_peak(pid: u32, ms: u64) -> (VmModel, VmMemory) {
    (vm(pid, 700, 600), VmMemory { recent: needed(700, ms), ..remembered(pid) })
}

#[test]
fn guests_stay_at_their_peaks_where_all_fit_though_margins_and_reserve_do_not() {
    let ((one, m), (two, n)) = (at_its_peak(1, 300_000), at_its_peak(2, 200_000));
    let ask = |headroom| {
        let host = limited(host(Pressure::Critical, 0, 0), headroom, 2000);
        taken_of_two(host, [one.clone(), two.clone()], vec![m.clone(), n.clone()])
    };
    assert_eq!(ask(400), (0, 0), "a fifth of the reserve is there");
    assert!(ask(300).0 > 0, "the older peak does not fit");
}

#[test]
fn what_others_than_vms_used_lately_counts_as_a_guests_peak_does() {
    let ask = |peak: u64| {
        let (one, m) = at_its_peak(1, 300_000);
        let mut host = limited(host(Pressure::Critical, 0, 0), 500, 2000);
        host.shown.capacity = Bytes::mib(500 + 700 + 100);
        let (name, others) = ("host".into(), needed(peak, 60_000));
        let limits = vec![LimitMemory { name, others, ..LimitMemory::default() }];
        let memory = Memory { limits, ..memory(vec![m]) };
        taken(&balloon(&model(host, vec![one]), &memory, &[], &[]).verdicts, 0)
    };
    assert_eq!(ask(100), 0);
    assert!(ask(500) > 0, "400 more than now");
}

#[test]
fn where_not_even_margins_fit_all_have_less_of_them() {
    // Each of the others has its margin and no more.
    let vms = (2..8).map(|pid| vm(pid, 500, 60));
    let v = decide(dry(0, 200), std::iter::once(short(1, 500, 10)).chain(vms).collect(), vec![]);
    assert!((1..7).all(|i| taken(&v, i) > 0), "{v:?}");
    assert!((1..7).all(|i| size(&v[i]) >= Some(440 + 24)), "less, not nothing: {v:?}");
}

#[test]
fn a_guest_whose_need_grows_keeps_what_it_will_need_in_a_moment() {
    let keeps = |size: u64, growth| {
        // What the host keeps at least is what the guest can do without.
        let host = dry(0, (1024 - size) * 10 / 3);
        let to = sized(host, grows(vm(1, 1024, 500), growth), remembered(1));
        // Sizes are whole MiB, and rounded up.
        (Some(size)..=Some(size + 1)).contains(&to)
    };
    assert!(keeps(524 + 60, 0), "one and a half marks of shortage");
    assert!(keeps(524 + 180 + 60, 120), "for a second and a half");
}

#[test]
fn earlier_stages_are_waited_for() {
    let v = |above| {
        let model = model(host(Pressure::Critical, 200, 0), vec![vm(1, 1024, 900)]);
        taken(&balloon(&model, &Memory::default(), &[], &[Bytes::mib(above)]).verdicts, 0)
    };
    assert_eq!((v(0), v(150), v(300)), (200, 50, 0));
}

#[test]
fn what_is_free_already_is_recycled_before_a_guest_is_ballooned() {
    let with = |held, busy| {
        let agent = Some(AgentSample { busy, ..AgentSample::ready(held) });
        VmModel { agent, ..vm(1, 1024, 900) }
    };
    let ask =
        |held, busy| taken_of(host(Pressure::Critical, 500, 0), with(held, busy), remembered(1));
    assert_eq!((ask(100, false), ask(0, true), ask(5, false)), (0, 0, 500));
    // What an order has left will not come of the next either.
    let beside = |state, left| {
        let mut m = remembered(1);
        m.recycle.left = Some(Left { state: Pressure::Hard, bytes: Bytes::mib(left) });
        taken_of(host(state, 900, 0), with(100, false), m)
    };
    assert!(beside(Pressure::Soft, 90) > 0 && beside(Pressure::Hard, 90) > 0);
    assert_eq!((beside(Pressure::Hard, 50), beside(Pressure::Critical, 90)), (0, 0));
    // One that reads files always has freed something: that is not to keep the balloon off.
    let reads = |state| taken_of(host(state, 900, 0), with(20, false), remembered(1));
    assert_eq!(reads(Pressure::Soft), 0);
    assert!(reads(Pressure::Critical) > 300, "{}", reads(Pressure::Critical));
}

#[test]
fn a_vm_whose_ram_is_of_a_pool_takes_nothing_of_what_the_others_share() {
    let of_a_pool = || {
        let one = VmModel {
            ram: Some(Bytes::gib(16)),
            ceiling: Bytes::gib(16),
            whole: Bytes::gib(16),
            owed: Bytes::ZERO,
            floor: Bytes::gib(4),
            resident: Some(Bytes::mib(60)),
            pinned: Some("its RAM is huge pages of a pool".into()),
            ..vm(2, 16 << 10, 12 << 10)
        };
        says(one, |g| (g.buffer, g.short_mark) = (Bytes::gib(2), Bytes::mib(655)))
    };
    let ask = |vms| taken(&decide(host(Pressure::Soft, 800, 0), vms, vec![]), 0);
    assert_eq!(ask(vec![vm(1, 1024, 900)]), 102);
    assert_eq!(ask(vec![vm(1, 1024, 900), of_a_pool()]), 102);
}

/// The host has nothing left at all, and a guest with 900 MiB of its 1024 available is in
/// distress for some other reason.
#[test]
fn a_host_that_has_nothing_left_asks_one_that_has_plenty() {
    for actual in [900, 1024] {
        let to = sized(dry(0, 200), short(1, actual, actual - 124), remembered(1));
        assert!(to.is_some_and(|to| to < actual), "{to:?}");
    }
}

#[test]
fn page_cache_that_the_host_does_not_hold_is_no_memory_that_it_will_lack() {
    // It needs 200 MiB, and needed 400 lately. Beside that it has 700 MiB of page cache.
    let asked = |held, headroom| {
        let one = VmModel { resident: Some(Bytes::mib(held)), ..vm(1, 1024, 824) };
        let mut m = remembered(1);
        m.recent.see(NOW, Bytes::mib(400));
        let host = limited(host(Pressure::Clear, 0, 0), headroom, 200);
        let vms = vec![says(one, |g| g.cache = Bytes::mib(700)), vm(2, 1024, 900)];
        taken(&decide(host, vms, vec![m, remembered(2)]), 1)
    };
    assert_eq!(asked(200, 500), 0, "it is in swap, or counted as needed, too");
    assert!(asked(700, 250) > 0, "it keeps 500 MiB that the host holds, and grows beside them");
}

/// A VM was started and is paused; tasks stall; 200 MiB beyond the reserve are there.
#[test]
fn no_vm_is_paged_out_for_one_that_is_paused() {
    let paged_out = |waiting: u64| {
        let stalls = limited(host(Pressure::Hard, 0, 0), 1200, 1000);
        let mut host = HostModel { offload_room: Some(Bytes::gib(1)), ..stalls };
        let waiting = Bytes::mib(waiting);
        (host.shown.promised, host.shown.waiting) = (waiting, waiting);
        let vms = vec![vm(1, 1024, 200)];
        let memory = Memory { beyond_since: ago(60_000), ..memory(vec![remembered(1)]) };
        let plan = crate::policy::decide(&model(host, vms), &memory, &[]).plan;
        plan.orders.offload.iter().map(|o| o.bytes).sum::<Bytes>()
    };
    assert_eq!([paged_out(0), paged_out(3000)], [Bytes::ZERO; 2]);
}
