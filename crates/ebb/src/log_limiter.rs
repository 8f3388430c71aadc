//! Which problems and orders are worth a line in the journal.
//!
//! A problem is said once while it lasts. A guest can make one come, go and change as it
//! likes, so for each VM and source there is at most one line a minute, and a problem
//! that differs in its numbers only is the same. An order that fails may be given again in each
//! tick, so the same holds for it.

use std::collections::HashMap;

use ebb_core::sample::{Problem, VmId};
use ebb_core::units::Stamp;

use crate::view::{DRY_RUN, Decision};

/// Between two lines of one VM and source.
const MINUTE_MS: u64 = 60_000;

/// What was said of one VM and source.
#[derive(Default)]
struct Said {
    at: Stamp,
    /// The words that were there in the last tick and have been said.
    words: Vec<String>,
}

#[derive(Default)]
pub struct LogLimiter {
    said: HashMap<(Option<VmId>, String), Said>,
}

impl LogLimiter {
    /// The lines for a tick's orders: one for each that was carried out, and for each that failed
    /// if it is to be said now. Told each tick, and nothing else with it.
    pub fn orders(&mut self, now: Stamp, orders: &[Decision]) -> Vec<String> {
        let line = |d: &Decision| {
            let error = d.error.as_ref().map_or(String::new(), |e| format!(" ({e})"));
            let a = &d.action;
            format!("{}: {} → {}: {}{error}", a.name, a.from, a.to, d.reason)
        };
        let fails = |d: &&Decision| d.error.as_ref().is_some_and(|e| e != DRY_RUN);
        let (failed, done): (Vec<&Decision>, Vec<_>) = orders.iter().partition(fails);
        let problem = |d: &&Decision| {
            let vm = Some(d.action.vm);
            Problem { vm, source: String::new(), message: line(d) }
        };
        let failed: Vec<Problem> = failed.iter().map(problem).collect();
        let news = self.news(now, &failed).into_iter().map(|p| p.message.clone());
        done.into_iter().map(line).chain(news).collect()
    }

    /// Those of the host's warnings that are to be said now. It is called in each tick, on an
    /// instance that serves nothing else.
    pub fn warnings(&mut self, now: Stamp, all: Vec<String>) -> Vec<String> {
        let problem =
            |message: String| Problem { vm: None, source: without_numbers(&message), message };
        let all: Vec<Problem> = all.into_iter().map(problem).collect();
        self.news(now, &all).into_iter().map(|p| p.message.clone()).collect()
    }

    /// Those of the problems that are to be said now. Told each tick.
    pub fn news<'a>(&mut self, now: Stamp, problems: &'a [Problem]) -> Vec<&'a Problem> {
        let mut news = Vec::new();
        let mut here: HashMap<(Option<VmId>, String), Vec<String>> = HashMap::new();
        for p in problems {
            let words = without_numbers(&p.message);
            let key = (p.vm, p.source.clone());
            let said = self.said.get(&key);
            let known = said.is_some_and(|s| s.words.contains(&words));
            let due = said.is_none_or(|s| now.since(s.at) >= MINUTE_MS);
            if !known && due {
                news.push(p);
                self.said.entry(key.clone()).or_default().at = now;
            }
            if known || due {
                here.entry(key).or_default().push(words);
            }
        }
        self.said.retain(|key, said| {
            said.words = here.remove(key).unwrap_or_default();
            !said.words.is_empty() || now.since(said.at) < MINUTE_MS
        });
        news
    }
}

/// A message without its numbers and their units.
pub fn without_numbers(message: &str) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "B"];
    let text: String = message.chars().filter(|c| !c.is_ascii_digit() && *c != '.').collect();
    text.split_whitespace().filter(|w| !units.contains(w)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(pid: u32, source: &str, message: &str) -> Problem {
        let vm = Some(VmId { pid, start: 1 });
        Problem { vm, source: source.into(), message: message.into() }
    }

    #[test]
    fn a_guest_whose_numbers_vary_writes_one_line_a_minute() {
        let mut limiter = LogLimiter::default();
        let mut lines = 0;
        for tick in 0..1200u64 {
            let (n, unit) = (tick % 700, if tick % 2 == 0 { "MiB" } else { "GiB" });
            let claims = format!("the guest claims {n}.5 {unit} of caches, more than 512 MiB");
            // It comes and goes, and another of the same source with it.
            let mut problems = vec![problem(1, "qmp guest-stats", &claims)];
            if tick % 3 == 0 {
                problems.push(problem(1, "qmp guest-stats", &format!("stat-x is \"{n}\"")));
            }
            if tick % 5 == 0 {
                problems.clear();
            }
            lines += limiter.news(Stamp(1000 + tick * 500), &problems).len();
        }
        assert!((9..=11).contains(&lines), "{lines} lines in ten minutes");
    }

    /// As while a host swaps.
    #[test]
    fn a_warning_whose_figures_vary_is_said_once_a_minute_at_most_and_another_at_once() {
        let mut limiter = LogLimiter::default();
        let mut lines = Vec::new();
        for tick in 0..1200u64 {
            let mut all = vec![format!("tasks stall, swapping out {}.1 MiB/s", tick % 97)];
            if tick % 7 == 0 {
                all.clear();
            }
            if tick >= 600 {
                all.push("floors of 2 GiB exceed the host".into());
            }
            lines.extend(limiter.warnings(Stamp(1000 + tick * 500), all));
        }
        let of = |what: &str| lines.iter().filter(|l| l.starts_with(what)).count();
        assert!((9..=11).contains(&of("tasks stall")), "{lines:?}");
        assert_eq!(of("floors"), 1);
    }

    /// As while libvirt saves, migrates or dumps a domain for minutes.
    #[test]
    fn an_order_that_fails_in_each_tick_is_said_now_and_then_and_one_that_is_done_each_time() {
        let order = |pid, from, error: Option<&str>| {
            let mut d = Decision { error: error.map(Into::into), ..Decision::default() };
            d.action.vm = VmId { pid, start: 1 };
            d.action.from = ebb_core::units::Bytes::mib(from);
            d
        };
        let mut limiter = LogLimiter::default();
        let mut lines = 0;
        for tick in 0..1500u64 {
            let busy = order(1, 100 + tick % 3, Some("balloon: libvirt has a job on the domain"));
            // Not each tick gives the order.
            let orders = if tick % 4 == 0 { Vec::new() } else { vec![busy] };
            lines += limiter.orders(Stamp(tick * 200), &orders).len();
        }
        assert!((1..=5).contains(&lines), "{lines} lines in five minutes");
        let mut count = |orders: &[Decision]| limiter.orders(Stamp(301_000), orders).len();
        assert_eq!(count(&[order(1, 1, None), order(2, 1, Some("refused"))]), 2);
        assert_eq!(count(&[order(1, 1, None), order(2, 1, Some("refused"))]), 1);
        assert_eq!(count(&[order(3, 1, Some(DRY_RUN)), order(3, 1, Some(DRY_RUN))]), 2);
    }

    #[test]
    fn what_lasts_is_said_once_and_what_is_new_at_once() {
        let mut limiter = LogLimiter::default();
        let (a, b) = (problem(1, "qmp", "not answered in 200 ms"), problem(2, "qmp", "x"));
        let mut count = |at: u64, problems: &[Problem]| limiter.news(Stamp(at), problems).len();
        assert_eq!(count(0, std::slice::from_ref(&a)), 1);
        assert_eq!(count(500, &[a.clone(), b.clone()]), 1, "of another VM");
        assert_eq!(count(1_000, &[a.clone(), problem(1, "/proc/1/status", "no")]), 1, "source");
        for at in 2..2000 {
            assert_eq!(count(at * 500, std::slice::from_ref(&a)), 0, "it goes on");
        }
        assert_eq!(count(1_000_500, &[]), 0);
        assert_eq!(count(1_001_000, &[a]), 1, "it was gone");
    }
}
