//! One VM's agent: what each command of the daemon does.
//!
//! Commands run in one thread: the server calls [`Agent::execute`] for each request and
//! [`Agent::step`] in between. The fault handler and the hasher have threads of their own. All that
//! touches guest RAM hangs on the one `Attached`, whose end lifts every protection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use ebb_core::wire::abi::{self, FACTS_BYTES, Facts};
use ebb_core::wire::firmware::Firmware;
use ebb_core::wire::{
    AgentState, Answer, Attach, Command, Counters, Hello, OTHERS_DISCARD, PROTOCOL, Recycle,
    Refusal, Refused, Status, clip,
};

use crate::blockers::{self, Devices};
use crate::device_watch::DeviceWatch;
use crate::faults::Faults;
use crate::find_module::{Sight, Tracker};
use crate::guard::{Guard, Watch};
use crate::hasher::Hasher;
use crate::ksm_ranges::{self, LEAST_CLOSED, Objection, Open};
use crate::madvise_hook::{self, DiscardLock};
use crate::ram::Ram;
use crate::recycle::{Recycler, Work};
use crate::selftest::{self, Failed};
use crate::sys::Range;
use crate::uffd::Uffd;

/// How often open files are looked through for a reason to stand aside.
const ASIDE_EVERY: Duration = Duration::from_secs(1);
/// With more ranges open to KSM, to close the rest again each time would take milliseconds.
const FEW: usize = 64;
/// It is closed again this often then, and before anything is recycled.
const REST_EVERY: Duration = Duration::from_secs(10);
/// RAM in which no header has been found for this time needs no protection.
const LOST_LONG: Duration = Duration::from_secs(10);
/// Tries to read the facts between two writes of the guest.
const FACTS_TRIES: usize = 20;

/// The RAM that was handed over, and all that is done with it.
struct Attached {
    // Before the guard: its thread ends first.
    watch: Watch,
    _turns: Option<DiscardLock>,
    guard: Arc<Guard>,
    ram: Arc<Ram>,
    hasher: Option<Hasher>,
    recycling: Arc<AtomicBool>,
    tracker: Tracker,
    open: Open,
    work: Work,
    devices: Devices,
    /// RAM can be protected: it is registered, and closed to KSM.
    registered: bool,
    /// What breaking merges may take below the limits of the VM's cgroups, if there are any.
    room: Option<Bytes>,
    /// Windows longer than this have the agent stand aside.
    window_limit: Option<Duration>,
    aside_at: Instant,
    /// When all that is not to be open to KSM was closed last.
    closed_at: Instant,
}

#[derive(Default)]
pub struct Agent {
    vm: Option<Attached>,
    /// What was open to KSM when the VM was released: it is still, and merged.
    kept: Open,
    aside: Option<Objection>,
    faults: Faults,
}

fn refuse(kind: Refused, text: impl AsRef<str>) -> Refusal {
    Refusal { kind, text: clip(text.as_ref()) }
}

impl Agent {
    pub fn new(faults: Faults) -> Agent {
        Agent { faults, ..Agent::default() }
    }

    /// Lifts all protection and forgets the VM.
    pub fn detach(&mut self) {
        self.let_go();
        self.aside = None;
    }

    /// What is merged stays so.
    fn let_go(&mut self) {
        if let Some(vm) = &mut self.vm {
            self.kept = std::mem::take(&mut vm.open);
        }
        self.vm = None;
    }

    /// How soon [`Agent::step`] has something to do; `None`: no VM is attached.
    pub fn pause(&self) -> Option<Duration> {
        self.vm.as_ref().map(|vm| vm.tracker.pause())
    }

    /// What there is to do without being asked.
    pub fn step(&mut self) {
        let Some(vm) = &mut self.vm else { return };
        if !vm.watch.alive() {
            return self.stand_aside("the thread that reads faults has ended", false);
        }
        let now = Instant::now();
        let mut found = vm.step(now).err();
        vm.tell_map();
        if let Ok(mut recycler) = vm.recycler() {
            recycler.look_at_marks(now);
        }
        if found.is_none() && now >= vm.aside_at {
            vm.aside_at = now + ASIDE_EVERY;
            let opened = vm.keep_closed(now, false).err();
            let device = vm.devices.look().map(|why| Objection { why, passes: true });
            found = device.or(opened);
        }
        if let Some(by) = found {
            self.stand_aside(&by.why, by.passes);
        }
    }

    /// `passes`: the reason may, and the daemon is to try again.
    fn stand_aside(&mut self, why: &str, passes: bool) {
        self.let_go();
        self.aside = Some(Objection { why: clip(why), passes });
    }

    /// Does what is asked. `descriptor` came with the request; `interrupt` says
    /// whether something more urgent waits.
    pub fn execute(
        &mut self,
        command: &Command,
        descriptor: Option<OwnedFd>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Answer, Refusal> {
        match command {
            Command::Hello => return Ok(Answer::Hello(Agent::hello())),
            Command::Attach(attach) => self.attach(attach, descriptor)?,
            Command::Status { held, room } => {
                self.vm.iter_mut().for_each(|vm| vm.room = *room);
                return Ok(Answer::Status(self.status(*held)));
            }
            Command::Recycle(want) => return self.recycle(want, interrupt),
            Command::Mark => return self.mark(),
            Command::Facts => return self.facts().map(Answer::Facts),
            Command::RunState { running } => {
                // What beat until now counts; what did not does not.
                self.step();
                self.attached()?.tracker.run_state(*running);
            }
            Command::ResetSeen => {
                let vm = self.attached()?;
                vm.tracker.forget(&vm.guard, "the VM was reset");
            }
            Command::Advise(want) => {
                let vm = self.changeable()?;
                let done = vm.open.set(&vm.ram, want, &mut vm.room);
                let no = |why| refuse(Refused::System, why);
                return done.map(|open| Answer::Advised { open }).map_err(no);
            }
            Command::Hashes => {
                let vm = self.attached()?;
                let no = |why: String| refuse(Refused::System, why);
                let socket = descriptor.ok_or_else(|| no("the socket did not arrive".into()))?;
                // Not the guard: its userfaultfd must end when the VM is released.
                let (ram, recycling) = (Arc::clone(&vm.ram), Arc::clone(&vm.recycling));
                vm.hasher = None;
                let faults = vm.tracker.faults;
                vm.hasher = Some(Hasher::start(socket, ram, recycling, faults).map_err(no)?);
                vm.tell_map();
            }
            Command::Cleared { generation } => self.attached()?.devices.clear(*generation),
            Command::StandDown => self.detach(),
        }
        Ok(Answer::Done)
    }

    fn hello() -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            advises: true,
            hashes: crate::ram::pagemap().is_some(),
            wants_descriptor: Uffd::open(None, false).is_err(),
        }
    }

    fn attached(&mut self) -> Result<&mut Attached, Refusal> {
        match (&mut self.vm, &self.aside) {
            (Some(vm), _) => Ok(vm),
            (None, Some(by)) => Err(refuse(Refused::Aside, &by.why)),
            (None, None) => Err(refuse(Refused::NotReady, "no RAM was handed over: attach first")),
        }
    }

    /// The VM, if anything may be done to its memory.
    fn changeable(&mut self) -> Result<&mut Attached, Refusal> {
        let vm = self.attached()?;
        match vm.tracker.observe {
            true => Err(refuse(Refused::NotReady, "this VM is only observed")),
            false => Ok(vm),
        }
    }

    fn attach(&mut self, attach: &Attach, device: Option<OwnedFd>) -> Result<(), Refusal> {
        self.detach();
        if attach.descriptor != device.is_some() {
            let text = match device {
                None => "the descriptor did not arrive",
                Some(_) => "a descriptor came that the request does not name: it was closed",
            };
            return Err(refuse(Refused::Request, text));
        }
        match self.attachment(attach, device.as_ref().map(AsFd::as_fd)) {
            Ok(vm) => {
                self.kept = Open::default();
                self.vm = Some(vm);
                Ok(())
            }
            Err((refusal, passes)) => {
                if refusal.kind == Refused::Aside {
                    self.stand_aside(&refusal.text, passes || blockers::objection().is_some());
                }
                Err(refusal)
            }
        }
    }

    /// All that is needed for work, each step only where those before allow it. With an error:
    /// whether it may pass.
    fn attachment(
        &mut self,
        attach: &Attach,
        device: Option<BorrowedFd<'_>>,
    ) -> Result<Attached, (Refusal, bool)> {
        let aside = |why: String| (refuse(Refused::Aside, why), false);
        let refused = |by: Objection| (refuse(Refused::Aside, by.why), by.passes);
        let mut devices = Devices::default();
        devices.look().map_or(Ok(()), |why| Err(aside(why)))?;
        let ram = Ram::check(&attach.segments).map_err(aside)?;
        let objections = objections(attach, &ram);
        if !objections.is_empty() {
            return Err(aside(objections.join("; ")));
        }
        let uffd = Uffd::open(device, !self.faults.no_unpopulated()).map_err(aside)?;
        if !self.faults.no_self_test() && !attach.observe {
            selftest::keeps_protection(&uffd).map_err(|failed| match failed {
                Failed::Loses(why) => aside(why),
                Failed::Unknown(why) => (refuse(Refused::System, why), false),
            })?;
        }
        let mut open = self.kept.still(&ram);
        if !attach.keep_open {
            open.close_all(attach.room).map_err(refused)?;
            self.kept = Open::default();
            open = Open::default();
        }
        // The daemon names what is to be open, so what QEMU opened by default is closed. Else
        // that stays open as long as nothing has to be protected.
        if attach.keep_open && !attach.observe {
            ksm_ranges::leave_ksm(&ram, &open, attach.room).map_err(refused)?;
        }
        if ram.has_shared() {
            devices.watch_sockets();
        }
        Attached::new(ram, uffd, devices, open, attach, self.faults).map_err(aside)
    }

    fn status(&mut self, held: bool) -> Status {
        self.step();
        let Some(vm) = &mut self.vm else {
            let Some(by) = &self.aside else { return Status::default() };
            let (why, passes) = (Some(by.why.clone()), by.passes);
            return Status { state: AgentState::Aside, why, passes, ..Status::default() };
        };
        let free = vm.recycler().ok().and_then(|r| r.free(held));
        let (state, why) = vm.tracker.state();
        Status {
            state,
            why,
            passes: false,
            module: vm.tracker.module(),
            free: free.map(|f| f.0),
            held: free.and_then(|f| Some(f.1?.0)),
            held_partial: free.and_then(|f| Some(f.1?.1)),
            open: Some(vm.open.size()),
            counters: vm.counters(),
            unclear: vm.devices.unclear(),
            wires: vm.guard.wires(),
            windows: vm.work.windows.clone(),
            waits: vm.guard.waits(),
        }
    }

    fn recycle(
        &mut self,
        want: &Recycle,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Answer, Refusal> {
        self.step();
        if let Err(by) = self.attached()?.keep_closed(Instant::now(), true) {
            self.stand_aside(&by.why, by.passes);
        }
        let vm = self.changeable()?;
        if vm.devices.unclear().is_some() && !vm.tracker.faults.no_devices() {
            let why = "a socket was opened beside shared RAM: the daemon has to look first";
            return Err(refuse(Refused::NotReady, why));
        }
        vm.close_free(want)?;
        let (recycling, limit) = (Arc::clone(&vm.recycling), vm.window_limit);
        let mut recycler = vm.recycler()?;
        recycling.store(true, SeqCst);
        let done = recycler.run(want, interrupt);
        recycling.store(false, SeqCst);
        let longest = Duration::from_nanos(recycler.work.counters.window_max_ns);
        let late = limit.filter(|limit| longest > *limit).map(|limit| {
            format!(
                "a window took {} ms, more than the operator's window_limit of {} ms: \
                 raise it, or `ebb hands-off` and `ebb hands-on` to try again",
                longest.as_millis(),
                limit.as_millis()
            )
        });
        let device = recycler.found.take();
        let passes = device.is_some();
        if let Some(why) = device.or(late) {
            self.stand_aside(&why, passes);
        }
        // A map that fell into doubt is dropped now, not at the next call.
        self.step();
        Ok(Answer::Recycled(done))
    }

    fn mark(&mut self) -> Result<Answer, Refusal> {
        self.step();
        let vm = self.attached()?;
        let gone = || refuse(Refused::System, "the map cannot be read");
        vm.recycler()?.mark().ok_or_else(gone)?;
        Ok(Answer::Marked)
    }

    fn facts(&mut self) -> Result<Facts, Refusal> {
        self.step();
        let vm = self.attached()?;
        let live = vm.tracker.ready().ok_or_else(|| vm.not_ready())?;
        let at = live.header.gpa + abi::FACTS_AT;
        for _ in 0..FACTS_TRIES {
            let (mut bytes, mut after) = ([0u8; FACTS_BYTES], [0u8; 4]);
            let read = vm.ram.read(at, &mut bytes).and_then(|()| vm.ram.read(at, &mut after));
            read.ok_or_else(|| refuse(Refused::System, "the facts cannot be read"))?;
            if let Some(facts) = Facts::parse(&bytes, u32::from_le_bytes(after)) {
                return Ok(facts);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Err(refuse(Refused::NotReady, "the guest is writing its facts all the time"))
    }
}

impl Attached {
    fn new(
        ram: Ram,
        uffd: Uffd,
        devices: Devices,
        open: Open,
        attach: &Attach,
        faults: Faults,
    ) -> Result<Attached, String> {
        let system = |e: std::io::Error| format!("cannot start the fault handler: {e}");
        let device_watch = if faults.no_device_watch() { None } else { DeviceWatch::watch().ok() };
        let guard = Arc::new(Guard::new(uffd, device_watch).map_err(system)?);
        let watch = Watch::start(Arc::clone(&guard)).map_err(system)?;
        let turns = match faults.no_turns() {
            true => None,
            false => {
                Some(DiscardLock::begin(&guard, &ram).ok_or("too many agents in this process")?)
            }
        };
        let limit = Duration::from_millis(attach.window_limit_ms);
        Ok(Attached {
            watch,
            _turns: turns,
            guard,
            ram: Arc::new(ram),
            hasher: None,
            recycling: Arc::default(),
            tracker: Tracker::new(attach.running, attach.firmware, attach.observe, faults),
            open,
            work: Work::default(),
            devices,
            registered: false,
            room: attach.room,
            window_limit: Some(limit).filter(|l| !l.is_zero()),
            aside_at: Instant::now() + ASIDE_EVERY,
            closed_at: Instant::now(),
        })
    }

    /// Looks for the guest's header and at it. RAM is registered when something is to be
    /// protected, and no longer than that.
    fn step(&mut self, now: Instant) -> Result<(), Objection> {
        let (ram, guard, open, room) = (&self.ram, &self.guard, &self.open, self.room);
        let faults = self.tracker.faults;
        // What is merged is to stay so, as long as nothing has to be protected.
        let gently = !open.ranges.is_empty() || !self.registered;
        let registered = &mut self.registered;
        let mut prepare = || {
            if !std::mem::replace(registered, true) {
                // Before anything is protected: merging would lift the protection.
                ksm_ranges::leave_ksm(ram, open, room)?;
                // A DIMM may have been replaced since the daemon told where it is.
                if !faults.moved_ram() {
                    ram.is_still_there().map_err(|why| Objection { why, passes: true })?;
                }
                register(ram, &guard.uffd)?;
            }
            Ok(())
        };
        let mut sight = Sight { ram, guard, gently, prepare: &mut prepare };
        self.tracker.step(&mut sight, now)?;
        if self.registered && self.tracker.lost_for(now).is_some_and(|lost| lost > LOST_LONG) {
            self.registered = false;
            for p in &self.ram.pieces {
                let _ = self.guard.uffd.unregister(Range { start: p.hva, len: p.size });
            }
        }
        Ok(())
    }

    /// What another program may have opened to KSM again is closed: what is about to be `recycled`
    /// must have been looked at within a second, tripwires always.
    fn keep_closed(&mut self, now: Instant, recycled: bool) -> Result<(), Objection> {
        if !self.registered {
            return Ok(());
        }
        let soon = recycled || self.open.ranges.len() <= FEW;
        if now - self.closed_at < if soon { ASIDE_EVERY } else { REST_EVERY } {
            self.open.keep_tripwires_out(&self.ram)?;
        } else {
            self.closed_at = now;
            self.open.keep_rest_out(&self.ram)?;
        }
        // What was merged meanwhile is not protected any more.
        if !self.tracker.faults.no_look_at_wires() {
            self.guard.look_at_wires();
        }
        Ok(())
    }

    /// Closes what is free in ranges that are open to KSM, so that it can be given back. Where that
    /// cannot be, it stays open.
    fn close_free(&mut self, want: &Recycle) -> Result<(), Refusal> {
        if self.open.ranges.is_empty() {
            return Ok(());
        }
        if want.room_to_close() < Bytes::pages(LEAST_CLOSED as u64) {
            self.open.keep_free();
            return Ok(());
        }
        let free = self.recycler()?.free_and_open(want);
        self.open.close_free(free, self.tracker.faults);
        Ok(())
    }

    /// The scanner's thread leaves out what the map calls free.
    fn tell_map(&self) {
        let pages = self.tracker.ready().map_or(&[][..], |live| &live.layout.pages);
        self.hasher.iter().for_each(|h| h.tell_map(pages));
    }

    fn not_ready(&self) -> Refusal {
        let (state, why) = self.tracker.state();
        let why = why.map_or(String::new(), |w| format!(": {w}"));
        refuse(Refused::NotReady, format!("{state:?}").to_lowercase() + &why)
    }

    fn recycler(&mut self) -> Result<Recycler<'_>, Refusal> {
        let beat = self.tracker.beat();
        let Some(live) = self.tracker.ready() else { return Err(self.not_ready()) };
        Ok(Recycler {
            ram: &self.ram,
            guard: &self.guard,
            proven: live,
            open: &self.open,
            work: &mut self.work,
            devices: &mut self.devices,
            beat,
            early_end: self.tracker.firmware.early_end(),
            found: None,
            faults: self.tracker.faults,
        })
    }

    fn counters(&self) -> Counters {
        let (faults, trips) = self.guard.counts();
        Counters { faults, trips, challenges: self.tracker.challenges, ..self.work.counters }
    }
}

/// What forbids the agent to touch this VM.
fn objections(attach: &Attach, ram: &Ram) -> Vec<String> {
    let turns = madvise_hook::taken();
    let counts = |o: &&String| **o != OTHERS_DISCARD || (ram.has_anonymous() && !turns);
    let mut found: Vec<_> = attach.objections.iter().filter(counts).cloned().collect();
    if attach.firmware == Firmware::Unknown {
        found.push(
            "its firmware is not known, nor what that writes first at a reset: start it with \
             QEMU's own BIOS or with OVMF"
                .into(),
        );
    }
    found
}

/// Pages of it can be protected from now on.
fn register(ram: &Ram, uffd: &Uffd) -> Result<(), String> {
    for p in &ram.pieces {
        uffd.register(Range { start: p.hva, len: p.size }).map_err(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => {
                "another userfaultfd guards this RAM (postcopy, background snapshot)".into()
            }
            _ => format!("RAM at {:#x} cannot be guarded: {e}", p.gpa),
        })?;
    }
    Ok(())
}
