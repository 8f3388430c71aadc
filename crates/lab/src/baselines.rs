//! Others' controllers on real VMs: the formulas of `ebb-sim`, told what QEMU and the
//! cgroup say, setting real balloons.
//!
//! The budget is their host. They look as often as their sources do, and are called from an
//! experiment's loop.

use std::time::{Duration, Instant};

use ebb_core::config::Config;
use ebb_core::sample::{BalloonSample, HostSample, Link, Meminfo, Sample, VmId, VmSample};
use ebb_core::units::Bytes;
use ebb_host::qmp_balloon;
use ebb_sim::baselines::mom::Mom;
use ebb_sim::baselines::{Policy, Sight};
use serde_json::json;

use crate::arena::MemoryCgroup;
use crate::vm::{Vm, VmError};

/// Where the lab's VMs have their balloon.
const BALLOON: &str = "/machine/peripheral/balloon0";

/// A controller and the VMs that it has.
pub struct Rival<'a> {
    policy: Box<dyn Policy>,
    vms: &'a [Vm],
    cgroup: MemoryCgroup,
    budget: Bytes,
    config: Config,
    next: Instant,
    orders: u64,
}

impl<'a> Rival<'a> {
    pub fn mom(vms: &'a [Vm], cgroup: &MemoryCgroup, budget: Bytes) -> Result<Self, VmError> {
        Rival::start(Box::<Mom>::default(), vms, cgroup, budget)
    }

    fn start(
        policy: Box<dyn Policy>,
        vms: &'a [Vm],
        cgroup: &MemoryCgroup,
        budget: Bytes,
    ) -> Result<Self, VmError> {
        let seconds = (policy.told_every_ms() / 1000).max(1);
        for vm in vms {
            vm.qmp(
                "qom-set",
                Some(qmp_balloon::set(BALLOON, qmp_balloon::INTERVAL, json!(seconds))),
            )?;
        }
        Ok(Rival {
            policy,
            vms,
            cgroup: cgroup.clone(),
            budget,
            config: Config::default(),
            next: Instant::now(),
            orders: 0,
        })
    }

    /// Looks and orders, if it is time to.
    pub fn tick(&mut self) -> Result<(), VmError> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + Duration::from_millis(self.policy.period_ms());
        let sample = self.sample()?;
        let sight = Sight { sample: &sample, config: &self.config, vmpressure: None };
        for (id, to) in self.policy.decide(&sight) {
            if let Some(vm) = self.vms.iter().find(|vm| vm.pid() == id.pid) {
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

    fn sample(&self) -> Result<Sample, VmError> {
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
            vms: self.vms.iter().map(vm_sample).collect::<Result<_, _>>()?,
            host: HostSample { memory: Some(memory), ..HostSample::default() },
            ..Sample::default()
        })
    }
}

fn vm_sample(vm: &Vm) -> Result<VmSample, VmError> {
    let stats = vm.qmp("qom-get", Some(qmp_balloon::get(BALLOON, qmp_balloon::STATS)))?;
    let (guest, _) = qmp_balloon::parse_guest_stats(&stats, Some(vm.memory()));
    Ok(VmSample {
        id: VmId { pid: vm.pid(), start: 0 },
        name: vm.name().into(),
        ram: Some(vm.memory()),
        link: Link::Up,
        balloon: Some(BalloonSample { actual: vm.balloon()?, guest, ..BalloonSample::default() }),
        ..VmSample::default()
    })
}
