//! RAM in files of a tmpfs with a size limit (`/dev/shm`): what of the files is not allocated, and
//! what the mount has free. And RAM in files of a disk's file system.
//!
//! A page of such a file that is given back is the mount's again, and another program that writes
//! there may take it. If the guest then touches the page, the kernel kills its QEMU (SIGBUS). So the
//! mount must have free what is not allocated. What a disk's file system has free is not asked: it
//! may hang, and other programs write there.

use std::collections::{BTreeMap, BTreeSet};
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;
use rustix::fs::statfs;

use super::cgroup::{Mount, parse_mountinfo};
use super::maps::LEAST_MAPPING;
use super::qemu::QemuProcess;
use crate::root::{ParseError, ProbeError, Root, field, probed};

/// Most open files of a process that are looked at.
const MOST: usize = 4096;

/// What a VM has in mounts of the kind tmpfs that have a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamFiles {
    /// What a mount has free, by its device number.
    pub free: BTreeMap<u64, Bytes>,
    /// What of a file is not allocated: a guest may still touch it. By device and inode, as VMs may
    /// share a file.
    pub missing: BTreeMap<(u64, u64), Bytes>,
    /// They were allocated at the VM's start, so that nothing can lack.
    pub preallocated: bool,
    /// The kind of another file system that its RAM is on.
    pub disk: Option<String>,
}

/// Reads what of a VM's RAM is in such mounts. Only files that `/proc` tells to be in a tmpfs are
/// looked at, and no path that the VM's user has named: another file system may hang.
pub fn read_ram_files(root: &Root, vm: &QemuProcess) -> Result<RamFiles, ProbeError> {
    let pid = vm.id.pid;
    let mut found = RamFiles { preallocated: vm.args.preallocated, ..RamFiles::default() };
    if vm.args.mem_paths.is_empty() || vm.args.hugepages {
        return Ok(found);
    }
    let mounts = root.parse(format!("/proc/{pid}/mountinfo"), parse_mountinfo)?;
    let mounts = mounts.unwrap_or_default();
    let tmpfs = mounts.iter().filter(|mount| mount.kind == "tmpfs");
    let tmpfs: BTreeSet<u64> = tmpfs.map(|mount| mount.id).collect();
    for fd in root.read_dir(format!("/proc/{pid}/fd"))?.unwrap_or_default().into_iter().take(MOST) {
        let fd = fd.display();
        let Some(mount) = root.parse(format!("/proc/{pid}/fdinfo/{fd}"), parse_mount_id)? else {
            continue;
        };
        if !tmpfs.contains(&mount) {
            continue;
        }
        let fd = format!("/proc/{pid}/fd/{fd}");
        let path = root.path(&fd);
        // What is free first: pages that the guest touches in between lower only what is missing.
        let Some(mount) = probed(&path, statfs(&path).map_err(Into::into))? else { continue };
        let Some(file) = root.metadata(fd)? else { continue };
        if mount.f_blocks == 0 || !file.is_file() || file.len() < LEAST_MAPPING {
            continue;
        }
        let free = Bytes(mount.f_bavail.saturating_mul(mount.f_bsize as u64));
        found.free.entry(file.st_dev()).or_insert(free);
        // Blocks of 512 bytes; what is swapped out has its blocks, too.
        let allocated = file.st_blocks().saturating_mul(512);
        let missing = Bytes(file.len().saturating_sub(allocated));
        found.missing.insert((file.st_dev(), file.st_ino()), missing);
    }
    if found.free.is_empty() {
        found.disk = vm.args.shared_paths.iter().find_map(|path| disk(path, &mounts));
    }
    Ok(found)
}

/// The kind of the file system of this path, where its files are not memory. The path itself is not
/// looked at.
fn disk(path: &str, mounts: &[Mount]) -> Option<String> {
    let path = Path::new(path);
    let holds = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    // The last one of the same place hides the others.
    let kind = &holds.max_by_key(|mount| Path::new(&mount.point).components().count())?.kind;
    let is_memory = ["tmpfs", "devtmpfs", "ramfs", "hugetlbfs"].contains(&kind.as_str());
    (!is_memory).then(|| kind.clone())
}

/// The mount that an open file is on (`/proc/PID/fdinfo/FD`).
fn parse_mount_id(text: &str) -> Result<u64, ParseError> {
    field(text, "mnt_id", |v| v.parse().ok())?.ok_or_else(|| ParseError::missing("mnt_id"))
}

/// Why memory of a VM must not be given back, for people, by what all VMs have in such mounts.
pub fn without_room(files: &BTreeMap<VmId, RamFiles>) -> BTreeMap<VmId, String> {
    let all: BTreeMap<(u64, u64), Bytes> =
        files.values().flat_map(|its| &its.missing).map(|(file, bytes)| (*file, *bytes)).collect();
    let missing = |mount: u64| -> Bytes {
        all.iter().filter(|(file, _)| file.0 == mount).map(|(_, bytes)| *bytes).sum()
    };
    let why = |its: &RamFiles| {
        if let Some(kind) = &its.disk {
            return Some(format!(
                "its RAM is a file on {kind}, where others could take what it gives back: use \
                 memory-backend-memfd"
            ));
        }
        let what = "its RAM is a file in a tmpfs with a size limit";
        if its.preallocated && !its.free.is_empty() {
            return Some(format!(
                "{what} and is preallocated: others could take what it gives back. Use \
                 memory-backend-memfd"
            ));
        }
        let (free, missing) = its
            .free
            .iter()
            .map(|(mount, free)| (*free, missing(*mount)))
            .find(|(free, missing)| free < missing)?;
        Some(format!(
            "{what}: {free} are free there, and VMs may still touch {missing}. Enlarge it (mount \
             -o remount,size=…), or use memory-backend-memfd"
        ))
    };
    files.iter().filter_map(|(vm, its)| Some((*vm, why(its)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::probe::qemu::parse_cmdline;

    #[test]
    fn vms_that_share_a_mount_need_room_for_all_of_them() {
        let id = |pid| VmId { pid, start: 1 };
        let its = |mount: u64, file: u64, missing: u64| RamFiles {
            free: [(mount, Bytes::mib(900))].into(),
            missing: [((mount, file), Bytes::mib(missing))].into(),
            ..RamFiles::default()
        };
        let of = |all: &[(u32, RamFiles)]| {
            let all = all.iter().map(|(pid, its)| (id(*pid), its.clone())).collect();
            without_room(&all)
        };
        assert!(of(&[(1, its(7, 1, 500)), (2, its(7, 2, 300))]).is_empty());
        assert!(of(&[(1, its(7, 1, 500)), (2, its(8, 1, 500))]).is_empty());
        assert!(of(&[(1, its(7, 1, 500)), (2, its(7, 1, 500))]).is_empty(), "one file");
        let why = of(&[(1, its(7, 1, 500)), (2, its(7, 2, 500)), (3, its(8, 1, 500))]);
        assert_eq!(why.keys().map(|id| id.pid).collect::<Vec<_>>(), [1, 2]);
        assert!(why[&id(1)].contains("900 MiB are free there, and VMs may still touch 1000 MiB"));
        let full = RamFiles { preallocated: true, ..its(7, 1, 0) };
        let why = of(&[(1, full), (2, its(7, 2, 300))]);
        assert!(why.len() == 1 && why[&id(1)].contains("preallocated"), "{why:?}");
        let on_disk = RamFiles { disk: Some("ext4".into()), ..RamFiles::default() };
        assert!(of(&[(1, on_disk)])[&id(1)].contains("a file on ext4, where others"));
        // Its RAM is elsewhere.
        assert!(of(&[(1, RamFiles { preallocated: true, ..RamFiles::default() })]).is_empty());
    }

    #[test]
    fn ram_in_a_shared_file_on_a_disk_is_found_by_its_path_alone() {
        let mounts = "1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 0:3 / /dev/shm rw - tmpfs none rw\n\
            3 1 8:2 / /var rw - xfs /dev/b rw\n4 3 0:4 / /var/huge rw - hugetlbfs none rw\n";
        let root = crate::testing::tree(&[("/proc/7/mountinfo", mounts)]);
        let on = |path: &str, share: &str| {
            let line =
                format!("kvm\0-object\0memory-backend-file,id=a,mem-path={path},share={share}\0");
            let mut vm = QemuProcess {
                args: parse_cmdline(line.as_bytes()).unwrap(),
                ..QemuProcess::default()
            };
            vm.id.pid = 7;
            read_ram_files(&root, &vm).unwrap().disk
        };
        assert_eq!(on("/var/lib/libvirt/qemu/ram/1-a", "on").as_deref(), Some("xfs"));
        assert_eq!(on("/srv/a", "on").as_deref(), Some("ext4"));
        let none = [on("/var/a", "off"), on("/dev/shm/a", "on"), on("/var/huge/a", "on")];
        assert_eq!(none, [None, None, None]);
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
        assert_eq!(read(&vm), RamFiles::default());
        vm.args.mem_paths = vec!["/dev/shm/x".into()];
        let found = read(&vm);
        // Other tests of this process may have files there.
        let of = |file: &std::fs::File| {
            let file = file.metadata().unwrap();
            found.missing.get(&(file.st_dev(), file.st_ino())).copied()
        };
        assert_eq!((of(shm.as_file()), of(&small)), (Some(Bytes::mib(63)), None));
        assert!(found.free.values().all(|free| *free > Bytes::ZERO), "{found:?}");
        vm.args.hugepages = true;
        assert_eq!(read(&vm), RamFiles::default());
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
        assert!(args("-mem-path /dev/shm -mem-prealloc").preallocated);
        assert!(!args("-object memory-backend-memfd,id=m,size=1G,prealloc=on").preallocated);
        let json = r#"{"qom-type":"memory-backend-file","mem-path":"/dev/shm","prealloc":true}"#;
        assert!(args(&format!("-object {json}")).preallocated);
        assert!(!args("-object memory-backend-file,id=m,mem-path=/x,prealloc=off").preallocated);
    }
}
