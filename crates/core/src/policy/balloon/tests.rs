//! Ballooning, both ways, on small hosts.
//!
//! Here are the hosts and guests that all of these tests are made of; the tests are in the
//! folder, by what they are about.

mod give;
mod own_case;
mod requests;
mod take;

use super::*;
use crate::model::{GuestModel, HostModel, Limit};
use crate::plan::Action;
use crate::sample::VmId;
use crate::state::{BalloonOrder, GuestRates, Recent, Yields};
use crate::units::Stamp;

const NOW: Stamp = Stamp(1_000_000);

/// A host that keeps 2 GiB, lacks so much of it or has so much beyond it.
fn host(state: Pressure, shortage: u64, surplus: u64) -> HostModel {
    let shown = Limit {
        name: "host".into(),
        state,
        stalled: state,
        shortage: Bytes::mib(shortage),
        reserve: Bytes::gib(2),
        headroom: Bytes::gib(2) + Bytes::mib(surplus) - Bytes::mib(shortage),
        ..Limit::default()
    };
    HostModel { shown, known: true, ..HostModel::default() }
}

/// The same under one limit with 1 GiB of swap.
fn limited(host: HostModel, headroom: u64, reserve: u64) -> HostModel {
    let (headroom, reserve) = (Bytes::mib(headroom), Bytes::mib(reserve));
    let shown = Limit { headroom, reserve, swap_left: Bytes::gib(1), ..host.shown };
    HostModel { limits: vec![shown.clone()], shown, ..host }
}

/// The same with this much swap left.
fn with_swap(mut host: HostModel, mib: u64) -> HostModel {
    host.shown.swap_left = Bytes::mib(mib);
    host
}

/// A critical host without swap.
fn dry(headroom: u64, reserve: u64) -> HostModel {
    with_swap(limited(host(Pressure::Critical, 0, 0), headroom, reserve), 0)
}

/// A ready 1 GiB guest, all of it resident, floor 256 MiB.
fn vm(pid: u32, actual: u64, available: u64) -> VmModel {
    let g = GuestModel {
        available: Bytes::mib(available),
        need: Bytes::mib(actual - available),
        working_set: Bytes::mib(actual - available),
        idle: Bytes::mib(available),
        buffer: Bytes::mib(80),
        short_mark: Bytes::mib(40),
        deflate_on_oom: true,
        ..GuestModel::default()
    };
    VmModel {
        id: VmId { pid, start: 1 },
        name: format!("vm{pid}"),
        ram: Some(Bytes::gib(1)),
        actual: Some(Bytes::mib(actual)),
        floor: Bytes::mib(256),
        ceiling: Bytes::gib(1),
        whole: Bytes::gib(1),
        owed: Bytes::gib(1) - Bytes::mib(actual),
        managed: true,
        weight: 1.0,
        resident: Some(Bytes::mib(actual)),
        guest: Some(g),
        standing: Standing::Ready,
        ..VmModel::default()
    }
}

/// The same in distress.
fn short(pid: u32, actual: u64, available: u64) -> VmModel {
    VmModel { distress: "short".into(), ..vm(pid, actual, available) }
}

/// The same with other words of its guest.
fn says(mut vm: VmModel, change: impl FnOnce(&mut GuestModel)) -> VmModel {
    change(vm.guest.as_mut().unwrap());
    vm
}

/// The same with a need that grows by this rate, MiB a second.
fn grows(vm: VmModel, mib: u64) -> VmModel {
    let rates = GuestRates { need: (mib << 20) as f64, ..GuestRates::default() };
    says(vm, |g| g.rates = Some(rates))
}

fn model(host: HostModel, vms: Vec<VmModel>) -> Model {
    Model { at: NOW, dt_ms: 1000, host, vms }
}

fn memory(vms: Vec<VmMemory>) -> Memory {
    Memory { vms, ..Memory::default() }
}

fn decide(host: HostModel, vms: Vec<VmModel>, remembered: Vec<VmMemory>) -> Vec<Verdict> {
    balloon(&model(host, vms), &memory(remembered), &[], &[]).verdicts
}

/// The size of a VM alone.
fn sized(host: HostModel, vm: VmModel, m: VmMemory) -> Option<u64> {
    size(&decide(host, vec![vm], vec![m])[0])
}

/// The same when an operator asks for all idle memory.
fn reclaimed(host: HostModel, vm: VmModel, m: VmMemory) -> Option<u64> {
    let model = model(host, vec![vm]);
    size(&balloon(&model, &memory(vec![m]), &[Reclaim::default()], &[]).verdicts[0])
}

/// The orders of all policies together.
fn actions(host: HostModel, vm: VmModel, m: VmMemory) -> Vec<Action> {
    crate::policy::decide(&model(host, vec![vm]), &memory(vec![m]), &[]).plan.actions
}

fn ago(ms: u64) -> Option<Stamp> {
    Some(Stamp(NOW.0 - ms))
}

/// An order that is `ago_ms` old; the balloon has not moved for `still_ms`.
fn ordered((from, to): (u64, u64), still_ms: u64, ago_ms: u64) -> Option<BalloonOrder> {
    let (to, moved_from, since) = (Bytes::mib(to), Bytes::mib(from), Stamp(NOW.0 - ago_ms));
    Some(BalloonOrder { to, moved_from, still_ms, since, cuts_short: false })
}

fn remembered(pid: u32) -> VmMemory {
    VmMemory { id: VmId { pid, start: 1 }, ..VmMemory::default() }
}

fn size(v: &Verdict) -> Option<u64> {
    match v {
        Verdict::Set { to, .. } => Some(to.0 >> 20),
        Verdict::Hold(_) => None,
    }
}

/// It needed so much so long ago.
fn needed(mib: u64, ms: u64) -> Recent {
    let mut recent = Recent::default();
    recent.see(Stamp(NOW.0 - ms), Bytes::mib(mib));
    recent
}
