//! The language of the guest tool: lines out of a guest, and the connection.
//!
//! What a guest says is hostile input: a line has at most [`LINE_MAX`] bytes, a
//! longer one is skipped, and what is not an answer or an event of the expected
//! shape is a [`BadLine`], never a panic. Event queues are bounded.

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::lock;

/// The tool's answers are at most 16 KiB.
pub const LINE_MAX: usize = 32 << 10;
/// Events kept when nobody takes them; the oldest go first.
const EVENTS_MAX: usize = 10_000;
/// Answers kept that nobody waits for any more.
const REPLIES_MAX: usize = 256;

/// Not a line of the tool.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a line of the guest tool: {0}")]
pub struct BadLine(String);

#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The number of the command.
    pub id: u64,
    /// What it says, or why it was refused.
    pub result: Result<Fields, String>,
}

/// Something a job says unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// `ready`, `progress`, `error`, `exit`.
    pub name: String,
    pub job: String,
    pub fields: Fields,
}

/// A line of the tool.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    Reply(Reply),
    Event(Event),
}

/// The fields of an answer or event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fields(pub Map<String, Value>);

impl Fields {
    /// A number; 0 where there is none.
    pub fn u64(&self, key: &str) -> u64 {
        self.0.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// A number with a fraction; 0 where there is none.
    pub fn f64(&self, key: &str) -> f64 {
        self.0.get(key).and_then(Value::as_f64).unwrap_or(0.0)
    }

    /// A text; empty where there is none.
    pub fn str(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or("")
    }
}

#[derive(Deserialize)]
struct Raw {
    id: Option<u64>,
    ok: Option<bool>,
    event: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Reads one line of the tool, without its end.
pub fn parse_line(line: &[u8]) -> Result<Line, BadLine> {
    let bad = |why: String| BadLine(why);
    if line.len() > LINE_MAX {
        return Err(bad(format!("{} bytes", line.len())));
    }
    let mut raw: Raw = serde_json::from_slice(line).map_err(|e| bad(e.to_string()))?;
    let text = |v: Option<Value>| v.and_then(|v| v.as_str().map(String::from)).unwrap_or_default();
    match (raw.id, raw.ok, raw.event) {
        (Some(id), Some(true), None) => Ok(Line::Reply(Reply { id, result: Ok(Fields(raw.rest)) })),
        (Some(id), Some(false), None) => {
            Ok(Line::Reply(Reply { id, result: Err(text(raw.rest.remove("error"))) }))
        }
        (None, None, Some(name)) => {
            let job = text(raw.rest.remove("job"));
            Ok(Line::Event(Event { name, job, fields: Fields(raw.rest) }))
        }
        _ => Err(bad("neither answer nor event".into())),
    }
}

/// The next line, without its end; one beyond [`LINE_MAX`] is skipped, and so is a
/// last one that is cut off.
pub fn next_line(from: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    loop {
        let mut line = Vec::new();
        from.by_ref().take(LINE_MAX as u64 + 1).read_until(b'\n', &mut line)?;
        if line.pop_if(|last| *last == b'\n').is_some() {
            return Ok(Some(line));
        }
        if line.len() <= LINE_MAX {
            return Ok(None);
        }
        from.skip_until(b'\n')?;
    }
}

/// A value as the tool reads it: what is not plain becomes `%XX`.
pub fn escape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for b in value.bytes() {
        if b.is_ascii_graphic() && b != b'%' {
            out.push(b as char);
        } else {
            out += &format!("%{b:02x}");
        }
    }
    out
}

/// Why a request got no good answer.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("the guest tool refused `{command}`: {why}")]
    Refused { command: String, why: String },
    #[error("`{what}`: no answer from the guest within {after:.1?}")]
    Timeout { what: String, after: Duration },
    /// The connection is gone, so the VM is.
    #[error("the connection to the guest tool is closed")]
    Closed,
}

#[derive(Debug, Default)]
struct Inbox {
    replies: HashMap<u64, Result<Fields, String>>,
    events: VecDeque<Event>,
    bad_lines: u64,
    closed: bool,
}

#[derive(Debug, Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    news: Condvar,
}

/// A connection to one guest's tool. Requests may come from several threads.
#[derive(Debug)]
pub struct Tool {
    shared: Arc<Shared>,
    out: Mutex<(UnixStream, u64)>,
    patience: f64,
}

impl Tool {
    /// Speaks on `socket`; every deadline is multiplied by `patience`.
    pub fn new(socket: UnixStream, patience: f64) -> io::Result<Tool> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let reader = socket.try_clone()?;
        thread::Builder::new()
            .name("guest-tool".into())
            .spawn(move || read_all(reader, &theirs))?;
        Ok(Tool { shared, out: Mutex::new((socket, 0)), patience })
    }

    /// A deadline as this machine needs it.
    pub fn patient(&self, deadline: Duration) -> Duration {
        deadline.mul_f64(self.patience)
    }

    /// Sends `verb key=value …` and waits for the answer.
    pub fn request(&self, command: &str, deadline: Duration) -> Result<Fields, ToolError> {
        let id = self.send(command)?;
        let reply = self.wait(command, deadline, |inbox| inbox.replies.remove(&id))?;
        reply.map_err(|why| ToolError::Refused { command: command.into(), why })
    }

    /// Sends a command whose answer nobody waits for.
    pub fn send(&self, command: &str) -> Result<u64, ToolError> {
        let mut out = lock(&self.out);
        out.1 += 1;
        let line = format!("{} {}\n", out.1, command.replace('\n', " "));
        out.0.write_all(line.as_bytes()).map_err(|_| ToolError::Closed)?;
        Ok(out.1)
    }

    /// Waits until `done` finds something in the inbox.
    fn wait<T>(
        &self,
        what: &str,
        deadline: Duration,
        mut done: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<T, ToolError> {
        let after = self.patient(deadline);
        let mut found = None;
        let waits = |inbox: &mut Inbox| {
            found = done(inbox);
            found.is_none() && !inbox.closed
        };
        let inbox = self.shared.news.wait_timeout_while(lock(&self.shared.inbox), after, waits);
        let closed = inbox.unwrap_or_else(PoisonError::into_inner).0.closed;
        found.ok_or_else(|| match closed {
            true => ToolError::Closed,
            false => ToolError::Timeout { what: what.into(), after },
        })
    }

    /// Waits for an event of a job and takes it; others stay queued.
    pub fn wait_event(
        &self,
        job: &str,
        name: &str,
        deadline: Duration,
    ) -> Result<Fields, ToolError> {
        self.wait(&format!("event {name} of {job}"), deadline, |inbox| {
            let at = inbox.events.iter().position(|e| e.job == job && e.name == name)?;
            inbox.events.remove(at).map(|e| e.fields)
        })
    }

    /// All events since the last time, oldest first.
    pub fn take_events(&self) -> Vec<Event> {
        lock(&self.shared.inbox).events.drain(..).collect()
    }

    /// Lines that were not the tool's.
    pub fn bad_lines(&self) -> u64 {
        lock(&self.shared.inbox).bad_lines
    }

    /// Starts a job: `start("a", "hold", "size=4096 pattern=zero")`.
    pub fn start(&self, job: &str, kind: &str, arguments: &str) -> Result<(), ToolError> {
        let command = format!("start job={job} kind={kind} {arguments}");
        self.request(&command, Duration::from_secs(20)).map(drop)
    }

    /// Starts a job and waits until it is ready (or has ended well).
    pub fn start_ready(
        &self,
        job: &str,
        kind: &str,
        arguments: &str,
        deadline: Duration,
    ) -> Result<Fields, ToolError> {
        self.start(job, kind, arguments)?;
        let stat = self.request(&format!("wait job={job} until=ready"), deadline)?;
        failed(&stat, &format!("start job={job} kind={kind} {arguments}"))
    }

    /// Waits for the end of a job; an end that is not a good one is an error.
    pub fn wait_end(&self, job: &str, deadline: Duration) -> Result<Fields, ToolError> {
        let stat = self.request(&format!("wait job={job}"), deadline)?;
        failed(&stat, &format!("wait job={job}"))
    }

    pub fn stat(&self, job: &str) -> Result<Fields, ToolError> {
        self.request(&format!("stat job={job}"), Duration::from_secs(20))
    }

    /// Kills a job; returns its last counters when it is gone.
    pub fn stop(&self, job: &str) -> Result<Fields, ToolError> {
        self.request(&format!("stop job={job}"), Duration::from_secs(60))
    }

    /// Tells a job to go on: what it does then is its own affair.
    pub fn poke(&self, job: &str) -> Result<(), ToolError> {
        self.request(&format!("poke job={job}"), Duration::from_secs(20)).map(drop)
    }

    /// Has `verify` check everything once more and end.
    pub fn finish(&self, job: &str, deadline: Duration) -> Result<Fields, ToolError> {
        self.poke(job)?;
        self.wait_end(job, deadline)
    }

    /// Runs a shell command in the guest; returns what it printed (the first
    /// 1,300 bytes).
    pub fn sh(&self, command: &str, deadline: Duration) -> Result<String, ToolError> {
        let fields = self.request(&format!("sh cmd={}", escape(command)), deadline)?;
        Ok(fields.str("text").to_string())
    }

    /// Writes a sysfs or proc knob.
    pub fn write(&self, path: &str, value: &str) -> Result<(), ToolError> {
        let command = format!("write path={} value={}", escape(path), escape(value));
        self.request(&command, Duration::from_secs(60)).map(drop)
    }
}

fn failed(stat: &Fields, command: &str) -> Result<Fields, ToolError> {
    match stat.str("state") {
        "failed" | "killed" => Err(ToolError::Refused {
            command: command.into(),
            why: format!("{} {}: {:?}", stat.str("state"), stat.u64("code"), stat.0),
        }),
        _ => Ok(stat.clone()),
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = lock(&self.out).0.shutdown(std::net::Shutdown::Both);
    }
}

fn read_all(socket: UnixStream, shared: &Shared) {
    let mut socket = BufReader::new(socket);
    while let Ok(Some(line)) = next_line(&mut socket) {
        accept(&mut lock(&shared.inbox), &line);
        shared.news.notify_all();
    }
    lock(&shared.inbox).closed = true;
    shared.news.notify_all();
}

fn accept(inbox: &mut Inbox, line: &[u8]) {
    match parse_line(line) {
        Ok(Line::Reply(reply)) if inbox.replies.len() < REPLIES_MAX => {
            inbox.replies.insert(reply.id, reply.result);
        }
        Ok(Line::Event(event)) => {
            if inbox.events.len() == EVENTS_MAX {
                inbox.events.pop_front();
            }
            inbox.events.push_back(event);
        }
        Ok(Line::Reply(_)) | Err(_) => inbox.bad_lines += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_and_events_are_told_apart() {
        let Ok(Line::Reply(r)) = parse_line(br#"{"id":3,"ok":true,"pages":7,"text":"x"}"#) else {
            panic!("not a reply")
        };
        let fields = r.result.unwrap();
        assert_eq!((r.id, fields.u64("pages"), fields.str("text")), (3, 7, "x"));
        let refused = parse_line(br#"{"id":3,"ok":false,"error":"no"}"#);
        assert_eq!(refused, Ok(Line::Reply(Reply { id: 3, result: Err("no".into()) })));
        let Ok(Line::Event(e)) = parse_line(br#"{"event":"ready","job":"a","fill_ns":5}"#) else {
            panic!("not an event")
        };
        assert_eq!((e.name.as_str(), e.job.as_str(), e.fields.u64("fill_ns")), ("ready", "a", 5));
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            "",
            "null",
            "[]",
            "7",
            "{}",
            r#"{"id":1}"#,
            r#"{"ok":true}"#,
            r#"{"id":-1,"ok":true}"#,
            r#"{"id":1,"ok":"true"}"#,
            r#"{"id":1,"ok":true,"event":"x"}"#,
            r#"{"event":7}"#,
            r#"{"id":1,"ok":true"#,
            r#"{"id":18446744073709551616,"ok":true}"#,
        ] {
            assert!(parse_line(line.as_bytes()).is_err(), "{line}");
        }
        assert!(parse_line(&vec![b'['; LINE_MAX]).is_err());
    }

    /// The lines of a text that comes in pieces.
    fn lines(text: &str, piece: usize) -> Vec<String> {
        let mut from = BufReader::with_capacity(piece, text.as_bytes());
        let lines = std::iter::from_fn(|| next_line(&mut from).unwrap());
        lines.map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_alone() {
        let long = |length| "x".repeat(length) + "\n";
        let text = format!("one\n{}two\n{}cut off", long(100_000), long(LINE_MAX + 1));
        assert_eq!(lines(&text, 10_000), ["one", "two"]);
        assert_eq!(lines(&long(LINE_MAX), 10_000).len(), 1);
    }

    #[test]
    fn values_are_escaped() {
        assert_eq!(escape("a b%\n=é"), "a%20b%25%0a=%c3%a9");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_line_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_line(&bytes);
        }

        #[test]
        fn lines_survive_any_cut(text in "[a-z\n]{0,200}", cut in 1usize..20) {
            let whole = text.rsplit_once('\n').map(|(whole, _)| whole.split('\n').collect());
            prop_assert_eq!(lines(&text, cut), whole.unwrap_or(Vec::new()));
        }
    }
}
