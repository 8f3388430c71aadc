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
    RunState, VmPressure, VmSample,
};
use crate::task::{OffloadSample, Tasks};

const ID: VmId = VmId { pid: 7, start: 9 };

fn vm(actual: u64, available: u64, resident: u64) -> VmSample {
    let guest = GuestStats { available: Some(Bytes::mib(available)), ..GuestStats::default() };
    VmSample {
        id: ID,
        name: "a".into(),
        ram: Some(Bytes::mib(1024)),
        process: Some(ProcessMemory { anon: Bytes::mib(resident), ..ProcessMemory::default() }),
        link: Link::Up,
        run: Some(RunState::Running),
        balloon: Some(BalloonSample {
            actual: Bytes::mib(actual),
            deflate_on_oom: Some(true),
            guest: Some(guest),
            ..BalloonSample::default()
        }),
        ..VmSample::default()
    }
}

fn sample(at: u64, vms: Vec<VmSample>) -> Sample {
    let gib = |n| Bytes::gib(n);
    let memory = Meminfo { total: gib(16), available: gib(8), ..Meminfo::default() };
    let host = HostSample { memory: Some(memory), ..HostSample::default() };
    Sample { at: Stamp(at), wall_ms: at, host, vms, ..Sample::default() }
}

/// Lives through a tick in which nothing is done.
fn tick(memory: &mut Memory, sample: &Sample) -> Model {
    act(memory, sample, None)
}

/// The same with an order.
fn act(memory: &mut Memory, sample: &Sample, order: Option<(u64, u64, Reason)>) -> Model {
    memory.observe(sample);
    let model = Model::new(&Config::default(), sample, memory);
    let action = order.map(|(from, to, reason)| Action {
        vm: ID,
        name: "a".into(),
        from: Bytes::mib(from),
        to: Bytes::mib(to),
        reason,
    });
    let plan = Plan { actions: action.into_iter().collect(), ..Plan::default() };
    memory.learn(&model, &decided(&plan), &carried_out(&plan), true);
    model
}

/// QEMU takes all orders to balloons.
fn carried_out(plan: &Plan) -> Vec<Outcome> {
    plan.actions.iter().map(|a| Outcome { vm: a.vm, ..Outcome::default() }).collect()
}

fn short(state: Pressure) -> Reason {
    let none = Bytes::ZERO;
    Reason::HostShort { state, shortage: none, waits: none, idle: none, limit: None }
}

fn only(model: &Model) -> &VmModel {
    &model.vms[0]
}

/// A plan in which nothing is merged.
fn decided(plan: &Plan) -> crate::policy::Decided {
    crate::policy::Decided { plan: plan.clone(), merging: None }
}
