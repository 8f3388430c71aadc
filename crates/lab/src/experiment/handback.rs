//! `handback`: a guest that was shrunk suddenly needs its memory: how long until
//! it has it?
//!
//! Two VMs. The first is shrunk to what it needs and then touches a burst as fast
//! as it can. On the *idle* host there is headroom for all of it; on the *full* one the other
//! VM holds a file in its page cache, and the host must squeeze it first. `seconds` is the
//! guest's own clock from the first page of the burst to the last one; `ordered` is from
//! the guest tool's word that it begins to the order that grows it.
//!
//! Arms: `plain` (no Ebb: the guest was never shrunk; the full host swaps), `ebb-stock`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use ebb_core::units::Bytes;
use ebb_host::probe::vmstat::read_vmstat;
use ebb_host::root::Root;

use super::record;
use super::stage::{Fleet, Stage, names};
use crate::arena::{ArenaConfig, SwapKind};
use crate::ebb::Daemon;
use crate::image::Kernel;
use crate::result::ExperimentResult;
use crate::vm::Vm;
use crate::wall_ms;

pub const ARMS: [&str; 2] = ["plain", "ebb-stock"];
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Args)]
pub struct Handback {
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[arg(long, value_delimiter = ',', value_parser = ARMS, default_values = ARMS)]
    arms: Vec<String>,
    /// Bursts on each kind of host
    #[arg(long, default_value_t = 10)]
    runs: u32,
    /// RAM of each VM
    #[arg(long, default_value = "512MiB")]
    memory: Bytes,
    /// What the shrunk guest suddenly touches
    #[arg(long, default_value = "300MiB")]
    burst: Bytes,
    /// What the other guest holds in its page cache
    #[arg(long, default_value = "256MiB")]
    cache: Bytes,
    /// What both may hold on the idle host
    #[arg(long, default_value = "1600MiB")]
    idle_budget: Bytes,
    /// What both may hold on the full host
    #[arg(long, default_value = "760MiB")]
    full_budget: Bytes,
    /// Guest kernel
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    /// Keep Ebb's records in this directory
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
}

/// The bursts of an arm on one kind of host.
#[derive(Default)]
struct Bursts {
    seconds: Vec<f64>,
    ordered: Vec<f64>,
    swapped: Vec<f64>,
}

impl Handback {
    /// Runs every arm on both kinds of host, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        let mut outcome = ExperimentResult::of("handback", self.kernel)?;
        for arm in &self.arms {
            for (host, full) in [("idle", false), ("full", true)] {
                let bursts =
                    self.bursts(arm, full).with_context(|| format!("{arm}, {host} host"))?;
                let name = |metric: &str| match full {
                    true => format!("{metric}_squeezing"),
                    false => metric.to_string(),
                };
                outcome.add(arm, &name("seconds"), "seconds", &bursts.seconds);
                outcome.add(arm, &name("ordered"), "seconds", &bursts.ordered);
                outcome.add(arm, &name("swap_out_pages"), "count", &bursts.swapped);
            }
        }
        println!("\n{} needed by a guest; _squeezing: taken from another first", self.burst);
        print!("{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }

    fn bursts(&self, arm: &str, full: bool) -> Result<Bursts> {
        let budget = if full { self.full_budget } else { self.idle_budget };
        let config = ArenaConfig::limited(budget, Bytes::gib(1), SwapKind::Any);
        let stage = Stage::enter(&config, Some(self.cache))?;
        let vms = self.boot(&stage, arm)?;
        let daemon = stage.daemon(arm, &names(&vms), "")?;
        let mut bursts = Bursts::default();
        for n in 0..self.runs {
            self.prepare(&vms, daemon.as_ref(), full)?;
            self.burst(&vms[0], daemon.as_ref(), &mut bursts)?;
            let host = if full { "full" } else { "idle" };
            let ordered = bursts.ordered.last().map_or("-".into(), |s| format!("{s:.2} s"));
            let last = |v: &[f64]| v.last().copied().unwrap_or(0.0);
            println!(
                "{arm:<10} {host} host  burst {:>2}  {:>6.2} s  ordered {ordered:>7}  {:>6} pages swapped out",
                n + 1,
                last(&bursts.seconds),
                last(&bursts.swapped)
            );
        }
        daemon.map(Daemon::end_well).transpose()?;
        if let (Some(kept), true) = (&self.records, arm != "plain") {
            let name = format!("handback-{arm}-{}", if full { "full" } else { "idle" });
            record::keep(stage.dir(), kept, &name)?;
        }
        Ok(bursts)
    }

    fn boot(&self, stage: &Stage, arm: &str) -> Result<Vec<Vm>> {
        let (memory, kernel) = (self.memory, self.kernel);
        let vms = Fleet { name: "handback", arm, vms: 2, memory, kernel }.boot(stage)?;
        // As in a VM that has run for a while: all its memory has been in use.
        for vm in &vms {
            let all = format!("size={}", (self.burst + Bytes::mib(64)).0);
            vm.ask(|tool| tool.start_ready("all", "hold", &all, MINUTE))?;
            vm.ask(|tool| tool.stop("all"))?;
        }
        Ok(vms)
    }

    /// The asking guest small, the other's cache full.
    fn prepare(&self, vms: &[Vm], daemon: Option<&Daemon>, full: bool) -> Result<()> {
        let [asks, other] = vms else { bail!("two VMs") };
        if let Some(daemon) = daemon {
            // Down to what it needs; what it keeps above that the burst will use.
            let small = self.memory - self.burst.share(0.8);
            let mut asked = std::time::Instant::now();
            daemon.reclaim_vm(asks.name())?;
            asks.wait_for("the first guest to be small", MINUTE, |vm| {
                if asked.elapsed() > Duration::from_secs(5) {
                    asked = std::time::Instant::now();
                    let _ = daemon.reclaim_vm(vm.name());
                }
                vm.balloon().is_ok_and(|b| b <= small)
            })?;
        }
        if full {
            // Closing the device drops its cache, so it is read anew.
            let _ = other.tool().stop("read");
            let size = format!("size={}", self.cache.0);
            other.ask(|tool| tool.start_ready("read", "read", &size, MINUTE))?;
        }
        Ok(())
    }

    fn burst(&self, vm: &Vm, daemon: Option<&Daemon>, bursts: &mut Bursts) -> Result<()> {
        let out = || read_vmstat(&Root::default()).map(|v| v.map_or(0, |v| v.swap_out_pages));
        let before = out()?;
        let _ = vm.tool().take_events();
        let args = format!("size={} pattern=touch period_ms=1000 count=1", self.burst.0);
        vm.ask(|tool| tool.start("burst", "cycle", &args))?;
        vm.ask(|tool| tool.wait_event("burst", "ready", MINUTE))?;
        let began = wall_ms();
        let end = vm.ask(|tool| tool.wait_end("burst", 3 * MINUTE))?;
        bursts.seconds.push(end.u64("last_ns") as f64 / 1e9);
        bursts.swapped.push(out()?.saturating_sub(before) as f64);
        if let Some(daemon) = daemon {
            let decisions = daemon.decisions()?;
            let grown = decisions.iter().filter_map(|d| {
                let a = &d["action"];
                let grows = a["name"] == vm.name() && a["to"].as_u64() > a["from"].as_u64();
                // Its tick began a moment before it was decided.
                d["wall_ms"].as_u64().filter(|at| grows && at + 500 >= began)
            });
            bursts.ordered.extend(grown.min().map(|at| at.saturating_sub(began) as f64 / 1000.0));
        }
        Ok(())
    }
}
