//! Safety features switched off, one at a time, to see the laws notice.
//!
//! The features live in core and have no switch there: a release must not carry
//! one. So each is switched off from outside, by hiding from the loop what the
//! feature works with, or by making the loop forget what it remembers for it.

use std::collections::BTreeMap;

use ebb_core::config::{Amount, Config};
use ebb_core::plan::{Action, Outcome, Plan};
use ebb_core::sample::{BalloonSample, Link, RunState, Sample, VmEvent, VmId};
use ebb_core::state::{Memory, Owned};
use ebb_core::tick::{Engine, Host, Next};
use ebb_core::units::{Bytes, Stamp};
use ebb_sim::law::{Breach, Laws};
use ebb_sim::{Setup, World};

/// A safety feature that is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Floors: the loop's configuration has none.
    Floors,
    /// Nothing is taken that is not written down: the writing is skipped and
    /// claimed done.
    WriteDown,
    /// Hands off guests that do not answer or are being migrated: that is hidden.
    MustNotBeOrdered,
    /// Old numbers are not believed: they are shown as new.
    OldNumbers,
    /// Orders that move nothing are withdrawn: the loop forgets its orders.
    Withdrawal,
    /// Rebooted guests are left alone: resets and boots are hidden.
    Reboots,
    /// Distress is answered at once: every sign of it is hidden.
    Distress,
    /// No guest is asked right after it was given memory: the loop forgets when it asked and gave.
    Holds,
    /// Grants are bounded by what the host has: it is shown as empty all the time.
    Headroom,
    /// Who was not heard for a while is left alone: the loop forgets that.
    Contact,
    /// Need and a buffer are left: half of what guests use is shown as free.
    Need,
}

/// All of them.
pub const FAULTS: [Fault; 11] = [
    Fault::Floors,
    Fault::WriteDown,
    Fault::MustNotBeOrdered,
    Fault::OldNumbers,
    Fault::Withdrawal,
    Fault::Reboots,
    Fault::Distress,
    Fault::Holds,
    Fault::Headroom,
    Fault::Contact,
    Fault::Need,
];

/// What a run with a fault (or with none) came to.
pub struct Ran {
    pub broken: Vec<Breach>,
    /// The world at the end.
    pub world: World,
}

/// Runs Ebb with a safety feature switched off.
pub fn run(setup: &Setup, fault: Option<Fault>) -> Ran {
    let config = setup.config();
    let mut laws = Laws::new(&config);
    let mut engine = Engine::new(told(config, fault), false);
    let mut host = Faulty { world: World::new(setup), fault, last: BTreeMap::new() };
    loop {
        let (tick, model) = engine.step(&mut host);
        laws.check(&host.world, &tick);
        forget(&mut engine.memory, fault);
        if !host.wait(&engine.next(&model)) {
            return Ran { broken: laws.broken, world: host.world };
        }
    }
}

fn told(mut config: Config, fault: Option<Fault>) -> Config {
    if fault == Some(Fault::Floors) {
        config.defaults.min = Amount::Bytes(Bytes::ZERO);
        config.vms.values_mut().for_each(|v| v.min = Amount::Bytes(Bytes::ZERO));
    }
    config
}

fn forget(memory: &mut Memory, fault: Option<Fault>) {
    for vm in &mut memory.vms {
        match fault {
            Some(Fault::Withdrawal) => vm.order = None,
            // A kernel that boots is silent: the second line of defence is off as well.
            Some(Fault::Contact | Fault::Reboots) => vm.contact = Default::default(),
            Some(Fault::Holds) => {
                (vm.last_take, vm.last_give, vm.given) = (None, None, None);
                vm.recent = Default::default();
                vm.harm = 0;
            }
            _ => {}
        }
    }
}

/// The world, seen through a fault.
struct Faulty {
    world: World,
    fault: Option<Fault>,
    /// What each guest last showed.
    last: BTreeMap<VmId, BalloonSample>,
}

impl Faulty {
    fn distort(&mut self, sample: &mut Sample) {
        let wall_s = sample.wall_ms / 1000;
        if self.fault == Some(Fault::Headroom)
            && let Some(m) = sample.host.memory.as_mut()
            && self.world.at_ms() > 240_000
        {
            (m.free, m.available) = (m.total, m.total);
        }
        for vm in &mut sample.vms {
            match self.fault {
                Some(Fault::MustNotBeOrdered) => {
                    self.last.extend(vm.balloon.clone().map(|b| (vm.id, b)));
                    vm.balloon = self.last.get(&vm.id).cloned();
                    vm.link = Link::Up;
                    vm.run = Some(RunState::Running);
                }
                Some(Fault::Reboots) => vm.events.retain(|e| *e != VmEvent::Reset),
                _ => {}
            }
            let Some(balloon) = vm.balloon.as_mut() else { continue };
            let actual = balloon.actual;
            let Some(g) = balloon.guest.as_mut() else { continue };
            match self.fault {
                Some(Fault::OldNumbers | Fault::MustNotBeOrdered) => {
                    (g.age_ms, g.updated_s) = (0, wall_s);
                }
                Some(Fault::Reboots) => (g.major_faults, g.minor_faults) = (None, None),
                Some(Fault::Distress) => {
                    let half = Some(actual.share(0.5));
                    (g.available, g.free) = (half, half);
                    (g.major_faults, g.swap_in, g.alloc_stalls) = (None, None, None);
                    (g.oom_kills, g.direct_reclaim) = (None, None);
                    balloon.deflate_on_oom = Some(true);
                }
                Some(Fault::Need) => {
                    let more = |b: Option<Bytes>| b.map(|b| b + (actual - b).share(0.5));
                    (g.available, g.free) = (more(g.available), more(g.free));
                }
                _ => {}
            }
        }
    }
}

impl Host for Faulty {
    fn now(&self) -> Stamp {
        self.world.now()
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        let mut sample = self.world.read(owed);
        self.distort(&mut sample);
        sample
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        if self.fault == Some(Fault::WriteDown) { Ok(()) } else { self.world.remember(owned) }
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.world.apply(actions)
    }

    fn start(&mut self, plan: &Plan) {
        self.world.start(plan);
    }

    fn wait(&mut self, next: &Next) -> bool {
        self.world.wait(next)
    }
}
