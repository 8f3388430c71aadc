//! What users see: one view of host and VMs. [`State`] is the JSON of `/v1/state`.
//!
//! Daemon and commands may be a version apart for a while (an upgrade replaces the
//! binary before the daemon). So every field here has a default, a field that is not
//! known is passed over, and a part that this version does not understand counts as not
//! told ([`lenient`]).
//!
//! This file has the fields; how a tick fills them is in `of_tick`, what is said of
//! decisions in `decisions`.

mod decisions;
mod of_tick;

use ebb_core::config::MergeMode;
use ebb_core::model::{Convergence, Limit, Pressure, Standing, Trust};
use ebb_core::plan::RungName;
use ebb_core::sample::{
    AgentSample, HandsOff, Ksm, Link, MergeSample, OffloadSample, PartialThpSample, Pool, RunState,
    ScanSample, SharedSocket, SwapArea, VmId, ZeroSample,
};
use ebb_core::state::Returned;
use ebb_core::units::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

pub use self::decisions::{Decision, Order, decisions, guest_words, unheeded};

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

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}: ")?;
        }
        write!(f, "{}: {}", self.source, self.message)
    }
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
    /// The tightest limit on memory: `host`, a cgroup or NUMA nodes.
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
    /// All limits that may be reached; the machine's first.
    #[serde(deserialize_with = "lenient_list")]
    pub limits: Vec<Limit>,
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
    /// Its QMP socket, where it is shared with other programs.
    #[serde(deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedSocket>,
    /// Memory cgroup.
    pub cgroup: Option<String>,
    /// Of the limits above it the one in the worst state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
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
    /// Which of its settings come from its domain's metadata, in words; empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub by_metadata: String,
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

#[cfg(test)]
mod tests {
    use ebb_core::sample;
    use ebb_core::tick::{Engine, Host as _};
    use ebb_sim::World;
    use ebb_sim::scenario::crowd;
    use serde_json::{Value, json};

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
            state.host.pool = Some(Pool::default());
            state.vms[0].bound = Some("/a".into());
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
}
