//! What became of a run: harm, swapping, haste, fairness.

use ebb_core::units::Bytes;
use serde::Serialize;

use crate::guest::Guest;
use crate::misbehaviour::Mood;

/// A guest that waits for memory for more than this share of its time is harmed.
pub const HARM_SHARE: f64 = 0.01;
/// Movements of a balloon below this are no change of direction: QEMU's size is
/// refreshed by one MiB.
const MOVE_LEAST: Bytes = Bytes::mib(8);

/// What is measured of one guest as time passes.
#[derive(Clone, Debug, Default)]
pub struct Gauge {
    lived_ms: u64,
    taken_ms: f64,
    idle_ms: f64,
    direction: i8,
    turn: Bytes,
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
            self.turn = g.actual;
        }
        self.lived_ms += dt_ms;
        self.taken_ms += (g.spec.ram - g.actual).0 as f64 * dt_ms as f64;
        self.idle_ms += g.idle().0 as f64 * dt_ms as f64;
        self.follow(g.actual, at_ms);
    }

    /// `turn` is the extreme it has reached in its present direction.
    fn follow(&mut self, actual: Bytes, at_ms: u64) {
        let further = match self.direction {
            1 => actual >= self.turn,
            -1 => actual <= self.turn,
            _ => false,
        };
        if further {
            self.turn = actual;
        } else if actual.abs_diff(self.turn) >= MOVE_LEAST {
            let was =
                std::mem::replace(&mut self.direction, if actual > self.turn { 1 } else { -1 });
            self.turn = actual;
            if was != 0 {
                self.reversals += 1;
                let before = self.turned_ms.replace(at_ms);
                self.hasty += u64::from(before.is_some_and(|b| at_ms - b < 60_000));
            }
        }
    }

    /// Given up by weight, per idle byte; `None` where there is nothing to compare.
    fn burden(&self, g: &Guest) -> Option<f64> {
        let lived = self.lived_ms.max(1) as f64;
        let (taken, idle) = (self.taken_ms / lived, self.idle_ms / lived);
        let counts = g.spec.mood == Mood::Ideal && idle > g.spec.ram.0 as f64 * 0.05;
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
    /// Orders given.
    pub orders: u64,
    /// Simulated time.
    pub run_s: f64,
}

impl Score {
    /// What the guests tell at the end.
    pub fn of(guests: &[Guest], gauges: &[Gauge]) -> Score {
        let mut score = Score { vms: guests.len() as u64, ..Score::default() };
        let (mut turns, mut minutes) = (0, 0.0);
        for (g, gauge) in guests.iter().zip(gauges) {
            let share = g.counts.stall_ms / gauge.lived_ms.max(1) as f64;
            score.held += u64::from(g.counts.ooms == 0 && share <= HARM_SHARE);
            score.stall_s += g.counts.stall_ms / 1000.0;
            score.ooms += g.counts.ooms;
            score.swapped += g.counts.host_swap_in + g.counts.host_swap_out;
            turns += gauge.reversals;
            minutes += gauge.lived_ms as f64 / 60_000.0;
        }
        score.reversals = if minutes > 0.0 { turns as f64 / minutes } else { 0.0 };
        let burdens: Vec<f64> =
            guests.iter().zip(gauges).filter_map(|(g, gauge)| gauge.burden(g)).collect();
        score.unfairness = variation(&burdens);
        score
    }
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

    #[test]
    fn a_reversal_is_a_turn_of_more_than_a_refresh() {
        let mut g = Gauge { turn: Bytes::mib(1000), ..Gauge::default() };
        for (s, mib) in [900, 899, 900, 850, 860, 870, 865, 800, 900].into_iter().enumerate() {
            g.follow(Bytes::mib(mib), s as u64 * 10_000);
        }
        assert_eq!((g.reversals, g.hasty), (3, 2));
    }

    #[test]
    fn variation_is_none_for_equals_and_grows_with_spread() {
        assert_eq!(variation(&[]), 0.0);
        assert_eq!(variation(&[0.0, 0.0]), 0.0);
        assert_eq!(variation(&[0.5, 0.5]), 0.0);
        assert_eq!(variation(&[0.0, 1.0]), 1.0);
    }
}
