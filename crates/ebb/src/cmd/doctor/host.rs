//! What `ebb doctor` says of the host: its memory and pressure, who else sets balloons, and
//! what its kernel undoes or lacks.
//!
//! A check of something on the host is added here; it looks and changes nothing.

use std::cmp::Reverse;

use ebb_core::config::{Config, MergeMode};
use ebb_core::model::{Limit, Pressure};
use ebb_core::sample::ZfsArc;
use ebb_core::units::Bytes;
use ebb_host::act::zeros;
use ebb_host::probe::managers::PROXMOX_CONFIGS;
use ebb_host::probe::process;
use ebb_host::root::Root;

use super::fix::Fix;
use super::{Check, Grade, check};
use crate::view::Host;

/// A program that sets balloons, too: name of its process, of the program, what to do.
type Controller = (&'static str, &'static str, &'static str);

const CONTROLLERS: [Controller; 3] = [
    (
        "pvestatd",
        "Proxmox's pvestatd sets the balloons of VMs with `balloon` below `memory`",
        "for each VM that Ebb is to manage: qm set ID --delete balloon (not --balloon 0)",
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
pub(super) fn controllers(root: &Root) -> Vec<Check> {
    let found = CONTROLLERS.iter().filter_map(|(name, what, advice)| {
        let pid = process::running(root, name)?;
        // Which VMs it sets is said of each.
        if *name == "pvestatd" && root.read_dir(PROXMOX_CONFIGS).is_ok_and(|d| d.is_some()) {
            return None;
        }
        let found = format!("{what} (process {pid})");
        Some(check("host", "another controller", Grade::Missing, found, advice))
    });
    found.collect()
}

/// Two daemons on one host: neither knows what the other orders.
pub(super) fn daemons(root: &Root) -> Option<Check> {
    let pids = process::daemons(root);
    let [first, others @ ..] = &pids[..] else { return None };
    (!others.is_empty()).then(|| {
        let others = others.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let found = format!("processes {first} and {others} are all ebb run");
        let advice = "stop all but one: each takes for an operator's what another orders";
        check("host", "another controller", Grade::Missing, found, advice)
    })
}

/// Programs that set something else that Ebb sets: whether that matters goes by the configuration.
pub(super) fn neighbours(config: &Config, root: &Root) -> Vec<Check> {
    let mut checks = Vec::new();
    let stop = Fix::Run(&["systemctl", "disable", "--now", "ksmtuned"]);
    if config.merge.mode == MergeMode::On
        && let Some(pid) = process::running(root, "ksmtuned")
    {
        let found =
            format!("ksmtuned sets KSM as well (process {pid}); Ebb sets it back each time");
        let check = check("host", "another program", Grade::Missing, found, &stop.to_string());
        // One of a container's, or of a user's, is not the host's service.
        let fix = process::is_hosts_own(root, pid).then_some(stop);
        checks.push(Check { fix, ..check });
    }
    if let Some(pid) = process::running(root, "cockpit-bridge") {
        let found = format!(
            "while a VM's page is open, Cockpit has QEMU ask the guest for statistics every 10 s \
             (process {pid})"
        );
        let advice = "virsh dommemstat DOMAIN --period 2 --live, when statistics are old";
        checks.push(check("host", "another program", Grade::Note, found, advice));
    }
    checks
}

/// What guards libvirt's QEMUs lets them do for Ebb: make sockets, and have the agent in them.
pub(super) fn guard_checks(root: &Root) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what: &str, found: &str, fix: Fix| {
        let check = check("host", what, Grade::Missing, found, &fix.to_string());
        checks.push(Check { fix: Some(fix), ..check });
    };
    let exists = |path: &str| root.metadata(path).is_ok_and(|m| m.is_some());
    let reads = |path: &str| root.read(path).ok().flatten();
    let has_group = reads("/etc/group").is_some_and(|t| t.lines().any(|l| l.starts_with(GROUP)));
    // The operator's file comes first, and may name another directory.
    let wants = TMPFILES
        .iter()
        .find_map(|f| reads(f))
        .is_some_and(|t| t.lines().any(|l| !l.starts_with('#') && l.contains(" /run/ebb-vms ")));
    if has_group && wants && !exists("/run/ebb-vms") {
        let found = "/run/ebb-vms is missing: libvirt's QEMUs can make no sockets for Ebb";
        add("sockets", found, Fix::Run(&["systemd-tmpfiles", "--create", "ebb.conf"]));
    }
    let is_on = reads("/sys/module/apparmor/parameters/enabled").is_some_and(|t| t.trim() == "Y");
    if is_on
        && exists("/etc/apparmor.d/abstractions/libvirt-qemu.d/ebb")
        && let Some(rules) = reads("/etc/apparmor.d/abstractions/libvirt-qemu")
    {
        let more = reads(LOCAL_RULES).unwrap_or_default();
        // "#include" is no comment.
        let includes = |l: &str| {
            l.strip_prefix('#').unwrap_or(l).starts_with("include")
                && l.contains("<abstractions/libvirt-qemu.d>")
        };
        if !rules.lines().chain(more.lines()).any(|l| includes(l.trim())) {
            let found = "libvirt's QEMUs may use neither the agent nor /run/ebb-vms; rules for \
                         that are installed, but not read";
            let line = "include if exists <abstractions/libvirt-qemu.d>";
            add("AppArmor", found, Fix::Line { file: LOCAL_RULES, line });
        }
    }
    checks
}

/// The group of libvirt's QEMUs, as a line of /etc/group begins.
const GROUP: &str = "libvirt-qemu:";
const TMPFILES: [&str; 2] = ["/etc/tmpfiles.d/ebb.conf", "/usr/lib/tmpfiles.d/ebb.conf"];
/// What Debian's profile of libvirt's QEMUs reads of the operator's. A domain's profile is made
/// anew when the domain starts.
const LOCAL_RULES: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";

pub(super) fn host_checks(host: &Host, zfs: Option<ZfsArc>) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what: &str, grade, found: String, advice: &str| {
        checks.push(check("host", what, grade, found, advice));
    };
    let (grade, found, advice) = match host.available.zip(host.total) {
        Some((available, total)) => (Grade::Good, format!("{available} available of {total}"), ""),
        None => {
            let found = "/proc/meminfo cannot be read".into();
            (Grade::Bad, found, "run as root, with /proc mounted")
        }
    };
    add("memory", grade, found, advice);
    let (grade, found, advice) = match host.psi_some {
        Some(_) => (Grade::Good, "available", ""),
        None => (
            Grade::Missing,
            "not in this kernel, or switched off",
            "boot with psi=1; without it Ebb goes by free memory and swapping alone",
        ),
    };
    add("pressure (PSI)", grade, found.into(), advice);
    let swap: Bytes = host.swaps.iter().map(|s| s.size).sum();
    let areas: Vec<&str> = host.swaps.iter().map(|s| s.path.as_str()).collect();
    let (grade, found, advice) = match areas.is_empty() {
        true => (
            Grade::Note,
            "none".into(),
            "give the host swap, or zram (Debian: zram-tools, Fedora: zram-generator): it is used \
             when many guests want memory at once",
        ),
        false => (Grade::Good, format!("{swap} on {}", areas.join(", ")), ""),
    };
    add("swap", grade, found, advice);
    let (grade, found) = match &host.ksm {
        Some(k) => {
            let run = if k.run == 1 { "running" } else { "stopped" };
            let (saved, stale) = (k.saved_now(), k.saved() - k.saved_now());
            let stale = match (k.mapped, stale) {
                (None, _) | (_, Bytes(0)) => String::new(),
                _ => format!("; its counters still hold {stale} of processes that have ended"),
            };
            (Grade::Good, format!("{run}, saves {saved}{stale}"))
        }
        None => (Grade::Note, "not in this kernel".into()),
    };
    add("page merging (KSM)", grade, found, "");
    let (grade, found) = match &host.pool {
        Some(p) => (Grade::Good, format!("{} of {} used in {}", p.usage, p.limit, p.path)),
        None => (Grade::Note, "no limit that most VMs are under".into()),
    };
    add("VMs' cgroup", grade, found, "");
    if let Some(arc) = zfs {
        let found = format!("{}, half of it counts as available", arc.size);
        add("ZFS cache", Grade::Note, found, "");
    }
    checks
}

/// Limits named, the worst first.
const LIMITS: usize = 10;

/// The limits that bound VMs, beside the machine itself.
pub(super) fn limit_checks(limits: &[Limit]) -> Vec<Check> {
    let mut worst: Vec<&Limit> = limits.iter().filter(|l| !l.is_host()).collect();
    worst.sort_by_key(|l| Reverse(l.state));
    let one = |l: &&Limit| {
        let found = format!(
            "{} is {}: {} of {} left for {} VMs",
            l.name, l.state, l.headroom, l.capacity, l.vms
        );
        let (grade, advice) = match l.state {
            Pressure::Clear => (Grade::Good, ""),
            _ => (Grade::Note, "these VMs give memory first; raise the limit if it is too low"),
        };
        check("host", "limit", grade, found, advice)
    };
    worst.iter().take(LIMITS).map(one).collect()
}

/// What the kernel's maker of huge pages undoes. Ebb changes it only where it is told to
/// (`merge.hold_khugepaged`): fewer huge pages make guests slower.
pub(super) fn khugepaged_checks(host: &Host, config: &Config, root: &Root) -> Vec<Check> {
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
        checks.push(check("host", "khugepaged", Grade::Note, found, advice));
    };
    if let Some(holes) = number("max_ptes_none").filter(|n| *n > 0) {
        add(
            format!("max_ptes_none is {holes}; {pace}"),
            "where a guest gave back up to so many of 512 pages, it takes memory for them again; \
             to end that: echo 0 >/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none",
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
                 merges; to end that: merge.hold_khugepaged = true"
            }
        };
        add(format!("max_ptes_shared is {shared}; {pace}"), advice);
    }
    checks
}

pub(super) fn zeros_check(config: &Config, root: &Root) -> Option<Check> {
    let ways = config.merge.zeros.then(|| zeros::ways(root))?;
    let (grade, found, advice) = match (ways.split, ways.pageout) {
        (true, true) => (Grade::Good, "by splitting huge pages, others through swap", ""),
        (true, false) => (Grade::Note, "only in huge pages", "others need Linux 6.12"),
        (false, true) => (Grade::Note, "only through swap", "others need huge pages"),
        (false, false) => (Grade::Missing, "not in this kernel", "needs Linux 6.12"),
    };
    Some(check("host", "zeros without merging", grade, found, advice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::doctor::tests::{put, tree};

    #[test]
    fn another_controller_of_balloons_is_named_with_what_to_do() {
        let (_dir, root) = tree();
        let process = |pid: u32, comm: &str, line: &str| {
            put(&root, &format!("/proc/{pid}/comm"), &format!("{comm}\n"));
            put(&root, &format!("/proc/{pid}/cmdline"), &line.replace(' ', "\0"));
            put(&root, &format!("/proc/{pid}/status"), "Uid: 0 0 0 0\n");
        };
        // A user's, whose command line is never read: it could wait for ever.
        for (pid, comm) in [(21, "ebb"), (22, "python3")] {
            put(&root, &format!("/proc/{pid}/comm"), &format!("{comm}\n"));
            put(&root, &format!("/proc/{pid}/status"), "Uid: 1000 1000 1000 1000\n");
            let path = root.path(format!("/proc/{pid}/cmdline"));
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        }
        process(3, "bash", "bash momd pvestatd");
        assert_eq!(controllers(&root).len(), 0);
        process(7, "pvestatd", "pvestatd");
        process(9, "python3", "/usr/bin/python3 /usr/sbin/momd -c /etc/vdsm/mom.conf");
        process(11, "ebb", "/usr/sbin/ebb run");
        process(12, "ebb", "ebb run --dry-run");
        assert!(daemons(&root).is_none(), "a dry run sets nothing");
        process(13, "ebb", "ebb run --config /tmp/two.toml");
        assert_eq!(daemons(&root).unwrap().found, "processes 11 and 13 are all ebb run");
        let said: Vec<_> =
            controllers(&root).into_iter().map(|c| c.found + " " + &c.advice).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].contains("(process 7)") && said[0].contains("--delete balloon"),
            "{said:?}"
        );
        assert!(said[1].contains("(process 9)") && said[1].contains("disable --now momd"));
    }

    #[test]
    fn a_program_that_sets_what_ebb_sets_is_named_where_that_matters() {
        let (_dir, root) = tree();
        for (pid, name) in [(7, "ksmtuned"), (9, "cockpit-bridge")] {
            put(&root, &format!("/proc/{pid}/comm"), &format!("{name}\n"));
            put(&root, &format!("/proc/{pid}/cmdline"), name);
        }
        let said = |text| -> Vec<String> {
            let config = Config::parse("f", text).unwrap();
            let all = neighbours(&config, &root);
            all.into_iter().map(|c| c.found + " " + &c.advice).collect()
        };
        let (off, on) = (said(""), said("[merge]\nmode = \"on\"\n"));
        assert!(off.len() == 1 && off[0].contains("--period 2 --live"), "{off:?}");
        assert!(on.len() == 2 && on[0].contains("disable --now ksmtuned"), "{on:?}");
    }

    #[test]
    fn what_keeps_qemu_from_sockets_and_agent_is_named_with_what_mends_it() {
        let (_dir, root) = tree();
        let write = |file: &str, text: &str| put(&root, file, text);
        let said = || -> Vec<String> {
            guard_checks(&root).into_iter().map(|c| c.what + ": " + &c.advice).collect()
        };
        write("/etc/group", "kvm:x:104:\nlibvirt-qemu:x:64055:\n");
        write("/etc/apparmor.d/abstractions/libvirt-qemu", "  /dev/kvm rw,\n");
        assert_eq!(said(), [""; 0], "nothing of Ebb's is installed");
        write("/usr/lib/tmpfiles.d/ebb.conf", "d- /run/ebb-vms 0770 root libvirt-qemu -\n");
        write("/etc/apparmor.d/abstractions/libvirt-qemu.d/ebb", "/run/ebb-vms/* rw,\n");
        assert_eq!(said(), ["sockets: systemd-tmpfiles --create ebb.conf"]);
        write("/etc/tmpfiles.d/ebb.conf", "d- /srv/ebb-vms 0770 root kvm -\n");
        assert_eq!(said(), [""; 0], "the operator has another directory");
        std::fs::remove_file(root.path("/etc/tmpfiles.d/ebb.conf")).unwrap();
        write("/sys/module/apparmor/parameters/enabled", "Y\n");
        write(LOCAL_RULES, "##include <abstractions/libvirt-qemu.d>\n");
        assert!(said()[1].starts_with("AppArmor: add to /etc/apparmor.d/local"), "{:?}", said());
        std::fs::create_dir_all(root.path("/run/ebb-vms")).unwrap();
        let found = guard_checks(&root);
        assert_eq!(found.len(), 1);
        super::super::fix::fix(&found, &root, false);
        assert_eq!(said(), [""; 0], "the line is there now");
        std::fs::remove_file(root.path(LOCAL_RULES)).unwrap();
        write(
            "/etc/apparmor.d/abstractions/libvirt-qemu",
            "  include if exists <abstractions/libvirt-qemu.d>\n",
        );
        assert_eq!(said(), [""; 0], "newer profiles read them by themselves");
    }

    #[test]
    fn what_khugepaged_undoes_is_said_where_it_can() {
        let (_dir, root) = tree();
        let write = |file: &str, text: &str| {
            put(&root, &format!("/sys/kernel/mm/transparent_hugepage/{file}"), text);
        };
        let said = |text: &str| -> Vec<String> {
            let config = Config::parse("f", text).unwrap();
            let checks = khugepaged_checks(&Host::default(), &config, &root);
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
