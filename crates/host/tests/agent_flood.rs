//! An agent that never stops talking, alone in its process: what it can make the daemon hold is
//! bounded.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use ebb_core::wire::Command;
use ebb_host::agent::Agent;
use rustix::net::sockopt::set_socket_send_buffer_size_force;

/// What the daemon reads at once, and the room for it in the kernel.
const FLOOD: usize = 4 << 20;
/// One read, what is made of 4 KiB of it, and what the allocator keeps.
const MOST_KIB: u64 = 24 << 10;

/// The most memory that this process has held since this was asked last, KiB.
fn most_held() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    fs::write("/proc/self/clear_refs", "5").unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_flood_of_an_agent_is_cut_off_and_takes_little_memory() {
    let root = rustix::process::getuid().is_root();
    for (line, why) in [
        // Its answer is there; what comes after was not asked for.
        ("{\"id\":1,\"ok\":{\"answer\":\"done\"}}\n", "was not asked"),
        ("{\"id\":7,\"error\":{\"kind\":\"aside\",\"text\":\"x\"}}\n", "x"),
        ("1\n", "not the agent's protocol"),
        ("\n", "not the agent's protocol"),
        // A line without an end.
        ("0123456789abcdef", "longer than"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let mut agent = Agent::connect(&path).unwrap();
        let (mut flood, _) = listener.accept().unwrap();
        // All of it is there at once where that is allowed.
        if root {
            set_socket_send_buffer_size_force(&flood, 4 * FLOOD).unwrap();
        }
        let bytes = line.repeat(64 << 10).into_bytes();
        agent.send(Command::StandDown).unwrap();
        most_held();
        let before = most_held();
        let sends = std::thread::spawn(move || {
            // For ever, until it is cut off.
            while flood.write_all(&bytes).is_ok() {}
        });
        if root {
            std::thread::sleep(Duration::from_millis(200));
        }
        let until = Instant::now() + Duration::from_secs(20);
        while agent.failure().is_none() {
            assert!(Instant::now() < until, "{line:?} is not cut off");
            agent.pump();
        }
        let more = most_held().saturating_sub(before);
        let said = agent.failure().unwrap().to_string();
        assert!(said.contains(why), "{line:?}: {said}");
        assert!(more < MOST_KIB, "{line:?} took {more} KiB");
        sends.join().unwrap();
    }
}
