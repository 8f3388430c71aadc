//! `ebb status`: host and VMs on one screen.

use anyhow::Result;
use ebb_core::model::Progress;
use ebb_core::plan::RungName;
use ebb_core::sample::{Link, RunState};

use crate::client;
use crate::fields::{Unit, VM_FIELDS};
use crate::table::{emit, emit_json, signed, size, table};
use crate::view::{State, Vm};

/// Prints it; `true` where there are VMs.
pub fn main(socket: &str, json: bool) -> Result<bool> {
    let state: State = client::get_json(socket, "/v1/state")?;
    if json {
        emit_json(&state)?;
    } else {
        emit(&text(&state))?;
    }
    Ok(!state.vms.is_empty())
}

/// The screen.
pub fn text(state: &State) -> String {
    let h = &state.host;
    let mut out = format!("host {} for {} s: {}\n", h.state, h.state_s, h.why);
    out += &format!(
        "     free {}, available {} of {}; swap {} of {}; VMs hold {} of {} promised\n",
        size(h.free),
        size(h.available),
        size(h.total),
        size(h.swap_used),
        size(h.swap_total),
        h.resident,
        h.promised
    );
    if let Some(k) = h.ksm.filter(|k| k.saved_now().0 > 0 || h.merge.is_some()) {
        let profit = k.profit_now().map_or(String::new(), |p| format!(", {} profit", signed(p)));
        let merge = h.merge.as_ref().map_or(String::new(), |m| format!("; {}", m.why));
        out += &format!("     merging saves {}{profit}{merge}\n", k.saved_now());
    }
    let zeros = h.ladder.iter().find(|r| r.name == RungName::Zeros).filter(|r| r.came_total.0 > 0);
    if let Some(zeros) = zeros {
        out += &format!("     zeros let go of without merging: {}\n", zeros.came_total);
    }
    for w in &h.warnings {
        out += &format!("     warning: {w}\n");
    }
    if state.daemon.dry_run {
        out += "     dry run: nothing is changed\n";
    }
    if state.vms.is_empty() {
        return out + "\nno VM found; `ebb doctor` says where Ebb looks\n";
    }
    let fields: Vec<_> = VM_FIELDS.iter().filter(|f| !f.title.is_empty()).collect();
    let mut head = vec!["VM", "TIER"];
    head.extend(fields.iter().map(|f| f.title));
    head.push("STATE");
    let rows: Vec<Vec<String>> = state
        .vms
        .iter()
        .map(|vm| {
            let mut row = vec![vm.name.clone(), vm.tier.clone()];
            row.extend(fields.iter().map(|f| match (f.unit, (f.get)(vm)) {
                (_, None) => "-".into(),
                (Unit::Bytes, Some(v)) => ebb_core::units::Bytes(v as u64).to_string(),
                (_, Some(v)) => v.to_string(),
            }));
            row.push(state_words(vm));
            row
        })
        .collect();
    out += "\n";
    out += &table(&head, &rows, true);
    for p in state.problems.iter().take(10) {
        out += &format!("\n{}: {}", p.source, p.message);
    }
    if !state.problems.is_empty() {
        out += "\n";
    }
    out
}

fn state_words(vm: &Vm) -> String {
    match (&vm.link, &vm.run) {
        (Link::Up, Some(RunState::Running)) if !vm.distress.is_empty() => {
            format!("short: {}", vm.distress)
        }
        (Link::Up | Link::Unknown, _) => match progress(vm) {
            Some(progress) => format!("{progress}; {}", vm.verdict),
            None => vm.verdict.clone(),
        },
        (Link::Slow(why) | Link::Taken(why) | Link::Down(why), _) => why.clone(),
    }
}

/// How far a VM is with its last order; `None` where that is nothing to tell.
pub fn progress(vm: &Vm) -> Option<String> {
    let c = &vm.convergence;
    let to = c.target.map_or(String::new(), |t| format!(" to {t}"));
    let speed = match (c.target, c.eta_ms) {
        (Some(_), Some(ms)) => {
            let rate = ebb_core::units::Bytes(c.rate as u64);
            format!(" at {rate}/s, {:.0} s left", (ms as f64 / 1000.0).ceil())
        }
        _ => String::new(),
    };
    (c.state != Progress::Settled).then(|| format!("{}{to}{speed}", c.state))
}
