//! The memory cgroups of the VMs: each one's own, the pool whose limit is a bound for most of
//! them, and the deepest that holds them all, whose stalls are the VMs' own. Found with each
//! scan, read with each sample; a read that fails leaves what was known.

use std::path::Path;
use std::time::{Duration, Instant};

use ebb_core::sample::{Pool, Problem, Psi};

use crate::probe::cgroup::{self, Hierarchy, POOL_STAYS, Previous, Version};
use crate::probe::psi::parse_psi;
use crate::root::{ProbeError, Root};
use crate::vm::{Vm, problem};

/// Most VMs named in one message.
const NAMED: usize = 5;

/// See the top of this file.
#[derive(Debug, Default)]
pub(crate) struct Bounds {
    configured: Option<String>,
    hierarchy: Option<Hierarchy>,
    pool: Option<String>,
    /// When that was last the one that would be chosen.
    confirmed: Option<Instant>,
    /// The deepest cgroup of all VMs.
    common: Option<String>,
    /// The pool as it was last read.
    last: Option<(Instant, Pool)>,
}

impl Bounds {
    /// With a pool from the configuration, that is the one.
    pub fn new(configured: Option<String>) -> Bounds {
        Bounds { pool: configured.clone(), configured, ..Bounds::default() }
    }

    /// The hierarchy with the memory controller.
    pub fn hierarchy(&self) -> Option<&Hierarchy> {
        self.hierarchy.as_ref()
    }

    pub fn pool(&self) -> Option<&str> {
        self.pool.as_deref()
    }

    /// Finds each VM's cgroup and the pool that most share.
    pub fn find<'a>(
        &mut self,
        root: &Root,
        now: Instant,
        vms: impl Iterator<Item = &'a mut Vm>,
        problems: &mut Vec<Problem>,
    ) {
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
            vms.for_each(|vm| vm.cgroup = None);
            return self.pool.clone_from(&self.configured);
        };
        let mut members: Vec<(String, String)> = Vec::new();
        for vm in vms {
            match cgroup::read_process_cgroup(root, h.version, vm.process.id.pid) {
                Ok(Some(path)) => vm.cgroup = Some(path),
                // It is ending, or was not to be read: it has not moved for that.
                Ok(None) => {}
                Err(e) => failed("/proc/PID/cgroup", e),
            }
            members.extend(vm.cgroup.clone().map(|path| (vm.process.name.clone(), path)));
        }
        let paths: Vec<String> = members.iter().map(|(_, path)| path.clone()).collect();
        self.common = cgroup::common_ancestor(&paths);
        if self.configured.is_none()
            && let Err(e) = self.choose(root, now, &paths)
        {
            failed("cgroup limits", e);
        }
        problems.extend(self.outsiders(&members));
    }

    fn choose(&mut self, root: &Root, now: Instant, paths: &[String]) -> Result<(), ProbeError> {
        let Some(h) = &self.hierarchy else { return Ok(()) };
        let with_limit = |path: String| {
            let limit = cgroup::read_limit(root, h, &path)?;
            Ok((path, limit))
        };
        let held: Result<Vec<_>, ProbeError> =
            cgroup::held_by_most(paths).into_iter().map(with_limit).collect();
        let held = held?;
        let wanted = cgroup::choose_pool(&held, None);
        if wanted == self.pool {
            self.confirmed = Some(now);
            return Ok(());
        }
        let limit = match &self.pool {
            Some(path) => cgroup::read_limit(root, h, path)?,
            None => None,
        };
        let age = self.confirmed.map_or(POOL_STAYS, |at| now.saturating_duration_since(at));
        let previous = self.pool.as_deref().map(|path| Previous { path, limit, age });
        let chosen = cgroup::choose_pool(&held, previous);
        if chosen != self.pool {
            (self.pool, self.confirmed) = (chosen, Some(now));
        }
        Ok(())
    }

    /// VMs that the pool's limit says nothing of.
    fn outsiders(&self, members: &[(String, String)]) -> Option<Problem> {
        let pool = self.pool.as_deref()?;
        let outside = |(_, path): &&(String, String)| !Path::new(path).starts_with(pool);
        let names: Vec<&str> =
            members.iter().filter(outside).map(|(name, _)| name.as_str()).collect();
        let (first, rest) = names.split_at(names.len().min(NAMED));
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        let text = format!("these VMs are not in it, its limit is not theirs: {}", first.join(" "));
        (!names.is_empty()).then(|| problem(None, pool.into(), text + &more))
    }

    /// The pool, and the pressure in the cgroup of all VMs.
    pub fn sample(
        &mut self,
        root: &Root,
        now: Instant,
        problems: &mut Vec<Problem>,
    ) -> (Option<Pool>, Option<Psi>) {
        let pool = self.sample_pool(root, now, problems);
        let common = self.common.as_deref().filter(|common| *common != "/");
        let psi = match (common, &pool) {
            (Some(common), Some(pool)) if *common == pool.path => pool.psi,
            (Some(common), _) => self.pressure(root, common, problems),
            (None, _) => None,
        };
        (pool, psi)
    }

    fn sample_pool(
        &mut self,
        root: &Root,
        now: Instant,
        problems: &mut Vec<Problem>,
    ) -> Option<Pool> {
        let path = self.pool.as_deref()?;
        let read = self.hierarchy.as_ref().map_or(Ok(None), |h| cgroup::read_pool(root, h, path));
        match read {
            Ok(pool) => self.last = pool.map(|pool| (now, pool)),
            Err(e) => {
                problems.push(problem(None, path.into(), e.to_string()));
                let fresh = |at: Instant| now.saturating_duration_since(at) < READING_LASTS;
                self.last = self.last.take().filter(|(at, p)| p.path == path && fresh(*at));
            }
        }
        if self.last.is_none() && self.configured.is_some() {
            let why = "no such memory cgroup, or it has no limit: the whole host counts as pool";
            problems.push(problem(None, path.into(), why.into()));
        }
        self.last.as_ref().map(|(_, pool)| pool.clone())
    }

    fn pressure(&self, root: &Root, cgroup: &str, problems: &mut Vec<Problem>) -> Option<Psi> {
        let h = self.hierarchy.as_ref().filter(|h| h.version == Version::V2)?;
        let file = h.directory(cgroup)?.join("memory.pressure");
        root.parse(&file, parse_psi).unwrap_or_else(|e| {
            problems.push(problem(None, file.display().to_string(), e.to_string()));
            None
        })
    }
}

/// A pool that cannot be read counts as it was, so long: the host's surplus is not the pool's.
const READING_LASTS: Duration = Duration::from_secs(30);
