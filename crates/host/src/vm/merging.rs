//! A VM's RAM opened to KSM or closed between ticks, and when its mappings are looked at for
//! what has come of that.
//!
//! QEMU is told the same as `act/vm_mergeable.rs` tells it at once, over the connection that a
//! tick drives, and without waiting: ask for the memory backends, set each, have the mappings
//! looked at.

use std::time::{Duration, Instant};

use ebb_core::units::Bytes;
use serde_json::json;

use super::Vm;
use crate::act::ksm_worker::MappingsLook;
use crate::act::vm_mergeable::{Backends, KsmState, MergeableError, PATIENCE};
use crate::qmp::{Client, QmpError};
use crate::qmp_balloon;
use crate::sys::Range;

/// A VM's mappings are looked at again after this, or after a thousand times as long as a
/// look takes: the kernel walks all page tables for one, 25 ms a GiB of small pages.
const LOOK_EVERY: (Duration, u32) = (Duration::from_secs(60), 1000);
/// And when this many merged pages were copied on the host since the last look at it (16 MiB).
const LOOK_COPIES: u64 = 4096;
/// But not before this, or a hundred times as long as a look takes, and not much later.
const LOOK_CALM: (Duration, u32, Duration) = (Duration::from_secs(1), 100, Duration::from_secs(30));
/// Neither is it looked at again before all VMs could be in this many times what a look at each
/// takes: so looks use 10 % of a core at most, but for those that orders wait for.
const LOOK_ALL: u32 = 10;
/// After this QEMU is asked again which of its memory is RAM.
const ASK_AGAIN: Duration = Duration::from_secs(30);

impl Vm {
    pub fn switch_merging(&mut self, open: bool) {
        let mut merging = std::mem::take(&mut self.merging);
        match self.usable() {
            Some(client) => {
                merging.order(open, client);
                client.flush();
            }
            None => merging.error = Some("no QMP connection".into()),
        }
        self.merging = merging;
    }

    /// Goes on with an order. Whether its RAM is open to KSM, where that is known.
    pub fn go_on_merging(&mut self, look: Option<&MappingsLook>) -> Option<bool> {
        let mut merging = std::mem::take(&mut self.merging);
        merging.go_on(self.client.as_mut().filter(|c| c.takes_late()), look);
        let state = look.and_then(|look| look.state.as_ref().ok());
        let unknown = state.is_some_and(|state| merging.must_ask(state));
        let alone = self.access.hands_off_ms.is_some();
        if let (true, false, Some(client)) = (unknown, alone, self.usable()) {
            merging.learn(client);
        }
        self.client.iter_mut().for_each(Client::flush);
        self.merging = merging;
        let asked = self.merging.is_busy();
        if unknown && (asked || !alone && self.usable_sockets().is_ok()) {
            return None;
        }
        Some(self.merging.is_open(state?))
    }

    /// Whether its mappings are to be looked at: never yet, because an order waits
    /// for it, because pages were merged or merged pages copied, or because it is time.
    /// `working`: `ksmd` is at it. `all`: what a look at each VM takes.
    pub fn decide_look(
        &mut self,
        look: Option<&MappingsLook>,
        all: Duration,
        copied: Option<u64>,
        merged: Option<u64>,
        working: bool,
    ) -> bool {
        let opened = self.agent.as_ref().is_some_and(|a| a.open() > Bytes::ZERO);
        let Some(look) = look else {
            (self.copied, self.opened, self.merged) = (copied, opened, merged);
            return true;
        };
        let grown = copied.zip(self.copied).map_or(0, |(now, was)| now.saturating_sub(was));
        let ordered = self.merging.waits_for_look().is_some_and(|since| look.begun < since);
        let storm = grown >= LOOK_COPIES;
        // What is lost later is lost of what was seen merged.
        let more = merged.zip(self.merged).map_or(0, |(now, was)| now.saturating_sub(was));
        // While there is more to come, when it has doubled.
        let least = if working { self.merged.unwrap_or(0) } else { 0 };
        let more = more >= LOOK_COPIES.max(least);
        // What its agent opened it says; that nothing is open any more is to be seen.
        if self.opened && !opened {
            self.closed = Some(Instant::now());
        }
        self.opened = opened;
        let closed = self.closed.is_some_and(|since| look.begun < since);
        let news = storm || more;
        let wants = ordered || closed || look_is_due(news, look.begun.elapsed(), look.took, all);
        if wants {
            (self.copied, self.merged) = (copied, merged);
        }
        wants
    }
}

/// Whether a new look is due, by the age of the last and the processor time that it took, and that
/// one at `all` VMs takes.
pub(super) fn look_is_due(news: bool, age: Duration, took: Duration, all: Duration) -> bool {
    let (least, times, most) = LOOK_CALM;
    let calm = (took * times).clamp(least, most);
    age >= all * LOOK_ALL && (news && age >= calm || age >= (took * LOOK_EVERY.1).max(LOOK_EVERY.0))
}

/// An order under way, what was wrong with the last one, and what tells RAM from other memory.
#[derive(Debug, Default)]
pub(crate) struct MergeLink {
    under_way: Option<UnderWay>,
    pub error: Option<String>,
    told: Option<Told>,
    /// QEMU is not asked before this.
    ask_at: Option<Instant>,
}

/// What QEMU said of its memory backends.
#[derive(Debug)]
struct Told {
    /// The memory blocks that were there.
    blocks: Vec<Range>,
    /// `None`: its answer cannot be used.
    backends: Option<Backends>,
}

#[derive(Debug)]
struct UnderWay {
    /// `None`: QEMU is only asked for its backends.
    want: Option<bool>,
    begun: Instant,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The command that asks for the backends.
    Listing(u64),
    /// Those that QEMU has not answered.
    Setting(Vec<u64>),
    /// Since when a look is awaited.
    Looking(Instant),
}

impl MergeLink {
    /// Begins, unless an order is under way.
    pub fn order(&mut self, want: bool, client: &mut Client) {
        if !self.is_busy() {
            self.error = None;
            self.begin(Some(want), client);
        }
    }

    /// Whether it makes a difference which memory is RAM, and QEMU has not told.
    fn must_ask(&mut self, state: &KsmState) -> bool {
        // If the blocks have changed, the answer no longer holds.
        if self.told.take_if(|told| told.blocks != ranges(state)).is_some() {
            self.ask_at = None;
        }
        state.needs_backends() && self.told.is_none()
    }

    fn learn(&mut self, client: &mut Client) {
        if !self.is_busy() && self.ask_at.is_none_or(|at| at <= Instant::now()) {
            self.ask_at = Some(Instant::now() + ASK_AGAIN);
            self.begin(None, client);
        }
    }

    fn begin(&mut self, want: Option<bool>, client: &mut Client) {
        match client.protocol.send("query-memdev", None) {
            Ok(id) => {
                let (begun, step) = (Instant::now(), Step::Listing(id));
                self.under_way = Some(UnderWay { want, begun, step });
            }
            Err(e) if want.is_some() => self.error = Some(e.to_string()),
            Err(_) => {}
        }
    }

    /// What QEMU said while the same memory was there.
    fn told_of(&self, state: &KsmState) -> Option<&Told> {
        self.told.as_ref().filter(|told| told.blocks == ranges(state))
    }

    fn is_open(&self, state: &KsmState) -> bool {
        state.is_open(self.told_of(state).and_then(|told| told.backends.as_ref()))
    }

    pub fn is_busy(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether QEMU is being told to do something.
    pub fn acts(&self) -> bool {
        self.under_way.as_ref().is_some_and(|order| order.want.is_some())
    }

    /// Since when it waits for a look at the mappings.
    fn waits_for_look(&self) -> Option<Instant> {
        match self.under_way.as_ref()?.step {
            Step::Looking(since) => Some(since),
            _ => None,
        }
    }

    /// Takes what is there and goes on.
    pub fn go_on(&mut self, client: Option<&mut Client>, look: Option<&MappingsLook>) {
        let Some(mut order) = self.under_way.take() else { return };
        let Some(client) = client else {
            let lost = order.want.map(|_| "the QMP connection was lost meanwhile".into());
            return self.error = lost.or(self.error.take());
        };
        let late = order.begun.elapsed() > PATIENCE;
        let result =
            if late { Err(MergeableError::Late) } else { self.step(&mut order, client, look) };
        match result {
            Ok(true) => {}
            Ok(false) => self.under_way = Some(order),
            Err(e) => {
                order.forget(client);
                match (order.want, &e) {
                    (Some(_), _) => self.error = Some(e.to_string()),
                    (None, MergeableError::NoBackends)
                    | (None, MergeableError::Qmp(QmpError::Command { .. })) => {
                        let state = look.and_then(|look| look.state.as_ref().ok());
                        let blocks = state.map(ranges).unwrap_or_default();
                        self.told = Some(Told { blocks, backends: None });
                    }
                    (None, _) => {}
                }
            }
        }
    }

    /// Whether it is done.
    fn step(
        &mut self,
        order: &mut UnderWay,
        client: &mut Client,
        look: Option<&MappingsLook>,
    ) -> Result<bool, MergeableError> {
        match &mut order.step {
            Step::Listing(id) => {
                let Some(said) = client.protocol.take_reply(*id) else { return Ok(false) };
                let backends = Backends::parse(&said?)?;
                let paths = backends.paths.clone();
                let state = look.and_then(|look| look.state.as_ref().ok());
                if let Some(state) = state {
                    let blocks = ranges(state);
                    self.told = Some(Told { blocks, backends: Some(backends) });
                }
                let Some(want) = order.want else { return Ok(true) };
                if paths.is_empty() || want && state.is_some_and(|s| !s.can_be_open()) {
                    return Err(MergeableError::NoRam);
                }
                let set = |path: &String| qmp_balloon::set(path, "merge", json!(want));
                let one = |path| client.protocol.send("qom-set", Some(set(path)));
                order.step = Step::Setting(paths.iter().map(one).collect::<Result<_, _>>()?);
            }
            Step::Setting(ids) => {
                let mut failed = None;
                ids.retain(|id| match client.protocol.take_reply(*id) {
                    None => true,
                    Some(said) => {
                        failed = failed.take().or(said.err());
                        false
                    }
                });
                if let Some(error) = failed {
                    return Err(error.into());
                }
                if ids.is_empty() {
                    order.step = Step::Looking(Instant::now());
                }
            }
            Step::Looking(since) => {
                let Some(look) = look.filter(|look| look.begun >= *since) else { return Ok(false) };
                match &look.state {
                    Ok(state) if Some(self.is_open(state)) == order.want => return Ok(true),
                    Ok(_) => return Err(MergeableError::NoEffect),
                    Err(why) => return Err(MergeableError::NotSeen(why.clone())),
                }
            }
        }
        Ok(false)
    }
}

fn ranges(state: &KsmState) -> Vec<Range> {
    state.blocks.iter().map(|b| b.range).collect()
}

impl UnderWay {
    /// Has QEMU's answers dropped that are still to come.
    fn forget(&self, client: &mut Client) {
        let commands = match &self.step {
            Step::Listing(id) => std::slice::from_ref(id),
            Step::Setting(ids) => ids,
            Step::Looking(_) => &[],
        };
        commands.iter().for_each(|id| client.protocol.forget(*id));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use ebb_core::units::Stamp;
    use serde_json::Value;

    use super::*;
    use crate::act::vm_mergeable::MemoryBlock;
    use crate::probe::qemu::QmpAddress;
    use crate::testing::{eventually, qmp, socket};

    const RAM: u64 = 1 << 30;
    const DISPLAY: u64 = 64 << 20;

    /// What the mappings show of a VM with RAM, and with a display whose memory stays open if it is
    /// `shown`.
    fn state(open: bool, shown: bool) -> KsmState {
        let block = |start, len, open| MemoryBlock {
            range: Range { start, len },
            open,
            shared: false,
            can_be_open: true,
            merged: Bytes::ZERO,
        };
        let mut blocks = vec![block(2 * RAM, RAM, open)];
        blocks.extend(shown.then(|| block(0, DISPLAY, true)));
        KsmState { blocks }
    }

    /// What happens to a VM whose RAM is `open`. Its QEMU has one private and one shared backend:
    /// what it is told to do with its RAM shows in the mark, or not at all.
    fn with_qemu<T>(
        open: bool,
        does: bool,
        run: impl FnOnce(&mut Client, &dyn Fn() -> bool) -> T,
    ) -> T {
        let (_dir, listener, path) = socket();
        let mark = Arc::new(Mutex::new(open));
        let theirs = Arc::clone(&mark);
        let says = move |asked: &Value, _: &str| {
            Some(Ok(match asked["execute"].as_str().unwrap() {
                "query-memdev" => json!([
                    { "id": "pc.ram", "share": false, "size": RAM },
                    { "id": "other", "share": true, "size": 4096 },
                ]),
                "qom-set" => {
                    assert_eq!(asked["arguments"]["path"], "/objects/pc.ram");
                    let value = asked["arguments"]["value"].as_bool().unwrap();
                    if does {
                        *theirs.lock().unwrap() = value;
                    }
                    json!({})
                }
                _ => json!({}),
            }))
        };
        let peer = std::thread::spawn(move || qmp(listener.accept().unwrap().0, says));
        let mut client = Client::new(&path);
        let result = run(&mut client, &|| *mark.lock().unwrap());
        drop(client);
        peer.join().unwrap();
        result
    }

    fn look(state: KsmState) -> MappingsLook {
        MappingsLook { begun: Instant::now(), at: Stamp(0), took: Duration::ZERO, state: Ok(state) }
    }

    fn end(
        link: &mut MergeLink,
        client: &mut Client,
        mut each: impl FnMut(&mut MergeLink, &mut Client),
    ) {
        eventually(|| {
            client.pump();
            each(link, client);
            !link.is_busy()
        });
    }

    /// An order carried out; the mark afterwards, and the error.
    fn carried_out(want: bool, does: bool, shown: bool) -> (bool, Option<String>) {
        with_qemu(!want, does, |client, mark| {
            // From before: what it says of now does not count.
            let stale = look(state(want, shown));
            let mut link = MergeLink::default();
            link.order(want, client);
            end(&mut link, client, |link, client| {
                link.go_on(Some(client), Some(&stale));
                if link.waits_for_look().is_some() {
                    assert!(link.is_busy(), "an old look is no proof");
                    link.go_on(Some(client), Some(&look(state(mark(), shown))));
                }
            });
            (mark(), link.error)
        })
    }

    #[test]
    fn an_order_is_done_when_the_mappings_show_it_and_else_it_has_failed() {
        for (want, shown) in [(true, false), (false, false), (true, true), (false, true)] {
            assert_eq!(carried_out(want, true, shown), (want, None));
            let (open, error) = carried_out(want, false, shown);
            assert!(open != want && error.unwrap().contains("not done"));
        }
    }

    #[test]
    fn qemu_is_asked_which_memory_is_ram_where_there_is_other() {
        assert!(!MergeLink::default().must_ask(&state(true, false)), "one block is RAM");
        for open in [true, false] {
            with_qemu(open, true, |client, _| {
                let mut link = MergeLink::default();
                let there = state(open, true);
                assert!(link.must_ask(&there) && link.is_open(&there));
                link.learn(client);
                let seen = look(there.clone());
                end(&mut link, client, |link, client| link.go_on(Some(client), Some(&seen)));
                assert_eq!((link.must_ask(&there), link.is_open(&there)), (false, open));
                let mut more = there;
                more.blocks.insert(1, MemoryBlock { open: true, ..more.blocks[0] });
                more.blocks[1].range.start = RAM / 2;
                assert!(link.must_ask(&more) && link.is_open(&more), "memory was plugged in");
            });
        }
    }

    /// Its QEMU cannot tell: it is not asked again before its memory has changed.
    #[test]
    fn that_qemu_does_not_tell_which_memory_is_ram_is_no_error() {
        let (_dir, listener, path) = socket();
        let refuses = |asked: &Value, _: &str| {
            let is_asked = asked["execute"] == "query-memdev";
            Some(if is_asked { Err("no") } else { Ok(json!({})) })
        };
        let peer = std::thread::spawn(move || qmp(listener.accept().unwrap().0, refuses));
        let (mut client, there) = (Client::new(&path), state(true, true));
        let mut link = MergeLink::default();
        link.learn(&mut client);
        let seen = look(there.clone());
        end(&mut link, &mut client, |link, client| link.go_on(Some(client), Some(&seen)));
        assert_eq!((link.must_ask(&there), link.error), (false, None));
        drop(client);
        peer.join().unwrap();
        let mut link = MergeLink::default();
        link.learn(&mut Client::new("/nonexistent"));
        assert_eq!((link.is_busy(), link.error), (false, None));
    }

    /// Its display is open to KSM, and its RAM is not.
    #[test]
    fn whether_ram_is_open_is_not_known_before_qemu_has_told_which_memory_is_ram() {
        with_qemu(false, true, |client, _| {
            let seen = look(state(false, true));
            let client = std::mem::replace(client, Client::new("/nonexistent"));
            let mut vm = Vm { client: Some(client), ..Vm::default() };
            eventually(|| {
                vm.client.iter_mut().for_each(Client::pump);
                vm.usable().is_some()
            });
            assert_eq!(vm.go_on_merging(None), None, "it was not looked at");
            assert_eq!(vm.go_on_merging(Some(&seen)), None, "it is asked");
            eventually(|| {
                vm.client.iter_mut().for_each(Client::pump);
                vm.go_on_merging(Some(&seen)).is_some()
            });
            assert_eq!(vm.go_on_merging(Some(&seen)), Some(false));
        });
    }

    #[test]
    fn of_a_vm_that_is_not_asked_all_memory_counts() {
        let seen = look(state(false, true));
        let mut vm = Vm::default();
        assert_eq!(vm.go_on_merging(Some(&seen)), Some(true), "it has no socket");
        vm.process.args.qmp = QmpAddress::Paths(vec!["/nowhere/ebb".into()]);
        assert_eq!(vm.go_on_merging(Some(&seen)), None, "it is asked later");
        vm.access.hands_off_ms = Some(1_000);
        assert_eq!(vm.go_on_merging(Some(&seen)), Some(true), "it is left alone");
    }

    #[test]
    fn a_lost_connection_ends_an_order() {
        let mut link = MergeLink::default();
        link.order(true, &mut Client::new("/nonexistent"));
        assert!(!link.is_busy() && link.error.as_ref().unwrap().contains("no such socket"));
        let (begun, step) = (Instant::now(), Step::Listing(1));
        link.under_way = Some(UnderWay { want: Some(true), begun, step });
        link.go_on(None, None);
        assert!(!link.is_busy() && link.error.as_ref().unwrap().contains("was lost"));
    }
}
