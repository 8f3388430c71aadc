//! `ebb hands-off` and `ebb hands-on`: a VM is left alone while others handle its memory.
//!
//! For an operator who plugs in a device, loads a snapshot or replaces a QEMU: when `hands-off` has
//! ended with 0, nothing of Ebb's touches the VM's memory until the time is up.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ebb_core::sample::HandsOff;

use crate::cmd::explain;
use crate::daemon::HandsOffWish;
use crate::daemon_client;
use crate::table::emit;
use crate::view::{State, Vm};

/// Between two looks.
const ROUND: Duration = Duration::from_millis(100);
/// An agent ends what it does between two windows, a page-out within a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// Has the VM left alone; `false`: it is not known to be by now.
pub fn off(socket: &str, name: &str, time: Duration) -> Result<bool> {
    let ms = time.as_millis() as u64;
    let asked = Instant::now();
    // An earlier request that still holds is not this one, which may have failed.
    let taken = |h: &HandsOff| h.left_ms + asked.elapsed().as_millis() as u64 >= ms;
    let done = |vm: &Vm| vm.hands_off.is_some_and(|h| h.done && taken(&h));
    let Some(vm) = ask(socket, name, ms, done)? else {
        bail!(
            "{name}: after 30 s Ebb may still touch its memory, or the request could not be \
             written down; it is left alone as soon as its agent and QEMU answer and no scan \
             reads it: `ebb explain {name}` and the journal say what is missing"
        );
    };
    // An earlier request may hold longer.
    let left_ms = vm.hands_off.map_or(ms, |h| h.left_ms).max(ms);
    emit(&format!("{name}: hands off for {} s\n", left_ms.div_ceil(1000)))?;
    Ok(true)
}

/// Has Ebb go on with it.
pub fn on(socket: &str, name: &str) -> Result<bool> {
    if ask(socket, name, 0, |vm| vm.hands_off.is_none())?.is_none() {
        bail!("{name}: it is still left alone");
    }
    emit(&format!("{name}: hands on\n"))?;
    Ok(true)
}

/// Tells the daemon; the VM as soon as that is `done`.
fn ask(socket: &str, name: &str, ms: u64, done: impl Fn(&Vm) -> bool) -> Result<Option<Vm>> {
    let state: State = daemon_client::get_json(socket, "/v1/state")?;
    explain::find(&state, name)?;
    if state.daemon.dry_run {
        bail!("the daemon is in a dry run: it touches no VM");
    }
    let (tick, wish) = (state.tick, HandsOffWish { vm: name.into(), ms });
    daemon_client::post(socket, "/v1/hands-off", &serde_json::to_string(&wish)?)?;
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        std::thread::sleep(ROUND);
        let state: State = daemon_client::get_json_until(socket, "/v1/state", until)?;
        let Some(vm) = state.vms.into_iter().find(|vm| vm.name == name) else {
            bail!("{name}: it has ended, or is called otherwise now: see `ebb status`");
        };
        // A tick that began before the request came says nothing. A reload counts ticks anew.
        if state.tick != tick && done(&vm) {
            return Ok(Some(vm));
        }
    }
    Ok(None)
}

#[cfg(test)]
pub mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use tempfile::TempDir;

    use super::*;

    /// A daemon that answers so whether it is asked for something or told; `None`: it is being
    /// reloaded, and does not answer. Its socket.
    pub fn daemon(
        mut answer: impl FnMut(bool) -> Option<String> + Send + 'static,
    ) -> (TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ebb.sock");
        let socket = path.display().to_string();
        let mut listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut request = [0; 4096];
                let read = stream.read(&mut request).unwrap_or(0);
                match answer(request[..read].starts_with(b"GET")) {
                    Some(body) => drop(write!(stream, "HTTP/1.1 200 OK\r\n\r\n{body}")),
                    None => {
                        std::fs::remove_file(&path).unwrap();
                        drop((stream, listener));
                        std::thread::sleep(Duration::from_millis(300));
                        listener = UnixListener::bind(&path).unwrap();
                    }
                }
            }
        });
        (dir, socket)
    }

    /// A daemon of one VM, `web`, that is reloaded after it has told its state once; its socket.
    pub fn reloaded_soon() -> (TempDir, String) {
        let mut tick = 100;
        daemon(move |asked| {
            if !asked {
                return Some(String::new());
            }
            let body = format!("{{\"tick\": {tick}, \"vms\": [{{\"name\": \"web\"}}]}}");
            tick = tick % 100 + 2;
            Some(body)
        })
    }

    #[test]
    fn a_daemon_that_was_reloaded_is_not_waited_for() {
        let (_dir, socket) = reloaded_soon();
        let begun = Instant::now();
        assert!(on(&socket, "web").unwrap());
        assert!(begun.elapsed() < PATIENCE / 2);
    }
}
