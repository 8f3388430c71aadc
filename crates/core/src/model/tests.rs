//! How the host is understood, and what of a VM may be acted upon.

use super::standing::beyond_balloon;
use super::*;
use crate::config::{Amount, Metadata, Overrides};
use crate::plan::Reason;
use crate::sample::{
    BalloonSample, Claim, GuestStats, HostSample, LimitSample, Link, Meminfo, ProcessMemory, Psi,
    PsiLine, RunState, SwapArea, VmId, Vmstat,
};
use crate::state::{Doubt, LimitMemory, Owned, OwnedVm};

const GIB: u64 = 1024;

fn host_sample(available_mib: u64) -> Sample {
    let (total, available) = (Bytes::gib(10), Bytes::mib(available_mib));
    let memory = Some(Meminfo { total, available, ..Meminfo::default() });
    let host = HostSample { memory, ..HostSample::default() };
    Sample { at: Stamp(5_000), host, ..Sample::default() }
}

/// A VM with this RAM and size, all in MiB; `available`: what its guest says, if it does.
fn running(ram: u64, actual: u64, available: Option<u64>) -> VmSample {
    let says = |mib| GuestStats { available: Some(Bytes::mib(mib)), ..GuestStats::default() };
    let (actual, guest) = (Bytes::mib(actual), available.map(says));
    let deflate_on_oom = Some(true);
    let balloon = Some(BalloonSample { actual, deflate_on_oom, guest, ..BalloonSample::default() });
    VmSample { ram: Some(Bytes::mib(ram)), balloon, ..VmSample::running(1, "a") }
}

/// What the loop makes of its first sample.
fn first(config: &str, sample: &Sample) -> (Model, Memory) {
    let mut memory = Memory::default();
    memory.observe(sample);
    (Model::new(&Config::parse("f", config).unwrap(), sample, &memory), memory)
}

fn host(sample: &Sample) -> HostModel {
    Model::new(&Config::default(), sample, &Memory::default()).host
}

/// What is remembered of the machine where it was in this state.
fn host_was(state: Pressure) -> LimitMemory {
    LimitMemory { name: "host".into(), state, ..LimitMemory::default() }
}

fn state(sample: &Sample, before: Pressure) -> Pressure {
    let limits = vec![host_was(before)];
    let memory = Memory { limits, at: Some(Stamp(4_000)), ..Memory::default() };
    Model::new(&Config::default(), sample, &memory).host.shown.state
}

#[test]
fn a_balloon_that_is_not_there_does_not_follow_or_has_no_driver_brings_nothing() {
    let balloon = |guest| Some(BalloonSample { guest, ..BalloonSample::default() });
    let runs = |balloon| VmSample { balloon, ..VmSample::running(1, "a") };
    let now = Stamp(100_000);
    let well = runs(balloon(Some(Default::default())));
    let new = VmMemory::default();
    assert!(!beyond_balloon(&well, &new, now));
    assert!([None, balloon(None)].map(runs).iter().all(|vm| beyond_balloon(vm, &new, now)));
    let until = |ms| Some(now.plus(ms));
    let stuck = VmMemory { stuck_until: until(1), ..VmMemory::default() };
    assert!(beyond_balloon(&well, &stuck, now));
    let refused = VmMemory { refused_until: until(1), ..VmMemory::default() };
    assert!(beyond_balloon(&well, &refused, now), "QEMU or libvirt takes no order");
    let doubt = |times| Some(Doubt { times, ..Doubt::default() });
    let lies = |times| VmMemory { doubt: doubt(times), ..VmMemory::default() };
    assert!(!beyond_balloon(&well, &lies(1), now) && beyond_balloon(&well, &lies(2), now));
    let boots = VmMemory { settle_until: until(1), ..VmMemory::default() };
    assert!(!beyond_balloon(&runs(None), &boots, now));
    let migrates = VmSample { run: Some(RunState::Migrating), ..runs(None) };
    let silent = VmSample { link: Link::Slow("x".into()), ..runs(None) };
    assert!(!beyond_balloon(&migrates, &new, now) && !beyond_balloon(&silent, &new, now));
}

#[test]
fn reserve_slides_with_the_size_of_the_host() {
    for (gib, mib) in [(1, 204), (4, 819), (32, 3112), (512, 17858)] {
        assert_eq!(default_reserve(Bytes::gib(gib)).0 >> 20, mib, "{gib} GiB");
    }
}

#[test]
fn enter_and_leave_marks_differ() {
    // Reserve of 10 GiB: 1,310 MiB.
    for (mib, before, after) in [
        (2000, Pressure::Clear, Pressure::Clear),
        (1000, Pressure::Clear, Pressure::Clear),
        (980, Pressure::Clear, Pressure::Soft),
        (1200, Pressure::Soft, Pressure::Soft),
        (1320, Pressure::Soft, Pressure::Clear),
        (600, Pressure::Soft, Pressure::Hard),
        (800, Pressure::Hard, Pressure::Hard),
        (900, Pressure::Hard, Pressure::Soft),
        (300, Pressure::Clear, Pressure::Critical),
        (500, Pressure::Critical, Pressure::Critical),
        (2000, Pressure::Critical, Pressure::Clear),
    ] {
        assert_eq!(state(&host_sample(mib), before), after, "{mib} MiB from {before}");
    }
}

#[test]
fn stalls_count_only_where_memory_is_also_tight() {
    let mut s = host_sample(2000);
    let line = |avg10| PsiLine { avg10, ..PsiLine::default() };
    s.host.psi = Some(Psi { some: line(50.0), full: line(10.0) });
    assert_eq!(state(&s, Pressure::Clear), Pressure::Hard);
    s.host.memory = Some(Meminfo { available: Bytes::gib(4), ..s.host.memory.unwrap() });
    s.host.psi = Some(Psi { some: line(50.0), full: line(4.0) });
    assert_eq!(state(&s, Pressure::Clear), Pressure::Clear);
}

/// A full NUMA node, or a limit of one VM's own cgroup.
#[test]
fn heavy_stalls_and_swapping_are_never_ignored() {
    let line = |avg10| PsiLine { avg10, ..PsiLine::default() };
    let swapped = |pages| Some(Vmstat { swap_out_pages: pages, ..Vmstat::default() });
    let memory = Memory { at: Some(Stamp(4_000)), vmstat: swapped(0), ..Memory::default() };
    let look = |full, pages| {
        let mut s = host_sample(8000);
        s.host.psi = Some(Psi { some: line(20.0), full: line(full) });
        s.host.vmstat = swapped(pages);
        let m = Model::new(&Config::default(), &s, &memory).host;
        (m.shown.state, m.shown.shortage, m.warnings.join(""))
    };
    assert_eq!(look(4.0, 100), (Pressure::Clear, Bytes::ZERO, String::new()));
    for (full, pages) in [(60.0, 0), (0.0, 4096)] {
        let (state, shortage, warning) = look(full, pages);
        assert_eq!((state, shortage), (Pressure::Soft, Bytes::ZERO));
        assert!(warning.contains("NUMA"), "{warning}");
    }
    // A backup that stalls at its own limit does not stall the VMs.
    let mut s = host_sample(8000);
    s.host.psi = Some(Psi { some: line(90.0), full: line(60.0) });
    s.host.vms_psi = Some(Psi::default());
    assert_eq!(state(&s, Pressure::Clear), Pressure::Clear);
    s.host.memory.as_mut().unwrap().available = Bytes::mib(2000);
    assert_eq!(state(&s, Pressure::Clear), Pressure::Clear);
}

#[test]
fn swap_counts_as_far_as_the_vms_may_use_it_and_it_frees_memory() {
    use crate::sample::Zram;
    let area = |used: u64, zram| SwapArea {
        size: Bytes::gib(10),
        used: Bytes::gib(used),
        zram,
        ..SwapArea::default()
    };
    let left = |areas: Vec<SwapArea>, zswap, pool_left: Option<u64>| {
        let mut s = host_sample(5000);
        s.host.memory.as_mut().unwrap().swap_total = Bytes::gib(10);
        (s.host.swaps, s.host.zswap) = (areas, zswap);
        s.host.pool = Some(LimitSample {
            path: "/vms".into(),
            limit: Bytes::gib(4),
            swap_left: pool_left.map(Bytes::gib),
            ..LimitSample::default()
        });
        let m = host(&s);
        let gib = |b: Bytes| b.0 as f64 / Bytes::gib(1).0 as f64;
        let limits: Vec<f64> = m.limits.iter().map(|l| gib(l.swap_left)).collect();
        (limits, m.offload_room.map(gib))
    };
    let zram = |stored, used| {
        let (stored, used) = (Bytes::gib(stored), Bytes::gib(used));
        Some(Zram { stored, used })
    };
    assert_eq!(left(vec![area(0, None)], false, None), (vec![9.0, 9.0], Some(9.0)));
    assert_eq!(left(vec![area(0, None)], false, Some(2)), (vec![9.0, 2.0], Some(2.0)));
    assert_eq!(left(vec![area(0, None)], false, Some(0)), (vec![9.0, 0.0], Some(0.0)));
    assert_eq!(left(vec![area(0, zram(0, 0))], false, None).0[0], 4.5, "nothing is known");
    assert_eq!(left(vec![area(5, zram(4, 1))], false, None).0[0], 2.0, "half at most");
    assert_eq!(left(vec![area(5, zram(4, 3))], false, None).0[0], 1.0);
    assert_eq!(left(vec![area(5, zram(4, 5))], false, None).0[0], 0.0);
    assert_eq!(left(vec![area(0, None)], true, None).0[0], 4.5, "zswap");
    // Of one that is being switched off the kernel counts in all only what is still in it.
    let going = vec![area(7, None), area(3, None)];
    assert_eq!(left(going, false, None).0[0], 0.0);
    let going = vec![area(5, None), area(0, zram(0, 0))];
    assert_eq!(left(going, false, None).0[0], 4.5, "of 5 GiB that are left of both");
    let behind_zswap = left(vec![area(4, None), area(4, None)], true, None).0[0];
    assert!((behind_zswap - 0.9).abs() < 1e-6, "{behind_zswap}");
}

#[test]
fn swap_of_a_slice_counts_once_for_all_vms_in_it() {
    let in_cgroup = |(pid, cgroup): (u32, &&str)| VmSample {
        id: VmId { pid, start: 1 },
        ram: Some(Bytes::gib(4)),
        cgroup: Some((*cgroup).into()),
        ..VmSample::default()
    };
    let left = |cgroups: &[&str]| {
        let mut s = host_sample(5000);
        let memory = s.host.memory.as_mut().unwrap();
        (memory.swap_total, memory.swap_free) = (Bytes::gib(100), Bytes::gib(100));
        let limit = |(path, gib): (&str, u64)| LimitSample {
            path: path.into(),
            limit: Bytes::gib(4),
            swap_left: Some(Bytes::gib(gib)),
            ..LimitSample::default()
        };
        s.host.other_limits = [("/a", 3), ("/a/in", 1), ("/b", 2)].map(limit).to_vec();
        s.vms = (1..).zip(cgroups).map(in_cgroup).collect();
        host(&s).limits[0].swap_left.0 / Bytes::gib(1).0
    };
    assert_eq!(left(&["/a/1"]), 3);
    assert_eq!(left(&["/a/1", "/a/2", "/a/3"]), 3);
    assert_eq!(left(&["/a/in/1", "/a/in/2"]), 1);
    assert_eq!(left(&["/a/in/1", "/a/2"]), 3);
    assert_eq!(left(&["/a/in/1", "/a/2", "/b/3"]), 5);
    assert_eq!(left(&["/a/1", "/free"]), 90);
}

#[test]
fn a_vm_outside_of_the_full_cgroup_is_neither_asked_nor_denied_for_it() {
    let vm = |pid: u32, cgroup: &str, available: u64| VmSample {
        id: VmId { pid, start: 1 },
        process: Some(ProcessMemory { anon: Bytes::gib(3), ..ProcessMemory::default() }),
        cgroup: Some(format!("{cgroup}/{pid}")),
        ..running(4 * GIB, 3 * GIB, Some(available))
    };
    let mut s = host_sample(8000);
    s.host.pool = Some(LimitSample {
        path: "/full".into(),
        limit: Bytes::gib(8),
        usage: Bytes::gib(8) - Bytes::mib(200),
        ..LimitSample::default()
    });
    s.vms = vec![vm(1, "/full", 2500), vm(2, "/else", 2500), vm(3, "/else", 30)];
    let (model, memory) = first("", &s);
    let outside: Vec<bool> = model.vms.iter().map(|v| v.outside).collect();
    assert_eq!((model.host.shown.name.as_str(), outside), ("/full", vec![false, true, true]));
    let plan = crate::policy::decide(&model, &memory, &[]).plan;
    let order = |pid| plan.actions.iter().find(|a| a.vm.pid == pid);
    assert!(order(1).is_some_and(|a| !a.gives()), "{plan:?}");
    assert!(order(2).is_none(), "shrinking it brings the full one nothing");
    let given = order(3).unwrap();
    assert!(given.to > Bytes::mib(3500), "all it needs: the machine has it: {given:?}");
}

#[test]
fn a_limit_above_one_vm_alone_is_most_likely_its_own() {
    let limit = |name: &str, vms| Limit { name: name.into(), vms, ..Limit::default() };
    let common = |inner: Limit, vms: usize| {
        let mut model = Model { vms: vec![VmModel::default(); vms], ..Model::default() };
        let inner = Limit { state: Pressure::Hard, ..inner };
        model.host.limits = vec![limit("host", vms), inner];
        model.common_limit()
    };
    assert_eq!(common(limit("/m.slice/a.scope", 1), 1), 0);
    assert_eq!(common(limit("/m.slice", 1), 1), 1);
    assert_eq!(common(limit("/m", 2), 3), 1);
    assert_eq!(common(limit("/pool", 0), 3), 1, "the configuration names it");
    assert_eq!(common(Limit { is_named: true, ..limit("/pool", 1) }, 1), 1, "and with a VM");
}

#[test]
fn the_tightest_bound_decides_and_huge_page_pools_are_nobodys() {
    let mut s = host_sample(5000);
    s.host.pool = Some(LimitSample {
        path: "/vms".into(),
        limit: Bytes::gib(1),
        usage: Bytes::mib(1000),
        file: Bytes::mib(10),
        ..LimitSample::default()
    });
    let m = host(&s);
    assert_eq!((m.shown.state, m.shown.name.as_str()), (Pressure::Critical, "/vms"));
    assert_eq!(m.shown.headroom, Bytes::mib(34));
    assert_eq!(m.shown.shortage, default_reserve(Bytes::gib(1)) - Bytes::mib(34));
    s.host.pool = None;
    s.host.memory.as_mut().unwrap().hugetlb = Bytes::gib(6);
    let m = host(&s);
    assert_eq!((m.shown.capacity, m.shown.headroom), (Bytes::gib(4), Bytes::gib(4)));
}

#[test]
fn an_unreadable_host_takes_nothing() {
    let m = host(&Sample::default());
    assert!(!m.known);
    assert_eq!((m.shown.state, m.shown.shortage), (Pressure::Clear, Bytes::ZERO));
    // What a cgroup's limit leaves need not be there.
    let (path, limit) = ("/vms".into(), Bytes::gib(8));
    let pool = Some(LimitSample { path, limit, ..LimitSample::default() });
    let m = host(&Sample { host: HostSample { pool, ..Default::default() }, ..Default::default() });
    assert!(!m.known && m.shown.headroom > Bytes::gib(7), "{m:?}");
    // Of a guest that is idle, on a host that was critical a moment ago.
    let process = Some(ProcessMemory { anon: Bytes::gib(4), ..ProcessMemory::default() });
    let vm = VmSample { process, ..running(4 * GIB, 4 * GIB, Some(3 * GIB)) };
    let sample = Sample { at: Stamp(10_000), vms: vec![vm], ..Sample::default() };
    let state = Pressure::Critical;
    let (at, limits) = (Some(Stamp(9_000)), vec![host_was(state)]);
    let mut memory = Memory { at, state, limits, ..Memory::default() };
    memory.observe(&sample);
    let model = Model::new(&Config::default(), &sample, &memory);
    assert_eq!(model.vms[0].standing, Standing::Ready);
    let decided = crate::policy::decide(&model, &memory, &[]);
    assert_eq!(decided.plan.actions, []);
}

#[test]
fn a_floor_above_the_ceiling_gives_way_and_no_floor_is_below_the_least() {
    let text = "[vm.a]\nmin = \"900MiB\"\nmax = \"50%\"\n[vm.b]\nmin = 0\n";
    let config = Config::parse("f", text).unwrap();
    for (name, floor, ceiling) in [("a", 512, 512), ("b", 64, 1024)] {
        let vm = VmSample { name: name.into(), ..running(GIB, GIB, None) };
        let m = VmModel::new(&config, &Sample::default(), &vm, &Memory::default());
        assert_eq!((m.floor, m.ceiling), (Bytes::mib(floor), Bytes::mib(ceiling)), "{name}");
        assert!(matches!(m.standing, Standing::GiveOnly(_)), "no statistics: not asked");
    }
}

#[test]
fn what_metadata_may_still_say_takes_nothing_and_what_is_wrong_leaves_alone() {
    let of = |config: &str, metadata: Metadata| {
        let vm = VmSample { metadata, ..running(GIB, GIB, Some(900)) };
        let sample = Sample { vms: vec![vm], ..host_sample(5_000) };
        first(config, &sample).0.vms.remove(0)
    };
    let says = |its: Overrides| Metadata::Says(its);
    let unread = of("", Metadata::Unread("no answer".into()));
    assert!(matches!(&unread.standing, Standing::GiveOnly(w) if w.contains("not read yet: no a")));
    assert!(!unread.managed && !unread.group_is_proven);
    let wrong = of("", Metadata::Wrong("attribute min: x".into()));
    assert_eq!(wrong.standing, Standing::Off("attribute min: x".into()));
    assert!(!wrong.managed && !wrong.group_is_proven);
    let no = || says(Overrides { manage: Some(false), ..Overrides::default() });
    let alone = of("", no());
    assert_eq!(alone.standing, Standing::Off("manage = no in its libvirt metadata".into()));
    assert!(of("[vm.a]\nmanage = true\n", no()).managed, "the section wins");
    let min = Some(Amount::Bytes(Bytes::mib(300)));
    let set = of("", says(Overrides { min, group: Some("g".into()), ..Overrides::default() }));
    assert_eq!((set.floor, set.group.as_str()), (Bytes::mib(300), "g"));
    assert!(set.managed && set.group_is_proven && set.by_metadata == "min 300 MiB, group g");
    let section = of("[vm.a]\ngroup = \"h\"\n", says(Overrides { min, ..Overrides::default() }));
    assert!(!section.group_is_proven, "by its name alone it is in no group");
}

#[test]
fn a_vm_whose_section_cannot_be_checked_is_owed_what_it_was_and_asked_for_nothing() {
    let claimed = |claim: Claim| {
        let vm = VmSample { claim, ..running(GIB, 300, None) };
        let (id, others) = (vm.id, Some(Bytes::ZERO));
        let sample = Sample { vms: vec![vm], ..host_sample(500) };
        let mut memory = Memory::default();
        let owned = OwnedVm { id, others, ..OwnedVm::default() };
        memory.adopt(&Owned { vms: vec![owned], ..Owned::default() });
        memory.observe(&sample);
        let model = Model::new(&Config::default(), &sample, &memory);
        let plan = crate::policy::decide(&model, &memory, &[]).plan;
        (model.vms[0].standing.clone(), plan.actions.first().map(|a| a.reason.clone()))
    };
    let (standing, returned) = claimed(Claim::Refused("its uuid is 1".into()));
    assert!(matches!(standing, Standing::Off(_)));
    assert_eq!(returned, Some(Reason::Returned));
    let (standing, returned) = claimed(Claim::Unread("no descriptor left".into()));
    assert!(matches!(standing, Standing::GiveOnly(w) if w.contains("no descriptor left")));
    assert_eq!(returned, None);
}

#[test]
fn no_vm_is_asked_for_what_no_balloon_can_hold() {
    let floor = |beyond: u64| {
        let mut vm = running(8 * GIB, 8 * GIB, None);
        vm.balloon.as_mut().unwrap().beyond_balloon = Bytes::mib(beyond);
        let sample = Sample { vms: vec![vm], ..host_sample(5_000) };
        Model::new(&Config::default(), &sample, &Memory::default()).vms[0].floor
    };
    assert_eq!(floor(0), Bytes::gib(2));
    assert_eq!(floor(1024), Bytes::gib(2));
    // 2 GiB and 6 GiB of virtio-mem.
    assert_eq!(floor(6144), Bytes::mib(6145));
}

#[test]
fn floors_beyond_the_host_are_a_warning() {
    let said = |vms: u32| {
        let vm = |pid| VmSample { id: VmId { pid, start: 1 }, ..running(4 * GIB, 4 * GIB, None) };
        let sample = Sample { vms: (1..=vms).map(vm).collect(), ..host_sample(8000) };
        first("[defaults]\nmin = \"100%\"\n", &sample).0.host.warnings.join("")
    };
    assert_eq!(said(2), "");
    assert!(said(3).contains("the floors of all VMs add up to 12 GiB"), "{}", said(3));
}
