//! The stand-in for QEMU's loader (`standin.c`): compiled here, given what it
//! needs in a directory that every user may read, and run.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A directory with the library and stand-ins; goes when dropped.
pub struct Place {
    dir: PathBuf,
}

impl Place {
    pub fn new(name: &str) -> Place {
        let dir = std::env::temp_dir().join(format!("ebb-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o777)).unwrap();
        // Cargo puts it beside the tests.
        let built = std::env::current_exe().unwrap().with_file_name("libebb_vmm.so");
        let place = Place { dir };
        std::fs::copy(&built, place.path("libebb_vmm.so")).unwrap();
        std::fs::set_permissions(place.path("libebb_vmm.so"), PermissionsExt::from_mode(0o755))
            .unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Compiles a stand-in with these exports (see `standin.c`).
    pub fn compile(&self, exports: &[&str]) -> PathBuf {
        let out = self.path(&format!("standin{}", exports.concat()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin.c");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Werror", "-rdynamic", "-o"]).arg(&out).args(exports).arg(source);
        let made = cc.arg("-ldl").output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        out
    }

    /// Where the agent of a stand-in is asked.
    pub fn socket(&self) -> PathBuf {
        self.path("agent")
    }

    /// `standin LIBRARY SOCKET MIN CURRENT`, to which arguments can be added. The socket of the one
    /// before goes.
    pub fn command(&self, program: &Path, min: i32, current: i32) -> Command {
        let _ = std::fs::remove_file(self.socket());
        let mut command = Command::new(program);
        command.arg(self.path("libebb_vmm.so")).arg(self.socket());
        command.args([min.to_string(), current.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A running one; ends when dropped.
pub struct Standin {
    pub child: Child,
    said: BufReader<ChildStdout>,
}

impl Standin {
    pub fn start(mut command: Command) -> Standin {
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Standin { child, said }
    }

    /// The next line that it says, as a word and a number.
    pub fn says(&mut self) -> (String, u64) {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        let (word, number) = line.trim().split_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        (word.to_string(), number.parse().unwrap())
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
