//! What the host sees over several ticks: notifications, urgency, swap, and what is not the
//! guests'.

use super::*;
use crate::sample::LimitSample;

/// What is resident beyond its size is not the guest's.
#[test]
fn what_a_vmm_holds_itself_is_learnt_and_not_counted_as_its_guests() {
    let mut memory = Memory::default();
    let held = |m: &Model| only(m).guest_held().unwrap().0 >> 20;
    assert_eq!(held(&look(&mut memory, 1_000, vm(512, 300, 400))), 400);
    // Its pages go a moment after its size.
    assert_eq!(held(&look(&mut memory, 2_000, vm(200, 50, 400))), 400);
    for at in [4_000, 6_000, 8_000] {
        look(&mut memory, at, vm(200, 50, 310));
    }
    let model = look(&mut memory, 9_000, vm(512, 300, 400));
    assert_eq!((only(&model).own.0 >> 20, held(&model)), (109, 290));
}

#[test]
fn what_a_vmm_holds_itself_is_what_was_counted_or_more_where_more_was_seen() {
    let mut memory = Memory::default();
    let mut seen = |at: u64, own: Option<u64>, (size, resident): (u64, u64)| {
        let mut one = vm(size, size / 2, resident);
        let own = own.map(|own| OwnMemory { resident: Bytes::mib(own), swap: Bytes::mib(10) });
        one.process.as_mut().unwrap().own = own;
        let model = look(&mut memory, at, one);
        let vm = only(&model);
        let at_least = vm.guest_held_at_least().unwrap().0 >> 20;
        (vm.own.0 >> 20, vm.guest_held().unwrap().0 >> 20, at_least)
    };
    assert_eq!(seen(1_000, None, (1024, 600)), (0, 600, 536), "it may be 64 MiB");
    assert_eq!(seen(2_000, Some(40), (1024, 600)), (40, 560, 560), "no more than that");
    assert_eq!(seen(3_000, Some(40), (1024, 1124)), (100, 1024, 1024), "more was seen");
    assert_eq!(seen(603_000, Some(40), (1024, 600)), (40, 560, 560), "long ago");
    assert_eq!(seen(603_500, Some(300), (1024, 600)), (300, 300, 512));
    assert_eq!(seen(603_700, Some(40), (1024, 600)), (40, 560, 560), "it was freed");
    assert_eq!(seen(604_000, Some(900), (1024, 600)), (600, 0, 512), "all it holds");
    // It needs 512 MiB by its word, which it has touched.
}

/// Of 600 MiB in memory and 100 in swap the VMM has 100 and 40.
#[test]
fn what_a_vmm_holds_itself_is_nothing_that_its_guest_has_touched() {
    let mut memory = Memory::default();
    let mut one = vm(1024, 512, 600);
    let process = one.process.as_mut().unwrap();
    process.swap = Bytes::mib(100);
    process.own = Some(OwnMemory { resident: Bytes::mib(100), swap: Bytes::mib(40) });
    one.age_ms = Some(1_000);
    let model = look(&mut memory, 1_000, one);
    let vm = only(&model);
    assert_eq!(vm.guest_swap(), Bytes::mib(60));
    assert_eq!(vm.promised, Bytes::mib(1024 - 500 - 60));
}

#[test]
fn what_a_cgroup_notifies_counts_for_two_seconds_where_there_is_no_psi() {
    let mut memory = Memory::default();
    let mut state = |ms, medium, critical| {
        // Below two reserves, above the marks.
        let mut s = with_left(Bytes::gib(2), sample(ms, vec![]));
        s.host.vmpressure = Some(VmPressure { medium, critical });
        tick(&mut memory, &s).host.shown.state
    };
    assert_eq!(state(1_000, 0, 0), Pressure::Clear, "cache is reclaimed: normal");
    assert_eq!(state(2_000, 1, 0), Pressure::Soft);
    assert_eq!(state(3_000, 1, 1), Pressure::Hard);
    assert_eq!(state(4_500, 1, 0), Pressure::Hard, "still");
    assert_eq!(state(6_000, 0, 0), Pressure::Clear);
}

#[test]
fn urgency_rises_at_once_and_sinks_slowly() {
    use crate::sample::{Psi, PsiLine};
    let mut memory = Memory::default();
    let mut urgency = |ms, avg10| {
        let mut s = with_left(Bytes::gib(2), sample(ms, vec![]));
        let some = PsiLine { avg10, ..PsiLine::default() };
        s.host.psi = Some(Psi { some, full: PsiLine::default() });
        tick(&mut memory, &s).host.shown.urgency
    };
    assert_eq!(urgency(1_000, 40.0), 0.75);
    let sinking = urgency(2_000, 0.0);
    assert!((0.6..0.75).contains(&sinking), "{sinking}");
    assert_eq!(urgency(120_000, 0.0), 0.0);
    assert_eq!(urgency(121_000, 5.0), 0.25, "in proportion");
}

#[test]
fn what_is_paged_out_and_read_back_leaves_the_vm_alone() {
    let mut memory = Memory::default();
    let at = |swap: u64, paged: u64| {
        let mut one = paging(paged, vm(1024, 124, 900 - swap));
        one.process.as_mut().unwrap().swap = Bytes::mib(swap);
        one
    };
    for (ms, swap, paged) in [(1_000, 0, 0), (2_000, 100, 100), (3_000, 98, 100)] {
        look(&mut memory, ms, at(swap, paged));
    }
    let cold = memory.vms[0].cold;
    assert_eq!((cold.back_until, cold.since), (None, Stamp(1_000)), "some is always read back");
    look(&mut memory, 4_000, at(60, 100));
    assert!(memory.vms[0].cold.back_until > Some(Stamp(200_000)));
    assert_eq!(offloaded(&memory), Bytes::mib(100));
}

#[test]
fn what_others_used_is_kept_where_a_limit_comes_and_goes() {
    let (gib, mib) = (Bytes::gib, Bytes::mib);
    let limit =
        |usage| LimitSample { path: "/t".into(), limit: gib(4), usage, ..LimitSample::default() };
    let mut memory = Memory::default();
    let mut look = |s: u64, left, inner: Option<Bytes>| {
        let below = |pid| VmSample {
            id: VmId { pid, start: 9 },
            cgroup: Some(format!("/t/{pid}")),
            ..vm(1024, 600, 900)
        };
        let mut seen = with_left(left, sample(s * 1_000, vec![below(7), below(8)]));
        seen.host.other_limits = inner.map(limit).into_iter().collect();
        tick(&mut memory, &seen);
        let others =
            |name: &str| memory.past(name).map_or(Bytes::ZERO, |past| past.others.highest());
        ([others("host"), others("/t")], memory.limits.len())
    };
    // 6 GiB of the host are used for two seconds, and later 3800 MiB of the slice.
    let (of_host, of_slice) = (gib(6) - mib(1800), mib(2000));
    for s in 1..=3 {
        look(s, gib(10), None);
    }
    look(4, gib(14), Some(mib(3800)));
    look(5, gib(14), Some(mib(3800)));
    for s in (10..100).step_by(4) {
        assert_eq!(look(s, gib(14), None), ([of_host, of_slice], 2), "{s}");
        assert_eq!(look(s + 2, gib(14), Some(mib(3200))), ([of_host, of_slice], 2), "{s}");
    }
    assert_eq!(look(3_000, gib(14), None).1, 1, "of a limit that is gone for half an hour nothing");
}

#[test]
fn what_a_vm_holds_that_comes_or_goes_is_not_taken_for_others() {
    let gib = Bytes::gib;
    let mut memory = Memory::default();
    let mut others = |at: u64, vms: Vec<VmSample>| {
        // 6 GiB are used by VMs, or by one that is not seen any more.
        tick(&mut memory, &with_left(gib(10), sample(at, vms)));
        memory.past("host").map_or(Bytes::ZERO, |past| past.others.highest())
    };
    let vm = |resident: Option<Bytes>| {
        let process = resident.map(|anon| ProcessMemory { anon, ..ProcessMemory::default() });
        VmSample { id: ID, name: "a".into(), process, ..VmSample::default() }
    };
    others(1_000, vec![vm(Some(gib(5)))]);
    assert_eq!(others(2_000, vec![vm(Some(gib(5)))]), gib(1));
    others(3_000, vec![vm(None)]);
    assert_eq!(others(4_000, vec![]), gib(1), "its end is under way");
    // One that is preallocated before it is found.
    assert_eq!(others(5_000, vec![]), gib(6));
    for ms in [6_000, 7_000] {
        assert_eq!(others(ms, vec![vm(Some(gib(5)))]), gib(1), "at {ms}");
    }
}

/// The host cannot be read for a moment.
#[test]
fn what_is_known_of_the_machine_is_kept_also_with_one_vm() {
    let mut memory = Memory::default();
    let mut others = |at: u64, reads: bool| {
        let mut seen = with_left(Bytes::gib(10), sample(at, vec![vm(1024, 600, 900)]));
        seen.host.memory.take_if(|_| !reads);
        tick(&mut memory, &seen);
        memory.past("host").map(|past| past.others.highest())
    };
    let used = Some(Bytes::gib(6) - Bytes::mib(900));
    others(1_000, true);
    assert_eq!([others(2_000, true), others(3_000, false), others(4_000, true)], [used; 3]);
}

#[test]
fn what_guests_needed_together_is_without_those_whose_ram_is_pinned() {
    let mut memory = Memory::default();
    let pinned = Some("a VFIO device pins it".into());
    let pinned = VmSample { id: VmId { pid: 8, start: 9 }, pinned, ..vm(1024, 300, 900) };
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900), pinned]));
    assert_eq!(memory.past("host").unwrap().needs.highest(), Bytes::mib(424));
}

/// What was needed together before it came is without it.
#[test]
fn a_vm_that_comes_is_known_to_have_come_for_half_an_hour() {
    let mut memory = Memory::default();
    let mut joined = |s: u64, pids: &[u32]| {
        let one = |pid: &u32| VmSample { id: VmId { pid: *pid, start: 9 }, ..vm(1024, 600, 900) };
        tick(&mut memory, &sample(s * 1000, pids.iter().map(one).collect()));
        let joined = &memory.past("host").unwrap().joined;
        joined.iter().map(|(id, _)| id.pid).collect::<Vec<_>>()
    };
    assert_eq!(joined(1, &[7]), [0; 0], "nothing is known of before");
    assert_eq!((joined(2, &[7, 8]), joined(3, &[7, 8, 9])), (vec![8], vec![8, 9]));
    assert_eq!(joined(4, &[7, 9]), [9], "one is gone");
    assert_eq!((joined(1800, &[7, 9]), joined(1804, &[7, 9])), (vec![9], vec![]));
}
