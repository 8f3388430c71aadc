//! Lines of the guest tool, in pieces: a guest may send anything.
#![no_main]

use std::io::BufReader;

use ebb_lab::guest::{next_line, parse_line};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let cut = data.first().map_or(1, |b| usize::from(*b) + 1);
    let mut pieces = BufReader::with_capacity(cut, data);
    while let Ok(Some(line)) = next_line(&mut pieces) {
        let _ = parse_line(&line);
    }
});
