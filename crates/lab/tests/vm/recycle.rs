//! The recycler in real guests: ebb.ko in the guest, libebb_vmm.so in QEMU, and
//! this test as the daemon between them.
//!
//! Needs `cargo lab setup --headers`. `EBB_STRESS_SECONDS` sets how long guests
//! are stressed (20 by default). What comes back is measured by the memory
//! cgroup that QEMU runs in, never by what guest or agent say.

use ebb_core::wire::{AgentState, HugePages, Recycle, Recycled};
use ebb_lab::arena::MemoryCgroup;

use super::*;

const SOON: Duration = Duration::from_secs(10);

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

/// A guest with the module at /ebb.ko, and its agent.
struct Guest {
    vm: Vm,
    agent: Agent,
    cgroup: MemoryCgroup,
    dir: tempfile::TempDir,
}

impl Guest {
    fn boot(arena: &Arena, kernel: Kernel, backing: Backing, faults: &str) -> Guest {
        Guest::boot_with(arena, kernel, backing, faults, |_| ())
    }

    fn boot_with(
        arena: &Arena,
        kernel: Kernel,
        backing: Backing,
        faults: &str,
        change: impl FnOnce(&mut VmConfig),
    ) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = arena.cgroup().expect("the arena has a budget").clone();
        let stress = dir.path().join("stress");
        std::fs::write(&stress, STRESS).unwrap();
        let mut config = VmConfig::new(format!("recycle-{kernel}"), Bytes::gib(1));
        (config.kernel, config.cpus, config.backing) = (kernel, 2, backing);
        config.cgroup = Some(cgroup.dir.clone());
        let socket = guest_stack::prepare(&mut config, dir.path()).unwrap();
        config.files.push(("stress".into(), stress));
        if !faults.is_empty() {
            guest_stack::leave_out(&mut config, faults).unwrap();
        }
        change(&mut config);
        let vm = Vm::start(&config).unwrap();
        let agent = Agent::connect(&socket).unwrap();
        assert_eq!(agent.peer_pid(), Some(vm.pid()));
        let mut guest = Guest { vm, agent, cgroup, dir };
        guest.insmod();
        guest
    }

    fn sh(&self, command: &str) -> String {
        self.vm.ask(|tool| tool.sh(command, 5 * MINUTE)).unwrap()
    }

    fn insmod(&mut self) {
        guest_stack::load(&self.vm).unwrap();
    }

    /// Hands RAM over, as the daemon does.
    fn attach(&mut self) {
        let attachment = guest_stack::attachment(&self.vm).unwrap();
        let total: u64 = attachment.segments.iter().map(|s| s.size).sum();
        assert_eq!(Bytes(total), self.vm.memory(), "{attachment:?}");
        self.agent.attach(attachment, None, SOON).unwrap();
    }

    fn ready(&mut self) {
        self.agent.wait_ready(MINUTE).unwrap();
    }

    /// Everything, at most a second long.
    fn recycle(&mut self) -> Recycled {
        let want = Recycle { budget_ms: 1000, huge: HugePages::Split, ..Recycle::default() };
        self.agent.recycle(want, SOON).unwrap()
    }

    /// Until nothing comes any more.
    fn settle(&mut self) {
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(200));
            if self.recycle().bytes < Bytes::mib(1) {
                break;
            }
        }
    }

    /// How much of what a job had the host gets back, and how fast: share of memcg usage
    /// after a second of asking, or when 95 % were reached, and when that was.
    fn fill_free_recycle(&mut self, paused: bool) -> (f64, Option<Duration>, Recycled) {
        self.settle();
        let before = self.cgroup.usage();
        self.vm.tool().start_ready("h", "hold", "size=268435456", MINUTE).unwrap();
        let full = self.cgroup.usage();
        self.vm.tool().stop("h").unwrap();
        if paused {
            // The module takes its second look at large frees every 100 ms of
            // the guest's time, which stands still from here on.
            std::thread::sleep(self.vm.tool().patient(Duration::from_millis(200)));
            self.vm.pause().unwrap();
            self.agent.run_state(false, SOON).unwrap();
        }
        let begun = Instant::now();
        let (mut reached, mut sum) = (None, Recycled::default());
        let back = |usage: Bytes| (full - usage).fraction_of(full - before);
        let goes_on = |reached: Option<Duration>| match reached {
            Some(_) => begun.elapsed() < Duration::from_secs(1),
            None => begun.elapsed() < MINUTE,
        };
        while goes_on(reached) {
            let one = self.recycle();
            sum.bytes += one.bytes;
            sum.ns += one.ns;
            sum.runs += one.runs;
            sum.window_ns += one.window_ns;
            sum.splits += one.splits;
            if back(self.cgroup.usage()) >= 0.95 {
                reached.get_or_insert(begun.elapsed());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let share = back(self.cgroup.usage());
        println!(
            "  paused {paused}: before {before}, full {full}, after {}: {:.1} % back, 95 % after \
             {reached:?}, {} in {} runs, {:.1} GB/s, {} splits",
            self.cgroup.usage(),
            share * 100.0,
            sum.bytes,
            sum.runs,
            sum.bytes.0 as f64 / sum.ns.max(1) as f64,
            sum.splits
        );
        if paused {
            self.vm.resume().unwrap();
            self.agent.run_state(true, SOON).unwrap();
        }
        (share, reached, sum)
    }
}

/// The machine, for tests that start VMs.
fn held() -> Arena {
    Arena::within(Bytes::gib(4), Beside::Tests).unwrap()
}

#[test]
fn vm_what_a_guest_frees_is_the_hosts_soon() {
    let arena = held();
    for kernel in Kernel::ALL {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            // Without `make soak` each backing on one kernel.
            if !soak() && (kernel == Kernel::V6_12) != (backing == Backing::Memfd) {
                continue;
            }
            let mut guest = Guest::boot(&arena, kernel, backing.clone(), "");
            guest.attach();
            guest.ready();
            println!("{kernel} {backing:?}: {:?}", guest.agent.status(true, SOON).unwrap());
            for paused in [false, true] {
                let (share, _, _) = guest.fill_free_recycle(paused);
                assert!(share >= 0.95, "{kernel} {backing:?} paused {paused}: {share}");
            }
            let facts = guest.agent.facts(SOON).unwrap();
            let meminfo = guest.vm.request("meminfo", MINUTE).unwrap();
            assert_eq!(facts.total * 4096, meminfo.u64("MemTotal"));
            // Unloaded: it is noticed, and nothing is taken.
            guest.sh("rmmod ebb");
            let refused = guest.agent.recycle(Recycle::default(), SOON);
            assert!(refused.is_err(), "{refused:?}");
            println!("{kernel} {backing:?}: {:?}", guest.agent.status(true, SOON).unwrap());
        }
    }
}

/// `verify` and stress in the guest, recycling as fast as it goes; the errors.
fn contest(guest: &mut Guest, time: Duration, stop_at_error: bool) -> u64 {
    guest.vm.tool().start("v", "verify", "size=350000000 seconds=100000 threads=2").unwrap();
    guest.sh("sh /stress >/dev/null 2>&1 </dev/null");
    let begun = Instant::now();
    let (mut calls, mut recycled) = (0u64, Bytes::ZERO);
    while begun.elapsed() < time {
        let want = Recycle { budget_ms: 50, huge: HugePages::Split, ..Recycle::default() };
        match guest.agent.recycle(want, SOON) {
            Ok(done) => recycled += done.bytes,
            Err(e) => println!("  {e}"),
        }
        calls += 1;
        let errors = || guest.vm.tool().stat("v").unwrap().u64("errors");
        if stop_at_error && calls.is_multiple_of(100) && errors() > 0 {
            break;
        }
    }
    guest.sh("rm /tmp/go; sleep 1; rm -rf /tmp/s");
    let stat = guest.vm.tool().stop("v").unwrap();
    let status = guest.agent.status(true, SOON).unwrap();
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
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let mut guest = Guest::boot(&arena, kernel, backing.clone(), "");
            guest.attach();
            guest.ready();
            println!("{kernel} {backing:?}:");
            assert_eq!(
                contest(&mut guest, Duration::from_secs(seconds()), false),
                0,
                "{kernel} {backing:?}"
            );
            let said = guest.sh("dmesg | grep -E 'BUG|WARNING|Oops|ebb: ' | tail -n 3");
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
            let mut guest = Guest::boot(&arena, Kernel::V6_12, Backing::Anonymous, faults);
            guest.attach();
            guest.ready();
            println!("{faults}:");
            // The guest's kernel may be the one whose page it was.
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                contest(&mut guest, MINUTE, true)
            }));
            found.map_or(true, |errors| errors > 0)
        });
        assert!(lost, "{faults}: nothing was lost in three guests");
    }
}

#[test]
fn vm_resets_during_recycling_lose_nothing() {
    let arena = held();
    let rounds = set("EBB_RESETS").unwrap_or(3);
    in_pairs(&Kernel::ALL, |&kernel| {
        let mut guest = Guest::boot(&arena, kernel, Backing::Anonymous, "");
        guest.attach();
        for round in 0..rounds {
            guest.ready();
            guest.vm.tool().start("v", "verify", "size=200000000 seconds=100000").unwrap();
            for _ in 0..20 {
                guest.recycle();
            }
            let trips = guest.agent.status(false, SOON).unwrap().counters.trips;
            // By QMP, by the guest's own reboot, and without any notifier.
            match round % 3 {
                0 => guest.vm.reset().unwrap(),
                1 => drop(guest.vm.tool().send("sysrq c=b").unwrap()),
                _ => drop(guest.vm.tool().send("reboot").unwrap()),
            }
            let begun = Instant::now();
            let mut refused = None;
            while begun.elapsed() < Duration::from_secs(3) {
                let want = Recycle { budget_ms: 50, ..Recycle::default() };
                if guest.agent.recycle(want, SOON).is_err() {
                    refused.get_or_insert(begun.elapsed());
                }
            }
            guest.vm.wait_ready().unwrap();
            let status = guest.agent.status(false, SOON).unwrap();
            println!("{kernel} round {round}: refused after {refused:?}: {status:?}");
            assert!(refused.is_some() && status.counters.trips >= trips, "{status:?}");
            let v = "size=300000000 seconds=2 threads=2";
            guest.vm.tool().start("w", "verify", v).unwrap();
            let end = guest.vm.tool().wait_end("w", MINUTE).unwrap();
            assert_eq!(end.u64("errors"), 0, "{end:?}");
            guest.insmod();
        }
        let status = guest.agent.status(false, SOON).unwrap();
        assert!(status.counters.trips >= rounds / 3, "{status:?}");
    });
}

#[test]
fn vm_a_daemon_that_goes_leaves_nothing_behind() {
    let arena = held();
    let mut guest = Guest::boot(&arena, Kernel::V6_1, Backing::Anonymous, "");
    let path = guest.dir.path().join(format!("{}.agent", guest.vm.name()));
    for _ in 0..3 {
        guest.attach();
        guest.ready();
        assert!(guest.recycle().bytes >= Bytes::ZERO);
        let mut second = Agent::connect(&path).unwrap();
        assert!(second.hello(SOON).is_err());
        // Gone without a word; the next one begins anew.
        guest.agent = Agent::connect(&path).unwrap();
        let state = (0..100).find_map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            match guest.agent.status(false, SOON) {
                Ok(s) => Some(s.state),
                Err(_) => {
                    guest.agent = Agent::connect(&path).unwrap();
                    None
                }
            }
        });
        assert_eq!(state, Some(AgentState::Idle));
    }
    guest.vm.request("ping", SOON).unwrap();
}
