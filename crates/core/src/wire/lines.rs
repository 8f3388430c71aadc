//! Lines of the protocol: cut from a stream, read, written, and bounded both ways.
//!
//! Nothing here knows what is asked or answered. Whatever comes is foreign: a line that is
//! too long or not of this protocol is refused, and a text is made fit to be shown.

use serde::Deserialize;

use super::{LINE_MAX, TEXT_MAX};
use crate::text::printable;

/// A line that is not of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a line of the agent's protocol: {0}")]
pub struct BadLine(pub String);

pub(super) fn parse<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, BadLine> {
    if line.len() > LINE_MAX {
        return Err(BadLine(format!("{} bytes", line.len())));
    }
    // The error quotes what it stumbled over.
    serde_json::from_slice(line).map_err(|e| BadLine(clip(&e.to_string())))
}

/// A text from the other side, cut to [`TEXT_MAX`] and made printable.
pub fn clip(text: &str) -> String {
    printable(text, TEXT_MAX)
}

/// Takes bytes as they come and gives whole lines of at most [`LINE_MAX`] bytes.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    held: Vec<u8>,
}

impl Lines {
    /// Adds bytes; `each` gets every line that is now whole. An error: the line
    /// is too long, and nothing that follows can be trusted.
    pub fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), BadLine> {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.hold(&bytes[..end])?;
            each(&self.held);
            self.held.clear();
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes)
    }

    fn hold(&mut self, bytes: &[u8]) -> Result<(), BadLine> {
        if self.held.len() + bytes.len() > LINE_MAX {
            return Err(BadLine(format!("longer than {LINE_MAX} bytes")));
        }
        self.held.extend_from_slice(bytes);
        Ok(())
    }
}
