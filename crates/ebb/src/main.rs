//! `ebb`: parses, dispatches, sets the exit code. Everything else is elsewhere.
//!
//! Exit codes: 0 done, 1 nothing to do (or nothing found), 2 error.

mod advice;
mod api;
mod cmd;
mod daemon;
mod fields;
mod give_back;
#[cfg(test)]
mod golden;
mod log;
mod log_limiter;
mod metrics;
mod observer;
mod recorder;
mod reexec;
mod server;
mod signals;
mod state;
mod table;
mod view;

use std::io::Read;
use std::process::ExitCode;
use std::time::Duration;

use crate::cmd::merge::What;
use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use ebb_core::config::{Config, ConfigError, milliseconds, sizeable};
use ebb_core::plan::Reclaim;
use ebb_core::units::{Bytes, NotASize};
use ebb_host::daemon_client;
use ebb_host::hands_off::MOST_MS;
use ebb_host::root::Root;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Gives the memory that VMs do not use back to their host, and gives it to them
/// again when they need it.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
#[command(after_help = "Exit code: 0 done, 1 nothing to do or nothing found, 2 error. Settings: \
                        ebb.toml(5). Documents: /usr/share/doc/ebb/docs, operate.md first.")]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct Global {
    /// Configuration file [default: /etc/ebb/ebb.toml, where it exists]
    #[arg(long, global = true)]
    config: Option<String>,
    /// The daemon's Unix socket [default: the configuration's, else /run/ebb/ebb.sock]
    #[arg(long, global = true)]
    socket: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the daemon in the foreground
    Run {
        /// Say what would be done, change nothing
        #[arg(long)]
        dry_run: bool,
        /// Record every tick to this file
        #[arg(long, value_name = "FILE")]
        record: Option<String>,
        /// A line for every tick
        #[arg(long, short)]
        verbose: bool,
    },
    /// Shows host and VMs
    Status {
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Tells why a VM has the size it has, and what was done to it
    Explain {
        /// Its name
        vm: String,
        /// How many decisions, the latest
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
        last: usize,
        /// What happened at this time of day (UTC) and why, from the record
        #[arg(long, value_name = "HH:MM[:SS]")]
        at: Option<String>,
        /// A file from `ebb record` instead of the daemon's own record
        #[arg(long, value_name = "FILE", requires = "at")]
        record: Option<String>,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Tells whether more VMs fit, at whose expense and how soon (exit code 1: they do not);
    /// without --memory, what the last tick planned
    Plan {
        /// RAM of each, such as 4GiB
        #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
        memory: Option<Bytes>,
        /// How many
        #[arg(long, default_value_t = 1, requires = "memory", value_parser = clap::value_parser!(u32).range(1..=100_000))]
        count: u32,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Tells what Ebb can do here, for each VM, and what is in the way
    Doctor {
        /// The result as JSON
        #[arg(long)]
        json: bool,
        /// First makes those changes of the host that are safe. No VM is changed
        #[arg(long)]
        fix: bool,
        /// With --fix: tells only what would be changed
        #[arg(long, requires = "fix")]
        dry_run: bool,
    },
    /// Takes idle memory from VMs now, and tells how much the host got
    #[command(group = ArgGroup::new("which").required(true).args(["vm", "all"]))]
    Reclaim {
        /// Of this VM
        vm: Option<String>,
        /// Of all VMs
        #[arg(long)]
        all: bool,
        /// How much in all, such as 512MiB [default: all that is idle]
        #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
        bytes: Option<Bytes>,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Leaves a VM alone: before a device is plugged in, a snapshot is loaded, or its QEMU
    /// is replaced. The command returns when nothing of Ebb's touches its memory any more
    HandsOff {
        /// This VM
        vm: String,
        /// For how long, such as 90s or 1h; then Ebb goes on by itself
        #[arg(long = "for", default_value = "10min", value_parser = duration)]
        time: Duration,
    },
    /// Goes on with a VM that was left alone
    HandsOn {
        /// This VM
        vm: String,
    },
    /// Page merging: tells what it would save; switches it on or off for VMs
    Merge {
        #[command(subcommand)]
        what: What,
    },
    /// Writes the last minutes of a running daemon to a file
    Record {
        /// Where to; `-` is standard output
        output: String,
    },
    /// Decides everything in a record again and compares
    Replay {
        /// A file from `ebb record` or `ebb run --record`
        file: String,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Gives VMs the memory that a daemon which is gone had taken
    ///
    /// The state file says what is owed. The configuration says which processes are VMs; where it is not valid, the
    /// defaults count. Exit code: 0 nothing is owed any more, 1 there is no state file, 2 something is left, with its
    /// reason.
    Release {
        /// The state file [default: the configuration's, else /run/ebb/state.json]
        #[arg(long, value_name = "FILE")]
        state: Option<String>,
        /// For how many seconds it tries
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=86_400))]
        seconds: u64,
    },
    /// Checks the configuration file: exit code 0 it is valid, 2 it is not
    Check,
    /// Prints completions for a shell
    Completions {
        /// Which
        #[arg(required_unless_present = "vms")]
        shell: Option<clap_complete::Shell>,
        /// The names of VMs instead, one a line, but for those that a shell would expand
        #[arg(long, conflicts_with = "shell")]
        vms: bool,
    },
    /// Writes the manual's pages
    #[command(hide = true)]
    Man {
        /// Below this directory: man5, man8
        dir: String,
    },
}

/// What of the configuration a command goes by.
#[derive(Clone, Copy, PartialEq)]
enum GoesBy {
    All,
    /// It only asks the daemon.
    Socket,
    /// It only asks a daemon that steers KSM, and does the work itself where there is none.
    SocketIfSteered,
    Nothing,
}

impl Command {
    fn goes_by(&self) -> GoesBy {
        match self {
            Command::Run { .. }
            | Command::Doctor { .. }
            | Command::Merge { what: What::Report { .. } }
            | Command::Release { .. }
            | Command::Check => GoesBy::All,
            Command::Merge { what: What::Off { all: true, .. } } => GoesBy::Socket,
            Command::Merge { .. } => GoesBy::SocketIfSteered,
            Command::Explain { record: Some(_), .. }
            | Command::Replay { .. }
            | Command::Completions { vms: false, .. }
            | Command::Man { .. } => GoesBy::Nothing,
            _ => GoesBy::Socket,
        }
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    match milliseconds(text) {
        Some(ms) if (1000.0..=MOST_MS as f64).contains(&ms) => Ok(Duration::from_millis(ms as u64)),
        _ => Err("a time from \"1s\" to \"24h\"".into()),
    }
}

fn size(text: &str) -> Result<Bytes, String> {
    sizeable(text.parse().map_err(|e: NotASize| e.to_string())?)
}

fn main() -> ExitCode {
    // A program reads the output, errors too.
    let json = std::env::args_os().any(|a| a == "--json");
    let cli = match Cli::try_parse() {
        Err(e) if json && e.use_stderr() => {
            let said = e.to_string();
            let said = said.trim().trim_start_matches("error: ");
            let _ = table::emit_json(&serde_json::json!({ "error": said }));
            return ExitCode::from(2);
        }
        cli => cli.unwrap_or_else(|e| e.exit()),
    };
    raise_file_limit();
    let code = match dispatch(cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) if e.is::<table::ReaderGone>() => ExitCode::SUCCESS,
        Err(e) if json => {
            let _ = table::emit_json(&serde_json::json!({ "error": format!("{e:#}") }));
            ExitCode::from(2)
        }
        Err(e) => {
            log::say(&format!("ebb: {e:#}"));
            ExitCode::from(2)
        }
    };
    log::flush();
    code
}

fn dispatch(cli: Cli) -> Result<bool> {
    let file = cli.global.config.as_deref();
    let loaded = match cli.command.goes_by() {
        GoesBy::Nothing => Ok(None),
        GoesBy::Socket if cli.global.socket.is_some() => Ok(None),
        _ => load(file),
    };
    let absent = matches!(loaded, Ok(None));
    let file = (!absent).then(|| file.unwrap_or(DEFAULT_CONFIG).to_owned());
    let mut is_bad = false;
    let mut config = match (loaded, &cli.command) {
        // A mistake in the file may be the very reason for which there is no daemon any more.
        (Err(e), Command::Release { .. }) => {
            is_bad = true;
            log::say(&format!("{e:#}"));
            log::say("the configuration is bad: going on with the defaults");
            Config::default()
        }
        // Or the daemon runs well, with the file as it was.
        (Err(e), command) if command.goes_by() != GoesBy::All => {
            let is_socket = |e: &ConfigError| e.field == "daemon.socket";
            let is_refused = e.downcast_ref::<ConfigError>().is_some_and(is_socket);
            let written = || file.as_deref().and_then(|f| Config::socket_of(&read(f).ok()?));
            let written = || written().filter(|_| !is_refused);
            let mut config = Config::default();
            match cli.global.socket.clone().or_else(written) {
                Some(socket) => config.socket = socket,
                // The default one may be another daemon's.
                None if is_refused || cli.global.config.is_some() => return Err(e),
                None => {}
            }
            is_bad = true;
            if command.goes_by() == GoesBy::SocketIfSteered && !cmd::merge::is_steered(&config) {
                return Err(e);
            }
            log::say(&format!("{e:#}"));
            log::say(&format!("the configuration is bad: asking the daemon on {}", config.socket));
            config
        }
        (loaded, _) => loaded?.unwrap_or_default(),
    };
    if let Some(socket) = cli.global.socket {
        config.socket = socket;
    }
    let socket = config.socket.clone();
    match cli.command {
        Command::Run { dry_run, record, verbose } => {
            if file.is_none() {
                log::say(&format!("there is no {DEFAULT_CONFIG}: the defaults hold"));
            }
            reexec::begin(file);
            cmd::run::main(config, dry_run, record, verbose).map(|()| true)
        }
        Command::Status { json } => cmd::status::main(&socket, json),
        Command::Explain { vm, at: Some(at), record, json, .. } => {
            cmd::explain_at::main(&socket, &vm, &at, record.as_deref(), json)
        }
        Command::Explain { vm, last, json, .. } => {
            cmd::explain::main(&socket, &vm, last, json).map(|()| true)
        }
        Command::Plan { memory, count, json } => cmd::plan::main(&socket, memory, count, json),
        Command::Doctor { json, fix, dry_run } => cmd::doctor::main(&config, json, fix, dry_run),
        Command::Reclaim { vm, all: _, bytes, json } => {
            cmd::reclaim::main(&socket, Reclaim { vm, bytes }, json)
        }
        Command::HandsOff { vm, time } => cmd::hands_off::off(&socket, &vm, time),
        Command::HandsOn { vm } => cmd::hands_off::on(&socket, &vm),
        Command::Merge { what } => cmd::merge::main(&config, what, is_bad),
        Command::Record { output } => cmd::record::record(&socket, &output).map(|()| true),
        Command::Replay { file, json } => cmd::record::replay(&file, json).map(|()| true),
        Command::Release { state, seconds } => {
            let is_named = state.is_some();
            config.state_file = state.unwrap_or(config.state_file);
            let found = cmd::release::main(&config, Duration::from_secs(seconds))?;
            if !found && is_bad && !is_named {
                anyhow::bail!(
                    "the configuration is bad, so the state file may be another one: mend it, or \
                     name the state file (ebb release --state FILE)"
                );
            }
            Ok(found)
        }
        Command::Completions { shell: Some(shell), .. } => {
            cmd::completions::script(Cli::command(), shell).map(|()| true)
        }
        Command::Completions { shell: None, .. } => cmd::completions::vms(&socket).map(|()| true),
        Command::Man { dir } => cmd::manual::pages(Cli::command(), &dir).map(|()| true),
        Command::Check => match file {
            Some(_) => {
                let doubts = advice::doubts(&config, &Root::default());
                let doubts: String = doubts.iter().map(|d| format!("warning: {d}\n")).collect();
                table::emit(&format!("the configuration is valid\n{doubts}"))
            }
            None => table::emit(&format!("there is no {DEFAULT_CONFIG}: the defaults hold\n")),
        }
        .map(|()| true),
    }
}

/// Two descriptors a VM, and one a client: the soft limit of 1024 is for programs that call
/// `select`. What fails stays as it was, and shows in what is then not opened.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

const DEFAULT_CONFIG: &str = "/etc/ebb/ebb.toml";

/// The configuration; `None` where there is no file and none was named.
fn load(path: Option<&str>) -> Result<Option<Config>> {
    let file = path.unwrap_or(DEFAULT_CONFIG);
    match read(file) {
        Ok(text) => Ok(Some(Config::parse(file, &text)?)),
        Err(e) if path.is_none() && e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {file}")),
    }
}

/// A configuration file, of 1 MiB at most.
fn read(file: &str) -> std::io::Result<String> {
    const MOST: u64 = 1 << 20;
    let mut bytes = Vec::new();
    let length = std::fs::File::open(file)?.take(MOST + 1).read_to_end(&mut bytes)?;
    if length as u64 > MOST {
        return Err(std::io::Error::other("it is larger than 1 MiB"));
    }
    String::from_utf8(bytes).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        std::io::Error::other(format!("line {line} is not UTF-8"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_configuration_is_of_text_and_not_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f").display().to_string();
        std::fs::write(&file, b"[vm.a]\n# \xe4\n").unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "line 2 is not UTF-8");
        assert_eq!(read("/dev/zero").unwrap_err().to_string(), "it is larger than 1 MiB");
    }

    #[test]
    fn a_named_configuration_must_exist() {
        let said = format!("{:#}", load(Some("/nonexistent/x.toml")).unwrap_err());
        assert!(said.starts_with("cannot read /nonexistent/x.toml"), "{said}");
    }
}
