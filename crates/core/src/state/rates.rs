//! How fast a guest's numbers move, from two times that it spoke.

use serde::{Deserialize, Serialize};

use crate::sample::GuestStats;
use crate::units::Stamp;

/// Pages that a major fault of a file brings: half of the default readahead, as
/// not all of it is used.
const READAHEAD_PAGES: f64 = 8.0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestRates {
    /// When the later of the two statistics came.
    pub at: Stamp,
    /// Major faults a second.
    pub major_faults: f64,
    /// Swapped in, bytes a second.
    pub swap_in: f64,
    /// Swapped out, bytes a second.
    pub swap_out: f64,
    /// Allocation stalls a second, where known.
    pub alloc_stalls: f64,
    /// OOM kills between the two.
    pub oom_kills: u64,
    /// Pages a second that were dropped and read again; where only major faults
    /// are known, eight pages for each (readahead brings 32 KiB or more).
    pub refaults: f64,
    /// Change of its need (size less available), bytes a second: see [`Growth`](super::Growth).
    /// Unlike the change of available memory this is not moved by the balloon itself.
    pub need: f64,
}

impl GuestRates {
    pub(super) fn between(
        (was_at, was): (Stamp, &GuestStats),
        (at, now): (Stamp, &GuestStats),
        need: f64,
    ) -> Option<GuestRates> {
        let ms = at.since(was_at);
        if ms == 0 {
            return None;
        }
        let seconds = ms as f64 / 1000.0;
        let grown =
            |b: Option<u64>, n: Option<u64>| b.zip(n).map_or(0, |(b, n)| n.saturating_sub(b));
        let rate = |b, n| grown(b, n) as f64 / seconds;
        // Where reads of files count as page-ins, those say nothing of memory.
        let page_ins = |b, n| if now.is_windows { 0.0 } else { rate(b, n) };
        Some(GuestRates {
            at,
            major_faults: page_ins(was.major_faults, now.major_faults),
            swap_in: page_ins(was.swap_in.map(|b| b.0), now.swap_in.map(|b| b.0)),
            swap_out: page_ins(was.swap_out.map(|b| b.0), now.swap_out.map(|b| b.0)),
            alloc_stalls: rate(was.alloc_stalls, now.alloc_stalls),
            oom_kills: grown(was.oom_kills, now.oom_kills),
            refaults: match (was.refaults, now.refaults) {
                (Some(_), Some(_)) => rate(was.refaults, now.refaults),
                _ => page_ins(was.major_faults, now.major_faults) * READAHEAD_PAGES,
            },
            // What is free falls by every read of a file.
            need: if was.available.and(now.available).is_some() { need } else { 0.0 },
        })
    }
}
