//! One tick's facts: everything Ebb knows of the host and its VMs at a moment.
//!
//! Filled by `ebb-host` (or the simulator), never changed afterwards. Sizes are
//! bytes, moments are [`Stamp`]s, `None` means *not known* (absent in this
//! kernel, unreadable, not answered in time), which is never the same as zero.
//! A source that failed leaves `None` and a [`Problem`]; the tick goes on.
//! A record of a run is a sequence of these, so every type here serialises.

use serde::{Deserialize, Serialize};

use crate::histogram::Histogram;
use crate::policy::merge::Candidates;
use crate::units::{Bytes, Stamp};
use crate::wire::abi::Facts;
use crate::wire::{AgentState, Counters};

/// Everything read in one tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// When reading began.
    pub at: Stamp,
    /// The same moment as milliseconds since 1970, for people.
    pub wall_ms: u64,
    /// The host.
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmId>,
    /// The file, socket or command, e.g. `/proc/meminfo` or `qmp query-balloon`.
    pub source: String,
    /// What is wrong and what to do.
    pub message: String,
}

/// The host's own memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostSample {
    /// `/proc/meminfo`.
    pub memory: Option<Meminfo>,
    /// `/proc/pressure/memory`; absent where the kernel has no PSI.
    pub psi: Option<Psi>,
    /// `/proc/vmstat`, the counters that tell of paging.
    pub vmstat: Option<Vmstat>,
    /// `/proc/swaps`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swaps: Vec<SwapArea>,
    /// `/sys/kernel/mm/ksm`; absent where KSM is not built in.
    pub ksm: Option<Ksm>,
    /// The daemon's scanner of equal pages, where merging is not off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<ScanSample>,
    /// How zero pages can be freed here; `None` where that is not wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<ZeroWays>,
    /// ZFS's cache and the least it shrinks to (`arcstats` size, c_min). It
    /// counts as used in MemAvailable though most of it can be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zfs_arc: Option<ZfsArc>,
    /// The memory cgroup with a limit that all managed VMs share, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Pressure in the deepest cgroup that holds all VMs, where it has a pressure file
    /// (v2) and is not the whole machine; limited or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms_psi: Option<Psi>,
    /// zswap is on: part of what is swapped out stays in memory, compressed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zswap: bool,
    /// Notifications of cgroup v1's `memory.pressure_level` since the last
    /// sample; `None` where nothing is registered (v2 has PSI instead).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmpressure: Option<VmPressure>,
    /// What it takes to touch a MiB of new memory, microseconds, as measured here: the price
    /// of what a guest takes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touch_us: Option<u32>,
}

/// Notifications of reclaim that came since the last sample, each counted at its
/// own level only (the kernel tells a listener of `low` of the others as well).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPressure {
    /// Memory is reclaimed for new allocations: cache, as a rule.
    pub low: u64,
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
    /// `Buffers`.
    pub buffers: Bytes,
    /// `Cached`.
    pub cached: Bytes,
    /// `Shmem`.
    pub shmem: Bytes,
    /// `SwapTotal`.
    pub swap_total: Bytes,
    /// `SwapFree`.
    pub swap_free: Bytes,
    /// `Hugetlb`: all of the hugetlb pools, used or not.
    pub hugetlb: Bytes,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PsiLine {
    /// Share of wall time stalled, percent, over 10 s.
    pub avg10: f64,
    /// The same over 60 s.
    pub avg60: f64,
    /// The same over 300 s.
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
    /// `cow_ksm`: merged pages that were copied because somebody wrote (5.19+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cow_ksm: Option<u64>,
}

/// A line of `/proc/swaps`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapArea {
    /// Path, e.g. `/dev/zram0`.
    pub path: String,
    /// Its size.
    pub size: Bytes,
    /// What of it is used.
    pub used: Bytes,
    /// Priority, as the kernel prints it.
    pub priority: i64,
    /// Of a zram device: what it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
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

/// `/sys/kernel/mm/ksm`, whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ksm {
    /// `run`: 0 stopped, 1 running, 2 unmerging.
    pub run: u64,
    /// `pages_shared`: distinct pages kept.
    pub pages_shared: u64,
    /// `pages_sharing`: further places that map them, i.e. pages saved.
    pub pages_sharing: u64,
    /// `pages_unshared`.
    pub pages_unshared: u64,
    /// `pages_volatile`.
    pub pages_volatile: u64,
    /// `full_scans`.
    pub full_scans: u64,
    /// `ksm_zero_pages` (6.6+).
    pub zero_pages: Option<u64>,
    /// `general_profit`, bytes, signed as the kernel has it (6.4+).
    pub general_profit: Option<i64>,
    /// `pages_scanned` (6.6+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_scanned: Option<u64>,
    /// `pages_skipped`, by `smart_scan` (6.7+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_skipped: Option<u64>,
    /// `stable_node_chains`: contents with more copies than one page may have.
    #[serde(default)]
    pub chains: u64,
    /// `stable_node_dups`: pages kept because of that.
    #[serde(default)]
    pub chain_pages: u64,
    /// CPU time of `ksmd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// A `ksmtuned` that sets the same knobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ksmtuned: Option<u32>,
    /// Places that map a merged page, of the processes that there are (6.1+). The counters
    /// above keep those of a process that has ended until `ksmd` comes by its pages, which
    /// it does not while it is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapped: Option<u64>,
}

impl Ksm {
    /// What merging saves by the kernel's counters, and would take to be broken, at most.
    pub fn saved(&self) -> Bytes {
        Bytes::pages(self.pages_sharing.saturating_add(self.zero_pages.unwrap_or(0)))
    }

    /// What it saves the processes that there are, at least: of so many places at most so
    /// many as there are merged pages save nothing. Exact where no process has ended since
    /// `ksmd` came by. Without [`Ksm::mapped`] the counters count while `ksmd` runs.
    pub fn saved_now(&self) -> Bytes {
        let sharing = match self.mapped {
            Some(mapped) => self.pages_sharing.min(mapped.saturating_sub(self.pages_shared)),
            None if self.run == 1 => self.pages_sharing,
            None => 0,
        };
        // The kernel takes a zero page off its counter when it is unmapped.
        Bytes::pages(sharing.saturating_add(self.zero_pages.unwrap_or(0)))
    }

    /// That less KSM's own memory, which it keeps for processes that have ended, too.
    pub fn profit_now(&self) -> Option<i64> {
        let gone = self.saved() - self.saved_now();
        self.general_profit.map(|p| p.saturating_sub(gone.0 as i64))
    }

    /// Of the places that map a merged page, the share that saves one: the first
    /// place of each content saves nothing.
    pub fn share_saved(&self) -> f64 {
        let mapped = self.pages_shared.saturating_add(self.pages_sharing);
        if mapped == 0 { 0.0 } else { self.pages_sharing as f64 / mapped as f64 }
    }
}

/// The daemon's scanner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScanSample {
    /// Scans that were finished since the daemon's start.
    pub number: u64,
    /// One is under way.
    pub busy: bool,
    /// When the last one ended.
    pub at: Stamp,
    /// How long it took, pauses included.
    pub seconds: f64,
    /// CPU time of all of them, and of all looks.
    pub cpu_s: f64,
    /// Memory that the last one went through.
    pub read: Bytes,
    /// Of that, by the VMs' own agents.
    #[serde(default)]
    pub by_agents: Bytes,
    /// Of that, no more than a few lines of each page: they have no duplicate by those.
    #[serde(default)]
    pub by_lines: Bytes,
    /// Its table at its largest.
    pub table: Bytes,
    /// It read one piece in so many.
    pub one_in: u32,
    /// Looks at a few pages, to see whether they are as the last scan saw them.
    #[serde(default)]
    pub looks: u64,
    /// Of those, since the last scan.
    #[serde(default)]
    pub looks_since: u32,
    /// What has changed since the last scan, as the last look estimates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<Bytes>,
    /// Why there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `/proc/PID/ksm_stat`: a process's merging; what this kernel does not tell is
/// `None`. What is broken by a write is counted until `ksmd` comes by again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmStat {
    /// Pages that KSM keeps in mind, 64 bytes each.
    pub rmap_items: Option<u64>,
    /// Pages merged with the zero page (6.6+).
    pub zero_pages: Option<u64>,
    /// Places that map a merged page.
    pub merging_pages: Option<u64>,
    /// Bytes saved less KSM's own, signed as the kernel has it.
    pub profit: Option<i64>,
    /// Some of its memory is marked for KSM (6.14+).
    pub mergeable: Option<bool>,
}

impl KsmStat {
    /// Merged pages of either kind.
    pub fn merged(&self) -> u64 {
        self.merging_pages.unwrap_or(0).saturating_add(self.zero_pages.unwrap_or(0))
    }
}

/// A VM and KSM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MergeSample {
    /// Whether KSM may look at its RAM, by its mappings; `None`: not looked yet.
    pub open: Option<bool>,
    /// The kernel's counters of its process.
    pub stat: KsmStat,
    /// What its mappings showed as merged, zeros not counted, and when; unlike the
    /// counters without what was broken since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<(Stamp, Bytes)>,
    /// What the last scan found in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Candidates>,
    /// An order to open or close it is under way.
    #[serde(default)]
    pub busy: bool,
    /// What was wrong with the last one, or with reading it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `/proc/spl/kstat/zfs/arcstats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZfsArc {
    /// `size`.
    pub size: Bytes,
    /// `c_min`.
    pub min: Bytes,
}

/// A memory cgroup with a limit, v1 or v2.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Its path below the cgroup mount, e.g. `/machine.slice`.
    pub path: String,
    /// `memory.max`, `memory.high` or `memory.limit_in_bytes` (the tightest on the way up).
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
    /// Swap that the subtree may still use by its own limit and those above it; `None`:
    /// no limit, or not accounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_left: Option<Bytes>,
    /// `oom_kill` events in the subtree.
    pub oom_kills: Option<u64>,
    /// `memory.pressure` of a v2 cgroup.
    pub psi: Option<Psi>,
}

/// Which QEMU process this is: `pid` and its start time in clock ticks since
/// boot, so that a recycled pid is never taken for the same VM.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct VmId {
    /// Process id.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub start: u64,
}

/// What a VM's claim to a section of the configuration is worth: the name by which it has
/// one is its own word ([`crate::config::Identity`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// Nothing that it cannot change is asked for.
    #[default]
    Open,
    /// Its user or its cgroup is the one that is asked for.
    Proven,
    /// It is another VM: why.
    Refused(String),
}

impl Claim {
    /// Nothing that it cannot change is asked for.
    pub fn is_open(&self) -> bool {
        *self == Claim::Open
    }
}

/// One VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmSample {
    /// Which process.
    pub id: VmId,
    /// Name (`-name`, or `pid-N`), unique among the VMs of one sample.
    pub name: String,
    /// `-name` as typed, or what the configuration calls it, where `name` was made from it
    /// to be unique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<String>,
    /// `-uuid`, where given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// What its claim to its section of the configuration is worth.
    #[serde(default, skip_serializing_if = "Claim::is_open")]
    pub claim: Claim,
    /// RAM the guest was given at start plus what was plugged since.
    pub ram: Option<Bytes>,
    /// What the process holds of the host's memory.
    pub process: Option<ProcessMemory>,
    /// Memory cgroup path, e.g. `/machine.slice/vm1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Whether QMP can be used.
    pub link: Link,
    /// The QMP socket over which it was heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// `query-status`, where QMP answered.
    pub run: Option<RunState>,
    /// The balloon; `None` where there is no device or QMP did not answer.
    pub balloon: Option<BalloonSample>,
    /// The agent inside the VMM, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentSample>,
    /// What QMP told since the last sample, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<VmEvent>,
    /// How long its process has run, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// Why its memory can neither be ballooned with effect nor paged out: pinned by a
    /// device, locked, encrypted, huge pages of a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
    /// It is left alone at the operator's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hands_off: Option<HandsOff>,
    /// What was offloaded of it; `None`: never asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadSample>,
    /// Its pages of zeros; `None`: never asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<ZeroSample>,
    /// Its partially mapped huge pages; `None`: never asked for.
    #[serde(default, alias = "torn", skip_serializing_if = "Option::is_none")]
    pub partial_thp: Option<PartialThpSample>,
    /// Its part in merging; `None`: nothing is merged here and nobody wants it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeSample>,
}

/// A VM that the operator wants left alone (`ebb hands-off`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandsOff {
    /// For so much longer, ms.
    pub left_ms: u64,
    /// Nothing of Ebb's touches its memory any more.
    pub done: bool,
}

impl VmSample {
    /// The name that the configuration knows it by: two VMs can have the same while one is
    /// migrated into the other.
    pub fn given_name(&self) -> &str {
        self.given.as_deref().unwrap_or(&self.name)
    }
}

/// Cold memory of a VM that was sent to the host's swap on order, since the
/// daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadSample {
    /// Gone to swap while orders were carried out, by the process's own counters.
    pub paged_out: Bytes,
    /// An order is being carried out.
    pub busy: bool,
    /// What was wrong with the last order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How this kernel lets go of pages of zeros of a process without merging them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroWays {
    /// A huge page that is split drops those in it (6.12+).
    pub split: bool,
    /// A page that is paged out and is zeros takes a place in swap and writes nothing
    /// there (6.12+).
    pub pageout: bool,
}

/// Zero pages of a VM that were freed without help of its guest, since the
/// daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroSample {
    /// Memory that was looked through.
    pub read: Bytes,
    /// Zero pages in it that could be freed.
    pub chosen: Bytes,
    /// What left DRAM meanwhile, by the process's own counters.
    pub freed: Bytes,
    /// So often all of its memory was gone through.
    pub rounds: u64,
    /// An order is being carried out.
    pub busy: bool,
    /// What was wrong with the last order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Huge pages of a VM that a balloon left partially mapped and that were split, since the daemon's
/// start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialThpSample {
    /// Huge pages.
    pub split: u64,
    /// What of them nobody mapped: it is the host's again.
    pub freed: Bytes,
    /// The last order did not come to the end of RAM.
    pub more: bool,
    /// An order is being carried out.
    pub busy: bool,
    /// What was wrong with the last order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `/proc/PID/status` of the VMM: cheap, read each tick. Includes QEMU itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// `RssAnon`.
    pub anon: Bytes,
    /// `RssFile`.
    pub file: Bytes,
    /// `RssShmem`.
    pub shmem: Bytes,
    /// `VmSwap`.
    pub swap: Bytes,
    /// `VmLck`.
    #[serde(default)]
    pub locked: Bytes,
}

impl ProcessMemory {
    /// What is in DRAM now. Lies on partly discarded huge pages: prove savings
    /// by the host's free memory or the cgroup's usage.
    pub fn resident(&self) -> Bytes {
        self.anon + self.file + self.shmem
    }
}

/// The agent inside the VMM, and what it says of the guest's module. The numbers
/// come from a map that the guest writes: exact where it is honest, bounded where
/// it is not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgentSample {
    /// Whether it answers.
    pub link: Link,
    /// How far it has come.
    pub state: AgentState,
    /// Why it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The guest's module: its version and kernel series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Free in the guest.
    pub free: Option<Bytes>,
    /// Of that, still held by the host.
    pub held: Option<Bytes>,
    /// Allocated in the guest since its boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<Bytes>,
    /// What the module says of the guest's memory, without an exit: hints too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Facts>,
    /// It still works on an order to recycle.
    #[serde(default)]
    pub busy: bool,
    /// What was done since the agent was attached.
    pub counters: Counters,
    /// How long its windows were open.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub windows: Histogram,
    /// How long writes of vCPUs waited for one, at most.
    #[serde(default, skip_serializing_if = "Histogram::is_empty")]
    pub waits: Histogram,
    /// Its tripwires, by guest address, and how often each was the first to tell of a reset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wires: Vec<(u64, u64)>,
    /// It only looks (`agent = "observe"`): nothing of the VM's memory is touched by it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observes: bool,
    /// It can open ranges to KSM that it does not recycle.
    #[serde(default)]
    pub advises: bool,
    /// So much is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<Bytes>,
}

/// State of the QMP connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state", content = "why")]
pub enum Link {
    /// Commands are answered.
    Up,
    /// Connected, but the last command was not answered in time.
    Slow(String),
    /// The socket is held by another client (QEMU serves one at a time).
    Taken(String),
    /// There is no socket that Ebb could use, or it was refused or lost.
    Down(String),
    /// Not tried yet.
    #[default]
    Unknown,
}

/// QEMU's run state, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// vCPUs run.
    Running,
    /// vCPUs are stopped (`paused`, `suspended`, `debug`, …): no guest code runs.
    Paused,
    /// Incoming or outgoing migration, snapshot: nothing is taken, nothing discarded.
    Migrating,
    /// Shut down, panicked or failed; the process is still there.
    Ended,
}

/// What QMP told of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmEvent {
    /// `RESET`: the guest rebooted; nothing known of it holds any more.
    Reset,
    /// `SHUTDOWN`.
    Shutdown,
    /// `STOP`.
    Stop,
    /// `RESUME`.
    Resume,
    /// `BALLOON_CHANGE`, with the new size.
    Balloon(Bytes),
    /// `MIGRATION` changed state.
    Migration,
    /// The QMP connection was made (again): all prior knowledge is old.
    Connected,
}

/// A virtio balloon, as QMP tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalloonSample {
    /// `query-balloon`: RAM less what the balloon holds.
    pub actual: Bytes,
    /// How old that is, milliseconds; 0: QEMU answered in this tick.
    #[serde(default)]
    pub age_ms: u64,
    /// `free-page-reporting` of the device.
    pub reporting: Option<bool>,
    /// `deflate-on-oom` of the device.
    pub deflate_on_oom: Option<bool>,
    /// What the guest last said, `None` before its first word.
    pub guest: Option<GuestStats>,
}

/// The guest's own statistics: hints from a party that is not trusted and may be
/// late. QEMU's “unset” (all ones) is `None`. Counters are since guest boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// `last-update`: seconds since 1970 on the host's clock.
    pub updated_s: u64,
    /// How old they are at most, milliseconds: see [`Heard`].
    pub age_ms: u64,
    /// `stat-total-memory`.
    pub total: Option<Bytes>,
    /// `stat-free-memory`.
    pub free: Option<Bytes>,
    /// `stat-available-memory`.
    pub available: Option<Bytes>,
    /// `stat-disk-caches`.
    pub caches: Option<Bytes>,
    /// `stat-swap-in`, bytes.
    pub swap_in: Option<Bytes>,
    /// `stat-swap-out`, bytes.
    pub swap_out: Option<Bytes>,
    /// `stat-major-faults`.
    pub major_faults: Option<u64>,
    /// `stat-minor-faults`.
    pub minor_faults: Option<u64>,
    /// `stat-oom-kill` (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<u64>,
    /// `stat-alloc-stall` (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alloc_stalls: Option<u64>,
    /// `stat-direct-reclaim`, pages (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_reclaim: Option<u64>,
    /// Its page-ins count every read of a file: Windows tells the rates of its memory manager,
    /// which are no sign of a shortage (virtio-win, `Balloon/app/memstat.cpp`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counts_reads: bool,
    /// Pages that were reclaimed and soon read again; only tier guest tells
    /// (`workingset_refault_anon` + `_file`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refaults: Option<u64>,
}

/// When a guest's last words came, as far as that can be known: QEMU tells it in
/// whole seconds, but words that differ from those seen before came after that look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    seen: Option<(GuestStats, Stamp)>,
    /// The last words came after this.
    after: Option<Stamp>,
}

impl Heard {
    /// QEMU showed these words (whose age is not known yet) at `at` or later.
    pub fn see(&mut self, at: Stamp, words: GuestStats) {
        self.after = match self.seen {
            Some((old, _)) if old == words => self.after,
            Some((_, seen)) => Some(seen),
            None => None,
        };
        self.seen = Some((words, at));
    }

    /// How old the words seen last are at most, milliseconds: by the wall clock (not
    /// where that was set back to before they came), or by when others were seen,
    /// whichever is younger.
    pub fn age_ms(&self, at: Stamp, wall_ms: u64) -> u64 {
        let Some((words, _)) = self.seen else { return 0 };
        let updated_ms = words.updated_s.saturating_mul(1000);
        let by_wall = (updated_ms <= wall_ms + 1500).then(|| wall_ms.saturating_sub(updated_ms));
        by_wall.into_iter().chain(self.after.map(|t| at.since(t))).min().unwrap_or(0)
    }
}

impl GuestStats {
    /// The facts block of the guest's module, in the balloon's words.
    pub fn from_facts(f: &Facts, wall_s: u64, age_ms: u64) -> GuestStats {
        let pages = |n: u64| Some(Bytes::pages(n));
        GuestStats {
            updated_s: wall_s.saturating_sub(age_ms / 1000),
            age_ms,
            total: pages(f.total),
            free: pages(f.free),
            available: pages(f.available),
            caches: pages(f.cached.saturating_add(f.buffers)),
            swap_in: pages(f.swap_in),
            swap_out: pages(f.swap_out),
            major_faults: Some(f.major_fault),
            minor_faults: None,
            oom_kills: Some(f.oom_kill),
            alloc_stalls: Some(f.alloc_stall),
            direct_reclaim: Some(f.scan_direct),
            counts_reads: false,
            refaults: Some(f.refault_anon.saturating_add(f.refault_file)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_processes_had_merged_is_not_saved() {
        let page = |n: u64| Bytes::pages(n);
        // Two VMs of a thousand equal pages, and 64 bytes for each of their places.
        let both = Ksm {
            run: 0,
            pages_shared: 1000,
            pages_sharing: 1000,
            general_profit: Some(1000 * 4096 - 2000 * 64),
            mapped: Some(2000),
            ..Ksm::default()
        };
        assert_eq!((both.saved_now(), both.profit_now()), (page(1000), both.general_profit));
        let one = Ksm { mapped: Some(1000), ..both };
        assert_eq!(one.saved_now(), page(0), "each page has one place left");
        let none = Ksm { mapped: Some(0), ..both };
        assert_eq!((none.saved_now(), none.profit_now()), (page(0), Some(-2000 * 64)));
        let zeros = Ksm { zero_pages: Some(7), ..none };
        assert_eq!((zeros.saved_now(), zeros.profit_now()), (page(7), Some(-2000 * 64)));
        // Other processes than VMs count as well; a count that is ahead of the others' is cut.
        assert_eq!(Ksm { mapped: Some(9000), ..both }.saved_now(), page(1000));
        let old = Ksm { mapped: None, ..both };
        assert_eq!((old.saved_now(), old.saved()), (page(0), page(1000)), "nobody can tell");
        assert_eq!(Ksm { run: 1, ..old }.saved_now(), page(1000), "ksmd finds out");
    }

    fn words(updated_s: u64, free: u64) -> GuestStats {
        GuestStats { updated_s, free: Some(Bytes(free)), ..GuestStats::default() }
    }

    /// Looks at `(at, words)` one after the other; the age of the last at `wall_ms`.
    fn age(looks: &[(u64, GuestStats)], wall_ms: u64) -> u64 {
        let mut heard = Heard::default();
        looks.iter().for_each(|(at, words)| heard.see(Stamp(*at), *words));
        heard.age_ms(Stamp(looks[looks.len() - 1].0), wall_ms)
    }

    #[test]
    fn words_that_differ_from_those_seen_just_before_came_after_that() {
        let (old, new) = (words(7, 1), words(7, 2));
        assert_eq!(age(&[(10_000, new)], 7_900), 900, "QEMU's clock alone");
        assert_eq!(age(&[(10_000, old), (10_500, new)], 7_900), 500);
        // Seen once more when the guest was asked out of turn.
        assert_eq!(age(&[(10_000, old), (10_420, old), (10_500, new)], 7_900), 80);
        assert_eq!(age(&[(10_000, old), (10_420, new), (10_500, new)], 7_900), 500, "came before");
        assert_eq!(age(&[(10_000, old), (10_420, new), (10_500, new)], 7_100), 100);
    }

    #[test]
    fn a_jump_of_the_wall_clock_makes_statistics_neither_older_nor_younger() {
        let (old, new) = (words(7, 1), words(7, 2));
        assert_eq!(age(&[(0, new)], 10_000), 3000);
        assert_eq!(age(&[(0, old), (60_000, new)], 10_000), 3000);
        assert_eq!(age(&[(0, old), (2_000, new)], 9_000_000), 2000, "clock set ahead");
        let ahead = words(900, 2);
        assert_eq!(age(&[(0, old), (40_000, ahead)], 10_000), 40_000, "clock set back");
    }
}
