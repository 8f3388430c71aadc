//! `ebb run`: the daemon.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::config::{Config, MergeMode};
use ebb_core::memory::Owned;
use ebb_core::model::{Model, Pressure};
use ebb_core::plan::{LastResort, Plan};
use ebb_core::policy::protect::stock;
use ebb_core::sample::Problem;
use ebb_core::tick::{Engine, Host, Tick, Wake, run};
use ebb_host::act::ksm::{KsmOwner, describe};
use ebb_host::probe::process::{read_stat, read_status};
use ebb_host::root::Root;
use sd_notify::NotifyState;

use crate::anew;
use crate::api::{self, Shared};
use crate::cmd::merge;
use crate::daemon::{Daemon, ksm_note};
use crate::recorder::{self, Head};
use crate::state::StateFile;
use crate::view::{self, State};

/// How long QEMUs and guests may take when Ebb stops. What is left then stays written
/// down; `TimeoutStopSec=` of the unit is longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs until a signal.
pub fn main(config: Config, dry_run: bool, record: Option<String>, verbose: bool) -> Result<()> {
    anew::begin();
    let state = if dry_run { None } else { Some(StateFile::open(&config.state_file)?) };
    let mut owned = state.as_ref().map_or(Ok(Owned::default()), StateFile::read)?;
    let listeners = api::bind(&config.socket, config.listen.as_deref())?;
    if let Some(state) = &state {
        begin_merging(&config, state, &mut owned)?;
    }
    let mut daemon = Daemon::new(&config, state)?;
    daemon.stop_on_signals()?;
    let mut engine = Engine::new(config.clone(), dry_run);
    let remembered = if dry_run { None } else { anew::handed_over(&config.state_file) };
    match &remembered {
        Some(_) => say("begun anew: what was remembered is taken over"),
        None if !owned.vms.is_empty() => {
            say(&format!("an earlier daemon had taken memory from {}: owned again", names(&owned)));
        }
        None => {}
    }
    if remembered.is_some() || !owned.is_empty() {
        engine.adopt(owned, remembered);
    }
    let shared = Shared::default();
    let head = Head::new(&config, &engine.memory);
    let mut observer = Observer::new(head, shared.clone(), dry_run, record, verbose)?;
    // The first tick before the first answer: nobody sees an empty state.
    let (tick, mut model) = engine.step(&mut daemon);
    observer.observe(&engine, &tick, &model);
    api::serve(listeners, shared, daemon.inbox())?;
    say(&format!(
        "ebb {} watches {} VMs, answers on {}{}",
        env!("CARGO_PKG_VERSION"),
        model.vms.len(),
        config.socket,
        if dry_run { "; dry run: nothing is changed" } else { "" }
    ));
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    if daemon.wait(engine.next(&model)) != Wake::Stop {
        model = run(&mut engine, &mut daemon, |engine, tick, model| {
            observer.observe(engine, tick, model);
            true
        });
    }
    if daemon.begins_anew() {
        say("SIGHUP: beginning anew, nothing is given back");
        let now = NotifyState::monotonic_usec_now()?;
        let _ = sd_notify::notify(&[NotifyState::Reloading, now]);
        return anew::execute(&engine.memory, (!dry_run).then_some(&config.state_file));
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    let result = if dry_run { Ok(()) } else { stop(&engine, daemon, &model) };
    let _ = std::fs::remove_file(&config.socket);
    result
}

fn names(owned: &Owned) -> String {
    owned.vms.iter().map(|v| v.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Says what is taken over of KSM. Where it is not steered (any more), what an earlier
/// daemon had changed is put back.
fn begin_merging(config: &Config, state: &StateFile, owned: &mut Owned) -> Result<()> {
    let root = Root::default();
    if config.merge.mode == MergeMode::On {
        if let Some(set) = describe(&root)? {
            say(&format!("KSM is steered from now on and put back at the end; it was: {set}"));
        }
        return Ok(());
    }
    if KsmOwner::recover(root, &ksm_note(&config.state_file))? {
        say("an earlier daemon had steered KSM: set as it was before");
    }
    if !owned.marks.is_empty() {
        let (left, failed) = merge::put_back(config, &owned.marks);
        owned.marks = left;
        state.write(owned)?;
        failed.iter().for_each(|why| say(&format!("not put back: {why}")));
    }
    Ok(())
}

/// Gives everything back. What is not seen to be back stays written down.
fn stop(engine: &Engine, mut daemon: Daemon, last: &Model) -> Result<()> {
    let mut owed = engine.memory.owned(last, &Plan::default());
    if !owed.vms.is_empty() {
        say(&format!("stopping: {} balloons are given back", owed.vms.len()));
    }
    let left = daemon.give_back(&owed, PATIENCE);
    let mut failures: Vec<String> =
        left.iter().map(|l| format!("{}: {}", l.vm.name, l.why)).collect();
    owed.vms = left.into_iter().map(|l| l.vm).collect();
    daemon.restore_intervals();
    failures.extend(daemon.release_ksm().err().map(|e| e.to_string()));
    // VMs are closed and opened through the sockets that the daemon lets go of here.
    let state = daemon.into_state();
    let (marks, failed) = merge::put_back(&engine.config, &owed.marks);
    owed.marks = marks;
    failures.extend(failed);
    state.iter().try_for_each(|s| s.write(&owed))?;
    if failures.is_empty() {
        return Ok(());
    }
    anyhow::bail!(
        "not given back: {}; the next `ebb run`, or `ebb release`, tries again",
        failures.join("; ")
    )
}

/// A line for the journal.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Publishes, records and logs each tick.
struct Observer {
    shared: Shared,
    config: Config,
    /// What was remembered before the next tick, where a part of the record begins
    /// with it: copied only then.
    head: Option<Head>,
    started: Instant,
    file: Option<BufWriter<File>>,
    verbose: bool,
    dry_run: bool,
    orders: u64,
    orders_failed: u64,
    said_state: Pressure,
    said_problems: Vec<Problem>,
    said_vms: usize,
    said_warnings: Vec<String>,
    said_last_resort: Vec<LastResort>,
    said_forbidden: Option<String>,
    said_merging: String,
}

impl Observer {
    fn new(
        head: Head,
        shared: Shared,
        dry_run: bool,
        record: Option<String>,
        verbose: bool,
    ) -> Result<Observer> {
        let file = record
            .map(|p| File::create(&p).with_context(|| format!("cannot record to {p}")))
            .transpose()?
            .map(BufWriter::new);
        // Three ticks, where those are longer than the unit expects.
        let patience = head.config.tick_ms.saturating_mul(3_000).max(30_000_000);
        let _ = sd_notify::notify(&[NotifyState::WatchdogUsec(patience as u32)]);
        Ok(Observer {
            shared,
            config: head.config.clone(),
            head: Some(head),
            started: Instant::now(),
            file,
            verbose,
            dry_run,
            orders: 0,
            orders_failed: 0,
            said_state: Pressure::Clear,
            said_problems: Vec::new(),
            said_vms: usize::MAX,
            said_warnings: Vec::new(),
            said_last_resort: Vec::new(),
            said_forbidden: None,
            said_merging: String::new(),
        })
    }

    fn observe(&mut self, engine: &Engine, tick: &Tick, model: &Model) {
        let head = self.head.take();
        self.orders += tick.outcomes.len() as u64;
        self.orders_failed += tick.outcomes.iter().filter(|o| o.error.is_some()).count() as u64;
        let state = State::new(tick, model, &engine.memory, self.daemon(tick));
        let decisions = view::decisions(tick, model);
        let stock = stock(model, &engine.memory);
        let text = recorder::line(tick);
        self.record(head.as_ref(), tick.number, &text);
        self.log(&state, &decisions);
        self.log_beside(tick);
        let _ = sd_notify::notify(&[NotifyState::Watchdog]);
        let mut published = self.shared.lock();
        if let Some(head) = &head {
            published.recorder.head(head);
        }
        published.recorder.tick(&text);
        published.state = Arc::new(state);
        published.plan = Arc::new(tick.plan.clone());
        published.stock = Arc::new(stock);
        published.decided(decisions);
        let wanted = published.recorder.wants_head();
        self.head = wanted.then(|| Head::new(&self.config, &engine.memory));
    }

    fn daemon(&self, tick: &Tick) -> view::Daemon {
        let pid = std::process::id();
        let root = Root::default();
        let cpu = read_stat(&root, pid).ok().flatten();
        let memory = read_status(&root, pid).ok().flatten();
        let now = ebb_host::linux::LinuxHost::now();
        view::Daemon {
            version: env!("CARGO_PKG_VERSION").into(),
            pid,
            uptime_s: self.started.elapsed().as_secs(),
            dry_run: self.dry_run,
            // Clock ticks are hundredths of a second on every Linux Ebb runs on.
            cpu_s: cpu.map_or(0.0, |c| (c.user_ticks + c.system_ticks) as f64 / 100.0),
            resident: memory.map(|m| m.resident()).unwrap_or_default(),
            tick_ms: now.since(tick.sample.at) as f64,
            orders: self.orders,
            orders_failed: self.orders_failed,
            socket: self.config.socket.clone(),
        }
    }

    fn record(&mut self, head: Option<&Head>, number: u64, tick: &[u8]) {
        let Some(file) = self.file.as_mut() else { return };
        let mut write = || -> std::io::Result<()> {
            if let Some(head) = head.filter(|_| number == 1) {
                file.write_all(&recorder::line(head))?;
            }
            file.write_all(tick)?;
            file.flush()
        };
        if let Err(e) = write() {
            say(&format!("recording ends: {e}"));
            self.file = None;
        }
    }

    /// Orders that are no decision on a size: said where nothing is done (a dry run
    /// tells all), where they can hurt, and in full with `--verbose`.
    fn log_beside(&mut self, tick: &Tick) {
        let not = if self.dry_run { " (dry run)" } else { "" };
        for r in tick.plan.recycle.iter().filter(|_| self.dry_run || self.verbose) {
            let what = if r.recycle.is_some() { "recycle" } else { "look at free pages" };
            say(&format!("{}: {what}: {}{not}", r.name, r.reason));
        }
        for o in tick.plan.merge.iter().flat_map(|m| &m.vms) {
            let what = if o.open { "open to KSM" } else { "out of KSM" };
            say(&format!("{}: {what}: {}{not}", o.name, o.reason));
        }
        let merging = tick.plan.merge.as_ref();
        let words = merging.map(|m| view::merge_words(&m.why)).unwrap_or_default();
        if words != self.said_merging {
            merging.iter().for_each(|m| say(&format!("merging: {}{not}", m.why)));
            self.said_merging = words;
        }
        for o in tick.plan.zeros.iter().filter(|_| self.dry_run || self.verbose) {
            say(&format!("{}: look for zeros in {}: {}{not}", o.name, o.read, o.reason));
        }
        for o in tick.plan.torn.iter().filter(|_| self.dry_run || self.verbose) {
            say(&format!("{}: split torn huge pages: {}{not}", o.name, o.reason));
        }
        for o in &tick.plan.offload {
            say(&format!("{}: page out {}: {}{not}", o.name, o.bytes, o.reason));
        }
        if tick.plan.last_resort != self.said_last_resort {
            for l in &tick.plan.last_resort {
                say(&format!("last resort, never done by Ebb: {}: {}", l.name, l.what));
            }
            self.said_last_resort.clone_from(&tick.plan.last_resort);
        }
        if let Some(why) =
            tick.forbidden.as_ref().filter(|w| Some(*w) != self.said_forbidden.as_ref())
        {
            say(&format!("nothing is taken: {why}"));
        }
        self.said_forbidden.clone_from(&tick.forbidden);
    }

    /// One line for each thing that is new: state, decisions, problems, VMs.
    fn log(&mut self, state: &State, decisions: &[view::Decision]) {
        if state.vms.len() != self.said_vms {
            let names: Vec<&str> = state.vms.iter().map(|v| v.name.as_str()).take(20).collect();
            say(&format!("{} VMs: {}", state.vms.len(), names.join(" ")));
            self.said_vms = state.vms.len();
        }
        if state.host.state != self.said_state || self.verbose {
            say(&format!("host {}: {}", state.host.state, state.host.why));
            self.said_state = state.host.state;
        }
        for w in state.host.warnings.iter().filter(|w| !self.said_warnings.contains(w)) {
            say(&format!("warning: {w}"));
        }
        self.said_warnings.clone_from(&state.host.warnings);
        for p in &state.problems {
            if !self.said_problems.contains(p) {
                say(&format!("{}: {}", p.source, p.message));
            }
        }
        self.said_problems.clone_from(&state.problems);
        for d in decisions {
            let error = d.error.as_ref().map_or(String::new(), |e| format!(" ({e})"));
            let a = &d.action;
            say(&format!("{}: {} → {}: {}{error}", a.name, a.from, a.to, d.reason));
        }
    }
}
