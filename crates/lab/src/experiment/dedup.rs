//! `dedup`: what merging finds, and what it costs.
//!
//! VMs are filled, then paused: so the truth stays true while an arm is measured.
//! Each arm begins with everything unmerged and ends when whole scans bring nothing
//! more, when it stops of itself, or after [`Dedup::seconds`]. The truth is every
//! page, read one by one (`ground_truth.rs`); recall is the frames that the VMs take less,
//! by the ideal: frames less different contents. Workload `late` is the exception:
//! each arm first sees memory grow old, and only what comes afterwards counts; in
//! `churn` guests work meanwhile, and recall is what is merged at the end by that and
//! what could still be.
//!
//! Metrics end with the workload. `cpu_seconds` is processor time of `ksmd`, scanner
//! and daemon until 99.5 % of all that the arm saves is saved, `cpu_to_end` until it
//! ended, `cpu_to_90` and `time_to_90` until 90 % of the ideal, `rescan_cpu_seconds`
//! of one more look at memory that nobody wrote. `saved_share` is of what the VMs
//! held, less KSM's own memory; `cpu_share` of one core, until converged.
//! KSM looks at every VM of the machine: for figures let no others run.

mod arms;
pub mod corunner;
mod course;
mod governor;
mod workload;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use ebb_core::policy::merge::METADATA;
use ebb_core::sample::KsmStat;
use ebb_core::units::Bytes;
use ebb_host::act::ksm;
use ebb_host::probe::ksm::read_ksm_stat;
use ebb_host::root::Root;

use self::arms::{Kind, Runner, hold_knobs};
use self::course::{Course, Meter};
use self::workload::{Fleet, Workload};
use super::trial::{Figures, line};
use crate::arena::{Arena, ArenaConfig};
use crate::ground_truth::Truth;
use crate::image::Kernel;
use crate::result::ExperimentResult;
use crate::vm::Vm;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// Scans until a page that nobody writes is looked at least often: at an age of nine
/// every ninth time.
const OLD: u64 = 12;

#[derive(Clone, Debug, clap::Args)]
pub struct Dedup {
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// In this order
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = all::<Kind>())]
    arms: Vec<Kind>,
    /// In this order
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = all::<Workload>())]
    workloads: Vec<Workload>,
    /// How many VMs
    #[arg(long, default_value_t = 3)]
    pub vms: u32,
    /// What each holds beside what it booted with
    #[arg(long, default_value = "192MiB")]
    pub hold: Bytes,
    /// Of that, the part that is alike in `clustered`
    #[arg(long, default_value_t = 0.3)]
    pub share: f64,
    /// Share of one core that each arm may use
    #[arg(long, default_value_t = 0.5)]
    pub cores: f64,
    /// An arm that has not ended after so many seconds is stopped
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
}

#[derive(Debug)]
struct Measured {
    course: Course,
    /// What could be saved, what was.
    ideal: Bytes,
    saved: Bytes,
    /// What the VMs held before.
    held: Bytes,
    own_memory: Bytes,
    again_s: Option<f64>,
}

impl Dedup {
    pub fn run(&self) -> Result<()> {
        let arena = Arena::enter(&ArenaConfig::default())?;
        hold_knobs(&arena)?;
        let mut outcome = ExperimentResult::of("dedup", Kernel::V6_1)?;
        for &workload in &self.workloads {
            let possible = || self.arms.iter().copied().filter(|a| Runner::is_possible(*a));
            for agents in [false, true] {
                let arms: Vec<Kind> = possible().filter(|a| a.has_agent() == agents).collect();
                if arms.is_empty() {
                    continue;
                }
                let fleet = Fleet::boot(workload, self.vms, self.hold, self.share, agents)?;
                println!("{}:", name(workload));
                for arm in arms {
                    let measured = self.arm(workload, &fleet, arm)?;
                    measured.note(arm, workload, &mut outcome);
                }
                fleet.resume()?;
                fleet.check()?;
            }
            compare(workload, &self.arms, &outcome);
            println!("{}", outcome.table());
            outcome.keep(self.json.as_deref())?;
        }
        Ok(())
    }

    fn arm(&self, workload: Workload, fleet: &Fleet, arm: Kind) -> Result<Measured> {
        let mut runner = Runner::new(arm, self.cores, &fleet.vms)?;
        fleet.pause()?;
        ksm::unmerge(&Root::default())?;
        match workload {
            Workload::Late => self.late(fleet, arm, &mut runner),
            Workload::Churn => self.churn(fleet, &mut runner),
            _ => self.still(fleet, arm, &mut runner),
        }
    }

    /// Paused VMs, from nothing merged to the arm's end.
    fn still(&self, fleet: &Fleet, arm: Kind, runner: &mut Runner<'_>) -> Result<Measured> {
        let before = Truth::of(&fleet.pids())?;
        let course = self.follow(runner, before.ideal())?;
        let after = Truth::of(&fleet.pids())?;
        if arm == Kind::EbbStock {
            let left = Truth::of(&fleet.pids())?.ideal();
            let (said, _) = runner.scan()?;
            println!("             left: {left} by every page, {said} by the scanner");
        }
        let again_s = runner.again()?;
        runner.end()?;
        let lost = Truth::of(&fleet.pids())?.frames.saturating_sub(after.frames);
        if Bytes::pages(lost) >= Bytes::mib(1) {
            println!("             lost again until its end: {}", Bytes::pages(lost));
        }
        let own_memory = own_memory(&fleet.vms)?;
        Ok(Measured {
            course,
            ideal: before.ideal(),
            saved: Bytes::pages(before.frames.saturating_sub(after.frames)),
            held: Bytes::pages(before.frames),
            own_memory,
            again_s,
        })
    }

    /// Memory grows old, then all read the same file.
    fn late(&self, fleet: &Fleet, arm: Kind, runner: &mut Runner<'_>) -> Result<Measured> {
        let last = fleet.vms.len() - 1;
        // Guests start at different times, so their pages' turns are different ones.
        fleet.grow_old(|n| match arm.is_ksm() {
            true => runner.age(if n < last { 2 + n as u64 } else { OLD }),
            false if n == last => {
                self.follow(runner, Bytes::ZERO)?;
                runner.end()
            }
            false => Ok(()),
        })?;
        fleet.read_file()?;
        let measured = self.still(fleet, arm, runner)?;
        fleet.forget_file()?;
        Ok(measured)
    }

    fn churn(&self, fleet: &Fleet, runner: &mut Runner<'_>) -> Result<Measured> {
        let held = Bytes::pages(Truth::of(&fleet.pids())?.frames);
        fleet.resume()?;
        fleet.stir()?;
        let meter = Meter::begin(fleet.pids())?;
        let mut course = Course(vec![meter.look(0.0)?]);
        runner.begin()?;
        let until = Instant::now() + Duration::from_secs(self.seconds);
        while Instant::now() < until {
            runner.look_again()?;
            runner.step(&course, Bytes::ZERO)?;
            course.0.push(meter.look(runner.own)?);
            std::thread::sleep(LOOK);
        }
        runner.end()?;
        fleet.pause()?;
        let after = Truth::of(&fleet.pids())?;
        let own_memory = own_memory(&fleet.vms)?;
        let saved = after.merged() + zeros(&fleet.vms)?;
        fleet.resume()?;
        fleet.calm()?;
        fleet.pause()?;
        let ideal = saved + after.ideal();
        Ok(Measured { course, ideal, saved, held, own_memory, again_s: None })
    }

    /// The arm, until it ends or its time is over. A daemon is not ended.
    fn follow(&self, runner: &mut Runner<'_>, ideal: Bytes) -> Result<Course> {
        let meter = Meter::begin(runner.pids())?;
        let own = runner.own;
        let mut course = Course(vec![meter.look(0.0)?]);
        runner.begin()?;
        let until = Instant::now() + Duration::from_secs(self.seconds);
        let mut done = false;
        while !done && Instant::now() < until {
            done = runner.step(&course, ideal)?;
            course.0.push(meter.look(runner.own - own)?);
            std::thread::sleep(LOOK);
        }
        course.0.push(meter.look(runner.own - own)?);
        if !runner.goes_on() {
            runner.end()?;
        }
        if !runner.why.is_empty() {
            println!("             {}", runner.why);
        }
        Ok(course)
    }
}

impl Measured {
    fn recall(&self) -> f64 {
        self.saved.fraction_of(self.ideal)
    }

    /// When 90 % of the ideal were saved: what is merged and what that saves grow alike.
    fn to_90(&self) -> Option<course::Point> {
        self.course.reached(0.9 / self.recall().max(1e-9))
    }

    /// Of what was held, less KSM's own.
    fn share(&self) -> f64 {
        (self.saved.0 as f64 - self.own_memory.0 as f64) / self.held.0.max(1) as f64
    }

    fn note(&self, arm: Kind, workload: Workload, outcome: &mut ExperimentResult) {
        let end = self.course.converged();
        let gib = self.saved.0 as f64 / Bytes::gib(1).0 as f64;
        let paid = self.saved >= Bytes::mib(1);
        let rows: [(_, _, Option<f64>); 14] = [
            ("ideal", "bytes", Some(self.ideal.0 as f64)),
            ("recall", "fraction", Some(self.recall())),
            ("saved", "bytes", Some(self.saved.0 as f64)),
            ("merged_mean", "bytes", Some(self.course.mean().0 as f64)),
            ("saved_share", "fraction", Some(self.share())),
            ("cpu_seconds", "seconds", Some(end.cpu)),
            ("cpu_to_end", "seconds", Some(self.course.last().cpu)),
            ("time_to_end", "seconds", Some(self.course.last().at)),
            ("scans", "count", Some(self.course.last().scans as f64)),
            ("cpu_to_90", "seconds", self.to_90().map(|p| p.cpu)),
            ("time_to_90", "seconds", self.to_90().map(|p| p.at)),
            ("rescan_cpu_seconds", "seconds", self.again_s),
            ("cpu_share", "fraction", Some(end.cpu / end.at.max(1e-9))),
            ("cpu_per_gib", "seconds", paid.then(|| end.cpu / gib)),
        ];
        let known = rows.into_iter().filter_map(|(metric, unit, v)| Some((metric, unit, v?)));
        let figures: Figures = known.collect();
        println!("{:<12} {}", name(arm), line(&figures));
        for (metric, unit, value) in figures {
            let metric = format!("{metric}_{}", name(workload));
            outcome.add(&name(arm), &metric, unit, &[value]);
        }
    }
}

fn all<T: ValueEnum>() -> Vec<T> {
    T::value_variants().to_vec()
}

/// Its name in tables and files.
fn name(of: impl ValueEnum) -> String {
    of.to_possible_value().map(|value| value.get_name().into()).unwrap_or_default()
}

/// KSM's own memory for these VMs.
fn own_memory(vms: &[Vm]) -> Result<Bytes> {
    Ok(Bytes(sum(vms, |stat| stat.rmap_items)? * METADATA))
}

/// Pages of zeros that KSM replaced by the zero page.
fn zeros(vms: &[Vm]) -> Result<Bytes> {
    Ok(Bytes::pages(sum(vms, |stat| stat.zero_pages)?))
}

fn sum(vms: &[Vm], of: fn(KsmStat) -> Option<u64>) -> Result<u64> {
    let mut sum = 0;
    for vm in vms {
        sum += read_ksm_stat(&Root::default(), vm.pid)?.and_then(of).unwrap_or(0);
    }
    Ok(sum)
}

/// Ebb by the best KSM arm of those that found as much, or nearly.
fn compare(workload: Workload, arms: &[Kind], outcome: &ExperimentResult) {
    let value = |arm: Kind, metric: &str| {
        outcome.value(&name(arm), &format!("{metric}_{}", name(workload)))
    };
    let most = arms.iter().filter_map(|a| value(*a, "recall")).fold(0.0, f64::max);
    let good = |a: &&Kind| a.is_ksm() && value(**a, "recall").is_some_and(|r| r >= 0.9 * most);
    for ebb in arms.iter().filter(|a| !a.is_ksm()) {
        let ratio = |metric: &str| {
            let best = arms.iter().filter(good).filter_map(|a| value(*a, metric));
            let best = best.fold(f64::INFINITY, f64::min);
            let own = value(*ebb, metric).filter(|_| best.is_finite() && best > 0.0);
            own.map_or("–".into(), |own| format!("{:.3}", own / best))
        };
        println!(
            "             {} by the best KSM arm that found as much: CPU {}, to 90 % {} (CPU {}), \
             a later scan {}\n",
            name(*ebb),
            ratio("cpu_seconds"),
            ratio("time_to_90"),
            ratio("cpu_to_90"),
            ratio("rescan_cpu_seconds")
        );
    }
}
