//! Scale: many guests on a host, many hosts at once, and what a tick costs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ebb_core::units::Bytes;
use ebb_sim::compare::in_parallel;
use ebb_sim::controllers::{RunResult, ebb};
use ebb_sim::law::Breach;
use ebb_sim::scenario::crowd;
use ebb_sim::{Controller, Score, Setup};
use serde::Serialize;

use super::{emit, emit_json, threads};

/// One in so many guests is not ideal.
const ODD_ONE_IN: u32 = 10;

/// Settings of a run on one host.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// How many guests.
    pub vms: u32,
    pub ram: Bytes,
    /// The host's memory.
    pub host: Bytes,
    pub seed: u64,
    pub seconds: u64,
}

impl Run {
    fn setup(&self) -> Setup {
        let setup = crowd(self.vms, self.ram, self.host, self.seed, ODD_ONE_IN);
        Setup { run_ms: self.seconds * 1000, ..setup }
    }
}

/// Settings of a run on many hosts.
#[derive(Clone, Debug, Serialize)]
pub struct Hosts {
    /// How many.
    pub hosts: u32,
    /// Each of them; the seed is the first one's.
    pub each: Run,
}

#[derive(Serialize)]
struct ScaleResult {
    run: Run,
    with_ebb: Score,
    laws_broken: Vec<Breach>,
    without: Score,
    ticks: usize,
    tick_mean_ms: f64,
    tick_p99_ms: f64,
    tick_max_ms: f64,
}

/// Simulates with and without Ebb, tells what became of both, and what a tick costs.
pub fn run(run: &Run, json: bool) -> Result<()> {
    let setup = run.setup();
    let mut cost = Vec::new();
    let RunResult { score: with_ebb, broken: laws_broken } = ebb(&setup, |_, tick| cost.push(tick));
    let without = Controller::None.run(&setup).score;
    cost.sort();
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let mean = cost.iter().sum::<Duration>() / cost.len().max(1) as u32;
    let result = ScaleResult {
        run: run.clone(),
        ticks: cost.len(),
        tick_mean_ms: ms(mean),
        tick_p99_ms: ms(cost.get(cost.len() * 99 / 100).copied().unwrap_or_default()),
        tick_max_ms: ms(cost.last().copied().unwrap_or_default()),
        with_ebb,
        laws_broken,
        without,
    };
    if json {
        emit_json(&result)?;
    } else {
        emit(&text(&result))?;
    }
    match result.laws_broken.first() {
        None => Ok(()),
        Some(law) => bail!("{} laws broken, the first: {law}", result.laws_broken.len()),
    }
}

fn text(r: &ScaleResult) -> String {
    let s = &r.run;
    let mut out = format!(
        "synthetic guests (a stand-in: no claim about real ones): {} × {} on {}, {} s, seed {}\n\
         {:<28} {:>14} {:>14}\n",
        s.vms, s.ram, s.host, s.seconds, s.seed, "", "ebb", "nothing"
    );
    let mut row = |name: &str, get: &dyn Fn(&Score) -> String| {
        out += &format!("{name:<28} {:>14} {:>14}\n", get(&r.with_ebb), get(&r.without));
    };
    row("guests held at no harm", &|x| x.held.to_string());
    row("guests waited for memory", &|x| format!("{:.0} s", x.stall_s));
    row("killed for lack of memory", &|x| x.ooms.to_string());
    row("swapped", &|x| x.swapped.to_string());
    row("orders", &|x| x.orders.to_string());
    row("reversals a guest, minute", &|x| format!("{:.2}", x.reversals));
    out + &format!(
        "{:<28} {:>14}\n{:<28} mean {:.3} ms, p99 {:.3} ms, most {:.3} ms over {} ticks\n",
        "laws broken",
        r.laws_broken.len(),
        "a tick costs",
        r.tick_mean_ms,
        r.tick_p99_ms,
        r.tick_max_ms,
        r.ticks
    )
}

#[derive(Serialize)]
struct Fleet {
    hosts: Hosts,
    threads: usize,
    seconds: f64,
    resident_peak: Bytes,
    held: u64,
    vms: u64,
    stall_s: f64,
    ooms: u64,
    laws_broken: usize,
}

/// What this process holds.
fn resident() -> Bytes {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    Bytes::kib(kib.unwrap_or(0))
}

/// Many hosts, each with the next seed, on all threads.
pub fn hosts(hosts: &Hosts, json: bool) -> Result<()> {
    let seeds: Vec<u64> = (0..u64::from(hosts.hosts)).map(|i| hosts.each.seed + i).collect();
    let peak = AtomicU64::new(0);
    let started = Instant::now();
    let outcomes = in_parallel(&seeds, threads(), |seed| {
        let outcome = Controller::Ebb.run(&Run { seed: *seed, ..hosts.each.clone() }.setup());
        peak.fetch_max(resident().0, Ordering::Relaxed);
        outcome
    });
    let broken = || outcomes.iter().flat_map(|o| &o.broken);
    let fleet = Fleet {
        hosts: hosts.clone(),
        threads: threads(),
        seconds: started.elapsed().as_secs_f64(),
        resident_peak: Bytes(peak.into_inner()),
        held: outcomes.iter().map(|o| o.score.held).sum(),
        vms: outcomes.iter().map(|o| o.score.vms).sum(),
        stall_s: outcomes.iter().map(|o| o.score.stall_s).sum(),
        ooms: outcomes.iter().map(|o| o.score.ooms).sum(),
        laws_broken: broken().count(),
    };
    if json {
        emit_json(&fleet)?;
    } else {
        let (h, e) = (hosts.hosts, &hosts.each);
        emit(&format!(
            "{h} hosts of {}, {} × {} on each, {} s: {:.1} s on {} threads, {} of memory\n\
             {} of {} guests held at no harm, {:.0} s of stall, {} killed, {} laws broken\n",
            e.host,
            e.vms,
            e.ram,
            e.seconds,
            fleet.seconds,
            fleet.threads,
            fleet.resident_peak,
            fleet.held,
            fleet.vms,
            fleet.stall_s,
            fleet.ooms,
            fleet.laws_broken
        ))?;
    }
    match broken().next() {
        None => Ok(()),
        Some(law) => bail!("{} laws broken, the first: {law}", fleet.laws_broken),
    }
}
