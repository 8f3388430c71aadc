//! Gives VMs their memory back, and does not rest before they have it.
//!
//! For a daemon that ends and for `ebb release`. A VM is done when its balloon is seen at the
//! size that it is owed, or when its process is proven to have ended. Everything else, a QEMU
//! that does not answer, a guest that does not follow, a file that cannot be read, is tried
//! again until the time is up, and then named with its reason. No VM is ever made smaller.

use std::time::{Duration, Instant};

use ebb_core::memory::OwnedVm;
use ebb_core::sample::{Link, RunState, Sample, VmSample};
use ebb_core::units::Bytes;
use ebb_host::linux::LinuxHost;
use ebb_host::probe::process::{Life, life};
use ebb_host::root::Root;

/// Between two looks.
const ROUND: Duration = Duration::from_millis(200);
/// An order that a guest has not followed by then is sent again.
const AGAIN: Duration = Duration::from_secs(5);
/// A size is seen within this.
const NEAR: Bytes = Bytes::mib(1);

/// What could not be given back, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// What stays owed.
    pub vm: OwnedVm,
    /// For people.
    pub why: String,
}

/// Gives back until all have what they are owed or the time is up; each is asked at least
/// once. `say` hears of each order and each end. Returns what is still owed.
pub fn give_back(
    host: &mut LinuxHost,
    owed: &[OwnedVm],
    until: Instant,
    say: &mut dyn FnMut(&str),
) -> Vec<Left> {
    let mut debts: Vec<Debt> = owed.iter().map(Debt::new).collect();
    let mut first = true;
    loop {
        let sample = host.sample();
        debts.retain_mut(|debt| !debt.is_settled(&sample, life_of(&debt.vm), say));
        if debts.is_empty() || Instant::now() >= until && !first {
            return debts.into_iter().map(|d| Left { vm: d.vm, why: d.why }).collect();
        }
        first = false;
        order(host, &mut debts, say);
        host.wait(until.min(Instant::now() + ROUND));
    }
}

fn life_of(vm: &OwnedVm) -> Life {
    life(&Root::default(), vm.id)
}

/// Sends what is due, all at once.
fn order(host: &mut LinuxHost, debts: &mut [Debt], say: &mut dyn FnMut(&str)) {
    let now = Instant::now();
    let mut due: Vec<&mut Debt> = debts.iter_mut().filter(|d| d.is_due(now)).collect();
    let orders: Vec<_> = due.iter().filter_map(|d| Some((d.vm.id, d.goal?.1))).collect();
    for (debt, result) in due.iter_mut().zip(host.set_balloons(&orders)) {
        debt.ordered(now, result.map_err(|e| e.to_string()), say);
    }
}

/// The size a VM is to have again; `None` where that cannot be told yet.
fn whole(entry: &OwnedVm, vm: &VmSample) -> Option<Bytes> {
    // What was unplugged meanwhile cannot come back.
    Some(vm.ram.map_or(entry.baseline, |ram| entry.baseline.min(ram)))
}

/// One VM on its way.
#[derive(Debug)]
struct Debt {
    vm: OwnedVm,
    /// Its size when it was last seen, and the one it is to have.
    goal: Option<(Bytes, Bytes)>,
    /// The size that QEMU was told, and when.
    told: Option<(Bytes, Instant)>,
    /// It was said what is ordered.
    said: bool,
    why: String,
}

impl Debt {
    fn new(vm: &OwnedVm) -> Debt {
        Debt { vm: vm.clone(), goal: None, told: None, said: false, why: String::new() }
    }

    /// Takes in what is seen of it; whether nothing is owed any more.
    fn is_settled(&mut self, sample: &Sample, life: Life, say: &mut dyn FnMut(&str)) -> bool {
        let (id, name) = (self.vm.id, &self.vm.name);
        self.goal = None;
        let vm = match (sample.vms.iter().find(|v| v.id == id), life) {
            (_, Life::Ended) => {
                say(&format!("{name}: its process has ended"));
                return true;
            }
            (None, _) => {
                self.why = format!("its process {} is there, but no VM is seen in it", id.pid);
                return false;
            }
            (Some(vm), _) => vm,
        };
        let size = vm.balloon.as_ref().map(|b| b.actual);
        let (Some(size), Some(to)) = (size, whole(&self.vm, vm)) else {
            self.why = unheard(&vm.link);
            return false;
        };
        if size + NEAR >= to {
            say(&format!("{name}: has {size}"));
            return true;
        }
        self.goal = Some((size, to));
        if self.told.is_some_and(|(told, _)| told == to) {
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
            Err(why) => (self.told, self.why) = (None, why),
        }
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
    use ebb_core::sample::{BalloonSample, VmId};

    const GIB: Bytes = Bytes::gib(1);

    fn debt() -> Debt {
        let id = VmId { pid: 7, start: 9 };
        Debt::new(&OwnedVm { id, name: "a".into(), baseline: GIB })
    }

    fn seen(size: Option<Bytes>, link: Link) -> Sample {
        let vm = VmSample {
            id: VmId { pid: 7, start: 9 },
            link,
            run: Some(RunState::Running),
            balloon: size.map(|actual| BalloonSample { actual, ..BalloonSample::default() }),
            ..VmSample::default()
        };
        Sample { vms: vec![vm], ..Sample::default() }
    }

    fn settled(debt: &mut Debt, sample: &Sample, life: Life) -> bool {
        debt.is_settled(sample, life, &mut |_| ())
    }

    #[test]
    fn a_debt_ends_with_the_memory_or_with_the_process_and_by_nothing_else() {
        let down = seen(None, Link::Down("refused".into()));
        for (sample, life, done, why) in [
            (seen(Some(GIB), Link::Up), Life::Alive, true, ""),
            (seen(Some(GIB - NEAR), Link::Up), Life::Alive, true, ""),
            (seen(Some(GIB + GIB), Link::Up), Life::Unknown, true, ""),
            (down.clone(), Life::Ended, true, ""),
            (Sample::default(), Life::Ended, true, ""),
            (seen(Some(Bytes::mib(174)), Link::Up), Life::Alive, false, ""),
            (down, Life::Alive, false, "refused"),
            (seen(None, Link::Up), Life::Alive, false, "QEMU has not told its balloon's size"),
            (Sample::default(), Life::Alive, false, "its process 7 is there, but no VM is seen"),
            (Sample::default(), Life::Unknown, false, "its process 7 is there, but no VM is seen"),
        ] {
            let mut debt = debt();
            assert_eq!(settled(&mut debt, &sample, life), done, "{sample:?} {life:?}");
            assert!(debt.why.starts_with(why), "{}", debt.why);
        }
    }

    #[test]
    fn memory_that_was_unplugged_is_not_waited_for() {
        let mut sample = seen(Some(Bytes::mib(768)), Link::Up);
        sample.vms[0].ram = Some(Bytes::mib(768));
        assert!(settled(&mut debt(), &sample, Life::Alive));
    }

    #[test]
    fn an_order_is_sent_once_again_after_a_while_and_at_once_where_it_failed() {
        let (mut debt, now) = (debt(), Instant::now());
        let small = seen(Some(Bytes::mib(174)), Link::Up);
        assert!(!debt.is_due(now), "nothing is ordered of a VM that was not seen");
        settled(&mut debt, &small, Life::Alive);
        assert!(debt.is_due(now));
        debt.ordered(now, Err("it said no".into()), &mut |_| ());
        assert!(debt.is_due(now) && debt.why == "it said no");
        debt.ordered(now, Ok(()), &mut |_| ());
        assert!(!debt.is_due(now) && debt.is_due(now + AGAIN));
        settled(&mut debt, &small, Life::Alive);
        assert_eq!(debt.why, "has 174 MiB, was ordered 1 GiB: its guest does not follow");
        let mut paused = small.clone();
        paused.vms[0].run = Some(RunState::Paused);
        settled(&mut debt, &paused, Life::Alive);
        assert!(debt.why.ends_with("the VM is paused"), "{}", debt.why);
    }
}
