//! Taking turns with the VMM's own discards.
//!
//! QEMU discards pages too: free page reporting, virtio-mem, a balloon. In
//! anonymous memory that takes our protection with it, and where it happens in
//! the middle of a window the guest can take the page back, write to it, and lose
//! it to our discard. So such a call waits until no window is open (a millisecond
//! at most), and none opens while it is under way. Before a window it does no
//! harm: what is protected afterwards is protected, and the bits are read after
//! that. `tests/model.rs` has both cases.
//!
//! QEMU calls `madvise` through the dynamic linker, and finds ours where this
//! library was preloaded. Where it was loaded as a plug-in QEMU has bound its own
//! calls already: then [`taken`] is false, and the agent stands aside from VMs whose
//! QEMU discards. Our own calls go past this function (`sys::madvise_itself`).

use std::sync::{Arc, PoisonError, RwLock};

use libc::{c_int, c_void};

use crate::guard::Guard;
use crate::ram::Ram;
use crate::sys::{self, Range};

/// RAM that is being recycled, and its window.
struct Held {
    guard: Arc<Guard>,
    ram: Vec<Range>,
}

/// One in a VMM; tests have several agents in a process. Nothing is allocated or
/// freed while it is locked: an allocator may call `madvise`.
static HELD: RwLock<[Option<Held>; 16]> = RwLock::new([const { None }; 16]);

/// As long as it lives, discards of this RAM wait for the window.
#[derive(Debug)]
pub struct DiscardLock {
    guard: Arc<Guard>,
}

impl DiscardLock {
    /// From now on; a call that was under way without a turn has ended when this
    /// returns. `None`: too many agents are in this process.
    pub fn begin(guard: &Arc<Guard>, ram: &Ram) -> Option<DiscardLock> {
        let ranges = ram.pieces.iter().map(|p| Range { start: p.hva, len: p.size });
        let mut new = Some(Held { guard: Arc::clone(guard), ram: ranges.collect() });
        let mut slots = HELD.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.iter_mut().find(|s| s.is_none()) {
            std::mem::swap(slot, &mut new);
        }
        drop(slots);
        new.is_none().then(|| DiscardLock { guard: Arc::clone(guard) })
    }
}

impl Drop for DiscardLock {
    fn drop(&mut self) {
        let mut slots = HELD.write().unwrap_or_else(PoisonError::into_inner);
        let ours =
            |s: &&mut Option<Held>| s.as_ref().is_some_and(|h| Arc::ptr_eq(&h.guard, &self.guard));
        let old = slots.iter_mut().find(ours).and_then(Option::take);
        drop(slots);
        drop(old);
    }
}

/// Whether calls of `madvise` in this process come to us: what the name means to
/// the process lies in the same object as a variable of ours.
pub fn taken() -> bool {
    let ours = sys::object_of(&raw const HELD as u64);
    ours.is_some() && sys::object_of(sys::symbol(c"madvise")) == ours
}

/// Whether a call empties a range, at once or later.
fn empties(advice: c_int) -> bool {
    [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_REMOVE, DONTNEED_LOCKED].contains(&advice)
}

/// `MADV_DONTNEED_LOCKED` (5.18).
const DONTNEED_LOCKED: c_int = 24;

/// Replaces the function of the C library in this process.
///
/// # Safety
/// As for `madvise` of the C library.
// SAFETY: same name, arguments and meaning.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int {
    // Held to the end: see `DiscardLock::begin`.
    let held = empties(advice).then(|| HELD.read().unwrap_or_else(PoisonError::into_inner));
    let (from, to) = (start as u64, (start as u64).saturating_add(len as u64));
    let meets = |h: &&Held| h.ram.iter().any(|r| r.overlaps(from, to));
    let found = held.as_ref().and_then(|slots| slots.iter().flatten().find(meets));
    let turn = found.map(|h| h.guard.between());
    // SAFETY: by the caller's promise.
    let done = unsafe { sys::madvise_itself(start, len, advice) };
    drop(turn);
    match done {
        Ok(_) => 0,
        Err(e) => {
            sys::set_errno(e.raw_os_error().unwrap_or(libc::EINVAL));
            -1
        }
    }
}
