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

use ebb_core::sample::ProcessMemory;
use ebb_core::task::{OffloadOrder, OffloadSample};
use ebb_core::units::Bytes;

use super::background_jobs::{At, TaskSample};
use super::process::{Advice, Process, rest, there};
use crate::probe::maps::read_ram_mappings;
use crate::sys::Range;

/// Memory advised in one call: the call is not to be interrupted meanwhile.
const PIECE: u64 = 4 << 20;
/// An order takes no longer than this.
const BUDGET: Duration = Duration::from_millis(1500);

/// Memory in pieces from here on, and then from its beginning.
fn round(ranges: &[Range], cursor: u64) -> impl Iterator<Item = Range> + '_ {
    rest(ranges, cursor, PIECE).chain(rest(ranges, 0, PIECE))
}

impl TaskSample for OffloadSample {
    fn add(&mut self, done: OffloadSample) {
        self.paged_out += done.paged_out;
    }
}

/// `memory.reclaim` of a cgroup that holds this process alone; `None` on v1, before
/// Linux 5.19, and where others live in it.
fn own_reclaim(at: At<'_>) -> Option<PathBuf> {
    let dir = at.cgroup?;
    let file = at.root.path(dir.join("memory.reclaim"));
    let processes = at.root.read(dir.join("cgroup.procs")).ok()??;
    let alone = processes.split_ascii_whitespace().all(|p| p == at.vm.pid.to_string());
    (alone && file.exists()).then_some(file)
}

/// What left DRAM for swap between two looks. Shared memory in swap is in no
/// process's count: there it is what is not resident any more.
fn gone(before: &ProcessMemory, after: &ProcessMemory) -> Bytes {
    (after.swap - before.swap) + (before.shmem - after.shmem)
}

/// Pages a VM out; kept is the address where the last order ended.
pub(super) fn carry_out(
    at: At<'_>,
    order: &OffloadOrder,
    cursor: &mut u64,
) -> Result<OffloadSample, String> {
    let done = |paged_out| Ok(OffloadSample { paged_out, ..OffloadSample::default() });
    let process = Process::open(at.root, at.vm)?;
    let before = process.memory()?;
    if let Some(file) = own_reclaim(at) {
        // EAGAIN: not all of it was found.
        match std::fs::write(&file, order.bytes.0.to_string()) {
            Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => {
                return Err(format!("{}: {e}", file.display()));
            }
            _ => return done(gone(&before, &process.memory()?)),
        }
    }
    let ranges = there(read_ram_mappings(at.root, at.vm.pid))?;
    let all: u64 = ranges.iter().map(|r| r.len).sum();
    let (started, mut walked) = (Instant::now(), 0);
    let mut after = before;
    for piece in round(&ranges, *cursor) {
        if gone(&before, &after) >= order.bytes || walked >= all || started.elapsed() >= BUDGET {
            break;
        }
        process.advise(&[piece], Advice::PageOut)?;
        walked += piece.len;
        *cursor = piece.end();
        after = process.memory()?;
    }
    done(gone(&before, &after))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use ebb_core::sample::VmId;
    use ebb_core::task::{Orders, Tasks};

    use super::*;
    use crate::act::background_jobs::{Background, BackgroundJobs};
    use crate::probe::process::read_stat;
    use crate::root::Root;
    use crate::testing::within_a_minute;

    #[test]
    fn a_walk_that_has_ended_begins_again() {
        let ram = [Range { start: PIECE, len: 2 * PIECE }, Range { start: 9 * PIECE, len: 0x1000 }];
        let starts = |from| round(&ram, from).map(|r| r.start / PIECE).take(5).collect::<Vec<_>>();
        assert_eq!(starts(0), [1, 2, 9, 1, 2]);
        assert_eq!(starts(2 * PIECE), [2, 9, 1, 2, 9]);
        assert_eq!(starts(ram[1].end()), [1, 2, 9]);
        assert_eq!(round(&[], 7).count(), 0);
    }

    #[test]
    fn ram_that_ksm_has_cut_up_is_walked() {
        // Where nothing is mapped: what cannot be advised about is passed over.
        let (first, len) = (0x2000_0000_0000u64, 8 << 20);
        let starts = (0..3).map(|i| first + i * len);
        let maps: String = starts.map(|s| format!("{s:x}-{:x} rw-p 0 0:0 0\n", s + len)).collect();
        let me = std::process::id();
        let theirs = format!("/proc/{me}/maps");
        let told =
            move |path: &Path| (path == Path::new(&theirs)).then(|| Ok(maps.clone().into_bytes()));
        let root = Root::default().with_faults(Arc::new(told));
        let start = read_stat(&root, me).unwrap().unwrap().start;
        let vm = VmId { pid: me, start };
        let at = At { root: &root, vm, cgroup: None };
        let (name, bytes, reason) = ("a".into(), Bytes::gib(1), "a test".into());
        let order = OffloadOrder { vm, name, bytes, reason };
        let mut cursor = 0;
        match carry_out(at, &order, &mut cursor) {
            // Without the right to advise.
            Err(e) => assert!(e.starts_with("process_madvise: "), "{e}"),
            Ok(_) => assert!(cursor > first, "{cursor:x}"),
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error_and_not_another_process() {
        let root = Root::default();
        let me = std::process::id();
        let start = read_stat(&root, me).unwrap().unwrap().start;
        assert!(Process::open(&root, VmId { pid: me, start }).is_ok());
        let other = Process::open(&root, VmId { pid: me, start: start + 1 });
        assert_eq!(other.err().as_deref(), Some("the process has ended"));
        let mut offloader = BackgroundJobs::new(&root, "offload", carry_out);
        let gone = VmId { pid: me, start: start + 1 };
        let (name, bytes, reason) = ("a".into(), Bytes::mib(1), "a test".into());
        let offload = vec![OffloadOrder { vm: gone, name, bytes, reason }];
        offloader.order(&Orders { offload, ..Orders::default() }, &|_| None);
        let told = |offloader: &BackgroundJobs<OffloadOrder, u64>| {
            let mut tasks = Tasks::default();
            offloader.tell(gone, &mut tasks);
            tasks.offload
        };
        // Its thread runs when nobody else wants to: this one must not.
        let said = within_a_minute(|| told(&offloader).filter(|said| !said.busy));
        assert_eq!(said.error.as_deref(), Some("the process has ended"));
        offloader.keep(&|_| false);
        assert_eq!(told(&offloader), None);
    }
}
