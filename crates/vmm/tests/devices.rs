//! What is opened in a process is seen before the next discard. One test: what others open
//! in the same process would be seen as well.
#![allow(unsafe_code)]

mod common;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::*;
use ebb_core::wire::{AgentState, Command, Recycle, Refused};
use ebb_vmm::blockers::{Devices, New};
use ebb_vmm::faults::Faults;
use ebb_vmm::sys::Mapping;

#[test]
fn what_is_opened_is_seen_at_the_next_window() {
    the_look_itself();
    a_socket_waits_for_the_daemon();
    a_backend_with_a_mapping_of_its_own(true);
    a_backend_with_a_mapping_of_its_own(false);
    match Node::new() {
        Some(node) => {
            a_device_ends_it(&node);
            wires_are_lifted_where_memory_may_be_pinned(&node, true);
            wires_are_lifted_where_memory_may_be_pinned(&node, false);
        }
        None => println!("skipped: only root may make a device node"),
    }
}

/// A device node that is called as VFIO's are, and is `/dev/full`.
struct Node {
    path: PathBuf,
    dir: bool,
}

impl Node {
    fn new() -> Option<Node> {
        let dir = !Path::new("/dev/vfio").exists();
        std::fs::create_dir_all("/dev/vfio").ok()?;
        let path = PathBuf::from(format!("/dev/vfio/ebb-test-{}", std::process::id()));
        let made = Program::new("mknod").arg(&path).args(["c", "1", "7"]).status();
        let node = Node { path, dir };
        made.is_ok_and(|s| s.success()).then_some(node)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        if self.dir {
            let _ = std::fs::remove_dir("/dev/vfio");
        }
    }
}

/// A device that is opened between protection and discard, and one that was before.
fn a_device_ends_it(node: &Node) {
    for (faults, held) in
        [("", true), ("no_device_watch", true), ("no_device_watch+no_devices", false)]
    {
        let Some(faults) = Faults::parse(faults) else { continue };
        let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, faults);
        guest.fill_and_free(FIRST, 4096);
        let _device = File::options().read(true).open(&node.path).unwrap();
        let want = Recycle { budget_ms: 2000, ..Recycle::default() };
        // Whatever looks at open files once a second has not looked yet.
        let bytes = recycle(&mut agent, want).map_or(0, |done| done.bytes.0);
        let whole = (FIRST..FIRST + 4096).all(|p| guest.holds(p, !p));
        assert_eq!((bytes == 0, whole), (held, held), "{bytes}");
        let mut seen = Default::default();
        let aside = || {
            let status = status(&mut agent, false);
            seen = (status.state, status.why.unwrap_or_default());
            seen.0 == AgentState::Aside && seen.1.contains("VFIO")
        };
        assert!(!held || within(Duration::from_secs(20), aside), "{seen:?}");
    }
}

/// The kernel pins memory without waiting for userfaultfd, here as the writer of
/// `/proc/self/mem`.
fn wires_are_lifted_where_memory_may_be_pinned(node: &Node, lifts: bool) {
    let Some(faults) = Faults::parse(if lifts { "" } else { "no_device_watch" }) else { return };
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Small, faults);
    let wires = status(&mut agent, false).wires;
    assert!(!wires.is_empty());
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    let pin =
        || wires.iter().all(|w| memory.write_at(&[0], guest.word(w.0).as_ptr() as u64).is_ok());
    assert!(!pin(), "a page that is protected cannot be pinned");
    let _device = File::options().read(true).open(&node.path).unwrap();
    let opened = Instant::now();
    let patience = Duration::from_millis(if lifts { 5000 } else { 300 });
    while !pin() && opened.elapsed() < patience {
        std::hint::spin_loop();
    }
    assert_eq!(pin(), lifts);
    println!("lifted {lifts}: {:?} after it was opened", opened.elapsed());
    assert_eq!(recycle(&mut agent, Recycle::default()).is_err(), lifts);
}

/// Shared memory is given to others over sockets.
fn a_socket_waits_for_the_daemon() {
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Memfd, Faults::default());
    guest.fill_and_free(FIRST, 4096);
    let unclear = |agent: &mut _| status(agent, false).unclear;
    let refused = ask(&mut agent, Command::Recycle(Recycle::default())).unwrap_err();
    assert_eq!(refused.kind, Refused::NotReady, "{refused}");
    let generation = unclear(&mut agent).unwrap();
    ask(&mut agent, Command::Cleared { generation }).unwrap();
    assert_eq!(unclear(&mut agent), None);
    let _pair = UnixStream::pair().unwrap();
    assert!(ask(&mut agent, Command::Recycle(Recycle::default())).is_err());
    assert_eq!(unclear(&mut agent), Some(generation + 1));
    ask(&mut agent, Command::Cleared { generation }).unwrap();
    assert_eq!(unclear(&mut agent), Some(generation + 1), "a look from before");
    assert!((FIRST..FIRST + 4096).all(|p| guest.holds(p, !p)));
    // One call may run out of its budget, or of beats, on a busy machine.
    let some = || recycle(&mut agent, Recycle::default()).is_ok_and(|done| done.bytes.0 > 0);
    assert!(within(Duration::from_secs(20), some), "nothing is recycled after the look");
}

/// What writes to shared memory through a mapping of its own, which no userfaultfd sees. It
/// got the memory over a socket; nobody has told the agent that this is harmless.
fn a_backend_with_a_mapping_of_its_own(looks: bool) {
    let Some(faults) = Faults::parse(if looks { "" } else { "no_devices+wide" }) else { return };
    let (guest, mut agent, _beats) = Guest::attached(64, RamKind::Memfd, faults);
    if let Some(generation) = status(&mut agent, false).unclear {
        ask(&mut agent, Command::Cleared { generation }).unwrap();
    }
    let _socket = UnixStream::pair().unwrap();
    let backend = guest.beside(|theirs| {
        let len = (theirs.pages * 4096) as usize;
        let other = Mapping::shared(theirs.file.as_ref().unwrap().as_fd(), len).unwrap();
        let word = |page: u64| &other.words()[(page * 512) as usize];
        let mut serial = 0;
        while !theirs.stop.load(SeqCst) && theirs.lost.load(SeqCst) == 0 {
            for page in FIRST..FIRST + 256 {
                serial += 1;
                theirs.set(page, false);
                word(page).store(serial, SeqCst);
                std::hint::spin_loop();
                if word(page).load(SeqCst) != serial {
                    theirs.lost.fetch_add(1, SeqCst);
                }
                theirs.set(page, true);
            }
        }
    });
    let until = Instant::now() + Duration::from_secs(if looks { 1 } else { 30 });
    while Instant::now() < until && guest.lost.load(SeqCst) == 0 {
        let _ = ask(&mut agent, Command::Recycle(Recycle::default()));
    }
    drop(backend);
    let recycled = status(&mut agent, false).counters.recycled.0;
    let lost = guest.lost.load(SeqCst) > 0;
    assert_eq!((lost, recycled > 0), (!looks, !looks), "{recycled}");
}

fn the_look_itself() {
    let mut devices = Devices::default();
    assert_eq!((devices.look(), devices.whats_new()), (None, None));
    let file = File::open("/proc/self/maps").unwrap();
    assert_eq!(devices.whats_new(), None, "no device");
    let full = File::open("/dev/full").unwrap();
    assert_eq!(devices.whats_new(), Some(New::Device));
    assert_eq!((devices.look(), devices.whats_new()), (None, None), "looked at");

    let pair = UnixStream::pair().unwrap();
    assert_eq!((devices.whats_new(), devices.unclear()), (None, None), "RAM is not shared");
    devices.watch_sockets();
    let first = devices.unclear().unwrap();
    devices.clear(first);
    assert_eq!(devices.unclear(), None);
    let other = UnixStream::pair().unwrap();
    assert_eq!(devices.whats_new(), Some(New::Socket));
    let second = devices.unclear().unwrap();
    devices.clear(first);
    assert_eq!(devices.unclear(), Some(second), "a look from before");
    devices.clear(second + 7);
    assert_eq!((devices.unclear(), devices.whats_new()), (None, None));
    drop((full, other));
    assert_eq!(devices.look(), None);

    // A harmless device and a socket at once: the number of the device is the lower one.
    let full = File::open("/dev/full").unwrap();
    let zero = File::open("/dev/zero").unwrap();
    let other = UnixStream::pair().unwrap();
    assert_eq!(devices.look_at_new(), Err(None), "the daemon has to look at the socket");
    devices.unclear().into_iter().for_each(|third| devices.clear(third));
    assert_eq!(devices.look_at_new(), Ok(()));
    drop((file, full, zero, pair, other));
}
