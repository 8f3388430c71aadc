//! The host's own memory: who is swapped out, what it counts, how it stalls.

use ebb_core::sample::{HostSample, Meminfo, SwapArea, Vmstat};
use ebb_core::units::{Bytes, PAGE};

use crate::guest::Guest;
use crate::ksm::copies;
use crate::psi::Stalls;
use crate::step_budget::{Room, SWAP_OUT_RATE};

/// Below this share of memory the host begins to swap (`kswapd`'s low mark).
pub const LOW_MARK: f64 = 0.02;
/// Up to this share it swaps then.
pub const HIGH_MARK: f64 = 0.03;
/// The host's kernel, daemons and QEMU itself.
pub const OWN_SHARE: f64 = 0.02;
/// The kernel does not know what is hot: of what it swaps out, so much is taken
/// from hot and idle pages alike.
const MISJUDGED: f64 = 0.1;
/// Paging out on order, of all guests, bytes a second: one thread does it.
const PAGE_OUT_RATE: f64 = 250e6;
/// The swap device, either way, bytes a second.
const DEVICE_RATE: f64 = SWAP_OUT_RATE;

/// A level of the kernel's vmpressure: how much was scanned in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VmPressure {
    /// Something is reclaimed.
    Low,
    /// 60 % of what is scanned is not reclaimed.
    Medium,
    /// 95 %.
    Critical,
}

#[derive(Clone, Debug, Default)]
pub struct HostMemory {
    /// `MemTotal`.
    pub total: Bytes,
    pub swap: Bytes,
    /// `pswpin`, `pswpout` as bytes.
    pub swapped_in: Bytes,
    /// See `swapped_in`.
    pub swapped_out: Bytes,
    /// Time with less than the low mark free, ms.
    pub overfull_ms: u64,
    /// Most in use.
    pub peak: Bytes,
    /// Guests killed because neither memory nor swap was left.
    pub ooms: u64,
    pub(crate) stalls: Stalls,
    /// Reclaimed and scanned since vmpressure was last asked for, pages.
    scanned: (f64, f64),
    in_vain_ms: u64,
    /// `kswapd` runs: from the low mark until the high one is reached.
    swapping: bool,
    /// Shares of memory at which it begins and ends.
    pub(crate) marks: (f64, f64),
    /// What others than VMs have now.
    pub others: Bytes,
}

impl HostMemory {
    /// A host with so much memory and swap.
    pub fn new(total: Bytes, swap: Bytes) -> HostMemory {
        HostMemory { total, swap, marks: (LOW_MARK, HIGH_MARK), ..HostMemory::default() }
    }

    /// What guests hold at first fits the host: of what they used and freed before the run it
    /// holds as much as it has above its high mark.
    pub fn begin(&self, guests: &mut [Guest]) {
        let stale: Bytes = guests.iter().map(|g| g.stale).sum();
        let held: Bytes = guests.iter().map(Guest::resident).sum();
        let kept = self.own() + self.others + self.total.share(self.marks.1);
        let room = self.total - kept - (held - stale);
        if stale > room {
            guests.iter_mut().for_each(|g| g.stale = g.stale.share(room.fraction_of(stale)));
        }
    }

    fn own(&self) -> Bytes {
        self.total.share(OWN_SHARE)
    }

    pub fn free(&self, guests: &[Guest]) -> Bytes {
        let held: Bytes = guests.iter().map(Guest::resident).sum();
        self.total - self.own() - self.others - held - copies(guests)
    }

    /// What the kernel gives without swapping: it leaves out what its high watermarks keep
    /// (`si_mem_available`).
    pub fn available(&self, guests: &[Guest]) -> Bytes {
        self.free(guests) - self.total.share(self.marks.1)
    }

    fn swap_free(&self, guests: &[Guest]) -> Bytes {
        self.swap - guests.iter().map(|g| g.out).sum()
    }

    /// What guests may take within a step of `dt_ms`.
    pub fn room(&self, guests: &[Guest], dt_ms: u64) -> Room {
        let device = Bytes((DEVICE_RATE * dt_ms as f64 / 1000.0) as u64);
        let swappable: Bytes = guests.iter().flat_map(Guest::by_coldness).sum();
        Room {
            free: self.free(guests),
            can_swap_out: device.min(self.swap_free(guests)).min(swappable.share(0.9)),
            can_swap_in: device,
            ..Room::default()
        }
    }

    /// Ends a step: swaps out what was taken beyond the free memory and what the
    /// marks ask for, keeps the counters.
    pub fn settle(&mut self, guests: &mut [Guest], room: &Room, dt_ms: u64) {
        self.swap_out(guests, room.wanted_out);
        self.page_out(guests, room, dt_ms);
        let free = self.free(guests);
        let low = free < self.total.share(self.marks.0);
        let lacking = self.total.share(self.marks.1) - free;
        self.overfull_ms += if low { dt_ms } else { 0 };
        self.swapping = low || (self.swapping && lacking > Bytes::ZERO);
        if self.swapping {
            // A host that is short splits huge pages of which parts are not mapped.
            let split: Bytes = guests.iter_mut().map(Guest::split).sum();
            let lacking = lacking - split;
            self.swap_out(guests, lacking.min(room.can_swap_out).min(self.swap_free(guests)));
        }
        self.peak = self.peak.max(self.total - self.free(guests));
        self.swapped_in = guests.iter().map(|g| g.counts.host_swap_in).sum();
        self.swapped_out = guests.iter().map(|g| g.counts.host_swap_out).sum();
        self.scanned.0 += pages(room.refused);
        let nothing_left = room.refused > Bytes::ZERO && self.swap_free(guests) == Bytes::ZERO;
        self.in_vain_ms = if nothing_left { self.in_vain_ms + dt_ms } else { 0 };
    }

    /// Carries out what is ordered to be paged out, one guest after the other.
    fn page_out(&self, guests: &mut [Guest], room: &Room, dt_ms: u64) {
        let rate = Bytes((PAGE_OUT_RATE * dt_ms as f64 / 1000.0) as u64);
        let mut left = rate.min(room.can_swap_out).min(self.swap_free(guests));
        for g in guests.iter_mut().filter(|g| g.paging > Bytes::ZERO) {
            let bytes = g.paging.min(left);
            left = left - bytes;
            g.page_out(bytes, MISJUDGED);
        }
    }

    /// Whether the host itself must kill: nothing could be had for a while.
    pub fn must_kill(&mut self) -> bool {
        let must = self.in_vain_ms >= 2_000;
        if must {
            self.in_vain_ms = 0;
            self.ooms += 1;
        }
        must
    }

    /// The coldest first, over all guests; a part without regard to that.
    fn swap_out(&mut self, guests: &mut [Guest], bytes: Bytes) {
        if bytes == Bytes::ZERO {
            return;
        }
        let cold: Vec<[Bytes; 3]> = guests.iter().map(Guest::by_coldness).collect();
        let sums: Vec<Bytes> = (0..3).map(|c| cold.iter().map(|g| g[c]).sum()).collect();
        // Hot pages are scanned four times until they go.
        let mut share = [0.0; 3];
        let misjudged = bytes.share(MISJUDGED);
        let mut left = bytes - misjudged;
        for c in 0..3 {
            let part = left.min(sums[c]);
            left = left - part;
            let used = sums[1] + sums[2];
            let by_mistake = if c == 0 { 0.0 } else { sums[c].fraction_of(used) };
            share[c] = (part + misjudged.share(by_mistake)).fraction_of(sums[c].max(Bytes(1)));
            let got = pages(part);
            self.scanned.0 += got * if c == 2 { 4.0 } else { 1.0 };
            self.scanned.1 += got;
        }
        for (g, classes) in guests.iter_mut().zip(&cold) {
            let part: Bytes = classes.iter().zip(share).map(|(b, s)| b.share(s.min(1.0))).sum();
            g.swap_out(part);
        }
    }

    /// The vmpressure event since it was last asked for, as `mm/vmpressure.c`
    /// reckons it; `None`: nothing was reclaimed.
    pub fn vmpressure(&mut self) -> Option<VmPressure> {
        let (scanned, reclaimed) = std::mem::take(&mut self.scanned);
        (scanned > 0.0).then(|| match 1.0 - reclaimed / scanned {
            p if p >= 0.95 => VmPressure::Critical,
            p if p >= 0.60 => VmPressure::Medium,
            _ => VmPressure::Low,
        })
    }

    /// What /proc shows.
    pub fn sample(&self, guests: &[Guest]) -> HostSample {
        let free = self.free(guests);
        let swap_free = self.swap_free(guests);
        let swap = SwapArea {
            path: "/dev/sim".into(),
            size: self.swap,
            used: self.swap - swap_free,
            priority: -2,
            ..SwapArea::default()
        };
        HostSample {
            memory: Some(Meminfo {
                total: self.total,
                free,
                available: self.available(guests),
                swap_total: self.swap,
                swap_free,
                ..Meminfo::default()
            }),
            psi: Some(self.stalls.psi()),
            vmstat: Some(Vmstat {
                swap_in_pages: self.swapped_in.0 / PAGE,
                swap_out_pages: self.swapped_out.0 / PAGE,
                // A fault reads ahead eight pages.
                major_faults: self.swapped_in.0 / PAGE / 8,
                oom_kills: Some(self.ooms),
                refaults: self.swapped_in.0 / PAGE,
                ..Vmstat::default()
            }),
            swaps: vec![swap],
            ..HostSample::default()
        }
    }
}

fn pages(b: Bytes) -> f64 {
    b.0 as f64 / PAGE as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::{Curve, Need};
    use crate::guest::Spec;

    fn guest(index: u32, used: u64, stale: u64) -> Guest {
        let spec = Spec::new(Bytes::gib(4), Need::of(Curve::flat(Bytes::mib(used))));
        let mut g = Guest::new(index, 1, spec);
        let mut room = Room { free: Bytes::gib(64), ..Room::default() };
        g.switch(0);
        for i in 1..=200 {
            g.live(i * 100, 100, &mut room);
        }
        g.stale = Bytes::mib(stale);
        g
    }

    #[test]
    fn what_guests_hold_at_first_fits_the_host() {
        let host = HostMemory::new(Bytes::gib(4), Bytes::ZERO);
        let begin = |stale| {
            let mut guests = vec![guest(0, 1000, stale), guest(1, 500, 2 * stale)];
            host.begin(&mut guests);
            (host.free(&guests), guests[0].stale, guests[1].stale)
        };
        assert_eq!(begin(500).1, Bytes::mib(500), "it fits");
        let (free, one, other) = begin(1500);
        assert!(free.abs_diff(Bytes::gib(4).share(HIGH_MARK)) < Bytes::mib(1), "{free}");
        assert!(other.abs_diff(one + one) < Bytes::mib(1), "{one} {other}");
    }

    #[test]
    fn free_pages_go_to_swap_first_and_idle_guests_before_busy_ones() {
        let mut host = HostMemory::new(Bytes::gib(8), Bytes::gib(8));
        let mut guests = vec![guest(0, 2000, 0), guest(1, 1000, 1500)];
        host.swap_out(&mut guests, Bytes::mib(1000));
        assert!(guests[1].out > Bytes::mib(900), "stale pages: {}", guests[1].out);
        assert!(guests[0].out < Bytes::mib(80), "by mistake: {}", guests[0].out);
        assert_eq!(host.vmpressure(), Some(VmPressure::Low));
        assert_eq!(host.vmpressure(), None);
        let all: Bytes = guests.iter().map(Guest::resident).sum();
        host.swap_out(&mut guests, all.share(0.95));
        assert_eq!(host.vmpressure(), Some(VmPressure::Low), "mostly idle pages");
        let rest: Bytes = guests.iter().map(Guest::resident).sum();
        host.swap_out(&mut guests, rest);
        assert_eq!(host.vmpressure(), Some(VmPressure::Medium), "hot pages only");
    }

    #[test]
    fn the_host_swaps_from_its_low_to_its_high_mark_and_counts_it() {
        let mut host = HostMemory::new(Bytes::gib(4), Bytes::gib(8));
        // 82 MiB are the host's own: 14 are free.
        let mut guests = vec![guest(0, 2000, 0), guest(1, 1000, 1000)];
        for _ in 0..10 {
            let room = host.room(&guests, 100);
            host.settle(&mut guests, &room, 100);
        }
        let free = host.free(&guests);
        assert!(free.abs_diff(Bytes::gib(4).share(HIGH_MARK)) < Bytes::mib(8), "{free}");
        assert_eq!(host.overfull_ms, 200, "one step at 50 MB does not reach the low mark");
        let s = host.sample(&guests);
        let v = s.vmstat.unwrap();
        assert_eq!(s.swaps[0].used.0 / PAGE, v.swap_out_pages - v.swap_in_pages);
        assert_eq!(host.swapped_out, guests[0].out + guests[1].out);
    }
}
