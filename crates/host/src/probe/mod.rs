//! What the kernel tells: one file per source, `read_x(root)` beside a pure
//! `parse_x(text)`. A new source is a new file here.

pub mod cgroup;
pub mod discovery;
pub mod identity;
pub mod ksm;
pub mod managers;
pub mod mappers;
pub mod maps;
pub mod meminfo;
pub mod numa;
pub mod own_memory;
pub mod pagemap;
pub mod process;
pub mod psi;
pub mod qemu;
pub mod ram_files;
pub mod regions;
pub mod swaps;
pub mod trust;
pub mod vmpressure;
pub mod vmstat;
pub mod zfs;
