//! `rhythm`: guests that need memory at the same time, or by turns within seconds, on real
//! VMs. A controller that is slower than its guests does harm in both.
//!
//! - `together`: four VMs run the same job at the same moment, again and again, as machines
//!   with the same timer do. Between jobs each reads a file once, which its kernel keeps.
//!   What programs need fits the budget at any time, what guests keep does not.
//! - `swing`: two VMs in turn take and free half of their memory within seconds. One fits
//!   the budget at a time, both do not.
//!
//! Arms: `plain`, `reporting` (QEMU's free page reporting alone), `mom` (reporting, and
//! MOM's rules), `ebb-stock` (reporting, and Ebb), `ebb-guest` (agent and module). Arms take
//! turns within each run, every other run the other way round. What counts is how long a
//! guest took to touch its job's memory, and what the host swapped.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use ebb_core::units::Bytes;

use super::autoballoon::{swapped, warn_of_others};
use super::cycles::{Cycle, Cycles, Guest};
use super::record;
use super::stage::{Fleet, Stage, names};
use super::trial::in_turns;
use crate::arena::{ArenaConfig, SwapKind};
use crate::baselines::Rival;
use crate::ebb::Daemon;
use crate::image::Kernel;
use crate::result::{ExperimentResult, median};
use crate::sampler::Sampler;
use crate::vm::Vm;
use crate::wall_ms;

pub const ARMS: [&str; 5] = ["plain", "reporting", "mom", "ebb-stock", "ebb-guest"];

/// Which guests are busy when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// All at once
    Together,
    /// Two in turn, within seconds
    Swing,
}

/// What a shape is made of.
struct Setup {
    name: &'static str,
    vms: u32,
    memory: Bytes,
    /// What all VMs together may hold.
    budget: Bytes,
    cycle: Cycle,
}

impl Shape {
    /// A VM needs 75 MiB for its kernel and 105 to 120 for QEMU.
    fn setup(self) -> Setup {
        match self {
            // Needed at most: 4 × (75 + 32 + 192 + 110) = 1,636 MiB; kept: 640 more.
            Shape::Together => Setup {
                name: "together",
                vms: 4,
                memory: Bytes::mib(512),
                budget: Bytes::mib(2000),
                cycle: Cycle {
                    base: Bytes::mib(32),
                    job: Bytes::mib(192),
                    cache: Bytes::mib(160),
                    period: Duration::from_secs(30),
                    hold: Duration::from_secs(6),
                    apart: Duration::ZERO,
                },
            },
            // Needed at most: 2 × (75 + 32 + 110) + 256 = 690 MiB; kept: 256 more.
            Shape::Swing => Setup {
                name: "swing",
                vms: 2,
                memory: Bytes::mib(512),
                budget: Bytes::mib(860),
                cycle: Cycle {
                    base: Bytes::mib(32),
                    job: Bytes::mib(256),
                    cache: Bytes::ZERO,
                    period: Duration::from_secs(10),
                    hold: Duration::from_secs(3),
                    apart: Duration::from_secs(5),
                },
            },
        }
    }
}

/// What is to be run.
#[derive(Clone, Debug, Args)]
pub struct Rhythm {
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Which guests are busy when
    #[arg(long, value_enum, value_delimiter = ',', default_value = "together,swing")]
    shapes: Vec<Shape>,
    /// Arms, in this order within each run
    #[arg(long, value_delimiter = ',', value_parser = ARMS, default_values = ARMS)]
    arms: Vec<String>,
    /// How often each
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Measured seconds of each
    #[arg(long, default_value_t = 90)]
    seconds: u64,
    /// Guest kernel
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    /// Keep each run's record of Ebb in this directory
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
}

/// What one run of one arm came to.
#[derive(Clone, Debug, Default)]
struct RunResult {
    swap_in: f64,
    swap_out: f64,
    /// How long each job took to touch its memory, seconds.
    touches: Vec<f64>,
    held_mean: f64,
    /// Turns of direction of all sizes, per VM and minute.
    reversals: Option<f64>,
}

impl RunResult {
    fn median_touch(&self) -> Option<f64> {
        median(&self.touches)
    }

    fn worst_touch(&self) -> Option<f64> {
        self.touches.iter().copied().max_by(f64::total_cmp)
    }
}

/// Each metric: its name, unit and where it is.
type Metric = (&'static str, &'static str, fn(&RunResult) -> Option<f64>);
const METRICS: [Metric; 7] = [
    ("swap_in_pages", "count", |r| Some(r.swap_in)),
    ("swap_out_pages", "count", |r| Some(r.swap_out)),
    ("jobs", "count", |r| Some(r.touches.len() as f64)),
    ("touch_median", "seconds", RunResult::median_touch),
    ("touch_worst", "seconds", RunResult::worst_touch),
    ("held_mean", "bytes", |r| Some(r.held_mean)),
    ("reversals", "per_minute", |r| r.reversals),
];

impl Rhythm {
    /// Runs every arm of every shape as often as asked, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        let mut outcome = ExperimentResult::of("rhythm", self.kernel)?;
        for shape in &self.shapes {
            self.shape(&shape.setup(), &mut outcome)?;
        }
        print!("\n{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }

    fn shape(&self, setup: &Setup, outcome: &mut ExperimentResult) -> Result<()> {
        println!(
            "{}: {} VMs of {} on a budget of {}, swap behind it: jobs of {} each {} s, kept for {} s",
            setup.name,
            setup.vms,
            setup.memory,
            setup.budget,
            setup.cycle.job,
            setup.cycle.period.as_secs(),
            setup.cycle.hold.as_secs()
        );
        let results = in_turns(&self.arms, self.runs, |arm| self.one(setup, arm), line)?;
        for (arm, results) in self.arms.iter().zip(&results) {
            for (metric, unit, value) in METRICS {
                let values: Vec<f64> = results.iter().filter_map(value).collect();
                outcome.add_median(arm, &format!("{}_{metric}", setup.name), unit, &values);
            }
        }
        Ok(())
    }

    fn one(&self, setup: &Setup, arm: &str) -> Result<RunResult> {
        let config = ArenaConfig::limited(setup.budget, Bytes::gib(2), SwapKind::File);
        let cache = setup.cycle.cache.max(Bytes::mib(1));
        let stage = Stage::enter(&config, Some(cache))?;
        let (name, memory, kernel) = (setup.name, setup.memory, self.kernel);
        let vms = Fleet { name, arm, vms: setup.vms, memory, kernel }.boot(&stage)?;
        let daemon = stage.daemon(arm, &names(&vms), "")?;
        let rival = (arm == "mom").then(|| stage.cgroup().map(|c| Rival::mom(c, setup.budget)));
        let sampler = Sampler::start(20, Some(stage.cgroup()?.clone()));
        let (before, began_ms) = (swapped()?, wall_ms());
        let touches = self.work(setup.cycle, &vms, rival.transpose()?)?;
        let (after, end_ms) = (swapped()?, wall_ms());
        let series = sampler.stop();
        daemon.map(Daemon::end_well).transpose()?;
        warn_of_others(&series);
        let mut result = RunResult {
            swap_in: after.swap_in_pages.saturating_sub(before.swap_in_pages) as f64,
            swap_out: after.swap_out_pages.saturating_sub(before.swap_out_pages) as f64,
            touches,
            held_mean: series.stat(|p| (p.cgroup + p.cgroup_swap).0 as f64).mean,
            reversals: None,
        };
        if arm.starts_with("ebb") {
            if let Some(kept) = &self.records {
                record::keep(stage.dir(), kept, &format!("{}-{arm}-{began_ms}", setup.name))?;
            }
            // Stopping gives everything back: that is no turn of the controller's.
            let mut ticks = record::read(&stage.dir().join("record.jsonl"))?;
            ticks.retain(|t| (began_ms..=end_ms).contains(&t.wall_ms));
            let minutes = (end_ms - began_ms) as f64 / 60_000.0;
            let turns = record::reversals(&ticks) as f64;
            result.reversals = Some(turns / minutes / f64::from(setup.vms));
        }
        Ok(result)
    }

    /// How long each job took to touch its memory, seconds.
    fn work(&self, cycle: Cycle, vms: &[Vm], mut rival: Option<Rival>) -> Result<Vec<f64>> {
        let mut cycles = Cycles::new(cycle, vms.iter().map(Guest::of_vm).collect());
        let mut touches = Vec::new();
        while cycles.elapsed() < Duration::from_secs(self.seconds) {
            touches.extend(cycles.step()?.into_iter().map(|(_, seconds)| seconds));
            if let Some(rival) = &mut rival {
                rival.tick(vms)?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(rival) = &rival {
            println!("  {} orders", rival.orders());
        }
        Ok(touches)
    }
}

fn line(r: &RunResult) -> String {
    let optional = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.2}"));
    format!(
        "in {:>7} out {:>7} pages  {:>3} jobs, touched in {} s (worst {})  held {:>9}  reversals {}/min",
        r.swap_in,
        r.swap_out,
        r.touches.len(),
        optional(r.median_touch()),
        optional(r.worst_touch()),
        Bytes(r.held_mean as u64).to_string(),
        optional(r.reversals)
    )
}
