//! Ebb's simulator: a host that is not there, for laws and for scale.
//!
//! Fakes the world, never the logic: the loop, the model and the policies are
//! those of the daemon. Everything here is a stand-in and carries no claim about
//! real machines.

pub mod guest;
pub mod world;

pub use guest::{Guest, MOODS, Mood};
pub use world::{Report, Scenario, World};
