//! Ebb's simulator: a synthetic host, for laws, comparison and scale.
//!
//! Fakes the world, never the logic: the loop, the model and the policies are
//! those of the daemon. Everything here is a stand-in and carries no claim about
//! real machines.

pub mod baselines;
pub mod compare;
pub mod controllers;
pub mod demand;
pub mod guest;
pub mod guest_stats;
pub mod host;
mod ksm;
pub mod law;
pub mod misbehaviour;
pub mod oracle;
pub mod psi;
pub mod scenario;
pub mod score;
pub mod search;
pub mod step_budget;
pub mod trace;
pub mod world;
pub mod worlds;

use ebb_core::model::Model;
use ebb_core::tick::{Engine, Host, Tick};

pub use controllers::{CONTROLLERS, Controller};
pub use scenario::{SCENARIOS, Scenario};
pub use score::Score;
pub use world::{Setup, World};

/// Runs until the host says stop or the observer does. Returns the last model.
pub fn run(
    engine: &mut Engine,
    host: &mut impl Host,
    mut observe: impl FnMut(&Engine, &Tick, &Model) -> bool,
) -> Model {
    loop {
        let (tick, model) = engine.step(host);
        let go_on = observe(engine, &tick, &model);
        if !go_on || !host.wait(&engine.next(&model)) {
            return model;
        }
    }
}
