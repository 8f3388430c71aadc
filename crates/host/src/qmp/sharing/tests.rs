//! A client of a shared socket against a scripted server that serves one client at a time, as QEMU
//! does: when it connects, what it sends, and when it leaves.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::qmp::poll_all;
use crate::sockets::connect;
use crate::testing::{qmp, socket};

/// As the daemon's.
const DEADLINE: Duration = Duration::from_millis(200);
/// For a busy machine.
const LONG: Duration = Duration::from_secs(10);

struct Server {
    listener: UnixListener,
    path: PathBuf,
    _dir: TempDir,
}

fn server() -> Server {
    let (_dir, listener, path) = socket();
    Server { listener, path, _dir }
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

    /// Serves this client until it leaves: that is what it asked.
    fn is_asked(&self, client: &mut Client, all: &[&str]) {
        let mut asked = Vec::new();
        std::thread::scope(|s| {
            // It ends when it reads the end of the connection.
            s.spawn(|| {
                qmp(self.listener.accept().unwrap().0, |command, _| {
                    asked.push(command["execute"].as_str().unwrap().to_owned());
                    Some(Ok(json!({})))
                });
            });
            poll_all(&mut [client], Instant::now() + LONG);
        });
        assert_eq!(asked, [&["qmp_capabilities"], all].concat());
    }

    /// What the next client has sent when it leaves.
    fn hears(&self) -> String {
        let mut text = String::new();
        self.listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        text
    }
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
    assert_eq!(client.protocol.state(), State::Away);
    poll(&mut client);
    assert!(server.is_left_alone(), "nothing is to be asked");
    for batch in [&["query-status", "query-balloon"][..], &["balloon"][..]] {
        let ids: Vec<u64> = batch.iter().map(|c| client.protocol.send(c, None).unwrap()).collect();
        server.is_asked(&mut client, batch);
        assert!(ids.iter().all(|id| matches!(client.protocol.take_reply(*id), Some(Ok(_)))));
        assert_eq!((client.protocol.state(), client.fd().is_none()), (State::Away, true));
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
        let order = client.protocol.send("balloon", Some(json!({ "value": 1 }))).unwrap();
        poll_all(&mut [&mut client], Instant::now() + LONG);
        let said = client.protocol.take_reply(order);
        let Some(Err(QmpError::Busy(_, why))) = &said else { panic!("{said:?}") };
        assert_eq!(why, "another client is served, or QEMU hangs");
        assert!(client.missed().is_some() && client.protocol.state() == State::Away);
    }
    drop((manager, served));
    assert_eq!(server.hears(), "");
    assert!(server.is_left_alone(), "one connection was made for three batches");
    let id = client.protocol.send("query-status", None).unwrap();
    server.is_asked(&mut client, &["query-status"]);
    assert!(matches!(client.protocol.take_reply(id), Some(Ok(_))) && client.missed().is_none());
}

/// Who makes a client for a socket does not know of the one before.
#[test]
fn a_client_that_was_dropped_is_in_the_queue_and_the_next_one_waits_for_it() {
    let server = server();
    let _manager = UnixStream::connect(&server.path).unwrap();
    let _served = server.listener.accept().unwrap();
    let mut first = server.client();
    first.protocol.send("query-status", None).unwrap();
    first.flush();
    assert_eq!(first.protocol.state(), State::Greeting);
    drop(first);
    let mut next = server.client();
    let id = next.protocol.send("query-status", None).unwrap();
    poll(&mut next);
    assert!(matches!(next.protocol.take_reply(id), Some(Err(QmpError::Busy(..)))));
    assert!(matches!(Client::knock(&server.path), Err(QmpError::Busy(..))));
    assert!(server.listener.accept().is_ok() && server.is_left_alone(), "one was made");
}

#[test]
fn a_command_that_was_not_sent_can_be_taken_back() {
    let server = server();
    let mut client = server.client();
    let order = client.protocol.send("balloon", Some(json!({ "value": 1 }))).unwrap();
    let id = client.protocol.send("query-status", None).unwrap();
    poll(&mut client);
    assert!(client.protocol.take_back(order) && !client.protocol.take_back(order));
    server.is_asked(&mut client, &["query-status"]);
    assert!(!client.protocol.take_back(id), "it was sent");
    assert!(
        matches!(client.protocol.take_reply(id), Some(Ok(_)))
            && client.protocol.take_reply(order).is_none()
    );
}

/// A QEMU that swaps may take long.
#[test]
fn a_client_that_is_the_next_stays_for_a_slow_qemu() {
    let server = server();
    let mut client = server.client();
    let id = client.protocol.send("query-status", None).unwrap();
    poll(&mut client);
    assert_eq!((client.protocol.state(), client.missed().is_some()), (State::Greeting, false));
    server.is_asked(&mut client, &["query-status"]);
    assert!(matches!(client.protocol.take_reply(id), Some(Ok(_))));
}

#[test]
fn a_qemu_that_owes_an_answer_is_left_after_a_second() {
    let server = server();
    let mut client = server.client();
    let id = client.protocol.send("query-status", None).unwrap();
    client.flush();
    let (mut stream, _) = server.listener.accept().unwrap();
    stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n").unwrap();
    let begun = Instant::now();
    poll_all(&mut [&mut client], begun + LONG);
    let error = client.protocol.take_reply(id).unwrap().unwrap_err().to_string();
    assert!(error.ends_with(": no answer within 1.0 s"), "{error}");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(900) && took < LONG, "{took:?}");
    assert!(client.missed().is_some() && client.fd().is_none());
}

#[test]
fn a_socket_that_another_process_serves_is_not_spoken_to() {
    let server = server();
    let mut client = Client::shared(&server.path, std::process::id() + 1);
    client.protocol.send("query-status", None).unwrap();
    poll(&mut client);
    let why = client.protocol.failure().unwrap().to_string();
    assert!(why.contains("served by process"), "{why}");
    assert_eq!(server.hears(), "");
}

#[test]
fn a_connection_is_in_the_queue_until_the_server_accepts_it_and_finds_its_end() {
    let (dir, listener, path) = socket();
    assert!(!waits(&path));
    leave(&path, connect(&path).unwrap());
    assert!(waits(&path) && !waits(&dir.path().join("other")));
    let (mut served, _) = listener.accept().unwrap();
    assert!(waits(&path), "accepting alone shows nothing");
    assert_eq!(served.read(&mut [0; 8]).unwrap(), 0, "the end");
    served.write_all(b"greeting").unwrap();
    assert!(!waits(&path));
    leave(&path, connect(&path).unwrap());
    assert!(waits(&path));
    drop(listener);
    assert!(!waits(&path), "the server has ended");
}
