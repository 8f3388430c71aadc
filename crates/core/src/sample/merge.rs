//! KSM as the kernel counts it, the scanner of equal pages, and each VM's part in both.
//!
//! The arithmetic here says what those counters mean; what follows from them is decided in
//! `policy/merge.rs`.

use serde::{Deserialize, Serialize};

use crate::policy::merge::Candidates;
use crate::units::{Bytes, Stamp};

/// `/sys/kernel/mm/ksm`, whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ksm {
    /// `run`: 0 stopped, 1 running, 2 unmerging.
    pub run: u64,
    /// `pages_shared`: distinct pages kept.
    pub pages_shared: u64,
    /// `pages_sharing`: further places that map them, i.e. pages saved.
    pub pages_sharing: u64,
    pub pages_unshared: u64,
    pub pages_volatile: u64,
    pub full_scans: u64,
    /// `ksm_zero_pages` (6.6+).
    pub zero_pages: Option<u64>,
    /// `general_profit`, bytes, signed as the kernel has it (6.4+).
    pub general_profit: Option<i64>,
    /// `pages_scanned` (6.6+).
    pub pages_scanned: Option<u64>,
    /// `pages_skipped`, by `smart_scan` (6.7+).
    pub pages_skipped: Option<u64>,
    /// `stable_node_chains`: contents with more copies than one page may have.
    pub chains: u64,
    /// `stable_node_dups`: pages kept because of that.
    pub chain_pages: u64,
    /// CPU time of `ksmd`.
    pub cpu_ms: Option<u64>,
    /// A `ksmtuned` that sets the same knobs.
    pub ksmtuned: Option<u32>,
    /// Places that map a merged page, of the processes that there are (6.1+). The counters
    /// above keep those of a process that has ended until `ksmd` comes by its pages, which
    /// it does not while it is stopped.
    pub mapped: Option<u64>,
}

impl Ksm {
    /// What merging saves by the kernel's counters, and would take to be broken, at most.
    pub fn saved(&self) -> Bytes {
        Bytes::pages(self.pages_sharing.saturating_add(self.zero_pages.unwrap_or(0)))
    }

    /// What it saves the processes that there are, at least: of the places where merged pages
    /// are mapped, at most one for each page saves nothing. Exact where no process has ended since
    /// `ksmd` came by. Without [`Ksm::mapped`] the counters count while `ksmd` runs.
    pub fn saved_now(&self) -> Bytes {
        let sharing = match self.mapped {
            Some(mapped) => self.pages_sharing.min(mapped.saturating_sub(self.pages_shared)),
            None if self.run == 1 => self.pages_sharing,
            None => 0,
        };
        // The kernel takes a zero page off its counter when it is unmapped.
        Bytes::pages(sharing.saturating_add(self.zero_pages.unwrap_or(0)))
    }

    /// That less KSM's own memory, which it keeps for processes that have ended, too.
    pub fn profit_now(&self) -> Option<i64> {
        let gone = self.saved() - self.saved_now();
        self.general_profit.map(|p| p.saturating_sub(gone.0 as i64))
    }

    /// Of the places that map a merged page, the share that saves one: the first
    /// place of each content saves nothing.
    pub fn share_saved(&self) -> f64 {
        let mapped = self.pages_shared.saturating_add(self.pages_sharing);
        if mapped == 0 { 0.0 } else { self.pages_sharing as f64 / mapped as f64 }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScanSample {
    /// Scans that were finished since the daemon's start.
    pub number: u64,
    pub busy: bool,
    pub at: Stamp,
    /// How long it took, pauses included.
    pub seconds: f64,
    /// CPU time of all of them, and of all spot checks.
    pub cpu_s: f64,
    /// Memory that the last one went through.
    pub read: Bytes,
    /// Of that, by the VMs' own agents.
    pub by_agents: Bytes,
    /// Of that, no more than a few lines of each page: they have no duplicate by those.
    pub by_lines: Bytes,
    /// Its table at its largest.
    pub table: Bytes,
    /// It read one of this many pieces.
    pub one_in: u32,
    /// Spot checks: a few pages were read, to see whether they are as the last scan saw them.
    #[serde(rename = "looks")]
    pub spot_checks: u64,
    /// Of those, since the last scan.
    #[serde(rename = "looks_since")]
    pub spot_checks_since: u32,
    /// What has changed since the last scan, as the last spot check estimates it.
    pub changed: Option<Bytes>,
    /// Why there was none.
    pub error: Option<String>,
}

/// `/proc/PID/ksm_stat`: a process's merging; what this kernel does not tell is
/// `None`. What is broken by a write is counted until `ksmd` comes by again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmStat {
    /// Pages that KSM keeps in mind, 64 bytes each.
    pub rmap_items: Option<u64>,
    /// Pages merged with the zero page (6.6+).
    pub zero_pages: Option<u64>,
    /// Places that map a merged page.
    pub merging_pages: Option<u64>,
    /// Bytes saved less KSM's own, signed as the kernel has it.
    pub profit: Option<i64>,
    /// Some of its memory is marked for KSM (6.14+).
    pub mergeable: Option<bool>,
}

impl KsmStat {
    pub fn merged(&self) -> u64 {
        self.merging_pages.unwrap_or(0).saturating_add(self.zero_pages.unwrap_or(0))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MergeSample {
    /// Whether KSM may look at its RAM, by its mappings; `None`: not looked yet.
    pub open: Option<bool>,
    pub stat: KsmStat,
    /// What its mappings showed as merged, zeros not counted, and when; unlike the
    /// counters without what was broken since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<(Stamp, Bytes)>,
    /// What the last scan found in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<Candidates>,
    /// An order to open or close it is under way.
    #[serde(default)]
    pub busy: bool,
    /// What was wrong with the last one, or with reading it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_processes_had_merged_is_not_saved() {
        let page = |n: u64| Bytes::pages(n);
        // Two VMs of a thousand equal pages, and 64 bytes for each of their places.
        let both = Ksm {
            run: 0,
            pages_shared: 1000,
            pages_sharing: 1000,
            general_profit: Some(1000 * 4096 - 2000 * 64),
            mapped: Some(2000),
            ..Ksm::default()
        };
        assert_eq!((both.saved_now(), both.profit_now()), (page(1000), both.general_profit));
        let one = Ksm { mapped: Some(1000), ..both };
        assert_eq!(one.saved_now(), page(0), "each page has one place left");
        let none = Ksm { mapped: Some(0), ..both };
        assert_eq!((none.saved_now(), none.profit_now()), (page(0), Some(-2000 * 64)));
        let zeros = Ksm { zero_pages: Some(7), ..none };
        assert_eq!((zeros.saved_now(), zeros.profit_now()), (page(7), Some(-2000 * 64)));
        // Other processes than VMs count as well; a count that is ahead of the others' is cut.
        assert_eq!(Ksm { mapped: Some(9000), ..both }.saved_now(), page(1000));
        let old = Ksm { mapped: None, ..both };
        assert_eq!((old.saved_now(), old.saved()), (page(0), page(1000)), "nobody can tell");
        assert_eq!(Ksm { run: 1, ..old }.saved_now(), page(1000), "ksmd finds out");
    }
}
