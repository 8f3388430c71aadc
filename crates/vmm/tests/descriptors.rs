//! An agent in a process that has no file descriptor left. This is the only test here: it lowers a
//! limit of the whole process.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_core::wire::{Command, Request};
use ebb_vmm::faults::Faults;
use ebb_vmm::server::{Peers, Server};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn an_agent_that_cannot_take_a_call_does_not_spin_and_takes_it_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent");
    let _server = Server::start(&path, Peers::Own, Faults::default()).unwrap();
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let was = getrlimit(Resource::Nofile);
    // The lowest that is free: all below it are in use.
    let free = File::open("/dev/null").unwrap().as_raw_fd();
    let none = Rlimit { current: Some(free as u64), ..was };
    setrlimit(Resource::Nofile, none).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    let before = cpu();
    std::thread::sleep(Duration::from_millis(500));
    let spent = cpu() - before;
    setrlimit(Resource::Nofile, was).unwrap();
    assert!(spent < Duration::from_millis(100), "{spent:?} in half a second");
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&Request { id: 1, command: Command::Hello }.line()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert!(line.contains("hello"), "{line}");
}
