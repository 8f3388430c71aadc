//! `paused`: a guest frees memory and its VM is stopped before anybody took it; how
//! much of it comes back while it stands still.
//!
//! Metric `returned`: share of what was freed, by the host's memory cgroup (with
//! `_thp`, `_memfd`: what is behind the guest's RAM), and `free_to_host_95`, from the
//! request on. Arms: `ebb-guest` (the agent is asked for everything; nobody has asked
//! it before the stop), `reporting`, `balloon` (ordered to take as much).

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::units::Bytes;

use super::cgroup_guest::{self, Bench, MINUTE, RamKind};
use super::trial::Trial;
use crate::result::ExperimentResult;
use crate::vm::{Balloon, Vm};

pub const ARMS: [&str; 3] = ["ebb-guest", "reporting", "balloon"];
/// Guests run at a fraction of their speed under emulation; reporting waits 2 s.
const LOOKED: Duration = Duration::from_millis(600);
/// What an arm has to show for itself.
const TIME: Duration = Duration::from_secs(10);

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let mut bench = Bench::new(trial, outcome)?;
    for memory in RamKind::ALL {
        for arm in ARMS.iter().filter(|a| trial.wants(a)) {
            // The others do nothing either way: once is enough.
            if *arm == "ebb-guest" || memory == RamKind::Small {
                one(&mut bench, memory, arm)?;
            }
        }
        let metric = format!("returned{}", memory.suffix());
        bench.outcome.target("ebb-guest", &metric, ">=", 0.95);
    }
    Ok(())
}

fn one(bench: &mut Bench<'_>, memory: RamKind, arm: &str) -> Result<()> {
    let size = bench.trial.size(256);
    let ours = arm == "ebb-guest";
    let mut place = bench.boot(memory, ours, |c| {
        c.balloon = Some(Balloon { reporting: arm == "reporting", deflate_on_oom: false });
    })?;
    if ours {
        place.attach()?;
    }
    let (mut shares, mut times) = (Vec::new(), Vec::new());
    for _ in 0..bench.trial.rounds(3) {
        if ours {
            place.settle()?
        } else {
            place.calm()?
        }
        place.start("h", "hold", &format!("size={}", size.0))?;
        place.stop("h")?;
        // The module takes its second look at large frees every 100 ms of the
        // guest's own time, which stands still from the stop on.
        std::thread::sleep(LOOKED);
        place.pause(true)?;
        let full = place.usage();
        if arm == "balloon" {
            place.vm.set_balloon(place.vm.memory - size)?;
        }
        let fall = match ours {
            true => place.recycle_watched(full, size, TIME)?,
            false => cgroup_guest::watch(&place.cgroup, Instant::now(), full, size, TIME),
        };
        let back = full - place.usage();
        println!("  {arm}, {}: {back} of {size} came back", memory.name());
        shares.push(back.fraction_of(size));
        times.extend(fall.time_to(0.95));
        place.pause(false)?;
        place.vm.request("ping", MINUTE).context("the guest does not go on")?;
        if arm == "balloon" {
            // Only now it follows the order; then it gets everything back.
            let whole = place.vm.memory;
            let is = |vm: &Vm, goal: Bytes| vm.balloon().is_ok_and(|b| b == goal);
            place.vm.wait_for("the balloon", 2 * MINUTE, |vm| is(vm, whole - size))?;
            place.vm.set_balloon(whole)?;
            place.vm.wait_for("its memory", 2 * MINUTE, |vm| is(vm, whole))?;
        }
    }
    let suffix = memory.suffix();
    bench.outcome.add_median(arm, &format!("returned{suffix}"), "fraction", &shares);
    bench.outcome.add_median(arm, &format!("free_to_host_95{suffix}"), "seconds", &times);
    Ok(())
}
