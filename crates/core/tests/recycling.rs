//! The loop closed over guests with agents: what is expected of recycling, and who is asked beside
//! it.

mod common;

use common::{Guest, Toy, id};
use ebb_core::config::Config;
use ebb_core::model::Pressure;
use ebb_core::plan::{Action, Outcome, Plan, Reclaim};
use ebb_core::sample::{AgentSample, Link, Sample, VmId};
use ebb_core::state::Owned;
use ebb_core::task::StageName;
use ebb_core::tick::{Engine, Host, Next, Tick};
use ebb_core::units::{Bytes, Stamp};
use ebb_core::wire::{AgentState, Counters, HugePages};

/// The first guest has a module, whose map shows that so much is free and held.
struct Tier {
    toy: Toy,
    held: Bytes,
    /// No order brings any of it; else one that splits every huge page brings all of it.
    lies: bool,
    recycled: Bytes,
    /// Its agent is at work.
    busy: bool,
    /// It has no balloon.
    bare: bool,
    /// At every second look its map shows nothing; and how often it was looked at.
    flickers: bool,
    looks: usize,
    /// What the operator asks for next.
    requests: Vec<Reclaim>,
}

impl Tier {
    fn new(toy: Toy, held: Bytes, lies: bool) -> Tier {
        let (recycled, requests) = (Bytes::ZERO, Vec::new());
        let (busy, bare, flickers) = (false, false, false);
        Tier { toy, held, lies, recycled, busy, bare, flickers, looks: 0, requests }
    }

    /// All ticks of so many seconds, and the host's state at each.
    fn run(&mut self, engine: &mut Engine, seconds: u64) -> Vec<(Tick, Pressure)> {
        let end = self.toy.now + seconds * 1000;
        let mut ticks = Vec::new();
        while self.toy.now < end {
            let (tick, model) = engine.step(self);
            self.wait(&engine.next(&model));
            ticks.push((tick, model.host.shown.state));
        }
        ticks
    }
}

impl Host for Tier {
    fn now(&self) -> Stamp {
        self.toy.now()
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        let mut sample = self.toy.read(owed);
        self.looks += 1;
        let hidden = self.flickers && self.looks.is_multiple_of(2);
        let shown = if hidden { Bytes::ZERO } else { self.held };
        let vm = &mut sample.vms[0];
        let stats = vm.balloon.as_mut().unwrap().guest.as_mut().unwrap();
        // The rest of what it has available is page cache.
        let available = stats.available.unwrap();
        stats.free = Some(self.held.min(available));
        stats.caches = Some(available - self.held);
        vm.agent = Some(AgentSample {
            link: Link::Up,
            state: AgentState::Ready,
            free: Some(shown),
            held: Some(shown),
            counters: Counters { recycled: self.recycled, ..Counters::default() },
            busy: self.busy,
            ..AgentSample::default()
        });
        vm.balloon.take_if(|_| self.bare);
        sample
    }

    fn requests(&mut self) -> Vec<Reclaim> {
        std::mem::take(&mut self.requests)
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        self.toy.remember(owned)
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.toy.apply(actions)
    }

    fn start(&mut self, plan: &Plan) {
        let mut jobs = plan.recycle.iter().filter_map(|order| order.recycle);
        let splits = jobs.any(|job| job.huge == HugePages::Split && job.split_min_pages == 1);
        if !self.lies && splits {
            self.toy.guests[0].resident = self.toy.guests[0].resident - self.held;
            self.recycled += self.held;
            self.held = Bytes::ZERO;
        }
    }

    fn wait(&mut self, next: &Next) -> bool {
        self.toy.wait(next)
    }
}

fn engine(reserve_gib: u64) -> Engine {
    Engine::new(Config { reserve: Some(Bytes::gib(reserve_gib)), ..Config::default() }, false)
}

/// A guest sets bits of pages that it uses, and clears them when they are looked at again.
#[test]
fn a_map_that_lies_keeps_no_other_guest_from_being_asked() {
    for flickers in [false, true] {
        // All but 256 MiB is used of 20 GiB, and 2 are to be kept.
        let mut toy = Toy::new(20, 3, vec![Guest::new(8, 8), Guest::new(8, 1)]);
        toy.others += Bytes::mib(768);
        let mut host = Tier { flickers, ..Tier::new(toy, Bytes::gib(8), true) };
        let mut engine = engine(2);
        let ticks = host.run(&mut engine, 20);
        assert_eq!(ticks[0].1, Pressure::Critical);
        let end = ticks.last().unwrap();
        assert!(host.toy.guests[1].actual < Bytes::gib(7), "{:?}", host.toy.guests);
        assert!(end.1 <= Pressure::Soft, "{:?}", end.0.plan.stages);
        // What did not come is not expected again and again: it is halved each time.
        let expected = |engine: &Engine| {
            let stage = engine.memory.stages.iter().find(|t| t.name == StageName::Recycle);
            stage.unwrap().expected
        };
        let before = expected(&engine);
        host.run(&mut engine, 60);
        let more = expected(&engine) - before;
        // Orders for whole blocks are not judged: a guest may have freed pieces only.
        assert!(flickers || more < Bytes::gib(1), "{before} were expected, and {more} after that");
    }
}

/// Most of what a guest could spare is page cache. A part is free, in pieces of huge pages that are
/// not split on a host that is only soft.
#[test]
fn a_guest_whose_free_pages_are_left_where_they_are_is_ballooned() {
    let toy = Toy::new(16, 5, vec![Guest::new(8, 1)]);
    let mut host = Tier::new(toy, Bytes::gib(1), false);
    let mut engine = engine(5);
    let ticks = host.run(&mut engine, 30);
    assert_eq!(ticks[0].1, Pressure::Soft);
    assert!(ticks.iter().all(|(_, state)| *state <= Pressure::Soft));
    let asks = |(tick, _): &(Tick, _)| tick.plan.actions.iter().any(|a| a.vm == id(0));
    assert!(ticks.iter().any(asks), "{:?}", ticks.last().unwrap().0.plan.held);
    assert_eq!(host.held, Bytes::gib(1), "it is not needed so much that huge pages are split");
}

/// What recycling brings comes first: no guest is made smaller for it.
#[test]
fn what_recycling_brings_at_once_is_asked_of_nobody() {
    let toy = Toy::new(16, 7, vec![Guest::new(8, 1)]);
    let mut host = Tier::new(toy, Bytes::gib(6), false);
    let mut engine = engine(5);
    let ticks = host.run(&mut engine, 10);
    assert_eq!(ticks[0].1, Pressure::Critical);
    assert_eq!(ticks.last().unwrap().1, Pressure::Clear);
    assert!(ticks.iter().all(|(tick, _)| tick.plan.actions.is_empty()));
    assert_eq!(engine.memory.vm(id(0)).unwrap().returned.recycled, Bytes::gib(6));
}

#[test]
fn what_a_guest_without_a_balloon_has_freed_is_recycled() {
    let toy = Toy::new(16, 7, vec![Guest::new(8, 1)]);
    let mut host = Tier { bare: true, ..Tier::new(toy, Bytes::gib(6), false) };
    let ticks = host.run(&mut engine(5), 10);
    assert_eq!((ticks[0].1, ticks.last().unwrap().1), (Pressure::Critical, Pressure::Clear));
    assert_eq!(host.recycled, Bytes::gib(6));
}

#[test]
fn what_an_operator_asks_for_while_an_agent_is_at_work_comes_when_that_has_done() {
    let toy = Toy::new(32, 2, vec![Guest::new(8, 1), Guest::new(8, 1)]);
    let mut host = Tier::new(toy, Bytes::gib(1), false);
    let mut engine = engine(2);
    host.run(&mut engine, 3);
    let of = |name: &str| Reclaim { vm: Some(name.into()), bytes: Some(Bytes::mib(512)) };
    (host.busy, host.requests) = (true, vec![of("vm0"), of("vm1")]);
    let ticks = host.run(&mut engine, 1);
    assert_eq!(host.recycled, Bytes::ZERO, "one order at a time");
    let orders = &ticks[0].0.plan.actions;
    assert!(orders.iter().any(|a| a.vm == id(1)), "the other does not wait");
    host.busy = false;
    host.run(&mut engine, 1);
    assert_eq!(host.recycled, Bytes::gib(1));
    // The same request again and again is one, and leaves others their turn.
    (host.busy, host.held) = (true, Bytes::gib(1));
    let all = Reclaim { vm: Some("vm0".into()), bytes: None };
    let before = host.recycled;
    host.requests = [vec![all; 100], vec![of("vm0")]].concat();
    let ticks = host.run(&mut engine, 1);
    assert_eq!(ticks[0].0.requests, []);
    host.busy = false;
    let ticks = host.run(&mut engine, 1);
    assert_eq!(ticks[0].0.requests.len(), 2);
    let came = host.recycled - before;
    // One whose agent does not come to an end is not waited for.
    (host.busy, host.held, host.requests) = (true, Bytes::gib(1), vec![of("vm0")]);
    host.run(&mut engine, 6);
    host.busy = false;
    host.run(&mut engine, 2);
    assert_eq!(host.recycled, Bytes::gib(1) + came);
}
