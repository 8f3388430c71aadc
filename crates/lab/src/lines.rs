//! How long product, developers' tools and tests are, for `cargo lab tidy --lines`.

use std::fmt;
use std::ops::AddAssign;

/// Lines of some files.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Lines {
    /// Every line.
    pub all: usize,
    /// Neither blank nor only comment.
    pub code: usize,
}

/// What a file is part of; tests inside a file of another part count as tests.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Count {
    /// What is shipped: core, host, vmm, ebb and the module.
    pub product: Lines,
    /// The product's share that is Rust.
    pub product_rust: Lines,
    /// Lab, simulator and the guest tool.
    pub tools: Lines,
    /// Tests, benchmarks and fuzz targets.
    pub tests: Lines,
}

impl Count {
    /// Counts a file in if it is Rust or C.
    pub fn add(&mut self, path: &str, text: &str) {
        let rust = path.ends_with(".rs");
        if !rust && !path.ends_with(".c") && !path.ends_with(".h") {
            return;
        }
        let (own, tests) = counted(text);
        let tool = ["crates/lab/", "crates/sim/", "guest/tool/"];
        self.tests += tests;
        let test_files =
            ["/tests/", "/tests.rs", "/testing.rs", "/test/", "/benches/", "/golden.rs"];
        let test_file = test_files.iter().any(|part| path.contains(part));
        if test_file || path.starts_with("fuzz/") {
            self.tests += own;
        } else if tool.iter().any(|prefix| path.starts_with(prefix)) {
            self.tools += own;
        } else {
            self.product += own;
            self.product_rust += if rust { own } else { Lines::default() };
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:14} {:>7} {:>7}", "lines", "all", "code")?;
        for (name, lines) in [
            ("product", self.product),
            ("- of it Rust", self.product_rust),
            ("tools", self.tools),
            ("tests", self.tests),
        ] {
            writeln!(f, "{name:14} {:>7} {:>7}", lines.all, lines.code)?;
        }
        Ok(())
    }
}

impl AddAssign for Lines {
    fn add_assign(&mut self, other: Lines) {
        self.all += other.all;
        self.code += other.code;
    }
}

/// A text's lines outside and inside of `#[cfg(test)]`. Relies on the format of rustfmt: an item
/// ends at the brace below its beginning, or with its first line.
fn counted(text: &str) -> (Lines, Lines) {
    let (mut own, mut tests) = (Lines::default(), Lines::default());
    let (mut ends, mut begun, mut comment) = (None, false, false);
    for line in text.lines() {
        let code = line.trim();
        let indent = line.len() - line.trim_start().len();
        if code == "#[cfg(test)]" && ends.is_none() {
            (ends, begun) = (Some(indent), false);
        }
        comment |= code.starts_with("/*");
        let counts = !(code.is_empty() || code.starts_with("//") || comment);
        comment &= !code.contains("*/");
        let lines = if ends.is_some() { &mut tests } else { &mut own };
        *lines += Lines { all: 1, code: usize::from(counts) };
        if let Some(at) = ends.filter(|_| counts && !code.starts_with("#[")) {
            let last = indent == at && (code.starts_with('}') || code.ends_with(';') && !begun);
            (ends, begun) = (ends.filter(|_| !last), true);
        }
    }
    (own, tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_comments_and_blanks_are_counted_apart() {
        let text = "//! x\n\nuse a;\n#[cfg(test)]\nmod golden;\n/* b\n * c */\nfn f() {}\n\
            #[cfg(test)]\nmod tests {\n    // d\n    fn g() {\n    }\n}\nfn h() {}\n";
        let (own, tests) = counted(text);
        assert_eq!((own.all, own.code), (7, 3));
        assert_eq!((tests.all, tests.code), (8, 7));
    }

    #[test]
    fn each_file_belongs_to_one_part() {
        let of = |path: &str| {
            let mut count = Count::default();
            count.add(path, "x\n");
            [count.product, count.product_rust, count.tools, count.tests].map(|l| l.all)
        };
        assert_eq!(of("crates/ebb/src/main.rs"), [1, 1, 0, 0]);
        assert_eq!(of("guest/map.c"), [1, 0, 0, 0]);
        assert_eq!(of("guest/tool/page.c"), [0, 0, 1, 0]);
        assert_eq!(of("crates/sim/src/law.rs"), [0, 0, 1, 0]);
        for path in ["crates/lab/tests/x.rs", "crates/host/src/vm/tests.rs", "fuzz/x.rs"] {
            assert_eq!(of(path), [0, 0, 0, 1], "{path}");
        }
        assert_eq!(of("README.md"), [0; 4]);
    }
}
