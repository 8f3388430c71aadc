//! After each tick: publish, record, log.
//!
//! A tick must cost little when no client reads. Sample, plan and model are published without a
//! copy, what is remembered is copied; the log says what is new, and the record is packed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use ebb_core::config::Config;
use ebb_core::model::{Model, Pressure};
use ebb_core::plan::LastResort;
use ebb_core::tick::{Engine, Tick};
use ebb_core::units::{Bytes, Stamp};
use ebb_host::linux::LinuxHost;
use sd_notify::NotifyState;

use crate::advice;
use crate::api::{Latest, Shared};
use crate::log::say;
use crate::log_limiter::{LogLimiter, without_numbers};
use crate::recorder::{self, Head};
use crate::view::{self, Decision, Problem};

/// VMs that are not found within this time after the start are said to be missing.
const SETTLED_MS: u64 = 10_000;

pub struct Observer {
    shared: Shared,
    /// What was remembered before the next tick, where a part of the record begins
    /// with it: copied only then.
    head: Option<Head>,
    started: Instant,
    file: Option<BufWriter<File>>,
    verbose: bool,
    /// As it was told last.
    daemon: view::Daemon,
    first: Option<Stamp>,
    /// Sections of the configuration whose VM was never seen.
    unmet: BTreeSet<String>,
    said: Said,
}

#[derive(Default)]
struct Said {
    state: Pressure,
    vms: Option<usize>,
    last_resort: Vec<LastResort>,
    merging: String,
    problems: LogLimiter,
    orders: LogLimiter,
    warnings: LogLimiter,
}

impl Observer {
    /// `record`: a file to which every tick is written as well. One that is there is kept under
    /// another name: it may be of a daemon that has just crashed.
    pub fn new(
        head: Head,
        shared: Shared,
        dry_run: bool,
        record: Option<String>,
        verbose: bool,
    ) -> Result<Observer> {
        let create = |path: String| {
            let is_file = std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_file());
            let old = format!("{path}.old");
            if is_file && let Err(e) = std::fs::rename(&path, &old) {
                say(&format!("the record of before is not kept as {old}: {e}"));
            }
            File::create(&path).with_context(|| format!("cannot record to {path}"))
        };
        let file = record.map(create).transpose()?.map(BufWriter::new);
        // Three ticks, where those are longer than the unit expects.
        let patience = head.config.tick_ms.saturating_mul(3_000).max(30_000_000);
        let _ = sd_notify::notify(&[NotifyState::WatchdogUsec(patience as u32)]);
        let daemon = view::Daemon {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            dry_run,
            socket: head.config.socket.clone(),
            ..view::Daemon::default()
        };
        Ok(Observer {
            shared,
            unmet: head.config.vms.keys().cloned().collect(),
            head: Some(head),
            started: Instant::now(),
            file,
            verbose,
            daemon,
            first: None,
            said: Said::default(),
        })
    }

    /// Takes over what a tick was.
    pub fn observe(&mut self, engine: &Engine, tick: Tick, model: &Arc<Model>) {
        let head = self.head.take();
        let failed = tick.outcomes.iter().filter(|o| o.error.is_some()).count();
        self.daemon.orders += tick.outcomes.len() as u64;
        self.daemon.orders_failed += failed as u64;
        let text = recorder::line(&tick);
        self.write(head.as_ref(), tick.number, &text);
        let decisions = view::decisions(&tick, model);
        let warnings = self.warnings(&engine.config, &tick, model);
        self.log(&tick, model, &warnings, &decisions);
        self.log_beside(&tick);
        let _ = sd_notify::notify(&[NotifyState::Watchdog]);
        self.daemon.uptime_s = self.started.elapsed().as_secs();
        self.daemon.tick_ms = LinuxHost::now().since(tick.sample.at) as f64;
        let mut published = self.shared.lock();
        if let Some(head) = &head {
            published.recorder.head(head);
        }
        published.recorder.tick(tick.sample.at, &text);
        self.daemon.record_s = published.recorder.span_ms() as f64 / 1000.0;
        self.daemon.record = Bytes(published.recorder.bytes() as u64);
        let (memory, daemon) = (engine.memory.clone(), self.daemon.clone());
        let latest = Latest::new(tick, model.clone(), memory, daemon, warnings);
        published.latest = Some(Arc::new(latest));
        published.decided(decisions);
        let wanted = published.recorder.wants_head();
        self.head = wanted.then(|| Head::new(&engine.config, &engine.memory));
    }

    /// What in the configuration has no effect here, and what keeps Ebb from taking.
    fn warnings(&mut self, config: &Config, tick: &Tick, model: &Model) -> Vec<String> {
        if !self.unmet.is_empty() {
            for name in tick.sample.vms.iter().flat_map(advice::sections) {
                self.unmet.remove(&name);
            }
        }
        let looked = tick.sample.at.since(*self.first.get_or_insert(tick.sample.at));
        let unmet = self.unmet.iter().map(String::as_str).filter(|_| looked >= SETTLED_MS);
        let mut all = advice::without_effect(config, &model.host, &tick.sample.vms, unmet);
        all.extend(view::forbidden(tick));
        all
    }

    fn write(&mut self, head: Option<&Head>, number: u64, tick: &[u8]) {
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
        let not = if self.daemon.dry_run { " (dry run)" } else { "" };
        let all = self.daemon.dry_run || self.verbose;
        for r in tick.plan.recycle.iter().filter(|_| all) {
            let what = if r.recycle.is_some() { "recycle" } else { "look at free pages" };
            say(&format!("{}: {what}: {}{not}", r.name, r.reason));
        }
        for o in tick.plan.merge.iter().flat_map(|m| &m.vms) {
            let what = if o.open { "open to KSM" } else { "out of KSM" };
            say(&format!("{}: {what}: {}{not}", o.name, o.reason));
        }
        let merging = tick.plan.merge.as_ref();
        let words = merging.map(|m| without_numbers(&m.why)).unwrap_or_default();
        if words != self.said.merging {
            merging.iter().for_each(|m| say(&format!("merging: {}{not}", m.why)));
            self.said.merging = words;
        }
        for o in tick.plan.orders.each() {
            if o.always_logged || all {
                say(&format!("{o}{not}"));
            }
        }
        if tick.plan.last_resort != self.said.last_resort {
            for l in &tick.plan.last_resort {
                say(&format!("last resort, never done by Ebb: {}: {}", l.name, l.what));
            }
            self.said.last_resort.clone_from(&tick.plan.last_resort);
        }
    }

    /// One line for each thing that is new: state, decisions, problems, VMs.
    fn log(&mut self, tick: &Tick, model: &Model, warnings: &[String], decisions: &[Decision]) {
        if self.said.vms != Some(model.vms.len()) {
            let names: Vec<&str> = model.vms.iter().map(|v| v.name.as_str()).take(20).collect();
            say(&format!("{} VMs: {}", model.vms.len(), names.join(" ")));
            self.said.vms = Some(model.vms.len());
        }
        let host = &model.host.shown;
        if host.state != self.said.state || self.verbose {
            say(&format!("host {}: {}", host.state, host.why));
            self.said.state = host.state;
        }
        let all: Vec<String> = model.host.warnings.iter().chain(warnings).cloned().collect();
        for w in self.said.warnings.warnings(tick.sample.at, all) {
            say(&format!("warning: {w}"));
        }
        let problems = [&tick.sample.problems[..], &view::unheeded(tick, model)].concat();
        for p in self.said.problems.news(tick.sample.at, &problems) {
            say(&Problem::new(p, model).to_string());
        }
        for line in self.said.orders.orders(tick.sample.at, decisions) {
            say(&line);
        }
    }
}
