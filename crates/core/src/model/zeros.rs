//! Which VMs' zero pages may be freed without help of their guests.

use super::merge::untouchable;
use crate::config::{Config, MergeMode};
use crate::sample::VmSample;

/// Why a VM's stay where they are; `None`: they may go. An agent's write-protection
/// must not be lost with a page, pinned pages cannot go, and of what is open to it KSM
/// takes care where Ebb steers it.
pub(super) fn stay(config: &Config, vm: &VmSample) -> Option<String> {
    let settings = &config.settings_of(vm);
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
        () => untouchable(config, settings, vm),
    }
}
