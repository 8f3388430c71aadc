//! One guest, understood: what it needs, what it could spare, when it is short,
//! and how far its numbers can be trusted.
//!
//! Everything a guest says is a hint from a party that may be late, wrong or
//! hostile. It comes from the balloon's statistics or, in tier guest, from the
//! module's facts block; both are [`GuestStats`] here. What is believed is bounded
//! by what the host knows itself: the VM's size, what the host holds for it, the
//! free-page map, and the results of earlier orders.

use serde::{Deserialize, Serialize};

use crate::sample::{GuestStats, VmSample};
use crate::state::{GuestRates, VmMemory};
use crate::units::{Bytes, PAGE};

/// Statistics older than this are not believed, milliseconds. Ebb has QEMU ask
/// every two seconds; a guest that misses two questions hangs, or has no working driver.
pub const STALE_MS: u64 = 5_000;
/// From this age on they are believed less and less, and nothing is taken by them.
pub const FRESH_MS: u64 = 2_500;

/// A guest's own numbers, put in relation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GuestModel {
    /// What it could use without harm to itself (`MemAvailable`).
    pub available: Bytes,
    /// What it cannot do without: size less available.
    pub need: Bytes,
    /// The most that it needed in the last half hour, as far as Ebb has seen it.
    pub highest: Bytes,
    /// What is left to it beyond its need when it is asked gently.
    pub buffer: Bytes,
    /// Whether it can deflate its balloon itself before it kills a process.
    pub deflate_on_oom: bool,
    /// Below this much available memory it is short.
    pub short_mark: Bytes,
    /// How old the numbers are, milliseconds.
    pub age_ms: u64,
    pub rates: Option<GuestRates>,
    /// Need and the part of its page cache that it reads again and again.
    pub working_set: Bytes,
    /// Page cache, where it tells.
    pub cache: Bytes,
    /// Size less working set.
    pub idle: Bytes,
    /// The numbers are those of the module in the guest, not of the balloon.
    pub by_module: bool,
}

/// How far a guest's numbers are believed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trust {
    /// 1: fully. Less: asked in smaller steps and left a larger buffer. 0: not
    /// asked at all.
    pub level: f64,
    /// What speaks against it, for people; empty at 1.
    pub why: String,
}

impl Default for Trust {
    fn default() -> Trust {
        Trust { level: 1.0, why: String::new() }
    }
}

impl Trust {
    fn lower(&mut self, to: f64, why: impl FnOnce() -> String) {
        if to < self.level {
            *self = Trust { level: to, why: why() };
        }
    }
}

impl GuestModel {
    pub(super) fn new(
        (ram, actual): (Bytes, Bytes),
        deflate_on_oom: bool,
        stats: &GuestStats,
        m: &VmMemory,
        rates: Option<GuestRates>,
    ) -> Option<GuestModel> {
        if stats.age_ms > STALE_MS {
            return None;
        }
        // MemAvailable where the guest tells it (Linux 4.6+), else what is free.
        // No guest has more available than its size.
        let said = stats.available.or(stats.free)?.min(actual);
        // Its balloon may have moved since it spoke.
        let need = m.need().unwrap_or(actual - said).min(actual);
        let available = actual - need;
        let cache = stats.caches.unwrap_or_default().min(actual);
        // No more cache can be given up than is counted as available.
        let hot = m.hot.bytes.min(cache).min(available);
        let working_set = need + hot;
        // What a guest can touch before Ebb can answer. One that can deflate its
        // balloon itself waits meanwhile; one that cannot would kill processes.
        let burst = if deflate_on_oom { ram.share(0.12) } else { ram.share(0.25) };
        Some(GuestModel {
            available,
            need,
            highest: m.recent.highest(),
            buffer: need.share(0.25).max(burst).max(Bytes::mib(32)).min(Bytes::gib(2)),
            deflate_on_oom,
            short_mark: ram.share(0.04).max(Bytes::mib(16)).min(Bytes::gib(1)),
            age_ms: stats.age_ms,
            rates,
            working_set,
            cache,
            idle: actual - working_set,
            by_module: stats.refaults.is_some(),
        })
    }
}

/// How far a growing need is extrapolated, seconds: statistics are late by up to one
/// tick, and giving back takes one more.
pub(crate) const AHEAD_S: f64 = 1.5;

impl GuestModel {
    /// What it will need in a moment, at the rate its need grows. It is expected to stop where
    /// it stopped before, if it has not passed that.
    pub fn soon(&self) -> Bytes {
        self.after(AHEAD_S)
    }

    /// What it will need this many seconds from now, as [`GuestModel::soon`].
    pub(crate) fn after(&self, seconds: f64) -> Bytes {
        let grown = Bytes((self.rates.map_or(0.0, |r| r.need.max(0.0)) * seconds) as u64);
        let soon = self.need + grown;
        if self.highest > self.need { soon.min(self.highest) } else { soon }
    }
}

/// No Linux guest can do with less: its page structures alone are 1.6 % of RAM,
/// and they are never available.
const LEAST_NEED: f64 = 0.01;
/// Sources that are read one after the other differ by what moved meanwhile.
const SLACK_SHARE: f64 = 0.10;

/// Whether a guest claims more available memory than can be: by its free memory and its cache, as
/// slabs are a small part of the rest, or by the most that its VM had when it may have spoken.
pub(crate) fn claims_too_much(vm: &VmSample, stats: &GuestStats, most: Option<Bytes>) -> bool {
    let Some(ram) = vm.ram.or(vm.balloon.as_ref().map(|b| b.actual)) else { return false };
    let parts = free_and_cache(stats).map_or(ram, |parts| parts + ram.share(0.25) + slack(ram));
    let possible = parts.min(most.unwrap_or(ram) - ram.share(LEAST_NEED));
    stats.available.is_some_and(|claim| claim > possible)
}

/// What of its claim is believed where it claims too much: it neither keeps the guest from being
/// asked, nor hides what it uses.
pub(crate) fn free_and_cache(stats: &GuestStats) -> Option<Bytes> {
    Some((stats.free? + stats.caches?).min(stats.available?))
}

fn slack(ram: Bytes) -> Bytes {
    ram.share(SLACK_SHARE).max(Bytes::mib(64))
}

/// What in a guest's statistics cannot be, if anything: bounded by its size (the least and the
/// most that it had when it may have spoken), by the map of its free pages, by what the
/// host holds for it.
pub(crate) fn implausible(
    vm: &VmSample,
    stats: &GuestStats,
    (least, most): (Bytes, Bytes),
) -> Option<String> {
    let ram = vm.ram.unwrap_or(most);
    let available = stats.available.or(stats.free)?;
    let slack = slack(ram);
    if available > most + slack {
        return Some(format!("{available} available of {most}"));
    }
    if available + ram.share(LEAST_NEED) > most {
        return Some(format!("{available} available of {most}: no kernel can do with the rest"));
    }
    let map = vm.agent.as_ref().filter(|a| a.is_ready());
    // The balloon's numbers are up to a second older than the map, and so are facts that stand still.
    let is_now = stats.refaults.is_some() && stats.age_ms == 0;
    let apart = if is_now { slack } else { slack + slack };
    if let (Some(free), Some(in_map)) = (stats.free, map.and_then(|a| a.free))
        && stats.age_ms <= 1_000
        && free > in_map + apart
    {
        return Some(format!("{free} free, but {in_map} by its map of free pages"));
    }
    uses_too_much(vm, stats, least)
}

/// How the guest's need contradicts what the host holds for it, for people. `least`: the smallest
/// size that it had when it may have spoken.
pub(crate) fn uses_too_much(vm: &VmSample, stats: &GuestStats, least: Bytes) -> Option<String> {
    let ram = vm.ram.unwrap_or(least);
    let (available, slack) = (stats.available.or(stats.free)?, slack(ram));
    // Huge pages of a pool are in no process's count, nor is shared memory in swap.
    let process = vm.process.filter(|p| vm.pinned.is_none() && !p.is_shared())?;
    let host_side = process.resident() + process.swap;
    // What it used it has touched: it is in DRAM or in swap (or merged zeroes).
    if least - available > host_side + ram.share(0.25) + slack {
        return Some(format!("{} in use, but the host holds {host_side}", least - available));
    }
    None
}

/// After this many contradictions in a row a guest is not asked any more.
const DOUBTS: u32 = 2;

/// Whether it contradicted what is known so often that it is not believed at all.
pub(super) fn is_disbelieved(m: &VmMemory) -> bool {
    m.doubt.as_ref().is_some_and(|d| d.times >= DOUBTS)
}

/// How far this guest is believed now.
pub(super) fn trust(guest: Option<&GuestModel>, m: &VmMemory) -> Trust {
    let mut trust = Trust::default();
    if let Some(g) = guest.filter(|g| g.age_ms > FRESH_MS) {
        let over = (g.age_ms - FRESH_MS) as f64 / (STALE_MS - FRESH_MS) as f64;
        trust.lower(1.0 - 0.5 * over.min(1.0), || format!("its numbers are {} ms old", g.age_ms));
    }
    if m.harm > 0 {
        trust.lower(1.0 / f64::from(1 + m.harm), || {
            format!("{} times lately it was short soon after it had been asked", m.harm)
        });
    }
    if let Some(d) = &m.doubt {
        let level = if is_disbelieved(m) { 0.0 } else { 0.5 };
        trust.lower(level, || format!("it claims {}", d.what));
    }
    trust
}

/// Major faults a second that count as thrash where memory is also tight.
const MAJOR_FAULTS_MARK: f64 = 100.0;
/// Swapping in or out, bytes a second, likewise.
const SWAP_MARK: f64 = (1 << 20) as f64;
/// Reading again what was just reclaimed, pages a second, likewise: 8 MiB/s.
const REFAULTS_MARK: f64 = 2048.0;
/// The signs that a guest is short; empty when it is not. While a balloon grows
/// its own driver stalls, reclaims and swaps out, which is no sign. `owed`: what Ebb has of it.
pub(super) fn distress(g: &GuestModel, owed: Bytes, inflating: bool) -> String {
    if g.available < g.short_mark {
        return format!("{} available, below its mark of {}", g.available, g.short_mark);
    }
    let Some(r) = g.rates else { return String::new() };
    // Programs that start and files that are read page in as well. It is short where what is
    // left beyond its need, and beyond the cache that it reads again and again, is little.
    let tight = g.idle < g.buffer;
    let rate = |is: bool, rate: f64| is.then_some(Bytes(rate as u64));
    // A process that its own cgroup's limit kills is counted, too. Before the kernel kills one for
    // want of the guest's memory, it takes back what the balloon has, where it may, and page cache.
    let lost = tight || !g.deflate_on_oom && owed > Bytes::ZERO && g.cache < g.short_mark;
    let grows = g.need + g.available < g.soon() + g.short_mark;
    let reread = r.refaults * PAGE as f64;
    let signs = [
        (lost && r.oom_kills > 0)
            .then(|| format!("{} processes killed for lack of memory", r.oom_kills)),
        rate(grows, r.need).map(|b| format!("{} available, need grows by {b}/s", g.available)),
        rate(tight && r.swap_in >= SWAP_MARK, r.swap_in).map(|b| format!("swapping in {b}/s")),
        rate(tight && r.swap_out >= SWAP_MARK && !inflating, r.swap_out)
            .map(|b| format!("swapping out {b}/s")),
        rate(tight && r.refaults >= REFAULTS_MARK, reread)
            .map(|b| format!("reads again {b}/s that it had dropped")),
        (tight && r.major_faults >= MAJOR_FAULTS_MARK)
            .then(|| format!("{:.0} major faults a second", r.major_faults)),
        (tight && r.alloc_stalls >= 1.0 && !inflating)
            .then(|| format!("{:.0} allocation stalls a second", r.alloc_stalls)),
    ];
    signs.into_iter().flatten().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{AgentSample, BalloonSample, ProcessMemory};
    use crate::state::{Doubt, Hot};
    use crate::wire::AgentState;

    const OWED: Bytes = Bytes::mib(1);

    fn stats(available_mib: u64) -> GuestStats {
        GuestStats { available: Some(Bytes::mib(available_mib)), ..GuestStats::default() }
    }

    /// With these rates; its buffer is 200 MiB.
    fn guest(available: u64, idle: u64, rates: GuestRates) -> GuestModel {
        let [available, idle, buffer, short_mark] = [available, idle, 200, 40].map(Bytes::mib);
        let more = GuestModel { buffer, short_mark, ..GuestModel::default() };
        GuestModel { available, idle, rates: Some(rates), ..more }
    }

    #[test]
    fn absurd_and_stale_guest_numbers_are_bounded_or_refused() {
        let ram = Bytes::gib(1);
        let lie = GuestStats { available: Some(Bytes(u64::MAX)), ..GuestStats::default() };
        let new = VmMemory::default();
        let g = GuestModel::new(GIB, true, &lie, &new, None).unwrap();
        assert_eq!((g.available, g.need), (ram, Bytes::ZERO));
        let careful = GuestModel::new(GIB, false, &lie, &new, None).unwrap();
        assert!(careful.buffer > g.buffer.share(2.0), "it cannot deflate itself");
        let stale = GuestStats { age_ms: STALE_MS + 1, ..lie };
        assert_eq!(GuestModel::new(GIB, true, &stale, &new, None), None);
        assert_eq!(GuestModel::new(GIB, true, &GuestStats::default(), &new, None), None);
    }

    #[test]
    fn cache_that_is_read_again_belongs_to_the_working_set() {
        let stats = GuestStats { caches: Some(Bytes::mib(300)), ..stats(600) };
        let set = |mib| {
            let hot = Hot { bytes: Bytes::mib(mib), ..Hot::default() };
            let m = VmMemory { hot, ..VmMemory::default() };
            let g = GuestModel::new(GIB, true, &stats, &m, None).unwrap();
            (g.working_set.0 >> 20, g.idle.0 >> 20)
        };
        assert_eq!(set(0), (424, 600));
        assert_eq!(set(100), (524, 500));
        assert_eq!(set(1000), (724, 300), "never more than there is cache");
    }

    const GIB: (Bytes, Bytes) = (Bytes::gib(1), Bytes::gib(1));

    fn sample(stats: GuestStats) -> VmSample {
        let (actual, guest) = (GIB.0, Some(stats));
        let process = Some(ProcessMemory { anon: actual, ..ProcessMemory::default() });
        let balloon = Some(BalloonSample { actual, guest, ..BalloonSample::default() });
        VmSample { ram: Some(actual), process, balloon, ..VmSample::default() }
    }

    #[test]
    fn what_cannot_be_is_told_from_what_can() {
        let full = |free: u64, caches: u64, available: u64| GuestStats {
            free: Some(Bytes::mib(free)),
            caches: Some(Bytes::mib(caches)),
            ..stats(available)
        };
        let says = |s: GuestStats| implausible(&sample(s), &s, GIB).unwrap_or_default();
        assert_eq!(says(full(500, 300, 790)), "");
        assert_eq!(says(stats(900)), "", "most of it idle");
        assert!(says(stats(1024)).contains("no kernel"), "{}", says(stats(1024)));
        assert!(says(stats(1020)).contains("no kernel"));
        assert!(says(stats(4000)).contains("available of"));
        assert_eq!(says(GuestStats::default()), "", "one that says nothing does not lie");
    }

    #[test]
    fn of_a_claim_so_much_is_believed_as_free_memory_and_cache_allow() {
        let says = |free, caches, available| {
            let (free, caches) = (Some(Bytes::mib(free)), Some(Bytes::mib(caches)));
            let s = GuestStats { free, caches, ..stats(available) };
            let too_much = claims_too_much(&sample(s), &s, Some(Bytes::mib(1000)));
            too_much.then(|| free_and_cache(&s).unwrap())
        };
        assert_eq!(says(100, 100, 540), None, "the rest may be slabs");
        assert_eq!(says(100, 100, 1024), Some(Bytes::mib(200)));
        assert_eq!(says(600, 100, 980), None);
        assert_eq!(says(600, 100, 995), Some(Bytes::mib(700)), "no kernel can do with 5 MiB");
        assert_eq!(says(900, 100, 995), Some(Bytes::mib(995)), "never more than it claims");
        assert_eq!(free_and_cache(&stats(1024)), None, "nothing to compare with");
    }

    #[test]
    fn a_guest_whose_map_and_statistics_disagree_is_not_believed() {
        let s = GuestStats { free: Some(Bytes::mib(600)), caches: Some(Bytes::ZERO), ..stats(600) };
        let mut vm = sample(s);
        let agent = |free| AgentSample { free: Some(Bytes::mib(free)), ..AgentSample::ready(0) };
        vm.agent = Some(agent(550));
        assert_eq!(implausible(&vm, &s, GIB), None, "within what moves between two readings");
        vm.agent = Some(agent(100));
        assert!(implausible(&vm, &s, GIB).unwrap().contains("by its map"));
        let fact = |age_ms| GuestStats { refaults: Some(0), age_ms, ..s };
        assert!(implausible(&vm, &fact(300), GIB).is_some());
        // It may have taken that since.
        vm.agent = Some(agent(440));
        assert!(implausible(&vm, &fact(0), GIB).is_some());
        assert_eq!(implausible(&vm, &fact(300), GIB), None);
        vm.agent = Some(AgentSample { state: AgentState::Silent, ..agent(100) });
        assert_eq!(implausible(&vm, &s, GIB), None, "a map that does not hold proves nothing");
    }

    #[test]
    fn a_guest_cannot_use_what_the_host_does_not_hold() {
        let s = stats(100);
        let mut vm = sample(s);
        let mut says = |anon, swap, shmem| {
            let [anon, swap, shmem] = [anon, swap, shmem].map(Bytes::mib);
            vm.process = Some(ProcessMemory { anon, swap, shmem, ..ProcessMemory::default() });
            implausible(&vm, &s, GIB)
        };
        assert!(says(300, 0, 0).unwrap().contains("the host holds 300 MiB"));
        assert_eq!(says(300, 500, 0), None);
        // The rest may be in swap, or touched by a device in another process.
        assert_eq!(says(0, 0, 300), None);
    }

    #[test]
    fn trust_falls_with_age_doubt_and_harm() {
        let g = |age_ms| GuestModel { age_ms, ..GuestModel::default() };
        let level = |age, m: VmMemory| trust(Some(&g(age)), &m).level;
        assert_eq!(level(2_000, VmMemory::default()), 1.0);
        assert_eq!(level(5_000, VmMemory::default()), 0.5);
        assert_eq!(level(0, VmMemory { harm: 1, ..VmMemory::default() }), 0.5);
        let doubt = |times| {
            let doubt = Some(Doubt { times, what: "x".into(), ..Doubt::default() });
            VmMemory { doubt, ..VmMemory::default() }
        };
        assert_eq!((level(0, doubt(1)), level(0, doubt(2))), (0.5, 0.0));
        assert_eq!(trust(None, &doubt(2)).why, "it claims x");
    }

    #[test]
    fn a_guest_that_has_enough_and_reads_files_is_not_short() {
        let reads = GuestRates {
            major_faults: 150.0,
            swap_in: (5 << 20) as f64,
            refaults: 9000.0,
            alloc_stalls: 3.0,
            ..GuestRates::default()
        };
        let with = |idle| distress(&guest(900, idle, reads), OWED, false);
        assert_eq!(with(200), "");
        assert!(with(199).contains("swapping in"), "most of that is cache in use");
    }

    #[test]
    fn reads_of_files_that_a_guest_counts_as_page_ins_are_none() {
        let at = |faults, is_windows| GuestStats {
            major_faults: Some(faults),
            swap_in: Some(Bytes::mib(faults)),
            is_windows,
            ..stats(100)
        };
        let rates = |is_windows| {
            let (was, now) = (at(0, is_windows), at(500, is_windows));
            let mut memory = crate::state::Memory::default();
            for (ms, s) in [(1000, was), (2000, now)] {
                let (at, vms) = (crate::units::Stamp(ms), vec![sample(s)]);
                memory.observe(&crate::sample::Sample { at, vms, ..Default::default() });
            }
            let r = memory.vms[0].rates.unwrap();
            (r.major_faults, r.swap_in > 0.0, r.refaults)
        };
        assert_eq!(rates(false), (500.0, true, 4000.0));
        assert_eq!(rates(true), (0.0, false, 0.0), "Windows");
        let windows = GuestStats { is_windows: true, ..stats(100) };
        let deflates = |guest| {
            let (deflate_on_oom, guest) = (Some(true), Some(guest));
            BalloonSample { deflate_on_oom, guest, ..BalloonSample::default() }.deflates_on_oom()
        };
        assert!(deflates(stats(100)) && !deflates(windows));
    }

    #[test]
    fn stalls_of_the_balloon_driver_are_no_distress_refaults_are() {
        let g = |rates| guest(100, 0, rates);
        let stalls = GuestRates { alloc_stalls: 5.0, ..GuestRates::default() };
        assert!(distress(&g(stalls), OWED, false).contains("allocation stalls"));
        assert_eq!(distress(&g(stalls), OWED, true), "");
        let refaults = GuestRates { refaults: 4096.0, ..GuestRates::default() };
        assert!(distress(&g(refaults), OWED, true).contains("reads again 16 MiB/s"));
        let calm = GuestRates { refaults: 100.0, ..GuestRates::default() };
        assert_eq!(distress(&g(calm), OWED, false), "");
    }

    #[test]
    fn one_that_swaps_out_while_its_balloon_stands_still_is_short() {
        let rates = GuestRates { swap_out: (4 << 20) as f64, ..GuestRates::default() };
        let g = guest(150, 150, rates);
        assert_eq!(distress(&g, OWED, false), "swapping out 4 MiB/s");
        assert_eq!(distress(&g, OWED, true), "", "for the balloon");
        assert_eq!(distress(&GuestModel { idle: g.buffer, ..g }, OWED, false), "", "it has enough");
    }

    /// Its kernel counts processes that the limit of a cgroup in it kills as well.
    #[test]
    fn a_kill_counts_where_the_guest_may_have_been_short() {
        let killed = GuestRates { oom_kills: 1, ..GuestRates::default() };
        let says = |idle, cache, owed, deflate_on_oom| {
            let (available, buffer) = (Bytes::mib(600), Bytes::mib(128));
            let (idle, cache) = (Bytes::mib(idle), Bytes::mib(cache));
            let (short_mark, rates) = (Bytes::mib(41), Some(killed));
            let more = GuestModel { deflate_on_oom, rates, ..GuestModel::default() };
            let g = GuestModel { available, idle, buffer, cache, short_mark, ..more };
            !distress(&g, Bytes::mib(owed), false).is_empty()
        };
        assert!(says(100, 400, 100, true), "it has little left");
        assert!(!says(600, 10, 0, false), "it has all that it may");
        assert!(!says(600, 10, 100, true), "it would have taken back what the balloon has");
        assert!(!says(600, 400, 100, false), "it would have dropped its page cache");
        assert!(says(600, 10, 100, false), "the dead process may have had what is free now");
    }
}
