//! The binary as a user meets it, without VMs: errors in words, exit codes, the
//! interface, systemd's readiness.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use common::*;

#[test]
fn a_bad_configuration_names_file_line_field_and_what_is_allowed() {
    let place = Place::new("tick = \"soon\"\n");
    let (code, said) = place.ebb(&["status"]);
    let words = "ebb.toml:6: daemon.tick: “soon” is not allowed";
    assert!(code == 2 && said.contains(words), "{code} {said}");
}

#[test]
fn a_size_that_lacks_its_unit_is_refused_before_anything_is_asked() {
    let place = Place::new("");
    for args in [&["plan", "--memory"][..], &["reclaim", "x", "--bytes"]] {
        for (size, words) in [
            ("4096", "4 KiB is below 1 MiB: write the unit"),
            ("0", "0 B is below"),
            ("-4GiB", "is not a size"),
        ] {
            let (code, said) = place.ebb(&[args, &[size]].concat());
            assert!(code == 2 && said.contains(words), "{args:?} {size}: {code} {said}");
        }
    }
}

#[test]
fn without_a_daemon_reading_commands_say_how_to_start_one() {
    let place = Place::new("");
    for args in [&["status"][..], &["explain", "x"], &["record", "-"]] {
        let (code, said) = place.ebb(args);
        assert!(code == 2 && said.contains("systemctl start ebb"), "{args:?}: {code} {said}");
    }
}

#[test]
fn with_json_an_error_is_json_too() {
    let place = Place::new("");
    for args in [&["status", "--json"][..], &["explain", "x", "--json"], &["plan", "--json"]] {
        let out = place.command(args).output().unwrap();
        assert_eq!((out.status.code(), &out.stderr[..]), (Some(2), &b""[..]), "{args:?}");
        let told: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(told["error"].as_str().unwrap().contains("systemctl start ebb"), "{told}");
    }
    for args in
        [&["plan", "--json", "--memory", "4GB"][..], &["explain", "x", "--last", "0", "--json"]]
    {
        let out = place.command(args).output().unwrap();
        assert_eq!((out.status.code(), &out.stderr[..]), (Some(2), &b""[..]), "{args:?}");
        let told: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(told["error"].as_str().unwrap().starts_with("invalid value"), "{told}");
    }
}

#[test]
fn the_daemon_serves_both_sockets_and_ends_on_sigterm() {
    let place = Place::listening();
    let daemon = place.daemon();

    let metrics = ask(place.tcp(), "GET /metrics", "localhost");
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    let of = |what| ask(place.unix(), what, "localhost");
    assert!(of("GET /v1/state").contains("\"version\""), "{}", of("GET /v1/state"));
    assert!(of("GET /nothing").starts_with("HTTP/1.1 404"));
    assert!(of("POST /metrics").starts_with("HTTP/1.1 405"));
    // A key that is not known may be meant for one VM: no such request is for all.
    let body = r#"{"name": "web", "on": false}"#;
    for path in ["reclaim", "merge", "hands-off"] {
        let head = format!("POST /v1/{path} HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n");
        let post = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let said = http(place.unix(), &post);
        assert!(said.starts_with("HTTP/1.1 400") && said.contains("unknown field"), "{said}");
    }
    let head = "POST /v1/reclaim HTTP/1.1\r\nHost: ebb\r\nConnection: close\r\n";
    let said = http(place.unix(), &format!("{head}Content-Length: 14\r\n\r\n{{\"bytes\": 512}}"));
    assert!(said.starts_with("HTTP/1.1 400") && said.contains("write the unit"), "{said}");
    assert!(http(place.unix(), "\u{1}\u{2}nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));

    let (code, said) = place.ebb(&["status"]);
    assert_eq!(code, 1, "there is no VM to show: {said}");
    let (code, said) = place.ebb(&["explain", "web"]);
    assert!(code == 2 && said.contains("no VM is called “web”"), "{code} {said}");

    let record = place.file("r.jsonl");
    for command in ["record", "replay"] {
        let (code, said) = place.ebb(&[command, record.to_str().unwrap()]);
        assert_eq!(code, 0, "{command}: {said}");
    }

    assert_eq!(daemon.end(), Some(0));
    assert!(!place.file("s").exists(), "the socket is gone");
}

#[test]
fn a_port_that_is_taken_does_not_keep_the_daemon_from_its_vms() {
    let place = Place::listening();
    let _taken = TcpListener::bind(("127.0.0.1", place.port)).unwrap();
    let daemon = place.daemon();
    let metrics = ask(place.unix(), "GET /metrics", "localhost");
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    assert_eq!(daemon.end(), Some(0));
}

#[test]
fn a_record_of_before_is_kept_when_a_daemon_starts_again() {
    let place = Place::new("");
    let (record, kept) = (place.file("record"), place.file("record.old"));
    std::fs::write(&record, "of a daemon that has crashed").unwrap();
    let _daemon = Daemon(place.command(&["run", "--record"]).arg(&record).spawn().unwrap());
    assert!(comes(|| kept.exists() && record.exists()), "the old one and the new one");
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "of a daemon that has crashed");
}

#[test]
fn an_option_that_a_daemon_would_not_heed_is_refused() {
    let place = Place::new("");
    let listener = UnixListener::bind(place.file("s")).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 4096]);
            let body = r#"{"host": {"merge": {"mode": "on"}}, "vms": [{"name": "web"}]}"#;
            let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{body}");
        }
    });
    let (code, said) = place.ebb(&["merge", "on", "web"]);
    assert_ne!(code, 2, "{said}");
    let (code, said) = place.ebb(&["merge", "on", "web", "--across-groups"]);
    assert!(code == 2 && said.contains("merge.across_groups"), "{code} {said}");
    // It does the work, so its socket is all that counts of the file.
    place.configure("tikc = \"1s\"\n");
    let (code, said) = place.ebb(&["merge", "off", "web"]);
    assert!(code != 2 && said.contains("tikc"), "{code} {said}");
}

#[test]
fn who_forgets_the_name_of_a_vm_does_nothing_to_all() {
    let place = Place::new("");
    for command in [&["merge", "off"][..], &["reclaim"]] {
        let (code, said) = place.ebb(command);
        assert!(code == 2 && said.contains("--all>"), "{command:?}: {code} {said}");
    }
}

#[test]
fn two_daemons_do_not_share_vms() {
    let place = Place::new("");
    let _daemon = place.daemon();
    // It owns the state: a release does not go on beside it either.
    for command in ["run", "release"] {
        let (code, said) = place.ebb(&[command]);
        assert!(code == 2 && said.contains("another ebb holds"), "{command}: {code} {said}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::new("");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = place.command(&["check"]).stdout(writer).output().unwrap();
    assert!(out.status.success(), "{out:?}");
}

/// A process that is nobody's VM, written down as one that is owed memory.
fn owed(place: &Place) -> PathBuf {
    let vm = r#"{"id": {"pid": 2147483647, "start": 9}, "name": "web", "baseline": 1073741824}"#;
    std::fs::write(place.file("state.json"), format!("{{\"vms\": [{vm}]}}")).unwrap();
    place.file("state.json")
}

#[test]
fn release_tells_no_state_file_from_nothing_owed_and_goes_by_the_processes_in_it() {
    let place = Place::new("");
    let release = |exit, words: &str| {
        let (code, said) = place.ebb(&["release"]);
        assert!(code == exit && said.contains(words), "{code} {said}");
    };
    release(1, "no state file");
    let state = owed(&place);
    release(0, "web: its process has ended");
    assert!(!std::fs::read_to_string(&state).unwrap().contains("web"));
    release(0, "nothing is owed");
}

#[test]
fn where_the_configuration_is_bad_release_goes_on_and_clients_ask_the_daemon() {
    let place = Place::new("tikc = \"1s\"\n");
    let state = owed(&place);
    let (code, said) = place.ebb(&["release", "--state", state.to_str().unwrap()]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("tikc") && said.contains("defaults"), "{said}");
    // Another file may be in use, and packages take 1 for nothing that is owed.
    if !std::path::Path::new("/run/ebb/state.json").exists() {
        let (code, said) = place.ebb(&["release"]);
        assert!(code == 2 && said.contains("may be another one"), "{code} {said}");
    }
    for command in [
        &["run"][..],
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
        &["merge", "on", "web"],
    ] {
        let (code, said) = place.ebb(command);
        assert_eq!(code, 2, "{command:?}: {said}");
        assert!(said.contains("ebb.toml:6: ") && said.contains("tikc"), "{said}");
    }
    place.configure("tick = \"1s\"\n");
    assert_eq!(place.ebb(&["check"]).0, 0);
}

#[test]
fn a_mistake_in_the_file_keeps_no_client_from_a_daemon_that_runs() {
    let place = Place::new("");
    let _daemon = place.daemon();
    let record = place.file("r.jsonl");
    assert_eq!(place.ebb(&["record", record.to_str().unwrap()]).0, 0);
    place.configure("tikc = \"1s\"\n");
    let socket = place.file("s");
    let (code, said) = place.ebb(&["status"]);
    assert!(code == 1 && said.contains("ebb.toml:6: ") && said.contains("tikc"), "{code} {said}");
    assert!(said.contains(&format!("asking the daemon on {}", socket.display())), "{said}");
    // Who names the socket, or asks no daemon, goes by no file.
    let (code, said) = place.ebb(&["status", "--socket", socket.to_str().unwrap()]);
    assert!(code == 1 && !said.contains("tikc"), "{code} {said}");
    let (code, said) = place.ebb(&["replay", record.to_str().unwrap()]);
    assert!(code == 0 && !said.contains("tikc"), "{code} {said}");
    // Where the file does not tell a socket that may be used, no other daemon is asked.
    let as_state = format!("[daemon]\nsocket = {0:?}\nstate_file = {0:?}\n", place.file("s"));
    for text in ["[[\n", &as_state] {
        std::fs::write(place.file("ebb.toml"), text).unwrap();
        let (code, said) = place.ebb(&["status"]);
        assert!(code == 2 && !said.contains("asking the daemon"), "{code} {said}");
    }
}

#[test]
fn the_daemon_may_open_as_many_files_as_it_is_ever_allowed_to() {
    let place = Place::new("");
    let daemon = place.daemon_after("ulimit -Sn 64;");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.0.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "soft and hard: {line}");
}

#[test]
fn a_damaged_state_file_is_refused_by_name_and_left_as_it_is() {
    let place = Place::new("");
    let state = place.file("state.json");
    for text in ["", "{\"vms\": 3", "nonsense"] {
        std::fs::write(&state, text).unwrap();
        for command in ["run", "release"] {
            let (code, said) = place.ebb(&[command]);
            assert_eq!(code, 2, "{command}: {said}");
            let words = ["state.json is damaged", "virsh setmem", "QMP", "remove the file"];
            assert!(words.iter().all(|w| said.contains(w)), "{command}: {said}");
        }
        assert_eq!(std::fs::read_to_string(&state).unwrap(), text);
    }
}
