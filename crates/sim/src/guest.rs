//! A synthetic guest: what its memory does in a tenth of a second.
//!
//! A stand-in for laws and comparison, never for claims about real guests. Its
//! programs want what its [`Need`] says. They get it from free memory, then from
//! cache nobody misses, then from cache that is missed, then by guest swap, then
//! from the balloon (`deflate-on-oom`); what is still missing is waited for, and
//! after a second of that a process is killed. Each way costs time, and a guest
//! has no more time in a step than the step: what it spends waiting is its stall.
//!
//! On the host a guest is what it has touched: allocated memory, cache, and `stale`
//! pages that were freed and not returned. Some of that may be swapped out, always
//! the coldest first: stale, then idle, then hot; so one number tells which.

use ebb_core::units::{Bytes, PAGE};

use crate::demand::{Need, Walk, Want};
use crate::misbehaviour::Mood;
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
/// The seed's shrinker: 128 pages a call, a hundred calls a second of reclaim.
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
/// Cache never shrinks below this.
const LEAST_CACHE: Bytes = Bytes::mib(8);

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct Spec {
    /// RAM.
    pub ram: Bytes,
    /// Behaviour.
    pub mood: Mood,
    /// What its programs want.
    pub need: Need,
    /// Its weight in the configuration.
    pub weight: f64,
    /// Its own swap device.
    pub swap: Bytes,
    /// `deflate-on-oom`.
    pub deflate_on_oom: bool,
    /// Free page reporting.
    pub reporting: bool,
    /// Which part of the files that it reads is mapped: Linux counts major faults for those
    /// only, and nothing for what read(2) misses.
    pub mapped: f64,
    /// Tier guest: an agent in its VMM, a module in its kernel.
    pub agent: bool,
    /// Memory it used once and freed again before the run, host still holding it.
    pub stale: Bytes,
    /// When it is started, ms into the run.
    pub starts_ms: u64,
    /// When it is switched off.
    pub stops_ms: u64,
}

impl Spec {
    /// An ideal guest that lives for the whole run.
    pub fn new(ram: Bytes, need: Need) -> Spec {
        Spec {
            ram,
            mood: Mood::Ideal,
            need,
            weight: 1.0,
            swap: Bytes::ZERO,
            deflate_on_oom: true,
            reporting: false,
            mapped: 1.0,
            agent: false,
            stale: Bytes::ZERO,
            starts_ms: 0,
            stops_ms: u64::MAX,
        }
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

/// One guest.
#[derive(Clone, Debug)]
pub struct Guest {
    /// What it is made of.
    pub spec: Spec,
    /// Which, and the seed of its moods.
    pub index: u32,
    seed: u64,
    /// RAM less balloon.
    pub actual: Bytes,
    /// The size last ordered.
    pub target: Bytes,
    /// Whether the driver works towards the target. Once there it looks at it no
    /// more until the next order, so that one who helped itself keeps what it took.
    following: bool,
    /// The seed's driver: a shrinker gives memory back, and inflation is by steps.
    pub shrinker: bool,
    /// Whether it is switched on.
    pub power: bool,
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
        let walk = spec.need.walk();
        Guest {
            index,
            seed: seed ^ (u64::from(index) << 32),
            actual: spec.ram,
            target: spec.ram,
            following: true,
            shrinker: false,
            power: false,
            alloc: Bytes::ZERO,
            guest_swapped: Bytes::ZERO,
            hot_cache: Bytes::ZERO,
            cold_cache: Bytes::ZERO,
            known_files: Bytes::ZERO,
            stale: Bytes::ZERO,
            out: Bytes::ZERO,
            astray: Bytes::ZERO,
            paging: Bytes::ZERO,
            marked: None,
            counts: Counts::default(),
            waited_for_host: 0.0,
            boots: 0,
            booted_ms: spec.starts_ms,
            want: Want::default(),
            walk,
            in_vain_ms: 0,
            held_down_until: 0,
            held_down_to: Bytes::ZERO,
            spec,
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
            self.stale = self.spec.stale.min(self.spec.ram);
        } else {
            self.want = Want::default();
            self.waited_for_host = 0.0;
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
        self.marked = None;
        self.in_vain_ms = 0;
    }

    /// What its programs want now.
    pub fn wants(&self) -> Want {
        self.want
    }

    /// Memory of processes and kernel in its RAM.
    pub fn used(&self) -> Bytes {
        self.alloc - self.guest_swapped
    }

    /// Page cache.
    pub fn cache(&self) -> Bytes {
        self.hot_cache + self.cold_cache
    }

    /// Free as its kernel counts.
    pub fn free(&self) -> Bytes {
        self.actual - self.used() - self.cache()
    }

    /// What it has touched and not returned.
    pub fn touched(&self) -> Bytes {
        self.used() + self.cache() + self.stale
    }

    /// What the host holds for it in DRAM.
    pub fn resident(&self) -> Bytes {
        match (self.power, self.spec.mood) {
            (false, _) => Bytes::ZERO,
            (true, Mood::Pinned) => self.spec.ram,
            (true, _) => self.touched() - self.out,
        }
    }

    /// Faults that had to read, as Linux counts them. A fault reads ahead eight pages.
    pub fn major_faults(&self) -> u64 {
        let mapped = (self.counts.refaults as f64 * self.spec.mapped) as u64;
        (mapped + self.counts.anon_refaults) / 8
    }

    /// Free, and the host holds it.
    pub fn held(&self) -> Bytes {
        self.stale - self.out
    }

    /// What it has and neither uses nor would miss.
    pub fn idle(&self) -> Bytes {
        self.spec.ram - self.alloc.max(self.want.anon) - self.known_files
    }

    /// What of its processes' memory is touched all the time, swapped or not.
    fn hot_anon(&self) -> Bytes {
        self.alloc.share(self.want.hot.fraction_of(self.want.anon)).min(self.want.hot)
    }

    /// What of its RAM is touched all the time.
    fn hot(&self) -> Bytes {
        self.hot_anon().min(self.used()) + self.hot_cache
    }

    /// Resident pages by how soon the host would swap them: stale, idle, hot.
    pub fn by_coldness(&self) -> [Bytes; 3] {
        if self.spec.mood == Mood::Pinned || !self.power {
            return [Bytes::ZERO; 3];
        }
        let hot = self.hot();
        let idle = self.used() + self.cache() - hot;
        let mut out = self.out;
        [self.stale, idle, hot].map(|class| {
            let gone = out.min(class);
            out = out - gone;
            class - gone
        })
    }

    /// The host swaps some of it out.
    pub fn swap_out(&mut self, bytes: Bytes) {
        let bytes = bytes.min(self.resident());
        self.out += bytes;
        self.counts.host_swap_out += bytes;
    }

    /// The host pages some of it out on order. Every second VMM has a cgroup of its
    /// own, where the kernel chooses what is cold and errs in `misjudged` of it; of the
    /// others RAM is walked in turn, hot or not.
    pub fn page_out(&mut self, bytes: Bytes, misjudged: f64) {
        let [stale, idle, hot] = self.by_coldness();
        let blind = if self.index.is_multiple_of(2) { misjudged } else { 1.0 };
        let bytes = bytes.min(self.resident());
        self.astray += bytes.share(blind * hot.fraction_of(stale + idle + hot)).min(hot);
        self.swap_out(bytes);
        self.paging = self.paging - bytes;
        self.counts.paged_out += bytes;
    }

    /// An order; QEMU tells the driver even where the size is the same.
    pub fn order(&mut self, to: Bytes) {
        self.target = to.min(self.spec.ram);
        self.following = true;
    }

    /// The agent returns free pages that the host holds.
    pub fn recycle(&mut self, most: Option<Bytes>, marked: bool) {
        let mut bytes = self.held().min(most.unwrap_or(Bytes(u64::MAX)));
        if marked {
            bytes = bytes.min(self.marked.unwrap_or_default());
        }
        self.stale = self.stale - bytes;
        self.counts.recycled += bytes;
        self.mark_at_most(self.held());
    }

    fn mark_at_most(&mut self, most: Bytes) {
        self.marked = self.marked.map(|m| m.min(most));
    }

    /// Lives `dt_ms` up to `at_ms` (into the run) within what the host can do.
    pub fn live(&mut self, at_ms: u64, dt_ms: u64, room: &mut Room) {
        self.switch(at_ms);
        if !self.power {
            return;
        }
        let boots = self.spec.mood.boots(at_ms);
        if boots > self.boots {
            self.reboot(at_ms, boots);
        }
        self.want = self.wanted(at_ms);
        let mut time = Time::of(dt_ms);
        self.release(dt_ms);
        self.touch_hot(&mut time, room);
        self.read_hot_files(&mut time, room);
        self.grow(dt_ms, &mut time, room);
        self.read_once(&mut time, room);
        self.follow_balloon(at_ms, dt_ms, room);
        self.report_free_pages(dt_ms);
        self.mark_at_most(self.held());
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
        // Nobody wants more than was promised; a little goes to the kernel.
        let most = self.spec.ram.share(0.97);
        want.anon = want.anon.min(most);
        want.files = want.files.min(most - want.anon);
        want
    }

    fn reboot(&mut self, at_ms: u64, boots: u64) {
        self.boots = boots;
        self.booted_ms = at_ms;
        // QEMU keeps what the old kernel had touched; the balloon is gone.
        let (kept, out) = (self.touched().min(self.spec.ram), self.out);
        self.lose_memory();
        (self.stale, self.out) = (kept, out.min(kept));
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

    /// What programs no longer want becomes free; what the host holds of it is stale.
    fn release(&mut self, dt_ms: u64) {
        let drop = (self.alloc - self.want.anon).min(Bytes((FREE_RATE * seconds(dt_ms)) as u64));
        if drop > Bytes::ZERO {
            let swapped =
                drop.share(self.guest_swapped.fraction_of(self.alloc)).min(self.guest_swapped);
            self.guest_swapped = self.guest_swapped - swapped;
            self.alloc = self.alloc - drop;
            self.stale += drop - swapped;
        }
        let forgotten = self.known_files - self.want.files;
        self.known_files = self.known_files - forgotten;
        let cooled = self.hot_cache - self.known_files;
        self.hot_cache = self.hot_cache - cooled;
        self.cold_cache += cooled;
    }

    /// Hot pages that are swapped out come back in, on the host and in the guest.
    fn touch_hot(&mut self, time: &mut Time, room: &mut Room) {
        let idle = self.touched() - self.hot();
        self.astray = self.astray.min(self.out).min(self.hot());
        let missing = (self.out - idle).max(self.astray);
        if missing > Bytes::ZERO && self.spec.mood != Mood::Pinned {
            let bytes = missing.min(time.at(SWAP_IN_RATE)).min(room.can_swap_in);
            let got = room.take(bytes, time);
            room.can_swap_in = room.can_swap_in - got;
            self.out = self.out - got;
            self.astray = self.astray - got;
            self.counts.host_swap_in += got;
            time.wait_for_host(got, SWAP_IN_RATE);
            if got < missing {
                time.wait_in_vain(true);
            }
        }
        let missing = self.guest_swapped - (self.alloc - self.hot_anon());
        if missing > Bytes::ZERO {
            let free = self.make_free(missing.min(time.at(GUEST_SWAP_RATE)), true);
            let got = self.touch(free, time, room);
            self.guest_swapped = self.guest_swapped - got;
            self.counts.swap_in += got;
            self.counts.anon_refaults += got.0 / PAGE;
            time.wait(got, GUEST_SWAP_RATE);
            if got < missing {
                // It swaps hot pages against hot pages.
                let thrashed = time.at(GUEST_SWAP_RATE / 2.0);
                self.counts.swap_in += thrashed;
                self.counts.swap_out += thrashed;
                self.counts.anon_refaults += thrashed.0 / PAGE;
                time.wait_in_vain(false);
            }
        }
    }

    /// Hot files that were dropped are read again; that is waited for. Files new to
    /// it are read as well, which is work.
    fn read_hot_files(&mut self, time: &mut Time, room: &mut Room) {
        let missing = self.known_files - self.hot_cache;
        if missing > Bytes::ZERO {
            let wanted = missing.min(time.at(DISK_RATE));
            let first = self.cache_more(wanted, time, room);
            self.hot_cache += first;
            let second = self.trade_idle_for_cache(wanted - first, time, room);
            self.hot_cache += second;
            let got = first + second;
            time.wait(got, DISK_RATE);
            // Reads of what does not fit go to the disk each time.
            let before = time.spent();
            time.wait_share((missing - got).fraction_of(self.known_files));
            let again = Bytes((DISK_RATE * (time.spent() - before) / 1000.0) as u64);
            self.counts.refaults += (got + again).0 / PAGE;
        }
        let new = (self.want.files - self.known_files).min(time.at(DISK_RATE));
        let got = self.cache_more(new, time, room);
        self.hot_cache += got;
        self.known_files += got;
    }

    fn cache_more(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let free = self.make_free(bytes, false);
        self.touch(free, time, room)
    }

    /// Reclaim weighs cache that is missed against idle memory: that goes to swap.
    fn trade_idle_for_cache(&mut self, most: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let idle = self.used() - self.hot_anon();
        let left = (self.spec.swap - self.guest_swapped).min(idle);
        let out = most.min(left).min(time.at(GUEST_SWAP_RATE));
        self.guest_swapped += out;
        self.stale += out;
        self.counts.swap_out += out;
        self.cache_more(out, time, room)
    }

    /// Files read once: into free memory while there is some.
    fn read_once(&mut self, time: &mut Time, room: &mut Room) {
        let spare = self.free() - self.watermark();
        let bytes = time.at(self.spec.need.stream).min(spare);
        let got = self.touch(bytes, time, room);
        self.cold_cache += got;
    }

    fn watermark(&self) -> Bytes {
        self.spec.ram.share(1.0 / 128.0)
    }

    /// Makes so much free, from cold cache and, if `hard`, from hot cache; tells
    /// how much is to be had.
    fn make_free(&mut self, bytes: Bytes, hard: bool) -> Bytes {
        let lacking = |g: &Guest| bytes - (g.free() - g.watermark());
        let cold = lacking(self).min(self.cold_cache);
        self.cold_cache = self.cold_cache - cold;
        let mut dropped = cold;
        if hard {
            let hot = lacking(self).min(self.hot_cache - LEAST_CACHE);
            self.hot_cache = self.hot_cache - hot;
            dropped += hot;
        }
        // A page that was cache and is free now is still the host's.
        self.stale += dropped;
        self.counts.direct_reclaim += dropped.0 / PAGE;
        bytes.min(self.free() - self.watermark())
    }

    /// Uses so much free memory: pages the host still holds first (they were freed
    /// last), then swapped and untouched ones as they come.
    fn touch(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        if self.spec.mood == Mood::Pinned {
            self.stale = self.stale - bytes;
            return bytes;
        }
        let held = bytes.min(self.held());
        self.stale = self.stale - held;
        let rest = bytes - held;
        if rest == Bytes::ZERO {
            return held;
        }
        // All stale pages left are swapped out.
        let untouched = self.free() - held - self.stale;
        let swapped = rest.share(self.stale.fraction_of(self.stale + untouched)).min(self.stale);
        let read = swapped.min(time.at(SWAP_IN_RATE)).min(room.can_swap_in);
        let read = room.take(read, time);
        room.can_swap_in = room.can_swap_in - read;
        self.stale = self.stale - read;
        self.out = self.out - read;
        self.counts.host_swap_in += read;
        time.wait_for_host(read, SWAP_IN_RATE);
        held + read + room.take((rest - swapped).min(untouched), time)
    }

    /// Programs allocate.
    fn grow(&mut self, dt_ms: u64, time: &mut Time, room: &mut Room) {
        let want = (self.want.anon - self.alloc).min(time.at(self.spec.need.rate));
        if want == Bytes::ZERO {
            return;
        }
        let mut got = self.allocate(want, time, room, false);
        if got < want {
            got += self.allocate(want - got, time, room, true);
        }
        // One that has free memory waits for the host alone: its kernel misses nothing.
        let lacks = self.free() <= self.watermark() + Bytes::mib(1);
        if got < want && lacks {
            self.counts.alloc_stalls += 1;
            got += self.swap_for_room(want - got, time, room);
        }
        if got < want && lacks && self.shrinker {
            got += self.deflate_by_itself(want - got, SHRINKER_RATE, dt_ms, time, room);
        }
        if got < want && lacks && self.spec.deflate_on_oom {
            got += self.deflate_by_itself(want - got, SELF_HELP_RATE, dt_ms, time, room);
        }
        if got < want {
            time.wait_in_vain(room.refused > Bytes::ZERO);
        }
        // Waiting for the host is not running out.
        let in_vain = got == Bytes::ZERO && room.refused == Bytes::ZERO;
        self.in_vain_ms = if in_vain { self.in_vain_ms + dt_ms } else { 0 };
    }

    fn allocate(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room, hard: bool) -> Bytes {
        let free = self.make_free(bytes, hard);
        let got = self.touch(free, time, room);
        self.alloc += got;
        self.counts.allocated += got;
        got
    }

    /// Pushes idle memory, then hot memory, out to the guest's own swap.
    fn swap_for_room(&mut self, bytes: Bytes, time: &mut Time, room: &mut Room) -> Bytes {
        let left = (self.spec.swap - self.guest_swapped).min(self.used());
        let out = bytes.min(left).min(time.at(GUEST_SWAP_RATE));
        self.guest_swapped += out;
        self.stale += out;
        self.counts.swap_out += out;
        time.wait(out, GUEST_SWAP_RATE);
        self.allocate(out, time, room, false)
    }

    fn deflate_by_itself(
        &mut self,
        bytes: Bytes,
        rate: f64,
        dt_ms: u64,
        time: &mut Time,
        room: &mut Room,
    ) -> Bytes {
        let balloon = self.spec.ram - self.actual;
        let most = Bytes((rate * seconds(dt_ms)) as u64);
        let help = bytes.min(balloon).min(most).min(time.at(rate));
        if help == Bytes::ZERO {
            return help;
        }
        self.actual += help;
        if self.shrinker {
            self.target = self.actual;
        }
        time.wait(help, rate);
        self.allocate(help, time, room, false)
    }

    fn give_up_if_in_vain(&mut self, at_ms: u64) {
        if self.in_vain_ms < OOM_AFTER_MS {
            return;
        }
        self.in_vain_ms = 0;
        self.counts.kills += 1;
        self.kill(at_ms);
    }

    /// The largest process dies: half of what is allocated, back after a while.
    pub fn kill(&mut self, at_ms: u64) {
        self.counts.ooms += 1;
        self.held_down_until = at_ms + RESTART_MS;
        self.held_down_to = self.alloc.share(0.5);
    }

    fn follow_balloon(&mut self, at_ms: u64, dt_ms: u64, room: &mut Room) {
        let up = at_ms >= self.booted_ms + BOOT_MS || self.boots == 0;
        if !up || !self.following {
            return;
        }
        if self.target == self.actual {
            self.following = false;
        } else if self.target > self.actual {
            let most = Bytes((DEFLATE_RATE * seconds(dt_ms)) as u64);
            self.actual += (self.target - self.actual).min(most);
        } else {
            let speed = self.spec.mood.speed(at_ms, self.seed);
            self.inflate(INFLATE_RATE * speed * seconds(dt_ms), dt_ms, room);
        }
    }

    /// The balloon takes free pages, cache as reclaim yields it, and idle memory as
    /// fast as it goes to guest swap; the rest it does not get.
    fn inflate(&mut self, most: f64, dt_ms: u64, room: &mut Room) {
        let step = (self.actual - self.target).min(Bytes(most as u64));
        let mut free = self.make_free(step, false);
        if free < step {
            let quarter = (step - free).min(step.share(0.25));
            free = self.make_free(free + quarter, true).max(free);
        }
        if free < step {
            let idle = (self.used() - self.hot_anon()).min(self.spec.swap - self.guest_swapped);
            let out = (step - free).min(idle).min(Bytes((GUEST_SWAP_RATE * seconds(dt_ms)) as u64));
            self.guest_swapped += out;
            self.stale += out;
            self.counts.swap_out += out;
            free = self.make_free(free + out, false);
        }
        let mut taken = free.min(step);
        // Touched and untouched pages as they come. Distribution kernels zero each
        // page that is allocated, so those that the host has swapped are read first.
        let touched = self.stale.fraction_of(self.free());
        let swapped = self.out.min(self.stale).fraction_of(self.stale) * touched;
        let most = Bytes((SWAP_IN_RATE * seconds(dt_ms)) as u64).min(room.can_swap_in);
        if swapped > 0.0 && taken.share(swapped) > most {
            taken = Bytes((most.0 as f64 / swapped) as u64).min(taken);
        }
        let stale = taken.share(touched).min(self.stale);
        let out = taken.share(swapped).min(self.out);
        room.can_swap_in = room.can_swap_in - out;
        self.counts.host_swap_in += out;
        self.stale = self.stale - stale;
        self.out = self.out - out;
        self.actual = self.actual - taken;
    }

    fn report_free_pages(&mut self, dt_ms: u64) {
        if self.spec.reporting && self.spec.mood != Mood::Pinned {
            let kept = self.free().share(FRAGMENTS);
            let gone = (self.stale - kept).share(REPORTING_SHARE * seconds(dt_ms));
            let out = gone.share(self.out.min(self.stale).fraction_of(self.stale));
            self.stale = self.stale - gone;
            self.out = self.out - out;
        }
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::Curve;
    use proptest::prelude::*;

    fn plenty() -> Room {
        Room {
            free: Bytes::gib(64),
            can_swap_out: Bytes::ZERO,
            can_swap_in: Bytes::gib(1),
            ..Room::default()
        }
    }

    fn lived(guest: &mut Guest, from_ms: u64, seconds: u64) {
        for i in 1..=seconds * 10 {
            guest.live(from_ms + i * 100, 100, &mut plenty());
        }
    }

    fn guest(need: Curve) -> Guest {
        let mut g = Guest::new(0, 1, Spec::new(Bytes::gib(4), Need::of(need)));
        g.switch(0);
        g
    }

    #[test]
    fn free_memory_is_given_to_the_balloon_at_its_rate_and_frees_what_was_touched() {
        let mut g = guest(Curve::flat(Bytes::gib(1)));
        g.stale = Bytes::gib(2);
        lived(&mut g, 0, 5);
        let before = g.resident();
        g.order(Bytes::gib(2));
        lived(&mut g, 5_000, 1);
        assert!(g.actual.abs_diff(Bytes::gib(3)) < Bytes::mib(2), "{}", g.actual);
        lived(&mut g, 6_000, 2);
        assert_eq!(g.actual, Bytes::gib(2));
        assert!(before - g.resident() > Bytes::mib(600), "{} {}", before, g.resident());
        assert_eq!(g.counts.stall_ms, 0.0);
    }

    #[test]
    fn a_balloon_stops_at_what_is_in_use() {
        let mut g = guest(Curve::flat(Bytes::gib(3)));
        lived(&mut g, 0, 10);
        g.order(Bytes::gib(1));
        lived(&mut g, 10_000, 10);
        assert!(g.actual > Bytes::gib(3) && g.actual < Bytes::mib(3200), "{}", g.actual);
    }

    #[test]
    fn one_that_cannot_help_itself_kills_and_one_that_can_waits() {
        let grown = |deflate_on_oom| {
            let mut g = guest(Curve::burst(20_000, 60_000, Bytes::gib(3)));
            g.spec.deflate_on_oom = deflate_on_oom;
            g.order(Bytes::gib(1));
            lived(&mut g, 0, 60);
            (g.counts.ooms, g.counts.stall_ms, g.alloc)
        };
        let (ooms, _, _) = grown(false);
        assert!(ooms > 0);
        let (ooms, stall, alloc) = grown(true);
        assert_eq!((ooms, alloc), (0, Bytes::gib(3)));
        // 2 GiB at 100 MB/s.
        assert!((20_000.0..24_000.0).contains(&stall), "{stall}");
    }

    #[test]
    fn one_that_waits_for_the_host_neither_swaps_nor_helps_itself() {
        let mut g = guest(Curve::flat(Bytes::gib(3)));
        g.spec.swap = Bytes::gib(1);
        (g.actual, g.target) = (Bytes::mib(3500), Bytes::mib(3500));
        for i in 1..=50 {
            g.live(i * 100, 100, &mut Room::default());
        }
        assert_eq!((g.actual, g.counts.swap_out, g.counts.ooms), (g.target, Bytes::ZERO, 0));
        assert!(g.counts.host_stall_ms > 4_900.0, "{:?}", g.counts);
    }

    #[test]
    fn dropped_files_are_read_again_and_waited_for() {
        let mut g = guest(Curve::flat(Bytes::mib(100)));
        g.spec.need.files = Curve::flat(Bytes::gib(2));
        lived(&mut g, 0, 20);
        assert_eq!((g.hot_cache, g.counts.stall_ms), (Bytes::gib(2), 0.0));
        g.order(Bytes::gib(1));
        lived(&mut g, 20_000, 20);
        assert!(g.counts.stall_ms > 5_000.0 && g.counts.refaults > 1000);
        let before = g.counts.stall_ms;
        g.order(Bytes::gib(4));
        lived(&mut g, 40_000, 20);
        let took = g.counts.stall_ms - before;
        assert!((2_000.0..8_000.0).contains(&took), "{took}");
    }

    #[test]
    fn hot_pages_swapped_out_by_the_host_stall_the_guest_and_idle_ones_do_not() {
        let mut g = guest(Curve::flat(Bytes::gib(2)));
        lived(&mut g, 0, 10);
        g.swap_out(Bytes::gib(1));
        lived(&mut g, 10_000, 5);
        assert_eq!(g.counts.host_stall_ms, 0.0, "the idle half");
        g.swap_out(Bytes::mib(200));
        lived(&mut g, 15_000, 5);
        assert!((1_000.0..1_200.0).contains(&g.counts.host_stall_ms), "{:?}", g.counts);
        assert_eq!(g.counts.host_swap_in, Bytes::mib(200));
    }

    proptest! {
        #[test]
        fn bytes_are_conserved_whatever_is_ordered(
            seed in any::<u64>(), orders in proptest::collection::vec(0u64..5000, 1..40),
            swap in 0u64..1000, free in 0u64..4000, deflate in any::<bool>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut need = Need::of(Curve::phases(&mut rng, 200_000, Bytes::mib(50), Bytes::gib(4)));
            need.files = Curve::phases(&mut rng, 200_000, Bytes::ZERO, Bytes::gib(2));
            need.stream = 30e6;
            let mut spec = Spec::new(Bytes::gib(4), need);
            spec.swap = Bytes::mib(swap);
            spec.deflate_on_oom = deflate;
            let mut g = Guest::new(0, seed, spec);
            g.switch(0);
            for (i, to) in orders.iter().enumerate() {
                g.order(Bytes::mib(*to));
                if i % 3 == 0 {
                    let cold: Bytes = g.by_coldness().into_iter().sum();
                    prop_assert_eq!(cold, g.resident());
                    g.swap_out(cold.share(0.3));
                }
                for s in 0..20 {
                    let mut room = Room {
                        free: Bytes::mib(free) - g.resident(),
                        can_swap_in: Bytes::mib(50),
                        ..Room::default()
                    };
                    let before = (room.free, g.resident());
                    g.live(i as u64 * 2_000 + s * 100, 100, &mut room);
                    // What became resident came out of the room.
                    prop_assert!(g.resident() <= before.1 + (before.0 - room.free) + Bytes(64));
                    prop_assert!(g.touched() <= g.actual + Bytes(64), "{g:?}");
                    prop_assert!(g.out <= g.touched());
                    prop_assert!(g.actual <= g.spec.ram);
                    prop_assert!(g.guest_swapped <= g.spec.swap.min(g.alloc));
                    prop_assert!(g.counts.host_stall_ms <= g.counts.stall_ms + 1.0);
                }
            }
        }
    }
}
