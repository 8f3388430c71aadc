//! Looks for the worlds in which Ebb does worst against the best of its rivals.
//!
//! Points of [`crate::worlds`] at random, then, from the worst of them, neighbours that are
//! worse still. The share of random worlds in which no rival beats Ebb is the honest figure; the
//! worst ones found are for mending, and then for keeping.

use serde::Serialize;

use crate::compare::in_parallel;
use crate::controllers::{Controller, RIVALS};
use crate::law::Breach;
use crate::oracle;
use crate::score::{SAME_S, Score};
use crate::worlds::{Point, own_peaks_fit};

/// Times the best rival's stall that is far too much.
const FAR: f64 = 1.25;
/// Reversals beyond those of the guests' own needs that are too many, a guest and minute.
pub const NEEDLESS_MOST: f64 = 0.5;
/// Neighbours that are tried at a time.
const WALKERS: usize = 8;

/// What became of a world.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    pub point: Point,
    /// In a few words.
    pub about: String,
    /// Guests.
    pub vms: u64,
    pub ebb: Score,
    /// The best rival of those that see what KVM and QEMU show: it holds most guests, and of equals
    /// has the least stall.
    pub best: Score,
    /// Who that is.
    pub rival: &'static str,
    /// Killed by that of these rivals which kills fewest.
    pub fewest_killed: u64,
    /// A static split, where each guest can have the most that it ever needs for good.
    pub split: Option<Score>,
    /// One whose guests tell it of each change within a tenth of a second.
    pub pushed: Score,
    /// One that knows the future.
    pub oracle: Score,
    /// Laws that Ebb broke.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub broken: Vec<Breach>,
}

impl Found {
    /// Plays all of them in this world.
    pub fn of(point: &Point) -> Found {
        let setup = point.setup();
        let ebb = Controller::Ebb.run(&setup);
        let mut scores: Vec<(Controller, Score)> =
            RIVALS.iter().map(|c| (*c, c.run(&setup).score)).collect();
        let order = |a: &Score, b: &Score| {
            b.held.cmp(&a.held).then(a.stall_s.total_cmp(&b.stall_s)).then(a.ooms.cmp(&b.ooms))
        };
        scores.sort_by(|(_, a), (_, b)| order(a, b));
        let (rival, best) = scores[0].clone();
        let fewest_killed = scores.iter().map(|(_, s)| s.ooms).min().unwrap_or_default();
        let split = scores.into_iter().find(|(c, _)| *c == Controller::StaticSplit);
        Found {
            point: point.clone(),
            about: point.about(),
            vms: ebb.score.vms,
            ebb: ebb.score,
            best,
            rival: rival.name(),
            fewest_killed,
            split: split.filter(|_| own_peaks_fit(&setup)).map(|(_, s)| s),
            pushed: Controller::QmemmanPushed.run(&setup).score,
            oracle: oracle::run(&setup),
            broken: ebb.broken,
        }
    }

    /// No rival that sees what KVM and QEMU show does better: the best one not, and none kills
    /// fewer processes, however few guests it holds.
    pub fn is_unbeaten(&self) -> bool {
        self.ebb.is_as_good_as(&self.best) && self.ebb.ooms <= self.fewest_killed
    }

    /// Nor does qmemman whose guests tell it at once.
    pub fn beats_pushed(&self) -> bool {
        self.ebb.is_as_good_as(&self.pushed)
    }

    /// Memory could be divided once for good, and Ebb does worse than that.
    pub fn is_beaten_by_a_split(&self) -> bool {
        self.split.as_ref().is_some_and(|split| !self.ebb.is_as_good_as(split))
    }

    /// Ebb's stall is more than a quarter above the best rival's, and by more than a second.
    pub fn is_far_beaten(&self) -> bool {
        self.is_far_above() && self.ebb.stall_s > self.best.stall_s + SAME_S
    }

    /// The same, however small both are.
    pub fn is_far_above(&self) -> bool {
        self.ebb.stall_s > self.best.stall_s * FAR
    }

    /// A process was killed, and who knows the future had none killed.
    pub fn kills_in_vain(&self) -> bool {
        self.ebb.ooms > 0 && self.oracle.ooms == 0
    }

    /// Ebb's stall beside that of one who knows the future; a second is no matter to either.
    pub fn beside_the_limit(&self) -> f64 {
        (self.ebb.stall_s + SAME_S) / (self.oracle.stall_s + SAME_S)
    }

    /// How much worse than the best: a guest that is harmed counts as 30 s, as does a kill.
    pub fn loss(&self) -> f64 {
        let cost = |s: &Score| s.stall_s + 30.0 * (self.vms - s.held + s.ooms) as f64;
        cost(&self.ebb) - cost(&self.best)
    }
}

/// What a search is to do.
#[derive(Clone, Debug)]
pub struct Search {
    /// For all that is random.
    pub seed: u64,
    /// So many seeds from that one on.
    pub seeds: u64,
    /// Worlds at random, for each seed.
    pub worlds: usize,
    /// Steps from the worst of them to worse ones, each some neighbours.
    pub steps: usize,
    /// Coordinates that all worlds have, and their values.
    pub fixed: Vec<(usize, f64)>,
    pub threads: usize,
}

impl Search {
    /// The worlds at random, and the worst that were found from the worst of them.
    pub fn run(&self) -> (Vec<Found>, Vec<Found>) {
        let of = |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let drawn = (0..self.worlds).map(|_| Point::random(&mut rng).with(&self.fixed));
            drawn.collect::<Vec<Point>>()
        };
        let seeds = self.seed..self.seed.saturating_add(self.seeds);
        let points: Vec<Point> = seeds.flat_map(of).collect();
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let random = in_parallel(&points, self.threads, Found::of);
        let mut worst = random.clone();
        worst.sort_by(|a, b| b.loss().total_cmp(&a.loss()));
        worst.truncate(WALKERS);
        for _ in 0..self.steps {
            let near = worst.iter().map(|f| f.point.near(&mut rng).with(&self.fixed));
            let next: Vec<Point> = near.collect();
            worst.extend(in_parallel(&next, self.threads, Found::of));
            worst.sort_by(|a, b| b.loss().total_cmp(&a.loss()));
            worst.truncate(WALKERS);
        }
        (random, worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_good(
        (held, stall_s, ooms): (u64, f64, u64),
        (other, its, killed): (u64, f64, u64),
    ) -> bool {
        let other = Score { held: other, stall_s: its, ooms: killed, ..Score::default() };
        Score { held, stall_s, ooms, ..Score::default() }.is_as_good_as(&other)
    }

    #[test]
    fn as_good_is_in_all_three_figures() {
        assert!(as_good((5, 10.0, 0), (5, 9.5, 0)) && as_good((6, 0.0, 0), (5, 9.5, 0)));
        assert!(!as_good((4, 0.0, 0), (5, 9.5, 0)) && !as_good((5, 20.0, 0), (5, 9.5, 0)));
        assert!(as_good((5, 9.5, 2), (5, 9.5, 2)) && as_good((5, 9.5, 0), (5, 9.5, 2)));
        assert!(!as_good((5, 9.5, 3), (5, 9.5, 2)) && !as_good((6, 0.0, 1), (5, 9.5, 0)));
        assert!(!as_good((0, 5.0, 1), (0, 9.5, 0)), "also where all guests are harmed");
    }

    /// Of a world where the best rival has this score.
    fn found(ebb: Score, best: Score) -> Found {
        Found {
            point: Point::random(&mut fastrand::Rng::with_seed(1)),
            about: String::new(),
            vms: 4,
            ebb,
            rival: "none",
            fewest_killed: best.ooms,
            split: None,
            pushed: best.clone(),
            oracle: best.clone(),
            best,
            broken: Vec::new(),
        }
    }

    #[test]
    fn who_kills_more_than_any_rival_is_beaten_whatever_is_held() {
        let score = |held, ooms| Score { held, ooms, ..Score::default() };
        let unbeaten =
            |ebb, best, fewest_killed| Found { fewest_killed, ..found(ebb, best) }.is_unbeaten();
        assert!(unbeaten(score(0, 2), score(0, 2), 2));
        assert!(!unbeaten(score(0, 2), score(0, 1), 1));
        assert!(!unbeaten(score(3, 1), score(2, 5), 0), "one that holds fewer kills nobody");
        assert!(!unbeaten(score(2, 0), score(3, 1), 0), "the best one holds more");
    }

    #[test]
    fn a_quarter_more_counts_where_it_is_more_than_a_second() {
        let score = |stall_s| Score { held: 4, stall_s, ..Score::default() };
        let far = |ebb, best| {
            let f = found(score(ebb), score(best));
            (f.is_far_beaten(), f.is_far_above())
        };
        assert_eq!(far(100.0, 79.0), (true, true));
        assert_eq!(far(100.0, 81.0), (false, false));
        assert_eq!(far(0.1, 0.05), (false, true), "a tenth of a second is no loss");
        assert_eq!(far(1.1, 0.0), (true, true));
    }

    #[test]
    fn a_search_is_the_same_each_time() {
        let fixed = vec![(0, 0.1)];
        let search = Search { seed: 3, seeds: 2, worlds: 1, steps: 1, fixed, threads: 2 };
        let (random, worst) = search.run();
        assert_eq!((random.len(), worst.len()), (2, 4));
        assert!(random.iter().chain(&worst).all(|f| f.point.at[0] == 0.1));
        assert!(worst.windows(2).all(|w| w[0].loss() >= w[1].loss()));
        assert_eq!(
            serde_json::to_string(&search.run()).unwrap(),
            serde_json::to_string(&(random, worst)).unwrap()
        );
    }
}
