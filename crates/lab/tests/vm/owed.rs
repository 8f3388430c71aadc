//! Whose a VM's size is, and what is owed: on real VMs, through everything that a host's
//! operator does.
//!
//! Each test holds the arena and ends with the balloon's size as QEMU tells the lab.

use super::*;

const RAM: Bytes = Bytes::mib(512);
const SQUEEZED: Bytes = Bytes::mib(300);
/// Ticks in which anything that is wrong would have been ordered.
const TICKS: u64 = 6;

/// A VM of which a daemon has memory.
fn squeezed(name: &str, deflate_on_oom: bool) -> (Arena, Vm, TempDir, Daemon) {
    let arena = Arena::beside(Beside::AnyTest).unwrap();
    let vm = boot(name, deflate_on_oom);
    let (dir, daemon) = watch(&[name], "");
    daemon.squeeze(name, SQUEEZED).unwrap();
    (arena, vm, dir, daemon)
}

fn boot(name: &str, deflate_on_oom: bool) -> Vm {
    let mut config = stock(name, RAM);
    config.balloon = Some(Balloon { reporting: false, deflate_on_oom });
    Vm::start(&config).unwrap()
}

fn ticks(daemon: &Daemon, more: u64) {
    let tick = |s: &Value| s["tick"].as_u64().unwrap_or(0);
    let was = tick(&daemon.state().unwrap());
    daemon.wait_for("ticks", MINUTE, |s| tick(s) >= was + more).unwrap();
}

/// What the state file names.
fn owed(dir: &Path) -> Vec<String> {
    let text = fs::read(dir.join("state.json")).unwrap_or_default();
    let state: Value = serde_json::from_slice(&text).unwrap_or_default();
    let names = state["vms"].as_array().into_iter().flatten();
    names.filter_map(|v| Some(v["name"].as_str()?.to_string())).collect()
}

#[test]
fn vm_a_size_that_the_operator_sets_is_not_fought_in_either_direction() {
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let names = ["theirs", "helps-itself"];
    let vms = names.map(|name| boot(name, name == "helps-itself"));
    for vm in &vms {
        vm.set_balloon(Bytes::mib(200)).unwrap();
        wait_size(vm, Bytes::mib(200));
    }
    let (dir, daemon) = watch(&names, "");
    let told = |s: &Value| (0..2).all(|i| s["vms"][i]["available"].as_u64().is_some());
    daemon.wait_for("statistics", MINUTE, told).unwrap();
    ticks(&daemon, TICKS);
    for size in [RAM, Bytes::mib(200), Bytes::mib(400)] {
        for vm in &vms {
            vm.set_balloon(size).unwrap();
            wait_size(vm, size);
        }
        ticks(&daemon, TICKS);
        for (name, vm) in names.iter().zip(&vms) {
            // Not in a tick in which QEMU answers late.
            let is_theirs = |vm: &Value| vm["verdict"].to_string().contains("was set, not by Ebb");
            daemon.wait_for_vm(name, "a size of the operator's", MINUTE, is_theirs).unwrap();
            wait_size(vm, size);
        }
    }
    assert_eq!(daemon.decisions().unwrap(), [Value::Null; 0]);
    assert!(owed(dir.path()).is_empty());
    assert!(daemon.stop());
    for vm in &vms {
        wait_size(vm, Bytes::mib(400));
    }
}

#[test]
fn vm_an_order_that_a_paused_guest_has_not_followed_is_taken_back() {
    let (_arena, vm, dir, daemon) = squeezed("sleeps", true);
    vm.pause().unwrap();
    assert_eq!(daemon.end().0, Some(2), "a guest that does not run follows no order");
    assert_eq!(owed(dir.path()), ["sleeps"]);
    vm.resume().unwrap();
    wait_size(&vm, RAM);
    let daemon = Daemon::start(dir.path(), &["sleeps"], "").unwrap();
    ticks(&daemon, 2);
    assert_eq!(daemon.end().0, Some(0));
    assert!(owed(dir.path()).is_empty());
}

/// Where it goes there may be no Ebb that knows what it is owed. Nothing is taken of it meanwhile.
#[test]
fn vm_a_vm_that_is_migrated_takes_its_memory_along() {
    let (_arena, vm, dir, daemon) = squeezed("goes", true);
    begin_migration(&vm);
    wait_size(&vm, RAM);
    assert_eq!(daemon.vm("goes").unwrap()["run"], "migrating");
    daemon.reclaim_vm("goes").unwrap();
    ticks(&daemon, TICKS);
    wait_size(&vm, RAM);
    end_migration(&vm);
    assert!(daemon.stop());
    let ticks = recorded_ticks(dir.path());
    let during = ticks.iter().filter(|t| t["sample"]["vms"][0]["run"] == "migrating");
    let orders: Vec<(u64, u64)> = during
        .flat_map(orders_of)
        .map(|a| (a["from"].as_u64().unwrap(), a["to"].as_u64().unwrap()))
        .collect();
    assert!(!orders.is_empty() && orders.iter().all(|(from, to)| to >= from), "{orders:?}");
}

/// Paused, saved to a file and ended, as `virsh save` does it: where it is restored there is no
/// Ebb. QEMU is told while it saves, and the file tells the guest.
#[test]
fn vm_a_vm_that_is_saved_takes_all_its_memory_when_it_is_restored() {
    let (_arena, vm, dir, daemon) = squeezed("saved", false);
    let file = dir.path().join("saved");
    vm.pause().unwrap();
    // A few seconds' worth.
    vm.qmp("migrate-set-parameters", Some(json!({ "max-bandwidth": 32 << 20 }))).unwrap();
    let uri = format!("exec:cat > {}", file.display());
    vm.qmp("migrate", Some(json!({ "uri": uri }))).unwrap();
    let saved = |vm: &Vm| vm.qmp("query-migrate", None).unwrap()["status"] == "completed";
    vm.wait_for("the end of the save", MINUTE, saved).unwrap();
    assert!(vm.balloon().unwrap() <= SQUEEZED, "it did not run meanwhile");
    vm.kill();
    daemon.wait_for("nothing owed", MINUTE, |_| owed(dir.path()).is_empty()).unwrap();
    assert!(daemon.stop());

    let mut config = stock("restored", RAM);
    config.balloon = Some(Balloon { reporting: false, deflate_on_oom: false });
    config.args = vec!["-incoming".into(), format!("exec:cat {}", file.display())];
    let vm = Vm::spawn(&config).unwrap();
    let loaded = |vm: &Vm| vm.qmp("query-status", None).unwrap()["status"] != "inmigrate";
    vm.wait_for("the restored VM", MINUTE, loaded).unwrap();
    vm.resume().unwrap();
    wait_size(&vm, RAM);
}
