//! Swap areas for experiments: a zram device or a file, made and switched on.
//!
//! Each step is in the journal before it is taken.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_core::units::Bytes;

use super::journal::{Change, Journal};
use super::{Places, read_u64, write};
use crate::image::cache_dir;
use crate::{LabError, run};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapKind {
    /// A zram device if one is to be had, else a file.
    Any,
    /// A file in the cache.
    File,
}

/// A swap area for the arena's time.
#[derive(Clone, Copy, Debug)]
pub struct SwapConfig {
    pub size: Bytes,
    /// What it is made of.
    pub kind: SwapKind,
    /// `swapon -p`.
    pub priority: i16,
}

pub(super) fn add_swap(
    places: &Places,
    journal: &Journal,
    config: &SwapConfig,
) -> Result<PathBuf, LabError> {
    let zram = match config.kind {
        SwapKind::Any => add_zram(places, journal, config.size)?,
        SwapKind::File => None,
    };
    let area = match zram {
        Some(device) => device,
        None => add_swap_file(journal, config.size)?,
    };
    run(Command::new("mkswap").arg(&area))?;
    journal.note(&Change::Swap { area: area.clone() })?;
    swap_on(&area, config.priority)?;
    Ok(area)
}

pub(super) fn swap_on(area: &Path, priority: i16) -> Result<(), LabError> {
    run(Command::new("swapon").args(["-p", &priority.to_string()]).arg(area)).map(|_| ())
}

/// A zram device: a new one, else one that nobody has set up.
fn add_zram(places: &Places, journal: &Journal, size: Bytes) -> Result<Option<PathBuf>, LabError> {
    let block = places.at("sys/block");
    let added = read_u64(&places.at("sys/class/zram-control/hot_add"));
    let device = match added {
        Some(number) => Some(format!("zram{number}")),
        None => fs::read_dir(&block).into_iter().flatten().flatten().find_map(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            let unused = read_u64(&e.path().join("disksize")) == Some(0);
            (name.starts_with("zram") && unused).then_some(name)
        }),
    };
    let Some(device) = device else { return Ok(None) };
    journal.note(&Change::Zram { device: device.clone(), added: added.is_some() })?;
    let node = places.at("dev").join(&device);
    let is_device = fs::metadata(&node).is_ok_and(|m| m.file_type().is_block_device());
    if !is_device || write(&block.join(&device).join("disksize"), &size.0.to_string()).is_err() {
        return Ok(None);
    }
    Ok(Some(node))
}

fn add_swap_file(journal: &Journal, size: Bytes) -> Result<PathBuf, LabError> {
    let path = cache_dir("run")?.join(format!("swap-{}", journal.name()));
    journal.note(&Change::File { path: path.clone() })?;
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(true).write(true).mode(0o600).open(&path);
    let mut file = file.map_err(LabError::file(&path))?;
    let zeros = vec![0; 1 << 20];
    for _ in 0..size.0 >> 20 {
        file.write_all(&zeros).map_err(LabError::file(&path))?;
    }
    file.sync_data().map_err(LabError::file(&path))?;
    Ok(path)
}
