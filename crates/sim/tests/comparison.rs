//! Ebb against its rivals, on a part of what `ebb sim --compare` runs.

use ebb_sim::compare::compare;
use ebb_sim::{Contestant, SCENARIOS};

const SEEDS: u64 = 3;

#[test]
fn ebb_harms_fewest_guests_stalls_them_least_and_kills_nobody() {
    let result = compare(&SCENARIOS, SEEDS, 2);
    let of = |c: Contestant| &result.all.iter().find(|s| s.0 == c).unwrap().1;
    let ebb = of(Contestant::Ebb);
    assert_eq!(ebb.ooms, 0);
    for (c, rival) in result.all.iter().filter(|s| s.0 != Contestant::Ebb) {
        assert!(ebb.held > rival.held, "{}: {} held, Ebb {}", c.name(), rival.held, ebb.held);
        assert!(ebb.stall_s < rival.stall_s, "{}: {} s", c.name(), rival.stall_s);
    }
    assert_eq!(result.losses(), []);
    assert!(result.broken.is_empty(), "{}: {}", result.broken[0].0, result.broken[0].1);
}
