//! The commands. Each file is one; `main.rs` only dispatches.

pub mod doctor;
pub mod explain;
pub mod hands_off;
pub mod manual;
pub mod merge;
pub mod past;
pub mod plan;
pub mod reclaim;
pub mod record;
pub mod release;
pub mod run;
pub mod status;
