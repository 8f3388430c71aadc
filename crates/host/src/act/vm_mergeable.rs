//! Whether KSM may look at a VM's RAM at all: QEMU's `merge` property, by QMP.
//!
//! It works on a running VM, both ways, but not in QEMU 9.1.0, which takes the property and does
//! nothing. So the result is read back from the process's mappings (`VmFlags: mg`). Taking a VM out
//! breaks its merges: only where the memory is there.

use std::time::Duration;

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;
use serde_json::{Value, json};

use super::ksm::{KsmError, has_room, merged_now};
use crate::probe::ksm::read_ksm_stat;
use crate::probe::regions::{Region, guest_memory, read_smaps};
use crate::qmp::{Client, QmpError};
use crate::qmp_balloon;
use crate::root::{ProbeError, Root};
use crate::sys::Range;

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
    #[error(
        "QEMU's answer to query-memdev cannot be used: it names no memory backend, more than 256, \
         or one without its name or size"
    )]
    NoBackends,
    #[error("QEMU took it, but its mappings are not so: not done (QEMU 9.1.0 cannot do it)")]
    NoEffect,
    #[error("not done in {} s", PATIENCE.as_secs())]
    Late,
    #[error("whether it was done is not known: {0}")]
    NotSeen(String),
}

/// Marks a VM's RAM for KSM, or takes it out and breaks its merges. `false`: it was so already.
pub fn set(root: &Root, id: VmId, qmp: &mut Client, on: bool) -> Result<bool, MergeableError> {
    let regions = read_smaps(root, id.pid)?.ok_or(MergeableError::Gone(id.pid))?;
    let state = ksm_state_of(&regions)?;
    if !on && !state.is_open(None) {
        return Ok(false);
    }
    let backends = Backends::parse(&qmp.execute("query-memdev", None, PATIENCE)?)?;
    if state.is_open(Some(&backends)) == on {
        return Ok(false);
    }
    if on && !state.can_be_open() {
        return Err(MergeableError::NoRam);
    }
    if !on {
        let merged = merged_now(&read_ksm_stat(root, id.pid)?.unwrap_or_default(), &regions);
        has_room(root, merged, &[(id.pid, merged)])?;
    }
    for path in &backends.paths {
        let set = qmp_balloon::set(path, "merge", json!(on));
        qmp.execute("qom-set", Some(set), PATIENCE)?;
    }
    let done = ksm_state(root, id)?.is_open(Some(&backends)) == on;
    if done { Ok(true) } else { Err(MergeableError::NoEffect) }
}

/// Whether a VM's RAM is open to KSM, by its mappings and QEMU's memory backends.
pub fn is_open(state: &KsmState, qmp: &mut Client) -> Result<bool, MergeableError> {
    let backends = Backends::parse(&qmp.execute("query-memdev", None, PATIENCE)?)?;
    Ok(state.is_open(Some(&backends)))
}

/// Firmware and device memory smaller than this keeps QEMU's own mark.
pub const LEAST_RAM: u64 = 32 << 20;
/// A block of this size and more is taken for RAM: displays have less private memory.
const DEVICE_LIMIT: u64 = 512 << 20;
/// More backends or blocks than this are not compared: all blocks count as RAM.
const BACKENDS_MOST: usize = 256;
const BLOCKS_MOST: usize = 1024;

/// One piece of guest memory of at least [`LEAST_RAM`]: RAM, or memory of a device such as a
/// display's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    pub range: Range,
    /// Some of it is open to KSM.
    pub open: bool,
    pub shared: bool,
    /// KSM can merge such memory: neither shared nor in hugetlb pages.
    pub can_be_open: bool,
    /// Merged, zeros not counted.
    pub merged: Bytes,
}

/// What a process's mappings show of its guest memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KsmState {
    pub blocks: Vec<MemoryBlock>,
}

impl KsmState {
    /// Whether some RAM of the VM is open. QEMU marks the memory of devices, too, but closes only
    /// backends. The RAM is closed if, for each size, at least as many blocks are closed as there
    /// are private backends. Shared memory is not counted. If blocks and backends do not fit
    /// together, or the backends are not known, each block counts as RAM.
    pub fn is_open(&self, backends: Option<&Backends>) -> bool {
        let Some(backends) = backends.filter(|b| self.fits(b)) else {
            return self.blocks.iter().any(|b| b.open);
        };
        let closed = |size: u64| self.count(backends, size, |b| !b.open);
        backends.sizes.iter().any(|size| closed(*size) < backends.count(*size))
    }

    /// Whether each backend has a block, and each large block is a backend's. Before QEMU 5.0 RAM
    /// need not be a backend.
    fn fits(&self, backends: &Backends) -> bool {
        let there = |size: u64| self.count(backends, size, |_| true);
        let is_backend = |b: &MemoryBlock| there(b.range.len) <= backends.count(b.range.len);
        let large = |b: &&MemoryBlock| !b.shared && b.range.len >= DEVICE_LIMIT;
        self.blocks.len() <= BLOCKS_MOST
            && backends.sizes.iter().all(|size| there(*size) >= backends.count(*size))
            && self.blocks.iter().filter(large).all(is_backend)
    }

    /// Whether [`Self::is_open`] depends on the backends.
    pub fn needs_backends(&self) -> bool {
        self.blocks.len() > 1 && self.is_open(None)
    }

    /// Merged, zeros not counted.
    pub fn merged(&self) -> Bytes {
        self.blocks.iter().map(|b| b.merged).sum()
    }

    pub fn can_be_open(&self) -> bool {
        self.blocks.iter().any(|b| b.can_be_open)
    }

    fn count(&self, backends: &Backends, size: u64, is: impl Fn(&MemoryBlock) -> bool) -> usize {
        let counts = |b: &&MemoryBlock| !b.shared || !backends.shared_known;
        self.blocks.iter().filter(counts).filter(|b| b.range.len == size && is(b)).count()
    }
}

pub fn ksm_state(root: &Root, id: VmId) -> Result<KsmState, MergeableError> {
    ksm_state_of(&read_smaps(root, id.pid)?.ok_or(MergeableError::Gone(id.pid))?)
}

fn ksm_state_of(regions: &[Region]) -> Result<KsmState, MergeableError> {
    let memory = guest_memory(regions);
    // Ranges that are open are mappings of their own.
    let wholes = memory.chunk_by(|one, next| one.range.end() == next.range.start);
    let block = |whole: &[&Region]| MemoryBlock {
        range: Range { start: whole[0].range.start, len: whole.iter().map(|r| r.range.len).sum() },
        open: whole.iter().any(|r| r.mergeable),
        shared: whole.iter().any(|r| r.shared),
        can_be_open: whole.iter().any(|r| !r.shared && !r.hugetlb),
        merged: whole.iter().filter_map(|r| r.ksm).sum(),
    };
    let blocks: Vec<_> = wholes.map(block).filter(|b| b.range.len >= LEAST_RAM).collect();
    if blocks.is_empty() { Err(MergeableError::NoRam) } else { Ok(KsmState { blocks }) }
}

/// What QEMU says of its memory backends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backends {
    /// Those that are not shared, as QOM objects.
    pub paths: Vec<String>,
    /// Sizes of those of them that are at least [`LEAST_RAM`], in bytes.
    sizes: Vec<u64>,
    /// QEMU tells which are shared (6.1). Otherwise those that are shared are among these.
    shared_known: bool,
}

impl Backends {
    /// Parses the answer to `query-memdev`. RAM without a named object is one too
    /// (`/objects/pc.ram`).
    pub fn parse(said: &Value) -> Result<Backends, MergeableError> {
        let all = said.as_array().filter(|all| (1..=BACKENDS_MOST).contains(&all.len()));
        let mut backends = Backends { shared_known: true, ..Backends::default() };
        for dev in all.ok_or(MergeableError::NoBackends)?.iter().filter(|d| d["share"] != true) {
            let (id, size) = (dev["id"].as_str(), dev["size"].as_u64());
            let (id, size) = id.zip(size).ok_or(MergeableError::NoBackends)?;
            backends.shared_known &= dev["share"].is_boolean();
            backends.paths.push(format!("/objects/{id}"));
            backends.sizes.extend(Some(size).filter(|size| *size >= LEAST_RAM));
        }
        Ok(backends)
    }

    fn count(&self, size: u64) -> usize {
        self.sizes.iter().filter(|s| **s == size).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Guest memory one after the other, apart: its size in MiB, and whether it is open.
    fn state(blocks: &[(u64, bool)]) -> KsmState {
        let region = |(i, (mib, open)): (usize, &(u64, bool))| Region {
            range: Range { start: (i as u64 + 1) << 40, len: mib * MIB },
            plain: true,
            dontfork: true,
            mergeable: *open,
            ..Region::default()
        };
        ksm_state_of(&blocks.iter().enumerate().map(region).collect::<Vec<_>>()).unwrap()
    }

    fn backends(sizes: &[(u64, bool)]) -> Backends {
        let dev =
            |(mib, share): &(u64, bool)| json!({ "id": "a", "size": mib * MIB, "share": share });
        Backends::parse(&sizes.iter().map(dev).collect()).unwrap()
    }

    #[test]
    fn memory_of_devices_does_not_count_where_backends_tell_which_is_ram() {
        let (on, off) = (true, false);
        let (private, shared) = (false, true);
        let ram = backends(&[(512, private)]);
        // Firmware and small device memory never counts.
        assert!(!state(&[(512, off), (16, on)]).is_open(None));
        let display = state(&[(512, off), (64, on)]);
        assert!(display.needs_backends() && display.is_open(None));
        assert!(!display.is_open(Some(&ram)));
        assert!(state(&[(512, on), (64, on)]).is_open(Some(&ram)));
        assert!(!state(&[(512, off), (64, off)]).needs_backends());
        // A display of the size of a plugged backend: one of two is RAM.
        let plugged = backends(&[(512, private), (64, private)]);
        assert!(!state(&[(512, off), (64, off), (64, on)]).is_open(Some(&plugged)));
        assert!(state(&[(512, off), (64, on), (64, on)]).is_open(Some(&plugged)));
        assert!(state(&[(512, off), (32, on)]).is_open(Some(&plugged)));
        // What does not fit together counts as RAM, and so does what is too large for a device.
        assert!(state(&[(512, off), (1024, on)]).is_open(Some(&ram)));
        // RAM is shared memory.
        let memfd = backends(&[(512, shared)]);
        assert!(!state(&[(64, on)]).is_open(Some(&memfd)) && memfd.paths.is_empty());
        // Shared memory of the same size is not the backend that is closed.
        let mut both = state(&[(512, on), (512, off), (64, on)]);
        both.blocks[1].shared = true;
        assert!(both.is_open(Some(&backends(&[(512, private), (512, shared)]))));
        // QEMU 6.0 does not tell that it is shared.
        both.blocks.remove(0);
        let untold = Backends::parse(&json!([{ "id": "a", "size": 512 * MIB }])).unwrap();
        assert!(!both.is_open(Some(&untold)) && both.is_open(None));
    }

    #[test]
    fn shared_memory_alone_is_closed() {
        let region = Region {
            range: Range { start: 1 << 40, len: 512 * MIB },
            shared: true,
            dontfork: true,
            ..Region::default()
        };
        let state = ksm_state_of(std::slice::from_ref(&region)).unwrap();
        assert!(!state.is_open(None) && !state.can_be_open() && !state.needs_backends());
        let file = Region { shared: false, mergeable: true, ..region };
        let state = ksm_state_of(&[file]).unwrap();
        assert!(state.is_open(None) && state.can_be_open(), "a private file");
        assert!(matches!(ksm_state_of(&[]), Err(MergeableError::NoRam)));
    }

    #[test]
    fn an_answer_without_backends_or_sizes_is_refused() {
        let many = vec![json!({ "id": "a", "size": 1 }); BACKENDS_MOST + 1];
        let size = json!([{ "id": "a", "size": "1" }]);
        for said in [json!([]), json!({}), json!([{ "id": "a" }]), size, json!(many)] {
            assert!(matches!(Backends::parse(&said), Err(MergeableError::NoBackends)), "{said}");
        }
    }
}
