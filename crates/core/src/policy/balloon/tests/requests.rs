//! An operator's request for idle memory: what it takes at once, and what it leaves.

use super::*;

/// What two guests of 1 GiB, with 624 and 224 MiB available, are asked for; `above`: what agents
/// bring of each.
fn sizes(requests: &[Reclaim], above: &[Bytes]) -> [Option<u64>; 2] {
    let vms = vec![vm(1, 1024, 624), vm(2, 1024, 224)];
    let model = model(host(Pressure::Clear, 0, 0), vms);
    let verdicts = balloon(&model, &Memory::default(), requests, above).verdicts;
    [&verdicts[0], &verdicts[1]].map(size)
}

fn of(vm: Option<&str>, mib: u64) -> Reclaim {
    Reclaim { vm: vm.map(Into::into), bytes: Some(Bytes::mib(mib)) }
}

#[test]
fn a_request_takes_all_idle_memory_at_once_or_just_so_much() {
    let ask = |request: Reclaim| <(_, _)>::from(sizes(&[request], &[]));
    assert_eq!(ask(Reclaim::default()), (Some(480), Some(880)), "need and a full buffer stay");
    assert_eq!(ask(Reclaim { bytes: None, ..of(Some("vm2"), 0) }), (None, Some(880)));
    assert_eq!(ask(of(None, 172)), (Some(1024 - 172), None), "from who pays most for it");
}

#[test]
fn a_request_takes_nothing_from_one_that_may_only_be_given_or_is_left_alone() {
    let ask = |standing| {
        let one = VmModel { standing, ..vm(1, 1024, 624) };
        reclaimed(host(Pressure::Clear, 0, 2000), one, remembered(1))
    };
    assert!(ask(Standing::Ready).is_some());
    for other in [Standing::GiveOnly, Standing::Off].map(|is| is("a reason".into())) {
        assert_eq!(ask(other.clone()), None, "{other:?}");
    }
}

#[test]
fn what_agents_bring_for_a_request_is_not_taken_again() {
    let asks = |requests: &[Reclaim]| sizes(requests, &[Bytes::ZERO, Bytes::mib(100)])[0];
    let ask = |request: Reclaim| asks(&[request]);
    assert_eq!(ask(of(None, 172)), Some(1024 - 72));
    assert_eq!(ask(of(Some("vm1"), 172)), Some(1024 - 172));
    assert_eq!(ask(Reclaim::default()), Some(480), "all of it");
    assert_eq!(ask(of(None, 100)), None);
    // 60 of the 100 are for the first request, the rest for the second.
    assert_eq!(asks(&[of(Some("vm2"), 60), of(None, 172)]), Some(1024 - 132));
}

#[test]
fn requests_of_one_tick_take_what_all_of_them_ask_for() {
    let asks = |requests: &[Reclaim]| sizes(requests, &[]);
    let one = |mib| of(Some("vm1"), mib);
    assert_eq!(asks(&[one(100), one(72)]), [Some(1024 - 172), None]);
    assert_eq!(asks(&[one(500), one(500)]), [Some(480), None], "need and a full buffer stay");
    assert_eq!(asks(&[one(100), of(Some("vm2"), 50)]), [Some(1024 - 100), Some(1024 - 50)]);
    assert_eq!(asks(&[of(None, 100), of(Some("vm2"), 50)]), [Some(1024 - 100), Some(1024 - 50)]);
}

#[test]
fn a_request_takes_what_the_guest_needed_a_moment_ago_and_has_freed() {
    let m = VmMemory { recent: needed(900, 2_000), ..remembered(1) };
    let left = reclaimed(host(Pressure::Clear, 0, 2000), vm(1, 1024, 624), m);
    assert_eq!(left, Some(400 + 80), "its need and its buffer stay");
}

#[test]
fn what_an_operator_asked_for_is_not_given_back_at_once() {
    let ask = |ago_ms: Option<u64>| {
        let (recent, requested) = (needed(700, 30_000), ago_ms.and_then(ago));
        let m = VmMemory { recent, requested, last_take: requested, ..remembered(1) };
        sized(limited(host(Pressure::Clear, 0, 2000), 4000, 1000), vm(1, 400, 300), m)
    };
    assert!(ask(None).is_some_and(|to| to >= 700), "it needed so much lately");
    assert_eq!(ask(Some(1_000)), None);
    assert!(ask(Some(61_000)).is_some());
}

#[test]
fn a_request_takes_nothing_by_old_statistics() {
    let one = says(vm(1, 1024, 624), |g| g.age_ms = 4_000);
    assert_eq!(reclaimed(host(Pressure::Clear, 0, 0), one, remembered(1)), None);
}
