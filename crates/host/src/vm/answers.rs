//! What QEMU's answers and events mean for what is known of a VM, and what is asked because of
//! them. An answer that is not used yet gets its line here.

use std::time::Instant;

use ebb_core::sample::{Heard, RunState, VmEvent};
use ebb_core::units::Bytes;
use serde_json::{Value, json};

use super::questions::{BALLOON_CHANGE, INTERVAL_S};
use super::{DETAILS, Kick, Query, Vm};
use crate::inventory::Inquiry;
use crate::libvirt;
use crate::qmp::{Client, QmpError};
use crate::qmp_balloon::{self, DEVICE_FOLDERS};

/// Most events kept between two samples; the oldest go.
const MAX_EVENTS: usize = 64;

impl Vm {
    /// Takes the answers that are there; true where they led to new questions.
    pub fn hear(&mut self) -> bool {
        let mut kept = 0;
        for (query, id) in std::mem::take(&mut self.asked) {
            match self.client.as_mut().and_then(|c| c.protocol.take_reply(id)) {
                Some(answer) => self.answer(query, answer),
                None => {
                    self.asked.push((query, id));
                    kept += 1;
                }
            }
        }
        self.asked.len() > kept
    }

    fn answer(&mut self, query: Query, answer: Result<Value, QmpError>) {
        let is_told = matches!(answer, Ok(_) | Err(QmpError::Command { .. }));
        if let Query::Inventory(inquiry) = query
            && is_told
            && !is_of_libvirt(&answer)
        {
            // A balloon that was plugged in: whether it reports free pages is asked first.
            if let (Inquiry::Folder(i), Ok(value)) = (inquiry, &answer)
                && let Some(found) = qmp_balloon::parse_find_balloon(DEVICE_FOLDERS[i], value)
                && self.device.as_ref() != Some(&found)
            {
                (self.looked, self.looked_up) = (false, None);
            }
            for (inquiry, command, arguments) in self.inventory.answer(inquiry, answer.ok()) {
                self.send(Query::Inventory(inquiry), command, arguments);
            }
            self.findings = self.inventory.findings();
            return;
        }
        if !is_told || is_of_libvirt(&answer) && matches!(query, Query::Inventory(_)) {
            // On a shared socket others of its round were not answered either, and QEMU may be
            // left with only the first of two settings.
            match query {
                Query::Inventory(_) => self.inventory.forget(),
                Query::SetInterval if !self.unanswered.contains(&Query::Interval) => {
                    self.unanswered.push(Query::Interval);
                }
                _ => {}
            }
        } else if !DETAILS.contains(&query) || !is_of_libvirt(&answer) {
            self.unanswered.retain(|its| *its != query);
        }
        if matches!(query, Query::Folder(_)) && is_of_libvirt(&answer) {
            // The other folder alone does not tell that the balloon is gone.
            (self.found, self.looked_up) = (self.device.clone(), None);
        }
        let value = match answer {
            Ok(value) => value,
            // The connection's failures are told by the link.
            Err(e) if !matches!(e, QmpError::Command { .. }) => return,
            // Properties that an old QEMU does not have.
            Err(_) if matches!(query, Query::Migrate | Query::DeflateOnOom | Query::Reporting) => {
                // libvirt may only have been busy.
                let direct = self.client.as_ref().is_some_and(Client::is_direct);
                if query == Query::DeflateOnOom && direct {
                    self.deflate_on_oom = Some(false);
                }
                return;
            }
            Err(e) => {
                if matches!(query, Query::Balloon | Query::Stats) {
                    (self.looked_up, self.moved) = (None, Some(Instant::now()));
                }
                return self.answers.problems.push(("qmp".into(), e.to_string()));
            }
        };
        self.first_answer();
        let checked = match query {
            Query::Status => {
                qmp_balloon::parse_status(&value).map(|run| {
                    let runs = run == RunState::Running;
                    let was = self.answers.run.replace(run);
                    // While it did not run its guest could not say anything.
                    if runs && was.is_some_and(|was| was != RunState::Running) {
                        self.stats_new = self.stats_new.map(|_| Instant::now());
                    }
                })
            }
            Query::Balloon => qmp_balloon::parse_balloon(&value).map(|b| {
                if self.answers.actual != Some(b) {
                    self.moved = Some(Instant::now());
                    self.grew = self.moved.filter(|_| self.answers.actual.is_none_or(|a| a < b));
                    // What is plugged moves the RAM and this: both are of the same tick.
                    if !std::mem::replace(&mut self.ram_asked, true) {
                        self.send(Query::MemorySize, "query-memory-size-summary", None);
                    }
                }
                self.answers.actual = Some(b);
                self.see_size();
            }),
            Query::MemorySize => qmp_balloon::parse_memory_size(&value).map(|(base, plugged)| {
                self.base = base;
                match plugged {
                    Bytes::ZERO => self.plugged(Bytes::ZERO, Bytes::ZERO),
                    _ => self.send(Query::MemoryDevices, "query-memory-devices", None),
                }
            }),
            Query::MemoryDevices => {
                let (dimms, virtio_mem) = qmp_balloon::parse_memory_devices(&value);
                self.plugged(dimms, virtio_mem);
                Ok(())
            }
            _ => {
                self.device_answer(query, &value);
                Ok(())
            }
        };
        if let Err(why) = checked {
            self.answers.problems.push(("qmp".into(), why));
        }
    }

    /// What its guest has said does not hold any more.
    pub(super) fn forget_stats(&mut self) {
        (self.heard, self.kick, self.spoke) = (Heard::default(), Kick::Unknown, false);
    }

    /// Its balloon was unplugged, or is another: nothing that was told of it holds any more.
    fn forget_balloon(&mut self) {
        (self.deflate_on_oom, self.stats_new) = (None, None);
        (self.answers.actual, self.answers.actual_at) = (None, None);
        (self.answers.guest, self.answers.actual_new) = (None, false);
        (self.actual, self.ordered) = (None, None);
        self.forget_stats();
    }

    /// The size that is known is the one that it has now.
    fn see_size(&mut self) {
        self.answers.actual_at = Some(Instant::now());
        self.answers.actual_new = self.answers.actual.is_some();
    }

    /// Takes in what is plugged. An order under way still means the same size of the balloon. On a
    /// shared socket no event tells that RAM was plugged in or out.
    pub(super) fn plugged(&mut self, dimms: Bytes, virtio_mem: Bytes) {
        let was = std::mem::replace(&mut self.virtio_mem, virtio_mem);
        self.ordered = self.ordered.map(|to| to - was + virtio_mem);
        let ram = Some(self.base + dimms + virtio_mem);
        if self.ram != ram {
            self.inventory.look_anew();
        }
        self.ram = ram;
    }

    fn device_answer(&mut self, query: Query, value: &Value) {
        match query {
            Query::Migrate => self.answers.migrating = qmp_balloon::parse_migrating(value),
            Query::Reporting => self.reporting = value.as_bool(),
            Query::DeflateOnOom => self.deflate_on_oom = value.as_bool(),
            Query::Interval => self.take_interval(value.as_u64()),
            Query::Stats => {
                let (guest, problems) = qmp_balloon::parse_guest_stats(value, self.ram);
                if guest != self.answers.guest {
                    self.stats_new = guest.map(|_| Instant::now());
                }
                let shared = self.is_shared();
                if let (true, Some(was), Some(is)) = (shared, self.answers.guest, guest)
                    && is.is_of_another_boot(&was)
                {
                    self.forget_stats();
                    self.events.push(VmEvent::Reset);
                }
                let stats = guest.zip(self.heard.last());
                self.spoke = stats.is_some_and(|(new, last)| new != last);
                if self.spoke && self.asked_at > self.kicked && self.kick == Kick::Known {
                    self.kick = Kick::Answered;
                }
                guest.iter().for_each(|stats| self.heard.see(self.asked_at, *stats));
                self.answers.guest = guest;
                if !self.size_asked && !self.has_moved(Instant::now()) {
                    self.see_size();
                }
                let problems = problems.into_iter().map(|p| ("qmp guest-stats".into(), p));
                self.answers.problems.extend(problems);
            }
            Query::StatsBefore => {
                if let (Some(stats), _) = qmp_balloon::parse_guest_stats(value, self.ram) {
                    self.heard.see(self.kicked, stats);
                }
            }
            Query::Folder(i) => {
                let found = qmp_balloon::parse_find_balloon(DEVICE_FOLDERS[i], value);
                self.found = if i == 0 { found } else { self.found.take().or(found) };
                // Where the one before it was refused, both are looked through again.
                self.looked |= i + 1 == DEVICE_FOLDERS.len() && self.looked_up.is_some();
                if i + 1 == DEVICE_FOLDERS.len() && self.found != self.device {
                    if self.device.is_some() {
                        self.forget_balloon();
                    }
                    self.reporting = None;
                    self.device = self.found.take();
                    self.unanswered = DETAILS.to_vec();
                    self.ask_balloon(true);
                }
            }
            _ => {}
        }
    }

    /// Takes the interval that QEMU or libvirt has told, and sets it where it is to be another.
    fn take_interval(&mut self, is: Option<u64>) {
        let fast = |s: &u64| *s > 0 && *s <= INTERVAL_S;
        let (known, now) = (self.interval, Instant::now());
        let meant = known.or(is.filter(fast)).unwrap_or(INTERVAL_S);
        self.interval = Some(meant);
        // A shorter interval is left: another program may want it, or libvirt's bridge has set it.
        let good = is.filter(|s| *s > 0 && *s <= meant);
        let silent = good.and(self.silent_for(now));
        let is_to_set = good.is_none() || silent.is_some();
        let device = self.device.clone().filter(|_| is_to_set && !self.access.look_only);
        let Some(device) = device else { return };
        // What Ebb itself has set is not put back, and a longer one was set by others.
        let others = is.filter(|s| *s > meant);
        let found = is.filter(|_| known.is_none());
        self.interval_was = others.or(self.interval_was).or(found);
        let seconds = good.unwrap_or(meant);
        if let Some(silent) = silent {
            self.interval_again = Some(now);
            let said = format!(
                "its guest has said nothing for {} s; libvirt says that QEMU asks it every {seconds} s, \
                 and is told to set that again",
                silent.as_secs()
            );
            self.answers.problems.push(("qmp guest-stats".into(), said));
        }
        let set = qmp_balloon::set(&device, qmp_balloon::INTERVAL, json!(seconds));
        self.send(Query::SetInterval, "qom-set", Some(set));
    }

    pub(super) fn take_events(&mut self) {
        let Some(client) = &mut self.client else { return };
        for event in client.protocol.take_events() {
            if qmp_balloon::changes_devices(&event) {
                self.looked_up = None;
                self.inventory.look_anew();
            }
            if event.name == "RESET" {
                self.forget_stats();
            }
            if event.name == BALLOON_CHANGE {
                self.moved = Some(Instant::now());
            } else {
                // One that came while the tick asked may tell more than its answers.
                (self.ran_asked, self.all_asked) = (None, None);
            }
            self.events.extend(qmp_balloon::parse_event(&event));
        }
        let excess = self.events.len().saturating_sub(MAX_EVENTS);
        self.events.drain(..excess);
    }
}

/// Whether libvirt has refused to ask QEMU: it may only have been busy.
fn is_of_libvirt(answer: &Result<Value, QmpError>) -> bool {
    matches!(answer, Err(QmpError::Command { class, .. }) if class == libvirt::NOT_ASKED)
}
