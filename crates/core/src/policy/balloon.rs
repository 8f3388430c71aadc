//! Ballooning, both ways: what each VM's own state demands, then what the host's
//! does.
//!
//! Giving comes first: at once and before everything else when a guest shows
//! distress or reboots, whatever the host's state (how much at once: `give.rs`);
//! gently when the host is clear. Taking, while the host is short of its reserve or
//! another guest waits for memory, is `take.rs`'s. Holds keep the two apart: one who
//! was given memory is not asked for some time, one who was asked is not given any
//! for the host's sake.

use crate::memory::{Memory, Reboot, VmMemory};
use crate::model::{HELP_LIFE_MS, Model, Pressure, Standing, VmModel};
use crate::plan::{Reason, Reclaim};
use crate::policy::Verdict;
use crate::policy::give::{Fund, Grant, Wish, grant};
use crate::policy::recycle::usable;
use crate::policy::take::{
    Candidate, LEAST_STEP, base, busy, force, keep, pinned, priced, round_up, share_out, step, take,
};
use crate::units::Bytes;

/// A guest in distress gets at least this.
const LEAST_GIFT: Bytes = Bytes::mib(64);
/// Still short this soon after a gift: it gets everything.
const GIFT_AGAIN_MS: u64 = 5_000;
/// One that was shrunk is not grown for the host's sake for so long.
const GROW_HOLD_MS: u64 = 60_000;
/// A driver that has anything to say after a boot has said it by then.
const REFRESH_MS: u64 = 3_000;
/// What of its surplus a clear host gives back, a second.
const SURPLUS_RATE: f64 = 0.05;
/// A little beyond the mark, so that the host also leaves the state.
const BEYOND: f64 = 0.05;

/// What ballooning decided, and what the host can expect of it.
#[derive(Clone, Debug, Default)]
pub struct Ballooned {
    /// A verdict for each VM of the model, in its order.
    pub verdicts: Vec<Verdict>,
    /// What was missing before: the host's shortage and what guests wait for.
    pub missing: Bytes,
    /// What of it guests in distress wait for.
    pub deferred: Bytes,
    /// What the host will have of it.
    pub expected: Bytes,
}

/// Decides. `above` is what the rungs above this one are expected to bring.
pub fn balloon(model: &Model, memory: &Memory, requests: &[Reclaim], above: Bytes) -> Ballooned {
    let none = VmMemory::default();
    let of = |vm: &VmModel| memory.vm(vm.id).unwrap_or(&none);
    let mut verdicts: Vec<Option<Verdict>> =
        model.vms.iter().map(|vm| own_case(model, vm, of(vm))).collect();
    let deferred = relieve(model, memory, &mut verdicts);
    for request in requests {
        on_request(model, memory, request, &mut verdicts);
    }
    let host = &model.host;
    let mut done = Ballooned { deferred, missing: deferred, ..Ballooned::default() };
    if host.state > Pressure::Clear && !host.stalls_elsewhere {
        done.missing += host.shortage + host.reserve.share(BEYOND);
    }
    if done.missing > Bytes::ZERO {
        let missing = done.missing - above;
        done.expected = take(model, memory, (missing, deferred), &mut verdicts);
    } else if host.known {
        grow(model, memory, &mut verdicts);
    }
    done.verdicts = verdicts
        .into_iter()
        .zip(&model.vms)
        .map(|(v, vm)| v.unwrap_or_else(|| Verdict::Hold(nothing_to_do(model, vm))))
        .collect();
    done
}

fn nothing_to_do(model: &Model, vm: &VmModel) -> String {
    match (&vm.standing, model.host.state, vm.owed) {
        (Standing::Ready, Pressure::Clear, Bytes(0)) => {
            "host is clear, nothing is owed to it".into()
        }
        (Standing::Ready, state, held) => format!("host is {state}, {held} of it are ballooned"),
        (other, ..) => other.why().to_string(),
    }
}

/// What a VM's own state demands, before the host is asked.
fn own_case(model: &Model, vm: &VmModel, m: &VmMemory) -> Option<Verdict> {
    let actual = vm.actual?;
    if m.ledger.suspect {
        // Nor is it given anything before it is known whose a move is: in the next tick.
        return Some(Verdict::Hold("its size has changed, not by Ebb's order".into()));
    }
    match &vm.standing {
        Standing::Off(_) if !vm.managed && vm.owed > Bytes::ZERO => {
            let growing = m.order.is_some_and(|o| o.to >= vm.whole);
            return Some(match growing {
                true => Verdict::Hold("what was taken is being returned".into()),
                false => Verdict::Set { to: vm.whole, reason: Reason::Returned },
            });
        }
        Standing::Off(_) | Standing::Unknown => {
            return Some(Verdict::Hold(vm.standing.why().to_string()));
        }
        Standing::Ready | Standing::GiveOnly(_) => {}
    }
    if m.reboot.is_some_and(|r| r.given.is_some()) {
        return Some(after_reboot(model, m.reboot.unwrap_or_default(), actual));
    }
    if is_poor(vm, m) {
        return None; // all of these together: `relieve`
    }
    let shrinks = m.order.is_some_and(|o| o.to < actual && o.to < o.moved_from);
    if vm.hands_off.is_some() && shrinks {
        return Some(Verdict::Set { to: actual, reason: Reason::HandsOff });
    }
    if m.stalled(vm) {
        return Some(Verdict::Set { to: actual, reason: Reason::Withdrawn });
    }
    if !vm.distress.is_empty() {
        return Some(Verdict::Hold(format!("{}, but it has all it may", vm.distress)));
    }
    let busy = vm.agent.as_ref().is_some_and(|a| a.busy);
    if actual > vm.ceiling && vm.standing == Standing::Ready && !busy {
        return above_ceiling(model, vm, m, actual);
    }
    None
}

/// When the new kernel speaks and QEMU still shows the old size, one MiB down and up again.
fn after_reboot(model: &Model, r: Reboot, actual: Bytes) -> Verdict {
    let to = r.to.unwrap_or(actual);
    let nudge = to - Bytes::mib(1);
    match (r.given, r.nudged) {
        (_, Some(_)) if actual == nudge => Verdict::Set { to, reason: Reason::Rebooted },
        (Some(given), None) if r.speaks && model.at.since(given) >= REFRESH_MS => {
            Verdict::Set { to: nudge, reason: Reason::Refresh }
        }
        _ => Verdict::Hold("it rebooted: its size is not known yet".into()),
    }
}

/// Whether it is short, cannot be seen to be, or boots, and can be given something.
fn is_poor(vm: &VmModel, m: &VmMemory) -> bool {
    let Some(actual) = vm.actual else { return false };
    if !matches!(vm.standing, Standing::Ready | Standing::GiveOnly(_)) {
        return false;
    }
    m.reboot.is_some_and(|r| r.given.is_none())
        || !vm.distress.is_empty() && actual < vm.ceiling
        || !vm.unseen.is_empty() && vm.owed > Bytes::ZERO
}

/// Grants what guests in distress need; returns what they have to wait for.
fn relieve(model: &Model, memory: &Memory, verdicts: &mut [Option<Verdict>]) -> Bytes {
    let none = VmMemory::default();
    let of = |i: &usize| memory.vm(model.vms[*i].id).unwrap_or(&none);
    let poor =
        (0..model.vms.len()).filter(|i| verdicts[*i].is_none() && is_poor(&model.vms[*i], of(i)));
    let (inside, outside): (Vec<usize>, Vec<usize>) = poor.partition(|i| !model.vms[*i].outside);
    let mut deferred = Bytes::ZERO;
    let mut given = Bytes::ZERO;
    for some in [inside, outside] {
        let Some(first) = some.first() else { continue };
        let mut fund = Fund::of(&model.host, &model.vms[*first]);
        fund.outstanding += given;
        let wishes: Vec<Wish> = some.iter().map(|i| wish(model, &model.vms[*i], of(i))).collect();
        for ((i, w), g) in some.iter().zip(&wishes).zip(grant(&fund, &wishes)) {
            let vm = &model.vms[*i];
            given += g.to - w.from;
            // Others can only free what is under their own limit.
            if !vm.outside {
                deferred += g.deferred;
            }
            verdicts[*i] = Some(granted(vm, of(i), w, g));
        }
    }
    deferred
}

fn granted(vm: &VmModel, m: &VmMemory, wish: &Wish, g: Grant) -> Verdict {
    let to = round_up(g.to).min(wish.all).max(wish.from);
    let waits = match g.deferred {
        Bytes(0) => String::new(),
        d => format!("; {d} more when others have freed it"),
    };
    if m.reboot.is_some() {
        // Also where it is given nothing: an order from before the reset may be open.
        return Verdict::Set { to, reason: Reason::Rebooted };
    }
    let reason = if vm.distress.is_empty() {
        Reason::Unseen { why: vm.unseen.clone() }
    } else {
        Reason::GuestShort { signs: format!("{}{waits}", vm.distress) }
    };
    match m.order {
        // It is on its way up already, as far as it would be sent.
        Some(o) if o.to >= to => Verdict::Hold(format!("{reason}: growing to {}", o.to)),
        _ => Verdict::Set { to, reason },
    }
}

/// What a guest in distress is to have.
fn wish(model: &Model, vm: &VmModel, m: &VmMemory) -> Wish {
    let actual = vm.actual.unwrap_or(vm.ceiling);
    let from = m.order.map_or(actual, |o| o.to.max(actual));
    let weight = vm.weight;
    if m.reboot.is_some() {
        // The new kernel's need is not known: what is owed, as far as there is some.
        let all = if m.resets_often(model.at) { from } else { vm.whole.max(from) };
        let urgent = (from + LEAST_GIFT).min(all);
        return Wish { from, urgent, well: urgent, comfort: all, all, weight };
    }
    if vm.distress.is_empty() {
        // It may need nothing: no other guest is squeezed for it.
        let all = vm.whole.max(from);
        return Wish { from, urgent: from, well: from, comfort: all, all, weight };
    }
    let again = m.last_give.is_some_and(|t| model.at.since(t) < GIFT_AGAIN_MS);
    let ram = vm.ram.unwrap_or(vm.ceiling);
    // One gift a word: it has not answered yet what it was given since it spoke.
    let age_ms = vm.guest.map_or(0, |g| g.age_ms);
    let before = m.last_give.is_some_and(|t| model.at.since(t) <= age_ms);
    let spoke = m.stats.map_or(actual, |(_, size, _)| size.min(actual));
    let mut urgent = if before { spoke } else { actual } + LEAST_GIFT;
    let mut well = urgent;
    if let Some(g) = &vm.guest {
        let ahead = g.soon() - g.need;
        urgent = urgent.max(g.soon() + g.short_mark.share(2.0));
        well = urgent.max(g.working_set + g.buffer + g.buffer + ahead);
        // One that is short, and not only about to be, cannot wait for others.
        let helped = m.helped_itself.is_some_and(|t| model.at.since(t) < HELP_LIFE_MS);
        if helped || g.available < g.short_mark {
            urgent = well;
        }
    }
    if again {
        well = vm.ceiling;
    }
    let more = actual + vm.owed.share(0.5).max(ram.share(0.25));
    // What is given beyond need on a hard host is taken from others, or from it again.
    let comfort = if model.host.state > Pressure::Soft { well } else { well.max(more) };
    Wish {
        from,
        urgent: urgent.min(vm.ceiling),
        well: well.min(vm.ceiling),
        comfort: comfort.min(vm.ceiling),
        // Beyond what it needs, no more than the size that others gave it.
        all: well.max(vm.whole).max(comfort).min(vm.ceiling),
        weight,
    }
}

fn above_ceiling(model: &Model, vm: &VmModel, m: &VmMemory, actual: Bytes) -> Option<Verdict> {
    let g = vm.guest.as_ref()?;
    let base = base(m, actual);
    let keep = keep(vm, g, m, &force(Pressure::Soft)).max(vm.ceiling);
    let most = step(vm, m, model, &force(Pressure::Soft)).min(base - keep);
    (most > Bytes::ZERO && !busy(m, actual, most))
        .then(|| Verdict::Set { to: round_up(base - most), reason: Reason::AboveCeiling })
}

/// The operator wants idle memory now: no step limit, no hold, but every guest
/// keeps its need and its full buffer. Guests whose agent recycles are left to it.
fn on_request(model: &Model, memory: &Memory, request: &Reclaim, verdicts: &mut [Option<Verdict>]) {
    let soft = force(Pressure::Soft);
    let mut candidates: Vec<Candidate> = Vec::new();
    for (index, vm) in model.vms.iter().enumerate() {
        let known = VmMemory::default();
        let m = memory.vm(vm.id).unwrap_or(&known);
        let meant = request.means(&vm.name) && verdicts[index].is_none();
        if !meant || vm.standing != Standing::Ready || usable(vm).is_some() {
            continue;
        }
        if let Some(why) = pinned(vm) {
            verdicts[index] = Some(Verdict::Hold(why));
            continue;
        }
        let (Some(actual), Some(g)) = (vm.actual, vm.guest.as_ref()) else { continue };
        let base = base(m, actual);
        let idle = base - keep(vm, g, m, &soft);
        candidates.push(priced(vm, g, index, (base, idle, idle)));
    }
    share_out(&mut candidates, request.bytes.unwrap_or(Bytes(u64::MAX)));
    for c in candidates {
        let to = round_up(c.base - c.share);
        verdicts[c.index] = Some(if c.share < Bytes::mib(1) {
            Verdict::Hold(format!("asked for its idle memory, but has only {}", c.idle))
        } else {
            Verdict::Set { to, reason: Reason::Requested }
        });
    }
}

/// A clear host gives back what it can spare: first to those that are tight.
fn grow(model: &Model, memory: &Memory, verdicts: &mut [Option<Verdict>]) {
    let seconds = model.dt_ms.min(2000) as f64 / 1000.0;
    let surplus = model.host.surplus;
    let mut left = surplus.min(surplus.share(SURPLUS_RATE * seconds).max(LEAST_STEP));
    let mut order: Vec<usize> = (0..model.vms.len()).filter(|i| verdicts[*i].is_none()).collect();
    let slack =
        |vm: &VmModel| vm.guest.map_or(i64::MAX, |g| g.available.0 as i64 - g.buffer.0 as i64);
    order.sort_by_key(|i| (slack(&model.vms[*i]), model.vms[*i].id));
    for i in order {
        let vm = &model.vms[i];
        let m = memory.vm(vm.id);
        let (Some(actual), true) = (vm.actual, vm.owed > Bytes::ZERO) else { continue };
        if left < LEAST_STEP {
            verdicts[i] = Some(Verdict::Hold(format!(
                "{} ballooned; the host gives back slowly, others first",
                vm.owed
            )));
            continue;
        }
        if m.and_then(|m| m.order).is_some_and(|o| o.to > actual) {
            verdicts[i] = Some(Verdict::Hold("it is still growing".into()));
            continue;
        }
        let hold =
            m.and_then(|m| m.last_take).and_then(|t| GROW_HOLD_MS.checked_sub(model.at.since(t)));
        if let Some(hold) = hold {
            verdicts[i] = Some(Verdict::Hold(format!(
                "{} ballooned; given back in {} s at the earliest, unless it needs it",
                vm.owed,
                hold.div_ceil(1000)
            )));
            continue;
        }
        let gift = vm.owed.min(left);
        left = left - gift;
        let reason = Reason::HostClear { surplus };
        verdicts[i] = Some(Verdict::Set {
            to: round_up(actual + gift).min(vm.whole).min(vm.ceiling),
            reason,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Order, Peaks, Yields};
    use crate::model::{GuestModel, HostModel, Limit};
    use crate::sample::VmId;
    use crate::units::Stamp;

    const NOW: Stamp = Stamp(1_000_000);

    fn host(state: Pressure, shortage: u64, surplus: u64) -> HostModel {
        HostModel {
            state,
            stalled: state,
            shortage: Bytes::mib(shortage),
            surplus: Bytes::mib(surplus),
            headroom: Bytes::gib(2),
            known: true,
            ..HostModel::default()
        }
    }

    /// The same under one limit with 1 GiB of swap.
    fn limited(host: HostModel, headroom: u64, reserve: u64) -> HostModel {
        let (headroom, reserve) = (Bytes::mib(headroom), Bytes::mib(reserve));
        let name = "host".to_string();
        let limit = Limit { name, headroom, reserve, swap_left: Bytes::gib(1) };
        HostModel { headroom, reserve, limits: vec![limit], ..host }
    }

    /// A ready 1 GiB guest, all of it resident, floor 256 MiB.
    fn vm(pid: u32, actual: u64, available: u64) -> VmModel {
        let g = GuestModel {
            available: Bytes::mib(available),
            need: Bytes::mib(actual - available),
            working_set: Bytes::mib(actual - available),
            idle: Bytes::mib(available),
            buffer: Bytes::mib(80),
            short_mark: Bytes::mib(40),
            deflate_on_oom: true,
            ..GuestModel::default()
        };
        VmModel {
            id: VmId { pid, start: 1 },
            name: format!("vm{pid}"),
            ram: Some(Bytes::gib(1)),
            actual: Some(Bytes::mib(actual)),
            floor: Bytes::mib(256),
            ceiling: Bytes::gib(1),
            whole: Bytes::gib(1),
            owed: Bytes::gib(1) - Bytes::mib(actual),
            managed: true,
            weight: 1.0,
            resident: Some(Bytes::mib(actual)),
            guest: Some(g),
            standing: Standing::Ready,
            ..VmModel::default()
        }
    }

    fn decide(host: HostModel, vms: Vec<VmModel>, remembered: Vec<VmMemory>) -> Vec<Verdict> {
        let model = Model { at: NOW, dt_ms: 1000, host, vms };
        let memory = Memory { vms: remembered, ..Memory::default() };
        balloon(&model, &memory, &[], Bytes::ZERO).verdicts
    }

    fn remembered(pid: u32) -> VmMemory {
        VmMemory { id: VmId { pid, start: 1 }, ..VmMemory::default() }
    }

    fn size(v: &Verdict) -> Option<u64> {
        match v {
            Verdict::Set { to, .. } => Some(to.0 >> 20),
            Verdict::Hold(_) => None,
        }
    }

    #[test]
    fn a_size_that_was_just_set_by_others_is_not_set_back() {
        let mut m = remembered(1);
        let size = |m: &VmMemory, change: fn(&mut VmModel)| {
            let mut vm = vm(1, 600, 300);
            change(&mut vm);
            size(&decide(host(Pressure::Clear, 0, 4000), vec![vm], vec![m.clone()])[0])
        };
        let off = |vm: &mut VmModel| {
            (vm.managed, vm.standing) = (false, Standing::Off("manage = false".into()));
        };
        assert_eq!((size(&m, |_| ()), size(&m, off)), (Some(800), Some(1024)), "Ebb took it");
        m.ledger.suspect = true;
        assert_eq!((size(&m, |_| ()), size(&m, off)), (None, None), "it is not known who did");
        assert_eq!(size(&m, |vm| vm.unseen = "silent".into()), None);
        assert_eq!(size(&m, |vm| vm.distress = "short".into()), None, "for one tick");
    }

    #[test]
    fn who_pays_most_for_idle_memory_is_asked_first_by_weight() {
        let mut heavy = vm(3, 1024, 600);
        heavy.weight = 2.0;
        let ask = |shortage| {
            let vms = vec![vm(1, 1024, 600), vm(2, 1024, 100), heavy.clone()];
            let v = decide(host(Pressure::Soft, shortage, 0), vms, vec![]);
            [size(&v[0]), size(&v[1]), size(&v[2])]
        };
        assert_eq!(ask(40), [Some(984), None, None]);
        assert_eq!(
            ask(60),
            [Some(1024 - 51), None, Some(1024 - 16)],
            "5 % a second, 16 MiB at least"
        );
        assert_eq!(ask(500)[1], Some(1024 - 20), "has hardly anything idle");
    }

    #[test]
    fn a_step_is_bounded_by_state_and_never_crosses_need_or_floor() {
        for (state, step) in
            [(Pressure::Soft, 51), (Pressure::Hard, 128), (Pressure::Critical, 256)]
        {
            let v = decide(host(state, 4000, 0), vec![vm(1, 1024, 900)], vec![]);
            assert_eq!(size(&v[0]), Some(1024 - step), "{state}");
        }
        let v = decide(host(Pressure::Critical, 4000, 0), vec![vm(1, 1024, 100)], vec![]);
        assert_eq!(size(&v[0]), Some(1024 - 100 + 60), "need and 1.5 short marks stay");
        let v = decide(host(Pressure::Critical, 4000, 0), vec![vm(1, 300, 290)], vec![]);
        assert_eq!(size(&v[0]), Some(256), "floor");
        let v = decide(host(Pressure::Critical, 4000, 0), vec![vm(1, 256, 250)], vec![]);
        assert_eq!(size(&v[0]), None, "at its floor");
    }

    #[test]
    fn a_guest_in_distress_is_given_at_once_whatever_the_hosts_state() {
        for (state, to) in [
            (Pressure::Clear, 1024),
            (Pressure::Soft, 1024),
            (Pressure::Hard, 540),
            (Pressure::Critical, 540),
        ] {
            let mut poor = vm(1, 400, 20);
            poor.distress = "20 MiB available".into();
            let v = decide(host(state, 500, 0), vec![poor, vm(2, 1024, 900)], vec![]);
            assert_eq!(size(&v[0]), Some(to), "{state}: all, or its need and two buffers");
            assert!(matches!(&v[0], Verdict::Set { reason: Reason::GuestShort { .. }, .. }));
        }
        let mut poor = vm(1, 400, 20);
        poor.distress = "still".into();
        let m = VmMemory { last_give: Some(Stamp(NOW.0 - 1000)), ..remembered(1) };
        let v = decide(host(Pressure::Critical, 500, 0), vec![poor], vec![m]);
        assert_eq!(size(&v[0]), Some(1024), "short again: everything");
    }

    #[test]
    fn what_headroom_does_not_cover_waits_until_others_have_freed_it() {
        let mut poor = vm(1, 400, 50);
        poor.distress = "50 MiB available, need grows".into();
        let at = |headroom| {
            let h = limited(host(Pressure::Clear, 0, 0), headroom, 400);
            let model =
                Model { at: NOW, dt_ms: 1000, host: h, vms: vec![poor.clone(), vm(2, 1024, 900)] };
            balloon(&model, &Memory::default(), &[], Bytes::ZERO)
        };
        // Urgent: need 350 and two short marks, or 64 MiB more; well: 350 and two buffers.
        let none = at(0);
        assert_eq!(size(&none.verdicts[0]), Some(464), "kept from harm at once");
        assert_eq!(none.deferred, Bytes::mib(510 - 464));
        let to = size(&none.verdicts[1]).unwrap();
        assert!(to < 1024, "the idle are asked though the host is clear");
        let Verdict::Set { reason: Reason::GuestShort { signs }, .. } = &none.verdicts[0] else {
            panic!("{none:?}")
        };
        assert!(signs.contains("46 MiB more when others have freed it"), "{signs}");
        // One that is short already does not wait.
        let mut short = poor.clone();
        short.guest = vm(1, 400, 20).guest;
        let h = limited(host(Pressure::Critical, 500, 0), 0, 400);
        assert_eq!(size(&decide(h, vec![short], vec![])[0]), Some(540), "need and two buffers");
        // What they freed shows up as headroom: then it is granted.
        let some = at(200);
        assert_eq!(size(&some.verdicts[0]), Some(500), "200 less the mark of critical, 100");
        let enough = at(2000);
        assert_eq!((size(&enough.verdicts[0]), enough.deferred), (Some(1024), Bytes::ZERO));
        assert_eq!(size(&enough.verdicts[1]), None, "nobody is asked in vain");
    }

    #[test]
    fn who_was_turned_around_is_not_turned_again_within_a_minute() {
        let m = |turned| VmMemory {
            last_give: Some(Stamp(NOW.0 - 9_000)),
            last_take: Some(Stamp(NOW.0 - 20_000)),
            turned: Some(Stamp(NOW.0 - turned)),
            ..remembered(1)
        };
        let ask = |state, m| size(&decide(host(state, 500, 0), vec![vm(1, 1024, 900)], vec![m])[0]);
        assert_eq!(ask(Pressure::Hard, m(30_000)), None);
        assert!(ask(Pressure::Hard, m(70_000)).is_some());
        assert!(ask(Pressure::Critical, m(30_000)).is_some());
    }

    #[test]
    fn doubted_guests_are_asked_gently_and_followers_faster() {
        let ask = |level, pace| {
            let mut one = vm(1, 1024, 900);
            one.trust.level = level;
            let m = VmMemory { pace, ..remembered(1) };
            let v = decide(host(Pressure::Soft, 4000, 0), vec![one], vec![m]);
            1024 - size(&v[0]).unwrap()
        };
        assert_eq!((ask(1.0, 0), ask(0.5, 0), ask(1.0, 1), ask(1.0, 2)), (51, 25, 102, 204));
    }

    #[test]
    fn what_a_slow_or_stuck_guest_does_not_bring_others_are_asked_for() {
        let ask = |still_ms, rate| {
            let order = Order {
                to: Bytes::mib(600),
                moved_from: Bytes::mib(1024),
                moved_at: Stamp(NOW.0 - still_ms),
                still_ms,
                since: Stamp(NOW.0 - 4_000),
            };
            let m = VmMemory { order: Some(order), rate, ..remembered(1) };
            let vms = vec![vm(1, 1024, 900), vm(2, 1024, 900)];
            size(&decide(host(Pressure::Critical, 400, 0), vms, vec![m])[1])
        };
        assert_eq!(ask(0, 1e9), None, "424 MiB are on their way");
        assert_eq!(ask(0, (20 << 20) as f64), Some(768), "100 of them within five seconds");
        assert_eq!(ask(3_000, 1e9), Some(768), "none");
    }

    /// Three guests that need 424 MiB and needed 900 within the last minute.
    fn asked_of_three(host: &HostModel, resident: u64) -> u64 {
        let vms: Vec<VmModel> = (1..4)
            .map(|pid| VmModel { resident: Some(Bytes::mib(resident)), ..vm(pid, 1024, 600) })
            .collect();
        let peaks = Peaks { at: NOW, slow: Bytes::mib(900), ..Peaks::default() };
        let remembered = (1..4).map(|pid| VmMemory { peaks, ..remembered(pid) }).collect();
        let verdicts = decide(host.clone(), vms, remembered);
        verdicts.iter().filter_map(size).map(|to| 1024 - to).sum()
    }

    #[test]
    fn what_was_wanted_lately_is_taken_no_further_than_out_of_the_state() {
        let at = |state, headroom, stalled| HostModel {
            headroom: Bytes::mib(headroom),
            reserve: Bytes::mib(1000),
            stalled,
            ..host(state, 800, 0)
        };
        let near = |asked: u64, mib: u64| assert!(asked.abs_diff(mib) <= 3, "{asked}, not {mib}");
        let ask = |host| asked_of_three(&host, 1024);
        near(ask(at(Pressure::Soft, 900, Pressure::Clear)), 3 * 44);
        // Hard is left at 650, critical at 400; 3 · 44 are idle in any case.
        near(ask(at(Pressure::Hard, 400, Pressure::Clear)), 250);
        near(ask(at(Pressure::Hard, 600, Pressure::Clear)), 3 * 44);
        near(ask(at(Pressure::Critical, 100, Pressure::Clear)), 550);
        // Where tasks stall it is all that is missing, in steps.
        near(ask(at(Pressure::Hard, 400, Pressure::Hard)), 3 * 128);
        near(ask(at(Pressure::Critical, 100, Pressure::Critical)), 3 * 256);
    }

    #[test]
    fn what_was_wanted_lately_is_left_where_the_host_does_not_hold_it() {
        let short = host(Pressure::Hard, 800, 0);
        assert_eq!(asked_of_three(&short, 1024), 3 * 128);
        assert_eq!(asked_of_three(&short, 480), 3 * 44, "484 are kept");
        assert_eq!(asked_of_three(&short, 560), 3 * (44 + 76), "76 of it are there to be had");
    }

    #[test]
    fn a_guest_whose_need_grows_keeps_what_it_will_need_in_a_moment() {
        let ask = |growth: u64| {
            let mut grows = vm(1, 1024, 500);
            let need = Bytes::mib(growth).0 as f64;
            let rates = crate::memory::GuestRates { need, ..Default::default() };
            grows.guest.as_mut().unwrap().rates = Some(rates);
            size(&decide(host(Pressure::Critical, 4000, 0), vec![grows], vec![])[0])
        };
        assert_eq!(ask(0), Some(768));
        assert_eq!(ask(180), Some(524 + 360 + 60), "for two seconds");
    }

    #[test]
    fn a_word_from_before_a_gift_brings_no_second_one() {
        let ask = |age_ms| {
            let mut poor = vm(1, 400, 60);
            poor.distress = "need grows".into();
            poor.guest.as_mut().unwrap().age_ms = age_ms;
            // It spoke at 300 MiB.
            let words = (NOW, Bytes::mib(300), crate::sample::GuestStats::default());
            let last_give = Some(Stamp(NOW.0 - 500));
            let m = VmMemory { last_give, stats: Some(words), ..remembered(1) };
            let short = limited(host(Pressure::Critical, 500, 0), 0, 0);
            poor.guest.as_mut().unwrap().need = Bytes::mib(280);
            size(&decide(short, vec![poor], vec![m])[0])
        };
        assert_eq!(ask(200), Some(464), "64 more than it has");
        assert_eq!(ask(900), Some(400), "it has more than it would have been given");
    }

    #[test]
    fn who_brings_nothing_is_not_asked() {
        let pinned = VmModel { pinned: Some("a VFIO device pins it".into()), ..vm(1, 1024, 900) };
        let vms = || vec![pinned.clone(), vm(2, 1024, 900)];
        let v = decide(host(Pressure::Critical, 400, 0), vms(), vec![]);
        assert_eq!((size(&v[0]), size(&v[1])), (None, Some(768)), "nothing is expected of it");
        assert_eq!(
            v[0],
            Verdict::Hold("ballooning it frees nothing: a VFIO device pins it".into())
        );
        let model = Model { at: NOW, dt_ms: 1000, host: host(Pressure::Clear, 0, 0), vms: vms() };
        let v = balloon(&model, &Memory::default(), &[Reclaim::default()], Bytes::ZERO).verdicts;
        assert!(size(&v[0]).is_none() && size(&v[1]).is_some(), "nor by the operator");
        let yields = Yields { barren_until: Some(NOW.plus(120_000)), ..Yields::default() };
        let m = VmMemory { yields, ..remembered(1) };
        let v = decide(host(Pressure::Critical, 400, 0), vec![vm(1, 1024, 900)], vec![m]);
        let Verdict::Hold(why) = &v[0] else { panic!("{v:?}") };
        assert!(why.contains("had nothing of it: asked again in 2 min"), "{why}");
    }

    #[test]
    fn a_reset_brings_what_headroom_allows_and_often_nothing_more() {
        let ask = |headroom, resets| {
            let vm = VmModel { standing: Standing::GiveOnly("rebooted".into()), ..vm(1, 400, 300) };
            let (reboot, reset_at) = (Some(Reboot::default()), Some(NOW));
            let m = VmMemory { reboot, resets, reset_at, ..remembered(1) };
            let host = limited(host(Pressure::Soft, 500, 0), headroom, 200);
            size(&decide(host, vec![vm], vec![m])[0])
        };
        assert_eq!(ask(2000, 1), Some(1024));
        assert_eq!(ask(350, 1), Some(400 + 300), "down to the mark of critical");
        assert_eq!(ask(0, 1), Some(400 + 64), "swap is there for so much");
        assert_eq!(ask(2000, 3), Some(400), "it resets again and again");
    }

    #[test]
    fn what_others_ordered_is_not_given_back_by_a_clear_host() {
        let theirs = VmModel { whole: Bytes::mib(700), owed: Bytes::ZERO, ..vm(1, 700, 500) };
        let v = decide(host(Pressure::Clear, 0, 1000), vec![theirs.clone()], vec![]);
        assert_eq!(v[0], Verdict::Hold("host is clear, nothing is owed to it".into()));
        let mut short = VmModel { distress: "short".into(), ..theirs };
        short.guest.as_mut().unwrap().available = Bytes::mib(10);
        let v = decide(limited(host(Pressure::Clear, 0, 0), 4000, 100), vec![short], vec![]);
        assert!(size(&v[0]).is_some_and(|to| to > 900), "what it needs it is given: {v:?}");
    }

    #[test]
    fn a_ceiling_holds_for_a_guest_in_distress_too() {
        let mut short = VmModel { distress: "short".into(), ..vm(1, 500, 10) };
        short.guest.as_mut().unwrap().need = Bytes::mib(900);
        let ask = |ceiling| {
            let one = VmModel { ceiling: Bytes::mib(ceiling), ..short.clone() };
            size(&decide(limited(host(Pressure::Clear, 0, 0), 4000, 100), vec![one], vec![])[0])
        };
        assert_eq!((ask(600), ask(500)), (Some(600), None));
        assert!(ask(1024) > Some(900));
    }

    #[test]
    fn who_is_not_managed_any_more_has_what_was_taken_returned() {
        let off = Standing::Off("manage = false in the configuration".into());
        let one = VmModel { managed: false, standing: off, ..vm(1, 400, 300) };
        let v = decide(host(Pressure::Critical, 500, 0), vec![one.clone()], vec![]);
        assert_eq!(v[0], Verdict::Set { to: Bytes::gib(1), reason: Reason::Returned });
        let v = decide(
            host(Pressure::Critical, 500, 0),
            vec![VmModel { owed: Bytes::ZERO, ..one }],
            vec![],
        );
        assert!(size(&v[0]).is_none());
    }

    #[test]
    fn rungs_above_are_waited_for() {
        let v = |above| {
            let model = Model {
                at: NOW,
                dt_ms: 1000,
                host: host(Pressure::Critical, 200, 0),
                vms: vec![vm(1, 1024, 900)],
            };
            size(&balloon(&model, &Memory::default(), &[], Bytes::mib(above)).verdicts[0])
        };
        assert_eq!((v(0), v(150), v(300)), (Some(824), Some(974), None));
    }

    #[test]
    fn who_was_given_memory_is_left_alone_for_a_while() {
        let m = VmMemory { last_give: Some(Stamp(NOW.0 - 5_000)), ..remembered(1) };
        let held = |state| decide(host(state, 500, 0), vec![vm(1, 1024, 900)], vec![m.clone()]);
        assert_eq!(size(&held(Pressure::Soft)[0]), None);
        assert_eq!(size(&held(Pressure::Hard)[0]), None);
        assert!(size(&held(Pressure::Critical)[0]).is_some());
    }

    #[test]
    fn what_a_guest_needed_lately_is_left_to_it_unless_the_host_is_critical() {
        let peaks = Peaks { at: NOW, slow: Bytes::mib(800), fast: Bytes::mib(500) };
        let m = VmMemory { peaks, ..remembered(1) };
        let ask = |state| {
            let v = decide(host(state, 4000, 0), vec![vm(1, 700, 400)], vec![m.clone()]);
            size(&v[0])
        };
        assert_eq!(ask(Pressure::Soft), None, "800 MiB within the last minute");
        assert_eq!(ask(Pressure::Hard), Some(700 - 128), "500 MiB within ten seconds, and buffer");
        assert_eq!(ask(Pressure::Critical), Some(700 - 256));
    }

    #[test]
    fn an_order_that_moves_nothing_is_withdrawn_and_one_under_way_is_waited_for() {
        let order = |to, age| VmMemory {
            order: Some(Order {
                to: Bytes::mib(to),
                moved_from: Bytes::mib(1024),
                moved_at: Stamp(NOW.0 - age),
                still_ms: age,
                since: Stamp(NOW.0 - age),
            }),
            ..remembered(1)
        };
        let ask = |m| decide(host(Pressure::Soft, 500, 0), vec![vm(1, 1024, 900)], vec![m]);
        let v = ask(order(900, 11_000));
        assert_eq!(v[0], Verdict::Set { to: Bytes::mib(1024), reason: Reason::Withdrawn });
        assert_eq!(size(&ask(order(900, 1_000))[0]), None, "still shrinking");
        assert_eq!(size(&ask(order(1010, 1_000))[0]), Some(1010 - 51), "nearly there");
    }

    #[test]
    fn a_clear_host_gives_back_slowly_and_first_to_the_tight() {
        let vms = vec![vm(1, 700, 500), vm(2, 700, 60)];
        let v = decide(host(Pressure::Clear, 0, 1000), vms, vec![]);
        assert_eq!((size(&v[0]), size(&v[1])), (None, Some(750)));
        let m = VmMemory { last_take: Some(Stamp(NOW.0 - 30_000)), ..remembered(2) };
        let v = decide(host(Pressure::Clear, 0, 1000), vec![vm(2, 700, 60)], vec![m]);
        assert_eq!(size(&v[0]), None, "shrunk half a minute ago");
        let v = decide(host(Pressure::Clear, 0, 0), vec![vm(1, 700, 60)], vec![]);
        assert_eq!(size(&v[0]), None, "no surplus");
    }

    #[test]
    fn after_a_reboot_everything_is_returned_and_qemus_stale_size_refreshed() {
        let fresh = |actual| {
            let mut fresh = vm(1, actual, 300);
            fresh.standing = Standing::GiveOnly("rebooted".into());
            fresh
        };
        let ask = |r: Reboot, actual| {
            let m = VmMemory { reboot: Some(r), ..remembered(1) };
            decide(host(Pressure::Critical, 500, 0), vec![fresh(actual)], vec![m]).remove(0)
        };
        let all = Verdict::Set { to: Bytes::gib(1), reason: Reason::Rebooted };
        let mut r = Reboot::default();
        assert_eq!(ask(r, 1024), all, "even where QEMU shows all: an order may be open");
        (r.given, r.to) = (Some(Stamp(NOW.0 - 5_000)), Some(Bytes::gib(1)));
        assert_eq!(size(&ask(r, 400)), None, "the new kernel has not spoken");
        r.speaks = true;
        let nudge = Verdict::Set { to: Bytes::mib(1023), reason: Reason::Refresh };
        assert_eq!(ask(r, 400), nudge);
        r.nudged = Some(NOW);
        assert_eq!(size(&ask(r, 400)), None, "on its way");
        assert_eq!(ask(r, 1023), all);
    }

    #[test]
    fn what_is_free_already_is_recycled_before_a_guest_is_ballooned() {
        let agent = |held, busy| crate::sample::AgentSample {
            link: crate::sample::Link::Up,
            state: crate::wire::AgentState::Ready,
            held: Some(Bytes::mib(held)),
            busy,
            ..Default::default()
        };
        let ask = |agent| {
            let vm = VmModel { agent: Some(agent), ..vm(1, 1024, 900) };
            size(&decide(host(Pressure::Critical, 500, 0), vec![vm], vec![])[0])
        };
        assert_eq!(ask(agent(100, false)), None);
        assert_eq!(ask(agent(0, true)), None);
        assert_eq!(ask(agent(5, false)), Some(768));
    }

    #[test]
    fn a_request_takes_all_idle_memory_at_once_or_just_so_much() {
        let ask = |request: Reclaim| {
            let host = host(Pressure::Clear, 0, 0);
            let model =
                Model { at: NOW, dt_ms: 1000, host, vms: vec![vm(1, 1024, 624), vm(2, 1024, 224)] };
            let verdicts = balloon(&model, &Memory::default(), &[request], Bytes::ZERO).verdicts;
            (size(&verdicts[0]), size(&verdicts[1]))
        };
        assert_eq!(ask(Reclaim::default()), (Some(480), Some(880)), "need and a full buffer stay");
        let one = Reclaim { vm: Some("vm2".into()), bytes: None };
        assert_eq!(ask(one), (None, Some(880)));
        let some = Reclaim { vm: None, bytes: Some(Bytes::mib(172)) };
        assert_eq!(ask(some), (Some(1024 - 172), None), "from who pays most for it");
    }

    /// What was ordered before would go on for as long as the guest takes.
    #[test]
    fn an_order_to_shrink_ends_where_the_vm_is_to_be_left_alone() {
        let mut one = vm(1, 800, 300);
        one.hands_off = Some(crate::sample::HandsOff { left_ms: 1000, done: false });
        one.standing = Standing::GiveOnly("hands off".into());
        let at = Stamp(1000);
        let moves = |to: u64| crate::memory::Order {
            to: Bytes::mib(to),
            moved_from: Bytes::mib(900),
            moved_at: at,
            still_ms: 0,
            since: at,
        };
        let ordered = |to| {
            let mut m = remembered(1);
            m.order = Some(moves(to));
            decide(host(Pressure::Hard, 500, 0), vec![one.clone()], vec![m]).remove(0)
        };
        let to = Bytes::mib(800);
        assert_eq!(ordered(500), Verdict::Set { to, reason: Reason::HandsOff });
        assert_ne!(ordered(1000), Verdict::Set { to, reason: Reason::HandsOff }, "it grows");
    }

    #[test]
    fn hands_off_means_hands_off() {
        let mut gone = vm(1, 400, 10);
        gone.distress = "short".into();
        gone.standing = Standing::Off("migrating".into());
        let v = decide(host(Pressure::Critical, 500, 0), vec![gone], vec![]);
        assert_eq!(v[0], Verdict::Hold("migrating".into()));
    }
}
