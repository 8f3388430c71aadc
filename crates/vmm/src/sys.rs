//! The system calls that no safe wrapper offers, each as a small function or a method of [`Uffd`].
//!
//! Most act on this process's memory by address and leave it to the kernel to follow the address: a
//! mapping that is gone, or another one by now, is an error of the call, not a fault of the VMM.
//! `store_u64` alone writes through an address; its SAFETY line says why it may.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};

use ebb_core::page_scan::{self, Argument};
use libc::{c_int, c_long, c_ulong, iovec};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

pub use ebb_core::range::Range;

use crate::uffd::Uffd;

/// Bytes of a message that `read` on a userfaultfd gives: the event comes first, the address at 16.
const MESSAGE: usize = 32;
/// A fault; the only event that is asked for.
const EVENT_PAGEFAULT: u8 = 0x12;
/// Messages that are read at once.
pub const MESSAGES_BYTES: usize = 16 * MESSAGE;

/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`.
pub const FEATURE_WP: u64 = 1;
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM` (5.19).
pub const FEATURE_WP_SHMEM: u64 = 1 << 12;
/// `UFFD_FEATURE_WP_UNPOPULATED` (6.4).
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;

const UFFD_API: u64 = 0xaa;
const UFFDIO_API: c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: c_ulong = 0x8010_aa01;
const UFFDIO_WAKE: c_ulong = 0x8010_aa02;
const UFFDIO_WRITEPROTECT: c_ulong = 0xc018_aa06;
const USERFAULTFD_IOC_NEW: c_ulong = 0xaa00;
const REGISTER_MODE_WP: u64 = 2;

/// Most ranges of one vectored call (`UIO_MAXIOV`).
pub const VECTOR_MAX: usize = 1024;

fn check(result: c_long) -> Result<usize> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result as usize) }
}

fn ioctl<T>(fd: RawFd, request: c_ulong, argument: &mut T) -> Result<usize> {
    // SAFETY: `argument` is the structure that belongs to the request at every
    // call in this file, and the kernel writes nowhere else.
    check(unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) } as c_long)
}

/// A userfaultfd of this process that sees kernel-mode faults too: from a
/// descriptor of `/dev/userfaultfd`, or by the system call (needs privilege).
pub fn uffd_open(device: Option<BorrowedFd<'_>>) -> Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match device {
        // SAFETY: the argument is a number, not a pointer.
        Some(d) => unsafe { libc::ioctl(d.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) as c_long },
        // SAFETY: the argument is a number, not a pointer.
        None => unsafe { libc::syscall(libc::SYS_userfaultfd, flags) },
    };
    // SAFETY: just made, and nothing else owns it.
    check(fd).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// The handshake with the kernel: asks for features, returns what it offers.
pub fn uffd_api(fd: &OwnedFd, features: u64) -> Result<u64> {
    let mut api = [UFFD_API, features, 0];
    ioctl(fd.as_raw_fd(), UFFDIO_API, &mut api)?;
    Ok(api[1])
}

impl Uffd {
    /// From now on ranges of this can be protected.
    pub fn register(&self, range: Range) -> Result<()> {
        let mut register = [range.start, range.len, REGISTER_MODE_WP, 0];
        ioctl(self.fd.as_raw_fd(), UFFDIO_REGISTER, &mut register).map(drop)
    }

    /// Ranges of this can no longer be protected; what is protected is lifted, and the threads
    /// that wait are woken.
    pub fn unregister(&self, range: Range) -> Result<()> {
        ioctl(self.fd.as_raw_fd(), UFFDIO_UNREGISTER, &mut [range.start, range.len]).map(drop)
    }

    /// Protects a range, or lifts its protection and wakes the threads that wait there.
    pub(crate) fn write_protect(&self, range: Range, on: bool) -> Result<()> {
        let mut arguments = [range.start, range.len, u64::from(on)];
        ioctl(self.fd.as_raw_fd(), UFFDIO_WRITEPROTECT, &mut arguments).map(drop)
    }

    /// Threads that wait in this range look again whether they have to.
    pub fn wake(&self, range: Range) -> Result<()> {
        ioctl(self.fd.as_raw_fd(), UFFDIO_WAKE, &mut [range.start, range.len]).map(drop)
    }

    /// The addresses of faults that wait; none where there are none.
    pub fn faults<'a>(
        &self,
        buffer: &'a mut [u8; MESSAGES_BYTES],
    ) -> Result<impl Iterator<Item = u64> + 'a> {
        let n = match rustix::io::read(&self.fd, &mut buffer[..]) {
            Err(Errno::AGAIN) => 0,
            n => n?,
        };
        let faults = buffer[..n].chunks_exact(MESSAGE).filter(|m| m[0] == EVENT_PAGEFAULT);
        Ok(faults.map(|m| u64::from_ne_bytes(m[16..24].try_into().unwrap_or_default())))
    }
}

/// A place of our memory, for a vectored call.
pub fn place(start: u64, len: usize) -> iovec {
    iovec { iov_base: start as *mut libc::c_void, iov_len: len }
}

/// Copies from several places of our own memory, in their order, into one
/// buffer of their size. Whole or an error: what is not mapped is one.
pub fn copy_from(places: &[iovec], to: &mut [u8]) -> Result<()> {
    let whole = copy(places, to, true)? == to.len();
    whole.then_some(()).ok_or_else(|| Error::from_raw_os_error(libc::EFAULT))
}

/// Copies from several places of our own memory, in their order, into one buffer; returns
/// bytes copied from the front, which end at the first place that cannot be read.
///
/// The kernel follows our page tables on one side, as our own loads and stores would, and what is
/// not mapped is no fault of ours; the other side it pins. Where it pins the places (`pins`), that
/// breaks merges. To pin `to` costs little where that is a huge page.
pub fn copy(places: &[iovec], to: &mut [u8], pins: bool) -> Result<usize> {
    let total = places.iter().map(|p| p.iov_len).sum();
    if total > to.len() || places.len() > VECTOR_MAX {
        return Err(Error::from_raw_os_error(libc::EINVAL));
    }
    let to = iovec { iov_base: to.as_mut_ptr().cast(), iov_len: total };
    let (from, count) = (places.as_ptr(), places.len() as c_ulong);
    // SAFETY: `to` is exclusively ours and long enough; the other places are only read, by
    // the kernel, which checks every address.
    let n = unsafe {
        match pins {
            true => libc::process_vm_readv(libc::getpid(), &to, 1, from, count, 0),
            false => libc::process_vm_writev(libc::getpid(), from, count, &to, 1, 0),
        }
    };
    check(n as c_long)
}

/// Stores one word with a single store, where the caller has just found RAM.
pub fn store_u64(address: u64, value: u64) {
    debug_assert_eq!(address % 8, 0);
    // SAFETY: `address` is an aligned word of the first 16 MiB of guest RAM (the
    // header page, read a moment ago), which no VMM unmaps while it runs; the
    // guest's accesses to it are as atomic as this one.
    unsafe { (*(address as *const AtomicU64)).store(value, SeqCst) }
}

/// Hints to the processor to fetch these bytes into its cache; does nothing where nothing
/// is mapped.
pub fn fetch(address: u64, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (address..address.saturating_add(len as u64)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that a program can see, and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, len);
}

/// This thread has a third of an ordinary thread's weight (nice 5), as `ksmd` has. Where
/// QEMU's sandbox does not let it (`resourcecontrol=deny`), it runs only when no other
/// thread wants the CPU, which is never denied.
pub fn run_nice() -> Result<()> {
    use rustix::process::{getpriority_process, setpriority_process};
    let nice = getpriority_process(None).unwrap_or(0).max(5);
    if setpriority_process(None, nice).is_ok() {
        return Ok(());
    }
    set_scheduler(libc::SCHED_IDLE, 0)
}

/// Gives this thread real-time priority, the lowest there is (`SCHED_FIFO`, 1). `false`: it has
/// not, as it is none of the ordinary threads, or may not: this takes root, CAP_SYS_NICE or
/// RLIMIT_RTPRIO, and QEMU's sandbox (`resourcecontrol=deny`) refuses it.
pub fn real_time_begin() -> bool {
    // SAFETY: takes and gives plain numbers; 0 is this thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    policy == libc::SCHED_OTHER && set_scheduler(libc::SCHED_FIFO, 1).is_ok()
}

/// `SCHED_OTHER` and 0 make this thread an ordinary one.
pub fn set_scheduler(policy: c_int, priority: c_int) -> Result<()> {
    // SAFETY: plain numbers; all of it zero is a valid value.
    let mut param = unsafe { std::mem::zeroed::<libc::sched_param>() };
    param.sched_priority = priority;
    // SAFETY: `param` is read during the call; 0 is this thread.
    let done = unsafe { libc::sched_setscheduler(0, policy, &param) };
    check(c_long::from(done)).map(drop)
}

/// Calls `each` with every stretch of a range that is held (in memory, not the zero page,
/// or in swap if `swapped`), and whether huge pages map it.
pub fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    range: Range,
    swapped: bool,
    each: impl FnMut(Range, bool),
) -> Result<()> {
    let call = |argument: &mut Argument| ioctl(pagemap.as_raw_fd(), page_scan::REQUEST, argument);
    page_scan::scan(range, swapped, call, each)
}

/// One byte per page: bit 0 says whether it is in memory.
pub fn mincore(range: Range, out: &mut [u8]) -> Result<()> {
    if (out.len() as u64) * 4096 < range.len {
        return Err(Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the kernel writes one byte per page of `range`, which `out` holds.
    let done =
        unsafe { libc::mincore(range.start as *mut _, range.len as usize, out.as_mut_ptr()) };
    check(c_long::from(done)).map(drop)
}

/// Discards a range of private anonymous memory: it reads as zeros from now on.
///
/// Destroys what is there: only for ranges that were proven free.
pub fn discard(range: Range) -> Result<()> {
    advise(range, libc::MADV_DONTNEED)
}

/// Marks a page cold, which splits a huge page that is no longer mapped whole.
pub fn cold(range: Range) -> Result<()> {
    advise(range, libc::MADV_COLD)
}

/// Whether this process gets no transparent huge pages (`PR_SET_THP_DISABLE`). 3 means that it
/// gets those it asks for (Linux 6.18), as the probe does.
pub fn huge_pages_are_off() -> bool {
    // SAFETY: asks for a flag; reads and writes no memory.
    unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1 }
}

pub fn mergeable(range: Range) -> Result<()> {
    advise(range, libc::MADV_MERGEABLE)
}

/// Gives the kernel advice about a range.
pub(crate) fn advise(range: Range, advice: c_int) -> Result<()> {
    // SAFETY: Rust holds no reference into guest RAM, which is all that this is
    // called for; an unmapped range is an error.
    unsafe { madvise_itself(range.start as *mut _, range.len as usize, advice) }.map(drop)
}

/// The system call, not the function of that name: see `madvise_hook`.
///
/// # Safety
/// As for `madvise`.
pub unsafe fn madvise_itself(start: *mut libc::c_void, len: usize, advice: c_int) -> Result<usize> {
    // SAFETY: by the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_madvise, start, len, advice) })
}

/// Discards many ranges with one call (6.13 on); returns bytes done, from the front.
pub fn discard_all(pidfd: &OwnedFd, ranges: &[Range]) -> Result<u64> {
    let ranges = ranges.iter().take(VECTOR_MAX);
    let vector: Vec<iovec> = ranges.map(|r| place(r.start, r.len as usize)).collect();
    // SAFETY: as for `advise`; the vector outlives the call.
    let n = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            vector.as_ptr(),
            vector.len(),
            libc::MADV_DONTNEED,
            0,
        )
    };
    check(n).map(|n| n as u64)
}

/// A descriptor of this process, if the kernel takes vectored discards on it.
pub fn discard_all_probe() -> Option<OwnedFd> {
    let mut page = Mapping::anonymous(4096).ok()?;
    page.bytes_mut()[0] = 1;
    let pid = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?;
    let done = discard_all(&pidfd, &[Range { start: page.address(), len: 4096 }]).ok()?;
    (done == 4096 && page.bytes_mut()[0] == 0).then_some(pidfd)
}

/// The time stamp counter, for measurements; 0 where there is none.
pub fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a register.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    return 0;
}

/// Blocks every signal in this thread: the VMM's own threads handle them.
pub fn block_signals() {
    // SAFETY: `set` is filled before it is used, and only this thread's mask changes.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

/// A random number, from the kernel.
pub fn random() -> Result<u64> {
    let mut number = [0; 8];
    // So few come all at once (getrandom(2)).
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(number))
}

/// The listening socket, which a forked child must not hold: it is not served
/// there. -1: none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);

extern "C" fn close_listener() {
    let fd = LISTENER.swap(-1, SeqCst);
    if fd >= 0 {
        // SAFETY: in a child, where our threads do not exist, its copy of the
        // descriptor has no other owner; close is allowed after fork.
        unsafe { libc::close(fd) };
    }
}

/// From now on children that are forked close this listener at once, so that a client that
/// connects is refused and does not wait for ever; `None`: no more.
pub fn close_in_children(listener: Option<BorrowedFd<'_>>) {
    static ONCE: Once = Once::new();
    LISTENER.store(listener.map_or(-1, |l| l.as_raw_fd()), SeqCst);
    // SAFETY: the handler does nothing that is not allowed after fork, and this
    // library is never unloaded.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(close_listener));
    });
}

/// Address of what a name means to the process as a whole; 0: nothing.
pub fn symbol(name: &std::ffi::CStr) -> u64 {
    // SAFETY: `name` ends with NUL.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) as u64 }
}

/// Where the object (program or library) that holds an address was loaded.
pub fn object_of(address: u64) -> Option<u64> {
    // SAFETY: any bytes are a Dl_info, and the address is only looked up.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        (libc::dladdr(address as *const _, &mut info) != 0).then_some(info.dli_fbase as u64)
    }
}

/// What the caller of a function of the C library finds in `errno`.
pub fn set_errno(value: c_int) {
    // SAFETY: the address is this thread's own `errno`.
    unsafe { *libc::__errno_location() = value };
}

/// A mapping of our own, for probes and tests; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    address: u64,
    len: usize,
}

impl Mapping {
    pub fn anonymous(len: usize) -> Result<Mapping> {
        Mapping::map(len, None)
    }

    /// Shared memory of a file.
    pub fn shared(fd: BorrowedFd<'_>, len: usize) -> Result<Mapping> {
        Mapping::map(len, Some(fd))
    }

    fn map(len: usize, file: Option<BorrowedFd<'_>>) -> Result<Mapping> {
        // A hole around it: its neighbours never merge with it, and 2 MiB aligned.
        const ALIGN: usize = 2 << 20;
        let (hole, rights) = (ProtFlags::empty(), ProtFlags::READ | ProtFlags::WRITE);
        let private = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: two fresh mappings, the second inside the first.
        unsafe {
            let all = mmap_anonymous(std::ptr::null_mut(), len + ALIGN, hole, private)? as usize;
            let at = all.next_multiple_of(ALIGN);
            let fixed = MapFlags::FIXED;
            let got = match file {
                Some(fd) => mmap(at as *mut _, len, rights, MapFlags::SHARED | fixed, fd, 0),
                None => mmap_anonymous(at as *mut _, len, rights, MapFlags::PRIVATE | fixed),
            };
            libc::munmap(all as *mut _, at - all);
            libc::munmap((at + len) as *mut _, all + ALIGN - at);
            got?;
            Ok(Mapping { address: at as u64, len })
        }
    }

    /// Asks for huge pages, or for none.
    pub fn huge(&self, on: bool) -> Result<()> {
        let advice = if on { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        advise(Range { start: self.address, len: self.len as u64 }, advice)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped, readable and writable until dropped, and `self` is held.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.len) }
    }

    /// Its words, for threads that share it.
    pub fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: as above; atomics may be shared.
        unsafe { std::slice::from_raw_parts(self.address as *const _, self.len / 8) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, and `self` goes with it.
        unsafe { libc::munmap(self.address as *mut _, self.len) };
    }
}
