//! `mark-cost`: what the free-page map costs a guest: one mark natively, and one
//! allocation with its free in instructions.
//!
//! Arm `ebb-guest`: `mark_cycles` (a page, pages in order), `mark_cycles_hot` (pages
//! of one word), `mark_cycles_worst` (pages at random in 8 TiB, nothing of the map
//! in a cache), `block_seconds` (4 MiB, blocks in order), `block_seconds_worst`
//! (at random in 8 TiB): the module's map.c built for user space, set and clear by
//! turns, a median of rounds. `pair_instructions` (4 KiB) and
//! `pair_instructions_thp` (2 MiB): instructions of a guest that the module adds to
//! one allocation and free, hooks and threads included; arm `plain` has what the
//! whole operation (fault, page cleared, free) takes without it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::cgroup_guest::Bench;
use super::refault::{Pages, counted};
use super::trial::Trial;
use crate::result::{ExperimentResult, target};
use crate::{LabError, run as command};

pub const ARMS: [&str; 2] = ["plain", "ebb-guest"];

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let bench = Bench::new(trial, outcome)?;
    if trial.wants("ebb-guest") {
        native(bench.outcome)?;
    }
    for (pages, counts) in counted(&bench)? {
        let (each, suffix) = if pages == Pages::Huge { (512.0, "_thp") } else { (1.0, "") };
        let metric = format!("pair_instructions{suffix}");
        let plain: Vec<f64> = counts.plain.iter().map(|c| c * each).collect();
        let more = counts.module.iter().zip(&counts.plain).map(|(m, p)| (m - p) * each);
        let more: Vec<f64> = more.collect();
        if trial.wants("plain") {
            outcome.add_median("plain", &metric, "count", &plain);
        }
        if trial.wants("ebb-guest") {
            outcome.add_median("ebb-guest", &metric, "count", &more);
        }
    }
    for (metric, most) in [("mark_cycles_worst", 300.0), ("block_seconds", 10e-9)] {
        if let Some(v) = outcome.value("ebb-guest", metric) {
            let (v, most) = if most < 1.0 { (v * 1e9, most * 1e9) } else { (v, most) };
            target(metric, v, "<=", most);
        }
    }
    Ok(())
}

/// Builds and runs the native measurement.
fn native(outcome: &mut ExperimentResult) -> Result<()> {
    let said = command(&mut Command::new(build()?))?;
    let lines = parse(&said);
    let of = |name: &str| {
        let found = lines.iter().find(|l| l.0 == name).map(|l| l.1.as_slice());
        found.with_context(|| format!("no {name} in {said}"))
    };
    let ghz = *of("ghz")?.first().context("no clock")?;
    let times = |name: &str| -> Result<Vec<f64>> {
        Ok(of(name)?.iter().map(|cycles| cycles / ghz * 1e-9).collect())
    };
    for (metric, name) in
        [("mark_cycles", "near"), ("mark_cycles_hot", "hot"), ("mark_cycles_worst", "far")]
    {
        outcome.add_median("ebb-guest", metric, "cycles", of(name)?);
    }
    outcome.add_median("ebb-guest", "block_seconds", "seconds", &times("block")?);
    outcome.add_median("ebb-guest", "block_seconds_worst", "seconds", &times("block_far")?);
    Ok(())
}

fn build() -> Result<PathBuf, LabError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = root.join("target/lab");
    std::fs::create_dir_all(&dir).map_err(LabError::file(&dir))?;
    let out = dir.join("mark_bench");
    // As the kernel has it: -O2, and popcnt in place.
    let flags = ["-std=gnu11", "-O2", "-mpopcnt", "-Wall", "-Wextra", "-Werror", "-o"];
    let mut cc = Command::new("cc");
    cc.args(flags).arg(&out).args(["test/mark_bench.c", "map.c"]).current_dir(root.join("guest"));
    command(&mut cc)?;
    Ok(out)
}

/// Lines of a name and numbers.
fn parse(text: &str) -> Vec<(String, Vec<f64>)> {
    let line = |l: &str| {
        let mut words = l.split_whitespace();
        let name = words.next()?.to_string();
        let numbers: Option<Vec<f64>> = words.map(|w| w.parse().ok()).collect();
        numbers.filter(|n| !n.is_empty()).map(|n| (name, n))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Accel;

    #[test]
    fn lines_are_names_and_numbers() {
        let lines = parse("ghz 2.5\nfar 1 2.5 3\nnonsense x\n\nempty\n");
        assert_eq!(lines, [("ghz".into(), vec![2.5]), ("far".into(), vec![1.0, 2.5, 3.0])]);
    }

    #[test]
    fn the_native_part_gives_rows_of_the_stable_form() {
        let mut outcome = ExperimentResult::new("mark-cost", "6.1", Accel::Tcg);
        native(&mut outcome).unwrap();
        let json = serde_json::to_value(&outcome).unwrap();
        for key in ["experiment", "machine", "kernel", "qemu", "accel", "commit"] {
            assert!(json[key].as_str().is_some_and(|s| !s.is_empty()), "{key}");
        }
        let rows = json["results"].as_array().unwrap();
        assert_eq!(rows.len(), 5);
        for row in rows {
            let number = |key: &str| row[key].as_f64().unwrap();
            assert_eq!(row["arm"], "ebb-guest");
            assert!(row["metric"].is_string() && row["unit"].is_string());
            assert!(number("n") >= 3.0 && number("min") <= number("value"), "{row}");
            assert!(number("value") > 0.0 && number("value") <= number("max"), "{row}");
        }
    }
}
