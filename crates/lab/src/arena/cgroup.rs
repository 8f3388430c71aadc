//! Memory cgroups for experiments: made below the mount that has the controller, limited,
//! and read, in either version.

use std::fs;
use std::path::PathBuf;

use ebb_core::units::Bytes;
use ebb_host::probe::cgroup::{Version, parse_oom_kills, read_hierarchy};
use ebb_host::root::Root;

use super::journal::{Change, Journal};
use super::{Places, read_u64, write};
use crate::LabError;

/// A memory cgroup of the arena's own, in either version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCgroup {
    /// Its directory, for [`crate::vm::VmConfig::cgroup`].
    pub dir: PathBuf,
    /// Version 1 or 2.
    pub version: u8,
}

impl MemoryCgroup {
    /// Where memory cgroups are made: the mount's directory and its version.
    fn mount(places: &Places) -> Option<(PathBuf, u8)> {
        let found = read_hierarchy(&Root::at(&places.root)).ok()??;
        let version = if found.version == Version::V1 { 1 } else { 2 };
        Some((places.at(&found.point), version))
    }

    pub(super) fn create(
        places: &Places,
        journal: &Journal,
        budget: Bytes,
    ) -> Result<MemoryCgroup, LabError> {
        let (mount, version) = MemoryCgroup::mount(places)
            .ok_or_else(|| LabError::Missing("this machine has no memory cgroup".into()))?;
        let dir = mount.join(journal.name());
        if version == 2 {
            // Fails where processes sit in the root of a delegated tree, and is
            // not needed where it is on already: creating shows which.
            let _ = write(&mount.join("cgroup.subtree_control"), "+memory");
        }
        journal.note(&Change::Cgroup { path: dir.clone() })?;
        fs::create_dir(&dir).map_err(LabError::file(&dir))?;
        let cgroup = MemoryCgroup { dir, version };
        cgroup.resize(budget)?;
        Ok(cgroup)
    }

    /// One below it, with a limit of its own; it goes when the arena is left.
    pub fn child(&self, name: &str, budget: Bytes) -> Result<MemoryCgroup, LabError> {
        if self.version == 2 {
            write(&self.dir.join("cgroup.subtree_control"), "+memory")?;
        }
        let dir = self.dir.join(name);
        fs::create_dir(&dir).map_err(LabError::file(&dir))?;
        let cgroup = MemoryCgroup { dir, version: self.version };
        cgroup.resize(budget)?;
        Ok(cgroup)
    }

    /// Processes that the kernel has killed in it for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = if self.version == 1 { "memory.oom_control" } else { "memory.events" };
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        parse_oom_kills(&text).ok().flatten().unwrap_or(0)
    }

    /// Sets its limit; what does not fit into a smaller one is swapped out.
    pub fn resize(&self, budget: Bytes) -> Result<(), LabError> {
        let limit = if self.version == 1 { "memory.limit_in_bytes" } else { "memory.max" };
        write(&self.dir.join(limit), &budget.0.to_string())
    }

    /// Nothing of it is swapped out by the kernel: as swap goes, it would all come back at once, and
    /// beyond the limit the kernel kills.
    pub(super) fn without_swap(&self) -> Result<(), LabError> {
        let knob = if self.version == 1 { "memory.swappiness" } else { "memory.swap.max" };
        match write(&self.dir.join(knob), "0") {
            // A kernel without swap has no such file.
            Err(LabError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(())
            }
            done => done,
        }
    }

    /// Memory charged to it, page cache included.
    pub fn usage(&self) -> Bytes {
        let name = if self.version == 1 { "memory.usage_in_bytes" } else { "memory.current" };
        Bytes(read_u64(&self.dir.join(name)).unwrap_or(0))
    }

    /// Swap charged to it.
    pub fn swap(&self) -> Bytes {
        if self.version == 2 {
            return Bytes(read_u64(&self.dir.join("memory.swap.current")).unwrap_or(0));
        }
        self.stat("swap")
    }

    /// Memory of no file that is charged to it: of VMs above all.
    pub fn anon(&self) -> Bytes {
        self.stat(if self.version == 1 { "rss" } else { "anon" })
    }

    /// Of that, what is in huge pages.
    pub fn huge(&self) -> Bytes {
        self.stat(if self.version == 1 { "rss_huge" } else { "anon_thp" })
    }

    /// A line of `memory.stat`; 0 where there is none.
    pub fn stat(&self, key: &str) -> Bytes {
        let text = fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' '));
        Bytes(line.and_then(|v| v.trim().parse().ok()).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::tests::fixture;

    #[test]
    fn memory_cgroups_are_found_in_either_version() {
        let v2 = "1 0 0:1 / /cg/unified rw - cgroup2 cg rw\n";
        let v1 = &format!("{v2}2 0 0:2 / /cg/memory rw - cgroup cg rw,memory\n");
        let (_dir, places) = fixture(v1);
        let mount = MemoryCgroup::mount(&places);
        assert_eq!(mount, Some((places.root.join("cg/memory"), 1)));

        let (_dir, places) = fixture(v2);
        assert_eq!(MemoryCgroup::mount(&places), None);
        fs::write(places.root.join("cg/unified/cgroup.controllers"), "cpu memory pids\n").unwrap();
        let mount = MemoryCgroup::mount(&places);
        assert_eq!(mount, Some((places.root.join("cg/unified"), 2)));
    }

    #[test]
    fn usage_reads_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        file("memory.usage_in_bytes", "4096\n");
        file("memory.current", "8192\n");
        file("memory.swap.current", "12\n");
        file("memory.stat", "swappiness 60\nswap 7\nrss 9\n");
        let mut cgroup = MemoryCgroup { dir: dir.path().into(), version: 1 };
        assert_eq!(
            (cgroup.usage(), cgroup.swap(), cgroup.stat("rss")),
            (Bytes(4096), Bytes(7), Bytes(9))
        );
        cgroup.version = 2;
        assert_eq!((cgroup.usage(), cgroup.swap()), (Bytes(8192), Bytes(12)));
    }
}
