//! VMs that are left alone for a while at the operator's request: before a device is plugged,
//! a snapshot is loaded, a VM is migrated or its QEMU is replaced.
//!
//! It is written down, so that it holds for a daemon that is started anew in the middle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use ebb_core::sample::VmId;
use ebb_core::units::Stamp;
use serde::{Deserialize, Serialize};

use crate::durable;

/// Longest time, ms: a request that is forgotten comes to its end.
pub const MOST_MS: u64 = 24 * 3600 * 1000;

#[derive(Debug, Default)]
pub struct HandsOffs {
    file: Option<PathBuf>,
    until: BTreeMap<VmId, Stamp>,
    /// It is not known which: all but these, until then.
    unknown: Option<(Stamp, BTreeSet<VmId>)>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
struct Written {
    until: Vec<(VmId, Stamp)>,
    unknown: Option<(Stamp, BTreeSet<VmId>)>,
}

/// How long all VMs are left alone where it is not known which are to be, ms: what
/// `ebb hands-off` says unless told otherwise.
const UNKNOWN_MS: u64 = 600_000;

impl HandsOffs {
    /// What the file says. Where it cannot be read all VMs are left alone for a while: the
    /// error is for people.
    pub fn load(file: Option<PathBuf>, now: Stamp) -> (HandsOffs, Option<String>) {
        let mut found = HandsOffs { file, ..HandsOffs::default() };
        let Some(path) = &found.file else { return (found, None) };
        match durable::read(path) {
            Ok(written) => {
                let Written { until, unknown } = written.unwrap_or_default();
                // A file that has outlived the machine's clock says nothing of now.
                let most = now.plus(MOST_MS);
                found.until = until.into_iter().filter(|(_, until)| *until <= most).collect();
                found.unknown = unknown.filter(|(until, _)| *until <= most);
                (found, None)
            }
            Err(e) => {
                let why =
                    format!("{}: {e}: all VMs are left alone for ten minutes", path.display());
                found.unknown = Some((now.plus(UNKNOWN_MS), BTreeSet::new()));
                (found, Some(why))
            }
        }
    }

    /// Leaves a VM alone for `ms` from `now` on; 0: no longer. Of several requests the one that
    /// lasts longest counts: each may come from another user who relies on it.
    pub fn set(&mut self, vm: VmId, now: Stamp, ms: u64) -> Result<(), String> {
        let before = (self.until.clone(), self.unknown.clone());
        match ms {
            0 => {
                self.until.remove(&vm);
                if let Some((_, known)) = &mut self.unknown {
                    known.insert(vm);
                }
            }
            ms => {
                let until = self.until.entry(vm).or_default();
                *until = (*until).max(now.plus(ms.min(MOST_MS)));
            }
        }
        self.write().inspect_err(|_| (self.until, self.unknown) = before)
    }

    /// Forgets VMs that have ended, and requests whose time is up.
    pub fn keep(&mut self, now: Stamp, is_there: impl Fn(&VmId) -> bool) {
        let before = (self.until.len(), self.is_unknown());
        self.until.retain(|vm, until| *until > now && is_there(vm));
        self.unknown.take_if(|(until, _)| *until <= now);
        if (self.until.len(), self.is_unknown()) != before {
            // What is left in the file is past anyhow.
            let _ = self.write();
        }
    }

    /// Whether all VMs are left alone, because it is not known which are to be.
    pub fn is_unknown(&self) -> bool {
        self.unknown.is_some()
    }

    /// How much longer this VM is left alone, ms.
    pub fn left_ms(&self, vm: VmId, now: Stamp) -> Option<u64> {
        let unknown = self.unknown.as_ref().filter(|(_, known)| !known.contains(&vm));
        let until = self.until.get(&vm).copied().max(unknown.map(|(until, _)| *until));
        until.map(|until| until.since(now)).filter(|left| *left > 0)
    }

    fn write(&self) -> Result<(), String> {
        let Some(path) = &self.file else { return Ok(()) };
        let until = self.until.iter().map(|(vm, at)| (*vm, *at)).collect();
        let written = Written { until, unknown: self.unknown.clone() };
        durable::replace(path, &written).map_err(|e| format!("{}: {e}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_outlives_the_daemon_and_comes_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = Some(dir.path().join("hands-off.json"));
        let vm = |pid| VmId { pid, start: 7 };
        let (mut hands, problem) = HandsOffs::load(file.clone(), Stamp(0));
        assert_eq!(problem, None);
        hands.set(vm(1), Stamp(1000), 500).unwrap();
        hands.set(vm(2), Stamp(1000), u64::MAX).unwrap();
        let (mut again, _) = HandsOffs::load(file.clone(), Stamp(1000));
        assert_eq!(again.left_ms(vm(1), Stamp(1100)), Some(400));
        assert_eq!(again.left_ms(vm(1), Stamp(1500)), None);
        assert_eq!(again.left_ms(vm(2), Stamp(1000)), Some(MOST_MS));
        assert_eq!(again.left_ms(vm(3), Stamp(1000)), None);
        again.set(vm(2), Stamp(1100), 0).unwrap();
        again.keep(Stamp(1200), |vm| vm.pid == 2);
        let (last, _) = HandsOffs::load(file.clone(), Stamp(0));
        assert!(last.until.is_empty());
        std::fs::write(file.as_ref().unwrap(), "nonsense").unwrap();
        let (mut damaged, why) = HandsOffs::load(file.clone(), Stamp(1000));
        assert!(why.unwrap().contains("all VMs are left alone"));
        assert_eq!(damaged.left_ms(vm(5), Stamp(2000)), Some(UNKNOWN_MS - 1000));
        damaged.set(vm(5), Stamp(2000), 0).unwrap();
        assert_eq!(damaged.left_ms(vm(5), Stamp(2000)), None, "the operator's word");
        assert_eq!(damaged.left_ms(vm(6), Stamp(UNKNOWN_MS + 1000)), None);
        let (next, _) = HandsOffs::load(file.clone(), Stamp(3000));
        assert_eq!(next.left_ms(vm(5), Stamp(3000)), None);
        assert!(next.left_ms(vm(6), Stamp(3000)).is_some(), "a new start changes nothing");
        damaged.keep(Stamp(UNKNOWN_MS + 1000), |_| true);
        assert!(!damaged.is_unknown(), "it has come to its end, also in the file");
        assert!(!HandsOffs::load(file.clone(), Stamp(3000)).0.is_unknown());
        // The machine has been started anew since: its clock began again.
        let text = format!(
            r#"{{"until":[[{{"pid":1,"start":7}},{0}]],"unknown":[{0},[]]}}"#,
            MOST_MS + 2000
        );
        std::fs::write(file.as_ref().unwrap(), text).unwrap();
        let (stale, why) = HandsOffs::load(file, Stamp(1000));
        assert_eq!((stale.left_ms(vm(1), Stamp(1000)), why), (None, None));
    }

    #[test]
    fn of_two_words_the_longer_one_holds_and_hands_on_ends_both() {
        let (mut hands, _) = HandsOffs::load(None, Stamp(0));
        let vm = VmId { pid: 1, start: 7 };
        hands.set(vm, Stamp(1000), 60_000).unwrap();
        hands.set(vm, Stamp(2000), 5_000).unwrap();
        assert_eq!(hands.left_ms(vm, Stamp(2000)), Some(59_000));
        hands.set(vm, Stamp(2000), 90_000).unwrap();
        assert_eq!(hands.left_ms(vm, Stamp(2000)), Some(90_000));
        hands.set(vm, Stamp(2000), 0).unwrap();
        assert_eq!(hands.left_ms(vm, Stamp(2000)), None);
    }

    /// Of the daemon that did not know of `unknown`.
    #[test]
    fn a_file_of_an_older_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hands-off.json");
        std::fs::write(&file, r#"{"until":[[{"pid":1,"start":7},5000]]}"#).unwrap();
        let (hands, why) = HandsOffs::load(Some(file), Stamp(1000));
        assert_eq!(why, None);
        assert_eq!(hands.left_ms(VmId { pid: 1, start: 7 }, Stamp(1000)), Some(4000));
    }

    #[test]
    fn what_cannot_be_written_down_is_not_promised() {
        let (mut hands, _) = HandsOffs::load(Some("/proc/none/hands-off.json".into()), Stamp(0));
        let vm = VmId { pid: 1, start: 1 };
        assert!(hands.set(vm, Stamp(1), 1000).is_err());
        assert_eq!(hands.left_ms(vm, Stamp(1)), None);
    }
}
