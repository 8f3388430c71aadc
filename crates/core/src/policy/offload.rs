//! Offload: cold memory goes to the host's swap on purpose, before the kernel has
//! to choose in a hurry.
//!
//! The last stage that does anything: only while the host is hard or critical and tasks stall, only
//! for what recycling and ballooning have not brought for ten seconds, only where there is swap
//! with room. Cold is a VM that has been quiet for two minutes (its need and residency stood still,
//! it read nothing back) or is paused; those idle longest go first. A running VM keeps at least
//! half of its memory in DRAM. Of what its guest has freed less than 16 MiB are paged out: a VM
//! whose map is known is recycled first. One that reads back what was paged out is left alone for a
//! growing time. A VM without a balloon, or with one that does not follow, is paged out like the
//! others: it can give in no other way. Never: pinned memory, VMs that migrate, guests in distress.

use crate::model::{Model, Pressure, Standing, VmModel};
use crate::policy::recycle::{to_come, usable};
use crate::state::{Memory, VmMemory};
use crate::task::OffloadOrder;
use crate::units::Bytes;

/// A running VM is cold when it has been quiet for this time.
const QUIET_MS: u64 = 120_000;
/// How long something must have been missing that no earlier stage brings: balloons move
/// in seconds, and what was paged out in vain is read back while a guest waits.
const PATIENCE_MS: u64 = 10_000;
/// What a running VM keeps in DRAM of all it holds.
const KEPT: f64 = 0.5;
/// What a paused VM keeps in DRAM of all it holds: QEMU's own memory is part of it.
const KEPT_PAUSED: f64 = 0.1;
/// Less is not worth an order.
const LEAST: Bytes = Bytes::mib(4);
/// A VM of which recycling is to bring less than this has been recycled.
const RECYCLED: Bytes = Bytes::mib(16);

/// What all VMs together page out in a second.
fn rate(state: Pressure) -> Bytes {
    match state {
        Pressure::Clear | Pressure::Soft => Bytes::ZERO,
        Pressure::Hard => Bytes::mib(64),
        Pressure::Critical => Bytes::mib(256),
    }
}

/// Orders for `missing`, and the stage in words. `ordered` is what other limits have had paged out
/// of each VM in this tick. It goes to the same swap, at the same rate, and none of these VMs is
/// asked again.
pub fn offload(
    model: &Model,
    memory: &Memory,
    missing: Bytes,
    ordered: &[Bytes],
) -> (Vec<OffloadOrder>, String) {
    let Some(room) = model.host.offload_room else {
        return (Vec::new(), "no swap, or host.offload = false".into());
    };
    // Its swap is not taken yet, and one thread carries out all orders: what is ordered beside it
    // would only wait, and be more than is missing.
    if model.vms.iter().any(|vm| vm.tasks.offload.as_ref().is_some_and(|o| o.busy)) {
        return (Vec::new(), "what was ordered before is being paged out".into());
    }
    let before: Bytes = ordered.iter().copied().sum();
    let room = room - before;
    let rate = rate(model.host.shown.state);
    if rate == Bytes::ZERO || missing < LEAST {
        return (Vec::new(), "only for what is missing on a hard host".into());
    }
    if model.host.shown.stalled < Pressure::Soft {
        return (Vec::new(), "only where tasks stall".into());
    }
    let since = memory.beyond_since.map_or(0, |t| model.at.since(t));
    if since < PATIENCE_MS {
        return (Vec::new(), "what is missing may come from earlier stages".into());
    }
    let seconds = model.dt_ms.min(2000) as f64 / 1000.0;
    let mut left = missing.min(room).min(rate.share(seconds) - before);
    let is_new = |(_, ordered): &(&VmModel, &Bytes)| **ordered == Bytes::ZERO;
    let mut cold = Vec::new();
    for (vm, _) in model.vms.iter().zip(ordered).filter(is_new) {
        if let Some(quiet_ms) = memory.vm(vm.id).and_then(|m| coldness(model, vm, m)) {
            cold.push((quiet_ms, vm, spare(vm).min(vm.swap_left.unwrap_or(room))));
        }
    }
    cold.sort_by_key(|(quiet, vm, _)| (u64::MAX - quiet, vm.id));
    let mut orders = Vec::new();
    for (quiet_ms, vm, spare) in cold {
        let bytes = spare.min(left).floor_mib();
        if bytes < LEAST {
            continue;
        }
        left = left - bytes;
        let idle = match quiet_ms {
            u64::MAX => "it is paused".to_string(),
            ms => format!("quiet for {} s", ms / 1000),
        };
        let reason = format!("host {}, {missing} missing; {idle}", model.host.shown.state);
        orders.push(OffloadOrder { vm: vm.id, name: vm.name.clone(), bytes, reason });
    }
    let words = match orders.len() {
        0 if room < LEAST => "the host's swap is full".into(),
        0 => "no VM is cold".into(),
        n => format!("{n} cold VMs, {room} of swap left"),
    };
    (orders, words)
}

/// How long it has been cold, most for a paused one; `None`: it is not to be
/// touched.
fn coldness(model: &Model, vm: &VmModel, m: &VmMemory) -> Option<u64> {
    let may_go = vm.managed
        && !vm.outside
        && vm.hands_off.is_none()
        && (vm.standing == Standing::Ready || vm.beyond_balloon || vm.paused)
        && vm.pinned.is_none()
        && vm.distress.is_empty()
        && !usable(vm).is_some_and(|a| a.busy)
        && to_come(model, vm, m) < RECYCLED
        && m.cold.back_until.is_none_or(|t| t <= model.at);
    if !may_go {
        return None;
    }
    let quiet = model.at.since(m.cold.since);
    if vm.paused { Some(u64::MAX) } else { (quiet >= QUIET_MS).then_some(quiet) }
}

/// What of it may still leave DRAM.
fn spare(vm: &VmModel) -> Bytes {
    let resident = vm.resident.unwrap_or_default();
    let swap = vm.swap.unwrap_or_default() + vm.shared_away;
    let kept = if vm.paused { KEPT_PAUSED } else { KEPT };
    resident - (resident + swap).share(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HostModel, Limit};
    use crate::sample::{AgentSample, VmId};
    use crate::state::{Cold, Left};
    use crate::task::OffloadSample;
    use crate::units::Stamp;

    const NOW: Stamp = Stamp(1_000_000);

    fn vm(pid: u32) -> VmModel {
        VmModel {
            id: VmId { pid, start: 1 },
            name: format!("vm{pid}"),
            resident: Some(Bytes::mib(1000)),
            swap: Some(Bytes::ZERO),
            managed: true,
            standing: Standing::Ready,
            ..VmModel::default()
        }
    }

    fn quiet_for(pid: u32, seconds: u64) -> VmMemory {
        let since = Stamp(NOW.0 - seconds * 1000);
        let cold = Cold { since, ..Cold::default() };
        VmMemory { id: VmId { pid, start: 1 }, cold, ..VmMemory::default() }
    }

    fn model(state: Pressure, stalled: Pressure, room: Option<u64>, vms: Vec<VmModel>) -> Model {
        let shown = Limit { state, stalled, ..Limit::default() };
        let offload_room = room.map(Bytes::mib);
        let host = HostModel { shown, offload_room, ..HostModel::default() };
        Model { at: NOW, dt_ms: 1000, host, vms }
    }

    /// `missing_ms`: for how long memory has been missing that earlier stages do not bring.
    fn memory(vms: Vec<VmMemory>, missing_ms: Option<u64>) -> Memory {
        let beyond_since = missing_ms.map(|ms| Stamp(NOW.0 - ms));
        Memory { vms, beyond_since, ..Memory::default() }
    }

    /// Orders for `missing` MiB; `ordered`: of each VM by other limits.
    fn orders(model: &Model, memory: &Memory, missing: u64, ordered: &[Bytes]) -> Vec<(u32, u64)> {
        let (orders, _) = offload(model, memory, Bytes::mib(missing), ordered);
        orders.iter().map(|o| (o.vm.pid, o.bytes.0 >> 20)).collect()
    }

    fn ask(
        state: Pressure,
        room: Option<u64>,
        missing: u64,
        vms: Vec<(VmModel, VmMemory)>,
    ) -> Vec<(u32, u64)> {
        let (vms, remembered): (Vec<_>, _) = vms.into_iter().unzip();
        let none = vec![Bytes::ZERO; vms.len()];
        let model = model(state, state.min(Pressure::Soft), room, vms);
        orders(&model, &memory(remembered, Some(PATIENCE_MS)), missing, &none)
    }

    /// What is paged out of one VM on a critical host with enough swap.
    fn of_one(vm: VmModel, m: VmMemory) -> Vec<(u32, u64)> {
        ask(Pressure::Critical, Some(999), 99, vec![(vm, m)])
    }

    #[test]
    fn only_a_hard_host_with_room_in_its_swap_pages_out() {
        let one = || vec![(vm(1), quiet_for(1, 200))];
        assert_eq!(ask(Pressure::Hard, Some(1000), 500, one()), [(1, 64)]);
        assert_eq!(ask(Pressure::Critical, Some(1000), 500, one()), [(1, 256)]);
        assert_eq!(ask(Pressure::Critical, Some(40), 500, one()), [(1, 40)]);
        assert_eq!(ask(Pressure::Critical, Some(1000), 10, one()), [(1, 10)]);
        for (state, room, missing) in [
            (Pressure::Clear, Some(1000), 500),
            (Pressure::Soft, Some(1000), 500),
            (Pressure::Critical, None, 500),
            (Pressure::Critical, Some(0), 500),
            (Pressure::Critical, Some(1000), 0),
        ] {
            assert_eq!(ask(state, room, missing, one()), [], "{state} {room:?} {missing}");
        }
    }

    #[test]
    fn what_balloons_may_bring_in_a_moment_is_waited_for() {
        let ask = |state, stalled, since_ms: Option<u64>| {
            let model = model(state, stalled, Some(1024), vec![vm(1)]);
            orders(&model, &memory(vec![quiet_for(1, 200)], since_ms), 99, &[Bytes::ZERO]).len()
        };
        let (clear, soft) = (Pressure::Clear, Pressure::Soft);
        assert_eq!(ask(Pressure::Critical, soft, Some(PATIENCE_MS)), 1);
        assert_eq!(ask(Pressure::Critical, soft, Some(PATIENCE_MS - 1)), 0);
        assert_eq!(ask(Pressure::Critical, soft, None), 0);
        assert_eq!(ask(Pressure::Critical, clear, Some(PATIENCE_MS)), 0, "nobody stalls");
        assert_eq!(ask(Pressure::Hard, soft, Some(PATIENCE_MS)), 1);
    }

    #[test]
    fn those_idle_longest_go_first_and_paused_ones_before_them() {
        let (standing, resident) = (Standing::GiveOnly("paused".into()), Some(Bytes::mib(100)));
        let paused = VmModel { paused: true, standing, resident, ..vm(3) };
        let vms = vec![
            (vm(1), quiet_for(1, 140)),
            (vm(2), quiet_for(2, 700)),
            (paused, quiet_for(3, 0)),
            (vm(4), quiet_for(4, 100)),
        ];
        assert_eq!(ask(Pressure::Critical, Some(9000), 600, vms), [(3, 90), (2, 166)]);
    }

    #[test]
    fn what_other_limits_have_paged_out_counts() {
        let both = vec![vm(1), vm(2)];
        let mut model = model(Pressure::Critical, Pressure::Soft, Some(300), both);
        let memory = memory(vec![quiet_for(1, 200), quiet_for(2, 200)], Some(PATIENCE_MS));
        let ask = |model: &Model, ordered: u64| {
            orders(model, &memory, 500, &[Bytes::mib(ordered), Bytes::ZERO])
        };
        assert_eq!(ask(&model, 0), [(1, 256)]);
        assert_eq!(ask(&model, 100), [(2, 156)], "of 256 a second");
        assert_eq!(ask(&model, 256), []);
        model.vms[0].outside = true;
        assert_eq!(ask(&model, 100), [(2, 156)], "below a limit beside this one");
    }

    #[test]
    fn nothing_is_ordered_beside_what_is_being_paged_out() {
        let both = |busy| {
            let (mut first, others) = (vm(1), (vm(2), quiet_for(2, 200)));
            first.tasks.offload = Some(OffloadSample { busy, ..OffloadSample::default() });
            vec![(first, quiet_for(1, 100)), others]
        };
        assert_eq!(ask(Pressure::Critical, Some(999), 99, both(false)), [(2, 99)]);
        assert_eq!(ask(Pressure::Critical, Some(999), 99, both(true)), []);
    }

    #[test]
    fn hands_off_where_it_would_do_harm() {
        let with = |change: fn(&mut VmModel, &mut VmMemory)| {
            let (mut v, mut m) = (vm(1), quiet_for(1, 200));
            change(&mut v, &mut m);
            of_one(v, m)
        };
        assert_eq!(with(|_, _| ()), [(1, 99)]);
        assert_eq!(with(|v, _| v.pinned = Some("vfio".into())), []);
        assert_eq!(with(|v, _| v.distress = "short".into()), []);
        assert_eq!(with(|v, _| v.standing = Standing::Off("it is being migrated".into())), []);
        assert_eq!(with(|_, m| m.cold.back_until = Some(Stamp(NOW.0 + 1))), []);
        assert_eq!(with(|v, _| v.swap = Some(Bytes::mib(1100))), []);
        // Also where it is paused: `manage = false` is hands off.
        assert_eq!(with(|v, _| v.managed = false), []);
        assert_eq!(with(|v, _| (v.managed, v.paused) = (false, true)), []);
    }

    /// Shared memory in swap is in no process's count.
    #[test]
    fn a_running_vm_keeps_half_of_its_memory_also_where_that_is_shared() {
        let with = |resident, shared_away| {
            let (resident, shared_away) = (Some(Bytes::mib(resident)), Bytes::mib(shared_away));
            let vm = VmModel { resident, shared_away, ..vm(1) };
            ask(Pressure::Critical, Some(9999), 999, vec![(vm, quiet_for(1, 200))])
        };
        assert_eq!((with(700, 300), with(500, 500)), (vec![(1, 200)], vec![]));
    }

    #[test]
    fn who_cannot_be_ballooned_is_paged_out_and_who_must_be_left_alone_is_not() {
        let off = Standing::Off("it has no virtio balloon that answers".into());
        let with = |beyond_balloon, quiet_s| {
            let vm = VmModel { standing: off.clone(), beyond_balloon, ..vm(1) };
            of_one(vm, quiet_for(1, quiet_s))
        };
        assert_eq!(with(true, 200), [(1, 99)]);
        assert_eq!(with(true, 100), [], "not quiet for long enough");
        assert_eq!(with(false, 200), []);
    }

    #[test]
    fn what_a_guest_has_freed_is_recycled_and_never_paged_out() {
        let with = |held, left: Option<u64>| {
            let vm = VmModel { agent: Some(AgentSample::ready(held)), ..vm(1) };
            let mut m = quiet_for(1, 200);
            let (state, left) = (Pressure::Critical, left.map(Bytes::mib));
            m.recycle.left = left.map(|bytes| Left { state, bytes });
            of_one(vm, m)
        };
        assert_eq!(with(100, None), []);
        assert_eq!(with(2, None), [(1, 99)]);
        assert_eq!(with(100, Some(90)), [(1, 99)], "what recycling leaves keeps nothing else");
    }
}
