//! Memory cgroups, v1, v2 and hybrid (Linux `Documentation/admin-guide/cgroup-v1/memory.rst`,
//! `cgroup-v2.rst`): which one a process is in, and the pool that most VMs share.
//!
//! The memory controller lives in one hierarchy at a time: v1's where one is
//! mounted (also beside a v2 mount without the controller, “hybrid”), else v2's.
//! Paths are those of `/proc/PID/cgroup`; mounts of a part of the hierarchy
//! (containers) make the rest invisible, which reads as `None`.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use ebb_core::sample::Pool;
use ebb_core::units::Bytes;

use super::psi::parse_psi;
use crate::root::{ParseError, ProbeError, Root, parse_number, unescape_octal};

/// Limits above this are “none”: v1 writes 2^63 rounded down to a page.
const NO_LIMIT: u64 = 1 << 62;
/// Deepest nesting looked at; systemd's own default maximum is far lower.
const MAX_DEPTH: usize = 64;
/// A pool stays the bound so long after another one would be chosen: VMs come and go.
pub const POOL_STAYS: Duration = Duration::from_secs(30);

/// A line of `/proc/self/mountinfo`, the fields in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The part of the file system that is mounted.
    pub root: String,
    /// Where.
    pub point: String,
    /// File system type.
    pub kind: String,
    /// Options of the file system; v1 controllers are among them.
    pub options: String,
}

/// Reads `/proc/self/mountinfo`.
pub fn read_mounts(root: &Root) -> Result<Option<Vec<Mount>>, ProbeError> {
    root.parse("/proc/self/mountinfo", parse_mountinfo)
}

/// Parses it (proc(5); optional fields end at a lone `-`).
pub fn parse_mountinfo(text: &str) -> Result<Vec<Mount>, ParseError> {
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let mut right = right.split(' ');
        Some(Mount {
            root: unescape_octal(left.next()?),
            point: unescape_octal(left.next()?),
            kind: right.next()?.to_owned(),
            options: right.nth(1)?.to_owned(),
        })
    };
    let lines = text.lines().enumerate().filter(|(_, l)| !l.is_empty());
    lines.map(|(i, l)| mount(l).ok_or_else(|| ParseError::new(i + 1, l))).collect()
}

/// Which interface a hierarchy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// cgroup v1.
    V1,
    /// cgroup v2.
    V2,
}

/// The hierarchy that has the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its interface.
    pub version: Version,
    /// Where it is mounted.
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
pub fn read_hierarchy(root: &Root) -> Result<Option<Hierarchy>, ProbeError> {
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

/// Reads the memory cgroup of a process.
pub fn read_process_cgroup(
    root: &Root,
    version: Version,
    pid: u32,
) -> Result<Option<String>, ProbeError> {
    let parse = |text: &str| parse_process_cgroup(text, version);
    Ok(root.parse(format!("/proc/{pid}/cgroup"), parse)?.flatten())
}

/// Finds it in the text of `/proc/PID/cgroup`: `N:controllers:/path`, for v2 `0::/path`.
pub fn parse_process_cgroup(text: &str, version: Version) -> Result<Option<String>, ParseError> {
    for (i, line) in text.lines().enumerate() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            return Err(ParseError::new(i + 1, line));
        };
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
    let (first, rest) = paths.split_first()?;
    let mut common = PathBuf::from(first);
    while !rest.iter().all(|p| Path::new(p).starts_with(&common)) {
        if !common.pop() {
            return None;
        }
    }
    Some(common.to_str()?.to_owned())
}

/// A cgroup and all above it, the innermost first.
pub fn way_up(cgroup: &str) -> impl Iterator<Item = &Path> {
    Path::new(cgroup).ancestors().take(MAX_DEPTH)
}

/// The cgroups that hold more than half of these, the outermost first: each holds the next.
pub fn held_by_most(paths: &[String]) -> Vec<String> {
    let mut held: HashMap<&Path, usize> = HashMap::new();
    for path in paths {
        for at in way_up(path) {
            *held.entry(at).or_default() += 1;
        }
    }
    let most = held.into_iter().filter(|(_, n)| 2 * n > paths.len());
    let mut most: Vec<&Path> = most.map(|(path, _)| path).collect();
    most.sort_by_key(|path| path.components().count());
    most.iter().filter_map(|path| Some(path.to_str()?.to_owned())).collect()
}

/// The pool that was chosen before.
#[derive(Clone, Copy, Debug)]
pub struct Previous<'a> {
    /// Its cgroup.
    pub path: &'a str,
    /// Its limit now; `None`: it has none any more, or is gone.
    pub limit: Option<Bytes>,
    /// How long ago it was last the one that would have been chosen.
    pub age: Duration,
}

/// Which of the cgroups that hold most VMs is the pool: the one with the smallest limit, the
/// inner of equals. The previous one stays for [`POOL_STAYS`] where it still limits anything.
pub fn choose_pool(
    held: &[(String, Option<Bytes>)],
    previous: Option<Previous<'_>>,
) -> Option<String> {
    let limited = held.iter().rev().filter_map(|(path, limit)| Some((path, (*limit)?)));
    let best = limited.min_by_key(|(_, limit)| *limit).map(|(path, _)| path.clone());
    match previous {
        Some(p) if p.limit.is_some() && p.age < POOL_STAYS => Some(p.path.to_owned()),
        _ => best,
    }
}

/// The cgroup with the smallest limit from here upwards, and that limit.
pub fn tightest(
    root: &Root,
    hierarchy: &Hierarchy,
    cgroup: &str,
) -> Result<Option<(String, Bytes)>, ProbeError> {
    let mut tightest: Option<(String, Bytes)> = None;
    for at in way_up(cgroup) {
        let Some(at) = at.to_str() else { continue };
        if let Some(limit) = read_limit(root, hierarchy, at)?
            && tightest.as_ref().is_none_or(|(_, t)| limit < *t)
        {
            tightest = Some((at.to_owned(), limit));
        }
    }
    Ok(tightest)
}

/// A cgroup's own limit: where it is throttled, if that is less. `None` for no limit, or
/// out of sight.
pub fn read_limit(root: &Root, h: &Hierarchy, cgroup: &str) -> Result<Option<Bytes>, ProbeError> {
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

/// Whether a cgroup limits memory or swap.
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
pub fn read_swap_left(
    root: &Root,
    h: &Hierarchy,
    cgroup: &str,
) -> Result<Option<Bytes>, ProbeError> {
    let mut least: Option<Bytes> = None;
    for at in way_up(cgroup) {
        let Some(dir) = at.to_str().and_then(|at| h.directory(at)) else { continue };
        let room = |limit: &str, usage: &str| -> Result<Option<Bytes>, ProbeError> {
            let Some(limit) = root.parse(dir.join(limit), parse_limit)?.flatten() else {
                return Ok(None);
            };
            let usage = root.parse(dir.join(usage), parse_number)?;
            Ok(usage.map(|usage| limit - Bytes(usage)))
        };
        let left = match h.version {
            Version::V2 => room("memory.swap.max", "memory.swap.current")?,
            // A limit of memory and swap together: what memory may still take is not swap's.
            Version::V1 => {
                let memory = room("memory.limit_in_bytes", "memory.usage_in_bytes")?;
                room("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")?
                    .map(|both| both - memory.unwrap_or_default())
            }
        };
        least = least.into_iter().chain(left).min();
    }
    Ok(least)
}

/// A limit in bytes; `max`, and v1's number near 2^63, are `None`.
pub fn parse_limit(text: &str) -> Result<Option<Bytes>, ParseError> {
    if text.trim() == "max" {
        return Ok(None);
    }
    parse_number(text).map(|n: u64| (n < NO_LIMIT).then_some(Bytes(n)))
}

/// Reads the pool at a cgroup; `None` where it has no limit or is gone.
pub fn read_pool(root: &Root, h: &Hierarchy, cgroup: &str) -> Result<Option<Pool>, ProbeError> {
    let Some(dir) = h.directory(cgroup) else { return Ok(None) };
    let limit = match read_limit(root, h, cgroup)? {
        Some(limit) => limit,
        None if limits_swap(root, h, cgroup)? => Pool::NO_LIMIT,
        None => return Ok(None),
    };
    let (usage, events) = match h.version {
        Version::V1 => ("memory.usage_in_bytes", "memory.oom_control"),
        Version::V2 => ("memory.current", "memory.events"),
    };
    let Some(usage) = root.parse(dir.join(usage), parse_number)? else { return Ok(None) };
    let stat = root.parse(dir.join("memory.stat"), |t| parse_stat(t, h.version))?;
    let stat = stat.unwrap_or_default();
    let mut pool = Pool {
        path: cgroup.to_owned(),
        nodes: Vec::new(),
        limit,
        usage: Bytes(usage),
        file: stat.file,
        anon: stat.anon,
        swap: stat.swap,
        swap_left: read_swap_left(root, h, cgroup)?,
        oom_kills: root.parse(dir.join(events), parse_oom_kills)?.flatten(),
        psi: None,
    };
    if h.version == Version::V2 {
        pool.swap = root.parse(dir.join("memory.swap.current"), parse_number)?.map(Bytes);
        pool.psi = root.parse(dir.join("memory.pressure"), parse_psi)?;
    }
    Ok(Some(pool))
}

/// What is used of `memory.stat`, whole subtree, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupStat {
    /// Anonymous memory.
    pub anon: Bytes,
    /// File cache that can be dropped: on the LRU lists, neither dirty nor
    /// under writeback (mlocked pages are not on these lists).
    pub file: Bytes,
    /// Swap; v1 only, where it is accounted.
    pub swap: Option<Bytes>,
}

/// Parses `memory.stat`: v1's `total_…` fields, v2's plain ones.
pub fn parse_stat(text: &str, version: Version) -> Result<CgroupStat, ParseError> {
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
    Ok(CgroupStat { anon, file: clean - dirty, swap })
}

/// The `oom_kill` line of `memory.events` (v2: the subtree) or
/// `memory.oom_control` (v1, 4.13+: this cgroup's own tasks only).
pub fn parse_oom_kills(text: &str) -> Result<Option<u64>, ParseError> {
    let line = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
    line.map(parse_number).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A fixture tree: paths and contents.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in files {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    const NONE_V1: &str = "9223372036854771712\n";

    fn paths(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| s.to_string()).collect()
    }

    /// The pool that is found first for VMs in these cgroups.
    fn pool_of(root: &Root, h: &Hierarchy, list: &[&str]) -> Option<String> {
        let with_limit = |path: String| (path.clone(), read_limit(root, h, &path).unwrap());
        let held: Vec<_> = held_by_most(&paths(list)).into_iter().map(with_limit).collect();
        choose_pool(&held, None)
    }

    #[test]
    fn v1_counts_in_a_hybrid_and_its_pool_is_read() {
        let m = "/sys/fs/cgroup/memory";
        let (_dir, root) = tree(&[
            ("/proc/self/mountinfo", HYBRID),
            ("/proc/7/cgroup", "4:cpu,memory:/vms/a:b\n1:name=systemd:/\n0::/other\n"),
            (&format!("{m}/memory.limit_in_bytes"), NONE_V1),
            (&format!("{m}/vms/memory.limit_in_bytes"), "4096000\n"),
            (&format!("{m}/vms/memory.usage_in_bytes"), "40960\n"),
            (
                &format!("{m}/vms/memory.stat"),
                "rss 1\ntotal_rss 100\ntotal_active_file 30\ntotal_inactive_file 20\n\
                 total_dirty 5\ntotal_writeback 1\ntotal_swap 9\n",
            ),
            (
                &format!("{m}/vms/memory.oom_control"),
                "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            ),
            (&format!("{m}/vms/a:b/memory.limit_in_bytes"), NONE_V1),
        ]);
        let h = read_hierarchy(&root).unwrap().unwrap();
        assert_eq!(h.version, Version::V1);
        let group = read_process_cgroup(&root, h.version, 7).unwrap().unwrap();
        assert_eq!(group, "/vms/a:b");
        let path = pool_of(&root, &h, &[&group, "/vms/c"]).unwrap();
        let pool = read_pool(&root, &h, &path).unwrap().unwrap();
        let expected = Pool {
            path: "/vms".into(),
            nodes: Vec::new(),
            limit: Bytes(4096000),
            usage: Bytes(40960),
            file: Bytes(44),
            anon: Bytes(100),
            swap: Some(Bytes(9)),
            swap_left: None,
            oom_kills: Some(3),
            psi: None,
        };
        assert_eq!(pool, expected);
    }

    #[test]
    fn v2_takes_the_tightest_limit_on_the_way_up() {
        let s = "/sys/fs/cgroup/machine.slice";
        let (_dir, root) = tree(&[
            ("/proc/self/mountinfo", V2),
            ("/sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
            (&format!("{s}/memory.max"), "2000\n"),
            (&format!("{s}/memory.current"), "1500\n"),
            (
                &format!("{s}/memory.stat"),
                "anon 700\nfile 600\nactive_file 300\ninactive_file 200\nfile_dirty 50\n",
            ),
            (&format!("{s}/memory.events"), "low 0\noom 1\noom_kill 1\noom_group_kill 0\n"),
            (&format!("{s}/memory.swap.current"), "64\n"),
            (&format!("{s}/memory.pressure"), "some avg10=1.00 avg60=0 avg300=0 total=5\n"),
            (&format!("{s}/web/memory.max"), "9000\n"),
            (&format!("{s}/web/a/memory.max"), "100\n"),
            (&format!("{s}/web/b/memory.max"), "max\n"),
        ]);
        let h = read_hierarchy(&root).unwrap().unwrap();
        let of = |list: &[&str]| pool_of(&root, &h, list);
        let web = ["/machine.slice/web/a", "/machine.slice/web/b"];
        assert_eq!(of(&web).as_deref(), Some("/machine.slice"));
        assert_eq!(of(&web[..1]).as_deref(), Some("/machine.slice/web/a"));
        assert_eq!(of(&["/machine.slice/web/a", "/elsewhere"]), None);
        assert_eq!(of(&[]), None);
        let pool = read_pool(&root, &h, "/machine.slice").unwrap().unwrap();
        assert_eq!((pool.file, pool.swap, pool.oom_kills), (Bytes(450), Some(Bytes(64)), Some(1)));
        assert_eq!(pool.psi.unwrap().some.total_us, 5);
    }

    #[test]
    fn the_pool_holds_more_than_half_of_the_vms_and_not_all_of_them() {
        let a = ["/vm.slice/a", "/vm.slice/b", "/elsewhere"];
        assert_eq!(held_by_most(&paths(&a)), ["/", "/vm.slice"]);
        assert_eq!(held_by_most(&paths(&a[1..])), ["/"]);
        assert_eq!(held_by_most(&paths(&a[..1])), ["/", "/vm.slice", "/vm.slice/a"]);
        assert!(held_by_most(&[]).is_empty());
        let limits = |list: &[(&str, Option<u64>)]| -> Vec<(String, Option<Bytes>)> {
            list.iter().map(|(p, l)| (p.to_string(), l.map(Bytes))).collect()
        };
        for (held, expected) in [
            (limits(&[("/", None), ("/s", Some(9)), ("/s/a", Some(7))]), Some("/s/a")),
            (limits(&[("/", None), ("/s", Some(7)), ("/s/a", Some(9))]), Some("/s")),
            (limits(&[("/", None), ("/s", Some(7)), ("/s/a", Some(7))]), Some("/s/a")),
            (limits(&[("/", None), ("/s", None)]), None),
            (limits(&[]), None),
        ] {
            assert_eq!(choose_pool(&held, None).as_deref(), expected, "{held:?}");
        }
    }

    #[test]
    fn a_pool_stays_for_a_while_unless_it_limits_nothing_any_more() {
        let held = [("/".to_owned(), None), ("/s".into(), Some(Bytes(5)))];
        let after = |held: &[(String, Option<Bytes>)], limit, age| {
            let previous = Previous { path: "/s/a", limit, age };
            choose_pool(held, Some(previous))
        };
        let (soon, late) = (POOL_STAYS - Duration::from_millis(1), POOL_STAYS);
        assert_eq!(after(&held, Some(Bytes(9)), soon).as_deref(), Some("/s/a"));
        assert_eq!(after(&[], Some(Bytes(9)), soon).as_deref(), Some("/s/a"));
        assert_eq!(after(&held, Some(Bytes(9)), late).as_deref(), Some("/s"));
        assert_eq!(after(&[], Some(Bytes(9)), late), None);
        assert_eq!(after(&held, None, Duration::ZERO).as_deref(), Some("/s"), "it is gone");
    }

    #[test]
    fn the_limit_is_where_a_cgroup_is_throttled_or_where_it_is_killed() {
        let files = [
            ("/m/a/memory.max", "900\n"),
            ("/m/a/memory.high", "700\n"),
            ("/m/b/memory.high", "5\n"),
        ];
        let more = [("/m/b/memory.max", "max\n"), ("/m/c/memory.max", "8\n")];
        let high = [("/m/c/memory.high", "max\n"), ("/m/d/memory.max", "max\n")];
        let (_dir, root) = tree(&[&files[..], &more[..], &high[..]].concat());
        let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
        let of = |cgroup| read_limit(&root, &h, cgroup).unwrap().map(|b| b.0);
        assert_eq!(
            ["/a", "/b", "/c", "/d", "/e"].map(of),
            [Some(700), Some(5), Some(8), None, None]
        );
    }

    #[test]
    fn swap_left_is_the_least_of_the_pool_and_of_all_above_it() {
        let (_dir, root) = tree(&[
            ("/m/s/memory.swap.max", "1000\n"),
            ("/m/s/memory.swap.current", "400\n"),
            ("/m/s/p/memory.swap.max", "max\n"),
            ("/m/s/p/memory.swap.current", "100\n"),
            ("/m/s/q/memory.swap.max", "0\n"),
            ("/m/s/q/memory.swap.current", "50\n"),
            ("/m/free/memory.swap.max", "max\n"),
            ("/m/free/memory.swap.current", "5\n"),
        ]);
        let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
        let of = |cgroup| read_swap_left(&root, &h, cgroup).unwrap().map(|b| b.0);
        assert_eq!(of("/s/p"), Some(600));
        assert_eq!(of("/s/q"), Some(0), "a limit that was lowered below what is used");
        assert_eq!((of("/free"), of("/none")), (None, None));
    }

    #[test]
    fn v1_limits_memory_and_swap_together() {
        let group = |g: &str, files: &[(&str, u64)]| -> Vec<(String, String)> {
            let line = |(f, n): &(&str, u64)| (format!("/m/{g}/memory.{f}"), format!("{n}\n"));
            files.iter().map(line).collect()
        };
        let files = [
            group("a", &[("limit_in_bytes", 1000), ("usage_in_bytes", 900)]),
            group("a", &[("memsw.limit_in_bytes", 1500), ("memsw.usage_in_bytes", 1100)]),
            group("b", &[("limit_in_bytes", 1000), ("usage_in_bytes", 300)]),
            group("b", &[("memsw.limit_in_bytes", 1000), ("memsw.usage_in_bytes", 300)]),
            group("c", &[("limit_in_bytes", 1000), ("usage_in_bytes", 300)]),
        ];
        let files = files.concat();
        let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (&p[..], &t[..])).collect();
        let (_dir, root) = tree(&files);
        let h = Hierarchy { version: Version::V1, point: "/m".into(), root: "/".into() };
        let of = |cgroup| read_swap_left(&root, &h, cgroup).unwrap().map(|b| b.0);
        assert_eq!(of("/a"), Some(300), "400 more of both, 100 of them memory");
        assert_eq!(of("/b"), Some(0), "memory may take all that is left");
        assert_eq!(of("/c"), None, "swap is not accounted");
    }

    #[test]
    fn names_that_only_begin_alike_are_not_ancestors() {
        assert_eq!(common_ancestor(&paths(&["/vm/a", "/vm1/b"])).as_deref(), Some("/"));
        assert_eq!(common_ancestor(&paths(&["/vm/a", "/vm/a/b"])).as_deref(), Some("/vm/a"));
    }

    #[test]
    fn v2_without_the_memory_controller_is_none() {
        let (_dir, root) = tree(&[
            ("/proc/self/mountinfo", V2),
            ("/sys/fs/cgroup/cgroup.controllers", "cpu pids\n"),
        ]);
        assert_eq!(read_hierarchy(&root).unwrap(), None);
    }

    #[test]
    fn a_mounted_part_shows_only_what_is_below_it() {
        let h = Hierarchy { version: Version::V2, point: "/c".into(), root: "/docker/x".into() };
        assert_eq!(h.directory("/docker/x/vm"), Some("/c/vm".into()));
        assert_eq!(h.directory("/docker/x"), Some("/c".into()));
        assert_eq!(h.directory("/docker"), None);
        assert_eq!(h.directory("/docker/x/../../etc"), None);
    }

    #[test]
    fn a_limit_that_is_no_number_is_an_error_with_its_path() {
        let (_dir, root) = tree(&[("/m/memory.max", "lots\n")]);
        let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
        let error = read_limit(&root, &h, "/").unwrap_err().to_string();
        assert!(error.contains("/m/memory.max: line 1: “lots” is not a number"), "{error}");
    }

    /// Makes and removes a real child cgroup: needs root and a v1 or v2 hierarchy.
    #[test]
    fn this_machine_reads_and_a_child_cgroup_with_a_limit_is_a_pool() {
        let root = Root::default();
        let Some(h) = read_hierarchy(&root).unwrap() else { return };
        let me = std::process::id();
        let mine = read_process_cgroup(&root, h.version, me).unwrap().unwrap();
        pool_of(&root, &h, &[&mine]);
        if !rustix::process::geteuid().is_root() || h.version == Version::V2 {
            return;
        }
        struct Child(PathBuf);
        impl Drop for Child {
            fn drop(&mut self) {
                let _ = fs::remove_dir(&self.0);
            }
        }
        let name = format!("{}/ebb-test-{me}", mine.trim_end_matches('/'));
        let child = Child(h.directory(&name).unwrap());
        if fs::create_dir(&child.0).is_err() {
            return; // The hierarchy is read-only, as in most containers.
        }
        fs::write(child.0.join("memory.limit_in_bytes"), "1048576").unwrap();
        assert_eq!(pool_of(&root, &h, &[&name, &format!("{name}/vm")]).as_ref(), Some(&name));
        let pool = read_pool(&root, &h, &name).unwrap().unwrap();
        assert_eq!((pool.limit, pool.oom_kills), (Bytes::mib(1), Some(0)));
    }
}
