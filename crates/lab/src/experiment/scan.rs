//! `scan`: how fast the page scanner is, beside the raw limit of the same machine.
//!
//! A paused VM full of noise is scanned whole with one thread and with two; in turns
//! with that the same bytes are hashed where they lie in this process (arm `raw`):
//! what no scanner that hashes can beat. `rate` is bytes by the clock with one thread,
//! `rate_two` with two, `scaling` their ratio; `rate_cpu` is bytes by a second of
//! processor time of all threads, counting included.
//! In arm `ebb-guest` the agents hash; there are two VMs then, and two threads read one
//! each, since an agent has one thread. Arm `ebb-lines` is the same as the daemon does it: four
//! lines of each page first, and whole only what has a duplicate by those, of which noise has
//! none. `look_page` is processor time of one later look
//! at a few pages, for each page that is held.
//! `rescan_page` is processor time a page of a scan that compares with the last one;
//! `metadata` and `metadata_kept` are what the table takes of what was read, and
//! with what a scanner keeps until its next scan.
//! Metrics end with `_thp` where the VM has huge pages, else its pages are of 4 KiB.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ebb_core::sample::VmId;
use ebb_core::units::{Bytes, PAGE};
use ebb_core::wire::Attach;
use ebb_host::agent::Agent;
use ebb_host::probe::process::read_stat;
use ebb_host::root::Root;
use ebb_host::scan::agents::HashLink;
use ebb_host::scan::rate_limit::thread_cpu;
use ebb_host::scan::{Changes, Found, Options, Scan, Scanner, Target, random_key};

use super::cgroup_guest::RamKind;
use super::trial::Trial;
use crate::agent_requests::Requests as _;
use crate::arena::{Arena, ArenaConfig};
use crate::guest_stack;
use crate::result::ExperimentResult;
use crate::vm::{Vm, VmConfig};

pub const ARMS: [&str; 4] = ["raw", "ebb-stock", "ebb-guest", "ebb-lines"];
const MINUTE: Duration = Duration::from_secs(60);
/// What a guest takes beside what it holds.
const OWN: Bytes = Bytes::mib(192);

#[derive(Clone, Copy, Debug)]
struct Pass {
    bytes: f64,
    clock_s: f64,
    cpu_s: f64,
}

impl Pass {
    fn rate(&self) -> f64 {
        self.bytes / self.clock_s
    }
}

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let _arena = Arena::enter(&ArenaConfig::default())?;
    for memory in [RamKind::Small, RamKind::Huge] {
        let suffix = memory.suffix();
        let dir = tempfile::tempdir()?;
        let guest = trial.wants("ebb-guest") || trial.wants("ebb-lines");
        let vms: Vec<Held> = (0..if guest { 2 } else { 1 })
            .map(|n| Held::boot(trial, memory, n, guest.then_some(dir.path())))
            .collect::<Result<_>>()?;
        let targets: Vec<Target> =
            vms.iter().map(|held| target(&held.vm)).collect::<Result<_>>()?;
        let agents = vms.iter().zip(&targets).filter_map(|(vm, t)| {
            let (_, link) = vm.agent.as_ref()?;
            Some((t.id, Arc::clone(link)))
        });
        let agents: HashMap<VmId, Arc<HashLink>> = agents.collect();
        let noise = trial.wants("raw").then(|| noise(&mut 1, trial.size(1024)));
        let mut raw = [Vec::new(), Vec::new()];
        let mut own = [Vec::new(), Vec::new()];
        let mut theirs = [Vec::new(), Vec::new()];
        let mut lines = [Vec::new(), Vec::new()];
        for _ in 0..trial.rounds(7) {
            for (i, threads) in [1, 2].into_iter().enumerate() {
                if let Some(noise) = &noise {
                    raw[i].push(hash(noise, threads)?);
                }
                let scanner = &mut Scanner::new(Root::default())?;
                if trial.wants("ebb-stock") {
                    own[i].push(scanner.scan(&targets[..1], &whole(threads, Changes::Ignore)));
                }
                scanner.use_agents(agents.clone());
                let arms = [
                    ("ebb-guest", &mut theirs[i], whole(threads, Changes::Ignore)),
                    ("ebb-lines", &mut lines[i], by_lines(threads, Changes::Note)),
                ];
                for (_, done, options) in arms.into_iter().filter(|a| trial.wants(a.0)) {
                    let scan = scanner.scan(&targets[..threads], &options);
                    let (by, all) = (scan.by_agents, scan.read);
                    let why = agents.values().find_map(|a| a.failure());
                    ensure!(by >= all.share(0.9), "agents hash {by} of {all}: {why:?}");
                    done.push(scan);
                }
            }
        }
        let passes = |scans: &[Scan]| scans.iter().map(pass).collect::<Vec<_>>();
        rates(outcome, "raw", suffix, &raw[0], &raw[1]);
        let none = HashMap::new();
        for (arm, scans, agents) in [
            ("ebb-stock", &own, &none),
            ("ebb-guest", &theirs, &agents),
            ("ebb-lines", &lines, &agents),
        ] {
            if trial.wants(arm) {
                rates(outcome, arm, suffix, &passes(&scans[0]), &passes(&scans[1]));
                details(trial, outcome, (arm, suffix), &scans[0], &targets[..1], agents)?;
                verdict(outcome, arm, memory);
            }
        }
    }
    Ok(())
}

/// A VM that stands still, full of noise.
struct Held {
    vm: Vm,
    agent: Option<(Agent, Arc<HashLink>)>,
}

impl Held {
    /// With agent and module where there is a place for its socket.
    fn boot(trial: &Trial, memory: RamKind, n: usize, agent: Option<&Path>) -> Result<Held> {
        let size = trial.size(1024);
        let name = format!("scan{n}-{}", std::process::id());
        let mut config = VmConfig::new(name, OWN + Bytes(size.0 / 16 * 17).floor_mib());
        config.kernel = trial.kernel;
        config.small_pages = memory == RamKind::Small;
        let socket = agent.map(|dir| guest_stack::prepare(&mut config, dir)).transpose()?;
        let vm = guest_stack::boot(&[config])?.remove(0);
        let hold = format!("size={} seed={n}", size.0);
        vm.ask(|tool| tool.start_ready("h", "hold", &hold, 5 * MINUTE))?;
        vm.pause()?;
        let hashes = |socket: PathBuf| -> Result<(Agent, Arc<HashLink>)> {
            let mut agent = Agent::connect(socket)?;
            let attach = Attach { running: false, ..guest_stack::attachment(&vm)? };
            agent.attach(attach.clone(), None, MINUTE)?;
            let link = agent.hashes(&attach.segments, MINUTE)?;
            Ok((agent, Arc::new(link)))
        };
        let agent = socket.map(hashes).transpose()?;
        Ok(Held { vm, agent })
    }
}

/// What a scan of a VM reads.
pub(super) fn target(vm: &Vm) -> Result<Target> {
    let root = Root::default();
    let start = read_stat(&root, vm.pid)?.context("the VM has ended")?.start;
    let id = VmId { pid: vm.pid, start };
    let found = Found::look(&root, id, &vm.name, "lab")?.context("the VM has ended")?;
    found.target.context("a VM without RAM")
}

fn whole(threads: usize, changes: Changes) -> Options {
    Options { threads: Some(threads), hurry: true, changes, ..Options::default() }
}

fn by_lines(threads: usize, changes: Changes) -> Options {
    Options { filter: true, ..whole(threads, changes) }
}

fn pass(scan: &Scan) -> Pass {
    Pass {
        bytes: scan.read.0 as f64,
        clock_s: scan.time.as_secs_f64(),
        cpu_s: scan.cpu.as_secs_f64(),
    }
}

/// `size` bytes of noise: nothing compresses it, and no page is like another. `x` is the
/// generator's state, before and after.
pub(super) fn noise(x: &mut u64, size: Bytes) -> Vec<u8> {
    let words = (0..size.0 / 8).flat_map(|_| {
        // xorshift64
        *x ^= *x << 13;
        *x ^= *x >> 7;
        *x ^= *x << 17;
        x.to_ne_bytes()
    });
    words.collect()
}

/// Every page of it, in this process.
fn hash(bytes: &[u8], threads: usize) -> Result<Pass> {
    let key = random_key()?;
    let begun = Instant::now();
    let part = bytes.len() / threads / PAGE as usize * PAGE as usize;
    let cpu: Duration = std::thread::scope(|s| {
        let started: Vec<_> = bytes
            .chunks_exact(part)
            .map(|part| {
                let key = &key;
                s.spawn(move || {
                    let pages = part.chunks_exact(PAGE as usize);
                    let sum = pages.fold(0, |sum, page| sum ^ key.page(page).unwrap_or(0));
                    std::hint::black_box(sum);
                    thread_cpu()
                })
            })
            .collect();
        started.into_iter().map(|t| t.join().unwrap_or_default()).sum()
    });
    let clock_s = begun.elapsed().as_secs_f64();
    Ok(Pass { bytes: (part * threads) as f64, clock_s, cpu_s: cpu.as_secs_f64() })
}

fn rates(outcome: &mut ExperimentResult, arm: &str, suffix: &str, one: &[Pass], two: &[Pass]) {
    let all = |passes: &[Pass], f: fn(&Pass) -> f64| passes.iter().map(f).collect::<Vec<_>>();
    let mut add = |metric: &str, unit: &str, values: &[f64]| {
        outcome.add_median(arm, &format!("{metric}{suffix}"), unit, values);
    };
    add("rate", "bytes_per_second", &all(one, Pass::rate));
    add("rate_cpu", "bytes_per_second", &all(one, |p| p.bytes / p.cpu_s));
    add("rate_two", "bytes_per_second", &all(two, Pass::rate));
    let ratio = |(one, two): (&Pass, &Pass)| two.rate() / one.rate();
    add("scaling", "fraction", &one.iter().zip(two).map(ratio).collect::<Vec<_>>());
}

fn details(
    trial: &Trial,
    outcome: &mut ExperimentResult,
    (arm, suffix): (&str, &str),
    scans: &[Scan],
    targets: &[Target],
    agents: &HashMap<VmId, Arc<HashLink>>,
) -> Result<()> {
    let of_read = |s: &Scan, b: Bytes| b.0 as f64 / s.read.0 as f64;
    let mut scanner = Scanner::new(Root::default())?;
    scanner.use_agents(agents.clone());
    // What an arm compares with its last scan.
    let kind = match arm {
        "ebb-lines" => by_lines(1, Changes::Note),
        _ => whole(1, Changes::Note),
    };
    let first = scanner.scan(targets, &kind);
    let held = (first.read.0 / PAGE) as f64;
    let (mut again, mut looks) = (Vec::new(), Vec::new());
    for salt in 1..=trial.rounds(5) as u64 {
        let s = scanner.scan(targets, &kind);
        again.push(s.cpu.as_secs_f64() / held);
        let look = Options { one_in: 256, salt, changes: Changes::SpotCheck, ..kind.clone() };
        let look = scanner.scan(targets, &look);
        let changed: u64 = look.vms.iter().map(|v| v.pages.changed).sum();
        ensure!(look.read > Bytes::ZERO && changed == 0, "{changed} pages of a paused VM changed");
        looks.push(look.cpu.as_secs_f64() / held);
    }
    let mut add = |metric: &str, unit: &str, values: &[f64]| {
        outcome.add_median(arm, &format!("{metric}{suffix}"), unit, values);
    };
    add("rescan_page", "seconds", &again);
    add("look_page", "seconds", &looks);
    add("metadata", "fraction", &scans.iter().map(|s| of_read(s, s.table)).collect::<Vec<_>>());
    // Of each page 32 bits are kept.
    let kept: u64 = targets.iter().flat_map(|t| &t.ram).map(|r| r.len / PAGE * 4).sum();
    add("metadata_kept", "fraction", &[of_read(&first, first.table + Bytes(kept))]);
    Ok(())
}

fn verdict(outcome: &ExperimentResult, arm: &str, memory: RamKind) {
    let value =
        |arm: &str, metric: &str| outcome.value(arm, &format!("{metric}{}", memory.suffix()));
    for metric in ["rate", "rate_cpu", "rate_two"] {
        if let (Some(own), Some(raw)) = (value(arm, metric), value("raw", metric)) {
            println!(
                "  {}: {arm}: {metric} is {:.0} % of raw hashing",
                memory.name(),
                own / raw * 100.0
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_noise_is_hashed_whatever_the_threads() {
        let noise = noise(&mut 1, Bytes::mib(1));
        assert_eq!(noise.len(), 1 << 20);
        for threads in [1, 2] {
            let pass = hash(&noise, threads).unwrap();
            assert_eq!(pass.bytes as usize, 1 << 20);
            assert!(pass.cpu_s > 0.0 && pass.clock_s > 0.0);
        }
    }
}
