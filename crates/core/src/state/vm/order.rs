//! Orders to a balloon, in both directions: whether the guest follows, how fast, whether it was
//! asked too much, and whose moves its balloon makes.
//!
//! Here is decided when a guest counts as slow, stuck or harmed. Who ordered a balloon's size,
//! Ebb or others, is decided in `state/ledger.rs`.

use serde::{Deserialize, Serialize};

use super::VmMemory;
use crate::config::Metadata;
use crate::model::{Convergence, Progress, VmModel};
use crate::plan::{Action, Reason};
use crate::sample::{RunState, VmSample};
use crate::state::{Ledger, Move};
use crate::units::{Bytes, Stamp, doubled};

/// An order to shrink that moved nothing in this time makes the guest “stuck”.
pub const STUCK_AFTER_MS: u64 = 10_000;
/// A stuck guest is asked again after this, doubled each time; the longest is for a guest that
/// never follows.
const STUCK_MS: (u64, u64) = (30_000, 600_000);
/// An order that moved nothing in this time is shown as stuck. After half of it what is left of it
/// is asked of others.
const STILL_MS: u64 = 5_000;
/// Slower than this a guest is “slow”, bytes a second.
pub const SLOW_RATE: f64 = (32 << 20) as f64;
/// The longest time that one tick adds where a guest is waited for: in a later tick it
/// was not looked at meanwhile.
pub(in crate::state) const LOOK_MS: u64 = 2_000;
/// How long what was given and is not touched counts as gone.
const GIVEN_LIFE_MS: u64 = 10_000;
/// A guest that is short so soon after it was asked was asked too much.
const HARM_MS: u64 = 10_000;
/// A guest with less available than this share of RAM may have deflated its balloon itself.
const LOW_SHARE: f64 = 0.12;
/// A guest that has little left may deflate its balloon by less than this, and what it touches is
/// lost in what its process gains and loses.
const SURELY_SET: Bytes = Bytes::mib(16);
/// An operator's larger size is reached within this, as a rule: that does not wait for its guest.
const RAISE_MS: u64 = 1_000;
/// Statistics come at least this often.
const STATS_MS: u64 = 2_000;
/// What a balloon took longer ago than this, QEMU has dealt with.
const INFLATE_ECHO_MS: u64 = 2_000;
/// What a balloon took longer ago than this, where it has reached exactly the size of the last
/// order: QEMU has dealt with that.
const LANDED_ECHO_MS: u64 = 250;
const HARM_MOST: u32 = 4;
/// How often steps are doubled at most.
const DOUBLINGS_MOST: u32 = 2;

/// Memory given to a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Given {
    pub at: Stamp,
    pub bytes: Bytes,
}

/// A size that another than Ebb has raised, as it seems, until the guest says what it had left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Raised {
    /// When it last moved, and when first.
    pub at: Stamp,
    pub since: Stamp,
    /// The size before.
    pub from: Bytes,
    /// The size that it came to. What it has beyond that, Ebb gave.
    pub to: Bytes,
    /// What the host held of the VM before, also in swap.
    pub held: Bytes,
    /// The most that the host has held beyond that since.
    pub touched: Bytes,
    /// It is left alone for that.
    pub alone: bool,
    /// The guest's page cache by its statistics then.
    pub caches: Bytes,
    /// By how much it moved last.
    pub step: Bytes,
    /// When another than Ebb set its size before that.
    pub foreign: Option<Stamp>,
}

/// The last order to grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GrewTo {
    /// When it was last on its way there.
    pub at: Stamp,
    pub to: Bytes,
    /// What the host held of the VM then, also in swap.
    pub held: Bytes,
}

/// An order to a balloon that is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BalloonOrder {
    pub to: Bytes,
    /// The size when it last moved.
    pub moved_from: Bytes,
    /// How long it has not moved while it was looked at, milliseconds.
    pub still_ms: u64,
    /// When the first of the orders in this direction was given.
    pub since: Stamp,
    /// It replaced an order to a smaller size that was still under way. The guest may still
    /// follow that one for a moment.
    pub cuts_short: bool,
}

impl VmMemory {
    /// Takes in an order that QEMU took, or may take when it answers again.
    pub(in crate::state) fn learn(
        &mut self,
        at: Stamp,
        ram: Option<Bytes>,
        action: &Action,
        answered: bool,
    ) {
        if let Some(ram) = ram {
            self.ledger.order(ram, action.to, answered);
        }
        let same = |o: &BalloonOrder| (o.to > action.from) == action.gives();
        let before = self.order.filter(same);
        let given = action.to - before.map_or(action.from, |o| o.to);
        let since = before.map_or(at, |o| o.since);
        let still_ms = before.map_or(0, |o| o.still_ms);
        let cuts_short =
            self.order.is_some_and(|o| o.to < action.from && (o.to < action.to || o.cuts_short));
        let (to, moved_from) = (action.to, action.from);
        let order = BalloonOrder { to, moved_from, still_ms, since, cuts_short };
        if before.is_none() {
            self.rate = 0.0;
        }
        self.order = Some(order);
        self.landed = false;
        match action.reason {
            // Neither gives nor takes: the guest keeps the size it has.
            Reason::Withdrawn => {
                self.order = None;
                self.stuck_count = (self.stuck_count + 1).min(16);
                self.stuck_until = Some(at.plus(doubled(STUCK_MS, self.stuck_count - 1)));
            }
            Reason::HandsOff | Reason::Needed => self.order = None,
            // What was taken went with the old kernel.
            Reason::Rebooted => {
                if let Some(r) = self.reboot.as_mut() {
                    (r.given, r.to) = (Some(at), Some(action.to));
                }
                (self.last_take, self.need_then) = (None, None);
                self.last_give = Some(at);
                self.note_given(at, given);
            }
            Reason::Refresh => {
                if let Some(r) = self.reboot.as_mut() {
                    r.nudged = Some(at);
                }
            }
            _ if action.gives() => self.learn_given(at, action, given),
            _ => {
                if action.reason == Reason::Requested {
                    self.requested = Some(at);
                }
                (self.last_take, self.need_then) = (Some(at), self.need());
            }
        }
    }

    fn note_given(&mut self, at: Stamp, given: Bytes) {
        if given > Bytes::ZERO {
            let live = self.given.filter(|g| at.since(g.at) < GIVEN_LIFE_MS);
            let before = live.map_or(Bytes::ZERO, |g| g.bytes);
            self.given = Some(Given { at, bytes: before + given });
        }
    }

    fn learn_given(&mut self, at: Stamp, action: &Action, given: Bytes) {
        self.note_given(at, given);
        let taken = self.last_take.filter(|t| at.since(*t) < HARM_MS);
        if matches!(action.reason, Reason::GuestShort { .. }) && taken > self.harm_at {
            self.harm = (self.harm + 1).min(HARM_MOST);
            self.harm_at = Some(at);
            self.doublings = 0;
        }
        self.last_give = Some(at);
        if matches!(action.reason, Reason::HostClear { .. }) {
            self.last_returned = Some(at);
        }
    }

    /// Whose moves its balloon makes.
    pub(super) fn follow_balloon(&mut self, at: Stamp, vm: &VmSample, actual: Option<Bytes>) {
        if !self.is_heard(at, vm) {
            self.ledger.wait(at);
        }
        let (Some(ram), Some(actual)) = (vm.ram, actual) else { return };
        let was = self.footprint.and_then(|s| s.actual);
        if was.is_some_and(|was| actual < was) {
            (self.shrunk, self.landed) = (Some(at), false);
        }
        self.unmoved &= was.is_none_or(|was| actual <= was);
        self.sizes.see(at, actual);
        if let (Some(order), Some(was)) = (&self.order, was) {
            let grows = order.to > was;
            // It touches what it was given before it takes more.
            let held = self.held_before() + (order.to - was);
            self.grew_to = grows.then_some(GrewTo { at, to: order.to, held });
        }
        if self.ledger.is_new() {
            // Whose its size is may still be told, and a QEMU that has not taken up the VM's state
            // yet tells another size.
            let arrives = vm.noted.is_some() && vm.run == Some(RunState::Migrating);
            if arrives || matches!(vm.metadata, Metadata::Unread(_)) {
                return;
            }
            if let Some(noted) = vm.noted {
                self.ledger = Ledger::noted(at, noted.min(ram - actual));
            }
        }
        let plugged = self.ledger.seen.is_some_and(|(was, _)| was != ram);
        let boots = self.boots(at);
        // As large as it was with the RAM of now: what is plugged, no balloon gave up.
        let was = self.ledger.seen.map_or(actual, |(_, held)| ram - held);
        self.grew_to = self.grew_to.filter(|_| !plugged);
        let deflates = vm.balloon.as_ref().is_some_and(|b| b.may_deflate());
        let moved = self.ledger.observe(at, (ram, actual), deflates, boots);
        if moved == Move::Foreign || self.ledger.suspect {
            self.strayed = Some(at);
        }
        let low = ram.share(LOW_SHARE).max(Bytes::mib(32));
        match moved {
            // Its guest tells of the new memory later than QEMU.
            Move::Own if plugged => {
                (self.order, self.strayed) = (None, Some(at));
                if let Some(r) = self.raised.take().filter(|r| r.alone) {
                    self.ledger.foreign = r.foreign;
                }
            }
            Move::Own => {}
            Move::Foreign => (self.order, self.raised) = (None, None),
            Move::Shrank => self.follow_raise(at, vm, (was, actual), low),
        }
        self.judge_raise(at, vm, low);
    }

    /// Whether its balloon moves, and not by an order of Ebb's.
    pub fn moves(&self, at: Stamp) -> bool {
        // A guest that is out of memory touches what its driver gives it, and waits for more.
        let deflates = |r: &Raised| {
            let touches = r.touched >= (r.to - r.from).share(0.5);
            touches && at.since(r.since) >= RAISE_MS
        };
        let is_set = |r: Raised| r.at == at && r.step >= SURELY_SET && !deflates(&r);
        self.ledger.suspect || self.ledger.foreign == Some(at) || self.raised.is_some_and(is_set)
    }

    /// Whether it moves so, or did a moment ago: its guest may not have said what it has left.
    pub fn is_moved(&self, at: Stamp) -> bool {
        self.ledger.suspect || self.raised.is_some_and(|r| at.since(r.at) < STATS_MS)
    }

    /// What the host held of it, also in swap, when QEMU told its size before.
    fn held_before(&self) -> Bytes {
        self.footprint.and_then(|s| s.held).unwrap_or(Bytes(u64::MAX))
    }

    /// Its balloon shrank without an order, from a size to another.
    fn follow_raise(&mut self, at: Stamp, vm: &VmSample, (from, to): (Bytes, Bytes), low: Bytes) {
        self.order = None;
        // What is on the way to an order was ordered. A driver that gives its guest pages meanwhile
        // ends a little beyond it.
        let ordered = self.grew_to.filter(|g| at.since(g.at) < STATS_MS && g.to < to);
        let alone = self.raised.is_some_and(|r| r.alone);
        if !alone && ordered.is_some_and(|ordered| to - ordered.to < SURELY_SET) {
            return self.has_deflated(at);
        }
        let step = to - from;
        // What it got beyond its order is compared with what it has touched since it was there.
        let ordered = ordered.filter(|ordered| ordered.to < from);
        let (from, held) = ordered.map_or((from, self.held_before()), |o| (o.to, o.held));
        // A guest that has enough, however fast it has grown since it said so, did not do that: an
        // operator raised its size.
        let said = self.believed_stats(at, vm);
        let enough = said.and_then(|said| {
            // A word that is older tells nothing of the moves since then.
            let age_ms = said.age_ms.min(STATS_MS);
            let grown = self.fastest.rate(at).share(age_ms as f64 / 1000.0);
            Some(said.available? > low + grown)
        });
        let foreign = self.ledger.foreign;
        let before = self.raised.unwrap_or_else(|| Raised {
            since: at,
            foreign,
            from,
            held,
            caches: said.and_then(|s| s.caches).unwrap_or_default(),
            ..Raised::default()
        });
        self.raised = Some(Raised { at, to, step, ..before });
        if enough == Some(true) {
            self.raised_by_operator(at);
        } else {
            self.has_deflated(at);
        }
    }

    /// Who raised its size, by its next word and by what it has touched.
    fn judge_raise(&mut self, at: Stamp, vm: &VmSample, low: Bytes) {
        let held = vm.process.map_or(Bytes::ZERO, |p| p.resident() + p.swap);
        self.raised.iter_mut().for_each(|r| r.touched = r.touched.max(held - r.held));
        // It has deflated its balloon itself if its next word tells that it would have been out of
        // memory at the size before, or if it has touched the most of what it got, and not for
        // page cache: it may have freed that again. One that seemed to have too little has not if
        // it has touched next to nothing and has enough now.
        if let Some(raised) = self.raised
            && let Some(said) =
                self.believed_stats(at, vm).filter(|s| at.since(raised.at) > s.age_ms)
        {
            let got = raised.to - raised.from;
            let touched = raised.touched - (said.caches.unwrap_or_default() - raised.caches);
            let left = |more: Bytes| said.available.is_some_and(|left| left > low + more);
            let untouched = vm.process.is_some() && got >= SURELY_SET && touched < got.share(0.1);
            let had_enough = left(got) && (got == Bytes::ZERO || touched < got.share(0.5));
            let operator = raised.alone && had_enough || untouched && left(Bytes::ZERO);
            if operator {
                if !raised.alone {
                    self.raised_by_operator(at);
                    self.deflated_on_oom = None;
                }
                self.ledger.raised_by_others(at);
            } else if raised.alone {
                self.has_deflated(at);
            }
            self.raised = None;
        }
    }

    /// An operator raised its size: it is left alone.
    fn raised_by_operator(&mut self, at: Stamp) {
        (self.ledger.foreign, self.strayed) = (Some(at), Some(at));
        self.raised.iter_mut().for_each(|r| r.alone = true);
    }

    /// Its guest was out of memory and deflated its balloon itself: no operator did.
    fn has_deflated(&mut self, at: Stamp) {
        self.deflated_on_oom = Some(at);
        if let Some(r) = self.raised.as_mut().filter(|r| r.alone) {
            r.alone = false;
            self.ledger.foreign = r.foreign;
        }
    }

    pub(super) fn follow_order(&mut self, dt_ms: u64, actual: Option<Bytes>) {
        let (Some(order), Some(actual)) = (self.order.as_mut(), actual) else { return };
        let was = self.footprint.and_then(|s| s.actual).unwrap_or(actual);
        if dt_ms > 0 {
            let down = order.to < was;
            let moved = if down { was - actual } else { actual - was };
            let now = moved.0 as f64 * 1000.0 / dt_ms as f64;
            let weight = (dt_ms as f64 / 2000.0).min(1.0);
            self.rate = self.rate * (1.0 - weight) + now * weight;
        }
        if actual.abs_diff(order.to) < Bytes::mib(1) {
            self.landed = actual == order.to && !order.cuts_short;
            if order.to < order.moved_from {
                self.doublings = (self.doublings + 1).min(DOUBLINGS_MOST);
            }
            self.order = None;
            self.stuck_count = 0;
            self.stuck_until = None;
        } else if actual.abs_diff(order.moved_from) >= Bytes::mib(1) {
            order.moved_from = actual;
            order.still_ms = 0;
        } else {
            // A tick that came late has not looked meanwhile.
            order.still_ms += dt_ms.min(LOOK_MS);
            self.doublings = 0;
            // QEMU may not have got it, or was told something else since.
            if order.to > actual && order.still_ms >= STUCK_AFTER_MS {
                (self.order, self.unmoved) = (None, true);
            }
        }
    }

    /// How far it is with its last order.
    pub fn convergence(&self, at: Stamp, actual: Option<Bytes>, trust: f64) -> Convergence {
        let target = self.order.map(|o| o.to);
        let left = self.order.zip(actual).map_or(Bytes::ZERO, |(o, a)| o.to.abs_diff(a));
        let eta_ms = (target.is_some() && self.rate >= 1.0)
            .then(|| (left.0 as f64 * 1000.0 / self.rate) as u64);
        let stuck = self.stuck_until.is_some_and(|t| t > at);
        let state = match (self.order, actual) {
            _ if self.reboot.is_some() => Progress::Rebooting,
            _ if trust <= 0.0 => Progress::Lying,
            _ if stuck => Progress::Stuck,
            (Some(o), Some(_)) if o.still_ms >= STILL_MS => Progress::Stuck,
            (Some(o), Some(_)) if self.rate < SLOW_RATE && at.since(o.since) >= STILL_MS / 2 => {
                Progress::Slow
            }
            (Some(o), Some(a)) if o.to < a => Progress::Shrinking,
            (Some(_), Some(_)) => Progress::Growing,
            _ => Progress::Settled,
        };
        let rate = if target.is_some() { self.rate } else { 0.0 };
        Convergence { state, target, rate, eta_ms }
    }

    /// What of its order to shrink will be there soon: nothing of one that stands
    /// still, five seconds' worth of one that is slow. Others are asked for the rest.
    pub fn arriving(&self, at: Stamp, actual: Bytes) -> Bytes {
        let Some(o) = self.order else { return Bytes::ZERO };
        let left = actual - o.to;
        match () {
            () if o.still_ms >= STILL_MS / 2 => Bytes::ZERO,
            () if at.since(o.since) >= STILL_MS / 2 => left.min(Bytes((self.rate * 5.0) as u64)),
            () => left,
        }
    }

    /// What it was given last and has not touched yet and may touch any moment.
    pub fn outstanding(&self, at: Stamp, actual: Option<Bytes>, host_side: Bytes) -> Bytes {
        let live = |g: &Given| at.since(g.at) < GIVEN_LIFE_MS && !self.unmoved;
        let (Some(given), Some(actual)) = (self.given.filter(live), actual) else {
            return Bytes::ZERO;
        };
        given.bytes.min(self.grows_to(actual) - host_side)
    }

    /// The size that it grows to by its last order; the one that it has where it does not grow.
    pub fn grows_to(&self, actual: Bytes) -> Bytes {
        self.order.map_or(actual, |o| o.to.max(actual))
    }

    /// Whether QEMU may be discarding pages of this VM itself: its balloon grows,
    /// or grew a moment ago. One that has reached exactly the size of the last order has
    /// stopped: Linux reports a size after QEMU has acknowledged every page of it.
    pub fn inflates(&self, at: Stamp, actual: Option<Bytes>) -> bool {
        let echo_ms = if self.landed { LANDED_ECHO_MS } else { INFLATE_ECHO_MS };
        self.order.is_some_and(|o| actual.is_none_or(|a| o.to < a))
            || self.shrunk.is_some_and(|t| at.since(t) < echo_ms)
            || self.reboot.is_some()
    }

    /// Whether an order to shrink has moved nothing for too long.
    pub fn stalled(&self, vm: &VmModel) -> bool {
        let order = self.order.zip(vm.actual);
        order.is_some_and(|(o, actual)| o.to < actual && o.still_ms >= STUCK_AFTER_MS)
    }
}
