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
use ebb_core::model::Model;
use ebb_core::sample::Sample;
use ebb_core::state::Memory;
use ebb_core::tick::Tick;
use ebb_host::libvirt::metadata::METADATA;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::discovery::{Scan, discover};
use ebb_host::probe::qemu::QemuProcess;
use ebb_host::probe::zfs::read_arcstats;
use ebb_host::root::Root;
use serde::Serialize;

use self::fix::{Fix, fix};
use self::host::{
    controllers, daemons, guard_checks, host_checks, khugepaged_checks, limit_checks, neighbours,
    zeros_check,
};
use self::vm::{backing_check, proxmox_check, vm_checks};

use crate::advice;
use crate::daemon::{options, trust};
use crate::daemon_client;
use crate::table::emit_as;
use crate::view::{self, Problem, State};

/// How a check came out. Ordered: the worst decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
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
    #[serde(rename = "verdict")]
    pub grade: Grade,
    pub found: String,
    /// What to do; empty where there is nothing.
    pub advice: String,
    /// What `--fix` does about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<Fix>,
}

fn check(about: &str, what: &str, grade: Grade, found: impl Into<String>, advice: &str) -> Check {
    Check {
        about: about.into(),
        what: what.into(),
        grade,
        found: found.into(),
        advice: advice.into(),
        fix: None,
    }
}

/// Prints the checks; `true` where nothing is [`Grade::Bad`]. With `mend` it first makes the safe
/// changes that they name; with `dry_run`, too, it only names them.
pub fn main(config: &Config, json: bool, mend: bool, dry_run: bool) -> Result<bool> {
    let mut checks = all_checks(config)?;
    if mend {
        anyhow::ensure!(
            dry_run || rustix::process::geteuid().is_root(),
            "doctor --fix changes the host: run it as root"
        );
        let done = fix(&checks, &Root::default(), dry_run);
        if !dry_run {
            checks = all_checks(config)?;
        }
        checks.splice(0..0, done);
    }
    emit_as(json, &checks, || Ok(text(&checks)))?;
    Ok(checks.iter().all(|c| c.grade < Grade::Bad))
}

fn all_checks(config: &Config) -> Result<Vec<Check>> {
    let root = Root::default();
    let scan = discover(&root, &trust(config)).unwrap_or_default();
    let mut checks = Vec::new();
    let is_up = daemon_client::is_up(&config.socket);
    let state: State = if is_up {
        let found = format!("answers on {}", config.socket);
        checks.push(check("host", "daemon", Grade::Good, found, ""));
        daemon_client::get_json(&config.socket, "/v1/state")?
    } else {
        let found = format!("does not answer on {}", config.socket);
        let advice = "run this as root; systemctl enable --now ebb; journalctl -u ebb says why it \
                      ended";
        checks.push(check("host", "daemon", Grade::Missing, found, advice));
        state_of(config, look(config)?)
    };
    let host = &state.host;
    checks.extend(host_checks(host, read_arcstats(&root).ok().flatten()));
    checks.extend(limit_checks(&host.limits));
    checks.extend(host.warnings.iter().map(|w| check("host", "warning", Grade::Missing, w, "")));
    checks.extend(daemons(&root));
    checks.extend(controllers(&root));
    checks.extend(neighbours(config, &root));
    checks.extend(guard_checks(&root));
    checks.extend(khugepaged_checks(host, config, &root));
    checks.extend(zeros_check(config, &root));
    if state.vms.is_empty() {
        checks.push(no_vms(config, &scan, is_up));
    }
    checks.extend(scan.refused.iter().map(|(pid, why)| {
        let found = format!("process {pid} is not taken for a VM");
        check(&format!("pid-{pid}"), "trust", Grade::Note, found, why)
    }));
    for vm in &state.vms {
        let process = scan.found.iter().find(|p| p.id.pid == vm.pid);
        checks.extend(vm_checks(vm, process, is_up && !state.daemon.dry_run));
        checks.extend(proxmox_check(vm, process, &root));
        checks.extend(backing_check(vm, &root));
    }
    checks.extend(state.problems.iter().map(problem_check));
    Ok(grouped(checks))
}

/// Why there is no VM to show.
fn no_vms(config: &Config, scan: &Scan, is_up: bool) -> Check {
    let of = |grade, found: String, advice: &str| check("host", "VMs", grade, found, advice);
    if let (true, Some(why)) = (scan.found.is_empty(), scan.unread()) {
        // A daemon that runs has read them.
        let grade = if is_up { Grade::Note } else { Grade::Bad };
        let advice = "run this as root; as root, try again";
        return of(grade, format!("processes cannot be read: {why}"), advice);
    }
    let has_none = |p: &&QemuProcess| config.section(&p.given, p.args.uuid.as_deref()).is_none();
    let unlisted: Vec<&str> =
        scan.found.iter().filter(has_none).map(|p| p.given.as_str()).take(advice::NAMES).collect();
    if config.listed_only && !unlisted.is_empty() {
        let found = format!("host.vms = \"listed\", and no section for {}", unlisted.join(", "));
        return of(Grade::Missing, found, &format!("add {}", advice::header(unlisted[0])));
    }
    let trust = if scan.refused.is_empty() { "" } else { "; or see `trust`" };
    let advice = format!(
        "start one: domains of libvirt need no socket, others -qmp \
         unix:/run/NAME-ebb.qmp,server=on,wait=off{trust}"
    );
    of(Grade::Missing, "none that Ebb may manage was found".into(), &advice)
}

/// All about one thing stands together, in the order in which things are first named.
fn grouped(mut checks: Vec<Check>) -> Vec<Check> {
    let names: Vec<String> = checks.iter().map(|c| c.about.clone()).collect();
    checks.sort_by_key(|c| names.iter().position(|name| *name == c.about));
    checks
}

fn problem_check(p: &Problem) -> Check {
    let of_settings = [METADATA, "host.", "[vm."];
    let is_settings = of_settings.iter().any(|setting| p.source.starts_with(setting));
    let grade = if is_settings { Grade::Missing } else { Grade::Note };
    check(p.name.as_deref().unwrap_or("host"), &p.source, grade, &p.message, "")
}

/// A look of our own: twice, so that connections are made and heard. Nothing is set.
fn look(config: &Config) -> Result<Sample> {
    let options = Options { look_only: true, ..options(config) };
    let mut host = LinuxHost::new(options)?;
    host.sample();
    host.wait(Instant::now() + Duration::from_millis(500));
    Ok(host.sample())
}

/// What a daemon would tell of a first look.
fn state_of(config: &Config, sample: Sample) -> State {
    let mut memory = Memory::default();
    memory.observe(&sample);
    let model = Model::new(config, &sample, &memory);
    let met: BTreeSet<String> = sample.vms.iter().flat_map(advice::sections).collect();
    let unmet = config.vms.keys().filter(|name| !met.contains(*name));
    let unmet = unmet.map(String::as_str);
    let own = advice::without_effect(config, &model.host, &sample.vms, unmet);
    let tick = Tick { sample, ..Tick::default() };
    let mut state = State::new(&tick, &model, &memory, view::Daemon::default());
    state.host.warnings.splice(0..0, own);
    state
}

/// What is said of a sample alone.
#[cfg(test)]
pub fn of_sample(sample: Sample) -> String {
    let zfs = sample.host.zfs_arc;
    let state = state_of(&Config::default(), sample);
    let mut checks = host_checks(&state.host, zfs);
    checks.extend(state.vms.iter().flat_map(|vm| vm_checks(vm, None, true)));
    text(&checks)
}

fn text(checks: &[Check]) -> String {
    let (mut about, mut out) = ("", String::new());
    for c in checks {
        if c.about != about {
            out += &format!("{}{}\n", if about.is_empty() { "" } else { "\n" }, c.about);
            about = &c.about;
        }
        let mark = match c.grade {
            Grade::Good => "ok  ",
            Grade::Note => "note",
            Grade::Missing => "miss",
            Grade::Bad => "BAD ",
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
    use ebb_core::sample::{AgentSample, HostSample, Link, VmSample};
    use ebb_core::units::Bytes;
    use ebb_core::wire::AgentState;

    use super::*;
    use crate::view::Vm;

    pub(super) fn said(vm: &Vm, process: Option<&QemuProcess>) -> String {
        let line = |c: Check| format!("{}: {}: {}\n", c.what, c.found, c.advice);
        vm_checks(vm, process, true).into_iter().map(line).collect()
    }

    /// A tree of files that stands for `/`, for as long as the directory is kept.
    pub(super) fn tree() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        (dir, root)
    }

    /// Writes a file of a tree, and makes the directories above it.
    pub(super) fn put(root: &Root, file: &str, text: &str) {
        let path = root.path(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A VM whose balloon has this.
    pub(super) fn ballooned(reporting: bool, agent: Option<AgentState>) -> Vm {
        let reporting = Some(reporting);
        let agent = agent.map(|state| AgentSample { link: Link::Up, state, ..Default::default() });
        let actual = Some(Bytes::gib(1));
        Vm { name: "a".into(), link: Link::Up, agent, actual, reporting, ..Vm::default() }
    }

    #[test]
    fn a_problem_stands_with_what_else_is_said_of_its_vm() {
        let named = |about| check(about, "x", Grade::Good, "", "");
        let checks = grouped(["host", "a", "b", "a", "host"].map(named).into());
        assert_eq!(text(&checks).matches("\n\n").count(), 2, "{}", text(&checks));
        let order: Vec<_> = checks.iter().map(|c| c.about.as_str()).collect();
        assert_eq!(order, ["host", "host", "a", "a", "b"]);
    }

    #[test]
    fn that_deflate_on_oom_is_off_is_said() {
        let text = |deflate_on_oom| said(&Vm { deflate_on_oom, ..ballooned(true, None) }, None);
        assert!(text(Some(false)).contains("deflate-on-oom: off"), "{}", text(Some(false)));
        assert!(!text(Some(true)).contains("deflate-on-oom: off"));
        assert!(!text(None).contains("deflate-on-oom: off"), "not known is not off");
    }

    #[test]
    fn a_host_without_vms_is_told_why_it_has_none() {
        let listed = Config::parse("f", "[host]\nvms = \"listed\"\n[vm.b]\n").unwrap();
        let of = |name: &str| QemuProcess::plain(Default::default(), name.into());
        let said = |found: &[&str], problems: &[(&str, &str)]| {
            let found = found.iter().map(|name| of(name)).collect();
            let problems = problems.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            let c = no_vms(&listed, &Scan { found, problems, ..Scan::default() }, false);
            (c.grade, format!("{} → {}", c.found, c.advice))
        };
        let denied = [("host.users", "no user"), ("/proc/7/ns/user", "Permission denied")];
        let (grade, text) = said(&[], &denied);
        assert!(grade == Grade::Bad && text.contains("Permission denied → run this as root"));
        let (grade, text) = said(&["a.b", "b"], &denied);
        let words = "host.vms = \"listed\", and no section for a.b → add [vm.\"a.b\"]";
        assert_eq!((grade, text.as_str()), (Grade::Missing, words));
        assert!(said(&[], &denied[..1]).1.starts_with("none that Ebb may manage"));
    }

    #[test]
    fn what_is_not_known_of_a_vm_is_not_told_as_nothing() {
        let vms = vec![VmSample { name: "a".into(), ..VmSample::default() }];
        let state = state_of(&Config::default(), Sample { vms, ..Sample::default() });
        let told = serde_json::to_value(&state.vms[0]).unwrap();
        assert_eq!((told.get("floor"), told.get("ceiling")), (None, None));
        assert!(!crate::metrics::render(&state).contains("ebb_vm_ceiling_bytes{"));
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
        let vms = vec![VmSample { name: "a".into(), link: Link::Up, ..VmSample::default() }];
        let said = state_of(&config, Sample { host, vms, ..Sample::default() }).host.warnings;
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].starts_with("host.reserve = 9 GiB is more than half of 10 GiB"),
            "{said:?}"
        );
        assert!(said[1].contains("[vm.b] (manage = false) has"), "{said:?}");
    }
}
