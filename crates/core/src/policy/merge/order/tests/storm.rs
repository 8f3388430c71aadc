//! Tests of storms: VMs whose merged pages are written.

use super::*;

#[test]
fn a_vm_whose_merged_pages_are_written_is_left_out_longer_each_time() {
    let (mut memory, room) = (Memory::default(), Bytes::gib(50));
    let before = seen(10_000, Bytes::gib(1), 262_144, room, 0);
    assert_eq!(switched(&tick(ON, &mut memory, &before)), []);
    let storm = seen(20_000, Bytes::mib(600), 262_144, room, 108_000);
    let plan = tick(ON, &mut memory, &storm);
    assert_eq!(switched(&plan), [(1, false)], "{plan:?}");
    assert!(plan.vms[0].reason.contains("left out for 60 s"), "{plan:?}");
    // The others go on; it comes back when the time is over.
    let out = |at| {
        let mut s = seen(at, Bytes::ZERO, 0, room, 108_000);
        s.vms[0].merge.as_mut().unwrap().open = Some(false);
        s
    };
    let plan = tick(ON, &mut memory, &out(30_000));
    assert!(runs(&plan) && plan.vms.is_empty(), "{plan:?}");
    assert_eq!(switched(&tick(ON, &mut memory, &out(81_000))), [(1, true)]);
    tick(ON, &mut memory, &seen(90_000, Bytes::gib(1), 262_144, room, 108_000));
    tick(ON, &mut memory, &seen(100_000, Bytes::mib(600), 262_144, room, 216_000));
    let until = memory.vm(VmId { pid: 1, start: 1 }).unwrap().merge.storm_until.unwrap();
    assert_eq!(until.since(Stamp(100_000)), 120_000);
}

#[test]
fn merges_that_are_broken_a_few_between_two_looks_are_a_storm_as_well() {
    // From 1 GiB, at each look this much less, of as much that was copied; when it is left out.
    let out = |part: Bytes, every: u64| {
        let (mut memory, room) = (Memory::default(), Bytes::gib(50));
        (0..20).find(|n| {
            let merged = Bytes(Bytes::gib(1).0 - n * part.0);
            let s = seen(10_000 + n * every, merged, 262_144, room, n * part.0 / PAGE);
            switched(&tick(ON, &mut memory, &s)) == [(1, false)]
        })
    };
    assert_eq!(out(Bytes::mib(15), 5_000), Some(7), "a tenth in 35 s");
    assert_eq!(out(Bytes::mib(15), 10_000), None, "a tenth in 70 s");
    assert_eq!(out(Bytes::mib(105), 50_000), Some(1));
}

/// The kernel counts a copy for each page that an agent closes.
#[test]
fn merges_that_an_agent_breaks_are_no_storm() {
    let out = |closes: i64| {
        let (mut memory, room) = (Memory::default(), Bytes::gib(50));
        let mut at = |n: u64, opened: u64| {
            let gone = Bytes::mib(424).0 * n;
            let merged = Bytes(Bytes::gib(1).0 - gone);
            let mut s = seen(10_000 * (n + 1), merged, 262_144, room, gone / PAGE);
            let (link, open) = (Link::Up, Some(Bytes(opened)));
            s.vms[0].agent =
                Some(AgentSample { link, advises: true, open, ..AgentSample::default() });
            tick(ON, &mut memory, &s);
            memory.of(s.vms[0].id).merge.storms
        };
        at(0, Bytes::gib(2).0);
        at(1, Bytes::gib(2).0.saturating_add_signed(-closes))
    };
    let mib = |n: i64| n << 20;
    assert_eq!([out(0), out(mib(300)), out(mib(424))], [1, 1, 0]);
    assert_eq!(out(mib(-4)), 0, "it was told other ranges");
}

#[test]
fn pages_that_a_balloon_took_are_no_storm() {
    let (mut memory, room) = (Memory::default(), Bytes::gib(50));
    tick(ON, &mut memory, &seen(10_000, Bytes::gib(1), 262_144, room, 50));
    let gone = seen(20_000, Bytes::mib(600), 262_144, room, 60);
    assert_eq!(switched(&tick(ON, &mut memory, &gone)), []);
}

#[test]
fn nothing_is_broken_for_a_storm_where_the_memory_is_not_there_or_promised() {
    let stormy = |room, starting: bool| {
        let mut memory = Memory::default();
        tick(ON, &mut memory, &seen(10_000, Bytes::gib(1), 262_144, room, 0));
        let mut storm = seen(20_000, Bytes::mib(600), 262_144, room, 108_000);
        if starting {
            // Has just been started, with all of its RAM before it.
            let (ram, process) = (Some(Bytes::gib(48)), Some(Default::default()));
            storm.vms.push(VmSample { ram, process, age_ms: Some(1000), ..vm(3, "c") });
        }
        tick(ON, &mut memory, &storm)
    };
    assert_eq!(switched(&stormy(Bytes::gib(50), false)), [(1, false)]);
    // A reserve of 4 GiB and a gibibyte that is merged.
    let plan = stormy(Bytes::mib(4500), false);
    assert!(plan.vms.is_empty() && !runs(&plan) && plan.why.contains("no room"), "{plan:?}");
    let plan = stormy(Bytes::gib(50), true);
    assert!(plan.vms.is_empty() && !runs(&plan) && plan.why.contains("no room"), "{plan:?}");
}
