//! One VM's agent between ticks: connect, introduce, hand over RAM, ask.
//!
//! All steps are non-blocking: [`AgentLink::ask`] queues this tick's
//! questions, the caller drives all agents against one deadline,
//! [`AgentLink::hear`] takes the answers.
//!
//! An agent is handed RAM, and told to give some back, only while QEMU's last answer on what
//! can write to that RAM is young and holds nothing against it.
//!
//! Here are connections, the steps from an introduced agent to one at work, and what it is told
//! and asked each tick, orders too; what it answers has a file of its own.

mod answers;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_core::plan::RecycleOrder;
use ebb_core::range::Range;
use ebb_core::sample::{Link, RunState, VmEvent};
use ebb_core::units::Bytes;
use ebb_core::wire::abi::Facts;
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{
    Advise, AgentState, Attach, BUDGET_MS_MAX, Command, OTHERS_DISCARD, Recycle, Segment, Status,
};

use crate::agent::{Agent, AgentError};
use crate::inventory::Findings;
use crate::scan::agents::HashLink;

/// A QEMU without privilege gets its userfaultfd from our descriptor of this: only
/// such a one sees the faults that KVM takes.
const USERFAULTFD: &str = "/dev/userfaultfd";
/// RAM is handed anew to one that stands aside for what may pass, and what it refused is asked of
/// it again.
const PASSES: Duration = Duration::from_secs(10);
/// All processes are looked through for those that map shared RAM this often at most.
const MAPPED_EVERY: Duration = Duration::from_secs(60);
/// What is held of the free pages costs the agent 5–10 ns a page.
const HELD_EVERY: Duration = Duration::from_secs(2);
/// A lost agent is looked for again after this.
const RETRY: Duration = Duration::from_secs(5);
/// An agent whose connection has ended gives up all protection when its batch of recycling is
/// over, at the latest.
const GONE: Duration = Duration::from_millis(BUDGET_MS_MAX + 1000);
/// Nothing is given back when QEMU has not told for this time what can write to RAM, and no order
/// waits longer.
const VERDICT_OLD: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    Hello,
    /// Introduced; RAM is to be handed over.
    Met,
    /// RAM was handed over; the answer is awaited.
    Attaching,
    Attached,
    /// The agent has been told to stand down while the VM migrates.
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
    pub observe: bool,
    /// Windows longer than this, ms, have it stand aside; 0: none do.
    pub window_limit_ms: u64,
    /// What breaking merges may take below the VM's limits; `None`: there are none.
    pub room: Option<Bytes>,
    /// Another one may be breaking merges: this one is handed its RAM later.
    pub waits: bool,
}

#[derive(Debug, Default)]
pub(crate) struct AgentLink {
    path: PathBuf,
    pid: u32,
    pub agent: Option<Agent>,
    stage: Stage,
    down: Link,
    retry_at: Option<Instant>,
    asked: Vec<(RequestKind, u64)>,
    waits_since: Option<Instant>,
    running: Option<bool>,
    terms: Terms,
    wants_descriptor: bool,
    /// When QEMU last told all that can write to the RAM, and what of it forbade the agent
    /// to work when the RAM was handed over.
    known_at: Option<Instant>,
    /// Whether that was in this tick.
    known_now: bool,
    /// An order that is sent when QEMU has told that anew.
    waiting: Option<Waiting>,
    /// The last order that was carried out did not come to the end of the map.
    more: bool,
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
    segments: Vec<Segment>,
    /// What it was told to open to KSM since it was attached, and after how many scans; `None`:
    /// what is open is not known.
    told: Option<(Vec<Range>, u64)>,
    open: Option<Bytes>,
    /// When and why it did not do what it was told of merging.
    refused: Option<(Instant, String)>,
    /// Since when it may be at work on the VM's memory for a connection that has ended, this
    /// daemon's or an earlier one's. `None`: it has answered since.
    unsettled: Option<Instant>,
}

/// An order to give memory back that waits for QEMU's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    since: Instant,
    recycle: Recycle,
    /// The map is copied after it: it goes by the copy before.
    mark: bool,
}

/// What an answer of the agent is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Advise,
    Hello,
    Attach,
    Status,
    Facts,
    Recycle,
    Other,
}

impl AgentLink {
    pub fn new(path: PathBuf, pid: u32) -> AgentLink {
        AgentLink { path, pid, unsettled: Some(Instant::now()), ..AgentLink::default() }
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
            self.asked.push((RequestKind::Hello, id));
        }
        self.stage = Stage::Hello;
        self.agent = Some(agent);
    }

    fn lose(&mut self, why: String) {
        if self.stage != Stage::Hello {
            self.unsettled = Some(Instant::now());
        }
        self.down = Link::Down(why);
        self.agent = None;
        self.asked.clear();
        (self.status, self.facts, self.waits_since) = (None, None, None);
        (self.open, self.scanner, self.waiting) = (None, None, None);
    }

    /// Has the agent give up all protection, and hangs up when it has said so. To be `sure`, one
    /// whose connection was lost is asked on another, and so is one that an earlier daemon may
    /// have had: it serves one at a time, and gives up all protection with each.
    pub fn leave(&mut self, now: Instant, sure: bool) {
        match self.stage() {
            None if !sure => self.settle(now),
            None if self.unsettled.is_some() => self.connect(now),
            None => {}
            Some(Stage::Leaving) if self.asked.is_empty() => {
                (self.stage, self.retry_at) = (Stage::Hello, None);
                self.lose("left alone".into());
                self.unsettled = None;
            }
            Some(Stage::Leaving) => {}
            Some(_) => self.stand_down(Stage::Leaving),
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

    /// Queues what is to be asked in this tick. `findings`: what QEMU has told of all that can
    /// write to the VM's memory, if it has in this tick.
    pub fn ask(
        &mut self,
        now: Instant,
        run: Option<&RunState>,
        events: &[VmEvent],
        terms: Terms,
        findings: Option<&Findings>,
    ) {
        if self.stage == Stage::Leaving {
            self.lose("begun anew".into());
            self.retry_at = None;
        }
        self.connect(now);
        // Replies first: orders that are done free places for questions.
        self.hear(now);
        if self.agent.is_none() {
            return;
        }
        self.terms.room = terms.room;
        let (keep_open, waits) = (self.terms.keep_open, self.terms.waits);
        let anew = Terms { keep_open, waits, ..terms } != self.terms;
        let known = (&self.objections, &self.segments, self.firmware);
        let other = findings.is_some_and(|f| (&f.objections, &f.segments, f.firmware) != known);
        self.known_now = findings.is_some();
        self.known_at = findings.map(|f| f.begun).or(self.known_at);
        match self.stage {
            Stage::Met if terms.waits => {}
            Stage::Met => self.attach(run, terms, findings),
            // Something was plugged in or out, or the operator wants it otherwise.
            Stage::Attached if anew || other => self.stand_down(Stage::Met),
            // What it stood aside for may have passed.
            Stage::Attached if self.aside_since.is_some_and(|at| now - at >= PASSES) => {
                self.aside_since = None;
                let said = self.status.take().map(|s| Status {
                    state: s.state,
                    why: s.why,
                    ..Status::default()
                });
                self.stand_down(Stage::Met);
                // Why it stood aside is true until it has answered anew.
                self.status = said;
            }
            Stage::Attached => {
                self.clear(findings);
                self.relay(now, run, events);
                self.send_waiting();
            }
            Stage::Apart if matches!(run, Some(RunState::Running | RunState::Paused)) => {
                self.stage = Stage::Met;
            }
            Stage::Hello | Stage::Attaching | Stage::Leaving | Stage::Apart => {}
        }
    }

    fn stand_down(&mut self, next: Stage) {
        self.send(RequestKind::Other, Command::StandDown);
        (self.stage, self.status, self.unclear, self.waiting) = (next, None, None, None);
    }

    /// Tells the agent that what it found unclear is harmless: QEMU has told all since, and
    /// no other process maps the RAM.
    fn clear(&mut self, findings: Option<&Findings>) {
        let Some((generation, heard)) = self.unclear else { return };
        let fresh = findings.is_some_and(|f| f.begun > heard && f.leaves_it_to_the_agent());
        if fresh && matches!(self.mapped, Some(Ok(()))) {
            self.send(RequestKind::Other, Command::Cleared { generation });
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

    /// Whether it needs what QEMU tells of all that can write to the VM's memory: to be handed RAM,
    /// to have something cleared, or for an order.
    pub fn awaits_findings(&self) -> bool {
        let met = matches!(self.stage(), Some(Stage::Hello | Stage::Met));
        let harmless = self.unclear.is_some() && matches!(self.mapped, Some(Ok(())));
        met || harmless || self.waiting.is_some()
    }

    /// What it is at, where there is a connection.
    pub fn stage(&self) -> Option<Stage> {
        self.agent.as_ref().map(|_| self.stage)
    }

    /// It knows of no RAM now, and is to be told where that is.
    pub fn is_apart(&self) -> bool {
        matches!(self.stage(), Some(Stage::Hello | Stage::Met | Stage::Apart))
    }

    /// Hands over RAM, if QEMU has told where it is and what else writes to it.
    fn attach(&mut self, run: Option<&RunState>, terms: Terms, findings: Option<&Findings>) {
        let running = match run {
            Some(RunState::Running) => true,
            Some(RunState::Paused) => false,
            _ => return,
        };
        let Some(findings) = findings else { return };
        self.running = Some(running);
        self.terms = terms;
        self.segments = findings.segments.clone();
        self.objections = findings.objections.clone();
        self.firmware = findings.firmware;
        let mut objections = findings.objections.clone();
        // Only who asked for it, and may work, gets it.
        let may = findings.leaves_it_to_the_agent() && findings.firmware != Firmware::Unknown;
        let device = (self.wants_descriptor && may)
            .then(|| File::options().read(true).write(true).open(USERFAULTFD).ok())
            .flatten();
        if terms.reports {
            objections.push(OTHERS_DISCARD.into());
        }
        let attach = Attach {
            segments: findings.segments.clone(),
            objections,
            firmware: findings.firmware,
            running,
            keep_open: terms.keep_open,
            observe: terms.observe,
            window_limit_ms: terms.window_limit_ms,
            descriptor: device.is_some(),
            room: terms.room,
        };
        self.send_with(RequestKind::Attach, Command::Attach(attach), device.map(OwnedFd::from));
        (self.stage, self.scanner) = (Stage::Attaching, None);
        (self.unclear, self.mapped) = (None, None);
    }

    fn relay(&mut self, now: Instant, run: Option<&RunState>, events: &[VmEvent]) {
        if run == Some(&RunState::Migrating) {
            return self.stand_down(Stage::Apart);
        }
        if events.contains(&VmEvent::Reset) {
            self.send(RequestKind::Other, Command::ResetSeen);
        }
        let running = run.map(|r| *r == RunState::Running);
        if running.is_some() && running != self.running {
            self.running = running;
            self.send(RequestKind::Other, Command::RunState { running: running == Some(true) });
        }
        if !self.asked.is_empty() {
            return;
        }
        let held = self.held_at.is_none_or(|at| now - at >= HELD_EVERY);
        if held {
            self.held_at = Some(now);
        }
        self.send(RequestKind::Status, Command::Status { held, room: self.terms.room });
        if self.status.as_ref().is_some_and(|s| s.state == AgentState::Ready) {
            self.send(RequestKind::Facts, Command::Facts);
        }
    }

    fn send(&mut self, kind: RequestKind, command: Command) {
        self.send_with(kind, command, None);
    }

    fn send_with(&mut self, kind: RequestKind, command: Command, descriptor: Option<OwnedFd>) {
        let Some(agent) = self.agent.as_mut() else { return };
        match agent.send_with(command, descriptor) {
            Ok(id) => self.asked.push((kind, id)),
            Err(e) => self.lose(e.to_string()),
        }
    }

    /// Whether it has just been met.
    pub fn is_new(&self) -> bool {
        matches!(self.stage(), Some(Stage::Hello | Stage::Attaching))
    }

    /// Whether its last answer lets something follow at once.
    pub fn goes_on(&self) -> bool {
        let idle = self.agent.is_some() && self.asked.is_empty();
        idle && (self.stage == Stage::Met || self.stage == Stage::Attached && self.status.is_none())
    }

    /// Hands over what the policy ordered; what it did shows in the counters. Memory is given back
    /// when QEMU has told what can write to RAM: [`AgentLink::order_waits`].
    pub fn order(&mut self, order: &RecycleOrder) {
        if self.stage != Stage::Attached {
            return;
        }
        self.drop_expired();
        match (order.recycle, &mut self.waiting) {
            (Some(recycle), waiting) => {
                let mark = order.mark || waiting.is_some_and(|w| w.mark);
                *waiting = Some(Waiting { since: Instant::now(), recycle, mark });
            }
            (None, Some(waiting)) => waiting.mark |= order.mark,
            (None, None) if order.mark => self.send(RequestKind::Other, Command::Mark),
            (None, None) => {}
        }
        self.send_waiting();
        self.agent.iter_mut().for_each(Agent::pump);
    }

    pub fn order_waits(&self) -> bool {
        self.waiting.is_some()
    }

    fn drop_expired(&mut self) {
        self.waiting.take_if(|w| w.since.elapsed() >= VERDICT_OLD);
    }

    /// Sends it, where QEMU has told in this tick, and not long ago.
    fn send_waiting(&mut self) {
        self.drop_expired();
        let known = self.known_now && self.known_at.is_some_and(|at| at.elapsed() < VERDICT_OLD);
        let Some(order) = self.waiting.take_if(|_| known) else { return };
        self.send(RequestKind::Recycle, Command::Recycle(order.recycle));
        if order.mark {
            self.send(RequestKind::Other, Command::Mark);
        }
        // What is held is news afterwards.
        self.held_at = None;
    }

    /// Has it open these ranges to KSM, and no others, unless it was told so last and no further
    /// scan has ended: the agent closes what the guest frees in them. If it was told now: whether
    /// it may have to close ranges for it, which are sorted.
    pub fn advise(&mut self, open: &[Range], scans: u64) -> Option<bool> {
        let same = self.told.as_ref().is_some_and(|(told, by)| told == open && *by == scans);
        let refused = self.refused.as_ref().is_some_and(|(at, _)| at.elapsed() < PASSES);
        let can = self.stage == Stage::Attached && self.advises && !self.terms.observe;
        if !can || same || refused {
            return None;
        }
        let is_dropped = |range: &Range| open.binary_search(range).is_err();
        let closes = self.told.as_ref().is_none_or(|(told, _)| told.iter().any(is_dropped));
        self.told = Some((open.to_vec(), scans));
        // It has RAM alone; what lies in the memory of a device is as QEMU opened it.
        let in_ram = |at: u64| self.segments.iter().any(|s| (s.hva..s.hva + s.size).contains(&at));
        let is_ram = |range: &&Range| in_ram(range.start) && in_ram(range.end() - 1);
        for part in Advise::all(&open.iter().filter(is_ram).copied().collect::<Vec<_>>()) {
            self.send(RequestKind::Advise, Command::Advise(part));
        }
        self.agent.iter_mut().for_each(Agent::pump);
        Some(closes)
    }

    /// Where a scan asks it for hashes of pages, if it can do that. What it does not take
    /// on shows there.
    pub fn scanner(&mut self) -> Option<Arc<HashLink>> {
        if self.stage != Stage::Attached || !self.hashes {
            return None;
        }
        if self.scanner.as_ref().is_none_or(|s| s.failure().is_some()) {
            let (ours, theirs) = HashLink::pair(&self.segments).ok()?;
            self.send_with(RequestKind::Other, Command::Hashes, Some(theirs));
            self.agent.as_mut()?.pump();
            self.scanner = Some(Arc::new(ours));
        }
        self.scanner.clone()
    }

    /// Why it did not do what it was told of merging.
    pub fn refused(&self) -> Option<&String> {
        self.refused.as_ref().map(|(_, why)| why)
    }

    pub fn open(&self) -> Bytes {
        self.open.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
