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
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sections_inherit_from_defaults() {
        let c = Config::parse(
            "f",
            "[daemon]\ntick = \"2s\"\n[defaults]\nmin = \"10%\"\nweight = 2\n\
             [vm.a]\nmax = \"1GiB\"\n[vm.\"b c\"]\nmanage = false\nmin = 1048576\n",
        )
        .unwrap();
        assert_eq!(c.tick_ms, 2000);
        assert_eq!(c.settings("a", None).min, Amount::Share(0.1));
        assert_eq!(c.settings("a", None).max, Some(Amount::Bytes(Bytes::gib(1))));
        assert_eq!(c.settings("b c", None).min, Amount::Bytes(Bytes::mib(1)));
        assert!(!c.settings("b c", None).manage);
        assert_eq!(c.settings("unknown", None).weight, 2.0);
    }

    #[test]
    fn a_name_that_toml_takes_only_in_quotes_is_explained() {
        for header in ["[vm.web.example.org]", "[vm.web 01]"] {
            let error = Config::parse("f", &format!("{header}\nmanage = false\n")).unwrap_err();
            assert!(error.to_string().contains("needs quotes"), "{error}");
        }
        let error = Config::parse("f", "[vm.\"a.b\"]\nx = 1\n").unwrap_err().to_string();
        assert!(!error.contains("needs quotes"), "{error}");
        let error = Config::parse("f", "[vm.a]\n[vm.a] # twice\n").unwrap_err().to_string();
        assert!(!error.contains("needs quotes"), "{error}");
        assert!(Config::parse("f", "[vm.\"a.b\"]\nmanage = false\n").is_ok());
    }

    #[test]
    fn a_socket_that_could_not_be_used_is_a_mistake_of_the_file() {
        let said = |lines: &str| {
            let text = format!("[daemon]\nstate_file = \"/run/x/state\"\n{lines}\n");
            Config::parse("f", &text).map_err(|e| e.to_string())
        };
        let long = format!("socket = \"/{}\"", "a".repeat(107));
        for (lines, words) in [
            (
                "socket = \"/run//x/state\"",
                "f:3: daemon.socket: /run//x/state is also daemon.state_file",
            ),
            ("socket = \"/run/x/ksm.json\"", "a file that Ebb makes beside daemon.state_file"),
            ("socket = \"/run/x/state.lock\"", "a file that Ebb makes beside daemon.state_file"),
            (
                "socket = \"/run/q\"\n[vm.a]\nqmp = \"/run/q\"",
                "f:3: daemon.socket: /run/q is also the qmp",
            ),
            (&long, "has 108 bytes: the path of a socket has at most 107"),
        ] {
            let error = said(lines).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        said(&long.replace("aa\"", "a\"")).unwrap();
        said("socket = \"/run/y/ksm.json\"").unwrap();
    }

    #[test]
    fn of_listed_vms_only_those_with_a_section_are_managed() {
        let config = Config::parse("f", "[host]\nvms = \"listed\"\n[vm.a]\n").unwrap();
        let its = Metadata::Says(Overrides { manage: Some(true), ..Overrides::default() });
        let managed = |name| config.settings(name, None).with(&its, Bytes::ZERO).manage;
        assert!(managed("a") && !managed("b"));
        assert!(config.settings("a", None).manage && !config.settings("b", None).manage);
    }

    #[test]
    fn a_section_by_uuid_counts_more_than_one_by_name() {
        let uuid = "11111111-2222-3333-4444-55555555AAAA";
        let text = format!("[vm.a]\nweight = 2\n[vm.\"uuid:{uuid}\"]\nweight = 3\n");
        let c = Config::parse("f", &text).unwrap();
        let weight = |name: &str, uuid: Option<&str>| c.settings(name, uuid).weight;
        assert_eq!((weight("a", None), weight("b", None)), (2.0, 1.0));
        for uuid in [uuid.to_owned(), uuid.to_lowercase()] {
            assert_eq!((weight("a", Some(&uuid)), weight("b", Some(&uuid))), (3.0, 3.0));
        }
        assert_eq!(weight("a", Some("another")), 2.0);
        assert_eq!(weight(&format!("uuid:{}", uuid.to_lowercase()), None), 1.0, "a -name");
        let twice = format!("{text}[vm.\"uuid:{}\"]\n", uuid.to_lowercase());
        let error = Config::parse("f", &twice).unwrap_err().to_string();
        assert!(error.contains("there is a section of this VM already"), "{error}");
    }

    #[test]
    fn a_section_may_say_what_a_vm_must_be_to_have_it() {
        let c = Config::parse(
            "f",
            "[host]\nprograms = [\"/opt/q/qemu-system-x86_64\"]\n[vm.a]\nuser = \"al\"\n\
             uuid = \"11111111-2222-3333-4444-55555555AAAA\"\ncgroup = \"/t/a\"\n[vm.b]\n\
             uuid = \"11111111-2222-3333-4444-555555555555\"\n[vm.c]\nuser = 7\ngroup = \"x\"\n",
        )
        .unwrap();
        let identity = |name: &str| c.settings(name, None).identity.clone();
        let a = Identity {
            user: Some(User::Name("al".into())),
            uuid: Some("11111111-2222-3333-4444-55555555aaaa".into()),
            cgroup: Some("/t/a".into()),
        };
        assert_eq!(identity("a"), a);
        assert_eq!(identity("d"), Identity::default());
        assert!(!identity("b").is_proof() && identity("c").is_proof());
        assert!(!c.has_one_group() && Config::default().has_one_group());
        assert_eq!(c.programs, ["/opt/q/qemu-system-x86_64"]);
    }

    #[test]
    fn users_sockets_and_containers_are_as_few_as_possible_unless_told() {
        let c = Config::default();
        assert_eq!((c.sockets, &c.users[..], c.containers), (SocketUse::Known, &[][..], false));
        let text = "[host]\nsockets = \"any\"\nusers = [\"alice\", 1001]\ncontainers = true\n";
        let c = Config::parse("f", text).unwrap();
        assert_eq!((c.sockets, c.containers), (SocketUse::Any, true));
        for (word, sockets) in [("own", SocketUse::Own), ("shared", SocketUse::Shared)] {
            let text = format!("[host]\nsockets = \"{word}\"\n");
            assert_eq!(Config::parse("f", &text).unwrap().sockets, sockets);
        }
        assert_eq!(c.users, [User::Name("alice".into()), User::Uid(1001)]);
        let json = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), c, "as a record keeps it");
    }

    #[test]
    fn merging_is_off_unless_asked_for_and_a_vm_may_stay_out() {
        let none = Config::parse("f", "").unwrap();
        assert_eq!((none.merge.mode, &none), (MergeMode::Off, &Config::default()));
        let c = Config::parse(
            "f",
            "[merge]\nmode = \"on\"\ngroup = \"acme\"\ncpu = \"150%\"\ncpu_clear = \"2.5%\"\nfloor = \"8MiB\"\n\
             scan = \"2min\"\n[defaults]\nmerge = true\n[vm.a]\nmerge = false\n",
        )
        .unwrap();
        let settings = Settings { cores: 1.5, clear_cores: 0.025, floor: Bytes::mib(8) };
        assert_eq!((c.merge.mode, c.merge.settings), (MergeMode::On, settings));
        assert_eq!((c.merge.scan_ms, c.merge.across_groups), (120_000, false));
        let merge = |name| c.settings(name, None).merge;
        assert_eq!((merge("a"), merge("b")), (Some(false), Some(true)));
        assert!(!c.merge.zeros && !c.merge.hold_khugepaged);
        let text = "[merge]\nzeros = true\nhold_khugepaged = true\n[vm.a]\nzeros = false\n";
        let c = Config::parse("f", text).unwrap();
        assert!(c.merge.mode == MergeMode::Off && c.merge.zeros && c.merge.hold_khugepaged);
        assert_eq!((c.settings("a", None).zeros, c.settings("b", None).zeros), (false, true));
    }

    #[test]
    fn a_bad_field_is_named_with_line_and_what_is_allowed() {
        for (text, expected) in [
            ("[daemon]\ntick = \"1h\"", "f:2: daemon.tick: “1h” is not allowed: a time from"),
            (
                "[daemon]\n\nlisten = \"0.0.0.0:80\"",
                "f:3: daemon.listen: “0.0.0.0:80” is not allowed",
            ),
            ("[vm.a]\nweight = 0", "f:2: vm.a.weight: 0 is not a weight: a number from"),
            ("[vm.a]\nweight = nan", "f:2: vm.a.weight: NaN is not a weight"),
            (
                "[vm.a]\nmin = \"2GiB\"\nmax = \"1GiB\"",
                "f:2: vm.a.min: min 2 GiB is above max 1 GiB",
            ),
            (
                "[defaults]\nmin = \"2GiB\"\n[vm.a]\nmax = \"1GiB\"",
                "f:4: vm.a.max: min 2 GiB (the default) is above max 1 GiB",
            ),
            (
                "[defaults]\nmax = \"1GiB\"\n[vm.a]\nmin = \"2GiB\"",
                "f:4: vm.a.min: min 2 GiB is above max 1 GiB (the default)",
            ),
            ("[vm.a]\nmax = \"0%\"", "f:2: vm.a.max: 0% is no memory: max must be above 0"),
            ("[defaults]\nmax = 0", "f:2: defaults.max: 0 B is no memory"),
            ("[vm.a]\nmin = \"120%\"", "f:2: vm.a.min: “120%” is not a share: 0% to 100%"),
            ("[vm.a]\nmin = true", "f:2: min: expected a size such as"),
            ("[vm.a]\nqmp = \"x\"", "f:2: vm.a.qmp: “x” is not an absolute path"),
            (
                "[daemon]\nstate_file = \"/a.lock\"",
                "f:2: daemon.state_file: “/a.lock” is named like the files that Ebb makes \
                 beside it",
            ),
            ("[host]\nreserve = -1", "f:2: reserve: a size cannot be negative"),
            ("[host]\nreserved = 1", "f:2: reserved: unknown field `reserved`, expected"),
            (
                "[daemon]\ntick = \"1s\"\nfast_tick = \"2s\"",
                "f:3: daemon.fast_tick: 2000 ms is longer",
            ),
            ("[host]\nsockets = \"all\"", "f:2: host.sockets: “all” is not allowed: \"own\" ("),
            ("[host]\nusers = [1,\n \"a b\"]", "f:3: host.users: “a b” is not the name of a user"),
            ("[host]\nusers = [\"\"]", "f:2: host.users: “” is not the name of a user"),
            ("[host]\nusers = [-1]", "f:2: host.users: -1 is not a uid: 0 to 4294967294"),
            ("[host]\nusers = [4294967295]", "f:2: host.users: 4294967295 is not a uid"),
            ("[host]\nusers = [true]", "f:2: users: expected a user's name such as"),
            (
                "[host]\nusers = \"a\"",
                "f:2: users: invalid type: string \"a\", expected a sequence",
            ),
            ("[host]\ncontainers = 1", "f:2: containers: invalid type: integer"),
            (
                "\n[vm.\"uuid:1\"]\nmin = 0",
                "f:2: vm.uuid:1: after “uuid:” comes the VM's -uuid: 8-4-4-4-12",
            ),
            ("[host]\nvms = \"some\"", "f:2: host.vms: “some” is not allowed: \"all\""),
            ("[merge]\nmode = \"yes\"", "f:2: merge.mode: “yes” is not allowed: \"off\""),
            ("[defaults]\nuser = 7", "f:2: defaults.user: this is of one VM only"),
            (
                "[defaults]\nqmp = \"/a\"",
                "f:2: defaults.qmp: this is of one VM only: write it in a",
            ),
            ("[vm.a]\nmin = \"600\"", "f:2: vm.a.min: 600 B is below 1 MiB: write the unit"),
            ("[vm.a]\nmax = 600", "f:2: vm.a.max: 600 B is below 1 MiB: write the unit"),
            ("[merge]\nfloor = 32", "f:2: merge.floor: 32 B is below 1 MiB: write the unit"),
            ("[host]\nreserve = 8", "f:2: host.reserve: 8 B is below 1 MiB: write the unit"),
            ("[vm.a]\nuuid = \"7\"", "f:2: vm.a.uuid: 8-4-4-4-12 hexadecimal digits"),
            ("[vm.a]\ncgroup = \"b\"", "f:2: vm.a.cgroup: “b” is not an absolute path"),
            ("[vm.a]\nuser = -1", "f:2: vm.a.user: -1 is not a uid"),
            ("[host]\nprograms = [\"kvm\"]", "f:2: host.programs: “kvm” is not an absolute path"),
            ("[merge]\ncpu = \"0%\"", "f:2: merge.cpu: “0%” is not allowed: percent of a core"),
            ("[merge]\ncpu_clear = \"0%\"", "f:2: merge.cpu_clear: “0%” is not allowed"),
            (
                "[merge]\nscan = \"9ms\"",
                "f:2: merge.scan: “9ms” is not allowed: a time from \"1s\"",
            ),
            ("[daemon", "f:1: [daemon: "),
        ] {
            let e = Config::parse("f", text).unwrap_err().to_string();
            assert!(e.starts_with(expected), "{text}\n gave {e}\n not {expected}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_a_config_or_an_error(text in "(\\[(daemon|host|merge|defaults|vm\\.a)\\]\n)?([a-z_]{0,9} ?= ?.{0,20}\n){0,4}") {
            let _ = Config::parse("f", &text);
        }
    }
}
