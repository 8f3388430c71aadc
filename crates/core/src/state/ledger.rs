//! Who ordered what of a balloon: the part that Ebb ordered, which is owed to the VM, and the part
//! that the operator or another tool ordered, which is theirs.
//!
//! All sizes here are what the balloon holds: RAM less the VM's size. So plugged memory
//! moves nothing. What others ordered is remembered; what is owed is what the balloon
//! holds beyond that, at any moment, however far an order has come.
//!
//! A balloon that moves towards Ebb's last order moves by that order. So does one that moves
//! towards an earlier order until the balloon has turned from that: a guest that deflates on its
//! way may come back, and what the first look tells may be older than the order. Any other move is
//! another's: then its new size is the operator's, and nothing is owed. One exception: a guest with
//! `deflate-on-oom` may shrink its balloon itself, which cannot be told from an order to grow, so
//! there the VM is still owed the memory. Where the guest's statistics show that it was an order, a
//! later move back is another's.
//!
//! A driver that starts again deflates the balloon, and then follows QEMU's last target.
//! Where no event told of the reset, that looks like orders of another. When the
//! balloon is back at Ebb's last order soon after, it was no order: the debt holds again.
//!
//! A daemon that dies leaves what others ordered, its last order, and the most that the balloon
//! may hold by earlier ones. To the next daemon any move within that is Ebb's own, and a size
//! outside of it was ordered by others.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Stamp};

/// How long a VM is left alone after the operator or another tool has set its size.
pub const FOREIGN_MS: u64 = 600_000;
/// A driver that starts anew is back at its target within this.
const RESTART_MS: u64 = 120_000;
/// A balloon that grew when its VM arrived is there within this.
const ARRIVES_MS: u64 = 10_000;
/// Smaller moves are none: most drivers tell their size in whole MiB.
const LEAST: Bytes = Bytes::mib(1);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ledger {
    /// What the balloon holds that Ebb did not order; `None`: never seen.
    pub others: Option<Bytes>,
    /// What QEMU was last told that the balloon shall hold: by Ebb, or by others who raised a size.
    pub ordered: Option<Bytes>,
    /// The largest of the orders before that which it may still follow, until it has turned.
    pub(super) prior: Option<Bytes>,
    /// Nothing was seen of it since the last order. What the next look tells may be older.
    pub(super) unseen: bool,
    /// The most that it may come to hold by orders of Ebb's before that, until it is seen where
    /// the last one sent it.
    pub(super) most: Option<Bytes>,
    /// QEMU may not have the last order: its answer was lost.
    pub(super) unsure: bool,
    /// The size that an older version of Ebb wrote down as owed.
    pub baseline: Option<Bytes>,
    /// RAM and what the balloon held when it was last looked at.
    pub seen: Option<(Bytes, Bytes)>,
    /// A move that Ebb did not order was seen once. It counts when it is still there at the
    /// next look: RAM and size are two answers of QEMU, and memory may be plugged between.
    pub suspect: bool,
    /// When another than Ebb last set the size.
    pub foreign: Option<Stamp>,
    /// When it was begun from a note: the balloon may still grow by an order of the Ebb before.
    pub(super) noted: Option<Stamp>,
    /// When it was first looked at, or heard, with an earlier daemon's order that may be under way.
    pub(super) adopted: Option<Stamp>,
    /// What held before another seemed to shrink the balloon, and when that was.
    pub(super) before: Option<Before>,
    /// What others had ordered before the balloon shrank at the last look: RAM may be told later.
    pub(super) lowered: Option<Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Before {
    at: Stamp,
    others: Bytes,
    ordered: Bytes,
    /// Its guest has not been heard since: its driver may be gone.
    #[serde(default)]
    unheard: bool,
}

/// What a look at a balloon showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Nothing, or what Ebb ordered.
    Own,
    /// Another than Ebb set the size.
    Foreign,
    /// The balloon shrank without an order: by the guest itself, or by another.
    Shrank,
}

impl Ledger {
    /// Takes in the VM's RAM and size. `deflates`: its guest may shrink the balloon itself.
    /// `boots`: a new kernel's driver takes up the old target, so its moves follow no new order.
    pub fn observe(
        &mut self,
        at: Stamp,
        (ram, actual): (Bytes, Bytes),
        deflates: bool,
        boots: bool,
    ) -> Move {
        let now = ram - actual;
        let plugged = self.seen.is_some_and(|(was, _)| was != ram);
        // The size of the last look was told with the plugged memory, and RAM without.
        self.others = self.lowered.take().filter(|_| plugged).or(self.others);
        let first = || self.baseline.map_or(now, |b| ram - b);
        let others = *self.others.get_or_insert_with(first);
        self.baseline = None;
        if self.restore_after_restart(at, now) {
            return Move::Own;
        }
        if self.seen.is_none() && self.ordered.is_some() {
            self.adopted = Some(at);
        }
        let unseen = std::mem::take(&mut self.unseen);
        let first = (ram, self.expected(now));
        let (_, was) = *self.seen.get_or_insert(first);
        self.arrive(was, now);
        // A driver that boots goes no further than QEMU's last order.
        let told = others.max(self.ordered.max(self.most).unwrap_or_default());
        let boots = boots && now < told + LEAST;
        let still = was.abs_diff(now) < LEAST;
        // One that stays short of every order was ordered less by others while its guest booted.
        let orders = [Some(others), self.ordered, self.prior];
        let told_less = orders.into_iter().flatten().all(|told| now + LEAST <= told);
        self.noted = self.noted.filter(|noted| at.since(*noted) < ARRIVES_MS);
        let arrives = now > was && self.noted.is_some();
        if now + LEAST <= was {
            self.noted = None;
        }
        let own = if still { !told_less } else { self.is_ordered(was, now) };
        if boots || arrives || own {
            let turned = |to: Bytes| {
                let left = to.abs_diff(now);
                left < LEAST || left + LEAST <= to.abs_diff(was)
            };
            if !unseen && !self.unsure && self.ordered.is_some_and(turned) {
                self.prior = None;
            }
            (self.seen, self.suspect) = (Some((ram, now)), false);
            // Others have given it all its memory while no daemon ran: its guest has not followed
            // an earlier daemon's order all this time.
            if self.adopted.is_some_and(|t| at.since(t) >= ARRIVES_MS) {
                self.adopted = None;
                if still && now < others + LEAST {
                    self.raised_by_others(at);
                }
            }
            return Move::Own;
        }
        let shrank = deflates && now < was && !still;
        if !shrank && !std::mem::replace(&mut self.suspect, true) {
            return Move::Own;
        }
        (self.seen, self.suspect) = (Some((ram, now)), false);
        if shrank {
            (self.others, self.lowered) = (Some(others.min(now)), Some(others));
            return Move::Shrank;
        }
        if let Some(ordered) = self.ordered.filter(|_| now < was || still) {
            self.before = Some(Before { at, others, ordered, unheard: false });
        }
        let Ledger { seen, before, .. } = *self;
        *self = Ledger { others: Some(now), foreign: Some(at), seen, before, ..Ledger::default() };
        Move::Foreign
    }

    /// An operator shrank the balloon, and not its guest, as it turned out: so a move back towards
    /// Ebb's last order is another's. A driver that starts anew may still follow that.
    pub(super) fn raised_by_others(&mut self, at: Stamp) {
        let (Some(others), Some(ordered), Some((_, now))) = (self.others, self.ordered, self.seen)
        else {
            return;
        };
        if now + LEAST <= ordered {
            self.before = Some(Before { at, others, ordered, unheard: false });
            self.most = self.most.max(self.ordered);
            (self.ordered, self.prior, self.unsure) = (Some(now), None, true);
        }
    }

    /// Its guest does not run, or is not heard: what its driver has to do, it does later.
    pub(super) fn wait(&mut self, at: Stamp) {
        self.noted.iter_mut().chain(&mut self.adopted).for_each(|since| *since = at);
        self.before.iter_mut().for_each(|b| (b.at, b.unheard) = (at, true));
    }

    /// What the balloon may come to hold by Ebb's last order. A driver that is gone takes it up
    /// when it starts anew.
    pub(super) fn target(&self) -> Option<Bytes> {
        self.ordered.max(self.before.filter(|b| b.unheard).map(|b| b.ordered))
    }

    /// Of a VM that arrived with this note.
    pub(super) fn noted(at: Stamp, others: Bytes) -> Ledger {
        Ledger { others: Some(others), noted: Some(at), ..Ledger::default() }
    }

    /// Whether nothing is known of the balloon yet.
    pub(super) fn is_new(&self) -> bool {
        self.others.is_none() && self.baseline.is_none()
    }

    /// What a balloon that is seen for the first time holds by orders of an earlier daemon: as
    /// near to what it holds as those allow. The difference was ordered by others.
    fn expected(&self, now: Bytes) -> Bytes {
        let (Some(others), Some(ordered), Some(most)) = (self.others, self.ordered, self.most)
        else {
            return now;
        };
        now.clamp(others.min(ordered), most.max(ordered).max(others))
    }

    /// Where the last order sent it, no earlier one is followed any more.
    fn arrive(&mut self, was: Bytes, now: Bytes) {
        let Some(to) = self.ordered.filter(|to| to.abs_diff(now) < LEAST) else { return };
        if !self.unsure || was.abs_diff(to) >= LEAST {
            (self.most, self.unsure) = (None, false);
        }
    }

    /// Restores what was owed where the balloon is back at Ebb's last order after what looked like
    /// another's; whether it is.
    fn restore_after_restart(&mut self, at: Stamp, now: Bytes) -> bool {
        self.before = self.before.filter(|b| at.since(b.at) < RESTART_MS);
        let Some(b) = self.before.filter(|b| b.ordered.abs_diff(now) < LEAST) else { return false };
        let seen = self.seen.map(|(ram, _)| (ram, now));
        *self =
            Ledger { others: Some(b.others), ordered: Some(b.ordered), seen, ..Ledger::default() };
        true
    }

    /// Whether this move leads to what Ebb ordered, or ordered before, and not beyond.
    fn is_ordered(&self, was: Bytes, now: Bytes) -> bool {
        self.ordered.is_some_and(|to| {
            let prior = self.prior.unwrap_or(to);
            let (low, high) = (was.min(to).min(prior), was.max(to).max(prior));
            now + LEAST > low && now < high + LEAST
        })
    }

    /// Takes in that QEMU has the order for this size, or may have it if it did not answer.
    pub fn order(&mut self, ram: Bytes, to: Bytes, answered: bool) {
        let to = ram - to;
        let held = self.seen.map(|(_, held)| held);
        self.most = self.most.max(self.ordered).max(held).filter(|most| *most > to);
        self.unsure = !answered;
        // A second order on the way to the first one leaves that where it is.
        if self.ordered.is_some_and(|o| o.abs_diff(to) >= LEAST) {
            let arrived = |o: &Bytes| self.seen.is_some_and(|(_, b)| b.abs_diff(*o) < LEAST);
            self.prior = self.ordered.filter(|o| !arrived(o)).max(self.prior);
        }
        (self.ordered, self.adopted, self.before) = (Some(to), None, None);
        self.unseen = true;
    }

    /// The size that the VM has without Ebb.
    pub fn whole(&self, ram: Bytes) -> Option<Bytes> {
        self.others.map(|others| ram - others).or(self.baseline.map(|b| b.min(ram)))
    }

    /// What Ebb has taken and not given back yet, at this size.
    pub fn owed(&self, ram: Bytes, actual: Bytes) -> Bytes {
        self.whole(ram).map_or(Bytes::ZERO, |whole| whole - actual)
    }

    /// Whether something may be owed: the balloon holds, or may be going to hold, more than
    /// what others ordered.
    pub fn owes(&self) -> bool {
        let more = |b: Bytes| self.others.is_some_and(|o| b >= o + LEAST);
        self.baseline.is_some()
            || self.target().max(self.most).is_some_and(more)
            || self.seen.map_or(self.others.is_some(), |(_, b)| more(b))
    }

    /// How much longer it is left alone because another than Ebb has set its size.
    pub fn left_ms(&self, at: Stamp) -> Option<u64> {
        let left = self.foreign.map(|t| FOREIGN_MS.saturating_sub(at.since(t)));
        left.filter(|left| *left > 0)
    }
}

#[cfg(test)]
mod tests;
