//! Notices that a device which pins guest memory may be about to be opened: VFIO, iommufd,
//! vDPA, RDMA.
//!
//! The kernel does not wait for userfaultfd when it pins a page for such a device: on a page
//! that is protected the device's mapping fails with “Bad address”. A tripwire is protected all
//! the time. So the wires have to be lifted before QEMU maps guest memory for the device, which
//! is some system calls after it has opened the device's file. Opening it, and making the file,
//! is told by inotify. A machine manager makes or opens it long before QEMU does.
//!
//! Source: Linux `vfio_iommu_type1.c` (`vaddr_get_pfns`), `mm/userfaultfd.c` (`handle_userfault`
//! without `FAULT_FLAG_ALLOW_RETRY`), inotify(7).

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};

/// Folders in which each file pins memory, and the files elsewhere that do.
const FOLDERS: [&str; 3] = ["/dev/vfio", "/dev/vfio/devices", "/dev/infiniband"];
const FILES: [&str; 1] = ["/dev/iommu"];
/// Files of `/dev` that have a number behind this.
const PREFIXES: [&str; 1] = ["/dev/vhost-vdpa"];
/// What such files and folders in `/dev` are called.
const NAMES: [&str; 4] = ["vfio", "iommu", "vhost-vdpa", "infiniband"];

#[derive(Debug)]
pub struct DeviceWatch {
    events: OwnedFd,
    /// The watch of `/dev`.
    dev: i32,
}

impl DeviceWatch {
    /// Watches what there is and what comes. Fails where this user has no inotify instance
    /// left (`fs.inotify.max_user_instances`), or QEMU has no `/dev`.
    pub fn watch() -> std::io::Result<DeviceWatch> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let made = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        let dev = inotify::add_watch(&events, "/dev", made)?;
        let watch = DeviceWatch { events, dev };
        watch.add_all();
        Ok(watch)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Takes what happened: whether a device may be about to be opened.
    pub fn opened(&self) -> bool {
        let mut found = false;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.events, &mut buffer);
        while let Ok(event) = reader.next() {
            // In `/dev` the name tells. All else that is watched is such a file; and what is
            // lost where events are too many may have been one.
            let name = event.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
            found |= event.wd() != self.dev || NAMES.iter().any(|n| name.starts_with(n));
        }
        if found {
            self.add_all();
        }
        found
    }

    /// What is not there now is told by its folder when it comes.
    fn add_all(&self) {
        let all = WatchFlags::OPEN | WatchFlags::ATTRIB;
        for folder in FOLDERS {
            let made = WatchFlags::CREATE | WatchFlags::MOVED_TO;
            let _ = inotify::add_watch(&self.events, folder, all | made);
        }
        let devices = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let devices = devices.filter_map(|e| e.path().to_str().map(str::to_owned));
        let numbered = devices.filter(|path| PREFIXES.iter().any(|p| path.starts_with(p)));
        for file in FILES.map(str::to_owned).into_iter().chain(numbered) {
            let _ = inotify::add_watch(&self.events, &file, all);
        }
    }
}
