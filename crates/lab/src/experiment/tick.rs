//! `tick`: what a whole tick of the daemon costs with many VMs: reading `/proc`, asking
//! over QMP, deciding, publishing, recording.
//!
//! The VMs are stand-ins (processes that answer QMP and have no guest), the daemon is
//! the built one. The CPU time is the kernel's own account of the daemon's threads, divided by the
//! ticks that it counted meanwhile. Metrics end with the number of VMs.
//! Arms: `calm` (ordinary ticks only, as on a host with much memory left), `rest` (no VM may be
//! ballooned), `max` (each VM may have half of its RAM: Ebb owes memory and gives none, and all VMs
//! rest), `clear` (nothing is asked for; what was taken while the VMs started is still out, so
//! ticks are fast), `orders` (idle memory is asked for once a second).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use ebb_core::units::Bytes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use super::trial::{Figures, line};
use crate::ebb::{self, Daemon};
use crate::result::ExperimentResult;
use crate::vm::{Accel, resident, threads};

const ARMS: [&str; 5] = ["calm", "rest", "max", "clear", "orders"];
/// What each stand-in has.
const RAM: Bytes = Bytes::gib(4);

/// Sizes and times of a run.
#[derive(Clone, Debug, Args)]
pub struct Tick {
    /// How many VMs
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    vms: Vec<u32>,
    /// Seconds that each arm runs before it is measured: a daemon that has just started looks at
    /// each VM more often
    #[arg(long, default_value_t = 0)]
    warm: u64,
    /// Measured seconds of each arm
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Percentage of VMs whose need changes, by up to 32 MiB from one answer to the next
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    moving: u32,
    /// Which arms
    #[arg(long, value_delimiter = ',', default_value = "calm,rest,clear,orders", value_parser = ARMS)]
    arms: Vec<String>,
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Tick {
    /// Runs, prints, writes `json`.
    pub fn run(&self) -> Result<()> {
        let most = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
        println!("stand-ins for VMs (no claim about real ones)");
        let mut outcome = ExperimentResult::new("tick", "none", Accel::detect());
        self.vms.iter().try_for_each(|vms| self.with(*vms, &mut outcome))?;
        print!("{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }

    fn with(&self, count: u32, outcome: &mut ExperimentResult) -> Result<()> {
        let dir = tempfile::tempdir()?;
        let program = dir.path().join("qemu-system-standin");
        std::fs::copy(ebb::built("EBB_STANDIN", "ebb-standin", "ebb-lab")?, &program)?;
        let mut vms = Vms(BTreeMap::new());
        for n in 0..count {
            let name = format!("t{n:04}");
            let moves = n % 100 < self.moving;
            let vm = standin(&program, &name, moves.then_some(n)).spawn()?;
            vms.0.insert(name, vm);
        }
        for arm in &self.arms {
            let figures = self.arm(&program, &vms, arm)?;
            println!("{count:>6}  {arm:<6}  {}", line(&figures));
            for (metric, unit, value) in figures {
                outcome.add(arm, &format!("{metric}_{count}"), unit, &[value]);
            }
        }
        Ok(())
    }

    fn arm(&self, standin: &Path, vms: &Vms, arm: &str) -> Result<Figures> {
        let dir = standin.parent().context("a stand-in has no directory")?;
        let all = format!("min = \"{}MiB\"\n", RAM.0 >> 20);
        let size = match arm {
            "rest" => all.as_str(),
            "max" => "max = \"50%\"\n",
            _ => "",
        };
        let sections: String = vms.0.keys().map(|n| format!("[vm.\"{n}\"]\n{size}")).collect();
        let config = format!("programs = [\"{}\"]\n{sections}", standin.display());
        // With the times that it ships with.
        Daemon::configure(dir, &[], &config)?;
        if arm == "calm" {
            let file = dir.join("ebb.toml");
            let text = std::fs::read_to_string(&file)?;
            std::fs::write(&file, text.replacen("[host]", "fast_tick = \"1s\"\n[host]", 1))?;
        }
        let daemon = Daemon::start_unrecorded(dir)?;
        let heard = |s: &Value| all_are_heard(s, vms.0.len());
        daemon.wait_for("answer of each stand-in", Duration::from_secs(60), heard)?;
        self.pass(&daemon, arm, self.warm)?;
        let (first, before) = (daemon.state()?, cpu(daemon.pid())?);
        self.pass(&daemon, arm, self.seconds)?;
        let (last, after) = (daemon.state()?, cpu(daemon.pid())?);
        let number = |s: &Value| s["tick"].as_u64().unwrap_or_default();
        let ticks = number(&last).saturating_sub(number(&first)).max(1);
        let spent = |of: &dyn Fn(&BTreeMap<u32, f64>) -> f64| of(&after) - of(&before);
        let all = spent(&|c| c.values().sum());
        let seconds = self.seconds as f64;
        let mut figures = vec![
            ("ticks", "per_second", ticks as f64 / seconds),
            ("cpu_a_tick", "seconds", all / ticks as f64),
            ("loop_a_tick", "seconds", spent(&|c| c[&daemon.pid()]) / ticks as f64),
            ("cpu_share", "ratio", all / seconds),
            ("resident", "bytes", resident(daemon.pid()).0 as f64),
        ];
        let record_s = last["daemon"]["record_s"].as_f64();
        figures.extend(record_s.map(|s| ("record_holds", "seconds", s)));
        Ok(figures)
    }

    /// Lets seconds of this arm pass.
    fn pass(&self, daemon: &Daemon, arm: &str, seconds: u64) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end {
            if arm == "orders" {
                daemon.reclaim()?;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        Ok(())
    }
}

fn all_are_heard(state: &Value, count: usize) -> bool {
    let vms = state["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
    vms.len() == count && vms.iter().all(|v| v["available"].is_u64())
}

/// CPU seconds of each thread.
fn cpu(pid: u32) -> Result<BTreeMap<u32, f64>> {
    Ok(threads(pid)?.into_iter().map(|(id, _, seconds)| (id, seconds)).collect())
}

/// How a stand-in is started; `moves`: the need of its guest changes, by this number.
fn standin(program: &Path, name: &str, moves: Option<u32>) -> Command {
    let socket = program.with_file_name(format!("{name}-ebb.qmp"));
    let mut command = Command::new(program);
    command.args(["-name", name, "-m", &(RAM.0 >> 20).to_string(), "-qmp"]);
    command.arg(format!("unix:{},server=on,wait=off", socket.display()));
    command.args(["-device", "virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on"]);
    command.envs(moves.map(|number| ("EBB_STANDIN_MOVES", number.to_string())));
    command.stdin(Stdio::null());
    command
}

/// Stand-ins by name; they end with this.
struct Vms(BTreeMap<String, Child>);

impl Drop for Vms {
    fn drop(&mut self) {
        for vm in self.0.values_mut() {
            let _ = vm.kill();
        }
        for vm in self.0.values_mut() {
            let _ = vm.wait();
        }
    }
}
