//! One fault at a time.

use super::law::Watch;
use super::place::*;
use super::*;

/// Fewer ticks than an operator is left alone for, more than Ebb needs to do anything.
const WHILE: u64 = 25;

/// Stand-ins, the check of what they are owed, and a daemon. A failed test ends them in the order of
/// the fields.
pub struct Scene {
    pub daemon: Daemon,
    pub watch: Watch,
    pub vms: Vec<Standin>,
    pub place: Place,
}

impl Scene {
    /// With stand-ins of these names; whether each deflates its balloon itself.
    pub fn new(ticks: &str, vms: &[(&str, bool)]) -> Option<Scene> {
        let place = Place::new()?;
        let vms: Vec<Standin> = vms.iter().map(|(name, d)| place.standin(name, *d)).collect();
        let watch = Watch::start(&place, &vms);
        let daemon = place.daemon(ticks, &vms);
        Some(Scene { place, vms, watch, daemon })
    }

    /// With one that deflates its balloon itself and one that does not. Tests beside each other
    /// need names of their own.
    fn pair(name: &str, ticks: &str) -> Option<Scene> {
        let names = [true, false].map(|deflates| format!("{name}-{deflates}"));
        Scene::new(ticks, &[(&names[0], true), (&names[1], false)])
    }

    fn squeeze_all(&self) {
        self.vms.iter().for_each(|vm| squeeze(&self.daemon, vm));
    }

    /// All have all their memory, the file says so, and nothing was broken meanwhile.
    pub fn end_whole(self) {
        self.end(false);
    }

    /// The same, and QEMU asks the guests for statistics as before.
    fn end_well(self) {
        self.end(true);
    }

    fn end(mut self, well: bool) {
        let wholes: Vec<u64> = self.vms.iter().map(|vm| self.watch.whole_of(vm)).collect();
        let (code, log) = self.daemon.end();
        assert_eq!(code, Some(0), "{log}");
        for (vm, whole) in self.vms.iter().zip(wholes) {
            let truth = vm.truth();
            assert_eq!((truth.size, truth.told), (whole, whole), "{}\n{log}", vm.name);
        }
        assert_eq!(self.place.owned(), Default::default());
        assert!(self.watch.end() > 0);
        for vm in self.vms.iter().filter(|_| well) {
            // What it was told last it may do later.
            vm.wait_for("questions for statistics as before", |t| t.interval_s == 0);
        }
    }
}

#[test]
fn a_qemu_that_answers_in_250_ms_is_heard_helped_and_given_back() {
    let Some(scene) = Scene::pair("slow", USUAL) else { return };
    scene.squeeze_all();
    for vm in &scene.vms {
        vm.tell(&json!({ "latency_ms": 250, "need": vm.least - 6 * MIB }));
        vm.wait_for("help in need", |t| t.size >= vm.least + 32 * MIB);
        wait_shown(&scene.daemon, vm, "size", |v| v["actual"].as_u64() > Some(vm.least));
        vm.tell(&json!({ "need": 64 * MIB }));
    }
    scene.watch.check();
    scene.end_well();
}

#[test]
fn what_a_hung_qemu_is_owed_outlives_a_stop_and_release_gives_it_back() {
    let Some(scene) = Scene::new(OFTEN, &[("hung", true), ("well", true)]) else { return };
    let Scene { place, vms, mut watch, daemon } = scene;
    let [hung, well] = &vms[..] else { unreachable!() };
    vms.iter().for_each(|vm| squeeze(&daemon, vm));
    hung.tell(&json!({ "hang": true }));
    let (code, log) = daemon.end();
    assert_eq!(code, Some(2), "{log}");
    well.wait_size(RAM);
    let left: Vec<u32> = place.owned().vms.iter().map(|v| v.id.pid).collect();
    assert_eq!(left, [hung.pid], "{log}");

    std::thread::scope(|s| {
        s.spawn(|| place.release());
        // It waits for one that does not answer.
        hung.tell(&json!({ "hang": false }));
    });
    hung.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

/// Longer than a stop waits for the answer to an order.
#[test]
fn a_qemu_that_answers_orders_late_is_given_back_within_a_stop() {
    let Some(scene) = Scene::new(OFTEN, &[("late", true)]) else { return };
    let Scene { place, vms, mut watch, daemon } = scene;
    let vm = &vms[0];
    squeeze(&daemon, vm);
    vm.tell(&json!({ "latency_ms": 1300 }));
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    vm.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

#[test]
fn an_operator_who_raises_or_lowers_a_size_is_not_fought() {
    // Deflates itself, is ballooned by Ebb before, is set to, what it is owed then.
    let cases: [(bool, bool, u64, u64); 6] = [
        (true, true, 300, 512),
        (false, true, 300, 300),
        (true, false, 300, 300),
        (false, false, 300, 300),
        (true, true, 100, 100),
        (false, true, 100, 100),
    ];
    let names: [String; 6] = std::array::from_fn(|i| format!("op{i}"));
    let vms: Vec<(&str, bool)> = names.iter().map(String::as_str).zip(cases.map(|c| c.0)).collect();
    let Some(scene) = Scene::new(OFTEN, &vms) else { return };
    let Scene { vms, watch, daemon, .. } = &scene;
    for (vm, (_, ballooned, ..)) in vms.iter().zip(cases) {
        vm.tell(&json!({ "need": 64 * MIB }));
        if ballooned {
            squeeze(daemon, vm);
        }
    }
    let mut orders = Vec::new();
    for (vm, (_, _, size, whole)) in vms.iter().zip(cases) {
        watch.whole(vm, whole * MIB);
        orders.push(vm.tell(&json!({ "order": size * MIB })).orders.len());
    }
    for vm in vms {
        let noticed = |v: &Value| v["standing"].to_string().contains("its size was set");
        wait_shown(daemon, vm, "operator's size", noticed);
        watch.seen(vm);
    }
    wait_ticks(daemon, WHILE);
    for (i, vm) in vms.iter().enumerate() {
        let (truth, size) = (vm.truth(), cases[i].2 * MIB);
        let said = || format!("{:?}\n{}", cases[i], daemon.log());
        assert_eq!((truth.size, truth.orders.len()), (size, orders[i]), "{}", said());
    }
    scene.end_well();
}

#[test]
fn garbage_errors_and_closed_sockets_cost_nobody_what_it_is_owed() {
    let Some(scene) = Scene::pair("odd", OFTEN) else { return };
    scene.squeeze_all();
    let Scene { vms, watch, daemon, .. } = &scene;
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
        wait_ticks(daemon, 5);
        vms.iter().for_each(|vm| drop(vm.tell(&none)));
        vms.iter().for_each(|vm| wait_link(daemon, vm));
        watch.check();
    }
    scene.end_well();
}

/// QEMU has done what it was told, and nobody hears of it.
#[test]
fn an_order_whose_answer_is_lost_is_owed_all_the_same() {
    let Some(scene) = Scene::pair("loses", OFTEN) else { return };
    for vm in &scene.vms {
        wait_link(&scene.daemon, vm);
        vm.tell(&json!({ "loses": true }));
        squeeze(&scene.daemon, vm);
        scene.watch.check();
    }
    wait_ticks(&scene.daemon, 5);
    scene.end_well();
}

/// By the next daemon, and by `ebb release`.
#[test]
fn what_was_taken_over_a_socket_is_given_back_over_it_whatever_the_configuration_says() {
    for release in [false, true] {
        let Some(place) = Place::new() else { return };
        let vm = place.standin(&format!("plain-{release}"), true);
        place.configure(OFTEN, [&vm]);
        place.reconfigure("[host]\n", "[host]\nsockets = \"any\"\n");
        let daemon = place.daemon_again();
        squeeze(&daemon, &vm);
        daemon.crash();
        place.reconfigure("sockets = \"any\"\n", "");
        if release {
            place.release();
        } else {
            let (code, log) = place.daemon_again().end();
            assert_eq!(code, Some(0), "{log}");
        }
        vm.wait_size(RAM);
    }
}

#[test]
fn a_guest_that_is_reset_has_all_its_memory_again() {
    let Some(scene) = Scene::pair("reset", OFTEN) else { return };
    scene.squeeze_all();
    for vm in &scene.vms {
        vm.tell(&json!({ "reset": true }));
    }
    scene.vms.iter().for_each(|vm| vm.wait_size(RAM));
    scene.end_well();
}

#[test]
fn a_state_file_that_vanishes_is_noticed_by_the_law() {
    let Some(scene) = Scene::new(OFTEN, &[("lost", true)]) else { return };
    let Scene { place, vms, watch, daemon } = scene;
    squeeze(&daemon, &vms[0]);
    watch.check();
    // One that runs would write it again.
    daemon.crash();
    std::fs::remove_file(place.state_file()).unwrap();
    wait_until(|| !watch.found().is_empty(), || "nothing is found to be wrong".into());
    assert!(watch.found()[0].contains("384 MiB are or may be taken"), "{:?}", watch.found());
}
