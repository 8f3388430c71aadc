//! The host, understood: which limits there are on memory, what can be had under each, what is to
//! be kept, and the state that follows.
//!
//! The machine is the outermost limit. Cgroups with a limit and NUMA nodes to which VMs are bound
//! are others; each is judged by the same marks. Policies are shown one at a time
//! (`View::under` in `policy/limits.rs`); what else looks at the host sees the tightest.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::stall::Stall;
use super::{MergeHost, Pressure, VmModel};
use crate::config::Config;
use crate::sample::{HostSample, Psi, Sample, SwapArea, Vmstat, is_in};
use crate::state::Memory;
use crate::units::Bytes;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostModel {
    /// The tightest limit, or the one that is decided under: what policies take for the host.
    pub shown: Limit,
    /// Pages swapped in a second.
    pub swap_in_rate: f64,
    /// Pages swapped out a second.
    pub swap_out_rate: f64,
    /// Counters of this tick, for the next one's rates.
    pub vmstat: Option<Vmstat>,
    /// Whether the host's memory could be read at all.
    pub known: bool,
    /// Each limit: the machine's first, then the VMs' cgroup's, then all others.
    pub limits: Vec<Limit>,
    /// Swap that paging out may use; `None`: there is none, or paging out is switched off.
    pub offload_room: Option<Bytes>,
    /// What it takes to touch a MiB of new memory, microseconds; `None`: not measured.
    pub touch_us: Option<u32>,
    /// What in the configuration cannot work out, for people.
    pub warnings: Vec<String>,
    /// How zero pages can be freed; `None` where that is not wanted.
    pub zeros: Option<crate::sample::ZeroWays>,
    /// The processor time for that, whether or not anything is merged.
    pub zeros_budget: crate::policy::merge::Settings,
    /// What merging is decided on; absent where it is off.
    pub merge: Option<MergeHost>,
}

/// One limit on memory, understood.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limit {
    /// `host`, the cgroup's path, or `node 0`.
    pub name: String,
    /// NUMA nodes; empty where it is none of theirs.
    pub nodes: Vec<u32>,
    /// All that there is.
    pub capacity: Bytes,
    /// What can still be had without harm.
    pub headroom: Bytes,
    /// What is to be kept.
    pub reserve: Bytes,
    /// Swap that may be used there, less a tenth, as the memory that using it frees.
    pub swap_left: Bytes,
    pub state: Pressure,
    /// How far headroom is below the reserve, or below up to one and a half reserves by urgency.
    pub shortage: Bytes,
    /// The state that it would be in for stalls alone.
    pub stalled: Pressure,
    /// Tasks stall or much is swapped out although it has plenty: another limit is full, one that
    /// is not known here.
    pub stalls_elsewhere: bool,
    /// How much tasks suffer, 0 to 1: from PSI, swapping and cgroup v1's notifications; rises at
    /// once, sinks over 15 s. It scales goal and steps.
    pub urgency: f64,
    /// What VMs below it that have just started may still take of what they were promised.
    pub promised: Bytes,
    /// The part of `promised` that is of paused VMs: they touch nothing before they run.
    pub waiting: Bytes,
    /// Given lately to guests below it that have not touched it yet.
    pub outstanding: Bytes,
    /// How many VMs are below it.
    pub vms: usize,
    /// It only bounds what VMs are given: others would take what its VMs give.
    pub only_caps: bool,
    /// The configuration names it (`host.cgroup`).
    pub is_named: bool,
    /// What made its state, for people.
    pub why: String,
}

impl Limit {
    fn ratio(&self) -> f64 {
        self.headroom.fraction_of(self.reserve.max(Bytes(1)))
    }

    /// Whether stalls can be for want of what it limits.
    fn is_tight(&self) -> bool {
        self.ratio() < 2.0
    }

    /// Whether all that is below it is below the other one.
    pub(crate) fn is_inside(&self, other: &Limit) -> bool {
        match (&self.nodes[..], &other.nodes[..]) {
            _ if other.is_host() => true,
            ([], []) => is_in(&self.name, &other.name),
            ([], _) | (_, []) => false,
            (inner, outer) => inner.iter().all(|n| outer.contains(n)),
        }
    }

    /// Whether both are of cgroups, and neither is inside the other.
    pub(crate) fn is_beside(&self, other: &Limit) -> bool {
        let is_cgroup = |limit: &Limit| limit.nodes.is_empty() && !limit.is_host();
        let apart = !self.is_inside(other) && !other.is_inside(self);
        is_cgroup(self) && is_cgroup(other) && apart
    }

    /// Whether the machine itself is meant.
    pub fn is_host(&self) -> bool {
        self.name == HOST
    }
}

/// Of several limits the one in the worst state, of equals the tightest: what is shown where only
/// one is.
pub(super) fn tightest<'a>(limits: impl IntoIterator<Item = &'a Limit>) -> Option<&'a Limit> {
    limits
        .into_iter()
        .filter(|l| !l.only_caps)
        .min_by(|a, b| b.state.cmp(&a.state).then_with(|| a.ratio().total_cmp(&b.ratio())))
}

/// What the machine is called among the limits.
pub(crate) const HOST: &str = "host";

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

/// What a VMM may need beyond its guest's RAM, where more is not seen: bytes, and a share of RAM.
const OVERHEAD: (Bytes, f64) = (Bytes::mib(128), 0.02);
/// What it may come to take in any case.
const OWN_GROWS: Bytes = Bytes::mib(16);

/// Urgency sinks by this time constant, so that what it drives does not swing.
const URGENCY_SINKS_MS: f64 = 15_000.0;

impl HostModel {
    pub(super) fn new(
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
            offload_room: offload_room(config, sample),
            merge: MergeHost::new(config, sample),
            zeros: sample.host.zeros.filter(|_| config.merge.zeros),
            zeros_budget: config.merge.settings,
            touch_us: sample.host.touch_us,
            ..HostModel::default()
        };
        let mut limits = limits(config, sample, vms);
        let by_ratio = |a: &&(Limit, _), b: &&(Limit, _)| a.0.ratio().total_cmp(&b.0.ratio());
        let decided = limits.iter().filter(|(limit, _)| !limit.only_caps);
        let Some((least, _)) = decided.min_by(by_ratio) else {
            let why = "the host's memory cannot be read: nothing is taken".into();
            let promised = vms.iter().map(|v| v.promised).sum();
            let outstanding = vms.iter().map(|v| v.outstanding).sum();
            host.shown = Limit { why, promised, outstanding, ..Limit::default() };
            return host;
        };
        let least = least.name.clone();
        let machine_is_tight = limits.iter().any(|(l, _)| l.is_host() && l.is_tight());
        for (limit, psi) in limits.iter_mut().filter(|(limit, _)| !limit.only_caps) {
            // What the whole machine tells counts for the machine where that is tight, and for the
            // tightest one where it has no stalls of its own or the machine has room.
            let is_least = limit.name == least;
            let tells = match limit.is_host() {
                true => is_least || machine_is_tight,
                false => is_least && (psi.is_none() || !machine_is_tight),
            };
            let machine = || sample.host.vms_psi.or(sample.host.psi).filter(|_| tells);
            let stall = Stall {
                psi: psi.or_else(machine),
                swap_out_rate: if tells { host.swap_out_rate } else { 0.0 },
                // A v1 cgroup has no PSI of its own.
                notified: memory.notified_at(sample.at).filter(|_| tells && psi.is_none()),
            };
            let before = memory.past(&limit.name).map(|l| (l.state, l.urgency));
            limit.judge(&stall, before.unwrap_or_default(), dt_ms);
        }
        host.limits = limits.into_iter().map(|(limit, _)| limit).collect();
        // What is left below a cgroup's limit need not be there on the machine.
        host.known = host.limits.iter().any(Limit::is_host);
        host.shown = tightest(&host.limits).cloned().unwrap_or_default();
        host
    }

    /// Shows this limit as the host.
    pub(super) fn aim(&mut self, limit: usize) {
        let Some(l) = self.limits.get(limit) else { return };
        self.offload_room = self.offload_room.map(|_| l.swap_left);
        self.shown = l.clone();
    }
}

impl Limit {
    /// State and shortage, by the state and the urgency before.
    fn judge(&mut self, stall: &Stall, (before, urgency): (Pressure, f64), dt_ms: u64) {
        let ratio = self.ratio();
        let by_room = level_by_marks(ratio, before);
        let tight = self.is_tight();
        let by_stall = if tight { stall.level(before) } else { Pressure::Clear };
        self.stalls_elsewhere = !tight && stall.is_severe();
        // A promise is no need yet: it has idle memory collected, gently.
        let left = self.headroom - self.promised;
        let by_promise = level_by_marks(left.fraction_of(self.reserve.max(Bytes(1))), before)
            .min(Pressure::Soft);
        self.state = by_room.max(by_stall).max(by_promise);
        if self.stalls_elsewhere {
            self.state = self.state.max(Pressure::Soft);
        }
        self.stalled = by_stall;
        let sunk = urgency * (-(dt_ms as f64) / URGENCY_SINKS_MS).exp();
        self.urgency = if tight { stall.urgency() } else { 0.0 }.max(sunk);
        if self.urgency < 0.01 {
            self.urgency = 0.0;
        }
        // At most one and a half reserves.
        let goal = self.reserve.share(1.0 + 0.5 * self.urgency);
        let counted = if self.state == Pressure::Soft { left } else { self.headroom };
        if self.state > Pressure::Clear {
            self.shortage = goal - counted;
        }
        let Limit { name, headroom, capacity, reserve, .. } = &*self;
        let aside = |p| format!(", {p} set aside for VMs that have just started");
        let promised = self.promised.if_any(aside);
        let suffers = by_stall > Pressure::Clear || self.stalls_elsewhere;
        let stalls = if suffers { stall.words() } else { String::new() };
        self.why = format!(
            "{headroom} of {capacity} left under {name}, reserve {reserve}{promised}{stalls}"
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
    let left: Bytes =
        host.swaps.iter().map(|a| (a.size - a.used - a.size.share(0.1)).share(frees(a))).sum();
    // Of an area that is being switched off the kernel counts only what is still in it. It does not
    // tell which one that is.
    let free = m.swap_total - host.swaps.iter().map(|a| a.used).sum();
    left.min(free.share(0.9 * host.swaps.iter().map(frees).fold(0.0, f64::max)))
}

/// What limits memory here, and the stalls that are its own: always the machine, then the VMs'
/// cgroup if it has a limit, then all other limits that VMs are below.
fn limits(config: &Config, sample: &Sample, vms: &[VmModel]) -> Vec<(Limit, Option<Psi>)> {
    let mut limits: Vec<(Limit, Option<Psi>)> = Vec::new();
    let reserve = |capacity: Bytes| {
        config.reserve.unwrap_or_else(|| default_reserve(capacity)).min(capacity.share(0.5))
    };
    let swap_left = swap_left(&sample.host);
    let samples = || sample.host.pool.iter().chain(&sample.host.other_limits);
    // Inner ones first.
    let mut swaps: Vec<(&str, Bytes)> =
        samples().filter_map(|p| Some((p.path.as_str(), p.swap_left?))).collect();
    let cgroups = samples().filter(|p| p.nodes.is_empty());
    let mut left: Vec<(&str, Bytes)> = cgroups.map(|p| (p.path.as_str(), p.left())).collect();
    for all in [&mut swaps, &mut left] {
        all.sort_by_key(|(path, _)| Reverse(path.len()));
    }
    let below = |limit: Limit| {
        let vms: Vec<&VmModel> = vms.iter().filter(|vm| vm.is_below(&limit)).collect();
        // Swap that no VM may use helps none.
        let swap = if vms.is_empty() {
            limit.swap_left
        } else {
            together(&vms, &swaps, |_| Bytes(u64::MAX))
        };
        // What one was promised that is alone below a cgroup's limit, only it can take.
        let promised = |of: &dyn Fn(&VmModel) -> Bytes| match vms.as_slice() {
            [_] if !limit.is_host() => Bytes::ZERO,
            vms if vms.iter().all(|v| v.promised == Bytes::ZERO) => Bytes::ZERO,
            vms => {
                let inside = |(path, _): &&(&str, Bytes)| {
                    limit.is_host() || *path != limit.name && is_in(path, &limit.name)
                };
                let inside: Vec<_> = left.iter().filter(inside).copied().collect();
                together(vms, &inside, of)
            }
        };
        let of_all = promised(&|vm| vm.promised);
        let of_running = promised(&|vm| if vm.paused { Bytes::ZERO } else { vm.promised });
        Limit {
            promised: of_all,
            waiting: of_all - of_running,
            outstanding: vms.iter().map(|v| v.outstanding).sum(),
            vms: vms.len(),
            swap_left: limit.swap_left.min(swap),
            ..limit
        }
    };
    if let Some(m) = &sample.host.memory {
        // Pages of huge page pools cannot be allocated otherwise. ZFS's cache is not in
        // MemAvailable though most of it yields; half of that is counted, as it yields slowly.
        let arc = sample.host.zfs_arc.map_or(Bytes::ZERO, |a| (a.size - a.min).share(0.5));
        let capacity = m.total - m.hugetlb;
        let limit = Limit {
            name: HOST.into(),
            capacity,
            headroom: (m.available + arc).min(capacity),
            reserve: reserve(capacity),
            swap_left,
            ..Limit::default()
        };
        limits.push((below(limit), None));
    }
    // VMs without a binding would take memory of a node that those bound to it give.
    let unbound = vms.iter().any(|vm| vm.nodes.is_empty());
    for p in samples() {
        let above = swaps.iter().filter(|(path, _)| is_in(&p.path, path)).map(|(_, left)| *left);
        let limit = Limit {
            name: p.path.clone(),
            nodes: p.nodes.clone(),
            only_caps: !p.nodes.is_empty() && unbound,
            capacity: p.limit,
            headroom: p.left(),
            is_named: config.pool.as_deref() == Some(p.path.as_str()),
            swap_left: above.fold(swap_left, Bytes::min),
            ..Limit::default()
        };
        let limit = below(limit);
        let most = may_grow(&limit, vms);
        // A limit that holds all that its VMs may take bounds none of them. The pool is shown
        // also where no VM is below it.
        let counts = limit.vms > 0 || sample.host.pool.as_ref().is_some_and(|n| n.path == p.path);
        if limit.headroom < most && counts {
            limits.push((Limit { reserve: reserve(p.limit).min(most), ..limit }, p.psi));
        }
    }
    limits
}

/// What VMs may take together: `most` of each, and by the limits of their cgroups no more than is
/// left there, each limit counted once. `limits`: inner ones first.
fn together(vms: &[&VmModel], limits: &[(&str, Bytes)], most: impl Fn(&VmModel) -> Bytes) -> Bytes {
    // Cgroups, none inside another, and what the VMs of each may take.
    let mut parts: Vec<(&str, Bytes)> =
        vms.iter().map(|vm| (vm.cgroup.as_deref().unwrap_or_default(), most(vm))).collect();
    for (path, left) in limits {
        let (inside, outside): (Vec<_>, _) = parts.into_iter().partition(|(at, _)| is_in(at, path));
        parts = outside;
        if !inside.is_empty() {
            let sum: Bytes = inside.into_iter().map(|(_, may)| may).sum();
            parts.push((path, sum.min(*left)));
        }
    }
    parts.into_iter().map(|(_, may)| may).sum()
}

/// What all below a limit may still take of it, at most: more need not be kept. Guests may fill
/// their RAM, and their VMMs hold memory, too. Others may come to use twice what they use now. What
/// is held beyond the limit, which `memory.high` allows, has to go as well.
fn may_grow(limit: &Limit, vms: &[VmModel]) -> Bytes {
    if limit.vms == 0 {
        return Bytes(u64::MAX);
    }
    let below = || vms.iter().filter(|vm| vm.is_below(limit));
    // Merged memory may have to be copied again.
    let guests = below().map(|vm| match (vm.ram, vm.unmerged()) {
        (Some(ram), Some(resident)) => {
            let own = vm.own.max(OVERHEAD.0 + ram.share(OVERHEAD.1));
            let ram = if vm.in_pool { Bytes::ZERO } else { ram };
            (ram + own - resident).max(OWN_GROWS)
        }
        _ => limit.capacity,
    });
    let held: Bytes = below().filter_map(VmModel::unmerged).sum();
    let others = (limit.capacity - limit.headroom) - held;
    let beyond = held - limit.capacity;
    guests.fold(others + beyond, |sum, one| (sum + one).min(limit.capacity))
}

/// The state by headroom: up at the enter mark, down only at the leave mark.
fn level_by_marks(ratio: f64, before: Pressure) -> Pressure {
    let holds = |(state, enter, leave): &(Pressure, f64, f64)| {
        ratio < *enter || (before >= *state && ratio < *leave)
    };
    MARKS.into_iter().rev().find(holds).map_or(Pressure::Clear, |(state, ..)| state)
}
