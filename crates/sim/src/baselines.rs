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
    use super::hypeman::Hypeman;
    use super::proxmox::Proxmox;
    use super::qmemman::Qmemman;
    use super::simple::{BalanceAvailable, Demand, NoController, StaticSplit};
    use super::squeezed::Squeezed;
    use super::*;
    use ebb_core::sample::{BalloonSample, GuestStats, HostSample, Meminfo, Sample};

    /// RAM, size, free and cache, MiB.
    type Guest = (u64, u64, u64, u64);

    /// A host of `total` with `free` MiB.
    pub fn sample(total: u64, free: u64, guests: &[Guest]) -> Sample {
        let vm = |(&(ram, actual, free, caches), pid): (&Guest, u32)| {
            let [ram, actual, free, caches] = [ram, actual, free, caches].map(Bytes::mib);
            let (free, caches) = (Some(free), Some(caches));
            let guest = Some(GuestStats { free, caches, ..GuestStats::default() });
            let balloon = Some(BalloonSample { actual, guest, ..BalloonSample::default() });
            let (id, name, link) = (id(pid), format!("vm{pid}"), Link::Up);
            VmSample { id, name, ram: Some(ram), link, balloon, ..VmSample::default() }
        };
        let (total, free) = (Bytes::mib(total), Bytes::mib(free));
        let memory = Some(Meminfo { total, free, available: free, ..Meminfo::default() });
        let host = HostSample { memory, ..HostSample::default() };
        let vms = guests.iter().zip(1..).map(vm).collect();
        Sample { vms, host, ..Sample::default() }
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

    fn decides(
        mut policy: impl Policy,
        (total, free): (u64, u64),
        guests: &[Guest],
        orders: &[(u32, u64)],
    ) {
        let said = ask(&mut policy, &sample(total, free, guests));
        assert_eq!(said, orders, "{total} {free} {guests:?}");
    }

    #[test]
    fn each_decides_at_its_first_look_as_its_original_would() {
        let two = [(800, 800, 600, 0), (800, 400, 0, 0)];
        // 940 are for guests.
        decides(NoController, (1000, 500), &two, &[]);
        decides(StaticSplit, (1000, 500), &two, &[(1, 470), (2, 470)]);
        // 200 and 400 are used: 240 and 480, and 110 more for each.
        decides(Demand, (1000, 500), &two, &[(1, 350), (2, 590)]);
        // The host has 450 above what is critical, half of it for each: 560 and none.
        decides(BalanceAvailable, (1000, 500), &two, &[(1, 632), (2, 532)]);

        let two = [(1000, 1000, 0, 0), (2000, 2000, 0, 0)];
        // 15 % of 4,000 is 600, and 300 are available; floors of a quarter leave 750 and 1,500.
        decides(Hypeman::default(), (4000, 300), &two, &[(1, 900), (2, 1800)]);
        // Not low yet.
        decides(Hypeman::default(), (4000, 500), &two, &[]);
        // 600 are missing: 200 and 400, of which one order takes 256.
        decides(Hypeman::default(), (4000, 0), &two, &[(1, 800), (2, 1744)]);

        // A host at its target is left alone.
        decides(Proxmox, (10_000, 1991), &[(1000, 900, 800, 0)], &[]);
        // Used 9,000 of 10,000: goal −1,000. Roomy: free above 62.5. First and second are to have
        // 250 + (750 + 750 − 1000) / 2 = 500: both step to 900, by a hundred at most.
        let roomy = [(1000, 1000, 800, 0), (1000, 1000, 700, 0), (1000, 1000, 50, 0)];
        decides(Proxmox, (10_000, 1000), &roomy, &[(1, 900), (2, 900)]);
        // Goal −60: 250 + (1500 − 60) / 2 = 970.
        decides(Proxmox, (10_000, 1940), &roomy[..2], &[(1, 970), (2, 970)]);
        // Goal +1000. The second has 50 free: 250 + (450 + 1000) clamped to 1000: 800.
        let tight = [(1000, 700, 600, 0), (1000, 700, 50, 0)];
        decides(Proxmox, (10_000, 3000), &tight, &[(2, 800)]);
        // None is tight: all grow, and nobody beyond its maximum.
        let roomy = [(1000, 700, 600, 0), (1000, 960, 600, 0)];
        decides(Proxmox, (10_000, 3000), &roomy, &[(1, 800), (2, 1000)]);

        // Enough for all: the rest is shared by preference. 50 are left free: 1,950. Used 500 and
        // 500 (cache is not): 650 each, at 900 each: 150 free, needed −500: 650 to share:
        // 0.999 · (650 + 325) = 974.
        let two = [(2000, 900, 100, 300), (2000, 900, 400, 0)];
        decides(Qmemman::default(), (2000, 0), &two, &[(1, 974), (2, 974)]);
        // What one cannot take goes to the others. Preferences 650 (max 700) and 650; 2,950 − 1,300
        // = 1,650: 0.999 · 1475 = 1473.5, of which the first cannot have 773.5: 1473.5 +
        // 0.999 · 773.5 = 2246.
        let two = [(700, 700, 200, 0), (4000, 900, 400, 0)];
        decides(Qmemman::default(), (3000, 0), &two, &[(1, 700), (2, 2246)]);
        // Too little: the rich are brought to their preference, the other gets it in the next
        // round. Used 100 (preference 200 at least, floor 250) and 900 (as much as it may have:
        // 1000). 1,150 − 1,900 free, 650 needed.
        let two = [(1000, 1000, 900, 0), (1000, 900, 0, 0)];
        decides(Qmemman::default(), (1200, 0), &two, &[(1, 250)]);
        // Small plans are dropped. Preferences 650 + 650, sizes 975 + 975, free 0: moves 2.
        decides(Qmemman::default(), (2000, 0), &[(2000, 975, 475, 0); 2], &[]);

        // Everybody gets the same fraction of its range, whatever it needs. Reserve of 4,000: 800.
        // Minimum 500 each, 1,000 in all; (3200 − 1000) / 3000 = 0.733: 500 + 1100.
        let two = [(2000, 2000, 1900, 0), (2000, 2000, 10, 0)];
        decides(Squeezed::default(), (4000, 0), &two, &[(1, 1600), (2, 1600)]);
    }
}
