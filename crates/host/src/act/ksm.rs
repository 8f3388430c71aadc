//! `/sys/kernel/mm/ksm`, owned while Ebb steers it: what was there is written
//! down first, and put back when Ebb stops, or by the next one after a crash.
//!
//! `run` is written only between batches of `ksmd`, so a write waits as long as a
//! batch takes; orders keep batches short. `run=2` breaks every merge there is. It
//! needs the memory that merging saved, and the OOM killer takes the process that
//! writes it first: so a child process writes it, and only if enough memory is free.
//! Knobs that this kernel lacks are passed over. Sources: Linux
//! `mm/ksm.c`, `Documentation/admin-guide/mm/ksm.rst`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_core::config::MergeConfig;
use ebb_core::policy::merge::KsmdOrder;
use ebb_core::sample::KsmStat;
use ebb_core::units::Bytes;

use crate::durable;
use crate::probe::cgroup;
use crate::probe::ksm::{read_ksm, read_ksm_stat};
use crate::probe::meminfo::read_meminfo;
use crate::probe::process::processes;
use crate::probe::regions::{Region, read_smaps};
use crate::root::{ProbeError, Probed, Root};

const DIR: &str = "/sys/kernel/mm/ksm";
/// The knobs that are changed, in the order in which they are put back: what
/// stops `ksmd` or turns the advisor off comes first.
const KNOBS: [&str; 6] =
    ["run", "advisor_mode", "pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages"];
/// What khugepaged may put into a huge page, seen from there: how many merged pages of
/// 512, and how many that are holes or the zero page.
const KHUGEPAGED: [&str; 2] = [
    "../transparent_hugepage/khugepaged/max_ptes_shared",
    "../transparent_hugepage/khugepaged/max_ptes_none",
];
/// What must stay free beside what breaking merges takes.
const SPARE: Bytes = Bytes::mib(256);
/// What must stay free below the limit of a cgroup.
const SPARE_BELOW: Bytes = Bytes::mib(64);

#[derive(Debug, thiserror::Error)]
pub enum KsmError {
    #[error("this kernel has no KSM ({DIR} is missing)")]
    None,
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("{path}: {error}")]
    Write { path: PathBuf, error: io::Error },
    #[error("another ebb steers KSM (it holds {path}): stop it first")]
    Used { path: PathBuf },
    #[error("{path} is damaged ({why}): set {DIR} as you want it, then remove the file")]
    Damaged { path: PathBuf, why: String },
    #[error(
        "breaking all merges takes {needed}, and {SPARE} must stay free, but {available} are \
         available: free memory first (stop VMs, or take from them), or let it be broken VM by VM \
         (`ebb merge off VM`)"
    )]
    NoRoom {
        needed: Bytes,
        /// MemAvailable.
        available: Bytes,
    },
    #[error(
        "breaking merges takes {needed} in the cgroup {cgroup}, and {SPARE_BELOW} must stay free, \
         but {left} are left below its limit, where the kernel would throttle or kill \
         processes: raise the limit, or free memory in it"
    )]
    NoRoomBelow { cgroup: String, needed: Bytes, left: Bytes },
}

/// KSM's knobs in Ebb's hands. [`KsmOwner::release`] puts them back.
#[derive(Debug)]
pub struct KsmOwner {
    root: Root,
    state: PathBuf,
    saved: BTreeMap<String, String>,
    config: MergeConfig,
    /// Held as long as the knobs are: what is written down is not another's to put back.
    _lock: fs::File,
}

/// Whether an Ebb steers KSM that has written down in `note` what was set.
pub fn is_steered(note: &Path) -> bool {
    matches!(lock(note), Err(KsmError::Used { .. }))
}

/// Makes sure that no other Ebb has what is written down in `state`.
fn lock(state: &Path) -> Result<fs::File, KsmError> {
    let path = state.with_extension("json.lock");
    state.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed(&path))?;
    durable::lock(&path).map_err(failed(&path))?.ok_or(KsmError::Used { path })
}

/// A write to this path has failed.
fn failed(path: &Path) -> impl Fn(io::Error) -> KsmError {
    move |error| KsmError::Write { path: path.into(), error }
}

impl KsmOwner {
    /// Writes down what is set (or takes over what a crashed Ebb wrote down), in
    /// the file `state`. Of what the crashed Ebb had set, knobs that are left to others now
    /// are put back; nothing else is changed yet.
    pub fn take(root: Root, state: &Path, config: MergeConfig) -> Result<KsmOwner, KsmError> {
        if !root.path(format!("{DIR}/run")).exists() {
            return Err(KsmError::None);
        }
        let (saved, lock) = (BTreeMap::new(), lock(state)?);
        let mut owner = KsmOwner { root, state: state.into(), saved, config, _lock: lock };
        // What an earlier one had not taken is as it was.
        let mut saved = owner.written()?.unwrap_or_default();
        let known = saved.len();
        let held: &[&'static str] = if owner.config.hold_khugepaged { &KHUGEPAGED } else { &[] };
        for &knob in KNOBS.iter().chain(held) {
            // Old kernels lack some: Ebb does without.
            let Some(value) = owner.read(knob)? else { continue };
            saved.entry(knob.to_string()).or_insert(value);
        }
        if saved.len() > known {
            // On disk before anything is changed.
            durable::replace(state, &saved).map_err(failed(state))?;
        }
        owner.saved = saved;
        if !owner.config.hold_khugepaged {
            KHUGEPAGED.iter().try_for_each(|knob| owner.leave(knob, "0"))?;
        }
        if owner.config.advisor {
            owner.leave("advisor_mode", "none")?;
        }
        Ok(owner)
    }

    /// Puts a knob back, if it still has the value that Ebb sets. A value that another program has
    /// set since stays.
    fn leave(&self, knob: &str, ours: &str) -> Result<(), KsmError> {
        match self.saved.get(knob) {
            Some(was) if self.read(knob)?.is_some_and(|now| now == ours) => self.set(knob, was),
            _ => Ok(()),
        }
    }

    /// Puts back what a crashed Ebb had changed; whether there was anything.
    pub fn recover(root: Root, state: &Path) -> Result<bool, KsmError> {
        if !state.exists() {
            return Ok(false);
        }
        KsmOwner::take(root, state, MergeConfig::default())?.release().map(|()| true)
    }

    /// What `ksmd` is to do. Only knobs that differ are written.
    pub fn apply(&self, order: &KsmdOrder) -> Result<(), KsmError> {
        let KsmdOrder::Run { batch, sleep_ms, .. } = order else { return self.set("run", "0") };
        // With it a late duplicate of an aged page is never found.
        self.set("smart_scan", "0")?;
        self.set("use_zero_pages", "1")?;
        if self.config.hold_khugepaged {
            KHUGEPAGED.iter().try_for_each(|knob| self.set(knob, "0"))?;
        }
        if !self.config.advisor {
            self.set("advisor_mode", "none")?;
        }
        self.speed(*batch, *sleep_ms)?;
        self.set("run", "1")
    }

    /// How fast `ksmd` works; the operator's advisor decides on the batch itself.
    pub fn speed(&self, batch: u64, sleep_ms: u64) -> Result<(), KsmError> {
        if !self.config.advisor {
            self.set("pages_to_scan", &batch.to_string())?;
        }
        self.set("sleep_millisecs", &sleep_ms.max(1).to_string())
    }

    /// Puts everything back. What was merged stays merged, as `run=0` has it.
    pub fn release(self) -> Result<(), KsmError> {
        for knob in KNOBS.into_iter().chain(KHUGEPAGED) {
            let Some(value) = self.saved.get(knob) else { continue };
            // All merges were broken once: `run` still says so, but to write it would
            // break those that there are now.
            let value = if knob == "run" && value == "2" { "0" } else { value };
            // The advisor does not let others write this.
            let advised = knob == "pages_to_scan"
                && self.saved.get("advisor_mode").is_some_and(|m| m != "none");
            if !advised {
                self.set(knob, value)?;
            }
        }
        fs::remove_file(&self.state).map_err(failed(&self.state))
    }

    /// A knob's value; of `a [b] c` the chosen one.
    fn read(&self, knob: &str) -> Result<Option<String>, KsmError> {
        let text = self.root.read(format!("{DIR}/{knob}"))?;
        Ok(text.map(|text| {
            let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            chosen.map_or(text.trim(), |(value, _)| value).to_string()
        }))
    }

    fn set(&self, knob: &str, value: &str) -> Result<(), KsmError> {
        if self.read(knob)?.is_none_or(|now| now == value) {
            return Ok(());
        }
        debug_assert!(knob != "run" || value != "2", "see `unmerge`");
        let path = self.root.path(format!("{DIR}/{knob}"));
        fs::write(&path, value).map_err(failed(&path))
    }

    fn written(&self) -> Result<Option<BTreeMap<String, String>>, KsmError> {
        let damaged = |why: String| KsmError::Damaged { path: self.state.clone(), why };
        let saved: Option<BTreeMap<String, String>> =
            durable::read(&self.state).map_err(|e| damaged(e.to_string()))?;
        match saved {
            Some(saved) if !saved.contains_key("run") => Err(damaged("no “run” in it".into())),
            saved => Ok(saved),
        }
    }
}

/// What KSM's knobs are set to, for people; `None` where there is no KSM.
pub fn describe(root: &Root) -> Probed<String> {
    let mut set = Vec::new();
    for knob in KNOBS {
        if let Some(value) = root.read(format!("{DIR}/{knob}"))? {
            set.push(format!("{knob}={}", value.trim()));
        }
    }
    Ok((!set.is_empty()).then(|| set.join(" ")))
}

/// Whether merges that save `needed` can be broken: on the host, and below the limits of the
/// cgroups of these processes, each with what of it is merged. The error says what is missing.
pub fn has_room(root: &Root, needed: Bytes, merged: &[(u32, Bytes)]) -> Result<(), KsmError> {
    let available = read_meminfo(root)?.map(|m| m.available).unwrap_or_default();
    if available < needed + SPARE {
        return Err(KsmError::NoRoom { needed, available });
    }
    let Some(h) = cgroup::read_hierarchy(root)? else { return Ok(()) };
    let mut below: BTreeMap<String, Bytes> = BTreeMap::new();
    for (pid, merged) in merged.iter().filter(|(_, merged)| *merged > Bytes::ZERO) {
        let own = cgroup::read_process_cgroup(root, h.version, *pid)?.unwrap_or_default();
        for path in cgroup::way_up(&own).filter_map(Path::to_str) {
            *below.entry(path.into()).or_default() += *merged;
        }
    }
    for (cgroup, needed) in below {
        let left = cgroup::read_usage(root, &h, &cgroup)?.map(|limit| limit.left());
        if let Some(left) = left.filter(|left| *left < needed + SPARE_BELOW) {
            return Err(KsmError::NoRoomBelow { cgroup, needed, left });
        }
    }
    Ok(())
}

/// What of a process is merged now. Its counter of merged pages falls only when KSM scans again, so
/// its mappings are believed where they tell (Linux 6.7 on).
pub fn merged_now(stat: &KsmStat, mappings: &[Region]) -> Bytes {
    let told: Option<Bytes> = mappings.iter().filter(|r| r.mergeable).map(|r| r.ksm).sum();
    match told {
        Some(merged) => merged + Bytes::pages(stat.zero_pages.unwrap_or(0)),
        None => Bytes::pages(stat.merged()),
    }
}

/// What is merged of each process.
fn merged_of_all(root: &Root) -> Result<Vec<(u32, Bytes)>, ProbeError> {
    let of = |pid| {
        let stat = read_ksm_stat(root, pid)?.unwrap_or_default();
        let mappings = if stat.merged() > 0 { read_smaps(root, pid)? } else { None };
        Ok((pid, merged_now(&stat, &mappings.unwrap_or_default())))
    };
    processes(root)?.into_iter().map(of).collect()
}

/// Stops `ksmd` and breaks every merge on the host, in a child process; returns
/// how much was merged. Refuses where the memory is not there.
pub fn unmerge(root: &Root) -> Result<Bytes, KsmError> {
    let needed = read_ksm(root)?.ok_or(KsmError::None)?.saved();
    has_room(root, needed, &merged_of_all(root)?)?;
    let path = root.path(format!("{DIR}/run"));
    let child = Command::new("/bin/sh")
        .args(["-c", "echo 2 > \"$0\""])
        .arg(&path)
        .output()
        .map_err(failed(&path))?;
    if !child.status.success() {
        let said = String::from_utf8_lossy(&child.stderr);
        let why = io::Error::other(format!("{}: {}", child.status, said.trim()));
        return Err(failed(&path)(why));
    }
    Ok(needed)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::testing::{self, Tree};

    /// A tree with these knobs; what stands for sysfs keeps what is written.
    pub(in crate::act) fn tree(knobs: &[(&str, &str)]) -> Tree {
        let root = testing::tree(&[]);
        let put =
            |(name, value): &(&str, &str)| root.put(format!("{DIR}/{name}"), format!("{value}\n"));
        knobs.iter().for_each(put);
        root
    }

    fn note(root: &Root) -> PathBuf {
        root.path("/ebb/ksm.json")
    }

    fn take(root: &Root) -> KsmOwner {
        KsmOwner::take(root.clone(), &note(root), MergeConfig::default()).unwrap()
    }

    fn recover(root: &Root) -> Result<bool, KsmError> {
        KsmOwner::recover(root.clone(), &note(root))
    }

    pub(in crate::act) fn knob(root: &Root, knob: &str) -> String {
        root.read(format!("{DIR}/{knob}")).unwrap().unwrap().trim().to_string()
    }

    const USUAL: [(&str, &str); 6] = [
        ("run", "1"),
        ("advisor_mode", "[none] scan-time"),
        ("pages_to_scan", "4000"),
        ("sleep_millisecs", "200"),
        ("smart_scan", "1"),
        ("use_zero_pages", "0"),
    ];

    fn values(root: &Root) -> Vec<String> {
        let read =
            |knob: &&str| root.read(format!("{DIR}/{knob}")).unwrap().map(|v| v.trim().to_string());
        KNOBS.iter().filter_map(read).collect()
    }

    fn order(batch: u64) -> KsmdOrder {
        KsmdOrder::Run { batch, sleep_ms: 20, cores: 0.5, scans: u64::MAX, why: String::new() }
    }

    #[test]
    fn what_another_ebb_steers_is_not_put_back() {
        let root = tree(&USUAL);
        let owner = take(&root);
        owner.apply(&order(100)).unwrap();
        let refused = recover(&root).unwrap_err();
        assert!(matches!(refused, KsmError::Used { .. }), "{refused}");
        let state = || (knob(&root, "pages_to_scan"), note(&root).exists());
        assert_eq!(state(), ("100".into(), true));
        // It has crashed.
        drop(owner);
        assert!(recover(&root).unwrap());
        assert_eq!(state(), ("4000".into(), false));
    }

    #[test]
    fn what_was_set_is_put_back_and_nothing_is_left() {
        let root = tree(&USUAL);
        let before = values(&root);
        let owner = take(&root);
        assert_eq!(values(&root), before, "taking changes nothing");
        owner.apply(&order(1500)).unwrap();
        assert_eq!(values(&root), ["1", "[none] scan-time", "1500", "20", "0", "1"]);
        owner.apply(&KsmdOrder::Rest { why: String::new() }).unwrap();
        assert_eq!(values(&root)[0], "0");
        owner.release().unwrap();
        // The fixture keeps plain words where sysfs marks the chosen one.
        assert_eq!(values(&root)[2..], before[2..]);
        assert_eq!((values(&root)[0].as_str(), note(&root).exists()), ("1", false));
    }

    #[test]
    fn after_a_crash_the_first_values_come_back_not_ours() {
        let root = tree(&USUAL);
        for batch in [9, 10] {
            take(&root).apply(&order(batch)).unwrap();
        }
        assert!(recover(&root).unwrap());
        assert_eq!(values(&root)[2..], ["4000", "200", "1", "0"]);
        assert!(!recover(&root).unwrap(), "nothing is left to do");
    }

    #[test]
    fn old_kernels_lack_knobs_and_a_kernel_without_ksm_is_told() {
        let root = tree(&[("run", "0"), ("pages_to_scan", "100"), ("sleep_millisecs", "20")]);
        let owner = take(&root);
        assert!(owner.saved.keys().eq(["pages_to_scan", "run", "sleep_millisecs"]));
        owner.apply(&order(7)).unwrap();
        assert_eq!(values(&root), ["1", "7", "20"]);
        owner.release().unwrap();
        assert_eq!(values(&root), ["0", "100", "20"]);
        let root = tree(&[]);
        root.dir(DIR);
        let none = KsmOwner::take(root.clone(), &note(&root), MergeConfig::default()).unwrap_err();
        assert!(matches!(none, KsmError::None), "{none}");
    }

    #[test]
    fn an_operators_advisor_keeps_the_speed() {
        let root =
            tree(&[("run", "0"), ("advisor_mode", "none [scan-time]"), ("pages_to_scan", "500")]);
        let settings = MergeConfig { advisor: true, ..MergeConfig::default() };
        let owner = KsmOwner::take(root.clone(), &note(&root), settings).unwrap();
        owner.apply(&order(7)).unwrap();
        assert_eq!(values(&root), ["1", "none [scan-time]", "500"]);
        owner.release().unwrap();
        let owner = take(&root);
        owner.apply(&order(7)).unwrap();
        assert_eq!(values(&root), ["1", "none", "7"]);
        owner.release().unwrap();
        assert_eq!(values(&root), ["0", "scan-time", "7"], "the advisor sets the last itself");
    }

    #[test]
    fn broken_merges_are_not_broken_again_by_putting_back() {
        let root = tree(&[("run", "2")]);
        let owner = take(&root);
        owner.apply(&order(7)).unwrap();
        owner.release().unwrap();
        assert_eq!(values(&root), ["0"]);
    }

    #[test]
    fn a_damaged_note_is_told_and_stays() {
        let root = tree(&USUAL);
        for text in ["{", "{}", "[]"] {
            root.put("/ebb/ksm.json", text);
            let taken = KsmOwner::take(root.clone(), &note(&root), MergeConfig::default());
            let error = taken.unwrap_err().to_string();
            assert!(error.contains("is damaged") && error.contains("remove the file"), "{error}");
            assert!(note(&root).exists());
        }
    }

    #[test]
    fn merges_are_broken_only_where_there_is_room() {
        let root = tree(&[("run", "1"), ("pages_sharing", "100000"), ("ksm_zero_pages", "5")]);
        let meminfo = |kib: u64| {
            let text = format!("MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n");
            root.put("/proc/meminfo", text);
        };
        meminfo(600_000);
        let error = unmerge(&root).unwrap_err();
        assert!(matches!(error, KsmError::NoRoom { .. }), "{error}");
        assert!(error.to_string().contains("391 MiB"), "{error}");
        assert_eq!(values(&root), ["1"]);
        meminfo(700_000);
        // Two VMs in a slice that has less left than both have merged.
        root.put("/proc/self/mountinfo", "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        root.put("/sys/fs/cgroup/cgroup.controllers", "memory\n");
        for pid in ["7", "8"] {
            root.put(format!("/proc/{pid}/cgroup"), format!("0::/vms.slice/{pid}\n"));
            // 10,000 of what was merged were written since.
            root.put(format!("/proc/{pid}/ksm_stat"), "ksm_merging_pages 60000\n");
            let smaps = "1000-2000 rw-p 00000000 00:00 0 \nKSM: 200000 kB\nVmFlags: rd wr mg\n";
            root.put(format!("/proc/{pid}/smaps"), smaps);
        }
        let slice = |left: u64| {
            let dir = "/sys/fs/cgroup/vms.slice";
            root.put(format!("{dir}/memory.max"), format!("{}\n", 2u64 << 30));
            root.put(format!("{dir}/memory.current"), format!("{}\n", (2048 - left) << 20));
            root.put(format!("{dir}/memory.stat"), "anon 0\nactive_file 0\ninactive_file 0\n");
        };
        slice(454);
        let error = unmerge(&root).unwrap_err().to_string();
        assert!(error.contains("takes 391 MiB in the cgroup /vms.slice"), "{error}");
        assert!(error.contains("454 MiB are left"), "{error}");
        assert_eq!(values(&root), ["1"]);
        assert!(has_room(&root, Bytes::mib(196), &[(7, Bytes::mib(196))]).is_ok(), "one of them");
        slice(455);
        assert_eq!(unmerge(&root).unwrap(), Bytes::pages(100_005));
        assert_eq!(values(&root), ["2"]);
    }

    #[test]
    fn khugepaged_is_held_only_where_that_is_wanted_and_let_go_again() {
        let root = tree(&[("run", "0"), ("pages_to_scan", "100"), ("smart_scan", "1")]);
        let knob = |name: &str| format!("/sys/kernel/mm/transparent_hugepage/khugepaged/{name}");
        let set = || {
            let read = |name| root.read(knob(name)).unwrap().unwrap().trim().to_string();
            (read("max_ptes_shared"), read("max_ptes_none"))
        };
        let were = ("256".to_string(), "511".to_string());
        root.put(knob("max_ptes_shared"), "256\n");
        root.put(knob("max_ptes_none"), "511\n");
        let take = |hold_khugepaged| {
            let settings = MergeConfig { hold_khugepaged, ..MergeConfig::default() };
            let owner = KsmOwner::take(root.clone(), &note(&root), settings).unwrap();
            owner.apply(&order(9)).unwrap();
            owner
        };
        // The first ends as in a crash; the next one wants more than it had taken.
        drop(take(false));
        assert_eq!(set(), were);
        let owner = take(true);
        assert_eq!(set(), ("0".into(), "0".into()));
        drop(owner);
        // A reload with another setting.
        drop(take(false));
        assert_eq!(set(), were);
        assert!(recover(&root).unwrap());
        assert_eq!(set(), were);
        // What is not ours is not put back either.
        let owner = take(false);
        root.put(knob("max_ptes_none"), "64\n");
        owner.release().unwrap();
        assert_eq!(set(), ("256".into(), "64".into()));
    }
}
