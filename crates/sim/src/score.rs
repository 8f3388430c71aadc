//! The figures of a run: stalls, swapping, balloon reversals within a minute (hasty), fairness.

use std::fmt;

use ebb_core::units::Bytes;
use serde::Serialize;

use crate::guest::Guest;
use crate::misbehaviour::Misbehaviour;

/// A guest that waits for memory for more than this share of its time is harmed.
pub const HARM_SHARE: f64 = 0.01;
/// Stall within this of another's is the same, seconds, and as a share.
pub const SAME_S: f64 = 1.0;
const SAME_SHARE: f64 = 0.02;
/// Movements of a balloon below this are no change of direction: QEMU's size is
/// refreshed by one MiB.
const MOVE_LEAST: Bytes = Bytes::mib(8);

/// A need that moves by less than this share of a guest's RAM does not turn: the guest has room for
/// that, and its balloon need not follow.
const OWN_TURN_SHARE: f64 = 0.10;

/// The way of a VM's size, up and down.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// The utmost it reached in this direction.
    end: Bytes,
    /// `None` until it has moved.
    grows: Option<bool>,
}

impl Way {
    /// It begins at this size.
    pub fn at(size: Bytes) -> Way {
        Way { end: size, grows: None }
    }

    /// Whether it turns with this size, by at least as much.
    pub fn turns(&mut self, size: Bytes, least: Bytes) -> bool {
        let grows = size > self.end;
        if self.grows != Some(grows) && size.abs_diff(self.end) < least {
            return false;
        }
        self.end = size;
        self.grows.replace(grows).is_some_and(|before| before != grows)
    }
}

/// What is measured of one guest as time passes.
#[derive(Clone, Debug, Default)]
pub struct Gauge {
    lived_ms: u64,
    taken_ms: f64,
    idle_ms: f64,
    way: Way,
    /// How often its size changed direction.
    pub reversals: u64,
    /// When it did last, ms into the run.
    pub turned_ms: Option<u64>,
    /// Times it turned again within a minute.
    pub hasty: u64,
}

impl Gauge {
    /// `dt_ms` passed.
    pub fn pass(&mut self, g: &Guest, at_ms: u64, dt_ms: u64) {
        if !g.power {
            return;
        }
        if self.lived_ms == 0 {
            self.way = Way::at(g.actual);
        }
        self.lived_ms += dt_ms;
        self.taken_ms += (g.spec.ram - g.actual).0 as f64 * dt_ms as f64;
        self.idle_ms += g.idle().0 as f64 * dt_ms as f64;
        self.turn_at(g.actual, at_ms, MOVE_LEAST);
    }

    fn turn_at(&mut self, actual: Bytes, at_ms: u64, least: Bytes) {
        if self.way.turns(actual, least) {
            self.reversals += 1;
            let before = self.turned_ms.replace(at_ms);
            self.hasty += u64::from(before.is_some_and(|b| at_ms - b < 60_000));
        }
    }

    /// Given up by weight, per idle byte; `None` where there is nothing to compare.
    fn burden(&self, g: &Guest) -> Option<f64> {
        let lived = self.lived_ms.max(1) as f64;
        let (taken, idle) = (self.taken_ms / lived, self.idle_ms / lived);
        let counts =
            g.spec.misbehaviour == Misbehaviour::Ideal && idle > g.spec.ram.0 as f64 * 0.05;
        counts.then(|| taken * g.spec.weight / idle)
    }
}

/// What became of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Score {
    /// Guests.
    pub vms: u64,
    /// Of them, not harmed: none of their processes was killed for lack of memory,
    /// and they waited for memory for at most 1 % of their time.
    pub held: u64,
    /// Time that guests waited for memory, all together.
    pub stall_s: f64,
    /// Processes and guests killed for lack of memory.
    pub ooms: u64,
    /// Swapped by the host, out and in.
    pub swapped: Bytes,
    /// Changes of direction, a guest and minute.
    pub reversals: f64,
    /// Those beyond the turns that each guest's own need made, a guest and minute.
    pub needless: f64,
    /// The scenario's 8 GiB: how long until the host had them; `None`: it asks for
    /// none, or (`missed`) they never came.
    pub take_s: Option<f64>,
    /// The scenario's 4 GiB: how much later than it could have the guest had them.
    pub give_s: Option<f64>,
    /// Probes that did not come about in time.
    pub missed: u64,
    /// How unequally guests gave up memory: the coefficient of variation, over
    /// ideal guests, of (given up × weight / idle). 0: all alike.
    pub unfairness: f64,
    /// Time with less free memory than the host's low mark.
    pub overfull_s: f64,
    pub orders: u64,
    /// Simulated time.
    pub run_s: f64,
}

impl Score {
    /// What the guests tell at the end.
    pub fn of(guests: &[Guest], gauges: &[Gauge]) -> Score {
        let mut score = Score { vms: guests.len() as u64, ..Score::default() };
        let (mut turns, mut needless, mut minutes) = (0, 0, 0.0);
        for (g, gauge) in guests.iter().zip(gauges) {
            let share = g.counts.stall_ms / gauge.lived_ms.max(1) as f64;
            score.held += u64::from(g.counts.ooms == 0 && share <= HARM_SHARE);
            score.stall_s += g.counts.stall_ms / 1000.0;
            score.ooms += g.counts.ooms;
            score.swapped += g.counts.host_swap_in + g.counts.host_swap_out;
            turns += gauge.reversals;
            needless += gauge.reversals.saturating_sub(own_turns(g, gauge.lived_ms));
            minutes += gauge.lived_ms as f64 / 60_000.0;
        }
        let a_minute = |n: u64| if minutes > 0.0 { n as f64 / minutes } else { 0.0 };
        (score.reversals, score.needless) = (a_minute(turns), a_minute(needless));
        let burdens: Vec<f64> =
            guests.iter().zip(gauges).filter_map(|(g, gauge)| gauge.burden(g)).collect();
        score.unfairness = variation(&burdens);
        score
    }

    /// At least as good as another: in guests held, in stall and in kills. Where all guests are
    /// harmed anyway, guests held do not tell a kill from a wait.
    pub fn is_as_good_as(&self, other: &Score) -> bool {
        let same = other.stall_s + (other.stall_s * SAME_SHARE).max(SAME_S);
        self.held >= other.held && self.stall_s <= same && self.ooms <= other.ooms
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} / {:.0} s / {}", self.held, self.stall_s, self.ooms)
    }
}

/// How often what a guest wants turns by itself until it has lived so long: a balloon that follows
/// it turns as often. Whatever is done to it, it is counted by what its programs want.
fn own_turns(g: &Guest, lived_ms: u64) -> u64 {
    let from = g.spec.starts_ms;
    let mut gauge = Gauge { way: Way::at(g.spec.need.sum_at(from)), ..Gauge::default() };
    let least = g.spec.ram.share(OWN_TURN_SHARE);
    let moments = g.spec.need.moments().into_iter();
    for ms in moments.skip_while(|ms| *ms < from).take_while(|ms| *ms < from + lived_ms) {
        gauge.turn_at(g.spec.need.sum_at(ms), ms, least);
    }
    gauge.reversals
}

/// Standard deviation over mean; 0 for nothing.
fn variation(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    if mean <= 1e-6 {
        return 0.0;
    }
    let square = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    square.sqrt() / mean
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::{Curve, Need};
    use crate::guest::Spec;

    #[test]
    fn a_reversal_is_a_turn_of_more_than_a_refresh() {
        let mut g = Gauge { way: Way::at(Bytes::mib(1000)), ..Gauge::default() };
        for (s, mib) in [900, 899, 900, 850, 860, 870, 865, 800, 900].into_iter().enumerate() {
            g.turn_at(Bytes::mib(mib), s as u64 * 10_000, MOVE_LEAST);
        }
        assert_eq!((g.reversals, g.hasty), (3, 2));
    }

    #[test]
    fn turns_of_the_need_itself_are_told_from_those_of_the_balloon() {
        let wave = |mib| Curve::wave(60_000, 20_000, 10_000, Bytes::mib(100), Bytes::mib(mib));
        let guest = |mib| Guest::new(0, 0, Spec::new(Bytes::gib(1), Need::of(wave(mib))));
        // Up at 10 s, down at 20, up at 30, down at 40, up at 50, down at 60.
        assert_eq!(own_turns(&guest(500), 100_000), 5);
        assert_eq!(own_turns(&guest(500), 35_000), 2, "what has not come yet does not count");
        assert_eq!(own_turns(&guest(200), 100_000), 0, "it has room for that");
        let gauge = |reversals| Gauge { lived_ms: 60_000, reversals, ..Gauge::default() };
        let needless = |n| Score::of(&[guest(500), guest(200)], &[gauge(n), gauge(n)]).needless;
        // One guest may turn five times (four within the minute), the other not at all.
        assert_eq!((needless(3), needless(6)), (1.5, 4.0));
    }

    #[test]
    fn variation_is_none_for_equals_and_grows_with_spread() {
        assert_eq!(variation(&[]), 0.0);
        assert_eq!(variation(&[0.0, 0.0]), 0.0);
        assert_eq!(variation(&[0.5, 0.5]), 0.0);
        assert_eq!(variation(&[0.0, 1.0]), 1.0);
    }
}
