//! `overhead`: what the daemon itself costs with three VMs, and how fast it
//! answers a guest in distress.
//!
//! Arms: `clear` (default tick, nothing ballooned), `ballooned` (fast tick). CPU
//! and memory are the kernel's own accounts of the daemon's process. Reaction is
//! from the guest tool's word that its burst begins to the tick that ordered the
//! balloon back: it includes the time the burst needs to make the guest short.

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use ebb_core::units::Bytes;
use ebb_host::probe::process::read_status;
use ebb_host::root::Root;
use serde_json::Value;

use super::stage::{Fleet, Stage, names};
use super::trial::Output;
use crate::arena::{ArenaConfig, SwapKind};
use crate::ebb::{Daemon, of};
use crate::result::ExperimentResult;
use crate::vm::{Vm, cpu_s};
use crate::wall_ms;

const MINUTE: Duration = Duration::from_secs(60);

/// A VM of which Ebb has taken memory is smaller.
const SMALL: Bytes = Bytes::mib(400);

#[derive(Clone, Debug, Args)]
pub struct Overhead {
    #[command(flatten)]
    output: Output,
    /// Measured seconds of each arm
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Bursts whose reaction is measured
    #[arg(long, default_value_t = 10)]
    bursts: u32,
}

impl Overhead {
    /// Runs, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        self.output.of("overhead", |outcome| self.measure(outcome))
    }

    fn measure(&self, outcome: &mut ExperimentResult) -> Result<()> {
        // Less than three guests hold that have touched 256 MiB each.
        let config = ArenaConfig::limited(Bytes::mib(1250), Bytes::gib(1), SwapKind::Any);
        let stage = Stage::enter(&config, None)?;
        let vms = self.boot(&stage)?;
        let names = names(&vms);
        let daemon = Daemon::start(stage.dir(), &names, "reserve = \"64MiB\"")?;
        // What is set aside for VMs that have just started is taken of them at first.
        daemon.wait_for("VMs that are owed nothing", 5 * MINUTE, |s| {
            all(s, &names, "ballooned", |b| b == 0)
        })?;
        self.cost((&daemon, &vms), "clear", outcome)?;
        daemon.stop();

        let daemon = Daemon::start(stage.dir(), &names, "reserve = \"600MiB\"")?;
        let is_small = |actual| actual < SMALL.0;
        daemon.wait_for("ballooned VMs", MINUTE, |s| all(s, &names, "actual", is_small))?;
        self.cost((&daemon, &vms), "ballooned", outcome)?;
        let mut reactions = Vec::new();
        for _ in 0..self.bursts {
            // On a host that is short a guest keeps what it needed within the last half hour.
            daemon.squeeze(&vms[0].name, SMALL)?;
            reactions.push(self.reaction(&daemon, &vms[0])?);
        }
        outcome.add("ballooned", "reaction", "seconds", &reactions);
        daemon.stop();
        Ok(())
    }

    fn boot(&self, stage: &Stage) -> Result<Vec<Vm>> {
        let (memory, kernel) = (Bytes::mib(512), self.output.kernel);
        let vms = Fleet { name: "over", arm: "plain", vms: 3, memory, kernel }.boot(stage)?;
        for vm in &vms {
            vm.ask(|tool| tool.start_ready("h", "hold", "size=201326592", MINUTE))?;
            vm.ask(|tool| tool.stop("h"))?;
        }
        Ok(vms)
    }

    /// What the daemon takes, and what all QEMUs take, their guests at rest included.
    fn cost(
        &self,
        (daemon, vms): (&Daemon, &[Vm]),
        arm: &str,
        outcome: &mut ExperimentResult,
    ) -> Result<()> {
        let all = || vms.iter().map(|vm| cpu_s(vm.pid)).sum::<Result<f64>>();
        let before = (cpu_s(daemon.pid())?, all()?);
        std::thread::sleep(Duration::from_secs(self.seconds));
        let share = (cpu_s(daemon.pid())? - before.0) / self.seconds as f64;
        let vms_share = (all()? - before.1) / self.seconds as f64;
        let memory =
            read_status(&Root::default(), daemon.pid())?.context("the daemon has ended")?;
        outcome.add(arm, "cpu_share", "ratio", &[share]);
        outcome.add(arm, "vms_cpu_share", "ratio", &[vms_share]);
        outcome.add(arm, "resident", "bytes", &[memory.resident().0 as f64]);
        Ok(())
    }

    fn reaction(&self, daemon: &Daemon, vm: &Vm) -> Result<f64> {
        let args = "size=356515840 period_ms=1000 hold_ms=1000 count=1";
        vm.ask(|tool| tool.start("burst", "cycle", args))?;
        vm.ask(|tool| tool.wait_event("burst", "ready", MINUTE))?;
        let began = wall_ms();
        let ordered = daemon.wait_for("order to grow", MINUTE, |_| {
            daemon.decisions().ok()?.iter().find_map(|d| {
                let ours = d["action"]["name"] == vm.name
                    && d["action"]["reason"]["rule"] == "guest_short"
                    && d["wall_ms"].as_u64()? + 100 >= began;
                ours.then(|| d["wall_ms"].as_u64())?
            })
        })?;
        vm.ask(|tool| tool.wait_end("burst", MINUTE))?;
        Ok(ordered.saturating_sub(began) as f64 / 1000.0)
    }
}

/// Whether this number of each VM is so.
fn all(state: &Value, names: &[&str], number: &str, is: impl Fn(u64) -> bool) -> bool {
    names.iter().all(|name| of(state, name)[number].as_u64().is_some_and(&is))
}
