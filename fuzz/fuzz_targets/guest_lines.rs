//! Lines of the guest tool, in pieces: a guest may send anything.
#![no_main]

use ebb_lab::guest::{LineBuffer, parse_line};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut buffer = LineBuffer::default();
    let cut = data.first().map_or(1, |b| usize::from(*b) + 1);
    for piece in data.chunks(cut) {
        buffer.feed(piece, |line| {
            let _ = parse_line(line);
        });
    }
});
