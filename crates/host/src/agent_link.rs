//! One VM's agent between ticks: connect, introduce, hand over RAM, ask.
//!
//! All steps are non-blocking: [`AgentLink::ask`] queues this tick's
//! questions, the caller drives all agents against one deadline,
//! [`AgentLink::hear`] takes the answers.
//!
//! An agent is handed RAM, and told to give some back, only while QEMU's last word on what
//! can write to that RAM is young and holds nothing against it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::plan::RecycleOrder;
use ebb_core::sample::{AgentSample, Link, RunState, VmEvent};
use ebb_core::units::Bytes;
use ebb_core::wire::abi::Facts;
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{
    Advise, AgentState, Answer, Attach, BUDGET_MS_MAX, Command, OTHERS_DISCARD, PROTOCOL, Refused,
    Segment, Status,
};

use crate::agent::{Agent, AgentError};
use crate::inventory::Verdict;
use crate::scan::agents::HashLink;

/// A QEMU without privilege gets its userfaultfd from our descriptor of this: only
/// such a one sees the faults that KVM takes.
const USERFAULTFD: &str = "/dev/userfaultfd";
/// A lost agent is looked for again after this.
const RETRY: Duration = Duration::from_secs(5);
/// RAM is handed anew to one that stands aside for what may pass.
const PASSES: Duration = Duration::from_secs(10);
/// Nothing is given back when QEMU has not told for so long what can write to RAM.
const VERDICT_OLD: Duration = Duration::from_secs(3);
/// All processes are looked through for those that map shared RAM this often at most.
const MAPPED_EVERY: Duration = Duration::from_secs(60);
/// An agent that owes an answer this long is given up. It may be in a batch of
/// recycling that takes all of its budget.
const GIVE_UP: Duration = Duration::from_secs(20);
/// An agent whose connection has ended gives up all protection when its batch of recycling is
/// over, at the latest.
const GONE: Duration = Duration::from_millis(BUDGET_MS_MAX + 1000);
/// What to do where an agent stands aside.
const ASIDE: &str = " (Ebb goes on as without the agent: start the VM without what is named, or \
    set agent = \"off\" for it)";
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
    /// Told to give up all protection, for good.
    Leaving,
}

/// On what terms an agent is handed RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The VM has free page reporting.
    pub reports: bool,
    /// What the agent has opened to KSM before stays open.
    pub keep_open: bool,
    /// It only looks.
    pub observe: bool,
    /// Windows longer than this, ms, have it stand aside; 0: none do.
    pub window_limit_ms: u64,
}

/// A VM's agent.
#[derive(Debug)]
pub(crate) struct AgentLink {
    path: PathBuf,
    pid: u32,
    agent: Option<Agent>,
    stage: Stage,
    down: Link,
    retry_at: Option<Instant>,
    asked: Vec<(Ask, u64)>,
    waits_since: Option<Instant>,
    running: Option<bool>,
    /// What it was handed RAM on.
    terms: Terms,
    wants_descriptor: bool,
    /// When QEMU last told all that can write to the RAM, and what of it forbade the agent
    /// to work when the RAM was handed over.
    known_at: Option<Instant>,
    objections: Vec<String>,
    firmware: Firmware,
    /// A socket was opened beside shared RAM: which, and when that was heard.
    unclear: Option<(u64, Instant)>,
    /// Since when it stands aside for what may pass.
    aside_since: Option<Instant>,
    /// Whether other processes map the RAM; asked for while something is unclear.
    mapped: Option<Result<(), String>>,
    mapped_at: Option<Instant>,
    held_at: Option<Instant>,
    status: Option<Status>,
    facts: Option<Facts>,
    advises: bool,
    /// It can hash pages for a scan; and where it is asked to.
    hashes: bool,
    scanner: Option<Arc<HashLink>>,
    /// What it was handed.
    segments: Vec<Segment>,
    /// What it was told to open to KSM since it was attached; `None`: what is open is
    /// not known.
    told: Option<Vec<(u64, u64)>>,
    open: Option<Bytes>,
    refused: Option<String>,
    /// Since when it may be at work on the VM's memory for a connection that has ended, this
    /// daemon's or an earlier one's. `None`: it has answered since.
    unsettled: Option<Instant>,
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
    pub fn new(path: PathBuf, pid: u32) -> AgentLink {
        AgentLink {
            path,
            pid,
            agent: None,
            stage: Stage::Hello,
            down: Link::Unknown,
            retry_at: None,
            asked: Vec::new(),
            waits_since: None,
            running: None,
            terms: Terms::default(),
            wants_descriptor: false,
            known_at: None,
            objections: Vec::new(),
            firmware: Firmware::Unknown,
            unclear: None,
            aside_since: None,
            mapped: None,
            mapped_at: None,
            held_at: None,
            status: None,
            facts: None,
            advises: false,
            hashes: false,
            scanner: None,
            segments: Vec::new(),
            told: None,
            open: None,
            refused: None,
            unsettled: Some(Instant::now()),
        }
    }

    /// The connection, for `poll`.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Queues what is to be asked in this tick. `verdict`: what QEMU has told of all that can
    /// write to the VM's memory, if it has in this tick.
    pub fn ask(
        &mut self,
        now: Instant,
        run: Option<&RunState>,
        events: &[VmEvent],
        terms: Terms,
        verdict: Option<&Verdict>,
    ) {
        if self.stage == Stage::Leaving {
            self.lose("begun anew".into());
            self.retry_at = None;
        }
        self.connect(now);
        // What came since the last tick: orders that are done make room for questions.
        self.hear(now);
        if self.agent.is_none() {
            return;
        }
        let anew = Terms { keep_open: self.terms.keep_open, ..terms } != self.terms;
        let other = |v: &&Verdict| {
            let known = (&self.objections, &self.segments, self.firmware);
            (&v.objections, &v.segments, v.firmware) != known
        };
        let stood = verdict.filter(other);
        if let Some(v) = verdict {
            self.known_at = Some(v.begun);
        }
        match self.stage {
            Stage::Hello | Stage::Attaching | Stage::Leaving => {}
            Stage::Met => self.attach(run, terms, verdict),
            // Something was plugged in or out, or the operator wants it otherwise.
            Stage::Attached if anew || stood.is_some() => self.stand_down(Stage::Met),
            // The device that it stood aside for may be gone.
            Stage::Attached if self.aside_since.is_some_and(|at| now - at >= PASSES) => {
                self.aside_since = None;
                self.stand_down(Stage::Met);
            }
            Stage::Attached => {
                self.clear(verdict);
                self.relay(now, run, events);
            }
            Stage::Apart => {
                if matches!(run, Some(RunState::Running | RunState::Paused)) {
                    self.stage = Stage::Met;
                }
            }
        }
    }

    fn stand_down(&mut self, next: Stage) {
        self.send(Ask::Other, Command::StandDown);
        (self.stage, self.status, self.unclear) = (next, None, None);
    }

    /// Tells the agent that what it found unclear is harmless: QEMU has told all since, and
    /// no other process maps the RAM.
    fn clear(&mut self, verdict: Option<&Verdict>) {
        let Some((generation, heard)) = self.unclear else { return };
        let fresh = verdict.is_some_and(|v| v.begun > heard && v.leaves_it_to_the_agent());
        if fresh && matches!(self.mapped, Some(Ok(()))) {
            self.send(Ask::Other, Command::Cleared { generation });
            (self.unclear, self.mapped) = (None, None);
        }
    }

    /// The RAM of which is to be known whether other processes map it, and what made that
    /// unclear.
    pub fn wants_mappers(&self) -> Option<(u64, &[Segment])> {
        let old = self.mapped_at.is_none_or(|at| at.elapsed() >= MAPPED_EVERY);
        let due = self.mapped.is_none() || matches!(self.mapped, Some(Err(_))) && old;
        self.unclear.filter(|_| due).map(|(generation, _)| (generation, self.segments.as_slice()))
    }

    /// Whether they do, by a look that began when that was unclear; asked again after a while
    /// where they do.
    pub fn mappers(&mut self, generation: u64, found: Result<(), String>) {
        if self.unclear.is_some_and(|(now, _)| now == generation) {
            self.mapped = Some(found);
            self.mapped_at = Some(Instant::now());
        }
    }

    /// It knows of no RAM now, and is to be told where that is.
    pub fn is_apart(&self) -> bool {
        self.agent.is_some() && matches!(self.stage, Stage::Hello | Stage::Met | Stage::Apart)
    }

    /// Has the agent give up all protection, and hangs up when it has said so. To be `sure`, one
    /// whose connection was lost is asked on another, and so is one that an earlier daemon may
    /// have had: it serves one at a time, and gives up all protection with each.
    pub fn leave(&mut self, now: Instant, sure: bool) {
        match self.stage {
            _ if self.agent.is_none() && !sure => self.settle(now),
            _ if self.agent.is_none() && self.unsettled.is_some() => self.connect(now),
            _ if self.agent.is_none() => {}
            Stage::Leaving if self.asked.is_empty() => {
                (self.stage, self.retry_at) = (Stage::Hello, None);
                self.lose("left alone".into());
                self.unsettled = None;
            }
            Stage::Leaving => {}
            _ => self.stand_down(Stage::Leaving),
        }
    }

    /// Whether [`AgentLink::leave`] has come to its end: the agent has said so, or there is none.
    pub fn has_left(&self) -> bool {
        self.agent.is_none() && self.unsettled.is_none()
    }

    /// What it did for a connection that has ended is over by now.
    fn settle(&mut self, now: Instant) {
        self.unsettled.take_if(|since| now - *since >= GONE);
    }

    fn connect(&mut self, now: Instant) {
        if self.agent.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = Some(now + RETRY);
        let mut agent = match Agent::connect(&self.path) {
            Ok(agent) => agent,
            Err(e) => {
                if matches!(e, AgentError::None(_)) {
                    self.settle(now);
                }
                return self.down = Link::Down(e.to_string());
            }
        };
        let peer = agent.peer_pid();
        if peer != Some(self.pid) {
            let path = self.path.display();
            let by =
                peer.map_or("a process that cannot be seen".into(), |p| format!("process {p}"));
            let why = format!("{path}: served by {by}, not by this VM's {}", self.pid);
            return self.down = Link::Down(why);
        }
        if let Ok(id) = agent.send(Command::Hello) {
            self.asked.push((Ask::Hello, id));
        }
        self.stage = Stage::Hello;
        self.agent = Some(agent);
    }

    /// Hands over RAM, if QEMU has told where it is and what else writes to it.
    fn attach(&mut self, run: Option<&RunState>, terms: Terms, verdict: Option<&Verdict>) {
        let running = match run {
            Some(RunState::Running) => true,
            Some(RunState::Paused) => false,
            _ => return,
        };
        let Some(verdict) = verdict else { return };
        self.running = Some(running);
        self.terms = terms;
        self.segments = verdict.segments.clone();
        self.objections = verdict.objections.clone();
        self.firmware = verdict.firmware;
        let mut objections = verdict.objections.clone();
        // Only who asked for it, and may work, gets it.
        let may = verdict.leaves_it_to_the_agent() && verdict.firmware != Firmware::Unknown;
        let device = (self.wants_descriptor && may)
            .then(|| File::options().read(true).write(true).open(USERFAULTFD).ok())
            .flatten();
        if terms.reports {
            objections.push(OTHERS_DISCARD.into());
        }
        let attach = Attach {
            segments: verdict.segments.clone(),
            objections,
            firmware: verdict.firmware,
            running,
            keep_open: terms.keep_open,
            observe: terms.observe,
            window_limit_ms: terms.window_limit_ms,
            descriptor: device.is_some(),
        };
        self.send_with(Ask::Attach, Command::Attach(attach), device.map(OwnedFd::from));
        (self.stage, self.scanner) = (Stage::Attaching, None);
        (self.unclear, self.mapped) = (None, None);
    }

    fn relay(&mut self, now: Instant, run: Option<&RunState>, events: &[VmEvent]) {
        if run == Some(&RunState::Migrating) {
            return self.stand_down(Stage::Apart);
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
        let known = self.known_at.is_some_and(|at| at.elapsed() < VERDICT_OLD);
        if let Some(recycle) = order.recycle.as_ref().filter(|_| known) {
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
        if self.stage != Stage::Attached || !self.advises || self.terms.observe || same {
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
            let (path, s) = (self.path.display(), GIVE_UP.as_secs());
            self.lose(format!(
                "{path}: silent for {s} s: QEMU is stopped, or its thread `ebb-agent` does not run; \
                 it is tried again"
            ));
        }
        !self.asked.is_empty()
    }

    fn answer(&mut self, ask: Ask, answer: Result<Answer, AgentError>) {
        match (ask, answer) {
            (Ask::Hello, Ok(Answer::Hello(h))) if h.protocol == PROTOCOL => {
                (self.stage, self.advises, self.hashes) = (Stage::Met, h.advises, h.hashes);
                self.unsettled = None;
                self.wants_descriptor = h.wants_descriptor;
            }
            (Ask::Hello, Ok(Answer::Hello(h))) => {
                self.lose(format!(
                    "the agent speaks protocol {}, this daemon {PROTOCOL}: restart the VM with the \
                     agent of this version",
                    h.protocol
                ));
                // It was told of no RAM on this connection.
                self.unsettled = None;
            }
            (Ask::Attach, Ok(_)) => {
                self.stage = Stage::Attached;
                self.told = (!self.terms.keep_open).then(Vec::new);
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
                match (status.unclear, self.unclear) {
                    (Some(new), Some((known, _))) if new == known => {}
                    (new, _) => {
                        self.unclear = new.map(|generation| (generation, Instant::now()));
                        self.mapped = None;
                    }
                }
                self.aside_since = match (status.passes, self.aside_since) {
                    (true, since) => since.or_else(|| Some(Instant::now())),
                    (false, _) => None,
                };
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
        if self.stage != Stage::Hello {
            self.unsettled = Some(Instant::now());
        }
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
            why: self.mapped.clone().and_then(Result::err).or(match status.state {
                AgentState::Aside => status.why.map(|why| why + ASIDE),
                _ => status.why,
            }),
            module: status.module.map(|m| format!("{} on Linux {}", m.version, m.linux)),
            free: status.free,
            held: status.held,
            allocated: self.facts.map(|f| Bytes::pages(f.alloc)),
            facts: self.facts,
            busy: self.asked.iter().any(|(ask, _)| *ask == Ask::Recycle),
            counters: status.counters,
            windows: status.windows,
            waits: status.waits,
            wires: status.wires,
            observes: false,
            advises: self.advises && self.stage == Stage::Attached,
            open: self.open,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSliceMut, Read, Write};
    use std::mem::MaybeUninit;
    use std::os::unix::net::{UnixListener, UnixStream};

    use ebb_core::wire::{Answer, Hello, Lines, Outcome, Reply, Request};
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::*;

    /// A peer that says hello and tells what came with `attach`, how many descriptors, and
    /// its socket.
    fn peer(socket: UnixStream, wants_descriptor: bool) -> (Attach, usize, UnixStream) {
        let (mut lines, mut descriptors) = (Lines::default(), 0);
        loop {
            let mut buffer = [0u8; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let got = recvmsg(&socket, &mut parts, &mut control, RecvFlags::empty()).unwrap();
            assert!(got.bytes > 0, "the daemon hung up");
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    descriptors += fds.count();
                }
            }
            let mut requests = Vec::new();
            lines
                .feed(&buffer[..got.bytes], |l| requests.push(Request::parse(l).unwrap()))
                .unwrap();
            for request in requests {
                let answer = match request.command {
                    Command::Hello => Answer::Hello(Hello {
                        protocol: PROTOCOL,
                        version: "0".into(),
                        pid: std::process::id(),
                        kernel: Default::default(),
                        advises: false,
                        hashes: false,
                        wants_descriptor,
                    }),
                    Command::Attach(attach) => return (attach, descriptors, socket),
                    _ => Answer::Done,
                };
                let reply = Reply { id: request.id, outcome: Outcome::Ok(answer) };
                (&socket).write_all(&reply.line()).unwrap();
            }
        }
    }

    fn verdict(objections: &[&str]) -> Verdict {
        Verdict {
            begun: Instant::now(),
            objections: objections.iter().map(|o| o.to_string()).collect(),
            firmware: Firmware::Seabios,
            segments: vec![Segment { gpa: 0, size: 1 << 30, hva: 1 << 40 }],
        }
    }

    /// What an agent that is so is handed, with that against it.
    fn handed(wants_descriptor: bool, objections: &[&str]) -> (Attach, usize) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let serve = move || peer(listener.accept().unwrap().0, wants_descriptor);
        let thread = std::thread::spawn(serve);
        let mut link = AgentLink::new(path, std::process::id());
        let (run, verdict) = (RunState::Running, verdict(objections));
        while !thread.is_finished() {
            link.ask(Instant::now(), Some(&run), &[], Terms::default(), Some(&verdict));
            std::thread::sleep(Duration::from_millis(1));
        }
        let (attach, descriptors, _) = thread.join().unwrap();
        (attach, descriptors)
    }

    #[test]
    fn a_descriptor_goes_to_who_asks_for_it_and_may_work() {
        let there = File::options().read(true).write(true).open(USERFAULTFD).is_ok();
        let (attach, descriptors) = handed(true, &[]);
        assert_eq!((attach.descriptor, descriptors), (there, usize::from(there)));
        let (attach, descriptors) = handed(false, &[]);
        assert_eq!((attach.descriptor, descriptors), (false, 0), "it can make one itself");
        let (attach, descriptors) = handed(true, &["a vhost-user device"]);
        assert_eq!((attach.descriptor, descriptors), (false, 0), "it may not work");
        assert_eq!(attach.objections, ["a vhost-user device"]);
        // Of discards by others the agent is the judge.
        let (attach, descriptors) = handed(true, &[OTHERS_DISCARD]);
        assert_eq!((attach.descriptor, descriptors), (there, usize::from(there)));
    }

    #[test]
    fn without_qemus_word_nothing_is_handed_over_and_nothing_recycled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || peer(listener.accept().unwrap().0, false));
        let mut link = AgentLink::new(path, std::process::id());
        let run = RunState::Running;
        for _ in 0..100 {
            link.ask(Instant::now(), Some(&run), &[], Terms::default(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!thread.is_finished() && link.stage == Stage::Met);
        let told = verdict(&[]);
        while !thread.is_finished() {
            link.ask(Instant::now(), Some(&run), &[], Terms::default(), Some(&told));
            std::thread::sleep(Duration::from_millis(1));
        }
        let _open = thread.join().unwrap();
        // Attached, and QEMU has not told anything for long.
        link.stage = Stage::Attached;
        link.known_at = Some(Instant::now() - VERDICT_OLD);
        let order = |recycle| RecycleOrder {
            vm: ebb_core::sample::VmId { pid: 1, start: 1 },
            name: "a".into(),
            recycle,
            mark: false,
            reason: String::new(),
        };
        let before = link.asked.len();
        link.order(&order(Some(Default::default())));
        assert_eq!(link.asked.len(), before);
        link.known_at = Some(Instant::now());
        link.order(&order(Some(Default::default())));
        assert_eq!(link.asked.len(), before + 1);
    }

    #[test]
    fn an_agent_whose_connection_was_lost_has_left_only_when_it_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let mut link = AgentLink::new(path, std::process::id());
        link.connect(Instant::now());
        link.stage = Stage::Attached;
        link.lose("silent for 20 s".into());
        assert!(!link.has_left(), "it may be in the middle of a window");
        drop(listener.accept().unwrap());
        link.leave(Instant::now(), true);
        link.retry_at = None;
        link.leave(Instant::now(), true);
        // It answers again, and is told to give up what it has protected.
        let socket = listener.accept().unwrap().0;
        let thread = std::thread::spawn(move || peer(socket, false));
        let until = Instant::now() + Duration::from_secs(10);
        while !link.has_left() {
            assert!(Instant::now() < until, "{:?}", link.stage);
            link.hear(Instant::now());
            link.leave(Instant::now(), true);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(link.agent.is_none() && link.stage == Stage::Hello);
        drop(link);
        let _ = thread.join();
    }

    /// The daemon was killed while the agent was at work for it.
    #[test]
    fn an_agent_of_an_earlier_daemon_has_left_only_when_it_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let mut link = AgentLink::new(path.clone(), std::process::id());
        let now = Instant::now();
        for _ in 0..10 {
            link.leave(now, true);
            assert!(!link.has_left(), "it has said nothing to this daemon");
            link.hear(now);
        }
        let (mut socket, _) = listener.accept().unwrap();
        let mut line = [0; 4096];
        let n = socket.read(&mut line).unwrap();
        assert!(String::from_utf8_lossy(&line[..n]).contains("stand_down"));
        // Nobody listens (any more): nothing that was begun lasts so long.
        drop(listener);
        let mut link = AgentLink::new(path, std::process::id());
        let now = Instant::now();
        for (after, left) in [(Duration::ZERO, false), (GONE, true)] {
            link.leave(now + after, true);
            assert_eq!(link.has_left(), left, "{after:?}");
        }
        // It is not spoken to: it is not managed, or to be off.
        let listener = UnixListener::bind(dir.path().join("other")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut link = AgentLink::new(dir.path().join("other"), std::process::id());
        link.leave(now, false);
        link.leave(now + 2 * GONE, false);
        assert!(link.has_left() && listener.accept().is_err());
    }

    /// The last command that the agent was sent.
    fn last(link: &mut AgentLink, mut socket: &UnixStream) -> Command {
        link.agent.as_mut().unwrap().pump();
        let mut lines = Lines::default();
        let (mut buffer, mut last) = ([0u8; 4096], None);
        while last.is_none() {
            let got = socket.read(&mut buffer).unwrap();
            lines
                .feed(&buffer[..got], |l| last = Some(Request::parse(l).unwrap().command))
                .unwrap();
        }
        last.unwrap()
    }

    #[test]
    fn what_is_unclear_is_cleared_by_a_later_word_of_qemus_and_a_look_at_who_maps_the_ram() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || peer(listener.accept().unwrap().0, false));
        let mut link = AgentLink::new(path, std::process::id());
        while !thread.is_finished() {
            let (run, told) = (RunState::Running, verdict(&[]));
            link.ask(Instant::now(), Some(&run), &[], Terms::default(), Some(&told));
            std::thread::sleep(Duration::from_millis(1));
        }
        let (_, _, socket) = thread.join().unwrap();
        link.stage = Stage::Attached;
        let says = |link: &mut AgentLink, unclear| {
            let status = Status { unclear, ..Status::default() };
            link.answer(Ask::Status, Ok(Answer::Status(status)));
        };
        assert!(link.wants_mappers().is_none(), "nothing is unclear");
        let before = verdict(&[]);
        says(&mut link, Some(3));
        assert_eq!(link.wants_mappers().map(|(g, s)| (g, s.len())), Some((3, 1)));
        let asked = link.asked.len();
        let clear = |link: &mut AgentLink, verdict: &Verdict| {
            let before = link.asked.len();
            link.clear(Some(verdict));
            link.asked.len() > before
        };
        assert!(!clear(&mut link, &verdict(&[])), "nobody looked who maps it");
        link.mappers(3, Err("process 7 maps it".into()));
        assert!(link.wants_mappers().is_none(), "it is looked again after a minute");
        assert!(!clear(&mut link, &verdict(&[])), "another process maps it");
        assert_eq!(link.sample().why.as_deref(), Some("process 7 maps it"));
        let aside = Status { state: AgentState::Aside, why: Some("x".into()), ..Status::default() };
        let saved = (link.mapped.take(), link.status.replace(aside));
        assert!(link.sample().why.unwrap().contains("x (Ebb goes on as without the agent: start"));
        (link.mapped, link.status) = saved;
        link.mappers(3, Ok(()));
        assert!(!clear(&mut link, &before), "QEMU's word is from before the socket");
        assert!(!clear(&mut link, &verdict(&["a vhost-user disk"])), "a device may be behind it");
        // Another socket: who maps the RAM is to be looked at again.
        says(&mut link, Some(4));
        assert!(link.wants_mappers().is_some() && !clear(&mut link, &verdict(&[])));
        link.mappers(3, Ok(()));
        assert!(!clear(&mut link, &verdict(&[])), "that look began before the socket came");
        link.mappers(4, Ok(()));
        says(&mut link, Some(4));
        assert_eq!(link.asked.len(), asked);
        assert!(clear(&mut link, &verdict(&[])));
        assert!(matches!(last(&mut link, &socket), Command::Cleared { generation: 4 }));
        assert!(link.wants_mappers().is_none() && !clear(&mut link, &verdict(&[])));
    }
}
