//! Paging out: sends cold memory of a VM's process to the host's swap.
//!
//! Where a VM has a v2 memory cgroup of its own, the kernel is told to reclaim so
//! much of it (`memory.reclaim`): it knows what is coldest. Elsewhere the process's
//! RAM is walked in pieces with `process_madvise(MADV_PAGEOUT)` through a pidfd
//! (Linux 5.10), each order going on where the one before ended, so that all of a
//! quiet VM comes round before anything comes twice. Nothing is lost either way:
//! what is touched again is read back.
//!
//! Compressing takes time, so a thread of its own does it; what came of it is read
//! from the process's counters before and after, never assumed.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_core::sample::{OffloadSample, ProcessMemory, VmId};
use ebb_core::units::Bytes;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::probe::cgroup::Hierarchy;
use crate::probe::process::{read_stat, read_status};
use crate::root::{ParseError, ProbeError, Root};

/// Orders that may wait: one a VM is enough, and few are given at a time.
const WAITING: usize = 64;
/// Memory advised in one call: the call is not to be interrupted meanwhile.
const PIECE: u64 = 4 << 20;
/// An order takes no longer than this.
const BUDGET: Duration = Duration::from_millis(1500);
/// Mappings smaller than this are QEMU's own, not RAM.
const LEAST_MAPPING: u64 = 16 << 20;
/// Most mappings walked.
const MAPPINGS: usize = 256;

/// A piece of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// One after the last.
    pub end: u64,
}

/// Reads the mappings of a process that can be guest RAM, by address.
pub fn read_ram_mappings(root: &Root, pid: u32) -> Result<Option<Vec<Range>>, ProbeError> {
    root.parse(format!("/proc/{pid}/maps"), parse_ram_mappings)
}

/// Parses them (proc(5)): writable and not executable (translated code is), without
/// a file or in shared memory, and large.
pub fn parse_ram_mappings(text: &str) -> Result<Vec<Range>, ParseError> {
    let mut ranges = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let bad = || ParseError::new(i + 1, line.chars().take(80).collect::<String>());
        let mut fields = line.splitn(6, ' ');
        let (range, perms) = (fields.next().ok_or_else(bad)?, fields.next().ok_or_else(bad)?);
        let path = fields.nth(3).unwrap_or("").trim();
        let (start, end) = range.split_once('-').ok_or_else(bad)?;
        let address = |t| u64::from_str_radix(t, 16).map_err(|_| bad());
        let (start, end) = (address(start)?, address(end)?);
        let shared = ["/memfd:", "/dev/shm/"].iter().any(|p| path.starts_with(p));
        let private = path.is_empty() || path.starts_with("[anon:");
        let ours = match perms {
            "rw-p" => private || shared,
            "rw-s" => shared,
            _ => false,
        };
        if ours && end.saturating_sub(start) >= LEAST_MAPPING && ranges.len() < MAPPINGS {
            ranges.push(Range { start, end });
        }
    }
    Ok(ranges)
}

/// The next piece at or after `cursor`, from the first mapping again after the last.
fn next_piece(ranges: &[Range], cursor: u64) -> Option<Range> {
    let at = ranges.iter().find(|r| r.end > cursor).or(ranges.first())?;
    let start = if (at.start..at.end).contains(&cursor) { cursor } else { at.start };
    Some(Range { start, end: at.end.min(start + PIECE) })
}

/// An order.
#[derive(Clone, Debug)]
struct Job {
    vm: VmId,
    bytes: Bytes,
    /// `memory.reclaim` of its own cgroup, where there is one.
    reclaim: Option<PathBuf>,
}

/// Takes orders and tells what came of them.
#[derive(Debug)]
pub struct Offloader {
    root: Root,
    jobs: Option<SyncSender<Job>>,
    told: Arc<Mutex<BTreeMap<VmId, OffloadSample>>>,
}

impl Offloader {
    /// Nothing runs before the first order.
    pub fn new(root: Root) -> Offloader {
        Offloader { root, jobs: None, told: Arc::default() }
    }

    /// Has so much of a VM paged out, after what was ordered before.
    pub fn order(
        &mut self,
        vm: VmId,
        bytes: Bytes,
        hierarchy: Option<&Hierarchy>,
        cgroup: Option<&str>,
    ) {
        let reclaim = hierarchy.zip(cgroup).and_then(|(h, c)| own_reclaim(&self.root, h, c, vm));
        let jobs = self.jobs.get_or_insert_with(|| {
            let (send, receive) = sync_channel(WAITING);
            let (root, told) = (self.root.clone(), self.told.clone());
            // Without a thread the channel is closed, which the order below tells.
            let _ = std::thread::Builder::new()
                .name("offload".into())
                .spawn(move || work(&root, &receive, &told));
            send
        });
        let sent = jobs.try_send(Job { vm, bytes, reclaim });
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let sample = told.entry(vm).or_default();
        match sent {
            Ok(()) => sample.busy = true,
            Err(e) => sample.error = Some(format!("cannot be ordered: {e}")),
        }
    }

    /// What is known of a VM's orders.
    pub fn sample(&self, vm: VmId) -> Option<OffloadSample> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).get(&vm).cloned()
    }

    /// Forgets VMs that are gone.
    pub fn keep(&mut self, alive: impl Fn(&VmId) -> bool) {
        if self.jobs.is_some() {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            told.retain(|id, _| alive(id));
        }
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

fn work(root: &Root, jobs: &Receiver<Job>, told: &Mutex<BTreeMap<VmId, OffloadSample>>) {
    let mut cursors: BTreeMap<VmId, u64> = BTreeMap::new();
    while let Ok(job) = jobs.recv() {
        let result = carry_out(root, &job, cursors.entry(job.vm).or_default());
        if cursors.len() > 10 * WAITING {
            cursors.clear();
        }
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        // A VM that was forgotten meanwhile stays so.
        let Some(sample) = told.get_mut(&job.vm) else { continue };
        sample.busy = false;
        sample.error = None;
        match result {
            Ok(gone) => sample.paged_out += gone,
            Err(why) => sample.error = Some(why),
        }
    }
}

/// What left DRAM for swap between two looks. Shared memory in swap is in no
/// process's count: there it is what is not resident any more.
fn gone(before: &ProcessMemory, after: &ProcessMemory) -> Bytes {
    (after.swap - before.swap) + (before.shmem - after.shmem)
}

fn carry_out(root: &Root, job: &Job, cursor: &mut u64) -> Result<Bytes, String> {
    let process = Process::open(root, job.vm)?;
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
    let ranges = read_ram_mappings(root, job.vm.pid).map_err(|e| e.to_string())?;
    let ranges = ranges.ok_or("the process has ended")?;
    let all: u64 = ranges.iter().map(|r| r.end - r.start).sum();
    let (started, mut walked) = (Instant::now(), 0);
    let mut after = before;
    while gone(&before, &after) < job.bytes && walked < all && started.elapsed() < BUDGET {
        let Some(piece) = next_piece(&ranges, *cursor) else { break };
        process.page_out(piece)?;
        walked += piece.end - piece.start;
        *cursor = piece.end;
        after = process.memory()?;
    }
    Ok(gone(&before, &after))
}

/// The VM's process, held by a descriptor: its pid cannot become another's.
struct Process<'a> {
    root: &'a Root,
    id: VmId,
    pidfd: OwnedFd,
}

impl Process<'_> {
    fn open(root: &Root, id: VmId) -> Result<Process<'_>, String> {
        let pid = i32::try_from(id.pid).ok().and_then(Pid::from_raw).ok_or("not a pid")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| format!("pidfd: {e}"))?;
        // Looked at after the descriptor is held: this is the one it holds.
        match read_stat(root, id.pid) {
            Ok(Some(stat)) if stat.start == id.start => Ok(Process { root, id, pidfd }),
            _ => Err("the process has ended".into()),
        }
    }

    fn memory(&self) -> Result<ProcessMemory, String> {
        let read = read_status(self.root, self.id.pid).map_err(|e| e.to_string())?;
        read.ok_or_else(|| "the process has ended".into())
    }

    fn page_out(&self, piece: Range) -> Result<(), String> {
        let part = libc::iovec {
            iov_base: piece.start as *mut libc::c_void,
            iov_len: (piece.end - piece.start) as usize,
        };
        // SAFETY: `part` outlives the call; the addresses in it are another
        // process's and are never dereferenced here. MADV_PAGEOUT changes no data.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.pidfd.as_raw_fd(),
                &raw const part,
                1usize,
                libc::MADV_PAGEOUT,
                0u32,
            )
        };
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            _ if done >= 0 => Ok(()),
            // Unmapped meanwhile, or of a kind that is never paged out: the next one.
            Some(libc::ENOMEM | libc::EINVAL) => Ok(()),
            _ => Err(format!("process_madvise: {error}: run Ebb as root, Linux 5.10 or later")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0000000-55d0c0800000 r-xp 00000000 fe:00 77 /usr/bin/qemu-system-x86_64\n\
        55d0d0000000-55d0d8000000 rw-p 00000000 00:00 0 [heap]\n\
        7f0000000000-7f0020000000 rw-p 00000000 00:00 0 \n\
        7f0020000000-7f0020400000 rw-p 00000000 00:00 0 \n\
        7f0030000000-7f0040000000 rwxp 00000000 00:00 0 \n\
        7f0050000000-7f0060000000 ---p 00000000 00:00 0 \n\
        7f0070000000-7f0080000000 rw-s 00000000 00:01 99 /memfd:ram (deleted)\n\
        7f0090000000-7f00a0000000 rw-s 00000000 fe:00 98 /var/lib/disk.img\n";

    #[test]
    fn only_what_can_be_ram_is_walked() {
        let ranges = parse_ram_mappings(MAPS).unwrap();
        assert_eq!(
            ranges,
            [
                Range { start: 0x7f0000000000, end: 0x7f0020000000 },
                Range { start: 0x7f0070000000, end: 0x7f0080000000 },
            ]
        );
        assert_eq!(parse_ram_mappings("nonsense\n").unwrap_err().line, 1);
        assert_eq!(parse_ram_mappings("12-zz rw-p 0 0 0\n").unwrap_err().line, 1);
    }

    #[test]
    fn the_walk_goes_round_in_pieces_and_begins_again() {
        let ranges = [
            Range { start: 0x1000, end: 0x1000 + PIECE + 0x2000 },
            Range { start: 0x9000_0000, end: 0x9000_1000 },
        ];
        let mut cursor = 0;
        let mut seen = Vec::new();
        for _ in 0..4 {
            let piece = next_piece(&ranges, cursor).unwrap();
            seen.push(piece.end - piece.start);
            cursor = piece.end;
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
        let mut offloader = Offloader::new(root);
        let gone = VmId { pid: me, start: start + 1 };
        offloader.order(gone, Bytes::mib(1), None, None);
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
