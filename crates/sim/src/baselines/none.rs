//! Nobody: every guest keeps what it was given.

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{Policy, Sight};

/// Never sets a balloon.
pub struct Nobody;

impl Policy for Nobody {
    fn period_ms(&self) -> u64 {
        10_000
    }

    fn decide(&mut self, _: &Sight<'_>) -> Vec<(VmId, Bytes)> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::{ask, sample};

    #[test]
    fn nobody_does_nothing_however_short_the_host_is() {
        assert_eq!(ask(&mut Nobody, &sample(1000, 0, &[(1000, 1000, 900, 0)])), []);
    }
}
