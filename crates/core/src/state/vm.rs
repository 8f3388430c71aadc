//! What is remembered of one VM, and how it learns from what it sees.
//!
//! [`VmMemory::observe`] takes in a tick's facts before they are judged: orders
//! that move or do not, reboots, rates, peaks of need, contradictions, what came
//! back to the host. What was decided is taken in by [`super::Memory::learn`].

use serde::{Deserialize, Serialize};

use super::{Cold, Fastest, Ledger, Move, Reach, Recent, RecycleMemory, Sizes, Yields, ZeroMemory};
use crate::model::guest::{bounded, implausible};
use crate::model::{Convergence, Progress, STALE_MS, VmModel};
use crate::plan::{Action, Reason};
use crate::policy::merge::VmMerge;
use crate::sample::{AgentSample, GuestStats, Link, RunState, VmEvent, VmId, VmSample};
use crate::units::{Bytes, PAGE, Stamp};
use crate::wire::AgentState;

/// After a reset or first sight a guest is left alone for so long: its numbers
/// are those of a booting kernel.
pub const SETTLE_MS: u64 = 20_000;
/// An order to shrink that moved nothing for so long makes the guest “stuck”.
pub const STUCK_AFTER_MS: u64 = 10_000;
/// A stuck guest is asked again after this, doubling up to [`STUCK_MOST_MS`].
pub const STUCK_FIRST_MS: u64 = 30_000;
/// The longest pause for a guest that never follows.
pub const STUCK_MOST_MS: u64 = 600_000;
/// An order that moved nothing for so long is shown as stuck, and what is left of
/// it is asked of others.
pub const STILL_MS: u64 = 5_000;
/// Slower than this a guest is “slow”, bytes a second.
pub const SLOW_RATE: f64 = (32 << 20) as f64;
/// A tick that is later than this counts as so long where a guest is waited for:
/// it was not looked at meanwhile.
pub(super) const LOOK_MS: u64 = 2_000;
/// What has been given and not touched counts as gone for so long.
const GIFT_LIFE_MS: u64 = 10_000;
/// A guest that is short so soon after it was asked was asked too much.
pub const HARM_MS: u64 = 10_000;
/// One harm is forgotten, or one contradiction, in so long.
const FORGIVE_MS: u64 = 60_000;
/// A contradiction that has not come again for so long is over.
const DOUBT_MS: u64 = 10_000;
/// What a guest reads again in so many seconds belongs to its working set.
const HOT_S: f64 = 10.0;
/// Facts that stand still for so long are those of a guest that does not run.
const FACTS_LIFE_MS: u64 = 3_000;
/// A VM that has run for less than this has just started.
const YOUNG_MS: u64 = 60_000;
/// A VM has settled when its residency grows by less than [`SETTLED_GROWTH`] of
/// RAM in this time, or after [`START_MOST_MS`].
const START_LOOK_MS: u64 = 10_000;
/// See [`START_LOOK_MS`].
const SETTLED_GROWTH: f64 = 0.02;
/// See [`START_LOOK_MS`].
const START_MOST_MS: u64 = 180_000;
/// A guest with less available than this share of RAM may have deflated its balloon itself.
const LOW_SHARE: f64 = 0.12;
/// A guest that resets so often in so long is given no more than it had.
const RESETS: (u32, u64) = (3, 600_000);
/// So long after a balloon moved by surprise its guest's word may be from before.
const STRAY_MS: u64 = 3_000;
/// A balloon that grew so long ago has been dealt with by QEMU.
const INFLATE_ECHO_MS: u64 = 2_000;
/// The same numbers are the same answer unless they are so much younger: QEMU tells
/// their moment in whole seconds, and a look takes some time.
const AGAIN_MS: u64 = 100;
/// Rates older than this say nothing of now.
const RATE_LIFE_MS: u64 = 5_000;
/// See [`VmMemory::own`].
const OWN_LIFE_MS: f64 = 600_000.0;
/// Harms that are remembered.
const HARM_MOST: u32 = 4;
/// Steps are doubled at most so often.
const PACE_MOST: u32 = 2;

/// What is remembered of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmMemory {
    /// Which.
    pub id: VmId,
    /// Its name when last seen.
    pub name: String,
    /// The QMP socket over which it was heard last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// Whose its balloon is.
    #[serde(default)]
    pub ledger: Ledger,
    /// The last order, until it is fulfilled or overtaken.
    pub order: Option<Order>,
    /// When it was last made smaller.
    pub last_take: Option<Stamp>,
    /// When it was last made larger.
    pub last_give: Option<Stamp>,
    /// Left alone until then.
    pub settle_until: Option<Stamp>,
    /// Not asked until then, because it did not follow.
    pub stuck_until: Option<Stamp>,
    /// How often in a row it did not follow.
    pub stuck_count: u32,
    /// When its balloon last shrank without an order: the guest was out of memory
    /// and its driver deflated it (`deflate-on-oom`).
    #[serde(default, alias = "helped_itself", skip_serializing_if = "Option::is_none")]
    pub deflated_on_oom: Option<Stamp>,
    /// It rebooted while it was ballooned and is not where its new kernel may start yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reboot: Option<Reboot>,
    /// Resets, each within ten minutes of the one before, and when the last was.
    #[serde(default)]
    pub resets: u32,
    /// See `resets`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_at: Option<Stamp>,
    /// Its last statistics that differed from those before, when they came, and
    /// the size that goes with them.
    pub stats: Option<(Stamp, Bytes, GuestStats)>,
    /// Rates from the last two statistics.
    pub rates: Option<GuestRates>,
    /// What the guest needed lately: its working set by how long ago it was so large.
    #[serde(default)]
    pub recent: Recent,
    /// What its guest may need beyond [`VmMemory::need`]: its balloon moved while it spoke, so
    /// its size at that moment is not known.
    #[serde(default)]
    pub unsure: Bytes,
    /// The sizes it had lately.
    #[serde(default)]
    pub sizes: Sizes,
    /// What the host holds for its VMM itself, at least: what is resident beyond the
    /// guest's size cannot be the guest's. Forgotten over ten minutes.
    #[serde(default)]
    pub own: Bytes,
    /// When its balloon last moved without an order of Ebb.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strayed: Option<Stamp>,
    /// When its balloon was last seen to grow, whoever ordered that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shrunk: Option<Stamp>,
    /// What the recycler remembers.
    #[serde(default)]
    pub recycle: RecycleMemory,
    /// What merging remembers.
    #[serde(default)]
    pub merge: VmMerge,
    /// What is remembered of freeing zero pages.
    #[serde(default)]
    pub zeros: ZeroMemory,
    /// What the balloon had taken when partially mapped huge pages were last ordered to be split.
    #[serde(default, alias = "torn")]
    pub partial_thp: Bytes,
    /// Size and residency a tick ago.
    pub seen: Option<Seen>,
    /// What came back to the host, since Ebb first saw the VM.
    pub returned: Returned,
    /// It has just started and still takes what it was promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// The facts of the guest's module, and when they last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<(Stamp, u64)>,
    /// Cache that it reads again and again.
    #[serde(default)]
    pub hot: Hot,
    /// What in its word contradicts what is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<Doubt>,
    /// How often lately it was short soon after it had been asked, and when.
    #[serde(default)]
    pub harm: u32,
    /// See `harm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harm_at: Option<Stamp>,
    /// What was given last: it may be touched any moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gift: Option<Gift>,
    /// When an operator last asked for its idle memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<Stamp>,
    /// How well it can be heard.
    #[serde(default)]
    pub reach: Reach,
    /// Whether its balloon brings the host anything.
    #[serde(default)]
    pub yields: Yields,
    /// Since when it is quiet.
    #[serde(default)]
    pub cold: Cold,
    /// How fast it follows, bytes a second, averaged over two seconds.
    #[serde(default)]
    pub rate: f64,
    /// How often in a row it followed at once: its steps are doubled so often.
    #[serde(default)]
    pub pace: u32,
    /// When QEMU last told its size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Stamp>,
    /// How fast its need can grow.
    #[serde(default)]
    pub fastest: Fastest,
}

/// A VM that has just started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// First seen.
    pub since: Stamp,
    /// When `resident` was looked at.
    pub at: Stamp,
    /// Residency then.
    pub resident: Bytes,
}

/// Cache that belongs to the working set: the volume of refaults in ten seconds,
/// sinking over a minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hot {
    /// Brought up to date.
    pub at: Stamp,
    /// So much.
    pub bytes: Bytes,
}

/// A contradiction in what a guest says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Doubt {
    /// When it was last found.
    pub at: Stamp,
    /// In so many looks.
    pub times: u32,
    /// What.
    pub what: String,
}

/// Memory given to a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gift {
    /// When.
    pub at: Stamp,
    /// How much.
    pub bytes: Bytes,
}

/// How far a reboot is dealt with. QEMU goes on showing the size from before a
/// reset until the new driver writes it, and a driver that is where it is told to
/// be writes nothing: so once the guest speaks it is moved by one MiB and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reboot {
    /// When the reset was heard of, seconds since 1970: older statistics are the
    /// old kernel's.
    pub wall_s: u64,
    /// The moment of the old kernel's last statistics, by the same clock.
    #[serde(default)]
    pub updated_s: u64,
    /// The size that it was given for its new kernel, and when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Bytes>,
    /// See `to`.
    pub given: Option<Stamp>,
    /// When it was moved by one MiB.
    pub nudged: Option<Stamp>,
    /// The new kernel's driver has sent statistics.
    pub speaks: bool,
}

/// An order to a balloon that is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The size ordered.
    pub to: Bytes,
    /// The size when it last moved.
    pub moved_from: Bytes,
    /// When it last moved (or was given).
    pub moved_at: Stamp,
    /// For so long, as far as it was looked at, it has not moved, milliseconds.
    #[serde(default)]
    pub still_ms: u64,
    /// When the first of the orders in this direction was given.
    #[serde(default)]
    pub since: Stamp,
}

/// How fast a guest's counters move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestRates {
    /// When the later of the two statistics came.
    pub at: Stamp,
    /// Major faults a second.
    pub major_faults: f64,
    /// Swapped in, bytes a second.
    pub swap_in: f64,
    /// Allocation stalls a second, where known.
    pub alloc_stalls: f64,
    /// OOM kills between the two.
    pub oom_kills: u64,
    /// Pages a second that were dropped and read again; where only major faults
    /// are known, eight pages for each (readahead brings 32 KiB or more).
    #[serde(default)]
    pub refaults: f64,
    /// Pages a second looked at by direct reclaim.
    #[serde(default)]
    pub direct_reclaim: f64,
    /// Change of its need (size less available), bytes a second. Unlike the change
    /// of available memory this is not moved by the balloon itself.
    pub need: f64,
}

/// Size and residency at a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Balloon size (RAM less balloon).
    pub actual: Option<Bytes>,
    /// Resident.
    pub resident: Bytes,
    /// In swap.
    pub swap: Bytes,
    /// Recycled by the agent so far.
    #[serde(default)]
    pub recycled: Bytes,
}

/// Bytes that left a VM's residency, by what took them. A lower bound: growth in
/// the same tick hides a release. The host's own free memory is the proof, these
/// only divide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returned {
    /// The balloon was inflated meanwhile.
    pub balloon: Bytes,
    /// Went to swap.
    pub swap: Bytes,
    /// Zero pages that were freed on order.
    #[serde(default)]
    pub zeros: Bytes,
    /// The agent recycled it, page by page, as it counts itself.
    #[serde(default)]
    pub recycled: Bytes,
    /// Neither, and the guest has free page reporting.
    pub reporting: Bytes,
    /// Neither, and it has not (the VMM itself shrank, KSM, another tool).
    pub other: Bytes,
    /// The reverse: deflated for the guest to use again.
    pub given_back: Bytes,
}

impl VmMemory {
    pub(super) fn observe(
        &mut self,
        at: Stamp,
        (dt_ms, first): (u64, bool),
        wall_s: u64,
        vm: &VmSample,
    ) {
        // What QEMU said in an earlier tick tells of no move.
        let actual = vm.balloon.as_ref().filter(|b| b.age_ms == 0).map(|b| b.actual);
        if actual.is_some() {
            self.asked = Some(at);
        }
        if vm.socket.is_some() {
            self.socket.clone_from(&vm.socket);
        }
        self.follow_start(at, first, vm);
        self.follow_facts(at, vm);
        let reset = vm.events.contains(&VmEvent::Reset);
        if reset {
            self.forget_guest(at, wall_s);
        }
        self.follow_reboot(at, wall_s, vm);
        self.follow_balloon(at, vm, actual);
        self.listen(at, dt_ms, vm);
        if let (Some(actual), Some(stats)) = (actual, self.words(at, vm)) {
            self.take_stats(at, wall_s, actual, stats);
            if let Some(need) = self.need() {
                self.recent.see(at, need);
            }
            self.weigh_word(at, vm, &stats);
        }
        if let Some(p) = vm.process {
            let need = self.need().unwrap_or_default();
            let paged = vm.offload.as_ref().map_or((Bytes::ZERO, false), |o| (o.paged_out, o.busy));
            let seen = (need, p.resident() + p.swap, p.swap);
            self.cold.observe(at, vm.ram.unwrap_or_default(), seen, paged);
        }
        if self.harm > 0 && self.harm_at.is_none_or(|t| at.since(t) >= FORGIVE_MS) {
            (self.harm, self.harm_at) = (self.harm - 1, Some(at));
        }
        if let (Some(agent), Some(p)) = (vm.agent.as_ref(), vm.process) {
            self.recycle.observe(at, agent, p.resident());
        }
        self.follow_order(at, dt_ms, actual);
        self.account(at, dt_ms, vm, actual);
    }

    /// Whether Ebb has changed something of it that is to be put back: its size, or whether
    /// KSM may merge its pages.
    pub fn is_owed(&self) -> bool {
        self.ledger.owes() || self.merge.was.is_some()
    }

    /// Takes in an order that QEMU took, or may take when it answers again.
    pub(super) fn learn(&mut self, at: Stamp, ram: Option<Bytes>, action: &Action, answered: bool) {
        if let Some(ram) = ram {
            self.ledger.order(ram, action.to, answered);
        }
        let same = |o: &Order| (o.to > action.from) == action.gives();
        let given = action.to - self.order.filter(same).map_or(action.from, |o| o.to);
        let since = self.order.filter(same).map_or(at, |o| o.since);
        let still_ms = self.order.filter(same).map_or(0, |o| o.still_ms);
        let order = Order { to: action.to, moved_from: action.from, moved_at: at, still_ms, since };
        if self.order.is_none_or(|o| !same(&o)) {
            self.rate = 0.0;
        }
        self.order = Some(order);
        match action.reason {
            // Neither gives nor takes: the guest keeps the size it has.
            Reason::Withdrawn => {
                self.order = None;
                self.stuck_count = (self.stuck_count + 1).min(16);
                let pause = STUCK_FIRST_MS << (self.stuck_count - 1).min(8);
                self.stuck_until = Some(at.plus(pause.min(STUCK_MOST_MS)));
            }
            Reason::HandsOff | Reason::Needed => self.order = None,
            // What was taken went with the old kernel.
            Reason::Rebooted => {
                if let Some(r) = self.reboot.as_mut() {
                    (r.given, r.to) = (Some(at), Some(action.to));
                }
                self.last_take = None;
                self.last_give = Some(at);
            }
            Reason::Refresh => {
                if let Some(r) = self.reboot.as_mut() {
                    r.nudged = Some(at);
                }
            }
            _ if action.gives() => self.learn_gift(at, action, given),
            _ => {
                if action.reason == Reason::Requested {
                    self.requested = Some(at);
                }
                self.last_take = Some(at);
            }
        }
    }

    fn learn_gift(&mut self, at: Stamp, action: &Action, given: Bytes) {
        let live = self.gift.filter(|g| at.since(g.at) < GIFT_LIFE_MS);
        let before = live.map_or(Bytes::ZERO, |g| g.bytes);
        self.gift = Some(Gift { at, bytes: before + given });
        let taken = self.last_take.filter(|t| at.since(*t) < HARM_MS);
        if matches!(action.reason, Reason::GuestShort { .. }) && taken > self.harm_at {
            self.harm = (self.harm + 1).min(HARM_MOST);
            self.harm_at = Some(at);
            self.pace = 0;
        }
        self.last_give = Some(at);
    }

    /// The guest rebooted: nothing known of it holds any more.
    fn forget_guest(&mut self, at: Stamp, wall_s: u64) {
        self.resets = match self.reset_at.replace(at) {
            Some(was) if at.since(was) < RESETS.1 => (self.resets + 1).min(16),
            _ => 1,
        };
        if self.ledger.owes() || self.order.is_some() || self.reboot.is_some() {
            let updated_s = self.stats.map_or(0, |(.., s)| s.updated_s);
            self.reboot = Some(Reboot { wall_s, updated_s, ..Reboot::default() });
        }
        self.settle_until = Some(at.plus(SETTLE_MS));
        (self.stats, self.unsure) = (None, Bytes::ZERO);
        self.rates = None;
        self.order = None;
        self.deflated_on_oom = None;
        self.recent = Recent::default();
        self.stuck_until = None;
        self.stuck_count = 0;
        self.facts = None;
        self.sizes = Sizes::default();
        self.reach.forget_guest();
        self.doubt = None;
        self.hot = Hot::default();
        (self.rate, self.pace) = (0.0, 0);
    }

    /// Whose moves its balloon makes.
    fn follow_balloon(&mut self, at: Stamp, vm: &VmSample, actual: Option<Bytes>) {
        let (Some(ram), Some(actual)) = (vm.ram, actual) else { return };
        if self.seen.and_then(|s| s.actual).is_some_and(|was| actual < was) {
            self.shrunk = Some(at);
        }
        self.sizes.see(at, actual);
        let plugged = self.ledger.seen.is_some_and(|(was, _)| was != ram);
        let boots = self.reboot.is_some() || self.settle_until.is_some_and(|t| t > at);
        let deflates = vm.balloon.as_ref().and_then(|b| b.deflate_on_oom) == Some(true);
        let moved = self.ledger.observe(at, (ram, actual), deflates, boots);
        if moved != Move::Own || self.ledger.suspect {
            self.strayed = Some(at);
        }
        match moved {
            Move::Own if plugged => self.order = None,
            Move::Own => {}
            Move::Foreign => self.order = None,
            // A guest that has enough did not do that: somebody raised its size.
            Move::Shrank => {
                self.order = None;
                let low = ram.share(LOW_SHARE).max(Bytes::mib(32));
                match self.words(at, vm).and_then(|s| s.available).is_some_and(|a| a > low) {
                    true => self.ledger.foreign = Some(at),
                    false => self.deflated_on_oom = Some(at),
                }
            }
        }
    }

    /// Whether it still takes what it was promised at its start.
    fn follow_start(&mut self, at: Stamp, first: bool, vm: &VmSample) {
        let Some(p) = vm.process else { return };
        let resident = p.resident() + p.swap;
        if first && vm.age_ms.is_none_or(|age| age < YOUNG_MS) {
            self.start = Some(Start { since: at, at, resident });
        }
        let Some(s) = self.start.as_mut() else { return };
        if at.since(s.at) < START_LOOK_MS {
            return;
        }
        let calm = resident - s.resident <= vm.ram.unwrap_or_default().share(SETTLED_GROWTH);
        (s.at, s.resident) = (at, resident);
        if calm || at.since(s.since) >= START_MOST_MS {
            self.start = None;
        }
    }

    /// Whether it can be heard. One that is paused, being migrated or booting says
    /// nothing for a reason.
    fn listen(&mut self, at: Stamp, dt_ms: u64, vm: &VmSample) {
        let boots = self.reboot.is_some() || self.settle_until.is_some_and(|t| t > at);
        if boots || !matches!(vm.run, None | Some(RunState::Running)) {
            return;
        }
        let fresh = self.words(at, vm).is_some_and(|s| s.age_ms <= STALE_MS);
        self.reach.observe(at, dt_ms, vm.link == Link::Up && fresh);
    }

    fn follow_facts(&mut self, at: Stamp, vm: &VmSample) {
        let ready = |a: &&AgentSample| a.link == Link::Up && a.state == AgentState::Ready;
        let facts = vm.agent.as_ref().filter(ready).and_then(|a| a.facts);
        self.facts = match (facts, self.facts) {
            // A module that fills in nothing yet has no clock.
            (Some(f), Some((changed, time))) if f.time_ns == time => Some((changed, time)),
            (Some(f), _) if f.time_ns > 0 && f.total > 0 => Some((at, f.time_ns)),
            _ => None,
        };
    }

    /// What the guest says of itself, as far as its numbers allow each other.
    pub fn words(&self, at: Stamp, vm: &VmSample) -> Option<GuestStats> {
        let heard = self.heard(at, vm)?;
        let available = bounded(vm, &heard).or(heard.available);
        Some(GuestStats { available, ..heard })
    }

    /// From the source that is fresher: the module's facts while they move, else the
    /// balloon's statistics.
    fn heard(&self, at: Stamp, vm: &VmSample) -> Option<GuestStats> {
        let stats = vm.balloon.as_ref().and_then(|b| b.guest);
        let Some((changed, _)) = self.facts.filter(|(t, _)| at.since(*t) < FACTS_LIFE_MS) else {
            return stats;
        };
        let facts = vm.agent.as_ref().and_then(|a| a.facts).as_ref().map(|f| {
            // The wall clock matters only to tell a new kernel's words from the old's.
            let updated_s = stats.map_or(0, |s| s.updated_s);
            GuestStats { updated_s, ..GuestStats::from_facts(f, 0, at.since(changed)) }
        });
        facts.or(stats)
    }

    /// Counts contradictions; two in a row, and the guest is not asked. What its own
    /// numbers put right makes it only be asked gently.
    fn weigh_word(&mut self, at: Stamp, vm: &VmSample, words: &GuestStats) {
        // While a balloon moves, its size and the guest's word are of different moments.
        if self.order.is_some_and(|o| o.still_ms == 0) {
            return;
        }
        match (implausible(vm, words), self.doubt.as_mut()) {
            (Some(what), Some(d)) => {
                if at.since(d.at) >= 400 {
                    d.times = d.times.saturating_add(1).min(1000);
                    (d.at, d.what) = (at, what);
                }
            }
            (Some(what), None) => self.doubt = Some(Doubt { at, times: 1, what }),
            (None, Some(d)) if d.times > 1 && at.since(d.at) < DOUBT_MS => {}
            (None, before) => {
                let before = before.filter(|d| d.times == 1 && at.since(d.at) < DOUBT_MS).cloned();
                self.doubt = self.put_right(at, vm, words).or(before);
            }
        }
    }

    /// The doubt that remains where a claim was cut down to what can be.
    fn put_right(&self, at: Stamp, vm: &VmSample, words: &GuestStats) -> Option<Doubt> {
        let claim = self.heard(at, vm)?.available.filter(|c| Some(*c) != words.available)?;
        let (free, caches) = (words.free?, words.caches?);
        let what = format!("{claim} available, but {free} free and {caches} of cache");
        Some(Doubt { at, times: 1, what })
    }

    fn follow_reboot(&mut self, at: Stamp, wall_s: u64, vm: &VmSample) {
        let (Some(r), Some(b)) = (self.reboot.as_mut(), vm.balloon.as_ref()) else { return };
        // A second apart, as QEMU counts in whole ones. Where the clock was set back since,
        // other statistics than the old kernel's last are the new one's.
        r.speaks |= b.guest.is_some_and(|g| {
            g.updated_s > r.wall_s + 1 || wall_s + 1 < r.wall_s && g.updated_s < r.updated_s
        });
        let there = r.to.is_some_and(|to| b.actual >= to);
        let given_up = r.nudged.is_some_and(|t| at.since(t) >= STUCK_AFTER_MS);
        if r.given.is_some() && (there || given_up) {
            self.reboot = None;
        }
    }

    /// Whether it resets so often that a reset brings it nothing more.
    pub fn resets_often(&self, at: Stamp) -> bool {
        self.resets >= RESETS.0 && self.reset_at.is_some_and(|t| at.since(t) < RESETS.1)
    }

    fn take_stats(&mut self, at: Stamp, wall_s: u64, actual: Bytes, now: GuestStats) {
        // Said again counts as said: what changes next has changed since then, and not
        // since the guest was quiet.
        let said = Stamp(at.0.saturating_sub(now.age_ms));
        if self.stats.is_some_and(|(t, _, was)| same_words(&was, &now) && said.since(t) < AGAIN_MS)
        {
            return;
        }
        // It says more than it can have at this size: its word is from before a move, which
        // may have been before the first look.
        if now.available.is_some_and(|a| a > actual) {
            self.strayed = Some(at);
        }
        let actual = self.paired(said, actual, &now);
        let Some((was_at, was_actual, was)) = self.stats.replace((at, actual, now)) else { return };
        if was.refaults.is_some() != now.refaults.is_some() {
            // The other source: its counters are not these.
            self.rates = None;
            return;
        }
        let backwards =
            |b: Option<u64>, n: Option<u64>| matches!((b, n), (Some(b), Some(n)) if n < b);
        if backwards(was.minor_faults, now.minor_faults)
            && backwards(was.major_faults, now.major_faults)
            // The module's counters start with the kernel as well.
            || now.refaults.is_some() && backwards(was.major_faults, now.major_faults)
        {
            // Counters since boot went back: it rebooted unseen.
            self.forget_guest(at, wall_s);
            return;
        }
        self.rates = GuestRates::between((was_at, was_actual, &was), (at, actual, &now));
        // Its word and its size are of different moments: where a move came by surprise, what
        // looks like a growing need may be the move.
        if self.strayed.is_some_and(|t| at.since(t) < STRAY_MS) {
            self.rates.iter_mut().for_each(|r| r.need = 0.0);
        }
        if let Some(r) = self.rates {
            self.fastest.see(at, r.need);
            let volume = Bytes((r.refaults * HOT_S * PAGE as f64) as u64);
            let forgotten = at.since(self.hot.at) as f64 / FORGIVE_MS as f64;
            let left = self.hot.bytes - self.hot.bytes.share(forgotten.min(1.0));
            self.hot = Hot { at, bytes: left.max(volume) };
        }
    }

    /// What its guest needs, by its last word.
    pub fn need(&self) -> Option<Bytes> {
        let (_, size, words) = self.stats.as_ref()?;
        Some(*size - words.available.or(words.free)?)
    }

    /// The size that goes with the guest's word.
    fn paired(&mut self, said: Stamp, actual: Bytes, now: &GuestStats) -> Bytes {
        let available = now.available.or(now.free);
        let need = available.and_then(|a| Some((a, self.sizes.need(said, a, self.need())?)));
        let Some((available, (need, most))) = need else { return actual };
        self.unsure = most - need;
        need + available
    }

    fn follow_order(&mut self, at: Stamp, dt_ms: u64, actual: Option<Bytes>) {
        let (Some(order), Some(actual)) = (self.order.as_mut(), actual) else { return };
        let was = self.seen.and_then(|s| s.actual).unwrap_or(actual);
        if dt_ms > 0 {
            let down = order.to < was;
            let moved = if down { was - actual } else { actual - was };
            let now = moved.0 as f64 * 1000.0 / dt_ms as f64;
            let weight = (dt_ms as f64 / 2000.0).min(1.0);
            self.rate = self.rate * (1.0 - weight) + now * weight;
        }
        if actual.abs_diff(order.to) < Bytes::mib(1) {
            if order.to < order.moved_from {
                self.pace = (self.pace + 1).min(PACE_MOST);
            }
            self.order = None;
            self.stuck_count = 0;
            self.stuck_until = None;
        } else if actual.abs_diff(order.moved_from) >= Bytes::mib(1) {
            order.moved_from = actual;
            order.moved_at = at;
            order.still_ms = 0;
        } else {
            // A tick that came late has not looked meanwhile.
            order.still_ms += dt_ms.min(LOOK_MS);
            self.pace = 0;
            // QEMU may not have got it, or was told something else since.
            if order.to > actual && order.still_ms >= STUCK_AFTER_MS {
                self.order = None;
            }
        }
    }

    /// How far it is with its last order.
    pub fn convergence(&self, at: Stamp, actual: Option<Bytes>, trust: f64) -> Convergence {
        let target = self.order.map(|o| o.to);
        let left = self.order.zip(actual).map_or(Bytes::ZERO, |(o, a)| o.to.abs_diff(a));
        let eta_ms = (target.is_some() && self.rate >= 1.0)
            .then(|| (left.0 as f64 * 1000.0 / self.rate) as u64);
        let stuck = self.stuck_until.is_some_and(|t| t > at);
        let state = match (self.order, actual) {
            _ if self.reboot.is_some() => Progress::Rebooting,
            _ if trust <= 0.0 => Progress::Lying,
            _ if stuck => Progress::Stuck,
            (Some(o), Some(_)) if o.still_ms >= STILL_MS => Progress::Stuck,
            (Some(o), Some(_)) if self.rate < SLOW_RATE && at.since(o.since) >= STILL_MS / 2 => {
                Progress::Slow
            }
            (Some(o), Some(a)) if o.to < a => Progress::Shrinking,
            (Some(_), Some(_)) => Progress::Growing,
            _ => Progress::Settled,
        };
        let rate = if target.is_some() { self.rate } else { 0.0 };
        Convergence { state, target, rate, eta_ms }
    }

    /// What of its order to shrink will be there soon: nothing of one that stands
    /// still, five seconds' worth of one that is slow. Others are asked for the rest.
    pub fn arriving(&self, at: Stamp, actual: Bytes) -> Bytes {
        let Some(o) = self.order else { return Bytes::ZERO };
        let left = actual - o.to;
        match () {
            () if o.still_ms >= STILL_MS / 2 => Bytes::ZERO,
            () if at.since(o.since) >= STILL_MS / 2 => left.min(Bytes((self.rate * 5.0) as u64)),
            () => left,
        }
    }

    /// What of its last gift it has not touched yet and may touch any moment.
    pub fn outstanding(&self, at: Stamp, actual: Option<Bytes>, host_side: Bytes) -> Bytes {
        let live = |g: &Gift| at.since(g.at) < GIFT_LIFE_MS;
        let (Some(gift), Some(actual)) = (self.gift.filter(live), actual) else {
            return Bytes::ZERO;
        };
        gift.bytes.min(self.grows_to(actual) - host_side)
    }

    /// The size that it grows to by its last order; the one that it has where it does not grow.
    pub fn grows_to(&self, actual: Bytes) -> Bytes {
        self.order.map_or(actual, |o| o.to.max(actual))
    }

    fn account(&mut self, at: Stamp, dt_ms: u64, vm: &VmSample, actual: Option<Bytes>) {
        let Some(p) = vm.process else { return };
        if let Some(size) = self.sizes.most() {
            let left = 1.0 - (dt_ms as f64 / OWN_LIFE_MS).min(1.0);
            self.own = (p.resident() - size).max(self.own.share(left));
        }
        let recycled = vm.agent.as_ref().map(|a| a.counters.recycled).unwrap_or_default();
        let actual = actual.or(self.seen.and_then(|s| s.actual));
        let now = Seen { actual, resident: p.resident(), swap: p.swap, recycled };
        if let Some(was) = self.seen.replace(now) {
            let inflated = match (was.actual, now.actual) {
                (Some(w), Some(n)) => w - n,
                _ => Bytes::ZERO,
            };
            if let (Some(w), Some(n)) = (was.actual, now.actual) {
                self.returned.given_back += n - w;
            }
            // Only what was resident can come; by orders of others nothing is judged.
            let held = (was.resident - self.own).min(was.actual.unwrap_or_default());
            let free = was.actual.unwrap_or_default() - held;
            let grew = inflated - free;
            let fell = was.resident - now.resident;
            self.yields.observe(at, vm.ram.unwrap_or_default(), grew, fell);
            let (zeros, fell) = self.zeros.divide(at, vm, fell);
            self.returned.zeros += zeros;
            let mut left = fell;
            let mut part = |most: Bytes| {
                let took = left.min(most);
                left = left - took;
                took
            };
            self.returned.swap += part(now.swap - was.swap);
            self.returned.recycled += part(now.recycled - was.recycled);
            self.returned.balloon += part(inflated);
            if vm.balloon.as_ref().and_then(|b| b.reporting) == Some(true) {
                self.returned.reporting += left;
            } else {
                self.returned.other += left;
            }
        }
    }

    /// The rates, unless they are too old to mean anything.
    pub fn rates_at(&self, at: Stamp) -> Option<GuestRates> {
        self.rates.filter(|r| at.since(r.at) <= RATE_LIFE_MS)
    }

    /// Whether QEMU may be discarding pages of this VM itself: its balloon grows,
    /// or grew a moment ago.
    pub fn inflates(&self, at: Stamp, actual: Option<Bytes>) -> bool {
        self.order.is_some_and(|o| actual.is_none_or(|a| o.to < a))
            || self.shrunk.is_some_and(|t| at.since(t) < INFLATE_ECHO_MS)
            || self.reboot.is_some()
    }

    /// Whether an order to shrink has moved nothing for too long.
    pub fn stalled(&self, vm: &VmModel) -> bool {
        match (self.order, vm.actual) {
            (Some(o), Some(actual)) => o.to < actual && o.still_ms >= STUCK_AFTER_MS,
            _ => false,
        }
    }
}

/// Whether the guest said nothing new (age and update time apart).
fn same_words(a: &GuestStats, b: &GuestStats) -> bool {
    GuestStats { updated_s: 0, age_ms: 0, ..*a } == GuestStats { updated_s: 0, age_ms: 0, ..*b }
}
