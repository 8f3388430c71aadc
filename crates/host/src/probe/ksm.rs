//! `/sys/kernel/mm/ksm` (Linux `mm/ksm.c`): the whole host's merging; and a
//! process's part of it, `/proc/PID/ksm_stat` (6.1+, `fs/proc/base.c`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_core::sample::{Ksm, KsmStat, VmId, VmSample};

use super::process::{is_named, processes, read_run_time};
use crate::background_look::BackgroundLook;
use crate::root::{ParseError, Probed, Root, field, parse_number};

const DIR: &str = "/sys/kernel/mm/ksm";

/// Reads the directory (not who else is about); `None` where KSM is not built in.
pub fn read_ksm(root: &Root) -> Probed<Ksm> {
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
        pages_scanned: number(root, "pages_scanned")?,
        pages_skipped: number(root, "pages_skipped")?,
        chains: count("stable_node_chains")?,
        chain_pages: count("stable_node_dups")?,
        ..Ksm::default()
    }))
}

/// Places that map a merged page, of all processes that there are but these; `None` where
/// the kernel does not tell of each. Reads a file of every process.
pub fn read_mapped(root: &Root, but: &[u32]) -> Option<u64> {
    root.read("/proc/self/ksm_stat").ok()??;
    // `None`: it has ended meanwhile, or has no memory of its own.
    let count = |stat: Option<KsmStat>| stat.and_then(|s| s.merging_pages).unwrap_or(0);
    let others = processes(root).ok()?.into_iter().filter(|pid| !but.contains(pid));
    others
        .map(|pid| read_ksm_stat(root, pid).ok().map(count))
        .try_fold(0, |sum: u64, n| Some(sum.saturating_add(n?)))
}

pub fn ksmd(root: &Root) -> Option<u32> {
    // A kernel thread has no command line, which no process can imitate.
    let bare = |pid| root.read_bytes(format!("/proc/{pid}/cmdline")).ok().flatten();
    find(root, "ksmd", |pid| bare(pid).is_none_or(|line| line.is_empty()))
}

/// The pid of a `ksmtuned` that sets the same knobs, if one runs.
pub fn ksmtuned(root: &Root) -> Option<u32> {
    find(root, "ksmtuned", |_| true)
}

/// Other processes' part is looked at this often.
const OTHERS_EVERY: Duration = Duration::from_secs(30);

/// A look at many processes may take longer: what was seen before is told meanwhile.
const PATIENCE: Duration = Duration::from_millis(100);

/// What processes other than VMs have to do with KSM.
#[derive(Debug, Default)]
pub struct OtherProcesses {
    known: OthersSample,
    /// When a look began last.
    at: Option<Instant>,
    look: BackgroundLook<OthersSample>,
}

#[derive(Debug, Default)]
struct OthersSample {
    ksmd: Option<u32>,
    tuned: Option<u32>,
    /// Merged pages that they map.
    mapped: Option<u64>,
}

impl OtherProcesses {
    /// Adds what they tell to the counters. `vms` have been read.
    pub fn tell(&mut self, root: &Root, ksm: &mut Ksm, vms: &[VmSample]) {
        if self.at.is_none_or(|at| at.elapsed() >= OTHERS_EVERY) {
            let pids: Vec<u32> = vms.iter().map(|v| v.id.pid).collect();
            let its = root.clone();
            let look = move || OthersSample {
                ksmd: ksmd(&its),
                tuned: ksmtuned(&its),
                mapped: read_mapped(&its, &pids),
            };
            if let Some(found) = self.look.look(look, PATIENCE) {
                (self.known, self.at) = (found, Some(Instant::now()));
            }
        }
        let ran = self.known.ksmd.and_then(|pid| read_run_time(root, pid).ok()?);
        ksm.cpu_ms = ran.map(|t| t.as_millis() as u64);
        ksm.ksmtuned = self.known.tuned;
        let of = |vm: &VmSample| vm.merge.as_ref()?.stat.merging_pages;
        let add = |sum: u64, vm| Some(sum.saturating_add(of(vm)?));
        ksm.mapped = self.known.mapped.and_then(|others| vms.iter().try_fold(others, add));
    }
}

#[derive(Debug, Default)]
pub struct Stats {
    known: BTreeMap<VmId, Result<Option<KsmStat>, String>>,
    look: BackgroundLook<BTreeMap<VmId, Result<Option<KsmStat>, String>>>,
}

impl Stats {
    /// Reads those of these VMs. Since Linux 6.16 that waits for the VM's mmap lock: to close a
    /// GiB of RAM to KSM holds it for 135 ms.
    pub fn read(&mut self, root: &Root, vms: &[VmSample]) {
        let (its, ids): (Root, Vec<VmId>) = (root.clone(), vms.iter().map(|v| v.id).collect());
        let one = move |id: VmId| (id, read_ksm_stat(&its, id.pid).map_err(|e| e.to_string()));
        if let Some(found) = self.look.look(move || ids.into_iter().map(one).collect(), PATIENCE) {
            self.known = found;
        }
    }

    /// What was read last of a VM, if it was; the error is for people.
    pub fn of(&self, vm: VmId) -> Option<&Result<Option<KsmStat>, String>> {
        self.known.get(&vm)
    }

    /// Its merged pages, which are to be broken; an error where that is not known.
    pub fn merged(&self, vm: VmId) -> Result<u64, String> {
        match self.of(vm) {
            Some(Ok(stat)) => Ok(stat.unwrap_or_default().merged()),
            Some(Err(why)) => Err(why.clone()),
            None => Err("how much of it is merged is not read yet: it is tried again".into()),
        }
    }
}

fn find(root: &Root, name: &str, also: impl Fn(u32) -> bool) -> Option<u32> {
    processes(root).ok()?.into_iter().find(|pid| is_named(root, *pid, name) && also(*pid))
}

/// Reads `/proc/PID/ksm_stat`; `None` where the process has ended or the kernel
/// has no such file.
pub fn read_ksm_stat(root: &Root, pid: u32) -> Probed<KsmStat> {
    root.parse(format!("/proc/{pid}/ksm_stat"), parse_ksm_stat)
}

/// Parses it: `key value` a line, newer keys with a colon; unknown ones are
/// passed over.
pub fn parse_ksm_stat(text: &str) -> Result<KsmStat, ParseError> {
    let pages = |key| field(text, key, |value| value.parse().ok());
    Ok(KsmStat {
        rmap_items: pages("ksm_rmap_items")?,
        zero_pages: pages("ksm_zero_pages")?,
        merging_pages: pages("ksm_merging_pages")?,
        profit: field(text, "ksm_process_profit", |value| value.parse().ok())?,
        mergeable: field(text, "ksm_mergeable", |value| Some(value == "yes"))?,
    })
}

/// One file of the directory.
pub fn number<T: std::str::FromStr>(root: &Root, name: &str) -> Probed<T> {
    root.parse(format!("{DIR}/{name}"), parse_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

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
    fn merged_places_are_counted_over_all_processes_or_not_at_all() {
        let root = tree(&[]);
        let write = |pid: &str, text: &str| root.put(format!("/proc/{pid}/ksm_stat"), text);
        write("10", "ksm_rmap_items 9\nksm_merging_pages 5\n");
        assert_eq!(read_mapped(&root, &[]), None, "an old kernel");
        write("self", "ksm_rmap_items 0\n");
        write("11", "ksm_merging_pages 7\n");
        write("2", "");
        root.dir("/proc/12");
        assert_eq!(read_mapped(&root, &[]), Some(12));
        assert_eq!(read_mapped(&root, &[11]), Some(5));
        write("13", "ksm_merging_pages many\n");
        assert_eq!(read_mapped(&root, &[]), None, "not all are known");
    }

    #[test]
    fn profit_is_signed_and_newer_files_may_be_absent() {
        let root = tree(&[]);
        assert!(read_ksm(&root).unwrap().is_none());
        let set = |name: &str, value: &str| root.put(format!("/sys/kernel/mm/ksm/{name}"), value);
        set("run", "1\n");
        set("pages_sharing", "5\n");
        set("general_profit", "-64\n");
        let k = read_ksm(&root).unwrap().unwrap();
        assert_eq!((k.run, k.pages_sharing), (1, 5));
        assert_eq!((k.general_profit, k.zero_pages), (Some(-64), None));
        set("pages_sharing", "many\n");
        let error = read_ksm(&root).unwrap_err().to_string();
        assert!(error.contains("pages_sharing: line 1: “many” is not a number"), "{error}");
    }
}
