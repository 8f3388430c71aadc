//! Hashes the VM's pages with a key, for the scanner of merging.
//!
//! A daemon that reads a VM's memory from outside pays more for the kernel's way to each
//! page than for the hashing. In here our own page tables lead there: pages that are in
//! memory are copied 128 KiB at a time and hashed, or, at a first look, just four lines of
//! each ([`Key::lines`]), which costs a fifth. A thread of its own, as nice as `ksmd`
//! (from `SCHED_IDLE` it could not come back; the daemon paces its questions where VMs
//! must not notice), on a socket that the daemon handed over; when that is closed the thread ends.
//!
//! It only looks. What is absent, in swap or of zeros by the page table is passed over
//! (`PAGEMAP_SCAN`), and so is what the guest's map calls free: that is the recycler's.
//! Shared RAM is refused: KSM does not merge it, and to read a hole would fill it. A
//! merged page is read as it is, and stays merged. The thread holds nothing that another
//! waits for: it may not run for a long time. While the recycler is at
//! work it waits, ten milliseconds a piece at most; what it reads nevertheless is not in
//! the way, since reading neither waits for write-protection nor lifts it.

use std::io::{Read, Result, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use ebb_core::page_hash::{Key, LINE, LINES};
use ebb_core::range;
use ebb_core::wire::abi::{MAP_PFNS, MapPage, PAGE};
use ebb_core::wire::hashes::{HashReply, HashRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};

use crate::faults::Faults;
use crate::ram::{Bits, Ram};
use crate::recycle::cpu_ns;
use crate::sys::{self, Mapping, Range, VECTOR_MAX};

/// What is copied at a time: with what is fetched meanwhile it fits the second-level cache.
const PIECE: u64 = 128 << 10;
/// The pages whose lines are copied at a time.
const PIECE_LINES: u64 = (VECTOR_MAX / LINES) as u64 * PAGE;
/// The buffer is one huge page, where the kernel has one: see [`sys::copy`].
const BUFFER: usize = 2 << 20;
/// After this time without a question the buffer is given back.
const IDLE: Duration = Duration::from_secs(1);
/// A question that has begun must come to its end in this time, and an answer be taken.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often, and how long each time, recycling is waited for.
const WAITS: (u32, Duration) = (50, Duration::from_micros(200));
/// Threads that may be there at once: each ends a piece after its socket does.
const THREADS: usize = 4;

/// Each thread that is there holds it.
static RUNNING: LazyLock<Arc<()>> = LazyLock::new(Arc::default);

/// The pages of the guest's map, as far as it is known.
type Map = Arc<Mutex<Vec<MapPage>>>;

/// A thread that answers the scanner; it ends soon after this is dropped.
#[derive(Debug)]
pub struct Hasher {
    socket: OwnedFd,
    map: Map,
}

impl Hasher {
    /// Answers on this socket. The error is for the daemon.
    pub fn start(
        socket: OwnedFd,
        ram: Arc<Ram>,
        recycling: Arc<AtomicBool>,
        faults: Faults,
    ) -> std::result::Result<Hasher, String> {
        let domain = sockopt::socket_domain(&socket);
        let kind = sockopt::socket_type(&socket);
        if domain != Ok(AddressFamily::UNIX) || kind != Ok(SocketType::STREAM) {
            return Err("what came is not the socket that was to come".into());
        }
        let running = Arc::clone(&RUNNING);
        // Beside the static and this one.
        if Arc::strong_count(&running) - 2 >= THREADS {
            return Err("the threads of earlier scans are still there".into());
        }
        let map = Map::default();
        let served = Served { map: Arc::clone(&map), ram, recycling, faults, buffer: None };
        let spawn = || -> Result<OwnedFd> {
            let theirs = UnixStream::from(socket.try_clone()?);
            std::thread::Builder::new().name("ebb-hash".into()).spawn(move || {
                sys::block_signals();
                // Refused, it is a thread like others.
                let _ = sys::run_nice();
                let serve = std::panic::AssertUnwindSafe(|| served.serve(&theirs));
                let _ = std::panic::catch_unwind(serve);
                let _ = rustix::net::shutdown(&theirs, Shutdown::Both);
                drop(running);
            })?;
            Ok(socket)
        };
        let socket = spawn().map_err(|e| format!("cannot start a thread for it: {e}"))?;
        Ok(Hasher { socket, map })
    }

    /// The guest's map is there; empty: it is not known. Called again and again, so that
    /// the caller need not wait while the thread reads it.
    pub fn tell_map(&self, pages: &[MapPage]) {
        if let Ok(mut map) = self.map.try_lock()
            && *map != pages
        {
            *map = pages.to_vec();
        }
    }
}

impl Drop for Hasher {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

struct Served {
    map: Map,
    ram: Arc<Ram>,
    recycling: Arc<AtomicBool>,
    faults: Faults,
    buffer: Option<Mapping>,
}

impl Served {
    /// Until the socket ends, or something comes that is no question.
    fn serve(mut self, mut socket: &UnixStream) -> Option<()> {
        socket.set_nonblocking(false).ok()?;
        socket.set_read_timeout(Some(PATIENCE)).ok()?;
        socket.set_write_timeout(Some(PATIENCE)).ok()?;
        loop {
            if !wait(socket, Some(IDLE)) {
                self.buffer = None;
                wait(socket, None).then_some(())?;
            }
            let reply = self.answer(&receive(socket)?)?;
            socket.write_all(&reply.encode()).ok()?;
        }
    }

    /// `None`: some of it is not RAM that can be merged.
    fn answer(&mut self, request: &HashRequest) -> Option<HashReply> {
        let (begun, key) = (cpu_ns(), Key::new(request.secret));
        let pages = self.map.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut free = Free { ram: &self.ram, pages, last: None };
        let mut runs = Vec::new();
        let mut reply = HashReply::default();
        for &range in &request.ranges {
            let present = self.ram.present(range)?;
            let present = if self.faults.any_page() { vec![range] } else { present };
            for run in present {
                reply.held += run.len / PAGE;
                reply.free += free.leave_out(run, &mut runs);
            }
        }
        drop(free);
        let size = if request.lines { PIECE_LINES } else { PIECE };
        let pieces = range::batches(runs, size, VECTOR_MAX);
        for (i, piece) in pieces.iter().enumerate() {
            let next = pieces.get(i + 1).map_or(&[][..], |p| p);
            self.hash(piece, next, &key, request.lines, &mut reply.pages);
        }
        reply.cpu_ns = cpu_ns().saturating_sub(begun);
        Some(reply)
    }

    /// Whole pages, or only their lines. What cannot be read (it went away meanwhile) ends
    /// a piece early. The `next` piece is fetched from memory while this one is hashed.
    fn hash(
        &mut self,
        piece: &[Range],
        next: &[Range],
        key: &Key,
        lines: bool,
        pages: &mut Vec<(u64, u128)>,
    ) {
        let busy = |_: &u32| self.recycling.load(SeqCst);
        (0..WAITS.0).take_while(busy).for_each(|_| std::thread::sleep(WAITS.1));
        if self.buffer.is_none() {
            let new = Mapping::anonymous(BUFFER).ok();
            new.iter().for_each(|b| drop(b.huge(true)));
            self.buffer = new;
        }
        let Some(buffer) = self.buffer.as_mut().map(Mapping::bytes_mut) else { return };
        let of_page = |n: u64| key.lines().map(|at| n * PAGE + at as u64);
        let mut places = Vec::with_capacity(VECTOR_MAX);
        let size = if lines {
            places.extend(numbers(piece).flat_map(of_page).map(|at| sys::place(at, LINE)));
            LINES * LINE
        } else {
            places.extend(piece.iter().map(|p| sys::place(p.start, p.len as usize)));
            PAGE as usize
        };
        let copied = sys::copy(&places, buffer, false).unwrap_or(0);
        let mut next = numbers(next);
        for (number, bytes) in numbers(piece).zip(buffer[..copied].chunks_exact(size)) {
            match next.next() {
                Some(n) if lines => of_page(n).into_iter().for_each(|at| sys::fetch(at, LINE)),
                Some(n) => sys::fetch(n * PAGE, PAGE as usize),
                None => {}
            }
            let hash = match bytes.try_into() {
                Ok(bytes) if lines => key.of_lines(bytes),
                _ => key.page(bytes).unwrap_or(0),
            };
            pages.push((number, hash));
        }
    }
}

/// Which pages the guest's map calls free.
struct Free<'a> {
    ram: &'a Ram,
    pages: Vec<MapPage>,
    /// Bits that were read last, and the first page that they are about.
    last: Option<(u64, Box<Bits>)>,
}

impl Free<'_> {
    /// Adds what is not free of a run in memory to `runs`; returns how many pages are.
    fn leave_out(&mut self, run: Range, runs: &mut Vec<Range>) -> u64 {
        let Some(piece) = self.ram.piece_of(run).filter(|_| !self.pages.is_empty()) else {
            runs.push(run);
            return 0;
        };
        let mut free = 0;
        for start in (run.start..run.end()).step_by(PAGE as usize) {
            if self.is_free((start - piece.hva + piece.gpa) / PAGE) {
                free += 1;
            } else {
                range::push(runs, Range { start, len: PAGE });
            }
        }
        free
    }

    fn is_free(&mut self, pfn: u64) -> bool {
        let first = pfn / MAP_PFNS * MAP_PFNS;
        if self.last.as_ref().is_none_or(|(of, _)| *of != first) {
            let known = self.pages.binary_search_by_key(&first, |p| p.pfn).ok();
            let bits = known.and_then(|i| self.ram.bits(self.pages[i].gpa));
            self.last = Some((first, Box::new(bits.unwrap_or([0; _]))));
        }
        let at = (pfn - first) as usize;
        self.last.as_ref().is_some_and(|(_, bits)| bits[at / 64] >> (at % 64) & 1 == 1)
    }
}

/// Numbers of the pages of runs.
fn numbers(runs: &[Range]) -> impl Iterator<Item = u64> {
    runs.iter().flat_map(|r| r.start / PAGE..(r.start + r.len) / PAGE)
}

/// Whether something comes in this time; `None`: however long that takes.
fn wait(socket: &UnixStream, time: Option<Duration>) -> bool {
    let time = time.and_then(|t| Timespec::try_from(t).ok());
    loop {
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
        match poll(&mut fds, time.as_ref()) {
            Err(Errno::INTR) => {}
            done => return done.is_ok_and(|n| n > 0),
        }
    }
}

fn receive(mut socket: &UnixStream) -> Option<HashRequest> {
    let mut head = [0; HashRequest::HEAD];
    socket.read_exact(&mut head).ok()?;
    let mut rest = vec![0; HashRequest::rest(&head)?];
    socket.read_exact(&mut rest).ok()?;
    HashRequest::parse(&head, &rest)
}
