//! The window of protection, the tripwire, and the thread that reads the faults.
//!
//! One lock stands for "a window is open": a recycle batch holds it from its
//! first protection to its last. The handler thread takes it before it lets a
//! faulting write go on, so a write inside a window waits for that window, and a
//! write that slipped between a discard and its wake-up is found here and woken.
//!
//! The tripwire is guest page 0, protected as long as a map is in use. Firmware
//! writes there first thing after a reset, a running Linux does not. A write
//! there first marks the map as dropped, then waits for the open window, which
//! discards nothing once it sees the mark, and only then goes on.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_core::wire::abi::PAGE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::sys::{self, Range, UffdMsg};
use crate::uffd::Uffd;

/// A batch steps back so long when the handler wants the lock; often enough for
/// any scheduler.
const YIELD: Duration = Duration::from_micros(20);
const YIELDS: usize = 250;

/// What the recycler and the handler thread share.
#[derive(Debug)]
pub struct Guard {
    uffd: Uffd,
    window: Mutex<()>,
    waiting: AtomicU64,
    /// The protected page 0, or 0 while there is none.
    tripwire: AtomicU64,
    tripped: AtomicBool,
    faults: AtomicU64,
    trips: AtomicU64,
    quit: OwnedFd,
}

impl Guard {
    /// Around a userfaultfd; [`Watch::start`] makes it work.
    pub fn new(uffd: Uffd) -> std::io::Result<Guard> {
        Ok(Guard {
            uffd,
            window: Mutex::new(()),
            waiting: AtomicU64::new(0),
            tripwire: AtomicU64::new(0),
            tripped: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            trips: AtomicU64::new(0),
            quit: eventfd(0, EventfdFlags::CLOEXEC)?,
        })
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// Opens the window, after whoever waits for the last one.
    pub fn open(&self) -> MutexGuard<'_, ()> {
        for _ in 0..YIELDS {
            if self.waiting.load(SeqCst) == 0 {
                break;
            }
            std::thread::sleep(YIELD);
        }
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the open window and keeps the next one from opening meanwhile.
    pub fn between(&self) -> MutexGuard<'_, ()> {
        self.waiting.fetch_add(1, SeqCst);
        let window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, SeqCst);
        window
    }

    /// Protects page 0, at this address. What tripped before is forgotten.
    pub fn arm(&self, page: u64) -> std::io::Result<()> {
        let _window = self.open();
        self.tripped.store(false, SeqCst);
        self.tripwire.store(page, SeqCst);
        self.uffd.protect(Range { start: page, len: PAGE })
    }

    /// Lifts the tripwire.
    pub fn disarm(&self) {
        let page = self.tripwire.swap(0, SeqCst);
        if page != 0 {
            let _ = self.uffd.lift(Range { start: page, len: PAGE });
        }
    }

    /// Whether somebody wrote to page 0 since it was armed.
    pub fn tripped(&self) -> bool {
        self.tripped.load(SeqCst)
    }

    /// Writes that waited and were seen by the handler, and trips.
    pub fn counts(&self) -> (u64, u64) {
        (self.faults.load(SeqCst), self.trips.load(SeqCst))
    }

    /// Lets one faulting write go on.
    fn handle(&self, address: u64, again: bool) {
        self.faults.fetch_add(1, SeqCst);
        let page = Range { start: address & !(PAGE - 1), len: PAGE };
        let wire = page.start == self.tripwire.load(SeqCst);
        if wire {
            self.tripped.store(true, SeqCst);
            self.trips.fetch_add(1, SeqCst);
        }
        let window = self.between();
        // A window lifts its own protection, so waking is enough; lifting 4 KiB
        // would split the mapping of a huge page. Whoever comes back was missed.
        if wire || again {
            let _ = self.uffd.lift(page);
        } else {
            let _ = self.uffd.wake(page);
        }
        if wire {
            self.tripwire.store(0, SeqCst);
        }
        drop(window);
    }

    fn run(&self) {
        let mut messages = [UffdMsg::default(); 16];
        let mut last = 0;
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.uffd.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.quit.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return,
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            let Ok(found) = self.uffd.read(&mut messages) else { return };
            for m in found.iter().filter(|m| m.event == sys::EVENT_PAGEFAULT) {
                self.handle(m.address, m.address == last);
                last = m.address;
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
    /// Starts it.
    pub fn start(guard: Arc<Guard>) -> std::io::Result<Watch> {
        let theirs = Arc::clone(&guard);
        let thread = std::thread::Builder::new().name("ebb-faults".into()).spawn(move || {
            sys::block_signals();
            // What panics here leaves a closed userfaultfd behind in the end, as
            // the agent finds this thread gone.
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
