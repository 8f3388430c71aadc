//! The version check of QEMU's plug-in loader, by a stand-in (`standin.c`): each
//! pair of limits with the functions that QEMUs of that time export. A stand-in
//! says nothing about a real QEMU; `vm_` tests load the library into one.

#[path = "common/standin.rs"]
mod standin;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{Answer, Attach, Command, OTHERS_DISCARD};
use ebb_core::wire::{Reply, ReplyResult, Request, Segment};
use standin::{Place, Standin};

fn ask(socket: &Path, command: Command) -> ReplyResult {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(&Request { id: 1, command }.line()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    Reply::parse(line.trim_end().as_bytes()).unwrap().result
}

/// Tries a loader; what became of it, and the version it saw.
fn load(place: &Place, exports: &[&str], min: i32, current: i32) -> (String, u64) {
    let mut standin = Standin::start(place.command(&place.compile(exports), min, current));
    let said = standin.says();
    if said.0 == "loaded" {
        match ask(&place.socket(), Command::Hello) {
            ReplyResult::Ok(Answer::Hello(hello)) => assert_eq!(hello.pid, standin.child.id()),
            other => panic!("{other:?}"),
        }
    }
    said
}

#[test]
fn every_release_known_loads_it() {
    let place = Place::new("loader");
    for (release, exports, min, current, claimed) in [
        ("7.2 to 8.2", &["-DEXPORTS=1"][..], 0, 1, 1),
        ("9.0", &["-DEXPORTS=2"], 2, 2, 2),
        ("9.1", &["-DEXPORTS=2"], 2, 3, 2),
        ("9.2, 10.0", &["-DEXPORTS=4"], 2, 4, 4),
        ("10.1", &["-DEXPORTS=5"], 2, 5, 5),
        ("10.2.0", &["-DEXPORTS=5", "-DDISCON"], 2, 5, 5),
        ("11.0", &["-DEXPORTS=6", "-DDISCON"], 2, 6, 6),
        ("11.1", &["-DEXPORTS=6", "-DDISCON"], 2, 7, 6),
        ("one that drops the past", &["-DEXPORTS=6", "-DDISCON"], 6, 9, 6),
    ] {
        let said = load(&place, exports, min, current);
        assert_eq!(said, ("loaded".into(), claimed), "{release}: {exports:?} {min}..{current}");
    }
    // Not everything: what is refused is refused by the loader, with our number.
    assert_eq!(load(&place, &["-DEXPORTS=6"], 8, 9), ("refused".into(), 6));
    assert_eq!(load(&place, &["-DEXPORTS=1"], 2, 2), ("refused".into(), 1));
}

/// What an agent says to a VM whose VMM discards pages too, by what its RAM is.
fn beside_discards(place: &Place, program: &Path, preload: bool, shared: bool) -> ReplyResult {
    const SIZE: u64 = 32 << 20;
    let mut command = place.command(program, 0, 1);
    command.arg(SIZE.to_string());
    if preload {
        command.env("LD_PRELOAD", place.path("libebb_vmm.so"));
    }
    if shared {
        command.arg("shared");
    }
    let mut standin = Standin::start(command);
    assert_eq!(standin.says().0, "loaded");
    let segments = vec![Segment { gpa: 0, size: SIZE, hva: standin.says().1 }];
    let objections = vec![OTHERS_DISCARD.to_string()];
    let firmware = Firmware::Seabios;
    let attach = Attach { segments, objections, running: true, firmware, ..Attach::default() };
    ask(&place.socket(), Command::Attach(attach))
}

#[test]
fn a_plug_in_stands_aside_where_the_vmm_discards_too_a_preloaded_agent_takes_turns() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root may make the userfaultfd that is needed");
    }
    let place = Place::new("turns");
    let program = place.compile(&["-DEXPORTS=1"]);
    match beside_discards(&place, &program, false, false) {
        ReplyResult::Error(no) => assert_eq!(no.text, OTHERS_DISCARD),
        other => panic!("{other:?}"),
    }
    for (preload, shared) in [(true, false), (false, true), (true, true)] {
        let result = beside_discards(&place, &program, preload, shared);
        assert_eq!(result, ReplyResult::Ok(Answer::Done), "preload {preload}, shared {shared}");
    }
}
