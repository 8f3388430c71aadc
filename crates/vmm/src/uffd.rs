//! The userfaultfd that guards guest RAM while pages of it are being proven free.
//!
//! Synchronous write-protection: a write to a protected page waits until the
//! protection is lifted. Dropping it lifts everything: the kernel unregisters
//! the ranges and wakes the threads that wait, whatever state we were in.

use std::fs::File;
use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sys::{self, Range};

/// What is needed of the kernel beyond plain write-protection.
const WANTED: u64 = sys::FEATURE_WP | sys::FEATURE_WP_SHMEM | sys::FEATURE_WP_UNPOPULATED;
/// Major number of the devices in `/proc/misc`.
const MISC_MAJOR: u32 = 10;
/// Tries of a call that the kernel tells to come again.
const TRIES: usize = 100;

/// A userfaultfd of this process. Its single system calls are in `sys.rs`.
#[derive(Debug)]
pub struct Uffd {
    pub(crate) fd: OwnedFd,
}

impl Uffd {
    /// Opens one that sees faults of the kernel too: by the daemon's descriptor of
    /// `/dev/userfaultfd`, else by that device, else by the system call. The last
    /// two want privilege. `unpopulated`: absent pages can be protected too. The error says what
    /// to do.
    pub fn open(device: Option<BorrowedFd<'_>>, unpopulated: bool) -> Result<Uffd, String> {
        let fd = match device {
            Some(d) if !is_the_device(d) => {
                let why = "the descriptor that came is not one of /dev/userfaultfd: it was closed";
                return Err(why.into());
            }
            Some(d) => sys::uffd_open(Some(d)).map_err(|e| {
                format!("the daemon's /dev/userfaultfd gives no userfaultfd here: {e}")
            })?,
            None => open_ourselves()?,
        };
        let features = if unpopulated { WANTED } else { WANTED & !sys::FEATURE_WP_UNPOPULATED };
        sys::uffd_api(&fd, features)
            .map_err(|e| format!("no userfaultfd with what is needed of it (Linux 6.4): {e}"))?;
        Ok(Uffd { fd })
    }

    /// Writes wait from now on.
    pub fn protect(&self, range: Range) -> std::io::Result<()> {
        again(|| self.write_protect(range, true))
    }

    /// Writes go on.
    pub fn lift(&self, range: Range) -> std::io::Result<()> {
        again(|| self.write_protect(range, false))
    }

    /// For `poll`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether a descriptor is one of `/dev/userfaultfd`, under whatever name it was
/// opened. Asked before the request that makes a userfaultfd of it: for another
/// device the same number may mean anything.
fn is_the_device(fd: BorrowedFd<'_>) -> bool {
    let Ok(stat) = rustix::fs::fstat(fd) else { return false };
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let device = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_char_device();
    let list = std::fs::read_to_string("/proc/misc").unwrap_or_default();
    device && major == MISC_MAJOR && misc_minor(&list, "userfaultfd") == Some(minor)
}

/// Minor number of a device in `/proc/misc`: lines of a number and a name.
fn misc_minor(list: &str, device: &str) -> Option<u32> {
    let pairs = list.lines().filter_map(|l| l.trim().split_once(' '));
    pairs.filter(|p| p.1 == device).find_map(|p| p.0.parse().ok())
}

fn open_ourselves() -> Result<OwnedFd, String> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok();
    sys::uffd_open(device.as_ref().map(AsFd::as_fd)).map_err(|e| match e.raw_os_error() {
        Some(libc::EPERM) => {
            "this VMM may not make a userfaultfd that sees faults of KVM: run the daemon as root \
             on Linux 6.4 or later, so that it can pass /dev/userfaultfd on"
                .into()
        }
        _ => format!("no userfaultfd: {e}"),
    })
}

fn again(mut call: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
    for _ in 0..TRIES {
        match call() {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
            done => return done,
        }
    }
    Err(Error::from_raw_os_error(libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_known_by_its_number() {
        let list = "232 kvm\n257 userfaultfd\n  1 psaux\nnonsense\n";
        assert_eq!(misc_minor(list, "userfaultfd"), Some(257));
        assert_eq!(misc_minor(list, "psaux"), Some(1));
        assert_eq!(misc_minor(list, "user"), None);
        for other in ["/dev/null", "/dev/kvm", "/proc/self/maps", "/"] {
            let Ok(file) = File::open(other) else { continue };
            assert!(!is_the_device(file.as_fd()), "{other}");
            let refused = Uffd::open(Some(file.as_fd()), true).unwrap_err();
            assert!(refused.contains("not one of /dev/userfaultfd"), "{other}: {refused}");
        }
    }
}
