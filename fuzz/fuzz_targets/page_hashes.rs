//! The scanner's word with an agent, both ways: any bytes as a question, and as the answer
//! to one. What is accepted is within what was asked, each page once, and bounded; the
//! daemon's end gives up a peer that says anything else.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use ebb_core::range::Range;
use ebb_core::units::PAGE;
use ebb_core::wire::hashes::{Ask, PAGES_MAX, RANGES_MAX, Told};
use ebb_host::scan::agents::HashLink;
use libfuzzer_sys::fuzz_target;

const ASKED: [Range; 2] =
    [Range { start: PAGE, len: 4 * PAGE }, Range { start: 1 << 30, len: 64 * PAGE }];

fn question(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let Some(length) = Ask::rest(head) else { return };
    assert!(length <= RANGES_MAX * 16);
    let Some(ask) = rest.get(..length).and_then(|rest| Ask::parse(head, rest)) else { return };
    assert!(ask.ranges.windows(2).all(|r| r[0].end() <= r[1].start));
    assert!(ask.ranges.iter().map(|r| r.len / PAGE).sum::<u64>() <= PAGES_MAX);
    assert_eq!(ask.encode(), bytes[..Ask::HEAD + length]);
}

fn answer(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let Some(length) = Told::rest(head) else { return };
    assert!(length <= PAGES_MAX as usize * 24);
    let Some(told) = rest.get(..length).and_then(|rest| Told::parse(head, rest, &ASKED)) else {
        return;
    };
    check(&told);
    assert_eq!(told.encode(), bytes[..Told::HEAD + length]);
}

fn check(told: &Told) {
    let inside = |n: &u64| ASKED.iter().any(|r| r.contains(n * PAGE));
    assert!(told.pages.iter().all(|(number, _)| inside(number)));
    assert!(told.pages.windows(2).all(|p| p[0].0 < p[1].0));
    assert!(told.held <= 68 && told.free + told.pages.len() as u64 <= told.held);
}

fuzz_target!(|data: &[u8]| {
    question(data);
    answer(data);
    let (link, theirs) = HashLink::pair(&[]).expect("a pair of sockets");
    let mut theirs = UnixStream::from(theirs);
    let _ = theirs.write_all(&data[..data.len().min(64 << 10)]);
    let _ = theirs.shutdown(std::net::Shutdown::Write);
    let told = link.ask(&Ask { secret: [1; 192], lines: false, ranges: ASKED.to_vec() });
    assert_eq!(told.is_err(), link.failure().is_some());
    told.iter().for_each(check);
});
