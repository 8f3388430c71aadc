//! What Ebb does to the machine beside QMP and the agents: one file per act. This
//! is where `unsafe` may be needed for system calls without a safe wrapper.

pub mod offload;
