//! Following a domain's metadata: it is read when a watch begins and after each event that it has
//! changed. Ebb's own note in it is read at the beginning, and written where it is to be another.
//!
//! Writing it needs a job of libvirt's on the domain, as an order does. Reading metadata waits for
//! no other call on the domain and not for its QEMU, and touches neither. So it is done for every
//! domain of the system's libvirt, also one that is not managed, and whichever way Ebb reaches its
//! QEMU.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_core::config::{Metadata, NAMESPACE};
use ebb_core::units::Bytes;

use super::calls::{self, Domain, Event, Request};
use super::metadata::{self, NOTE};
use super::rpc::Refused;
use crate::lock;

/// Time after which it is read again if no event has come.
const READ_EVERY: Duration = Duration::from_secs(50);
/// A note that was written is replaced after this time; it is removed at once.
const WRITE_EVERY: Duration = Duration::from_secs(5);

/// What the thread has read of a domain's metadata.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Arc<Mutex<WatchState>>);

#[derive(Clone, Debug, Default)]
pub(crate) struct WatchState {
    /// What it says; `None`: not read yet.
    pub metadata: Option<Metadata>,
    /// The note that was there at the beginning: what the balloon holds without Ebb.
    pub noted: Option<Bytes>,
    /// The note that is there now; `None`: not read yet.
    there: Option<Option<Bytes>>,
    /// The one that is to be there; `None`: whatever is.
    wanted: Option<Option<Bytes>>,
    pub refused: Option<String>,
    /// Why the watch has ended, if it has.
    pub over: Option<String>,
}

impl WatchState {
    /// The note that is still to be written, or removed.
    fn to_write(&self) -> Option<Option<Bytes>> {
        let there = self.there?;
        self.wanted.filter(|note| *note != there)
    }

    /// Whether the note that is there may be another than is wanted.
    pub fn is_note_due(&self) -> bool {
        self.wanted.is_some() && self.there != self.wanted
    }
}

impl Watch {
    pub fn state(&self) -> WatchState {
        lock(&self.0).clone()
    }

    /// Has this note written, or none.
    pub fn note(&self, note: Option<Bytes>) {
        self.tell(|state| state.wanted = Some(note));
    }

    fn tell(&self, to: impl FnOnce(&mut WatchState)) {
        to(&mut lock(&self.0));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    LookUp,
    ReadNote,
    Write(Option<Bytes>),
    Read,
}

#[derive(Debug)]
pub(super) struct Watcher {
    pub name: String,
    watch: Watch,
    domain: Option<Domain>,
    /// When it was asked for last; `None`: it is to be.
    read: Option<Instant>,
    /// When a note was last written.
    written: Option<Instant>,
    busy: bool,
}

impl Watcher {
    pub fn new(name: String, watch: Watch) -> Watcher {
        Watcher { name, watch, domain: None, read: None, written: None, busy: false }
    }

    /// Whether a VM still uses it.
    pub fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.watch.0) > 1
    }

    pub fn end(&self, why: &str) {
        self.watch.tell(|state| state.over = Some(why.to_owned()));
    }

    /// When the next call is to be made, while none is under way.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        let read = self.read.map_or(now, |at| at + READ_EVERY);
        let write = self.write_at(now);
        (!self.busy).then(|| write.map_or(read, |at| at.min(read)))
    }

    fn write_at(&self, now: Instant) -> Option<Instant> {
        let state = self.watch.state();
        let replaces = state.to_write()?.is_some() && state.there.flatten().is_some();
        Some(match self.written {
            Some(at) if state.refused.is_some() => at + READ_EVERY,
            Some(at) if replaces => at + WRITE_EVERY,
            _ => now,
        })
    }

    pub fn call(&mut self, now: Instant) -> (Step, Request) {
        self.busy = true;
        let Some(domain) = &self.domain else {
            return (Step::LookUp, calls::look_up(&self.name));
        };
        let reads = self.read.is_none_or(|at| now >= at + READ_EVERY);
        let state = self.watch.state();
        match state.to_write() {
            _ if state.there.is_none() => (Step::ReadNote, calls::metadata(domain, NOTE.0)),
            Some(note) if self.write_at(now).is_some_and(|at| at <= now) && !reads => {
                self.written = Some(now);
                let xml = note.map(metadata::note);
                (Step::Write(note), calls::set_metadata(domain, NOTE, xml.as_deref()))
            }
            _ => {
                self.read = Some(now);
                (Step::Read, calls::metadata(domain, NAMESPACE))
            }
        }
    }

    /// It was answered. An error ends the watch.
    pub fn answered(&mut self, step: Step, result: Result<Vec<u8>, Refused>) -> Result<(), String> {
        self.busy = false;
        match step {
            Step::LookUp => self.domain = Some(calls::running(&self.name, result)?),
            Step::ReadNote => {
                let noted = metadata::element(result)?.and_then(|xml| metadata::noted(&xml));
                self.watch.tell(|state| (state.noted, state.there) = (noted, Some(noted)));
            }
            // One that was refused is tried again later: libvirt may have had a job on the domain.
            Step::Write(note) => self.watch.tell(|state| match result {
                Ok(_) => (state.there, state.refused) = (Some(note), None),
                Err(why) => state.refused = Some(why.to_string()),
            }),
            Step::Read => {
                let element = metadata::element(result)?;
                let said = element.map_or(Metadata::None, |xml| metadata::said(&self.name, &xml));
                self.watch.tell(|state| state.metadata = Some(said));
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

    fn none() -> Refused {
        Refused { code: 80, message: "no metadata".into() }
    }

    fn found() -> Vec<u8> {
        Writer::default().text("a").fixed(&[7; 16]).i32(3).done()
    }

    /// One that has read its domain's metadata, and with it this note.
    fn watcher(noted: Result<&str, Refused>, now: Instant) -> (Watcher, Watch) {
        let watch = Watch::default();
        let mut w = Watcher::new("a".into(), watch.clone());
        for result in
            [Ok(found()), noted.map(|xml| Writer::default().text(xml).done()), Err(none())]
        {
            let (step, ..) = w.call(now);
            w.answered(step, result).unwrap();
        }
        (w, watch)
    }

    #[test]
    fn a_note_is_read_once_written_where_it_is_another_and_removed_in_the_end() {
        let now = Instant::now();
        let (mut w, watch) = watcher(Ok("<balloon unit='KiB' others='1024'/>"), now);
        assert_eq!(watch.state().noted, Some(Bytes::mib(1)));
        assert_eq!(w.due(now), Some(now + READ_EVERY), "what is there stays");
        let later = now + Duration::from_secs(1);
        watch.note(Some(Bytes::mib(1)));
        assert!(!watch.state().is_note_due());
        watch.note(Some(Bytes::mib(2)));
        let write = || Step::Write(Some(Bytes::mib(2)));
        assert_eq!((w.due(later), w.call(later).0), (Some(later), write()));
        assert!(watch.state().is_note_due());
        w.answered(write(), Ok(Vec::new())).unwrap();
        assert!(!watch.state().is_note_due());
        // Another follows later, and its end at once.
        watch.note(Some(Bytes::mib(3)));
        assert_eq!(w.due(later), Some(later + WRITE_EVERY));
        watch.note(None);
        assert_eq!((w.due(later), w.call(later).0), (Some(later), Step::Write(None)));
        // Refused, and tried again later; what was refused does not hold up another for ever.
        let busy = Refused { code: 68, message: "busy".into() };
        w.answered(Step::Write(None), Err(busy)).unwrap();
        assert!(watch.state().is_note_due() && watch.state().refused.is_some());
        assert_eq!(w.due(later), Some(now + READ_EVERY));
        let again = later + READ_EVERY;
        assert_eq!(w.call(again).0, Step::Read);
        w.answered(Step::Read, Err(none())).unwrap();
        assert_eq!(w.call(again).0, Step::Write(None));
        w.answered(Step::Write(None), Ok(Vec::new())).unwrap();
        assert!(!watch.state().is_note_due() && watch.state().refused.is_none());
        // The first one after a removal waits for nothing.
        watch.note(Some(Bytes::mib(4)));
        assert_eq!(w.due(again), Some(again));
        assert_eq!(watch.state().noted, Some(Bytes::mib(1)), "as it was at the beginning");
    }

    #[test]
    fn a_note_that_cannot_be_read_is_not_taken_for_none() {
        let (watch, now) = (Watch::default(), Instant::now());
        let mut w = Watcher::new("a".into(), watch.clone());
        w.call(now);
        w.answered(Step::LookUp, Ok(found())).unwrap();
        assert_eq!(w.call(now).0, Step::ReadNote);
        let other = Refused { code: 1, message: "internal error".into() };
        assert!(w.answered(Step::ReadNote, Err(other)).is_err(), "the watch ends");
        assert_eq!(watch.state().there, None);
    }

    #[test]
    fn metadata_is_read_at_once_after_each_change_and_now_and_then() {
        let (watch, now) = (Watch::default(), Instant::now());
        let mut w = Watcher::new("a".into(), watch.clone());
        let domain = Domain { name: "a".into(), uuid: [7; 16], id: 3 };
        assert_eq!(w.call(now).0, Step::LookUp);
        assert_eq!(w.due(now), None, "one call at a time");
        w.answered(Step::LookUp, Ok(found())).unwrap();
        assert_eq!((w.due(now), w.call(now).0), (Some(now), Step::ReadNote));
        w.answered(Step::ReadNote, Err(none())).unwrap();
        assert_eq!((w.due(now), w.call(now).0), (Some(now), Step::Read));
        // A change while the answer is on its way.
        assert!(w.event(&domain, &Event::Described));
        let said = |xml: &str| Ok(Writer::default().text(xml).done());
        w.answered(Step::Read, said("<memory min='1GiB'/>")).unwrap();
        assert!(matches!(watch.state().metadata, Some(Metadata::Says(_))));
        assert_eq!(w.due(now), Some(now), "is read again");
        w.call(now);
        w.answered(Step::Read, said("<memory min='x'/>")).unwrap();
        assert!(matches!(watch.state().metadata, Some(Metadata::Wrong(_))));
        assert_eq!(w.due(now), Some(now + READ_EVERY));
        let other = Domain { uuid: [8; 16], ..domain.clone() };
        assert!(w.event(&other, &Event::Lifecycle(5)) && !w.event(&domain, &Event::Lifecycle(5)));
        assert!(w.is_wanted());
        drop(watch);
        assert!(!w.is_wanted());
    }
}
