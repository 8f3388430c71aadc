//! The ground truth of merging: every page of paused VMs, read one by one.
//!
//! The slow and plain way, on purpose another one than the product's: page by page
//! through `/proc/PID/mem`, by physical frame (`/proc/PID/pagemap`), with another
//! hash. A frame that several places map counts once, the zero page not at all.
//! Needs root.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher;
use std::os::unix::fs::FileExt;

use ebb_core::units::{Bytes, PAGE};
use ebb_host::probe::regions::{guest_ram, read_smaps};
use ebb_host::root::Root;

use crate::LabError;

/// What there is, and what would be left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// Places in guest RAM that a frame backs, the zero page left out.
    pub mapped: u64,
    /// Frames that guest RAM takes.
    pub frames: u64,
    /// Of those, zeros.
    pub zeros: u64,
    /// Different contents, zeros not counted.
    pub distinct: u64,
}

impl Truth {
    /// Reads all guest RAM of these processes, which must not run meanwhile.
    pub fn of(pids: &[u32]) -> Result<Truth, LabError> {
        let path = "/proc/kpageflags";
        let flags = File::open(path).map_err(LabError::file(path))?;
        let (truth, frames, contents) = Default::default();
        let hash = [RandomState::new(), RandomState::new()];
        let mut reader = Reader { flags, truth, frames, contents, hash };
        for pid in pids {
            reader.process(*pid)?;
        }
        let (frames, distinct) = (reader.frames.len() as u64, reader.contents.len() as u64);
        Ok(Truth { frames, distinct, ..reader.truth })
    }

    /// What merging saves already, zero pages not counted.
    pub fn merged(&self) -> Bytes {
        Bytes::pages(self.mapped - self.frames)
    }

    /// What perfect merging would save now.
    pub fn ideal(&self) -> Bytes {
        Bytes::pages(self.frames - self.distinct)
    }
}

struct Reader {
    flags: File,
    truth: Truth,
    frames: HashSet<u64>,
    contents: HashSet<(u64, u64)>,
    hash: [RandomState; 2],
}

const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const ZERO_PAGE: u64 = 1 << 24;

impl Reader {
    fn process(&mut self, pid: u32) -> Result<(), LabError> {
        let (mem, map) = (format!("/proc/{pid}/mem"), format!("/proc/{pid}/pagemap"));
        let open = |path: &String| File::open(path).map_err(LabError::file(path));
        let (mem, map) = (open(&mem)?, open(&map)?);
        let gone = || LabError::Missing(format!("process {pid} has ended"));
        let regions = read_smaps(&Root::default(), pid);
        let regions = regions.map_err(|e| LabError::Missing(e.to_string()))?.ok_or_else(gone)?;
        let mut page = [0u8; PAGE as usize];
        for region in guest_ram(&regions) {
            for address in (region.range.start..region.range.end()).step_by(PAGE as usize) {
                let entry = word(&map, address / PAGE).ok_or_else(gone)?;
                let frame = entry & FRAME;
                if entry & PRESENT == 0 || self.is_zero_page(frame) {
                    continue;
                }
                self.truth.mapped += 1;
                if !self.frames.insert(frame) {
                    continue;
                }
                mem.read_exact_at(&mut page, address).map_err(LabError::file("/proc/PID/mem"))?;
                self.note(&page);
            }
        }
        Ok(())
    }

    fn is_zero_page(&self, frame: u64) -> bool {
        word(&self.flags, frame).is_some_and(|f| f & ZERO_PAGE != 0)
    }

    fn note(&mut self, page: &[u8]) {
        if page.iter().all(|b| *b == 0) {
            self.truth.zeros += 1;
            return;
        }
        self.contents.insert((self.hash[0].hash_one(page), self.hash[1].hash_one(page)));
    }
}

/// A word of a file of words.
fn word(file: &File, index: u64) -> Option<u64> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, index * 8).ok()?;
    Some(u64::from_ne_bytes(word))
}
