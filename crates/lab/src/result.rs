//! What experiments write: rows of arm, metric and value, and where they are from.
//!
//! Ratios are fractions, times seconds, sizes bytes. The names of arms and
//! metrics are an interface: documents and reports use them.

use std::fs;
use std::path::Path;
use std::process::Command;

use ebb_host::probe::meminfo::read_meminfo;
use ebb_host::root::Root;
use serde::{Deserialize, Serialize};

use crate::image::{Image, Kernel, write_atomically};
use crate::vm::Accel;
use crate::{LabError, run};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was tried, e.g. `plain`, `reporting`, `ebb`.
    pub arm: String,
    /// What was measured, e.g. `resident_peak`.
    pub metric: String,
    /// Its mean over `n` runs; the median where the experiment says so.
    pub value: f64,
    /// `bytes`, `seconds`, `fraction`, `per_second`, `bytes_per_second`, `cycles`,
    /// `count`.
    pub unit: String,
    pub n: u32,
    pub min: f64,
    pub max: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesRow {
    pub arm: String,
    pub name: String,
    /// As in [`Row::unit`].
    pub unit: String,
    /// Seconds.
    pub t: Vec<f64>,
    /// One for each of `t`.
    pub v: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExperimentResult {
    pub experiment: String,
    /// CPUs, memory and kernel of the host.
    pub machine: String,
    pub kernel: String,
    pub qemu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// The commit that was tried, with `+` when there were changes.
    pub commit: String,
    pub results: Vec<Row>,
    /// What was seen over time, where the experiment keeps it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<SeriesRow>,
}

impl ExperimentResult {
    /// An outcome without numbers yet.
    pub fn new(experiment: &str, kernel: &str, accel: Accel) -> ExperimentResult {
        ExperimentResult {
            experiment: experiment.into(),
            machine: machine(),
            kernel: kernel.into(),
            qemu: qemu_version(),
            accel: accel.name().into(),
            commit: commit(),
            results: Vec::new(),
            series: Vec::new(),
        }
    }

    /// The same of VMs with this kernel.
    pub fn of(experiment: &str, kernel: Kernel) -> Result<ExperimentResult, LabError> {
        let release = Image::get(kernel)?.release;
        Ok(ExperimentResult::new(experiment, &release, Accel::detect()))
    }

    /// Adds the numbers of all runs of an arm; nothing where there is none.
    pub fn add(&mut self, arm: &str, metric: &str, unit: &str, values: &[f64]) {
        if values.is_empty() {
            return;
        }
        self.results.push(Row {
            arm: arm.into(),
            metric: metric.into(),
            value: values.iter().sum::<f64>() / values.len() as f64,
            unit: unit.into(),
            n: values.len() as u32,
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        });
    }

    /// Adds the median of the numbers of all runs of an arm.
    pub fn add_median(&mut self, arm: &str, metric: &str, unit: &str, values: &[f64]) {
        self.add(arm, metric, unit, values);
        if let (Some(row), Some(median)) = (self.results.last_mut(), median(values)) {
            row.value = median;
        }
    }

    /// The value of an arm's metric.
    pub fn value(&self, arm: &str, metric: &str) -> Option<f64> {
        self.results.iter().find(|r| r.arm == arm && r.metric == metric).map(|r| r.value)
    }

    /// Says whether an arm's metric met its target, where it was measured.
    pub fn target(&self, arm: &str, metric: &str, relation: &str, mark: f64) {
        if let Some(value) = self.value(arm, metric) {
            target(metric, value, relation, mark);
        }
    }

    /// A line for each number, for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{} on guest kernel {}, QEMU {} ({}), {}, commit {}\n",
            self.experiment, self.kernel, self.qemu, self.accel, self.machine, self.commit
        );
        for r in &self.results {
            let cell = |v| human(v, &r.unit);
            text += &format!(
                "  {:<12} {:<32} {:>14}   n {:<3} {} to {}\n",
                r.arm,
                r.metric,
                cell(r.value),
                r.n,
                cell(r.min),
                cell(r.max)
            );
        }
        text
    }

    /// Writes it to a file if there is to be one, and says so.
    pub fn keep(&self, file: Option<&Path>) -> Result<(), LabError> {
        let Some(file) = file else { return Ok(()) };
        self.write(file)?;
        println!("figures: {}", file.display());
        Ok(())
    }

    pub fn write(&self, path: &Path) -> Result<(), LabError> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(LabError::file(dir))?;
        }
        let text =
            serde_json::to_string_pretty(self).map_err(|e| LabError::file(path)(e.into()))?;
        write_atomically(path, (text + "\n").as_bytes(), 0o644)
    }
}

/// Says whether a target was met.
pub fn target(what: &str, value: f64, relation: &str, mark: f64) {
    let met = if relation == "<=" { value <= mark } else { value >= mark };
    let word = if met { "met" } else { "MISSED" };
    println!("  target {what}: {value:.3} ({relation} {mark}): {word}");
}

/// The middle one; of an even number the mean of the two.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[at]),
        _ => Some((sorted[at - 1] + sorted[at]) / 2.0),
    }
}

/// A number of a unit as people read it.
pub fn human(value: f64, unit: &str) -> String {
    match unit {
        "bytes_per_second" if value >= 1e9 => format!("{:.2} GB/s", value / 1e9),
        "bytes_per_second" => format!("{:.1} MB/s", value / 1e6),
        "bytes" => ebb_core::units::Bytes(value as u64).to_string(),
        "seconds" if value < 1e-6 => format!("{:.1} ns", value * 1e9),
        "seconds" if value < 1e-3 => format!("{:.1} µs", value * 1e6),
        "seconds" if value < 0.1 => format!("{:.1} ms", value * 1e3),
        "seconds" if value < 1.0 => format!("{:.0} ms", value * 1e3),
        "seconds" => format!("{value:.2} s"),
        "fraction" | "ratio" => format!("{:.2} %", value * 100.0),
        unit => format!("{value:.1} {unit}"),
    }
}

fn machine() -> String {
    let read = |p: &str| fs::read_to_string(p).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = read_meminfo(&Root::default()).ok().flatten().unwrap_or_default();
    let gib = memory.total.0.div_ceil(1 << 30);
    format!("{cpus} CPUs, {gib} GiB, Linux {}", read("/proc/sys/kernel/osrelease").trim())
}

fn qemu_version() -> String {
    let said = run(Command::new("qemu-system-x86_64").arg("--version")).unwrap_or_default();
    let version = said.split("version ").nth(1).and_then(|v| v.split_whitespace().next());
    version.unwrap_or("unknown").to_string()
}

fn commit() -> String {
    let git = |args: &[&str]| {
        run(Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(args)).ok()
    };
    let head = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default();
    let dirty = git(&["status", "--porcelain"]).is_some_and(|s| !s.trim().is_empty());
    format!("{}{}", head.trim(), if dirty { "+" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_mean_and_range() {
        let mut outcome = ExperimentResult::new("x", "6.1", Accel::Tcg);
        outcome.add("plain", "seconds", "seconds", &[1.0, 2.0, 6.0]);
        outcome.add("plain", "none", "seconds", &[]);
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(json["results"].as_array().unwrap().len(), 1);
        assert_eq!(json["results"][0]["value"], 3.0);
        assert_eq!(json["results"][0]["max"], 6.0);
        assert_eq!(json["accel"], "tcg");
    }

    #[test]
    fn a_median_is_in_the_middle_and_keeps_the_range() {
        let mut outcome = ExperimentResult::new("x", "6.1", Accel::Tcg);
        outcome.add_median("raw", "page_cycles", "cycles", &[9.0, 1.0, 2.0]);
        let row = &outcome.results[0];
        assert_eq!((row.value, row.n, row.min, row.max), (2.0, 3, 1.0, 9.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), Some(3.0));
        outcome.add_median("raw", "nothing", "cycles", &[]);
        assert_eq!(outcome.results.len(), 1);
        assert_eq!(outcome.results[0].value, 2.0, "no values change no other row");
        assert_eq!(outcome.value("raw", "page_cycles"), Some(2.0));
        assert!(outcome.table().contains("page_cycles"));
    }
}
