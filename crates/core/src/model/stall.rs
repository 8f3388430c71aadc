//! How much tasks suffer, by PSI, swapping out and cgroup v1's notifications: the state that
//! this stands for, and urgency in proportion.
//!
//! The marks of each sign are set here. When they count is `host.rs`'s matter: where memory is
//! plenty only heavy ones do.

use super::Pressure;
use crate::sample::Psi;
use crate::units::{Bytes, PAGE};

/// PSI averages (10 s) that count as pressure where headroom is also below two
/// reserves: `some`, `full`, the state they stand for. Left at half of them.
const PSI_MARKS: [(f64, f64, Pressure); 3] =
    [(10.0, 1.0, Pressure::Soft), (40.0, 5.0, Pressure::Hard), (80.0, 25.0, Pressure::Critical)];

/// Swapping out faster than this is pressure, pages a second (1 MiB/s).
const SWAP_OUT_MARK: f64 = 256.0;

/// What tells that tasks suffer.
pub(super) struct Stall {
    pub(super) psi: Option<Psi>,
    pub(super) swap_out_rate: f64,
    pub(super) notified: Option<Pressure>,
}

/// Swapping out at this rate, pages a second (16 MiB/s), or all tasks stalled for this share of
/// the time, percent, is a shortage somewhere, whatever headroom says.
const SEVERE: (f64, f64) = (4096.0, PSI_MARKS[1].1);

impl Stall {
    pub(super) fn is_severe(&self) -> bool {
        let (swap_out, full) = SEVERE;
        self.swap_out_rate >= swap_out || self.psi.is_some_and(|p| p.full.avg10 >= full)
    }

    /// The state that it stands for.
    pub(super) fn level(&self, before: Pressure) -> Pressure {
        let mut level = self.notified.unwrap_or_default();
        if let Some(psi) = &self.psi {
            for (some, full, state) in PSI_MARKS {
                let ease = if before >= state { 0.5 } else { 1.0 };
                if psi.some.avg10 >= some * ease || psi.full.avg10 >= full * ease {
                    level = level.max(state);
                }
            }
        }
        if self.swap_out_rate >= SWAP_OUT_MARK {
            level = level.max(Pressure::Soft);
        }
        level
    }

    /// In proportion: 0.5 at the mark of soft, 0.75 at hard's, 1 at critical's.
    pub(super) fn urgency(&self) -> f64 {
        let [soft, hard, critical] = PSI_MARKS;
        let along = |value: f64, marks: [f64; 3]| match value {
            v if v <= 0.0 => 0.0,
            v if v < marks[0] => 0.5 * v / marks[0],
            v if v < marks[1] => 0.5 + 0.25 * (v - marks[0]) / (marks[1] - marks[0]),
            v => (0.75 + 0.25 * (v - marks[1]) / (marks[2] - marks[1])).min(1.0),
        };
        let psi = self.psi.map_or(0.0, |p| {
            let some = along(p.some.avg10, [soft.0, hard.0, critical.0]);
            some.max(along(p.full.avg10, [soft.1, hard.1, critical.1]))
        });
        let swap =
            along(self.swap_out_rate, [SWAP_OUT_MARK, 16.0 * SWAP_OUT_MARK, 128.0 * SWAP_OUT_MARK]);
        let notified = match self.notified {
            Some(Pressure::Critical) => 1.0,
            Some(Pressure::Hard) => 0.75,
            Some(Pressure::Soft) => 0.5,
            _ => 0.0,
        };
        psi.max(swap).max(notified)
    }

    pub(super) fn words(&self) -> String {
        let psi = self.psi.map_or(String::new(), |p| {
            let (some, full) = (p.some.avg10, p.full.avg10);
            format!(", tasks stalled {some:.0} % (all of them {full:.0} %)")
        });
        let notified = self.notified.map_or(String::new(), |n| format!(", cgroup notifies {n}"));
        let swap = Bytes((self.swap_out_rate * PAGE as f64) as u64);
        format!("{psi}{notified}, swapping out {swap}/s")
    }
}
