//! Files that hold what must survive a crash: replaced whole, or not at all. And the locks that keep
//! one process's such files from another.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What the file holds; `None`: there is none.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(serde_json::from_slice(&text?)?)),
    }
}

/// Replaces this file by a value as JSON, on disk when it returns. Its folder is made where
/// there is none. On an error the file is as it was.
pub fn replace<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// How long a lock is tried for. A process that another thread of its owner has just forked has the
/// file as well, until it executes its program: also after the owner has closed it.
const PATIENCE: Duration = Duration::from_millis(100);
const AGAIN: Duration = Duration::from_millis(5);

/// Makes the file where there is none, and locks it for as long as what is returned lives; `None`:
/// another process has it. One that is there can be locked where nothing can be written (any more).
pub fn lock(path: &Path) -> io::Result<Option<File>> {
    lock_within(path, PATIENCE)
}

fn lock_within(path: &Path, patience: Duration) -> io::Result<Option<File>> {
    let file = File::create(path).or_else(|e| match e.kind() {
        io::ErrorKind::ReadOnlyFilesystem => File::open(path),
        _ => Err(e),
    })?;
    let until = Instant::now() + patience;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(AGAIN);
    }
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_had_by_one_and_is_free_once_what_was_forked_has_closed_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path).unwrap().unwrap();
        assert!(lock(&path).unwrap().is_none());
        // As a child has it between fork and exec.
        let forked = first.try_clone().unwrap();
        drop(first);
        let child = std::thread::spawn(move || {
            std::thread::sleep(4 * AGAIN);
            drop(forked);
        });
        assert!(lock_within(&path, Duration::from_secs(60)).unwrap().is_some());
        child.join().unwrap();
    }
}
