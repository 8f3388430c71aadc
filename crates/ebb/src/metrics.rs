//! `/metrics`: Prometheus text from the tables of fields. Nothing is named here.

use std::fmt::Write;

use crate::fields::{Field, HOST_FIELDS, Kind, Unit, VM_FIELDS};
use crate::view::State;

/// The whole page.
pub fn render(state: &State) -> String {
    let mut out = String::with_capacity(8192);
    for f in HOST_FIELDS {
        let name = head(&mut out, f, "ebb_host_");
        if let Some(v) = (f.get)(state) {
            let _ = writeln!(out, "{name} {v}");
        }
    }
    for f in VM_FIELDS {
        let name = head(&mut out, f, "ebb_vm_");
        for vm in &state.vms {
            if let Some(v) = (f.get)(vm) {
                let _ = writeln!(out, "{name}{{vm=\"{}\"}} {v}", escape(&vm.name));
            }
        }
    }
    out
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
