//! A VM's process, held by a descriptor: what it holds, and advice about its memory.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use ebb_core::sample::{ProcessMemory, VmId};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::probe::process::{read_stat, read_status};
use crate::root::{Probed, Root};
use crate::sys::{Range, VECTOR_MAX, check, vectors};

/// What the kernel is told about memory. None of it changes data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    /// Not used soon. Of a huge page that is named in part, it splits the whole.
    Cold = libc::MADV_COLD as isize,
    /// Not used soon: to swap with it.
    PageOut = libc::MADV_PAGEOUT as isize,
}

/// What was read of a process; an error for people, also where it has ended.
pub(super) fn there<T>(read: Probed<T>) -> Result<T, String> {
    read.map_err(|e| e.to_string())?.ok_or_else(|| "the process has ended".into())
}

/// The rest of memory from here on, cut at multiples of a size.
pub(super) fn rest(ram: &[Range], from: u64, size: u64) -> impl Iterator<Item = Range> + '_ {
    ram.iter().filter(move |r| r.end() > from).flat_map(move |r| {
        let start = r.start.max(from);
        Range { start, len: r.end() - start }.pieces(size)
    })
}

/// The process: its pid cannot become another's meanwhile.
pub(super) struct Process<'a> {
    root: &'a Root,
    id: VmId,
    pidfd: OwnedFd,
}

impl Process<'_> {
    pub fn open(root: &Root, id: VmId) -> Result<Process<'_>, String> {
        let pid = i32::try_from(id.pid).ok().and_then(Pid::from_raw).ok_or("not a pid")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| format!("pidfd: {e}"))?;
        // Looked at after the descriptor is held: this is the one it holds.
        match read_stat(root, id.pid) {
            Ok(Some(stat)) if stat.start == id.start => Ok(Process { root, id, pidfd }),
            _ => Err("the process has ended".into()),
        }
    }

    pub fn memory(&self) -> Result<ProcessMemory, String> {
        there(read_status(self.root, self.id.pid))
    }

    /// Tells it of these places. One that was unmapped meanwhile, or is of a kind that
    /// takes no advice, is passed over.
    pub fn advise(&self, places: &[Range], advice: Advice) -> Result<(), String> {
        let mut left = places;
        while !left.is_empty() {
            let now = &left[..left.len().min(VECTOR_MAX)];
            let done = match self.call(now, advice) {
                Ok(bytes) => told(now, bytes),
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)) => 1,
                Err(e) => {
                    return Err(format!(
                        "process_madvise: {e}: run Ebb as root, Linux 5.10 or later"
                    ));
                }
            };
            left = &left[done..];
        }
        Ok(())
    }

    fn call(&self, places: &[Range], advice: Advice) -> std::io::Result<u64> {
        let (parts, fd) = (vectors(places), self.pidfd.as_raw_fd());
        let (call, advice) = (libc::SYS_process_madvise, advice as i32);
        // SAFETY: `parts` outlives the call; the addresses in it are another process's
        // and are never dereferenced here. Neither advice changes data.
        let done = unsafe { libc::syscall(call, fd, parts.as_ptr(), parts.len(), advice, 0u32) };
        check(done).map(|done| done as u64)
    }
}

/// How many of these places `bytes` covers. The one at which the call ended early cannot be
/// advised about and counts as done.
fn told(places: &[Range], mut bytes: u64) -> usize {
    for (i, place) in places.iter().enumerate() {
        if bytes < place.len {
            return i + 1;
        }
        bytes -= place.len;
    }
    places.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_goes_on_where_the_last_ended_and_is_cut_at_multiples() {
        let ram = [Range { start: 0xf000, len: 0x21000 }, Range { start: 0x90000, len: 0x1000 }];
        let all: Vec<Range> = rest(&ram, 0, 0x10000).collect();
        let cuts: Vec<(u64, u64)> = all.iter().map(|r| (r.start, r.len)).collect();
        assert_eq!(
            cuts,
            [(0xf000, 0x1000), (0x10000, 0x10000), (0x20000, 0x10000), (0x90000, 0x1000)]
        );
        for (i, piece) in all.iter().enumerate() {
            assert!(rest(&ram, piece.end(), 0x10000).eq(all[i + 1..].iter().copied()));
        }
        let within: Vec<Range> = rest(&ram, 0x18000, 0x10000).collect();
        assert_eq!((within[0].start, within[0].len), (0x18000, 0x8000));
    }

    #[test]
    fn what_cannot_be_told_of_is_passed_over_and_nothing_else() {
        let places = [1, 2, 3].map(|n| Range { start: n << 20, len: n * 4096 });
        for (bytes, count) in [(0, 1), (4096, 2), (8192, 2), (12_288, 3), (24_576, 3)] {
            assert_eq!(told(&places, bytes), count, "{bytes}");
        }
    }
}
