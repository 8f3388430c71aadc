//! What is remembered, over several ticks: starts, plugged memory, contradictions,
//! harm, speed, clocks, renames.
//!
//! Here are the VM, the host and the tick that all of these tests use; the tests are in the
//! folder, by what they are about.

mod boot;
mod host;
mod order;
mod owed;
mod raised;
mod returned;
mod stats;

use super::*;
use crate::config::Config;
use crate::model::{Progress, Standing, VmModel};
use crate::plan::{Action, Reason};
use crate::sample::{
    AgentSample, BalloonSample, GuestStats, HostSample, Link, Meminfo, OwnMemory, ProcessMemory,
    RunState, VmEvent, VmPressure, VmSample,
};
use crate::task::{OffloadSample, Tasks};

const ID: VmId = VmId { pid: 7, start: 9 };

fn vm(actual: u64, available: u64, resident: u64) -> VmSample {
    let guest = GuestStats { available: Some(Bytes::mib(available)), ..GuestStats::default() };
    let balloon = BalloonSample {
        actual: Bytes::mib(actual),
        deflate_on_oom: Some(true),
        guest: Some(guest),
        ..BalloonSample::default()
    };
    VmSample {
        id: ID,
        ram: Some(Bytes::mib(1024)),
        process: Some(ProcessMemory { anon: Bytes::mib(resident), ..ProcessMemory::default() }),
        balloon: Some(balloon),
        ..VmSample::running(ID.pid, "a")
    }
}

/// The same with statistics of this age.
fn aged(size: u64, left: u64, held: u64, age_ms: u64) -> VmSample {
    let mut its = vm(size, left, held);
    its.balloon.as_mut().unwrap().guest.as_mut().unwrap().age_ms = age_ms;
    its
}

/// One that QEMU says was reset.
fn reset(its: VmSample) -> VmSample {
    VmSample { events: vec![VmEvent::Reset], ..its }
}

fn sample(at: u64, vms: Vec<VmSample>) -> Sample {
    let gib = |n| Bytes::gib(n);
    let memory = Meminfo { total: gib(16), available: gib(8), ..Meminfo::default() };
    let host = HostSample { memory: Some(memory), ..HostSample::default() };
    Sample { at: Stamp(at), wall_ms: at, host, vms, ..Sample::default() }
}

/// The same on a host with this much available.
fn with_left(available: Bytes, mut seen: Sample) -> Sample {
    seen.host.memory.as_mut().unwrap().available = available;
    seen
}

/// Lives through a tick in which nothing is done.
fn tick(memory: &mut Memory, sample: &Sample) -> Model {
    act(memory, sample, None)
}

/// The same with one VM.
fn look(memory: &mut Memory, at: u64, its: VmSample) -> Model {
    tick(memory, &sample(at, vec![its]))
}

/// The same; then QEMU takes an order for the first VM: a size, and why.
fn act(memory: &mut Memory, sample: &Sample, order: Option<(u64, Reason)>) -> Model {
    memory.observe(sample);
    let model = Model::new(&Config::default(), sample, memory);
    let actions = order.map(|(to, reason)| action(only(&model), to, reason));
    let plan = Plan { actions: actions.into_iter().collect(), ..Plan::default() };
    memory.learn(&model, &decided(&plan), &carried_out(&plan), true);
    model
}

/// The same with one VM, and an order since the host is short.
fn take(memory: &mut Memory, at: u64, its: VmSample, to: u64) -> Model {
    act(memory, &sample(at, vec![its]), Some((to, short())))
}

/// The same since its guest is short.
fn give(memory: &mut Memory, at: u64, its: VmSample, to: u64) -> Model {
    let reason = Reason::GuestShort { signs: String::new() };
    act(memory, &sample(at, vec![its]), Some((to, reason)))
}

/// The VM is seen whole, with 1024 MiB, and ordered to this size.
fn taken(size: u64) -> Memory {
    let mut memory = Memory::default();
    take(&mut memory, 1_000, vm(1024, 600, 900), size);
    memory
}

/// Ebb has taken the VM down to this size; then it stays as it is for some seconds.
fn taken_to(size: u64, its: &dyn Fn() -> VmSample, seconds: u64) -> Memory {
    let mut memory = Memory::default();
    let ram = its().ram;
    let whole = VmSample { ram, ..vm(ram.unwrap().0 >> 20, 600, 900) };
    take(&mut memory, 1_000, whole, size);
    (2..=seconds).for_each(|s| drop(look(&mut memory, s * 1000, its())));
    memory
}

fn action(vm: &VmModel, to: u64, reason: Reason) -> Action {
    let (id, name, from) = (vm.id, vm.name.clone(), vm.actual.unwrap());
    Action { vm: id, name, from, to: Bytes::mib(to), reason }
}

/// A tick in which Ebb decides; `outcomes` says what comes of the plan, and may change that before.
fn decides(
    memory: &mut Memory,
    seen: &Sample,
    outcomes: impl FnOnce(&Memory, &Model, &mut Plan) -> Vec<Outcome>,
) -> (Model, Plan) {
    memory.observe(seen);
    let model = Model::new(&Config::default(), seen, memory);
    let mut decided = crate::policy::decide(&model, memory, &[]);
    let outcomes = outcomes(memory, &model, &mut decided.plan);
    memory.learn(&model, &decided, &outcomes, true);
    (model, decided.plan)
}

/// What Ebb would do next.
fn plan(memory: &Memory, model: &Model) -> Plan {
    crate::policy::decide(model, memory, &[]).plan
}

/// QEMU takes all orders to balloons.
fn carried_out(plan: &Plan) -> Vec<Outcome> {
    plan.actions.iter().map(|a| Outcome { vm: a.vm, ..Outcome::default() }).collect()
}

fn short() -> Reason {
    let (state, none) = (Pressure::Hard, Bytes::ZERO);
    Reason::HostShort { state, shortage: none, waits: none, idle: none, limit: None }
}

fn only(model: &Model) -> &VmModel {
    &model.vms[0]
}

/// One of which this many MiB were paged out.
fn paging(paged_out: u64, its: VmSample) -> VmSample {
    let paged_out = Bytes::mib(paged_out);
    let offload = Some(OffloadSample { paged_out, ..OffloadSample::default() });
    VmSample { tasks: Tasks { offload, ..Tasks::default() }, ..its }
}

fn offloaded(memory: &Memory) -> Bytes {
    memory.stages.iter().find(|t| t.name == StageName::Offload).unwrap().came
}

fn is_left_alone(memory: &Memory, at: u64) -> bool {
    memory.vms[0].ledger.left_ms(Stamp(at)).is_some()
}

/// A plan in which nothing is merged.
fn decided(plan: &Plan) -> Decided {
    Decided { plan: plan.clone(), merging: None }
}
