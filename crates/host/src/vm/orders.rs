//! What QEMU is told to do with a VM's balloon and its statistics, and which order is in force
//! while it has not answered.

use std::time::Instant;

use ebb_core::sample::Link;
use ebb_core::units::{Bytes, Stamp};
use serde_json::json;

use super::questions::TOLD_WITHIN;
use super::{Kick, PendingOrder, Query, Vm};
use crate::linux::ActError;
use crate::qmp::{Client, QmpError};
use crate::qmp_balloon;

/// What an idle guest has said is not looked at before it is asked where that was read within this
/// time.
const LOOKED_AT_MS: u64 = 100;
/// How often libvirt may refuse to have an interval put back.
const REFUSALS: u32 = 10;

impl Vm {
    /// Tells QEMU the size that the guest shall have. What makes it smaller is told only
    /// where commands are served promptly: carried out late it does harm.
    pub fn order(&mut self, target: Bytes, gives: bool) -> Result<u64, ActError> {
        let link = self.link();
        self.take_late();
        let under_way = self.ordered == Some(target) && !self.orders.is_empty();
        let balloon = target - self.virtio_mem;
        let client = match &mut self.client {
            Some(c) if c.takes_late() && gives && !under_way => c,
            // What was not served a moment ago may not be served now, and would be late.
            Some(c)
                if c.protocol.state().serves()
                    && self.slow_since.is_none()
                    && c.missed().is_none() =>
            {
                c
            }
            _ => {
                return Err(ActError::NoLink(match link {
                    Link::Slow(why) | Link::Taken(why) | Link::Down(why) => why,
                    Link::Up | Link::Unknown => "not tried yet".into(),
                }));
            }
        };
        let command = client.protocol.send("balloon", Some(json!({ "value": balloon.0 })))?;
        self.orders.push(PendingOrder { command, to: target, before: (self.ordered, self.loose) });
        (self.ordered, self.loose) = (Some(target), true);
        self.done_late = self.done_late.filter(|to| *to == target);
        Ok(command)
    }

    /// QEMU has answered an order, or the connection has ended before: then it may have been
    /// carried out. QEMU takes them one by one, so those before it are over.
    pub fn answered(&mut self, command: u64, carried_out: bool) {
        let Some(at) = self.orders.iter().position(|o| o.command == command) else { return };
        let over: Vec<PendingOrder> = self.orders.drain(..=at).collect();
        let to = over.last().map(|order| order.to);
        // QEMU's answers to those before are not taken any more.
        self.client.iter_mut().for_each(|c| over.iter().for_each(|o| c.protocol.forget(o.command)));
        match self.orders.first_mut() {
            Some(next) => next.before = (to, !carried_out),
            None => self.loose = !carried_out,
        }
    }

    /// The order was not sent, or refused: what was in force before it is so now.
    pub fn not_sent(&mut self, command: u64) {
        let Some(at) = self.orders.iter().position(|o| o.command == command) else { return };
        let before = self.orders.remove(at).before;
        match self.orders.get_mut(at) {
            Some(next) => next.before = before,
            None => (self.ordered, self.loose) = before,
        }
    }

    /// Takes an order back that waits for QEMU to serve; whether it did.
    pub fn take_back(&mut self, command: u64) -> bool {
        let waited = self.client.as_mut().is_some_and(|c| c.protocol.take_back(command));
        if waited {
            self.not_sent(command);
        }
        waited
    }

    /// QEMU was told and has not answered in time.
    pub fn not_answered(&mut self, command: u64) {
        self.client.iter_mut().for_each(|c| c.protocol.not_wait(command));
    }

    /// Takes the answers to orders that came after their time was up.
    pub(super) fn take_late(&mut self) {
        let orders: Vec<_> = self.orders.iter().map(|o| (o.command, o.to)).collect();
        for (command, to) in orders {
            let Some(client) = &mut self.client else { return };
            match client.protocol.take_reply(command) {
                Some(Err(QmpError::Busy(..) | QmpError::Command { .. })) => self.not_sent(command),
                Some(answer) => {
                    self.done_late = answer.is_ok().then_some(to);
                    self.answered(command, answer.is_ok());
                }
                None => {}
            }
        }
    }

    /// Ends an order to shrink that an earlier daemon may have left behind, that was on its way
    /// when the connection ended, or that the balloon does not follow: QEMU does not tell what its
    /// balloon is to come to. A balloon that moves may follow another's order. While the VM's size
    /// grows, the balloon follows an order that gives memory.
    pub fn withdraw(&mut self, now: Instant) {
        let Some(size) = self.size().filter(|_| self.slow_since.is_none()) else { return };
        let open =
            self.ordered.is_some_and(|to| to + Bytes::mib(1) <= size) && !self.has_moved(now);
        let grows = self.grew.is_some_and(|at| now - at < TOLD_WITHIN);
        if (self.loose && !grows || open)
            && self.orders.is_empty()
            && self.device.is_some()
            && let Ok(command) = self.order(size, true)
        {
            self.not_answered(command);
        }
    }

    /// Whether it may have an order to shrink that its guest has not followed yet, or that QEMU
    /// has not answered. What is not `owed` anything was not asked for anything.
    pub fn shrinks(&self, owed: bool) -> bool {
        let below = |o: Bytes| self.actual.is_some_and(|a| o + Bytes::mib(1) <= a);
        let no_balloon = self.ready && self.looked && self.device.is_none();
        !no_balloon && (self.ordered.is_some_and(below) || owed && self.loose)
    }

    /// Has QEMU ask the guest for statistics as often as before; the command.
    pub fn restore_interval(&mut self) -> Option<u64> {
        let (device, was) = (self.device.clone()?, self.interval_was?);
        let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, json!(was));
        let client = self.client.as_mut().filter(|c| c.takes_late())?;
        let command = client.protocol.send("qom-set", Some(set)).ok()?;
        if !client.is_shared() {
            client.pump();
        }
        Some(command)
    }

    /// That was answered, or is still to be done.
    pub fn restored_interval(&mut self, command: u64) {
        let Some(client) = &mut self.client else { return };
        match client.protocol.take_reply(command) {
            Some(Ok(_)) => self.interval_was = None,
            Some(Err(e @ QmpError::Command { .. })) => {
                self.refusals += 1;
                // QEMU would refuse the next one, too; libvirt may only have been busy.
                if client.is_direct() || self.refusals >= REFUSALS {
                    (self.interval_was, self.refusals) = (None, 0);
                    self.answers.problems.push(("qmp guest-stats".into(), e.to_string()));
                }
            }
            Some(Err(_)) | None => {}
        }
    }

    /// Sets the interval again of a VM that was only looked at before, or was about to be left.
    pub(super) fn take_up(&mut self) {
        let again = std::mem::replace(&mut self.was_looked_at, self.access.look_only);
        let restored = self.restoring.take();
        if let (Some(command), Some(client)) = (restored, &mut self.client) {
            client.protocol.forget(command);
        }
        let (Some(device), false) = (&self.device, self.access.look_only) else { return };
        if let (Some(_), Some(interval)) = (restored, self.interval) {
            // QEMU carries this out after that.
            let set = qmp_balloon::set(device, qmp_balloon::INTERVAL, json!(interval));
            self.send(Query::SetInterval, "qom-set", Some(set));
        } else if again && !self.unanswered.contains(&Query::Interval) {
            self.interval = None;
            self.unanswered.push(Query::Interval);
        }
    }

    /// Whether that is still to be done, and may be done.
    pub fn is_not_restored(&self) -> bool {
        let reached = self.client.as_ref().is_some_and(Client::takes_late);
        reached && self.device.is_some() && self.interval_was.is_some()
    }

    /// Before its guest is asked out of turn: that takes two settings, and if the daemon ends
    /// between both, QEMU keeps the first. Notes the period to be put back.
    pub fn prepare_kick(&mut self) {
        if let (Some(_), Some(interval)) = (&self.device, self.interval)
            && !self.access.look_only
        {
            self.interval_was.get_or_insert(interval);
        }
    }

    /// Has QEMU ask the guest now. What the guest has said before is known or looked at, so that
    /// its answer can be told from that.
    pub fn kick(&mut self, at: Stamp) {
        let (Some(device), Some(interval)) = (self.device.clone(), self.interval) else { return };
        if self.access.look_only || self.usable().is_none() {
            return;
        }
        if self.is_shared() {
            self.to_kick = true;
            return;
        }
        // Between its answer and QEMU's next question a guest says nothing.
        let soon = at.since(self.kicked) < interval.saturating_mul(1000);
        let silent = self.kick == Kick::Answered && soon;
        self.kick = match self.heard.last().filter(|_| silent) {
            Some(stats) => {
                self.heard.see(at, stats);
                Kick::Known
            }
            // An idle guest says the same again and again.
            None if !self.spoke && at.since(self.asked_at) <= LOOKED_AT_MS => Kick::Unknown,
            None => {
                self.get(Query::StatsBefore, qmp_balloon::STATS);
                Kick::Known
            }
        };
        self.kicked = at;
        let Some(client) = &mut self.client else { return };
        for set in qmp_balloon::ask_now(&device, interval) {
            if let Ok(id) = client.protocol.send("qom-set", Some(set)) {
                client.protocol.forget(id);
            }
        }
        client.flush();
    }
}
