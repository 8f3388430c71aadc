//! `ebb doctor`: what Ebb can do here, for each VM, and what is in the way.
//!
//! Asks the daemon if one answers (it holds the QMP sockets), else looks itself.

use std::time::{Duration, Instant};

use anyhow::Result;
use ebb_core::config::{Config, MergeMode};
use ebb_core::sample::{AgentSample, HostSample, Link, Sample, VmSample};
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use ebb_host::act::zeros;
use ebb_host::linux::LinuxHost;
use ebb_host::probe::discovery::discover;
use ebb_host::probe::process::read_smaps_rollup;
use ebb_host::probe::qemu::QemuProcess;
use ebb_host::root::Root;
use serde::Serialize;

use crate::client;
use crate::daemon::{options, trust};
use crate::table::{emit, emit_json};
use crate::view::State;

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
    let sample = if client::is_up(&config.socket) {
        checks.push(check(
            "host",
            "daemon",
            Verdict::Good,
            format!("answers on {}", config.socket),
            "",
        ));
        sample_of(&client::get_json::<State>(&config.socket, "/v1/state")?, &root, &scan.found)?
    } else {
        let advice = "start it with `ebb run` (systemd: systemctl enable --now ebb)";
        checks.push(check("host", "daemon", Verdict::Missing, "does not run", advice));
        look(config)?
    };
    checks.extend(host_checks(&sample.host));
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

/// A look of our own: twice, so that connections are made and guests heard.
fn look(config: &Config) -> Result<Sample> {
    let mut host = LinuxHost::new(options(config))?;
    host.sample();
    let ids: Vec<_> = host.sample().vms.iter().map(|v| v.id).collect();
    host.kick_stats(&ids);
    host.wait(Instant::now() + Duration::from_millis(500));
    Ok(host.sample())
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
            deflate_on_oom: None,
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
        problems: state.problems.clone(),
        ..own
    })
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
            let saved = Bytes::pages(k.pages_sharing);
            add("page merging (KSM)", Verdict::Good, format!("{run}, {saved} merged"), "");
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
             were let go of, with memory again: 0 in khugepaged/max_ptes_none, and it does not",
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

/// Whether pages of zeros can be let go of, where that is wanted.
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
        (Link::Up, AgentState::Ready) => {
            add(
                "tier",
                Verdict::Good,
                &format!("guest: ebb.ko {module}, freed pages return one by one"),
                "",
            );
        }
        (Link::Up, AgentState::Aside) => {
            add("tier", Verdict::Missing, "stock: the agent stands aside", why);
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
            "with the agent in QEMU (-plugin file=/usr/lib/ebb/libebb_vmm.so,socket=PATH) and ebb.ko \
             in the guest freed pages return one by one, without the guest's help",
        ),
    }
    match b.reporting {
        Some(true) => add("free page reporting", Verdict::Good, "on", ""),
        Some(false) => add(
            "free page reporting",
            Verdict::Missing,
            "off",
            "start it with free-page-reporting=on on its balloon (guest: Linux 5.7 or later)",
        ),
        None => {
            add("free page reporting", Verdict::Note, "this QEMU does not tell", "QEMU 5.1 has it")
        }
    }
    if b.deflate_on_oom == Some(false) {
        let advice = "with deflate-on-oom=on on the balloon a guest that is short helps itself at \
                      once, so Ebb can take three times as much of its idle memory";
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
