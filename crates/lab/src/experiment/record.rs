//! What an Ebb under test did, read from its own record (`ebb run --record`):
//! when it first ordered a VM to shrink, and how often VMs were turned around.
//!
//! Sizes are what QEMU said of each balloon, tick by tick, so also what a guest
//! did on its own counts.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::ebb;

/// A turn smaller than this is none: page granularity, a driver's last pages.
const LEAST_TURN: u64 = 4 << 20;

/// One tick, as far as experiments ask.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedTick {
    /// When it was sampled, milliseconds since 1970.
    pub wall_ms: u64,
    /// Each VM's size (RAM less balloon), bytes.
    pub sizes: BTreeMap<String, u64>,
    /// Whether a VM was ordered to shrink.
    pub takes: bool,
}

/// Reads a record; lines that are no ticks are skipped.
pub fn read(path: &Path) -> Result<Vec<RecordedTick>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut ticks = Vec::new();
    for line in BufReader::new(file).lines() {
        // The last line may be cut off.
        let Ok(tick) = serde_json::from_str::<Value>(&line?) else { continue };
        if tick["plan"].is_object() {
            ticks.push(parse(&tick));
        }
    }
    Ok(ticks)
}

/// Copies the record of a daemon that ran in `dir` to `kept`. It must replay to the
/// same plans.
pub fn keep(dir: &Path, kept: &Path, name: &str) -> Result<()> {
    let to = kept.join(format!("{name}.jsonl"));
    std::fs::create_dir_all(kept).with_context(|| kept.display().to_string())?;
    std::fs::copy(dir.join("record.jsonl"), &to).with_context(|| to.display().to_string())?;
    let (code, out, err) = ebb::run(&["replay", &to.display().to_string()])?;
    if code != 0 {
        bail!("{} replays to other plans: {out}{err}", to.display());
    }
    Ok(())
}

fn parse(tick: &Value) -> RecordedTick {
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let vms = list(&tick["sample"]["vms"]);
    let sizes = vms.iter().filter_map(|vm| {
        Some((vm["name"].as_str()?.to_string(), vm["balloon"]["actual"].as_u64()?))
    });
    RecordedTick {
        wall_ms: tick["sample"]["wall_ms"].as_u64().unwrap_or(0),
        sizes: sizes.collect(),
        takes: list(&tick["plan"]["actions"]).iter().any(|a| a["to"].as_u64() < a["from"].as_u64()),
    }
}

/// How often the direction of a VM's size changed, all VMs together.
pub fn reversals(ticks: &[RecordedTick]) -> u64 {
    let mut ways: BTreeMap<&str, Way> = BTreeMap::new();
    for tick in ticks {
        for (name, size) in &tick.sizes {
            ways.entry(name).or_insert_with(|| Way::at(*size)).go(*size);
        }
    }
    ways.values().map(|w| w.turns).sum()
}

/// One VM's way up and down.
struct Way {
    /// The utmost it reached in this direction.
    end: u64,
    /// `None` until it has moved.
    grows: Option<bool>,
    turns: u64,
}

impl Way {
    fn at(size: u64) -> Way {
        Way { end: size, grows: None, turns: 0 }
    }

    fn go(&mut self, size: u64) {
        let grows = size > self.end;
        if self.grows == Some(grows) {
            self.end = size;
        } else if size.abs_diff(self.end) >= LEAST_TURN {
            self.turns += self.grows.is_some() as u64;
            self.grows = Some(grows);
            self.end = size;
        }
    }
}

/// Milliseconds from `since` to the first tick at or after it that ordered a VM
/// to shrink; 0 where Ebb was ahead of it.
pub fn first_take(ticks: &[RecordedTick], since: u64) -> Option<u64> {
    let first = ticks.iter().find(|t| t.takes)?.wall_ms;
    Some(first.saturating_sub(since))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ticks(sizes: &[u64]) -> Vec<RecordedTick> {
        let sizes = sizes.iter().map(|s| BTreeMap::from([("a".to_string(), s * MIB)]));
        sizes.map(|sizes| RecordedTick { sizes, ..RecordedTick::default() }).collect()
    }

    #[test]
    fn only_true_turns_count() {
        assert_eq!(reversals(&ticks(&[512, 400, 300, 300, 200])), 0, "one way");
        assert_eq!(reversals(&ticks(&[512, 400, 402, 400, 390])), 0, "less than a turn");
        assert_eq!(reversals(&ticks(&[512, 400, 402, 404, 500])), 1, "slow turns count too");
        assert_eq!(reversals(&ticks(&[512, 300, 512, 300])), 2);
        assert_eq!(reversals(&[]), 0);
    }

    #[test]
    fn ticks_are_read_and_other_lines_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.jsonl");
        let tick =
            r#"{"sample":{"wall_ms":7,"vms":[{"name":"a","balloon":{"actual":5}},{"name":"b"}]},
            "plan":{"actions":[{"from":9,"to":8}]}}"#
                .replace('\n', "");
        std::fs::write(&path, format!("{{\"ebb_record\":1}}\n{tick}\n{{\"sample\":")).unwrap();
        let sizes = BTreeMap::from([("a".to_string(), 5)]);
        let expected = vec![RecordedTick { wall_ms: 7, sizes, takes: true }];
        assert_eq!(read(&path).unwrap(), expected);
        assert_eq!((first_take(&expected, 3), first_take(&expected, 9)), (Some(4), Some(0)));
        assert_eq!(first_take(&[], 3), None);
    }
}
