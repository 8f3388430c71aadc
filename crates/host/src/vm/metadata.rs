//! The settings that libvirt keeps for a VM, in the metadata of its domain.

use std::time::{Duration, Instant};

use ebb_core::config::Metadata;

use super::Vm;
use crate::libvirt::{Libvirt, Watch};
use crate::probe::qemu::QemuProcess;

/// First and longest wait before a watch that ended is begun again.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A VM that is not of libvirt's is looked up again after so long: its pid file may come late.
const LOOK_UP: Duration = Duration::from_secs(5);

/// What is known of a VM's metadata.
#[derive(Debug)]
pub(crate) struct DomainSettings {
    watch: Option<Watch>,
    retry_at: Option<Instant>,
    backoff: Duration,
    says: Metadata,
}

impl Default for DomainSettings {
    fn default() -> DomainSettings {
        DomainSettings { watch: None, retry_at: None, backoff: BACKOFF.0, says: Metadata::None }
    }
}

impl DomainSettings {
    fn look(&mut self, libvirt: &Libvirt, process: &QemuProcess, now: Instant) {
        if let Some(seen) = self.watch.as_ref().map(Watch::seen) {
            if let Some(read) = seen.metadata {
                (self.says, self.backoff) = (read, BACKOFF.0);
            }
            if let Some(why) = seen.over {
                self.watch = None;
                self.retry_at = Some(now + self.backoff);
                self.backoff = (self.backoff * 2).min(BACKOFF.1);
                // What was read before holds on.
                if let Metadata::Unread(old) = &mut self.says {
                    *old = why;
                }
            }
        }
        if self.watch.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        // The user of a session is not the host's operator.
        let Some(address) = libvirt.find(process).filter(|a| a.is_systems()) else {
            self.retry_at = Some(now + LOOK_UP);
            return;
        };
        if self.says.is_none() && self.retry_at.is_none() {
            self.says = Metadata::Unread("libvirt has not answered yet".into());
        }
        match libvirt.watch(address) {
            Ok(watch) => self.watch = Some(watch),
            Err(e) => self.says = Metadata::Unread(e.to_string()),
        }
    }
}

impl Vm {
    /// Looks what its metadata says by now, where that `counts`.
    pub fn look_at_metadata(&mut self, counts: bool, now: Instant) {
        match self.libvirt.as_ref().filter(|_| counts) {
            Some(libvirt) => self.domain.look(libvirt, &self.process, now),
            None => self.domain = DomainSettings::default(),
        }
    }

    /// What its metadata says.
    pub fn metadata(&self) -> &Metadata {
        &self.domain.says
    }

    /// What is wrong with it, as a problem.
    pub(super) fn metadata_problem(&self) -> Option<String> {
        match &self.domain.says {
            Metadata::Wrong(why) => Some(why.clone()),
            Metadata::Unread(why) if self.domain.watch.is_none() => {
                Some(format!("it cannot be read: {why}; nothing is taken from the VM until it is"))
            }
            _ => None,
        }
    }
}
