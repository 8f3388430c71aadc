//! The law: *owed = taken − returned*, as the state file says it, at any moment.
//!
//! What Ebb's orders took of a VM, or may take yet, is what its size lacks to the size that
//! others gave it last. Where that is anything, the state file names the VM and leads back to
//! exactly that size. The truth is the stand-in's, the file's is what is on disk.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ebb_core::state::OwnedVm;
use ebb_lab::Background;

use super::place::{MIB, Order, Peer, Place, Standin, Truth, parse_owned};
use super::*;

/// Between two looks.
const ROUND: Duration = Duration::from_millis(3);

/// What is wrong with the state file's word on a VM that has `whole` by others' orders.
pub fn breach(truth: &Truth, whole: u64, entry: Option<&OwnedVm>) -> Option<String> {
    let ordered = truth.waiting.iter().copied().min().unwrap_or(truth.target).min(truth.target);
    let least = truth.size.min(truth.told).min(ordered);
    let taken = whole.saturating_sub(least) / MIB;
    let Some(entry) = entry else {
        return (taken > 0)
            .then(|| format!("{taken} MiB are or may be taken, and not written down"));
    };
    let leads_to = entry.whole(Bytes(truth.ram)).0;
    if leads_to.abs_diff(whole) >= MIB {
        return Some(format!("{} MiB are owed to it, not {}", leads_to / MIB, whole / MIB));
    }
    let is_seen = whole.saturating_sub(truth.told) >= MIB;
    // A new kernel's balloon is moved by one MiB and back, to hear of it.
    (taken > 1 && !is_seen && !entry.is_ordered())
        .then(|| format!("an order to take {taken} MiB is on its way, and not written down"))
}

/// What was wrong with the file when an order came.
pub fn breach_at_order(order: &Order, truth: &Truth, whole: u64) -> Option<String> {
    let (size, told, target, waiting) = (order.told, order.told, order.to, Vec::new());
    let then = Truth { size, told, target, waiting, ..truth.clone() };
    breach(&then, whole, order.owned.as_ref())
        .map(|why| format!("an order to {} MiB came when {why}", order.to / MIB))
}

/// The sizes of which one is what others gave each VM, by pid: while Ebb may not have seen
/// yet that somebody set another, the one before counts as well.
type Wholes = Arc<Mutex<HashMap<u32, Vec<u64>>>>;

/// Looks at all stand-ins and the state file all the time.
pub struct Watch {
    wholes: Wholes,
    found: Arc<Mutex<Vec<String>>>,
    thread: Background<u64>,
}

impl Watch {
    pub fn start<'a>(place: &Place, vms: impl IntoIterator<Item = &'a Standin>) -> Watch {
        let peers: Vec<Peer> = vms.into_iter().map(|vm| Peer::clone(vm)).collect();
        let sizes = peers.iter().map(|vm| (vm.pid, vec![vm.truth().size]));
        let wholes = Arc::new(Mutex::new(sizes.collect::<HashMap<_, _>>()));
        let found = Arc::new(Mutex::new(Vec::new()));
        let look = Look {
            file: place.state_file(),
            wholes: wholes.clone(),
            orders: HashMap::new(),
            found: found.clone(),
        };
        let thread = Background::start(move |quit| look.go_on(&peers, quit));
        Watch { wholes, found, thread }
    }

    /// Somebody else sets a VM's size; [`Watch::seen`] says when Ebb has seen that.
    pub fn whole(&self, vm: &Peer, size: u64) {
        self.wholes.lock().unwrap().get_mut(&vm.pid).unwrap().push(size);
    }

    pub fn seen(&self, vm: &Peer) {
        let mut wholes = self.wholes.lock().unwrap();
        let sizes = wholes.get_mut(&vm.pid).unwrap();
        sizes.drain(..sizes.len() - 1);
    }

    /// The sizes of which one is what others gave it last.
    pub fn wholes_of(&self, vm: &Peer) -> Vec<u64> {
        self.wholes.lock().unwrap()[&vm.pid].clone()
    }

    /// The size that others gave it last.
    pub fn whole_of(&self, vm: &Peer) -> u64 {
        self.wholes_of(vm).pop().unwrap()
    }

    /// What was found to be wrong so far.
    pub fn found(&self) -> Vec<String> {
        self.found.lock().unwrap().clone()
    }

    pub fn check(&self) {
        let found = self.found();
        assert!(found.is_empty(), "the law was broken:\n{}", found.join("\n"));
    }

    /// Ends it: how many looks there were.
    pub fn end(&mut self) -> u64 {
        let looks = self.thread.end();
        self.check();
        looks
    }
}

struct Look {
    file: PathBuf,
    wholes: Wholes,
    /// How many orders of each were checked.
    orders: HashMap<u32, usize>,
    found: Arc<Mutex<Vec<String>>>,
}

impl Look {
    fn go_on(mut self, peers: &[Peer], quit: &AtomicBool) -> u64 {
        let mut looks = 0;
        while !quit.load(Ordering::SeqCst) {
            for peer in peers {
                looks += u64::from(self.at(peer));
            }
            std::thread::sleep(ROUND);
            // One leads to the next.
            if !self.found.lock().unwrap().is_empty() {
                break;
            }
        }
        looks
    }

    /// Compares the truth with what the file said before and after; where that differs it
    /// says nothing of the moment.
    fn at(&mut self, peer: &Peer) -> bool {
        let file = self.file.clone();
        let read = || std::fs::read(&file).unwrap_or_default();
        let wholes = self.wholes.lock().unwrap()[&peer.pid].clone();
        let before = read();
        let truth = peer.truth();
        if self.wholes.lock().unwrap()[&peer.pid] != wholes {
            return false;
        }
        let mut found = self.at_orders(peer, &truth, &wholes);
        let moment = before == read();
        if moment {
            match parse_owned(&before) {
                Err(why) => found.push(why),
                Ok(owned) => {
                    let entry = owned.vms.iter().find(|v| v.id.pid == peer.pid);
                    found.extend(all_breached(&wholes, truth.ram, entry, |w| {
                        breach(&truth, w, entry)
                    }));
                }
            }
        }
        let text = String::from_utf8_lossy(&before);
        let say =
            |why| format!("{}: {why}\n{truth:?}\nothers gave it {wholes:?}\n{text}", peer.name);
        self.found.lock().unwrap().extend(found.into_iter().map(say));
        moment
    }

    /// Each order is checked once.
    fn at_orders(&mut self, peer: &Peer, truth: &Truth, wholes: &[u64]) -> Vec<String> {
        let checked = self.orders.insert(peer.pid, truth.orders.len()).unwrap_or(0);
        let new = truth.orders.iter().skip(checked);
        let check = |o: &Order| {
            all_breached(wholes, truth.ram, o.owned.as_ref(), |w| breach_at_order(o, truth, w))
        };
        new.filter_map(check).collect()
    }
}

/// A breach where there is one whichever size others gave it; until Ebb has seen the last of
/// them, any on the way there.
fn all_breached(
    wholes: &[u64],
    ram: u64,
    entry: Option<&OwnedVm>,
    check: impl Fn(u64) -> Option<String>,
) -> Option<String> {
    let said = entry.map(|e| e.whole(Bytes(ram)).0);
    let between = |w: &u64| wholes.iter().any(|a| a <= w) && wholes.iter().any(|a| a >= w);
    let all = wholes.iter().copied().chain(said.filter(between));
    all.map(check).collect::<Option<Vec<_>>>()?.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn entry(others: u64, ordered: Option<u64>) -> OwnedVm {
        let (others, ordered) = (Some(Bytes(others)), ordered.map(Bytes));
        OwnedVm { others, ordered, ..OwnedVm::default() }
    }

    fn truth(size: u64, target: u64) -> Truth {
        Truth { ram: GIB, size, told: size, target, ..Truth::default() }
    }

    fn broken(truth: &Truth, whole: u64, entry: Option<&OwnedVm>) -> bool {
        breach(truth, whole, entry).is_some()
    }

    #[test]
    fn a_world_in_which_a_debt_is_forgotten_or_wrong_breaks_the_law() {
        let taken = truth(GIB / 2, GIB / 2);
        let right = entry(0, Some(GIB / 2));
        assert!(!broken(&taken, GIB, Some(&right)));
        assert!(broken(&taken, GIB, None), "forgotten");
        assert!(broken(&taken, GIB, Some(&entry(MIB, None))), "leads to less");
        assert!(broken(&taken, GIB - MIB, Some(&right)), "leads to more");
        assert!(!broken(&taken, GIB / 2, None), "others gave it no more");
        assert!(broken(&taken, GIB / 2, Some(&right)), "what others took is not Ebb's");
    }

    #[test]
    fn an_order_that_is_on_its_way_counts_as_taken() {
        let ordered = truth(GIB, GIB / 2);
        assert!(broken(&ordered, GIB, None));
        assert!(broken(&ordered, GIB, Some(&entry(0, None))));
        assert!(!broken(&ordered, GIB, Some(&entry(0, Some(GIB / 2)))));
        let waiting = Truth { waiting: vec![GIB / 2], ..truth(GIB, GIB) };
        assert!(broken(&waiting, GIB, None));
        let reset = Truth { told: GIB / 2, ..truth(GIB, GIB) };
        assert!(broken(&reset, GIB, None), "QEMU still says so");
    }

    #[test]
    fn an_order_is_to_find_itself_written_down() {
        let at_rest = truth(GIB, GIB);
        let order = |to, owned| Order { to, told: GIB, owned };
        let breach = |o| breach_at_order(&o, &at_rest, GIB).is_some();
        assert!(breach(order(GIB / 2, None)));
        assert!(breach(order(GIB / 2, Some(entry(0, None)))));
        assert!(breach(order(GIB / 2, Some(entry(MIB, Some(GIB / 2))))));
        assert!(!breach(order(GIB / 2, Some(entry(0, Some(GIB / 2))))));
        assert!(!breach(order(GIB, None)), "it only gives");
    }
}
