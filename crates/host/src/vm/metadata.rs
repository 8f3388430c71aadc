//! What libvirt keeps for a VM in the metadata of its domain: settings, and Ebb's note of what its
//! balloon holds without Ebb.

use std::time::{Duration, Instant};

use ebb_core::config::Metadata;
use ebb_core::units::Bytes;

use super::Vm;
use super::connection::BACKOFF;
use crate::libvirt::{Libvirt, Watch};
use crate::probe::qemu::QemuProcess;

/// A VM that is not of libvirt's is looked up again after this time: its pid file may come late.
const LOOK_UP: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct DomainSettings {
    watch: Option<Watch>,
    retry_at: Option<Instant>,
    /// The last wait before it was begun again; zero: it has told something since.
    backoff: Duration,
    says: Metadata,
    /// It was read once: that holds on while libvirt does not answer.
    was_read: bool,
    /// What its balloon held without Ebb, as an Ebb noted that had it before, perhaps on another
    /// host: the note that was there when its watch began.
    pub(super) noted: Option<Bytes>,
    /// The note that is to be there.
    note: Option<Option<Bytes>>,
}

impl DomainSettings {
    fn look(&mut self, libvirt: &Libvirt, process: &QemuProcess, now: Instant) {
        if let Some(state) = self.watch.as_ref().map(Watch::state) {
            if let Some(read) = state.metadata {
                self.noted = state.noted;
                (self.says, self.backoff, self.was_read) = (read, Duration::ZERO, true);
            }
            if let Some(why) = state.over {
                self.watch = None;
                self.backoff = (self.backoff * 2).clamp(BACKOFF.0, BACKOFF.1);
                self.retry_at = Some(now + self.backoff);
                if !self.was_read {
                    self.says = Metadata::Unread(why);
                }
            }
        }
        if self.watch.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        // The user of a session is not the host's operator.
        let Some(address) = libvirt.find_here(process).filter(|a| a.is_systems()) else {
            self.retry_at = Some(now + LOOK_UP);
            return;
        };
        if !self.was_read && self.says.is_none() {
            self.says = Metadata::Unread("libvirt has not answered yet".into());
        }
        self.watch = libvirt.watch(address).ok();
        self.write_note(libvirt);
    }

    fn write_note(&self, libvirt: &Libvirt) {
        if let (Some(watch), Some(note)) = (&self.watch, self.note) {
            watch.note(note);
            libvirt.wake();
        }
    }
}

impl Vm {
    /// Looks what its metadata says by now, where that `counts`.
    pub fn look_at_metadata(&mut self, counts: bool, now: Instant) {
        match self.libvirt.as_ref().filter(|_| counts) {
            Some(libvirt) => self.domain.look(libvirt, &self.process, now),
            // Its note goes first.
            None => {
                if self.domain.note.is_some_and(|note| note.is_some()) {
                    self.note(None);
                }
                match self.is_note_due() {
                    true => self.domain.says = Metadata::None,
                    false => self.domain = DomainSettings::default(),
                }
            }
        }
    }

    /// Its libvirt was found: what its metadata says is read before anything is taken.
    pub(super) fn read_metadata(&mut self) {
        if self.domain.watch.is_none() && !self.domain.was_read {
            self.domain.says = Metadata::Unread("libvirt has not answered yet".into());
            self.domain.retry_at = None;
        }
    }

    pub fn metadata(&self) -> &Metadata {
        &self.domain.says
    }

    /// Has its libvirt note what its balloon holds without Ebb; `None`: Ebb has taken nothing.
    pub fn note(&mut self, others: Option<Bytes>) {
        if self.domain.note != Some(others)
            && let Some(libvirt) = &self.libvirt
        {
            self.domain.note = Some(others);
            self.domain.write_note(libvirt);
        }
    }

    /// Whether that is not written yet.
    pub fn is_note_due(&self) -> bool {
        self.domain.watch.as_ref().is_some_and(|w| w.state().is_note_due())
    }

    pub(super) fn metadata_problem(&self) -> Option<String> {
        match &self.domain.says {
            Metadata::Wrong(why) => Some(why.clone()),
            Metadata::Unread(why) if self.domain.watch.is_none() => {
                Some(format!("it cannot be read: {why}; nothing is taken from the VM until it is"))
            }
            _ => {
                let why = self.domain.watch.as_ref()?.state().refused?;
                Some(format!(
                    "libvirt does not take Ebb's note into it: {why}; if the domain is saved or \
                     migrated, it keeps the size that it has then"
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::VmId;

    use super::*;
    use crate::testing::{tree, within_a_minute};

    #[test]
    fn metadata_that_a_dead_libvirt_does_not_tell_is_not_read_and_a_vm_of_nobody_has_none() {
        // The pid file must be root's.
        if !rustix::process::getuid().is_root() {
            return;
        }
        let root = tree(&[("/proc/10/stat", ""), ("/run/libvirt/libvirt-sock", "nobody listens")]);
        let libvirt = Libvirt::new(root.clone(), false).unwrap();
        let process = QemuProcess::plain(VmId { pid: 10, start: 7 }, "web".into());
        let (mut domain, now) = (DomainSettings::default(), Instant::now());
        domain.look(&libvirt, &process, now);
        assert!(domain.says.is_none() && domain.watch.is_none());
        // Its pid file comes late.
        root.put("/run/libvirt/qemu/web.pid", "10");
        domain.look(&libvirt, &process, now);
        assert!(domain.says.is_none(), "it is not looked up each time");
        let later = now + LOOK_UP;
        domain.look(&libvirt, &process, later);
        assert_eq!(domain.says, Metadata::Unread("libvirt has not answered yet".into()));
        let why = within_a_minute(|| {
            domain.look(&libvirt, &process, later);
            let Metadata::Unread(why) = &domain.says else { panic!("{:?}", domain.says) };
            why.contains("does not run").then(|| why.clone())
        });
        assert!(why.contains("start libvirtd or virtqemud"), "{why}");
    }
}
