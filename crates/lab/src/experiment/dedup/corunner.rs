//! `corunner`: what a VM at work notices of merging beside it.
//!
//! One VM walks over 64 MiB in an order that no prefetcher guesses (the guest tool's
//! `chase`); two others hold memory of which half is alike, and stand still. In turns
//! nothing is merged (`plain`), `ksmd` works by the kernel's defaults (`ksm`), or Ebb's
//! governor has it work (`ebb-stock`), both with a fifth of a core; everything is unmerged
//! before each turn. `ebb-clear` is Ebb as it is by default while the host is not short: the
//! governor has `ksmd` work in pulses, and the scanner reads beside it likewise; to get in
//! so short a turn to where pages are merged, all of it is first looked at once quickly.
//! `spin` is the control: a thread that only counts, without memory, for as long
//! and as often as the governor has `ksmd` work in `ebb-stock`, so what a VM notices
//! of any work on the processor beside it. `p50` and `p99` are times of 2,048 steps by the
//! guest's own clock, medians of all turns; the `_ratio`s are of each turn to `plain` of
//! the same round. `ksmd_share` is what `ksmd` used meanwhile, `merged` what that saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use ebb_core::model::Pressure;
use ebb_core::policy::merge::Settings;
use ebb_core::units::Bytes;
use ebb_host::act::ksm;
use ebb_host::linux::LinuxHost;
use ebb_host::probe::ksm::{ksmd, read_ksm};
use ebb_host::root::Root;
use ebb_host::scan::{Dial, Options, Scanner};

use super::arms::{Kind, Runner, hold_knobs, targets};
use super::course::{Course, run_time};
use super::governor::Governor;
use crate::Background;
use crate::arena::{Arena, ArenaConfig, steadily};
use crate::experiment::trial::{Figures, Trial, in_turns};
use crate::guest_stack;
use crate::result::ExperimentResult;
use crate::vm::{Vm, VmConfig};

pub const ARMS: [&str; 5] = ["plain", "ksm", "ebb-stock", "ebb-clear", "spin"];
/// Of a core, where it is not Ebb's default.
const SHARE: f64 = 0.2;
const MINUTE: Duration = Duration::from_secs(60);
/// One turn: about as long as a burst takes at the default budget.
const TURN: Duration = Duration::from_secs(8);
/// Between two pulses of `spin`, as between two batches of the governor.
const SPIN_SLEEP: Duration = Duration::from_millis(20);
const CHASE: &str = "size=67108864";

/// So much of what a VM holds is merged when `ebb-clear` begins its turn, half of it being alike.
const MERGING: f64 = 0.4;

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let arena = Arena::enter(&ArenaConfig::default())?;
    hold_knobs(&arena)?;
    let vms = boot(trial)?;
    let co = &vms[0];
    let turns = in_turns(&trial.arms, trial.rounds(5), |arm| {
        ksm::unmerge(&Root::default())?;
        let _spinning = (arm == "spin").then(|| Background::start(spin));
        turn(co, &vms, arm, trial.size(256).share(MERGING))
    })?;
    let stat = co.ask(|tool| tool.stop("c"))?;
    anyhow::ensure!(stat.u64("cycles") > 0, "{}: it did not run: {:?}", co.name, stat.0);
    turns.add(outcome, ExperimentResult::add_median, str::to_string);
    turns.add_ratios(outcome, ARMS[0], &["p50", "p99"], str::to_string);
    Ok(())
}

fn boot(trial: &Trial) -> Result<Vec<Vm>> {
    let size = trial.size(256);
    let vms = guest_stack::boot(&["co", "duplicate1", "duplicate2"].map(|name| {
        let ram = Bytes::mib(192) + Bytes(size.0 / 8 * 9);
        let mut config = VmConfig::new(format!("{name}-{}", std::process::id()), ram.floor_mib());
        config.kernel = trial.kernel;
        config.small_pages = true;
        config
    }))?;
    for (n, vm) in vms.iter().enumerate() {
        let (job, kind, arguments) = match n {
            0 => ("c", "chase", CHASE.to_string()),
            _ => ("h", "hold", format!("size={} seed={n} pattern=template share=0.5", size.0)),
        };
        vm.ask(|tool| tool.start_ready(job, kind, &arguments, 5 * MINUTE))?;
        if n > 0 {
            vm.pause()?;
        }
    }
    Ok(vms)
}

/// Work beside the VM that touches no memory.
fn spin(quit: &AtomicBool) {
    let pulse = SPIN_SLEEP.mul_f64(SHARE / (1.0 - SHARE));
    while !quit.load(Ordering::Relaxed) {
        let begun = Instant::now();
        while begun.elapsed() < pulse {
            std::hint::spin_loop();
        }
        std::thread::sleep(SPIN_SLEEP);
    }
}

fn turn(co: &Vm, vms: &[Vm], arm: &str, first: Bytes) -> Result<Figures> {
    let mut beside = match Kind::from_str(arm, false) {
        _ if arm == "ebb-clear" => Beside::clear(vms, first)?,
        Err(_) => Beside::Nothing,
        Ok(kind) => {
            let mut runner = Box::new(Runner::new(kind, SHARE, vms)?);
            runner.begin()?;
            Beside::Runner(runner)
        }
    };
    let pid = ksmd(&Root::default()).context("no ksmd")?;
    let (before, merged) = (run_time(pid)?, merged()?);
    // It tells what it saw since the last time.
    co.poked("c", MINUTE)?;
    let begun = Instant::now();
    while begun.elapsed() < TURN {
        beside.step()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let said = co.poked("c", MINUTE)?;
    let share = (run_time(pid)? - before) / begun.elapsed().as_secs_f64();
    let merged = self::merged()?.0 as f64 - merged.0 as f64;
    beside.end()?;
    let seconds = |key: &str| said.u64(key) as f64 / 1e9;
    Ok(vec![
        ("p50", "seconds", seconds("p50_ns")),
        ("p99", "seconds", seconds("p99_ns")),
        ("ksmd_share", "fraction", share),
        ("merged", "bytes", merged),
    ])
}

/// What goes on beside the VM.
enum Beside<'a> {
    Nothing,
    Runner(Box<Runner<'a>>),
    /// `ksmd` and a scan, both as on a host that is not short.
    Clear(Box<Governor>, Scan, tempfile::TempDir),
}

impl Beside<'_> {
    /// From when so much is merged.
    fn clear(vms: &[Vm], first: Bytes) -> Result<Beside<'_>> {
        let mut runner = Runner::new(Kind::EbbStock, SHARE, vms)?;
        let (_, planned) = runner.scan()?;
        // All of it has been seen once, quickly: from here on pages are merged.
        runner.begin()?;
        while merged()? < first {
            let rests = runner.step(&Course::default(), Bytes::ZERO)?;
            anyhow::ensure!(!rests, "{first} were to be merged, not {}", merged()?);
            std::thread::sleep(Duration::from_millis(10));
        }
        runner.end()?;
        let (dir, settings) = (tempfile::tempdir()?, Settings::default());
        let state = dir.path().join("ksm.json");
        let taken = steadily(|| Governor::take(&state, settings));
        let mut governor = taken?;
        governor.plan(planned);
        let scan = Scan::start(vms, settings.share(Pressure::Clear))?;
        Ok(Beside::Clear(Box::new(governor), scan, dir))
    }

    fn step(&mut self) -> Result<()> {
        match self {
            Beside::Nothing => {}
            Beside::Runner(runner) => {
                runner.step(&Course::default(), Bytes::ZERO)?;
            }
            Beside::Clear(governor, ..) => {
                steadily(|| governor.step(LinuxHost::now(), Pressure::Clear))?;
            }
        }
        Ok(())
    }

    fn end(self) -> Result<()> {
        match self {
            Beside::Nothing => Ok(()),
            Beside::Runner(mut runner) => runner.end(),
            Beside::Clear(governor, scan, _dir) => {
                steadily(|| governor.release())?;
                scan.end()
            }
        }
    }
}

fn merged() -> Result<Bytes> {
    Ok(read_ksm(&Root::default())?.context("no KSM")?.saved())
}

/// A scan beside a turn.
struct Scan {
    dial: Arc<Dial>,
    thread: JoinHandle<Result<()>>,
}

impl Scan {
    fn start(vms: &[Vm], cores: f64) -> Result<Scan> {
        let (targets, dial) = (targets(vms)?, Arc::new(Dial::new(cores)));
        let options =
            Options { threads: Some(1), dial: Some(Arc::clone(&dial)), ..Options::default() };
        let thread = std::thread::spawn(move || {
            Scanner::new(Root::default())?.scan(&targets, &options);
            Ok(())
        });
        Ok(Scan { dial, thread })
    }

    /// It must have been at work until now.
    fn end(self) -> Result<()> {
        let early = self.thread.is_finished();
        self.dial.set(1.0);
        self.thread.join().map_err(|_| anyhow::anyhow!("the scan panicked"))??;
        anyhow::ensure!(!early, "the scan was over before the turn: give it a larger --scale");
        Ok(())
    }
}
