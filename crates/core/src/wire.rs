//! The protocol of the daemon and the agent inside a VMM: one JSON object per line.
//!
//! The agent listens, one daemon at a time connects, asks, and gets one answer
//! per request, in order. Lines are bounded both ways. An agent does nothing
//! before it is asked. When the daemon goes it lifts whatever protection it holds and forgets
//! the VM, except which ranges are open to KSM.
//!
//! ```text
//! → {"id":1,"command":"attach","segments":[{"gpa":0,"size":1073741824,"hva":140..}]}
//! ← {"id":1,"ok":{"answer":"done"}}
//! → {"id":2,"command":"recycle","budget_ms":100}
//! ← {"id":2,"ok":{"answer":"recycled","bytes":268435456,…}}
//! ← {"id":3,"error":{"kind":"not_ready","text":"…"}}
//! ```
//!
//! An agent may be older or newer than its daemon: a field that comes later has a default.
//!
//! [`abi`] holds the other input that is not trusted: what the guest shows.

pub mod abi;
pub mod firmware;
pub mod hashes;
mod lines;
mod reply;
mod request;

pub use self::{lines::*, reply::*, request::*};

/// Version of this protocol; the agent says which it speaks.
pub const PROTOCOL: u32 = 2;
/// Longest line either way, bytes; 64 segments with 20-digit numbers take 6 KiB.
pub const LINE_MAX: usize = 16 << 10;
/// Most pieces of RAM: a VM has one or two, and one for each DIMM.
pub const SEGMENTS_MAX: usize = 64;
/// Most ranges in one [`Advise`]: a line holds no more of ten digits each.
pub const SPANS_MAX: usize = 640;
/// Most reasons to stand aside in one request, and characters of each.
pub const OBJECTIONS_MAX: usize = 16;
/// The objection to VMs whose QEMU discards pages at the guest's request too (free
/// page reporting, virtio-mem, a balloon that moves): in anonymous memory that
/// takes our protection with it in the middle of a window, and the guest may
/// write before we discard. An agent with shared RAM only takes no notice, nor
/// does one that was preloaded: it has QEMU's discards wait for its windows.
pub const OTHERS_DISCARD: &str = "QEMU discards pages of this VM as well (free page reporting or \
    virtio-mem), which is not safe together in anonymous memory: switch that off, back the RAM \
    with a shared memfd, or load the agent by LD_PRELOAD instead of -plugin";
/// Pages of a block of 2 MiB.
pub const BLOCK_PAGES: u32 = 512;
/// Longest text that is passed on from the other side, characters.
pub const TEXT_MAX: usize = 300;
/// Longest `budget_ms` taken, so that a daemon's slip does not bind the agent.
pub const BUDGET_MS_MAX: u64 = 10_000;

#[cfg(test)]
mod tests;
