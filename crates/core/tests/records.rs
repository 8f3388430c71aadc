//! Records and handed-over states keep the names that fields had when they were first written.

use ebb_core::model::Pressure;
use ebb_core::plan::ScanOrder;
use ebb_core::policy::merge::{BurstMemory, MergeCounts, MergeMemory, VmMergeMemory};
use ebb_core::sample::{HostSample, LimitSample, ScanSample};
use ebb_core::state::{Footprint, LimitMemory, Memory, VmMemory, ZeroMemory};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Whether a value is written with these keys, and read from them.
fn is_kept<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, keys: &Value) {
    let written = serde_json::to_value(value).unwrap();
    for (key, of) in keys.as_object().unwrap() {
        assert_eq!(&written[key], of, "{key} of {written}");
    }
    assert_eq!(&serde_json::from_value::<T>(written).unwrap(), value);
}

#[test]
fn renamed_fields_are_in_json_as_they_were() {
    let limit = LimitSample { path: "/a".into(), ..LimitSample::default() };
    let paths = json!([limit]);
    let host = HostSample { other_limits: vec![limit], ..HostSample::default() };
    is_kept(&host, &json!({ "bounds": paths }));
    let limit = LimitMemory { name: "/a".into(), ..LimitMemory::default() };
    let memory = Memory { limits: vec![limit.clone()], ..Memory::default() };
    is_kept(&memory, &json!({ "bounds": [limit] }));
    let scan = ScanSample { spot_checks: 7, spot_checks_since: 2, ..ScanSample::default() };
    is_kept(&scan, &json!({ "looks": 7, "looks_since": 2 }));
    let order = json!({
        "vms": [], "glance": true, "cores": 0.5, "threads": 2, "bytes_per_second": 2.0, "reason": "",
    });
    let order: ScanOrder = serde_json::from_value(order).unwrap();
    assert!(order.spot_check);
    is_kept(&order, &json!({ "glance": true }));
    let merge = MergeMemory { fruitless: 3, govern: BurstMemory::default(), ..Default::default() };
    is_kept(&merge, &json!({ "lean": 3, "govern": BurstMemory::default() }));
    is_kept(&ZeroMemory { fruitless: 3, ..ZeroMemory::default() }, &json!({ "lean": 3 }));
    let counts = Some(MergeCounts { merged: 5, ..MergeCounts::default() });
    is_kept(&VmMergeMemory { counts, ..Default::default() }, &json!({ "seen": counts }));
    let footprint = Some(Footprint::default());
    is_kept(&VmMemory { footprint, ..VmMemory::default() }, &json!({ "seen": footprint }));
}

#[test]
fn what_is_not_remembered_any_more_does_not_keep_an_older_hand_over_from_being_read() {
    let ordered = json!({ "partial_thp": { "at": 7, "inflated": 9 } });
    let vm = json!({ "id": { "pid": 1, "start": 1 }, "inflated": 9, "ordered": ordered });
    let was = json!({
        "state": "hard", "vms": [vm], "urgency": 0.5, "others": [[1000, 7]],
        "others_of": ["host", [{ "pid": 1, "start": 1 }]], "bounds": [],
    });
    let memory: Memory = serde_json::from_value(was).unwrap();
    assert_eq!((memory.state, memory.vms[0].inflated.0), (Pressure::Hard, 9));
}
