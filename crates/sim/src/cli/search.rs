//! The search for worlds in which the controller does worst, as text.

use std::collections::BTreeMap;

use anyhow::Result;
use ebb_core::table::table;
use ebb_sim::Score;
use ebb_sim::law::Law;
use ebb_sim::search::{Found, NEEDLESS_MOST, Search};
use ebb_sim::worlds::RUN_MS;
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

/// The length of each world's run, hours.
const RUN_HOURS: f64 = RUN_MS as f64 / 3_600_000.0;

fn percent(of: &[Found], is: impl Fn(&Found) -> bool) -> String {
    let share = of.iter().filter(|f| is(f)).count() as f64 * 100.0 / of.len().max(1) as f64;
    format!("{share:.1} %")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Seconds of stall a guest and hour.
fn stall_an_hour(of: &[&Found], whose: fn(&Found) -> &Score) -> f64 {
    let guest_hours = of.iter().map(|f| f.vms as f64).sum::<f64>() * RUN_HOURS;
    of.iter().map(|f| whose(f).stall_s).sum::<f64>() / guest_hours.max(1e-9)
}

/// The figures by which a search is judged: the table of docs/comparison.md.
fn figures(all: &[Found], fit: &[Found], over: &[Found]) -> String {
    let worlds = |of: &[Found], is: fn(&Found) -> bool| {
        let n = of.iter().filter(|f| is(f)).count();
        format!("{n} {}", if n == 1 { "world" } else { "worlds" })
    };
    let sums = |what: fn(&Score) -> f64, unit: &str| {
        let sum = |whose: fn(&Found) -> &Score| all.iter().map(|f| what(whose(f))).sum::<f64>();
        format!("{:.0}{unit} / {:.0}{unit}", sum(|f| &f.ebb), sum(|f| &f.best))
    };
    let means = |of: &[Found], what: fn(&Score) -> f64| {
        let n = of.len().max(1) as f64;
        let mean = |whose: fn(&Found) -> &Score| of.iter().map(|f| what(whose(f))).sum::<f64>() / n;
        format!("{:.2} / {:.2}", mean(|f| &f.ebb), mean(|f| &f.best))
    };
    let stall = stall_an_hour(&fit.iter().collect::<Vec<_>>(), |f| &f.ebb);
    let apart: Vec<&Found> = all.iter().filter(|f| f.split.is_some()).collect();
    let apart_ebb = stall_an_hour(&apart, |f| &f.ebb);
    let apart_oracle = stall_an_hour(&apart, |f| &f.oracle);
    let limit = median(all.iter().map(Found::beside_the_limit).collect());
    let by_split = all.iter().filter(|f| f.is_beaten_by_a_split()).count();
    let unbeaten_fit = format!("{} of {}", percent(fit, Found::is_unbeaten), fit.len());
    let lines = [
        ("unbeaten by the best rival", percent(all, Found::is_unbeaten)),
        ("- where all needs fit the host", unbeaten_fit),
        (
            "unbeaten by qmemman that is told each change within 0.1 s",
            percent(all, Found::beats_pushed),
        ),
        (
            "more than 1.25 times the best rival's stall, and more than a second above it",
            worlds(all, Found::is_far_beaten),
        ),
        ("- the same without that second", worlds(all, Found::is_far_above)),
        (
            "a static split does better, where own peaks fit",
            format!("{by_split} of {}", apart.len()),
        ),
        ("fewer guests held than the best rival's", worlds(all, |f| f.ebb.held < f.best.held)),
        ("guests held: Ebb / best rival of each world", sums(|b| b.held as f64, "")),
        ("stall: Ebb / best rival of each world", sums(|b| b.stall_s, " s")),
        ("processes killed: Ebb / best rival of each world", sums(|b| b.ooms as f64, "")),
        ("a kill where the oracle has none", worlds(all, Found::kills_in_vain)),
        ("- where all needs fit the host", worlds(fit, Found::kills_in_vain)),
        ("stall against the oracle's, a second added to both, median", format!("{limit:.2}")),
        ("stall where all needs fit, a guest and hour", format!("{stall:.2} s")),
        ("- where own peaks fit: Ebb / oracle", format!("{apart_ebb:.2} s / {apart_oracle:.2} s")),
        (
            "reversals a guest and minute where all needs fit: Ebb / best rival",
            means(fit, |b| b.reversals),
        ),
        ("- beyond the turns of the guest's own need", means(fit, |b| b.needless)),
        ("- more than 0.5 of those", worlds(fit, |f| f.ebb.needless > NEEDLESS_MOST)),
        ("- all reversals, in worlds whose needs do not fit", means(over, |b| b.reversals)),
        ("laws broken", worlds(all, |f| !f.broken.is_empty())),
    ];
    let lines = lines.map(|(what, figure)| vec![what.to_string(), figure]);
    table(&["", "figure"], &lines, false)
}

/// Each law that was broken: how often, and the first time.
fn laws(all: &[Found]) -> String {
    let mut by: BTreeMap<Law, (usize, String)> = BTreeMap::new();
    for (i, f) in all.iter().enumerate() {
        for b in &f.broken {
            by.entry(b.law).or_insert_with(|| (0, format!("world {i}: {b}"))).0 += 1;
        }
    }
    by.into_iter()
        .map(|(law, (n, first))| format!("{law:?} broken {n} times, first in {first}\n"))
        .collect()
}

/// Ebb and its best rivals in all of these worlds together.
fn together(of: &[Found]) -> String {
    let sum = |what: fn(&Score) -> f64, whose: fn(&Found) -> &Score| {
        of.iter().map(|f| what(whose(f))).sum::<f64>()
    };
    let line = |name: &str, whose: fn(&Found) -> &Score| {
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
        "{} worlds at random (a stand-in)\n{}{}\nwhere all needs fit:\n{}\nwhere they do not:\n{}\nthe \
         worst found: held / stall / killed\n{}",
        random.len(),
        figures(random, &fit, &over),
        laws(random),
        together(&fit),
        together(&over),
        table(&head, &cells, false)
    )
}
