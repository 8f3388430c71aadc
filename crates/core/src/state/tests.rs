//! What is remembered, over several ticks: starts, plugged memory, contradictions,
//! harm, speed, clocks, renames.

use super::*;
use crate::config::Config;
use crate::model::{Progress, Standing, VmModel};
use crate::plan::{Action, Reason};
use crate::sample::{
    AgentSample, BalloonSample, GuestStats, HostSample, Link, Meminfo, OffloadSample,
    ProcessMemory, RunState, VmPressure, VmSample,
};

const ID: VmId = VmId { pid: 7, start: 9 };

fn vm(actual: u64, available: u64, resident: u64) -> VmSample {
    let guest = GuestStats { available: Some(Bytes::mib(available)), ..GuestStats::default() };
    VmSample {
        id: ID,
        name: "a".into(),
        ram: Some(Bytes::mib(1024)),
        process: Some(ProcessMemory { anon: Bytes::mib(resident), ..ProcessMemory::default() }),
        link: Link::Up,
        run: Some(RunState::Running),
        balloon: Some(BalloonSample {
            actual: Bytes::mib(actual),
            deflate_on_oom: Some(true),
            guest: Some(guest),
            ..BalloonSample::default()
        }),
        ..VmSample::default()
    }
}

fn sample(at: u64, vms: Vec<VmSample>) -> Sample {
    let gib = |n| Bytes::gib(n);
    let memory = Meminfo { total: gib(16), available: gib(8), ..Meminfo::default() };
    let host = HostSample { memory: Some(memory), ..HostSample::default() };
    Sample { at: Stamp(at), wall_ms: at, host, vms, ..Sample::default() }
}

/// Lives through a tick in which nothing is done.
fn tick(memory: &mut Memory, sample: &Sample) -> Model {
    act(memory, sample, None)
}

/// The same with an order.
fn act(memory: &mut Memory, sample: &Sample, order: Option<(u64, u64, Reason)>) -> Model {
    memory.observe(sample);
    let model = Model::new(&Config::default(), sample, memory);
    let action = order.map(|(from, to, reason)| Action {
        vm: ID,
        name: "a".into(),
        from: Bytes::mib(from),
        to: Bytes::mib(to),
        reason,
    });
    let plan = Plan { actions: action.into_iter().collect(), ..Plan::default() };
    let outcomes: Vec<Outcome> = plan
        .actions
        .iter()
        .map(|a| Outcome { vm: a.vm, error: None, ..Outcome::default() })
        .collect();
    memory.learn(&model, &decided(&plan), &outcomes, true);
    model
}

fn short(state: Pressure) -> Reason {
    Reason::HostShort { state, shortage: Bytes::ZERO, waits: Bytes::ZERO, idle: Bytes::ZERO }
}

fn only(model: &Model) -> &VmModel {
    &model.vms[0]
}

#[test]
fn a_vm_that_starts_has_its_memory_promised_until_it_has_settled() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    let model = tick(&mut memory, &sample(2_000, vec![vm(1024, 600, 300)]));
    assert_eq!((only(&model).promised, model.host.promised), (Bytes::mib(724), Bytes::mib(724)));
    assert!(model.host.why.contains("724 MiB promised"), "{}", model.host.why);
    // It still grows after ten seconds; ten more without growth, and it has settled.
    for (at, resident, promised) in [(12_000, 600, 424), (17_000, 600, 424), (22_000, 605, 0)] {
        let model = tick(&mut memory, &sample(at, vec![vm(1024, 400, resident)]));
        assert_eq!(only(&model).promised, Bytes::mib(promised), "at {at}");
    }
}

#[test]
fn who_was_there_before_the_daemon_has_settled_unless_it_is_young() {
    for (age_ms, promised) in [(None, 0), (Some(3_600_000), 0), (Some(5_000), 724)] {
        let vm = VmSample { age_ms, ..vm(1024, 600, 300) };
        let model = tick(&mut Memory::default(), &sample(1_000, vec![vm]));
        assert_eq!(only(&model).promised, Bytes::mib(promised), "{age_ms:?}");
    }
}

#[test]
fn a_storm_of_starting_vms_makes_a_host_soft_and_not_worse() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![]));
    let big = |pid| VmSample {
        id: VmId { pid, start: 1 },
        ram: Some(Bytes::gib(8)),
        balloon: Some(BalloonSample { actual: Bytes::gib(8), ..BalloonSample::default() }),
        ..vm(0, 0, 100)
    };
    let model = tick(&mut memory, &sample(2_000, (1..6).map(big).collect()));
    assert_eq!(model.host.state, Pressure::Soft, "{}", model.host.why);
    assert!(model.host.shortage > Bytes::mib(500));
    assert_eq!(model.host.headroom, Bytes::gib(8), "nothing has happened yet");
}

#[test]
fn plugged_memory_moves_what_is_owed() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let plugged = VmSample { ram: Some(Bytes::mib(2048)), ..vm(2048, 1600, 900) };
    let model = tick(&mut memory, &sample(2_000, vec![plugged]));
    assert_eq!(only(&model).ceiling, Bytes::mib(2048));
    let model = tick(&mut memory, &sample(3_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024), "and out again");
}

#[test]
fn a_renamed_vm_is_the_same_with_other_settings() {
    let config = Config::parse("f", "[vm.b]\nmin = \"512MiB\"\n").unwrap();
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let renamed = sample(2_000, vec![VmSample { name: "b".into(), ..vm(900, 500, 900) }]);
    memory.observe(&renamed);
    let model = Model::new(&config, &renamed, &memory);
    assert_eq!(only(&model).floor, Bytes::mib(512));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024), "what is owed is remembered");
    assert_eq!(memory.vms[0].name, "b");
}

#[test]
fn who_contradicts_what_is_known_is_not_asked_and_forgiven_later() {
    let mut memory = Memory::default();
    let liar = |at| sample(at, vec![vm(1024, 1024, 900)]);
    let level = |m: &Model| only(m).trust.level;
    assert_eq!(level(&tick(&mut memory, &liar(1_000))), 0.5, "gently");
    let model = tick(&mut memory, &liar(2_000));
    assert_eq!(level(&model), 0.0);
    assert_eq!(only(&model).convergence.state, Progress::Lying);
    let Standing::GiveOnly(why) = &only(&model).standing else { panic!("{model:?}") };
    assert!(why.contains("not believed: it claims 1 GiB available of 1 GiB"), "{why}");
    let honest = |at| sample(at, vec![vm(1024, 700, 900)]);
    assert_eq!(level(&tick(&mut memory, &honest(5_000))), 0.0);
    assert_eq!(level(&tick(&mut memory, &honest(12_000))), 1.0);
}

#[test]
fn who_was_short_soon_after_it_was_asked_is_asked_more_gently_for_a_while() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Soft))),
    );
    let gift = Reason::GuestShort { signs: String::new() };
    act(&mut memory, &sample(4_000, vec![vm(900, 20, 900)]), Some((900, 1024, gift.clone())));
    let model = tick(&mut memory, &sample(5_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).trust.level, 0.5);
    assert_eq!(memory.vms[0].harm, 1, "once for a take");
    let model = tick(&mut memory, &sample(70_000, vec![vm(1024, 600, 900)]));
    assert_eq!(only(&model).trust.level, 1.0);
    // Long after a take it is the guest's own doing.
    act(&mut memory, &sample(90_000, vec![vm(900, 20, 900)]), Some((900, 1024, gift)));
    assert_eq!(memory.vms[0].harm, 0);
}

/// QEMU tells its size at once and the guest's word up to a second late.
#[test]
fn a_balloon_that_grows_is_no_guest_that_needs_memory() {
    let mut memory = Memory::default();
    let word = |at, actual, available, age_ms| {
        let mut v = vm(actual, available, 900);
        v.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = age_ms;
        sample(at, vec![v])
    };
    tick(&mut memory, &word(1000, 512, 400, 0));
    // 112 MiB are needed all the time; the balloon takes 340 within a tick or two.
    let seen =
        [(2000, 300, 400, 900), (2300, 172, 400, 1200), (3000, 172, 250, 0), (3300, 172, 60, 0)];
    for (at, actual, available, age) in seen {
        let model = tick(&mut memory, &word(at, actual, available, age));
        let need = memory.vm(ID).unwrap().rates.map_or(0.0, |r| r.need);
        let grown = model.vms[0].distress.contains("grows");
        assert!(!grown && need < 1.0, "{at}: {need} {}", model.vms[0].distress);
    }
}

/// An operator's order is carried out between two looks; the guest's word is of before.
#[test]
fn a_balloon_that_others_grow_is_no_guest_that_needs_memory() {
    use crate::policy::decide;
    let mut memory = Memory::default();
    let word = |at, actual, available, age_ms| {
        let mut v = vm(actual, available, 900);
        v.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = age_ms;
        sample(at, vec![v])
    };
    tick(&mut memory, &word(1_000, 512, 440, 0));
    // 80 MiB are needed all the time.
    for (at, actual, available, age) in [
        (2_000, 200, 440, 500),
        (2_500, 200, 440, 1_000),
        (3_000, 200, 120, 0),
        (4_000, 200, 120, 0),
    ] {
        let model = tick(&mut memory, &word(at, actual, available, age));
        assert_eq!(only(&model).distress, "", "{at}");
        let plan = decide(&model, &memory, &[], &Default::default()).plan;
        assert_eq!(plan.actions, [], "{at}");
    }
    assert_eq!(only(&tick(&mut memory, &word(5_000, 200, 120, 0))).owed, Bytes::ZERO);
    // Just before the first look.
    let mut memory = Memory::default();
    for (at, available) in [(1_000, 440), (2_000, 120), (3_000, 120)] {
        let model = tick(&mut memory, &word(at, 200, available, 0));
        assert_eq!(only(&model).distress, "", "{at}");
    }
}

/// One whose need grows while its balloon does: seen as it happens, not when the balloon stops.
#[test]
fn a_need_that_grows_behind_a_growing_balloon_is_seen() {
    let mut memory = Memory::default();
    let look = |at, actual, available| {
        let mut v = vm(actual, available, 900);
        v.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = 500;
        sample(at, vec![v])
    };
    // 50 MiB a half second by the balloon, 60 by its programs, said half a second ago.
    let mut need = 0;
    for i in 0..6 {
        let (actual, was) = (1024 - 50 * i, 1024 - 50 * i.max(1) + 50);
        let model = tick(&mut memory, &look(1_000 + 500 * i, actual, was - 100 - 60 * i));
        need = only(&model).guest.unwrap().need.0 >> 20;
    }
    assert!((350..=400).contains(&need), "{need}");
}

/// What is resident beyond its size is not the guest's.
#[test]
fn what_a_vmm_holds_itself_is_learnt_and_not_counted_as_its_guests() {
    let mut memory = Memory::default();
    let held = |m: &Model| only(m).guest_held().unwrap().0 >> 20;
    assert_eq!(held(&tick(&mut memory, &sample(1_000, vec![vm(512, 300, 400)]))), 400);
    // Its pages go a moment after its size.
    assert_eq!(held(&tick(&mut memory, &sample(2_000, vec![vm(200, 50, 400)]))), 400);
    for at in [4_000, 6_000, 8_000] {
        tick(&mut memory, &sample(at, vec![vm(200, 50, 310)]));
    }
    let model = tick(&mut memory, &sample(9_000, vec![vm(512, 300, 400)]));
    assert_eq!((only(&model).own.0 >> 20, held(&model)), (109, 290));
}

#[test]
fn a_quiet_guest_that_begins_to_need_memory_is_as_fast_as_it_is() {
    let mut memory = Memory::default();
    let says = |at, available, age_ms| {
        let mut vm = vm(1024, available, 1024);
        if let Some(g) = vm.balloon.as_mut().and_then(|b| b.guest.as_mut()) {
            g.age_ms = age_ms;
        }
        sample(at, vec![vm])
    };
    for at in [1_000, 2_000, 3_000, 4_000] {
        tick(&mut memory, &says(at, 600, 0));
    }
    // Looked at again, but not said again.
    tick(&mut memory, &says(4_400, 600, 400));
    tick(&mut memory, &says(4_500, 550, 0));
    let rate = |m: &Memory| m.vm(ID).unwrap().rates.unwrap().need / Bytes::mib(1).0 as f64;
    assert_eq!(rate(&memory), 100.0, "50 MiB since it last said 600, half a second ago");
    tick(&mut memory, &says(5_000, 550, 0));
    assert_eq!(rate(&memory), 0.0, "and it has stopped");
}

#[test]
fn convergence_tells_speed_and_time_and_who_does_not_move() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 524, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(2_000, vec![vm(924, 500, 800)]));
    let c = only(&model).convergence;
    assert_eq!((c.state, c.target), (Progress::Shrinking, Some(Bytes::mib(524))));
    assert!(c.rate > 0.0 && c.eta_ms.is_some_and(|ms| ms > 1_000), "{c:?}");
    let mut states = Vec::new();
    for at in [3_000, 4_000, 5_000, 6_000, 7_000, 8_000, 12_500] {
        states
            .push(only(&tick(&mut memory, &sample(at, vec![vm(924, 500, 800)]))).convergence.state);
    }
    assert_eq!(states.last(), Some(&Progress::Stuck), "{states:?}");
    assert!(states.contains(&Progress::Slow), "{states:?}");
    assert_eq!(memory.vms[0].arriving(Stamp(12_500), Bytes::mib(924)), Bytes::ZERO);
    tick(&mut memory, &sample(13_000, vec![vm(524, 100, 400)]));
    assert!(memory.vms[0].order.is_none());
}

#[test]
fn a_tick_that_took_half_a_minute_makes_nobody_stuck() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(31_000, vec![vm(1024, 600, 900)]));
    assert!(!memory.vms[0].stalled(only(&model)), "it was looked at once");
    assert_ne!(only(&model).convergence.state, Progress::Stuck);
}

#[test]
fn a_clock_that_goes_back_forgets_moments_and_keeps_debts() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(900_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    memory.vms[0].stuck_until = Some(Stamp(990_000));
    let paged_out = OffloadSample { paged_out: Bytes::mib(70), ..OffloadSample::default() };
    let paged = VmSample { offload: Some(paged_out), ..vm(900, 500, 800) };
    tick(&mut memory, &sample(901_000, vec![paged.clone()]));
    let model = tick(&mut memory, &sample(5_000, vec![paged]));
    let came = memory.ladder.iter().find(|t| t.name == RungName::Offload).unwrap().came;
    assert_eq!(came, Bytes::mib(70), "a counter that goes on is counted once");
    assert_eq!(only(&model).standing, Standing::Ready);
    assert_eq!(only(&model).ceiling, Bytes::mib(1024));
    let owned = memory.owned(&model, &Plan::default(), &[]);
    assert_eq!(owned.vms[0].whole(Bytes::mib(1024)), Bytes::mib(1024));
    // And one that leaps ahead neither takes nor forgets.
    let model = tick(&mut memory, &sample(9_000_000, vec![vm(900, 500, 800)]));
    assert_eq!(only(&model).ceiling, Bytes::mib(1024));
}

#[test]
fn an_order_that_failed_is_not_remembered_as_given() {
    let mut memory = Memory::default();
    let s = sample(1_000, vec![vm(1024, 600, 900)]);
    memory.observe(&s);
    let model = Model::new(&Config::default(), &s, &memory);
    let action = Action {
        vm: ID,
        name: "a".into(),
        from: Bytes::mib(1024),
        to: Bytes::mib(900),
        reason: short(Pressure::Soft),
    };
    let plan = Plan { actions: vec![action], ..Plan::default() };
    for outcomes in
        [vec![], vec![Outcome { vm: ID, error: Some("gone".into()), ..Outcome::default() }]]
    {
        memory.learn(&model, &decided(&plan), &outcomes, true);
        assert!(memory.vms[0].order.is_none() && memory.vms[0].last_take.is_none());
    }
    memory.learn(
        &model,
        &decided(&plan),
        &[Outcome { vm: ID, error: None, ..Outcome::default() }],
        false,
    );
    assert!(memory.vms[0].order.is_none(), "a dry run has given none");
}

#[test]
fn a_vm_that_vanished_is_forgotten_and_a_new_one_with_its_pid_is_new() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let other = VmSample { id: VmId { start: 10, ..ID }, ..vm(2048, 600, 900) };
    let other = VmSample { ram: Some(Bytes::mib(2048)), ..other };
    let unproven = sample(1_500, vec![other.clone()]);
    let model = tick(&mut memory, &unproven);
    assert_eq!((memory.vms.len(), memory.owed_ids()), (2, vec![ID]), "not seen is not gone");
    assert_eq!(memory.owned(&model, &Plan::default(), &[]).vms[0].name, "a");
    assert!(model.host.warnings[0].contains("a (process 7) is owed memory"), "{model:?}");
    let model = tick(&mut memory, &Sample { ended: vec![ID], ..sample(2_000, vec![other]) });
    assert_eq!(memory.vms.len(), 1);
    assert!(memory.vms[0].order.is_none());
    assert_eq!(only(&model).ceiling, Bytes::mib(2048));
}

#[test]
fn what_a_cgroup_notifies_counts_for_two_seconds_where_there_is_no_psi() {
    let mut memory = Memory::default();
    let at = |ms, medium, critical| {
        let mut s = sample(ms, vec![]);
        s.host.vmpressure = Some(VmPressure { low: 9, medium, critical });
        // Below two reserves, above the marks.
        s.host.memory = Some(Meminfo { available: Bytes::gib(2), ..s.host.memory.unwrap() });
        s
    };
    let state = |memory: &mut Memory, s| tick(memory, &s).host.state;
    assert_eq!(state(&mut memory, at(1_000, 0, 0)), Pressure::Clear, "cache is reclaimed: normal");
    assert_eq!(state(&mut memory, at(2_000, 1, 0)), Pressure::Soft);
    assert_eq!(state(&mut memory, at(3_000, 1, 1)), Pressure::Hard);
    assert_eq!(state(&mut memory, at(4_500, 1, 0)), Pressure::Hard, "still");
    assert_eq!(state(&mut memory, at(6_000, 0, 0)), Pressure::Clear);
}

#[test]
fn urgency_rises_at_once_and_sinks_slowly() {
    use crate::sample::{Psi, PsiLine};
    let mut memory = Memory::default();
    let at = |ms, some| {
        let mut s = sample(ms, vec![]);
        s.host.memory = Some(Meminfo { available: Bytes::gib(2), ..s.host.memory.unwrap() });
        let line = PsiLine { avg10: some, ..PsiLine::default() };
        s.host.psi = Some(Psi { some: line, full: PsiLine::default() });
        s
    };
    let urgency = |memory: &mut Memory, s| tick(memory, &s).host.urgency;
    assert_eq!(urgency(&mut memory, at(1_000, 40.0)), 0.75);
    let sinking = urgency(&mut memory, at(2_000, 0.0));
    assert!((0.6..0.75).contains(&sinking), "{sinking}");
    assert_eq!(urgency(&mut memory, at(120_000, 0.0)), 0.0);
    assert_eq!(urgency(&mut memory, at(121_000, 5.0)), 0.25, "in proportion");
}

#[test]
fn what_is_paged_out_and_read_back_leaves_the_vm_alone() {
    use crate::sample::OffloadSample;
    let mut memory = Memory::default();
    let at = |ms, swap: u64, paged: u64| {
        let process = ProcessMemory {
            anon: Bytes::mib(900 - swap),
            swap: Bytes::mib(swap),
            ..ProcessMemory::default()
        };
        let offload = OffloadSample { paged_out: Bytes::mib(paged), ..OffloadSample::default() };
        let one = VmSample { process: Some(process), offload: Some(offload), ..vm(1024, 124, 0) };
        sample(ms, vec![one])
    };
    for (ms, swap, paged) in [(1_000, 0, 0), (2_000, 100, 100), (3_000, 98, 100)] {
        tick(&mut memory, &at(ms, swap, paged));
    }
    let cold = memory.vms[0].cold;
    assert_eq!((cold.back_until, cold.since), (None, Stamp(1_000)), "some is always read back");
    tick(&mut memory, &at(4_000, 60, 100));
    assert!(memory.vms[0].cold.back_until > Some(Stamp(200_000)));
    let offloaded = memory.ladder.iter().find(|t| t.name == RungName::Offload).unwrap();
    assert_eq!(offloaded.came, Bytes::mib(100));
}

#[test]
fn a_module_tells_of_direct_reclaim_before_the_balloons_statistics_do() {
    let mut memory = Memory::default();
    let mut look = |at: u64, stalls: u64, agent: bool| {
        let facts = crate::wire::abi::Facts {
            time_ns: at * 1_000_000,
            total: 512 << 8,
            free: 50 << 8,
            available: 100 << 8,
            alloc_stall: stalls,
            ..Default::default()
        };
        let state = crate::wire::AgentState::Ready;
        let facts = Some(facts);
        let agent =
            agent.then(|| AgentSample { link: Link::Up, state, facts, ..AgentSample::default() });
        // The balloon's say the same all the time.
        let model = tick(&mut memory, &sample(at, vec![VmSample { agent, ..vm(512, 100, 500) }]));
        only(&model).distress.clone()
    };
    assert_eq!([look(1_000, 7, true), look(1_500, 7, true)], ["", ""]);
    assert_eq!(look(2_000, 9, true), "4 allocation stalls a second, by its module's facts");
    assert_eq!([look(2_500, 30, false), look(3_000, 90, false)], ["", ""], "without the module");
}

/// A plan in which nothing is merged.
fn decided(plan: &Plan) -> crate::policy::Decided {
    crate::policy::Decided { plan: plan.clone(), merging: None }
}

/// The next version may read nothing of it where this one wrote something.
#[test]
fn what_a_hand_over_does_not_tell_the_state_file_does() {
    let owed = OwnedVm { id: ID, others: Some(Bytes::ZERO), ..OwnedVm::default() };
    let owed = OwnedVm { ordered: Some(Bytes::mib(124)), ..owed };
    let owned = Owned { vms: vec![owed], ..Owned::default() };
    let known = VmMemory { id: ID, name: "a".into(), ..VmMemory::default() };
    for vms in [vec![], vec![known]] {
        let memory = Memory { vms, ..Memory::default() };
        let mut engine = crate::tick::Engine::new(Config::default(), false);
        engine.adopt(owned.clone(), Some(memory));
        assert_eq!(engine.memory.owed_ids(), [ID]);
    }
    // What it tells counts more.
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(900, 500, 800)]));
    memory.adopt(&owned);
    assert_eq!(memory.owed_ids(), []);
}

/// What is owed is a process's, not a name's.
#[test]
fn two_vms_of_one_name_are_owed_apart() {
    let mut memory = Memory::default();
    let duplicate = VmId { pid: 8, ..ID };
    let both = |size| {
        sample(1_000, vec![vm(size, 600, 900), VmSample { id: duplicate, ..vm(1024, 600, 900) }])
    };
    act(&mut memory, &both(1024), Some((1024, 900, short(Pressure::Hard))));
    let model = tick(&mut memory, &both(900));
    let owned = memory.owned(&model, &Plan::default(), &[]);
    assert_eq!(owned.vms.iter().map(|v| v.id).collect::<Vec<_>>(), [ID]);
    let left = Sample {
        ended: vec![ID],
        ..sample(2_000, vec![VmSample { id: duplicate, ..vm(1024, 600, 900) }])
    };
    assert_eq!(tick(&mut memory, &left).vms[0].owed, Bytes::ZERO);
}

/// Gifts go out before the disk is written: what is written then tells of them.
#[test]
fn what_was_given_is_written_down_in_the_same_tick() {
    let mut memory = Memory::default();
    act(
        &mut memory,
        &sample(1_000, vec![vm(1024, 600, 900)]),
        Some((1024, 900, short(Pressure::Hard))),
    );
    let model = tick(&mut memory, &sample(2_000, vec![vm(950, 600, 900)]));
    let reason = Reason::GuestShort { signs: String::new() };
    let (from, to) = (Bytes::mib(950), Bytes::mib(1000));
    let plan = Plan {
        actions: vec![Action { vm: ID, name: "a".into(), from, to, reason }],
        ..Plan::default()
    };
    let written = |error: Option<&str>, unanswered| {
        let outcome = Outcome { vm: ID, error: error.map(Into::into), unanswered };
        let vm = memory.owned(&model, &plan, &[outcome]).vms.remove(0);
        (vm.ordered.map(|b| b.0 >> 20), vm.most.map(|b| b.0 >> 20), vm.unsure)
    };
    assert_eq!(written(None, false), (Some(24), Some(124), false));
    assert_eq!(written(Some("late"), true), (Some(24), Some(124), true));
    assert_eq!(written(Some("no"), false), (Some(124), Some(124), false));
}

#[test]
fn who_does_not_follow_is_left_alone_twice_as_long_each_time() {
    let mut memory = Memory::default();
    let mut left = Vec::new();
    for at in [10_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000, 6_000_000] {
        let s = sample(at, vec![vm(1024, 600, 900)]);
        act(&mut memory, &s, Some((1024, 1024, Reason::Withdrawn)));
        left.push(memory.vms[0].stuck_until.unwrap().since(Stamp(at)) / 1000);
    }
    assert_eq!(left, [30, 60, 120, 240, 480, 600, 600]);
}

#[test]
fn who_was_reset_is_left_alone_for_20_s_and_resets_often_from_the_third_time_on() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let mut reset = |at| {
        let events = vec![crate::sample::VmEvent::Reset];
        tick(&mut memory, &sample(at, vec![VmSample { events, ..vm(1024, 600, 900) }]));
        let mut seen = |at| tick(&mut memory, &sample(at, vec![vm(1024, 600, 900)]));
        let Standing::GiveOnly(why) = &only(&seen(at + 1_000)).standing.clone() else { panic!() };
        assert!(why.contains("left alone for 19 s more"), "{why}");
        seen(at + 19_900);
        assert_eq!(only(&seen(at + 20_000)).standing, Standing::Ready);
        memory.vms[0].resets_often(Stamp(at))
    };
    assert_eq!([10_000, 500_000, 900_000].map(&mut reset), [false, false, true]);
    assert!(!reset(1_600_000), "ten minutes later");
}

#[test]
fn a_gift_that_never_came_is_ordered_again() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let take = short(Pressure::Hard);
    act(&mut memory, &sample(2_000, vec![vm(1024, 600, 900)]), Some((1024, 400, take)));
    tick(&mut memory, &sample(3_000, vec![vm(400, 100, 400)]));
    let gift = Reason::GuestShort { signs: String::new() };
    act(&mut memory, &sample(30_000, vec![vm(400, 10, 400)]), Some((400, 656, gift)));
    // QEMU has not got it, or was told something else since: nothing moves.
    let mut ordered = false;
    for s in 31..=90u64 {
        let model = tick(&mut memory, &sample(s * 1_000, vec![vm(400, 10, 400)]));
        let plan = crate::policy::decide(&model, &memory, &[], &Default::default()).plan;
        ordered |= plan.actions.iter().any(|a| a.to > Bytes::mib(400));
    }
    assert!(ordered, "it has 10 MiB available, the host 8 GiB");
}

#[test]
fn a_size_that_an_operator_sets_while_a_guest_boots_is_theirs() {
    let mut memory = Memory::default();
    tick(&mut memory, &sample(1_000, vec![vm(1024, 600, 900)]));
    let events = vec![crate::sample::VmEvent::Reset];
    memory.vms[0].unsure = Bytes::mib(200);
    let mut boots = VmSample { events, ..vm(1024, 600, 900) };
    boots.balloon.iter_mut().for_each(|b| b.guest = None);
    tick(&mut memory, &sample(2_000, vec![boots]));
    assert_eq!(memory.vms[0].unsure, Bytes::ZERO, "that was of the guest before");
    for at in [12_000, 13_000, 14_000, 25_000, 26_000] {
        let model = tick(&mut memory, &sample(at, vec![vm(512, 200, 500)]));
        let plan = crate::policy::decide(&model, &memory, &[], &Default::default()).plan;
        assert_eq!(plan.actions, [], "at {at}");
    }
    assert_eq!(memory.owed_ids(), []);
}

#[test]
fn what_a_vm_holds_that_comes_or_goes_is_not_taken_for_others() {
    let gib = Bytes::gib;
    let used_by = |vms: Vec<VmSample>, at: u64, memory: &mut Memory| {
        let mut sample = sample(at, vms);
        // 6 GiB are used by VMs, or by one that is not seen any more.
        sample.host.memory.as_mut().unwrap().available = gib(10);
        tick(memory, &sample);
    };
    let vm = |resident: Option<Bytes>| {
        let process = resident.map(|anon| ProcessMemory { anon, ..ProcessMemory::default() });
        VmSample { id: ID, name: "a".into(), process, ..VmSample::default() }
    };
    let mut memory = Memory::default();
    used_by(vec![vm(Some(gib(5)))], 1_000, &mut memory);
    used_by(vec![vm(Some(gib(5)))], 2_000, &mut memory);
    assert_eq!(memory.others.highest(), gib(1));
    used_by(vec![vm(None)], 3_000, &mut memory);
    used_by(vec![], 4_000, &mut memory);
    assert_eq!(memory.others.highest(), gib(1), "its end is under way");
}
