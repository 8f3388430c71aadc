//! VMs whose only QMP socket is their manager's.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::Path;

use ebb_core::sample::VmEvent;

use super::*;

/// A QEMU on Proxmox's socket that serves one client after the other, and what it has become.
#[derive(Clone, Default)]
pub(crate) struct Qemu(pub Arc<Mutex<State>>);

#[derive(Default)]
pub(crate) struct State {
    /// Guest statistics: page faults since its boot, one word after the other.
    faults: VecDeque<u64>,
    pub interval: u64,
    /// MiB.
    pub orders: Vec<u64>,
    pub visits: usize,
    /// It answers no more once it has set so many properties.
    sets: Option<usize>,
    /// It refuses to set properties.
    refuses: bool,
    /// It does not answer orders.
    pub hangs_at_orders: bool,
}

impl Qemu {
    pub fn serve(&self, listener: UnixListener) {
        let theirs = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                theirs.client(stream);
            }
        });
    }

    fn client(&self, mut stream: UnixStream) {
        self.0.lock().unwrap().visits += 1;
        let _ = stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n");
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let Some(said) = self.said(&asked, &line) else { continue };
            let refused = said == json!("refused");
            let error = json!({ "class": "GenericError", "desc": "no" });
            let (key, said) = if refused { ("error", error) } else { ("return", said) };
            let answer = json!({ key: said, "id": asked["id"] }).to_string() + "\n";
            let _ = stream.write_all(answer.as_bytes());
        }
    }

    fn said(&self, asked: &Value, line: &str) -> Option<Value> {
        let mut it = self.0.lock().unwrap();
        Some(match asked["execute"].as_str().unwrap() {
            "query-status" => json!({ "status": "running" }),
            "query-memory-size-summary" => json!({ "base-memory": 1u64 << 30 }),
            "qom-list" => json!([{ "name": "b", "type": "child<virtio-balloon-pci>" }]),
            "query-balloon" => json!({ "actual": 1u64 << 30 }),
            "balloon" => {
                it.orders.push(asked["arguments"]["value"].as_u64().unwrap() >> 20);
                if it.hangs_at_orders {
                    return None;
                }
                json!({})
            }
            "qom-set" if it.refuses => json!("refused"),
            "qom-set" => {
                if it.sets == Some(0) {
                    return None;
                }
                it.sets = it.sets.map(|n| n - 1);
                it.interval = asked["arguments"]["value"].as_u64().unwrap();
                json!({})
            }
            "qom-get" if line.contains(qmp_balloon::INTERVAL) => json!(it.interval),
            "qom-get" if line.contains(qmp_balloon::STATS) => {
                let next = it.faults.len() > 1;
                let faults = if next { it.faults.pop_front() } else { it.faults.front().copied() };
                json!({ "last-update": 5, "stats": { "stat-minor-faults": faults,
                    "stat-free-memory": 4096 } })
            }
            _ => json!({}),
        })
    }
}

/// Where Proxmox VE has it.
const SOCKET: &str = "run/qemu-server/100.qmp";

pub(crate) fn socket(dir: &Path) -> (UnixListener, std::path::PathBuf) {
    let path = dir.join(SOCKET);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    (UnixListener::bind(&path).unwrap(), path)
}

fn shared_vm(path: std::path::PathBuf) -> Vm {
    let mut vm = vm(path);
    (vm.agent, vm.access.agent, vm.access.sockets) = (None, AgentUse::Off, SocketUse::Known);
    vm
}

/// A tick, so long after the last visit that all is asked.
fn visit(vm: &mut Vm) -> VmSample {
    (vm.asked_at, vm.stats_new, vm.ran_asked) = (Stamp(0), None, None);
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    let until = Instant::now() + Duration::from_secs(5);
    while !vm.asked.is_empty() && Instant::now() < until {
        vm.client.iter_mut().for_each(Client::pump);
        vm.hear();
        std::thread::yield_now();
    }
    vm.sample(Stamp(1_000_000), 0, &mut Vec::new())
}

/// A VM whose statistics were asked for every 7 s before Ebb came, after some ticks.
fn met() -> (tempfile::TempDir, Qemu, Vm) {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let qemu = Qemu::default();
    qemu.0.lock().unwrap().interval = 7;
    qemu.serve(listener);
    let mut vm = shared_vm(path);
    (0..5).for_each(|_| drop(visit(&mut vm)));
    (dir, qemu, vm)
}

#[test]
fn a_managers_socket_is_visited_for_a_tick_and_free_between_two() {
    let (_dir, qemu, mut vm) = met();
    let sample = visit(&mut vm);
    assert_eq!(sample.shared.unwrap().with.as_deref(), Some("Proxmox VE"));
    assert!(sample.balloon.is_some() && sample.link == Link::Up);
    assert!(vm.client.as_ref().unwrap().fd().is_none(), "it is left");
    assert!(qemu.0.lock().unwrap().visits >= 5);
    assert_eq!((qemu.0.lock().unwrap().interval, vm.interval_was), (1, Some(7)));
    // It is not managed any more.
    vm.access.managed = false;
    leave(&mut vm);
    assert_eq!((qemu.0.lock().unwrap().interval, vm.client.is_none()), (7, true), "put back");
    let visits = qemu.0.lock().unwrap().visits;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!(qemu.0.lock().unwrap().visits, visits);
}

/// Ticks until it has no connection.
pub(super) fn leave(vm: &mut Vm) {
    let until = Instant::now() + Duration::from_secs(5);
    while vm.client.is_some() && Instant::now() < until {
        visit(vm);
        vm.client.iter_mut().for_each(Client::pump);
    }
}

#[test]
fn a_vm_that_is_let_go_while_its_manager_is_served_gets_its_interval_back() {
    let (dir, qemu, mut vm) = met();
    let path = dir.path().join(SOCKET);
    let manager = UnixStream::connect(&path).unwrap();
    (vm.asked_at, vm.stats_new, vm.ran_asked) = (Stamp(0), None, None);
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    vm.client.iter_mut().for_each(Client::pump);
    assert!(vm.client.as_ref().unwrap().fd().is_some(), "it waits to be served");
    vm.access.managed = false;
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    assert!(vm.client.is_some());
    drop(manager);
    leave(&mut vm);
    assert_eq!((qemu.0.lock().unwrap().interval, vm.client.is_none()), (7, true));
}

#[test]
fn a_qemu_that_refuses_the_interval_is_asked_once_and_the_vm_let_go() {
    let (_dir, qemu, mut vm) = met();
    qemu.0.lock().unwrap().refuses = true;
    vm.access.managed = false;
    let mut problems = Vec::new();
    let until = Instant::now() + Duration::from_secs(5);
    while vm.client.is_some() && Instant::now() < until {
        vm.ask(Instant::now(), Stamp(1_000_000), false);
        vm.client.iter_mut().for_each(Client::pump);
        vm.sample(Stamp(1_000_000), 0, &mut problems);
    }
    assert!(vm.client.is_none() && !vm.is_not_restored());
    assert!(problems.iter().any(|p| p.message.contains("qom-set: no")), "{problems:?}");
}

#[test]
fn of_two_orders_that_were_not_sent_neither_is_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let mut vm = shared_vm(path.clone());
    let _manager = UnixStream::connect(&path).unwrap();
    let _served = listener.accept().unwrap();
    vm.connect();
    (vm.ordered, vm.loose) = (Some(Bytes::mib(900)), false);
    for size in [600, 700] {
        let command = vm.order(Bytes::mib(size), true).unwrap();
        vm.not_answered(command);
    }
    let until = Instant::now() + Duration::from_secs(5);
    while !vm.orders.is_empty() && Instant::now() < until {
        vm.client.iter_mut().for_each(Client::pump);
        vm.take_late();
    }
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(900)), false));
    // The first one was carried out, and the second was not sent.
    let order = |command, size| PendingOrder {
        command,
        to: Bytes::mib(size),
        before: (Some(Bytes::mib(900)), true),
    };
    (vm.orders, vm.ordered, vm.loose) =
        (vec![order(1, 600), order(2, 700)], Some(Bytes::mib(700)), true);
    vm.answered(1, true);
    vm.not_sent(2);
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(600)), false));
}

/// Answers that nobody takes would fill what a connection holds, and it would end for good.
#[test]
fn the_answer_to_an_order_that_a_later_one_ended_is_not_kept() {
    let (_dir, qemu, mut vm) = met();
    for size in 1..200 {
        let late = vm.order(Bytes::mib(700 + size), true).unwrap();
        vm.not_answered(late);
        let last = vm.order(Bytes::mib(400 + size), true).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        let answer = loop {
            vm.client.iter_mut().for_each(Client::pump);
            if let Some(answer) = vm.client.as_mut().unwrap().take_reply(last) {
                break answer;
            }
            assert!(Instant::now() < until);
        };
        vm.answered(last, answer.is_ok());
    }
    assert_eq!(qemu.0.lock().unwrap().orders.len(), 398);
}

#[test]
fn a_vm_that_is_managed_again_is_asked_for_its_interval() {
    let (_dir, qemu, mut vm) = met();
    vm.access.managed = false;
    vm.ask(Instant::now(), Stamp(1_000_000), false);
    assert!(vm.restoring.is_some());
    let until = Instant::now() + Duration::from_secs(5);
    crate::qmp::poll_all(&mut [vm.client.as_mut().unwrap()], until);
    assert_eq!(qemu.0.lock().unwrap().interval, 7);
    vm.access.managed = true;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!((qemu.0.lock().unwrap().interval, vm.interval_was), (1, Some(7)));
    vm.access.managed = false;
    leave(&mut vm);
    assert_eq!(qemu.0.lock().unwrap().interval, 7);
}

/// Two managers' sockets, and who is connected to the first stays there.
#[test]
fn a_socket_whose_manager_stays_is_left_for_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let (_first, path) = socket(dir.path());
    let second = path.with_file_name("101.qmp");
    let qemu = Qemu::default();
    qemu.serve(UnixListener::bind(&second).unwrap());
    let mut vm = shared_vm(path.clone());
    vm.process.args.qmp = QmpAddress::Paths(vec![path, second]);
    let mut now = Instant::now();
    let met = (0..20).any(|_| {
        now += Duration::from_secs(3);
        (vm.asked_at, vm.stats_new, vm.ran_asked) = (Stamp(0), None, None);
        vm.ask(now, Stamp(1_000_000), false);
        let until = Instant::now() + Duration::from_secs(3);
        while !vm.asked.is_empty() && Instant::now() < until {
            vm.client.iter_mut().for_each(Client::pump);
            vm.hear();
            std::thread::yield_now();
        }
        vm.sample(Stamp(1_000_000), 0, &mut Vec::new()).balloon.is_some()
    });
    assert!(met);
}

#[test]
fn nobody_connects_to_the_socket_of_a_vm_that_is_not_managed() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let mut vm = shared_vm(path);
    listener.set_nonblocking(true).unwrap();
    for (managed, sockets) in [(false, SocketUse::Known), (true, SocketUse::Own)] {
        vm.allow(Access { managed, sockets, ..vm.access });
        (0..3).for_each(|_| assert!(tick(&mut vm).let_be));
        let said = listener.accept();
        assert!(matches!(said, Err(e) if e.kind() == ErrorKind::WouldBlock), "{managed}");
    }
}

#[test]
fn a_socket_of_ebbs_own_is_used_rather_than_the_managers() {
    let dir = tempfile::tempdir().unwrap();
    let (theirs, path) = socket(dir.path());
    let own = path.with_file_name("100-ebb.qmp");
    let qemu = Qemu::default();
    qemu.serve(UnixListener::bind(&own).unwrap());
    let mut vm = shared_vm(path.clone());
    vm.process.args.qmp = QmpAddress::Paths(vec![path, own]);
    let sample = (0..5).map(|_| visit(&mut vm)).last().unwrap();
    assert!(sample.shared.is_none() && sample.link == Link::Up, "{sample:?}");
    assert_eq!(qemu.0.lock().unwrap().visits, 1, "it stays");
    theirs.set_nonblocking(true).unwrap();
    assert!(theirs.accept().is_err());
}

/// QEMU tells of a reset only who is connected.
#[test]
fn a_reset_between_two_visits_is_seen_by_the_guests_counters() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let qemu = Qemu::default();
    qemu.0.lock().unwrap().faults = [9000, 9000, 9001, 9002, 40, 50].into();
    qemu.serve(listener);
    let mut vm = shared_vm(path);
    let resets = (0..10).filter(|_| visit(&mut vm).events.contains(&VmEvent::Reset)).count();
    assert_eq!(resets, 1);
}

#[test]
fn an_order_that_was_not_sent_is_not_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let mut vm = shared_vm(path.clone());
    let qemu = Qemu::default();
    let manager = UnixStream::connect(&path).unwrap();
    let served = listener.accept().unwrap();
    vm.connect();
    (vm.ordered, vm.loose) = (Some(Bytes::mib(900)), false);
    let command = vm.order(Bytes::mib(600), true).unwrap();
    vm.not_answered(command);
    assert_eq!(vm.ordered, Some(Bytes::mib(600)));
    let until = Instant::now() + Duration::from_secs(5);
    while !vm.orders.is_empty() && Instant::now() < until {
        vm.client.iter_mut().for_each(Client::pump);
        vm.take_late();
    }
    assert_eq!((vm.ordered, vm.loose), (Some(Bytes::mib(900)), false));
    assert!(matches!(vm.link(), Link::Slow(_)));
    assert!(vm.order(Bytes::mib(600), false).is_err(), "nothing is taken over a busy socket");
    drop((manager, served));
    qemu.serve(listener);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(qemu.0.lock().unwrap().orders, [0u64; 0]);
}

/// The guest is asked out of turn by two settings; QEMU may be left with the first.
#[test]
fn an_interval_that_was_left_at_none_is_set_again_and_not_taken_for_the_managers() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, path) = socket(dir.path());
    let qemu = Qemu::default();
    {
        let mut it = qemu.0.lock().unwrap();
        (it.interval, it.faults) = (2, [7].into());
    }
    qemu.serve(listener);
    let mut vm = shared_vm(path);
    vm.interval_s = 2;
    (0..4).for_each(|_| drop(visit(&mut vm)));
    qemu.0.lock().unwrap().sets = Some(1);
    vm.prepare_kick();
    vm.kick(Stamp(1));
    visit(&mut vm);
    assert_eq!(qemu.0.lock().unwrap().interval, 0, "the second setting was not carried out");
    qemu.0.lock().unwrap().sets = None;
    (0..3).for_each(|_| drop(visit(&mut vm)));
    assert_eq!((qemu.0.lock().unwrap().interval, vm.interval_was), (2, Some(2)));
}

/// What an agent waits for is asked anew, where a round was not answered.
#[test]
fn a_round_of_questions_that_was_not_answered_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (_listener, path) = socket(dir.path());
    let mut vm = shared_vm(path.clone());
    vm.connect();
    let begins = |vm: &mut Vm| !vm.inventory.questions(Instant::now()).is_empty();
    assert!(begins(&mut vm) && !begins(&mut vm), "one round at a time");
    vm.send(Query::Inventory(Inquiry::Tree), "human-monitor-command", None);
    let busy = QmpError::Busy(path.display().to_string(), "another client is served".into());
    vm.client.as_mut().unwrap().protocol.leave(&busy);
    vm.hear();
    assert!(begins(&mut vm));
}
