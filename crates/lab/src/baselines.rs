//! Others' controllers on real VMs: the formulas of `ebb-sim`, told what QEMU and the
//! cgroup say, setting real balloons; and Debian's `ksmtuned` as it is.
//!
//! The budget is the formulas' host. They look as often as their sources do, and are called from an
//! experiment's loop. One controller lasts as long as its experiment, whichever VMs come and go:
//! what it remembers decides what it orders.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ebb_core::config::Config;
use ebb_core::sample::{BalloonSample, HostSample, Link, Meminfo, Sample, VmId, VmSample};
use ebb_core::units::Bytes;
use ebb_host::qmp_balloon;
use ebb_sim::baselines::mom::Mom;
use ebb_sim::baselines::{Observation, Policy};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::arena::MemoryCgroup;
use crate::setup;
use crate::vm::{Vm, VmError};

/// Where the lab's VMs have their balloon.
const BALLOON: &str = "/machine/peripheral/balloon0";

/// A controller.
pub struct Rival {
    policy: Box<dyn Policy>,
    /// VMs that QEMU asks for statistics, by process.
    asked: BTreeSet<u32>,
    cgroup: MemoryCgroup,
    budget: Bytes,
    config: Config,
    next: Instant,
    orders: u64,
}

impl Rival {
    pub fn mom(cgroup: &MemoryCgroup, budget: Bytes) -> Rival {
        Rival::new(Box::<Mom>::default(), cgroup, budget)
    }

    fn new(policy: Box<dyn Policy>, cgroup: &MemoryCgroup, budget: Bytes) -> Rival {
        Rival {
            policy,
            asked: BTreeSet::new(),
            cgroup: cgroup.clone(),
            budget,
            config: Config::default(),
            next: Instant::now(),
            orders: 0,
        }
    }

    /// Looks at the VMs that there are, and orders, if it is time to.
    pub fn tick(&mut self, vms: &[Vm]) -> Result<(), VmError> {
        let now = Instant::now();
        let seconds = (self.policy.told_every_ms() / 1000).max(1);
        for vm in vms.iter().filter(|vm| self.asked.insert(vm.pid)) {
            let ask = qmp_balloon::set(BALLOON, qmp_balloon::INTERVAL, json!(seconds));
            vm.qmp("qom-set", Some(ask))?;
        }
        if now < self.next {
            return Ok(());
        }
        self.next = now + Duration::from_millis(self.policy.period_ms());
        let sample = self.sample(vms)?;
        let observation = Observation { sample: &sample, config: &self.config, vmpressure: None };
        for (id, to) in self.policy.decide(&observation) {
            if let Some(vm) = vms.iter().find(|vm| vm.pid == id.pid) {
                vm.set_balloon(to)?;
                self.orders += 1;
            }
        }
        Ok(())
    }

    /// How many orders it gave.
    pub fn orders(&self) -> u64 {
        self.orders
    }

    fn sample(&self, vms: &[Vm]) -> Result<Sample, VmError> {
        let free = self.budget - self.cgroup.usage();
        let file = if self.cgroup.version == 1 { "cache" } else { "file" };
        let cached = self.cgroup.stat(file);
        let memory = Meminfo {
            total: self.budget,
            free,
            available: free + cached,
            cached,
            ..Meminfo::default()
        };
        Ok(Sample {
            vms: vms.iter().map(vm_sample).collect::<Result<_, _>>()?,
            host: HostSample { memory: Some(memory), ..HostSample::default() },
            ..Sample::default()
        })
    }
}

fn vm_sample(vm: &Vm) -> Result<VmSample, VmError> {
    let stats = vm.qmp("qom-get", Some(qmp_balloon::get(BALLOON, qmp_balloon::STATS)))?;
    let (guest, _) = qmp_balloon::parse_guest_stats(&stats, Some(vm.memory));
    Ok(VmSample {
        id: VmId { pid: vm.pid, start: 0 },
        name: vm.name.clone(),
        ram: Some(vm.memory),
        link: Link::Up,
        balloon: Some(BalloonSample { actual: vm.balloon()?, guest, ..BalloonSample::default() }),
        ..VmSample::default()
    })
}

/// Debian's `ksmtuned`, unpacked and run as it is, until dropped.
pub struct Ksmtuned(pub Pid);

impl Ksmtuned {
    /// It reads its settings from the environment.
    pub fn start(dir: &Path, settings: &[(&str, &str)]) -> anyhow::Result<Ksmtuned> {
        let pid = dir.join("ksmtuned.pid");
        let status = Command::new(setup::package("ksmtuned")?.join("usr/sbin/ksmtuned"))
            .envs(settings.iter().copied())
            .env("PIDFILE", &pid)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            bail!("ksmtuned: {status}");
        }
        let pid = std::fs::read_to_string(pid)?;
        Ok(Ksmtuned(Pid::from_raw(pid.trim().parse()?).context("ksmtuned has no pid")?))
    }
}

impl Drop for Ksmtuned {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// Orders nothing; keeps what it was told.
    struct Looks(Rc<RefCell<Vec<Bytes>>>);

    impl Policy for Looks {
        fn period_ms(&self) -> u64 {
            0
        }

        fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
            let memory = observation.sample.host.memory.unwrap_or_default();
            self.0.borrow_mut().push(memory.free);
            Vec::new()
        }
    }

    #[test]
    fn a_controller_remembers_while_vms_come_and_go_and_its_host_is_the_budget() {
        let dir = tempfile::tempdir().unwrap();
        let used = |mib: u64| {
            std::fs::write(dir.path().join("memory.current"), Bytes::mib(mib).0.to_string())
        };
        let cgroup = MemoryCgroup { dir: dir.path().into(), version: 2 };
        let told = Rc::new(RefCell::new(Vec::new()));
        let mut rival = Rival::new(Box::new(Looks(Rc::clone(&told))), &cgroup, Bytes::mib(100));
        for mib in [10, 40, 90] {
            used(mib).unwrap();
            rival.tick(&[]).unwrap();
        }
        assert_eq!(*told.borrow(), [90, 60, 10].map(Bytes::mib));
    }
}
