//! `paused`: a guest frees memory and its VM is stopped before anybody took it; how
//! much of it comes back while it stands still.
//!
//! Metric `returned`: share of what was freed, by the host's memory cgroup (with
//! `_thp`, `_memfd`: what is behind the guest's RAM). Arms: `ebb-guest` (`ebb
//! reclaim`'s request), `reporting`, `balloon` (ordered to take as much).

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::units::Bytes;

use super::place::{self, MINUTE, Memory, Place};
use super::recycle::target;
use super::trial::Trial;
use crate::arena::Arena;
use crate::result::Outcome;
use crate::vm::Balloon;

/// All arms.
pub const ARMS: [&str; 3] = ["ebb-guest", "reporting", "balloon"];
/// What an arm has to show for itself.
const TIME: Duration = Duration::from_secs(10);

/// Runs it.
pub fn run(trial: &Trial, outcome: &mut Outcome) -> Result<()> {
    let arena = place::arena()?;
    for memory in Memory::ALL {
        for arm in ARMS.iter().filter(|a| trial.wants(a)) {
            // The others do nothing either way: once is enough.
            if *arm == "ebb-guest" || memory == Memory::Small {
                one(trial, &arena, memory, arm, outcome)?;
            }
        }
        let metric = format!("returned{}", memory.suffix());
        if let Some(v) = outcome.value("ebb-guest", &metric) {
            target(&metric, v, ">=", 0.95);
        }
    }
    Ok(())
}

fn one(
    trial: &Trial,
    arena: &Arena,
    memory: Memory,
    arm: &str,
    outcome: &mut Outcome,
) -> Result<()> {
    let size = trial.size(256);
    let place = Place::boot(arena, trial.kernel, memory, arm == "ebb-guest", |c| {
        c.balloon = Some(Balloon { reporting: arm == "reporting", deflate_on_oom: false });
    })?;
    let daemon = match arm {
        "ebb-guest" => {
            place.insmod()?;
            Some(place.daemon()?)
        }
        _ => None,
    };
    let (mut shares, mut times) = (Vec::new(), Vec::new());
    for _ in 0..trial.rounds(3) {
        match &daemon {
            Some(daemon) => daemon.wait_for("calm", 2 * MINUTE, |s| {
                (s["vms"][0]["agent"]["held"].as_u64()? < 24 << 20).then_some(())
            })?,
            None => place.calm()?,
        }
        place.start("h", "hold", &format!("size={}", size.0))?;
        let full = place.usage();
        place.stop("h")?;
        // The module takes its second look at large frees every 100 ms of the
        // guest's own time, which stands still from the stop on.
        std::thread::sleep(place.vm.tool().patient(Duration::from_millis(150)));
        let before = full - place.usage();
        place.vm.pause()?;
        let begun = Instant::now();
        match (&daemon, arm) {
            (Some(daemon), _) => daemon.reclaim()?,
            (None, "balloon") => place.vm.set_balloon(place.vm.memory() - size)?,
            _ => {}
        }
        let fall = place::watch(place.cgroup(), begun, full - before, size, TIME);
        println!(
            "  {arm}, {}: {} had gone before the stop, {} of {size} came back after it",
            memory.name(),
            before,
            fall.back()
        );
        shares.push(fall.share());
        times.extend(fall.time_to(0.95).map(|t| t.as_secs_f64()));
        place.vm.resume()?;
        place.vm.request("ping", MINUTE).context("the guest does not go on")?;
        if arm == "balloon" {
            place.vm.set_balloon(place.vm.memory())?;
            let full =
                |vm: &crate::vm::Vm| vm.balloon().is_ok_and(|b| b >= vm.memory() - Bytes::mib(1));
            place.vm.wait_for("its memory", MINUTE, |vm| full(vm).then_some(()))?;
        }
    }
    let suffix = memory.suffix();
    outcome.add_median(arm, &format!("returned{suffix}"), "fraction", &shares);
    outcome.add_median(arm, &format!("free_to_host_95{suffix}"), "seconds", &times);
    if let Some(daemon) = daemon {
        daemon.stop();
    }
    Ok(())
}
