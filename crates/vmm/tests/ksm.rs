//! RAM that an agent works on is closed to KSM, however often it is opened: a
//! merged page has lost its write-protection.

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::*;
use ebb_vmm::faults::Faults;

/// Whether any mapping within the guest's memory is marked for KSM (`mg`).
fn open(guest: &Guest) -> bool {
    let (start, end) = (guest.memory.address(), guest.memory.address() + guest.pages * 4096);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    smaps.lines().any(|line| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let hex = |t| u64::from_str_radix(t, 16).ok();
        if let Some((Some(from), Some(to))) = range.map(|(a, b)| (hex(a), hex(b))) {
            within = from < end && to > start;
        }
        within && line.starts_with("VmFlags:") && line.split(' ').any(|f| f == "mg")
    })
}

#[test]
fn an_agent_takes_ram_out_of_ksm_before_it_protects_and_keeps_it_out() {
    for memory in [Memory::Small, Memory::Huge] {
        let guest = Guest::new(32, memory);
        if guest.memory.mergeable().is_err() {
            eprintln!("skipped: this kernel has no KSM");
            return;
        }
        assert!(open(&guest), "as QEMU opens it");
        let (mut agent, beats) = attached(&guest, Faults::default());
        assert!(!open(&guest));
        guest.memory.mergeable().unwrap();
        assert!(open(&guest), "somebody opened it again");
        let until = Instant::now() + Duration::from_secs(20);
        while open(&guest) && Instant::now() < until {
            agent.step();
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!open(&guest));
        guest.stop.store(true, SeqCst);
        beats.join().unwrap();
    }
}

#[test]
fn shared_ram_is_no_matter_of_ksm() {
    let guest = Guest::new(32, Memory::Memfd);
    let (_agent, beats) = attached(&guest, Faults::default());
    assert!(!open(&guest));
    guest.stop.store(true, SeqCst);
    beats.join().unwrap();
}
