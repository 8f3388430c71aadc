//! How an agent's connection begins and ends, and when an agent is known to have given up all
//! protection.

use std::time::{Duration, Instant};

use ebb_core::sample::Link;
use ebb_core::wire::{BUDGET_MS_MAX, Command};

use super::{AgentLink, Ask, Stage};
use crate::agent::{Agent, AgentError};

/// A lost agent is looked for again after this.
const RETRY: Duration = Duration::from_secs(5);
/// An agent whose connection has ended gives up all protection when its batch of recycling is
/// over, at the latest.
pub(super) const GONE: Duration = Duration::from_millis(BUDGET_MS_MAX + 1000);

impl AgentLink {
    pub(super) fn connect(&mut self, now: Instant) {
        if self.agent.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = Some(now + RETRY);
        let mut agent = match Agent::connect(&self.path) {
            Ok(agent) => agent,
            Err(e) => {
                if matches!(e, AgentError::None(_)) {
                    self.settle(now);
                }
                return self.down = Link::Down(e.to_string());
            }
        };
        let peer = agent.peer_pid();
        if peer != Some(self.pid) {
            let path = self.path.display();
            let by =
                peer.map_or("a process that cannot be seen".into(), |p| format!("process {p}"));
            let why = format!("{path}: served by {by}, not by this VM's {}", self.pid);
            return self.down = Link::Down(why);
        }
        if let Ok(id) = agent.send(Command::Hello) {
            self.asked.push((Ask::Hello, id));
        }
        self.stage = Stage::Hello;
        self.agent = Some(agent);
    }

    pub(super) fn lose(&mut self, why: String) {
        if self.stage != Stage::Hello {
            self.unsettled = Some(Instant::now());
        }
        self.down = Link::Down(why);
        self.agent = None;
        self.asked.clear();
        (self.status, self.facts, self.waits_since) = (None, None, None);
        (self.open, self.scanner, self.waiting) = (None, None, None);
    }

    /// Has the agent give up all protection, and hangs up when it has said so. To be `sure`, one
    /// whose connection was lost is asked on another, and so is one that an earlier daemon may
    /// have had: it serves one at a time, and gives up all protection with each.
    pub fn leave(&mut self, now: Instant, sure: bool) {
        match self.stage {
            _ if self.agent.is_none() && !sure => self.settle(now),
            _ if self.agent.is_none() && self.unsettled.is_some() => self.connect(now),
            _ if self.agent.is_none() => {}
            Stage::Leaving if self.asked.is_empty() => {
                (self.stage, self.retry_at) = (Stage::Hello, None);
                self.lose("left alone".into());
                self.unsettled = None;
            }
            Stage::Leaving => {}
            _ => self.stand_down(Stage::Leaving),
        }
    }

    /// Whether [`AgentLink::leave`] has come to its end: the agent has said so, or there is none.
    pub fn has_left(&self) -> bool {
        self.agent.is_none() && self.unsettled.is_none()
    }

    /// What it did for a connection that has ended is over by now.
    fn settle(&mut self, now: Instant) {
        self.unsettled.take_if(|since| now - *since >= GONE);
    }
}
