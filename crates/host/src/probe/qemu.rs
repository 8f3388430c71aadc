//! What QEMU's command lines tell: name, QMP socket, and what pins the memory.
//! What may write to it is asked of QEMU itself (`inventory`).
//!
//! A command line is what its user typed: any bytes, any length up to the read
//! limit. Only what starts at `-option` is believed; what is not understood is
//! passed over. Source: QEMU `qemu-options.hx`, `util/qemu-option.c` (`,,` is a
//! comma), `chardev/char.c`.

use std::path::PathBuf;

use ebb_core::config::{BY_UUID, by_uuid};
use ebb_core::sample::VmId;
use ebb_core::text::printable;
use serde_json::Value;

use super::managers::is_ebbs;
use super::trust::is_qemu;

/// Longest name kept, that of a file: libvirt's pid file has it. Longer ones are cut.
const MAX_NAME: usize = 255;
/// Longest uuid, file's name and object's type kept. Longer ones are cut.
const MAX_KIND: usize = 64;
/// Most QMP sockets of one VM that are tried.
const MAX_SOCKETS: usize = 8;

/// How a VM gets a QMP socket that Ebb can use.
const ADD: &str = "; add -qmp unix:/run/NAME-ebb.qmp,server=on,wait=off";

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

impl Default for QmpAddress {
    fn default() -> QmpAddress {
        QmpAddress::None { why: String::new() }
    }
}

/// What a command line says. Sockets are as written, perhaps relative.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QemuArgs {
    pub name: Option<String>,
    pub uuid: Option<String>,
    /// Monitor sockets.
    pub qmp: QmpAddress,
    /// A VFIO or vhost-vDPA device: guest memory is pinned.
    pub passthrough: bool,
    /// RAM in huge pages, as far as the options alone tell.
    pub hugepages: bool,
    /// Why else guest memory stays where it is: encrypted or locked.
    pub pinned: Option<String>,
    /// Some of its RAM in files is allocated at its start.
    pub preallocated: bool,
    /// Files that RAM lives in.
    pub mem_paths: Vec<String>,
    /// Those of them that hold the RAM itself (`share=on`): without it they are only read.
    pub shared_paths: Vec<String>,
    /// `-machine none`: a program asks this QEMU what it can do, and there is no VM.
    pub is_probe: bool,
    /// Socket of Ebb's agent: `-plugin file=…libebb_vmm.so,socket=PATH`.
    pub agent: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QemuProcess {
    pub id: VmId,
    /// Name, unique among those found together.
    pub name: String,
    /// `-name` as typed, `pid-N` without one, or what the configuration calls it.
    pub given: String,
    /// `-name` as typed, also where the configuration calls it otherwise.
    pub own_name: String,
    /// Its command line, with what else tells of the same: mounts of huge pages, an agent that was
    /// preloaded. Sockets are absolute.
    pub args: QemuArgs,
}

impl QemuProcess {
    /// One of which nothing but its name is known.
    pub fn plain(id: VmId, given: String) -> QemuProcess {
        let (name, own_name) = (given.clone(), given.clone());
        QemuProcess { id, name, given, own_name, ..QemuProcess::default() }
    }

    /// Names it as the configuration does that has its socket; one that has it by uuid
    /// must mean this VM.
    pub fn call(&mut self, section: String) -> Result<(), String> {
        if !section.starts_with(BY_UUID) {
            (self.name, self.given) = (section.clone(), section);
        } else if self.args.uuid.as_deref().map(by_uuid) != Some(section) {
            return Err(format!("the VM there ({}) has another uuid", self.given));
        }
        Ok(())
    }
}

/// Parses `/proc/PID/cmdline` (arguments end in NUL). `None` where the program
/// is not `qemu-system…`, `qemu-kvm` or `kvm`.
pub fn parse_cmdline(bytes: &[u8]) -> Option<QemuArgs> {
    let text = String::from_utf8_lossy(bytes.strip_suffix(b"\0").unwrap_or(bytes));
    let mut args = text.split('\0').peekable();
    if !is_qemu(args.next()?) {
        return None;
    }
    let mut found = QemuArgs::default();
    let mut monitors = Monitors::default();
    while let Some(arg) = args.next() {
        let Some(option) = arg.strip_prefix('-') else { continue };
        let option = option.strip_prefix('-').unwrap_or(option);
        // The one in use here that has no value.
        found.preallocated |= option == "mem-prealloc";
        // The value of one that is known may look like an option.
        if args.peek().is_some_and(|value| found.option(option, value, &mut monitors)) {
            args.next();
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

impl QemuArgs {
    /// Takes in an option with its value; `false` where the option is not known here.
    fn option(&mut self, option: &str, value: &str, monitors: &mut Monitors) -> bool {
        match option {
            "name" => {
                let name = Options::parse(value, "guest").get("guest").unwrap_or_default();
                self.name = Some(printable(&name, MAX_NAME)).filter(|n| !n.is_empty());
            }
            "uuid" => self.uuid = Some(printable(value, MAX_KIND)),
            "qmp" | "qmp-pretty" => monitors.qmp(value),
            "chardev" => monitors.chardevs.push(Options::parse(value, "backend")),
            "mon" => monitors.mon(&Options::parse(value, "chardev")),
            "device" => {
                let driver = Options::parse(value, "driver").get("driver").unwrap_or_default();
                self.passthrough |= driver.starts_with("vfio-") || driver.starts_with("vhost-vdpa");
            }
            "object" => {
                let options = Options::parse(value, "qom-type");
                self.hugepages |= options.is_on("hugetlb");
                let kind = options.get("qom-type").unwrap_or_default();
                if ["sev-", "tdx-", "s390-pv-"].iter().any(|p| kind.starts_with(p)) {
                    let kind = printable(&kind, MAX_KIND);
                    self.pinned = Some(format!("guest memory is encrypted ({kind})"));
                }
                // `shm_open`.
                let shm = || (kind == "memory-backend-shm").then(|| "/dev/shm".to_owned());
                if let Some(path) = options.get("mem-path").or_else(shm) {
                    self.preallocated |= options.is_on("prealloc");
                    if options.is_on("share") {
                        self.shared_paths.push(path.clone());
                    }
                    self.mem_paths.push(path);
                }
            }
            "netdev" => self.vdpa(value, "type"),
            "blockdev" => self.vdpa(value, "driver"),
            "machine" | "M" => {
                let options = Options::parse(value, "type");
                self.is_probe |= options.get("type").is_some_and(|t| t == "none");
                let key = ["confidential-guest-support", "memory-encryption"];
                if let Some(key) = key.iter().find(|key| options.get(key).is_some()) {
                    self.pin(format!("guest memory is encrypted ({key})"));
                }
            }
            "overcommit" => {
                if Options::parse(value, "mem-lock").is_on("mem-lock") {
                    self.pin("it is locked (-overcommit mem-lock)".into());
                }
            }
            // Until QEMU 3.1, and on unless it says off.
            "realtime" => {
                let options = Options::parse(value, "mlock");
                if !options.has("mlock") || options.is_on("mlock") {
                    self.pin("it is locked (-realtime mlock)".into());
                }
            }
            "mem-path" => self.mem_paths.push(value.to_owned()),
            "plugin" => {
                let options = Options::parse(value, "file");
                let file = options.get("file").unwrap_or_default();
                if file.rsplit('/').next().is_some_and(|f| f.starts_with("libebb_vmm")) {
                    self.agent = options.get("socket").map(PathBuf::from);
                }
            }
            // Words for the guest's kernel, which may look like options.
            "append" => {}
            _ => return false,
        }
        self.mem_paths.truncate(MAX_SOCKETS);
        self.shared_paths.truncate(MAX_SOCKETS);
        true
    }

    fn pin(&mut self, why: String) {
        self.pinned.get_or_insert(why);
    }

    fn vdpa(&mut self, value: &str, key: &'static str) {
        let kind = Options::parse(value, key).get(key).unwrap_or_default();
        self.passthrough |= kind.contains("vhost-vdpa");
    }
}

/// `key=value,flag,…` or a JSON object, as QEMU takes either: keys, each with a value where it has
/// one. Of several values of a key the last counts.
#[derive(Debug)]
pub(super) struct Options(Vec<(String, Option<String>)>);

impl Options {
    /// `implied` is the key of a first part that has none.
    pub(super) fn parse(text: &str, implied: &str) -> Options {
        if text.starts_with('{') {
            let mut all = Vec::new();
            flatten("", serde_json::from_str(text).unwrap_or_default(), &mut all);
            return Options(all);
        }
        let parts = split_commas(text).into_iter().enumerate();
        let pairs = parts.map(|(i, part)| match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None if i == 0 => (implied.to_owned(), Some(part)),
            None => (part, None),
        });
        Options(pairs.collect())
    }

    fn of<'a>(&'a self, key: &'a str) -> impl DoubleEndedIterator<Item = &'a Option<String>> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, value)| value)
    }

    pub(super) fn get(&self, key: &str) -> Option<String> {
        self.of(key).next_back()?.clone()
    }

    /// Each value of a key that may be there several times, or holds a list.
    pub(super) fn all(&self, key: &str) -> Vec<String> {
        self.of(key).flatten().cloned().collect()
    }

    fn has(&self, key: &str) -> bool {
        self.of(key).next().is_some()
    }

    /// `key`, `key=on`, `=yes`, `=true`, `=y`.
    fn is_on(&self, key: &str) -> bool {
        self.has(key) && !matches!(self.get(key).as_deref(), Some("off" | "no" | "false" | "n"))
    }
}

/// What JSON holds at any depth. Of a key that is there several times the outermost comes last, and
/// before it the first of those that are nested.
fn flatten(key: &str, value: Value, all: &mut Vec<(String, Option<String>)>) {
    let text = match value {
        Value::Object(map) => {
            let (inner, outer): (Vec<_>, Vec<_>) =
                map.into_iter().partition(|(_, v)| v.is_object());
            let both = inner.into_iter().rev().chain(outer);
            return both.for_each(|(key, value)| flatten(&key, value, all));
        }
        Value::Array(list) => return list.into_iter().for_each(|value| flatten(key, value, all)),
        Value::Null => return,
        Value::Bool(on) => if on { "on" } else { "off" }.to_owned(),
        Value::Number(n) => n.to_string(),
        Value::String(text) => text,
    };
    all.push((key.to_owned(), Some(text)));
}

/// Splits at single commas; `,,` is a comma.
fn split_commas(text: &str) -> Vec<String> {
    // NUL stands for it meanwhile: an argument ends at one, so it holds none.
    text.replace(",,", "\0").split(',').map(|part| part.replace('\0', ",")).collect()
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
            let kind = printable(value.split([':', ',']).next().unwrap_or(""), 20);
            self.refused.push(format!("its QMP is on “{kind}”, Ebb needs a Unix socket{ADD}"));
        }
    }

    fn mon(&mut self, options: &Options) {
        if options.get("mode").as_deref() == Some("control") {
            self.ids.extend(options.get("chardev"));
        }
    }

    fn socket(&mut self, options: &Options, id: &str) {
        if options.has("fd") {
            // Where libvirt starts QEMU, libvirt is the way.
            return self.refused.push(format!(
                "managed by libvirt (or alike): its monitor {id} is an inherited descriptor that \
                 only libvirt's end can use"
            ));
        }
        let refuse = match options.get("path") {
            _ if !options.is_on("server") => {
                format!("its monitor {id} connects out (no server=on)")
            }
            Some(path) if !path.is_empty() => return self.paths.push(path.into()),
            _ => format!("its monitor {id} is not on a Unix socket path"),
        };
        self.refused.push(refuse + ADD);
    }

    fn address(mut self) -> QmpAddress {
        let chardevs = std::mem::take(&mut self.chardevs);
        for id in std::mem::take(&mut self.ids) {
            match chardevs.iter().find(|c| c.get("id").as_deref() == Some(&id)) {
                Some(c) => self.socket(c, &id),
                None => {
                    self.refused.push(format!("its monitor's chardev {id} is not to be found{ADD}"))
                }
            }
        }
        self.paths.dedup();
        self.paths.truncate(MAX_SOCKETS);
        self.paths.sort_by_key(|path| !is_ebbs(path));
        if !self.paths.is_empty() {
            return QmpAddress::Paths(self.paths);
        }
        let without = || format!("it was started without QMP{ADD}");
        QmpAddress::None { why: self.refused.into_iter().next().unwrap_or_else(without) }
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
        ]);
        assert_eq!((a.name.as_deref(), a.uuid.as_deref()), (Some("web,1"), Some("u-1")));
        assert!(a.passthrough && a.hugepages && !a.is_probe);
        // KubeVirt's names have up to 127 characters, and are looked up whole.
        let long = "n".repeat(127);
        assert_eq!(args(&["-name", &long]).name, Some(long));
        assert!(args(&["-S", "-machine", "none,accel=kvm:tcg"]).is_probe);
        let b = args(&["-name", "x", "-device", "vfio-pci,host=1", "-mem-path", "/huge/1"]);
        assert_eq!((b.name.as_deref(), b.passthrough), (Some("x"), true));
        assert_eq!(b.mem_paths, ["/huge/1"]);
        // The value of another option is not an option.
        assert_eq!(args(&["-append", "-name", "-name", "a\nb"]).name.as_deref(), Some("a b"));
    }

    #[test]
    fn memory_that_is_encrypted_or_locked_is_pinned() {
        for (line, why) in [
            (vec!["-object", "sev-guest,id=s,cbitpos=51"], "encrypted (sev-guest)"),
            (vec!["-object", "sev-snp-guest,id=s"], "encrypted (sev-snp-guest)"),
            (vec!["-object", r#"{"qom-type":"tdx-guest","id":"t"}"#], "encrypted (tdx-guest)"),
            (vec!["-object", "s390-pv-guest,id=p"], "encrypted (s390-pv-guest)"),
            (vec!["-machine", "q35,confidential-guest-support=s"], "confidential-guest-support"),
            (vec!["-M", "pc,memory-encryption=s"], "memory-encryption"),
            (vec!["-overcommit", "mem-lock=on,cpu-pm=on"], "locked (-overcommit"),
            (vec!["-overcommit", "mem-lock=on-fault"], "locked (-overcommit"),
            (vec!["-realtime", "mlock=on"], "locked (-realtime"),
            (vec!["-realtime", ""], "locked (-realtime"),
        ] {
            let pinned = args(&line).pinned.unwrap_or_default();
            assert!(pinned.contains(why), "{line:?}: {pinned}");
        }
        for line in [
            vec!["-overcommit", "mem-lock=off"],
            vec!["-overcommit", "cpu-pm=on"],
            vec!["-realtime", "mlock=off"],
            vec!["-machine", "q35,accel=kvm,memory-backend=ram"],
            vec!["-object", "memory-backend-ram,id=ram,size=1G"],
        ] {
            assert_eq!(args(&line).pinned, None, "{line:?}");
        }
    }

    #[test]
    fn a_section_by_uuid_is_the_vms_of_that_uuid_only() {
        let uuid = "AAAAAAAA-2222-3333-4444-555555555555";
        let section = format!("uuid:{}", uuid.to_lowercase());
        let vm = |name: &str, uuid: Option<&str>| QemuProcess {
            args: QemuArgs { uuid: uuid.map(str::to_owned), ..QemuArgs::default() },
            ..QemuProcess::plain(VmId::default(), name.into())
        };
        for (mut vm, by_uuid) in
            [(vm("a", Some(uuid)), true), (vm("a", None), false), (vm(&section, None), false)]
        {
            assert_eq!(vm.call(section.clone()).is_ok(), by_uuid, "{vm:?}");
            vm.call("b".into()).unwrap();
            assert_eq!((vm.name.as_str(), vm.given.as_str()), ("b", "b"));
        }
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

    proptest! {
        #[test]
        fn any_command_line_is_safe(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut line = b"kvm\0-chardev\0".to_vec();
            line.extend(bytes);
            prop_assert!(parse_cmdline(&line).is_some());
        }
    }
}
