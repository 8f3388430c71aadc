//! `fragmented`: memory freed in small pieces between used ones, and how much of it
//! the host still holds when everything was tried.
//!
//! A guest holds 1.2 GiB in small pages and frees every second piece of 1 MiB, or
//! every second page. Metric `residual` (pieces of 1 MiB; with `_4k`: of 4 KiB;
//! with `_thp`: huge pages behind the guest's RAM): share of what was freed that
//! the host holds in the end, by its memory cgroup. Arms: `ebb-guest` (asked with
//! `ebb reclaim`'s request, ten times), `reporting` (until nothing came for 20 s),
//! `ebb-stock` (reporting, and after it Ebb's balloon, asked as often: what reporting
//! leaves behind).

use std::time::{Duration, Instant};

use anyhow::Result;
use ebb_core::units::Bytes;

use super::cgroup_guest::{self, Bench, MINUTE, RamKind};
use super::trial::Trial;
use crate::ebb::Daemon;
use crate::result::ExperimentResult;
use crate::vm::Balloon;

pub const ARMS: [&str; 3] = ["ebb-guest", "reporting", "ebb-stock"];
/// The recycler is asked once a second, so often.
const ASKED: u32 = 10;

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let mut bench = Bench::new(trial, outcome)?;
    for memory in [RamKind::Small, RamKind::Huge] {
        for arm in ARMS.iter().filter(|a| trial.wants(a)) {
            one(&mut bench, memory, arm)?;
        }
    }
    for metric in ["residual", "residual_4k", "residual_thp", "residual_4k_thp"] {
        outcome.target("ebb-guest", metric, "<=", 0.02);
    }
    Ok(())
}

fn one(bench: &mut Bench<'_>, memory: RamKind, arm: &str) -> Result<()> {
    let freed = bench.trial.size(600);
    let place = bench.boot(memory, arm == "ebb-guest", |c| {
        c.memory = (freed + freed + Bytes::mib(400)).floor_mib();
        let stock = arm == "ebb-stock";
        c.balloon = Some(Balloon { reporting: arm == "reporting" || stock, deflate_on_oom: stock });
    })?;
    let daemon = match arm {
        "ebb-guest" => {
            place.insmod()?;
            Some(place.daemon("guest")?)
        }
        _ => None,
    };
    for (piece, name) in [(1u64 << 20, "residual"), (4096, "residual_4k")] {
        let mut left = Vec::new();
        for _ in 0..bench.trial.rounds(3) {
            place.start("p", "pieces", &format!("size={} piece={piece}", 2 * freed.0))?;
            // Whatever else is free is the host's before this begins.
            match &daemon {
                Some(daemon) => {
                    daemon.reclaim()?;
                    let held = |s: &serde_json::Value| s["vms"][0]["agent"]["held"].as_u64();
                    daemon
                        .wait_for("calm", 2 * MINUTE, |s| held(s).is_some_and(|h| h < 8 << 20))?;
                }
                None => place.calm()?,
            }
            let full = place.usage();
            place.free_pieces("p")?;
            let begun = Instant::now();
            match &daemon {
                Some(daemon) => ask(daemon)?,
                None => drop(cgroup_guest::watch(&place.cgroup, begun, full, freed, MINUTE)),
            }
            let ballooning = (arm == "ebb-stock").then(|| place.daemon("stock")).transpose()?;
            ballooning.as_ref().map(ask).transpose()?;
            let back = full - place.usage();
            if let Some(daemon) = ballooning {
                daemon.stop();
            }
            let share = 1.0 - back.fraction_of(freed);
            println!(
                "  {arm}, {}, pieces of {}: {back} of {freed} came back in {:.0?}",
                memory.name(),
                Bytes(piece),
                begun.elapsed()
            );
            left.push(share);
            place.stop("p")?;
        }
        let metric = format!("{name}{}", memory.suffix());
        bench.outcome.add_median(arm, &metric, "fraction", &left);
    }
    if let Some(daemon) = daemon {
        daemon.stop();
    }
    Ok(())
}

fn ask(daemon: &Daemon) -> Result<()> {
    for _ in 0..ASKED {
        daemon.reclaim()?;
        std::thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}
