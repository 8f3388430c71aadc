//! Which other processes map the RAM that a QEMU shares (`/proc/PID/maps`).
//!
//! Such a process writes to that RAM past the page tables that the agent in QEMU watches.
//! What cannot be read is not known, and not known is a reason to keep off.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};

use ebb_core::wire::Segment;

use crate::probe::maps::parse_line;
use crate::root::Root;

/// Most bytes read of one process: a QEMU of which KSM has 65,530 ranges has 6 MB.
const MAX_MAPS: u64 = 32 << 20;

/// A file as `/proc/PID/maps` names it: device and inode.
type Inode = (String, u64);

/// `Ok`: no other process maps the files that these segments of `pid` lie in. The error is
/// for people.
pub fn are_private(root: &Root, pid: u32, segments: &[Segment]) -> Result<(), String> {
    let mut files = BTreeSet::new();
    each_mapping(root, pid, &mut |start, end, file| {
        let ours = segments.iter().any(|s| s.hva < end && start < s.hva.saturating_add(s.size));
        if file.1 != 0 && ours {
            files.insert(file);
        }
    })
    .map_err(|e| format!("its own mappings cannot be read: {e}"))?;
    if files.is_empty() {
        return Ok(());
    }
    let all = root.read_dir("/proc").map_err(|e| e.to_string())?;
    let pids = all.iter().flatten().filter_map(|name| name.to_str()?.parse::<u32>().ok());
    for other in pids.filter(|p| *p != pid) {
        let mut mapped = false;
        match each_mapping(root, other, &mut |_, _, file| mapped |= files.contains(&file)) {
            Ok(()) if !mapped => {}
            Ok(()) => return Err(format!("process {other} maps this VM's RAM as well")),
            // It ended meanwhile; a kernel thread has none.
            Err(e) if has_ended(root, other, &e) => {}
            Err(e) => return Err(format!("mappings of process {other} cannot be read: {e}")),
        }
    }
    Ok(())
}

fn has_ended(root: &Root, pid: u32, error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        || matches!(root.metadata(format!("/proc/{pid}")), Ok(None))
}

/// Reads line by line: start, end, device and inode.
fn each_mapping(
    root: &Root,
    pid: u32,
    each: &mut dyn FnMut(u64, u64, Inode),
) -> std::io::Result<()> {
    let file = std::fs::File::open(root.path(format!("/proc/{pid}/maps")))?;
    let mut text = BufReader::new(file.take(MAX_MAPS));
    let mut line = Vec::new();
    let mut read = 0;
    loop {
        line.clear();
        let n = text.by_ref().take(8192).read_until(b'\n', &mut line)?;
        read += n as u64;
        if n == 0 {
            return if read < MAX_MAPS { Ok(()) } else { Err(std::io::Error::other("too long")) };
        }
        let line = String::from_utf8_lossy(&line);
        if let Some(m) = parse_line(&line) {
            each(m.start, m.end, (m.device.to_owned(), m.inode));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_second_mapper_is_found_and_what_cannot_be_read_is_no_yes() {
        let dir = tempfile::tempdir().unwrap();
        let write = |pid: u32, text: &str| {
            let proc = dir.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&proc).unwrap();
            fs::write(proc.join("maps"), text).unwrap();
        };
        let ram = "7f0000000000-7f0040000000 rw-s 00000000 00:01 77 /memfd:ram (deleted)\n";
        let other = "55aa00000000-55aa00001000 r-xp 00000000 08:01 77 /usr/bin/x\nnonsense\n";
        write(10, &format!("{other}{ram}7fff00000000-7fff00001000 rw-p 00000000 00:00 0\n"));
        write(11, other);
        let root = Root::at(dir.path());
        let segment = Segment { gpa: 0, size: 1 << 30, hva: 0x7f00_0000_0000 };
        assert_eq!(are_private(&root, 10, &[segment]), Ok(()));
        write(12, &format!("{other}{ram}"));
        let why = are_private(&root, 10, &[segment]).unwrap_err();
        assert!(why.contains("process 12 maps"), "{why}");
        let elsewhere = Segment { hva: 0x10_0000, ..segment };
        assert_eq!(are_private(&root, 10, &[elsewhere]), Ok(()), "not of this RAM");
        fs::remove_file(dir.path().join("proc/12/maps")).unwrap();
        assert!(are_private(&root, 10, &[segment]).unwrap_err().contains("process 12"));
        fs::remove_dir(dir.path().join("proc/12")).unwrap();
        assert_eq!(are_private(&root, 10, &[segment]), Ok(()));
        assert!(are_private(&root, 99, &[segment]).is_err());
    }
}
