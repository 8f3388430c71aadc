//! A real libvirtd with real domains, in a mount namespace of its own. What it writes below `/etc`,
//! `/run` and `/var` goes into the lab's directory, which is removed at the end.
//!
//! It runs as [`Kind`] says, without AppArmor and without cgroups of QEMU's own. An Ebb that is to
//! see its sockets is run by [`Libvirtd::program`].

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use ebb_core::units::Bytes;

use crate::guest::Tool;
use crate::image::{Image, Kernel, cached, with_files, write_atomically};
use crate::vm::{Accel, on_lasting_thread};
use crate::{LabError, Sought, ebb, guest_stack, lock, poll, run};

/// Mounts, then becomes libvirtd on a host of its own name: libvirt migrates between hosts only.
/// The arguments: the lab's directory, and what runs libvirtd as another user, if it is to be one.
const START: &str = r#"
set -eu
mount --make-rprivate /
for path in etc/libvirt run/libvirt run/user var/lib/libvirt var/cache/libvirt var/log/libvirt; do
  mkdir -p "$0/$path" "/$path"
  mount --bind "$0/$path" "/$path"
done
for file in passwd group; do mount --bind "$0/etc/$file" "/etc/$file"; done
hostname "$(basename "$0")"
if [ $# != 0 ]; then mkdir -p "$0/run/user/64056"; chown -R 64056:64056 "$0"; fi
if [ $$ != 1 ]; then exec "$@" libvirtd --pid-file "$0/libvirtd.pid"; fi
libvirtd --pid-file "$0/libvirtd.pid" &
wait $!
"#;
const LIBVIRTD: &str = "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nunix_sock_group = \"root\"\n\
                        unix_sock_rw_perms = \"0770\"\n";
const QEMU: &str =
    "security_driver = \"none\"\ncgroup_controllers = [ ]\nstdio_handler = \"file\"\n";
const AS_ROOT: &str = "user = \"root\"\ngroup = \"root\"\nnamespaces = [ ]\n";
/// As Debian configures it.
const CONFINED: &str = "user = \"libvirt-qemu\"\ngroup = \"libvirt-qemu\"\n\
                        namespaces = [ \"mount\" ]\nseccomp_sandbox = 1\n";
const QEMU_GROUP: u32 = 64055;
/// The user of a session, also in [`START`].
pub const USER: u32 = 64056;
/// A new libvirtd first asks QEMU for its capabilities, which takes long.
const PATIENCE: Duration = Duration::from_secs(120);
const EMULATOR: &str = "/usr/bin/qemu-system-x86_64";

/// How libvirtd runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It runs QEMU as root.
    Root,
    /// In a pid namespace of its own, as in a container.
    Contained,
    /// It runs QEMU as the user `libvirt-qemu`, in a mount namespace of its own and in seccomp's
    /// sandbox.
    Confined,
    /// As the session of [`USER`].
    Session,
}

/// A running libvirtd. Dropping it ends it and all its domains.
#[derive(Debug)]
pub struct Libvirtd {
    child: Mutex<Child>,
    dir: tempfile::TempDir,
    accel: Accel,
    kind: Kind,
    emulator: PathBuf,
}

impl Libvirtd {
    /// Starts one that runs QEMU as root, and waits until it answers.
    pub fn start() -> Result<Libvirtd, LabError> {
        Libvirtd::start_as(Kind::Root)
    }

    pub fn start_as(kind: Kind) -> Result<Libvirtd, LabError> {
        let qemu = match kind {
            Kind::Root | Kind::Contained => AS_ROOT,
            Kind::Confined => CONFINED,
            Kind::Session => "",
        };
        let dir = tempfile::Builder::new().prefix("ebb-lab-").tempdir();
        let dir = dir.map_err(LabError::file(std::env::temp_dir()))?;
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path(), mode).map_err(LabError::file(dir.path()))?;
        let sockets = dir.path().join("sockets");
        fs::create_dir(&sockets)
            .and_then(|()| chown(&sockets, None, Some(QEMU_GROUP)))
            .and_then(|()| fs::set_permissions(&sockets, fs::Permissions::from_mode(0o770)))
            .map_err(LabError::file(&sockets))?;
        let etc = dir.path().join("etc/libvirt");
        fs::create_dir_all(&etc).map_err(LabError::file(&etc))?;
        let uuid = "/proc/sys/kernel/random/uuid";
        let uuid = fs::read_to_string(uuid).map_err(LabError::file(uuid))?;
        for (name, text) in [
            ("libvirtd.conf", format!("{LIBVIRTD}host_uuid = \"{}\"\n", uuid.trim())),
            ("qemu.conf", format!("{QEMU}{qemu}")),
        ] {
            fs::write(etc.join(name), text).map_err(LabError::file(&etc))?;
        }
        for (name, line) in [
            (
                "passwd",
                "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin\n\
                 ebb-lab:x:64056:64056::/:/usr/sbin/nologin\n",
            ),
            ("group", "libvirt-qemu:x:64055:\nlibvirt:x:64054:\nkvm:x:64053:\nebb-lab:x:64056:\n"),
        ] {
            let here = Path::new("/etc").join(name);
            let text = fs::read_to_string(&here).map_err(LabError::file(&here))?;
            let there = dir.path().join("etc").join(name);
            let has = |l: &&str| text.lines().any(|t| t.split(':').next() == l.split(':').next());
            let more: String = line.split_inclusive('\n').filter(|l| !has(l)).collect();
            fs::write(&there, text + &more).map_err(LabError::file(&there))?;
        }
        copy_files(&known(kind), &own(dir.path()))?;
        let accel = Accel::detect();
        let child = Mutex::new(spawn(dir.path(), kind)?);
        let emulator = EMULATOR.into();
        let libvirtd = Libvirtd { child, dir, accel, kind, emulator };
        libvirtd.wait("libvirtd to answer", |l| l.virsh(&["version"]).is_ok())?;
        Ok(libvirtd)
    }

    /// Its directory, at the same path in its mount namespace and outside.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where its QEMUs may make sockets.
    pub fn sockets(&self) -> PathBuf {
        self.dir.path().join("sockets")
    }

    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Kills it and starts another; domains live on.
    pub fn kill_and_start(&self) -> Result<(), LabError> {
        let mut child = lock(&self.child);
        let _ = (child.kill(), child.wait());
        *child = spawn(self.dir.path(), self.kind)?;
        drop(child);
        self.wait("libvirtd to answer again", |l| l.virsh(&["list"]).is_ok())
    }

    /// Whether its domains survive a migration while they run. QEMU 7.2's translator misses writes
    /// of such a guest: its kernel died, or its memory was damaged, in 5 of 24 migrations without
    /// Ebb, and in none of 12 of a guest that libvirt pauses first.
    pub fn migrates_live(&self) -> bool {
        self.accel == Accel::Kvm
    }

    /// What `virsh` prints.
    pub fn virsh(&self, args: &[&str]) -> Result<String, LabError> {
        let pid = self.pid().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &pid]);
        let uri = match self.kind {
            Kind::Session => "qemu:///session",
            _ => "qemu:///system",
        };
        command.args(as_user(self.dir(), self.kind)).args(["virsh", "-c", uri]).args(args);
        run(&mut command)
    }

    /// An executable that is `ebb` where this libvirtd's sockets are.
    pub fn program(&self) -> Result<PathBuf, LabError> {
        let (pid, binary) = (self.pid(), ebb::binary()?);
        self.script("ebb", &format!("exec nsenter -m -t {pid} {} \"$@\"", binary.display()))
    }

    /// Domains that are started from now on run in this cgroup, from their first page on.
    pub fn use_cgroup(&mut self, dir: &Path) -> Result<(), LabError> {
        let procs = dir.join("cgroup.procs");
        let line = format!("echo $$ > {} && exec {EMULATOR} \"$@\"", procs.display());
        self.emulator = self.script("emulator", &line)?;
        Ok(())
    }

    fn script(&self, name: &str, line: &str) -> Result<PathBuf, LabError> {
        let path = self.dir.path().join(name);
        // By a child: what any process has open for writing cannot be executed.
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        run(Command::new("sh").args(["-c", write]).arg(&path).arg(line))?;
        Ok(path)
    }

    /// The size of a domain's balloon as libvirt has QEMU tell it.
    pub fn balloon(&self, name: &str) -> Result<Bytes, LabError> {
        let text = self.virsh(&["dommemstat", name])?;
        let kib = text.lines().find_map(|l| l.strip_prefix("actual ")?.trim().parse().ok());
        kib.map(Bytes::kib).ok_or_else(|| LabError::Missing(format!("size of {name}: {text}")))
    }

    /// Starts a domain with this much RAM and a virtio balloon, and waits for its guest. `more`
    /// is added to its description, and `balloon` says what is in its `<memballoon>` element.
    pub fn boot(
        &self,
        name: &str,
        memory: Bytes,
        balloon: &str,
        more: &str,
    ) -> Result<Domain, LabError> {
        let mut image = Image::get(Kernel::V6_1)?;
        if self.kind == Kind::Session {
            self.open(&mut image, name)?;
        }
        self.boot_image(name, memory, (balloon, more), &image)
    }

    /// Copies this domain's image to where each user may read it.
    fn open(&self, image: &mut Image, name: &str) -> Result<(), LabError> {
        for (file, end) in [(&mut image.vmlinuz, "vmlinuz"), (&mut image.initramfs, "initramfs")] {
            let to = self.dir.path().join(format!("{name}.{end}"));
            copy_for_all(file, &to)?;
            *file = to;
        }
        Ok(())
    }

    /// The same for tier guest: Ebb's agent in QEMU, as its description loads a plug-in, and the
    /// module at `/ebb.ko` of the guest.
    pub fn boot_with_agent(
        &self,
        name: &str,
        memory: Bytes,
        balloon: &str,
    ) -> Result<Domain, LabError> {
        let mut image = Image::get(Kernel::V6_1)?;
        let files = [("ebb.ko".into(), guest_stack::module(&image, false)?)];
        let agent = self.dir.path().join("libebb_vmm.so");
        let initramfs = self.dir.path().join(format!("{name}.with-module"));
        with_files(&image.initramfs, &files, &initramfs)?;
        image.initramfs = initramfs;
        self.open(&mut image, name)?;
        // Another domain may have it loaded.
        if !agent.exists() {
            copy_for_all(&guest_stack::plugin()?, &agent)?;
        }
        let socket = self.sockets().join(format!("{name}.agent"));
        let more = format!(
            "<qemu:commandline><qemu:arg value='-plugin'/>\
             <qemu:arg value='file={},socket={}'/></qemu:commandline>",
            agent.display(),
            socket.display()
        );
        self.boot_image(name, memory, (balloon, &more), &image)
    }

    fn boot_image(
        &self,
        name: &str,
        memory: Bytes,
        more: (&str, &str),
        image: &Image,
    ) -> Result<Domain, LabError> {
        self.define(name, memory, more, image)?;
        self.virsh(&["start", name])?;
        let pids = match self.kind {
            Kind::Session => format!("run/user/{USER}/libvirt/qemu/run"),
            _ => "run/libvirt/qemu".into(),
        };
        let pids = self.dir.path().join(pids).join(format!("{name}.pid"));
        let pid = fs::read_to_string(&pids).map_err(LabError::file(&pids))?;
        let pid = pid.trim().parse().map_err(|_| LabError::Missing(format!("pid of {name}")))?;
        let domain = Domain { name: name.to_owned(), pid, tool: self.tool(name)? };
        let console = self.dir.path().join(format!("{name}.console"));
        let ready = |_: &Libvirtd| {
            let text = fs::read(&console).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(crate::vm::READY)
        };
        self.wait(&format!("the guest of {name}"), ready)?;
        Ok(domain)
    }

    /// What there is to say of a domain of which Ebb hears nothing: what libvirt has QEMU do, what
    /// QEMU does, and what the guest says itself. To ask QEMU past libvirt taints the domain.
    pub fn report(&self, domain: &Domain) -> String {
        let name = domain.name.as_str();
        let get = |property: &str| {
            let path = "/machine/peripheral/balloon0";
            let arguments = format!(r#"{{"path":"{path}","property":"{property}"}}"#);
            let command = format!(r#"{{"execute":"qom-get","arguments":{arguments}}}"#);
            self.virsh(&["qemu-monitor-command", name, &command])
        };
        let described = self.virsh(&["dumpxml", name]).unwrap_or_else(|e| e.to_string());
        let period = described.lines().find(|l| l.contains("<stats period="));
        let guest = "grep virtio /proc/interrupts; dmesg | tail -n 8";
        let console = fs::read(self.dir.path().join(format!("{name}.console"))).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let lines: Vec<&str> = console.lines().collect();
        format!(
            "libvirt has set {period:?}\nQEMU has set {:?}\nQEMU was told {:?}\nits guest says {:?}\n\
             its console ends\n{}",
            get("guest-stats-polling-interval"),
            get("guest-stats"),
            domain.tool.sh(guest, Duration::from_secs(20)),
            lines[lines.len().saturating_sub(40)..].join("\n")
        )
    }

    /// The lab's tool in a guest, by way of the QEMU that has its domain now.
    pub fn tool(&self, name: &str) -> Result<Tool, LabError> {
        let path = self.dir.path().join(format!("{name}.sock"));
        let socket = UnixStream::connect(&path).map_err(LabError::file(&path))?;
        Tool::new(socket, self.accel.patience()).map_err(LabError::file(&path))
    }

    /// Starts a domain that does not run yet: its vCPU stands still.
    pub fn start_paused(&self, name: &str, memory: Bytes, balloon: &str) -> Result<(), LabError> {
        let image = Image::get(Kernel::V6_1)?;
        self.define(name, memory, (balloon, ""), &image)?;
        self.virsh(&["start", "--paused", name]).map(drop)
    }

    fn define(
        &self,
        name: &str,
        memory: Bytes,
        more: (&str, &str),
        image: &Image,
    ) -> Result<(), LabError> {
        let socket = self.dir.path().join(format!("{name}.sock"));
        let xml = self.description(name, memory, more, image, &socket);
        let file = self.dir.path().join(format!("{name}.xml"));
        fs::write(&file, xml).map_err(LabError::file(&file))?;
        self.virsh(&["define", &file.display().to_string()]).map(drop)
    }

    fn description(
        &self,
        name: &str,
        memory: Bytes,
        (balloon, more): (&str, &str),
        image: &Image,
        socket: &Path,
    ) -> String {
        let (kind, mode, cpu) = match self.accel {
            Accel::Kvm => ("kvm", "host-passthrough", ""),
            Accel::Tcg => {
                ("qemu", "custom", "<model>qemu64</model><feature name='cx16' policy='disable'/>")
            }
        };
        // libvirt plugs memory into a NUMA node only.
        let numa = match more.contains("<maxMemory") {
            true => format!(
                "<numa><cell id='0' cpus='0' unit='KiB' memory='{}'/></numa>",
                memory.0 >> 10
            ),
            false => String::new(),
        };
        let tcg = match self.accel {
            Accel::Kvm => "",
            Accel::Tcg => "<tcg><tb-cache unit='MiB'>64</tb-cache></tcg>",
        };
        let (vmlinuz, initrd) = (image.vmlinuz.display(), image.initramfs.display());
        let (kib, socket) = (memory.0 >> 10, socket.display());
        let console = self.dir.path().join(format!("{name}.console"));
        let (console, emulator) = (console.display(), self.emulator.display());
        format!(
            "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>{name}</name><memory unit='KiB'>{kib}</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{vmlinuz}</kernel>\
             <initrd>{initrd}</initrd><cmdline>console=ttyS0 quiet panic=0 oops=panic \
             no_timer_check nowatchdog nokaslr cryptomgr.notests</cmdline></os><features><acpi/>{tcg}</features>\
             <cpu mode='{mode}'>{cpu}{numa}</cpu>\
             <devices><emulator>{emulator}</emulator>\
             <serial type='file'><source path='{console}'/><target port='0'/></serial>\
             <channel type='unix'><source mode='bind' path='{socket}'/>\
             <target type='virtio' name='ebb.tool'/></channel>{balloon}</devices>{more}</domain>"
        )
    }

    /// Waits until `done` says something, or `PATIENCE` is over.
    pub fn wait<S: Sought>(
        &self,
        what: &str,
        done: impl Fn(&Libvirtd) -> S,
    ) -> Result<S::Found, LabError> {
        poll(PATIENCE, || done(self)).ok_or_else(|| {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            LabError::Missing(format!("{what}: not within {PATIENCE:?}\n{log}"))
        })
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        let running = self.virsh(&["list", "--name"]).unwrap_or_default();
        for name in running.lines().filter(|l| !l.trim().is_empty()) {
            let _ = self.virsh(&["destroy", name.trim()]);
        }
        let mut child = lock(&self.child);
        let _ = (child.kill(), child.wait(), copy_files(&own(self.dir.path()), &known(self.kind)));
    }
}

/// What is known of QEMU's capabilities, which takes a new libvirtd ten seconds to ask for. They
/// depend on who asks: not each user may use KVM.
fn known(kind: Kind) -> PathBuf {
    cached(format!("libvirt-capabilities/{kind:?}"))
}

fn own(dir: &Path) -> PathBuf {
    dir.join("var/cache/libvirt/qemu/capabilities")
}

/// Copies what a directory holds, where it is there, and makes the other.
fn copy_files(from: &Path, to: &Path) -> Result<(), LabError> {
    fs::create_dir_all(to).map_err(LabError::file(to))?;
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let bytes = fs::read(entry.path()).map_err(LabError::file(from))?;
        write_atomically(&to.join(entry.file_name()), &bytes, 0o600)?;
    }
    Ok(())
}

fn copy_for_all(from: &Path, to: &Path) -> Result<(), LabError> {
    fs::copy(from, to).map_err(LabError::file(to))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o644)).map_err(LabError::file(to))
}

/// What runs a program as the user that this libvirtd is of, with the directories that libvirt
/// uses of a user's; nothing: as root.
fn as_user(dir: &Path, kind: Kind) -> Vec<String> {
    if kind != Kind::Session {
        return Vec::new();
    }
    let d = dir.display();
    let words = format!(
        "setpriv --pdeathsig KILL --reuid {USER} --regid {USER} --clear-groups env HOME={d} \
         XDG_RUNTIME_DIR=/run/user/{USER} XDG_CONFIG_HOME={d}/etc XDG_CACHE_HOME={d}/var/cache \
         LIBVIRT_AUTOSTART=0"
    );
    words.split(' ').map(String::from).collect()
}

fn spawn(dir: &Path, kind: Kind) -> Result<Child, LabError> {
    let log = fs::File::create(dir.join("log")).map_err(LabError::file(dir))?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--uts"]);
    if kind == Kind::Contained {
        command.args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc"]);
    }
    command.args(["sh", "-c", START]).arg(dir).args(as_user(dir, kind));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    on_lasting_thread(command, false).map_err(LabError::file("unshare"))
}

#[derive(Debug)]
pub struct Domain {
    pub name: String,
    /// The process of its QEMU, in libvirtd's pid namespace.
    pub pid: u32,
    /// The lab's tool in its guest.
    pub tool: Tool,
}
