//! A guest whose memory is given back, and how the host sees that: one VM in a
//! memory cgroup of its own, with or without tier guest.
//!
//! What came back is what the cgroup's usage fell by: pages that the host has
//! again, whatever guest, agent or RSS say.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;
use ebb_core::wire::{HugePages, Recycle, Recycled};
use ebb_host::agent::Agent;

use super::trial::Trial;
use crate::agent_requests::Requests as _;
use crate::arena::{Arena, ArenaConfig, MemoryCgroup};
use crate::ebb::Daemon;
use crate::guest_stack;
use crate::image::Kernel;
use crate::result::ExperimentResult;
use crate::vm::{Backing, Vm, VmConfig};

/// For what a guest does.
pub const MINUTE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(15);
/// Reporting looks again after two seconds.
const STILL: Duration = Duration::from_secs(5);
/// Nothing more comes when nothing came for so long.
const STALLED: Duration = Duration::from_secs(20);
/// Between two looks at the cgroup.
const LOOK: Duration = Duration::from_millis(1);

/// What guest RAM is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamKind {
    /// Private anonymous, pages of 4 KiB.
    Small,
    /// Private anonymous, transparent huge pages.
    Huge,
    /// A shared memfd, pages of 4 KiB.
    Memfd,
}

impl RamKind {
    pub const ALL: [RamKind; 3] = [RamKind::Small, RamKind::Huge, RamKind::Memfd];

    pub fn name(self) -> &'static str {
        match self {
            RamKind::Small => "anonymous, 4 KiB pages",
            RamKind::Huge => "anonymous, huge pages",
            RamKind::Memfd => "memfd",
        }
    }

    /// What the names of metrics end with; nothing for the first kind.
    pub fn suffix(self) -> &'static str {
        match self {
            RamKind::Small => "",
            RamKind::Huge => "_thp",
            RamKind::Memfd => "_memfd",
        }
    }
}

/// A trial, and a cgroup for its guests that limits nothing but counts.
pub struct Bench<'a> {
    pub trial: &'a Trial,
    pub outcome: &'a mut ExperimentResult,
    arena: Arena,
}

impl<'a> Bench<'a> {
    pub fn new(trial: &'a Trial, outcome: &'a mut ExperimentResult) -> Result<Bench<'a>> {
        let budget = Some(Bytes::gib(8));
        let arena = Arena::enter(&ArenaConfig { budget, ..ArenaConfig::default() })?;
        Ok(Bench { trial, outcome, arena })
    }

    /// See [`Place::boot`].
    pub fn boot(
        &self,
        memory: RamKind,
        tier: bool,
        change: impl FnOnce(&mut VmConfig),
    ) -> Result<Place> {
        Place::boot(&self.arena, self.trial.kernel, (memory, tier), change)
    }
}

/// A guest, and what the host holds of it.
pub struct Place {
    pub vm: Vm,
    pub cgroup: MemoryCgroup,
    agent: Option<Agent>,
    socket: Option<std::path::PathBuf>,
    dir: tempfile::TempDir,
}

impl Place {
    /// Boots a guest; `tier` puts agent and module there, the module not yet loaded.
    pub fn boot(
        arena: &Arena,
        kernel: Kernel,
        (memory, tier): (RamKind, bool),
        change: impl FnOnce(&mut VmConfig),
    ) -> Result<Place> {
        let dir = tempfile::tempdir()?;
        let cgroup = arena.cgroup().context("the arena has no cgroup")?.clone();
        // Daemons find VMs by name, and another run may go on beside this one.
        let name = format!("trial-{}", std::process::id());
        let mut config = VmConfig::new(name, Bytes::gib(1));
        (config.kernel, config.cpus) = (kernel, 2);
        config.cgroup = Some(cgroup.dir.clone());
        config.small_pages = memory == RamKind::Small;
        if memory == RamKind::Memfd {
            config.backing = Backing::Memfd;
        }
        let socket = tier.then(|| guest_stack::prepare(&mut config, dir.path())).transpose()?;
        change(&mut config);
        let vm = Vm::start(&config)?;
        Ok(Place { vm, cgroup, agent: None, socket, dir })
    }

    /// What the host holds of it: guest RAM, page tables, QEMU itself.
    pub fn usage(&self) -> Bytes {
        self.cgroup.usage()
    }

    /// A shell command in the guest.
    pub fn sh(&self, command: &str) -> Result<String> {
        Ok(self.vm.ask(|tool| tool.sh(command, 5 * MINUTE))?)
    }

    pub fn insmod(&self) -> Result<()> {
        let said = self.sh("insmod /ebb.ko 2>&1; dmesg | grep ebb: | tail -n 2; lsmod")?;
        if !said.lines().any(|l| l.starts_with("ebb ")) {
            bail!("the module was not loaded: {said}");
        }
        Ok(())
    }

    /// Loads the module and hands the agent RAM, as the daemon would.
    pub fn attach(&mut self) -> Result<()> {
        self.insmod()?;
        let socket = self.socket.as_ref().context("no agent in this VM")?;
        let mut agent = Agent::connect(socket)?;
        agent.attach(guest_stack::attachment(&self.vm)?, None, SOON)?;
        agent.wait_ready(MINUTE)?;
        self.agent = Some(agent);
        Ok(())
    }

    pub fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().context("no agent is attached")
    }

    /// Free in the guest and held by the host.
    pub fn held(&mut self) -> Result<Bytes> {
        Ok(self.agent()?.status(true, SOON)?.held.unwrap_or_default())
    }

    /// Everything that is free, in one call.
    pub fn recycle(&mut self) -> Result<Recycled> {
        self.recycle_runs(1)
    }

    /// The same of what lies in runs of so many pages.
    pub fn recycle_runs(&mut self, min_run_pages: u32) -> Result<Recycled> {
        let want = Recycle {
            budget_ms: 10_000,
            min_run_pages,
            huge: HugePages::Split,
            split_min_pages: 1,
            ..Recycle::default()
        };
        Ok(self.agent()?.recycle(want, SOON)?)
    }

    /// The same, watched from the request on, what the host held then being `full`.
    pub fn recycle_watched(&mut self, full: Bytes, freed: Bytes, time: Duration) -> Result<Fall> {
        let (cgroup, begun) = (self.cgroup.clone(), Instant::now());
        std::thread::scope(|scope| {
            let watching = scope.spawn(move || watch(&cgroup, begun, full, freed, time));
            self.recycle()?;
            watching.join().map_err(|_| anyhow::anyhow!("the watch ended early"))
        })
    }

    /// Stops the vCPUs or lets them go on, and tells the agent, as the daemon would.
    pub fn pause(&mut self, paused: bool) -> Result<()> {
        if paused {
            self.vm.pause()?
        } else {
            self.vm.resume()?
        }
        match &mut self.agent {
            Some(agent) => Ok(agent.run_state(!paused, SOON)?),
            None => Ok(()),
        }
    }

    /// Recycles until nothing comes any more.
    pub fn settle(&mut self) -> Result<()> {
        for _ in 0..50 {
            if self.recycle()?.bytes < Bytes::mib(1) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        bail!("the guest never comes to rest")
    }

    /// Waits until the map knows of so much that the host still holds.
    pub fn wait_held(&mut self, bytes: Bytes) -> Result<Bytes> {
        let until = Instant::now() + MINUTE;
        loop {
            let held = self.held()?;
            if held >= bytes {
                return Ok(held);
            }
            if Instant::now() > until {
                bail!("the map shows {held} of {bytes} that were freed");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts a job that allocates and touches, and waits for it.
    pub fn start(&self, job: &str, kind: &str, arguments: &str) -> Result<()> {
        Ok(self.vm.ask(|tool| tool.start_ready(job, kind, arguments, 3 * MINUTE)).map(drop)?)
    }

    /// Ends a job; its memory is free when this returns.
    pub fn stop(&self, job: &str) -> Result<()> {
        Ok(self.vm.ask(|tool| tool.stop(job)).map(drop)?)
    }

    /// Has a `pieces` job free its pieces.
    pub fn free_pieces(&self, job: &str) -> Result<()> {
        Ok(self.vm.poked(job, MINUTE).map(drop)?)
    }

    /// `ebb run` for this VM, once it is in this tier.
    pub fn daemon(&self, tier: &str) -> Result<Daemon> {
        let daemon = Daemon::start(self.dir.path(), &[&self.vm.name], "")?;
        daemon.wait_for_tier(tier)?;
        Ok(daemon)
    }

    /// Waits until what the host holds has stood still for a while.
    pub fn calm(&self) -> Result<()> {
        let begun = Instant::now();
        let (mut last, mut since) = (self.usage(), Instant::now());
        while since.elapsed() < STILL {
            let now = self.usage();
            if now.abs_diff(last) > Bytes::mib(1) {
                (last, since) = (now, Instant::now());
            }
            if begun.elapsed() > 3 * MINUTE {
                bail!("what the host holds of the guest never stands still");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Allocates and frees nearly all that is free, so that the host holds it.
    pub fn touch_all(&self) -> Result<()> {
        let free = self.vm.request("meminfo", MINUTE)?.u64("MemFree");
        self.start("all", "hold", &format!("size={} huge=1", free / 100 * 92))?;
        self.stop("all")
    }
}

/// Watches what the host holds fall from `full`, until 95 % of `freed` has come
/// back, nothing more comes, or time is over. Times are from `begun`.
pub fn watch(
    cgroup: &MemoryCgroup,
    begun: Instant,
    full: Bytes,
    freed: Bytes,
    deadline: Duration,
) -> Fall {
    let mut fall = Fall { freed, points: Vec::new() };
    let (mut most, mut since) = (Bytes::ZERO, Instant::now());
    loop {
        let back = full - cgroup.usage();
        if back > most + Bytes::mib(1) {
            (most, since) = (back, Instant::now());
        }
        let late = begun.elapsed() > deadline || since.elapsed() > STALLED;
        let end = back >= freed.share(0.95) || late;
        if end || fall.points.last().is_none_or(|p| p.1 != back) {
            fall.points.push((begun.elapsed(), back));
        }
        if end {
            return fall;
        }
        std::thread::sleep(LOOK);
    }
}

/// How memory came back: bytes by time since something was asked for.
#[derive(Clone, Debug)]
pub struct Fall {
    freed: Bytes,
    points: Vec<(Duration, Bytes)>,
}

impl Fall {
    /// When so large a share had come back, seconds.
    pub fn time_to(&self, share: f64) -> Option<f64> {
        let point = self.points.iter().find(|p| p.1 >= self.freed.share(share));
        point.map(|p| p.0.as_secs_f64())
    }

    /// What came back in all.
    pub fn back(&self) -> Bytes {
        self.points.last().map_or(Bytes::ZERO, |p| p.1)
    }

    /// Share of what was freed that came back.
    pub fn share(&self) -> f64 {
        self.back().fraction_of(self.freed)
    }

    /// Bytes a second, from the beginning up to 95 % of all that came.
    pub fn rate(&self) -> Option<f64> {
        let goal = self.back().share(0.95);
        let end = self.points.iter().find(|p| p.1 >= goal)?;
        let took = end.0.as_secs_f64();
        (took > 0.0).then(|| end.1.0 as f64 / took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fall_is_read_at_its_marks() {
        let at = |ms, mib| (Duration::from_millis(ms), Bytes::mib(mib));
        let points = vec![at(0, 0), at(2000, 2), at(3000, 60), at(4000, 96)];
        let fall = Fall { freed: Bytes::mib(100), points };
        assert_eq!(fall.time_to(0.95), Some(4.0));
        assert_eq!(fall.time_to(0.99), None);
        assert_eq!(fall.share(), 0.96);
        assert_eq!(fall.rate(), Some(96.0 * 1048576.0 / 4.0));
        assert_eq!(Fall { freed: Bytes::mib(1), points: Vec::new() }.rate(), None);
    }
}
