//! One table of fields: each metric and each column of `ebb status` has its title, unit, help and
//! metric kind here, once. It feeds the terminal's table and `/metrics`.

use ebb_core::model::{Limit, Progress};
use ebb_core::sample::Link;
use ebb_core::task::StageName;
use ebb_core::units::Bytes;
use serde::Serialize;
use serde_json::Value;

use crate::view::{Stage, State, Vm};

/// The unit of a field, which decides its metric's name and how people read it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    Bytes,
    Seconds,
    /// A fraction of one.
    Ratio,
    PagesPerSecond,
    /// A plain count or level.
    Plain,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Gauge,
    Counter,
}

pub struct Field<T> {
    /// Name in metrics, without prefix and unit.
    pub key: &'static str,
    /// Column title; empty: not in the table.
    pub title: &'static str,
    pub unit: Unit,
    pub kind: Kind,
    pub help: &'static str,
    pub get: fn(&T) -> Option<f64>,
}

/// `None` is not known.
fn number(v: impl Serialize) -> Option<f64> {
    match serde_json::to_value(v).ok()? {
        Value::Bool(b) => Some(u8::from(b).into()),
        v => v.as_f64(),
    }
}

fn stage(s: &State, name: StageName) -> Option<&Stage> {
    s.host.stages.iter().find(|r| r.name == name)
}

/// A table: key, column title, unit and kind, help, and how it is read; `None` is not known.
macro_rules! fields {
    ($table:ident: $of:ty, $it:ident => $(
        $key:ident $(as $title:literal)?: $unit:ident $kind:ident $help:literal = $get:expr;
    )*) => {
        pub const $table: &[Field<$of>] = &[$(Field {
            key: stringify!($key),
            title: concat!($($title)?),
            unit: Unit::$unit,
            kind: Kind::$kind,
            help: $help,
            get: |$it| number($get),
        },)*];
    };
}

fields! { LIMIT_FIELDS: Limit, l =>
    pressure: Plain Gauge "0 clear, 1 soft, 2 hard, 3 critical" = l.state as u8;
    capacity: Bytes Gauge "Memory under the limit" = l.capacity;
    headroom: Bytes Gauge "What of it can be had without harm" = l.headroom;
    vms: Plain Gauge "VMs below the limit" = l.vms;
}

fields! { HOST_FIELDS: State, s =>
    pressure: Plain Gauge "0 clear, 1 soft, 2 hard, 3 critical" = s.host.state as u8;
    capacity: Bytes Gauge "Memory under the tightest limit" = s.host.capacity;
    headroom: Bytes Gauge "What of it can be had without harm" = s.host.headroom;
    reserve: Bytes Gauge "What the host wants to keep" = s.host.reserve;
    shortage: Bytes Gauge "What is missing to the reserve" = s.host.shortage;
    memory_total: Bytes Gauge "MemTotal" = s.host.total;
    memory_free: Bytes Gauge "MemFree" = s.host.free;
    memory_available: Bytes Gauge "MemAvailable" = s.host.available;
    swap_used: Bytes Gauge "Swap in use" = s.host.swap_used;
    swap_in_rate: PagesPerSecond Gauge "Pages swapped in" = s.host.swap_in_rate;
    swap_out_rate: PagesPerSecond Gauge "Pages swapped out" = s.host.swap_out_rate;
    psi_some: Ratio Gauge "Memory pressure, some, 10 s average" = s.host.psi_some? / 100.0;
    psi_full: Ratio Gauge "Memory pressure, full, 10 s average" = s.host.psi_full? / 100.0;
    pool_limit: Bytes Gauge "Limit of the VMs' cgroup" = s.host.pool.as_ref()?.limit;
    pool_usage: Bytes Gauge "Usage of the VMs' cgroup" = s.host.pool.as_ref()?.usage;
    pool_swap: Bytes Gauge "Swap used by the VMs' cgroup" = s.host.pool.as_ref()?.swap;
    vms: Plain Gauge "VMs found" = s.vms.len();
    vms_ram: Bytes Gauge "Sum of the VMs' RAM" = s.host.vms_ram;
    vms_resident: Bytes Gauge "Sum of what the VMs hold" = s.host.resident;
    problems: Plain Gauge "Sources that could not be read" = s.problems.len();
    daemon_cpu: Seconds Counter "CPU time of the daemon" = s.daemon.cpu_s;
    daemon_resident: Bytes Gauge "Resident memory of the daemon" = s.daemon.resident;
    urgency: Ratio Gauge "How much tasks suffer for memory" = s.host.urgency;
    vms_starting: Bytes Gauge "What VMs that have just started may still take" = s.host.starting;
    missing: Bytes Gauge "What the plan's stages are to bring" = s.host.stages.first()?.missing;
    recycle_expected: Bytes Counter "What recycling was expected to bring"
        = stage(s, StageName::Recycle)?.expected_total;
    recycle_came: Bytes Counter "What recycling brought" = stage(s, StageName::Recycle)?.came_total;
    balloon_expected: Bytes Counter "What ballooning was expected to bring"
        = stage(s, StageName::Balloon)?.expected_total;
    balloon_came: Bytes Counter "What ballooning brought" = stage(s, StageName::Balloon)?.came_total;
    offload_expected: Bytes Counter "What was ordered to be paged out"
        = stage(s, StageName::Offload)?.expected_total;
    offload_came: Bytes Counter "What was paged out on order"
        = stage(s, StageName::Offload)?.came_total;
    ksm_running: Plain Gauge "1: ksmd works" = s.host.ksm?.run == 1;
    ksm_saved: Bytes Gauge "What KSM saves, its own memory not counted" = s.host.ksm?.saved_now();
    ksm_profit: Bytes Gauge "What KSM saves less its own memory, signed" = s.host.ksm?.profit_now();
    ksm_shared: Plain Gauge "Merged pages that are kept" = s.host.ksm?.pages_shared;
    ksm_sharing: Plain Gauge "Pages that merging saves" = s.host.ksm?.pages_sharing;
    ksm_unshared: Plain Gauge "Pages looked at that have no duplicate" = s.host.ksm?.pages_unshared;
    ksm_volatile: Plain Gauge "Pages that change too fast" = s.host.ksm?.pages_volatile;
    ksm_zero: Plain Gauge "Pages of zeros that hold no memory" = s.host.ksm?.zero_pages;
    ksm_skipped: Plain Counter "Pages passed over by smart_scan" = s.host.ksm?.pages_skipped;
    ksm_scanned: Plain Counter "Pages that ksmd looked at" = s.host.ksm?.pages_scanned;
    ksm_scans: Plain Counter "Full scans of ksmd" = s.host.ksm?.full_scans;
    ksm_chains: Plain Gauge "Contents with more copies than one page may have" = s.host.ksm?.chains;
    ksm_cpu: Seconds Counter "CPU time of ksmd" = s.host.ksm?.cpu_ms? as f64 / 1000.0;
    merge_found: Bytes Gauge "What merging would still save, by the last scan"
        = s.host.merge.as_ref()?.found;
    merge_scans: Plain Counter "Scans for equal pages" = s.host.merge.as_ref()?.scan.number;
    merge_scan_cpu: Seconds Counter "CPU time of those scans" = s.host.merge.as_ref()?.scan.cpu_s;
    zeros_came: Bytes Counter "What freeing zero pages brought"
        = stage(s, StageName::Zeros)?.came_total;
    merge_came: Bytes Counter "What merging brought" = stage(s, StageName::Merge)?.came_total;
    record: Seconds Gauge "How far the flight recorder reaches back" = s.daemon.record_s;
    tick: Seconds Gauge "Duration of the last tick" = s.daemon.tick_ms / 1000.0;
    ticks: Plain Counter "Ticks since the start" = s.tick;
    orders: Plain Counter "Balloon orders given" = s.daemon.orders;
    orders_failed: Plain Counter "Balloon orders that failed" = s.daemon.orders_failed;
}

fields! { VM_FIELDS: Vm, v =>
    ram as "RAM": Bytes Gauge "RAM it was given" = v.ram;
    actual as "SIZE": Bytes Gauge "RAM less balloon" = v.actual;
    target: Bytes Gauge "Size it was ordered to take, while under way" = v.target;
    floor as "FLOOR": Bytes Gauge "Size below which it is never asked" = v.floor;
    ceiling: Bytes Gauge "Size above which it is not given more" = v.ceiling;
    ballooned: Bytes Gauge "Held by the balloon of what it is owed" = v.ballooned;
    resident as "RESIDENT": Bytes Gauge "What the host holds for it" = v.resident;
    vmm: Bytes Gauge "What of it is the VMM's own, not guest RAM" = v.vmm;
    swap as "SWAP": Bytes Gauge "What of it is in the host's swap" = v.swap;
    available as "AVAILABLE": Bytes Gauge "Available in the guest, as it says" = v.available;
    guest_free: Bytes Gauge "Free in the guest, exactly, from its map" = v.agent.as_ref()?.free;
    guest_free_held as "FREED": Bytes Gauge "Of that, held by the host and recyclable"
        = v.agent.as_ref()?.held;
    recycled: Bytes Counter "Free pages that the agent returned to the host"
        = v.agent.as_ref()?.counters.recycled;
    recycle_reused_pages: Plain Counter
        "Free pages that the guest took while they were being checked, so they were not returned"
        = v.agent.as_ref()?.counters.saved_pages;
    recycle_backoff: Plain Gauge "How often slack was doubled because recycled memory came back"
        = v.agent.as_ref().map(|_| v.recycle_backoff);
    working_set: Bytes Gauge "Its need and the cache it reads again and again" = v.working_set;
    guest_idle: Bytes Gauge "Its size less its working set" = v.idle;
    trust: Ratio Gauge "How far its numbers are believed" = v.trust.level;
    stuck: Plain Gauge "1: it does not follow orders" = v.convergence.state == Progress::Stuck;
    merged: Bytes Gauge "Mapped merged pages and pages of zeros"
        = Bytes::pages(v.merge.as_ref()?.stat.merged());
    merge_profit: Bytes Gauge "Its merging less KSM's memory for it, signed"
        = v.merge.as_ref()?.stat.profit;
    merge_open: Plain Gauge "1: KSM may look at it" = v.merge.as_ref()?.open;
    merge_found: Bytes Gauge "What merging it would still save" = v.merge.as_ref()?.found?.saves();
    paged_out: Bytes Counter "Paged out on order" = v.tasks.offload.as_ref()?.paged_out;
    partial_thp_split: Plain Counter "Huge pages split that a balloon left partially mapped"
        = v.tasks.partial_thp.as_ref()?.split;
    partial_thp_freed: Bytes Counter "What that freed" = v.tasks.partial_thp.as_ref()?.freed;
    zeros_read: Bytes Counter "Scanned for zero pages" = v.tasks.zeros.as_ref()?.read;
    zeros_freed: Bytes Counter "Zero pages that were freed" = v.tasks.zeros.as_ref()?.freed;
    stats_age: Seconds Gauge "Age of the guest's statistics" = v.stats_age_ms? as f64 / 1000.0;
    up: Plain Gauge "1: QMP answers" = v.link == Link::Up;
    distress: Plain Gauge "1: the guest is short of memory" = !v.distress.is_empty();
    returned_balloon: Bytes Counter "Came back while the balloon grew" = v.returned.balloon;
    returned_recycled: Bytes Counter "Came back by recycling" = v.returned.recycled;
    returned_reporting: Bytes Counter "Came back by free page reporting" = v.returned.reporting;
    returned_swap: Bytes Counter "Went to swap" = v.returned.swap;
    returned_zeros: Bytes Counter "Zero pages, freed on order" = v.returned.zeros;
    returned_other: Bytes Counter "Came back in another way" = v.returned.other;
    given_back: Bytes Counter "Given back to the guest by its balloon" = v.returned.given_back;
}
