//! `autoballoon`: the test that the field's first automatic ballooning was
//! measured with, on real VMs: a host with less memory than its guests' sizes
//! add up to, a memory-hungry workload in each of them, N runs, with and without.
//!
//! Some of the VMs are busy at any time, the others wait for their turn. In its
//! turn a VM sorts in memory, as fast as it can, more in each turn than in the one
//! before (as SPECjbb, the original's workload, adds warehouses), for some time,
//! and then reads a file, which stays in its page cache. What is needed at one time
//! fits the host beside a reserve of a fifth; what the guests keep (freed pages, cache)
//! does not. Work is fixed, so `run_time` is how long all of it
//! took; `throughput` is what was sorted per second of sorting, and `throughput_cpu`
//! per second of CPU time of all QEMUs, which also pay for faults, swapping and
//! ballooning: it says the same where other work shares the machine's CPUs.
//!
//! Arms: `plain` (no controller), `reporting` (QEMU's free page reporting alone),
//! `ebb-stock`, `ebb-guest`. Arms take turns within each run, every other run the other way
//! round, so that what else happens on the machine meets all of them; a `_ratio` is by
//! the first arm in the same run, the median of all.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;

use super::record;
use super::stage::{Fleet, Stage, Watched, names};
use super::trial::{Figures, Output, in_turns};
use crate::arena::{ArenaConfig, SwapKind};
use crate::ebb::Daemon;
use crate::result::ExperimentResult;
use crate::vm::{Vm, cpu_s};

pub const ARMS: [&str; 4] = ["plain", "reporting", "ebb-stock", "ebb-guest"];
/// The host is under pressure when less than this share of the budget is left.
/// A fixed mark, whatever a controller's own marks are.
const PRESSURE: f64 = 0.15;
/// What each VM holds all the time.
const BASE: Bytes = Bytes::mib(32);
/// Longest that one sort or read may take.
const STEP: Duration = Duration::from_secs(300);

/// Sizes and times of a run.
#[derive(Clone, Debug, Args)]
pub struct Autoballoon {
    #[command(flatten)]
    output: Output,
    /// Arms, in this order within each run
    #[arg(long, value_delimiter = ',', value_parser = ARMS,
        default_value = "plain,reporting,ebb-stock")]
    arms: Vec<String>,
    /// How often each
    #[arg(long, default_value_t = 10)]
    runs: u32,
    /// How many VMs
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    vms: u32,
    /// RAM of each
    #[arg(long, default_value = "512MiB")]
    memory: Bytes,
    /// What all VMs together may hold
    #[arg(long, default_value = "1200MiB")]
    budget: Bytes,
    /// Swap to zram where there is some, not to a file as the original did
    #[arg(long)]
    zram: bool,
    /// What a sort of the last turn sorts; it needs twice as much. Turns before: in
    /// proportion to their number
    #[arg(long, default_value = "96MiB")]
    sort: Bytes,
    /// Sorts in the last turn; in those before, where there is less to sort, more of
    /// them, so that all turns are equally long
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    sorts: u32,
    /// What is read at the end of a turn, into the guest's page cache
    #[arg(long, default_value = "160MiB")]
    cache: Bytes,
    /// Turns of each VM
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// VMs that sort at the same time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    busy: u32,
    /// Keep each run's record of Ebb in this directory
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
}

/// Those that are compared run by run.
const RATIOS: [&str; 5] =
    ["swap_in_pages", "swap_out_pages", "throughput", "throughput_cpu", "run_time"];

impl Autoballoon {
    /// Runs every arm as often as asked, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        println!(
            "{} VMs of {} on a budget of {}, swap ({}) behind it: {} at a time sort up to {}, {} times in the last turn, and read {}, {} turns each",
            self.vms,
            self.memory,
            self.budget,
            if self.zram { "zram" } else { "file" },
            self.busy,
            self.sort,
            self.sorts,
            self.cache,
            self.turns
        );
        self.output.of("autoballoon", |outcome| {
            let turns = in_turns(&self.arms, self.runs, |arm| self.one(arm))?;
            turns.add(outcome, ExperimentResult::add, str::to_string);
            turns.add_ratios(outcome, &self.arms[0], &RATIOS, str::to_string);
            Ok(())
        })
    }

    fn one(&self, arm: &str) -> Result<Figures> {
        let kind = if self.zram { SwapKind::Any } else { SwapKind::File };
        let config = ArenaConfig::limited(self.budget, Bytes::gib(1), kind);
        let stage = Stage::enter(&config, Some(self.cache))?;
        let vms = self.boot(&stage, arm)?;
        let daemon = stage.daemon(arm, &names(&vms), "")?;
        let (worked, watched) = stage.watch(|| Work::new(self, &vms).run())?;
        daemon.map(Daemon::end_well).transpose()?;
        let mut figures = watched.swapped();
        figures.extend([
            ("throughput", "per_second", worked.sorted as f64 / worked.busy.as_secs_f64()),
            ("throughput_cpu", "per_second", worked.sorted as f64 / worked.cpu_s),
            ("run_time", "seconds", worked.time.as_secs_f64()),
            ("resident_mean", "bytes", watched.series.stat(|p| p.cgroup.0 as f64).mean),
        ]);
        if arm.starts_with("ebb") {
            if let Some(kept) = &self.records {
                record::keep(stage.dir(), kept, &format!("{arm}-{}", watched.began_ms))?;
            }
            let ticks = watched.ticks(&stage)?;
            figures.push(("reversals", "per_minute", watched.reversals(&ticks, self.vms)));
            let reaction = self.first_reaction(&watched, &ticks);
            figures.extend(reaction.map(|seconds| ("first_reaction", "seconds", seconds)));
        }
        Ok(figures)
    }

    /// How many integers of four bytes a sort of this turn (from 0) sorts.
    fn integers(&self, turn: u32) -> u64 {
        self.sort.0 / 4 * u64::from(turn + 1) / u64::from(self.turns)
    }

    /// How many sorts a turn (from 0) has: as much work in each.
    fn sorts(&self, turn: u32) -> u32 {
        (self.sorts * self.turns).div_ceil(turn + 1)
    }

    fn boot(&self, stage: &Stage, arm: &str) -> Result<Vec<Vm>> {
        let (vms, memory, kernel) = (self.vms, self.memory, self.output.kernel);
        let vms = Fleet { name: "auto", arm, vms, memory, kernel }.boot(stage)?;
        for vm in &vms {
            let hold = format!("size={}", BASE.0);
            vm.ask(|tool| tool.start_ready("base", "hold", &hold, STEP))?;
        }
        Ok(vms)
    }

    /// From pressure, by what the cgroup used, to the first order to shrink, seconds.
    fn first_reaction(&self, watched: &Watched, ticks: &[Tick]) -> Option<f64> {
        let full = self.budget - self.budget.share(PRESSURE);
        let at = watched.series.first(Duration::ZERO, |p| p.cgroup > full)?;
        let since = watched.began_ms + at.as_millis() as u64;
        record::first_take(ticks, since).map(|ms| ms as f64 / 1000.0)
    }
}

/// CPU time of all QEMUs so far, seconds.
fn cpu(vms: &[Vm]) -> Result<f64> {
    vms.iter().map(|vm| cpu_s(vm.pid)).sum()
}

#[derive(Default)]
struct Done {
    sorted: u64,
    busy: Duration,
    time: Duration,
    /// Of all QEMUs.
    cpu_s: f64,
}

/// What a VM does now.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Waiting,
    /// The sort of this number in its turn runs, since then.
    Sorting(u32, Instant),
    Reading,
}

struct Work<'a> {
    plan: &'a Autoballoon,
    vms: &'a [Vm],
    /// What each does, and how many turns it has had.
    steps: Vec<(Step, u32)>,
    done: Done,
}

impl<'a> Work<'a> {
    fn new(plan: &'a Autoballoon, vms: &'a [Vm]) -> Work<'a> {
        Work { plan, vms, steps: vec![(Step::Waiting, 0); vms.len()], done: Done::default() }
    }

    fn run(mut self) -> Result<Done> {
        let (began, cpu_before) = (Instant::now(), cpu(self.vms)?);
        while self.steps.iter().any(|s| *s != (Step::Waiting, self.plan.turns)) {
            for n in 0..self.vms.len() {
                self.go_on(n)?;
            }
            if let Some(n) = next_turn(&self.steps, self.plan.busy as usize, self.plan.turns) {
                self.steps[n].0 = self.sort(n, 0)?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        (self.done.time, self.done.cpu_s) = (began.elapsed(), cpu(self.vms)? - cpu_before);
        Ok(self.done)
    }

    /// Starts what is next for a VM, once what was before has ended.
    fn go_on(&mut self, n: usize) -> Result<()> {
        let vm = &self.vms[n];
        vm.check()?;
        let (step, turns) = self.steps[n];
        let ended = vm.tool().take_events();
        let ended = |job: &str, name: &str| ended.iter().any(|e| e.job == job && e.name == name);
        self.steps[n] = match step {
            Step::Sorting(which, since) if ended("sort", "exit") => {
                self.account(n, since)?;
                let more = which + 1 < self.plan.sorts(turns);
                (if more { self.sort(n, which + 1)? } else { self.read(n)? }, turns)
            }
            Step::Reading if ended("read", "ready") => (Step::Waiting, turns + 1),
            Step::Reading if ended("read", "exit") => {
                bail!("{} could not read its disk", vm.name)
            }
            _ => return Ok(()),
        };
        Ok(())
    }

    fn sort(&self, n: usize, which: u32) -> Result<Step> {
        let vm = &self.vms[n];
        let integers = self.plan.integers(self.steps[n].1);
        let arguments = format!("n={integers} seed={}", which + 1);
        vm.ask(|tool| tool.start("sort", "sort", &arguments))?;
        Ok(Step::Sorting(which, Instant::now()))
    }

    fn account(&mut self, n: usize, since: Instant) -> Result<()> {
        let vm = &self.vms[n];
        let took = since.elapsed();
        let stat = vm.ask(|tool| tool.wait_end("sort", STEP))?;
        let integers = self.plan.integers(self.steps[n].1);
        if stat.u64("errors") != 0 || stat.u64("checks") != integers {
            bail!("{} sorted wrongly: {:?}", vm.name, stat.0);
        }
        self.done.sorted += integers;
        self.done.busy += took;
        Ok(())
    }

    fn read(&self, n: usize) -> Result<Step> {
        let vm = &self.vms[n];
        // The one before holds the device open, and with it what was read.
        let _ = vm.tool().stop("read");
        let _ = vm.tool().take_events();
        let arguments = format!("size={}", self.plan.cache.0);
        vm.ask(|tool| tool.start("read", "read", &arguments))?;
        Ok(Step::Reading)
    }
}

/// Whose turn it is: of those that wait, one that had the fewest.
fn next_turn(steps: &[(Step, u32)], most_busy: usize, turns: u32) -> Option<usize> {
    let busy = steps.iter().filter(|(s, _)| matches!(s, Step::Sorting(..))).count();
    let waiting = (0..steps.len()).filter(|n| steps[*n].0 == Step::Waiting);
    let next = waiting.min_by_key(|n| steps[*n].1)?;
    (busy < most_busy && steps[next].1 < turns).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_round_and_no_more_are_busy_than_asked() {
        let sorting = Step::Sorting(0, Instant::now());
        let wait = |turns| (Step::Waiting, turns);
        assert_eq!(next_turn(&[wait(0), wait(0), wait(0)], 2, 2), Some(0));
        assert_eq!(next_turn(&[(sorting, 0), wait(0), wait(0)], 2, 2), Some(1));
        assert_eq!(next_turn(&[(sorting, 0), (sorting, 0), wait(0)], 2, 2), None);
        // One that reads is not busy, and one that had a turn waits for the others.
        assert_eq!(next_turn(&[wait(1), (Step::Reading, 0), wait(0)], 2, 2), Some(2));
        assert_eq!(next_turn(&[wait(2), wait(2), wait(2)], 2, 2), None, "all done");
    }
}
