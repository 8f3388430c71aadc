//! The simulated host: a clock, a pot of memory, and the guests that drink of it.
//!
//! Implements [`Host`]; checks the laws on every order it is given.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_core::config::Config;
use ebb_core::memory::Owned;
use ebb_core::model::Pressure;
use ebb_core::plan::{Action, Outcome, Reason};
use ebb_core::sample::{HostSample, Meminfo, Psi, PsiLine, Sample, VmId, Vmstat};
use ebb_core::tick::{Host, Wake};
use ebb_core::units::{Bytes, PAGE, Stamp};
use serde::Serialize;

use crate::guest::{Guest, Mood};

/// What to simulate.
#[derive(Clone, Debug, Serialize)]
pub struct Scenario {
    /// How many guests.
    pub vms: u32,
    /// RAM of each.
    pub ram: Bytes,
    /// The host's memory.
    pub host: Bytes,
    /// Everything random comes from this.
    pub seed: u64,
    /// One in so many guests is not ideal; 0: all are.
    pub odd_one_in: u32,
}

/// What became of a run so far.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Simulated milliseconds.
    pub ms: u64,
    /// Most and least of the host's memory that was in use.
    pub used_peak: Bytes,
    /// Bytes that went to swap because the host was full.
    pub swapped: Bytes,
    /// Sum over guests of the time in which they wanted memory in vain.
    pub guest_stall_ms: u64,
    /// Guests that ran out.
    pub ooms: u64,
    /// Orders given.
    pub orders: u64,
    /// Direction changes of all guests, a guest and minute.
    pub reversals: f64,
    /// Laws broken, in words; must be empty.
    pub broken: Vec<String>,
}

/// The simulated host.
pub struct World {
    /// The guests.
    pub guests: Vec<Guest>,
    /// What happened.
    pub report: Report,
    until_ms: u64,
    /// Wall time spent in the simulated host itself, so that callers can tell it
    /// from the time of the loop.
    pub outside: Duration,
    /// Writing down fails (fault switch).
    pub cannot_remember: bool,
    /// What was written down last.
    pub remembered: Owned,
    config: Config,
    total: Bytes,
    now_ms: u64,
    /// For the host's sake: who was last made larger (true) or smaller, and when.
    turned: BTreeMap<VmId, (bool, u64)>,
    swap: Bytes,
    swap_out_pages: u64,
    stall: f64,
}

impl World {
    /// A host with its guests, all idle.
    pub fn new(scenario: &Scenario, config: &Config) -> World {
        let mut rng = fastrand::Rng::with_seed(scenario.seed);
        let guests = (0..scenario.vms).map(|i| {
            let odd = scenario.odd_one_in > 0 && rng.u32(0..scenario.odd_one_in) == 0;
            let mood =
                if odd { crate::MOODS[rng.usize(1..crate::MOODS.len())] } else { Mood::Ideal };
            Guest::new(i, scenario.seed, scenario.ram, mood)
        });
        World {
            guests: guests.collect(),
            report: Report::default(),
            until_ms: 0,
            outside: Duration::ZERO,
            cannot_remember: false,
            remembered: Owned::default(),
            config: config.clone(),
            total: scenario.host,
            now_ms: 1_000_000,
            turned: BTreeMap::new(),
            swap: Bytes::ZERO,
            swap_out_pages: 0,
            stall: 0.0,
        }
    }

    /// Has the loop end after so many simulated milliseconds.
    pub fn run_for(&mut self, ms: u64) {
        self.until_ms = self.now_ms + ms;
    }

    fn used(&self) -> Bytes {
        self.guests.iter().map(|g| g.resident).sum()
    }

    /// Lets `ms` pass, in steps of at most 100.
    pub fn pass(&mut self, ms: u64) {
        let end = self.now_ms + ms;
        while self.now_ms < end {
            let dt = (end - self.now_ms).min(100);
            self.now_ms += dt;
            for g in &mut self.guests {
                g.live(self.now_ms, dt);
            }
            self.swap_what_does_not_fit(dt);
        }
        self.report.ms += ms;
    }

    fn swap_what_does_not_fit(&mut self, dt: u64) {
        let used = self.used();
        self.report.used_peak = self.report.used_peak.max(used);
        let over = used - self.total.share(0.97);
        let grown = over - self.swap;
        self.swap = over;
        self.swap_out_pages += grown.0 / PAGE;
        self.report.swapped += grown;
        // Ten seconds' average of “something had to be swapped in this step”.
        let weight = dt as f64 / 10_000.0;
        let now = if grown > Bytes::ZERO { 100.0 } else { 0.0 };
        self.stall = self.stall * (1.0 - weight) + now * weight;
    }

    /// The report, with what the guests tell at the end.
    pub fn finish(mut self) -> Report {
        self.report.guest_stall_ms = self.guests.iter().map(|g| g.stalled_ms).sum();
        self.report.ooms = self.guests.iter().map(|g| g.ooms).sum();
        let reversals: u64 = self.guests.iter().map(|g| g.reversals).sum();
        let minutes = self.report.ms as f64 / 60_000.0 * self.guests.len() as f64;
        self.report.reversals = if minutes > 0.0 { reversals as f64 / minutes } else { 0.0 };
        self.report
    }

    fn sample(&mut self) -> Sample {
        let now = self.now_ms;
        let used = self.used() - self.swap;
        let free = self.total - used;
        for g in &mut self.guests {
            g.speak(now);
        }
        Sample {
            at: Stamp(now),
            wall_ms: now,
            host: HostSample {
                memory: Some(Meminfo {
                    total: self.total,
                    free,
                    available: free,
                    ..Meminfo::default()
                }),
                psi: Some(Psi {
                    some: PsiLine { avg10: self.stall, ..PsiLine::default() },
                    full: PsiLine { avg10: self.stall / 2.0, ..PsiLine::default() },
                }),
                vmstat: Some(Vmstat { swap_out_pages: self.swap_out_pages, ..Vmstat::default() }),
                ..HostSample::default()
            },
            vms: self.guests.iter_mut().map(|g| g.sample(now)).collect(),
            problems: Vec::new(),
        }
    }

    fn carry_out(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.report.orders += actions.len() as u64;
        for a in actions {
            self.check(a);
        }
        actions
            .iter()
            .map(|a| {
                let guest = self.guests.iter_mut().find(|g| g.id == a.vm);
                let error = match guest {
                    Some(g) => {
                        g.target = a.to;
                        None
                    }
                    None => Some("gone".into()),
                };
                Outcome { vm: a.vm, error }
            })
            .collect()
    }

    /// The laws every order must keep.
    fn check(&mut self, action: &Action) {
        let Some(g) = self.guests.iter().find(|g| g.id == action.vm) else {
            self.report.broken.push(format!("order to {:?}, which does not exist", action.vm));
            return;
        };
        let floor = self.config.vm(&g.name).min.of(g.ram);
        let mut broken = Vec::new();
        if action.to < floor && action.to < g.actual {
            broken.push(format!("{} ordered to {}, floor {floor}", g.name, action.to));
        }
        if action.to > g.ram {
            broken.push(format!("{} ordered to {}, RAM {}", g.name, action.to, g.ram));
        }
        if action.to < g.used && g.mood != Mood::Lying && action.to < g.actual {
            // Allowed only within what the guest used since it last spoke.
            let slack = Bytes((2.0 * 400e6) as u64);
            if action.to + slack < g.used {
                broken.push(format!("{} ordered to {}, it uses {}", g.name, action.to, g.used));
            }
        }
        if !g.answers(self.now_ms) {
            broken.push(format!("{} ordered while it does not answer", g.name));
        }
        let owned = self.remembered.vms.iter().any(|o| o.id == g.id);
        if action.to < g.actual && !owned && action.reason != Reason::Withdrawn {
            broken.push(format!("{} shrunk without being written down", g.name));
        }
        self.report.broken.extend(broken);
        self.check_direction(action);
    }

    /// Nobody is turned around within a minute for the host's sake alone.
    fn check_direction(&mut self, action: &Action) {
        let grows = match action.reason {
            Reason::HostClear { .. } => true,
            Reason::HostShort { state: Pressure::Soft, .. } => false,
            _ => return,
        };
        let before = self.turned.insert(action.vm, (grows, self.now_ms));
        if before.is_some_and(|(was, at)| was != grows && self.now_ms - at < 60_000) {
            let name = &action.name;
            self.report.broken.push(format!("{name} turned around within a minute"));
        }
    }
}

impl Host for World {
    fn now(&self) -> Stamp {
        Stamp(self.now_ms)
    }

    fn read(&mut self) -> Sample {
        let started = Instant::now();
        let sample = self.sample();
        self.outside += started.elapsed();
        sample
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        if self.cannot_remember {
            return Err("disk full".into());
        }
        self.remembered = owned.clone();
        Ok(())
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        let started = Instant::now();
        let outcomes = self.carry_out(actions);
        self.outside += started.elapsed();
        outcomes
    }

    fn wait(&mut self, until: Stamp) -> Wake {
        self.pass(until.0.saturating_sub(self.now_ms).max(1));
        if self.now_ms >= self.until_ms { Wake::Stop } else { Wake::Timer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::tick::{Engine, run};
    use proptest::prelude::*;

    fn simulate(scenario: &Scenario, seconds: u64, ebb: bool) -> Report {
        let config = Config::default();
        let mut world = World::new(scenario, &config);
        world.run_for(seconds * 1000);
        let mut engine = Engine::new(config, !ebb);
        run(&mut engine, &mut world, |_, _, _| true);
        world.finish()
    }

    fn tight(seed: u64, odd_one_in: u32) -> Scenario {
        Scenario { vms: 12, ram: Bytes::gib(2), host: Bytes::gib(13), seed, odd_one_in }
    }

    #[test]
    fn ebb_swaps_far_less_than_nothing_does_and_kills_nobody() {
        let (mut with, mut without) = (Bytes::ZERO, Bytes::ZERO);
        for seed in 0..8 {
            let a = simulate(&tight(seed, 0), 600, true);
            let b = simulate(&tight(seed, 0), 600, false);
            assert_eq!(a.broken, Vec::<String>::new());
            assert_eq!(a.ooms, 0, "seed {seed}");
            with += a.swapped;
            without += b.swapped;
        }
        assert!(without > Bytes::gib(1), "the scenario must hurt without Ebb: {without}");
        assert!(with.0 * 4 < without.0, "with {with}, without {without}");
    }

    #[test]
    fn at_steady_state_nobody_is_turned_around_more_than_once_a_minute() {
        for seed in 0..8 {
            let config = Config::default();
            let mut world = World::new(&tight(seed, 0), &config);
            world.guests.iter_mut().for_each(Guest::settle);
            world.run_for(900_000);
            let mut engine = Engine::new(config, false);
            run(&mut engine, &mut world, |_, _, _| true);
            let orders = world.report.orders;
            let most = world.guests.iter().map(|g| g.reversals).max().unwrap_or(0);
            assert!(most <= 15, "seed {seed}: one was turned {most} times in 15 min");
            assert!(orders > 0, "seed {seed}: the host must be short at all");
        }
    }

    #[test]
    fn without_a_written_state_nothing_is_taken() {
        let config = Config::default();
        let mut world = World::new(&tight(3, 0), &config);
        world.cannot_remember = true;
        world.run_for(300_000);
        let mut engine = Engine::new(config, false);
        let mut short = false;
        run(&mut engine, &mut world, |_, tick, model| {
            assert!(tick.plan.actions.iter().all(Action::gives), "{:?}", tick.plan.actions);
            short |= model.host.state > Pressure::Soft;
            true
        });
        assert!(short, "the scenario must come to a point where something would be taken");
    }

    #[test]
    fn the_same_seed_gives_the_same_run_and_a_record_replays() {
        let config = Config::default();
        let mut world = World::new(&tight(5, 3), &config);
        world.run_for(120_000);
        let mut engine = Engine::new(config.clone(), false);
        let mut ticks = Vec::new();
        run(&mut engine, &mut world, |_, tick, _| {
            ticks.push(tick.clone());
            true
        });
        assert!(ticks.iter().any(|t| !t.plan.actions.is_empty()));
        let mut again = Engine::new(config, false);
        for tick in &ticks {
            let (replayed, _) = again.replay(tick);
            assert_eq!(&replayed, tick);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn no_law_is_broken_in_any_company(
            seed in any::<u64>(), odd in 1u32..6, host_gib in 6u64..26
        ) {
            let scenario = Scenario { host: Bytes::gib(host_gib), ..tight(seed, odd) };
            let r = simulate(&scenario, 400, true);
            prop_assert_eq!(r.broken, Vec::<String>::new());
        }
    }
}
