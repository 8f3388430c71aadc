//! What QEMU is asked in a tick, and whether it need be asked at all.

use std::time::{Duration, Instant};

use ebb_core::sample::RunState;
use serde_json::Value;

use super::{Query, Vm};
use crate::agent_link::AgentLink;
use crate::qmp::Event;
use crate::qmp_balloon::{self, DEVICE_FOLDERS};

/// Whether a VM migrates, how large it is where its balloon does not move, and with an agent what can
/// write to its RAM is asked this often, and before an agent gives memory back. QEMU reads its socket
/// byte by byte, at some nine system calls each. An ordinary tick, the clock's steps left out.
pub(super) const RARELY: Duration = Duration::from_millis(900);
/// How a VM runs and what RAM it has is asked this often where QEMU tells of a change, by an event or
/// by the size.
const TOLD: Duration = Duration::from_secs(5);
/// The longest time between ticks in which a still VM is asked: its guest's statistics are
/// looked for from this time before the next are due.
const LOOKED_AT_EVERY: Duration = Duration::from_millis(600);
/// Statistics are late where they have not come in an interval and this time, which is less than a
/// second: another program may have set a longer one.
const LATE: Duration = Duration::from_millis(900);
/// While they are late the interval is asked for this often.
const LATE_EVERY: Duration = Duration::from_secs(10);
/// What libvirt has told that it has set is set again this often at most, and where the guest stays
/// silent each time after twice as long.
const AGAIN_EVERY: Duration = Duration::from_secs(60);
/// QEMU tells of a move of the balloon within a second; this has a margin.
pub(super) const TOLD_WITHIN: Duration = Duration::from_millis(1500);
/// The event that a balloon has moved.
pub(super) const BALLOON_CHANGE: &str = "BALLOON_CHANGE";
/// Seconds between QEMU's questions to a guest.
pub(super) const INTERVAL_S: u64 = 2;
/// Devices and RAM size are looked up this often without any event.
const LOOK_UP: Duration = Duration::from_secs(60);
/// And this often while no balloon was found.
const LOOK_FOR: Duration = Duration::from_secs(5);

impl Vm {
    /// Whether there may be anything that QEMU has not said yet. A guest at rest says something
    /// when QEMU asks it, every [`INTERVAL_S`]; a balloon that moves is told by an event.
    pub(super) fn may_have_news(&mut self, now: Instant) -> bool {
        let stats_due = self
            .stats_new
            .is_none_or(|at| now - at + LOOKED_AT_EVERY >= Duration::from_secs(INTERVAL_S));
        stats_due
            || !self.ready
            || self.device.is_none()
            || !self.unanswered.is_empty()
            || self.ordered.is_some()
            || self.kicked > self.asked_at
            || self.was_kicked
            || self.was_missed()
            || self.to_kick
            || self.agent_awaits()
            || self.ran_asked.is_none_or(|at| now - at >= RARELY)
            || self.any_event(|_| true)
    }

    /// Whether QEMU has told such an event that was not taken yet.
    pub(super) fn any_event(&mut self, is: impl FnMut(&Event) -> bool) -> bool {
        self.client.as_mut().is_some_and(|c| c.protocol.any_event(is))
    }

    pub(super) fn questions(&mut self, now: Instant) {
        let due = self.was_missed() || self.ran_asked.is_none_or(|at| now - at >= RARELY);
        let anew = due || !self.ready || self.agent_awaits() || self.has_news();
        let is_told = self.tells() && self.ready && !self.agent_awaits() && !self.has_news();
        let all = anew && !(is_told && self.all_asked.is_some_and(|at| now - at < TOLD));
        if all {
            self.all_asked = Some(now);
            self.send(Query::Status, "query-status", None);
        }
        if anew {
            self.ran_asked = Some(now);
            self.send(Query::Migrate, "query-migrate", None);
        }
        self.ram_asked = all || self.ordered.is_some();
        if self.ram_asked {
            self.send(Query::MemorySize, "query-memory-size-summary", None);
        }
        let every = if self.device.is_some() { LOOK_UP } else { LOOK_FOR };
        if self.looked_up.is_none_or(|at| now - at > every) || !self.ready {
            self.looked_up = Some(now);
            for (i, folder) in DEVICE_FOLDERS.iter().enumerate() {
                self.send(Query::Folder(i), "qom-list", Some(qmp_balloon::list(folder)));
            }
        }
        if self.ready {
            self.check_interval(now);
            let size = anew || self.may_have_moved(now);
            self.ask_balloon(size);
        }
        let shared = self.is_shared();
        self.was_kicked = shared && self.ready && std::mem::take(&mut self.to_kick);
        if self.was_kicked {
            self.ask_its_guest();
        }
        if self.ready && anew && self.uses_agent() {
            // Where no event tells that a DIMM was replaced by one of its size.
            let is_old = !self.tells() && self.inventory.is_older_than(LOOK_UP, now);
            if is_old || self.agent.as_ref().is_some_and(AgentLink::is_apart) {
                self.inventory.look_anew();
            }
            for (inquiry, command, arguments) in self.inventory.questions(now) {
                self.send(Query::Inventory(inquiry), command, arguments);
            }
        }
    }

    /// Whether the last questions on a shared socket were not sent.
    fn was_missed(&self) -> bool {
        self.client.as_ref().is_some_and(|c| c.missed().is_some())
    }

    /// Whether QEMU has told of anything but a balloon that moves.
    fn has_news(&mut self) -> bool {
        self.any_event(|e| e.name != BALLOON_CHANGE)
    }

    /// Where a running guest's statistics are late, QEMU is asked how often it asks for them.
    fn check_interval(&mut self, now: Instant) {
        let Some((interval, heard)) = self.interval.zip(self.stats_new) else { return };
        let is_late = now - heard > Duration::from_secs(interval) + LATE;
        let is_due = self.interval_asked.is_none_or(|at| now - at >= LATE_EVERY);
        let runs = self.answers.run == Some(RunState::Running);
        if is_late && is_due && runs && !self.unanswered.contains(&Query::Interval) {
            self.interval_asked = Some(now);
            self.unanswered.push(Query::Interval);
        }
    }

    /// How long its guest has been silent, where the interval that was told is to be set again:
    /// libvirt tells what it has set last, and QEMU may have been told otherwise since.
    pub(super) fn silent_for(&self, now: Instant) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.stats_new?);
        let through = self.client.as_ref().is_some_and(|c| !c.is_direct());
        let is_due = self.interval_again.is_none_or(|at| now - at >= AGAIN_EVERY.max(silent / 2));
        (through && is_due && silent >= LATE_EVERY).then_some(silent)
    }

    /// Whether QEMU tells of events.
    fn tells(&self) -> bool {
        self.client.as_ref().is_some_and(|c| c.is_direct() && !c.is_shared())
    }

    /// Whether its balloon may have another size than at the last answer. QEMU tells each move, by
    /// an event a second at most.
    fn may_have_moved(&mut self, now: Instant) -> bool {
        !self.tells()
            || self.answers.actual.is_none()
            || self.ordered.is_some()
            || !self.orders.is_empty()
            || self.has_moved(now)
    }

    /// Whether its balloon has moved lately, as far as QEMU has told.
    pub(super) fn has_moved(&mut self, now: Instant) -> bool {
        self.moved.is_some_and(|at| now - at < TOLD_WITHIN)
            || self.any_event(|e| e.name == BALLOON_CHANGE)
    }

    pub(super) fn ask_balloon(&mut self, size: bool) {
        if self.device.is_none() {
            return;
        }
        self.size_asked = size;
        if size {
            self.send(Query::Balloon, "query-balloon", None);
        }
        self.get(Query::Stats, qmp_balloon::STATS);
        for query in self.unanswered.clone() {
            let property = match query {
                Query::Reporting => qmp_balloon::REPORTING,
                Query::DeflateOnOom => qmp_balloon::DEFLATE_ON_OOM,
                _ => qmp_balloon::INTERVAL,
            };
            self.get(query, property);
        }
    }

    /// Has QEMU ask the guest now; the answer is there at the next visit.
    fn ask_its_guest(&mut self) {
        let device = self.device.clone().filter(|_| !self.access.look_only);
        let (Some(device), Some(interval)) = (device, self.interval) else { return };
        for set in qmp_balloon::ask_now(&device, interval) {
            self.send(Query::SetInterval, "qom-set", Some(set));
        }
    }

    pub(super) fn get(&mut self, query: Query, property: &str) {
        let Some(device) = self.device.clone() else { return };
        self.send(query, "qom-get", Some(qmp_balloon::get(&device, property)));
    }

    pub(super) fn send(&mut self, query: Query, command: &str, arguments: Option<Value>) {
        let Some(client) = &mut self.client else { return };
        match client.protocol.send(command, arguments) {
            Ok(id) => self.asked.push((query, id)),
            Err(e) => self.answers.problems.push((format!("qmp {command}"), e.to_string())),
        }
    }
}
