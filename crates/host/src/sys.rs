//! The system calls that no safe wrapper offers, each as a small function.
//!
//! Most read other processes: which of their pages are held, and what is in those. The rest is
//! signals, priorities, and the heap of this process. Foreign addresses are numbers here; only the
//! kernel follows them, and a mapping that is gone is an error of the call.

#![allow(unsafe_code)]

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use ebb_core::page_scan::{self, Argument};
use libc::{c_long, c_ulong, iovec};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Pid, getpriority_process, setpriority_process};

pub use ebb_core::range::Range;

/// Most ranges of one [`read_process`] (`UIO_MAXIOV`).
pub const VECTOR_MAX: usize = 1024;

pub(crate) fn check(result: c_long) -> Result<usize> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result as usize) }
}

/// Places of another process, as system calls take them.
pub(crate) fn vectors(places: &[Range]) -> Vec<iovec> {
    let one = |p: &Range| iovec { iov_base: p.start as *mut _, iov_len: p.len as usize };
    places.iter().map(one).collect()
}

/// Calls `each` with every stretch of a range that is in memory, the zero page
/// left out, and whether huge pages map it (Linux 6.7+). `ENOTTY` on older kernels; nothing at all
/// where the process has ended.
pub fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    range: Range,
    each: impl FnMut(Range, bool),
) -> Result<()> {
    let call = |argument: &mut Argument| {
        let (fd, argument) = (pagemap.as_raw_fd(), argument.as_mut_ptr());
        // SAFETY: `argument` is the structure that belongs to the request; it names a vector, with
        // its length, that outlives the call, and the kernel writes nowhere else.
        check(unsafe { libc::ioctl(fd, page_scan::REQUEST, argument) as c_long })
    };
    page_scan::scan(range, false, call, each)
}

/// Gives memory that was freed back to the host, as far as the allocator holds it.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// How long it takes to touch a MiB of new memory: in huge pages where the kernel has them, as
/// the RAM of VMs is. The least of three: the others met something else.
pub fn touch_time() -> Result<Duration> {
    const BLOCK: usize = 2 << 20;
    const PAGE: usize = 4096;
    let mut least = Duration::MAX;
    for _ in 0..3 {
        let (rights, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), 2 * BLOCK, rights, kind | MapFlags::PRIVATE)?
        };
        let block = at as usize;
        let block = at.cast::<u8>().wrapping_add(block.next_multiple_of(BLOCK) - block);
        // SAFETY: the aligned block of 2 MiB lies in our mapping of 4 MiB, which nobody else
        // knows of, and which is unmapped after its last use.
        unsafe {
            libc::madvise(block.cast(), BLOCK, libc::MADV_HUGEPAGE);
            let begun = Instant::now();
            for page in (0..BLOCK).step_by(PAGE) {
                block.add(page).write_volatile(1);
            }
            least = least.min(begun.elapsed() / (BLOCK >> 20) as u32);
            libc::munmap(at, 2 * BLOCK);
        }
    }
    Ok(least)
}

/// Has the processor fetch what lies there into its cache, if it likes: a hint.
pub fn fetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that a program can see, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Copies from several places of another process, in their order, into one
/// buffer; returns bytes copied from the front, which end at the first place that
/// cannot be read whole. `EPERM`: not allowed; `ESRCH`: it has ended.
pub fn read_process(pid: u32, places: &[Range], to: &mut [u8]) -> Result<usize> {
    let total: u64 = places.iter().map(|p| p.len).sum();
    if total > to.len() as u64 || places.len() > VECTOR_MAX {
        return Err(Error::from_raw_os_error(libc::EINVAL));
    }
    let remote = vectors(places);
    let local = iovec { iov_base: to.as_mut_ptr().cast(), iov_len: total as usize };
    // SAFETY: `local` describes `to`, which is exclusively ours and long enough; the
    // remote side is only read, by the kernel, which checks every address.
    let (pid, count) = (pid as libc::pid_t, remote.len() as c_ulong);
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), count, 0) };
    check(n as c_long)
}

/// A thread (`None`: this one) runs only when nothing else needs the CPU; or else, as `ksmd`
/// does, with a third of an ordinary thread's weight (nice 5). The way back needs CAP_SYS_NICE.
pub fn set_idle(thread: Option<Pid>, idle: bool) -> Result<()> {
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_BATCH };
    // SAFETY: plain numbers; all of it zero is a valid value, and the one asked for.
    let param = unsafe { std::mem::zeroed::<libc::sched_param>() };
    // SAFETY: `param` is read during the call; 0 is this thread.
    let done = unsafe { libc::sched_setscheduler(Pid::as_raw(thread), policy, &param) };
    check(c_long::from(done))?;
    // On Linux this is about a thread, not its process.
    let nice = getpriority_process(thread)?.max(5);
    Ok(setpriority_process(thread, nice)?)
}

/// Whether a thread runs only when nothing else needs the CPU.
pub fn is_idle(thread: Pid) -> bool {
    // SAFETY: a plain number.
    let policy = unsafe { libc::sched_getscheduler(Pid::as_raw(Some(thread))) };
    policy == libc::SCHED_IDLE
}
/// Holds these signals back from the calling thread, or lets them come. What is held back
/// waits, also while the process executes another program.
pub fn hold_signals(signals: &[i32], hold: bool) -> Result<()> {
    let how = if hold { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    // SAFETY: `set` is emptied before it is used, and only this thread's mask changes.
    let error = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        signals.iter().for_each(|signal| {
            libc::sigaddset(&mut set, *signal);
        });
        libc::pthread_sigmask(how, &set, std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(Error::from_raw_os_error(error)) }
}

/// Takes a lease on a file: who opens it then waits for its end.
#[cfg(test)]
pub(crate) fn lease(file: &std::fs::File) -> std::io::Result<()> {
    const F_SETSIG: i32 = 10;
    // The lease's own signal would end the process.
    for (what, value) in [(F_SETSIG, libc::SIGWINCH), (libc::F_SETLEASE, libc::F_WRLCK)] {
        // SAFETY: both use no memory; the lease ends with the file.
        if unsafe { libc::fcntl(file.as_raw_fd(), what, value) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}
