//! Ebb's simulator: a host that is not there, for laws, comparison and scale.
//!
//! Fakes the world, never the logic: the loop, the model and the policies are
//! those of the daemon. Everything here is a stand-in and carries no claim about
//! real machines.

pub mod compare;
pub mod contest;
pub mod fault;
pub mod guest;
pub mod host;
pub mod law;
pub mod mood;
pub mod need;
pub mod oracle;
pub mod psi;
pub mod rival;
pub mod room;
pub mod scenario;
pub mod score;
pub mod search;
pub mod trace;
pub mod voice;
pub mod world;
pub mod worlds;

pub use contest::{CONTESTANTS, Contestant};
pub use scenario::{SCENARIOS, Scenario};
pub use score::Score;
pub use world::{Setup, World};
