//! Finds the header page that `ebb.ko` keeps in guest RAM, and checks by its counter (the beat)
//! that the module still runs.
//!
//! ```text
//! searching ── magic, checksum ──> checking ── two right beats ──> challenged
//!     ^                                                                │ right answer
//!     └── reset, tripwire, another header, STOPPED ── ready <──────────┘
//! ```
//!
//! RAM outlives a reset, so what looks like a header may be left from before:
//! nothing is written into its page before it beats, and nothing is believed
//! before it has answered a random number. The tripwires are armed before that
//! number is written, so a reset after the answer cannot pass unnoticed. A
//! running guest that stops beating is doubted until it beats and answers again;
//! a paused one cannot beat, and cannot be reset unnoticed either.
//!
//! With `observe` no number is written and nothing is armed: two right beats are enough
//! to read a map, of which nothing is given back.

use std::time::{Duration, Instant};

use ebb_core::wire::abi::{
    self, Bad, CANDIDATES_MAX, GuestState, HEADER_BYTES, Header, Layout, LivePart, PAGE,
};
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{AgentState, Module};

use crate::faults::Faults;
use crate::guard::Guard;
use crate::ksm_ranges::Objection;
use crate::priority::RealTime;
use crate::ram::{Bits, Ram};
use crate::sys::{self, Range};

/// Between two searches of the first 16 MiB: about a millisecond of work.
const SEARCH_EVERY: Duration = Duration::from_millis(250);
/// The longer nothing was found the longer, up to this: a VM may never have a module.
const SEARCH_MOST: Duration = Duration::from_secs(5);
/// The pause is the time that was searched for, divided by this.
const SEARCH_SHARE: u32 = 16;
/// Between two searches while the vCPUs stand still: nothing that is found could prove itself.
const SEARCH_PAUSED: Duration = Duration::from_secs(5);
/// How long a candidate may take to beat twice, and to answer; ten times the
/// module's own limits, for guests that hardly run.
const PATIENCE: Duration = Duration::from_secs(5);
/// A running guest that does not beat for this time is doubted.
const SILENCE: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct Candidate {
    header: Header,
    beats: u32,
    last: u64,
}

/// A header that answered.
#[derive(Debug)]
pub struct Live {
    /// As it was when it answered.
    pub header: Header,
    pub layout: Layout,
    beat: u64,
    beat_at: Instant,
    silent: bool,
    state: GuestState,
}

#[derive(Debug)]
enum At {
    /// Again at `next`; it began then.
    Searching {
        next: Option<Instant>,
        since: Option<Instant>,
    },
    Checking {
        since: Instant,
        found: Vec<Candidate>,
    },
    /// The tripwires are armed since then.
    Armed {
        since: Instant,
        header: Box<Header>,
    },
    Challenged {
        since: Instant,
        header: Box<Header>,
        challenge: u64,
    },
    Ready(Box<Live>),
}

/// How far we are with the guest's header.
#[derive(Debug)]
pub struct Tracker {
    at: At,
    why: Option<String>,
    pub challenges: u64,
    running: bool,
    pub firmware: Firmware,
    pub observe: bool,
    /// Since when nothing is known.
    lost_at: Instant,
    pub faults: Faults,
}

/// What [`Tracker::step`] works with.
pub struct Sight<'a> {
    pub ram: &'a Ram,
    pub guard: &'a Guard,
    /// Some of RAM may be merged, and is to stay so.
    pub gently: bool,
    /// Makes protection possible: called before the first page is protected. An error is a
    /// reason to leave the VM alone.
    pub prepare: &'a mut dyn FnMut() -> Result<(), Objection>,
}

impl Tracker {
    pub fn new(running: bool, firmware: Firmware, observe: bool, faults: Faults) -> Tracker {
        Tracker {
            at: At::Searching { next: None, since: None },
            why: None,
            challenges: 0,
            running,
            firmware,
            observe,
            lost_at: Instant::now(),
            faults,
        }
    }

    /// Nothing known holds any more.
    pub fn forget(&mut self, guard: &Guard, why: &str) {
        guard.disarm();
        if matches!(self.at, At::Armed { .. } | At::Challenged { .. } | At::Ready(_)) {
            self.lost_at = Instant::now();
        }
        self.at = At::Searching { next: None, since: None };
        self.why = Some(why.to_string());
    }

    /// How long no header has been found; nothing has to be protected meanwhile.
    pub fn lost_for(&self, now: Instant) -> Option<Duration> {
        let searching = matches!(self.at, At::Searching { .. } | At::Checking { .. });
        searching.then(|| now.duration_since(self.lost_at))
    }

    /// The last beat of a running guest, and when it was seen first.
    pub fn beat(&self) -> Option<(u64, Instant)> {
        match &self.at {
            At::Ready(live) if self.running => Some((live.beat, live.beat_at)),
            _ => None,
        }
    }

    /// Whether the vCPUs run, as the daemon knows.
    pub fn run_state(&mut self, running: bool) {
        self.running = running;
        match &mut self.at {
            // A doubt from before the pause stays: only a beat and an answer end it.
            At::Ready(live) => live.beat_at = Instant::now(),
            At::Searching { next, since } => (*next, *since) = (None, None),
            At::Checking { .. } | At::Armed { .. } | At::Challenged { .. } => {}
        }
    }

    pub fn ready(&self) -> Option<&Live> {
        match &self.at {
            At::Ready(live) if !live.silent && live.state == GuestState::Running => Some(live),
            _ => None,
        }
    }

    pub fn state(&self) -> (AgentState, Option<String>) {
        let paused = || "the VM is paused: nothing can prove itself".to_string();
        let unproven = || if self.running { self.why.clone() } else { Some(paused()) };
        match &self.at {
            At::Searching { .. } => (AgentState::Searching, unproven()),
            At::Checking { .. } | At::Armed { .. } | At::Challenged { .. } => {
                (AgentState::Checking, unproven())
            }
            At::Ready(live) if live.silent => {
                (AgentState::Silent, Some("the guest does not beat".to_string()))
            }
            At::Ready(live) if live.state != GuestState::Running => {
                (AgentState::Silent, Some(format!("the module is {:?}", live.state).to_lowercase()))
            }
            At::Ready(_) => (AgentState::Ready, None),
        }
    }

    pub fn module(&self) -> Option<Module> {
        let At::Ready(live) = &self.at else { return None };
        let h = &live.header;
        Some(Module { version: h.module_version.clone(), linux: h.linux() })
    }

    /// How soon [`Tracker::step`] has something to do.
    pub fn pause(&self) -> Duration {
        match &self.at {
            At::Ready(_) => Duration::from_millis(200),
            // It cannot succeed before the vCPUs run, which is reported.
            _ if !self.running => Duration::from_secs(1),
            At::Searching { .. } => SEARCH_EVERY,
            At::Checking { .. } | At::Armed { .. } | At::Challenged { .. } => {
                Duration::from_millis(10)
            }
        }
    }

    /// Looks, and goes on to the next state where it can. The error is a reason to leave
    /// the VM alone.
    pub fn step(&mut self, sight: &mut Sight<'_>, now: Instant) -> Result<(), Objection> {
        let (ram, guard) = (sight.ram, sight.guard);
        // What tripped stays tripped until it is armed anew, for the next challenge.
        let relied = matches!(self.at, At::Armed { .. } | At::Challenged { .. } | At::Ready(_));
        if guard.is_held(now) {
            self.forget(guard, "a device that pins guest memory may be plugged in now");
            return Ok(());
        }
        if relied && guard.tripped() && !self.faults.no_doubt() {
            let wires = guard.wires();
            let which = wires.iter().find(|w| w.1 > 0).map_or(0, |w| w.0);
            let why = match guard.bare() {
                Some(gpa) => format!("guest page {gpa:#x} has lost its protection, as in KSM"),
                None => format!("something wrote to guest page {which:#x}: a reset"),
            };
            self.forget(guard, &why);
        }
        match &mut self.at {
            At::Searching { next, since } if next.is_none_or(|n| now >= n) => {
                let searched = now - *since.get_or_insert(now);
                let pause = (searched / SEARCH_SHARE).clamp(SEARCH_EVERY, SEARCH_MOST);
                *next = Some(now + if self.running { pause } else { SEARCH_PAUSED });
                let (found, why) = search(ram, self.firmware, sight.gently);
                self.why = why.or(self.why.take());
                if !found.is_empty() {
                    self.at = At::Checking { since: now, found };
                }
            }
            At::Searching { .. } => {}
            At::Checking { since, found } => {
                let late = self.running && now.duration_since(*since) > PATIENCE;
                let alive = watch(ram, found, self.faults.no_challenge());
                match alive {
                    Some(header) if self.observe => self.believe(ram, guard, header, now),
                    Some(header) => return self.prepare(sight, header, now),
                    None if late => self.forget(guard, "found a header, but it does not beat"),
                    None => {}
                }
            }
            At::Armed { .. } => self.challenge(ram, guard, now),
            At::Challenged { .. } => self.answered(ram, guard, now),
            At::Ready(_) => return self.look(sight, now),
        }
        Ok(())
    }

    /// Protects the pages that firmware writes to first and this kernel never does. The error is a
    /// reason to look for another header.
    fn arm(&self, ram: &Ram, guard: &Guard, header: &Header) -> Result<(), String> {
        let kept = self.firmware.kept_wire().filter(|gpa| *gpa == header.kept_gpa);
        // QEMU, when it loads a snapshot, does not write a page that is zero in both.
        if let Some(gpa) = kept.filter(|gpa| is_zero(ram, *gpa) && !self.faults.zero_wire()) {
            return Err(format!(
                "guest page {gpa:#x} is zero, so a snapshot could be loaded unnoticed: load the \
                 guest with this version of ebb.ko"
            ));
        }
        let all = self.firmware.wires().iter().copied().chain(kept);
        let all = all.skip(usize::from(self.faults.late_wire()));
        let here: Vec<_> = all.filter_map(|gpa| Some((gpa, ram.hva(gpa, PAGE)?))).collect();
        let (first, _) = here.first().ok_or(
            "there is no page that its firmware writes to first at a reset and its kernel never \
             does: load the guest with this version of ebb.ko",
        )?;
        guard.arm(&here).map_err(|e| format!("cannot watch guest page {first:#x}: {e}"))
    }

    /// Makes protection possible, which may take seconds, and arms the tripwires.
    fn prepare(
        &mut self,
        sight: &mut Sight<'_>,
        header: Header,
        now: Instant,
    ) -> Result<(), Objection> {
        (sight.prepare)()?;
        let unarmed = self.faults.no_tripwire();
        match if unarmed { Ok(()) } else { self.arm(sight.ram, sight.guard, &header) } {
            Err(why) => self.forget(sight.guard, &why),
            Ok(()) => self.at = At::Armed { since: now, header: Box::new(header) },
        }
        Ok(())
    }

    /// Asks the module for a sign, in the guest's memory. What was reset before the tripwires were
    /// armed beats no more, and a later reset waits for the window.
    fn challenge(&mut self, ram: &Ram, guard: &Guard, now: Instant) {
        let At::Armed { since, header } = &self.at else { return };
        let late = self.running && now.duration_since(*since) > PATIENCE;
        let unasked = self.faults.no_challenge();
        // From here to the challenge nothing runs before us: a module that has stopped keeps its
        // header for 50 ms.
        let _first = RealTime::begin();
        let window = guard.open();
        let Some(fresh) = read_again(ram, header).filter(|_| !guard.tripped()) else {
            drop(window);
            return self.forget(guard, "its header changed, or a tripwire was written to");
        };
        let beats = fresh.live.beat > header.live.beat
            && fresh.live.beats_right(fresh.key)
            && (fresh.live.state == GuestState::Running || self.faults.no_state());
        if !beats && !unasked && !self.faults.no_late_beat() {
            drop(window);
            if late {
                self.forget(guard, "it does not beat any more, or its module has stopped");
            }
            return;
        }
        match sys::random() {
            Ok(number) => {
                let challenge = number.max(1);
                let at = ram.hva(fresh.gpa + abi::CHALLENGE_AT, 8);
                if let Some(at) = at.filter(|_| !unasked) {
                    sys::store_u64(at, challenge);
                }
                self.at = At::Challenged { since: now, header: Box::new(fresh), challenge };
            }
            Err(e) => {
                drop(window);
                self.forget(guard, &format!("the kernel gives no random number: {e}"));
            }
        }
    }

    /// Takes a header's map for what it is, to read it.
    fn believe(&mut self, ram: &Ram, guard: &Guard, fresh: Header, now: Instant) {
        match collect(ram, &fresh) {
            Ok(layout) => {
                let (beat, state) = (fresh.live.beat, fresh.live.state);
                let live = Live { header: fresh, layout, beat, beat_at: now, silent: false, state };
                self.at = At::Ready(Box::new(live));
                self.why = None;
            }
            Err(Bad::Changing) => {}
            Err(e) => self.forget(guard, &format!("its map cannot be used: {e}")),
        }
    }

    fn answered(&mut self, ram: &Ram, guard: &Guard, now: Instant) {
        let At::Challenged { since, header, challenge } = &self.at else { return };
        let late = self.running && now.duration_since(*since) > PATIENCE;
        let Some(fresh) = read_again(ram, header) else {
            return self.forget(guard, "its header changed");
        };
        let right = fresh.live.response == abi::response(*challenge, fresh.key);
        let good = right && fresh.live.state == GuestState::Running;
        if !good && !self.faults.no_challenge() {
            if late {
                self.forget(guard, "the module does not answer");
            }
            return;
        }
        self.believe(ram, guard, fresh, now);
        if matches!(self.at, At::Ready(_)) {
            self.challenges += 1;
        }
    }

    /// A header that answered: the same, alive, with the map we know?
    fn look(&mut self, sight: &mut Sight<'_>, now: Instant) -> Result<(), Objection> {
        let (ram, guard) = (sight.ram, sight.guard);
        let At::Ready(live) = &mut self.at else { return Ok(()) };
        let Some(fresh) = read_again(ram, &live.header) else {
            if !self.faults.no_doubt() {
                self.forget(guard, "the module is gone");
            }
            return Ok(());
        };
        live.state = fresh.live.state;
        if live.state == GuestState::Stopped && !self.faults.no_doubt() {
            self.forget(guard, "the module stopped");
            return Ok(());
        }
        let beats = fresh.live.beat != live.beat && fresh.live.beats_right(fresh.key);
        if beats {
            (live.beat, live.beat_at) = (fresh.live.beat, now);
        }
        let silence = self.running && now.duration_since(live.beat_at) > SILENCE;
        live.silent |= silence && !self.faults.no_challenge();
        if live.silent && beats && self.observe {
            live.silent = false;
        } else if live.silent && beats {
            return self.prepare(sight, fresh, now);
        }
        if fresh.live.generation != live.layout.generation {
            match collect(ram, &fresh) {
                Ok(layout) => live.layout = layout,
                Err(Bad::Changing) => {}
                Err(e) => self.forget(guard, &format!("its map cannot be used: {e}")),
            }
        }
        Ok(())
    }
}

/// Copies a header once and checks it; `None`: it cannot be read.
fn read_header(ram: &Ram, gpa: u64) -> Option<Result<Header, Bad>> {
    let mut bytes = [0u8; HEADER_BYTES];
    ram.read(gpa, &mut bytes)?;
    Some(Header::parse(&bytes, gpa))
}

/// A header as it is now; `None`: it is gone, or another one.
fn read_again(ram: &Ram, known: &Header) -> Option<Header> {
    read_header(ram, known.gpa)?.ok().filter(|fresh| fresh.fixed == known.fixed)
}

/// Whether a page of the guest is zero, or cannot be read.
fn is_zero(ram: &Ram, gpa: u64) -> bool {
    let mut page = [0u8; PAGE as usize];
    ram.read(gpa, &mut page).is_none_or(|()| page.iter().all(|byte| *byte == 0))
}

/// The map of a header, if its extents did not change meanwhile.
fn collect(ram: &Ram, header: &Header) -> Result<Layout, Bad> {
    let read = |gpa| {
        let mut page = [0u8; PAGE as usize];
        ram.read(gpa, &mut page)?;
        Some(page)
    };
    let layout = Layout::collect(header, &ram.ranges, read)?;
    let mut bytes = [0u8; HEADER_BYTES];
    ram.read(header.gpa, &mut bytes).ok_or(Bad::Wrong("the header outside of RAM"))?;
    match LivePart::parse(&bytes).generation == layout.generation {
        true => Ok(layout),
        false => Err(Bad::Changing),
    }
}

/// All headers that are whole, among the held ones of the first pages, and why the last one that
/// was not is none. One on a tripwire is a hostile guest's: the agent would wait for itself when
/// it writes there.
fn search(ram: &Ram, firmware: Firmware, gently: bool) -> (Vec<Candidate>, Option<String>) {
    let mut found = Vec::new();
    let mut why = None;
    for gpa in magic_pages(ram, gently) {
        if firmware.wires().contains(&gpa) || firmware.kept_wire() == Some(gpa) {
            why = Some(format!("a header at {gpa:#x}, where its firmware writes first"));
            continue;
        }
        match read_header(ram, gpa) {
            Some(Ok(header)) => {
                let last = header.live.beat;
                found.push(Candidate { header, beats: 0, last });
            }
            Some(Err(e)) => why = Some(format!("a header at {gpa:#x}: {e}")),
            None => {}
        }
    }
    (found, why)
}

/// Addresses of the first pages that are held (reading others would make them
/// so) and begin with the magic; at most [`CANDIDATES_MAX`].
fn magic_pages(ram: &Ram, gently: bool) -> Vec<u64> {
    let mut held: Bits = [0; abi::MAP_WORDS];
    let mut huge: Bits = [0; abi::MAP_WORDS];
    let Some(mut part) = ram.parts(0).next() else { return Vec::new() };
    part.len = part.len.min(abi::SEARCH_PAGES as usize);
    if ram.held(&part, &mut held, &mut huge).is_err() {
        return Vec::new();
    }
    let pages: Vec<u64> = abi::runs(&held)
        .flat_map(|(first, len)| first as u64..(first + len) as u64)
        .filter(|p| *p < abi::SEARCH_PAGES)
        .collect();
    let mut found = Vec::new();
    for chunk in pages.chunks(256) {
        let places: Vec<Range> = chunk.iter().map(|p| part.range(*p as usize, 1)).collect();
        let Ok(starts) = ram.starts::<16>(&places, gently) else { continue };
        let magic = starts.iter().zip(chunk).filter(|(s, _)| **s == abi::MAGIC);
        found.extend(magic.map(|(_, p)| p * PAGE));
    }
    found.truncate(CANDIDATES_MAX);
    found
}

/// Counts right beats; the first candidate with two of them lives.
fn watch(ram: &Ram, found: &mut [Candidate], believe: bool) -> Option<Header> {
    for c in found {
        let Some(fresh) = read_again(ram, &c.header) else { continue };
        if fresh.live.beat > c.last && fresh.live.beats_right(fresh.key) {
            (c.last, c.beats) = (fresh.live.beat, c.beats + 1);
        }
        if c.beats >= 2 || believe {
            return Some(fresh);
        }
    }
    None
}
