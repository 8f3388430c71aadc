//! `ebb status`: host and VMs on one screen.

use anyhow::Result;
use ebb_core::model::{Limit, Progress, Standing};
use ebb_core::sample::{Link, RunState};
use ebb_core::task::StageName;
use ebb_core::units::Bytes;

use serde_json::Value;

use crate::daemon_client;
use crate::fields::{Unit, VM_FIELDS};
use crate::table::{emit_as, known, signed, size, table};
use crate::view::{State, Vm};

/// Prints it; `true` where there are VMs.
pub fn main(socket: &str, json: bool) -> Result<bool> {
    let told: Value = daemon_client::get_json(socket, "/v1/state")?;
    emit_as(json, &told, || Ok(text(&known(&told)?)))?;
    Ok(told["vms"].as_array().is_some_and(|vms| !vms.is_empty()))
}

/// How much RAM the VMs were promised, as far as that is known.
fn of_ram(state: &State) -> String {
    let unknown = state.vms.iter().filter(|vm| vm.ram.is_none()).count();
    match state.vms.len() - unknown {
        0 => String::new(),
        _ if unknown == 0 => format!(" of {} of RAM", state.host.vms_ram),
        n => format!(" (the RAM of {n} of {} is known: {})", state.vms.len(), state.host.vms_ram),
    }
}

pub fn text(state: &State) -> String {
    let h = &state.host;
    let mut out = format!("host {} for {} s: {}\n", h.state, h.state_s, h.why);
    out += &format!(
        "     free {}, available {} of {}; swap {} of {}; VMs hold {}{}\n",
        size(h.free),
        size(h.available),
        size(h.total),
        size(h.swap_used),
        size(h.swap_total),
        h.resident,
        of_ram(state)
    );
    out += &limits(&h.limits);
    if let Some(k) = h.ksm.filter(|k| k.saved_now().0 > 0 || h.merge.is_some()) {
        let profit = k.profit_now().map_or(String::new(), |p| format!(", {} profit", signed(p)));
        let merge = h.merge.as_ref().map_or(String::new(), |m| format!("; {}", m.why));
        out += &format!("     merging saves {}{profit}{merge}\n", k.saved_now());
    }
    let zeros = h.stages.iter().find(|r| r.name == StageName::Zeros).filter(|r| r.came_total.0 > 0);
    if let Some(zeros) = zeros {
        out += &format!("     zero pages freed without merging: {}\n", zeros.came_total);
    }
    for w in &h.warnings {
        out += &format!("     warning: {w}\n");
    }
    let d = &state.daemon;
    if d.record_s > 0.0 {
        let span = span(d.record_s);
        out +=
            &format!("     the last {span} are recorded ({}): `ebb explain VM --at`\n", d.record);
    }
    if d.dry_run {
        out += "     dry run: nothing is changed, and Ebb has no guest asked for statistics\n";
    }
    if state.vms.is_empty() {
        return out + "\nno VM found; `ebb doctor` says why\n";
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
                (Unit::Bytes, Some(v)) => Bytes(v as u64).to_string(),
                (_, Some(v)) => v.to_string(),
            }));
            row.push(state_words(vm));
            row
        })
        .collect();
    out += "\n";
    out += &table(&head, &rows, true);
    for vm in state.vms.iter().filter(|vm| !vm.by_metadata.is_empty()) {
        out += &format!("{}: set in its libvirt metadata: {}\n", vm.name, vm.by_metadata);
    }
    out + &problems(state)
}

/// Limits shown at once.
const LIMITS: usize = 5;

/// Where there are others than the machine's: each with its state, the worst first.
fn limits(limits: &[Limit]) -> String {
    if limits.len() < 2 {
        return String::new();
    }
    let mut worst: Vec<&Limit> = limits.iter().collect();
    worst.sort_by_key(|l| std::cmp::Reverse(l.state));
    let line = |l: &&Limit| {
        let vms = if l.vms == 1 { "1 VM".to_owned() } else { format!("{} VMs", l.vms) };
        let (name, state) = (&l.name, l.state);
        let lacks = l.shortage.if_any(|lacks| format!(", lacks {lacks}"));
        format!("     limit {name}, {vms}: {state}, {} of {} left{lacks}\n", l.headroom, l.capacity)
    };
    let more = match worst.len().saturating_sub(LIMITS) {
        0 => String::new(),
        n => format!("     and {n} more limits (`ebb status --json`)\n"),
    };
    worst.iter().take(LIMITS).map(line).collect::<String>() + &more
}

/// Problems shown at once.
const PROBLEMS: usize = 10;

fn problems(state: &State) -> String {
    if state.problems.is_empty() {
        return String::new();
    }
    let lines = state.problems.iter().take(PROBLEMS).map(|p| format!("\n{p}"));
    let more = match state.problems.len().saturating_sub(PROBLEMS) {
        0 => String::new(),
        n => format!("\nand {n} more (`ebb status --json`)"),
    };
    lines.collect::<String>() + &more + "\n"
}

/// A time of seconds to hours, for people.
fn span(seconds: f64) -> String {
    match seconds as u64 {
        s @ ..120 => format!("{s} s"),
        s @ ..7200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
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
        (Link::Slow(why) | Link::Taken(why) | Link::Down(why), _) => match &vm.standing {
            Standing::Off(why) => why.clone(),
            _ => why.clone(),
        },
    }
}

/// How far a VM is with its last order; `None` where that is nothing to tell.
pub fn progress(vm: &Vm) -> Option<String> {
    let c = &vm.convergence;
    let to = c.target.map_or(String::new(), |t| format!(" to {t}"));
    let speed = match (c.target, c.eta_ms) {
        (Some(_), Some(ms)) => {
            let rate = Bytes(c.rate as u64);
            format!(" at {rate}/s, {:.0} s left", (ms as f64 / 1000.0).ceil())
        }
        _ => String::new(),
    };
    (c.state != Progress::Settled).then(|| format!("{}{to}{speed}", c.state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::model::Pressure;
    use ebb_core::sample::Ksm;

    #[test]
    fn problems_are_shown_with_their_vms_and_the_rest_is_counted() {
        let problem = |n: usize| crate::view::Problem {
            name: Some(format!("vm{n}")),
            source: "qmp guest-stats".into(),
            message: "claims".into(),
            ..Default::default()
        };
        let vms = vec![Vm { name: "vm1".into(), ..Vm::default() }];
        let state = |n| State {
            vms: vms.clone(),
            problems: (0..n).map(problem).collect(),
            ..State::default()
        };
        let end = "\nvm0: qmp guest-stats: claims\n";
        assert!(text(&state(1)).ends_with(end), "{}", text(&state(1)));
        let end = "vm9: qmp guest-stats: claims\nand 2 more (`ebb status --json`)\n";
        assert!(text(&state(12)).ends_with(end));
    }

    #[test]
    fn what_vms_hold_is_told_of_the_ram_that_is_known() {
        let hold = |rams: &[Option<Bytes>]| {
            let vms: Vec<Vm> = rams.iter().map(|&ram| Vm { ram, ..Vm::default() }).collect();
            let mut state = State { vms, ..State::default() };
            state.host.vms_ram = rams.iter().flatten().copied().sum();
            of_ram(&state)
        };
        let gib = Some(Bytes::gib(1));
        assert_eq!(hold(&[None, None]), "");
        assert_eq!(hold(&[gib, gib]), " of 2 GiB of RAM");
        assert_eq!(hold(&[gib, None]), " (the RAM of 1 of 2 is known: 1 GiB)");
    }

    #[test]
    fn a_vm_that_is_left_alone_is_shown_with_the_reason() {
        let link = Link::Down("it is not connected to".into());
        let standing = Standing::Off("manage = false in the configuration".into());
        let vm = Vm { name: "a".into(), link, ..Vm::default() };
        assert_eq!(state_words(&vm), "it is not connected to");
        let vm = Vm { standing, ..vm };
        assert_eq!(state_words(&vm), "manage = false in the configuration");
    }

    #[test]
    fn limits_are_shown_the_worst_first_where_there_are_several() {
        let limit = |name: &str, state, lacks, vms| Limit {
            name: name.into(),
            state,
            headroom: Bytes::mib(100),
            capacity: Bytes::gib(1),
            shortage: Bytes::mib(lacks),
            vms,
            ..Limit::default()
        };
        let mut state = State::default();
        state.host.limits = vec![limit("host", Pressure::Clear, 0, 3)];
        assert!(!text(&state).contains("limit"), "{}", text(&state));
        state.host.limits.push(limit("/t/a", Pressure::Hard, 40, 1));
        let lines = "     limit /t/a, 1 VM: hard, 100 MiB of 1 GiB left, lacks 40 MiB\n     \
                     limit host, 3 VMs: clear, 100 MiB of 1 GiB left\n";
        assert!(text(&state).contains(lines), "{}", text(&state));
        state.host.limits.extend(vec![limit("/b", Pressure::Clear, 0, 1); 5]);
        assert!(text(&state).contains("     and 2 more limits (`ebb status --json`)\n"));
    }

    #[test]
    fn nothing_is_said_to_be_saved_that_ended_vms_had_merged() {
        let ksm =
            Ksm { pages_shared: 5000, pages_sharing: 200_000, mapped: Some(0), ..Ksm::default() };
        let mut state = State::default();
        state.host.ksm = Some(ksm);
        assert!(!text(&state).contains("merging saves"), "{}", text(&state));
        state.host.ksm = Some(Ksm { mapped: Some(205_000), ..ksm });
        assert!(text(&state).contains("merging saves 781 MiB"), "{}", text(&state));
        state.host.ksm = Some(Ksm { run: 2, ..ksm });
        assert!(!text(&state).contains("merging saves"));
    }

    #[test]
    fn how_far_the_record_reaches_back_is_said() {
        let mut state = State::default();
        assert!(!text(&state).contains("recorded"));
        state.daemon.record_s = 790.0;
        state.daemon.record = Bytes::mib(6);
        assert!(text(&state).contains("the last 13 min are recorded (6 MiB)"), "{}", text(&state));
        assert_eq!((span(45.0), span(9000.0)), ("45 s".into(), "2 h".into()));
    }
}
