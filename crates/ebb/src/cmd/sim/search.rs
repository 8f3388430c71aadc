//! The search for worlds in which the controller does worst, as text.

use anyhow::Result;
use ebb_sim::search::{Found, Search};
use serde::Serialize;

use crate::table::{emit, emit_json, table};

#[derive(Serialize)]
struct Worlds {
    random: Vec<Found>,
    worst: Vec<Found>,
}

/// Runs it and tells.
pub fn run(search: &Search, json: bool) -> Result<()> {
    let (random, worst) = search.run();
    if json {
        return emit_json(&Worlds { random, worst });
    }
    emit(&text(&random, &worst))
}

fn percent(of: &[Found], is: impl Fn(&Found) -> bool) -> f64 {
    of.iter().filter(|f| is(f)).count() as f64 * 100.0 / of.len().max(1) as f64
}

fn text(random: &[Found], worst: &[Found]) -> String {
    let kills = |f: &&Found| f.ebb.ooms > 0 && f.oracle.ooms == 0;
    let cells: Vec<Vec<String>> = worst
        .iter()
        .map(|f| {
            vec![
                f.ebb.to_string(),
                f.best.to_string(),
                f.rival.to_string(),
                f.pushed.to_string(),
                f.oracle.to_string(),
                format!("{} of {}", f.vms, f.about),
            ]
        })
        .collect();
    let head = ["Ebb", "best rival", "which", "pushed", "oracle", "world"];
    format!(
        "{} worlds at random (a stand-in): in {:.1} % no rival holds more guests or stalls them \
         less; told at once, qmemman does not in {:.1} %\nprocesses killed where nobody need \
         be: in {} worlds; laws broken: {}\n\nthe worst found: held / stall / killed\n{}",
        random.len(),
        percent(random, Found::is_unbeaten),
        percent(random, Found::beats_pushed),
        random.iter().filter(kills).count(),
        random.iter().map(|f| f.broken).sum::<usize>(),
        table(&head, &cells, false)
    )
}
