//! Ballooning, both ways: what each VM's own state demands, then what the host's
//! does.
//!
//! `allot.rs` decides how much each is to have. Giving comes first: at once and before
//! everything else when a guest shows distress or reboots, whatever the host's state (how
//! much at once: `give.rs`); before it asks, when it has less than it needed lately; gently
//! when the host has more than all are to have. Taking, when it has less, is `take.rs`'s.
//! Where there are other limits than the machine's, each is "the host" in turn (`limits.rs`): a VM
//! gives where any limit above it is short, and is given what all of them have.
//! While no guest waits for memory, one that was given some is not asked for a minute (20 s where
//! page cache has to be taken), and one that was asked is not given any for the host's sake.

mod grow;

use self::grow::{GROW_HOLD_MS, grow};
use crate::model::{DEFLATED_LIFE_MS, MOVED, Model, Pressure, Progress, Standing, VmModel};
use crate::plan::{DEADBAND, Reason, Reclaim};
use crate::policy::Verdict;
use crate::policy::allot::{Allotment, Level, Part, want, weight};
use crate::policy::give::{Fund, LAST, Wish, grant};
use crate::policy::limits::{View, below, least_parts};
use crate::policy::recycle::usable;
use crate::policy::take::{
    CALM_STEP, Candidate, LEAST_STEP, Missing, base, brings_nothing, busy, idle, must, outdated,
    pinned, priced, round_up, share_out, step, take,
};
use crate::state::{Memory, Reboot, VmMemory};
use crate::units::Bytes;

/// A guest in distress gets at least this.
const LEAST_GIVEN: Bytes = Bytes::mib(64);
/// Still short this soon after it was given memory: a second buffer, where the host has it.
const GIVEN_AGAIN_MS: u64 = 5_000;
/// Where the host has it, one in distress gets this share of its RAM.
const MORE: f64 = 0.25;
/// One that has less than its part by more than this share of what that is beyond its need is given
/// it before it asks.
const LOW_SHARE: f64 = 0.15;
/// An order to grow that was refused is sent again after this, not with each fast tick.
const GROW_AGAIN_MS: u64 = 1_000;
/// A driver that has anything to say after a boot has said it by then.
const REFRESH_MS: u64 = 3_000;
/// While no guest waits for memory, one that was given some is not asked for this long (for
/// `SHORT_PAUSE_MS` in `take.rs` where page cache has to be taken). A lowered
/// `max` and a plan leave guests what they needed within this time.
pub(super) const CALM_MS: u64 = 60_000;

/// What ballooning decided, and what the host can expect of it.
#[derive(Clone, Debug, Default)]
pub struct Ballooned {
    /// A verdict for each VM of the model, in its order.
    pub verdicts: Vec<Verdict>,
    /// What was missing before: the host's shortage and what guests wait for.
    pub missing: Bytes,
    /// What of it guests in distress wait for.
    pub deferred: Bytes,
    /// What the host will have of each VM.
    pub expected: Vec<Bytes>,
    /// What was missing under each limit, in the order of [`View`].
    pub under: Vec<Bytes>,
    /// What of that VMs wait for that are paused: nothing is paged out for them.
    pub waiting: Vec<Bytes>,
}

/// Decides. `above` is what the stages before this one are expected to bring of each VM.
pub fn balloon(model: &Model, memory: &Memory, requests: &[Reclaim], above: &[Bytes]) -> Ballooned {
    let of = |vm: &VmModel| memory.of(vm.id);
    let mut verdicts: Vec<Option<Verdict>> =
        model.vms.iter().map(|vm| own_case(model, vm, of(vm))).collect();
    let least: Vec<Bytes> = model.vms.iter().map(|vm| least(model, vm, of(vm))).collect();
    let mut view = View::new(model);
    let allots = view.allot(memory, &least);
    let deferred = relieve(&mut view, model, memory, &allots, &mut verdicts);
    let open: Vec<bool> = verdicts.iter().map(Option::is_none).collect();
    for request in left_of(requests, model, above) {
        on_request(model, memory, (&request, &open), &mut verdicts);
    }
    let mut done = Ballooned { expected: vec![Bytes::ZERO; model.vms.len()], ..Default::default() };
    let mut surplus = Vec::new();
    // Why one is not asked under one limit: it may be under the next.
    let mut held: Vec<Option<String>> = vec![None; model.vms.len()];
    for (n, limit) in view.order.clone().into_iter().enumerate() {
        let (model, allot, deferred) = (view.under(limit), &allots[n], deferred[n]);
        let (host, shown) = (&model.host, &model.host.shown);
        let lacks = |shortage| if shown.stalls_elsewhere { Bytes::ZERO } else { shortage };
        // What guests are not to be asked for is still missing: later stages may have it.
        let missing = lacks(allot.shortage.max(shown.shortage));
        let runs = lacks(allot.shortage_of_running.max(shown.shortage));
        done.under.push(deferred + missing);
        done.waiting.push(missing - runs);
        let short = deferred + lacks(allot.shortage);
        let has_some = short == Bytes::ZERO && host.known;
        surplus.push((limit, if has_some { surplus_of(model, allot) } else { Bytes::ZERO }));
        if short == Bytes::ZERO {
            continue;
        }
        let found = below(model, above) + below(model, &done.expected);
        let asked = Missing {
            all: short - found,
            by_cache: (deferred + lacks(allot.cache_shortage)) - found,
            deferred,
        };
        let open: Vec<usize> = (0..verdicts.len()).filter(|i| verdicts[*i].is_none()).collect();
        let brings = take(model, memory, (asked, allot), &mut verdicts);
        done.expected.iter_mut().zip(brings).for_each(|(all, one)| *all += one);
        for i in open {
            if let Some(Verdict::Hold(why)) = verdicts[i].take_if(|v| matches!(v, Verdict::Hold(_)))
                && !model.vms[i].outside
            {
                held[i].get_or_insert(why);
            }
        }
    }
    for (verdict, why) in verdicts.iter_mut().zip(held) {
        *verdict = verdict.take().or(why.map(Verdict::Hold));
    }
    grow(model, memory, &surplus, &mut verdicts);
    done.deferred = view.total(&deferred);
    done.missing = view.total(&done.under);
    let nothing = |vm| Verdict::Hold(nothing_to_do(model, vm, of(vm), &allots));
    let all = verdicts.into_iter().zip(&model.vms);
    done.verdicts = all.map(|(verdict, vm)| verdict.unwrap_or_else(|| nothing(vm))).collect();
    done
}

fn nothing_to_do(model: &Model, vm: &VmModel, m: &VmMemory, allots: &[Allotment]) -> String {
    if vm.standing != Standing::Ready {
        return vm.standing.why().to_string();
    }
    let name = model.limit_of(vm).map_or("host", |l| l.name.as_str());
    match (model.state_of(vm), vm.owed) {
        (Pressure::Clear, Bytes(0)) => format!("{name} is clear, nothing is owed to it"),
        (Pressure::Clear, owed) => {
            format!("{name} is clear; the VM's balloon holds {owed} for Ebb")
        }
        (state, owed) => brings_nothing(model, vm, m).unwrap_or_else(|| {
            let within_ms = allots.iter().map(|a| a.within_ms).min().unwrap_or_default();
            let seconds = within_ms.div_ceil(1000);
            format!(
                "{name} is {state}; the VM's balloon holds {owed} for Ebb; the guest keeps what it \
                 needed in the last {seconds} s"
            )
        }),
    }
}

/// What a VM's own state demands, before the host is asked.
fn own_case(model: &Model, vm: &VmModel, m: &VmMemory) -> Option<Verdict> {
    let actual = vm.actual?;
    if m.moves(model.at) {
        // Nor is it given anything: that would take the place of the order that it follows.
        return Some(Verdict::Hold(MOVED.into()));
    }
    if m.grow_refused.is_some_and(|t| model.at.since(t) < GROW_AGAIN_MS) {
        return Some(Verdict::Hold("QEMU or libvirt has just refused an order to grow".into()));
    }
    match &vm.standing {
        Standing::Off(_) if !vm.managed && vm.owed > Bytes::ZERO => {
            let to = returned(vm, actual);
            let growing = m.order.is_some_and(|o| o.to >= to);
            return Some(match growing {
                true => Verdict::Hold("what was taken is being returned".into()),
                false => Verdict::Set { to, reason: Reason::Returned },
            });
        }
        Standing::Off(_) | Standing::Unknown => {
            return Some(Verdict::Hold(vm.standing.why().to_string()));
        }
        Standing::Ready | Standing::GiveOnly(_) => {}
    }
    if let Some(r) = m.reboot.filter(|r| r.given.is_some()) {
        return Some(after_reboot(model, vm, r, actual));
    }
    if let Some(to) = held_anyway(vm, m, actual) {
        return Some(Verdict::Set { to, reason: Reason::HeldAnyway });
    }
    let shrinks = m.order.is_some_and(|o| o.to < actual && o.to < o.moved_from);
    let needed = m.order.is_some_and(|o| vm.guest.is_some_and(|g| o.to < g.need));
    let busy = vm.agent.as_ref().is_some_and(|a| a.busy);
    let withdraw = |reason| Some(Verdict::Set { to: actual, reason });
    match () {
        // `relieve` divides what there is among all of these.
        () if is_to_be_given(vm, m) => None,
        () if vm.hands_off.is_some() && shrinks => withdraw(Reason::HandsOff),
        () if m.stalled(vm) => withdraw(Reason::Withdrawn),
        () if shrinks && needed => withdraw(Reason::Needed),
        // It is at its ceiling: `relieve` leaves it alone, or has it give for another's bare need.
        () if !vm.distress.is_empty() => None,
        () if actual > vm.ceiling && vm.standing == Standing::Ready && !busy => {
            above_ceiling(model, vm, m, actual)
        }
        () => None,
    }
}

/// The size that costs the host nothing where RAM is pinned, if that is more. Not where a balloon was
/// only found to bring nothing: what the host holds may be its VMM's.
fn held_anyway(vm: &VmModel, m: &VmMemory, actual: Bytes) -> Option<Bytes> {
    let may = vm.standing == Standing::Ready && vm.own_is_counted && vm.pinned.is_some();
    let held = vm.guest_held().filter(|_| may)?;
    let to = held.min(vm.whole).min(vm.ceiling);
    // Its VMM may have come to hold more since that was counted.
    (to >= m.grows_to(actual) + LEAST_GIVEN).then_some(to.floor_mib())
}

/// The size to order where all is to be returned to a guest that may be booting. A driver that
/// starts and is to hold nothing writes no size, and QEMU would go on showing the old one. So all
/// but 1 MiB comes first.
fn returned(vm: &VmModel, actual: Bytes) -> Bytes {
    let first = vm.whole - Bytes::mib(1);
    if actual < first { first } else { vm.whole }
}

/// When the new kernel speaks and QEMU still shows the old size, one MiB down and up again; not
/// while the VM is to be left alone.
fn after_reboot(model: &Model, vm: &VmModel, r: Reboot, actual: Bytes) -> Verdict {
    let to = r.to.unwrap_or(actual);
    let nudge = to - Bytes::mib(1);
    match (r.given, r.nudged) {
        (_, Some(_)) if actual == nudge => Verdict::Set { to, reason: Reason::Rebooted },
        (Some(given), None)
            if r.speaks && vm.hands_off.is_none() && model.at.since(given) >= REFRESH_MS =>
        {
            Verdict::Set { to: nudge, reason: Reason::Refresh }
        }
        _ => Verdict::Hold("it rebooted: its size is not known yet".into()),
    }
}

/// Whether its own state has it given memory: it is short, cannot be seen to be, or boots. And it
/// can be given some.
fn is_to_be_given(vm: &VmModel, m: &VmMemory) -> bool {
    let Some(actual) = vm.actual else { return false };
    if !matches!(vm.standing, Standing::Ready | Standing::GiveOnly(_)) {
        return false;
    }
    m.reboot.is_some_and(|r| r.given.is_none())
        || !vm.distress.is_empty() && actual < vm.ceiling
        || is_unseen(vm)
}

/// Whether it cannot be seen to be short, and is owed something.
fn is_unseen(vm: &VmModel) -> bool {
    !vm.unseen.is_empty() && vm.owed > Bytes::ZERO
}

/// What the distress of a guest comes to.
struct Distress {
    /// Its need and a margin: what it must have.
    must: Bytes,
    /// Its size when it reported that.
    spoken: Bytes,
    /// It is short, and not only about to be.
    short: bool,
}

impl Distress {
    fn of(model: &Model, vm: &VmModel, m: &VmMemory) -> Distress {
        let actual = vm.actual.unwrap_or(vm.ceiling);
        // It is given memory once for each report: it has not reported since.
        let age_ms = vm.guest.map_or(0, |g| g.age_ms);
        let before = m.last_give.is_some_and(|t| model.at.since(t) <= age_ms);
        let spoke = m.stats.map_or(actual, |(_, size, _)| size.min(actual));
        let spoken = if before { spoke } else { actual };
        let helped = m.deflated_on_oom.is_some_and(|t| model.at.since(t) < DEFLATED_LIFE_MS);
        match &vm.guest {
            None => Distress { must: spoken + LEAST_GIVEN, spoken, short: true },
            Some(g) => {
                Distress { must: must(g), spoken, short: helped || g.available < g.short_mark }
            }
        }
    }

    /// The size that it is to have in any case. One that only grows may have more already.
    fn least(&self) -> Bytes {
        if self.short { self.must.max(self.spoken + LEAST_GIVEN) } else { self.must }
    }
}

/// What a guest in distress is to have in any case; none for all others.
fn least(model: &Model, vm: &VmModel, m: &VmMemory) -> Bytes {
    if vm.distress.is_empty() || m.reboot.is_some() {
        return Bytes::ZERO;
    }
    Distress::of(model, vm, m).least().min(vm.ceiling)
}

/// Whether a guest lacks enough, of what it is to be brought to, for an order.
fn is_low(model: &Model, vm: &VmModel, m: &VmMemory, part: Option<&Part>) -> bool {
    // An operator's wish stands for a while.
    if m.requested.is_some_and(|t| model.at.since(t) < GROW_HOLD_MS) {
        return false;
    }
    let (Some(actual), Some(part), Some(g)) = (vm.actual, part, &vm.guest) else { return false };
    let from = m.grows_to(actual);
    let step = (part.good - g.need).share(LOW_SHARE).max(LEAST_STEP);
    // Beyond the size that others gave it only a need counts, not what is likely.
    let good = part.good.min(vm.whole);
    // The operator may have raised its floor.
    let lacks = from + step < good || from + DEADBAND < vm.floor.min(good);
    vm.standing == Standing::Ready && !m.ledger.suspect && m.reboot.is_none() && lacks
}

/// Grants what guests need, as far as each limit above them has it; returns what they have to wait
/// for under each.
fn relieve(
    view: &mut View<'_>,
    model: &Model,
    memory: &Memory,
    allots: &[Allotment],
    verdicts: &mut [Option<Verdict>],
) -> Vec<Bytes> {
    let of = |i: &usize| memory.of(model.vms[*i].id);
    let parts = least_parts(allots);
    let to_give = (0..model.vms.len()).filter(|i| {
        let vm = &model.vms[*i];
        verdicts[*i].is_none()
            && (is_to_be_given(vm, of(i)) || is_low(model, vm, of(i), parts[*i].as_ref()))
    });
    let to_give: Vec<usize> = to_give.collect();
    let wish = |i: &usize| wish(model, &model.vms[*i], of(i), parts[*i].as_ref());
    let wishes: Vec<Wish> = to_give.iter().map(wish).collect();
    let mut left = wishes.clone();
    let mut deferred = Vec::new();
    let order = view.order.clone();
    let limits = &model.host.limits;
    let machine = limits.iter().find(|l| l.is_host()).map_or(Bytes(u64::MAX), |l| l.swap_left);
    // The swap that guests below each limit will draw, as far as they may, beside those of limits
    // inside: the machine has it once.
    let draw = |n: usize, granted: Bytes, drawn: &[Bytes]| {
        let limit = &limits[order[n]];
        let below = model.vms.iter().filter(|vm| vm.is_below(limit));
        let all = granted + below.map(spoken_for).sum();
        let inside = |i: &usize| drawn[*i] > Bytes::ZERO && limits[order[*i]].is_inside(limit);
        let by_inner: Bytes = (0..n).filter(inside).map(|i| drawn[i]).sum();
        let all = all - (limit.headroom - limit.reserve.share(LAST));
        all.min(limit.swap_left) - by_inner
    };
    let mut drawn: Vec<Bytes> = Vec::new();
    let several = order.len() > 1 && !to_give.is_empty();
    if several {
        (0..order.len()).for_each(|n| drawn.push(draw(n, Bytes::ZERO, &drawn)));
    }
    for (n, (limit, allot)) in order.iter().copied().zip(allots).enumerate() {
        let is_beside =
            |i: &usize| drawn[*i] > Bytes::ZERO && limits[order[*i]].is_beside(&limits[limit]);
        let drawn_beside: Bytes = (0..drawn.len()).filter(is_beside).map(|i| drawn[i]).sum();
        let model = view.under(limit);
        let inside = |n: &usize| !model.vms[to_give[*n]].outside;
        let inside: Vec<usize> = (0..to_give.len()).filter(inside).collect();
        let asked: Vec<Wish> = inside.iter().map(|n| left[*n]).collect();
        // What the asking VMs take is in their wishes.
        let is_other = |(i, _): &(usize, &VmModel)| to_give.binary_search(i).is_err();
        let others = model.vms.iter().enumerate().filter(is_other);
        let others = others.map(|(_, vm)| vm).filter(|vm| !vm.outside);
        let shown = &model.host.shown;
        let fund = Fund {
            headroom: (!model.host.limits.is_empty()).then_some(shown.headroom),
            swap_left: shown.swap_left.min(machine - drawn_beside),
            reserve: shown.reserve,
            outstanding: others.clone().map(|vm| vm.outstanding).sum(),
            spoken_for: others.map(spoken_for).sum(),
            keep: allot.keep_by_cache,
            calm: shown.state <= Pressure::Soft,
        };
        let grants = grant(&fund, &asked);
        deferred.push(grants.iter().map(|g| g.deferred).sum());
        let granted: Bytes = grants.iter().zip(&asked).map(|(g, w)| g.to - w.from).sum();
        if several {
            drawn[n] = draw(n, granted, &drawn);
        }
        for (n, g) in inside.into_iter().zip(grants) {
            left[n] = left[n].up_to(g.to);
        }
    }
    // Where a guest does not get its bare need, one that has more than its part and is not short
    // may be asked for it. Where the host has next to nothing left, its OOM killer would be next:
    // then one that is short may be asked too.
    let below_bare_need = wishes.iter().zip(&left).any(|(wish, left)| left.all < wish.bare);
    let host = &model.host;
    let shown = &host.shown;
    let host_is_spent = host.known && shown.headroom + shown.swap_left < shown.reserve.share(LAST);
    let gives = |i: usize, from: Bytes| {
        let (vm, m) = (&model.vms[i], of(&i));
        let is_seen = m.reboot.is_none() && vm.unseen.is_empty();
        let may = host_is_spent || below_bare_need && !Distress::of(model, vm, m).short;
        // An order that takes more of it than its part is to end first.
        let goes_on = |part: &Part| m.order.is_some_and(|o| o.to < part.keeps);
        is_seen && may && parts[i].is_some_and(|part| from > part.keeps && !goes_on(&part))
    };
    for ((i, wish), left) in to_give.iter().zip(&wishes).zip(left) {
        if left.all > wish.from || !gives(*i, wish.from) {
            verdicts[*i] = Some(granted(&model.vms[*i], of(i), wish, left.all));
        }
    }
    for (i, vm) in model.vms.iter().enumerate().filter(|(_, vm)| !vm.distress.is_empty()) {
        let at_ceiling = verdicts[i].is_none() && to_give.binary_search(&i).is_err();
        if at_ceiling && vm.actual.is_some_and(|actual| !gives(i, actual)) {
            verdicts[i] = Some(Verdict::Hold(format!("{}; it is at its ceiling", vm.distress)));
        }
    }
    deferred
}

/// What was given earlier and will be touched in a moment: what lies idle can be had again.
fn spoken_for(vm: &VmModel) -> Bytes {
    match (&vm.guest, vm.guest_held()) {
        // Its margin is not touched: a guest that has nothing left does not wait for that. What a
        // kernel that boots will touch, the statistics of the one before do not tell.
        (Some(g), Some(held)) if vm.convergence.state != Progress::Rebooting => {
            vm.outstanding.min(g.soon() - held)
        }
        _ => vm.outstanding,
    }
}

/// `size`: what it is granted.
fn granted(vm: &VmModel, m: &VmMemory, wish: &Wish, size: Bytes) -> Verdict {
    let to = round_up(size).min(wish.all).max(wish.from);
    let waits = (wish.due - size).if_any(|d| format!("; {d} more when others have freed it"));
    if m.reboot.is_some() {
        // Also where it is given nothing: an order from before the reset may be open.
        return Verdict::Set { to, reason: Reason::Rebooted };
    }
    let reason = if !vm.distress.is_empty() {
        Reason::GuestShort { signs: format!("{}{waits}", vm.distress) }
    } else if is_unseen(vm) {
        Reason::Unseen { why: vm.unseen.clone() }
    } else {
        Reason::Likely
    };
    match m.order {
        // It is on its way up already, as far as it would be sent.
        Some(o) if o.to >= to => Verdict::Hold(format!("{reason}: growing to {}", o.to)),
        // What it can be given is not worth an order, and the one to shrink would go on.
        Some(o) if o.to < wish.from && to < wish.from + DEADBAND => {
            Verdict::Set { to: wish.from, reason: Reason::Needed }
        }
        _ => Verdict::Set { to, reason },
    }
}

/// What a guest is to have that is short, cannot be seen to be, boots, or is low.
fn wish(model: &Model, vm: &VmModel, m: &VmMemory, part: Option<&Part>) -> Wish {
    let actual = vm.actual.unwrap_or(vm.ceiling);
    let from = m.grows_to(actual);
    let swap = vm.guest_swap();
    let outstanding = vm.outstanding;
    let untouched = (from - vm.guest_held().map_or(from, |held| held + swap)).max(outstanding);
    let in_doubt = from - untouched - vm.guest_held_at_least().map_or(from, |held| held + swap);
    let spoken_for = spoken_for(vm);
    let weight = weight(vm);
    let none =
        Wish { from, untouched, in_doubt, outstanding, spoken_for, weight, ..Wish::default() };
    if m.reboot.is_some() {
        // Its need is not known: what is owed, or a size that QEMU does not show, to be written.
        let most = vm.whole - Bytes::mib(1);
        let most = if m.resets_often(model.at) {
            most.min(from + Bytes::mib(1))
        } else {
            returned(vm, from)
        };
        let all = most.max(from);
        let first = (from + LEAST_GIVEN).min(all);
        return Wish { bare: from, first, due: first, second: all, third: all, all, ..none };
    }
    let assured = part.map_or(from, |p| p.assured.min(vm.whole).max(from));
    let third = part.map_or(assured, |p| p.good.min(vm.whole).max(assured));
    if vm.distress.is_empty() {
        // It may need nothing: no other guest is squeezed for it.
        let all = if is_unseen(vm) { vm.whole.max(third) } else { third };
        let second = if is_unseen(vm) { all } else { assured };
        let none = Wish { is_likely: !is_unseen(vm), ..none };
        return Wish { bare: from, first: from, due: assured, second, third, all, ..none };
    }
    let d = Distress::of(model, vm, m);
    // One that is short cannot wait for others.
    let first = d.least().max(d.spoken);
    let mut due = d.must.max(d.spoken + LEAST_GIVEN);
    let mut third = due.max(third);
    if let Some(g) = &vm.guest {
        if d.short {
            // It is likely on its way to what it needed before.
            due = due.max((g.highest + g.short_mark.share(2.0)).min(vm.whole));
        }
        let again = m.last_give.is_some_and(|t| model.at.since(t) < GIVEN_AGAIN_MS);
        let buffers = g.buffer.share(if again { 2.0 } else { 1.0 });
        third = third.max(g.working_set + buffers);
    }
    let due = due.max(assured).min(vm.ceiling);
    // How far it goes on is not known: where the host has it, a part of what it may have.
    let more = (actual + vm.ram.unwrap_or(vm.ceiling).share(MORE)).min(vm.whole);
    let third = due.max(third).max(more).min(vm.ceiling);
    // Where there is too little for all, what one is given beyond that another has to give.
    let first = first.min(vm.ceiling);
    let most = part.and_then(|p| p.most).map_or(vm.ceiling, |most| most.max(first));
    let (due, third) = (due.min(most), third.min(most));
    let bare = vm.guest.map_or(first, |g| g.need + g.short_mark.share(0.5)).min(first);
    Wish { bare, first, due, second: due, third, all: third, ..none }
}

fn above_ceiling(model: &Model, vm: &VmModel, m: &VmMemory, actual: Bytes) -> Option<Verdict> {
    let g = vm.guest.as_ref().filter(|g| outdated(g).is_none() && model.host.known)?;
    let base = base(m, actual);
    let keep = want(model.at, vm, g, m, Level::CALM).max(vm.ceiling);
    let most = step(vm, m, model, CALM_STEP).min(idle(model.at, base, keep, g, m));
    (most > Bytes::ZERO && !busy(m, actual, most))
        .then(|| Verdict::Set { to: round_up(base - most), reason: Reason::AboveCeiling })
}

/// What requests still ask for. What the stages `above` bring of a VM counts for the requests that
/// mean it, one after the other.
fn left_of(requests: &[Reclaim], model: &Model, above: &[Bytes]) -> Vec<Reclaim> {
    let mut left = requests.to_vec();
    for (vm, had) in model.vms.iter().zip(above) {
        let mut had = *had;
        let its = left.iter_mut().filter(|r| r.means(&vm.name));
        for bytes in its.filter_map(|r| r.bytes.as_mut()) {
            let part = had.min(*bytes);
            (*bytes, had) = (*bytes - part, had - part);
        }
    }
    left.retain(|r| r.bytes != Some(Bytes::ZERO));
    left
}

/// The operator wants idle memory now: no step limit, no hold, but every guest
/// keeps its working set and its full buffer. Guests whose agent recycles are left to it.
/// `open`: the VMs that may be asked; what an earlier request takes of one counts.
fn on_request(
    model: &Model,
    memory: &Memory,
    (request, open): (&Reclaim, &[bool]),
    verdicts: &mut [Option<Verdict>],
) {
    let mut candidates: Vec<Candidate> = Vec::new();
    for (index, vm) in model.vms.iter().enumerate() {
        let m = memory.of(vm.id);
        let meant = request.means(&vm.name) && open[index];
        if !meant || vm.standing != Standing::Ready || usable(vm).is_some() {
            continue;
        }
        if let Some(why) = pinned(vm).or_else(|| outdated(vm.guest.as_ref()?)) {
            verdicts[index] = Some(Verdict::Hold(why));
            continue;
        }
        let (Some(actual), Some(g)) = (vm.actual, vm.guest.as_ref()) else { continue };
        let base = match &verdicts[index] {
            Some(Verdict::Set { to, .. }) => *to,
            _ => base(m, actual),
        };
        // What it needed a moment ago and has freed is what the operator means.
        let keep = want(model.at, vm, g, m, Level::NOW).max(g.working_set + g.buffer);
        let idle = idle(model.at, base, keep, g, m);
        candidates.push(priced(vm, g, index, (base, idle, idle)));
    }
    share_out(&mut candidates, request.bytes.unwrap_or(Bytes(u64::MAX)), |_| 1.0);
    for c in candidates {
        let to = round_up(c.base - c.share);
        let taken = matches!(verdicts[c.index], Some(Verdict::Set { .. }));
        if taken && c.share < Bytes::mib(1) {
            continue;
        }
        verdicts[c.index] = Some(match () {
            () if c.share >= Bytes::mib(1) => Verdict::Set { to, reason: Reason::Requested },
            () if c.idle >= Bytes::mib(1) => Verdict::Hold(
                "asked for its idle memory, but others bring what was asked for".into(),
            ),
            () => Verdict::Hold(format!("asked for its idle memory, but has only {}", c.idle)),
        });
    }
}

/// What the host can give back.
fn surplus_of(model: &Model, allot: &Allotment) -> Bytes {
    let limit = &model.host.shown;
    let kept = allot.keep.share(1.25) + allot.growth.max(allot.by_turns) + limit.outstanding;
    limit.headroom - kept
}

#[cfg(test)]
mod tests;
