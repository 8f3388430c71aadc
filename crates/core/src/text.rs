//! Foreign texts made fit for messages. They are shown in the journal and on root's terminal.

/// The first characters of a text, `most` at most, with a space for each control character.
pub fn printable(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
