//! What experiments share: which arms, how large, on which guest kernels; arms that are run by
//! turns; the table and the file at the end.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;

use crate::image::Kernel;
use crate::result::{ExperimentResult, human};

/// What a user asks of an experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Figures as JSON; with several kernels a file for each, FILE-6.1 and FILE-6.12
    /// (before its extension)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Arms; all of them where none is named
    #[arg(long, value_delimiter = ',')]
    pub arms: Vec<String>,
    /// Factor on sizes and numbers of rounds
    #[arg(long, default_value_t = 1.0)]
    pub scale: f64,
    /// Guest kernels
    #[arg(long, value_enum, value_delimiter = ',', default_value = "6.1")]
    pub kernel: Vec<Kernel>,
}

/// One experiment on one guest kernel.
#[derive(Clone, Debug)]
pub struct Trial {
    pub arms: Vec<String>,
    /// Factor on sizes and numbers of rounds.
    pub scale: f64,
    pub kernel: Kernel,
}

impl Trial {
    /// Whether an arm is to be tried.
    pub fn wants(&self, arm: &str) -> bool {
        self.arms.iter().any(|a| a == arm)
    }

    /// A size at this scale: whole 4 MiB, 16 MiB at least.
    pub fn size(&self, mib: u64) -> Bytes {
        let scaled = (mib as f64 * self.scale) as u64 / 4 * 4;
        Bytes::mib(scaled.max(16))
    }

    /// A number of rounds at this scale, at least two.
    pub fn rounds(&self, n: u32) -> u32 {
        ((f64::from(n) * self.scale).round() as u32).clamp(2, 10 * n)
    }
}

/// Runs an experiment on every kernel that was asked for, prints and writes.
pub fn run(
    name: &str,
    arms: &[&str],
    options: &Options,
    one: impl Fn(&Trial, &mut ExperimentResult) -> Result<()>,
) -> Result<()> {
    if let Some(arm) = options.arms.iter().find(|a| !arms.contains(&a.as_str())) {
        bail!("no arm “{arm}”; there are {}", arms.join(", "));
    }
    if !(0.05..=20.0).contains(&options.scale) {
        bail!("--scale {}: from 0.05 to 20", options.scale);
    }
    let all = arms.iter().map(|a| a.to_string()).collect();
    let arms = if options.arms.is_empty() { all } else { options.arms.clone() };
    for &kernel in &options.kernel {
        let trial = Trial { arms: arms.clone(), scale: options.scale, kernel };
        let mut outcome = ExperimentResult::of(name, kernel)?;
        println!("== {name}, guest kernel {}", outcome.kernel);
        let result = one(&trial, &mut outcome);
        // What was measured before something failed is not lost.
        println!("{}", outcome.table());
        let each = options.kernel.len() > 1;
        let file = options.json.as_ref().map(|file| file_of(file, kernel, each));
        outcome.keep(file.as_deref())?;
        result.with_context(|| format!("{name} on {kernel}"))?;
    }
    Ok(())
}

/// Figures of an experiment whose VMs have one kernel.
#[derive(Clone, Debug, clap::Args)]
pub struct Output {
    /// Figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Guest kernel
    #[arg(long, value_enum, default_value = "6.1")]
    pub kernel: Kernel,
}

impl Output {
    /// Runs it, and prints and writes what it came to.
    pub fn of(
        &self,
        experiment: &str,
        run: impl FnOnce(&mut ExperimentResult) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = ExperimentResult::of(experiment, self.kernel)?;
        run(&mut outcome)?;
        print!("\n{}", outcome.table());
        Ok(outcome.keep(self.json.as_deref())?)
    }
}

/// What one run of an arm came to: metrics, their units and values.
pub type Figures = Vec<(&'static str, &'static str, f64)>;

/// All figures of a run in one line, as people read them.
pub fn line(figures: &Figures) -> String {
    let all = figures.iter().map(|(metric, unit, v)| format!("{metric} {}", human(*v, unit)));
    all.collect::<Vec<_>>().join(", ")
}

fn value(run: &Figures, metric: &str) -> Option<f64> {
    run.iter().find(|(name, ..)| *name == metric).map(|(.., value)| *value)
}

/// Runs of several arms.
#[derive(Debug, Default)]
pub struct Turns(Vec<(String, Vec<Figures>)>);

/// Runs all arms `runs` times, one after the other, every second time in reverse order. So other
/// work on the machine, and what an arm leaves behind, affect all arms alike.
pub fn in_turns<A: AsRef<str>>(
    arms: &[A],
    runs: u32,
    mut one: impl FnMut(&str) -> Result<Figures>,
) -> Result<Turns> {
    let mut turns: Vec<_> = arms.iter().map(|a| (a.as_ref().to_string(), Vec::new())).collect();
    for n in 1..=runs {
        let mut order: Vec<usize> = (0..arms.len()).collect();
        if n % 2 == 0 {
            order.reverse();
        }
        for i in order {
            let (arm, done) = &mut turns[i];
            let figures = one(arm).with_context(|| format!("run {n}, {arm}"))?;
            println!("run {n:>2}  {arm:<10} {}", line(&figures));
            done.push(figures);
        }
    }
    Ok(Turns(turns))
}

/// How the values of all runs are added to a result.
pub type Add = fn(&mut ExperimentResult, &str, &str, &str, &[f64]);

impl Turns {
    /// Adds each metric of each arm, by the name that `name` gives it.
    pub fn add(&self, outcome: &mut ExperimentResult, add: Add, name: impl Fn(&str) -> String) {
        for (arm, runs) in &self.0 {
            let mut done = Vec::new();
            for (metric, unit, _) in runs.iter().flatten() {
                if !done.contains(metric) {
                    done.push(*metric);
                    let values: Vec<f64> = runs.iter().filter_map(|r| value(r, metric)).collect();
                    add(outcome, arm, &name(metric), unit, &values);
                }
            }
        }
    }

    /// Adds the medians of what these metrics are by those of the arm `base` in the same run.
    pub fn add_ratios(
        &self,
        outcome: &mut ExperimentResult,
        base: &str,
        metrics: &[&str],
        name: impl Fn(&str) -> String,
    ) {
        let Some((_, first)) = self.0.iter().find(|(arm, _)| arm == base) else { return };
        for (arm, runs) in self.0.iter().filter(|(arm, _)| arm != base) {
            for metric in metrics {
                let both = runs.iter().zip(first);
                let both = both.filter_map(|(a, b)| value(a, metric).zip(value(b, metric)));
                let ratios = both.filter(|(_, b)| *b > 0.0).map(|(a, b)| a / b);
                let name = name(&format!("{metric}_ratio"));
                outcome.add_median(arm, &name, "fraction", &ratios.collect::<Vec<_>>());
            }
        }
    }
}

/// `x.json`, or `x-6.12.json` where there is one for each kernel.
fn file_of(file: &Path, kernel: Kernel, each: bool) -> PathBuf {
    if !each {
        return file.into();
    }
    let part = |p: Option<&std::ffi::OsStr>| p.unwrap_or_default().to_string_lossy().into_owned();
    let (stem, extension) = (part(file.file_stem()), part(file.extension()));
    let dot = if extension.is_empty() { "" } else { "." };
    file.with_file_name(format!("{stem}-{}{dot}{extension}", kernel.series()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arms: &[&str], scale: f64) -> Options {
        let arms = arms.iter().map(|a| a.to_string()).collect();
        Options { json: None, arms, scale, kernel: vec![Kernel::V6_1] }
    }

    #[test]
    fn both_kernels_have_a_file_each() {
        let file = Path::new("a/b.json");
        assert_eq!(file_of(file, Kernel::V6_12, false), file);
        assert_eq!(file_of(file, Kernel::V6_12, true), Path::new("a/b-6.12.json"));
        assert_eq!(file_of(Path::new("b"), Kernel::V6_1, true), Path::new("b-6.1"));
    }

    #[test]
    fn nonsense_is_refused_before_anything_runs() {
        let never = |_: &Trial, _: &mut ExperimentResult| -> Result<()> { panic!("ran") };
        let unknown = run("x", &["raw"], &options(&["rwa"], 1.0), never).unwrap_err();
        assert!(unknown.to_string().contains("there are raw"), "{unknown}");
        assert!(run("x", &["raw"], &options(&[], f64::NAN), never).is_err());
    }

    #[test]
    fn arms_take_turns_and_ratios_are_of_the_same_run() {
        let mut order = Vec::new();
        let turns = in_turns(&["plain", "ebb"], 2, |arm| {
            order.push(arm.to_string());
            let n = order.len() as f64;
            Ok(if arm == "ebb" {
                vec![("a", "count", n), ("b", "count", n)]
            } else {
                vec![("a", "count", 2.0 * n), ("b", "count", 0.0)]
            })
        });
        let turns = turns.unwrap();
        assert_eq!(order, ["plain", "ebb", "ebb", "plain"]);
        let mut outcome = ExperimentResult::new("x", "6.1", crate::vm::Accel::Tcg);
        turns.add(&mut outcome, ExperimentResult::add, |metric| format!("x_{metric}"));
        assert_eq!(outcome.value("ebb", "x_a"), Some(2.5));
        turns.add_ratios(&mut outcome, "plain", &["a", "b"], str::to_string);
        // 2 by 2, and 3 by 8.
        assert_eq!(outcome.value("ebb", "a_ratio"), Some((1.0 + 0.375) / 2.0));
        assert_eq!(outcome.value("ebb", "b_ratio"), None, "nothing to compare with");
        assert_eq!(outcome.value("plain", "a_ratio"), None);
    }

    #[test]
    fn sizes_are_whole_blocks_and_never_too_small() {
        let trial = |scale| Trial { arms: Vec::new(), scale, kernel: Kernel::V6_1 };
        assert_eq!(trial(1.0).size(256), Bytes::mib(256));
        assert_eq!(trial(0.1).size(256), Bytes::mib(24));
        assert_eq!(trial(0.05).size(20), Bytes::mib(16));
        assert_eq!((trial(0.05).rounds(7), trial(2.0).rounds(7)), (2, 14));
    }
}
