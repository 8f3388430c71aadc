//! Connections to shared sockets that Ebb left before QEMU accepted them.
//!
//! A connection stays in the queue of QEMU's socket until QEMU accepts it, also where its client has
//! closed it. The queue has room for two. So such a connection is not closed but shut down for
//! writing: QEMU reads end-of-file as soon as it accepts it, and closes it. Before that nothing can
//! be read from it, and so Ebb knows whether it is still in the queue. Source: Linux
//! `net/unix/af_unix.c` (`unix_shutdown`), QEMU `chardev/char-socket.c` (`tcp_chr_read`).
//!
//! They are kept for the whole process: they outlive the client that made them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::Shutdown;

/// Device and inode of the socket's file: it may have several paths.
type Id = (u64, u64);

fn id(path: &Path) -> Option<Id> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

fn all() -> MutexGuard<'static, BTreeMap<Id, OwnedFd>> {
    static ALL: Mutex<BTreeMap<Id, OwnedFd>> = Mutex::new(BTreeMap::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leaves this connection, on which nothing was read.
pub(super) fn leave(path: &Path, socket: OwnedFd) {
    // One that cannot be shut down has no peer any more.
    let shut = rustix::net::shutdown(&socket, Shutdown::Write);
    if let (Ok(()), true, Some(id)) = (shut, is_in_queue(&socket), id(path)) {
        let mut all = all();
        all.retain(|_, socket| is_in_queue(socket));
        all.insert(id, socket);
    }
}

/// Whether one is still in the queue of this socket.
pub(super) fn waits(path: &Path) -> bool {
    let Some(id) = id(path) else { return false };
    let mut all = all();
    let waits = all.get(&id).is_some_and(is_in_queue);
    if !waits {
        all.remove(&id);
    }
    waits
}

fn is_in_queue(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)) == Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::connect;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_connection_is_in_the_queue_until_the_server_accepts_it_and_finds_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(!waits(&path));
        leave(&path, connect(&path).unwrap());
        assert!(waits(&path) && !waits(&dir.path().join("other")));
        let (mut served, _) = listener.accept().unwrap();
        assert!(waits(&path), "accepting alone shows nothing");
        assert_eq!(served.read(&mut [0; 8]).unwrap(), 0, "the end");
        served.write_all(b"greeting").unwrap();
        assert!(!waits(&path));
        leave(&path, connect(&path).unwrap());
        assert!(waits(&path));
        drop(listener);
        assert!(!waits(&path), "the server has ended");
    }
}
