//! Daemon to agent: any bytes in any pieces. One answer per line, each a line that
//! the daemon can read, and an agent that still answers afterwards.
#![no_main]

use ebb_core::wire::{Command, LINE_MAX, Reply, Request};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use ebb_vmm::server::Session;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut agent = Agent::new(Faults::default());
    let mut session = Session::default();
    let (mut answers, mut alive) = (0, true);
    let mut each = |line: &[u8]| {
        let (end, line) = line.split_last().expect("a line");
        assert!(*end == b'\n' && line.len() <= LINE_MAX && !line.contains(&b'\n'));
        Reply::parse(line).expect("what the daemon can read");
        answers += 1;
        true
    };
    let cut = data.first().map_or(1, |b| usize::from(*b) + 1);
    let mut taken: &[u8] = &[];
    for piece in data.chunks(cut) {
        alive &= session.take(piece, &mut agent, &mut || false, &mut each);
        taken = &data[..taken.len() + piece.len()];
        if !alive {
            break;
        }
    }
    let lines = taken.iter().filter(|b| **b == b'\n').count();
    assert!(if alive { answers == lines } else { answers <= lines });
    let line = Request { id: 7, command: Command::Hello }.line();
    let mut hello = false;
    let mut each = |line: &[u8]| {
        hello = Reply::parse(&line[..line.len() - 1]).is_ok_and(|r| r.id == 7);
        true
    };
    assert!(Session::default().take(&line, &mut agent, &mut || false, &mut each) && hello);
});
