//! `ebb doctor`: what Ebb can do here, for each VM, and what is in the way.
//!
//! Asks the daemon if one answers (it holds the QMP sockets), else looks itself.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use ebb_core::config::{Config, MergeMode};
use ebb_core::model::Model;
use ebb_core::sample::{AgentSample, HostSample, Link, Problem, Sample, VmSample};
use ebb_core::state::Memory;
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use ebb_host::act::zeros;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::discovery::discover;
use ebb_host::probe::process::{self, read_smaps_rollup};
use ebb_host::probe::qemu::QemuProcess;
use ebb_host::root::Root;
use serde::Serialize;

use crate::advice;
use crate::daemon::{options, trust};
use crate::daemon_client;
use crate::table::{emit, emit_json};
use crate::view::{self, State};

/// How a check came out. Ordered: the worst decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Good,
    /// Worth knowing.
    Note,
    /// Something is missing: Ebb does less than it could.
    Missing,
    /// Ebb can do nothing here.
    Bad,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// `host` or the VM's name.
    pub about: String,
    /// What was looked at.
    pub what: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do; empty where there is nothing.
    pub advice: String,
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
    }
}

/// Prints the checks; `true` where nothing is [`Verdict::Bad`].
pub fn main(config: &Config, json: bool) -> Result<bool> {
    let root = Root::default();
    let scan = discover(&root, &trust(config)).unwrap_or_default();
    let mut checks = Vec::new();
    let (sample, warnings) = if daemon_client::is_up(&config.socket) {
        checks.push(check(
            "host",
            "daemon",
            Verdict::Good,
            format!("answers on {}", config.socket),
            "",
        ));
        let state: State = daemon_client::get_json(&config.socket, "/v1/state")?;
        (sample_of(&state, &root, &scan.found)?, state.host.warnings)
    } else {
        let advice = "start it with `ebb run` (systemd: systemctl enable --now ebb)";
        checks.push(check("host", "daemon", Verdict::Missing, "does not run", advice));
        let sample = look(config)?;
        let warnings = warnings(config, &sample);
        (sample, warnings)
    };
    checks.extend(host_checks(&sample.host));
    checks.extend(warnings.iter().map(|w| check("host", "warning", Verdict::Missing, w, "")));
    checks.extend(controllers(&root));
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
        checks.push(check(about, &p.source, Verdict::Note, &p.message, ""));
    }
    if json {
        emit_json(&checks)?;
    } else {
        emit(&text(&checks))?;
    }
    Ok(checks.iter().all(|c| c.verdict < Verdict::Bad))
}

/// A look of our own: twice, so that connections are made and heard. Nothing is set.
fn look(config: &Config) -> Result<Sample> {
    let options = Options { look_only: true, ..options(config) };
    let mut host = LinuxHost::new(options)?;
    host.sample();
    host.wait(Instant::now() + Duration::from_millis(500));
    Ok(host.sample())
}

/// What a daemon would warn of.
fn warnings(config: &Config, sample: &Sample) -> Vec<String> {
    let mut memory = Memory::default();
    memory.observe(sample);
    let host = Model::new(config, sample, &memory).host;
    let met: BTreeSet<String> = sample.vms.iter().flat_map(advice::sections).collect();
    let unmet = config.vms.keys().filter(|name| !met.contains(*name));
    let unmet = advice::unmet_sections(config, unmet.map(String::as_str));
    let own = advice::cut_reserve(config, &host).into_iter().chain(unmet);
    own.chain(host.warnings).collect()
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

/// A program that sets balloons, too: name of its process, of the program, what to do.
type Controller = (&'static str, &'static str, &'static str);

const CONTROLLERS: [Controller; 3] = [
    (
        "pvestatd",
        "Proxmox's pvestatd sets the balloons of VMs with `balloon` below `memory`",
        "for each VM that Ebb is to manage: qm set ID --shares 0",
    ),
    (
        "momd",
        "MOM sets the balloons of the VMs of libvirt, and KSM",
        "two controllers undo each other's orders: systemctl disable --now momd (oVirt: mom-vdsm)",
    ),
    (
        "mom",
        "MOM sets the balloons of the VMs of libvirt, and KSM",
        "two controllers undo each other's orders: stop it",
    ),
];

/// Who else sets balloons here.
fn controllers(root: &Root) -> Vec<Check> {
    let found = CONTROLLERS.iter().filter_map(|(name, what, advice)| {
        let pid = process::running(root, name)?;
        let found = format!("{what} (process {pid})");
        Some(check("host", "another controller", Verdict::Missing, found, advice))
    });
    found.collect()
}

fn host_checks(host: &HostSample) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what: &str, verdict, found: String, advice: &str| {
        checks.push(check("host", what, verdict, found, advice));
    };
    match &host.memory {
        Some(m) => {
            add("memory", Verdict::Good, format!("{} available of {}", m.available, m.total), "")
        }
        None => add(
            "memory",
            Verdict::Bad,
            "/proc/meminfo cannot be read".into(),
            "run as root, with /proc mounted",
        ),
    }
    match &host.psi {
        Some(_) => add("pressure (PSI)", Verdict::Good, "there".into(), ""),
        None => add(
            "pressure (PSI)",
            Verdict::Missing,
            "not in this kernel, or switched off".into(),
            "boot with psi=1; without it Ebb goes by free memory and swapping alone",
        ),
    }
    let swap: Bytes = host.swaps.iter().map(|s| s.size).sum();
    let areas: Vec<&str> = host.swaps.iter().map(|s| s.path.as_str()).collect();
    match areas.is_empty() {
        true => add(
            "swap",
            Verdict::Note,
            "none".into(),
            "zram as a last resort costs nothing while unused",
        ),
        false => add("swap", Verdict::Good, format!("{swap} on {}", areas.join(", ")), ""),
    }
    match &host.ksm {
        Some(k) => {
            let run = if k.run == 1 { "running" } else { "stopped" };
            let (saved, stale) = (k.saved_now(), k.saved() - k.saved_now());
            let stale = match (k.mapped, stale) {
                (None, _) | (_, Bytes(0)) => String::new(),
                _ => format!("; its counters still hold {stale} of processes that have ended"),
            };
            let found = format!("{run}, saves {saved}{stale}");
            add("page merging (KSM)", Verdict::Good, found, "");
        }
        None => add("page merging (KSM)", Verdict::Note, "not in this kernel".into(), ""),
    }
    match &host.pool {
        Some(p) => add(
            "VMs' cgroup",
            Verdict::Good,
            format!("{} of {} used in {}", p.usage, p.limit, p.path),
            "",
        ),
        None => {
            add("VMs' cgroup", Verdict::Note, "no common limit: the whole host counts".into(), "")
        }
    }
    if let Some(arc) = host.zfs_arc {
        add(
            "ZFS cache",
            Verdict::Note,
            format!("{}, half of it counts as available", arc.size),
            "",
        );
    }
    checks
}

/// What the kernel's maker of huge pages undoes. Ebb changes it only where it is told to
/// (`merge.hold_khugepaged`): fewer huge pages make guests slower.
fn khugepaged_checks(host: &HostSample, config: &Config, root: &Root) -> Vec<Check> {
    const DIR: &str = "/sys/kernel/mm/transparent_hugepage";
    let read = |file: &str| root.read(format!("{DIR}/{file}")).ok().flatten();
    let number = |file: &str| read(&format!("khugepaged/{file}"))?.trim().parse::<u64>().ok();
    if read("enabled").is_none_or(|t| t.contains("[never]")) {
        return Vec::new();
    }
    let pages = number("pages_to_scan").unwrap_or(0);
    let seconds = number("scan_sleep_millisecs").unwrap_or(0) as f64 / 1000.0;
    let pace = format!("it looks at {} every {seconds} s", Bytes::pages(pages));
    let mut checks = Vec::new();
    let mut add = |found: String, advice: &str| {
        checks.push(check("host", "khugepaged", Verdict::Note, found, advice));
    };
    if let Some(holes) = number("max_ptes_none").filter(|n| *n > 0) {
        add(
            format!("max_ptes_none is {holes}; {pace}"),
            "it fills up to so many of 512 pages that guests gave back, or that are zeros and \
             were freed, with memory again: 0 in khugepaged/max_ptes_none, and it does not",
        );
    }
    let merges = host.ksm.is_some_and(|k| k.run == 1 || k.pages_shared > 0)
        || config.merge.mode == MergeMode::On;
    if let Some(shared) = number("max_ptes_shared").filter(|n| *n > 0 && merges) {
        let held = config.merge.mode == MergeMode::On && config.merge.hold_khugepaged;
        let advice = match held {
            true => "merge.hold_khugepaged: the daemon sets it to 0 while it merges",
            false => {
                "it copies up to so many merged pages of 512 into a huge page, which undoes their \
                 merges: 0 in khugepaged/max_ptes_shared, or merge.hold_khugepaged = true"
            }
        };
        add(format!("max_ptes_shared is {shared}; {pace}"), advice);
    }
    checks
}

/// Whether zero pages can be freed, where that is wanted.
fn zeros_check(config: &Config, root: &Root) -> Option<Check> {
    let ways = config.merge.zeros.then(|| zeros::ways(root))?;
    let (verdict, found, advice) = match (ways.split, ways.pageout) {
        (true, true) => (Verdict::Good, "by splitting huge pages, others through swap", ""),
        (true, false) => (Verdict::Note, "only in huge pages", "others need Linux 6.12"),
        (false, true) => (Verdict::Note, "only through swap", "others need huge pages"),
        (false, false) => (Verdict::Missing, "not in this kernel", "needs Linux 6.12"),
    };
    Some(check("host", "zeros without merging", verdict, found, advice))
}

fn vm_checks(vm: &VmSample, process: Option<&QemuProcess>) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what: &str, verdict, found: &str, advice: &str| {
        checks.push(check(&vm.name, what, verdict, found, advice));
    };
    match &vm.link {
        Link::Up => add("QMP", Verdict::Good, "answers", ""),
        Link::Unknown => add("QMP", Verdict::Note, "not tried yet", ""),
        Link::Slow(why) => add("QMP", Verdict::Missing, why, "it is tried again each tick"),
        Link::Taken(why) => add(
            "QMP",
            Verdict::Bad,
            why,
            "QEMU serves one client at a time: give Ebb a socket of its own with a second -qmp option",
        ),
        Link::Down(why) if why.contains("libvirt") => add(
            "QMP",
            Verdict::Bad,
            why,
            "give it a socket for Ebb in <qemu:commandline>: -qmp unix:PATH-ebb.qmp,server=on,wait=off; \
             then leave its balloon to Ebb (no virsh setmem)",
        ),
        Link::Down(why) => {
            add("QMP", Verdict::Bad, why, "without QMP nothing can be done for this VM")
        }
    }
    if process.is_some_and(|p| p.passthrough) {
        let advice = "ballooning has no effect: a passed-through device pins all guest memory";
        add("devices", Verdict::Missing, "VFIO or vDPA device", advice);
    }
    if let Some(why) = process.and_then(|p| p.pinned.as_deref()) {
        add("RAM", Verdict::Missing, why, "ballooning has no effect: QEMU keeps all guest memory");
    }
    if process.is_some_and(|p| p.hugepages) {
        add(
            "RAM",
            Verdict::Note,
            "in huge pages",
            "memory returns in whole huge pages or not at all",
        );
    }
    if vm.link == Link::Up {
        balloon_checks(vm, &mut add);
    }
    checks
}

/// How far the agent and the guest's module have come.
fn agent_check(a: &AgentSample, add: &mut impl FnMut(&str, Verdict, &str, &str)) {
    let why = a.why.as_deref().unwrap_or_default();
    let module = a.module.as_deref().unwrap_or_default();
    match (&a.link, a.state) {
        (Link::Up, AgentState::Ready) if a.observes => {
            let found = format!("stock: ebb.ko {module} is there, its agent only observes");
            let advice = "agent = \"on\" in the VM's section: freed pages then return one by one";
            add("tier", Verdict::Note, &found, advice);
        }
        (Link::Up, AgentState::Ready) => {
            add(
                "tier",
                Verdict::Good,
                &format!("guest: ebb.ko {module}, freed pages return one by one"),
                "",
            );
        }
        (Link::Up, AgentState::Aside) => {
            let found = format!("stock: the agent stands aside: {why}");
            let advice = "remove what it names, or `agent = \"off\"` in the VM's section; \
                          docs/security.md says what it works beside";
            add("tier", Verdict::Missing, &found, advice);
        }
        (Link::Up, _) => {
            let found = format!("agent: no live module in the guest {why}");
            let advice = "load ebb.ko in the guest: freed pages then return one by one";
            add("tier", Verdict::Note, found.trim_end(), advice);
        }
        (Link::Unknown, _) => add("tier", Verdict::Note, "stock: the agent is being asked", ""),
        (Link::Slow(w) | Link::Taken(w) | Link::Down(w), _) => {
            add("tier", Verdict::Missing, &format!("stock: the agent does not answer: {w}"), "");
        }
    }
}

/// Huge pages behind guest RAM: what is partly given back still counts as
/// resident elsewhere, so it is worth knowing. Reads `smaps_rollup`, which is
/// too dear for every tick.
fn backing_check(vm: &VmSample, root: &Root) -> Option<Check> {
    let maps = read_smaps_rollup(root, vm.id.pid).ok()??;
    let found = format!("{} resident, {} of it in huge pages", maps.rss, maps.anon_huge);
    let merged = if maps.ksm.0 > 0 { format!(", {} merged", maps.ksm) } else { String::new() };
    Some(check(&vm.name, "memory on the host", Verdict::Good, found + &merged, ""))
}

fn balloon_checks(vm: &VmSample, add: &mut impl FnMut(&str, Verdict, &str, &str)) {
    let Some(b) = &vm.balloon else {
        let advice =
            "start it with -device virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on";
        add("tier", Verdict::Missing, "none: no virtio balloon", advice);
        return;
    };
    match &vm.agent {
        Some(a) => agent_check(a, add),
        None => add(
            "tier",
            Verdict::Good,
            "stock: balloon both ways",
            "with the agent in QEMU (-plugin file=/usr/lib/ebb/libebb_vmm.so,socket=PATH, and without \
             free-page-reporting=on) and ebb.ko in the guest freed pages return one by one",
        ),
    }
    reporting_check(b.reporting, vm.agent.as_ref(), add);
    if b.deflate_on_oom == Some(false) {
        let advice = "with deflate-on-oom=on on the balloon the driver of a guest that runs out of \
                      memory deflates it at once, so Ebb can take three times as much of its idle memory";
        add("deflate-on-oom", Verdict::Missing, "off", advice);
    }
    match &b.guest {
        None => add(
            "guest statistics",
            Verdict::Missing,
            "none",
            "the guest needs its virtio_balloon driver; a guest without numbers is never shrunk",
        ),
        Some(g) if g.age_ms > ebb_core::model::STALE_MS => {
            add("guest statistics", Verdict::Missing, &format!("{} s old", g.age_ms / 1000), "");
        }
        Some(_) => add("guest statistics", Verdict::Good, "fresh", ""),
    }
}

/// Free page reporting, which the agent's plug-in takes the place of: on anonymous RAM it
/// stands aside where reporting is on.
fn reporting_check(
    reporting: Option<bool>,
    agent: Option<&AgentSample>,
    add: &mut impl FnMut(&str, Verdict, &str, &str),
) {
    let agent = agent.map(|a| a.state);
    let (verdict, found, advice) = match (reporting, agent) {
        (Some(true), _) => (Verdict::Good, "on", ""),
        (Some(false), None) => (
            Verdict::Missing,
            "off",
            "start it with free-page-reporting=on on its balloon (guest: Linux 5.7 or later)",
        ),
        (Some(false), Some(AgentState::Aside)) => (
            Verdict::Missing,
            "off, and the agent stands aside",
            "mend that, or start the VM without the agent and with free-page-reporting=on",
        ),
        (Some(false), Some(_)) => (Verdict::Good, "off: the agent takes its place", ""),
        (None, _) => (Verdict::Note, "this QEMU does not tell", "QEMU 5.1 has it"),
    };
    add("free page reporting", verdict, found, advice);
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
            out += &format!("        → {}\n", c.advice);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::BalloonSample;

    fn worst(vm: &VmSample) -> (Verdict, String) {
        let checks = vm_checks(vm, None);
        let worst = checks.iter().max_by_key(|c| c.verdict).unwrap();
        (worst.verdict, format!("{}: {}", worst.what, worst.advice))
    }

    #[test]
    fn what_is_in_the_way_is_said_with_what_to_do() {
        let mut vm = VmSample { name: "a".into(), ..VmSample::default() };
        vm.link = Link::Taken("held by another client".into());
        let (verdict, text) = worst(&vm);
        assert!(verdict == Verdict::Bad && text.contains("second -qmp"), "{text}");
        vm.link = Link::Up;
        assert!(worst(&vm).1.contains("-device virtio-balloon-pci"));
        vm.balloon = Some(BalloonSample { reporting: Some(false), ..BalloonSample::default() });
        let all = vm_checks(&vm, None);
        assert!(all.iter().any(|c| c.advice.contains("free-page-reporting=on on its balloon")));
        assert!(all.iter().any(|c| c.what == "guest statistics" && c.verdict == Verdict::Missing));
    }

    fn said(vm: &VmSample) -> String {
        vm_checks(vm, None)
            .iter()
            .map(|c| format!("{}: {}: {}\n", c.what, c.found, c.advice))
            .collect()
    }

    /// A VM whose balloon has this.
    fn ballooned(reporting: bool, agent: Option<AgentState>) -> VmSample {
        let reporting = Some(reporting);
        let agent = agent.map(|state| AgentSample { link: Link::Up, state, ..Default::default() });
        let balloon = Some(BalloonSample { reporting, ..BalloonSample::default() });
        VmSample { name: "a".into(), link: Link::Up, agent, balloon, ..VmSample::default() }
    }

    #[test]
    fn reporting_is_not_asked_for_where_it_would_make_the_agent_stand_aside() {
        for state in [AgentState::Ready, AgentState::Searching, AgentState::Silent] {
            let text = said(&ballooned(false, Some(state)));
            assert!(text.contains("reporting: off: the agent takes its place"), "{text}");
            assert!(!text.contains("free-page-reporting=on"), "{text}");
        }
        let aside = said(&ballooned(false, Some(AgentState::Aside)));
        assert!(aside.contains("mend that, or start the VM without the agent"), "{aside}");
        let stock = said(&ballooned(false, None));
        assert!(stock.contains("off: start it with free-page-reporting=on"), "{stock}");
        assert!(stock.contains("and without free-page-reporting=on) and ebb.ko"), "{stock}");
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
    fn another_controller_of_balloons_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let process = |pid: u32, comm: &str, line: &str| {
            let proc = dir.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&proc).unwrap();
            std::fs::write(proc.join("comm"), format!("{comm}\n")).unwrap();
            std::fs::write(proc.join("cmdline"), line.replace(' ', "\0")).unwrap();
        };
        process(3, "bash", "bash momd pvestatd");
        assert_eq!(controllers(&root).len(), 0);
        process(7, "pvestatd", "pvestatd");
        process(9, "python3", "/usr/bin/python3 /usr/sbin/momd -c /etc/vdsm/mom.conf");
        let said: Vec<_> =
            controllers(&root).into_iter().map(|c| c.found + " " + &c.advice).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("(process 7)") && said[0].contains("--shares 0"), "{said:?}");
        assert!(said[1].contains("(process 9)") && said[1].contains("disable --now momd"));
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
        let said = warnings(&config, &Sample { host, vms, ..Sample::default() });
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].starts_with("host.reserve = 9 GiB is more than half of 10 GiB"),
            "{said:?}"
        );
        assert!(said[1].contains("[vm.b] (manage = false) has"), "{said:?}");
    }

    #[test]
    fn what_khugepaged_undoes_is_said_where_it_can() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let write = |file: &str, text: &str| {
            let path = root.path(format!("/sys/kernel/mm/transparent_hugepage/{file}"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let said = |text: &str| -> Vec<String> {
            let config = Config::parse("f", text).unwrap();
            let checks = khugepaged_checks(&HostSample::default(), &config, &root);
            checks.into_iter().map(|c| format!("{}: {}", c.found, c.advice)).collect()
        };
        assert_eq!(said(""), [""; 0], "no huge pages in this kernel");
        write("enabled", "always [madvise] never\n");
        for (file, text) in [
            ("max_ptes_none", "511\n"),
            ("max_ptes_shared", "256\n"),
            ("pages_to_scan", "4096\n"),
            ("scan_sleep_millisecs", "10000\n"),
        ] {
            write(&format!("khugepaged/{file}"), text);
        }
        let off = said("");
        assert!(off.len() == 1 && off[0].contains("511; it looks at 16 MiB every 10 s"), "{off:?}");
        let on = said("[merge]\nmode = \"on\"\n");
        assert!(on.len() == 2 && on[1].contains("hold_khugepaged = true"), "{on:?}");
        let held = said("[merge]\nmode = \"on\"\nhold_khugepaged = true\n");
        assert!(held[1].contains("the daemon sets it to 0"), "{held:?}");
        write("khugepaged/max_ptes_none", "0\n");
        write("khugepaged/max_ptes_shared", "0\n");
        assert_eq!(said("[merge]\nmode = \"on\"\n"), [""; 0]);
        write("enabled", "always madvise [never]\n");
        write("khugepaged/max_ptes_none", "511\n");
        assert_eq!(said(""), [""; 0]);
    }
}
