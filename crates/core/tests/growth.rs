//! A daemon runs for months: what the loop keeps on the heap must not grow.
//!
//! Every allocation of the thread that runs the loop is counted, and every one that it
//! gives back; what is left after a tick is what the loop remembers. A million ticks
//! (`--ignored`) are six days at two a second.
#![allow(unsafe_code, reason = "an allocator that counts")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Guest, Toy};
use ebb_core::config::Config;
use ebb_core::plan::{Action, Outcome};
use ebb_core::sample::{Link, Sample, VmEvent, VmId};
use ebb_core::state::Owned;
use ebb_core::tick::{Engine, Host, Next};
use ebb_core::units::{Bytes, Stamp};

thread_local! {
    /// Bytes that this thread has allocated and not given back.
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    // A thread that ends has nothing to count any more.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller keeps the contract, which is System's.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller keeps the contract, which is System's.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOC: Counting = Counting;

/// The toy host, and in it one of everything that happens in a year: VMs that go and
/// others that come, reboots, renames, silence.
struct Eventful {
    toy: Toy,
    ticks: u64,
}

impl Host for Eventful {
    fn now(&self) -> Stamp {
        self.toy.now()
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        let n = self.ticks;
        for (i, g) in self.toy.guests.iter_mut().enumerate() {
            if (n + 97 * i as u64).is_multiple_of(3_000) {
                (g.actual, g.target) = (g.ram, g.ram);
            }
        }
        let mut sample = self.toy.read(owed);
        for (i, vm) in sample.vms.iter_mut().enumerate() {
            // A new one in its place now and then, at full size.
            vm.id.start += (n + 97 * i as u64) / 3_000;
            let at = (n + 1_000 * i as u64) % 5_000;
            match at {
                1_000 => vm.events.push(VmEvent::Reset),
                2_000..2_100 => vm.link = Link::Slow("no answer for 200 ms".into()),
                3_000..3_100 => vm.balloon.iter_mut().for_each(|b| b.guest = None),
                4_000.. => vm.name.push_str("-renamed"),
                _ => {}
            }
        }
        sample.vms.sort_by_key(|vm| vm.id);
        let there = |id: &VmId| sample.vms.binary_search_by_key(id, |vm| vm.id).is_ok();
        sample.ended = owed.iter().copied().filter(|id| !there(id)).collect();
        sample
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        self.toy.remember(owned)
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.toy.apply(actions)
    }

    fn wait(&mut self, next: &Next) -> bool {
        self.ticks += 1;
        self.toy.wait(next)
    }
}

fn grows_not(ticks: u64) {
    let toy = Toy::new(20, 0, vec![Guest::new(8, 2), Guest::new(8, 3), Guest::new(16, 2)]);
    let mut host = Eventful { toy, ticks: 0 };
    let mut engine = Engine::new(Config::default(), false);
    let before = LIVE.get();
    // The most that was kept after a tick, in each tenth of the run.
    let mut most = [0; 10];
    let mut acted = 0;
    for n in 0..ticks {
        // Each guest in turn wants much for a while: orders, returns, holds of all kinds.
        let busy = (n / 40) as usize % 4;
        for (i, g) in host.toy.guests.iter_mut().enumerate() {
            g.wanted = if i == busy { g.ram.share(0.8) } else { g.ram.share(0.2) };
            g.used = g.used.min(g.wanted).max(Bytes::gib(1));
        }
        let (tick, model) = engine.step(&mut host);
        acted += tick.plan.actions.len();
        host.wait(&engine.next(&model));
        drop((tick, model));
        let tenth = &mut most[(n * 10 / ticks) as usize];
        *tenth = LIVE.get().max(*tenth);
    }
    assert!(acted > ticks as usize / 50, "{acted} orders");
    let kept = most.map(|m| m - before);
    // Numbers differ by digits in what is remembered as text; nothing else may.
    let early = kept[..3].iter().max().unwrap();
    assert!(kept[9] <= early + 256, "{kept:?} bytes on the heap after {ticks} ticks");
}

#[test]
fn what_is_remembered_does_not_grow_with_time() {
    grows_not(50_000);
}

#[test]
#[ignore = "half a minute; make soak"]
fn what_is_remembered_does_not_grow_in_a_million_ticks() {
    grows_not(1_000_000);
}
