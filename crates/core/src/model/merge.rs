//! What merging is decided on: the operator's wish, KSM's counters, each VM's part; and whose
//! zero pages may be freed without it.

use super::standing::unread;
use crate::config::{Config, MergeConfig, MergeMode, VmSettings};
use crate::sample::{Ksm, Link, MergeSample, RunState, Sample, ScanSample, VmSample};

/// The host's part; absent where merging is off.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergeHost {
    pub config: MergeConfig,
    /// KSM; `None` where the kernel has none.
    pub ksm: Option<Ksm>,
    pub scan: ScanSample,
}

impl MergeHost {
    pub(super) fn new(config: &Config, sample: &Sample) -> Option<MergeHost> {
        (config.merge.mode != MergeMode::Off).then(|| MergeHost {
            config: config.merge.clone(),
            ksm: sample.host.ksm,
            scan: sample.host.scan.clone().unwrap_or_default(),
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergeVm {
    /// What the configuration says of it.
    pub wanted: Option<bool>,
    /// Why it cannot be opened or closed now; `None`: it can.
    pub fixed: Option<String>,
    /// How long it has run, where that is known.
    pub age_ms: Option<u64>,
    /// What is known of it.
    pub sample: MergeSample,
}

/// Why nothing may be done to a VM's RAM now, whatever its guest says. `unmanaged`: why Ebb does not
/// act on it at all.
pub(super) fn untouchable(unmanaged: Option<String>, vm: &VmSample) -> Option<String> {
    match (&vm.link, &vm.run) {
        _ if unmanaged.is_some() => unmanaged,
        _ if unread(vm).is_some() => unread(vm),
        _ if vm.hands_off.is_some() => Some("hands off, as was asked".into()),
        (Link::Slow(w) | Link::Taken(w) | Link::Down(w), _) => Some(w.clone()),
        (Link::Unknown, _) => Some("not sampled yet".into()),
        (Link::Up, Some(RunState::Running | RunState::Paused)) => None,
        (Link::Up, Some(RunState::Migrating)) => Some("it is being migrated or saved".into()),
        (Link::Up, Some(RunState::Ended)) => Some("its guest has ended".into()),
        (Link::Up, None) => Some("its run state is not known".into()),
    }
}

/// Why a VM's zero pages stay where they are although its RAM may be touched; `None`: they may go. An
/// agent's write-protection must not be lost with a page, pinned pages cannot go, and of what is open
/// to it KSM takes care where Ebb steers it.
pub(super) fn zeros_stay(config: &Config, settings: &VmSettings, vm: &VmSample) -> Option<String> {
    let steered = config.merge.mode == MergeMode::On;
    let open = vm.merge.as_ref().and_then(|m| m.open);
    match () {
        () if !settings.zeros => Some("zeros = false in the configuration".into()),
        () if vm.agent.is_some() => Some("its agent recycles its RAM page by page".into()),
        () if vm.pinned.is_some() => vm.pinned.clone(),
        () if steered && open != Some(false) => Some(match open {
            Some(_) => "it is open to KSM, which merges them".into(),
            None => "it was not looked at yet".into(),
        }),
        () => None,
    }
}
