//! The example of docs/policies.md: the table there is what the controller does on two ideal
//! guests. `EBB_GOLDEN=write` writes it.

#![allow(clippy::disallowed_methods, reason = "it reads the document")]

mod common;

use std::fmt::Write;

use common::{Guest, Toy};
use ebb_core::config::Config;
use ebb_core::tick::{Engine, Host};
use ebb_core::units::Bytes;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/policies.md");
const MARKS: [&str; 2] = ["<!-- example: two guests -->\n", "<!-- end of example -->\n"];

/// Two guests of 8 GiB on a host of 14 GiB. Both need one GiB; A works with 5 GiB from second 10 to
/// 40, B with 5 GiB from second 60 on. B has used all of its memory before.
fn table() -> String {
    let guest =
        |resident| Guest { resident: Bytes::gib(resident), touch: 512 << 20, ..Guest::new(8, 1) };
    let mut host = Toy::new(14, 2, vec![guest(2), guest(8)]);
    let mut engine = Engine::new(Config::default(), false);
    let began = host.now;
    let mut rows = String::from(
        "| second | the host has left | state | A uses | its size | holds | B uses | its size | holds |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    let shown = [0, 12, 14, 18, 60, 64, 68, 120];
    for second in 0..=120 {
        let works = [(10..40).contains(&second), second >= 60];
        for (guest, works) in host.guests.iter_mut().zip(works) {
            guest.wanted = Bytes::gib(if works { 5 } else { 1 });
            guest.used = guest.used.min(guest.wanted);
        }
        let end = began + (second + 1) * 1000;
        let mut first = shown.contains(&second);
        while host.now < end {
            let (_, model) = engine.step(&mut host);
            if std::mem::take(&mut first) {
                let (left, state) = (host.available(), model.host.shown.state);
                let guest = |g: &Guest| format!("{} | {} | {}", g.used, g.actual, g.resident);
                let [a, b] = [0, 1].map(|i| guest(&host.guests[i]));
                let _ = writeln!(rows, "| {second} | {left} | {state} | {a} | {b} |");
            }
            host.wait(&engine.next(&model));
        }
    }
    rows
}

#[test]
fn the_example_in_policies_is_what_the_controller_does() {
    let (table, text) = (table(), std::fs::read_to_string(DOCUMENT).unwrap());
    let [begin, end] = MARKS.map(|mark| text.find(mark).expect(mark));
    let begin = begin + MARKS[0].len();
    if std::env::var_os("EBB_GOLDEN").is_some() {
        let new = [&text[..begin], &table, &text[end..]].concat();
        return std::fs::write(DOCUMENT, new).unwrap();
    }
    assert_eq!(&text[begin..end], table);
}
