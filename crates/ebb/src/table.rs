//! What goes to the terminal: tables, clock times, and the one way to print.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use ebb_core::units::Bytes;

/// Nobody reads our output any more (`ebb status | head`): not an error.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output")]
pub struct NobodyReads;

/// Prints; [`NobodyReads`] where the reader has gone, which `main` takes as the end.
pub fn emit(text: &str) -> Result<()> {
    emit_all(&mut text.as_bytes())
}

/// Prints all that there is to read.
pub fn emit_all(from: &mut dyn std::io::Read) -> Result<()> {
    let mut out = std::io::stdout();
    match std::io::copy(from, &mut out).and_then(|_| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(NobodyReads.into()),
        other => Ok(other?),
    }
}

/// Prints a value as JSON.
pub fn emit_json<T: Serialize>(value: &T) -> Result<()> {
    emit(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Aligned columns: the first left, the rest right; the last left again if
/// `tail` is set.
pub fn table(head: &[&str], rows: &[Vec<String>], tail: bool) -> String {
    let columns = head.len();
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .chain([head[c].chars().count()])
            .max()
    };
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (c, cell) in cells.iter().enumerate().take(columns) {
            let w = widths[c];
            let last = c + 1 == columns;
            text += &match (c, last && tail) {
                (0, _) => format!("{cell:<w$}"),
                (_, true) => format!("  {cell}"),
                _ => format!("  {cell:>w$}"),
            };
        }
        text.trim_end().to_string() + "\n"
    };
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    line(&head) + &rows.iter().map(|r| line(r)).collect::<String>()
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
    fn columns_align_by_characters_not_bytes() {
        let rows = vec![vec!["ä".into(), "1".into(), "x y".into()], vec!["bc".into(), "22".into()]];
        assert_eq!(table(&["N", "V", "WHY"], &rows, true), "N    V  WHY\nä    1  x y\nbc  22\n");
        assert_eq!(clock(86_400_000 + 3_661_999), "01:01:01Z");
    }
}
