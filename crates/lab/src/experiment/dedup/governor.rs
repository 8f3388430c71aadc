//! The governor at work: facts in, policy asked, knobs set, once per tick.
//!
//! The policy is `ebb_core::policy::merge`; the knobs are `ebb_host::act::ksm`. This file only
//! joins them: it reads what `ksmd` did and used, and does what the policy says.

use std::path::Path;

use ebb_core::config::MergeConfig;
use ebb_core::model::Pressure;
use ebb_core::policy::merge::{BurstMemory, Candidates, Facts, KsmdOrder, Settings, govern};
use ebb_core::units::{PAGE, Stamp};
use ebb_host::act::ksm::{KsmError, KsmOwner};
use ebb_host::probe::ksm::{ksmd, read_ksm};
use ebb_host::probe::process::read_run_time;
use ebb_host::root::Root;

/// `ksmd` under a budget.
#[derive(Debug)]
pub struct Governor {
    owner: KsmOwner,
    settings: Settings,
    memory: BurstMemory,
    planned: Candidates,
    plan: u64,
    ksmd: Option<u32>,
}

impl Governor {
    /// Takes KSM's knobs; see [`KsmOwner::take`].
    pub fn take(state: &Path, settings: Settings) -> Result<Governor, KsmError> {
        let owner = KsmOwner::take(Root::default(), state, MergeConfig::default())?;
        let (memory, planned) = (BurstMemory::default(), Candidates::default());
        Ok(Governor { ksmd: ksmd(&Root::default()), owner, settings, memory, planned, plan: 0 })
    }

    /// What is open to KSM now, as a scan saw it.
    pub fn plan(&mut self, planned: Candidates) {
        self.planned = planned;
        self.plan += 1;
    }

    pub fn step(&mut self, at: Stamp, state: Pressure) -> Result<KsmdOrder, KsmError> {
        let facts = self.facts(at, state)?;
        let order = govern(&facts, &self.settings, &mut self.memory);
        self.owner.apply(&order)?;
        Ok(order)
    }

    pub fn release(self) -> Result<(), KsmError> {
        self.owner.release()
    }

    fn facts(&self, at: Stamp, state: Pressure) -> Result<Facts, KsmError> {
        let ksm = read_ksm(&Root::default())?.ok_or(KsmError::None)?;
        let ran = self.ksmd.and_then(|pid| read_run_time(&Root::default(), pid).ok()?);
        Ok(Facts {
            at,
            state,
            planned: self.planned,
            plan: self.plan,
            cpu_ms: ran.map_or(0, |t| t.as_millis() as u64),
            scanned: ksm.pages_scanned,
            scans: ksm.full_scans,
            saved: ksm.saved().0 / PAGE,
        })
    }
}
