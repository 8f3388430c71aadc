//! Module, agent and daemon come and go, and memory goes offline, while the host
//! recycles and the guest checks its memory.

use ebb_core::wire::Command as Order;

use super::*;

#[test]
fn vm_a_module_that_goes_and_comes_back_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let guest = Guest::boot(kernel, |_| ());
        guest.start_verify(150 << 20, "threads=2");
        let recycling = Recycling::start(&guest.vm, &guest.socket);
        for round in 0..rounds() {
            guest.insmod();
            recycling.wait_ready(&guest.vm);
            let twice = guest.sh("insmod /ebb.ko 2>&1");
            assert!(twice.contains("File exists"), "{twice}");
            recycling.wait_more(&guest.vm, Bytes::mib(2));
            assert_eq!(guest.audit_false(), 0);
            guest.sh("rmmod ebb");
            let gone = |_: &Vm| !recycling.is(AgentState::Ready);
            guest.vm.wait_for("the agent to see it go", MINUTE, gone).unwrap();
            guest.verify_on(2_000);
            println!("{kernel} {round}: {:?}", recycling.seen().status);
        }
        println!("{kernel}: {} pages checked", guest.stop_verify());
        assert_eq!(guest.complaints(), "", "{kernel}");
    }
}

#[test]
fn vm_an_agent_stood_down_or_left_in_the_middle_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let guest = Guest::boot(kernel, |c| c.cpus = 2);
        guest.insmod();
        guest.start_verify(150 << 20, "threads=2");
        for round in 0..rounds() {
            let recycling = guest.recycle();
            recycling.wait_more(&guest.vm, Bytes::mib(2));
            let mut agent = recycling.stop();
            if round % 2 == 0 {
                // Nothing is protected or known any more, and the agent stays.
                agent.stand_down(SOON).unwrap();
                let status = agent.status(false, SOON).unwrap();
                assert_eq!((status.state, status.free), (AgentState::Idle, None), "{status:?}");
            } else {
                // A daemon that dies with an order under way.
                let long = Recycle { budget_ms: 10_000, ..Recycle::default() };
                agent.send(Order::Recycle(long)).unwrap();
                agent.pump();
            }
            drop(agent);
            guest.verify_on(2_000);
        }
        println!("{kernel}: {} pages checked", guest.stop_verify());
    }
}

/// Has a daemon ask for all memory, again and again, until the end of a test.
fn asking(daemon: Daemon) -> Background<Daemon> {
    Background::start(move |quit| {
        while !quit.load(SeqCst) {
            let _ = daemon.reclaim();
            sleep(Duration::from_millis(20));
        }
        daemon
    })
}

/// What the daemon has had this VM give back, once it uses the guest's map.
pub fn recycled(state: &Value, name: &str) -> Option<u64> {
    let vm = of(state, name);
    (vm["tier"] == "guest").then(|| crate::recycled(vm))
}

#[test]
fn vm_a_daemon_killed_and_started_again_during_recycling_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let guest = Guest::boot(kernel, |c| c.name = "killed".into());
        guest.insmod();
        guest.start_verify(150 << 20, "threads=2");
        let dir = guest.dir.path().join("daemon");
        for round in 0..rounds().min(8) {
            let daemon = Daemon::start(&dir, &["killed"], "").unwrap();
            let _ = daemon.wait_for("tier guest", MINUTE, |s| recycled(s, "killed")).unwrap();
            let mut asking = asking(daemon);
            guest.verify_on(2_000);
            let daemon = asking.end();
            let much = |s: &Value| {
                daemon.reclaim().unwrap();
                recycled(s, "killed").filter(|r| *r > 4 << 20)
            };
            let came = daemon.wait_for("recycling", MINUTE, much).unwrap();
            daemon.reclaim().unwrap();
            daemon.crash();
            println!("{kernel} {round}: {came} bytes recycled before the daemon was killed");
            guest.verify_on(2_000);
        }
        println!("{kernel}: {} pages checked", guest.stop_verify());
    }
}

/// Takes each block of movable memory offline and back.
const HOTPLUG: &str = r#"n=0; for m in /sys/devices/system/memory/memory*; do
	case "$(cat $m/valid_zones)" in Movable*)
		echo offline > $m/state && n=$((n+1)); sleep 0.2; echo online_movable > $m/state;;
	esac; done 2>/dev/null; echo $n"#;

#[test]
fn vm_memory_that_goes_offline_and_comes_back_during_recycling_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let guest = Guest::boot(kernel, |c| {
            c.memory = Bytes::gib(1);
            c.append = "movablecore=384M".into();
        });
        guest.insmod();
        guest.start_verify(200 << 20, "threads=2");
        let recycling = guest.recycle();
        let mut offlined = 0;
        for _ in 0..rounds() {
            offlined += guest.sh(HOTPLUG).trim().parse::<u64>().unwrap();
            recycling.wait_more(&guest.vm, Bytes::mib(2));
            assert_eq!(guest.audit_false(), 0);
            guest.verify_on(2_000);
        }
        let checks = guest.stop_verify();
        println!("{kernel}: {offlined} blocks went and came, {checks} pages checked");
        assert!(offlined > 0, "no block of memory went offline");
    }
}
