//! The limits on memory beside the machine's. Of the VMs' memory cgroups: each VM's own, the pool
//! whose limit holds for most VMs, all others with a limit on the way up, and the deepest that
//! holds all VMs, whose stalls are the VMs' own. Beside them the NUMA nodes to which VMs are bound.
//! Found with each scan, read with each sample; a read that fails leaves what was known. What VMs
//! are bound to is read beside the loop: while one keeps its mmap lock, all are bound as they were.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_core::sample::{HostSample, LimitSample, Problem, Psi, VmId};
use ebb_core::units::Bytes;

use crate::background_look::BackgroundLook;
use crate::probe::cgroup::{self, Hierarchy, Version};
use crate::probe::numa;
use crate::probe::psi::parse_psi;
use crate::root::{ProbeError, Probed, Root};
use crate::vm::{Vm, noted, problem};

/// Most cgroups with a limit that are looked at beside the pool: each costs some ten reads a tick.
const MOST: usize = 1000;

/// How long a scan waits for what VMs are bound to: to read it takes each one's mmap lock.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long a pool stays chosen, where it still limits anything, after another one would be: VMs
/// come and go.
const POOL_STAYS: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(crate) struct MemoryLimits {
    configured: Option<String>,
    /// The hierarchy with the memory controller.
    pub hierarchy: Option<Hierarchy>,
    pub pool: Option<String>,
    /// When that was last the one that would be chosen.
    confirmed: Option<Instant>,
    /// The deepest cgroup of all VMs.
    common: Option<String>,
    /// The other cgroups with a limit that a VM is below, the outermost first.
    others: Vec<String>,
    /// The sets of NUMA nodes to which VMs are bound.
    nodes: BTreeSet<Vec<u32>>,
    /// Under way: what each VM is bound to now.
    binding: BackgroundLook<BTreeMap<VmId, Result<Vec<u32>, ProbeError>>>,
    /// Pool and others as they were last read.
    last: HashMap<String, (Instant, LimitSample)>,
}

impl MemoryLimits {
    /// With a pool from the configuration, that is the one.
    pub fn new(configured: Option<String>) -> MemoryLimits {
        MemoryLimits { pool: configured.clone(), configured, ..MemoryLimits::default() }
    }

    /// Finds each VM's cgroup, the pool that most share, and the others with a limit.
    pub fn find<'a>(
        &mut self,
        root: &Root,
        now: Instant,
        vms: impl Iterator<Item = &'a mut Vm>,
        problems: &mut Vec<Problem>,
    ) {
        let mut vms: Vec<&mut Vm> = vms.collect();
        if let Err(e) = self.find_nodes(root, &mut vms) {
            problems.push(problem(None, "NUMA nodes".into(), e.to_string()));
        }
        // One of a kind: what fails for one VM fails for all.
        let mut failed = |source: &str, e: ProbeError| {
            if problems.iter().all(|p| p.source != source) {
                problems.push(problem(None, source.into(), e.to_string()));
            }
        };
        match cgroup::read_hierarchy(root) {
            Ok(hierarchy) => self.hierarchy = hierarchy,
            Err(e) => failed("memory cgroups", e),
        }
        let Some(h) = &self.hierarchy else {
            vms.into_iter().for_each(|vm| vm.cgroup = None);
            self.others.clear();
            self.pool.clone_from(&self.configured);
            return self.forget();
        };
        let mut paths: Vec<String> = Vec::new();
        for vm in vms {
            match cgroup::read_process_cgroup(root, h.version, vm.process.id.pid) {
                Ok(Some(path)) => vm.cgroup = Some(path),
                // It is ending, or was not to be read: it has not moved for that.
                Ok(None) => {}
                Err(e) => failed("/proc/PID/cgroup", e),
            }
            paths.extend(vm.cgroup.clone());
        }
        self.common = cgroup::common_ancestor(&paths);
        for done in [self.choose(root, now, &paths), self.find_others(root, &paths)] {
            if let Err(e) = done {
                failed("cgroup limits", e);
            }
        }
        if self.others.len() > MOST {
            let text = format!(
                "{} of them limit VMs, the outermost {MOST} are looked at: limit slices instead",
                self.others.len()
            );
            problems.push(problem(None, "memory cgroups".into(), text));
            self.others.truncate(MOST);
        }
        self.forget();
    }

    /// Forgets what limits no VM any more.
    fn forget(&mut self) {
        let MemoryLimits { pool, others, nodes, last, .. } = self;
        last.retain(|path, (_, known)| {
            pool.as_ref() == Some(path) || others.contains(path) || nodes.contains(&known.nodes)
        });
    }

    /// An error, if there is one; a VM that it concerns is bound as it was, and so are all while
    /// they are looked at.
    fn find_nodes(&mut self, root: &Root, vms: &mut [&mut Vm]) -> Result<(), ProbeError> {
        let all = numa::read_nodes(root)?;
        let mut error = Ok(());
        if all.len() < 2 {
            vms.iter_mut().for_each(|vm| vm.nodes.clear());
        } else {
            let (its, ids): (_, Vec<VmId>) =
                (root.clone(), vms.iter().map(|vm| vm.process.id).collect());
            let one = move |id: VmId| (id, numa::read_binding(&its, id.pid, &all));
            let found = self.binding.look(move || ids.into_iter().map(one).collect(), PATIENCE);
            let mut found: BTreeMap<_, _> = found.unwrap_or_default();
            for vm in vms.iter_mut() {
                match found.remove(&vm.process.id) {
                    Some(Ok(bound)) => vm.nodes = bound,
                    Some(Err(e)) => error = Err(e),
                    None => {}
                }
            }
        }
        let bound = vms.iter().map(|vm| &vm.nodes).filter(|nodes| !nodes.is_empty());
        self.nodes = bound.cloned().collect();
        error
    }

    /// An error, if there is one; what it concerns stays as it was.
    fn find_others(&mut self, root: &Root, paths: &[String]) -> Result<(), ProbeError> {
        let Some(h) = &self.hierarchy else { return Ok(()) };
        let above: BTreeSet<&Path> = paths.iter().flat_map(|p| cgroup::way_up(p)).collect();
        let (mut found, mut error) = (Vec::new(), Ok(()));
        for path in above.iter().filter_map(|p| p.to_str()) {
            if self.pool.as_deref() == Some(path) {
                continue;
            }
            let limited = cgroup::is_limited(root, h, path).unwrap_or_else(|e| {
                error = Err(e);
                self.others.iter().any(|o| o == path)
            });
            if limited {
                found.push(path.to_owned());
            }
        }
        found.sort_by_key(|path| Path::new(path).components().count());
        self.others = found;
        error
    }

    fn choose(&mut self, root: &Root, now: Instant, paths: &[String]) -> Result<(), ProbeError> {
        let Some(h) = self.hierarchy.as_ref().filter(|_| self.configured.is_none()) else {
            return Ok(());
        };
        let mut held = Vec::new();
        for path in cgroup::held_by_most(paths) {
            let limit = cgroup::read_limit(root, h, &path)?;
            held.push((path, limit));
        }
        let wanted = cgroup::choose_pool(&held);
        let recent =
            self.confirmed.is_some_and(|at| now.saturating_duration_since(at) < POOL_STAYS);
        let stays = match &self.pool {
            Some(path) if recent && wanted != self.pool => {
                cgroup::read_limit(root, h, path)?.is_some()
            }
            _ => false,
        };
        if !stays {
            (self.pool, self.confirmed) = (wanted, Some(now));
        }
        Ok(())
    }

    /// Adds what is known of them now.
    pub fn sample(
        &mut self,
        root: &Root,
        now: Instant,
        host: &mut HostSample,
        problems: &mut Vec<Problem>,
    ) {
        let h = self.hierarchy.clone();
        let pool = self.pool.clone().and_then(|path| {
            let read = h.as_ref().map_or(Ok(None), |h| cgroup::read_pool(root, h, &path));
            self.known(now, &path, read, problems)
        });
        if let (None, Some(path)) = (&pool, &self.configured) {
            let why = "no such memory cgroup, or it has no limit: only other limits count";
            problems.push(problem(None, "host.cgroup".into(), format!("{path}: {why}")));
        }
        let others = self.others.clone();
        let read = |path: &str| h.as_ref().map_or(Ok(None), |h| cgroup::read_usage(root, h, path));
        let others = others.iter().map(|path| (path.clone(), read(path)));
        let nodes = self.nodes.clone();
        let nodes = nodes.iter().map(|set| (numa::name(set), numa::read_usage(root, set)));
        let others = others.chain(nodes);
        host.other_limits =
            others.filter_map(|(name, read)| self.known(now, &name, read, problems)).collect();
        let common = self.common.as_deref().filter(|common| *common != "/");
        host.vms_psi = match (common, &pool) {
            (Some(common), Some(pool)) if *common == pool.path => pool.psi,
            (Some(common), _) => self.pressure(root, common, problems),
            (None, _) => None,
        };
        host.pool = pool;
    }

    /// What may still be taken below the tightest limit of a VM of this cgroup, bound to these
    /// nodes; `None` where there is none.
    pub fn left(&self, now: Instant, cgroup: Option<&str>, nodes: &[u32]) -> Option<Bytes> {
        let fresh = |at: Instant| now.saturating_duration_since(at) < READING_LASTS;
        let known = self.last.values().filter(|(at, _)| fresh(*at)).map(|(_, pool)| pool);
        known.filter(|pool| pool.holds(cgroup, nodes)).map(LimitSample::left).min()
    }

    /// What was read, or is known of it still.
    fn known(
        &mut self,
        now: Instant,
        path: &str,
        read: Probed<LimitSample>,
        problems: &mut Vec<Problem>,
    ) -> Option<LimitSample> {
        match read {
            Ok(Some(pool)) => {
                self.last.insert(path.to_owned(), (now, pool.clone()));
                Some(pool)
            }
            Ok(None) => {
                self.last.remove(path);
                None
            }
            Err(e) => {
                problems.push(problem(None, path.into(), e.to_string()));
                let (at, pool) = self.last.get(path)?;
                let fresh = now.saturating_duration_since(*at) < READING_LASTS;
                fresh.then(|| pool.clone())
            }
        }
    }

    fn pressure(&self, root: &Root, cgroup: &str, problems: &mut Vec<Problem>) -> Option<Psi> {
        let h = self.hierarchy.as_ref().filter(|h| h.version == Version::V2)?;
        let file = h.directory(cgroup)?.join("memory.pressure");
        noted(problems, &file.display().to_string(), root.parse(&file, parse_psi))
    }
}

/// How long a cgroup that cannot be read counts as it was: the host's surplus is not the cgroup's.
const READING_LASTS: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::qemu::QemuProcess;
    use crate::testing::tree;
    use crate::vm::Access;

    #[test]
    fn the_limit_of_a_node_is_forgotten_with_the_last_vm_that_is_bound_to_it() {
        let root = tree(&[("/sys/devices/system/node/has_memory", "0-1\n")]);
        for node in [0, 1] {
            let text = format!("Node {node} MemTotal: 9000 kB\nNode {node} MemFree: 4000 kB\n");
            root.put(format!("/sys/devices/system/node/node{node}/meminfo"), text);
        }
        let vm = |pid: u32, allowed: &str| {
            root.put(format!("/proc/{pid}/status"), format!("Mems_allowed_list:\t{allowed}\n"));
            let process = QemuProcess::plain(VmId { pid, start: 1 }, format!("vm{pid}"));
            Vm::new(process, Access::default())
        };
        let (mut bound, mut other, mut free) = (vm(7, "1"), vm(8, "1"), vm(9, "0-1"));
        // Also where there are no memory cgroups.
        for cgroups in [false, true] {
            if cgroups {
                root.put("/proc/self/mountinfo", "1 0 0:1 / /cg rw - cgroup2 none rw\n");
                root.put("/cg/cgroup.controllers", "memory\n");
            }
            let mut limits = MemoryLimits::default();
            let mut names = |mut vms: Vec<&mut Vm>| -> Vec<String> {
                let (now, mut problems) = (Instant::now(), Vec::new());
                limits.find(&root, now, vms.iter_mut().map(|vm| &mut **vm), &mut problems);
                while !limits.binding.is_idle() {
                    limits.find(&root, now, vms.iter_mut().map(|vm| &mut **vm), &mut problems);
                }
                let mut host = HostSample::default();
                limits.sample(&root, now, &mut host, &mut problems);
                assert!(problems.is_empty(), "{problems:?}");
                let known = limits.left(now, None, &[1]).is_some();
                assert_eq!(known, !host.other_limits.is_empty(), "{:?}", limits.last);
                host.other_limits.into_iter().map(|limit| limit.path).collect()
            };
            assert_eq!(names(vec![&mut bound, &mut other, &mut free]), ["node 1"]);
            assert_eq!(names(vec![&mut other, &mut free]), ["node 1"]);
            assert!(names(vec![&mut free]).is_empty());
            assert!(names(vec![]).is_empty());
        }
    }

    #[test]
    fn a_pool_stays_for_a_while_unless_it_limits_nothing_any_more() {
        let root = tree(&[("/m/s/memory.max", "5\n")]);
        let start = Instant::now();
        let after = |limit: &str, vms: &[&str], age: Duration| {
            root.put("/m/s/a/memory.max", limit);
            let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
            let (hierarchy, pool, confirmed) = (Some(h), Some("/s/a".into()), Some(start));
            let mut limits = MemoryLimits { hierarchy, pool, confirmed, ..MemoryLimits::default() };
            let vms: Vec<String> = vms.iter().map(|vm| vm.to_string()).collect();
            limits.choose(&root, start + age, &vms).unwrap();
            let confirmed = limits.confirmed == Some(start + age);
            assert_eq!(confirmed, limits.pool.as_deref() != Some("/s/a"));
            limits.pool
        };
        let (soon, late) = (POOL_STAYS - Duration::from_millis(1), POOL_STAYS);
        let vms = ["/s/b", "/s/c"];
        assert_eq!(after("9\n", &vms, soon).as_deref(), Some("/s/a"));
        assert_eq!(after("9\n", &[], soon).as_deref(), Some("/s/a"));
        assert_eq!(after("9\n", &vms, late).as_deref(), Some("/s"));
        assert_eq!(after("9\n", &[], late), None);
        assert_eq!(after("max\n", &vms, Duration::from_secs(1)).as_deref(), Some("/s"));
    }

    #[test]
    fn what_is_left_is_what_the_tightest_limit_above_leaves() {
        let now = Instant::now() + READING_LASTS;
        let pool = |path: &str, nodes: &[u32], limit: u64, usage: u64, file: u64| {
            let [limit, usage, file] = [limit, usage, file].map(Bytes::mib);
            let (path, nodes) = (path.to_string(), nodes.to_vec());
            LimitSample { path, nodes, limit, usage, file, ..LimitSample::default() }
        };
        let read =
            |pool: LimitSample, ago| (pool.path.clone(), (now - Duration::from_secs(ago), pool));
        let last = HashMap::from([
            read(pool("/s", &[], 100, 60, 10), 0),
            read(pool("/s/vm", &[], 200, 190, 20), 0),
            read(pool("node 0", &[0], 100, 80, 0), 1),
            read(pool("/s/gone", &[], 100, 100, 0), 30),
        ]);
        let limits = MemoryLimits { last, ..MemoryLimits::default() };
        let left = |cgroup, nodes: &[u32]| limits.left(now, cgroup, nodes).map(|b| b.0 >> 20);
        assert_eq!((left(Some("/s/vm/a"), &[]), left(Some("/s/a"), &[])), (Some(30), Some(50)));
        assert_eq!((left(Some("/sa"), &[]), left(None, &[])), (None, None));
        assert_eq!((left(Some("/s"), &[0]), left(Some("/s"), &[0, 1])), (Some(20), Some(50)));
        assert_eq!(left(Some("/s/gone"), &[]), Some(50), "it was read long ago");
    }
}
