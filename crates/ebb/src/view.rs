//! What users see: one view of host and VMs. [`State`] is the JSON of `/v1/state`.
//!
//! Daemon and commands may be a version apart for a while (an upgrade replaces the
//! binary before the daemon). So every field here has a default, a field that is not
//! known is passed over, and a part that this version does not understand counts as not
//! told ([`lenient`]).

use std::collections::HashMap;

use ebb_core::config::MergeMode;
use ebb_core::model::{Convergence, Model, Pressure, Standing, Trust, VmModel};
use ebb_core::plan::{Action, Held, Outcome, Reason, RungName};
use ebb_core::policy::merge::Candidates;
use ebb_core::sample::{
    self, AgentSample, HandsOff, Ksm, Link, MergeSample, OffloadSample, PartialThpSample, Pool,
    RunState, ScanSample, SwapArea, VmId, VmSample, ZeroSample,
};
use ebb_core::state::{Memory, Returned};
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

/// Reads a part of an answer; what this version cannot read is as if it were not there.
pub fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(
    d: D,
) -> Result<T, D::Error> {
    let value = serde_json::Value::deserialize(d)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// The same with each item of a list.
pub fn lenient_list<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    d: D,
) -> Result<Vec<T>, D::Error> {
    let items = Vec::<serde_json::Value>::deserialize(d)?;
    Ok(items.into_iter().filter_map(|v| serde_json::from_value(v).ok()).collect())
}

/// Everything that is known now.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
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
#[serde(default)]
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
    /// How far the flight recorder reaches back, seconds.
    pub record_s: f64,
    /// What it holds, compressed.
    pub record: Bytes,
}

/// A source that could not be read or believed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// The VM's name, where it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The VM's process.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmId>,
    /// The file, socket or command.
    pub source: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl Problem {
    /// With the name that its VM has among those of the model.
    pub fn new(p: &sample::Problem, model: &Model) -> Problem {
        Problem {
            name: p.vm.and_then(|id| Some(vm_of(model, id)?.name.clone())),
            vm: p.vm,
            source: p.source.clone(),
            message: p.message.clone(),
        }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}: ")?;
        }
        write!(f, "{}: {}", self.source, self.message)
    }
}

/// The VM of the model; the sample's order is by id.
fn vm_of(model: &Model, id: VmId) -> Option<&VmModel> {
    model.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &model.vms[i])
}

/// The host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Its state.
    #[serde(deserialize_with = "lenient")]
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
    #[serde(deserialize_with = "lenient")]
    pub pool: Option<Pool>,
    /// KSM.
    #[serde(deserialize_with = "lenient")]
    pub ksm: Option<Ksm>,
    /// What is done about merging; absent where it is off.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// Swap areas.
    #[serde(deserialize_with = "lenient_list")]
    pub swaps: Vec<SwapArea>,
    /// Sum of what the VMs have been promised.
    pub promised: Bytes,
    /// Sum of what they hold.
    pub resident: Bytes,
    /// How much tasks suffer, 0 to 1.
    pub urgency: f64,
    /// What VMs that have just started may still take.
    pub starting: Bytes,
    /// What in the configuration cannot work out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The ladder: what each mechanism is to bring, and has brought so far.
    #[serde(deserialize_with = "lenient_list")]
    pub ladder: Vec<Rung>,
}

/// Merging.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Merge {
    /// How far it goes.
    #[serde(deserialize_with = "lenient")]
    pub mode: MergeMode,
    /// What is done now, and why.
    pub why: String,
    /// The scanner.
    #[serde(deserialize_with = "lenient")]
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
    #[serde(default)]
    pub missing: Bytes,
    /// What the last plan's orders are expected to bring.
    #[serde(default)]
    pub expected: Bytes,
    /// What all plans so far were expected to bring.
    #[serde(default)]
    pub expected_total: Bytes,
    /// What was seen to come, a lower bound.
    #[serde(default)]
    pub came_total: Bytes,
    /// How, or why not.
    #[serde(default)]
    pub why: String,
}

/// One VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Vm {
    /// Name.
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// What Ebb can do for it: `none`, `stock`, `agent` or `guest`.
    pub tier: String,
    /// The agent inside the VMM.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentSample>,
    /// QMP.
    #[serde(deserialize_with = "lenient")]
    pub link: Link,
    /// QEMU's run state.
    #[serde(deserialize_with = "lenient")]
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
    /// The guest's driver may free balloon pages before its OOM killer runs.
    pub deflate_on_oom: Option<bool>,
    /// Memory cgroup.
    pub cgroup: Option<String>,
    /// Whether it can be acted upon.
    #[serde(deserialize_with = "lenient")]
    pub standing: Standing,
    /// It is left alone at the operator's word.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub hands_off: Option<HandsOff>,
    /// Signs that it is short.
    pub distress: String,
    /// What was decided last, and why.
    pub verdict: String,
    /// How often slack was doubled because recycled memory came back.
    pub recycle_backoff: u32,
    /// What came back from it, by mechanism.
    #[serde(deserialize_with = "lenient")]
    pub returned: Returned,
    /// Share group.
    pub group: String,
    /// Need and the page cache that it reads again and again.
    pub working_set: Option<Bytes>,
    /// What it could do without.
    pub idle: Option<Bytes>,
    /// How far its guest's word is believed.
    #[serde(deserialize_with = "lenient")]
    pub trust: Trust,
    /// How far it is with its last order.
    #[serde(deserialize_with = "lenient")]
    pub convergence: Convergence,
    /// What was paged out of it on order.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadSample>,
    /// Its huge pages that a balloon left partially mapped and that were split.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub partial_thp: Option<PartialThpSample>,
    /// Its zero pages that were freed.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub zeros: Option<ZeroSample>,
    /// Why they are not; empty where they may be, or nobody wants it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub zeros_stay: String,
    /// Its part in merging.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeSample>,
}

/// A decision, as `/v1/decisions` and `explain` tell it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Decision {
    /// When, milliseconds since 1970.
    pub wall_ms: u64,
    /// Which tick.
    pub tick: u64,
    /// What was to be done and why.
    pub action: Order,
    /// The reason in words.
    pub reason: String,
    /// The host as it was.
    pub host: String,
    /// The guest as it was.
    pub guest: String,
    /// `None`: QEMU took the order. In a dry run: `dry run`.
    pub error: Option<String>,
}

/// An [`Action`], as clients read it: its rule may be one that they do not know yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Order {
    /// The VM's process.
    #[serde(deserialize_with = "lenient")]
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// The guest's size when this was decided.
    pub from: Bytes,
    /// The size it is to have: RAM less balloon.
    pub to: Bytes,
    /// Why.
    #[serde(deserialize_with = "lenient")]
    pub reason: Option<Reason>,
}

impl From<&Action> for Order {
    fn from(a: &Action) -> Order {
        Order {
            vm: a.vm,
            name: a.name.clone(),
            from: a.from,
            to: a.to,
            reason: Some(a.reason.clone()),
        }
    }
}

impl State {
    /// The view of a tick. `daemon` is filled by the caller.
    pub fn new(tick: &Tick, model: &Model, memory: &Memory, daemon: Daemon) -> State {
        let (samples, done) = (&tick.sample.vms, Done::of(tick));
        let both = model.vms.iter().zip(samples);
        let vms: Vec<Vm> = both.map(|(m, s)| Vm::new(m, s, (tick, &done), memory)).collect();
        State {
            wall_ms: tick.sample.wall_ms,
            tick: tick.number,
            daemon,
            host: Host::new(tick, model, memory, &vms),
            vms,
            problems: tick.sample.problems.iter().map(|p| Problem::new(p, model)).collect(),
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
    fn new(m: &VmModel, s: &VmSample, (tick, done): (&Tick, &Done<'_>), memory: &Memory) -> Vm {
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
            deflate_on_oom: s.balloon.as_ref().and_then(|b| b.deflate_on_oom),
            cgroup: s.cgroup.clone(),
            standing: m.standing.clone(),
            hands_off: m.hands_off,
            distress: m.distress.clone(),
            verdict: done.verdict(m.id),
            recycle_backoff: remembered.map_or(0, |r| r.recycle.backoff),
            returned: remembered.map(|r| r.returned).unwrap_or_default(),
            group: m.group.clone(),
            working_set: m.guest.map(|g| g.working_set),
            idle: m.guest.map(|g| g.idle),
            trust: m.trust.clone(),
            convergence: m.convergence,
            offload: s.offload.clone(),
            partial_thp: s.partial_thp.clone(),
            zeros: s.zeros.clone(),
            zeros_stay: tick.sample.host.zeros.map(|_| m.zeros_stay.clone()).unwrap_or_default(),
            merge: s.merge.clone(),
        }
    }
}

/// The highest tier that works for a VM now.
fn tier(s: &VmSample) -> &'static str {
    match (&s.agent, &s.balloon) {
        (Some(a), Some(_)) if a.observes => "stock",
        (Some(a), _) if a.link == Link::Up && a.state == AgentState::Ready => "guest",
        (Some(a), _) if a.link == Link::Up && a.state != AgentState::Aside => "agent",
        (_, Some(_)) => "stock",
        _ => "none",
    }
}

/// What a tick did, by VM.
struct Done<'a> {
    applied: bool,
    actions: HashMap<VmId, &'a Action>,
    outcomes: HashMap<VmId, &'a Outcome>,
    held: HashMap<VmId, &'a Held>,
}

impl Done<'_> {
    fn of(tick: &Tick) -> Done<'_> {
        Done {
            applied: tick.applied,
            actions: tick.plan.actions.iter().map(|a| (a.vm, a)).collect(),
            outcomes: tick.outcomes.iter().map(|o| (o.vm, o)).collect(),
            held: tick.plan.held.iter().map(|h| (h.vm, h)).collect(),
        }
    }

    /// What was decided of a VM, in words.
    fn verdict(&self, id: VmId) -> String {
        let Some(a) = self.actions.get(&id) else {
            return self.held.get(&id).map(|h| h.why.clone()).unwrap_or_default();
        };
        let failed = self.outcomes.get(&id).and_then(|o| o.error.as_deref());
        let end = match (self.applied, failed) {
            (false, _) => " (dry run: not done)".to_string(),
            (true, Some(e)) => format!(" (failed: {e})"),
            (true, None) => String::new(),
        };
        format!("{} → {}: {}{end}", a.from, a.to, a.reason)
    }
}

/// The decisions of a tick, for the log and for `explain`.
pub fn decisions(tick: &Tick, model: &Model) -> Vec<Decision> {
    if tick.plan.actions.is_empty() {
        return Vec::new();
    }
    let done = Done::of(tick);
    let host = format!("{}: {}", model.host.state, model.host.why);
    let decision = |a: &Action| Decision {
        wall_ms: tick.sample.wall_ms,
        tick: tick.number,
        reason: a.reason.to_string(),
        host: host.clone(),
        guest: vm_of(model, a.vm).map(guest_words).unwrap_or_default(),
        action: a.into(),
        error: match done.outcomes.get(&a.vm) {
            Some(o) => o.error.clone(),
            None if !tick.applied => Some("dry run".into()),
            None => Some("no outcome".into()),
        },
    };
    tick.plan.actions.iter().map(decision).collect()
}

/// VMs that the operator asked for their memory by name and that were not asked, and why.
pub fn unheeded(tick: &Tick, model: &Model) -> Vec<(VmId, String)> {
    let plan = &tick.plan;
    let done = Done::of(tick);
    let heeded = |id: VmId| {
        plan.recycle.iter().any(|o| o.vm == id && o.recycle.is_some())
            || plan.zeros.iter().any(|o| o.vm == id)
            || plan.actions.iter().any(|a| a.vm == id && !a.gives())
    };
    let named = |name: &str| tick.requests.iter().any(|r| r.vm.as_deref() == Some(name));
    let vms = model.vms.iter().filter(|vm| named(&vm.name) && !heeded(vm.id));
    vms.map(|vm| (vm.id, done.verdict(vm.id))).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::plan::Reclaim;
    use ebb_core::tick::{Engine, Host as _};
    use ebb_sim::World;
    use ebb_sim::scenario::crowd;
    use serde_json::{Value, json};

    #[test]
    fn a_request_that_is_not_heeded_has_its_reason() {
        let setup = crowd(2, Bytes::gib(2), Bytes::gib(3), 1, 0);
        let (mut world, mut engine) = (World::new(&setup), Engine::new(setup.config(), false));
        let (mut tick, model) = engine.step(&mut world);
        let [a, b] = [0, 1].map(|i| (model.vms[i].id, model.vms[i].name.clone()));
        let action = |to| Action {
            vm: a.0,
            name: a.1.clone(),
            from: Bytes::mib(500),
            to: Bytes::mib(to),
            reason: ebb_core::plan::Reason::GuestShort { signs: "it is short".into() },
        };
        tick.plan = Default::default();
        tick.plan.actions = vec![action(600)];
        assert_eq!(unheeded(&tick, &model), [], "nobody asked");
        let ask = |vm: &str| Reclaim { vm: Some(vm.into()), bytes: None };
        tick.requests = vec![ask(&a.1)];
        let [(vm, why)] = &unheeded(&tick, &model)[..] else { panic!() };
        assert!(*vm == a.0 && why.contains("it is short"), "{why}");
        tick.plan.actions = vec![action(400)];
        assert_eq!(unheeded(&tick, &model), []);
        tick.requests = vec![ask(&b.1), Reclaim { vm: None, bytes: None }];
        let why = "its guest has ended".to_owned();
        let held = Held { vm: b.0, name: b.1.clone(), why: why.clone() };
        tick.plan.held = vec![held];
        assert_eq!(unheeded(&tick, &model), [(b.0, why)]);
    }

    /// A state and decisions with something of everything.
    fn told() -> (State, Vec<Decision>) {
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
            state.host.pool = Some(Pool::default());
            state.host.ksm = Some(Ksm::default());
            state.host.merge = Some(Merge::default());
            state.host.warnings.push("w".into());
            for vm in &mut state.vms {
                vm.agent = Some(AgentSample::default());
                vm.offload = Some(OffloadSample::default());
                vm.partial_thp = Some(PartialThpSample::default());
                vm.zeros = Some(ZeroSample::default());
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
            "trust": {"level": "much"}}], "host": {"state": "glad", "ladder": [{"name": "x"}]}}"#;
        let state: State = serde_json::from_str(text).unwrap();
        let vm = &state.vms[0];
        assert_eq!((vm.ram, &vm.link, vm.trust.level), (Some(Bytes(7)), &Link::Unknown, 1.0));
        assert!(state.host.ladder.is_empty());
    }

    #[test]
    fn problems_name_their_vm() {
        let (state, _) = told();
        let name = state.vms[0].name.clone();
        assert_eq!(state.problems.last().unwrap().name.as_ref(), Some(&name));
        assert!(
            state.problems.last().unwrap().to_string().starts_with(&format!("{name}: /proc/1"))
        );
    }

    #[test]
    fn what_is_said_of_a_vm_is_what_was_decided_of_it() {
        let (state, decisions) = told();
        for d in &decisions {
            let vm = state.vms.iter().find(|v| v.name == d.action.name).unwrap();
            assert_eq!(vm.verdict, format!("{} → {}: {}", d.action.from, d.action.to, d.reason));
        }
        assert!(state.vms.iter().any(|v| decisions.iter().all(|d| d.action.name != v.name)));
    }
}
