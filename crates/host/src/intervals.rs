//! How often QEMU asked the guests for statistics before Ebb set that. It is written down, so
//! that a daemon that is started anew, also after a crash, puts it back at its end.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ebb_core::sample::VmId;

use crate::durable;

/// Seconds, by VM.
#[derive(Debug, Default)]
pub struct Intervals {
    file: Option<PathBuf>,
    was: BTreeMap<VmId, u64>,
}

impl Intervals {
    /// What the file says. One that cannot be read says nothing: QEMU goes on asking as often as
    /// Ebb wants it.
    pub fn load(file: Option<PathBuf>) -> Intervals {
        let all: Option<Vec<_>> = file.as_ref().and_then(|file| durable::read(file).ok()?);
        Intervals { file, was: all.unwrap_or_default().into_iter().collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.was.is_empty()
    }

    pub fn of(&self, vm: VmId) -> Option<u64> {
        self.was.get(&vm).copied()
    }

    /// Takes in what is known of the VMs that are there, and writes down what is new. Of others
    /// what is written stays as long as they live.
    pub fn keep(
        &mut self,
        here: impl Iterator<Item = (VmId, Option<u64>)> + Clone,
        lives: impl Fn(VmId) -> bool,
    ) {
        let is = here.clone().filter_map(|(vm, was)| Some((vm, was?)));
        // Both by VM. Where they are equal, no other VM is written down.
        if is.eq(self.was.iter().map(|(vm, was)| (*vm, *was))) {
            return;
        }
        let here: BTreeMap<VmId, Option<u64>> = here.collect();
        let mut now = self.was.clone();
        now.retain(|vm, _| !here.contains_key(vm) && lives(*vm));
        now.extend(here.into_iter().filter_map(|(vm, was)| Some((vm, was?))));
        if now == self.was {
            return;
        }
        let all: Vec<_> = now.iter().collect();
        let written = match &self.file {
            None => Ok(()),
            Some(file) if all.is_empty() => std::fs::remove_file(file),
            Some(file) => durable::replace(file, &all),
        };
        let is_gone = |e: &std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
        // What was not written is tried again at the next tick.
        if written.is_ok() || all.is_empty() && written.is_err_and(|e| is_gone(&e)) {
            self.was = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_was_outlives_the_daemon_and_ends_with_the_vm() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("intervals.json");
        let vm = |pid| VmId { pid, start: 7 };
        let mut first = Intervals::load(Some(file.clone()));
        let here = [(vm(1), Some(0)), (vm(2), Some(30)), (vm(3), None)];
        first.keep(here.into_iter(), |_| true);
        // The daemon is killed. The next one has not found all VMs yet, and one has ended.
        let mut next = Intervals::load(Some(file.clone()));
        assert_eq!([1, 2, 3].map(|pid| next.of(vm(pid))), [Some(0), Some(30), None]);
        next.keep([(vm(1), next.of(vm(1)))].into_iter(), |vm| vm.pid != 2);
        let now = Intervals::load(Some(file.clone()));
        assert_eq!([1, 2].map(|pid| now.of(vm(pid))), [Some(0), None]);
        next.keep([(vm(1), None)].into_iter(), |_| true);
        assert!(!file.exists(), "it is put back");
        std::fs::write(&file, "nonsense").unwrap();
        assert_eq!(Intervals::load(Some(file)).of(vm(1)), None);
    }
}
