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

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use ebb_core::units::Bytes;

use super::cycles::{Cycle, Cycles, Guest};
use super::stage::{Fleet, Stage, names};
use super::trial::{Figures, Output, in_turns};
use crate::arena::{ArenaConfig, SwapKind};
use crate::baselines::Rival;
use crate::ebb::Daemon;
use crate::result::{ExperimentResult, median};
use crate::vm::Vm;

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
    #[command(flatten)]
    output: Output,
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
}

impl Rhythm {
    /// Runs every arm of every shape as often as asked, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        self.output.of("rhythm", |outcome| {
            self.shapes.iter().try_for_each(|shape| self.shape(&shape.setup(), outcome))
        })
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
        let turns = in_turns(&self.arms, self.runs, |arm| self.one(setup, arm))?;
        let name = |metric: &str| format!("{}_{metric}", setup.name);
        turns.add(outcome, ExperimentResult::add_median, name);
        Ok(())
    }

    fn one(&self, setup: &Setup, arm: &str) -> Result<Figures> {
        let config = ArenaConfig::limited(setup.budget, Bytes::gib(2), SwapKind::File);
        let cache = setup.cycle.cache.max(Bytes::mib(1));
        let stage = Stage::enter(&config, Some(cache))?;
        let (name, memory, kernel) = (setup.name, setup.memory, self.output.kernel);
        let vms = Fleet { name, arm, vms: setup.vms, memory, kernel }.boot(&stage)?;
        let daemon = stage.daemon(arm, &names(&vms), "")?;
        let rival = (arm == "mom").then(|| stage.cgroup().map(|c| Rival::mom(c, setup.budget)));
        let rival = rival.transpose()?;
        let (mut touches, watched) = stage.watch(|| self.work(setup.cycle, &vms, rival))?;
        daemon.map(Daemon::end_well).transpose()?;
        touches.sort_by(f64::total_cmp);
        let mut figures = watched.swapped();
        figures.push(("jobs", "count", touches.len() as f64));
        figures.extend(median(&touches).map(|s| ("touch_median", "seconds", s)));
        figures.extend(touches.last().map(|s| ("touch_worst", "seconds", *s)));
        let held = watched.series.stat(|p| (p.cgroup + p.cgroup_swap).0 as f64);
        figures.push(("held_mean", "bytes", held.mean));
        if arm.starts_with("ebb") {
            let ticks = watched.ticks(&stage)?;
            figures.push(("reversals", "per_minute", watched.reversals(&ticks, setup.vms)));
        }
        Ok(figures)
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
