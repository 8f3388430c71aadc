//! Stand-ins for QEMU under QEMU's name, and the built `ebb` with its own state beside them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Child;

use ebb_core::config::Config;
use ebb_core::state::{Owned, OwnedVm};
use ebb_lab::Sought;
use serde::Deserialize;

use super::*;

pub const MIB: u64 = 1 << 20;
/// What each stand-in has.
pub const RAM: u64 = 512 * MIB;
/// For anything to happen, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How often the daemon looks: as it does by default, or as often as it can be set to.
pub const USUAL: &str = "tick = \"1s\"\nfast_tick = \"500ms\"\n";
pub const OFTEN: &str = "tick = \"200ms\"\nfast_tick = \"100ms\"\n";

/// What a stand-in tells of itself; sizes in bytes.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Truth {
    pub ram: u64,
    /// What the guest has, what QEMU believes that it has, and what it was told to have.
    pub size: u64,
    pub told: u64,
    pub target: u64,
    /// Orders that it has read and not carried out yet.
    pub waiting: Vec<u64>,
    pub orders: Vec<Order>,
    /// Commands that it has read.
    pub commands: u64,
    /// How often QEMU asks the guest for statistics, seconds.
    pub interval_s: u64,
}

/// An order of Ebb's, with the size that QEMU told and what the state file said of this VM
/// when it came.
#[derive(Clone, Debug, Deserialize)]
pub struct Order {
    pub to: u64,
    pub told: u64,
    pub owned: Option<OwnedVm>,
}

/// Where a stand-in is spoken to.
#[derive(Clone, Debug)]
pub struct Peer {
    pub name: String,
    pub pid: u32,
    /// What is left to it that needs little: the default floor, or need and buffer.
    pub least: u64,
    socket: PathBuf,
}

impl Peer {
    /// Tells it what shall be wrong with it; how it stands then.
    pub fn tell(&self, wishes: &Value) -> Truth {
        self.try_tell(wishes).unwrap_or_else(|e| panic!("stand-in {}: {e}", self.name))
    }

    pub fn truth(&self) -> Truth {
        self.tell(&json!({}))
    }

    fn try_tell(&self, wishes: &Value) -> std::io::Result<Truth> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{wishes}\n").as_bytes())?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        serde_json::from_str(&said).map_err(|e| std::io::Error::other(format!("{e}: {said}")))
    }

    /// Waits until it stands so.
    pub fn wait_for<S: Sought>(&self, what: &str, mut look: impl FnMut(&Truth) -> S) -> S::Found {
        let found = poll(PATIENCE, || look(&self.truth()));
        found.unwrap_or_else(|| panic!("{}: no {what}: {:?}", self.name, self.truth()))
    }

    pub fn wait_size(&self, size: u64) {
        self.wait_for(&format!("size of {} MiB", size / MIB), |t| t.size == size && t.told == size);
    }
}

/// A process that says it is a VM. It ends with this.
pub struct Standin {
    peer: Peer,
    child: Child,
}

impl std::ops::Deref for Standin {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory with a program called QEMU, sockets, and the daemon's files.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// `None` where the tests do not run as root: only programs of root's are taken for QEMU.
    pub fn new() -> Option<Place> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let place = Place { dir: tempfile::tempdir().unwrap() };
        // By a child: a file that any process has open for writing cannot be executed.
        let source = env!("CARGO_BIN_EXE_ebb-standin");
        let mut copy = Command::new("install");
        let copied = copy.args(["-m", "755", source]).arg(place.program()).status().unwrap();
        assert!(copied.success());
        Some(place)
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join("qemu-system-x86_64")
    }

    /// A file beside the daemon's.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn state_file(&self) -> PathBuf {
        self.dir.path().join("state.json")
    }

    /// Starts a stand-in, and does not wait for it. Its name is no other's on this machine:
    /// a daemon goes by names.
    pub fn start(&self, name: &str, deflates: bool) -> Standin {
        let name = &format!("{name}-{}", std::process::id());
        // One that is called so has a socket that is not Ebb's by its name.
        let ours = if name.starts_with("plain") { "" } else { "-ebb" };
        let socket = self.dir.path().join(format!("{name}{ours}.sock"));
        let (deflates, least) = if deflates { ("on", 128 * MIB) } else { ("off", 192 * MIB) };
        let child = Command::new(self.program())
            .args(["-name", name, "-m", &(RAM / MIB).to_string(), "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(["-device", &format!("virtio-balloon-pci,deflate-on-oom={deflates}")])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let socket = socket.with_extension("sock.test");
        Standin { child, peer: Peer { name: name.into(), pid, least, socket } }
    }

    /// The same, and waits until it answers; from then on it notes what the state file says.
    pub fn standin(&self, name: &str, deflates: bool) -> Standin {
        let standin = self.start(name, deflates);
        self.wait_ready(&standin);
        standin
    }

    /// So many at once.
    pub fn standins(&self, count: usize) -> Vec<Standin> {
        let all: Vec<Standin> = (0..count).map(|i| self.start(&format!("v{i}"), true)).collect();
        all.iter().for_each(|vm| self.wait_ready(vm));
        all
    }

    fn wait_ready(&self, standin: &Standin) {
        let told = || standin.try_tell(&json!({ "watch": self.state_file() })).is_ok();
        wait_until(told, || format!("{} does not answer", standin.name));
    }

    /// Writes a configuration for these VMs and no others; `ticks`: [`USUAL`] or [`OFTEN`].
    pub fn configure<'a>(&self, ticks: &str, vms: impl IntoIterator<Item = &'a Standin>) -> Config {
        let d = self.dir.path().display();
        let vms = vms.into_iter().map(|vm| format!("[vm.\"{}\"]\n", vm.name));
        let vms: String = vms.collect();
        let text = format!(
            "[daemon]\nsocket = \"{d}/ebb.sock\"\nstate_file = \"{d}/state.json\"\n{ticks}\
             [host]\nvms = \"listed\"\nprograms = [\"{}\"]\n{vms}",
            self.program().display()
        );
        std::fs::write(self.dir.path().join("ebb.toml"), &text).unwrap();
        Config::parse("ebb.toml", &text).unwrap()
    }

    /// Starts a daemon with that.
    pub fn daemon<'a>(&self, ticks: &str, vms: impl IntoIterator<Item = &'a Standin>) -> Daemon {
        self.configure(ticks, vms);
        self.daemon_again()
    }

    /// The same with the configuration of before.
    pub fn daemon_again(&self) -> Daemon {
        Daemon::start_again(self.dir.path(), &[]).unwrap()
    }

    /// The same by a program that lies here.
    pub fn daemon_of(&self, program: &str) -> Daemon {
        Daemon::start_program(&self.file(program), self.dir.path(), &[]).unwrap()
    }

    /// Has `ebb release` give everything back.
    pub fn release(&self) {
        let (code, said) = self.ebb("release");
        assert_eq!(code, 0, "{said}");
    }

    /// Runs `ebb COMMAND` with the daemon's configuration: exit code and what it said.
    pub fn ebb(&self, command: &str) -> (i32, String) {
        let (code, out, err) = ebb_lab::ebb::run_in(self.dir.path(), &[command]).unwrap();
        (code, out + &err)
    }

    /// Changes the configuration.
    pub fn reconfigure(&self, from: &str, to: &str) {
        let file = self.dir.path().join("ebb.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(file, text.replace(from, to)).unwrap();
    }

    /// What the state file says, as it is on disk.
    pub fn owned(&self) -> Owned {
        parse_owned(&std::fs::read(self.state_file()).unwrap_or_default()).unwrap()
    }
}

/// Where there is no state file yet, nothing is owed.
pub fn parse_owned(text: &[u8]) -> Result<Owned, String> {
    if text.is_empty() {
        return Ok(Owned::default());
    }
    serde_json::from_slice(text).map_err(|e| format!("the state file is damaged: {e}"))
}

/// Waits until the daemon shows a VM so.
pub fn wait_shown(daemon: &Daemon, vm: &Peer, what: &str, is: impl Fn(&Value) -> bool) {
    let state = || of(&daemon.state().unwrap(), &vm.name).clone();
    let said =
        || format!("{}: no {what}: {}\n{:?}\n{}", vm.name, state(), vm.truth(), daemon.log());
    wait_until(|| is(&state()), said);
}

/// Waits until QEMU answers the daemon.
pub fn wait_link(daemon: &Daemon, vm: &Peer) {
    wait_shown(daemon, vm, "link", |v| v["link"]["state"] == "up");
}

/// Waits for so many ticks.
pub fn wait_ticks(daemon: &Daemon, count: u64) {
    let tick = |s: &Value| s["tick"].as_u64();
    let now = daemon.wait_for("tick", PATIENCE, tick).unwrap();
    let later = |s: &Value| tick(s).filter(|t| *t >= now + count);
    daemon.wait_for("later tick", PATIENCE, later).unwrap();
}

/// Has the daemon take what this VM does not need. A wish is for one tick, and the VM may not
/// be known then: said again and again.
pub fn squeeze(daemon: &Daemon, vm: &Peer) {
    let mut looks = 0;
    vm.wait_for("size when squeezed", |t| {
        if looks % 10 == 0 {
            daemon.reclaim_vm(&vm.name).unwrap();
        }
        looks += 1;
        t.size == vm.least && t.told == vm.least
    });
}
