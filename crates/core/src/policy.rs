//! From model to plan: the policies in the order of the ladder.
//!
//! Each file in `policy/` is one pure function with its tests. This one joins
//! what they say into a [`Plan`] and enforces [`Limits`]: a policy may be wrong,
//! a plan may not.

pub mod balloon;
pub mod merge;
pub mod recycle;

use crate::memory::Memory;
use crate::model::{Model, Standing, VmModel};
use crate::plan::{Action, Held, Limits, Plan, Reason, Reclaim};
use crate::units::Bytes;

/// What a policy says of one VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Set its size.
    Set {
        /// To this.
        to: Bytes,
        /// Why.
        reason: Reason,
    },
    /// Leave it: why.
    Hold(String),
}

/// Decides one tick. Same input, same plan.
pub fn decide(model: &Model, memory: &Memory, requests: &[Reclaim], limits: &Limits) -> Plan {
    let verdicts = balloon::balloon(model, memory, requests);
    let mut plan = Plan::default();
    for (vm, verdict) in model.vms.iter().zip(verdicts) {
        match within_limits(vm, verdict, limits) {
            Ok(action) if plan.actions.len() < limits.actions => plan.actions.push(action),
            Ok(_) => plan.held.push(held(vm, "the plan is full: next tick".into())),
            Err(why) => plan.held.push(held(vm, why)),
        }
    }
    let shrinks = |vm| plan.actions.iter().any(|a: &Action| a.vm == vm && !a.gives());
    let recycle = recycle::recycle(model, memory, requests);
    plan.recycle = recycle.into_iter().filter(|r| !shrinks(r.vm)).collect();
    // Giving back never waits for taking.
    plan.actions.sort_by_key(|a| !a.gives());
    plan
}

fn held(vm: &VmModel, why: String) -> Held {
    Held { vm: vm.id, name: vm.name.clone(), why }
}

/// The laws that hold whatever a policy says: nobody below its floor by our
/// doing, nobody above its RAM, no order to a VM that must be left alone.
fn within_limits(vm: &VmModel, verdict: Verdict, limits: &Limits) -> Result<Action, String> {
    let (to, reason) = match verdict {
        Verdict::Hold(why) => return Err(why),
        Verdict::Set { to, reason } => (to, reason),
    };
    let Some(actual) = vm.actual else { return Err("its size is not known".into()) };
    let order = matches!(reason, Reason::Withdrawn | Reason::Rebooted | Reason::Refresh);
    let gives = to > actual || order;
    match &vm.standing {
        Standing::Ready => {}
        Standing::GiveOnly(_) if gives => {}
        other => return Err(other.why().to_string()),
    }
    let to = if gives { to.min(vm.ram.unwrap_or(to)) } else { to.max(vm.floor).min(actual) };
    if to.abs_diff(actual) < limits.deadband && !order && to != vm.ceiling {
        return Err(format!("a change of {} is too small to make", to.abs_diff(actual)));
    }
    if to == actual && !order {
        return Err("it is where it should be".into());
    }
    Ok(Action { vm: vm.id, name: vm.name.clone(), from: actual, to, reason })
}
