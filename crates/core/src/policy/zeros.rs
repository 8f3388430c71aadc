//! Zero pages of VMs that are not merged, freed by the kernel on the host's side alone.
//!
//! A huge page that is split maps the zero page where it held zeros, and a page of
//! zeros that is paged out takes a place in swap and nothing else. In both the kernel
//! looks at the page again when it cannot be written any more, so whatever a guest
//! does meanwhile nothing is lost. Tenants share nothing but zeros.
//!
//! To look through memory costs CPU, and a huge page that is split costs its guest speed: so only
//! while the host is short, or where the operator asks for a VM's memory; one VM at a time, within
//! merging's CPU budget (what an operator asks for has neither limit); and one in which a round
//! found next to nothing is left alone for a growing time. Never: VMs with an agent (their freed
//! pages are recycled, and its protection would be lost), pinned RAM, VMs that migrate or are not
//! Ebb's to touch, and what KSM takes care of.

use std::cmp::Reverse;

use crate::model::{Model, Pressure, VmModel};
use crate::plan::Reclaim;
use crate::state::Memory;
use crate::task::ZeroOrder;
use crate::units::{Bytes, PAGE};

/// A VM that holds less is not scanned.
const LEAST: Bytes = Bytes::mib(32);
/// Read for an order.
const PIECE: Bytes = Bytes::mib(512);
/// The least and the longest time of an order, whatever the budget says.
const MS: (u64, u64) = (20, 1000);
/// One that the operator asked for.
const ASKED_MS: u64 = 30_000;

/// The least number of zero pages, of 512, for which a huge page is split.
fn enough(state: Pressure) -> u64 {
    match state {
        Pressure::Clear | Pressure::Soft => 256,
        Pressure::Hard => 128,
        Pressure::Critical => 64,
    }
}

/// Orders, and the stage in words.
pub fn zeros(model: &Model, memory: &Memory, requests: &[Reclaim]) -> (Vec<ZeroOrder>, String) {
    let Some(ways) = model.host.zeros else {
        return (Vec::new(), "merge.zeros is off".into());
    };
    let swap = model.host.offload_room.filter(|_| ways.pageout).unwrap_or_default();
    if !ways.split && swap < LEAST {
        return (Vec::new(), "this kernel cannot, or there is no swap for it".into());
    }
    let order = |vm: &VmModel, read, ms, reason| ZeroOrder {
        vm: vm.id,
        name: vm.name.clone(),
        read,
        ms,
        split: ways.split.then(|| enough(model.host.shown.state)),
        swap,
        reason,
    };
    let able: Vec<&VmModel> = model.vms.iter().filter(|vm| may_go(vm)).collect();
    // How much an order frees is not known before: a number of bytes is left to agents and
    // balloons.
    let asked = |vm: &&&VmModel| requests.iter().any(|r| r.bytes.is_none() && r.means(&vm.name));
    let mut orders: Vec<ZeroOrder> = able
        .iter()
        .filter(asked)
        .map(|vm| order(vm, held(vm), ASKED_MS, "the operator asked for its memory".into()))
        .collect();
    // They are carried out one after the other, by this tick's figure of swap.
    let each = Bytes(swap.0 / orders.len().max(1) as u64);
    orders.iter_mut().for_each(|order| order.swap = each);
    let busy = model.vms.iter().any(|vm| vm.tasks.zeros.as_ref().is_some_and(|z| z.busy));
    if model.host.shown.state >= Pressure::Soft && orders.is_empty() && !busy {
        let seconds = model.dt_ms.min(2000) as f64 / 1000.0;
        let share = model.host.zeros_budget.share(model.host.shown.state);
        let ms = (share * seconds * 1000.0) as u64;
        orders.extend(next(model, memory, &able).map(|vm| {
            let reason = format!("host {}", model.host.shown.state);
            order(vm, PIECE, ms.clamp(MS.0, MS.1), reason)
        }));
    }
    let words = match orders.len() {
        _ if busy => "under way".into(),
        0 if model.host.shown.state < Pressure::Soft => {
            "only on a short host, or when asked for".into()
        }
        0 => "no VM is due, or may be touched".into(),
        n => format!("{n} VMs looked through"),
    };
    (orders, words)
}

/// Whether a VM's zero pages may be freed.
fn may_go(vm: &VmModel) -> bool {
    vm.zeros_stay.is_empty()
        && held(vm) >= LEAST
        && !vm.tasks.zeros.as_ref().is_some_and(|z| z.busy)
}

fn held(vm: &VmModel) -> Bytes {
    vm.resident.unwrap_or_default()
}

/// The next VM: the one in which a scan found most zeros, and of those in which that
/// is not known the one of which least was read.
fn next<'a>(model: &Model, memory: &Memory, able: &[&'a VmModel]) -> Option<&'a VmModel> {
    // Where nothing could be read, zeros are not known.
    let found = |vm: &VmModel| {
        let found = vm.merge.as_ref().and_then(|m| m.sample.found).filter(|f| f.pages > 0);
        found.map(|f| f.zeros)
    };
    let due = |vm: &&&VmModel| {
        if model.state_of(vm) < Pressure::Soft {
            return false;
        }
        let rest = memory.of(vm.id).zeros.rest_until;
        let none = found(vm).is_some_and(|pages| pages < LEAST.0 / PAGE / 8);
        rest.is_none_or(|until| until <= model.at) && !none
    };
    let read = |vm: &VmModel| vm.tasks.zeros.as_ref().map_or(Bytes::ZERO, |z| z.read);
    able.iter().filter(due).min_by_key(|vm| (Reverse(found(vm)), read(vm), vm.id)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::policy::merge::Candidates;
    use crate::sample::{
        AgentSample, HostSample, Link, Meminfo, MergeSample, ProcessMemory, RunState, Sample, VmId,
        VmSample, ZeroWays,
    };
    use crate::state::VmMemory;
    use crate::state::ZeroMemory;
    use crate::task::ZeroSample;
    use crate::units::Stamp;

    const NOW: Stamp = Stamp(1_000_000);
    const NONE: [u32; 0] = [];
    const ON: &str = "[merge]\nzeros = true\n";

    fn vm(pid: u32) -> VmSample {
        let process = Some(ProcessMemory { anon: Bytes::gib(1), ..ProcessMemory::default() });
        VmSample { process, ..VmSample::running(pid, &format!("vm{pid}")) }
    }

    fn model(config: &str, state: Pressure, vms: Vec<VmSample>) -> Model {
        let zeros = Some(ZeroWays { split: true, pageout: true });
        let (total, available, swap) = (Bytes::gib(64), Bytes::gib(1), Bytes::gib(10));
        let memory = Meminfo { total, available, ..Meminfo::default() };
        let memory = Some(Meminfo { swap_total: swap, swap_free: swap, ..memory });
        let host = HostSample { zeros, memory, ..HostSample::default() };
        let sample = Sample { at: NOW, host, vms, ..Sample::default() };
        let config = Config::parse("f", config).unwrap();
        let mut model = Model::new(&config, &sample, &Memory::default());
        model.host.shown.state = state;
        Model { dt_ms: 1000, ..model }
    }

    fn ask(model: &Model, memory: &Memory, requests: &[Reclaim]) -> Vec<u32> {
        zeros(model, memory, requests).0.iter().map(|o| o.vm.pid).collect()
    }

    fn orders(config: &str, state: Pressure, vms: Vec<VmSample>) -> Vec<u32> {
        ask(&model(config, state, vms), &Memory::default(), &[])
    }

    #[test]
    fn only_where_it_is_wanted_on_a_short_host_or_when_asked_for() {
        assert_eq!(orders(ON, Pressure::Soft, vec![vm(1)]), [1]);
        assert_eq!(orders("", Pressure::Critical, vec![vm(1)]), NONE);
        assert_eq!(orders(ON, Pressure::Clear, vec![vm(1)]), NONE);
        let clear = model(ON, Pressure::Clear, vec![vm(1), vm(2)]);
        let of = |name: Option<&str>| [Reclaim { vm: name.map(Into::into), bytes: None }];
        assert_eq!(ask(&clear, &Memory::default(), &of(Some("vm2"))), [2]);
        assert_eq!(ask(&clear, &Memory::default(), &of(None)), [1, 2]);
        let some = [Reclaim { vm: None, bytes: Some(Bytes::mib(16)) }];
        assert_eq!(ask(&clear, &Memory::default(), &some), NONE, "they may be far more than that");
        let off = model("", Pressure::Clear, vec![vm(1)]);
        assert_eq!(ask(&off, &Memory::default(), &of(None)), NONE, "not wanted at all");
    }

    /// What each rule keeps out is let in when what it goes by is hidden: the same VM
    /// without it is [`vm`], of which there is an order.
    #[test]
    fn hands_off_where_it_would_do_harm() {
        let with = |change: fn(&mut VmSample)| {
            let mut vm = vm(1);
            change(&mut vm);
            vm
        };
        let open = |open| {
            let merge = Some(MergeSample { open, ..MergeSample::default() });
            VmSample { merge, ..vm(1) }
        };
        let steered = "[merge]\nmode = \"on\"\nzeros = true\n";
        let off = |key: &str| format!("{ON}[vm.vm1]\n{key} = false\n");
        for (config, vm, why) in [
            (ON, with(|v| v.agent = Some(AgentSample::default())), "agent"),
            (ON, with(|v| v.pinned = Some("a VFIO device".into())), "VFIO"),
            (ON, with(|v| v.run = Some(RunState::Migrating)), "migrated"),
            (ON, with(|v| v.run = None), "run state is not known"),
            (ON, with(|v| v.link = Link::Down("gone".into())), "gone"),
            (&*off("zeros"), vm(1), "zeros = false"),
            (&*off("manage"), vm(1), "manage = false"),
            (steered, open(Some(true)), "open to KSM"),
            (steered, open(None), "not looked at"),
        ] {
            let model = model(config, Pressure::Critical, vec![vm]);
            assert_eq!(ask(&model, &Memory::default(), &[]), NONE, "{why}");
            assert_eq!(ask(&model, &Memory::default(), &[Reclaim::default()]), NONE, "{why}");
            assert!(model.vms[0].zeros_stay.contains(why), "{}", model.vms[0].zeros_stay);
        }
        // Out of KSM is whom it is for; and nobody steers KSM where merging is off.
        assert_eq!(orders(steered, Pressure::Soft, vec![open(Some(false))]), [1]);
        assert_eq!(orders(ON, Pressure::Soft, vec![open(Some(true))]), [1]);
        assert_eq!(orders(ON, Pressure::Soft, vec![with(|v| v.run = Some(RunState::Paused))]), [1]);
        assert_eq!(orders(ON, Pressure::Soft, vec![with(|v| v.process = None)]), NONE);
    }

    #[test]
    fn one_vm_at_a_time_those_with_most_zeros_first_and_none_that_has_few() {
        let scanned = |pid, zeros| {
            let found = Some(Candidates { pages: 1 << 20, zeros, duplicates: 0 });
            VmSample { merge: Some(MergeSample { found, ..MergeSample::default() }), ..vm(pid) }
        };
        let all = || vec![vm(1), scanned(2, 5_000), scanned(3, 9_000), scanned(4, 100)];
        assert_eq!(orders(ON, Pressure::Hard, all()), [3]);
        assert_eq!(orders(ON, Pressure::Hard, vec![scanned(4, 100)]), NONE);
        let mut vms = all();
        vms[0].tasks.zeros = Some(ZeroSample { busy: true, ..ZeroSample::default() });
        assert_eq!(orders(ON, Pressure::Hard, vms), NONE);
        let resting = |pid, until| VmMemory {
            id: VmId { pid, start: 1 },
            zeros: ZeroMemory { rest_until: Some(until), ..ZeroMemory::default() },
            ..VmMemory::default()
        };
        let vms = vec![resting(1, NOW), resting(2, NOW), resting(3, NOW.plus(1))];
        let memory = Memory { vms, ..Memory::default() };
        assert_eq!(ask(&model(ON, Pressure::Hard, all()), &memory, &[]), [2]);
    }

    #[test]
    fn what_is_paged_out_never_takes_the_last_of_swap_and_splitting_needs_none() {
        let with = |split, pageout, room: Option<u64>| {
            let mut model = model(ON, Pressure::Critical, vec![vm(1)]);
            model.host.zeros = Some(ZeroWays { split, pageout });
            model.host.offload_room = room.map(Bytes::mib);
            let (orders, _) = zeros(&model, &Memory::default(), &[]);
            orders.first().map(|o| (o.split, o.swap.0 >> 20))
        };
        assert_eq!(with(true, true, Some(100)), Some((Some(64), 100)));
        assert_eq!(with(true, true, None), Some((Some(64), 0)), "no swap, or host.offload = false");
        assert_eq!(with(true, false, Some(100)), Some((Some(64), 0)), "zeros would be written");
        assert_eq!(with(false, true, Some(100)), Some((None, 100)));
        assert_eq!((with(false, true, None), with(false, false, Some(100))), (None, None));
    }

    #[test]
    fn vms_that_are_asked_together_share_the_room_of_swap() {
        let mut model = model(ON, Pressure::Clear, vec![vm(1), vm(2)]);
        model.host.offload_room = Some(Bytes::mib(100));
        let all = [Reclaim { vm: None, bytes: None }];
        let (orders, _) = zeros(&model, &Memory::default(), &all);
        assert_eq!(orders.iter().map(|o| o.swap.0 >> 20).collect::<Vec<_>>(), [50, 50]);
    }

    #[test]
    fn the_budget_is_the_configured_one_though_nothing_is_merged() {
        let ms = |config: &str| {
            let model = model(config, Pressure::Soft, vec![vm(1)]);
            zeros(&model, &Memory::default(), &[]).0[0].ms
        };
        let more = format!("{ON}cpu = \"80%\"\n");
        assert_eq!((ms(ON), ms(&more)), (400, 800));
    }
}
