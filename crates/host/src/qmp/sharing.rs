//! A QMP socket that other programs use as well. QEMU serves one client on it, so a client is
//! connected only while it has commands under way.
//!
//! A command makes a connection ([`Client::visit`]), and the last answer ends it
//! ([`Client::tidy`]). Nothing is sent before QEMU has greeted: what a client has written before
//! QEMU serves it, QEMU would carry out later, when the client is gone. A client that is not served
//! within a second leaves, and what it wanted to send fails with [`QmpError::Busy`]. Until then a
//! command that must not be late is taken back ([`Protocol::take_back`]).
//!
//! A connection stays in the queue of QEMU's socket until QEMU accepts it, also where its client has
//! closed it. The queue has room for two. So one that Ebb leaves is not closed but shut down for
//! writing: QEMU reads end-of-file as soon as it accepts it, and closes it. Before that nothing can
//! be read from it, and so Ebb knows whether it is still in the queue; no second connection is made
//! before. Source: Linux `net/unix/af_unix.c` (`unix_shutdown`), QEMU `chardev/char-socket.c`
//! (`tcp_chr_read`).
//!
//! [`Protocol::take_back`]: super::Protocol::take_back

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::Shutdown;

use super::{Client, Protocol, QmpError, State, open_socket};
use crate::lock;

/// Time limit for QEMU's greeting, and after that for the last answer. Then the client leaves.
const MOST: Duration = Duration::from_secs(1);
/// Why a client is not served, for people: which of the two is unknown.
const UNSERVED: &str = "another client is served, or QEMU hangs";

#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// The process that must serve the socket, where that is known.
    pid: Option<u32>,
    greeted: Option<Instant>,
    /// Since when QEMU has not served this client, and why.
    missed: Option<(Instant, String)>,
    longest: Duration,
}

impl Client {
    /// For a socket that other programs use as well, of the process `pid`. It connects for each
    /// batch of commands, and leaves when all are answered.
    pub fn shared(path: impl Into<PathBuf>, pid: u32) -> Client {
        Client::visitor(path.into(), Some(pid))
    }

    /// For a shared socket whose process is not known. It connects at once, so that
    /// [`Client::peer_pid`] tells it.
    pub fn knock(path: impl Into<PathBuf>) -> Result<Client, QmpError> {
        let mut client = Client::visitor(path.into(), None);
        if waits(&client.path) {
            return Err(QmpError::Busy(client.named(), UNSERVED.into()));
        }
        client.open()?;
        Ok(client)
    }

    fn visitor(path: PathBuf, pid: Option<u32>) -> Client {
        let mut client = Client::without(path, Protocol::shared);
        client.sharing = Some(Sharing { pid, ..Sharing::default() });
        client
    }

    /// Whether it is connected only while it has commands under way.
    pub fn is_shared(&self) -> bool {
        self.sharing.is_some()
    }

    /// Whether QEMU may still be sent what may be late: it is sent as soon as QEMU serves.
    pub fn takes_late(&self) -> bool {
        self.protocol.state().serves() || self.is_shared() && self.protocol.state() != State::Failed
    }

    /// Why QEMU did not serve it the last time, and since when.
    pub fn missed(&self) -> Option<&(Instant, String)> {
        self.sharing.as_ref()?.missed.as_ref()
    }

    /// The longest time that it was connected and served, with the time until QEMU greeted.
    pub fn longest_visit(&self) -> Option<Duration> {
        self.sharing.as_ref().map(|s| s.longest)
    }

    /// When [`Client::tidy`] may have something to do, whatever QEMU says.
    pub(crate) fn tidy_at(&self) -> Option<Instant> {
        let sharing = self.sharing.as_ref().filter(|_| self.socket.is_some())?;
        Some(sharing.greeted.unwrap_or(self.opened) + MOST)
    }

    /// Connects where a command waits for that.
    pub(super) fn visit(&mut self) {
        if self.sharing.is_none() || !self.protocol.wants_connection() {
            return;
        }
        if waits(&self.path) {
            return self.miss(UNSERVED.into());
        }
        match self.open() {
            Ok(()) => {}
            Err(QmpError::Taken(_, why)) => self.miss(why),
            Err(e) => self.protocol.fail(e),
        }
    }

    fn open(&mut self) -> Result<(), QmpError> {
        self.socket = Some(open_socket(&self.path)?);
        self.opened = Instant::now();
        self.protocol.begin();
        let peer = self.peer_pid();
        let Some(sharing) = &mut self.sharing else { return Ok(()) };
        sharing.greeted = None;
        sharing.pid = sharing.pid.or(peer);
        sharing.pid.into_iter().for_each(|pid| self.check_peer(pid));
        Ok(())
    }

    /// Leaves where all is answered, or where its time is up.
    pub(super) fn tidy(&mut self) {
        let Some(sharing) = self.sharing.as_mut().filter(|_| self.socket.is_some()) else { return };
        let now = Instant::now();
        match self.protocol.state() {
            State::Greeting if now < self.opened + MOST => {}
            State::Greeting => self.miss(UNSERVED.into()),
            State::Failed => {}
            _ => {
                let greeted = *sharing.greeted.get_or_insert(now);
                sharing.missed = None;
                if !self.protocol.is_done() && now < greeted + MOST {
                    return;
                }
                sharing.longest = sharing.longest.max(now - self.opened);
                let why = format!("no answer within {:.1} s", MOST.as_secs_f64());
                if !self.protocol.is_done() {
                    sharing.missed = Some((now, why.clone()));
                }
                self.close();
                self.protocol.leave(&QmpError::Failed(self.named(), why));
            }
        }
    }

    /// Leaves a shared socket, whatever is under way.
    pub fn part(&mut self) {
        if self.sharing.is_none() || self.socket.is_none() {
            return;
        }
        if self.protocol.state() == State::Greeting {
            return self.miss(UNSERVED.into());
        }
        self.close();
        self.protocol.leave(&QmpError::Failed(self.named(), "Ebb had to leave it".into()));
    }

    fn miss(&mut self, why: String) {
        self.close();
        self.protocol.leave(&QmpError::Busy(self.named(), why.clone()));
        if let Some(sharing) = &mut self.sharing {
            let since = sharing.missed.take().map_or_else(Instant::now, |(since, _)| since);
            sharing.missed = Some((since, why));
        }
    }

    /// Closes the connection; one to a shared socket that QEMU has not accepted stays known.
    pub(super) fn close(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if self.sharing.as_ref().is_some_and(|s| s.greeted.is_none()) {
            leave(&self.path, socket);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

/// Device and inode of the socket's file: it may have several paths.
type Id = (u64, u64);

fn id(path: &Path) -> Option<Id> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// Connections that were left, kept for the whole process: they outlive the client that made them.
fn all() -> MutexGuard<'static, BTreeMap<Id, OwnedFd>> {
    static ALL: Mutex<BTreeMap<Id, OwnedFd>> = Mutex::new(BTreeMap::new());
    lock(&ALL)
}

/// Leaves this connection, on which nothing was read.
fn leave(path: &Path, socket: OwnedFd) {
    // One that cannot be shut down has no peer any more.
    let shut = rustix::net::shutdown(&socket, Shutdown::Write);
    if let (Ok(()), true, Some(id)) = (shut, is_in_queue(&socket), id(path)) {
        let mut all = all();
        all.retain(|_, socket| is_in_queue(socket));
        all.insert(id, socket);
    }
}

/// Whether one is still in the queue of this socket.
fn waits(path: &Path) -> bool {
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
mod tests;
