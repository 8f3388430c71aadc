//! The window of protection, the tripwires, and the thread that reads the faults.
//!
//! One lock means "a window is open": the recycler holds it from its first protection until
//! what the window protected is lifted. The handler thread takes the lock before it lets a
//! faulting write go on, so a write inside a window waits for that window. The handler also
//! wakes a write that faulted between a discard and the window's own wake-up.
//!
//! Tripwires are guest pages that stay protected as long as a map is in use: those
//! that firmware writes to first after a reset, and a running Linux does not. A
//! write there first marks the map as dropped, then waits for the open window, which
//! discards nothing once it sees the mark, and only then goes on.
//!
//! Where a device that pins guest memory may be opened ([`DeviceWatch`]), nothing is protected for
//! a while: the map is dropped in the same way.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_core::histogram::Histogram;
use ebb_core::wire::abi::PAGE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::device_watch::DeviceWatch;
use crate::priority::RealTime;
use crate::sys::{self, MESSAGES_BYTES, Range};
use crate::uffd::Uffd;

/// Before a window opens, the recycler sleeps this time while another thread waits for the lock,
/// at most [`YIELDS`] times.
const YIELD: Duration = Duration::from_micros(20);
const YIELDS: usize = 250;
const WIRES: usize = 4;
/// `/proc/self/pagemap`: the page is write-protected by userfaultfd.
const PROTECTED: u64 = 1 << 57;
/// How many pages whose writers were woken are remembered. One that faults again within
/// [`RECENT`] is still protected, so its protection is lifted.
const WOKEN: usize = 8;
const RECENT: Duration = Duration::from_secs(1);
/// How long nothing is protected after a device that pins memory may have been opened. QEMU
/// takes less time to plug one in. If its file is open by then, that is a reason to stand aside.
const HOLD: Duration = Duration::from_secs(10);

/// A page that stays protected.
#[derive(Debug, Default)]
struct Wire {
    /// Our address of it, or 0 while it is not armed.
    page: AtomicU64,
    /// The guest's, for people.
    gpa: AtomicU64,
    trips: AtomicU64,
}

/// What the recycler and the handler thread share.
#[derive(Debug)]
pub struct Guard {
    pub uffd: Uffd,
    window: Mutex<()>,
    waiting: AtomicU64,
    wires: [Wire; WIRES],
    tripped: AtomicBool,
    faults: AtomicU64,
    /// When the window was opened that is open now, or was last.
    opened: Mutex<Instant>,
    waits: Mutex<Histogram>,
    device_watch: Option<DeviceWatch>,
    held: Mutex<Option<Instant>>,
    bare: Mutex<Option<u64>>,
    /// Our own page table's flags, where the kernel shows them.
    pagemap: Option<File>,
    quit: OwnedFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guard {
    /// Around a userfaultfd; [`Watch::start`] makes it work. Without `device_watch`, devices that
    /// pin memory fail to be plugged while a map is in use.
    pub fn new(uffd: Uffd, device_watch: Option<DeviceWatch>) -> std::io::Result<Guard> {
        Ok(Guard {
            uffd,
            device_watch,
            held: Mutex::new(None),
            bare: Mutex::new(None),
            window: Mutex::new(()),
            waiting: AtomicU64::new(0),
            wires: Default::default(),
            tripped: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            opened: Mutex::new(Instant::now()),
            waits: Mutex::default(),
            pagemap: File::open("/proc/self/pagemap").ok(),
            quit: eventfd(0, EventfdFlags::CLOEXEC)?,
        })
    }

    /// Opens the window, after the thread that waits for the last one.
    pub fn open(&self) -> MutexGuard<'_, ()> {
        for _ in 0..YIELDS {
            if self.waiting.load(SeqCst) == 0 {
                break;
            }
            std::thread::sleep(YIELD);
        }
        let window = lock(&self.window);
        *lock(&self.opened) = Instant::now();
        window
    }

    /// Waits for the open window and keeps the next one from opening meanwhile.
    pub fn between(&self) -> MutexGuard<'_, ()> {
        self.waiting.fetch_add(1, SeqCst);
        let window = lock(&self.window);
        self.waiting.fetch_sub(1, SeqCst);
        window
    }

    /// Protects these pages of the guest (its address, ours), at most [`WIRES`]. What
    /// tripped before is forgotten.
    pub fn arm(&self, pages: &[(u64, u64)]) -> std::io::Result<()> {
        let _window = self.open();
        if self.is_held(Instant::now()) {
            return Err(std::io::Error::other("a device may be opened that pins memory"));
        }
        self.disarm();
        self.tripped.store(false, SeqCst);
        *lock(&self.bare) = None;
        for (wire, (gpa, page)) in self.wires.iter().zip(pages) {
            if wire.gpa.swap(*gpa, SeqCst) != *gpa {
                wire.trips.store(0, SeqCst);
            }
            wire.page.store(*page, SeqCst);
            self.uffd.protect(Range { start: *page, len: PAGE })?;
        }
        Ok(())
    }

    pub fn disarm(&self) {
        for wire in &self.wires {
            let page = wire.page.swap(0, SeqCst);
            if page != 0 {
                let _ = self.uffd.lift(Range { start: page, len: PAGE });
            }
        }
    }

    /// Whether nothing may be protected now: a device that pins memory may be opened.
    pub fn is_held(&self, now: Instant) -> bool {
        lock(&self.held).is_some_and(|since| now.saturating_duration_since(since) < HOLD)
    }

    /// Protects nothing any more, for a while.
    fn hold(&self) {
        *lock(&self.held) = Some(Instant::now());
        self.tripped.store(true, SeqCst);
        let window = self.between();
        // `arm` may have run before the lock was taken: what it armed is lifted as well.
        self.tripped.store(true, SeqCst);
        self.disarm();
        drop(window);
    }

    /// Finds tripwires that are not protected any more although no write to them was seen: KSM takes
    /// the protection of what it merges. They count as written to, because they may have been.
    pub fn look_at_wires(&self) {
        let Some(pagemap) = &self.pagemap else { return };
        for wire in self.wires.iter().filter(|wire| wire.page.load(SeqCst) != 0) {
            let mut flags = [0; 8];
            let at = wire.page.load(SeqCst) / PAGE * 8;
            let read = pagemap.read_exact_at(&mut flags, at);
            if read.is_ok() && u64::from_le_bytes(flags) & PROTECTED == 0 {
                *lock(&self.bare) = Some(wire.gpa.load(SeqCst));
                self.tripped.store(true, SeqCst);
            }
        }
    }

    /// The guest page whose protection was found lost since the tripwires were armed.
    pub fn bare(&self) -> Option<u64> {
        *lock(&self.bare)
    }

    /// Whether a tripwire was written to since they were armed, or may have been.
    pub fn tripped(&self) -> bool {
        self.tripped.load(SeqCst)
    }

    /// Writes that waited and were seen by the handler, and trips.
    pub fn counts(&self) -> (u64, u64) {
        let trips = self.wires.iter().map(|w| w.trips.load(SeqCst)).sum();
        (self.faults.load(SeqCst), trips)
    }

    /// The guest pages that were armed, and how often each was the first to be written to.
    pub fn wires(&self) -> Vec<(u64, u64)> {
        let of = |w: &Wire| (w.gpa.load(SeqCst), w.trips.load(SeqCst));
        let armed = |w: &&Wire| w.page.load(SeqCst) != 0 || w.trips.load(SeqCst) > 0;
        self.wires.iter().filter(armed).map(of).collect()
    }

    /// How long writes waited, at most: from the opening of the window that they met.
    pub fn waits(&self) -> Histogram {
        lock(&self.waits).clone()
    }

    /// Lets one faulting write go on, which was read at `read`.
    fn handle(&self, address: u64, again: bool, read: Instant) {
        self.faults.fetch_add(1, SeqCst);
        let page = Range { start: address & !(PAGE - 1), len: PAGE };
        let armed = |w: &&Wire| w.page.load(SeqCst) == page.start;
        let wire = self.wires.iter().find(armed);
        if let Some(wire) = wire
            && !self.tripped.swap(true, SeqCst)
        {
            wire.trips.fetch_add(1, SeqCst);
        }
        // What is protected and no wire was met by the window that was opened last.
        let begun = if wire.is_some() { read } else { read.min(*lock(&self.opened)) };
        let window = self.between();
        // A window lifts its own protection, so waking is enough; lifting 4 KiB would split the
        // mapping of a huge page. A page that faults again is still protected: it is lifted.
        if wire.is_some() || again {
            let _ = self.uffd.lift(page);
        } else {
            let _ = self.uffd.wake(page);
        }
        if let Some(wire) = wire {
            // `arm` may have cleared the mark meanwhile: this wire is lifted, so set it again.
            self.tripped.store(true, SeqCst);
            wire.page.store(0, SeqCst);
        }
        drop(window);
        lock(&self.waits).add(begun.elapsed().as_nanos() as u64);
    }

    fn run(&self) {
        let mut messages = [0; MESSAGES_BYTES];
        let mut woken = [(0, None); WOKEN];
        let mut next = 0;
        loop {
            let device_fd = self.device_watch.as_ref().map_or(self.quit.as_fd(), DeviceWatch::fd);
            let mut fds = [
                PollFd::from_borrowed_fd(self.uffd.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.quit.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(device_fd, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return,
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            if !fds[2].revents().is_empty()
                && self.device_watch.as_ref().is_some_and(DeviceWatch::opened)
            {
                self.hold();
            }
            let Ok(found) = self.uffd.faults(&mut messages) else { return };
            let now = Instant::now();
            for address in found {
                let page = address & !(PAGE - 1);
                let again = woken.iter().any(|(p, at): &(u64, Option<Instant>)| {
                    *p == page && at.is_some_and(|at| now.duration_since(at) < RECENT)
                });
                self.handle(address, again, now);
                woken[next % WOKEN] = (page, Some(now));
                next += 1;
            }
        }
    }
}

/// The handler thread; ends with its owner.
#[derive(Debug)]
pub struct Watch {
    guard: Arc<Guard>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(guard: Arc<Guard>) -> std::io::Result<Watch> {
        let theirs = Arc::clone(&guard);
        let thread = std::thread::Builder::new().name("ebb-faults".into()).spawn(move || {
            sys::block_signals();
            let _first = RealTime::begin();
            // If this panics, the agent finds the thread gone and closes the userfaultfd.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| theirs.run()));
        })?;
        Ok(Watch { guard, thread: Some(thread) })
    }

    /// Whether it still reads faults; without it nothing may be protected.
    pub fn alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.guard.disarm();
        let _ = rustix::io::write(&self.guard.quit, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
