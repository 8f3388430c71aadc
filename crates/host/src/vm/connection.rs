//! The connection to a VM's QEMU: which sockets may be used, how it is opened, given up and
//! tried again, and whether it serves commands. What is said on it stands in `questions.rs`,
//! `answers.rs` and `orders.rs`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_core::sample::{Heard, Link, VmEvent};

use super::{Answers, Vm};
use crate::probe::qemu::QmpAddress;
use crate::qmp::{Client, QmpError, State};
use crate::qmp_balloon;

/// First and longest wait before a lost connection is tried again.
pub(super) const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

impl Vm {
    /// The QMP socket in use, once QEMU has answered; `None` through libvirt.
    pub(super) fn socket(&self) -> Option<String> {
        let client = self.client.as_ref().filter(|c| self.ready && c.is_direct())?;
        client.path().to_str().map(str::to_owned)
    }

    /// The sockets that may be connected to, or why there is none.
    fn sockets(&self) -> Result<Vec<PathBuf>, String> {
        if !self.access.managed {
            return Err("it is not managed, so it is not connected to".into());
        }
        if let Some(path) = &self.owed_at {
            return Ok(vec![path.clone()]);
        }
        let paths = match &self.process.qmp {
            QmpAddress::Paths(paths) => paths,
            QmpAddress::None { why } => return Err(why.clone()),
        };
        let own = |p: &&PathBuf| {
            let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
            self.named || self.access.any_socket || name.is_some_and(|n| n.contains("ebb"))
        };
        let usable: Vec<PathBuf> = paths.iter().filter(own).cloned().collect();
        if usable.is_empty() {
            return Err(format!(
                "its QMP socket {} may be somebody else's: start it with a further -qmp \
                 unix:/run/NAME-ebb.qmp,server=on,wait=off, or name the socket as qmp in \
                 [vm.NAME], or set host.sockets = \"any\"",
                paths[0].display()
            ));
        }
        Ok(usable)
    }

    /// Uses a connection from its beginning.
    pub fn adopt(&mut self, client: Client) {
        self.forget_connection();
        self.client = Some(client);
    }

    /// The connection, if commands are served promptly.
    pub fn usable(&mut self) -> Result<&mut Client, Link> {
        let link = self.link();
        match &mut self.client {
            Some(c) if c.state() == State::Ready && self.slow_since.is_none() => Ok(c),
            _ => Err(link),
        }
    }

    /// Has a lost connection tried again soon: the VM is owed something.
    pub fn hurry(&mut self, now: Instant) {
        self.retry_at = self.retry_at.map(|at| at.min(now + BACKOFF.0));
    }

    /// Whether the caller should sample now: an urgent event or a lost connection.
    pub fn is_urgent(&mut self) -> bool {
        let (ready, actual, ordered) = (self.ready, self.actual, self.ordered);
        self.client.as_mut().is_some_and(|c| {
            c.protocol().has_event(&qmp_balloon::URGENT)
                || c.protocol()
                    .any_event(|e| qmp_balloon::tells_more_than_ordered(e, actual, ordered))
                || ready && c.state() == State::Failed
        })
    }

    /// Closes a connection that must not be kept. A managed VM keeps the one through libvirt while
    /// it has no socket for Ebb.
    pub(super) fn leave_unwanted(&mut self) {
        let Err(why) = self.sockets() else { return };
        let through = self.client.as_ref().is_none_or(|c| !c.is_direct());
        if self.access.managed && self.access.libvirt && through {
            return;
        }
        if self.client.is_some() {
            if let Some(command) = self.restore_interval() {
                self.restored_interval(command);
            }
            self.forget_connection();
        }
        self.down = Link::Down(why);
    }

    pub(super) fn forget_connection(&mut self) {
        self.client = None;
        self.asked.clear();
        self.unanswered.clear();
        self.last_order = None;
        self.answers = Answers::default();
        self.inventory.forget();
        self.verdict = None;
        (self.ready, self.slow_since) = (false, None);
        (self.looked_up, self.words_new, self.ran_asked) = (None, None, None);
    }

    pub(super) fn connect(&mut self) {
        let paths = match self.sockets() {
            Ok(paths) => paths,
            Err(why) if self.access.managed => return self.connect_by_manager(why),
            Err(_) => return,
        };
        let mut client = Client::new(paths[self.turn % paths.len()].clone());
        let pid = self.process.id.pid;
        if let Some(peer) = client.peer_pid().filter(|peer| *peer != pid) {
            let path = client.path().display().to_string();
            let why = format!("served by process {peer}, not by this VM's {pid}");
            client.protocol().fail(QmpError::Io(path, "peer", why));
        }
        self.adopt(client);
    }

    /// Connects through libvirt if libvirt manages the VM. Otherwise the VM stays down, because of
    /// `why`: it has no socket for Ebb.
    fn connect_by_manager(&mut self, why: String) {
        let libvirt = self.libvirt.as_ref().filter(|_| self.access.libvirt);
        let Some((libvirt, address)) = libvirt.and_then(|l| Some((l, l.find(&self.process)?)))
        else {
            (self.down, self.retry_at) = (Link::Down(why), Some(Instant::now() + BACKOFF.0));
            return;
        };
        // libvirt calls a domain with an agent tainted already: the agent needs an argument or a
        // variable of its own.
        match libvirt.attach(address, self.may_use_agent()) {
            Ok(client) => self.adopt(client),
            Err(e) => self.down = Link::Down(format!("libvirt: {e}")),
        }
    }

    /// Buries a failed connection and says when to try again.
    pub(super) fn reap(&mut self, now: Instant) {
        let Some(error) = self.client.as_ref().and_then(|c| c.failure().cloned()) else { return };
        self.take_events();
        self.down = match &error {
            QmpError::Taken(..) => Link::Taken(error.to_string()),
            _ => Link::Down(error.to_string()),
        };
        if matches!(error, QmpError::Taken(..)) {
            self.turn += 1;
        }
        let problems = std::mem::take(&mut self.answers.problems);
        self.forget_connection();
        self.answers.problems = problems;
        self.retry_at = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
    }

    /// A new connection: what was known before may not hold any more.
    pub(super) fn first_answer(&mut self) {
        if self.ready {
            return;
        }
        self.ready = true;
        self.backoff = BACKOFF.0;
        self.looked = false;
        (self.device, self.heard) = (None, Heard::default());
        (self.reporting, self.deflate_on_oom) = (None, None);
        self.owed.clear();
        self.events.push(VmEvent::Connected);
    }

    pub(super) fn link(&self) -> Link {
        let Some(client) = &self.client else { return self.down.clone() };
        match (client.state(), client.failure()) {
            (_, Some(e @ QmpError::Taken(..))) => Link::Taken(e.to_string()),
            (_, Some(e)) => Link::Down(e.to_string()),
            (State::Ready, _) if self.slow_since.is_none() && self.ready => Link::Up,
            (State::Ready, _) => {
                let silent = client.last_heard().elapsed().as_secs_f64();
                Link::Slow(format!("{}: silent for {silent:.1} s", client.path().display()))
            }
            _ => Link::Slow(format!("{}: has not greeted yet", client.path().display())),
        }
    }
}
