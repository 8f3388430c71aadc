//! One VM against a scripted QEMU.

mod lost;
pub(crate) mod shared;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, mpsc};

use serde_json::{Value, json};

use super::merging::look_is_due;
use super::questions::{BALLOON_CHANGE, RARELY};
use super::*;
use crate::probe::qemu::{QemuArgs, QmpAddress};
use crate::qmp_balloon;

#[test]
fn what_a_look_takes_decides_how_soon_the_next_may_be() {
    let (ms, s) = (Duration::from_millis, Duration::from_secs);
    for (news, age, took, due) in [
        (true, ms(999), ms(1), false),
        (true, s(1), ms(1), true),
        (true, s(4), ms(45), false),
        (true, s(5), ms(45), true),
        (true, s(30), s(2), true),
        (false, s(59), ms(1), false),
        (false, s(60), ms(1), true),
        (false, s(1999), s(2), false),
    ] {
        assert_eq!(look_is_due(news, age, took, took), due, "{news} {age:?} {took:?}");
    }
    // A hundred VMs like that.
    for (news, age, due) in [(true, s(44), false), (true, s(45), true), (false, s(60), true)] {
        assert_eq!(look_is_due(news, age, ms(45), 100 * ms(45)), due, "{news} {age:?}");
    }
}

/// A QEMU with a balloon that answers at once, but for the question whether
/// it reports free pages: what it says to that is held back in `held`, where
/// there is one, or there is no such property.
fn qemu(listener: UnixListener, held: Arc<Mutex<Option<String>>>, old: bool) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    let ours = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n").unwrap();
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let said = match asked["execute"].as_str().unwrap() {
                "query-status" => json!({ "status": "running" }),
                "query-memory-size-summary" => json!({ "base-memory": 1u64 << 30 }),
                "qom-list" => {
                    json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }])
                }
                "query-balloon" => json!({ "actual": 1u64 << 30 }),
                "qom-get" if line.contains(qmp_balloon::REPORTING) => json!(true),
                _ => json!({}),
            };
            let error = json!({ "class": "GenericError", "desc": "Property not found" });
            let (key, what) = match said == json!(true) && old {
                true => ("error", &error),
                false => ("return", &said),
            };
            let answer = json!({ key: what, "id": asked["id"] }).to_string() + "\n";
            match held.lock().unwrap().as_mut().filter(|_| said == json!(true)) {
                Some(held) => held.push_str(&answer),
                None => drop(stream.write_all(answer.as_bytes())),
            }
        }
    });
    ours
}

fn tick(vm: &mut Vm) -> VmSample {
    vm.ask(Instant::now(), Stamp(0), false);
    let until = Instant::now() + Duration::from_millis(300);
    while !vm.asked.is_empty() && Instant::now() < until {
        vm.client.iter_mut().for_each(Client::pump);
        vm.hear();
        std::thread::yield_now();
    }
    vm.sample(Stamp(0), 0, &mut Vec::new())
}

/// A tick at that time in which QEMU has answered everything.
fn answered(vm: &mut Vm, at: Stamp) -> VmSample {
    vm.ask(Instant::now(), at, false);
    hear_all(vm);
    vm.sample(at, 0, &mut Vec::new())
}

fn hear_all(vm: &mut Vm) {
    let until = Instant::now() + Duration::from_secs(30);
    while !vm.asked.is_empty() {
        assert!(Instant::now() < until, "QEMU does not answer");
        vm.client.iter_mut().for_each(Client::pump);
        vm.hear();
    }
}

fn vm(path: std::path::PathBuf) -> Vm {
    Vm::new(
        QemuProcess {
            args: QemuArgs { qmp: QmpAddress::Paths(vec![path]), ..QemuArgs::default() },
            ..QemuProcess::plain(VmId { pid: std::process::id(), start: 0 }, "v".into())
        },
        1,
        Access {
            libvirt: false,
            managed: true,
            sockets: SocketUse::Any,
            look_only: false,
            agent: AgentUse::On,
            agent_then: AgentUse::On,
            private_ram: false,
            window_limit_ms: 0,
            hands_off_ms: None,
        },
    )
}

/// On a busy machine an answer can miss its tick. The agent is not told of RAM
/// before it is known whether the balloon reports free pages.
#[test]
fn what_a_balloon_is_asked_once_is_asked_again_until_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let held = Arc::new(Mutex::new(Some(String::new())));
    let theirs = Arc::clone(&held);
    let peer = std::thread::spawn(move || qemu(listener, theirs, false));
    let mut vm = vm(path);
    while held.lock().unwrap().as_deref() == Some("") {
        assert_eq!(tick(&mut vm).balloon.and_then(|b| b.reporting), None);
        assert!(!vm.known());
    }
    // Too late for the tick that asked.
    let late = held.lock().unwrap().take().unwrap();
    peer.join().unwrap().write_all(late.as_bytes()).unwrap();
    let found = (0..20).find_map(|_| tick(&mut vm).balloon?.reporting);
    assert_eq!((found, vm.known()), (Some(true), true));
}

#[test]
fn a_qemu_that_knows_nothing_of_reporting_is_known_not_to_report() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let peer = std::thread::spawn(move || qemu(listener, Arc::default(), true));
    let mut vm = vm(path);
    let known = (0..20).any(|_| {
        tick(&mut vm);
        vm.device.is_some() && vm.known()
    });
    assert!(known && vm.reporting.is_none());
    drop(peer.join());
}

/// What a scripted QEMU is like, and how often it was asked how it runs, how large it is and what
/// its guest has said.
#[derive(Default)]
struct Like {
    stopped: bool,
    ram_mib: u64,
    /// Plugged by a DIMM, by virtio-mem, and a persistent one, MiB; the balloon holds nothing.
    plugged: [u64; 3],
    /// The last order.
    ordered: u64,
    /// How often it asks its guest, as it was set.
    interval: u64,
    /// Its balloon is gone.
    unplugged: bool,
    /// What its guest has said that it has free.
    free: Option<u64>,
    asked: usize,
    asked_size: usize,
    asked_words: usize,
}

/// A QEMU with a balloon that answers at once, as `like` says.
fn qemu_like(listener: UnixListener, like: Arc<Mutex<Like>>) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    let ours = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n").unwrap();
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let mut like = like.lock().unwrap();
            let said = match asked["execute"].as_str().unwrap() {
                "query-status" => {
                    like.asked += 1;
                    json!({ "status": if like.stopped { "paused" } else { "running" } })
                }
                "query-memory-size-summary" => json!({
                    "base-memory": like.ram_mib << 20,
                    "plugged-memory": like.plugged.iter().sum::<u64>() << 20,
                }),
                "query-memory-devices" => {
                    let kinds = ["dimm", "virtio-mem", "nvdimm"].iter().zip(like.plugged);
                    let of = |(kind, mib)| json!({ "type": kind, "data": { "size": mib << 20 } });
                    kinds.map(of).collect()
                }
                "balloon" => {
                    like.ordered = asked["arguments"]["value"].as_u64().unwrap() >> 20;
                    json!({})
                }
                "qom-list" if like.unplugged => json!([]),
                "qom-list" => json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }]),
                "qom-set" => {
                    like.interval = asked["arguments"]["value"].as_u64().unwrap();
                    json!({})
                }
                "query-balloon" => {
                    like.asked_size += 1;
                    json!({ "actual": (like.ram_mib + like.plugged[0]) << 20 })
                }
                "qom-get" if line.contains(qmp_balloon::STATS) && like.free.is_some() => {
                    like.asked_words += 1;
                    json!({ "last-update": 5, "stats": { "stat-free-memory": like.free } })
                }
                _ => json!({}),
            };
            let answer = json!({ "return": said, "id": asked["id"] }).to_string() + "\n";
            drop(stream.write_all(answer.as_bytes()));
        }
    });
    ours
}

/// A VM of 1 GiB whose balloon was found, and QEMU's end of its socket.
fn with_balloon() -> (tempfile::TempDir, Arc<Mutex<Like>>, Vm, UnixStream) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let like = Arc::new(Mutex::new(Like { ram_mib: 1024, ..Like::default() }));
    let theirs = Arc::clone(&like);
    let peer = std::thread::spawn(move || qemu_like(listener, theirs));
    let mut vm = vm(path);
    (vm.agent, vm.access.agent) = (None, AgentUse::Off);
    while tick(&mut vm).balloon.is_none() {}
    (dir, like, vm, peer.join().unwrap())
}

/// QEMU tells of something, and Ebb has read it.
fn hears(vm: &mut Vm, peer: &mut UnixStream, event: &str) {
    peer.write_all(format!("{{\"event\": \"{event}\", \"data\": {{}}}}\n").as_bytes()).unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while !vm.any_event(|_| true) {
        assert!(Instant::now() < until, "{event} was not heard");
        vm.client.iter_mut().for_each(Client::pump);
    }
}

#[test]
fn how_a_vm_runs_and_its_size_are_asked_rarely_and_after_an_event() {
    let (_dir, like, mut vm, mut peer) = with_balloon();
    vm.moved = None;
    let asked = || {
        let like = like.lock().unwrap();
        [like.asked, like.asked_size]
    };
    let (before, begun) = (asked(), Instant::now());
    for _ in 0..20 {
        let sample = answered(&mut vm, Stamp(0));
        assert_eq!(sample.run, Some(RunState::Running));
        assert!(sample.balloon.is_some_and(|b| b.age_ms == 0), "its size is known");
    }
    let most = 1 + (begun.elapsed().as_millis() / RARELY.as_millis()) as usize;
    let more = [0, 1].map(|n| asked()[n] - before[n]);
    assert!(more.iter().all(|more| *more <= most), "{more:?} of 20 ticks");

    // The guest has taken in a DIMM.
    like.lock().unwrap().ram_mib = 1536;
    hears(&mut vm, &mut peer, "ACPI_DEVICE_OST");
    let sample = answered(&mut vm, Stamp(0));
    let plugged = Some(Bytes::mib(1536));
    assert_eq!((sample.ram, sample.balloon.map(|b| b.actual)), (plugged, plugged));

    like.lock().unwrap().stopped = true;
    hears(&mut vm, &mut peer, "STOP");
    assert_eq!(answered(&mut vm, Stamp(0)).run, Some(RunState::Paused));
    std::thread::sleep(RARELY);
    let before = asked();
    answered(&mut vm, Stamp(0));
    assert_eq!(asked(), before.map(|n| n + 1), "and now and then without any");
}

#[test]
fn a_balloon_that_moves_is_asked_for_its_size_in_each_tick() {
    let (_dir, like, mut vm, mut peer) = with_balloon();
    let asks = |vm: &mut Vm| {
        let before = like.lock().unwrap().asked_size;
        (0..5).for_each(|_| drop(answered(vm, Stamp(0))));
        like.lock().unwrap().asked_size - before
    };
    vm.moved = None;
    assert!(asks(&mut vm) <= 1);
    hears(&mut vm, &mut peer, BALLOON_CHANGE);
    assert_eq!(asks(&mut vm), 5, "its guest has moved it");
    vm.moved = None;
    assert!(asks(&mut vm) <= 1);
    vm.order(Bytes::mib(900), false).unwrap();
    assert_eq!(asks(&mut vm), 5, "it was ordered to move");
}

#[test]
fn what_a_guest_has_said_is_looked_at_before_it_is_asked_only_where_it_is_not_known() {
    let (_dir, like, mut vm, _peer) = with_balloon();
    let says = |free: u64| like.lock().unwrap().free = Some(free);
    let look = |vm: &mut Vm, at| drop(answered(vm, Stamp(at)));
    let is_looked_at = |vm: &mut Vm, at| {
        vm.kick(Stamp(at));
        let looked_at = vm.asked.iter().any(|(query, _)| *query == Query::StatsBefore);
        hear_all(vm);
        looked_at
    };
    says(1);
    look(&mut vm, 1_000);
    assert!(is_looked_at(&mut vm, 1_120), "nothing is known yet");
    look(&mut vm, 1_200);
    assert!(is_looked_at(&mut vm, 1_320), "its answer was not seen and may have come since");
    look(&mut vm, 1_400);
    assert!(!is_looked_at(&mut vm, 1_460), "it is idle, and its words were read a moment ago");
    says(2);
    look(&mut vm, 1_500);
    assert!(is_looked_at(&mut vm, 1_560), "this may be from before it was asked");
    says(3);
    look(&mut vm, 1_600);
    assert_eq!(vm.heard.age_ms(Stamp(1_600), 9_000_000), 40, "this is not");
    assert!(!is_looked_at(&mut vm, 1_660), "its answer was seen");
    says(4);
    look(&mut vm, 1_700);
    assert_eq!(vm.heard.age_ms(Stamp(1_700), 9_000_000), 40, "it came after it was asked");
    assert!(is_looked_at(&mut vm, 2_660), "QEMU itself has asked since");
    look(&mut vm, 2_700);
    vm.forget_stats();
    look(&mut vm, 2_800);
    assert!(is_looked_at(&mut vm, 2_910), "another kernel's answer is none");
}

/// As QEMU 7.2 tells it: virtio-mem is a part of the plugged memory and not of the balloon's size.
#[test]
fn virtio_mem_is_a_part_of_ram_and_size_and_of_no_order() {
    let (_dir, like, mut vm, _peer) = with_balloon();
    let sizes = |vm: &mut Vm| {
        std::thread::sleep(RARELY);
        let sample = tick(vm);
        (sample.ram.unwrap(), sample.balloon.unwrap().actual)
    };
    vm.ordered = Some(Bytes::mib(900));
    like.lock().unwrap().plugged = [512, 256, 128];
    assert_eq!(sizes(&mut vm), (Bytes::mib(1792), Bytes::mib(1792)));
    assert_eq!(vm.ordered, Some(Bytes::mib(900 + 256)), "the same size of the balloon");
    assert_eq!(tick(&mut vm).balloon.unwrap().beyond_balloon, Bytes::mib(256));
    vm.order(Bytes::mib(1700), false).unwrap();
    assert_eq!(sizes(&mut vm).0, Bytes::mib(1792));
    assert_eq!(like.lock().unwrap().ordered, 1700 - 256);
    like.lock().unwrap().plugged = [0; 3];
    assert_eq!(sizes(&mut vm), (Bytes::mib(1024), Bytes::mib(1024)));
}

#[test]
fn a_still_vm_is_not_asked_before_its_guest_speaks_again_unless_something_happens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let like = Arc::new(Mutex::new(Like { ram_mib: 1024, free: Some(1), ..Like::default() }));
    let theirs = Arc::clone(&like);
    let peer = std::thread::spawn(move || qemu_like(listener, theirs));
    let mut vm = vm(path);
    (vm.agent, vm.access.agent, vm.interval_s) = (None, AgentUse::Off, 2);
    while tick(&mut vm).balloon.is_none_or(|b| b.guest.is_none()) {}
    let mut peer = peer.join().unwrap();
    let asks = |vm: &mut Vm| {
        let before = like.lock().unwrap().asked_words;
        let sample = tick(vm);
        assert!(sample.balloon.is_some_and(|b| b.guest.is_some()), "what is known is told");
        like.lock().unwrap().asked_words > before
    };
    let asked = (0..20).filter(|_| asks(&mut vm)).count();
    assert!(asked < 10, "{asked} of 20 ticks");
    hears(&mut vm, &mut peer, BALLOON_CHANGE);
    assert!(asks(&mut vm), "its balloon has moved");
    vm.kicked = Stamp(1);
    assert!(asks(&mut vm), "its guest was asked out of turn");
    vm.stats_new = Some(Instant::now() - Duration::from_millis(1500));
    assert!(asks(&mut vm), "its guest's next words are due");
}

/// A QEMU with a balloon. It tells of each order, and carries it out and answers when it is told
/// to.
fn balloons(
    listener: &UnixListener,
    orders: mpsc::Sender<u64>,
    goes_on: mpsc::Receiver<()>,
) -> std::thread::JoinHandle<()> {
    let listener = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let hello = b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n";
        stream.write_all(hello).unwrap();
        let mut held: Option<Value> = None;
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            if goes_on.try_recv().is_ok()
                && let Some(id) = held.take()
            {
                let answer = json!({ "return": {}, "id": id }).to_string() + "\n";
                stream.write_all(answer.as_bytes()).unwrap();
            }
            let said = match asked["execute"].as_str().unwrap() {
                "balloon" => {
                    held = Some(asked["id"].clone());
                    let _ = orders.send(asked["arguments"]["value"].as_u64().unwrap() >> 20);
                    continue;
                }
                "query-status" => json!({ "status": "running" }),
                "query-memory-size-summary" => json!({ "base-memory": 1u64 << 30 }),
                "qom-list" => json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }]),
                "query-balloon" => json!({ "actual": 800u64 << 20 }),
                _ => json!({}),
            };
            let answer = json!({ "return": said, "id": asked["id"] }).to_string() + "\n";
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    })
}

/// Ticks until that is so.
fn until(vm: &mut Vm, what: impl Fn(&mut Vm) -> bool) -> bool {
    (0..50).any(|_| {
        tick(vm);
        what(vm)
    })
}

#[test]
fn an_order_to_shrink_is_over_when_qemu_has_answered_its_withdrawal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let (orders, ordered) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    let peer = balloons(&listener, orders, goes_on);
    let mut vm = vm(path);
    assert!(until(&mut vm, |vm| vm.actual.is_some()));
    for (size, gives) in [(600, false), (800, true)] {
        let command = vm.order(Bytes::mib(size), gives).unwrap();
        vm.not_answered(command);
    }
    assert!(!until(&mut vm, |vm| !vm.shrinks(true)), "QEMU has answered neither");
    assert_eq!(ordered.try_iter().collect::<Vec<_>>(), [600, 800]);
    go_on.send(()).unwrap();
    assert!(until(&mut vm, |vm| !vm.shrinks(true)));
    drop(vm);
    peer.join().unwrap();
}

/// An agent gives memory back only by what QEMU has told in the same tick.
#[test]
fn findings_of_an_earlier_tick_are_none_of_this() {
    let mut vm = vm("/nowhere/qmp".into());
    let mut waiting = vm.inventory.questions(Instant::now());
    while let Some((look, ..)) = waiting.pop() {
        waiting.extend(vm.inventory.answer(look, None));
    }
    vm.findings = vm.inventory.findings();
    assert!(vm.findings.is_some());
    vm.ask(Instant::now(), Stamp(1), true);
    assert_eq!(vm.findings, None, "nothing was asked in it");
}

/// What QEMU told of RAM before says nothing of it now.
#[test]
fn after_hands_off_qemu_is_asked_anew_where_its_ram_is() {
    let mut vm = vm("/nowhere/qmp".into());
    vm.agent = Some(AgentLink::new("/nowhere/agent".into(), std::process::id()));
    let asks_for_ram = |vm: &mut Vm| {
        let mut waiting = vm.inventory.questions(Instant::now());
        let asks = waiting.iter().any(|q| q.0 == Inquiry::Tree);
        while let Some((look, ..)) = waiting.pop() {
            waiting.extend(vm.inventory.answer(look, None));
        }
        assert!(vm.inventory.findings().is_some());
        asks
    };
    assert!(asks_for_ram(&mut vm) && !asks_for_ram(&mut vm), "once");
    vm.access.hands_off_ms = Some(1);
    vm.ask_agent(Instant::now(), false, (None, false));
    vm.access.hands_off_ms = None;
    assert!(asks_for_ram(&mut vm));
}

#[test]
fn an_order_of_an_earlier_daemon_or_connection_is_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let (orders, ordered) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    let peer = balloons(&listener, orders.clone(), goes_on);
    let mut vm = vm(path);
    let withdrawn = |vm: &mut Vm| {
        // It does not grow.
        vm.grew = None;
        vm.withdraw(Instant::now());
        !vm.shrinks(true)
    };
    assert!(vm.shrinks(true) && !vm.shrinks(false), "only of one that is owed something");
    assert!(!until(&mut vm, withdrawn));
    assert_eq!(ordered.try_iter().collect::<Vec<_>>(), [800], "once");
    go_on.send(()).unwrap();
    assert!(until(&mut vm, withdrawn));
    assert_eq!(ordered.try_iter().count(), 0);
    // The connection is lost with an order on its way.
    let command = vm.order(Bytes::mib(600), false).unwrap();
    vm.not_answered(command);
    vm.forget_connection();
    peer.join().unwrap();
    let (go_on, goes_on) = mpsc::channel();
    let peer = balloons(&listener, orders, goes_on);
    ordered.try_iter().count();
    assert!(!until(&mut vm, withdrawn));
    assert_eq!(ordered.try_iter().collect::<Vec<_>>(), [800]);
    go_on.send(()).unwrap();
    assert!(until(&mut vm, withdrawn));
    drop(vm);
    peer.join().unwrap();
}

/// One that is not managed is reached only to have its statistics' interval put back.
#[test]
fn a_qemu_that_does_not_answer_is_connected_to_once_for_its_interval() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut vm = vm(path);
    vm.access.managed = false;
    // As after a connection that was lost.
    (vm.interval_was, vm.device) = (Some(7), Some("b".into()));
    (0..5).for_each(|_| vm.ask(Instant::now(), Stamp(0), false));
    assert_eq!(std::iter::from_fn(|| listener.accept().ok()).count(), 1);
    assert_eq!(vm.interval_was, Some(7));
}

#[test]
fn a_vm_that_has_lost_its_balloon_has_no_interval_to_be_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let like = Arc::new(Mutex::new(Like { ram_mib: 1024, ..Like::default() }));
    let peer = std::thread::spawn(move || qemu_like(listener, like));
    let mut vm = vm(path);
    (vm.agent, vm.access.agent) = (None, AgentUse::Off);
    while tick(&mut vm).balloon.is_none() {}
    (vm.device, vm.interval_was, vm.access.managed) = (None, Some(7), false);
    tick(&mut vm);
    assert_eq!((vm.interval_was, vm.client.is_none()), (None, true));
    drop(peer.join());
}

#[test]
fn a_vm_to_which_no_way_leads_is_let_be_once_its_interval_is_put_back() {
    let why = "its monitor is libvirt's".to_owned();
    let mut vm = vm("/nonexistent".into());
    let access = vm.access;
    vm.process.args.qmp = QmpAddress::None { why: why.clone() };
    vm.interval_was = Some(0);
    vm.allow(access);
    assert!(vm.may_ask_libvirt() && vm.access.look_only, "nothing else is set");
    vm.interval_was = None;
    assert!(!vm.may_ask_libvirt());
    let sample = tick(&mut vm);
    assert_eq!((sample.let_be, sample.link), (true, Link::Down(why)));
    vm.allow(Access { libvirt: true, ..access });
    assert!(vm.may_ask_libvirt() && vm.access.managed && !vm.access.look_only);
}
