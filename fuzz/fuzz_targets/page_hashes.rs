//! The scanner's word with an agent, both ways: any bytes as a question, and as the answer
//! to one. What is accepted is within what was asked, each page once, and bounded; the
//! daemon's end gives up a peer that says anything else.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use ebb_core::range::Range;
use ebb_core::units::PAGE;
use ebb_core::wire::hashes::{HashReply, HashRequest, PAGES_MAX, RANGES_MAX};
use ebb_host::scan::agents::HashLink;
use libfuzzer_sys::fuzz_target;

const ASKED: [Range; 2] =
    [Range { start: PAGE, len: 4 * PAGE }, Range { start: 1 << 30, len: 64 * PAGE }];

fn question(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let Some(length) = HashRequest::rest(head) else { return };
    assert!(length <= RANGES_MAX * 16);
    let Some(request) = rest.get(..length).and_then(|rest| HashRequest::parse(head, rest)) else {
        return;
    };
    assert!(request.ranges.windows(2).all(|r| r[0].end() <= r[1].start));
    assert!(request.ranges.iter().map(|r| r.len / PAGE).sum::<u64>() <= PAGES_MAX);
    assert_eq!(request.encode(), bytes[..HashRequest::HEAD + length]);
}

fn answer(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let Some(length) = HashReply::rest(head) else { return };
    assert!(length <= PAGES_MAX as usize * 24);
    let Some(reply) = rest.get(..length).and_then(|rest| HashReply::parse(head, rest, &ASKED))
    else {
        return;
    };
    check(&reply);
    assert_eq!(reply.encode(), bytes[..HashReply::HEAD + length]);
}

fn check(reply: &HashReply) {
    let inside = |n: &u64| ASKED.iter().any(|r| r.contains(n * PAGE));
    assert!(reply.pages.iter().all(|(number, _)| inside(number)));
    assert!(reply.pages.windows(2).all(|p| p[0].0 < p[1].0));
    assert!(reply.held <= 68 && reply.free + reply.pages.len() as u64 <= reply.held);
}

fuzz_target!(|data: &[u8]| {
    question(data);
    answer(data);
    let (link, theirs) = HashLink::pair(&[]).expect("a pair of sockets");
    let mut theirs = UnixStream::from(theirs);
    let _ = theirs.write_all(&data[..data.len().min(64 << 10)]);
    let _ = theirs.shutdown(std::net::Shutdown::Write);
    let reply = link.ask(&HashRequest { secret: [1; 192], lines: false, ranges: ASKED.to_vec() });
    assert_eq!(reply.is_err(), link.failure().is_some());
    reply.iter().for_each(check);
});
