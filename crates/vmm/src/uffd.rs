//! The userfaultfd that guards guest RAM while pages of it are being proven free.
//!
//! Synchronous write-protection: a write to a protected page waits until the
//! protection is lifted. Dropping it lifts everything: the kernel unregisters
//! the ranges and wakes who waits, whatever state we were in.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sys::{self, Range};

/// What is needed of the kernel beyond plain write-protection.
const WANTED: u64 = sys::FEATURE_WP | sys::FEATURE_WP_SHMEM | sys::FEATURE_WP_UNPOPULATED;
/// Tries of a call that the kernel tells to come again.
const TRIES: usize = 100;

/// A userfaultfd of this process.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens one: by the daemon's descriptor, else by `/dev/userfaultfd`, else by
    /// the system call. `unpopulated`: absent pages can be protected too.
    pub fn open(device: Option<BorrowedFd<'_>>, unpopulated: bool) -> Result<Uffd> {
        let fd = match device {
            Some(d) => sys::uffd_open(Some(d))?,
            None => match File::options().read(true).write(true).open("/dev/userfaultfd") {
                Ok(device) => sys::uffd_open(Some(device.as_fd()))?,
                Err(_) => sys::uffd_open(None)?,
            },
        };
        let features = if unpopulated { WANTED } else { WANTED & !sys::FEATURE_WP_UNPOPULATED };
        sys::uffd_api(&fd, features)?;
        Ok(Uffd { fd })
    }

    /// From now on ranges of this can be protected.
    pub fn register(&self, range: Range) -> Result<()> {
        sys::uffd_register(&self.fd, range)
    }

    /// Writes wait from now on.
    pub fn protect(&self, range: Range) -> Result<()> {
        again(|| sys::uffd_protect(&self.fd, range, true))
    }

    /// Writes go on.
    pub fn lift(&self, range: Range) -> Result<()> {
        again(|| sys::uffd_protect(&self.fd, range, false))
    }

    /// Who waits in this range looks again whether it has to.
    pub fn wake(&self, range: Range) -> Result<()> {
        sys::uffd_wake(&self.fd, range)
    }

    /// Faults that wait; empty where there are none.
    pub fn read<'a>(&self, buffer: &'a mut [sys::UffdMsg]) -> Result<&'a [sys::UffdMsg]> {
        sys::uffd_read(&self.fd, buffer)
    }

    /// For `poll`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn again(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..TRIES {
        match call() {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
            done => return done,
        }
    }
    Err(Error::from_raw_os_error(libc::EAGAIN))
}
