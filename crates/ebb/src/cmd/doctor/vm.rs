//! What `ebb doctor` says of a VM: QMP, its balloon, agent and module, and what its RAM is
//! made of.
//!
//! A check of something in a VM is added here; it looks and changes nothing.

use ebb_core::model::Standing;
use ebb_core::sample::{AgentSample, Link, SharedSocket};
use ebb_core::text::in_command;
use ebb_core::units::Bytes;
use ebb_core::wire::AgentState;
use ebb_host::probe::managers::{ProxmoxBalloon, proxmox_balloon, proxmox_id};
use ebb_host::probe::qemu::{QemuProcess, QmpAddress};
use ebb_host::probe::regions::{Region, read_smaps};
use ebb_host::root::Root;

use super::{Check, Grade, check};
use crate::advice::in_description;
use crate::view::Vm;

/// How the reason begins where a VM is reached through libvirt.
const BY_LIBVIRT: &str = "libvirt domain ";
/// What libvirt says where it demands SASL.
const REFUSED: &str = "authentication required";

/// `asked`: a daemon has its guest asked for statistics.
pub(super) fn vm_checks(vm: &Vm, process: Option<&QemuProcess>, asked: bool) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what: &str, grade, found: &str, advice: &str| {
        checks.push(check(&vm.name, what, grade, found, advice));
    };
    let (grade, found, advice) = match &vm.link {
        Link::Down(why) if left_alone(vm, why) => {
            let why = vm.standing.why();
            // As the operator wants it.
            let is_wanted = why.starts_with("manage = ");
            let grade = if is_wanted { Grade::Note } else { Grade::Missing };
            (grade, format!("not connected: {why}"), "")
        }
        Link::Up => (Grade::Good, "answers".into(), ""),
        Link::Unknown => (Grade::Note, "not tried yet".into(), ""),
        Link::Slow(why) => (Grade::Missing, why.clone(), "it is tried again each tick"),
        Link::Taken(why) => (
            Grade::Bad,
            why.clone(),
            // Of a socket that others use it says what to do.
            match why.contains("-qmp unix:") {
                true => "",
                false => "see whether QEMU runs and answers; `ss -xp` shows who has the socket",
            },
        ),
        Link::Down(why) if why.starts_with(BY_LIBVIRT) => {
            let advice = match why.contains(REFUSED) {
                true => {
                    "Ebb does not support SASL on libvirt's socket: set auth_unix_rw = \"polkit\" \
                     in /etc/libvirt/libvirtd.conf (virtqemud.conf) and restart that daemon, or \
                     give the VM a socket for Ebb in <qemu:commandline>: \
                     -qmp unix:/run/ebb-vms/NAME-ebb.qmp,server=on,wait=off"
                }
                false => "Ebb tries again; `virsh list` shows whether libvirt answers",
            };
            (Grade::Bad, why.clone(), advice)
        }
        Link::Down(why) if why.contains("libvirt") => (
            Grade::Bad,
            why.clone(),
            "start libvirtd or virtqemud: its socket must be in /run/libvirt or \
             /run/user/UID/libvirt, and host.libvirt must not be false; or give the VM a socket \
             for Ebb in <qemu:commandline>: \
             -qmp unix:/run/ebb-vms/NAME-ebb.qmp,server=on,wait=off",
        ),
        Link::Down(why) => {
            let own = "give it -qmp unix:/run/NAME-ebb.qmp,server=on,wait=off, at its next start";
            (Grade::Bad, why.clone(), if why.contains("-qmp unix:") { "" } else { own })
        }
    };
    add("QMP", grade, &found, advice);
    if let Some(shared) = &vm.shared {
        let found = shared_words(shared);
        add("QMP socket", Grade::Note, &found, &own_socket(process));
    }
    if let Some(why) = &vm.pinned {
        add("RAM", Grade::Missing, why, "Ebb takes no memory of it with the balloon");
    }
    if vm.link == Link::Up {
        // It answers without a socket for Ebb.
        let by_libvirt = process.filter(|p| matches!(p.args.qmp, QmpAddress::None { .. }));
        let unused = process.is_some_and(|p| p.args.agent.is_some()) && vm.agent.is_none();
        balloon_checks(vm, unused, by_libvirt.map(|p| p.own_name.as_str()), &mut add);
        if vm.actual.is_some() {
            let (grade, found, advice) = stats_check(vm, asked);
            add("guest statistics", grade, &found, advice);
        }
    }
    checks
}

/// Whether a VM's connection is `down` only because Ebb is not to act on the VM.
fn left_alone(vm: &Vm, down: &str) -> bool {
    matches!(&vm.standing, Standing::Off(why) if why != down)
}

pub(super) fn proxmox_check(vm: &Vm, process: Option<&QemuProcess>, root: &Root) -> Option<Check> {
    let id = process.and_then(proxmox_id_of)?;
    let (grade, found) = match proxmox_balloon(root, &id) {
        Some(ProxmoxBalloon::Nothing) => return None,
        Some(ProxmoxBalloon::Always) => {
            (Grade::Missing, "Proxmox's pvestatd sets its balloon as well".into())
        }
        Some(ProxmoxBalloon::AtStart(mib)) => (
            Grade::Missing,
            format!("it starts with the {mib} MiB that Proxmox sets, and keeps that size"),
        ),
        None => (
            Grade::Note,
            "Proxmox sets its balloon as well, if its configuration has `balloon`".to_owned(),
        ),
    };
    let advice = format!(
        "qm set {id} --delete balloon (not --balloon 0, which removes the balloon at the next \
         start)"
    );
    Some(check(&vm.name, "Proxmox VE", grade, found, &advice))
}

fn shared_words(shared: &SharedSocket) -> String {
    let with = shared.with.as_deref().unwrap_or("other programs");
    let ms = shared.longest_us.div_ceil(1000);
    format!(
        "shared with {with}: Ebb connects for a few commands at a time, so far for {ms} ms at \
         most, and hears no events"
    )
}

/// How a VM gets a socket of Ebb's own, with Proxmox's command for it.
fn own_socket(process: Option<&QemuProcess>) -> String {
    let gain = "with a socket of its own Ebb learns of a reset at once";
    match process.and_then(proxmox_id_of) {
        Some(id) => format!(
            "{gain}: qm set {id} --args '-qmp unix:/run/{id}-ebb.qmp,server=on,wait=off' (for the \
             VM's next start)"
        ),
        None => format!("{gain}: -qmp unix:/run/NAME-ebb.qmp,server=on,wait=off"),
    }
}

/// The VM's number, if Proxmox VE has started it.
fn proxmox_id_of(process: &QemuProcess) -> Option<String> {
    let QmpAddress::Paths(paths) = &process.args.qmp else { return None };
    paths.iter().find_map(|path| proxmox_id(path))
}

const USE_AGENT: &str = "agent = \"on\" in the VM's section: freed pages then return one by one";

/// How far the agent and the guest's module have come.
fn agent_check(a: &AgentSample, pinned: bool) -> (Grade, String, &'static str) {
    let why = a.why.as_deref().unwrap_or_default();
    let module = a.module.as_deref().unwrap_or_default();
    match (&a.link, a.state) {
        (Link::Up, AgentState::Ready) if a.observes => (
            Grade::Note,
            format!("stock: ebb.ko {module} is there, its agent only observes"),
            if pinned { "" } else { USE_AGENT },
        ),
        (Link::Up, AgentState::Ready) => {
            (Grade::Good, format!("guest: ebb.ko {module}, freed pages return one by one"), "")
        }
        (Link::Up | Link::Unknown, AgentState::Aside) => (
            Grade::Missing,
            format!("stock: the agent stands aside: {why}"),
            "remove what it names, or `agent = \"off\"` in the VM's section; docs/security.md says \
             what it works beside",
        ),
        (Link::Up, _) => (
            Grade::Note,
            format!("agent: no live module in the guest {why}").trim_end().into(),
            "load ebb.ko in the guest: freed pages then return one by one",
        ),
        (Link::Unknown, _) => (Grade::Note, "stock: the agent is being asked".into(), ""),
        (Link::Slow(w) | Link::Taken(w) | Link::Down(w), _) => {
            (Grade::Missing, format!("stock: the agent does not answer: {w}"), "")
        }
    }
}

/// Huge pages behind guest RAM: what is partly given back still counts as
/// resident elsewhere, so it is worth knowing. Reads `smaps`, which takes
/// too long for every tick.
pub(super) fn backing_check(vm: &Vm, root: &Root) -> Option<Check> {
    let regions = read_smaps(root, vm.pid).ok()??;
    let sum = |of: fn(&Region) -> Bytes| regions.iter().map(of).sum::<Bytes>();
    let (resident, huge, merged) =
        (sum(|r| r.resident), sum(|r| r.huge), sum(|r| r.ksm.unwrap_or_default()));
    let found = format!("{resident} resident, {huge} of it in huge pages");
    let found = found + &merged.if_any(|merged| format!(", {merged} merged"));
    Some(check(&vm.name, "memory on the host", Grade::Good, found, ""))
}

/// `unused`: it has an agent that is not used. `domain`: the name of libvirt's domain that it is.
fn balloon_checks(
    vm: &Vm,
    unused: bool,
    domain: Option<&str>,
    add: &mut impl FnMut(&str, Grade, &str, &str),
) {
    if vm.actual.is_none() {
        let advice = "start it with -device virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on; in libvirt: \
             <memballoon model='virtio' autodeflate='on' freePageReporting='on'/>";
        return add("tier", Grade::Missing, "none: no virtio balloon", advice);
    }
    match &vm.agent {
        Some(a) => {
            let (grade, found, advice) = agent_check(a, vm.pinned.is_some());
            add("tier", grade, &found, advice);
        }
        None if unused => add("tier", Grade::Note, "stock: its agent is not used", USE_AGENT),
        None => add("tier", Grade::Good, "stock: balloon both ways", &agent_advice(domain)),
    }
    let (grade, found, advice) = reporting_check(vm.reporting, vm.agent.as_ref());
    add("free page reporting", grade, found, advice);
    if vm.deflate_on_oom == Some(false) {
        let advice = "with deflate-on-oom=on (libvirt: autodeflate='on') on the balloon the driver of a guest that runs out of \
                      memory deflates it at once, so Ebb keeps 12 % of its RAM as a buffer instead of 25 %";
        add("deflate-on-oom", Grade::Missing, "off", advice);
    }
}

fn stats_check(vm: &Vm, asked: bool) -> (Grade, String, &'static str) {
    let age_ms = vm.stats_age_ms.filter(|age_ms| *age_ms <= ebb_core::model::STALE_MS);
    if age_ms.is_none() && !asked {
        let found = vm.stats_age_ms.map_or("none".into(), |ms| format!("{} s old", ms / 1000));
        return (Grade::Note, found, "no daemon asks for them now, and a dry run does not");
    }
    match vm.stats_age_ms {
        None => (
            Grade::Missing,
            "none".into(),
            "the guest needs its virtio_balloon driver, Windows the service of virtio-win, too; \
             FreeBSD's driver has no statistics; a guest without them is never shrunk",
        ),
        Some(age_ms) if age_ms > ebb_core::model::STALE_MS => (
            Grade::Missing,
            format!("{} s old", age_ms / 1000),
            "the guest is paused or hangs, or its driver does not run (Windows: the service of \
             virtio-win)",
        ),
        Some(_) if vm.windows => (
            Grade::Good,
            "fresh, of Windows: its page-ins count reads of files, so they are not taken for a \
             shortage, and its driver does not deflate on its own"
                .into(),
            "",
        ),
        Some(_) => (Grade::Good, "fresh".into(), ""),
    }
}

fn agent_advice(domain: Option<&str>) -> String {
    let file = "file=/usr/lib/ebb/libebb_vmm.so";
    let (how, reporting) = match domain {
        None => (format!("-plugin {file},socket=PATH"), "free-page-reporting=on"),
        Some(name) => {
            let socket = format!("{file},socket=/run/ebb-vms/{}.agent", in_command(name));
            (in_description("-plugin", &socket), "freePageReporting='on'")
        }
    };
    format!(
        "with the agent in QEMU ({how}, and without {reporting}) and ebb.ko in the guest freed \
         pages return one by one (host: Linux 6.4 or later)"
    )
}

/// Free page reporting, which the agent's plug-in takes the place of: on anonymous RAM it
/// stands aside where reporting is on.
fn reporting_check(
    reporting: Option<bool>,
    agent: Option<&AgentSample>,
) -> (Grade, &'static str, &'static str) {
    match (reporting, agent.map(|a| a.state)) {
        (Some(true), _) => (Grade::Good, "on", ""),
        (Some(false), None) => (
            Grade::Missing,
            "off",
            "start it with free-page-reporting=on on its balloon, in libvirt \
             freePageReporting='on' (guest: Linux 5.7 or later)",
        ),
        (Some(false), Some(AgentState::Aside)) => (
            Grade::Missing,
            "off, and the agent stands aside",
            "mend that, or start the VM without the agent and with free-page-reporting=on",
        ),
        (Some(false), Some(_)) => (Grade::Good, "off: the agent takes its place", ""),
        (None, _) => (Grade::Note, "this QEMU does not tell", "QEMU 5.1 has it"),
    }
}

#[cfg(test)]
mod tests {
    use ebb_core::units::Bytes;

    use super::*;
    use crate::cmd::doctor::tests::{ballooned, put, said, tree};

    fn worst(vm: &Vm) -> (Grade, String) {
        let checks = vm_checks(vm, None, true);
        let worst = checks.iter().max_by_key(|c| c.grade).unwrap();
        (worst.grade, format!("{}: {}", worst.what, worst.advice))
    }

    fn process(name: &str) -> QemuProcess {
        QemuProcess::plain(ebb_core::sample::VmId { pid: 7, start: 9 }, name.into())
    }

    #[test]
    fn what_is_in_the_way_is_said_with_what_to_do() {
        let mut vm = Vm { name: "a".into(), ..Vm::default() };
        vm.link = Link::Taken("held by another client".into());
        let (grade, text) = worst(&vm);
        assert!(grade == Grade::Bad && text.contains("ss -xp"), "{text}");
        for (why, advice) in [
            ("/s: libvirt refuses: authentication required", "auth_unix_rw"),
            ("no answer within 2.0 s", "virsh list"),
        ] {
            vm.link = Link::Down(format!("{BY_LIBVIRT}a: {why}"));
            assert!(worst(&vm).1.contains(advice), "{}", worst(&vm).1);
        }
        let off = "manage = false in the configuration";
        let alone = Vm { standing: Standing::Off(off.into()), ..vm.clone() };
        let found = vm_checks(&alone, None, true).remove(0);
        assert_eq!(found.found, format!("not connected: {off}"));
        assert_eq!((found.grade, found.advice.as_str()), (Grade::Note, ""));
        vm.link = Link::Up;
        assert!(worst(&vm).1.contains("-device virtio-balloon-pci"));
        (vm.actual, vm.reporting) = (Some(Bytes::gib(1)), Some(false));
        let all = vm_checks(&vm, None, true);
        assert!(all.iter().any(|c| c.advice.contains("free-page-reporting=on on its balloon")));
        assert!(all.iter().any(|c| c.what == "guest statistics" && c.grade == Grade::Missing));
        // Its guest is not asked.
        vm.stats_age_ms = Some(19_000);
        for (asked, grade) in [(true, Grade::Missing), (false, Grade::Note)] {
            assert_eq!(stats_check(&vm, asked).0, grade);
        }
    }

    #[test]
    fn a_domain_of_libvirts_gets_the_agent_by_xml_that_can_be_pasted() {
        let advice = |name: &str| -> String {
            let checks = vm_checks(&ballooned(true, None), Some(&process(name)), true);
            checks.into_iter().find(|c| c.what == "tier").unwrap().advice
        };
        let xml =
            "<qemu:arg value='file=/usr/lib/ebb/libebb_vmm.so,socket=/run/ebb-vms/web1.agent'/>";
        assert!(advice("web1").contains(xml), "{}", advice("web1"));
        assert!(advice("a'/><x>").contains("/run/ebb-vms/NAME.agent"));
    }

    #[test]
    fn a_socket_that_is_shared_is_named_with_its_manager_and_its_command() {
        let mut process = process("web1");
        let mut vm = ballooned(true, None);
        assert!(!said(&vm, Some(&process)).contains("shared"));
        let with = Some("Ganeti".to_owned());
        vm.shared = Some(SharedSocket { with, longest_us: 1200 });
        let text = said(&vm, Some(&process));
        assert!(text.contains("shared with Ganeti") && text.contains("for 2 ms at most"), "{text}");
        assert!(text.contains("no events") && text.contains("NAME-ebb.qmp"), "{text}");
        assert!(!text.contains("qm set"), "{text}");
        process.args.qmp = QmpAddress::Paths(vec!["/var/run/qemu-server/104.qmp".into()]);
        let text = said(&vm, Some(&process));
        assert!(!text.contains("pvestatd"), "{text}");
        assert!(text.contains("qm set 104 --args '-qmp unix:/run/104-ebb.qmp,"), "{text}");
    }

    #[test]
    fn doctor_names_a_balloon_that_proxmox_sets_until_it_is_deleted() {
        let (_dir, root) = tree();
        let mut process = process("web1");
        let vm = ballooned(true, None);
        let said = |process: &QemuProcess| proxmox_check(&vm, Some(process), &root);
        assert!(said(&process).is_none());
        process.args.qmp = QmpAddress::Paths(vec!["/var/run/qemu-server/104.qmp".into()]);
        assert_eq!(said(&process).unwrap().grade, Grade::Note);
        let conf = |text| put(&root, "/etc/pve/qemu-server/104.conf", text);
        conf("balloon: 512\n");
        let told = said(&process).unwrap();
        assert_eq!(told.grade, Grade::Missing);
        assert!(told.advice.starts_with("qm set 104 --delete balloon (not --balloon 0"));
        conf("balloon: 512\nmemory: 2048\nshares: 0\n");
        assert!(said(&process).unwrap().found.contains("starts with the 512 MiB"));
        conf("memory: 2048\nshares: 0\n");
        assert!(said(&process).is_none());
    }

    #[test]
    fn reporting_is_not_asked_for_where_it_would_make_the_agent_stand_aside() {
        for state in [AgentState::Ready, AgentState::Searching, AgentState::Silent] {
            let text = said(&ballooned(false, Some(state)), None);
            assert!(text.contains("reporting: off: the agent takes its place"), "{text}");
            assert!(!text.contains("free-page-reporting=on"), "{text}");
        }
        // Also while it is asked anew: what it stands aside for is still so.
        for link in [Link::Up, Link::Unknown] {
            let mut vm = ballooned(false, Some(AgentState::Aside));
            vm.agent.iter_mut().for_each(|agent| agent.link = link.clone());
            let aside = said(&vm, None);
            assert!(aside.contains("stock: the agent stands aside"), "{aside}");
            assert!(aside.contains("mend that, or start the VM without the agent"), "{aside}");
        }
        let stock = said(&ballooned(false, None), None);
        assert!(stock.contains("off: start it with free-page-reporting=on"), "{stock}");
        assert!(stock.contains("and without free-page-reporting=on) and ebb.ko"), "{stock}");
    }
}
