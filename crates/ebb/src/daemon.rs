//! The machine as the tick loop sees it: `LinuxHost` plus state file and signals.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::config::{Config, HANDS_OFF, INTERVALS, KSM_NOTE, MergeMode};
use ebb_core::plan::{Action, MergePlan, MergeWish, Outcome, Plan, Reclaim};
use ebb_core::sample::{Link, RunState, Sample, VmId};
use ebb_core::state::Owned;
use ebb_core::tick::{Host, Next};
use ebb_core::units::{Bytes, Stamp};
use ebb_host::hands_off::MOST_MS;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::trust::TrustRules;
use ebb_host::waker::Waker;
use serde::{Deserialize, Serialize};

use crate::log::say;
use crate::reexec;
use crate::signals::{self, Signals};
use crate::state::StateFile;

/// How long before a fast tick guests are asked for fresh numbers.
const KICK_AHEAD_MS: u64 = 40;
/// Events do not make ticks follow one another faster than this.
const LEAST_TICK_MS: u64 = 150;

pub struct Daemon {
    pub host: LinuxHost,
    pub state: Option<StateFile>,
    signals: Signals,
    tick_ms: u64,
    read_at: Stamp,
    running: Vec<VmId>,
    pub inbox: Inbox,
}

/// What clients ask of the loop; a request wakes it.
#[derive(Clone)]
pub struct Inbox {
    pub requests: Arc<Mutex<Vec<Reclaim>>>,
    pub wishes: Arc<Mutex<Vec<MergeWish>>>,
    pub hands: Arc<Mutex<Vec<HandsOffWish>>>,
    waker: Waker,
}

/// The operator's request to leave a VM alone, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandsOffWish {
    pub vm: String,
    /// How long, ms; 0: no longer.
    pub ms: u64,
}

/// Requests that may wait at once: more than one a VM is no use.
const REQUESTS: usize = 1000;

impl Inbox {
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Hands a wish to the loop; `false` where too many wait.
    pub fn put<T>(&self, list: &Mutex<Vec<T>>, item: T) -> bool {
        let mut list = list.lock().unwrap_or_else(|e| e.into_inner());
        if list.len() >= REQUESTS {
            return false;
        }
        list.push(item);
        self.waker.wake();
        true
    }
}

fn taken<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *list.lock().unwrap_or_else(|e| e.into_inner()))
}

/// What to look at, from the configuration.
pub fn options(config: &Config) -> Options {
    let merges = config.merge.mode != MergeMode::Off;
    Options {
        ksm_note: merges.then(|| beside(&config.state_file, KSM_NOTE)),
        config: config.clone(),
        trust: trust(config),
        ..Options::default()
    }
}

/// Which processes are taken for VMs, by the configuration.
pub fn trust(config: &Config) -> TrustRules {
    let (users, programs) = (config.users.clone(), config.programs.clone());
    TrustRules { users: Some(users), programs: Some(programs), containers: config.containers }
}

/// A file beside the state file.
pub fn beside(state_file: &str, name: &str) -> PathBuf {
    Path::new(state_file).with_file_name(name)
}

impl Daemon {
    /// Opens the machine. Without a state file nothing can be taken.
    pub fn new(config: &Config, state: Option<StateFile>, signals: Signals) -> Result<Daemon> {
        let file = |name| state.is_some().then(|| beside(&config.state_file, name));
        let options = Options {
            look_only: state.is_none(),
            hands_off: file(HANDS_OFF),
            intervals: file(INTERVALS),
            ..options(config)
        };
        let host = LinuxHost::new(options).context("cannot watch the host")?;
        let inbox = Inbox {
            requests: Arc::default(),
            wishes: Arc::default(),
            hands: Arc::default(),
            waker: host.waker(),
        };
        Ok(Daemon {
            inbox,
            host,
            state,
            signals,
            tick_ms: config.tick_ms,
            read_at: Stamp(0),
            running: Vec::new(),
        })
    }

    /// A signal ends the loop at once.
    pub fn wake_on_signals(&self) -> Result<()> {
        let waker = self.host.waker();
        let mut signals = signal_hook::iterator::Signals::new(signals::SIGNALS)?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            signals.forever().for_each(|_| waker.wake());
        })?;
        Ok(())
    }

    /// Whether it is to begin anew, and can: a bad configuration is said, and nothing else.
    fn prepare_reload(&mut self) -> bool {
        if !self.signals.reloads() {
            return false;
        }
        self.host.leave_shared();
        let ready = reexec::check();
        if let Err(why) = &ready {
            say(&format!("SIGHUP: {why:#}; going on as before"));
            self.signals.reload_refused();
        }
        ready.is_ok()
    }
}

impl Host for Daemon {
    fn now(&self) -> Stamp {
        LinuxHost::now()
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        for wish in taken(&self.inbox.hands) {
            match self.host.hands_off(&wish.vm, wish.ms) {
                Ok(()) if wish.ms == 0 => say(&format!("{}: hands on, as was asked", wish.vm)),
                Ok(()) => {
                    let s = wish.ms.min(MOST_MS).div_ceil(1000);
                    say(&format!("{}: hands off for {s} s, as was asked", wish.vm));
                }
                Err(why) => say(&format!("{}: not left alone as was asked: {why}", wish.vm)),
            }
        }
        let sample = self.host.sample_owed(owed);
        self.read_at = sample.at;
        let runs = |v: &&ebb_core::sample::VmSample| {
            v.link == Link::Up && v.run == Some(RunState::Running) && v.balloon.is_some()
        };
        self.running = sample.vms.iter().filter(runs).map(|v| v.id).collect();
        sample
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        let Some(state) = &mut self.state else { return Err("no state file".into()) };
        state.write(owned).map_err(|e| format!("{e:#}"))
    }

    fn note(&mut self, notes: &[(VmId, Option<Bytes>)]) {
        self.host.note(notes);
    }

    fn remembers(&mut self) -> bool {
        self.state.as_ref().is_none_or(StateFile::is_there)
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.host.apply(actions)
    }

    fn start(&mut self, plan: &Plan) {
        self.host.start(plan);
    }

    fn merge(&mut self, plan: &MergePlan) {
        self.host.merge(plan);
    }

    fn requests(&mut self) -> Vec<Reclaim> {
        taken(&self.inbox.requests)
    }

    fn wishes(&mut self) -> Vec<MergeWish> {
        taken(&self.inbox.wishes)
    }

    fn wait(&mut self, next: &Next) -> bool {
        let until = next.at;
        // On fast ticks the guests are asked right before, so that the numbers a
        // tick sees are fresh; otherwise QEMU's own interval is good enough.
        let fast = until.since(self.read_at) < self.tick_ms;
        let mut kicked = !fast;
        loop {
            if self.signals.stops() || self.prepare_reload() {
                return false;
            }
            let now = LinuxHost::now();
            let due = if kicked { until } else { Stamp(until.0.saturating_sub(KICK_AHEAD_MS)) };
            if now >= due {
                if kicked {
                    self.host.rest(&next.resting);
                    return true;
                }
                self.running.retain(|id| next.asks_anew(*id));
                self.host.kick_stats(&self.running);
                kicked = true;
                continue;
            }
            let left = Duration::from_millis(due.since(LinuxHost::now()));
            let came_early = self.host.wait(Instant::now() + left);
            if came_early && !self.signals.any() {
                let soonest = self.read_at.plus(LEAST_TICK_MS).min(until);
                std::thread::sleep(Duration::from_millis(soonest.since(LinuxHost::now())));
                return true;
            }
        }
    }
}
