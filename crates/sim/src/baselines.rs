//! How others decide: baselines that Ebb is measured against.
//!
//! Each sees the same [`Sample`]s as Ebb, keeps the same floors, and sets the same
//! balloons. The formulas are those of the originals; what had to be carried over
//! from another hypervisor is said where it was. None of them knows of host swap
//! costs, trust, or what a guest really needs beyond what it says.

pub mod hypeman;
pub mod mom;
pub mod proxmox;
pub mod qmemman;
pub mod simple;
pub mod squeezed;
pub mod vmpressure;

use ebb_core::config::Config;
use ebb_core::sample::{Link, Sample, VmId, VmSample};
use ebb_core::units::Bytes;

use crate::guest_stats::ASKED_EVERY_MS;
use crate::host::VmPressure;

/// What a policy sees.
pub struct Observation<'a> {
    /// Host and guests.
    pub sample: &'a Sample,
    /// Floors and weights.
    pub config: &'a Config,
    /// The kernel's vmpressure event since the last look.
    pub vmpressure: Option<VmPressure>,
}

/// One who sets balloons.
pub trait Policy {
    /// How often it looks, ms.
    fn period_ms(&self) -> u64 {
        1_000
    }
    /// How often guests send statistics, ms. Less than [`ASKED_EVERY_MS`]: they do so unasked.
    fn told_every_ms(&self) -> u64 {
        ASKED_EVERY_MS
    }
    /// The sizes it wants from now on, in the order in which they are set.
    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)>;
    /// Whether guests have the driver of the proposal of 2013, whose shrinker deflates by itself.
    fn shrinker(&self) -> bool {
        false
    }
}

/// A guest as a rival sees it.
#[derive(Clone, Copy, Debug)]
pub struct GuestView {
    pub id: VmId,
    pub ram: Bytes,
    /// RAM less balloon.
    pub actual: Bytes,
    /// The floor.
    pub min: Bytes,
    pub weight: f64,
    /// Free memory, as the guest says; `None`: it says nothing.
    pub free: Option<Bytes>,
    /// Page cache, as it says.
    pub caches: Bytes,
}

impl Observation<'_> {
    /// The guests whose QMP answers and that have a balloon.
    pub fn guests(&self) -> Vec<GuestView> {
        self.sample.vms.iter().filter_map(|vm| self.guest(vm)).collect()
    }

    /// The host's memory less what others than VMs use: on Xen, where some of the rivals come from,
    /// dom0 has its own. Where a VM's residency is not known, all of it is taken for VMs'.
    fn for_vms(&self) -> Option<f64> {
        let m = self.sample.host.memory?;
        let held = |vm: &VmSample| vm.process.map(|p| p.resident());
        let held: Option<Bytes> = self.sample.vms.iter().map(held).sum();
        let others = held.map_or(Bytes::ZERO, |held| m.total - m.available - held);
        Some(signed(m.total - others))
    }

    fn guest(&self, vm: &VmSample) -> Option<GuestView> {
        let balloon = vm.balloon.as_ref().filter(|_| vm.link == Link::Up)?;
        let settings = self.config.settings(&vm.name, None);
        let ram = vm.ram?;
        Some(GuestView {
            id: vm.id,
            ram,
            actual: balloon.actual,
            min: settings.min.of(ram),
            weight: settings.weight,
            free: balloon.guest.and_then(|g| g.free),
            caches: balloon.guest.and_then(|g| g.caches).unwrap_or_default(),
        })
    }
}

/// A signed share of bytes, as formulas of others have them.
fn signed(b: Bytes) -> f64 {
    b.0 as f64
}

/// Back to bytes; negative is none.
fn bytes(v: f64) -> Bytes {
    Bytes(v.max(0.0) as u64)
}

#[cfg(test)]
mod testing {
    //! Hand-made sights for the formulas.
    use super::*;
    use ebb_core::sample::{BalloonSample, GuestStats, HostSample, Meminfo, Sample};

    /// A host of `total` with `free` MiB; guests of (ram, actual, free, caches) MiB.
    pub fn sample(total: u64, free: u64, guests: &[(u64, u64, u64, u64)]) -> Sample {
        let vms = guests.iter().zip(1u32..).map(|(&(ram, actual, free, caches), pid)| VmSample {
            id: id(pid),
            name: format!("vm{pid}"),
            ram: Some(Bytes::mib(ram)),
            link: Link::Up,
            balloon: Some(BalloonSample {
                actual: Bytes::mib(actual),
                guest: Some(GuestStats {
                    free: Some(Bytes::mib(free)),
                    caches: Some(Bytes::mib(caches)),
                    ..GuestStats::default()
                }),
                ..BalloonSample::default()
            }),
            ..VmSample::default()
        });
        let memory = Meminfo {
            total: Bytes::mib(total),
            free: Bytes::mib(free),
            available: Bytes::mib(free),
            ..Meminfo::default()
        };
        Sample {
            vms: vms.collect(),
            host: HostSample { memory: Some(memory), ..HostSample::default() },
            ..Sample::default()
        }
    }

    pub fn id(pid: u32) -> VmId {
        VmId { pid, start: 1 }
    }

    /// What a policy answers, in MiB, in its order.
    pub fn ask(policy: &mut dyn Policy, sample: &Sample) -> Vec<(u32, u64)> {
        let config = Config::default();
        let observation = Observation { sample, config: &config, vmpressure: None };
        policy.decide(&observation).into_iter().map(|(id, to)| (id.pid, to.0 >> 20)).collect()
    }
}
