//! Pressure stall information, computed from stalls as the kernel does it.
//!
//! `kernel/sched/psi.c`: every 2 s the stalled share of the period goes into three
//! exponential averages with the load average's fixed-point factors (e^(-2/10),
//! e^(-2/60), e^(-2/300) of 2048).

use ebb_core::sample::{Psi, PsiLine};

/// The kernel's period of averaging, ms.
const PERIOD_MS: u64 = 2_000;
/// Its factors: what stays of the 10, 60 and 300 s averages after a period.
const STAYS: [f64; 3] = [1677.0 / 2048.0, 1981.0 / 2048.0, 2034.0 / 2048.0];

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    avg: [f64; 3],
    total_us: f64,
    period_us: f64,
}

impl Line {
    fn close(&mut self, period_ms: u64) {
        let percent = (self.period_us / (period_ms as f64 * 10.0)).min(100.0);
        for (avg, stays) in self.avg.iter_mut().zip(STAYS) {
            *avg = *avg * stays + percent * (1.0 - stays);
        }
        self.period_us = 0.0;
    }

    fn line(&self) -> PsiLine {
        let [avg10, avg60, avg300] = self.avg.map(|a| (a * 100.0).round() / 100.0);
        PsiLine { avg10, avg60, avg300, total_us: self.total_us as u64 }
    }
}

/// Both lines of a pressure file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stalls {
    some: Line,
    full: Line,
    since_ms: u64,
}

impl Stalls {
    /// `dt_ms` passed in which each of the tasks was stalled for such a share.
    /// They stall independently: some is one less the product of the rest, full
    /// the product.
    pub fn pass(&mut self, dt_ms: u64, shares: impl Iterator<Item = f64>) {
        let (mut none, mut all, mut any) = (1.0, 1.0, false);
        for share in shares {
            any = true;
            none *= 1.0 - share;
            all *= share;
        }
        let us = dt_ms as f64 * 1000.0;
        for (line, share) in
            [(&mut self.some, 1.0 - none), (&mut self.full, if any { all } else { 0.0 })]
        {
            line.total_us += us * share;
            line.period_us += us * share;
        }
        self.since_ms += dt_ms;
        if self.since_ms >= PERIOD_MS {
            self.some.close(self.since_ms);
            self.full.close(self.since_ms);
            self.since_ms = 0;
        }
    }

    /// As the file shows it.
    pub fn psi(&self) -> Psi {
        Psi { some: self.some.line(), full: self.full.line() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_rise_and_decay_as_the_kernels() {
        let mut s = Stalls::default();
        for _ in 0..5 {
            s.pass(2_000, [1.0].into_iter());
        }
        // After 10 s of full stall: 1 - e^-1 = 63 %, 15 %, 3 %.
        let some = s.psi().some;
        assert!((some.avg10 - 63.2).abs() < 0.3, "{some:?}");
        assert!((some.avg60 - 15.4).abs() < 0.5, "{some:?}");
        assert!((some.avg300 - 3.3).abs() < 0.3, "{some:?}");
        assert_eq!(some.total_us, 10_000_000);
        for _ in 0..50 {
            s.pass(200, [0.0].into_iter());
        }
        assert!((s.psi().some.avg10 - 63.2 * 0.368).abs() < 0.5);
    }

    #[test]
    fn some_counts_anybody_and_full_everybody() {
        let mut s = Stalls::default();
        s.pass(2_000, [0.5, 0.5].into_iter());
        let psi = s.psi();
        assert_eq!((psi.some.total_us, psi.full.total_us), (1_500_000, 500_000));
        s.pass(2_000, std::iter::empty());
        assert_eq!(s.psi().full.total_us, 500_000);
    }
}
