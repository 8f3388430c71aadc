//! Every policy on guests that want what those of a record had.

use std::fs::File;
use std::io::{BufRead, BufReader};

use anyhow::{Context, Result, bail, ensure};
use ebb_core::table::table;
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use ebb_sim::trace::Trace;
use ebb_sim::{CONTROLLERS, Score};
use serde::Serialize;
use serde_json::Value;

use super::{emit, emit_json};

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    #[serde(flatten)]
    score: Score,
    laws_broken: usize,
}

/// Runs all of them; with the host's memory as recorded, if `host` is `None`.
pub fn run(file: &str, host: Option<Bytes>, json: bool) -> Result<()> {
    let input = File::open(file).with_context(|| format!("cannot read {file}"))?;
    let mut trace = Trace::default();
    for (n, line) in BufReader::new(input).lines().enumerate() {
        let unread = || format!("{file}: line {} is not text (zstd -d unpacks a record)", n + 1);
        let line = line.with_context(unread)?;
        let Ok(tick) = serde_json::from_str::<Tick>(&line) else {
            let head = serde_json::from_str::<Value>(&line).is_ok_and(|v| v["ebb_record"].is_u64());
            ensure!(head, "{file}: line {} is neither a tick nor a head of a record", n + 1);
            continue;
        };
        trace.push(&tick.sample);
    }
    let Some(setup) = trace.setup(host, 1) else {
        bail!("{file}: no guest in it told what it had: nothing to simulate");
    };
    let rows: Vec<Row> = CONTROLLERS
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
        table(&head, &cells, false)
    ))
}
