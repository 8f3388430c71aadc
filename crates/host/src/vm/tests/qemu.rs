//! A QEMU with a balloon, as tests want it.

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};

use crate::libvirt::NOT_ASKED;
use crate::qmp_balloon::{INTERVAL, REPORTING, STATS};
use crate::testing::{Said, qmp, qmp_answer};

/// An order to its balloon, and the question what its guest has said, as they are in a line.
pub(crate) const ORDER: &str = "\"balloon\"";
pub(crate) const WORDS: &str = "\"guest-stats\"";

/// It serves one client after the other.
#[derive(Clone)]
pub(crate) struct Qemu(Arc<Mutex<State>>);

/// What it is like, and what it was told.
#[derive(Default)]
pub(crate) struct State {
    pub stopped: bool,
    /// RAM at start, MiB.
    pub ram: u64,
    /// Plugged by a DIMM, by virtio-mem, and a persistent one, MiB.
    pub plugged: [u64; 3],
    /// What its balloon holds, MiB.
    pub inflated: u64,
    /// Its balloon is gone.
    pub unplugged: bool,
    /// What its guest has said that it has free.
    pub free: Option<u64>,
    /// Guest statistics: page faults since its boot, one word after the other.
    pub faults: VecDeque<u64>,
    /// How often it asks its guest, as it was set.
    pub interval: u64,
    /// It stops answering when it has set this number of properties.
    pub sets: Option<usize>,
    /// It refuses commands that have this in their line, and answers others late.
    pub refuses: Option<&'static str>,
    /// As libvirt does that cannot ask it now.
    pub is_held_up: bool,
    pub holds: Option<&'static str>,
    /// The answers that it holds back.
    pub held: Vec<String>,
    /// Orders, MiB.
    pub orders: Vec<u64>,
    pub visits: usize,
    /// All that this client has asked, and others before.
    asked: Vec<String>,
    pub client: Option<UnixStream>,
}

impl Qemu {
    /// One of 1 GiB, but for that, which is served here.
    pub fn serve(listener: UnixListener, but: impl FnOnce(&mut State)) -> Qemu {
        let mut state = State { ram: 1024, free: Some(4096), ..State::default() };
        but(&mut state);
        let qemu = Qemu(Arc::new(Mutex::new(state)));
        let its = qemu.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                its.it().met(&stream);
                qmp(stream, |asked, line| its.it().answer(asked, line));
                its.it().client = None;
            }
        });
        qemu
    }

    pub fn it(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Says that to its client, unasked.
    pub fn tell(&self, text: &str) {
        self.it().client.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// How often it was asked what has this in its line.
    pub fn was_asked(&self, what: &str) -> usize {
        self.it().asked.iter().filter(|line| line.contains(what)).count()
    }
}

impl State {
    fn met(&mut self, client: &UnixStream) {
        self.visits += 1;
        (self.client, self.held) = (client.try_clone().ok(), Vec::new());
    }

    fn answer(&mut self, asked: &Value, line: &str) -> Option<Said> {
        self.asked.push(line.into());
        let no = if self.is_held_up { NOT_ASKED } else { "no" };
        let is = |what: Option<&str>| what.is_some_and(|what| line.contains(what));
        let said = if is(self.refuses) { Err(no) } else { Ok(self.says(asked, line)?) };
        if is(self.holds) {
            self.held.push(qmp_answer(said, &asked["id"]));
            return None;
        }
        Some(said)
    }

    fn says(&mut self, asked: &Value, line: &str) -> Option<Value> {
        let value = &asked["arguments"]["value"];
        Some(match asked["execute"].as_str().unwrap() {
            "query-status" => json!({ "status": if self.stopped { "paused" } else { "running" } }),
            "query-memory-size-summary" => json!({
                "base-memory": self.ram << 20,
                "plugged-memory": self.plugged.iter().sum::<u64>() << 20,
            }),
            "query-memory-devices" => {
                let kinds = ["dimm", "virtio-mem", "nvdimm"].iter().zip(self.plugged);
                let of = |(kind, mib)| json!({ "type": kind, "data": { "size": mib << 20 } });
                kinds.map(of).collect()
            }
            "query-balloon" => {
                json!({ "actual": (self.ram + self.plugged[0] - self.inflated) << 20 })
            }
            "balloon" => {
                self.orders.push(value.as_u64().unwrap() >> 20);
                json!({})
            }
            "qom-list" if self.unplugged || line.contains("-anon") => json!([]),
            "qom-list" => json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }]),
            "qom-set" => {
                if self.sets == Some(0) {
                    return None;
                }
                self.sets = self.sets.map(|n| n - 1);
                self.interval = value.as_u64().unwrap();
                json!({})
            }
            "qom-get" if line.contains(REPORTING) => json!(true),
            "qom-get" if line.contains(INTERVAL) => json!(self.interval),
            "qom-get" if line.contains(STATS) && self.free.is_some() => {
                let next = self.faults.len() > 1;
                let faults =
                    if next { self.faults.pop_front() } else { self.faults.front().copied() };
                let mut stats = json!({ "stat-free-memory": self.free });
                faults.iter().for_each(|faults| stats["stat-minor-faults"] = json!(faults));
                json!({ "last-update": 5, "stats": stats })
            }
            _ => json!({}),
        })
    }
}
