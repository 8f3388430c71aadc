//! Several limits on memory at once: cgroups in cgroups, and NUMA nodes.

mod common;

use common::{Guest, Toy};
use ebb_core::config::Config;
use ebb_core::model::{Limit, Model, Pressure};
use ebb_core::sample::LimitSample;
use ebb_core::tick::{Engine, Host, Tick};
use ebb_core::units::Bytes;

const GIB: u64 = 1 << 30;

fn limit(path: &str, limit_gib: f64, others_gib: f64) -> LimitSample {
    let bytes = |gib: f64| Bytes((gib * GIB as f64) as u64);
    LimitSample {
        path: path.into(),
        limit: bytes(limit_gib),
        usage: bytes(others_gib),
        ..LimitSample::default()
    }
}

/// A guest of 4 GiB that uses one.
fn idle(cgroup: &str) -> Guest {
    Guest::new(4, 1).within(cgroup)
}

/// One that may use these nodes only.
fn on(nodes: &[u32]) -> Guest {
    Guest { nodes: nodes.into(), ..Guest::new(4, 1) }
}

fn found<'a>(model: &'a Model, name: &str) -> Option<&'a Limit> {
    model.host.limits.iter().find(|l| l.name == name)
}

fn names(model: &Model) -> Vec<&str> {
    model.host.limits.iter().map(|l| l.name.as_str()).collect()
}

/// Whom a tick gives orders.
fn asked(tick: &Tick) -> Vec<u32> {
    let mut asked: Vec<u32> = tick.plan.actions.iter().map(|a| a.vm.pid).collect();
    asked.sort_unstable();
    asked
}

/// A host of 64 GiB, of which 4 are others', and these limits.
fn host(limits: Vec<LimitSample>, guests: Vec<Guest>) -> Toy {
    Toy { limits, ..Toy::new(64, 4, guests) }
}

/// All ticks of this many seconds, and the last model.
fn run(host: &mut Toy, engine: &mut Engine, seconds: u64) -> (Vec<Tick>, Model) {
    let end = host.now + seconds * 1000;
    let mut ticks = Vec::new();
    loop {
        let (tick, model) = engine.step(host);
        ticks.push(tick);
        if !host.wait(&engine.next(&model)) || host.now >= end {
            return (ticks, model);
        }
    }
}

fn engine() -> Engine {
    Engine::new(Config::default(), false)
}

fn balloons(host: &Toy) -> Vec<f64> {
    host.guests.iter().map(|g| (g.ram - g.actual).0 as f64 / GIB as f64).collect()
}

/// A tenant with 7 GiB for two VMs of 4 GiB that use one each; another with enough; one beside.
fn tenants() -> Toy {
    host(
        vec![limit("/t/a", 7.0, 0.0), limit("/t/b", 20.0, 0.0)],
        ["/t/a/1", "/t/a/2", "/t/b/1", "/t/b/2", "/c"].map(idle).to_vec(),
    )
}

#[test]
fn only_vms_below_the_limit_that_is_short_give() {
    let (mut host, mut engine) = (tenants(), engine());
    let (ticks, model) = run(&mut host, &mut engine, 30);
    let [a1, a2, b1, b2, c] = balloons(&host)[..] else { panic!() };
    assert!(a1 + a2 > 1.5 && (a1 > 0.5 || a2 > 0.5), "1 and a reserve: {a1} {a2}");
    assert_eq!((b1, b2, c), (0.0, 0.0, 0.0));
    let held = host.held(&host.limits[0]);
    assert!(held < Bytes::mib(6500), "{held}");
    let words = |t: &Tick| t.plan.actions.first().map(|a| a.reason.to_string());
    let first = ticks.iter().find_map(words).unwrap();
    assert!(first.starts_with("/t/a critical, short of "), "{first}");
    assert_eq!(names(&model), ["host", "/t/a"]);
    assert_eq!(model.host.limits[0].state, Pressure::Clear);
}

#[test]
fn the_inner_of_two_limits_has_only_its_own_give_and_the_outer_all() {
    let guests = || ["/m/a/1", "/m/a/2", "/m/b/1", "/x"].map(idle).to_vec();
    for (outer, inner, gives) in [
        (40.0, 7.0, [true, true, false, false]),
        (11.0, 30.0, [true, true, true, false]),
        (11.0, 7.0, [true, true, true, false]),
    ] {
        let limits = vec![limit("/m", outer, 0.0), limit("/m/a", inner, 0.0)];
        let mut host = host(limits, guests());
        run(&mut host, &mut engine(), 60);
        let gave = balloons(&host);
        for limit in &host.limits {
            let (held, kept) = (host.held(limit), limit.limit.share(0.92));
            assert!(held <= kept, "{} of {} under {}: {gave:?}", held, limit.limit, limit.path);
        }
        let given: Vec<bool> = gave.iter().map(|g| *g > 0.0).collect();
        let all = gives.iter().zip(&given).all(|(may, gave)| *may || !gave);
        assert!(all && given[0] | given[1], "{outer} {inner}: {gave:?}");
        // What the inner one had its VMs give counts for the outer: nobody gives twice.
        assert!(gave.iter().sum::<f64>() < 3.5, "{gave:?}");
    }
}

#[test]
fn what_an_inner_limit_asks_for_gently_does_not_keep_an_outer_one_from_asking_for_more() {
    let first = |inner: Option<LimitSample>| {
        let limits = inner.into_iter().chain([limit("/m", 4.04, 0.0)]).collect();
        let mut host = host(limits, vec![idle("/m/a/1")]);
        let mut engine = engine();
        for _ in 0..20 {
            let (tick, model) = engine.step(&mut host);
            let state = |name: &str| found(&model, name).map(|l| l.state);
            if let Some(action) = tick.plan.actions.first() {
                return (action.clone(), state("/m/a"), state("/m"));
            }
            host.wait(&engine.next(&model));
        }
        panic!("no order");
    };
    let (alone, _, outer) = first(None);
    let (both, inner, _) = first(Some(limit("/m/a", 4.13, 0.0)));
    assert_eq!((outer, inner), (Some(Pressure::Critical), Some(Pressure::Soft)));
    assert!(both.to.abs_diff(alone.to) < Bytes::mib(2), "{} and {}", both.to, alone.to);
    assert!(both.reason.to_string().starts_with("/m critical"), "{}", both.reason);
}

#[test]
fn a_vm_is_brought_below_its_own_limit_and_keeps_what_it_uses() {
    let guests = vec![Guest::new(4, 2).within("/v/1.scope"), idle("/v/2.scope")];
    let mut host = host(vec![limit("/v/1.scope", 3.0, 0.0)], guests);
    let mut engine = engine();
    let (_, model) = engine.step(&mut host);
    // Although more than the limit is held, which nobody may take any more.
    assert!(model.host.limits[1].shortage > Bytes::mib(500), "{:?}", model.host.limits[1]);
    run(&mut host, &mut engine, 10);
    let [one, two] = &host.guests[..] else { panic!() };
    assert!(one.actual < Bytes::gib(3) && one.actual >= Bytes::gib(2), "{}", one.actual);
    assert_eq!((one.used, two.actual), (Bytes::gib(2), Bytes::gib(4)));
}

#[test]
fn what_was_taken_for_a_limit_comes_back_when_it_vanishes() {
    let (mut host, mut engine) = (tenants(), engine());
    run(&mut host, &mut engine, 30);
    host.limits.clear();
    let (_, model) = run(&mut host, &mut engine, 240);
    assert_eq!(balloons(&host), [0.0; 5]);
    assert_eq!(names(&model), ["host"]);
}

/// Host and tenant have nothing in common but the guests: 40 GiB of the host are free.
#[test]
fn a_guest_is_given_what_its_limit_has_and_the_rest_when_others_below_it_have_freed_it() {
    let poor = Guest { wanted: Bytes::gib(4), ..Guest::new(4, 2).ballooned(2).within("/t/a/1") };
    let slow = Guest { speed: 256 << 20, ..idle("/t/a/2") };
    let mut host = host(vec![limit("/t/a", 6.5, 0.0)], vec![poor, slow, idle("/t/b/1")]);
    let mut engine = engine();
    engine.adopt(host.owed(), None);
    let mut most = Bytes::ZERO;
    let end = host.now + 20_000;
    while host.now < end {
        let (_, model) = engine.step(&mut host);
        host.wait(&engine.next(&model));
        most = most.max(host.held(&host.limits[0]));
    }
    assert!(most <= host.limits[0].limit, "{most}: a group beyond its limit is killed in");
    let [one, two, three] = &host.guests[..] else { panic!() };
    assert!(one.used > Bytes::mib(3800), "{}", one.used);
    assert!(two.actual < Bytes::gib(3) && two.used == Bytes::gib(1));
    assert_eq!(three.actual, Bytes::gib(4));
}

#[test]
fn a_short_host_asks_those_below_a_clear_limit_too() {
    let guest = |cgroup: &str| Guest::new(16, 4).within(cgroup);
    let mut host =
        Toy::new(64, 4, vec![guest("/a/1"), guest("/a/2"), guest("/b/1"), guest("/b/2")]);
    host.limits = vec![limit("/a", 31.0, 0.0)];
    run(&mut host, &mut engine(), 60);
    assert!(balloons(&host).iter().all(|b| *b > 0.0), "{:?}", balloons(&host));
}

#[test]
fn a_vm_bound_to_a_full_node_gives_and_others_do_not() {
    let node = |name: &str, nodes: &[u32], gib| LimitSample {
        nodes: nodes.into(),
        ..limit(name, gib, 1.0)
    };
    let limits = vec![node("node 0", &[0], 8.0), node("nodes 0-1", &[0, 1], 40.0)];
    let mut host = host(limits, vec![on(&[0]), on(&[0]), on(&[0, 1]), on(&[])]);
    let (_, model) = run(&mut host, &mut engine(), 30);
    let [a, b, c, d] = balloons(&host)[..] else { panic!() };
    assert!(a + b > 1.0 && c == 0.0 && d == 0.0, "{a} {b} {c} {d}");
    let below = |i: usize| model.vms[i].is_below(&model.host.limits[1]);
    assert!(below(0) && !below(3));
}

/// Both are full; the guests need little.
#[test]
fn a_node_that_unbound_vms_use_too_is_no_shortage_of_those_bound_to_it() {
    let node = || LimitSample { nodes: [0].into(), ..limit("node 0", 8.0, 7.9) };
    for (other, clear) in [(on(&[]), true), (on(&[0]), false)] {
        let mut host = host(vec![node()], vec![on(&[0]), other]);
        let sample = host.read(&[]);
        let model = Model::new(&Config::default(), &sample, &Default::default());
        let state = found(&model, "node 0").map(|l| l.state);
        assert_eq!(state == Some(Pressure::Clear), clear, "{state:?}");
    }
}

#[test]
fn odd_limits_harm_nobody() {
    for (bytes, usage) in [
        (0, 0),
        (0, u64::MAX >> 1),
        (4096, 12 * GIB),
        (u64::MAX, u64::MAX),
        (9_223_372_036_854_771_712, GIB),
        (LimitSample::NO_LIMIT.0, u64::MAX),
    ] {
        let (limit, usage, swap_left) = (Bytes(bytes), Bytes(usage), Some(Bytes(bytes)));
        let odd = LimitSample { path: "/t/a".into(), limit, usage, ..LimitSample::default() };
        let mut host = tenants();
        host.limits = vec![LimitSample { file: usage, swap_left, ..odd }];
        run(&mut host, &mut engine(), 10);
        let gave = balloons(&host);
        assert_eq!(gave[2..], [0.0; 3], "{bytes} {usage}: {gave:?}");
        assert!(host.guests.iter().all(|g| g.used == Bytes::gib(1)), "{bytes} {usage}");
    }
}

#[test]
fn a_limit_that_holds_all_its_vms_may_take_changes_nothing() {
    let orders = |limits: Vec<LimitSample>| {
        let guest = |used, cgroup: &str| Guest::new(16, used).within(cgroup);
        let mut host = Toy::new(
            64,
            4,
            vec![guest(4, "/a/1"), guest(9, "/a/2"), guest(12, "/b/1"), guest(2, "/b/2")],
        );
        host.limits = limits;
        let (ticks, _) = run(&mut host, &mut engine(), 60);
        ticks.into_iter().map(|t| (t.plan, t.outcomes)).collect::<Vec<_>>()
    };
    let alone = orders(Vec::new());
    assert!(alone.iter().any(|(plan, _)| !plan.actions.is_empty()));
    let roomy = vec![limit("/a", 33.5, 0.0), limit("/b/1", 16.6, 0.0)];
    assert_eq!(orders(roomy), alone);
}

#[test]
fn ticks_under_several_limits_replay_to_the_same_plans() {
    let (mut host, mut first) = (tenants(), engine());
    host.limits.push(limit("/t", 11.0, 0.0));
    let mut again = first.clone();
    let (ticks, _) = run(&mut host, &mut first, 20);
    for tick in ticks {
        let text = serde_json::to_string(&tick).unwrap();
        let (replayed, _) = again.replay(&serde_json::from_str(&text).unwrap());
        assert_eq!(replayed.plan, tick.plan);
    }
}

/// Nearly all of both is resident, but that is their QEMUs' memory in part: 1 GiB may be reached.
#[test]
fn a_limit_that_guests_and_their_qemus_may_fill_counts() {
    let guest = |resident| Guest::small(512, 80, resident).within("/t/a");
    for (resident, limit_gib, limits) in [
        (465, 1.0, vec!["host", "/t/a"]),
        (465, 2.0, vec!["host"]),
        (20, 1.0, vec!["host", "/t/a"]),
    ] {
        let limit = limit("/t/a", limit_gib, 0.0);
        let mut host = host(vec![limit], vec![guest(resident), guest(resident)]);
        let (_, model) = engine().step(&mut host);
        assert_eq!(names(&model), limits, "{resident} {limit_gib}");
    }
}

#[test]
fn swap_limits_of_outer_cgroups_hold_for_the_inner_ones_and_their_vms() {
    let swap = |path: &str, left, gib| LimitSample { swap_left: left, ..limit(path, gib, 0.0) };
    let none =
        LimitSample { limit: LimitSample::NO_LIMIT, ..swap("/t", Some(Bytes::mib(300)), 0.0) };
    let guests = vec![idle("/t/a/1"), idle("/t/b")];
    let mut host = host(vec![none, swap("/t/a", Some(Bytes::mib(900)), 4.0)], guests);
    let mut sample = host.read(&[]);
    let memory = sample.host.memory.as_mut().unwrap();
    (memory.swap_total, memory.swap_free) = (Bytes::gib(4), Bytes::gib(4));
    let model = Model::new(&Config::default(), &sample, &Default::default());
    let left = |name: &str| found(&model, name).map(|l| l.swap_left);
    assert_eq!(left("/t/a"), Some(Bytes::mib(300)));
    assert_eq!(left("/t"), None, "its memory has no limit");
    assert_eq!(left("host"), Some(Bytes::mib(300)), "what all its VMs may use together");
    let vms: Vec<_> = model.vms.iter().map(|vm| vm.swap_left).collect();
    assert_eq!(vms, [Some(Bytes::mib(300)); 2]);
}

/// Two used 15 GiB each a minute ago; now they have freed it and may use 16 together.
#[test]
fn nobody_is_squeezed_for_what_an_inner_limit_does_not_let_others_have() {
    let guest = |used, cgroup: &str| Guest::new(16, used).within(cgroup);
    let guests = vec![guest(15, "/t/a/1"), guest(15, "/t/a/2"), guest(8, "/b/1"), guest(8, "/b/2")];
    let mut host = Toy::new(200, 1, guests);
    let mut engine = engine();
    run(&mut host, &mut engine, 20);
    for g in &mut host.guests[..2] {
        [g.used, g.wanted, g.resident] = [Bytes::gib(4); 3];
    }
    host.limits = vec![limit("/t/a", 16.0, 0.0)];
    host.total = Bytes::gib(52);
    run(&mut host, &mut engine, 20);
    assert_eq!(balloons(&host)[2..], [0.0; 2], "{:?}", balloons(&host));
    assert!(host.held(&host.limits[0]) <= host.limits[0].limit);
}

#[test]
fn what_an_inner_limit_brings_the_outer_one_does_not_ask_others_for() {
    let guests = ["/m/a/1", "/m/a/2", "/m/b/1"].map(idle).to_vec();
    let mut host = host(vec![limit("/m", 12.3, 0.0), limit("/m/a", 7.0, 0.0)], guests);
    let (tick, model) = engine().step(&mut host);
    let short = |l: &&Limit| l.shortage > Bytes::mib(200);
    assert_eq!(model.host.limits.iter().filter(short).count(), 2, "{:?}", model.host.limits);
    assert_eq!(asked(&tick), [1, 2], "{:?}", tick.plan.actions);
}

#[test]
fn a_host_with_a_surplus_gives_back_no_more_than_the_limit_has() {
    let (mut host, mut engine) = (tenants(), engine());
    run(&mut host, &mut engine, 30);
    host.limits[0].limit = Bytes::mib(7800);
    for _ in 0..250 {
        run(&mut host, &mut engine, 1);
        // They touch what they are given.
        host.guests.iter_mut().for_each(|g| g.resident = g.actual);
        let held = host.held(&host.limits[0]);
        assert!(held < Bytes::mib(7000), "{held} of {}", host.limits[0].limit);
    }
}

/// A little of what is missing may be page cache: too little for an order.
#[test]
fn free_memory_is_taken_for_all_that_is_missing() {
    let pool = limit("/p", 576.0 / 1024.0, 0.0);
    let mut host = host(vec![pool], vec![Guest::small(512, 81, 441).within("/p/1")]);
    let config = Config::parse("f", "[host]\nreserve = \"320MiB\"\n").unwrap();
    let (_, model) = run(&mut host, &mut Engine::new(config, false), 30);
    let limit = &model.host.limits[1];
    assert!(limit.shortage < Bytes::mib(8), "{limit:?}");
}

/// Others than VMs use 20 GiB of the host, and nothing of the tenant.
#[test]
fn what_others_used_of_the_host_is_nothing_that_they_used_of_a_limit_that_is_new() {
    let mut host = Toy::new(64, 20, vec![idle("/t/a/1"), idle("/t/a/2")]);
    (host.guests[0].used, host.guests[0].wanted) = (Bytes::mib(3900), Bytes::mib(3900));
    let mut engine = engine();
    run(&mut host, &mut engine, 20);
    (host.guests[0].used, host.guests[0].wanted) = (Bytes::gib(1), Bytes::gib(1));
    run(&mut host, &mut engine, 10);
    host.limits = vec![limit("/t/a", 7.0, 0.0)];
    let (tick, model) = engine.step(&mut host);
    assert_eq!(model.host.shown.name, "/t/a");
    assert_eq!(asked(&tick), [2], "the first needed all of its memory ten seconds ago");
}

/// VMs of any size start in a small slice.
#[test]
fn what_starts_below_a_limit_is_promised_no_more_than_is_left_there() {
    let promised = |inner: f64| {
        let mut host = host(vec![limit("/t", inner, 0.0)], vec![idle("/c")]);
        let mut engine = engine();
        run(&mut host, &mut engine, 20);
        let young = || Guest { resident: Bytes::ZERO, ..Guest::new(40, 0).within("/t/1") };
        host.guests.extend([young(), young()]);
        let (_, model) = run(&mut host, &mut engine, 1);
        (found(&model, "host").unwrap().promised.0 as f64 / GIB as f64).round()
    };
    assert_eq!(promised(4.0), 4.0);
    assert!(promised(100.0) > 70.0);
}
