//! A host of a few ideal guests under a clock: a stand-in that carries no claim
//! about real ones (crates/sim has the seeded ones), just enough to close the loop.

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;

use ebb_core::plan::{Action, Outcome};
use ebb_core::sample::{
    BalloonSample, GuestStats, HostSample, LimitSample, Link, Meminfo, ProcessMemory, RunState,
    Sample, VmId, VmSample,
};
use ebb_core::state::{Owned, OwnedVm};
use ebb_core::tick::{Host, Next};
use ebb_core::units::{Bytes, Stamp};

/// A guest that follows its balloon at a constant speed.
#[derive(Clone, Debug)]
pub struct Guest {
    pub ram: Bytes,
    pub actual: Bytes,
    pub target: Bytes,
    /// Used now, and wanted: it grows towards that as far as it has memory.
    pub used: Bytes,
    pub wanted: Bytes,
    pub resident: Bytes,
    /// Bytes a second that the balloon moves, and that processes touch.
    pub speed: u64,
    pub touch: u64,
    /// It does not run any more, and its balloon does not move.
    pub hangs: bool,
    pub cgroup: Option<String>,
    pub nodes: Vec<u32>,
}

impl Guest {
    /// One that uses `used` of `ram` GiB, and has touched all of it.
    pub fn new(ram: u64, used: u64) -> Guest {
        let (ram, used) = (Bytes::gib(ram), Bytes::gib(used));
        Guest {
            ram,
            actual: ram,
            target: ram,
            used,
            wanted: used,
            resident: ram,
            speed: 1 << 30,
            touch: 4 << 30,
            hangs: false,
            cgroup: None,
            nodes: Vec::new(),
        }
    }

    /// One with `ram` MiB that uses `used` MiB, and of which the host holds `resident` MiB.
    pub fn small(ram: u64, used: u64, resident: u64) -> Guest {
        let [ram, used, resident] = [ram, used, resident].map(Bytes::mib);
        Guest { ram, actual: ram, target: ram, used, wanted: used, resident, ..Guest::new(1, 1) }
    }

    /// The same in this cgroup.
    pub fn within(self, cgroup: &str) -> Guest {
        Guest { cgroup: Some(cgroup.into()), ..self }
    }

    /// The same with a balloon that holds so many GiB.
    pub fn ballooned(self, held: u64) -> Guest {
        let actual = self.ram - Bytes::gib(held);
        Guest { actual, target: actual, resident: self.resident.min(actual), ..self }
    }

    fn live(&mut self, ms: u64) {
        if self.hangs {
            return;
        }
        let part = |rate: u64| Bytes(rate * ms / 1000);
        if self.target < self.actual {
            let step = (self.actual - self.target).min(part(self.speed));
            let step = step.min(self.actual - self.used);
            self.actual = self.actual - step;
        } else {
            self.actual += (self.target - self.actual).min(part(self.speed));
        }
        let more = (self.wanted - self.used).min(part(self.touch));
        self.used = (self.used + more).min(self.actual);
        self.resident = self.resident.min(self.actual).max(self.used);
    }
}

/// The host.
pub struct Toy {
    pub total: Bytes,
    /// What others than the guests use.
    pub others: Bytes,
    pub guests: Vec<Guest>,
    /// Other limits than the machine's; what is held there is counted.
    pub limits: Vec<LimitSample>,
    pub now: u64,
    /// Looking takes so long, ms.
    pub look_ms: u64,
    /// What is owed cannot be written down.
    pub disk_full: bool,
    pub until: u64,
}

impl Toy {
    pub fn new(total: u64, others: u64, guests: Vec<Guest>) -> Toy {
        let (total, others) = (Bytes::gib(total), Bytes::gib(others));
        let limits = Vec::new();
        let (now, until) = (1_000_000, u64::MAX);
        Toy { total, others, guests, limits, now, look_ms: 0, disk_full: false, until }
    }

    pub fn available(&self) -> Bytes {
        self.total - self.others - self.guests.iter().map(|g| g.resident).sum()
    }

    /// What the guests below a limit hold.
    pub fn held(&self, limit: &LimitSample) -> Bytes {
        let below = |g: &&Guest| match &limit.nodes[..] {
            [] => g.cgroup.as_ref().is_some_and(|c| Path::new(c).starts_with(&limit.path)),
            nodes => !g.nodes.is_empty() && g.nodes.iter().all(|n| nodes.contains(n)),
        };
        self.guests.iter().filter(below).map(|g| g.resident).sum()
    }

    /// What an earlier daemon had taken: every guest is owed its RAM.
    pub fn owed(&self) -> Owned {
        let one = |(i, g): (usize, &Guest)| OwnedVm {
            id: id(i),
            name: format!("vm{i}"),
            others: Some(Bytes::ZERO),
            ordered: Some(g.ram - g.target),
            ..OwnedVm::default()
        };
        Owned { vms: self.guests.iter().enumerate().map(one).collect(), ..Owned::default() }
    }

    fn vm(&self, i: usize) -> VmSample {
        let g = &self.guests[i];
        let (available, faults) = (g.actual - g.used, self.now);
        let stats = GuestStats {
            updated_s: self.now / 1000,
            age_ms: if g.hangs { 60_000 } else { 0 },
            total: Some(g.actual),
            free: Some(available),
            available: Some(available),
            caches: Some(Bytes::ZERO),
            major_faults: Some(0),
            minor_faults: Some(faults),
            ..GuestStats::default()
        };
        VmSample {
            id: id(i),
            name: format!("vm{i}"),
            ram: Some(g.ram),
            cgroup: g.cgroup.clone(),
            nodes: g.nodes.clone(),
            process: Some(ProcessMemory { anon: g.resident, ..ProcessMemory::default() }),
            link: Link::Up,
            run: Some(RunState::Running),
            balloon: Some(BalloonSample {
                actual: g.actual,
                reporting: Some(false),
                deflate_on_oom: Some(true),
                guest: Some(stats),
                ..BalloonSample::default()
            }),
            ..VmSample::default()
        }
    }
}

/// The id of the guest with this index.
pub fn id(i: usize) -> VmId {
    VmId { pid: i as u32 + 1, start: 1 }
}

impl Host for Toy {
    fn now(&self) -> Stamp {
        Stamp(self.now)
    }

    fn read(&mut self, _owed: &[VmId]) -> Sample {
        let (total, available) = (self.total, self.available());
        let memory = Some(Meminfo { total, available, ..Meminfo::default() });
        let limit = |l: &LimitSample| LimitSample { usage: l.usage + self.held(l), ..l.clone() };
        let other_limits = self.limits.iter().map(limit).collect();
        let host = HostSample { memory, other_limits, ..HostSample::default() };
        let vms = (0..self.guests.len()).map(|i| self.vm(i)).collect();
        let (at, wall_ms) = (Stamp(self.now), self.now);
        self.now += self.look_ms;
        Sample { at, wall_ms, host, vms, ..Sample::default() }
    }

    fn remember(&mut self, _owned: &Owned) -> Result<(), String> {
        if self.disk_full { Err("no space left".into()) } else { Ok(()) }
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        let mut one = |a: &Action| {
            self.guests[a.vm.pid as usize - 1].target = a.to;
            Outcome { vm: a.vm, ..Outcome::default() }
        };
        actions.iter().map(&mut one).collect()
    }

    fn wait(&mut self, next: &Next) -> bool {
        while self.now < next.at.0 {
            let ms = (next.at.0 - self.now).min(50);
            self.now += ms;
            self.guests.iter_mut().for_each(|g| g.live(ms));
        }
        self.now < self.until
    }
}
