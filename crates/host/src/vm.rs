//! One VM between ticks: its QMP connection, what was asked, what was learnt.
//!
//! A tick is: [`Vm::ask`] queues all questions at once, the caller drives all
//! clients against one deadline, [`Vm::hear`] takes the answers (and may ask
//! more, once), [`Vm::sample`] writes down what is known. An answer that comes after
//! the deadline is used in a later tick. A VM that does not
//! answer is not asked again until it has: its questions never pile up.

mod questions;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_core::config::AgentUse;
use ebb_core::sample::{
    AgentSample, BalloonSample, Claim, GuestStats, HandsOff, Heard, Link, Problem, ProcessMemory,
    RunState, VmEvent, VmId, VmSample,
};
use ebb_core::units::{Bytes, Stamp};
use serde_json::{Value, json};

use self::questions::BALLOON_CHANGE;
use crate::act::ksm_worker::Look;
use crate::agent_link::{AgentLink, Terms};
use crate::inventory::{Inventory, Look as Inquiry, Verdict};
use crate::linux::ActError;
use crate::merge_link::MergeLink;
use crate::probe::mappers::Question;
use crate::probe::process::{Life, Watched};
use crate::probe::qemu::{QemuProcess, QmpAddress};
use crate::qmp::{Client, QmpError, State};
use crate::qmp_balloon::{self, DEVICE_FOLDERS};
use crate::root::Root;

/// First and longest wait before a lost connection is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A connection that owes an answer this long is given up.
const GIVE_UP: Duration = Duration::from_secs(60);
/// A VM's mappings are looked at again after this, or after a thousand times as long as a
/// look takes: the kernel walks all page tables for one, 25 ms a GiB of small pages.
const LOOK_EVERY: (Duration, u32) = (Duration::from_secs(60), 1000);
/// And when so many merged pages were copied on the host since the last look at it (16 MiB).
const LOOK_COPIES: u64 = 4096;
/// But not before this, or a hundred times as long as a look takes, and not much later.
const LOOK_CALM: (Duration, u32, Duration) = (Duration::from_secs(1), 100, Duration::from_secs(30));
/// Most events kept between two samples; the oldest go.
const MAX_EVENTS: usize = 64;

/// A question that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Status,
    Migrate,
    Balloon,
    Stats,
    /// The statistics just before it is asked out of turn.
    StatsBefore,
    MemorySize,
    Folder(usize),
    Reporting,
    DeflateOnOom,
    Interval,
    SetInterval,
    /// What can write to its memory.
    Inventory(Inquiry),
}

/// What is asked of a balloon until it is answered, once.
const DETAILS: [Ask; 3] = [Ask::Reporting, Ask::DeflateOnOom, Ask::Interval];

/// What the last answers on this connection say.
#[derive(Debug, Default)]
struct Answers {
    run: Option<RunState>,
    migrating: bool,
    actual: Option<Bytes>,
    /// When that came, and whether since the last sample.
    actual_at: Option<Instant>,
    actual_new: bool,
    guest: Option<GuestStats>,
    problems: Vec<(String, String)>,
}

/// What may be done to a VM; by default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access {
    /// Ebb may act on it, or owes it something.
    pub managed: bool,
    /// Any of its QMP sockets may be taken, not only Ebb's own.
    pub any_socket: bool,
    /// It is only looked at: nothing is set in QEMU.
    pub look_only: bool,
    /// What its agent may do.
    pub agent: AgentUse,
    /// The operator's word that nobody else writes to its shared RAM.
    pub private_ram: bool,
    /// Windows longer than this have its agent stand aside, ms; 0: none do.
    pub window_limit_ms: u64,
    /// The operator wants it left alone for so much longer, ms.
    pub hands_off_ms: Option<u64>,
}

/// A VM and its connection.
#[derive(Debug)]
pub(crate) struct Vm {
    pub process: QemuProcess,
    pub cgroup: Option<String>,
    /// Seconds between QEMU's questions to the guest.
    interval_s: u64,
    pub client: Option<Client>,
    pub agent: Option<AgentLink>,
    /// Opening its RAM to KSM, or closing it.
    pub merging: MergeLink,
    /// The host's count of copied merged pages when its mappings were last looked at.
    copied: Option<u64>,
    /// What KSM counted as merged of it then, pages.
    merged: Option<u64>,
    /// Whether its agent has opened something, and since when it has not any more.
    opened: bool,
    closed: Option<Instant>,
    /// Which of several sockets comes next.
    turn: usize,
    backoff: Duration,
    retry_at: Option<Instant>,
    /// Why there is no client.
    down: Link,
    slow_since: Option<Instant>,
    /// This connection has answered.
    ready: bool,
    looked_up: Option<Instant>,
    ram: Option<Bytes>,
    device: Option<String>,
    found: Option<String>,
    reporting: Option<bool>,
    deflate_on_oom: Option<bool>,
    /// Of [`DETAILS`], what was not answered yet.
    owed: Vec<Ask>,
    /// All device folders were heard on this connection.
    looked: bool,
    /// Its size at the last sample, and what it was told last.
    actual: Option<Bytes>,
    pub ordered: Option<Bytes>,
    /// When the guest's last words came.
    heard: Heard,
    /// When it was last asked out of turn.
    kicked: Stamp,
    events: Vec<VmEvent>,
    asked: Vec<(Ask, u64)>,
    /// When its guest's last words were seen that were new.
    words_new: Option<Instant>,
    /// When it was last asked how it runs.
    ran_asked: Option<Instant>,
    /// It was asked for its RAM in this tick.
    ram_asked: bool,
    /// When the questions were asked that were answered last.
    asked_at: Stamp,
    answers: Answers,
    pub access: Access,
    /// What its claim to its section is worth.
    pub claim: Claim,
    /// Its socket is named in the configuration.
    pub named: bool,
    /// It is owed something that was taken over this socket.
    pub owed_at: Option<PathBuf>,
    /// How often QEMU asked the guest for statistics before Ebb set that, seconds.
    pub interval_was: Option<u64>,
    /// Orders that QEMU has not answered: command and size.
    unanswered: Vec<(u64, Bytes)>,
    /// The last order; `None` when QEMU has answered it.
    last_order: Option<u64>,
    /// What order is in force is not known: QEMU has not answered the last one, or it was an
    /// earlier daemon's.
    loose: bool,
    /// The size of the last order, where QEMU has carried it out and answered late.
    pub done_late: Option<Bytes>,
    /// Asked for where there is an agent.
    inventory: Inventory,
    verdict: Option<Verdict>,
    watched: Watched,
    /// What its process held when that was last read.
    memory: Option<ProcessMemory>,
    /// Why that could not be read.
    unread: Option<String>,
    /// Its process was looked at since the last sample.
    seen: bool,
}

impl Vm {
    pub fn new(process: QemuProcess, interval_s: u64, access: Access) -> Vm {
        let agent = process.agent.clone();
        let (pid, watched) = (process.id.pid, Watched::new(process.id));
        Vm {
            agent: agent.map(|path| AgentLink::new(path, pid)),
            merging: MergeLink::default(),
            copied: None,
            merged: None,
            opened: false,
            closed: None,
            process,
            cgroup: None,
            interval_s,
            client: None,
            turn: 0,
            backoff: BACKOFF.0,
            retry_at: None,
            down: Link::Unknown,
            slow_since: None,
            ready: false,
            looked_up: None,
            ram: None,
            device: None,
            found: None,
            reporting: None,
            deflate_on_oom: None,
            owed: Vec::new(),
            looked: false,
            actual: None,
            ordered: None,
            heard: Heard::default(),
            kicked: Stamp(0),
            events: Vec::new(),
            asked: Vec::new(),
            words_new: None,
            ran_asked: None,
            ram_asked: false,
            asked_at: Stamp(0),
            answers: Answers::default(),
            access,
            claim: Claim::Open,
            named: false,
            owed_at: None,
            interval_was: None,
            unanswered: Vec::new(),
            last_order: None,
            loose: true,
            done_late: None,
            inventory: Inventory::default(),
            verdict: None,
            watched,
            memory: None,
            unread: None,
            seen: false,
        }
    }

    /// Looks at its process.
    pub fn look(&mut self, root: &Root, keep_open: bool) -> Life {
        let (life, memory) = self.watched.look(root, keep_open);
        self.unread = memory.as_ref().err().map(ToString::to_string);
        (self.memory, self.seen) = (memory.ok().flatten(), true);
        life
    }

    /// Whether that is to be done before the next sample.
    pub fn is_unseen(&self) -> bool {
        !self.seen
    }

    /// An earlier daemon found this interval of its statistics.
    pub fn with_interval(self, was: Option<u64>) -> Vm {
        Vm { interval_was: was, ..self }
    }

    /// Whether its agent is spoken to.
    fn uses_agent(&self) -> bool {
        let may = self.access.managed && !self.access.look_only;
        may && self.agent.is_some()
            && self.access.agent != AgentUse::Off
            && self.access.hands_off_ms.is_none()
    }

    /// The one that is in use, once QEMU has answered.
    fn socket(&self) -> Option<String> {
        let client = self.client.as_ref().filter(|_| self.ready)?;
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

    /// Tells QEMU the size that the guest shall have. What makes it smaller is told only
    /// where commands are served promptly: carried out late it does harm.
    pub fn order(&mut self, target: Bytes, gives: bool) -> Result<u64, ActError> {
        let link = self.link();
        self.take_late();
        let under_way = self.ordered == Some(target) && !self.unanswered.is_empty();
        let client = match &mut self.client {
            Some(c) if c.state() == State::Ready && gives && !under_way => c,
            Some(c) if c.state() == State::Ready && self.slow_since.is_none() => c,
            _ => {
                return Err(ActError::NoLink(match link {
                    Link::Slow(why) | Link::Taken(why) | Link::Down(why) => why,
                    Link::Up | Link::Unknown => "not tried yet".into(),
                }));
            }
        };
        let sent = client.send("balloon", Some(qmp_balloon::balloon(target)))?;
        self.ordered = Some(target);
        (self.last_order, self.loose) = (Some(sent), true);
        self.done_late = self.done_late.filter(|to| *to == target);
        Ok(sent)
    }

    /// QEMU has answered an order. It takes them one by one: those before it are over.
    pub fn answered(&mut self, command: u64, carried_out: bool) {
        if self.last_order == Some(command) {
            (self.last_order, self.loose) = (None, !carried_out);
        }
    }

    /// Ends an order to shrink that an earlier daemon may have left behind, or that was on its
    /// way when the connection ended: QEMU does not tell what its balloon is to come to.
    pub fn withdraw(&mut self) {
        let Some(size) = self.answers.actual.filter(|_| self.slow_since.is_none()) else { return };
        if self.loose
            && self.last_order.is_none()
            && self.device.is_some()
            && let Ok(command) = self.order(size, true)
        {
            self.not_answered(command);
        }
    }

    /// Takes the answers to orders that came after their time was up.
    fn take_late(&mut self) {
        let Some(client) = &mut self.client else { return };
        let (protocol, done) = (client.protocol(), &mut self.done_late);
        let mut answered = Vec::new();
        self.unanswered.retain(|(id, to)| match protocol.take_reply(*id) {
            Some(answer) => {
                *done = answer.is_ok().then_some(*to);
                answered.push((*id, answer.is_ok()));
                false
            }
            None => protocol.is_pending(*id),
        });
        answered.into_iter().for_each(|(id, done)| self.answered(id, done));
    }

    /// Whether it may have an order to shrink that its guest has not followed yet, or that QEMU
    /// has not answered. What is not `owed` anything was not asked for anything.
    pub fn shrinks(&self, owed: bool) -> bool {
        let below = |o: Bytes| self.actual.is_some_and(|a| o + Bytes::mib(1) <= a);
        let no_balloon = self.ready && self.looked && self.device.is_none();
        self.ordered.is_some_and(below) || owed && self.loose && !no_balloon
    }

    /// QEMU was told and has not answered in time.
    pub fn not_answered(&mut self, command: u64) {
        self.unanswered.extend(self.ordered.map(|to| (command, to)));
        if let Some(client) = &mut self.client {
            client.protocol().not_wait(command);
        }
    }

    /// Has QEMU ask the guest for statistics as often as before.
    pub fn restore_interval(&mut self) {
        let (Some(device), Some(was)) = (self.device.clone(), self.interval_was) else {
            return;
        };
        let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, json!(was));
        // One that is slow has it in its socket, and does it later.
        if let Some(client) = self.client.as_mut().filter(|c| c.state() == State::Ready)
            && client.send("qom-set", Some(set)).is_ok()
        {
            client.pump();
            self.interval_was = None;
        }
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

    /// Connects where it is time to, and queues this tick's questions: what QEMU has said was
    /// read right before. What has not
    /// answered those of the tick before is slow, and not asked again until it has. Nor is one
    /// that `rests`.
    pub fn ask(&mut self, now: Instant, at: Stamp, rests: bool) {
        self.leave_unwanted();
        self.take_late();
        self.hear();
        let waits = self.asked.iter().any(|(ask, _)| *ask != Ask::StatsBefore);
        self.slow_since = if waits { self.slow_since.or(Some(now)) } else { None };
        if let Some(client) = &mut self.client
            && self.slow_since.is_some_and(|since| now - since > GIVE_UP)
        {
            let ms = GIVE_UP.as_millis() as u64;
            let path = client.path().display().to_string();
            client.protocol().fail(QmpError::Timeout(path, "any command".into(), ms));
        }
        self.reap(now);
        if self.client.is_none() && self.retry_at.is_none_or(|at| now >= at) {
            self.connect();
            self.reap(now);
        }
        if self.client.is_some() && self.slow_since.is_none() && !rests && self.may_have_news(now) {
            self.asked_at = at;
            self.questions(now);
        }
    }

    /// A connection that must not be kept (any more) is closed.
    fn leave_unwanted(&mut self) {
        let Err(why) = self.sockets() else { return };
        if self.client.is_some() {
            self.restore_interval();
            self.forget_connection();
        }
        self.down = Link::Down(why);
    }

    fn forget_connection(&mut self) {
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

    fn connect(&mut self) {
        let Ok(paths) = self.sockets() else { return };
        let mut client = Client::new(paths[self.turn % paths.len()].clone());
        let pid = self.process.id.pid;
        if let Some(peer) = client.peer_pid().filter(|peer| *peer != pid) {
            let path = client.path().display().to_string();
            let why = format!("served by process {peer}, not by this VM's {pid}");
            client.protocol().fail(QmpError::Io(path, "peer", why));
        }
        self.adopt(client);
    }

    /// Buries a failed connection and says when to try again.
    fn reap(&mut self, now: Instant) {
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

    /// Takes the answers that are there; true where they led to new questions.
    pub fn hear(&mut self) -> bool {
        let mut kept = 0;
        for (ask, id) in std::mem::take(&mut self.asked) {
            match self.client.as_mut().and_then(|c| c.take_reply(id)) {
                Some(answer) => self.answer(ask, answer),
                None => {
                    self.asked.push((ask, id));
                    kept += 1;
                }
            }
        }
        self.asked.len() > kept
    }

    fn answer(&mut self, ask: Ask, answer: Result<Value, QmpError>) {
        if let (Ask::Inventory(look), Ok(_) | Err(QmpError::Command { .. })) = (ask, &answer) {
            for (look, command, arguments) in self.inventory.answer(look, answer.ok()) {
                self.send(Ask::Inventory(look), command, arguments);
            }
            self.verdict = self.inventory.verdict();
            return;
        }
        if matches!(answer, Ok(_) | Err(QmpError::Command { .. })) {
            self.owed.retain(|owed| *owed != ask);
        }
        let value = match answer {
            Ok(value) => value,
            // The connection's failures are told by the link.
            Err(e) if !matches!(e, QmpError::Command { .. }) => return,
            // Properties that an old QEMU does not have.
            Err(_) if matches!(ask, Ask::Migrate | Ask::DeflateOnOom | Ask::Reporting) => return,
            Err(e) => {
                if matches!(ask, Ask::Balloon | Ask::Stats) {
                    self.looked_up = None;
                }
                return self.answers.problems.push(("qmp".into(), e.to_string()));
            }
        };
        self.first_answer();
        let checked = match ask {
            Ask::Status => {
                qmp_balloon::parse_status(&value).map(|run| self.answers.run = Some(run))
            }
            Ask::Balloon => qmp_balloon::parse_balloon(&value).map(|b| {
                // What is plugged moves the RAM and this: both are of the same tick.
                if self.answers.actual != Some(b) && !std::mem::replace(&mut self.ram_asked, true) {
                    self.send(Ask::MemorySize, "query-memory-size-summary", None);
                }
                let at = Some(Instant::now());
                (self.answers.actual, self.answers.actual_at) = (Some(b), at);
                self.answers.actual_new = true;
            }),
            Ask::MemorySize => {
                qmp_balloon::parse_memory_size(&value).map(|ram| self.ram = Some(ram))
            }
            _ => {
                self.device_answer(ask, &value);
                Ok(())
            }
        };
        if let Err(e) = checked {
            self.answers.problems.push(("qmp".into(), e.to_string()));
        }
    }

    /// A new connection: what was known before may not hold any more.
    fn first_answer(&mut self) {
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

    fn device_answer(&mut self, ask: Ask, value: &Value) {
        match ask {
            Ask::Migrate => self.answers.migrating = qmp_balloon::parse_migrating(value),
            Ask::Reporting => self.reporting = value.as_bool(),
            Ask::DeflateOnOom => self.deflate_on_oom = value.as_bool(),
            Ask::Interval => {
                let slow = value.as_u64().is_none_or(|s| s == 0 || s > self.interval_s);
                let device = self.device.clone().filter(|_| slow && !self.access.look_only);
                if let Some(device) = device {
                    self.interval_was = self.interval_was.or(value.as_u64());
                    let value = json!(self.interval_s);
                    let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, value);
                    self.send(Ask::SetInterval, "qom-set", Some(set));
                }
            }
            Ask::Stats => {
                let (guest, problems) = qmp_balloon::parse_guest_stats(value, self.ram);
                if guest != self.answers.guest {
                    self.words_new = guest.map(|_| Instant::now());
                }
                guest.iter().for_each(|words| self.heard.see(self.asked_at, *words));
                self.answers.guest = guest;
                let problems = problems.into_iter().map(|p| ("qmp guest-stats".into(), p));
                self.answers.problems.extend(problems);
            }
            Ask::StatsBefore => {
                if let (Some(words), _) = qmp_balloon::parse_guest_stats(value, self.ram) {
                    self.heard.see(self.kicked, words);
                }
            }
            Ask::Folder(i) => {
                let found = qmp_balloon::parse_find_balloon(DEVICE_FOLDERS[i], value);
                self.found = if i == 0 { found } else { self.found.take().or(found) };
                self.looked |= i + 1 == DEVICE_FOLDERS.len();
                if i + 1 == DEVICE_FOLDERS.len() && self.found != self.device {
                    self.reporting = None;
                    self.device = self.found.take();
                    self.owed = DETAILS.to_vec();
                    self.ask_balloon();
                }
            }
            _ => {}
        }
    }

    /// Asks QEMU to ask the guest now: switching the timer off and on does. What the
    /// guest has said before is looked at, so that its answer can be told from that.
    pub fn kick(&mut self, at: Stamp) {
        let (Some(device), interval) = (self.device.clone(), self.interval_s) else { return };
        if self.access.look_only || self.usable().is_err() {
            return;
        }
        self.kicked = at;
        self.get(Ask::StatsBefore, qmp_balloon::STATS);
        let Some(client) = &mut self.client else { return };
        for seconds in [0, interval] {
            let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, json!(seconds));
            if let Ok(id) = client.send("qom-set", Some(set)) {
                client.protocol().forget(id);
            }
        }
        client.flush();
    }

    fn take_events(&mut self) {
        let Some(client) = &mut self.client else { return };
        for event in client.take_events() {
            if qmp_balloon::changes_devices(&event) {
                self.looked_up = None;
                self.inventory.look_anew();
            }
            if event.name == "RESET" {
                self.heard = Heard::default();
            }
            // One that came while the tick asked may tell more than its answers.
            if event.name != BALLOON_CHANGE {
                self.ran_asked = None;
            }
            self.events.extend(qmp_balloon::parse_event(&event));
        }
        let excess = self.events.len().saturating_sub(MAX_EVENTS);
        self.events.drain(..excess);
    }

    fn link(&self) -> Link {
        let Some(client) = &self.client else { return self.down.clone() };
        match (client.state(), client.failure()) {
            (_, Some(e @ QmpError::Taken(..))) => Link::Taken(e.to_string()),
            (_, Some(e)) => Link::Down(e.to_string()),
            (State::Ready, _) if self.slow_since.is_none() && self.ready => Link::Up,
            (State::Ready, _) => {
                let silent = client.last_heard().elapsed().as_secs_f64();
                Link::Slow(format!("{}: silent for {silent:.1} s", client.path().display()))
            }
            _ => Link::Slow(format!("{}: waits for QEMU's greeting", client.path().display())),
        }
    }

    /// Whether QEMU has said if a balloon reports free pages, or that it cannot.
    fn known(&self) -> bool {
        self.looked && (self.device.is_none() || !self.owed.contains(&Ask::Reporting))
    }

    /// What its agent waits for: whether other processes map its RAM.
    pub fn asks_for_mappers(&mut self) -> Option<Question> {
        let (private, vm) = (self.access.private_ram, self.process.id);
        let agent = self.agent.as_mut()?;
        let (generation, segments) = agent.wants_mappers()?;
        let segments = segments.to_vec();
        if private {
            agent.mappers(generation, Ok(()));
            return None;
        }
        Some(Question { vm, generation, segments })
    }

    /// Has the agent asked, after QMP has told how the VM is; not before it is known
    /// who else discards its pages.
    pub fn ask_agent(&mut self, now: Instant, keep_open: bool) {
        self.take_events();
        if !self.uses_agent() {
            // Only where it could be at work, and is asked for, is it looked for to be told.
            let on = self.access.agent != AgentUse::Off && !self.access.look_only;
            let sure = on && self.access.managed && self.access.hands_off_ms.is_some();
            self.agent.iter_mut().for_each(|agent| agent.leave(now, sure));
            // What QEMU has told may not hold when the agent is used again.
            self.inventory.look_anew();
            return;
        }
        let migrating = self.answers.migrating;
        let run = self.answers.run.clone().map(|r| if migrating { RunState::Migrating } else { r });
        let usable = self.slow_since.is_none() && self.known();
        let Some(agent) = self.agent.as_mut() else { return };
        let terms = Terms {
            reports: self.reporting == Some(true),
            keep_open,
            observe: self.access.agent == AgentUse::Observe,
            window_limit_ms: self.access.window_limit_ms,
        };
        let verdict = self.verdict.as_ref().filter(|_| usable);
        agent.ask(now, run.as_ref(), &self.events, terms, verdict);
    }

    /// Ends the tick: waits no more for what was not answered, and tells what is known.
    pub fn sample(&mut self, at: Stamp, wall_ms: u64, problems: &mut Vec<Problem>) -> VmSample {
        self.take_events();
        if let Some(client) = &mut self.client {
            self.asked.iter().for_each(|(_, id)| client.protocol().not_wait(*id));
        }
        let id = self.process.id;
        self.seen = false;
        let unread = self.unread.take().map(|why| (format!("/proc/{}/status", id.pid), why));
        let told = unread.into_iter().chain(std::mem::take(&mut self.answers.problems));
        problems.extend(told.map(|(source, message)| problem(id, source, message)));
        let run = match &self.answers.run {
            Some(RunState::Running | RunState::Paused) if self.answers.migrating => {
                Some(RunState::Migrating)
            }
            run => run.clone(),
        };
        VmSample {
            id,
            name: self.process.name.clone(),
            given: Some(&self.process.given).filter(|g| **g != self.process.name).cloned(),
            uuid: self.process.uuid.clone(),
            claim: self.claim.clone(),
            ram: self.ram,
            process: self.memory,
            cgroup: self.cgroup.clone(),
            link: self.link(),
            socket: self.socket(),
            run,
            balloon: self.balloon(at, wall_ms),
            agent: self.agent.as_ref().map(|a| AgentSample {
                observes: self.access.agent == AgentUse::Observe,
                ..a.sample()
            }),
            events: std::mem::take(&mut self.events),
            age_ms: age_of(id),
            pinned: self.pinned(),
            hands_off: self.access.hands_off_ms.map(|left_ms| HandsOff {
                left_ms,
                done: self.agent.as_ref().is_none_or(AgentLink::has_left),
            }),
            offload: None,
            zeros: None,
            partial_thp: None,
            merge: None,
        }
    }

    /// Opens its RAM to KSM, or closes it.
    pub fn switch_merging(&mut self, open: bool) {
        let mut merging = std::mem::take(&mut self.merging);
        match self.usable() {
            Ok(client) => {
                merging.order(open, client);
                client.flush();
            }
            Err(_) => merging.refuse("no QMP connection".into()),
        }
        self.merging = merging;
    }

    /// Goes on with that, where it is under way.
    pub fn go_on_merging(&mut self, look: Option<&Look>) {
        let client = self.client.as_mut().filter(|c| c.state() == State::Ready);
        self.merging.go_on(client, look);
        self.client.iter_mut().for_each(Client::flush);
    }

    /// Whether its mappings are to be looked at: never yet, because an order waits
    /// for it, because pages were merged or merged pages copied, or because it is time.
    /// `working`: `ksmd` is at it.
    pub fn wants_look(
        &mut self,
        look: Option<&Look>,
        copied: Option<u64>,
        merged: Option<u64>,
        working: bool,
    ) -> bool {
        let opened = self.agent.as_ref().is_some_and(|a| a.open() > Bytes::ZERO);
        let Some(look) = look else {
            (self.copied, self.opened, self.merged) = (copied, opened, merged);
            return true;
        };
        let grown = copied.zip(self.copied).map_or(0, |(now, was)| now.saturating_sub(was));
        let ordered = self.merging.waits_for_look().is_some_and(|since| look.begun < since);
        let storm = grown >= LOOK_COPIES;
        // What is lost later is lost of what was seen merged.
        let more = merged.zip(self.merged).map_or(0, |(now, was)| now.saturating_sub(was));
        // While there is more to come, when it has doubled.
        let least = if working { self.merged.unwrap_or(0) } else { 0 };
        let more = more >= LOOK_COPIES.max(least);
        // What its agent opened it says; that nothing is open any more is to be seen.
        if self.opened && !opened {
            self.closed = Some(Instant::now());
        }
        self.opened = opened;
        let closed = self.closed.is_some_and(|since| look.begun < since);
        let news = storm || more;
        let wants = ordered || closed || look_is_due(news, look.begun.elapsed(), look.took);
        if wants {
            (self.copied, self.merged) = (copied, merged);
        }
        wants
    }

    /// Why its memory stays where it is.
    fn pinned(&self) -> Option<String> {
        let p = &self.process;
        let why = |yes, why: &str| if yes { Some(why.to_owned()) } else { None };
        why(p.passthrough, "a VFIO or vDPA device pins it")
            .or_else(|| p.pinned.clone())
            .or_else(|| why(p.hugepages, "its RAM is huge pages of a pool"))
    }

    fn balloon(&mut self, at: Stamp, wall_ms: u64) -> Option<BalloonSample> {
        let actual = self.answers.actual?;
        let new = std::mem::take(&mut self.answers.actual_new);
        let since = self.answers.actual_at.map_or(Duration::ZERO, |at| at.elapsed());
        // An answer of an earlier tick is never taken for one of this.
        let age_ms = if new { 0 } else { (since.as_millis() as u64).max(1) };
        self.actual = Some(actual);
        if self.ordered.is_some_and(|to| to.abs_diff(actual) < Bytes::mib(1)) {
            self.ordered = None;
        }
        let heard_ms = self.heard.age_ms(at, wall_ms);
        let guest = self.answers.guest.map(|said| GuestStats { age_ms: heard_ms, ..said });
        let (reporting, deflate_on_oom) = (self.reporting, self.deflate_on_oom);
        Some(BalloonSample { actual, age_ms, reporting, deflate_on_oom, guest })
    }
}

pub(crate) fn problem(vm: impl Into<Option<VmId>>, source: String, message: String) -> Problem {
    Problem { vm: vm.into(), source, message }
}

/// How long the process has run. Its start is in hundredths of a second since
/// boot (USER_HZ) on every Linux Ebb runs on.
fn age_of(id: VmId) -> Option<u64> {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now_ms = t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000;
    now_ms.checked_sub(id.start.checked_mul(10)?)
}

/// Whether a look is due that is so old and took so much processor time.
fn look_is_due(news: bool, age: Duration, took: Duration) -> bool {
    let (least, times, most) = LOOK_CALM;
    let calm = (took * times).clamp(least, most);
    news && age >= calm || age >= (took * LOOK_EVERY.1).max(LOOK_EVERY.0)
}

#[cfg(test)]
mod tests;
