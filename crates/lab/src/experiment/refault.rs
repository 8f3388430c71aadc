//! `refault`: what module and recycling cost a guest that allocates and frees
//! again and again: will-it-scale's page_fault1 (map 128 MiB, touch each page, unmap).
//!
//! Arms: `plain` (no module), `module` (loaded, nothing recycled), `ebb-guest` (and
//! `ebb run` recycles as it always does). They take turns in one VM, and each round
//! gives the ratio of its own neighbours: metric `ops_ratio` (the guest has huge
//! pages; `_4k`: it has none), the median of them. `ops` is pages a second; `cpu_ops`
//! and `cpu_ops_ratio` are pages a second of QEMU's processor time, agent included,
//! which a busy machine disturbs less.
//!
//! Metrics `interval_…` are of a loop that begins once a second and waits in between,
//! so that its memory can be taken while it is free: `interval_ops` is pages a second
//! without the waiting. `interval_recycled` is what the agent recycled a loop. Arm
//! `reporting`, in a VM of its own, has QEMU's free page reporting.
//!
//! Time under emulation is noisy, and no measure of a real processor. So the loop
//! also runs where the guest's clock counts instructions: `instructions` a page,
//! and `instruction_ratio`, of `plain` and `module` (what the host does takes no
//! instruction of the guest).

use anyhow::Result;
use ebb_core::units::Bytes;

use super::cgroup_guest::{Bench, MINUTE, Place, RamKind};
use super::trial::{Figures, Trial, in_turns};
use crate::result::{ExperimentResult, target};
use crate::vm::{Balloon, cpu_s};

/// All arms; ratios need the first.
pub const ARMS: [&str; 4] = ["plain", "module", "ebb-guest", "reporting"];
/// Of page_fault1.
const SIZE: u64 = 128 << 20;
const SECONDS: u32 = 6;
/// Loops of one measurement at an interval.
const LOOPS: u32 = 20;
/// Loops before that.
const WARM_LOOPS: u32 = 10;

/// Whether the guest's loop gets huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// One fault for 2 MiB.
    Huge,
    Small,
}

impl Pages {
    pub const ALL: [Pages; 2] = [Pages::Huge, Pages::Small];

    /// What the names of metrics end with.
    pub fn suffix(self) -> &'static str {
        if self == Pages::Huge { "" } else { "_4k" }
    }

    fn flag(self) -> u32 {
        u32::from(self == Pages::Huge)
    }
}

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let mut bench = Bench::new(trial, outcome)?;
    timed(&mut bench)?;
    for (pages, counts) in counted(&bench)? {
        let suffix = pages.suffix();
        let metric = format!("instructions{suffix}");
        outcome.add_median("plain", &metric, "count", &counts.plain);
        outcome.add_median("module", &metric, "count", &counts.module);
        let ratio: Vec<f64> =
            counts.plain.iter().zip(&counts.module).map(|(plain, with)| plain / with).collect();
        outcome.add_median("module", &format!("instruction_ratio{suffix}"), "fraction", &ratio);
    }
    for (arm, metric, least) in [
        ("module", "ops_ratio", 0.995),
        ("module", "instruction_ratio", 0.995),
        ("module", "ops_ratio_4k", 0.97),
        ("module", "instruction_ratio_4k", 0.97),
        ("module", "cpu_ops_ratio", 0.995),
        ("module", "cpu_ops_ratio_4k", 0.97),
        ("ebb-guest", "cpu_ops_ratio", 0.98),
        ("ebb-guest", "cpu_ops_ratio_4k", 0.95),
        ("ebb-guest", "ops_ratio", 0.98),
        ("ebb-guest", "ops_ratio_4k", 0.95),
        ("ebb-guest", "interval_ops_ratio", 0.98),
        ("ebb-guest", "interval_ops_ratio_4k", 0.98),
    ] {
        if let Some(v) = outcome.value(arm, metric) {
            target(&format!("{arm} {metric}"), v, ">=", least);
        }
    }
    Ok(())
}

/// When a loop begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// As soon as the last one has ended.
    AtOnce,
    /// Once a second.
    Interval,
}

impl Pace {
    /// What the names of metrics begin with.
    fn prefix(self) -> &'static str {
        if self == Pace::AtOnce { "" } else { "interval_" }
    }
}

/// In real time, in turns.
fn timed(bench: &mut Bench<'_>) -> Result<()> {
    let (trial, place) = (bench.trial, bench.boot(RamKind::Huge, true, |c| c.cpus = 1)?);
    let arms: Vec<&str> =
        ARMS.iter().copied().filter(|a| trial.wants(a) || *a == "plain").collect();
    let reporting = |bench: &Bench<'_>| {
        bench.boot(RamKind::Huge, false, |c| {
            c.name = format!("{}-reporting", c.name);
            c.cpus = 1;
            c.balloon = Some(Balloon { reporting: true, deflate_on_oom: true });
        })
    };
    let other = arms.contains(&"reporting").then(|| reporting(bench)).transpose()?;
    for (pace, pages) in
        [Pace::AtOnce, Pace::Interval].into_iter().flat_map(|p| Pages::ALL.map(|pages| (p, pages)))
    {
        println!("{pace:?}, {pages:?}:");
        let turns = in_turns(&arms, trial.rounds(7), |arm| {
            let place = other.as_ref().filter(|_| arm == "reporting").unwrap_or(&place);
            turn(place, arm, pace, pages)
        })?;
        let name = |metric: &str| format!("{}{metric}{}", pace.prefix(), pages.suffix());
        turns.add(bench.outcome, ExperimentResult::add_median, name);
        turns.add_ratios(bench.outcome, "plain", &["ops", "cpu_ops"], name);
    }
    Ok(())
}

/// Pages a second of the loops' own time, and of QEMU's processor time; what the agent recycled a
/// loop. The guest is as it was afterwards.
fn turn(place: &Place, arm: &str, pace: Pace, pages: Pages) -> Result<Figures> {
    let tier = ["module", "ebb-guest"].contains(&arm);
    if tier {
        place.insmod()?;
    }
    let daemon = if arm == "ebb-guest" { Some(place.daemon("guest")?) } else { None };
    let (warm, measured) = match pace {
        Pace::AtOnce => ("seconds=1".to_string(), format!("seconds={SECONDS}")),
        Pace::Interval => {
            let loops = |n| format!("iterations={n} period_ms=1000");
            (loops(WARM_LOOPS), loops(LOOPS))
        }
    };
    // The translator's work, and what loading the module and starting the daemon set off, are not
    // measured.
    faultloop(place, pages, &warm)?;
    let recycled = || match &daemon {
        None => Ok(0),
        Some(daemon) => daemon
            .vm(&place.vm.name)
            .map(|vm| vm["agent"]["counters"]["recycled"].as_u64().unwrap_or(0)),
    };
    // All threads of QEMU, the agent's too.
    let pid = place.vm.pid;
    let before = (cpu_s(pid)?, recycled()?);
    let found = faultloop(place, pages, &measured)?;
    let took = cpu_s(pid)? - before.0;
    let recycled = recycled()?.saturating_sub(before.1) as f64 / found.loops;
    if let Some(daemon) = daemon {
        daemon.stop();
    }
    if tier {
        place.sh("rmmod ebb")?;
    }
    let mut figures = vec![
        ("ops", "per_second", 1e9 / found.each),
        ("cpu_ops", "per_second", found.pages / took),
    ];
    if pace == Pace::Interval && arm == "ebb-guest" {
        figures.push(("recycled", "bytes", recycled));
    }
    Ok(figures)
}

/// What loops came to, by the guest's clock.
struct Loop {
    loops: f64,
    pages: f64,
    /// Nanoseconds a page, without the time between two loops.
    each: f64,
}

fn faultloop(place: &Place, pages: Pages, until: &str) -> Result<Loop> {
    let arguments = format!("size={SIZE} huge={} {until}", pages.flag());
    place.vm.ask(|tool| tool.start("f", "faultloop", &arguments))?;
    let end = place.vm.ask(|tool| tool.wait_end("f", 5 * MINUTE))?;
    let pages = end.u64("pages").max(1) as f64;
    let each = end.u64("total_ns") as f64 / pages;
    Ok(Loop { loops: end.u64("cycles").max(1) as f64, pages, each })
}

/// Instructions a page, of measurements that took turns.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub plain: Vec<f64>,
    pub module: Vec<f64>,
}

/// The same loop where a nanosecond is an instruction.
pub fn counted(bench: &Bench<'_>) -> Result<Vec<(Pages, Counts)>> {
    let place = bench.boot(RamKind::Huge, true, |c| {
        c.cpus = 1;
        c.counted = true;
        // Kernels use no huge pages of themselves where there is less.
        c.memory = Bytes::gib(1);
    })?;
    let mut all = Vec::new();
    for pages in Pages::ALL {
        let mut counts = Counts::default();
        // What runs for a while after boot is not counted.
        faultloop(&place, pages, "iterations=6")?;
        for _ in 0..bench.trial.rounds(3).max(3) {
            faultloop(&place, pages, "iterations=1")?;
            counts.plain.push(faultloop(&place, pages, "iterations=4")?.each);
            place.insmod()?;
            faultloop(&place, pages, "iterations=1")?;
            counts.module.push(faultloop(&place, pages, "iterations=4")?.each);
            place.sh("rmmod ebb")?;
            println!(
                "  counted, {pages:?}: {:.1} instructions a page without, {:.1} with the module",
                counts.plain.last().unwrap_or(&0.0),
                counts.module.last().unwrap_or(&0.0)
            );
        }
        all.push((pages, counts));
    }
    Ok(all)
}
