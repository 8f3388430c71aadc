//! What the kernel's and Debian's page merging is told.

use std::path::Path;

use anyhow::{Context, Result};
use ebb_core::units::Bytes;
use ebb_host::probe::meminfo::read_meminfo;
use ebb_host::root::Root;

use crate::baselines::Ksmtuned;

const KSM: &str = "/sys/kernel/mm/ksm/";

/// Whether an arm merges pages.
pub(super) fn merges(arm: &str) -> bool {
    arm == "ebb" || arm.contains("ksm")
}

/// The knobs of an arm. Those that `ksmtuned` sets are listed as they are, so that the arena
/// puts them back.
pub(super) fn knobs(arm: &str) -> Vec<(String, String)> {
    let knob = |name: &str, value: &str| (format!("{KSM}{name}"), value.to_string());
    match arm {
        "ksm" | "reporting-ksm" => {
            vec![knob("pages_to_scan", "1000000"), knob("sleep_millisecs", "0"), knob("run", "1")]
        }
        "ksmtuned" | "mom-ksmtuned" => ["pages_to_scan", "sleep_millisecs", "run"]
            .iter()
            .filter_map(|name| {
                let now = std::fs::read_to_string(format!("{KSM}{name}")).ok()?;
                Some(knob(name, now.trim()))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// `ksmtuned` with its own settings. It knows the machine's memory only, so its threshold is
/// raised by what the machine has beyond the budget: it acts as on a host of that size.
pub(super) fn ksmtuned(dir: &Path, budget: Bytes) -> Result<Ksmtuned> {
    let total = read_meminfo(&Root::default())?.context("no MemTotal")?.total;
    let threshold = total - budget + budget.share(0.20);
    Ksmtuned::start(dir, &[("KSM_THRES_CONST", &(threshold.0 >> 10).to_string())])
}
