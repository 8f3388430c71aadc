//! What goes to the terminal: sizes, clock times, and the one way to print.

use std::io::Write;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use ebb_core::table::table;
use ebb_core::units::Bytes;

/// A row of a [`table`]: its cells, as they are displayed.
macro_rules! row {
    ($($cell:expr),* $(,)?) => {
        vec![$($cell.to_string()),*]
    };
}
pub(crate) use row;

/// The reader of our output has closed it (`ebb status | head`): not an error.
#[derive(Debug, thiserror::Error)]
#[error("the reader of the output has gone")]
pub struct ReaderGone;

/// Prints; [`ReaderGone`] where the reader has gone, which `main` takes as the end.
pub fn emit(text: &str) -> Result<()> {
    emit_all(&mut text.as_bytes())
}

pub fn emit_all(from: &mut dyn std::io::Read) -> Result<()> {
    let mut out = std::io::stdout();
    match std::io::copy(from, &mut out).and_then(|_| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        other => Ok(other?),
    }
}

pub fn emit_json<T: Serialize>(value: &T) -> Result<()> {
    emit(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Prints a value as JSON, or the text that is made of it.
pub fn emit_as<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> Result<String>,
) -> Result<()> {
    if json { emit_json(value) } else { emit(&text()?) }
}

/// An answer of the daemon, as far as this version knows its fields. As JSON it is printed whole.
pub fn known<'a, T: Deserialize<'a>>(told: &'a Value) -> Result<T> {
    T::deserialize(told).context("the daemon's version may be too far from this one's")
}

/// A size, or `-`.
pub fn size(b: Option<Bytes>) -> String {
    b.map_or("-".into(), |b| b.to_string())
}

/// A size that may be below zero.
pub fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "−" } else { "" };
    format!("{sign}{}", Bytes(bytes.unsigned_abs()))
}

/// Time of day, UTC, of milliseconds since 1970.
pub fn clock(wall_ms: u64) -> String {
    let s = wall_ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}Z", s / 3600, s / 60 % 60, s % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_are_utc() {
        assert_eq!(clock(86_400_000 + 3_661_999), "01:01:01Z");
    }
}
