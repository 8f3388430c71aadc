//! Sequences of orders and looks, by the ledger alone.

use super::*;
use crate::state::{OwnedVm, VmMemory};

/// Looks at a VM of 512 MiB RAM, a second apart.
struct Look {
    ledger: Ledger,
    at: u64,
    deflates: bool,
}

impl Look {
    fn at(&mut self, ram: u64, actual: u64) -> Move {
        self.see((ram, actual), false)
    }

    /// While its guest boots.
    fn boots(&mut self, actual: u64) -> Move {
        self.see((512, actual), true)
    }

    fn see(&mut self, (ram, actual): (u64, u64), boots: bool) -> Move {
        self.at += 1000;
        let sizes = (Bytes::mib(ram), Bytes::mib(actual));
        self.ledger.observe(Stamp(self.at), sizes, self.deflates, boots)
    }

    /// It goes through these sizes by orders of Ebb, and is owed the rest of its RAM.
    fn goes(&mut self, sizes: &[u64]) {
        for actual in sizes {
            let seen = (self.at(512, *actual), self.owed(512, *actual));
            assert_eq!(seen, (Move::Own, 512 - actual), "{actual}");
        }
    }

    fn order(&mut self, to: u64) {
        self.ledger.order(Bytes::mib(512), Bytes::mib(to), true);
    }

    fn owed(&self, ram: u64, actual: u64) -> u64 {
        self.ledger.owed(Bytes::mib(ram), Bytes::mib(actual)).0 >> 20
    }
}

fn look(deflates: bool) -> Look {
    Look { ledger: Ledger::default(), at: 0, deflates }
}

/// One that was seen whole and is told to shrink.
fn told(deflates: bool, to: u64) -> Look {
    let mut l = look(deflates);
    l.at(512, 512);
    l.order(to);
    l
}

/// The same when it has shrunk.
fn taken(deflates: bool, to: u64) -> Look {
    let mut l = told(deflates, to);
    l.at(512, to);
    l
}

#[test]
fn what_ebb_ordered_is_owed_however_far_it_has_come() {
    let mut l = look(true);
    l.at(512, 512);
    assert!(!l.ledger.owes());
    l.order(300);
    assert!(l.ledger.owes(), "it may go there any moment");
    l.goes(&[512, 450, 301, 300]);
    l.order(512);
    l.goes(&[300, 400, 512]);
    assert!(!l.ledger.owes());
}

/// The driver was on its way when the new order came.
#[test]
fn a_balloon_that_goes_on_a_while_after_a_new_order_leaves_the_debt() {
    let mut l = told(false, 300);
    l.at(512, 400);
    l.order(464);
    l.goes(&[350, 320, 360, 440, 464]);
    // It has turned: what goes back there now is another's order.
    assert_eq!([l.at(512, 310), l.at(512, 310)], [Move::Own, Move::Foreign]);
}

/// The guest deflates its balloon beyond an order, and its driver comes back to that order.
#[test]
fn an_older_order_that_the_driver_comes_back_to_leaves_the_debt() {
    let own = |l: &mut Look, sizes: &[u64]| {
        l.goes(sizes);
        assert!(l.ledger.owes());
    };
    // A size from before the next order is told after it.
    let mut l = told(true, 143);
    own(&mut l, &[143]);
    assert_eq!(l.at(512, 298), Move::Shrank);
    l.order(331);
    assert_eq!(l.at(512, 366), Move::Shrank);
    l.order(377);
    own(&mut l, &[372, 366, 366, 377, 377]);

    // Two orders come without a look between them.
    let mut l = told(true, 331);
    own(&mut l, &[331]);
    assert_eq!(l.at(512, 420), Move::Shrank);
    l.order(475);
    l.order(500);
    own(&mut l, &[410, 405, 475, 500, 500]);

    // The second order is refused later.
    let mut l = told(true, 331);
    own(&mut l, &[331]);
    assert_eq!(l.at(512, 400), Move::Shrank);
    l.ledger.order(Bytes::mib(512), Bytes::mib(440), false);
    own(&mut l, &[405, 395, 395, 360, 331]);

    // A guest that does not deflate is on its way down when the order is turned around.
    let mut l = told(false, 300);
    own(&mut l, &[500]);
    l.order(464);
    own(&mut l, &[480, 440, 450, 464, 464]);
    assert_eq!([l.at(512, 400), l.at(512, 400)], [Move::Own, Move::Foreign], "it has arrived");
}

#[test]
fn a_size_that_ebb_did_not_order_is_the_operators() {
    for deflates in [false, true] {
        // Small when first seen, then raised.
        let mut l = look(deflates);
        l.at(512, 174);
        assert_eq!((l.owed(512, 174), l.ledger.owes()), (0, false));
        let seen = [l.at(512, 300), l.at(512, 300), l.at(512, 512), l.at(512, 512)];
        assert!(seen.contains(&if deflates { Move::Shrank } else { Move::Foreign }));
        assert_eq!(l.ledger.others, Some(Bytes::ZERO));
        // And lowered again: nothing is owed.
        let seen = [l.at(512, 200), l.at(512, 200)];
        assert_eq!(seen, [Move::Own, Move::Foreign], "believed when it stays");
        assert_eq!((l.owed(512, 200), l.ledger.owes()), (0, false));
        let left = l.ledger.left_ms(Stamp(l.at + 1000));
        assert_eq!(left, Some(FOREIGN_MS - 1000));
        // What Ebb takes from there on is owed, and no more.
        l.order(150);
        l.at(512, 150);
        assert_eq!(l.owed(512, 150), 50);
    }
}

#[test]
fn an_operators_order_ends_a_debt_and_a_guest_that_helps_itself_does_not() {
    let mut l = taken(false, 174);
    assert_eq!([l.at(512, 300), l.at(512, 300)], [Move::Own, Move::Foreign]);
    assert_eq!((l.owed(512, 300), l.ledger.owes()), (0, false));
    let mut l = taken(true, 174);
    assert_eq!(l.at(512, 190), Move::Shrank);
    assert_eq!((l.owed(512, 190), l.ledger.owes()), (322, true));
    assert_eq!((l.at(512, 174), l.owed(512, 174)), (Move::Own, 338), "back to the order");
}

#[test]
fn a_driver_that_starts_anew_unheard_leaves_the_debt() {
    let mut l = taken(false, 174);
    let _ = [511, 400, 300, 200].map(|actual| l.at(512, actual));
    assert_eq!((l.at(512, 174), l.owed(512, 174)), (Move::Own, 338));
    assert_eq!((l.ledger.ordered, l.ledger.left_ms(Stamp(l.at))), (Some(Bytes::mib(338)), None));
    // Much later the same size is an operator's.
    let mut l = taken(false, 174);
    let _ = [400, 400].map(|actual| l.at(512, actual));
    l.at += RESTART_MS;
    assert_eq!([l.at(512, 174), l.at(512, 174)], [Move::Own, Move::Foreign]);
    assert_eq!(l.owed(512, 174), 0);
}

#[test]
fn plugged_memory_moves_nothing_also_between_two_answers() {
    let mut l = taken(false, 400);
    assert_eq!((l.at(1024, 912), l.owed(1024, 912)), (Move::Own, 112));
    // The size is told with the memory that was plugged, RAM without.
    assert_eq!(l.at(1024, 1424), Move::Own);
    assert_eq!((l.at(1536, 1424), l.owed(1536, 1424)), (Move::Own, 112));
    assert_eq!((l.at(512, 400), l.owed(512, 400)), (Move::Own, 112));
}

#[test]
fn a_driver_that_starts_anew_orders_nothing() {
    let mut l = look(false);
    l.at(512, 300);
    assert_eq!([l.boots(512), l.boots(400), l.boots(300)], [Move::Own; 3]);
    assert_eq!([l.at(512, 300), l.at(512, 300)], [Move::Own; 2]);
    assert_eq!(l.ledger.others, Some(Bytes::mib(212)));
}

/// Its guest lacks memory for a while.
#[test]
fn a_driver_that_pauses_on_its_way_to_what_was_ordered_leaves_the_debt() {
    let mut l = look(false);
    l.at(512, 300);
    l.order(230);
    l.at(512, 230);
    assert_eq!([l.boots(512), l.boots(350)], [Move::Own; 2]);
    assert_eq!([l.at(512, 350), l.at(512, 350)], [Move::Own, Move::Foreign]);
    assert_eq!((l.at(512, 230), l.owed(512, 230)), (Move::Own, 70));
}

#[test]
fn a_balloon_that_still_grows_when_its_vm_arrives_leaves_the_debt() {
    let mut l = look(true);
    l.ledger = Ledger::noted(Stamp(0), Bytes::ZERO);
    l.goes(&[400, 350, 300, 300]);
    l.order(512);
    assert_eq!((l.at(512, 450), l.owed(512, 450)), (Move::Own, 62));
    // Much later such a move is another's.
    let mut l = look(true);
    l.ledger = Ledger::noted(Stamp(0), Bytes::ZERO);
    l.at(512, 400);
    l.at += RESTART_MS;
    assert_eq!([l.at(512, 300), l.at(512, 300)], [Move::Own, Move::Foreign]);
}

#[test]
fn a_size_that_raised_by_others_while_a_driver_started_is_the_operators() {
    for (deflates, ordered) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut l = look(deflates);
        l.at(512, 159);
        // Ebb took a part and gave it back.
        for to in [100, 159].into_iter().filter(|_| ordered) {
            l.order(to);
            l.at(512, to);
        }
        assert_eq!([512, 400, 320, 320].map(|actual| l.boots(actual)), [Move::Own; 4]);
        assert_eq!([l.at(512, 320), l.at(512, 320)], [Move::Own, Move::Foreign]);
        let whole = l.ledger.whole(Bytes::mib(512));
        assert_eq!((whole, l.ledger.owes()), (Some(Bytes::mib(320)), false));
        assert_eq!(l.at(512, 320), Move::Own);
    }
}

/// As after a crash: the next daemon has what was written down and nothing else.
fn next_daemon(l: &mut Look) {
    let model = VmMemory { ledger: l.ledger, ..VmMemory::default() };
    l.ledger = OwnedVm::new(&model, &l.ledger).ledger();
}

#[test]
fn what_was_being_given_when_the_daemon_died_leaves_the_debt() {
    // Given in part, given once more, and given back as a whole.
    for orders in [&[464][..], &[400, 464], &[512]] {
        let mut l = look(false);
        for actual in [512, 300] {
            l.at(512, actual);
            l.order(300);
        }
        orders.iter().for_each(|to| l.order(*to));
        next_daemon(&mut l);
        let end = *orders.last().unwrap();
        for actual in [310, 350, 400, end, end] {
            assert_eq!((l.at(512, actual), l.owed(512, actual)), (Move::Own, 512 - actual));
            assert_eq!(l.ledger.owes(), actual < 512);
        }
    }
}

/// What lies between the size that it had and the one that Ebb ordered can be an order of
/// Ebb's under way: it is given rather too much.
#[test]
fn a_size_that_an_operator_set_while_no_daemon_ran_is_theirs_where_it_cannot_be_ebbs() {
    for (set, owed) in [(200, 0), (300, 212), (400, 112), (512, 0)] {
        let mut l = taken(false, 300);
        next_daemon(&mut l);
        l.at(512, set);
        let moved = l.at(512, set);
        assert_eq!((moved == Move::Foreign, l.owed(512, set)), (set == 200, owed), "{set}");
        assert_eq!(l.ledger.owes(), set != 200, "{set}");
    }
    // Larger than it was without Ebb.
    let mut l = look(false);
    l.at(512, 400);
    l.order(300);
    next_daemon(&mut l);
    assert_eq!([l.at(512, 512), l.at(512, 512)], [Move::Own, Move::Foreign]);
    assert_eq!((l.owed(512, 512), l.owed(512, 450)), (0, 62));
}

#[test]
fn an_order_stays_owed_until_one_that_takes_it_back_was_answered() {
    let mut l = told(false, 300);
    l.at(512, 512);
    // Its guest is paused; what takes the order back is lost.
    l.ledger.order(Bytes::mib(512), Bytes::mib(512), false);
    l.at(512, 512);
    assert!(l.ledger.owes(), "QEMU may have the first order only");
    next_daemon(&mut l);
    l.at(512, 512);
    assert!(l.ledger.owes());
    assert_eq!((l.at(512, 300), l.owed(512, 300)), (Move::Own, 212), "it runs again");
    l.order(512);
    l.at(512, 512);
    assert!(!l.ledger.owes());
}

#[test]
fn what_an_older_version_wrote_down_is_owed() {
    let mut ledger = Ledger { baseline: Some(Bytes::mib(512)), ..Ledger::default() };
    assert!(ledger.owes());
    assert_eq!(ledger.whole(Bytes::mib(512)), Some(Bytes::mib(512)));
    ledger.observe(Stamp(1), (Bytes::mib(512), Bytes::mib(174)), true, false);
    assert_eq!(ledger.owed(Bytes::mib(512), Bytes::mib(174)), Bytes::mib(338));
}
