//! Ebb's pure part: facts in, plan out.
//!
//! Nothing here opens a file, reads a clock, starts a thread or talks to a
//! socket; `clippy.toml` beside this crate makes a slip a lint error. The same
//! code therefore runs in the daemon, in the simulator and in replay.

pub mod config;
pub mod histogram;
pub mod mapping;
pub mod model;
pub mod page_hash;
pub mod page_scan;
pub mod plan;
pub mod policy;
pub mod range;
pub mod sample;
pub mod state;
pub mod table;
pub mod task;
pub mod text;
pub mod tick;
pub mod units;
pub mod wire;
