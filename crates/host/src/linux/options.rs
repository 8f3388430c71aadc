//! What the host is to be watched with.

use std::path::PathBuf;
use std::time::Duration;

use ebb_core::config::Config;

use crate::probe::trust::Trust;
use crate::root::Root;

#[derive(Clone, Debug)]
pub struct Options {
    pub root: Root,
    /// Seconds between QEMU's questions to a guest, at least 1.
    pub stats_interval_s: u64,
    /// How long all VMs together may take to answer in a tick.
    pub deadline: Duration,
    /// Stall and window of the PSI trigger, microseconds; `None` for no trigger.
    pub psi_trigger_us: Option<(u32, u32)>,
    /// Where it is written down what KSM's knobs were; `None`: merging is off.
    pub ksm_note: Option<PathBuf>,
    pub config: Config,
    /// Nothing is set in any QEMU: for commands and dry runs that only look.
    pub look_only: bool,
    pub trust: Trust,
    /// How often `/proc` is scanned for new VMs; at once when one vanishes.
    pub scan_every: Duration,
    /// Where it is written down which VMs are left alone at the operator's request.
    pub hands_off: Option<PathBuf>,
    /// Where it is written down how often QEMU asked guests for statistics before.
    pub intervals: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            root: Root::default(),
            stats_interval_s: 2,
            deadline: Duration::from_millis(200),
            psi_trigger_us: Some((100_000, 1_000_000)),
            ksm_note: None,
            config: Config::default(),
            look_only: false,
            trust: Trust::default(),
            scan_every: Duration::from_secs(2),
            hands_off: None,
            intervals: None,
        }
    }
}
