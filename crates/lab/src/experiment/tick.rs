//! `tick`: what a whole tick of the daemon costs with many VMs: reading `/proc`, asking
//! over QMP, deciding, publishing, recording.
//!
//! The VMs are stand-ins (processes that answer QMP and have no guest), the daemon is
//! the built one, and another one where that is named: they take turns. The CPU time is the
//! kernel's own account of the daemon's threads, divided by the ticks that it counted meanwhile.
//! Arms: `rest` (no VM may be ballooned: ordinary ticks), `clear` (nothing is asked for; what
//! was taken while the VMs started is still out, so ticks are fast), `orders` (idle memory is
//! asked for once a second).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use ebb_host::daemon_client;
use ebb_host::probe::process::read_status;
use ebb_host::root::Root;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use crate::vm::threads;
use crate::{LabError, ebb, standin};

const ARMS: [&str; 3] = ["rest", "clear", "orders"];

/// Sizes and times of a run.
#[derive(Clone, Debug, Args)]
pub struct Tick {
    /// How many VMs
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    vms: Vec<u32>,
    /// Measured seconds of each arm
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Percentage of VMs whose need changes, by up to 32 MiB from one answer to the next
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    moving: u32,
    /// Clients that ask for /metrics once a second meanwhile
    #[arg(long, default_value_t = 0)]
    readers: u32,
    /// Which arms
    #[arg(long, value_delimiter = ',', default_value = "rest,clear,orders", value_parser = ARMS)]
    arms: Vec<String>,
    /// Another build of the daemon that is measured in turns with this one
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, serde::Serialize)]
struct Row {
    vms: u32,
    arm: String,
    of: PathBuf,
    ticks: u64,
    cpu_ms_a_tick: f64,
    loop_ms_a_tick: f64,
    share_of_a_core: f64,
    resident: u64,
    record_s: Option<f64>,
}

impl Tick {
    /// Runs, prints, writes `json`.
    pub fn run(&self) -> Result<()> {
        let most = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
        println!("stand-ins for VMs (no claim about real ones)");
        println!(
            "   VMs  arm     ticks a s   CPU a tick   its loop   of a core   resident   \
             record holds"
        );
        let mut rows = Vec::new();
        for vms in &self.vms {
            rows.extend(self.with(*vms)?);
        }
        if let Some(path) = &self.json {
            std::fs::write(path, serde_json::to_vec_pretty(&rows)?)
                .map_err(LabError::file(path))?;
        }
        Ok(())
    }

    fn with(&self, count: u32) -> Result<Vec<Row>> {
        let dir = tempfile::tempdir()?;
        let program = dir.path().join(standin::PROGRAM);
        std::fs::copy(std::env::current_exe()?, &program)?;
        let names: Vec<String> =
            (0..count).map(|n| standin::name(n, n % 100 >= self.moving)).collect();
        let started: Result<Vec<Child>, _> =
            names.iter().map(|name| standin::start(&program, dir.path(), name)).collect();
        let mut vms = Children(started?);
        let mut rows = Vec::new();
        let built = ebb::binary()?;
        for arm in &self.arms {
            for program in std::iter::once(&built).chain(&self.against) {
                let row = self.arm(dir.path(), &names, arm, program)?;
                self.tell(&row);
                rows.push(row);
            }
        }
        vms.end();
        Ok(rows)
    }

    fn tell(&self, row: &Row) {
        let of = self.against.is_some().then(|| row.of.display().to_string());
        println!(
            "{:>6}  {:<6}  {:>9.1}  {:>8.2} ms  {:>6.2} ms  {:>8.2} %  {:>5.1} MiB  {:>12}  {}",
            row.vms,
            row.arm,
            row.ticks as f64 / self.seconds as f64,
            row.cpu_ms_a_tick,
            row.loop_ms_a_tick,
            row.share_of_a_core * 100.0,
            row.resident as f64 / f64::from(1 << 20),
            row.record_s.map_or("-".into(), |s| format!("{s:.0} s")),
            of.unwrap_or_default()
        );
    }

    fn arm(&self, dir: &Path, names: &[String], arm: &str, program: &Path) -> Result<Row> {
        let daemon = start(dir, names, arm, program)?;
        let socket = dir.join("ebb.sock");
        let pid = daemon.0[0].id();
        let ticks = || -> Result<Value> { Ok(daemon_client::get_json(&socket, "/v1/state")?) };
        let until = Instant::now() + Duration::from_secs(60);
        while !up(&ticks()?, names.len()) {
            if Instant::now() > until {
                bail!("not all {} stand-ins are seen after a minute", names.len());
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        let (first, before) = (ticks()?, cpu(pid)?);
        let end = Instant::now() + Duration::from_secs(self.seconds);
        while Instant::now() < end {
            for _ in 0..self.readers {
                daemon_client::get(&socket, "/metrics")?;
            }
            if arm == "orders" {
                daemon_client::post(&socket, "/v1/reclaim", "{}")?;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        let (last, after) = (ticks()?, cpu(pid)?);
        let number = |s: &Value| s["tick"].as_u64().unwrap_or_default();
        let ticks = number(&last).saturating_sub(number(&first)).max(1);
        let spent = |of: &dyn Fn(&BTreeMap<u32, f64>) -> f64| of(&after) - of(&before);
        let all = spent(&|c| c.values().sum());
        let resident = read_status(&Root::default(), pid)?.context("the daemon has ended")?;
        Ok(Row {
            vms: names.len() as u32,
            arm: arm.into(),
            of: program.into(),
            ticks,
            cpu_ms_a_tick: all * 1000.0 / ticks as f64,
            loop_ms_a_tick: spent(&|c| c[&pid]) * 1000.0 / ticks as f64,
            share_of_a_core: all / self.seconds as f64,
            resident: resident.resident().0,
            record_s: last["daemon"]["record_s"].as_f64(),
        })
    }
}

/// Whether the daemon has heard all of them.
fn up(state: &Value, count: usize) -> bool {
    let vms = state["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
    vms.len() == count && vms.iter().all(|v| v["available"].is_u64())
}

/// CPU seconds of each thread.
fn cpu(pid: u32) -> Result<BTreeMap<u32, f64>> {
    Ok(threads(pid)?.into_iter().map(|(id, _, seconds)| (id, seconds)).collect())
}

/// The daemon with the times that it ships with.
fn start(dir: &Path, names: &[String], arm: &str, program: &Path) -> Result<Children> {
    let (file, d) = (dir.join("ebb.toml"), dir.display());
    let mut text = format!(
        "[daemon]\nsocket = \"{d}/ebb.sock\"\nstate_file = \"{d}/state.json\"\n\
         [host]\nvms = \"listed\"\nprograms = [\"{d}/{}\"]\n",
        standin::PROGRAM
    );
    let min = if arm == "rest" {
        format!("min = \"{}MiB\"\n", standin::RAM >> 20)
    } else {
        String::new()
    };
    names.iter().for_each(|name| text += &format!("[vm.\"{name}\"]\n{min}"));
    std::fs::write(&file, text)?;
    let log = std::fs::File::create(dir.join("log"))?;
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .args(["run", "--config"])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()?;
    let daemon = Children(vec![child]);
    let until = Instant::now() + Duration::from_secs(30);
    while daemon_client::get(dir.join("ebb.sock"), "/").is_err() {
        if Instant::now() > until {
            let log = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
            bail!("ebb did not start: {}", crate::tail(&log, 5));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(daemon)
}

/// Processes that end with this.
struct Children(Vec<Child>);

impl Children {
    fn end(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
        self.0.clear();
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end();
    }
}
