//! What the guests hold, and how they come to hold it. What can be checked is
//! checked at the end: pages against the rule they were written by, a file's sum.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;

use crate::experiment::scan;
use crate::guest_stack;
use crate::image::Kernel;
use crate::vm::{Vm, VmConfig};

const MINUTE: Duration = Duration::from_secs(60);
/// Beside what a guest holds: its kernel, and what it verifies all the time.
const OWN: Bytes = Bytes::mib(176);
const VERIFIED: Bytes = Bytes::mib(12);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Workload {
    /// Guests of one kernel that have just booted.
    Boots,
    /// The same, every second one with another kernel.
    Mixed,
    /// 30 % of what they hold is alike, in clusters of 2 MiB.
    Clustered,
    /// 5 %, page by page.
    Scattered,
    Random,
    /// Freed in the guest, half of it alike, still held by the host.
    Freed,
    /// The same file, read by all, into memory that KSM has long found to be alone.
    Late,
    /// Guests at work, while KSM is.
    Churn,
}

impl Workload {
    /// The tool's arguments for what a guest holds all the time.
    fn holds(self, share: f64) -> Option<String> {
        let alike = |share: f64, cluster: u64| {
            Some(format!("pattern=template share={share} cluster={cluster} common=5"))
        };
        match self {
            Workload::Clustered | Workload::Churn => alike(share, 2 << 20),
            Workload::Scattered => alike(0.05, 4096),
            Workload::Random => Some("pattern=random".into()),
            _ => None,
        }
    }
}

/// Guests with a workload, and the file that some of them read.
#[derive(Debug)]
pub struct Fleet {
    pub vms: Vec<Vm>,
    workload: Workload,
    hold: Bytes,
    share: f64,
    sum: u64,
    _dir: tempfile::TempDir,
}

impl Fleet {
    /// Boots and fills them; they run.
    pub fn boot(
        workload: Workload,
        count: u32,
        hold: Bytes,
        share: f64,
        agents: bool,
    ) -> Result<Fleet> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("file");
        let sum = match workload {
            Workload::Late => noise(&file, late(hold))?,
            _ => 0,
        };
        let mut configs = Vec::new();
        for n in 1..=count {
            let ram = OWN + VERIFIED + Bytes(hold.0 / 8 * 9);
            let mut config = VmConfig::new(format!("dedup{n}"), ram.floor_mib());
            // Otherwise the first arm would split the huge pages, and the others not.
            config.small_pages = true;
            if workload == Workload::Mixed && n % 2 == 0 {
                config.kernel = Kernel::V6_12;
            }
            if workload == Workload::Late {
                let drive = format!("file={},if=virtio,format=raw,readonly=on", file.display());
                config.args = vec!["-drive".into(), drive];
            }
            if agents {
                guest_stack::prepare(&mut config, dir.path())?;
            }
            configs.push(config);
        }
        let vms = guest_stack::boot(&configs)?;
        let fleet = Fleet { vms, workload, hold, share, sum, _dir: dir };
        fleet.fill()?;
        Ok(fleet)
    }

    fn fill(&self) -> Result<()> {
        for (n, vm) in self.vms.iter().enumerate() {
            // The same seed: what has been written as often is alike.
            let verify = format!("size={} seconds=86400 seed=9", VERIFIED.0);
            start(vm, "v", "verify", &verify)?;
            if let Some(holds) = self.workload.holds(self.share) {
                start(vm, "h", "hold", &format!("size={} seed={n} {holds}", self.hold.0))?;
            }
            if self.workload == Workload::Freed {
                let half = self.hold.0 / 2;
                start(vm, "a", "hold", &format!("size={half} pattern=template common=5"))?;
                start(vm, "b", "hold", &format!("size={half} pattern=random seed={n}"))?;
                for job in ["a", "b"] {
                    vm.ask(|tool| tool.stop(job))?;
                }
            }
        }
        Ok(())
    }

    pub fn pids(&self) -> Vec<u32> {
        self.vms.iter().map(|vm| vm.pid).collect()
    }

    pub fn pause(&self) -> Result<()> {
        Ok(self.vms.iter().try_for_each(Vm::pause)?)
    }

    pub fn resume(&self) -> Result<()> {
        Ok(self.vms.iter().try_for_each(Vm::resume)?)
    }

    /// `late`, before: one guest after the other fills its memory with what is alone;
    /// `after` each, with all of them paused.
    pub fn grow_old(&self, mut after: impl FnMut(usize) -> Result<()>) -> Result<()> {
        for (n, vm) in self.vms.iter().enumerate() {
            vm.resume()?;
            start(vm, "old", "hold", &format!("size={} seed={n} pattern=random", self.hold.0))?;
            vm.pause()?;
            after(n)?;
        }
        Ok(())
    }

    /// `late`: what they held is freed, and all read the same file.
    pub fn read_file(&self) -> Result<()> {
        self.resume()?;
        for vm in &self.vms {
            vm.ask(|tool| tool.stop("old"))?;
            self.read(vm, "file")?;
        }
        self.pause()
    }

    fn read(&self, vm: &Vm, job: &str) -> Result<()> {
        let read = format!("dev=/dev/vda size={}", late(self.hold).0);
        let said = vm.ask(|tool| tool.start_ready(job, "read", &read, 2 * MINUTE))?;
        let sum = said.u64("sum");
        match sum == self.sum {
            true => Ok(()),
            false => bail!("{}: the file reads as another one: {sum} for {}", vm.name, self.sum),
        }
    }

    /// `late`, afterwards: what is in the page cache is the file; then it is dropped.
    pub fn forget_file(&self) -> Result<()> {
        self.resume()?;
        for vm in &self.vms {
            self.read(vm, "again")?;
            for job in ["again", "file"] {
                vm.ask(|tool| tool.stop(job))?;
            }
        }
        self.pause()
    }

    /// `churn`: memory comes and goes, some of it alike, until [`Fleet::calm`].
    pub fn stir(&self) -> Result<()> {
        for (n, vm) in self.vms.iter().enumerate() {
            let cycle = format!(
                "size={} base=4096 period_ms=6000 hold_ms=4000 pattern=template share=0.5 \
                 cluster=262144 common=7 seed={n}",
                self.hold.0 / 8
            );
            vm.ask(|tool| tool.start("c", "cycle", &cycle))?;
        }
        Ok(())
    }

    pub fn calm(&self) -> Result<()> {
        for vm in &self.vms {
            vm.ask(|tool| tool.stop("c"))?;
        }
        Ok(())
    }

    /// Every guest looks whether its memory is what it wrote.
    pub fn check(&self) -> Result<()> {
        for vm in &self.vms {
            let v = vm.ask(|tool| tool.stop("v"))?;
            if v.u64("errors") > 0 || v.u64("checks") == 0 {
                bail!("{}: memory changed: {:?}", vm.name, v.0);
            }
            if self.workload.holds(self.share).is_some() {
                let h = vm.poked("h", 2 * MINUTE)?;
                if h.u64("errors") > 0 || h.u64("checks") != self.hold.0 / 4096 {
                    bail!("{}: held memory changed: {:?}", vm.name, h.0);
                }
            }
        }
        Ok(())
    }
}

/// The part of what is held that the file takes.
fn late(hold: Bytes) -> Bytes {
    Bytes(hold.0 / 8 * 5).floor_mib()
}

fn start(vm: &Vm, job: &str, kind: &str, arguments: &str) -> Result<()> {
    Ok(vm.ask(|tool| tool.start_ready(job, kind, arguments, 5 * MINUTE)).map(drop)?)
}

/// A file of noise; returns the sum of its words.
fn noise(path: &Path, size: Bytes) -> Result<u64> {
    let mut file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
    let (mut state, mut sum) = (1, 0);
    for _ in 0..size.0 >> 20 {
        let bytes = scan::noise(&mut state, Bytes::mib(1));
        let words =
            bytes.chunks_exact(8).filter_map(|w| Some(u64::from_ne_bytes(w.try_into().ok()?)));
        sum = words.fold(sum, u64::wrapping_add);
        file.write_all(&bytes)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_what_its_sum_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let sum = noise(&path, Bytes::mib(2)).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let words = bytes.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap()));
        assert_eq!((bytes.len(), words.fold(0, u64::wrapping_add)), (2 << 20, sum));
    }
}
