//! What the experiments of tier guest share: which arms, how large, on which guest
//! kernels; the table and the file at the end.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;

use crate::image::Kernel;
use crate::result::ExperimentResult;

/// Guest kernels of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kernels {
    /// Debian 12's own.
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    Both,
}

impl Kernels {
    /// The kernels that are meant.
    pub fn list(self) -> Vec<Kernel> {
        match self {
            Kernels::V6_1 => vec![Kernel::V6_1],
            Kernels::V6_12 => vec![Kernel::V6_12],
            Kernels::Both => Kernel::ALL.to_vec(),
        }
    }
}

/// What a user asks of an experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Figures as JSON; with --kernel both a file for each, FILE-6.1 and FILE-6.12
    /// (before its extension)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Arms; all of them where none is named
    #[arg(long, value_delimiter = ',')]
    pub arms: Vec<String>,
    /// Factor on sizes and numbers of rounds
    #[arg(long, default_value_t = 1.0)]
    pub scale: f64,
    /// Guest kernel
    #[arg(long, value_enum, default_value = "6.1")]
    pub kernel: Kernels,
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
    for kernel in options.kernel.list() {
        let trial = Trial { arms: arms.clone(), scale: options.scale, kernel };
        let mut outcome = ExperimentResult::of(name, kernel)?;
        println!("== {name}, guest kernel {}", outcome.kernel);
        let result = one(&trial, &mut outcome);
        // What was measured before something failed is not lost.
        println!("{}", outcome.table());
        let each = options.kernel == Kernels::Both;
        let file = options.json.as_ref().map(|file| file_of(file, kernel, each));
        outcome.keep(file.as_deref())?;
        result.with_context(|| format!("{name} on {kernel}"))?;
    }
    Ok(())
}

/// Each arm so often, the arms by turns, every other run the other way round: what each run came
/// to, by arm.
pub fn in_turns<R>(
    arms: &[String],
    runs: u32,
    one: impl Fn(&str) -> Result<R>,
    line: impl Fn(&R) -> String,
) -> Result<Vec<Vec<R>>> {
    let mut results: Vec<Vec<R>> = arms.iter().map(|_| Vec::new()).collect();
    for n in 1..=runs {
        let mut order: Vec<usize> = (0..arms.len()).collect();
        if n % 2 == 0 {
            order.reverse();
        }
        for i in order {
            let arm = &arms[i];
            let result = one(arm).with_context(|| format!("run {n}, {arm}"))?;
            println!("run {n:>2}  {arm:<10}{}", line(&result));
            results[i].push(result);
        }
    }
    Ok(results)
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
        Options { json: None, arms, scale, kernel: Kernels::V6_1 }
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
    fn sizes_are_whole_blocks_and_never_too_small() {
        let trial = |scale| Trial { arms: Vec::new(), scale, kernel: Kernel::V6_1 };
        assert_eq!(trial(1.0).size(256), Bytes::mib(256));
        assert_eq!(trial(0.1).size(256), Bytes::mib(24));
        assert_eq!(trial(0.05).size(20), Bytes::mib(16));
        assert_eq!((trial(0.05).rounds(7), trial(2.0).rounds(7)), (2, 14));
    }
}
