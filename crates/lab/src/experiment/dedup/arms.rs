//! The arms: who tells KSM what to do.
//!
//! All have the same budget, a share of one core for `ksmd` and whatever else the
//! arm runs. Who has no rule for speed of its own (`ksm`, `ksm-unsmart`) is set so
//! that `ksmd` uses just that: the kernel's 100 pages in 20 ms would take minutes for
//! each scan of these small guests. `advisor` has its own `advisor_max_cpu`, and a
//! target so short that it uses it; `ksmtuned` works as that does on a host that has
//! long been short: its most pages, its sleep, without the minutes until it gets there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::model::Pressure;
use ebb_core::policy::merge::{Candidates, KsmdOrder, Settings};
use ebb_core::units::{Bytes, PAGE};
use ebb_host::linux::LinuxHost;
use ebb_host::probe::ksm::{ksmd, read_ksm};
use ebb_host::probe::meminfo::read_meminfo;
use ebb_host::root::Root;
use ebb_host::scan::{Limits, Options, Scanner, Target};

use serde_json::Value;

use super::course::{Course, run_time};
use super::governor::Governor;
use crate::arena::{Arena, knob_value, steadily};
use crate::ebb::Daemon;
use crate::experiment::scan::target;
use crate::experiment::stage::names;
use crate::vm::{Vm, cpu_s, threads};

const KSM: &str = "/sys/kernel/mm/ksm";
/// Every knob that an arm sets, in the order in which the arena notes them: it puts
/// them back from the last to the first.
const KNOBS: [&str; 10] = [
    "run",
    "pages_to_scan",
    "sleep_millisecs",
    "smart_scan",
    "use_zero_pages",
    "advisor_max_pages_to_scan",
    "advisor_min_pages_to_scan",
    "advisor_max_cpu",
    "advisor_target_scan_time",
    "advisor_mode",
];
/// Most pages a batch: `run` can be written between batches only.
const BATCH_MOST: u64 = 20_000;
/// The kernel's own sleep between batches.
const SLEEP_MS: u64 = 20;
/// What a page costs until that was measured, µs.
const PAGE_US: f64 = 3.0;
/// Scans without any gain after which nothing is to come: a page is looked at in
/// every scan, or with `smart_scan` at least in every ninth.
const STILL: (u64, u64) = (2, 10);
/// How often Ebb scans VMs that run.
const SCAN_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The kernel's defaults, at the budget's speed.
    Ksm,
    /// What `ksmtuned` sets.
    #[value(name = "ksmtuned")]
    KsmTuned,
    Advisor,
    /// `smart_scan=0`, at the budget's speed.
    KsmUnsmart,
    /// Ebb's scanner and governor in this process; whole VMs are open to KSM.
    EbbStock,
    /// `ebb run`, which merges by itself; whole VMs are open to KSM.
    Ebb,
    /// The same with the agent in the VMM and the module in the guest: range by range.
    EbbGuest,
}

impl Kind {
    /// Whether it is KSM without Ebb.
    pub fn is_ksm(self) -> bool {
        !matches!(self, Kind::EbbStock | Kind::Ebb | Kind::EbbGuest)
    }

    /// Whether its VMs have agent and module.
    pub fn has_agent(self) -> bool {
        self == Kind::EbbGuest
    }

    /// Scans without gain after which it has come to its end.
    pub fn still(self) -> u64 {
        if self == Kind::KsmUnsmart { STILL.0 } else { STILL.1 }
    }
}

/// Notes every knob, so that the arena puts it back, and stops KSM.
pub fn hold_knobs(arena: &Arena) -> Result<()> {
    for knob in KNOBS {
        let path = PathBuf::from(format!("{KSM}/{knob}"));
        let Ok(now) = std::fs::read_to_string(&path) else { continue };
        // Writing 2 again would break what is merged.
        let value = if knob == "run" { "0" } else { knob_value(&now) };
        arena.set(&path, value)?;
    }
    Ok(())
}

fn set(knob: &str, value: &str) -> Result<()> {
    let path = format!("{KSM}/{knob}");
    steadily(|| std::fs::write(&path, value)).context(path)
}

/// Stops `ksmd`; what is merged stays so.
pub fn stop() -> Result<()> {
    set("run", "0")
}

/// An arm at work on these VMs.
#[derive(Debug)]
pub struct Runner<'a> {
    kind: Kind,
    cores: f64,
    vms: &'a [Vm],
    speed: Option<Speed>,
    scanner: Option<Scanner>,
    governor: Option<Governor>,
    daemon: Option<Running>,
    scanned: Instant,
    dir: tempfile::TempDir,
    /// Processor time beside `ksmd`.
    pub own: f64,
    pub why: String,
}

impl<'a> Runner<'a> {
    pub fn new(kind: Kind, cores: f64, vms: &'a [Vm]) -> Result<Runner<'a>> {
        let scanner = match kind {
            Kind::EbbStock => Some(Scanner::new(Root::default())?),
            _ => None,
        };
        Ok(Runner {
            kind,
            cores,
            vms,
            speed: None,
            scanner,
            governor: None,
            daemon: None,
            scanned: Instant::now(),
            dir: tempfile::tempdir()?,
            own: 0.0,
            why: String::new(),
        })
    }

    pub fn pids(&self) -> Vec<u32> {
        self.vms.iter().map(|vm| vm.pid).collect()
    }

    /// Whether this kernel has what it needs.
    pub fn is_possible(kind: Kind) -> bool {
        kind != Kind::Advisor || Path::new(KSM).join("advisor_mode").exists()
    }

    /// Begins, or goes on where VMs have changed.
    pub fn begin(&mut self) -> Result<()> {
        match self.kind {
            Kind::EbbStock => return self.plan(),
            Kind::Ebb | Kind::EbbGuest => {
                let dir = self.dir.path().join("ebb");
                self.daemon = Some(Running::start(&dir, self.vms, self.cores, self.own)?);
                return Ok(());
            }
            _ => {}
        }
        let smart = if self.kind == Kind::KsmUnsmart { "0" } else { "1" };
        set("smart_scan", smart)?;
        // The kernel's default: a page of zeros is merged as any other.
        set("use_zero_pages", "0")?;
        set("sleep_millisecs", &SLEEP_MS.to_string())?;
        match self.kind {
            Kind::KsmTuned => {
                let memory = read_meminfo(&Root::default())?.map(|m| m.total);
                let (pages, sleep_ms) = tuned(memory.context("no MemTotal")?);
                set("pages_to_scan", &pages.to_string())?;
                set("sleep_millisecs", &sleep_ms.to_string())?;
            }
            Kind::Advisor => {
                set("advisor_max_cpu", &format!("{:.0}", self.cores * 100.0))?;
                set("advisor_target_scan_time", "1")?;
                set("advisor_mode", "scan-time")?;
            }
            _ => self.speed = Some(Speed::begin(self.cores)?),
        }
        set("run", "1")
    }

    /// A moment's work; whether it has come to an end of itself.
    pub fn step(&mut self, course: &Course, ideal: Bytes) -> Result<bool> {
        if let Some(speed) = &mut self.speed {
            speed.step()?;
        }
        if let Some(daemon) = &mut self.daemon {
            let (own, agents) = daemon.cpu(self.vms)?;
            self.own = daemon.before + own + agents;
            self.why = format!("beside ksmd: daemon {own:.3}, agents {agents:.3} CPU s");
            return daemon.is_done();
        }
        let Some(governor) = &mut self.governor else {
            return Ok(course.is_still(self.kind.still(), ideal.share(0.002)));
        };
        match steadily(|| governor.step(LinuxHost::now(), Pressure::Clear))? {
            KsmdOrder::Run { .. } => Ok(false),
            KsmdOrder::Rest { why } => {
                self.why = why;
                Ok(true)
            }
        }
    }

    /// Where VMs run on: looks again what there is to merge, from time to time.
    pub fn look_again(&mut self) -> Result<()> {
        match self.kind == Kind::EbbStock && self.scanned.elapsed() >= SCAN_EVERY {
            true => self.plan(),
            false => Ok(()),
        }
    }

    /// As long as it takes `ksmd` for so many scans, as fast as it can: the past, which
    /// is nobody's cost.
    pub fn age(&mut self, scans: u64) -> Result<()> {
        let done =
            || -> Result<u64> { Ok(read_ksm(&Root::default())?.context("no KSM")?.full_scans) };
        let goal = done()? + scans;
        set("advisor_mode", "none").or_else(|e| if has_advisor() { Err(e) } else { Ok(()) })?;
        set("smart_scan", if self.kind == Kind::KsmUnsmart { "0" } else { "1" })?;
        set("use_zero_pages", "0")?;
        set("pages_to_scan", &BATCH_MOST.to_string())?;
        set("sleep_millisecs", "1")?;
        set("run", "1")?;
        while done()? < goal {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop()
    }

    /// Whether it works on by itself until it is ended.
    pub fn goes_on(&self) -> bool {
        self.daemon.is_some()
    }

    /// Ends it: `ksmd` stands still, what is merged stays so.
    pub fn end(&mut self) -> Result<()> {
        if let Some(daemon) = self.daemon.take() {
            anyhow::ensure!(daemon.daemon.stop(), "ebb did not end well");
        }
        stop()?;
        if let Some(governor) = self.governor.take() {
            steadily(|| governor.release())?;
        }
        match has_advisor() {
            true => set("advisor_mode", "none"),
            false => Ok(()),
        }
    }

    /// What it costs to look once more at memory that nobody has written.
    pub fn again(&mut self) -> Result<Option<f64>> {
        match self.kind {
            Kind::EbbStock => {
                let before = self.own;
                self.scan()?;
                return Ok(Some(self.own - before));
            }
            Kind::Ebb | Kind::EbbGuest => {
                let daemon = self.daemon.as_ref().context("it has ended")?;
                return daemon.look_again(self.vms).map(Some);
            }
            _ => {}
        }
        // With smart_scan a page's turn comes every ninth time.
        let scans = if self.kind == Kind::KsmUnsmart { 2 } else { 9 };
        let pid = ksmd(&Root::default()).context("no ksmd")?;
        let before = run_time(pid)?;
        self.age(scans)?;
        Ok(Some((run_time(pid)? - before) / scans as f64))
    }

    fn plan(&mut self) -> Result<()> {
        let (_, planned) = self.scan()?;
        self.scanned = Instant::now();
        if self.governor.is_none() {
            let (cores, clear_cores) = (self.cores, self.cores);
            let settings = Settings { cores, clear_cores, ..Settings::default() };
            let state = self.dir.path().join("ksm.json");
            self.governor = Some(Governor::take(&state, settings)?);
        }
        if let Some(governor) = &mut self.governor {
            governor.plan(planned);
        }
        Ok(())
    }

    /// What Ebb's scanner finds, and what that means for KSM.
    pub fn scan(&mut self) -> Result<(Bytes, Candidates)> {
        let targets = targets(self.vms)?;
        let limits = Limits { cores: Some(self.cores), ..Limits::default() };
        let options = Options { hurry: true, limits, ..Options::default() };
        let scan = self.scanner.as_mut().context("no scanner")?.scan(&targets, &options);
        self.own += scan.cpu.as_secs_f64();
        let pages = |b: Bytes| b.0 / PAGE;
        let planned = Candidates {
            pages: scan.vms.iter().map(|v| v.pages.read).sum(),
            zeros: pages(scan.split.zero),
            duplicates: pages(scan.split.within + scan.split.between),
        };
        Ok((scan.split.allowed(), planned))
    }
}

/// What a scan of these VMs reads.
pub fn targets(vms: &[Vm]) -> Result<Vec<Target>> {
    vms.iter().map(target).collect()
}

fn has_advisor() -> bool {
    Runner::is_possible(Kind::Advisor)
}

#[derive(Debug)]
struct Running {
    daemon: Daemon,
    /// Processor time of an earlier daemon and the agents then.
    before: f64,
    /// Of the agents, until it began.
    agents: f64,
    began: Instant,
    /// When `ksmd` was last seen at work.
    worked: Option<Instant>,
}

impl Running {
    fn start(dir: &Path, vms: &[Vm], cores: f64, before: f64) -> Result<Running> {
        let config = format!(
            "\n[merge]\nmode = \"on\"\ncpu = \"{:.0}%\"\ncpu_clear = \"{0:.0}%\"\nscan = \"{}s\"",
            cores * 100.0,
            SCAN_EVERY.as_secs()
        );
        let agents = agents(vms)?;
        let daemon = Daemon::start(dir, &names(vms), &config)?;
        Ok(Running { daemon, before, agents, began: Instant::now(), worked: None })
    }

    /// Its processor time, and that of the agents.
    fn cpu(&self, vms: &[Vm]) -> Result<(f64, f64)> {
        Ok((cpu_s(self.daemon.pid())?, agents(vms)? - self.agents))
    }

    /// What each later look of the scanner costs, over two of them.
    fn look_again(&self, vms: &[Vm]) -> Result<f64> {
        let scanner = |state: &Value| {
            let scan = &state["host"]["merge"]["scan"];
            let looks = scan["looks"].as_u64()? + scan["number"].as_u64()?;
            let rests = state["host"]["ksm"]["run"] == 0 && scan["busy"] == false;
            rests.then_some((looks, scan["cpu_s"].as_f64()?))
        };
        let patience = 4 * SCAN_EVERY;
        let all = |(own, agents): (f64, f64)| own + agents;
        let (cpu, began) = (all(self.cpu(vms)?), Instant::now());
        let (looks, before) = self.daemon.wait_for("rest", patience, scanner)?;
        let (more, after) = self.daemon.wait_for("later looks", patience, |state| {
            scanner(state).filter(|(now, _)| *now >= looks + 2)
        })?;
        let all = (all(self.cpu(vms)?) - cpu) / began.elapsed().as_secs_f64();
        let scan = &self.daemon.state()?["host"]["merge"]["scan"];
        println!(
            "             daemon and agents at rest: {:.2} % of a core; scanner {:.3} CPU s in all, {} \
             scans, {} looks",
            all * 100.0,
            scan["cpu_s"].as_f64().unwrap_or_default(),
            scan["number"],
            scan["looks"]
        );
        Ok((after - before) / (more - looks) as f64)
    }

    /// It has worked, and then not for half the time between two scans; or not at all.
    fn is_done(&mut self) -> Result<bool> {
        if read_ksm(&Root::default())?.context("no KSM")?.run == 1 {
            self.worked = Some(Instant::now());
        }
        Ok(match self.worked {
            Some(last) => last.elapsed() > SCAN_EVERY / 2,
            None => self.began.elapsed() > 2 * SCAN_EVERY,
        })
    }
}

/// Processor time of the agents in these VMs.
fn agents(vms: &[Vm]) -> Result<f64> {
    let mut all = 0.0;
    for vm in vms {
        let ours = threads(vm.pid)?.into_iter().filter(|(_, name, _)| name.starts_with("ebb"));
        all += ours.map(|(_, _, seconds)| seconds).sum::<f64>();
    }
    Ok(all)
}

/// What `ksmtuned` ends at on a host that stays short: KSM_NPAGES_MAX, and
/// KSM_SLEEP_MSEC for a host of 16 GiB, less on a larger one, 10 ms at least.
fn tuned(memory: Bytes) -> (u64, u64) {
    let sleep_ms = 100 * Bytes::gib(16).0 / memory.0.max(1);
    (1250, sleep_ms.max(10))
}

/// Keeps `ksmd` at its budget by what its pages cost of late.
#[derive(Debug)]
struct Speed {
    cores: f64,
    pid: u32,
    looked: Instant,
    cpu: f64,
    scanned: u64,
    pages: u64,
}

impl Speed {
    fn begin(cores: f64) -> Result<Speed> {
        let pid = ksmd(&Root::default()).context("no ksmd")?;
        let pages = batch(cores, PAGE_US);
        set("pages_to_scan", &pages.to_string())?;
        let scanned = scanned()?;
        Ok(Speed { cores, pid, looked: Instant::now(), cpu: run_time(pid)?, scanned, pages })
    }

    fn step(&mut self) -> Result<()> {
        if self.looked.elapsed() < Duration::from_millis(200) {
            return Ok(());
        }
        let (cpu, scanned) = (run_time(self.pid)?, scanned()?);
        let us = (cpu - self.cpu) * 1e6 / (scanned - self.scanned).max(1) as f64;
        (self.looked, self.cpu, self.scanned) = (Instant::now(), cpu, scanned);
        let pages = batch(self.cores, us.clamp(0.1, 100.0));
        if pages.abs_diff(self.pages) > self.pages / 10 {
            self.pages = pages;
            set("pages_to_scan", &pages.to_string())?;
        }
        Ok(())
    }
}

fn scanned() -> Result<u64> {
    let ksm = read_ksm(&Root::default())?.context("no KSM")?;
    ksm.pages_scanned.context("no pages_scanned: Linux 6.6 has it")
}

/// Pages that take this share of the time beside the sleep.
fn batch(cores: f64, page_us: f64) -> u64 {
    let cores = cores.clamp(0.01, 0.95);
    let busy_us = SLEEP_MS as f64 * 1000.0 * cores / (1.0 - cores);
    ((busy_us / page_us) as u64).clamp(100, BATCH_MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ksmtuned_sleeps_less_on_larger_hosts() {
        assert_eq!(tuned(Bytes::gib(16)), (1250, 100));
        assert_eq!(tuned(Bytes::gib(64)), (1250, 25));
        assert_eq!(tuned(Bytes::gib(1024)), (1250, 10));
    }

    #[test]
    fn a_batch_takes_the_budget() {
        assert_eq!(batch(0.5, 2.0), 10_000, "20 ms of work beside 20 ms of sleep");
        assert_eq!(batch(0.2, 5.0), 1000);
        assert_eq!((batch(1.0, 0.1), batch(0.0, 100.0)), (BATCH_MOST, 100));
    }
}
