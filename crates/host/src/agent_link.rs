//! One VM's agent between ticks: connect, introduce, hand over RAM, ask.
//!
//! All but one step are non-blocking: [`AgentLink::ask`] queues this tick's
//! questions, the caller drives all agents against one deadline,
//! [`AgentLink::hear`] takes the answers. The exception is the look at QEMU's
//! memory map, once per connection and bounded by [`SEGMENTS`].

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::plan::RecycleOrder;
use ebb_core::sample::{AgentSample, Link, RunState, VmEvent};
use ebb_core::units::Bytes;
use ebb_core::wire::abi::Facts;
use ebb_core::wire::{
    Advise, AgentState, Answer, Attach, Command, OTHERS_DISCARD, PROTOCOL, Refused, Segment, Status,
};

use crate::agent::{Agent, AgentError, segments};
use crate::qmp::Client;
use crate::scan::agents::HashLink;

/// A QEMU without privilege gets its userfaultfd from our descriptor of this: only
/// such a one sees the faults that KVM takes.
const USERFAULTFD: &str = "/dev/userfaultfd";
/// A lost agent is looked for again after this.
const RETRY: Duration = Duration::from_secs(5);
/// Most time that QEMU may take to tell where its RAM is.
const SEGMENTS: Duration = Duration::from_millis(500);
/// An agent that owes an answer this long is given up. It may be in a batch of
/// recycling that takes all of its budget.
const GIVE_UP: Duration = Duration::from_secs(20);
/// What is held of the free pages costs the agent 5–10 ns a page.
const HELD_EVERY: Duration = Duration::from_secs(2);

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Said hello.
    Hello,
    /// Introduced; RAM is to be handed over.
    Met,
    /// RAM was handed over; the answer is awaited.
    Attaching,
    /// At work.
    Attached,
    /// Hands off while the VM migrates.
    Apart,
}

/// A VM's agent.
#[derive(Debug)]
pub(crate) struct AgentLink {
    path: PathBuf,
    pid: u32,
    objections: Vec<String>,
    agent: Option<Agent>,
    stage: Stage,
    down: Link,
    retry_at: Option<Instant>,
    asked: Vec<(Ask, u64)>,
    waits_since: Option<Instant>,
    running: Option<bool>,
    /// The VM had free page reporting when its RAM was handed over.
    reports: bool,
    held_at: Option<Instant>,
    status: Option<Status>,
    facts: Option<Facts>,
    advises: bool,
    /// It can hash pages for a scan; and where it is asked to.
    hashes: bool,
    scanner: Option<Arc<HashLink>>,
    /// What it was handed.
    segments: Vec<Segment>,
    /// What was open to KSM may stay so when it is attached.
    keep_open: bool,
    /// What it was told to open to KSM since it was attached; `None`: what is open is
    /// not known.
    told: Option<Vec<(u64, u64)>>,
    open: Option<Bytes>,
    refused: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Advise,
    Hello,
    Attach,
    Status,
    Facts,
    Recycle,
    Other,
}

impl AgentLink {
    /// Nothing is connected yet.
    pub fn new(path: PathBuf, pid: u32, objections: Vec<String>) -> AgentLink {
        AgentLink {
            path,
            pid,
            objections,
            agent: None,
            stage: Stage::Hello,
            down: Link::Unknown,
            retry_at: None,
            asked: Vec::new(),
            waits_since: None,
            running: None,
            reports: false,
            held_at: None,
            status: None,
            facts: None,
            advises: false,
            hashes: false,
            scanner: None,
            segments: Vec::new(),
            keep_open: false,
            told: None,
            open: None,
            refused: None,
        }
    }

    /// The connection, for `poll`.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Does what the moment asks for: connect, introduce, attach, relay, ask.
    pub fn ask(
        &mut self,
        now: Instant,
        run: Option<&RunState>,
        events: &[VmEvent],
        (reports, keep_open): (bool, bool),
        qmp: Option<&mut Client>,
    ) {
        self.keep_open = keep_open;
        self.connect(now);
        // What came since the last tick: orders that are done make room for questions.
        self.hear(now);
        if self.agent.is_none() {
            return;
        }
        match self.stage {
            Stage::Hello | Stage::Attaching => {}
            Stage::Met => self.attach(run, reports, qmp),
            // A balloon that reports free pages was plugged in or out.
            Stage::Attached if reports != self.reports => {
                self.send(Ask::Other, Command::StandDown);
                (self.stage, self.status) = (Stage::Met, None);
            }
            Stage::Attached => self.relay(now, run, events),
            Stage::Apart => {
                if matches!(run, Some(RunState::Running | RunState::Paused)) {
                    self.stage = Stage::Met;
                }
            }
        }
    }

    fn connect(&mut self, now: Instant) {
        if self.agent.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = Some(now + RETRY);
        let mut agent = match Agent::connect(&self.path) {
            Ok(agent) => agent,
            Err(e) => return self.down = Link::Down(e.to_string()),
        };
        if let Some(peer) = agent.peer_pid().filter(|p| *p != self.pid) {
            let path = self.path.display();
            let why = format!("{path}: served by process {peer}, not by this VM's {}", self.pid);
            return self.down = Link::Down(why);
        }
        if let Ok(id) = agent.send(Command::Hello) {
            self.asked.push((Ask::Hello, id));
        }
        self.stage = Stage::Hello;
        self.agent = Some(agent);
    }

    fn attach(&mut self, run: Option<&RunState>, reports: bool, qmp: Option<&mut Client>) {
        let running = match run {
            Some(RunState::Running) => true,
            Some(RunState::Paused) => false,
            _ => return,
        };
        let Some(qmp) = qmp else { return };
        let segments = match segments(qmp, SEGMENTS) {
            Ok(segments) => segments,
            Err(e) => return self.lose(format!("QEMU does not tell where its RAM is: {e}")),
        };
        self.running = Some(running);
        self.reports = reports;
        self.segments = segments.clone();
        let mut objections = self.objections.clone();
        if reports {
            objections.push(OTHERS_DISCARD.into());
        }
        let device = File::options().read(true).write(true).open(USERFAULTFD).ok();
        let (descriptor, keep_open) = (device.is_some(), self.keep_open);
        let attach = Attach { segments, objections, running, keep_open, descriptor };
        self.send_with(Ask::Attach, Command::Attach(attach), device.map(OwnedFd::from));
        (self.stage, self.scanner) = (Stage::Attaching, None);
    }

    fn relay(&mut self, now: Instant, run: Option<&RunState>, events: &[VmEvent]) {
        if run == Some(&RunState::Migrating) {
            self.send(Ask::Other, Command::StandDown);
            (self.stage, self.status) = (Stage::Apart, None);
            return;
        }
        if events.contains(&VmEvent::Reset) {
            self.send(Ask::Other, Command::ResetSeen);
        }
        let running = run.map(|r| *r == RunState::Running);
        if running.is_some() && running != self.running {
            self.running = running;
            self.send(Ask::Other, Command::RunState { running: running == Some(true) });
        }
        if !self.asked.is_empty() {
            return;
        }
        let held = self.held_at.is_none_or(|at| now - at >= HELD_EVERY);
        if held {
            self.held_at = Some(now);
        }
        self.send(Ask::Status, Command::Status { held });
        if self.status.as_ref().is_some_and(|s| s.state == AgentState::Ready) {
            self.send(Ask::Facts, Command::Facts);
        }
    }

    fn send(&mut self, ask: Ask, command: Command) {
        self.send_with(ask, command, None);
    }

    fn send_with(&mut self, ask: Ask, command: Command, descriptor: Option<OwnedFd>) {
        let Some(agent) = self.agent.as_mut() else { return };
        match agent.send_with(command, descriptor) {
            Ok(id) => self.asked.push((ask, id)),
            Err(e) => self.lose(e.to_string()),
        }
    }

    /// Hands over what the policy ordered; what it did shows in the counters.
    pub fn order(&mut self, order: &RecycleOrder) {
        if self.stage != Stage::Attached {
            return;
        }
        if let Some(recycle) = &order.recycle {
            self.send(Ask::Recycle, Command::Recycle(*recycle));
            // What is held is news afterwards.
            self.held_at = None;
        }
        if order.mark {
            self.send(Ask::Other, Command::Mark);
        }
        if let Some(agent) = self.agent.as_mut() {
            agent.pump();
        }
    }

    /// Has it open these ranges to KSM, and no others, unless it was told so last;
    /// whether it was told now.
    pub fn advise(&mut self, open: &[(u64, u64)]) -> bool {
        let same = self.told.as_ref().is_some_and(|told| told == open);
        if self.stage != Stage::Attached || !self.advises || same {
            return false;
        }
        self.told = Some(open.to_vec());
        for part in Advise::all(open) {
            self.send(Ask::Advise, Command::Advise(part));
        }
        if let Some(agent) = self.agent.as_mut() {
            agent.pump();
        }
        true
    }

    /// Where a scan asks it for hashes of pages, if it can do that. What it does not take
    /// on shows there.
    pub fn scanner(&mut self) -> Option<Arc<HashLink>> {
        if self.stage != Stage::Attached || !self.hashes {
            return None;
        }
        if self.scanner.as_ref().is_none_or(|s| s.failure().is_some()) {
            let (ours, theirs) = HashLink::pair(&self.segments).ok()?;
            self.send_with(Ask::Other, Command::Hashes, Some(theirs));
            self.agent.as_mut()?.pump();
            self.scanner = Some(Arc::new(ours));
        }
        self.scanner.clone()
    }

    /// What it says is open to KSM.
    pub fn open(&self) -> Bytes {
        self.open.unwrap_or_default()
    }

    /// Whether it has just been met.
    pub fn is_new(&self) -> bool {
        self.agent.is_some() && matches!(self.stage, Stage::Hello | Stage::Attaching)
    }

    /// Whether its last answer lets something follow at once.
    pub fn goes_on(&self) -> bool {
        let idle = self.agent.is_some() && self.asked.is_empty();
        idle && (self.stage == Stage::Met || self.stage == Stage::Attached && self.status.is_none())
    }

    /// Why it did not do what it was told of merging.
    pub fn refused(&self) -> Option<&String> {
        self.refused.as_ref()
    }

    /// Takes the answers that are there; whether some are still owed.
    pub fn hear(&mut self, now: Instant) -> bool {
        let Some(agent) = self.agent.as_mut() else { return false };
        agent.pump();
        let mut answers = Vec::new();
        self.asked.retain(|(ask, id)| match agent.take_reply(*id) {
            Some(answer) => {
                answers.push((*ask, answer));
                false
            }
            None => true,
        });
        let failure = agent.failure().map(|e| e.to_string());
        for (ask, answer) in answers {
            self.waits_since = None;
            self.answer(ask, answer);
        }
        if let Some(why) = failure {
            self.lose(why);
        }
        if self.asked.is_empty() {
            self.waits_since = None;
        } else if now - *self.waits_since.get_or_insert(now) > GIVE_UP {
            self.lose(format!("{}: silent for {} s", self.path.display(), GIVE_UP.as_secs()));
        }
        !self.asked.is_empty()
    }

    fn answer(&mut self, ask: Ask, answer: Result<Answer, AgentError>) {
        match (ask, answer) {
            (Ask::Hello, Ok(Answer::Hello(h))) if h.protocol == PROTOCOL => {
                (self.stage, self.advises, self.hashes) = (Stage::Met, h.advises, h.hashes);
            }
            (Ask::Hello, Ok(Answer::Hello(h))) => self.lose(format!(
                "the agent speaks protocol {}, this daemon {PROTOCOL}: restart the VM with the \
                 agent of this version",
                h.protocol
            )),
            (Ask::Attach, Ok(_)) => {
                self.stage = Stage::Attached;
                self.told = (!self.keep_open).then(Vec::new);
                self.open = self.told.is_some().then_some(Bytes::ZERO);
            }
            (Ask::Advise, Ok(Answer::Advised { open })) => {
                (self.open, self.refused) = (Some(open), None);
            }
            (Ask::Advise, Err(AgentError::Refused(_, no))) => {
                // Told again next time.
                self.told = None;
                self.refused = Some(no.text);
            }
            // It stands aside: asked for its reasons each tick all the same.
            (Ask::Attach, Err(AgentError::Refused(_, no))) if no.kind == Refused::Aside => {
                self.stage = Stage::Attached;
            }
            (Ask::Attach, Err(e)) => self.lose(e.to_string()),
            (Ask::Status, Ok(Answer::Status(mut status))) => {
                // What is held is asked for less often: the last answer stands.
                if status.held.is_none() && status.state == AgentState::Ready {
                    status.held = self.status.as_ref().and_then(|s| s.held);
                }
                self.status = Some(status);
            }
            (Ask::Facts, Ok(Answer::Facts(facts))) => {
                self.facts = Some(facts);
            }
            (_, Err(AgentError::Refused(..)) | Ok(_)) => {}
            (_, Err(e)) => self.lose(e.to_string()),
        }
    }

    fn lose(&mut self, why: String) {
        self.down = Link::Down(why);
        self.agent = None;
        self.asked.clear();
        (self.status, self.facts, self.waits_since) = (None, None, None);
        (self.open, self.scanner) = (None, None);
    }

    /// What is known of it.
    pub fn sample(&self) -> AgentSample {
        let status = self.status.clone().unwrap_or_default();
        let link = match (&self.agent, self.stage) {
            (None, _) => self.down.clone(),
            (Some(_), Stage::Hello | Stage::Met) => Link::Unknown,
            (Some(_), Stage::Apart) => Link::Down("hands off while the VM migrates".into()),
            (Some(_), _) => Link::Up,
        };
        AgentSample {
            link,
            state: status.state,
            why: status.why,
            module: status.module.map(|m| format!("{} on Linux {}", m.version, m.linux)),
            free: status.free,
            held: status.held,
            allocated: self.facts.map(|f| Bytes::pages(f.alloc)),
            facts: self.facts,
            busy: self.asked.iter().any(|(ask, _)| *ask == Ask::Recycle),
            counters: status.counters,
            advises: self.advises && self.stage == Stage::Attached,
            open: self.open,
        }
    }
}
