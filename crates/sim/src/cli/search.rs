//! The search for worlds in which the controller does worst, as text.

use anyhow::Result;
use ebb_core::table::table;
use ebb_sim::search::{Brief, Found, Search};
use serde::Serialize;

use super::{emit, emit_json};

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

/// Ebb and its best rivals in all of these worlds together.
fn together(of: &[Found]) -> String {
    let sum = |what: fn(&Brief) -> f64, whose: fn(&Found) -> &Brief| {
        of.iter().map(|f| what(whose(f))).sum::<f64>()
    };
    let line = |name: &str, whose: fn(&Found) -> &Brief| {
        vec![
            name.to_string(),
            format!("{:.0}", sum(|b| b.held as f64, whose)),
            format!("{:.0}", sum(|b| b.stall_s, whose)),
            format!("{:.0}", sum(|b| b.ooms as f64, whose)),
            format!("{:.2}", sum(|b| b.reversals, whose) / of.len().max(1) as f64),
        ]
    };
    let head = ["", "held", "stall s", "killed", "turns a guest and minute"];
    let lines = [
        line("Ebb", |f| &f.ebb),
        line("best rival of each", |f| &f.best),
        line("told at once", |f| &f.pushed),
        line("oracle", |f| &f.oracle),
    ];
    table(&head, &lines, false)
}

fn text(random: &[Found], worst: &[Found]) -> String {
    let (fit, over): (Vec<Found>, Vec<Found>) =
        random.iter().cloned().partition(|f| f.point.load() <= 1.0);
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
         be: in {} worlds; a rival stalls them for less than 80 % of Ebb's time, or holds more: \
         in {}; laws broken: {}\n\nwhere all needs fit:\n{}\nwhere they do not:\n{}\nthe worst found: held / stall / killed\n{}",
        random.len(),
        percent(random, Found::is_unbeaten),
        percent(random, Found::beats_pushed),
        random.iter().filter(kills).count(),
        random.iter().filter(|f| f.is_far_beaten()).count(),
        random.iter().map(|f| f.broken).sum::<usize>(),
        together(&fit),
        together(&over),
        table(&head, &cells, false)
    )
}
