//! From model to plan: the policies, stage by stage.
//!
//! Each file in `policy/` is pure. This one joins what they say into a [`Plan`] and bounds the
//! balloon orders ([`within_limits`]). Other policies bound their own.

pub mod admission;
mod allot;
pub mod balloon;
mod give;
mod limits;
pub mod merge;
pub mod offload;
pub mod partial_thp;
pub mod recycle;
mod take;
pub mod zeros;

use self::limits::{View, below};
use self::merge::MergeMemory;
use crate::model::{Model, Standing, VmModel};
use crate::plan::{
    Action, DEADBAND, Held, MOST_ACTIONS, Plan, Reason, Reclaim, RecycleOrder, Stage,
};
use crate::state::Memory;
use crate::task::StageName;
use crate::units::Bytes;

/// What a policy says of one VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    Set { to: Bytes, reason: Reason },
    Hold(String),
}

/// What was decided, and what is to be remembered of that once it is applied.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decided {
    pub plan: Plan,
    /// Merging's memory; `None` where that is off.
    pub merging: Option<MergeMemory>,
}

/// Decides one tick. Same input, same plan. The stages in their
/// order; each knows what those before it are expected to bring.
pub fn decide(model: &Model, memory: &Memory, requests: &[Reclaim]) -> Decided {
    let mut plan = Plan::default();
    let mut stages = Vec::new();
    let mut stage =
        |name, missing, expected, why| stages.push(Stage { name, missing, expected, why });

    let recycle = recycle::recycle(model, memory, requests);
    let recycled = recycled(model, memory, &recycle);
    let freed: Bytes = recycled.iter().copied().sum();

    // Both run in the background; later samples show what they freed.
    plan.orders.partial_thp = partial_thp::partial_thp(model, memory);
    let (orders, zeros_reason) = zeros::zeros(model, memory, requests);
    plan.orders.zeros = orders;

    let ballooned = balloon::balloon(model, memory, requests, &recycled);
    let missing = ballooned.missing;
    let expected: Bytes = ballooned.expected.iter().copied().sum();

    // Merging goes on beside the rest and is slow: no later stage waits for it.
    let (merge, merging) = merge::merge(model, memory, missing - freed).unzip();
    plan.merge = merge;
    let merge_words = plan.merge.as_ref().map_or("merge.mode is off", |m| &m.why).to_string();
    let waits = |d| format!(", {d} of it for guests in distress that wait for it");
    let waiting = ballooned.deferred.if_any(waits);
    for (vm, verdict) in model.vms.iter().zip(ballooned.verdicts) {
        match within_limits(vm, verdict) {
            Ok(action) if plan.actions.len() < MOST_ACTIONS => plan.actions.push(action),
            Ok(_) => plan.held.push(held(vm, "the plan is full: next tick".into())),
            Err(why) => plan.held.push(held(vm, why)),
        }
    }
    let shrinks = |vm| plan.actions.iter().any(|a: &Action| a.vm == vm && !a.gives());
    plan.recycle = recycle.into_iter().filter(|r| !shrinks(r.vm)).collect();

    let asked = plan.recycle.iter().filter(|order| order.recycle.is_some()).count();
    stage(StageName::Recycle, missing, freed, format!("{asked} agents asked"));
    stage(StageName::Merge, missing - freed, Bytes::ZERO, merge_words);
    stage(StageName::Zeros, missing - freed, Bytes::ZERO, zeros_reason);
    let takes = plan.actions.iter().filter(|a| !a.gives()).count();
    let left = missing - freed;
    stage(StageName::Balloon, left, expected, format!("{takes} guests asked{waiting}"));
    let mut view = View::new(model);
    let mut paged = vec![Bytes::ZERO; model.vms.len()];
    let (mut lefts, mut why) = (Vec::new(), String::new());
    let under = ballooned.under.iter().zip(&ballooned.waiting);
    for (limit, (missing, waiting)) in view.order.clone().into_iter().zip(under) {
        let model = view.under(limit);
        let found: Bytes =
            [&recycled, &ballooned.expected, &paged].map(|by| below(model, by)).into_iter().sum();
        let left = *missing - *waiting - found - arriving(model, memory);
        let (orders, words) = offload::offload(model, memory, left, &paged);
        if why.is_empty() || !orders.is_empty() {
            why = words;
        }
        let mut brings = Bytes::ZERO;
        for order in orders {
            brings += order.bytes;
            let at = model.vms.iter().position(|vm| vm.id == order.vm);
            at.into_iter().for_each(|i| paged[i] += order.bytes);
            plan.orders.offload.push(order);
        }
        if plan.last_resort.is_empty() {
            plan.last_resort = admission::last_resort(model, left - brings);
        }
        lefts.push((left, left - brings));
    }
    let paged: Bytes = paged.into_iter().sum();
    let (before, after): (Vec<Bytes>, Vec<Bytes>) = lefts.into_iter().unzip();
    stage(StageName::Offload, view.total(&before), paged, why);
    let left = view.total(&after);
    stage(StageName::Protect, left, Bytes::ZERO, admission::words(&plan.last_resort));
    if missing > Bytes::ZERO || freed + expected + paged > Bytes::ZERO {
        plan.stages = stages;
    }
    // Giving back never waits for taking.
    plan.actions.sort_by_key(|a| !a.gives());
    Decided { plan, merging }
}

/// What the orders to recycle are expected to bring at once of each VM.
fn recycled(model: &Model, memory: &Memory, orders: &[RecycleOrder]) -> Vec<Bytes> {
    let one = |vm: &VmModel| {
        let job = orders[orders.binary_search_by_key(&vm.id, |o| o.vm).ok()?].recycle?;
        Some(recycle::expected(model, vm, memory.of(vm.id), &job))
    };
    model.vms.iter().map(|vm| one(vm).unwrap_or_default()).collect()
}

/// What earlier orders to shrink still bring under the limit shown.
fn arriving(model: &Model, memory: &Memory) -> Bytes {
    let one = |v: &VmModel| Some(memory.vm(v.id)?.arriving(model.at, v.actual?));
    model.vms.iter().filter(|v| !v.outside).filter_map(one).sum()
}

fn held(vm: &VmModel, why: String) -> Held {
    Held { vm: vm.id, name: vm.name.clone(), why }
}

/// What holds whatever a policy says: Ebb orders no VM below its floor, none above its RAM, and
/// nothing to a VM that must be left alone.
fn within_limits(vm: &VmModel, verdict: Verdict) -> Result<Action, String> {
    let (to, reason) = match verdict {
        Verdict::Hold(why) => return Err(why),
        Verdict::Set { to, reason } => (to, reason),
    };
    let Some(actual) = vm.actual else { return Err("its size is not known".into()) };
    let order = matches!(
        reason,
        Reason::Withdrawn | Reason::HandsOff | Reason::Needed | Reason::Rebooted | Reason::Refresh
    );
    let gives = to > actual || order;
    match &vm.standing {
        Standing::Ready => {}
        // What was taken before it was no more managed is returned.
        Standing::Off(_) if !vm.managed && gives && reason == Reason::Returned => {}
        Standing::GiveOnly(_) if gives => {}
        other => return Err(other.why().to_string()),
    }
    let to = if gives { to.min(vm.ram.unwrap_or(to)) } else { to.max(vm.floor).min(actual) };
    if to == actual && !order {
        return Err(match vm.guest.filter(|_| actual > vm.ceiling) {
            Some(guest) => format!(
                "above its max of {}: its guest needs {} and a buffer of {}",
                vm.ceiling, guest.need, guest.buffer
            ),
            None => "it is where it should be".into(),
        });
    }
    let small = to.abs_diff(actual) < DEADBAND && to != vm.ceiling && to != vm.whole;
    if small && !order && reason != Reason::Returned {
        return Err(format!("a change of {} is too small to make", to.abs_diff(actual)));
    }
    Ok(Action { vm: vm.id, name: vm.name.clone(), from: actual, to, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::GuestModel;

    #[test]
    fn a_max_that_cannot_be_kept_is_told_and_no_change_of_nothing() {
        let actual = Bytes::mib(213);
        let guest =
            GuestModel { need: Bytes::mib(81), buffer: Bytes::mib(128), ..Default::default() };
        let said = |ceiling| {
            let vm = VmModel {
                actual: Some(actual),
                ram: Some(Bytes::gib(1)),
                ceiling,
                guest: Some(guest),
                standing: Standing::Ready,
                ..VmModel::default()
            };
            within_limits(&vm, Verdict::Set { to: actual, reason: Reason::AboveCeiling })
                .unwrap_err()
        };
        let why = "above its max of 64 MiB: its guest needs 81 MiB and a buffer of 128 MiB";
        assert_eq!(said(Bytes::mib(64)), why);
        assert_eq!(said(Bytes::gib(1)), "it is where it should be");
    }
}
