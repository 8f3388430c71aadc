//! What the host is to be watched with.

use std::path::PathBuf;
use std::time::Duration;

use ebb_core::config::Config;

use crate::act::ksm::Manners;
use crate::probe::trust::Trust;
use crate::root::Root;

/// What the configuration says of the host's surroundings.
#[derive(Clone, Debug)]
pub struct Options {
    pub root: Root,
    /// QMP sockets beside those on command lines, with the name of the VM.
    pub sockets: Vec<(String, PathBuf)>,
    /// Only VMs of these names, or `uuid:` and their uuid, are looked at; `None`: all.
    pub only: Option<Vec<String>>,
    /// Seconds between QEMU's questions to a guest, at least 1.
    pub stats_interval_s: u64,
    /// How long all VMs together may take to answer in a tick.
    pub deadline: Duration,
    /// The cgroup to take as pool instead of the one found.
    pub pool: Option<String>,
    /// Stall and window of the PSI trigger, microseconds; `None` for no trigger.
    pub psi_trigger_us: Option<(u32, u32)>,
    /// Where merging is not off.
    pub merge: Option<MergeOptions>,
    pub zeros: bool,
    /// Which VMs are managed, and which sockets are Ebb's.
    pub config: Config,
    /// Nothing is set in any QEMU: for commands and dry runs that only look.
    pub look_only: bool,
    pub trust: Trust,
    /// How often `/proc` is scanned for new VMs; at once when one vanishes.
    pub scan_every: Duration,
    /// Where it is written down which VMs are left alone at the operator's word.
    pub hands_off: Option<PathBuf>,
    /// Where it is written down how often QEMU asked guests for statistics before.
    pub intervals: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub struct MergeOptions {
    /// Where what KSM's knobs were is written down.
    pub note: PathBuf,
    /// What is left alone of what moves pages, and what is not.
    pub manners: Manners,
    /// KSM is steered (else VMs are only scanned).
    pub steer: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            root: Root::default(),
            sockets: Vec::new(),
            only: None,
            stats_interval_s: 2,
            deadline: Duration::from_millis(200),
            pool: None,
            psi_trigger_us: Some((100_000, 1_000_000)),
            merge: None,
            zeros: false,
            config: Config::default(),
            look_only: false,
            trust: Trust::default(),
            scan_every: Duration::from_secs(2),
            hands_off: None,
            intervals: None,
        }
    }
}
