//! Rounds against answers as QEMU 7.2 gives them, and against what it never gave.

use ebb_core::wire::firmware::Firmware;
use serde_json::{Value, json};

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
const NETWORK: &str = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00\r\n \
    \\ n0: index=0,type=user,net=10.0.2.0,restrict=off\r\n";

fn plain(inquiry: Inquiry) -> Option<Value> {
    let child = |kind: &str| json!({ "name": "x", "type": format!("child<{kind}>") });
    let none = json!([{ "name": "type", "type": "string" }]);
    match inquiry {
        Inquiry::Folder(0) => Some(json!([child("virtio-balloon-pci"), child("virtio-blk-pci")])),
        Inquiry::Folder(_) => Some(none),
        Inquiry::Objects => Some(json!([child("memory-backend-ram"), child("memory-backend-ram")])),
        Inquiry::Network => Some(json!(NETWORK)),
        Inquiry::Block => Some(json!([{ "drv": "qcow2" }, { "drv": "file" }])),
        Inquiry::Capabilities => Some(json!([{ "capability": "x-ignore-shared", "state": false }])),
        Inquiry::Parameters => Some(json!({ "max-bandwidth": 1 })),
        Inquiry::Machine(0) => Some(json!("pc-i440fx-7.2-machine")),
        Inquiry::Machine(1) => None,
        Inquiry::Machine(2) => Some(json!("bios-256k.bin")),
        Inquiry::Machine(_) => Some(json!("")),
        Inquiry::Firmware => Some(json!("00000000ffffffd0: 0x00 0x01\r\n")),
        Inquiry::Tree => Some(json!(TREE)),
        Inquiry::Backends => Some(json!([{ "id": "a" }, { "id": "b" }])),
        Inquiry::Order => Some(json!(ORDER)),
        Inquiry::Address(i) => {
            Some(json!(format!("Host virtual address for 0x0 (a) is 0x7f{i}0000\r\n")))
        }
    }
}

/// A whole round.
fn round(says: impl Fn(Inquiry) -> Option<Value>) -> Findings {
    let mut inventory = Inventory::default();
    let mut waiting = inventory.questions(Instant::now());
    while let Some((inquiry, ..)) = waiting.pop() {
        assert_eq!(inventory.findings(), None);
        waiting.extend(inventory.answer(inquiry, says(inquiry)));
    }
    inventory.findings().unwrap()
}

fn objections(says: impl Fn(Inquiry) -> Option<Value>) -> String {
    round(says).objections.join("; ")
}

#[test]
fn a_plain_vm_is_known_whole() {
    let findings = round(plain);
    assert_eq!(
        (findings.objections.join("; ").as_str(), findings.firmware),
        ("", Firmware::Seabios)
    );
    let segment = |gpa, size, hva| Segment { gpa, size, hva };
    let low = segment(0, 0x400_0000, 0x7f00000);
    assert_eq!(findings.segments, [low, segment(0x400_0000, 0x1c00_0000, 0x7f10000)]);
}

/// A VM that is plain but for one answer.
macro_rules! but {
    ($inquiry:pat, $says:expr) => {
        |inquiry: Inquiry| if matches!(inquiry, $inquiry) { $says } else { plain(inquiry) }
    };
}

fn kinds(list: &[&str]) -> Option<Value> {
    let all = list.iter().map(|k| json!({ "name": "x", "type": format!("child<{k}>") }));
    Some(all.collect())
}

#[test]
fn what_is_not_known_to_be_harmless_is_an_objection() {
    assert!(objections(but!(Inquiry::Folder(1), kinds(&["vhost-user-fs-pci"]))).contains("unseen"));
    assert!(objections(but!(Inquiry::Folder(0), kinds(&["vfio-user-pci"]))).contains("VFIO"));
    assert!(
        objections(but!(Inquiry::Folder(0), kinds(&["x-pci-proxy-dev"]))).contains("x-pci-proxy")
    );
    assert!(
        objections(but!(Inquiry::Folder(0), kinds(&["virtio-mem-pci"]))).contains("virtio-mem")
    );
    assert!(objections(but!(Inquiry::Folder(0), kinds(&["ivshmem-plain"]))).contains("ivshmem"));
    assert!(objections(but!(Inquiry::Folder(0), kinds(&["virtio-gpu-gl-pci"]))).contains("gpu-gl"));
    assert!(
        objections(but!(Inquiry::Objects, kinds(&["cryptodev-vhost-user"]))).contains("cryptodev")
    );
    assert!(objections(but!(Inquiry::Objects, kinds(&["sev-snp-guest"]))).contains("encrypted"));
    assert!(objections(but!(Inquiry::Objects, kinds(&["iommufd"]))).contains("iommufd"));
    let vhost = "n: index=0,type=vhost-user,chardev=c\r\n";
    assert!(objections(but!(Inquiry::Network, Some(json!(vhost)))).contains("“vhost-user”"));
    let passt = "n: index=0,type=passt,vhost-user,connected to pid 7\n";
    assert!(objections(but!(Inquiry::Network, Some(json!(passt)))).contains("“passt”"));
    assert!(objections(but!(Inquiry::Network, Some(json!("n: type=user\n")))).contains("not tell"));
    let block = json!([{ "drv": "virtio-blk-vhost-vdpa" }, {}]);
    assert!(objections(but!(Inquiry::Block, Some(block.clone()))).contains("vhost-vdpa"));
    let shared = json!([{ "capability": "x-ignore-shared", "state": true }]);
    assert!(
        objections(but!(Inquiry::Capabilities, Some(shared.clone()))).contains("x-ignore-shared")
    );
    let mode = json!({ "mode": "cpr-transfer" });
    assert!(objections(but!(Inquiry::Parameters, Some(mode.clone()))).contains("cpr-transfer"));
    assert!(
        objections(but!(Inquiry::Machine(0), Some(json!("microvm-machine")))).contains("microvm")
    );
    assert!(
        objections(but!(Inquiry::Machine(3), Some(json!("/objects/sev0")))).contains("encrypted")
    );
}

#[test]
fn what_qemu_does_not_tell_is_an_objection() {
    assert!(objections(but!(Inquiry::Folder(0), None)).contains("not tell its devices"));
    assert!(
        objections(but!(Inquiry::Folder(1), Some(json!("?")))).contains("not tell its devices")
    );
    assert!(objections(but!(Inquiry::Objects, None)).contains("backends"));
    assert!(objections(but!(Inquiry::Network, None)).contains("network"));
    assert!(objections(but!(Inquiry::Block, Some(json!({})))).contains("block"));
    assert!(objections(but!(Inquiry::Machine(0), None)).contains("machine"));
    assert!(
        objections(but!(Inquiry::Address(1), Some(json!("No memory is mapped")))).contains("RAM")
    );
    assert!(objections(but!(Inquiry::Order, None)).contains("snapshot"));
    assert!(objections(but!(Inquiry::Backends, None)).contains("what backs its RAM"));
    assert!(objections(but!(Inquiry::Capabilities, None)).contains("how it migrates"));
    assert!(objections(but!(Inquiry::Parameters, None)).contains("how it migrates"));
    assert!(objections(but!(Inquiry::Machine(3 | 4), None)).contains("is encrypted"));
    assert_eq!(round(but!(Inquiry::Machine(2), None)).firmware, Firmware::Unknown);
    let larger = "Block\n b 4 KiB\n a 4 KiB\n";
    assert!(objections(but!(Inquiry::Order, Some(json!(larger)))).contains("before guest page 0"));
}

#[test]
fn firmware_is_known_by_a_positive_match() {
    let edk2 = "00000000ffffffd0: 0xde 0x82 0xb5 0x96 0xb2 0x1f 0xf7 0x45\r\n\
        00000000ffffffd8: 0xba 0xea 0xa3 0x66 0xc5 0x5a 0x08 0x2d\r\n";
    assert_eq!(round(but!(Inquiry::Firmware, Some(json!(edk2)))).firmware, Firmware::Edk2);
    // Flash that holds something else, and files that are called otherwise.
    let flash = round(but!(Inquiry::Machine(1), Some(json!("pflash0"))));
    assert_eq!(flash.firmware, Firmware::Unknown);
    for (file, is) in [
        ("/fw/bios_ovmf.fd", Firmware::Unknown),
        ("qboot.rom", Firmware::Unknown),
        ("/usr/share/seabios/bios-256k.bin", Firmware::Seabios),
    ] {
        let found = round(but!(Inquiry::Machine(2), Some(json!(file))));
        assert_eq!(found.firmware, is, "{file}");
    }
}

#[test]
fn a_later_round_asks_for_what_comes_and_goes() {
    let mut inventory = Inventory::default();
    let begin = |inventory: &mut Inventory| {
        let mut waiting = inventory.questions(Instant::now());
        let asked = waiting.len();
        assert!(inventory.questions(Instant::now()).is_empty(), "one is under way");
        while let Some((inquiry, ..)) = waiting.pop() {
            waiting.extend(inventory.answer(inquiry, plain(inquiry)));
        }
        (asked, inventory.findings().unwrap())
    };
    let (first, known) = begin(&mut inventory);
    let (second, again) = begin(&mut inventory);
    assert_eq!((first, second), (16, 7));
    assert_eq!((known.segments, known.firmware), (again.segments, again.firmware));
    inventory.look_anew();
    assert_eq!(begin(&mut inventory).0, first);
    // Devices change while a round is under way: the next one asks for all.
    let mut waiting = inventory.questions(Instant::now());
    inventory.look_anew();
    while let Some((inquiry, ..)) = waiting.pop() {
        waiting.extend(inventory.answer(inquiry, plain(inquiry)));
    }
    assert!(inventory.findings().is_some() && inventory.findings().is_none(), "told once");
    assert_eq!(begin(&mut inventory).0, first);
}
