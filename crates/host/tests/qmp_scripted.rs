//! The QMP client against a scripted peer: a stand-in for QEMU on a real Unix
//! socket that does what QEMU would never do. Real QEMU is in `vm_qemu.rs`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_host::qmp::{
    Client, MAX_EVENTS, MAX_MESSAGE, MAX_PENDING, MAX_REPLY_BYTES, Message, Protocol, QmpError,
    State, parse_message, poll_all,
};
use proptest::prelude::*;
use serde_json::json;

const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22},"package":"x"},"capabilities":["oob"]}}"#;
const SECOND: Duration = Duration::from_secs(1);

/// One connection's worth of script, run in a thread.
struct Peer {
    path: PathBuf,
    thread: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

fn peer(script: impl FnOnce(&mut Lines) + Send + 'static) -> Peer {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        script(&mut Lines { stream, reader });
    });
    Peer { path, thread, _dir: dir }
}

struct Lines {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Lines {
    fn say(&mut self, text: &str) {
        let _ = self.stream.write_all(text.as_bytes());
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        let _ = self.reader.read_line(&mut line);
        line
    }

    /// Greets and negotiates as QEMU does.
    fn greet(&mut self) {
        self.say(&format!("{GREETING}\r\n"));
        let asked = self.hear();
        assert!(asked.contains("qmp_capabilities"), "{asked}");
        self.say("{\"return\": {}, \"id\": 0}\r\n");
    }
}

/// A client of such a peer, to the end of its script.
fn with<T>(
    script: impl FnOnce(&mut Lines) + Send + 'static,
    run: impl FnOnce(&mut Client) -> T,
) -> T {
    let peer = peer(script);
    let mut client = Client::new(&peer.path);
    let result = run(&mut client);
    drop(client);
    peer.thread.join().unwrap();
    result
}

/// What becomes of the first command.
fn first_error(answer: impl FnOnce(&mut Lines) + Send + 'static) -> QmpError {
    let script = |p: &mut Lines| {
        p.greet();
        p.hear();
        answer(p);
    };
    with(script, |client| client.execute("query-status", None, 5 * SECOND).unwrap_err())
}

#[test]
fn a_command_is_answered_across_events_and_odd_pieces() {
    let script = |p: &mut Lines| {
        p.greet();
        assert_eq!(p.hear().trim(), r#"{"arguments":{"value":1},"execute":"balloon","id":1}"#);
        p.say("{\"event\": \"RESET\", \"timestamp\": {\"seconds\": 2, \"microseconds\": 3}}\n{\n");
        std::thread::sleep(Duration::from_millis(20));
        p.say("  \"return\": {\"text\": \"}\\\"{\"},\n  \"id\": 1\n}\n");
        assert!(p.hear().contains("stop"));
        p.hear();
    };
    with(script, |client| {
        assert_eq!(client.peer_pid(), Some(std::process::id()));
        let answer = client.execute("balloon", Some(json!({ "value": 1 })), 5 * SECOND).unwrap();
        assert_eq!(answer, json!({ "text": "}\"{" }));
        let events = client.protocol.take_events();
        assert_eq!(events[0].name, "RESET");
        let error = client.execute("stop", None, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().ends_with("stop: no answer within 10 ms"), "{error}");
    });
}

#[test]
fn every_bad_answer_has_its_error_and_ends_the_connection() {
    let cases: [(&str, &str); 9] = [
        ("hello\n", "no JSON object but “hello ”"),
        ("[1]\n", "no JSON object"),
        ("{\"return\": {}]\n", "expected `,` or `}`"),
        ("{\"a\": \"\u{1}\"}\n", "control character"),
        ("{\"return\": {}, \"id\": 77}\n", "command 77, which was not asked"),
        ("{\"return\": {}, \"id\": \"1\"}\n", "reply with id \"1\""),
        ("{\"error\": \"no\", \"id\": 1}\n", "without class and desc"),
        (
            "{\"error\": {\"class\": \"G\", \"desc\": \"JSON parse\"}}\n",
            "without an id: JSON parse",
        ),
        ("{\"event\": 5}\n", "an event without a name"),
    ];
    for (answer, part) in cases {
        let error = first_error(move |p| {
            p.say(answer);
            p.hear();
        });
        let text = error.to_string();
        assert!(text.contains("qmp.sock: not QMP: ") && text.contains(part), "{text}");
        assert!(text.ends_with("; connection dropped"), "{text}");
    }
    let error = first_error(|p| {
        let _ = p.stream.write_all(b"{\"return\": \"\xff\", \"id\": 1}\n");
    });
    assert!(error.to_string().contains("qmp.sock: not QMP: "), "{error}");
}

#[test]
fn an_endless_message_and_an_early_end_are_told_apart() {
    let endless = first_error(|p| {
        p.say(&format!("{{\"return\": \"{}", "x".repeat(MAX_MESSAGE + 1)));
        p.hear();
    });
    assert!(endless.to_string().contains("a message of more than"), "{endless}");
    let ended = first_error(|p| p.say("{\"return\": "));
    let text = ended.to_string();
    assert!(text.ends_with("QEMU closed the connection during query-status"), "{text}");
}

#[test]
fn an_error_reply_leaves_the_connection_usable_and_a_late_one_is_dropped() {
    let script = |p: &mut Lines| {
        p.greet();
        p.hear();
        p.say(
            "{\"error\": {\"class\": \"DeviceNotActive\", \"desc\": \"No balloon\"}, \"id\": 1}\n",
        );
        p.hear();
        p.hear();
        p.say("{\"return\": \"late\", \"id\": 2}\n{\"return\": \"third\", \"id\": 3}\n");
        p.hear();
    };
    with(script, |client| {
        let error = client.execute("query-balloon", None, 5 * SECOND).unwrap_err();
        assert_eq!(error.to_string(), "query-balloon: No balloon (DeviceNotActive)");
        let error = client.execute("stop", None, Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().ends_with("stop: no answer within 20 ms"), "{error}");
        assert_eq!(client.execute("cont", None, 5 * SECOND), Ok(json!("third")));
        assert!(client.protocol.is_done());
    });
}

#[test]
fn a_socket_that_is_not_there_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gone.sock");
    let error = Client::new(&path).execute("stop", None, SECOND).unwrap_err();
    assert!(error.to_string().contains(": no such socket: the VM has ended"), "{error}");
    drop(UnixListener::bind(&path).unwrap());
    let error = Client::new(&path).execute("stop", None, SECOND).unwrap_err();
    assert!(error.to_string().contains(": no process listens there: QEMU has ended"), "{error}");
    assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
}

#[test]
fn a_path_longer_than_an_address_connects() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    std::os::unix::fs::symlink(&deep, dir.path().join("s")).unwrap();
    let _listener = UnixListener::bind(dir.path().join("s/q")).unwrap();
    assert_eq!(Client::new(deep.join("q")).protocol.state(), State::Greeting);
}

#[test]
fn a_peer_that_never_greets_serves_somebody_else() {
    let peer = peer(|p| drop(p.hear()));
    let error = Client::new(&peer.path).execute("stop", None, SECOND / 20).unwrap_err();
    assert!(matches!(error, QmpError::Taken(..)), "{error}");
    assert!(error.to_string().contains("one client per QMP socket"), "{error}");
    peer.thread.join().unwrap();
}

#[test]
fn one_hung_peer_does_not_delay_the_others() {
    let silent = peer(|p| {
        p.greet();
        while !p.hear().is_empty() {}
    });
    let prompt = peer(|p| {
        p.greet();
        for id in 1..=2 {
            p.hear();
            p.say(&format!("{{\"return\": {{}}, \"id\": {id}}}\n"));
        }
        p.hear();
    });
    let mut slow = Client::new(&silent.path);
    let mut fast = Client::new(&prompt.path);
    let (hung, answered) =
        (slow.protocol.send("a", None).unwrap(), fast.protocol.send("a", None).unwrap());
    let until = Instant::now() + Duration::from_millis(300);
    assert_eq!(poll_all(&mut [&mut slow, &mut fast], until), 1);
    assert!(
        fast.protocol.take_reply(answered).unwrap().is_ok()
            && slow.protocol.take_reply(hung).is_none()
    );
    // Once forgotten it is not waited for again.
    slow.protocol.forget(hung);
    let (id, start) = (fast.protocol.send("b", None).unwrap(), Instant::now());
    assert_eq!(poll_all(&mut [&mut slow, &mut fast], start + 5 * SECOND), 0);
    assert!(fast.protocol.take_reply(id).unwrap().is_ok() && start.elapsed() < 4 * SECOND);
    drop((slow, fast));
    silent.thread.join().unwrap();
    prompt.thread.join().unwrap();
}

fn ready() -> Protocol {
    let mut p = Protocol::new("test");
    p.feed(GREETING.as_bytes());
    p.feed(b"{\"return\": {}, \"id\": 0}");
    assert_eq!(p.state(), State::Ready);
    p
}

#[test]
fn every_queue_has_its_limit() {
    let mut p = ready();
    for i in 0..MAX_EVENTS + 5 {
        p.feed(format!("{{\"event\": \"E{i}\"}}").as_bytes());
    }
    let events = p.take_events();
    assert_eq!((events.len(), events[0].name.as_str()), (MAX_EVENTS, "E5"));
    for _ in 0..MAX_PENDING {
        p.send("x", None).unwrap();
    }
    let error = p.send("x", None).unwrap_err();
    assert_eq!(error.to_string(), "test: more than 64 commands without an answer");
    let half = "y".repeat(MAX_REPLY_BYTES / 3);
    for id in 1..=3 {
        p.feed(format!("{{\"return\": \"{half}\", \"id\": {id}}}").as_bytes());
    }
    assert!(p.failure().unwrap().to_string().contains("bytes of replies"));
    assert!(p.take_reply(60).unwrap().is_err() && p.send("x", None).is_err());
}

#[test]
fn commands_sent_early_wait_for_the_negotiation() {
    let mut p = Protocol::new("test");
    p.send("stop", None).unwrap();
    assert!(p.outbox.is_empty());
    p.feed(GREETING.as_bytes());
    assert!(!String::from_utf8_lossy(&p.outbox).contains("stop"));
    p.feed(b"{\"return\": {}, \"id\": 0}");
    assert!(String::from_utf8_lossy(&p.outbox).contains("stop"));
}

proptest! {
    #[test]
    fn messages_do_not_depend_on_where_they_are_cut(cuts in proptest::collection::vec(1usize..40, 1..30)) {
        let text = concat!(
            r#" {"event":"A","data":{"s":"}]\"\\"}}"#, "\r\n", r#"{"return":[1,{"x":"{"}],"id":1}"#,
            "\n\n", r#"{"event":"B"}{"event":"C"}"#, "\n",
        );
        let mut p = ready();
        let id = p.send("x", None).unwrap();
        let (mut rest, mut cuts) = (text.as_bytes(), cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            p.feed(piece);
            rest = after;
        }
        prop_assert_eq!(p.take_reply(id), Some(Ok(json!([1, { "x": "{" }]))));
        let names: Vec<String> = p.take_events().into_iter().map(|e| e.name).collect();
        prop_assert_eq!(names, ["A", "B", "C"]);
    }
}

#[test]
fn a_greeting_without_a_version_is_still_one() {
    let greeting = parse_message(b"{\"QMP\": 5}").unwrap();
    assert_eq!(greeting, Message::Greeting);
}
