//! The state file: what each VM is owed, on disk before it is taken.
//!
//! One JSON file, replaced atomically (write, sync, rename), and a lock beside it
//! so that two daemons never balloon the same VMs. A daemon that starts reads it
//! and owns again what the one before had taken. Where nothing is owed the file says
//! so: only where no daemon has run, or the file was lost, there is none.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ebb_core::config::{HANDS_OFF, INTERVALS, KSM_NOTE};
use ebb_core::state::Owned;
use ebb_host::act::ksm::is_steered;
use ebb_host::durable;

/// No state file is larger; a larger one is not ours.
const MOST: u64 = 16 << 20;

/// The open state file, locked while this lives.
pub struct StateFile {
    path: PathBuf,
    lock: File,
}

impl StateFile {
    /// Locks it; fails where another daemon holds it.
    pub fn open(path: &str) -> Result<StateFile> {
        let path = PathBuf::from(path);
        let lock = lock(&path)?;
        Ok(StateFile { path, lock })
    }

    /// Takes everything from `old`, which this process has used so far, to `new`. Where that
    /// fails, all is still at `old`.
    pub fn moved(old: &str, new: &str) -> Result<StateFile> {
        let (from, mut to) = (StateFile::open(old)?, StateFile::open(new)?);
        if to.find()?.is_some_and(|owed| !owed.is_empty()) {
            bail!(
                "{new} says what another daemon owes: `ebb release --state {new}` gives it to the \
                 VMs"
            );
        }
        let files = [KSM_NOTE, INTERVALS, HANDS_OFF];
        let beside =
            files.map(|name| (from.path.with_file_name(name), to.path.with_file_name(name)));
        // Another Ebb of the old folder may steer KSM: then its note is not this one's.
        let anothers = |note: &Path| note.ends_with(KSM_NOTE) && is_steered(note);
        let moves = |from: &Path, to: &Path| from != to && from.exists() && !anothers(from);
        let beside = beside.iter().filter(|(from, to)| moves(from, to));
        for (from, to) in beside.clone() {
            fs::copy(from, to).with_context(|| format!("cannot write {}", to.display()))?;
        }
        to.write(&from.read()?)?;
        for file in beside.map(|(from, _)| from).chain([&from.path]) {
            let _ = fs::remove_file(file);
        }
        Ok(to)
    }

    /// Whether file and lock are still where they were left. An operator may have emptied the
    /// directory.
    pub fn is_there(&self) -> bool {
        self.path.exists() && self.is_locked()
    }

    fn is_locked(&self) -> bool {
        let id = |m: fs::Metadata| (m.dev(), m.ino());
        let there = fs::metadata(lock_path(&self.path)).map(id);
        self.lock.metadata().map(id).is_ok_and(|ours| there.is_ok_and(|there| there == ours))
    }

    /// What was written last; nothing where there is no file.
    pub fn read(&self) -> Result<Owned> {
        Ok(self.find()?.unwrap_or_default())
    }

    /// What was written last; `None` where there is no file.
    pub fn find(&self) -> Result<Option<Owned>> {
        let text = match fs::metadata(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Ok(m) if m.len() > MOST => {
                bail!("{} is {} bytes: not Ebb's", self.path.display(), m.len())
            }
            found => found
                .and_then(|_| fs::read_to_string(&self.path))
                .with_context(|| format!("cannot read {}", self.path.display()))?,
        };
        serde_json::from_str(&text).map(Some).with_context(|| {
            format!(
                "{} is damaged, or is no state file: VMs may still be ballooned; `ebb run --dry-run` with `ebb status` \
                 shows their sizes; give them their memory (`virsh setmem NAME SIZE --live`, or \
                 QMP `balloon`), then remove the file",
                self.path.display()
            )
        })
    }

    /// Replaces it, durably. Where the lock was removed it is taken anew; fails where another
    /// daemon has it now.
    pub fn write(&mut self, owned: &Owned) -> Result<()> {
        if !self.is_locked() {
            self.lock = lock(&self.path)?;
        }
        durable::replace(&self.path, owned)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn lock_path(path: &Path) -> PathBuf {
    path.with_extension("lock")
}

fn lock(path: &Path) -> Result<File> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir).with_context(|| {
        format!("cannot create {}: run as root, or set daemon.state_file", dir.display())
    })?;
    let path = lock_path(path);
    let lock = durable::lock(&path);
    lock.with_context(|| format!("cannot create {}", path.display()))?.with_context(|| {
        format!(
            "another ebb holds {}: stop it first, and it gives back what it owes; a second daemon \
             needs a daemon.state_file and a daemon.socket of its own",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::VmId;
    use ebb_core::state::OwnedVm;
    use ebb_core::units::Bytes;

    fn owned() -> Owned {
        Owned {
            vms: vec![OwnedVm {
                id: VmId { pid: 7, start: 9 },
                name: "a".into(),
                others: Some(Bytes::gib(1)),
                ordered: Some(Bytes(u64::MAX)),
                ..OwnedVm::default()
            }],
            marks: Vec::new(),
        }
    }

    #[test]
    fn a_note_of_ksm_moves_along_unless_another_ebb_steers_ksm_by_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (old, new) = (at("old/state.json"), at("new/state.json"));
        let moved = || {
            StateFile::open(old.to_str().unwrap()).unwrap().write(&owned()).unwrap();
            fs::write(at("old/ksm.json"), "{}").unwrap();
            let to = StateFile::moved(old.to_str().unwrap(), new.to_str().unwrap()).unwrap();
            assert_eq!(to.read().unwrap(), owned());
            fs::remove_file(&new).unwrap();
            at("new/ksm.json").exists() && !at("old/ksm.json").exists()
        };
        fs::create_dir(at("old")).unwrap();
        let anothers = durable::lock(&at("old/ksm.json.lock")).unwrap();
        assert!(anothers.is_some() && !moved());
        drop(anothers);
        assert!(moved());
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again_and_is_not_shared_with_another_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ebb/state.json");
        let open = || StateFile::open(path.to_str().unwrap());
        let mut first = open().unwrap();
        assert!(!first.is_there(), "nothing is written yet");
        first.write(&owned()).unwrap();
        assert!(first.is_there());
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        assert!(!first.is_there());
        first.write(&owned()).unwrap();
        assert!(first.is_there() && open().is_err());
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        let mut second = open().unwrap();
        second.write(&Owned::default()).unwrap();
        assert!(!first.is_there() && first.write(&owned()).is_err());
        assert_eq!(second.read().unwrap(), Owned::default());
    }
}
