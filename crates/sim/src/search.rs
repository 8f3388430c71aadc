//! Looks for the worlds in which Ebb does worst against the best of its rivals.
//!
//! Points of [`crate::worlds`] at random, then, from the worst of them, neighbours that are
//! worse still. The share of random worlds in which nobody beats Ebb is the honest figure; the
//! worst ones found are for mending, and then for keeping.

use serde::Serialize;

use crate::compare::in_parallel;
use crate::contest::{Contestant, RIVALS};
use crate::oracle;
use crate::score::Score;
use crate::worlds::Point;

/// Stall within this of another's is the same, seconds, and as a share.
const SAME_S: f64 = 1.0;
const SAME_SHARE: f64 = 0.02;
/// Neighbours that are tried at a time.
const BROOD: usize = 8;

/// What became of a world.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Which.
    pub point: Point,
    /// In a few words.
    pub about: String,
    /// Guests.
    pub vms: u64,
    /// Held, stall in seconds, and killed: Ebb.
    pub ebb: (u64, f64, u64),
    /// The same of the best rival with the eyes that KVM gives.
    pub best: (u64, f64, u64),
    /// Who that is.
    pub rival: &'static str,
    /// The same of one whose guests tell it of each change within a tenth of a second.
    pub pushed: (u64, f64, u64),
    /// The same of one that knows the future.
    pub oracle: (u64, f64, u64),
    /// Laws that Ebb broke.
    pub broken: usize,
}

fn brief(s: &Score) -> (u64, f64, u64) {
    (s.held, s.stall_s, s.ooms)
}

/// Whether the first is at least as good as the second: in guests held and in stall.
fn as_good((held, stall, _): (u64, f64, u64), (other, its, _): (u64, f64, u64)) -> bool {
    held >= other && stall <= its + (its * SAME_SHARE).max(SAME_S)
}

impl Found {
    /// Plays all of them in this world.
    pub fn of(point: &Point) -> Found {
        let setup = point.setup();
        let ebb = Contestant::Ebb.run(&setup);
        let mut scores: Vec<(Contestant, Score)> =
            RIVALS.iter().map(|c| (*c, c.run(&setup).score)).collect();
        let rank = |s: &Score| (std::cmp::Reverse(s.held), s.stall_s);
        scores.sort_by(|(_, a), (_, b)| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        let (rival, best) = &scores[0];
        Found {
            point: point.clone(),
            about: point.about(),
            vms: ebb.score.vms,
            ebb: brief(&ebb.score),
            best: brief(best),
            rival: rival.name(),
            pushed: brief(&Contestant::QmemmanPushed.run(&setup).score),
            oracle: brief(&oracle::run(&setup)),
            broken: ebb.broken.len(),
        }
    }

    /// Nobody with the eyes that KVM gives does better.
    pub fn is_unbeaten(&self) -> bool {
        as_good(self.ebb, self.best)
    }

    /// Not even one whose guests tell it at once.
    pub fn beats_pushed(&self) -> bool {
        as_good(self.ebb, self.pushed)
    }

    /// How much worse than the best: a guest that is harmed counts as 30 s.
    pub fn loss(&self) -> f64 {
        let cost = |(held, stall, _): (u64, f64, u64)| stall + 30.0 * (self.vms - held) as f64;
        cost(self.ebb) - cost(self.best)
    }
}

/// What a search is to do.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// For all that is random.
    pub seed: u64,
    /// Worlds at random.
    pub worlds: usize,
    /// Steps from the worst of them to worse ones, each some neighbours.
    pub steps: usize,
    /// Threads.
    pub threads: usize,
}

impl Search {
    /// The worlds at random, and the worst that were found from the worst of them.
    pub fn run(&self) -> (Vec<Found>, Vec<Found>) {
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let points: Vec<Point> = (0..self.worlds).map(|_| Point::random(&mut rng)).collect();
        let random = in_parallel(&points, self.threads, Found::of);
        let mut worst = random.clone();
        worst.sort_by(|a, b| b.loss().total_cmp(&a.loss()));
        worst.truncate(BROOD);
        for _ in 0..self.steps {
            let next: Vec<Point> = worst.iter().map(|f| f.point.near(&mut rng)).collect();
            worst.extend(in_parallel(&next, self.threads, Found::of));
            worst.sort_by(|a, b| b.loss().total_cmp(&a.loss()));
            worst.truncate(BROOD);
        }
        (random, worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_good_is_in_both_figures() {
        assert!(as_good((5, 10.0, 0), (5, 9.5, 0)) && as_good((6, 0.0, 0), (5, 9.5, 0)));
        assert!(!as_good((4, 0.0, 0), (5, 9.5, 0)) && !as_good((5, 20.0, 0), (5, 9.5, 0)));
    }

    #[test]
    fn a_search_is_the_same_each_time() {
        let search = Search { seed: 3, worlds: 2, steps: 1, threads: 2 };
        let (random, worst) = search.run();
        assert_eq!((random.len(), worst.len()), (2, 4));
        assert!(worst.windows(2).all(|w| w[0].loss() >= w[1].loss()));
        assert_eq!(
            serde_json::to_string(&search.run()).unwrap(),
            serde_json::to_string(&(random, worst)).unwrap()
        );
    }
}
