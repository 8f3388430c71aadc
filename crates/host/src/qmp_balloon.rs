//! What QMP commands mean to Ebb: run state, RAM size, the balloon device and
//! its guest's statistics; and which events Ebb uses ([`parse_event`]) and which wake a tick
//! ([`URGENT`]).
//!
//! Parsers are pure. QEMU is believed on its own state; guest statistics are a
//! guest's own claims and are checked: a value that cannot be true becomes `None` and
//! a problem. Source: QEMU `qapi/machine.json`, `qapi/run-state.json`,
//! `hw/virtio/virtio-balloon.c`, `docs/interop/virtio-balloon-stats.rst`.

use ebb_core::sample::{GuestStats, RunState, VmEvent};
use ebb_core::units::Bytes;
use serde_json::{Value, json};

use crate::qmp::Event;

/// Where devices with and without an `id=` live.
pub const DEVICE_FOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// `qom-get`: guest statistics.
pub const STATS: &str = "guest-stats";
/// `qom-get/set`: seconds between QEMU's questions to the guest, 0 for never.
pub const INTERVAL: &str = "guest-stats-polling-interval";
/// `qom-get`: free page reporting.
pub const REPORTING: &str = "free-page-reporting";
/// `qom-get`: the guest may take memory back before its OOM killer runs.
pub const DEFLATE_ON_OOM: &str = "deflate-on-oom";

/// A statistic that Linux tells and Windows does not.
const HUGE_PAGES: &str = "stat-htlb-pgalloc";

/// What is wrong with an answer that is not what QEMU's schema says.
fn lacks(command: &str, field: &str) -> String {
    format!("{command}: no {field} in the answer")
}

fn number(value: &Value, command: &str, field: &str) -> Result<u64, String> {
    value[field].as_u64().ok_or_else(|| lacks(command, field))
}

/// Arguments of `qom-list`.
pub fn list(path: &str) -> Value {
    json!({ "path": path })
}

/// Arguments of `qom-get`.
pub fn get(path: &str, property: &str) -> Value {
    json!({ "path": path, "property": property })
}

/// Arguments of `qom-set`.
pub fn set(path: &str, property: &str, value: Value) -> Value {
    json!({ "path": path, "property": property, "value": value })
}

/// Arguments of two `qom-set` after which QEMU asks the guest at once, and then each `seconds`: to
/// switch its timer off and on does that.
pub fn ask_now(path: &str, seconds: u64) -> [Value; 2] {
    [0, seconds].map(|seconds| set(path, INTERVAL, json!(seconds)))
}

/// `query-status`. The states are those of `qapi/run-state.json`; one that is
/// not known there is taken for a pause, in which nothing is asked of a guest.
pub fn parse_status(value: &Value) -> Result<RunState, String> {
    Ok(match value["status"].as_str().ok_or_else(|| lacks("query-status", "status"))? {
        "running" => RunState::Running,
        "inmigrate" | "postmigrate" | "finish-migrate" | "save-vm" | "restore-vm" | "colo" => {
            RunState::Migrating
        }
        "shutdown" | "internal-error" | "guest-panicked" => RunState::Ended,
        _ => RunState::Paused,
    })
}

/// `query-migrate`: whether a migration is under way. A source VM stays
/// `running` while its memory is copied.
pub fn parse_migrating(value: &Value) -> bool {
    !matches!(value["status"].as_str(), None | Some("none" | "completed" | "failed" | "cancelled"))
}

/// `query-balloon`: RAM less what the balloon holds.
pub fn parse_balloon(value: &Value) -> Result<Bytes, String> {
    number(value, "query-balloon", "actual").map(Bytes)
}

/// `query-memory-size-summary`: RAM at start, and what was plugged.
pub fn parse_memory_size(value: &Value) -> Result<(Bytes, Bytes), String> {
    let base = number(value, "query-memory-size-summary", "base-memory")?;
    Ok((Bytes(base), Bytes(value["plugged-memory"].as_u64().unwrap_or(0))))
}

/// `query-memory-devices`: what is plugged by DIMMs and by virtio-mem. QEMU leaves virtio-mem out
/// of the balloon's size. Other devices are no RAM of the guest.
pub fn parse_memory_devices(value: &Value) -> (Bytes, Bytes) {
    let of = |kind: &str| {
        let all = value.as_array().into_iter().flatten().filter(|d| d["type"] == kind);
        all.filter_map(|d| d["data"]["size"].as_u64()).fold(0, u64::saturating_add)
    };
    (Bytes(of("dimm")), Bytes(of("virtio-mem")))
}

/// `qom-list` of a folder: the QOM path of the first balloon in it, of any
/// transport and age (`virtio-balloon-pci-non-transitional`, `-ccw`, `-device`).
pub fn parse_find_balloon(folder: &str, value: &Value) -> Option<String> {
    let balloon = |t: &str| t.starts_with("child<virtio-balloon-");
    let device = value.as_array()?.iter().find(|d| d["type"].as_str().is_some_and(balloon))?;
    Some(format!("{folder}/{}", device["name"].as_str()?))
}

/// `qom-get` of [`STATS`]: the statistics, and what in them could not be
/// believed. `None` before the guest's first statistics. `age_ms` is left 0: the
/// caller has the clocks. `ram` as QEMU tells, where known.
pub fn parse_guest_stats(value: &Value, ram: Option<Bytes>) -> (Option<GuestStats>, Vec<String>) {
    let mut problems = Vec::new();
    let Some(updated_s) = value["last-update"].as_u64() else {
        return (None, vec!["guest-stats: no last-update in the answer".into()]);
    };
    if updated_s == 0 {
        return (None, problems);
    }
    let Some(stats) = value["stats"].as_object() else {
        return (None, vec!["guest-stats: no stats in the answer".into()]);
    };
    let mut field = |name: &str| {
        let v = stats.get(name)?;
        match (v.as_u64(), v.as_i64()) {
            (Some(u64::MAX), _) | (_, Some(-1)) => None,
            (Some(n), _) => Some(n),
            _ => {
                let shown: String = v.to_string().chars().take(40).collect();
                problems.push(format!("guest-stats: {name} is {shown}, not a number"));
                None
            }
        }
    };
    let mut s = GuestStats {
        updated_s,
        total: field("stat-total-memory").map(Bytes),
        free: field("stat-free-memory").map(Bytes),
        available: field("stat-available-memory").map(Bytes),
        caches: field("stat-disk-caches").map(Bytes),
        swap_in: field("stat-swap-in").map(Bytes),
        swap_out: field("stat-swap-out").map(Bytes),
        major_faults: field("stat-major-faults"),
        minor_faults: field("stat-minor-faults"),
        oom_kills: field("stat-oom-kill"),
        alloc_stalls: field("stat-alloc-stall"),
        direct_reclaim: field("stat-direct-reclaim"),
        ..GuestStats::default()
    };
    // Linux tells of huge pages (4.17), virtio-win's service did not before 2020.
    // Linux 4.16 tells of its cache and not of those.
    let old = stats.contains_key(HUGE_PAGES) && field(HUGE_PAGES).is_none() && s.caches.is_none();
    s.is_windows = old || has_windows_sum(&s);
    drop_absurd(&mut s, ram, &mut problems);
    (Some(s), problems)
}

/// virtio-win's service tells as available, to the byte, what is free and half of the file cache
/// (`Balloon/app/memstat.cpp`). Linux subtracts watermarks from its sum.
fn has_windows_sum(s: &GuestStats) -> bool {
    let (Some(free), Some(caches), Some(available)) = (s.free, s.caches, s.available) else {
        return false;
    };
    caches > Bytes::ZERO && available == free + Bytes(caches.0 / 2)
}

/// Takes out what contradicts the VM's size or the guest's own total.
fn drop_absurd(s: &mut GuestStats, ram: Option<Bytes>, problems: &mut Vec<String>) {
    let twice = ram.map(|r| r + r);
    let mut check = |what: &str, value: &mut Option<Bytes>, limit: Option<Bytes>, name: &str| {
        if let (Some(v), Some(limit)) = (*value, limit)
            && v > limit
        {
            problems.push(format!(
                "guest-stats: the guest claims {v} {what}, more than {name} {limit}"
            ));
            *value = None;
        }
    };
    check("in total", &mut s.total, twice, "twice its RAM,");
    let (limit, name) = match s.total {
        Some(total) => (Some(total), "its total of"),
        None => (twice, "twice its RAM,"),
    };
    check("free", &mut s.free, limit, name);
    check("available", &mut s.available, limit, name);
    check("of caches", &mut s.caches, limit, name);
}

/// What an event means to Ebb; `None` for one that means nothing.
pub fn parse_event(event: &Event) -> Option<VmEvent> {
    Some(match event.name.as_str() {
        "RESET" => VmEvent::Reset,
        "SHUTDOWN" => VmEvent::Shutdown,
        "STOP" => VmEvent::Stop,
        "RESUME" => VmEvent::Resume,
        "BALLOON_CHANGE" => VmEvent::Balloon(Bytes(event.data["actual"].as_u64()?)),
        "MIGRATION" => VmEvent::Migration,
        _ => return None,
    })
}

/// Events after which devices and RAM size are looked up again.
pub fn changes_devices(event: &Event) -> bool {
    matches!(
        event.name.as_str(),
        "MEMORY_DEVICE_SIZE_CHANGE" | "DEVICE_DELETED" | "ACPI_DEVICE_OST"
    )
}

/// Events that are worth an early tick; of `BALLOON_CHANGE` only some are
/// ([`tells_more_than_ordered`]).
pub const URGENT: [&str; 6] =
    ["RESET", "SHUTDOWN", "STOP", "RESUME", "MIGRATION", "GUEST_PANICKED"];

/// Whether a `BALLOON_CHANGE` is worth an early tick. It comes once a second while
/// a balloon moves, which is when Ebb moves it: worth looking at is one that has
/// arrived where it was told to go (the next may be told), or that moves against
/// the order (a guest's driver on OOM, another tool).
pub fn tells_more_than_ordered(event: &Event, last: Option<Bytes>, ordered: Option<Bytes>) -> bool {
    let Some(VmEvent::Balloon(actual)) = parse_event(event) else { return false };
    match (last, ordered) {
        (_, Some(to)) if actual.abs_diff(to) < Bytes::mib(1) => true,
        (Some(was), Some(to)) => {
            (to < was) != (actual < was) && actual.abs_diff(was) > Bytes::mib(1)
        }
        (Some(was), None) => actual.abs_diff(was) > Bytes::mib(1),
        (None, _) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_sorted_by_what_may_be_done() {
        for (status, state) in [
            ("running", RunState::Running),
            ("paused", RunState::Paused),
            ("prelaunch", RunState::Paused),
            ("suspended", RunState::Paused),
            ("something-new", RunState::Paused),
            ("inmigrate", RunState::Migrating),
            ("guest-panicked", RunState::Ended),
        ] {
            assert_eq!(parse_status(&json!({ "status": status })), Ok(state));
        }
        assert!(parse_status(&json!({ "status": 1 })).is_err());
        assert!(parse_migrating(&json!({ "status": "active" })));
        assert!(!parse_migrating(&json!({ "status": "completed" })));
        assert!(!parse_migrating(&json!({})));
    }

    #[test]
    fn the_balloon_is_found_whatever_its_transport() {
        for kind in ["pci", "ccw", "device", "pci-transitional", "pci-non-transitional"] {
            let items = json!([
                { "name": "type", "type": "string" },
                { "name": "b0", "type": format!("child<virtio-balloon-{kind}>") },
            ]);
            let path = parse_find_balloon(DEVICE_FOLDERS[0], &items);
            assert_eq!(path.as_deref(), Some("/machine/peripheral/b0"));
        }
        for items in [json!([{ "type": "child<virtio-net-pci>" }, 3]), json!({})] {
            assert_eq!(parse_find_balloon("/x", &items), None);
        }
    }

    #[test]
    fn a_balloon_wakes_where_it_arrives_or_goes_its_own_way() {
        let (name, data) = ("BALLOON_CHANGE", |mib: u64| json!({ "actual": mib << 20 }));
        let event = |mib| Event { name: name.into(), data: data(mib) };
        let tells = |actual, last: Option<u64>, to: Option<u64>| {
            tells_more_than_ordered(&event(actual), last.map(Bytes::mib), to.map(Bytes::mib))
        };
        assert!(!tells(900, Some(1000), Some(500)), "on its way");
        assert!(tells(500, Some(900), Some(500)), "there");
        assert!(tells(1000, Some(900), Some(500)), "it deflated itself");
        assert!(tells(800, Some(1000), None), "nobody told it");
        assert!(!tells(800, None, None));
        assert!(!tells_more_than_ordered(&Event { name: "RESET".into(), ..event(1) }, None, None));
    }

    #[test]
    fn unset_statistics_are_unknown_and_not_zero() {
        let (s, problems) = parse_guest_stats(
            &json!({ "last-update": 5, "stats": { "stat-free-memory": u64::MAX,
                "stat-total-memory": 100, "stat-swap-in": -1, "stat-major-faults": 0 } }),
            None,
        );
        let s = s.unwrap();
        assert_eq!((s.free, s.swap_in, s.available), (None, None, None));
        assert_eq!((s.total, s.major_faults), (Some(Bytes(100)), Some(0)));
        assert_eq!(problems, [""; 0]);
        let never = json!({ "last-update": 0, "stats": {} });
        assert_eq!(parse_guest_stats(&never, None), (None, vec![]));
    }

    #[test]
    fn a_windows_guest_is_known_by_its_statistics() {
        let reads = |stats: Value| {
            let said = json!({ "last-update": 5, "stats": stats });
            parse_guest_stats(&said, None).0.unwrap().is_windows
        };
        assert!(reads(json!({ "stat-free-memory": 1, "stat-htlb-pgalloc": u64::MAX })));
        assert!(!reads(json!({ "stat-free-memory": 1, "stat-htlb-pgalloc": 0 })));
        assert!(!reads(json!({ "stat-free-memory": 1 })), "a QEMU that does not ask for it");
        let sum = |available: u64| {
            let (free, caches) = (4_294_967_296u64, 734_003_200u64);
            reads(json!({ "stat-free-memory": free, "stat-disk-caches": caches,
                "stat-available-memory": available, "stat-htlb-pgalloc": 0 }))
        };
        assert!(sum(4_661_968_896) && !sum(4_661_968_896 - 4096) && !sum(4_294_967_296));
    }

    #[test]
    fn what_a_guest_cannot_have_is_dropped_and_told() {
        let stats = |total: u64, available: u64| {
            json!({ "last-update": 5, "stats": { "stat-total-memory": total,
                "stat-available-memory": available } })
        };
        let ram = Some(Bytes(1000));
        let (s, problems) = parse_guest_stats(&stats(900, 901), ram);
        assert_eq!((s.unwrap().available, s.unwrap().total), (None, Some(Bytes(900))));
        let why = "901 B available, more than its total of 900 B";
        assert!(problems[0].contains(why), "{problems:?}");
        let (s, problems) = parse_guest_stats(&stats(2001, 2001), ram);
        assert_eq!((s.unwrap().total, s.unwrap().available, problems.len()), (None, None, 2));
        for bad in [json!(null), json!({ "last-update": "x" }), json!({ "last-update": 1 })] {
            let (s, problems) = parse_guest_stats(&bad, ram);
            assert!(s.is_none() && problems.len() == 1);
        }
        let wrong = json!({ "last-update": 1, "stats": { "stat-free-memory": "much", "stat-swap-in": 1.5 } });
        assert_eq!(parse_guest_stats(&wrong, ram).1.len(), 2);
    }
}
