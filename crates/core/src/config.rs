//! Configuration: the few settings an operator may want, checked as a whole.
//!
//! TOML in, [`Config`] out, or a [`ConfigError`] that names file, line, field
//! and what is allowed. Nothing is half-applied: one bad field refuses the file.
//! Every field has a default, so an empty file is a valid one.

mod metadata;
mod read;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::policy::merge::Settings;
use crate::units::Bytes;

pub use metadata::{Metadata, NAMESPACE, Overrides};
pub use read::{milliseconds, sizeable};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Milliseconds between ticks while nothing is ballooned and the host is clear.
    pub tick_ms: u64,
    /// Milliseconds between ticks while anything is ballooned or the host is short.
    pub fast_tick_ms: u64,
    /// Unix socket of the HTTP interface.
    pub socket: String,
    /// Loopback address and port of the HTTP interface, off unless set.
    pub listen: Option<String>,
    /// Where what was taken from whom is written down, to survive a crash.
    pub state_file: String,
    /// Memory the host keeps for itself; `None`: [`crate::model::default_reserve`].
    pub reserve: Option<Bytes>,
    /// The cgroup whose usage is shown, below the cgroup mount; its limit counts in `ebb plan` also
    /// while no VM is in it. `None`: the one with the tightest limit that most VMs are in.
    pub pool: Option<String>,
    /// Only VMs that have a section of their own are looked at at all; the others'
    /// QMP sockets are left to others.
    pub listed_only: bool,
    /// Which QMP sockets are connected to.
    pub sockets: SocketUse,
    /// VMs without such a socket are reached through libvirt, where that manages them.
    pub libvirt: bool,
    /// Users whose QEMU processes are VMs, beside those that are always.
    pub users: Vec<User>,
    /// QEMU programs in other places than packages put them; absolute paths.
    pub programs: Vec<String>,
    /// QEMU processes in other pid namespaces are VMs too.
    pub containers: bool,
    /// Whether cold memory may be paged out to the host's swap when the host is
    /// hard or critical; `None`: where there is swap.
    pub offload: Option<bool>,
    pub merge: MergeConfig,
    /// What holds for VMs that have no section of their own.
    pub defaults: VmSettings,
    /// Settings by VM name (`-name`), or by `uuid:` and the `-uuid` in small letters.
    pub vms: BTreeMap<String, VmSettings>,
}

/// Which QMP sockets are connected to: QEMU serves one client on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketUse {
    /// Those whose file name contains `ebb`, and those that the configuration names.
    Own,
    /// Those, and the sockets of known managers. Ebb is connected to the latter only while it has
    /// commands under way.
    #[default]
    Known,
    /// Any on a VM's command line. Ebb is connected to those without `ebb` in the file name only
    /// while it has commands under way.
    Shared,
    /// Any on a VM's command line. Ebb stays connected, but not to those of known managers.
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum User {
    Uid(u32),
    /// By name, as `/etc/passwd` has it.
    Name(String),
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Uid(uid) => uid.fmt(f),
            User::Name(name) => f.write_str(name),
        }
    }
}

/// What the agent inside a VM's QEMU may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentUse {
    /// It gives free pages back.
    #[default]
    On,
    /// It reads what is free and tells, and touches nothing.
    Observe,
    /// It is not spoken to.
    Off,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeMode {
    /// Nothing is read and KSM is left as it is.
    #[default]
    Off,
    /// VMs' memory is scanned and what merging would bring is told.
    Report,
    On,
}

/// Merging, as the operator wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MergeConfig {
    pub mode: MergeMode,
    /// The share group that is merged on this host; `None`: the only one there is.
    pub group: Option<String>,
    pub across_groups: bool,
    /// Budget and least profit.
    pub settings: Settings,
    /// Time between scans, milliseconds.
    pub scan_ms: u64,
    /// The speed of `ksmd` is left to the kernel's advisor.
    pub advisor: bool,
    /// khugepaged is kept from undoing merges while KSM is steered.
    pub hold_khugepaged: bool,
    /// Zero pages of VMs that are not merged may be freed.
    pub zeros: bool,
}

impl Default for MergeConfig {
    fn default() -> MergeConfig {
        MergeConfig {
            mode: MergeMode::Off,
            group: None,
            across_groups: false,
            settings: Settings::default(),
            scan_ms: 600_000,
            advisor: false,
            hold_khugepaged: false,
            zeros: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmSettings {
    /// Whether Ebb may act on it at all.
    pub manage: bool,
    /// The floor: a guest that has this much or less is never asked.
    pub min: Amount,
    /// The ceiling; `None`: its RAM.
    pub max: Option<Amount>,
    /// How much its memory is worth against others': with twice the weight it may hold twice as
    /// much idle memory. 0.001 to 1000.
    pub weight: f64,
    /// Share group (tenants); merging never crosses groups.
    pub group: String,
    /// QMP socket, where it cannot be found from the process's command line.
    pub qmp: Option<String>,
    /// Whether it is open to KSM; `None`: as QEMU was started, and with an agent open.
    pub merge: Option<bool>,
    /// Whether its zero pages may be freed, where that is done.
    pub zeros: bool,
    pub agent: AgentUse,
    /// The operator has said that no other process writes to RAM that QEMU shares.
    pub private_ram: bool,
    /// A window of protection that took longer has the agent stand aside, ms.
    pub window_limit_ms: Option<u64>,
    /// What a VM must be beside its name to have this section.
    pub identity: Identity,
    /// What the VM's own section sets: a manager's metadata does not override it.
    pub own: Overrides,
}

/// What a VM must be to have a section. A QEMU that its guest has taken over may change its name
/// and uuid; the host sets its user and cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    pub user: Option<User>,
    /// Its `-uuid`, in small letters.
    pub uuid: Option<String>,
    /// A memory cgroup that it is in, or below; as in `/proc/PID/cgroup`.
    pub cgroup: Option<String>,
}

impl Identity {
    /// Something is asked for that the VM itself cannot change.
    pub fn is_proof(&self) -> bool {
        self.user.is_some() || self.cgroup.is_some()
    }
}

/// A size, or a share of the VM's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Amount {
    Bytes(Bytes),
    /// A fraction of RAM, 0 to 1.
    Share(f64),
}

impl Amount {
    /// Whether it is more than the other whatever a VM's RAM is. A size and a share can be compared
    /// only where that is known: the floor then gives way, see `VmModel`.
    fn is_above(self, other: Amount) -> bool {
        match (self, other) {
            (Amount::Bytes(a), Amount::Bytes(b)) => a > b,
            (Amount::Share(a), Amount::Share(b)) => a > b,
            _ => false,
        }
    }

    /// Whether it is nothing, for which no VM can run.
    fn is_nothing(self) -> bool {
        matches!(self, Amount::Bytes(Bytes::ZERO) | Amount::Share(0.0))
    }

    /// The size for a VM with this much RAM, never above it.
    pub fn of(self, ram: Bytes) -> Bytes {
        match self {
            Amount::Bytes(b) => b.min(ram),
            Amount::Share(s) => ram.share(s).min(ram),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Bytes(b) => b.fmt(f),
            // As a person wrote it: 0.07 is not 7.000000000000001 %.
            Amount::Share(s) => write!(f, "{}%", (s * 1e6).round() / 1e4),
        }
    }
}

/// What the daemon keeps beside its state file.
pub const KSM_NOTE: &str = "ksm.json";
pub const INTERVALS: &str = "intervals.json";
pub const HANDS_OFF: &str = "hands-off.json";
pub const HANDED_OVER: &str = "handed-over.json";

/// The least a guest is ever left with, whatever the configuration says: below
/// this a Linux guest cannot run the balloon driver reliably.
pub const LEAST_FLOOR: Bytes = Bytes::mib(64);

impl Default for VmSettings {
    fn default() -> Self {
        VmSettings {
            manage: true,
            min: Amount::Share(0.25),
            max: None,
            weight: 1.0,
            group: "default".into(),
            qmp: None,
            merge: None,
            zeros: true,
            agent: AgentUse::On,
            private_ram: false,
            window_limit_ms: None,
            identity: Identity::default(),
            own: Overrides::default(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            tick_ms: 1000,
            fast_tick_ms: 100,
            socket: "/run/ebb/ebb.sock".into(),
            listen: None,
            state_file: "/run/ebb/state.json".into(),
            reserve: None,
            pool: None,
            listed_only: false,
            sockets: SocketUse::default(),
            libvirt: true,
            users: Vec::new(),
            programs: Vec::new(),
            containers: false,
            offload: None,
            merge: MergeConfig::default(),
            defaults: VmSettings::default(),
            vms: BTreeMap::new(),
        }
    }
}

impl Config {
    /// The section of a VM by its `-name` and `-uuid`; the latter takes precedence. Its
    /// QEMU chooses both.
    pub fn section(&self, name: &str, uuid: Option<&str>) -> Option<&VmSettings> {
        let by_uuid = uuid.and_then(|uuid| self.vms.get(&by_uuid(uuid)));
        // A `-name` of this form gets no section by uuid.
        by_uuid.or_else(|| self.vms.get(name).filter(|_| !name.starts_with(BY_UUID)))
    }

    /// The settings of a VM, with a section or without.
    pub fn settings(&self, name: &str, uuid: Option<&str>) -> &VmSettings {
        self.section(name, uuid).unwrap_or(&self.defaults)
    }

    /// Whether all VMs are of one share group, whatever they call themselves.
    pub fn has_one_group(&self) -> bool {
        self.vms.values().all(|vm| vm.group == self.defaults.group)
    }

    /// Reads a configuration; `file` is only for the error texts.
    pub fn parse(file: &str, text: &str) -> Result<Config, ConfigError> {
        read::config(file, text)
    }

    /// `daemon.socket` of a configuration that has mistakes elsewhere.
    pub fn socket_of(text: &str) -> Option<String> {
        let table: toml::Table = text.parse().ok()?;
        Some(table.get("daemon")?.get("socket")?.as_str()?.to_owned())
    }
}

/// What the section of a VM by its `-uuid` begins with.
pub const BY_UUID: &str = "uuid:";

/// The name of the section of a VM by its `-uuid`.
pub fn by_uuid(uuid: &str) -> String {
    format!("{BY_UUID}{}", uuid.to_ascii_lowercase())
}

/// What is wrong with a configuration, where, and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{file}{}{}: {message}",
    .line.map_or(String::new(), |line| format!(":{line}")),
    if .field.is_empty() { String::new() } else { format!(": {}", .field) }
)]
pub struct ConfigError {
    pub file: String,
    /// The line, counted from 1.
    pub line: Option<usize>,
    /// The field, e.g. `vm.web1.min`; empty where no field is concerned.
    pub field: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

#[cfg(test)]
mod tests;
