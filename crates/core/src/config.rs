//! Configuration: the few settings an operator may want, checked as a whole.
//!
//! TOML in, [`Config`] out, or a [`ConfigError`] that names file, line, field
//! and what is allowed. Nothing is half-applied: one bad field refuses the file.
//! Every field has a default, so an empty file is a valid one.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use toml::Spanned;

use crate::policy::merge::Settings;
use crate::units::Bytes;

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Milliseconds between ticks while nothing is ballooned and nobody is short.
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
    /// The cgroup whose limit counts, below the cgroup mount; `None`: found.
    pub pool: Option<String>,
    /// Only VMs that have a section of their own are looked at at all; the others'
    /// QMP sockets are left to others.
    pub listed_only: bool,
    /// Which QMP sockets are connected to.
    #[serde(default)]
    pub sockets: SocketUse,
    /// Users whose QEMU processes are VMs, beside those that are always.
    #[serde(default)]
    pub users: Vec<User>,
    /// QEMU processes in other pid namespaces are VMs too.
    #[serde(default)]
    pub containers: bool,
    /// Whether cold memory may be paged out to the host's swap when the host is
    /// hard or critical; `None`: where there is swap.
    #[serde(default)]
    pub offload: Option<bool>,
    /// Merging of equal pages.
    #[serde(default)]
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
    #[default]
    Own,
    /// Any on a VM's command line.
    Any,
}

/// A user of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum User {
    /// By uid.
    Uid(u32),
    /// By name, as `/etc/passwd` has it.
    Name(String),
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

/// How far merging goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeMode {
    /// Nothing is read and KSM is left as it is.
    #[default]
    Off,
    /// VMs' memory is scanned and what merging would bring is told.
    Report,
    /// KSM is steered.
    On,
}

/// Merging, as the operator wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MergeConfig {
    /// How far it goes.
    pub mode: MergeMode,
    /// The share group that is merged on this host; `None`: the only one there is.
    pub group: Option<String>,
    /// Groups are merged together.
    pub across_groups: bool,
    /// Budget and least profit.
    pub settings: Settings,
    /// Time between scans, milliseconds.
    pub scan_ms: u64,
    /// The speed of `ksmd` is left to the kernel's advisor.
    pub advisor: bool,
    /// khugepaged is kept from undoing merges while KSM is steered.
    #[serde(default)]
    pub hold_khugepaged: bool,
    /// Pages of zeros of VMs that are not merged may be looked for and let go of.
    #[serde(default)]
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

/// Settings of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmSettings {
    /// Whether Ebb may act on it at all.
    pub manage: bool,
    /// The floor: a guest that has this much or less is never asked.
    pub min: Amount,
    /// The ceiling; `None`: its RAM.
    pub max: Option<Amount>,
    /// How much its idle memory is worth against others': with twice the weight
    /// half as much is taken. Finite and above 0.
    pub weight: f64,
    /// Share group (tenants); merging never crosses groups.
    pub group: String,
    /// QMP socket, where it cannot be found from the process's command line.
    pub qmp: Option<String>,
    /// Whether it is open to KSM; `None`: as QEMU was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<bool>,
    /// Whether its pages of zeros may be let go of, where that is done.
    #[serde(default = "yes")]
    pub zeros: bool,
    /// What its agent may do.
    #[serde(default)]
    pub agent: AgentUse,
    /// The operator's word that no other process writes to RAM that QEMU shares.
    #[serde(default)]
    pub private_ram: bool,
    /// A window of protection that took longer has the agent stand aside, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_limit_ms: Option<u64>,
}

fn yes() -> bool {
    true
}

/// A size, or a share of the VM's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Amount {
    /// So many bytes.
    Bytes(Bytes),
    /// A fraction of RAM, 0 to 1.
    Share(f64),
}

impl Amount {
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
            Amount::Share(s) => write!(f, "{}%", s * 100.0),
        }
    }
}

/// The least a guest is ever left with, whatever the configuration says: below
/// this a Linux guest cannot even run the balloon driver in peace.
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
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            tick_ms: 1000,
            fast_tick_ms: 500,
            socket: "/run/ebb/ebb.sock".into(),
            listen: None,
            state_file: "/run/ebb/state.json".into(),
            reserve: None,
            pool: None,
            listed_only: false,
            sockets: SocketUse::default(),
            users: Vec::new(),
            containers: false,
            offload: None,
            merge: MergeConfig::default(),
            defaults: VmSettings::default(),
            vms: BTreeMap::new(),
        }
    }
}

impl Config {
    /// The section of a VM by its `-name` and `-uuid`; the latter counts more. A uuid is as
    /// good as a name: its QEMU's word.
    pub fn section(&self, name: &str, uuid: Option<&str>) -> Option<&VmSettings> {
        let by_uuid = uuid.and_then(|uuid| self.vms.get(&by_uuid(uuid)));
        // Nobody gets it by calling itself so.
        by_uuid.or_else(|| self.vms.get(name).filter(|_| !name.starts_with(BY_UUID)))
    }

    /// The settings of a VM, with a section or without.
    pub fn settings(&self, name: &str, uuid: Option<&str>) -> &VmSettings {
        self.section(name, uuid).unwrap_or(&self.defaults)
    }

    /// Reads a configuration; `file` is only for the error texts.
    pub fn parse(file: &str, text: &str) -> Result<Config, ConfigError> {
        let fail =
            |span: Option<std::ops::Range<usize>>, field: &str, message: String| ConfigError {
                file: file.to_string(),
                line: span.map(|s| line_of(text, s.start)),
                field: field.to_string(),
                message,
            };
        let raw: RawConfig = toml::from_str(text).map_err(|e| {
            let message = e.message().split_whitespace().collect::<Vec<_>>().join(" ");
            let field = e.span().map(|s| key_at(text, s.start)).unwrap_or_default();
            fail(e.span(), &field, message)
        })?;
        let check = Checker { fail: &fail };
        check.config(raw)
    }
}

/// What the section of a VM by its `-uuid` begins with.
pub const BY_UUID: &str = "uuid:";

/// The name of the section of a VM by its `-uuid`.
pub fn by_uuid(uuid: &str) -> String {
    format!("{BY_UUID}{}", uuid.to_ascii_lowercase())
}

/// Whether QEMU takes this as `-uuid`.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let hex = |g: &&str| g.bytes().all(|b| b.is_ascii_hexdigit());
    groups.iter().map(|g| g.len()).eq([8, 4, 4, 4, 12]) && groups.iter().all(hex)
}

/// What is wrong with a configuration, where, and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub file: String,
    /// The line, counted from 1.
    pub line: Option<usize>,
    /// The field, e.g. `vm.web1.min`; empty where no field is concerned.
    pub field: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|b| *b == b'\n').count() + 1
}

/// The key on the line at `offset`: what a person would call the field.
fn key_at(text: &str, offset: usize) -> String {
    let offset =
        (0..=offset.min(text.len())).rev().find(|o| text.is_char_boundary(*o)).unwrap_or(0);
    let start = text[..offset].rfind('\n').map_or(0, |n| n + 1);
    let line = text[start..].lines().next().unwrap_or("");
    line.split('=').next().unwrap_or("").trim().chars().take(60).collect()
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawConfig {
    daemon: RawDaemon,
    host: RawHost,
    merge: RawMerge,
    defaults: RawVm,
    vm: BTreeMap<Spanned<String>, RawVm>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawDaemon {
    tick: Option<Spanned<String>>,
    fast_tick: Option<Spanned<String>>,
    socket: Option<Spanned<String>>,
    listen: Option<Spanned<String>>,
    state_file: Option<Spanned<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawHost {
    reserve: Option<Bytes>,
    cgroup: Option<Spanned<String>>,
    vms: Option<Spanned<String>>,
    offload: Option<bool>,
    sockets: Option<Spanned<String>>,
    users: Option<Vec<Spanned<RawUser>>>,
    containers: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawMerge {
    mode: Option<Spanned<String>>,
    group: Option<String>,
    across_groups: Option<bool>,
    cpu: Option<Spanned<String>>,
    cpu_clear: Option<Spanned<String>>,
    floor: Option<Bytes>,
    scan: Option<Spanned<String>>,
    advisor: Option<bool>,
    hold_khugepaged: Option<bool>,
    zeros: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawVm {
    manage: Option<bool>,
    min: Option<Spanned<RawAmount>>,
    max: Option<Spanned<RawAmount>>,
    weight: Option<Spanned<f64>>,
    group: Option<Spanned<String>>,
    qmp: Option<Spanned<String>>,
    merge: Option<bool>,
    zeros: Option<bool>,
    agent: Option<Spanned<String>>,
    private_ram: Option<bool>,
    window_limit: Option<Spanned<String>>,
}

/// A user as written: `"alice"` or `1001`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a user's name such as \"alice\" or a uid such as 1001")]
enum RawUser {
    Uid(i64),
    Name(String),
}

/// An amount as written: `"25%"`, `"512MiB"` or a number of bytes.
struct RawAmount(Amount);

impl<'de> Deserialize<'de> for RawAmount {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<RawAmount, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected a size such as \"512MiB\" or a share such as \"25%\""
        )]
        enum Any {
            Number(u64),
            Text(String),
        }
        let amount = match Any::deserialize(d)? {
            Any::Number(n) => Amount::Bytes(Bytes(n)),
            Any::Text(t) => match t.trim().strip_suffix('%') {
                Some(p) => match p.trim().parse::<f64>() {
                    Ok(v) if (0.0..=100.0).contains(&v) => Amount::Share(v / 100.0),
                    _ => {
                        let said: String = t.chars().take(40).collect();
                        return Err(serde::de::Error::custom(format!(
                            "“{said}” is not a share: 0% to 100%"
                        )));
                    }
                },
                None => Amount::Bytes(t.parse().map_err(serde::de::Error::custom)?),
            },
        };
        Ok(RawAmount(amount))
    }
}

/// Least and most of a tick, and of the time between scans.
const TICK: (&str, &str) = ("100ms", "60s");
const SCAN: (&str, &str) = ("1s", "24h");

/// A time in milliseconds: `500ms`, `2s`, `10min`, `1h`.
pub fn milliseconds(text: &str) -> Option<f64> {
    let units = [("ms", 1.0), ("min", 60_000.0), ("s", 1000.0), ("h", 3_600_000.0)];
    let (number, unit) =
        units.iter().find_map(|(name, unit)| Some((text.trim().strip_suffix(name)?, unit)))?;
    Some(number.trim().parse::<f64>().ok()? * unit)
}

/// Words of which one is allowed, with what each stands for.
const ALL: (&str, bool, &str) = ("all", false, "every VM");
const LISTED: (&str, bool, &str) = ("listed", true, "those with a [vm.NAME] section");
const SOCKETS: [(&str, SocketUse, &str); 2] = [
    ("own", SocketUse::Own, "with `ebb` in the file name, or named by [vm.NAME] qmp"),
    ("any", SocketUse::Any, "all on a VM's command line"),
];
const AGENT: [(&str, AgentUse, &str); 3] = [
    ("on", AgentUse::On, "recycle what the guest freed"),
    ("observe", AgentUse::Observe, "attach and count, discard nothing"),
    ("off", AgentUse::Off, "leave it alone"),
];
const MERGE: [(&str, MergeMode, &str); 3] = [
    ("off", MergeMode::Off, "leave KSM alone"),
    ("report", MergeMode::Report, "scan and tell"),
    ("on", MergeMode::On, "merge"),
];

type Fail<'a> = dyn Fn(Option<std::ops::Range<usize>>, &str, String) -> ConfigError + 'a;

struct Checker<'a> {
    fail: &'a Fail<'a>,
}

impl Checker<'_> {
    fn config(&self, raw: RawConfig) -> Result<Config, ConfigError> {
        let base = Config::default();
        let tick_ms = self.duration("daemon.tick", raw.daemon.tick, TICK, base.tick_ms)?;
        let fast_tick_ms = self.duration(
            "daemon.fast_tick",
            raw.daemon.fast_tick,
            TICK,
            base.fast_tick_ms.min(tick_ms),
        )?;
        if fast_tick_ms > tick_ms {
            let message = format!("{fast_tick_ms} ms is longer than daemon.tick ({tick_ms} ms)");
            return Err((self.fail)(None, "daemon.fast_tick", message));
        }
        let defaults = self.vm("defaults", raw.defaults, &base.defaults)?;
        let mut vms = BTreeMap::new();
        for (name, section) in raw.vm {
            let settings = self.vm(&format!("vm.{}", name.get_ref()), section, &defaults)?;
            vms.insert(self.vm_name(name, &vms)?, settings);
        }
        Ok(Config {
            tick_ms,
            fast_tick_ms,
            socket: self.path("daemon.socket", raw.daemon.socket)?.unwrap_or(base.socket),
            listen: self.listen(raw.daemon.listen)?,
            state_file: self
                .path("daemon.state_file", raw.daemon.state_file)?
                .unwrap_or(base.state_file),
            reserve: raw.host.reserve,
            pool: self.path("host.cgroup", raw.host.cgroup)?,
            listed_only: self.one_of("host.vms", raw.host.vms, [ALL, LISTED])?.unwrap_or(false),
            sockets: self.one_of("host.sockets", raw.host.sockets, SOCKETS)?.unwrap_or_default(),
            users: self.users(raw.host.users.unwrap_or_default())?,
            containers: raw.host.containers.unwrap_or(base.containers),
            offload: raw.host.offload,
            merge: self.merge(raw.merge, base.merge)?,
            defaults,
            vms,
        })
    }

    fn vm(&self, at: &str, raw: RawVm, base: &VmSettings) -> Result<VmSettings, ConfigError> {
        let min_span = raw.min.as_ref().map(Spanned::span);
        let weight = match raw.weight {
            None => base.weight,
            Some(w) => {
                let (span, w) = (w.span(), w.into_inner());
                if !(w.is_finite() && (0.001..=1000.0).contains(&w)) {
                    let message = format!("{w} is not a weight: a number from 0.001 to 1000");
                    return Err((self.fail)(Some(span), &format!("{at}.weight"), message));
                }
                w
            }
        };
        let settings = VmSettings {
            manage: raw.manage.unwrap_or(base.manage),
            min: raw.min.map_or(base.min, |m| m.into_inner().0),
            max: raw.max.map(|m| m.into_inner().0).or(base.max),
            weight,
            group: raw.group.map_or_else(|| base.group.clone(), Spanned::into_inner),
            qmp: self.path(&format!("{at}.qmp"), raw.qmp)?.or_else(|| base.qmp.clone()),
            merge: raw.merge.or(base.merge),
            zeros: raw.zeros.unwrap_or(base.zeros),
            agent: self.one_of(&format!("{at}.agent"), raw.agent, AGENT)?.unwrap_or(base.agent),
            private_ram: raw.private_ram.unwrap_or(base.private_ram),
            window_limit_ms: match raw.window_limit {
                None => base.window_limit_ms,
                limit => {
                    let name = format!("{at}.window_limit");
                    Some(self.duration(&name, limit, ("1ms", "10s"), 0)?)
                }
            },
        };
        let crossed = match (settings.min, settings.max) {
            (Amount::Bytes(a), Some(Amount::Bytes(b))) => a > b,
            (Amount::Share(a), Some(Amount::Share(b))) => a > b,
            _ => false, // known only with the VM's RAM: the floor then gives way, see VmModel
        };
        if crossed {
            let message = format!(
                "min {} is above max {}: min must not exceed max",
                settings.min,
                settings.max.map(|m| m.to_string()).unwrap_or_default()
            );
            return Err((self.fail)(min_span, &format!("{at}.min"), message));
        }
        Ok(settings)
    }

    fn merge(&self, raw: RawMerge, base: MergeConfig) -> Result<MergeConfig, ConfigError> {
        let Settings { cores, clear_cores, floor } = base.settings;
        let settings = Settings {
            cores: self.share("merge.cpu", 1.0, raw.cpu)?.unwrap_or(cores),
            clear_cores: self.share("merge.cpu_clear", 0.1, raw.cpu_clear)?.unwrap_or(clear_cores),
            floor: raw.floor.unwrap_or(floor),
        };
        Ok(MergeConfig {
            mode: self.one_of("merge.mode", raw.mode, MERGE)?.unwrap_or(base.mode),
            group: raw.group.or(base.group),
            across_groups: raw.across_groups.unwrap_or(base.across_groups),
            settings,
            scan_ms: self.duration("merge.scan", raw.scan, SCAN, base.scan_ms)?,
            advisor: raw.advisor.unwrap_or(base.advisor),
            hold_khugepaged: raw.hold_khugepaged.unwrap_or(base.hold_khugepaged),
            zeros: raw.zeros.unwrap_or(base.zeros),
        })
    }

    /// Cores, given as percent of one, at least so many percent.
    fn share(
        &self,
        field: &str,
        least: f64,
        raw: Option<Spanned<String>>,
    ) -> Result<Option<f64>, ConfigError> {
        let Some(text) = raw else { return Ok(None) };
        let said = text.get_ref();
        match said.trim().strip_suffix('%').map(|p| p.trim().parse()) {
            Some(Ok(p)) if (least..=3200.0).contains(&p) => Ok(Some(p / 100.0)),
            _ => {
                let message = format!(
                    "“{said}” is not allowed: percent of a core, \"{least}%\" to \"3200%\""
                );
                Err((self.fail)(Some(text.span()), field, message))
            }
        }
    }

    fn duration(
        &self,
        field: &str,
        raw: Option<Spanned<String>>,
        (least, most): (&str, &str),
        default: u64,
    ) -> Result<u64, ConfigError> {
        let Some(raw) = raw else { return Ok(default) };
        let (span, text) = (raw.span(), raw.into_inner());
        let limit = |text| milliseconds(text).unwrap_or(f64::NAN);
        match milliseconds(&text) {
            Some(ms) if (limit(least)..=limit(most)).contains(&ms) => Ok(ms as u64),
            _ => Err((self.fail)(
                Some(span),
                field,
                format!("“{text}” is not allowed: a time from \"{least}\" to \"{most}\""),
            )),
        }
    }

    /// What one of these words stands for.
    fn one_of<T: Copy, const N: usize>(
        &self,
        field: &str,
        raw: Option<Spanned<String>>,
        choices: [(&str, T, &str); N],
    ) -> Result<Option<T>, ConfigError> {
        let Some(raw) = raw else { return Ok(None) };
        let (span, said) = (raw.span(), raw.into_inner());
        if let Some((_, value, _)) = choices.iter().find(|c| c.0 == said) {
            return Ok(Some(*value));
        }
        let allowed = choices.map(|(word, _, meaning)| format!("\"{word}\" ({meaning})"));
        let (last, others) = allowed.split_last().expect("there are words");
        let message = format!("“{said}” is not allowed: {} or {last}", others.join(", "));
        Err((self.fail)(Some(span), field, message))
    }

    fn users(&self, raw: Vec<Spanned<RawUser>>) -> Result<Vec<User>, ConfigError> {
        let user = |raw: Spanned<RawUser>| {
            let span = raw.span();
            let fail = |message| Err((self.fail)(Some(span), "host.users", message));
            match raw.into_inner() {
                // The last is no user: the kernel takes it for “unchanged”.
                RawUser::Uid(uid) => match u32::try_from(uid) {
                    Ok(uid) if uid < u32::MAX => Ok(User::Uid(uid)),
                    _ => fail(format!("{uid} is not a uid: 0 to {}", u32::MAX - 1)),
                },
                RawUser::Name(name) => {
                    let odd = |c: char| c == ':' || c.is_whitespace() || c.is_control();
                    match name.is_empty() || name.contains(odd) {
                        true => {
                            fail(format!("“{}” is not the name of a user", name.escape_debug()))
                        }
                        false => Ok(User::Name(name)),
                    }
                }
            }
        };
        raw.into_iter().map(user).collect()
    }

    /// The name of a section, one by uuid in small letters.
    fn vm_name(
        &self,
        name: Spanned<String>,
        others: &BTreeMap<String, VmSettings>,
    ) -> Result<String, ConfigError> {
        let (span, written) = (name.span(), name.into_inner());
        let Some(uuid) = written.strip_prefix(BY_UUID) else { return Ok(written) };
        let fail = |message| Err((self.fail)(Some(span), &format!("vm.{written}"), message));
        if !is_uuid(uuid) {
            return fail(
                "after “uuid:” comes the VM's -uuid: 8-4-4-4-12 hexadecimal digits".into(),
            );
        }
        let name = by_uuid(uuid);
        match others.contains_key(&name) {
            true => fail("there is a section of this VM already".into()),
            false => Ok(name),
        }
    }

    fn path(
        &self,
        field: &str,
        raw: Option<Spanned<String>>,
    ) -> Result<Option<String>, ConfigError> {
        let Some(raw) = raw else { return Ok(None) };
        let (span, path) = (raw.span(), raw.into_inner());
        if path.starts_with('/') && !path.contains('\0') {
            Ok(Some(path))
        } else {
            Err((self.fail)(Some(span), field, format!("“{path}” is not an absolute path")))
        }
    }

    fn listen(&self, raw: Option<Spanned<String>>) -> Result<Option<String>, ConfigError> {
        let Some(raw) = raw else { return Ok(None) };
        let (span, text) = (raw.span(), raw.into_inner());
        match text.parse::<std::net::SocketAddr>() {
            Ok(a) if a.ip().is_loopback() => Ok(Some(text)),
            _ => Err((self.fail)(
                Some(span),
                "daemon.listen",
                format!(
                    "“{text}” is not allowed: a loopback address and port, as in \"127.0.0.1:9177\" \
                     (the interface has no passwords; publish it through a proxy that has)"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("f", "").unwrap(), Config::default());
    }

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
    fn users_sockets_and_containers_are_as_few_as_possible_unless_told() {
        let c = Config::default();
        assert_eq!((c.sockets, &c.users[..], c.containers), (SocketUse::Own, &[][..], false));
        let text = "[host]\nsockets = \"any\"\nusers = [\"alice\", 1001]\ncontainers = true\n";
        let c = Config::parse("f", text).unwrap();
        assert_eq!((c.sockets, c.containers), (SocketUse::Any, true));
        assert_eq!(c.users, [User::Name("alice".into()), User::Uid(1001)]);
        let json = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), c, "as a record keeps it");
    }

    #[test]
    fn merging_is_off_unless_asked_for_and_a_vm_may_stay_out() {
        assert_eq!(Config::parse("f", "").unwrap().merge.mode, MergeMode::Off);
        let c = Config::parse(
            "f",
            "[merge]\nmode = \"on\"\ngroup = \"acme\"\ncpu = \"150%\"\ncpu_clear = \"2.5%\"\nfloor = \"8MiB\"\n\
             scan = \"2min\"\n[defaults]\nmerge = true\n[vm.a]\nmerge = false\n",
        )
        .unwrap();
        let settings = Settings { cores: 1.5, clear_cores: 0.025, floor: Bytes::mib(8) };
        assert_eq!((c.merge.mode, c.merge.settings), (MergeMode::On, settings));
        assert_eq!((c.merge.scan_ms, c.merge.across_groups), (120_000, false));
        assert_eq!(
            (c.settings("a", None).merge, c.settings("b", None).merge),
            (Some(false), Some(true))
        );
        assert!(!c.merge.zeros && !c.merge.hold_khugepaged);
        let text = "[merge]\nzeros = true\nhold_khugepaged = true\n[vm.a]\nzeros = false\n";
        let c = Config::parse("f", text).unwrap();
        assert_eq!(
            (c.merge.mode, c.merge.zeros, c.merge.hold_khugepaged),
            (MergeMode::Off, true, true)
        );
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
            ("[vm.a]\nmin = \"120%\"", "f:2: min: “120%” is not a share: 0% to 100%"),
            ("[vm.a]\nmin = true", "f:2: min: expected a size such as"),
            ("[vm.a]\nqmp = \"x\"", "f:2: vm.a.qmp: “x” is not an absolute path"),
            ("[host]\nreserve = -1", "f:2: reserve: a size cannot be negative"),
            ("[host]\nreserved = 1", "f:2: reserved: unknown field `reserved`, expected"),
            (
                "[daemon]\ntick = \"1s\"\nfast_tick = \"2s\"",
                "f: daemon.fast_tick: 2000 ms is longer",
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
