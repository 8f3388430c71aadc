//! A VM as Proxmox VE starts it, whose only QMP socket is its manager's: Ebb takes and gives on
//! it, and no command of the manager fails or waits long.

use std::sync::atomic::Ordering::Relaxed;

use ebb_host::qmp::{Client, QmpError};
use ebb_host::qmp_balloon;
use ebb_host::qmp_balloon::INTERVAL;
use ebb_lab::Background;

use super::*;

const RAM: Bytes = Bytes::mib(512);
const SQUEEZED: Bytes = Bytes::mib(300);
const BALLOON: &str = "/machine/peripheral/balloon0";
/// As Proxmox's client: how long it tries to connect, how long it sleeps between, and how long
/// it waits for an answer.
const CONNECT: Duration = Duration::from_secs(1);
const SLEEP: Duration = Duration::from_millis(100);
const ANSWER: Duration = Duration::from_secs(5);

/// A manager that asks its VM all the time, each time over a connection of its own.
struct Manager(Background<Vec<Result<Duration, String>>>);

impl Manager {
    fn start(socket: PathBuf) -> Manager {
        let commands = [
            ("query-status", None),
            ("query-balloon", None),
            ("qom-get", Some(qmp_balloon::get(BALLOON, qmp_balloon::STATS))),
            ("query-version", None),
        ];
        Manager(Background::start(move |quit| {
            let mut waits = Vec::new();
            for (command, arguments) in commands.iter().cycle() {
                if quit.load(Relaxed) {
                    break;
                }
                let begun = Instant::now();
                let said = ask(&socket, command, arguments.clone());
                waits.push(said.map(|_| begun.elapsed()));
                std::thread::sleep(Duration::from_millis(20));
            }
            waits
        }))
    }

    /// What went wrong, and how long its commands took, sorted.
    fn end(mut self) -> (Vec<String>, Vec<Duration>) {
        let (mut failed, mut waits) = (Vec::new(), Vec::new());
        for said in self.0.end() {
            match said {
                Ok(wait) => waits.push(wait),
                Err(why) => failed.push(why),
            }
        }
        waits.sort();
        (failed, waits)
    }
}

/// One command over a connection of its own.
fn ask(socket: &Path, command: &str, arguments: Option<Value>) -> Result<Value, String> {
    let begun = Instant::now();
    let mut client = loop {
        let client = Client::new(socket);
        match client.protocol.failure() {
            Some(QmpError::Taken(..)) if begun.elapsed() < CONNECT => std::thread::sleep(SLEEP),
            Some(why) => return Err(format!("connect: {why}")),
            None => break client,
        }
    };
    client.execute(command, arguments, ANSWER).map_err(|e| format!("{command}: {e}"))
}

fn show(what: &str, waits: &[Duration]) {
    let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize];
    println!(
        "{what}: {} commands, half within {:.1?}, 99 % within {:.1?}, the longest {:.1?}",
        waits.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

fn start(name: &str, id: u32) -> Vm {
    let mut config = stock(name, RAM);
    config.proxmox = Some(id);
    Vm::start(&config).unwrap()
}

fn is(vm: &Vm, what: &str, is: impl Fn(Bytes) -> bool) {
    let there = |vm: &Vm| is(vm.balloon().unwrap());
    vm.wait_for(what, MINUTE, there).unwrap();
}

fn interval(vm: &Vm) -> u64 {
    vm.qmp("qom-get", Some(qmp_balloon::get(BALLOON, INTERVAL))).unwrap().as_u64().unwrap()
}

/// Once the guest has said how it is.
fn squeeze(daemon: &Daemon, name: &str) {
    wait_up_for(daemon, name, MINUTE);
    daemon.squeeze(name, SQUEEZED).unwrap();
}

/// Taking, giving, a stop, a crash and a reset, while the manager asks.
#[test]
fn vm_on_a_managers_socket_ebb_takes_and_gives_and_no_command_of_the_manager_fails() {
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let mut vm = start("vm100", 100);
    // As somebody else has set it.
    let slow = qmp_balloon::set(BALLOON, INTERVAL, json!(7));
    vm.qmp("qom-set", Some(slow)).unwrap();
    let manager = Manager::start(vm.qmp_path.clone());
    std::thread::sleep(Duration::from_secs(1));
    let (failed, waits) = manager.end();
    assert_eq!(failed, [""; 0]);
    show("without Ebb", &waits);

    let manager = Manager::start(vm.qmp_path.clone());
    let (dir, daemon) = watch(&["vm100"], "");
    wait_up_for(&daemon, "vm100", MINUTE);
    assert_eq!(daemon.vm("vm100").unwrap()["shared"]["with"], "Proxmox VE");
    assert_eq!(interval(&vm), 2);
    daemon.squeeze("vm100", SQUEEZED).unwrap();
    vm.tool().start("hog", "hold", "size=314572800").unwrap();
    is(&vm, "what the guest needs", |size| size > Bytes::mib(330));
    vm.tool().stop("hog").unwrap();
    let longest_us = daemon.vm("vm100").unwrap()["shared"]["longest_us"].as_u64().unwrap();
    assert!(daemon.stop());
    is(&vm, "all that it is owed after a stop", |size| size == RAM);
    assert_eq!(interval(&vm), 7, "it is as it was");

    let daemon = Daemon::start_again(dir.path(), &[]).unwrap();
    squeeze(&daemon, "vm100");
    daemon.crash();
    assert!(vm.balloon().unwrap() <= SQUEEZED);
    ebb_says(dir.path(), &["release"]);
    is(&vm, "all that it is owed after a crash", |size| size == RAM);

    let daemon = Daemon::start_again(dir.path(), &[]).unwrap();
    squeeze(&daemon, "vm100");
    vm.reset().unwrap();
    vm.wait_ready().unwrap();
    is(&vm, "all that it is owed after a reset", |size| size == RAM);
    decided_by(&daemon, "rebooted");
    let (failed, waits) = manager.end();
    assert!(daemon.stop());
    assert_eq!(failed, [""; 0]);
    show("beside Ebb", &waits);
    println!("Ebb was connected for at most {:.1} ms at a time", longest_us as f64 / 1000.0);
    assert!(waits.len() > 100 && waits.iter().all(|wait| *wait < ANSWER));
}

/// A QEMU that hangs accepts nobody. Ebb keeps one place in its queue at most, so that the manager
/// finds the other, and what the VM is owed outlives the daemon.
#[test]
fn vm_a_hung_qemu_on_a_managers_socket_has_one_client_of_ebb_in_its_queue_and_stays_owed() {
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let vm = start("vm101", 101);
    let (dir, daemon) = watch(&["vm101"], "");
    squeeze(&daemon, "vm101");
    signal(vm.pid, Signal::STOP);
    let slow = |s: &Value| of(s, "vm101")["link"]["state"] == "slow";
    daemon.wait_for("a slow QEMU", MINUTE, slow).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    let path = vm.qmp_path.display().to_string();
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    // State 02: not accepted.
    let waiting = |l: &&str| l.ends_with(&path) && l.split_ascii_whitespace().nth(5) == Some("02");
    assert_eq!(all.lines().filter(waiting).count(), 1, "{all}");
    assert_eq!(daemon.end().0, Some(2), "something is left");
    signal(vm.pid, Signal::CONT);
    ask(&vm.qmp_path, "query-status", None).unwrap();
    ebb_says(dir.path(), &["release"]);
    is(&vm, "all that it is owed", |size| size == RAM);
}
