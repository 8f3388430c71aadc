//! One fault at a time.

use super::law::Watch;
use super::place::*;
use super::*;

/// Fewer ticks than an operator is left alone for, more than Ebb needs to do anything.
const WHILE: u64 = 25;

/// All of these have all their memory, the file says so, and nothing was broken meanwhile.
pub fn end_whole(place: &Place, daemon: Daemon, mut watch: Watch, vms: &[&Standin]) {
    let wholes: Vec<u64> = vms.iter().map(|vm| watch.whole_of(vm)).collect();
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    for (vm, whole) in vms.iter().zip(wholes) {
        let truth = vm.truth();
        assert_eq!((truth.size, truth.told), (whole, whole), "{}\n{log}", vm.name);
    }
    assert_eq!(place.owned(), Default::default());
    assert!(watch.end() > 0);
}

/// The same, and QEMU asks the guests for statistics as before.
fn end_well(place: &Place, daemon: Daemon, watch: Watch, vms: &[&Standin]) {
    end_whole(place, daemon, watch, vms);
    for vm in vms {
        // What it was told last it may do later.
        let as_before = |t: &Truth| t.interval_s == 0;
        vm.wait_for("questions for statistics as before", as_before);
    }
}

#[test]
fn a_qemu_that_answers_in_250_ms_is_heard_helped_and_given_back() {
    let Some(place) = Place::new() else { return };
    let vms = [true, false].map(|d| place.standin(&format!("slow-{d}"), d));
    let vms: Vec<&Standin> = vms.iter().collect();
    let watch = Watch::start(&place, &vms);
    let daemon = place.daemon(USUAL, &vms);
    vms.iter().for_each(|vm| squeeze(&daemon, vm));
    for vm in &vms {
        vm.tell(&json!({ "latency_ms": 250, "need": vm.least - 6 * MIB }));
        vm.wait_for("help in need", |t| t.size >= vm.least + 32 * MIB);
        wait_shown(&daemon, vm, "size", |v| v["actual"].as_u64() > Some(vm.least));
        vm.tell(&json!({ "need": 64 * MIB }));
    }
    watch.check();
    end_well(&place, daemon, watch, &vms);
}

#[test]
fn what_a_hung_qemu_is_owed_outlives_a_stop_and_release_gives_it_back() {
    let Some(place) = Place::new() else { return };
    let (hung, well) = (place.standin("hung", true), place.standin("well", true));
    let mut watch = Watch::start(&place, &[&hung, &well]);
    let daemon = place.daemon(OFTEN, &[&hung, &well]);
    squeeze(&daemon, &hung);
    squeeze(&daemon, &well);
    hung.tell(&json!({ "hang": true }));
    let (code, log) = daemon.end();
    assert_eq!(code, Some(2), "{log}");
    well.wait_size(RAM);
    let left: Vec<u32> = place.owned().vms.iter().map(|v| v.id.pid).collect();
    assert_eq!(left, [hung.pid], "{log}");

    let release = std::thread::scope(|s| {
        let release = s.spawn(|| place.ebb("release"));
        // It waits for one that does not answer.
        hung.tell(&json!({ "hang": false }));
        release.join().unwrap()
    });
    assert_eq!(release.0, 0, "{}", release.1);
    hung.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

/// Longer than a stop waits for the answer to an order.
#[test]
fn a_qemu_that_answers_orders_late_is_given_back_within_a_stop() {
    let Some(place) = Place::new() else { return };
    let vm = place.standin("late", true);
    let mut watch = Watch::start(&place, &[&vm]);
    let daemon = place.daemon(OFTEN, &[&vm]);
    squeeze(&daemon, &vm);
    vm.tell(&json!({ "latency_ms": 1300 }));
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    vm.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

#[test]
fn an_operator_who_raises_or_lowers_a_size_is_not_fought() {
    let Some(place) = Place::new() else { return };
    // Deflates itself, is ballooned by Ebb before, is set to, what it is owed then.
    let cases = [
        (true, true, 300, 512),
        (false, true, 300, 300),
        (true, false, 300, 300),
        (false, false, 300, 300),
        (true, true, 100, 100),
        (false, true, 100, 100),
    ];
    let vms: Vec<Standin> =
        (0..cases.len()).map(|i| place.standin(&format!("op{i}"), cases[i].0)).collect();
    let vms: Vec<&Standin> = vms.iter().collect();
    let watch = Watch::start(&place, &vms);
    let daemon = place.daemon(OFTEN, &vms);
    for (vm, (_, ballooned, ..)) in vms.iter().zip(cases) {
        vm.tell(&json!({ "need": 64 * MIB }));
        if ballooned {
            squeeze(&daemon, vm);
        }
    }
    let mut orders = Vec::new();
    for (vm, (_, _, size, whole)) in vms.iter().zip(cases) {
        watch.whole(vm, whole * MIB);
        orders.push(vm.tell(&json!({ "order": size * MIB })).orders.len());
    }
    for vm in &vms {
        let noticed = |v: &Value| v["standing"].to_string().contains("its size was set");
        wait_shown(&daemon, vm, "operator's size", noticed);
        watch.seen(vm);
    }
    wait_ticks(&daemon, WHILE);
    for (i, vm) in vms.iter().enumerate() {
        let (truth, size) = (vm.truth(), cases[i].2 * MIB);
        let said = || format!("{:?}\n{}", cases[i], daemon.log());
        assert_eq!((truth.size, truth.orders.len()), (size, orders[i]), "{}", said());
    }
    end_well(&place, daemon, watch, &vms);
}

#[test]
fn garbage_errors_and_closed_sockets_cost_nobody_what_it_is_owed() {
    let Some(place) = Place::new() else { return };
    let vms = [true, false].map(|d| place.standin(&format!("odd-{d}"), d));
    let vms: Vec<&Standin> = vms.iter().collect();
    let watch = Watch::start(&place, &vms);
    let daemon = place.daemon(OFTEN, &vms);
    vms.iter().for_each(|vm| squeeze(&daemon, vm));
    let every = |value: Value| -> Value {
        let commands = ["query-status", "query-balloon", "qom-list", "query-memory-size-summary"];
        commands.iter().map(|c| (c.to_string(), value.clone())).collect()
    };
    let none = json!({ "errors": {}, "answers": {}, "refuse": false, "mute": false });
    for fault in [
        json!({ "garbage": "\u{1b}[31mpanic\r\n" }),
        json!({ "garbage": "{\"return\": {}, \"id\": 99999999}\n" }),
        json!({ "garbage": "{\"QMP\": {}}\n" }),
        json!({ "cut": true }),
        json!({ "cut": true, "refuse": true }),
        json!({ "cut": true, "mute": true }),
        json!({ "errors": every(json!("it cannot be done")) }),
        json!({ "answers": every(json!("a text")) }),
        json!({ "answers": every(json!({ "actual": -1, "base-memory": null, "status": 7 })) }),
    ] {
        vms.iter().for_each(|vm| drop(vm.tell(&fault)));
        wait_ticks(&daemon, 5);
        vms.iter().for_each(|vm| drop(vm.tell(&none)));
        vms.iter().for_each(|vm| wait_link(&daemon, vm));
        watch.check();
    }
    end_well(&place, daemon, watch, &vms);
}

/// QEMU has done what it was told, and nobody hears of it.
#[test]
fn an_order_whose_answer_is_lost_is_owed_all_the_same() {
    let Some(place) = Place::new() else { return };
    let vms = [true, false].map(|d| place.standin(&format!("loses-{d}"), d));
    let vms: Vec<&Standin> = vms.iter().collect();
    let watch = Watch::start(&place, &vms);
    let daemon = place.daemon(OFTEN, &vms);
    for vm in &vms {
        wait_link(&daemon, vm);
        vm.tell(&json!({ "loses": true }));
        squeeze(&daemon, vm);
        watch.check();
    }
    wait_ticks(&daemon, 5);
    end_well(&place, daemon, watch, &vms);
}

/// By the next daemon, and by `ebb release`.
#[test]
fn what_was_taken_over_a_socket_is_given_back_over_it_whatever_the_configuration_says() {
    for release in [false, true] {
        let Some(place) = Place::new() else { return };
        let vm = place.standin(&format!("plain-{release}"), true);
        place.configure(OFTEN, &[&vm]);
        place.reconfigure("[host]\n", "[host]\nsockets = \"any\"\n");
        let daemon = place.daemon_again();
        squeeze(&daemon, &vm);
        daemon.crash();
        place.reconfigure("sockets = \"any\"\n", "");
        let (code, said) = match release {
            true => place.ebb("release"),
            false => {
                let (code, log) = place.daemon_again().end();
                (code.unwrap_or(-1), log)
            }
        };
        assert_eq!(code, 0, "{said}");
        vm.wait_size(RAM);
    }
}

#[test]
fn a_guest_that_is_reset_has_all_its_memory_again() {
    let Some(place) = Place::new() else { return };
    let vms = [true, false].map(|d| place.standin(&format!("reset-{d}"), d));
    let vms: Vec<&Standin> = vms.iter().collect();
    let watch = Watch::start(&place, &vms);
    let daemon = place.daemon(OFTEN, &vms);
    for vm in &vms {
        squeeze(&daemon, vm);
        vm.tell(&json!({ "reset": true }));
    }
    vms.iter().for_each(|vm| vm.wait_size(RAM));
    end_well(&place, daemon, watch, &vms);
}

#[test]
fn a_state_file_that_vanishes_is_noticed_by_the_law() {
    let Some(place) = Place::new() else { return };
    let vm = place.standin("lost", true);
    let watch = Watch::start(&place, &[&vm]);
    let daemon = place.daemon(OFTEN, &[&vm]);
    squeeze(&daemon, &vm);
    watch.check();
    // One that runs would write it again.
    daemon.crash();
    std::fs::remove_file(place.state_file()).unwrap();
    wait_until(|| !watch.found().is_empty(), || "nothing is found to be wrong".into());
    assert!(watch.found()[0].contains("384 MiB are or may be taken"), "{:?}", watch.found());
}
