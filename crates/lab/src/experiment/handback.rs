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

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use ebb_core::units::Bytes;
use ebb_host::probe::vmstat::read_vmstat;
use ebb_host::root::Root;

use crate::arena::{Arena, ArenaConfig, SwapConfig, SwapKind};
use crate::ebb::Daemon;
use crate::experiment::demo::write_noise;
use crate::experiment::record;
use crate::image::Kernel;
use crate::result::ExperimentResult;
use crate::vm::{Balloon, Vm, VmConfig};
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
        let mut outcome = None;
        for arm in &self.arms {
            for (host, full) in [("idle", false), ("full", true)] {
                let (bursts, fresh) =
                    self.bursts(arm, full).with_context(|| format!("{arm}, {host} host"))?;
                let outcome = outcome.get_or_insert(fresh);
                let name = |metric: &str| match full {
                    true => format!("{metric}_squeezing"),
                    false => metric.to_string(),
                };
                outcome.add(arm, &name("seconds"), "seconds", &bursts.seconds);
                outcome.add(arm, &name("ordered"), "seconds", &bursts.ordered);
                outcome.add(arm, &name("swap_out_pages"), "count", &bursts.swapped);
            }
        }
        let Some(outcome) = outcome else { return Ok(()) };
        println!("\n{} needed by a guest; _squeezing: taken from another first", self.burst);
        print!("{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }

    fn bursts(&self, arm: &str, full: bool) -> Result<(Bursts, ExperimentResult)> {
        let budget = Some(if full { self.full_budget } else { self.idle_budget });
        let swap = Some(SwapConfig { size: Bytes::gib(1), kind: SwapKind::Any, priority: 100 });
        let arena = Arena::enter(&ArenaConfig { budget, swap, ..ArenaConfig::default() })?;
        let dir = tempfile::tempdir()?;
        let disk = dir.path().join("disk");
        write_noise(&disk, self.cache)?;
        let vms = self.boot(&arena, arm, &disk)?;
        let names = [vms[0].name(), vms[1].name()];
        let daemon = (arm != "plain").then(|| Daemon::start(dir.path(), &names, "")).transpose()?;
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
            record::keep(dir.path(), kept, &name)?;
        }
        Ok((bursts, ExperimentResult::new("handback", vms[0].release(), vms[0].accel())))
    }

    fn boot(&self, arena: &Arena, arm: &str, disk: &Path) -> Result<Vec<Vm>> {
        let mut vms = Vec::new();
        for name in ["asks", "other"] {
            let mut config = VmConfig::new(name, self.memory);
            config.kernel = self.kernel;
            config.balloon = Some(Balloon { reporting: arm != "plain", deflate_on_oom: true });
            config.disks = vec![disk.into()];
            config.args.push("-snapshot".into());
            config.cgroup = arena.cgroup().map(|c| c.dir.clone());
            vms.push(Vm::spawn(&config)?);
        }
        vms.iter_mut().try_for_each(Vm::wait_ready)?;
        // As in a VM that has run for a while: all its memory has been in use.
        for vm in &vms {
            let all = format!("size={}", (self.burst + Bytes::mib(64)).0);
            vm.tool().start_ready("all", "hold", &all, MINUTE).map_err(|e| vm.explain(e))?;
            vm.tool().stop("all").map_err(|e| vm.explain(e))?;
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
                vm.balloon().is_ok_and(|b| b <= small).then_some(())
            })?;
        }
        if full {
            // Closing the device drops its cache, so it is read anew.
            let _ = other.tool().stop("read");
            let size = format!("size={}", self.cache.0);
            other
                .tool()
                .start_ready("read", "read", &size, MINUTE)
                .map_err(|e| other.explain(e))?;
        }
        Ok(())
    }

    fn burst(&self, vm: &Vm, daemon: Option<&Daemon>, bursts: &mut Bursts) -> Result<()> {
        let out = || read_vmstat(&Root::default()).map(|v| v.map_or(0, |v| v.swap_out_pages));
        let before = out()?;
        let _ = vm.tool().take_events();
        let args = format!("size={} pattern=touch period_ms=1000 count=1", self.burst.0);
        vm.tool().start("burst", "cycle", &args).map_err(|e| vm.explain(e))?;
        vm.tool().wait_event("burst", "ready", MINUTE).map_err(|e| vm.explain(e))?;
        let began = wall_ms();
        let end = vm.tool().wait_end("burst", 3 * MINUTE).map_err(|e| vm.explain(e))?;
        bursts.seconds.push(end.u64("last_ns") as f64 / 1e9);
        bursts.swapped.push(out()?.saturating_sub(before) as f64);
        if let Some(daemon) = daemon {
            let decisions = daemon.get("/v1/decisions")?;
            let grown = decisions.as_array().into_iter().flatten().filter_map(|d| {
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
