//! How the view of a tick is filled from its sample, the model and what is remembered, as far as
//! a line beside the field (`view.rs`) does not tell.

use ebb_core::model::{Model, VmModel};
use ebb_core::plan::{Plan, Stage, StageName};
use ebb_core::policy::merge::Candidates;
use ebb_core::sample::{Link, VmSample};
use ebb_core::state::{Memory, Tally};
use ebb_core::tick::Tick;
use ebb_core::wire::AgentState;

use super::decisions::Done;
use super::{Daemon, Host, Merge, Problem, State, Vm};

impl State {
    /// The view of a tick. `daemon` is filled by the caller.
    pub fn new(tick: &Tick, model: &Model, memory: &Memory, daemon: Daemon) -> State {
        let (samples, done) = (&tick.sample.vms, Done::of(tick));
        let several = model.host.limits.len() > 1;
        let vm = |(m, s): (&VmModel, &VmSample)| Vm {
            bound: model.limit_of(m).filter(|_| several).map(|l| l.name.clone()),
            ..Vm::new(m, s, tick, &done, memory.vm(m.id))
        };
        let vms: Vec<Vm> = model.vms.iter().zip(samples).map(vm).collect();
        State {
            wall_ms: tick.sample.wall_ms,
            tick: tick.number,
            daemon,
            host: Host::new(&model.host, &tick.sample.host, tick, model, memory, &vms),
            vms,
            problems: tick.sample.problems.iter().map(|p| Problem::new(p, model)).collect(),
        }
    }
}

impl Merge {
    pub(super) fn new(tick: &Tick, model: &Model) -> Option<Merge> {
        let host = model.host.merge.as_ref()?;
        let mut found = Candidates::default();
        let parts = model.vms.iter().filter_map(|v| v.merge.as_ref()?.sample.found.as_ref());
        parts.for_each(|f| found.add(f));
        Some(Merge {
            mode: host.config.mode,
            why: tick.plan.merge.as_ref().map(|m| m.why.clone()).unwrap_or_default(),
            scan: host.scan.clone(),
            found: found.saves(),
            found_cpu_s: found.cost_s(),
        })
    }
}

pub(super) fn planned(plan: &Plan, name: StageName) -> Option<&Stage> {
    plan.stages.iter().find(|r| r.name == name)
}

pub(super) fn tally(memory: &Memory, name: StageName) -> Option<&Tally> {
    memory.stages.iter().find(|t| t.name == name)
}

/// The highest tier that works for a VM now.
pub(super) fn tier(s: &VmSample) -> &'static str {
    match (&s.agent, &s.balloon) {
        (Some(a), None) if a.observes => "none",
        (Some(a), Some(_)) if a.observes => "stock",
        (Some(a), _) if a.link == Link::Up && a.state == AgentState::Ready => "guest",
        (Some(a), _) if a.link == Link::Up && a.state != AgentState::Aside => "agent",
        (_, Some(_)) => "stock",
        _ => "none",
    }
}

#[cfg(test)]
mod tests {
    use crate::view::tests::told;

    #[test]
    fn problems_name_their_vm() {
        let (state, _) = told();
        let name = state.vms[0].name.clone();
        assert_eq!(state.problems.last().unwrap().name.as_ref(), Some(&name));
        assert!(
            state.problems.last().unwrap().to_string().starts_with(&format!("{name}: /proc/1"))
        );
    }
}
