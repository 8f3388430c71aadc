//! `density`: how many VMs a budget holds before one of them is harmed.
//!
//! VMs are added two or `--step` at a time until one is harmed; each begins its job soon, apart from
//! the others. Then `--step` are dropped, what was swapped out is read back, the jobs are spread
//! over the period, and after half a period the VMs have to run for one whole period without harm;
//! where that fails, more are dropped. Where it succeeds at once, VMs are added and the same is
//! tried with them, until it fails (not with `--quick`). Harm is 16 MiB swapped out, a VM or a job
//! that is lost, a byte that is wrong, or a job that took more than three times as long to touch its
//! memory as in the arm's first two VMs alone, or never did. One VM in eight also runs `verify`, and
//! checks what it has kept. What daemon and KSM hold beside the VMs' cgroup is off the budget.
//!
//! With `--vms` a fixed number of VMs runs instead: what the same work holds in each arm.
//!
//! Arms: `plain`, `ksm` (a million pages a round, no pause), `ksmtuned` (Debian's, told that the
//! budget is the machine), `reporting` (QEMU's free page reporting), `mom` (reporting and MOM's
//! balloon rules), `reporting-ksm` and `mom-ksmtuned` (both; MOM's own KSM rules are ksmtuned's),
//! `ebb-balloon` (Ebb, and a balloon as libvirt makes it: no reporting, no deflate-on-oom),
//! `ebb-stock` (reporting and Ebb), `ebb-guest` (agent and module), `ebb` (the same, and merging).

mod account;
mod jobs;
mod picture;
mod rivals;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ebb_core::units::Bytes;

use self::account::{Account, Rest};
use self::jobs::Jobs;
use self::picture::picture;
use self::rivals::{knobs, ksmtuned, merges};
use super::stage::{self, Stage, warn_of_others};
use super::trial::Output;
use crate::arena::{ArenaConfig, Beside, MemoryCgroup, SwapKind};
use crate::baselines::Rival;
use crate::ebb::Daemon;
use crate::guest_stack;
use crate::result::{ExperimentResult, SeriesRow, median};
use crate::sampler::{Sampler, Series};
use crate::vm::{Vm, VmConfig};

#[rustfmt::skip]
pub const ARMS: [&str; 11] = [
    "plain", "ksm", "ksmtuned", "reporting", "reporting-ksm", "mom", "mom-ksmtuned",
    "ebb-balloon", "ebb-stock", "ebb-guest", "ebb",
];
/// What each VM reads of the common disk once it has booted.
const COMMON: Bytes = Bytes::mib(48);
/// More than this swapped out is harm.
const SWAPPED: Bytes = Bytes::mib(16);
/// A job that takes so many times as long to touch its memory is harmed.
const SLOW: f64 = 3.0;
/// Translated code that each QEMU keeps: of a small VM the default is the largest part.
const TRANSLATIONS: Bytes = Bytes::mib(16);
/// What was swapped out has to fit within this time after VMs were dropped.
const ROOM: Duration = Duration::from_secs(10);
/// Below this share of idle processors the number of VMs is bound by them, not by memory.
const IDLE: f64 = 0.10;

/// What a VM's job does in every period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Takes its memory, keeps it for a while and frees it whole
    Cycle,
    /// Takes its memory and frees every second piece of 64 KiB, until the next period
    Pieces,
    /// Reads a file that stays in the page cache until the next period
    Cache,
    /// A third of the VMs each
    Mixed,
}

/// What is to be run.
#[derive(Clone, Debug, Args)]
pub struct Density {
    #[command(flatten)]
    output: Output,
    /// A small budget, a short period and three arms: seven minutes
    #[arg(long)]
    quick: bool,
    /// Arms in this order; docs/experiments.md says what each is [default: all; --quick:
    /// plain,reporting,ebb]
    #[arg(long, value_delimiter = ',', value_parser = ARMS)]
    arms: Vec<String>,
    /// RAM of each VM
    #[arg(long, default_value = "512MiB")]
    memory: Bytes,
    /// What all VMs together may hold [default: 6GiB; --quick: 2GiB]
    #[arg(long)]
    budget: Option<Bytes>,
    /// Seconds from one job of a VM to its next [default: 120; --quick: 40]
    #[arg(long)]
    period: Option<u64>,
    /// Seconds that a job keeps its memory [default: 3.7 % of the period]
    #[arg(long)]
    hold: Option<f64>,
    /// What a job takes [default: 75 % of RAM]
    #[arg(long)]
    size: Option<Bytes>,
    /// What jobs do
    #[arg(long, value_enum, default_value = "cycle")]
    job: Kind,
    /// VMs that are dropped at a time, and added if more than two [default: 2; --quick: 1]
    #[arg(long)]
    step: Option<u32>,
    /// No more VMs than this
    #[arg(long, default_value_t = 96)]
    most: u32,
    /// So many VMs from the beginning to the end
    #[arg(long)]
    vms: Option<u32>,
    /// With --vms: measured periods
    #[arg(long, default_value_t = 2)]
    periods: u32,
    /// With --vms: without swap, beside tests and other such runs; for long runs whose figures are
    /// not times
    #[arg(long, requires = "vms")]
    beside: bool,
}

/// The sizes and times that follow from the options.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    memory: Bytes,
    budget: Bytes,
    period: Duration,
    hold: Duration,
    size: Bytes,
    job: Kind,
    step: u32,
}

/// What one arm came to.
struct ArmResult {
    vms: u32,
    harm: String,
    /// In the time that counts: one period at rest, or all of the fixed run.
    series: Series,
    /// Held beside the VMs' cgroup, and a rival's orders since its first VM.
    beside: Bytes,
    orders: Option<u64>,
    touches: Vec<f64>,
    /// Median touch of the first two VMs.
    alone: f64,
    account: Account,
    rest: Vec<Rest>,
    checks: u64,
}

impl Density {
    /// Runs every arm, prints, writes the figures.
    pub fn run(&self) -> Result<()> {
        let quick = ["plain", "reporting", "ebb"].map(String::from).to_vec();
        let arms = match (self.arms.is_empty(), self.quick) {
            (false, _) => self.arms.clone(),
            (true, true) => quick,
            (true, false) => ARMS.map(String::from).to_vec(),
        };
        let plan = self.plan();
        println!(
            "VMs of {} on a budget of {}: each takes {} every {} s and keeps it for {:.1} s ({:?})",
            plan.memory,
            plan.budget,
            plan.size,
            plan.period.as_secs(),
            plan.hold.as_secs_f64(),
            plan.job
        );
        let mut counts = Vec::new();
        self.output.of("density", |outcome| {
            for arm in &arms {
                let begun = Instant::now();
                let result = self.arm(&plan, arm).with_context(|| format!("arm {arm}"))?;
                add(outcome, arm, &result);
                println!("{arm:<10} {}  ({:.0?})", line(&result), begun.elapsed());
                counts.push((arm.as_str(), result.vms));
            }
            Ok(())
        })?;
        if self.vms.is_none() {
            print!(
                "\nVMs of {} on {} without harm:\n{}",
                plan.memory,
                plan.budget,
                picture(&counts)
            );
        }
        Ok(())
    }

    fn plan(&self) -> Plan {
        let or = |given: Option<u64>, quick, full| {
            given.unwrap_or(if self.quick { quick } else { full })
        };
        let period = or(self.period, 40, 120);
        let hold = self.hold.unwrap_or(period as f64 * 0.037);
        let budget = or(self.budget.map(|b| b.0), Bytes::gib(2).0, Bytes::gib(6).0);
        Plan {
            memory: self.memory,
            budget: Bytes(budget),
            period: Duration::from_secs(period),
            hold: Duration::from_secs_f64(hold),
            size: self.size.unwrap_or(self.memory.share(0.75).floor_mib()),
            job: self.job,
            step: or(self.step.map(u64::from), 1, 2) as u32,
        }
    }

    fn arm(&self, plan: &Plan, arm: &str) -> Result<ArmResult> {
        if self.beside && merges(arm) {
            bail!(
                "arm {arm} merges pages of all VMs of the machine: it cannot run --beside others"
            );
        }
        let mut config = ArenaConfig::limited(plan.budget, Bytes::gib(1), SwapKind::Any);
        config.knobs = knobs(arm);
        if self.beside {
            (config.swap, config.beside) = (None, Beside::Tests);
        }
        let stage = Stage::enter(&config, Some(COMMON.max(plan.size)))?;
        let most = self.vms.unwrap_or(self.most);
        let names: Vec<String> = (0..most).map(|n| format!("{arm}-{}", n + 1)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let config = if arm == "ebb" { "[merge]\nmode = \"on\"" } else { "" };
        let daemon = stage.daemon(arm, &names, config)?;
        let tuned = arm.ends_with("ksmtuned");
        let _tuned = tuned.then(|| ksmtuned(stage.dir(), plan.budget)).transpose()?;
        let cgroup = stage.cgroup()?.clone();
        let (name, memory, kernel) = (&format!("{arm}-"), plan.memory, self.output.kernel);
        let mut fleet = Fleet {
            plan,
            stage: &stage,
            kind: stage::Fleet { name, arm, vms: most, memory, kernel },
            sampler: Sampler::start(10, Some(cgroup.clone())),
            rival: arm.starts_with("mom").then(|| Rival::mom(&cgroup, plan.budget)),
            cgroup,
            daemon: daemon.as_ref(),
            vms: Vec::new(),
            jobs: Jobs::new(plan.clone()),
        };
        let result = match self.vms {
            Some(vms) => fleet.fixed(vms, self.periods)?,
            None => fleet.grow(most, !self.quick)?,
        };
        drop(fleet);
        daemon.map(Daemon::end_well).transpose()?;
        Ok(result)
    }
}

/// The VMs of one arm.
struct Fleet<'a> {
    plan: &'a Plan,
    stage: &'a Stage,
    kind: stage::Fleet<'a>,
    cgroup: MemoryCgroup,
    sampler: Sampler,
    daemon: Option<&'a Daemon>,
    /// A rival's controller: it works whenever VMs do, as the daemon does.
    rival: Option<Rival>,
    vms: Vec<Vm>,
    jobs: Jobs,
}

impl Fleet<'_> {
    /// Finds the most VMs that run for a period without harm, see the top.
    fn grow(&mut self, most: u32, climbs: bool) -> Result<ArmResult> {
        let (most, step) = (most as usize, self.plan.step as usize);
        let mut harm = self.add(2, None)?;
        let first = self.jobs.until_touched(&self.vms, self.plan.period)?;
        self.jobs.alone = median(&first).unwrap_or_default();
        self.jobs.stagger(&self.vms)?;
        while harm.is_none() && self.vms.len() < most {
            // Those of a pair boot side by side.
            harm = self.add(self.plan.step.max(2), None)?;
            if harm.is_none() {
                harm = drive(self, Instant::now() + Duration::from_secs(1), false)?;
            }
        }
        let mut why = harm.clone().unwrap_or_else(|| format!("no more than {most}"));
        // The result with the most VMs so far, and whether more were tried.
        let (mut best, mut fell): (Option<ArmResult>, bool) = (None, false);
        loop {
            if let Some(found) = harm.take() {
                println!("  {} VMs: {found}", self.vms.len());
                why = found;
                if let Some(best) = best {
                    return Ok(ArmResult { harm: why, ..best });
                }
                if self.vms.len() <= step {
                    bail!("harm with {} VMs: {why}", self.vms.len());
                }
                self.remove();
                harm = self.settle()?;
                continue;
            }
            match self.try_for_a_period()? {
                Err(found) => (harm, fell) = (Some(found), true),
                Ok(result) if fell || !climbs || self.vms.len() + step > most => {
                    return Ok(ArmResult { harm: why, ..result });
                }
                Ok(result) => {
                    println!("  {} VMs: no harm", self.vms.len());
                    best = Some(result);
                    harm = self.add(self.plan.step, None)?;
                }
            }
        }
    }

    /// Spreads the jobs over the period, and measures one after half a period; or what harm there
    /// was.
    fn try_for_a_period(&mut self) -> Result<Result<ArmResult, String>> {
        // One may have been killed a moment ago.
        if let Err(e) = self.jobs.stagger(&self.vms) {
            return Ok(Err(e.to_string()));
        }
        if let Some(harm) = drive(self, Instant::now() + self.plan.period / 2, false)? {
            return Ok(Err(harm));
        }
        let (result, harm) = self.period(1)?;
        Ok(harm.map_or(Ok(result), Err))
    }

    /// Lets the harm pass that there was with more VMs.
    fn settle(&mut self) -> Result<Option<String>> {
        // Those that were killed have to be gone, and no job may be at its peak. What is swapped
        // out is read back while jobs go on: best where one more job fits beside it, as the kernel
        // kills a QEMU where it does not.
        let held = |job: Bytes| self.cgroup.usage() + self.cgroup.swap() + job > self.plan.budget;
        let until = Instant::now() + ROOM;
        while held(self.plan.size) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(200));
        }
        if held(Bytes::ZERO) {
            let swapped = self.cgroup.swap();
            return Ok(Some(format!("{swapped} that were swapped out do not fit")));
        }
        self.stage.arena.drain_swap()?;
        Ok(None)
    }

    /// A number of VMs, and what they hold over some periods.
    fn fixed(&mut self, vms: u32, periods: u32) -> Result<ArmResult> {
        let begun = Instant::now();
        // All have booted before the first job begins.
        let first = begun + Duration::from_secs(8) * vms;
        if let Some(harm) = self.add(vms, Some(first))? {
            println!("  {harm}");
        }
        self.jobs.stagger(&self.vms)?;
        drive(self, Instant::now() + self.plan.period, false)?;
        let (mut result, harm) = self.period(periods)?;
        result.harm = harm.unwrap_or_default();
        Ok(result)
    }

    /// Boots VMs side by side while the others work, and starts their jobs.
    fn add(&mut self, count: u32, start: Option<Instant>) -> Result<Option<String>> {
        let mut configs = Vec::new();
        for n in 1..=count as usize {
            let config = self.kind.config(self.stage, self.vms.len() + n)?;
            configs.push(VmConfig { translations: TRANSLATIONS, ..config });
        }
        let boot = move || -> Result<Vec<Vm>> {
            let mut booted = Vec::new();
            for pair in configs.chunks(2) {
                booted.append(&mut guest_stack::boot(pair)?);
            }
            Ok(booted)
        };
        let mut harm = None;
        let booted = std::thread::scope(|s| -> Result<Vec<Vm>> {
            let thread = s.spawn(boot);
            while !thread.is_finished() {
                let until = Instant::now() + Duration::from_millis(200);
                let found = drive(self, until, false)?;
                harm = harm.take().or(found);
            }
            thread.join().map_err(|_| anyhow::anyhow!("booting panicked"))?
        });
        let booted = match booted {
            Ok(booted) => booted,
            // Where memory is out, the kernel may kill the one that boots.
            Err(e) if !self.vms.is_empty() => return Ok(Some(format!("one did not boot: {e:#}"))),
            Err(e) => return Err(e),
        };
        for vm in booted {
            self.sampler.watch(&vm.name, vm.pid);
            self.jobs.add(&vm, start.unwrap_or_else(|| self.jobs.gap()))?;
            self.vms.push(vm);
        }
        self.charge()?;
        Ok(harm)
    }

    /// Takes off the budget what is held beside the VMs; how much that is.
    fn charge(&self) -> Result<Bytes> {
        let beside = account::beside(self.daemon, self.kind.arm)?;
        self.cgroup.resize(self.plan.budget - beside)?;
        Ok(beside)
    }

    /// The ones that were lost go, and then those that came last.
    fn remove(&mut self) {
        let left = self.vms.len().saturating_sub(self.plan.step as usize).max(1);
        let lost: Vec<bool> = self.vms.iter().map(|vm| vm.check().is_err()).collect();
        self.jobs.drop_lost(&lost);
        let mut each = lost.iter();
        self.vms.retain(|_| !each.next().is_some_and(|lost| *lost));
        self.vms.truncate(left);
        self.jobs.truncate(left);
    }

    /// Runs for some periods and measures.
    fn period(&mut self, periods: u32) -> Result<(ArmResult, Option<String>)> {
        let beside = self.charge()?;
        let (from, before) = (self.sampler.now(), Account::read(&self.vms, self.daemon)?);
        let begun = Instant::now();
        self.jobs.count_anew();
        let harm = drive(self, begun + self.plan.period * periods, true)?;
        let account = Account::read(&self.vms, self.daemon)?.since(&before, begun.elapsed());
        let mut series = self.sampler.series();
        series.points.retain(|p| p.at >= from);
        warn_of_others(&series);
        let result = ArmResult {
            vms: self.vms.len() as u32,
            harm: String::new(),
            series,
            beside,
            orders: self.rival.as_ref().map(Rival::orders),
            touches: self.jobs.touches.clone(),
            alone: self.jobs.alone,
            account,
            rest: account::rest(&self.vms)?,
            checks: self.jobs.checks,
        };
        Ok((result, harm))
    }
}

/// Drives jobs and a rival's controller; returns at the first harm, or when it is time.
/// `strict`: a slow job counts.
fn drive(fleet: &mut Fleet<'_>, until: Instant, strict: bool) -> Result<Option<String>> {
    while Instant::now() < until {
        if let Some(harm) = fleet.jobs.step(&fleet.vms)? {
            return Ok(Some(harm));
        }
        if let Some(rival) = &mut fleet.rival
            && let Err(e) = rival.tick(&fleet.vms)
        {
            return Ok(Some(e.to_string()));
        }
        let swapped = fleet.cgroup.swap();
        if swapped > SWAPPED {
            return Ok(Some(format!("{swapped} swapped out")));
        }
        if strict && fleet.jobs.alone > 0.0 {
            let slow = fleet.jobs.touches.iter().find(|t| **t > SLOW * fleet.jobs.alone);
            if let Some(slow) = slow {
                let alone = fleet.jobs.alone;
                return Ok(Some(format!("a job took {slow:.2} s to touch, {alone:.2} s alone")));
            }
            if let Some(n) = fleet.jobs.late(SLOW * fleet.jobs.alone, Instant::now()) {
                let name = fleet.vms.get(n).map_or("a VM", |vm| &vm.name);
                return Ok(Some(format!("{name} did not touch its memory in time")));
            }
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    Ok(None)
}

fn held(r: &ArmResult) -> crate::sampler::Stat {
    r.series.stat(|p| (p.cgroup + p.cgroup_swap + r.beside).0 as f64)
}

/// Which share of what is held is in huge pages, in the first and in the last tenth of the time.
fn huge(series: &Series) -> (f64, f64) {
    let share = |points: &[crate::sampler::Point]| {
        let sum = |of: fn(&crate::sampler::Point) -> Bytes| {
            points.iter().map(|p| of(p).0 as f64).sum::<f64>()
        };
        sum(|p| p.cgroup_huge) / sum(|p| p.cgroup).max(1.0)
    };
    let tenth = series.points.len().div_ceil(10);
    let end = series.points.len() - tenth;
    (share(&series.points[..tenth]), share(&series.points[end..]))
}

fn line(r: &ArmResult) -> String {
    let each = |v: f64| Bytes((v / f64::from(r.vms)) as u64).to_string();
    let held = held(r);
    format!(
        "{:>3} VMs  a VM {:>8} (peak {}, least {})  touch {:.2} s (alone {:.2})  idle {:.0} %{}  {}",
        r.vms,
        each(held.mean),
        each(held.max),
        each(held.min),
        median(&r.touches).unwrap_or_default(),
        r.alone,
        100.0 * r.account.idle,
        if r.account.idle < IDLE { " (bound by the processors: a lower bound)" } else { "" },
        r.harm
    )
}

fn add(outcome: &mut ExperimentResult, arm: &str, r: &ArmResult) {
    let n = f64::from(r.vms);
    let held = held(r);
    let mean = |of: &dyn Fn(&Rest) -> Bytes| {
        r.rest.iter().map(|rest| of(rest).0 as f64).sum::<f64>() / r.rest.len().max(1) as f64
    };
    outcome.add(arm, "vms", "count", &[n]);
    outcome.add(arm, "held_mean", "bytes", &[held.mean]);
    outcome.add(arm, "held_peak", "bytes", &[held.max]);
    outcome.add(arm, "held_least", "bytes", &[held.min]);
    outcome.add(arm, "vm_mean", "bytes", &[held.mean / n]);
    let guest = (held.mean - r.beside.0 as f64) / n - mean(&|r| r.vmm_private);
    outcome.add(arm, "vm_mean_guest", "bytes", &[guest]);
    outcome.add(arm, "held_beside", "bytes", &[r.beside.0 as f64]);
    if let Some(orders) = r.orders {
        outcome.add(arm, "orders", "count", &[orders as f64]);
    }
    let (begin, end) = huge(&r.series);
    outcome.add(arm, "huge_begin", "fraction", &[begin]);
    outcome.add(arm, "huge_end", "fraction", &[end]);
    outcome.add(arm, "vm_rest_guest", "bytes", &[mean(&|r| r.guest)]);
    outcome.add(arm, "vm_rest_guest_huge", "bytes", &[mean(&|r| r.huge)]);
    outcome.add(arm, "vm_rest_vmm", "bytes", &[mean(&|r| r.vmm)]);
    outcome.add(arm, "swap_peak", "bytes", &[r.series.stat(|p| p.cgroup_swap.0 as f64).max]);
    outcome.add_median(arm, "touch", "seconds", &r.touches);
    outcome.add(arm, "touch_alone", "seconds", &[r.alone]);
    outcome.add(arm, "host_idle", "fraction", &[r.account.idle]);
    outcome.add(arm, "checks", "count", &[r.checks as f64]);
    r.account.add(outcome, arm);
    let t: Vec<f64> = r.series.points.iter().map(|p| p.at.as_secs_f64()).collect();
    let mut series = |name: &str, v: Vec<f64>| {
        let (arm, name, unit) = (arm.into(), name.into(), "bytes".into());
        outcome.series.push(SeriesRow { arm, name, unit, t: t.clone(), v });
    };
    series("held", r.series.points.iter().map(|p| p.cgroup.0 as f64).collect());
    series("huge", r.series.points.iter().map(|p| p.cgroup_huge.0 as f64).collect());
    series("swap", r.series.points.iter().map(|p| p.cgroup_swap.0 as f64).collect());
    for (n, name) in r.series.vms.iter().enumerate() {
        let of = |p: &crate::sampler::Point| p.resident.get(n).map_or(0.0, |r| r.0 as f64);
        series(name, r.series.points.iter().map(of).collect());
    }
}
