//! `ebb run`: the daemon.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::config::{Config, KSM_NOTE, MergeMode};
use ebb_core::model::Model;
use ebb_core::plan::Plan;
use ebb_core::state::{Owned, OwnedVm};
use ebb_core::tick::{Engine, Host};
use ebb_host::act::ksm::{KsmOwner, describe};
use ebb_host::probe::process;
use ebb_host::root::Root;
use sd_notify::NotifyState;

use crate::api::{self, Shared};
use crate::cmd::merge;
use crate::daemon::{Daemon, beside};
use crate::give_back::give_back;
use crate::log::{self, say};
use crate::observer::Observer;
use crate::recorder::Head;
use crate::reexec;
use crate::signals::Signals;
use crate::state::StateFile;

/// How long QEMUs and guests may take when Ebb stops. What is left then stays written
/// down; `TimeoutStopSec=` of the unit is longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long closing VMs to KSM may take when Ebb stops: what is merged is copied then.
const MARKS: Duration = Duration::from_secs(12);
/// How long putting KSM's settings back may take when Ebb stops.
const KSM: Duration = Duration::from_secs(5);
/// How often Ebb tries to listen on a socket that could not be used.
const BIND_AGAIN: Duration = Duration::from_secs(60);

pub fn main(
    mut config: Config,
    dry_run: bool,
    record: Option<String>,
    verbose: bool,
) -> Result<()> {
    log::begin();
    let used = reexec::state_file_in_use().unwrap_or_else(|| config.state_file.clone());
    let remembered = if dry_run { None } else { reexec::handed_over(&used) };
    let signals = Signals::note()?;
    let mut state = if dry_run { None } else { Some(open_state(&used, &mut config)?) };
    let others = process::daemons(&Root::default()).into_iter();
    for pid in others.filter(|pid| !dry_run && *pid != std::process::id()) {
        say(&format!("process {pid} is an ebb run, too: stop all but one"));
    }
    let mut owned = state.as_ref().map_or(Ok(Owned::default()), StateFile::read)?;
    let bind = || api::bind(&config.socket, config.listen.as_deref());
    // Where VMs are owed something, Ebb goes on although it cannot answer commands.
    let listeners = match bind() {
        Err(e) if !api::is_served(&e) && (remembered.is_some() || !owned.is_empty()) => {
            let again = BIND_AGAIN.as_secs();
            say(&format!("commands are not answered (tried again each {again} s): {e:#}"));
            None
        }
        listeners => Some(listeners?),
    };
    if let Some(state) = &mut state {
        begin_merging(&config, state, &mut owned)?;
    }
    let mut daemon = Daemon::new(&config, state, signals.clone())?;
    daemon.wake_on_signals()?;
    // What is owed already was taken over these sockets.
    daemon.host.reach_at(owned.vms.iter().filter_map(OwnedVm::reached_at));
    let mut engine = Engine::new(config.clone(), dry_run);
    match &remembered {
        Some(_) => say("begun anew: what was remembered is taken over"),
        None if !owned.vms.is_empty() => {
            say(&format!("an earlier daemon had taken memory from {}: owned again", names(&owned)));
        }
        None => {}
    }
    if remembered.is_some() || !owned.is_empty() {
        engine.adopt(owned, remembered);
    }
    let shared = Shared::default();
    let head = Head::new(&config, &engine.memory);
    let mut observer = Observer::new(head, shared.clone(), dry_run, record, verbose)?;
    // The first tick before the first answer: nobody sees an empty state.
    let (tick, model) = engine.step(&mut daemon);
    let mut model = Arc::new(model);
    observer.observe(&engine, tick, &model);
    let inbox = daemon.inbox.clone();
    let serve = |listeners| api::serve(listeners, shared.clone(), inbox.clone());
    let (mut answers, mut tried) = (listeners.is_some(), Instant::now());
    listeners.map(serve).transpose()?;
    say(&format!(
        "ebb {} watches {} VMs, answers on {}{}",
        env!("CARGO_PKG_VERSION"),
        model.vms.len(),
        if answers { &config.socket } else { "no socket" },
        if dry_run { "; dry run: nothing is changed" } else { "" }
    ));
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    while daemon.wait(&engine.next(&model)) {
        let (tick, next) = engine.step(&mut daemon);
        model = Arc::new(next);
        observer.observe(&engine, tick, &model);
        if !answers && tried.elapsed() >= BIND_AGAIN {
            (tried, answers) = (Instant::now(), bind().and_then(serve).is_ok());
            if answers {
                say(&format!("commands are answered on {} now", config.socket));
            }
        }
    }
    // Where that fails it ends as for any other signal: the next start may fail as well.
    let anew = match signals.reloads() && !signals.stops() {
        true => begin_anew(&engine, &signals),
        false => Ok(()),
    };
    if let Err(e) = &anew {
        say(&format!("SIGHUP: {e:#}; everything is given back"));
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    let result = if dry_run { Ok(()) } else { stop(&engine, daemon, &model) };
    if answers {
        let _ = std::fs::remove_file(&config.socket);
    }
    result.and(anew)
}

/// The state file of the configuration. If this process has used another one so far, everything in
/// that moves along; where it cannot, that one stays in use.
fn open_state(used: &str, config: &mut Config) -> Result<StateFile> {
    if *used == config.state_file {
        return StateFile::open(used);
    }
    match StateFile::moved(used, &config.state_file) {
        Ok(state) => {
            say(&format!("what VMs are owed is in {} now, no more in {used}", config.state_file));
            Ok(state)
        }
        Err(e) => {
            say(&format!("{used} stays in use, and not daemon.state_file: {e:#}"));
            config.state_file = used.into();
            StateFile::open(used)
        }
    }
}

/// Returns only where that failed, or another signal came that stops it.
fn begin_anew(engine: &Engine, signals: &Signals) -> Result<()> {
    if !signals.hold()? {
        return Ok(());
    }
    say("SIGHUP: beginning anew, nothing is given back");
    log::flush();
    if signals.stops() {
        return Ok(());
    }
    let now = NotifyState::monotonic_usec_now()?;
    let _ = sd_notify::notify(&[NotifyState::Reloading, now]);
    let state_file = &engine.config.state_file;
    let stops = || signals.stops();
    reexec::execute(&engine.memory, (!engine.dry_run).then_some(state_file), stops)
}

fn names(owned: &Owned) -> String {
    owned.vms.iter().map(|v| v.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Says what is taken over of KSM. Where it is not steered (any more), what an earlier
/// daemon had changed is put back.
fn begin_merging(config: &Config, state: &mut StateFile, owned: &mut Owned) -> Result<()> {
    let root = Root::default();
    if config.merge.mode == MergeMode::On {
        if let Some(set) = describe(&root)? {
            say(&format!("KSM is steered from now on and put back at the end; it was: {set}"));
        }
        return Ok(());
    }
    match KsmOwner::recover(root, &beside(&config.state_file, KSM_NOTE)) {
        Ok(false) => {}
        Ok(true) => say("an earlier daemon had steered KSM: set as it was before"),
        // Guests need their memory, whatever becomes of KSM.
        Err(e) => say(&format!("KSM is not set as it was before: {e}")),
    }
    if !owned.marks.is_empty() {
        let (left, failed) = merge::put_back(config, &owned.marks, PATIENCE);
        let before = std::mem::replace(&mut owned.marks, left);
        if let Err(e) = state.write(owned) {
            say(&format!("{e:#}"));
            // What the file says is put back once more at the end.
            owned.marks = before;
        }
        failed.iter().for_each(|why| say(&format!("not put back: {why}")));
    }
    Ok(())
}

/// Gives everything back. What is not seen to be back stays written down.
fn stop(engine: &Engine, mut daemon: Daemon, last: &Model) -> Result<()> {
    let mut owed = engine.memory.owned(last, &Plan::default(), &[]);
    match owed.vms.len() {
        0 if owed.is_empty() => say("stopping: no VM is owed anything"),
        0 => say("stopping: VMs are put back as they were to KSM"),
        n => say(&format!("stopping: {n} balloons are given back")),
    }
    let (host, mut state) = (&mut daemon.host, daemon.state.take());
    let (vms, mut failures) = give_back(host, &owed, PATIENCE, state.as_mut());
    owed.vms = vms;
    // The VMs are left with what is still owed alone: QEMU asks the guests for statistics as
    // often as before, and libvirt keeps no note.
    host.restore_intervals();
    if state.is_some() {
        host.note_last(&engine.memory.notes(&owed.vms));
    }
    host.leave_shared();
    if let Err(e) = host.release_ksm(KSM) {
        failures.push(format!("KSM's settings are not put back: {e}"));
    }
    // VMs are closed and opened through the sockets that this closes.
    drop(daemon);
    let (marks, failed) = merge::put_back(&engine.config, &owed.marks, MARKS);
    owed.marks = marks;
    failures.extend(failed);
    let written = state.iter_mut().try_for_each(|s| s.write(&owed));
    if failures.is_empty() {
        return written.context("everything is given back, which is not written down");
    }
    anyhow::bail!(
        "not given back: {}; the next `ebb run`, or `ebb release`, tries again",
        failures.join("; ")
    )
}
