//! KSM of the simulated host, and the scans that tell Ebb beforehand what merging would save.
//!
//! Guests hold idle memory that is alike (`Spec::alike`): the same content, in the same order, in
//! each of them. The host keeps one copy of what is merged ([`copies`]). `ksmd` merges at the speed
//! that Ebb orders, and nothing before it has seen a page twice. What guests do to merged pages is
//! in `guest/shared.rs`. Simpler than Linux: a merged page that its guest frees is not mapped any
//! more, and the last copy goes with it.

use ebb_core::plan::{MergePlan, ScanOrder};
use ebb_core::policy::merge::{Candidates, KsmdOrder};
use ebb_core::sample::{Ksm, KsmStat, MergeSample, ScanSample};
use ebb_core::units::{Bytes, PAGE, Stamp};

use crate::guest::Guest;

/// CPU time for a page that `ksmd` looks at, µs.
const PAGE_US: f64 = 3.0;
/// KSM's own memory for each page that it looks at.
const ITEM: u64 = 64;

/// What Ebb has ordered, and how far `ksmd` and the scan are.
#[derive(Clone, Debug, Default)]
pub(crate) struct KsmHost {
    ksmd: Option<KsmdOrder>,
    /// Pages of the scan that is under way, and of all.
    in_scan: f64,
    scanned: f64,
    full_scans: u64,
    cpu_ms: f64,
    scan: ScanSample,
    /// The scan for equal pages that is under way, and when it ends, ms into the run.
    under_way: Option<(ScanOrder, u64)>,
    found: Vec<Option<Candidates>>,
}

/// The one copy that the host keeps of what is merged.
pub(crate) fn copies(guests: &[Guest]) -> Bytes {
    guests.iter().map(|g| g.merged).max().unwrap_or_default()
}

/// What of a guest has its like in another one that KSM may look at.
fn mergeable(guests: &[Guest], i: usize) -> Bytes {
    let others = guests.iter().enumerate().filter(|(k, g)| *k != i && g.open && g.power);
    let others = others.map(|(_, g)| g.alike()).max().unwrap_or_default();
    if guests[i].open && guests[i].power { guests[i].alike().min(others) } else { Bytes::ZERO }
}

fn looked_at(g: &Guest) -> f64 {
    if g.open { g.mapped().0 as f64 / PAGE as f64 } else { 0.0 }
}

impl KsmHost {
    pub fn order(&mut self, plan: &MergePlan, at_ms: u64) {
        self.ksmd = plan.ksmd.clone().or(self.ksmd.take());
        if let Some(scan) = plan.scan.as_ref().filter(|_| self.under_way.is_none()) {
            self.scan.busy = true;
            self.under_way = Some((scan.clone(), at_ms));
        }
    }

    /// Lets `dt_ms` pass up to `at_ms` into the run; `at` is the same moment as people count it.
    pub fn pass(&mut self, guests: &mut [Guest], (at_ms, at): (u64, Stamp), dt_ms: u64) {
        self.find(guests, at_ms, at);
        let Some(KsmdOrder::Run { batch, sleep_ms, .. }) = &self.ksmd else { return };
        let each_ms = *sleep_ms as f64 + *batch as f64 * PAGE_US / 1000.0;
        let pages = *batch as f64 * dt_ms as f64 / each_ms.max(0.001);
        let all: f64 = guests.iter().map(looked_at).sum();
        if all < 1.0 {
            return;
        }
        self.cpu_ms += pages * PAGE_US / 1000.0;
        (self.scanned, self.in_scan) = (self.scanned + pages, self.in_scan + pages);
        while self.in_scan >= all {
            self.in_scan -= all;
            self.full_scans += 1;
            guests.iter_mut().filter(|g| g.open && g.power).for_each(|g| g.scans += 1);
        }
        for i in 0..guests.len() {
            let most = mergeable(guests, i);
            // Merged when it was unchanged from one scan to the next.
            if guests[i].scans > 0 {
                guests[i].merge(most.share((pages / all).min(1.0)), most);
            }
        }
    }

    fn find(&mut self, guests: &[Guest], at_ms: u64, at: Stamp) {
        let Some((order, began_ms)) = &self.under_way else { return };
        let all: Bytes = guests.iter().map(Guest::mapped).sum();
        let rate = order.bytes_per_second * order.cores.clamp(0.001, 1.0);
        let seconds = all.0 as f64 / rate;
        if ((at_ms - began_ms) as f64) < seconds * 1000.0 {
            return;
        }
        let alike: Vec<Bytes> = (0..guests.len()).map(|i| mergeable(guests, i)).collect();
        let kept = alike.iter().max().copied().unwrap_or_default();
        let sharers = alike.iter().filter(|a| **a > Bytes::ZERO).count().max(1) as u64;
        let found = |(g, alike): (&Guest, &Bytes)| Candidates {
            pages: g.mapped().0 / PAGE,
            zeros: 0,
            duplicates: (*alike - Bytes(kept.0 / sharers)).0 / PAGE,
        };
        self.found = guests.iter().zip(&alike).map(|both| Some(found(both))).collect();
        let number = self.scan.number + u64::from(!order.spot_check);
        let spot_checks = self.scan.spot_checks + u64::from(order.spot_check);
        let since = if order.spot_check { self.scan.spot_checks_since + 1 } else { 0 };
        self.scan = ScanSample {
            number,
            at,
            seconds,
            cpu_s: self.scan.cpu_s + seconds * order.cores,
            read: all,
            one_in: 1,
            spot_checks,
            spot_checks_since: since,
            ..ScanSample::default()
        };
        self.under_way = None;
    }

    /// What the kernel counts, and the last scan.
    pub fn sample(&self, guests: &[Guest]) -> (Ksm, ScanSample) {
        let merged: Bytes = guests.iter().map(|g| g.merged).sum();
        let (shared, mapped) = (copies(guests).0 / PAGE, merged.0 / PAGE);
        let items: u64 = guests.iter().map(|g| looked_at(g) as u64).sum();
        let sharing = mapped.saturating_sub(shared);
        let ksm = Ksm {
            run: u64::from(matches!(self.ksmd, Some(KsmdOrder::Run { .. }))),
            pages_shared: shared,
            pages_sharing: sharing,
            full_scans: self.full_scans,
            general_profit: Some((sharing * PAGE) as i64 - (items * ITEM) as i64),
            pages_scanned: Some(self.scanned as u64),
            cpu_ms: Some(self.cpu_ms as u64),
            mapped: Some(mapped),
            ..Ksm::default()
        };
        (ksm, self.scan.clone())
    }

    pub fn sample_of(&self, g: &Guest, at: Stamp) -> MergeSample {
        let items = looked_at(g) as u64;
        let stat = KsmStat {
            rmap_items: Some(items),
            merging_pages: Some(g.merged.0 / PAGE),
            profit: Some(g.merged.0 as i64 - (items * ITEM) as i64),
            mergeable: Some(g.open),
            ..KsmStat::default()
        };
        MergeSample {
            open: Some(g.open),
            stat,
            seen: Some((at, g.merged)),
            found: self.found.get(g.index as usize).copied().flatten(),
            ..MergeSample::default()
        }
    }
}
