//! The guest's statistics: which of the two sources counts, when they came, how fast they move,
//! and what in them contradicts what is known.
//!
//! How long statistics, a rate or a doubt count is set here; what is believed of them is decided
//! in `model/guest.rs`.

use serde::{Deserialize, Serialize};

use super::{FORGIVE_MS, VmMemory};
use crate::model::STALE_MS;
use crate::model::guest::{claims_too_much, free_and_cache, implausible, uses_too_much};
use crate::sample::{GuestStats, Link, RunState, VmSample};
use crate::state::{Growth, GuestRates};
use crate::units::{Bytes, PAGE, Stamp};

/// A contradiction is over when it has not come again in this time.
const DOUBT_MS: u64 = 10_000;
/// What a guest reads again within these seconds belongs to its working set.
const HOT_S: f64 = 10.0;
/// Facts that stand still longer than this are those of a guest that does not run.
const FACTS_LIFE_MS: u64 = 3_000;
/// A module writes new facts twice a second at least. Facts that stand still longer than this count
/// less than younger statistics of the balloon, and its guest is asked for those.
pub(crate) const FACTS_LATE_MS: u64 = 1_000;
/// For this time after a balloon moved unexpectedly the guest's statistics may be from before.
const STRAY_MS: u64 = 3_000;
/// Numbers equal to those before are a new answer only if they are younger by this: QEMU gives
/// their time in whole seconds, and a query takes some time.
const AGAIN_MS: u64 = 100;
/// After this many samples with the same statistics and the same balloon size, the statistics are
/// taken to be of that size.
const AGAIN_LOOKS: u32 = 3;
/// The weight of a tick in the estimate of how late answers are, milliseconds a millisecond: one
/// second is forgotten in 40.
const LATE_PACE: f64 = 0.5;
/// Rates older than this say nothing of now.
const RATE_LIFE_MS: u64 = 5_000;

/// Cache that belongs to the working set: the volume of refaults in ten seconds,
/// sinking over a minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hot {
    pub at: Stamp,
    pub bytes: Bytes,
}

/// A contradiction in what a guest says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Doubt {
    pub at: Stamp,
    pub times: u32,
    pub what: String,
    /// It claimed more available memory than can be.
    pub claim: bool,
}

impl VmMemory {
    /// Whether it can be heard. One that Ebb does not speak with, or that is paused, being migrated
    /// or booting, is not heard for a reason.
    pub(super) fn listen(&mut self, at: Stamp, dt_ms: u64, vm: &VmSample) {
        if vm.let_be || !vm.may_run() {
            return self.contact.rest();
        }
        if self.boots(at) {
            return;
        }
        // One that was not reached since the daemon's start is not silent yet.
        if vm.link != Link::Up && self.stats.is_none() {
            return;
        }
        self.contact.observe(at, dt_ms, vm.link == Link::Up && self.speaks(at, vm));
    }

    fn speaks(&self, at: Stamp, vm: &VmSample) -> bool {
        self.believed_stats(at, vm).is_some_and(|s| s.age_ms <= STALE_MS)
    }

    /// Whether its guest runs and can be heard.
    pub(super) fn is_heard(&self, at: Stamp, vm: &VmSample) -> bool {
        vm.run == Some(RunState::Running) && vm.link == Link::Up && self.speaks(at, vm)
    }

    pub(super) fn follow_facts(&mut self, at: Stamp, vm: &VmSample) {
        let facts = vm.agent.as_ref().filter(|a| a.is_ready()).and_then(|a| a.facts);
        self.facts = match (facts, self.facts) {
            // A module that fills in nothing yet has no clock.
            (Some(f), Some((changed, time))) if f.time_ns == time => Some((changed, time)),
            (Some(f), _) if f.time_ns > 0 && f.total > 0 => Some((at, f.time_ns)),
            _ => None,
        };
    }

    /// What the guest says of itself, as far as its numbers allow each other. One that claimed too
    /// much lately is believed no more than that while its size moves, either.
    pub fn believed_stats(&self, at: Stamp, vm: &VmSample) -> Option<GuestStats> {
        let heard = self.heard(at, vm)?;
        let doubted = self.doubt.as_ref().is_some_and(|d| d.claim && at.since(d.at) < DOUBT_MS);
        let cut = doubted || self.claims_too_much(at, vm, &heard);
        let believed = free_and_cache(&heard).filter(|_| cut).or(heard.available);
        Some(GuestStats { available: believed, ..heard })
    }

    fn claims_too_much(&self, at: Stamp, vm: &VmSample, heard: &GuestStats) -> bool {
        let said = Stamp(at.0.saturating_sub(heard.age_ms));
        claims_too_much(vm, heard, self.sizes.of_stats(said).map(|(_, most)| most))
    }

    /// From the source that is fresher: the module's facts while they move, else the
    /// balloon's statistics.
    fn heard(&self, at: Stamp, vm: &VmSample) -> Option<GuestStats> {
        let stats = vm.guest_stats();
        let moved = self.facts.filter(|(t, _)| at.since(*t) < FACTS_LIFE_MS);
        let facts = moved.zip(vm.agent.as_ref().and_then(|a| a.facts));
        // The wall clock matters only to tell a new kernel's statistics from the old's.
        let updated_s = stats.map_or(0, |s| s.updated_s);
        let from = |((t, _), f)| GuestStats::from_facts(&f, updated_s, at.since(t));
        let is_late = |f: &GuestStats| f.age_ms > FACTS_LATE_MS;
        let younger = |f: &GuestStats| stats.is_some_and(|s| s.age_ms < f.age_ms);
        facts.map(from).filter(|f| !(is_late(f) && younger(f))).or(stats)
    }

    /// Counts contradictions; two in a row, and the guest is not asked. What its own
    /// numbers put right makes it only be asked gently. `false`: the
    /// host does not hold what it says that it needs.
    pub(super) fn weigh_stats(&mut self, at: Stamp, vm: &VmSample, stats: &GuestStats) -> bool {
        // While a balloon moves, its size and the guest's statistics are of different moments.
        if self.order.is_some_and(|o| o.still_ms == 0) {
            return true;
        }
        // Nor is a move that Ebb did not order: each of its sizes of that time may be the one.
        let said = Stamp(at.0.saturating_sub(stats.age_ms));
        let Some(sizes) = self.sizes.of_stats(said) else { return true };
        let can_be = uses_too_much(vm, stats, sizes.0).is_none();
        match (implausible(vm, stats, sizes), self.doubt.as_mut()) {
            (Some(what), Some(d)) => {
                // The same statistics again are no second contradiction.
                if said > d.at {
                    d.times = d.times.saturating_add(1).min(1000);
                    (d.at, d.what) = (at, what);
                }
            }
            (Some(what), None) => self.doubt = Some(Doubt { at, times: 1, what, claim: false }),
            (None, Some(d)) if d.times > 1 && at.since(d.at) < DOUBT_MS => {}
            (None, before) => {
                let before = before.filter(|d| d.times == 1 && at.since(d.at) < DOUBT_MS).cloned();
                self.doubt = self.put_right(at, vm, stats).or(before);
            }
        }
        can_be
    }

    /// The doubt that remains where a claim was cut down to what can be.
    fn put_right(&self, at: Stamp, vm: &VmSample, stats: &GuestStats) -> Option<Doubt> {
        let heard = self.heard(at, vm).filter(|heard| self.claims_too_much(at, vm, heard))?;
        let claim = heard.available.filter(|c| Some(*c) != stats.available)?;
        let (free, caches) = (stats.free?, stats.caches?);
        let what = format!("{claim} available, but {free} free and {caches} of cache");
        Some(Doubt { at, times: 1, what, claim: true })
    }

    /// `can_be`: else a need that grows by them is none.
    pub(super) fn take_stats(
        &mut self,
        at: Stamp,
        wall_s: u64,
        actual: Bytes,
        (now, can_be): (GuestStats, bool),
    ) {
        // Said again counts as said: what changes next has changed since then, and not
        // since the guest was quiet.
        let said = Stamp(at.0.saturating_sub(now.age_ms));
        if self.stats.is_some_and(|(t, _, was)| same_stats(&was, &now) && said.since(t) < AGAIN_MS)
        {
            self.hear_again(at, actual, &now);
            return;
        }
        self.again = 0;
        // It says more than it can have at this size: its statistics are from before a move, which
        // may have been before the first look.
        if now.available.is_some_and(|a| a > actual) {
            self.strayed = Some(at);
        }
        let actual = self.paired((at, said), actual, &now);
        let Some((was_at, _, was)) = self.stats.replace((at, actual, now)) else { return };
        if was.refaults.is_some() != now.refaults.is_some() {
            // The other source: its counters are not these.
            self.rates = None;
            return;
        }
        let fewer = was.major_faults.zip(now.major_faults).is_some_and(|(was, now)| now < was);
        // The module's counters start with the kernel as well.
        if now.is_of_another_boot(&was) || now.refaults.is_some() && fewer {
            // Counters since boot went back: it rebooted unseen.
            self.forget_guest(at, wall_s);
            return;
        }
        // Its statistics and its size are of different moments: where a move came by surprise, what
        // looks like a growing need may be the move.
        if self.strayed.is_some_and(|t| at.since(t) < STRAY_MS) {
            self.growth = Growth::default();
        }
        self.rates = GuestRates::between((was_at, &was), (at, &now), self.growth.rate);
        if let Some(r) = self.rates.as_mut() {
            r.need = if can_be { r.need } else { 0.0 };
            self.fastest.see(at, r.need);
            let volume = Bytes((r.refaults * HOT_S * PAGE as f64) as u64);
            let forgotten = at.since(self.hot.at) as f64 / FORGIVE_MS as f64;
            let left = self.hot.bytes - self.hot.bytes.share(forgotten.min(1.0));
            self.hot = Hot { at, bytes: left.max(volume) };
        }
    }

    /// Its statistics are the same as in the last sample. After some samples at one size QEMU has
    /// most likely queried it again since it was given memory, and it has used that up: a guest
    /// that still waits for memory reports the same before and after a return.
    fn hear_again(&mut self, at: Stamp, actual: Bytes, now: &GuestStats) {
        self.again = if self.sizes.since() == Some(at) { 0 } else { self.again + 1 };
        let (Some(available), Some(was)) = (now.available.or(now.free), self.need()) else {
            return;
        };
        let need = actual - available;
        if self.again < AGAIN_LOOKS || self.unsure == Bytes::ZERO || need <= was {
            return;
        }
        let since = self.stats.map(|s| s.0);
        self.growth.see(at, since.map(|t| (t, was)), (need, need));
        self.unsure = Bytes::ZERO;
        self.stats.iter_mut().for_each(|s| s.1 = actual);
        self.rates.iter_mut().for_each(|r| (r.at, r.need) = (at, self.growth.rate));
    }

    /// What its guest needs, by its last statistics.
    pub fn need(&self) -> Option<Bytes> {
        let (_, size, stats) = self.stats.as_ref()?;
        Some(*size - stats.available.or(stats.free)?)
    }

    /// The size that goes with the guest's statistics, which are from after `said`.
    fn paired(&mut self, (at, said): (Stamp, Stamp), actual: Bytes, now: &GuestStats) -> Bytes {
        let available = now.available.or(now.free);
        let needs = available.and_then(|a| Some((a, self.sizes.needs(said, a)?)));
        let Some((available, (low, high))) = needs else { return actual };
        let was = self.stats.map(|s| s.0).zip(self.need());
        let need = self.growth.see(at, was, (low, high));
        self.unsure = high - need;
        need + available
    }

    /// The rates, unless they are too old to mean anything.
    pub fn rates_at(&self, at: Stamp) -> Option<GuestRates> {
        self.rates.filter(|r| at.since(r.at) <= RATE_LIFE_MS)
    }
}

/// An estimate of the age that statistics exceed in one of 20 moments: it grows by 19 parts where
/// these do, and else sinks by one. Statistics that are too old to be believed are no answer.
pub(super) fn later(late_ms: f64, age_ms: u64, dt_ms: u64) -> f64 {
    let step = if age_ms as f64 > late_ms { 0.95 } else { -0.05 };
    (late_ms + step * LATE_PACE * dt_ms.min(1_000) as f64).clamp(0.0, STALE_MS as f64)
}

/// Whether the guest said nothing new (age and update time apart).
fn same_stats(a: &GuestStats, b: &GuestStats) -> bool {
    GuestStats { updated_s: 0, age_ms: 0, ..*a } == GuestStats { updated_s: 0, age_ms: 0, ..*b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_late_answers_are_is_known_within_seconds_and_forgotten_within_a_minute() {
        let see = |late_ms, ages: &[u64], times| {
            (0..times).fold(late_ms, |late_ms, i| later(late_ms, ages[i % ages.len()], 100))
        };
        assert!(see(0.0, &[40], 600) < 100.0, "punctual");
        let late = see(0.0, &[40, 300, 500, 700], 100);
        assert!((600.0..=750.0).contains(&late), "{late}");
        assert!(see(0.0, &[&[40; 39][..], &[700]].concat(), 4000) < 200.0, "one in forty is rare");
        assert!(see(late, &[40], 400) < 100.0);
        assert_eq!(later(STALE_MS as f64 - 1.0, 3_600_000, 1_000), STALE_MS as f64);
    }
}
