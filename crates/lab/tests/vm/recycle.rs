//! The recycler in real guests: ebb.ko in the guest, libebb_vmm.so in QEMU, and
//! this test as the daemon between them.
//!
//! Needs `cargo lab setup --headers`. `EBB_STRESS_SECONDS` sets how long guests
//! are stressed (20 by default). What comes back is measured by the memory
//! cgroup that QEMU runs in, never by what guest or agent say.

use ebb_core::wire::{HugePages, Recycle};
use ebb_lab::experiment::cgroup_guest::{Place, RamKind};

use super::*;

const SOON: Duration = Duration::from_secs(10);
const BACKINGS: [RamKind; 2] = [RamKind::Huge, RamKind::Memfd];

/// Loops until /tmp/go is gone: what moves pages about, besides `verify`.
const STRESS: &str = r#"
mkdir -p /tmp/s; touch /tmp/go
( while [ -f /tmp/go ]; do for i in 1 2 3 4; do dd if=/dev/zero of=/tmp/s/h$i bs=4k count=4000 & done
	wait; rm -f /tmp/s/h*; done ) &
( while [ -f /tmp/go ]; do dd if=/dev/zero of=/dev/null bs=60M count=1; done ) &
( while [ -f /tmp/go ]; do echo 60 > /proc/sys/vm/nr_hugepages
	echo 0 > /proc/sys/vm/nr_hugepages; done ) &
( while [ -f /tmp/go ]; do echo 1 > /proc/sys/vm/compact_memory
	echo 3 > /proc/sys/vm/drop_caches; sleep 0.2; done ) &
( while [ -f /tmp/go ]; do for i in 1 2 3 4 5 6 7 8; do ls -l /bin & done; wait; done ) &
"#;

/// A guest with module and agent, which has its RAM as from the daemon, and with [`STRESS`].
fn boot(arena: &Arena, kernel: Kernel, memory: RamKind, faults: &str) -> Place {
    let stress = tempfile::NamedTempFile::new().unwrap();
    fs::write(stress.path(), STRESS).unwrap();
    let booted = Place::boot(arena, kernel, (memory, true), |c| {
        c.name = format!("recycle-{kernel}");
        c.files.push(("stress".into(), stress.path().into()));
        if !faults.is_empty() {
            guest_stack::leave_out(c, faults).unwrap();
        }
    });
    let mut place = booted.unwrap();
    let segments = guest_stack::attachment(&place.vm).unwrap().segments;
    let total: Bytes = segments.iter().map(|s| Bytes(s.size)).sum();
    assert_eq!(total, place.vm.memory, "{segments:?}");
    place.attach().unwrap();
    let peer = place.agent().unwrap().peer_pid();
    assert_eq!(peer, Some(place.vm.pid));
    place
}

/// All free pages, for at most this time.
fn all(budget_ms: u64) -> Recycle {
    Recycle { budget_ms, huge: HugePages::Split, ..Recycle::default() }
}

/// Which share of what a job had the host has again a second after 95 % were reached.
fn comes_back(place: &mut Place, paused: bool) -> f64 {
    place.settle().unwrap();
    let before = place.usage();
    place.start("h", "hold", "size=268435456").unwrap();
    let full = place.usage();
    place.stop("h").unwrap();
    if paused {
        // The module takes its second look at large frees every 100 ms of
        // the guest's time, which stands still from here on.
        std::thread::sleep(place.vm.tool().patient(Duration::from_millis(200)));
        place.pause(true).unwrap();
    }
    let (begun, mut came) = (Instant::now(), Bytes::ZERO);
    let share = |place: &Place| (full - place.usage()).fraction_of(full - before);
    let reached = poll(MINUTE, || {
        came += place.agent().unwrap().recycle(all(1000), SOON).unwrap().bytes;
        (share(place) >= 0.95).then(|| begun.elapsed())
    });
    std::thread::sleep(Duration::from_secs(1));
    let back = share(place);
    println!(
        "  paused {paused}: before {before}, full {full}, after {}: {:.1} % back, 95 % after \
         {reached:?}, {came} recycled",
        place.usage(),
        back * 100.0
    );
    if paused {
        place.pause(false).unwrap();
    }
    back
}

/// The machine, for tests that start VMs.
fn held() -> Arena {
    Arena::within(Bytes::gib(4), Beside::Tests).unwrap()
}

#[test]
fn vm_what_a_guest_frees_is_the_hosts_soon() {
    let arena = held();
    for kernel in Kernel::ALL {
        for memory in BACKINGS {
            // Without `make soak` this one: `tier` shows the like of anonymous RAM.
            if !soak() && (kernel, memory) != (Kernel::V6_12, RamKind::Memfd) {
                continue;
            }
            let mut place = boot(&arena, kernel, memory, "");
            let at = format!("{kernel} {memory:?}");
            println!("{at}: {:?}", place.agent().unwrap().status(true, SOON).unwrap());
            for paused in [false, true] {
                let share = comes_back(&mut place, paused);
                assert!(share >= 0.95, "{at} paused {paused}: {share}");
            }
            let facts = place.agent().unwrap().facts(SOON).unwrap();
            let meminfo = place.vm.request("meminfo", MINUTE).unwrap();
            assert_eq!(facts.total * 4096, meminfo.u64("MemTotal"));
            // Unloaded: it is noticed, and nothing is taken.
            place.sh("rmmod ebb").unwrap();
            let refused = place.agent().unwrap().recycle(Recycle::default(), SOON);
            assert!(refused.is_err(), "{refused:?}");
            println!("{at}: {:?}", place.agent().unwrap().status(true, SOON).unwrap());
        }
    }
}

/// `verify` and stress in the guest, recycling as fast as it goes; the errors.
fn contest(place: &mut Place, time: Duration, stop_at_error: bool) -> u64 {
    place.vm.tool().start("v", "verify", "size=350000000 seconds=100000 threads=2").unwrap();
    place.sh("sh /stress >/dev/null 2>&1 </dev/null").unwrap();
    let begun = Instant::now();
    let (mut calls, mut recycled) = (0u64, Bytes::ZERO);
    while begun.elapsed() < time {
        match place.agent().unwrap().recycle(all(50), SOON) {
            Ok(done) => recycled += done.bytes,
            Err(e) => println!("  {e}"),
        }
        calls += 1;
        let errors = || place.vm.tool().stat("v").unwrap().u64("errors");
        if stop_at_error && calls.is_multiple_of(100) && errors() > 0 {
            break;
        }
    }
    place.sh("rm /tmp/go; sleep 1; rm -rf /tmp/s").unwrap();
    let stat = place.vm.tool().stop("v").unwrap();
    let status = place.agent().unwrap().status(true, SOON).unwrap();
    println!(
        "  {} checks, {} errors; {calls} calls in {:.0?}, {recycled}: {status:?}",
        stat.u64("checks"),
        stat.u64("errors"),
        begun.elapsed()
    );
    assert!(stop_at_error || stat.u64("checks") > 1000, "{stat:?}");
    stat.u64("errors")
}

#[test]
fn vm_nothing_is_lost_under_stress() {
    let arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        for memory in BACKINGS {
            let mut place = boot(&arena, kernel, memory, "");
            println!("{kernel} {memory:?}:");
            let errors = contest(&mut place, Duration::from_secs(seconds()), false);
            assert_eq!(errors, 0, "{kernel} {memory:?}");
            let said = place.sh("dmesg | grep -E 'BUG|WARNING|Oops|ebb: ' | tail -n 3").unwrap();
            assert!(!said.contains("false"), "{said}");
        }
    });
}

#[test]
fn vm_without_protection_or_rereading_pages_are_lost() {
    let arena = held();
    // Where the machine is slow a guest seldom writes within a shorter window.
    for faults in ["no_protect+wider", "no_reread"] {
        // What is lost first may be what `verify` itself needs, which then sees nothing
        // any more: another guest.
        let lost = (0..3).any(|_| {
            let mut place = boot(&arena, Kernel::V6_12, RamKind::Huge, faults);
            println!("{faults}:");
            // The guest's kernel may be the one whose page it was.
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                contest(&mut place, MINUTE, true)
            }));
            found.map_or(true, |errors| errors > 0)
        });
        assert!(lost, "{faults}: nothing was lost in three guests");
    }
}
