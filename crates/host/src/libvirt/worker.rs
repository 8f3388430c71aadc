//! The thread that speaks with libvirt daemons: their sockets, the ends of VMs' QMP clients, and
//! which call is made when.
//!
//! libvirt carries out at most five calls of a connection at once, and a call on a domain that
//! hangs ends only after half a minute. So a connection of Ebb has at most [`AT_ONCE`] calls under
//! way. If all connections are busy, another is opened.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::bridge::{Bridge, Purpose};
use super::calls::{self, Domain, Procedure};
use super::rpc::{Heard, Refused, Rpc};
use super::watch::{Step, Watch, Watcher};
use super::{Address, Ask, Attach, PATIENCE};
use crate::beside::Beside;
use crate::qmp::Words;
use crate::sockets;
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
/// Statistics of all domains that have not come in this time are asked for anew: a QEMU has hung
/// during the call, and libvirt passes it over in the next one.
const BULK_PATIENCE: Duration = Duration::from_secs(1);
/// Ebb disconnects after this time without a domain. A libvirt daemon without clients may then end.
const IDLE: Duration = Duration::from_secs(30);

type Connected = rustix::io::Result<OwnedFd>;

/// What a call of a connection is for.
#[derive(Debug)]
enum For {
    Auth,
    Open,
    Register,
    /// Statistics of all domains, and when they were asked for.
    Bulk(Instant),
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
}

/// A VM's QMP client, as the thread sees it; `busy`: a call for it is under way.
#[derive(Debug)]
struct Client {
    /// The thread's end of the socket, or when the client left.
    end: Result<OwnedFd, Instant>,
    words: Words,
    bridge: Bridge,
    busy: bool,
}

#[derive(Debug)]
struct Daemon {
    address: Address,
    connections: Vec<Connection>,
    clients: BTreeMap<u64, Client>,
    watchers: BTreeMap<u64, Watcher>,
    bulk: Option<Instant>,
    gather: Option<Instant>,
    idle_since: Option<Instant>,
    inside: Beside<Connected>,
}

/// Serves until no [`super::Libvirt`] is left that could attach a VM.
pub(super) fn work(asks: &Receiver<Ask>, waker: &Waker) {
    let mut daemons: BTreeMap<PathBuf, Daemon> = BTreeMap::new();
    let mut next = 0;
    loop {
        loop {
            match asks.try_recv() {
                Ok(ask) => {
                    next += 1;
                    let (Ask::Attach(Attach { address, .. }) | Ask::Watch(address, _)) = &ask;
                    let new = || Daemon::new(address.clone());
                    let daemon = daemons.entry(address.key.clone()).or_insert_with(new);
                    if daemon.connections.is_empty() {
                        // The process that leads to it may be another's by now.
                        daemon.address = address.clone();
                    }
                    match ask {
                        Ask::Attach(ask) => daemon.attach(next, ask),
                        Ask::Watch(address, watch) => daemon.watch(next, address, watch),
                    }
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let now = Instant::now();
        daemons.values_mut().for_each(|d| d.turn(now));
        daemons.retain(|_, d| !d.is_left(now));
        let until = daemons.values().filter_map(|d| d.due(now)).min();
        let left = until.unwrap_or(Duration::from_secs(10));
        let ready = wait(&daemons, waker, left);
        let now = Instant::now();
        for (daemon, ready) in daemons.values_mut().zip(ready) {
            daemon.read(&ready, now);
        }
    }
}

/// For each daemon, which of its peers are ready: its connections, then its clients.
fn wait(daemons: &BTreeMap<PathBuf, Daemon>, waker: &Waker, left: Duration) -> Vec<Vec<bool>> {
    let mut fds = vec![PollFd::new(waker, PollFlags::IN)];
    let interest = |output: bool| {
        if output { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    };
    for daemon in daemons.values() {
        for c in &daemon.connections {
            fds.push(PollFd::new(&c.socket, interest(!c.rpc.outgoing().is_empty())));
        }
        for c in daemon.clients.values() {
            fds.extend(c.end.as_ref().map(|end| PollFd::new(end, interest(c.owes()))));
        }
    }
    let Ok(timeout) = left.try_into() else { return Vec::new() };
    let failed = poll(&mut fds, Some(&timeout)).is_err();
    if !fds[0].revents().is_empty() {
        waker.clear();
    }
    let ready: Vec<bool> = fds.iter().map(|fd| !failed && !fd.revents().is_empty()).collect();
    let mut rest = &ready[1..];
    let of = |d: &Daemon| {
        let there = d.clients.values().filter(|c| c.end.is_ok()).count();
        let (its, after) = rest.split_at(d.connections.len() + there);
        rest = after;
        its.to_vec()
    };
    daemons.values().map(of).collect()
}

/// What has come; `None`: the peer is gone.
fn received(socket: &OwnedFd) -> Option<Vec<u8>> {
    sockets::receive(socket).ok().filter(|(all, there)| *there || !all.is_empty()).map(|r| r.0)
}

impl Client {
    fn owes(&self) -> bool {
        !self.bridge.is_silent()
    }

    fn leave(&self, why: &str) {
        self.words.say(why);
    }
}

impl Connection {
    /// Connects to libvirt's socket and queues the first call. The error is a text for people.
    /// What a container has mounted may keep the look at its socket waiting: that is `inside`.
    fn open(address: &Address, inside: &mut Beside<Connected>) -> Result<Connection, String> {
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
        };
        new.call(calls::AUTH_LIST, &[], For::Auth);
        Ok(new)
    }

    fn call(&mut self, (program, procedure): Procedure, arguments: &[u8], purpose: For) {
        let serial = self.rpc.call(program, procedure, arguments);
        self.calls.insert(serial, purpose);
    }

    fn is_free(&self) -> bool {
        self.open && self.calls.len() < AT_ONCE
    }
}

impl Daemon {
    fn new(address: Address) -> Daemon {
        Daemon {
            address,
            connections: Vec::new(),
            clients: BTreeMap::new(),
            watchers: BTreeMap::new(),
            bulk: None,
            gather: None,
            idle_since: None,
            inside: Beside::default(),
        }
    }

    fn attach(&mut self, key: u64, ask: Attach) {
        let Attach { address, end, words, monitor } = ask;
        let bridge = Bridge::new(address.domain, monitor);
        self.clients.insert(key, Client { end: Ok(end), words, bridge, busy: false });
    }

    fn watch(&mut self, key: u64, address: Address, watch: Watch) {
        self.watchers.insert(key, Watcher::new(address.domain, watch));
    }

    fn has_work(&self) -> bool {
        !self.clients.is_empty() || !self.watchers.is_empty()
    }

    /// Whether Ebb is to disconnect from it and forget it.
    fn is_left(&mut self, now: Instant) -> bool {
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

    /// Makes the calls that are due, and writes.
    fn turn(&mut self, now: Instant) {
        self.watchers.retain(|_, w| w.is_wanted());
        if self.connections.is_empty() && self.has_work() {
            self.connect();
        }
        let hangs = |at: &mut Instant| now.saturating_duration_since(*at) >= BULK_PATIENCE;
        self.bulk.take_if(hangs);
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
        std::mem::take(&mut self.clients).values().for_each(|c| c.leave(why));
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

    fn ask_all(&mut self, now: Instant) {
        let wanted = |c: &Client| c.bridge.bulk_at().is_some_and(|at| at <= now);
        if !self.clients.values().any(wanted) {
            self.gather = None;
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
        let domains: Vec<_> = self.clients.values().filter_map(|c| c.bridge.domain()).collect();
        let arguments = calls::all_stats(domains.into_iter());
        self.connections[i].call(calls::ALL_STATS, &arguments, For::Bulk(now));
        (self.bulk, self.gather) = (Some(now), None);
    }

    fn ask_each(&mut self, now: Instant) {
        let keys: Vec<u64> =
            self.clients.iter().filter(|(_, c)| !c.busy).map(|(k, _)| *k).collect();
        for key in keys {
            let Some(client) = self.clients.get_mut(&key) else { continue };
            if !client.bridge.has_call() {
                continue;
            }
            let most = if client.bridge.has_order() { FOR_ORDERS } else { CONNECTIONS };
            let Some(i) = self.free(most) else { continue };
            let Some(client) = self.clients.get_mut(&key) else { continue };
            let Some((purpose, procedure, arguments)) = client.bridge.next_call(now) else {
                continue;
            };
            client.busy = true;
            self.connections[i].call(procedure, &arguments, For::Domain(key, purpose));
        }
    }

    fn ask_metadata(&mut self, now: Instant) {
        let due = |w: &Watcher| w.due(now).is_some_and(|at| at <= now);
        let keys: Vec<u64> =
            self.watchers.iter().filter(|(_, w)| due(w)).map(|(k, _)| *k).collect();
        for key in keys {
            let Some(i) = self.free(CONNECTIONS) else { return };
            let Some(watcher) = self.watchers.get_mut(&key) else { continue };
            let (step, procedure, arguments) = watcher.call(now);
            self.connections[i].call(procedure, &arguments, For::Watch(key, step));
        }
    }

    fn flush(&mut self) {
        let mut lost = false;
        for c in &mut self.connections {
            let sent = sockets::send(&c.socket, c.rpc.outgoing()).map(|n| c.rpc.written(n));
            lost |= sent.is_err() || c.rpc.outgoing().len() > MAX_OUTPUT;
        }
        if lost {
            return self.lose(ENDED);
        }
        self.clients.retain(|_, c| {
            let there = match &c.end {
                Ok(end) => {
                    let sent = sockets::send(end, c.bridge.output());
                    let sent = sent.map(|n| drop(c.bridge.output().drain(..n)));
                    sent.is_ok() && c.bridge.output().len() <= MAX_OUTPUT
                }
                Err(left) => {
                    c.bridge.output().clear();
                    (c.busy || c.bridge.has_order()) && left.elapsed() < LAST_WISHES
                }
            };
            if let Some(why) = c.bridge.over() {
                c.leave(why);
            }
            there && c.bridge.over().is_none()
        });
    }

    /// `ready` tells of each connection, then of each client, whether it is ready.
    fn read(&mut self, ready: &[bool], now: Instant) {
        let (connections, clients) = ready.split_at(self.connections.len().min(ready.len()));
        let there = self.clients.values_mut().filter(|c| c.end.is_ok());
        for (client, _) in there.zip(clients).filter(|(_, r)| **r) {
            match client.end.as_ref().ok().and_then(received) {
                Some(bytes) => client.bridge.feed(&bytes, now),
                None => client.end = Err(now),
            }
        }
        let mut all = Vec::new();
        for (i, c) in self.connections.iter_mut().enumerate() {
            if !connections.get(i).is_some_and(|r| *r) {
                continue;
            }
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
        let odd = |e| format!("libvirt: {e}; connection dropped");
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
        match purpose {
            For::Domain(key, purpose) => {
                if let Some(client) = self.clients.get_mut(&key) {
                    client.busy = false;
                    client.bridge.answered(purpose, result, now);
                }
            }
            For::Watch(key, step) => {
                let Some(watcher) = self.watchers.get_mut(&key) else { return Ok(()) };
                if let Err(why) = watcher.answered(step, result) {
                    watcher.end(&why);
                    self.watchers.remove(&key);
                }
            }
            For::Bulk(asked) => {
                if self.bulk == Some(asked) {
                    self.bulk = None;
                }
                // Refused: the domains' clients wait, and it is asked again.
                let all = result.map_or(Ok(Vec::new()), |all| calls::all_stats_of(&all));
                let all = all.map_err(odd)?;
                for (domain, numbers) in all {
                    let is = |c: &&mut Client| {
                        let its = |d: &Domain| (d.uuid, d.id) == (domain.uuid, domain.id);
                        c.bridge.domain().is_some_and(its)
                    };
                    let of = self.clients.values_mut().filter(is);
                    of.for_each(|c| c.bridge.heard_stats(asked, numbers.clone(), now));
                }
                self.clients.values_mut().for_each(|c| c.bridge.tried(asked));
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
            For::Auth => {
                let uri = calls::open(self.address.uri);
                self.connections[i].call(calls::OPEN, &uri, For::Open);
            }
            For::Open => {
                let first = !self.connections.iter().any(|c| c.tells);
                let connection = &mut self.connections[i];
                (connection.open, connection.tells) = (true, first);
                for event in calls::EVENTS.iter().filter(|_| first) {
                    connection.call(calls::REGISTER, &calls::register(*event), For::Register);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

const ENDED: &str = "libvirt closed the connection: it restarts, or has ended";

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::mpsc::channel;

    use super::super::{inode, open_inside};
    use super::*;

    /// Two processes of one container lead to its libvirt; the first ends, and another container's
    /// process gets its number.
    #[test]
    fn a_libvirt_in_a_container_is_reached_by_who_is_there_and_by_no_number_of_before() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        let me = std::process::id().to_string();
        for process in ["10", "11", me.as_str()] {
            fs::create_dir_all(at(process).join("ns")).unwrap();
            symlink("pid:[2]", at(process).join("ns/pid")).unwrap();
        }
        let [its, others] = ["its", "others"].map(|pod| {
            fs::create_dir(at(pod)).unwrap();
            let listener = UnixListener::bind(at(pod).join("libvirt-sock")).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        });
        symlink(at("others"), at("10/root")).unwrap();
        symlink(at("its"), at("11/root")).unwrap();
        let key = inode(&open_inside(&at("its"), Path::new("libvirt-sock")).unwrap()).unwrap();
        let address = |process: &str| Address {
            socket: at(process).join("root/libvirt-sock"),
            key: key.clone(),
            uri: "qemu:///system",
            domain: "a".into(),
            owner: None,
            container: Some(at(process).join("root")),
        };
        let (asks, asked) = channel();
        let waker = Waker::new().unwrap();
        let woken = waker.clone();
        let thread = std::thread::spawn(move || work(&asked, &woken));
        let attach = |process: &str| {
            let (ours, end) = UnixStream::pair().unwrap();
            end.set_nonblocking(true).unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let words = Words::default();
            let ask = Attach {
                address: address(process),
                end: end.into(),
                words: words.clone(),
                monitor: false,
            };
            asks.send(Ask::Attach(ask)).unwrap();
            waker.wake();
            (ours, words)
        };
        let (mut ours, _) = attach("10");
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "it is turned away");
        let (_ours, _) = attach("11");
        let until = Instant::now() + Duration::from_secs(10);
        let accepted = loop {
            match its.accept() {
                Ok(there) => break there,
                Err(_) => assert!(Instant::now() < until, "its libvirt is not asked"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(others.accept().is_err(), "another's libvirt is not spoken to");
        drop((accepted, asks));
        waker.wake();
        thread.join().unwrap();
    }

    #[test]
    fn a_daemon_is_left_when_it_has_had_no_domain_for_long() {
        let address = Address {
            socket: "/nonexistent".into(),
            key: "/nonexistent".into(),
            uri: "qemu:///system",
            domain: "a".into(),
            owner: Some(0),
            container: None,
        };
        let mut daemon = Daemon::new(address);
        let now = Instant::now();
        assert!(!daemon.is_left(now));
        assert!(!daemon.is_left(now + IDLE / 2));
        assert_eq!(daemon.due(now), Some(IDLE));
        assert!(daemon.is_left(now + IDLE));
    }
}
