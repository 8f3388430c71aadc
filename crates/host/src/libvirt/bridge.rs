//! One domain, as its VM's QMP client sees it: QMP commands in, answers out, and between them the
//! calls to libvirt that they take.
//!
//! So the rest of Ebb knows one language, and a libvirtd that hangs looks like a QEMU that hangs.
//! Nothing here does I/O. Statistics of all domains come in bulk ([`Bridge::heard_stats`]). Calls
//! for this domain alone are made one at a time, because libvirt has a second one wait for the
//! first.

mod question;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::question::{Need, Question};
use super::NOT_ASKED;
use super::calls::{self, Domain, Event, Numbers, Request, bad_answer};
use super::description::{Balloon, Description, VirtioMem};
use super::rpc::Refused;
use crate::qmp_balloon::{DEVICE_FOLDERS, INTERVAL, STATS};

/// An answer also serves a question that came at most this long after libvirt was asked: a tick's
/// questions come together.
const TOGETHER: Duration = Duration::from_millis(25);
/// During this time after an order, after a move of the balloon, and after the connection begins,
/// the balloon's size is asked of QEMU. libvirt's own value may be a second old: QEMU reports moves
/// to libvirt once a second.
const MOVES: Duration = Duration::from_secs(5);
/// Whether libvirt has a job on the domain (it saves, migrates or dumps it) is asked this often at
/// most; libvirt has no event for a job's begin.
const JOB_EVERY: Duration = Duration::from_secs(3);
/// A description that is older is read again; so is one after an event that it has changed.
const DESCRIBED_FOR: Duration = Duration::from_secs(50);
/// libvirt would have the order wait, and then refuse it. (Not during a backup.)
const SAVED: &str = "libvirt has a job on the domain: it saves, migrates or dumps it";
/// The wait before statistics are requested again, if the last ones left a question open.
const TRIED_EVERY: Duration = Duration::from_millis(500);
/// Most bytes of a command whose end has not come yet.
const MAX_COMMAND: usize = 64 << 10;

/// A call to libvirt for this domain alone.
#[derive(Debug, PartialEq)]
pub(super) enum Purpose {
    LookUp,
    Describe,
    Memory(Instant),
    Job(Instant),
    /// Sets the balloon, for the command with this id.
    Order(Value),
    /// Has QEMU itself carry out the command with this id.
    Monitor(Value),
    /// Sets the period of statistics, for the command with this id; seconds.
    Period(Value, u64),
}

pub(super) type Call = (Purpose, Request);

#[derive(Debug, Default)]
pub(super) struct Bridge {
    pub name: String,
    /// Known once libvirt has told it.
    pub domain: Option<Domain>,
    /// QEMU itself is asked, through libvirt: see [`Bridge::new`].
    monitor: bool,
    greeted: bool,
    balloon: Option<Balloon>,
    virtio_mem: Option<VirtioMem>,
    /// As [`Description::no_ram`].
    no_ram: u64,
    described: Option<Instant>,
    numbers: Numbers,
    /// `balloon.current` of the last statistics of all domains.
    current: Option<u64>,
    state: Option<Instant>,
    bulk: Option<Instant>,
    /// When the statistics of all domains that came last were asked for.
    pub tried: Option<Instant>,
    /// libvirt told only the domain's state: another call on the domain is under way, or its QEMU
    /// hangs.
    held_up: bool,
    /// When a call that takes the domain's job was last answered.
    called: Option<Instant>,
    memory: Option<Instant>,
    job: Option<(Instant, bool)>,
    moved: Option<Instant>,
    /// The last interval that was set for QEMU is [`QUICK`].
    is_quick: bool,
    questions: Vec<Question>,
    orders: VecDeque<Call>,
    input: Vec<u8>,
    /// Bytes for the client.
    pub output: Vec<u8>,
    /// Why the client's connection is to be closed, if it is.
    pub over: Option<String>,
}

impl Bridge {
    /// To the domain of this name. With `monitor` libvirt passes all commands on to QEMU, except
    /// those that set the balloon or the period of statistics. libvirt marks such a domain as
    /// tainted.
    pub fn new(name: String, monitor: bool) -> Bridge {
        Bridge { name, monitor, ..Bridge::default() }
    }

    pub fn has_call(&self) -> bool {
        !self.greeted
            || !self.orders.is_empty()
            || !self.held_up
                && (self.is_to_describe() || self.questions.iter().any(|q| !q.need.is_bulk()))
    }

    /// Whether a question waits for a new description.
    fn is_to_describe(&self) -> bool {
        self.described.is_none() && !self.questions.is_empty()
    }

    /// Whether a command waits that changes something or that QEMU itself is to carry out.
    pub fn has_order(&self) -> bool {
        !self.orders.is_empty()
    }

    /// When statistics of all domains are to be asked for. Where the last ones left a question
    /// open, libvirt cannot ask QEMU now: some time later. They also tell when a domain is held up
    /// no longer, which every question waits for.
    pub fn bulk_at(&self) -> Option<Instant> {
        let open = self.questions.iter().filter(|q| q.need.is_bulk() || self.held_up);
        let tried = |q: &Question| self.tried.filter(|at| *at + TOGETHER >= q.at);
        open.map(|q| tried(q).map_or(q.at, |at| at + TRIED_EVERY)).min()
    }

    /// Takes bytes of the client: commands, one a line.
    pub fn feed(&mut self, bytes: &[u8], now: Instant) {
        self.input.extend_from_slice(bytes);
        let whole = self.input.iter().rposition(|b| *b == b'\n').map_or(0, |n| n + 1);
        let lines: Vec<u8> = self.input.drain(..whole).collect();
        if self.input.len() > MAX_COMMAND {
            self.over = Some("a command without an end".into());
        }
        let lines = lines.split(|b| *b == b'\n').filter(|l| !l.is_empty());
        let commands: Vec<Value> = lines.filter_map(|l| serde_json::from_slice(l).ok()).collect();
        let mut at_once = Vec::new();
        for (i, pair) in commands.windows(2).enumerate() {
            if asks_on_the_spot(&pair[0], &pair[1]) {
                at_once.extend([i, i + 1]);
            }
        }
        for (i, command) in commands.into_iter().enumerate() {
            self.command(command, now, at_once.contains(&i));
        }
    }

    fn command(&mut self, all: Value, now: Instant, on_the_spot: bool) {
        let id = all["id"].clone();
        let name = all["execute"].as_str().unwrap_or_default().to_owned();
        let is = |property: &str| all["arguments"]["property"] == property;
        let live = if self.asks_qemu(now) { Need::Memory } else { Need::Bulk };
        let need = match name.as_str() {
            "qmp_capabilities" => return self.done(&id, json!({})),
            "balloon" => {
                let size = all["arguments"]["value"].as_u64();
                let Some((size, domain)) = size.zip(self.domain.as_ref()) else {
                    return self.refused(&id, "no size");
                };
                if self.job.is_some_and(|(at, busy)| busy && now - at < JOB_EVERY) {
                    return self.refused(&id, SAVED);
                }
                self.moved = Some(now);
                let request = calls::set_memory(domain, size / 1024);
                return self.orders.push_back((Purpose::Order(id), request));
            }
            "qom-set" if is(INTERVAL) => {
                if on_the_spot && self.monitor {
                    return self.pass(id, all);
                }
                let (seconds, domain) = (interval(&all), self.domain.as_ref());
                let Some((seconds, domain)) = seconds.zip(domain) else {
                    return self.refused(&id, "no interval");
                };
                let is_slow = self.balloon.as_ref().is_some_and(|b| b.period > QUICK);
                let seconds = match on_the_spot {
                    true if seconds == 0 || self.is_quick || !is_slow => {
                        return self.done(&id, json!({}));
                    }
                    true => QUICK,
                    false => seconds,
                };
                self.is_quick = on_the_spot;
                let request = calls::set_period(domain, seconds.try_into().unwrap_or(i32::MAX));
                return self.orders.push_back((Purpose::Period(id, seconds), request));
            }
            // QEMU is asked where that is allowed: what libvirt knows may be a second old.
            _ if self.monitor => return self.pass(id, all),
            "query-status" => Need::State,
            "query-memory-size-summary" => Need::Bulk,
            "query-memory-devices" => Need::Description,
            "query-balloon" => live,
            "qom-get" if is(STATS) => live,
            "query-migrate" => Need::Job,
            "qom-get" if is(INTERVAL) => Need::DescriptionNow,
            "qom-list" | "qom-get" => Need::Description,
            _ => return self.refused(&id, "libvirt is not asked this"),
        };
        self.questions.push(Question { id, command: all, need, at: now });
        self.settle(now);
    }

    /// Whether QEMU is asked for the balloon's size, see [`MOVES`]. Beside virtio-mem always:
    /// libvirt's own value is another sum.
    fn asks_qemu(&self, at: Instant) -> bool {
        self.virtio_mem.is_some() || self.moved.is_some_and(|moved| at < moved + MOVES)
    }

    /// Has QEMU do a command.
    fn pass(&mut self, id: Value, mut command: Value) {
        let Some(domain) = &self.domain else { return self.refused(&id, "no domain") };
        if let Some(all) = command.as_object_mut() {
            all.remove("id");
        }
        let request = calls::monitor(domain, &command.to_string());
        self.orders.push_back((Purpose::Monitor(id), request));
    }

    /// The next call to be made, while none is under way.
    pub fn next_call(&mut self, now: Instant) -> Option<Call> {
        let Some(domain) = &self.domain else {
            return Some((Purpose::LookUp, calls::look_up(&self.name)));
        };
        let describe = || Some((Purpose::Describe, calls::describe(domain)));
        if !self.greeted {
            return describe();
        }
        if let Some(order) = self.orders.pop_front() {
            return Some(order);
        }
        // What holds the domain up would hold up this call as well.
        if self.held_up {
            return None;
        }
        if self.is_to_describe() {
            return describe();
        }
        match self.questions.iter().map(|q| q.need).find(|n| !n.is_bulk())? {
            Need::Memory => Some((Purpose::Memory(now), calls::memory_stats(domain))),
            Need::Job => Some((Purpose::Job(now), calls::job(domain))),
            _ => describe(),
        }
    }

    pub fn answered(&mut self, purpose: Purpose, result: Result<Vec<u8>, Refused>, now: Instant) {
        let takes_job = !matches!(purpose, Purpose::LookUp | Purpose::Describe);
        if takes_job && result.is_ok() {
            self.gave_back_job(now);
        }
        match self.take(purpose, result, now) {
            Ok(()) => self.settle(now),
            Err(why) => self.over = Some(why),
        }
    }

    /// A call of Ebb's has ended that had the domain's job.
    pub fn gave_back_job(&mut self, now: Instant) {
        self.called = Some(now);
        // It was this call that held the domain up.
        if std::mem::take(&mut self.held_up) {
            self.tried = None;
        }
    }

    /// An error ends the client's connection.
    fn take(
        &mut self,
        purpose: Purpose,
        result: Result<Vec<u8>, Refused>,
        now: Instant,
    ) -> Result<(), String> {
        match (purpose, result) {
            (Purpose::LookUp, result) => self.domain = Some(calls::running(&self.name, result)?),
            (Purpose::Describe, result) => {
                let xml = result.map_err(|e| e.to_string())?;
                let xml = calls::text(&xml).map_err(bad_answer)?;
                let Description { balloon, virtio_mem, no_ram } = Description::of(&xml)?;
                (self.balloon, self.virtio_mem, self.no_ram) = (balloon, virtio_mem, no_ram);
                self.described = Some(now);
                // Another program may have set another.
                self.is_quick &= self.balloon.as_ref().is_some_and(|b| b.period == QUICK);
                if virtio_mem.is_some() {
                    self.ask_qemu_for_balloon();
                }
                if !self.greeted {
                    self.greeted = true;
                    // An earlier client may have moved the balloon just now.
                    self.moved = self.balloon.is_some().then_some(now);
                    self.say(&json!({ "QMP": { "version": { "package": "by libvirt" } } }));
                }
            }
            (Purpose::Memory(asked), Ok(stats)) => {
                let stats = calls::memory_stats_of(&stats).map_err(bad_answer)?;
                self.forget_stats();
                self.numbers.extend(stats);
                self.memory = Some(asked);
            }
            (Purpose::Job(asked), Ok(job)) => {
                self.job = Some((asked, calls::is_busy(&job).map_err(bad_answer)?));
            }
            (Purpose::Order(id), Ok(_)) => {
                self.moved = Some(now);
                self.done(&id, json!({}));
            }
            (Purpose::Period(id, seconds), Ok(_)) => {
                self.balloon.iter_mut().for_each(|b| b.period = seconds);
                self.done(&id, json!({}));
            }
            (Purpose::Monitor(id), Ok(said)) => {
                let said = calls::text(&said).map_err(bad_answer)?;
                // What QEMU answered, under the client's id.
                match serde_json::from_str(&said) {
                    Ok(Value::Object(mut all)) => {
                        all.insert("id".into(), id);
                        self.say(&Value::Object(all));
                    }
                    _ => self.refused(&id, "QEMU's answer is no JSON object"),
                }
            }
            (Purpose::Memory(_), Err(e)) => self.refuse_all(Need::Memory, &e.message),
            (Purpose::Job(_), Err(e)) => self.refuse_all(Need::Job, &e.message),
            (Purpose::Order(id), Err(e)) => self.refuse_orders(&id, &e.message),
            (Purpose::Period(id, _), Err(e)) => {
                self.is_quick = false;
                self.refused(&id, &e.message);
            }
            (Purpose::Monitor(id), Err(e)) => {
                self.is_quick = false;
                self.fails(&id, NOT_ASKED, &e.message);
            }
        }
        Ok(())
    }

    /// Statistics of all domains were asked for at `asked`; `numbers` are this domain's. If it is
    /// held up, only its state is taken, because the rest does not come from QEMU. Where a call of
    /// Ebb's own held it up, and has ended since, they are asked for again at once.
    pub fn heard_stats(&mut self, asked: Instant, numbers: Numbers, now: Instant) {
        self.held_up = !numbers.contains_key(ASKED_QEMU);
        self.tried = Some(asked);
        let ended = self.held_up && self.called.is_some_and(|at| at >= asked);
        self.state = Some(asked);
        let moves = self.asks_qemu(asked);
        let current = numbers.get("balloon.current").copied();
        // virtio-mem may have been plugged, or taken out.
        if self.virtio_mem.is_some() && std::mem::replace(&mut self.current, current) != current {
            self.described = None;
        }
        if !self.held_up && !moves {
            self.forget_stats();
        }
        let fresh = |name: &str| match (self.held_up, moves) {
            (true, _) => name.starts_with("state."),
            (false, true) => !name.starts_with("balloon.") || name == MAXIMUM,
            (false, false) => true,
        };
        let had = self.numbers.get(MAXIMUM).copied();
        self.numbers.extend(numbers.into_iter().filter(|(name, _)| fresh(name)));
        // Memory was plugged: of which kind, only the description tells.
        if had.is_some() && self.numbers.get(MAXIMUM).copied() != had {
            self.described = None;
        }
        if !self.held_up {
            self.bulk = Some(asked);
            // What is known of a balloon that moves is older than the question.
            if moves {
                self.ask_qemu_for_balloon();
            }
        }
        if ended {
            (self.held_up, self.tried) = (false, None);
        }
        self.settle(now);
    }

    /// Has QEMU itself answer what was asked of the balloon.
    fn ask_qemu_for_balloon(&mut self) {
        let of_balloon = self.questions.iter_mut().filter(|q| q.is_of_balloon());
        of_balloon.for_each(|q| q.need = Need::Memory);
    }

    /// Forgets what the guest has told: libvirt leaves out what a guest does not tell any more.
    fn forget_stats(&mut self) {
        self.numbers.retain(|name, _| name == MAXIMUM || !name.starts_with("balloon."));
    }

    pub fn event(&mut self, domain: &Domain, event: Event, now: Instant) {
        let known = |d: &Domain| (d.uuid, d.id) == (domain.uuid, domain.id);
        // A domain that has stopped has no id any more.
        let stops = matches!(event, Event::Lifecycle(5));
        if !self.domain.as_ref().is_some_and(|d| known(d) || stops && d.uuid == domain.uuid) {
            return;
        }
        let name = match event {
            Event::Lifecycle(3) => "STOP",
            Event::Lifecycle(4) => "RESUME",
            Event::Lifecycle(5) => {
                self.over = Some("the domain has stopped".into());
                return;
            }
            Event::Lifecycle(6) => "SHUTDOWN",
            Event::Lifecycle(8) => "GUEST_PANICKED",
            Event::Reboot => {
                self.forget_stats();
                "RESET"
            }
            Event::Balloon(kib) => {
                self.moved = Some(now);
                let actual = kib.saturating_mul(1024);
                return self.tell("BALLOON_CHANGE", json!({ "actual": actual }));
            }
            Event::Job => {
                self.job = None;
                "MIGRATION"
            }
            Event::Described => {
                self.described = None;
                return;
            }
            Event::Lifecycle(_) => return,
        };
        self.job = None;
        self.tell(name, json!({}));
    }

    fn tell(&mut self, name: &str, data: Value) {
        if self.greeted {
            self.say(&json!({ "event": name, "data": data }));
        }
    }

    fn settle(&mut self, now: Instant) {
        let is_known = |q: &mut Question| {
            let since = |at: Option<Instant>| at.is_some_and(|at| at + TOGETHER >= q.at);
            match q.need {
                Need::State => since(self.state),
                Need::Bulk => since(self.bulk) && self.described.is_some(),
                Need::Memory => since(self.memory),
                Need::Job => self.job.is_some_and(|(at, _)| at >= q.at || now - at < JOB_EVERY),
                Need::DescriptionNow => since(self.described),
                Need::Description => self.described.is_some_and(|at| now - at < DESCRIBED_FOR),
            }
        };
        let known: Vec<Question> = self.questions.extract_if(.., is_known).collect();
        for q in known {
            match self.answer(&q.command) {
                Ok(value) => self.done(&q.id, value),
                Err(why) => self.refused(&q.id, &why),
            }
        }
    }

    /// libvirt has refused an order. Those that wait would be held as long, one after the other; Ebb
    /// decides anew, and libvirt is asked for the domain's job before.
    fn refuse_orders(&mut self, id: &Value, why: &str) {
        self.job = None;
        self.refused(id, why);
        for call in std::mem::take(&mut self.orders) {
            match call.0 {
                Purpose::Order(id) => self.refused(&id, why),
                _ => self.orders.push_back(call),
            }
        }
    }

    fn refuse_all(&mut self, need: Need, why: &str) {
        let gone: Vec<Question> = self.questions.extract_if(.., |q| q.need == need).collect();
        gone.iter().for_each(|q| self.refused(&q.id, why));
    }

    fn answer(&self, command: &Value) -> Result<Value, String> {
        let name = command["execute"].as_str().unwrap_or_default();
        let text = |name: &str| command["arguments"][name].as_str();
        let bytes = |name: &str| self.numbers.get(name).map(|kib| kib.saturating_mul(1024));
        let size = |name: &str| bytes(name).ok_or(format!("libvirt does not tell {name}"));
        match name {
            "query-status" => Ok(json!({ "status": self.status() })),
            "query-migrate" => {
                let busy = self.job.is_some_and(|(_, busy)| busy);
                Ok(if busy { json!({ "status": "active" }) } else { json!({}) })
            }
            "query-memory-size-summary" => {
                let VirtioMem { most, plugged } = self.virtio_mem.unwrap_or_default();
                let others = most.saturating_add(self.no_ram).saturating_mul(1024);
                let base = size(MAXIMUM)?.saturating_sub(others);
                Ok(json!({ "base-memory": base, "plugged-memory": plugged.saturating_mul(1024) }))
            }
            // A DIMM is part of the base here.
            "query-memory-devices" => {
                let data = |v: VirtioMem| json!({ "size": v.plugged.saturating_mul(1024) });
                let device = |v| json!({ "type": "virtio-mem", "data": data(v) });
                Ok(Value::Array(self.virtio_mem.map(device).into_iter().collect()))
            }
            "query-balloon" if self.balloon.is_none() => Err(NO_BALLOON.into()),
            "query-balloon" => Ok(json!({ "actual": size("balloon.current")? })),
            "qom-list" => {
                let there =
                    self.balloon.as_ref().filter(|_| text("path") == Some(DEVICE_FOLDERS[0]));
                let item =
                    |b: &Balloon| json!({ "name": b.alias, "type": "child<virtio-balloon-pci>" });
                Ok(Value::Array(there.map(item).into_iter().collect()))
            }
            _ if text("property") == Some(STATS) => Ok(self.statistics()),
            _ => {
                let property = text("property").unwrap_or_default();
                let told = self.balloon.as_ref().and_then(|b| b.property(property));
                told.ok_or(format!("libvirt does not tell {property}"))
            }
        }
    }

    /// As QEMU calls it. Source: `virDomainState`, `virDomainPausedReason`.
    fn status(&self) -> &'static str {
        let number = |name| self.numbers.get(name).copied();
        match (number("state.state"), number("state.reason")) {
            (Some(1 | 2), _) => "running",
            (Some(3), Some(2 | 12 | 13)) => "postmigrate",
            (Some(3), Some(3 | 4 | 9)) => "save-vm",
            (Some(4 | 5), _) => "shutdown",
            (Some(6), _) => "guest-panicked",
            _ => "paused",
        }
    }

    /// The guest's statistics in QEMU's form: −1 stands for what is not told.
    fn statistics(&self) -> Value {
        let number = |name: &str| self.numbers.get(name).copied();
        let told = |n: Option<u64>| n.map_or(json!(-1), |n| json!(n));
        let count = |name: &str| told(number(name));
        let bytes = |name: &str| told(number(name).map(|kib| kib.saturating_mul(1024)));
        json!({
            "last-update": number("balloon.last-update").unwrap_or(0),
            "stats": {
                "stat-total-memory": bytes("balloon.available"),
                "stat-free-memory": bytes("balloon.unused"),
                "stat-available-memory": bytes("balloon.usable"),
                "stat-disk-caches": bytes("balloon.disk_caches"),
                "stat-swap-in": bytes("balloon.swap_in"),
                "stat-swap-out": bytes("balloon.swap_out"),
                "stat-major-faults": count("balloon.major_fault"),
                "stat-minor-faults": count("balloon.minor_fault"),
                "stat-htlb-pgalloc": count("balloon.hugetlb_pgalloc"),
            },
        })
    }

    fn done(&mut self, id: &Value, value: Value) {
        self.say(&json!({ "id": id, "return": value }));
    }

    fn refused(&mut self, id: &Value, why: &str) {
        self.fails(id, "GenericError", why);
    }

    fn fails(&mut self, id: &Value, class: &str, why: &str) {
        self.say(&json!({ "id": id, "error": { "class": class, "desc": why } }));
    }

    fn say(&mut self, message: &Value) {
        self.output.extend(message.to_string().into_bytes());
        self.output.push(b'\n');
    }
}

/// What is answered where there is no balloon that libvirt can set.
const NO_BALLOON: &str = "it has no balloon";
/// The size that a domain may have at most: its RAM, with all that virtio-mem may plug.
const MAXIMUM: &str = "balloon.maximum";
/// The shortest period of statistics, seconds.
const QUICK: u64 = 1;
/// libvirt tells this only if it could ask QEMU.
const ASKED_QEMU: &str = "balloon.rss";

/// The interval set to 0 and right back has QEMU ask its guest at once. libvirt would write its own
/// files for each of the two calls. So Ebb sets the interval once, to [`QUICK`] seconds.
fn asks_on_the_spot(one: &Value, next: &Value) -> bool {
    interval(one) == Some(0) && interval(next).is_some_and(|s| s > 0)
}

/// The seconds of a command that sets [`INTERVAL`].
fn interval(command: &Value) -> Option<u64> {
    let arguments = &command["arguments"];
    let is = command["execute"] == "qom-set" && arguments["property"] == INTERVAL;
    arguments["value"].as_u64().filter(|_| is)
}

#[cfg(test)]
mod tests;
