//! A synthetic guest: what its memory does in a tenth of a second.
//!
//! A stand-in for laws and comparison, never for claims about real guests. Its
//! programs want what its [`Need`] says. They get it from free memory, then from
//! cache that is not read again, then from cache that is missed, then by guest swap, then
//! from the balloon (`deflate-on-oom`); what is still missing is waited for, and
//! after a second of that a process is killed. Each way costs time, and a guest
//! has no more time in a step than the step: what it spends waiting is its stall.
//!
//! On the host a guest is what it has touched: allocated memory, cache, and `stale`
//! pages that were freed and not returned. Some of that may be swapped out, always
//! the coldest first: stale, then idle, then hot; so one number tells which.
//!
//! This file has what a guest is made of, the figures it goes by, and the order of a step
//! ([`Guest::live`]). How it gets memory and gives it is in `programs` and `balloon`, where
//! the memory is in `memory`, and what the host's kernel makes of it in `shared`.

mod balloon;
mod memory;
mod programs;
mod shared;
#[cfg(test)]
mod tests;

use ebb_core::task::Tasks;
use ebb_core::units::Bytes;

use crate::demand::{Need, Walk, Want};
use crate::misbehaviour::Misbehaviour;
use crate::step_budget::{Room, Time};

/// How fast a balloon inflates, bytes a second (best known for stock virtio-balloon).
pub const INFLATE_RATE: f64 = (1u64 << 30) as f64;
/// How fast it deflates: pages are only handed back to the allocator.
pub const DEFLATE_RATE: f64 = 4.0 * INFLATE_RATE;
/// Reading swapped pages back in on the host, one guest, bytes a second.
pub const SWAP_IN_RATE: f64 = 200e6;
/// The guest's own swap, either way, bytes a second.
const GUEST_SWAP_RATE: f64 = 150e6;
/// Reading files again that were dropped from the cache, bytes a second.
const DISK_RATE: f64 = 300e6;
/// A driver that deflates on OOM, bytes a second: 1 MiB for each time round.
const SELF_HELP_RATE: f64 = 100e6;
/// The shrinker of the proposal of 2013 (`baselines/vmpressure.rs`): 128 pages a call, a hundred
/// calls a second of reclaim.
const SHRINKER_RATE: f64 = 128.0 * 4096.0 * 100.0;
/// Freeing memory, bytes a second.
const FREE_RATE: f64 = 4e9;
/// What free page reporting returns of what is free, a second.
const REPORTING_SHARE: f64 = 0.05;
/// What of it stays behind: fragments below the reporting order.
const FRAGMENTS: f64 = 0.1;
/// Waiting so long in vain for memory kills a process, ms.
const OOM_AFTER_MS: u64 = 1_000;
/// A killed program is back after this, ms.
const RESTART_MS: u64 = 10_000;
/// A kernel boots for so long before its balloon driver is up, ms.
pub const BOOT_MS: u64 = 8_000;
/// What a kernel and its first programs use once it has booted, and what its page structures
/// take, a share of RAM.
const BOOTED: Bytes = Bytes::mib(64);
const PAGE_STRUCTURES: f64 = 0.016;
/// Cache never shrinks below this.
const LEAST_CACHE: Bytes = Bytes::mib(8);

/// What a guest is made of.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    pub ram: Bytes,
    /// Behaviour.
    pub misbehaviour: Misbehaviour,
    /// What its programs want.
    pub need: Need,
    /// Its weight in the configuration.
    pub weight: f64,
    /// Its own swap device.
    pub swap: Bytes,
    pub deflate_on_oom: bool,
    /// Free page reporting.
    pub reporting: bool,
    /// Which part of the files that it reads is mapped: Linux counts major faults for those
    /// only, and nothing for what read(2) misses.
    pub mapped: f64,
    /// Tier guest: an agent in its VMM, a module in its kernel.
    pub agent: bool,
    /// Memory it used once before the run, host still holding it. All but what it uses when the
    /// run begins is free again.
    pub stale: Bytes,
    /// Idle memory of its processes that other guests hold alike.
    pub alike: Bytes,
    /// What of it is written, once it is merged, bytes a second.
    pub rewrites: f64,
    /// Which part of what its processes have freed holds zeros.
    pub zeros: f64,
    /// Which part of what its balloon takes stays in huge pages that are mapped in part.
    pub huge: f64,
    /// When it is started, ms into the run.
    pub starts_ms: u64,
    /// When it is switched off.
    pub stops_ms: u64,
    /// When it is started, its kernel boots for [`BOOT_MS`]: until then neither balloon nor module
    /// nor statistics.
    pub boots: bool,
    /// From when and until when it is paused, ms into the run.
    pub paused: (u64, u64),
    /// While it is too busy to send statistics, its module's facts stand still as well.
    pub late_facts: bool,
}

impl Spec {
    /// An ideal guest that lives for the whole run.
    pub fn new(ram: Bytes, need: Need) -> Spec {
        Spec {
            ram,
            need,
            weight: 1.0,
            deflate_on_oom: true,
            mapped: 1.0,
            stops_ms: u64::MAX,
            ..Spec::default()
        }
    }

    pub fn is_paused(&self, at_ms: u64) -> bool {
        (self.paused.0..self.paused.1).contains(&at_ms)
    }
}

/// Counters since the guest's boot, or since the run began where it says so.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Time it waited for memory since the run began, ms.
    pub stall_ms: f64,
    /// Of that, for the host.
    pub host_stall_ms: f64,
    /// Processes killed since the run began.
    pub ooms: u64,
    /// Processes killed since boot.
    pub kills: u64,
    /// Swapped in and out by the host since the run began.
    pub host_swap_in: Bytes,
    /// See `host_swap_in`.
    pub host_swap_out: Bytes,
    /// Guest swap since boot.
    pub swap_in: Bytes,
    /// See `swap_in`.
    pub swap_out: Bytes,
    /// Pages of files read again after being dropped, since boot.
    pub refaults: u64,
    /// Pages of processes read back from the guest's swap by faults, since boot.
    pub anon_refaults: u64,
    /// Allocations that had to wait, since boot.
    pub alloc_stalls: u64,
    /// Pages of direct reclaim, since boot.
    pub direct_reclaim: u64,
    /// Allocated since boot.
    pub allocated: Bytes,
    /// Recycled by the agent since the run began.
    pub recycled: Bytes,
    /// Paged out by the host on order since the run began.
    pub paged_out: Bytes,
}

#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// What it is made of.
    pub spec: Spec,
    /// Which, and the seed of its misbehaviours.
    pub index: u32,
    seed: u64,
    /// RAM less balloon.
    pub actual: Bytes,
    /// The size last ordered.
    pub target: Bytes,
    /// Whether the driver works towards the target. Once there it looks at it no
    /// more until the next order, so that one who helped itself keeps what it took.
    following: bool,
    /// The driver of the proposal of 2013: a shrinker gives memory back, and inflation is by steps.
    pub shrinker: bool,
    /// Whether it is switched on.
    pub power: bool,
    /// Whether its vCPUs are stopped.
    pub paused: bool,
    /// What its programs have, swapped or not.
    pub alloc: Bytes,
    /// In the guest's own swap.
    pub guest_swapped: Bytes,
    /// Cache that is missed when taken.
    pub hot_cache: Bytes,
    /// Cache of files read once.
    pub cold_cache: Bytes,
    /// Hot files that were in the cache before.
    known_files: Bytes,
    /// Free, touched, not returned.
    pub stale: Bytes,
    /// Swapped out on the host.
    pub out: Bytes,
    /// Of these, hot pages that were paged out by mistake: read back at once.
    astray: Bytes,
    /// What is ordered to be paged out.
    pub paging: Bytes,
    /// Merged with other guests' memory: see [`crate::ksm`].
    pub merged: Bytes,
    /// Whether KSM may scan it, and the number of its whole scans.
    pub open: bool,
    pub scans: u64,
    /// What of the stale pages holds zeros.
    pub zeros: Bytes,
    /// Taken by the balloon, and held by the host in huge pages until those are split.
    pub partial: Bytes,
    /// What was done with it on order.
    pub tasks: Tasks,
    /// What of the stale pages was free at the agent's last mark and since.
    pub marked: Option<Bytes>,
    /// Counters.
    pub counts: Counts,
    /// How the last step went: the share of it that it waited for the host.
    pub waited_for_host: f64,
    /// How often it has booted.
    pub boots: u64,
    /// When it booted last, ms into the run.
    pub booted_ms: u64,
    want: Want,
    walk: Walk,
    in_vain_ms: u64,
    held_down_until: u64,
    held_down_to: Bytes,
}

impl Guest {
    /// Just started.
    pub fn new(index: u32, seed: u64, spec: Spec) -> Guest {
        Guest {
            index,
            seed: seed ^ (u64::from(index) << 32),
            actual: spec.ram,
            target: spec.ram,
            following: true,
            // As QEMU starts it.
            open: true,
            booted_ms: spec.starts_ms,
            spec,
            ..Guest::default()
        }
    }

    /// Switches it on or off when its time has come.
    pub fn switch(&mut self, at_ms: u64) {
        let on = (self.spec.starts_ms..self.spec.stops_ms).contains(&at_ms);
        if on == self.power {
            return;
        }
        self.power = on;
        self.lose_memory();
        if on {
            let wants = self.spec.need.at(&mut self.walk, at_ms).anon;
            self.alloc = wants.min(BOOTED + self.spec.ram.share(PAGE_STRUCTURES));
            self.stale = self.spec.stale.min(self.spec.ram) - self.alloc;
            self.zeros = self.stale.share(self.spec.zeros);
        } else {
            self.want = Want::default();
        }
    }

    /// Nothing is left of what its kernel had.
    fn lose_memory(&mut self) {
        self.actual = self.spec.ram;
        self.alloc = Bytes::ZERO;
        self.guest_swapped = Bytes::ZERO;
        self.hot_cache = Bytes::ZERO;
        self.cold_cache = Bytes::ZERO;
        self.known_files = Bytes::ZERO;
        self.stale = Bytes::ZERO;
        self.out = Bytes::ZERO;
        self.astray = Bytes::ZERO;
        self.paging = Bytes::ZERO;
        self.merged = Bytes::ZERO;
        self.zeros = Bytes::ZERO;
        self.partial = Bytes::ZERO;
        self.marked = None;
        self.in_vain_ms = 0;
    }

    /// Lives `dt_ms` up to `at_ms` (into the run) within what the host can do.
    pub fn live(&mut self, at_ms: u64, dt_ms: u64, room: &mut Room) {
        self.switch(at_ms);
        self.paused = self.spec.is_paused(at_ms);
        if !self.power || self.paused {
            self.waited_for_host = 0.0;
            return;
        }
        let boots = self.spec.misbehaviour.boots(at_ms);
        if boots > self.boots {
            self.reboot(at_ms, boots);
        }
        self.want = self.wanted(at_ms);
        let mut time = Time::of(dt_ms);
        self.release(dt_ms);
        self.break_merges(dt_ms, &mut time, room);
        self.touch_hot(&mut time, room);
        self.read_hot_files(&mut time, room);
        self.grow(dt_ms, &mut time, room);
        self.read_once(&mut time, room);
        self.follow_balloon(at_ms, dt_ms, room);
        self.report_free_pages(dt_ms);
        self.mark_at_most(self.held());
        self.zeros = self.zeros.min(self.held());
        self.counts.stall_ms += time.spent();
        self.counts.host_stall_ms += time.for_host;
        self.waited_for_host = time.for_host / dt_ms as f64;
        self.give_up_if_in_vain(at_ms);
    }

    fn wanted(&mut self, at_ms: u64) -> Want {
        let mut want = self.spec.need.at(&mut self.walk, at_ms);
        if at_ms < self.held_down_until {
            want.anon = want.anon.min(self.held_down_to);
            want.hot = want.hot.min(want.anon);
        }
        // No guest wants more than was promised; a little goes to the kernel.
        let most = self.spec.ram.share(0.97);
        want.anon = want.anon.min(most);
        want.files = want.files.min(most - want.anon);
        want
    }

    /// Whether its kernel is not up yet.
    pub fn is_booting(&self, at_ms: u64) -> bool {
        (self.boots > 0 || self.spec.boots) && at_ms < self.booted_ms + BOOT_MS
    }

    fn reboot(&mut self, at_ms: u64, boots: u64) {
        self.boots = boots;
        self.booted_ms = at_ms;
        // QEMU keeps what the old kernel had touched; the balloon is gone.
        let kept = (self.touched() - self.merged).min(self.spec.ram);
        let (out, partial) = (self.out, self.partial);
        self.lose_memory();
        (self.stale, self.out, self.partial) = (kept, out.min(kept), partial);
        // The new driver looks where it is told to be.
        self.following = true;
        let kept = self.counts;
        self.counts = Counts {
            stall_ms: kept.stall_ms,
            host_stall_ms: kept.host_stall_ms,
            ooms: kept.ooms,
            host_swap_in: kept.host_swap_in,
            host_swap_out: kept.host_swap_out,
            recycled: kept.recycled,
            paged_out: kept.paged_out,
            ..Counts::default()
        };
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}
