//! Who is compared: Ebb, as the daemon runs it, and its rivals, on the same world.

use std::time::{Duration, Instant};

use ebb_core::tick::{Engine, Host};
use serde::Serialize;

use crate::baselines::{
    Observation, Policy, hypeman, mom, proxmox, qmemman, simple, squeezed, vmpressure,
};
use crate::guest_stats::ASKED_EVERY_MS;
use crate::law::{Breach, Laws};
use crate::score::Score;
use crate::world::{Setup, World};

/// One of those compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Controller {
    /// The daemon's loop.
    Ebb,
    /// No controller.
    None,
    /// oVirt's memory overcommitment manager.
    Mom,
    /// Proxmox VE.
    Proxmox,
    /// XenServer's squeezed.
    Squeezed,
    /// Qubes OS's qmemman.
    Qmemman,
    /// Automatic ballooning by vmpressure, 2013 (`baselines/vmpressure.rs`).
    AutoBalloon,
    /// qmemman with guests that push each change to it within a tenth of a second.
    QmemmanPushed,
    /// Every guest has its part for good.
    StaticSplit,
    /// What is used and a fifth more.
    Demand,
    /// ChromeOS's balloon policy.
    BalanceAvailable,
    /// hypeman's active ballooning.
    Hypeman,
}

/// Those of the tables in docs/comparison.md, Ebb first.
pub const CONTROLLERS: [Controller; 7] = [
    Controller::Ebb,
    Controller::None,
    Controller::Mom,
    Controller::Proxmox,
    Controller::Squeezed,
    Controller::Qmemman,
    Controller::AutoBalloon,
];

/// Rivals that see what KVM and QEMU show.
pub const RIVALS: [Controller; 10] = [
    Controller::None,
    Controller::Mom,
    Controller::Proxmox,
    Controller::Squeezed,
    Controller::Qmemman,
    Controller::AutoBalloon,
    Controller::StaticSplit,
    Controller::Demand,
    Controller::BalanceAvailable,
    Controller::Hypeman,
];

/// The result of one run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RunResult {
    /// The figures.
    pub score: Score,
    /// Laws that Ebb broke; rivals are not judged.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<Breach>,
}

impl Controller {
    /// As tables name it.
    pub fn name(self) -> &'static str {
        self.table().0
    }

    /// Its name, and its policy; the daemon's loop is none.
    fn table(self) -> (&'static str, Option<Box<dyn Policy>>) {
        let (name, policy): (_, Box<dyn Policy>) = match self {
            Controller::Ebb => return ("Ebb", None),
            Controller::None => ("none", Box::new(simple::NoController)),
            Controller::Mom => ("MOM", Box::new(mom::Mom::default())),
            Controller::Proxmox => ("Proxmox", Box::new(proxmox::Proxmox)),
            Controller::Squeezed => ("squeezed", Box::new(squeezed::Squeezed::default())),
            Controller::Qmemman => ("qmemman", Box::new(qmemman::Qmemman::default())),
            Controller::AutoBalloon => ("vmpressure", Box::new(vmpressure::AutoBalloon)),
            Controller::QmemmanPushed => ("qmemman, pushed", Box::new(qmemman::Qmemman::pushed())),
            Controller::StaticSplit => ("static split", Box::new(simple::StaticSplit)),
            Controller::Demand => ("demand + 20 %", Box::new(simple::Demand)),
            Controller::BalanceAvailable => {
                ("balance available", Box::new(simple::BalanceAvailable))
            }
            Controller::Hypeman => ("hypeman", Box::new(hypeman::Hypeman::default())),
        };
        (name, Some(policy))
    }

    /// Runs it on a world of its own.
    pub fn run(self, setup: &Setup) -> RunResult {
        self.run_seen(setup, &mut |_| ())
    }

    /// The same, and shows the world at each of its looks.
    pub fn run_seen(self, setup: &Setup, see: &mut dyn FnMut(&World)) -> RunResult {
        match self.table().1 {
            Some(mut policy) => {
                RunResult { score: rule(setup, &mut *policy, see), broken: Vec::new() }
            }
            None => ebb(setup, |world, _| see(world)),
        }
    }
}

fn rule(setup: &Setup, policy: &mut dyn Policy, see: &mut dyn FnMut(&World)) -> Score {
    let config = setup.config();
    let mut world = World::new(setup);
    world.asked_every_ms = policy.told_every_ms();
    if world.asked_every_ms < ASKED_EVERY_MS {
        world.guests_push();
    }
    world.guests.iter_mut().for_each(|g| g.shrinker = policy.shrinker());
    while !world.over() {
        let sample = world.look();
        let vmpressure = world.host.vmpressure();
        for (id, to) in policy.decide(&Observation { sample: &sample, config: &config, vmpressure })
        {
            // One that does not answer is asked again at the next look.
            let _ = world.order(id, to);
        }
        see(&world);
        world.pass(policy.period_ms());
    }
    world.score()
}

/// Runs the daemon's loop, and shows after each tick the world and what the tick cost (observe,
/// model, decide, learn; sampling is the simulator's).
pub fn ebb(setup: &Setup, mut see: impl FnMut(&World, Duration)) -> RunResult {
    let config = setup.config();
    let mut world = World::new(setup);
    let mut laws = Laws::new(&config);
    let mut engine = Engine::new(config, false);
    loop {
        let (outside, started) = (world.outside, Instant::now());
        let (tick, model) = engine.step(&mut world);
        let cost = started.elapsed().saturating_sub(world.outside - outside);
        laws.check(&world, &tick);
        see(&world, cost);
        if !world.wait(&engine.next(&model)) {
            return RunResult { score: world.score(), broken: laws.broken };
        }
    }
}
