//! Any bytes from a libvirt daemon, in any pieces: no panic, at most one answer to each call; and
//! what is in them, as any procedure would have it.
#![no_main]

use std::collections::BTreeSet;

use ebb_host::libvirt::rpc::{Heard, REMOTE, Rpc};
use ebb_host::libvirt::{calls, description, metadata};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rpc = Rpc::default();
    let mut open: BTreeSet<u32> = (1..20).map(|n| rpc.call(REMOTE, n, &[])).collect();
    for piece in data.chunks(61) {
        let Ok(heard) = rpc.feed(piece) else { break };
        for one in heard {
            match one {
                Heard::Answer { serial, .. } => assert!(open.remove(&serial)),
                Heard::Event(procedure, body) => drop(calls::event(procedure, &body)),
            }
        }
    }
    let _ = (calls::all_stats_of(data), calls::memory_stats_of(data), calls::looked_up(data));
    let _ = (calls::text(data), calls::is_busy(data));
    let procedures = [318, 319, 331, 363, 379];
    procedures.iter().for_each(|p| drop(calls::event(*p, data)));
    let text = String::from_utf8_lossy(data);
    let _ = description::Description::of(&text);
    if let Err(why) = metadata::settings(&text) {
        assert!(why.len() < 1000 && !why.contains('\n'));
    }
});
