//! `ebb merge`: what merging equal pages would bring; VMs in and out of it.
//!
//! `report` reads the memory of VMs itself, with or without a daemon, and changes
//! nothing. `on` and `off` ask QEMU and look whether it was done. What a number
//! here means is told in docs/merging.md.
//!
//! This file has the command line and the VMs that it means; `report` is one half of the
//! work, `switch` the other.

mod report;
mod switch;

use anyhow::{Result, bail};
use clap::{ArgGroup, Subcommand};
use ebb_core::config::Config;
use ebb_core::sample::{Claim, KsmStat};
use ebb_host::probe::cgroup::{Version, read_hierarchy};
use ebb_host::probe::discovery::discover;
use ebb_host::probe::identity::{claim, name_by_socket};
use ebb_host::probe::ksm::read_ksm_stat;
use ebb_host::probe::qemu::QemuProcess;
use ebb_host::root::Root;
use ebb_host::scan::{Found, Limits, Options};

use self::report::report;
pub use self::switch::put_back;
use self::switch::{off_all, on, running, steers, switch, tell_daemon};
use crate::daemon::trust;

#[derive(Subcommand)]
pub enum What {
    /// Reads VMs' memory and tells what merging would save, and for what CPU time
    Report {
        /// Only these VMs [default: all]
        vm: Vec<String>,
        /// Read all memory, also where a sample finds nothing
        #[arg(long)]
        full: bool,
        /// Threads [default: as many as there are idle cores]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=32))]
        threads: Option<u32>,
        /// Cores that all threads together may use, e.g. 0.5
        #[arg(long)]
        cores: Option<f64>,
        /// Compete with everything else for the CPU [default: run when it is idle]
        #[arg(long)]
        hurry: bool,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Opens these VMs to KSM. All must be of one share group, and no VM of another may be open
    On {
        /// The VMs
        #[arg(required = true)]
        vm: Vec<String>,
        /// Also where VMs of another group are open to KSM: their pages will be merged together
        #[arg(long)]
        across_groups: bool,
    },
    /// Takes VMs out of KSM and unmerges their pages
    #[command(group = ArgGroup::new("which").required(true).args(["vm", "all"]))]
    Off {
        /// The VMs
        vm: Vec<String>,
        /// Stops KSM and unmerges all merged pages of the host
        #[arg(long)]
        all: bool,
    },
}

const STEERS_NO_MORE: &str = "no daemon steers KSM any more, and the configuration is bad";

/// Does it; `false` where there was nothing to do. `is_bad`: the configuration was refused, so only a
/// daemon that steers KSM may open VMs or close them.
pub fn main(config: &Config, what: What, is_bad: bool) -> Result<bool> {
    match what {
        What::Report { vm, full, threads, cores, hurry, json } => {
            if cores.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
                bail!("--cores: a number above 0, such as 0.5");
            }
            let limits = Limits { cores, ..Limits::default() };
            let threads = threads.map(|t| t as usize);
            let options = Options { threads, limits, hurry, ..Options::default() };
            report(config, &vm, full, &options, json)
        }
        What::On { vm, across_groups } => match running(config)? {
            Some(state) if steers(&state) && across_groups => bail!(
                "--across-groups: the daemon steers KSM and goes by merge.across_groups in its \
                 configuration"
            ),
            Some(state) if steers(&state) => tell_daemon(config, &state, &vm, true),
            _ if is_bad => bail!(STEERS_NO_MORE),
            daemon => on(config, &vm, across_groups, daemon.as_ref()),
        },
        What::Off { all: true, .. } => off_all(config),
        What::Off { vm, all: false } => match running(config)? {
            Some(state) if steers(&state) => tell_daemon(config, &state, &vm, false),
            _ if is_bad => bail!(STEERS_NO_MORE),
            daemon => switch(config, &vm, false, daemon.as_ref()),
        },
    }
}

/// Whether a daemon that steers KSM runs.
pub fn is_steered(config: &Config) -> bool {
    running(config).is_ok_and(|daemon| daemon.is_some_and(|state| steers(&state)))
}

/// A VM before it is scanned.
struct Known {
    process: QemuProcess,
    group: String,
    group_is_proven: bool,
    found: Option<Found>,
    stat: Option<KsmStat>,
    why: Option<String>,
}

/// The VMs that the configuration and the command line mean.
fn look(config: &Config, root: &Root, names: &[String]) -> Result<Vec<Known>> {
    let scan = discover(root, &trust(config))?;
    if let (true, Some(why)) = (scan.found.is_empty(), scan.unread()) {
        bail!("processes cannot be read: {why}: run this as root; as root, try again");
    }
    let mut processes = scan.found;
    processes.iter_mut().for_each(|p| name_by_socket(config, p));
    if config.listed_only {
        processes.retain(|p| config.section(&p.given, p.args.uuid.as_deref()).is_some());
    }
    are_there(names, &Vec::from_iter(processes.iter().map(|p| p.name.as_str())))?;
    processes.retain(|p| names.is_empty() || names.contains(&p.name));
    let one_group = config.has_one_group();
    let version = read_hierarchy(root)?.map_or(Version::V2, |h| h.version);
    let one = |process: QemuProcess| {
        let group = config.settings(&process.given, process.args.uuid.as_deref()).group.clone();
        let claim = claim(root, config, version, &process);
        let group_is_proven = one_group || claim == Claim::Proven;
        let (found, why) = match Found::look(root, process.id, &process.name, &group) {
            Ok(Some(found)) => (Some(found), None),
            Ok(None) => (None, Some("it has ended".to_string())),
            Err(e) => (None, Some(e.to_string())),
        };
        let why = why.or_else(|| refused(found.as_ref()?));
        let stat = read_ksm_stat(root, process.id.pid).ok().flatten();
        Known { process, group, group_is_proven, found, stat, why }
    };
    Ok(processes.into_iter().map(one).collect())
}

/// An error where there is no VM of one of these names.
fn are_there(names: &[String], there: &[&str]) -> Result<()> {
    match names.iter().find(|n| !there.contains(&n.as_str())) {
        Some(unknown) if there.is_empty() => bail!("no VM {unknown}: there is none at all"),
        Some(unknown) => bail!("no VM {unknown}; there are: {}", there.join(" ")),
        None => Ok(()),
    }
}

fn refused(found: &Found) -> Option<String> {
    let (size, why) = found.refused?;
    Some(format!("{size}: {why}"))
}
