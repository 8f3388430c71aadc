//! The HTTP interface of the real daemon, met with bad manners: idle and half-open
//! connections, foreign names, floods of requests. Looks at no VM of this machine
//! (`vms = "listed"` and none is).

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use common::Notify;
use serde_json::Value;

/// Waits for what must come; a machine that is busy is slow.
const PATIENCE: Duration = Duration::from_secs(90);

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

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
}

impl Daemon {
    /// A daemon that has said it is ready; with so many descriptors at most.
    fn start(descriptors: Option<u32>) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let d = dir.path().display();
        let text = format!(
            "[host]\nvms = \"listed\"\n[daemon]\nsocket = \"{d}/s\"\nstate_file = \"{d}/state.json\"\n\
             listen = \"127.0.0.1:{port}\"\n"
        );
        std::fs::write(dir.path().join("ebb.toml"), text).unwrap();
        let notify = Notify::bind(dir.path());
        let mut command = match descriptors {
            None => Command::new(env!("CARGO_BIN_EXE_ebb")),
            Some(n) => {
                let mut limited = Command::new("prlimit");
                limited.arg(format!("--nofile={n}:{n}")).arg(env!("CARGO_BIN_EXE_ebb"));
                limited
            }
        };
        let child = command
            .args(["run", "--config"])
            .arg(dir.path().join("ebb.toml"))
            .env("NOTIFY_SOCKET", &notify.path)
            .stderr(File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let daemon = Daemon { child, dir, port };
        if let Err(e) = notify.await_ready() {
            let log = std::fs::read_to_string(daemon.dir.path().join("log"));
            panic!("no READY=1 from the daemon: {e}; it said: {log:?}");
        }
        daemon
    }

    fn tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(self.dir.path().join("s")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn state(&self) -> Value {
        let answer = ask(self.unix(), "GET /v1/state", "ebb");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// CPU seconds of all its threads.
    fn cpu(&self) -> f64 {
        let stat = ebb_host::probe::process::read_stat(&Default::default(), self.child.id());
        let stat = stat.unwrap().unwrap();
        (stat.user_ticks + stat.system_ticks) as f64 / 100.0
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(mut stream: impl Read + Write, what: &str, host: &str) -> String {
    let request = format!("{what} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Whether the other side hangs up before our patience ends.
fn is_closed(mut stream: impl Read) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn idle_connections_take_no_descriptors_from_the_daemon() {
    let daemon = Daemon::start(Some(64));
    let idle: Vec<TcpStream> = (0..80).map(|_| daemon.tcp()).collect();
    let (begun, cpu) = (daemon.state()["tick"].as_u64().unwrap(), daemon.cpu());
    let metrics = ask(daemon.tcp(), "GET /metrics", "localhost");
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    let mut state = daemon.state();
    let until = Instant::now() + PATIENCE;
    while state["tick"].as_u64().unwrap() < begun + 3 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
        state = daemon.state();
    }
    assert!(state["tick"].as_u64().unwrap() >= begun + 3, "the loop goes on: {state}");
    assert_eq!(state["problems"].as_array().map(Vec::len), Some(0), "{state}");
    assert!(state["host"]["total"].is_u64(), "{state}");
    // Three ticks take a few milliseconds; a loop that turns on EMFILE takes all there is.
    assert!(daemon.cpu() - cpu < 1.0, "{} s of CPU", daemon.cpu() - cpu);
    drop(idle);
}

#[test]
fn a_client_that_says_nothing_or_half_is_hung_up_on() {
    let daemon = Daemon::start(None);
    let (silent, mut half, mut kept) = (daemon.tcp(), daemon.unix(), daemon.unix());
    half.write_all(b"GET /v1/state HTTP/1.1\r\nHo").unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\nHost: ebb\r\n\r\n").unwrap();
    let mut first = [0; 15];
    kept.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    assert!(is_closed(silent) && is_closed(half) && is_closed(kept));
}

#[test]
fn tcp_answers_to_its_own_names_and_with_metrics_only() {
    let daemon = Daemon::start(None);
    let port = daemon.port;
    for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""] {
        let said = ask(daemon.tcp(), "GET /metrics", host);
        assert!(said.starts_with("HTTP/1.1 421"), "{host}: {said}");
    }
    let said = ask(daemon.tcp(), "GET http://evil.example/metrics", "localhost");
    assert!(said.starts_with("HTTP/1.1 421"), "{said}");
    let own = [format!("127.0.0.1:{port}"), "LOCALHOST".into(), "[::1]:9".into(), "::1".into()];
    for host in own {
        let said = ask(daemon.tcp(), "GET /metrics", &host);
        assert!(said.starts_with("HTTP/1.1 200") && said.contains("ebb_host_vms 0"), "{host}");
    }
    for path in ["state", "plan", "decisions", "record"] {
        let said = ask(daemon.tcp(), &format!("GET /v1/{path}"), "localhost");
        assert!(said.starts_with("HTTP/1.1 404") && said.contains("Unix socket"), "{said}");
    }
    assert!(ask(daemon.tcp(), "POST /v1/look", "localhost").starts_with("HTTP/1.1 404"));
    // On the Unix socket a name means nothing: the file's mode says who may.
    assert!(ask(daemon.unix(), "GET /v1/plan", "any").starts_with("HTTP/1.1 200"));
}

#[test]
fn looks_that_are_asked_for_do_not_drive_the_loop_faster_than_it_goes() {
    let daemon = Daemon::start(None);
    let first = daemon.state()["tick"].as_u64().unwrap();
    let until = Instant::now() + PATIENCE;
    while daemon.state()["tick"].as_u64().unwrap() < first + 8 {
        assert!(Instant::now() < until, "no ticks");
        for _ in 0..20 {
            assert!(ask(daemon.unix(), "POST /v1/look", "ebb").starts_with("HTTP/1.1 202"));
        }
    }
    let record = ask(daemon.unix(), "GET /v1/record", "ebb");
    let ticks =
        record.split_once("\r\n\r\n").unwrap().1.lines().filter_map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["sample"]["at"].as_u64()
        });
    let at: Vec<u64> = ticks.collect();
    assert!(at.len() >= 8, "{at:?}");
    assert!(at.windows(2).all(|w| w[1] - w[0] >= 150), "{at:?}");
}
