//! Faults, operators and ends of the daemon in random order, while the law is checked.
//!
//! What is done is the seed's, when it is done the machine's as well: `EBB_SEED=7 EBB_STEPS=300`.

use fastrand::Rng;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use super::law::Watch;
use super::place::*;
use super::*;

/// What each needs that is left in peace.
const LITTLE: u64 = 64 * MIB;
/// No new kernel moves its balloon so long after a reset.
const SETTLED: Duration = Duration::from_secs(25);

/// What the schedule has done to a VM.
struct Vm {
    standin: Standin,
    deflates: bool,
    reset: Option<Instant>,
    /// Somebody else set its size: what it needs is left as it is, so that it is left with
    /// exactly that. And how many orders it had then.
    set_by_others: Option<usize>,
}

struct Run {
    // In the order in which they end.
    watch: Watch,
    daemon: Option<Daemon>,
    vms: Vec<Vm>,
    place: Place,
    seed: u64,
    rng: Rng,
    /// What was done, for whoever looks for the cause.
    done: Vec<String>,
}

#[test]
fn faults_in_any_order_leave_to_each_what_it_is_owed_1() {
    run(1);
}

#[test]
fn faults_in_any_order_leave_to_each_what_it_is_owed_2() {
    run(2);
}

#[test]
fn faults_in_any_order_leave_to_each_what_it_is_owed_3() {
    run(3);
}

fn run(number: u64) {
    let seed = set("EBB_SEED").unwrap_or(0) * 10 + number;
    let Some(mut run) = Run::new(seed) else { return };
    for _ in 0..set("EBB_STEPS").unwrap_or(40) {
        run.step();
        let found = run.watch.found();
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
    run.end();
}

impl Drop for Run {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
            eprintln!("seed {}: {}\nthe daemon said:\n{log}", self.seed, self.done.join("; "));
        }
    }
}

impl Run {
    fn new(seed: u64) -> Option<Run> {
        let place = Place::new()?;
        let vms: Vec<Vm> = (0..4)
            .map(|i| Vm {
                standin: place.standin(&format!("s{seed}r{i}"), i % 2 == 0),
                deflates: i % 2 == 0,
                reset: None,
                set_by_others: None,
            })
            .collect();
        let watch = Watch::start(&place, vms.iter().map(|vm| &vm.standin));
        let daemon = Some(place.daemon(OFTEN, vms.iter().map(|vm| &vm.standin)));
        let rng = Rng::with_seed(seed);
        Some(Run { seed, place, vms, watch, daemon, rng, done: Vec::new() })
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn note(&mut self, what: String) {
        self.done.push(what);
    }

    /// Tells a stand-in something.
    fn tell(&mut self, i: usize, wishes: Value) -> Truth {
        self.note(format!("{} {wishes}", self.vms[i].standin.name));
        self.vms[i].standin.tell(&wishes)
    }

    fn step(&mut self) {
        let i = self.rng.usize(..self.vms.len());
        match self.rng.u32(..100) {
            0..=21 => self.reclaim(i),
            22..=33 => self.need(i),
            34..=40 => {
                let ms = [0, 150, 250, 1000, 5000, 30_000][self.rng.usize(..6)];
                self.tell(i, json!({ "latency_ms": ms }));
            }
            41..=43 => drop(self.tell(i, json!({ "hang": true }))),
            44..=47 => self.nonsense(i),
            48..=50 => drop(self.tell(i, json!({ "cut": true }))),
            51 => drop(self.tell(i, json!({ "cut": true, "refuse": true }))),
            52 => drop(self.tell(i, json!({ "cut": true, "mute": true }))),
            53..=54 => {
                let run = ["running", "paused"][self.rng.usize(..2)];
                let follows = self.rng.bool();
                self.tell(i, json!({ "run": run, "follows": follows }));
            }
            55..=57 => {
                let mib = [50, 200, 1000, 4000][self.rng.usize(..4)];
                self.tell(i, json!({ "speed": mib * MIB }));
            }
            58..=61 => self.help(i),
            62..=65 => self.set_by_others(i),
            66..=67 => self.reset(i),
            68..=75 => self.crash(),
            76..=79 => self.reload(),
            80..=81 => self.stop(),
            82..=83 => self.no_descriptors(i),
            _ => self.lift(i),
        }
        let ticks = self.rng.u64(1..6);
        wait_ticks(self.daemon(), ticks);
    }

    /// Nothing is wrong with a VM any more, and it needs little.
    fn lift(&mut self, i: usize) {
        let vm = &self.vms[i].standin;
        vm.tell(&json!({
            "latency_ms": 0, "hang": false, "mute": false, "refuse": false, "errors": {},
            "answers": {}, "run": "running", "follows": true, "need": LITTLE,
            "speed": 1000 * MIB,
        }));
        wait_link(self.daemon(), vm);
        self.note(format!("{} is well", self.vms[i].standin.name));
    }

    fn reclaim(&mut self, i: usize) {
        let all = self.rng.bool();
        let name = self.vms[i].standin.name.clone();
        self.note(if all { "reclaim".into() } else { format!("reclaim {name}") });
        // A wish is for one tick.
        for _ in 0..3 {
            let daemon = self.daemon();
            let asked = if all { daemon.reclaim() } else { daemon.reclaim_vm(&name) };
            asked.unwrap();
            wait_ticks(daemon, 1);
        }
    }

    /// It needs all but a few MiB of what it has, or little.
    fn need(&mut self, i: usize) {
        let much = self.vms[i].set_by_others.is_none() && self.rng.bool();
        let size = self.vms[i].standin.truth().size;
        let need = if much { size - 6 * MIB } else { LITTLE };
        self.tell(i, json!({ "need": need }));
    }

    fn nonsense(&mut self, i: usize) {
        let command = ["query-status", "query-balloon", "balloon", "qom-get", "qom-set"];
        let command = command[self.rng.usize(..command.len())];
        let wish = match self.rng.u32(..3) {
            0 => json!({ "garbage": "\u{1b}[1m}{\"return\": [}\n" }),
            1 => json!({ "errors": { command: "it cannot be done" } }),
            _ => json!({ "answers": { command: "nonsense" } }),
        };
        self.tell(i, wish);
    }

    /// The guest takes something back itself.
    fn help(&mut self, i: usize) {
        let truth = self.vms[i].standin.truth();
        let taken = self.watch.whole_of(&self.vms[i].standin).saturating_sub(truth.size);
        if self.vms[i].deflates && taken > 0 {
            self.tell(i, json!({ "help": taken.min(40 * MIB) }));
        }
    }

    /// An operator sets a size, where Ebb looks and can tell that from its own orders: the
    /// balloon is where it was told to be last.
    fn set_by_others(&mut self, i: usize) {
        if self.vms[i].reset.is_some_and(|at| at.elapsed() < SETTLED) {
            return;
        }
        self.lift(i);
        wait_ticks(self.daemon(), 3);
        let vm = &self.vms[i];
        let truth = vm.standin.truth();
        let rests = truth.size == truth.target && truth.told == truth.target;
        let once = vm.set_by_others.is_none_or(|orders| orders < truth.orders.len());
        let size = self.rng.u64(50..=128) * 4 * MIB;
        if !rests || !once && vm.deflates || size.abs_diff(truth.size) < 8 * MIB {
            return;
        }
        // A guest that may help itself keeps what it was owed.
        let before = self.watch.whole_of(&vm.standin);
        let whole = if vm.deflates && size > truth.size { size.max(before) } else { size };
        self.watch.whole(&vm.standin, whole);
        self.vms[i].set_by_others = Some(truth.orders.len());
        self.tell(i, json!({ "order": size }));
        let vm = &self.vms[i].standin;
        // An order of Ebb's, decided just before, may come after it: the size is never shown.
        let crossed = || vm.truth().orders.len() > truth.orders.len();
        wait_shown(self.daemon(), vm, "operator's size", |v| v["actual"] == size || crossed());
        wait_ticks(self.daemon(), 4);
        if vm.truth().orders.len() == truth.orders.len() {
            self.watch.seen(vm);
        } else {
            // An order of Ebb's came in between: who was the last to speak?
            self.note(format!("{} was ordered by both", self.vms[i].standin.name));
        }
    }

    /// A reset that Ebb hears of and has dealt with.
    fn reset(&mut self, i: usize) {
        self.lift(i);
        self.tell(i, json!({ "reset": true }));
        self.vms[i].reset = Some(Instant::now());
        let (vm, whole) = (&self.vms[i].standin, self.watch.whole_of(&self.vms[i].standin));
        vm.wait_for("size after a reset", |t| t.size == whole && t.told == whole);
    }

    fn crash(&mut self) {
        self.note("SIGKILL".into());
        self.daemon.take().unwrap().crash();
        self.daemon = Some(self.place.daemon_again());
    }

    fn reload(&mut self) {
        self.note("SIGHUP".into());
        let before = self.daemon().log().matches("begun anew").count();
        self.daemon().signal(Signal::HUP);
        let again = |_: &Value| self.daemon().log().matches("begun anew").count() > before;
        // The socket is another's for a moment.
        let anew = || self.daemon().wait_for("daemon anew", PATIENCE, again).is_ok();
        wait_until(anew, || self.daemon().log());
    }

    /// All is lifted, the daemon gives back everything and starts again.
    fn stop(&mut self) {
        (0..self.vms.len()).for_each(|i| self.lift(i));
        self.note("SIGTERM".into());
        self.stopped();
        self.daemon = Some(self.place.daemon_again());
    }

    /// SIGTERM: each VM has what others gave it last, and nothing is owed.
    fn stopped(&mut self) {
        let (code, log) = self.daemon.take().unwrap().end();
        assert_eq!(code, Some(0), "{log}");
        for vm in &self.vms {
            let (truth, wholes) = (vm.standin.truth(), self.watch.wholes_of(&vm.standin));
            let right = wholes.contains(&truth.size) && truth.told == truth.size;
            assert!(right, "{}: {truth:?}, others gave it {wholes:?}\n{log}", vm.standin.name);
        }
        assert!(self.place.owned().vms.is_empty());
    }

    /// The daemon cannot open anything for a while: no file in /proc, no state file.
    fn no_descriptors(&mut self, i: usize) {
        self.lift(i);
        self.note("no descriptors".into());
        let pid = self.daemon().pid();
        let limited = Descriptors::none(pid);
        let need = self.vms[i].standin.truth().size - 6 * MIB;
        if self.vms[i].set_by_others.is_none() {
            self.tell(i, json!({ "need": need }));
        }
        let before = self.vms[i].standin.truth().commands;
        self.vms[i].standin.wait_for("commands", |t| t.commands > before + 40);
        drop(limited);
        self.lift(i);
    }

    fn end(mut self) {
        (0..self.vms.len()).for_each(|i| self.lift(i));
        self.stopped();
        self.watch.check();
        let orders: usize = self.vms.iter().map(|vm| vm.standin.truth().orders.len()).sum();
        let looks = self.watch.end();
        let (seed, steps) = (self.seed, self.done.len());
        println!("seed {seed}: {steps} steps, {orders} orders, {looks} looks");
    }
}

/// While this lives, a process opens nothing more.
pub struct Descriptors {
    pid: Pid,
    before: Rlimit,
}

impl Descriptors {
    pub fn none(pid: u32) -> Descriptors {
        let open: Vec<u64> = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        let free = (0..).find(|fd| !open.contains(fd));
        let pid = Pid::from_raw(pid as i32).unwrap();
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current: free, maximum };
        let before = prlimit(Some(pid), Resource::Nofile, limit).unwrap();
        Descriptors { pid, before }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let _ = prlimit(Some(self.pid), Resource::Nofile, self.before);
    }
}
