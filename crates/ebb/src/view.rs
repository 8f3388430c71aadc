//! What users see: one view of host and VMs, one table of fields.
//!
//! [`State`] is the JSON of `/v1/state` and `ebb status --json`. The tables
//! [`HOST_FIELDS`] and [`VM_FIELDS`] name each number once (title, unit, help,
//! metric kind) and feed the terminal table and `/metrics`.

use ebb_core::config::MergeMode;
use ebb_core::memory::{Memory, Returned};
use ebb_core::model::{Convergence, Model, Pressure, Standing, Trust, VmModel};
use ebb_core::plan::{Action, RungName};
use ebb_core::policy::merge::Candidates;
use ebb_core::sample::{
    AgentSample, Ksm, Link, MergeSample, OffloadSample, Pool, Problem, RunState, ScanSample,
    SwapArea, TornSample, VmId, VmSample, ZeroSample,
};
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use serde::{Deserialize, Serialize};

/// Everything that is known now.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
    /// Ticks since the daemon's start.
    pub tick: u64,
    /// The daemon.
    pub daemon: Daemon,
    /// The host.
    pub host: Host,
    /// The VMs.
    pub vms: Vec<Vm>,
    /// What could not be read.
    pub problems: Vec<Problem>,
}

/// The daemon itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Daemon {
    /// Version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: u64,
    /// It only says what it would do.
    pub dry_run: bool,
    /// CPU used since its start, seconds.
    pub cpu_s: f64,
    /// Its own resident memory.
    pub resident: Bytes,
    /// How long the last tick took, from reading to the last outcome.
    pub tick_ms: f64,
    /// Orders given, and those refused.
    pub orders: u64,
    /// Orders that QEMU refused or did not answer.
    pub orders_failed: u64,
    /// The Unix socket of the interface.
    pub socket: String,
}

/// The host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    /// Its state.
    pub state: Pressure,
    /// Seconds in that state.
    pub state_s: u64,
    /// What made it, in words.
    pub why: String,
    /// The tightest bound: `host` or a cgroup.
    pub bound: String,
    /// Under that bound.
    pub capacity: Bytes,
    /// What can still be had without harm.
    pub headroom: Bytes,
    /// What the host wants to keep.
    pub reserve: Bytes,
    /// What is missing to it.
    pub shortage: Bytes,
    /// `MemTotal`, `MemFree`, `MemAvailable`.
    pub total: Option<Bytes>,
    /// `MemFree`.
    pub free: Option<Bytes>,
    /// `MemAvailable`.
    pub available: Option<Bytes>,
    /// Swap in use.
    pub swap_used: Option<Bytes>,
    /// Swap there is.
    pub swap_total: Option<Bytes>,
    /// Pages swapped in a second.
    pub swap_in_rate: f64,
    /// Pages swapped out a second.
    pub swap_out_rate: f64,
    /// PSI `some`, 10 s average, percent.
    pub psi_some: Option<f64>,
    /// PSI `full`, 10 s average, percent.
    pub psi_full: Option<f64>,
    /// The VMs' cgroup.
    pub pool: Option<Pool>,
    /// KSM.
    pub ksm: Option<Ksm>,
    /// What is done about merging; absent where it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// Swap areas.
    pub swaps: Vec<SwapArea>,
    /// Sum of what the VMs have been promised.
    pub promised: Bytes,
    /// Sum of what they hold.
    pub resident: Bytes,
    /// How much tasks suffer, 0 to 1.
    #[serde(default)]
    pub urgency: f64,
    /// What VMs that have just started may still take.
    #[serde(default)]
    pub starting: Bytes,
    /// What in the configuration cannot work out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The ladder: what each mechanism is to bring, and has brought so far.
    #[serde(default)]
    pub ladder: Vec<Rung>,
}

/// Merging.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Merge {
    /// How far it goes.
    pub mode: MergeMode,
    /// What is done now, and why.
    pub why: String,
    /// The scanner.
    pub scan: ScanSample,
    /// What merging would still save of the VMs that were scanned.
    pub found: Bytes,
    /// The CPU time that `ksmd` would need for it.
    pub found_cpu_s: f64,
}

impl Merge {
    fn new(tick: &Tick, model: &Model) -> Option<Merge> {
        let host = model.host.merge.as_ref()?;
        let mut found = Candidates::default();
        let parts = model.vms.iter().filter_map(|v| v.merge.as_ref()?.sample.found.as_ref());
        parts.for_each(|f| found.add(f));
        Some(Merge {
            mode: host.config.mode,
            why: tick.plan.merge.as_ref().map(|m| m.why.clone()).unwrap_or_default(),
            scan: host.scan.clone(),
            found: found.saves(),
            found_cpu_s: found.cost_s(),
        })
    }
}

/// What is said of merging without the numbers in it, so that it is said once.
pub fn merge_words(why: &str) -> String {
    why.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// One mechanism.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rung {
    /// Which.
    pub name: RungName,
    /// What the host lacked before it.
    pub missing: Bytes,
    /// What the last plan's orders are expected to bring.
    pub expected: Bytes,
    /// What all plans so far were expected to bring.
    pub expected_total: Bytes,
    /// What was seen to come, a lower bound.
    pub came_total: Bytes,
    /// How, or why not.
    pub why: String,
}

/// One VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Vm {
    /// Name.
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// What Ebb can do for it: `none`, `stock`, `agent` or `guest`.
    pub tier: String,
    /// The agent inside the VMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentSample>,
    /// QMP.
    pub link: Link,
    /// QEMU's run state.
    pub run: Option<RunState>,
    /// RAM it was given.
    pub ram: Option<Bytes>,
    /// RAM less balloon.
    pub actual: Option<Bytes>,
    /// The order under way, if any.
    pub target: Option<Bytes>,
    /// Never asked below this.
    pub floor: Bytes,
    /// Never given more.
    pub ceiling: Bytes,
    /// What the balloon holds of what it is owed.
    pub ballooned: Bytes,
    /// Resident on the host.
    pub resident: Option<Bytes>,
    /// In the host's swap.
    pub swap: Option<Bytes>,
    /// Available in the guest, as it says.
    pub available: Option<Bytes>,
    /// What it cannot do without.
    pub need: Option<Bytes>,
    /// How old its numbers are.
    pub stats_age_ms: Option<u64>,
    /// Free page reporting.
    pub reporting: Option<bool>,
    /// Memory cgroup.
    pub cgroup: Option<String>,
    /// Whether it can be acted upon.
    pub standing: Standing,
    /// Signs that it is short.
    pub distress: String,
    /// What was decided last, and why.
    pub verdict: String,
    /// How often slack was doubled because recycled memory came back.
    #[serde(default)]
    pub recycle_backoff: u32,
    /// What came back from it, by mechanism.
    pub returned: Returned,
    /// Share group.
    #[serde(default)]
    pub group: String,
    /// Need and the page cache that it reads again and again.
    #[serde(default)]
    pub working_set: Option<Bytes>,
    /// What it could do without.
    #[serde(default)]
    pub idle: Option<Bytes>,
    /// How far its guest's word is believed.
    #[serde(default)]
    pub trust: Trust,
    /// How far it is with its last order.
    #[serde(default)]
    pub convergence: Convergence,
    /// What was paged out of it on order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadSample>,
    /// Its huge pages that a balloon had torn and that were split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torn: Option<TornSample>,
    /// Its pages of zeros that were let go of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<ZeroSample>,
    /// Why they are not; empty where they may be, or nobody wants it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub zeros_stay: String,
    /// Its part in merging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeSample>,
}

/// A decision, as `/v1/decisions` and `explain` tell it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Decision {
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
    /// Which tick.
    pub tick: u64,
    /// What was to be done and why.
    pub action: Action,
    /// The reason in words.
    pub reason: String,
    /// The host as it was.
    pub host: String,
    /// The guest as it was.
    pub guest: String,
    /// `None`: QEMU took the order. In a dry run: `dry run`.
    pub error: Option<String>,
}

impl State {
    /// The view of a tick. `daemon` is filled by the caller.
    pub fn new(tick: &Tick, model: &Model, memory: &Memory, daemon: Daemon) -> State {
        let samples = &tick.sample.vms;
        let vms: Vec<Vm> =
            model.vms.iter().zip(samples).map(|(m, s)| Vm::new(m, s, tick, memory)).collect();
        State {
            wall_ms: tick.sample.wall_ms,
            tick: tick.number,
            daemon,
            host: Host::new(tick, model, memory, &vms),
            vms,
            problems: tick.sample.problems.clone(),
        }
    }
}

impl Host {
    fn new(tick: &Tick, model: &Model, memory: &Memory, vms: &[Vm]) -> Host {
        let (h, s) = (&model.host, &tick.sample.host);
        Host {
            state: h.state,
            state_s: model.at.since(memory.state_since) / 1000,
            why: h.why.clone(),
            bound: h.bound.clone(),
            capacity: h.capacity,
            headroom: h.headroom,
            reserve: h.reserve,
            shortage: h.shortage,
            total: s.memory.map(|m| m.total),
            free: s.memory.map(|m| m.free),
            available: s.memory.map(|m| m.available),
            swap_used: s.memory.map(|m| m.swap_total - m.swap_free),
            swap_total: s.memory.map(|m| m.swap_total),
            swap_in_rate: h.swap_in_rate,
            swap_out_rate: h.swap_out_rate,
            psi_some: s.psi.map(|p| p.some.avg10),
            psi_full: s.psi.map(|p| p.full.avg10),
            pool: s.pool.clone(),
            ksm: s.ksm,
            merge: Merge::new(tick, model),
            swaps: s.swaps.clone(),
            promised: vms.iter().filter_map(|v| v.ram).sum(),
            resident: vms.iter().filter_map(|v| v.resident).sum(),
            urgency: h.urgency,
            starting: h.promised,
            warnings: h.warnings.clone(),
            ladder: ladder(tick, memory),
        }
    }
}

fn ladder(tick: &Tick, memory: &Memory) -> Vec<Rung> {
    let one = |name| {
        let rung = tick.plan.rungs.iter().find(|r| r.name == name);
        let tally = memory.ladder.iter().find(|t| t.name == name);
        Rung {
            name,
            missing: rung.map(|r| r.missing).unwrap_or_default(),
            expected: rung.map(|r| r.expected).unwrap_or_default(),
            expected_total: tally.map(|t| t.expected).unwrap_or_default(),
            came_total: tally.map(|t| t.came).unwrap_or_default(),
            why: rung.map(|r| r.why.clone()).unwrap_or_default(),
        }
    };
    RungName::ALL.map(one).to_vec()
}

impl Vm {
    fn new(m: &VmModel, s: &VmSample, tick: &Tick, memory: &Memory) -> Vm {
        let remembered = memory.vm(m.id);
        Vm {
            name: m.name.clone(),
            pid: m.id.pid,
            tier: tier(s).into(),
            agent: s.agent.clone(),
            link: s.link.clone(),
            run: s.run.clone(),
            ram: m.ram,
            actual: m.actual,
            target: remembered.and_then(|r| r.order).map(|o| o.to),
            floor: m.floor,
            ceiling: m.ceiling,
            ballooned: m.owed,
            resident: m.resident,
            swap: m.swap,
            available: m.guest.map(|g| g.available),
            need: m.guest.map(|g| g.need),
            stats_age_ms: s.balloon.as_ref().and_then(|b| b.guest).map(|g| g.age_ms),
            reporting: s.balloon.as_ref().and_then(|b| b.reporting),
            cgroup: s.cgroup.clone(),
            standing: m.standing.clone(),
            distress: m.distress.clone(),
            verdict: verdict(tick, m.id),
            recycle_backoff: remembered.map_or(0, |r| r.recycle.backoff),
            returned: remembered.map(|r| r.returned).unwrap_or_default(),
            group: m.group.clone(),
            working_set: m.guest.map(|g| g.working_set),
            idle: m.guest.map(|g| g.idle),
            trust: m.trust.clone(),
            convergence: m.convergence,
            offload: s.offload.clone(),
            torn: s.torn.clone(),
            zeros: s.zeros.clone(),
            zeros_stay: tick.sample.host.zeros.map(|_| m.zeros_stay.clone()).unwrap_or_default(),
            merge: s.merge.clone(),
        }
    }
}

/// The highest tier that works for a VM now.
fn tier(s: &VmSample) -> &'static str {
    match (&s.agent, &s.balloon) {
        (Some(a), _) if a.link == Link::Up && a.state == AgentState::Ready => "guest",
        (Some(a), _) if a.link == Link::Up && a.state != AgentState::Aside => "agent",
        (_, Some(_)) => "stock",
        _ => "none",
    }
}

/// What the tick decided of a VM, in words.
fn verdict(tick: &Tick, id: VmId) -> String {
    if let Some(a) = tick.plan.actions.iter().find(|a| a.vm == id) {
        let failed = tick.outcomes.iter().find(|o| o.vm == id).and_then(|o| o.error.as_deref());
        let end = match (tick.applied, failed) {
            (false, _) => " (dry run: not done)".to_string(),
            (true, Some(e)) => format!(" (failed: {e})"),
            (true, None) => String::new(),
        };
        return format!("{} → {}: {}{end}", a.from, a.to, a.reason);
    }
    tick.plan.held.iter().find(|h| h.vm == id).map(|h| h.why.clone()).unwrap_or_default()
}

/// The decisions of a tick, for the log and for `explain`.
pub fn decisions(tick: &Tick, model: &Model) -> Vec<Decision> {
    tick.plan
        .actions
        .iter()
        .map(|a| {
            let vm = model.vms.iter().find(|v| v.id == a.vm);
            let error = match tick.outcomes.iter().find(|o| o.vm == a.vm) {
                Some(o) => o.error.clone(),
                None if !tick.applied => Some("dry run".into()),
                None => Some("no outcome".into()),
            };
            Decision {
                wall_ms: tick.sample.wall_ms,
                tick: tick.number,
                reason: a.reason.to_string(),
                host: format!("{}: {}", model.host.state, model.host.why),
                guest: vm.map(guest_words).unwrap_or_default(),
                action: a.clone(),
                error,
            }
        })
        .collect()
}

/// A guest as it was, for people.
pub fn guest_words(vm: &VmModel) -> String {
    let size = |b: Option<Bytes>| b.map_or("unknown".to_string(), |b| b.to_string());
    let guest = vm.guest.map_or("its numbers are not known".to_string(), |g| {
        format!(
            "needs {}, working set {}, has {} available ({} ms ago{}), keeps {} as buffer{}",
            g.need,
            g.working_set,
            g.available,
            g.age_ms,
            if g.by_module { ", by its module" } else { "" },
            g.buffer,
            match vm.trust.why.as_str() {
                "" => String::new(),
                why => format!("; believed {:.0} %: {why}", vm.trust.level * 100.0),
            }
        )
    });
    format!(
        "size {} (floor {}, ceiling {}), resident {}, in swap {}; {guest}",
        size(vm.actual),
        vm.floor,
        vm.ceiling,
        size(vm.resident),
        size(vm.swap)
    )
}

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
        ksm(s, |k| Some(k.saved().0))
    }),
    field!("ksm_profit", "", Bytes, Gauge, "What KSM saves less its own memory, signed", |s| {
        s.host.ksm.and_then(|k| k.general_profit).map(|p| p as f64)
    }),
    field!("ksm_shared", "", Plain, Gauge, "Merged pages that are kept", |s| ksm(s, |k| Some(
        k.pages_shared
    ))),
    field!("ksm_sharing", "", Plain, Gauge, "Pages that merging saves", |s| ksm(s, |k| Some(
        k.pages_sharing
    ))),
    field!("ksm_unshared", "", Plain, Gauge, "Pages looked at that have no twin", |s| ksm(
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
    field!("zeros_came", "", Bytes, Counter, "What letting go of zeros brought", |s| {
        came(s, RungName::Zeros)
    }),
    field!("merge_came", "", Bytes, Counter, "What merging brought", |s| came(s, RungName::Merge)),
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
    field!("ceiling", "", Bytes, Gauge, "Size it is owed", |v| bytes(v.ceiling)),
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
    field!("torn_split", "", Plain, Counter, "Huge pages split that a balloon had torn", |v| {
        v.torn.as_ref().map(|t| t.split as f64)
    }),
    field!("torn_freed", "", Bytes, Counter, "What that freed", |v| {
        v.torn.as_ref().and_then(|t| bytes(t.freed))
    }),
    field!("zeros_read", "", Bytes, Counter, "Looked through for zeros", |v| {
        v.zeros.as_ref().and_then(|z| bytes(z.read))
    }),
    field!("zeros_freed", "", Bytes, Counter, "Zeros that were let go of", |v| {
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
    field!("returned_zeros", "", Bytes, Counter, "Was zeros, let go of on order", |v| bytes(
        v.returned.zeros
    )),
    field!("returned_other", "", Bytes, Counter, "Came back in another way", |v| bytes(
        v.returned.other
    )),
    field!("given_back", "", Bytes, Counter, "Given back to the guest by deflating", |v| bytes(
        v.returned.given_back
    )),
];
