//! Which VMs a scan is reading at the moment, and which it is to leave alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use ebb_core::sample::VmId;

use crate::lock;

#[derive(Debug, Default)]
pub struct Readers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    left_alone: BTreeSet<VmId>,
    /// Threads that read a VM.
    inside: BTreeMap<VmId, usize>,
}

/// A thread that reads a VM; it has done so when this is dropped.
#[derive(Debug)]
pub(super) struct Inside<'r>(&'r Readers, VmId);

impl Readers {
    /// From now on no thread begins to read these VMs; others may be read.
    pub fn leave_alone(&self, vms: BTreeSet<VmId>) {
        self.state().left_alone = vms;
    }

    /// Whether a thread reads it.
    pub fn reads(&self, vm: VmId) -> bool {
        self.state().inside.contains_key(&vm)
    }

    /// `None`: it is to be left alone.
    pub(super) fn enter(&self, vm: VmId) -> Option<Inside<'_>> {
        let mut state = self.state();
        if state.left_alone.contains(&vm) {
            return None;
        }
        *state.inside.entry(vm).or_default() += 1;
        Some(Inside(self, vm))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        let threads = state.inside.entry(self.1).or_default();
        *threads = threads.saturating_sub(1);
        if *threads == 0 {
            state.inside.remove(&self.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_read_until_its_last_thread_is_done_and_not_begun_while_it_is_left_alone() {
        let readers = Readers::default();
        let (one, other) = (VmId { pid: 1, start: 1 }, VmId { pid: 2, start: 1 });
        let (first, second) = (readers.enter(one).unwrap(), readers.enter(one).unwrap());
        readers.leave_alone([one].into());
        assert!(readers.enter(one).is_none() && readers.enter(other).is_some());
        drop(first);
        assert!(readers.reads(one) && !readers.reads(other));
        drop(second);
        assert!(!readers.reads(one));
        readers.leave_alone(BTreeSet::new());
        assert!(readers.enter(one).is_some());
    }
}
