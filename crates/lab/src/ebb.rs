//! Ebb under test: the built binary, run as a user would run it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_host::daemon_client::{self, ClientError};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{LabError, Sought, lock, output};

/// Where the `ebb` binary lies: `$EBB_BIN`, else beside this program.
pub fn binary() -> Result<PathBuf, LabError> {
    built("EBB_BIN", "ebb", "ebb")
}

/// A build product of another crate: where the variable says, else beside this
/// program.
pub(crate) fn built(variable: &str, file: &str, package: &str) -> Result<PathBuf, LabError> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(LabError::file("/proc/self/exe"))?;
    // Tests lie one directory deeper, in deps/.
    let found = own.ancestors().skip(1).take(2).map(|d| d.join(file)).find(|p| p.is_file());
    found.ok_or_else(|| {
        let profile = if cfg!(debug_assertions) { "" } else { " --release" };
        LabError::Missing(format!(
            "no {file} beside this program: cargo build{profile} -p {package}"
        ))
    })
}

/// A running `ebb run` with its own configuration, socket and state.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    dir: PathBuf,
    log: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Daemon {
    /// Starts it in `dir` (created; may hold the state of one before) and waits
    /// until it answers. It looks at the VMs of these names only: others on this
    /// machine are none of the lab's business. `config` is added to that.
    pub fn start(dir: &Path, vms: &[&str], config: &str) -> Result<Daemon, LabError> {
        Daemon::configure(dir, vms, config)?;
        Daemon::start_again(dir, &[])
    }

    /// Writes the configuration of one that is started in `dir` later.
    pub fn configure(dir: &Path, vms: &[&str], config: &str) -> Result<(), LabError> {
        std::fs::create_dir_all(dir).map_err(LabError::file(dir))?;
        let file = dir.join("ebb.toml");
        let d = dir.display();
        let text = format!(
            "[daemon]\nsocket = \"{d}/ebb.sock\"\nstate_file = \"{d}/state.json\"\n\
             [host]\nvms = \"listed\"\n{config}\n"
        ) + &vms.iter().map(|v| format!("[vm.\"{v}\"]\n")).collect::<String>();
        std::fs::write(&file, text).map_err(LabError::file(&file))
    }

    /// Starts it with the configuration that lies in `dir`, and further arguments.
    pub fn start_again(dir: &Path, args: &[&str]) -> Result<Daemon, LabError> {
        Daemon::start_program(&binary()?, dir, args)
    }

    /// The same with another program than the one that was built.
    pub fn start_program(program: &Path, dir: &Path, args: &[&str]) -> Result<Daemon, LabError> {
        let record = dir.join("record.jsonl").display().to_string();
        Daemon::spawn(program, dir, &[&["--record", &record], args].concat())
    }

    /// Starts it without a record: to write one takes time.
    pub fn start_unrecorded(dir: &Path) -> Result<Daemon, LabError> {
        Daemon::spawn(&binary()?, dir, &[])
    }

    fn spawn(program: &Path, dir: &Path, args: &[&str]) -> Result<Daemon, LabError> {
        let file = dir.join("ebb.toml");
        // --pdeathsig: a lab that is killed leaves no daemon.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(["run", "--config"])
            .arg(&file)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| LabError::Missing(format!("cannot start ebb: {e}")))?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let theirs = Arc::clone(&log);
        let reader = child.stderr.take().map(|err| {
            std::thread::spawn(move || {
                for line in BufReader::new(err).lines().map_while(Result::ok) {
                    lock(&theirs).push(line);
                }
            })
        });
        let mut daemon = Daemon { child, dir: dir.into(), log, reader };
        let until = Instant::now() + Duration::from_secs(30);
        while daemon.state().is_err() {
            if daemon.child.try_wait().is_ok_and(|s| s.is_some()) || Instant::now() > until {
                return Err(LabError::Missing(format!("ebb did not start: {}", daemon.log())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(daemon)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said so far.
    pub fn log(&self) -> String {
        lock(&self.log).join("\n")
    }

    /// Its configuration file, for further commands.
    pub fn config(&self) -> PathBuf {
        self.dir.join("ebb.toml")
    }

    /// A JSON document of its interface.
    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, LabError> {
        daemon_client::get_json(self.dir.join("ebb.sock"), path).map_err(failed)
    }

    /// What it knows of the host and its VMs.
    pub fn state(&self) -> Result<Value, LabError> {
        self.get("/v1/state")
    }

    /// Its last orders to balloons, and why it gave them.
    pub fn decisions(&self) -> Result<Vec<Value>, LabError> {
        self.get("/v1/decisions")
    }

    pub fn metrics(&self) -> Result<String, LabError> {
        let page = daemon_client::get(self.dir.join("ebb.sock"), "/metrics").map_err(failed)?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }

    /// Asks for all idle memory of all its VMs, and does not wait for it.
    pub fn reclaim(&self) -> Result<(), LabError> {
        daemon_client::post(self.dir.join("ebb.sock"), "/v1/reclaim", "{}").map_err(failed)
    }

    /// The same for one VM.
    pub fn reclaim_vm(&self, name: &str) -> Result<(), LabError> {
        let wish = serde_json::json!({ "vm": name }).to_string();
        daemon_client::post(self.dir.join("ebb.sock"), "/v1/reclaim", &wish).map_err(failed)
    }

    /// The state of one VM.
    pub fn vm(&self, name: &str) -> Result<Value, LabError> {
        match of(&self.state()?, name) {
            Value::Null => Err(LabError::Missing(format!("ebb does not see {name}"))),
            vm => Ok(vm.clone()),
        }
    }

    /// Waits until `done` finds something in the daemon's state.
    pub fn wait_for<S: Sought>(
        &self,
        what: &str,
        deadline: Duration,
        mut done: impl FnMut(&Value) -> S,
    ) -> Result<S::Found, LabError> {
        let until = Instant::now() + deadline;
        loop {
            let state = self.state()?;
            if let Some(found) = done(&state).found() {
                return Ok(found);
            }
            if Instant::now() > until {
                let text =
                    format!("no {what} in {deadline:?}; ebb: {state:#}\nlog:\n{}", self.log());
                return Err(LabError::Missing(text));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same in what it says of one VM, while it sees that.
    pub fn wait_for_vm<S: Sought>(
        &self,
        name: &str,
        what: &str,
        deadline: Duration,
        mut done: impl FnMut(&Value) -> S,
    ) -> Result<S::Found, LabError> {
        self.wait_for(&format!("{what} of {name}"), deadline, |state| {
            let vm = of(state, name);
            if vm.is_null() { None } else { done(vm).found() }
        })
    }

    /// Waits until its first VM is in this tier.
    pub fn wait_for_tier(&self, tier: &str) -> Result<(), LabError> {
        let what = format!("tier {tier}");
        self.wait_for(&what, Duration::from_secs(120), |s| s["vms"][0]["tier"] == tier)
    }

    /// Has it take a VM's idle memory, until the VM is no larger than `most`. A wish is for
    /// one tick, and a guest's word may just then be too old: asked again and again.
    pub fn squeeze(&self, name: &str, most: Bytes) -> Result<(), LabError> {
        // A guest that was silent for a moment is not asked for more than a minute.
        self.wait_for_vm(name, "small size", Duration::from_secs(180), |vm| {
            let size = vm["actual"].as_u64()?;
            let _ = self.reclaim_vm(name);
            (size <= most.0).then_some(())
        })
    }

    /// SIGTERM, and waits for the end; whether it ended well.
    pub fn stop(self) -> bool {
        self.end().0 == Some(0)
    }

    /// The same; another end is an error.
    pub fn end_well(self) -> Result<(), LabError> {
        match self.end() {
            (Some(0), _) => Ok(()),
            (code, log) => Err(LabError::Missing(format!("ebb ended with {code:?}: {log}"))),
        }
    }

    /// SIGHUP: it reads its configuration again.
    pub fn reload(&self) {
        self.signal(Signal::HUP);
    }

    /// SIGTERM, and waits for the end: its exit code and all that it said.
    pub fn end(mut self) -> (Option<i32>, String) {
        self.signal(Signal::TERM);
        let code = self.child.wait().ok().and_then(|s| s.code());
        self.reader.take().map(JoinHandle::join);
        (code, self.log())
    }

    pub fn crash(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn failed(error: ClientError) -> LabError {
    LabError::Missing(error.to_string())
}

/// One VM in a daemon's state; null where it is not there.
pub fn of<'a>(state: &'a Value, name: &str) -> &'a Value {
    let mut vms = state["vms"].as_array().into_iter().flatten();
    vms.find(|vm| vm["name"] == name).unwrap_or(&Value::Null)
}

/// Runs `ebb` to its end: exit code, standard output, standard error.
pub fn run(args: &[&str]) -> Result<(i32, String, String), LabError> {
    let done = output(Command::new(binary()?).args(args));
    done.map_err(|e| LabError::Missing(format!("cannot run ebb: {e}")))
}

/// The same with the configuration that lies in `dir` ([`Daemon::configure`]).
pub fn run_in(dir: &Path, args: &[&str]) -> Result<(i32, String, String), LabError> {
    let config = dir.join("ebb.toml").display().to_string();
    run(&[&["--config", &config], args].concat())
}
