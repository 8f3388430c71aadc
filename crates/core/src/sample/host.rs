//! The host's own memory: what the kernel tells of all of it, of swap, of pressure, and of the
//! cgroup that the VMs share.
//!
//! A field names the file that it is read from. What a kernel may lack is an `Option`.

use serde::{Deserialize, Serialize};

use super::{Ksm, ScanSample};
use crate::units::Bytes;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostSample {
    /// `/proc/meminfo`.
    pub memory: Option<Meminfo>,
    /// `/proc/pressure/memory`; absent where the kernel has no PSI.
    pub psi: Option<Psi>,
    /// `/proc/vmstat`, the counters that tell of paging.
    pub vmstat: Option<Vmstat>,
    /// `/proc/swaps`.
    pub swaps: Vec<SwapArea>,
    /// `/sys/kernel/mm/ksm`; absent where KSM is not built in.
    pub ksm: Option<Ksm>,
    /// The daemon's scanner of equal pages, where merging is not off.
    pub scan: Option<ScanSample>,
    /// How zero pages can be freed here; `None` where that is not wanted.
    pub zeros: Option<ZeroWays>,
    /// ZFS's cache and the least it shrinks to (`arcstats` size, c_min). It
    /// counts as used in MemAvailable though most of it can be had.
    pub zfs_arc: Option<ZfsArc>,
    /// The memory cgroup with a limit that holds for most VMs, if any.
    pub pool: Option<LimitSample>,
    /// All other cgroups with a limit that a VM is below, and the NUMA nodes to which VMs are
    /// bound.
    #[serde(rename = "bounds")]
    pub other_limits: Vec<LimitSample>,
    /// Pressure in the deepest cgroup that holds all VMs, where it has a pressure file
    /// (v2) and is not the whole machine; limited or not.
    pub vms_psi: Option<Psi>,
    /// zswap is on: part of what is swapped out stays in memory, compressed.
    pub zswap: bool,
    /// Notifications of cgroup v1's `memory.pressure_level` since the last
    /// sample; `None` where nothing is registered (v2 has PSI instead).
    pub vmpressure: Option<VmPressure>,
    /// What it takes to touch a MiB of new memory, microseconds, as measured here: the price
    /// of what a guest takes back.
    pub touch_us: Option<u32>,
}

/// Notifications of reclaim that came since the last sample, each counted at its
/// own level only (the kernel tells a listener of `medium` of the other as well).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPressure {
    /// Active cache goes, or something swaps.
    pub medium: u64,
    /// Reclaim hardly finds anything: thrashing, the OOM killer is near.
    pub critical: u64,
}

/// `/proc/meminfo`, the fields in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meminfo {
    /// `MemTotal`.
    pub total: Bytes,
    /// `MemFree`.
    pub free: Bytes,
    /// `MemAvailable` (Linux 3.14+).
    pub available: Bytes,
    pub buffers: Bytes,
    pub cached: Bytes,
    pub shmem: Bytes,
    /// `SwapTotal`.
    pub swap_total: Bytes,
    /// `SwapFree`.
    pub swap_free: Bytes,
    /// `Hugetlb`: all of the hugetlb pools, used or not.
    pub hugetlb: Bytes,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PsiLine {
    /// Share of wall time stalled, percent, over 10 s.
    pub avg10: f64,
    /// Share of wall time stalled, percent, over 60 s.
    pub avg60: f64,
    /// Share of wall time stalled, percent, over 300 s.
    pub avg300: f64,
    /// Stalled time since boot, microseconds.
    pub total_us: u64,
}

/// A pressure file: `some` (at least one task stalled) and `full` (all of them).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Psi {
    /// At least one task was stalled.
    pub some: PsiLine,
    /// All non-idle tasks were stalled at once.
    pub full: PsiLine,
}

/// `/proc/vmstat` counters since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vmstat {
    /// `pswpin`, pages.
    pub swap_in_pages: u64,
    /// `pswpout`, pages.
    pub swap_out_pages: u64,
    /// `pgmajfault`.
    pub major_faults: u64,
    /// `oom_kill`, where the kernel has it (4.13+).
    pub oom_kills: Option<u64>,
    /// `workingset_refault_anon` + `workingset_refault_file`, pages.
    pub refaults: u64,
    /// `cow_ksm`: merged pages that were copied because of a write (5.19+).
    pub cow_ksm: Option<u64>,
}

/// A line of `/proc/swaps`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapArea {
    /// Path, e.g. `/dev/zram0`.
    pub path: String,
    pub size: Bytes,
    pub used: Bytes,
    /// Priority, as the kernel prints it.
    pub priority: i64,
    /// Of a zram device: what it holds.
    pub zram: Option<Zram>,
}

/// `/sys/block/zramN/mm_stat` (Linux `Documentation/admin-guide/blockdev/zram.rst`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zram {
    /// `orig_data_size`: what was written to it and is still there.
    pub stored: Bytes,
    /// `mem_used_total`: the memory that it takes for that.
    pub used: Bytes,
}

/// `/proc/spl/kstat/zfs/arcstats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZfsArc {
    pub size: Bytes,
    /// `c_min`.
    pub min: Bytes,
}

/// A limit on memory beside the machine's: a memory cgroup with one, v1 or v2; or NUMA nodes that
/// VMs are bound to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LimitSample {
    /// Its path below the cgroup mount, e.g. `/machine.slice`; or `node 0`, `nodes 0-1`.
    pub path: String,
    /// The nodes; empty for a cgroup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<u32>,
    /// `memory.max`, `memory.high` (the smaller) or `memory.limit_in_bytes`;
    /// [`LimitSample::NO_LIMIT`] where only swap is limited.
    pub limit: Bytes,
    /// `memory.current` or `memory.usage_in_bytes`.
    pub usage: Bytes,
    /// File cache inside it that can be dropped (`active_file + inactive_file`
    /// less what is dirty or mlocked).
    pub file: Bytes,
    /// `anon` / `rss` of the whole subtree.
    pub anon: Bytes,
    /// Swap used by the subtree, where the kernel accounts it.
    pub swap: Option<Bytes>,
    /// Swap that the subtree may still use by its own limit, and of the pool by those above it;
    /// `None`: no limit, or not accounted.
    pub swap_left: Option<Bytes>,
    /// `oom_kill` events in the subtree.
    pub oom_kills: Option<u64>,
    /// `memory.pressure` of a v2 cgroup.
    pub psi: Option<Psi>,
}

impl LimitSample {
    /// The limit of a cgroup that limits swap only.
    pub const NO_LIMIT: Bytes = Bytes(1 << 62);

    /// What may still be taken below it, with the file cache that can be dropped for it.
    pub fn left(&self) -> Bytes {
        ((self.limit - self.usage) + self.file.min(self.usage)).min(self.limit)
    }

    /// Whether a VM of this cgroup, bound to these nodes, is below it.
    pub fn holds(&self, cgroup: Option<&str>, nodes: &[u32]) -> bool {
        is_below((cgroup, nodes), (&self.path, &self.nodes))
    }
}

/// Whether a VM of this cgroup, bound to these nodes, is below a limit: of some nodes, or, where
/// there are none, of a cgroup.
pub(crate) fn is_below(vm: (Option<&str>, &[u32]), limit: (&str, &[u32])) -> bool {
    match limit {
        (path, []) => vm.0.is_some_and(|own| is_in(own, path)),
        (_, nodes) => !vm.1.is_empty() && vm.1.iter().all(|n| nodes.contains(n)),
    }
}

/// Whether a cgroup is this one, or below it.
pub(crate) fn is_in(cgroup: &str, this: &str) -> bool {
    let rest = cgroup.strip_prefix(this.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// How this kernel can free zero pages of a process without merging them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroWays {
    /// A huge page that is split drops those in it (6.12+).
    pub split: bool,
    /// A page that is paged out and is zeros takes a place in swap and writes nothing
    /// there (6.12+).
    pub pageout: bool,
}
