//! Foreign texts made fit for messages. They are shown in the journal and on root's terminal, and
//! commands that a message gives are pasted there. And lines of JSON.

use serde::Serialize;

/// The first characters of a text, `most` at most, with a space for each control character.
pub fn printable(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A value as a line of JSON, with its end.
pub fn json_line(value: &impl Serialize) -> Vec<u8> {
    // Cannot fail: no map has keys other than texts, and nothing foreign is written.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

/// A VM's name as a command may hold it: `NAME` in place of one that a shell or XML would take
/// for something else.
pub fn in_command(name: &str) -> &str {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    if name.chars().all(is_plain) && !name.starts_with('-') { name } else { "NAME" }
}
