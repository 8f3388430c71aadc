//! The automatic ballooning of 2013: the host's vmpressure events inflate, each
//! guest's shrinker deflates.
//!
//! At most one event a second and VM is heeded, and of several the worst: low
//! inflates by 1 MiB, medium by 2, critical by 4. Deflating is the guest's: its
//! driver registers a shrinker that gives 128 pages a call while the guest reclaims.
//! The original has no floor; here it keeps the same as all.

use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{Observation, Policy};
use crate::host::VmPressure;

/// The prototype.
pub struct AutoBalloon;

impl Policy for AutoBalloon {
    fn decide(&mut self, observation: &Observation<'_>) -> Vec<(VmId, Bytes)> {
        let step = match observation.vmpressure {
            None => return Vec::new(),
            Some(VmPressure::Low) => Bytes::mib(1),
            Some(VmPressure::Medium) => Bytes::mib(2),
            Some(VmPressure::Critical) => Bytes::mib(4),
        };
        let able = observation.guests().into_iter().filter(|g| g.actual > g.min);
        able.map(|g| (g.id, (g.actual - step).max(g.min))).collect()
    }

    fn shrinker(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::testing::sample;
    use ebb_core::config::Config;

    #[test]
    fn each_level_inflates_every_guest_by_its_step() {
        let s = sample(1000, 0, &[(1000, 1000, 0, 0), (1000, 251, 0, 0), (1000, 250, 0, 0)]);
        let config = Config::default();
        let sizes = |vmpressure| {
            let observation = Observation { sample: &s, config: &config, vmpressure };
            AutoBalloon.decide(&observation).iter().map(|o| o.1.0 >> 20).collect::<Vec<_>>()
        };
        assert!(sizes(None).is_empty());
        assert_eq!(sizes(Some(VmPressure::Low)), [999, 250]);
        assert_eq!(sizes(Some(VmPressure::Medium)), [998, 250]);
        assert_eq!(sizes(Some(VmPressure::Critical)), [996, 250]);
    }
}
