//! `ebb explain VM`: what is so, what was done, and why.

use anyhow::{Result, bail};
use ebb_core::sample::MergeSample;
use ebb_core::units::Bytes;
use serde_json::{Value, json};

use crate::cmd::status::progress;
use crate::daemon_client;
use crate::table::{clock, emit_as, known, signed};
use crate::view::{Decision, State, Vm};

pub fn main(socket: &str, name: &str, last: usize, json: bool) -> Result<()> {
    let all: Value = daemon_client::get_json(socket, "/v1/state")?;
    let mut decisions: Vec<Value> = daemon_client::get_json(socket, "/v1/decisions")?;
    let state: State = known(&all)?;
    let vm = find(&state, name)?;
    decisions.retain(|d| d["action"]["name"] == name);
    let own = decisions.split_off(decisions.len().saturating_sub(last));
    let its = all["vms"].as_array().and_then(|vms| vms.iter().find(|v| v["name"] == name));
    emit_as(json, &json!({ "vm": its, "host": all["host"], "decisions": own }), || {
        let own = own.iter().map(known).collect::<Result<Vec<Decision>>>()?;
        Ok(text(&state, vm, &own))
    })
}

/// The VM of this name; an error lists those there are.
pub fn find<'a>(state: &'a State, name: &str) -> Result<&'a Vm> {
    match state.vms.iter().find(|v| v.name == name) {
        Some(vm) => Ok(vm),
        None if state.vms.is_empty() => bail!("no VM is called “{name}”: no VM was found at all"),
        None => {
            let names: Vec<&str> = state.vms.iter().map(|v| v.name.as_str()).take(30).collect();
            bail!("no VM is called “{name}”; there are: {}", names.join(", "))
        }
    }
}

pub fn text(state: &State, vm: &Vm, decisions: &[Decision]) -> String {
    let size = |b: Option<Bytes>| b.map_or("?".to_string(), |b| b.to_string());
    let mut out = format!(
        "{} (pid {}), tier {}\n  size      {} of {} RAM; floor {}, ceiling {}{}\n  \
         resident  {}, in swap {}\n  guest     needs {}, working set {}, has {} available\n  \
         now       {}\n  host      {}: {}\n",
        vm.name,
        vm.pid,
        vm.tier,
        size(vm.actual),
        size(vm.ram),
        vm.floor,
        vm.ceiling,
        progress(vm).map_or(String::new(), |p| format!("; {p}")),
        size(vm.resident),
        size(vm.swap),
        size(vm.need),
        size(vm.working_set),
        size(vm.available),
        if vm.verdict.contains(&vm.distress) {
            vm.verdict.clone()
        } else {
            format!("{} ({})", vm.verdict, vm.distress)
        },
        state.host.state,
        state.host.why,
    );
    if !vm.by_metadata.is_empty() {
        out += &format!("  metadata  {}, by its libvirt domain\n", vm.by_metadata);
    }
    if let Some(parts) = held_for(vm) {
        out += &format!("  held for  {parts}\n");
    }
    if !vm.trust.why.is_empty() {
        out += &format!("  trust     {:.0} %: {}\n", vm.trust.level * 100.0, vm.trust.why);
    }
    if let Some(a) = &vm.agent {
        for (what, h) in [("windows ", &a.windows), ("waits   ", &a.waits)] {
            if !h.is_empty() {
                out += &format!("  {what}  {h}\n");
            }
        }
    }
    if let Some(o) = &vm.offload {
        let error = o.error.as_ref().map_or(String::new(), |e| format!("; {e}"));
        out += &format!("  paged out {} on order{error}\n", o.paged_out);
    }
    if let Some(t) = &vm.partial_thp {
        let error = t.error.as_ref().map_or(String::new(), |e| format!("; {e}"));
        out += &format!(
            "  huge      {} partially mapped huge pages split, {} freed{error}\n",
            t.split, t.freed
        );
    }
    if let Some(words) = zero_words(vm) {
        out += &format!("  zeros     {words}\n");
    }
    if let Some(m) = &vm.merge {
        out += &format!("  merging   {}\n", merge_words(vm, m));
    }
    let r = &vm.returned;
    out += &format!(
        "  returned  {} recycled, {} by balloon, {} by free page reporting, {} zeros, {} to swap, {} otherwise; {} given back\n",
        r.recycled, r.balloon, r.reporting, r.zeros, r.swap, r.other, r.given_back
    );
    if decisions.is_empty() {
        out += "  no orders yet\n";
    }
    for d in decisions {
        let result = d.error.as_ref().map_or(String::new(), |e| format!(" — {e}"));
        out += &format!(
            "\n  {}  {} → {}  {}{result}\n            host {}\n            guest {}\n",
            clock(d.wall_ms),
            d.action.from,
            d.action.to,
            d.reason,
            d.host,
            d.guest
        );
    }
    out
}

/// What the host's memory of a VM is held for, where its module tells: the guest's own account,
/// what of its free memory the host still holds, and the rest, which is the VMM's. A guest uses
/// memory that the host does not hold, too: in swap, or freed as zeros.
fn held_for(vm: &Vm) -> Option<String> {
    let (agent, ram, resident) = (vm.agent.as_ref()?, vm.ram?, vm.resident?);
    let (facts, held) = (agent.facts.as_ref()?, agent.held?);
    let (free, all) = (agent.free?, vm.actual.unwrap_or(ram));
    let anon = Bytes::pages(facts.anon + facts.shmem);
    let cache = Bytes::pages(facts.cached + facts.buffers) - Bytes::pages(facts.shmem);
    let used = all - free;
    let free = format!("{held} free in the guest ({free} are free in all)");
    let uses = if anon + cache > used {
        format!(
            "{used} that the guest uses (its account does not fit: it changes fast, or lies), {free}"
        )
    } else {
        let kernel = used - anon - cache;
        format!("{anon} of programs, {cache} page cache, {kernel} of the guest's kernel, {free}")
    };
    let (known, swap) = (used + held, vm.swap.unwrap_or_default());
    Some(if known <= resident {
        // `held` is counted every two seconds.
        let own = resident - known;
        format!("{uses}; the VMM's own, and what was freed in the last 3 s: {own} or more")
    } else {
        format!(
            "{uses}; of that {} or more are not in memory ({swap} in swap, or pages of zeros)",
            known - resident
        )
    })
}

/// What became of its pages of zeros, or why nothing does.
fn zero_words(vm: &Vm) -> Option<String> {
    let done = vm.zeros.as_ref().map(|z| {
        let error = z.error.as_ref().map_or(String::new(), |e| format!("; {e}"));
        format!("{} freed, {} scanned{error}", z.freed, z.read)
    });
    let stay = (!vm.zeros_stay.is_empty()).then(|| format!("stay: {}", vm.zeros_stay));
    match (done, stay) {
        (Some(done), Some(stay)) => Some(format!("{done}; {stay}")),
        (done, stay) => done.or(stay),
    }
}

fn merge_words(vm: &Vm, m: &MergeSample) -> String {
    let open = match m.open {
        Some(true) => "open to KSM",
        Some(false) => "out of KSM",
        None => "not looked at",
    };
    let mut out = format!("{open}, group {}; {} merged", vm.group, Bytes::pages(m.stat.merged()));
    if let Some(p) = m.stat.profit {
        out += &format!(", {} profit", signed(p));
    }
    if let Some(f) = &m.found {
        out += &format!("; {} more to be had for {:.1} s of CPU", f.saves(), f.cost_s());
    }
    m.error.iter().for_each(|e| out += &format!("; {e}"));
    out
}

#[cfg(test)]
mod tests {
    use ebb_core::sample::AgentSample;
    use ebb_core::wire::abi::Facts;

    use super::*;

    #[test]
    fn what_a_vm_holds_is_told_by_what_it_is_for() {
        let mib = Bytes::mib;
        let pages = |n| mib(n).0 / ebb_core::units::PAGE;
        let (cached, anon, shmem) = (pages(60), pages(20), pages(10));
        let facts = Facts { cached, anon, shmem, ..Facts::default() };
        let agent = AgentSample {
            facts: Some(facts),
            free: Some(mib(400)),
            held: Some(mib(14)),
            ..AgentSample::default()
        };
        let mut vm = Vm {
            ram: Some(mib(512)),
            actual: Some(mib(512)),
            resident: Some(mib(170)),
            agent: Some(agent),
            ..Vm::default()
        };
        let said = held_for(&vm).unwrap();
        assert_eq!(
            said,
            "30 MiB of programs, 50 MiB page cache, 32 MiB of the guest's kernel, 14 MiB free in \
             the guest (400 MiB are free in all); the VMM's own, and what was freed in the last 3 s: \
             44 MiB or more"
        );
        let full = (vm.resident, vm.swap);
        (vm.resident, vm.swap) = (Some(mib(90)), Some(mib(80)));
        let said = held_for(&vm).unwrap();
        let end = "; of that 36 MiB or more are not in memory (80 MiB in swap, or pages of zeros)";
        assert!(said.ends_with(end), "parts are no more than the whole: {said}");
        (vm.resident, vm.swap) = full;
        vm.agent.as_mut().unwrap().facts = Some(Facts { anon: pages(5000), ..facts });
        let said = held_for(&vm).unwrap();
        let begin = "112 MiB that the guest uses (its account does not fit: it changes fast, or lies), 14 MiB";
        assert!(said.starts_with(begin), "a guest that lies: {said}");
        vm.agent.as_mut().unwrap().held = None;
        assert_eq!(held_for(&vm), None, "not known is not zero");
    }

    #[test]
    fn an_unknown_name_lists_those_there_are() {
        let vm = Vm { name: "web1".into(), ..Vm::default() };
        let state = State { vms: vec![vm], ..State::default() };
        assert!(find(&state, "web1").is_ok());
        let said = find(&state, "web").unwrap_err().to_string();
        assert_eq!(said, "no VM is called “web”; there are: web1");
    }
}
