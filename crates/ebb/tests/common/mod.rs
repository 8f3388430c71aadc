//! `ebb` and its daemon as a user meets them, in a folder of their own. They look at no VM of this
//! machine (`vms = "listed"` and none is).
#![allow(dead_code)]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Waits for what must come; a machine that is busy is slow.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A free port, below `ip_local_port_range`, so that no outgoing connection takes it;
/// another one with each call.
fn free_port() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() * 16 % 10_000) as u16;
    loop {
        let port = 20_000 + (first + TRIED.fetch_add(1, Ordering::Relaxed)) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A folder with a configuration, and a port that it may name.
pub struct Place {
    dir: tempfile::TempDir,
    pub port: u16,
}

impl Place {
    /// With more for the section `[daemon]`.
    pub fn new(more: &str) -> Place {
        let place = Place { dir: tempfile::tempdir().unwrap(), port: free_port() };
        place.configure(more);
        place
    }

    pub fn listening() -> Place {
        let place = Place::new("");
        place.configure(&format!("listen = \"127.0.0.1:{}\"\n", place.port));
        place
    }

    pub fn configure(&self, more: &str) {
        let d = self.dir.path().display();
        let text = format!(
            "[host]\nvms = \"listed\"\n[daemon]\nsocket = \"{d}/s\"\nstate_file = \"{d}/state.json\"\n{more}"
        );
        std::fs::write(self.file("ebb.toml"), text).unwrap();
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut ebb = Command::new(env!("CARGO_BIN_EXE_ebb"));
        ebb.arg("--config").arg(self.file("ebb.toml")).args(args);
        ebb
    }

    /// Exit code, and what is said on standard error.
    pub fn ebb(&self, args: &[&str]) -> (i32, String) {
        let out = self.command(args).output().unwrap();
        (out.status.code().unwrap(), String::from_utf8_lossy(&out.stderr).into_owned())
    }

    pub fn daemon(&self) -> Daemon {
        self.daemon_after("")
    }

    /// A daemon that has said it is ready, executed by a shell that has done this before.
    pub fn daemon_after(&self, first: &str) -> Daemon {
        let notify = UnixDatagram::bind(self.file("notify")).unwrap();
        notify.set_read_timeout(Some(PATIENCE)).unwrap();
        let run = format!("{first} exec \"$0\" run --config \"$1\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &run, env!("CARGO_BIN_EXE_ebb")]).arg(self.file("ebb.toml"));
        shell.env("NOTIFY_SOCKET", self.file("notify"));
        shell.stderr(File::create(self.file("log")).unwrap());
        let daemon = Daemon(shell.spawn().unwrap());
        let mut text = [0; 200];
        // The watchdog's first message comes before that of readiness.
        while !text.starts_with(b"READY=1") {
            // A machine that is stopped and goes on interrupts a read with a timeout.
            if let Err(e) = notify.recv(&mut text)
                && e.kind() != ErrorKind::Interrupted
            {
                let log = std::fs::read_to_string(self.file("log"));
                panic!("no READY=1 from the daemon: {e}; it said: {log:?}");
            }
        }
        daemon
    }

    pub fn tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(self.file("s")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn state(&self) -> Value {
        let answer = ask(self.unix(), "GET /v1/state", "ebb");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

/// It is killed when the test ends.
pub struct Daemon(pub Child);

impl Daemon {
    /// Its exit code after SIGTERM.
    pub fn end(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The answer to a request that has no body.
pub fn ask(stream: impl Read + Write, what: &str, host: &str) -> String {
    http(stream, &format!("{what} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
}

/// The answer to these bytes.
pub fn http(mut stream: impl Read + Write, request: &str) -> String {
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Whether this becomes so in good time.
pub fn comes(mut is: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + PATIENCE;
    while !is() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    true
}
