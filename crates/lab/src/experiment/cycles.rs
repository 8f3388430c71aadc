//! Guests that take and free memory in turn, and read a file a while after they freed it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use ebb_core::units::Bytes;

use crate::guest::Tool;
use crate::vm::Vm;

/// What each guest does, and when.
#[derive(Clone, Copy, Debug)]
pub struct Cycle {
    /// What it holds all the time.
    pub base: Bytes,
    /// What its job takes and frees.
    pub job: Bytes,
    /// What it reads between jobs, into its page cache.
    pub cache: Bytes,
    /// From one job to the next.
    pub period: Duration,
    /// How long a job keeps what it has touched.
    pub hold: Duration,
    /// How much later each guest's jobs are than those of the one before.
    pub apart: Duration,
}

/// The guest of a VM of the lab itself, or of a libvirt domain.
#[derive(Clone, Copy, Debug)]
pub struct Guest<'a> {
    pub name: &'a str,
    pub pid: u32,
    pub tool: &'a Tool,
    /// Where it is of the lab itself.
    pub vm: Option<&'a Vm>,
}

impl<'a> Guest<'a> {
    pub fn of_vm(vm: &'a Vm) -> Guest<'a> {
        Guest { name: &vm.name, pid: vm.pid, tool: vm.tool(), vm: Some(vm) }
    }

    /// Whether it is there.
    fn check(&self) -> Result<()> {
        match self.vm {
            Some(vm) => Ok(vm.check()?),
            None if Path::new("/proc").join(self.pid.to_string()).exists() => Ok(()),
            None => bail!("domain {} has ended", self.name),
        }
    }

    fn start(&self, job: &str, kind: &str, arguments: &str) -> Result<()> {
        self.tool.start(job, kind, arguments).map_err(|e| match self.vm {
            Some(vm) => vm.explain(e).into(),
            None => anyhow!("domain {}: {e}", self.name),
        })
    }
}

/// Drives the guests.
#[derive(Debug)]
pub struct Cycles<'a> {
    cycle: Cycle,
    guests: Vec<Guest<'a>>,
    began: Instant,
    started: usize,
    /// Which guest is to read its file when.
    reads: Vec<(usize, Instant)>,
}

impl<'a> Cycles<'a> {
    pub fn new(cycle: Cycle, guests: Vec<Guest<'a>>) -> Cycles<'a> {
        Cycles { cycle, guests, began: Instant::now(), started: 0, reads: Vec::new() }
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Starts what is due; which guests have freed their memory since the last time, and how long
    /// each took to touch it, seconds.
    pub fn step(&mut self) -> Result<Vec<(usize, f64)>> {
        let (c, mut freed) = (self.cycle, Vec::new());
        while self.started < self.guests.len() && self.elapsed() >= c.apart * self.started as u32 {
            let arguments = format!(
                "size={} base={} period_ms={} hold_ms={} seed={}",
                c.job.0,
                c.base.0,
                c.period.as_millis(),
                c.hold.as_millis(),
                self.started
            );
            self.guests[self.started].start("job", "cycle", &arguments)?;
            self.started += 1;
        }
        for (n, guest) in self.guests.iter().enumerate() {
            guest.check()?;
            for event in guest.tool.take_events().iter().filter(|e| e.job == "job") {
                match event.name.as_str() {
                    "progress" => {
                        freed.push((n, event.fields.f64("touch_ns") / 1e9));
                        if c.cache > Bytes::ZERO {
                            self.reads.push((n, Instant::now() + c.period / 4));
                        }
                    }
                    "exit" => bail!("{} lost its job: {event:?}", guest.name),
                    _ => {}
                }
            }
        }
        for (n, _) in self.reads.extract_if(.., |(_, at)| Instant::now() >= *at) {
            // The one before holds the device open, and with it what was read.
            let _ = self.guests[n].tool.stop("read");
            self.guests[n].start("read", "read", &format!("size={}", c.cache.0))?;
        }
        Ok(freed)
    }
}
