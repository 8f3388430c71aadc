//! `ebb doctor`: what Ebb can do here, for each VM, and what is in the way.
//!
//! Asks the daemon if one answers (it holds the QMP sockets), else looks itself.
//!
//! This file has what a check is, where its facts come from and how it is printed; the
//! checks are in `host` and `vm`, and what can be done about them by itself in `fix`.

mod fix;
mod host;
mod vm;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use ebb_core::config::Config;
use ebb_core::model::{Limit, Model};
use ebb_core::sample::{HostSample, Problem, Sample, VmSample};
use ebb_core::state::Memory;
use ebb_host::libvirt::metadata::METADATA;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::discovery::discover;
use ebb_host::probe::qemu::QemuProcess;
use ebb_host::root::Root;
use serde::Serialize;

use self::fix::{Fix, fix};
use self::host::{
    controllers, guard_checks, host_checks, khugepaged_checks, limit_checks, neighbours,
    zeros_check,
};
use self::vm::{backing_check, vm_checks};

use crate::advice;
use crate::daemon::{options, trust};
use crate::daemon_client;
use crate::table::{emit, emit_json};
use crate::view::{self, State};

/// How a check came out. Ordered: the worst decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Good,
    Note,
    /// Something is missing: Ebb does less than it could.
    Missing,
    /// Ebb can do nothing here.
    Bad,
}

#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// `host` or the VM's name.
    pub about: String,
    pub what: String,
    pub verdict: Verdict,
    pub found: String,
    /// What to do; empty where there is nothing.
    pub advice: String,
    /// What `--fix` does about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<Fix>,
}

fn check(
    about: &str,
    what: &str,
    verdict: Verdict,
    found: impl Into<String>,
    advice: &str,
) -> Check {
    Check {
        about: about.into(),
        what: what.into(),
        verdict,
        found: found.into(),
        advice: advice.into(),
        fix: None,
    }
}

/// Prints the checks; `true` where nothing is [`Verdict::Bad`]. With `mend` it first does what is
/// safe about what it finds, or with `dry_run` says only what.
pub fn main(config: &Config, json: bool, mend: bool, dry_run: bool) -> Result<bool> {
    let mut checks = all_checks(config)?;
    if mend {
        anyhow::ensure!(
            dry_run || rustix::process::geteuid().is_root(),
            "doctor --fix changes the host: run it as root"
        );
        let mut done = fix(&checks, &Root::default(), dry_run);
        done.extend(all_checks(config)?);
        checks = done;
    }
    if json {
        emit_json(&checks)?;
    } else {
        emit(&text(&checks))?;
    }
    Ok(checks.iter().all(|c| c.verdict < Verdict::Bad))
}

fn all_checks(config: &Config) -> Result<Vec<Check>> {
    let root = Root::default();
    let scan = discover(&root, &trust(config)).unwrap_or_default();
    let mut checks = Vec::new();
    let (sample, warnings, limits) = if daemon_client::is_up(&config.socket) {
        checks.push(check(
            "host",
            "daemon",
            Verdict::Good,
            format!("answers on {}", config.socket),
            "",
        ));
        let state: State = daemon_client::get_json(&config.socket, "/v1/state")?;
        (sample_of(&state, &root, &scan.found)?, state.host.warnings, state.host.limits)
    } else {
        let advice = "start it with `ebb run` (systemd: systemctl enable --now ebb)";
        checks.push(check("host", "daemon", Verdict::Missing, "does not run", advice));
        let sample = look(config)?;
        let (warnings, limits) = warnings(config, &sample);
        (sample, warnings, limits)
    };
    checks.extend(host_checks(&sample.host));
    checks.extend(limit_checks(&limits));
    checks.extend(warnings.iter().map(|w| check("host", "warning", Verdict::Missing, w, "")));
    checks.extend(controllers(&root));
    checks.extend(neighbours(config, &root));
    checks.extend(guard_checks(&root));
    checks.extend(khugepaged_checks(&sample.host, config, &root));
    checks.extend(zeros_check(config, &root));
    if sample.vms.is_empty() {
        let advice = "start a VM with a QMP socket: -qmp unix:/run/NAME.qmp,server=on,wait=off";
        checks.push(check("host", "VMs", Verdict::Missing, "no QEMU process was found", advice));
    }
    checks.extend(scan.refused.iter().map(|r| {
        let found = format!("process {} is not taken for a VM", r.pid);
        check(&r.name, "trust", Verdict::Note, found, &r.why)
    }));
    for vm in &sample.vms {
        checks.extend(vm_checks(vm, scan.found.iter().find(|p| p.id == vm.id)));
        checks.extend(backing_check(vm, &root));
    }
    for p in &sample.problems {
        let about =
            p.vm.and_then(|id| sample.vms.iter().find(|v| v.id == id)).map_or("host", |v| &v.name);
        let is_settings = p.source == METADATA;
        let verdict = if is_settings { Verdict::Missing } else { Verdict::Note };
        checks.push(check(about, &p.source, verdict, &p.message, ""));
    }
    Ok(checks)
}

/// A look of our own: twice, so that connections are made and heard. Nothing is set.
fn look(config: &Config) -> Result<Sample> {
    let options = Options { look_only: true, ..options(config) };
    let mut host = LinuxHost::new(options)?;
    host.sample();
    host.wait(Instant::now() + Duration::from_millis(500));
    Ok(host.sample())
}

/// What a daemon would warn of, and the limits that it would see.
fn warnings(config: &Config, sample: &Sample) -> (Vec<String>, Vec<Limit>) {
    let mut memory = Memory::default();
    memory.observe(sample);
    let host = Model::new(config, sample, &memory).host;
    let met: BTreeSet<String> = sample.vms.iter().flat_map(advice::sections).collect();
    let unmet = config.vms.keys().filter(|name| !met.contains(*name));
    let unmet = advice::unmet_sections(config, unmet.map(String::as_str));
    let own = advice::cut_reserve(config, &host).into_iter().chain(unmet);
    (own.chain(host.warnings).collect(), host.limits)
}

/// What the daemon knows, in the form of a sample: only what the checks need.
fn sample_of(state: &State, root: &Root, found: &[QemuProcess]) -> Result<Sample> {
    let mut host = LinuxHost::new(ebb_host::linux::Options {
        root: root.clone(),
        only: Some(Vec::new()),
        ..Default::default()
    })?;
    let own = host.sample();
    let vms = state.vms.iter().map(|v| VmSample {
        id: found.iter().find(|p| p.id.pid == v.pid).map(|p| p.id).unwrap_or_default(),
        name: v.name.clone(),
        link: v.link.clone(),
        shared: v.shared.clone(),
        ram: v.ram,
        run: v.run.clone(),
        agent: v.agent.clone(),
        balloon: v.actual.map(|actual| ebb_core::sample::BalloonSample {
            actual,
            age_ms: 0,
            reporting: v.reporting,
            deflate_on_oom: v.deflate_on_oom,
            guest: v
                .stats_age_ms
                .map(|age_ms| ebb_core::sample::GuestStats { age_ms, ..Default::default() }),
        }),
        ..VmSample::default()
    });
    let pool = state.host.pool.clone();
    Ok(Sample {
        vms: vms.collect(),
        host: HostSample { pool, ..own.host },
        problems: state.problems.iter().map(plain).collect(),
        ..own
    })
}

fn plain(p: &view::Problem) -> Problem {
    Problem { vm: p.vm, source: p.source.clone(), message: p.message.clone() }
}

/// What is said of a sample alone.
#[cfg(test)]
pub fn of_sample(sample: &Sample) -> String {
    let mut checks = host_checks(&sample.host);
    checks.extend(sample.vms.iter().flat_map(|vm| vm_checks(vm, None)));
    text(&checks)
}

fn text(checks: &[Check]) -> String {
    let (mut about, mut out) = ("", String::new());
    for c in checks {
        if c.about != about {
            out += &format!("{}{}\n", if about.is_empty() { "" } else { "\n" }, c.about);
            about = &c.about;
        }
        let mark = match c.verdict {
            Verdict::Good => "ok  ",
            Verdict::Note => "note",
            Verdict::Missing => "miss",
            Verdict::Bad => "BAD ",
        };
        out += &format!("  {mark}  {}: {}\n", c.what, c.found);
        if !c.advice.is_empty() {
            let fix = if c.fix.is_some() { " (`ebb doctor --fix` does this)" } else { "" };
            out += &format!("        → {}{fix}\n", c.advice);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::{AgentSample, BalloonSample, Link};
    use ebb_core::units::Bytes;
    use ebb_core::wire::AgentState;

    use super::*;

    pub(super) fn said(vm: &VmSample) -> String {
        vm_checks(vm, None)
            .iter()
            .map(|c| format!("{}: {}: {}\n", c.what, c.found, c.advice))
            .collect()
    }

    /// A VM whose balloon has this.
    pub(super) fn ballooned(reporting: bool, agent: Option<AgentState>) -> VmSample {
        let reporting = Some(reporting);
        let agent = agent.map(|state| AgentSample { link: Link::Up, state, ..Default::default() });
        let balloon = Some(BalloonSample { reporting, ..BalloonSample::default() });
        VmSample { name: "a".into(), link: Link::Up, agent, balloon, ..VmSample::default() }
    }

    #[test]
    fn that_deflate_on_oom_is_off_is_said_with_a_daemon_as_well() {
        let vm = |told| view::Vm {
            name: "a".into(),
            link: Link::Up,
            actual: Some(Bytes::gib(1)),
            deflate_on_oom: told,
            ..view::Vm::default()
        };
        let state = |told| State { vms: vec![vm(told)], ..State::default() };
        let text = |told| said(&sample_of(&state(told), &Root::default(), &[]).unwrap().vms[0]);
        assert!(text(Some(false)).contains("deflate-on-oom: off"), "{}", text(Some(false)));
        assert!(!text(Some(true)).contains("deflate-on-oom: off"));
        assert!(!text(None).contains("deflate-on-oom: off"), "not known is not off");
    }

    #[test]
    fn a_section_without_a_vm_and_a_reserve_that_is_cut_are_said_without_a_daemon_too() {
        let text = "[host]\nreserve = \"9GiB\"\n[vm.a]\n[vm.b]\nmanage = false\n";
        let config = Config::parse("f", text).unwrap();
        let memory = ebb_core::sample::Meminfo {
            total: Bytes::gib(10),
            available: Bytes::gib(8),
            ..Default::default()
        };
        let host = HostSample { memory: Some(memory), ..HostSample::default() };
        let vms = vec![ballooned(true, None)];
        let (said, _) = warnings(&config, &Sample { host, vms, ..Sample::default() });
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].starts_with("host.reserve = 9 GiB is more than half of 10 GiB"),
            "{said:?}"
        );
        assert!(said[1].contains("[vm.b] (manage = false) has"), "{said:?}");
    }
}
