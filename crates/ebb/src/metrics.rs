//! `/metrics`: Prometheus text from the tables of fields. Nothing is named here.

use std::fmt::Write;

use ebb_core::histogram::{Histogram, QUANTILES};
use ebb_core::sample::AgentSample;

use crate::fields::{Field, HOST_FIELDS, Kind, LIMIT_FIELDS, Unit, VM_FIELDS};
use crate::view::State;

pub fn render(state: &State) -> String {
    let mut out = String::with_capacity(8192);
    family(&mut out, HOST_FIELDS, "ebb_host_", std::slice::from_ref(state), |_| String::new());
    family(&mut out, LIMIT_FIELDS, "ebb_limit_", &state.host.limits, |l| label("limit", &l.name));
    family(&mut out, VM_FIELDS, "ebb_vm_", &state.vms, |vm| label("vm", &vm.name));
    histogram(&mut out, "agent_window", "How long windows of protection were open", state, |a| {
        &a.windows
    });
    histogram(
        &mut out,
        "agent_wait",
        "How long writes of vCPUs waited for one, at most",
        state,
        |a| &a.waits,
    );
    out
}

fn family<T>(
    out: &mut String,
    fields: &[Field<T>],
    prefix: &str,
    items: &[T],
    labels: impl Fn(&T) -> String,
) {
    for f in fields {
        let name = head(out, f, prefix);
        for item in items {
            if let Some(v) = (f.get)(item) {
                let _ = writeln!(out, "{name}{} {v}", labels(item));
            }
        }
    }
}

fn label(key: &str, name: &str) -> String {
    format!("{{{key}=\"{}\"}}", escape(name))
}

/// A histogram of each agent, whose sum is the least that it can be, and its quantiles.
fn histogram(
    out: &mut String,
    key: &str,
    help: &str,
    state: &State,
    get: impl Fn(&AgentSample) -> &Histogram,
) {
    let vms = state.vms.iter();
    let all: Vec<(String, &Histogram)> =
        vms.filter_map(|vm| Some((escape(&vm.name), get(vm.agent.as_ref()?)))).collect();
    let name = format!("ebb_vm_{key}_seconds");
    let _ = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} histogram");
    for (label, h) in all.iter().filter(|(_, h)| !h.is_empty()) {
        for (end_us, count) in h.cumulative() {
            let le = end_us.map_or("+Inf".to_owned(), |us| (us as f64 / 1e6).to_string());
            let _ = writeln!(out, "{name}_bucket{{vm=\"{label}\",le=\"{le}\"}} {count}");
        }
        let _ = writeln!(out, "{name}_sum{{vm=\"{label}\"}} {}", h.least_sum_s());
        let _ = writeln!(out, "{name}_count{{vm=\"{label}\"}} {}", h.count());
    }
    let name = format!("ebb_vm_{key}_quantile_seconds");
    let _ = writeln!(out, "# HELP {name} {help}, by share.\n# TYPE {name} gauge");
    for (label, h) in &all {
        for (_, share) in QUANTILES {
            let Some(seconds) = h.quantile_ns(share).map(|ns| ns as f64 / 1e9) else { continue };
            let _ = writeln!(out, "{name}{{vm=\"{label}\",quantile=\"{share}\"}} {seconds}");
        }
    }
}

fn head<T>(out: &mut String, f: &Field<T>, prefix: &str) -> String {
    let unit = match f.unit {
        Unit::Bytes => "_bytes",
        Unit::Seconds => "_seconds",
        Unit::Ratio => "_ratio",
        Unit::PagesPerSecond => "_pages_per_second",
        Unit::Plain => "",
    };
    let (kind, total) = match f.kind {
        Kind::Gauge => ("gauge", ""),
        Kind::Counter => ("counter", "_total"),
    };
    let name = format!("{prefix}{}{unit}{total}", f.key);
    let _ = writeln!(out, "# HELP {name} {}.\n# TYPE {name} {kind}", f.help);
    name
}

/// A label value: backslash, quote and newline escaped, as the format demands.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Vm;
    use ebb_core::units::Bytes;
    use std::collections::BTreeSet;

    #[test]
    fn windows_are_a_histogram() {
        let mut windows = Histogram::default();
        [300, 700_000, 900_000].into_iter().for_each(|ns| windows.add(ns));
        let agent = Some(AgentSample { windows, ..AgentSample::default() });
        let vm = Vm { name: "a".into(), agent, ..Vm::default() };
        let text = render(&State { vms: vec![vm], ..State::default() });
        let line = |le: &str, n| {
            let line = format!("ebb_vm_agent_window_seconds_bucket{{vm=\"a\",le=\"{le}\"}} {n}\n");
            assert!(text.contains(&line), "{line}{text}");
        };
        line("0.000001", 1);
        line("0.001024", 3);
        line("+Inf", 3);
        assert!(text.contains("ebb_vm_agent_window_seconds_count{vm=\"a\"} 3\n"));
        for (share, seconds) in [("0.5", "0.0009"), ("1", "0.0009")] {
            let name = "ebb_vm_agent_window_quantile_seconds";
            let line = format!("{name}{{vm=\"a\",quantile=\"{share}\"}} {seconds}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(!text.contains("agent_wait_seconds_count"), "nothing waited");
    }

    #[test]
    fn names_carry_units_and_are_unique_and_labels_are_escaped() {
        let vm = Vm { name: "a\"b\\\n".into(), resident: Some(Bytes(7)), ..Vm::default() };
        let text = render(&State { vms: vec![vm], ..State::default() });
        assert!(text.contains("ebb_vm_resident_bytes{vm=\"a\\\"b\\\\\\n\"} 7\n"), "{text}");
        assert!(text.contains("# TYPE ebb_host_daemon_cpu_seconds_total counter\n"));
        let names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
        let unique: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(names.len(), unique.len());
        assert!(!text.contains("swap_bytes{"), "what is not known is left out");
    }
}
