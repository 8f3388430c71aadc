//! When to leave a VM alone: what this process itself can see.
//!
//! Devices that write to guest memory past the page tables (VFIO, vDPA, RDMA), locked
//! memory, confidential guests. What only QEMU knows comes from the daemon.
//!
//! Such a device is looked for in each window as well ([`Devices::look_at_new`]), between the
//! protection and the discard. If it has pinned a page before the protection, its file is open
//! by then, so it is seen. A pin of a page that is protected fails or waits for the end of the
//! window (`device_watch.rs`).
//!
//! Devices are known by the names of their files. The names of a further kind belong into
//! `of_file` here and into the lists of `device_watch.rs`: `FOLDERS`, `FILES`, `PREFIXES`, `NAMES`.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;

/// Descriptors beyond the highest one that was seen open. The kernel gives the lowest that
/// is free.
const BEYOND: i32 = 64;

/// The character devices that this process has open, all of which were looked at, and its
/// Unix sockets, of which the daemon knows what they are for.
///
/// Shared RAM is given to another process (vhost-user) as a descriptor over a Unix socket.
/// So where RAM is shared, a socket that is new means that nothing may be discarded before
/// the daemon has asked QEMU again what can write to RAM.
#[derive(Debug, Default)]
pub struct Devices {
    harmless: BTreeSet<u64>,
    highest: i32,
    /// Those up to [`BEYOND`] above it that were not open.
    closed: Vec<i32>,
    /// RAM is shared: the sockets that were there, by inode.
    sockets: Option<BTreeSet<u64>>,
    /// Counts what is unclear; `cleared` follows it.
    generation: u64,
    cleared: u64,
}

/// What is open cannot be seen: it may be anything.
const UNREAD: &str = "what this process has open or locked cannot be read";

/// What is new in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum New {
    Device,
    /// A Unix socket, beside shared RAM.
    Socket,
}

impl Devices {
    /// Looks at all open files by their names; an objection, if there is one.
    pub fn look(&mut self) -> Option<String> {
        let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
            return Some(UNREAD.into());
        };
        let numbers = open.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
        let highest = numbers.max().unwrap_or(0);
        let device = |fd| number(fd, FileType::CharacterDevice);
        let harmless = (0..=highest).filter_map(device).collect();
        let closed =
            (0..=highest.saturating_add(BEYOND)).filter(|fd| stat(*fd).is_none()).collect();
        // After that: what was opened in between is in the set, and has to be seen here.
        let objection = objection();
        if objection.is_none() {
            (self.highest, self.harmless, self.closed) = (highest, harmless, closed);
        }
        objection
    }

    /// RAM is shared: from now on new Unix sockets are looked for. Those that are there are
    /// unclear until the daemon has looked.
    pub fn watch_sockets(&mut self) {
        self.sockets = Some(BTreeSet::new());
        self.generation += 1;
        self.take_sockets();
    }

    fn take_sockets(&mut self) {
        let socket = |fd| number(fd, FileType::Socket).filter(|_| is_unix(fd));
        let all = (0..=self.highest.saturating_add(BEYOND)).filter_map(socket).collect();
        if self.sockets.replace(all) != self.sockets {
            self.generation += 1;
        }
    }

    /// What the daemon has to look at before anything is discarded.
    pub fn unclear(&mut self) -> Option<u64> {
        if self.sockets.is_some() && self.whats_new().is_some() {
            self.take_sockets();
        }
        (self.generation != self.cleared).then_some(self.generation)
    }

    /// The daemon has looked at what was there then.
    pub fn clear(&mut self, generation: u64) {
        self.cleared = self.cleared.max(generation.min(self.generation));
    }

    /// Looks at what may have been opened since the last look. An error means that nothing may
    /// be discarded now: because of a device, which is named, or of a socket that the daemon
    /// has to ask about.
    pub fn look_at_new(&mut self) -> Result<(), Option<String>> {
        match self.whats_new() {
            None => Ok(()),
            Some(New::Socket) => Err(None),
            Some(New::Device) => {
                let found = self.look();
                // A harmless one may have come with a socket.
                let clear = found.is_none() && self.whats_new().is_none();
                if clear { Ok(()) } else { Err(found) }
            }
        }
    }

    /// What may have been opened since the last look: some 400 ns for a descriptor that is open.
    pub fn whats_new(&self) -> Option<New> {
        let new = |fd| match (kind(fd)?, &self.sockets) {
            ((FileType::CharacterDevice, device), _) => {
                (!self.harmless.contains(&device)).then_some(New::Device)
            }
            ((FileType::Socket, inode), Some(all)) if !all.contains(&inode) => {
                is_unix(fd).then_some(New::Socket)
            }
            _ => None,
        };
        let opened = opened(&self.closed);
        let mut closed = self.closed.iter().peekable();
        // Also what was opened while the closed ones were looked for.
        let all = 0..=self.highest.saturating_add(BEYOND);
        let was_open = all.filter(|fd| closed.next_if_eq(&fd).is_none());
        opened.into_iter().chain(was_open).find_map(new)
    }
}

/// A descriptor that need not be open.
fn borrowed<'a>(fd: i32) -> BorrowedFd<'a> {
    // SAFETY: never -1, as callers count from 0; borrowed for one call that fails, or tells, where
    // nothing is open.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Which of these are open now. A tenth of the time that a look at each of them takes.
fn opened(closed: &[i32]) -> Vec<i32> {
    let unasked = |fd: &i32| PollFd::from_borrowed_fd(borrowed(*fd), PollFlags::empty());
    let mut polled: Vec<PollFd<'_>> = closed.iter().map(unasked).collect();
    if poll(&mut polled, Some(&Timespec::default())).is_err() {
        return closed.to_vec();
    }
    let is_open = |p: &PollFd<'_>| !p.revents().contains(PollFlags::NVAL);
    polled.iter().zip(closed).filter(|(p, _)| is_open(p)).map(|(_, fd)| *fd).collect()
}

/// What is open there, by what is known of it: a file system of another machine is not asked, which
/// may take as long as that machine likes.
fn stat(fd: i32) -> Option<Statx> {
    let (by_number, local) = (AtFlags::EMPTY_PATH, AtFlags::STATX_DONT_SYNC);
    statx(borrowed(fd), "", by_number | local, StatxFlags::TYPE | StatxFlags::INO).ok()
}

fn is_unix(fd: i32) -> bool {
    socket_domain(borrowed(fd)).is_ok_and(|d| d == AddressFamily::UNIX)
}

/// What is open, and its number: of a device that of the device, else that of the inode.
fn kind(fd: i32) -> Option<(FileType, u64)> {
    let stat = stat(fd)?;
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    let device = || u64::from(stat.stx_rdev_major) << 32 | u64::from(stat.stx_rdev_minor);
    Some((kind, if kind == FileType::CharacterDevice { device() } else { stat.stx_ino }))
}

/// The number of what is open, if it is of this kind.
fn number(fd: i32, wanted: FileType) -> Option<u64> {
    kind(fd).filter(|(kind, _)| *kind == wanted).map(|(_, number)| number)
}

/// The objection to this VM, if any, from what this process has open and locked.
pub fn objection() -> Option<String> {
    open_files(Path::new("/proc/self/fd")).or_else(|| {
        std::fs::read_to_string("/proc/self/status").map_or(Some(UNREAD.into()), |s| locked(&s))
    })
}

fn open_files(dir: &Path) -> Option<String> {
    // With no descriptor left it cannot be opened.
    let Ok(links) = std::fs::read_dir(dir) else {
        return Some(UNREAD.into());
    };
    links
        .flatten()
        .filter_map(|e| std::fs::read_link(e.path()).ok())
        .find_map(|l| of_file(&l.to_string_lossy()))
}

fn of_file(link: &str) -> Option<String> {
    let why = match link {
        l if l.starts_with("/dev/vfio/")
            || l.contains("[vfio-")
            || ["/dev/iommu", "anon_inode:kvm-vfio", "anon_inode:[kvm-vfio]"].contains(&l) =>
        {
            "a VFIO device writes to guest memory by itself"
        }
        l if l.starts_with("/dev/infiniband/") => "an RDMA device writes to guest memory by itself",
        l if l.starts_with("/dev/vhost-vdpa") => "a vDPA device writes to guest memory by itself",
        "/dev/sev"
        | "anon_inode:kvm-gmem"
        | "anon_inode:[kvm-gmem]"
        | "anon_inode:[guest_memfd]" => "the guest's memory is encrypted",
        _ => return None,
    };
    Some(format!("{why} ({link})"))
}

fn locked(status: &str) -> Option<String> {
    let kib = status.lines().find_map(|l| l.strip_prefix("VmLck:"))?;
    let kib: u64 = kib.split_whitespace().next()?.parse().ok()?;
    // The VMM's own secrets may be locked; guest RAM is more.
    (kib >= 64 << 10).then(|| format!("{} MiB of memory are locked (mem-lock)", kib >> 10))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn what_was_open_only_while_it_looked_is_looked_at_again() {
        let mut devices = Devices::default();
        assert_eq!(devices.look(), None);
        let device = std::fs::File::open("/dev/full").unwrap();
        devices.closed.retain(|fd| *fd != device.as_raw_fd());
        assert_eq!(devices.whats_new(), Some(New::Device));
    }

    #[test]
    fn what_pins_or_hides_memory_is_an_objection() {
        for bad in ["/dev/vfio/12", "/dev/vfio/vfio", "anon_inode:[vfio-device]", "/dev/iommu"] {
            assert!(of_file(bad).unwrap().contains("VFIO"), "{bad}");
        }
        assert!(of_file("/dev/vhost-vdpa-0").unwrap().contains("vDPA"));
        assert!(of_file("/dev/sev").unwrap().contains("encrypted"));
        assert!(of_file("/dev/infiniband/uverbs0").unwrap().contains("RDMA"));
        for good in ["/dev/kvm", "anon_inode:kvm-vm", "/dev/vhost-net", "/memfd:ram (deleted)"] {
            assert_eq!(of_file(good), None, "{good}");
        }
        assert!(locked("VmLck:\t 1048576 kB\n").unwrap().starts_with("1024 MiB"));
        assert_eq!(locked("VmLck:\t       0 kB\n"), None);
        assert_eq!(locked("nonsense"), None);
        assert_eq!(objection(), None);
        assert_eq!(open_files(Path::new("/nowhere")).as_deref(), Some(UNREAD));
    }
}
