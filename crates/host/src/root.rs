//! Where files are read from, how much of them, and what can be wrong with them.
//!
//! Every read in this crate goes through [`Root`], so a test can put a fixture
//! tree under any probe, and no file can be longer than expected. Only reading
//! belongs here; what a file means stands in `probe/`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Most bytes read of one file. The longest in use, mountinfo on a container
/// host, has some 100 KB.
pub const MAX_FILE: u64 = 1 << 20;
/// Room for most of them, so that one look and one at the end do.
const USUAL: usize = 8 << 10;

/// What a text was not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line number from 1; 0 where the text as a whole is meant.
    pub line: usize,
    /// What is wrong with it.
    pub message: String,
}

impl ParseError {
    /// An error on a line, numbered from 1.
    pub fn new(line: usize, message: impl Into<String>) -> ParseError {
        ParseError { line, message: message.into() }
    }

    /// A field that the whole text lacks.
    pub fn missing(field: &str) -> ParseError {
        ParseError::new(0, format!("no {field}"))
    }
}

/// A source that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The system refused.
    #[error("{path}: {error}{}", hint(.error))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// More than [`MAX_FILE`].
    #[error("{path}: longer than {MAX_FILE} bytes: this is not the kernel's file")]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// Not what the kernel documents.
    #[error("{path}: {error}: this kernel's format is unknown, please report it")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        error: ParseError,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => ": run Ebb as root",
        _ => "",
    }
}

impl ProbeError {
    /// Whether the reason is a lack of permission.
    pub fn is_denied(&self) -> bool {
        matches!(self, ProbeError::Io { error, .. }
            if error.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// The directory that stands for `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    /// The machine's own `/`.
    fn default() -> Root {
        Root(PathBuf::from("/"))
    }
}

impl Root {
    /// A tree that looks like a machine, for tests.
    pub fn at(prefix: impl Into<PathBuf>) -> Root {
        Root(prefix.into())
    }

    /// Whether this is the machine's own `/`, not a fixture tree.
    pub fn is_machine(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// Where an absolute path lies below this root.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.0.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// At most [`MAX_FILE`] bytes of a file; `None` where it is absent, its
    /// process has ended, or the kernel has it switched off (`psi=0`).
    pub fn read_bytes(&self, absolute: impl AsRef<Path>) -> Result<Option<Vec<u8>>, ProbeError> {
        let path = self.path(absolute);
        let mut bytes = Vec::with_capacity(USUAL);
        match File::open(&path).and_then(|f| f.take(MAX_FILE + 1).read_to_end(&mut bytes)) {
            Ok(n) if n as u64 > MAX_FILE => Err(ProbeError::TooLong { path }),
            Ok(_) => Ok(Some(bytes)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(ProbeError::Io { path, error }),
        }
    }

    /// The same as text; bytes that are not UTF-8 become U+FFFD.
    pub fn read(&self, absolute: impl AsRef<Path>) -> Result<Option<String>, ProbeError> {
        let bytes = self.read_bytes(absolute)?;
        Ok(bytes.map(|b| match String::from_utf8(b) {
            Ok(text) => text,
            Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
        }))
    }

    /// Reads and parses; errors name the file.
    pub fn parse<T>(
        &self,
        absolute: impl AsRef<Path>,
        parse: impl FnOnce(&str) -> Result<T, ParseError>,
    ) -> Result<Option<T>, ProbeError> {
        let absolute = absolute.as_ref();
        let Some(text) = self.read(absolute)? else { return Ok(None) };
        parse(&text)
            .map(Some)
            .map_err(|error| ProbeError::Parse { path: self.path(absolute), error })
    }
}

pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::SRCH | Errno::OPNOTSUPP | Errno::NODEV)
    )
}

/// A number alone on its line, as sysfs and cgroup files have it.
pub fn parse_number<T: std::str::FromStr>(text: &str) -> Result<T, ParseError> {
    let t = text.trim();
    t.parse().map_err(|_| {
        let shown: String = t.chars().take(40).collect();
        ParseError::new(1, format!("“{shown}” is not a number"))
    })
}

/// Undoes the kernel's `\ooo` escapes of mountinfo and swaps
/// (`fs/seq_file.c`, `mangle_path`).
pub fn unescape_octal(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = bytes.get(i + 1..i + 4).filter(|_| bytes[i] == b'\\');
        let code = code.and_then(|c| std::str::from_utf8(c).ok());
        match code.and_then(|c| u8::from_str_radix(c, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_file_is_none_and_a_long_one_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert!(root.read("/proc/meminfo").unwrap().is_none());
        std::fs::write(dir.path().join("long"), vec![b'x'; MAX_FILE as usize + 1]).unwrap();
        let error = root.read("/long").unwrap_err().to_string();
        assert!(error.contains("/long: longer than"), "{error}");
    }

    #[test]
    fn text_that_is_not_utf8_is_read_lossily() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), b"a\xffb").unwrap();
        assert_eq!(Root::at(dir.path()).read("/f").unwrap().unwrap(), "a\u{fffd}b");
    }

    #[test]
    fn octal_escapes_are_undone_and_other_backslashes_stay() {
        for (text, plain) in
            [(r"/a\040b", "/a b"), (r"\134", "\\"), (r"x\04", r"x\04"), (r"\999\", r"\999\")]
        {
            assert_eq!(unescape_octal(text), plain);
        }
    }
}
