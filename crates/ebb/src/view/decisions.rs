//! Decisions and verdicts: what was decided of a VM in a tick, why, and in which words.
//!
//! The words are for people and may change; [`Decision`] is what `/v1/decisions` tells.

use std::collections::HashMap;

use ebb_core::model::{Model, VmModel};
use ebb_core::plan::{Action, Held, Outcome, Reason};
use ebb_core::sample::{Problem, VmId};
use ebb_core::tick::Tick;
use ebb_core::units::Bytes;
use serde::{Deserialize, Serialize};

use super::{lenient, view};

/// Why nothing was done in a dry run.
pub const DRY_RUN: &str = "dry run";

view! {
/// A decision, as `/v1/decisions` and `explain` tell it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
Decision(at: &Tick, a: &Action, model: &Model, decided: &DecidedByVm<'_>):
    /// When, milliseconds since 1970.
    wall_ms: u64 = at.sample.wall_ms;
    tick: u64 = at.number;
    /// What was to be done and why.
    action: ActionView = ActionView::new(a);
    reason: String = a.reason.to_string();
    /// The host as it was.
    host: String = format!("{}: {}", model.host.shown.state, model.host.shown.why);
    /// The guest as it was.
    guest: String = model.vm(a.vm).map(guest_words).unwrap_or_default();
    /// `None`: QEMU took the order. In a dry run: `dry run`.
    error: Option<String> = match decided.outcomes.get(&a.vm) {
        Some(o) => o.error.clone(),
        None if !at.applied => Some(DRY_RUN.into()),
        None => Some("no outcome".into()),
    };
}

view! {
/// An [`Action`], as clients read it: its rule may be one that they do not know yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
ActionView(a: &Action):
    #[serde(deserialize_with = "lenient")]
    vm: VmId = a.vm;
    name: String = a.name.clone();
    /// The guest's size when this was decided.
    from: Bytes = a.from;
    /// The size it is to have: RAM less balloon.
    to: Bytes = a.to;
    #[serde(deserialize_with = "lenient")]
    reason: Option<Reason> = Some(a.reason.clone());
}

/// What a tick decided of each VM, and the result.
pub struct DecidedByVm<'a> {
    applied: bool,
    actions: HashMap<VmId, &'a Action>,
    outcomes: HashMap<VmId, &'a Outcome>,
    held: HashMap<VmId, &'a Held>,
}

impl DecidedByVm<'_> {
    pub(super) fn of(tick: &Tick) -> DecidedByVm<'_> {
        DecidedByVm {
            applied: tick.applied,
            actions: tick.plan.actions.iter().map(|a| (a.vm, a)).collect(),
            outcomes: tick.outcomes.iter().map(|o| (o.vm, o)).collect(),
            held: tick.plan.held.iter().map(|h| (h.vm, h)).collect(),
        }
    }

    /// What was decided of a VM, in words.
    pub(super) fn verdict(&self, id: VmId) -> String {
        let Some(a) = self.actions.get(&id) else {
            return self.held.get(&id).map(|h| h.why.clone()).unwrap_or_default();
        };
        let failed = self.outcomes.get(&id).and_then(|o| o.error.as_deref());
        let end = match (self.applied, failed) {
            (false, _) => " (dry run: not done)".to_string(),
            (true, Some(e)) => format!(" (failed: {e})"),
            (true, None) => String::new(),
        };
        format!("{} → {}: {}{end}", a.from, a.to, a.reason)
    }
}

/// The decisions of a tick, for the log and for `explain`.
pub fn decisions(tick: &Tick, model: &Model) -> Vec<Decision> {
    if tick.plan.actions.is_empty() {
        return Vec::new();
    }
    let decided = DecidedByVm::of(tick);
    tick.plan.actions.iter().map(|a| Decision::new(tick, a, model, &decided)).collect()
}

/// VMs that the operator asked for their memory by name and that were not asked, and why.
pub fn unheeded(tick: &Tick, model: &Model) -> Vec<Problem> {
    if tick.requests.is_empty() {
        return Vec::new();
    }
    let plan = &tick.plan;
    let decided = DecidedByVm::of(tick);
    let heeded = |id: VmId| {
        plan.recycle.iter().any(|o| o.vm == id && o.recycle.is_some())
            || plan.orders.zeros.iter().any(|o| o.vm == id)
            || plan.actions.iter().any(|a| a.vm == id && !a.gives())
    };
    let named = |name: &str| tick.requests.iter().any(|r| r.vm.as_deref() == Some(name));
    let vms = model.vms.iter().filter(|vm| named(&vm.name) && !heeded(vm.id));
    let why = |id| Some(decided.verdict(id)).filter(|verdict| !verdict.is_empty());
    let problem = |vm: &VmModel| Problem {
        vm: Some(vm.id),
        source: "not asked for its memory as the operator wished".into(),
        message: why(vm.id).or_else(|| forbidden(tick)).unwrap_or_default(),
    };
    vms.map(problem).collect()
}

/// What keeps Ebb from taking anything at all.
pub fn forbidden(tick: &Tick) -> Option<String> {
    tick.forbidden.as_ref().map(|why| format!("nothing is taken: {why}"))
}

pub fn guest_words(vm: &VmModel) -> String {
    let size = |b: Option<Bytes>| b.map_or("unknown".to_string(), |b| b.to_string());
    let guest = vm.guest.map_or("its numbers are not known".to_string(), |g| {
        format!(
            "needs {}, working set {}, has {} available ({} ms ago{}), keeps {} as buffer{}",
            g.need,
            g.working_set,
            g.available,
            g.age_ms,
            if g.by_module { ", by its module" } else { "" },
            g.buffer,
            match vm.trust.why.as_str() {
                "" => String::new(),
                why => format!("; believed {:.0} %: {why}", vm.trust.level * 100.0),
            }
        )
    });
    format!(
        "size {} (floor {}, ceiling {}), resident {}, in swap {}; {guest}",
        size(vm.actual),
        vm.floor,
        vm.ceiling,
        size(vm.resident),
        size(vm.swap)
    )
}

#[cfg(test)]
mod tests {
    use ebb_core::plan::Reclaim;
    use ebb_core::tick::Engine;
    use ebb_sim::World;
    use ebb_sim::scenario::crowd;

    use super::*;
    use crate::view::tests::told;

    #[test]
    fn a_request_that_is_not_heeded_has_its_reason() {
        let setup = crowd(2, Bytes::gib(2), Bytes::gib(3), 1, 0);
        let (mut world, mut engine) = (World::new(&setup), Engine::new(setup.config(), false));
        let (mut tick, model) = engine.step(&mut world);
        let [a, b] = [0, 1].map(|i| (model.vms[i].id, model.vms[i].name.clone()));
        let action = |to| Action {
            vm: a.0,
            name: a.1.clone(),
            from: Bytes::mib(500),
            to: Bytes::mib(to),
            reason: ebb_core::plan::Reason::GuestShort { signs: "it is short".into() },
        };
        tick.plan = Default::default();
        tick.plan.actions = vec![action(600)];
        assert_eq!(unheeded(&tick, &model), [], "nobody asked");
        let ask = |vm: &str| Reclaim { vm: Some(vm.into()), bytes: None };
        tick.requests = vec![ask(&a.1)];
        let [not] = &unheeded(&tick, &model)[..] else { panic!() };
        assert!(not.vm == Some(a.0) && not.message.contains("it is short"), "{not:?}");
        tick.plan.actions = vec![action(400)];
        assert_eq!(unheeded(&tick, &model), []);
        tick.requests = vec![ask(&b.1), Reclaim { vm: None, bytes: None }];
        let why = "its guest has ended".to_owned();
        let held = Held { vm: b.0, name: b.1.clone(), why: why.clone() };
        tick.plan.held = vec![held];
        let [not] = &unheeded(&tick, &model)[..] else { panic!() };
        assert_eq!((not.vm, &not.message), (Some(b.0), &why));
        let said = crate::view::Problem::new(not, &model).to_string();
        assert_eq!(
            said,
            format!("{}: not asked for its memory as the operator wished: {why}", b.1)
        );
    }

    #[test]
    fn what_is_said_of_a_vm_is_what_was_decided_of_it() {
        let (state, decisions) = told();
        for d in &decisions {
            let vm = state.vms.iter().find(|v| v.name == d.action.name).unwrap();
            assert_eq!(vm.verdict, format!("{} → {}: {}", d.action.from, d.action.to, d.reason));
        }
        assert!(state.vms.iter().any(|v| decisions.iter().all(|d| d.action.name != v.name)));
    }
}
