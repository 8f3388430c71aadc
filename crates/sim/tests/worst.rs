//! The worst worlds that a search has found: none may become worse again.

use ebb_sim::compare::in_parallel;
use ebb_sim::search::Found;
use ebb_sim::worlds::Point;
use serde::Deserialize;

/// A world, and how much worse than the best rival Ebb was there ([`Found::loss`]).
#[derive(Deserialize)]
struct Worst {
    about: String,
    loss: f64,
    point: Point,
}

/// What the loss of one world may grow by: a share, and seconds. Where not all needs fit, an order
/// that comes some milliseconds later changes the loss of a world by up to 40 %.
const ONE: (f64, f64) = (0.5, 30.0);
/// What the loss of all of them may grow by.
const ALL: f64 = 0.05;

#[test]
fn no_world_that_a_search_found_has_become_worse() {
    let worst: Vec<Worst> = serde_json::from_str(include_str!("worst.json")).unwrap();
    assert!(worst.len() >= 8);
    let found = in_parallel(&worst, 2, |w| Found::of(&w.point));
    let (mut was, mut now) = (0.0, 0.0);
    for (w, f) in worst.iter().zip(&found) {
        assert_eq!(w.about, f.about, "the world itself has changed");
        println!("{}: {:.0} s, was {:.0}", w.about, f.loss(), w.loss);
        assert!(f.loss() <= w.loss + (w.loss * ONE.0).max(ONE.1), "{}", w.about);
        (was, now) = (was + w.loss, now + f.loss());
    }
    assert!(now <= was * (1.0 + ALL), "together {now:.0} s, were {was:.0}");
}
