//! `demo`: three VMs on a host that is too small for them, without and with Ebb.
//!
//! Each VM keeps a base and, in turn, allocates, holds and frees a burst, and a
//! while later reads a file once. What their programs use at any moment fits the budget; what
//! the guests keep (freed pages, page cache) does not. A host that gets nothing
//! back must swap. Arms: `plain` (no reporting, no Ebb), `reporting` (QEMU's free
//! page reporting alone), `ebb-stock` (reporting, and Ebb with nothing in VM or
//! VMM), `ebb` (all tiers: agent in QEMU and module in the guest as well). The VMs are the lab's
//! own, with a QMP socket for Ebb, or domains of a libvirtd.

mod guests;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use ebb_core::units::Bytes;
use serde_json::Value;

use self::guests::Guests;
use super::cycles::{Cycle, Cycles, Guest};
use super::stage::{Fleet, Stage};
use super::trial::Output;
use crate::arena::{ArenaConfig, SwapKind};
use crate::ebb::{Daemon, of};
use crate::result::ExperimentResult;
use crate::sampler::{Sampler, Series};

pub const ARMS: [&str; 4] = ["plain", "reporting", "ebb-stock", "ebb"];

const VMS: u32 = 3;
const MEMORY: Bytes = Bytes::mib(512);
/// What all VMs together may hold.
const BUDGET: Bytes = Bytes::mib(1100);
const CYCLE: Cycle = Cycle {
    base: Bytes::mib(32),
    job: Bytes::mib(256),
    cache: Bytes::mib(160),
    period: Duration::from_secs(24),
    hold: Duration::from_secs(6),
    apart: Duration::from_secs(24 / VMS as u64),
};

#[derive(Clone, Debug, Args)]
pub struct Demo {
    #[command(flatten)]
    output: Output,
    /// Arms, in this order
    #[arg(long, value_delimiter = ',', value_parser = ARMS, default_values = ARMS)]
    arms: Vec<String>,
    /// Measured seconds of each arm
    #[arg(long, default_value_t = 72)]
    seconds: u64,
    /// The VMs are domains of a libvirtd
    #[arg(long, conflicts_with = "kernel")]
    libvirt: bool,
}

/// What one arm came to.
struct ArmResult {
    series: Series,
    /// Time from each free until the host had 90 % of it, or the guest used it
    /// again (a quarter of a period later); those still waiting at
    /// that moment count with the time they waited.
    free_to_host: Vec<f64>,
    never: usize,
    bursts: u64,
    /// The longest a guest needed to allocate and touch its burst, seconds.
    slowest: f64,
    last_state: Option<Value>,
}

impl Demo {
    /// Runs every arm, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        let what = if self.libvirt { "domains of libvirt" } else { "VMs" };
        println!(
            "{} {what} of {} on a budget of {}, zram swap behind it: each keeps {}, uses {} more in turn, then reads {}",
            VMS, MEMORY, BUDGET, CYCLE.base, CYCLE.job, CYCLE.cache
        );
        self.output.of("demo", |outcome| {
            self.arms.iter().try_for_each(|arm| {
                let result = self.arm(arm).with_context(|| format!("arm {arm}"))?;
                result.add(outcome, arm);
                Ok(())
            })
        })
    }

    fn arm(&self, arm: &str) -> Result<ArmResult> {
        println!("\n== {arm}");
        let config = ArenaConfig::limited(BUDGET, Bytes::gib(1), SwapKind::Any);
        let stage = Stage::enter(&config, Some(CYCLE.cache))?;
        let fleet =
            Fleet { name: "demo", arm, vms: VMS, memory: MEMORY, kernel: self.output.kernel };
        let guests = Guests::boot(&fleet, &stage, self.libvirt)?;
        let daemon = arm.starts_with("ebb").then(|| guests.daemon(stage.dir())).transpose()?;
        let sampler = Sampler::start(10, stage.arena.cgroup().cloned());
        let vms = guests.all();
        for vm in &vms {
            sampler.watch(vm.name, vm.pid);
        }
        let mut watch = Watch::default();
        watch.run(self, vms, &sampler, daemon.as_ref())?;
        let last_state = daemon.as_ref().and_then(|d| d.state().ok());
        let mut result = watch.finish(sampler.stop());
        result.last_state = last_state;
        if let Some(daemon) = daemon {
            self.stop(daemon, &guests)?;
        }
        Ok(result)
    }

    /// Stops Ebb as a user would and checks that every guest is whole again.
    fn stop(&self, daemon: Daemon, guests: &Guests) -> Result<()> {
        daemon.end_well()?;
        guests.wait_whole(MEMORY)?;
        println!("ebb stopped; every VM has its {MEMORY} again");
        Ok(())
    }
}

impl ArmResult {
    fn add(&self, outcome: &mut ExperimentResult, arm: &str) {
        let held = self.series.stat(|p| (p.cgroup + p.cgroup_swap).0 as f64);
        let used = self.series.stat(|p| p.cgroup.0 as f64);
        let swapped = self.series.stat(|p| p.cgroup_swap.0 as f64);
        let mut add = |metric: &str, unit, values: &[f64]| outcome.add(arm, metric, unit, values);
        add("held_mean", "bytes", &[held.mean]);
        add("resident_peak", "bytes", &[used.max]);
        add("resident_mean", "bytes", &[used.mean]);
        add("swap_peak", "bytes", &[swapped.max]);
        add("free_to_host_p95", "seconds", &[p95(&self.free_to_host)]);
        add("frees", "count", &[self.free_to_host.len() as f64]);
        add("frees_reused_first", "count", &[self.never as f64]);
        add("bursts", "count", &[self.bursts as f64]);
        add("slowest_burst", "seconds", &[self.slowest]);
        let Some(state) = &self.last_state else { return };
        // What came back of each VM by which mechanism, as Ebb accounts it.
        let vms = || state["vms"].as_array().into_iter().flatten();
        for key in ["recycled", "balloon", "reporting", "swap", "given_back"] {
            let each = vms().map(|vm| vm["returned"][key].as_f64().unwrap_or(0.0));
            add(&format!("returned_{key}"), "bytes", &each.collect::<Vec<_>>());
        }
        let number = |key: &str| state["daemon"][key].as_f64().unwrap_or(0.0);
        add("daemon_cpu_share", "ratio", &[number("cpu_s") / number("uptime_s").max(1.0)]);
        add("daemon_resident", "bytes", &[number("resident")]);
    }
}

fn p95(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 * 0.95).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Remembers when what was freed.
#[derive(Default)]
struct Watch {
    names: Vec<String>,
    /// VM and moment of each free.
    frees: Vec<(usize, Duration)>,
    bursts: u64,
    slowest: f64,
}

impl Watch {
    fn run(
        &mut self,
        demo: &Demo,
        vms: Vec<Guest<'_>>,
        sampler: &Sampler,
        daemon: Option<&Daemon>,
    ) -> Result<()> {
        self.names = vms.iter().map(|vm| vm.name.to_string()).collect();
        let mut cycles = Cycles::new(CYCLE, vms);
        let mut line = Duration::ZERO;
        while cycles.elapsed() < Duration::from_secs(demo.seconds) {
            for (vm, seconds) in cycles.step()? {
                self.frees.push((vm, sampler.now()));
                self.bursts += 1;
                self.slowest = self.slowest.max(seconds);
            }
            if cycles.elapsed() >= line {
                self.print(sampler, daemon, line);
                line += Duration::from_secs(2);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn print(&self, sampler: &Sampler, daemon: Option<&Daemon>, at: Duration) {
        let series = sampler.series();
        let Some(p) = series.points.last() else { return };
        if at.is_zero() {
            let names: String = self.names.iter().map(|name| format!("  {name:<17}")).collect();
            println!(
                "{:>6}{:<29}{:<14}{names}{}",
                "",
                "  held by all, of the budget",
                "  in swap",
                if daemon.is_some() { "  (resident/size)" } else { "  (resident)" }
            );
        }
        let state = daemon.and_then(|d| d.state().ok());
        let mut line = format!(
            "{:>4} s  held {:>8} of {:>8}  swap {:>8}",
            at.as_secs(),
            p.cgroup.to_string(),
            BUDGET.to_string(),
            p.cgroup_swap.to_string()
        );
        for (n, r) in p.resident.iter().enumerate() {
            let size = state.as_ref().and_then(|s| of(s, &self.names[n])["actual"].as_u64());
            line += &match size {
                Some(size) => format!("  {:>8}/{:<8}", r.to_string(), Bytes(size).to_string()),
                None => format!("  {:>8}{:9}", r.to_string(), ""),
            };
        }
        if let Some(s) = &state {
            line += &format!("  {}", s["host"]["state"].as_str().unwrap_or("?"));
        }
        println!("{line}");
        if std::io::stdout().is_terminal() {
            let _ = std::io::stdout().flush();
        }
    }

    /// Reads from the series when each free reached the host.
    fn finish(self, series: Series) -> ArmResult {
        let mut free_to_host = Vec::new();
        let mut never = 0;
        let end = series.points.last().map_or(Duration::ZERO, |p| p.at);
        for (vm, freed) in &self.frees {
            let own = |p: &crate::sampler::Point| p.resident[*vm];
            let Some(held) = series.points.iter().rev().find(|p| p.at <= *freed).map(own) else {
                continue;
            };
            // Then the guest takes it for its page cache.
            let until = (*freed + CYCLE.period / 4).min(end);
            let goal = held - CYCLE.job.share(0.9);
            let window = series.points.iter().filter(|p| p.at > *freed && p.at <= until);
            match window.clone().find(|p| own(p) <= goal) {
                Some(p) => free_to_host.push((p.at - *freed).as_secs_f64()),
                None if until > *freed => {
                    never += 1;
                    free_to_host.push((until - *freed).as_secs_f64());
                }
                None => {}
            }
        }
        ArmResult {
            series,
            free_to_host,
            never,
            bursts: self.bursts,
            slowest: self.slowest,
            last_state: None,
        }
    }
}
