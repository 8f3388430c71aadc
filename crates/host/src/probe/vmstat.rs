//! `/proc/vmstat` (Linux `mm/vmstat.c`): the counters that tell of paging.

use ebb_core::sample::Vmstat;

use crate::root::{ParseError, Probed, Root, fields};

pub fn read_vmstat(root: &Root) -> Probed<Vmstat> {
    root.parse("/proc/vmstat", parse_vmstat)
}

/// Whether a page of zeros that is paged out is only noted (6.12+, which counts them).
pub fn zeros_are_not_written(root: &Root) -> bool {
    let text = root.read("/proc/vmstat").ok().flatten();
    text.is_some_and(|t| t.lines().any(|l| l.starts_with("swpout_zero ")))
}

/// Parses it. Refaults are `workingset_refault_anon` + `_file` (5.9+), or the
/// one `workingset_refault` of older kernels.
pub fn parse_vmstat(text: &str) -> Result<Vmstat, ParseError> {
    let keys = [
        "pswpin",
        "pswpout",
        "pgmajfault",
        "oom_kill",
        "cow_ksm",
        "workingset_refault_anon",
        "workingset_refault_file",
        "workingset_refault",
    ];
    let [swap_in, swap_out, major_faults, oom_kills, cow_ksm, anon, file, all] =
        fields(text, keys, |v| v.parse::<u64>().ok())?;
    Ok(Vmstat {
        swap_in_pages: swap_in.unwrap_or_default(),
        swap_out_pages: swap_out.unwrap_or_default(),
        major_faults: major_faults.ok_or_else(|| ParseError::missing("pgmajfault"))?,
        refaults: [anon, file, all].into_iter().flatten().fold(0, u64::saturating_add),
        oom_kills,
        cow_ksm,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refaults_add_up_and_oom_kill_may_be_absent() {
        let v = parse_vmstat(
            "pswpin 1\npswpout 2\npgmajfault 3\nworkingset_refault_anon 4\nworkingset_refault_file 5\n",
        )
        .unwrap();
        assert_eq!((v.swap_in_pages, v.swap_out_pages, v.major_faults), (1, 2, 3));
        assert_eq!((v.refaults, v.oom_kills), (9, None));
        assert_eq!(parse_vmstat("pgmajfault 3\noom_kill 7\n").unwrap().oom_kills, Some(7));
        assert_eq!(parse_vmstat("pgmajfault -1\n").unwrap_err().line, 1);
        assert!(parse_vmstat("").is_err());
    }

    #[test]
    fn this_machine_reads() {
        assert!(read_vmstat(&Root::default()).unwrap().is_some());
    }
}
