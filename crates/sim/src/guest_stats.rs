//! What a guest tells and what the host sees of it.
//!
//! QEMU asks each guest every second in a rhythm of its own (as Ebb sets it: every two), and shows
//! the answer until the next. The size of the balloon, which QEMU knows itself, is always of the
//! moment. Ebb's daemon has guests asked shortly before each fast look. A guest that is too busy
//! answers up to a second later, and is not asked again before. The moment of an answer is told in
//! whole seconds, so what is known of its age is as little as on a real host.
//!
//! A module's facts are of the moment of a look. While their guest is paused they stand still, and
//! where it is made so (`Spec::late_facts`) also while it is too busy to answer.

use ebb_core::sample::{
    AgentSample, BalloonSample, GuestStats, Heard, Link, OwnMemory, ProcessMemory, RunState,
    VmEvent, VmId, VmSample,
};
use ebb_core::task::{OffloadSample, Tasks};
use ebb_core::units::{Bytes, PAGE, Stamp};
use ebb_core::wire::abi::Facts;
use ebb_core::wire::{AgentState, Counters};

use crate::guest::Guest;
use crate::misbehaviour::Misbehaviour;
use crate::world::EPOCH_MS;

/// How often QEMU asks a guest for its statistics where it is not set otherwise, ms.
pub const ASKED_EVERY_MS: u64 = 1_000;
/// A guest is too busy to answer for the time divided by this, where nothing else is said.
pub const LATE_ONE_IN: u32 = 10;
/// It is so for up to this at a time, ms. QEMU does not ask it again before it has answered.
const LATE_MS: u64 = 1_000;

/// A guest's QEMU, as seen from outside: its name, its guest's last statistics, its events.
#[derive(Clone, Debug, Default)]
pub struct Qemu {
    /// Identity.
    pub id: VmId,
    pub name: String,
    pub(crate) said: Option<Said>,
    /// What the host knows of when they came.
    heard: Heard,
    rhythm: fastrand::Rng,
    late_one_in: u32,
    /// When QEMU asks next, ms into the run.
    asked_ms: u64,
    /// It waits for an answer.
    waits: bool,
    /// When the guest is too busy to answer: from and until, ms into the run.
    busy: (u64, u64),
    /// The kernel that it asked last.
    kernel: u64,
    /// The last one whose boot the host has heard of.
    boots: u64,
    migrating: bool,
    paused: bool,
    connected: bool,
    /// It need not be asked at the next look.
    pub rests: bool,
    /// What the guest really used when it sent the statistics that were looked at last. Those that
    /// come while it rests are not looked at.
    pub(crate) known_used: Option<Bytes>,
    /// Of a module whose facts stand still at times: the last ones.
    facts: Option<Told>,
    /// What was seen when it was last asked, and when, ms into the run.
    seen: Option<(u64, VmSample)>,
}

/// A guest's last statistics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    /// When, ms into the run.
    pub at_ms: u64,
    stats: GuestStats,
    /// What it used then in truth.
    used: Bytes,
}

/// A module's facts.
#[derive(Clone, Copy, Debug)]
struct Told {
    /// When, ms into the run.
    at_ms: u64,
    facts: Facts,
    /// What its guest used then in truth.
    used: Bytes,
}

impl Qemu {
    /// One whose guest has sent no statistics yet.
    pub fn new(index: u32, seed: u64, late_one_in: u32) -> Qemu {
        let mut rhythm = fastrand::Rng::with_seed(seed ^ (u64::from(index) << 32) ^ 0xa5ced);
        Qemu {
            asked_ms: rhythm.u64(0..ASKED_EVERY_MS),
            rhythm,
            late_one_in: late_one_in.max(1),
            id: VmId { pid: 1000 + index, start: seed },
            name: name(index),
            ..Qemu::default()
        }
    }

    /// Time has passed: QEMU asks the guest, each `every_ms`, unless it still waits for an answer.
    pub fn listen(&mut self, g: &Guest, at_ms: u64, every_ms: u64) {
        if std::mem::replace(&mut self.kernel, g.boots) != g.boots {
            (self.said, self.waits, self.facts) = (None, false, None);
        }
        if may_stand_still(g) {
            self.facts = self.tell(g, at_ms).or(self.facts);
        }
        if at_ms >= self.asked_ms {
            self.asked_ms += (at_ms - self.asked_ms) / every_ms * every_ms + every_ms;
            self.waits = true;
        }
        let runs = g.power && !g.paused && !g.is_booting(at_ms);
        let speaks = runs && g.spec.misbehaviour.speaks(at_ms) && !self.is_busy(at_ms);
        if self.waits && speaks {
            // QEMU tells the moment in whole seconds.
            let stats = GuestStats { updated_s: (EPOCH_MS + at_ms) / 1000, ..stats_of(g) };
            self.said = Some(Said { at_ms, stats, used: g.used() });
            self.waits = false;
        }
    }

    /// From now on it is never too busy to answer.
    pub fn never_busy(&mut self) {
        self.busy = (u64::MAX, u64::MAX);
    }

    /// Whether the guest is too busy to answer, which does not depend on who asks, or how often.
    fn is_busy(&mut self, at_ms: u64) -> bool {
        while at_ms >= self.busy.1 {
            let apart_ms = LATE_MS * (u64::from(self.late_one_in) - 1);
            let from = self.busy.1 + self.rhythm.u64(0..=apart_ms);
            self.busy = (from, from + self.rhythm.u64(1..=LATE_MS));
        }
        at_ms >= self.busy.0
    }

    /// What its module tells at this moment; `None`: there is none, or it does not run.
    fn tell(&mut self, g: &Guest, at_ms: u64) -> Option<Told> {
        let starts = g.spec.boots && g.is_booting(at_ms);
        let runs = g.spec.agent && g.power && !g.paused && !starts;
        let tells = runs && !(g.spec.late_facts && self.is_busy(at_ms));
        tells.then(|| Told { at_ms, facts: facts_of(g, EPOCH_MS + at_ms), used: g.used() })
    }

    /// How old what the guest told last is at this moment, ms, by facts or statistics; `None`: it
    /// never told any.
    pub(crate) fn age_ms(&self, g: &Guest, at_ms: u64) -> Option<u64> {
        let (facts, said) = (self.facts.map(|f| f.at_ms), self.said.map(|s| s.at_ms));
        let told = if is_of_the_moment(g) { Some(at_ms) } else { facts.max(said) };
        Some(at_ms - told?)
    }

    /// The least that a guest used when it sent what was looked at last.
    pub(crate) fn known_used(&self, g: &Guest) -> Option<Bytes> {
        let facts = self.facts.map(|f| f.used);
        match is_of_the_moment(g) {
            true => Some(g.used()),
            false => facts.into_iter().chain(self.known_used).min(),
        }
    }

    /// QEMU is told to ask now and to begin its rhythm anew.
    pub fn ask(&mut self, g: &Guest, (at, at_ms): (Stamp, u64), every_ms: u64) {
        if !g.spec.misbehaviour.answers(at_ms) {
            return;
        }
        self.see(at);
        self.asked_ms = at_ms;
        self.listen(g, at_ms, every_ms);
    }

    /// The host looks at what the guest has said.
    fn see(&mut self, at: Stamp) -> Option<GuestStats> {
        let stats = self.said?.stats;
        self.heard.see(at, stats);
        Some(stats)
    }

    /// What the host sees now, or of one that rests what it saw. `wall_ms` is the same moment as
    /// people count it.
    pub fn sample(&mut self, g: &Guest, at_ms: u64, wall_ms: u64) -> VmSample {
        let rests = std::mem::take(&mut self.rests) && !self.has_news(g, at_ms);
        if let Some((seen_ms, seen)) = self.seen.as_ref().filter(|_| rests) {
            let mut sample = seen.clone();
            sample.events.clear();
            if let Some(balloon) = &mut sample.balloon {
                balloon.age_ms = (at_ms - seen_ms).max(1);
                let age_ms = self.heard.age_ms(Stamp(wall_ms), wall_ms);
                balloon.guest.iter_mut().for_each(|stats| stats.age_ms = age_ms);
            }
            return sample;
        }
        let sample = self.look(g, at_ms, wall_ms);
        if g.spec.misbehaviour.answers(at_ms) {
            self.known_used = self.said.map(|s| s.used);
        }
        self.seen = Some((at_ms, sample.clone()));
        sample
    }

    /// QEMU has told something, or does not answer: the daemon hears that of itself.
    fn has_news(&self, g: &Guest, at_ms: u64) -> bool {
        self.boots != g.boots
            || self.migrating != g.spec.misbehaviour.migrates(at_ms)
            || self.paused != g.paused
            || self.connected != g.spec.misbehaviour.answers(at_ms)
    }

    fn look(&mut self, g: &Guest, at_ms: u64, wall_ms: u64) -> VmSample {
        let answers = g.spec.misbehaviour.answers(at_ms);
        let mut events = Vec::new();
        if answers {
            if !std::mem::replace(&mut self.connected, true) {
                events.push(VmEvent::Connected);
            }
            if std::mem::replace(&mut self.boots, g.boots) != g.boots {
                events.push(VmEvent::Reset);
                self.heard = Heard::default();
            }
            let migrates = g.spec.misbehaviour.migrates(at_ms);
            if std::mem::replace(&mut self.migrating, migrates) != migrates {
                events.push(VmEvent::Migration);
            }
            if std::mem::replace(&mut self.paused, g.paused) != g.paused {
                events.push(if g.paused { VmEvent::Stop } else { VmEvent::Resume });
            }
        } else {
            self.connected = false;
        }
        let at = Stamp(wall_ms);
        let guest = answers.then(|| self.see(at)).flatten();
        let guest = guest.map(|g| GuestStats { age_ms: self.heard.age_ms(at, wall_ms), ..g });
        let balloon = BalloonSample {
            actual: g.actual,
            reporting: Some(g.spec.reporting),
            deflate_on_oom: Some(g.spec.deflate_on_oom),
            guest,
            ..BalloonSample::default()
        };
        let run = match (self.migrating, self.paused) {
            (true, _) => RunState::Migrating,
            (_, true) => RunState::Paused,
            _ => RunState::Running,
        };
        let told = self.tell(g, at_ms).or(self.facts);
        self.facts = told.filter(|_| may_stand_still(g));
        let offload = (g.counts.paged_out + g.paging > Bytes::ZERO).then(|| OffloadSample {
            paged_out: g.counts.paged_out,
            busy: g.paging > Bytes::ZERO,
            error: None,
        });
        VmSample {
            id: self.id,
            name: self.name.clone(),
            ram: Some(g.spec.ram),
            process: Some(ProcessMemory {
                anon: g.mapped(),
                swap: g.out,
                own: Some(OwnMemory::default()),
                ..ProcessMemory::default()
            }),
            link: if answers { Link::Up } else { Link::Slow("no answer for 200 ms".into()) },
            run: answers.then_some(run),
            balloon: (answers && g.spec.misbehaviour != Misbehaviour::Bare).then_some(balloon),
            agent: told.map(|told| agent(g, told.facts)),
            tasks: Tasks { offload, ..g.tasks.clone() },
            events,
            pinned: (g.spec.misbehaviour == Misbehaviour::Pinned)
                .then(|| "a VFIO device pins it".into()),
            ..VmSample::default()
        }
    }
}

pub fn name(index: u32) -> String {
    format!("vm{index:04}")
}

fn stats_of(g: &Guest) -> GuestStats {
    let c = &g.counts;
    // QEMU 9.2 and a guest of 6.12 tell more: every third guest is one.
    let new = g.index.is_multiple_of(3);
    GuestStats {
        total: Some(g.actual),
        free: Some(g.free()),
        available: Some(match g.spec.misbehaviour {
            Misbehaviour::Lying => g.actual,
            _ => truly_available(g),
        }),
        caches: Some(g.cache()),
        swap_in: Some(c.swap_in),
        swap_out: Some(c.swap_out),
        major_faults: Some(g.major_faults()),
        minor_faults: Some(c.allocated.0 / PAGE),
        oom_kills: new.then_some(c.kills),
        alloc_stalls: new.then_some(c.alloc_stalls),
        direct_reclaim: new.then_some(c.direct_reclaim),
        ..GuestStats::default()
    }
}

/// Whether its module's facts may be older than the moment.
fn may_stand_still(g: &Guest) -> bool {
    g.spec.late_facts || g.spec.boots || g.spec.paused.1 > 0
}

/// Whether a module tells it, and always of the moment.
fn is_of_the_moment(g: &Guest) -> bool {
    g.spec.agent && !may_stand_still(g)
}

fn facts_of(g: &Guest, wall_ms: u64) -> Facts {
    let c = &g.counts;
    Facts {
        time_ns: wall_ms * 1_000_000,
        total: g.actual.0 / PAGE,
        free: g.free().0 / PAGE,
        available: truly_available(g).0 / PAGE,
        cached: g.cache().0 / PAGE,
        alloc_stall: c.alloc_stalls,
        scan_direct: c.direct_reclaim,
        refault_file: c.refaults,
        refault_anon: c.anon_refaults,
        oom_kill: c.kills,
        major_fault: g.major_faults(),
        swap_in: c.swap_in.0 / PAGE,
        swap_out: c.swap_out.0 / PAGE,
        ..Facts::default()
    }
}

/// The agent reads the map at this very moment.
fn agent(g: &Guest, facts: Facts) -> AgentSample {
    AgentSample {
        facts: Some(facts),
        link: Link::Up,
        state: AgentState::Ready,
        free: Some(g.free()),
        held: Some(g.held()),
        allocated: Some(g.counts.allocated),
        counters: Counters { recycled: g.counts.recycled, ..Counters::default() },
        ..AgentSample::default()
    }
}

/// As the guest's kernel reckons: all cache but a little, missed or not.
fn truly_available(g: &Guest) -> Bytes {
    g.free() + g.cache().share(0.9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::Need;
    use crate::guest::Spec;

    #[test]
    fn facts_stand_still_in_a_paused_guest_and_where_it_is_made_so_in_a_busy_one() {
        let spec = Spec { agent: true, ..Spec::new(Bytes::gib(1), Need::default()) };
        let stands = |change: fn(&mut Guest)| {
            let mut g = Guest::new(0, 1, spec.clone());
            g.switch(0);
            change(&mut g);
            let mut qemu = Qemu::new(0, 7, 2);
            let mut still = |at_ms: u64| {
                g.paused = g.spec.is_paused(at_ms);
                qemu.listen(&g, at_ms, ASKED_EVERY_MS);
                let seen = qemu.sample(&g, at_ms, EPOCH_MS + at_ms);
                let facts = seen.agent.and_then(|a| a.facts).map_or(0, |f| f.time_ns / 1_000_000);
                let paused = seen.run == Some(RunState::Paused);
                assert_eq!(paused, g.paused);
                facts != EPOCH_MS + at_ms
            };
            (1..=1000).filter(|n| still(n * 100)).count()
        };
        assert_eq!(stands(|_| ()), 0);
        assert_eq!(stands(|g| g.spec.paused = (20_000, 30_000)), 100);
        let late = stands(|g| g.spec.late_facts = true);
        assert!((350..650).contains(&late), "{late}: it is busy for half of the time");
        assert_eq!(stands(|g| g.spec.boots = true), 79, "no module in a kernel that boots");
    }

    #[test]
    fn a_guest_is_busy_for_its_part_of_the_time_and_one_that_pushes_never() {
        let busy = |qemu: &mut Qemu| (0..200_000u64).filter(|n| qemu.is_busy(n * 10)).count();
        for one_in in [2, 4, 10, 40] {
            let mut qemu = Qemu::new(0, 7, one_in);
            let share = busy(&mut qemu) as f64 / 200_000.0 * f64::from(one_in);
            assert!((0.8..1.2).contains(&share), "1 in {one_in}: {share:.2} of that");
            qemu.never_busy();
            assert_eq!(busy(&mut qemu), 0);
        }
    }
}
