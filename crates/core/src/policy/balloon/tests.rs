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
use crate::sample::VmId;
use crate::state::{BalloonOrder, Recent, Yields};
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

fn decide(host: HostModel, vms: Vec<VmModel>, remembered: Vec<VmMemory>) -> Vec<Verdict> {
    let model = Model { at: NOW, dt_ms: 1000, host, vms };
    let memory = Memory { vms: remembered, ..Memory::default() };
    balloon(&model, &memory, &[], &[]).verdicts
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
