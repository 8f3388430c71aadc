//! Partially mapped huge pages: the host has what balloons freed of them only when they are split.
//!
//! A balloon discards pages of 4 KiB, each wherever the guest had one. Where the host
//! holds guest RAM in huge pages, one of which only a part was discarded stays whole: the
//! process holds less, and the host has no more free memory. The kernel splits such pages when it
//! is out of memory itself, which is what ballooning is there to prevent. So they are
//! split when a balloon has taken enough, and when it has come to rest.
//!
//! Splitting moves and frees nothing that is mapped. The guest lost the speed of the huge page
//! when its balloon took a part of it. Never: pinned RAM, VMs that migrate or are not Ebb's to touch.

use crate::model::{Model, VmModel};
use crate::state::Memory;
use crate::task::PartialThpOrder;
use crate::units::Bytes;

/// While a balloon grows, its VM's page tables are scanned each time that it took this
/// much more, or this share of RAM if that is larger.
const STEP: (Bytes, f64) = (Bytes::mib(32), 1.0 / 16.0);
/// When the balloon has come to rest, they are scanned if it took this much more.
const LEAST: Bytes = Bytes::mib(4);
/// At rest: it did not grow for this time.
const REST_MS: u64 = 3_000;
/// The time limit of an order; what is left is ordered again.
const MS: u64 = 500;

/// The VMs whose partially mapped huge pages are to be split now.
pub fn partial_thp(model: &Model, memory: &Memory) -> Vec<PartialThpOrder> {
    model.vms.iter().filter_map(|vm| order(model, memory, vm)).collect()
}

fn order(model: &Model, memory: &Memory, vm: &VmModel) -> Option<PartialThpOrder> {
    let (done, m) = (vm.tasks.partial_thp.as_ref(), memory.vm(vm.id)?);
    if !vm.advisable || done.is_some_and(|d| d.busy) {
        return None;
    }
    let taken = m.inflated - m.inflated_split;
    let step = STEP.0.max(vm.ram.unwrap_or_default().share(STEP.1));
    let rests = m.shrunk.is_none_or(|at| model.at.since(at) >= REST_MS);
    let reason = if taken >= step || taken >= LEAST && rests {
        format!("its balloon took {taken}")
    } else if done.is_some_and(|d| d.more) {
        "what the last order did not come to".into()
    } else {
        return None;
    };
    Some(PartialThpOrder { vm: vm.id, name: vm.name.clone(), ms: MS, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan::Plan;
    use crate::policy::Decided;
    use crate::sample::{BalloonSample, Link, ProcessMemory, RunState, Sample, VmId, VmSample};
    use crate::state::VmMemory;
    use crate::task::{Orders, PartialThpSample, Tasks};
    use crate::units::Stamp;

    const NOW: Stamp = Stamp(1_000_000);
    const ID: VmId = VmId { pid: 1, start: 1 };

    fn vm() -> VmSample {
        VmSample { ram: Some(Bytes::gib(1)), ..VmSample::running(1, "vm") }
    }

    fn taken(mib: u64, shrunk_ms_ago: u64) -> VmMemory {
        let shrunk = Some(Stamp(NOW.0 - shrunk_ms_ago));
        VmMemory { id: ID, inflated: Bytes::mib(mib), shrunk, ..VmMemory::default() }
    }

    fn orders(config: &str, vm: VmSample, m: VmMemory) -> Vec<String> {
        let sample = Sample { at: NOW, vms: vec![vm], ..Sample::default() };
        let config = Config::parse("f", config).unwrap();
        let model = Model::new(&config, &sample, &Memory::default());
        let memory = Memory { vms: vec![m], ..Memory::default() };
        partial_thp(&model, &memory).into_iter().map(|o| o.reason).collect()
    }

    #[test]
    fn when_a_balloon_took_enough_and_when_it_has_come_to_rest() {
        let n = |m| orders("", vm(), m).len();
        assert_eq!((n(taken(0, 60_000)), n(taken(3, 60_000))), (0, 0));
        assert_eq!((n(taken(63, 100)), n(taken(64, 100))), (0, 1), "a sixteenth of 1 GiB");
        assert_eq!((n(taken(10, 2_900)), n(taken(10, 3_000))), (0, 1));
        let with = |partial_thp| {
            let tasks = Tasks { partial_thp: Some(partial_thp), ..Tasks::default() };
            VmSample { tasks, ..vm() }
        };
        let busy = with(PartialThpSample { busy: true, more: true, ..PartialThpSample::default() });
        assert!(orders("", busy, taken(100, 100)).is_empty());
        let more = with(PartialThpSample { more: true, ..PartialThpSample::default() });
        assert_eq!(orders("", more, taken(0, 100)), ["what the last order did not come to"]);
    }

    #[test]
    fn what_a_balloon_takes_counts_though_the_guest_grows_meanwhile() {
        let mut memory = Memory::default();
        let mut tick = |n: u64, size: u64, anon: u64| {
            let process = Some(ProcessMemory { anon: Bytes::mib(anon), ..Default::default() });
            let balloon = Some(BalloonSample { actual: Bytes::mib(size), ..Default::default() });
            let vms = vec![VmSample { process, balloon, ..vm() }];
            let sample = Sample { at: NOW.plus(100 * n), vms, ..Sample::default() };
            memory.observe(&sample);
            let model = Model::new(&Config::default(), &sample, &memory);
            let partial_thp = partial_thp(&model, &memory);
            let count = partial_thp.len();
            let orders = Orders { partial_thp, ..Orders::default() };
            let decided = Decided { plan: Plan { orders, ..Plan::default() }, merging: None };
            memory.learn(&model, &decided, &[], true);
            count
        };
        assert_eq!((tick(0, 1000, 300), tick(1, 968, 340), tick(2, 936, 380)), (0, 0, 1));
        assert_eq!((tick(3, 904, 420), tick(4, 872, 460)), (0, 1), "since the last order");
    }

    #[test]
    fn what_an_older_record_remembers_counts() {
        let id = serde_json::to_string(&ID).unwrap();
        for key in ["partial_thp", "torn"] {
            let was = format!(r#"{{"id": {id}, "{key}": {}}}"#, Bytes::mib(10).0);
            let was: VmMemory = serde_json::from_str(&was).unwrap();
            assert_eq!(orders("", vm(), was), ["its balloon took 10 MiB"]);
        }
    }

    #[test]
    fn hands_off_where_it_would_do_harm() {
        let with = |change: fn(&mut VmSample)| {
            let mut vm = vm();
            change(&mut vm);
            orders("", vm, taken(100, 100)).len()
        };
        assert_eq!(with(|_| ()), 1);
        assert_eq!(with(|v| v.pinned = Some("VFIO".into())), 0);
        assert_eq!(with(|v| v.run = Some(RunState::Migrating)), 0);
        assert_eq!(with(|v| v.run = None), 0);
        assert_eq!(with(|v| v.link = Link::Down("gone".into())), 0);
        assert_eq!(with(|v| v.run = Some(RunState::Paused)), 1);
        assert!(orders("[vm.vm]\nmanage = false\n", vm(), taken(100, 100)).is_empty());
    }
}
