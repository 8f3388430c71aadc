//! The HTTP interface, on a Unix socket and, opt-in, on loopback. All of it reads;
//! only `POST /v1/reclaim` and `POST /v1/look` (a tick now) ask for something, and
//! only on the Unix socket, whose file mode says who may.
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
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ebb_core::plan::{Plan, Reclaim};

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
    let reclaim = |body: Bytes| async move {
        match serde_json::from_slice::<Reclaim>(&body) {
            Err(e) => (StatusCode::BAD_REQUEST, format!("not a reclaim request: {e}\n")),
            Ok(r) => match inbox.send(r) {
                true => (StatusCode::ACCEPTED, "{}".to_string()),
                false => (StatusCode::TOO_MANY_REQUESTS, "too many requests wait\n".to_string()),
            },
        }
    };
    Router::new()
        .route("/v1/look", post(look))
        .route("/v1/reclaim", post(reclaim))
        .layer(DefaultBodyLimit::max(4096))
}

fn router(shared: Shared) -> Router {
    let (a, b, c, d, e) = (shared.clone(), shared.clone(), shared.clone(), shared.clone(), shared);
    Router::new()
        .route("/", get(|| async { INDEX }))
        .route("/v1/state", get(|| async move { json(&*a.lock().state.clone()) }))
        .route("/v1/plan", get(|| async move { json(&*b.lock().plan.clone()) }))
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
