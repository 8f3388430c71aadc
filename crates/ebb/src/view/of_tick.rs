//! How the view of a tick is filled from its sample, the model and what is remembered.
//!
//! A field's value is worked out here, and nothing is decided; what the fields are is in
//! `view.rs`.

use ebb_core::model::{Model, VmModel};
use ebb_core::plan::RungName;
use ebb_core::policy::merge::Candidates;
use ebb_core::sample::{self, Link, VmId, VmSample};
use ebb_core::state::Memory;
use ebb_core::tick::Tick;
use ebb_core::wire::AgentState;

use super::decisions::Done;
use super::{Daemon, Host, Merge, Problem, Rung, State, Vm};

impl Problem {
    /// With the name that its VM has among those of the model.
    pub fn new(p: &sample::Problem, model: &Model) -> Problem {
        Problem {
            name: p.vm.and_then(|id| Some(vm_of(model, id)?.name.clone())),
            vm: p.vm,
            source: p.source.clone(),
            message: p.message.clone(),
        }
    }
}

/// The VM of the model; the sample's order is by id.
pub(super) fn vm_of(model: &Model, id: VmId) -> Option<&VmModel> {
    model.vms.binary_search_by_key(&id, |v| v.id).ok().map(|i| &model.vms[i])
}

impl State {
    /// The view of a tick. `daemon` is filled by the caller.
    pub fn new(tick: &Tick, model: &Model, memory: &Memory, daemon: Daemon) -> State {
        let (samples, done) = (&tick.sample.vms, Done::of(tick));
        let both = model.vms.iter().zip(samples);
        let several = model.host.limits.len() > 1;
        let one = |(m, s): (&VmModel, &VmSample)| Vm {
            bound: model.limit_of(m).filter(|_| several).map(|l| l.name.clone()),
            ..Vm::new(m, s, (tick, &done), memory)
        };
        let vms: Vec<Vm> = both.map(one).collect();
        State {
            wall_ms: tick.sample.wall_ms,
            tick: tick.number,
            daemon,
            host: Host::new(tick, model, memory, &vms),
            vms,
            problems: tick.sample.problems.iter().map(|p| Problem::new(p, model)).collect(),
        }
    }
}

impl Merge {
    fn new(tick: &Tick, model: &Model) -> Option<Merge> {
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

impl Host {
    fn new(tick: &Tick, model: &Model, memory: &Memory, vms: &[Vm]) -> Host {
        let (h, s) = (&model.host, &tick.sample.host);
        Host {
            state: h.state,
            state_s: model.at.since(memory.state_since) / 1000,
            why: h.why.clone(),
            bound: h.bound.clone(),
            capacity: h.capacity,
            headroom: h.headroom,
            reserve: h.reserve,
            shortage: h.shortage,
            total: s.memory.map(|m| m.total),
            free: s.memory.map(|m| m.free),
            available: s.memory.map(|m| m.available),
            swap_used: s.memory.map(|m| m.swap_total - m.swap_free),
            swap_total: s.memory.map(|m| m.swap_total),
            swap_in_rate: h.swap_in_rate,
            swap_out_rate: h.swap_out_rate,
            psi_some: s.psi.map(|p| p.some.avg10),
            psi_full: s.psi.map(|p| p.full.avg10),
            pool: s.pool.clone(),
            limits: h.limits.clone(),
            ksm: s.ksm,
            merge: Merge::new(tick, model),
            swaps: s.swaps.clone(),
            promised: vms.iter().filter_map(|v| v.ram).sum(),
            resident: vms.iter().filter_map(|v| v.resident).sum(),
            urgency: h.urgency,
            starting: h.promised,
            warnings: h.warnings.clone(),
            ladder: ladder(tick, memory),
        }
    }
}

fn ladder(tick: &Tick, memory: &Memory) -> Vec<Rung> {
    let one = |name| {
        let rung = tick.plan.rungs.iter().find(|r| r.name == name);
        let tally = memory.ladder.iter().find(|t| t.name == name);
        Rung {
            name,
            missing: rung.map(|r| r.missing).unwrap_or_default(),
            expected: rung.map(|r| r.expected).unwrap_or_default(),
            expected_total: tally.map(|t| t.expected).unwrap_or_default(),
            came_total: tally.map(|t| t.came).unwrap_or_default(),
            why: rung.map(|r| r.why.clone()).unwrap_or_default(),
        }
    };
    RungName::ALL.map(one).to_vec()
}

impl Vm {
    fn new(m: &VmModel, s: &VmSample, (tick, done): (&Tick, &Done<'_>), memory: &Memory) -> Vm {
        let remembered = memory.vm(m.id);
        Vm {
            name: m.name.clone(),
            pid: m.id.pid,
            tier: tier(s).into(),
            agent: s.agent.clone(),
            link: s.link.clone(),
            run: s.run.clone(),
            ram: m.ram,
            actual: m.actual,
            target: remembered.and_then(|r| r.order).map(|o| o.to),
            floor: m.floor,
            ceiling: m.ceiling,
            ballooned: m.owed,
            resident: m.resident,
            swap: m.swap,
            available: m.guest.map(|g| g.available),
            need: m.guest.map(|g| g.need),
            stats_age_ms: s.balloon.as_ref().and_then(|b| b.guest).map(|g| g.age_ms),
            reporting: s.balloon.as_ref().and_then(|b| b.reporting),
            deflate_on_oom: s.balloon.as_ref().and_then(|b| b.deflate_on_oom),
            shared: s.shared.clone(),
            cgroup: s.cgroup.clone(),
            bound: None,
            standing: m.standing.clone(),
            hands_off: m.hands_off,
            distress: m.distress.clone(),
            verdict: done.verdict(m.id),
            recycle_backoff: remembered.map_or(0, |r| r.recycle.backoff),
            returned: remembered.map(|r| r.returned).unwrap_or_default(),
            group: m.group.clone(),
            by_metadata: m.by_metadata.clone(),
            working_set: m.guest.map(|g| g.working_set),
            idle: m.guest.map(|g| g.idle),
            trust: m.trust.clone(),
            convergence: m.convergence,
            offload: s.offload.clone(),
            partial_thp: s.partial_thp.clone(),
            zeros: s.zeros.clone(),
            zeros_stay: tick.sample.host.zeros.map(|_| m.zeros_stay.clone()).unwrap_or_default(),
            merge: s.merge.clone(),
        }
    }
}

/// The highest tier that works for a VM now.
fn tier(s: &VmSample) -> &'static str {
    match (&s.agent, &s.balloon) {
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
