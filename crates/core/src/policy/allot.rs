//! Who is to have how much: one rule for all states of the host.
//!
//! What a guest needed a moment ago it is likely to need again; what it needed an hour ago, it
//! is not. So memory goes to the needs of the last T seconds, and T is as long as the host
//! allows: the longest time for which everybody's peak, the margins and what the host keeps for
//! itself fit together. Margins grow with T. What is left beyond T goes, by the same share, to
//! what each guest would have at the next longer T. So where T is short the oldest peaks go
//! first, as in any LRU list, and no period of a load is built in.
//!
//! A stock guest does not report which part of its page cache it reads again. So part of the
//! cache counts as needed, and the host takes cache only while its headroom is below the lower
//! part of its reserve; above that it takes free memory only.

use crate::memory::{Memory, VmMemory};
use crate::model::{GuestModel, Model, Standing, VmModel};
use crate::policy::take::brings_nothing;
use crate::units::{Bytes, Stamp};

/// A guest's margin is its whole buffer at this T.
const WHOLE_MS: u64 = 60_000;
/// With longer T a guest's margin grows on, up to this number of buffers.
const MARGIN_MOST: f64 = 3.0;
/// The possible values of T beside zero: their number, the factor from one to the next, and the
/// value that the first is this factor above, milliseconds.
const TIMES: i32 = 48;
const LONGER: f64 = 1.2;
const FIRST_MS: f64 = 300.0;
/// Guests are brought to what they needed within this before they ask, and others may be
/// squeezed for it.
const SOON_MS: u64 = 5_000;
/// Cache that is read again counts in whole from this T on: how much it is, is a guess.
const HOT_MS: u64 = 10_000;
/// Page cache up to this share of RAM counts as read again, whatever the guest reports.
const CACHE_SHARE: f64 = 0.2;
/// The part of the reserve for which guests give up page cache: where free swap is at least the
/// first part of the reserve, and where it is less.
const CACHE_PART: (f64, f64) = (0.5, 0.75);
/// The least margin of a guest, in units of its short mark.
pub(super) const LEAST_MARKS: f64 = 1.5;
/// The share of its buffer that a guest keeps in any case which cannot deflate its balloon itself.
const RIGID_SHARE: f64 = 0.3;

/// How far margins have grown at T: with its root as far as a minute, then with T.
fn grown(within_ms: u64) -> f64 {
    let minutes = within_ms as f64 / WHOLE_MS as f64;
    minutes.max(minutes.sqrt().min(1.0)).min(MARGIN_MOST)
}

/// What a guest is to have where the needs of the last `within_ms` count.
pub(super) fn want(at: Stamp, vm: &VmModel, g: &GuestModel, m: &VmMemory, within_ms: u64) -> Bytes {
    // With twice the weight needs age half as fast.
    let within_ms = (within_ms as f64 * vm.weight.clamp(0.1, 10.0)) as u64;
    let least = g.short_mark.share(LEAST_MARKS);
    let full = g.buffer.max(least);
    // Doubt asks for more only where there is more: else all would be squeezed for it.
    let doubt = 2.0 - vm.trust.level.clamp(0.0, 1.0);
    let share = if g.deflate_on_oom { 0.0 } else { RIGID_SHARE };
    let share = share + (doubt - share) * grown(within_ms);
    let margin = least + (full - least).share(share);
    let was = m.recent.peak(at, within_ms) + least;
    let usual = g.cache.min(vm.ram.unwrap_or_default().share(CACHE_SHARE));
    let hot = (g.working_set - g.need).max(usual);
    let hot = hot.share((within_ms as f64 / HOT_MS as f64).min(1.0));
    // One above its ceiling is brought to it no faster than its guest can do without.
    let most = vm.ceiling.max(vm.floor).max(vm.actual.unwrap_or_default());
    (was.max(g.soon() + margin) + hot).max(vm.floor).min(most)
}

/// One VM's part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    /// The size that it is to have at least; what is beyond may be taken.
    pub keeps: Bytes,
    /// The size that it is brought to, where the host has it.
    pub good: Bytes,
    /// The size that it is brought to in any case.
    pub soon: Bytes,
}

/// What all are to have.
#[derive(Clone, Debug, Default)]
pub(super) struct Allotment {
    /// By VM; `None`: nothing is known of its need.
    pub parts: Vec<Option<Part>>,
    /// T, milliseconds: needs that are older do not count.
    pub within_ms: u64,
    /// Not even all that was needed within the longest time fits.
    pub contended: bool,
    /// What the host is to keep.
    pub keep: Bytes,
    /// The part of `keep` for which guests give up page cache.
    pub keep_by_cache: Bytes,
    /// What the host lacks to back what all are to have and keep `keep`.
    pub shortage: Bytes,
    /// What it lacks to back that and keep `keep_by_cache`.
    pub cache_shortage: Bytes,
    /// What guests may still take of what they are to have.
    pub growth: Bytes,
}

/// Whom it concerns, and what is known of it.
struct Claim<'a> {
    index: usize,
    vm: &'a VmModel,
    g: &'a GuestModel,
    m: &'a VmMemory,
    held: Bytes,
    /// What it needs and the host does not hold: merged, in swap, never touched.
    apart: Bytes,
    /// What it is to have in any case.
    least: Bytes,
    /// Nothing can be had of it.
    fixed: bool,
}

impl Claim<'_> {
    /// The most that it needed within this time or will need in a moment, without a margin.
    fn needs(&self, at: Stamp, within_ms: u64) -> Bytes {
        self.m.recent.peak(at, within_ms).max(self.g.soon()).max(self.least)
    }

    /// What the host will hold for it when it needs that, at the size that it has.
    fn likely(&self, at: Stamp, within_ms: u64) -> Bytes {
        let needs = self.needs(at, within_ms);
        needs.min(self.vm.actual.unwrap_or(needs)) - self.apart
    }

    /// What the host would hold for it at most.
    fn holds(&self, at: Stamp, within_ms: u64) -> Bytes {
        let want = want(at, self.vm, self.g, self.m, within_ms).max(self.least) - self.apart;
        match self.fixed {
            false => want,
            true => want.min(self.vm.actual.unwrap_or(want)).max(self.held),
        }
    }
}

/// Divides what the host has. `least`: what each VM is to have in any case.
pub(super) fn allot(model: &Model, memory: &Memory, least: &[Bytes]) -> Allotment {
    let none = VmMemory::default();
    let (at, host) = (model.at, &model.host);
    let claim = |index: usize| {
        let vm = &model.vms[index];
        // RAM that is pinned is all there, or of a pool of its own.
        let g = vm.guest.as_ref().filter(|_| !vm.outside && vm.pinned.is_none())?;
        let held = vm.guest_held().unwrap_or(vm.actual?).min(vm.actual?);
        let m = memory.vm(vm.id).unwrap_or(&none);
        let apart = g.need - held;
        let fixed = vm.standing != Standing::Ready || brings_nothing(model, vm, m).is_some();
        Some(Claim { index, vm, g, m, held, apart, least: least[index], fixed })
    };
    let claims: Vec<Claim<'_>> = (0..model.vms.len()).filter_map(claim).collect();
    let all = host.headroom + claims.iter().map(|c| c.held).sum::<Bytes>();
    let keep_of = |part: f64| host.reserve.share(part + 0.5 * host.urgency) + host.promised;
    let swap = host.limits.iter().map(|l| l.swap_left).min().unwrap_or_default();
    let (with_swap, without) = CACHE_PART;
    let part = if swap >= host.reserve.share(with_swap) { with_swap } else { without };
    let (keep, keep_by_cache) = (keep_of(1.0), keep_of(part));
    let need =
        |within_ms| claims.iter().map(|c| c.holds(at, within_ms)).sum::<Bytes>() + keep_by_cache;
    let time = |i: i32| if i == 0 { 0 } else { (FIRST_MS * LONGER.powi(i)) as u64 };
    // The longest time for which all fits.
    let (mut fits, mut too_long) = (0, TIMES + 1);
    while too_long - fits > 1 {
        let middle = (fits + too_long) / 2;
        if need(time(middle)) <= all { fits = middle } else { too_long = middle }
    }
    let within_ms = time(fits);
    // What is left of it goes the same way to what comes next.
    let longer_ms = time((fits + 1).min(TIMES));
    let (now, next) = (need(within_ms), need(longer_ms));
    let part = match next > now {
        true => (all - now).fraction_of(next - now).min(1.0),
        false => 1.0,
    };
    let between = |short: Bytes, long: Bytes| short + (long - short).share(part);
    let mut parts = vec![None; model.vms.len()];
    for c in &claims {
        let of = |ms| want(at, c.vm, c.g, c.m, ms).max(c.least);
        let keeps = between(of(within_ms), of(longer_ms));
        let soon = of(within_ms.min(SOON_MS));
        let good = of(within_ms / 2);
        parts[c.index] = Some(Part { keeps, good, soon: soon.min(good) });
    }
    // What they hold and do not need is not free to give either.
    let all_needs = |c: &Claim<'_>| (c.needs(at, time(TIMES)) - c.apart).max(c.held);
    let contended = claims.iter().map(all_needs).sum::<Bytes>() + keep > all;
    let growth: Bytes = claims.iter().map(|c| c.likely(at, within_ms) - c.held).sum();
    let lacks =
        |keep: Bytes| if host.known { (keep + growth) - host.headroom } else { Bytes::ZERO };
    let (shortage, cache_shortage) = (lacks(keep), lacks(keep_by_cache));
    Allotment { parts, within_ms, contended, keep, keep_by_cache, shortage, cache_shortage, growth }
}
