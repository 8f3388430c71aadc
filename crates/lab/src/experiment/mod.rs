//! The experiments: each file is one, each prints a table and writes an
//! [`ExperimentResult`](crate::result::ExperimentResult). `record` reads what Ebb did meanwhile.

pub mod autoballoon;
pub mod cgroup_guest;
mod cycles;
pub mod dedup;
pub mod demo;
pub mod density;
pub mod fragmented;
pub mod handback;
pub mod mark_cost;
pub mod overhead;
pub mod paused;
pub mod record;
pub mod recycle;
pub mod refault;
pub mod rhythm;
pub mod scan;
pub mod stage;
pub mod tick;
pub mod trial;
