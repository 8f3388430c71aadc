//! A guest without a VM: memory of this process with header, map and beats as
//! ebb.ko writes them, and threads that allocate, write, verify and free pages in
//! the guest's order: clear the bit, then write.
#![allow(dead_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_core::wire::abi::{self, MAP_PFNS, PAGE};
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{AgentState, Answer, Attach, Command};
use ebb_core::wire::{Recycle, Recycled, Refusal, Segment, Status};
use ebb_vmm::agent::Agent;
use ebb_vmm::faults::Faults;
use ebb_vmm::sys::{self, Mapping, Range};

pub const HEADER: u64 = 0x1_0000;
pub const EXTENTS: u64 = 0x1_1000;
pub const MAP: u64 = 0x1_2000;
/// Pages from here on may be free.
pub const FIRST: u64 = 512;
const KEY: u64 = 0x1234_5678_9abc_def0;

/// What RAM is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamKind {
    Small,
    Huge,
    Memfd,
}

/// Steps of the handshake, each of which loses pages when it is left out.
pub const LEFT_OUT: [(RamKind, &str); 5] = [
    (RamKind::Small, "no_protect+wide"),
    (RamKind::Memfd, "no_protect+wide"),
    (RamKind::Small, "no_reread"),
    (RamKind::Memfd, "no_reread"),
    (RamKind::Small, "no_unpopulated+any_page+wide+no_look_at_wires"),
];

/// A thread beside the test that works on a guest. Dropped, it ends, and the guest's other ones
/// with it.
pub struct Beside {
    guest: Arc<Guest>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.guest.stop.store(true, SeqCst);
        let ended = self.thread.take().map(JoinHandle::join);
        if let (Some(Err(panic)), false) = (ended, std::thread::panicking()) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// The memory of a guest.
pub struct Guest {
    pub memory: Mapping,
    pub pages: u64,
    pub stop: AtomicBool,
    pub lost: AtomicU64,
    pub allocations: AtomicU64,
    pub file: Option<OwnedFd>,
}

impl Guest {
    /// `mib` MiB of RAM, up to one map page's worth, and a live header.
    pub fn new(mib: u64, memory: RamKind) -> Arc<Guest> {
        let len = (mib << 20) as usize;
        assert!(mib << 20 <= MAP_PFNS * PAGE);
        let (memory, file) = match memory {
            RamKind::Memfd => {
                let flags = rustix::fs::MemfdFlags::CLOEXEC;
                let file = rustix::fs::memfd_create("ram", flags).unwrap();
                rustix::fs::ftruncate(&file, len as u64).unwrap();
                (Mapping::shared(file.as_fd(), len).unwrap(), Some(file))
            }
            kind => {
                let m = Mapping::anonymous(len).unwrap();
                m.huge(kind == RamKind::Huge).unwrap();
                (m, None)
            }
        };
        let guest = Guest {
            memory,
            pages: mib << 8,
            stop: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            file,
        };
        guest.write_header();
        Arc::new(guest)
    }

    /// Opens all of it to KSM, as QEMU does by default.
    pub fn mergeable(&self) -> std::io::Result<()> {
        sys::mergeable(Range { start: self.memory.address(), len: self.pages * PAGE })
    }

    pub fn word(&self, gpa: u64) -> &AtomicU64 {
        &self.memory.words()[(gpa / 8) as usize]
    }

    pub fn put32(&self, gpa: u64, value: u32) {
        let shift = gpa % 8 * 8;
        let word = self.word(gpa & !7);
        let old = word.load(SeqCst) & !(0xffff_ffff << shift);
        word.store(old | u64::from(value) << shift, SeqCst);
    }

    pub fn write_header(&self) {
        self.write_header_at(HEADER);
    }

    pub fn write_header_at(&self, h: u64) {
        for (i, eight) in abi::MAGIC.chunks(8).enumerate() {
            let word = u64::from_le_bytes(eight.try_into().unwrap());
            self.word(h + 8 * i as u64).store(word, SeqCst);
        }
        self.put32(h + 16, abi::VERSION);
        self.put32(h + 20, abi::HEADER_BYTES as u32);
        self.word(h + 24).store(h, SeqCst);
        self.word(h + 40).store(KEY, SeqCst);
        self.put32(h + 64, 12);
        self.word(h + 72).store(MAP_PFNS, SeqCst);
        self.put32(h + 80, 6 << 16 | 12 << 8);
        let mut fixed = [0u8; abi::STATIC_BYTES];
        for (i, eight) in fixed.chunks_mut(8).enumerate() {
            eight.copy_from_slice(&self.word(h + 8 * i as u64).load(SeqCst).to_le_bytes());
        }
        self.word(h + 32).store(abi::checksum(&fixed), SeqCst);
        self.word(h + 264).store(EXTENTS, SeqCst);
        self.put32(h + 272, 1);
        self.put32(h + 276, 1);
        self.put32(EXTENTS + 8, 1);
        self.word(EXTENTS + 16).store(MAP, SeqCst);
        self.put32(EXTENTS + 24, 0);
        self.put32(EXTENTS + 28, 1);
        self.put32(h + 136, 100);
        self.put32(h + 128, 2);
    }

    /// Its module reports that its kernel does not write to the page at this address.
    pub fn keeps(&self, gpa: u64) {
        self.word(HEADER + 112).store(gpa, SeqCst);
        self.write_header();
    }

    /// What smaps says of its RAM under this name.
    fn smaps(&self, name: &str) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", self.memory.address());
        let mut mine = smaps.lines().skip_while(|l| !l.starts_with(&start)).skip(1);
        let found = mine.find_map(|l| l.strip_prefix(name)).unwrap();
        found.split_whitespace().map(str::to_owned).collect()
    }

    /// Whether the kernel guards its memory for a userfaultfd.
    pub fn registered(&self) -> bool {
        self.smaps("VmFlags:").contains(&"uw".into())
    }

    /// Bytes of its RAM that this process holds.
    pub fn resident(&self) -> u64 {
        self.smaps("Rss:")[0].parse::<u64>().unwrap() << 10
    }

    /// One beat, and the answer to a challenge.
    pub fn beat(&self) {
        let beat = self.word(HEADER + 192).fetch_add(1, SeqCst) + 1;
        self.word(HEADER + 200).store(abi::beat_check(beat, KEY), SeqCst);
        let challenge = self.word(HEADER + 208).load(SeqCst);
        if challenge != 0 {
            self.word(HEADER + 216).store(abi::response(challenge, KEY), SeqCst);
        }
    }

    /// Starts a thread that does this. It has to end when the guest is to stop.
    pub fn beside(self: &Arc<Guest>, work: impl FnOnce(&Guest) + Send + 'static) -> Beside {
        let theirs = Arc::clone(self);
        let thread = std::thread::spawn(move || work(&theirs));
        Beside { guest: Arc::clone(self), thread: Some(thread) }
    }

    pub fn beating(self: &Arc<Guest>) -> Beside {
        self.beside(|guest| {
            while !guest.stop.load(SeqCst) {
                guest.beat();
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    }

    pub fn set(&self, page: u64, free: bool) {
        let word = self.word(MAP + page / 64 * 8);
        match free {
            true => word.fetch_or(1 << (page % 64), SeqCst),
            false => word.fetch_and(!(1 << (page % 64)), SeqCst),
        };
    }

    pub fn write(&self, page: u64, value: u64) {
        let first = (page * PAGE / 8) as usize;
        for word in self.memory.words()[first..first + 512].iter().step_by(73) {
            word.store(value, SeqCst);
        }
    }

    pub fn holds(&self, page: u64, value: u64) -> bool {
        let first = (page * PAGE / 8) as usize;
        self.memory.words()[first..first + 512].iter().step_by(73).all(|w| w.load(SeqCst) == value)
    }

    /// Writes to every page, so that the host holds it, and calls it free.
    pub fn fill_and_free(&self, first: u64, pages: u64) {
        for page in first..first + pages {
            self.write(page, !page);
        }
        for page in first..first + pages {
            self.set(page, true);
        }
    }

    /// Allocates, writes, verifies and frees the pages of one of `of` threads.
    pub fn working(self: &Arc<Guest>, thread: u64, of: u64) -> Beside {
        self.beside(move |guest| {
            let mut rng = fastrand::Rng::with_seed(thread);
            let mut own: Vec<(u64, u64)> = Vec::new();
            let mut free: Vec<u64> =
                (FIRST..guest.pages).filter(|p| p / 8 % of == thread).collect();
            free.iter().for_each(|p| guest.set(*p, true));
            let mut serial = thread << 48 | 1;
            while !guest.stop.load(SeqCst) {
                let take = own.len() < 64 || (free.len() > 64 && rng.bool());
                for _ in 0..rng.usize(1..32) {
                    if take {
                        let page = free.swap_remove(rng.usize(..free.len()));
                        serial += 1;
                        guest.set(page, false);
                        guest.write(page, serial);
                        own.push((page, serial));
                        guest.allocations.fetch_add(1, SeqCst);
                    } else if let Some((page, value)) = own.pop() {
                        let at = rng.usize(..=own.len());
                        let (page, value) = match own.get_mut(at) {
                            Some(other) => std::mem::replace(other, (page, value)),
                            None => (page, value),
                        };
                        if !guest.holds(page, value) {
                            guest.lost.fetch_add(1, SeqCst);
                        }
                        guest.set(page, true);
                        free.push(page);
                    }
                }
            }
            let bad = own.iter().filter(|(p, v)| !guest.holds(*p, *v)).count();
            guest.lost.fetch_add(bad as u64, SeqCst);
        })
    }

    pub fn attach(&self) -> Attach {
        let segment = Segment { gpa: 0, size: self.pages * PAGE, hva: self.memory.address() };
        let (segments, firmware) = (vec![segment], Firmware::Seabios);
        Attach { segments, running: true, firmware, ..Attach::default() }
    }

    /// A new one with its beats, and an agent that may use its map.
    pub fn attached(mib: u64, memory: RamKind, faults: Faults) -> (Arc<Guest>, Agent, Beside) {
        let guest = Guest::new(mib, memory);
        let (agent, beats) = attached(&guest, faults);
        (guest, agent, beats)
    }

    /// Recycles as these say, in turns, until the time is over or a page is lost.
    pub fn recycle_for(&self, agent: &mut Agent, time: Duration, wants: &[Recycle]) {
        let until = Instant::now() + time;
        for want in wants.iter().cycle() {
            if Instant::now() >= until || self.lost.load(SeqCst) > 0 {
                return;
            }
            let _ = recycle(agent, *want);
        }
    }

    /// Pages that were allocated, lost and recycled.
    pub fn outcome(&self, agent: &mut Agent, of: &str) -> (u64, u64, u64) {
        let Status { counters, windows, waits, .. } = status(agent, false);
        let (made, lost) = (self.allocations.load(SeqCst), self.lost.load(SeqCst));
        println!("{of}: {made} allocations, {lost} lost, {counters:?}");
        println!("windows {windows}\nwaits {waits}");
        (made, lost, counters.recycled.0 / PAGE)
    }
}

pub fn ask(agent: &mut Agent, command: Command) -> Result<Answer, Refusal> {
    agent.execute(&command, None, &mut || false)
}

pub fn attach(agent: &mut Agent, attach: Attach) -> Result<Answer, Refusal> {
    ask(agent, Command::Attach(attach))
}

pub fn status(agent: &mut Agent, held: bool) -> Status {
    match ask(agent, Command::Status { held, room: None }) {
        Ok(Answer::Status(s)) => s,
        other => panic!("{other:?}"),
    }
}

/// As a daemon does that knows that nobody else shares the memory.
pub fn recycle(agent: &mut Agent, want: Recycle) -> Result<Recycled, Refusal> {
    if let Some(generation) = status(agent, false).unclear {
        ask(agent, Command::Cleared { generation }).unwrap();
    }
    match ask(agent, Command::Recycle(want)) {
        Ok(Answer::Recycled(r)) => Ok(r),
        Ok(other) => panic!("{other:?}"),
        Err(e) => Err(e),
    }
}

/// Asks again and again; whether it is so within a time.
pub fn within(time: Duration, mut is: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + time;
    while !is() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Steps until the map may be used, or time is over.
pub fn ready(agent: &mut Agent, time: Duration) -> bool {
    within(time, || status(agent, false).state == AgentState::Ready)
}

/// An agent that was told of a guest.
pub fn agent_of(to: Attach, faults: Faults) -> Agent {
    let mut agent = Agent::new(faults);
    attach(&mut agent, to).unwrap();
    agent
}

/// An attached agent whose map may be used, and the guest's beats.
pub fn attached(guest: &Arc<Guest>, faults: Faults) -> (Agent, Beside) {
    let beats = guest.beating();
    let mut agent = agent_of(guest.attach(), faults);
    assert!(ready(&mut agent, Duration::from_secs(10)), "{:?}", status(&mut agent, false));
    (agent, beats)
}

/// How long a contest lasts: `EBB_STRESS_SECONDS`, else the default that is given.
pub fn seconds(default: u64) -> Duration {
    let more = std::env::var("EBB_STRESS_SECONDS").ok().and_then(|v| v.parse().ok());
    Duration::from_secs(more.unwrap_or(default))
}
