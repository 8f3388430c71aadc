//! Orders to recycle, to an agent and a QEMU that a test plays.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ebb_core::config::{AgentUse, SocketUse};
use ebb_core::plan::{Plan, RecycleOrder};
use ebb_core::wire::{
    AgentState, Answer, Command, Hello, PROTOCOL, Recycle, Recycled, Reply, ReplyResult, Request,
    Status,
};
use serde_json::{Value, json};

use super::*;
use crate::agent_link::AgentLink;
use crate::probe::qemu::{QemuArgs, QemuProcess, QmpAddress};
use crate::vm::{Access, Vm};

const TREE: &str = "FlatView #0
 AS \"memory\", root: system
 Root memory region: system
  0000000000000000-000000003fffffff (prio 0, ram): a
";
const ORDER: &str = "  Block Name  PSize Offset Used Total\n  a  4 KiB 0x0 0x0 0x0\n";
const LONG: Duration = Duration::from_secs(30);

#[derive(Default)]
struct State {
    /// QEMU does not answer.
    hangs: bool,
    /// How often it was asked what can write to its memory.
    asked: usize,
    /// What has been plugged in.
    device: Option<&'static str>,
    /// What the agent was told, oldest first.
    told: Vec<&'static str>,
}

type Shared = Arc<Mutex<State>>;

fn qemu(listener: UnixListener, shared: Shared) {
    for mut stream in listener.incoming().map_while(Result::ok) {
        let _ = stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n");
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            while shared.lock().unwrap().hangs {
                std::thread::sleep(Duration::from_millis(1));
            }
            let said = says(&asked, &line, &shared);
            let answer = json!({ "return": said, "id": asked["id"] }).to_string() + "\n";
            let _ = stream.write_all(answer.as_bytes());
        }
    }
}

fn says(asked: &Value, line: &str, shared: &Shared) -> Value {
    let mut state = shared.lock().unwrap();
    let child = |kind: &str| json!({ "name": kind, "type": format!("child<{kind}>") });
    match asked["execute"].as_str().unwrap() {
        "query-status" => json!({ "status": "running" }),
        "query-memory-size-summary" => json!({ "base-memory": 1u64 << 30 }),
        "query-balloon" => json!({ "actual": 1u64 << 30 }),
        "qom-list" if line.contains("/objects") => json!([child("memory-backend-ram")]),
        "qom-list" => {
            let more = state.device.map(child);
            std::iter::once(child("virtio-balloon-pci")).chain(more).collect()
        }
        "query-named-block-nodes" => {
            state.asked += 1;
            json!([])
        }
        "query-migrate-capabilities" => json!([]),
        "query-memdev" => json!([{ "id": "a" }]),
        "human-monitor-command" if line.contains("mtree") => json!(TREE),
        "human-monitor-command" if line.contains("ramblock") => json!(ORDER),
        "human-monitor-command" if line.contains("gpa2hva") => {
            json!("Host virtual address for 0x0 (a) is 0x7f0000000000\r\n")
        }
        "human-monitor-command" => json!(""),
        "qom-get" if line.contains("\"type\"") => json!("pc-i440fx-7.2-machine"),
        "qom-get" if line.contains("\"firmware\"") => json!("bios-256k.bin"),
        "qom-get" if line.contains("/machine\"") => json!(""),
        "qom-get" if line.contains("interval") => json!(1),
        "qom-get" if line.contains("reporting") => json!(false),
        _ => json!({}),
    }
}

fn agent(listener: UnixListener, shared: Shared) {
    for mut stream in listener.incoming().map_while(Result::ok) {
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let request = Request::parse(line.as_bytes()).unwrap();
            let tell = |what| shared.lock().unwrap().told.push(what);
            let answer = match request.command {
                Command::Hello => Answer::Hello(Hello {
                    protocol: PROTOCOL,
                    version: "0".into(),
                    pid: std::process::id(),
                    kernel: Default::default(),
                    advises: false,
                    hashes: false,
                    wants_descriptor: false,
                }),
                Command::Status { .. } => {
                    Answer::Status(Status { state: AgentState::Ready, ..Status::default() })
                }
                Command::Recycle(_) => {
                    tell("recycle");
                    Answer::Recycled(Recycled::default())
                }
                Command::Attach(_) => {
                    tell("attach");
                    Answer::Done
                }
                Command::StandDown => {
                    tell("stand down");
                    Answer::Done
                }
                _ => Answer::Done,
            };
            let reply = Reply { id: request.id, result: ReplyResult::Ok(answer) };
            let _ = stream.write_all(&reply.line());
        }
    }
}

struct Scene {
    host: LinuxHost,
    vm: VmId,
    shared: Shared,
    _dir: tempfile::TempDir,
}

/// A VM whose agent is ready, in a tick in which QEMU was not asked what can write to its memory.
fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let (shared, path) = (Shared::default(), |name: &str| dir.path().join(name));
    let serve = |name: &str, peer: fn(UnixListener, Shared)| -> PathBuf {
        let listener = UnixListener::bind(path(name)).unwrap();
        let theirs = Arc::clone(&shared);
        std::thread::spawn(move || peer(listener, theirs));
        path(name)
    };
    let (qmp, socket) = (serve("qmp", qemu), serve("agent", agent));
    let vm = VmId { pid: std::process::id(), start: 7 };
    let args =
        QemuArgs { qmp: QmpAddress::Paths(vec![qmp]), agent: Some(socket), ..QemuArgs::default() };
    let process = QemuProcess { args, ..QemuProcess::plain(vm, "a".into()) };
    let access = Access {
        managed: true,
        sockets: SocketUse::Any,
        agent: AgentUse::On,
        agent_then: AgentUse::On,
        ..Access::default()
    };
    let mut host = host(dir.path(), Options { deadline: LONG, ..Options::default() });
    host.vms.insert(vm, Vm::new(process, 1, access));
    let mut scene = Scene { host, vm, shared, _dir: dir };
    let until = Instant::now() + LONG;
    while scene.link().sample().state != AgentState::Ready || scene.told().is_empty() {
        assert!(Instant::now() < until, "{:?}", scene.link().sample());
        scene.tick();
    }
    let mut asked = 0;
    while asked != scene.asked() {
        asked = scene.asked();
        scene.tick();
    }
    scene
}

impl Scene {
    fn link(&self) -> &AgentLink {
        self.host.vms[&self.vm].agent.as_ref().unwrap()
    }

    fn asked(&self) -> usize {
        self.shared.lock().unwrap().asked
    }

    fn told(&self) -> Vec<&'static str> {
        self.shared.lock().unwrap().told.clone()
    }

    fn hangs(&self, hangs: bool) {
        self.shared.lock().unwrap().hangs = hangs;
    }

    fn tick(&mut self) {
        self.host.query(Instant::now(), LinuxHost::now());
        self.host.vms.get_mut(&self.vm).unwrap().sample(LinuxHost::now(), 0, &mut Vec::new());
    }

    fn order(&mut self) {
        let order = RecycleOrder {
            vm: self.vm,
            name: "a".into(),
            recycle: Some(Recycle::default()),
            mark: false,
            reason: String::new(),
        };
        self.host.start(&Plan { recycle: vec![order], ..Plan::default() });
    }

    fn is_told(&mut self, all: &[&str]) {
        let until = Instant::now() + LONG;
        while self.told() != all {
            assert!(Instant::now() < until, "{:?}, not {all:?}", self.told());
            self.tick();
        }
    }
}

#[test]
fn qemu_is_asked_what_can_write_to_memory_right_before_an_agent_gives_some_back() {
    let mut scene = scene();
    let before = scene.asked();
    scene.order();
    assert_eq!(scene.asked(), before + 1);
    assert!(!scene.link().order_waits(), "it is sent in the same tick");
    scene.is_told(&["attach", "recycle"]);
}

#[test]
fn an_order_waits_for_a_qemu_that_does_not_answer_and_no_tick_waits_for_that() {
    let mut scene = scene();
    scene.host.options.deadline = Duration::from_millis(20);
    scene.hangs(true);
    let begun = Instant::now();
    scene.order();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(scene.link().order_waits() && scene.link().sample().busy);
    scene.tick();
    assert_eq!(scene.told(), ["attach"], "it has not said what can write to it");
    scene.hangs(false);
    scene.host.options.deadline = LONG;
    scene.is_told(&["attach", "recycle"]);
}

#[test]
fn an_agent_gives_nothing_back_where_a_device_has_come_since_qemu_was_asked() {
    let mut scene = scene();
    scene.shared.lock().unwrap().device = Some("vhost-user-blk-pci");
    scene.order();
    assert!(!scene.link().order_waits());
    scene.shared.lock().unwrap().device = None;
    scene.is_told(&["attach", "stand down", "attach"]);
}
