//! What QEMU is told to do with a VM's balloon and its statistics, and which order is in force
//! while it has not answered.

use ebb_core::sample::Link;
use ebb_core::units::{Bytes, Stamp};
use serde_json::json;

use super::{Ask, Vm};
use crate::linux::ActError;
use crate::qmp::QmpError;
use crate::qmp_balloon;

impl Vm {
    /// Tells QEMU the size that the guest shall have. What makes it smaller is told only
    /// where commands are served promptly: carried out late it does harm.
    pub fn order(&mut self, target: Bytes, gives: bool) -> Result<u64, ActError> {
        let link = self.link();
        self.take_late();
        let under_way = self.ordered == Some(target) && !self.unanswered.is_empty();
        let client = match &mut self.client {
            Some(c) if c.takes_orders() && gives && !under_way => c,
            // What was not served a moment ago may not be served now, and would be late.
            Some(c) if c.state().serves() && self.slow_since.is_none() && c.missed().is_none() => c,
            _ => {
                return Err(ActError::NoLink(match link {
                    Link::Slow(why) | Link::Taken(why) | Link::Down(why) => why,
                    Link::Up | Link::Unknown => "not tried yet".into(),
                }));
            }
        };
        let sent = client.send("balloon", Some(qmp_balloon::balloon(target)))?;
        self.before = (self.ordered, self.loose);
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

    /// The order was not sent: the one before it holds.
    pub fn not_sent(&mut self, command: u64) {
        if self.last_order == Some(command) {
            self.last_order = None;
            (self.ordered, self.loose) = self.before;
        }
    }

    /// QEMU was told and has not answered in time.
    pub fn not_answered(&mut self, command: u64) {
        self.unanswered.extend(self.ordered.map(|to| (command, to)));
        if let Some(client) = &mut self.client {
            client.protocol().not_wait(command);
        }
    }

    /// Takes the answers to orders that came after their time was up.
    pub(super) fn take_late(&mut self) {
        let Some(client) = &mut self.client else { return };
        let (protocol, done) = (client.protocol(), &mut self.done_late);
        let (mut answered, mut unsent) = (Vec::new(), Vec::new());
        self.unanswered.retain(|(id, to)| match protocol.take_reply(*id) {
            Some(answer) => {
                unsent.extend(matches!(answer, Err(QmpError::Busy(..))).then_some(*id));
                *done = answer.is_ok().then_some(*to);
                answered.push((*id, answer.is_ok()));
                false
            }
            None => protocol.is_pending(*id),
        });
        unsent.into_iter().for_each(|id| self.not_sent(id));
        answered.into_iter().for_each(|(id, done)| self.answered(id, done));
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

    /// Whether it may have an order to shrink that its guest has not followed yet, or that QEMU
    /// has not answered. What is not `owed` anything was not asked for anything.
    pub fn shrinks(&self, owed: bool) -> bool {
        let below = |o: Bytes| self.actual.is_some_and(|a| o + Bytes::mib(1) <= a);
        let no_balloon = self.ready && self.looked && self.device.is_none();
        self.ordered.is_some_and(below) || owed && self.loose && !no_balloon
    }

    /// Has QEMU ask the guest for statistics as often as before; the command.
    pub fn restore_interval(&mut self) -> Option<u64> {
        let (device, was) = (self.device.clone()?, self.interval_was?);
        let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, json!(was));
        let client = self.client.as_mut().filter(|c| c.state().serves())?;
        let command = client.send("qom-set", Some(set)).ok()?;
        client.pump();
        Some(command)
    }

    /// That was answered, or QEMU itself has it: one that is slow does it later.
    pub fn restored_interval(&mut self, command: u64) {
        let Some(client) = &mut self.client else { return };
        let answered = matches!(client.take_reply(command), Some(Ok(_)));
        if answered || client.is_direct() && !client.is_shared() {
            self.interval_was = None;
        }
    }

    /// Whether that is still to be done, over a shared socket.
    pub fn is_not_restored(&self) -> bool {
        self.interval_was.is_some() && self.is_shared()
    }

    /// Has QEMU ask the guest now. What the guest has said before is looked at, so that its
    /// answer can be told from that.
    pub fn kick(&mut self, at: Stamp) {
        let interval = self.interval.unwrap_or(self.interval_s);
        let Some(device) = self.device.clone() else { return };
        if self.access.look_only || self.usable().is_err() {
            return;
        }
        if self.is_shared() {
            self.to_kick = true;
            return;
        }
        self.kicked = at;
        self.get(Ask::StatsBefore, qmp_balloon::STATS);
        let Some(client) = &mut self.client else { return };
        for set in qmp_balloon::ask_now(&device, interval) {
            if let Ok(id) = client.send("qom-set", Some(set)) {
                client.protocol().forget(id);
            }
        }
        client.flush();
    }
}
