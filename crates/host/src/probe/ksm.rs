//! `/sys/kernel/mm/ksm` (Linux `mm/ksm.c`): the whole host's merging; and a
//! process's part of it, `/proc/PID/ksm_stat` (6.1+, `fs/proc/base.c`).

use ebb_core::sample::Ksm;
pub use ebb_core::sample::KsmStat;

use crate::root::{ParseError, ProbeError, Root, parse_number};

const DIR: &str = "/sys/kernel/mm/ksm";

/// Reads the directory (not who else is about); `None` where KSM is not built in.
pub fn read_ksm(root: &Root) -> Result<Option<Ksm>, ProbeError> {
    let Some(run) = number::<u64>(root, "run")? else { return Ok(None) };
    let count = |name| number::<u64>(root, name).map(|n| n.unwrap_or(0));
    Ok(Some(Ksm {
        run,
        pages_shared: count("pages_shared")?,
        pages_sharing: count("pages_sharing")?,
        pages_unshared: count("pages_unshared")?,
        pages_volatile: count("pages_volatile")?,
        full_scans: count("full_scans")?,
        zero_pages: number(root, "ksm_zero_pages")?,
        general_profit: number(root, "general_profit")?,
        pages_scanned: read_pages_scanned(root)?,
        pages_skipped: number(root, "pages_skipped")?,
        chains: count("stable_node_chains")?,
        chain_pages: count("stable_node_dups")?,
        cpu_ms: None,
        ksmtuned: None,
    }))
}

/// Pages that `ksmd` looked at since boot (6.6+).
pub fn read_pages_scanned(root: &Root) -> Result<Option<u64>, ProbeError> {
    number(root, "pages_scanned")
}

/// Times that `ksmd` looked at all of it since boot.
pub fn read_full_scans(root: &Root) -> Result<Option<u64>, ProbeError> {
    number(root, "full_scans")
}

/// The kernel's thread that merges.
pub fn ksmd(root: &Root) -> Option<u32> {
    // A kernel thread has no command line, which no process can imitate.
    let bare = |pid| root.read_bytes(format!("/proc/{pid}/cmdline")).ok().flatten();
    find(root, "ksmd", |pid| bare(pid).is_none_or(|line| line.is_empty()))
}

/// The pid of a `ksmtuned` that sets the same knobs, if one runs.
pub fn ksmtuned(root: &Root) -> Option<u32> {
    find(root, "ksmtuned", |_| true)
}

fn find(root: &Root, name: &str, also: impl Fn(u32) -> bool) -> Option<u32> {
    let entries = std::fs::read_dir(root.path("/proc")).ok()?;
    let mut pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let comm = root.read(format!("/proc/{pid}/comm")).ok().flatten();
        comm.is_some_and(|c| c.trim() == name) && also(*pid)
    })
}

/// Reads `/proc/PID/ksm_stat`; `None` where the process has ended or the kernel
/// has no such file.
pub fn read_ksm_stat(root: &Root, pid: u32) -> Result<Option<KsmStat>, ProbeError> {
    root.parse(format!("/proc/{pid}/ksm_stat"), parse_ksm_stat)
}

/// Parses it: `key value` a line, newer keys with a colon; unknown ones are
/// passed over.
pub fn parse_ksm_stat(text: &str) -> Result<KsmStat, ParseError> {
    let mut stat = KsmStat::default();
    for (i, line) in text.lines().enumerate() {
        let mut words = line.split_ascii_whitespace();
        let (Some(key), Some(value)) = (words.next(), words.next()) else { continue };
        let bad = || ParseError::new(i + 1, line.chars().take(80).collect::<String>());
        let number = || value.parse().map(Some).map_err(|_| bad());
        match key.trim_end_matches(':') {
            "ksm_rmap_items" => stat.rmap_items = number()?,
            "ksm_zero_pages" => stat.zero_pages = number()?,
            "ksm_merging_pages" => stat.merging_pages = number()?,
            "ksm_process_profit" => stat.profit = Some(value.parse().map_err(|_| bad())?),
            "ksm_mergeable" => stat.mergeable = Some(value == "yes"),
            _ => {}
        }
    }
    Ok(stat)
}

fn number<T: std::str::FromStr>(root: &Root, name: &str) -> Result<Option<T>, ProbeError> {
    root.parse(format!("{DIR}/{name}"), parse_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_tells_its_part_and_old_kernels_less_of_it() {
        let text = "ksm_rmap_items 17\nksm_zero_pages 3\nksm_merging_pages 5\n\
                    ksm_process_profit -64\nksm_merge_any: no\nksm_mergeable: yes\n";
        let stat = parse_ksm_stat(text).unwrap();
        let want = KsmStat {
            rmap_items: Some(17),
            zero_pages: Some(3),
            merging_pages: Some(5),
            profit: Some(-64),
            mergeable: Some(true),
        };
        assert_eq!(stat, want);
        assert_eq!(parse_ksm_stat("ksm_rmap_items 0\n").unwrap().mergeable, None);
        assert_eq!(parse_ksm_stat("x 1\nksm_rmap_items -1\n").unwrap_err().line, 2);
    }

    #[test]
    fn profit_is_signed_and_newer_files_may_be_absent() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert!(read_ksm(&root).unwrap().is_none());
        let ksm = dir.path().join("sys/kernel/mm/ksm");
        std::fs::create_dir_all(&ksm).unwrap();
        for (name, value) in [("run", "1"), ("pages_sharing", "5"), ("general_profit", "-64")] {
            std::fs::write(ksm.join(name), format!("{value}\n")).unwrap();
        }
        let k = read_ksm(&root).unwrap().unwrap();
        assert_eq!((k.run, k.pages_sharing), (1, 5));
        assert_eq!((k.general_profit, k.zero_pages), (Some(-64), None));
        std::fs::write(ksm.join("pages_sharing"), "many\n").unwrap();
        let error = read_ksm(&root).unwrap_err().to_string();
        assert!(error.contains("pages_sharing: line 1: “many” is not a number"), "{error}");
    }
}
