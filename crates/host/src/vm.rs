//! One VM between ticks: its QMP connection, what was asked, what was learnt.
//!
//! A tick is: [`Vm::ask`] queues all questions at once, the caller drives all
//! clients against one deadline, [`Vm::hear`] takes the answers (and may ask
//! more, twice at most), [`Vm::sample`] writes down what is known. An answer that comes after
//! the deadline is used in a later tick. A VM that does not
//! answer is not asked again until it has: its questions never pile up.
//!
//! Here is what is kept of a VM, how a tick begins and ends, and when its agent is spoken to; what
//! happens in between stands in a file of `vm/` for each subject.

mod answers;
mod connection;
mod merging;
mod metadata;
mod orders;
mod questions;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_core::config::{AgentUse, SocketUse};
use ebb_core::sample::{
    AgentSample, BalloonSample, Claim, GuestStats, HandsOff, Heard, Link, Problem, ProcessMemory,
    RunState, VmEvent, VmId, VmSample,
};
use ebb_core::units::{Bytes, Stamp};

use self::connection::BACKOFF;
use self::merging::MergeLink;
use self::metadata::DomainSettings;
use crate::agent_link::{AgentLink, Terms};
use crate::background_look::BackgroundLook;
use crate::inventory::{Findings, Inquiry, Inventory};
use crate::libvirt::metadata::METADATA;
use crate::libvirt::{Address, Libvirt};
use crate::probe::mappers::Question;
use crate::probe::own_memory::OwnCount;
use crate::probe::process::{Life, Watched};
use crate::probe::qemu::QemuProcess;
use crate::qmp::{Client, QmpError};
use crate::root::{Probed, Root};

/// A connection that owes an answer this long is given up.
const GIVE_UP: Duration = Duration::from_secs(60);

/// What QEMU is asked, or told beside orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query {
    Status,
    Migrate,
    Balloon,
    Stats,
    /// The statistics just before it is asked out of turn.
    StatsBefore,
    MemorySize,
    /// What is plugged, where there is something.
    MemoryDevices,
    Folder(usize),
    Reporting,
    DeflateOnOom,
    Interval,
    SetInterval,
    /// What can write to its memory.
    Inventory(Inquiry),
}

/// What is asked of a balloon until it is answered, once.
const DETAILS: [Query; 3] = [Query::Reporting, Query::DeflateOnOom, Query::Interval];

/// What is known of a guest's answer to being asked out of turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kick {
    /// What it had said before is not known: its answer cannot be told from that.
    #[default]
    Unknown,
    /// That is known, or is looked at.
    Known,
    /// Its answer was seen.
    Answered,
}

/// An order to the balloon that QEMU has not answered.
#[derive(Clone, Copy, Debug)]
struct PendingOrder {
    command: u64,
    to: Bytes,
    /// `ordered` and `loose` before it.
    before: (Option<Bytes>, bool),
}

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
    /// Which of its QMP sockets may be used, beside Ebb's own.
    pub sockets: SocketUse,
    /// Where it has none, libvirt may be asked.
    pub libvirt: bool,
    /// It is only looked at: nothing is set in QEMU.
    pub look_only: bool,
    /// What its agent may do, and what it may as soon as the metadata of its domain is read.
    pub agent: AgentUse,
    pub agent_then: AgentUse,
    /// The operator has said that no other process writes to its shared RAM.
    pub private_ram: bool,
    /// Windows longer than this have its agent stand aside, ms; 0: none do.
    pub window_limit_ms: u64,
    /// How much longer the operator wants it left alone, ms.
    pub hands_off_ms: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Vm {
    pub process: QemuProcess,
    /// For a VM that has no socket for Ebb.
    libvirt: Option<Libvirt>,
    /// Under way: which libvirt in its container started it.
    inside: BackgroundLook<Option<Address>>,
    domain: DomainSettings,
    pub cgroup: Option<String>,
    /// The NUMA nodes that its memory is bound to; empty: it may be on all.
    pub nodes: Vec<u32>,
    pub client: Option<Client>,
    /// When that was begun.
    adopted: Option<Instant>,
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
    down: Link,
    slow_since: Option<Instant>,
    /// This connection has answered.
    ready: bool,
    looked_up: Option<Instant>,
    ram: Option<Bytes>,
    /// Its RAM at start.
    base: Bytes,
    /// What is plugged of virtio-mem: a part of its RAM and of its size here, and not of the
    /// balloon's size in QEMU's answers, events and orders.
    virtio_mem: Bytes,
    device: Option<String>,
    found: Option<String>,
    reporting: Option<bool>,
    deflate_on_oom: Option<bool>,
    /// Of [`DETAILS`], what was not answered yet.
    unanswered: Vec<Query>,
    /// All device folders were heard on this connection.
    looked: bool,
    /// Its size at the last sample, and what it was told last.
    actual: Option<Bytes>,
    pub ordered: Option<Bytes>,
    /// When its balloon was last seen to move.
    moved: Option<Instant>,
    /// When its balloon was last seen to move, if its size grew then or was not known before.
    grew: Option<Instant>,
    /// Its size was among the last questions.
    size_asked: bool,
    /// When the guest's latest statistics came.
    heard: Heard,
    /// When it was last asked out of turn, and what is known of its answer.
    kicked: Stamp,
    kick: Kick,
    /// Its last statistics that were read were new.
    spoke: bool,
    /// Its guest is to be asked out of turn at the next visit of a shared socket, and was at the
    /// last one.
    to_kick: bool,
    was_kicked: bool,
    events: Vec<VmEvent>,
    asked: Vec<(Query, u64)>,
    /// When statistics of its guest were last seen that were new.
    stats_new: Option<Instant>,
    /// When the interval was last asked for because statistics were late.
    interval_asked: Option<Instant>,
    /// When it was last set again although libvirt has told that it is set.
    interval_again: Option<Instant>,
    /// When it was last asked whether it migrates, and when also how it runs.
    ran_asked: Option<Instant>,
    all_asked: Option<Instant>,
    /// It was asked for its RAM in this tick.
    ram_asked: bool,
    /// When it was asked last.
    asked_at: Stamp,
    answers: Answers,
    pub access: Access,
    /// Why there is no way to it by the configuration, where it would be managed.
    no_way: Option<String>,
    /// What its claim to its section is worth, as far as that could be read.
    pub claim: Option<Claim>,
    /// Its socket is named in the configuration.
    pub named: bool,
    /// It is owed something that was taken over this socket.
    pub owed_at: Option<PathBuf>,
    /// How often QEMU asked the guest for statistics before Ebb set that, seconds.
    pub interval_was: Option<u64>,
    /// How often QEMU has refused to have it put back.
    refusals: u32,
    /// It was only looked at in the last tick.
    was_looked_at: bool,
    /// The command that puts that back, where a VM that is to be left waits for its answer.
    restoring: Option<u64>,
    /// How often it is to ask as far as Ebb knows.
    interval: Option<u64>,
    /// Orders that QEMU has not answered, oldest first.
    orders: Vec<PendingOrder>,
    /// What order is in force is not known: QEMU has not answered the last one, or it was an
    /// earlier daemon's.
    loose: bool,
    /// The size of the last order, where QEMU has carried it out and answered late.
    pub done_late: Option<Bytes>,
    /// Asked for where there is an agent.
    inventory: Inventory,
    findings: Option<Findings>,
    watched: Watched,
    /// What its process held when that was last read.
    memory: Option<ProcessMemory>,
    /// What of that is not guest RAM.
    own: OwnCount,
    /// Why that could not be read.
    unread: Option<String>,
    /// Why the mount of its RAM may not have room for what it gives back.
    pub no_room: Option<String>,
    /// How often its RAM was found in no such mount.
    pub elsewhere: u32,
    /// Its process was looked at since the last sample.
    pub seen: bool,
}

impl Vm {
    pub fn new(process: QemuProcess, access: Access) -> Vm {
        let pid = process.id.pid;
        Vm {
            agent: process.args.agent.clone().map(|path| AgentLink::new(path, pid)),
            watched: Watched::new(process.id),
            process,
            access,
            backoff: BACKOFF.0,
            loose: true,
            ..Vm::default()
        }
    }

    pub fn look(&mut self, root: &Root, keep_open: bool) -> Life {
        let (life, memory) = self.watched.look(root, keep_open);
        self.unread = memory.as_ref().err().map(ToString::to_string);
        (self.memory, self.seen) = (memory.ok().flatten(), true);
        life
    }

    /// Since when a count of what its VMM itself holds is due; `None` inside: since it was found.
    pub fn own_is_due(&self, now: Instant) -> Option<Option<Instant>> {
        self.own.is_due(now).filter(|_| self.access.managed)
    }

    /// Has what its VMM itself holds counted, where that is due and it may begin.
    pub fn count_own(&mut self, root: &Root, now: Instant, begins: bool) {
        if let Some(memory) = self.memory.as_mut().filter(|_| self.access.managed) {
            memory.own = self.own.count(root, self.process.id.pid, (now, begins));
        }
    }

    /// `interval_was`: an earlier daemon found this interval of its statistics. It may be reached
    /// through libvirt.
    pub fn with(self, interval_was: Option<u64>, libvirt: &Libvirt) -> Vm {
        Vm { interval_was, libvirt: Some(libvirt.clone()), ..self }
    }

    /// Connects if it is time to, and queues this tick's questions. A VM that has not answered
    /// those of an earlier tick is not asked again until it has; nor is one that `rests`.
    pub fn ask(&mut self, now: Instant, at: Stamp, rests: bool) {
        self.findings = None;
        if self.close_unwanted() {
            return;
        }
        self.take_late();
        self.take_up();
        self.turn_away(now);
        self.hear();
        let waits = self.asked.iter().any(|(query, _)| *query != Query::StatsBefore);
        self.slow_since = if waits { self.slow_since.or(Some(now)) } else { None };
        if let Some(client) = &mut self.client
            && self.slow_since.is_some_and(|since| now - since > GIVE_UP)
        {
            let why = format!("any command: no answer within {} ms", GIVE_UP.as_millis());
            let path = client.path().display().to_string();
            client.protocol.fail(QmpError::Failed(path, why));
        }
        self.reap(now);
        if self.client.is_none() && self.retry_at.is_none_or(|at| now >= at) {
            self.connect();
            self.reap(now);
        }
        let rests = rests || self.was_visited(at);
        if self.client.is_some() && self.slow_since.is_none() && !rests && self.may_have_news(now) {
            self.asked_at = at;
            self.questions(now);
        }
    }

    /// Ends the tick: waits no more for what was not answered, and tells what is known.
    pub fn sample(&mut self, at: Stamp, wall_ms: u64, problems: &mut Vec<Problem>) -> VmSample {
        self.take_events();
        if let Some(client) = &mut self.client {
            let asked = self.asked.iter().map(|(_, id)| *id).chain(self.restoring);
            asked.for_each(|id| client.protocol.not_wait(id));
        }
        let id = self.process.id;
        self.seen = false;
        let unread = self.unread.take().map(|why| (format!("/proc/{}/status", id.pid), why));
        let own = self.own.error.clone().filter(|_| self.access.managed);
        let own = own.map(|why| (format!("/proc/{}/pagemap", id.pid), why));
        let metadata = self.metadata_problem().map(|why| (METADATA.to_owned(), why));
        let told = unread.into_iter().chain(own).chain(metadata);
        let told = told.chain(std::mem::take(&mut self.answers.problems));
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
            uuid: self.process.args.uuid.clone(),
            claim: self.claim.clone().unwrap_or_default(),
            metadata: self.metadata().clone(),
            noted: self.domain.noted,
            ram: self.ram,
            process: self.memory,
            cgroup: self.cgroup.clone(),
            nodes: self.nodes.clone(),
            link: self.link(),
            let_be: !self.access.managed,
            through_libvirt: self.client.as_ref().is_some_and(|c| !c.is_direct()),
            socket: self.socket(),
            shared: self.shared(),
            run,
            balloon: self.balloon(at, wall_ms),
            agent: self
                .agent
                .as_ref()
                .filter(|a| self.counts(a))
                .map(|a| AgentSample { observes: self.observes(), ..a.sample() }),
            events: std::mem::take(&mut self.events),
            age_ms: age_of(id),
            pinned: self.pinned(),
            no_room: self.no_room.clone(),
            in_pool: self.is_in_pool(),
            hands_off: self.access.hands_off_ms.map(|left_ms| HandsOff {
                left_ms,
                done: self.agent.as_ref().is_none_or(AgentLink::has_left),
            }),
            ..VmSample::default()
        }
    }

    /// Why its memory stays where it is.
    fn pinned(&self) -> Option<String> {
        let p = &self.process.args;
        let why = |yes, why: &str| if yes { Some(why.to_owned()) } else { None };
        why(p.passthrough, "a VFIO or vDPA device pins it")
            .or_else(|| p.pinned.clone())
            .or_else(|| why(p.hugepages || self.is_in_pool(), "its RAM is huge pages of a pool"))
    }

    /// Whether its RAM is in a pool of huge pages, by what the kernel counts: its command line may
    /// not tell (`-readconfig`), and an object of another purpose may be in one.
    fn is_in_pool(&self) -> bool {
        let most = self.ram.unwrap_or_default().share(0.5);
        self.memory.is_some_and(|m| m.hugetlb > Bytes::ZERO && m.hugetlb >= most)
    }

    /// Its size by the last answers.
    fn size(&self) -> Option<Bytes> {
        self.answers.actual.map(|actual| actual + self.virtio_mem)
    }

    fn balloon(&mut self, at: Stamp, wall_ms: u64) -> Option<BalloonSample> {
        let actual = self.device.as_ref().and_then(|_| self.size())?;
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
        let beyond_balloon = self.virtio_mem;
        Some(BalloonSample { actual, age_ms, beyond_balloon, reporting, deflate_on_oom, guest })
    }

    fn uses_agent(&self) -> bool {
        self.may_use_agent() && self.access.hands_off_ms.is_none()
    }

    /// Whether its agent gives nothing back.
    fn observes(&self) -> bool {
        self.access.agent == AgentUse::Observe || self.no_room.is_some()
    }

    /// Whether it would be used without `ebb hands-off`.
    fn may_use_agent(&self) -> bool {
        let may = self.access.managed && !self.access.look_only;
        may && self.agent.is_some() && self.access.agent != AgentUse::Off
    }

    /// Whether its agent is used, or may still be at work.
    fn counts(&self, agent: &AgentLink) -> bool {
        self.access.agent_then != AgentUse::Off || !agent.has_left()
    }

    /// Whether its agent awaits what QEMU tells of all that can write to the VM's memory.
    fn agent_awaits(&self) -> bool {
        self.uses_agent() && self.agent.as_ref().is_some_and(AgentLink::awaits_findings)
    }

    /// Whether QEMU has said if a balloon reports free pages, or that it cannot.
    fn known(&self) -> bool {
        self.looked && (self.device.is_none() || !self.unanswered.contains(&Query::Reporting))
    }

    /// What its agent waits for: whether other processes map its RAM.
    pub fn mappers_question(&mut self) -> Option<Question> {
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
    /// what else discards its pages. `room` and `waits`: as [`Terms`] has them.
    pub fn ask_agent(
        &mut self,
        now: Instant,
        keep_open: bool,
        (room, waits): (Option<Bytes>, bool),
    ) {
        self.take_events();
        if !self.uses_agent() {
            // It is looked for only if it may be used and could be running.
            let sure = self.may_use_agent();
            self.agent.iter_mut().for_each(|agent| agent.leave(now, sure));
            // What QEMU has told may not hold when the agent is used again.
            self.inventory.look_anew();
            return;
        }
        let migrating = self.answers.migrating;
        let run = self.answers.run.clone().map(|r| if migrating { RunState::Migrating } else { r });
        let usable = self.slow_since.is_none() && self.known();
        let observe = self.observes();
        let Some(agent) = self.agent.as_mut() else { return };
        let terms = Terms {
            reports: self.reporting == Some(true),
            keep_open,
            observe,
            window_limit_ms: self.access.window_limit_ms,
            room,
            waits,
        };
        let findings = self.findings.as_ref().filter(|_| usable);
        agent.ask(now, run.as_ref(), &self.events, terms, findings);
    }
}

pub(crate) fn problem(vm: impl Into<Option<VmId>>, source: String, message: String) -> Problem {
    Problem { vm: vm.into(), source, message }
}

/// A failure becomes a problem of the host, and the value unknown.
pub(crate) fn noted<T>(problems: &mut Vec<Problem>, source: &str, read: Probed<T>) -> Option<T> {
    read.unwrap_or_else(|e| {
        problems.push(problem(None, source.to_owned(), e.to_string()));
        None
    })
}

/// How long the process has run. Its start is in hundredths of a second since
/// boot (USER_HZ) on every Linux Ebb runs on.
fn age_of(id: VmId) -> Option<u64> {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now_ms = t.tv_sec as u64 * 1000 + t.tv_nsec as u64 / 1_000_000;
    now_ms.checked_sub(id.start.checked_mul(10)?)
}

#[cfg(test)]
pub(crate) mod tests;
