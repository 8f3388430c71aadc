//! The daemon begins anew without giving anything back: for another configuration, or for
//! another version of its program.
//!
//! It executes itself with its arguments, in the same process. What it remembers of the VMs
//! is handed over in a file beside the state file; what it owes is in the state file as
//! always, so a hand-over that goes wrong is no worse than a crash. Before that the new
//! program is asked whether it takes the configuration.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::config::HANDED_OVER;
use ebb_core::state::Memory;

use crate::daemon::beside;
use crate::log;

/// Tells the new program that something was handed over, by which process, its own, and beside
/// which state file.
const VARIABLE: &str = "EBB_HANDED_OVER";
/// The loop waits while a program reads its configuration, and no longer than this.
const CHECK_TIME: Duration = Duration::from_secs(10);
/// How often it is asked: a signal that is meant for the daemon may end it.
const CHECK_TRIES: u32 = 3;
/// No more is read of it.
const MOST: u64 = 256 << 20;

/// The program's path at its start, since after an upgrade another file is there; and the
/// configuration that was read.
static START: OnceLock<(Option<PathBuf>, Option<String>)> = OnceLock::new();

/// To be called at the start; `config`: the file that was read, if there was one.
pub fn begin(config: Option<String>) {
    let _ = START.set((std::env::current_exe().ok(), config));
}

fn program() -> Result<&'static Path> {
    START.get().and_then(|(program, _)| program.as_deref()).context("/proc/self/exe")
}

/// Whether the program that lies there now takes the configuration. A file that was read and is
/// gone is not taken: without it VMs that it excludes would be served.
pub fn check() -> Result<()> {
    let program = program()?;
    let config = START.get().and_then(|(_, config)| config.as_deref());
    for _ in 0..CHECK_TRIES {
        let mut command = Command::new(program);
        command.arg("check").args(config.into_iter().flat_map(|c| ["--config", c]));
        if succeeds(command, CHECK_TIME)? {
            return Ok(());
        }
    }
    bail!("{} check is ended by SIGHUP each time", program.display())
}

/// Runs it to its end; the error has what it said. `false`: SIGHUP has ended it, which `systemctl
/// kill` sends to all processes of the unit.
fn succeeds(mut command: Command, time: Duration) -> Result<bool> {
    let what = format!("cannot run {} check", command.get_program().to_string_lossy());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| what.clone())?;
    let until = Instant::now() + time;
    while child.try_wait().with_context(|| what.clone())?.is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            bail!("{what}: no answer within {time:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let out = child.wait_with_output().with_context(|| what.clone())?;
    const HUP: i32 = rustix::process::Signal::HUP.as_raw();
    match out.status.signal() {
        Some(HUP) => return Ok(false),
        Some(signal) => bail!("{what}: ended by signal {signal}"),
        None => {}
    }
    if !out.status.success() {
        let said = String::from_utf8_lossy(&out.stderr);
        bail!("the configuration is not taken: {}", said.trim());
    }
    Ok(true)
}

/// Begins anew; returns only where that failed, or where it is to stop after all: a signal that
/// comes while memory is handed over would be lost. Without a state file nothing is handed over.
pub fn execute(memory: &Memory, state_file: Option<&str>, stops: impl Fn() -> bool) -> Result<()> {
    let program = program()?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1));
    // Without it the new program knows what the state file says: enough to go on.
    if let Some(used) = state_file {
        if let Err(e) = hand_over(memory, used) {
            log::say(&format!("what is remembered of VMs is not handed over: {e:#}"));
            log::flush();
            let _ = std::fs::remove_file(beside(used, HANDED_OVER));
        }
        command.env(VARIABLE, format!("{} {used}", std::process::id()));
    }
    if stops() {
        let _ = state_file.map(|used| std::fs::remove_file(beside(used, HANDED_OVER)));
        return Ok(());
    }
    Err(command.exec()).with_context(|| format!("cannot execute {}", program.display()))
}

fn hand_over(memory: &Memory, state_file: &str) -> Result<()> {
    let path = beside(state_file, HANDED_OVER);
    let write = || -> std::io::Result<()> {
        let mut open = File::options();
        let mut file = open.create(true).truncate(true).write(true).mode(0o600).open(&path)?;
        file.write_all(&serde_json::to_vec(memory)?)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// The state file that this process has used before it began anew: it is in there what VMs are
/// owed, whatever the configuration says now.
pub fn state_file_in_use() -> Option<String> {
    in_use(&std::env::var(VARIABLE).ok()?)
}

fn in_use(handed: &str) -> Option<String> {
    let (pid, file) = handed.split_once(' ')?;
    (pid == std::process::id().to_string()).then(|| file.into())
}

/// What was handed over to this process, if anything was. What another version wrote and
/// this one does not read is left: the state file has what matters.
pub fn handed_over(state_file: &str) -> Option<Memory> {
    let handed = std::env::var(VARIABLE).ok()?;
    // Older versions tell of no file.
    let ours = in_use(&handed).is_some() || handed == std::process::id().to_string();
    let path = beside(state_file, HANDED_OVER);
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|f| f.take(MOST).read_to_end(&mut text));
    let _ = std::fs::remove_file(&path);
    read.ok().filter(|_| ours)?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_not_waited_for() {
        let shell = |text: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", text]);
            succeeds(command, Duration::from_millis(300)).map_err(|e| e.to_string())
        };
        assert_eq!(shell("exit 0"), Ok(true));
        assert_eq!(shell("kill -HUP $$"), Ok(false), "systemctl kill --signal=HUP");
        assert_eq!(shell("kill -9 $$").unwrap_err(), "cannot run sh check: ended by signal 9");
        let said = shell("echo f:2: no such key >&2; exit 1").unwrap_err();
        assert_eq!(said, "the configuration is not taken: f:2: no such key");
        let said = shell("exec sleep 60").unwrap_err();
        assert_eq!(said, "cannot run sh check: no answer within 300ms");
    }

    #[test]
    fn what_is_handed_over_is_read_once_and_only_by_the_process_that_wrote_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state.json");
        let state = state.to_str().unwrap();
        hand_over(&Memory::default(), state).unwrap();
        assert_eq!(handed_over(state), None, "no execution has told of it");
        assert!(beside(state, HANDED_OVER).exists(), "nor is it touched");
        let own = std::process::id();
        assert_eq!(in_use(&format!("{own} /run/a b")), Some("/run/a b".into()));
        assert_eq!(in_use(&format!("{} /run/ab", own + 1)), None);
        assert_eq!(in_use(&own.to_string()), None, "an older version's");
    }
}
