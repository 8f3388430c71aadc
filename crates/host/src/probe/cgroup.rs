//! Memory cgroups, v1, v2 and hybrid (Linux `Documentation/admin-guide/cgroup-v1/memory.rst`,
//! `cgroup-v2.rst`): which one a process is in, and the pool that most VMs share.
//!
//! The memory controller lives in one hierarchy at a time: v1's where one is
//! mounted (also beside a v2 mount without the controller, “hybrid”), else v2's.
//! Paths are those of `/proc/PID/cgroup`; mounts of a part of the hierarchy
//! (containers) make the rest invisible, which reads as `None`.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use ebb_core::sample::LimitSample;
use ebb_core::units::Bytes;

use super::psi::parse_psi;
use crate::root::{ParseError, ProbeError, Probed, Root, field, parse_number, unescape_octal};

/// Limits above this are “none”: v1 writes 2^63 rounded down to a page.
const NO_LIMIT: u64 = 1 << 62;
/// Deepest nesting looked at; systemd's own default maximum is far lower.
const MAX_DEPTH: usize = 64;

/// A line of `/proc/PID/mountinfo`, the fields in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    /// The part of the file system that is mounted.
    pub root: String,
    pub point: String,
    pub kind: String,
    /// Options of the file system; v1 controllers are among them.
    pub options: String,
}

pub fn read_mounts(root: &Root) -> Probed<Vec<Mount>> {
    root.parse("/proc/self/mountinfo", parse_mountinfo)
}

/// Parses it (proc(5); optional fields end at a lone `-`).
pub fn parse_mountinfo(text: &str) -> Result<Vec<Mount>, ParseError> {
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ');
        let mut right = right.split(' ');
        Some(Mount {
            id: left.next()?.parse().ok()?,
            root: unescape_octal(left.nth(2)?),
            point: unescape_octal(left.next()?),
            kind: right.next()?.to_owned(),
            options: right.nth(1)?.to_owned(),
        })
    };
    let lines = text.lines().enumerate().filter(|(_, l)| !l.is_empty());
    lines.map(|(i, l)| mount(l).ok_or_else(|| ParseError::new(i + 1, l))).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// The hierarchy that has the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    pub version: Version,
    pub point: String,
    /// What part of it is mounted there; `/` for all.
    pub root: String,
}

impl Hierarchy {
    /// The directory of a cgroup; `None` where the mount does not show it.
    pub fn directory(&self, cgroup: &str) -> Option<PathBuf> {
        let below = Path::new(cgroup).strip_prefix(&self.root).ok()?;
        let plain = below.components().all(|c| matches!(c, Component::Normal(_)));
        plain.then(|| Path::new(&self.point).join(below))
    }
}

/// Finds the memory controller; `None` where there is none.
pub fn read_hierarchy(root: &Root) -> Probed<Hierarchy> {
    let Some(mounts) = read_mounts(root)? else { return Ok(None) };
    let found =
        |version, m: &Mount| Hierarchy { version, point: m.point.clone(), root: m.root.clone() };
    // Of several mounts the one that shows most.
    let best = |m: &&Mount| m.root.len();
    let v1 = |m: &&Mount| m.kind == "cgroup" && m.options.split(',').any(|o| o == "memory");
    if let Some(m) = mounts.iter().filter(v1).min_by_key(best) {
        return Ok(Some(found(Version::V1, m)));
    }
    let Some(m) = mounts.iter().filter(|m| m.kind == "cgroup2").min_by_key(best) else {
        return Ok(None);
    };
    let controllers = root.read(format!("{}/cgroup.controllers", m.point))?.unwrap_or_default();
    let memory = controllers.split_ascii_whitespace().any(|c| c == "memory");
    Ok(memory.then(|| found(Version::V2, m)))
}

pub fn read_process_cgroup(root: &Root, version: Version, pid: u32) -> Probed<String> {
    let parse = |text: &str| parse_process_cgroup(text, version);
    Ok(root.parse(format!("/proc/{pid}/cgroup"), parse)?.flatten())
}

/// Finds it in the text of `/proc/PID/cgroup`: `N:controllers:/path`, for v2 `0::/path`.
pub fn parse_process_cgroup(text: &str, version: Version) -> Result<Option<String>, ParseError> {
    for (i, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.splitn(3, ':').collect();
        let [id, controllers, path] = fields[..] else { return Err(ParseError::new(i + 1, line)) };
        let ours = match version {
            Version::V1 => controllers.split(',').any(|c| c == "memory"),
            Version::V2 => id == "0" && controllers.is_empty(),
        };
        if ours {
            return Ok(Some(path.to_owned()));
        }
    }
    Ok(None)
}

/// The deepest cgroup that holds all of these; `None` for none.
pub fn common_ancestor(paths: &[String]) -> Option<String> {
    held_by(paths, paths.len()).pop()
}

/// A cgroup and all above it, the innermost first.
pub fn way_up(cgroup: &str) -> impl Iterator<Item = &Path> {
    Path::new(cgroup).ancestors().take(MAX_DEPTH)
}

/// The cgroups that hold more than half of these, the outermost first: each holds the next.
pub fn held_by_most(paths: &[String]) -> Vec<String> {
    held_by(paths, paths.len() / 2 + 1)
}

/// The cgroups that hold at least this many of these, more than half, the outermost first.
fn held_by(paths: &[String], least: usize) -> Vec<String> {
    let mut held: HashMap<&Path, usize> = HashMap::new();
    for path in paths {
        for at in way_up(path) {
            *held.entry(at).or_default() += 1;
        }
    }
    let most = held.into_iter().filter(|(_, n)| *n >= least);
    let mut most: Vec<&Path> = most.map(|(path, _)| path).collect();
    most.sort_by_key(|path| path.components().count());
    most.iter().filter_map(|path| Some(path.to_str()?.to_owned())).collect()
}

/// Which of the cgroups that hold most VMs is the pool: the one with the smallest limit, the
/// inner of equals.
pub fn choose_pool(held: &[(String, Option<Bytes>)]) -> Option<String> {
    let limited = held.iter().rev().filter_map(|(path, limit)| Some((path, (*limit)?)));
    limited.min_by_key(|(_, limit)| *limit).map(|(path, _)| path.clone())
}

/// The smallest limit from a cgroup upwards.
pub fn tightest(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<Bytes> {
    least(cgroup, |at| read_limit(root, h, at))
}

/// The least of what is read of a cgroup and of each above it.
fn least(cgroup: &str, read: impl Fn(&str) -> Probed<Bytes>) -> Probed<Bytes> {
    let mut least: Option<Bytes> = None;
    for at in way_up(cgroup).filter_map(Path::to_str) {
        least = least.into_iter().chain(read(at)?).min();
    }
    Ok(least)
}

/// A cgroup's own limit: where it is throttled, if that is less. `None` for no limit, or
/// out of sight.
pub fn read_limit(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<Bytes> {
    let Some(dir) = h.directory(cgroup) else { return Ok(None) };
    let read = |file| Ok(root.parse(dir.join(file), parse_limit)?.flatten());
    match h.version {
        // The soft limit holds only while the whole host is short.
        Version::V1 => read("memory.limit_in_bytes"),
        Version::V2 => {
            let limits = [read("memory.max")?, read("memory.high")?];
            Ok(limits.into_iter().flatten().min())
        }
    }
}

pub fn is_limited(root: &Root, h: &Hierarchy, cgroup: &str) -> Result<bool, ProbeError> {
    Ok(read_limit(root, h, cgroup)?.is_some() || limits_swap(root, h, cgroup)?)
}

/// Whether it limits swap. v1 has a limit of memory and swap together, which is never less than
/// that of memory.
fn limits_swap(root: &Root, h: &Hierarchy, cgroup: &str) -> Result<bool, ProbeError> {
    let (Version::V2, Some(dir)) = (h.version, h.directory(cgroup)) else { return Ok(false) };
    Ok(root.parse(dir.join("memory.swap.max"), parse_limit)?.flatten().is_some())
}

/// Swap that a cgroup may still use by its own limit and by those above it; `None` where
/// nothing limits it, or swap is not accounted.
fn read_swap_left(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<Bytes> {
    least(cgroup, |at| read_swap_room(root, h, at))
}

/// Swap that a cgroup may still use by its own limit alone.
fn read_swap_room(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<Bytes> {
    let Some(dir) = h.directory(cgroup) else { return Ok(None) };
    let room = |limit: &str, usage: &str| -> Probed<Bytes> {
        let Some(limit) = root.parse(dir.join(limit), parse_limit)?.flatten() else {
            return Ok(None);
        };
        let usage = root.parse(dir.join(usage), parse_number)?;
        Ok(usage.map(|usage| limit - Bytes(usage)))
    };
    match h.version {
        Version::V2 => room("memory.swap.max", "memory.swap.current"),
        // A limit of memory and swap together: what memory may still take is not swap's.
        Version::V1 => {
            let Some(both) = room("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")?
            else {
                return Ok(None);
            };
            let memory = room("memory.limit_in_bytes", "memory.usage_in_bytes")?;
            Ok(Some(both - memory.unwrap_or_default()))
        }
    }
}

/// A limit in bytes; `max`, and v1's number near 2^63, are `None`.
pub fn parse_limit(text: &str) -> Result<Option<Bytes>, ParseError> {
    if text.trim() == "max" {
        return Ok(None);
    }
    parse_number(text).map(|n: u64| (n < NO_LIMIT).then_some(Bytes(n)))
}

/// Reads the pool at a cgroup; `None` where it has no limit or is gone.
pub fn read_pool(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<LimitSample> {
    let Some(dir) = h.directory(cgroup) else { return Ok(None) };
    let Some(pool) = read_usage(root, h, cgroup)? else { return Ok(None) };
    let events = match h.version {
        Version::V1 => "memory.oom_control",
        Version::V2 => "memory.events",
    };
    Ok(Some(LimitSample {
        swap_left: read_swap_left(root, h, cgroup)?,
        oom_kills: root.parse(dir.join(events), parse_oom_kills)?.flatten(),
        ..pool
    }))
}

/// Reads limit and usage of a cgroup, and the swap that its own limit leaves, in fewer files than
/// [`read_pool`]: there may be many cgroups. `None` where it has no limit or is gone.
pub fn read_usage(root: &Root, h: &Hierarchy, cgroup: &str) -> Probed<LimitSample> {
    let Some(dir) = h.directory(cgroup) else { return Ok(None) };
    let limit = match read_limit(root, h, cgroup)? {
        Some(limit) => limit,
        None if limits_swap(root, h, cgroup)? => LimitSample::NO_LIMIT,
        None => return Ok(None),
    };
    let usage = match h.version {
        Version::V1 => "memory.usage_in_bytes",
        Version::V2 => "memory.current",
    };
    let Some(usage) = root.parse(dir.join(usage), parse_number)? else { return Ok(None) };
    let stat = root.parse(dir.join("memory.stat"), |t| parse_stat(t, h.version))?;
    let mut sample = LimitSample {
        path: cgroup.to_owned(),
        limit,
        usage: Bytes(usage),
        swap_left: read_swap_room(root, h, cgroup)?,
        ..stat.unwrap_or_default()
    };
    if h.version == Version::V2 {
        sample.swap = root.parse(dir.join("memory.swap.current"), parse_number)?.map(Bytes);
        sample.psi = root.parse(dir.join("memory.pressure"), parse_psi)?;
    }
    Ok(Some(sample))
}

/// What `memory.stat` tells of a pool, by v1's `total_…` fields, v2's plain ones: `anon`, `file`
/// (mlocked pages are not on the LRU lists), and on v1, where it is accounted, `swap`.
pub fn parse_stat(text: &str, version: Version) -> Result<LimitSample, ParseError> {
    let (mut anon, mut clean, mut dirty, mut swap) = (None, Bytes::ZERO, Bytes::ZERO, None);
    for (i, line) in text.lines().enumerate() {
        let Some((key, rest)) = line.split_once(' ') else { continue };
        let key = match version {
            Version::V1 => key.strip_prefix("total_").unwrap_or(""),
            Version::V2 => key,
        };
        let value = || rest.trim().parse().map(Bytes).map_err(|_| ParseError::new(i + 1, line));
        match key {
            "rss" | "anon" => anon = Some(value()?),
            "active_file" | "inactive_file" => clean += value()?,
            "dirty" | "writeback" | "file_dirty" | "file_writeback" => dirty += value()?,
            "swap" => swap = Some(value()?),
            _ => {}
        }
    }
    let anon = anon.ok_or_else(|| ParseError::missing("total_rss (v1) or anon (v2)"))?;
    Ok(LimitSample { anon, file: clean - dirty, swap, ..LimitSample::default() })
}

/// The `oom_kill` line of `memory.events` (v2: the subtree) or
/// `memory.oom_control` (v1, 4.13+: this cgroup's own tasks only).
pub fn parse_oom_kills(text: &str) -> Result<Option<u64>, ParseError> {
    field(text, "oom_kill", |v| v.parse().ok())
}

#[cfg(test)]
mod tests;
