//! The arena's journal: what was changed, written before the change, and how each is undone.
//!
//! A new kind of change needs a [`Change`] and what [`undo`] does about it; journals that
//! earlier runs left are read as well.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::{Places, write};
use crate::{LabError, run};

pub(super) const JOURNAL: &str = "journal";

/// What was changed, enough to undo it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Change {
    Knob { path: PathBuf, old: String },
    Cgroup { path: PathBuf },
    Swap { area: PathBuf },
    Zram { device: String, added: bool },
    File { path: PathBuf },
}

#[derive(Debug)]
pub(super) struct Journal {
    pub(super) path: PathBuf,
    pub(super) places: Places,
    /// Shows that it is in use.
    pub(super) _lock: File,
}

impl Journal {
    /// For what the arena makes: no other's, also of this process.
    pub(super) fn name(&self) -> String {
        let stem = self.path.file_stem().unwrap_or_default();
        format!("ebb-lab-{}", stem.to_string_lossy())
    }

    pub(super) fn note(&self, change: &Change) -> Result<(), LabError> {
        let error = || LabError::file(&self.path);
        let mut file =
            OpenOptions::new().create(true).append(true).open(&self.path).map_err(error())?;
        let line = serde_json::to_string(change).map_err(|e| error()(e.into()))? + "\n";
        file.write_all(line.as_bytes()).and_then(|()| file.sync_data()).map_err(error())
    }

    pub(super) fn read(&self) -> Vec<Change> {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// Undoes all, last first; returns what could not be undone. The journal is
    /// gone afterwards only if everything is.
    pub(super) fn undo(&self) -> Vec<String> {
        let changes = self.read();
        let mut failed = Vec::new();
        let mut left = Vec::new();
        for change in changes.iter().rev() {
            if let Err(e) = undo(change, &self.places) {
                failed.push(format!("{change:?}: {e}"));
                left.insert(0, change);
            }
        }
        let _ = fs::remove_file(&self.path);
        for change in left {
            let _ = self.note(change);
        }
        failed
    }
}

fn undo(change: &Change, places: &Places) -> Result<(), LabError> {
    match change {
        Change::Knob { path, old } if path.exists() => write(path, old),
        Change::Cgroup { path } if path.is_dir() => remove_cgroup(path),
        Change::Swap { area } => {
            let swaps = fs::read_to_string(places.at("proc/swaps")).unwrap_or_default();
            let here = area.to_string_lossy();
            if swaps.lines().any(|l| l.split_whitespace().next() == Some(&here)) {
                run(Command::new("swapoff").arg(area))?;
            }
            Ok(())
        }
        Change::Zram { device, added } => {
            let dir = places.at("sys/block").join(device);
            if dir.is_dir() {
                write(&dir.join("reset"), "1")?;
            }
            if *added && dir.is_dir() {
                let number = device.trim_start_matches("zram");
                write(&places.at("sys/class/zram-control/hot_remove"), number)?;
            }
            Ok(())
        }
        Change::File { path } if path.exists() => {
            fs::remove_file(path).map_err(LabError::file(path))
        }
        _ => Ok(()),
    }
}

/// Kills what is in the lab's own cgroup, and in those below it, and removes them.
fn remove_cgroup(path: &Path) -> Result<(), LabError> {
    let below = fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.path());
    below.filter(|p| p.is_dir()).try_for_each(|p| remove_cgroup(&p))?;
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        for pid in fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
            let pid = pid.trim().parse().ok().and_then(rustix::process::Pid::from_raw);
            if let Some(pid) = pid {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        match fs::remove_dir(path) {
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(20)),
            result => return result.map_err(LabError::file(path)),
        }
    }
}

/// Journals whose arena has ended without undoing them: they are locked as long as it lives.
pub(super) fn left(places: &Places) -> Vec<Journal> {
    let files = fs::read_dir(&places.state).into_iter().flatten().flatten().map(|e| e.path());
    let journals = files.filter(|p| p.extension().is_some_and(|e| e == JOURNAL));
    let ended = |path: PathBuf| {
        let file = File::open(&path).ok()?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        Some(Journal { path, places: places.clone(), _lock: file })
    };
    journals.filter_map(ended).collect()
}
