//! Which processes are QEMU, and what their command lines tell: name, QMP
//! socket, balloon, and what forbids to touch the memory.
//!
//! A command line is what its user typed: any bytes, any length up to the read
//! limit. Only what starts at `-option` is believed; what is not understood is
//! passed over. Source: QEMU `qemu-options.hx`, `util/qemu-option.c` (`,,` is a
//! comma), `chardev/char.c`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use ebb_core::sample::VmId;
use ebb_core::wire::OTHERS_DISCARD;
use serde_json::Value;

use super::cgroup::read_mounts;
use super::process::{Stat, read_stat};
use crate::root::{ProbeError, Root};

/// Longest name kept; longer ones are cut.
const MAX_NAME: usize = 100;
/// Why the agent must not touch a VM that shares its RAM with such a process.
const WRITES_UNSEEN: &str = "a vhost-user device writes to guest RAM unseen by userfaultfd";
/// Most QMP sockets of one VM that are tried.
const MAX_SOCKETS: usize = 8;

/// Where QMP is to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QmpAddress {
    /// Server sockets, in the order in which to try them: those with `ebb` in
    /// their file name first. Never empty.
    Paths(Vec<PathBuf>),
    /// None that Ebb could use.
    None {
        /// The reason, for people, with what to do.
        why: String,
    },
}

/// What a QEMU command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuArgs {
    /// `-name`.
    pub name: Option<String>,
    /// `-uuid`.
    pub uuid: Option<String>,
    /// Monitor sockets as written, perhaps relative.
    pub qmp: QmpAddress,
    /// A virtio-balloon device.
    pub balloon: bool,
    /// A VFIO or vhost-vDPA device: guest memory is pinned.
    pub passthrough: bool,
    /// RAM in huge pages, as far as the options alone tell.
    pub hugetlb: bool,
    /// Files that RAM lives in.
    pub mem_paths: Vec<String>,
    /// `-incoming`: started to receive a migration.
    pub incoming: bool,
    /// Socket of Ebb's agent: `-plugin file=…libebb_vmm.so,socket=PATH`.
    pub agent: Option<PathBuf>,
    /// What forbids the agent to touch this VM, for people.
    pub objections: Vec<String>,
}

/// A running QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuProcess {
    /// Which process.
    pub id: VmId,
    /// Name, unique among those found together.
    pub name: String,
    /// `-uuid`.
    pub uuid: Option<String>,
    /// Monitor sockets, absolute.
    pub qmp: QmpAddress,
    /// A virtio-balloon device is on the command line.
    pub balloon: bool,
    /// A VFIO or vhost-vDPA device is: guest memory is pinned.
    pub passthrough: bool,
    /// RAM lies in huge pages.
    pub hugepages: bool,
    /// Started to receive a migration.
    pub incoming: bool,
    /// Socket of Ebb's agent inside it, absolute.
    pub agent: Option<PathBuf>,
    /// What forbids the agent to touch this VM, for people.
    pub objections: Vec<String>,
}

/// What a scan found.
#[derive(Debug, Default)]
pub struct Scan {
    /// QEMU processes, sorted by id.
    pub found: Vec<QemuProcess>,
    /// What could not be read, as (file, reason).
    pub problems: Vec<(String, String)>,
}

/// Scans `/proc` once; see [`Scanner::scan`].
pub fn discover(root: &Root) -> Result<Scan, ProbeError> {
    Scanner::default().scan(root)
}

/// Scans `/proc` again and again. Reading a command line takes the process's
/// mmap lock, which on a host short of memory may be held for long; so each is
/// read once, and again only when `stat` (no lock) shows another program. Most
/// processes are no VMs and stay what they are: of those only the name is read, as
/// `stat` costs several times as much, but for every [`THOROUGH`]th scan, which
/// also finds a VM with the pid and the name of a process that has ended.
#[derive(Debug, Default)]
pub struct Scanner {
    seen: HashMap<u32, Seen>,
    hugetlbfs: Option<Vec<String>>,
    scans: u32,
}

/// See [`Scanner`].
const THOROUGH: u32 = 15;

#[derive(Debug)]
struct Seen {
    start: u64,
    comm: String,
    qemu: Option<QemuProcess>,
}

impl Scanner {
    /// Processes that vanish meanwhile are passed over; what may not be read
    /// becomes a problem of the scan.
    pub fn scan(&mut self, root: &Root) -> Result<Scan, ProbeError> {
        let path = root.path("/proc");
        let error = |error| ProbeError::Io { path: path.clone(), error };
        let mut scan = Scan::default();
        let mut seen = HashMap::new();
        self.scans = (self.scans + 1) % THOROUGH;
        for entry in std::fs::read_dir(&path).map_err(error)? {
            let Ok(entry) = entry else { continue };
            let pid = entry.file_name().to_str().and_then(|n| n.parse().ok());
            let Some(pid) = pid else { continue };
            match self.look(root, pid) {
                Ok(Some(process)) => drop(seen.insert(pid, process)),
                Ok(None) => {}
                Err(e) => scan.problems.push((format!("/proc/{pid}"), e.to_string())),
            }
        }
        scan.found = seen.values().filter_map(|s| s.qemu.clone()).collect();
        self.seen = seen;
        make_names_unique(&mut scan.found);
        Ok(scan)
    }

    /// Whether a process has the name that it had when it was seen to be no VM.
    fn is_still_none(&self, root: &Root, pid: u32) -> bool {
        let none = |s: &&Seen| s.qemu.is_none() && !is_qemu(&s.comm);
        let Some(known) = self.seen.get(&pid).filter(none) else { return false };
        let comm = root.read(format!("/proc/{pid}/comm")).ok().flatten();
        self.scans != 0 && comm.is_some_and(|c| c.trim_end_matches('\n') == known.comm)
    }

    fn look(&mut self, root: &Root, pid: u32) -> Result<Option<Seen>, ProbeError> {
        if self.is_still_none(root, pid) {
            return Ok(self.seen.remove(&pid));
        }
        let Some(Stat { state, start, comm, .. }) = read_stat(root, pid)? else { return Ok(None) };
        if matches!(state, 'Z' | 'X') {
            return Ok(None);
        }
        if let Some(known) = self.seen.remove(&pid)
            && (known.start, &known.comm) == (start, &comm)
            // A wrapper script has the name of the QEMU that it becomes.
            && (known.qemu.is_some() || !is_qemu(&comm))
        {
            return Ok(Some(known));
        }
        let qemu = self.inspect(root, VmId { pid, start })?;
        Ok(Some(Seen { start, comm, qemu }))
    }

    fn inspect(&mut self, root: &Root, id: VmId) -> Result<Option<QemuProcess>, ProbeError> {
        let pid = id.pid;
        let Some(line) = root.read_bytes(format!("/proc/{pid}/cmdline"))? else { return Ok(None) };
        let Some(args) = parse_cmdline(&line) else { return Ok(None) };
        if self.hugetlbfs.is_none() && !args.mem_paths.is_empty() {
            let mounts = read_mounts(root)?.unwrap_or_default();
            let huge = mounts.into_iter().filter(|m| m.kind == "hugetlbfs").map(|m| m.point);
            self.hugetlbfs = Some(huge.collect());
        }
        let on_hugetlbfs = |path: &String| {
            self.hugetlbfs.iter().flatten().any(|mount| Path::new(path).starts_with(mount))
        };
        Ok(Some(QemuProcess {
            id,
            name: args.name.unwrap_or_else(|| format!("pid-{pid}")),
            uuid: args.uuid,
            qmp: absolute(root, pid, args.qmp),
            balloon: args.balloon,
            passthrough: args.passthrough,
            hugepages: args.hugetlb || args.mem_paths.iter().any(on_hugetlbfs),
            incoming: args.incoming,
            agent: args
                .agent
                .or_else(|| preloaded(&root.read_bytes(format!("/proc/{pid}/environ")).ok()??))
                .and_then(|path| place(root, pid, vec![path]).ok()?.pop()),
            objections: args.objections,
        }))
    }
}

/// Looks at one process; `None` where it is not a live QEMU.
pub fn inspect(root: &Root, pid: u32) -> Result<Option<QemuProcess>, ProbeError> {
    Ok(Scanner::default().look(root, pid)?.and_then(|seen| seen.qemu))
}

/// Socket paths as this process can open them.
fn absolute(root: &Root, pid: u32, qmp: QmpAddress) -> QmpAddress {
    let QmpAddress::Paths(paths) = qmp else { return qmp };
    let first = paths[0].display().to_string();
    match place(root, pid, paths) {
        Ok(paths) => QmpAddress::Paths(paths),
        Err(e) => {
            let why = format!("QMP socket “{first}” is relative and /proc/{pid}/cwd says: {e}");
            QmpAddress::None { why }
        }
    }
}

/// Relative paths start at QEMU's working directory, and a QEMU in a container
/// has its own `/`.
fn place(root: &Root, pid: u32, paths: Vec<PathBuf>) -> std::io::Result<Vec<PathBuf>> {
    let link = |name: String| std::fs::read_link(root.path(name));
    let (theirs, ours) = (link(format!("/proc/{pid}/ns/mnt")), link("/proc/self/ns/mnt".into()));
    let contained = matches!((theirs, ours), (Ok(a), Ok(b)) if a != b);
    let cwd = if paths.iter().any(|p| p.is_relative()) {
        link(format!("/proc/{pid}/cwd"))?
    } else {
        PathBuf::from("/")
    };
    let place = |path: PathBuf| {
        let path = cwd.join(path);
        if contained { Root::at(format!("/proc/{pid}/root")).path(path) } else { path }
    };
    Ok(paths.into_iter().map(place).collect())
}

/// The longest-running of several VMs of one name keeps it; others get
/// `name-PID`. Sorts by id.
pub fn make_names_unique(found: &mut [QemuProcess]) {
    found.sort_by_key(|p| (p.id.start, p.id.pid));
    let mut taken = HashSet::new();
    for p in found.iter_mut() {
        while !taken.insert(p.name.clone()) {
            p.name = format!("{}-{}", p.name, p.id.pid);
        }
    }
    found.sort_by_key(|p| p.id);
}

/// Parses `/proc/PID/cmdline` (arguments end in NUL). `None` where the program
/// is not `qemu-system…`, `qemu-kvm` or `kvm`.
pub fn parse_cmdline(bytes: &[u8]) -> Option<QemuArgs> {
    let text = String::from_utf8_lossy(bytes.strip_suffix(b"\0").unwrap_or(bytes));
    let mut args = text.split('\0');
    let program = args.next()?.rsplit('/').next()?;
    if !is_qemu(program) {
        return None;
    }
    let mut found = QemuArgs {
        name: None,
        uuid: None,
        qmp: QmpAddress::None { why: String::new() },
        balloon: false,
        passthrough: false,
        hugetlb: false,
        mem_paths: Vec::new(),
        incoming: false,
        agent: None,
        objections: Vec::new(),
    };
    let mut monitors = Monitors::default();
    while let Some(arg) = args.next() {
        let Some(option) = arg.strip_prefix('-') else { continue };
        let option = option.strip_prefix('-').unwrap_or(option);
        if OPTIONS.contains(&option)
            && let Some(value) = args.next()
        {
            found.option(option, value, &mut monitors);
        }
    }
    found.qmp = monitors.address();
    Some(found)
}

/// Socket of an agent that was not loaded by `-plugin`, in what a process was
/// started with (`/proc/PID/environ`): `LD_PRELOAD` names our library, and
/// `EBB_AGENT_SOCKET` the path.
pub fn preloaded(environ: &[u8]) -> Option<PathBuf> {
    let text = String::from_utf8_lossy(environ);
    let get = |name: &str| text.split('\0').find_map(|v| v.strip_prefix(name)?.strip_prefix('='));
    let ours = |file: &str| file.rsplit('/').next().is_some_and(|f| f.starts_with("libebb_vmm"));
    let loaded = get("LD_PRELOAD")?.split([':', ' ']).any(ours);
    get("EBB_AGENT_SOCKET").filter(|path| loaded && !path.is_empty()).map(PathBuf::from)
}

fn is_qemu(program: &str) -> bool {
    program.starts_with("qemu-system") || program == "qemu-kvm" || program == "kvm"
}

/// The options looked at, and one whose value may look like an option.
const OPTIONS: [&str; 17] = [
    "name",
    "uuid",
    "qmp",
    "qmp-pretty",
    "chardev",
    "mon",
    "device",
    "object",
    "netdev",
    "blockdev",
    "mem-path",
    "incoming",
    "balloon",
    "plugin",
    "bios",
    "drive",
    "append",
];

impl QemuArgs {
    fn option(&mut self, option: &str, value: &str, monitors: &mut Monitors) {
        match option {
            "name" => {
                let name = Options::parse(value, "guest").get("guest").unwrap_or_default();
                let name: String = name.chars().take(MAX_NAME).collect();
                let name = name.replace(|c: char| c.is_control(), "?");
                self.name = Some(name).filter(|n| !n.is_empty());
            }
            "uuid" => self.uuid = Some(value.chars().take(64).collect()),
            "qmp" | "qmp-pretty" => monitors.qmp(value),
            "chardev" => monitors.chardevs.push(Options::parse(value, "backend")),
            "mon" => monitors.mon(&Options::parse(value, "chardev")),
            "device" => {
                let driver = Options::parse(value, "driver").get("driver").unwrap_or_default();
                self.balloon |= driver.starts_with("virtio-balloon");
                self.passthrough |= driver.starts_with("vfio-") || driver.starts_with("vhost-vdpa");
                if driver.starts_with("virtio-mem") {
                    self.objections.push(OTHERS_DISCARD.into());
                }
                if driver.starts_with("vhost-user") {
                    self.objections.push(WRITES_UNSEEN.into());
                }
                self.objections.truncate(MAX_SOCKETS);
            }
            "balloon" => self.balloon |= value.starts_with("virtio"),
            "object" => {
                let options = Options::parse(value, "qom-type");
                self.hugetlb |= options.is_on("hugetlb");
                let kind = options.get("qom-type").unwrap_or_default();
                if ["sev-", "tdx-", "s390-pv-"].iter().any(|p| kind.starts_with(p)) {
                    self.objections.push(format!("guest memory is encrypted ({kind})"));
                }
                self.mem_paths.extend(options.get("mem-path"));
            }
            "netdev" => self.vdpa(value, "type"),
            "blockdev" => self.vdpa(value, "driver"),
            "mem-path" => self.mem_paths.push(value.to_owned()),
            "incoming" => self.incoming = true,
            "plugin" => {
                let options = Options::parse(value, "file");
                let file = options.get("file").unwrap_or_default();
                if file.rsplit('/').next().is_some_and(|f| f.starts_with("libebb_vmm")) {
                    self.agent = options.get("socket").map(PathBuf::from);
                }
            }
            // The tripwire relies on firmware that writes to page 0 after a reset.
            "bios" => self.firmware(value),
            "drive" => {
                let options = Options::parse(value, "file");
                if options.get("if").as_deref() == Some("pflash") {
                    self.firmware(&options.get("file").unwrap_or_default());
                }
            }
            _ => {}
        }
        self.mem_paths.truncate(MAX_SOCKETS);
    }

    fn firmware(&mut self, file: &str) {
        let name: String = file.rsplit('/').next().unwrap_or(file).chars().take(60).collect();
        if !["bios", "seabios", "qboot"].iter().any(|known| name.starts_with(known)) {
            self.objections.push(format!("firmware “{name}” is not known to write to page 0"));
        }
        self.objections.truncate(MAX_SOCKETS);
    }

    fn vdpa(&mut self, value: &str, key: &'static str) {
        let kind = Options::parse(value, key).get(key).unwrap_or_default();
        self.passthrough |= kind.contains("vhost-vdpa");
        if kind.contains("vhost-user") {
            self.objections.push(WRITES_UNSEEN.into());
            self.objections.truncate(MAX_SOCKETS);
        }
    }
}

/// `key=value,flag,…` or a JSON object, as QEMU takes either.
#[derive(Debug)]
enum Options {
    Pairs(Vec<(String, Option<String>)>),
    Json(Value),
}

impl Options {
    /// `implied` is the key of a first part that has none.
    fn parse(text: &str, implied: &str) -> Options {
        if text.starts_with('{') {
            return Options::Json(serde_json::from_str(text).unwrap_or(Value::Null));
        }
        let parts = split_commas(text).into_iter().enumerate();
        Options::Pairs(
            parts
                .map(|(i, part)| match part.split_once('=') {
                    Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                    None if i == 0 => (implied.to_owned(), Some(part)),
                    None => (part, None),
                })
                .collect(),
        )
    }

    /// The last value of a key; in JSON at any depth.
    fn get(&self, key: &str) -> Option<String> {
        match self {
            Options::Pairs(pairs) => {
                pairs.iter().rev().find(|(k, _)| k == key).and_then(|(_, v)| v.clone())
            }
            Options::Json(value) => match find_key(value, key)? {
                Value::String(s) => Some(s.clone()),
                Value::Bool(b) => Some(if *b { "on" } else { "off" }.to_owned()),
                Value::Number(n) => Some(n.to_string()),
                _ => None,
            },
        }
    }

    fn has(&self, key: &str) -> bool {
        match self {
            Options::Pairs(pairs) => pairs.iter().any(|(k, _)| k == key),
            Options::Json(value) => find_key(value, key).is_some(),
        }
    }

    /// `key`, `key=on`, `=yes`, `=true`, `=y`.
    fn is_on(&self, key: &str) -> bool {
        self.has(key) && !matches!(self.get(key).as_deref(), Some("off" | "no" | "false" | "n"))
    }
}

fn find_key<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    let map = value.as_object()?;
    map.get(key).filter(|v| !v.is_object()).or_else(|| map.values().find_map(|v| find_key(v, key)))
}

/// Splits at single commas; `,,` is a comma.
fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, parts.last_mut()) {
            (',', Some(part)) if chars.peek() == Some(&',') => {
                chars.next();
                part.push(',');
            }
            (',', _) => parts.push(String::new()),
            (c, Some(part)) => part.push(c),
            (_, None) => {}
        }
    }
    parts
}

/// Monitors as they come along the command line.
#[derive(Debug, Default)]
struct Monitors {
    chardevs: Vec<Options>,
    /// Chardev ids used by a control monitor.
    ids: Vec<String>,
    paths: Vec<PathBuf>,
    refused: Vec<String>,
}

impl Monitors {
    /// `-qmp unix:PATH,server=on` and the like.
    fn qmp(&mut self, value: &str) {
        if let Some(address) = value.strip_prefix("unix:") {
            self.socket(&Options::parse(address, "path"), "-qmp");
        } else if let Some(id) = value.strip_prefix("chardev:") {
            self.ids.push(id.to_owned());
        } else if value != "none" {
            let kind: String =
                value.split([':', ',']).next().unwrap_or("").chars().take(20).collect();
            self.refused.push(format!("its QMP is on “{kind}”, Ebb needs a Unix socket"));
        }
    }

    fn mon(&mut self, options: &Options) {
        if options.get("mode").as_deref() == Some("control") {
            self.ids.extend(options.get("chardev"));
        }
    }

    fn socket(&mut self, options: &Options, id: &str) {
        let refuse = if options.has("fd") {
            format!(
                "managed by libvirt (or alike): its monitor {id} is an inherited descriptor that \
                 only libvirt's end can use"
            )
        } else if !options.is_on("server") {
            format!("its monitor {id} connects out (no server=on)")
        } else {
            match options.get("path") {
                Some(path) if !path.is_empty() => return self.paths.push(path.into()),
                _ => format!("its monitor {id} is not on a Unix socket path"),
            }
        };
        self.refused.push(refuse);
    }

    fn address(mut self) -> QmpAddress {
        let chardevs = std::mem::take(&mut self.chardevs);
        for id in std::mem::take(&mut self.ids) {
            match chardevs.iter().find(|c| c.get("id").as_deref() == Some(&id)) {
                Some(c) => self.socket(c, &id),
                None => self.refused.push(format!("its monitor's chardev {id} is not to be found")),
            }
        }
        self.paths.dedup();
        self.paths.truncate(MAX_SOCKETS);
        let for_others =
            |p: &PathBuf| !p.file_name().is_some_and(|n| n.to_string_lossy().contains("ebb"));
        self.paths.sort_by_key(for_others);
        if !self.paths.is_empty() {
            return QmpAddress::Paths(self.paths);
        }
        let why = self.refused.first().cloned().unwrap_or("it was started without QMP".into());
        QmpAddress::None { why: format!("{why}; add -qmp unix:PATH,server=on,wait=off for Ebb") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn args(line: &[&str]) -> QemuArgs {
        let mut bytes = Vec::new();
        for arg in [&["/usr/bin/qemu-system-x86_64"], line].concat() {
            bytes.extend_from_slice(arg.as_bytes());
            bytes.push(0);
        }
        parse_cmdline(&bytes).unwrap()
    }

    fn paths(line: &[&str]) -> Vec<String> {
        match args(line).qmp {
            QmpAddress::Paths(p) => p.iter().map(|p| p.display().to_string()).collect(),
            QmpAddress::None { why } => vec![format!("none: {why}")],
        }
    }

    #[test]
    fn every_way_to_write_a_qmp_socket_is_understood() {
        let chardev = "socket,id=m0,path=/run/a.sock,server=on,wait=off";
        let json = r#"{"id":"m","backend":{"type":"socket","data":{"addr":{"type":"unix","data":{"path":"/j"}},"server":true}}}"#;
        for (line, expected) in [
            (vec!["-qmp", "unix:/run/a.sock,server=on,wait=off"], vec!["/run/a.sock"]),
            (vec!["--qmp", "unix:/run/a.sock,server,nowait"], vec!["/run/a.sock"]),
            (vec!["-qmp-pretty", "unix:a,,b.sock,server"], vec!["a,b.sock"]),
            (vec!["-qmp", "unix:path=/x,server=yes"], vec!["/x"]),
            (vec!["-chardev", chardev, "-mon", "chardev=m0,mode=control"], vec!["/run/a.sock"]),
            (vec!["-mon", "m0,mode=control,pretty=on", "-chardev", chardev], vec!["/run/a.sock"]),
            (vec!["-qmp", "chardev:m0", "-chardev", chardev], vec!["/run/a.sock"]),
            (vec!["-chardev", json, "-mon", "chardev=m,mode=control"], vec!["/j"]),
            (
                vec!["-qmp", "unix:/mgmt,server", "-qmp", "unix:/run/ebb-1.sock,server"],
                vec!["/run/ebb-1.sock", "/mgmt"],
            ),
        ] {
            assert_eq!(paths(&line), expected, "{line:?}");
        }
    }

    #[test]
    fn a_monitor_that_cannot_be_used_has_its_reason() {
        let libvirt = ["-chardev", "socket,id=charmonitor,fd=29,server=on,wait=off"];
        let mon = ["-mon", "chardev=charmonitor,id=monitor,mode=control"];
        for (line, part) in [
            (vec![], "started without QMP"),
            (vec!["-qmp", "stdio"], "on “stdio”"),
            (vec!["-qmp", "tcp:localhost:4444,server"], "on “tcp”"),
            (vec!["-qmp", "unix:/x"], "connects out"),
            (vec!["-qmp", "unix:/x,server=off"], "connects out"),
            (vec!["-mon", "chardev=c,mode=control"], "chardev c is not"),
            (vec!["-chardev", "socket,id=c,path=/x,server", "-mon", "chardev=c"], "without QMP"),
            ([libvirt, mon].concat(), "managed by libvirt"),
            (vec!["-qmp"], "without QMP"),
        ] {
            let found = paths(&line);
            assert!(found[0].starts_with("none: ") && found[0].contains(part), "{found:?}");
        }
    }

    #[test]
    fn names_devices_and_backends_are_read() {
        let a = args(&[
            "-name",
            "guest=web,,1,debug-threads=on",
            "-uuid",
            "u-1",
            "-m",
            "64",
            "-device",
            r#"{"driver":"virtio-balloon-pci","id":"b0","deflate-on-oom":true}"#,
            "-netdev",
            "vhost-vdpa,id=n",
            "-object",
            "memory-backend-memfd,id=r,hugetlb=on,size=1G",
            "-incoming",
            "defer",
        ]);
        assert_eq!((a.name.as_deref(), a.uuid.as_deref()), (Some("web,1"), Some("u-1")));
        assert!(a.balloon && a.passthrough && a.hugetlb && a.incoming);
        let b = args(&["-name", "x", "-device", "vfio-pci,host=1", "-mem-path", "/huge/1"]);
        assert_eq!((b.name.as_deref(), b.balloon, b.passthrough), (Some("x"), false, true));
        assert_eq!(b.mem_paths, ["/huge/1"]);
        // The value of another option is not an option.
        assert_eq!(args(&["-append", "-name", "-name", "a\nb"]).name.as_deref(), Some("a?b"));
    }

    #[test]
    fn a_preloaded_agent_is_found_in_the_environment() {
        let find = |text: &str| preloaded(text.as_bytes());
        let socket = "EBB_AGENT_SOCKET=/run/a\0";
        for list in ["/usr/lib/ebb/libebb_vmm.so", "/x.so:/y/libebb_vmm.so", "a libebb_vmm.so"] {
            let text = format!("A=1\0LD_PRELOAD={list}\0{socket}");
            assert_eq!(find(&text), Some("/run/a".into()), "{list}");
        }
        for text in
            [socket, "LD_PRELOAD=/x/libebb_vmm.so\0", "LD_PRELOAD=/z.so\0EBB_AGENT_SOCKET=/a"]
        {
            assert_eq!(find(text), None, "{text}");
        }
        assert_eq!(find("LD_PRELOAD=libebb_vmm.so\0EBB_AGENT_SOCKET=\0"), None);
    }

    #[test]
    fn other_programs_are_not_qemu() {
        for line in ["", "\0", "sh\0-c\0qemu-system-x86_64\0", "/usr/bin/qemu-img\0", "kvm-ok\0"] {
            assert_eq!(parse_cmdline(line.as_bytes()), None, "{line:?}");
        }
        for line in ["kvm\0", "/usr/libexec/qemu-kvm\0-S\0", "qemu-system-aarch64"] {
            assert!(parse_cmdline(line.as_bytes()).is_some(), "{line:?}");
        }
    }

    #[test]
    fn a_scan_passes_over_what_is_not_a_live_qemu_and_makes_names_unique() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let put = |path: String, bytes: &[u8]| {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        let line = |socket: &str| {
            format!("qemu-kvm\0-name\0a\0-mem-path\0/huge/x\0-qmp\0unix:{socket},server\0")
        };
        let stat = |state, start| format!("1 (q) {state}{} {start} 0", " 0".repeat(18));
        put("/proc/self/mountinfo".into(), b"1 2 0:3 / /huge rw - hugetlbfs none rw\n");
        for (pid, cmdline, state, start) in [
            (10, line("/a"), 'S', 500),
            (11, line("rel"), 'S', 400),
            (12, line("/c"), 'Z', 1),
            (13, "bash\0".into(), 'S', 2),
        ] {
            put(format!("/proc/{pid}/cmdline"), cmdline.as_bytes());
            put(format!("/proc/{pid}/stat"), stat(state, start).as_bytes());
        }
        put("/proc/14/cmdline".into(), line("/d").as_bytes());
        std::os::unix::fs::symlink("/srv", root.path("/proc/11/cwd")).unwrap();
        let found = discover(&root).unwrap().found;
        assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a-10", "a"]);
        assert_eq!(found[0].id, VmId { pid: 10, start: 500 });
        assert_eq!(found[1].qmp, QmpAddress::Paths(vec!["/srv/rel".into()]));
        assert!(found[0].hugepages);
    }

    #[test]
    fn of_what_is_no_vm_only_the_name_is_read_again_but_now_and_then() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let proc = dir.path().join("proc/10");
        std::fs::create_dir_all(&proc).unwrap();
        let become_ = |comm: &str, start: u64, line: &str| {
            let stat = format!("10 ({comm}) S{} {start} 0", " 0".repeat(18));
            std::fs::write(proc.join("comm"), format!("{comm}\n")).unwrap();
            std::fs::write(proc.join("stat"), stat).unwrap();
            std::fs::write(proc.join("cmdline"), line).unwrap();
        };
        let mut scanner = Scanner::default();
        let mut found = || scanner.scan(&root).unwrap().found.len();
        become_("sh", 5, "sh\0");
        assert_eq!(found(), 0);
        become_("sh", 6, "kvm\0-name\0a\0");
        let scans = (0..THOROUGH).take_while(|_| found() == 0).count();
        assert!((1..THOROUGH as usize).contains(&scans), "{scans}");
        become_("sh", 7, "sh\0");
        assert_eq!(found(), 0, "a VM's stat is read each time");
        become_("kvm", 7, "kvm\0-name\0a\0");
        assert_eq!(found(), 1, "another name is looked at at once");
    }

    #[test]
    fn a_scanner_reads_a_command_line_again_only_when_the_program_changed() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        std::fs::create_dir_all(root.path("/proc/10")).unwrap();
        let mut scanner = Scanner::default();
        let mut scan = |comm: &str, start: u64, line: &str| {
            let stat = format!("10 ({comm}) S{} {start} 0", " 0".repeat(18));
            std::fs::write(root.path("/proc/10/stat"), stat).unwrap();
            std::fs::write(root.path("/proc/10/cmdline"), line).unwrap();
            scanner.scan(&root).unwrap().found.len()
        };
        assert_eq!(scan("sh", 5, "sh\0"), 0);
        assert_eq!(scan("sh", 5, "kvm\0"), 0, "not read again");
        assert_eq!(scan("kvm", 5, "sh\0"), 0);
        assert_eq!(scan("kvm", 5, "kvm\0"), 1, "a wrapper became QEMU");
        assert_eq!(scan("kvm", 5, "sh\0"), 1, "not read again");
        assert_eq!(scan("ifup", 5, "sh\0"), 0, "a child of QEMU became something else");
        assert_eq!(scan("ifup", 6, "kvm\0"), 1, "another process of that pid");
    }

    proptest! {
        #[test]
        fn any_command_line_is_safe(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut line = b"kvm\0-chardev\0".to_vec();
            line.extend(bytes);
            prop_assert!(parse_cmdline(&line).is_some());
        }
    }
}
