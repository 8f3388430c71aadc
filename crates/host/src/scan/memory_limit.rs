//! How much memory a scan may take: what does not fit is sampled ([`super::sampling`]).
//!
//! A scan that reads all takes up to 20 bytes a page, half a percent of what it scans. On a
//! host that has no more than that to spare it would do more harm than it finds.

use ebb_core::units::{Bytes, PAGE};

use crate::probe::cgroup::{read_hierarchy, read_process_cgroup, tightest};
use crate::probe::meminfo::read_meminfo;
use crate::root::Root;

/// Bytes a page: in the table, and what is kept.
const EACH: u64 = 20;
/// Where nothing is known of the host.
const LEAST: Bytes = Bytes::mib(96);

/// A quarter of what the host has available, and no more than half of what this
/// process's cgroup may ever use.
pub fn room(root: &Root) -> Bytes {
    let host = read_meminfo(root).ok().flatten().map_or(LEAST, |m| m.available.share(0.25));
    own_limit(root).map_or(host, |limit| host.min(limit.share(0.5)))
}

fn own_limit(root: &Root) -> Option<Bytes> {
    let hierarchy = read_hierarchy(root).ok()??;
    let own = read_process_cgroup(root, hierarchy.version, std::process::id()).ok()??;
    tightest(root, &hierarchy, &own).ok()?
}

/// Of how many pieces of `held` memory one is to be read; 1: all.
pub fn one_in(held: Bytes, room: Bytes) -> u32 {
    let needed = (held.0 / PAGE).saturating_mul(EACH);
    u32::try_from(needed.div_ceil(room.0.max(1))).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    #[test]
    fn all_is_read_where_the_tables_fit() {
        assert_eq!(one_in(Bytes::ZERO, Bytes::ZERO), 1);
        assert_eq!(one_in(Bytes::gib(24), Bytes::mib(120)), 1);
        assert_eq!(one_in(Bytes::gib(512), Bytes::mib(120)), 22);
        assert_eq!(one_in(Bytes(u64::MAX), Bytes::ZERO), u32::MAX);
    }

    #[test]
    fn the_host_and_the_own_cgroup_bound_it() {
        let root = tree(&[]);
        assert_eq!(room(&root), LEAST);
        let meminfo = "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 4194304 kB\n";
        root.put("/proc/meminfo", meminfo);
        assert_eq!(room(&root), Bytes::gib(1));
        let mount = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n";
        root.put("/proc/self/mountinfo", mount);
        root.put("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        let own = format!("/proc/{}/cgroup", std::process::id());
        root.put(own, "0::/system.slice/ebb.service\n");
        let limit = |max: &str| root.put("/sys/fs/cgroup/system.slice/ebb.service/memory.max", max);
        limit("max\n");
        assert_eq!(room(&root), Bytes::gib(1));
        limit("268435456\n");
        assert_eq!(room(&root), Bytes::mib(128));
    }
}
