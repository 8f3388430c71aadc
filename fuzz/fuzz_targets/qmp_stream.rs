//! Any bytes from a QMP peer, in any pieces, between commands: no panic, no
//! growth past the limits (debug assertions in `feed`), one answer per command at most.
#![no_main]

use ebb_host::qmp::{MAX_EVENTS, Protocol, State};
use libfuzzer_sys::fuzz_target;

const START: &[u8] = b"{\"QMP\": {\"version\": {}}} {\"return\": {}, \"id\": 0}\n";

fuzz_target!(|data: &[u8]| {
    let mut protocol = Protocol::new("fuzz");
    let mut sent = Vec::new();
    // First byte: whether to start negotiated. Then pieces: length, content.
    let Some((first, mut rest)) = data.split_first() else { return };
    if first % 2 == 0 {
        protocol.feed(START);
        assert_eq!(protocol.state(), State::Ready);
    }
    while let Some((length, after)) = rest.split_first() {
        let (piece, after) = after.split_at((*length as usize).min(after.len()));
        rest = after;
        match length % 8 {
            0 => sent.extend(protocol.send("x", None)),
            1 => sent.last().iter().for_each(|id| protocol.forget(**id)),
            2 => drop(protocol.outbox.drain(..protocol.outbox.len().min(7))),
            _ => {}
        }
        protocol.feed(piece);
        if protocol.state() == State::Failed {
            assert!(protocol.failure().is_some() && protocol.send("y", None).is_err());
        }
    }
    protocol.end_of_file();
    for id in sent {
        let _ = protocol.take_reply(id);
        assert!(protocol.take_reply(id).is_none());
    }
    assert!(protocol.take_events().len() <= MAX_EVENTS);
});
