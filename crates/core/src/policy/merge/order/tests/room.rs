//! Tests of what must be free before merges are broken.

use super::*;

/// What must go takes memory, too: in a full cgroup the kernel would kill a VM for it.
/// The first VM, of 1 GiB that the host holds, is in a cgroup that may still take `left`.
fn limit(s: &mut Sample, left: Bytes) {
    let ram = Bytes::gib(1);
    let (path, limit) = ("/slice".into(), ram + left);
    s.host.pool = Some(LimitSample { path, limit, usage: ram, ..LimitSample::default() });
    let vm = &mut s.vms[0];
    (vm.cgroup, vm.ram) = (Some("/slice/a".into()), Some(ram));
    vm.process = Some(ProcessMemory { anon: ram, ..ProcessMemory::default() });
}

#[test]
fn nothing_is_broken_where_a_limit_has_no_room_for_it() {
    let off = format!("{ON}[vm.a]\nmerge = false\n");
    let asked_with = |limit_mib: u64, agent: bool, change: fn(&mut Sample)| {
        let mut s = seen(10_000, Bytes::mib(200), 51_200, Bytes::gib(50), 0);
        change(&mut s);
        limit(&mut s, Bytes::mib(limit_mib));
        s.vms[0].agent =
            agent.then(|| AgentSample { link: Link::Up, advises: true, ..Default::default() });
        tick(&off, &mut Memory::default(), &s)
    };
    let asked = |limit_mib, agent| asked_with(limit_mib, agent, |_| ());
    let kept = |plan: &MergePlan| plan.kept.iter().map(|id| id.pid).collect::<Vec<_>>();
    for agent in [false, true] {
        let tight = asked(250, agent);
        assert_eq!((switched(&tight), kept(&tight)), (vec![], vec![1]), "{tight:?}");
        assert!(tight.why.contains("no room to break 200 MiB of it"), "{tight:?}");
        let wide = asked(300, agent);
        assert!(kept(&wide).is_empty() && !wide.why.contains("no room"), "{wide:?}");
        assert_eq!(switched(&wide), if agent { vec![] } else { vec![(1, false)] }, "{wide:?}");
    }
    let unseen = asked_with(250, true, |s| s.vms[0].merge.as_mut().unwrap().open = None);
    assert_eq!(kept(&unseen), [1], "it was not looked at yet");
    // The kernel goes on counting what was broken until ksmd works again.
    let broken = |s: &mut Sample| {
        s.vms[0].merge.as_mut().unwrap().seen = Some((Stamp(10_000), Bytes::mib(20)));
    };
    assert!(kept(&asked_with(250, true, broken)).is_empty());
    let works = |s: &mut Sample| {
        s.vms[0].merge.as_mut().unwrap().seen = Some((Stamp(10_000), Bytes::mib(20)));
        s.host.ksm.as_mut().unwrap().run = 1;
    };
    assert_eq!(kept(&asked_with(250, true, works)), [1]);
}

/// The refusal has `ksmd` rest, and at the next tick the last look counts again.
#[test]
fn what_was_merged_after_the_last_look_needs_room_as_well() {
    let off = format!("{ON}[vm.a]\nmerge = false\n");
    let mut memory = Memory::default();
    let mut at = |at, counted, run| {
        let mut s = seen(10_000, Bytes::mib(20), counted, Bytes::gib(50), 0);
        (s.at, s.host.ksm.as_mut().unwrap().run) = (Stamp(at), run);
        limit(&mut s, Bytes::mib(250));
        tick(&off, &mut memory, &s).kept.len()
    };
    let mib = 256;
    assert_eq!(at(10_000, 20 * mib, 1), 0);
    assert_eq!(at(11_000, 200 * mib, 1), 1);
    assert_eq!(at(12_000, 200 * mib, 0), 1);
}

/// What a VM takes that is being closed is not there for another one. Its QEMU may be slow with it.
#[test]
fn what_is_being_broken_has_its_room_first() {
    let ordered = |busy: bool, slow: bool| {
        let mut s = seen(10_000, Bytes::mib(200), 51_200, Bytes::gib(50), 0);
        s.vms[1].merge = s.vms[0].merge.clone();
        limit(&mut s, Bytes::mib(600));
        (s.vms[1].cgroup, s.vms[1].ram) = (Some("/slice/b".into()), s.vms[0].ram);
        let mut memory = Memory::default();
        let off = format!("{ON}[vm.b]\nmerge = false\n");
        assert_eq!(switched(&tick(&off, &mut memory, &s)), [(2, false)]);
        s.at = Stamp(11_000);
        s.vms[1].merge.as_mut().unwrap().busy = busy;
        if slow {
            s.vms[1].link = Link::Slow("it does not answer".into());
        }
        limit(&mut s, Bytes::mib(300));
        switched(&tick(&format!("{off}[vm.a]\nmerge = false\n"), &mut memory, &s))
    };
    assert_eq!(ordered(false, false), [(1, false)]);
    assert_eq!(ordered(true, false), []);
    assert_eq!(ordered(true, true), []);
}
