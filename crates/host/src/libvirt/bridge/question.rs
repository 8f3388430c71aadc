//! A question of a VM's QMP client that waits for an answer, and what it needs of libvirt.

use std::time::Instant;

use serde_json::Value;

use crate::qmp_balloon::STATS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Whether the domain runs, from the statistics of all domains.
    State,
    /// Statistics of all domains.
    Bulk,
    /// Statistics of this domain alone, for which libvirt asks QEMU.
    Memory,
    Job,
    Description,
    /// A description that is not older than the question.
    DescriptionNow,
}

impl Need {
    pub fn is_bulk(self) -> bool {
        matches!(self, Need::State | Need::Bulk)
    }
}

#[derive(Debug)]
pub(super) struct Question {
    pub id: Value,
    pub command: Value,
    pub need: Need,
    pub at: Instant,
}

impl Question {
    /// Whether it asks for the balloon's size or the guest's statistics.
    pub fn is_of_balloon(&self) -> bool {
        let Question { command, .. } = self;
        command["execute"] == "query-balloon" || command["arguments"]["property"] == STATS
    }
}
