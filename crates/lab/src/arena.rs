//! The arena: everything an experiment changes on the machine, put back for sure.
//!
//! One arena at a time (a lock on a file), or several that each say beside whom they may be
//! ([`Beside`]), also of one process. Each change is written to the arena's
//! journal *before* it is made: the knob's old value, the cgroup, the swap area. Leaving
//! undoes the journal backwards; so does SIGINT or SIGTERM; and after a SIGKILL or a crash
//! the next one to enter does it first. What the journal says is undone whether or not the
//! change was made, so every undoing tolerates that there is nothing to undo. Lock and
//! journals live in `/run`, which a reboot empties, as it does what they are about.
//!
//! This file has the machine as one experiment holds it: lock, signals, knobs. What is
//! written and undone is in `journal`, what is made in `cgroup` and `swap`.

mod cgroup;
mod journal;
mod swap;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

use ebb_core::units::Bytes;
use ebb_host::probe::cgroup::read_mounts;
use ebb_host::root::Root;
use rustix::fs::{FlockOperation, flock};

pub use self::cgroup::MemoryCgroup;
use self::journal::{Change, JOURNAL, Journal, left};
pub use self::swap::{SwapConfig, SwapKind};
use self::swap::{add_swap, swap_on};
use crate::image::cached;
use crate::{LabError, lock, run};

/// Where an arena looks for the machine; `/` but in tests.
#[derive(Clone, Debug)]
pub struct Places {
    /// What stands for `/`.
    pub root: PathBuf,
    pub state: PathBuf,
}

impl Places {
    pub fn here() -> Places {
        let run = Path::new("/run");
        let state = if rustix::process::geteuid().is_root() && run.is_dir() {
            run.join("ebb-lab")
        } else {
            std::env::var_os("XDG_RUNTIME_DIR")
                .map_or_else(|| cached("run"), |d| PathBuf::from(d).join("ebb-lab"))
        };
        Places { root: "/".into(), state }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// How the arena is to be.
#[derive(Clone, Debug, Default)]
pub struct ArenaConfig {
    /// Limit of the memory cgroup; `None` makes no cgroup. Without `swap` the kernel swaps nothing
    /// of it out, also not to another test's swap area.
    pub budget: Option<Bytes>,
    pub swap: Option<SwapConfig>,
    /// Knobs to set, as absolute path and value.
    pub knobs: Vec<(String, String)>,
    pub beside: Beside,
}

impl ArenaConfig {
    /// A budget with a swap area of this size behind it.
    pub fn limited(budget: Bytes, size: Bytes, kind: SwapKind) -> ArenaConfig {
        let swap = Some(SwapConfig { size, kind, priority: 100 });
        ArenaConfig { budget: Some(budget), swap, ..ArenaConfig::default() }
    }
}

/// What may run on the machine meanwhile. What the arena sets must not matter to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Beside {
    /// Nothing else: for measurements.
    #[default]
    Alone,
    /// Tests, unless they set KSM: what its VMs hold counts, and KSM may look at them.
    Tests,
    /// Tests, also those that set KSM: it looks at none of its VMs, or that is no matter.
    AnyTest,
    /// It sets KSM, which only the machine's own [`Beside::AnyTest`] may see.
    KsmIsMine,
}

/// The machine, held by one experiment.
#[derive(Debug)]
pub struct Arena {
    cgroup: Option<MemoryCgroup>,
    swap: Option<(PathBuf, i16)>,
    journal: Shared,
    _lock: [Option<File>; 2],
}

impl Arena {
    /// Waits for the machine, puts back what a predecessor left, and sets it up.
    pub fn enter(config: &ArenaConfig) -> Result<Arena, LabError> {
        Arena::enter_at(Places::here(), config)
    }

    /// The machine for a test that sets nothing.
    pub fn beside(beside: Beside) -> Result<Arena, LabError> {
        Arena::enter(&ArenaConfig { beside, ..ArenaConfig::default() })
    }

    /// The same with a budget for its VMs.
    pub fn within(budget: Bytes, beside: Beside) -> Result<Arena, LabError> {
        Arena::enter(&ArenaConfig { budget: Some(budget), beside, ..ArenaConfig::default() })
    }

    /// As [`Arena::enter`] on another root, for tests.
    pub fn enter_at(places: Places, config: &ArenaConfig) -> Result<Arena, LabError> {
        let Held { lock, journal, failed, .. } = hold(&places, config.beside)?;
        if !failed.is_empty() {
            let text = format!("an earlier run left what cannot be undone: {}", failed.join("; "));
            return Err(LabError::Missing(text));
        }
        let journal = Arc::new(Mutex::new(journal));
        restore_on_signal(&journal)?;
        let mut arena = Arena { cgroup: None, swap: None, journal, _lock: lock };
        for (path, value) in &config.knobs {
            arena.set(&places.at(path), value)?;
        }
        if let Some(swap) = &config.swap {
            let area = arena.with_journal(|j| add_swap(&places, j, swap))?;
            arena.swap = Some((area, swap.priority));
        }
        if let Some(budget) = config.budget {
            let cgroup = arena.with_journal(|j| MemoryCgroup::create(&places, j, budget))?;
            if arena.swap.is_none() {
                cgroup.without_swap()?;
            }
            arena.cgroup = Some(cgroup);
        }
        Ok(arena)
    }

    fn with_journal<T>(&self, f: impl FnOnce(&Journal) -> T) -> T {
        f(&lock(&self.journal))
    }

    /// Sets a knob until the arena is left.
    pub fn set(&self, path: &Path, value: &str) -> Result<(), LabError> {
        let old = fs::read_to_string(path).map_err(LabError::file(path))?;
        let old = knob_value(&old).to_string();
        self.with_journal(|j| j.note(&Change::Knob { path: path.into(), old }))?;
        write(path, value)
    }

    /// Its cgroup, where a budget was asked for.
    pub fn cgroup(&self) -> Option<&MemoryCgroup> {
        self.cgroup.as_ref()
    }

    /// A cgroup of version 2 of its own, for whoever makes others below it. On a machine of
    /// version 1 it has no controllers; processes can be counted and killed by it all the same.
    pub fn cgroup_tree(&self) -> Result<PathBuf, LabError> {
        self.with_journal(|j| {
            let mounts = read_mounts(&Root::at(&j.places.root)).ok().flatten().unwrap_or_default();
            let mount = mounts.iter().find(|m| m.kind == "cgroup2");
            let mount = mount.ok_or_else(|| LabError::Missing("no cgroup2 is mounted".into()))?;
            let dir = j.places.at(&mount.point).join(j.name());
            j.note(&Change::Cgroup { path: dir.clone() })?;
            fs::create_dir(&dir).map_err(LabError::file(&dir))?;
            Ok(dir)
        })
    }

    /// Its swap area, where one was asked for.
    pub fn swap(&self) -> Option<&Path> {
        self.swap.as_ref().map(|(area, _)| area.as_path())
    }

    /// Reads everything back that its swap area holds, which has to fit into the budget.
    pub fn drain_swap(&self) -> Result<(), LabError> {
        let Some((area, priority)) = &self.swap else { return Ok(()) };
        steadily(|| {
            run(Command::new("swapoff").arg(area))?;
            swap_on(area, *priority)
        })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for failure in self.with_journal(Journal::undo) {
            eprintln!("ebb-lab: could not restore {failure}; the next run tries again");
        }
    }
}

/// Puts back what earlier runs left; returns how much there was, or what could
/// not be undone.
pub fn clean(places: &Places) -> Result<Result<usize, Vec<String>>, LabError> {
    let Held { changes, failed, .. } = hold(places, Beside::Alone)?;
    Ok(if failed.is_empty() { Ok(changes) } else { Err(failed) })
}

/// The lock on the machine, and how undoing the changes of earlier runs ended.
struct Held {
    lock: [Option<File>; 2],
    journal: Journal,
    /// How much they had left, and what of it could not be undone.
    changes: usize,
    failed: Vec<String>,
}

/// Takes the lock, waiting for it, and undoes what was left; it is let go when the file is
/// closed. All go through the gate one by one, so those that share the machine do not
/// overtake one that waits for the whole.
fn hold(places: &Places, beside: Beside) -> Result<Held, LabError> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    fs::create_dir_all(&places.state).map_err(LabError::file(&places.state))?;
    let locked = |name: &str, shared: bool| {
        let path = places.state.join(name);
        let file = File::create(&path).map_err(LabError::file(&path))?;
        let (at_once, waiting) = match shared {
            true => (FlockOperation::NonBlockingLockShared, FlockOperation::LockShared),
            false => (FlockOperation::NonBlockingLockExclusive, FlockOperation::LockExclusive),
        };
        if flock(&file, at_once).is_err() {
            eprintln!("ebb-lab: another run holds the machine; waiting");
            flock(&file, waiting).map_err(|e| LabError::file(&path)(e.into()))?;
        }
        Ok((file, path))
    };
    // Before the gate: no other arena is to wait for this.
    let ksm = match beside {
        Beside::Alone | Beside::AnyTest => None,
        Beside::Tests => Some(locked("ksm", true)?.0),
        Beside::KsmIsMine => Some(locked("ksm", false)?.0),
    };
    let _gate = locked("gate", false)?;
    let (all, _) = locked("lock", beside != Beside::Alone)?;
    let lock = [Some(all), ksm];
    let left = left(places);
    let changes = left.iter().map(|j| j.read().len()).sum();
    let failed = left.iter().flat_map(Journal::undo).collect();
    let name = format!("{}-{}.{JOURNAL}", std::process::id(), COUNT.fetch_add(1, Relaxed));
    let (own, path) = locked(&name, false)?;
    let journal = Journal { path, places: places.clone(), _lock: own };
    Ok(Held { lock, journal, changes, failed })
}

type Shared = Arc<Mutex<Journal>>;

/// What a signal is to undo.
static HELD: Mutex<Vec<Weak<Mutex<Journal>>>> = Mutex::new(Vec::new());

fn held() -> Vec<Shared> {
    let held = lock(&HELD);
    held.iter().filter_map(Weak::upgrade).collect()
}

/// Changes something that a journal has already. A signal undoes what is in the journals
/// before that or after it, and nothing is changed any more once it has begun to. Not for
/// what notes something itself.
pub fn steadily<T>(change: impl FnOnce() -> T) -> T {
    let held = held();
    let _held: Vec<_> = held.iter().map(|j| lock(j)).collect();
    change()
}

/// SIGINT and SIGTERM: undo what is held, then end as if by the signal. One
/// thread for the whole process: a handler, once in place, stays.
fn restore_on_signal(journal: &Shared) -> Result<(), LabError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    static THREAD: AtomicBool = AtomicBool::new(false);
    let mut all = lock(&HELD);
    all.retain(|j| j.strong_count() > 0);
    all.push(Arc::downgrade(journal));
    if THREAD.swap(true, Relaxed) {
        return Ok(());
    }
    let signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]);
    let mut signals = signals.map_err(LabError::file("signal handlers"))?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Kept until the end: nothing is changed any more. VMs outside the
            // cgroup die with this process.
            let held = held();
            let held: Vec<_> = held.iter().map(|j| lock(j)).collect();
            for failure in held.iter().flat_map(|j| j.undo()) {
                eprintln!("ebb-lab: could not restore {failure}");
            }
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

fn write(path: &Path, value: &str) -> Result<(), LabError> {
    let mut file = OpenOptions::new().write(true).open(path).map_err(LabError::file(path))?;
    file.write_all(value.as_bytes()).map_err(LabError::file(path))
}

fn read_u64(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The value of a knob; of `a [b] c` the chosen one.
pub(crate) fn knob_value(text: &str) -> &str {
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(text.trim(), |(value, _)| value)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    pub(super) fn fixture(mounts: &str) -> (tempfile::TempDir, Places) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for sub in ["proc/self", "sys/kernel/mm/ksm", "cg/memory", "cg/unified"] {
            fs::create_dir_all(root.join(sub)).unwrap();
        }
        fs::write(root.join("proc/self/mountinfo"), mounts).unwrap();
        fs::write(root.join("sys/kernel/mm/ksm/run"), "0\n").unwrap();
        fs::write(root.join("sys/thp"), "always [madvise] never\n").unwrap();
        let places = Places { root, state: dir.path().join("state") };
        (dir, places)
    }

    /// What an arena leaves that was killed.
    fn journal(places: &Places) -> Journal {
        let path = places.state.join("1-0.journal");
        let _lock = File::create(places.state.join("unlocked")).unwrap();
        Journal { path, places: places.clone(), _lock }
    }

    #[test]
    fn some_share_the_machine_and_undo_what_is_their_own() {
        let (_dir, places) = fixture("");
        let enter = |beside| {
            let places = places.clone();
            thread::spawn(move || {
                drop(Arena::enter_at(places, &ArenaConfig { beside, ..Default::default() }))
            })
        };
        let knob = |value: &str| vec![("/sys/kernel/mm/ksm/run".to_string(), value.to_string())];
        let beside =
            |knobs| ArenaConfig { knobs, beside: Beside::AnyTest, ..ArenaConfig::default() };
        let read = || fs::read_to_string(places.root.join("sys/kernel/mm/ksm/run")).unwrap();
        let first = Arena::enter_at(places.clone(), &beside(knob("1"))).unwrap();
        let second = Arena::enter_at(places.clone(), &beside(Vec::new())).unwrap();
        assert!(left(&places).is_empty(), "both are in use");
        drop(second);
        assert!(read().starts_with('1'));
        let alone = enter(Beside::Alone);
        thread::sleep(Duration::from_millis(50));
        assert!(!alone.is_finished());
        drop(first);
        alone.join().unwrap();
        assert!(read().starts_with('0'));

        let ksm = ArenaConfig { beside: Beside::KsmIsMine, ..ArenaConfig::default() };
        let ksm = Arena::enter_at(places.clone(), &ksm).unwrap();
        let waits = [Beside::Tests, Beside::KsmIsMine].map(enter);
        enter(Beside::AnyTest).join().unwrap();
        assert!(waits.iter().all(|w| !w.is_finished()));
        drop(ksm);
        waits.into_iter().for_each(|w| w.join().unwrap());
    }

    #[test]
    fn knobs_are_put_back_on_leaving() {
        let (_dir, places) = fixture("");
        let knobs = vec![
            ("/sys/kernel/mm/ksm/run".to_string(), "1".to_string()),
            ("/sys/kernel/mm/ksm/run".to_string(), "2".to_string()),
            ("/sys/thp".to_string(), "never".to_string()),
        ];
        let config = ArenaConfig { knobs, ..ArenaConfig::default() };
        let read = |p: &str| fs::read_to_string(places.root.join(p)).unwrap();
        let arena = Arena::enter_at(places.clone(), &config).unwrap();
        assert!(read("sys/kernel/mm/ksm/run").starts_with('2'));
        drop(arena);
        assert!(read("sys/kernel/mm/ksm/run").starts_with('0'));
        assert!(read("sys/thp").starts_with("madvise"));
        assert!(left(&places).is_empty());
    }

    #[test]
    fn a_crash_is_undone_by_the_next_run_and_half_a_line_does_no_harm() {
        let (_dir, places) = fixture("");
        let knob = places.root.join("sys/kernel/mm/ksm/run");
        fs::create_dir_all(&places.state).unwrap();
        let journal = journal(&places);
        journal.note(&Change::Knob { path: knob.clone(), old: "0".into() }).unwrap();
        journal.note(&Change::Cgroup { path: places.root.join("none") }).unwrap();
        fs::write(&knob, "1").unwrap();
        let mut file = OpenOptions::new().append(true).open(&journal.path).unwrap();
        file.write_all(b"{\"knob\":{\"pa").unwrap();
        assert_eq!(clean(&places).unwrap(), Ok(2));
        assert_eq!(fs::read_to_string(&knob).unwrap(), "0");
        assert_eq!(clean(&places).unwrap(), Ok(0));
    }

    #[test]
    fn what_cannot_be_undone_stays_in_the_journal() {
        let (_dir, places) = fixture("");
        fs::create_dir_all(&places.state).unwrap();
        let journal = journal(&places);
        let stuck = places.root.join("sys");
        journal.note(&Change::File { path: stuck.clone() }).unwrap();
        journal.note(&Change::Swap { area: "/none".into() }).unwrap();
        assert_eq!(clean(&places).unwrap().unwrap_err().len(), 1);
        assert_eq!(journal.read(), [Change::File { path: stuck }]);
        assert!(Arena::enter_at(places, &ArenaConfig::default()).is_err());
    }
}
