//! `ebb release`: gives back what a daemon that is gone had taken.
//!
//! It is what is left when the daemon cannot be started again, so it relies on the state file
//! and on nothing else: VMs are found by the processes named there, whatever the configuration
//! says of them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::config::{Config, INTERVALS, KSM_NOTE};
use ebb_core::state::{Owned, OwnedVm};
use ebb_host::act::ksm;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::root::Root;

use crate::cmd::merge;
use crate::daemon::{beside, options};
use crate::give_back::give_back;
use crate::log::say;
use crate::state::StateFile;

/// Time limit for VMs that are owed nothing, to put back how often they are asked for statistics.
const RESTORE: Duration = Duration::from_secs(3);
/// The least for closing VMs to KSM: what is merged is copied then.
const MARKS: Duration = Duration::from_secs(20);

/// Gives back all that the state file names, and tries until `patience` is over; `false` if there
/// is no such file.
pub fn main(config: &Config, patience: Duration) -> Result<bool> {
    let path = &config.state_file;
    if !Path::new(path).try_exists().with_context(|| format!("cannot look for {path}"))? {
        say(&format!("no state file {path}: nothing is known to be owed"));
        return recover_ksm(path);
    }
    let mut state = StateFile::open(path)?;
    let owned = state.read()?;
    if owned.is_empty() {
        say(&format!("nothing is owed, says {path}"));
        give_back_vms(config, &mut state, &owned, patience)?;
        return recover_ksm(path).map(|_| true);
    }
    let until = Instant::now() + patience;
    let (vms, mut failed) = give_back_vms(config, &mut state, &owned, patience)?;
    let mut owed = Owned { vms, ..owned };
    // What is given back is so, also where it cannot be written down; the end says so.
    let _ = state.write(&owed);
    failed.extend(recover_ksm(path).err().map(|e| format!("{e:#}")));
    let rest = until.saturating_duration_since(Instant::now());
    let (marks, why) = merge::put_back(config, &owed.marks, rest.max(MARKS));
    owed.marks = marks;
    failed.extend(why);
    let written = state.write(&owed);
    if !failed.is_empty() {
        bail!("not given back, and still written down in {path}: {}", failed.join("; "));
    }
    written.context("everything is given back, which is not written down")?;
    Ok(true)
}

/// The host's connections end here: a QMP socket serves one client.
fn give_back_vms(
    config: &Config,
    state: &mut StateFile,
    owned: &Owned,
    patience: Duration,
) -> Result<(Vec<OwnedVm>, Vec<String>)> {
    let intervals = beside(&config.state_file, INTERVALS);
    if owned.vms.is_empty() && !intervals.exists() {
        return Ok((Vec::new(), Vec::new()));
    }
    let wanted = Options {
        ksm_note: None,
        config: Config { listed_only: false, ..config.clone() },
        psi_trigger_us: None,
        // Guests are asked no more often for this, and as often as before in the end.
        look_only: true,
        intervals: Some(intervals),
        ..options(config)
    };
    let mut host = LinuxHost::new(wanted).context("cannot watch the host")?;
    host.reach_at(owned.vms.iter().filter_map(OwnedVm::reached_at));
    let (left, whys) = give_back(&mut host, owned, patience, Some(state));
    let until = Instant::now() + RESTORE;
    host.restore_intervals();
    while host.has_intervals() && Instant::now() < until {
        host.sample();
        host.restore_intervals();
        host.wait(Instant::now() + Duration::from_millis(100));
    }
    let still = |vm: &OwnedVm| left.iter().find(|l| l.id == vm.id).and_then(|l| l.others);
    let notes: Vec<_> = owned.vms.iter().map(|vm| (vm.id, still(vm))).collect();
    host.note_last(&notes);
    Ok((left, whys))
}

/// Puts KSM's settings back, where an earlier daemon had changed them.
fn recover_ksm(state_file: &str) -> Result<bool> {
    let recovered = ksm::KsmOwner::recover(Root::default(), &beside(state_file, KSM_NOTE))
        .context("KSM's settings are not put back")?;
    if recovered {
        say("KSM is set as it was before");
    }
    Ok(recovered)
}
