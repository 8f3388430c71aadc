//! The demo's VMs: of the lab itself, or domains of a libvirtd.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use ebb_core::units::Bytes;

use crate::ebb::{self, Daemon};
use crate::experiment::cycles::Guest;
use crate::experiment::stage::{Fleet, Stage};
use crate::libvirt::{Domain, Libvirtd};
use crate::vm::Vm;

pub(super) enum Guests {
    Vms(Vec<Vm>),
    Domains(Libvirtd, Vec<Domain>),
}

impl Guests {
    pub fn boot(fleet: &Fleet<'_>, stage: &Stage, libvirt: bool) -> Result<Guests> {
        if !libvirt {
            return Ok(Guests::Vms(fleet.boot(stage)?));
        }
        let mut libvirtd = Libvirtd::start()?;
        if let Some(cgroup) = stage.arena.cgroup() {
            libvirtd.use_cgroup(&cgroup.dir)?;
        }
        let domains = fleet.boot_domains(stage, &libvirtd)?;
        Ok(Guests::Domains(libvirtd, domains))
    }

    pub fn all(&self) -> Vec<Guest<'_>> {
        match self {
            Guests::Vms(vms) => vms.iter().map(Guest::of_vm).collect(),
            Guests::Domains(_, domains) => domains.iter().map(of_domain).collect(),
        }
    }

    /// Starts an Ebb that manages them.
    pub fn daemon(&self, dir: &Path) -> Result<Daemon> {
        let names: Vec<&str> = self.all().iter().map(|g| g.name).collect();
        Daemon::configure(dir, &names, "")?;
        let program = match self {
            Guests::Vms(_) => ebb::binary()?,
            Guests::Domains(libvirtd, _) => libvirtd.program()?,
        };
        Ok(Daemon::start_program(&program, dir, &[])?)
    }

    /// Waits until each has all its memory.
    pub fn wait_whole(&self, memory: Bytes) -> Result<()> {
        let minute = Duration::from_secs(60);
        match self {
            Guests::Vms(vms) => vms.iter().try_for_each(|vm| {
                let is = |vm: &Vm| vm.balloon().is_ok_and(|b| b == memory);
                Ok(vm.wait_for("its memory back", minute, is)?)
            }),
            Guests::Domains(libvirtd, domains) => domains.iter().try_for_each(|d| {
                let is = |l: &Libvirtd| l.balloon(&d.name).is_ok_and(|b| b == memory);
                Ok(libvirtd.wait(&format!("all the memory of {}", d.name), is)?)
            }),
        }
    }
}

fn of_domain(domain: &Domain) -> Guest<'_> {
    Guest { name: &domain.name, pid: domain.pid, tool: &domain.tool, vm: None }
}
