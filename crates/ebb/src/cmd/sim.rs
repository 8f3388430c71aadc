//! `ebb sim`: the daemon's loop on synthetic guests, for scale and laws.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ebb_core::config::Config;
use ebb_core::tick::{Engine, Host, Wake};
use ebb_core::units::Bytes;
use ebb_sim::{Report, Scenario, World};
use serde::Serialize;

use crate::table::{emit, emit_json};

/// Settings of a run.
pub struct Run {
    /// How many guests.
    pub vms: u32,
    /// RAM of each.
    pub ram: Bytes,
    /// The host's memory.
    pub host: Bytes,
    /// Seed.
    pub seed: u64,
    /// Simulated seconds.
    pub seconds: u64,
}

#[derive(Serialize)]
struct Outcome {
    scenario: Scenario,
    with_ebb: Report,
    without: Report,
    ticks: usize,
    tick_mean_ms: f64,
    tick_p99_ms: f64,
    tick_max_ms: f64,
}

/// Simulates with and without Ebb, tells what became of both, and what a tick
/// costs (observe, model, decide, learn; sampling is the simulator's).
pub fn main(run: &Run, json: bool) -> Result<()> {
    let scenario =
        Scenario { vms: run.vms, ram: run.ram, host: run.host, seed: run.seed, odd_one_in: 10 };
    let (with_ebb, mut cost) = simulate(&scenario, run.seconds, false);
    let (without, _) = simulate(&scenario, run.seconds, true);
    cost.sort();
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    let mean = cost.iter().sum::<Duration>() / cost.len().max(1) as u32;
    let result = Outcome {
        scenario,
        ticks: cost.len(),
        tick_mean_ms: ms(mean),
        tick_p99_ms: ms(cost.get(cost.len() * 99 / 100).copied().unwrap_or_default()),
        tick_max_ms: ms(cost.last().copied().unwrap_or_default()),
        with_ebb,
        without,
    };
    if json {
        emit_json(&result)?;
    } else {
        emit(&text(&result))?;
    }
    match result.with_ebb.broken.first() {
        None => Ok(()),
        Some(law) => bail!("{} laws broken, the first: {law}", result.with_ebb.broken.len()),
    }
}

fn simulate(scenario: &Scenario, seconds: u64, dry_run: bool) -> (Report, Vec<Duration>) {
    let config = Config::default();
    let mut world = World::new(scenario, &config);
    world.run_for(seconds * 1000);
    let mut engine = Engine::new(config, dry_run);
    let mut cost = Vec::new();
    loop {
        let outside = world.outside;
        let started = Instant::now();
        let (_, model) = engine.step(&mut world);
        cost.push(started.elapsed().saturating_sub(world.outside - outside));
        if world.wait(engine.next(&model)) == Wake::Stop {
            return (world.finish(), cost);
        }
    }
}

fn text(r: &Outcome) -> String {
    let s = &r.scenario;
    let mut out = format!(
        "synthetic guests (a stand-in: no claim about real ones): {} × {} on {}, {} s, seed {}\n\
         {:<28} {:>14} {:>14}\n",
        s.vms,
        s.ram,
        s.host,
        r.with_ebb.ms / 1000,
        s.seed,
        "",
        "ebb",
        "nothing"
    );
    let mut row = |name: &str, get: &dyn Fn(&Report) -> String| {
        out += &format!("{name:<28} {:>14} {:>14}\n", get(&r.with_ebb), get(&r.without));
    };
    row("swapped", &|x| x.swapped.to_string());
    row("peak in use", &|x| x.used_peak.to_string());
    row("guests waited for memory", &|x| format!("{} s", x.guest_stall_ms / 1000));
    row("guests out of memory", &|x| x.ooms.to_string());
    row("orders", &|x| x.orders.to_string());
    row("reversals a guest, minute", &|x| format!("{:.2}", x.reversals));
    row("laws broken", &|x| x.broken.len().to_string());
    out + &format!(
        "{:<28} mean {:.3} ms, p99 {:.3} ms, most {:.3} ms over {} ticks\n",
        "a tick costs", r.tick_mean_ms, r.tick_p99_ms, r.tick_max_ms, r.ticks
    )
}
