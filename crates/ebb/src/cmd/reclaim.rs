//! `ebb reclaim`: asks the daemon for idle memory now, and measures the result.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ebb_core::plan::Reclaim;
use ebb_core::units::Bytes;
use serde::Serialize;

use crate::cmd::explain;
use crate::daemon_client;
use crate::table::emit_as;
use crate::view::State;

/// It is over when nothing has moved in this time.
const QUIET: Duration = Duration::from_millis(2500);
/// A wish for everything is said again this often, at first.
const AGAIN: Duration = Duration::from_millis(300);
/// VMs of which it is said why nothing was taken.
const REASONS: usize = 5;
/// It is over then in any case.
const PATIENCE: Duration = Duration::from_secs(30);

/// Measured on the host: what there is, and in the end by how much it has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Measured {
    /// The VMs' residency; its fall.
    resident: Bytes,
    /// The host's free memory; its rise: the proof, but others use it too.
    host_free: Bytes,
    /// The VMs' cgroup usage, where they have a common one; its fall.
    pool: Option<Bytes>,
    /// Recycled page by page.
    recycled: Bytes,
    ballooned: Bytes,
    /// Zero pages that were freed.
    zeros: Bytes,
    /// Until the last movement, seconds.
    seconds: f64,
}

impl Measured {
    fn of(state: &State, request: &Reclaim) -> Measured {
        let vms = || state.vms.iter().filter(|v| request.means(&v.name));
        Measured {
            resident: vms().filter_map(|v| v.resident).sum(),
            host_free: state.host.free.unwrap_or_default(),
            pool: state.host.pool.as_ref().map(|p| p.usage),
            recycled: vms().filter_map(|v| v.agent.as_ref()).map(|a| a.counters.recycled).sum(),
            ballooned: vms().map(|v| v.ballooned).sum(),
            zeros: vms().filter_map(|v| v.tasks.zeros.as_ref()).map(|z| z.freed).sum(),
            seconds: 0.0,
        }
    }

    fn moved(&self, other: &Measured) -> bool {
        let far = |a: Bytes, b: Bytes| a.abs_diff(b) >= Bytes::mib(2);
        far(self.resident, other.resident)
            || far(self.recycled, other.recycled)
            || far(self.ballooned, other.ballooned)
            || far(self.zeros, other.zeros)
    }

    fn taken(&self) -> Bytes {
        self.recycled + self.ballooned + self.zeros
    }
}

/// Asks, watches, tells; `false` where nothing came.
pub fn main(socket: &str, request: Reclaim, json: bool) -> Result<bool> {
    let state = fresh(socket)?;
    if let Some(name) = &request.vm {
        explain::find(&state, name)?;
    }
    if state.daemon.dry_run {
        bail!("the daemon is in a dry run: it changes nothing");
    }
    let before = Measured::of(&state, &request);
    daemon_client::post(socket, "/v1/reclaim", &serde_json::to_string(&request)?)?;
    let (came, state) = watch(socket, &request, before)?;
    emit_as(json, &came, || Ok(text(&came, &reasons(&state, &request))))?;
    Ok(came.taken() > Bytes::ZERO)
}

/// The state of a tick that began after this was called.
fn fresh(socket: &str) -> Result<State> {
    let mut old: State = daemon_client::get_json(socket, "/v1/state")?;
    daemon_client::post(socket, "/v1/look", "{}")?;
    let until = Instant::now() + PATIENCE;
    loop {
        let state: State = daemon_client::get_json_until(socket, "/v1/state", until)?;
        let late = Instant::now() > until;
        if state.tick > old.tick + 1 || state.tick > old.tick && late {
            return Ok(state);
        }
        if state.tick < old.tick {
            // A reload counts ticks anew. Its first one may not know all sizes yet.
            old = state;
        }
        if late {
            bail!("the daemon has not finished a tick in {} s", PATIENCE.as_secs());
        }
        // The first tick may have begun before: a second one is asked for. A daemon that is being
        // reloaded makes one without that.
        let _ = daemon_client::post(socket, "/v1/look", "{}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What has changed when nothing moves any more, and the last state.
fn watch(socket: &str, request: &Reclaim, before: Measured) -> Result<(Measured, State)> {
    let began = Instant::now();
    let (mut last, mut moved) = (before, began);
    let mut state = State::default();
    let mut again = AGAIN;
    while moved.elapsed() < QUIET && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(100));
        // What the guest freed last becomes visible a moment later: it keeps lists
        // of its own for each CPU. A wish for all means that as well.
        if request.bytes.is_none() && began.elapsed() >= again && again < QUIET {
            again += AGAIN;
            // A daemon that is being reloaded does not hear it.
            let _ = daemon_client::post(socket, "/v1/reclaim", &serde_json::to_string(request)?);
        }
        let until = began + PATIENCE;
        state = daemon_client::get_json_until(socket, "/v1/state", until)?;
        let now = Measured::of(&state, request);
        if now.moved(&last) {
            (last, moved) = (now, Instant::now());
        }
    }
    let came = Measured {
        resident: before.resident - last.resident,
        host_free: last.host_free - before.host_free,
        pool: before.pool.zip(last.pool).map(|(b, l)| b - l),
        recycled: last.recycled - before.recycled,
        ballooned: last.ballooned - before.ballooned,
        zeros: last.zeros - before.zeros,
        seconds: moved.duration_since(began).as_secs_f64(),
    };
    Ok((came, state))
}

/// Why the VMs that are meant keep what they have, of the first few.
fn reasons(state: &State, request: &Reclaim) -> String {
    let meant = state.vms.iter().filter(|v| request.means(&v.name) && !v.verdict.is_empty());
    meant.take(REASONS).map(|v| format!("  {}: {}\n", v.name, v.verdict)).collect()
}

fn text(c: &Measured, reasons: &str) -> String {
    if c.taken() == Bytes::ZERO {
        return format!("nothing was taken; `ebb explain VM` says more\n{reasons}");
    }
    let pool = c.pool.map_or(String::new(), |p| format!(", cgroup usage fell by {p}"));
    let zeros = c.zeros.if_any(|zeros| format!(", {zeros} of zeros freed"));
    format!(
        "{} recycled, {} ballooned{zeros} in {:.1} s: residency fell by {}, host memory free rose by {}{pool}\n",
        c.recycled, c.ballooned, c.seconds, c.resident, c.host_free
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::hands_off::tests::{daemon, reloaded_soon};

    #[test]
    fn the_state_of_a_daemon_that_was_reloaded_is_fresh() {
        let (_dir, socket) = reloaded_soon();
        assert_eq!(fresh(&socket).unwrap().tick, 4, "not its first tick");
    }

    #[test]
    fn a_daemon_that_is_reloaded_is_watched_on() {
        let mut told = 0;
        let (_dir, socket) = daemon(move |asked| {
            told += usize::from(!asked);
            (asked || told > 1).then(|| r#"{"host": {"free": 7}}"#.into())
        });
        let request = Reclaim { vm: None, bytes: None };
        watch(&socket, &request, Measured::default()).unwrap();
    }

    #[test]
    fn where_nothing_was_taken_it_is_said_of_whom_and_why() {
        let text_of = r#"{"vms": [{"name": "a", "verdict": "hands off for 60 s more"},
            {"name": "b", "verdict": "it has no balloon"}]}"#;
        let state: State = serde_json::from_str(text_of).unwrap();
        let said = |vm: Option<&str>| {
            let request = Reclaim { vm: vm.map(Into::into), bytes: None };
            text(&Measured::default(), &reasons(&state, &request))
        };
        let first = "nothing was taken; `ebb explain VM` says more\n";
        assert_eq!(said(Some("b")), format!("{first}  b: it has no balloon\n"));
        assert_eq!(said(None).lines().count(), 3);
    }

    #[test]
    fn zero_pages_that_were_freed_are_something_that_was_taken() {
        let nothing = Measured::default();
        assert_eq!(nothing.taken(), Bytes::ZERO);
        let zeros = Measured { zeros: Bytes::mib(7), ..Measured::default() };
        let said = text(&zeros, "");
        assert!(
            said.starts_with("0 B recycled, 0 B ballooned, 7 MiB of zeros freed in "),
            "{said}"
        );
        assert_eq!(zeros.taken(), Bytes::mib(7));
    }
}
