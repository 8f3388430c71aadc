//! What an agent has answered, what that means for the link, and what a sample tells of it.

use std::time::{Duration, Instant};

use ebb_core::sample::{AgentSample, Link};
use ebb_core::units::Bytes;
use ebb_core::wire::{AgentState, Answer, PROTOCOL, Refused};

use super::{AgentLink, RequestKind, Stage};
use crate::agent::AgentError;

/// An agent that owes an answer this long is given up. It may be in a batch of
/// recycling that takes all of its budget.
const GIVE_UP: Duration = Duration::from_secs(20);
/// What to do where an agent stands aside.
const ASIDE: &str = " (Ebb goes on as without the agent, and tries again where that may pass. Else \
    start the VM without what is named, or set agent = \"off\" for it)";

impl AgentLink {
    /// Takes the answers that are there; whether some are still owed.
    pub fn hear(&mut self, now: Instant) -> bool {
        let Some(agent) = self.agent.as_mut() else { return false };
        agent.pump();
        let mut answers = Vec::new();
        self.asked.retain(|(kind, id)| match agent.take_reply(*id) {
            Some(answer) => {
                answers.push((*kind, answer));
                false
            }
            None => true,
        });
        let failure = agent.failure().map(|e| e.to_string());
        for (kind, answer) in answers {
            self.waits_since = None;
            self.answer(kind, answer);
        }
        if let Some(why) = failure {
            self.lose(why);
        }
        if self.asked.is_empty() {
            self.waits_since = None;
        } else if now - *self.waits_since.get_or_insert(now) > GIVE_UP {
            let (path, s) = (self.path.display(), GIVE_UP.as_secs());
            self.lose(format!(
                "{path}: silent for {s} s: QEMU is stopped, or its thread `ebb-agent` does not run; \
                 it is tried again"
            ));
        }
        !self.asked.is_empty()
    }

    pub(super) fn answer(&mut self, kind: RequestKind, answer: Result<Answer, AgentError>) {
        match (kind, answer) {
            (RequestKind::Hello, Ok(Answer::Hello(h))) if h.protocol == PROTOCOL => {
                (self.stage, self.advises, self.hashes) = (Stage::Met, h.advises, h.hashes);
                self.unsettled = None;
                self.wants_descriptor = h.wants_descriptor;
            }
            (RequestKind::Hello, Ok(Answer::Hello(h))) => {
                self.lose(format!(
                    "the agent speaks protocol {}, this daemon {PROTOCOL}: restart the VM with the \
                     agent of this version",
                    h.protocol
                ));
                // It was told of no RAM on this connection.
                self.unsettled = None;
            }
            (RequestKind::Attach, Ok(_)) => {
                self.stage = Stage::Attached;
                self.told = (!self.terms.keep_open).then(Default::default);
                self.open = self.told.is_some().then_some(Bytes::ZERO);
            }
            (RequestKind::Advise, Ok(Answer::Advised { open })) => {
                self.open = Some(open);
                // Advice goes out in parts. Where an earlier one was refused, `told` is none.
                self.refused.take_if(|_| self.told.is_some());
            }
            (RequestKind::Advise, Err(AgentError::Refused(_, no))) => {
                // Told again next time.
                self.told = None;
                self.refused = Some((Instant::now(), no.text));
            }
            // It stands aside: asked for its reasons each tick all the same.
            (RequestKind::Attach, Err(AgentError::Refused(_, no))) if no.kind == Refused::Aside => {
                self.stage = Stage::Attached;
            }
            (RequestKind::Attach, Err(e)) => self.lose(e.to_string()),
            (RequestKind::Status, Ok(Answer::Status(mut status))) => {
                // What is held is asked for less often: the last answer stands.
                if status.held.is_none() && status.state == AgentState::Ready {
                    status.held = self.status.as_ref().and_then(|s| s.held);
                    status.held_partial = self.status.as_ref().and_then(|s| s.held_partial);
                }
                let known = self.unclear.map(|(generation, _)| generation);
                if status.unclear.is_none() || status.unclear != known {
                    self.unclear = status.unclear.map(|new| (new, Instant::now()));
                    self.mapped = None;
                }
                let since = || self.aside_since.unwrap_or_else(Instant::now);
                self.aside_since = status.passes.then(since);
                self.open = status.open.or(self.open);
                self.status = Some(status);
            }
            (RequestKind::Facts, Ok(Answer::Facts(facts))) => self.facts = Some(facts),
            (RequestKind::Recycle, Ok(Answer::Recycled(done))) => self.more = done.more,
            (_, Err(AgentError::Refused(..)) | Ok(_)) => {}
            (_, Err(e)) => self.lose(e.to_string()),
        }
    }

    pub fn sample(&self) -> AgentSample {
        let status = self.status.clone().unwrap_or_default();
        let link = match self.stage() {
            None => self.down.clone(),
            Some(Stage::Hello | Stage::Met) => Link::Unknown,
            Some(Stage::Apart) => Link::Down("hands off while the VM migrates".into()),
            Some(_) => Link::Up,
        };
        AgentSample {
            link,
            state: status.state,
            why: self.mapped.clone().and_then(Result::err).or(match status.state {
                AgentState::Aside => status.why.map(|why| why + ASIDE),
                _ => status.why,
            }),
            module: status.module.map(|m| format!("{} on Linux {}", m.version, m.linux)),
            free: status.free,
            held: status.held,
            held_partial: status.held_partial,
            allocated: self.facts.map(|f| Bytes::pages(f.alloc)),
            facts: self.facts,
            // One that waits for QEMU's answer may go out before the next plan is made.
            busy: self.waiting.is_some()
                || self.asked.iter().any(|(kind, _)| *kind == RequestKind::Recycle),
            more: self.more,
            counters: status.counters,
            windows: status.windows,
            waits: status.waits,
            wires: status.wires,
            observes: false,
            advises: self.advises && self.stage == Stage::Attached,
            open: self.open,
        }
    }
}
