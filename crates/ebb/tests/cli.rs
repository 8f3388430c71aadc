//! The binary as a user meets it, without VMs: errors in words, exit codes, the
//! interface, systemd's readiness. Looks at no VM of this machine
//! (`vms = "listed"` and none is).

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::Notify;

fn ebb(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb")).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn config(dir: &Path, more: &str) -> String {
    let file = dir.join("ebb.toml");
    let d = dir.display();
    let text = format!(
        "[host]\nvms = \"listed\"\n[daemon]\nsocket = \"{d}/s\"\nstate_file = \"{d}/state.json\"\n{more}"
    );
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_string()
}

/// A daemon that is killed when the test ends, and that has said it is ready.
struct Daemon(Child);

impl Daemon {
    fn start(dir: &Path, config: &str) -> Daemon {
        Daemon::start_as(Command::new(env!("CARGO_BIN_EXE_ebb")), dir, config)
    }

    fn start_as(mut ebb: Command, dir: &Path, config: &str) -> Daemon {
        let notify = Notify::bind(dir);
        let child = ebb
            .args(["run", "--config", config])
            .env("NOTIFY_SOCKET", &notify.path)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let daemon = Daemon(child);
        notify.await_ready().expect("READY=1 from the daemon");
        daemon
    }

    fn end(mut self) -> i32 {
        let pid = rustix::process::Pid::from_raw(self.0.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.0.wait().unwrap().code().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn http(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_bad_configuration_names_file_line_field_and_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "tick = \"soon\"\n");
    let out = ebb(&["status", "--config", &file]);
    assert_eq!(out.status.code(), Some(2));
    let text = said(&out);
    assert!(text.contains("ebb.toml:6: daemon.tick: “soon” is not allowed"), "{text}");
}

#[test]
fn without_a_daemon_reading_commands_say_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    for args in [&["status"][..], &["explain", "x"], &["record", "-"]] {
        let out = ebb(&[args, &["--config", &file]].concat());
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(said(&out).contains("systemctl start ebb"), "{}", said(&out));
    }
}

#[test]
fn with_json_an_error_is_json_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    for args in [&["status", "--json"][..], &["explain", "x", "--json"], &["plan", "--json"]] {
        let out = ebb(&[args, &["--config", &file]].concat());
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        let told: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(told["error"].as_str().unwrap().contains("systemctl start ebb"), "{told}");
        assert_eq!(said(&out), "");
    }
}

#[test]
fn the_daemon_serves_both_sockets_and_ends_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let file = config(dir.path(), &format!("listen = \"127.0.0.1:{port}\"\n"));
    let daemon = Daemon::start(dir.path(), &file);

    let get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let metrics = http(TcpStream::connect(("127.0.0.1", port)).unwrap(), get);
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    let socket = || UnixStream::connect(dir.path().join("s")).unwrap();
    let state = http(socket(), &get.replace("/metrics", "/v1/state"));
    assert!(state.contains("\"version\""), "{state}");
    assert!(http(socket(), &get.replace("/metrics", "/nothing")).starts_with("HTTP/1.1 404"));
    assert!(http(socket(), &get.replace("GET", "POST")).starts_with("HTTP/1.1 405"));
    // A key that is not known may be meant for one VM: no such request is for all.
    let body = r#"{"name": "web", "on": false}"#;
    for path in ["reclaim", "merge", "hands-off"] {
        let head = format!("POST /v1/{path} HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n");
        let post = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let said = http(socket(), &post);
        assert!(said.starts_with("HTTP/1.1 400") && said.contains("unknown field"), "{said}");
    }
    assert!(http(socket(), "\u{1}\u{2}nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));

    let out = ebb(&["status", "--config", &file]);
    assert_eq!(out.status.code(), Some(1), "there is no VM to show: {}", said(&out));
    let out = ebb(&["explain", "web", "--config", &file]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("no VM is called “web”"), "{}", said(&out));

    let record = dir.path().join("r.jsonl");
    let out = ebb(&["record", record.to_str().unwrap(), "--config", &file]);
    assert!(out.status.success(), "{}", said(&out));
    let out = ebb(&["replay", record.to_str().unwrap()]);
    assert!(out.status.success(), "{}", said(&out));

    assert_eq!(daemon.end(), 0);
    assert!(!dir.path().join("s").exists(), "the socket is gone");
}

#[test]
fn a_port_that_is_taken_does_not_keep_the_daemon_from_its_vms() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let file = config(dir.path(), &format!("listen = \"127.0.0.1:{port}\"\n"));
    let daemon = Daemon::start(dir.path(), &file);
    let get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let metrics = http(UnixStream::connect(dir.path().join("s")).unwrap(), get);
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    assert_eq!(daemon.end(), 0);
}

#[test]
fn a_record_of_before_is_kept_when_a_daemon_starts_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let record = dir.path().join("record");
    std::fs::write(&record, "of a daemon that has crashed").unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_ebb"))
        .args(["run", "--config", &file, "--record"])
        .arg(&record)
        .spawn()
        .unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let kept = dir.path().join("record.old");
    while !(kept.exists() && record.exists()) && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "of a daemon that has crashed");
    assert!(record.exists(), "the new one");
}

#[test]
fn two_daemons_do_not_share_vms() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let _daemon = Daemon::start(dir.path(), &file);
    let out = ebb(&["run", "--config", &file]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("another ebb"), "{}", said(&out));
    let out = ebb(&["release", "--config", &file]);
    assert_eq!(out.status.code(), Some(2), "a daemon owns the state: {}", said(&out));
}

#[test]
fn a_damaged_state_file_is_not_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    std::fs::write(dir.path().join("state.json"), "not json").unwrap();
    let out = ebb(&["run", "--config", &file]);
    assert_eq!(out.status.code(), Some(2));
    assert!(said(&out).contains("is damaged"), "{}", said(&out));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = Command::new(env!("CARGO_BIN_EXE_ebb"))
        .args(["check", "--config", &file])
        .stdout(writer)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", said(&out));
}

/// A process that is nobody's VM, written down as one that is owed memory.
fn owed(dir: &Path, pid: u32, start: u64) -> std::path::PathBuf {
    let file = dir.join("state.json");
    let vm = format!(
        "{{\"id\": {{\"pid\": {pid}, \"start\": {start}}}, \"name\": \"web\", \"baseline\": 1073741824}}"
    );
    std::fs::write(&file, format!("{{\"vms\": [{vm}]}}")).unwrap();
    file
}

#[test]
fn release_tells_no_state_file_from_nothing_owed_and_goes_by_the_processes_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let release = || ebb(&["release", "--config", &file]);
    let out = release();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(said(&out).contains("no state file"), "{}", said(&out));
    let state = owed(dir.path(), u32::MAX >> 1, 9);
    let out = release();
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    assert!(said(&out).contains("web: its process has ended"), "{}", said(&out));
    assert!(!std::fs::read_to_string(&state).unwrap().contains("web"));
    let out = release();
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    assert!(said(&out).contains("nothing is owed"), "{}", said(&out));
}

#[test]
fn release_goes_on_where_the_configuration_is_bad_and_every_other_command_refuses_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "tikc = \"1s\"\n");
    let state = owed(dir.path(), u32::MAX >> 1, 9);
    let out = ebb(&["release", "--config", &file, "--state", state.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    assert!(said(&out).contains("tikc") && said(&out).contains("defaults"), "{}", said(&out));
    let commands: [&[&str]; 11] = [
        &["run"],
        &["status"],
        &["doctor"],
        &["check"],
        &["plan"],
        &["explain", "web"],
        &["reclaim", "web"],
        &["hands-off", "web"],
        &["hands-on", "web"],
        &["record", "/dev/null"],
        &["merge", "report"],
    ];
    for command in commands {
        let out = ebb(&[command, &["--config", &file]].concat());
        assert_eq!(out.status.code(), Some(2), "{command:?}: {}", said(&out));
        assert!(
            said(&out).contains("ebb.toml:6: ") && said(&out).contains("tikc"),
            "{}",
            said(&out)
        );
    }
    let file = config(dir.path(), "tick = \"1s\"\n");
    assert_eq!(ebb(&["check", "--config", &file]).status.code(), Some(0));
}

#[test]
fn the_daemon_may_open_as_many_files_as_it_is_ever_allowed_to() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_ebb")]);
    let daemon = Daemon::start_as(limited, dir.path(), &file);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.0.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "soft and hard: {line}");
}

#[test]
fn a_damaged_state_file_is_refused_by_name_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = config(dir.path(), "");
    let state = dir.path().join("state.json");
    for text in ["", "{\"vms\": 3", "nonsense"] {
        std::fs::write(&state, text).unwrap();
        for command in ["run", "release"] {
            let out = ebb(&[command, "--config", &file]);
            assert_eq!(out.status.code(), Some(2), "{command}: {}", said(&out));
            let words = ["state.json is damaged", "virsh setmem", "QMP", "remove the file"];
            assert!(words.iter().all(|w| said(&out).contains(w)), "{command}: {}", said(&out));
        }
        assert_eq!(std::fs::read_to_string(&state).unwrap(), text);
    }
}
