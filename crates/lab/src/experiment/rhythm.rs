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

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ebb_core::units::Bytes;

use crate::arena::{Arena, ArenaConfig, SwapConfig, SwapKind};
use crate::baselines::Rival;
use crate::ebb::Daemon;
use crate::experiment::autoballoon::{swapped, warn_of_others};
use crate::experiment::demo::write_noise;
use crate::experiment::record;
use crate::experiment::trial::in_turns;
use crate::guest_stack::Fleet;
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
    /// What each holds all the time.
    base: Bytes,
    /// What a job takes and frees.
    job: Bytes,
    /// What is read between jobs, into the guest's page cache.
    cache: Bytes,
    /// From one job to the next.
    period: Duration,
    /// For so long a job keeps what it has touched.
    hold: Duration,
    /// How much later each VM's jobs are than those of the VM before.
    apart: Duration,
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
                base: Bytes::mib(32),
                job: Bytes::mib(192),
                cache: Bytes::mib(160),
                period: Duration::from_secs(30),
                hold: Duration::from_secs(6),
                apart: Duration::ZERO,
            },
            // Needed at most: 2 × (75 + 32 + 110) + 256 = 690 MiB; kept: 256 more.
            Shape::Swing => Setup {
                name: "swing",
                vms: 2,
                memory: Bytes::mib(512),
                budget: Bytes::mib(860),
                base: Bytes::mib(32),
                job: Bytes::mib(256),
                cache: Bytes::ZERO,
                period: Duration::from_secs(10),
                hold: Duration::from_secs(3),
                apart: Duration::from_secs(5),
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
        let mut outcome = None;
        for shape in &self.shapes {
            self.shape(&shape.setup(), &mut outcome)?;
        }
        let Some(outcome) = outcome else { return Ok(()) };
        print!("\n{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }

    fn shape(&self, setup: &Setup, outcome: &mut Option<ExperimentResult>) -> Result<()> {
        println!(
            "{}: {} VMs of {} on a budget of {}, swap behind it: jobs of {} each {} s, kept for {} s",
            setup.name,
            setup.vms,
            setup.memory,
            setup.budget,
            setup.job,
            setup.period.as_secs(),
            setup.hold.as_secs()
        );
        let (results, fresh) = in_turns(&self.arms, self.runs, |arm| self.one(setup, arm), line)?;
        *outcome = outcome.take().or(fresh);
        if let Some(outcome) = outcome {
            for (arm, results) in self.arms.iter().zip(&results) {
                for (metric, unit, value) in METRICS {
                    let values: Vec<f64> = results.iter().filter_map(value).collect();
                    outcome.add_median(arm, &format!("{}_{metric}", setup.name), unit, &values);
                }
            }
        }
        Ok(())
    }

    fn one(&self, setup: &Setup, arm: &str) -> Result<(RunResult, ExperimentResult)> {
        let swap = SwapConfig { size: Bytes::gib(2), kind: SwapKind::File, priority: 100 };
        let arena = Arena::enter(&ArenaConfig {
            budget: Some(setup.budget),
            swap: Some(swap),
            ..ArenaConfig::default()
        })?;
        let dir = tempfile::tempdir()?;
        let disk = dir.path().join("disk");
        write_noise(&disk, setup.cache.max(Bytes::mib(1)))?;
        let vms = boot(setup, &arena, arm, self.kernel, &disk, dir.path())?;
        let names: Vec<&str> = vms.iter().map(Vm::name).collect();
        let daemon =
            arm.starts_with("ebb").then(|| Daemon::start(dir.path(), &names, "")).transpose()?;
        let cgroup = arena.cgroup().context("no cgroup")?;
        let rival = (arm == "mom").then(|| Rival::mom(cgroup, setup.budget));
        let sampler = Sampler::start(20, Some(cgroup.clone()));
        let (before, began_ms) = (swapped()?, wall_ms());
        let touches = Work::new(setup, &vms, rival).run(Duration::from_secs(self.seconds))?;
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
                record::keep(dir.path(), kept, &format!("{}-{arm}-{began_ms}", setup.name))?;
            }
            // Stopping gives everything back: that is no turn of the controller's.
            let mut ticks = record::read(&dir.path().join("record.jsonl"))?;
            ticks.retain(|t| (began_ms..=end_ms).contains(&t.wall_ms));
            let minutes = (end_ms - began_ms) as f64 / 60_000.0;
            let turns = record::reversals(&ticks) as f64;
            result.reversals = Some(turns / minutes / f64::from(setup.vms));
        }
        Ok((result, ExperimentResult::new("rhythm", vms[0].release(), vms[0].accel())))
    }
}

fn boot(
    setup: &Setup,
    arena: &Arena,
    arm: &str,
    kernel: Kernel,
    disk: &Path,
    dir: &Path,
) -> Result<Vec<Vm>> {
    let fleet = Fleet {
        name: setup.name,
        vms: setup.vms,
        memory: setup.memory,
        kernel,
        reporting: ["reporting", "mom", "ebb-stock"].contains(&arm),
        guest: arm == "ebb-guest",
        disk,
        dir,
    };
    Ok(fleet.boot(arena)?)
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

struct Work<'a> {
    setup: &'a Setup,
    vms: &'a [Vm],
    rival: Option<Rival>,
    /// How long each job took to touch its memory, seconds.
    touches: Vec<f64>,
    /// Which VM is to read its file when.
    reads: Vec<(usize, Instant)>,
}

impl<'a> Work<'a> {
    fn new(setup: &'a Setup, vms: &'a [Vm], rival: Option<Rival>) -> Work<'a> {
        Work { setup, vms, rival, touches: Vec::new(), reads: Vec::new() }
    }

    fn run(mut self, time: Duration) -> Result<Vec<f64>> {
        let began = Instant::now();
        let mut started = 0;
        while began.elapsed() < time {
            while started < self.vms.len() && began.elapsed() >= self.setup.apart * started as u32 {
                self.start(started)?;
                started += 1;
            }
            for n in 0..self.vms.len() {
                self.hear(n)?;
            }
            let due: Vec<usize> =
                self.reads.extract_if(.., |(_, at)| Instant::now() >= *at).map(|r| r.0).collect();
            due.into_iter().try_for_each(|n| self.read(n))?;
            if let Some(rival) = &mut self.rival {
                rival.tick(self.vms)?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(rival) = &self.rival {
            println!("  {} orders", rival.orders());
        }
        Ok(self.touches)
    }

    fn start(&self, n: usize) -> Result<()> {
        let (s, vm) = (self.setup, &self.vms[n]);
        let arguments = format!(
            "size={} base={} period_ms={} hold_ms={} seed={n}",
            s.job.0,
            s.base.0,
            s.period.as_millis(),
            s.hold.as_millis()
        );
        vm.tool().start("job", "cycle", &arguments).map_err(|e| vm.explain(e))?;
        Ok(())
    }

    fn hear(&mut self, n: usize) -> Result<()> {
        let vm = &self.vms[n];
        vm.check()?;
        for event in vm.tool().take_events().iter().filter(|e| e.job == "job") {
            match event.name.as_str() {
                "progress" => {
                    self.touches.push(event.fields.f64("touch_ns") / 1e9);
                    if self.setup.cache > Bytes::ZERO {
                        self.reads.push((n, Instant::now() + self.setup.period / 4));
                    }
                }
                "exit" => bail!("{} lost its job: {event:?}", vm.name()),
                _ => {}
            }
        }
        Ok(())
    }

    fn read(&self, n: usize) -> Result<()> {
        let vm = &self.vms[n];
        // The one before holds the device open, and with it what was read.
        let _ = vm.tool().stop("read");
        let arguments = format!("size={}", self.setup.cache.0);
        vm.tool().start("read", "read", &arguments).map_err(|e| vm.explain(e))?;
        Ok(())
    }
}
