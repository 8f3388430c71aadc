//! Agent to daemon: any bytes in any pieces between requests, by a peer that may be
//! a guest that took over its VMM. One answer per request at most, bounded memory,
//! texts that a terminal may show; and what QEMU says of its memory, in any words.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use ebb_core::wire::{Answer, Command, Refusal, TEXT_MAX};
use ebb_host::agent::{Agent, AgentError, MAX_PENDING, parse_gpa2hva, parse_mtree};
use libfuzzer_sys::fuzz_target;

fn printable(text: &str) -> bool {
    text.chars().count() <= TEXT_MAX && !text.chars().any(char::is_control)
}

fn check(answer: &Result<Answer, AgentError>) {
    match answer {
        Ok(Answer::Hello(h)) => assert!(printable(&h.version)),
        Ok(Answer::Status(s)) => {
            assert!(s.why.as_deref().is_none_or(printable));
            let module = s.module.as_ref();
            assert!(module.is_none_or(|m| printable(&m.version) && printable(&m.linux)));
        }
        Err(AgentError::Refused(_, Refusal { text, .. })) => assert!(printable(text)),
        _ => {}
    }
}

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    assert!(parse_mtree(&text).iter().all(|r| r.start < r.end));
    let _ = parse_gpa2hva(&text);

    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_nonblocking(true).expect("a socket");
    theirs.set_nonblocking(true).expect("a socket");
    let mut agent = Agent::over(ours.into(), "fuzz".into());
    let mut asked = Vec::new();
    let mut rest = data;
    while let Some((length, after)) = rest.split_first() {
        let (piece, after) = after.split_at((*length as usize).min(after.len()));
        rest = after;
        if length % 4 == 0 {
            asked.extend(agent.send(Command::Status { held: false, room: None }));
        }
        let _ = theirs.write_all(piece);
        agent.pump();
        // None of the answers is taken before the end.
        assert!(asked.len() <= MAX_PENDING);
        if agent.failure().is_some() {
            assert!(agent.fd().is_none() && agent.send(Command::Hello).is_err());
        }
    }
    for id in asked {
        if let Some(answer) = agent.take_reply(id) {
            check(&answer);
            assert!(agent.take_reply(id).is_none());
        }
    }
    if let Some(error) = agent.failure() {
        check(&Err(error.clone()));
        assert!(printable(&error.to_string().chars().take(TEXT_MAX).collect::<String>()));
    }
});
