//! Snapshots of guests whose RAM is in several parts: NUMA nodes, a DIMM. QEMU loads the
//! largest part first, each from its first page on. Where guest page 0 is in that part, its
//! tripwire is met before any other page is written; elsewhere the agent stands aside.

use std::ops::Range;

use ebb_host::probe::regions::read_smaps;
use ebb_lab::agent_requests;

use super::moves::{add_image, snapshot};
use super::*;

/// What is checked of the snapshot, most of it in the other part.
const CHECKED: u64 = 230 << 20;
/// Checks after which all of it was looked at about once.
const ALL: u64 = 60_000;
/// What at least the host holds of the other part, and how much less at the load.
const MUCH: Bytes = Bytes::mib(64);
const TAKEN: Bytes = Bytes::mib(16);

/// How RAM is divided, in MiB: what holds guest page 0, then the other part. Of that the
/// guest takes first: it is nearer to its vCPU, or lies beyond 4 GiB.
#[derive(Clone, Copy, Debug)]
enum Parts {
    Nodes(u64, u64),
    Dimm(u64, u64),
}

impl Parts {
    fn boot(self, kernel: Kernel, faults: &str) -> Guest {
        let guest = Guest::boot(kernel, |c| {
            if !faults.is_empty() {
                guest_stack::leave_out(c, faults).unwrap();
            }
            let words = match self {
                Parts::Nodes(first, other) => {
                    c.memory = Bytes::mib(first + other);
                    format!(
                        "-object memory-backend-ram,id=m0,size={first}M \
                         -object memory-backend-ram,id=m1,size={other}M \
                         -numa node,nodeid=0,memdev=m0 -numa node,nodeid=1,cpus=0,memdev=m1"
                    )
                }
                Parts::Dimm(first, other) => {
                    c.memory = Bytes::mib(first);
                    c.append = "memhp_default_state=online".into();
                    format!(
                        "-m slots=1,maxmem=2G -object memory-backend-ram,id=d0,size={other}M \
                         -device pc-dimm,id=dimm0,memdev=d0"
                    )
                }
            };
            c.args.extend(words.split_whitespace().map(String::from));
        });
        let there = guest.vm.request("meminfo", MINUTE).unwrap().u64("MemTotal");
        let (Parts::Nodes(first, other) | Parts::Dimm(first, other)) = self;
        // Not all of it is the guest's: above 4 GiB it sets 64 MiB apart for devices.
        assert!(there > (first + other - 128) << 20, "{self:?}: the guest has {there} bytes");
        guest
    }
}

/// Where the other part is.
fn other_part(guest: &Guest) -> Range<u64> {
    let mut qmp = qmp::Client::new(&guest.vm.qmp_path);
    let parts = agent_requests::segments(&mut qmp, MINUTE).unwrap();
    assert_eq!(parts.len(), 2, "{parts:?}");
    parts[1].hva..parts[1].hva + parts[1].size
}

/// What the host holds of it.
fn held(guest: &Guest, part: &Range<u64>) -> Bytes {
    let all = read_smaps(&Root::default(), guest.vm.pid).unwrap().unwrap();
    all.iter().filter(|r| part.contains(&r.range.start)).map(|r| r.resident).sum()
}

/// Again and again: the guest frees what was in use when the snapshot was taken, the host
/// recycles it, and QEMU loads the snapshot without a word to the agent. The error says what
/// was lost.
fn load(parts: Parts, kernel: Kernel, faults: &str, times: u64) -> Result<(), String> {
    let guest = parts.boot(kernel, faults);
    add_image(&guest);
    guest.insmod();
    guest.start_verify(CHECKED, "");
    let recycling = guest.recycle();
    guest.verify_on(ALL);
    let (saved, other) = (guest.verified(), other_part(&guest));
    snapshot(&guest, "snapshot-save");
    for round in 0..times {
        recycling.wait_ready(&guest.vm);
        // How much memory `verify` has goes up and down.
        let much = |_: &Vm| Some(held(&guest, &other)).filter(|held| *held >= MUCH);
        let before = guest.vm.wait_for("use of the other part", MINUTE, much).unwrap();
        guest.stop_verify();
        let taken = |_: &Vm| Some(before - held(&guest, &other)).filter(|t| *t >= TAKEN);
        let gone = guest.vm.wait_for("the other part to be taken", MINUTE, taken).unwrap();
        let trips = recycling.seen().status.counters.trips;
        snapshot(&guest, "snapshot-load");
        super::faults::checked(&guest, ALL)?;
        assert!(guest.verified() >= saved, "{parts:?} {round}: not the snapshot");
        let tripped = recycling.seen().status.counters.trips - trips;
        println!("{kernel} {parts:?} {round}: {gone} of the other part taken, {tripped} trips");
        assert!(tripped > 0 || !faults.is_empty(), "{parts:?} {round}: {:?}", recycling.seen());
        if faults.is_empty() {
            recycling.wait_ready(&guest.vm);
            assert_eq!(guest.audit_false(), 0);
        }
    }
    guest.stop_verify();
    println!("{kernel} {parts:?}: {:?}", recycling.seen().status.counters);
    Ok(())
}

#[test]
fn vm_a_guest_loaded_into_several_parts_of_ram_loses_nothing() {
    let _arena = crate::held();
    for kernel in kernels(Kernel::V6_12) {
        for parts in [Parts::Nodes(192, 192), Parts::Nodes(256, 128), Parts::Dimm(256, 128)] {
            load(parts, kernel, "", rounds().min(8)).unwrap();
        }
    }
}

/// No step is left out but the daemon's question: QEMU loads the other part before it
/// meets a tripwire, and all of that part that is free by the old map is taken.
#[test]
fn vm_without_the_tripwire_a_loaded_part_of_ram_is_taken_apart() {
    let _arena = crate::held();
    let lost =
        (0..3).find_map(|_| load(Parts::Nodes(160, 224), Kernel::V6_12, "no_beats", 5).err());
    println!("{lost:?}");
    assert!(lost.is_some(), "nothing was lost in fifteen loads");
}

#[test]
fn vm_ram_whose_first_part_would_be_loaded_late_is_left_alone() {
    let _arena = crate::held();
    for (parts, alone) in [(Parts::Nodes(128, 256), true), (Parts::Nodes(192, 192), false)] {
        let guest = parts.boot(Kernel::V6_12, "");
        guest.insmod();
        let daemon = Daemon::start(&guest.dir.path().join("daemon"), &[&guest.vm.name], "");
        let daemon = daemon.unwrap();
        let said = |s: &Value| {
            let vm = &s["vms"][0];
            let aside = vm["agent"]["why"].to_string().contains("largest part first");
            (aside || vm["tier"] == "guest").then_some(aside)
        };
        assert_eq!(daemon.wait_for("an answer", MINUTE, said).unwrap(), alone, "{parts:?}");
        assert!(daemon.stop());
    }
}
