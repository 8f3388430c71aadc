//! A daemon runs for months: what the loop remembers must not grow.
//!
//! What it holds is measured as what it writes down, which every byte of
//! [`ebb_core::memory::Memory`] is part of. `EBB_GROWTH_TICKS=1000000` for long.
#![allow(clippy::disallowed_methods, reason = "the test asks its environment how long to run")]

mod common;

use common::{Guest, Toy};
use ebb_core::config::Config;
use ebb_core::tick::{Engine, Host};
use ebb_core::units::Bytes;

#[test]
fn what_is_remembered_does_not_grow_with_time() {
    let ticks: u64 =
        std::env::var("EBB_GROWTH_TICKS").ok().and_then(|t| t.parse().ok()).unwrap_or(20_000);
    let mut host = Toy::new(20, 0, vec![Guest::new(8, 2), Guest::new(8, 3), Guest::new(16, 2)]);
    let mut engine = Engine::new(Config::default(), false);
    let mut sizes = Vec::new();
    for n in 0..ticks {
        // Each guest in turn wants much for a while: orders, gifts, holds of all kinds.
        let busy = (n / 40) as usize % 4;
        for (i, g) in host.guests.iter_mut().enumerate() {
            g.wanted = if i == busy { g.ram.share(0.8) } else { g.ram.share(0.2) };
            g.used = g.used.min(g.wanted).max(Bytes::gib(1));
        }
        let (_, model) = engine.step(&mut host);
        host.wait(engine.next(&model));
        if n % (ticks / 10).max(1) == ticks / 20 {
            sizes.push(serde_json::to_vec(&engine.memory).unwrap().len());
        }
    }
    // Numbers grow by digits; nothing else may.
    let (first, last) = (sizes[0], *sizes.last().unwrap());
    assert!(last <= first + first / 4, "{sizes:?} bytes after {ticks} ticks");
}
