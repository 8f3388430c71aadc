//! What the experiments share that compare tiers: a budget with swap behind it, a disk that all
//! VMs read, the VMs of an arm, and Ebb in the arms that have it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use ebb_core::sample::Vmstat;
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_host::probe::vmstat::read_vmstat;
use ebb_host::root::Root;
use tempfile::TempDir;

use super::record;
use super::trial::Figures;
use crate::arena::{Arena, ArenaConfig, MemoryCgroup};
use crate::ebb::Daemon;
use crate::guest_stack;
use crate::image::Kernel;
use crate::libvirt::{Domain, Libvirtd};
use crate::sampler::{Sampler, Series};
use crate::vm::{Balloon, Vm, VmConfig};
use crate::{LabError, wall_ms};

/// The machine for one run of an arm.
#[derive(Debug)]
pub struct Stage {
    dir: TempDir,
    /// What VMs write to it is dropped.
    pub disk: Option<PathBuf>,
    pub arena: Arena,
}

impl Stage {
    /// `disk`: how much of noise there is on the disk, if there is to be one.
    pub fn enter(config: &ArenaConfig, disk: Option<Bytes>) -> Result<Stage> {
        let arena = Arena::enter(config)?;
        let dir = tempfile::tempdir()?;
        let noise = |size| {
            let path = dir.path().join("disk");
            write_noise(&path, size).map(|()| path)
        };
        let disk = disk.map(noise).transpose()?;
        Ok(Stage { dir, disk, arena })
    }

    /// Where the daemon's files and the agents' sockets are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn cgroup(&self) -> Result<&MemoryCgroup> {
        self.arena.cgroup().context("no cgroup")
    }

    /// Has guests work, and watches what the machine does.
    pub fn watch<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, Watched)> {
        let sampler = Sampler::start(20, self.arena.cgroup().cloned());
        let (before, began_ms) = (swapped()?, wall_ms());
        let done = work()?;
        let (after, end_ms) = (swapped()?, wall_ms());
        let series = sampler.stop();
        warn_of_others(&series);
        let swap_in = after.swap_in_pages.saturating_sub(before.swap_in_pages);
        let swap_out = after.swap_out_pages.saturating_sub(before.swap_out_pages);
        Ok((done, Watched { series, began_ms, end_ms, swap_in, swap_out }))
    }

    /// Ebb, if the arm has it, beside VMs of these names.
    pub fn daemon(&self, arm: &str, names: &[&str], config: &str) -> Result<Option<Daemon>> {
        let start = || Daemon::start(self.dir(), names, config);
        Ok(arm.starts_with("ebb").then(start).transpose()?)
    }
}

/// What the machine did while guests worked.
#[derive(Debug)]
pub struct Watched {
    pub series: Series,
    pub began_ms: u64,
    end_ms: u64,
    swap_in: u64,
    swap_out: u64,
}

impl Watched {
    /// What the machine swapped meanwhile.
    pub fn swapped(&self) -> Figures {
        vec![
            ("swap_in_pages", "count", self.swap_in as f64),
            ("swap_out_pages", "count", self.swap_out as f64),
        ]
    }

    /// Ebb's ticks meanwhile. Stopping gives everything back: that is no turn of the controller's.
    pub fn ticks(&self, stage: &Stage) -> Result<Vec<Tick>> {
        let mut ticks = record::read(&stage.dir().join("record.jsonl"))?;
        ticks.retain(|t| (self.began_ms..=self.end_ms).contains(&t.sample.wall_ms));
        Ok(ticks)
    }

    /// Turns of direction of all sizes, per VM and minute.
    pub fn reversals(&self, ticks: &[Tick], vms: u32) -> f64 {
        let minutes = (self.end_ms - self.began_ms) as f64 / 60_000.0;
        record::reversals(ticks) as f64 / minutes / f64::from(vms)
    }
}

/// What the machine has swapped since it started.
pub fn swapped() -> Result<Vmstat> {
    read_vmstat(&Root::default())?.context("no /proc/vmstat")
}

/// Swap is counted for the whole machine: says so if not only the VMs use it.
pub fn warn_of_others(series: &Series) {
    let other = series.stat(|p| (p.swap - p.cgroup_swap).0 as f64).max;
    if other > (32 << 20) as f64 {
        println!("  others on this machine swapped too, up to {}", Bytes(other as u64));
    }
}

/// Fills a file with what cannot be compressed or merged.
pub fn write_noise(path: &Path, size: Bytes) -> Result<()> {
    let mut noise = std::fs::File::open("/dev/urandom")?.take(size.0);
    std::io::copy(&mut noise, &mut std::fs::File::create(path)?)?;
    Ok(())
}

/// Names of VMs, for a daemon.
pub fn names(vms: &[Vm]) -> Vec<&str> {
    vms.iter().map(|vm| vm.name.as_str()).collect()
}

/// The VMs of an arm, all of one kind.
#[derive(Debug)]
pub struct Fleet<'a> {
    /// Their names are this and a number.
    pub name: &'a str,
    pub arm: &'a str,
    pub vms: u32,
    pub memory: Bytes,
    pub kernel: Kernel,
}

impl Fleet<'_> {
    fn reporting(&self) -> bool {
        ["reporting", "mom", "ebb-stock"].iter().any(|a| self.arm.starts_with(a))
    }

    /// Whether they have agent and module (which need no reporting, and stand aside where it is on).
    pub fn has_module(&self) -> bool {
        ["ebb", "ebb-guest"].contains(&self.arm)
    }

    /// How the VM of this number is to be.
    pub fn config(&self, stage: &Stage, number: usize) -> Result<VmConfig, LabError> {
        let mut config = VmConfig::new(format!("{}{number}", self.name), self.memory);
        config.kernel = self.kernel;
        let deflate_on_oom = self.arm != "ebb-balloon";
        config.balloon = Some(Balloon { reporting: self.reporting(), deflate_on_oom });
        if self.has_module() {
            guest_stack::prepare(&mut config, stage.dir())?;
        }
        if let Some(disk) = &stage.disk {
            config.disks = vec![disk.clone()];
            config.args.push("-snapshot".into());
        }
        config.cgroup = stage.arena.cgroup().map(|c| c.dir.clone());
        Ok(config)
    }

    /// Boots them at the same time, in the arena's cgroup.
    pub fn boot(&self, stage: &Stage) -> Result<Vec<Vm>> {
        let configs = (1..=self.vms as usize).map(|number| self.config(stage, number));
        Ok(guest_stack::boot(&configs.collect::<Result<Vec<_>, _>>()?)?)
    }

    /// Boots them as domains of this libvirtd, one after the other; their kernel is 6.1.
    pub fn boot_domains(&self, stage: &Stage, libvirtd: &Libvirtd) -> Result<Vec<Domain>> {
        let reporting = if self.reporting() { "on" } else { "off" };
        let disk = stage.disk.as_deref().context("no disk")?;
        let devices = format!(
            "<memballoon model='virtio' autodeflate='on' freePageReporting='{reporting}'/>\
             <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>\
             <source file='{}'/><target dev='vda' bus='virtio'/><readonly/></disk>",
            disk.display()
        );
        let boot = |number| -> Result<Domain> {
            let name = format!("{}{number}", self.name);
            if !self.has_module() {
                return Ok(libvirtd.boot(&name, self.memory, &devices, "")?);
            }
            let domain = libvirtd.boot_with_agent(&name, self.memory, &devices)?;
            let loaded = domain.tool.sh(guest_stack::LOAD, Duration::from_secs(60));
            loaded.with_context(|| format!("the module in {name}"))?;
            Ok(domain)
        };
        (1..=self.vms).map(boot).collect()
    }
}
