//! What the HTTP interface answers. All of it reads; only `POST /v1/reclaim`, `/v1/merge`,
//! `/v1/hands-off` and `/v1/look` (a tick now) ask for something.
//!
//! Everything is on the Unix socket, whose file mode says who may. On loopback, where any
//! local user may ask and a browser may be tricked into asking, there is `/metrics` alone,
//! and only for those who call it by a name of this machine's own.
//!
//! The tick loop publishes what it has, as it is; the view of it is made when a client
//! asks, once a tick at most. The two share one lock. It is held only to clone
//! pointers, and for the recorder to pack a tick, so that no client can slow a tick for long.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Read};
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context as Task, Poll};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State as Of};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use ebb_core::config::sizeable;
use ebb_core::model::Model;
use ebb_core::plan::Reclaim;
use ebb_core::policy::admission::{self, AdmissionRequest, Supply, admit};
use ebb_core::state::Memory;
use ebb_core::tick::Tick;
use ebb_core::units::Bytes as Size;
use ebb_host::probe::process::{read_stat, read_status};
use ebb_host::root::Root;
use hyper::body::{Frame, SizeHint};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::daemon::Inbox;
use crate::log::say;
use crate::metrics;
use crate::recorder::Recorder;
use crate::server;
use crate::view::{Daemon, Decision, State};

/// Decisions kept for `explain`: hours of a calm host, minutes of a wild one.
const DECISIONS: usize = 2000;
/// Clients that read the record at once: each holds on to what it was when it came.
const RECORDS: usize = 4;
/// A piece of the record's lines.
const PIECE: usize = 128 << 10;

pub struct Latest {
    tick: Tick,
    model: Arc<Model>,
    memory: Memory,
    daemon: Daemon,
    warnings: Vec<String>,
    state: OnceLock<Arc<State>>,
    supply: OnceLock<Supply>,
    metrics: OnceLock<Bytes>,
}

impl Latest {
    /// `warnings`: what is wrong with the configuration beside what the model says.
    pub fn new(
        tick: Tick,
        model: Arc<Model>,
        memory: Memory,
        daemon: Daemon,
        warnings: Vec<String>,
    ) -> Latest {
        let (state, supply, metrics) = Default::default();
        Latest { tick, model, memory, daemon, warnings, state, supply, metrics }
    }

    pub fn state(&self) -> Arc<State> {
        self.state.get_or_init(|| Arc::new(self.view())).clone()
    }

    fn view(&self) -> State {
        let (root, pid) = (Root::default(), self.daemon.pid);
        let cpu = read_stat(&root, pid).ok().flatten();
        let memory = read_status(&root, pid).ok().flatten();
        let daemon = Daemon {
            // Clock ticks are hundredths of a second on every Linux Ebb runs on.
            cpu_s: cpu.map_or(0.0, |c| (c.user_ticks + c.system_ticks) as f64 / 100.0),
            resident: memory.map(|m| m.resident()).unwrap_or_default(),
            ..self.daemon.clone()
        };
        let mut state = State::new(&self.tick, &self.model, &self.memory, daemon);
        state.host.warnings.extend(self.warnings.iter().cloned());
        state
    }

    fn supply(&self) -> &Supply {
        self.supply.get_or_init(|| admission::supply(&self.model, &self.memory))
    }

    fn metrics(&self) -> Bytes {
        self.metrics.get_or_init(|| metrics::render(&self.state()).into()).clone()
    }
}

#[derive(Default)]
pub struct Published {
    pub latest: Option<Arc<Latest>>,
    /// The last decisions, oldest first.
    pub decisions: VecDeque<Arc<Decision>>,
    pub recorder: Recorder,
}

impl Published {
    pub fn decided(&mut self, new: Vec<Decision>) {
        self.decisions.extend(new.into_iter().map(Arc::new));
        while self.decisions.len() > DECISIONS {
            self.decisions.pop_front();
        }
    }
}

type Refusal = (StatusCode, String);

#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Published>>);

impl Shared {
    /// What is published, locked. A panic elsewhere does not poison it: each
    /// field is replaced whole.
    pub fn lock(&self) -> MutexGuard<'_, Published> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn latest(&self) -> Result<Arc<Latest>, Refusal> {
        let latest = self.lock().latest.clone();
        latest.ok_or_else(|| (StatusCode::SERVICE_UNAVAILABLE, "no tick yet\n".into()))
    }
}

/// Sockets that are bound before the daemon says it is ready.
pub struct Listeners {
    unix: std::os::unix::net::UnixListener,
    tcp: Option<std::net::TcpListener>,
}

/// Binds them. A socket file without a listener is replaced. An address of `daemon.listen` that
/// cannot be had is reported, and Ebb goes on without it.
pub fn bind(socket: &str, listen: Option<&str>) -> Result<Listeners> {
    let path = Path::new(socket);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| {
            format!("cannot create {}: run as root, or set daemon.socket", dir.display())
        })?;
    }
    let unix = bind_unix(path)?;
    unix.set_nonblocking(true)?;
    let on_tcp = |address: &str| {
        let tcp = std::net::TcpListener::bind(address)?;
        tcp.set_nonblocking(true).map(|()| tcp)
    };
    let tcp = listen.and_then(|address| {
        let without = |e: &std::io::Error| {
            say(&format!(
                "cannot listen on {address} (daemon.listen), /metrics is on {socket} only: {e}"
            ));
        };
        on_tcp(address).inspect_err(without).ok()
    });
    Ok(Listeners { unix, tcp })
}

/// Whether [`bind`] failed because another process serves the socket: most likely another Ebb.
pub fn is_served(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::AddrInUse)
}

/// Listens on a Unix socket that only root and its group may connect to. A file that is there
/// already is replaced where it is a socket that is proven to have no listener: that no
/// connection is taken now proves nothing.
fn bind_unix(path: &Path) -> Result<std::os::unix::net::UnixListener> {
    let shown = path.display();
    let address = SocketAddrUnix::new(path).with_context(|| format!("{shown} is no name"))?;
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    match std::fs::symlink_metadata(path) {
        Ok(m) if m.file_type().is_socket() => match net::connect(&socket()?, &address) {
            Ok(()) | Err(Errno::AGAIN) => {
                let why = "is served already: another ebb runs, or set daemon.socket";
                anyhow::bail!(Error::new(ErrorKind::AddrInUse, format!("{shown} {why}")))
            }
            Err(Errno::CONNREFUSED) => std::fs::remove_file(path)
                .with_context(|| format!("cannot replace {shown}: remove it"))?,
            Err(Errno::NOENT) => {}
            Err(e) => anyhow::bail!(
                "{shown} exists, and whether it is in use is not known ({e}): set daemon.socket \
                 elsewhere, or remove it"
            ),
        },
        Ok(_) => anyhow::bail!("{shown} exists and is no socket: set daemon.socket elsewhere"),
        Err(_) => {}
    }
    let unix = socket()?;
    let listens = net::bind(&unix, &address).and_then(|()| {
        // Group-readable for monitoring: names of VMs and sizes, nothing secret, but not for
        // every user. Before it listens none can connect.
        rustix::fs::chmod(path, Mode::from_raw_mode(0o660))?;
        net::listen(&unix, 128)
    });
    listens.with_context(|| format!("cannot listen on {shown}"))?;
    Ok(unix.into())
}

/// Serves until the process ends, in a thread of its own.
pub fn serve(listeners: Listeners, shared: Shared, inbox: Inbox) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // On TCP any local user may connect.
    let (tcp_limit, unix_limit) = (server::limit(8, 64), server::limit(4, 256));
    std::thread::Builder::new().name("http".into()).spawn(move || {
        runtime.block_on(async move {
            let Ok(unix) = tokio::net::UnixListener::from_std(listeners.unix) else { return };
            let tcp = listeners.tcp.and_then(|tcp| tokio::net::TcpListener::from_std(tcp).ok());
            let on_tcp = async {
                if let Some(tcp) = tcp {
                    let next = async || Ok(tcp.accept().await?.0);
                    server::accept(next, on_loopback(shared.clone()), tcp_limit).await;
                }
            };
            let app = router(shared.clone()).merge(asking(inbox));
            let next = async || Ok(unix.accept().await?.0);
            tokio::join!(server::accept(next, app, unix_limit), on_tcp);
        });
    })?;
    Ok(())
}

fn asking(inbox: Inbox) -> Router {
    let look = |Of(inbox): Of<Inbox>| async move {
        inbox.wake();
        (StatusCode::ACCEPTED, "{}")
    };
    Router::new()
        .route("/v1/look", post(look))
        .route("/v1/reclaim", posted("a reclaim request", |i| &i.requests, reclaim))
        .route("/v1/merge", posted("a request about merging", |i| &i.wishes, Ok))
        .route("/v1/hands-off", posted("a request to leave a VM alone", |i| &i.hands, Ok))
        .layer(DefaultBodyLimit::max(4096))
        .with_state(inbox)
}

fn reclaim(request: Reclaim) -> Result<Reclaim, String> {
    request.bytes.map_or(Ok(()), |bytes| sizeable(bytes).map(drop))?;
    Ok(request)
}

/// Hands over what a client sends and this allows, and answers whether it was taken.
fn posted<T: DeserializeOwned + Send + 'static>(
    what: &'static str,
    list: fn(&Inbox) -> &Mutex<Vec<T>>,
    allowed: fn(T) -> Result<T, String>,
) -> MethodRouter<Inbox> {
    post(move |Of(inbox): Of<Inbox>, body: Bytes| async move {
        let wish = serde_json::from_slice(&body).map_err(|e| e.to_string()).and_then(allowed);
        match wish.map(|wish| inbox.put(list(&inbox), wish)) {
            Err(e) => (StatusCode::BAD_REQUEST, format!("not {what}: {e}\n")),
            Ok(true) => (StatusCode::ACCEPTED, "{}".into()),
            Ok(false) => (StatusCode::TOO_MANY_REQUESTS, "too many requests wait\n".into()),
        }
    })
}

fn router(shared: Shared) -> Router {
    let readers = Arc::new(Semaphore::new(RECORDS));
    Router::new()
        .route("/", get(|| async { INDEX }))
        .route("/v1/state", get(state))
        .route("/v1/plan", get(plan))
        .route("/v1/decisions", get(decisions))
        .route("/v1/record", get(|of, headers| async { record(of, readers, headers) }))
        .route("/metrics", get(metrics_page))
        .fallback(|| async { (StatusCode::NOT_FOUND, INDEX) })
        .with_state(shared)
}

fn on_loopback(shared: Shared) -> Router {
    let metrics = |of, uri: Uri, headers: HeaderMap| async move {
        if let Some(name) = foreign_name(&uri, &headers) {
            let why = format!("this is not “{name}”: ask for localhost or a loopback address\n");
            return Err((StatusCode::MISDIRECTED_REQUEST, why));
        }
        metrics_page(of).await
    };
    Router::new()
        .route("/metrics", get(metrics))
        .fallback(|| async { (StatusCode::NOT_FOUND, LOOPBACK_INDEX) })
        .with_state(shared)
}

/// The name that was asked for, where it is not one of a loopback interface: a page from
/// elsewhere may have had its own name resolved to this machine. Only browsers matter
/// here, and they always tell.
fn foreign_name(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let told = headers.get_all(header::HOST).iter().map(|h| String::from_utf8_lossy(h.as_bytes()));
    let asked = told.map(String::from).chain(uri.authority().map(|a| a.as_str().to_string()));
    asked.into_iter().find(|name| !is_own_name(name))
}

fn is_own_name(name: &str) -> bool {
    let loopback = |text: &str| text.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let host = match name.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None if loopback(name) => name,
        None => name.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost") || loopback(host)
}

async fn metrics_page(Of(shared): Of<Shared>) -> Result<Response, Refusal> {
    Ok(text("text/plain; version=0.0.4", shared.latest()?.metrics()))
}

async fn state(Of(shared): Of<Shared>) -> Result<Response, Refusal> {
    Ok(json(&*shared.latest()?.state()))
}

async fn decisions(Of(shared): Of<Shared>) -> Response {
    let decisions: Vec<Arc<Decision>> = shared.lock().decisions.iter().cloned().collect();
    json(&decisions.iter().map(|d| &**d).collect::<Vec<_>>())
}

/// The last plan; with `?memory=4GiB&count=3`, whether three more VMs of 4 GiB fit.
async fn plan(Of(shared): Of<Shared>, uri: Uri) -> Result<Response, Refusal> {
    let latest = shared.latest()?;
    let Some(query) = uri.query().filter(|q| !q.is_empty()) else {
        return Ok(json(&latest.tick.plan));
    };
    match parse_request(query) {
        Ok(request) => Ok(json(&admit(latest.supply(), &request))),
        Err(why) => Err((StatusCode::BAD_REQUEST, why + "\n")),
    }
}

/// The record: as zstd to those who take that, else as lines, unpacked while they are sent.
fn record(Of(shared): Of<Shared>, readers: Arc<Semaphore>, headers: HeaderMap) -> Response {
    let Ok(reader) = readers.try_acquire_owned() else {
        let why = "others are reading the record: try again\n";
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    let record = shared.lock().recorder.record();
    let accepts = headers.get(header::ACCEPT_ENCODING).and_then(|v| v.to_str().ok());
    let zstd = accepts.is_some_and(|a| a.split(',').any(|e| e.trim() == "zstd"));
    let left = match zstd {
        true => record.frames.iter().map(|f| f.len() as u64).sum(),
        false => record.text,
    };
    let from: Box<dyn Read + Send> = if zstd {
        Box::new(record.packed())
    } else if let Ok(lines) = record.lines() {
        Box::new(lines)
    } else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let body = Body::new(RecordBody { from, left, _reader: reader });
    let mut response = ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response();
    if zstd {
        let name = header::HeaderValue::from_static("zstd");
        response.headers_mut().insert(header::CONTENT_ENCODING, name);
    }
    response
}

/// Sends a record piece by piece: its lines are 15 to 27 times as long as what is held of them.
struct RecordBody {
    from: Box<dyn Read + Send>,
    left: u64,
    _reader: OwnedSemaphorePermit,
}

impl hyper::body::Body for RecordBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Task<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let mut piece = Vec::with_capacity(PIECE);
        Poll::Ready(match (&mut self.from).take(PIECE as u64).read_to_end(&mut piece) {
            Ok(0) => None,
            Ok(n) => {
                self.left = self.left.saturating_sub(n as u64);
                Some(Ok(Frame::data(piece.into())))
            }
            Err(e) => Some(Err(e)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Most VMs that are asked for at once: more is a slip.
const COUNT_MOST: u32 = 100_000;

fn parse_request(query: &str) -> Result<AdmissionRequest, String> {
    let mut request = AdmissionRequest { memory: Size::ZERO, count: 1 };
    for pair in query.split('&') {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "memory" => {
                let size = value.parse::<Size>().map_err(|e| e.to_string()).and_then(sizeable);
                request.memory = size.map_err(|e| format!("memory: {e}"))?
            }
            "count" => {
                let count = value.parse().ok().filter(|n| *n <= COUNT_MOST);
                request.count = count.ok_or(format!("count: a number from 0 to {COUNT_MOST}"))?;
            }
            _ => return Err(format!("unknown field “{key}”: memory=SIZE and count=NUMBER")),
        }
    }
    if request.memory == Size::ZERO {
        return Err("memory: the RAM of each VM is missing, as in memory=4GiB".into());
    }
    Ok(request)
}

const INDEX: &str = "Ebb. Here are: /v1/state /v1/plan /v1/decisions /v1/record /metrics\n";
const LOOPBACK_INDEX: &str = "Ebb. Here is /metrics; everything else is on the Unix socket\n";

fn json<T: serde::Serialize>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => text("application/json", body.into()),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

fn text(kind: &'static str, body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_roots_and_its_groups() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ebb.sock");
        let _listeners = bind(path.to_str().unwrap(), None).unwrap();
        let file = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(file.permissions().mode() & 0o7777, 0o660);
        assert_eq!(file.uid(), rustix::process::geteuid().as_raw());
    }

    #[test]
    fn only_a_socket_that_is_nobodys_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ebb.sock");
        let bind = || bind(path.to_str().unwrap(), None).map(drop).map_err(|e| e.to_string());
        let there = || std::fs::symlink_metadata(&path).is_ok();
        // Dead: the daemon was killed.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert_eq!((there(), bind()), (true, Ok(())));
        std::fs::remove_file(&path).unwrap();
        // Alive, and as busy as can be: nobody accepts.
        let socket = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
        };
        let (listener, address) = (socket(), SocketAddrUnix::new(&path).unwrap());
        net::bind(&listener, &address).unwrap();
        net::listen(&listener, 0).unwrap();
        let clients: Vec<_> = (0..4).map(|_| socket()).collect();
        let full = clients.iter().any(|c| net::connect(c, &address) == Err(Errno::AGAIN));
        assert!(full && bind().unwrap_err().contains("served already") && there());
        drop((listener, clients));
        std::fs::remove_file(&path).unwrap();
        // Another kind of socket, such as syslog's, cannot be tried.
        let other = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert!(bind().unwrap_err().contains("is not known") && there());
        drop(other);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(bind().unwrap_err().contains("is no socket") && there());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.path().join("x"), &path).unwrap();
        assert!(bind().unwrap_err().contains("is no socket") && there());
    }

    #[test]
    fn a_name_of_this_machine_is_told_from_others() {
        for name in ["localhost", "LocalHost:9177", "127.0.0.1", "127.9.0.1:80", "[::1]:1", "::1"] {
            assert!(is_own_name(name), "{name}");
        }
        for name in ["", "evil.example", "localhost.evil.example", "10.0.0.1:9177", "[::2]:1", ":"]
        {
            assert!(!is_own_name(name), "{name}");
        }
    }

    #[test]
    fn a_question_is_understood_or_refused_in_words() {
        let request = AdmissionRequest { memory: Size::gib(4), count: 3 };
        assert_eq!(parse_request("memory=4GiB&count=3"), Ok(request));
        assert_eq!(parse_request("memory=4294967296").map(|a| a.count), Ok(1));
        for (query, said) in [
            ("count=3", "memory: the RAM"),
            ("memory=0", "memory: 0 B is below 1 MiB"),
            ("memory=4096", "memory: 4 KiB is below 1 MiB: write the unit"),
            ("memory=much", "memory: “much” is not a size"),
            ("memory=1GiB&count=-1", "count: a number"),
            ("memory=1GiB&count=9999999", "count: a number"),
            ("ram=1", "unknown field “ram”"),
        ] {
            let why = parse_request(query).unwrap_err();
            assert!(why.starts_with(said), "{query}: {why}");
        }
    }
}
