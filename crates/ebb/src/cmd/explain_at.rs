//! `ebb explain VM --at 12:03`: why something was done then, from the record.
//!
//! The record is decided again tick by tick, so that inputs, rule and result are
//! those of the moment and not what is remembered of it. Older decisions than the
//! record holds are told from the daemon's list, without their result.

use std::fs::File;
use std::io::{BufRead, BufReader};

use anyhow::{Context, Result, bail};
use ebb_core::tick::{Engine, Tick};
use ebb_core::units::{Bytes, Stamp};
use serde::Serialize;

use crate::daemon_client;
use crate::recorder;
use crate::table::{clock, emit_as, size};
use crate::view::{self, Decision};

/// How long after an order its result is looked for.
const RESULT_MS: u64 = 30_000;
const DAY_MS: u64 = 86_400_000;

/// A time of day, from and to, milliseconds after midnight UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window(u64, u64);

impl Window {
    fn parse(text: &str) -> Result<Window> {
        let bad = || format!("“{text}” is not a time of day: HH:MM or HH:MM:SS, UTC");
        let parts: Vec<&str> = text.trim_end_matches('Z').split(':').collect();
        let number = |i: usize, most: u64| {
            let n = parts.get(i).and_then(|p| p.parse::<u64>().ok()).filter(|n| *n <= most);
            n.with_context(bad)
        };
        let minute = (number(0, 23)? * 60 + number(1, 59)?) * 60_000;
        match parts.len() {
            2 => Ok(Window(minute, minute + 60_000)),
            // Ticks are mostly up to a second apart.
            3 => {
                let second = minute + number(2, 59)? * 1000;
                Ok(Window(second.saturating_sub(1000), second + 1000))
            }
            _ => bail!(bad()),
        }
    }

    fn holds(&self, wall_ms: u64) -> bool {
        (self.0..self.1).contains(&(wall_ms % DAY_MS))
    }

    /// Whether it lies between these two moments, and no tick does.
    fn is_between(&self, from: &Moment, to: &Moment) -> bool {
        from.wall_ms % DAY_MS < self.0 && self.1 <= to.wall_ms % DAY_MS && to.tick == from.tick + 1
    }
}

/// What a tick says of the VM.
#[derive(Clone, Debug, Default, Serialize)]
struct Moment {
    /// By the monotonic clock: the time of day may be set between two ticks.
    #[serde(skip)]
    at: Stamp,
    wall_ms: u64,
    tick: u64,
    actual: Option<Bytes>,
    resident: Option<Bytes>,
    host: String,
    guest: String,
    to: Option<Bytes>,
    /// The rule, or why nothing was done.
    rule: String,
    error: Option<String>,
    /// What came of the order, where it is told of.
    result: Option<String>,
}

/// Prints it; `true` where there is something about that time.
pub fn main(socket: &str, name: &str, at: &str, record: Option<&str>, json: bool) -> Result<bool> {
    let window = Window::parse(at)?;
    let all = match record {
        Some(path) => {
            let file = File::open(path).with_context(|| format!("cannot read {path}"))?;
            read(BufReader::new(file), name).with_context(|| path.to_string())?
        }
        None => read(&daemon_client::record(socket)?[..], name)?,
    };
    let mut told = moments(&all, window);
    if told.is_empty() && record.is_none() {
        let decisions: Vec<Decision> = daemon_client::get_json(socket, "/v1/decisions")?;
        let own = decisions.into_iter().filter(|d| d.action.name == name);
        told = own.filter(|d| window.holds(d.wall_ms)).map(from_list).collect();
    }
    emit_as(json, &told, || match told.is_empty() {
        true => Ok(nothing(name, at, &all)),
        false => Ok(told.iter().map(text).collect()),
    })?;
    Ok(!told.is_empty())
}

fn nothing(name: &str, at: &str, all: &[Moment]) -> String {
    match (all.first(), all.last()) {
        (Some(first), Some(last)) => format!(
            "nothing is known of {name} at {at}: the record has it from {} to {}\n",
            clock(first.wall_ms),
            clock(last.wall_ms)
        ),
        _ => format!("the record does not have a VM “{name}”\n"),
    }
}

/// Decides the record again; all that it says of one VM.
fn read(input: impl BufRead, name: &str) -> Result<Vec<Moment>> {
    let mut all = Vec::new();
    recorder::replay(input, |engine, tick| all.extend(moment(engine, tick, name)))?;
    Ok(all)
}

fn moment(engine: &mut Engine, recorded: &Tick, name: &str) -> Option<Moment> {
    let (_, model) = engine.replay(recorded);
    let vm = model.vms.iter().find(|v| v.name == name)?;
    let order = view::decisions(recorded, &model).into_iter().find(|d| d.action.vm == vm.id);
    let held = recorded.plan.held.iter().find(|h| h.vm == vm.id).map(|h| h.why.clone());
    let moment = match order {
        Some(mut order) => {
            if !recorded.applied {
                order.error = Some("dry run: not done".into());
            }
            from_list(order)
        }
        None => Moment {
            wall_ms: recorded.sample.wall_ms,
            tick: recorded.number,
            host: format!("{}: {}", model.host.shown.state, model.host.shown.why),
            guest: view::guest_words(vm),
            rule: held.or_else(|| recorded.forbidden.clone()).unwrap_or_default(),
            ..Moment::default()
        },
    };
    let at = recorded.sample.at;
    Some(Moment { at, actual: vm.actual, resident: vm.resident, ..moment })
}

/// Orders in the window; without any, why there was none, each reason once.
fn moments(all: &[Moment], window: Window) -> Vec<Moment> {
    let mut inside: Vec<usize> = (0..all.len()).filter(|i| window.holds(all[*i].wall_ms)).collect();
    if inside.is_empty() {
        let pairs = all.windows(2).enumerate();
        inside.extend(pairs.filter(|(_, p)| window.is_between(&p[0], &p[1])).map(|(i, _)| i));
    }
    let orders: Vec<usize> = inside.iter().copied().filter(|i| all[*i].to.is_some()).collect();
    let with_result = |i: &usize| Moment { result: result(all, *i), ..all[*i].clone() };
    if !orders.is_empty() {
        return orders.iter().map(with_result).collect();
    }
    let words = |i: usize| all[i].rule.split(|c: char| c.is_ascii_digit()).collect::<String>();
    let fresh = |at: usize| at == 0 || words(inside[at]) != words(inside[at - 1]);
    (0..inside.len()).filter(|at| fresh(*at)).map(|at| with_result(&inside[at])).collect()
}

/// The result of the order at `i`: until the next one, thirty seconds at most.
fn result(all: &[Moment], i: usize) -> Option<String> {
    let order = all[i].to?;
    let later = all[i + 1..]
        .iter()
        .take_while(|l| l.at.since(all[i].at) <= RESULT_MS && l.tick > all[i].tick);
    let there = |a: Bytes| a.abs_diff(order) < Bytes::mib(1);
    let end = later.clone().find(|l| l.to.is_some() || l.actual.is_some_and(there));
    let last = end.or(later.last())?;
    let seconds = last.at.since(all[i].at) as f64 / 1000.0;
    Some(format!(
        "{seconds:.1} s later its size was {}, resident {} (before: {}, {}); host {}",
        size(last.actual),
        size(last.resident),
        size(all[i].actual),
        size(all[i].resident),
        last.host
    ))
}

fn from_list(d: Decision) -> Moment {
    Moment {
        wall_ms: d.wall_ms,
        tick: d.tick,
        actual: Some(d.action.from),
        host: d.host,
        guest: d.guest,
        to: Some(d.action.to),
        rule: d.reason,
        error: d.error,
        ..Moment::default()
    }
}

fn text(l: &Moment) -> String {
    let what = match l.to {
        Some(to) => format!("{} → {to}", size(l.actual)),
        None => format!("stays at {}", size(l.actual)),
    };
    let error = l.error.as_ref().map_or(String::new(), |e| format!(" — {e}"));
    let mut out = format!(
        "{}  {what}{error}\n  rule      {}\n  host      {}\n  guest     {}\n",
        clock(l.wall_ms),
        l.rule,
        l.host,
        l.guest
    );
    if let Some(result) = &l.result {
        out += &format!("  result    {result}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_sim::Setup;
    use ebb_sim::scenario::crowd;

    fn record() -> Vec<u8> {
        let crowd = crowd(6, Bytes::gib(2), Bytes::gib(6), 1, 0);
        let config = crowd.config();
        recorder::tests::recorded(&Setup { run_ms: 200_000, ..crowd }, config)
    }

    #[test]
    fn a_clock_that_is_set_back_and_ticks_far_apart_are_answered_as_well() {
        let moment = |tick, at, wall_ms, to| Moment {
            at: Stamp(at),
            wall_ms,
            tick,
            actual: Some(Bytes::gib(1)),
            to,
            ..Moment::default()
        };
        let noon = DAY_MS / 2;
        let all = [
            moment(1, 5_000, noon, Some(Bytes::mib(512))),
            moment(2, 7_500, noon - 600_000, None),
            moment(3, 67_500, noon - 540_000, None),
        ];
        let told = moments(&all, Window::parse("12:00").unwrap());
        assert!(told[0].result.as_ref().unwrap().starts_with("2.5 s later"), "{told:?}");
        let told = moments(&all, Window::parse("11:50:30").unwrap());
        assert_eq!((told.len(), told[0].tick), (1, 2));
        assert!(moments(&all, Window::parse("11:40").unwrap()).is_empty());
    }

    #[test]
    fn why_it_shrank_is_answered_with_inputs_rule_and_result() {
        let all = read(&record()[..], "vm0001").unwrap();
        let shrank = all.iter().find(|l| l.to.is_some() && l.to < l.actual).unwrap();
        let at = clock(shrank.wall_ms);
        let told = moments(&all, Window::parse(&at).unwrap());
        let said: String = told.iter().map(text).collect();
        let parts = ["→", "rule      ", " GiB idle", "host      ", "left under host"];
        let more = ["guest     size", "needs", "result", "later its size was"];
        for part in parts.into_iter().chain(more) {
            assert!(said.contains(part), "{part} is missing in {said}");
        }
    }

    #[test]
    fn why_nothing_happened_is_answered_too_each_reason_once() {
        let all = read(&record()[..], "vm0001").unwrap();
        let quiet = all.iter().find(|l| l.to.is_none()).unwrap();
        let start = quiet.wall_ms % DAY_MS;
        let told = moments(&all, Window(start, start + 500));
        assert_eq!(told.len(), 1);
        assert!(text(&told[0]).contains("stays at"), "{}", text(&told[0]));
        let said = nothing("vm0001", "12:03", &all);
        assert!(said.contains("from 00:16:40Z"), "{said}");
        assert!(nothing("x", "12:03", &[]).contains("does not have a VM “x”"));
    }

    #[test]
    fn a_time_of_day_is_understood_or_refused_in_words() {
        assert_eq!(Window::parse("12:03").unwrap(), Window(43_380_000, 43_440_000));
        assert_eq!(Window::parse("00:00:10Z").unwrap(), Window(9_000, 11_000));
        for text in ["noon", "25:00", "12:60", "12", "12:03:04:05", "12:03:99"] {
            let said = Window::parse(text).unwrap_err().to_string();
            assert!(said.contains("HH:MM or HH:MM:SS"), "{text}: {said}");
        }
    }
}
