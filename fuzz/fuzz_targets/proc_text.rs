//! Any text in any of the files of /proc, /sys and cgroups: no parser panics,
//! and what it returns keeps the types' promises.
#![no_main]

use ebb_core::units::Bytes;
use ebb_host::probe::cgroup::{self, Version};
use ebb_host::probe::{ksm, maps, meminfo, numa, process, psi, regions, swaps, trust, vmstat, zfs};
use ebb_host::root::{parse_number, unescape_octal};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((which, rest)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match which % 23 {
        0 => drop(meminfo::parse_meminfo(&text)),
        1 => drop(vmstat::parse_vmstat(&text)),
        2 => {
            if let Ok(psi) = psi::parse_psi(&text) {
                assert!((0.0..=100.0).contains(&psi.some.avg10));
            }
        }
        3 => drop(swaps::parse_swaps(&text)),
        4 => drop(zfs::parse_arcstats(&text)),
        5 => drop(process::parse_stat(&text)),
        6 => drop(process::parse_status(&text)),
        7 => drop(numa::parse_node(&text)),
        8 => drop(cgroup::parse_mountinfo(&text)),
        9 => drop(cgroup::parse_process_cgroup(&text, Version::V1)),
        10 => drop(cgroup::parse_process_cgroup(&text, Version::V2)),
        11 => drop(cgroup::parse_stat(&text, Version::V1)),
        12 => drop(cgroup::parse_stat(&text, Version::V2)),
        13 => drop((cgroup::parse_limit(&text), cgroup::parse_oom_kills(&text))),
        14 => drop(ksm::parse_ksm_stat(&text)),
        15 => {
            if let Ok(Ok(regions)) = regions::parse_smaps(rest) {
                assert!(regions::guest_ram(&regions).len() <= regions.len());
                let _ = regions::unmergeable(&regions);
            }
        }
        16 => {
            drop(maps::parse_ram_mappings(&text));
            drop(maps::parse_own_mappings(&text));
        }
        17 => drop((parse_number::<i64>(&text), unescape_octal(&text))),
        18 => drop(process::parse_credentials(&text)),
        19 => drop(swaps::parse_mm_stat(&text)),
        20 => {
            let _ = (trust::uid_of(&text, "qemu"), trust::is_qemu(&text));
        }
        21 => drop(numa::parse_list(&text)),
        _ => {
            let paths: Vec<String> = text.lines().map(str::to_owned).collect();
            if let Some(common) = cgroup::common_ancestor(&paths) {
                let holds = |p: &String| std::path::Path::new(p).starts_with(&common);
                assert!(paths.iter().all(holds));
            }
            let held = cgroup::held_by_most(&paths);
            for (outer, inner) in held.iter().zip(held.iter().skip(1)) {
                assert!(std::path::Path::new(inner).starts_with(outer));
            }
            let limit = |path: String| (path.clone(), Some(Bytes(path.len() as u64)));
            let limits: Vec<_> = held.into_iter().map(limit).collect();
            assert_eq!(cgroup::choose_pool(&limits).is_some(), !limits.is_empty());
        }
    }
});
