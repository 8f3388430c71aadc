//! `ebb merge on` and `off`, and what of it is put back at the daemon's end.
//!
//! What may be open together ([`on`]) is decided here; how QEMU is told is the host crate's.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ebb_core::config::{Config, MergeMode};
use ebb_core::plan::MergeWish;
use ebb_core::sample::Link;
use ebb_core::state::OwnedMark;
use ebb_core::text::in_command;
use ebb_core::units::Bytes;
use ebb_host::act::ksm;
use ebb_host::act::vm_mergeable;
use ebb_host::libvirt::domain_of;
use ebb_host::probe::discovery::{Program, inspect_owed};
use ebb_host::probe::ksm::{ksmtuned, read_ksm};
use ebb_host::probe::managers::{Manager, SocketKind, kind};
use ebb_host::probe::process::{Life, life};
use ebb_host::probe::qemu::{QemuProcess, QmpAddress};
use ebb_host::qmp::Client;
use ebb_host::root::Root;

use super::{Known, are_there, look};
use crate::advice::in_description;
use crate::cmd::explain;
use crate::daemon_client;
use crate::table::emit;
use crate::view::{State, Vm};

/// How long QEMU may take to answer the first command.
const QMP: Duration = Duration::from_secs(5);
/// How long the daemon may take to open or close VMs.
const DONE: Duration = Duration::from_secs(20);

const OPEN: &str = "open to KSM";
const OUT: &str = "out of KSM, nothing of it is merged";
/// What starts KSM where no daemon steers it.
const RUN: &str = "1 is written to /sys/kernel/mm/ksm/run";

/// The state of a daemon, if one runs.
pub(super) fn running(config: &Config) -> Result<Option<State>> {
    if !daemon_client::is_up(&config.socket) {
        return Ok(None);
    }
    Ok(Some(daemon_client::get_json(&config.socket, "/v1/state")?))
}

/// Whether a daemon opens VMs to KSM and closes them.
pub(super) fn steers(state: &State) -> bool {
    let is_on = state.host.merge.as_ref().is_some_and(|m| m.mode == MergeMode::On);
    is_on && !state.daemon.dry_run
}

/// Has the daemon do it, which would undo what others do, and waits.
pub(super) fn tell_daemon(
    config: &Config,
    state: &State,
    names: &[String],
    on: bool,
) -> Result<bool> {
    let mut changed = false;
    for name in names {
        changed |= explain::find(state, name)?.merge.as_ref().and_then(|m| m.open) != Some(on);
    }
    for name in names {
        let wish = MergeWish { vm: Some(name.clone()), on };
        daemon_client::post(&config.socket, "/v1/merge", &serde_json::to_string(&wish)?)?;
    }
    let until = Instant::now() + DONE;
    loop {
        // A daemon that is being reloaded does not answer for a moment.
        let state: State = daemon_client::get_json_until(&config.socket, "/v1/state", until)?;
        if !steers(&state) {
            bail!("the daemon steers KSM no more");
        }
        let vms: Vec<&Vm> =
            names.iter().map(|name| explain::find(&state, name)).collect::<Result<_>>()?;
        let left: Vec<&&Vm> =
            vms.iter().filter(|v| v.merge.as_ref().is_some_and(|m| m.open != Some(on))).collect();
        if left.is_empty() {
            emit(&done(&state, config, names, on))?;
            return Ok(changed);
        }
        if Instant::now() > until {
            let why = left.iter().map(|vm| {
                let error = vm.merge.as_ref().and_then(|m| m.error.as_deref());
                format!("{}: {}", vm.name, error.unwrap_or("the daemon does not do it"))
            });
            let merging = state.host.merge.as_ref().map_or("", |m| &m.why);
            bail!("{} ({merging})", Vec::from_iter(why).join("; "));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What the daemon has done, and what it does now about merging.
fn done(state: &State, config: &Config, names: &[String], on: bool) -> String {
    let mut said = format!("{}: {}\n", names.join(" "), if on { OPEN } else { OUT });
    if on {
        let kept_out = |name: &&String| config.settings(name, None).merge == Some(false);
        for name in names.iter().filter(kept_out) {
            said += &format!("{name}: against merge = false, until the daemon starts again\n");
        }
        let why = state.host.merge.as_ref().map_or("", |m| &m.why);
        said += &format!(
            "the daemon: {}\n",
            if why.is_empty() { "nothing was decided yet" } else { why }
        );
    }
    said
}

/// Opens to KSM, or closes, what Ebb had closed or opened. What was not done within `patience`,
/// and why; a VM that has ended is owed nothing. With a VM whose turn has come by then QEMU goes on,
/// and the next try sees whether it was done: the kernel takes a minute where much is merged, and a
/// process can keep its mappings from being read for ever.
pub fn put_back(
    config: &Config,
    marks: &[OwnedMark],
    patience: Duration,
) -> (Vec<OwnedMark>, Vec<String>) {
    let config = config.clone();
    each_within(marks, patience, move |mark| put_one_back(&config, mark))
}

fn each_within(
    marks: &[OwnedMark],
    patience: Duration,
    put_back: impl Fn(&OwnedMark) -> Result<()> + Send + 'static,
) -> (Vec<OwnedMark>, Vec<String>) {
    let until = Instant::now() + patience;
    let (tell, told) = mpsc::channel();
    let all = marks.to_vec();
    std::thread::spawn(move || {
        for mark in all.iter().take_while(|_| Instant::now() < until) {
            if tell.send(put_back(mark)).is_err() {
                break;
            }
        }
    });
    let (mut left, mut failed) = (Vec::new(), Vec::new());
    for mark in marks {
        let why = match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Ok(())) => continue,
            Ok(Err(e)) => format!("{e:#}"),
            Err(_) => format!("not done within {} s", patience.as_secs()),
        };
        left.push(mark.clone());
        failed.push(format!("{}: {why}", mark.name));
    }
    (left, failed)
}

fn put_one_back(config: &Config, mark: &OwnedMark) -> Result<()> {
    let root = Root::default();
    if life(&root, mark.id) == Life::Ended {
        return Ok(());
    }
    let found = match inspect_owed(&root, mark.id)? {
        Program::Vm(found) => found,
        Program::Refused(why) => bail!("not taken for a VM: {why}"),
        Program::Other => bail!("no QEMU"),
    };
    let process = QemuProcess { name: mark.name.clone(), ..*found };
    let mut qmp = connect(config, &process, None)?;
    vm_mergeable::set(&root, mark.id, &mut qmp, mark.open)?;
    Ok(())
}

/// KSM has one domain: it merges whatever is open to it, so one group only may be.
pub(super) fn on(
    config: &Config,
    names: &[String],
    across_groups: bool,
    daemon: Option<&State>,
) -> Result<bool> {
    let root = Root::default();
    let all = look(config, &root, &[])?;
    may_open(config, &all, names, across_groups, daemon)?;
    let changed = switch(config, names, true, daemon)?;
    if read_ksm(&root)?.is_some_and(|ksm| ksm.run != 1) {
        emit(&format!("KSM is stopped: nothing is merged until {RUN}\n"))?;
    }
    Ok(changed)
}

/// An error where these VMs must not be opened to KSM, of all that there are.
fn may_open(
    config: &Config,
    all: &[Known],
    names: &[String],
    across_groups: bool,
    daemon: Option<&State>,
) -> Result<()> {
    are_there(names, &Vec::from_iter(all.iter().map(|k| k.process.name.as_str())))?;
    let is_wanted = |k: &Known| names.contains(&k.process.name);
    let wanted = all.iter().filter(|k| is_wanted(k));
    let groups: BTreeSet<&str> = wanted.map(|k| k.group.as_str()).collect();
    let names_of = |those: &dyn Fn(&Known) -> bool| -> Vec<&str> {
        all.iter().filter(|k| those(k)).map(|k| k.process.name.as_str()).collect()
    };
    let is_open = |k: &Known| {
        let marked = k.found.as_ref().is_some_and(|f| f.mergeable > Bytes::ZERO);
        marked && (is_wanted(k) || ram_is_open(config, k, daemon))
    };
    let by_name = names_of(&|k| is_wanted(k) && !k.group_is_proven);
    if !by_name.is_empty() && !across_groups {
        bail!(
            "{}: of a share group by a name that the VM gives itself. Where there are several \
             groups its section needs user or cgroup; or say --across-groups",
            by_name.join(", ")
        );
    }
    let others = names_of(&|k| {
        is_open(k)
            && (groups.len() != 1 || !groups.contains(k.group.as_str()) || !k.group_is_proven)
    });
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
    let agents = names_of(&|k| is_wanted(k) && k.process.args.agent.is_some());
    if !agents.is_empty() {
        bail!(
            "{}: their RAM is recycled page by page, and what KSM merges loses the protection that \
             recycling relies on; the agent would close it again",
            agents.join(", ")
        );
    }
    Ok(())
}

/// Whether its RAM is open, or may be. QEMU marks the memory of devices, too, which is no RAM.
fn ram_is_open(config: &Config, known: &Known, daemon: Option<&State>) -> bool {
    let connect = || connect(config, &known.process, daemon).ok();
    match vm_mergeable::ksm_state(&Root::default(), known.process.id) {
        Ok(state) if state.needs_backends() => connect()
            .and_then(|mut qmp| vm_mergeable::is_open(&state, &mut qmp).ok())
            .unwrap_or(true),
        Ok(state) => state.is_open(None),
        Err(_) => true,
    }
}

/// Opens VMs to KSM or takes them out, and prints the result for each.
pub(super) fn switch(
    config: &Config,
    names: &[String],
    on: bool,
    daemon: Option<&State>,
) -> Result<bool> {
    let root = Root::default();
    let (mut changed, mut failed) = (false, Vec::new());
    for known in look(config, &root, names)? {
        let name = &known.process.name;
        match connect(config, &known.process, daemon)
            .and_then(|mut qmp| Ok(vm_mergeable::set(&root, known.process.id, &mut qmp, on)?))
        {
            Ok(false) => emit(&format!("{name}: it was so already\n"))?,
            Ok(true) => {
                changed = true;
                emit(&format!("{name}: {}\n", if on { OPEN } else { OUT }))?;
            }
            Err(e) => failed.push(format!("{name}: {e:#}")),
        }
    }
    if failed.is_empty() { Ok(changed) } else { bail!("{}", failed.join("; ")) }
}

/// Why this daemon's connection to a VM is in the way, where it has one that it keeps.
fn held_by(daemon: &State, process: &QemuProcess) -> Option<String> {
    let vm = daemon.vms.iter().find(|vm| vm.pid == process.id.pid && vm.shared.is_none())?;
    if !matches!(vm.link, Link::Up | Link::Slow(_)) {
        return None;
    }
    let what = match daemon.daemon.dry_run {
        true => "and changes nothing in its dry run: end that first".to_owned(),
        false => format!(
            "and leaves KSM alone (merge.mode is not \"on\"): with mode = \"on\" it does this itself, \
             and merge = false in the VM's section keeps a VM out; or stop the daemon first, \
             which gives {} all its memory",
            process.name
        ),
    };
    Some(format!("the daemon has its QMP socket, which serves one client, {what}"))
}

/// The VM's QMP socket, where one is free: a socket serves one client.
fn connect(config: &Config, process: &QemuProcess, daemon: Option<&State>) -> Result<Client> {
    let its = &config.settings(&process.given, process.args.uuid.as_deref()).qmp;
    let named = its.is_some();
    let paths = match (its, &process.args.qmp) {
        (Some(path), _) => vec![path.into()],
        (None, QmpAddress::Paths(paths)) => paths.clone(),
        (None, QmpAddress::None { why }) => match domain_of(&Root::default(), process) {
            Some(domain) => bail!("{}", of_domain(&domain)),
            None => bail!("{why}"),
        },
    };
    // Of its own sockets the daemon has one, most likely the first.
    let held = daemon.and_then(|daemon| held_by(daemon, process));
    let (mut last, mut is_held) = (None, held.is_some());
    for path in paths {
        let kind = kind(&path, named, config.sockets);
        if kind == SocketKind::Own && std::mem::take(&mut is_held) {
            continue;
        }
        let mut client = match kind {
            SocketKind::Shared => Client::shared(path, process.id.pid),
            SocketKind::Others if Manager::of(&path).is_some() => {
                last = Some(format!("{} is its manager's", path.display()));
                continue;
            }
            SocketKind::Own | SocketKind::Others => Client::new(path),
        };
        client.check_peer(process.id.pid);
        // It serves us once it has answered.
        match client.execute("query-status", None, QMP) {
            Ok(_) => return Ok(client),
            Err(e) => last = Some(e.to_string()),
        }
    }
    // Where none was passed over, the daemon has another way to it.
    let held = held.filter(|_| !is_held);
    bail!("{}", held.or(last).unwrap_or_else(|| "it has no QMP socket".into()))
}

/// Why a domain's RAM cannot be opened or closed, and what to do.
fn of_domain(domain: &str) -> String {
    let socket = format!("unix:/run/ebb-vms/{}-ebb.qmp,server=on,wait=off", in_command(domain));
    format!(
        "libvirt has its only QMP socket, and libvirt opens and closes no running domain to KSM: \
         give it a socket for Ebb, at its next start ({})",
        in_description("-qmp", &socket)
    )
}

pub(super) fn off_all(config: &Config) -> Result<bool> {
    let root = Root::default();
    let is_steered = running(config)?.is_some_and(|state| steers(&state));
    if is_steered {
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
    let until = if is_steered { String::new() } else { format!(" until {RUN}") };
    emit(&format!(
        "KSM is stopped{until}; every merge is broken, they had saved {freed} ({seconds:.1} s)\n"
    ))?;
    Ok(freed > Bytes::ZERO)
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::VmId;
    use ebb_host::scan::Found;

    use super::*;
    use crate::cmd::hands_off::tests::daemon;

    #[test]
    fn a_daemon_that_is_reloaded_is_waited_for() {
        let of = |mode: &str, open: bool| {
            format!(
                r#"{{"host": {{"merge": {{"mode": "{mode}"}}}},
                     "vms": [{{"name": "web", "merge": {{"open": {open}}}}}]}}"#
            )
        };
        for (mode, done) in [("on", true), ("report", false)] {
            // It takes the request, and goes as soon as it is asked.
            let (mut asked_before, after) = (false, of(mode, false));
            let (_dir, socket) = daemon(move |asked| {
                let goes = asked && !std::mem::replace(&mut asked_before, asked);
                (!goes).then(|| after.clone())
            });
            let config = Config { socket, ..Config::default() };
            let state: State = serde_json::from_str(&of("on", true)).unwrap();
            let told = tell_daemon(&config, &state, &["web".into()], false);
            assert_eq!(told.ok(), done.then_some(true), "{mode}");
        }
    }

    #[test]
    fn a_socket_that_the_daemon_keeps_is_not_queued_at_and_the_reason_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web-ebb.qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut process = QemuProcess::plain(VmId { pid: 7, start: 1 }, "web".into());
        process.args.qmp = QmpAddress::Paths(vec![path]);
        let said = |dry: bool| {
            let text = format!(
                r#"{{"daemon": {{"dry_run": {dry}}}, "host": {{"merge": {{"mode": "report"}}}},
                     "vms": [{{"name": "web", "pid": 7, "link": {{"state": "up"}}}}]}}"#
            );
            let state = serde_json::from_str(&text).unwrap();
            connect(&Config::default(), &process, Some(&state)).err().unwrap().to_string()
        };
        assert!(said(false).contains("with mode = \"on\" it does this itself"), "{}", said(false));
        assert!(said(true).ends_with("in its dry run: end that first"), "{}", said(true));
        assert!(listener.accept().is_err(), "nobody waits there");
    }

    #[test]
    fn who_is_opened_is_told_that_ksmd_rests() {
        let text =
            r#"{"host": {"merge": {"mode": "on", "why": "ksmd rests: web cannot be closed"}}}"#;
        let file = "[vm.db]\nmerge = false\n";
        let config = Config::parse("f", file).unwrap();
        let said = |on| done(&serde_json::from_str(text).unwrap(), &config, &["db".into()], on);
        let expected = "db: open to KSM\ndb: against merge = false, until the daemon starts again\n\
                        the daemon: ksmd rests: web cannot be closed\n";
        assert_eq!(said(true), expected);
        assert_eq!(said(false), "db: out of KSM, nothing of it is merged\n");
    }

    #[test]
    fn a_name_that_no_vm_has_is_told_before_anything_else() {
        let found = Found { target: None, mergeable: Bytes::mib(1), refused: None };
        let open = Known {
            process: QemuProcess::plain(VmId { pid: u32::MAX, start: 1 }, "web".into()),
            group: "default".into(),
            group_is_proven: true,
            found: Some(found),
            stat: None,
            why: None,
        };
        let all = [open];
        let said = |name: &str| may_open(&Config::default(), &all, &[name.into()], false, None);
        assert_eq!(said("tpyo").unwrap_err().to_string(), "no VM tpyo; there are: web");
        said("web").unwrap();
    }

    #[test]
    fn a_domain_is_told_how_its_description_gets_a_socket() {
        let said = of_domain("web");
        let xml = "<qemu:commandline><qemu:arg value='-qmp'/>\
                   <qemu:arg value='unix:/run/ebb-vms/web-ebb.qmp,server=on,wait=off'/>";
        assert!(said.contains("virsh edit: xmlns:qemu=") && said.contains(xml), "{said}");
    }

    #[test]
    fn a_vm_that_is_not_closed_in_time_stays_written_down_and_those_after_it() {
        let mark = |name: &str| OwnedMark { name: name.into(), ..OwnedMark::default() };
        let marks = ["refused", "done", "hangs", "later"].map(mark);
        let (_never, wait) = mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let one = move |mark: &OwnedMark| match mark.name.as_str() {
            "refused" => bail!("no QEMU"),
            "hangs" => Ok(wait.lock().unwrap().recv()?),
            _ => Ok(()),
        };
        let (left, failed) = each_within(&marks, Duration::from_secs(1), one);
        assert_eq!(left, [mark("refused"), mark("hangs"), mark("later")]);
        assert_eq!(failed[0], "refused: no QEMU");
        assert_eq!(failed[1], "hangs: not done within 1 s");
    }
}
