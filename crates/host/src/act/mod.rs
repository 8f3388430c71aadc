//! What Ebb does to the machine beside QMP and the agents: one file for each act, and what they
//! share. KSM's settings are put back; what was paged out, freed or split is not. `unsafe` where a
//! system call has no safe wrapper.

mod background_jobs;
pub mod ksm;
pub mod ksm_worker;
pub mod ksmd_throttle;
mod offload;
mod partial_thp;
mod process;
pub mod vm_mergeable;
pub mod zeros;

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

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

/// Starts a thread of this name that takes jobs from a channel, of which `waiting` may wait. Where
/// the thread cannot be started the channel is closed, and sending a job fails.
fn worker<J: Send + 'static>(
    name: &str,
    waiting: usize,
    run: impl FnOnce(Receiver<J>) + Send + 'static,
) -> SyncSender<J> {
    let (send, receive) = sync_channel(waiting);
    let _ = std::thread::Builder::new().name(name.into()).spawn(move || run(receive));
    send
}
