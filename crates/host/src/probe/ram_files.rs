//! RAM in files of a tmpfs with a size limit (`/dev/shm`): what of the files is not allocated, and
//! what the mount has free.
//!
//! A page of such a file that is given back is the mount's again, and whoever writes in the mount
//! may take it. A guest that then touches the page has its QEMU killed by SIGBUS. So all that is
//! not allocated must have room in the mount.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, makedev, statfs, statx};

use super::qemu::QemuProcess;
use crate::root::{ProbeError, Probed, Root, probed};

const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Smaller files are QEMU's own, not RAM.
const LEAST: u64 = 16 << 20;

/// The part of a VM's RAM that is in one mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RamFiles {
    /// What the mount has free.
    pub free: Bytes,
    /// What of the files is not allocated: the guest may still touch it.
    pub missing: Bytes,
    /// They were allocated at the VM's start, so that nothing can be lacking.
    pub preallocated: bool,
}

/// Reads what a VM's RAM has in tmpfs mounts with a limit, by the device number of the mount.
/// Empty: nothing.
pub fn read_ram_files(
    root: &Root,
    vm: &QemuProcess,
) -> Result<BTreeMap<u64, RamFiles>, ProbeError> {
    let pid = vm.id.pid;
    let mut found: BTreeMap<u64, RamFiles> = BTreeMap::new();
    let mut mounts = BTreeSet::new();
    for path in &vm.args.mem_paths {
        // A file that is given may be gone by now: its directory is on the same mount.
        let path = Path::new(path);
        let base = if path.is_absolute() { "root" } else { "cwd" };
        let at = |path: &Path| look(root, format!("/proc/{pid}/{base}/{}", path.display()));
        let file = at(path)?.map_or_else(|| path.parent().map_or(Ok(None), at), |f| Ok(Some(f)))?;
        mounts.extend(file.map(|f| device(&f)));
    }
    if mounts.is_empty() {
        return Ok(found);
    }
    for fd in root.read_dir(format!("/proc/{pid}/fd"))?.unwrap_or_default() {
        let path = format!("/proc/{pid}/fd/{}", fd.display());
        let Some(file) = look(root, &path)?.filter(|f| mounts.contains(&device(f))) else {
            continue;
        };
        if FileType::from_raw_mode(file.stx_mode.into()) != FileType::RegularFile
            || file.stx_size < LEAST
        {
            continue;
        }
        let path = root.path(&path);
        let Some(mount) = probed(&path, statfs(&path).map_err(Into::into))? else { continue };
        if mount.f_type & 0xffff_ffff == TMPFS_MAGIC && mount.f_blocks != 0 {
            let its = found.entry(device(&file)).or_default();
            its.preallocated = vm.args.preallocated;
            its.free = Bytes(mount.f_bavail.saturating_mul(mount.f_bsize as u64));
            // `stx_blocks` counts 512 bytes each, also of what is swapped out.
            its.missing += Bytes(file.stx_size.saturating_sub(file.stx_blocks.saturating_mul(512)));
        }
    }
    Ok(found)
}

/// What VMs have in tmpfs mounts: why memory of a VM must not be given back, for people.
pub fn without_room(files: &BTreeMap<VmId, BTreeMap<u64, RamFiles>>) -> BTreeMap<VmId, String> {
    let mut missing: BTreeMap<u64, Bytes> = BTreeMap::new();
    for (mount, its) in files.values().flatten() {
        *missing.entry(*mount).or_default() += its.missing;
    }
    let why = |(vm, its): (&VmId, &BTreeMap<u64, RamFiles>)| {
        let lacks = |(mount, its): (&u64, &RamFiles)| {
            (its.preallocated || its.free < missing[mount]).then(|| why(*its, missing[mount]))
        };
        Some((*vm, its.iter().find_map(lacks)?))
    };
    files.iter().filter_map(why).collect()
}

fn why(its: RamFiles, missing: Bytes) -> String {
    let (free, what) = (its.free, "its RAM is a file in a tmpfs with a size limit");
    if its.preallocated {
        return format!(
            "{what} and is preallocated: others could take what it gives back. Use \
             memory-backend-memfd"
        );
    }
    format!(
        "{what}: {free} are free there, and VMs may still touch {missing}. Enlarge it (mount -o \
         remount,size=…), or use memory-backend-memfd"
    )
}

/// `statx` of what a path leads to, without asking the server of a network file system.
fn look(root: &Root, path: impl AsRef<Path>) -> Probed<Statx> {
    let path = root.path(path);
    let flags = AtFlags::STATX_DONT_SYNC;
    probed(&path, statx(CWD, &path, flags, StatxFlags::BASIC_STATS).map_err(Into::into))
}

fn device(file: &Statx) -> u64 {
    makedev(file.stx_dev_major, file.stx_dev_minor)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::probe::qemu::parse_cmdline;

    fn files(free: u64, missing: u64, preallocated: bool) -> RamFiles {
        RamFiles { free: Bytes::mib(free), missing: Bytes::mib(missing), preallocated }
    }

    #[test]
    fn vms_that_share_a_mount_need_room_for_all_of_them() {
        let id = |pid| VmId { pid, start: 1 };
        let of = |all: &[(u32, u64, RamFiles)]| {
            let one = |(pid, mount, its): &(u32, u64, RamFiles)| {
                (id(*pid), BTreeMap::from([(*mount, *its)]))
            };
            without_room(&all.iter().map(one).collect())
        };
        let (one, other) = (files(900, 500, false), files(900, 300, false));
        assert!(of(&[(1, 7, one), (2, 7, other)]).is_empty());
        assert!(of(&[(1, 7, one), (2, 8, one)]).is_empty());
        let why = of(&[(1, 7, one), (2, 7, one), (3, 8, one)]);
        assert_eq!(why.keys().map(|id| id.pid).collect::<Vec<_>>(), [1, 2]);
        assert!(why[&id(1)].contains("900 MiB are free there, and VMs may still touch 1000 MiB"));
        let why = of(&[(1, 7, files(900, 0, true)), (2, 7, other)]);
        assert!(why.len() == 1 && why[&id(1)].contains("preallocated"), "{why:?}");
    }

    /// This process's own file.
    #[test]
    fn what_is_not_allocated_of_a_file_in_a_limited_tmpfs_is_found() {
        let shm = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        shm.as_file().set_len(64 << 20).unwrap();
        shm.as_file().write_all_at(&[1; 1 << 20], 5 << 20).unwrap();
        let small = tempfile::tempfile_in("/dev/shm").unwrap();
        small.set_len(1 << 20).unwrap();
        let mut vm = QemuProcess::default();
        vm.id.pid = std::process::id();
        let read = |vm: &QemuProcess| read_ram_files(&Root::default(), vm).unwrap();
        assert!(read(&vm).is_empty());
        let path = shm.path().display().to_string();
        for paths in [path.clone(), "/dev/shm".into(), format!("{path}-that-is-gone")] {
            vm.args.mem_paths = vec![paths];
            let found = read(&vm);
            // Other tests of this process may have files there.
            let [its] = found.values().copied().collect::<Vec<_>>()[..] else {
                panic!("{found:?}")
            };
            assert!(its.missing >= Bytes::mib(63) && its.free > Bytes::ZERO, "{its:?}");
        }
        vm.args.mem_paths = vec!["/proc".into()];
        assert!(read(&vm).is_empty());
    }

    #[test]
    fn the_command_line_tells_what_is_preallocated_and_what_lies_in_shared_memory() {
        let args = |line: &str| {
            let line = format!("qemu-system-x86_64 {line}").replace(' ', "\0");
            parse_cmdline(line.as_bytes()).unwrap()
        };
        let shm = args("-object memory-backend-shm,id=m,size=1G -name x");
        assert_eq!((shm.mem_paths, shm.preallocated), (vec!["/dev/shm".to_owned()], false));
        let file = args("-object memory-backend-file,id=m,size=1G,mem-path=/dev/shm/a,prealloc=on");
        assert_eq!((file.mem_paths, file.preallocated), (vec!["/dev/shm/a".to_owned()], true));
        assert!(args("-mem-path /dev/shm -mem-prealloc -name x").preallocated);
        let json = r#"{"qom-type":"memory-backend-file","mem-path":"/dev/shm","prealloc":true}"#;
        assert!(args(&format!("-object {json}")).preallocated);
        assert!(!args("-object memory-backend-file,id=m,mem-path=/x,prealloc=off").preallocated);
    }
}
