//! As many VMs as a large host has, with the limits that a service has by default.

use std::collections::HashMap;

use ebb_core::state::OwnedVm;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::law::breach;
use super::place::*;
use super::*;

/// Programs that call `select` can have no more, so this is what a process starts with.
const SOFT: u64 = 1024;

#[test]
fn vm_two_thousand_vms_are_seen_ballooned_and_given_back_with_the_usual_limits() {
    let Some(place) = Place::new() else { return };
    let _arena = Arena::enter(&ArenaConfig::default()).unwrap();
    let count = set("EBB_VMS").unwrap_or(2000);
    let begun = Instant::now();
    let vms = place.standins(count);
    println!("{count} stand-ins after {:.1} s", begun.elapsed().as_secs_f64());

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(SOFT), ..limit }).unwrap();
    let daemon = place.daemon(USUAL, &vms);
    wait_all_up(&daemon, count);
    cost(&daemon, "at rest");

    // To which size is a matter of the host, which may have something to give back meanwhile.
    let shrunk = || vms.iter().filter(|vm| vm.truth().told < RAM).count();
    let until = Instant::now() + PATIENCE;
    while shrunk() < count {
        let state = daemon.state().unwrap();
        assert!(Instant::now() < until, "{} of {count}, {}", shrunk(), state["daemon"]);
        daemon.reclaim().unwrap();
        wait_ticks(&daemon, 2);
    }
    cost(&daemon, "all ballooned");
    check(&place, &vms);
    assert_eq!(place.owned().vms.len(), count);

    daemon.crash();
    check(&place, &vms);
    let daemon = place.daemon_again();
    wait_all_up(&daemon, count);
    check(&place, &vms);
    let (code, log) = daemon.end();
    let last: Vec<&str> = log.lines().rev().take(5).collect();
    assert_eq!(code, Some(0), "{last:?}");
    for vm in &vms {
        let truth = vm.truth();
        assert_eq!((truth.size, truth.told), (RAM, RAM), "{}", vm.name);
    }
    assert!(place.owned().is_empty());
    setrlimit(Resource::Nofile, limit).unwrap();
    println!("after {:.1} s", begun.elapsed().as_secs_f64());
}

fn wait_all_up(daemon: &Daemon, count: usize) {
    let up = |s: &Value| {
        let vms = s["vms"].as_array().unwrap();
        let known = vms.iter().filter(|v| v["actual"].as_u64() > Some(0));
        known.count() == count
    };
    let state = || daemon.state().unwrap();
    wait_until(|| up(&state()), || format!("{}\n{}", state()["problems"], daemon.log()));
}

/// What is owed by the file, and what was taken.
fn check(place: &Place, vms: &[Standin]) {
    let owned: HashMap<u32, OwnedVm> =
        place.owned().vms.into_iter().map(|vm| (vm.id.pid, vm)).collect();
    for vm in vms {
        let found = breach(&vm.truth(), RAM, owned.get(&vm.pid));
        assert_eq!(found, None, "{}", vm.name);
    }
}

/// What ticks take and cost; told, not judged.
fn cost(daemon: &Daemon, when: &str) {
    let look = || {
        let state = daemon.state().unwrap();
        let of = |key: &str| state["daemon"][key].as_f64().unwrap_or_default();
        (state["tick"].as_u64().unwrap_or_default(), of("cpu_s"), of("tick_ms"), of("resident"))
    };
    let (first, begun) = (look(), Instant::now());
    let mut ticks = Vec::new();
    while look().0 < first.0 + 8 {
        wait_ticks(daemon, 1);
        ticks.push(look().2);
    }
    let (last, s) = (look(), begun.elapsed().as_secs_f64());
    let count = (last.0 - first.0) as f64;
    println!(
        "{when}: ticks of {ticks:?} ms, {:.0} ms CPU a tick, {:.0} % of a core, {:.0} MiB",
        (last.1 - first.1) * 1000.0 / count,
        (last.1 - first.1) / s * 100.0,
        last.3 / MIB as f64,
    );
}
