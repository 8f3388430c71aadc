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

/// Losses differ by so much between controllers that are as good: a share, and seconds.
const SAME: (f64, f64) = (0.1, 10.0);

#[test]
fn no_world_that_a_search_found_has_become_worse() {
    let worst: Vec<Worst> = serde_json::from_str(include_str!("worst.json")).unwrap();
    assert!(worst.len() >= 8);
    let found = in_parallel(&worst, 2, |w| Found::of(&w.point));
    for (was, now) in worst.iter().zip(&found) {
        assert_eq!(was.about, now.about, "the world itself has changed");
        let most = was.loss + (was.loss * SAME.0).max(SAME.1);
        assert!(now.loss() <= most, "{}: {:.0} s, was {:.0}", was.about, now.loss(), was.loss);
    }
}
