//! How often something took how long, in classes that double.

use serde::{Deserialize, Serialize};

/// Classes: below 1 µs, below 2 µs, …, and the rest from 4 s on.
const CLASSES: usize = 24;

/// Counts of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct Histogram {
    /// Of the classes up to the last one that is not empty.
    counts: Vec<u64>,
}

impl Histogram {
    /// Counts one, nanoseconds.
    pub fn add(&mut self, ns: u64) {
        let class = (u64::BITS - (ns / 1000).leading_zeros()) as usize;
        let class = class.min(CLASSES - 1);
        self.counts.resize(self.counts.len().max(class + 1), 0);
        self.counts[class] += 1;
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum: u64, n| sum.saturating_add(*n))
    }

    /// Nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The end of the class in which this share of all lies, microseconds; `None` where
    /// nothing was counted. `share` is 0 to 1.
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0;
        let class = self.counts.iter().position(|c| {
            seen = u64::saturating_add(seen, *c);
            seen >= wanted
        })?;
        Some(1 << class)
    }

    /// Upper ends in microseconds and counts up to there, for a histogram of Prometheus; the
    /// last class has no end.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<u64>, u64)> + '_ {
        (0..CLASSES).scan(0, |sum, i| {
            *sum = u64::saturating_add(*sum, self.counts.get(i).copied().unwrap_or(0));
            Some(((i + 1 < CLASSES).then_some(1 << i), *sum))
        })
    }

    /// The least that all of them took together, seconds: the beginning of each class.
    pub fn least_sum_s(&self) -> f64 {
        let each = self.counts.iter().enumerate().skip(1);
        each.map(|(i, n)| *n as f64 * (1u64 << (i - 1)) as f64 * 1e-6).sum()
    }
}

impl From<Vec<u64>> for Histogram {
    /// Of another's classes those beyond the last are left out.
    fn from(mut counts: Vec<u64>) -> Histogram {
        counts.truncate(CLASSES);
        Histogram { counts }
    }
}

impl From<Histogram> for Vec<u64> {
    fn from(h: Histogram) -> Vec<u64> {
        h.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_ends_of_classes() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile_us(0.5), None);
        for us in 0..1000 {
            h.add(us * 1000);
        }
        assert_eq!((h.count(), h.quantile_us(0.0)), (1000, Some(1)));
        assert_eq!((h.quantile_us(0.5), h.quantile_us(1.0)), (Some(512), Some(1024)));
        h.add(u64::MAX);
        assert_eq!(h.quantile_us(1.0), Some(1 << 23));
        assert_eq!(h.cumulative().last(), Some((None, 1001)));
        assert_eq!(h.cumulative().nth(10), Some((Some(1024), 1000)));
    }

    #[test]
    fn text_keeps_it() {
        let mut h = Histogram::default();
        h.add(5_000);
        let text = serde_json::to_string(&h).unwrap();
        assert_eq!(text, "[0,0,0,1]");
        assert_eq!(serde_json::from_str::<Histogram>(&text).unwrap(), h);
        assert!(serde_json::from_str::<Histogram>(&format!("{:?}", [1; 99])).is_ok());
    }
}
