//! `ebb merge`: what merging equal pages would bring; VMs in and out of it.
//!
//! `report` reads the memory of VMs itself, with or without a daemon, and changes
//! nothing. `on` and `off` ask QEMU and look whether it was done. What a number
//! here means is told in docs/merging.md.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use ebb_core::config::{Config, MergeMode};
use ebb_core::plan::MergeWish;
use ebb_core::policy::merge::{Candidates, Settings};
use ebb_core::sample::{Claim, Ksm, KsmStat};
use ebb_core::state::OwnedMark;
use ebb_core::units::Bytes;
use ebb_host::act::ksm;
use ebb_host::act::vm_mergeable::{self, Done};
use ebb_host::probe::cgroup::{Version, read_hierarchy};
use ebb_host::probe::discovery::{Program, discover, inspect_owed};
use ebb_host::probe::identity::claim;
use ebb_host::probe::ksm::{ksmtuned, read_ksm, read_ksm_stat};
use ebb_host::probe::process::{Life, life};
use ebb_host::probe::qemu::{QemuProcess, QmpAddress};
use ebb_host::qmp::Client;
use ebb_host::root::Root;
use ebb_host::scan::sampling::{Estimate, Sampling, survey};
use ebb_host::scan::{Fate, Found, Limits, Options, Pages, Scanner, Split, Target, VmResult};
use serde::Serialize;

use crate::daemon::trust;
use crate::daemon_client;
use crate::table::{emit, emit_json, signed, table};
use crate::view::State;

/// How long a QMP socket may take to greet.
const QMP: Duration = Duration::from_secs(5);
/// How long the daemon may take to open or close VMs.
const DONE: Duration = Duration::from_secs(20);

/// What to do about merging.
#[derive(Subcommand)]
pub enum What {
    /// Reads VMs' memory and tells what merging would save, and for what CPU time
    Report {
        /// Only these VMs [default: all]
        vm: Vec<String>,
        /// Read all memory, also where a sample finds nothing
        #[arg(long)]
        full: bool,
        /// Threads [default: as many as there are idle cores]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=32))]
        threads: Option<u32>,
        /// Cores that all threads together may use, e.g. 0.5
        #[arg(long)]
        cores: Option<f64>,
        /// Compete with everything else for the CPU [default: run when it is idle]
        #[arg(long)]
        hurry: bool,
        /// The same as JSON
        #[arg(long)]
        json: bool,
    },
    /// Lets KSM look at these VMs: all of one share group, and no other on this host
    On {
        /// The VMs
        #[arg(required = true)]
        vm: Vec<String>,
        /// Also where VMs of another group are open to KSM: their pages will be merged together
        #[arg(long)]
        across_groups: bool,
    },
    /// Takes VMs out of merging and breaks what is merged of them; without a name, of all the host
    Off {
        /// The VMs
        vm: Vec<String>,
    },
}

/// Everything that `ebb merge report --json` says. Sizes are bytes.
#[derive(Debug, Serialize)]
struct Report {
    /// Resident memory of the VMs that KSM could merge.
    held: Bytes,
    /// What merging saves without crossing groups.
    saves: Bytes,
    /// Where it comes from.
    split: Split,
    /// For what was only sampled.
    estimate: Option<Estimate>,
    groups: Vec<GroupReport>,
    vms: Vec<VmReport>,
    cost: Cost,
    scan: ScanReport,
    /// The host's counters; absent where KSM is not built in.
    ksm: Option<Ksm>,
}

#[derive(Debug, Serialize)]
struct GroupReport {
    name: String,
    vms: usize,
    saves: Bytes,
    split: Split,
}

#[derive(Debug, Serialize)]
struct VmReport {
    name: String,
    pid: u32,
    group: String,
    /// Resident memory that KSM could merge.
    held: Bytes,
    /// Of that, marked for KSM.
    mergeable: Bytes,
    saves: Bytes,
    split: Split,
    /// `whole`, `sample` or `not`.
    read: &'static str,
    /// Why it was not, or not all of it can be merged.
    why: Option<String>,
    pages: Pages,
    /// What the kernel says of its merging.
    ksm: Option<VmKsm>,
}

#[derive(Debug, Serialize)]
struct VmKsm {
    /// Mapped pages that are merged.
    merged: Bytes,
    /// Pages of zeros that were replaced.
    zero: Bytes,
    /// Saved less KSM's own, signed.
    profit: Option<i64>,
}

/// CPU seconds of `ksmd`, by cost per page as measured on another machine.
#[derive(Debug, Serialize)]
struct Cost {
    /// If all memory that was read were given to KSM.
    all: f64,
    /// Each further scan of it.
    all_again: f64,
    /// If only those 2 MiB blocks were that pay.
    steered: f64,
    /// Each further scan of them.
    steered_again: f64,
    /// Their share of what was read.
    steered_share: f64,
    /// The share of all that can be merged that lies in them.
    steered_finds: f64,
}

#[derive(Debug, Serialize)]
struct ScanReport {
    seconds: f64,
    /// Of that, pauses because the host was short of memory.
    paused_seconds: f64,
    cpu_seconds: f64,
    threads: usize,
    read: Bytes,
    /// Reading, hashing and counting.
    bytes_per_cpu_second: f64,
    /// The scanner's table.
    table: Bytes,
}

/// Does it; `false` where there was nothing to do.
pub fn main(config: &Config, what: What) -> Result<bool> {
    match what {
        What::Report { vm, full, threads, cores, hurry, json } => {
            if cores.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
                bail!("--cores: a number above 0, such as 0.5");
            }
            let limits = Limits { cores, ..Limits::default() };
            let threads = threads.map(|t| t as usize);
            let options = Options { threads, limits, idle: !hurry, ..Options::default() };
            report(config, &vm, full, &options, json)
        }
        What::On { vm, .. } if steered(config)?.is_some() => tell_daemon(config, &vm, true),
        What::On { vm, across_groups } => on(config, &vm, across_groups),
        What::Off { vm } if vm.is_empty() => off_all(config),
        What::Off { vm } if steered(config)?.is_some() => tell_daemon(config, &vm, false),
        What::Off { vm } => switch(config, &vm, false),
    }
}

/// The state of a daemon that steers KSM, if one does.
fn steered(config: &Config) -> Result<Option<State>> {
    if !daemon_client::is_up(&config.socket) {
        return Ok(None);
    }
    let state: State = daemon_client::get_json(&config.socket, "/v1/state")?;
    let steers = state.host.merge.as_ref().is_some_and(|m| m.mode == MergeMode::On);
    Ok((steers && !state.daemon.dry_run).then_some(state))
}

/// Has the daemon do it, which would undo what others do, and waits.
fn tell_daemon(config: &Config, names: &[String], on: bool) -> Result<bool> {
    let Some(state) = steered(config)? else { bail!("the daemon has ended meanwhile") };
    let mut changed = false;
    for name in names {
        changed |=
            super::explain::find(&state, name)?.merge.as_ref().and_then(|m| m.open) != Some(on);
        let wish = MergeWish { vm: Some(name.clone()), on };
        daemon_client::post(&config.socket, "/v1/merge", &serde_json::to_string(&wish)?)?;
    }
    let until = Instant::now() + DONE;
    loop {
        let Some(state) = steered(config)? else { bail!("the daemon has ended meanwhile") };
        let part = |name: &String| state.vms.iter().find(|v| v.name == *name)?.merge.as_ref();
        let left: Vec<&String> =
            names.iter().filter(|n| part(n).is_some_and(|m| m.open != Some(on))).collect();
        if left.is_empty() {
            let what = if on { "open to KSM" } else { "out of KSM, nothing of it is merged" };
            emit(&format!("{}: {what}\n", names.join(" ")))?;
            return Ok(changed);
        }
        if Instant::now() > until {
            let why = left.iter().map(|name| {
                let error = part(name).and_then(|m| m.error.clone());
                format!("{name}: {}", error.unwrap_or_else(|| "the daemon does not do it".into()))
            });
            let merging = state.host.merge.map(|m| m.why).unwrap_or_default();
            bail!("{} ({merging})", Vec::from_iter(why).join("; "));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Opens to KSM, or closes, what Ebb had closed or opened. What could not be done,
/// and why; a VM that has ended is owed nothing.
pub fn put_back(config: &Config, marks: &[OwnedMark]) -> (Vec<OwnedMark>, Vec<String>) {
    let (root, mut left, mut failed) = (Root::default(), Vec::new(), Vec::new());
    for mark in marks {
        if life(&root, mark.id) == Life::Ended {
            continue;
        }
        let inspected = inspect_owed(&root, mark.id);
        let done = inspected.map_err(anyhow::Error::from).and_then(|found| {
            let found = match found {
                Program::Vm(found) => found,
                Program::Refused(refused) => bail!("not taken for a VM: {}", refused.why),
                Program::Other => bail!("no QEMU"),
            };
            let process = QemuProcess { name: mark.name.clone(), ..*found };
            let mut qmp = connect(config, &process)?;
            Ok(vm_mergeable::set(&root, mark.id, &mut qmp, mark.open)?)
        });
        if let Err(e) = done {
            left.push(mark.clone());
            failed.push(format!("{}: {e:#}", mark.name));
        }
    }
    (left, failed)
}

/// KSM has one domain: it merges whatever is open to it, so one group only may be.
fn on(config: &Config, names: &[String], across_groups: bool) -> Result<bool> {
    let all = look(config, &Root::default(), &[])?;
    let group = |k: &&Known| k.group.clone();
    let wanted = all.iter().filter(|k| names.contains(&k.process.name));
    let groups: BTreeSet<String> = wanted.map(|k| group(&k)).collect();
    let open = |k: &&Known| k.found.as_ref().is_some_and(|f| f.mergeable > Bytes::ZERO);
    let by_name: Vec<&str> = all
        .iter()
        .filter(|k| names.contains(&k.process.name) && !k.group_is_proven)
        .map(|k| k.process.name.as_str())
        .collect();
    if !by_name.is_empty() && !across_groups {
        bail!(
            "{}: of a share group by a name that the VM gives itself. Where there are several \
             groups its section needs user or cgroup; or say --across-groups",
            by_name.join(", ")
        );
    }
    let others: Vec<&str> = all
        .iter()
        .filter(|k| open(k))
        .filter(|k| groups.len() != 1 || !groups.contains(&k.group) || !k.group_is_proven)
        .map(|k| k.process.name.as_str())
        .collect();
    if (groups.len() > 1 || !others.is_empty()) && !across_groups {
        bail!(
            "KSM merges all VMs that are open to it, and a VM can find out what its neighbours \
             hold by how long a write takes. {} of the share groups {:?}{}. Take the others out \
             (`ebb merge off VM`), or say --across-groups",
            names.join(", "),
            groups,
            if others.is_empty() {
                String::new()
            } else {
                format!("; open already: {}", others.join(", "))
            }
        );
    }
    let agents: Vec<&str> = all
        .iter()
        .filter(|k| names.contains(&k.process.name) && k.process.agent.is_some())
        .map(|k| k.process.name.as_str())
        .collect();
    if !agents.is_empty() {
        bail!(
            "{}: their RAM is recycled page by page, and what KSM merges loses the protection that \
             recycling relies on; the agent would close it again",
            agents.join(", ")
        );
    }
    switch(config, names, true)
}

/// Opens VMs to KSM or takes them out, and says what came of each.
fn switch(config: &Config, names: &[String], on: bool) -> Result<bool> {
    let root = Root::default();
    let (mut changed, mut failed) = (false, Vec::new());
    for known in look(config, &root, names)? {
        let name = &known.process.name;
        match connect(config, &known.process)
            .and_then(|mut qmp| Ok(vm_mergeable::set(&root, known.process.id, &mut qmp, on)?))
        {
            Ok(Done::Already) => emit(&format!("{name}: it was so already\n"))?,
            Ok(done) => {
                changed = true;
                let how = if done == Done::Inverted { " (this QEMU has it inverted)" } else { "" };
                let what = if on { "open to KSM" } else { "out of KSM, nothing of it is merged" };
                emit(&format!("{name}: {what}{how}\n"))?;
            }
            Err(e) => failed.push(format!("{name}: {e:#}")),
        }
    }
    if failed.is_empty() { Ok(changed) } else { bail!("{}", failed.join("; ")) }
}

/// The VM's QMP socket, where one is free: a socket serves one client.
fn connect(config: &Config, process: &QemuProcess) -> Result<Client> {
    let paths = match (&config.settings(&process.given, process.uuid.as_deref()).qmp, &process.qmp)
    {
        (Some(path), _) => vec![path.into()],
        (None, QmpAddress::Paths(paths)) => paths.clone(),
        (None, QmpAddress::None { why }) => bail!("{why}"),
    };
    let mut last = None;
    for path in paths {
        match Client::connect(path, QMP) {
            Ok(client) if client.peer_pid().is_none_or(|p| p == process.id.pid) => {
                return Ok(client);
            }
            Ok(client) => {
                last = Some(format!("{}: served by another process", client.path().display()))
            }
            Err(e) => last = Some(e.to_string()),
        }
    }
    bail!("{}", last.unwrap_or_else(|| "it has no QMP socket".into()))
}

/// Stops KSM and breaks all merges.
fn off_all(config: &Config) -> Result<bool> {
    let root = Root::default();
    if steered(config)?.is_some() {
        let wish = MergeWish { vm: None, on: false };
        daemon_client::post(&config.socket, "/v1/merge", &serde_json::to_string(&wish)?)?;
        emit("the daemon merges nothing until `ebb merge on VM` or its restart\n")?;
    }
    if let Some(pid) = ksmtuned(&root) {
        emit(&format!(
            "ksmtuned (process {pid}) sets KSM too, and will start it again: systemctl stop ksmtuned\n"
        ))?;
    }
    let begun = Instant::now();
    let freed = ksm::unmerge(&root)?;
    let seconds = begun.elapsed().as_secs_f64();
    emit(&format!(
        "KSM is stopped; {freed} that were merged are private again ({seconds:.1} s)\n"
    ))?;
    Ok(freed > Bytes::ZERO)
}

/// A VM before it is scanned.
struct Known {
    process: QemuProcess,
    group: String,
    group_is_proven: bool,
    found: Option<Found>,
    stat: Option<KsmStat>,
    why: Option<String>,
}

fn report(
    config: &Config,
    names: &[String],
    full: bool,
    options: &Options,
    json: bool,
) -> Result<bool> {
    let root = Root::default();
    let known = look(config, &root, names)?;
    if known.is_empty() {
        emit("no VMs: no QEMU process was found\n")?;
        return Ok(false);
    }
    let mut scanner = Scanner::new(root.clone()).context("cannot read random bytes")?;
    let targets: Vec<Target> =
        known.iter().filter_map(|k| k.found.as_ref()?.target.clone()).collect();
    let held = known.iter().filter_map(|k| Some(k.found.as_ref()?.held())).sum();
    let survey = survey(&mut scanner, &targets, held, full, options);
    let report = tell(&known, &survey, read_ksm(&root)?);
    if json {
        emit_json(&report)?;
    } else {
        emit(&text(&report))?;
    }
    Ok(true)
}

/// The VMs that the configuration and the command line mean.
fn look(config: &Config, root: &Root, names: &[String]) -> Result<Vec<Known>> {
    let mut processes = discover(root, &trust(config))?.found;
    if config.listed_only {
        processes.retain(|p| config.section(&p.given, p.uuid.as_deref()).is_some());
    }
    if let Some(unknown) = names.iter().find(|n| processes.iter().all(|p| p.name != **n)) {
        let there: Vec<&str> = processes.iter().map(|p| p.name.as_str()).collect();
        bail!("no VM {unknown}; there are: {}", there.join(" "));
    }
    processes.retain(|p| names.is_empty() || names.contains(&p.name));
    let one_group = config.has_one_group();
    let version = read_hierarchy(root)?.map_or(Version::V2, |h| h.version);
    let one = |process: QemuProcess| {
        let group = config.settings(&process.given, process.uuid.as_deref()).group.clone();
        let claim = claim(root, config, version, &process);
        let group_is_proven = one_group || claim == Claim::Proven;
        let (found, why) = match Found::look(root, process.id, &process.name, &group) {
            Ok(Some(found)) => (Some(found), None),
            Ok(None) => (None, Some("it has ended".to_string())),
            Err(e) => (None, Some(e.to_string())),
        };
        let why = why.or_else(|| refused(found.as_ref()?));
        let stat = read_ksm_stat(root, process.id.pid).ok().flatten();
        Known { process, group, group_is_proven, found, stat, why }
    };
    Ok(processes.into_iter().map(one).collect())
}

fn refused(found: &Found) -> Option<String> {
    let (size, why) = found.refused?;
    Some(format!("{size}: {why}"))
}

fn tell(known: &[Known], survey: &Sampling, ksm: Option<Ksm>) -> Report {
    let scan = &survey.scan;
    let scanned = |k: &Known| {
        let i = scan.vms.iter().position(|v| v.target.id == k.process.id)?;
        Some((&scan.vms[i], survey.whole[i]))
    };
    let vms: Vec<VmReport> = known.iter().map(|k| vm_report(k, scanned(k))).collect();
    Report {
        held: vms.iter().map(|v| v.held).sum(),
        saves: scan.split.allowed(),
        split: scan.split,
        estimate: survey.estimate,
        groups: groups(&vms),
        cost: cost(&scan.vms),
        scan: ScanReport {
            seconds: scan.time.as_secs_f64(),
            paused_seconds: scan.paused.as_secs_f64(),
            cpu_seconds: scan.cpu.as_secs_f64(),
            threads: scan.threads,
            read: scan.read,
            bytes_per_cpu_second: scan.read.0 as f64 / scan.cpu.as_secs_f64().max(1e-9),
            table: scan.table,
        },
        ksm,
        vms,
    }
}

fn vm_report(k: &Known, scanned: Option<(&VmResult, bool)>) -> VmReport {
    let found = k.found.as_ref();
    let mut why = k.why.clone();
    let mut read = "not";
    if let Some((vm, whole)) = scanned {
        read = if whole { "whole" } else { "sample" };
        match &vm.fate {
            Fate::Scanned => {}
            Fate::Ended => (read, why) = ("not", Some("it has ended".into())),
            Fate::Refused(reason) => (read, why) = ("not", Some(reason.clone())),
        }
    }
    let split = scanned.map(|(vm, _)| vm.split).unwrap_or_default();
    // VMs live on: what the scan saw goes with what it found.
    let seen = scanned.filter(|_| read == "whole").map(|(vm, _)| vm.pages.held + vm.pages.merged);
    let held = seen.map(Bytes::pages).or(found.map(Found::held));
    let ksm = k.stat.filter(|s| s.merging_pages.is_some()).map(|s| VmKsm {
        merged: Bytes::pages(s.merging_pages.unwrap_or(0)),
        zero: Bytes::pages(s.zero_pages.unwrap_or(0)),
        profit: s.profit,
    });
    VmReport {
        name: k.process.name.clone(),
        pid: k.process.id.pid,
        group: k.group.clone(),
        held: held.unwrap_or_default(),
        mergeable: found.map_or(Bytes::ZERO, |f| f.mergeable),
        saves: split.allowed(),
        split,
        read,
        why,
        pages: scanned.map(|(vm, _)| vm.pages).unwrap_or_default(),
        ksm,
    }
}

fn groups(vms: &[VmReport]) -> Vec<GroupReport> {
    let mut groups: BTreeMap<&str, (usize, Split)> = BTreeMap::new();
    for vm in vms {
        let (count, split) = groups.entry(&vm.group).or_default();
        *count += 1;
        split.add(&vm.split);
    }
    let report = |(name, (vms, split)): (&str, (usize, Split))| GroupReport {
        name: name.into(),
        vms,
        saves: split.allowed(),
        split,
    };
    groups.into_iter().map(report).collect()
}

fn cost(vms: &[VmResult]) -> Cost {
    let floor = Settings::default().floor;
    let (mut all, mut steered) = (Candidates::default(), Candidates::default());
    for block in vms.iter().flat_map(|v| v.blocks.iter()) {
        let here = block.found();
        all.add(&here);
        if here.pays(floor) {
            steered.add(&here);
        }
    }
    let share = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
    Cost {
        all: all.cost_s(),
        all_again: all.again_s(),
        steered: steered.cost_s(),
        steered_again: steered.again_s(),
        steered_share: share(steered.pages, all.pages),
        steered_finds: share(steered.zeros + steered.duplicates, all.zeros + all.duplicates),
    }
}

fn text(r: &Report) -> String {
    let s = &r.scan;
    let mut out = format!(
        "{} VMs hold {} that can be merged; read {} in {:.1} s ({:.1} s of CPU, {} threads, \
         {:.1} GB/s a core)\n\n",
        r.vms.len(),
        r.held,
        s.read,
        s.seconds,
        s.cpu_seconds,
        s.threads,
        s.bytes_per_cpu_second / 1e9
    );
    let head = ["VM", "GROUP", "HELD", "ZERO", "WITHIN", "BETWEEN", "SAVES", "MERGED"];
    let row = |name: &str, group: &str, held: Bytes, split: &Split, merged: Option<Bytes>| {
        let saves = split.allowed();
        let share = saves.fraction_of(held) * 100.0;
        vec![
            name.to_string(),
            group.to_string(),
            held.to_string(),
            split.zero.to_string(),
            split.within.to_string(),
            split.between.to_string(),
            format!("{saves} ({share:.0} %)"),
            merged.map_or("-".into(), |m| m.to_string()),
        ]
    };
    let merged = |v: &VmReport| v.ksm.as_ref().map(|k| k.merged + k.zero);
    let mut rows: Vec<Vec<String>> =
        r.vms.iter().map(|v| row(&v.name, &v.group, v.held, &v.split, merged(v))).collect();
    if rows.len() > 1 {
        let all = r.vms.iter().filter_map(merged).reduce(|a, b| a + b);
        rows.push(row("all", "", r.held, &r.split, all));
    }
    out += &table(&head, &rows, false);
    out += "\n";
    out += &notes(r);
    out
}

fn notes(r: &Report) -> String {
    let mut out = String::new();
    for vm in &r.vms {
        if let Some(why) = &vm.why {
            out += &format!("{}: {why}\n", vm.name);
        }
    }
    if let Some(e) = &r.estimate {
        let sampled = r.vms.iter().filter(|v| v.read == "sample").count();
        out += &format!(
            "{sampled} VMs were only sampled, few of their pages have duplicates; of all VMs together the \
             sample says {} ({} to {}), zeros not counted: --full reads all\n",
            e.likely, e.low, e.high
        );
    }
    if r.split.across > Bytes::ZERO {
        out += &format!("keeping groups apart leaves {} unmerged\n", r.split.across);
    }
    let c = &r.cost;
    if c.steered_finds > 0.0 {
        out += &format!(
            "ksmd would need about {:.1} s of CPU for all of it and {:.1} s for each further scan; \
             for the {:.0} % of memory with {:.0} % of what can be merged {:.1} s and {:.2} s\n",
            c.all,
            c.all_again,
            c.steered_share * 100.0,
            c.steered_finds * 100.0,
            c.steered,
            c.steered_again
        );
    }
    match &r.ksm {
        None => out += "this kernel has no KSM (CONFIG_KSM)\n",
        Some(k) => {
            let state = ["stopped", "running", "unmerging"].get(k.run as usize).unwrap_or(&"?");
            let saved = k.saved_now();
            let profit =
                k.profit_now().map_or(String::new(), |p| format!(", {} of it profit", signed(p)));
            out += &format!("KSM is {state}; it saves {saved} now{profit}\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, group: &str, zero: u64, between: u64) -> VmReport {
        let split = Split {
            zero: Bytes::mib(zero),
            between: Bytes::mib(between),
            across: Bytes::mib(3),
            ..Split::default()
        };
        VmReport {
            name: name.into(),
            pid: 1,
            group: group.into(),
            held: Bytes::mib(100),
            mergeable: Bytes::ZERO,
            saves: split.allowed(),
            split,
            read: "whole",
            why: None,
            pages: Pages::default(),
            ksm: None,
        }
    }

    #[test]
    fn groups_are_summed_and_crossing_them_is_no_saving() {
        let vms = [vm("a", "x", 1, 2), vm("b", "y", 4, 8), vm("c", "x", 16, 32)];
        let g = groups(&vms);
        let all: Vec<_> = g.iter().map(|g| (g.name.as_str(), g.vms, g.saves.0 >> 20)).collect();
        assert_eq!(all, [("x", 2, 51), ("y", 1, 12)]);
        assert_eq!(g[0].split.across, Bytes::mib(6));
    }

    #[test]
    fn a_report_of_nothing_can_be_printed() {
        let r = Report {
            held: Bytes::ZERO,
            saves: Bytes::ZERO,
            split: Split::default(),
            estimate: None,
            groups: Vec::new(),
            vms: vec![VmReport { why: Some("it has ended".into()), ..vm("a", "x", 0, 0) }],
            cost: cost(&[]),
            scan: ScanReport {
                seconds: 0.0,
                paused_seconds: 0.0,
                cpu_seconds: 0.0,
                threads: 1,
                read: Bytes::ZERO,
                bytes_per_cpu_second: 0.0,
                table: Bytes::ZERO,
            },
            ksm: Some(Ksm { general_profit: Some(-64), ..Ksm::default() }),
        };
        let text = text(&r);
        assert!(text.contains("a: it has ended\n"), "{text}");
        assert!(text.contains("KSM is stopped; it saves 0 B now, −64 B of it profit"), "{text}");
    }
}
