//! Steps of the defence left out, one after the other: each time something is
//! lost that is not lost with the step in place (`resets`, `soak`).
//!
//! Protection and second reading are left out in `recycle`.

use super::moves::{add_image, snapshot};
use super::resets::{Boot, Reset, brief, verify_boot};
use super::*;

/// Whether its one vCPU halts with interrupts off: it never runs again.
fn dead(vm: &Vm) -> bool {
    let all = registers(vm);
    let flags = all.split("FL=").nth(1).and_then(|f| u64::from_str_radix(f.get(..8)?, 16).ok());
    all.contains("HLT=1") && flags.is_some_and(|f| f & 0x200 == 0)
}

fn ready(vm: &Vm) -> usize {
    vm.console().matches("ebb-guest-tool: ready on").count()
}

/// Resets until a boot shows what was lost to the old map. The test's thread tells
/// the agent nothing of resets.
fn reset_until_lost(mut guest: Guest, kind: Reset, arguments: &str, tries: usize) -> bool {
    let (first, usual) = (Boot::look(&guest).unwrap(), guest.vm.boot_time);
    let recycling = Recycling::start(&guest.vm, &guest.socket);
    (0..tries).any(|round| {
        if let Err(e) = guest.try_sh(&format!("insmod /ebb.ko {arguments}")) {
            // What the last boot lost shows only now.
            assert!(round > 0, "{e}");
            println!("{kind:?} {round}: {e}");
            return true;
        }
        recycling.wait_ready(&guest.vm);
        // All that is free once, so that what is taken from here on is live.
        let calls = recycling.seen().calls;
        let twice = |_: &Vm| recycling.seen().calls > calls + 2;
        guest.vm.wait_for("recycling", MINUTE, twice).unwrap();
        kind.of(&guest).unwrap();
        let found = ended(&guest, round + 1, usual).and_then(|()| booted(&mut guest, &first));
        println!("{kind:?} {round}: {found:?}");
        found.is_err()
    })
}

/// Waits until a boot has come to an end, good or bad.
fn ended(guest: &Guest, boots: usize, usual: Duration) -> Result<(), String> {
    let end = |vm: &Vm| dead(vm) || ready(vm) > boots;
    // A boot that hangs may say nothing at all.
    let limit = (usual * 6).max(SOON).div_f64(guest.vm.accel.patience());
    guest.vm.wait_for("an end of the boot", limit, end).map_err(brief)?;
    if dead(&guest.vm) {
        return Err(format!("its vCPU halted for good: {:.60}", registers(&guest.vm)));
    }
    Ok(())
}

/// Whether a boot went well; the error is what was lost of it.
fn booted(guest: &mut Guest, first: &Boot) -> Result<(), String> {
    guest.vm.wait_ready().map_err(brief)?;
    let boot = Boot::look(guest)?;
    boot.differs(first).map_or(Ok(()), Err)?;
    verify_boot(guest, 2).map(drop)
}

#[test]
fn vm_without_the_tripwire_a_reset_ruins_the_next_boot() {
    let _arena = held();
    let guest = Guest::boot_with_faults(Kernel::V6_12, "no_tripwire+no_beats", |_| ());
    assert!(reset_until_lost(guest, Reset::Button, "", 10), "nothing was lost in ten resets");
}

#[test]
fn vm_without_the_challenge_the_picture_of_a_map_is_used() {
    let _arena = held();
    let guest = Guest::boot_with_faults(Kernel::V6_12, "no_challenge", |_| ());
    assert!(reset_until_lost(guest, Reset::Button, "", 10), "nothing was lost in ten resets");
}

/// No firmware writes to page 0 there: the module's own word is all that is as
/// fast as the next kernel.
#[test]
fn vm_without_the_modules_notifiers_kexec_ruins_the_next_boot() {
    const NOTIFIERS: &str = "fault=512";
    let _arena = held();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::boot(Kernel::V6_12, |c| {
        let image = Image::get(c.kernel).unwrap();
        c.files = vec![("ebb.ko".into(), guest_stack::module(&image, true).unwrap())];
        resets::config(c, dir.path());
    });
    assert!(reset_until_lost(guest, Reset::Kexec, NOTIFIERS, 10), "nothing was lost in ten resets");
}

/// What is free when a snapshot is loaded was in use when it was taken: `moves`
/// does the same with the tripwire, and loses nothing.
#[test]
fn vm_without_the_tripwire_a_loaded_snapshot_is_taken_apart() {
    let _arena = held();
    let guest = Guest::boot_with_faults(Kernel::V6_12, "no_tripwire+no_beats", |_| ());
    add_image(&guest);
    guest.insmod();
    guest.start_verify(250 << 20, "");
    let recycling = guest.recycle();
    guest.verify_on(60_000);
    snapshot(&guest, "snapshot-save");
    let lost = (0..10).find(|round| {
        recycling.wait_ready(&guest.vm);
        let goal = recycling.seen().recycled + Bytes::mib(16);
        guest.stop_verify();
        recycling.wait_recycled(&guest.vm, goal);
        snapshot(&guest, "snapshot-load");
        let found = checked(&guest, 60_000);
        println!("no tripwire {round}: {found:?}");
        found.is_err()
    });
    assert!(lost.is_some(), "nothing was lost in ten loads");
}

/// Whether so many pages more are as they should be.
pub fn checked(guest: &Guest, more: u64) -> Result<(), String> {
    let look = || guest.vm.ask(|tool| tool.stat("v")).map_err(|e| e.to_string());
    let begun = look()?.u64("checks");
    let enough = |_: &Vm| match look() {
        Ok(stat) if stat.u64("errors") > 0 => Some(Err(format!("{stat:?}"))),
        Ok(stat) => (stat.u64("checks") > begun + more).then_some(Ok(())),
        Err(e) => Some(Err(e)),
    };
    guest.vm.wait_for("verify", MINUTE, enough).map_err(|e| e.to_string())?
}

/// Recycles under `verify`; whether it saw an error within some time.
fn contest(faults: &str, time: Duration) -> bool {
    let guest = Guest::boot_with_faults(Kernel::V6_12, faults, |c| c.cpus = 2);
    guest.insmod();
    let recycling = guest.recycle();
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
    assert!(
        contest("no_unpopulated+any_page+wide+no_look_at_wires", 2 * MINUTE),
        "nothing was lost"
    );
}
