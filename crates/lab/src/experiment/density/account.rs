//! Who used how much processor time, and what holds a VM's memory.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use ebb_core::sample::Ksm;
use ebb_core::units::Bytes;
use ebb_host::probe::ksm::{ksmd, read_ksm};
use ebb_host::probe::regions::{Region, guest_ram, read_smaps};
use ebb_host::root::Root;
use ebb_host::sys::Range;

use super::rivals::merges;
use crate::ebb::Daemon;
use crate::result::ExperimentResult;
use crate::vm::{Vm, cpu_s, resident, threads};

/// Bytes of a `struct ksm_rmap_item` (Linux `mm/ksm.c`).
const RMAP_ITEM: u64 = 64;

/// Processor seconds, and what Ebb says came back.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    /// By name: `daemon`, `ksmd`, `qemu` (all of it), and each of the agents' threads.
    seconds: BTreeMap<String, f64>,
    returned: f64,
    /// Share of the processors' time that was idle: ticks before it is made a difference.
    pub(super) idle: f64,
    all: f64,
}

impl Account {
    pub(super) fn read(vms: &[Vm], daemon: Option<&Daemon>) -> Result<Account> {
        let mut account = Account::default();
        let of = |pid: u32| cpu_s(pid).unwrap_or(0.0);
        if let Some(pid) = ksmd(&Root::default()) {
            account.seconds.insert("ksmd".into(), of(pid));
        }
        if let Some(daemon) = daemon {
            account.seconds.insert("daemon".into(), of(daemon.pid()));
            let state = daemon.state()?;
            for vm in state["vms"].as_array().into_iter().flatten() {
                let part = |key: &str| vm["returned"][key].as_f64().unwrap_or(0.0);
                account.returned += part("recycled") + part("balloon") + part("reporting");
            }
        }
        for vm in vms {
            *account.seconds.entry("qemu".into()).or_default() += of(vm.pid);
            for (_, name, seconds) in threads(vm.pid).unwrap_or_default() {
                if name.starts_with("ebb") {
                    *account.seconds.entry(name.replace('-', "_")).or_default() += seconds;
                }
            }
        }
        let stat = std::fs::read_to_string("/proc/stat")?;
        let ticks: Vec<f64> = stat
            .lines()
            .next()
            .context("/proc/stat is empty")?
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|n| n.parse().ok())
            .collect();
        account.idle = ticks.iter().skip(3).take(2).sum();
        account.all = ticks.iter().sum();
        Ok(account)
    }

    /// The difference. `time`: how long that was.
    pub(super) fn since(mut self, before: &Account, time: Duration) -> Account {
        for (name, seconds) in &mut self.seconds {
            *seconds = (*seconds - before.seconds.get(name).unwrap_or(&0.0)).max(0.0);
        }
        self.returned = (self.returned - before.returned).max(0.0);
        self.idle = (self.idle - before.idle) / (self.all - before.all).max(1.0);
        self.all = time.as_secs_f64();
        self
    }

    /// Shares of one processor, and seconds a terabyte that came back.
    pub(super) fn add(&self, outcome: &mut ExperimentResult, arm: &str) {
        for (name, seconds) in &self.seconds {
            let share = seconds / self.all.max(0.001);
            outcome.add(arm, &format!("cpu_{name}"), "fraction", &[share]);
        }
        if self.returned > 0.0 {
            let ours = |name: &&String| name.as_str() != "qemu";
            let seconds: f64 =
                self.seconds.iter().filter(|(name, _)| ours(name)).map(|(_, s)| s).sum();
            outcome.add(arm, "returned", "bytes", &[self.returned]);
            outcome.add(arm, "cpu_s_per_tb", "count", &[seconds / (self.returned / 1e12)]);
        }
    }
}

/// What an arm's daemon and KSM hold, which is in no cgroup of VMs. For each page that it knows
/// of KSM has a `struct ksm_rmap_item`; those of arms before stay until it runs again.
pub(super) fn beside(daemon: Option<&Daemon>, arm: &str) -> Result<Bytes> {
    let ksm = if merges(arm) { read_ksm(&Root::default())? } else { None };
    let pages = |k: Ksm| k.pages_shared + k.pages_sharing + k.pages_unshared + k.pages_volatile;
    let ksm = Bytes(RMAP_ITEM * ksm.map_or(0, pages));
    Ok(daemon.map_or(Bytes::ZERO, |d| resident(d.pid())) + ksm)
}

/// What holds a VM's memory when its jobs rest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    /// Resident guest RAM; a page that is merged counts in each VM.
    pub(super) guest: Bytes,
    pub(super) huge: Bytes,
    /// Everything else of the process.
    pub(super) vmm: Bytes,
    /// Of that what VMs do not share: no mapped files.
    pub(super) vmm_private: Bytes,
}

pub(super) fn rest(vms: &[Vm]) -> Result<Vec<Rest>> {
    let mut all = Vec::new();
    for vm in vms {
        let Some(regions) = read_smaps(&Root::default(), vm.pid)? else { continue };
        let rest = of_regions(&regions, vm.memory);
        all.push(rest);
    }
    Ok(all)
}

fn of_regions(regions: &[Region], memory: Bytes) -> Rest {
    // Ranges that are open to KSM are mappings of their own: what adjoins is one.
    let mut blocks: Vec<(Range, Rest)> = Vec::new();
    for region in guest_ram(regions) {
        let (range, guest, huge) = (region.range, region.resident, region.huge);
        match blocks.last_mut() {
            Some((block, rest)) if block.start + block.len == range.start => {
                block.len += range.len;
                rest.guest += guest;
                rest.huge += huge;
            }
            _ => blocks.push((range, Rest { guest, huge, ..Rest::default() })),
        }
    }
    // Video memory and firmware are RAM too, but the VMM's.
    let mut rest = Rest::default();
    for (_, of) in blocks.iter().filter(|(block, _)| block.len >= memory.0 / 2) {
        rest.guest += of.guest;
        rest.huge += of.huge;
    }
    let sum = |of: &dyn Fn(&Region) -> bool| -> Bytes {
        regions.iter().filter(|r| of(r)).map(|r| r.resident).sum()
    };
    rest.vmm = sum(&|_| true) - rest.guest;
    rest.vmm_private = sum(&|r| r.plain) - rest.guest;
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Accel;

    #[test]
    fn shares_are_of_one_processor_and_what_came_back_costs_what_is_ours() {
        let account = |seconds: &[(&str, f64)], returned, idle, all| Account {
            seconds: seconds.iter().map(|(name, s)| (name.to_string(), *s)).collect(),
            returned,
            idle,
            all,
        };
        let before = account(&[("daemon", 1.0), ("qemu", 10.0)], 1e9, 100.0, 1000.0);
        let after = [("daemon", 3.0), ("ksmd", 4.0), ("qemu", 30.0)];
        let after = account(&after, 501e9, 150.0, 1200.0);
        let part = after.since(&before, Duration::from_secs(10));
        assert_eq!(part.idle, 0.25);
        let mut outcome = ExperimentResult::new("density", "6.1", Accel::Tcg);
        part.add(&mut outcome, "ebb");
        let of = |metric: &str| outcome.results.iter().find(|r| r.metric == metric).unwrap().value;
        assert_eq!((of("cpu_daemon"), of("cpu_ksmd"), of("cpu_qemu")), (0.2, 0.4, 2.0));
        assert_eq!((of("returned"), of("cpu_s_per_tb")), (5e11, 12.0), "QEMU's is not ours");
    }

    #[test]
    fn ram_that_is_open_to_ksm_in_parts_is_ram() {
        let region = |start, mib: u64, dontfork| Region {
            range: Range { start, len: mib << 20 },
            plain: start < 6 << 30,
            resident: Bytes::mib(mib),
            ksm: None,
            huge: Bytes::ZERO,
            mergeable: false,
            dontfork,
            hugetlb: false,
            shared: false,
        };
        let parts = [
            region(1 << 30, 300, true),
            region((1 << 30) + (300 << 20), 212, true),
            region(4 << 30, 16, true),
            region(5 << 30, 40, false),
            region(6 << 30, 24, false),
        ];
        let rest = of_regions(&parts, Bytes::mib(512));
        assert_eq!((rest.guest, rest.vmm), (Bytes::mib(512), Bytes::mib(80)));
        assert_eq!(rest.vmm_private, Bytes::mib(56));
    }
}
