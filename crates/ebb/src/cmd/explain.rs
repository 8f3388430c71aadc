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
    let pool = vm.hugetlb.if_any(|pool| format!(", {pool} of a pool of huge pages"));
    let mut out = format!(
        "{} (pid {}), tier {}\n  size      {} of {} RAM; floor {}, ceiling {}{}\n  \
         resident  {}, in swap {}{pool}\n  guest     needs {}, working set {}, has {} available\n  \
         now       {}\n  host      {}: {}\n",
        vm.name,
        vm.pid,
        vm.tier,
        size(vm.actual),
        size(vm.ram),
        size(vm.floor),
        size(vm.ceiling),
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
    if let Some(why) = &vm.pinned {
        out += &format!("  pinned    {why}\n");
    }
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
    for (title, words) in vm.tasks.lines() {
        out += &format!("  {title:<9} {words}\n");
    }
    if !vm.zeros_stay.is_empty() {
        out += &format!("  zeros     stay: {}\n", vm.zeros_stay);
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

/// What the host's memory of a VM is held for: what its guest uses, what of its free memory the
/// host still holds (only its module tells), what is the VMM's, and the rest. A guest uses memory
/// that the host does not hold, too: in swap, or freed as zeros.
fn held_for(vm: &Vm) -> Option<String> {
    let (resident, swap) = (vm.resident? + vm.hugetlb, vm.swap.unwrap_or_default());
    let (known, uses, rest) = by_module(vm).or_else(|| by_statistics(vm))?;
    let said = if let Some(vmm) = vm.vmm.filter(|vmm| known + *vmm <= resident) {
        format!("{uses}, {vmm} of the VMM itself; {rest}: {} or more", resident - known - vmm)
    } else if known <= resident {
        format!("{uses}; {rest}, or the VMM's own: {} or more", resident - known)
    } else {
        format!(
            "{uses}; of that {} or more are not in memory ({swap} in swap, or pages of zeros)",
            known - resident
        )
    };
    let merged = vm.merge.as_ref().map_or(Bytes(0), merged_now);
    let shared = |merged| format!("; {merged} are merged, and count for each VM that has them");
    Some(said + &merged.if_any(shared))
}

/// What of a VM's resident memory is merged. Zero pages that KSM found are not resident.
fn merged_now(m: &MergeSample) -> Bytes {
    m.seen.map_or(Bytes::pages(m.stat.merging_pages.unwrap_or(0)), |(_, merged)| merged)
}

/// By the guest's module: what is known of what is held, in bytes and in words, and what the rest is.
fn by_module(vm: &Vm) -> Option<(Bytes, String, &'static str)> {
    let agent = vm.agent.as_ref()?;
    let (facts, held, free) = (agent.facts.as_ref()?, agent.held?, agent.free?);
    // A guest may tell any numbers.
    let anon = Bytes::pages(facts.anon) + Bytes::pages(facts.shmem);
    let cache =
        Bytes::pages(facts.cached) + Bytes::pages(facts.buffers) - Bytes::pages(facts.shmem);
    let used = vm.actual.or(vm.ram)? - free;
    let in_part = |partial| format!("{partial} of it in huge pages that the guest uses in part; ");
    let partial = agent.held_partial.unwrap_or_default().if_any(in_part);
    let free_held = format!("{held} free in the guest ({partial}{free} are free in all)");
    // Its CPUs' own lists, and pages that the module does not record.
    let unmapped = Bytes::pages(facts.free) - free;
    let uses = if anon + cache + unmapped > used {
        format!(
            "{used} that the guest uses (its account does not fit: it changes fast, or lies), \
             {free_held}"
        )
    } else {
        let kernel = used - anon - cache - unmapped;
        let kernel = format!("{kernel} of the guest's kernel");
        let unmapped = unmapped.if_any(|some| format!("{some} free but not in the module's map, "));
        format!("{anon} of programs, {cache} page cache, {kernel}, {unmapped}{free_held}")
    };
    // `held` is counted every two seconds.
    Some((used + held, uses, "freed in the last 3 s"))
}

fn by_statistics(vm: &Vm) -> Option<(Bytes, String, &'static str)> {
    // With `deflate-on-oom` the total does not shrink with the balloon.
    let used = vm.guest_total?.min(vm.actual?) - vm.guest_free?;
    let cache = vm.guest_caches.map_or(String::new(), |c| format!(" ({} page cache)", c.min(used)));
    Some((
        used,
        format!("{used} that the guest uses{cache}"),
        "free in the guest, or its kernel's image",
    ))
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
    use ebb_core::sample::{AgentSample, KsmStat};
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
             the guest (400 MiB are free in all); freed in the last 3 s, or the VMM's own: \
             44 MiB or more"
        );
        let agent = vm.agent.as_mut().unwrap();
        agent.held_partial = Some(mib(9));
        agent.facts = Some(Facts { free: pages(404), ..facts });
        let said = held_for(&vm).unwrap();
        let middle = "28 MiB of the guest's kernel, 4 MiB free but not in the module's map, 14 MiB \
                      free in the guest (9 MiB of it in huge pages that the guest uses in part; \
                      400 MiB are free in all)";
        assert!(said.contains(middle), "{said}");
        let says = |vm: &Vm, begin: &str, end: &str| {
            let said = held_for(vm).unwrap();
            assert!(said.starts_with(begin) && said.ends_with(end), "{begin}…{end}: {said}");
        };
        vm.vmm = Some(mib(40));
        says(&vm, "", "in all), 40 MiB of the VMM itself; freed in the last 3 s: 4 MiB or more");
        vm.vmm = None;
        // Parts are no more than the whole.
        let full = (vm.resident, vm.swap);
        (vm.resident, vm.swap) = (Some(mib(90)), Some(mib(80)));
        let end = "; of that 36 MiB or more are not in memory (80 MiB in swap, or pages of zeros)";
        says(&vm, "", end);
        (vm.resident, vm.swap) = full;
        // A guest that lies, also with the largest numbers.
        let most = Facts { anon: u64::MAX, shmem: 1, cached: u64::MAX, buffers: 1, ..facts };
        for facts in [Facts { anon: pages(5000), ..facts }, most] {
            vm.agent.as_mut().unwrap().facts = Some(facts);
            let begin = "112 MiB that the guest uses (its account does not fit: it changes fast, or lies), 14 MiB";
            says(&vm, begin, "");
        }
        vm.agent.as_mut().unwrap().held = None;
        assert_eq!(held_for(&vm), None, "not known is not zero");
        (vm.guest_total, vm.guest_free) = (Some(mib(490)), Some(mib(400)));
        vm.guest_caches = Some(mib(50));
        let said = held_for(&vm).unwrap();
        assert_eq!(
            said,
            "90 MiB that the guest uses (50 MiB page cache); free in the guest, or its kernel's \
             image, or the VMM's own: 80 MiB or more",
            "without a module its balloon's statistics tell"
        );
        vm.actual = Some(mib(450));
        says(&vm, "50 MiB that the guest uses", "");
        vm.actual = vm.ram;
        // A pool of huge pages is in memory.
        (vm.resident, vm.hugetlb) = (Some(mib(30)), mib(512));
        let end = "free in the guest, or its kernel's image, or the VMM's own: 452 MiB or more";
        says(&vm, "", end);
        (vm.resident, vm.hugetlb) = (full.0, mib(0));
        let stat =
            KsmStat { merging_pages: Some(pages(7)), zero_pages: Some(9), ..KsmStat::default() };
        vm.merge = Some(MergeSample { stat, ..MergeSample::default() });
        says(&vm, "", "; 7 MiB are merged, and count for each VM that has them");
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
