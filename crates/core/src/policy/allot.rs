//! How much memory each guest is to have: one rule for all states of the host.
//!
//! What a guest needed a moment ago it is likely to need again; what it needed an hour ago, it
//! is not. So memory goes to the needs of the last T seconds, and T is as long as the host
//! allows: the longest time for which all peaks, least margins and what the host keeps at
//! least fit together. The host's own part counts as a guest's does: what others than VMs used
//! within T they are likely to use again. So where T is short the oldest peaks go first, as in
//! any LRU list, and no period of a load is built in.
//!
//! Before any peak comes what guests can grow by before Ebb sees it: as fast as each grew lately, for
//! as long as its answers are late. Together they have no more of it than lets them need as much
//! as they needed at one moment lately.
//!
//! Peaks come before margins: a guest that is below its peak has its margin and its page cache
//! there. Only when all peaks of half an hour fit, margins and the host's part grow, by the same
//! share. Where not even needs and least margins fit, both shrink by the same share. These levels
//! are one scale; what is left beyond a level goes, by the same share, to what each guest would
//! have at the next.
//!
//! A stock guest does not report which part of its page cache it reads again. So part of the
//! cache counts as needed, and the host takes cache only while its headroom is below the lower
//! part of its reserve; above that it takes free memory only.

use crate::model::{GuestModel, Model, Standing, VmModel};
use crate::policy::balloon::CALM_MS;
use crate::policy::take::brings_nothing;
use crate::state::{Memory, VmMemory};
use crate::units::{Bytes, Stamp};

/// The times T beside zero: the one of number n is [`BASE_MS`] · [`LONGER`]ⁿ, milliseconds. The
/// last, of number [`TIMES`], is half an hour.
const TIMES: i32 = 48;
const LONGER: f64 = 1.2;
const BASE_MS: f64 = 300.0;
/// Levels below T = 0, at which margins shrink to [`SQUEEZED`] of the least ones and the host keeps
/// as much less. Without swap there are as many below those: margins shrink on to [`LEAST_SHARE`],
/// whatever the weight, as the host's OOM killer would be next. Above the last T there are levels
/// at which both grow to [`MARGIN_MOST`] buffers and to [`CACHE_PART`] of the reserve.
const SQUEEZES: i32 = 8;
const SQUEEZED: f64 = 0.4;
/// Levels between T = 0 and the first T, at which guests have more and more of what they can grow
/// by before that is seen.
const UNSEEN: i32 = 8;
/// What passes, milliseconds, until a guest has memory after its answer: a tick and an order.
const REACTION_MS: f64 = 200.0;
/// No VM has less than this share of its least margin, however small its weight.
const LEAST_SHARE: f64 = 0.2;
const COMFORTS: i32 = 12;
/// The numbers of the level with the longest T, and of the highest one.
const LONGEST: i32 = UNSEEN + TIMES;
const HIGHEST: i32 = LONGEST + COMFORTS;
/// From this comfort level on all of the page cache that is kept counts beside the peaks.
const CACHED: i32 = 2;
const MARGIN_MOST: f64 = 3.0;
/// The level up to which a guest is given memory before it asks is this far below the level that
/// it keeps: half of T.
const APART: i32 = 4;
/// A guest whose need has grown by this share of RAM since it was asked is given its whole part:
/// its balloon turns with its need.
const GROWN: f64 = 0.1;
/// Guests are brought to what they needed within this before they ask, and others may be
/// squeezed for it.
const ASSURED_MS: u64 = 5_000;
/// Cache that is read again counts in whole from this T on: a guest's statistics are as old as
/// that.
const HOT_MS: u64 = 2_000;
/// The page cache that a guest had lately counts as read again, whatever it reports, up to this
/// share of RAM. What it has now would tell little: one whose cache was taken would count less than
/// one that was left its own.
const CACHE_SHARE: f64 = 0.35;
/// Linux calls some page cache needed: it would be read again at once (`si_mem_available`).
const CACHE_NEEDED: f64 = 0.1;
/// The part of the reserve for which guests give up page cache: where free swap is at least the
/// first part of the reserve, and where it is less.
const CACHE_PART: (f64, f64) = (0.5, 0.75);
/// The part of the reserve that the host keeps in any case, with swap and without.
const HOST_LEAST: (f64, f64) = (0.2, 0.3);
/// Each VM that starts is kept this much of what it was promised, and guests may be squeezed for it:
/// it may touch that before balloons have brought more.
const STARTS_WITH: Bytes = Bytes::mib(512);
/// The least margin of a guest, in units of its short mark.
pub(super) const LEAST_MARKS: f64 = 1.5;
/// The share of its buffer that a guest keeps in any case which cannot deflate its balloon itself.
const RIGID_SHARE: f64 = 0.3;

/// How much memory all guests are to have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Level {
    /// T: needs of this age count, milliseconds.
    within_ms: u64,
    /// The share of its least margin that a guest has.
    least: f64,
    /// How far that is [`LEAST_SHARE`] instead, whatever the weight, 0 to 1.
    bare: f64,
    /// The share of its buffer that it has beyond that.
    more: f64,
    /// How far the host's part is from [`HOST_LEAST`]: at 1 it is [`CACHE_PART`], at -1 nothing.
    host: f64,
    /// How much of its page cache a guest has beside its peak.
    cache: f64,
    /// How much it has of what it can grow by before that is seen.
    unseen: f64,
}

impl Level {
    /// What is needed now, and least margins.
    pub(super) const NOW: Level = Level {
        within_ms: 0,
        least: 1.0,
        bare: 0.0,
        more: 0.0,
        host: 0.0,
        cache: 0.0,
        unseen: 0.0,
    };
    /// What was needed within a minute, and whole buffers.
    pub(super) const CALM: Level = Level { within_ms: CALM_MS, more: 1.0, ..Level::NOW };

    /// The level of this number, from -2 · [`SQUEEZES`] to [`HIGHEST`].
    fn of(number: i32) -> Level {
        let share = |n: i32, of: i32| f64::from(n.clamp(0, of)) / f64::from(of);
        let squeezed = share(-number, SQUEEZES);
        let beyond = number - LONGEST;
        let comfort = share(beyond, COMFORTS);
        let times = (number - UNSEEN).min(TIMES);
        Level {
            within_ms: if times <= 0 { 0 } else { (BASE_MS * LONGER.powi(times)) as u64 },
            least: 1.0 - squeezed * (1.0 - SQUEEZED),
            bare: share(-number - SQUEEZES, SQUEEZES),
            more: comfort * MARGIN_MOST,
            host: if squeezed > 0.0 { -squeezed * (1.0 - SQUEEZED) } else { comfort },
            cache: share(beyond, CACHED),
            unseen: share(number, UNSEEN),
        }
    }

    /// The share of its least margin that this VM has: with twice the weight it lacks half as much.
    fn least_of(&self, vm: &VmModel) -> f64 {
        let share = (1.0 - (1.0 - self.least) / weight(vm)).max(LEAST_SHARE);
        share - self.bare * (share - LEAST_SHARE)
    }
}

/// A VM's weight, within the bounds in which it counts.
pub(super) fn weight(vm: &VmModel) -> f64 {
    vm.weight.clamp(0.1, 10.0)
}

/// What a guest is to have at a level without what it can grow by before that is seen.
pub(super) fn want(at: Stamp, vm: &VmModel, g: &GuestModel, m: &VmMemory, level: Level) -> Bytes {
    want_with(at, vm, g, m, (level, Bytes::ZERO))
}

/// The same with that, as far as the level has it.
fn want_with(
    at: Stamp,
    vm: &VmModel,
    g: &GuestModel,
    m: &VmMemory,
    (level, unseen): (Level, Bytes),
) -> Bytes {
    // With twice the weight needs age half as fast.
    let within_ms = (level.within_ms as f64 * weight(vm)) as u64;
    let level = Level { least: level.least_of(vm), ..level };
    let least = g.short_mark.share(LEAST_MARKS);
    let full = g.buffer.max(least);
    // Doubt asks for more only where there is more: else all would be squeezed for it.
    let doubt = 2.0 - vm.trust.level.clamp(0.0, 1.0);
    let rigid = if g.deflate_on_oom { 0.0 } else { RIGID_SHARE * level.least };
    let margin = least.share(level.least) + (full - least).share((doubt * level.more).max(rigid));
    let was = m.recent.peak(at, within_ms);
    let cached = g.cache.max(m.cached.highest());
    let usual = cached.min(vm.ram.unwrap_or_default().share(CACHE_SHARE));
    let hot = (g.working_set - g.need).max(usual);
    // Weight says how long a need is remembered. What is read again is needed now.
    let hot = hot.share((level.within_ms as f64 / HOT_MS as f64).min(1.0));
    // One above its ceiling is brought to it no faster than its guest can do without.
    let most = vm.ceiling.max(vm.floor).max(vm.actual.unwrap_or_default());
    // One below its peak has room for its cache there.
    let beside = hot.share(level.cache);
    let unseen = unseen.share(level.unseen);
    // With less than a short mark it is in distress and must be given memory, so none is taken there,
    // but where the host's OOM killer would be next.
    let mark = g.short_mark.share(1.0 - level.bare * (1.0 - LEAST_SHARE * LEAST_MARKS));
    (was + beside).max(g.soon() + margin + hot).max(g.need + unseen + mark).max(vm.floor).min(most)
}

/// What it can grow by before it has memory for that: as fast as it did lately, and no further.
fn unseen_growth(at: Stamp, g: &GuestModel, m: &VmMemory) -> Bytes {
    let ms = REACTION_MS + m.late_ms;
    m.fastest.rate(at).share(ms / 1000.0).min(m.recent.highest() - g.need)
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    /// The size that it is to have at least; what is beyond may be taken.
    pub keeps: Bytes,
    /// The size that it is brought to, where the host has it.
    pub good: Bytes,
    /// The size that it is brought to in any case: others may be squeezed for it.
    pub assured: Bytes,
    /// One that is short gets no more for comfort: not even all needs and least margins fit.
    pub most: Option<Bytes>,
}

impl Part {
    /// The smaller of each size.
    pub(super) fn least(&self, other: &Part) -> Part {
        Part {
            keeps: self.keeps.min(other.keeps),
            good: self.good.min(other.good),
            assured: self.assured.min(other.assured),
            most: self.most.into_iter().chain(other.most).min(),
        }
    }
}

/// What all are to have.
#[derive(Clone, Debug, Default)]
pub(super) struct Allotment {
    /// By VM; `None`: nothing is known of its need.
    pub parts: Vec<Option<Part>>,
    /// T, milliseconds: needs that are older do not count.
    pub within_ms: u64,
    /// What guests may come to take by turns, by all that they needed within the longest time.
    pub by_turns: Bytes,
    pub keep: Bytes,
    /// The part of `keep` for which guests give up page cache.
    pub keep_by_cache: Bytes,
    /// What the host lacks to back what all are to have and keep `keep`.
    pub shortage: Bytes,
    /// The same without what paused VMs wait for.
    pub shortage_of_running: Bytes,
    /// What it lacks to back that and keep `keep_by_cache`.
    pub cache_shortage: Bytes,
    /// What guests may still take of what they are to have.
    pub growth: Bytes,
}

/// A VM whose need is known, and what else is known of it.
struct VmNeed<'a> {
    index: usize,
    vm: &'a VmModel,
    g: &'a GuestModel,
    m: &'a VmMemory,
    held: Bytes,
    /// What it needs and the host does not hold: merged, in swap, never touched.
    apart: Bytes,
    /// What it can grow by before that is seen.
    unseen: Bytes,
    /// What it is to have in any case.
    least: Bytes,
    /// The most that a limit inside of this one lets it have.
    most: Bytes,
    /// Nothing can be taken from it.
    fixed: bool,
}

impl VmNeed<'_> {
    /// The most that it needed within this time or will need in a moment, without a margin.
    fn needs(&self, at: Stamp, level: Level) -> Bytes {
        let peak = self.m.recent.peak(at, level.within_ms);
        peak.max(self.g.soon()).min(self.most).max(self.least(level))
    }

    /// What it is to have in any case: of what it must have beyond its need the same share as
    /// others have of their margins.
    fn least(&self, level: Level) -> Bytes {
        let need = self.g.need.min(self.least);
        need + (self.least - need).share(level.least_of(self.vm))
    }

    /// Whether it is given its whole part before it asks. With a module that is not needed: its
    /// refaults show what it lacks.
    fn has_grown(&self) -> bool {
        let grown = self.m.need_then.map_or(Bytes::ZERO, |then| self.g.soon() - then);
        !self.g.by_module && grown >= self.vm.ram.unwrap_or_default().share(GROWN)
    }

    /// The size that it is to have.
    fn wants(&self, at: Stamp, level: Level) -> Bytes {
        let want = want_with(at, self.vm, self.g, self.m, (level, self.unseen));
        want.min(self.most).max(self.least(level))
    }

    /// What the host will hold for it when it needs that, at the size that it has, beyond what the
    /// host holds now. And the same if its page cache stays: then it grows into its free memory,
    /// which the host does not hold yet.
    fn growth(&self, at: Stamp, level: Level) -> (Bytes, Bytes) {
        let needs = self.needs(at, level);
        let stays = if needs > self.g.need { kept_cache(self.g, self.held) } else { Bytes::ZERO };
        let size = self.vm.actual.unwrap_or(needs);
        let grows = |to: Bytes| to.min(size) - self.apart - self.held;
        (grows(needs), grows(needs + stays))
    }

    /// What the host would hold for it at most.
    fn holds(&self, at: Stamp, level: Level) -> Bytes {
        let want = self.wants(at, level) - self.apart;
        match self.fixed {
            false => want,
            true => want.min(self.vm.actual.unwrap_or(want)).max(self.held),
        }
    }
}

/// The page cache that a guest keeps while it has free memory to grow into, of what the host holds
/// of it. What is in swap, or was never there, the host does not hold, whatever the guest says. Some
/// cache counts as needed as well (tmpfs, shared memory).
pub(super) fn kept_cache(g: &GuestModel, held: Bytes) -> Bytes {
    let needed = g.cache.min(held).share(CACHE_NEEDED);
    g.cache.min(g.available).min(held - g.need + needed)
}

/// Divides what the host has. `least`: what each VM is to have in any case; `most_of`: what a limit
/// inside of this one lets it have.
pub(super) fn allot(
    model: &Model,
    memory: &Memory,
    least: &[Bytes],
    most_of: &[Bytes],
) -> Allotment {
    let (at, host) = (model.at, &model.host.shown);
    let need_of = |index: usize| {
        let vm = &model.vms[index];
        // RAM that is pinned is all there, or of a pool of its own.
        let g = vm.guest.as_ref().filter(|_| !vm.outside && vm.pinned.is_none())?;
        let held = vm.guest_held().unwrap_or(vm.actual?).min(vm.actual?);
        let m = memory.of(vm.id);
        let (apart, unseen) = (g.need - held, unseen_growth(at, g, m));
        let fixed = vm.standing != Standing::Ready || brings_nothing(model, vm, m).is_some();
        let (least, most) = (least[index], most_of[index]);
        Some(VmNeed { index, vm, g, m, held, apart, unseen, least, most, fixed })
    };
    let known: Vec<VmNeed<'_>> = (0..model.vms.len()).filter_map(need_of).collect();
    let all = host.headroom + known.iter().map(|c| c.held).sum::<Bytes>();
    let starts = model.vms.iter().filter(|vm| !vm.outside && !vm.paused);
    let soon: Bytes = starts.map(|vm| vm.promised.min(STARTS_WITH)).sum();
    let soon = soon.min(host.promised - host.waiting);
    let keep_of = |part: f64| host.reserve.share(part + 0.5 * host.urgency) + soon;
    let (with_swap, without) = CACHE_PART;
    let swaps = host.swap_left >= host.reserve.share(with_swap);
    let (most, least) = if swaps { (with_swap, HOST_LEAST.0) } else { (without, HOST_LEAST.1) };
    let (others, past) = (model.others(), memory.past(&host.name));
    // What others than VMs needed lately they are likely to need again.
    let keep_at = |level: Level| {
        let part = match level.host {
            more if more > 0.0 => least + (most - least) * more,
            less => least * (1.0 + less),
        };
        keep_of(part) + (past.map_or(others, |l| l.others.peak(at, level.within_ms)) - others)
    };
    // Needs that never came together need no sum.
    let unseen: Bytes = known.iter().map(|c| c.unseen).sum();
    let needs: Bytes = known.iter().map(|c| c.g.need).sum();
    let together = past.map(|l| l.needs.highest()).filter(|sum| *sum > Bytes::ZERO);
    // A VM that came since was in no sum of before.
    let joined = past.map_or(&[][..], |l| &l.joined);
    let joined = known.iter().filter(|c| joined.iter().any(|(id, _)| *id == c.vm.id));
    let beside: Bytes = joined.map(|c| c.m.recent.highest()).sum();
    let together = together.map(|sum| sum + beside);
    let more = together.unwrap_or_default() - needs;
    let share = more.fraction_of(unseen.max(Bytes(1))).min(1.0);
    let level_of = |number| {
        let level = Level::of(number);
        Level { unseen: level.unseen * share, ..level }
    };
    let need = |level| known.iter().map(|c| c.holds(at, level)).sum::<Bytes>() + keep_at(level);
    // The highest level at which all fits.
    let lowest = if swaps { -SQUEEZES } else { -2 * SQUEEZES };
    let (mut fits, mut too_much) = (lowest, HIGHEST + 1);
    while too_much - fits > 1 {
        let middle = (fits + too_much) / 2;
        if need(level_of(middle)) <= all { fits = middle } else { too_much = middle }
    }
    let level = level_of(fits);
    let keep_by_cache = keep_at(level);
    // Only free memory is taken for what a VM touches later that starts, or that is paused.
    let later = host.promised - host.waiting - soon;
    let keep_running = (keep_of(1.0) + later).max(keep_by_cache);
    let keep = (keep_of(1.0) + later + host.waiting).max(keep_by_cache);
    // What is left of it goes the same way to what comes next.
    let next = level_of((fits + 1).min(HIGHEST));
    let (now, then) = (need(level), need(next));
    let part = if then > now { (all - now).fraction_of(then - now).min(1.0) } else { 1.0 };
    let between = |short: Bytes, long: Bytes| short + (long - short).share(part);
    let mut parts = vec![None; model.vms.len()];
    for c in &known {
        let of = |level| c.wants(at, level);
        let keeps = between(of(level), of(next));
        let good = if c.has_grown() { keeps } else { of(level_of((fits - APART).max(lowest))) };
        let within_ms = level.within_ms.min(ASSURED_MS);
        let assured = of(Level { within_ms, more: 0.0, ..level });
        let most = (fits < 0).then_some(keeps);
        parts[c.index] = Some(Part { keeps, good, assured: assured.min(good), most });
    }
    // What they hold and do not need is not free to give either. No more of their peaks came
    // together than was seen; one of them may come beside those.
    let longest = level_of(LONGEST);
    let rises = |c: &VmNeed<'_>| (c.needs(at, longest) - c.apart) - c.held;
    let of_one = known.iter().map(|c| c.needs(at, longest) - c.g.need).max().unwrap_or_default();
    let seen = together.map_or(Bytes(u64::MAX), |sum| (sum - needs) + of_one);
    let by_turns = known.iter().map(rises).sum::<Bytes>().min(seen);
    let all_growth: Vec<_> = known.iter().map(|c| c.growth(at, level)).collect();
    let growth: Bytes = all_growth.iter().map(|(alone, _)| *alone).sum();
    let beside_cache: Bytes = all_growth.iter().map(|(_, beside)| *beside).sum();
    let lacks = |part: Bytes| if model.host.known { part - host.headroom } else { Bytes::ZERO };
    // Balloons take their time: free memory is taken before what guests will touch is missing.
    let shortage_at = |keep: Bytes| lacks((keep + growth).max(keep_by_cache + beside_cache));
    let (shortage, shortage_of_running) = (shortage_at(keep), shortage_at(keep_running));
    let cache_shortage = lacks(keep_by_cache + growth);
    let within_ms = level.within_ms;
    Allotment {
        parts,
        within_ms,
        by_turns,
        keep,
        keep_by_cache,
        shortage,
        shortage_of_running,
        cache_shortage,
        growth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HostModel, Limit, Trust};
    use crate::sample::VmId;
    use crate::state::LimitMemory;

    /// What a guest of 1 GiB with 200 MiB of page cache wants, MiB.
    fn wants(weight: f64, need: u64, m: &VmMemory, level: Level) -> u64 {
        let gib = Bytes::gib(1);
        let vm = VmModel { ram: Some(gib), ceiling: gib, weight, ..VmModel::default() };
        let (need, cache) = (Bytes::mib(need), Bytes::mib(200));
        let g = GuestModel { need, working_set: need, cache, ..GuestModel::default() };
        want(Stamp(1_000_000), &vm, &g, m, level).0 >> 20
    }

    /// The VM of a guest that has touched what it needs, at its whole size.
    fn of(id: VmId, ram: Bytes, g: GuestModel) -> VmModel {
        VmModel {
            id,
            ram: Some(ram),
            actual: Some(ram),
            ceiling: ram,
            resident: Some(g.need),
            weight: 1.0,
            standing: Standing::Ready,
            trust: Trust { level: 1.0, ..Trust::default() },
            guest: Some(g),
            ..VmModel::default()
        }
    }

    #[test]
    fn page_cache_counts_alike_whatever_the_weight() {
        let level = Level { within_ms: HOT_MS / 2, ..Level::NOW };
        let want = |weight| wants(weight, 300, &VmMemory::default(), level);
        assert_eq!([want(0.5), want(1.0), want(4.0)], [400; 3]);
    }

    #[test]
    fn one_below_its_peak_has_room_for_its_page_cache_there() {
        let mut m = VmMemory::default();
        m.recent.see(Stamp(0), Bytes::mib(700));
        let want = |need, number| wants(1.0, need, &m, Level::of(number));
        assert_eq!((want(300, LONGEST), want(600, LONGEST)), (700, 800));
        let more = [1, CACHED, COMFORTS].map(|n| want(300, LONGEST + n));
        assert_eq!(more, [800, 900, 900], "beside it where there is more, before margins grow");
    }

    /// A host with 1250 MiB for two guests of 1 GiB that need up to 486, and have 358 of page cache.
    /// One has all that it needs. The other begins; it grows by 850 MiB/s, and is heard 700 ms late.
    /// They needed this much together lately.
    fn two_guests(late_ms: f64, mib_a_second: u64, together: u64) -> (Model, Memory) {
        let at = Stamp(10_000_000);
        let guest = |pid, need| {
            let (id, ram, need) = (VmId { pid, start: 1 }, Bytes::gib(1), Bytes::mib(need));
            let g = GuestModel {
                need,
                working_set: need,
                short_mark: Bytes::mib(40),
                buffer: Bytes::mib(122),
                cache: Bytes::mib(358),
                deflate_on_oom: true,
                ..GuestModel::default()
            };
            let vm = of(id, ram, g);
            let mut m = VmMemory { id, late_ms, ..VmMemory::default() };
            m.recent.see(Stamp(at.0 - 20_000), Bytes::mib(486));
            m.recent.see(at, need);
            m.fastest.see(at, (mib_a_second << 20) as f64);
            (vm, m)
        };
        let (a, b) = (guest(1, 486), guest(2, 123));
        let (name, reserve) = ("host".to_owned(), Bytes::mib(500));
        let headroom = Bytes::mib(1250 - 486 - 123 + 100);
        let shown = Limit { name: name.clone(), headroom, reserve, ..Limit::default() };
        let host = HostModel { known: true, shown, ..HostModel::default() };
        let model = Model { at, host, vms: vec![a.0, b.0], ..Model::default() };
        let mut past = LimitMemory { name, ..LimitMemory::default() };
        past.needs.see(at, Bytes::mib(together));
        let memory = Memory { vms: vec![a.1, b.1], limits: vec![past], ..Memory::default() };
        (model, memory)
    }

    /// What the second is to have.
    fn second_keeps(late_ms: f64, mib_a_second: u64, together: u64) -> u64 {
        let (model, memory) = two_guests(late_ms, mib_a_second, together);
        let allotted = allot(&model, &memory, &[Bytes::ZERO; 2], &[Bytes(u64::MAX); 2]);
        allotted.parts[1].unwrap().keeps.0 >> 20
    }

    #[test]
    fn what_a_guest_grows_by_before_it_is_seen_comes_before_the_page_cache_of_others() {
        let unseen = second_keeps(700.0, 850, 2 * 486);
        assert!(unseen >= 486, "{unseen}");
        let (slow, by_turns) =
            (second_keeps(0.0, 50, 2 * 486), second_keeps(700.0, 850, 486 + 123));
        assert!(slow < 420 && by_turns < 420, "{slow} {by_turns}");
    }

    #[test]
    fn for_what_a_vm_takes_later_that_starts_no_guest_gives_up_what_it_needed() {
        let keeps = |headroom, promised, waiting| {
            let (promised, waiting) = (Bytes::gib(promised), Bytes::gib(waiting));
            let (mut model, memory) = two_guests(700.0, 850, 2 * 486);
            model.host.shown.headroom += Bytes::gib(headroom);
            (model.host.shown.promised, model.host.shown.waiting) = (promised, waiting);
            // Each of 4 GiB.
            let start = |n: u64| VmModel {
                id: VmId { pid: 100 + n as u32, start: 1 },
                promised: Bytes::gib(4),
                paused: waiting > Bytes::ZERO,
                ..VmModel::default()
            };
            model.vms.extend((0..promised.0 >> 32).map(start));
            let of = |bytes| vec![bytes; model.vms.len()];
            let allot = allot(&model, &memory, &of(Bytes::ZERO), &of(Bytes(u64::MAX)));
            (allot.parts[1].unwrap().keeps.0 >> 20, allot.shortage > Bytes::ZERO)
        };
        let undisturbed = keeps(8, 0, 0);
        assert!(undisturbed.0 > 486 && !undisturbed.1, "{undisturbed:?}");
        assert_eq!(keeps(8, 40, 40), (undisturbed.0, true), "paused: free memory is taken");
        assert_eq!(keeps(8, 40, 0), (undisturbed.0, true), "it touches no more in a moment");
        // What they may touch in a moment is not there.
        assert!(keeps(0, 4, 0).0 < keeps(0, 4, 4).0);
        assert!(keeps(2, 40, 0).0 < keeps(2, 4, 0).0, "each may");
    }

    /// The example of docs/policies.md.
    #[test]
    fn memory_goes_to_the_needs_of_the_longest_time_that_fits() {
        let gib = |gib: f64| Bytes((gib * f64::from(1 << 30)) as u64);
        let at = Stamp(10_000_000);
        let guest = |pid, need: f64, peak: f64, ago_ms: u64| {
            let (id, ram, need) = (VmId { pid, start: 1 }, Bytes::gib(8), gib(need));
            let (short_mark, buffer) = (ram.share(0.04), need.share(0.25).max(ram.share(0.12)));
            let g = GuestModel { need, working_set: need, short_mark, ..GuestModel::default() };
            let g = GuestModel { buffer, deflate_on_oom: true, ..g };
            let vm = of(id, ram, g);
            let mut m = VmMemory { id, ..VmMemory::default() };
            m.recent.see(Stamp(at.0 - ago_ms), gib(peak));
            m.recent.see(at, need);
            (vm, m)
        };
        let (a, b) = (guest(1, 3.0, 5.0, 15_000), guest(2, 2.0, 6.0, 600_000));
        let (headroom, reserve) = (Bytes::gib(4), gib(1.28));
        let shown = Limit { headroom, reserve, ..Limit::default() };
        let host = HostModel { known: true, shown, ..HostModel::default() };
        let model = Model { at, host, vms: vec![a.0, b.0], ..Model::default() };
        let memory = Memory { vms: vec![a.1, b.1], ..Memory::default() };
        let allotted = allot(&model, &memory, &[Bytes::ZERO; 2], &[Bytes(u64::MAX); 2]);
        let parts = allotted.parts.iter().map(|p| p.unwrap().keeps.0 as f64 / f64::from(1 << 30));
        let parts: Vec<f64> = parts.collect();
        assert!((parts[0] - 5.0).abs() < 0.01 && (parts[1] - 3.62).abs() < 0.01, "{parts:?}");
        assert!((400_000..600_000).contains(&allotted.within_ms), "{}", allotted.within_ms);
    }
}
