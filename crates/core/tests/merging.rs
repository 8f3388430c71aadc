//! The governor's rules of safety, each switched off in turn: without it a host comes to
//! harm that it does not come to with it.
//!
//! The rules have no switch in core. So each is switched off from outside, by hiding from
//! the loop what it goes by. The host is a stand-in: VMs that are open to KSM or not, and
//! pages of theirs that are merged and broken.

use ebb_core::config::Config;
use ebb_core::model::default_reserve;
use ebb_core::plan::{Action, MergePlan, Outcome};
use ebb_core::policy::merge::{Candidates, KsmdOrder};
use ebb_core::sample::{
    Claim, HostSample, Ksm, KsmStat, Link, Meminfo, MergeSample, ProcessMemory, RunState, Sample,
    ScanSample, VmId, VmSample, Vmstat,
};
use ebb_core::state::Owned;
use ebb_core::tick::{Engine, Host, Next};
use ebb_core::units::{Bytes, PAGE, Stamp};

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Law {
    /// `ksmd` never works while VMs of two share groups are open.
    Apart,
    /// A VM that writes what was merged is not merged any more after half a minute, where there is
    /// room.
    LetGo,
    /// Merges are broken only of what the host has beyond its reserve and what VMs that
    /// boot were promised.
    Room,
}

/// A rule that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The share-group rule: who is of which group is hidden.
    Groups,
    /// Release after a storm of copies: what mappings show is hidden.
    Storms,
    /// Headroom for VMs that boot: that they have just started is hidden.
    Boots,
}

struct ToyVm {
    name: &'static str,
    group: &'static str,
    open: bool,
    ram: Bytes,
    resident: Bytes,
    merged: u64,
    /// It writes this share of what is merged of it in a second.
    writes: f64,
    /// It boots: came just now, and takes so much a second.
    boots: Option<Bytes>,
}

struct Toy {
    at: u64,
    total: Bytes,
    vms: Vec<ToyVm>,
    ksm: Ksm,
    copied: u64,
    /// Since when each has been writing what is merged, while it is open.
    storm: Vec<Option<u64>>,
    fault: Option<Fault>,
    broken: Vec<Law>,
}

impl Toy {
    fn available(&self) -> Bytes {
        self.total - self.vms.iter().map(|v| v.resident).sum()
    }

    fn second(&mut self) {
        self.at += 1000;
        for (vm, storm) in self.vms.iter_mut().zip(&mut self.storm) {
            let broken = (vm.merged as f64 * vm.writes) as u64;
            vm.merged -= broken;
            vm.resident += Bytes::pages(broken);
            self.copied += broken;
            let goes_on = broken > 0 && vm.open;
            *storm = goes_on.then(|| storm.unwrap_or(self.at));
            if storm.is_some_and(|since| self.at - since > 30_000) {
                self.broken.push(Law::LetGo);
            }
            let grows = vm.boots.unwrap_or_default();
            vm.resident = (vm.resident + grows).min(vm.ram).max(vm.resident);
        }
        if self.ksm.run == 1 {
            self.ksm.full_scans += 1;
            let cpu_ms = self.ksm.cpu_ms.unwrap_or(0) + 100;
            self.ksm.cpu_ms = Some(cpu_ms);
            // What was broken is merged again: guests that write pay each time.
            for vm in self.vms.iter_mut().filter(|v| v.open && v.writes > 0.0) {
                vm.merged += 20_000;
                vm.resident = vm.resident - Bytes::pages(20_000);
            }
        }
    }

    fn vm(&self, i: usize) -> VmSample {
        let vm = &self.vms[i];
        let hides = |fault| self.fault == Some(fault);
        let merge = MergeSample {
            open: Some(vm.open),
            stat: KsmStat { merging_pages: Some(vm.merged), ..KsmStat::default() },
            seen: (!hides(Fault::Storms)).then_some((Stamp(self.at), Bytes::pages(vm.merged))),
            found: Some(Candidates { pages: 400_000, zeros: 0, duplicates: 300_000 }),
            ..MergeSample::default()
        };
        VmSample {
            id: VmId { pid: i as u32 + 1, start: 1 },
            name: vm.name.into(),
            ram: Some(vm.ram),
            link: Link::Up,
            run: Some(RunState::Running),
            process: Some(ProcessMemory { anon: vm.resident, ..ProcessMemory::default() }),
            age_ms: Some(if vm.boots.is_some() && !hides(Fault::Boots) {
                self.at
            } else {
                1 << 40
            }),
            merge: Some(merge),
            claim: Claim::Proven,
            ..VmSample::default()
        }
    }
}

impl Host for Toy {
    fn now(&self) -> Stamp {
        Stamp(self.at)
    }

    fn read(&mut self, _owed: &[VmId]) -> Sample {
        let (at, total, available) = (Stamp(self.at), self.total, self.available());
        let memory = Some(Meminfo { total, available, ..Meminfo::default() });
        let scan = Some(ScanSample { number: 1, at, ..ScanSample::default() });
        let vmstat = Some(Vmstat { cow_ksm: Some(self.copied), ..Vmstat::default() });
        let ksm = Some(self.ksm);
        let host = HostSample { memory, ksm, scan, vmstat, ..HostSample::default() };
        let vms = (0..self.vms.len()).map(|i| self.vm(i)).collect();
        Sample { at, host, vms, ..Sample::default() }
    }

    fn remember(&mut self, _: &Owned) -> Result<(), String> {
        Ok(())
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        actions.iter().map(|a| Outcome { vm: a.vm, ..Outcome::default() }).collect()
    }

    fn merge(&mut self, plan: &MergePlan) {
        for order in &plan.vms {
            let promised: Bytes =
                self.vms.iter().filter(|v| v.boots.is_some()).map(|v| v.ram - v.resident).sum();
            let room = self.available() - promised - default_reserve(self.total);
            let same_group = self.vms[0].group;
            let vm = &mut self.vms[order.vm.pid as usize - 1];
            let needed = Bytes::pages(vm.merged);
            // One of another group must go whatever it takes.
            if !order.open && vm.group == same_group && room < needed {
                self.broken.push(Law::Room);
            }
            if !order.open {
                vm.resident += needed;
                vm.merged = 0;
            }
            vm.open = order.open;
        }
        let works = matches!(plan.ksmd, Some(KsmdOrder::Run { .. }));
        self.ksm.run = u64::from(works);
        let mut open = self.vms.iter().filter(|v| v.open).map(|v| v.group);
        let first = open.next();
        if works && open.any(|g| Some(g) != first) {
            self.broken.push(Law::Apart);
        }
    }

    fn wait(&mut self, _: &Next) -> bool {
        true
    }
}

/// An idle VM with a GiB merged.
fn vm(name: &'static str, group: &'static str) -> ToyVm {
    ToyVm {
        name,
        group,
        open: true,
        ram: Bytes::gib(4),
        resident: Bytes::gib(2),
        merged: (1 << 30) / PAGE,
        writes: 0.0,
        boots: None,
    }
}

/// Two minutes on a host of this size.
fn run(total: Bytes, vms: Vec<ToyVm>, fault: Option<Fault>) -> Vec<Law> {
    let group = |v: &ToyVm| format!("[vm.{}]\ngroup = \"{}\"\n", v.name, v.group);
    let groups: String = match fault {
        Some(Fault::Groups) => String::new(),
        _ => vms.iter().map(group).collect(),
    };
    let chosen = if groups.is_empty() { "" } else { "group = \"acme\"\n" };
    let text = format!("[merge]\nmode = \"on\"\n{chosen}{groups}");
    let mut engine = Engine::new(Config::parse("f", &text).unwrap(), false);
    let ksm = Ksm { pages_shared: 100_000, pages_sharing: 300_000, ..Ksm::default() };
    let storm = vms.iter().map(|_| None).collect();
    let mut host = Toy { at: 1000, total, vms, ksm, copied: 0, storm, fault, broken: Vec::new() };
    for _ in 0..120 {
        engine.step(&mut host);
        host.second();
    }
    host.broken.sort();
    host.broken.dedup();
    host.broken
}

/// A host that the rule is needed on, and the law that holds only with it.
fn trial(fault: Fault) -> (Law, Bytes, Vec<ToyVm>) {
    let writer = || ToyVm { writes: 0.2, ..vm("writer", "acme") };
    match fault {
        Fault::Groups => {
            (Law::Apart, Bytes::gib(32), vec![vm("a", "acme"), vm("b", "acme"), vm("c", "other")])
        }
        Fault::Storms => (Law::LetGo, Bytes::gib(32), vec![writer(), vm("b", "acme")]),
        // Room for what is merged of the writer, but not beside what the third may take.
        Fault::Boots => {
            let (resident, boots) = (Bytes::mib(100), Some(Bytes::mib(20)));
            let new = ToyVm { resident, merged: 0, boots, ..vm("new", "acme") };
            (Law::Room, Bytes::gib(8), vec![writer(), vm("b", "acme"), new])
        }
    }
}

const FAULTS: [Fault; 3] = [Fault::Groups, Fault::Storms, Fault::Boots];

#[test]
fn every_rule_that_is_switched_off_breaks_its_law() {
    for fault in FAULTS {
        let (law, total, vms) = trial(fault);
        let broken = run(total, vms, Some(fault));
        assert!(broken.contains(&law), "{fault:?} off, and {law:?} still holds: {broken:?}");
    }
}

#[test]
fn with_all_rules_the_same_hosts_keep_every_law_they_can() {
    for fault in FAULTS {
        let (_, total, vms) = trial(fault);
        let broken = run(total, vms, None);
        // Where there is no room for it, the writer stays open.
        let can = if fault == Fault::Boots { vec![Law::LetGo] } else { Vec::new() };
        assert!(broken.iter().all(|law| can.contains(law)), "{fault:?}'s host: {broken:?}");
    }
}
