//! What users read of one host that never changes: a change of these texts is a change for users.
//!
//! `golden/state.json`, `decisions.json` and `sample.json` are what the daemon tells of it and what
//! it has seen; the other files are what is made of that. `EBB_GOLDEN=write cargo test -p ebb golden`
//! writes all of them anew.

use std::path::{Path, PathBuf};

use ebb_core::sample::Sample;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cmd::{doctor, explain, status};
use crate::metrics;
use crate::view::{Decision, State};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/golden").join(name)
}

fn stored<T: DeserializeOwned>(name: &str) -> T {
    let text = std::fs::read_to_string(file(name)).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn is(name: &str, text: &str) {
    if std::env::var("EBB_GOLDEN").is_ok_and(|v| v == "write") {
        return std::fs::write(file(name), text).unwrap();
    }
    let golden = std::fs::read_to_string(file(name)).unwrap();
    let other = golden.lines().zip(text.lines()).find(|(a, b)| a != b);
    assert!(golden == text, "golden/{name} is another: was, is {other:#?}");
}

/// What is stored and is not told any more, or under another name.
fn lost(was: &Value, now: &Value) -> Option<String> {
    match (was, now) {
        (Value::Object(was), _) => was.iter().find_map(|(key, value)| match now.get(key) {
            None => Some(key.clone()),
            Some(now) => lost(value, now).map(|inner| format!("{key}.{inner}")),
        }),
        (Value::Array(was), Value::Array(now)) => {
            was.iter().zip(now).find_map(|(was, now)| lost(was, now))
        }
        _ => None,
    }
}

fn is_kept<T: Serialize>(name: &str, told: &T) {
    let now = serde_json::to_value(told).unwrap();
    assert_eq!(lost(&stored(name), &now), None, "{name}: it is not told any more");
    is(name, &(serde_json::to_string_pretty(told).unwrap() + "\n"));
}

#[test]
fn what_users_read_of_one_host_stays_as_it_is() {
    let state: State = stored("state.json");
    let decisions: Vec<Decision> = stored("decisions.json");
    let sample: Sample = stored("sample.json");
    is_kept("state.json", &state);
    is_kept("decisions.json", &decisions);
    is_kept("sample.json", &sample);
    is("metrics.txt", &metrics::render(&state));
    is("status.txt", &status::text(&state));
    let explained = state.vms.iter().map(|vm| {
        let mut own = decisions.clone();
        own.retain(|d| d.action.name == vm.name);
        explain::text(&state, vm, &own)
    });
    is("explain.txt", &explained.collect::<Vec<_>>().join("\n"));
    is("doctor.txt", &doctor::of_sample(sample));
}
