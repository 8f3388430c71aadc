//! A VM's balloon and its guest's statistics, from either source, and how old they are.
//!
//! Nothing is judged here: `model/guest.rs` decides what of it is believed.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};
use crate::wire::abi::Facts;

/// A virtio balloon, as QMP tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalloonSample {
    /// `query-balloon`: RAM less what the balloon holds.
    pub actual: Bytes,
    /// How old that is, milliseconds; 0: QEMU answered in this tick.
    #[serde(default)]
    pub age_ms: u64,
    /// What counts in `actual` and no balloon can hold (virtio-mem): QEMU refuses an order for no
    /// more than that.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub beyond_balloon: Bytes,
    /// `free-page-reporting` of the device.
    pub reporting: Option<bool>,
    /// `deflate-on-oom` of the device; `None`: not told yet.
    pub deflate_on_oom: Option<bool>,
    /// The guest's last statistics; `None` before the first.
    pub guest: Option<GuestStats>,
}

impl BalloonSample {
    /// Whether the guest's driver deflates its balloon before the guest runs out of memory.
    pub fn deflates_on_oom(&self) -> bool {
        self.deflate_on_oom == Some(true) && !self.guest.is_some_and(|g| g.is_windows)
    }

    /// Whether the driver may deflate the balloon then, as far as is known: that a guest is Windows
    /// is told by its statistics only.
    pub fn may_deflate(&self) -> bool {
        self.deflate_on_oom != Some(false)
    }
}

/// The guest's own statistics: hints from a party that is not trusted and may be
/// late. QEMU's “unset” (all ones) is `None`. Counters are since guest boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// `last-update`: seconds since 1970 on the host's clock.
    pub updated_s: u64,
    /// How old they are at most, milliseconds: see [`Heard`].
    pub age_ms: u64,
    /// `stat-total-memory`.
    pub total: Option<Bytes>,
    /// `stat-free-memory`.
    pub free: Option<Bytes>,
    /// `stat-available-memory`.
    pub available: Option<Bytes>,
    /// `stat-disk-caches`.
    pub caches: Option<Bytes>,
    /// `stat-swap-in`, bytes.
    pub swap_in: Option<Bytes>,
    pub swap_out: Option<Bytes>,
    /// `stat-major-faults`.
    pub major_faults: Option<u64>,
    /// `stat-minor-faults`.
    pub minor_faults: Option<u64>,
    /// `stat-oom-kill` (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<u64>,
    /// `stat-alloc-stall` (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alloc_stalls: Option<u64>,
    /// `stat-direct-reclaim`, pages (QEMU 9.2+, guest 6.12+).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_reclaim: Option<u64>,
    /// It is Windows with virtio-win's service. Its page-ins count every read of a file, so they
    /// are no sign of a shortage (`Balloon/app/memstat.cpp`), and its driver deflates no balloon on
    /// its own.
    #[serde(default, alias = "counts_reads", skip_serializing_if = "std::ops::Not::not")]
    pub is_windows: bool,
    /// Pages that were reclaimed and soon read again; only tier guest tells
    /// (`workingset_refault_anon` + `_file`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refaults: Option<u64>,
}

impl GuestStats {
    /// Whether the guest was reset since it said `was`, where no event tells: its counters of page
    /// faults begin anew with its kernel. Those of Windows have 32 bits (`Balloon/app/memstat.cpp`,
    /// `Balloon/sys/memstat.c`), so one of them alone may also have run over.
    pub fn is_of_another_boot(&self, was: &GuestStats) -> bool {
        let is_windows = self.is_windows || was.is_windows;
        let minor = was.minor_faults.zip(self.minor_faults).is_some_and(|(was, is)| is < was);
        let major = was.major_faults.zip(self.major_faults);
        minor && major.map_or(!is_windows, |(was, is)| is < was || is == was && !is_windows)
    }
}

/// When a guest's last statistics came, as far as that can be known: QEMU tells it in
/// whole seconds, but statistics that differ from those seen before came after that look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    seen: Option<(GuestStats, Stamp)>,
    /// The last statistics came after this.
    after: Option<Stamp>,
    /// When they were first seen.
    first: Stamp,
}

impl Heard {
    /// QEMU showed these statistics (whose age is not known yet) at `at` or later.
    pub fn see(&mut self, at: Stamp, stats: GuestStats) {
        (self.after, self.first) = match self.seen {
            Some((old, _)) if old == stats => (self.after, self.first),
            seen => (seen.map(|(_, seen)| seen), at),
        };
        self.seen = Some((stats, at));
    }

    /// The statistics seen last.
    pub fn last(&self) -> Option<GuestStats> {
        self.seen.map(|(stats, _)| stats)
    }

    /// How old the statistics seen last are at most, milliseconds: by the wall clock (not
    /// where that was set back to before they came), or by when others were seen,
    /// whichever is younger. Where neither tells, by when they were first seen.
    pub fn age_ms(&self, at: Stamp, wall_ms: u64) -> u64 {
        let Some((stats, _)) = self.seen else { return 0 };
        let updated_ms = stats.updated_s.saturating_mul(1000);
        let by_wall = (updated_ms <= wall_ms + 1500).then(|| wall_ms.saturating_sub(updated_ms));
        by_wall
            .into_iter()
            .chain(self.after.map(|t| at.since(t)))
            .min()
            .unwrap_or(at.since(self.first))
    }
}

impl GuestStats {
    /// The facts block of the guest's module as balloon statistics.
    pub fn from_facts(f: &Facts, updated_s: u64, age_ms: u64) -> GuestStats {
        let pages = |n: u64| Some(Bytes::pages(n));
        GuestStats {
            updated_s,
            age_ms,
            total: pages(f.total),
            free: pages(f.free),
            available: pages(f.available),
            caches: pages(f.cached.saturating_add(f.buffers)),
            swap_in: pages(f.swap_in),
            swap_out: pages(f.swap_out),
            major_faults: Some(f.major_fault),
            oom_kills: Some(f.oom_kill),
            alloc_stalls: Some(f.alloc_stall),
            direct_reclaim: Some(f.scan_direct),
            refaults: Some(f.refault_anon.saturating_add(f.refault_file)),
            ..GuestStats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_is_told_from_a_counter_that_has_run_over() {
        let says = |is_windows, minor, major| GuestStats {
            minor_faults: Some(minor),
            major_faults: major,
            is_windows,
            ..GuestStats::default()
        };
        let is_reset = |is_windows, to: (u64, Option<u64>)| {
            let was = says(is_windows, 5_000, Some(200));
            says(is_windows, to.0, to.1).is_of_another_boot(&was)
        };
        for windows in [false, true] {
            assert!(is_reset(windows, (300, Some(20))));
            assert!(!is_reset(windows, (5_000, Some(20))) && !is_reset(windows, (300, Some(201))));
        }
        let same = (300, Some(200));
        assert!(is_reset(false, same) && !is_reset(true, same), "32 bits have run over");
        assert!(is_reset(false, (300, None)) && !is_reset(true, (300, None)));
    }

    fn stats(updated_s: u64, free: u64) -> GuestStats {
        GuestStats { updated_s, free: Some(Bytes(free)), ..GuestStats::default() }
    }

    /// Looks at `(at, stats)` one after the other; the age of the last at `wall_ms`.
    fn age(looks: &[(u64, GuestStats)], wall_ms: u64) -> u64 {
        let mut heard = Heard::default();
        looks.iter().for_each(|(at, stats)| heard.see(Stamp(*at), *stats));
        heard.age_ms(Stamp(looks[looks.len() - 1].0), wall_ms)
    }

    /// The wall clock shows an earlier time than the guest's last statistics, and the daemon is
    /// new.
    #[test]
    fn statistics_from_before_the_clock_was_set_back_grow_old() {
        let stats = GuestStats { updated_s: 10_000, ..GuestStats::default() };
        let mut heard = Heard::default();
        (0..10).for_each(|s| heard.see(Stamp(s * 1000), stats));
        assert_eq!(heard.age_ms(Stamp(9_000), 7_009_000), 9_000);
        heard.see(Stamp(10_000), GuestStats { free: Some(Bytes::gib(1)), ..stats });
        assert_eq!(heard.age_ms(Stamp(10_200), 7_010_200), 1_200, "since the look before");
    }

    #[test]
    fn statistics_that_differ_from_those_seen_just_before_came_after_that() {
        let (old, new) = (stats(7, 1), stats(7, 2));
        assert_eq!(age(&[(10_000, new)], 7_900), 900, "QEMU's clock alone");
        assert_eq!(age(&[(10_000, old), (10_500, new)], 7_900), 500);
        // Seen once more when the guest was asked out of turn.
        assert_eq!(age(&[(10_000, old), (10_420, old), (10_500, new)], 7_900), 80);
        assert_eq!(age(&[(10_000, old), (10_420, new), (10_500, new)], 7_900), 500, "came before");
        assert_eq!(age(&[(10_000, old), (10_420, new), (10_500, new)], 7_100), 100);
    }

    #[test]
    fn a_jump_of_the_wall_clock_makes_statistics_neither_older_nor_younger() {
        let (old, new) = (stats(7, 1), stats(7, 2));
        assert_eq!(age(&[(0, new)], 10_000), 3000);
        assert_eq!(age(&[(0, old), (60_000, new)], 10_000), 3000);
        assert_eq!(age(&[(0, old), (2_000, new)], 9_000_000), 2000, "clock set ahead");
        let ahead = stats(900, 2);
        assert_eq!(age(&[(0, old), (40_000, ahead)], 10_000), 40_000, "clock set back");
    }
}
