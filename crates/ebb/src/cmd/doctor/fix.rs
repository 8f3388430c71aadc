//! What `ebb doctor --fix` does about what the checks found. It changes no VM and no setting of
//! one, and each change can be undone by hand.
//!
//! A change that is safe to make is added to [`Fix`]; the check that finds it missing names it.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::{Command, Stdio};

use ebb_host::root::Root;
use serde::{Serialize, Serializer};

use super::{Check, Grade, check};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fix {
    /// Runs a program with these arguments.
    Run(&'static [&'static str]),
    /// Appends a line to a file, which is made if it is missing.
    Line { file: &'static str, line: &'static str },
}

impl std::fmt::Display for Fix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fix::Run(command) => f.write_str(&command.join(" ")),
            Fix::Line { file, line } => write!(f, "add to {file}: {line}"),
        }
    }
}

impl Serialize for Fix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Makes the changes that the checks name, and returns the result of each. With `dry_run` it only
/// names them.
pub(super) fn fix(checks: &[Check], root: &Root, dry_run: bool) -> Vec<Check> {
    let said = |(grade, found): (Grade, String)| check("host", "fix", grade, found, "");
    let mut fixes: Vec<Fix> = Vec::new();
    for fix in checks.iter().filter_map(|c| c.fix) {
        if !fixes.contains(&fix) {
            fixes.push(fix);
        }
    }
    if fixes.is_empty() {
        return vec![said((Grade::Note, "no finding has a safe fix".into()))];
    }
    let one = |fix: Fix| match dry_run {
        true => (Grade::Note, format!("not done: {fix}")),
        false => match fix.apply(root) {
            Ok(()) => (Grade::Good, format!("done: {fix}")),
            Err(why) => (Grade::Bad, format!("failed: {fix}: {why}")),
        },
    };
    fixes.into_iter().map(|fix| said(one(fix))).collect()
}

impl Fix {
    fn apply(self, root: &Root) -> Result<(), String> {
        match self {
            Fix::Run(command) => run(command),
            Fix::Line { file, line } => append(root, file, line),
        }
    }
}

fn run(command: &[&str]) -> Result<(), String> {
    let [program, arguments @ ..] = command else { return Err("no command".into()) };
    let done = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let done = done.map_err(|e| format!("{program} cannot be started: {e}"))?;
    match done.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&done.stderr);
            Err(format!("{}: {}", done.status, said.trim()))
        }
    }
}

/// One write, so that no reader sees half a line.
fn append(root: &Root, file: &str, line: &str) -> Result<(), String> {
    let path = root.path(file);
    let failed = |e: std::io::Error| e.to_string();
    let before = match fs::read(&path) {
        Ok(before) => before,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(failed(e)),
    };
    let parent = path.parent().ok_or("it is no file")?;
    fs::create_dir_all(parent).map_err(failed)?;
    let mut open = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
    let end = if before.last().is_none_or(|b| *b == b'\n') { "" } else { "\n" };
    open.write_all(format!("{end}{line}\n").as_bytes()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_added_once_and_what_was_there_stays() {
        let (_dir, root) = crate::cmd::doctor::tests::tree();
        let line = Fix::Line { file: "/etc/new/file", line: "include if exists <x>" };
        let found =
            |fix| Check { fix: Some(fix), ..check("host", "x", Grade::Missing, "not there", "") };
        let text = || fs::read_to_string(root.path("/etc/new/file"));
        let said = |checks: &[Check], dry_run| fix(checks, &root, dry_run)[0].clone();
        let would = said(&[found(line)], true);
        assert!(would.grade == Grade::Note && text().is_err(), "{would:?}");
        let done = said(&[found(line), found(line)], false);
        assert_eq!(
            (done.grade, text().unwrap().as_str()),
            (Grade::Good, "include if exists <x>\n")
        );
        fs::write(root.path("/etc/new/file"), "an operator's, without an end").unwrap();
        said(&[found(line)], false);
        assert_eq!(text().unwrap(), "an operator's, without an end\ninclude if exists <x>\n");
        assert_eq!(said(&[], false).grade, Grade::Note);
    }

    #[test]
    fn what_fails_is_said_with_its_command_and_its_reason() {
        let root = Root::default();
        let said = |command| {
            let fix = Some(Fix::Run(command));
            super::fix(&[Check { fix, ..check("host", "x", Grade::Missing, "", "") }], &root, false)
        };
        let missing = &said(&["/no/such/program", "x"])[0];
        assert!(missing.grade == Grade::Bad && missing.found.contains("/no/such/program x: "));
        let failed = &said(&["sh", "-c", "echo it is broken >&2; exit 3"])[0];
        assert!(failed.found.ends_with("exit status: 3: it is broken"), "{}", failed.found);
    }
}
