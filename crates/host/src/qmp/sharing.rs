//! A QMP socket that other programs use as well. QEMU serves one client on it, so a client is
//! connected only while it has commands under way.
//!
//! A command makes a connection ([`Client::visit`]), and the last answer ends it
//! ([`Client::tidy`]). Nothing is sent before QEMU has greeted: what a client has written before
//! QEMU serves it, QEMU would carry out later, when the client is gone. A client that is not served
//! within a second leaves, and what it wanted to send fails with [`QmpError::Busy`]. Until then a
//! command that must not be late is taken back ([`Protocol::take_back`]).
//!
//! A client that left stays in QEMU's queue until QEMU accepts it (`left.rs`). No second
//! connection is made before.
//!
//! [`Protocol::take_back`]: super::Protocol::take_back

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Client, Protocol, QmpError, State, left, open_socket};

/// Time limit for QEMU's greeting, and after that for the last answer. Then the client leaves.
const MOST: Duration = Duration::from_secs(1);
/// Why a client is not served, for people: which of the two is unknown.
const UNSERVED: &str = "another client is served, or QEMU hangs";

#[derive(Debug)]
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

    /// The same where the process is not known: connects at once, so that
    /// [`Client::peer_pid`] tells it.
    pub fn knock(path: impl Into<PathBuf>) -> Result<Client, QmpError> {
        let mut client = Client::visitor(path.into(), None);
        if left::waits(&client.path) {
            return Err(QmpError::Busy(client.path.display().to_string(), UNSERVED.into()));
        }
        client.open()?;
        Ok(client)
    }

    fn visitor(path: PathBuf, pid: Option<u32>) -> Client {
        let protocol = Protocol::shared(path.display().to_string());
        let sharing = Sharing { pid, greeted: None, missed: None, longest: Duration::ZERO };
        Client::with(path, None, protocol, Some(sharing))
    }

    /// Whether it is connected only while it has commands under way.
    pub fn is_shared(&self) -> bool {
        self.sharing.is_some()
    }

    /// Whether QEMU may still be sent what may be late: it is sent as soon as QEMU serves.
    pub fn takes_late(&self) -> bool {
        self.state().serves() || self.is_shared() && self.state() != State::Failed
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
        if left::waits(&self.path) {
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
                self.protocol.leave(&QmpError::Left(self.path.display().to_string(), why));
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
        let path = self.path.display().to_string();
        self.protocol.leave(&QmpError::Left(path, "Ebb had to leave it".into()));
    }

    fn miss(&mut self, why: String) {
        self.close();
        self.protocol.leave(&QmpError::Busy(self.path.display().to_string(), why.clone()));
        if let Some(sharing) = &mut self.sharing {
            let since = sharing.missed.take().map_or_else(Instant::now, |(since, _)| since);
            sharing.missed = Some((since, why));
        }
    }

    /// Closes the connection; one to a shared socket that QEMU has not accepted stays known.
    pub(super) fn close(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if self.sharing.as_ref().is_some_and(|s| s.greeted.is_none()) {
            left::leave(&self.path, socket);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}
