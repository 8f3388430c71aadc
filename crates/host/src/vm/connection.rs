//! The connection to a VM's QEMU: which sockets may be used, how it is opened, given up and
//! tried again, and whether it serves commands. What is said on it stands in `questions.rs`,
//! `answers.rs` and `orders.rs`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_core::config::AgentUse;
use ebb_core::sample::{Link, SharedSocket, VmEvent};
use ebb_core::units::{Bytes, Stamp};

use super::{Access, Answers, Vm};
use crate::probe::managers::{Manager, SocketKind, kind};
use crate::probe::qemu::QmpAddress;
use crate::qmp::{Client, QmpError, State};
use crate::qmp_balloon;

/// First and longest wait before a lost connection, or a watch that ended, is tried again.
pub(super) const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A connection that lasted this long is tried again after the first wait.
const LASTED: Duration = Duration::from_secs(10);
const NOT_MANAGED: &str = "it is not managed, so it is not connected to";
/// A shared socket where Ebb is not served for this time is left for another one, if there is one.
const TURN_AWAY: Duration = Duration::from_secs(5);
/// After this time on a shared socket Ebb tries one of its own again, if there is one.
const OWN_AGAIN: Duration = Duration::from_secs(600);
/// A shared socket is not visited for questions more often than this, milliseconds.
const VISIT_EVERY_MS: u64 = 200;

impl Vm {
    /// The QMP socket in use, once QEMU has answered; `None` through libvirt.
    pub(super) fn socket(&self) -> Option<String> {
        let client = self.client.as_ref().filter(|c| self.ready && c.is_direct())?;
        client.path().to_str().map(str::to_owned)
    }

    /// The sockets that may be connected to, or why there is none. The one over which something
    /// was taken that is still owed comes first: its path may lead to this QEMU no more.
    fn sockets(&self) -> Result<Vec<PathBuf>, String> {
        if !self.is_reached() {
            return Err(NOT_MANAGED.into());
        }
        let usable = self.usable_sockets();
        let Some(first) = &self.owed_at else { return usable };
        let others = usable.unwrap_or_default().into_iter().filter(|path| path != first);
        Ok(std::iter::once(first.clone()).chain(others).collect())
    }

    /// Whether [`Vm::sockets`] has any.
    fn has_socket(&self) -> bool {
        let is_usable = |path: &PathBuf| self.kind(path) != SocketKind::Others;
        let usable = || matches!(&self.process.args.qmp, QmpAddress::Paths(all) if all.iter().any(is_usable));
        self.is_reached() && (self.owed_at.is_some() || usable())
    }

    pub(super) fn usable_sockets(&self) -> Result<Vec<PathBuf>, String> {
        let paths = match &self.process.args.qmp {
            QmpAddress::Paths(paths) => paths,
            QmpAddress::None { why } => return Err(why.clone()),
        };
        let of_kind = |k| paths.iter().filter(move |p| self.kind(p) == k).cloned();
        // Shared ones come last: QEMU tells no events there.
        let usable: Vec<PathBuf> =
            of_kind(SocketKind::Own).chain(of_kind(SocketKind::Shared)).collect();
        if usable.is_empty() {
            let manager = paths.iter().find_map(|p| Manager::of(p));
            let whose = manager.map_or("may be another program's".into(), |manager| {
                format!("is {}'s", manager.name())
            });
            let or = match manager {
                Some(manager) if manager.stays() => "",
                Some(_) => ", or set host.sockets = \"known\"",
                None => {
                    ", or name the socket as qmp in [vm.NAME], or set host.sockets = \"shared\""
                }
            };
            return Err(format!(
                "its QMP socket {} {whose}: start it with a further -qmp \
                 unix:/run/NAME-ebb.qmp,server=on,wait=off{or}",
                paths[0].display()
            ));
        }
        Ok(usable)
    }

    /// Whether it is managed, or has an interval of Ebb's that is to be put back.
    fn is_reached(&self) -> bool {
        self.access.managed || self.interval_was.is_some()
    }

    /// Takes in what may be done to it. To where no way leads, nothing may.
    pub fn allow(&mut self, access: Access) {
        self.access = access;
        let needs_socket = access.managed && !access.libvirt;
        self.no_way = needs_socket.then(|| self.sockets().err()).flatten();
        if self.no_way.is_some() {
            (self.access.managed, self.access.look_only) = (false, true);
        }
    }

    /// Whether it may be reached through libvirt, at least to have its interval put back.
    pub(super) fn may_ask_libvirt(&self) -> bool {
        self.access.libvirt || self.interval_was.is_some()
    }

    pub fn kind(&self, path: &Path) -> SocketKind {
        kind(path, self.named, self.access.sockets)
    }

    /// Whether it is reached over a socket that other programs use as well.
    pub(super) fn is_shared(&self) -> bool {
        self.client.as_ref().is_some_and(Client::is_shared)
    }

    /// What is to be known of a socket that is shared, where one is used.
    pub(super) fn shared(&self) -> Option<SharedSocket> {
        let client = self.client.as_ref().filter(|c| c.is_shared())?;
        let longest = client.longest_visit().unwrap_or_default();
        Some(SharedSocket {
            with: Manager::of(client.path()).map(|m| m.name().to_owned()),
            longest_us: longest.as_micros() as u64,
        })
    }

    /// Whether its shared socket was visited a moment ago. What its agent waits for is asked all
    /// the same.
    pub(super) fn was_visited(&self, at: Stamp) -> bool {
        let shared = self.is_shared();
        shared && self.ready && !self.agent_awaits() && at.since(self.asked_at) < VISIT_EVERY_MS
    }

    /// Uses a connection from its beginning.
    pub fn adopt(&mut self, client: Client) {
        self.forget_connection();
        (self.client, self.adopted) = (Some(client), Some(Instant::now()));
    }

    /// The connection, if commands are served promptly.
    pub fn usable(&mut self) -> Option<&mut Client> {
        let prompt = self.slow_since.is_none();
        self.client.as_mut().filter(|c| prompt && c.protocol.state().serves())
    }

    /// Has a lost connection tried again soon: the VM is owed something.
    pub fn hurry(&mut self, now: Instant) {
        self.retry_at = self.retry_at.map(|at| at.min(now + BACKOFF.0));
    }

    /// Whether the caller should sample now: an urgent event or a lost connection.
    pub fn is_urgent(&mut self) -> bool {
        let of_balloon = |size: Option<Bytes>| size.map(|size| size - self.virtio_mem);
        let (actual, ordered) = (of_balloon(self.actual), of_balloon(self.ordered));
        let ready = self.ready;
        self.client.as_mut().is_some_and(|c| {
            c.protocol.any_event(|e| {
                qmp_balloon::URGENT.contains(&e.name.as_str())
                    || qmp_balloon::tells_more_than_ordered(e, actual, ordered)
            }) || ready && c.protocol.state() == State::Failed
        })
    }

    /// Closes a connection that must not be kept; whether one is still to be closed. A managed VM
    /// keeps the one through libvirt while it has no socket for Ebb.
    pub(super) fn close_unwanted(&mut self) -> bool {
        let through = self.client.as_ref().is_none_or(|c| !c.is_direct());
        let reached = self.has_socket() || self.may_ask_libvirt() && through && self.is_reached();
        // One that is not managed is reached to have its interval put back, by its device.
        if !self.access.managed && self.ready && self.looked && self.device.is_none() {
            self.interval_was = None;
        }
        let meets = self.client.is_none() || !self.ready || self.device.is_none();
        if reached && (self.access.managed || self.is_reached() && meets) {
            return false;
        }
        let why = match self.sockets() {
            Err(why) if self.access.managed => why,
            _ => self.no_way.clone().unwrap_or_else(|| NOT_MANAGED.into()),
        };
        // The tick speaks with all VMs together, so the answer comes after it. QEMU does not carry
        // out what it has not read when the connection is closed.
        if let (Some(client), Some(command)) = (&mut self.client, self.restoring)
            && client.protocol.is_pending(command)
        {
            return true;
        }
        self.restoring.take().into_iter().for_each(|command| self.restored_interval(command));
        if self.is_not_restored() {
            self.restoring = self.restore_interval();
            return true;
        }
        if self.client.is_some() {
            self.forget_connection();
        }
        self.down = Link::Down(why);
        false
    }

    pub(super) fn forget_connection(&mut self) {
        self.client = None;
        self.asked.clear();
        self.orders.clear();
        let problems = std::mem::take(&mut self.answers.problems);
        self.answers = Answers { problems, ..Answers::default() };
        self.inventory.forget();
        self.findings = None;
        (self.ready, self.slow_since, self.restoring) = (false, None, None);
        (self.looked_up, self.stats_new) = (None, None);
        (self.ran_asked, self.all_asked) = (None, None);
    }

    /// Turns to its next socket where the manager of this one stays connected, and back to one of
    /// Ebb's own after a while: that may be served again.
    pub(super) fn turn_away(&mut self, now: Instant) {
        let Some(client) = self.client.as_ref().filter(|c| c.is_shared()) else { return };
        let passed = |since: Instant, most| now.saturating_duration_since(since) > most;
        let long = client.missed().is_some_and(|(since, _)| passed(*since, TURN_AWAY));
        let old = self.orders.is_empty() && self.adopted.is_some_and(|at| passed(at, OWN_AGAIN));
        if !long && !old {
            return;
        }
        let Ok(paths) = self.sockets() else { return };
        if old && self.kind(&paths[0]) == SocketKind::Own {
            self.turn = 0;
        } else if long && paths.len() > 1 {
            self.turn += 1;
        } else {
            return;
        }
        self.forget_connection();
    }

    pub(super) fn connect(&mut self) {
        let paths = match self.sockets() {
            Ok(paths) => paths,
            Err(why) if self.is_reached() => return self.connect_by_manager(why),
            Err(_) => return,
        };
        let path = paths[self.turn % paths.len()].clone();
        let pid = self.process.id.pid;
        if self.kind(&path) != SocketKind::Own {
            return self.adopt(Client::shared(path, pid));
        }
        let mut client = Client::new(path);
        client.check_peer(pid);
        self.adopt(client);
    }

    /// Connects through libvirt if libvirt manages the VM. Otherwise the VM stays down, because of
    /// `why`: it has no socket for Ebb.
    fn connect_by_manager(&mut self, why: String) {
        let libvirt = self.libvirt.as_ref().filter(|_| self.may_ask_libvirt());
        let Some((libvirt, address)) =
            libvirt.and_then(|l| Some((l, l.find(&self.process, &mut self.inside)?)))
        else {
            (self.down, self.retry_at) = (Link::Down(why), Some(Instant::now() + BACKOFF.0));
            return;
        };
        // libvirt calls a domain with an agent tainted already: the agent needs an argument or a
        // variable of its own.
        let agent = self.agent.is_some() && self.access.agent_then != AgentUse::Off;
        let is_systems = address.is_systems();
        let client = libvirt.attach(address, agent);
        if is_systems {
            self.read_metadata();
        }
        match client {
            Ok(client) => self.adopt(client),
            Err(e) => self.down = Link::Down(format!("libvirt: {e}")),
        }
    }

    /// Drops a failed connection and sets when to try again.
    pub(super) fn reap(&mut self, now: Instant) {
        if self.client.as_ref().is_none_or(|c| c.protocol.failure().is_none()) {
            return;
        }
        self.take_events();
        self.down = self.link();
        // Another client is served, no process listens, or it is not this QEMU.
        if !self.ready {
            self.turn += 1;
        }
        if self.ready && self.adopted.is_some_and(|at| now - at >= LASTED) {
            self.backoff = BACKOFF.0;
        }
        self.forget_connection();
        self.retry_at = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
    }

    /// A new connection: what was known before may not hold any more.
    pub(super) fn first_answer(&mut self) {
        if self.ready {
            return;
        }
        self.ready = true;
        self.looked = false;
        (self.device, self.interval) = (None, None);
        self.forget_stats();
        (self.reporting, self.deflate_on_oom) = (None, None);
        self.unanswered.clear();
        self.events.push(VmEvent::Connected);
    }

    pub(super) fn link(&self) -> Link {
        let Some(client) = &self.client else { return self.down.clone() };
        if let Some((since, why)) = client.missed().filter(|_| client.protocol.failure().is_none())
        {
            let (path, s) = (client.path().display(), since.elapsed().as_secs_f64());
            return Link::Slow(format!("{path}: {why}; for {s:.1} s"));
        }
        match (client.protocol.state(), client.protocol.failure()) {
            (_, Some(e @ QmpError::Taken(..))) => Link::Taken(e.to_string()),
            (_, Some(e)) => Link::Down(e.to_string()),
            (state, _) if state.serves() && self.slow_since.is_none() && self.ready => Link::Up,
            (state, _) if state.serves() => {
                let silent = client.heard.elapsed().as_secs_f64();
                Link::Slow(format!("{}: no answer for {silent:.1} s", client.path().display()))
            }
            // Another attempt at a socket that serves another client.
            _ if matches!(self.down, Link::Taken(_)) => self.down.clone(),
            _ => Link::Slow(format!("{}: has not greeted yet", client.path().display())),
        }
    }
}
