//! The loop: read, observe, model, decide, give, write down, take, learn, wait.
//!
//! The daemon, the simulator and replay run this very code; only the [`Host`]
//! differs. What a tick saw and did is a [`Tick`], which is also what a record
//! holds.

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::model::{Model, Pressure, Standing, VmModel};
use crate::plan::{Action, MergePlan, MergeWish, Outcome, Plan, Reclaim};
use crate::policy::{Decided, decide};
use crate::sample::{Sample, VmId, VmSample};
use crate::state::{FACTS_LATE_MS, Memory, Owned, VmMemory};
use crate::task::StageName;
use crate::units::{Bytes, Stamp};

/// The world, as the loop needs it: the only seam between core and machine.
pub trait Host {
    /// The monotonic clock.
    fn now(&self) -> Stamp;
    /// Reads everything once. Sources that fail are problems in the sample. Of the
    /// processes in `owed` it tells which are proven to have ended ([`Sample::ended`]).
    fn read(&mut self, owed: &[VmId]) -> Sample;
    /// Writes down what will have been taken, before it is taken. An error
    /// forbids taking: the tick applies gives only.
    fn remember(&mut self, owned: &Owned) -> Result<(), String>;
    /// Whether what was written down last is still there.
    fn remembers(&mut self) -> bool {
        true
    }
    /// Notes with the VMs' manager what each balloon holds without Ebb; `None`: Ebb has taken
    /// nothing. Called each tick. A host whose VMs have no manager ignores it.
    fn note(&mut self, _notes: &[(VmId, Option<Bytes>)]) {}
    /// What the operator asked for since the last tick.
    fn requests(&mut self) -> Vec<Reclaim> {
        Vec::new()
    }
    /// Carries out the actions; one outcome for each, in any order.
    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome>;
    /// Starts agents' orders and [`Plan::orders`]. They run beside the loop, and later samples tell
    /// the result. A host without these ignores it.
    fn start(&mut self, _plan: &Plan) {}
    /// What the operator said of merging since the last tick.
    fn wishes(&mut self) -> Vec<MergeWish> {
        Vec::new()
    }
    /// Steers KSM and has memory scanned, beside the loop; later samples tell the
    /// result. Called each tick. A host without KSM ignores it.
    fn merge(&mut self, _plan: &MergePlan) {}
    /// Waits for the next tick, or for something that cannot wait; `false`: there is no other. At
    /// its time [`Host::read`] need not ask the VMs that rest then; where it comes early, it asks
    /// all.
    fn wait(&mut self, next: &Next) -> bool;
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Next {
    pub at: Stamp,
    /// The VMs that need not be asked at it, sorted: see [`Engine::next`].
    pub resting: Vec<VmId>,
    /// The VMs whose guests need not be asked anew right before it, sorted: their modules tell, or
    /// what they last told QEMU is good enough.
    pub calm: Vec<VmId>,
}

impl Next {
    /// Whether this VM need not be asked.
    pub fn rests(&self, id: VmId) -> bool {
        self.resting.binary_search(&id).is_ok()
    }

    /// Whether this VM's guest is to be asked anew.
    pub fn asks_anew(&self, id: VmId) -> bool {
        !self.rests(id) && self.calm.binary_search(&id).is_err()
    }
}

/// One tick, whole: what a record holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tick {
    /// Counted from the daemon's start.
    pub number: u64,
    pub sample: Sample,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<Reclaim>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wishes: Vec<MergeWish>,
    pub plan: Plan,
    /// The results; empty in a dry run.
    pub outcomes: Vec<Outcome>,
    pub applied: bool,
    /// Why takes were struck from the plan, if they were.
    pub forbidden: Option<String>,
}

/// With many VMs the time between fast ticks, milliseconds a VM: to ask one takes some
/// 0.07 ms of processor time.
const FAST_MS_A_VM: f64 = 2.5;
/// The time between questions to VMs that rest, milliseconds for each VM that there is.
const REST_MS_A_VM: f64 = 10.0;
/// A VM whose need and memory stand still for this time on a clear host is asked less often,
/// milliseconds. An answer costs QEMU more than Ebb.
const QUIET_MS: u64 = 60_000;
/// The time between questions to such a VM, milliseconds.
const QUIET_ASK_MS: u64 = 500;
/// QEMU asks each guest of its own at least once in this time, milliseconds.
const QEMU_ASKS_MS: u64 = 2_000;
/// The share of its RAM by which any guest may grow in a second.
const LEAST_GROWTH: f64 = 0.05;
/// What any guest may grow by in a second at least, where VMs are too many to be asked in each fast
/// tick: programs grow no slower in small guests.
const GROWTH_OF_MANY: Bytes = Bytes::mib(128);

/// A look that took longer than this is too old to take anything by: guests may
/// have touched gigabytes meanwhile.
const LOOK_MOST_MS: u64 = 3_000;

/// How long a request for one VM's memory waits for its agent, and how many wait at most.
const POSTPONED: (u64, usize) = (5_000, 64);

/// Strikes whatever takes from a plan.
fn only_gives(plan: &mut Plan) {
    // What takes an order to shrink back takes nothing.
    plan.actions.retain(|a| a.to >= a.from);
    plan.orders.strike_takes();
    if let Some(merge) = &mut plan.merge {
        merge.vms.clear();
    }
    for stage in &mut plan.stages {
        if matches!(stage.name, StageName::Balloon | StageName::Offload) {
            stage.expected = Default::default();
        }
    }
}

#[derive(Clone, Debug)]
pub struct Engine {
    pub config: Config,
    pub memory: Memory,
    pub dry_run: bool,
    number: u64,
    written: Option<Owned>,
    /// Requests that wait, and since when.
    postponed: Vec<(Stamp, Reclaim)>,
}

impl Engine {
    /// A loop that knows nothing yet.
    pub fn new(config: Config, dry_run: bool) -> Engine {
        let (memory, postponed) = (Memory::default(), Vec::new());
        Engine { config, memory, dry_run, number: 0, written: None, postponed }
    }

    /// Takes over what an earlier daemon had taken, and what it remembered, where that was
    /// handed over.
    pub fn adopt(&mut self, owned: Owned, memory: Option<Memory>) {
        self.memory = memory.unwrap_or_default();
        // Also what a hand-over of another version does not tell.
        self.memory.adopt(&owned);
        self.written = Some(owned);
    }

    pub fn step(&mut self, host: &mut impl Host) -> (Tick, Model) {
        let sample = host.read(&self.memory.owed_ids());
        let (requests, wishes) = (self.due(&sample, host.requests()), host.wishes());
        let (model, mut decided) = self.think(&sample, &requests, &wishes);
        let plan = &mut decided.plan;
        let mut forbidden = None;
        let mut outcomes = Vec::new();
        if !self.dry_run {
            let too_old = |now: Stamp, what| {
                let age_ms = now.since(model.at);
                let why = format!("{what} took {age_ms} ms: too old to take anything by");
                (age_ms > LOOK_MOST_MS).then_some(why)
            };
            forbidden = too_old(host.now(), "the look at host and VMs");
            // Giving waits for no disk.
            if forbidden.is_some() {
                only_gives(plan);
            }
            let gives = plan.actions.partition_point(Action::gives);
            if gives > 0 {
                outcomes = host.apply(&plan.actions[..gives]);
            }
            let owned = self.memory.owned(&model, plan, &outcomes);
            host.note(&self.memory.notes(&owned.vms));
            if self.written.as_ref() != Some(&owned) || !host.remembers() {
                match host.remember(&owned) {
                    Ok(()) => self.written = Some(owned),
                    Err(why) => forbidden = Some(why),
                }
                // A disk may have been slow.
                forbidden = forbidden
                    .or_else(|| too_old(host.now(), "the look, and writing the state file,"));
            }
            if forbidden.is_some() {
                only_gives(plan);
            }
            if plan.actions.len() > gives {
                outcomes.extend(host.apply(&plan.actions[gives..]));
            }
            host.start(plan);
            plan.merge.iter().for_each(|merge| host.merge(merge));
        }
        let applied = !self.dry_run;
        self.memory.learn(&model, &decided, &outcomes, applied);
        self.number += 1;
        let (number, plan) = (self.number, decided.plan);
        (Tick { number, sample, requests, wishes, plan, outcomes, applied, forbidden }, model)
    }

    /// Replays a recorded tick: the same sample and outcomes, a fresh decision.
    pub fn replay(&mut self, recorded: &Tick) -> (Tick, Model) {
        let (model, mut decided) =
            self.think(&recorded.sample, &recorded.requests, &recorded.wishes);
        if recorded.forbidden.is_some() {
            only_gives(&mut decided.plan);
        }
        self.dry_run = !recorded.applied;
        self.number = recorded.number.max(1);
        self.memory.learn(&model, &decided, &recorded.outcomes, recorded.applied);
        (Tick { number: self.number, plan: decided.plan, ..recorded.clone() }, model)
    }

    /// The requests that are for this tick. One for a VM whose agent is at work, or may not work
    /// while the balloon grows, waits for the end of that.
    fn due(&mut self, sample: &Sample, new: Vec<Reclaim>) -> Vec<Reclaim> {
        let at = sample.at;
        let works = |vm: &VmSample| {
            let agent = vm.agent.as_ref().filter(|a| a.is_ready() && !a.observes);
            let size = vm.balloon.as_ref().map(|b| b.actual);
            agent.is_some_and(|a| a.busy || self.memory.of(vm.id).inflates(at, size))
        };
        let waits = |(since, request): &(Stamp, Reclaim)| {
            let its = |vm: &&VmSample| request.vm.is_some() && request.means(&vm.name);
            at.since(*since) < POSTPONED.0 && sample.vms.iter().filter(its).any(works)
        };
        let all = self.postponed.iter().cloned().chain(new.into_iter().map(|r| (at, r)));
        let (mut later, mut now) = (Vec::<(Stamp, Reclaim)>::new(), Vec::new());
        for asked in all {
            if !waits(&asked) {
                now.push(asked.1);
            } else if let Some(before) = later.iter_mut().find(|(_, its)| *its == asked.1) {
                before.0 = asked.0;
            } else {
                later.push(asked);
            }
        }
        // A request beyond what may wait is decided now, though its agent cannot serve it.
        let most = later.len().min(POSTPONED.1);
        now.extend(later.split_off(most).into_iter().map(|(_, request)| request));
        self.postponed = later;
        now
    }

    fn think(
        &mut self,
        sample: &Sample,
        requests: &[Reclaim],
        wishes: &[MergeWish],
    ) -> (Model, Decided) {
        self.memory.observe(sample);
        self.memory.wish(wishes);
        let model = Model::new(&self.config, sample, &self.memory);
        let decided = decide(&model, &self.memory, requests);
        (model, decided)
    }

    /// When the next tick is due (sooner while anything is ballooned or short), and which VMs need
    /// not be asked in it: those that were asked lately, do not change, and cannot be short before
    /// they are asked again.
    pub fn next(&self, model: &Model) -> Next {
        let busy = model.host.shown.state > Pressure::Clear
            || !self.postponed.is_empty()
            || model.vms.iter().any(|v| {
                v.owed.0 > 0 && !matches!(v.standing, Standing::Off(_)) || !v.distress.is_empty()
            })
            || self.fills_up(model);
        if !busy {
            let at = model.at.plus(self.config.tick_ms);
            return Next { at, ..Next::default() };
        }
        let many = |ms_a_vm| (model.vms.len() as f64 * ms_a_vm) as u64;
        let (fast_ms, tick_ms) = (self.config.fast_tick_ms, self.config.tick_ms);
        let wait_ms = fast_ms.max(many(FAST_MS_A_VM)).min(tick_ms);
        let rest_ms = many(REST_MS_A_VM).min(tick_ms);
        let at = model.at.plus(wait_ms);
        let is_clear = model.host.shown.state == Pressure::Clear;
        // What is paged out of a VM depends on what it holds now.
        let pages_out =
            self.memory.beyond_since.is_some() && model.host.shown.state >= Pressure::Hard;
        let least = if wait_ms > fast_ms { GROWTH_OF_MANY } else { Bytes::ZERO };
        let at_rest = |vm: &VmModel, within_ms| {
            let memory = self.memory.vm(vm.id).filter(|_| !pages_out);
            memory.filter(|m| is_at_rest(vm, m, (within_ms, least)))
        };
        let is_quiet = |vm: &VmModel| {
            let since = self.memory.of(vm.id).cold.since;
            is_clear && model.at.since(since) >= QUIET_MS
        };
        let quiet_ms = QUIET_ASK_MS.min(tick_ms);
        // A VM that rests at this tick is asked at the one after it, or later: until when it rests,
        // and for how many milliseconds in all.
        let rest_of = |vm: &VmModel| {
            let ms = if is_quiet(vm) { rest_ms.max(quiet_ms) } else { rest_ms };
            let until = at_rest(vm, ms.min(wait_ms.saturating_mul(2)))?.size_seen_at?.plus(ms);
            (until > at).then_some((until, ms))
        };
        // Only where there are too many to ask all of them in time.
        let spares = wait_ms > fast_ms && is_clear;
        // Facts that stand still may be those of a guest that is short.
        let by_module =
            |vm: &VmModel| vm.guest.is_some_and(|g| g.by_module && g.age_ms <= FACTS_LATE_MS);
        let calm = |vm: &&VmModel| {
            by_module(vm) || spares && at_rest(vm, rest_ms + QEMU_ASKS_MS).is_some()
        };
        let rests: Vec<_> = model.vms.iter().map(|vm| (vm, rest_of(vm))).collect();
        // If all VMs rest at this tick, it is left out: the next one is when the first VM is due.
        let later = || {
            let asked = || rests.iter().filter(|(vm, _)| !matches!(vm.standing, Standing::Off(_)));
            let untils: Option<Vec<Stamp>> =
                asked().map(|(_, rest)| Some(rest.as_ref()?.0)).collect();
            // Before an ordinary tick guests are not asked anew.
            let first = untils?.into_iter().min()?.min(model.at.plus(tick_ms - 1));
            // A VM that rests at that tick is asked at the one after it, or later.
            let within_ms = first.since(model.at) + wait_ms;
            let all_rest = asked().all(|(vm, _)| at_rest(vm, within_ms).is_some());
            (first > at && all_rest).then_some(first)
        };
        let may_wait = is_clear && self.postponed.is_empty();
        let later = may_wait.then(later).flatten().filter(|_| !self.fills_up(model));
        let at = later.unwrap_or(at);
        let rests_on = |(vm, rest): (&VmModel, Option<(Stamp, u64)>)| {
            let (until, ms) = rest?;
            // VMs that are due soon after that tick are asked in it: so fewer ticks ask all of them.
            let soon = if later.is_some() { ms / 2 } else { 0 };
            (until > at.plus(soon)).then_some(vm.id)
        };
        Next {
            at,
            resting: rests.iter().copied().filter_map(rests_on).collect(),
            calm: model.vms.iter().filter(calm).map(|vm| vm.id).collect(),
        }
    }

    /// Whether guests may take what a limit has beyond its reserve before an ordinary tick.
    fn fills_up(&self, model: &Model) -> bool {
        let seconds = self.config.tick_ms as f64 / 1000.0;
        let grows = |vm: &VmModel| {
            let left = vm.actual? - vm.guest_held()?;
            Some(growth(vm, self.memory.vm(vm.id)?).share(seconds).min(left))
        };
        model.host.limits.iter().any(|limit| {
            let below = model.vms.iter().filter(|vm| vm.is_below(limit));
            let grown: Bytes = below.filter_map(grows).sum();
            limit.headroom < limit.reserve + grown
        })
    }
}

/// How fast any guest may grow at most, as far as is known.
fn growth(vm: &VmModel, m: &VmMemory) -> Bytes {
    let seen = m.fastest.rate(m.stats.map_or(Stamp(0), |s| s.0));
    seen.max(vm.ram.unwrap_or_default().share(LEAST_GROWTH))
}

/// Whether nothing of a VM moves, and its guest cannot be short within this time, by statistics
/// that may be old already, if it grows by `least` a second or more.
fn is_at_rest(vm: &VmModel, m: &VmMemory, (within_ms, least): (u64, Bytes)) -> bool {
    // Its agent is asked in each tick.
    let moves = vm.agent.is_some()
        || vm.hands_off.is_some()
        || m.order.is_some()
        || m.reboot.is_some()
        || m.ledger.suspect
        || !vm.distress.is_empty()
        || !vm.unseen.is_empty();
    if moves {
        return false;
    }
    // One that has all it may have cannot be given more.
    vm.owed == Bytes::ZERO
        || vm.guest.is_some_and(|g| {
            let since_ms = g.age_ms + within_ms;
            g.available - g.short_mark > growth(vm, m).max(least).share(since_ms as f64 / 1000.0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{GuestModel, HostModel, Limit};
    use crate::plan::Reason;
    use crate::state::VmMemory;
    use crate::units::Bytes;

    fn id(pid: u32) -> VmId {
        VmId { pid, start: 1 }
    }

    /// A VM of 1 GiB that is owed 100 MiB.
    fn vm(pid: u32, guest: GuestModel) -> VmModel {
        let (ram, owed) = (Some(Bytes::gib(1)), Bytes::mib(100));
        VmModel { id: id(pid), ram, owed, guest: Some(guest), ..VmModel::default() }
    }

    /// QEMU told its size then.
    fn asked(pid: u32, at: u64) -> VmMemory {
        VmMemory { id: id(pid), size_seen_at: Some(Stamp(at)), ..VmMemory::default() }
    }

    fn engine(vms: Vec<VmMemory>) -> Engine {
        let mut engine = Engine::new(Config::default(), false);
        engine.memory.vms = vms;
        engine
    }

    fn host(state: Pressure) -> HostModel {
        let shown = Limit { state, ..Limit::default() };
        HostModel { shown, ..HostModel::default() }
    }

    fn limited(headroom: u64, reserve: u64) -> HostModel {
        let (headroom, reserve) = (Bytes::mib(headroom), Bytes::mib(reserve));
        let limit = Limit { name: "host".into(), headroom, reserve, ..Limit::default() };
        HostModel { limits: vec![limit], ..HostModel::default() }
    }

    #[test]
    fn a_host_that_guests_may_fill_before_an_ordinary_tick_is_looked_at_sooner() {
        let engine = engine(vec![VmMemory { id: id(1), ..VmMemory::default() }]);
        let wait = |headroom| {
            let (ram, resident) = (Some(Bytes::gib(10)), Some(Bytes::gib(9)));
            let vm = VmModel { id: id(1), ram, actual: ram, resident, ..VmModel::default() };
            let model = Model { host: limited(headroom, 500), vms: vec![vm], ..Model::default() };
            engine.next(&model).at.0
        };
        // A twentieth of its RAM a second.
        assert_eq!(wait(500 + 520), engine.config.tick_ms);
        assert_eq!(wait(500 + 500), engine.config.fast_tick_ms);
    }

    #[test]
    fn no_vm_rests_while_the_host_pages_out() {
        let mut engine = engine(vec![asked(1, 1000)]);
        // With 100 VMs one at rest is asked once a second.
        let vms = (1..=100).map(|pid| VmModel { id: id(pid), ..VmModel::default() }).collect();
        let host = host(Pressure::Hard);
        let model = Model { at: Stamp(1000), host, vms, ..Model::default() };
        assert_eq!(engine.next(&model).resting, [id(1)]);
        engine.memory.beyond_since = Some(Stamp(900));
        assert_eq!(engine.next(&model).resting, []);
    }

    #[test]
    fn one_far_from_short_is_asked_less_and_its_guest_not_at_all() {
        let next = |asked_at, spare: u64, age_ms| {
            let (available, short_mark) = (Bytes::mib(40 + spare), Bytes::mib(40));
            let g = GuestModel { available, short_mark, age_ms, ..GuestModel::default() };
            let vms = (1..=100).map(|pid| vm(pid, g)).collect();
            let model = Model { at: Stamp(3000), vms, ..Model::default() };
            let next = engine(vec![asked(1, asked_at)]).next(&model);
            assert_eq!(next.at, Stamp(3250), "2.5 ms a VM");
            (next.rests(id(1)), next.asks_anew(id(1)))
        };
        // Of a hundred guests each may grow by 128 MiB a second.
        assert_eq!(next(2500, 140, 500), (true, false), "not short for two ticks");
        assert_eq!(next(2500, 90, 500), (false, true), "it may be short before the second");
        assert_eq!(next(2500, 140, 1000), (false, true), "its statistics are old");
        assert_eq!(next(2000, 140, 500), (false, true), "a second after it was asked");
        assert_eq!(next(2000, 460, 500), (false, false), "far from short: QEMU asks its guest");
    }

    #[test]
    fn one_that_has_been_quiet_for_a_minute_is_asked_twice_a_second() {
        let (clear, soft) = (Pressure::Clear, Pressure::Soft);
        // Time until the next tick, and whether the first of `vms` VMs rests at it. That VM was
        // asked `asked_ago` ms ago, the others were never asked.
        let next = |vms: u32, state, asked_ago, available| {
            let g = GuestModel { available: Bytes::mib(available), ..GuestModel::default() };
            let vms = (1..=vms).map(|pid| vm(pid, g)).collect();
            let model = Model { at: Stamp(QUIET_MS), host: host(state), vms, ..Model::default() };
            let next = engine(vec![asked(1, QUIET_MS - asked_ago)]).next(&model);
            (next.at.since(Stamp(QUIET_MS)), next.rests(id(1)))
        };
        assert_eq!(next(2, clear, 390, 100), (100, true));
        assert_eq!(next(2, clear, 410, 100), (100, false), "the next tick is 0.5 s after it was");
        assert_eq!(next(2, clear, 90, 9), (100, false), "in 0.2 s it may grow by 10 MiB");
        assert_eq!(next(2, soft, 90, 100), (100, false));
        assert_eq!(next(20, soft, 90, 20), (100, true), "of twenty one waits for 200 ms anyway");
        // Where there is no other, there is no tick before it is asked.
        assert_eq!(next(1, clear, 0, 100), (500, false));
        assert_eq!(next(1, clear, 390, 100), (110, false));
        assert_eq!(next(1, clear, 0, 11), (100, true), "in 0.5 s it may grow by 25 MiB");
        assert_eq!(next(1, soft, 0, 100), (100, false));
    }

    #[test]
    fn of_vms_that_rest_all_are_asked_in_the_tick_of_the_first() {
        let next = |asked_ago: [u64; 3], headroom| {
            let g = GuestModel { available: Bytes::gib(1), ..GuestModel::default() };
            let (actual, resident) = (Some(Bytes::gib(1)), Some(Bytes::mib(500)));
            let one = |pid| VmModel { actual, resident, ..vm(pid, g) };
            let (host, vms) = (limited(headroom, 0), (1..=3).map(one).collect());
            let was = asked_ago.into_iter().zip(1..).map(|(ago, pid)| asked(pid, QUIET_MS - ago));
            let model = Model { at: Stamp(QUIET_MS), host, vms, ..Model::default() };
            let next = engine(was.collect()).next(&model);
            (next.at.since(Stamp(QUIET_MS)), next.resting)
        };
        assert_eq!(next([300, 200, 0], 1_000), (200, vec![id(3)]));
        assert_eq!(next([300, 200, 100], 1_000), (200, vec![]));
        assert_eq!(next([300, 200, 0], 100), (100, vec![id(1), id(2), id(3)]), "they may fill it");
    }

    #[test]
    fn a_guest_whose_module_tells_is_not_asked_out_of_turn() {
        let asks = |by_module, age_ms| {
            let vm = vm(1, GuestModel { by_module, age_ms, ..GuestModel::default() });
            let model = Model { at: Stamp(3000), vms: vec![vm], ..Model::default() };
            let next = engine(vec![]).next(&model);
            assert!(!next.rests(id(1)), "it is looked at all the same");
            next.asks_anew(id(1))
        };
        assert!(asks(false, 0) && !asks(true, 600));
        assert!(asks(true, 1_100), "it tells nothing new");
    }

    #[test]
    fn one_whose_word_is_old_may_be_short_already() {
        let rests = |age_ms| {
            let (available, short_mark) = (Bytes::mib(200), Bytes::mib(40));
            let g = GuestModel { available, short_mark, age_ms, ..GuestModel::default() };
            is_at_rest(&vm(1, g), &VmMemory::default(), (1_000, Bytes::ZERO))
        };
        // A twentieth of its RAM a second.
        assert!(rests(0) && rests(2_000) && !rests(2_500));
    }

    #[test]
    fn an_order_that_is_taken_back_takes_nothing() {
        let action = |to, reason| Action {
            vm: id(1),
            name: "a".into(),
            from: Bytes::mib(700),
            to: Bytes::mib(to),
            reason,
        };
        let back = [action(700, Reason::Withdrawn), action(700, Reason::HandsOff)];
        let taken = action(600, Reason::AboveCeiling);
        let actions = [back.to_vec(), vec![taken]].concat();
        let mut plan = Plan { actions, ..Plan::default() };
        only_gives(&mut plan);
        assert_eq!(plan.actions, back);
    }
}
