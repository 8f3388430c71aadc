//! Following a domain's metadata: it is read when a watch begins and after each event that it has
//! changed.
//!
//! Reading it waits for no other call on the domain and not for its QEMU, and touches neither. So
//! it is done for every domain of the system's libvirt, also one that is not managed, and whichever
//! way Ebb reaches its QEMU.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_core::config::Metadata;

use super::calls::{self, Domain, Event, Procedure};
use super::metadata;
use super::rpc::Refused;

/// Time after which it is read again if no event has come.
const READ_EVERY: Duration = Duration::from_secs(50);

/// What the thread has read of a domain's metadata.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Arc<Mutex<Seen>>);

/// See [`Watch`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// What it says; `None`: not read yet.
    pub metadata: Option<Metadata>,
    /// Why the watch has ended, if it has.
    pub over: Option<String>,
}

impl Watch {
    pub fn seen(&self) -> Seen {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn tell(&self, to: impl FnOnce(&mut Seen)) {
        to(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A call for a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    LookUp,
    Read,
}

#[derive(Debug)]
pub(super) struct Watcher {
    name: String,
    watch: Watch,
    domain: Option<Domain>,
    /// When it was asked for last; `None`: it is to be.
    read: Option<Instant>,
    busy: bool,
}

impl Watcher {
    pub fn new(name: String, watch: Watch) -> Watcher {
        Watcher { name, watch, domain: None, read: None, busy: false }
    }

    /// Whether anybody wants to know.
    pub fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.watch.0) > 1
    }

    pub fn end(&self, why: &str) {
        self.watch.tell(|seen| seen.over = Some(why.to_owned()));
    }

    /// When the next call is to be made, while none is under way.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        (!self.busy).then(|| self.read.map_or(now, |at| at + READ_EVERY))
    }

    pub fn call(&mut self, now: Instant) -> (Step, Procedure, Vec<u8>) {
        self.busy = true;
        let Some(domain) = &self.domain else {
            return (Step::LookUp, calls::LOOK_UP, calls::look_up(&self.name));
        };
        self.read = Some(now);
        (Step::Read, calls::METADATA, calls::metadata(domain))
    }

    /// It was answered. An error ends the watch.
    pub fn answered(&mut self, step: Step, result: Result<Vec<u8>, Refused>) -> Result<(), String> {
        self.busy = false;
        let odd = |e: &dyn std::fmt::Display| format!("libvirt's answer: {e}");
        match step {
            Step::LookUp => {
                let found = result.map_err(|e| e.to_string())?;
                let domain = calls::looked_up(&found).map_err(|e| odd(&e))?;
                if domain.id < 0 {
                    return Err(format!("libvirt says that “{}” does not run", self.name));
                }
                self.domain = Some(domain);
            }
            Step::Read => {
                let said = metadata::of_answer(&self.name, result).map_err(|e| odd(&e))?;
                let said = said.map_err(|e| e.to_string())?;
                self.watch.tell(|seen| seen.metadata = Some(said));
            }
        }
        Ok(())
    }

    /// An event of a domain. False: this one has stopped, and the watch ends.
    pub fn event(&mut self, domain: &Domain, event: &Event) -> bool {
        let its = self.domain.as_ref().is_some_and(|d| d.uuid == domain.uuid);
        if its && *event == Event::Described {
            self.read = None;
        }
        let stops = its && *event == Event::Lifecycle(5);
        if stops {
            self.end("the domain has stopped");
        }
        !stops
    }
}

#[cfg(test)]
mod tests {
    use super::super::xdr::Writer;
    use super::*;

    #[test]
    fn metadata_is_read_at_once_after_each_change_and_now_and_then() {
        let (watch, now) = (Watch::default(), Instant::now());
        let mut w = Watcher::new("a".into(), watch.clone());
        let domain = Domain { name: "a".into(), uuid: [7; 16], id: 3 };
        assert_eq!(w.call(now).0, Step::LookUp);
        assert_eq!(w.due(now), None, "one call at a time");
        let found = Writer::default().text("a").fixed(&[7; 16]).i32(3).done();
        w.answered(Step::LookUp, Ok(found)).unwrap();
        assert_eq!((w.due(now), w.call(now).0), (Some(now), Step::Read));
        // A change while the answer is on its way.
        assert!(w.event(&domain, &Event::Described));
        let said = |xml: &str| Ok(Writer::default().text(xml).done());
        w.answered(Step::Read, said("<memory min='1GiB'/>")).unwrap();
        assert!(matches!(watch.seen().metadata, Some(Metadata::Says(_))));
        assert_eq!(w.due(now), Some(now), "is read again");
        w.call(now);
        w.answered(Step::Read, said("<memory min='x'/>")).unwrap();
        assert!(matches!(watch.seen().metadata, Some(Metadata::Wrong(_))));
        assert_eq!(w.due(now), Some(now + READ_EVERY));
        let other = Domain { uuid: [8; 16], ..domain.clone() };
        assert!(w.event(&other, &Event::Lifecycle(5)) && !w.event(&domain, &Event::Lifecycle(5)));
        assert!(w.is_wanted());
        drop(watch);
        assert!(!w.is_wanted());
    }
}
