//! NUMA nodes: which have memory and how much (Linux `drivers/base/node.c`), and to which of them
//! a QEMU is bound.
//!
//! What binds is the cpuset of its cgroups (`Mems_allowed_list`), its memory policy (`numactl
//! --membind`), and `host-nodes` with `policy=bind` on its command line. Other policies fall back
//! to other nodes and bind nothing.

use std::collections::BTreeSet;

use ebb_core::sample::LimitSample;
use ebb_core::units::Bytes;

use super::meminfo::parse_kib;
use super::qemu::Options;
use crate::root::{ParseError, ProbeError, Probed, Root, parse_number};

const NODES: &str = "/sys/devices/system/node";
/// The kernel's own most (`CONFIG_NODES_SHIFT` is 10 at most).
const MOST_NODES: u32 = 1024;

/// The nodes that have memory; none where the kernel does not tell.
pub fn read_nodes(root: &Root) -> Result<Vec<u32>, ProbeError> {
    Ok(root.parse(format!("{NODES}/has_memory"), parse_list)?.unwrap_or_default())
}

/// Parses a list of ranges: `0-1,4`.
pub fn parse_list(text: &str) -> Result<Vec<u32>, ParseError> {
    let wrong = || ParseError::new(1, text.trim());
    let mut nodes = BTreeSet::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| *n < MOST_NODES);
        let (first, last) = (number(first).ok_or_else(wrong)?, number(last).ok_or_else(wrong)?);
        nodes.extend(first..=last);
    }
    Ok(nodes.into_iter().collect())
}

/// These nodes as a limit; `None` where one of them is gone.
pub fn read_usage(root: &Root, nodes: &[u32]) -> Probed<LimitSample> {
    let mut sum =
        LimitSample { path: name(nodes), nodes: nodes.to_vec(), ..LimitSample::default() };
    for node in nodes {
        let dir = format!("{NODES}/node{node}");
        let Some(m) = root.parse(format!("{dir}/meminfo"), parse_node)? else { return Ok(None) };
        let huge = read_huge(root, &dir)?;
        sum.limit += m.limit - huge;
        sum.usage += m.usage - huge;
        sum.file += m.file;
        sum.anon += m.anon;
    }
    Ok(Some(sum))
}

pub fn name(nodes: &[u32]) -> String {
    let list: Vec<String> = nodes.iter().map(u32::to_string).collect();
    format!("node{} {}", if nodes.len() == 1 { "" } else { "s" }, list.join(","))
}

/// What the pools of huge pages hold of a node.
fn read_huge(root: &Root, dir: &str) -> Result<Bytes, ProbeError> {
    let mut huge = Bytes::ZERO;
    for name in root.read_dir(format!("{dir}/hugepages"))?.unwrap_or_default() {
        let name = name.to_string_lossy();
        let size = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB"));
        let Some(kib) = size.and_then(|n| n.parse::<u64>().ok()) else { continue };
        let count: Option<u64> =
            root.parse(format!("{dir}/hugepages/{name}/nr_hugepages"), parse_number)?;
        huge += Bytes(count.unwrap_or(0).saturating_mul(kib).saturating_mul(1024));
    }
    Ok(huge)
}

/// What `Node 0 MemTotal:  123 kB` lines tell of a pool. `file` is file cache that can be dropped,
/// and half of the kernel's caches that shrink.
pub fn parse_node(text: &str) -> Result<LimitSample, ParseError> {
    let (mut total, mut free, mut anon) = (None, None, Bytes::ZERO);
    let (mut clean, mut dirty, mut slab) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
    for (i, line) in text.lines().enumerate() {
        let Some((key, rest)) = line.split_once(':') else { continue };
        let value = || parse_kib(rest).ok_or_else(|| ParseError::new(i + 1, line));
        match key.rsplit(' ').next().unwrap_or_default() {
            "MemTotal" => total = Some(value()?),
            "MemFree" => free = Some(value()?),
            "Active(file)" | "Inactive(file)" => clean += value()?,
            "Dirty" | "Writeback" => dirty += value()?,
            "SReclaimable" => slab = value()?,
            "AnonPages" => anon = value()?,
            _ => {}
        }
    }
    let limit = total.ok_or_else(|| ParseError::missing("MemTotal"))?;
    let free = free.ok_or_else(|| ParseError::missing("MemFree"))?;
    let file = (clean - dirty) + slab.share(0.5);
    Ok(LimitSample { limit, usage: limit - free, file, anon, ..LimitSample::default() })
}

/// The nodes that a process's memory is bound to, where that is not all of `nodes`.
pub fn read_binding(root: &Root, pid: u32, nodes: &[u32]) -> Result<Vec<u32>, ProbeError> {
    let allowed = root.parse(format!("/proc/{pid}/status"), parse_allowed)?.flatten();
    let line = root.read_bytes(format!("/proc/{pid}/cmdline"))?.unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    // Only the first line: the kernel counts the pages of each mapping that it shows.
    let maps = root.read_line(format!("/proc/{pid}/numa_maps"))?;
    let policy = by_backends(&line).or_else(|| by_policy(&maps.unwrap_or_default()));
    let is_in = |list: &Option<Vec<u32>>, n: &u32| list.as_ref().is_none_or(|l| l.contains(n));
    let bound: Vec<u32> =
        nodes.iter().copied().filter(|n| is_in(&allowed, n) && is_in(&policy, n)).collect();
    Ok(if bound.len() < nodes.len() { bound } else { Vec::new() })
}

/// `Mems_allowed_list` of `/proc/PID/status`.
fn parse_allowed(text: &str) -> Result<Option<Vec<u32>>, ParseError> {
    text.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:")).map(parse_list).transpose()
}

/// The policy that holds for what has none of its own: `7f00 bind=static:0-1 file=…`.
fn by_policy(line: &str) -> Option<Vec<u32>> {
    let policy = line.split(' ').nth(1)?;
    let (mode, nodes) = policy.split_once(':')?;
    let binds = mode.split('=').next() == Some("bind");
    parse_list(nodes).ok().filter(|nodes| binds && !nodes.is_empty())
}

/// Where each `-object memory-backend-…` is bound: all that they are bound to. The balloon cannot
/// choose among them.
fn by_backends(line: &str) -> Option<Vec<u32>> {
    let args: Vec<&str> = line.split('\0').collect();
    let objects = args.windows(2).filter(|w| matches!(w[0], "-object" | "--object")).map(|w| w[1]);
    let mut all = BTreeSet::new();
    for object in objects {
        let object = Options::parse(object, "qom-type");
        if object.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-")) {
            let lists = object.all("host-nodes");
            let nodes: Vec<u32> =
                lists.iter().flat_map(|l| parse_list(l).unwrap_or_default()).collect();
            let binds = object.get("policy").as_deref() == Some("bind") && !nodes.is_empty();
            all.extend(binds.then_some(nodes)?);
        }
    }
    (!all.is_empty()).then(|| all.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;
    use proptest::prelude::*;

    #[test]
    fn lists_of_nodes_are_ranges() {
        assert_eq!(parse_list("0\n").unwrap(), [0]);
        assert_eq!(parse_list("3,0-1,1\n").unwrap(), [0, 1, 3]);
        assert!(parse_list("\n").unwrap().is_empty());
        for wrong in ["x", "0-", "-1", "0-99999999", "1024"] {
            assert!(parse_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_node_has_what_is_free_and_what_can_be_dropped() {
        let text = "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  100 kB\nNode 0 Active(file): 30 kB\n\
                    Node 0 Inactive(file): 20 kB\nNode 0 Dirty: 8 kB\nNode 0 Writeback: 2 kB\n\
                    Node 0 SReclaimable: 6 kB\nNode 0 AnonPages: 400 kB\n\
                    Node 0 HugePages_Total:     3\n";
        let m = parse_node(text).unwrap();
        assert_eq!((m.limit, m.usage), (Bytes::kib(1000), Bytes::kib(900)));
        assert_eq!((m.file, m.anon), (Bytes::kib(43), Bytes::kib(400)));
        assert!(parse_node("Node 0 MemTotal: 1 kB\n").is_err());
        assert_eq!(parse_node("Node 0 MemTotal: 1 kB\nNode 0 MemFree: x\n").unwrap_err().line, 2);
    }

    #[test]
    fn what_binds_is_cpuset_policy_and_command_line() {
        let ram = "memory-backend-ram,id=m,size=1G,host-nodes=";
        let json = r#"{"qom-type":"memory-backend-memfd","host-nodes":[1],"policy":"bind"}"#;
        let free = "memory-backend-ram,id=n,size=1G";
        for (allowed, maps, objects, bound) in [
            ("0-3", "default", vec![], vec![]),
            ("1", "default", vec![], vec![1]),
            ("0-3", "bind:2", vec![], vec![2]),
            ("0-3", "bind=static:0-1", vec![], vec![0, 1]),
            ("0-3", "prefer:1", vec![], vec![]),
            ("0-3", "interleave:0-1", vec![], vec![]),
            ("0-3", "default", vec![format!("{ram}0-1,policy=bind")], vec![0, 1]),
            ("0-3", "default", vec![format!("{ram}0,policy=preferred")], vec![]),
            ("0-3", "default", vec![format!("{ram}0,host-nodes=2,policy=bind")], vec![0, 2]),
            ("0-3", "default", vec![json.into(), format!("{ram}0,policy=bind")], vec![0, 1]),
            ("0-3", "default", vec![json.into(), free.into()], vec![]),
            ("0-3", "default", vec!["{".into(), "iothread,id=x".into()], vec![]),
            ("1-2", "default", vec![format!("{ram}0-1,policy=bind")], vec![1]),
            // What excludes each other binds nothing that is known.
            ("3", "default", vec![format!("{ram}0,policy=bind")], vec![]),
        ] {
            let root = tree(&[]);
            let write = |file: &str, text: String| root.put(format!("/proc/7/{file}"), text);
            write("status", format!("Name: x\nMems_allowed_list:\t{allowed}\n"));
            write("numa_maps", format!("55ac {maps} file=/usr/bin/kvm\n7f00 bind:3 anon=9\n"));
            let objects: Vec<String> = objects.iter().map(|o| format!("-object\0{o}\0")).collect();
            write("cmdline", format!("kvm\0{}", objects.concat()));
            let read = read_binding(&root, 7, &[0, 1, 2, 3]).unwrap();
            assert_eq!(read, bound, "{allowed} {maps} {objects:?}");
        }
        assert!(read_binding(&tree(&[]), 7, &[0, 1]).unwrap().is_empty());
    }

    #[test]
    fn nodes_are_a_limit_without_their_huge_pages() {
        let root = tree(&[]);
        let write = |file: &str, text: &str| root.put(format!("{NODES}/{file}"), text);
        write("has_memory", "0-1\n");
        write("node0/meminfo", "Node 0 MemTotal: 9000 kB\nNode 0 MemFree: 1000 kB\n");
        write("node1/meminfo", "Node 1 MemTotal: 7000 kB\nNode 1 MemFree: 2000 kB\n");
        write("node1/hugepages/hugepages-2048kB/nr_hugepages", "1\n");
        assert_eq!(read_nodes(&root).unwrap(), [0, 1]);
        let one = read_usage(&root, &[1]).unwrap().unwrap();
        assert_eq!((one.path.as_str(), one.limit), ("node 1", Bytes::kib(7000 - 2048)));
        assert_eq!(one.usage, Bytes::kib(5000 - 2048));
        let both = read_usage(&root, &[0, 1]).unwrap().unwrap();
        assert_eq!((both.path.as_str(), both.nodes), ("nodes 0,1", vec![0, 1]));
        assert_eq!(both.limit - both.usage, Bytes::kib(3000));
        assert_eq!(read_usage(&root, &[0, 5]).unwrap(), None);
    }

    #[test]
    fn this_machine_reads() {
        let root = Root::default();
        let nodes = read_nodes(&root).unwrap();
        if !nodes.is_empty() {
            assert!(read_usage(&root, &nodes).unwrap().unwrap().limit > Bytes::mib(1));
        }
        let mine = read_binding(&root, std::process::id(), &nodes).unwrap();
        assert!(mine.len() < nodes.len().max(1));
    }

    proptest! {
        #[test]
        fn any_text_is_safe(text in ".{0,200}") {
            let _ = (parse_list(&text), parse_node(&text), by_policy(&text));
            let _ = by_backends(&format!("kvm\0-object\0{text}"));
        }
    }
}
