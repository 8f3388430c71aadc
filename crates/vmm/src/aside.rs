//! When to leave a VM alone: what this process itself can see.
//!
//! Devices that write to guest memory past the page tables (VFIO, vDPA), locked
//! memory, confidential guests. What only QEMU knows comes from the daemon.

use std::path::Path;

/// A reason to stand aside, from what this process has open and locked.
pub fn reason() -> Option<String> {
    open_files(Path::new("/proc/self/fd")).or_else(|| {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        locked(&status)
    })
}

fn open_files(dir: &Path) -> Option<String> {
    let links = std::fs::read_dir(dir).ok()?.flatten();
    links
        .filter_map(|e| std::fs::read_link(e.path()).ok())
        .find_map(|l| of_file(&l.to_string_lossy()))
}

fn of_file(link: &str) -> Option<String> {
    let why = match link {
        l if l.starts_with("/dev/vfio/") || l.contains("[vfio-") || l == "/dev/iommu" => {
            "a VFIO device writes to guest memory by itself"
        }
        l if l.starts_with("/dev/vhost-vdpa") => "a vDPA device writes to guest memory by itself",
        "/dev/sev"
        | "anon_inode:kvm-gmem"
        | "anon_inode:[kvm-gmem]"
        | "anon_inode:[guest_memfd]" => "the guest's memory is encrypted",
        _ => return None,
    };
    Some(format!("{why} ({link})"))
}

fn locked(status: &str) -> Option<String> {
    let kib = status.lines().find_map(|l| l.strip_prefix("VmLck:"))?;
    let kib: u64 = kib.split_whitespace().next()?.parse().ok()?;
    // The VMM's own secrets may be locked; guest RAM is more.
    (kib >= 64 << 10).then(|| format!("{} MiB of memory are locked (mem-lock)", kib >> 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pins_or_hides_memory_is_a_reason() {
        for bad in ["/dev/vfio/12", "/dev/vfio/vfio", "anon_inode:[vfio-device]", "/dev/iommu"] {
            assert!(of_file(bad).unwrap().contains("VFIO"), "{bad}");
        }
        assert!(of_file("/dev/vhost-vdpa-0").unwrap().contains("vDPA"));
        assert!(of_file("/dev/sev").unwrap().contains("encrypted"));
        for good in ["/dev/kvm", "anon_inode:kvm-vm", "/dev/vhost-net", "/memfd:ram (deleted)"] {
            assert_eq!(of_file(good), None, "{good}");
        }
        assert!(locked("VmLck:\t 1048576 kB\n").unwrap().starts_with("1024 MiB"));
        assert_eq!(locked("VmLck:\t       0 kB\n"), None);
        assert_eq!(locked("nonsense"), None);
        assert_eq!(reason(), None);
    }
}
