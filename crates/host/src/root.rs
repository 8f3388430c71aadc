//! Where files are read from, how much of them, and what can be wrong with them.
//!
//! Every read in this crate goes through [`Root`], so a test can put a fixture
//! tree under any probe, make any read fail, and no file can be longer than expected.
//! Only reading belongs here; what a file means stands in `probe/`.

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_core::text::printable;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

/// Most bytes read of one file. The longest in use, mountinfo on a container
/// host, has some 100 KB.
pub const MAX_FILE: u64 = 1 << 20;
/// Room for most of them, so that one look and one at the end do.
const USUAL: usize = 8 << 10;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line number from 1; 0 where the text as a whole is meant.
    pub line: usize,
    pub message: String,
}

impl ParseError {
    /// An error on a line, numbered from 1. Foreign text is cut and cleaned here.
    pub fn new(line: usize, message: impl AsRef<str>) -> ParseError {
        ParseError { line, message: printable(message.as_ref(), 80) }
    }

    pub fn missing(field: &str) -> ParseError {
        ParseError::new(0, format!("no {field}"))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("{path}: {error}{}", hint(.error))]
    Io { path: PathBuf, error: io::Error },
    #[error("{path}: longer than {MAX_FILE} bytes: this is not the kernel's file")]
    TooLong { path: PathBuf },
    #[error("{path}: {error}: this kernel's format is unknown, please report it")]
    Parse { path: PathBuf, error: ParseError },
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied { ": run Ebb as root" } else { "" }
}

impl ProbeError {
    pub fn is_denied(&self) -> bool {
        matches!(self, ProbeError::Io { error, .. }
            if error.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// What was read; `None`: it is absent, or its process has ended.
pub type Probed<T> = Result<Option<T>, ProbeError>;

/// What a read gives instead of what is there: a file holds these bytes, a link names them, a
/// directory lists them line by line.
pub type Fault = io::Result<Vec<u8>>;

/// Asked before each read of a path below the root; may also take its time.
pub type Faults = Arc<dyn Fn(&Path) -> Option<Fault> + Send + Sync>;

/// The directory that stands for `/`.
#[derive(Clone)]
pub struct Root {
    prefix: PathBuf,
    faults: Option<Faults>,
}

impl Default for Root {
    fn default() -> Root {
        Root::at("/")
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faulty = if self.faults.is_some() { " with faults" } else { "" };
        write!(f, "Root({:?}{faulty})", self.prefix)
    }
}

impl Root {
    /// A tree that looks like a machine, for tests.
    pub fn at(prefix: impl Into<PathBuf>) -> Root {
        Root { prefix: prefix.into(), faults: None }
    }

    /// This tree, on which reads fail, for tests.
    pub fn with_faults(self, faults: Faults) -> Root {
        Root { faults: Some(faults), ..self }
    }

    /// Whether this is the machine's own `/`, not a fixture tree.
    pub fn is_machine(&self) -> bool {
        self.prefix == Path::new("/")
    }

    /// Where an absolute path lies below this root.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.prefix.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// Writes a file of a fixture tree, and makes the directories above it.
    #[cfg(test)]
    pub(crate) fn put(&self, absolute: impl AsRef<Path>, bytes: impl AsRef<[u8]>) {
        let path = self.path(absolute);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    /// At most [`MAX_FILE`] bytes of a file; `None` where it is absent, its
    /// process has ended, or the kernel has it switched off (`psi=0`).
    pub fn read_bytes(&self, absolute: impl AsRef<Path>) -> Probed<Vec<u8>> {
        let path = self.path(absolute);
        let bytes = self.get(&path, Ok, || {
            let mut bytes = Vec::with_capacity(USUAL);
            File::open(&path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        })?;
        match bytes {
            Some(bytes) if bytes.len() as u64 > MAX_FILE => Err(ProbeError::TooLong { path }),
            bytes => Ok(bytes),
        }
    }

    /// The text of a file in `/proc` that is read again and again: on the machine itself it stays
    /// open in `kept`, until it cannot be read. What is kept is the file of one process; it never
    /// shows a later one that has its pid.
    pub fn reread(&self, absolute: impl AsRef<Path>, kept: &mut Option<File>) -> Probed<String> {
        let (path, file) = (self.path(absolute), kept.take());
        let bytes = self.get(&path, Ok, || {
            let file = file.map_or_else(|| File::open(&path), Ok)?;
            let bytes = read_from_start(&file)?;
            *kept = self.is_machine().then_some(file);
            Ok(bytes)
        })?;
        Ok(bytes.map(text))
    }

    /// The first line of a file in `/proc`, as far as its first 4 KiB hold it: the rest is not
    /// made by the kernel.
    pub fn read_line(&self, absolute: impl AsRef<Path>) -> Probed<String> {
        let path = self.path(absolute);
        let bytes = self.get(&path, Ok, || {
            let mut bytes = vec![0; 4096];
            let n = File::open(&path)?.read_at(&mut bytes, 0)?;
            bytes.truncate(n);
            Ok(bytes)
        })?;
        Ok(bytes.map(|bytes| text(bytes).lines().next().unwrap_or_default().to_owned()))
    }

    /// The names in a directory; an error also where reading it ends early.
    pub fn read_dir(&self, absolute: impl AsRef<Path>) -> Probed<Vec<OsString>> {
        let path = self.path(absolute);
        let lines = |bytes: Vec<u8>| {
            Ok(bytes.split(|b| *b == b'\n').map(|l| OsString::from_vec(l.to_vec())).collect())
        };
        self.get(&path, lines, || {
            std::fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name())).collect()
        })
    }

    pub fn read_link(&self, absolute: impl AsRef<Path>) -> Probed<PathBuf> {
        let path = self.path(absolute);
        let named = |bytes| Ok(OsString::from_vec(bytes).into());
        self.get(&path, named, || std::fs::read_link(&path))
    }

    /// `stat` of what a path leads to.
    pub fn metadata(&self, absolute: impl AsRef<Path>) -> Probed<Metadata> {
        let path = self.path(absolute);
        let none = |_| Err(io::ErrorKind::InvalidData.into());
        self.get(&path, none, || std::fs::metadata(&path))
    }

    /// What is at a path: what a fault has `told` instead, or what is `there`. What is absent is
    /// `None`; other errors name the path.
    fn get<T>(
        &self,
        path: &Path,
        told: impl FnOnce(Vec<u8>) -> io::Result<T>,
        there: impl FnOnce() -> io::Result<T>,
    ) -> Probed<T> {
        let fault = self.faults.as_ref().and_then(|faults| {
            let below = path.strip_prefix(&self.prefix).unwrap_or(path);
            faults(&Path::new("/").join(below))
        });
        probed(path, fault.map_or_else(there, |fault| fault.and_then(told)))
    }

    /// The text of a file, as [`Root::read_bytes`]; bytes that are not UTF-8 become U+FFFD.
    pub fn read(&self, absolute: impl AsRef<Path>) -> Probed<String> {
        Ok(self.read_bytes(absolute)?.map(text))
    }

    pub fn parse<T>(
        &self,
        absolute: impl AsRef<Path>,
        parse: impl FnOnce(&str) -> Result<T, ParseError>,
    ) -> Probed<T> {
        let absolute = absolute.as_ref();
        let Some(text) = self.read(absolute)? else { return Ok(None) };
        parse(&text)
            .map(Some)
            .map_err(|error| ProbeError::Parse { path: self.path(absolute), error })
    }
}

/// Bytes that are not UTF-8 become U+FFFD.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// All of an open file that the kernel makes as a whole: a read that fills less than it could
/// is the last. At most [`MAX_FILE`] bytes.
fn read_from_start(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        bytes.reserve(USUAL);
        let from = bytes.len() as u64;
        rustix::io::pread(file, spare_capacity(&mut bytes), from)?;
        if bytes.len() < bytes.capacity() || bytes.len() as u64 >= MAX_FILE {
            return Ok(bytes);
        }
    }
}

/// What a system call gave for a path: what is absent is `None`, other errors name the path.
pub(crate) fn probed<T>(path: &Path, result: io::Result<T>) -> Probed<T> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(ProbeError::Io { path: path.to_owned(), error }),
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

/// What is said after `KEY ` or `KEY:` at the beginning of a line, if there is such a line.
pub fn field<T>(
    text: &str,
    key: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, ParseError> {
    fields(text, [key], parse).map(|[value]| value)
}

/// What is said after each of these keys, in one pass over the text; of lines with the same key the
/// first counts.
pub fn fields<T, const N: usize>(
    text: &str,
    keys: [&str; N],
    parse: impl Fn(&str) -> Option<T>,
) -> Result<[Option<T>; N], ParseError> {
    let (mut told, mut left) = ([const { None }; N], N);
    for (i, line) in text.lines().enumerate() {
        let Some((key, value)) = line.split_once([' ', ':']) else { continue };
        let Some(n) = keys.iter().position(|k| *k == key).filter(|n| told[*n].is_none()) else {
            continue;
        };
        let bad = || ParseError::new(i + 1, line);
        told[n] = Some(parse(value.trim()).ok_or_else(bad)?);
        left -= 1;
        if left == 0 {
            break;
        }
    }
    Ok(told)
}

/// Undoes the kernel's `\ooo` escapes of mountinfo and swaps
/// (`fs/seq_file.c`, `mangle_path`).
pub fn unescape_octal(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok());
        let (byte, rest) = code.map_or((b'\\', part), |byte| (byte, &part[3..]));
        out.push(byte);
        out.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    #[test]
    fn an_absent_file_is_none_and_a_long_one_an_error() {
        let root = tree(&[]);
        assert!(root.read("/proc/meminfo").unwrap().is_none());
        root.put("/long", vec![b'x'; MAX_FILE as usize + 1]);
        let error = root.read("/long").unwrap_err().to_string();
        assert!(error.contains("/long: longer than"), "{error}");
    }

    #[test]
    fn of_each_key_the_first_line_counts_and_a_bad_one_is_named() {
        let text = "some 1\nsomething 2\nfull: 3\nfull: x\nlast y\n";
        let number = |v: &str| v.parse::<u32>().ok();
        let told = fields(text, ["full", "none", "some"], number).unwrap();
        assert_eq!(told, [Some(3), None, Some(1)]);
        assert_eq!(fields(text, ["some", "last"], number).unwrap_err().line, 5);
        assert_eq!(field(text, "full", number).unwrap(), Some(3), "nothing beyond is read");
    }

    #[test]
    fn every_kind_of_read_can_be_made_to_fail() {
        let plain = tree(&[("/f", "there")]);
        let failing = |fault: fn() -> Fault| {
            plain.clone().with_faults(Arc::new(move |path: &Path| {
                assert_eq!(path, Path::new("/f"), "as seen below the root");
                Some(fault())
            }))
        };
        let emfile = failing(|| Err(Errno::MFILE.into()));
        assert!(emfile.read("/f").is_err() && emfile.metadata("/f").is_err());
        assert!(emfile.read_dir("/f").is_err() && emfile.read_link("/f").is_err());
        let absent = failing(|| Err(Errno::NOENT.into()));
        assert!(absent.read("/f").unwrap().is_none());
        let bytes = failing(|| Ok(b"a\nb".to_vec()));
        assert_eq!(bytes.read("/f").unwrap().unwrap(), "a\nb");
        assert_eq!(bytes.read_dir("/f").unwrap().unwrap(), ["a", "b"]);
        assert_eq!(bytes.read_link("/f").unwrap().unwrap(), Path::new("a\nb"));
        assert!(bytes.metadata("/f").is_err());
        let none = plain.clone().with_faults(Arc::new(|_: &Path| None));
        assert_eq!(none.read("/f").unwrap().unwrap(), "there");
    }

    #[test]
    fn text_that_is_not_utf8_is_read_lossily() {
        let root = tree(&[]);
        root.put("/f", b"a\xffb");
        assert_eq!(root.read("/f").unwrap().unwrap(), "a\u{fffd}b");
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
