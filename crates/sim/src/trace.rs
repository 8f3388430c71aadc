//! Guests that want what a recorded VM wanted.
//!
//! From the samples of a record (`ebb record`, `ebb run --record`, the lab's runs):
//! what processes had is size less free memory less cache, as the guest said it;
//! half of its cache counts as files that it reads all the time, and more where it
//! faulted on files. A guest that was squeezed while it was recorded may have
//! wanted more than it had: the trace cannot know.

use std::collections::BTreeMap;

use ebb_core::sample::{Sample, VmId, VmSample};
use ebb_core::units::Bytes;

use crate::demand::{Curve, Need};
use crate::guest::Spec;
use crate::world::Setup;

/// What of a recorded guest's cache is taken to be read all the time.
const HOT_CACHE: f64 = 0.5;
/// The most VMs taken from a record, and the most points of each: hostile files.
const VMS_MOST: usize = 10_000;
const POINTS_MOST: usize = 1_000_000;
/// No guest has more RAM than this (a hostile record says anything).
const RAM_MOST: Bytes = Bytes::gib(1 << 14);

#[derive(Default)]
struct Recorded {
    ram: Bytes,
    reporting: bool,
    deflate_on_oom: bool,
    first_ms: u64,
    last_ms: u64,
    anon: Vec<(u64, Bytes)>,
    files: Vec<(u64, Bytes)>,
}

/// Collects samples into the demand of their guests.
#[derive(Default)]
pub struct Trace {
    start_ms: Option<u64>,
    end_ms: u64,
    host: Bytes,
    swap: Bytes,
    vms: BTreeMap<VmId, Recorded>,
}

impl Trace {
    /// Takes in a sample; they come in the order in which they were taken.
    pub fn push(&mut self, sample: &Sample) {
        let start = *self.start_ms.get_or_insert(sample.at.0);
        let at = sample.at.0.saturating_sub(start).max(self.end_ms);
        self.end_ms = at;
        if let Some(m) = sample.host.memory {
            // The tighter of the two is what the VMs had.
            let limit = sample.host.pool.as_ref().map_or(m.total, |p| p.limit.min(m.total));
            self.host = limit.min(RAM_MOST);
            self.swap = m.swap_total.min(RAM_MOST);
        }
        for vm in &sample.vms {
            if self.vms.contains_key(&vm.id) || self.vms.len() < VMS_MOST {
                self.vms.entry(vm.id).or_default().push(vm, at);
            }
        }
    }

    /// A world of these guests on the recorded host (or one of `host`); `None` where
    /// no guest ever told its numbers.
    pub fn setup(self, host: Option<Bytes>, seed: u64) -> Option<Setup> {
        let end = self.end_ms;
        let told = self.vms.into_values().filter(|r| !r.anon.is_empty());
        let guests: Vec<Spec> = told.map(|r| r.spec(end)).collect();
        let host = host.unwrap_or(self.host);
        let setup = Setup { seed, ..Setup::of(host, self.swap, end, guests) };
        (!setup.guests.is_empty() && host > Bytes::ZERO).then_some(setup)
    }
}

impl Recorded {
    fn push(&mut self, vm: &VmSample, at: u64) {
        if self.anon.is_empty() {
            self.first_ms = at;
        }
        self.last_ms = at;
        self.ram = self.ram.max(vm.ram.unwrap_or_default()).min(RAM_MOST);
        let Some(b) = vm.balloon.as_ref() else { return };
        self.reporting = b.reporting == Some(true);
        self.deflate_on_oom = b.deflate_on_oom == Some(true);
        let Some((stats, free)) = b.guest.and_then(|g| Some((g, g.free?))) else { return };
        let cache = stats.caches.unwrap_or_default().min(b.actual);
        if self.anon.len() < POINTS_MOST {
            self.anon.push((at, (b.actual - free - cache).min(RAM_MOST)));
            self.files.push((at, cache.share(HOT_CACHE)));
        }
    }

    fn spec(self, end_ms: u64) -> Spec {
        let need = Need { files: Curve::new(self.files), ..Need::of(Curve::new(self.anon)) };
        let gone = self.last_ms + 5_000 < end_ms;
        Spec {
            reporting: self.reporting,
            deflate_on_oom: self.deflate_on_oom,
            starts_ms: self.first_ms,
            stops_ms: if gone { self.last_ms } else { u64::MAX },
            ..Spec::new(self.ram.max(Bytes::mib(64)), need)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::Controller;
    use crate::scenario::crowd;
    use crate::world::World;

    /// What a run without a controller looked like, second by second.
    fn recorded() -> (Setup, Trace) {
        let mut setup = crowd(4, Bytes::gib(1), Bytes::gib(16), 5, 0);
        setup.run_ms = 120_000;
        let mut world = World::new(&setup);
        let mut trace = Trace::default();
        while !world.over() {
            trace.push(&world.look());
            world.pass(1_000);
        }
        (setup, trace)
    }

    #[test]
    fn a_recorded_guest_wants_again_what_it_had() {
        let (was, trace) = recorded();
        let now = trace.setup(None, 1).unwrap();
        assert_eq!((now.guests.len(), now.host), (4, Bytes::gib(16)));
        for (a, b) in was.guests.iter().zip(&now.guests) {
            assert_eq!((a.ram, a.deflate_on_oom), (b.ram, b.deflate_on_oom));
            // Once it had time to allocate.
            for s in [30, 60, 100] {
                let (old, new) = (a.need.anon.at(s * 1000), b.need.anon.at((s + 4) * 1000));
                let same = (s..s + 4).all(|t| a.need.anon.at(t * 1000) == old);
                assert!(!same || old.abs_diff(new) < Bytes::mib(40), "{old} {new} at {s} s");
            }
        }
        let score = Controller::Ebb.run(&now).score;
        assert_eq!((score.held, score.vms), (4, 4));
    }

    #[test]
    fn a_record_without_numbers_makes_no_world() {
        assert!(Trace::default().setup(None, 1).is_none());
        let mut silent = Trace::default();
        silent.push(&Sample { vms: vec![VmSample::default()], ..Sample::default() });
        assert!(silent.setup(Some(Bytes::gib(1)), 1).is_none());
    }
}
