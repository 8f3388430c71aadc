//! A client of the daemon's Unix socket, for the reading commands.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

/// No answer is larger.
const MOST: u64 = 256 << 20;

/// Whether a daemon answers there.
pub fn is_up(socket: &str) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// GETs a path; the body.
pub fn get(socket: &str, path: &str) -> Result<Vec<u8>> {
    ask(socket, &format!("GET {path} HTTP/1.1\r\n"), path, "")
}

/// POSTs JSON to a path.
pub fn post(socket: &str, path: &str, body: &str) -> Result<()> {
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n");
    ask(socket, &head, path, body).map(drop)
}

fn ask(socket: &str, head: &str, path: &str, content: &str) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!("no daemon answers on {socket}: start it with `ebb run`, or name its socket with --socket")
    })?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;
    let length = content.len();
    let request = format!(
        "{head}Host: ebb\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{content}"
    );
    // In one piece: a server that needs no body may answer and hang up before it
    // comes, and that answer counts.
    let sent = stream.write_all(request.as_bytes());
    match sent {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            return Err(e).with_context(|| format!("cannot ask the daemon on {socket}"));
        }
        _ => {}
    }
    let mut answer = Vec::new();
    stream
        .take(MOST)
        .read_to_end(&mut answer)
        .with_context(|| format!("the daemon on {socket} did not finish its answer in 10 s"))?;
    body(&answer).with_context(|| format!("{path} on {socket}"))
}

/// GETs and parses JSON.
pub fn get_json<T: DeserializeOwned>(socket: &str, path: &str) -> Result<T> {
    serde_json::from_slice(&get(socket, path)?)
        .with_context(|| format!("{path} on {socket}: the daemon is of another version"))
}

/// The body of an answer. Every answer of ours has a length, none is chunked.
fn body(answer: &[u8]) -> Result<Vec<u8>> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(at) = response.parse(answer).context("not HTTP")? else {
        bail!("the answer was cut off");
    };
    let body = &answer[at..];
    match response.code {
        Some(200..=299) => Ok(body.to_vec()),
        code => bail!(
            "HTTP status {}: {}",
            code.unwrap_or(0),
            String::from_utf8_lossy(&body[..body.len().min(200)]).trim()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_errors_and_nonsense_are_told_apart() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}").unwrap(), b"{}");
        let e = body(b"HTTP/1.1 404 Not Found\r\n\r\nno").unwrap_err().to_string();
        assert_eq!(e, "HTTP status 404: no");
        assert!(body(b"HTTP/1.1 200 OK\r\na").is_err());
        assert!(body(b"\xff\xff").is_err());
        let e = get("/nonexistent/ebb.sock", "/").unwrap_err().to_string();
        assert!(e.contains("ebb run"), "{e}");
    }
}
