//! Connections: how many at once, how long each may take.
//!
//! The daemon needs descriptors for its own work, so no client may have them all. Each
//! listener has a limit, and at it the connection that has been silent longest makes room
//! for the new one. A connection in which nothing moves is closed, and so is an old one: a
//! client that reads a byte now and then holds an answer in memory.

use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

/// The head of a request must be there within this time.
const HEAD: Duration = Duration::from_secs(5);
/// A connection on which nothing is read or written for this time is closed.
const IDLE: Duration = Duration::from_secs(30);
/// A connection of this age ends when it has answered; if that takes this time again, it is closed.
const AGE: Duration = Duration::from_secs(300);
/// Where no connection can be accepted, as no descriptor is free, it is tried again after this.
const NO_DESCRIPTOR: Duration = Duration::from_millis(200);
/// The buffer of a connection, bytes: a head must fit, and answers go out in pieces of this.
const BUFFER: usize = 64 << 10;

/// How many connections at once: a small share of what this process may open, and this at most.
pub fn limit(part: u64, most: u64) -> usize {
    share(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), part, most)
}

fn share(descriptors: u64, part: u64, most: u64) -> usize {
    (descriptors / part).clamp(1, most) as usize
}

/// Serves what comes `next`, for ever.
pub async fn accept<S>(next: impl AsyncFn() -> io::Result<S>, app: Router, limit: usize)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut clients = Clients { open: Vec::new(), limit };
    loop {
        match next().await {
            Ok(stream) => {
                clients.make_room().await;
                let moved = Moved::now();
                let task = tokio::spawn(serve(stream, app.clone(), moved.clone()));
                clients.open.push((task.abort_handle(), moved));
            }
            // The client has gone already.
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
            // No descriptor is left: the connection waits where it is, and so do we.
            Err(_) => {
                clients.drop_silent().await;
                sleep(NO_DESCRIPTOR).await;
            }
        }
    }
}

struct Clients {
    open: Vec<(AbortHandle, Moved)>,
    limit: usize,
}

impl Clients {
    async fn make_room(&mut self) {
        self.open.retain(|(task, _)| !task.is_finished());
        while self.open.len() >= self.limit {
            self.drop_silent().await;
        }
    }

    /// Closes the one that has been silent longest.
    async fn drop_silent(&mut self) {
        let silent = (0..self.open.len()).min_by_key(|i| *self.open[*i].1.last());
        if let Some(i) = silent {
            self.open.swap_remove(i).0.abort();
            // Its descriptor is closed when its task is dropped, which is now.
            tokio::task::yield_now().await;
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, app: Router, moved: Moved) {
    let io = TokioIo::new(Watched { stream, moved: moved.clone() });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER)
        .serve_connection(io, TowerToHyperService::new(app));
    let (mut connection, mut old) = (pin!(connection), pin!(sleep(AGE)));
    let mut ending = false;
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = moved.silent() => return,
            () = old.as_mut() => {
                if ending {
                    return;
                }
                ending = true;
                connection.as_mut().graceful_shutdown();
                old.as_mut().reset(Instant::now() + AGE);
            }
        }
    }
}

/// When bytes moved last on a connection.
#[derive(Clone)]
struct Moved(Arc<Mutex<Instant>>);

impl Moved {
    fn now() -> Moved {
        Moved(Arc::new(Mutex::new(Instant::now())))
    }

    fn last(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn note(&self) {
        *self.last() = Instant::now();
    }

    /// Waits until nothing has moved for too long.
    async fn silent(&self) {
        loop {
            let end = *self.last() + IDLE;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }
}

struct Watched<S> {
    stream: S,
    moved: Moved,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = to.filled().len();
        let done = Pin::new(&mut self.stream).poll_read(task, to);
        if to.filled().len() > before {
            self.moved.note();
        }
        done
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(task, from);
        if matches!(done, Poll::Ready(Ok(1..))) {
            self.moved.note();
        }
        done
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::io::{Read, Write};

    #[test]
    fn connections_are_a_small_share_of_the_descriptors() {
        let limits = |descriptors| (share(descriptors, 8, 64), share(descriptors, 4, 256));
        assert_eq!(limits(64), (8, 16));
        assert_eq!(limits(1024), (64, 256));
        assert_eq!(limits(1 << 30), (64, 256));
        assert_eq!(limits(2), (1, 1));
    }

    /// A server with so many connections at once; where it listens.
    fn serving(limit: usize) -> std::path::PathBuf {
        let path = tempfile::tempdir().unwrap().keep().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let app = Router::new().route("/", get(|| async { "here" }));
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                accept(async || Ok(listener.accept().await?.0), app, limit).await;
            });
        });
        path
    }

    fn ask(stream: &mut std::os::unix::net::UnixStream) -> bool {
        let asked = stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        let mut answer = [0; 300];
        let read = stream.read(&mut answer);
        asked.is_ok() && read.is_ok_and(|n| answer[..n].ends_with(b"here"))
    }

    #[test]
    fn the_connection_that_is_silent_longest_makes_room() {
        let path = serving(2);
        let connect = || {
            let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
        };
        let pause = || std::thread::sleep(Duration::from_millis(20));
        let (mut a, mut b) = (connect(), connect());
        assert!(ask(&mut a) && ask(&mut b));
        pause();
        assert!(ask(&mut a), "kept alive");
        pause();
        let mut c = connect();
        assert!(ask(&mut c), "a new one is always answered");
        assert_eq!(b.read(&mut [0; 9]).unwrap(), 0, "the silent one is closed");
        assert!(ask(&mut a) && ask(&mut c), "the others are not");
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
