//! What `ebb-sim` prints, a file for each of its commands.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

pub mod comparison;
pub mod scale;
pub mod search;
pub mod trace;

/// How many threads there are to use.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Prints; a reader that has gone (`ebb-sim | head`) is no error.
fn emit(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

fn emit_json<T: Serialize>(value: &T) -> Result<()> {
    emit(&(serde_json::to_string_pretty(value)? + "\n"))
}
