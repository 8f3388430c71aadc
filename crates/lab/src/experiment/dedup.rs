//! `dedup`: what merging finds, and what it costs.
//!
//! VMs are filled, then paused: so the truth stays true while an arm is measured.
//! Each arm begins with everything unmerged and ends when `ksmd` has found no more
//! for a whole scan, or stops by itself. Arms: `ksm` (the kernel's defaults, but as
//! many pages a batch as Ebb may use at most: the defaults' 100 would take hours),
//! `ksm0` (the same with `smart_scan=0`), `ebb-stock` (the product's scanner, policy
//! and governor; whole VMs open to KSM). Recall is by how many frames
//! the VMs take less, by the ideal: frames less different contents, every page read one by one.
//! KSM looks at every VM of the machine: for figures let no others run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::model::Pressure;
use ebb_core::policy::merge::{Candidates, Order, Settings};
use ebb_core::sample::VmId;
use ebb_core::units::Bytes;
use ebb_host::act::governor::{Governor, ksmd};
use ebb_host::act::ksm;
use ebb_host::linux::LinuxHost;
use ebb_host::probe::ksm::read_ksm;
use ebb_host::probe::process::read_stat;
use ebb_host::root::Root;
use ebb_host::scan::{Found, Options, Scanner};

use crate::arena::{Arena, ArenaConfig};
use crate::image::Kernel;
use crate::result::Outcome;
use crate::truth::Truth;
use crate::vm::{Vm, VmConfig};

const MINUTE: Duration = Duration::from_secs(60);
const KSM: &str = "/sys/kernel/mm/ksm";
/// An arm that has not ended after this is given up.
const ARM: Duration = Duration::from_secs(600);
/// As many as Ebb uses at most.
const BATCH: &str = "20000";

/// What the guests hold beside what they booted with: name and, for each guest,
/// the arguments of the tool's `hold`.
const WORKLOADS: [(&str, &str); 4] = [
    ("boots", ""),
    ("clustered", "pattern=template share=0.3 cluster=2097152 common=5"),
    ("scattered", "pattern=template share=0.05 cluster=4096 common=5"),
    ("random", "pattern=random"),
];

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct Dedup {
    /// Arms to measure.
    pub arms: Vec<String>,
    /// Workloads to measure; all where empty.
    pub workloads: Vec<String>,
    /// How many VMs.
    pub vms: u32,
    /// What each holds.
    pub hold: Bytes,
}

/// What an arm did.
#[derive(Clone, Copy, Debug)]
struct Measured {
    cpu_s: f64,
    again_s: f64,
    to_90_s: f64,
}

impl Dedup {
    /// Runs, prints, writes `json`.
    pub fn run(&self, json: Option<&Path>) -> Result<()> {
        let arena = Arena::enter(&ArenaConfig::default())?;
        hold_knobs(&arena)?;
        let mut outcome = None;
        println!(
            "{:<10} {:<10} {:>9} {:>9} {:>7} {:>7} {:>9} {:>7}",
            "workload", "arm", "ideal", "saved", "recall", "CPU s", "again s", "90 % s"
        );
        for (name, arguments) in WORKLOADS {
            if !self.workloads.is_empty() && !self.workloads.iter().any(|w| w == name) {
                continue;
            }
            let vms = self.boot(arguments)?;
            let outcome = outcome
                .get_or_insert_with(|| Outcome::new("dedup", vms[0].release(), vms[0].accel()));
            self.workload(name, &vms, outcome)?;
            for vm in &vms {
                vm.resume()?;
                let v = vm.tool().stop("v").map_err(|e| vm.explain(e))?;
                if v.u64("errors") > 0 || v.u64("checks") == 0 {
                    bail!("{}: memory changed: {:?}", vm.name(), v.0);
                }
            }
        }
        ksm::unmerge(&Root::default())?;
        match (json, outcome) {
            (Some(path), Some(outcome)) => Ok(outcome.write(path)?),
            _ => Ok(()),
        }
    }

    fn boot(&self, arguments: &str) -> Result<Vec<Vm>> {
        let mut vms = Vec::new();
        for n in 1..=self.vms {
            let ram = Bytes::mib(192) + Bytes(self.hold.0 / 4 * 5);
            let mut config = VmConfig::new(format!("dedup{n}"), ram.floor_mib());
            // Every third guest has the other kernel: some of its pages only are alike.
            config.kernel = if n % 3 == 0 { Kernel::V6_12 } else { Kernel::V6_1 };
            vms.push(Vm::spawn(&config)?);
        }
        for (n, vm) in vms.iter_mut().enumerate() {
            vm.wait_ready()?;
            let tool = vm.tool();
            tool.start_ready("v", "verify", "size=16777216 seconds=86400", MINUTE)
                .map_err(|e| vm.explain(e))?;
            if !arguments.is_empty() {
                let all = format!("size={} seed={n} {arguments}", self.hold.0);
                tool.start_ready("h", "hold", &all, 5 * MINUTE).map_err(|e| vm.explain(e))?;
            }
        }
        vms.iter().try_for_each(Vm::pause)?;
        Ok(vms)
    }

    fn workload(&self, name: &str, vms: &[Vm], outcome: &mut Outcome) -> Result<()> {
        let root = Root::default();
        let pids: Vec<u32> = vms.iter().map(Vm::pid).collect();
        ksm::unmerge(&root)?;
        let truth = Truth::of(&pids)?;
        let ideal = truth.ideal();
        let (found, planned) = scan(vms)?;
        outcome.add(name, "report_error", "fraction", &[found.abs_diff(ideal).fraction_of(ideal)]);
        for arm in &self.arms {
            ksm::unmerge(&root)?;
            let m = match arm.as_str() {
                "ksm" => plain(ideal, true)?,
                "ksm0" => plain(ideal, false)?,
                "ebb-stock" => governed(ideal, planned)?,
                other => bail!("no arm {other}: ksm, ksm0, ebb-stock"),
            };
            let left = Truth::of(&pids)?;
            let saved = Bytes::pages(truth.frames.saturating_sub(left.frames));
            let recall = saved.fraction_of(ideal);
            println!(
                "{name:<10} {arm:<10} {:>9} {:>9} {recall:>7.3} {:>7.2} {:>9.2} {:>7.1}",
                ideal.to_string(),
                saved.to_string(),
                m.cpu_s,
                m.again_s,
                m.to_90_s
            );
            let key = format!("{arm}/{name}");
            outcome.add(&key, "recall", "fraction", &[recall]);
            outcome.add(&key, "cpu_seconds", "seconds", &[m.cpu_s]);
            outcome.add(&key, "rescan_cpu_seconds", "seconds", &[m.again_s]);
            if m.to_90_s.is_finite() {
                outcome.add(&key, "time_to_90", "seconds", &[m.to_90_s]);
            }
        }
        Ok(())
    }
}

/// Writes every knob once through the arena, so that it puts them back.
fn hold_knobs(arena: &Arena) -> Result<()> {
    for (knob, value) in [
        ("run", "0"),
        ("pages_to_scan", "100"),
        ("sleep_millisecs", "20"),
        ("smart_scan", "1"),
        ("use_zero_pages", "1"),
    ] {
        arena.set(&PathBuf::from(format!("{KSM}/{knob}")), value)?;
    }
    Ok(())
}

fn set(knob: &str, value: &str) -> Result<()> {
    let path = format!("{KSM}/{knob}");
    std::fs::write(&path, value).context(path)
}

/// What the scanner finds, and what that means for KSM.
fn scan(vms: &[Vm]) -> Result<(Bytes, Candidates)> {
    let root = Root::default();
    let mut targets = Vec::new();
    for vm in vms {
        let start = read_stat(&root, vm.pid())?.context("a VM has ended")?.start;
        let id = VmId { pid: vm.pid(), start };
        let found = Found::look(&root, id, vm.name(), "lab")?.context("a VM has ended")?;
        targets.push(found.target.context("a VM without RAM")?);
    }
    let options = Options { idle: false, ..Options::default() };
    let scan = Scanner::new(root)?.scan(&targets, &options);
    let pages = |b: Bytes| b.0 / 4096;
    let planned = Candidates {
        pages: scan.vms.iter().map(|v| v.pages.read).sum(),
        zeros: pages(scan.split.zero),
        twins: pages(scan.split.within + scan.split.between),
    };
    Ok((scan.split.allowed(), planned))
}

struct Watch {
    ksmd: u32,
    began: Instant,
    cpu: f64,
    scans: u64,
    ideal: Bytes,
    to_90_s: f64,
}

impl Watch {
    fn begin(ideal: Bytes) -> Result<Watch> {
        let ksmd = ksmd(&Root::default()).context("no ksmd")?;
        let mut watch = Watch {
            ksmd,
            began: Instant::now(),
            cpu: 0.0,
            scans: 0,
            ideal,
            to_90_s: f64::INFINITY,
        };
        watch.cpu = watch.cpu_s()?;
        watch.scans = watch.look()?.1;
        Ok(watch)
    }

    fn cpu_s(&self) -> Result<f64> {
        let stat = read_stat(&Root::default(), self.ksmd)?.context("no ksmd")?;
        Ok(stat.system_ticks as f64 / 100.0 - self.cpu)
    }

    /// Saved, and full scans since the beginning.
    fn look(&mut self) -> Result<(Bytes, u64)> {
        let now = read_ksm(&Root::default())?.context("no KSM")?;
        let saved = ksm::saved(&now);
        if saved >= self.ideal.share(0.9) && self.to_90_s.is_infinite() {
            self.to_90_s = self.began.elapsed().as_secs_f64();
        }
        if self.began.elapsed() > ARM {
            bail!("not done in {ARM:?}: {saved} of {} after {} scans", self.ideal, now.full_scans);
        }
        std::thread::sleep(Duration::from_millis(20));
        Ok((saved, now.full_scans - self.scans))
    }
}

/// `ksmd` until a whole scan brings nothing; then one more is measured.
fn plain(ideal: Bytes, smart: bool) -> Result<Measured> {
    set("smart_scan", if smart { "1" } else { "0" })?;
    set("pages_to_scan", BATCH)?;
    set("sleep_millisecs", "20")?;
    let mut watch = Watch::begin(ideal)?;
    set("run", "1")?;
    let (mut before, mut scan) = (Bytes::ZERO, 0);
    let cpu_s = loop {
        let (saved, scans) = watch.look()?;
        if scans > scan {
            // Other VMs' pages come and go.
            if scans >= 3 && saved <= before + ideal.share(0.002) {
                break watch.cpu_s()?;
            }
            (before, scan) = (saved, scans);
        }
    };
    while watch.look()?.1 < scan + 2 {}
    let again_s = watch.cpu_s()? - cpu_s;
    set("run", "0")?;
    Ok(Measured { cpu_s, again_s, to_90_s: watch.to_90_s })
}

/// The product's governor until it rests, with a whole core for its budget.
fn governed(ideal: Bytes, planned: Candidates) -> Result<Measured> {
    let dir = tempfile::tempdir()?;
    let settings = Settings { cores: 1.0, ..Settings::default() };
    let state = dir.path().join("ksm.json");
    let mut governor = Governor::take(Root::default(), &state, settings, false)?;
    governor.plan(planned);
    let mut watch = Watch::begin(ideal)?;
    let why = loop {
        match governor.step(LinuxHost::now(), Pressure::Clear)? {
            Order::Run { .. } => drop(watch.look()?),
            Order::Rest { why } => break why,
        }
    };
    println!("           {why}");
    let m = Measured {
        cpu_s: watch.cpu_s()?,
        // It rests: memory that nobody wrote is not scanned again.
        again_s: 0.0,
        to_90_s: watch.to_90_s,
    };
    governor.release()?;
    Ok(m)
}
