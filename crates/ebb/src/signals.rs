//! The signals to the daemon, noted from its first moment on: SIGTERM and SIGINT stop it, SIGHUP
//! reloads it.
//!
//! An unhandled signal ends the process, which systemd takes for a clean end: nothing
//! would be given back. So they are noted before anything else is done, and held back while
//! the process executes itself anew.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use ebb_host::sys;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

pub const SIGNALS: [i32; 3] = [SIGTERM, SIGINT, SIGHUP];

#[derive(Clone, Debug)]
pub struct Signals {
    stop: Arc<AtomicBool>,
    reload: Arc<AtomicBool>,
}

impl Signals {
    /// Notes them from now on. On a terminal SIGHUP stops the daemon as well: it tells that the
    /// terminal is gone.
    pub fn note() -> Result<Signals> {
        let signals = Signals { stop: Arc::default(), reload: Arc::default() };
        let terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
        for signal in SIGNALS {
            let stops = signal != SIGHUP || terminal;
            let flag = if stops { &signals.stop } else { &signals.reload };
            signal_hook::flag::register(signal, Arc::clone(flag))?;
        }
        // Those that came while the process executed itself come now.
        sys::hold_signals(&SIGNALS, false)?;
        Ok(signals)
    }

    pub fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub fn reloads(&self) -> bool {
        self.reload.load(Ordering::SeqCst)
    }

    /// The reload that was asked for cannot be done: the daemon goes on.
    pub fn reload_refused(&self) {
        self.reload.store(false, Ordering::SeqCst);
    }

    pub fn any(&self) -> bool {
        self.stops() || self.reloads()
    }

    /// Holds them back until the next [`Signals::note`], also where that is in another
    /// program that this process executes. Whether none has come that stops the daemon.
    pub fn hold(&self) -> Result<bool> {
        sys::hold_signals(&SIGNALS, true)?;
        Ok(!self.stops())
    }
}
