//! What a guest tells and what the host sees of it.

use ebb_core::sample::{
    AgentSample, BalloonSample, GuestStats, Link, ProcessMemory, RunState, VmEvent, VmId, VmSample,
};
use ebb_core::units::{Bytes, PAGE};
use ebb_core::wire::{AgentState, Counters};

use crate::guest::Guest;
use crate::mood::Mood;

/// A guest, as seen from outside: its name, its last words, its events.
#[derive(Clone, Debug)]
pub struct Voice {
    /// Identity.
    pub id: VmId,
    /// Name.
    pub name: String,
    said: Option<(u64, GuestStats)>,
    boots: u64,
    migrating: bool,
    connected: bool,
}

impl Voice {
    /// One that nobody has heard yet.
    pub fn new(index: u32, seed: u64) -> Voice {
        Voice {
            id: VmId { pid: 1000 + index, start: seed },
            name: name(index),
            said: None,
            boots: 0,
            migrating: false,
            connected: false,
        }
    }

    /// When it last told its numbers, ms into the run.
    pub fn said_ms(&self) -> Option<u64> {
        self.said.map(|s| s.0)
    }

    /// The guest answers the host's question for its numbers, which are as old as
    /// the question then.
    fn ask(&mut self, g: &Guest, at_ms: u64) {
        let boots = g.spec.mood == Mood::Rebooting && at_ms < g.booted_ms + 8_000;
        if g.spec.mood.speaks(at_ms) && !(boots && g.boots > 0) {
            self.said = Some((at_ms, words(g)));
        }
    }

    /// What the host sees now. `wall_ms` is the same moment as people count it.
    pub fn sample(&mut self, g: &Guest, at_ms: u64, wall_ms: u64) -> VmSample {
        let answers = g.spec.mood.answers(at_ms);
        let mut events = Vec::new();
        if answers {
            if !std::mem::replace(&mut self.connected, true) {
                events.push(VmEvent::Connected);
            }
            if std::mem::replace(&mut self.boots, g.boots) != g.boots {
                events.push(VmEvent::Reset);
                self.said = None;
            }
            let migrates = g.spec.mood.migrates(at_ms);
            if std::mem::replace(&mut self.migrating, migrates) != migrates {
                events.push(VmEvent::Migration);
            }
            self.ask(g, at_ms);
        } else {
            self.connected = false;
        }
        let guest = self.said.map(|(said_ms, stats)| {
            let age_ms = at_ms - said_ms;
            // QEMU tells the moment in whole seconds.
            GuestStats { updated_s: (wall_ms - age_ms) / 1000, age_ms, ..stats }
        });
        let run = if self.migrating { RunState::Migrating } else { RunState::Running };
        VmSample {
            id: self.id,
            name: self.name.clone(),
            ram: Some(g.spec.ram),
            process: Some(ProcessMemory {
                anon: g.resident(),
                swap: g.out,
                ..ProcessMemory::default()
            }),
            link: if answers { Link::Up } else { Link::Slow("no answer for 200 ms".into()) },
            run: answers.then_some(run),
            balloon: answers.then_some(BalloonSample {
                actual: g.actual,
                reporting: Some(g.spec.reporting),
                deflate_on_oom: Some(g.spec.deflate_on_oom),
                guest,
            }),
            agent: g.spec.agent.then(|| agent(g)),
            events,
            ..VmSample::default()
        }
    }
}

/// The name of a guest.
pub fn name(index: u32) -> String {
    format!("vm{index:04}")
}

fn words(g: &Guest) -> GuestStats {
    let free = g.free();
    // As the guest's kernel reckons: all cache but a little, missed or not.
    let honest = free + g.cache().share(0.9);
    let c = &g.counts;
    // QEMU 9.2 and a guest of 6.12 tell more: every third guest is one.
    let new = g.index.is_multiple_of(3);
    GuestStats {
        total: Some(g.actual),
        free: Some(free),
        available: Some(if g.spec.mood == Mood::Lying { g.actual } else { honest }),
        caches: Some(g.cache()),
        swap_in: Some(c.swap_in),
        swap_out: Some(c.swap_out),
        // A fault reads ahead eight pages.
        major_faults: Some(c.refaults / 8),
        minor_faults: Some(c.allocated.0 / PAGE),
        oom_kills: new.then_some(c.kills),
        alloc_stalls: new.then_some(c.alloc_stalls),
        direct_reclaim: new.then_some(c.direct_reclaim),
        ..GuestStats::default()
    }
}

fn agent(g: &Guest) -> AgentSample {
    AgentSample {
        link: Link::Up,
        state: AgentState::Ready,
        free: Some(g.free()),
        held: Some(g.held()),
        allocated: Some(g.counts.allocated),
        counters: Counters { recycled: g.counts.recycled, ..Counters::default() },
        ..AgentSample::default()
    }
}

/// What a guest has without telling a lie, for checks.
pub fn truly_available(g: &Guest) -> Bytes {
    g.free() + g.cache().share(0.9)
}
