//! Gives VMs their memory back: tries again until they have it or the time is up.
//!
//! For a daemon that ends and for `ebb release`. A VM is done when its balloon is seen at the
//! size that it is owed, or when its process is proven to have ended. Everything else, a QEMU
//! that does not answer, a guest that does not follow, a file that cannot be read, is tried
//! again until the time is up, and then named with its reason. No VM is ever made smaller.

use std::time::{Duration, Instant};

use ebb_core::sample::{Link, RunState, Sample, VmId};
use ebb_core::state::{Owned, OwnedVm};
use ebb_core::units::Bytes;
use ebb_host::linux::{BalloonOrder, LinuxHost};

use crate::log::say;
use crate::state::StateFile;

/// Between two looks.
const ROUND: Duration = Duration::from_millis(200);
/// QEMU has this time to answer an order. A VM whose order is not answered stays owed.
const ANSWER: Duration = Duration::from_secs(1);
/// An order that a guest has not followed by then is sent again.
const AGAIN: Duration = Duration::from_secs(5);
/// A VM that lacks less than this has all: less is not owed, as in the ledger.
const NEAR: Bytes = Bytes::mib(1);

/// Gives back until all have what they are owed or the time is up; each is asked at least once.
/// What is owed once all were asked is written to `state`: a process killed after that leaves
/// balloons that move as it told them. Returns what is still owed, and why.
pub fn give_back(
    host: &mut LinuxHost,
    owed: &Owned,
    patience: Duration,
    mut state: Option<&mut StateFile>,
) -> (Vec<OwnedVm>, Vec<String>) {
    let until = Instant::now() + patience;
    let mut debts: Vec<Debt> = owed.vms.iter().map(Debt::new).collect();
    let mut first = true;
    loop {
        let ids: Vec<VmId> = debts.iter().map(|d| d.vm.id).collect();
        let sample = host.sample_owed(&ids);
        debts.iter_mut().for_each(|debt| debt.done_late(host.done_late(debt.vm.id)));
        debts.retain_mut(|debt| !debt.observe(&sample, &mut say));
        let still_owed = debts.iter().map(|d| d.vm.given_back()).collect();
        if debts.is_empty() || Instant::now() >= until && !first {
            let whys = debts.iter().map(|d| format!("{}: {}", d.vm.name, d.why)).collect();
            return (still_owed, whys);
        }
        order(host, &mut debts);
        first = false;
        if let Some(state) = state.take() {
            let _ = state.write(&Owned { vms: still_owed, ..owed.clone() });
        }
        host.wait(until.min(Instant::now() + ROUND));
    }
}

fn order(host: &mut LinuxHost, debts: &mut [Debt]) {
    let now = Instant::now();
    let mut due: Vec<&mut Debt> = debts.iter_mut().filter(|d| d.is_due(now)).collect();
    let order = |d: &&mut Debt| Some(BalloonOrder { vm: d.vm.id, to: d.goal?.1, gives: true });
    let orders: Vec<BalloonOrder> = due.iter().filter_map(order).collect();
    for (debt, result) in due.iter_mut().zip(host.set_balloons(&orders, ANSWER)) {
        debt.ordered(now, result.map_err(|e| e.to_string()), &mut say);
    }
}

#[derive(Debug, Default)]
struct Debt {
    vm: OwnedVm,
    /// Its size when it was last seen, and the one it is to have.
    goal: Option<(Bytes, Bytes)>,
    /// The size that QEMU was told, and when.
    told: Option<(Bytes, Instant)>,
    /// The size of an order that QEMU did not answer in time, and when it was sent.
    unanswered: Option<(Bytes, Instant)>,
    /// It was said what is ordered.
    said: bool,
    why: String,
}

impl Debt {
    fn new(vm: &OwnedVm) -> Debt {
        Debt { vm: vm.clone(), ..Debt::default() }
    }

    /// Takes in what is seen of it; whether nothing is owed any more.
    fn observe(&mut self, sample: &Sample, say: &mut dyn FnMut(&str)) -> bool {
        let (id, name) = (self.vm.id, &self.vm.name);
        self.goal = None;
        if sample.ended.contains(&id) {
            say(&format!("{name}: its process has ended"));
            return true;
        }
        let Some(vm) = sample.vms.iter().find(|v| v.id == id) else {
            self.why = format!("its process {} is there, but no VM is seen in it", id.pid);
            return false;
        };
        let size = vm.balloon.as_ref().map(|b| b.actual);
        let (Some(size), Some(ram)) = (size, vm.ram) else {
            self.why = unheard(&vm.link);
            return false;
        };
        // Never smaller than it is: another program may have given it more.
        let whole = self.vm.whole(ram).max(size);
        // A driver that starts and is to hold nothing writes no size, and QEMU would go on showing
        // the old one. So a guest that may be booting gets all but the last part first.
        let first = size < whole - NEAR && vm.run == Some(RunState::Running);
        let to = if first { whole - NEAR } else { whole };
        // QEMU may still have the order to make it smaller: a guest that was paused would
        // follow that one when it runs.
        let told = self.told.is_some_and(|(told, _)| told == to);
        if !first && size + NEAR > to && (told || !self.vm.is_ordered()) {
            say(&format!("{name}: has {size}"));
            return true;
        }
        self.goal = Some((size, to));
        if told {
            let why = match vm.run {
                Some(RunState::Paused) => "the VM is paused",
                Some(RunState::Migrating) => "the VM is being migrated",
                Some(RunState::Ended) => "its guest has ended, its QEMU has not",
                Some(RunState::Running) | None => "its guest does not follow",
            };
            self.why = format!("has {size}, was ordered {to}: {why}");
        }
        false
    }

    fn is_due(&self, now: Instant) -> bool {
        let on_its_way =
            |to| self.told.is_some_and(|(told, at)| told == to && now.duration_since(at) < AGAIN);
        self.goal.is_some_and(|(_, to)| !on_its_way(to))
    }

    fn ordered(&mut self, now: Instant, result: Result<(), String>, say: &mut dyn FnMut(&str)) {
        let Some((from, to)) = self.goal else { return };
        match result {
            Ok(()) => {
                self.told = Some((to, now));
                if !std::mem::replace(&mut self.said, true) {
                    say(&format!("{}: {from} → {to}", self.vm.name));
                }
            }
            Err(why) => (self.told, self.unanswered, self.why) = (None, Some((to, now)), why),
        }
    }

    /// QEMU has carried out an order of this size and answered late: a QEMU that takes longer than
    /// [`ANSWER`] for each order would never be done otherwise.
    fn done_late(&mut self, size: Option<Bytes>) {
        let late = self.unanswered.filter(|(to, _)| Some(*to) == size);
        self.told = self.told.or(late);
    }
}

fn unheard(link: &Link) -> String {
    match link {
        Link::Slow(why) | Link::Taken(why) | Link::Down(why) => why.clone(),
        Link::Up | Link::Unknown => "QEMU has not told its balloon's size".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::{BalloonSample, VmSample};

    const GIB: Bytes = Bytes::gib(1);
    const ID: VmId = VmId { pid: 7, start: 9 };

    fn debt() -> Debt {
        let others = Some(Bytes::ZERO);
        Debt::new(&OwnedVm { id: ID, name: "a".into(), others, ..OwnedVm::default() })
    }

    fn seen(size: Option<Bytes>, link: Link) -> Sample {
        let vm = VmSample {
            id: ID,
            link,
            ram: Some(GIB),
            run: Some(RunState::Running),
            balloon: size.map(|actual| BalloonSample { actual, ..BalloonSample::default() }),
            ..VmSample::default()
        };
        Sample { vms: vec![vm], ..Sample::default() }
    }

    fn settled(debt: &mut Debt, sample: &Sample) -> bool {
        debt.observe(sample, &mut |_| ())
    }

    #[test]
    fn a_debt_ends_with_the_memory_or_with_the_process_and_by_nothing_else() {
        let ended = |sample: Sample| Sample { ended: vec![ID], ..sample };
        let down = seen(None, Link::Down("refused".into()));
        for (sample, done, why) in [
            (seen(Some(GIB), Link::Up), true, ""),
            (seen(Some(GIB - NEAR + Bytes(1)), Link::Up), true, ""),
            (seen(Some(GIB - NEAR), Link::Up), false, ""),
            (seen(Some(GIB + GIB), Link::Up), true, ""),
            (ended(down.clone()), true, ""),
            (ended(Sample::default()), true, ""),
            (seen(Some(Bytes::mib(174)), Link::Up), false, ""),
            (down, false, "refused"),
            (seen(None, Link::Up), false, "QEMU has not told its balloon's size"),
            (Sample::default(), false, "its process 7 is there, but no VM is seen"),
        ] {
            let mut debt = debt();
            assert_eq!(settled(&mut debt, &sample), done, "{sample:?}");
            assert!(debt.why.starts_with(why), "{}", debt.why);
        }
    }

    /// It was given more while no daemon ran, and QEMU may still have the order to shrink.
    #[test]
    fn a_vm_that_has_more_than_it_is_owed_is_told_its_size_and_done() {
        let mut debt = debt();
        debt.vm.others = Some(Bytes::mib(256));
        debt.vm.ordered = Some(Bytes::mib(500));
        assert!(!settled(&mut debt, &seen(Some(GIB), Link::Up)));
        assert_eq!(debt.goal, Some((GIB, GIB)));
        debt.ordered(Instant::now(), Ok(()), &mut |_| ());
        assert!(settled(&mut debt, &seen(Some(GIB), Link::Up)));
    }

    #[test]
    fn what_others_ordered_stays_and_memory_that_was_unplugged_is_not_waited_for() {
        let mut debt = debt();
        debt.vm.others = Some(Bytes::mib(256));
        assert!(settled(&mut debt, &seen(Some(Bytes::mib(768)), Link::Up)));
        let mut sample = seen(Some(Bytes::mib(512)), Link::Up);
        assert!(!settled(&mut debt, &sample));
        sample.vms[0].ram = Some(Bytes::mib(768));
        assert!(settled(&mut debt, &sample));
        let mut old = super::tests::debt();
        (old.vm.others, old.vm.baseline) = (None, Some(Bytes::mib(900)));
        assert!(settled(&mut old, &seen(Some(Bytes::mib(900)), Link::Up)), "an older version's");
    }

    #[test]
    fn the_last_part_is_not_forgotten_where_little_is_owed() {
        let mut debt = debt();
        let near = seen(Some(GIB - NEAR - Bytes::kib(512)), Link::Up);
        for to in [GIB - NEAR, GIB - NEAR] {
            assert!(!settled(&mut debt, &near));
            assert_eq!(debt.goal.map(|goal| goal.1), Some(to));
            debt.ordered(Instant::now(), Ok(()), &mut |_| ());
        }
    }

    #[test]
    fn an_order_to_shrink_that_was_not_followed_yet_is_taken_back() {
        let (mut debt, now) = (debt(), Instant::now());
        debt.vm.ordered = Some(Bytes::mib(500));
        let whole = seen(Some(GIB), Link::Up);
        assert!(!settled(&mut debt, &whole) && debt.is_due(now));
        debt.ordered(now, Ok(()), &mut |_| ());
        assert!(settled(&mut debt, &whole));
    }

    #[test]
    fn an_order_is_sent_once_again_after_a_while_and_at_once_where_it_failed() {
        let (mut debt, now) = (debt(), Instant::now());
        let small = seen(Some(Bytes::mib(174)), Link::Up);
        assert!(!debt.is_due(now), "nothing is ordered of a VM that was not seen");
        settled(&mut debt, &small);
        assert!(debt.is_due(now));
        debt.ordered(now, Err("it said no".into()), &mut |_| ());
        assert!(debt.is_due(now) && debt.why == "it said no");
        debt.ordered(now, Ok(()), &mut |_| ());
        assert!(!debt.is_due(now) && debt.is_due(now + AGAIN));
        settled(&mut debt, &small);
        assert_eq!(debt.why, "has 174 MiB, was ordered 1023 MiB: its guest does not follow");
        settled(&mut debt, &seen(Some(GIB - NEAR), Link::Up));
        assert_eq!(debt.goal, Some((GIB - NEAR, GIB)), "the rest");
        let mut paused = small.clone();
        paused.vms[0].run = Some(RunState::Paused);
        settled(&mut debt, &paused);
        assert_eq!(debt.goal, Some((Bytes::mib(174), GIB)), "nothing starts in it now");
        debt.ordered(now, Ok(()), &mut |_| ());
        settled(&mut debt, &paused);
        assert!(debt.why.ends_with("the VM is paused"), "{}", debt.why);
    }
}
