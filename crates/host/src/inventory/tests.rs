//! Rounds against answers as QEMU 7.2 gives them, and against what it never gave.

use ebb_core::wire::firmware::Firmware;
use serde_json::{Value, json};

use super::Inquiry::*;
use super::*;

const TREE: &str = "FlatView #0
 AS \"memory\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): a
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  0000000000100000-0000000003ffffff (prio 0, ram): a @0000000000100000
  0000000004000000-000000001fffffff (prio 0, ram): b
";
const ORDER: &str = "  Block Name  PSize Offset Used Total\n  a  4 KiB 0x0 0x0 0x0\n \
    /objects/b  4 KiB 0x0 0x0 0x0\n  pc.rom 4 KiB 0x0 0x0 0x0\n";
const ROMS: &str = "fw=genroms/kvmvapic.bin size=0x002400 name=\"kvmvapic.bin\"\r\n\
    addr=00000000fffc0000 size=0x040000 mem=rom name=\"bios-256k.bin\"\r\n\
    /rom@etc/acpi/tables size=0x200000 name=\"etc/acpi/tables\"\r\n";
const NETWORK: &str = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00\r\n \
    \\ n0: index=0,type=user,net=10.0.2.0,restrict=off\r\n";

fn plain(inquiry: Inquiry) -> Option<Value> {
    let child = |kind: &str| json!({ "name": "x", "type": format!("child<{kind}>") });
    let none = json!([{ "name": "type", "type": "string" }]);
    match inquiry {
        Folder(0) => Some(json!([child("virtio-balloon-pci"), child("virtio-blk-pci")])),
        Folder(_) => Some(none),
        Objects => Some(json!([child("memory-backend-ram"), child("memory-backend-ram")])),
        Network => Some(json!(NETWORK)),
        Block => Some(json!([{ "drv": "qcow2" }, { "drv": "file" }])),
        Capabilities => Some(json!([{ "capability": "x-ignore-shared", "state": false }])),
        Parameters => Some(json!({ "max-bandwidth": 1 })),
        Machine(0) => Some(json!("pc-i440fx-7.2-machine")),
        Machine(1) => None,
        Machine(2) => Some(json!("bios-256k.bin")),
        Machine(_) => Some(json!("")),
        Inquiry::Firmware => Some(json!("00000000ffffffd0: 0x00 0x01\r\n")),
        Tree => Some(json!(TREE)),
        Backends => Some(json!([{ "id": "a" }, { "id": "b" }])),
        Order => Some(json!(ORDER)),
        Roms => Some(json!(ROMS)),
        Address(i) => Some(json!(format!("Host virtual address for 0x0 (a) is 0x7f{i}0000\r\n"))),
    }
}

/// Answers to the end of a round.
fn end(
    inventory: &mut Inventory,
    mut waiting: Vec<Question>,
    says: impl Fn(Inquiry) -> Option<Value>,
) {
    while let Some((inquiry, ..)) = waiting.pop() {
        assert_eq!(inventory.findings(), None);
        waiting.extend(inventory.answer(inquiry, says(inquiry)));
    }
}

/// A whole round.
fn round(says: impl Fn(Inquiry) -> Option<Value>) -> Findings {
    let mut inventory = Inventory::default();
    let waiting = inventory.questions(Instant::now());
    end(&mut inventory, waiting, says);
    inventory.findings().unwrap()
}

#[test]
fn a_plain_vm_is_known_whole() {
    let findings = round(plain);
    assert_eq!((&findings.objections[..], findings.firmware), (&[][..], Firmware::Seabios));
    let segment = |gpa, size, hva| Segment { gpa, size, hva };
    let low = segment(0, 0x400_0000, 0x7f00000);
    assert_eq!(findings.segments, [low, segment(0x400_0000, 0x1c00_0000, 0x7f10000)]);
}

/// A VM that is plain but for one answer.
fn but(inquiry: Inquiry, says: Option<Value>) -> impl Fn(Inquiry) -> Option<Value> {
    move |asked| if asked == inquiry { says.clone() } else { plain(asked) }
}

/// That answer is an objection with these words.
fn objects(all: &[(Inquiry, Option<Value>, &str)]) {
    for (inquiry, says, words) in all {
        let told = round(but(*inquiry, says.clone())).objections.join("; ");
        assert!(told.contains(words), "{inquiry:?} {says:?}: {told}");
    }
}

fn text(text: &str) -> Option<Value> {
    Some(json!(text))
}

#[test]
fn what_is_not_known_to_be_harmless_is_an_objection() {
    let kind = |kind| Some(json!([{ "name": "x", "type": format!("child<{kind}>") }]));
    let passt = "n: index=0,type=passt,vhost-user,connected to pid 7\n";
    objects(&[
        (Folder(1), kind("vhost-user-fs-pci"), "unseen"),
        (Folder(0), kind("vfio-user-pci"), "VFIO"),
        (Folder(0), kind("x-pci-proxy-dev"), "x-pci-proxy"),
        (Folder(0), kind("virtio-mem-pci"), "virtio-mem"),
        (Folder(0), kind("ivshmem-plain"), "ivshmem"),
        (Folder(0), kind("virtio-gpu-gl-pci"), "gpu-gl"),
        (Objects, kind("cryptodev-vhost-user"), "cryptodev"),
        (Objects, kind("sev-snp-guest"), "encrypted"),
        (Objects, kind("iommufd"), "iommufd"),
        (Network, text("n: index=0,type=vhost-user,chardev=c\r\n"), "“vhost-user”"),
        (Network, text(passt), "“passt”"),
        (Network, text("n: type=user\n"), "not tell"),
        (Block, Some(json!([{ "drv": "virtio-blk-vhost-vdpa" }, {}])), "vhost-vdpa"),
        (
            Capabilities,
            Some(json!([{ "capability": "x-ignore-shared", "state": true }])),
            "x-ignore-shared",
        ),
        (Parameters, Some(json!({ "mode": "cpr-transfer" })), "cpr-transfer"),
        (Machine(0), text("microvm-machine"), "microvm"),
        (Machine(3), text("/objects/sev0"), "encrypted"),
        (
            Roms,
            text("addr=0000000001000000 size=0x1f00000 mem=ram name=\"phdr #0: vmlinux\"\r\n"),
            "vmlinux",
        ),
    ]);
}

#[test]
fn what_qemu_does_not_tell_is_an_objection() {
    objects(&[
        (Folder(0), None, "not tell its devices"),
        (Folder(1), text("?"), "not tell its devices"),
        (Objects, None, "backends"),
        (Network, None, "network"),
        (Block, Some(json!({})), "block"),
        (Machine(0), None, "machine"),
        (Address(1), text("No memory is mapped"), "RAM"),
        (Order, None, "snapshot"),
        (Roms, None, "at a reset"),
        (Backends, None, "what backs its RAM"),
        (Capabilities, None, "how it migrates"),
        (Parameters, None, "how it migrates"),
        (Order, text("Block\n b 4 KiB\n a 4 KiB\n"), "before guest page 0"),
    ]);
    let unknown = |asked| if matches!(asked, Machine(3 | 4)) { None } else { plain(asked) };
    assert!(round(unknown).objections.join("; ").contains("is encrypted"));
    assert_eq!(round(but(Machine(2), None)).firmware, Firmware::Unknown);
}

#[test]
fn firmware_is_known_by_a_positive_match() {
    let edk2 = "00000000ffffffd0: 0xde 0x82 0xb5 0x96 0xb2 0x1f 0xf7 0x45\r\n\
        00000000ffffffd8: 0xba 0xea 0xa3 0x66 0xc5 0x5a 0x08 0x2d\r\n";
    assert_eq!(round(but(Inquiry::Firmware, Some(json!(edk2)))).firmware, Firmware::Edk2);
    // Flash that holds something else, and files that are called otherwise.
    let flash = round(but(Machine(1), Some(json!("pflash0"))));
    assert_eq!(flash.firmware, Firmware::Unknown);
    for (file, is) in [
        ("/fw/bios_ovmf.fd", Firmware::Unknown),
        ("qboot.rom", Firmware::Unknown),
        ("/usr/share/seabios/bios-256k.bin", Firmware::Seabios),
    ] {
        let found = round(but(Machine(2), Some(json!(file))));
        assert_eq!(found.firmware, is, "{file}");
    }
}

#[test]
fn a_later_round_asks_for_what_comes_and_goes() {
    let mut inventory = Inventory::default();
    let begin = |inventory: &mut Inventory| {
        let waiting = inventory.questions(Instant::now());
        let asked = waiting.len();
        assert!(inventory.questions(Instant::now()).is_empty(), "one is under way");
        end(inventory, waiting, plain);
        (asked, inventory.findings().unwrap())
    };
    let (first, known) = begin(&mut inventory);
    let (second, again) = begin(&mut inventory);
    assert_eq!((first, second), (17, 7));
    assert_eq!((known.segments, known.firmware), (again.segments, again.firmware));
    inventory.look_anew();
    assert_eq!(begin(&mut inventory).0, first);
    // Devices change while a round is under way: the next one asks for all.
    let waiting = inventory.questions(Instant::now());
    inventory.look_anew();
    end(&mut inventory, waiting, plain);
    assert!(inventory.findings().is_some() && inventory.findings().is_none(), "told once");
    assert_eq!(begin(&mut inventory).0, first);
}
