//! The laws every plan must keep, checked against the world as it truly is.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use ebb_core::config::Config;
use ebb_core::model::{Pressure, default_reserve};
use ebb_core::plan::{Action, DEADBAND, Reason};
use ebb_core::sample::VmId;
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use serde::Serialize;

use crate::guest::Guest;
use crate::misbehaviour::Misbehaviour;
use crate::score::Way;
use crate::world::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Law {
    /// No guest is asked to go below its floor.
    Floor,
    /// No guest is given more than its RAM.
    Ceiling,
    /// No order to one that does not answer or is not there, nothing taken of one that is
    /// being migrated.
    MustNotBeOrdered,
    /// Nothing is taken that was not written down.
    WrittenDown,
    /// No guest is asked for what it uses.
    InUse,
    /// No guest is asked by old statistics, or by none.
    OldNumbers,
    /// Gives come first in a plan; one order a guest at most; each guest is in it.
    Plan,
    /// What is given for the host's sake is there: free before grant.
    FreeBeforeGrant,
    /// No guest is asked within a minute after it was given memory, or given within a minute after
    /// it was asked, for the host's sake alone.
    Turned,
    /// One that waits for memory that its balloon holds is given some within 2 s, where
    /// the host has any.
    Relief,
    /// One that has just rebooted is not asked.
    Reboot,
    /// One that did not answer for a while is not asked in the next minute, unless most did not.
    Contact,
    /// An order that moves nothing is withdrawn, so that it does not bite later.
    Stuck,
    /// Only a short host pages out: not more than its swap holds, and of each guest
    /// that runs half of what it has at most, of one that is paused nine tenths.
    PagedOut,
    /// No balloon takes and gives back again and again while nothing changes, neither what its
    /// guest wants nor what all want together, and the host holds all of that.
    Cycle,
}

/// A law that was broken.
#[derive(Clone, Debug, Serialize)]
pub struct Breach {
    pub law: Law,
    /// Milliseconds into the run.
    pub at_ms: u64,
    /// How.
    pub what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ms: {}", self.law, self.at_ms, self.what)
    }
}

/// Breaches kept; more of them say nothing new.
const MOST: usize = 100;
/// Nothing is taken by statistics older than this, ms (a tick beyond Ebb's mark).
const OLD_MS: u64 = 3_500;
/// Smaller differences break no law: some numbers are in whole MiB.
const TOLERANCE: Bytes = Bytes::mib(16);
/// A host with more than this share beyond what its kernel keeps free can relieve a guest at once.
const ROOMY: f64 = 0.02;
/// More page cache than this can be dropped.
const CACHE: Bytes = Bytes::mib(64);
/// What a guest keeps in DRAM where others are paged out, and one that is paused, a share.
const KEPT: f64 = 0.5;
const KEPT_PAUSED: f64 = 0.1;
/// Below this share of its reserve a host is critical.
const CRITICAL: f64 = 0.25;
/// One that booted less long ago has still to touch its memory, ms.
const BOOTS_MS: u64 = 60_000;
/// Left alone after a reboot for so long, ms.
const SETTLE_MS: u64 = 10_000;
/// One that did not answer for so long, ms, is not to be asked for [`REACHED_MS`].
const UNREACHED_MS: u64 = 10_000;
/// See [`UNREACHED_MS`].
const REACHED_MS: u64 = 60_000;
/// An order that moved nothing for so long should be gone, ms.
const UNMOVED_MS: u64 = 20_000;

/// Turns that a balloon may make within a minute while nothing changes: one step too far, and back.
const TURNS_MOST: usize = 2;
/// A change of direction is one of this share of a guest's RAM at least.
const TURN_LEAST: f64 = 0.02;
/// Nothing changes: what a guest wants stays within this share of its RAM, what all want within
/// this share of the host.
const OWN_STILL: f64 = 0.02;
const ALL_STILL: f64 = 0.005;
/// What all want fits if it is at most this share of the host.
const FITS: f64 = 0.9;
/// The time that balloons have to follow a change, ms.
const FOLLOWS_MS: u64 = 20_000;

/// Since when a size has stayed where it is.
#[derive(Clone, Copy, Debug, Default)]
struct Still {
    size: Bytes,
    since: u64,
}

impl Still {
    /// It is of this size now, and within `by` it is the same.
    fn look(&mut self, size: Bytes, by: Bytes, at: u64) {
        if self.size.abs_diff(size) > by {
            *self = Still { size, since: at };
        }
    }
}

/// What the checker has seen of one guest.
#[derive(Clone, Debug, Default)]
struct Past {
    wants: Still,
    way: Way,
    /// When its size turned within the last minute.
    turns: VecDeque<u64>,
    turned: Option<(bool, u64)>,
    waits_since: Option<u64>,
    stalled_ms: f64,
    actual: Bytes,
    /// Since when it does not answer.
    mute_since: Option<u64>,
    /// When it answered again after a while.
    back: Option<u64>,
    /// Since when an order to shrink has moved nothing.
    unmoved_since: Option<u64>,
}

/// Checks plans against the world.
pub struct Laws {
    pub broken: Vec<Breach>,
    config: Config,
    past: BTreeMap<VmId, Past>,
    /// What all want, and others than VMs use.
    all: Still,
}

impl Laws {
    /// The laws under this configuration.
    pub fn new(config: &Config) -> Laws {
        let config = config.clone();
        Laws { broken: Vec::new(), config, past: BTreeMap::new(), all: Still::default() }
    }

    fn breach(&mut self, law: Law, at_ms: u64, what: String) {
        if self.broken.len() < MOST {
            self.broken.push(Breach { law, at_ms, what });
        }
    }

    /// Checks one tick, just after it was applied.
    pub fn check(&mut self, world: &World, tick: &Tick) {
        let at = world.at_ms();
        for action in &tick.plan.actions {
            self.check_order(world, action);
            self.check_direction(action, at);
        }
        self.check_plan(tick, at);
        self.check_offload(world, tick, at);
        self.check_reach(world, tick, at);
        self.check_grants(world, tick, at);
        self.check_progress(world, tick, at);
        self.check_cycle(world, at);
    }

    fn check_order(&mut self, world: &World, action: &Action) {
        let at = world.at_ms();
        let Some(i) = world.index(action.vm) else {
            return self.breach(
                Law::MustNotBeOrdered,
                at,
                format!("{:?} does not exist", action.vm),
            );
        };
        let g = &world.guests[i];
        let (name, to) = (&action.name, action.to);
        let misbehaviour = g.spec.misbehaviour;
        if !misbehaviour.answers(at)
            || (misbehaviour.migrates(at) && to < action.from)
            || misbehaviour == Misbehaviour::Bare
        {
            self.breach(Law::MustNotBeOrdered, at, format!("{name} is ordered and must not be"));
        }
        if to > g.spec.ram {
            self.breach(Law::Ceiling, at, format!("{name} to {to}, RAM {}", g.spec.ram));
        }
        let nudge = matches!(action.reason, Reason::Withdrawn | Reason::Refresh);
        if to >= action.from || nudge {
            return;
        }
        let floor = self.config.settings(name, None).min.of(g.spec.ram);
        if to < floor {
            self.breach(Law::Floor, at, format!("{name} to {to}, floor {floor}"));
        }
        if !world.remembered.vms.iter().any(|o| o.id == action.vm) {
            self.breach(Law::WrittenDown, at, format!("{name} to {to} without a record"));
        }
        // What it used when it sent the statistics that were looked at last: no more can be known.
        let used = g.used().min(world.known_used(i).unwrap_or_default());
        if to + TOLERANCE < used && g.spec.misbehaviour != Misbehaviour::Lying {
            self.breach(Law::InUse, at, format!("{name} to {to}, it uses {used}"));
        }
        if world.age_ms(i).is_none_or(|age| age > OLD_MS) {
            self.breach(Law::OldNumbers, at, format!("{name} to {to} on old numbers"));
        }
        if g.boots > 0 && at < g.booted_ms + SETTLE_MS {
            self.breach(Law::Reboot, at, format!("{name} to {to} while it boots"));
        }
    }

    fn check_direction(&mut self, action: &Action, at: u64) {
        let grows = match action.reason {
            Reason::HostClear { .. } => true,
            Reason::HostShort { state, waits: Bytes(0), .. } if state <= Pressure::Soft => false,
            _ => return,
        };
        let past = self.past.entry(action.vm).or_default();
        let before = past.turned.replace((grows, at));
        if before.is_some_and(|(was, then)| was != grows && at - then < 60_000) {
            self.breach(Law::Turned, at, format!("{} turned around", action.name));
        }
    }

    fn check_plan(&mut self, tick: &Tick, at: u64) {
        let actions = &tick.plan.actions;
        if actions.windows(2).any(|w| !w[0].gives() && w[1].gives()) {
            self.breach(Law::Plan, at, "a take before a give".into());
        }
        let mut ids: Vec<VmId> = actions.iter().map(|a| a.vm).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|w| w[0] == w[1]) {
            self.breach(Law::Plan, at, "two orders to one guest".into());
        }
        let forbidden = tick.forbidden.is_some();
        for vm in &tick.sample.vms {
            let held = tick.plan.held.iter().any(|h| h.vm == vm.id);
            if !forbidden && held == ids.binary_search(&vm.id).is_ok() {
                self.breach(Law::Plan, at, format!("{} is not in the plan once", vm.name));
            }
        }
    }

    /// Looked at just after the orders were given, and before they are carried out.
    fn check_offload(&mut self, world: &World, tick: &Tick, at: u64) {
        let orders = &tick.plan.orders.offload;
        let total = world.host.total;
        if !orders.is_empty() && world.host.free(&world.guests) > default_reserve(total).share(2.0)
        {
            self.breach(Law::PagedOut, at, "the host has enough".into());
        }
        // What is ordered counts as under way already.
        let out: Bytes = world.guests.iter().map(|g| g.out + g.paging).sum();
        if !orders.is_empty() && out > world.host.swap {
            self.breach(Law::PagedOut, at, "more than the host's swap holds".into());
        }
        for order in orders {
            let name = &order.name;
            let Some(i) = world.index(order.vm) else {
                self.breach(Law::MustNotBeOrdered, at, format!("{name} does not exist"));
                continue;
            };
            let g = &world.guests[i];
            let misbehaviour = g.spec.misbehaviour;
            if !misbehaviour.answers(at)
                || misbehaviour.migrates(at)
                || misbehaviour == Misbehaviour::Pinned
            {
                self.breach(
                    Law::MustNotBeOrdered,
                    at,
                    format!("{name} is paged out and must not be"),
                );
            }
            let kept = (g.resident() + g.out).share(if g.paused { KEPT_PAUSED } else { KEPT });
            if g.resident() + TOLERANCE < kept + order.bytes {
                self.breach(
                    Law::PagedOut,
                    at,
                    format!("{} of {name}, {} in DRAM", order.bytes, g.resident()),
                );
            }
        }
    }

    /// Who could not be helped a moment ago is not made smaller.
    fn check_reach(&mut self, world: &World, tick: &Tick, at: u64) {
        let answers = |i: usize| world.guests[i].spec.misbehaviour.answers(at);
        let seen: Vec<usize> = tick.sample.vms.iter().filter_map(|vm| world.index(vm.id)).collect();
        let heard = |i: usize| answers(i) && world.guests[i].spec.misbehaviour.speaks(at);
        let silent = seen.iter().filter(|i| !heard(**i)).count();
        // What most of them share has a cause outside of them.
        let shared = silent >= 3 && 2 * silent > seen.len();
        for vm in &tick.sample.vms {
            let Some(i) = world.index(vm.id) else { continue };
            let answers = answers(i);
            let past = self.past.entry(vm.id).or_default();
            if !answers {
                past.mute_since = (!shared).then_some(past.mute_since.unwrap_or(at));
            } else if past.mute_since.take().is_some_and(|t| at - t > UNREACHED_MS) {
                past.back = Some(at);
            }
            // An order that is withdrawn where its balloon stands asks for nothing.
            let asked = tick.plan.actions.iter().any(|a| a.vm == vm.id && a.to < a.from);
            if asked && past.back.is_some_and(|t| at - t < REACHED_MS) {
                self.breach(
                    Law::Contact,
                    at,
                    format!("{} is asked just after it was mute", vm.name),
                );
            }
        }
    }

    fn check_grants(&mut self, world: &World, tick: &Tick, at: u64) {
        let sakes = |a: &&Action| matches!(a.reason, Reason::HostClear { .. });
        let granted: Bytes = tick.plan.actions.iter().filter(sakes).map(|a| a.to - a.from).sum();
        let headroom = world.host.available(&world.guests);
        if granted > headroom {
            self.breach(Law::FreeBeforeGrant, at, format!("{granted} of {headroom}"));
        }
    }

    /// Only where all balloons do as they are told: what others hold cannot be taken, so that not
    /// all fits although it would.
    fn check_cycle(&mut self, world: &World, at: u64) {
        let wants = |g: &Guest| g.wants().anon + g.wants().files;
        let on = || world.guests.iter().enumerate().filter(|(_, g)| g.power && !g.paused);
        if world.guests.iter().any(|g| g.spec.misbehaviour != Misbehaviour::Ideal) {
            return;
        }
        let all = on().map(|(_, g)| wants(g)).sum::<Bytes>() + world.host.others;
        self.all.look(all, world.host.total.share(ALL_STILL), at);
        if all > world.host.total.share(FITS) {
            self.all.since = at;
        }
        for (i, g) in on() {
            let Some(id) = world.id(i) else { continue };
            let past = self.past.entry(id).or_default();
            past.wants.look(wants(g), g.spec.ram.share(OWN_STILL), at);
            if past.way.turns(g.actual, g.spec.ram.share(TURN_LEAST)) {
                past.turns.push_back(at);
            }
            let from =
                (self.all.since.max(past.wants.since) + FOLLOWS_MS).max(at.saturating_sub(60_000));
            while past.turns.front().is_some_and(|t| *t < from) {
                past.turns.pop_front();
            }
            let turns = past.turns.len();
            if turns > TURNS_MOST {
                let size = g.actual;
                past.turns.clear();
                self.breach(Law::Cycle, at, format!("{i} turned {turns} times, now {size}"));
            }
        }
    }

    /// Who waits for memory that its balloon holds; who does not follow.
    fn check_progress(&mut self, world: &World, tick: &Tick, at: u64) {
        for vm in &tick.sample.vms {
            let Some(i) = world.index(vm.id) else { continue };
            let g = &world.guests[i];
            let past = self.past.entry(vm.id).or_default();
            // It waits for its own sake, its balloon could help, and it can be asked.
            let stalled = g.counts.stall_ms - g.counts.host_stall_ms;
            let waits = stalled - past.stalled_ms > 50.0
                && g.wants().anon > g.alloc
                && g.is_full()
                && g.actual + Bytes::mib(64) < g.spec.ram
                && g.target <= g.actual
                && matches!(
                    g.spec.misbehaviour,
                    Misbehaviour::Ideal
                        | Misbehaviour::Slow
                        | Misbehaviour::Stuck
                        | Misbehaviour::Pinned
                )
                && g.spec.misbehaviour.answers(at)
                && has_room_for(world, g, at);
            past.stalled_ms = stalled;
            past.waits_since = waits.then(|| past.waits_since.unwrap_or(at));
            let late = past.waits_since.is_some_and(|t| at - t > 2_000);
            let asked = g.target + Bytes::mib(4) < g.actual && g.spec.misbehaviour.answers(at);
            let still = g.actual.abs_diff(past.actual) < Bytes::mib(1);
            past.actual = g.actual;
            past.unmoved_since = (asked && still).then(|| past.unmoved_since.unwrap_or(at));
            let unmoved = past.unmoved_since.is_some_and(|t| at - t > UNMOVED_MS);
            if unmoved && g.spec.misbehaviour == Misbehaviour::Stuck {
                self.breach(Law::Stuck, at, format!("{} was told {}", vm.name, g.target));
            }
            if late {
                self.breach(Law::Relief, at, format!("{} waits for memory", vm.name));
            }
        }
    }
}

/// Whether the host has memory for one that waits; where it has not, others must give first. What
/// guests were given and are about to touch it has no more: those that grow or have just booted.
/// One that has page cache to drop waits for what lies above the mark of critical, and for what
/// guests' kernels keep free and have not touched.
fn has_room_for(world: &World, guest: &Guest, at: u64) -> bool {
    let total = world.host.total;
    let guests = || world.guests.iter().filter(|g| g.power);
    let untouched = |g: &Guest| g.actual - g.mapped() - g.out;
    let boots = |g: &Guest| at.saturating_sub(g.booted_ms) < BOOTS_MS;
    let touches = |g: &&Guest| g.wants().anon > g.alloc || boots(g);
    let soon: Bytes = guests().filter(touches).map(untouched).sum();
    let kept: Bytes = guests().map(|g| untouched(g).min(g.watermark())).sum();
    let available = world.host.available(&world.guests);
    let above = available - default_reserve(total).share(CRITICAL);
    let has_cache = guest.cache() > CACHE;
    available - soon > total.share(ROOMY) && (!has_cache || above - kept > DEADBAND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::{Curve, Need};
    use crate::guest::Spec;
    use crate::world::Setup;

    /// How often *Cycle* is broken where a guest is told 500 and 900 MiB by turns, each for so
    /// long, and wants this.
    fn cycles(each_s: u64, need: Curve) -> usize {
        let guests = vec![Spec::new(Bytes::gib(1), Need::of(need))];
        let mut world = World::new(&Setup::of(Bytes::gib(4), Bytes::ZERO, 200_000, guests));
        let mut laws = Laws::new(&Config::default());
        while !world.over() {
            let at = world.at_ms();
            let to = if (at / 1000 / each_s).is_multiple_of(2) { 500 } else { 900 };
            world.order(world.id(0).unwrap(), Bytes::mib(to)).unwrap();
            laws.check_cycle(&world, at);
            world.pass(500);
        }
        assert!(laws.broken.iter().all(|b| b.law == Law::Cycle));
        laws.broken.len()
    }

    #[test]
    fn a_balloon_that_goes_to_and_fro_while_nothing_changes_breaks_a_law() {
        let flat = || Curve::flat(Bytes::mib(200));
        assert!(cycles(5, flat()) > 5, "{}", cycles(5, flat()));
        assert_eq!(cycles(40, flat()), 0, "a turn in 40 s");
        let wave = Curve::wave(200_000, 30_000, 0, Bytes::mib(100), Bytes::mib(300));
        assert_eq!(cycles(5, wave), 0, "its guest wants more and less");
    }
}
