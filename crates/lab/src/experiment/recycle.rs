//! `recycle`: how fast freed memory becomes the host's, against the plain discard
//! of the same memory and against what stock QEMU offers.
//!
//! Arms: `raw` (madvise or hole punching alone, on as much memory of the same kind
//! in this process), `raw-vm` (the same on what a stopped guest has freed: the time in the
//! windows of an agent that is built to leave protection and proof out), `ebb-guest`,
//! `reporting`, `balloon`, `virtio-mem`. The first three take turns, so whatever else
//! the machine does meets them all; what the
//! recycler takes is free memory of a running guest, and its time is the whole
//! call: reading the map, asking what is held, proving, discarding. `throughput` is
//! by the clock, `page_cycles` by the processor time of the thread. The others are
//! timed from the order (reporting: from the free) until the host has 95 % of all it
//! gets; `host_rate` is the same for the recycler, from the request on.
//!
//! Metrics end with `_thp` or `_memfd` for these backings (else 4 KiB anonymous
//! pages) and with `_isolated` where free pages lie between used ones (else in
//! runs of 2 MiB).

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ebb_core::units::Bytes;
use ebb_vmm::ram;
use ebb_vmm::recycle::cpu_ns;
use ebb_vmm::sys::{self, Mapping, Range, cycles};
use serde_json::json;

use super::cgroup_guest::{self, Bench, MINUTE, Place, RamKind};
use super::trial::Trial;
use crate::guest_stack;
use crate::result::{ExperimentResult, target};
use crate::vm::{Balloon, Vm};

pub const ARMS: [&str; 6] = ["raw", "raw-vm", "ebb-guest", "reporting", "balloon", "virtio-mem"];
/// What makes an agent discard and nothing else.
const DISCARD_ONLY: &str = "no_protect+no_reread";
/// Free page reporting waits, and takes a part of the list at a time.
const PATIENT: Duration = Duration::from_secs(150);

/// What is taken back sooner than this after it was recycled counts as recycled in
/// vain, and more is left to the guest the next time: not what is timed here.
const APART: Duration = Duration::from_secs(7);
/// `ebb reclaim` says a wish for everything again this often.
const AGAIN: Duration = Duration::from_millis(300);
/// Guests hand out pages in no order, so neighbours in a process often are none in
/// RAM: of every other page half would lie beside another free one.
const ISOLATED: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Blocks of 2 MiB.
    Runs,
    /// One page out of [`ISOLATED`]: what lies beside it is in use.
    Isolated,
}

impl Shape {
    fn suffix(self) -> &'static str {
        if self == Shape::Runs { "" } else { "_isolated" }
    }
}

#[derive(Clone, Copy, Debug)]
struct Timed {
    bytes: u64,
    ns: f64,
    /// Processor time.
    cpu_ns: f64,
}

/// Cycles per ns, from the whole run.
struct Clock(Instant, u64);

impl Clock {
    fn ghz(&self) -> f64 {
        (cycles() - self.1) as f64 / self.0.elapsed().as_nanos().max(1) as f64
    }
}

pub fn run(trial: &Trial, outcome: &mut ExperimentResult) -> Result<()> {
    let mut bench = Bench::new(trial, outcome)?;
    if ["raw", "raw-vm", "ebb-guest"].iter().any(|arm| trial.wants(arm)) {
        for memory in RamKind::ALL {
            throughput(&mut bench, memory)?;
        }
    }
    if trial.wants("ebb-guest") {
        latency(&mut bench)?;
    }
    for memory in [RamKind::Small, RamKind::Huge] {
        if trial.wants("reporting") {
            reporting(&mut bench, memory)?;
        }
        if trial.wants("balloon") {
            balloon(&mut bench, memory)?;
        }
        if trial.wants("virtio-mem") {
            // Not every guest kernel has the driver.
            virtio_mem(&mut bench, memory)
                .unwrap_or_else(|e| println!("  virtio-mem: skipped: {e:#}"));
        }
    }
    verdict(outcome);
    Ok(())
}

/// Raw and recycler in turns, in both shapes.
fn throughput(bench: &mut Bench<'_>, memory: RamKind) -> Result<()> {
    let trial = bench.trial;
    let boot = |faults: Option<&str>| -> Result<Place> {
        let mut found = Ok(());
        let mut place = bench.boot(memory, true, |c| {
            found = faults.map_or(Ok(()), |f| guest_stack::leave_out(c, f));
        })?;
        found?;
        place.attach()?;
        Ok(place)
    };
    let mut place = trial.wants("ebb-guest").then(|| boot(None)).transpose()?;
    let mut bare = trial.wants("raw-vm").then(|| boot(Some(DISCARD_ONLY))).transpose()?;
    for shape in [Shape::Runs, Shape::Isolated] {
        let size = trial.size(if shape == Shape::Runs { 256 } else { 48 });
        let clock = Clock(Instant::now(), cycles());
        let (mut raw, mut raw_vm, mut ebb) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..trial.rounds(7) {
            if trial.wants("raw") {
                raw.push(discard(memory, shape, size)?);
            }
            if let Some(bare) = &mut bare {
                raw_vm.push(recycle(bare, shape, size, true)?);
            }
            if let Some(place) = &mut place {
                ebb.push(recycle(place, shape, size, false)?);
            }
        }
        let ghz = clock.ghz();
        for (arm, times) in [("raw", raw), ("raw-vm", raw_vm), ("ebb-guest", ebb)] {
            let suffix = format!("{}{}", memory.suffix(), shape.suffix());
            let rate: Vec<f64> = times.iter().map(|t| t.bytes as f64 / t.ns * 1e9).collect();
            let page = |t: &Timed| t.cpu_ns * ghz / (t.bytes / 4096).max(1) as f64;
            let page: Vec<f64> = times.iter().map(page).collect();
            let metric = |name: &str| format!("{name}{suffix}");
            bench.outcome.add_median(arm, &metric("throughput"), "bytes_per_second", &rate);
            bench.outcome.add_median(arm, &metric("page_cycles"), "cycles", &page);
        }
    }
    drop(bare);
    if let Some(place) = &mut place {
        let mut rates = Vec::new();
        for _ in 0..trial.rounds(5) {
            rates.extend(host_rate(place, trial.size(256))?);
        }
        let metric = format!("host_rate{}", memory.suffix());
        bench.outcome.add_median("ebb-guest", &metric, "bytes_per_second", &rates);
    }
    Ok(())
}

/// Memory of the same kind in this process, touched and given back by the system
/// call that does it: for huge pages that are taken in part, split as well.
fn discard(memory: RamKind, shape: Shape, size: Bytes) -> Result<Timed> {
    let len = (size.0 * if shape == Shape::Runs { 1 } else { ISOLATED }) as usize;
    let (mut mapping, file): (Mapping, Option<OwnedFd>) = match memory {
        RamKind::Memfd => {
            let file = rustix::fs::memfd_create("raw", rustix::fs::MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&file, len as u64)?;
            (Mapping::shared(file.as_fd(), len)?, Some(file))
        }
        _ => {
            let mapping = Mapping::anonymous(len)?;
            mapping.huge(memory == RamKind::Huge)?;
            (mapping, None)
        }
    };
    mapping.bytes_mut().iter_mut().step_by(4096).for_each(|b| *b = 1);
    let step = if shape == Shape::Runs { 2 << 20 } else { ISOLATED * 4096 };
    let piece = if shape == Shape::Runs { step } else { 4096 };
    let (begun, cpu) = (Instant::now(), cpu_ns());
    for offset in (0..len as u64).step_by(step as usize) {
        let range = Range { start: mapping.address() + offset, len: piece };
        match &file {
            Some(file) => ram::punch(file, offset, piece)?,
            None => sys::discard(range)?,
        }
        let last = (offset + step).is_multiple_of(2 << 20);
        if shape == Shape::Isolated && memory == RamKind::Huge && last {
            sys::cold(Range { start: range.start + 4096, len: 4096 })?;
        }
    }
    let ns = begun.elapsed().as_nanos() as f64;
    Ok(Timed { bytes: size.0, ns, cpu_ns: (cpu_ns() - cpu) as f64 })
}

/// The same amount, freed by a guest, in one call of the recycler; `bare`: by an
/// agent that only discards, which a guest survives while it stands still.
fn recycle(place: &mut Place, shape: Shape, size: Bytes, bare: bool) -> Result<Timed> {
    place.settle()?;
    match shape {
        Shape::Runs => {
            place.start("h", "hold", &format!("size={} huge=1", size.0))?;
            place.stop("h")?;
        }
        Shape::Isolated => {
            place.start("h", "pieces", &format!("size={} of={ISOLATED}", ISOLATED * size.0))?;
            // What starting it left free is not what is measured.
            place.settle()?;
            place.free_pieces("h")?;
        }
    }
    place.wait_held(size.share(0.9))?;
    let full = place.usage();
    if bare {
        place.pause(true)?;
    }
    // What else became free lies in pieces, and is none of the shape's.
    let mut done = place.recycle_runs(if shape == Shape::Runs { 512 } else { 1 })?;
    let fell = full - place.usage();
    if bare {
        place.pause(false)?;
        (done.ns, done.cpu_ns) = (done.window_ns, done.window_ns);
    }
    println!(
        "  {shape:?}: {} in {:.1} ms ({:.1} ms of processor time), {:.1} pages a run, host has {} more",
        done.bytes,
        done.ns as f64 / 1e6,
        done.cpu_ns as f64 / 1e6,
        done.bytes.0 as f64 / 4096.0 / done.runs.max(1) as f64,
        fell
    );
    if shape == Shape::Isolated {
        place.stop("h")?;
    }
    Ok(Timed { bytes: done.bytes.0, ns: done.ns as f64, cpu_ns: done.cpu_ns as f64 })
}

/// Bytes a second from the request to 95 % in the host's eyes, as for the others.
fn host_rate(place: &mut Place, size: Bytes) -> Result<Option<f64>> {
    place.settle()?;
    place.start("h", "hold", &format!("size={} huge=1", size.0))?;
    place.stop("h")?;
    place.wait_held(size.share(0.95))?;
    let full = place.usage();
    let fall = place.recycle_watched(full, size.share(0.95), MINUTE)?;
    Ok(fall.rate())
}

/// From the free to 95 % at the host, by the daemon: asked for, and of itself.
fn latency(bench: &mut Bench<'_>) -> Result<()> {
    let (trial, place) = (bench.trial, bench.boot(RamKind::Small, true, |_| ())?);
    place.insmod()?;
    let daemon = place.daemon("guest")?;
    let size = trial.size(256);
    for (asked, metric) in [(true, "free_to_host_95"), (false, "free_to_host_95_unasked")] {
        let mut times = Vec::new();
        for _ in 0..trial.rounds(5) {
            daemon.wait_for("calm", 2 * MINUTE, |s| {
                s["vms"][0]["agent"]["held"].as_u64().is_some_and(|held| held < 24 << 20)
            })?;
            std::thread::sleep(APART);
            place.start("h", "hold", &format!("size={}", size.0))?;
            let full = place.usage();
            place.stop("h")?;
            let begun = Instant::now();
            let fall = std::thread::scope(|scope| -> Result<_> {
                let watch = || cgroup_guest::watch(&place.cgroup, begun, full, size, MINUTE);
                let watching = scope.spawn(watch);
                while asked && !watching.is_finished() {
                    daemon.reclaim()?;
                    std::thread::sleep(AGAIN);
                }
                watching.join().map_err(|_| anyhow::anyhow!("the watch ended early"))
            })?;
            times.push(fall.time_to(0.95).context("less than 95 % came back in a minute")?);
        }
        bench.outcome.add_median("ebb-guest", metric, "seconds", &times);
    }
    daemon.stop();
    Ok(())
}

/// What comes back each time after `free`, which tells what the host held and when it began;
/// `after` makes ready for the next time.
fn falls(
    bench: &mut Bench<'_>,
    (arm, memory): (&str, RamKind),
    (place, size): (&Place, Bytes),
    free: impl Fn() -> Result<(Bytes, Instant)>,
    after: impl Fn() -> Result<()>,
) -> Result<()> {
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for _ in 0..bench.trial.rounds(3) {
        let (full, begun) = free()?;
        let fall = cgroup_guest::watch(&place.cgroup, begun, full, size, PATIENT);
        println!("  {arm}, {}: {:.1} % back", memory.name(), fall.share() * 100.0);
        rates.extend(fall.rate());
        times.extend(fall.time_to(0.95));
        after()?;
    }
    let metric = |name: &str| format!("{name}{}", memory.suffix());
    bench.outcome.add_median(arm, &metric("throughput"), "bytes_per_second", &rates);
    bench.outcome.add_median(arm, &metric("free_to_host_95"), "seconds", &times);
    Ok(())
}

/// Free page reporting: from the free on, by itself.
fn reporting(bench: &mut Bench<'_>, memory: RamKind) -> Result<()> {
    let place = bench.boot(memory, false, |c| {
        c.balloon = Some(Balloon { reporting: true, deflate_on_oom: false });
    })?;
    let size = bench.trial.size(256);
    let free = || -> Result<_> {
        place.calm()?;
        place.start("h", "hold", &format!("size={} huge=1", size.0))?;
        let full = place.usage();
        place.stop("h")?;
        Ok((full, Instant::now()))
    };
    falls(bench, ("reporting", memory), (&place, size), free, || Ok(()))
}

/// The balloon: asked for just what was freed.
fn balloon(bench: &mut Bench<'_>, memory: RamKind) -> Result<()> {
    let place = bench.boot(memory, false, |_| ())?;
    let (size, whole) = (bench.trial.size(256), place.vm.memory);
    let free = || -> Result<_> {
        // Whatever page the balloon takes, the host has it to lose.
        place.touch_all()?;
        let (full, begun) = (place.usage(), Instant::now());
        place.vm.set_balloon(whole - size)?;
        Ok((full, begun))
    };
    let after = || -> Result<()> {
        place.vm.set_balloon(whole)?;
        let up = |vm: &Vm| vm.balloon().is_ok_and(|b| b == whole);
        Ok(place.vm.wait_for("the balloon to empty", MINUTE, up)?)
    };
    falls(bench, ("balloon", memory), (&place, size), free, after)
}

/// virtio-mem: a device of just what is asked back, all of it touched.
fn virtio_mem(bench: &mut Bench<'_>, memory: RamKind) -> Result<()> {
    // Linux takes it by memory blocks of 128 MiB.
    let size = Bytes::mib((bench.trial.size(256).0 >> 27).max(1) * 128);
    let base = Bytes::gib(1) - size;
    let place = bench.boot(memory, false, |c| {
        c.memory = base;
        c.append = "memhp_default_state=online_movable".into();
        let device = format!("virtio-mem-pci,id=vm0,memdev=vm0ram,requested-size={}", size.0);
        let ram = format!("memory-backend-ram,id=vm0ram,size={}", size.0);
        c.args = ["-m", "maxmem=4G,slots=1", "-object", &ram, "-device", &device]
            .map(String::from)
            .to_vec();
    })?;
    let loaded = place.vm.request("modprobe name=virtio_mem", MINUTE);
    loaded.context("the guest kernel has no virtio_mem")?;
    let get = |vm: &Vm| {
        let path = json!({"path": "/machine/peripheral/vm0", "property": "size"});
        vm.qmp("qom-get", Some(path)).ok().and_then(|v| v.as_u64())
    };
    let set = |size: u64| {
        let path = "/machine/peripheral/vm0";
        let what = json!({"path": path, "property": "requested-size", "value": size});
        place.vm.qmp("qom-set", Some(what))
    };
    let free = || -> Result<_> {
        set(size.0)?;
        place.vm.wait_for("its memory", MINUTE, |vm| get(vm) == Some(size.0))?;
        place.touch_all()?;
        let (full, begun) = (place.usage(), Instant::now());
        set(0)?;
        Ok((full, begun))
    };
    let empty = |vm: &Vm| get(vm) == Some(0);
    let after = || Ok(place.vm.wait_for("the device empty", MINUTE, empty)?);
    falls(bench, ("virtio-mem", memory), (&place, size), free, after)
}

/// The targets, and whether they were met.
fn verdict(outcome: &ExperimentResult) {
    let value = |arm: &str, metric: &str| outcome.value(arm, metric);
    for suffix in ["", "_thp", "_memfd"] {
        for limit in ["raw", "raw-vm"] {
            let metric = format!("throughput{suffix}");
            if let (Some(raw), Some(ebb)) = (value(limit, &metric), value("ebb-guest", &metric)) {
                target(&format!("{metric}: share of {limit}"), ebb / raw, ">=", 0.80);
            }
            // The same by processor time, which a busy machine disturbs less.
            let metric = format!("page_cycles{suffix}");
            if let (Some(raw), Some(ebb)) = (value(limit, &metric), value("ebb-guest", &metric)) {
                target(&format!("{metric}: share of {limit}"), raw / ebb, ">=", 0.80);
            }
        }
        for (shape, most) in [("", 1000.0), ("_isolated", 6500.0)] {
            outcome.target("ebb-guest", &format!("page_cycles{suffix}{shape}"), "<=", most);
        }
    }
    for suffix in ["", "_thp"] {
        for rival in ["reporting", "balloon"] {
            let ours = value("ebb-guest", &format!("host_rate{suffix}"));
            let theirs = value(rival, &format!("throughput{suffix}"));
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                target(&format!("host_rate{suffix}: times {rival}"), ours / theirs, ">=", 20.0);
            }
        }
    }
    for (metric, most) in [("free_to_host_95", 1.0), ("free_to_host_95_unasked", 11.0)] {
        outcome.target("ebb-guest", metric, "<=", most);
    }
}
