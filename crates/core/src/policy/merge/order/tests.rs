//! Tests of who is open to KSM and when anything is done.

mod room;
mod storm;

use std::collections::VecDeque;

use super::*;
use crate::config::Config;
use crate::plan::{MergeWish, Plan};
use crate::policy::Decided;
use crate::sample::{
    AgentSample, Claim, HostSample, KsmStat, LimitSample, Link, Meminfo, ProcessMemory, RunState,
    Sample, ScanSample, VmId, VmSample, Vmstat,
};
use crate::state::{Owned, OwnedMark};
use crate::tick::{Engine, Host, Next, Tick};

const ON: &str = "[merge]\nmode = \"on\"\n";

/// A VM that is open to KSM and was scanned: much to be had.
fn vm(pid: u32, name: &str) -> VmSample {
    let found = Some(Candidates { pages: 100_000, zeros: 0, duplicates: 80_000 });
    let merge = Some(MergeSample { open: Some(true), found, ..MergeSample::default() });
    VmSample { merge, ..VmSample::running(pid, name) }
}

/// After a scan, on a host with so much room.
fn sample(at: u64, room: Bytes, vms: Vec<VmSample>) -> Sample {
    let memory = Some(Meminfo { total: Bytes::gib(64), available: room, ..Meminfo::default() });
    let scan = Some(ScanSample { number: 1, at: Stamp(1000), ..ScanSample::default() });
    let ksm = Some(Ksm { pages_shared: 1000, pages_sharing: 3000, ..Ksm::default() });
    let vmstat = Some(Vmstat { cow_ksm: Some(0), ..Vmstat::default() });
    let host = HostSample { memory, ksm, scan, vmstat, ..HostSample::default() };
    Sample { at: Stamp(at), host, vms, ..Sample::default() }
}

fn tick(config: &str, memory: &mut Memory, sample: &Sample) -> MergePlan {
    tick_that_lacks(Bytes::ZERO, config, memory, sample)
}

fn tick_that_lacks(lacks: Bytes, config: &str, memory: &mut Memory, s: &Sample) -> MergePlan {
    let config = Config::parse("f", config).unwrap();
    memory.observe(s);
    let model = Model::new(&config, s, memory);
    let (plan, next) = merge(&model, memory, lacks).expect("merging is not off");
    let all = Plan { merge: Some(plan.clone()), ..Plan::default() };
    memory.learn(&model, &Decided { plan: all, merging: Some(next) }, &[], true);
    plan
}

fn once(config: &str, vms: Vec<VmSample>) -> MergePlan {
    tick(config, &mut Memory::default(), &sample(10_000, Bytes::gib(50), vms))
}

fn runs(plan: &MergePlan) -> bool {
    matches!(plan.ksmd, Some(KsmdOrder::Run { .. }))
}

fn switched(plan: &MergePlan) -> Vec<(u32, bool)> {
    plan.vms.iter().map(|o| (o.vm.pid, o.open)).collect()
}

fn with(mut vm: VmSample, change: impl FnOnce(&mut MergeSample)) -> VmSample {
    change(vm.merge.as_mut().unwrap());
    vm
}

fn with_agent(vm: VmSample, agent: AgentSample) -> VmSample {
    VmSample { agent: Some(agent), ..vm }
}

fn proven(pid: u32, name: &str) -> VmSample {
    VmSample { claim: Claim::Proven, ..vm(pid, name) }
}

#[test]
fn off_is_off_and_a_report_leaves_ksm_alone() {
    let config = Config::default();
    let s = sample(10_000, Bytes::gib(50), vec![vm(1, "a")]);
    let model = Model::new(&config, &s, &Memory::default());
    assert!(merge(&model, &Memory::default(), Bytes::ZERO).is_none());
    let plan = once("[merge]\nmode = \"report\"\n[vm.a]\nmerge = false\n", vec![vm(1, "a")]);
    assert_eq!((plan.ksmd.clone(), switched(&plan)), (None, vec![]));
    assert_eq!(plan.scan.unwrap().vms.len(), 1);
    assert!(plan.why.contains("would save 306 MiB"), "{}", plan.why);
}

#[test]
fn nothing_is_merged_while_a_vm_of_another_group_is_open_or_not_known() {
    let config = format!("{ON}group = \"acme\"\n[vm.a]\ngroup = \"acme\"\n");
    assert!(runs(&once(&config, vec![proven(1, "a")])));
    let plan = once(&config, vec![proven(1, "a"), vm(2, "b")]);
    assert!(!runs(&plan) && plan.why.contains("b is being closed"), "{plan:?}");
    assert_eq!(switched(&plan), [(2, false)]);
    let new = with(vm(2, "b"), |m| m.open = None);
    let plan = once(&config, vec![proven(1, "a"), new]);
    assert!(!runs(&plan) && plan.why.contains("b was not looked at yet"), "{plan:?}");
    let closed = with(vm(2, "b"), |m| m.open = Some(false));
    assert!(runs(&once(&config, vec![proven(1, "a"), closed])));
    // One that cannot be closed blocks, and it is said how to start it.
    let deaf = VmSample { link: Link::Down("no socket".into()), ..vm(2, "b") };
    let plan = once(&config, vec![proven(1, "a"), deaf]);
    assert!(!runs(&plan) && plan.why.contains("no socket; start it with"), "{plan:?}");
    assert_eq!(switched(&plan), []);
}

#[test]
fn several_groups_and_none_chosen_is_no_merging_and_nothing_is_touched() {
    let config = format!("{ON}[vm.a]\ngroup = \"x\"\n[vm.b]\ngroup = \"y\"\n");
    let plan = once(&config, vec![vm(1, "a"), vm(2, "b")]);
    assert!(!runs(&plan) && plan.vms.is_empty() && plan.why.contains("(x, y)"), "{plan:?}");
    let joined = config.replace("[vm.a]", "across_groups = true\n[vm.a]");
    assert!(runs(&once(&joined, vec![vm(1, "a"), vm(2, "b")])));
    // One that stays out in any case is no second group.
    let out = config + "merge = false\n";
    assert_eq!(switched(&once(&out, vec![proven(1, "a"), vm(2, "b")])), [(2, false)]);
}

/// A QEMU that its guest has taken over may change its name, and would see by the time that
/// a write takes what others of that group hold.
#[test]
fn where_there_are_several_groups_a_name_alone_puts_no_vm_into_one() {
    let config =
        format!("{ON}group = \"acme\"\n[vm.a]\ngroup = \"acme\"\n[vm.b]\ngroup = \"acme\"\n");
    let plan = once(&config, vec![proven(1, "a"), vm(2, "b")]);
    assert!(!runs(&plan), "{plan:?}");
    assert_eq!(switched(&plan), [(2, false)]);
    assert!(plan.vms[0].reason.contains("by a name that it gives itself"), "{plan:?}");
    let joined = config.replace("group = \"acme\"\n[vm.a]", "across_groups = true\n[vm.a]");
    assert!(runs(&once(&joined, vec![proven(1, "a"), vm(2, "b")])));
    // Of one group are all, whatever they call themselves.
    assert!(runs(&once(ON, vec![vm(1, "a"), vm(2, "b")])));
}

#[test]
fn metadata_puts_a_vm_into_a_group_and_none_is_taken_out_before_it_is_read() {
    use crate::config::{Metadata, Overrides};
    let of = |pid, name: &str, group: &str| VmSample {
        metadata: Metadata::Says(Overrides { group: Some(group.into()), ..Overrides::default() }),
        ..vm(pid, name)
    };
    let config = format!("{ON}group = \"acme\"\n");
    let plan = once(&config, vec![of(1, "a", "acme"), of(2, "b", "acme")]);
    assert!(runs(&plan) && switched(&plan).is_empty(), "{plan:?}");
    let plan = once(&config, vec![of(1, "a", "acme"), of(2, "b", "other")]);
    assert!(!runs(&plan) && switched(&plan) == [(2, false)], "{plan:?}");
    let unread = VmSample { metadata: Metadata::Unread("no answer".into()), ..vm(2, "b") };
    for config in [ON, &config] {
        let plan = once(config, vec![of(1, "a", "acme"), unread.clone()]);
        assert!(!runs(&plan) && switched(&plan).is_empty(), "{plan:?}");
    }
}

#[test]
fn a_vm_of_which_nothing_is_said_stays_as_it_was_started() {
    let closed = || with(vm(2, "b"), |m| m.open = Some(false));
    assert_eq!(switched(&once(ON, vec![vm(1, "a"), closed()])), []);
    let config = format!("{ON}[vm.b]\nmerge = true\n");
    assert_eq!(switched(&once(&config, vec![vm(1, "a"), closed()])), [(2, true)]);
    let unmanaged = format!("{config}manage = false\n");
    assert_eq!(switched(&once(&unmanaged, vec![vm(1, "a"), closed()])), []);
    let moving = VmSample { run: Some(RunState::Migrating), ..closed() };
    assert_eq!(switched(&once(&config, vec![moving])), []);
}

#[test]
fn a_vm_that_is_not_managed_is_not_scanned() {
    let new = |pid, name| with(vm(pid, name), |m| m.found = None);
    let scanned =
        |config: &str| once(config, vec![new(1, "a"), new(2, "b")]).scan.map(|s| s.vms.len());
    assert_eq!(scanned(ON), Some(2));
    assert_eq!(scanned(&format!("{ON}[vm.b]\nmanage = false\n")), Some(1));
}

#[test]
fn one_whose_agent_only_observes_is_merged_like_one_without() {
    let observes = AgentSample { observes: true, ..AgentSample::default() };
    let vms = vec![vm(1, "a"), with_agent(vm(2, "b"), observes)];
    let plan = once(ON, vms.clone());
    assert!(runs(&plan) && plan.ranged.is_empty() && switched(&plan).is_empty(), "{plan:?}");
    let out = format!("{ON}[vm.b]\nmerge = false\n");
    assert_eq!(switched(&once(&out, vms)), [(2, false)]);
}

#[test]
fn a_vm_with_an_agent_is_opened_by_ranges_or_not_at_all() {
    let config = format!("{ON}[vm.b]\nmerge = true\n");
    let with_agent = |advises, open| {
        let agent = AgentSample { link: Link::Up, advises, ..AgentSample::default() };
        with_agent(with(vm(2, "b"), |m| m.open = Some(open)), agent)
    };
    let ranged = |config: &str, vm| {
        let plan = once(config, vec![vm]);
        assert_eq!(switched(&plan), [], "never as a whole");
        (plan.ranged.len(), runs(&plan))
    };
    assert_eq!(ranged(&config, with_agent(true, false)), (1, false), "nothing is open yet");
    assert_eq!(ranged(&config, with_agent(true, true)), (1, true));
    // One that cannot keep ranges apart from what it recycles.
    assert_eq!(ranged(&config, with_agent(false, true)), (0, false));
    let mut deaf = with_agent(true, true);
    deaf.agent.as_mut().unwrap().link = Link::Down("gone".into());
    assert_eq!(ranged(&config, deaf.clone()), (0, false));
    let why = once(&config, vec![deaf]).why;
    assert!(why.contains("only its agent can close it: its agent does not answer (gone)"), "{why}");
    let out = config.replace("true", "false");
    assert_eq!(ranged(&out, with_agent(true, true)), (0, false));
}

#[test]
fn the_operators_word_holds_and_what_was_changed_is_written_down() {
    let mut memory = Memory::default();
    let s = |at, open| {
        let b = with(vm(2, "b"), |m| m.open = Some(open));
        sample(at, Bytes::gib(50), vec![vm(1, "a"), b])
    };
    assert_eq!(switched(&tick(ON, &mut memory, &s(10_000, true))), []);
    memory.wish(&[MergeWish { vm: Some("b".into()), on: false }]);
    let config = Config::parse("f", ON).unwrap();
    memory.observe(&s(11_000, true));
    let model = Model::new(&config, &s(11_000, true), &memory);
    let plan = Plan { merge: merge(&model, &memory, Bytes::ZERO).map(|m| m.0), ..Plan::default() };
    let owned = memory.owned(&model, &plan, &[]);
    assert!(owned.marks.len() == 1 && owned.marks[0].open, "before it is done: {owned:?}");
    assert_eq!(switched(&tick(ON, &mut memory, &s(11_000, true))), [(2, false)]);
    // Not again at once, while QEMU is at it; then again.
    assert_eq!(switched(&tick(ON, &mut memory, &s(12_000, true))), []);
    assert_eq!(switched(&tick(ON, &mut memory, &s(42_000, true))), [(2, false)]);
    assert!(runs(&tick(ON, &mut memory, &s(43_000, false))));
    let model = Model::new(&config, &s(43_000, false), &memory);
    let owned = memory.owned(&model, &Plan::default(), &[]);
    assert!(owned.marks.len() == 1 && owned.vms.is_empty() && !owned.is_empty());
    // Merging is off by now, so no sample tells who is open.
    let mut untold = s(44_000, false);
    untold.vms.iter_mut().for_each(|vm| vm.merge = None);
    let model = Model::new(&config, &untold, &memory);
    assert_eq!(memory.owned(&model, &Plan::default(), &[]), owned);
    // Of what was handed over, only what is still written down was not put back.
    let mut handed = memory.clone();
    handed.adopt(&Owned::default());
    assert_eq!(handed.owned(&model, &Plan::default(), &[]), Owned::default());
    // Another daemon takes that over, and puts it back when the word is gone.
    let mut next = Memory::default();
    next.adopt(&owned);
    assert_eq!(switched(&tick(ON, &mut next, &s(50_000, false))), [(2, true)]);
    let model = Model::new(&config, &s(51_000, true), &next);
    assert_eq!(next.owned(&model, &Plan::default(), &[]), Owned::default());
    // One that was out, and was opened because that was asked for, goes out again.
    let mut next = Memory::default();
    let marks = owned.marks.iter().map(|mark| OwnedMark { open: false, ..mark.clone() }).collect();
    next.adopt(&Owned { marks, ..Owned::default() });
    let asks = format!("{ON}[vm.b]\nmerge = true\n");
    assert_eq!(switched(&tick(&asks, &mut next, &s(50_000, true))), []);
    assert_eq!(switched(&tick(ON, &mut next, &s(51_000, true))), [(2, false)]);
    // All out: nothing is merged until it is said of one.
    memory.wish(&[MergeWish { vm: None, on: false }]);
    assert_eq!(switched(&tick(ON, &mut memory, &s(90_000, false))), [(1, false)]);
    memory.wish(&[MergeWish { vm: Some("b".into()), on: true }]);
    assert_eq!(switched(&tick(ON, &mut memory, &s(91_000, false))), [(2, true)]);
}

/// A look at a VM's mappings at `at`, and how far the host's count of copies is.
fn seen(at: u64, merged: Bytes, counted: u64, room: Bytes, copied: u64) -> Sample {
    let part = |m: &mut MergeSample| {
        m.seen = Some((Stamp(at), merged));
        m.stat = KsmStat { merging_pages: Some(counted), ..KsmStat::default() };
    };
    let mut s = sample(at, room, vec![with(vm(1, "a"), part), vm(2, "b")]);
    s.host.vmstat = Some(Vmstat { cow_ksm: Some(copied), ..Vmstat::default() });
    s
}

#[test]
fn a_burst_is_judged_by_the_vms_own_counters() {
    let mut memory = Memory::default();
    let at = |at: u64, scans: u64, cpu_ms: u64, merged: u64, others: u64| {
        let mut s = sample(at, Bytes::gib(50), vec![vm(1, "a")]);
        s.vms[0].merge.as_mut().unwrap().stat.merging_pages = Some(merged);
        let ksm = s.host.ksm.as_mut().unwrap();
        (ksm.full_scans, ksm.cpu_ms) = (scans, Some(cpu_ms));
        (ksm.pages_shared, ksm.pages_sharing) = (10_000 + others, 30_000 + 3 * others);
        s
    };
    assert!(runs(&tick(ON, &mut memory, &at(10_000, 0, 0, 0, 0))));
    // Somebody else's pages were merged, and none of the VM's.
    let plan = tick(ON, &mut memory, &at(20_000, 3, 9_000, 0, 1_000_000));
    assert!(!runs(&plan) && plan.why.contains("saves less than the floor"), "{plan:?}");
    let mut memory = Memory::default();
    tick(ON, &mut memory, &at(10_000, 0, 0, 0, 0));
    assert!(runs(&tick(ON, &mut memory, &at(20_000, 3, 3_000, 60_000, 0))));
}

#[test]
fn a_burst_that_a_vm_interrupts_is_judged_all_the_same_and_scans_go_on_meanwhile() {
    let mut memory = Memory::default();
    let config = format!("{ON}cpu_clear = \"20%\"\n");
    let at = |at: u64, scans: u64, cpu_ms: u64, new: bool| {
        let unmet = with_agent(with(vm(2, "b"), |m| m.open = None), AgentSample::default());
        let vms = std::iter::once(vm(1, "a")).chain(new.then_some(unmet)).collect();
        let mut s = sample(at, Bytes::gib(50), vms);
        let ksm = s.host.ksm.as_mut().unwrap();
        (ksm.full_scans, ksm.cpu_ms) = (scans, Some(cpu_ms));
        s
    };
    let mut ticks = |s: &Sample| tick(&config, &mut memory, s);
    assert!(runs(&ticks(&at(10_000, 0, 0, false))));
    let blocked = ticks(&at(2_000_000, 1, 3_000, true));
    assert!(!runs(&blocked) && blocked.scan.is_some(), "{blocked:?}");
    let plan = ticks(&at(2_001_000, 3, 9_000, false));
    assert!(!runs(&plan) && plan.why.contains("less than the floor now"), "{plan:?}");
}

#[test]
fn what_was_closed_and_is_opened_again_is_merged_again() {
    let mut memory = Memory::default();
    memory.merge.govern.done = 1;
    memory.merge.govern.done_of = Some(Bytes::gib(1));
    let mut runs_with = |b: Option<bool>| {
        let vms = vec![vm(1, "a"), with(vm(2, "b"), |m| m.open = b)];
        runs(&tick(ON, &mut memory, &sample(10_000, Bytes::gib(50), vms)))
    };
    assert!(!runs_with(Some(true)) && !runs_with(None) && !runs_with(Some(true)));
    assert!(!runs_with(Some(false)) && runs_with(Some(true)));
    // Scans are counted anew after a reload.
    memory.adopt(&Owned::default());
    let vms = vec![vm(1, "a"), vm(2, "b")];
    assert!(runs(&tick(ON, &mut memory, &sample(10_000, Bytes::gib(50), vms))));
    assert_eq!(memory.merge.govern.burst.map(|burst| burst.plan), Some(1));
}

#[test]
fn scans_follow_one_another_at_the_pace_and_wait_for_bursts_and_for_the_host() {
    let mut memory = Memory::default();
    let unscanned = |at: u64, number: u64, busy: bool, found: Option<Candidates>| {
        let mut s = sample(at, Bytes::gib(50), vec![with(vm(1, "a"), |m| m.found = found)]);
        let ended = Stamp(at.saturating_sub(500));
        s.host.scan = Some(ScanSample { number, busy, at: ended, ..ScanSample::default() });
        s
    };
    let gentle = format!("{ON}scan = \"10s\"\n");
    let config = format!("{gentle}cpu_clear = \"20%\"\n");
    let mut scans = |s: &Sample| tick(&config, &mut memory, s).scan.is_some();
    assert!(scans(&unscanned(1_000, 0, false, None)), "the first");
    assert!(!scans(&unscanned(60_000, 0, true, None)), "one is under way");
    let none = Candidates { pages: 1000, ..Candidates::default() };
    assert!(!scans(&unscanned(61_000, 1, false, Some(none))), "it has just ended");
    let mut later = unscanned(75_000, 1, false, Some(none));
    later.host.scan.as_mut().unwrap().at = Stamp(60_500);
    assert!(!scans(&later), "it found nothing: twice as long");
    later.at = Stamp(81_000);
    assert!(scans(&later));
    let mut short = later.clone();
    (short.at, short.host.memory.as_mut().unwrap().available) = (Stamp(999_000), Bytes::mib(10));
    assert!(!scans(&short), "a critical host");
    let found = Candidates { pages: 100_000, zeros: 0, duplicates: 80_000 };
    let burst = unscanned(1_500_000, 2, false, Some(found));
    assert!(!scans(&burst) && memory.merge.govern.burst.is_some(), "ksmd works");
    let goes_on = Sample { at: Stamp(1_520_000), ..burst };
    assert!(tick(&config, &mut memory, &goes_on).scan.is_none());
    let scan = tick(&gentle, &mut memory, &goes_on).scan;
    assert!(scan.is_some() && memory.merge.govern.burst.is_some(), "for hours, maybe");
}

#[test]
fn a_host_that_lacks_memory_merges_as_a_short_one_and_looks_at_new_vms_sooner() {
    // The share of a core for `ksmd`, and for the scan at each of four times, if one is due then.
    // `took`: how long the first scan took.
    let one = |lacks: u64| {
        let lacks = Bytes::mib(lacks);
        let seen = sample(900, Bytes::gib(50), vec![vm(1, "a")]);
        let run = tick_that_lacks(lacks, ON, &mut Memory::default(), &seen);
        let Some(KsmdOrder::Run { cores, .. }) = run.ksmd else { panic!("{run:?}") };
        let mut memory = Memory::default();
        memory.merge.govern.done = 1;
        let mut scan = |at: u64, took: u64| {
            let mut young = with(vm(2, "b"), |m| m.found = None);
            young.age_ms = Some(12_000);
            let mut s = sample(at, Bytes::gib(50), vec![vm(1, "a"), young]);
            s.host.scan.as_mut().unwrap().at = Stamp(1_000 + took);
            tick_that_lacks(lacks, ON, &mut memory, &s).scan.map(|s| s.cores)
        };
        (cores, [scan(1_000, 0), scan(12_000, 2_000), scan(40_000, 20_000), scan(42_000, 20_000)])
    };
    assert_eq!(one(15), (0.008, [Some(0.008), None, None, None]));
    // Ten seconds after the last, or as long as that took.
    assert_eq!(one(16), (0.4, [Some(0.4), None, None, Some(0.4)]));
}

#[test]
fn the_first_scan_waits_for_agents_that_are_being_met() {
    let with_agent = |link| {
        let new = with(vm(2, "b"), |m| (m.open, m.found) = (Some(false), None));
        let agent = AgentSample { link, advises: true, ..AgentSample::default() };
        let vms = vec![with(vm(1, "a"), |m| m.found = None), with_agent(new, agent)];
        once(ON, vms).scan.map(|s| s.vms.len())
    };
    assert_eq!(with_agent(Link::Unknown), None);
    assert_eq!(with_agent(Link::Up), Some(2));
    assert_eq!(with_agent(Link::Down("gone".into())), Some(1));
}

#[test]
fn the_first_scan_waits_a_minute_for_an_agent_that_is_not_met() {
    let mut memory = Memory::default();
    let mut scanned = |at| {
        let unmet = with_agent(vm(2, "b"), AgentSample::default());
        let vms = vec![with(vm(1, "a"), |m| m.found = None), unmet];
        tick(ON, &mut memory, &sample(at, Bytes::gib(50), vms)).scan.map(|s| s.vms.len())
    };
    assert_eq!([scanned(10_000), scanned(69_000), scanned(70_000)], [None, None, Some(1)]);
    let mut memory = Memory::default();
    tick(ON, &mut memory, &sample(10_000, Bytes::gib(50), vec![]));
    assert_eq!(memory.merge.wanted, None, "there is nothing to scan");
}

#[test]
fn what_is_as_the_last_scan_saw_it_is_only_looked_at() {
    let none = Candidates { pages: 1000, ..Candidates::default() };
    let ordered = |change: &dyn Fn(&mut ScanSample)| {
        let vms = vec![with(vm(1, "a"), |m| m.found = Some(none))];
        let mut s = sample(900_000, Bytes::gib(50), vms);
        let scan = s.host.scan.as_mut().unwrap();
        scan.one_in = 1;
        change(scan);
        let mut memory = Memory::default();
        memory.merge.scan = Some(Stamp(500));
        tick(&format!("{ON}scan = \"10s\"\n"), &mut memory, &s).scan.map(|s| s.spot_check)
    };
    assert_eq!(ordered(&|_| ()), Some(true));
    assert_eq!(ordered(&|s| s.changed = Some(Bytes::mib(7))), Some(true));
    assert_eq!(ordered(&|s| s.changed = Some(Bytes::mib(9))), Some(false));
    // At once: no need to wait for the next turn.
    let soon = |s: &mut ScanSample| (s.at, s.changed) = (Stamp(899_000), Some(Bytes::mib(9)));
    assert_eq!(ordered(&soon), Some(false));
    assert_eq!(ordered(&|s| s.at = Stamp(899_000)), None);
    // A spot check may miss what is small.
    assert_eq!(ordered(&|s| s.spot_checks_since = 7), Some(false));
    assert_eq!(ordered(&|s| s.one_in = 4), Some(false));
}

/// A host that only tells what was seen, and notes what was to be done.
#[derive(Default)]
struct SampledHost {
    samples: VecDeque<Sample>,
    done: Vec<MergePlan>,
    unwritable: bool,
}

impl Host for SampledHost {
    fn now(&self) -> Stamp {
        Stamp(0)
    }
    fn read(&mut self, _owed: &[VmId]) -> Sample {
        self.samples.pop_front().unwrap()
    }
    fn remember(&mut self, _: &Owned) -> Result<(), String> {
        if self.unwritable { Err("disk full".into()) } else { Ok(()) }
    }
    fn wishes(&mut self) -> Vec<MergeWish> {
        // Said before the third tick.
        let said = self.samples.len() == 2;
        said.then(|| MergeWish { vm: Some("a".into()), on: false }).into_iter().collect()
    }
    fn apply(&mut self, _: &[crate::plan::Action]) -> Vec<crate::plan::Outcome> {
        Vec::new()
    }
    fn merge(&mut self, plan: &MergePlan) {
        self.done.push(plan.clone());
    }
    fn wait(&mut self, _: &Next) -> bool {
        false
    }
}

fn ticks(dry_run: bool, unwritable: bool) -> (Vec<Tick>, Vec<MergePlan>) {
    let samples = (0..5).map(|i| {
        let mut s = seen(10_000 + 9000 * i, Bytes::mib(1024 - 100 * i), 262_144, Bytes::gib(50), 0);
        s.host.ksm.as_mut().unwrap().full_scans = 3 * i;
        s
    });
    let mut host = SampledHost { samples: samples.collect(), unwritable, ..SampledHost::default() };
    let mut engine = Engine::new(Config::parse("f", ON).unwrap(), dry_run);
    let ticks = (0..5).map(|_| engine.step(&mut host).0).collect();
    (ticks, host.done)
}

#[test]
fn a_record_of_merging_is_decided_again_to_the_same_end() {
    let (ticks, done) = ticks(false, false);
    assert!(done.len() == 5 && done.iter().any(runs) && done.iter().any(|p| !p.vms.is_empty()));
    let mut engine = Engine::new(Config::parse("f", ON).unwrap(), false);
    for tick in &ticks {
        let text = serde_json::to_string(tick).unwrap();
        let read: Tick = serde_json::from_str(&text).unwrap();
        assert_eq!(engine.replay(&read).0, *tick);
    }
}

#[test]
fn a_dry_run_does_nothing_and_nobody_is_switched_who_is_not_written_down() {
    let (ticks_of, done) = ticks(true, false);
    let plans = || ticks_of.iter().filter_map(|t| t.plan.merge.as_ref());
    assert!(done.is_empty() && plans().any(runs) && plans().any(|p| !p.vms.is_empty()));
    let (_, done) = ticks(false, true);
    assert!(done.len() == 5 && done.iter().all(|p| p.vms.is_empty()));
}

#[test]
fn a_scan_under_way_goes_as_fast_as_the_host_is_short_now() {
    let config = "[merge]\nmode = \"report\"\ncpu = \"150%\"\n";
    let mut memory = Memory::default();
    let mut at = |at, room, busy| {
        let mut s = sample(at, room, vec![vm(1, "a")]);
        s.host.scan.as_mut().unwrap().busy = busy;
        tick(config, &mut memory, &s)
    };
    let scan = at(10_000, Bytes::gib(50), false).scan.unwrap();
    assert_eq!((scan.cores, scan.threads), (0.008, 2), "nobody is short");
    assert_eq!(at(11_000, Bytes::gib(50), true).scan_cores, Some(0.008));
    assert_eq!(at(12_000, Bytes::gib(2), true).scan_cores, Some(1.5));
    assert_eq!(at(13_000, Bytes::gib(50), false).scan_cores, None);
}

#[test]
fn what_the_operator_said_of_a_vm_holds_when_it_is_started_again() {
    let mut memory = Memory::default();
    let mut ticks = |at, vms, wishes: &[MergeWish]| {
        memory.wish(wishes);
        switched(&tick(ON, &mut memory, &sample(at, Bytes::gib(50), vms)))
    };
    let off = MergeWish { vm: Some("b".into()), on: false };
    assert_eq!(ticks(10_000, vec![vm(1, "a"), vm(2, "b")], &[]), []);
    assert_eq!(ticks(11_000, vec![vm(1, "a"), vm(2, "b")], &[off]), [(2, false)]);
    assert_eq!(ticks(50_000, vec![vm(1, "a")], &[]), []);
    assert_eq!(ticks(51_000, vec![vm(1, "a"), vm(3, "b")], &[]), [(3, false)]);
    // What is said of all comes after it.
    let on = MergeWish { vm: None, on: true };
    assert_eq!(ticks(90_000, vec![vm(1, "a")], &[on]), []);
    assert_eq!(ticks(91_000, vec![vm(1, "a"), vm(4, "b")], &[]), []);
}
