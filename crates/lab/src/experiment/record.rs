//! What an Ebb under test did, read from its own record (`ebb run --record`):
//! when it first ordered a VM to shrink, and how often VMs were turned around.
//!
//! Sizes are what QEMU said of each balloon, tick by tick, so also what a guest
//! did on its own counts.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail};
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_sim::score::Way;

use crate::ebb;

/// A turn smaller than this is none: page granularity, a driver's last pages.
const LEAST_TURN: Bytes = Bytes::mib(4);

/// Reads a record. The first line tells whose it is, the last one may be cut off.
pub fn read(path: &Path) -> Result<Vec<Tick>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut ticks = Vec::new();
    for line in BufReader::new(file).lines() {
        ticks.extend(serde_json::from_str::<Tick>(&line?).ok());
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

/// How often the direction of a VM's size changed, all VMs together.
pub fn reversals(ticks: &[Tick]) -> u64 {
    let mut ways: BTreeMap<&str, Way> = BTreeMap::new();
    let mut turns = 0;
    for vm in ticks.iter().flat_map(|t| &t.sample.vms) {
        if let Some(size) = vm.balloon.as_ref().map(|b| b.actual) {
            let way = ways.entry(&vm.name).or_insert_with(|| Way::at(size));
            turns += u64::from(way.turns(size, LEAST_TURN));
        }
    }
    turns
}

/// Milliseconds from `since` to the first tick at or after it that ordered a VM
/// to shrink; 0 where Ebb was ahead of it.
pub fn first_take(ticks: &[Tick], since: u64) -> Option<u64> {
    let takes = |t: &&Tick| t.plan.actions.iter().any(|a| a.to < a.from);
    let first = ticks.iter().find(takes)?.sample.wall_ms;
    Some(first.saturating_sub(since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::plan::{Action, Reason};
    use ebb_core::sample::{BalloonSample, Sample, VmId, VmSample};

    fn tick(mib: u64) -> Tick {
        let balloon = BalloonSample { actual: Bytes::mib(mib), ..BalloonSample::default() };
        let vm = VmSample { name: "a".into(), balloon: Some(balloon), ..VmSample::default() };
        let vms = vec![VmSample { name: "b".into(), ..VmSample::default() }, vm];
        Tick { sample: Sample { wall_ms: 7, vms, ..Sample::default() }, ..Tick::default() }
    }

    fn ticks(sizes: &[u64]) -> Vec<Tick> {
        sizes.iter().copied().map(tick).collect()
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
        let mut tick = tick(9);
        let (vm, name, reason) = (VmId::default(), "a".into(), Reason::Requested);
        tick.plan.actions = vec![Action { vm, name, from: Bytes(9), to: Bytes(8), reason }];
        let line = serde_json::to_string(&tick).unwrap();
        std::fs::write(&path, format!("{{\"ebb_record\":1}}\n{line}\n{{\"sample\":")).unwrap();
        let ticks = read(&path).unwrap();
        assert_eq!(ticks, [tick]);
        assert_eq!((first_take(&ticks, 3), first_take(&ticks, 9)), (Some(4), Some(0)));
        assert_eq!(first_take(&[], 3), None);
    }
}
