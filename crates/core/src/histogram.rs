//! A histogram of durations, in classes that double.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// Classes: below 1 µs, below 2 µs, …, and the rest from 4 s on.
const CLASSES: usize = 24;

/// The quantiles that are shown, with their names.
pub const QUANTILES: [(&str, f64); 4] =
    [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Of the classes up to the last one that is not empty. A foreign text may have more classes.
    #[serde(deserialize_with = "classes")]
    counts: Vec<u64>,
    /// The longest, nanoseconds.
    max_ns: u64,
}

fn classes<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u64>, D::Error> {
    let mut counts = Vec::deserialize(d)?;
    counts.truncate(CLASSES);
    Ok(counts)
}

impl Histogram {
    /// Counts one, nanoseconds.
    pub fn add(&mut self, ns: u64) {
        let class = (u64::BITS - (ns / 1000).leading_zeros()) as usize;
        let class = class.min(CLASSES - 1);
        self.counts.resize(self.counts.len().max(class + 1), 0);
        self.counts[class] += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum: u64, n| sum.saturating_add(*n))
    }

    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The quantile at this share, nanoseconds: the end of a class, or the
    /// longest of all. `None` where nothing was counted. `share` is 0 to 1.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0;
        let class = self.counts.iter().position(|c| {
            seen = u64::saturating_add(seen, *c);
            seen >= wanted
        })?;
        let end = if class + 1 < CLASSES { 1000 << class } else { u64::MAX };
        Some(end.min(self.max_ns))
    }

    /// Upper ends in microseconds and counts up to there, for a histogram of Prometheus; the
    /// last class has no end.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<u64>, u64)> + '_ {
        (0..CLASSES).scan(0, |sum, i| {
            *sum = u64::saturating_add(*sum, self.counts.get(i).copied().unwrap_or(0));
            Some(((i + 1 < CLASSES).then_some(1 << i), *sum))
        })
    }

    /// A lower bound of their sum, seconds: each counts as the beginning of its class.
    pub fn least_sum_s(&self) -> f64 {
        let each = self.counts.iter().enumerate().skip(1);
        each.map(|(i, n)| *n as f64 * (1u64 << (i - 1)) as f64 * 1e-6).sum()
    }
}

impl fmt::Display for Histogram {
    /// The count, and the quantiles at 50 %, 99 %, 99.9 % and 100 %.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count())?;
        for (name, share) in QUANTILES {
            let Some(ns) = self.quantile_ns(share) else { break };
            let comma = if name == "p50" { ":" } else { "," };
            write!(f, "{comma} {name} {:.2} ms", ns as f64 / 1e6)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_ends_of_classes_or_the_longest() {
        let mut h = Histogram::default();
        assert_eq!((h.quantile_ns(0.5), h.to_string()), (None, "0".into()));
        for us in 0..1000 {
            h.add(us * 1000);
        }
        assert_eq!((h.count(), h.quantile_ns(0.0)), (1000, Some(1000)));
        assert_eq!((h.quantile_ns(0.5), h.quantile_ns(1.0)), (Some(512_000), Some(999_000)));
        let text = "1000: p50 0.51 ms, p99 1.00 ms, p99.9 1.00 ms, max 1.00 ms";
        assert_eq!(h.to_string(), text);
        h.add(u64::MAX);
        assert_eq!((h.quantile_ns(1.0), h.max_ns), (Some(u64::MAX), u64::MAX));
        assert_eq!(h.cumulative().last(), Some((None, 1001)));
        assert_eq!(h.cumulative().nth(10), Some((Some(1024), 1000)));
    }

    #[test]
    fn text_keeps_it() {
        let mut h = Histogram::default();
        h.add(5_000);
        let text = serde_json::to_string(&h).unwrap();
        assert_eq!(text, r#"{"counts":[0,0,0,1],"max_ns":5000}"#);
        assert_eq!(serde_json::from_str::<Histogram>(&text).unwrap(), h);
        let more = format!(r#"{{"counts":{:?},"max_ns":1}}"#, [1; 99]);
        assert_eq!(serde_json::from_str::<Histogram>(&more).unwrap().count(), CLASSES as u64);
    }
}
