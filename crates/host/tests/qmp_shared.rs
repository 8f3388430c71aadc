//! A client of a shared socket against a scripted server that serves one client at a time, as QEMU
//! does: when it connects, what it sends, and when it leaves.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_host::qmp::{Client, QmpError, State, poll_all};
use serde_json::{Value, json};

const GREETING: &[u8] = b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n";
/// As the daemon's.
const DEADLINE: Duration = Duration::from_millis(200);
/// For a busy machine.
const LONG: Duration = Duration::from_secs(10);

struct Server {
    listener: UnixListener,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn server() -> Server {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("100.qmp");
    let listener = UnixListener::bind(&path).unwrap();
    Server { listener, path, _dir: dir }
}

impl Server {
    fn client(&self) -> Client {
        Client::shared(&self.path, std::process::id())
    }

    /// Whether nobody waits to be accepted.
    fn is_left_alone(&self) -> bool {
        self.listener.set_nonblocking(true).unwrap();
        let said = self.listener.accept();
        self.listener.set_nonblocking(false).unwrap();
        matches!(said, Err(e) if e.kind() == ErrorKind::WouldBlock)
    }

    /// Serves one client until it leaves: what it asked.
    fn serve(&self) -> std::thread::JoinHandle<Vec<String>> {
        let listener = self.listener.try_clone().unwrap();
        std::thread::spawn(move || answer(listener.accept().unwrap().0))
    }
}

fn answer(mut stream: UnixStream) -> Vec<String> {
    stream.write_all(GREETING).unwrap();
    let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let one = |line: String| {
        let asked: Value = serde_json::from_str(&line).unwrap();
        let answer = json!({ "return": {}, "id": asked["id"] }).to_string() + "\n";
        stream.write_all(answer.as_bytes()).unwrap();
        asked["execute"].as_str().unwrap().to_owned()
    };
    lines.map(one).collect()
}

fn poll(client: &mut Client) -> Duration {
    let begun = Instant::now();
    poll_all(&mut [client], begun + DEADLINE);
    begun.elapsed()
}

#[test]
fn a_shared_socket_is_connected_to_for_a_batch_and_left_with_its_last_answer() {
    let server = server();
    let mut client = server.client();
    assert_eq!(client.state(), State::Away);
    poll(&mut client);
    assert!(server.is_left_alone(), "nothing is to be asked");
    for batch in [&["query-status", "query-balloon"][..], &["balloon"][..]] {
        let peer = server.serve();
        let ids: Vec<u64> = batch.iter().map(|c| client.send(c, None).unwrap()).collect();
        poll_all(&mut [&mut client], Instant::now() + LONG);
        // The server's thread ends when it reads the end of the connection.
        let asked = peer.join().unwrap();
        assert_eq!(asked[0], "qmp_capabilities");
        assert_eq!(asked[1..], *batch);
        assert!(ids.iter().all(|id| matches!(client.take_reply(*id), Some(Ok(_)))));
        assert_eq!((client.state(), client.fd().is_none()), (State::Away, true));
    }
    assert!(server.is_left_alone() && client.missed().is_none());
    assert!(client.longest_visit().unwrap() > Duration::ZERO);
}

/// While a manager is served, the client leaves, and has sent nothing that QEMU would carry out
/// later. It does not queue a second time.
#[test]
fn a_client_that_is_not_served_leaves_soon_has_sent_nothing_and_does_not_fill_the_queue() {
    let server = server();
    let manager = UnixStream::connect(&server.path).unwrap();
    let served = server.listener.accept().unwrap();
    let mut client = server.client();
    for _ in 0..3 {
        let order = client.send("balloon", Some(json!({ "value": 1 }))).unwrap();
        poll_all(&mut [&mut client], Instant::now() + LONG);
        let said = client.take_reply(order);
        let Some(Err(QmpError::Busy(_, why))) = &said else { panic!("{said:?}") };
        assert_eq!(why, "another client is served, or QEMU hangs");
        assert!(client.missed().is_some() && client.state() == State::Away);
    }
    drop((manager, served));
    let (mut gone, _) = server.listener.accept().unwrap();
    let mut text = String::new();
    gone.read_to_string(&mut text).unwrap();
    assert_eq!(text, "");
    assert!(server.is_left_alone(), "one connection was made for three batches");
    drop(gone);
    let peer = server.serve();
    let id = client.send("query-status", None).unwrap();
    poll_all(&mut [&mut client], Instant::now() + LONG);
    assert!(matches!(client.take_reply(id), Some(Ok(_))) && client.missed().is_none());
    assert_eq!(peer.join().unwrap(), ["qmp_capabilities", "query-status"]);
}

/// Who makes a client for a socket does not know of the one before.
#[test]
fn a_client_that_was_dropped_is_in_the_queue_and_the_next_one_waits_for_it() {
    let server = server();
    let _manager = UnixStream::connect(&server.path).unwrap();
    let _served = server.listener.accept().unwrap();
    let mut first = server.client();
    first.send("query-status", None).unwrap();
    first.flush();
    assert_eq!(first.state(), State::Greeting);
    drop(first);
    let mut next = server.client();
    let id = next.send("query-status", None).unwrap();
    poll(&mut next);
    assert!(matches!(next.take_reply(id), Some(Err(QmpError::Busy(..)))));
    assert!(matches!(Client::knock(&server.path), Err(QmpError::Busy(..))));
    assert!(server.listener.accept().is_ok() && server.is_left_alone(), "one was made");
}

#[test]
fn a_command_that_was_not_sent_can_be_taken_back() {
    let server = server();
    let mut client = server.client();
    let order = client.send("balloon", Some(json!({ "value": 1 }))).unwrap();
    let id = client.send("query-status", None).unwrap();
    poll(&mut client);
    assert!(client.protocol.take_back(order) && !client.protocol.take_back(order));
    let peer = server.serve();
    poll_all(&mut [&mut client], Instant::now() + LONG);
    assert!(!client.protocol.take_back(id), "it was sent");
    assert!(matches!(client.take_reply(id), Some(Ok(_))) && client.take_reply(order).is_none());
    assert_eq!(peer.join().unwrap(), ["qmp_capabilities", "query-status"]);
}

/// A QEMU that swaps may take long.
#[test]
fn a_client_that_is_the_next_stays_for_a_slow_qemu() {
    let server = server();
    let mut client = server.client();
    let id = client.send("query-status", None).unwrap();
    poll(&mut client);
    assert_eq!((client.state(), client.missed().is_some()), (State::Greeting, false));
    let peer = server.serve();
    poll_all(&mut [&mut client], Instant::now() + LONG);
    assert!(matches!(client.take_reply(id), Some(Ok(_))));
    assert_eq!(peer.join().unwrap(), ["qmp_capabilities", "query-status"]);
}

#[test]
fn a_qemu_that_owes_an_answer_is_left_after_a_second() {
    let server = server();
    let mut client = server.client();
    let id = client.send("query-status", None).unwrap();
    client.flush();
    let (mut stream, _) = server.listener.accept().unwrap();
    stream.write_all(GREETING).unwrap();
    let begun = Instant::now();
    poll_all(&mut [&mut client], begun + LONG);
    assert!(matches!(client.take_reply(id), Some(Err(QmpError::Left(..)))));
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(900) && took < LONG, "{took:?}");
    assert!(client.missed().is_some() && client.fd().is_none());
}

#[test]
fn a_socket_that_another_process_serves_is_not_spoken_to() {
    let server = server();
    let mut client = Client::shared(&server.path, std::process::id() + 1);
    client.send("query-status", None).unwrap();
    poll(&mut client);
    let why = client.failure().unwrap().to_string();
    assert!(why.contains("served by process"), "{why}");
    let (mut stream, _) = server.listener.accept().unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "");
}
