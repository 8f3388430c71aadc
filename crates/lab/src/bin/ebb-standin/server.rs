//! QMP as QEMU serves it: one client at a time, commands in their order, `BALLOON_CHANGE` at
//! most once a second. And the socket of the test beside it.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

use crate::faults::Faults;
use crate::guest::Guest;

/// QEMU tells of a balloon that moves so often.
const EVENTS_EVERY: Duration = Duration::from_secs(1);
/// For whoever does not read what is written to it.
const PATIENCE: Duration = Duration::from_secs(5);
const ORDERS: usize = 1000;

/// A command that was read and not carried out yet.
struct Waiting {
    due: Instant,
    client: u64,
    command: Value,
}

struct Client {
    stream: UnixStream,
    number: u64,
    unread: Vec<u8>,
}

pub struct Server {
    qmp: UnixListener,
    test: UnixListener,
    client: Option<Client>,
    clients: u64,
    commands: u64,
    waiting: VecDeque<Waiting>,
    faults: Faults,
    guest: Guest,
    orders: VecDeque<Value>,
    /// What the last event told, and when.
    event: (u64, Instant),
}

impl Server {
    pub fn new(socket: &Path, guest: Guest) -> io::Result<Server> {
        let mut test = socket.as_os_str().to_owned();
        test.push(".test");
        // QMP first: who finds the test's socket finds both.
        Ok(Server {
            qmp: UnixListener::bind(socket)?,
            test: UnixListener::bind(test)?,
            client: None,
            clients: 0,
            commands: 0,
            waiting: VecDeque::new(),
            faults: Faults::default(),
            event: (guest.sizes().1, Instant::now()),
            guest,
            orders: VecDeque::new(),
        })
    }

    /// Serves until it is killed.
    pub fn serve(&mut self) -> io::Result<()> {
        loop {
            let now = Instant::now();
            self.turn(now);
            let (test, client) = self.wait(self.next(now))?;
            if client {
                self.hear();
            }
            if test {
                // A test that goes away has no wish.
                let _ = self.serve_test();
            }
        }
    }

    /// Sleeps; whether a test and whether a client has something to say.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<(bool, bool)> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.test.as_fd(), PollFlags::IN)];
        if !self.faults.hang {
            let fd = self.client.as_ref().map_or(self.qmp.as_fd(), |c| c.stream.as_fd());
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let timeout = timeout.map(|t| t.try_into().unwrap_or_default());
        poll(&mut fds, timeout.as_ref())?;
        let ready = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
        Ok((ready(0), ready(1)))
    }

    /// How long nothing is due.
    fn next(&self, now: Instant) -> Option<Duration> {
        let due = self.waiting.front().map(|w| w.due).filter(|_| !self.faults.hang);
        let tells = self.guest.sizes().1 != self.event.0;
        let event = tells.then_some(self.event.1 + EVENTS_EVERY);
        let moves = self.guest.arrives().filter(|_| !self.faults.hang);
        let event = event.filter(|_| self.client.is_some() && !self.faults.hang);
        let next = [due, moves, event].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn turn(&mut self, now: Instant) {
        self.guest.pass(now, self.faults.hang);
        if self.faults.hang {
            return;
        }
        while self.waiting.front().is_some_and(|w| w.due <= now) {
            let Some(w) = self.waiting.pop_front() else { break };
            self.carry_out(&w, now);
        }
        let told = self.guest.sizes().1;
        if told != self.event.0 && now.saturating_duration_since(self.event.1) >= EVENTS_EVERY {
            self.event = (told, now);
            self.tell(&event("BALLOON_CHANGE", json!({ "actual": told })));
        }
        if self.client.is_some()
            && let Some(garbage) = self.faults.garbage.take()
        {
            self.say(&garbage);
        }
    }

    /// Takes a new client, or what the present one sent.
    fn hear(&mut self) {
        let Some(client) = &mut self.client else { return self.accept() };
        let mut bytes = [0; 16 << 10];
        let read = client.stream.read(&mut bytes).unwrap_or(0);
        if read == 0 {
            // What it had asked for before is done all the same.
            self.client = None;
            return;
        }
        client.unread.extend_from_slice(&bytes[..read]);
        let number = client.number;
        while let Some(line) = self.client.as_mut().and_then(next_line) {
            let command = serde_json::from_slice(&line).unwrap_or(Value::Null);
            self.commands += 1;
            self.note_order(&command);
            let due = Instant::now() + self.faults.latency;
            self.waiting.push_back(Waiting { due, client: number, command });
        }
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.qmp.accept() else { return };
        self.clients += 1;
        if self.faults.refuse || stream.set_write_timeout(Some(PATIENCE)).is_err() {
            return;
        }
        self.client = Some(Client { stream, number: self.clients, unread: Vec::new() });
        if !self.faults.mute {
            let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 }, "package": "" });
            self.tell(&json!({ "QMP": { "version": version, "capabilities": ["oob"] } }));
        }
    }

    /// Remembers an order of Ebb's with what its state file says of this VM at that moment.
    fn note_order(&mut self, command: &Value) {
        if command["execute"] != "balloon" {
            return;
        }
        let owned = self.faults.watch.as_ref().map(|path| entry(path));
        let (_, told, _) = self.guest.sizes();
        let order = json!({ "to": command["arguments"]["value"], "told": told, "owned": owned });
        if self.orders.len() == ORDERS {
            self.orders.pop_front();
        }
        self.orders.push_back(order);
    }

    fn carry_out(&mut self, w: &Waiting, now: Instant) {
        let name = w.command["execute"].as_str().unwrap_or_default();
        let answer = match (self.faults.errors.get(name), self.faults.answers.get(name)) {
            (Some(desc), _) => Err(desc.clone()),
            (None, Some(value)) => Ok(value.clone()),
            (None, None) => self.execute(name, &w.command["arguments"], now),
        };
        if name == "balloon" && std::mem::take(&mut self.faults.loses) {
            return self.client = None;
        }
        let id = &w.command["id"];
        let said = match answer {
            Ok(value) => json!({ "return": value, "id": id }),
            Err(desc) => {
                json!({ "error": { "class": "GenericError", "desc": desc }, "id": id })
            }
        };
        if self.client.as_ref().is_some_and(|c| c.number == w.client) {
            self.tell(&said);
        }
    }

    fn execute(&mut self, name: &str, with: &Value, now: Instant) -> Result<Value, String> {
        let guest = &mut self.guest;
        Ok(match name {
            "qmp_capabilities" => json!({}),
            "query-status" => json!({ "status": guest.run, "running": guest.run == "running" }),
            "query-migrate" => json!({}),
            "query-memory-size-summary" => json!({ "base-memory": guest.ram, "plugged-memory": 0 }),
            "query-balloon" => json!({ "actual": guest.sizes().1 }),
            "balloon" => {
                guest.order(with["value"].as_u64().ok_or("Parameter 'value' is missing")?);
                json!({})
            }
            "qom-list" if with["path"] == "/machine/peripheral-anon" => {
                json!([{ "name": "device[0]", "type": "child<virtio-balloon-pci>" }])
            }
            "qom-list" => json!([]),
            "qom-get" => match with["property"].as_str().unwrap_or_default() {
                "guest-stats" => guest.statistics(now),
                "guest-stats-polling-interval" => json!(guest.interval_s),
                "free-page-reporting" => json!(guest.reports),
                "deflate-on-oom" => json!(guest.deflates),
                other => return Err(format!("Property 'virtio-balloon-pci.{other}' not found")),
            },
            "qom-set" if with["property"] == "guest-stats-polling-interval" => {
                guest.set_interval(with["value"].as_u64().unwrap_or(0), now);
                json!({})
            }
            _ => return Err(format!("The command {name} has not been found")),
        })
    }

    fn tell(&mut self, message: &Value) {
        self.say(&format!("{message}\r\n"));
    }

    fn say(&mut self, text: &str) {
        let Some(client) = &mut self.client else { return };
        if client.stream.write_all(text.as_bytes()).is_err() {
            self.client = None;
        }
    }

    fn serve_test(&mut self) -> io::Result<()> {
        let (mut stream, _) = self.test.accept()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        let wishes: Value = serde_json::from_str(&line)?;
        let now = Instant::now();
        self.guest.pass(now, self.faults.hang);
        for (key, value) in wishes.as_object().into_iter().flatten() {
            self.wish(key, value, now)?;
        }
        self.turn(now);
        stream.write_all(self.truth().to_string().as_bytes())
    }

    fn wish(&mut self, key: &str, value: &Value, now: Instant) -> io::Result<()> {
        let number = value.as_u64().unwrap_or_default();
        match key {
            "order" => self.guest.order(number),
            "need" => self.guest.need = number,
            "speed" => self.guest.speed = number,
            "follows" => self.guest.follows = value == true,
            "run" => self.guest.run = value.as_str().unwrap_or("running").into(),
            "help" => self.guest.help_itself(number),
            "cut" => self.client = None,
            "reset" => {
                self.guest.reset(now);
                self.tell(&event("RESET", json!({ "guest": true, "reason": "guest-reset" })));
            }
            _ if self.faults.take(key, value) => {}
            _ => return Err(io::Error::other(format!("no such wish: {key}"))),
        }
        if key == "latency_ms" {
            let latest = now + self.faults.latency;
            self.waiting.iter_mut().for_each(|w| w.due = w.due.min(latest));
        }
        Ok(())
    }

    /// How it stands: sizes, the orders that it was given and those that it has not carried
    /// out yet, how often it was asked anything and by how many clients.
    fn truth(&self) -> Value {
        let (size, told, target) = self.guest.sizes();
        let orders = self.waiting.iter().filter(|w| w.command["execute"] == "balloon");
        let waiting: Vec<&Value> = orders.map(|w| &w.command["arguments"]["value"]).collect();
        json!({
            "ram": self.guest.ram, "size": size, "told": told, "target": target,
            "waiting": waiting, "orders": self.orders, "commands": self.commands,
            "clients": self.clients, "connected": self.client.is_some(),
            "interval_s": self.guest.interval_s,
        })
    }
}

fn event(name: &str, data: Value) -> Value {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = json!({ "seconds": at.as_secs(), "microseconds": at.subsec_micros() });
    json!({ "event": name, "data": data, "timestamp": at })
}

fn next_line(client: &mut Client) -> Option<Vec<u8>> {
    let end = client.unread.iter().position(|b| *b == b'\n')?;
    Some(client.unread.drain(..=end).collect())
}

/// What a state file, as the daemon writes it, says of this process; `null` where it says nothing.
/// Only the entry is parsed: with thousands of stand-ins the whole file would keep each from
/// answering for milliseconds.
fn entry(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let pid = format!("\"pid\": {},", std::process::id());
    let begin = text.find(&pid).and_then(|at| text[..at].rfind("\"id\"")?.checked_sub(1));
    let begin = begin.and_then(|at| text[..=at].rfind('{'));
    let entry = begin.map(|at| serde_json::Deserializer::from_str(&text[at..]).into_iter().next());
    entry.flatten().and_then(Result::ok).unwrap_or_default()
}
