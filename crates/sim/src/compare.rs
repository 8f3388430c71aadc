//! The comparison: every controller in every scenario over many seeds, in threads,
//! and the tables of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebb_core::table::table;
use ebb_core::units::Bytes;
use serde::Serialize;

use crate::controllers::{CONTROLLERS, Controller, RunResult};
use crate::law::Breach;
use crate::scenario::Scenario;
use crate::score::Score;

/// Does each job on one of `threads` threads; results in the order of the jobs.
pub fn in_parallel<J: Sync, R: Send>(
    jobs: &[J],
    threads: usize,
    work: impl Fn(&J) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done: Mutex<BTreeMap<usize, R>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some((i, job)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(i).map(|j| (i, j))
                } {
                    let result = work(job);
                    if let Ok(mut done) = done.lock() {
                        done.insert(i, result);
                    }
                }
            });
        }
    });
    done.into_inner().unwrap_or_default().into_values().collect()
}

/// The scores of one controller over several runs, joined.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sum {
    pub runs: u64,
    /// Guests in all.
    pub vms: u64,
    /// Of them not harmed.
    pub held: u64,
    /// Time that guests waited for memory.
    pub stall_s: f64,
    /// Killed for lack of memory.
    pub ooms: u64,
    /// Swapped by hosts, out and in.
    pub swapped: Bytes,
    /// Changes of direction, a guest and minute (mean of runs).
    pub reversals: f64,
    /// Mean and worst time to the scenario's 8 GiB.
    pub take_s: Option<(f64, f64)>,
    /// Mean and worst delay of the scenario's 4 GiB.
    pub give_s: Option<(f64, f64)>,
    /// Probes that never came about.
    pub missed: u64,
    /// Mean of runs.
    pub unfairness: f64,
    /// Time with hosts below their low mark.
    pub overfull_s: f64,
    pub broken: u64,
    #[serde(skip)]
    takes: Vec<f64>,
    #[serde(skip)]
    gives: Vec<f64>,
}

impl Sum {
    fn add(&mut self, result: &RunResult) {
        let s: &Score = &result.score;
        let n = self.runs as f64;
        let mean = |old: f64, new: f64| (old * n + new) / (n + 1.0);
        self.reversals = mean(self.reversals, s.reversals);
        self.unfairness = mean(self.unfairness, s.unfairness);
        self.runs += 1;
        self.vms += s.vms;
        self.held += s.held;
        self.stall_s += s.stall_s;
        self.ooms += s.ooms;
        self.swapped += s.swapped;
        self.missed += s.missed;
        self.overfull_s += s.overfull_s;
        self.broken += result.broken.len() as u64;
        self.takes.extend(s.take_s);
        self.gives.extend(s.give_s);
        self.take_s = mean_and_worst(&self.takes);
        self.give_s = mean_and_worst(&self.gives);
    }
}

fn mean_and_worst(values: &[f64]) -> Option<(f64, f64)> {
    let worst = values.iter().copied().fold(0.0, f64::max);
    (!values.is_empty()).then(|| (values.iter().sum::<f64>() / values.len() as f64, worst))
}

/// One scenario's part of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Part {
    /// Its name.
    pub scenario: &'static str,
    pub about: &'static str,
    /// Each controller's sums.
    pub sums: Vec<(Controller, Sum)>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub seeds: u64,
    /// The first of them.
    pub first_seed: u64,
    /// Scenario by scenario.
    pub parts: Vec<Part>,
    /// All together.
    pub all: Vec<(Controller, Sum)>,
    /// Laws that Ebb broke, with scenario and seed.
    pub broken: Vec<(String, Breach)>,
}

/// Where a controller was better than Ebb.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Scenario, or `all`.
    pub scenario: &'static str,
    /// To whom.
    pub to: &'static str,
    /// In what, with both figures: Ebb's first.
    pub what: String,
}

/// Runs it: every controller on the same worlds.
pub fn compare(scenarios: &[Scenario], seeds: Range<u64>, threads: usize) -> Comparison {
    let jobs: Vec<(usize, u64, Controller)> = (0..scenarios.len())
        .flat_map(|s| seeds.clone().map(move |seed| (s, seed)))
        .flat_map(|(s, seed)| CONTROLLERS.map(|c| (s, seed, c)))
        .collect();
    let outcomes = in_parallel(&jobs, threads, |(s, seed, c)| c.run(&scenarios[*s].setup(*seed)));
    let mut all: BTreeMap<Controller, Sum> = BTreeMap::new();
    let mut each: Vec<BTreeMap<Controller, Sum>> = vec![BTreeMap::new(); scenarios.len()];
    let mut broken = Vec::new();
    for ((s, seed, c), outcome) in jobs.iter().zip(&outcomes) {
        all.entry(*c).or_default().add(outcome);
        each[*s].entry(*c).or_default().add(outcome);
        let run = format!("{} seed {seed}", scenarios[*s].name);
        broken.extend(outcome.broken.iter().map(|b| (run.clone(), b.clone())));
    }
    let parts = scenarios.iter().zip(each).map(|(s, sums)| Part {
        scenario: s.name,
        about: s.about,
        sums: sums.into_iter().collect(),
    });
    Comparison {
        seeds: seeds.end.saturating_sub(seeds.start),
        first_seed: seeds.start,
        parts: parts.collect(),
        all: all.into_iter().collect(),
        broken,
    }
}

/// Stall that is nothing: less than this a guest, seconds.
const NO_STALL_S: f64 = 0.1;

impl Comparison {
    /// Where Ebb lost, on guests held and on stall: by scenario and overall.
    pub fn losses(&self) -> Vec<Loss> {
        let parts = self.parts.iter().map(|p| (p.scenario, &p.sums));
        parts.chain([("all", &self.all)]).flat_map(|(name, sums)| losses_of(name, sums)).collect()
    }

    fn heading(&self) -> String {
        let last = (self.first_seed + self.seeds).saturating_sub(1);
        format!("All {} scenarios, seeds {} to {last}", self.parts.len(), self.first_seed)
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for part in &self.parts {
            let _ = writeln!(out, "{}: {}", part.scenario, part.about);
            out += &text(&part.sums);
        }
        let _ = writeln!(out, "{}", self.heading());
        out + &text(&self.all)
    }

    /// For docs/comparison.md.
    pub fn markdown(&self) -> String {
        let mut out = format!("{}:\n\n", self.heading());
        out += &markdown(&HEAD, &rows(&self.all));
        out += "\nGuests held at no harm / seconds of guest stall, by scenario:\n\n";
        let names = CONTROLLERS.iter().map(|c| c.name());
        let head: Vec<&str> = ["scenario", "guests"].into_iter().chain(names).collect();
        let line = |part: &Part| {
            let vms = part.sums.first().map_or(0, |s| s.1.vms);
            let first = [format!("{}: {}", part.scenario, part.about), vms.to_string()];
            let cell = |(_, s): &(Controller, Sum)| format!("{} / {}", s.held, seconds(s.stall_s));
            first.into_iter().chain(part.sums.iter().map(cell)).collect()
        };
        out += &markdown(&head, &self.parts.iter().map(line).collect::<Vec<_>>());
        let losses = self.losses();
        if losses.is_empty() {
            return out
                + "\nNo rival beats Ebb in either figure in any scenario. (A stall below 0.1 s a guest counts as none.)\n";
        }
        out += "\nWhere Ebb is beaten:\n\n";
        for l in losses {
            let _ = writeln!(out, "- {} by {}: {}", l.scenario, l.to, l.what);
        }
        out
    }
}

fn losses_of(scenario: &'static str, sums: &[(Controller, Sum)]) -> Vec<Loss> {
    let Some((_, ebb)) = sums.iter().find(|s| s.0 == Controller::Ebb) else { return Vec::new() };
    let mut losses = Vec::new();
    for (c, s) in sums.iter().filter(|s| s.0 != Controller::Ebb) {
        let mut loss = |what| losses.push(Loss { scenario, to: c.name(), what });
        if s.held > ebb.held {
            loss(format!("held {} < {} of {}", ebb.held, s.held, s.vms));
        }
        let nothing = NO_STALL_S * ebb.vms as f64;
        if ebb.stall_s > s.stall_s && ebb.stall_s > nothing {
            loss(format!("stall {:.1} s > {:.1} s", ebb.stall_s, s.stall_s));
        }
    }
    losses
}

const HEAD: [&str; 11] = [
    "policy",
    "held",
    "of",
    "stall",
    "OOM",
    "swapped",
    "reversals/min",
    "8 GiB taken",
    "4 GiB given",
    "unfairness",
    "over-full",
];

fn rows(sums: &[(Controller, Sum)]) -> Vec<Vec<String>> {
    sums.iter().map(|(c, s)| row(*c, s)).collect()
}

fn text(sums: &[(Controller, Sum)]) -> String {
    table(&HEAD, &rows(sums), false).lines().map(|line| format!("  {line}\n")).collect()
}

fn markdown(head: &[&str], rows: &[Vec<String>]) -> String {
    let rule = format!("|---|{}\n", "---:|".repeat(head.len() - 1));
    let rows: String = rows.iter().map(|r| format!("| {} |\n", r.join(" | "))).collect();
    format!("| {} |\n{rule}{rows}", head.join(" | "))
}

fn row(c: Controller, s: &Sum) -> Vec<String> {
    let times = |t: Option<(f64, f64)>| match t {
        Some((mean, worst)) => format!("{mean:.1} s (worst {worst:.1})"),
        None => "–".into(),
    };
    vec![
        c.name().into(),
        s.held.to_string(),
        s.vms.to_string(),
        seconds(s.stall_s),
        s.ooms.to_string(),
        s.swapped.to_string(),
        format!("{:.2}", s.reversals),
        times(s.take_s),
        times(s.give_s),
        format!("{:.2}", s.unfairness),
        seconds(s.overfull_s),
    ]
}

fn seconds(s: f64) -> String {
    if s < 99.95 { format!("{s:.1} s") } else { format!("{s:.0} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_results_come_in_the_order_of_the_jobs() {
        let jobs: Vec<u64> = (0..100).collect();
        assert_eq!(
            in_parallel(&jobs, 4, |j| j * 2),
            jobs.iter().map(|j| j * 2).collect::<Vec<_>>()
        );
        assert!(in_parallel(&[0u8; 0], 4, |j| *j).is_empty());
    }

    #[test]
    fn a_loss_is_found_in_either_figure_and_a_tie_is_none() {
        let sum = |held, stall_s| Sum { vms: 10, held, stall_s, ..Sum::default() };
        let with = |rival| vec![(Controller::Ebb, sum(8, 5.0)), (Controller::Mom, rival)];
        assert_eq!(losses_of("x", &with(sum(8, 5.0))), []);
        assert_eq!(losses_of("x", &with(sum(9, 6.0))).len(), 1);
        assert_eq!(losses_of("x", &with(sum(7, 4.0))).len(), 1);
        assert_eq!(losses_of("x", &with(sum(7, 6.0))), []);
    }
}
