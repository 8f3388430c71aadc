//! Which VMs run on this host: QEMU processes in `/proc` that are [trusted](super::trust).
//!
//! A VM that was found stays until it is proven to have ended or to be another program. That it
//! could not be read, or was not listed, proves neither: a host short of descriptors or memory
//! must not lose sight of its VMs.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use ebb_core::sample::VmId;

use super::cgroup::{Mount, parse_mountinfo, read_mounts};
use super::process::{Life, Stat, is_named, life, processes, read_stat};
use super::qemu::{QemuProcess, QmpAddress, parse_cmdline, preloaded};
use super::trust::{ProcessTrust, TrustRules, Uids, is_qemu};
use crate::background_look::BackgroundLook;
use crate::root::{ProbeError, Probed, Root};

/// Most refused processes, and problems, that are told of.
const MAX_REFUSED: usize = 64;
const MAX_PROBLEMS: usize = 16;

#[derive(Debug, Default)]
pub struct Scan {
    /// The VMs, sorted by id: also those that could not be read this time.
    pub found: Vec<QemuProcess>,
    /// VMs of the last scan that have ended or are another program now, which was seen.
    pub gone: Vec<VmId>,
    /// Processes that are called QEMU and are not taken for VMs, by pid, and why: what to do if
    /// it is a VM. A command line is its process's own word, and to read it waits for its mmap
    /// lock: so none of them has a name.
    pub refused: Vec<(u32, String)>,
    /// What could not be read, as (file, reason).
    pub problems: Vec<(String, String)>,
}

impl Scan {
    /// Why a process could not be read, where one could not.
    pub fn unread(&self) -> Option<String> {
        let (file, why) = self.problems.iter().find(|(file, _)| file.starts_with("/proc"))?;
        Some(format!("{file}: {why}"))
    }
}

/// A process that is not trusted: told of where it is called QEMU.
fn stranger(root: &Root, pid: u32, comm: &str, why: String) -> Program {
    let exe = root.read_link(format!("/proc/{pid}/exe")).ok().flatten();
    let called = is_qemu(comm) || exe.is_some_and(|path| is_qemu(&path.to_string_lossy()));
    if called { Program::Refused(why) } else { Program::Other }
}

pub fn discover(root: &Root, trust: &TrustRules) -> Result<Scan, ProbeError> {
    Scanner::new(trust.clone()).scan(root, &HashSet::new(), |_| false)
}

/// Looks at one process that was a VM when Ebb took memory from it: it is one, whatever
/// `trust` has come to be since.
pub fn inspect_owed(root: &Root, id: VmId) -> Result<Program, ProbeError> {
    inspect(root, &TrustRules::default(), &HashSet::from([id]), id.pid)
}

/// Looks at one process. See [`Scanner::scan`] for `owed`.
fn inspect(
    root: &Root,
    trust: &TrustRules,
    owed: &HashSet<VmId>,
    pid: u32,
) -> Result<Program, ProbeError> {
    let mut scanner = Scanner { owed: owed.clone(), ..Scanner::new(trust.clone()) };
    Ok(match scanner.look(root, pid, None)? {
        Change::New(seen) => seen.program,
        Change::Same | Change::Gone => Program::Other,
    })
}

/// The VM that serves a socket which the configuration names.
pub fn serving(
    root: &Root,
    trust: &TrustRules,
    owed: &HashSet<VmId>,
    pid: u32,
) -> Result<QemuProcess, String> {
    match inspect(root, trust, owed, pid).map_err(|e| e.to_string())? {
        Program::Vm(process) => return Ok(*process),
        Program::Refused(why) => return Err(refused(pid, &why)),
        Program::Other => {}
    }
    plain_process(root, trust, pid)
}

/// A QMP server that does not look like QEMU on its command line: its program must be.
fn plain_process(root: &Root, trust: &TrustRules, pid: u32) -> Result<QemuProcess, String> {
    let uids = trust.uids(root).map_err(|e| e.to_string())?;
    match trust.check(root, &uids, pid).map_err(|e| e.to_string())? {
        ProcessTrust::Trusted => {}
        ProcessTrust::Refused(why) => return Err(refused(pid, &why)),
        ProcessTrust::Gone => return Err("the process behind it has ended".into()),
    }
    let stat = read_stat(root, pid).map_err(|e| e.to_string())?;
    let start = stat.ok_or("the process behind it has ended")?.start;
    let plain = QemuProcess::plain(VmId { pid, start }, format!("pid-{pid}"));
    // Its name comes from the configuration.
    Ok(QemuProcess { name: String::new(), ..plain })
}

fn refused(pid: u32, why: &str) -> String {
    format!("process {pid} behind it is not taken for a VM: {why}")
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    Vm(Box<QemuProcess>),
    /// It is called QEMU and not trusted: why, and what to do if it is a VM.
    Refused(String),
    /// Something else, or it has ended.
    Other,
}

/// Scans `/proc` again and again. Reading a command line takes the process's
/// mmap lock, which on a host short of memory may be held for long, and by a process that means
/// harm for ever; so only that of a process which is trusted is read, beside the loop, and again
/// only when `stat` (no lock) shows another program. Most processes are no VMs and stay what they
/// are: of those only the name is read, as `stat` costs several times as much, and of the kernel's
/// threads nothing, but for every `THOROUGH`th scan, which also finds a VM with the pid and the name
/// of a process that has ended, or with the pid of a kernel's thread.
#[derive(Debug, Default)]
pub struct Scanner {
    trust: TrustRules,
    uids: Option<Uids>,
    owed: HashSet<VmId>,
    known: HashMap<u32, KnownProcess>,
    scans: u32,
    /// Command lines that were not there in time.
    looks: HashMap<VmId, BackgroundLook<Result<Words, ProbeError>>>,
    /// Of this scan.
    late: u32,
}

/// What a process was started with: its command line and, where it can be read, its environment.
type Words = (Vec<u8>, Option<Vec<u8>>);

/// A scan waits for this time for a command line, and for those of no more processes.
const PATIENCE: Duration = Duration::from_millis(50);
const WAITS_MOST: u32 = 4;
/// Command lines that are read at a time: a thread hangs with each process that keeps its lock.
const LOOKS_MOST: usize = 64;
static LOOKS: AtomicUsize = AtomicUsize::new(0);

const THOROUGH: u32 = 15;

/// A process as it was last seen.
#[derive(Debug)]
struct KnownProcess {
    start: u64,
    comm: String,
    is_kernels: bool,
    program: Program,
}

impl KnownProcess {
    fn vm(&self) -> Option<VmId> {
        match &self.program {
            Program::Vm(process) => Some(process.id),
            _ => None,
        }
    }
}

/// What a look at a process shows beside what is known of it.
enum Change {
    Same,
    New(KnownProcess),
    Gone,
}

impl Scanner {
    pub fn new(trust: TrustRules) -> Scanner {
        Scanner { trust, ..Scanner::default() }
    }

    /// Processes that vanish meanwhile are passed over; what cannot be read
    /// becomes a problem of the scan, and a VM stays what it was. Those in `owed` are VMs
    /// whatever the configuration has come to say of their users. VMs that are known to live
    /// anyway (`lives`) are looked at in every [`THOROUGH`]th scan only.
    pub fn scan(
        &mut self,
        root: &Root,
        owed: &HashSet<VmId>,
        lives: impl Fn(VmId) -> bool,
    ) -> Result<Scan, ProbeError> {
        self.owed.clone_from(owed);
        let pids = processes(root)?;
        self.scans = (self.scans + 1) % THOROUGH;
        self.late = 0;
        self.looks.retain(|id, _| life(root, *id) != Life::Ended);
        let mut scan = Scan::default();
        let mut seen = HashMap::with_capacity(self.known.len());
        let before: Vec<VmId> = self.known.values().filter_map(KnownProcess::vm).collect();
        for pid in pids {
            let known = self.known.remove(&pid);
            let vm = known.as_ref().and_then(KnownProcess::vm);
            let change = match self.scans != 0 && vm.is_some_and(&lives) {
                true => Ok(Change::Same),
                false => self.look(root, pid, known.as_ref()),
            };
            let now = match change {
                Ok(Change::New(new)) => Some(new),
                Ok(Change::Same) => known,
                Err(e) => {
                    scan.problems.push((format!("/proc/{pid}"), e.to_string()));
                    known
                }
                Ok(Change::Gone) => known.filter(|k| may_live(root, k)),
            };
            seen.extend(now.map(|now| (pid, now)));
        }
        // Not listed.
        seen.extend(self.known.drain().filter(|(_, k)| may_live(root, k)));
        self.known = seen;
        self.tell(&mut scan, &before);
        Ok(scan)
    }

    fn tell(&self, scan: &mut Scan, before: &[VmId]) {
        for (pid, seen) in &self.known {
            match &seen.program {
                Program::Vm(process) => scan.found.push((**process).clone()),
                Program::Refused(why) => scan.refused.push((*pid, why.clone())),
                Program::Other => {}
            }
        }
        scan.found.sort_by_key(|p| p.id);
        make_names_unique(scan.found.iter_mut().collect());
        let there: HashSet<VmId> = scan.found.iter().map(|p| p.id).collect();
        scan.gone.extend(before.iter().filter(|id| !there.contains(id)));
        scan.refused.sort_unstable();
        scan.refused.truncate(MAX_REFUSED);
        let more = scan.problems.len().saturating_sub(MAX_PROBLEMS);
        if more > 0 {
            scan.problems.truncate(MAX_PROBLEMS);
            scan.problems.push(("/proc".into(), format!("{more} more processes cannot be read")));
        }
        let unknown = self.uids.iter().flat_map(|u| &u.unknown);
        scan.problems.extend(
            unknown.map(|u| ("host.users".into(), format!("no user “{u}” in /etc/passwd"))),
        );
    }

    /// Whether a process has the name that it had when it was seen to be no VM.
    fn is_still_none(&self, root: &Root, pid: u32, known: &KnownProcess) -> bool {
        if self.scans == 0 || known.vm().is_some() || is_qemu(&known.comm) {
            return false;
        }
        known.is_kernels || is_named(root, pid, &known.comm)
    }

    fn look(
        &mut self,
        root: &Root,
        pid: u32,
        known: Option<&KnownProcess>,
    ) -> Result<Change, ProbeError> {
        if known.is_some_and(|k| self.is_still_none(root, pid, k)) {
            return Ok(Change::Same);
        }
        let Some(Stat { state, start, comm, is_kernels, .. }) = read_stat(root, pid)? else {
            return Ok(Change::Gone);
        };
        if matches!(state, 'Z' | 'X') {
            return Ok(Change::Gone);
        }
        let known = known.filter(|k| k.start == start);
        if known.is_some_and(|k| k.comm == comm && self.stays(pid, k)) {
            return Ok(Change::Same);
        }
        let (id, was_vm) = (VmId { pid, start }, known.is_some_and(|k| k.vm().is_some()));
        let trust = match self.trust_of(root, id) {
            // Some processes are closed even to root. Only one that is called QEMU is told of.
            Err(e) if e.is_denied() && !was_vm && !is_qemu(&comm) => {
                return Ok(Change::New(KnownProcess {
                    start,
                    comm,
                    is_kernels,
                    program: Program::Other,
                }));
            }
            trust => trust?,
        };
        let program = match trust {
            ProcessTrust::Gone if was_vm => return Ok(Change::Same),
            ProcessTrust::Gone => Program::Other,
            ProcessTrust::Refused(why) => stranger(root, pid, &comm, why),
            ProcessTrust::Trusted => {
                let (line, environ) = self.words(root, id)?;
                // Between two programs, and just before its end, a process has none.
                if line.is_empty() && was_vm {
                    return Ok(Change::Same);
                }
                self.program(root, id, &line, environ)?
            }
        };
        Ok(Change::New(KnownProcess { start, comm, is_kernels, program }))
    }

    /// Whether a process of the same name is still the same program.
    fn stays(&self, pid: u32, known: &KnownProcess) -> bool {
        match known.program {
            Program::Vm(_) => true,
            // What was refused may be allowed by now, but is asked for rarely: there may be many.
            Program::Refused(_) => {
                let id = VmId { pid, start: known.start };
                self.scans != 0 && !self.owed.contains(&id)
            }
            // A wrapper script has the name of the QEMU that it becomes.
            Program::Other => !is_qemu(&known.comm),
        }
    }

    /// An error where they are not there in time: they are asked for again.
    fn words(&mut self, root: &Root, id: VmId) -> Result<Words, ProbeError> {
        let path = format!("/proc/{}/cmdline", id.pid);
        let late = || ProbeError::Io {
            path: root.path(&path),
            error: io::Error::new(
                io::ErrorKind::TimedOut,
                "it is not read: the process holds its memory's lock",
            ),
        };
        let begins = self.looks.get(&id).is_none_or(BackgroundLook::is_idle);
        if begins && LOOKS.load(Relaxed) >= LOOKS_MOST {
            return Err(late());
        }
        let (theirs, file) = (root.clone(), path.clone());
        let look = move || {
            LOOKS.fetch_add(1, Relaxed);
            let read = || {
                let line = theirs.read_bytes(file)?.unwrap_or_default();
                let environ = lasting(theirs.read_bytes(format!("/proc/{}/environ", id.pid)))?;
                Ok((line, environ))
            };
            let words = read();
            LOOKS.fetch_sub(1, Relaxed);
            words
        };
        let patience = if self.late < WAITS_MOST { PATIENCE } else { Duration::ZERO };
        let Some(words) = self.looks.entry(id).or_default().look(look, patience) else {
            self.late += 1;
            return Err(late());
        };
        self.looks.remove(&id);
        words
    }

    fn program(
        &mut self,
        root: &Root,
        id: VmId,
        line: &[u8],
        environ: Option<Vec<u8>>,
    ) -> Result<Program, ProbeError> {
        let pid = id.pid;
        let args = parse_cmdline(line).filter(|args| !args.is_probe);
        let Some(mut args) = args else { return Ok(Program::Other) };
        let name = args.name.clone().unwrap_or_else(|| format!("pid-{pid}"));
        // As the process sees them, where that can be read: a container has others.
        let theirs = || root.parse(format!("/proc/{pid}/mountinfo"), parse_mountinfo);
        let mounts = match args.mem_paths.is_empty() {
            true => None,
            false => match theirs() {
                Ok(Some(mounts)) => Some(mounts),
                _ => read_mounts(root)?,
            },
        };
        let huge = mounts.iter().flatten().filter(|mount| mount.kind == "hugetlbfs");
        let on_huge = |mount: &Mount| {
            args.mem_paths.iter().any(|path| Path::new(path).starts_with(&mount.point))
        };
        args.hugepages = args.hugepages || huge.into_iter().any(on_huge);
        if args.agent.is_none() {
            args.agent = environ.and_then(|environ| preloaded(&environ));
        }
        if let Some(path) = args.agent.take() {
            args.agent = place(root, pid, vec![path])?.ok().and_then(|mut paths| paths.pop());
        }
        args.qmp = absolute(root, pid, args.qmp)?;
        Ok(Program::Vm(Box::new(QemuProcess { args, ..QemuProcess::plain(id, name) })))
    }

    fn trust_of(&mut self, root: &Root, id: VmId) -> Result<ProcessTrust, ProbeError> {
        if self.owed.contains(&id) {
            return Ok(ProcessTrust::Trusted);
        }
        // Users may be added while Ebb runs.
        if self.uids.is_none() || self.scans == 0 {
            self.uids = Some(self.trust.uids(root)?);
        }
        let Some(uids) = &self.uids else { return Ok(ProcessTrust::Gone) };
        self.trust.check(root, uids, id.pid)
    }
}

/// Whether what is known of a process may still hold, though it was not to be read: of a VM,
/// until it is proven that it has ended.
fn may_live(root: &Root, known: &KnownProcess) -> bool {
    known.vm().is_some_and(|id| life(root, id) != Life::Ended)
}

/// What will not be otherwise at another try (no permission, no format) is `None`.
fn lasting<T>(read: Probed<T>) -> Probed<T> {
    match read {
        Err(e @ ProbeError::Io { .. }) if !e.is_denied() => Err(e),
        Err(_) => Ok(None),
        read => read,
    }
}

/// Socket paths as this process can open them.
fn absolute(root: &Root, pid: u32, qmp: QmpAddress) -> Result<QmpAddress, ProbeError> {
    let QmpAddress::Paths(paths) = qmp else { return Ok(qmp) };
    let first = paths[0].display().to_string();
    Ok(match place(root, pid, paths)? {
        Ok(paths) => QmpAddress::Paths(paths),
        Err(why) => {
            QmpAddress::None { why: format!("QMP socket “{first}” is relative: {why}") }
        }
    })
}

/// Relative paths start at QEMU's working directory, and a QEMU in a mount namespace of its
/// own may have its own `/`.
fn place(
    root: &Root,
    pid: u32,
    paths: Vec<PathBuf>,
) -> Result<Result<Vec<PathBuf>, String>, ProbeError> {
    let link = |name: &str| root.read_link(format!("/proc/{name}"));
    let theirs = lasting(link(&format!("{pid}/ns/mnt")))?;
    let ours = lasting(link("self/ns/mnt"))?;
    let contained = theirs.is_some() && ours.is_some() && theirs != ours;
    let mut cwd = PathBuf::from("/");
    if paths.iter().any(|p| p.is_relative()) {
        cwd = match link(&format!("{pid}/cwd")) {
            Ok(Some(cwd)) => cwd,
            Ok(None) => return Ok(Err(format!("/proc/{pid}/cwd is not there"))),
            Err(e) if e.is_denied() => return Ok(Err(e.to_string())),
            Err(e) => return Err(e),
        };
    }
    let place = |path: PathBuf| {
        let path = cwd.join(path);
        if contained { Root::at(format!("/proc/{pid}/root")).path(path) } else { path }
    };
    Ok(Ok(paths.into_iter().map(place).collect()))
}

/// The longest-running of several VMs of one given name has it; others get `NAME-PID`. When
/// it ends, the next has it.
pub fn make_names_unique(mut found: Vec<&mut QemuProcess>) {
    found.sort_by_key(|p| (p.id.start, p.id.pid));
    let mut taken: HashSet<String> = found.iter().map(|p| p.given.clone()).collect();
    let mut first: HashSet<&str> = HashSet::new();
    for QemuProcess { id, given, name, .. } in found {
        name.clone_from(given);
        if first.insert(given) {
            continue;
        }
        while !taken.insert(name.clone()) {
            *name = format!("{name}-{}", id.pid);
        }
    }
}

#[cfg(test)]
mod tests;
