//! The house rules, as checks over the files of the repository.
//!
//! What a compiler or clippy can check is not here. A rule is a pure function of
//! a file's path and text; the texts that are searched for are put together so
//! that this file does not break its own rules.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::lines::Count;
use crate::{LabError, run};

/// A file longer than this holds more than one idea.
pub const LINES_MAX: usize = 600;
/// Where `unsafe` may be written, as a prefix of the path.
const UNSAFE_ALLOWED: &[&str] =
    &["crates/vmm/", "crates/host/src/act/", "crates/host/src/sys", "crates/core/tests/growth.rs"];
/// How far above an `unsafe` its SAFETY line may stand.
const SAFETY_NEAR: usize = 6;
/// Files by these names build something and must not name hosts.
const BUILD_FILES: &[&str] =
    &["Makefile", "Kbuild", "Cargo.toml", "config.toml", "build.rs", "dkms.conf", "Dockerfile"];

/// The document whose tables say what Ebb does when something fails.
const FAILURES: &str = "docs/failures.md";
/// The document that says in which file what is, and where that begins.
const MAP: (&str, &str) = ("ARCHITECTURE.md", "### From a sample");
/// Characters in a line of prose. Tables, code and what programs print may have more.
const PROSE_MAX: usize = 120;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file, from the root of the repository.
    pub path: String,
    /// The line, from 1.
    pub line: usize,
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Every text file that git knows or would add.
fn texts(root: &Path) -> Result<Vec<(String, String)>, LabError> {
    let listed = run(Command::new("git").arg("-C").arg(root).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    // Without what is deleted but not yet committed, and what is not text.
    let read = |path: &str| Some((path.to_owned(), fs::read_to_string(root.join(path)).ok()?));
    Ok(listed.lines().filter_map(read).collect())
}

/// Counts the repository's lines of code.
pub fn count(root: &Path) -> Result<Count, LabError> {
    let mut count = Count::default();
    texts(root)?.iter().for_each(|(path, text)| count.add(path, text));
    Ok(count)
}

/// Checks every text file that git knows or would add.
pub fn check_repository(root: &Path) -> Result<Vec<Finding>, LabError> {
    let mut findings = Vec::new();
    let (mut tables, mut code) = (String::new(), String::new());
    let (mut documents, mut paths) = (Vec::new(), Vec::new());
    for (path, text) in texts(root)? {
        paths.push(path.clone());
        check(&path, &text, &mut findings);
        if path == FAILURES {
            tables.clone_from(&text);
        }
        if path.ends_with(".rs") {
            code += &text;
        } else if path.ends_with(".md") {
            documents.push((path, text));
        }
    }
    findings.extend(tests_named(&tables, &code));
    for (path, text) in &documents {
        findings.extend(tests_meant(path, text, &code));
        if path == MAP.0 {
            findings.extend(paths_named(text, &paths));
        }
    }
    Ok(findings)
}

/// Each path that the map of the code names is there. It begins with a crate, `guest/` or
/// `packaging/`.
fn paths_named(map: &str, paths: &[String]) -> Vec<Finding> {
    let is_path = |word: &&str| {
        let ends = [".rs", ".c", ".h", ".toml", "/"].iter().any(|end| word.ends_with(end));
        ends && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
    };
    let is_there = |word: &str| {
        let place = |path: &String| {
            let path = path.strip_prefix("crates/").unwrap_or(path);
            path == word || word.ends_with('/') && path.starts_with(word)
        };
        paths.iter().any(place)
    };
    let mut findings = Vec::new();
    let lines = map.lines().enumerate().skip_while(|(_, l)| !l.starts_with(MAP.1));
    for (i, line) in lines.take_while(|(_, l)| !l.starts_with("## ")) {
        for word in line.split('`').skip(1).step_by(2).filter(is_path) {
            if !is_there(word) {
                let what = format!("there is no {word}");
                findings.push(Finding { path: MAP.0.into(), line: i + 1, what });
            }
        }
    }
    findings
}

/// A document's words that can only be a test's name are one. Metrics and what is QEMU's begin
/// otherwise.
fn tests_meant(path: &str, text: &str, code: &str) -> Vec<Finding> {
    let is_name = |word: &&str| {
        word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            && word.matches('_').count() >= 6
            && !["_", "ebb_", "qemu_"].iter().any(|other| word.starts_with(other))
    };
    let mut findings = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let words = line.split('`').skip(1).step_by(2).filter(is_name);
        for name in words.filter(|name| !code.contains(&format!("fn {name}("))) {
            let what = format!("there is no test {name}");
            findings.push(Finding { path: path.into(), line: i + 1, what });
        }
    }
    findings
}

/// The tables of [`FAILURES`] name a test in the last cell of each line.
fn tests_named(tables: &str, code: &str) -> Vec<Finding> {
    let head = |l: &str| l.starts_with("|---") || l.starts_with("| what |");
    let rows = tables.lines().enumerate().filter(|(_, l)| l.starts_with('|') && !head(l));
    let mut findings = Vec::new();
    for (i, row) in rows {
        let cell = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        let mut names = cell.split(',').map(|n| n.trim().trim_matches('`'));
        if let Some(name) = names.find(|n| !code.contains(&format!("fn {n}("))) {
            let what = format!("there is no test {name}");
            findings.push(Finding { path: FAILURES.into(), line: i + 1, what });
        }
    }
    findings
}

/// Checks one file against every rule.
pub fn check(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut found = |line: usize, what: &str| {
        findings.push(Finding { path: path.into(), line, what: what.into() });
    };
    let markdown = path.ends_with(".md");
    let mut prose = markdown;
    for (i, line) in text.lines().enumerate() {
        if line.ends_with([' ', '\t']) && !markdown {
            found(i + 1, "blanks at the end of the line");
        }
        prose ^= markdown && line.starts_with("```");
        let other = line.starts_with(['|', '<']) || line.starts_with("    ");
        if prose && !other && line.chars().count() > PROSE_MAX {
            found(i + 1, "a line of prose has at most 120 characters");
        }
    }
    if path.ends_with(".rs") {
        rust(path, text, &mut found);
    }
    if path.starts_with("guest/") && path.ends_with(['c', 'h']) && path.contains('.') {
        let first = text.lines().next().unwrap_or("");
        if !first.contains("SPDX-License-Identifier: GPL-2.0") {
            found(1, "the first line of a guest file names its licence (SPDX)");
        }
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    if BUILD_FILES.contains(&name) || path.ends_with(".mk") {
        for (i, line) in text.lines().enumerate() {
            if line.contains("http://") || line.contains("https://") {
                found(i + 1, "a build file names no host");
            }
        }
    }
    let code = path.ends_with(".rs") || path.ends_with(".c") || path.ends_with(".h");
    if code && text.lines().count() > LINES_MAX {
        found(LINES_MAX + 1, "the file is longer than 600 lines: it holds more than one idea");
    }
}

fn rust(path: &str, text: &str, found: &mut impl FnMut(usize, &str)) {
    if !text.starts_with("//!") && !path.ends_with("build.rs") {
        found(1, "a .rs file starts with //! and what it is for");
    }
    let lines: Vec<&str> = text.lines().collect();
    for (i, line) in lines.iter().enumerate() {
        let code = code_of(line);
        for name in ["todo", "unimplemented", "dbg"] {
            if code.contains(&format!("{name}!(")) {
                found(i + 1, &format!("{name}! is left"));
            }
        }
        if is_unsafe(&code) {
            check_unsafe(path, &lines, i, found);
        }
    }
    let starts_vms = path.contains("/tests/vm_") || path.contains("/tests/vm/");
    if starts_vms && !path.contains("/standin") {
        vm_test_names(&lines, found);
    }
}

fn check_unsafe(path: &str, lines: &[&str], i: usize, found: &mut impl FnMut(usize, &str)) {
    if !UNSAFE_ALLOWED.iter().any(|prefix| path.starts_with(prefix)) {
        found(i + 1, "unsafe is not allowed in this file");
    }
    let near = &lines[i.saturating_sub(SAFETY_NEAR)..=i];
    if !near.iter().any(|l| l.contains("SAFETY:") || l.contains("# Safety")) {
        found(i + 1, "unsafe without a SAFETY: line just above");
    }
}

/// A line without what stands in string literals and after `//`.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut chars = line.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            '\'' if !quoted && chars.peek() == Some(&'"') => drop(chars.nth(1)),
            '"' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            c if !quoted => code.push(c),
            _ => {}
        }
    }
    code
}

/// The keyword that opens a block, fn, impl or extern; not `unsafe_code`.
fn is_unsafe(code: &str) -> bool {
    let mut words = code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '{'));
    words.any(|w| w == "unsafe" || w == "unsafe{")
}

/// Tests in `tests/vm_*.rs` and `tests/vm/`, but for those of stand-ins, start VMs, and can be left
/// out by name.
fn vm_test_names(lines: &[&str], found: &mut impl FnMut(usize, &str)) {
    let mut test = false;
    for (i, line) in lines.iter().enumerate() {
        let code = line.trim();
        if code == "#[test]" {
            test = true;
        } else if let Some(rest) = code.strip_prefix("fn ").filter(|_| test) {
            test = false;
            if !rest.starts_with("vm_") {
                found(i + 1, "a test that starts a VM carries vm_ in its name");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let mut all = Vec::new();
        check(path, text, &mut all);
        all.into_iter().map(|f| format!("{}: {}", f.line, f.what)).collect()
    }

    #[test]
    fn each_line_of_what_happens_when_something_fails_names_a_test_that_is_there() {
        let table = |cell: &str| {
            format!("# x\n\n| what | b | c |\n|---|---|---|\n| a | b | {cell} |\n## y\n")
        };
        let found = |cell: &str| tests_named(&table(cell), "fn one() {}\nfn two() {}\n").len();
        assert_eq!((found("`one`"), found("`one`, `two`")), (0, 0));
        assert_eq!((found("`three`"), found(""), found("`one`, `tw`")), (1, 1, 1));
    }

    #[test]
    fn a_test_that_a_document_names_is_there() {
        let code = "fn what_is_said_here_is_so_too() {}\n";
        let found = |text: &str| tests_meant("docs/x.md", text, code).len();
        assert_eq!(found("| x | `what_is_said_here_is_so_too`, `max_bytes` |"), 0);
        assert_eq!(
            found("`ebb_host_merged_bytes_in_all_of_it_total`, what_is_not_in_ticks_is_no_name"),
            0
        );
        assert_eq!(
            found("a\n| `what_is_said_here_is_so_now`, `what_was_said_here_was_not_so` |"),
            2
        );
    }

    #[test]
    fn a_path_that_the_map_of_the_code_names_is_there() {
        let paths = ["crates/core/src/policy/a.rs", "crates/core/src/b.rs", "guest/c.c"];
        let paths: Vec<String> = paths.map(String::from).into();
        let found = |text: &str| {
            let map = format!("`x.rs`\n### From a sample\n{text}\n## Invariants\n`x.rs`\n");
            paths_named(&map, &paths).iter().map(|f| f.what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            found("1. `core/src/policy/` (`decide`)\n   `core/src/b.rs`, `guest/c.c`"),
            [""; 0]
        );
        assert_eq!(found("`core/src/policy/b.rs`"), ["there is no core/src/policy/b.rs"]);
        assert_eq!(found("`core/src/b.rs`; `a.rs`"), ["there is no a.rs"]);
        assert_eq!(found("`core/src/pol/`"), ["there is no core/src/pol/"]);
    }

    #[test]
    fn a_clean_file_has_no_findings() {
        let text =
            "//! Good.\n#![deny(unsafe_code)]\n// unsafe in a comment\nlet s = \"unsafe {\";\n";
        assert_eq!(findings("crates/core/src/x.rs", text), [""; 0]);
        let long = "x".repeat(PROSE_MAX + 1);
        let text = format!("|{long}|\n```\n{long}\n```\n    {long}\n");
        assert_eq!(findings("docs/x.md", &text), [""; 0]);
    }

    #[test]
    fn each_rule_finds_what_breaks_it() {
        let todo = format!("//! x\nfn f() {{ {}!() }}\n", "todo");
        let long = "//! x\n".repeat(LINES_MAX + 1);
        for (path, text, want) in [
            ("crates/core/src/x.rs", "fn f() {}\n", "starts with //!"),
            ("crates/core/src/x.rs", "//! x \n", "blanks"),
            ("crates/core/src/x.rs", "//! x\n// SAFETY: y\nunsafe { z() }\n", "not allowed"),
            ("crates/vmm/src/x.rs", "//! x\nunsafe { z() }\n", "without a SAFETY"),
            ("crates/core/src/x.rs", &todo, "todo! is left"),
            ("crates/core/src/x.rs", &long, "longer than 600"),
            ("guest/tool/x.c", "int x;\n", "SPDX"),
            ("docs/x.md", &"x".repeat(PROSE_MAX + 1), "120 characters"),
            ("guest/Kbuild", "X := https://x.example\n", "names no host"),
            ("crates/lab/tests/vm_x.rs", "//! x\n#[test]\nfn boots() {}\n", "vm_ in its name"),
            ("crates/lab/tests/vm/x.rs", "//! x\n#[test]\nfn boots() {}\n", "vm_ in its name"),
        ] {
            let all = findings(path, text);
            assert!(all.len() == 1 && all[0].contains(want), "{path}: {all:?}");
        }
    }

    #[test]
    fn unsafe_where_allowed_needs_its_safety_line_only() {
        let text = "//! x\n// SAFETY: the pointer is ours\nunsafe { z() }\n";
        assert_eq!(findings("crates/vmm/src/x.rs", text), [""; 0]);
    }

    #[test]
    fn code_is_what_is_neither_quoted_nor_comment() {
        assert_eq!(code_of(r#"a("x\"y // z", b) // c"#), "a(, b) ");
        assert_eq!(code_of("c == '\"' && d"), "c ==  && d");
        assert!(is_unsafe("let x = unsafe{ y };") && !is_unsafe("unsafe_code = deny"));
    }
}
