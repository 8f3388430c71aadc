//! The commands. Each file is one; `main.rs` only dispatches.

pub mod completions;
pub mod doctor;
pub mod explain;
pub mod explain_at;
pub mod hands_off;
pub mod manual;
pub mod merge;
pub mod plan;
pub mod reclaim;
pub mod record;
pub mod release;
pub mod run;
pub mod status;
