//! `ebb plan`: whether more VMs fit, at whose expense, how soon, and what the worst
//! case would be. Without a size: the last tick's plan, stage by stage.

use anyhow::Result;
use ebb_core::plan::{LastResort, MergePlan};
use ebb_core::policy::admission::Admission;
use ebb_core::task::Orders;
use ebb_core::units::Bytes;
use serde::Deserialize;
use serde_json::Value;

use crate::daemon_client;
use crate::table::{emit_as, known, row, table};
use crate::view::{ActionView, Stage, State, lenient, lenient_list, lenient_parts};

#[derive(Default, Deserialize)]
#[serde(default)]
struct PlanView {
    #[serde(deserialize_with = "lenient_list")]
    actions: Vec<ActionView>,
    #[serde(flatten, deserialize_with = "lenient_parts")]
    orders: Orders,
    #[serde(deserialize_with = "lenient")]
    merge: Option<MergePlan>,
    #[serde(deserialize_with = "lenient_list")]
    last_resort: Vec<LastResort>,
    stages: Vec<Value>,
}

/// `true` where they fit (or nothing was asked).
pub fn main(socket: &str, memory: Option<Bytes>, count: u32, json: bool) -> Result<bool> {
    let Some(memory) = memory else {
        let told: Value = daemon_client::get_json(socket, "/v1/plan")?;
        let text = || {
            let state: State = daemon_client::get_json(socket, "/v1/state")?;
            Ok(by_stage(&known(&told)?, &state.host.stages))
        };
        return emit_as(json, &told, text).map(|()| true);
    };
    let path = format!("/v1/plan?memory={}&count={count}", memory.0);
    let told: Value = daemon_client::get_json(socket, &path)?;
    emit_as(json, &told, || Ok(text(&known(&told)?)))?;
    Ok(told["yes"] == true)
}

fn text(a: &Admission) -> String {
    let mut out = format!("{}: {}\n", if a.yes { "yes" } else { "no" }, a.why);
    if !a.from.is_empty() {
        let rows: Vec<Vec<String>> = a
            .from
            .iter()
            .map(|g| {
                let within = format!("{:.0} s", g.seconds.ceil());
                row![g.name, g.bytes, g.free, g.bytes - g.free, within]
            })
            .collect();
        out += "\n";
        out += &table(&["FROM", "GIVES", "FREED", "IDLE", "WITHIN"], &rows, false);
        out += &format!(
            "\nall of it within {:.0} s, if no guest needs it meanwhile\n",
            a.seconds.ceil()
        );
    }
    out + &format!("worst case: {}\n", a.worst_case.why)
}

fn by_stage(plan: &PlanView, totals: &[Stage]) -> String {
    let orders = plan.orders.each();
    if plan.stages.is_empty() && plan.actions.is_empty() && orders.is_empty() {
        return "nothing is missing, nothing is done\n".into();
    }
    let rows: Vec<Vec<String>> = totals
        .iter()
        .map(|r| row![r.name, r.missing, r.expected, r.expected_total, r.came_total, r.why])
        .collect();
    let head = ["STAGE", "MISSING", "EXPECTED", "EXPECTED SO FAR", "CAME SO FAR", "HOW"];
    let mut out = table(&head, &rows, true);
    for a in &plan.actions {
        let reason =
            a.reason.as_ref().map_or("by a rule of another version".into(), |r| r.to_string());
        out += &format!("{}: {} → {}: {reason}\n", a.name, a.from, a.to);
    }
    for m in plan.merge.iter().flat_map(|m| &m.vms) {
        let what = if m.open { "open to KSM" } else { "out of KSM" };
        out += &format!("{}: {what}: {}\n", m.name, m.reason);
    }
    for o in orders {
        out += &format!("{o}\n");
    }
    for l in &plan.last_resort {
        out += &format!("last resort, never done by Ebb: {}: {}\n", l.name, l.what);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::plan::Plan;
    use ebb_core::policy::admission::{AdmissionRequest, Supply, VmSupply, admit};

    #[test]
    fn a_plan_of_another_version_is_told_as_far_as_it_is_understood() {
        let text = r#"{"actions": [{"name": "web", "from": 1073741824, "to": 536870912,
            "reason": {"rule": "new"}}], "stages": [{"x": 1}], "zeros": [{"name": 7}],
            "offload": [{"vm": 7}, {"vm": {"pid": 1, "start": 1}, "name": "db", "bytes": 1048576,
            "reason": "it is paused"}]}"#;
        let said = by_stage(&serde_json::from_str(text).unwrap(), &[]);
        assert!(said.contains("web: 1 GiB → 512 MiB: by a rule of another version"), "{said}");
        assert!(said.contains("\ndb: page out 1 MiB: it is paused\n"), "{said}");
        let own = serde_json::to_string(&Plan::default()).unwrap();
        assert!(
            by_stage(&serde_json::from_str(&own).unwrap(), &[]).starts_with("nothing is missing")
        );
    }

    #[test]
    fn the_answer_names_who_gives_and_the_worst_case() {
        let vm = VmSupply {
            name: "web".into(),
            idle: Bytes::gib(2),
            rate: (100 << 20) as f64,
            ..VmSupply::default()
        };
        let supply =
            Supply { known: true, headroom: Bytes::gib(1), vms: vec![vm], ..Supply::default() };
        let said = text(&admit(&supply, &AdmissionRequest { memory: Bytes::gib(2), count: 1 }));
        assert!(said.starts_with("yes: 1 × 2 GiB need 2.1 GiB with overhead"), "{said}");
        assert!(said.contains("web") && said.contains("within 13 s"), "{said}");
        assert!(said.contains("worst case: if every guest used all that it may have"), "{said}");
        let said = text(&admit(&supply, &AdmissionRequest { memory: Bytes::gib(2), count: 9 }));
        assert!(said.starts_with("no: ") && said.contains("too little"), "{said}");
    }
}
