//! The procedures of libvirt that Ebb calls and the events that it hears: their numbers,
//! arguments and results. Source: libvirt `src/remote/remote_protocol.x`,
//! `src/remote/qemu_protocol.x`, `include/libvirt/libvirt-domain.h`. A function that is named
//! like a procedure makes a call of it.

use std::collections::BTreeMap;

use super::rpc::{QEMU, REMOTE, Refused};
use super::xdr::{Malformed, Reader, Writer};

/// What libvirt tells of a domain in numbers, by the names that [`ALL_STATS`] has for them.
pub type Numbers = BTreeMap<String, u64>;
/// Program and number of a procedure.
pub type Procedure = (u32, u32);
/// What is called, with its arguments in bytes.
pub type Request = (Procedure, Vec<u8>);
/// How clients are to authenticate. With polkit root need not; SASL is not supported.
pub const AUTH_LIST: Procedure = (REMOTE, 66);
/// Which hypervisor, by its URI.
pub const OPEN: Procedure = (REMOTE, 1);
pub const LOOK_UP: Procedure = (REMOTE, 23);
/// Its description as XML.
pub const DESCRIBE: Procedure = (REMOTE, 14);
/// Sets the part of its metadata that has a namespace.
const SET_METADATA: Procedure = (REMOTE, 264);
/// Reads it.
pub const METADATA: Procedure = (REMOTE, 265);
pub const ALL_STATS: Procedure = (REMOTE, 344);
/// Statistics of one domain's memory, asked of QEMU now.
pub const MEMORY_STATS: Procedure = (REMOTE, 159);
/// Which job libvirt has on it: it saves, migrates, dumps or backs it up.
pub const JOB: Procedure = (REMOTE, 298);
pub const SET_MEMORY: Procedure = (REMOTE, 204);
/// How often QEMU asks its guest for statistics.
pub const SET_PERIOD: Procedure = (REMOTE, 308);
/// Asks for events of one kind.
const REGISTER: Procedure = (REMOTE, 316);
/// A QMP command to its QEMU.
pub const MONITOR: Procedure = (QEMU, 1);

/// Kinds of events that Ebb hears, by `virDomainEventID`: lifecycle, reboot, balloon change, end of
/// a job, metadata change.
pub const EVENTS: [u32; 5] = [0, 1, 13, 21, 23];
const LIFECYCLE: u32 = 318;
const REBOOT: u32 = 319;
const BALLOON_CHANGE: u32 = 331;
const JOB_COMPLETED: u32 = 363;
const METADATA_CHANGE: u32 = 379;

/// `virDomainStatsTypes`: state and balloon.
const STATS: u32 = 1 | 4;
/// `VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT`: a domain that is busy tells less.
const NOWAIT: u32 = 1 << 29;
/// `VIR_DOMAIN_AFFECT_LIVE`, and `VIR_DOMAIN_MEM_LIVE`, which is the same number.
const LIVE: u32 = 1;
/// Most statistics of a domain's memory.
const MEMORY_STATS_MAX: u32 = 64;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Domain {
    pub name: String,
    /// What it keeps for life.
    pub uuid: [u8; 16],
    /// New at each start; −1 while it does not run.
    pub id: i32,
}

impl Domain {
    fn write(&self, w: Writer) -> Writer {
        w.text(&self.name).fixed(&self.uuid).i32(self.id)
    }

    fn args(&self) -> Writer {
        self.write(Writer::default())
    }

    fn read(r: &mut Reader<'_>) -> Result<Domain, Malformed> {
        Ok(Domain { name: r.text()?, uuid: r.array()?, id: r.i32()? })
    }
}

pub fn open(uri: &str) -> Request {
    (OPEN, Writer::default().some_text(uri).u32(0).done())
}

/// For events of all domains.
pub fn register(event: u32) -> Request {
    (REGISTER, Writer::default().u32(event).u32(0).done())
}

pub fn look_up(name: &str) -> Request {
    (LOOK_UP, Writer::default().text(name).done())
}

pub fn looked_up(result: &[u8]) -> Result<Domain, Malformed> {
    Domain::read(&mut Reader(result))
}

/// The domain of an answer to [`LOOK_UP`], if it runs.
pub(super) fn running(name: &str, result: Result<Vec<u8>, Refused>) -> Result<Domain, String> {
    let found = result.map_err(|e| e.to_string())?;
    match looked_up(&found).map_err(bad_answer)? {
        domain if domain.id >= 0 => Ok(domain),
        _ => Err(format!("libvirt says that “{name}” does not run")),
    }
}

/// What is wrong with an answer that cannot be read, for people.
pub(super) fn bad_answer(e: Malformed) -> String {
    format!("libvirt's answer: {e}")
}

pub fn describe(domain: &Domain) -> Request {
    (DESCRIBE, domain.args().u32(0).done())
}

/// `VIR_DOMAIN_METADATA_ELEMENT`.
const ELEMENT: i32 = 2;

/// Of a namespace, what holds while the domain runs.
pub fn metadata(domain: &Domain, namespace: &str) -> Request {
    (METADATA, domain.args().i32(ELEMENT).some_text(namespace).u32(LIVE).done())
}

/// Of a namespace with its prefix, what holds while the domain runs; `None` removes the element.
pub fn set_metadata(domain: &Domain, (namespace, key): (&str, &str), xml: Option<&str>) -> Request {
    let w = domain.args().i32(ELEMENT);
    let w = match xml {
        Some(xml) => w.some_text(xml),
        None => w.u32(0),
    };
    (SET_METADATA, w.some_text(key).some_text(namespace).u32(LIVE).done())
}

/// The one text that [`DESCRIBE`], [`METADATA`] and [`MONITOR`] return.
pub fn text(result: &[u8]) -> Result<String, Malformed> {
    Reader(result).text()
}

pub fn all_stats<'a>(domains: impl ExactSizeIterator<Item = &'a Domain>) -> Request {
    let w = Writer::default().u32(domains.len() as u32);
    (ALL_STATS, domains.fold(w, |w, d| d.write(w)).u32(STATS).u32(NOWAIT).done())
}

/// The result of [`ALL_STATS`]: numbers by name, of each domain.
pub fn all_stats_of(result: &[u8]) -> Result<Vec<(Domain, Numbers)>, Malformed> {
    Reader(result).list(|r| Ok((Domain::read(r)?, numbers(r, is_read)?)))
}

/// Typed parameters that are numbers. Negative ones are left out: Ebb reads none that may be.
fn numbers(r: &mut Reader<'_>, is_read: fn(&str) -> bool) -> Result<Numbers, Malformed> {
    let all = r.list(|r| {
        let name = r.text()?;
        let value = match r.u32()? {
            1 | 6 => u64::try_from(r.i32()?).ok(),
            2 => Some(u64::from(r.u32()?)),
            3 => i64::try_from(r.u64()?).ok().and_then(|n| u64::try_from(n).ok()),
            4 => Some(r.u64()?),
            5 => r.u64().map(|_| None)?,
            7 => r.text().map(|_| None)?,
            _ => return Err(Malformed),
        };
        Ok(value.map(|value| (name, value)).filter(|(name, _)| is_read(name)))
    });
    Ok(all?.into_iter().flatten().collect())
}

/// What is told of a domain's memory, by `virDomainMemoryStatTags`.
const TAGS: [&str; 13] = [
    "swap_in",
    "swap_out",
    "major_fault",
    "minor_fault",
    "unused",
    "available",
    "current",
    "rss",
    "usable",
    "last-update",
    "disk_caches",
    "hugetlb_pgalloc",
    "hugetlb_pgfail",
];

/// Whether anything here reads a number of this name; others are not kept.
fn is_read(name: &str) -> bool {
    match name.split_once('.') {
        Some(("state", name)) => matches!(name, "state" | "reason"),
        Some(("balloon", name)) => name == "maximum" || TAGS.contains(&name),
        _ => false,
    }
}

pub fn memory_stats(domain: &Domain) -> Request {
    (MEMORY_STATS, domain.args().u32(MEMORY_STATS_MAX).u32(0).done())
}

/// The result of [`MEMORY_STATS`], by the names that [`ALL_STATS`] has for it.
pub fn memory_stats_of(result: &[u8]) -> Result<Numbers, Malformed> {
    let all = Reader(result).list(|r| Ok((r.u32()?, r.u64()?)))?;
    let named = all
        .into_iter()
        .filter_map(|(tag, value)| Some((format!("balloon.{}", TAGS.get(tag as usize)?), value)));
    Ok(named.collect())
}

pub fn job(domain: &Domain) -> Request {
    (JOB, domain.args().u32(0).done())
}

/// `VIR_DOMAIN_JOB_OPERATION`, and of its values `VIR_DOMAIN_JOB_OPERATION_BACKUP`: libvirt goes on
/// setting balloons while it backs disks up, and memory is not part of it.
const OPERATION: (&str, u64) = ("operation", 9);

/// The result of [`JOB`]: whether one is under way (`VIR_DOMAIN_JOB_BOUNDED`, `_UNBOUNDED`) during
/// which libvirt sets no balloon. A libvirt before 3.3 does not tell which one it is.
pub fn is_busy(result: &[u8]) -> Result<bool, Malformed> {
    let mut r = Reader(result);
    if !matches!(r.i32()?, 1 | 2) {
        return Ok(false);
    }
    let (name, backup) = OPERATION;
    let told = numbers(&mut r, |name| name == OPERATION.0)?;
    Ok(told.get(name) != Some(&backup))
}

pub fn set_memory(domain: &Domain, kib: u64) -> Request {
    (SET_MEMORY, domain.args().u64(kib).u32(LIVE).done())
}

pub fn set_period(domain: &Domain, seconds: i32) -> Request {
    (SET_PERIOD, domain.args().i32(seconds).u32(LIVE).done())
}

pub fn monitor(domain: &Domain, command: &str) -> Request {
    (MONITOR, domain.args().text(command).u32(0).done())
}

/// An event of a domain that matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `VIR_DOMAIN_EVENT_*`: 2 started, 3 suspended, 4 resumed, 5 stopped, 6 is shutting down,
    /// 8 crashed.
    Lifecycle(i32),
    Reboot,
    /// Its balloon moved, to this size in KiB.
    Balloon(u64),
    Job,
    /// The metadata in its description changed.
    Described,
}

/// What an event's procedure says; `None` for one that Ebb does not know.
pub fn event(procedure: u32, body: &[u8]) -> Result<Option<(Domain, Event)>, Malformed> {
    let mut r = Reader(body);
    if ![LIFECYCLE, REBOOT, BALLOON_CHANGE, JOB_COMPLETED, METADATA_CHANGE].contains(&procedure) {
        return Ok(None);
    }
    let _callback = r.i32()?;
    let domain = Domain::read(&mut r)?;
    let event = match procedure {
        LIFECYCLE => Event::Lifecycle(r.i32()?),
        REBOOT => Event::Reboot,
        BALLOON_CHANGE => Event::Balloon(r.u64()?),
        JOB_COMPLETED => Event::Job,
        _ => Event::Described,
    };
    Ok(Some((domain, event)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn domain() -> Domain {
        Domain { name: "web".into(), uuid: [7; 16], id: 3 }
    }

    #[test]
    fn statistics_are_numbers_by_name() {
        let w = domain().write(Writer::default().u32(1)).u32(4);
        let w = w.text("state.state").u32(1).i32(1).text("balloon.current").u32(4).u64(524_288);
        let w = w.text("d").u32(5).u64(1).text("s").u32(7).text("x");
        let stats = all_stats_of(&w.done()).unwrap();
        assert_eq!(stats[0].0, domain());
        let expected = [("balloon.current".to_string(), 524_288), ("state.state".into(), 1)];
        assert_eq!(stats[0].1, BTreeMap::from(expected));
        let w = Writer::default().u32(2).u32(6).u64(100).u32(99).u64(1);
        let one = memory_stats_of(&w.done()).unwrap();
        assert_eq!(one, BTreeMap::from([("balloon.current".to_string(), 100)]));
    }

    #[test]
    fn a_job_is_told_apart_by_its_operation_and_an_unknown_one_counts() {
        let job = |kind: i32| Writer::default().i32(kind);
        let told = |kind, operation: i32| {
            let w = job(kind).u32(2).text("time_elapsed").u32(4).u64(7);
            is_busy(&w.text("operation").u32(1).i32(operation).done())
        };
        assert_eq!(is_busy(&job(0).u32(0).done()), Ok(false), "none");
        assert_eq!(is_busy(&job(2).u32(0).done()), Ok(true), "which is not told");
        assert_eq!((told(2, 2), told(1, 5), told(2, 8)), (Ok(true), Ok(true), Ok(true)));
        assert_eq!((told(2, 9), told(2, 99), told(2, -1)), (Ok(false), Ok(true), Ok(true)));
        assert!(is_busy(&job(2).done()).is_err(), "it ends early");
    }

    #[test]
    fn events_name_their_domain() {
        let body = |w: fn(Writer) -> Writer| w(domain().write(Writer::default().i32(1))).done();
        let heard = event(BALLOON_CHANGE, &body(|w| w.u64(1024)));
        assert_eq!(heard, Ok(Some((domain(), Event::Balloon(1024)))));
        assert_eq!(event(REBOOT, &body(|w| w)), Ok(Some((domain(), Event::Reboot))));
        assert_eq!(event(LIFECYCLE, &body(|w| w)), Err(Malformed), "it ends early");
        assert_eq!(event(9999, &[]), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = (all_stats_of(&bytes), memory_stats_of(&bytes), looked_up(&bytes), text(&bytes));
            let _ = (is_busy(&bytes), event(LIFECYCLE, &bytes), event(METADATA_CHANGE, &bytes));
        }
    }
}
