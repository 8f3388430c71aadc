//! Resets of every kind while the host recycles at full speed. A reset leaves the
//! old map in RAM with its bits set, and the next boot uses those pages: each boot
//! must find its kernel, its initramfs and its memory as they should be.

use ebb_lab::guest::escape;

use super::*;

/// How a guest's time ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// The button: no word to the guest.
    Button,
    /// `reboot -f`: notifiers run.
    Reboot,
    /// sysrq-b: nothing runs.
    SysrqB,
    /// Another kernel without firmware in between: page 0 is not written.
    Kexec,
    /// A panic with `panic=1`.
    Panic,
}

impl Reset {
    pub const ALL: [Reset; 5] =
        [Reset::Button, Reset::Reboot, Reset::SysrqB, Reset::Kexec, Reset::Panic];

    pub fn of(self, guest: &Guest) -> Result<(), VmError> {
        match self {
            Reset::Button => guest.vm.reset(),
            Reset::Reboot => guest.vm.request("reboot", MINUTE).map(drop),
            Reset::SysrqB => guest.vm.request("sysrq c=b", MINUTE).map(drop),
            Reset::Kexec => {
                kexecload(guest, "")?;
                guest.vm.request("kexec", MINUTE).map(drop)
            }
            Reset::Panic => {
                guest.vm.doom();
                guest.vm.request("sysrq c=c", MINUTE).map(drop)
            }
        }
    }
}

/// Puts the guest's own kernel in place for what comes next.
fn kexecload(guest: &Guest, more: &str) -> Result<(), VmError> {
    let append = escape(guest.try_sh("cat /proc/cmdline")?.trim());
    let load = "kexecload kernel=/kexec/vmlinuz initrd=/kexec/initramfs";
    guest.vm.request(&format!("{load} append={append}{more}"), MINUTE).map(drop)
}

/// A guest that can boot itself by kexec, and boots again after a panic.
pub fn config(config: &mut VmConfig, dir: &Path) {
    let image = Image::get(config.kernel).unwrap();
    let initramfs = dir.join("kexec-initramfs");
    ebb_lab::image::with_files(&image.initramfs, &config.files, &initramfs).unwrap();
    config.files.push(("kexec/vmlinuz".into(), image.vmlinuz));
    config.files.push(("kexec/initramfs".into(), initramfs));
    config.append = "panic=1".into();
}

pub fn brief(error: VmError) -> String {
    error.to_string().chars().take(400).collect()
}

/// What must be the same in every boot.
#[derive(Debug)]
pub struct Boot {
    files: String,
    /// Code and read-only data of the kernel, in pages.
    kernel: Vec<Vec<u8>>,
}

impl Boot {
    /// Read by the guest (its files) and by QEMU (its kernel). A guest that lost pages
    /// may say anything.
    pub fn look(guest: &Guest) -> Result<Boot, String> {
        let sum = "find / -xdev -type f ! -path '/kexec/*' | sort | xargs md5sum | md5sum";
        let files = guest.try_sh(sum).map_err(brief)?;
        let ranges = guest.try_sh("grep -E 'Kernel (code|rodata)' /proc/iomem").map_err(brief)?;
        let dump = guest.dir.path().join("kernel");
        let mut kernel = Vec::new();
        for line in ranges.lines() {
            let range = line.split(':').next().and_then(|r| r.trim().split_once('-'));
            let hex = |t: &str| u64::from_str_radix(t, 16).ok();
            let range = range.and_then(|(a, b)| Some((hex(a)?, hex(b)?)));
            let Some((start, last)) = range.filter(|r| r.0 < r.1 && r.1 < 1 << 32) else {
                return Err(format!("no range of the kernel: {line:.200}"));
            };
            let arguments = json!({"val": start, "size": last + 1 - start, "filename": dump});
            guest.vm.qmp("pmemsave", Some(arguments)).map_err(brief)?;
            let bytes = std::fs::read(&dump).unwrap();
            kernel.extend(bytes.chunks(4096).map(<[u8]>::to_vec));
        }
        if kernel.len() <= 2000 {
            return Err(format!("no kernel in /proc/iomem: {ranges:.200}"));
        }
        Ok(Boot { files, kernel })
    }

    /// What is not as it was: a kernel patches a few bytes of a page of its own,
    /// a page that was lost is another one altogether.
    pub fn differs(&self, from: &Boot) -> Option<String> {
        if self.files != from.files {
            return Some(format!("files of the initramfs: {} {}", self.files, from.files));
        }
        if self.kernel.len() != from.kernel.len() {
            return Some("another kernel".into());
        }
        let other = |(a, b): &(&Vec<u8>, &Vec<u8>)| {
            a.iter().zip(b.iter()).filter(|(a, b)| a != b).count() > a.len() / 4
        };
        let lost = self.kernel.iter().zip(&from.kernel).filter(other).count();
        (lost > 0).then(|| format!("{lost} pages of the kernel"))
    }
}

/// `verify` for a few seconds, without the module: what a stale map would take.
pub fn verify_boot(guest: &Guest, seconds: u64) -> Result<u64, String> {
    verify(guest, 200_000_000, seconds)
}

fn verify(guest: &Guest, size: u64, seconds: u64) -> Result<u64, String> {
    let arguments = format!("size={size} seconds={seconds}");
    guest.vm.tool().start("w", "verify", &arguments).map_err(|e| e.to_string())?;
    let end = guest.vm.ask(|tool| tool.wait_end("w", MINUTE)).map_err(|e| e.to_string())?;
    match end.u64("errors") {
        0 => Ok(end.u64("checks")),
        _ => Err(format!("{end:?}")),
    }
}

/// A crash kernel starts without any word of the old one and without firmware, so
/// for a while nobody knows that the map is dead: what it runs in was reserved at
/// boot and never in that map.
#[test]
fn vm_a_crash_kernel_has_memory_of_its_own_and_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::boot(kernel, |c| {
            config(c, dir.path());
            c.memory = Bytes::mib(768);
            c.append += " crashkernel=256M";
        });
        let first = Boot::look(&guest).unwrap();
        kexecload(&guest, "%20nr_cpus=1 crash=1").unwrap();
        guest.insmod();
        let recycling = guest.recycle();
        guest.start_verify(100 << 20, "");
        recycling.wait_more(&guest.vm, Bytes::mib(16));
        guest.verify_on(5_000);
        guest.vm.doom();
        guest.vm.request("sysrq c=c", MINUTE).unwrap();
        guest.vm.wait_ready().unwrap();
        let dump = guest.sh("ls /proc/vmcore");
        assert_eq!(dump.trim(), "/proc/vmcore", "{kernel}: not a crash kernel");
        assert_eq!(Boot::look(&guest).unwrap().files, first.files, "{kernel}");
        let checks = verify(&guest, 60 << 20, 5).unwrap_or_else(|e| panic!("{kernel}: {e}"));
        let silent = |_: &Vm| !recycling.is(AgentState::Ready);
        guest.vm.wait_for("the old map to be dropped", MINUTE, silent).unwrap();
        println!("{kernel}: {checks} pages checked, {:?}", recycling.seen());
    }
}

#[test]
fn vm_resets_of_every_kind_during_recycling_lose_nothing() {
    let _arena = held();
    let set = set("EBB_RESETS");
    let (resets, each) = (set.unwrap_or(Reset::ALL.len()), if set.is_some() { 3 } else { 1 });
    for kernel in kernels(Kernel::V6_12) {
        storm(kernel, Backing::Anonymous, (Firmware::Seabios, false), resets, each);
        // Shared memory is protected and discarded in other ways.
        if set.is_some() {
            storm(kernel, Backing::Memfd, (Firmware::Seabios, false), resets / 5, each);
        }
    }
}

/// Resets without a word of the guest, of guests that QEMU itself gives their kernel: it
/// is in RAM before SeaBIOS runs, and a map that is believed too long takes it. Several
/// guests at once: a reset mostly waits.
#[test]
fn vm_resets_by_the_hundred_hang_no_guest() {
    let _arena = held();
    let count = set("EBB_RESETS").unwrap_or(20);
    let next = AtomicUsize::new(0);
    let guest = &|number: usize| {
        let kernel = Kernel::ALL[number % Kernel::ALL.len()];
        let mut guest = Guest::boot(kernel, |c| c.name = format!("reset-{number}"));
        let recycling = Recycling::start(&guest.vm, &guest.socket);
        loop {
            let round = next.fetch_add(1, SeqCst);
            if round >= count {
                break;
            }
            // An idle guest frees nothing more: what boot left free may be gone before we look.
            let goal = recycling.seen().recycled + Bytes::mib(16);
            guest.insmod();
            recycling.wait_ready(&guest.vm);
            recycling.wait_recycled(&guest.vm, goal);
            let kind = [Reset::Button, Reset::SysrqB][round % 2];
            kind.of(&guest).unwrap();
            wait_booted(&mut guest, &recycling, &format!("{kernel} {round} {kind:?}"));
            if round.is_multiple_of(10) {
                println!("{kernel} {round} {kind:?}: boot {:.1?}", guest.vm.boot_time);
            }
        }
        recycling.seen().status.wires
    };
    let wires: Vec<_> = std::thread::scope(|scope| {
        let guests: Vec<_> = (0..4).map(|n| scope.spawn(move || guest(n))).collect();
        guests.into_iter().map(|g| g.join().unwrap()).collect()
    });
    println!("{count} resets; which page tripped how often: {wires:x?}");
}

/// UEFI writes elsewhere first: to a page that it reserves for itself where the VM can
/// suspend to RAM, and that the guest's module keeps where it cannot.
#[test]
fn vm_resets_of_uefi_guests_during_recycling_lose_nothing() {
    let _arena = held();
    let set = set("EBB_RESETS");
    // All kernels at once, where the resets are counted: most of a reset is one vCPU's work.
    let all = set.is_some();
    let kernels = if all { Kernel::ALL.to_vec() } else { kernels(Kernel::V6_12) };
    std::thread::scope(|scope| {
        for kernel in kernels {
            scope.spawn(move || {
                storm(kernel, Backing::Anonymous, (Firmware::Edk2, false), set.unwrap_or(2), 1);
            });
        }
    });
}

/// Where the VM can suspend to RAM the page is UEFI's own: the module has nothing to keep.
#[test]
fn vm_resets_during_recycling_of_uefi_guests_with_s3_lose_nothing() {
    let _arena = held();
    let set = set("EBB_RESETS");
    for kernel in kernels(Kernel::V6_12) {
        storm(kernel, Backing::Anonymous, (Firmware::Edk2, true), set.unwrap_or(3), 1);
    }
}

/// What `/proc/iomem` says of an address: lines `00100000-7fffffff : System RAM`, and what is
/// inside of it below, indented.
fn owner(map: &str, address: u64) -> Option<String> {
    map.lines().filter(|line| !line.starts_with(' ')).find_map(|line| {
        let (range, name) = line.split_once(" : ")?;
        let (first, last) = range.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        (hex(first)?..=hex(last)?).contains(&address).then(|| name.to_owned())
    })
}

/// `s3`: the VM can suspend to RAM, which UEFI prepares for.
fn storm(
    kernel: Kernel,
    backing: Backing,
    (firmware, s3): (Firmware, bool),
    resets: usize,
    each: u64,
) {
    let dir = tempfile::tempdir().unwrap();
    println!("{kernel}, {backing:?} memory:");
    let mut guest = Guest::boot(kernel, |c| {
        config(c, dir.path());
        c.backing = backing;
        c.uefi = firmware == Firmware::Edk2;
        if c.uefi {
            let off = u8::from(!s3);
            c.args.extend(["-global".into(), format!("PIIX4_PM.disable_s3={off}")]);
        }
    });
    let first = Boot::look(&guest).unwrap();
    if firmware == Firmware::Edk2 {
        let map = guest.sh("cat /proc/iomem");
        let owner = owner(&map, 0x81_0000);
        assert_eq!(owner.as_deref() == Some("System RAM"), !s3, "{owner:?} in {map}");
    }
    let recycling = Recycling::start_by(&guest.vm, &guest.socket, firmware);
    let (mut checks, mut kinds) = (0, Vec::new());
    for round in 0..resets {
        guest.insmod();
        recycling.wait_ready(&guest.vm);
        guest.start_verify(100 << 20, "");
        recycling.wait_more(&guest.vm, Bytes::mib(16));
        guest.verify_on(5_000);
        checks += guest.verified();
        let before = recycling.seen();
        let kind = Reset::ALL[round % Reset::ALL.len()];
        kind.of(&guest).unwrap();
        let at = format!("{kernel} {round} {kind:?}");
        wait_booted(&mut guest, &recycling, &at);
        // Whatever the map said, nobody believes it any more.
        let seen = recycling.seen();
        assert!(seen.refused > before.refused, "{at}: {seen:?}");
        assert!(!recycling.is(AgentState::Ready), "{at}: {seen:?}");
        let boot = Boot::look(&guest).unwrap();
        assert_eq!(boot.differs(&first), None, "{at}");
        checks += verify_boot(&guest, each).unwrap_or_else(|e| panic!("{at}: {e}"));
        if kinds.len() < Reset::ALL.len() {
            kinds.push((kind, 0));
        }
        kinds[round % Reset::ALL.len()].1 += 1;
        println!("{at}: boot {:.1?}", guest.vm.boot_time);
    }
    let seen = recycling.seen();
    println!("{kernel}: {kinds:?}, {checks} pages checked, {seen:?}");
    // What no notifier of the guest tells is told by a tripwire.
    let silent = kinds.iter().filter(|k| matches!(k.0, Reset::Button | Reset::SysrqB));
    let silent: u64 = silent.map(|k| k.1).sum();
    assert!(seen.status.counters.trips >= silent, "{seen:?}");
}
