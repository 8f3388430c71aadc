//! What Ebb does to the machine beside QMP and the agents: one file per act. Each
//! puts back what it changed. `unsafe` where a system call has no safe wrapper.

mod errands;
pub mod governor;
pub mod keeper;
pub mod ksm;
pub mod mergeable;
pub mod merger;
pub mod offload;
mod process;
pub mod torn;
pub mod zeros;
