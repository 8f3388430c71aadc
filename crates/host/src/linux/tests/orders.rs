//! Orders to recycle, to an agent and a QEMU that a test plays.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

use ebb_core::plan::{Plan, RecycleOrder};
use ebb_core::wire::{AgentState, Answer, Command, Recycle, Recycled, Status};
use serde_json::{Value, json};

use super::*;
use crate::agent_link::AgentLink;
use crate::probe::qemu::{QemuArgs, QemuProcess, QmpAddress};
use crate::testing::{Tree, agent, full_access, qmp};
use crate::vm::Vm;

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

fn qemu(stream: UnixStream, shared: &Shared) {
    qmp(stream, |asked, line| {
        eventually(|| !shared.lock().unwrap().hangs);
        Some(Ok(says(asked, line, shared)))
    });
}

fn says(asked: &Value, line: &str, shared: &Shared) -> Value {
    let mut state = shared.lock().unwrap();
    let child = |kind: &str| json!({ "name": kind, "type": format!("child<{kind}>") });
    match asked["execute"].as_str().unwrap() {
        "query-status" => json!({ "status": "running" }),
        "query-memory-size-summary" => json!({ "base-memory": 1u64 << 30 }),
        "query-balloon" => json!({ "actual": 1u64 << 30 }),
        "qom-list" if line.contains("/objects") => json!([child("memory-backend-ram")]),
        "qom-list" if line.contains("-anon") => json!([]),
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

fn ready(stream: UnixStream, shared: &Shared) {
    let tell = |what| shared.lock().unwrap().told.push(what);
    let status = Status { state: AgentState::Ready, ..Status::default() };
    agent(&stream, false, |command, _| {
        match command {
            Command::Status { .. } => return Some(Answer::Status(status.clone())),
            Command::Recycle(_) => {
                tell("recycle");
                return Some(Answer::Recycled(Recycled::default()));
            }
            Command::Attach(_) => tell("attach"),
            Command::StandDown => tell("stand down"),
            _ => {}
        }
        Some(Answer::Done)
    });
}

struct Scene {
    host: LinuxHost,
    vm: VmId,
    shared: Shared,
    _tree: Tree,
}

/// A VM whose agent is ready, in a tick in which QEMU was not asked what can write to its memory.
fn scene() -> Scene {
    let (tree, shared) = (tree(&[]), Shared::default());
    let serve = |path: &str, peer: fn(UnixStream, &Shared)| {
        let (listener, theirs) = (tree.listen(path), Arc::clone(&shared));
        std::thread::spawn(move || listener.incoming().for_each(|s| peer(s.unwrap(), &theirs)));
        tree.path(path)
    };
    let (qmp, socket) = (serve("qmp", qemu), serve("agent", ready));
    let vm = VmId { pid: std::process::id(), start: 7 };
    let args =
        QemuArgs { qmp: QmpAddress::Paths(vec![qmp]), agent: Some(socket), ..QemuArgs::default() };
    let process = QemuProcess { args, ..QemuProcess::plain(vm, "a".into()) };
    let mut host = host(&tree, Options { deadline: LONG, ..Options::default() });
    host.vms.insert(vm, Vm::new(process, full_access()));
    let mut scene = Scene { host, vm, shared, _tree: tree };
    eventually(|| {
        scene.tick();
        scene.link().sample().state == AgentState::Ready && !scene.it().told.is_empty()
    });
    let mut asked = 0;
    while asked != scene.it().asked {
        asked = scene.it().asked;
        scene.tick();
    }
    scene
}

impl Scene {
    fn link(&self) -> &AgentLink {
        self.host.vms[&self.vm].agent.as_ref().unwrap()
    }

    fn it(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap()
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
        while self.it().told != all {
            assert!(Instant::now() < until, "{:?}, not {all:?}", self.it().told);
            self.tick();
        }
    }
}

#[test]
fn qemu_is_asked_what_can_write_to_memory_right_before_an_agent_gives_some_back() {
    let mut scene = scene();
    let before = scene.it().asked;
    scene.order();
    assert_eq!(scene.it().asked, before + 1);
    assert!(!scene.link().order_waits(), "it is sent in the same tick");
    scene.is_told(&["attach", "recycle"]);
}

#[test]
fn an_order_waits_for_a_qemu_that_does_not_answer_and_no_tick_waits_for_that() {
    let mut scene = scene();
    scene.host.options.deadline = Duration::from_millis(20);
    scene.it().hangs = true;
    let begun = Instant::now();
    scene.order();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(scene.link().order_waits() && scene.link().sample().busy);
    scene.tick();
    assert_eq!(scene.it().told, ["attach"], "it has not said what can write to it");
    scene.it().hangs = false;
    scene.host.options.deadline = LONG;
    scene.is_told(&["attach", "recycle"]);
}

#[test]
fn an_agent_gives_nothing_back_where_a_device_has_come_since_qemu_was_asked() {
    let mut scene = scene();
    scene.it().device = Some("vhost-user-blk-pci");
    scene.order();
    assert!(!scene.link().order_waits());
    scene.it().device = None;
    scene.is_told(&["attach", "stand down", "attach"]);
}
