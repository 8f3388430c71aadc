//! What a guest's programs want over time: curves of bytes, all from a seed.
//!
//! A [`Need`] is fixed before a run and does not depend on what any policy does,
//! so that every policy faces the same demand. Times are milliseconds since the
//! start of the run.

use ebb_core::units::Bytes;

/// A size over time: holds each value until the next one's moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Curve(Vec<(u64, Bytes)>);

impl Curve {
    /// From points in any order; of several at one moment the last counts.
    pub fn new(mut points: Vec<(u64, Bytes)>) -> Curve {
        points.sort_by_key(|p| p.0);
        points.dedup_by(|later, first| {
            let same = later.0 == first.0;
            if same {
                first.1 = later.1;
            }
            same
        });
        Curve(points)
    }

    /// Always the same.
    pub fn flat(size: Bytes) -> Curve {
        Curve(vec![(0, size)])
    }

    /// Nothing but between two moments.
    pub fn burst(from_ms: u64, for_ms: u64, size: Bytes) -> Curve {
        Curve::new(vec![(0, Bytes::ZERO), (from_ms, size), (from_ms + for_ms, Bytes::ZERO)])
    }

    /// Idle and busy in turns: `low` to `high`, the first turn `offset_ms` late,
    /// busy for half of each period.
    pub fn wave(until_ms: u64, period_ms: u64, offset_ms: u64, low: Bytes, high: Bytes) -> Curve {
        let mut points = vec![(0, low)];
        let mut at = offset_ms;
        while at < until_ms {
            points.push((at, high));
            points.push((at + period_ms / 2, low));
            at += period_ms;
        }
        Curve::new(points)
    }

    /// Phases of 5 to 90 s, mostly small, at times nearly `most`.
    pub fn phases(rng: &mut fastrand::Rng, until_ms: u64, least: Bytes, most: Bytes) -> Curve {
        let mut points = Vec::new();
        let mut at = 0;
        while at < until_ms {
            points.push((at, least + (most - least).share(rng.f64().powi(3))));
            at += rng.u64(5_000..90_000);
        }
        Curve::new(points)
    }

    /// Short spikes, one in about every `every_ms`.
    pub fn spikes(rng: &mut fastrand::Rng, until_ms: u64, every_ms: u64, size: Bytes) -> Curve {
        let mut points = vec![(0, Bytes::ZERO)];
        let mut at = rng.u64(0..every_ms);
        while at < until_ms {
            let for_ms = rng.u64(2_000..8_000);
            points.push((at, size.share(0.5 + rng.f64() * 0.5)));
            points.push((at + for_ms, Bytes::ZERO));
            at += for_ms + rng.u64(every_ms / 2..every_ms * 3 / 2);
        }
        Curve::new(points)
    }

    /// Grows by `rate` bytes a second up to `most`, then its program is started
    /// anew and it begins at nothing.
    pub fn leak(until_ms: u64, from_ms: u64, rate: f64, most: Bytes) -> Curve {
        let mut points = vec![(0, Bytes::ZERO)];
        let (mut at, mut size) = (from_ms, Bytes::ZERO);
        while at < until_ms {
            points.push((at, size));
            size = if size >= most { Bytes::ZERO } else { (size + Bytes(rate as u64)).min(most) };
            at += 1000;
        }
        Curve::new(points)
    }

    /// The value at a moment; before the first point, that of the first.
    pub fn at(&self, ms: u64) -> Bytes {
        let i = self.0.partition_point(|p| p.0 <= ms);
        self.0.get(i.saturating_sub(1)).map_or(Bytes::ZERO, |p| p.1)
    }

    /// The value at a moment, walking on from where the last look ended: `ms`
    /// never goes backwards.
    fn follow(&self, cursor: &mut usize, ms: u64) -> Bytes {
        while self.0.get(*cursor + 1).is_some_and(|p| p.0 <= ms) {
            *cursor += 1;
        }
        self.0.get(*cursor).map_or(Bytes::ZERO, |p| p.1)
    }

    /// Two at once.
    pub fn plus(&self, other: &Curve) -> Curve {
        let moments = self.0.iter().chain(&other.0).map(|p| p.0);
        Curve::new(moments.map(|ms| (ms, self.at(ms) + other.at(ms))).collect())
    }

    /// Every value changed, by its moment.
    pub fn map(&self, change: impl Fn(u64, Bytes) -> Bytes) -> Curve {
        Curve(self.0.iter().map(|p| (p.0, change(p.0, p.1))).collect())
    }

    /// The moments at which it changes.
    pub fn moments(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|p| p.0)
    }
}

/// What is wanted at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Memory of processes and kernel.
    pub anon: Bytes,
    /// What of it is touched all the time.
    pub hot: Bytes,
    /// File data that is read all the time.
    pub files: Bytes,
}

/// A guest's demand for a whole run.
#[derive(Clone, Debug, Default)]
pub struct Need {
    /// Memory of processes and kernel.
    pub anon: Curve,
    /// Which share of it is touched all the time.
    pub hot_share: f64,
    /// File data that is read all the time.
    pub files: Curve,
    /// How fast processes allocate, bytes a second.
    pub rate: f64,
    /// Files read once, bytes a second: they fill the cache and are not missed.
    pub stream: f64,
}

impl Need {
    /// Anonymous memory alone, half of it hot, 400 MB/s.
    pub fn of(anon: Curve) -> Need {
        Need { anon, hot_share: 0.5, files: Curve::default(), rate: 400e6, stream: 0.0 }
    }

    /// What is wanted at a moment that is not before the last one asked for.
    pub fn at(&self, walk: &mut Walk, ms: u64) -> Want {
        let anon = self.anon.follow(&mut walk.anon, ms);
        let files = self.files.follow(&mut walk.files, ms);
        Want { anon, hot: anon.share(self.hot_share), files }
    }

    /// The moments at which what it wants changes.
    pub fn moments(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.anon.moments().chain(self.files.moments()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What it wants at a moment, all together.
    pub fn sum_at(&self, ms: u64) -> Bytes {
        self.anon.at(ms) + self.files.at(ms)
    }
}

/// How far a reader of a [`Need`] has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walk {
    anon: usize,
    files: usize,
}

/// Lowers what several want wherever it is more than `most` together, so that
/// what all need at once can be had at all.
pub fn fit(needs: &mut [&mut Need], most: Bytes) {
    let mut moments: Vec<u64> = needs.iter().flat_map(|n| n.moments()).collect();
    moments.sort_unstable();
    moments.dedup();
    let sum = |ms| (ms, needs.iter().map(|n| n.sum_at(ms)).sum());
    let sums: Vec<(u64, Bytes)> = moments.into_iter().map(sum).collect();
    // A value holds until the next point of its own curve: the worst until then.
    for need in needs.iter_mut() {
        need.anon = lowered(&need.anon, &sums, most);
        need.files = lowered(&need.files, &sums, most);
    }
}

fn lowered(curve: &Curve, sums: &[(u64, Bytes)], most: Bytes) -> Curve {
    let ends: Vec<u64> = curve.moments().skip(1).chain([u64::MAX]).collect();
    let points = curve.0.iter().zip(ends).map(|(&(from, size), end)| {
        let worst =
            sums.iter().filter(|s| s.0 >= from && s.0 < end).map(|s| s.1).max().unwrap_or(most);
        let share = if worst > most { most.fraction_of(worst) } else { 1.0 };
        (from, size.share(share))
    });
    Curve(points.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn curves_hold_their_value_until_the_next_point() {
        let c = Curve::burst(10, 5, Bytes(7)).plus(&Curve::flat(Bytes(1)));
        for (ms, size) in [(0, 1), (9, 1), (10, 8), (14, 8), (15, 1), (99, 1)] {
            assert_eq!(c.at(ms), Bytes(size), "{ms} ms");
        }
        let w = Curve::wave(100, 40, 10, Bytes(1), Bytes(9));
        assert_eq!([w.at(0), w.at(10), w.at(29), w.at(30), w.at(50)].map(|b| b.0), [1, 9, 9, 1, 9]);
        let l = Curve::leak(10_000, 2_000, 10.0, Bytes(25));
        let at = |s: u64| l.at(s * 1000).0;
        assert_eq!([at(0), at(3), at(4), at(5), at(6)], [0, 10, 20, 25, 0]);
    }

    #[test]
    fn needs_are_lowered_until_they_fit_together() {
        let mut a = Need::of(Curve::wave(100, 50, 0, Bytes(10), Bytes(100)));
        let mut b = Need::of(Curve::flat(Bytes(100)));
        fit(&mut [&mut a, &mut b], Bytes(120));
        for ms in 0..100 {
            assert!(a.sum_at(ms) + b.sum_at(ms) <= Bytes(120), "{ms}");
        }
        assert!(a.sum_at(0) > Bytes(50));
    }

    proptest! {
        #[test]
        fn a_walk_sees_what_a_look_sees(seed in any::<u64>()) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let need = Need::of(Curve::phases(&mut rng, 300_000, Bytes::mib(1), Bytes::gib(1)));
            let mut walk = Walk::default();
            for ms in (0..300_000).step_by(700) {
                prop_assert_eq!(need.at(&mut walk, ms).anon, need.anon.at(ms));
            }
        }
    }
}
