//! `ebb release`: gives back what a daemon that is gone had taken.

use std::time::Duration;

use anyhow::{Result, bail};
use ebb_core::config::Config;
use ebb_core::memory::{Memory, Owned};
use ebb_core::plan::{Action, Reason};
use ebb_core::sample::Sample;
use ebb_core::tick::Host;
use ebb_host::act::ksm;
use ebb_host::root::Root;

use crate::cmd::merge;
use crate::daemon::{Daemon, ksm_note};
use crate::state::StateFile;
use crate::table::emit;

/// Returns whether there was anything to do.
pub fn main(config: &Config) -> Result<bool> {
    let state = StateFile::open(&config.state_file)?;
    let owned = state.read()?;
    let knobs = ksm::KsmOwner::recover(Root::default(), &ksm_note(&config.state_file))?;
    if knobs {
        emit("KSM is set as it was before\n")?;
    }
    if owned.is_empty() {
        if !knobs {
            emit("nothing was taken: nothing to give back\n")?;
        }
        return Ok(knobs);
    }
    // Before the daemon's own connections: a QMP socket serves one client.
    let (state_marks, marks) = merge::put_back(config, &owned.marks);
    state.write(&Owned { marks: state_marks.clone(), ..owned.clone() })?;
    let mut daemon = Daemon::new(config, Some(state))?;
    let sample = daemon.read();
    let (actions, left) = plan(&owned, &sample);
    for a in &actions {
        emit(&format!("{}: {} → {}\n", a.name, a.from, a.to))?;
    }
    let failures = daemon.give_back(&actions, Duration::from_secs(10));
    if failures.is_empty() && left.vms.is_empty() {
        daemon.write_state(&Owned { marks: state_marks, ..Owned::default() })?;
        return match marks.is_empty() {
            true => Ok(true),
            false => bail!("open to KSM or closed as Ebb left them: {}", marks.join("; ")),
        };
    }
    for o in &left.vms {
        let why = sample.vms.iter().find(|v| v.id == o.id).map(|v| format!("{:?}", v.link));
        eprintln!("{}: not reached: {}", o.name, why.unwrap_or_default());
    }
    bail!(
        "{} VMs were not given back their memory: {}",
        failures.len() + left.vms.len(),
        failures.join("; ")
    )
}

/// What to order, and who is there but cannot be reached.
fn plan(owned: &Owned, sample: &Sample) -> (Vec<Action>, Owned) {
    let mut memory = Memory::default();
    memory.adopt(owned);
    memory.observe(sample);
    let mut actions = Vec::new();
    let mut left = Owned::default();
    for o in &owned.vms {
        let Some(vm) = sample.vms.iter().find(|v| v.id == o.id) else { continue };
        match &vm.balloon {
            Some(b) => actions.push(Action {
                vm: o.id,
                name: vm.name.clone(),
                from: b.actual,
                to: o.baseline,
                reason: Reason::Returned,
            }),
            None => left.vms.push(o.clone()),
        }
    }
    (actions, left)
}
