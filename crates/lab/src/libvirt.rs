//! A real libvirtd with real domains, in a mount namespace of its own. What it writes below `/etc`,
//! `/run` and `/var` goes into the lab's directory, which is removed at the end.
//!
//! It runs QEMU as root, confined ([`Libvirtd::start_confined`]) or in a pid namespace of its own
//! ([`Libvirtd::start_contained`]), without AppArmor and without
//! cgroups of QEMU's own. An Ebb that is to see its sockets is run by [`Libvirtd::program`].

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;

use crate::guest::Tool;
use crate::image::{Cache, Image, Kernel, with_files, write_atomically};
use crate::vm::{Accel, on_lasting_thread};
use crate::{LabError, ebb, guest_stack, run};

/// Mounts, then becomes libvirtd on a host of its own name: libvirt migrates between hosts only.
/// The argument: the lab's directory.
const START: &str = r#"
set -eu
mount --make-rprivate /
for path in etc/libvirt run/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt; do
  mkdir -p "$0/$path" "/$path"
  mount --bind "$0/$path" "/$path"
done
for file in passwd group; do mount --bind "$0/etc/$file" "/etc/$file"; done
hostname "$(basename "$0")"
if [ $$ != 1 ]; then exec libvirtd --pid-file "$0/libvirtd.pid"; fi
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
/// A new libvirtd first asks QEMU for its capabilities, which takes long.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// A running libvirtd. Dropping it ends it and all its domains.
#[derive(Debug)]
pub struct Libvirtd {
    child: Mutex<Child>,
    dir: tempfile::TempDir,
    accel: Accel,
    contained: bool,
}

impl Libvirtd {
    /// Starts one that runs QEMU as root, and waits until it answers.
    pub fn start() -> Result<Libvirtd, LabError> {
        Libvirtd::start_with(AS_ROOT, false)
    }

    /// Starts one in a pid namespace of its own, as in a container.
    pub fn start_contained() -> Result<Libvirtd, LabError> {
        Libvirtd::start_with(AS_ROOT, true)
    }

    /// Starts one that runs QEMU as the user `libvirt-qemu`, in a mount namespace of its own and
    /// in seccomp's sandbox.
    pub fn start_confined() -> Result<Libvirtd, LabError> {
        Libvirtd::start_with(CONFINED, false)
    }

    fn start_with(qemu: &str, contained: bool) -> Result<Libvirtd, LabError> {
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
            ("passwd", "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin\n"),
            ("group", "libvirt-qemu:x:64055:\nlibvirt:x:64054:\nkvm:x:64053:\n"),
        ] {
            let here = Path::new("/etc").join(name);
            let text = fs::read_to_string(&here).map_err(LabError::file(&here))?;
            let there = dir.path().join("etc").join(name);
            let has = |l: &&str| text.lines().any(|t| t.split(':').next() == l.split(':').next());
            let more: String = line.split_inclusive('\n').filter(|l| !has(l)).collect();
            fs::write(&there, text + &more).map_err(LabError::file(&there))?;
        }
        // Asking QEMU for its capabilities takes a new libvirtd ten seconds.
        let known = Cache::from_env().path("libvirt-capabilities");
        let own = dir.path().join("var/cache/libvirt/qemu/capabilities");
        copy_files(&known, &own)?;
        let accel = Accel::detect(&Cache::from_env());
        let child = Mutex::new(spawn(dir.path(), contained)?);
        let libvirtd = Libvirtd { child, dir, accel, contained };
        libvirtd.wait("libvirtd to answer", |l| l.virsh(&["version"]).is_ok().then_some(()))?;
        copy_files(&own, &known)?;
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
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// Kills it and starts another; domains live on.
    pub fn kill_and_start(&self) -> Result<(), LabError> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = (child.kill(), child.wait());
        *child = spawn(self.dir.path(), self.contained)?;
        drop(child);
        self.wait("libvirtd to answer again", |l| l.virsh(&["list"]).is_ok().then_some(()))
    }

    /// What `virsh` prints.
    pub fn virsh(&self, args: &[&str]) -> Result<String, LabError> {
        let pid = self.pid().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &pid, "virsh", "-c", "qemu:///system"]).args(args);
        run(&mut command)
    }

    /// An executable that is `ebb` where this libvirtd's sockets are.
    pub fn program(&self) -> Result<PathBuf, LabError> {
        let path = self.dir.path().join("ebb");
        let (pid, binary) = (self.pid(), ebb::binary()?);
        let text = format!("#!/bin/sh\nexec nsenter -m -t {pid} {} \"$@\"\n", binary.display());
        fs::write(&path, text).map_err(LabError::file(&path))?;
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, mode).map_err(LabError::file(&path))?;
        Ok(path)
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
        let image = Image::get(&Cache::from_env(), Kernel::V6_1)?;
        self.boot_image(name, memory, (balloon, more), image)
    }

    /// The same for tier guest: Ebb's agent in QEMU, as its description loads a plug-in, and the
    /// module at `/ebb.ko` of the guest.
    pub fn boot_with_agent(
        &self,
        name: &str,
        memory: Bytes,
        balloon: &str,
    ) -> Result<Domain, LabError> {
        let mut image = Image::get(&Cache::from_env(), Kernel::V6_1)?;
        let files = [("ebb.ko".into(), guest_stack::module(&image, false)?)];
        let [agent, initramfs, vmlinuz] =
            ["libebb_vmm.so", "initramfs", "vmlinuz"].map(|name| self.dir.path().join(name));
        with_files(&image.initramfs, &files, &initramfs)?;
        for (from, to) in [(&guest_stack::plugin()?, &agent), (&image.vmlinuz, &vmlinuz)] {
            fs::copy(from, to).map_err(LabError::file(to))?;
            let mode = fs::Permissions::from_mode(0o644);
            fs::set_permissions(to, mode).map_err(LabError::file(to))?;
        }
        (image.initramfs, image.vmlinuz) = (initramfs, vmlinuz);
        let socket = self.sockets().join(format!("{name}.agent"));
        let more = format!(
            "<qemu:commandline><qemu:arg value='-plugin'/>\
             <qemu:arg value='file={},socket={}'/></qemu:commandline>",
            agent.display(),
            socket.display()
        );
        self.boot_image(name, memory, (balloon, &more), image)
    }

    fn boot_image(
        &self,
        name: &str,
        memory: Bytes,
        more: (&str, &str),
        image: Image,
    ) -> Result<Domain, LabError> {
        self.define(name, memory, more, &image)?;
        self.virsh(&["start", name])?;
        let pids = self.dir.path().join(format!("run/libvirt/qemu/{name}.pid"));
        let pid = fs::read_to_string(&pids).map_err(LabError::file(&pids))?;
        let pid = pid.trim().parse().map_err(|_| LabError::Missing(format!("pid of {name}")))?;
        let domain = Domain { name: name.to_owned(), pid, tool: self.tool(name)? };
        let console = self.dir.path().join(format!("{name}.console"));
        let ready = |_: &Libvirtd| {
            let text = fs::read(&console).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(crate::vm::READY).then_some(())
        };
        self.wait(&format!("the guest of {name}"), ready)?;
        Ok(domain)
    }

    /// The lab's tool in a guest, by way of the QEMU that has its domain now.
    pub fn tool(&self, name: &str) -> Result<Tool, LabError> {
        let path = self.dir.path().join(format!("{name}.sock"));
        let socket = UnixStream::connect(&path).map_err(LabError::file(&path))?;
        Tool::new(socket, self.accel.patience()).map_err(LabError::file(&path))
    }

    /// Starts a domain that does not run yet: its vCPU stands still.
    pub fn start_paused(&self, name: &str, memory: Bytes, balloon: &str) -> Result<(), LabError> {
        let image = Image::get(&Cache::from_env(), Kernel::V6_1)?;
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
        let (kind, cpu) = match self.accel {
            Accel::Kvm => ("kvm", "<cpu mode='host-passthrough'/>"),
            Accel::Tcg => (
                "qemu",
                "<cpu mode='custom'><model>qemu64</model>\
                 <feature name='cx16' policy='disable'/></cpu>",
            ),
        };
        let tcg = match self.accel {
            Accel::Kvm => "",
            Accel::Tcg => "<tcg><tb-cache unit='MiB'>64</tb-cache></tcg>",
        };
        let (vmlinuz, initrd) = (image.vmlinuz.display(), image.initramfs.display());
        let (kib, socket) = (memory.0 >> 10, socket.display());
        let console = self.dir.path().join(format!("{name}.console"));
        let console = console.display();
        format!(
            "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>{name}</name><memory unit='KiB'>{kib}</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{vmlinuz}</kernel>\
             <initrd>{initrd}</initrd><cmdline>console=ttyS0 quiet panic=0 no_timer_check \
             nowatchdog nokaslr</cmdline></os><features><acpi/>{tcg}</features>{cpu}\
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>\
             <serial type='file'><source path='{console}'/><target port='0'/></serial>\
             <channel type='unix'><source mode='bind' path='{socket}'/>\
             <target type='virtio' name='ebb.tool'/></channel>{balloon}</devices>{more}</domain>"
        )
    }

    /// Waits until `done` says something, or `PATIENCE` is over.
    pub fn wait<T>(
        &self,
        what: &str,
        done: impl Fn(&Libvirtd) -> Option<T>,
    ) -> Result<T, LabError> {
        let begun = Instant::now();
        loop {
            if let Some(found) = done(self) {
                return Ok(found);
            }
            if begun.elapsed() > PATIENCE {
                let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                return Err(LabError::Missing(format!("{what}: not within {PATIENCE:?}\n{log}")));
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        let running = self.virsh(&["list", "--name"]).unwrap_or_default();
        for name in running.lines().filter(|l| !l.trim().is_empty()) {
            let _ = self.virsh(&["destroy", name.trim()]);
        }
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = (child.kill(), child.wait());
    }
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

fn spawn(dir: &Path, contained: bool) -> Result<Child, LabError> {
    let log = fs::File::create(dir.join("log")).map_err(LabError::file(dir))?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--uts"]);
    if contained {
        command.args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc"]);
    }
    command.args(["sh", "-c", START]).arg(dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    on_lasting_thread(command, false).map_err(LabError::file("unshare"))
}

#[derive(Debug)]
pub struct Domain {
    name: String,
    pid: u32,
    tool: Tool,
}

impl Domain {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process of its QEMU, in libvirtd's pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The lab's tool in its guest.
    pub fn tool(&self) -> &Tool {
        &self.tool
    }
}
