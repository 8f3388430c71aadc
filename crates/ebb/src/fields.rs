//! One table of fields: each number that users see has its title, unit, help and metric
//! kind here, once. It feeds the terminal's table and `/metrics`.

use ebb_core::model::Limit;
use ebb_core::plan::RungName;
use ebb_core::sample::{Ksm, Link};
use ebb_core::units::Bytes;

use crate::view::{Rung, State, Vm};

/// The unit of a field, which decides its metric's name and how people read it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// A fraction of one.
    Ratio,
    /// Pages a second.
    PagesPerSecond,
    /// A plain count or level.
    Plain,
}

/// How a metric behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only grows.
    Counter,
}

/// One number that users see.
pub struct Field<T> {
    /// Name in metrics, without prefix and unit.
    pub key: &'static str,
    /// Column title; empty: not in the table.
    pub title: &'static str,
    /// Unit.
    pub unit: Unit,
    /// Metric kind.
    pub kind: Kind,
    /// One sentence.
    pub help: &'static str,
    /// Reads it.
    pub get: fn(&T) -> Option<f64>,
}

macro_rules! field {
    ($key:literal, $title:literal, $unit:ident, $kind:ident, $help:literal, $get:expr) => {
        Field {
            key: $key,
            title: $title,
            unit: Unit::$unit,
            kind: Kind::$kind,
            help: $help,
            get: $get,
        }
    };
}

fn bytes(b: Bytes) -> Option<f64> {
    Some(b.0 as f64)
}

fn ksm(s: &State, get: impl FnOnce(&Ksm) -> Option<u64>) -> Option<f64> {
    s.host.ksm.as_ref().and_then(get).map(|n| n as f64)
}

fn pages(n: u64) -> Option<f64> {
    bytes(Bytes::pages(n))
}

fn rung(s: &State, name: RungName) -> Option<&Rung> {
    s.host.ladder.iter().find(|r| r.name == name)
}

fn expected(s: &State, name: RungName) -> Option<f64> {
    rung(s, name).and_then(|r| bytes(r.expected_total))
}

fn came(s: &State, name: RungName) -> Option<f64> {
    rung(s, name).and_then(|r| bytes(r.came_total))
}

/// The numbers of each limit on memory.
pub const LIMIT_FIELDS: &[Field<Limit>] = &[
    field!("pressure", "", Plain, Gauge, "0 clear, 1 soft, 2 hard, 3 critical", |l| Some(
        l.state as u8 as f64
    )),
    field!("capacity", "", Bytes, Gauge, "Memory under the limit", |l| bytes(l.capacity)),
    field!("headroom", "", Bytes, Gauge, "What of it can be had without harm", |l| bytes(
        l.headroom
    )),
    field!("vms", "", Plain, Gauge, "VMs below the limit", |l| Some(l.vms as f64)),
];

/// The host's numbers.
pub const HOST_FIELDS: &[Field<State>] = &[
    field!("pressure", "", Plain, Gauge, "0 clear, 1 soft, 2 hard, 3 critical", |s| Some(
        s.host.state as u8 as f64
    )),
    field!("capacity", "", Bytes, Gauge, "Memory under the tightest bound", |s| bytes(
        s.host.capacity
    )),
    field!("headroom", "", Bytes, Gauge, "What of it can be had without harm", |s| bytes(
        s.host.headroom
    )),
    field!("reserve", "", Bytes, Gauge, "What the host wants to keep", |s| bytes(s.host.reserve)),
    field!("shortage", "", Bytes, Gauge, "What is missing to the reserve", |s| bytes(
        s.host.shortage
    )),
    field!("memory_total", "", Bytes, Gauge, "MemTotal", |s| s.host.total.and_then(bytes)),
    field!("memory_free", "", Bytes, Gauge, "MemFree", |s| s.host.free.and_then(bytes)),
    field!("memory_available", "", Bytes, Gauge, "MemAvailable", |s| s
        .host
        .available
        .and_then(bytes)),
    field!("swap_used", "", Bytes, Gauge, "Swap in use", |s| s.host.swap_used.and_then(bytes)),
    field!("swap_in_rate", "", PagesPerSecond, Gauge, "Pages swapped in", |s| Some(
        s.host.swap_in_rate
    )),
    field!("swap_out_rate", "", PagesPerSecond, Gauge, "Pages swapped out", |s| Some(
        s.host.swap_out_rate
    )),
    field!("psi_some", "", Ratio, Gauge, "Memory pressure, some, 10 s average", |s| s
        .host
        .psi_some
        .map(|p| p / 100.0)),
    field!("psi_full", "", Ratio, Gauge, "Memory pressure, full, 10 s average", |s| s
        .host
        .psi_full
        .map(|p| p / 100.0)),
    field!("pool_limit", "", Bytes, Gauge, "Limit of the VMs' cgroup", |s| s
        .host
        .pool
        .as_ref()
        .and_then(|p| bytes(p.limit))),
    field!("pool_usage", "", Bytes, Gauge, "Usage of the VMs' cgroup", |s| s
        .host
        .pool
        .as_ref()
        .and_then(|p| bytes(p.usage))),
    field!("pool_swap", "", Bytes, Gauge, "Swap used by the VMs' cgroup", |s| s
        .host
        .pool
        .as_ref()
        .and_then(|p| p.swap)
        .and_then(bytes)),
    field!("vms", "", Plain, Gauge, "VMs found", |s| Some(s.vms.len() as f64)),
    field!("vms_promised", "", Bytes, Gauge, "Sum of the VMs' RAM", |s| bytes(s.host.promised)),
    field!("vms_resident", "", Bytes, Gauge, "Sum of what the VMs hold", |s| bytes(
        s.host.resident
    )),
    field!("problems", "", Plain, Gauge, "Sources that could not be read", |s| Some(
        s.problems.len() as f64
    )),
    field!("daemon_cpu", "", Seconds, Counter, "CPU time of the daemon", |s| Some(s.daemon.cpu_s)),
    field!("daemon_resident", "", Bytes, Gauge, "Resident memory of the daemon", |s| bytes(
        s.daemon.resident
    )),
    field!("urgency", "", Ratio, Gauge, "How much tasks suffer for memory", |s| Some(
        s.host.urgency
    )),
    field!(
        "vms_starting",
        "",
        Bytes,
        Gauge,
        "What VMs that have just started may still take",
        |s| { bytes(s.host.starting) }
    ),
    field!("ladder_missing", "", Bytes, Gauge, "What the ladder is to bring", |s| s
        .host
        .ladder
        .first()
        .and_then(|r| bytes(r.missing))),
    field!("recycle_expected", "", Bytes, Counter, "What recycling was expected to bring", |s| {
        expected(s, RungName::Recycle)
    }),
    field!("recycle_came", "", Bytes, Counter, "What recycling brought", |s| {
        came(s, RungName::Recycle)
    }),
    field!("balloon_expected", "", Bytes, Counter, "What ballooning was expected to bring", |s| {
        expected(s, RungName::Balloon)
    }),
    field!("balloon_came", "", Bytes, Counter, "What ballooning brought", |s| {
        came(s, RungName::Balloon)
    }),
    field!("offload_expected", "", Bytes, Counter, "What was ordered to be paged out", |s| {
        expected(s, RungName::Offload)
    }),
    field!("offload_came", "", Bytes, Counter, "What was paged out on order", |s| {
        came(s, RungName::Offload)
    }),
    field!("ksm_running", "", Plain, Gauge, "1: ksmd works", |s| ksm(s, |k| {
        Some(u64::from(k.run == 1))
    })),
    field!("ksm_saved", "", Bytes, Gauge, "What KSM saves, its own memory not counted", |s| {
        ksm(s, |k| Some(k.saved_now().0))
    }),
    field!("ksm_profit", "", Bytes, Gauge, "What KSM saves less its own memory, signed", |s| {
        s.host.ksm.and_then(|k| k.profit_now()).map(|p| p as f64)
    }),
    field!("ksm_shared", "", Plain, Gauge, "Merged pages that are kept", |s| ksm(s, |k| Some(
        k.pages_shared
    ))),
    field!("ksm_sharing", "", Plain, Gauge, "Pages that merging saves", |s| ksm(s, |k| Some(
        k.pages_sharing
    ))),
    field!("ksm_unshared", "", Plain, Gauge, "Pages looked at that have no duplicate", |s| ksm(
        s,
        |k| Some(k.pages_unshared)
    )),
    field!("ksm_volatile", "", Plain, Gauge, "Pages that change too fast", |s| ksm(s, |k| Some(
        k.pages_volatile
    ))),
    field!("ksm_zero", "", Plain, Gauge, "Pages of zeros that hold no memory", |s| ksm(s, |k| k
        .zero_pages)),
    field!("ksm_skipped", "", Plain, Counter, "Pages passed over by smart_scan", |s| ksm(s, |k| k
        .pages_skipped)),
    field!("ksm_scanned", "", Plain, Counter, "Pages that ksmd looked at", |s| ksm(s, |k| k
        .pages_scanned)),
    field!("ksm_scans", "", Plain, Counter, "Full scans of ksmd", |s| ksm(s, |k| Some(
        k.full_scans
    ))),
    field!(
        "ksm_chains",
        "",
        Plain,
        Gauge,
        "Contents with more copies than one page may have",
        |s| { ksm(s, |k| Some(k.chains)) }
    ),
    field!("ksm_cpu", "", Seconds, Counter, "CPU time of ksmd", |s| s
        .host
        .ksm
        .and_then(|k| k.cpu_ms)
        .map(|ms| ms as f64 / 1000.0)),
    field!(
        "merge_found",
        "",
        Bytes,
        Gauge,
        "What merging would still save, by the last scan",
        |s| { s.host.merge.as_ref().and_then(|m| bytes(m.found)) }
    ),
    field!("merge_scans", "", Plain, Counter, "Scans for equal pages", |s| s
        .host
        .merge
        .as_ref()
        .map(|m| m.scan.number as f64)),
    field!("merge_scan_cpu", "", Seconds, Counter, "CPU time of those scans", |s| s
        .host
        .merge
        .as_ref()
        .map(|m| m.scan.cpu_s)),
    field!("zeros_came", "", Bytes, Counter, "What freeing zero pages brought", |s| {
        came(s, RungName::Zeros)
    }),
    field!("merge_came", "", Bytes, Counter, "What merging brought", |s| came(s, RungName::Merge)),
    field!("record", "", Seconds, Gauge, "How far the flight recorder reaches back", |s| Some(
        s.daemon.record_s
    )),
    field!("tick", "", Seconds, Gauge, "Duration of the last tick", |s| Some(
        s.daemon.tick_ms / 1000.0
    )),
    field!("ticks", "", Plain, Counter, "Ticks since the start", |s| Some(s.tick as f64)),
    field!("orders", "", Plain, Counter, "Balloon orders given", |s| Some(s.daemon.orders as f64)),
    field!("orders_failed", "", Plain, Counter, "Balloon orders that failed", |s| Some(
        s.daemon.orders_failed as f64
    )),
];

/// A VM's numbers.
pub const VM_FIELDS: &[Field<Vm>] = &[
    field!("ram", "RAM", Bytes, Gauge, "RAM it was given", |v| v.ram.and_then(bytes)),
    field!("actual", "SIZE", Bytes, Gauge, "RAM less balloon", |v| v.actual.and_then(bytes)),
    field!("target", "", Bytes, Gauge, "Size it was ordered to take, while under way", |v| v
        .target
        .and_then(bytes)),
    field!("floor", "FLOOR", Bytes, Gauge, "Size below which it is never asked", |v| bytes(
        v.floor
    )),
    field!("ceiling", "", Bytes, Gauge, "Size above which it is not given more", |v| bytes(
        v.ceiling
    )),
    field!("ballooned", "", Bytes, Gauge, "Held by the balloon of what it is owed", |v| bytes(
        v.ballooned
    )),
    field!("resident", "RESIDENT", Bytes, Gauge, "What the host holds for it", |v| v
        .resident
        .and_then(bytes)),
    field!("swap", "SWAP", Bytes, Gauge, "What of it is in the host's swap", |v| v
        .swap
        .and_then(bytes)),
    field!("available", "AVAILABLE", Bytes, Gauge, "Available in the guest, as it says", |v| v
        .available
        .and_then(bytes)),
    field!("guest_free", "", Bytes, Gauge, "Free in the guest, exactly, from its map", |v| {
        v.agent.as_ref().and_then(|a| a.free).and_then(bytes)
    }),
    field!("guest_free_held", "IDLE", Bytes, Gauge, "Of that, still held by the host", |v| {
        v.agent.as_ref().and_then(|a| a.held).and_then(bytes)
    }),
    field!("recycled", "", Bytes, Counter, "Given back page by page by the agent", |v| {
        v.agent.as_ref().and_then(|a| bytes(a.counters.recycled))
    }),
    field!(
        "recycle_saved_pages",
        "",
        Plain,
        Counter,
        "Pages the guest took between proof and discard",
        |v| { v.agent.as_ref().map(|a| a.counters.saved_pages as f64) }
    ),
    field!(
        "recycle_backoff",
        "",
        Plain,
        Gauge,
        "How often slack was doubled because recycled memory came back",
        |v| { v.agent.as_ref().map(|_| f64::from(v.recycle_backoff)) }
    ),
    field!(
        "working_set",
        "",
        Bytes,
        Gauge,
        "Its need and the cache it reads again and again",
        |v| { v.working_set.and_then(bytes) }
    ),
    field!("guest_idle", "", Bytes, Gauge, "Its size less its working set", |v| {
        v.idle.and_then(bytes)
    }),
    field!("trust", "", Ratio, Gauge, "How far its numbers are believed", |v| Some(v.trust.level)),
    field!("stuck", "", Plain, Gauge, "1: it does not follow orders", |v| Some(u8::from(
        v.convergence.state == ebb_core::model::Progress::Stuck
    ) as f64)),
    field!("merged", "", Bytes, Gauge, "Mapped merged pages and pages of zeros", |v| {
        v.merge.as_ref().and_then(|m| pages(m.stat.merged()))
    }),
    field!("merge_profit", "", Bytes, Gauge, "Its merging less KSM's memory for it, signed", |v| v
        .merge
        .as_ref()
        .and_then(|m| m.stat.profit)
        .map(|p| p as f64)),
    field!("merge_open", "", Plain, Gauge, "1: KSM may look at it", |v| v
        .merge
        .as_ref()
        .and_then(|m| m.open)
        .map(|o| f64::from(u8::from(o)))),
    field!("merge_found", "", Bytes, Gauge, "What merging it would still save", |v| v
        .merge
        .as_ref()
        .and_then(|m| bytes(m.found?.saves()))),
    field!("paged_out", "", Bytes, Counter, "Paged out on order", |v| {
        v.offload.as_ref().and_then(|o| bytes(o.paged_out))
    }),
    field!(
        "partial_thp_split",
        "",
        Plain,
        Counter,
        "Huge pages split that a balloon left partially mapped",
        |v| { v.partial_thp.as_ref().map(|t| t.split as f64) }
    ),
    field!("partial_thp_freed", "", Bytes, Counter, "What that freed", |v| {
        v.partial_thp.as_ref().and_then(|t| bytes(t.freed))
    }),
    field!("zeros_read", "", Bytes, Counter, "Scanned for zero pages", |v| {
        v.zeros.as_ref().and_then(|z| bytes(z.read))
    }),
    field!("zeros_freed", "", Bytes, Counter, "Zero pages that were freed", |v| {
        v.zeros.as_ref().and_then(|z| bytes(z.freed))
    }),
    field!("stats_age", "", Seconds, Gauge, "Age of the guest's statistics", |v| v
        .stats_age_ms
        .map(|a| a as f64 / 1000.0)),
    field!("up", "", Plain, Gauge, "1: QMP answers", |v| Some(u8::from(v.link == Link::Up) as f64)),
    field!("distress", "", Plain, Gauge, "1: the guest is short of memory", |v| Some(u8::from(
        !v.distress.is_empty()
    ) as f64)),
    field!("returned_balloon", "", Bytes, Counter, "Came back while the balloon grew", |v| bytes(
        v.returned.balloon
    )),
    field!("returned_recycled", "", Bytes, Counter, "Came back by recycling", |v| bytes(
        v.returned.recycled
    )),
    field!("returned_reporting", "", Bytes, Counter, "Came back by free page reporting", |v| {
        bytes(v.returned.reporting)
    }),
    field!("returned_swap", "", Bytes, Counter, "Went to swap", |v| bytes(v.returned.swap)),
    field!("returned_zeros", "", Bytes, Counter, "Zero pages, freed on order", |v| bytes(
        v.returned.zeros
    )),
    field!("returned_other", "", Bytes, Counter, "Came back in another way", |v| bytes(
        v.returned.other
    )),
    field!("given_back", "", Bytes, Counter, "Given back to the guest by deflating", |v| bytes(
        v.returned.given_back
    )),
];
