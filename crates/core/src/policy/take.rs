//! Taking: how much each guest gives of what the host lacks.
//!
//! Distributed as ESX does (Waldspurger 2002): each guest pays for the memory it holds from its
//! shares, and for idle memory four times as much (a tax of 75 %). `price = (working set + 4 ·
//! idle) / (weight · RAM)`; what is missing is taken where the price is highest until all prices
//! are equal, in bounded steps, and never below the floor, nor below what `allot.rs` lets the guest
//! keep. Steps grow while a guest follows at once and shrink where it does not, where its
//! statistics are doubted, or where it was short soon after it had been asked.

use crate::model::guest::AHEAD_S;
use crate::model::{FRESH_MS, GuestModel, Model, Pressure, Standing, VmModel};
use crate::plan::Reason;
use crate::policy::Verdict;
use crate::policy::allot::{Allotment, LEAST_MARKS, kept_cache};
use crate::policy::balloon::CALM_MS;
use crate::policy::recycle::{to_come, usable};
use crate::state::{Memory, VmMemory};
use crate::units::{Bytes, Stamp};

/// The least step in either direction.
pub(super) const LEAST_STEP: Bytes = Bytes::mib(16);
/// [`LEAST_STEP`] is for this time. A step covers the time since the one before, at most a tick or
/// this, whichever is longer.
const STEP_MS: u64 = 500;
/// No step takes for longer than this: what a tick that comes later saw is old.
pub(super) const STEP_MOST_MS: u64 = 2_000;
/// No step takes more than this share of RAM: what the guest does with the rest is seen before it
/// is asked again.
const STEP_MOST: f64 = 0.5;
/// Shrinks below this share of RAM, or below [`LEAST_STEP`], wait for a larger one
/// unless guests wait or the host is critical: a trickle brings little, and each of them may
/// be turned around.
const LEAST_SHRINK: f64 = 0.015;
/// The cost of an idle page, where one in use costs 1: 1 / (1 − 75 %).
const IDLE_COST: f64 = 4.0;
/// Shares of RAM a second: while guests wait for it or will, or the host is critical; while the
/// host is hard; and else.
const STEPS: (f64, f64, f64) = (1.0, 0.25, 0.1);
pub(super) const CALM_STEP: f64 = STEPS.2;

/// A guest that was given what it needs is left alone for this time where headroom is below what
/// the host is to keep and what guests' needs will grow by.
const SHORT_PAUSE_MS: u64 = 20_000;
/// While guests wait, what a guest has freed is recycled before its balloon grows if it is at least
/// this share of what the balloon would bring.
const FREED_FIRST: f64 = 0.125;
/// If not even all needs fit, a guest that was given memory keeps what it must have for this time.
const SHORT_MS: u64 = 3_000;

/// A VM that can be asked, and for how much.
#[derive(Debug)]
pub(super) struct Candidate {
    pub index: usize,
    /// The size it would start from.
    pub base: Bytes,
    /// What it could do without.
    pub idle: Bytes,
    /// What of it is free memory.
    pub free: Bytes,
    pub most: Bytes,
    /// Less than this is not worth an order.
    pub least: Bytes,
    /// What of each byte taken the host really holds, 0 to 1.
    pub yields: f64,
    /// What it pays for a share: see the top.
    pub price: f64,
    /// Bytes that lower the price by one.
    pub slope: f64,
    /// What it is to give.
    pub share: Bytes,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Missing {
    pub all: Bytes,
    /// The part of it for which page cache may be taken, first. Where that is not worth an order,
    /// only free memory is taken.
    pub by_cache: Bytes,
    /// What of it guests wait for.
    pub deferred: Bytes,
}

/// Collects what is missing from those that have more than they are to keep; what the host can
/// expect of each. One that an inner limit asks already may be asked for more.
pub(super) fn take(
    model: &Model,
    memory: &Memory,
    (missing, allot): (Missing, &Allotment),
    verdicts: &mut [Option<Verdict>],
) -> Vec<Bytes> {
    let deferred = missing.deferred;
    let state = model.host.shown.state;
    let of = |vm: &VmModel| memory.of(vm.id);
    let inside = model.vms.iter().filter(|v| !v.outside);
    let arriving: Bytes = inside.map(|v| arriving(model, v, of(v))).sum();
    let urgent = deferred > Bytes::ZERO || state == Pressure::Critical;
    // A VM that is paused touches nothing: no guest is hurried for it.
    let soon = missing.all - model.host.shown.waiting;
    let lacks = will_lack(model, memory, soon);
    let late = lacks > Bytes::ZERO;
    let rate = match state {
        _ if urgent || late => STEPS.0,
        Pressure::Hard => STEPS.1,
        _ => STEPS.2,
    };
    let (mut candidates, mut not_asked) = (Vec::new(), Vec::new());
    for (index, vm) in model.vms.iter().enumerate() {
        let given = match &verdicts[index] {
            None => None,
            Some(Verdict::Set { to, reason: Reason::HostShort { .. } }) => Some(*to),
            Some(_) => continue,
        };
        match candidate(model, vm, of(vm), (index, given), (rate, urgent, late, allot)) {
            Ok(c) => candidates.push(c),
            Err(why) => not_asked.push((index, why)),
        }
    }
    // To read page cache again takes less time than the host's swap.
    let by_cache = if late { soon.max(missing.by_cache) } else { missing.by_cache };
    let mut shares = Vec::new();
    for part in [by_cache, missing.all] {
        share_out(&mut candidates, part - arriving, |c| c.yields);
        shares = candidates.iter().map(|c| c.share).collect();
        if !urgent {
            lump(&mut candidates);
        }
        if candidates.iter().any(|c| c.share > Bytes::ZERO) {
            break;
        }
        // Nothing is to be had, or too little for an order: then free memory for all of it.
        candidates.iter_mut().for_each(|c| c.most = c.most.min(c.free));
    }
    let mut expected = vec![Bytes::ZERO; model.vms.len()];
    // `share` is what each was to give before small shares were made few large ones.
    for (c, share) in candidates.iter().zip(shares) {
        if c.share < Bytes::mib(1) {
            let why = match share < Bytes::mib(1) {
                true => "others, or what was ordered before, cover what the host lacks",
                false => "what is to be taken of it is too little for an order",
            };
            not_asked.push((c.index, format!("{} idle, but {why}", c.idle)));
            continue;
        }
        let verdict = &mut verdicts[c.index];
        expected[c.index] = c.share.share(c.yields);
        let shortage = model.host.shown.shortage.max(missing.all);
        let limit = Some(&model.host.shown).filter(|l| !l.is_host()).map(|l| l.name.clone());
        let waits = deferred.max(lacks.min(missing.all));
        // Those that wait below an inner limit still do.
        let (waits, idle) = match verdict {
            Some(Verdict::Set { reason: Reason::HostShort { waits: inner, idle, .. }, .. }) => {
                (waits.max(*inner), c.idle.max(*idle))
            }
            _ => (waits, c.idle),
        };
        let reason = Reason::HostShort { state, shortage, waits, idle, limit };
        *verdict = Some(Verdict::Set { to: round_up(c.base - c.share), reason });
    }
    for (index, why) in not_asked {
        verdicts[index].get_or_insert(Verdict::Hold(why));
    }
    expected
}

/// What of each byte that a guest has available the host holds.
fn held_share(vm: &VmModel, g: &GuestModel) -> f64 {
    let held = vm.guest_held().map_or(g.available, |held| (held - g.need).min(g.available));
    if g.available == Bytes::ZERO { 1.0 } else { held.fraction_of(g.available) }
}

/// What the host will have of the order to shrink that a VM has.
fn arriving(model: &Model, vm: &VmModel, m: &VmMemory) -> Bytes {
    let Some(actual) = vm.actual else { return Bytes::ZERO };
    m.arriving(model.at, actual).share(vm.guest.as_ref().map_or(1.0, |g| held_share(vm, g)))
}

/// What guests will lack before balloons have brought what is missing, at the rate at which they
/// follow and by what the host holds of what they take: what they grow by in that time beyond what
/// the host has and holds for them. Any guest's statistics are [`AHEAD_S`] late.
fn will_lack(model: &Model, memory: &Memory, missing: Bytes) -> Bytes {
    let (mut speed, mut idle, mut held) = (0.0, Bytes::ZERO, Bytes::ZERO);
    let vms = || model.vms.iter().filter(|vm| !vm.outside && vm.pinned.is_none());
    for vm in vms().filter(|vm| vm.standing == Standing::Ready && vm.distress.is_empty()) {
        let (Some(g), Some(actual)) = (&vm.guest, vm.actual) else { continue };
        speed += vm.ram.unwrap_or_default().0 as f64 * CALM_STEP * factor(memory.of(vm.id));
        let spare = actual - g.working_set;
        idle += spare;
        held += spare.share(held_share(vm, g));
    }
    let brings = speed * held.fraction_of(idle.max(Bytes(1)));
    let takes_s = AHEAD_S + missing.0 as f64 / brings.max(1.0);
    let uses = |vm: &VmModel| {
        let (Some(g), Some(actual)) = (&vm.guest, vm.actual) else { return Bytes::ZERO };
        // While it has free memory it keeps its page cache and grows beside it.
        let (needs, held) = (g.after(takes_s), vm.guest_held().unwrap_or(actual));
        let stays = if needs > g.need { kept_cache(g, held) } else { Bytes::ZERO };
        // What it needs and the host does not hold (swapped out, merged) it need not touch.
        (needs + stays).min(actual) - held.max(g.need)
    };
    match missing {
        Bytes(0) => Bytes::ZERO,
        _ => vms().map(uses).sum::<Bytes>() - model.host.shown.headroom,
    }
}

/// What it could be asked for, or why it is not asked. `given` is the size that an inner limit
/// orders in this tick.
fn candidate(
    model: &Model,
    vm: &VmModel,
    m: &VmMemory,
    (index, given): (usize, Option<Bytes>),
    (rate, urgent, late, allot): (f64, bool, bool, &Allotment),
) -> Result<Candidate, String> {
    if vm.standing != Standing::Ready {
        return Err(vm.standing.why().to_string());
    }
    if let Some(why) = brings_nothing(model, vm, m) {
        return Err(why);
    }
    let (Some(actual), Some(g)) = (vm.actual, vm.guest.as_ref()) else {
        return Err("its guest's need is not known".into());
    };
    if let Some(why) = outdated(g) {
        return Err(why);
    }
    // No guest waits for memory, or will: the order is not turned around for the host's reserve.
    let takes_no_cache = allot.cache_shortage == Bytes::ZERO;
    let calm = !urgent && !late && (model.host.shown.state <= Pressure::Soft || takes_no_cache);
    let pause = if takes_no_cache { CALM_MS } else { SHORT_PAUSE_MS };
    let left = |t: Option<Stamp>, pause: u64| pause.checked_sub(model.at.since(t?));
    let left = left(m.last_give, pause).max(left(m.last_returned, CALM_MS));
    if let (true, Some(left)) = (calm, left) {
        return Err(format!("it was given memory: left alone for {} s", left.div_ceil(1000)));
    }
    // What is free already goes first, and never both at a time. What recycling leaves is the
    // balloon's. Where guests wait, so is all of a guest in which little is free: one that reads
    // files always has freed something.
    let freed = to_come(model, vm, m);
    let recycled = || format!("{freed} that it has freed are recycled first");
    let waits = urgent || late;
    if usable(vm).is_some_and(|a| a.busy) || freed >= LEAST_STEP && !waits {
        return Err(recycled());
    }
    let before = base(m, actual);
    let base = given.unwrap_or(before);
    if base <= vm.floor {
        return Err(format!("it is at its floor of {}", vm.floor));
    }
    let Some(part) = allot.parts[index] else {
        return Err("its guest's need is not known".into());
    };
    // All are short: what keeps one from harm is not taken back at once for the next.
    let lately = m.last_give.is_some_and(|t| model.at.since(t) < SHORT_MS);
    let must = if lately && part.most.is_some() { must(g) } else { Bytes::ZERO };
    // Memory that the host cannot back does not keep the guest from harm.
    let there = model.host.shown.headroom + model.host.shown.swap_left;
    let must = must.min(vm.guest_held().unwrap_or(actual) + there);
    let idle = idle(model.at, base, part.keeps.max(must), g, m);
    if idle < Bytes::mib(4) {
        return Err(format!("{} available, nothing of it idle", g.available));
    }
    let given = before - base;
    let step = step(vm, m, model, rate) - given;
    if freed >= LEAST_STEP.max(step.min(idle).share(FREED_FIRST)) {
        return Err(recycled());
    }
    if !urgent && busy(m, actual, step.min(idle)) {
        return Err(format!("it is still shrinking to {base}"));
    }
    // What an inner limit takes is of the same: it has brought its part, and lowered the price.
    let c = priced(vm, g, index, (before, idle + given, step.min(idle)));
    let price = c.price - given.0 as f64 / c.slope;
    Ok(Candidate { base, idle, free: c.free - given, price, ..c })
}

/// Why its numbers are too old to take anything by, for people: the guest may have touched
/// gigabytes since.
pub(super) fn outdated(g: &GuestModel) -> Option<String> {
    (g.age_ms > FRESH_MS).then(|| format!("its numbers are {} ms old", g.age_ms))
}

/// What keeps its memory where it is, for people.
pub(super) fn pinned(vm: &VmModel) -> Option<String> {
    vm.pinned.as_ref().map(|why| format!("its balloon is left alone: {why}"))
}

/// Why the host would have nothing of a larger balloon, for people.
pub(super) fn brings_nothing(model: &Model, vm: &VmModel, m: &VmMemory) -> Option<String> {
    let name = &model.host.shown.name;
    let outside = || format!("it is outside of {name}: shrinking it frees nothing there");
    let nothing_came = m.yields.brings_nothing_until.filter(|t| *t > model.at).map(|until| {
        let left = until.since(model.at).div_ceil(60_000);
        format!("its balloon grew and the host had nothing of it: asked again in {left} min")
    });
    pinned(vm).or_else(|| vm.outside.then(outside)).or(nothing_came)
}

/// What a guest pays, and what the host has of asking it.
pub(super) fn priced(
    vm: &VmModel,
    g: &GuestModel,
    index: usize,
    (base, idle, most): (Bytes, Bytes, Bytes),
) -> Candidate {
    // What is idle but not resident brings the host nothing now: it counts a tenth.
    let yields = held_share(vm, g);
    let held = idle.share(yields);
    let taxed = held.0 as f64 + 0.1 * (idle - held).0 as f64;
    let ram = vm.ram.unwrap_or(base).max(Bytes(1));
    let shares = vm.weight.max(0.001) * ram.0 as f64;
    Candidate {
        index,
        base,
        idle,
        free: ((g.available - g.cache) - g.short_mark.share(LEAST_MARKS)).min(idle),
        most,
        least: ram.share(LEAST_SHRINK).max(LEAST_STEP),
        yields,
        price: (g.working_set.0 as f64 + IDLE_COST * taxed) / shares,
        slope: shares / IDLE_COST,
        share: Bytes::ZERO,
    }
}

/// The size the next step starts from: what it was last told, if that is less.
pub(super) fn base(m: &VmMemory, actual: Bytes) -> Bytes {
    m.order.map_or(actual, |o| o.to.min(actual))
}

/// What may be taken of a size where the guest is to keep `keeps`: nothing that it uses, nor
/// that it may use.
pub(super) fn idle(at: Stamp, base: Bytes, keeps: Bytes, g: &GuestModel, m: &VmMemory) -> Bytes {
    // One that rests may have grown since it spoke, as fast as it ever did lately: it keeps that,
    // and its least margin, however short all are.
    let rests = m.size_seen_at.is_some_and(|seen| seen < at);
    let least = g.short_mark.share(LEAST_MARKS);
    let grown = m.fastest.rate(at).share(g.age_ms as f64 / 1000.0).max(least);
    let grown = if rests { grown } else { Bytes::ZERO };
    base - keeps.max(g.need + m.unsure + grown)
}

/// Whether the step before is still far from done.
pub(super) fn busy(m: &VmMemory, actual: Bytes, step: Bytes) -> bool {
    m.order.is_some_and(|o| actual - o.to > step.share(0.5).max(LEAST_STEP))
}

/// What a guest in distress must have: its need and a margin.
pub(super) fn must(g: &GuestModel) -> Bytes {
    g.need + g.short_mark.share(2.0)
}

/// What its steps are multiplied by since it follows at once.
fn factor(m: &VmMemory) -> f64 {
    f64::from(1u32 << m.doublings.min(2))
}

/// The largest step now: larger while tasks suffer and while it follows at once, smaller
/// where its statistics are doubted. It is for the time since the guest was last asked, so that
/// frequent ticks take neither faster nor slower than rare ones.
pub(super) fn step(vm: &VmModel, m: &VmMemory, model: &Model, rate: f64) -> Bytes {
    let since = m.last_take.map_or(u64::MAX, |t| model.at.since(t));
    let ms = since.min(model.dt_ms.max(STEP_MS)).min(STEP_MOST_MS) as f64;
    let scale = factor(m) * (1.0 + model.host.shown.urgency) * vm.trust.level.clamp(0.1, 1.0);
    let share = (rate * scale * ms / 1000.0).min(STEP_MOST);
    let least = LEAST_STEP.share((ms / STEP_MS as f64).min(1.0));
    vm.ram.unwrap_or_default().share(share).max(least)
}

/// Lowers the highest prices until what is missing is found or each gives what it can:
/// the level is searched by halving, which is exact to a few bytes. Of each byte of a candidate
/// only the share `counts` counts.
pub(super) fn share_out(
    candidates: &mut [Candidate],
    missing: Bytes,
    counts: impl Fn(&Candidate) -> f64,
) {
    if missing < Bytes::mib(1) || candidates.is_empty() {
        return;
    }
    let part = |c: &Candidate, level: f64| {
        Bytes(((c.price - level).max(0.0) * c.slope) as u64).min(c.most)
    };
    let (mut low, mut high) = (-IDLE_COST, IDLE_COST);
    for c in candidates.iter() {
        low = low.min(c.price - (c.most.0 as f64 + 1.0) / c.slope);
        high = high.max(c.price);
    }
    for _ in 0..60 {
        let level = (low + high) / 2.0;
        let found: Bytes = candidates.iter().map(|c| part(c, level).share(counts(c))).sum();
        if found > missing { low = level } else { high = level }
    }
    for c in candidates.iter_mut() {
        c.share = part(c, high);
    }
}

/// Makes few large shares of many small ones: the largest comes first, raised to at
/// least what is worth an order, until all that was found is covered.
fn lump(candidates: &mut [Candidate]) {
    let mut left: Bytes = candidates.iter().map(|c| c.share).sum();
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(candidates[*i].share), *i));
    for i in order {
        let c = &mut candidates[i];
        let small = c.most < c.least || left < c.least.share(0.5);
        c.share = if small { Bytes::ZERO } else { c.share.max(c.least) };
        left = left - c.share;
    }
}

/// Balloons are set in whole MiB; up, so that no guest gets less than was decided.
pub(super) fn round_up(b: Bytes) -> Bytes {
    (b + (Bytes::mib(1) - Bytes(1))).floor_mib()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(weight: f64, working_set: u64, idle: u64, most: u64) -> Candidate {
        let vm = VmModel {
            ram: Some(Bytes::mib(1000)),
            resident: Some(Bytes::mib(working_set + idle)),
            weight,
            ..VmModel::default()
        };
        let g = GuestModel { working_set: Bytes::mib(working_set), ..GuestModel::default() };
        let idle = Bytes::mib(idle);
        priced(&vm, &g, 0, (g.working_set + idle, idle, Bytes::mib(most)))
    }

    fn shares(mut all: Vec<Candidate>, missing: u64) -> Vec<u64> {
        share_out(&mut all, Bytes::mib(missing), |_| 1.0);
        all.iter().map(|c| (c.share.0 + (1 << 19)) >> 20).collect()
    }

    #[test]
    fn idle_memory_pays_four_times_what_used_memory_pays() {
        // Both hold 800; the idler one gives first, until the prices are equal.
        let all = || vec![candidate(1.0, 600, 200, 200), candidate(1.0, 200, 600, 600)];
        assert_eq!(shares(all(), 100), [0, 100]);
        // 200 + 4 (600 − x) = 600 + 4 · 200 at x = 300.
        assert_eq!(shares(all(), 300), [0, 300]);
        assert_eq!(shares(all(), 400), [50, 350]);
        assert_eq!(shares(all(), 5000), [200, 600], "all that there is");
    }

    #[test]
    fn where_what_the_host_holds_counts_more_is_taken_of_those_that_hold_little() {
        let mut all = vec![candidate(1.0, 0, 800, 800)];
        all[0].yields = 0.25;
        share_out(&mut all, Bytes::mib(100), |c| c.yields);
        assert!(all[0].share.abs_diff(Bytes::mib(400)) < Bytes::mib(1), "{}", all[0].share);
        share_out(&mut all, Bytes::mib(900), |c| c.yields);
        assert_eq!(all[0].share, Bytes::mib(800), "all that there is");
    }

    /// A host with `headroom`; a guest whose need grows by `growth` a second, who needed `highest`
    /// before, and of whose size of 1000 MiB the host holds `own`; and one of 1 GiB with 800 MiB
    /// idle, of which the host holds `held`. All in MiB.
    fn lacks((headroom, missing): (u64, u64), grower: (u64, u64, u64), held: u64) -> u64 {
        let vm = |held: u64, rate: u64, highest: u64| VmModel {
            ram: Some(Bytes::gib(1)),
            actual: Some(Bytes::mib(1000)),
            resident: Some(Bytes::mib(held)),
            standing: Standing::Ready,
            guest: Some(GuestModel {
                available: Bytes::mib(800),
                need: Bytes::mib(200),
                working_set: Bytes::mib(200),
                highest: Bytes::mib(highest),
                rates: Some(crate::state::GuestRates {
                    need: (rate << 20) as f64,
                    ..Default::default()
                }),
                ..GuestModel::default()
            }),
            ..VmModel::default()
        };
        let (growth, highest, own) = grower;
        let grows = VmModel { distress: "it grows".into(), ..vm(own, growth, highest) };
        let vms = vec![grows, vm(200 + held, 0, 0)];
        let mut model = Model { vms, ..Model::default() };
        model.host.shown.headroom = Bytes::mib(headroom);
        will_lack(&model, &Memory::default(), Bytes::mib(missing)).0 >> 20
    }

    #[test]
    fn guests_lack_memory_where_they_grow_faster_than_balloons() {
        let grower = (200, 0, 200);
        // 102 MiB a second where the host holds all of it: 1.5 s, and 1 s for 102 MiB.
        assert_eq!(lacks((600, 100), grower, 800), 0);
        assert_eq!(lacks((400, 100), grower, 800), 95);
        // Of a quarter of it 100 MiB take four times as long.
        assert!(lacks((600, 100), grower, 200) > 0);
        assert_eq!(lacks((1200, 100), grower, 200), 0);
        assert_eq!(lacks((400, 100), (0, 0, 200), 800), 0, "nobody grows");
        assert_eq!(lacks((100, 0), grower, 800), 0, "nothing is missing");
    }

    #[test]
    fn growth_into_what_the_host_holds_or_beyond_what_was_needed_before_is_none() {
        assert_eq!(lacks((100, 100), (200, 0, 600), 800), 0, "400 MiB of it are held and free");
        assert_eq!(lacks((50, 100), (200, 300, 200), 800), 50, "it stops where it stopped before");
        assert_eq!(lacks((100, 100), (0, 0, 50), 800), 0, "what is in swap it need not touch");
    }

    #[test]
    fn with_twice_the_weight_a_guest_may_hold_twice_as_much() {
        let all = || vec![candidate(1.0, 0, 500, 500), candidate(2.0, 0, 500, 500)];
        assert_eq!(shares(all(), 250), [250, 0]);
        // Left: 200 and 400.
        assert_eq!(shares(all(), 400), [300, 100]);
    }

    #[test]
    fn what_one_cannot_give_falls_to_the_others() {
        let all = vec![candidate(1.0, 0, 800, 50), candidate(1.0, 0, 400, 400)];
        assert_eq!(shares(all, 150), [50, 100]);
    }

    #[test]
    fn memory_that_the_host_does_not_hold_is_worth_a_tenth() {
        let mut vm = VmModel { ram: Some(Bytes::gib(1)), weight: 1.0, ..VmModel::default() };
        let (need, available) = (Bytes::mib(100), Bytes::mib(800));
        let g = GuestModel { need, working_set: need, available, ..GuestModel::default() };
        let sizes = (Bytes::mib(900), Bytes::mib(800), Bytes::mib(800));
        vm.resident = Some(Bytes::mib(900));
        let held = priced(&vm, &g, 0, sizes);
        vm.resident = Some(Bytes::mib(100));
        let untouched = priced(&vm, &g, 0, sizes);
        assert_eq!((held.yields, untouched.yields), (1.0, 0.0));
        assert!(held.price > 4.0 * untouched.price);
    }

    #[test]
    fn many_small_shares_become_few_that_are_worth_an_order() {
        let lumped = |mut all: Vec<Candidate>, missing| {
            share_out(&mut all, Bytes::mib(missing), |_| 1.0);
            lump(&mut all);
            all.iter().map(|c| (c.share.0 + (1 << 19)) >> 20).collect::<Vec<u64>>()
        };
        let alike = || (0..8).map(|_| candidate(1.0, 100, 400, 400)).collect::<Vec<_>>();
        assert_eq!(lumped(alike(), 800), [100; 8]);
        assert_eq!(lumped(alike(), 38), [16, 16, 0, 0, 0, 0, 0, 0], "half of one is not enough");
        assert_eq!(lumped(alike(), 4), [0; 8]);
        let mut tail = alike();
        tail[0] = candidate(1.0, 490, 10, 10);
        assert_eq!(lumped(tail, 5000)[..2], [0, 400], "its last few MiB are left to it");
    }

    proptest! {
        #[test]
        fn never_more_than_missing_nor_than_each_can_give(
            sizes in proptest::collection::vec((0.001f64..1000.0, 0u64..4000, 0u64..4000, 0u64..4000), 1..40),
            missing in 0u64..100_000,
        ) {
            let mut all: Vec<Candidate> =
                sizes.iter().map(|(w, s, i, m)| candidate(*w, *s, *i, (*m).min(*i))).collect();
            share_out(&mut all, Bytes::mib(missing), |_| 1.0);
            let total: Bytes = all.iter().map(|c| c.share).sum();
            let can: Bytes = all.iter().map(|c| c.most).sum();
            prop_assert!(total <= Bytes::mib(missing));
            prop_assert!(all.iter().all(|c| c.share <= c.most));
            let wanted = Bytes::mib(missing).min(can);
            prop_assert!(missing == 0 || wanted - total <= Bytes::mib(1), "{total} of {wanted}");
        }
    }
}
