//! Any JSON as the answer to QMP queries: no panic, and guest statistics that
//! were believed do not contradict one another.
#![no_main]

use ebb_core::units::Bytes;
use ebb_host::qmp_balloon;
use ebb_host::qmp::Event;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let _ = qmp_balloon::parse_status(&value);
    let _ = qmp_balloon::parse_migrating(&value);
    let _ = qmp_balloon::parse_balloon(&value);
    let _ = qmp_balloon::parse_memory_size(&value);
    let _ = qmp_balloon::parse_find_balloon("/machine/peripheral", &value);
    for name in ["RESET", "BALLOON_CHANGE"] {
        let event = Event { name: name.into(), data: value.clone() };
        let _ = qmp_balloon::parse_event(&event);
    }
    let ram = Bytes::mib(64);
    let (stats, problems) = qmp_balloon::parse_guest_stats(&value, Some(ram));
    assert!(problems.len() <= 16);
    let Some(s) = stats else { return };
    assert!(s.updated_s > 0);
    let limit = s.total.unwrap_or(ram + ram);
    assert!(limit <= ram + ram);
    for part in [s.free, s.available, s.caches].into_iter().flatten() {
        assert!(part <= limit && part.0 != u64::MAX);
    }
});
