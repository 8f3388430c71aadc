//! The daemon's loop over the real `/proc` of stand-ins, of which any read may fail, lie or
//! take its time, while QEMU is slow, hangs up or speaks nonsense, and the law is checked.
//!
//! The loop and the host are the shipped ones; what writes the state file is this test.
//! What is done is the seed's: `EBB_SEED=7 EBB_STEPS=2000`.

use std::sync::{Arc, Mutex};

use ebb_core::config::Config;
use ebb_core::plan::{Action, Outcome, Reclaim};
use ebb_core::sample::{Sample, VmId};
use ebb_core::state::Owned;
use ebb_core::tick::{Engine, Host, Next};
use ebb_core::units::Stamp;
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::trust::TrustRules;
use fastrand::Rng;
use rustix::io::Errno;

use super::law::Watch;
use super::place::*;
use super::*;

/// Between two ticks.
const TICK: Duration = Duration::from_millis(40);
/// What a guest needs that is left in peace.
const LITTLE: u64 = 64 * MIB;
const ERRORS: [Errno; 6] =
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::ACCESS, Errno::PERM];
const NONSENSE: [&str; 5] = ["", "\n", "nonsense", "1 (kvm) S 0 0 0", "\u{0}\u{1b}[1m\u{0}"];

/// What is wrong with reads now.
#[derive(Clone, Debug)]
struct Wrong {
    /// Of this process only.
    pid: Option<u32>,
    /// One of so many reads.
    one_of: u32,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    Fails(Errno),
    Says(&'static str),
    Takes(Duration),
}

impl Wrong {
    fn any(rng: &mut Rng, pids: &[u32]) -> Wrong {
        let how = match rng.u32(..5) {
            0..=1 => How::Fails(ERRORS[rng.usize(..ERRORS.len())]),
            2..=3 => How::Says(NONSENSE[rng.usize(..NONSENSE.len())]),
            _ => How::Takes(Duration::from_millis([2, 20, 150][rng.usize(..3)])),
        };
        let pid = rng.bool().then(|| pids[rng.usize(..pids.len())]);
        Wrong { pid, one_of: [1, 2, 10, 50][rng.usize(..4)], how }
    }

    fn at(&self, path: &Path, rng: &mut Rng) -> Option<How> {
        let of_it = |pid: u32| path.starts_with(format!("/proc/{pid}"));
        let hit = self.pid.is_none_or(of_it) && rng.u32(..self.one_of) == 0;
        hit.then(|| self.how.clone())
    }
}

type Switch = Arc<Mutex<(Option<Wrong>, Rng)>>;

/// The machine's own files, as long as nothing is wrong.
fn root(switch: &Switch) -> Root {
    let switch = switch.clone();
    Root::default().with_faults(Arc::new(move |path: &Path| {
        let how = {
            let (wrong, rng) = &mut *switch.lock().unwrap();
            wrong.as_ref()?.at(path, rng)?
        };
        match how {
            How::Fails(errno) => Some(Err(errno.into())),
            How::Says(text) => Some(Ok(text.into())),
            How::Takes(time) => {
                std::thread::sleep(time);
                None
            }
        }
    }))
}

/// The shipped host, with a state file that is written here.
struct Driven {
    host: LinuxHost,
    file: PathBuf,
    requests: Vec<Reclaim>,
}

impl Host for Driven {
    fn now(&self) -> Stamp {
        LinuxHost::now()
    }

    fn read(&mut self, owed: &[VmId]) -> Sample {
        self.host.sample_owed(owed)
    }

    fn remember(&mut self, owned: &Owned) -> Result<(), String> {
        let new = self.file.with_extension("new");
        std::fs::write(&new, serde_json::to_vec_pretty(owned).unwrap()).unwrap();
        std::fs::rename(new, &self.file).map_err(|e| e.to_string())
    }

    fn requests(&mut self) -> Vec<Reclaim> {
        std::mem::take(&mut self.requests)
    }

    fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        self.host.apply(actions)
    }

    fn wait(&mut self, _: &Next) -> bool {
        true
    }
}

struct Run {
    watch: Watch,
    driven: Driven,
    engine: Engine,
    config: Config,
    switch: Switch,
    vms: Vec<Standin>,
    place: Place,
    rng: Rng,
    done: Vec<String>,
    /// VMs that were not seen in a tick although they were there.
    missed: usize,
}

#[test]
fn reads_that_fail_or_lie_leave_to_each_what_it_is_owed() {
    let (seed, steps) = (set("EBB_SEED").unwrap_or(1), set("EBB_STEPS").unwrap_or(25));
    let Some(mut run) = Run::new(seed) else { return };
    for _ in 0..steps {
        run.step();
        let found = run.watch.found();
        assert!(found.is_empty(), "seed {seed}: {}\n{}", run.done.join("; "), found.join("\n"));
    }
    run.end(seed);
}

impl Run {
    fn new(seed: u64) -> Option<Run> {
        let place = Place::new()?;
        let vms: Vec<Standin> =
            (0..3).map(|i| place.standin(&format!("p{seed}r{i}"), i % 2 == 0)).collect();
        let watch = Watch::start(&place, &vms);
        let config = place.configure(OFTEN, &vms);
        let switch: Switch = Arc::new(Mutex::new((None, Rng::with_seed(seed))));
        let driven = Driven::new(&config, &switch, place.state_file());
        let engine = Engine::new(config.clone(), false);
        let (rng, done) = (Rng::with_seed(seed), Vec::new());
        let mut run =
            Run { watch, driven, engine, config, switch, vms, place, rng, done, missed: 0 };
        // All are known before anything is wrong.
        let until = Instant::now() + PATIENCE;
        while run.tick() < run.vms.len() {
            assert!(Instant::now() < until);
        }
        Some(run)
    }

    /// One tick; how many VMs told their size.
    fn tick(&mut self) -> usize {
        std::thread::sleep(TICK);
        let (tick, _) = self.engine.step(&mut self.driven);
        assert_eq!(tick.sample.ended, [], "all are there");
        self.missed += self.vms.len().saturating_sub(tick.sample.vms.len());
        tick.sample.vms.iter().filter(|vm| vm.balloon.is_some()).count()
    }

    fn step(&mut self) {
        let i = self.rng.usize(..self.vms.len());
        let pids: Vec<u32> = self.vms.iter().map(|vm| vm.pid).collect();
        match self.rng.u32(..100) {
            0..=39 => {
                let wrong = Wrong::any(&mut self.rng, &pids);
                self.done.push(format!("{wrong:?}"));
                self.switch.lock().unwrap().0 = Some(wrong);
            }
            40..=49 => self.right(),
            50..=69 => {
                let vm = self.rng.bool().then(|| self.vms[i].name.clone());
                self.done.push(format!("reclaim {vm:?}"));
                self.driven.requests.push(Reclaim { vm, bytes: None });
            }
            70..=79 => {
                let size = self.vms[i].truth().size;
                let need = if self.rng.bool() { size - 6 * MIB } else { LITTLE };
                self.tell(i, json!({ "need": need }));
            }
            80..=85 => {
                let ms = [0, 150, 250, 1000][self.rng.usize(..4)];
                self.tell(i, json!({ "latency_ms": ms }));
            }
            86..=87 => self.tell(i, json!({ "cut": true })),
            88..=89 => self.tell(i, json!({ "garbage": "\u{1b}[1m}{\"return\": [}\n" })),
            90..=94 => self.begin_anew(),
            _ => self.well(i),
        }
        for _ in 0..self.rng.u32(1..6) {
            self.tick();
        }
    }

    fn tell(&mut self, i: usize, wishes: serde_json::Value) {
        self.done.push(format!("{} {wishes}", self.vms[i].name));
        self.vms[i].tell(&wishes);
    }

    fn right(&mut self) {
        self.done.push("reads are right".into());
        self.switch.lock().unwrap().0 = None;
    }

    fn well(&mut self, i: usize) {
        self.tell(i, json!({ "latency_ms": 0, "need": LITTLE }));
    }

    /// As after a crash: what is left is the file.
    fn begin_anew(&mut self) {
        self.done.push("begun anew".into());
        self.engine = Engine::new(self.config.clone(), false);
        self.engine.adopt(self.place.owned(), None);
        // A daemon that cannot start is started again until it can.
        if self.rng.bool() {
            self.right();
        }
        self.driven = Driven::new(&self.config, &self.switch, self.place.state_file());
    }

    fn end(mut self, seed: u64) {
        self.right();
        (0..self.vms.len()).for_each(|i| self.well(i));
        let orders: usize = self.vms.iter().map(|vm| vm.truth().orders.len()).sum();
        assert!(orders > 0 && self.done.len() > 5, "{}", self.done.join("; "));
        let Run { driven, place, vms, mut watch, .. } = self;
        drop(driven);
        place.release();
        for vm in &vms {
            let truth = vm.truth();
            assert_eq!((truth.size, truth.told), (RAM, RAM), "{}", vm.name);
        }
        assert!(place.owned().is_empty());
        let looks = watch.end();
        println!("seed {seed}: {orders} orders, {} VMs missed, {looks} looks", self.missed);
    }
}

impl Driven {
    fn new(config: &Config, switch: &Switch, file: PathBuf) -> Driven {
        let options = || Options {
            root: root(switch),
            config: Config { listed_only: true, ..config.clone() },
            trust: TrustRules { programs: Some(config.programs.clone()), ..TrustRules::default() },
            psi_trigger_us: None,
            scan_every: Duration::from_millis(100),
            ..Options::default()
        };
        let host = LinuxHost::new(options()).unwrap_or_else(|_| {
            switch.lock().unwrap().0 = None;
            LinuxHost::new(options()).unwrap()
        });
        Driven { host, file, requests: Vec::new() }
    }
}
