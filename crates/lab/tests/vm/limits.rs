//! Several limits on one host, on real VMs: those below the limit that is short give, others do
//! not.

use ebb_lab::ebb;

use super::*;

const RAM: Bytes = Bytes::mib(512);
/// What each guest touches and frees.
const HELD: Bytes = Bytes::mib(256);
/// Two guests that have touched so much and hold it fit, but not beside the reserve.
const LIMIT: Bytes = Bytes::gib(1);
const SHORT: &str = "reserve = \"420MiB\"";

fn actual(state: &Value, name: &str) -> Bytes {
    Bytes(of(state, name)["actual"].as_u64().unwrap_or(0))
}

#[test]
fn vm_those_below_a_full_slice_give_and_the_one_beside_does_not() {
    let arena = Arena::within(Bytes::gib(64), Beside::AnyTest).unwrap();
    let slice = arena.cgroup().unwrap().child("slice", LIMIT).unwrap();
    let beside = arena.cgroup().unwrap().child("beside", Bytes::gib(32)).unwrap();
    let start = |name: &str, dir: std::path::PathBuf| {
        let mut config = stock(name, RAM);
        config.cgroup = Some(dir);
        let vm = Vm::start(&config).unwrap();
        touch_and_free(&vm, HELD);
        vm
    };
    // One in a cgroup of its own, as systemd has it.
    let scope = slice.child("scope", Bytes::gib(16)).unwrap();
    let (one, two) = (start("lim1", slice.dir.clone()), start("lim2", scope.dir));
    let three = start("lim3", beside.dir.clone());
    let held = slice.usage();
    assert!(held > LIMIT - Bytes::mib(420), "{held} are not short");
    let dir = tempfile::tempdir().unwrap();
    let names = ["lim1", "lim2", "lim3"];
    let daemon = Daemon::start(dir.path(), &names, SHORT).unwrap();
    let shrunk = |s: &Value| {
        let gave = |name| RAM - actual(s, name);
        let both = gave("lim1") > Bytes::mib(64) && gave("lim2") > Bytes::mib(64);
        (both && actual(s, "lim3") == RAM).then(|| limit_of_slice(s).cloned())?
    };
    let limit = daemon.wait_for("two VMs that give", 3 * MINUTE, shrunk).unwrap();
    assert_eq!(limit["vms"], 2, "{limit}");
    assert_eq!(limit["capacity"], LIMIT.0, "{limit}");
    let (_, text, error) = ebb::run_in(dir.path(), &["status"]).unwrap();
    println!("{text}{error}");
    assert!(text.contains("/slice, 2 VMs: "), "{text}{error}");
    assert!(text.contains("limit host, 3 VMs: clear, "), "{text}{error}");
    // The host has what the slice lacks: the slice's usage falls until it keeps its reserve.
    daemon
        .wait_for("a slice that has its reserve", MINUTE, |s| {
            let limit = limit_of_slice(s);
            let soft = limit.is_none_or(|l| l["state"] == "clear" || l["state"] == "soft");
            soft && slice.usage() < held - Bytes::mib(128)
        })
        .unwrap();
    // Who needs it again gets it from below the slice's limit, and nobody is harmed.
    touch_and_free(&one, HELD);
    [&two, &three].iter().for_each(|vm| touch_and_free(vm, Bytes::mib(16)));
    let state = daemon.state().unwrap();
    assert_eq!(actual(&state, "lim3"), RAM, "{state}");
    assert_eq!(slice.swap(), Bytes::ZERO);
    assert_eq!(slice.oom_kills(), 0);
    assert!(slice.usage() <= LIMIT);
    assert!(daemon.stop());
    let record = fs::read_to_string(dir.path().join("record.jsonl")).unwrap();
    assert!(!record.contains("\"name\":\"lim3\",\"from\""), "an order to the one beside");
    replays(dir.path());
}

/// Guests that cannot deflate their balloons themselves burst, one after the other, in a slice that has
/// what one needs and little more. The host does not hold all of a guest's size: what it has not
/// touched yet it takes too. Too large a gift has the kernel kill a whole VM; one that is too small
/// costs its guest a process.
#[test]
fn vm_what_is_given_in_a_slice_without_swap_has_no_vm_killed() {
    let arena = Arena::within(Bytes::gib(8), Beside::AnyTest).unwrap();
    let slice = arena.cgroup().unwrap().child("slice", Bytes::gib(4)).unwrap();
    let names = ["gift1", "gift2"];
    let configs = names.map(|name| {
        let mut config = stock(name, RAM);
        config.cgroup = Some(slice.dir.clone());
        config.balloon = Some(Balloon { reporting: false, deflate_on_oom: false });
        config.translations = Bytes::mib(16);
        config
    });
    let vms = guest_stack::boot(&configs).unwrap();
    // Some of their RAM is never touched, so that it is not seen what their QEMUs hold themselves.
    vms.iter().for_each(|vm| touch_and_free(vm, Bytes::mib(300)));
    std::thread::sleep(Duration::from_secs(20));
    let dir = tempfile::tempdir().unwrap();
    let config = "reserve = \"200MiB\"\n[defaults]\nmin = \"48%\"\n";
    let daemon = Daemon::start(dir.path(), &names, config).unwrap();
    let known = |s: &Value| names.iter().all(|name| of(s, name)["available"].as_u64().is_some());
    daemon.wait_for("statistics", MINUTE, known).unwrap();
    for (name, vm) in names.iter().zip(&vms) {
        slice.resize(Bytes::gib(4)).unwrap();
        names.iter().for_each(|name| daemon.squeeze(name, Bytes::mib(250)).unwrap());
        std::thread::sleep(Duration::from_secs(5));
        let limit = slice.usage() + Bytes::mib(290);
        slice.resize(limit).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let was = vm.resident();
        let job = "size=377487360 period_ms=1000 hold_ms=500 count=1";
        vm.tool().start("b", "cycle", job).unwrap();
        let end = vm.tool().wait_end("b", MINUTE).map(|end| end.str("state").to_string());
        let (held, is) = (slice.usage(), vm.resident());
        println!("{name}: {was} then {is}; {held} of {limit}; {end:?}");
        assert_eq!(slice.oom_kills(), 0, "{}", daemon.log());
        assert!(is > was + Bytes::mib(150), "it was given little: {}", daemon.log());
        vm.check().unwrap();
    }
    assert!(daemon.stop());
    replays(dir.path());
}
