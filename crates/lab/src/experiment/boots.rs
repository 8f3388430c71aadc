//! `boots`: guests are booted again and again; how many become ready.
//!
//! A boot ends as *ready* (the guest tool answers), *lost* (its kernel or QEMU ended) or
//! *timed out*. What is known of a boot that is not ready is printed: its console, where
//! its vCPUs stand and the CPU time of its QEMU, which tells a hung guest from a slow one.
//! The deadline is many times what a boot takes on a loaded machine.
//!
//! It takes no arena lock: nothing global changes, its guests keep out of KSM and
//! khugepaged, and the daemons of VM tests manage the VMs that they list only. So it runs
//! beside VM tests for hours; what experiments measure it does disturb.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;

use super::trial::Kernels;
use crate::image::{Cache, Image, Kernel};
use crate::result::Outcome;
use crate::vm::{Accel, Balloon, Vm, VmConfig, VmError};

/// From start to the ready line; four times as long under emulation.
const DEADLINE: Duration = Duration::from_secs(150);
/// How long a dying kernel's console is silent before it counts as complete.
const SILENCE: Duration = Duration::from_secs(2);
/// After this many boots a line tells how far it is.
const PROGRESS: u32 = 10;

#[derive(Clone, Debug, clap::Args)]
pub struct Boots {
    /// Boots of each guest kernel
    #[arg(long, default_value_t = 100)]
    count: u32,
    /// vCPUs of each guest
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Guest kernel; of both one boots after the other
    #[arg(long, value_enum, default_value = "both")]
    kernel: Kernels,
    /// Guests that boot at the same time
    #[arg(long, default_value_t = 2)]
    at_once: u32,
    /// Figures as JSON, written anew after each boot
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Words added to the guests' command line, to try what they change
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    append: String,
    /// An argument added to QEMU's, to try what it changes; may be given again
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    qemu: Vec<String>,
}

/// How a boot ended, and what is known of it.
enum End {
    Ready(Duration),
    Lost(String),
    TimedOut(String),
}

/// The boots of one kernel so far.
#[derive(Debug, Default)]
struct Tally {
    ready: Vec<f64>,
    lost: u32,
    timed_out: u32,
    load: Vec<f64>,
}

impl Tally {
    fn boots(&self) -> u32 {
        self.ready.len() as u32 + self.lost + self.timed_out
    }

    fn add(&mut self, end: &End) {
        match end {
            End::Ready(time) => self.ready.push(time.as_secs_f64()),
            End::Lost(_) => self.lost += 1,
            End::TimedOut(_) => self.timed_out += 1,
        }
        self.load.extend(load());
    }

    fn rows(&self, arm: &str, outcome: &mut Outcome) {
        let ready = self.ready.len() as u32;
        let counts = [
            ("boots", self.boots()),
            ("ready", ready),
            ("lost", self.lost),
            ("timed_out", self.timed_out),
        ];
        for (metric, count) in counts {
            outcome.add(arm, metric, "count", &[f64::from(count)]);
        }
        outcome.add_median(arm, "boot_time", "seconds", &self.ready);
        outcome.add_median(arm, "load", "count", &self.load);
    }
}

/// Everything that the booting threads share.
struct Run<'a> {
    boots: &'a Boots,
    kernels: Vec<Kernel>,
    empty: Outcome,
    next: AtomicU32,
    stop: Arc<AtomicBool>,
    tallies: Mutex<Vec<Tally>>,
}

impl Boots {
    /// Runs it; whether every guest became ready.
    pub fn run(&self) -> Result<bool> {
        if self.count == 0 || self.cpus == 0 || self.at_once == 0 {
            bail!("--count, --cpus and --at-once are at least 1");
        }
        let cache = Cache::from_env();
        let kernels = self.kernel.list();
        let releases: Result<Vec<String>, _> =
            kernels.iter().map(|k| Image::get(&cache, *k).map(|i| i.release)).collect();
        let empty = Outcome::new("boots", &releases?.join(", "), Accel::detect(&cache));
        // A first signal ends it after the boots under way, a second one at once.
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register_conditional_shutdown(signal, 2, Arc::clone(&stop))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        let tallies = Mutex::new(kernels.iter().map(|_| Tally::default()).collect());
        let run = Run { boots: self, kernels, empty, next: AtomicU32::new(0), stop, tallies };
        let result = thread::scope(|s| {
            let threads: Vec<_> = (0..self.at_once).map(|_| s.spawn(|| run.turn())).collect();
            threads.into_iter().try_for_each(|t| t.join().expect("a booting thread panicked"))
        });
        let outcome = run.outcome(&run.lock());
        println!("{}", outcome.table());
        result?;
        let tallies = run.lock();
        Ok(tallies.iter().all(|t| t.lost + t.timed_out == 0))
    }
}

impl Run<'_> {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Tally>> {
        self.tallies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcome(&self, tallies: &[Tally]) -> Outcome {
        let mut outcome = self.empty.clone();
        for (kernel, tally) in self.kernels.iter().zip(tallies) {
            tally.rows(kernel.series(), &mut outcome);
        }
        outcome
    }

    /// Boots guests until enough were booted, a signal came or the lab itself failed.
    fn turn(&self) -> Result<()> {
        let all = self.boots.count * self.kernels.len() as u32;
        while !self.stop.load(Relaxed) {
            let number = self.next.fetch_add(1, Relaxed);
            if number >= all {
                break;
            }
            let which = number as usize % self.kernels.len();
            let end = self.boot(number, self.kernels[which]).inspect_err(|_| {
                self.stop.store(true, Relaxed);
            })?;
            self.count(which, all, &end)?;
        }
        Ok(())
    }

    /// Counts a boot, tells of it and writes the figures.
    fn count(&self, which: usize, all: u32, end: &End) -> Result<()> {
        let mut tallies = self.lock();
        tallies[which].add(end);
        let sum = |count: fn(&Tally) -> u32| tallies.iter().map(count).sum::<u32>();
        let done = sum(Tally::boots);
        if let End::Lost(what) | End::TimedOut(what) = end {
            println!("boot {done}, guest kernel {}:\n{what}\n", self.kernels[which]);
        }
        if done.is_multiple_of(PROGRESS) || !matches!(end, End::Ready(_)) {
            let (lost, late) = (sum(|t| t.lost), sum(|t| t.timed_out));
            let load = load().unwrap_or(0.0);
            println!("{done} of {all} boots: {lost} lost, {late} timed out, load {load:.1}");
        }
        if let Some(file) = &self.boots.json {
            self.outcome(&tallies).write(file)?;
        }
        Ok(())
    }

    fn boot(&self, number: u32, kernel: Kernel) -> Result<End> {
        let mut config = VmConfig::new(format!("boots-{number}"), Bytes::mib(256));
        config.kernel = kernel;
        config.cpus = self.boots.cpus;
        config.balloon = Some(Balloon { reporting: true, deflate_on_oom: false });
        config.small_pages = true;
        config.append = self.boots.append.clone();
        config.args = vec!["-machine".into(), "mem-merge=off".into()];
        config.args.extend(self.boots.qemu.iter().cloned());
        let mut vm = match Vm::spawn(&config) {
            Ok(vm) => vm,
            Err(VmError::Lab(e)) => return Err(e).context("a VM cannot be started"),
            Err(e) => return Ok(End::Lost(e.to_string())),
        };
        Ok(match vm.wait_ready_within(DEADLINE) {
            Ok(()) => End::Ready(vm.boot_time),
            Err(e @ VmError::Timeout { .. }) => End::TimedOut(whole(&vm, &e)),
            Err(e) => End::Lost(whole(&vm, &e)),
        })
    }
}

/// All that is known of a boot that did not become ready.
fn whole(vm: &Vm, failed: &VmError) -> String {
    let (mut console, mut since) = (vm.console(), Instant::now());
    while since.elapsed() < SILENCE {
        thread::sleep(Duration::from_millis(100));
        let now = vm.console();
        if now != console {
            (console, since) = (now, Instant::now());
        }
    }
    let cpu = cpu_time(Path::new(&format!("/proc/{}/stat", vm.pid())));
    let cpu = cpu.map_or("unknown".into(), |t| format!("{:.1} s", t.as_secs_f64()));
    let why = failed.to_string();
    let why = why.split("\n--- ").next().unwrap_or_default();
    format!(
        "{why}\n--- CPU time of its QEMU: {cpu}\n--- its vCPUs, twice:\n{}\n--- its console:\n{}",
        vm.stand(),
        console.trim_end()
    )
}

/// User and system time of a process, from its `stat`.
fn cpu_time(stat: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(stat).ok()?;
    let words: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = |i: usize| words.get(i)?.parse::<u64>().ok();
    // `utime` and `stime`; the kernel tells them in hundredths of a second.
    Some(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
}

/// The machine's load of the last minute.
fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_boot_is_ready_lost_or_timed_out() {
        let mut tally = Tally::default();
        for seconds in [3, 1, 2] {
            tally.add(&End::Ready(Duration::from_secs(seconds)));
        }
        tally.add(&End::Lost(String::new()));
        tally.add(&End::TimedOut(String::new()));
        let mut outcome = Outcome::new("boots", "6.1", Accel::Tcg);
        tally.rows("6.1", &mut outcome);
        let value = |metric| outcome.value("6.1", metric);
        assert_eq!((value("boots"), value("ready")), (Some(5.0), Some(3.0)));
        assert_eq!((value("lost"), value("timed_out")), (Some(1.0), Some(1.0)));
        assert_eq!(value("boot_time"), Some(2.0));
    }

    #[test]
    fn the_cpu_time_of_a_process_is_read_past_its_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stat = "7 (q) (x y) S 1 7 7 0 -1 4194304 5 0 0 0 250 50 0 0 20 0 3 0 100";
        std::fs::write(file.path(), stat).unwrap();
        assert_eq!(cpu_time(file.path()), Some(Duration::from_secs(3)));
        assert!(cpu_time(Path::new("/proc/self/stat")).is_some());
    }
}
