//! One tick's facts: everything Ebb knows of the host and its VMs at a moment.
//!
//! Filled by `ebb-host` (or the simulator), never changed afterwards. Sizes are
//! bytes, moments are [`Stamp`]s, `None` means *not known* (absent in this
//! kernel, unreadable, not answered in time), which is never the same as zero.
//! A source that failed leaves `None` and a [`Problem`]; the tick goes on.
//! A record of a run is a sequence of these, so every type here serialises.
//!
//! A new fact is a field, with a default where older records lack it.

mod agent;
mod guest;
mod host;
mod merge;
mod vm;

use serde::{Deserialize, Serialize};

pub use self::{agent::*, guest::*, host::*, merge::*, vm::*};
use crate::units::Stamp;

/// Whether it need not be written down.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// When reading began.
    pub at: Stamp,
    /// When reading began, milliseconds since 1970, for people.
    pub wall_ms: u64,
    pub host: HostSample,
    /// The VMs, sorted by [`VmSample::id`]; ids are unique.
    pub vms: Vec<VmSample>,
    /// Of the processes that the loop asked about, those that are proven to have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended: Vec<VmId>,
    /// What could not be read, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Problem>,
}

/// A source that failed this tick: who can act on it finds out from the text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The VM concerned, or `None` for the host.
    pub vm: Option<VmId>,
    /// The file, socket or command, e.g. `/proc/meminfo` or `qmp query-balloon`.
    pub source: String,
    pub message: String,
}
