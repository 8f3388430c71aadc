//! What Ebb does to the machine beside QMP and the agents: one file per act. Each
//! puts back what it changed. `unsafe` where a system call has no safe wrapper.

mod background_jobs;
pub mod ksm;
pub mod ksm_worker;
pub mod ksmd_throttle;
pub mod offload;
pub mod partial_thp;
mod process;
pub mod vm_mergeable;
pub mod zeros;
