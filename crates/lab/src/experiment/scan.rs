//! `scan`: how fast the page scanner is, beside the raw limit of the same machine.
//!
//! A paused VM full of noise is scanned whole with one thread and with two; in turns
//! with that the same bytes are hashed where they lie in this process (arm `raw`):
//! what no scanner that hashes can beat. `rate` is bytes by the clock with one thread,
//! `rate_two` with two, `scaling` their ratio; `rate_cpu` is bytes by a second of
//! processor time of all threads, counting included, and `rate_reading` without that.
//! `rescan_page` is processor time a page of a scan that compares with the last one;
//! `metadata` and `metadata_kept` are what the table takes of what was read, and
//! with what a scanner keeps until its next scan.
//! Metrics end with `_thp` where the VM has huge pages, else its pages are of 4 KiB.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, PAGE};
use ebb_host::probe::process::read_stat;
use ebb_host::root::Root;
use ebb_host::scan::hash::Key;
use ebb_host::scan::pace::thread_cpu;
use ebb_host::scan::{Changes, Found, Options, Scan, Scanner, Target};

use super::place::Memory;
use super::trial::Trial;
use crate::arena::{Arena, ArenaConfig};
use crate::result::Outcome;
use crate::vm::{Vm, VmConfig};

/// All arms.
pub const ARMS: [&str; 2] = ["raw", "ebb-stock"];
const MINUTE: Duration = Duration::from_secs(60);
/// What a guest takes beside what it holds.
const OWN: Bytes = Bytes::mib(192);

/// One pass.
#[derive(Clone, Copy, Debug)]
struct Pass {
    bytes: f64,
    clock_s: f64,
    cpu_s: f64,
}

impl Pass {
    fn rate(&self) -> f64 {
        self.bytes / self.clock_s
    }
}

/// Runs it.
pub fn run(trial: &Trial, outcome: &mut Outcome) -> Result<()> {
    let _arena = Arena::enter(&ArenaConfig::default())?;
    for memory in [Memory::Small, Memory::Huge] {
        let vm = boot(trial, memory)?;
        let target = target(&vm)?;
        let suffix = memory.suffix();
        let noise = trial.wants("raw").then(|| noise(trial.size(1024)));
        let mut raw = [Vec::new(), Vec::new()];
        let mut own = [Vec::new(), Vec::new()];
        for _ in 0..trial.rounds(7) {
            for (i, threads) in [1, 2].into_iter().enumerate() {
                if let Some(noise) = &noise {
                    raw[i].push(hash(noise, threads)?);
                }
                if trial.wants("ebb-stock") {
                    let scanner = &mut Scanner::new(Root::default())?;
                    own[i].push(scan(scanner, &target, threads, Changes::Ignore));
                }
            }
        }
        let passes = |scans: &[Scan]| scans.iter().map(pass).collect::<Vec<_>>();
        rates(outcome, "raw", suffix, &raw[0], &raw[1]);
        rates(outcome, "ebb-stock", suffix, &passes(&own[0]), &passes(&own[1]));
        if trial.wants("ebb-stock") {
            details(trial, outcome, suffix, &own[0], &target)?;
        }
        verdict(outcome, memory);
    }
    Ok(())
}

fn boot(trial: &Trial, memory: Memory) -> Result<Vm> {
    let size = trial.size(1024);
    let name = format!("scan-{}", std::process::id());
    let mut config = VmConfig::new(name, OWN + Bytes(size.0 / 16 * 17).floor_mib());
    config.kernel = trial.kernel;
    config.small_pages = memory == Memory::Small;
    let vm = Vm::start(&config)?;
    let hold = format!("size={}", size.0);
    vm.tool().start_ready("h", "hold", &hold, 5 * MINUTE).map_err(|e| vm.explain(e))?;
    vm.pause()?;
    Ok(vm)
}

fn target(vm: &Vm) -> Result<Target> {
    let root = Root::default();
    let start = read_stat(&root, vm.pid())?.context("the VM has ended")?.start;
    let id = VmId { pid: vm.pid(), start };
    let found = Found::look(&root, id, vm.name(), "lab")?.context("the VM has ended")?;
    found.target.context("a VM without RAM")
}

fn scan(scanner: &mut Scanner, target: &Target, threads: usize, changes: Changes) -> Scan {
    let options = Options { threads: Some(threads), idle: false, changes, ..Options::default() };
    scanner.scan(std::slice::from_ref(target), &options)
}

fn pass(scan: &Scan) -> Pass {
    Pass {
        bytes: scan.read.0 as f64,
        clock_s: scan.time.as_secs_f64(),
        cpu_s: scan.cpu.as_secs_f64(),
    }
}

/// Noise, so many bytes.
fn noise(size: Bytes) -> Vec<u8> {
    let mut x = 1u64;
    let words = (0..size.0 / 8).flat_map(|_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_ne_bytes()
    });
    words.collect()
}

/// Every page of it, in this process.
fn hash(bytes: &[u8], threads: usize) -> Result<Pass> {
    let key = Key::random()?;
    let begun = Instant::now();
    let part = bytes.len() / threads / PAGE as usize * PAGE as usize;
    let cpu: Duration = std::thread::scope(|s| {
        let started: Vec<_> = bytes
            .chunks_exact(part)
            .map(|part| {
                let key = &key;
                s.spawn(move || {
                    let pages = part.chunks_exact(PAGE as usize);
                    let sum = pages.fold(0, |sum, page| sum ^ key.page(page).unwrap_or(0));
                    std::hint::black_box(sum);
                    thread_cpu()
                })
            })
            .collect();
        started.into_iter().map(|t| t.join().unwrap_or_default()).sum()
    });
    let clock_s = begun.elapsed().as_secs_f64();
    Ok(Pass { bytes: (part * threads) as f64, clock_s, cpu_s: cpu.as_secs_f64() })
}

fn rates(outcome: &mut Outcome, arm: &str, suffix: &str, one: &[Pass], two: &[Pass]) {
    let all = |passes: &[Pass], f: fn(&Pass) -> f64| passes.iter().map(f).collect::<Vec<_>>();
    let mut add = |metric: &str, unit: &str, values: &[f64]| {
        outcome.add_median(arm, &format!("{metric}{suffix}"), unit, values);
    };
    add("rate", "bytes_per_second", &all(one, Pass::rate));
    add("rate_cpu", "bytes_per_second", &all(one, |p| p.bytes / p.cpu_s));
    add("rate_two", "bytes_per_second", &all(two, Pass::rate));
    let ratio = |(one, two): (&Pass, &Pass)| two.rate() / one.rate();
    add("scaling", "fraction", &one.iter().zip(two).map(ratio).collect::<Vec<_>>());
}

fn details(
    trial: &Trial,
    outcome: &mut Outcome,
    suffix: &str,
    scans: &[Scan],
    target: &Target,
) -> Result<()> {
    let of_read = |s: &Scan, b: Bytes| b.0 as f64 / s.read.0 as f64;
    let reading = |s: &Scan| s.read.0 as f64 / s.cpu_reading.as_secs_f64().max(1e-9);
    let mut scanner = Scanner::new(Root::default())?;
    let first = scan(&mut scanner, target, 1, Changes::LeaveOut);
    let mut again = Vec::new();
    for _ in 0..trial.rounds(3) {
        let s = scan(&mut scanner, target, 1, Changes::LeaveOut);
        again.push(s.cpu.as_secs_f64() / (s.read.0 / PAGE) as f64);
    }
    let mut add = |metric: &str, unit: &str, values: &[f64]| {
        outcome.add_median("ebb-stock", &format!("{metric}{suffix}"), unit, values);
    };
    add("rate_reading", "bytes_per_second", &scans.iter().map(reading).collect::<Vec<_>>());
    add("rescan_page", "seconds", &again);
    add("metadata", "fraction", &scans.iter().map(|s| of_read(s, s.table)).collect::<Vec<_>>());
    add("metadata_kept", "fraction", &[of_read(&first, first.table + first.kept)]);
    Ok(())
}

fn verdict(outcome: &Outcome, memory: Memory) {
    let value =
        |arm: &str, metric: &str| outcome.value(arm, &format!("{metric}{}", memory.suffix()));
    for metric in ["rate", "rate_cpu", "rate_two"] {
        if let (Some(own), Some(raw)) = (value("ebb-stock", metric), value("raw", metric)) {
            println!("  {}: {metric} is {:.0} % of raw hashing", memory.name(), own / raw * 100.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_noise_is_hashed_whatever_the_threads() {
        let noise = noise(Bytes::mib(1));
        assert_eq!(noise.len(), 1 << 20);
        for threads in [1, 2] {
            let pass = hash(&noise, threads).unwrap();
            assert_eq!(pass.bytes as usize, 1 << 20);
            assert!(pass.cpu_s > 0.0 && pass.clock_s > 0.0);
        }
    }
}
