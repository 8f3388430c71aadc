//! Paging out: sends cold memory of a VM's process to the host's swap.
//!
//! Where a VM has a v2 memory cgroup of its own, the kernel is told how much
//! of it to reclaim (`memory.reclaim`): it knows what is coldest. Elsewhere the process's
//! RAM is walked in pieces with `process_madvise(MADV_PAGEOUT)` through a pidfd
//! (Linux 5.10), each order going on where the one before ended, so that all of a
//! quiet VM comes round before anything comes twice. Nothing is lost either way:
//! what is touched again is read back.
//!
//! Compressing takes time, so a thread of its own does it; the result is read
//! from the process's counters before and after, never assumed.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_core::sample::{OffloadSample, ProcessMemory, VmId};
use ebb_core::units::Bytes;

use super::background_jobs::{BackgroundJobs, Told};
use super::process::{Advice, Process};
use crate::probe::cgroup::Hierarchy;
use crate::probe::maps::read_ram_mappings;
use crate::root::Root;
use crate::sys::Range;

/// Memory advised in one call: the call is not to be interrupted meanwhile.
const PIECE: u64 = 4 << 20;
/// An order takes no longer than this.
const BUDGET: Duration = Duration::from_millis(1500);

/// The next piece at or after `cursor`, from the first mapping again after the last.
fn next_piece(ranges: &[Range], cursor: u64) -> Option<Range> {
    let at = ranges.iter().find(|r| r.end() > cursor).or(ranges.first())?;
    let start = if (at.start..at.end()).contains(&cursor) { cursor } else { at.start };
    Some(Range { start, len: PIECE.min(at.end() - start) })
}

#[derive(Clone, Debug)]
pub(crate) struct Job {
    bytes: Bytes,
    /// `memory.reclaim` of its own cgroup, where there is one.
    reclaim: Option<PathBuf>,
}

impl Told for OffloadSample {
    type Done = Bytes;

    fn busy(&mut self) {
        self.busy = true;
    }

    fn over(&mut self, done: Result<Bytes, String>) {
        self.busy = false;
        self.paged_out += done.as_ref().copied().unwrap_or_default();
        self.error = done.err();
    }
}

/// Pages VMs out; kept is the address where the last order ended.
pub(crate) type Offloader = BackgroundJobs<Job, OffloadSample, u64>;

pub(crate) fn offloader(root: Root) -> Offloader {
    BackgroundJobs::new(root, "offload", carry_out)
}

impl Job {
    pub fn new(
        root: &Root,
        (vm, bytes): (VmId, Bytes),
        hierarchy: Option<&Hierarchy>,
        cgroup: Option<&str>,
    ) -> Job {
        let reclaim = hierarchy.zip(cgroup).and_then(|(h, c)| own_reclaim(root, h, c, vm));
        Job { bytes, reclaim }
    }
}

/// `memory.reclaim` of a cgroup that holds this process alone; `None` on v1, before
/// Linux 5.19, and where others live in it.
fn own_reclaim(root: &Root, h: &Hierarchy, cgroup: &str, vm: VmId) -> Option<PathBuf> {
    let dir = h.directory(cgroup)?;
    let file = root.path(dir.join("memory.reclaim"));
    let processes = root.read(dir.join("cgroup.procs")).ok()??;
    let alone = processes.split_ascii_whitespace().all(|p| p == vm.pid.to_string());
    (alone && file.exists()).then_some(file)
}

/// What left DRAM for swap between two looks. Shared memory in swap is in no
/// process's count: there it is what is not resident any more.
fn gone(before: &ProcessMemory, after: &ProcessMemory) -> Bytes {
    (after.swap - before.swap) + (before.shmem - after.shmem)
}

fn carry_out(root: &Root, vm: VmId, job: &Job, cursor: &mut u64) -> Result<Bytes, String> {
    let process = Process::open(root, vm)?;
    let before = process.memory()?;
    if let Some(file) = &job.reclaim {
        // EAGAIN: not all of it was found.
        match std::fs::write(file, job.bytes.0.to_string()) {
            Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => {
                return Err(format!("{}: {e}", file.display()));
            }
            _ => return Ok(gone(&before, &process.memory()?)),
        }
    }
    let ranges = read_ram_mappings(root, vm.pid).map_err(|e| e.to_string())?;
    let ranges = ranges.ok_or("the process has ended")?;
    let all: u64 = ranges.iter().map(|r| r.len).sum();
    let (started, mut walked) = (Instant::now(), 0);
    let mut after = before;
    while gone(&before, &after) < job.bytes && walked < all && started.elapsed() < BUDGET {
        let Some(piece) = next_piece(&ranges, *cursor) else { break };
        process.advise(&[piece], Advice::PageOut)?;
        walked += piece.len;
        *cursor = piece.end();
        after = process.memory()?;
    }
    Ok(gone(&before, &after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::process::read_stat;

    #[test]
    fn the_walk_goes_round_in_pieces_and_begins_again() {
        let ranges = [
            Range { start: 0x1000, len: PIECE + 0x2000 },
            Range { start: 0x9000_0000, len: 0x1000 },
        ];
        let mut cursor = 0;
        let mut seen = Vec::new();
        for _ in 0..4 {
            let piece = next_piece(&ranges, cursor).unwrap();
            seen.push(piece.len);
            cursor = piece.end();
        }
        assert_eq!(seen, [PIECE, 0x2000, 0x1000, PIECE]);
        assert_eq!(next_piece(&[], 7), None);
    }

    #[test]
    fn a_process_that_is_gone_is_an_error_and_not_another_process() {
        let root = Root::default();
        let me = std::process::id();
        let start = read_stat(&root, me).unwrap().unwrap().start;
        assert!(Process::open(&root, VmId { pid: me, start }).is_ok());
        let other = Process::open(&root, VmId { pid: me, start: start + 1 });
        assert_eq!(other.err().as_deref(), Some("the process has ended"));
        let mut offloader = offloader(root.clone());
        let gone = VmId { pid: me, start: start + 1 };
        offloader.order(gone, Job::new(&root, (gone, Bytes::mib(1)), None, None));
        // Its thread runs when nobody else wants to: this one must not.
        let until = Instant::now() + Duration::from_secs(60);
        let said = loop {
            let sample = offloader.sample(gone).unwrap();
            if !sample.busy || Instant::now() > until {
                break sample;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(said.error.as_deref(), Some("the process has ended"));
        offloader.keep(|_| false);
        assert_eq!(offloader.sample(gone), None);
    }
}
