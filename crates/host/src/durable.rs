//! Files that hold what must survive a crash: replaced whole, or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

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
