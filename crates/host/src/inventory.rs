//! What can write to a VM's memory, as QEMU itself tells, and where it has that memory.
//!
//! Before an agent may work, everything that can write has to be known: devices, backends,
//! network and block drivers, machine, firmware. What is not on a list here is unknown, and
//! unknown means that the agent stands aside. It is asked each second, and in each tick
//! in which an agent gives memory back, since devices come and go without an event. A process
//! that shares the memory writes to it past the page tables that userfaultfd watches, so a discard
//! could lose what it wrote.
//!
//! Nothing blocks: [`Inventory::questions`] says what to ask, [`Inventory::answer`] takes an
//! answer and may say what to ask next, [`Inventory::findings`] are there when all have come.
//! Sources: QEMU `qapi/*.json`, `net/net.c` (`print_net_client`), `softmmu/memory.c`
//! (`mtree_print_flatview`), `softmmu/physmem.c` (`ram_block_add`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{OBJECTIONS_MAX, OTHERS_DISCARD, Segment, clip};
use serde_json::{Value, json};

use crate::agent::{main_ram, parse_gpa2hva, parse_mtree};
use crate::qmp_balloon::{self, DEVICE_FOLDERS};

/// Most stretches of RAM; a VM has two, and one for each DIMM.
const STRETCHES: usize = 8;
/// The end of OVMF's table of GUIDs in its flash, 48 bytes below 4 GiB:
/// 96b582de-1fb2-45f7-baea-a366c55a082d. Source: edk2 `OvmfPkg/ResetVector`.
const EDK2_GUID: &str = "de82b596b21ff745baeaa366c55a082d";
/// QEMU's own BIOS, by the names that QEMU has for it.
const SEABIOS: [&str; 2] = ["bios-256k.bin", "bios.bin"];
/// Properties of `/machine`.
const MACHINE: [&str; 5] =
    ["type", "pflash0", "firmware", "confidential-guest-support", "memory-encryption"];

/// Device types that write to guest memory from QEMU's own mapping, or through the kernel
/// with QEMU's page tables (vhost). A name that ends in `*` stands for all that begin so.
const DEVICES: &str = "\
    virtio-net-* virtio-blk-* virtio-scsi-* virtio-serial-* virtio-rng-* virtio-balloon-* \
    virtio-input-* virtio-keyboard-* virtio-mouse-* virtio-tablet-* virtio-multitouch-* \
    virtio-gpu-pci virtio-gpu-device virtio-vga virtio-9p-* virtio-crypto-* virtio-iommu-* \
    virtio-sound-* virtserialport virtconsole vhost-vsock-* vhost-scsi-* pcie-root-port \
    pci-bridge pcie-pci-bridge ioh3420 x3130-upstream xio3130-downstream i82801b11-bridge pxb \
    pxb-pcie qemu-xhci nec-usb-xhci ich9-* piix3-* piix4-* usb-* pci-ohci ide-* scsi-* ahci \
    megasas* lsi* mptsas1068 pvscsi am53c974 dc390 nvme nvme-ns nvme-subsys sdhci-pci sd-card \
    floppy isa-* e1000* igb rtl8139 pcnet ne2k_* i825* tulip vmxnet3 VGA secondary-vga \
    cirrus-vga bochs-display qxl qxl-vga vmware-svga ramfb intel-hda hda-* AC97 ES1370 sb16 \
    pci-serial* tpm-* i6300esb ib700 pvpanic* vmcoreinfo vmgenid PIIX* port92 i8042 vmmouse \
    vmport kvm-* hpet mc146818rtc intel-iommu amd-iommu pc-dimm nvdimm ccid-card-* smbus-* \
    split-irq";
/// Types of objects that are backends of such.
const OBJECTS: &str = "\
    memory-backend-ram memory-backend-memfd memory-backend-file memory-backend-shm iothread \
    throttle-group rng-* secret secret_keyring tls-* authz-* cryptodev-backend \
    cryptodev-backend-builtin cryptodev-backend-lkcf filter-* colo-compare can-bus \
    can-host-socketcan input-* main-loop thread-context pr-manager-helper qtest dbus-* \
    memory-region accel-*";
/// Network backends that are QEMU's own, or the kernel's with QEMU's page tables.
const NETWORK: &str = "\
    nic user tap bridge socket stream dgram hubport l2tpv3 vde netmap";
/// Block drivers that are.
const BLOCK: &str = "\
    file raw qcow2 host_device host_cdrom nbd rbd iscsi ssh gluster http https ftp ftps null-co \
    null-aio throttle blkdebug blklogwrites blkreplay blkverify qcow qed vmdk vdi vhdx vpc luks \
    dmg bochs cloop parallels copy-on-read copy-before-write preallocate quorum nfs vvfat \
    snapshot-access backup-top";

/// What QEMU is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Inquiry {
    Folder(usize),
    Objects,
    Network,
    Block,
    /// What a migration would do.
    Capabilities,
    Parameters,
    /// A property of the machine.
    Machine(usize),
    /// The last bytes of its firmware.
    Firmware,
    Tree,
    Backends,
    /// In which order QEMU has its RAM.
    Order,
    /// What QEMU itself writes to memory at each reset.
    Roms,
    /// Where a stretch of RAM is.
    Address(usize),
}

/// A command, its arguments, and what it is for.
pub type Question = (Inquiry, &'static str, Option<Value>);

/// What a round of questions has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Findings {
    pub begun: Instant,
    /// What forbids the agent to touch this VM, for people.
    pub objections: Vec<String>,
    pub firmware: Firmware,
    /// Where QEMU has its RAM.
    pub segments: Vec<Segment>,
}

impl Findings {
    /// Whether the only objection is that others discard memory. The agent decides on that one
    /// itself: with shared RAM, or preloaded, it can work all the same.
    pub fn leaves_it_to_the_agent(&self) -> bool {
        self.objections.iter().all(|o| o == OTHERS_DISCARD)
    }
}

#[derive(Debug, Default)]
pub struct Inventory {
    begun: Option<Instant>,
    waits: Vec<Inquiry>,
    answers: BTreeMap<Inquiry, Option<Value>>,
    /// What changes with the devices only: asked once for a connection, and when they changed.
    lasting: Option<Findings>,
    /// The next round asks for that again.
    anew: bool,
}

fn human(inquiry: Inquiry, line: &str) -> Question {
    (inquiry, "human-monitor-command", Some(json!({ "command-line": line })))
}

fn list(inquiry: Inquiry, path: &str) -> Question {
    (inquiry, "qom-list", Some(qmp_balloon::list(path)))
}

impl Inventory {
    /// Nothing that was heard holds any more.
    pub fn forget(&mut self) {
        *self = Inventory::default();
    }

    /// Machine, firmware and RAM are asked about again in the next round.
    pub fn look_anew(&mut self) {
        self.anew = true;
    }

    /// Whether machine, firmware and RAM were asked about longer ago than this.
    pub fn is_older_than(&self, age: Duration, now: Instant) -> bool {
        self.lasting.as_ref().is_some_and(|lasting| now - lasting.begun >= age)
    }

    /// Begins a round; empty while one is under way.
    pub fn questions(&mut self, now: Instant) -> Vec<Question> {
        if !self.waits.is_empty() {
            return Vec::new();
        }
        if std::mem::take(&mut self.anew) {
            self.lasting = None;
        }
        let folders = DEVICE_FOLDERS.iter().enumerate();
        let mut all: Vec<Question> = folders.map(|(i, f)| list(Inquiry::Folder(i), f)).collect();
        all.push(list(Inquiry::Objects, "/objects"));
        all.push(human(Inquiry::Network, "info network"));
        all.push((Inquiry::Block, "query-named-block-nodes", Some(json!({ "flat": true }))));
        all.push((Inquiry::Capabilities, "query-migrate-capabilities", None));
        all.push((Inquiry::Parameters, "query-migrate-parameters", None));
        if self.lasting.is_none() {
            for (i, property) in MACHINE.iter().enumerate() {
                let get = qmp_balloon::get("/machine", property);
                all.push((Inquiry::Machine(i), "qom-get", Some(get)));
            }
            all.push(human(Inquiry::Firmware, "xp /16xb 0xffffffd0"));
            all.push(human(Inquiry::Tree, "info mtree -f"));
            all.push((Inquiry::Backends, "query-memdev", None));
            all.push(human(Inquiry::Order, "info ramblock"));
            all.push(human(Inquiry::Roms, "info roms"));
        }
        self.begun = Some(now);
        self.waits = all.iter().map(|q| q.0).collect();
        all
    }

    /// Takes an answer; `None`: QEMU refused. What is to be asked next.
    pub fn answer(&mut self, inquiry: Inquiry, value: Option<Value>) -> Vec<Question> {
        self.waits.retain(|w| *w != inquiry);
        self.answers.insert(inquiry, value);
        let both = [Inquiry::Tree, Inquiry::Backends];
        if !both.contains(&inquiry) || both.iter().any(|b| self.waits.contains(b)) {
            return Vec::new();
        }
        let stretches = self.stretches();
        let starts = stretches.iter().map(|(start, ..)| format!("gpa2hva {start:#x}")).enumerate();
        let asked: Vec<Question> = starts.map(|(i, s)| human(Inquiry::Address(i), &s)).collect();
        self.waits.extend(asked.iter().map(|q| q.0));
        asked
    }

    /// When all of a round have come.
    pub fn findings(&mut self) -> Option<Findings> {
        let begun = self.begun.take_if(|_| self.waits.is_empty())?;
        let devices = |i| self.kinds(Inquiry::Folder(i), "its devices", device);
        let mut objections: Vec<String> = (0..DEVICE_FOLDERS.len()).flat_map(devices).collect();
        objections.extend(self.kinds(Inquiry::Objects, "its backends", object));
        objections.extend([self.network(), self.block(), self.migration()].concat());
        let lasting = self.lasting.take().unwrap_or_else(|| self.lasting(begun));
        self.answers.clear();
        objections.extend(lasting.objections.iter().cloned());
        objections.sort();
        objections.dedup();
        objections.truncate(OBJECTIONS_MAX - 2);
        let objections =
            objections.iter().map(|o| if o == OTHERS_DISCARD { o.clone() } else { clip(o) });
        let objections = objections.collect();
        let findings = Findings { begun, objections, ..lasting.clone() };
        self.lasting = Some(lasting);
        Some(findings)
    }

    fn lasting(&self, begun: Instant) -> Findings {
        let (segments, order) = self.segments();
        let mut objections = self.machine();
        objections.extend(self.roms());
        objections.extend(order);
        Findings { begun, objections, firmware: self.firmware(), segments }
    }

    fn value(&self, inquiry: Inquiry) -> Option<&Value> {
        self.answers.get(&inquiry)?.as_ref()
    }

    fn text(&self, inquiry: Inquiry) -> &str {
        self.value(inquiry).and_then(Value::as_str).unwrap_or_default()
    }

    /// What is wrong with types of children.
    fn kinds(&self, of: Inquiry, what: &str, wrong: fn(&str) -> Option<String>) -> Vec<String> {
        match children(self.value(of)) {
            Some(kinds) => kinds.iter().filter_map(|kind| wrong(kind)).collect(),
            None => vec![untold(what)],
        }
    }

    fn network(&self) -> Vec<String> {
        let Some(text) = self.value(Inquiry::Network).and_then(Value::as_str) else {
            return vec![untold("its network backends")];
        };
        text.lines().filter(|l| !l.trim().is_empty()).filter_map(network).collect()
    }

    fn block(&self) -> Vec<String> {
        let Some(nodes) = self.value(Inquiry::Block).and_then(Value::as_array) else {
            return vec![untold("its block drivers")];
        };
        let drivers = nodes.iter().map(|n| n["drv"].as_str().unwrap_or("?"));
        let unknown = drivers.filter(|d| !matches(BLOCK, d));
        unknown.map(|d| format!("block driver “{d}” may write to guest memory by itself")).collect()
    }

    fn migration(&self) -> Vec<String> {
        let mut found = Vec::new();
        let all = self.value(Inquiry::Capabilities).and_then(Value::as_array);
        let parameters = self.value(Inquiry::Parameters).filter(|p| p.is_object());
        let (Some(all), Some(parameters)) = (all, parameters) else {
            return vec![untold("how it migrates")];
        };
        for (name, why) in [
            ("x-ignore-shared", "another QEMU may map this memory (x-ignore-shared)"),
            ("background-snapshot", "QEMU guards this memory itself (background-snapshot)"),
        ] {
            let on =
                all.iter().find(|c| c["capability"] == name).is_some_and(|c| c["state"] == true);
            found.extend(on.then(|| why.to_owned()));
        }
        let mode = parameters["mode"].as_str().filter(|m| *m != "normal");
        found.extend(mode.map(|m| format!("another QEMU may map this memory (migration “{m}”)")));
        found
    }

    fn machine(&self) -> Vec<String> {
        let of = |i: usize| self.text(Inquiry::Machine(i));
        let mut found = Vec::new();
        if !of(0).starts_with("pc-") {
            found.push(format!("machine “{}” is not known", of(0)));
        }
        if [3, 4].iter().all(|i| self.value(Inquiry::Machine(*i)).is_none()) {
            found.push(untold("whether guest memory is encrypted"));
        }
        for i in [3, 4] {
            if !of(i).is_empty() {
                found.push(format!("guest memory is encrypted ({})", MACHINE[i]));
            }
        }
        found
    }

    /// A kernel of ELF format, for one, is in RAM at each reset before firmware runs, and before a
    /// tripwire tells of the reset (`hw/core/loader.c`, `rom_reset`).
    fn roms(&self) -> Option<String> {
        let Some(text) = self.value(Inquiry::Roms).and_then(Value::as_str) else {
            return Some(untold("what it writes to memory at a reset"));
        };
        let name = |line: &str| line.split_once("name=").map_or("?", |(_, name)| name).to_owned();
        let image = text.lines().find(|line| line.contains(" mem=ram "))?;
        Some(format!("QEMU writes {} to RAM at each reset (-kernel of ELF format)", name(image)))
    }

    /// What is seen in the firmware's memory, then what QEMU says that it loads.
    fn firmware(&self) -> Firmware {
        let bytes =
            self.text(Inquiry::Firmware).lines().filter_map(|l| Some(l.split_once(": ")?.1));
        let bytes = bytes.flat_map(|l| l.split_whitespace());
        let bytes: String = bytes.map(|b| b.strip_prefix("0x").unwrap_or(b)).collect();
        let file = self.text(Inquiry::Machine(2));
        let name = file.rsplit('/').next().unwrap_or(file);
        if bytes == EDK2_GUID {
            Firmware::Edk2
        } else if self.text(Inquiry::Machine(1)).is_empty()
            // Told, and no file: QEMU's own for such a machine.
            && self.value(Inquiry::Machine(2)).is_some()
            && (name.is_empty() || SEABIOS.contains(&name))
        {
            Firmware::Seabios
        } else {
            Firmware::Unknown
        }
    }

    /// Stretches of RAM: start, end, and the backend's name.
    fn stretches(&self) -> Vec<(u64, u64, String)> {
        let backends = self.value(Inquiry::Backends).and_then(Value::as_array);
        let id = |b: &Value| b["id"].as_str().map(str::to_owned);
        let ids: Vec<String> = backends.into_iter().flatten().filter_map(id).collect();
        let tree = main_ram(&parse_mtree(self.text(Inquiry::Tree)));
        let ram = tree.into_iter().map(|r| (r.start, r.end, plain(&r.name).to_owned()));
        ram.filter(|r| ids.is_empty() || ids.contains(&r.2)).take(STRETCHES).collect()
    }

    /// Where RAM is. QEMU loads a snapshot in the order in which it has its RAM: what it
    /// writes first has to hold a tripwire.
    fn segments(&self) -> (Vec<Segment>, Option<String>) {
        if self.value(Inquiry::Backends).and_then(Value::as_array).is_none() {
            return (Vec::new(), Some(untold("what backs its RAM")));
        }
        let stretches = self.stretches();
        let mut segments = Vec::new();
        for (i, (start, end, _)) in stretches.iter().enumerate() {
            match parse_gpa2hva(self.text(Inquiry::Address(i))) {
                Some(hva) => segments.push(Segment { gpa: *start, size: end - start, hva }),
                None => return (Vec::new(), Some(untold("where its RAM is"))),
            }
        }
        let names: Vec<&str> = stretches.iter().map(|s| s.2.as_str()).collect();
        let lines = self.text(Inquiry::Order).lines();
        let mut blocks = lines.filter_map(|l| Some(plain(l.split_whitespace().next()?)));
        let first = blocks.find(|b| names.contains(b));
        let wrong = first != names.first().copied();
        let why = "QEMU would load a snapshot into another part of RAM before guest page 0: start \
            it with the largest part first";
        (segments, (wrong && names.len() > 1 || first.is_none()).then(|| why.into()))
    }
}

/// A backend's own name.
fn plain(name: &str) -> &str {
    name.strip_prefix("/objects/").unwrap_or(name)
}

fn untold(what: &str) -> String {
    format!("QEMU does not tell {what}")
}

fn matches(list: &str, name: &str) -> bool {
    list.split(' ').any(|known| match known.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == known,
    })
}

/// Types of the children that `qom-list` tells.
fn children(value: Option<&Value>) -> Option<Vec<String>> {
    let kind = |item: &Value| {
        let kind = item["type"].as_str().unwrap_or("?");
        match kind.strip_prefix("child<") {
            Some(inner) => Some(inner.trim_end_matches('>').to_owned()),
            None if matches("string link<* bool", kind) => None,
            None => Some(kind.to_owned()),
        }
    };
    Some(value?.as_array()?.iter().filter_map(kind).collect())
}

fn device(kind: &str) -> Option<String> {
    let harmless = matches(DEVICES, kind) || kind.ends_with("-x86_64-cpu");
    match kind {
        _ if kind.starts_with("virtio-mem") => Some(OTHERS_DISCARD.into()),
        _ if kind.starts_with("vhost-user") => Some(format!(
            "a vhost-user device ({kind}) writes to guest memory unseen by userfaultfd"
        )),
        _ if kind.starts_with("vfio") => {
            Some(format!("a VFIO device ({kind}) writes to guest memory by itself"))
        }
        _ if harmless => None,
        _ => Some(format!("device “{kind}” may write to guest memory by itself")),
    }
}

fn object(kind: &str) -> Option<String> {
    let encrypted = ["sev-", "tdx-", "s390-pv-"].iter().any(|p| kind.starts_with(p));
    match kind {
        _ if encrypted => Some(format!("guest memory is encrypted ({kind})")),
        _ if matches(OBJECTS, kind) => None,
        _ => Some(format!("backend “{kind}” may write to guest memory by itself")),
    }
}

/// A line of `info network`: `NAME: index=0,type=user,…`, after ` \ ` for a backend.
fn network(line: &str) -> Option<String> {
    if line.trim_start().starts_with("hub ") {
        return None;
    }
    let kind = line
        .split_once(": index=")
        .and_then(|(_, rest)| rest.split(',').find_map(|part| part.strip_prefix("type=")));
    match kind {
        Some(kind) if matches(NETWORK, kind) => None,
        Some(kind) => Some(format!(
            "network backend “{kind}” may write to guest memory unseen by userfaultfd"
        )),
        None => Some(untold("its network backends in words that are known")),
    }
}

#[cfg(test)]
mod tests;
