//! The sample, understood: how short is the host, what does each guest need.
//!
//! A pure function of configuration, sample and memory. The policies see only
//! this. Formulas stand here once, with their reasons; `docs/policies.md` tells
//! them to operators. The host is understood here, guests in `model/guest.rs`.

pub(crate) mod guest;
mod merge;
mod zeros;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use self::guest::{Around, distress, trust};
pub use self::guest::{FRESH_MS, GuestModel, STALE_MS, Trust};
pub use self::merge::{MergeHost, MergeVm};
use crate::config::{Config, LEAST_FLOOR, VmSettings};
use crate::sample::{
    AgentSample, Claim, HandsOff, HostSample, Link, Psi, RunState, Sample, SwapArea, VmId,
    VmSample, Vmstat,
};
use crate::state::{Memory, VmMemory};
use crate::units::{Bytes, PAGE, Stamp};

/// How short of memory the host is. Ordered.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Pressure {
    /// Enough for all.
    #[default]
    Clear,
    /// Below the reserve: idle memory is collected gently.
    Soft,
    /// Half the reserve is gone: collected with force.
    Hard,
    /// Nearly nothing left: everything that no guest needs, at once.
    Critical,
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pressure::Clear => "clear",
            Pressure::Soft => "soft",
            Pressure::Hard => "hard",
            Pressure::Critical => "critical",
        })
    }
}

/// Everything the policies decide on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// When the sample was taken.
    pub at: Stamp,
    /// Since the last tick, milliseconds; 0 at the first.
    pub dt_ms: u64,
    /// The host.
    pub host: HostModel,
    /// The VMs, in the sample's order.
    pub vms: Vec<VmModel>,
}

/// The host, understood.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostModel {
    /// Its state.
    pub state: Pressure,
    /// Which bound is the tightest: `host` or the cgroup's path.
    pub bound: String,
    /// What VMs and host may use under that bound.
    pub capacity: Bytes,
    /// What of it can still be had without harm.
    pub headroom: Bytes,
    /// What the host wants to keep.
    pub reserve: Bytes,
    /// What is missing to the reserve (more while PSI says tasks stall).
    pub shortage: Bytes,
    /// Pages swapped in a second.
    pub swap_in_rate: f64,
    /// Pages swapped out a second.
    pub swap_out_rate: f64,
    /// Counters of this tick, for the next one's rates.
    pub vmstat: Option<Vmstat>,
    /// What made the state, for people.
    pub why: String,
    /// Whether the host's memory could be read at all.
    pub known: bool,
    /// The state that it would be in for stalls alone.
    #[serde(default)]
    pub stalled: Pressure,
    /// How much tasks suffer, 0 to 1: from PSI, swapping and cgroup v1's
    /// notifications; rises at once, sinks over 15 s. It scales goal and steps.
    #[serde(default)]
    pub urgency: f64,
    /// What VMs that have just started may still take of what they were promised.
    #[serde(default)]
    pub promised: Bytes,
    /// Given lately to guests that have not touched it yet.
    #[serde(default)]
    pub outstanding: Bytes,
    /// What can be had under each limit: the machine's first, then the VMs' cgroup's.
    #[serde(default)]
    pub limits: Vec<Limit>,
    /// Tasks stall or much is swapped out although the tightest bound has plenty: another
    /// limit is full, one that is not known here.
    #[serde(default)]
    pub stalls_elsewhere: bool,
    /// The same as far as paging out may use it; `None`: there is none, or paging
    /// out is switched off.
    #[serde(default)]
    pub offload_room: Option<Bytes>,
    /// What it takes to touch a MiB of new memory, microseconds; `None`: not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touch_us: Option<u32>,
    /// What in the configuration cannot work out, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// How zero pages can be freed; `None` where that is not wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<crate::sample::ZeroWays>,
    /// What merging is decided on; absent where it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeHost>,
}

/// What can be had under one limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// `host`, or the cgroup's path.
    pub name: String,
    /// What can still be had without harm.
    pub headroom: Bytes,
    /// What is to be kept.
    pub reserve: Bytes,
    /// Swap that may be used there, less a tenth, as the memory that using it frees.
    pub swap_left: Bytes,
}

/// One VM, understood.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmModel {
    /// Which.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// Its RAM.
    pub ram: Option<Bytes>,
    /// RAM less balloon.
    pub actual: Option<Bytes>,
    /// Never asked to go below.
    pub floor: Bytes,
    /// Never given more than this: `max`, else its RAM.
    pub ceiling: Bytes,
    /// The size that it has without Ebb.
    #[serde(default)]
    pub whole: Bytes,
    /// What Ebb has taken from it and not given back yet.
    #[serde(default)]
    pub owed: Bytes,
    /// Whether Ebb may act on it at all (`manage`).
    #[serde(default)]
    pub managed: bool,
    /// Outside of the cgroup whose limit is the tightest bound.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outside: bool,
    /// Its weight.
    pub weight: f64,
    /// Memory cgroup path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Resident on the host.
    pub resident: Option<Bytes>,
    /// What of it is the VMM's own, at least.
    #[serde(default)]
    pub own: Bytes,
    /// In the host's swap.
    pub swap: Option<Bytes>,
    /// The agent inside the VMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentSample>,
    /// What the guest says, if it can be believed.
    pub guest: Option<GuestModel>,
    /// Whether and why it can be acted upon.
    pub standing: Standing,
    /// Signs that the guest is short, for people; empty when it is not.
    pub distress: String,
    /// Why it should have what it may need although it shows no need, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unseen: String,
    /// What it is in its share group by is more than its own word; or there is one group.
    #[serde(default)]
    pub group_is_proven: bool,
    /// Its share group.
    #[serde(default)]
    pub group: String,
    /// How far its guest's word is believed.
    #[serde(default)]
    pub trust: Trust,
    /// How far the last order has come.
    #[serde(default)]
    pub convergence: Convergence,
    /// Its vCPUs are stopped.
    #[serde(default)]
    pub paused: bool,
    /// It is left alone at the operator's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hands_off: Option<HandsOff>,
    /// It has just started: what it may still take of what it was promised.
    #[serde(default)]
    pub promised: Bytes,
    /// Given to it lately and not touched yet.
    #[serde(default)]
    pub outstanding: Bytes,
    /// Its balloon can bring nothing: there is none, no driver in the guest, or it does
    /// not follow. It runs and answers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beyond_balloon: bool,
    /// Why it cannot be paged out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
    /// What was paged out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<crate::sample::OffloadSample>,
    /// Its part in merging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeVm>,
    /// Why its pages of zeros are left where they are; empty: they need not be.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub zeros_stay: String,
    /// What freeing them brought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<crate::sample::ZeroSample>,
    /// What came of splitting its partially mapped huge pages; `None`: Ebb must not split them.
    #[serde(default, alias = "torn", skip_serializing_if = "Option::is_none")]
    pub partial_thp: Option<crate::sample::PartialThpSample>,
}

/// How far a VM is with what it was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Convergence {
    /// In a word.
    pub state: Progress,
    /// The size it was told to take, while it is not there.
    pub target: Option<Bytes>,
    /// How fast it moves, bytes a second, averaged over two seconds.
    pub rate: f64,
    /// When it will be there at that rate, milliseconds; `None`: not known.
    pub eta_ms: Option<u64>,
}

/// The states of [`Convergence`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// It has the size it was told.
    #[default]
    Settled,
    /// On its way down.
    Shrinking,
    /// On its way up.
    Growing,
    /// On its way, but below [`SLOW_RATE`](crate::state::SLOW_RATE).
    Slow,
    /// It does not move, or did not and is left alone for a while.
    Stuck,
    /// Its numbers contradict what the host sees: it is not asked.
    Lying,
    /// It rebooted and is not whole yet.
    Rebooting,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Progress::Settled => "settled",
            Progress::Shrinking => "shrinking",
            Progress::Growing => "growing",
            Progress::Slow => "slow",
            Progress::Stuck => "stuck",
            Progress::Lying => "lying",
            Progress::Rebooting => "rebooting",
        })
    }
}

impl VmModel {
    /// Whether a limit holds for it: the machine's does for all.
    pub fn is_below(&self, limit: &Limit) -> bool {
        limit.name == "host"
            || self.cgroup.as_ref().is_none_or(|c| Path::new(c).starts_with(&limit.name))
    }

    /// What the host holds of its guest's memory, at most.
    pub fn guest_held(&self) -> Option<Bytes> {
        self.resident.map(|r| r - self.own)
    }
}

/// Whether a VM can be acted upon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "why")]
pub enum Standing {
    /// Both ways.
    Ready,
    /// It may be given memory, but not be asked for any: why.
    GiveOnly(String),
    /// Hands off: why.
    Off(String),
    /// Nothing is known of it yet.
    #[default]
    Unknown,
}

impl Standing {
    /// Why it is not [`Standing::Ready`].
    pub fn why(&self) -> &str {
        match self {
            Standing::Ready => "",
            Standing::GiveOnly(w) | Standing::Off(w) => w,
            Standing::Unknown => "not sampled yet",
        }
    }
}

/// What a host keeps for itself unless told otherwise: 20 % of the first 4 GiB,
/// 8 % of the next 28, 3 % of the rest. Like ESX's sliding minFree, generous
/// where a burst is a large share of the host and frugal where it is not.
pub fn default_reserve(capacity: Bytes) -> Bytes {
    let first = capacity.min(Bytes::gib(4));
    let next = (capacity - first).min(Bytes::gib(28));
    let rest = capacity - first - next;
    first.share(0.20) + next.share(0.08) + rest.share(0.03)
}

/// Enter and leave marks of soft, hard and critical, as fractions of the reserve:
/// apart, so that a host at a mark does not flap.
const MARKS: [(Pressure, f64, f64); 3] =
    [(Pressure::Soft, 0.75, 1.0), (Pressure::Hard, 0.50, 0.65), (Pressure::Critical, 0.25, 0.40)];

/// PSI averages (10 s) that count as pressure where headroom is also below two
/// reserves: `some`, `full`, the state they stand for. Left at half of them.
const PSI_MARKS: [(f64, f64, Pressure); 3] =
    [(10.0, 1.0, Pressure::Soft), (40.0, 5.0, Pressure::Hard), (80.0, 25.0, Pressure::Critical)];

/// Swapping out faster than this is pressure, pages a second (1 MiB/s).
const SWAP_OUT_MARK: f64 = 256.0;

impl Model {
    /// A VM by its process.
    pub fn vm(&self, id: VmId) -> Option<&VmModel> {
        self.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &self.vms[i])
    }

    /// What others than VMs use of the tightest bound.
    pub fn others(&self) -> Bytes {
        let vms: Bytes = self.vms.iter().filter(|v| !v.outside).filter_map(|v| v.resident).sum();
        (self.host.capacity - self.host.headroom) - vms
    }

    /// Understands a sample. `memory` must have [observed](Memory::observe) it.
    pub fn new(config: &Config, sample: &Sample, memory: &Memory) -> Model {
        let dt_ms = memory.at.map_or(0, |at| sample.at.since(at));
        let one_group = config.has_one_group();
        let one = |vm: &VmSample| {
            let group_is_proven = one_group || vm.claim == Claim::Proven;
            VmModel { group_is_proven, ..VmModel::new(config, sample, vm, memory) }
        };
        let mut vms: Vec<VmModel> = sample.vms.iter().map(one).collect();
        let mut host = HostModel::new(config, sample, memory, (dt_ms, &vms));
        for vm in &mut vms {
            vm.outside =
                host.bound != "host" && !host.limits.iter().skip(1).any(|l| vm.is_below(l));
        }
        host.warnings = warnings(&host, &vms, memory);
        Model { at: sample.at, dt_ms, host, vms }
    }
}

/// What cannot work out, whatever is decided.
fn warnings(host: &HostModel, vms: &[VmModel], memory: &Memory) -> Vec<String> {
    let mut warnings = Vec::new();
    if host.stalls_elsewhere {
        warnings.push(format!(
            "tasks stall or swap much although there is memory: {}. A limit that Ebb does not see \
             is full, e.g. a NUMA node (numastat -m) or a cgroup's own memory.high",
            host.why
        ));
    }
    let outside: Vec<&str> = vms.iter().filter(|v| v.outside).map(|v| v.name.as_str()).collect();
    if !outside.is_empty() {
        warnings.push(format!(
            "the limit of {} is the tightest, but these VMs are outside of it: {}",
            host.bound,
            outside.join(", ")
        ));
    }
    let unseen =
        |m: &&VmMemory| m.ledger.owes() && vms.binary_search_by_key(&m.id, |v| v.id).is_err();
    for m in memory.vms.iter().filter(unseen) {
        warnings.push(format!(
            "{} (process {}) is owed memory and cannot be looked at: it stays written down",
            m.name, m.id.pid
        ));
    }
    let managed = |v: &&VmModel| v.actual.is_some();
    let floors: Bytes = vms.iter().filter(managed).map(|v| v.floor).sum();
    if host.known && floors > host.capacity - host.reserve.min(host.capacity) {
        warnings.push(format!(
            "the floors of all VMs add up to {floors}, but {} less a reserve of {} is all there \
             is: lower `min`, or the host will swap when they are needed",
            host.capacity, host.reserve
        ));
    }
    let on = host.merge.as_ref().filter(|m| m.config.mode == crate::config::MergeMode::On);
    if let Some(pid) = on.and_then(|m| m.ksm?.ksmtuned) {
        warnings.push(format!(
            "ksmtuned (process {pid}) sets KSM too; Ebb sets back what it changes: systemctl \
             disable --now ksmtuned"
        ));
    }
    warnings
}

/// One limit on memory: the machine itself, or a cgroup.
struct Bound {
    name: String,
    capacity: Bytes,
    headroom: Bytes,
    reserve: Bytes,
    psi: Option<Psi>,
    /// Swap that may be used under it, where that is limited too.
    swap_left: Option<Bytes>,
}

impl Bound {
    fn ratio(&self) -> f64 {
        self.headroom.fraction_of(self.reserve.max(Bytes(1)))
    }

    fn limit(&self, sample: &Sample) -> Limit {
        let name = self.name.clone();
        let swap_left = swap_left(&sample.host).min(self.swap_left.unwrap_or(Bytes(u64::MAX)));
        Limit { name, headroom: self.headroom, reserve: self.reserve, swap_left }
    }
}

impl HostModel {
    fn new(
        config: &Config,
        sample: &Sample,
        memory: &Memory,
        (dt_ms, vms): (u64, &[VmModel]),
    ) -> HostModel {
        let rate = |pick: fn(&Vmstat) -> u64| match (&memory.vmstat, &sample.host.vmstat, dt_ms) {
            (Some(was), Some(now), 1..) => {
                pick(now).saturating_sub(pick(was)) as f64 * 1000.0 / dt_ms as f64
            }
            _ => 0.0,
        };
        let mut host = HostModel {
            swap_in_rate: rate(|v| v.swap_in_pages),
            swap_out_rate: rate(|v| v.swap_out_pages),
            vmstat: sample.host.vmstat,
            promised: vms.iter().map(|v| v.promised).sum(),
            outstanding: vms.iter().map(|v| v.outstanding).sum(),
            offload_room: offload_room(config, sample),
            merge: MergeHost::new(config, sample),
            zeros: sample.host.zeros.filter(|_| config.merge.zeros),
            touch_us: sample.host.touch_us,
            ..HostModel::default()
        };
        let bounds = bounds(config, sample);
        let tightest = bounds.iter().min_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        let Some(bound) = tightest else {
            host.why = "the host's memory cannot be read: nothing is taken".into();
            return host;
        };
        host.known = true;
        host.limits = bounds.iter().map(|b| b.limit(sample)).collect();
        host.bound.clone_from(&bound.name);
        (host.capacity, host.headroom, host.reserve) =
            (bound.capacity, bound.headroom, bound.reserve);
        let stall = Stall {
            psi: bound.psi.or(sample.host.vms_psi).or(sample.host.psi),
            swap_out_rate: host.swap_out_rate,
            // A v1 cgroup has no PSI of its own.
            notified: if bound.psi.is_none() { memory.notified_at(sample.at) } else { None },
        };
        host.judge(bound, &stall, memory, dt_ms);
        host
    }

    /// What is missing to leave a state: room to the mark it is left at. Where tasks
    /// stall, so much does not cure it.
    pub fn lacks(&self, state: Pressure) -> Bytes {
        let mark = MARKS.iter().find(|m| m.0 == state).map_or(0.0, |m| m.2);
        match self.stalled >= state {
            true => self.shortage,
            false => self.reserve.share(mark) - self.headroom,
        }
    }

    /// State, shortage and surplus under the tightest bound.
    fn judge(&mut self, bound: &Bound, stall: &Stall, memory: &Memory, dt_ms: u64) {
        let ratio = bound.ratio();
        let by_room = level_by_marks(ratio, memory.state);
        let tight = ratio < 2.0;
        let by_stall = if tight { stall.level(memory.state) } else { Pressure::Clear };
        self.stalls_elsewhere = !tight && stall.is_severe();
        // A promise is no need yet: it has idle memory collected, gently.
        let left = self.headroom - self.promised;
        let by_promise =
            level_by_marks(left.fraction_of(bound.reserve.max(Bytes(1))), memory.state)
                .min(Pressure::Soft);
        self.state = by_room.max(by_stall).max(by_promise);
        if self.stalls_elsewhere {
            self.state = self.state.max(Pressure::Soft);
        }
        self.stalled = by_stall;
        let sunk = memory.urgency * (-(dt_ms as f64) / URGENCY_SINKS_MS).exp();
        self.urgency = if tight { stall.urgency() } else { 0.0 }.max(sunk);
        if self.urgency < 0.01 {
            self.urgency = 0.0;
        }
        // At most one and a half reserves.
        let goal = bound.reserve.share(1.0 + 0.5 * self.urgency);
        let counted = if self.state == Pressure::Soft { left } else { self.headroom };
        if self.state > Pressure::Clear {
            self.shortage = goal - counted;
        }
        let promised = match self.promised {
            Bytes(0) => String::new(),
            p => format!(", {p} promised to VMs that have just started"),
        };
        self.why = format!(
            "{} of {} left under {}, reserve {}{promised}{}",
            bound.headroom,
            bound.capacity,
            bound.name,
            bound.reserve,
            match by_stall > Pressure::Clear || self.stalls_elsewhere {
                true => stall.words(),
                false => String::new(),
            }
        );
    }
}

/// What of the host's swap may be filled on purpose.
fn offload_room(config: &Config, sample: &Sample) -> Option<Bytes> {
    let host = &sample.host;
    let wanted = config.offload.unwrap_or(true) && host.memory?.swap_total > Bytes::ZERO;
    let pool = host.pool.as_ref().and_then(|p| p.swap_left).unwrap_or(Bytes(u64::MAX));
    wanted.then(|| swap_left(host).min(pool))
}

/// What of a page that goes to compressed swap in memory is freed, at most: a share of
/// contents that has not been seen yet may compress worse.
const COMPRESSED_FREES: f64 = 0.5;

/// What swap can still take, less a tenth, as the memory that this frees: zram and zswap
/// keep what they hold in memory.
fn swap_left(host: &HostSample) -> Bytes {
    let Some(m) = host.memory else { return Bytes::ZERO };
    if host.swaps.is_empty() {
        return m.swap_free - m.swap_total.share(0.1);
    }
    let frees = |a: &SwapArea| match a.zram {
        Some(z) if z.stored > Bytes::ZERO => {
            (1.0 - z.used.fraction_of(z.stored)).clamp(0.0, COMPRESSED_FREES)
        }
        Some(_) => COMPRESSED_FREES,
        None if host.zswap => COMPRESSED_FREES,
        None => 1.0,
    };
    host.swaps.iter().map(|a| (a.size - a.used - a.size.share(0.1)).share(frees(a))).sum()
}

/// What limits memory here: always the machine, and the VMs' cgroup if it has a
/// limit.
fn bounds(config: &Config, sample: &Sample) -> Vec<Bound> {
    let mut bounds = Vec::new();
    let reserve = |capacity: Bytes| {
        config.reserve.unwrap_or_else(|| default_reserve(capacity)).min(capacity.share(0.5))
    };
    if let Some(m) = &sample.host.memory {
        // Huge page pools are nobody's to use. ZFS's cache is not in MemAvailable
        // though most of it yields; half of that is counted, as it yields slowly.
        let arc = sample.host.zfs_arc.map_or(Bytes::ZERO, |a| (a.size - a.min).share(0.5));
        let capacity = m.total - m.hugetlb;
        bounds.push(Bound {
            name: "host".into(),
            capacity,
            headroom: (m.available + arc).min(capacity),
            reserve: reserve(capacity),
            psi: None,
            swap_left: None,
        });
    }
    if let Some(p) = &sample.host.pool {
        bounds.push(Bound {
            name: p.path.clone(),
            capacity: p.limit,
            headroom: ((p.limit - p.usage) + p.file).min(p.limit),
            reserve: reserve(p.limit),
            psi: p.psi,
            swap_left: p.swap_left,
        });
    }
    bounds
}

/// The state by headroom: up at the enter mark, down only at the leave mark.
fn level_by_marks(ratio: f64, before: Pressure) -> Pressure {
    let mut level = Pressure::Clear;
    for (state, enter, leave) in MARKS {
        if ratio < enter || (before >= state && ratio < leave) {
            level = state;
        }
    }
    level
}

/// What tells that tasks suffer.
struct Stall {
    psi: Option<Psi>,
    swap_out_rate: f64,
    notified: Option<Pressure>,
}

/// Swapping out so fast, pages a second (16 MiB/s), or all tasks stalled for this share of
/// the time, percent, is a shortage somewhere, whatever headroom says.
const SEVERE: (f64, f64) = (4096.0, PSI_MARKS[1].1);

/// Urgency sinks by this time constant, so that what it drives does not swing.
const URGENCY_SINKS_MS: f64 = 15_000.0;

impl Stall {
    fn is_severe(&self) -> bool {
        let (swap_out, full) = SEVERE;
        self.swap_out_rate >= swap_out || self.psi.is_some_and(|p| p.full.avg10 >= full)
    }

    /// The state that it stands for.
    fn level(&self, before: Pressure) -> Pressure {
        let mut level = self.notified.unwrap_or_default();
        if let Some(psi) = &self.psi {
            for (some, full, state) in PSI_MARKS {
                let ease = if before >= state { 0.5 } else { 1.0 };
                if psi.some.avg10 >= some * ease || psi.full.avg10 >= full * ease {
                    level = level.max(state);
                }
            }
        }
        if self.swap_out_rate >= SWAP_OUT_MARK {
            level = level.max(Pressure::Soft);
        }
        level
    }

    /// In proportion: 0.5 at the mark of soft, 0.75 at hard's, 1 at critical's.
    fn urgency(&self) -> f64 {
        let [soft, hard, critical] = PSI_MARKS;
        let along = |value: f64, marks: [f64; 3]| match value {
            v if v <= 0.0 => 0.0,
            v if v < marks[0] => 0.5 * v / marks[0],
            v if v < marks[1] => 0.5 + 0.25 * (v - marks[0]) / (marks[1] - marks[0]),
            v => (0.75 + 0.25 * (v - marks[1]) / (marks[2] - marks[1])).min(1.0),
        };
        let psi = self.psi.map_or(0.0, |p| {
            let some = along(p.some.avg10, [soft.0, hard.0, critical.0]);
            some.max(along(p.full.avg10, [soft.1, hard.1, critical.1]))
        });
        let swap =
            along(self.swap_out_rate, [SWAP_OUT_MARK, 16.0 * SWAP_OUT_MARK, 128.0 * SWAP_OUT_MARK]);
        let notified = match self.notified {
            Some(Pressure::Critical) => 1.0,
            Some(Pressure::Hard) => 0.75,
            Some(Pressure::Soft) => 0.5,
            _ => 0.0,
        };
        psi.max(swap).max(notified)
    }

    fn words(&self) -> String {
        let psi = self.psi.map_or(String::new(), |p| {
            let (some, full) = (p.some.avg10, p.full.avg10);
            format!(", tasks stalled {some:.0} % (all of them {full:.0} %)")
        });
        let notified = self.notified.map_or(String::new(), |n| format!(", cgroup notifies {n}"));
        let swap = Bytes((self.swap_out_rate * PAGE as f64) as u64);
        format!("{psi}{notified}, swapping out {swap}/s")
    }
}

impl VmModel {
    fn new(config: &Config, sample: &Sample, vm: &VmSample, memory: &Memory) -> VmModel {
        let settings = config.settings(vm.given_name(), vm.uuid.as_deref());
        let remembered = memory.vm(vm.id);
        let actual = vm.balloon.as_ref().map(|b| b.actual);
        let ram = vm.ram.or(actual).unwrap_or_default();
        let ledger = remembered.map(|m| m.ledger).unwrap_or_default();
        let whole = ledger.whole(ram).unwrap_or(ram);
        let ceiling = settings.max.map_or(ram, |max| max.of(ram)).max(LEAST_FLOOR.min(ram));
        // A floor above the ceiling gives way to it.
        let floor = settings.min.of(ram).max(LEAST_FLOOR).min(ceiling);
        let mut model = VmModel {
            id: vm.id,
            name: vm.name.clone(),
            ram: vm.ram,
            actual,
            floor,
            ceiling,
            whole,
            owed: actual.map_or(Bytes::ZERO, |a| ledger.owed(ram, a)),
            managed: left_alone(settings, vm).is_none(),
            // The configuration's reader refuses others; a record may hold any.
            weight: if settings.weight > 0.0 && settings.weight.is_finite() {
                settings.weight
            } else {
                1.0
            },
            group: settings.group.clone(),
            pinned: vm.pinned.clone(),
            cgroup: vm.cgroup.clone(),
            paused: vm.run == Some(RunState::Paused),
            hands_off: vm.hands_off,
            offload: vm.offload.clone(),
            resident: vm.process.map(|p| p.resident()),
            swap: vm.process.map(|p| p.swap),
            agent: vm.agent.clone(),
            merge: MergeVm::new(config, vm),
            zeros_stay: zeros::stay(config, vm).unwrap_or_default(),
            zeros: vm.zeros.clone(),
            partial_thp: merge::advisable(config, vm)
                .then(|| vm.partial_thp.clone().unwrap_or_default()),
            ..VmModel::default()
        };
        let stats = remembered.and_then(|m| m.words(sample.at, vm)).or_else(|| {
            // Not observed: as it stands in the sample.
            vm.balloon.as_ref().and_then(|b| b.guest)
        });
        if let (Some(actual), Some(stats)) = (actual, stats) {
            let rates = remembered.and_then(|m| m.rates_at(sample.at));
            let safe = vm.balloon.as_ref().and_then(|b| b.deflate_on_oom) == Some(true);
            let around = Around { ram, actual, deflate_on_oom: safe };
            model.guest = GuestModel::new(&around, &stats, remembered, rates);
        }
        model.trust = trust(model.guest.as_ref(), remembered);
        model.standing = standing(left_alone(settings, vm), vm, &model, remembered, sample.at);
        model.beyond_balloon = model.managed && beyond_balloon(vm, remembered, sample.at);
        let inflating = remembered.is_some_and(|m| m.inflates(sample.at, actual));
        model.distress = model.guest.as_ref().map(|g| distress(g, inflating)).unwrap_or_default();
        if !model.distress.is_empty() && model.guest.is_some_and(|g| g.by_module) {
            model.distress += ", by its module's facts";
        }
        let Some(m) = remembered else { return model };
        if model.distress.is_empty()
            && model.guest.is_none_or(|g| g.available < g.buffer)
            && m.deflated_on_oom.is_some_and(|t| sample.at.since(t) < DEFLATED_LIFE_MS)
        {
            model.distress = "it was out of memory and deflated its balloon itself".into();
        }
        model.own = m.own;
        model.unseen = m.reach.unseen(sample.at);
        if model.unseen.is_empty() && vm.run == Some(RunState::Migrating) {
            model.unseen = "it is being migrated or saved: the other side may not know what \
                            it is owed"
                .into();
        }
        model.convergence = m.convergence(sample.at, actual, model.trust.level);
        let host_side = model.resident.unwrap_or_default() + model.swap.unwrap_or_default();
        if m.start.is_some() && model.resident.is_some() {
            model.promised = model.actual.unwrap_or(ram) - host_side;
        }
        model.outstanding = m.outstanding(sample.at, actual, host_side);
        model
    }
}

/// Why Ebb does not act on a VM at all, by the configuration.
fn left_alone(settings: &VmSettings, vm: &VmSample) -> Option<String> {
    match &vm.claim {
        Claim::Refused(why) => Some(format!(
            "it calls itself “{}”, and is not the VM of that section of the configuration: {why}; \
             correct the section, or start the VM under another name",
            vm.given_name()
        )),
        _ => (!settings.manage).then(|| "manage = false in the configuration".into()),
    }
}

/// Whether the VM can be acted upon; the first reason against it is told.
fn standing(
    left_alone: Option<String>,
    vm: &VmSample,
    model: &VmModel,
    memory: Option<&VmMemory>,
    at: Stamp,
) -> Standing {
    let off = |why: &str| Standing::Off(why.to_string());
    let give_only = |why: String| Standing::GiveOnly(why);
    if let Some(why) = left_alone {
        return Standing::Off(why);
    }
    match &vm.link {
        Link::Up | Link::Slow(_) => {}
        Link::Taken(w) | Link::Down(w) => return off(w),
        Link::Unknown => return Standing::Unknown,
    }
    if vm.balloon.is_none() {
        return match &vm.link {
            Link::Slow(why) => off(why),
            _ => off("it has no virtio balloon that answers"),
        };
    }
    if let Some(h) = vm.hands_off {
        return give_only(format!(
            "hands off for {} s more, as was asked: only given what it needs",
            h.left_ms.div_ceil(1000)
        ));
    }
    match vm.run {
        Some(RunState::Running) => {}
        Some(RunState::Migrating) => {
            return give_only("it is being migrated or saved: only given what it needs".into());
        }
        Some(RunState::Ended) => return off("its guest has ended"),
        Some(RunState::Paused) => return give_only("it is paused: its guest cannot shrink".into()),
        None => return off("its run state is not known"),
    }
    // What is given late does no harm; what is taken late does.
    if let Link::Slow(why) = &vm.link {
        return give_only(format!("QEMU is slow to answer: {why}"));
    }
    if memory.is_some_and(|m| m.reboot.is_some()) {
        return give_only("it rebooted: its size is not known yet".into());
    }
    if let Some(left) = memory.and_then(|m| m.settle_until).map(|s| s.since(at)).filter(|l| *l > 0)
    {
        return give_only(format!("it rebooted: left alone for {} s more", left.div_ceil(1000)));
    }
    if model.guest.is_some() && model.trust.level <= 0.0 {
        return give_only(format!("its numbers are not believed: {}", model.trust.why));
    }
    if memory.is_some_and(|m| m.ledger.suspect) {
        return give_only("its size has changed, not by Ebb's order".into());
    }
    if let Some(left) = memory.and_then(|m| m.ledger.left_ms(at)) {
        return give_only(format!(
            "its size was set, not by Ebb: left alone for {} s unless it is short",
            left.div_ceil(1000)
        ));
    }
    if let Some(left) = memory.and_then(|m| m.stuck_until).map(|s| s.since(at)).filter(|l| *l > 0) {
        return give_only(format!(
            "it did not follow its last order: asked again in {} s",
            left.div_ceil(1000)
        ));
    }
    if let Some(left) = memory.and_then(|m| m.reach.left_ms(at)) {
        return give_only(format!(
            "it was not heard for a while: not asked for {} s",
            left.div_ceil(1000)
        ));
    }
    if model.guest.is_none() {
        let stats = vm.balloon.as_ref().and_then(|b| b.guest);
        return give_only(match stats {
            None => "its guest sends no statistics: no balloon driver, or not up yet".into(),
            Some(s) if s.age_ms > STALE_MS && s.available.or(s.free).is_some() => {
                format!("its guest's statistics are {} s old", s.age_ms / 1000)
            }
            Some(_) => "its guest does not tell what memory it has available".into(),
        });
    }
    Standing::Ready
}

/// Whether a VM that could be acted upon has no balloon that brings anything.
fn beyond_balloon(vm: &VmSample, memory: Option<&VmMemory>, at: Stamp) -> bool {
    let boots = memory
        .is_some_and(|m| m.reboot.is_some() || m.settle_until.is_some_and(|settled| settled > at));
    let stuck = memory.and_then(|m| m.stuck_until).is_some_and(|until| until > at);
    let deaf = vm.balloon.as_ref().is_none_or(|b| b.guest.is_none());
    vm.link == Link::Up && vm.run == Some(RunState::Running) && !boots && (deaf || stuck)
}

/// For this long it counts as a sign of distress that a guest's driver deflated its balloon.
pub(crate) const DEFLATED_LIFE_MS: u64 = 2_000;

#[cfg(test)]
mod tests;
