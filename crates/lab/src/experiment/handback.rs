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

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use ebb_core::units::Bytes;

use super::stage::{Fleet, Stage, names, swapped};
use super::trial::Output;
use crate::arena::{ArenaConfig, SwapKind};
use crate::ebb::Daemon;
use crate::result::ExperimentResult;
use crate::vm::Vm;
use crate::wall_ms;

pub const ARMS: [&str; 2] = ["plain", "ebb-stock"];
const MINUTE: Duration = Duration::from_secs(60);
/// RAM of each VM.
const MEMORY: Bytes = Bytes::mib(512);
/// What the shrunk guest suddenly touches.
const BURST: Bytes = Bytes::mib(300);
/// What the other guest holds in its page cache.
const CACHE: Bytes = Bytes::mib(256);
/// What both may hold, on either host.
const IDLE_BUDGET: Bytes = Bytes::mib(1600);
const FULL_BUDGET: Bytes = Bytes::mib(760);

#[derive(Clone, Debug, Args)]
pub struct Handback {
    #[command(flatten)]
    output: Output,
    #[arg(long, value_delimiter = ',', value_parser = ARMS, default_values = ARMS)]
    arms: Vec<String>,
    /// Bursts on each kind of host
    #[arg(long, default_value_t = 10)]
    runs: u32,
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
        println!("{BURST} needed by a guest; _squeezing: taken from another first");
        self.output.of("handback", |outcome| self.measure(outcome))
    }

    fn measure(&self, outcome: &mut ExperimentResult) -> Result<()> {
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
        Ok(())
    }

    fn bursts(&self, arm: &str, full: bool) -> Result<Bursts> {
        let budget = if full { FULL_BUDGET } else { IDLE_BUDGET };
        let config = ArenaConfig::limited(budget, Bytes::gib(1), SwapKind::Any);
        let stage = Stage::enter(&config, Some(CACHE))?;
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
        Ok(bursts)
    }

    fn boot(&self, stage: &Stage, arm: &str) -> Result<Vec<Vm>> {
        let kernel = self.output.kernel;
        let vms = Fleet { name: "handback", arm, vms: 2, memory: MEMORY, kernel }.boot(stage)?;
        // As in a VM that has run for a while: all its memory has been in use.
        for vm in &vms {
            let all = format!("size={}", (BURST + Bytes::mib(64)).0);
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
            let small = MEMORY - BURST.share(0.8);
            let mut asked = Instant::now();
            daemon.reclaim_vm(&asks.name)?;
            asks.wait_for("the first guest to be small", MINUTE, |vm| {
                if asked.elapsed() > Duration::from_secs(5) {
                    asked = Instant::now();
                    let _ = daemon.reclaim_vm(&vm.name);
                }
                vm.balloon().is_ok_and(|b| b <= small)
            })?;
        }
        if full {
            // Closing the device drops its cache, so it is read anew.
            let _ = other.tool().stop("read");
            let size = format!("size={}", CACHE.0);
            other.ask(|tool| tool.start_ready("read", "read", &size, MINUTE))?;
        }
        Ok(())
    }

    fn burst(&self, vm: &Vm, daemon: Option<&Daemon>, bursts: &mut Bursts) -> Result<()> {
        let before = swapped()?.swap_out_pages;
        let _ = vm.tool().take_events();
        let args = format!("size={} pattern=touch period_ms=1000 count=1", BURST.0);
        vm.ask(|tool| tool.start("burst", "cycle", &args))?;
        vm.ask(|tool| tool.wait_event("burst", "ready", MINUTE))?;
        let began = wall_ms();
        let end = vm.ask(|tool| tool.wait_end("burst", 3 * MINUTE))?;
        bursts.seconds.push(end.u64("last_ns") as f64 / 1e9);
        bursts.swapped.push(swapped()?.swap_out_pages.saturating_sub(before) as f64);
        if let Some(daemon) = daemon {
            let decisions = daemon.decisions()?;
            let grown = decisions.iter().filter_map(|d| {
                let a = &d["action"];
                let grows = a["name"] == vm.name && a["to"].as_u64() > a["from"].as_u64();
                // Its tick began a moment before it was decided.
                d["wall_ms"].as_u64().filter(|at| grows && at + 500 >= began)
            });
            bursts.ordered.extend(grown.min().map(|at| at.saturating_sub(began) as f64 / 1000.0));
        }
        Ok(())
    }
}
