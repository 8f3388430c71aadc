//! A process's memory, mapping by mapping: `/proc/PID/smaps` (Linux
//! `fs/proc/task_mmu.c`), and which of them are a VM's RAM.
//!
//! The kernel walks all page tables for it, milliseconds per GiB of 4 KiB pages:
//! once per VM and scan, never every tick.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use ebb_core::mapping::Mapping;
use ebb_core::units::Bytes;

use super::meminfo::parse_kib;
use crate::root::{ParseError, ProbeError, Probed, Root, probed};
use crate::sys::Range;

/// Most bytes read: some 700 for each mapping, of which a process has at most
/// 65,530 by default.
const SMAPS_MAX: u64 = 64 << 20;
/// Without QEMU's marks only mappings of this size are taken for RAM.
const LEAST_RAM: u64 = 64 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    pub range: Range,
    /// Private, readable, writable, of no file.
    pub plain: bool,
    pub resident: Bytes,
    /// `KSM` (6.7+): merged, zero pages not counted.
    pub ksm: Option<Bytes>,
    pub huge: Bytes,
    /// `mg`: KSM looks at it.
    pub mergeable: bool,
    /// `dc`: not copied by fork, as QEMU has all guest memory.
    pub dontfork: bool,
    /// `ht`: hugetlbfs.
    pub hugetlb: bool,
    /// `sh`: shared with others.
    pub shared: bool,
}

/// Reads `/proc/PID/smaps`; `None` where the process has ended.
pub fn read_smaps(root: &Root, pid: u32) -> Probed<Vec<Region>> {
    let path = root.path(format!("/proc/{pid}/smaps"));
    let parse = |file: File| parse_smaps(BufReader::with_capacity(64 << 10, file.take(SMAPS_MAX)));
    let Some(parsed) = probed(&path, File::open(&path).and_then(parse))? else { return Ok(None) };
    let regions = parsed.map_err(|error| ProbeError::Parse { path, error })?;
    // A process without memory of its own is one that has ended.
    Ok(Some(regions).filter(|r| !r.is_empty()))
}

/// The mappings in a text. The outer error is that of reading it.
pub fn parse_smaps(text: impl BufRead) -> io::Result<Result<Vec<Region>, ParseError>> {
    let mut regions = Vec::new();
    for (i, line) in text.split(b'\n').enumerate() {
        if let Err(error) = take_line(&mut regions, i + 1, &String::from_utf8_lossy(&line?)) {
            return Ok(Err(error));
        }
    }
    Ok(Ok(regions))
}

/// A header, `Key:  12 kB`, or `VmFlags: rd wr`; unknown keys are passed over.
fn take_line(regions: &mut Vec<Region>, number: usize, line: &str) -> Result<(), ParseError> {
    let bad = || ParseError::new(number, line);
    let mut words = line.split_ascii_whitespace();
    let Some(first) = words.next() else { return Ok(()) };
    let Some(key) = first.strip_suffix(':') else {
        regions.push(header(line).ok_or_else(bad)?);
        return Ok(());
    };
    let region = regions.last_mut().ok_or_else(bad)?;
    if key == "VmFlags" {
        for flag in words {
            match flag {
                "mg" => region.mergeable = true,
                "dc" => region.dontfork = true,
                "ht" => region.hugetlb = true,
                "sh" => region.shared = true,
                _ => {}
            }
        }
        return Ok(());
    }
    let field = match key {
        "Rss" => &mut region.resident,
        "KSM" => region.ksm.get_or_insert_default(),
        "AnonHugePages" => &mut region.huge,
        _ => return Ok(()),
    };
    *field = line.split_once(':').and_then(|(_, value)| parse_kib(value)).ok_or_else(bad)?;
    Ok(())
}

/// `7f00-7f10 rw-p 00000000 00:00 0   [name]`
fn header(line: &str) -> Option<Region> {
    let Mapping { start, end, permissions, inode, .. } = Mapping::parse(line)?;
    Some(Region {
        range: Range { start, len: end.checked_sub(start)? },
        plain: permissions.starts_with("rw") && permissions.ends_with('p') && inode == 0,
        shared: permissions.ends_with('s'),
        ..Region::default()
    })
}

impl Region {
    pub fn can_be_merged(&self) -> bool {
        self.plain && !self.hugetlb
    }
}

/// The mappings that can be a VM's RAM and can be merged. QEMU marks guest memory
/// as not to be copied by fork; where nothing is marked so, large plain mappings
/// count.
pub fn guest_ram(regions: &[Region]) -> Vec<&Region> {
    marked_or_large(regions, Region::can_be_merged)
}

/// The mappings that can be a VM's RAM, also those that cannot be merged.
pub fn guest_memory(regions: &[Region]) -> Vec<&Region> {
    marked_or_large(regions, |_| true)
}

fn marked_or_large(regions: &[Region], kind: impl Fn(&Region) -> bool) -> Vec<&Region> {
    let those = || regions.iter().filter(|r| kind(r));
    let marked: Vec<&Region> = those().filter(|r| r.dontfork).collect();
    if !marked.is_empty() {
        return marked;
    }
    those().filter(|r| r.can_be_merged() && r.range.len >= LEAST_RAM).collect()
}

/// Guest memory that KSM refuses, and why; the largest such mapping decides.
pub fn unmergeable(regions: &[Region]) -> Option<(Bytes, &'static str)> {
    let refused = |r: &&Region| r.dontfork && (r.shared || r.hugetlb) && r.range.len >= LEAST_RAM;
    let held: Bytes = regions.iter().filter(refused).map(|r| r.resident).sum();
    let largest = regions.iter().filter(refused).max_by_key(|r| r.range.len)?;
    let why = match largest.hugetlb {
        true => "its RAM lies in hugetlb pages, which KSM does not merge",
        false => "its RAM is shared memory (memfd or a file), which KSM does not merge",
    };
    Some((held, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:            1048576 kB
Rss:              524288 kB
Swap:                 12 kB
KSM:                  64 kB
AnonHugePages:    409600 kB
THPeligible:           1
VmFlags: rd wr mr mw me dc ac sd hg mg
7f0050000000-7f0060000000 rw-p 00000000 00:00 0   [anon: a name: b]
Rss:                   0 kB
VmFlags: rd wr mr mw me ac
7f0070000000-7f0080000000 rw-s 00000000 00:01 1034   /memfd:ram (deleted)
Rss:               65536 kB
VmFlags: rd wr sh mr mw me ms dc sd
55d000000000-55d000001000 r-xp 00001000 fe:00 77   /usr/bin/qemu
VmFlags: rd ex mr mw me sd
";

    #[test]
    fn ram_is_what_qemu_marked_else_what_is_large() {
        let regions = parse_smaps(SMAPS.as_bytes()).unwrap().unwrap();
        assert_eq!(regions.len(), 4);
        let ram = guest_ram(&regions);
        assert_eq!(ram.len(), 1);
        assert_eq!(ram[0].range, Range { start: 0x7f00_0000_0000, len: 1 << 30 });
        assert_eq!((ram[0].ksm, ram[0].huge), (Some(Bytes::kib(64)), Bytes::mib(400)));
        assert!(ram[0].mergeable);
        assert_eq!(guest_ram(&regions[1..]), [&regions[1]]);
        let (held, why) = unmergeable(&regions).unwrap();
        assert!(held == Bytes::mib(64) && why.contains("shared memory"));
        assert_eq!(unmergeable(&regions[..2]), None);
    }

    #[test]
    fn what_is_no_smaps_is_refused_with_its_line() {
        for (text, line) in [
            ("Rss: 4 kB\n", 1),
            ("7f00-7e00 rw-p 0 0:0 0\n", 1),
            ("7f00-7f10 rw-p 0 0:0 0\nRss: many\n", 2),
            ("7f00-zz rw-p 0 0:0 0\n", 1),
        ] {
            assert_eq!(parse_smaps(text.as_bytes()).unwrap().unwrap_err().line, line, "{text}");
        }
    }
}
