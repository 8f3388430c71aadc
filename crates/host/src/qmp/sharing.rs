//! A QMP socket that other programs use as well. QEMU serves one client on it, so a client is
//! connected only while it has commands under way.
//!
//! A command makes a connection ([`Client::visit`]), and the last answer ends it
//! ([`Client::tidy`]). Nothing is sent before QEMU has greeted: what a client has written before
//! QEMU serves it, QEMU would carry out later, when the client is gone. A client that is not served
//! soon leaves, and what it wanted to send fails with [`QmpError::Busy`].
//!
//! A client that left stays in QEMU's queue until QEMU accepts it and finds it gone. The queue has
//! room for two, so no second connection is made before the first is out of it.

use std::time::{Duration, Instant};

use super::queue::Queue;
use super::{Client, QmpError, State, open_socket};

/// A client that QEMU has not greeted looks after so long whether another is served.
const PATIENCE: Duration = Duration::from_millis(50);
/// It leaves after so long in any case. So does one that QEMU owes an answer for so long.
const MOST: Duration = Duration::from_secs(1);
/// A client that left is taken to be out of the queue after so long, where that cannot be seen.
const UNSEEN: Duration = Duration::from_secs(5);

/// What is kept between two connections.
#[derive(Debug)]
pub(super) struct Sharing {
    /// The process that must serve the socket.
    pid: u32,
    greeted: Option<Instant>,
    looked: Instant,
    /// When a connection was left that may still be in QEMU's queue.
    left: Option<Instant>,
    /// Since when QEMU has not served this client, and why.
    missed: Option<(Instant, String)>,
    longest: Duration,
}

impl Sharing {
    pub fn new(pid: u32) -> Sharing {
        Sharing {
            pid,
            greeted: None,
            looked: Instant::now(),
            left: None,
            missed: None,
            longest: Duration::ZERO,
        }
    }
}

impl Client {
    /// Whether it is connected only while it has commands under way.
    pub fn is_shared(&self) -> bool {
        self.sharing.is_some()
    }

    /// Whether QEMU may still be sent an order that gives: it is taken up as soon as it serves.
    pub fn takes_orders(&self) -> bool {
        self.state().serves() || self.is_shared() && self.state() != State::Failed
    }

    /// Goes on until nothing is under way, or until then. Blocks.
    pub fn finish(&mut self, until: Instant) {
        let _ = self.wait(until, |p| p.unanswered() == 0);
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
        match (self.state(), sharing.greeted) {
            (State::Greeting, _) | (_, None) => Some(self.opened.max(sharing.looked) + PATIENCE),
            (_, Some(greeted)) => Some(greeted + MOST),
        }
    }

    /// Connects where a command waits for that.
    pub(super) fn visit(&mut self) {
        let Some(sharing) = &mut self.sharing else { return };
        if !self.protocol.wants_connection() {
            return;
        }
        if let Some(left) = sharing.left {
            match Queue::of(&self.path) {
                Some(queue) if queue.waiting > 0 => return self.miss(unserved(Some(queue))),
                None if left.elapsed() < UNSEEN => return self.miss(unserved(None)),
                _ => sharing.left = None,
            }
        }
        let socket = match open_socket(&self.path) {
            Ok(socket) => socket,
            Err(QmpError::Taken(_, why)) => return self.miss(why),
            Err(e) => return self.protocol.fail(e),
        };
        let pid = sharing.pid;
        (self.opened, sharing.looked, sharing.greeted) = (Instant::now(), Instant::now(), None);
        self.socket = Some(socket);
        self.protocol.begin();
        if let Some(peer) = self.peer_pid().filter(|peer| *peer != pid) {
            let path = self.path.display().to_string();
            let why = format!("served by process {peer}, not by this VM's {pid}");
            self.protocol.fail(QmpError::Io(path, "peer", why));
        }
    }

    /// Leaves where all is answered, where another client is served, or where its time is up.
    pub(super) fn tidy(&mut self) {
        let Some(sharing) = self.sharing.as_mut().filter(|_| self.socket.is_some()) else { return };
        let now = Instant::now();
        match self.protocol.state() {
            State::Greeting => {
                if now < self.opened.max(sharing.looked) + PATIENCE {
                    return;
                }
                sharing.looked = now;
                let queue = Queue::of(&self.path);
                // Nobody else is served: this client is the next, or is served without a word yet.
                let next = queue.is_some_and(|q| q.served == 0 || q.waiting == 0);
                if !next || now >= self.opened + MOST {
                    sharing.left = Some(now);
                    self.miss(unserved(queue));
                }
            }
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
                self.socket = None;
                self.protocol.leave(&QmpError::Left(self.path.display().to_string(), why));
            }
        }
    }

    fn miss(&mut self, why: String) {
        self.socket = None;
        self.protocol.leave(&QmpError::Busy(self.path.display().to_string(), why.clone()));
        if let Some(sharing) = &mut self.sharing {
            let since = sharing.missed.take().map_or_else(Instant::now, |(since, _)| since);
            sharing.missed = Some((since, why));
        }
    }
}

/// Why a client was not served, for people.
fn unserved(queue: Option<Queue>) -> String {
    match queue {
        Some(queue) if queue.served > 0 => "another client is served".into(),
        Some(_) => "QEMU accepts no client".into(),
        None => "another client is served, or QEMU hangs".into(),
    }
}
