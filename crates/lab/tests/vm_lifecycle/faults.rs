//! Steps of the defence left out, one after the other: each time something is
//! lost that is not lost with the step in place (`resets`, `soak`).
//!
//! Protection and second reading are left out in `vm_recycle`.

use serde_json::json;

use crate::resets::{Boot, verify_boot};
use crate::*;

fn registers(vm: &Vm) -> String {
    let line = json!({ "command-line": "info registers" });
    let said = vm.qmp("human-monitor-command", Some(line)).unwrap_or_default();
    said.as_str().unwrap_or_default().to_string()
}

/// Whether its one vCPU halts with interrupts off: it never runs again.
fn dead(vm: &Vm) -> bool {
    let all = registers(vm);
    let flags = all.split("FL=").nth(1).and_then(|f| u64::from_str_radix(f.get(..8)?, 16).ok());
    all.contains("HLT=1") && flags.is_some_and(|f| f & 0x200 == 0)
}

fn ready(vm: &Vm) -> usize {
    vm.console().matches("ebb-guest-tool: ready on").count()
}

/// Resets by the button, until a boot shows what was lost to the old map. The
/// test's thread tells the agent nothing of resets, so page 0 and the challenge
/// are all there is.
fn reset_until_lost(faults: &str, tries: u32) -> Option<String> {
    let mut guest = Guest::boot_with_faults(Kernel::V6_12, faults, |_| ());
    let (first, usual) = (Boot::look(&guest).unwrap(), guest.vm.boot_time);
    let recycling = Recycling::start(&guest.vm, &guest.socket);
    for round in 0..tries {
        guest.insmod();
        recycling.wait_ready(&guest.vm);
        // All that is free once, so that what is taken from here on is live.
        let calls = recycling.seen().calls;
        let twice = |_: &Vm| (recycling.seen().calls > calls + 2).then_some(());
        guest.vm.wait_for("recycling", MINUTE, twice).unwrap();
        guest.vm.reset().unwrap();
        let end = |vm: &Vm| (dead(vm) || ready(vm) > round as usize + 1).then_some(());
        // A boot that hangs may say nothing at all.
        let limit = (usual * 10).max(SOON).div_f64(guest.vm.accel().patience());
        if let Err(e) = guest.vm.wait_for("an end of the boot", limit, end) {
            println!("{faults} {round}: {e}");
            return Some("it did not boot".into());
        }
        if dead(&guest.vm) {
            println!("{faults} {round}: {}", registers(&guest.vm));
            return Some("its vCPU halted for good".into());
        }
        let found = booted(&mut guest, &first);
        println!("{faults} {round}: {found:?}");
        if let Err(why) = found {
            return Some(why);
        }
    }
    None
}

/// Whether a boot went well; the error is what was lost of it.
fn booted(guest: &mut Guest, first: &Boot) -> Result<(), String> {
    let brief = |e: VmError| e.to_string().chars().take(120).collect::<String>();
    guest.vm.wait_ready().map_err(brief)?;
    let boot = Boot::look(guest).map_err(brief)?;
    boot.differs(first).map_or(Ok(()), Err)?;
    verify_boot(guest, 2).map(drop)
}

#[test]
fn vm_without_the_tripwire_a_reset_ruins_the_next_boot() {
    let _arena = held();
    assert!(reset_until_lost("no_tripwire", 10).is_some(), "nothing was lost in ten resets");
}

#[test]
fn vm_without_the_challenge_the_picture_of_a_map_is_used() {
    let _arena = held();
    assert!(reset_until_lost("no_challenge", 10).is_some(), "nothing was lost in ten resets");
}

/// Recycles under `verify`; whether it saw an error within some time.
fn contest(faults: &str, time: Duration) -> bool {
    let guest = Guest::boot_with_faults(Kernel::V6_12, faults, |c| c.cpus = 2);
    guest.insmod();
    let recycling = Recycling::start(&guest.vm, &guest.socket);
    recycling.wait_ready(&guest.vm);
    let tool = guest.vm.tool();
    tool.start("v", "verify", "size=300000000 seconds=100000 threads=2").unwrap();
    let until = Instant::now() + time;
    let mut lost = false;
    // The page may be the kernel's: a guest that dies has lost it as well.
    while !lost && Instant::now() < until {
        sleep(Duration::from_millis(100));
        lost = guest.vm.check().is_err() || tool.stat("v").map_or(true, |v| v.u64("errors") > 0);
    }
    println!("{faults}: lost {lost}: {:?}", recycling.seen());
    lost
}

/// `WP_UNPOPULATED` alone cannot be missed: the agent chooses pages that the host
/// holds, and those can be protected without it. It is there for pages that go
/// between choice and protection, by a hand that is not the agent's. `any_page`
/// stands for that hand: pages are chosen whether or not the host holds them.
#[test]
fn vm_absent_pages_are_lost_where_they_cannot_be_protected() {
    let _arena = held();
    assert!(!contest("any_page+wide", Duration::from_secs(5)), "lost although protected");
    assert!(contest("no_unpopulated+any_page+wide", 2 * MINUTE), "nothing was lost");
}
