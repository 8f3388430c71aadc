//! MOM, the memory overcommitment manager of oVirt: its `balloon.rules`.
//!
//! `host_free = avg10((MemFree + Buffers + Cached) / MemTotal)`, looked at every
//! 5 s. Every 10 s, below 0.20, every guest is shrunk towards
//! `max(min, used + guest_free% · cur)` by at most 5 %, where `guest_free% =
//! 0.20 · (host_free / 0.20)` or, at 0.05 and below, `host_free − 0.05`; else every
//! guest is grown by 5 %, at least to `used + 0.20 · cur`. Changes below 0.25 % are
//! not made. `used` is size less *free* memory: cache counts as used.

use std::collections::VecDeque;

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{GuestView, Observation, Policy, bytes, signed};

const PRESSURE: f64 = 0.20;
const CRITICAL: f64 = 0.05;
const GUEST_FREE: f64 = 0.20;
const CHANGE_MOST: f64 = 0.05;
const CHANGE_LEAST: f64 = 0.0025;
const HISTORY: usize = 10;

/// MOM's balloon rules.
#[derive(Default)]
pub struct Mom {
    history: VecDeque<f64>,
    looks: u64,
}

impl Policy for Mom {
    fn period_ms(&self) -> u64 {
        5_000
    }

    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let Some(m) = observation.sample.host.memory else { return Vec::new() };
        self.history.push_back((m.free + m.buffers + m.cached).fraction_of(m.total));
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
        self.looks += 1;
        if !self.looks.is_multiple_of(2) {
            return Vec::new();
        }
        let host_free = self.history.iter().sum::<f64>() / self.history.len() as f64;
        let rule = if host_free < PRESSURE { shrink } else { grow };
        let guests = observation.guests();
        guests.iter().filter_map(|g| Some((g.id, rule(g, host_free)?))).collect()
    }
}

fn used(g: &GuestView) -> Option<f64> {
    Some(signed(g.actual) - signed(g.free?))
}

fn shrink(g: &GuestView, host_free: f64) -> Option<Bytes> {
    let guest_free = if host_free <= CRITICAL {
        host_free - CRITICAL
    } else {
        GUEST_FREE * (host_free / PRESSURE)
    };
    let current = signed(g.actual);
    let least = signed(g.min).max(used(g)? + guest_free * current);
    let size = (current * (1.0 - CHANGE_MOST)).max(least);
    (size <= current && big_enough(current, size)).then(|| bytes(size))
}

fn grow(g: &GuestView, _: f64) -> Option<Bytes> {
    let current = signed(g.actual);
    let least = used(g)? + GUEST_FREE * current;
    let size = (current * (1.0 + CHANGE_MOST)).max(least).min(signed(g.ram));
    (size >= current && big_enough(current, size)).then(|| bytes(size))
}

fn big_enough(current: f64, size: f64) -> bool {
    (current - size).abs() / current > CHANGE_LEAST
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{ask, sample};

    /// The second look decides.
    fn decided(total: u64, free: u64, guests: &[(u64, u64, u64, u64)]) -> Vec<(u32, u64)> {
        let mut mom = Mom::default();
        let s = sample(total, free, guests);
        assert_eq!(ask(&mut mom, &s), [], "looks every 5 s, decides every 10 s");
        ask(&mut mom, &s)
    }

    #[test]
    fn guests_shrink_by_a_twentieth_below_a_fifth_and_grow_above() {
        // host_free 0.10: guest_free 0.10. First: used 200, 200 + 100 = 300 < 950.
        // Second: used 880, 880 + 100 = 980 > 950. Third: 990 + 100 > 1000: nothing.
        let guests = [(1000, 1000, 800, 0), (1000, 1000, 120, 0), (1000, 1000, 10, 0)];
        assert_eq!(decided(10_000, 1000, &guests), [(1, 950), (2, 980)]);
        // Cache counts as used; the floor of a quarter holds.
        assert_eq!(decided(10_000, 1000, &[(1000, 1000, 100, 700)]), []);
        assert_eq!(decided(10_000, 1000, &[(1000, 260, 255, 0)]), [(1, 250)]);
        // Below a twentieth guests are made to swap. host_free 0.03: guest_free −0.02: 700 of 1000
        // with none free: 700 − 14.
        assert_eq!(decided(10_000, 300, &[(1000, 700, 0, 0)]), [(1, 686)]);
        // 5 %; or to used + 20 %: 700 + 0; what is whole stays.
        let guests = [(1000, 700, 500, 0), (1000, 700, 0, 0), (1000, 1000, 0, 0)];
        assert_eq!(decided(10_000, 3000, &guests), [(1, 735), (2, 840)]);
    }

    #[test]
    fn the_average_of_ten_looks_counts() {
        let mut mom = Mom::default();
        let guests = [(1000, 900, 600, 0)];
        for _ in 0..10 {
            ask(&mut mom, &sample(10_000, 4000, &guests));
        }
        let low = sample(10_000, 0, &guests);
        let grew: Vec<bool> =
            (0..10).filter_map(|_| ask(&mut mom, &low).first().map(|d| d.1 > 900)).collect();
        // avg: 0.36 (no), 0.32, 0.28, 0.24, 0.20, then below.
        assert_eq!(grew, [true, true, false, false, false], "0.32, 0.24, 0.16, 0.08, 0");
    }
}
