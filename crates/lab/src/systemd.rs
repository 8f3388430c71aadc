//! A systemd for the units as they ship: pid 1 of namespaces of its own, on the machine's
//! files with what `make install` installs laid over them.
//!
//! Everything it writes is in memory and gone with it; `/run` is a tmpfs, as on a real host
//! (systemd does not remove runtime directories from a disk). It knows the units that ship and
//! the few targets that they need, none of the machine's. What services say comes to
//! [`Systemd::log`]: the lab listens where journald would. VMs join its process namespace
//! ([`Systemd::within`]), so that an `ebb` in it sees them and no others. Nothing of the
//! machine changes: its cgroup is the arena's, and `/proc/sys`, which systemd sets, is
//! read-only to it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::arena::Arena;
use crate::vm::on_lasting_thread;
use crate::{LabError, ebb, lock, output, run};

/// Mounts, then becomes systemd. Arguments: an empty directory, the installed tree, its cgroup.
const BOOT: &str = r#"
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
cp -a "$2/." .
mount --rbind /dev dev
mount --rbind /sys sys
umount -R sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t tmpfs tmpfs run
mkdir -p run/units run/systemd/journal
for target in sysinit basic shutdown; do cp "lib/systemd/system/$target.target" run/units; done
cp "$2"/usr/lib/systemd/system/* run/units
pivot_root . .
umount -l .
exec env -i PATH=/usr/sbin:/usr/bin container=ebb-lab SYSTEMD_UNIT_PATH=/run/units \
  SYSTEMD_GENERATOR_PATH=/run/none /lib/systemd/systemd --system --unit=basic.target --show-status=no
"#;
/// Joins the cgroup before it becomes the root of the cgroup namespace.
const JOIN: &str = r#"echo 0 > "$2/cgroup.procs"; exec unshare --cgroup sh -c "$0" boot "$1" "$3""#;
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// A running systemd. Dropping it ends it and all that it runs.
#[derive(Debug)]
pub struct Systemd {
    child: Mutex<Child>,
    /// Pid 1, as the machine counts.
    pid: u32,
    cgroup: PathBuf,
    log: Arc<Mutex<Vec<String>>>,
    _dir: tempfile::TempDir,
}

impl Systemd {
    /// Starts one in which Ebb is installed, with this `/etc/ebb/ebb.toml`, and nothing is
    /// started yet.
    pub fn start(arena: &Arena, config: &str) -> Result<Systemd, LabError> {
        let dir = tempfile::Builder::new().prefix("ebb-lab-").tempdir();
        let dir = dir.map_err(LabError::file(std::env::temp_dir()))?;
        let (empty, installed) = (dir.path().join("empty"), dir.path().join("installed"));
        let etc = installed.join("etc/ebb");
        for made in [&empty, &etc] {
            fs::create_dir_all(made).map_err(LabError::file(made))?;
        }
        install(&installed)?;
        let file = etc.join("ebb.toml");
        fs::write(&file, config).map_err(LabError::file(&file))?;
        let cgroup = arena.cgroup_tree()?;
        let log = fs::File::create(dir.path().join("log")).map_err(LabError::file(dir.path()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--pid"]);
        command.args(["--mount", "--net", "--uts", "--ipc", "sh", "-c", JOIN, BOOT]);
        command.args([&empty, &cgroup, &installed]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = on_lasting_thread(command, false).map_err(LabError::file("unshare"))?;
        let mut systemd =
            Systemd { child: Mutex::new(child), pid: 0, cgroup, log: Arc::default(), _dir: dir };
        systemd.wait("systemd to be pid 1", |s| s.find_pid().is_some())?;
        systemd.pid = systemd.find_pid().unwrap_or_default();
        systemd.wait("systemd to be up", |s| {
            s.systemctl(&["is-system-running"]).1.trim() == "running"
        })?;
        systemd.listen()?;
        Ok(systemd)
    }

    /// systemd moves into a cgroup of its own when it begins.
    fn find_pid(&self) -> Option<u32> {
        let text = fs::read_to_string(self.cgroup.join("init.scope/cgroup.procs")).ok()?;
        text.lines().next()?.parse().ok()
    }

    /// Stands in for journald, of whose protocol this is all: seven lines of header, of which
    /// the second is the unit, then what is said.
    fn listen(&self) -> Result<(), LabError> {
        let path = self.path("/run/systemd/journal/stdout");
        let listener = UnixListener::bind(&path).map_err(LabError::file(&path))?;
        let log = Arc::clone(&self.log);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let log = Arc::clone(&log);
                thread::spawn(move || follow(stream, &log));
            }
        });
        Ok(())
    }

    /// A path of its own, as the machine sees it.
    pub fn path(&self, path: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.pid)).join(path.trim_start_matches('/'))
    }

    /// What its services said so far, each line with the unit before it.
    pub fn log(&self) -> String {
        lock(&self.log).join("\n")
    }

    /// For [`crate::vm::VmConfig::within`]: processes that it sees, on the machine's files.
    pub fn within(&self) -> Vec<String> {
        ["nsenter", "--target", &self.pid.to_string(), "--pid"].map(String::from).to_vec()
    }

    /// The cgroup that is the root to it.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// For [`crate::vm::VmConfig::cgroup`]: where VMs are on a host of systemd.
    pub fn machine_slice(&self) -> Result<PathBuf, LabError> {
        let dir = self.cgroup.join("machine.slice");
        fs::create_dir_all(&dir).map_err(LabError::file(&dir))?;
        Ok(dir)
    }

    /// Runs a program in it: exit code, standard output, standard error.
    pub fn run(&self, program: &[&str]) -> (i32, String, String) {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.pid.to_string());
        command.args(["--pid", "--mount", "--cgroup", "--net", "--uts", "--ipc", "--"]);
        output(command.args(program)).unwrap_or_else(|e| (-1, String::new(), e.to_string()))
    }

    /// Runs `systemctl`.
    pub fn systemctl(&self, args: &[&str]) -> (i32, String, String) {
        self.run(&[&["systemctl"], args].concat())
    }

    /// A property of a unit, as `systemctl show` has it.
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.systemctl(&["show", "--value", "--property", name, unit]).1.trim().into()
    }

    pub fn wait(
        &self,
        what: &str,
        mut state: impl FnMut(&Systemd) -> bool,
    ) -> Result<(), LabError> {
        let until = Instant::now() + PATIENCE;
        while !state(self) {
            let ended = lock(&self.child).try_wait().is_ok_and(|status| status.is_some());
            if ended || Instant::now() > until {
                let own = fs::read_to_string(self._dir.path().join("log")).unwrap_or_default();
                let text = format!("{what}: not within {PATIENCE:?}\n{own}\n{}", self.log());
                return Err(LabError::Missing(text));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let init = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let mut child = lock(&self.child);
        // The end of its pid 1 ends a pid namespace; `unshare` then reaps it.
        if init.is_none_or(|pid| kill_process(pid, Signal::KILL).is_err()) {
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}

/// What `make install` installs, of the built binary.
fn install(into: &Path) -> Result<(), LabError> {
    let binary = ebb::binary()?;
    let built = binary.parent().unwrap_or(Path::new("/"));
    let mut make = Command::new("make");
    make.arg("-C").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    make.args(["--no-print-directory", "install", "CARGO=true"]);
    make.arg(format!("BUILT={}", built.display())).arg(format!("DESTDIR={}", into.display()));
    run(&mut make).map(drop)
}

fn follow(stream: UnixStream, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(unit) = lines.by_ref().take(7).nth(1) else { return };
    for line in lines.skip(5) {
        lock(log).push(format!("{unit}: {line}"));
    }
}
