//! RAM that is recycled is closed to KSM.
//!
//! When KSM replaces a page by a merged one, or by the zero page, the new mapping
//! has lost its userfaultfd write-protection (`mm/ksm.c`, `replace_page`; found on
//! Linux 6.18: 63 of 64 protected pages were written without a fault after they
//! had been merged). A guest could then write to a page between our second look at
//! the map and the discard, and the tripwire at guest page 0 could vanish, because
//! page 0 is alike in many VMs. So an agent takes the RAM it is given out of KSM
//! before it protects anything. QEMU opens it by default (`mem-merge=on`).
//!
//! That breaks what is merged of it already, which takes memory: where it is not
//! there, the agent stands aside.

use std::io;

use crate::ram::{Kind, Ram};
use crate::sys::{self, Range};

/// What must stay free beside what breaking merges takes, pages.
const SPARE: u64 = (256 << 20) / 4096;

/// Takes all of it out of KSM; the error is a reason to stand aside.
pub fn leave_ksm(ram: &Ram) -> Result<(), String> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    has_room(&read("/proc/self/ksm_stat"), &read("/proc/meminfo"))?;
    keep_out(ram)
}

/// Once more: somebody may have opened it again. Costs microseconds where nobody
/// has.
pub fn keep_out(ram: &Ram) -> Result<(), String> {
    for p in ram.pieces().iter().filter(|p| matches!(p.kind, Kind::Anonymous)) {
        match sys::unmergeable(Range { start: p.hva, len: p.size }) {
            // A kernel without KSM does not know the advice.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
            Err(e) => return Err(format!("RAM cannot be taken out of KSM: {e}")),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Whether there is memory for what is merged; unknown numbers count as 0 merged
/// and as nothing available.
fn has_room(ksm_stat: &str, meminfo: &str) -> Result<(), String> {
    let number = |text: &str, key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key));
        line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let merged = number(ksm_stat, "ksm_merging_pages ") + number(ksm_stat, "ksm_zero_pages ");
    let available = number(meminfo, "MemAvailable:") / 4;
    if merged > 0 && merged + SPARE > available {
        return Err(format!(
            "KSM has merged {} MiB of this VM, which does not go together with recycling, and {} \
             MiB of available memory are too few to undo it: free some, then restart Ebb",
            merged >> 8,
            available >> 8
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_are_undone_only_where_there_is_room() {
        let stat = "ksm_rmap_items 9\nksm_zero_pages 50000\nksm_merging_pages 50000\n";
        let mem = |kib: u64| format!("MemTotal: 1 kB\nMemAvailable:  {kib} kB\n");
        let why = has_room(stat, &mem(600_000)).unwrap_err();
        assert!(why.contains("390 MiB of this VM") && why.contains("585 MiB of avail"), "{why}");
        assert_eq!(has_room(stat, &mem(700_000)), Ok(()));
        assert_eq!(has_room("", &mem(0)), Ok(()), "nothing is merged");
        assert_eq!(has_room("ksm_merging_pages 0\n", ""), Ok(()));
    }
}
