//! How a VM is to be, and the QEMU arguments and kernel command line that say so.
//!
//! Another property of VMs is a field of [`VmConfig`] and its arguments.

use std::path::{Path, PathBuf};

use ebb_core::units::Bytes;

use super::Accel;
use crate::image::{Image, Kernel};

/// The value of `-accel` where instructions are counted.
const COUNTED: &str = "tcg,tb-size=64,thread=single";
/// The processor of a translated guest: QEMU's default without `cmpxchg16b`. QEMU 7.2
/// translates this instruction wrongly: it leaves other bits of EFLAGS undefined, and an
/// interrupt right after it kills the guest's kernel. Kernels use it only if CPUID
/// reports it.
const TRANSLATED_CPU: &str = "qemu64,-cx16";
/// Added to the command line of translated guests with several vCPUs: they boot with one,
/// and the guest tool starts the others once its modules are loaded.
///
/// A kernel patches itself by writing a breakpoint, the rest and the first byte in turn.
/// QEMU before 8.1 translates code without locking its page, so one vCPU's translation can
/// keep a breakpoint that another vCPU has overwritten already. Linux 6.12 then dies of
/// “Oops: int3”, Linux 6.1 executes it again for ever. Most of this happens while kernels
/// boot. `thread=single` would be safe as well, but costs what tests are about: vCPUs that
/// run at the same time, and atomic operations that are atomic for QEMU's other threads.
const ONE_CPU_AT_BOOT: &str = "maxcpus=1 noreplace-smp";
/// UEFI for VMs as Debian has it: code, and the variables of a VM that never ran.
pub(super) const UEFI: (&str, &str) =
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd");
pub(super) const UEFI_VARIABLES: &str = "uefi-variables";

/// What guest RAM is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous memory, QEMU's default.
    #[default]
    Anonymous,
    Memfd,
    /// A shared file, e.g. on tmpfs or hugetlbfs.
    File(PathBuf),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balloon {
    pub reporting: bool,
    /// Deflate when the guest runs out of memory.
    pub deflate_on_oom: bool,
}

/// How a VM is to be.
#[derive(Clone, Debug, Default)]
pub struct VmConfig {
    /// Its name for QEMU (`-name`), unique by the caller's care.
    pub name: String,
    pub memory: Bytes,
    pub cpus: u32,
    pub kernel: Kernel,
    /// Its balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// What its RAM is made of.
    pub backing: Backing,
    /// KSM may look at its RAM, as QEMU has it by default.
    pub mergeable: bool,
    /// QEMU gets no transparent huge pages, whatever this machine's setting.
    pub small_pages: bool,
    /// It starts by UEFI (OVMF) rather than by QEMU's BIOS.
    pub uefi: bool,
    /// Emulation whose guest clock counts instructions: one nanosecond each, one
    /// thread for all vCPUs, the same run after run.
    pub counted: bool,
    /// `None`: the best that works.
    pub accel: Option<Accel>,
    /// Translated code that QEMU keeps. Of a small VM it is the largest part of QEMU's own memory.
    pub translations: Bytes,
    /// Raw disk images, `/dev/vda` first.
    pub disks: Vec<PathBuf>,
    /// A cgroup directory to run in, from the first page on.
    pub cgroup: Option<PathBuf>,
    /// A command that runs QEMU instead of the lab itself, in other namespaces for
    /// instance. QEMU must end with it.
    pub within: Vec<String>,
    /// Files put into the guest, as (path there, file here): modules, data.
    pub files: Vec<(String, PathBuf)>,
    /// Its number, where Proxmox VE has started it: as there, its QMP socket for the product is
    /// `run/qemu-server/ID.qmp`, and another monitor connects out.
    pub proxmox: Option<u32>,
    /// Words added to the guest's command line.
    pub append: String,
    pub args: Vec<String>,
    /// Environment for QEMU, e.g. `LD_PRELOAD`.
    pub env: Vec<(String, String)>,
    /// User and group that QEMU runs as from its first instruction on, as libvirt
    /// has it; the lab's own if `None`.
    pub user: Option<u32>,
}

impl VmConfig {
    /// A VM with one vCPU, a plain balloon and the older kernel.
    pub fn new(name: impl Into<String>, memory: Bytes) -> VmConfig {
        VmConfig {
            name: name.into(),
            memory,
            cpus: 1,
            balloon: Some(Balloon::default()),
            mergeable: true,
            translations: Bytes::mib(64),
            ..VmConfig::default()
        }
    }

    /// What may have blanks is apart from the rest. Paths below `dir` and of RAM have none.
    pub(super) fn arguments(&self, image: &Image, accel: Accel, dir: &Path) -> Vec<String> {
        let best = accel.option(self.translations);
        let option = if self.counted { COUNTED } else { &best };
        let cpu = if accel == Accel::Kvm { "host" } else { TRANSLATED_CPU };
        let (mib, cpus, run) = (self.memory.0 >> 20, self.cpus, dir.display());
        let mut words = format!(
            "-nodefaults -no-user-config -display none -accel {option} -m {mib}M -smp {cpus} \
             -cpu {cpu} {} -serial file:{run}/console {} \
             -qmp unix:{run}/lab-qmp.sock,server=on,wait=off -device virtio-serial-pci \
             -chardev socket,id=tool,path={run}/tool.sock,server=on,wait=off \
             -device virtserialport,chardev=tool,name=ebb.tool",
            self.ram_arguments(mib),
            self.product_monitor(dir)
        );
        if self.counted {
            words += " -icount shift=0,sleep=off";
        }
        if self.uefi {
            words += &format!(
                " -drive if=pflash,unit=0,format=raw,readonly=on,file={} \
                 -drive if=pflash,unit=1,format=raw,file={run}/{UEFI_VARIABLES}",
                UEFI.0
            );
        }
        if let Some(b) = self.balloon {
            let on = |v| if v { "on" } else { "off" };
            words += &format!(
                " -device virtio-balloon-pci,id=balloon0,free-page-reporting={},deflate-on-oom={}",
                on(b.reporting),
                on(b.deflate_on_oom)
            );
        }
        let [vmlinuz, initrd] = [&image.vmlinuz, &image.initramfs].map(|p| p.display().to_string());
        let (name, line) = (self.name.clone(), self.command_line(accel));
        let apart = [("-name", name), ("-kernel", vmlinuz), ("-initrd", initrd), ("-append", line)];
        let disk = |disk: &PathBuf| {
            ("-drive", format!("file={},if=virtio,format=raw,cache=none", disk.display()))
        };
        let apart = apart
            .into_iter()
            .chain(self.disks.iter().map(disk))
            .flat_map(|(option, value)| [option.to_owned(), value]);
        let mut all: Vec<String> = apart.collect();
        all.extend(words.split_whitespace().map(str::to_owned));
        all.extend(self.args.iter().cloned());
        all
    }

    /// The QMP socket for the product, below `dir`.
    pub(super) fn product_socket(&self, dir: &Path) -> PathBuf {
        match self.proxmox {
            None => dir.join("ebb-qmp.sock"),
            Some(id) => dir.join(format!("run/qemu-server/{id}.qmp")),
        }
    }

    /// The monitor on it. For Proxmox the options are those of qemu-server's `config_to_command`,
    /// but for `-id` (only their QEMU has it) and `-daemonize` (the lab's QEMU ends with the lab).
    fn product_monitor(&self, dir: &Path) -> String {
        let socket = format!("{},server=on,wait=off", self.product_socket(dir).display());
        let dir = dir.display();
        match self.proxmox {
            None => format!("-qmp unix:{socket}"),
            Some(id) => format!(
                "-no-shutdown -chardev socket,id=qmp,path={socket} -mon chardev=qmp,mode=control \
                 -chardev socket,id=qmp-event,path={dir}/run/qmeventd.sock,reconnect=5 \
                 -mon chardev=qmp-event,mode=control -pidfile {dir}/run/qemu-server/{id}.pid"
            ),
        }
    }

    fn ram_arguments(&self, mib: u64) -> String {
        let merge = if self.mergeable { "" } else { ",mem-merge=off" };
        let backend = match &self.backing {
            Backing::Anonymous => return format!("-machine pc{merge}"),
            Backing::Memfd => "memfd".into(),
            Backing::File(path) => format!("file,mem-path={}", path.display()),
        };
        format!(
            "-object memory-backend-{backend},id=ram,size={mib}M,share=on \
             -machine pc,memory-backend=ram{merge}"
        )
    }

    /// Timer checks and watchdogs misfire where a vCPU may not run for a while.
    fn command_line(&self, accel: Accel) -> String {
        let own = "console=ttyS0 quiet panic=0 oops=panic no_timer_check nowatchdog nokaslr \
                   cryptomgr.notests";
        let boot = if accel == Accel::Tcg && self.cpus > 1 { ONE_CPU_AT_BOOT } else { "" };
        format!("{own} {boot} {}", self.append).trim().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(accel: Accel, counted: bool) -> Vec<String> {
        let mut config = VmConfig::new("x", Bytes::mib(256));
        config.counted = counted;
        let file = PathBuf::from("/cache/file");
        let (vmlinuz, initramfs) = (file.clone(), file);
        let (kernel, release) = (config.kernel, String::new());
        let image = Image { kernel, release, vmlinuz, initramfs, headers: None };
        config.arguments(&image, accel, Path::new("/run/vm"))
    }

    #[test]
    fn translated_guests_are_not_offered_cmpxchg16b() {
        let cpus = |a: &[String]| -> Vec<String> {
            a.windows(2).filter(|w| w[0] == "-cpu").map(|w| w[1].clone()).collect()
        };
        assert_eq!(cpus(&arguments(Accel::Tcg, false)), ["qemu64,-cx16"]);
        assert_eq!(cpus(&arguments(Accel::Tcg, true)), ["qemu64,-cx16"]);
        assert_eq!(cpus(&arguments(Accel::Kvm, false)), ["host"]);
    }

    #[test]
    fn translated_guests_boot_with_one_of_their_vcpus() {
        let line = |accel, cpus| {
            let mut config = VmConfig::new("x", Bytes::mib(256));
            config.cpus = cpus;
            config.command_line(accel)
        };
        assert!(line(Accel::Tcg, 2).contains("maxcpus=1"));
        assert!(!line(Accel::Tcg, 1).contains("maxcpus"), "it has no other");
        assert!(!line(Accel::Kvm, 2).contains("maxcpus"), "processors patch as they should");
    }

    #[test]
    fn of_the_two_qmp_sockets_one_is_named_as_ebbs() {
        let all = arguments(Accel::Tcg, false);
        let names = all.windows(2).filter(|w| w[0] == "-qmp").map(|w| {
            let path = w[1].split(',').next().unwrap_or_default();
            path.rsplit('/').next().unwrap_or_default().contains("ebb")
        });
        assert_eq!(names.collect::<Vec<_>>(), [true, false]);
    }
}
