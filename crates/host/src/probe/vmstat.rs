//! `/proc/vmstat` (Linux `mm/vmstat.c`): the counters that tell of paging.

use ebb_core::sample::Vmstat;

use crate::root::{ParseError, Probed, Root};

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
    let (mut v, mut faults) = (Vmstat::default(), None);
    for (i, line) in text.lines().enumerate() {
        let Some((key, rest)) = line.split_once(' ') else { continue };
        let value = || rest.trim().parse::<u64>().map_err(|_| ParseError::new(i + 1, line));
        match key {
            "pswpin" => v.swap_in_pages = value()?,
            "pswpout" => v.swap_out_pages = value()?,
            "pgmajfault" => faults = Some(value()?),
            "cow_ksm" => v.cow_ksm = Some(value()?),
            "oom_kill" => v.oom_kills = Some(value()?),
            "workingset_refault_anon" | "workingset_refault_file" | "workingset_refault" => {
                v.refaults = v.refaults.saturating_add(value()?);
            }
            _ => {}
        }
    }
    v.major_faults = faults.ok_or_else(|| ParseError::missing("pgmajfault"))?;
    Ok(v)
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
