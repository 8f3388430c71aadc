//! cgroup v1's `memory.pressure_level` (Linux `Documentation/admin-guide/cgroup-v1/memory.rst`,
//! `mm/vmpressure.c`): the kernel's notice that it has to reclaim, where there is no PSI.
//!
//! One eventfd for each level; `low` is usual wherever files are cached, and left out. A listener
//! of `medium` is told of `critical` too, so what is counted for it is what that one did not get.
//! The kernel tells at most once for every 512 pages that it has looked at.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ebb_core::sample::VmPressure;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::cgroup::{Hierarchy, Version};
use crate::root::{ProbeError, Probed, Root, probed};

#[derive(Debug)]
pub struct PressureEvents {
    pub cgroup: String,
    levels: [OwnedFd; 2],
    // Registrations end with it.
    _level: File,
}

impl PressureEvents {
    /// Registers for both levels; `None` on v2 and where the kernel has no
    /// such file.
    pub fn open(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<Self> {
        let dir = match (h.version, h.directory(cgroup)) {
            (Version::V1, Some(dir)) => root.path(dir),
            _ => return Ok(None),
        };
        let path = dir.join("memory.pressure_level");
        let Some(level) = probed(&path, File::open(&path))? else { return Ok(None) };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let failed = |e: Errno| ProbeError::Io { path: path.clone(), error: e.into() };
        let event = || eventfd(0, flags).map_err(failed);
        let levels = [event()?, event()?];
        let control = dir.join("cgroup.event_control");
        for (fd, name) in levels.iter().zip(["medium", "critical"]) {
            // `hierarchy`: also what children report, whoever listens there (4.12).
            let line =
                |mode: &str| format!("{} {} {name}{mode}", fd.as_raw_fd(), level.as_raw_fd());
            std::fs::write(&control, line(",hierarchy"))
                .or_else(|_| std::fs::write(&control, line("")))
                .map_err(|error| ProbeError::Io { path: control.clone(), error })?;
        }
        Ok(Some(PressureEvents { cgroup: cgroup.to_owned(), levels, _level: level }))
    }

    /// For `poll`.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        self.levels.each_ref().map(AsFd::as_fd)
    }

    /// What came since the last time, each notification at its own level only.
    pub fn take(&self) -> VmPressure {
        let count = |fd: &OwnedFd| {
            let mut bytes = [0; 8];
            rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
        };
        let [medium, critical] = self.levels.each_ref().map(count);
        VmPressure { medium: medium.saturating_sub(critical), critical }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    fn said(root: &Root, version: Version) -> Probed<PressureEvents> {
        let hierarchy = Hierarchy { version, point: "/cg".into(), root: "/".into() };
        PressureEvents::open(root, &hierarchy, "/a")
    }

    #[test]
    fn each_notification_counts_at_its_own_level() {
        let event = || eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (levels, cgroup) = ([event(), event()], "/a".to_owned());
        let events = PressureEvents { cgroup, levels, _level: File::open("/dev/null").unwrap() };
        let after = |counts: [u64; 2]| {
            for (fd, count) in events.fds().into_iter().zip(counts) {
                rustix::io::write(fd, &count.to_ne_bytes()).unwrap();
            }
            events.take()
        };
        assert_eq!(after([3, 1]), VmPressure { medium: 2, critical: 1 });
        assert_eq!(after([0, 0]), VmPressure::default());
        assert_eq!(after([1, 2]).medium, 0, "read one after the other");
    }

    #[test]
    fn where_there_is_no_such_file_there_are_no_notifications() {
        let root = tree(&[]);
        assert!(said(&root, Version::V1).unwrap().is_none());
        assert!(said(&root, Version::V2).unwrap().is_none());
    }

    #[test]
    fn a_cgroup_that_refuses_is_named() {
        let root = tree(&[("/cg/a/memory.pressure_level", "")]);
        root.dir("/cg/a/cgroup.event_control");
        let said = said(&root, Version::V1).unwrap_err().to_string();
        assert!(said.contains("cgroup.event_control"), "{said}");
    }
}
