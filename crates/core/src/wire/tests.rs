//! The protocol: lines as they are documented, their limits, and any bytes.

use proptest::prelude::*;

use super::firmware::Firmware;
use super::*;
use crate::range::Range;
use crate::units::{Bytes, PAGE};

#[test]
fn requests_read_as_documented() {
    let attach = br#"{"id":1,"command":"attach","segments":[{"gpa":0,"size":4096,"hva":7}]}"#;
    let Ok(Request { id: 1, command: Command::Attach(a) }) = Request::parse(attach) else {
        panic!("{:?}", Request::parse(attach))
    };
    assert_eq!(a.segments, [Segment { gpa: 0, size: 4096, hva: 7 }]);
    let recycle = Request::parse(br#"{"id":2,"command":"recycle","budget_ms":7}"#).unwrap();
    let want = Recycle { budget_ms: 7, ..Recycle::default() };
    assert_eq!(recycle.command, Command::Recycle(want));
    let status = Request::parse(br#"{"id":3,"command":"status"}"#).unwrap();
    assert_eq!(status.command, Command::Status { held: false, room: None });
}

#[test]
fn replies_read_as_documented() {
    let done = Reply { id: 1, result: ReplyResult::Ok(Answer::Done) };
    assert_eq!(done.line(), b"{\"id\":1,\"ok\":{\"answer\":\"done\"}}\n");
    let refusal = Refusal { kind: Refused::NotReady, text: "x".into() };
    let no = Reply { id: 3, result: ReplyResult::Error(refusal) };
    assert_eq!(no.line(), b"{\"id\":3,\"error\":{\"kind\":\"not_ready\",\"text\":\"x\"}}\n");
    for reply in [done, no] {
        let line = reply.line();
        assert_eq!(Reply::parse(&line[..line.len() - 1]), Ok(reply));
    }
}

#[test]
fn every_command_survives_its_line() {
    let segment = Segment { gpa: u64::MAX, size: u64::MAX, hva: u64::MAX };
    let full = Attach {
        segments: vec![segment; SEGMENTS_MAX],
        objections: vec!["x".repeat(TEXT_MAX); OBJECTIONS_MAX],
        running: true,
        keep_open: true,
        descriptor: true,
        room: Some(Bytes::mib(3)),
        firmware: Firmware::Edk2,
        observe: true,
        window_limit_ms: 5,
    };
    let most = u64::from(u32::MAX);
    let advise = Advise { within: (0, u64::MAX), open: vec![(most, most); SPANS_MAX] };
    for command in [
        Command::Hello,
        Command::Attach(full),
        Command::Status { held: true, room: Some(Bytes::ZERO) },
        Command::Recycle(Recycle { max_bytes: Some(Bytes::mib(7)), ..Recycle::default() }),
        Command::Mark,
        Command::RunState { running: false },
        Command::ResetSeen,
        Command::Facts,
        Command::Advise(advise),
        Command::Hashes,
        Command::StandDown,
    ] {
        let request = Request { id: u64::MAX, command };
        let line = request.line();
        assert!(line.len() <= LINE_MAX, "{}", line.len());
        assert_eq!(Request::parse(&line[..line.len() - 1]), Ok(request));
    }
}

#[test]
fn the_hello_of_an_earlier_agent_is_read() {
    let line = br#"{"id":1,"ok":{"answer":"hello","protocol":2,"version":"0","pid":9,
        "kernel":{"process_madvise":true,"pagemap_scan":true}}}"#;
    let reply = Reply::parse(line).unwrap();
    assert!(matches!(reply.result, ReplyResult::Ok(Answer::Hello(h)) if h.pid == 9 && !h.hashes));
}

#[test]
fn texts_of_an_agent_are_fit_to_be_shown() {
    let long = "x".repeat(5000);
    for line in [
        r#"{"id":1,"error":{"kind":"aside","text":"\u001b[2Jgone\n"}}"#.to_string(),
        format!(r#"{{"id":1,"error":{{"kind":"aside","text":"{long}"}}}}"#),
        r#"{"id":1,"ok":{"answer":"status","why":"\u001b]0;x\u0007"}}"#.into(),
        // As earlier agents say it.
        r#"{"id":1,"ok":{"answer":"status","module":{"version":"\u001b","linux":"\u0000","gpa":0,
            "order":0,"map_pages":0,"faulty":false}}}"#
            .into(),
        r#"{"id":1,"ok":{"answer":"status","module":{"version":"\u001b","linux":"\u0000"}}}"#
            .into(),
        r#"{"id":1,"ok":{"answer":"\u001b[2J"}}"#.into(),
    ] {
        let text = match Reply::parse(line.as_bytes()) {
            Ok(Reply { result: ReplyResult::Error(no), .. }) => no.text,
            Ok(Reply { result: ReplyResult::Ok(Answer::Status(s)), .. }) => {
                let module = s.module.map(|m| m.version + &m.linux);
                s.why.or(module).unwrap()
            }
            Ok(other) => panic!("{other:?}"),
            Err(e) => e.0,
        };
        assert!(!text.is_empty() && text.chars().count() <= TEXT_MAX, "{line}");
        assert!(!text.chars().any(char::is_control), "{line}: {text:?}");
    }
}

#[test]
fn more_than_the_limits_is_refused() {
    let segment = Segment { gpa: 0, size: 1, hva: 0 };
    let many = Attach { segments: vec![segment; SEGMENTS_MAX + 1], ..Attach::default() };
    let spans = Advise { open: vec![(0, 1); SPANS_MAX + 1], ..Advise::default() };
    for command in [Command::Attach(many), Command::Advise(spans)] {
        let line = Request { id: 1, command }.line();
        assert!(Request::parse(&line[..line.len() - 1]).is_err());
    }
    assert!(Request::parse(&vec![b' '; LINE_MAX + 1]).is_err());
    let mut lines = Lines::default();
    assert!(lines.feed(&vec![b'x'; LINE_MAX], |_| ()).is_ok());
    assert!(lines.feed(b"x", |_| ()).is_err());
}

proptest! {
    #[test]
    fn what_is_to_be_open_survives_its_requests(
        list in prop::collection::vec((1u64..99, 1u64..99), 0..2000),
    ) {
        let mut at = 0x7f00_0000_0000;
        let open: Vec<Range> = list.iter().map(|(gap, pages)| {
            let start = at + gap * PAGE;
            at = start + pages * PAGE;
            Range { start, len: pages * PAGE }
        }).collect();
        let all = Advise::all(&open);
        prop_assert_eq!(all.len(), open.len().div_ceil(SPANS_MAX).max(1));
        // The stretches are all there is, and no place is in two.
        prop_assert_eq!((all[0].within.0, all[all.len() - 1].within.1 > at), (0, true));
        prop_assert!(all.windows(2).all(|w| w[0].within.1 == w[1].within.0));
        let found: Vec<_> = all.iter().flat_map(|a| a.ranges().unwrap()).collect();
        prop_assert_eq!(found, open);
    }

    #[test]
    fn any_numbers_are_ranges_of_the_stretch_or_refused(
        within in any::<(u64, u64)>(), open in prop::collection::vec(any::<(u64, u64)>(), 0..4),
        small in prop::collection::vec((0u64..9, 0u64..9), 0..9),
    ) {
        for open in [open, small] {
            let advise = Advise { within, open };
            for r in advise.ranges().unwrap_or_default() {
                prop_assert!(r.start >= within.0 && r.start + r.len <= within.1 && r.len > 0);
            }
        }
    }

    #[test]
    fn any_bytes_are_a_line_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Request::parse(&bytes);
        let _ = Reply::parse(&bytes);
    }

    #[test]
    fn lines_survive_any_cut(text in "[a-z\n]{0,200}", cut in 1usize..20) {
        let mut whole = Vec::new();
        Lines::default().feed(text.as_bytes(), |l| whole.push(l.to_vec())).unwrap();
        let mut pieces = Vec::new();
        let mut lines = Lines::default();
        for piece in text.as_bytes().chunks(cut) {
            lines.feed(piece, |l| pieces.push(l.to_vec())).unwrap();
        }
        prop_assert_eq!(whole, pieces);
    }
}
