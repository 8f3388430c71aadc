//! Whether a VM may be acted upon, and why not.
//!
//! The order of the reasons is what users are told: the first that holds. A reason that
//! forbids giving too is [`Standing::Off`], one that only forbids taking
//! [`Standing::GiveOnly`].

use serde::{Deserialize, Serialize};

use super::guest::is_disbelieved;
use super::{STALE_MS, VmModel};
use crate::config::{Config, Metadata, VmSettings};
use crate::sample::{Claim, Link, RunState, VmSample};
use crate::state::VmMemory;
use crate::units::Stamp;

/// A balloon moves, and not by an order of Ebb.
pub const MOVED: &str = "its size has changed, not by Ebb's order";

/// Whether a VM can be acted upon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "why")]
pub enum Standing {
    /// Both ways.
    Ready,
    /// It may be given memory, but not be asked for any: why.
    GiveOnly(String),
    /// It is given nothing either: why.
    Off(String),
    /// Nothing is known of it yet.
    #[default]
    Unknown,
}

impl Standing {
    /// Why it is not [`Standing::Ready`].
    pub fn why(&self) -> &str {
        match self {
            Standing::Ready => "",
            Standing::GiveOnly(w) | Standing::Off(w) => w,
            Standing::Unknown => "not sampled yet",
        }
    }
}

/// Why Ebb does not act on a VM at all, by the configuration.
pub(super) fn left_alone(config: &Config, settings: &VmSettings, vm: &VmSample) -> Option<String> {
    match &vm.claim {
        Claim::Refused(why) => Some(format!(
            "it calls itself “{}”, and is not the VM of that section of the configuration: {why}; \
             correct the section, or start the VM under another name",
            vm.given_name()
        )),
        _ => match &vm.metadata {
            Metadata::Wrong(why) => Some(why.clone()),
            Metadata::Says(its) if its.manage == Some(false) && settings.own.manage.is_none() => {
                Some("manage = no in its libvirt metadata".into())
            }
            _ if !settings.manage => Some("manage = false in the configuration".into()),
            _ => (vm.through_libvirt && !config.libvirt)
                .then(|| "host.libvirt = false in the configuration".into()),
        },
    }
}

/// Why nothing is taken from a VM whose settings may still be others.
pub(super) fn unread(vm: &VmSample) -> Option<String> {
    match (&vm.claim, &vm.metadata) {
        (Claim::Unread(why), _) => {
            Some(format!("whether it is the VM of its section is not known yet: {why}"))
        }
        (_, Metadata::Unread(why)) => Some(format!("its libvirt metadata is not read yet: {why}")),
        _ => None,
    }
}

/// Whether the VM can be acted upon; the first reason against it is told.
pub(super) fn standing(
    left_alone: Option<String>,
    vm: &VmSample,
    model: &VmModel,
    m: &VmMemory,
    at: Stamp,
) -> Standing {
    let off = |why: &str| Standing::Off(why.to_string());
    let give_only = |why: String| Standing::GiveOnly(why);
    if let Some(why) = left_alone {
        return Standing::Off(why);
    }
    match &vm.link {
        Link::Up | Link::Slow(_) => {}
        Link::Taken(w) | Link::Down(w) => return off(w),
        Link::Unknown => return Standing::Unknown,
    }
    if vm.balloon.is_none() {
        return match &vm.link {
            Link::Slow(why) => off(why),
            _ => off("it has no virtio balloon that answers"),
        };
    }
    if let Some(h) = vm.hands_off {
        return give_only(format!(
            "hands off for {} s more, as was asked: only given what it needs",
            h.left_ms.div_ceil(1000)
        ));
    }
    if let Some(why) = unread(vm) {
        return give_only(why);
    }
    match vm.run {
        Some(RunState::Running) => {}
        Some(RunState::Migrating) => {
            return give_only("it is being migrated or saved: only given what it needs".into());
        }
        Some(RunState::Ended) => return off("its guest has ended"),
        Some(RunState::Paused) => return give_only("it is paused: its guest cannot shrink".into()),
        None => return off("its run state is not known"),
    }
    let slow = match &vm.link {
        Link::Slow(why) => Some(format!("QEMU is slow to answer: {why}")),
        _ => None,
    };
    let disbelieved = model.guest.is_some() && model.trust.level <= 0.0;
    let seconds = |ms: Option<u64>| ms.map(|ms| ms.div_ceil(1000)).filter(|left| *left > 0);
    let seconds_to = |until: Option<Stamp>| seconds(until.map(|until| until.since(at)));
    let whys = [
        // What is given late does no harm; what is taken late does.
        slow,
        vm.ram
            .is_none()
            .then(|| "what RAM it has is not known: nor is what it would be owed".into()),
        vm.no_room.clone().map(|why| format!("its balloon is left alone: {why}")),
        m.reboot.map(|_| "it rebooted: its size is not known yet".into()),
        seconds_to(m.settle_until).map(|s| format!("it rebooted: left alone for {s} s more")),
        disbelieved.then(|| format!("its numbers are not believed: {}", model.trust.why)),
        m.is_moved(at).then(|| MOVED.into()),
        seconds(m.ledger.left_ms(at)).map(|s| {
            format!("its size was set, not by Ebb: left alone for {s} s unless it is short")
        }),
        seconds_to(m.stuck_until)
            .map(|s| format!("it did not follow its last order: asked again in {s} s")),
        seconds_to(m.refused_until)
            .map(|s| format!("QEMU or libvirt refused an order to shrink: asked again in {s} s")),
        seconds(m.contact.left_ms(at))
            .map(|s| format!("it was not heard for a while: not asked for {s} s")),
    ];
    if let Some(why) = whys.into_iter().flatten().next() {
        return give_only(why);
    }
    if model.guest.is_none() {
        return give_only(match vm.guest_stats() {
            None => "its guest sends no statistics: no balloon driver, or not up yet".into(),
            Some(s) if s.age_ms > STALE_MS && s.available.or(s.free).is_some() => {
                format!("its guest's statistics are {} s old", s.age_ms / 1000)
            }
            Some(_) => "its guest does not tell what memory it has available".into(),
        });
    }
    Standing::Ready
}

/// Whether a VM that could be acted upon has no balloon that brings anything.
pub(super) fn beyond_balloon(vm: &VmSample, m: &VmMemory, at: Stamp) -> bool {
    let is_left = |until: Option<Stamp>| until.is_some_and(|until| until > at);
    let stuck = is_left(m.stuck_until) || is_left(m.refused_until);
    let no_statistics = vm.balloon.as_ref().is_none_or(|b| b.guest.is_none());
    let runs = vm.link == Link::Up && vm.run == Some(RunState::Running) && !m.boots(at);
    runs && (no_statistics || stuck || is_disbelieved(m))
}
