//! The thread that speaks with libvirt daemons: their sockets, the ends of VMs' QMP clients, and
//! which call is made when.
//!
//! libvirt carries out at most five calls of a connection at once, and a call on a domain that
//! hangs ends only after half a minute. So a connection of Ebb has few calls under way at once. If
//! all connections are busy, another is opened.
//!
//! A call on a domain that libvirt has locked hangs as long as the lock is held, and so does one on
//! all domains, without regard to `NOWAIT`. (`virsh dump` into a FIFO without a reader locks its
//! domain.) So after a call on all domains that hung each is asked alone, and those that answer are
//! asked together again. A domain with a call under way gets no other call, so hung calls do not
//! add up.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::bridge::{Bridge, Purpose};
use super::calls::{self, Domain, Numbers, Request};
use super::rpc::{Heard, Refused, Rpc};
use super::watch::{Step, Watcher};
use super::{Address, PATIENCE, WorkerRequest};
use crate::background_look::BackgroundLook;
use crate::qmp::Words;
use crate::sockets::{self, interest};
use crate::waker::Waker;

/// Calls under way on one connection; libvirt's own limit is 5.
const AT_ONCE: usize = 3;
/// Connections to one daemon for questions; libvirt has 20 threads for all its clients.
const CONNECTIONS: usize = 4;
/// Connections to one daemon in all. The last is for orders only: they go out although QEMUs hang.
const FOR_ORDERS: usize = CONNECTIONS + 1;
/// Most bytes that wait until a peer takes them.
const MAX_OUTPUT: usize = 1 << 20;
/// How long orders of a client that has left are still carried out.
const LAST_WISHES: Duration = Duration::from_secs(5);
/// How long, after the first question of a tick, the others are awaited; one call serves all.
const GATHER: Duration = Duration::from_millis(2);
/// If no connection is free, the call is made this much later.
const AGAIN: Duration = Duration::from_millis(20);
/// Where statistics of all domains have not come in this time, each domain is asked alone.
const BULK_PATIENCE: Duration = Duration::from_secs(1);
/// The errors of a libvirt that refuses statistics in any case: `VIR_ERR_NO_SUPPORT`, `_INVALID_ARG`
/// (it is older than a flag), `_ACCESS_DENIED`.
const FOR_GOOD: [i32; 3] = [3, 8, 88];
/// Ebb disconnects after this time without a domain. A libvirt daemon without clients may then end.
const IDLE: Duration = Duration::from_secs(30);

type Connected = rustix::io::Result<OwnedFd>;

#[derive(Debug)]
enum For {
    Auth,
    Open,
    Register,
    /// Statistics of all domains, and when they were asked for.
    Bulk(Instant),
    /// Statistics of this client's domain alone, and when they were asked for.
    Alone(u64, Instant),
    Domain(u64, Purpose),
    Watch(u64, Step),
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    rpc: Rpc,
    calls: BTreeMap<u32, For>,
    open: bool,
    /// Events come on this connection.
    tells: bool,
    /// Something was to be read at the last look.
    ready: bool,
}

/// A VM's QMP client, as the thread sees it; `busy`: a call for it is under way.
#[derive(Debug)]
struct Client {
    /// The thread's end of the socket, or when the client left.
    end: Result<OwnedFd, Instant>,
    words: Words,
    bridge: Bridge,
    busy: bool,
    /// Its domain is not in the call on all domains, which hung.
    alone: bool,
    /// As of a [`Connection`].
    ready: bool,
}

#[derive(Debug, Default)]
struct Daemon {
    address: Address,
    connections: Vec<Connection>,
    clients: BTreeMap<u64, Client>,
    /// Domains with a call under way whose client is gone.
    left: BTreeMap<u64, String>,
    watchers: BTreeMap<u64, Watcher>,
    bulk: Option<Instant>,
    gather: Option<Instant>,
    idle_since: Option<Instant>,
    inside: BackgroundLook<Connected>,
}

/// Serves until no [`super::Libvirt`] is left that could attach a VM.
pub(super) fn work(requests: &Receiver<WorkerRequest>, waker: &Waker) {
    let mut daemons: BTreeMap<PathBuf, Daemon> = BTreeMap::new();
    let mut next = 0;
    loop {
        loop {
            match requests.try_recv() {
                Ok(request) => {
                    next += 1;
                    let (WorkerRequest::Attach { address, .. } | WorkerRequest::Watch(address, _)) =
                        &request;
                    let daemon = daemons.entry(address.key.clone()).or_default();
                    if daemon.connections.is_empty() {
                        // The process that leads to it may be another's by now.
                        daemon.address = address.clone();
                    }
                    daemon.take_on(next, request);
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let now = Instant::now();
        daemons.values_mut().for_each(|d| d.turn(now));
        daemons.retain(|_, d| !d.count_idle(now));
        let until = daemons.values().filter_map(|d| d.due(now)).min();
        let left = until.unwrap_or(Duration::from_secs(10));
        wait(&mut daemons, waker, left);
        let now = Instant::now();
        daemons.values_mut().for_each(|d| d.read(now));
    }
}

/// Waits until one of the daemons' peers is ready, and notes which are.
fn wait(daemons: &mut BTreeMap<PathBuf, Daemon>, waker: &Waker, left: Duration) {
    let mut fds = vec![PollFd::new(waker, PollFlags::IN)];
    for daemon in daemons.values() {
        for c in &daemon.connections {
            fds.push(PollFd::new(&c.socket, interest(!c.rpc.outbox.is_empty())));
        }
        for c in daemon.clients.values() {
            fds.extend(
                c.end.as_ref().map(|end| PollFd::new(end, interest(!c.bridge.output.is_empty()))),
            );
        }
    }
    let ready = sockets::ready(&mut fds, left);
    if ready[0] {
        waker.clear();
    }
    let mut ready = ready.into_iter().skip(1);
    for daemon in daemons.values_mut() {
        daemon.connections.iter_mut().for_each(|c| c.ready = ready.next() == Some(true));
        let there = daemon.clients.values_mut().filter(|c| c.end.is_ok());
        there.for_each(|c| c.ready = ready.next() == Some(true));
    }
}

/// The keys of those of which this is true.
fn keys<T>(all: &BTreeMap<u64, T>, is: impl Fn(&T) -> bool) -> Vec<u64> {
    all.iter().filter(|(_, one)| is(one)).map(|(key, _)| *key).collect()
}

/// What has come; `None`: the peer is gone.
fn received(socket: &OwnedFd) -> Option<Vec<u8>> {
    sockets::receive(socket).ok().filter(|(all, there)| *there || !all.is_empty()).map(|r| r.0)
}

impl Connection {
    /// Connects to libvirt's socket and queues the first call. The error is a text for people.
    /// What a container has mounted may keep the look at its socket waiting: that is `inside`.
    fn open(
        address: &Address,
        inside: &mut BackgroundLook<Connected>,
    ) -> Result<Connection, String> {
        let path = address.socket.display();
        let socket = match &address.container {
            None => address.connect(),
            Some(_) => {
                let address = address.clone();
                let found = inside.look(move || address.connect(), PATIENCE);
                found.unwrap_or(Err(Errno::TIMEDOUT))
            }
        };
        let socket = socket.map_err(|e| match e {
            Errno::NOENT | Errno::CONNREFUSED => {
                format!("{path}: libvirt does not run: start libvirtd or virtqemud")
            }
            Errno::ACCESS | Errno::PERM => format!("{path}: permission denied: run Ebb as root"),
            e => format!("{path}: {e}"),
        })?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).map_err(|e| e.to_string())?;
        let pid = peer.pid.as_raw_pid().cast_unsigned();
        if !address.is_of(pid) {
            return Err(format!("{path}: served by process {pid} of another pid namespace"));
        }
        let peer = peer.uid.as_raw();
        // A link in a user's directory may lead to the system's socket.
        if let Some(owner) = address.owner.filter(|owner| *owner != peer) {
            return Err(format!("{path}: served by a process of uid {peer}, not of uid {owner}"));
        }
        let mut new = Connection {
            socket,
            rpc: Rpc::new(address.container.is_some()),
            calls: BTreeMap::new(),
            open: false,
            tells: false,
            ready: false,
        };
        new.call((calls::AUTH_LIST, Vec::new()), For::Auth);
        Ok(new)
    }

    fn call(&mut self, ((program, procedure), arguments): Request, purpose: For) {
        let serial = self.rpc.call(program, procedure, &arguments);
        self.calls.insert(serial, purpose);
    }

    fn is_free(&self) -> bool {
        self.open && self.calls.len() < AT_ONCE
    }
}

impl Client {
    /// Statistics that were asked for at `asked` have come.
    fn heard(&mut self, stats: &[(Domain, Numbers)], asked: Instant, now: Instant) {
        let domain = self.bridge.domain.as_ref();
        let its =
            |(d, _): &&(Domain, Numbers)| domain.is_some_and(|i| (i.uuid, i.id) == (d.uuid, d.id));
        match stats.iter().find(its) {
            Some((_, numbers)) => self.bridge.heard_stats(asked, numbers.clone(), now),
            None => self.bridge.tried = Some(asked),
        }
    }
}

impl Daemon {
    fn take_on(&mut self, key: u64, request: WorkerRequest) {
        match request {
            WorkerRequest::Attach { address, end, words, monitor } => {
                let bridge = Bridge::new(address.domain, monitor);
                let (busy, alone, ready) = (false, false, false);
                self.clients
                    .insert(key, Client { end: Ok(end), words, bridge, busy, alone, ready });
            }
            WorkerRequest::Watch(address, watch) => {
                self.watchers.insert(key, Watcher::new(address.domain, watch));
            }
        }
    }

    fn has_work(&self) -> bool {
        !self.clients.is_empty() || !self.watchers.is_empty()
    }

    /// Whether Ebb is to disconnect from it and forget it.
    fn count_idle(&mut self, now: Instant) -> bool {
        if self.has_work() {
            self.idle_since = None;
            return false;
        }
        now - *self.idle_since.get_or_insert(now) >= IDLE
    }

    /// How long until there is something to do, if nothing comes before.
    fn due(&self, now: Instant) -> Option<Duration> {
        let idle = self.idle_since.map(|at| at + IDLE);
        let gathered = self.gather.filter(|_| self.bulk.is_none()).map(|at| at + GATHER);
        let bulk = self.bulk.map(|at| at + BULK_PATIENCE);
        let later = self.clients.values().filter_map(|c| c.bridge.bulk_at());
        let later = later.chain(self.watchers.values().filter_map(|w| w.due(now)));
        let later = later.filter(|at| *at > now);
        let due = idle.into_iter().chain(gathered).chain(bulk).chain(later).min()?;
        Some(due.saturating_duration_since(now))
    }

    fn turn(&mut self, now: Instant) {
        self.watchers.retain(|_, w| w.is_wanted());
        if self.connections.is_empty() && self.has_work() {
            self.connect();
        }
        let hangs = |at: &mut Instant| now.saturating_duration_since(*at) >= BULK_PATIENCE;
        if self.bulk.take_if(hangs).is_some() {
            self.clients.values_mut().for_each(|c| c.alone = true);
        }
        self.ask_all(now);
        self.ask_each(now);
        self.ask_metadata(now);
        self.flush();
    }

    /// Opens one more connection. If that fails and there is no other, all clients are told why.
    fn connect(&mut self) {
        match Connection::open(&self.address, &mut self.inside) {
            Ok(connection) => self.connections.push(connection),
            Err(why) if self.connections.is_empty() => self.lose(&why),
            Err(_) => {}
        }
    }

    fn lose(&mut self, why: &str) {
        self.connections.clear();
        (self.bulk, self.gather) = (None, None);
        self.left.clear();
        std::mem::take(&mut self.clients).values().for_each(|c| drop(c.words.set(why.into())));
        std::mem::take(&mut self.watchers).values().for_each(|w| w.end(why));
    }

    /// One of the first `most` connections that takes a call now. If all are busy, another is
    /// opened, which later calls use.
    fn free(&mut self, most: usize) -> Option<usize> {
        let free = self.connections.iter().take(most).position(Connection::is_free);
        let all_open = self.connections.iter().all(|c| c.open);
        if free.is_none() && all_open && self.connections.len() < most {
            self.connect();
        }
        free
    }

    /// Asks for statistics: of those domains together whose client is not `alone`.
    fn ask_all(&mut self, now: Instant) {
        let wanted = |c: &Client| c.bridge.bulk_at().is_some_and(|at| at <= now);
        let alone = |c: &Client| c.alone && !c.busy && wanted(c);
        for key in keys(&self.clients, alone) {
            let Some(domain) = self.clients.get(&key).and_then(|c| c.bridge.domain.as_ref()) else {
                continue;
            };
            let request = calls::all_stats(std::iter::once(domain));
            let Some(i) = self.free(CONNECTIONS) else { break };
            self.connections[i].call(request, For::Alone(key, now));
            self.clients.entry(key).and_modify(|c| c.busy = true);
        }
        if !self.clients.values().any(|c| !c.alone && wanted(c)) {
            self.gather = self.clients.values().any(alone).then_some(now + AGAIN);
            return;
        }
        let gathered = now - *self.gather.get_or_insert(now) >= GATHER;
        if self.bulk.is_some() || !gathered {
            return;
        }
        let Some(i) = self.free(CONNECTIONS) else {
            self.gather = Some(now + AGAIN);
            return;
        };
        let together = self.clients.values().filter(|c| !c.alone);
        let domains: Vec<_> = together.filter_map(|c| c.bridge.domain.as_ref()).collect();
        let request = calls::all_stats(domains.into_iter());
        self.connections[i].call(request, For::Bulk(now));
        (self.bulk, self.gather) = (Some(now), None);
    }

    fn ask_each(&mut self, now: Instant) {
        // Domains with a call under way for them alone, also one of an earlier client.
        let busy = self.clients.values().filter(|c| c.busy).map(|c| c.bridge.name.as_str());
        let busy: BTreeSet<&str> = busy.chain(self.left.values().map(String::as_str)).collect();
        let due = |c: &Client| c.bridge.has_call() && !busy.contains(c.bridge.name.as_str());
        for key in keys(&self.clients, due) {
            let Some(client) = self.clients.get_mut(&key) else { continue };
            let most = if client.bridge.has_order() { FOR_ORDERS } else { CONNECTIONS };
            let Some(i) = self.free(most) else { continue };
            let Some(client) = self.clients.get_mut(&key) else { continue };
            let Some((purpose, request)) = client.bridge.next_call(now) else { continue };
            client.busy = true;
            self.connections[i].call(request, For::Domain(key, purpose));
        }
    }

    fn ask_metadata(&mut self, now: Instant) {
        let due = |w: &Watcher| w.due(now).is_some_and(|at| at <= now);
        for key in keys(&self.watchers, due) {
            let Some(i) = self.free(CONNECTIONS) else { return };
            let Some(watcher) = self.watchers.get_mut(&key) else { continue };
            let (step, request) = watcher.call(now);
            self.connections[i].call(request, For::Watch(key, step));
        }
    }

    fn flush(&mut self) {
        let mut lost = false;
        for c in &mut self.connections {
            let sent = sockets::send(&c.socket, &mut c.rpc.outbox, &mut None);
            lost |= sent.is_err() || c.rpc.outbox.len() > MAX_OUTPUT;
        }
        if lost {
            return self.lose(ENDED);
        }
        let left = &mut self.left;
        self.clients.retain(|key, c| {
            let there = match &c.end {
                Ok(end) => {
                    let sent = sockets::send(end, &mut c.bridge.output, &mut None);
                    sent.is_ok() && c.bridge.output.len() <= MAX_OUTPUT
                }
                Err(left) => {
                    c.bridge.output.clear();
                    (c.busy || c.bridge.has_order()) && left.elapsed() < LAST_WISHES
                }
            };
            if let Some(why) = &c.bridge.over {
                let _ = c.words.set(why.clone());
            }
            let stays = there && c.bridge.over.is_none();
            if !stays && c.busy {
                left.insert(*key, c.bridge.name.clone());
            }
            stays
        });
    }

    /// Takes in what has come from those that are ready.
    fn read(&mut self, now: Instant) {
        for client in self.clients.values_mut().filter(|c| c.ready && c.end.is_ok()) {
            match client.end.as_ref().ok().and_then(received) {
                Some(bytes) => client.bridge.feed(&bytes, now),
                None => client.end = Err(now),
            }
        }
        let mut all = Vec::new();
        for (i, c) in self.connections.iter_mut().enumerate().filter(|(_, c)| c.ready) {
            let Some(bytes) = received(&c.socket) else { return self.lose(ENDED) };
            match c.rpc.feed(&bytes) {
                Ok(heard) => all.extend(heard.into_iter().map(|h| (i, h))),
                Err(e) => return self.lose(&format!("libvirt: {e}; connection dropped")),
            }
        }
        for (i, heard) in all {
            if let Err(why) = self.hear(i, heard, now) {
                return self.lose(&why);
            }
        }
    }

    /// The error ends all connections.
    fn hear(&mut self, i: usize, heard: Heard, now: Instant) -> Result<(), String> {
        let (serial, result) = match heard {
            Heard::Answer { serial, result } => (serial, result),
            Heard::Event(procedure, body) => {
                let Some((domain, event)) = calls::event(procedure, &body).map_err(odd)? else {
                    return Ok(());
                };
                for client in self.clients.values_mut() {
                    client.bridge.event(&domain, event.clone(), now);
                }
                self.watchers.retain(|_, w| w.event(&domain, &event));
                return Ok(());
            }
        };
        let Some(purpose) = self.connections[i].calls.remove(&serial) else { return Ok(()) };
        if let For::Domain(key, _) | For::Alone(key, _) = &purpose {
            self.left.remove(key);
        }
        if let (For::Bulk(_) | For::Alone(..), Err(e)) = (&purpose, &result)
            && FOR_GOOD.contains(&e.code)
        {
            let why = format!("{}: libvirt refuses statistics: {e}", self.address.socket.display());
            let asked = self.clients.iter_mut().filter(|(key, c)| match &purpose {
                For::Alone(its, _) => its == *key,
                _ => c.end.is_ok() && !c.alone,
            });
            asked.for_each(|(_, c)| c.bridge.over = Some(why.clone()));
        }
        match purpose {
            For::Domain(key, purpose) => {
                if let Some(client) = self.clients.get_mut(&key) {
                    client.busy = false;
                    client.bridge.answered(purpose, result, now);
                }
            }
            For::Watch(key, step) => {
                let Some(watcher) = self.watchers.get_mut(&key) else { return Ok(()) };
                if matches!(step, Step::Write(_)) && result.is_ok() {
                    let its = self.clients.values_mut().filter(|c| c.bridge.name == watcher.name);
                    its.for_each(|c| c.bridge.gave_back_job(now));
                }
                if let Err(why) = watcher.answered(step, result) {
                    watcher.end(&why);
                    self.watchers.remove(&key);
                }
            }
            For::Bulk(asked) => {
                if self.bulk == Some(asked) {
                    self.bulk = None;
                }
                let stats = statistics(result)?;
                for client in self.clients.values_mut().filter(|c| !c.alone) {
                    client.heard(&stats, asked, now);
                }
            }
            For::Alone(key, asked) => {
                let stats = statistics(result)?;
                if let Some(client) = self.clients.get_mut(&key) {
                    (client.busy, client.alone) = (false, false);
                    client.heard(&stats, asked, now);
                }
            }
            purpose => self.handshake(i, &purpose, result)?,
        }
        Ok(())
    }

    fn handshake(
        &mut self,
        i: usize,
        purpose: &For,
        result: Result<Vec<u8>, Refused>,
    ) -> Result<(), String> {
        let path = self.address.socket.display();
        result.map_err(|e| format!("{path}: libvirt refuses: {e}"))?;
        match purpose {
            For::Auth => self.connections[i].call(calls::open(self.address.uri), For::Open),
            For::Open => {
                let first = !self.connections.iter().any(|c| c.tells);
                let connection = &mut self.connections[i];
                (connection.open, connection.tells) = (true, first);
                for event in calls::EVENTS.iter().filter(|_| first) {
                    connection.call(calls::register(*event), For::Register);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Statistics of domains. Refused ones are none: the domains' clients wait, and it is asked again.
fn statistics(result: Result<Vec<u8>, Refused>) -> Result<Vec<(Domain, Numbers)>, String> {
    result.map_or(Ok(Vec::new()), |all| calls::all_stats_of(&all)).map_err(odd)
}

fn odd(e: impl std::fmt::Display) -> String {
    format!("libvirt: {e}; connection dropped")
}

const ENDED: &str = "libvirt closed the connection: it restarts, or has ended";

#[cfg(test)]
mod tests;
