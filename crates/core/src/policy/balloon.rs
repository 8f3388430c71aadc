//! Ballooning, both ways.
//!
//! Taking: while the host is short of its reserve, guests with idle memory give
//! in proportion to `idle / weight` (idle memory that the host really holds counts
//! in full, the rest a tenth), in bounded steps, only when they followed
//! the step before, and never below floor or need + buffer. Giving: at once and
//! before everything else when a guest shows distress or reboots, whatever the
//! host's state; gently when the host is clear. Holds keep the two apart: one
//! who was given memory is not asked for some time.

use crate::memory::{Memory, Peaks, Reboot, VmMemory};
use crate::model::{GuestModel, Model, Pressure, Standing, VmModel};
use crate::plan::{Reason, Reclaim};
use crate::policy::Verdict;
use crate::policy::recycle::usable;
use crate::units::Bytes;

/// Shrinks below this are left for a larger one.
const LEAST_STEP: Bytes = Bytes::mib(16);
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

/// How hard each state takes: share of RAM a second, share of the guest's buffer
/// that is left to it, how long one that was given memory is left alone, and which
/// of its recent peaks of need it keeps: one that needed memory a moment ago may
/// need it again.
struct Force {
    step: f64,
    buffer: f64,
    hold_ms: u64,
    recent: fn(&Peaks) -> Bytes,
}

fn force(state: Pressure) -> Force {
    match state {
        Pressure::Clear => Force { step: 0.0, buffer: 1.0, hold_ms: u64::MAX, recent: |p| p.slow },
        Pressure::Soft => Force { step: 0.05, buffer: 1.0, hold_ms: 60_000, recent: |p| p.slow },
        Pressure::Hard => Force { step: 0.125, buffer: 0.5, hold_ms: 8_000, recent: |p| p.fast },
        Pressure::Critical => {
            Force { step: 0.25, buffer: 0.25, hold_ms: 4_000, recent: |_| Bytes::ZERO }
        }
    }
}

/// A verdict for each VM of the model, in its order.
pub fn balloon(model: &Model, memory: &Memory, requests: &[Reclaim]) -> Vec<Verdict> {
    let mut verdicts: Vec<Option<Verdict>> = model
        .vms
        .iter()
        .map(|vm| own_case(model, vm, memory.vm(vm.id).unwrap_or(&VmMemory::default())))
        .collect();
    for request in requests {
        on_request(model, memory, request, &mut verdicts);
    }
    if model.host.state > Pressure::Clear {
        take(model, memory, &mut verdicts);
    } else if model.host.known {
        grow(model, memory, &mut verdicts);
    }
    verdicts
        .into_iter()
        .zip(&model.vms)
        .map(|(v, vm)| v.unwrap_or_else(|| Verdict::Hold(nothing_to_do(model, vm))))
        .collect()
}

fn nothing_to_do(model: &Model, vm: &VmModel) -> String {
    match (&vm.standing, model.host.state, vm.held()) {
        (Standing::Ready, Pressure::Clear, Bytes(0)) => {
            "host is clear, guest has all it may".into()
        }
        (Standing::Ready, state, held) => format!("host is {state}, {held} of it are ballooned"),
        (other, ..) => other.why().to_string(),
    }
}

/// What a VM's own state demands, before the host is asked.
fn own_case(model: &Model, vm: &VmModel, m: &VmMemory) -> Option<Verdict> {
    let actual = vm.actual?;
    match &vm.standing {
        Standing::Off(_) | Standing::Unknown => {
            return Some(Verdict::Hold(vm.standing.why().to_string()));
        }
        Standing::Ready | Standing::GiveOnly(_) => {}
    }
    if let Some(r) = m.reboot {
        return Some(after_reboot(model, vm, r, actual));
    }
    if !vm.distress.is_empty() && actual < vm.ceiling {
        return Some(relieve(model, vm, m, actual));
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

/// Everything at once; when the new kernel speaks and QEMU still shows the old
/// size, one MiB down and up again.
fn after_reboot(model: &Model, vm: &VmModel, r: Reboot, actual: Bytes) -> Verdict {
    let nudge = vm.ceiling - Bytes::mib(1);
    let all = Verdict::Set { to: vm.ceiling, reason: Reason::Rebooted };
    match (r.given, r.nudged) {
        (None, _) => all,
        (_, Some(_)) if actual == nudge => all,
        (Some(given), None) if r.speaks && model.at.since(given) >= REFRESH_MS => {
            Verdict::Set { to: nudge, reason: Reason::Refresh }
        }
        _ => Verdict::Hold("it rebooted: its size is not known yet".into()),
    }
}

fn relieve(model: &Model, vm: &VmModel, m: &VmMemory, actual: Bytes) -> Verdict {
    let again = m.last_give.is_some_and(|t| model.at.since(t) < GIFT_AGAIN_MS);
    let wish = vm.guest.map_or(Bytes::ZERO, |g| (g.need + g.buffer + g.buffer) - actual);
    let ram = vm.ram.unwrap_or(vm.ceiling);
    let gift = wish.max(vm.held().share(0.5)).max(ram.share(0.25)).max(LEAST_GIFT);
    let to = if again { vm.ceiling } else { round_up(actual + gift).min(vm.ceiling) };
    match m.order {
        // It is on its way up already, as far as we would send it.
        Some(o) if o.to >= to => Verdict::Hold(format!("{}: growing to {}", vm.distress, o.to)),
        _ => Verdict::Set { to, reason: Reason::GuestShort { signs: vm.distress.clone() } },
    }
}

fn above_ceiling(model: &Model, vm: &VmModel, m: &VmMemory, actual: Bytes) -> Option<Verdict> {
    let g = vm.guest.as_ref()?;
    let base = base(m, actual);
    let keep = keep(vm, g, m, &force(Pressure::Soft)).max(vm.ceiling);
    let most = step(vm, model, &force(Pressure::Soft)).min(base - keep);
    (most > Bytes::ZERO && !busy(m, actual, most))
        .then(|| Verdict::Set { to: round_up(base - most), reason: Reason::AboveCeiling })
}

/// The operator wants idle memory now: no step limit, no hold, but every guest
/// keeps its need and its full buffer. Guests whose agent recycles are left to it.
fn on_request(model: &Model, memory: &Memory, request: &Reclaim, verdicts: &mut [Option<Verdict>]) {
    let soft = force(Pressure::Soft);
    let mut candidates = Vec::new();
    for (index, vm) in model.vms.iter().enumerate() {
        let known = VmMemory::default();
        let m = memory.vm(vm.id).unwrap_or(&known);
        let meant = request.means(&vm.name) && verdicts[index].is_none();
        if !meant || vm.standing != Standing::Ready || usable(vm).is_some() {
            continue;
        }
        let (Some(actual), Some(g)) = (vm.actual, vm.guest.as_ref()) else { continue };
        let base = base(m, actual);
        let idle = base - keep(vm, g, m, &soft);
        let pull = idle.0 as f64 / vm.weight.max(0.001);
        candidates.push(Candidate { index, base, idle, most: idle, pull, share: Bytes::ZERO });
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

/// A VM that can be asked, and for how much.
struct Candidate {
    index: usize,
    base: Bytes,
    idle: Bytes,
    most: Bytes,
    pull: f64,
    share: Bytes,
}

/// Collects the host's shortage from those that have idle memory.
fn take(model: &Model, memory: &Memory, verdicts: &mut [Option<Verdict>]) {
    let force = force(model.host.state);
    let mut pending = Bytes::ZERO;
    let mut candidates = Vec::new();
    for (index, vm) in model.vms.iter().enumerate() {
        let m = memory.vm(vm.id);
        if let (Some(o), Some(actual)) = (m.and_then(|m| m.order), vm.actual) {
            pending += actual - o.to;
        }
        if verdicts[index].is_some() {
            continue;
        }
        match candidate(model, vm, m.unwrap_or(&VmMemory::default()), index, &force) {
            Ok(c) => candidates.push(c),
            Err(why) => verdicts[index] = Some(Verdict::Hold(why)),
        }
    }
    // A little beyond the mark, so that the host also leaves the state.
    let missing = (model.host.shortage + model.host.reserve.share(0.05)) - pending;
    share_out(&mut candidates, missing);
    for c in candidates {
        let to = round_up(c.base - c.share);
        verdicts[c.index] = Some(if c.share < Bytes::mib(1) || to >= c.base {
            Verdict::Hold(format!("{} idle, but others cover what the host lacks", c.idle))
        } else {
            let shortage = model.host.shortage;
            Verdict::Set {
                to,
                reason: Reason::HostShort { state: model.host.state, shortage, idle: c.idle },
            }
        });
    }
}

fn candidate(
    model: &Model,
    vm: &VmModel,
    m: &VmMemory,
    index: usize,
    force: &Force,
) -> Result<Candidate, String> {
    if vm.standing != Standing::Ready {
        return Err(vm.standing.why().to_string());
    }
    let (Some(actual), Some(g)) = (vm.actual, vm.guest.as_ref()) else {
        return Err("its guest's need is not known".into());
    };
    if let Some(left) = m.last_give.and_then(|t| force.hold_ms.checked_sub(model.at.since(t))) {
        return Err(format!("it was given memory: left alone for {} s", left.div_ceil(1000)));
    }
    // The ladder: what is free already goes first, and never both at a time.
    if let Some(agent) = usable(vm) {
        let held = agent.held.unwrap_or_default();
        if agent.busy || held >= LEAST_STEP {
            return Err(format!("{held} that it has freed are recycled first"));
        }
    }
    let base = base(m, actual);
    let keep = keep(vm, g, m, force);
    if base <= vm.floor {
        return Err(format!("it is at its floor of {}", vm.floor));
    }
    let idle = base - keep;
    if idle < Bytes::mib(4) {
        return Err(format!("{} available, nothing of it idle", g.available));
    }
    let most = step(vm, model, force).min(idle);
    // What is idle but not resident brings the host nothing now.
    let gain = vm.resident.map_or(idle, |r| (r - g.need).min(idle));
    let worth = gain + idle.share(0.1);
    if busy(m, actual, most) {
        return Err(format!("it is still shrinking to {base}"));
    }
    Ok(Candidate {
        index,
        base,
        idle,
        most,
        pull: worth.0 as f64 / vm.weight.max(0.001),
        share: Bytes::ZERO,
    })
}

/// The size the next step starts from: what it was last told, if that is less.
fn base(m: &VmMemory, actual: Bytes) -> Bytes {
    m.order.map_or(actual, |o| o.to.min(actual))
}

/// Whether the step before is still far from done.
fn busy(m: &VmMemory, actual: Bytes, step: Bytes) -> bool {
    m.order.is_some_and(|o| actual - o.to > step.share(0.5).max(LEAST_STEP))
}

/// What a guest keeps in any case: floor, or need and buffer, and always so much
/// that the taking itself does not make it short.
fn keep(vm: &VmModel, g: &GuestModel, m: &VmMemory, force: &Force) -> Bytes {
    let part = if g.deflate_on_oom { force.buffer } else { force.buffer.max(0.5) };
    let buffer = g.buffer.share(part).max(g.short_mark.share(1.5));
    vm.floor.max(g.need.max((force.recent)(&m.peaks)) + buffer)
}

/// The largest step for one tick.
fn step(vm: &VmModel, model: &Model, force: &Force) -> Bytes {
    // A late tick does not take more: what it saw is old.
    let seconds = model.dt_ms.clamp(100, 2000) as f64 / 1000.0;
    vm.ram.unwrap_or_default().share(force.step * seconds).max(LEAST_STEP)
}

/// Water-filling: each gives in proportion to its pull, none more than it can,
/// what the capped ones cannot give falls to the others.
fn share_out(candidates: &mut [Candidate], mut missing: Bytes) {
    for _ in 0..8 {
        let pull: f64 = candidates.iter().filter(|c| c.share < c.most).map(|c| c.pull).sum();
        if pull <= 0.0 || missing < Bytes::mib(1) {
            return;
        }
        let round = missing;
        for c in candidates.iter_mut().filter(|c| c.share < c.most) {
            let part = round.share(c.pull / pull).min(c.most - c.share);
            c.share += part;
            missing = missing - part;
        }
    }
}

/// A clear host gives back what it can spare: first to those that are tight.
fn grow(model: &Model, memory: &Memory, verdicts: &mut [Option<Verdict>]) {
    let seconds = model.dt_ms.clamp(100, 2000) as f64 / 1000.0;
    let surplus = model.host.surplus;
    let mut left = surplus.min(surplus.share(SURPLUS_RATE * seconds).max(LEAST_STEP));
    let mut order: Vec<usize> = (0..model.vms.len()).filter(|i| verdicts[*i].is_none()).collect();
    let slack =
        |vm: &VmModel| vm.guest.map_or(i64::MAX, |g| g.available.0 as i64 - g.buffer.0 as i64);
    order.sort_by_key(|i| (slack(&model.vms[*i]), model.vms[*i].id));
    for i in order {
        let vm = &model.vms[i];
        let m = memory.vm(vm.id);
        let (Some(actual), true) = (vm.actual, vm.held() > Bytes::ZERO) else { continue };
        if left < LEAST_STEP {
            verdicts[i] = Some(Verdict::Hold(format!(
                "{} ballooned; the host gives back slowly, others first",
                vm.held()
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
                vm.held(),
                hold.div_ceil(1000)
            )));
            continue;
        }
        let gift = vm.held().min(left);
        left = left - gift;
        let reason = Reason::HostClear { surplus };
        verdicts[i] = Some(Verdict::Set { to: round_up(actual + gift).min(vm.ceiling), reason });
    }
}

/// Balloons are set in whole MiB; up, so that nobody gets less than was decided.
fn round_up(b: Bytes) -> Bytes {
    (b + (Bytes::mib(1) - Bytes(1))).floor_mib()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Order;
    use crate::model::HostModel;
    use crate::sample::VmId;
    use crate::units::Stamp;

    const NOW: Stamp = Stamp(1_000_000);

    fn host(state: Pressure, shortage: u64, surplus: u64) -> HostModel {
        HostModel {
            state,
            shortage: Bytes::mib(shortage),
            surplus: Bytes::mib(surplus),
            known: true,
            ..HostModel::default()
        }
    }

    /// A ready 1 GiB guest, all of it resident, floor 256 MiB.
    fn vm(pid: u32, actual: u64, available: u64) -> VmModel {
        let g = GuestModel {
            available: Bytes::mib(available),
            need: Bytes::mib(actual - available),
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
        balloon(&model, &memory, &[])
    }

    fn remembered(pid: u32) -> VmMemory {
        VmMemory {
            id: VmId { pid, start: 1 },
            baseline: Some(Bytes::gib(1)),
            ..VmMemory::default()
        }
    }

    fn size(v: &Verdict) -> Option<u64> {
        match v {
            Verdict::Set { to, .. } => Some(to.0 >> 20),
            Verdict::Hold(_) => None,
        }
    }

    #[test]
    fn idle_memory_is_taken_in_proportion_and_by_weight() {
        let mut heavy = vm(3, 1024, 600);
        heavy.weight = 2.0;
        let vms = vec![vm(1, 1024, 600), vm(2, 1024, 100), heavy];
        let v = decide(host(Pressure::Soft, 60, 0), vms, vec![]);
        assert_eq!(size(&v[0]), Some(1024 - 39), "{v:?}");
        assert_eq!(size(&v[2]), Some(1024 - 19), "{v:?}");
        assert!(size(&v[1]).is_none_or(|s| s > 1020), "has hardly anything idle: {v:?}");
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
        for state in [Pressure::Clear, Pressure::Soft, Pressure::Hard, Pressure::Critical] {
            let mut poor = vm(1, 400, 20);
            poor.distress = "20 MiB available".into();
            let v = decide(host(state, 500, 0), vec![poor, vm(2, 1024, 900)], vec![]);
            assert_eq!(size(&v[0]), Some(712), "{state}: half of what is held");
            assert!(matches!(&v[0], Verdict::Set { reason: Reason::GuestShort { .. }, .. }));
        }
        let mut poor = vm(1, 400, 20);
        poor.distress = "still".into();
        let m = VmMemory { last_give: Some(Stamp(NOW.0 - 1000)), ..remembered(1) };
        let v = decide(host(Pressure::Critical, 500, 0), vec![poor], vec![m]);
        assert_eq!(size(&v[0]), Some(1024), "short again: everything");
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
        r.given = Some(Stamp(NOW.0 - 5_000));
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
            let verdicts = balloon(&model, &Memory::default(), &[request]);
            (size(&verdicts[0]), size(&verdicts[1]))
        };
        assert_eq!(ask(Reclaim::default()), (Some(480), Some(880)), "need and a full buffer stay");
        let one = Reclaim { vm: Some("vm2".into()), bytes: None };
        assert_eq!(ask(one), (None, Some(880)));
        let some = Reclaim { vm: None, bytes: Some(Bytes::mib(172)) };
        assert_eq!(ask(some), (Some(1024 - 136), Some(1024 - 36)));
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
