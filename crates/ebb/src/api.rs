//! The HTTP interface, on a Unix socket and, opt-in, on loopback. All of it reads;
//! only `POST /v1/reclaim`, `/v1/merge` and `/v1/look` (a tick now) ask for something,
//! and only on the Unix socket, whose file mode says who may.
//!
//! The tick loop publishes, this serves; the two share one lock that is held only
//! to swap or clone a pointer, so that no client can slow a tick.

use std::collections::VecDeque;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ebb_core::plan::{MergeWish, Plan, Reclaim};
use ebb_core::policy::protect::{Ask, Stock, admit};
use ebb_core::units::Bytes as Size;

use crate::daemon::Inbox;
use crate::metrics;
use crate::recorder::Recorder;
use crate::view::{Decision, State};

/// Decisions kept for `explain`: hours of a calm host, minutes of a wild one.
const DECISIONS: usize = 2000;

/// What the loop publishes.
#[derive(Default)]
pub struct Published {
    /// The view of the last tick.
    pub state: Arc<State>,
    /// Its plan.
    pub plan: Arc<Plan>,
    /// What there is to admit VMs with.
    pub stock: Arc<Stock>,
    /// The last decisions, oldest first.
    pub decisions: VecDeque<Decision>,
    /// The flight recorder.
    pub recorder: Recorder,
}

impl Published {
    /// Adds decisions, drops the oldest.
    pub fn decided(&mut self, new: Vec<Decision>) {
        self.decisions.extend(new);
        while self.decisions.len() > DECISIONS {
            self.decisions.pop_front();
        }
    }
}

/// Shared between loop and server.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Published>>);

impl Shared {
    /// What is published, locked. A panic elsewhere does not poison it: each
    /// field is replaced whole.
    pub fn lock(&self) -> MutexGuard<'_, Published> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Sockets that are bound before the daemon says it is ready.
pub struct Listeners {
    unix: std::os::unix::net::UnixListener,
    tcp: Option<std::net::TcpListener>,
}

/// Binds them. A socket file that nobody listens on is replaced.
pub fn bind(socket: &str, listen: Option<&str>) -> Result<Listeners> {
    let path = Path::new(socket);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| {
            format!("cannot create {}: run as root, or set daemon.socket", dir.display())
        })?;
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        anyhow::bail!("{socket} is served already: another ebb runs, or set daemon.socket");
    }
    match std::fs::symlink_metadata(path) {
        Ok(m) if std::os::unix::fs::FileTypeExt::is_socket(&m.file_type()) => {
            std::fs::remove_file(path).with_context(|| format!("cannot replace {socket}"))?;
        }
        Ok(_) => anyhow::bail!("{socket} exists and is no socket: set daemon.socket elsewhere"),
        Err(_) => {}
    }
    let unix = std::os::unix::net::UnixListener::bind(path)
        .with_context(|| format!("cannot listen on {socket}"))?;
    // Group-readable for monitoring: names of VMs and sizes, nothing secret, but
    // nobody else's either.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    unix.set_nonblocking(true)?;
    let tcp = match listen {
        None => None,
        Some(address) => {
            let tcp = std::net::TcpListener::bind(address)
                .with_context(|| format!("cannot listen on {address} (daemon.listen)"))?;
            tcp.set_nonblocking(true)?;
            Some(tcp)
        }
    };
    Ok(Listeners { unix, tcp })
}

/// Serves until the process ends, in a thread of its own.
pub fn serve(listeners: Listeners, shared: Shared, inbox: Inbox) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("http".into()).spawn(move || {
        runtime.block_on(async move {
            let app = router(shared);
            let Ok(unix) = tokio::net::UnixListener::from_std(listeners.unix) else { return };
            let on_unix = axum::serve(unix, app.clone().merge(asking(inbox)));
            match listeners.tcp.map(tokio::net::TcpListener::from_std) {
                Some(Ok(tcp)) => {
                    let on_tcp = axum::serve(tcp, app);
                    let _ = tokio::join!(on_unix.into_future(), on_tcp.into_future());
                }
                _ => {
                    let _ = on_unix.await;
                }
            }
        });
    })?;
    Ok(())
}

/// The part that asks.
fn asking(inbox: Inbox) -> Router {
    let looker = inbox.clone();
    let look = || async move {
        looker.wake();
        (StatusCode::ACCEPTED, "{}")
    };
    let wisher = inbox.clone();
    let reclaim = |body: Bytes| async move {
        taken("a reclaim request", serde_json::from_slice(&body), |r: Reclaim| inbox.send(r))
    };
    let merge = |body: Bytes| async move {
        taken("a word on merging", serde_json::from_slice(&body), |w: MergeWish| wisher.wish(w))
    };
    Router::new()
        .route("/v1/look", post(look))
        .route("/v1/reclaim", post(reclaim))
        .route("/v1/merge", post(merge))
        .layer(DefaultBodyLimit::max(4096))
}

/// Hands over what a client sent, and tells what came of it.
fn taken<T>(
    what: &str,
    read: serde_json::Result<T>,
    send: impl FnOnce(T) -> bool,
) -> (StatusCode, String) {
    match read.map(send) {
        Err(e) => (StatusCode::BAD_REQUEST, format!("not {what}: {e}\n")),
        Ok(true) => (StatusCode::ACCEPTED, "{}".into()),
        Ok(false) => (StatusCode::TOO_MANY_REQUESTS, "too many requests wait\n".into()),
    }
}

fn router(shared: Shared) -> Router {
    let (a, b, c, d, e) = (shared.clone(), shared.clone(), shared.clone(), shared.clone(), shared);
    Router::new()
        .route("/", get(|| async { INDEX }))
        .route("/v1/state", get(|| async move { json(&*a.lock().state.clone()) }))
        .route("/v1/plan", get(|uri: Uri| async move { plan(&b, &uri) }))
        .route("/v1/decisions", get(|| async move { json(&c.lock().decisions.clone()) }))
        .route(
            "/v1/record",
            get(|| async move { text("application/x-ndjson", d.lock().recorder.dump()) }),
        )
        .route(
            "/metrics",
            get(|| async move {
                let state = e.lock().state.clone();
                text("text/plain; version=0.0.4", metrics::render(&state).into_bytes())
            }),
        )
        .fallback(|| async { (StatusCode::NOT_FOUND, INDEX) })
}

/// The last plan; with `?memory=4GiB&count=3`, whether so many VMs more fit.
fn plan(shared: &Shared, uri: &Uri) -> Response {
    let Some(query) = uri.query().filter(|q| !q.is_empty()) else {
        let plan = shared.lock().plan.clone();
        return json(&*plan);
    };
    match parse_ask(query) {
        Ok(ask) => {
            let stock = shared.lock().stock.clone();
            json(&admit(&stock, &ask))
        }
        Err(why) => (StatusCode::BAD_REQUEST, why + "\n").into_response(),
    }
}

/// Most VMs that are asked for at once: more is a slip.
const COUNT_MOST: u32 = 100_000;

fn parse_ask(query: &str) -> Result<Ask, String> {
    let mut ask = Ask { memory: Size::ZERO, count: 1 };
    for pair in query.split('&') {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "memory" => ask.memory = value.parse::<Size>().map_err(|e| format!("memory: {e}"))?,
            "count" => {
                let count = value.parse().ok().filter(|n| *n <= COUNT_MOST);
                ask.count = count.ok_or(format!("count: a number from 0 to {COUNT_MOST}"))?;
            }
            _ => return Err(format!("unknown field “{key}”: memory=SIZE and count=NUMBER")),
        }
    }
    if ask.memory == Size::ZERO {
        return Err("memory: the RAM of each VM is missing, as in memory=4GiB".into());
    }
    Ok(ask)
}

const INDEX: &str = "Ebb. Here are: /v1/state /v1/plan /v1/decisions /v1/record /metrics\n";

fn json<T: serde::Serialize>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => text("application/json", body),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

fn text(kind: &'static str, body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_understood_or_refused_in_words() {
        let ask = Ask { memory: Size::gib(4), count: 3 };
        assert_eq!(parse_ask("memory=4GiB&count=3"), Ok(ask));
        assert_eq!(parse_ask("memory=4294967296").map(|a| a.count), Ok(1));
        for (query, said) in [
            ("count=3", "memory: the RAM"),
            ("memory=0", "memory: the RAM"),
            ("memory=much", "memory: “much” is not a size"),
            ("memory=1GiB&count=-1", "count: a number"),
            ("memory=1GiB&count=9999999", "count: a number"),
            ("ram=1", "unknown field “ram”"),
        ] {
            let why = parse_ask(query).unwrap_err();
            assert!(why.starts_with(said), "{query}: {why}");
        }
    }
}
