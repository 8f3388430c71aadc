//! Whether KSM may look at a VM's RAM at all: QEMU's `merge` property, by QMP.
//!
//! It works on a running VM, both ways. QEMU 9.1.0 has its condition inverted and
//! says nothing, so the result is read back from the process's mappings
//! (`VmFlags: mg`), and where it is the opposite of what was asked, the opposite
//! is asked. Taking a VM out breaks its merges: only where the memory is there.

use std::time::Duration;

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;
use serde_json::{Value, json};

use super::ksm::{KsmError, has_room, merged_now};
use crate::probe::ksm::read_ksm_stat;
use crate::probe::regions::{Region, guest_ram, read_smaps};
use crate::qmp::{Client, QmpError};
use crate::qmp_balloon;
use crate::root::{ProbeError, Root};

/// Breaking a VM's merges is done while QEMU answers: microseconds a page.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum MergeableError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// No room to break merges, or no KSM.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    #[error("the VM's process {0} has ended")]
    Gone(u32),
    #[error("it has no RAM that KSM could merge (shared memory, hugetlb pages)")]
    NoRam,
    #[error("QEMU took it, but the mappings still say the opposite: not done")]
    NoEffect,
    #[error("whether it was done is not known: {0}")]
    NotSeen(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetOutcome {
    Already,
    Now,
    /// It is now, by asking QEMU for the opposite (9.1.0).
    Inverted,
}

/// Marks a VM's RAM for KSM, or takes it out and breaks its merges.
pub fn set(
    root: &Root,
    id: VmId,
    qmp: &mut Client,
    on: bool,
) -> Result<SetOutcome, MergeableError> {
    let regions = read_smaps(root, id.pid)?.ok_or(MergeableError::Gone(id.pid))?;
    if ksm_state_of(&regions)?.open == on {
        return Ok(SetOutcome::Already);
    }
    if !on {
        let merged = merged_now(&read_ksm_stat(root, id.pid)?.unwrap_or_default(), &regions);
        has_room(root, merged, &[(id.pid, merged)])?;
    }
    let backends = parse_backends(&qmp.execute("query-memdev", None, PATIENCE)?)?;
    for (value, done) in [(on, SetOutcome::Now), (!on, SetOutcome::Inverted)] {
        for path in &backends {
            let set = qmp_balloon::set(path, "merge", json!(value));
            qmp.execute("qom-set", Some(set), PATIENCE)?;
        }
        if ksm_state(root, id)?.open == on {
            return Ok(done);
        }
    }
    Err(MergeableError::NoEffect)
}

/// Firmware and device memory smaller than this keeps QEMU's own mark.
pub const LEAST_RAM: u64 = 32 << 20;

/// Whether a VM's RAM proper is open to KSM and what is merged, by its mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KsmState {
    /// Some of it is open to KSM.
    pub open: bool,
    /// Merged, zeros not counted.
    pub merged: Bytes,
}

pub fn ksm_state(root: &Root, id: VmId) -> Result<KsmState, MergeableError> {
    ksm_state_of(&read_smaps(root, id.pid)?.ok_or(MergeableError::Gone(id.pid))?)
}

fn ksm_state_of(regions: &[Region]) -> Result<KsmState, MergeableError> {
    let ram = guest_ram(regions);
    // Ranges that are open are mappings of their own.
    let wholes = ram.chunk_by(|one, next| one.range.end() == next.range.start);
    let is_large = |whole: &&[&Region]| whole.iter().map(|r| r.range.len).sum::<u64>() >= LEAST_RAM;
    let ram = wholes.filter(is_large).collect::<Vec<_>>().concat();
    if ram.is_empty() {
        return Err(MergeableError::NoRam);
    }
    let open = ram.iter().any(|r| r.mergeable);
    Ok(KsmState { open, merged: ram.iter().filter_map(|r| r.ksm).sum() })
}

/// Parses the answer to `query-memdev`: the objects that are its RAM, without those
/// that are shared. RAM without a named object is one too (`/objects/pc.ram`).
pub fn parse_backends(said: &Value) -> Result<Vec<String>, MergeableError> {
    let private = said.as_array().into_iter().flatten().filter(|dev| dev["share"] != true);
    let path = |dev: &Value| Some(format!("/objects/{}", dev["id"].as_str()?));
    let found: Vec<String> = private.filter_map(path).collect();
    if found.is_empty() { Err(MergeableError::NoRam) } else { Ok(found) }
}
