//! How fast the recycler is, against plain discards of the same memory:
//! `cargo test --release -p ebb-vmm --test throughput -- --ignored --nocapture`.

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use common::*;
use ebb_core::wire::Recycle;
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use ebb_vmm::ram;
use ebb_vmm::sys::{self, Range, cycles};

const MIB: u64 = 128;
const ROUNDS: usize = 9;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Touches all pages from `FIRST` on and calls every `step`th free.
fn prepare(guest: &Guest, step: u64) -> u64 {
    let pages: Vec<u64> = (FIRST..guest.pages).collect();
    pages.iter().for_each(|p| guest.write(*p, !*p));
    let free: Vec<&u64> = pages.iter().filter(|p| **p % step == 0).collect();
    free.iter().for_each(|p| guest.set(**p, true));
    free.len() as u64
}

/// Bytes per ns and cycles a page, of what gives `bytes` back.
fn timed(bytes: u64, work: impl FnOnce()) -> (f64, f64) {
    let (begun, at) = (cycles(), Instant::now());
    work();
    let (took, ns) = (cycles() - begun, at.elapsed().as_nanos());
    (bytes as f64 / ns as f64, took as f64 / (bytes / 4096) as f64)
}

fn recycler(guest: &Guest, agent: &mut Agent, step: u64) -> (f64, f64) {
    let bytes = prepare(guest, step) * 4096;
    let result = timed(bytes, || {
        let done = recycle(agent, Recycle { budget_ms: 10_000, ..Recycle::default() }).unwrap();
        assert_eq!(done.bytes.0, bytes, "{done:?}");
    });
    (FIRST..guest.pages).for_each(|p| guest.set(p, false));
    result
}

/// The same by madvise alone (hole punching for shared memory), in runs of 2 MiB
/// or page by page.
fn raw(guest: &Guest, step: u64) -> (f64, f64) {
    let bytes = prepare(guest, step) * 4096;
    let run = if step == 1 { 512 } else { 1 };
    timed(bytes, || {
        for first in (FIRST..guest.pages).filter(|p| p % step == 0 && p % run == 0) {
            let (offset, len) = (first * 4096, run * 4096);
            let start = guest.memory.address() + offset;
            match &guest.file {
                Some(file) => ram::punch(file, offset, len).unwrap(),
                None => sys::discard(Range { start, len }).unwrap(),
            }
        }
    })
}

#[test]
#[ignore = "a measurement"]
fn throughput() {
    println!("{:28} {:>9} {:>9} {:>7} {:>16}", "", "raw GB/s", "ebb GB/s", "", "cycles a page");
    for memory in [RamKind::Small, RamKind::Huge, RamKind::Memfd] {
        for (name, step) in [("2 MiB runs", 1), ("every other page", 2), ("every 8th page", 8)] {
            if memory == RamKind::Huge && step > 1 {
                continue;
            }
            let plain = Guest::new(MIB, memory);
            let guest = Guest::new(MIB, memory);
            let (mut agent, beats) = attached(&guest, Faults::default());
            // In turns: whatever else the machine does meets both.
            let turn = |_| (raw(&plain, step), recycler(&guest, &mut agent, step));
            let (theirs, ours): (Vec<_>, Vec<_>) = (0..ROUNDS).map(turn).unzip();
            guest.stop.store(true, SeqCst);
            beats.join().unwrap();
            let of = |list: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64| {
                median(list.iter().map(pick).collect())
            };
            println!(
                "{:28} {:9.1} {:9.1} {:5.0} % {:7.0} {:8.0}",
                format!("{memory:?}, {name}"),
                of(&theirs, |v| v.0),
                of(&ours, |v| v.0),
                of(&ours, |v| v.0) / of(&theirs, |v| v.0) * 100.0,
                of(&theirs, |v| v.1),
                of(&ours, |v| v.1),
            );
        }
    }
}
