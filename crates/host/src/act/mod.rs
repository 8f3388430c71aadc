//! What Ebb does to the machine beside QMP and the agents: one file per act. Each
//! puts back what it changed. `unsafe` where a system call has no safe wrapper.

mod background_jobs;
pub mod ksm;
pub mod ksm_worker;
pub mod ksmd_throttle;
mod offload;
mod partial_thp;
mod process;
pub mod vm_mergeable;
pub mod zeros;

pub(crate) use self::background_jobs::Background;
use self::background_jobs::BackgroundJobs;
use crate::root::Root;

/// What works beside the loop on order, each in a thread of this name.
pub(crate) fn background(root: &Root) -> Vec<Box<dyn Background>> {
    vec![
        Box::new(BackgroundJobs::new(root, "offload", offload::carry_out)),
        Box::new(BackgroundJobs::new(root, "partial_thp", partial_thp::carry_out)),
        Box::new(BackgroundJobs::new(root, "zeros", zeros::carry_out)),
    ]
}
