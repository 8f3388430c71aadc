//! QMP messages: where they end, what QEMU's bytes say, and a command in bytes. Foreign text is
//! cut and cleaned here, before anything shows it. How long a message may be is `protocol.rs`'s.

use ebb_core::text::printable;
use serde::Serialize;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Greeting,
    Event(Event),
    Return { id: Option<u64>, value: Value },
    Error { id: Option<u64>, class: String, desc: String },
}

/// An event, e.g. `RESET`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: String,
    /// Data; `Null` where there is none or it was longer than
    /// [`MAX_EVENT_BYTES`](super::MAX_EVENT_BYTES).
    pub data: Value,
}

/// Parses one message. Pure; any bytes are safe. The error is for people.
pub fn parse_message(bytes: &[u8]) -> Result<Message, String> {
    let value: Value =
        serde_json::from_slice(bytes).map_err(|e| format!("{e} in “{}”", excerpt(bytes)))?;
    let Value::Object(mut map) = value else {
        return Err(format!("not a JSON object: “{}”", excerpt(bytes)));
    };
    let bad = |id: &Value| printable(&format!("reply with id {id}"), 60);
    let id = map.remove("id").map(|id| id.as_u64().ok_or_else(|| bad(&id))).transpose()?;
    if let Some(value) = map.remove("return") {
        return Ok(Message::Return { id, value });
    }
    let text = |v: &Value, key: &str| v[key].as_str().map(str::to_owned);
    if let Some(error) = map.remove("error") {
        return match (text(&error, "class"), text(&error, "desc")) {
            (Some(class), Some(desc)) => {
                Ok(Message::Error { id, class: printable(&class, 64), desc: printable(&desc, 300) })
            }
            _ => Err("an error reply without class and desc".into()),
        };
    }
    if let Some(name) = map.remove("event") {
        let name = name.as_str().ok_or("an event without a name")?;
        let data = map.remove("data").unwrap_or(Value::Null);
        return Ok(Message::Event(Event { name: printable(name, 64), data }));
    }
    if map.contains_key("QMP") {
        return Ok(Message::Greeting);
    }
    Err(format!("neither reply nor event: “{}”", excerpt(bytes)))
}

pub(super) fn excerpt(bytes: &[u8]) -> String {
    printable(&String::from_utf8_lossy(&bytes[..bytes.len().min(60)]), 60)
}

#[derive(Serialize)]
struct Sent<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<Value>,
    execute: &'a str,
    id: u64,
}

pub(super) fn encode(out: &mut Vec<u8>, execute: &str, arguments: Option<Value>, id: u64) {
    // Writing to memory does not fail, and a `Value` is always JSON.
    let _ = serde_json::to_writer(&mut *out, &Sent { arguments, execute, id });
    out.push(b'\n');
}

/// Where messages end: counts nesting outside strings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cutter {
    depth: u32,
    string: bool,
    escape: bool,
}

pub(super) enum Cut {
    Between,
    Inside,
    End,
    Garbage,
}

impl Cutter {
    pub(super) fn byte(&mut self, b: u8) -> Cut {
        if self.string {
            match b {
                _ if self.escape => self.escape = false,
                b'\\' => self.escape = true,
                b'"' => self.string = false,
                _ => {}
            }
            return Cut::Inside;
        }
        match b {
            b'{' => self.depth += 1,
            b' ' | b'\t' | b'\r' | b'\n' if self.depth == 0 => return Cut::Between,
            _ if self.depth == 0 => return Cut::Garbage,
            b'[' => self.depth += 1,
            b'"' => self.string = true,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Cut::End;
                }
            }
            _ => {}
        }
        Cut::Inside
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What QEMU says is shown in the journal and on root's terminal.
    #[test]
    fn words_of_qemus_are_bounded_and_steer_no_terminal() {
        let long = "\u{9b}2J\u{1b}]0;x\u{7}\n".repeat(1000);
        let all = [
            json!({ "error": { "class": long, "desc": long } }),
            json!({ "event": long }),
            json!({ "id": long, "return": {} }),
        ];
        for message in all {
            let said = match parse_message(message.to_string().as_bytes()) {
                Ok(Message::Error { class, desc, .. }) => class + &desc,
                Ok(Message::Event(event)) => event.name,
                Ok(other) => panic!("{other:?}"),
                Err(bad) => bad,
            };
            assert!(!said.chars().any(char::is_control), "{said:?}");
            assert!((50..500).contains(&said.chars().count()), "{said}");
        }
    }
}
