//! `corunner`: what a VM at work notices of merging beside it.
//!
//! One VM walks over 64 MiB in an order that no prefetcher guesses (the guest tool's
//! `chase`); two others hold memory of which half is alike, and stand still. In turns
//! nothing is merged (`plain`), `ksmd` works by the kernel's defaults (`ksm`), or Ebb's
//! governor has it work (`ebb-stock`), both with the share of a core that Ebb has by
//! default; everything is unmerged before each turn. `spin` is the control: a thread that
//! only counts, without memory, for as long and as often as the governor has `ksmd` work, so
//! what a VM notices of any work on the processor beside it. `p50` and `p99` are times of
//! 2,048 steps by the guest's own clock, medians of all turns; the `_ratio`s are of each
//! turn to `plain` of the same round. `ksmd_share` is what `ksmd` used meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::policy::merge::Settings;
use ebb_core::units::Bytes;
use ebb_host::act::governor::ksmd;
use ebb_host::act::ksm;
use ebb_host::root::Root;

use super::arms::{Kind, Runner, hold_knobs};
use super::course::{Course, run_time};
use crate::arena::{Arena, ArenaConfig};
use crate::experiment::trial::Trial;
use crate::result::Outcome;
use crate::vm::{Vm, VmConfig};

/// All arms.
pub const ARMS: [&str; 4] = ["plain", "ksm", "ebb-stock", "spin"];
const MINUTE: Duration = Duration::from_secs(60);
/// One turn: about as long as a burst takes at the default budget.
const TURN: Duration = Duration::from_secs(8);
/// Between two pulses of `spin`, as between two batches of the governor.
const SPIN_SLEEP: Duration = Duration::from_millis(20);
const CHASE: &str = "size=67108864";
const KEYS: [(&str, &str); 2] = [("p50_ns", "p50"), ("p99_ns", "p99")];

/// A turn: p50, p99 in seconds, share of a core.
type Turn = [f64; 3];

/// Runs it.
pub fn run(trial: &Trial, outcome: &mut Outcome) -> Result<()> {
    let arena = Arena::enter(&ArenaConfig::default())?;
    hold_knobs(&arena)?;
    let vms = boot(trial)?;
    let co = &vms[0];
    let mut turns: Vec<(&str, Vec<Turn>)> = ARMS.iter().map(|arm| (*arm, Vec::new())).collect();
    for _ in 0..trial.rounds(5) {
        for (arm, done) in turns.iter_mut().filter(|(arm, _)| trial.wants(arm)) {
            ksm::unmerge(&Root::default())?;
            let spinning = (*arm == "spin").then(Spin::start);
            done.push(turn(co, &vms, Kind::named(arm))?);
            drop(spinning);
        }
    }
    let stat = co.tool().stop("c").map_err(|e| co.explain(e))?;
    anyhow::ensure!(stat.u64("cycles") > 0, "{}: it did not run: {:?}", co.name(), stat.0);
    note(outcome, &turns);
    Ok(())
}

fn boot(trial: &Trial) -> Result<Vec<Vm>> {
    let size = trial.size(256);
    let mut vms = Vec::new();
    for name in ["co", "twin1", "twin2"] {
        let ram = Bytes::mib(192) + Bytes(size.0 / 8 * 9);
        let mut config = VmConfig::new(format!("{name}-{}", std::process::id()), ram.floor_mib());
        config.kernel = trial.kernel;
        config.small_pages = true;
        vms.push(Vm::spawn(&config)?);
    }
    for (n, vm) in vms.iter_mut().enumerate() {
        vm.wait_ready()?;
        let (job, kind, arguments) = match n {
            0 => ("c", "chase", CHASE.to_string()),
            _ => ("h", "hold", format!("size={} seed={n} pattern=template share=0.5", size.0)),
        };
        let started = vm.tool().start_ready(job, kind, &arguments, 5 * MINUTE);
        started.map_err(|e| vm.explain(e))?;
        if n > 0 {
            vm.pause()?;
        }
    }
    Ok(vms)
}

/// Work beside the VM that touches no memory, until dropped.
struct Spin {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Spin {
    fn start() -> Spin {
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let share = Settings::default().cores;
        let pulse = SPIN_SLEEP.mul_f64(share / (1.0 - share));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let begun = Instant::now();
                while begun.elapsed() < pulse {
                    std::hint::spin_loop();
                }
                std::thread::sleep(SPIN_SLEEP);
            }
        });
        Spin { end, thread: Some(thread) }
    }
}

impl Drop for Spin {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn turn(co: &Vm, vms: &[Vm], kind: Option<Kind>) -> Result<Turn> {
    let cores = Settings::default().cores;
    let mut runner = kind.map(|k| Runner::new(k, cores, vms)).transpose()?;
    let pid = ksmd(&Root::default()).context("no ksmd")?;
    let before = run_time(pid)?;
    if let Some(runner) = &mut runner {
        runner.begin()?;
    }
    poke(co)?;
    let begun = Instant::now();
    while begun.elapsed() < TURN {
        if let Some(runner) = &mut runner {
            runner.step(&Course::default(), Bytes::ZERO)?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let said = poke(co)?;
    if let Some(runner) = &mut runner {
        runner.end()?;
    }
    let share = (run_time(pid)? - before) / begun.elapsed().as_secs_f64();
    let seconds = |key: &str| said.u64(key) as f64 / 1e9;
    Ok([seconds(KEYS[0].0), seconds(KEYS[1].0), share])
}

/// What it saw since the last time.
fn poke(co: &Vm) -> Result<crate::guest::Fields> {
    co.tool().poke("c").map_err(|e| co.explain(e))?;
    Ok(co.tool().wait_event("c", "progress", MINUTE).map_err(|e| co.explain(e))?)
}

fn note(outcome: &mut Outcome, turns: &[(&str, Vec<Turn>)]) {
    let plain = turns[0].1.clone();
    for (arm, turns) in turns {
        for (i, (_, metric)) in KEYS.iter().enumerate() {
            let values: Vec<f64> = turns.iter().map(|t| t[i]).collect();
            outcome.add_median(arm, metric, "seconds", &values);
            if *arm != ARMS[0] {
                let ratios: Vec<f64> =
                    turns.iter().zip(&plain).map(|(t, plain)| t[i] / plain[i]).collect();
                outcome.add_median(arm, &format!("{metric}_ratio"), "fraction", &ratios);
            }
        }
        let shares: Vec<f64> = turns.iter().map(|t| t[2]).collect();
        outcome.add_median(arm, "ksmd_share", "fraction", &shares);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Accel;

    #[test]
    fn ratios_are_by_round() {
        let mut outcome = Outcome::new("corunner", "6.1", Accel::Tcg);
        let turns = [
            ("plain", vec![[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]]),
            ("ksm", vec![[1.0, 3.0, 0.2], [2.0, 6.0, 0.2]]),
        ];
        note(&mut outcome, &turns);
        assert_eq!(outcome.value("ksm", "p50_ratio"), Some(1.0));
        assert_eq!(outcome.value("ksm", "p99_ratio"), Some(1.5));
        assert_eq!(outcome.value("plain", "p99"), Some(3.0));
        assert_eq!(outcome.value("plain", "p99_ratio"), None);
    }
}
