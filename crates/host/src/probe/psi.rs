//! `/proc/pressure/memory` and a cgroup's `memory.pressure` (Linux
//! `Documentation/accounting/psi.rst`): averages, and a trigger to sleep on.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use ebb_core::sample::{Psi, PsiLine};

use crate::root::{ParseError, Probed, Root, fields, probed};

pub const MEMORY: &str = "/proc/pressure/memory";

/// Reads its text: `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, then `full …`.
pub fn parse_psi(text: &str) -> Result<Psi, ParseError> {
    let [some, full] = fields(text, ["some", "full"], parse_line)?;
    let some = some.ok_or_else(|| ParseError::missing("line “some”"))?;
    Ok(Psi { some, full: full.unwrap_or_default() })
}

fn parse_line(text: &str) -> Option<PsiLine> {
    let mut line = PsiLine::default();
    let percent = |v: &str| v.parse().ok().filter(|p| (0.0..=100.0).contains(p));
    for field in text.split_ascii_whitespace() {
        let (key, value) = field.split_once('=')?;
        match key {
            "avg10" => line.avg10 = percent(value)?,
            "avg60" => line.avg60 = percent(value)?,
            "avg300" => line.avg300 = percent(value)?,
            "total" => line.total_us = value.parse().ok()?,
            _ => {}
        }
    }
    Some(line)
}

/// Wakes a `poll` (`POLLPRI`) when tasks stalled long enough.
#[derive(Debug)]
pub struct PsiTrigger(File);

impl PsiTrigger {
    /// Asks for a wake-up whenever some task stalled for `stall_us` within
    /// `window_us` (both microseconds; the kernel takes windows of 0.5–10 s,
    /// from unprivileged users only multiples of 2 s). `None` without PSI.
    pub fn open(root: &Root, path: &str, stall_us: u32, window_us: u32) -> Probed<PsiTrigger> {
        let path = root.path(path);
        let mut options = File::options();
        options.read(true).write(true);
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        let opened = options.open(&path).and_then(|mut f| {
            f.write_all(format!("some {stall_us} {window_us}\0").as_bytes())?;
            Ok(f)
        });
        Ok(probed(&path, opened)?.map(PsiTrigger))
    }

    /// For `poll`; `POLLPRI` is a trigger, `POLLERR` means that it is gone.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines_are_read_and_nonsense_is_refused_with_its_line() {
        let psi = parse_psi(
            "some avg10=1.50 avg60=0.25 avg300=0.00 total=77\n\
             full avg10=0.50 avg60=0.00 avg300=0.00 total=9\n",
        )
        .unwrap();
        assert_eq!((psi.some.avg10, psi.some.total_us, psi.full.total_us), (1.5, 77, 9));
        assert_eq!(parse_psi("some avg10=1\nfull avg10=NaN\n").unwrap_err().line, 2);
        assert!(parse_psi("some avg10\n").is_err());
        assert!(parse_psi("").is_err());
    }

    #[test]
    fn without_psi_there_is_neither_value_nor_trigger() {
        let root = crate::testing::tree(&[]);
        assert!(root.parse(MEMORY, parse_psi).unwrap().is_none());
        assert!(PsiTrigger::open(&root, MEMORY, 100_000, 1_000_000).unwrap().is_none());
    }

    #[test]
    fn this_machine_takes_a_trigger() {
        // 2 s: what the kernel (6.5+) also lets unprivileged users have.
        match PsiTrigger::open(&Root::default(), MEMORY, 100_000, 2_000_000) {
            Ok(trigger) => assert_eq!(trigger.is_some(), std::path::Path::new(MEMORY).exists()),
            Err(e) => assert!(e.is_denied(), "{e}"),
        }
    }
}
