//! What users see: one view of host and VMs. [`State`] is the JSON of `/v1/state`.
//!
//! Daemon and commands may be a version apart for a while (an upgrade replaces the
//! binary before the daemon). So every field here has a default, a field that is not
//! known is passed over, and a part that this version does not understand counts as not
//! told ([`lenient`]).
//!
//! This file has the fields of host and VM, each with how a tick fills it; what is said of
//! decisions is in `decisions`.

mod decisions;

use ebb_core::config::MergeMode;
use ebb_core::model::{
    Convergence, HostModel, Limit, MergeHost, Model, Pressure, Standing, Trust, VmModel,
};
use ebb_core::plan::{self, MergePlan, Plan};
use ebb_core::policy::merge::Candidates;
use ebb_core::sample::{
    self, AgentSample, HandsOff, HostSample, Ksm, LimitSample, Link, MergeSample, RunState,
    ScanSample, SharedSocket, SwapArea, VmId, VmSample,
};
use ebb_core::state::{Memory, Returned, Tally, VmMemory};
use ebb_core::task::{StageName, Tasks};
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use self::decisions::DecidedByVm;
pub use self::decisions::{
    ActionView, DRY_RUN, Decision, decisions, forbidden, guest_words, unheeded,
};

/// Reads a part of an answer; what this version cannot read is as if it were not there.
pub fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    d: D,
) -> Result<T, D::Error> {
    let value = Value::deserialize(d)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// Reads a list of an answer without the items that this version cannot read.
pub fn lenient_list<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    d: D,
) -> Result<Vec<T>, D::Error> {
    let items = Vec::<Value>::deserialize(d)?;
    Ok(items.into_iter().filter_map(|v| serde_json::from_value(v).ok()).collect())
}

/// Reads a struct of an answer without the parts, and the items of its lists, that this version
/// cannot read.
pub fn lenient_parts<'de, D: Deserializer<'de>, T: DeserializeOwned>(d: D) -> Result<T, D::Error> {
    let mut parts: Map<String, Value> = Map::deserialize(d)?;
    let is_known = |key: &str, value: &Value| T::deserialize(&json!({ key: value })).is_ok();
    parts.retain(|key, value| {
        if let Some(items) = value.as_array_mut() {
            items.retain(|item| is_known(key, &json!([item])));
        }
        is_known(key, value)
    });
    T::deserialize(Value::Object(parts)).map_err(D::Error::custom)
}

/// A struct whose fields have beside them how they are filled.
macro_rules! view {
    ($(#[$attribute:meta])* $name:ident($($from:ident: $of:ty),*): $(
        $(#[$meta:meta])* $field:ident: $type:ty = $value:expr;
    )*) => {
        $(#[$attribute])*
        pub struct $name {
            $($(#[$meta])* pub $field: $type,)*
        }

        impl $name {
            pub fn new($($from: $of),*) -> $name {
                $name { $($field: $value,)* }
            }
        }
    };
}
pub(crate) use view;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
    /// Ticks since the daemon's start.
    pub tick: u64,
    pub daemon: Daemon,
    pub host: Host,
    pub vms: Vec<Vm>,
    pub problems: Vec<Problem>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Daemon {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    /// It only says what it would do.
    pub dry_run: bool,
    /// CPU used since its start, seconds.
    pub cpu_s: f64,
    pub resident: Bytes,
    /// How long the last tick took, from reading to the last outcome.
    pub tick_ms: f64,
    /// Balloon orders, those that failed too.
    pub orders: u64,
    /// Those with an error: refused, not answered, or not sent.
    pub orders_failed: u64,
    pub socket: String,
    /// How far the flight recorder reaches back, seconds.
    pub record_s: f64,
    /// What it holds, compressed.
    pub record: Bytes,
}

view! {
/// A source that could not be read or believed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
Problem(p: &sample::Problem, model: &Model):
    /// The VM's name, where it is about one.
    name: Option<String> = p.vm.and_then(|id| Some(model.vm(id)?.name.clone()));
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    vm: Option<VmId> = p.vm;
    /// The file, socket or command.
    source: String = p.source.clone();
    message: String = p.message.clone();
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}: ")?;
        }
        write!(f, "{}: {}", self.source, self.message)
    }
}

view! {
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
Host(
    h: &HostModel, s: &HostSample, tick: &Tick, model: &Model, memory: &Memory, vms: &[Vm]
):
    #[serde(deserialize_with = "lenient")]
    state: Pressure = h.shown.state;
    state_s: u64 = model.at.since(memory.state_since) / 1000;
    /// What made it, in words.
    why: String = h.shown.why.clone();
    /// The tightest limit on memory: `host`, a cgroup or NUMA nodes.
    bound: String = h.shown.name.clone();
    /// Under that bound.
    capacity: Bytes = h.shown.capacity;
    /// What can still be had without harm.
    headroom: Bytes = h.shown.headroom;
    /// What the host wants to keep.
    reserve: Bytes = h.shown.reserve;
    /// How far headroom is below it, or below up to one and a half of it by urgency.
    shortage: Bytes = h.shown.shortage;
    /// `MemTotal`.
    total: Option<Bytes> = s.memory.map(|m| m.total);
    /// `MemFree`.
    free: Option<Bytes> = s.memory.map(|m| m.free);
    /// `MemAvailable`.
    available: Option<Bytes> = s.memory.map(|m| m.available);
    swap_used: Option<Bytes> = s.memory.map(|m| m.swap_total - m.swap_free);
    swap_total: Option<Bytes> = s.memory.map(|m| m.swap_total);
    swap_in_rate: f64 = h.swap_in_rate;
    swap_out_rate: f64 = h.swap_out_rate;
    /// PSI `some`, 10 s average, percent.
    psi_some: Option<f64> = s.psi.map(|p| p.some.avg10);
    /// PSI `full`, 10 s average, percent.
    psi_full: Option<f64> = s.psi.map(|p| p.full.avg10);
    #[serde(deserialize_with = "lenient")]
    pool: Option<LimitSample> = s.pool.clone();
    /// All limits that may be reached; the machine's first.
    #[serde(deserialize_with = "lenient_list")]
    limits: Vec<Limit> = h.limits.clone();
    #[serde(deserialize_with = "lenient")]
    ksm: Option<Ksm> = s.ksm;
    /// What is done about merging; absent where it is off.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    merge: Option<Merge> = merge(tick, model);
    #[serde(deserialize_with = "lenient_list")]
    swaps: Vec<SwapArea> = s.swaps.clone();
    /// Sum of the VMs' RAM.
    vms_ram: Bytes = vms.iter().filter_map(|v| v.ram).sum();
    /// Sum of what they hold.
    resident: Bytes = vms.iter().filter_map(|v| v.resident).sum();
    /// How much tasks suffer, 0 to 1.
    urgency: f64 = h.shown.urgency;
    /// What VMs that have just started may still take.
    starting: Bytes = h.shown.promised;
    /// What in the configuration cannot work out.
    warnings: Vec<String> = h.warnings.clone();
    /// Stage by stage: what each mechanism is to bring, and has brought so far.
    #[serde(deserialize_with = "lenient_list")]
    stages: Vec<Stage> = StageName::ALL.map(|name| stage(name, &tick.plan, memory)).into();
}

view! {
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
Merge(host: &MergeHost, plan: Option<&MergePlan>, candidates: &Candidates):
    #[serde(deserialize_with = "lenient")]
    mode: MergeMode = host.config.mode;
    /// What is done now, and why.
    why: String = plan.map(|m| m.why.clone()).unwrap_or_default();
    #[serde(deserialize_with = "lenient")]
    scan: ScanSample = host.scan.clone();
    /// What merging would still save of the VMs that were scanned.
    found: Bytes = candidates.saves();
    /// The CPU time that `ksmd` would need for it.
    found_cpu_s: f64 = candidates.cost_s();
}

view! {
#[derive(Clone, Debug, Serialize, Deserialize)]
Stage(stage: StageName, planned: Option<&plan::Stage>, tally: Option<&Tally>):
    name: StageName = stage;
    /// What the host lacked before it.
    #[serde(default)]
    missing: Bytes = planned.map(|r| r.missing).unwrap_or_default();
    /// What the last plan's orders are expected to bring.
    #[serde(default)]
    expected: Bytes = planned.map(|r| r.expected).unwrap_or_default();
    /// What all plans so far were expected to bring.
    #[serde(default)]
    expected_total: Bytes = tally.map(|t| t.expected).unwrap_or_default();
    /// What was seen to come, a lower bound.
    #[serde(default)]
    came_total: Bytes = tally.map(|t| t.came).unwrap_or_default();
    #[serde(default)]
    why: String = planned.map(|r| r.why.clone()).unwrap_or_default();
}

view! {
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
Vm(m: &VmModel, s: &VmSample, tick: &Tick, decided: &DecidedByVm<'_>, remembered: Option<&VmMemory>):
    name: String = m.name.clone();
    pid: u32 = m.id.pid;
    /// What Ebb can do for it: `none`, `stock`, `agent` or `guest`.
    tier: String = tier(s).into();
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    agent: Option<AgentSample> = s.agent.clone();
    #[serde(deserialize_with = "lenient")]
    link: Link = s.link.clone();
    #[serde(deserialize_with = "lenient")]
    run: Option<RunState> = s.run.clone();
    ram: Option<Bytes> = m.ram;
    /// RAM less balloon.
    actual: Option<Bytes> = m.actual;
    /// The order under way, if any.
    target: Option<Bytes> = remembered.and_then(|r| r.order).map(|o| o.to);
    #[serde(skip_serializing_if = "Option::is_none")]
    floor: Option<Bytes> = m.ram.map(|_| m.floor);
    #[serde(skip_serializing_if = "Option::is_none")]
    ceiling: Option<Bytes> = m.ram.map(|_| m.ceiling);
    /// What the balloon holds of what it is owed.
    ballooned: Bytes = m.owed;
    resident: Option<Bytes> = m.resident;
    /// What of it is the VMM's own, where that was counted.
    vmm: Option<Bytes> = m.own_is_counted.then_some(m.own);
    /// In the host's swap.
    swap: Option<Bytes> = m.swap;
    /// Why none of its memory is taken with the balloon.
    pinned: Option<String> = m.pinned.clone().or(s.no_room.clone());
    /// What it holds of pools of huge pages, which is not resident by the kernel's count.
    #[serde(skip_serializing_if = "ebb_core::sample::is_default")]
    hugetlb: Bytes = s.process.map(|p| p.hugetlb).unwrap_or_default();
    /// Available in the guest, as it says.
    available: Option<Bytes> = m.guest.map(|g| g.available);
    /// What it cannot do without.
    need: Option<Bytes> = m.guest.map(|g| g.need);
    /// The memory that its guest says it manages, what of it is free, and what page cache.
    guest_total: Option<Bytes> = s.guest_stats().and_then(|g| g.total);
    guest_free: Option<Bytes> = s.guest_stats().and_then(|g| g.free);
    guest_caches: Option<Bytes> = s.guest_stats().and_then(|g| g.caches);
    stats_age_ms: Option<u64> = s.guest_stats().map(|g| g.age_ms);
    /// Its guest is Windows, by its statistics.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    windows: bool = s.guest_stats().is_some_and(|g| g.is_windows);
    reporting: Option<bool> = s.balloon.as_ref().and_then(|b| b.reporting);
    /// The guest's driver may free balloon pages before its OOM killer runs.
    deflate_on_oom: Option<bool> = s.balloon.as_ref().and_then(|b| b.deflate_on_oom);
    /// Its QMP socket, where it is shared with other programs.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    shared: Option<SharedSocket> = s.shared.clone();
    cgroup: Option<String> = s.cgroup.clone();
    /// Of several limits above it the one in the worst state.
    bound: Option<String> = None;
    /// Whether it can be acted upon.
    #[serde(deserialize_with = "lenient")]
    standing: Standing = m.standing.clone();
    /// It is left alone at the operator's request.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    hands_off: Option<HandsOff> = m.hands_off;
    distress: String = m.distress.clone();
    /// What was decided last, and why.
    verdict: String = decided.verdict(m.id);
    /// How often slack was doubled because recycled memory came back.
    recycle_backoff: u32 = remembered.map_or(0, |r| r.recycle.backoff);
    /// What came back from it, by mechanism.
    #[serde(deserialize_with = "lenient")]
    returned: Returned = remembered.map(|r| r.returned).unwrap_or_default();
    group: String = m.group.clone();
    /// Which of its settings come from its domain's metadata, in words; empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    by_metadata: String = m.by_metadata.clone();
    /// Need and the page cache that it reads again and again.
    working_set: Option<Bytes> = m.guest.map(|g| g.working_set);
    /// What it could do without.
    idle: Option<Bytes> = m.guest.map(|g| g.idle);
    /// How far its guest's numbers are believed.
    #[serde(deserialize_with = "lenient")]
    trust: Trust = m.trust.clone();
    /// How far it is with its last order.
    #[serde(deserialize_with = "lenient")]
    convergence: Convergence = m.convergence;
    /// What was done to it beside the loop.
    #[serde(flatten, deserialize_with = "lenient_parts")]
    tasks: Tasks = s.tasks.clone();
    /// Why its zero pages are not freed; empty where they may be, or that is not wanted.
    #[serde(skip_serializing_if = "String::is_empty")]
    zeros_stay: String = tick.sample.host.zeros.map(|_| m.zeros_stay.clone()).unwrap_or_default();
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    merge: Option<MergeSample> = s.merge.clone();
}

impl State {
    /// The view of a tick. `daemon` is filled by the caller.
    pub fn new(tick: &Tick, model: &Model, memory: &Memory, daemon: Daemon) -> State {
        let (samples, decided) = (&tick.sample.vms, DecidedByVm::of(tick));
        let several = model.host.limits.len() > 1;
        let vm = |(m, s): (&VmModel, &VmSample)| Vm {
            bound: model.limit_of(m).filter(|_| several).map(|l| l.name.clone()),
            ..Vm::new(m, s, tick, &decided, memory.vm(m.id))
        };
        let vms: Vec<Vm> = model.vms.iter().zip(samples).map(vm).collect();
        State {
            wall_ms: tick.sample.wall_ms,
            tick: tick.number,
            daemon,
            host: Host::new(&model.host, &tick.sample.host, tick, model, memory, &vms),
            vms,
            problems: tick.sample.problems.iter().map(|p| Problem::new(p, model)).collect(),
        }
    }
}

fn merge(tick: &Tick, model: &Model) -> Option<Merge> {
    let host = model.host.merge.as_ref()?;
    let found = model.vms.iter().filter_map(|v| v.merge.as_ref()?.sample.found.as_ref());
    Some(Merge::new(host, tick.plan.merge.as_ref(), &found.sum()))
}

fn stage(name: StageName, plan: &Plan, memory: &Memory) -> Stage {
    let planned = plan.stages.iter().find(|r| r.name == name);
    Stage::new(name, planned, memory.stages.iter().find(|t| t.name == name))
}

/// The highest tier that works for a VM now.
fn tier(s: &VmSample) -> &'static str {
    match (&s.agent, &s.balloon) {
        (Some(a), None) if a.observes => "none",
        (Some(a), Some(_)) if a.observes => "stock",
        (Some(a), _) if a.link == Link::Up && a.state == AgentState::Ready => "guest",
        (Some(a), _) if a.link == Link::Up && a.state != AgentState::Aside => "agent",
        (_, Some(_)) => "stock",
        _ => "none",
    }
}

#[cfg(test)]
mod tests {
    use ebb_core::sample;
    use ebb_core::task::{OffloadSample, PartialThpSample, ZeroSample};
    use ebb_core::tick::{Engine, Host as _};
    use ebb_sim::World;
    use ebb_sim::scenario::crowd;

    use super::*;

    /// A state and decisions with something of everything.
    pub(super) fn told() -> (State, Vec<Decision>) {
        let setup = crowd(4, Bytes::gib(2), Bytes::gib(3), 1, 0);
        let (mut world, mut engine) = (World::new(&setup), Engine::new(setup.config(), false));
        loop {
            let (mut tick, model) = engine.step(&mut world);
            world.wait(&engine.next(&model));
            let told = decisions(&tick, &model);
            if told.is_empty() {
                continue;
            }
            let vm = tick.sample.vms[0].id;
            let (source, message) = ("/proc/1/status".into(), "no".into());
            tick.sample.problems.push(sample::Problem { vm: Some(vm), source, message });
            let mut state = State::new(&tick, &model, &engine.memory, Daemon::default());
            state.host.pool = Some(LimitSample::default());
            state.vms[0].bound = Some("/a".into());
            state.host.ksm = Some(Ksm::default());
            state.host.merge = Some(Merge::default());
            state.host.warnings.push("w".into());
            for vm in &mut state.vms {
                vm.agent = Some(AgentSample::default());
                vm.tasks.offload = Some(OffloadSample::default());
                vm.tasks.partial_thp = Some(PartialThpSample::default());
                vm.tasks.zeros = Some(ZeroSample::default());
                vm.merge =
                    Some(MergeSample { found: Some(Default::default()), ..Default::default() });
            }
            return (state, told);
        }
    }

    /// The value with one change: every key left out once, one that nobody knows added to
    /// every object, every string replaced once.
    fn changed(value: &Value, each: &mut dyn FnMut(Value)) {
        match value {
            Value::Object(fields) => {
                let mut more = fields.clone();
                more.insert("something_new".into(), json!({ "a": [1] }));
                each(Value::Object(more));
                for (key, inner) in fields {
                    let mut less = fields.clone();
                    less.remove(key);
                    each(Value::Object(less));
                    changed(inner, &mut |inner| {
                        let mut fields = fields.clone();
                        fields.insert(key.clone(), inner);
                        each(Value::Object(fields));
                    });
                }
            }
            Value::Array(items) => {
                for (i, inner) in items.iter().enumerate().take(1) {
                    changed(inner, &mut |inner| {
                        let mut items = items.clone();
                        items[i] = inner;
                        each(Value::Array(items));
                    });
                }
            }
            Value::String(_) => each(json!("something_new")),
            _ => {}
        }
    }

    #[test]
    fn a_client_reads_a_daemon_that_tells_less_more_or_in_other_words() {
        let (state, decisions) = told();
        let mut count = 0;
        changed(&serde_json::to_value(&state).unwrap(), &mut |value| {
            count += 1;
            let read: State =
                serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{e}: {value:#}"));
            assert!(value["vms"].is_null() || read.vms.len() == state.vms.len());
        });
        changed(&serde_json::to_value(&decisions).unwrap(), &mut |value| {
            count += 1;
            let read: Vec<Decision> = serde_json::from_value(value).unwrap();
            assert_eq!(read.len(), decisions.len());
        });
        assert!(count > 200, "{count} changes");
    }

    #[test]
    fn a_part_that_is_not_understood_is_as_if_it_were_not_told() {
        let text = r#"{"vms": [{"name": "a", "link": {"state": "resting"}, "ram": 7,
            "trust": {"level": "much"}, "offload": {"paged_out": "much"},
            "zeros": {"read": 9, "chosen": 8, "freed": 7, "rounds": 1, "busy": false}}], "host": {"state": "glad", "stages": [{"name": "x"}]}}"#;
        let state: State = serde_json::from_str(text).unwrap();
        let vm = &state.vms[0];
        assert_eq!((vm.ram, &vm.link, vm.trust.level), (Some(Bytes(7)), &Link::Unknown, 1.0));
        assert_eq!(vm.tasks.offload, None);
        assert_eq!(vm.tasks.zeros.as_ref().unwrap().freed, Bytes(7));
        assert!(state.host.stages.is_empty());
    }

    #[test]
    fn problems_name_their_vm() {
        let (state, _) = told();
        let (name, problem) = (&state.vms[0].name, state.problems.last().unwrap());
        assert_eq!(problem.name.as_ref(), Some(name));
        assert!(problem.to_string().starts_with(&format!("{name}: /proc/1")));
    }
}
