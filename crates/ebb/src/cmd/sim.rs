//! `ebb sim`: the daemon's loop and its rivals on synthetic guests.

mod crowd;
mod search;
mod table;

use std::fs::File;
use std::io::BufReader;

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;
use ebb_sim::trace::Trace;
use ebb_sim::{CONTESTANTS, SCENARIOS, Scenario};
use serde::Serialize;

use crate::recorder::{self, Line};
use crate::table::{emit, emit_json};

pub use crowd::{Hosts, Run};
pub use ebb_sim::search::Search;
pub use table::Compare;

/// What is simulated.
pub enum Job {
    /// One host, with Ebb and without.
    Run(Run),
    /// Many hosts at once.
    Hosts(Hosts),
    /// Every policy on every scenario.
    Compare(Compare),
    /// Looks for worlds in which Ebb does worst.
    Search(Search),
    /// Every policy on the guests of a record.
    Trace(TraceRun),
}

/// Guests of a record.
pub struct TraceRun {
    /// The record.
    pub file: String,
    /// The host's memory; as recorded, if `None`.
    pub host: Option<Bytes>,
}

/// Simulates and tells.
pub fn main(job: &Job, json: bool) -> Result<()> {
    match job {
        Job::Run(run) => crowd::run(run, json),
        Job::Hosts(hosts) => crowd::hosts(hosts, json),
        Job::Compare(compare) => table::compare_all(compare, json),
        Job::Search(search) => search::run(search, json),
        Job::Trace(run) => trace(run, json),
    }
}

/// The scenarios of these names; all, if there are none.
fn scenarios(names: &[String]) -> Result<Vec<Scenario>> {
    if let Some(bad) = names.iter().find(|n| ebb_sim::scenario::scenario(n).is_none()) {
        let known: Vec<&str> = SCENARIOS.iter().map(|s| s.name).collect();
        bail!("“{bad}” is no scenario: one of {}", known.join(", "));
    }
    let wanted = |s: &Scenario| names.is_empty() || names.iter().any(|n| n == s.name);
    Ok(SCENARIOS.into_iter().filter(wanted).collect())
}

/// How many threads there are to use.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    #[serde(flatten)]
    score: ebb_sim::Score,
    laws_broken: usize,
}

fn trace(run: &TraceRun, json: bool) -> Result<()> {
    let file = &run.file;
    let input = File::open(file).with_context(|| format!("cannot read {file}"))?;
    let mut trace = Trace::default();
    recorder::read(BufReader::new(input), |line| {
        if let Line::Tick(tick) = line {
            trace.push(&tick.sample);
        }
        Ok(())
    })
    .with_context(|| file.clone())?;
    let Some(setup) = trace.setup(run.host, 1) else {
        bail!("{file}: no guest in it told what it had: nothing to simulate");
    };
    let rows: Vec<Row> = CONTESTANTS
        .iter()
        .map(|c| {
            let o = c.run(&setup);
            Row { policy: c.name(), score: o.score, laws_broken: o.broken.len() }
        })
        .collect();
    if json {
        return emit_json(&rows);
    }
    let head = ["policy", "held", "of", "stall", "OOM", "swapped", "reversals/min", "over-full"];
    let cells = rows.iter().map(|r| {
        let s = &r.score;
        vec![
            r.policy.to_string(),
            s.held.to_string(),
            s.vms.to_string(),
            format!("{:.1} s", s.stall_s),
            s.ooms.to_string(),
            s.swapped.to_string(),
            format!("{:.2}", s.reversals),
            format!("{:.1} s", s.overfull_s),
        ]
    });
    let cells: Vec<Vec<String>> = cells.collect();
    emit(&format!(
        "{} guests that want what those of {file} had, {} s on {} (a stand-in)\n{}",
        setup.guests.len(),
        setup.run_ms / 1000,
        setup.host,
        crate::table::table(&head, &cells, false)
    ))
}
