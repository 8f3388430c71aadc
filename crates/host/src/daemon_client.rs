//! A client of the daemon's Unix socket: for the reading commands, and the lab.
//!
//! HTTP/1.1 as far as our own server needs it: one request a connection, answers
//! with a length.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

const MOST: u64 = 256 << 20;
/// For each read and write; an answer takes the daemon milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Until a daemon that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no daemon answers on {socket} ({error}): run this as root, start the daemon (systemctl start \
         ebb), or name its socket with --socket"
    )]
    NoDaemon { socket: PathBuf, error: std::io::Error },
    #[error("{path} on {socket}: the daemon broke its answer off, or took 10 s: {error}")]
    CutOff { socket: PathBuf, path: String, error: std::io::Error },
    #[error("{path} on {socket}: {why}")]
    Answer { socket: PathBuf, path: String, why: String },
}

pub fn is_up(socket: impl AsRef<Path>) -> bool {
    UnixStream::connect(socket).is_ok()
}

pub fn get(socket: impl AsRef<Path>, path: &str) -> Result<Vec<u8>, ClientError> {
    ask(socket.as_ref(), &format!("GET {path} HTTP/1.1\r\n"), path, "")
}

/// The daemon's record: packed by zstd, or lines of JSON from a daemon that does not pack.
pub fn record(socket: impl AsRef<Path>) -> Result<Vec<u8>, ClientError> {
    let path = "/v1/record";
    let head = format!("GET {path} HTTP/1.1\r\nAccept-Encoding: zstd\r\n");
    ask(socket.as_ref(), &head, path, "")
}

pub fn post(socket: impl AsRef<Path>, path: &str, body: &str) -> Result<(), ClientError> {
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n");
    ask(socket.as_ref(), &head, path, body).map(drop)
}

pub fn get_json<T: DeserializeOwned>(
    socket: impl AsRef<Path>,
    path: &str,
) -> Result<T, ClientError> {
    let socket = socket.as_ref();
    serde_json::from_slice(&get(socket, path)?).map_err(|e| {
        let why = format!("the daemon's version may be too far from this one's: {e}");
        ClientError::Answer { socket: socket.into(), path: path.into(), why }
    })
}

/// Gets JSON. While no daemon answers, as in the moment of a reload, it is asked again until then.
pub fn get_json_until<T: DeserializeOwned>(
    socket: impl AsRef<Path>,
    path: &str,
    until: Instant,
) -> Result<T, ClientError> {
    loop {
        match get_json(socket.as_ref(), path) {
            Err(ClientError::NoDaemon { .. } | ClientError::CutOff { .. })
                if Instant::now() < until =>
            {
                std::thread::sleep(AGAIN);
            }
            answer => return answer,
        }
    }
}

fn ask(socket: &Path, head: &str, path: &str, content: &str) -> Result<Vec<u8>, ClientError> {
    let no_daemon = |error| ClientError::NoDaemon { socket: socket.into(), error };
    let cut_off = |error| ClientError::CutOff { socket: socket.into(), path: path.into(), error };
    let mut stream = UnixStream::connect(socket).map_err(no_daemon)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(no_daemon)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(no_daemon)?;
    let length = content.len();
    let request = format!(
        "{head}Host: ebb\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{content}"
    );
    // In one piece: a server that needs no body may answer and hang up before it
    // comes, and that answer counts.
    match stream.write_all(request.as_bytes()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => return Err(cut_off(e)),
        _ => {}
    }
    let mut answer = Vec::new();
    stream.take(MOST).read_to_end(&mut answer).map_err(cut_off)?;
    if answer.is_empty() {
        return Err(cut_off(ErrorKind::UnexpectedEof.into()));
    }
    let bad = |why| ClientError::Answer { socket: socket.into(), path: path.into(), why };
    body(&answer).map(<[u8]>::to_vec).map_err(bad)
}

/// The body of an answer, or what is wrong with it. Every answer of ours has a
/// length, none is chunked.
fn body(answer: &[u8]) -> Result<&[u8], String> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let at = match response.parse(answer) {
        Ok(httparse::Status::Complete(at)) => at,
        Ok(httparse::Status::Partial) => return Err("the answer was cut off".into()),
        Err(e) => return Err(format!("not HTTP: {e}")),
    };
    let body = &answer[at..];
    match response.code {
        Some(200..=299) => Ok(body),
        code => Err(format!(
            "HTTP status {}: {}",
            code.unwrap_or(0),
            String::from_utf8_lossy(&body[..body.len().min(200)]).trim()
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::testing::socket;

    #[test]
    fn bodies_errors_and_nonsense_are_told_apart() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}").unwrap(), b"{}");
        let e = body(b"HTTP/1.1 404 Not Found\r\n\r\nno").unwrap_err();
        assert_eq!(e, "HTTP status 404: no");
        assert!(body(b"HTTP/1.1 200 OK\r\na").is_err());
        assert!(body(b"\xff\xff").is_err());
        let e = get("/nonexistent/ebb.sock", "/").unwrap_err().to_string();
        assert!(e.contains("systemctl start ebb"), "{e}");
    }

    /// A daemon that is reloaded: one breaks its answer off, and the next listens a moment later.
    #[test]
    fn a_daemon_that_does_not_answer_is_asked_again_until_it_does_or_time_is_up() {
        let (dir, listener, path) = socket();
        let ask =
            |ms| get_json_until::<u32>(&path, "/", Instant::now() + Duration::from_millis(ms));
        drop(listener);
        assert!(matches!(ask(150), Err(ClientError::NoDaemon { .. })), "time is up");
        std::fs::remove_file(&path).unwrap();
        let its = path.clone();
        let daemon = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let listener = UnixListener::bind(its).unwrap();
            // An error that is an answer is one.
            for answer in ["", "HTTP/1.1 200 OK\r\n\r\n7", "HTTP/1.1 404 Not Found\r\n\r\nno"] {
                let mut client = listener.accept().unwrap().0;
                let _ = client.read(&mut [0; 4096]);
                client.write_all(answer.as_bytes()).unwrap();
            }
        });
        assert_eq!(ask(60_000).unwrap(), 7);
        assert!(matches!(ask(60_000), Err(ClientError::Answer { .. })));
        daemon.join().unwrap();
        drop(dir);
    }
}
