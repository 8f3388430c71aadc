//! `/sys/kernel/mm/ksm` (Linux `mm/ksm.c`): the whole host's merging.

use ebb_core::sample::Ksm;

use crate::root::{ProbeError, Root, parse_number};

const DIR: &str = "/sys/kernel/mm/ksm";

/// Reads the directory; `None` where KSM is not built in.
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
    }))
}

fn number<T: std::str::FromStr>(root: &Root, name: &str) -> Result<Option<T>, ProbeError> {
    root.parse(format!("{DIR}/{name}"), parse_number)
}

#[cfg(test)]
mod tests {
    use super::*;

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
