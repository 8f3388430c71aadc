//! The simulated host: a clock, its memory, and the guests that use it.
//!
//! Fakes the world, never the logic. Policies see it through [`World::look`] and
//! change it through [`World::order`]; Ebb's own loop through [`Host`].

use std::time::{Duration, Instant};

use ebb_core::config::{Amount, Config, MergeMode, VmSettings};
use ebb_core::plan::{Action, MergePlan, Outcome, Plan};
use ebb_core::sample::{HostSample, Sample, VmId, VmSample, ZeroWays};
use ebb_core::state::Owned;
use ebb_core::tick::{Host, Next};
use ebb_core::units::{Bytes, Stamp};

use crate::demand::Curve;
use crate::guest::{Guest, Spec};
use crate::guest_stats::{self, ASKED_EVERY_MS, LATE_ONE_IN, Qemu};
use crate::host::{HIGH_MARK, HostMemory, LOW_MARK};
use crate::ksm::{KsmHost, copies};
use crate::misbehaviour::Misbehaviour;
use crate::score::{Gauge, Score};

/// The monotonic clock when a run starts, ms: moments before it can be told.
pub(crate) const EPOCH_MS: u64 = 1_000_000;
/// The longest step.
const STEP_MS: u64 = 100;

/// Looks that are no further apart than this are fast ones, ms.
const FAST_MS: u64 = 500;
/// The daemon has guests asked this long before a fast look, ms.
const KICK_AHEAD_MS: u64 = 40;
/// Otherwise QEMU asks them this often, ms.
const EBB_ASKS_MS: u64 = 2_000;

/// A moment to measure from.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    pub what: Measured,
    /// Which guest.
    pub vm: usize,
    /// How much.
    pub bytes: Bytes,
    /// From when on, ms into the run.
    pub at_ms: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Measured {
    /// How long until the guest has returned that much, from then on and from when the host has
    /// less than a tenth free?
    Take,
    /// From then on the guest wants that much more: how long until it has it, beyond the time that
    /// its programs need to allocate it?
    Give,
}

/// A probe under way.
#[derive(Clone, Copy, Debug)]
struct Watch {
    probe: Probe,
    from: Option<Bytes>,
    /// When the host was short for the first time.
    short_ms: Option<u64>,
    took_s: Option<f64>,
}

/// A world to simulate.
#[derive(Clone, Debug)]
pub struct Setup {
    pub host: Bytes,
    /// The host's swap.
    pub swap: Bytes,
    /// How long, ms.
    pub run_ms: u64,
    /// Everything random comes from this.
    pub seed: u64,
    /// The guests, in order of their ids.
    pub guests: Vec<Spec>,
    /// What is to be measured beside the usual.
    pub probes: Vec<Probe>,
    /// Ebb may page out cold memory.
    pub offload: bool,
    /// It steers KSM.
    pub merge: bool,
    /// It frees zero pages.
    pub zeros: bool,
    /// Watermarks at which the host begins and ends to swap, as shares of memory.
    pub marks: (f64, f64),
    /// What others than VMs use.
    pub others: Curve,
    /// A guest is too busy to answer for the time divided by this; 1: always.
    pub late_one_in: u32,
    /// Every guest's floor, whoever rules.
    pub min: Amount,
}

impl Setup {
    /// A world of these guests; with the marks of a small host and nothing else on it.
    pub fn of(host: Bytes, swap: Bytes, run_ms: u64, guests: Vec<Spec>) -> Setup {
        Setup {
            host,
            swap,
            run_ms,
            seed: 0,
            guests,
            probes: Vec::new(),
            offload: true,
            merge: false,
            zeros: false,
            marks: (LOW_MARK, HIGH_MARK),
            others: Curve::default(),
            late_one_in: LATE_ONE_IN,
            min: VmSettings::default().min,
        }
    }

    /// Ebb's configuration for it; the floors are also those of the rivals.
    pub fn config(&self) -> Config {
        let mut config = Config { offload: Some(self.offload), ..Config::default() };
        config.defaults.min = self.min;
        config.merge.zeros = self.zeros;
        if self.merge {
            config.merge.mode = MergeMode::On;
        }
        for (i, spec) in self.guests.iter().enumerate() {
            if spec.weight != 1.0 {
                let settings = VmSettings { weight: spec.weight, ..config.defaults.clone() };
                config.vms.insert(guest_stats::name(i as u32), settings);
            }
        }
        config
    }
}

/// The simulated host.
#[derive(Default)]
pub struct World {
    pub guests: Vec<Guest>,
    pub host: HostMemory,
    /// What is measured of each guest.
    pub gauges: Vec<Gauge>,
    /// Wall time spent in the simulated host itself, so that callers can tell it
    /// from the time of the loop.
    pub outside: Duration,
    /// What was written down last.
    pub remembered: Owned,
    /// QEMU asks guests for their numbers so often, ms.
    pub asked_every_ms: u64,
    ksm: Option<KsmHost>,
    /// How its kernel can free zero pages.
    zeros: Option<ZeroWays>,
    others: Curve,
    qemus: Vec<Qemu>,
    watches: Vec<Watch>,
    orders: u64,
    run_ms: u64,
    at_ms: u64,
    turn: usize,
    looked_ms: u64,
}

impl World {
    /// The world at its first moment.
    pub fn new(setup: &Setup) -> World {
        let n = setup.guests.len() as u32;
        let guest = |(spec, i): (&Spec, u32)| Guest::new(i, setup.seed, spec.clone());
        let mut guests: Vec<Guest> = setup.guests.iter().zip(0..n).map(guest).collect();
        guests.iter_mut().for_each(|g| g.switch(0));
        let mut host = HostMemory::new(setup.host, setup.swap);
        (host.marks, host.others) = (setup.marks, setup.others.at(0));
        host.begin(&mut guests);
        let watch =
            |probe: &Probe| Watch { probe: *probe, from: None, short_ms: None, took_s: None };
        World {
            qemus: (0..n).map(|i| Qemu::new(i, setup.seed, setup.late_one_in)).collect(),
            gauges: vec![Gauge::default(); guests.len()],
            watches: setup.probes.iter().map(watch).collect(),
            host,
            ksm: setup.merge.then(KsmHost::default),
            zeros: setup.zeros.then_some(ZeroWays { split: true, pageout: false }),
            others: setup.others.clone(),
            guests,
            asked_every_ms: ASKED_EVERY_MS,
            run_ms: setup.run_ms,
            ..World::default()
        }
    }

    /// Milliseconds into the run.
    pub fn at_ms(&self) -> u64 {
        self.at_ms
    }

    /// Guests send their statistics without being asked, also while they are busy.
    pub fn guests_push(&mut self) {
        self.qemus.iter_mut().for_each(Qemu::never_busy);
    }

    pub fn over(&self) -> bool {
        self.at_ms >= self.run_ms
    }

    /// Lets time pass, in steps of at most 100 ms, up to the end of the run.
    pub fn pass(&mut self, ms: u64) {
        let end = (self.at_ms + ms).min(self.run_ms);
        while self.at_ms < end {
            let dt = (end - self.at_ms).min(STEP_MS);
            self.at_ms += dt;
            self.step(dt);
        }
    }

    fn step(&mut self, dt: u64) {
        let at = self.at_ms;
        self.host.others = self.others.at(at);
        let mut room = self.host.room(&self.guests, dt);
        // No guest is always the first that is given memory.
        let n = self.guests.len();
        self.turn = (self.turn + 1) % n.max(1);
        for i in 0..n {
            self.guests[(i + self.turn) % n].live(at, dt, &mut room);
        }
        self.host.settle(&mut self.guests, &room, dt);
        let now = self.now();
        self.ksm.iter_mut().for_each(|ksm| ksm.pass(&mut self.guests, (at, now), dt));
        for (g, qemu) in self.guests.iter().zip(&mut self.qemus) {
            qemu.listen(g, at, self.asked_every_ms);
        }
        let on = self.guests.iter().filter(|g| g.power);
        self.host.stalls.pass(dt, on.map(|g| g.waited_for_host));
        if self.host.must_kill()
            && let Some(largest) = self.guests.iter_mut().max_by_key(|g| g.resident())
        {
            largest.kill(at);
        }
        for (gauge, g) in self.gauges.iter_mut().zip(&self.guests) {
            gauge.pass(g, at, dt);
        }
        let short = self.host.free(&self.guests) < self.host.total.share(0.1);
        for watch in &mut self.watches {
            watch.look(&self.guests, at, short);
        }
    }

    /// What the host can see now.
    pub fn look(&mut self) -> Sample {
        let (at, wall_ms) = (self.at_ms, EPOCH_MS + self.at_ms);
        self.looked_ms = at;
        let seen = self.guests.iter().zip(&mut self.qemus).filter(|(g, _)| g.power);
        let ksm = &self.ksm;
        let sample = |(g, qemu): (&Guest, &mut Qemu)| VmSample {
            merge: ksm.as_ref().map(|ksm| ksm.sample_of(g, Stamp(wall_ms))),
            ..qemu.sample(g, at, wall_ms)
        };
        let vms = seen.map(sample).collect();
        let (ksm, scan) = ksm.as_ref().map(|ksm| ksm.sample(&self.guests)).unzip();
        let host = HostSample { ksm, scan, zeros: self.zeros, ..self.host.sample(&self.guests) };
        Sample { at: Stamp(wall_ms), wall_ms, vms, host, ..Sample::default() }
    }

    /// The id of a guest that is switched on.
    pub fn id(&self, guest: usize) -> Option<VmId> {
        self.guests.get(guest).filter(|g| g.power)?;
        Some(self.qemus.get(guest)?.id)
    }

    /// Which guest this is.
    pub fn index(&self, id: VmId) -> Option<usize> {
        let i = id.pid.checked_sub(1000)? as usize;
        (self.qemus.get(i)?.id == id && self.guests[i].power).then_some(i)
    }

    /// How old a guest's numbers truly are, ms; `None`: it never told any. Those of a module are of
    /// this moment, also before QEMU has asked the guest, unless they stand still.
    pub fn age_ms(&self, guest: usize) -> Option<u64> {
        self.qemus.get(guest)?.age_ms(self.guests.get(guest)?, self.at_ms)
    }

    /// What a guest used when it sent the statistics that were looked at last.
    pub fn known_used(&self, guest: usize) -> Option<Bytes> {
        self.qemus.get(guest)?.known_used(self.guests.get(guest)?)
    }

    /// What must hold of the world itself, whoever rules it: memory is neither made
    /// nor lost. An error says what does not hold.
    pub fn sound(&self) -> Result<(), String> {
        let resident: Bytes = self.guests.iter().map(Guest::resident).sum();
        let resident = resident + copies(&self.guests);
        if resident > self.host.total {
            return Err(format!("{resident} resident on a host of {}", self.host.total));
        }
        let swapped: Bytes = self.guests.iter().map(|g| g.out).sum();
        // Rounding: a byte a guest and step at most.
        if swapped > self.host.swap + Bytes::mib(1) {
            return Err(format!("{swapped} in {} of swap", self.host.swap));
        }
        if self.host.swapped_in > self.host.swapped_out {
            return Err("more was swapped in than out".into());
        }
        for g in &self.guests {
            let touched = g.spec.misbehaviour != Misbehaviour::Pinned
                && g.touched() > g.actual + Bytes::mib(1);
            let elsewhere = g.out + g.merged > g.touched() + Bytes::mib(1);
            if touched || g.actual > g.spec.ram || elsewhere {
                return Err(format!("vm{:04} at {} ms: {g:?}", g.index, self.at_ms));
            }
        }
        Ok(())
    }

    /// Sets a balloon; QEMU takes the order or not.
    pub fn order(&mut self, id: VmId, to: Bytes) -> Result<(), String> {
        let at = self.at_ms;
        let Some(i) = self.index(id) else { return Err("it is gone".into()) };
        if self.guests[i].spec.misbehaviour == Misbehaviour::Bare {
            return Err("it has no balloon".into());
        }
        if !self.guests[i].spec.misbehaviour.answers(at) {
            return Err("no answer for 200 ms".into());
        }
        self.orders += 1;
        self.guests[i].order(to);
        Ok(())
    }

    /// What became of the run.
    pub fn score(&self) -> Score {
        let mut score = Score::of(&self.guests, &self.gauges);
        score.orders = self.orders;
        score.overfull_s = self.host.overfull_ms as f64 / 1000.0;
        score.run_s = self.at_ms as f64 / 1000.0;
        for watch in self.watches.iter().filter(|w| w.from.is_some()) {
            match watch.probe.what {
                Measured::Take => score.take_s = watch.took_s,
                Measured::Give => score.give_s = watch.took_s,
            }
            score.missed += u64::from(watch.took_s.is_none());
        }
        score
    }
}

impl Watch {
    fn look(&mut self, guests: &[Guest], now_ms: u64, short: bool) {
        let Probe { what, vm, bytes, at_ms } = self.probe;
        // What it has is read just before.
        let begun = now_ms + 2 * STEP_MS >= at_ms;
        let (Some(g), true, None) = (guests.get(vm), begun, self.took_s) else { return };
        let late = now_ms.saturating_sub(at_ms) as f64 / 1000.0;
        match what {
            Measured::Take => {
                let from = *self.from.get_or_insert(g.touched());
                if short && now_ms >= at_ms {
                    self.short_ms.get_or_insert(now_ms);
                }
                let taken = from - g.touched() >= bytes;
                let since = |t: u64| (now_ms - t) as f64 / 1000.0;
                self.took_s = self.short_ms.filter(|_| taken).map(since);
            }
            Measured::Give => {
                let from = *self.from.get_or_insert(g.alloc);
                let work = bytes.0 as f64 / g.spec.need.rate;
                let has = g.alloc + Bytes::mib(4) >= from + bytes;
                self.took_s = has.then_some((late - work).max(0.0));
            }
        }
    }
}

impl Host for World {
    fn now(&self) -> Stamp {
        Stamp(EPOCH_MS + self.at_ms)
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        let started = Instant::now();
        let mut sample = self.look();
        sample.ended = owed.iter().copied().filter(|id| self.index(*id).is_none()).collect();
        self.outside += started.elapsed();
        sample
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        self.remembered = owned.clone();
        Ok(())
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        let started = Instant::now();
        let carry_out = |a: &Action| Outcome {
            vm: a.vm,
            error: self.order(a.vm, a.to).err(),
            ..Outcome::default()
        };
        let outcomes = actions.iter().map(carry_out).collect();
        self.outside += started.elapsed();
        outcomes
    }

    fn start(&mut self, plan: &Plan) {
        let started = Instant::now();
        for order in &plan.recycle {
            let Some(i) = self.index(order.vm) else { continue };
            let g = &mut self.guests[i];
            if let Some(job) = &order.recycle {
                g.recycle(job.max_bytes, job.marked);
            }
            if order.mark {
                g.marked = Some(g.held());
            }
        }
        self.outside += started.elapsed();
        for order in &plan.orders.offload {
            if let Some(i) = self.index(order.vm) {
                self.guests[i].paging += order.bytes;
            }
        }
        for order in &plan.orders.partial_thp {
            self.index(order.vm).into_iter().for_each(|i| self.guests[i].split_on_order());
        }
        for order in &plan.orders.zeros {
            // A thread reads 2 GB/s.
            let read = order.read.min(Bytes(order.ms * 2_000_000));
            self.index(order.vm).into_iter().for_each(|i| self.guests[i].free_zeros(read));
        }
    }

    fn merge(&mut self, plan: &MergePlan) {
        for order in &plan.vms {
            self.index(order.vm).into_iter().for_each(|i| self.guests[i].open = order.open);
        }
        let at_ms = self.at_ms;
        self.ksm.iter_mut().for_each(|ksm| ksm.order(plan, at_ms));
    }

    /// As the daemon does: guests are asked right before a fast look, but for those that rest.
    fn wait(&mut self, next: &Next) -> bool {
        let until_ms = next.at.0.saturating_sub(EPOCH_MS).max(self.at_ms + 1);
        self.asked_every_ms = EBB_ASKS_MS;
        if until_ms - self.looked_ms <= FAST_MS {
            self.pass(until_ms.saturating_sub(self.at_ms + KICK_AHEAD_MS));
            let now = (self.now(), self.at_ms);
            for (g, qemu) in self.guests.iter().zip(&mut self.qemus).filter(|(g, _)| g.power) {
                qemu.rests = next.rests(qemu.id);
                if next.asks_anew(qemu.id) {
                    qemu.ask(g, now, EBB_ASKS_MS);
                }
            }
        }
        self.pass(until_ms - self.at_ms);
        !self.over()
    }
}
