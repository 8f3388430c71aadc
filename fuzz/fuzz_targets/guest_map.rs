//! A hostile guest under a whole agent: real memory and a real userfaultfd, a
//! header that beats and answers as the module's does, and between the agent's
//! looks any words in header, extents, map and facts. Needs root, for the
//! userfaultfd. Memory beside the guest's RAM stays as it was.
#![no_main]

#[path = "../../crates/vmm/tests/common/mod.rs"]
mod common;

use std::sync::atomic::Ordering::SeqCst;

use common::{EXTENTS, FIRST, Guest, HEADER, MAP, RamKind, ask, status};
use ebb_core::units::Bytes;
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{Attach, Command, HugePages, Recycle, Segment};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use libfuzzer_sys::fuzz_target;

/// RAM; the guest's mapping goes on beyond.
const RAM: u64 = 16 << 20;
const BEYOND: std::ops::Range<u64> = RAM / 4096..RAM / 4096 + 16;
/// Steps of one input, a bound on its time.
const STEPS: usize = 64;

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn number(&mut self, bytes: usize) -> Option<u64> {
        let (now, later) = self.0.split_at_checked(bytes)?;
        self.0 = later;
        Some(now.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    /// Any word, or one that is likely to matter.
    fn word(&mut self) -> Option<u64> {
        Some(match self.number(1)? % 4 {
            0 => self.number(8)?,
            1 => self.number(1)?,
            2 => self.number(2)? << 12,
            _ => [0, u64::MAX, HEADER, EXTENTS, MAP, RAM - 4096, RAM, 1 << 63]
                [self.number(1)? as usize % 8],
        })
    }

    fn recycle(&mut self) -> Option<Recycle> {
        let n = self.number(2)?;
        Some(Recycle {
            max_bytes: (n & 1 == 1).then(|| Bytes(n << 6)),
            min_run_pages: (n >> 1 & 3) as u32,
            budget_ms: 3,
            huge: if n & 8 == 0 { HugePages::Keep } else { HugePages::Split },
            split_min_pages: (n >> 4 & 63) as u32,
            marked: n & 0x400 != 0,
            ..Recycle::default()
        })
    }
}

/// One thing that the guest or the daemon does; `None` at the end of the input.
fn step(input: &mut Input<'_>, guest: &Guest, agent: &mut Agent) -> Option<()> {
    match input.number(1)? % 10 {
        0 | 1 => {
            guest.beat();
            status(agent, false);
        }
        2 => guest.word(HEADER + input.number(1)? % 97 * 8).store(input.word()?, SeqCst),
        3 => guest.word(EXTENTS + input.number(1)? % 16 * 8).store(input.word()?, SeqCst),
        4 => guest.word(MAP + input.number(2)? % 512 * 8).store(input.word()?, SeqCst),
        5 => drop(ask(agent, Command::Recycle(input.recycle()?))),
        6 => drop(ask(agent, Command::Facts)),
        7 => drop(ask(agent, Command::Mark)),
        8 => guest.write_header(),
        _ => {
            status(agent, true);
        }
    }
    Some(())
}

fuzz_target!(|data: &[u8]| {
    let guest = Guest::new((RAM >> 20) + 1, RamKind::Small);
    BEYOND.for_each(|p| guest.write(p, !p));
    guest.fill_and_free(FIRST, 32);
    let segment = Segment { gpa: 0, size: RAM, hva: guest.memory.address() };
    let attach = Attach { segments: vec![segment], running: true, firmware: Firmware::Seabios, ..Attach::default() };
    let mut agent = Agent::new(Faults::default());
    ask(&mut agent, Command::Attach(attach)).expect("root");
    let mut input = Input(data);
    for _ in 0..STEPS {
        if step(&mut input, &guest, &mut agent).is_none() {
            break;
        }
    }
    assert!(BEYOND.clone().all(|p| guest.holds(p, !p)));
    // Whatever was believed, the guest's own pages can be written to again.
    agent.detach();
    guest.write(0, 1);
    assert!(guest.holds(0, 1));
});
