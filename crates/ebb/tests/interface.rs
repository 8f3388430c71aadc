//! The HTTP interface of the real daemon, met with bad manners: idle and half-open
//! connections, foreign names, floods of requests.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use common::*;
use serde_json::Value;

/// A daemon that also listens on TCP, in its place.
fn listening(first: &str) -> (Place, Daemon) {
    let place = Place::listening();
    let daemon = place.daemon_after(first);
    (place, daemon)
}

/// CPU seconds of all its threads.
fn cpu(daemon: &Daemon) -> f64 {
    let stat = ebb_host::probe::process::read_stat(&Default::default(), daemon.0.id());
    let stat = stat.unwrap().unwrap();
    (stat.user_ticks + stat.system_ticks) as f64 / 100.0
}

/// What it counts up with each look at its VMs.
fn tick(place: &Place) -> u64 {
    place.state()["tick"].as_u64().unwrap()
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
    let (place, daemon) = listening("ulimit -n 64;");
    let _idle: Vec<TcpStream> = (0..80).map(|_| place.tcp()).collect();
    let (begun, before) = (tick(&place), cpu(&daemon));
    let metrics = ask(place.tcp(), "GET /metrics", "localhost");
    assert!(metrics.contains("ebb_host_memory_total_bytes "), "{metrics}");
    assert!(comes(|| tick(&place) >= begun + 3), "the loop goes on: {}", place.state());
    let state = place.state();
    assert_eq!(state["problems"].as_array().map(Vec::len), Some(0), "{state}");
    assert!(state["host"]["total"].is_u64(), "{state}");
    // Three ticks take a few milliseconds; a loop that turns on EMFILE takes all there is.
    let spent = cpu(&daemon) - before;
    assert!(spent < 1.0, "{spent} s of CPU");
}

#[test]
fn a_client_that_says_nothing_or_half_is_hung_up_on() {
    let (place, _daemon) = listening("");
    let (silent, mut half, mut kept) = (place.tcp(), place.unix(), place.unix());
    half.write_all(b"GET /v1/state HTTP/1.1\r\nHo").unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\nHost: ebb\r\n\r\n").unwrap();
    let mut first = [0; 15];
    kept.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    assert!(is_closed(silent) && is_closed(half) && is_closed(kept));
}

#[test]
fn tcp_answers_to_its_own_names_and_with_metrics_only() {
    let (place, _daemon) = listening("");
    for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", ""] {
        let said = ask(place.tcp(), "GET /metrics", host);
        assert!(said.starts_with("HTTP/1.1 421"), "{host}: {said}");
    }
    let said = ask(place.tcp(), "GET http://evil.example/metrics", "localhost");
    assert!(said.starts_with("HTTP/1.1 421"), "{said}");
    let own =
        [format!("127.0.0.1:{}", place.port), "LOCALHOST".into(), "[::1]:9".into(), "::1".into()];
    for host in own {
        let said = ask(place.tcp(), "GET /metrics", &host);
        assert!(said.starts_with("HTTP/1.1 200") && said.contains("ebb_host_vms 0"), "{host}");
    }
    for path in ["state", "plan", "decisions", "record"] {
        let said = ask(place.tcp(), &format!("GET /v1/{path}"), "localhost");
        assert!(said.starts_with("HTTP/1.1 404") && said.contains("Unix socket"), "{said}");
    }
    assert!(ask(place.tcp(), "POST /v1/look", "localhost").starts_with("HTTP/1.1 404"));
    // On the Unix socket a name means nothing: the file's mode says who may.
    assert!(ask(place.unix(), "GET /v1/plan", "any").starts_with("HTTP/1.1 200"));
}

#[test]
fn looks_that_are_asked_for_do_not_drive_the_loop_faster_than_it_goes() {
    let (place, _daemon) = listening("");
    let first = tick(&place);
    let until = Instant::now() + PATIENCE;
    while tick(&place) < first + 8 {
        assert!(Instant::now() < until, "no ticks");
        for _ in 0..20 {
            assert!(ask(place.unix(), "POST /v1/look", "ebb").starts_with("HTTP/1.1 202"));
        }
    }
    let record = ask(place.unix(), "GET /v1/record", "ebb");
    let lines = record.split_once("\r\n\r\n").unwrap().1.lines();
    let line = |line| serde_json::from_str::<Value>(line).unwrap();
    let at: Vec<u64> = lines.filter_map(|l| line(l)["sample"]["at"].as_u64()).collect();
    assert!(at.len() >= 8, "{at:?}");
    assert!(at.windows(2).all(|w| w[1] - w[0] >= 150), "{at:?}");
}
