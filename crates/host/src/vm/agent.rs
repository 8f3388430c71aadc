//! Whether a VM's agent is spoken to, and what of QEMU's answers it is told in a tick. What is
//! said to it is `agent_link.rs`'s.

use std::time::Instant;

use ebb_core::config::AgentUse;
use ebb_core::sample::RunState;

use super::{Ask, Vm};
use crate::agent_link::{AgentLink, Terms};
use crate::probe::mappers::Question;

impl Vm {
    pub(super) fn uses_agent(&self) -> bool {
        self.may_use_agent() && self.access.hands_off_ms.is_none()
    }

    /// The same where the VM is not to be left alone.
    pub(super) fn may_use_agent(&self) -> bool {
        let may = self.access.managed && !self.access.look_only;
        may && self.agent.is_some() && self.access.agent != AgentUse::Off
    }

    /// Whether its agent awaits what QEMU tells of all that can write to the VM's memory.
    pub(super) fn agent_awaits(&self) -> bool {
        self.uses_agent() && self.agent.as_ref().is_some_and(AgentLink::awaits_verdict)
    }

    /// Whether QEMU has said if a balloon reports free pages, or that it cannot.
    pub(super) fn known(&self) -> bool {
        self.looked && (self.device.is_none() || !self.owed.contains(&Ask::Reporting))
    }

    /// What its agent waits for: whether other processes map its RAM.
    pub fn mappers_question(&mut self) -> Option<Question> {
        let (private, vm) = (self.access.private_ram, self.process.id);
        let agent = self.agent.as_mut()?;
        let (generation, segments) = agent.wants_mappers()?;
        let segments = segments.to_vec();
        if private {
            agent.mappers(generation, Ok(()));
            return None;
        }
        Some(Question { vm, generation, segments })
    }

    /// Has the agent asked, after QMP has told how the VM is; not before it is known
    /// what else discards its pages.
    pub fn ask_agent(&mut self, now: Instant, keep_open: bool) {
        self.take_events();
        if !self.uses_agent() {
            // It is looked for only if it may be used and could be running.
            let on = self.access.agent != AgentUse::Off && !self.access.look_only;
            let sure = on && self.access.managed && self.access.hands_off_ms.is_some();
            self.agent.iter_mut().for_each(|agent| agent.leave(now, sure));
            // What QEMU has told may not hold when the agent is used again.
            self.inventory.look_anew();
            return;
        }
        let migrating = self.answers.migrating;
        let run = self.answers.run.clone().map(|r| if migrating { RunState::Migrating } else { r });
        let usable = self.slow_since.is_none() && self.known();
        let Some(agent) = self.agent.as_mut() else { return };
        let terms = Terms {
            reports: self.reporting == Some(true),
            keep_open,
            observe: self.access.agent == AgentUse::Observe,
            window_limit_ms: self.access.window_limit_ms,
        };
        let verdict = self.verdict.as_ref().filter(|_| usable);
        agent.ask(now, run.as_ref(), &self.events, terms, verdict);
    }
}
