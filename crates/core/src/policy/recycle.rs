//! Recycling: what a guest has freed goes back to the host page by page.
//!
//! The agent inside the VMM knows which pages are free and proves each one free
//! before it discards it, so nothing here can lose data: this policy only says
//! when, how much and how finely.
//!
//! Blocks of 2 MiB that are free as a whole go as soon as the map shows them, as long as what
//! the guest takes back of them costs it less than a share of a processor: the bytes a
//! second that it was seen to take back, at the measured price of touching new memory. Where it
//! takes back more, they are treated as pieces are. What it allocates in 1.5 s is left to it.
//!
//! Pieces must have been free for a while (two looks half a period apart), some slack is left
//! to a guest that allocates fast, and more of it to one that takes back what was recycled.
//!
//! The shorter the host is, the more a guest may lose, the shorter the period, the smaller the
//! slack, the finer the pieces; when it is critical, everything goes at once. Works on paused
//! guests too.

use crate::model::{Model, Pressure, Standing, VmModel};
use crate::plan::{Reclaim, RecycleOrder};
use crate::sample::AgentSample;
use crate::state::{Memory, RecycleMemory, VmMemory, Whole};
use crate::units::Bytes;
use crate::wire::{HugePages, MOST_CLOSED, Recycle};

/// Less than this is not worth a call.
const LEAST: Bytes = Bytes::mib(1);
/// Slack is never more than this share of RAM, however fast the guest allocates.
const SLACK_MOST: f64 = 0.10;

/// Where less than this became free there is no new whole block.
const BLOCK: Bytes = Bytes::mib(2);
/// The time between orders for whole blocks: each walks the map.
const WHOLE_EVERY_MS: u64 = 500;
/// What the guest allocates in this many seconds is left of whole blocks, until the next look. The
/// rate is an average of 2 s, so a guest that takes memory once a second takes more at a time.
const SLACK_S: f64 = 1.5;
/// What touching a MiB takes where that was not measured, in microseconds: pages of 4 KiB,
/// half a microsecond each.
const TOUCH_US: u32 = 128;

struct RecycleParams {
    /// What a guest takes back of whole blocks may cost it this share of a processor.
    loss: f64,
    /// A page is recycled when it has been free for half to all of this, ms, to the
    /// nearest tick; one tick comes on top, so that on a clear host it goes within ten
    /// seconds.
    period_ms: u64,
    /// What the guest allocates in this many seconds is left to it.
    slack_s: f64,
    /// The least number of free pages for which a huge page is split;
    /// `None`: kept whole.
    split: Option<u32>,
    /// How long the agent may work in one go, ms.
    budget_ms: u64,
}

fn params(state: Pressure) -> RecycleParams {
    let (loss, period_ms, slack_s, split, budget_ms) = match state {
        Pressure::Clear => (0.01, 8_000, 4.0, None, 250),
        Pressure::Soft => (0.02, 4_000, 2.0, Some(256), 300),
        Pressure::Hard => (0.05, 1_000, 1.0, Some(64), 300),
        Pressure::Critical => (1.0, 0, 0.0, Some(1), 1000),
    };
    RecycleParams { loss, period_ms, slack_s, split, budget_ms }
}

/// The orders for agents; VMs without a usable map are left out.
pub fn recycle(model: &Model, memory: &Memory, requests: &[Reclaim]) -> Vec<RecycleOrder> {
    let mut asked: Vec<Option<Bytes>> = requests.iter().map(|r| r.bytes).collect();
    let mut of = |vm: &VmModel| -> Option<RecycleOrder> {
        let (agent, m) = (usable(vm)?, memory.of(vm.id));
        // A balloon that grows has QEMU discard pages too, and that would lift the
        // agent's protection inside a window: one of the two at a time.
        if agent.busy || m.inflates(model.at, vm.actual) {
            return None;
        }
        let asked = requests.iter().zip(&mut asked).filter(|(r, _)| r.means(&vm.name));
        let left: Vec<&mut Option<Bytes>> = asked.map(|(_, left)| left).collect();
        if !left.is_empty() {
            return on_request(vm, agent, left);
        }
        one(model, vm, agent, &m.recycle, &params(model.state_of(vm)))
    };
    let mut orders: Vec<(&VmModel, RecycleOrder)> =
        model.vms.iter().filter_map(|vm| Some((vm, of(vm)?))).collect();
    let agents = orders.iter().filter(|(_, o)| o.recycle.is_some()).count();
    for (vm, order) in &mut orders {
        if let Some(job) = &mut order.recycle {
            job.most_closed = most_closed(model, vm, agents);
        }
    }
    orders.into_iter().map(|(_, order)| order).collect()
}

/// How much the agent of a VM may close to KSM, where this many agents recycle. Together they may
/// close half of what is left under the VM's tightest limit: where a limit is reached, the kernel
/// kills a process, and that may be a VM.
fn most_closed(model: &Model, vm: &VmModel, agents: usize) -> Option<Bytes> {
    let above = model.host.limits.iter().filter(|limit| vm.is_below(limit));
    let left = above.map(|limit| limit.headroom).min()?;
    Some(Bytes(left.0 / 2 / agents.max(1) as u64)).filter(|most| *most < MOST_CLOSED)
}

/// The agent, if its map can be used. A paused guest's can, and one's that runs without a balloon;
/// a migrating one's not, nor one's that is only observed.
pub(super) fn usable(vm: &VmModel) -> Option<&AgentSample> {
    if matches!(vm.standing, Standing::Off(_)) && !vm.beyond_balloon {
        return None;
    }
    vm.agent.as_ref().filter(|a| a.is_ready() && !a.observes)
}

/// What of a VM recycling is likely to bring, now and by the orders that follow: no more than the
/// host holds of it, whatever its map says.
pub(super) fn to_come(model: &Model, vm: &VmModel, m: &VmMemory) -> Bytes {
    to_come_in(model.state_of(vm), vm, m)
}

/// What an order to recycle is likely to bring of a VM on a host in this state.
pub(super) fn to_come_in(state: Pressure, vm: &VmModel, m: &VmMemory) -> Bytes {
    let held = usable(vm).and_then(|agent| agent.held).unwrap_or_default();
    m.recycle.to_come(state, held.min(vm.resident.unwrap_or(held)))
}

/// The state of a host on which orders go as far as this one.
pub(crate) fn reach(model: &Model, vm: &VmModel, job: &Recycle) -> Pressure {
    let all = job.huge == HugePages::Split && job.split_min_pages <= 1 && !job.marked;
    if all { Pressure::Critical } else { model.state_of(vm) }
}

/// What this order is likely to bring.
pub(crate) fn expected(model: &Model, vm: &VmModel, m: &VmMemory, job: &Recycle) -> Bytes {
    let to_come = to_come_in(reach(model, vm, job), vm, m);
    job.max_bytes.map_or(to_come, |most| most.min(to_come))
}

/// All that is free and held, or what requests still ask for, at once.
fn on_request(
    vm: &VmModel,
    agent: &AgentSample,
    left: Vec<&mut Option<Bytes>>,
) -> Option<RecycleOrder> {
    // What is held may have grown since it was counted: no limit but the wish.
    let want: Option<Bytes> = left.iter().map(|left| **left).sum();
    let mut had = agent.held.or(agent.free);
    if want.is_some() && had.is_none() {
        return None;
    }
    for left in left.into_iter().filter_map(Option::as_mut) {
        let part = had.unwrap_or_default().min(*left);
        (*left, had) = (*left - part, had.map(|had| had - part));
    }
    let job = Recycle {
        max_bytes: want,
        budget_ms: 5000,
        huge: HugePages::Split,
        split_min_pages: 1,
        ..Recycle::default()
    };
    let why = "the operator asked for it".into();
    (want != Some(Bytes::ZERO)).then(|| order(vm, Some(job), false, why))
}

fn order(vm: &VmModel, recycle: Option<Recycle>, mark: bool, reason: String) -> RecycleOrder {
    RecycleOrder { vm: vm.id, name: vm.name.clone(), recycle, mark, reason }
}

fn one(
    model: &Model,
    vm: &VmModel,
    agent: &AgentSample,
    m: &RecycleMemory,
    params: &RecycleParams,
) -> Option<RecycleOrder> {
    let ram = vm.ram.unwrap_or_default();
    let backoff = f64::from(1u32 << m.backoff.min(6));
    let slack = Bytes((m.alloc_rate * params.slack_s * backoff) as u64).min(ram.share(SLACK_MOST));
    let held = agent.held.or(agent.free)?;
    let want = held - if params.slack_s > 0.0 { slack } else { Bytes::ZERO };
    let job = |marked| Recycle {
        max_bytes: (params.slack_s > 0.0).then_some(want),
        budget_ms: params.budget_ms,
        huge: if params.split.is_some() { HugePages::Split } else { HugePages::Keep },
        split_min_pages: params.split.unwrap_or(1),
        marked,
        ..Recycle::default()
    };
    if params.period_ms == 0 {
        let why = format!("host {}: all of {held} at once", model.state_of(vm));
        return (want >= LEAST).then(|| order(vm, Some(job(false)), false, why));
    }
    let half = params.period_ms / 2;
    // The nearest tick: one that comes a moment early would put it off by a whole one.
    let soon = model.dt_ms.min(half) / 2;
    match m.marked.map(|at| model.at.since(at)) {
        Some(age) if age + soon >= half => {
            let why = format!("{held} free and held; {slack} left as slack; free for {age} ms");
            Some(order(vm, (want >= LEAST).then(|| job(true)), true, why))
        }
        Some(_) => {
            let (max_bytes, why) = whole_at_once(model, agent, m, params)?;
            let min_run_pages = crate::wire::BLOCK_PAGES;
            let budget_ms = params.budget_ms;
            let whole = Recycle { max_bytes, min_run_pages, budget_ms, ..Recycle::default() };
            Some(order(vm, Some(whole), false, why))
        }
        None => Some(order(vm, None, true, "first look".into())),
    }
}

/// How much of the blocks that are free as a whole is worth taking now (`None`: all), and why.
fn whole_at_once(
    model: &Model,
    agent: &AgentSample,
    m: &RecycleMemory,
    params: &RecycleParams,
) -> Option<(Option<Bytes>, String)> {
    let touch_us = f64::from(model.host.touch_us.unwrap_or(TOUCH_US));
    let back = Bytes(m.back_rate as u64);
    let loss = m.back_rate / f64::from(1 << 20) * touch_us / 1e6;
    if loss >= params.loss {
        return None;
    }
    let free = agent.free?;
    let freed = Whole::freed(m.whole, free);
    // One that brought something may not have come to its end.
    let again = m.whole.filter(|w| w.brought >= BLOCK).and(agent.held);
    let slack = Bytes((m.alloc_rate * SLACK_S) as u64);
    let want = freed.max(again.unwrap_or_default()) - slack;
    if want < BLOCK || m.whole.is_some_and(|w| model.at.since(w.at) < WHOLE_EVERY_MS) {
        return None;
    }
    let most = (slack > Bytes::ZERO).then_some(want);
    let percent = 100.0 * loss;
    let why = format!(
        "{freed} became free; {slack} stay free in the guest; of what was recycled {back} a second \
         are used again, which costs {percent:.2} % of a processor"
    );
    Some((most, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HostModel, Limit};
    use crate::sample::VmId;
    use crate::state::BalloonOrder;
    use crate::units::Stamp;

    const ID: VmId = VmId { pid: 1, start: 1 };

    fn ask(state: Pressure, held: u64, m: RecycleMemory) -> Option<RecycleOrder> {
        let agent = AgentSample { free: Some(Bytes::mib(held + 100)), ..AgentSample::ready(held) };
        let vm = VmModel {
            id: ID,
            ram: Some(Bytes::gib(4)),
            agent: Some(agent),
            standing: Standing::GiveOnly("it is paused".into()),
            ..VmModel::default()
        };
        let touch_us = Some(100);
        let shown = Limit { state, ..Limit::default() };
        let host = HostModel { shown, known: true, touch_us, ..HostModel::default() };
        let model = Model { at: Stamp(100_000), dt_ms: 1000, host, vms: vec![vm] };
        let vms = vec![VmMemory { id: ID, recycle: m, ..VmMemory::default() }];
        recycle(&model, &Memory { vms, ..Memory::default() }, &[]).pop()
    }

    #[test]
    fn no_more_is_closed_than_half_of_what_is_left() {
        let most = |headroom: Option<u64>, agents| {
            let headroom = headroom.map(Bytes::mib);
            let name = "host".to_string();
            let limits = headroom.map(|headroom| Limit { name, headroom, ..Limit::default() });
            let host = HostModel { limits: limits.into_iter().collect(), ..HostModel::default() };
            let model = Model { host, ..Model::default() };
            most_closed(&model, &VmModel::default(), agents)
        };
        assert_eq!(most(Some(14), 2), Some(Bytes::kib(3584)));
        assert_eq!(most(Some(0), 1), Some(Bytes::ZERO));
        assert_eq!((most(Some(64), 1), most(None, 1)), (None, None));
        assert_eq!(most(Some(64), 2), Some(Bytes::mib(16)));
    }

    #[test]
    fn an_agent_that_only_observes_is_not_asked_and_keeps_nobody_else_from_asking() {
        let is_usable = |observes| {
            let agent = Some(AgentSample { observes, ..AgentSample::ready(500) });
            usable(&VmModel { agent, ..VmModel::default() }).is_some()
        };
        assert!(is_usable(false) && !is_usable(true));
    }

    #[test]
    fn requests_of_one_tick_bring_all_that_they_ask_for() {
        let vm = |name: &str| {
            let agent = Some(AgentSample::ready(500));
            VmModel { name: name.into(), agent, ..VmModel::default() }
        };
        let model = Model { vms: vec![vm("a"), vm("b")], ..Model::default() };
        let of = |vm: Option<&str>, mib: Option<u64>| Reclaim {
            vm: vm.map(String::from),
            bytes: mib.map(Bytes::mib),
        };
        let asked = |requests: &[Reclaim]| -> Vec<Option<u64>> {
            let orders = recycle(&model, &Memory::default(), requests);
            orders.iter().map(|o| o.recycle.unwrap().max_bytes.map(|b| b.0 >> 20)).collect()
        };
        let (all, b) = (|mib| of(None, Some(mib)), |mib| of(Some("b"), mib));
        assert_eq!(asked(&[all(100), of(Some("a"), Some(50))]), [Some(150)]);
        assert_eq!(asked(&[all(600), b(Some(50))]), [Some(600), Some(150)]);
        assert_eq!(asked(&[all(100), b(None)]), [Some(100), None]);
        assert_eq!(asked(&[all(100)]), [Some(100)], "the first has it");
    }

    /// Its blocks that are free as a whole have been taken.
    fn marked(ms_ago: u64) -> RecycleMemory {
        let whole = Whole { at: Stamp(90_000), free: Bytes::gib(4), brought: Bytes::ZERO };
        let marked = Some(Stamp(100_000 - ms_ago));
        RecycleMemory { marked, whole: Some(whole), ..RecycleMemory::default() }
    }

    /// So much was free at the last order for whole blocks, a while ago.
    fn whole(ms_ago: u64, free: u64, brought: u64) -> RecycleMemory {
        let (free, brought) = (Bytes::mib(free), Bytes::mib(brought));
        let whole = Some(Whole { at: Stamp(100_000 - ms_ago), free, brought });
        RecycleMemory { whole, ..marked(1_000) }
    }

    #[test]
    fn whole_blocks_go_when_the_map_shows_them_and_pieces_do_not() {
        let first = RecycleMemory { whole: None, ..marked(1_000) };
        let order = ask(Pressure::Clear, 500, first).unwrap();
        let job = order.recycle.unwrap();
        assert!(job.is_whole() && !job.marked && job.max_bytes.is_none() && !order.mark);
        assert_eq!(job.huge, HugePages::Keep);
        let due = |m| ask(Pressure::Clear, 500, m).is_some();
        // 600 MiB are free now.
        assert!(!due(whole(5_000, 600, 0)), "nothing became free");
        assert!(!due(whole(5_000, 599, 0)), "less than a block");
        assert!(due(whole(1_000, 560, 0)), "40 MiB became free");
        assert!(due(whole(1_000, 600, 64)), "the last one may not have come to its end");
        assert!(!due(whole(100, 560, 0)), "the map was walked a moment ago");
        let pieces = RecycleMemory { marked: marked(3_900).marked, ..whole(5_000, 560, 0) };
        let job = ask(Pressure::Clear, 500, pieces).unwrap().recycle.unwrap();
        assert!(job.marked && !job.is_whole(), "pieces in their turn");
    }

    #[test]
    fn what_a_guest_allocates_until_it_is_looked_at_again_is_left_to_it() {
        let most = |alloc_mib: f64| {
            let alloc_rate = alloc_mib * f64::from(1 << 20);
            let m = RecycleMemory { alloc_rate, ..whole(1_000, 560, 0) };
            ask(Pressure::Clear, 500, m).map(|o| o.recycle.unwrap().max_bytes)
        };
        // 40 MiB became free.
        assert_eq!(most(0.0), Some(None));
        assert_eq!(most(10.0), Some(Some(Bytes::mib(25))));
        assert_eq!(most(26.0), None, "less than a block is left to take");
        assert_eq!(most(1500.0), None, "one that frees and takes again all the time");
    }

    #[test]
    fn a_guest_loses_no_more_than_a_share_of_a_processor_to_what_it_takes_back() {
        let due = |state, back_mib: f64| {
            let back_rate = back_mib * f64::from(1 << 20);
            ask(state, 500, RecycleMemory { back_rate, ..whole(1_000, 560, 0) }).is_some()
        };
        // 100 µs a MiB: 1 % is 100 MiB a second.
        assert!(due(Pressure::Clear, 95.0) && !due(Pressure::Clear, 105.0));
        assert!(due(Pressure::Soft, 195.0) && !due(Pressure::Soft, 205.0));
        assert!(due(Pressure::Hard, 490.0));
    }

    #[test]
    fn pages_must_have_been_free_for_a_while_and_less_long_the_shorter_the_host_is() {
        let first = ask(Pressure::Clear, 500, RecycleMemory::default()).unwrap();
        assert!(first.mark && first.recycle.is_none());
        assert_eq!(ask(Pressure::Clear, 500, marked(3_400)), None, "only marked pages are due");
        let order = ask(Pressure::Clear, 500, marked(3_900)).unwrap();
        assert!(order.recycle.unwrap().marked && order.mark);
        assert!(ask(Pressure::Hard, 500, marked(500)).unwrap().recycle.is_some());
        let now = ask(Pressure::Critical, 500, RecycleMemory::default()).unwrap();
        assert!(!now.recycle.unwrap().marked, "critical waits for nothing");
    }

    #[test]
    fn a_guest_that_allocates_fast_or_takes_back_keeps_slack_unless_the_host_is_critical() {
        let fast = |backoff| RecycleMemory { alloc_rate: 10e6, backoff, ..marked(60_000) };
        let most = |state, backoff| {
            let job = ask(state, 500, fast(backoff)).unwrap().recycle.unwrap();
            job.max_bytes.map(|b| b.0 >> 20)
        };
        assert_eq!(most(Pressure::Clear, 0), Some(461));
        assert_eq!(most(Pressure::Clear, 2), Some(347));
        assert_eq!(most(Pressure::Clear, 30), Some(90), "a tenth of RAM at most");
        assert_eq!(most(Pressure::Critical, 30), None, "all of it");
    }

    #[test]
    fn nothing_is_recycled_while_the_balloon_grows_or_the_agent_is_at_work() {
        let orders = |busy, order: Option<u64>, shrunk| {
            let agent = Some(AgentSample { busy, ..AgentSample::ready(500) });
            let (actual, standing) = (Some(Bytes::gib(2)), Standing::Ready);
            let vm = VmModel { id: ID, agent, actual, standing, ..VmModel::default() };
            let shown = Limit { state: Pressure::Critical, ..Limit::default() };
            let host = HostModel { shown, ..HostModel::default() };
            let model = Model { at: Stamp(100_000), host, vms: vec![vm], ..Model::default() };
            let (moved_from, order) = (Bytes::gib(2), order.map(Bytes::gib));
            let order = order.map(|to| BalloonOrder { to, moved_from, ..BalloonOrder::default() });
            let vms = vec![VmMemory { id: ID, order, shrunk, ..VmMemory::default() }];
            recycle(&model, &Memory { vms, ..Memory::default() }, &[]).len()
        };
        assert_eq!(orders(false, None, None), 1);
        assert_eq!(orders(true, None, None), 0, "at work");
        assert_eq!(orders(false, Some(1), None), 0);
        assert_eq!(orders(false, Some(3), None), 1, "deflates");
        assert_eq!(orders(false, None, Some(Stamp(99_000))), 0, "a second ago");
    }

    #[test]
    fn little_is_left_alone_and_the_look_renewed() {
        let order = ask(Pressure::Clear, 0, marked(60_000)).unwrap();
        assert!(order.recycle.is_none() && order.mark);
        assert_eq!(ask(Pressure::Critical, 0, marked(60_000)), None);
    }

    #[test]
    fn huge_pages_are_split_only_when_the_host_is_short() {
        let huge = |state| ask(state, 500, marked(60_000)).unwrap().recycle.unwrap().huge;
        assert_eq!(huge(Pressure::Clear), HugePages::Keep);
        assert_eq!(huge(Pressure::Soft), HugePages::Split);
    }
}
