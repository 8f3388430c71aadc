//! From TOML to a [`Config`]: what may be written, and what is said of the rest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::*;
use crate::units::NotASize;

pub fn config(file: &str, text: &str) -> Result<Config, ConfigError> {
    let check = Checker { file, text };
    let raw: RawConfig = toml::from_str(text).map_err(|e| {
        let message = e.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let mut message = in_words(message);
        let field = e.span().map(|s| key_at(text, s.start)).unwrap_or_default();
        if field.starts_with("[[") {
            message = "a section has one bracket on each side, as in [vm.web]".into();
        } else if field.starts_with('[') && message.starts_with("duplicate") {
            let here = e.span().map_or(0, |s| line_of(text, s.start) - 1);
            let first = text.lines().take(here).position(|l| no_comment(l) == no_comment(&field));
            let first = first.map_or(String::new(), |n| format!(": it begins in line {}", n + 1));
            message = format!("this section is here twice{first}");
        } else if lacks_quotes(&field) {
            message += ". A name with other characters than letters, digits, - and _ needs \
                        quotes, as in [vm.\"web.example.org\"]";
        }
        check.fail(e.span(), &field, message)
    })?;
    check.config(raw)
}

/// A line without its comment.
fn no_comment(line: &str) -> &str {
    line.split('#').next().unwrap_or_default().trim()
}

/// Whether this is the header of a VM's section whose name TOML takes only in quotes.
fn lacks_quotes(header: &str) -> bool {
    let name = header.strip_prefix("[vm.").and_then(|rest| rest.split(']').next());
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    name.is_some_and(|name| !name.starts_with(['"', '\'']) && !name.chars().all(bare))
}

/// A size below this lacks its unit.
const LEAST_SIZE: u64 = 1 << 20;

/// What holds for VMs without a section.
const DEFAULTS: &str = "defaults";

/// How QEMU writes a `-uuid`.
const UUID: &str = "8-4-4-4-12 hexadecimal digits";

/// Whether QEMU takes this as `-uuid`.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let hex = |g: &&str| g.bytes().all(|b| b.is_ascii_hexdigit());
    groups.iter().map(|g| g.len()).eq([8, 4, 4, 4, 12]) && groups.iter().all(hex)
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|b| *b == b'\n').count() + 1
}

/// What serde says, for people, with the key that was meant, most likely.
fn in_words(mut message: String) -> String {
    for (rust, words) in [
        ("expected f64", "expected a number"),
        ("expected a string", "expected text in quotes"),
        ("expected a boolean", "expected true or false"),
        ("expected a sequence", "expected a list, as in [\"a\", \"b\"]"),
        ("expected a map", "expected a section"),
        ("expected struct RawVm", "expected a section, as in [vm.web] or [defaults]"),
        ("expected struct RawDaemon", "expected a section, [daemon]"),
        ("expected struct RawHost", "expected a section, [host]"),
        ("expected struct RawMerge", "expected a section, [merge]"),
    ] {
        message = message.replace(rust, words);
    }
    let mut keys = message.split('`').skip(1).step_by(2);
    let said = keys.next();
    let nearest = |said: &str| {
        let keys = keys.map(|key| (distance(said, key), key)).filter(|(apart, _)| *apart <= 2);
        keys.min_by_key(|(apart, _)| *apart).map(|(_, key)| key)
    };
    let meant = said.and_then(nearest);
    match meant.map(str::to_owned).filter(|_| message.starts_with("unknown field")) {
        Some(key) => format!("{message}; did you mean {key}?"),
        None => message,
    }
}

/// How many letters are to be added, left out or changed to make one word the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let changed = before + usize::from(x != y);
            before = row[j + 1];
            row[j + 1] = changed.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The key on the line at `offset`, with its section: what a person would call the field.
fn key_at(text: &str, offset: usize) -> String {
    let offset =
        (0..=offset.min(text.len())).rev().find(|o| text.is_char_boundary(*o)).unwrap_or(0);
    let start = text[..offset].rfind('\n').map_or(0, |n| n + 1);
    let line = text[start..].lines().next().unwrap_or("");
    let key = line.split('=').next().unwrap_or("").trim();
    let header = |line: &str| Some(line.trim().strip_prefix('[')?.split(']').next()?.to_owned());
    let section = text[..start].lines().rev().find_map(header);
    let dotted = section.filter(|_| !key.starts_with('[')).map_or("".into(), |s| s + ".");
    (dotted + key).chars().take(60).collect()
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
    reserve: Option<Spanned<Bytes>>,
    cgroup: Option<Spanned<String>>,
    vms: Option<Spanned<String>>,
    offload: Option<bool>,
    sockets: Option<Spanned<String>>,
    libvirt: Option<bool>,
    users: Vec<Spanned<RawUser>>,
    programs: Vec<Spanned<String>>,
    containers: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawMerge {
    mode: Option<Spanned<String>>,
    group: Option<String>,
    across_groups: bool,
    cpu: Option<Spanned<String>>,
    cpu_clear: Option<Spanned<String>>,
    floor: Option<Spanned<Bytes>>,
    scan: Option<Spanned<String>>,
    advisor: bool,
    hold_khugepaged: bool,
    zeros: bool,
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
    user: Option<Spanned<RawUser>>,
    uuid: Option<Spanned<String>>,
    cgroup: Option<Spanned<String>>,
}

/// A user as written: `"alice"` or `1001`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a user's name such as \"alice\" or a uid such as 1001")]
enum RawUser {
    Uid(i64),
    Name(String),
}

/// An amount as written: `"25%"`, `"512MiB"` or a number of bytes.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a size such as \"512MiB\" or a share such as \"25%\"")]
enum RawAmount {
    Number(u64),
    Text(String),
}

impl RawAmount {
    fn read(self) -> Result<Amount, String> {
        with_unit(match self {
            RawAmount::Number(n) => Amount::Bytes(Bytes(n)),
            RawAmount::Text(text) => amount(&text)?,
        })
    }
}

/// Refuses what was meant with a unit, most likely.
fn has_unit(size: Bytes) -> Result<Bytes, String> {
    if size == Bytes::ZERO { Ok(size) } else { sizeable(size) }
}

/// Refuses what was meant with a unit, most likely, and nothing.
pub fn sizeable(size: Bytes) -> Result<Bytes, String> {
    match size.0 {
        ..LEAST_SIZE => Err(format!("{size} is below 1 MiB: write the unit, as in \"512MiB\"")),
        _ => Ok(size),
    }
}

/// Refuses a size that was meant with a unit, most likely; a share has none.
pub(super) fn with_unit(amount: Amount) -> Result<Amount, String> {
    match amount {
        Amount::Bytes(size) => has_unit(size).map(Amount::Bytes),
        share => Ok(share),
    }
}

pub(super) fn amount(text: &str) -> Result<Amount, String> {
    let Some(share) = text.trim().strip_suffix('%') else {
        return text.parse().map(Amount::Bytes).map_err(|e: NotASize| e.to_string());
    };
    match share.trim().parse::<f64>() {
        Ok(v) if (0.0..=100.0).contains(&v) => Ok(Amount::Share(v / 100.0)),
        _ => {
            let said: String = text.chars().take(40).collect();
            Err(format!("“{said}” is not a share: 0% to 100%"))
        }
    }
}

/// Why such a `max` is refused.
pub(super) fn no_memory(max: Amount) -> String {
    format!("{max} is no memory: max must be above 0")
}

pub(super) fn is_weight(w: f64) -> bool {
    w.is_finite() && (0.001..=1000.0).contains(&w)
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
const SOCKETS: [(&str, SocketUse, &str); 4] = [
    ("own", SocketUse::Own, "with `ebb` in the file name, or named by [vm.NAME] qmp"),
    ("known", SocketUse::Known, "those, and those of known managers, shared with them"),
    ("shared", SocketUse::Shared, "all on a VM's command line, shared with others"),
    ("any", SocketUse::Any, "all on a VM's command line, kept"),
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

/// What this word of [`AGENT`] stands for, and the word for it.
pub(super) fn agent(word: &str) -> Option<AgentUse> {
    one_of(word, AGENT).ok()
}

pub(super) fn word(agent: AgentUse) -> &'static str {
    AGENT.iter().find(|(_, its, _)| *its == agent).map_or("", |(word, ..)| word)
}

/// Cores, given as percent of one; `least` percent at least.
fn share(said: &str, least: f64) -> Result<f64, String> {
    match said.trim().strip_suffix('%').map(|p| p.trim().parse()) {
        Some(Ok(p)) if (least..=3200.0).contains(&p) => Ok(p / 100.0),
        _ => Err(format!("“{said}” is not allowed: percent of a core, \"{least}%\" to \"3200%\"")),
    }
}

fn duration(text: &str, (least, most): (&str, &str)) -> Result<u64, String> {
    let limit = |text| milliseconds(text).unwrap_or(f64::NAN);
    match milliseconds(text) {
        Some(ms) if (limit(least)..=limit(most)).contains(&ms) => Ok(ms as u64),
        _ => Err(format!("“{text}” is not allowed: a time from \"{least}\" to \"{most}\"")),
    }
}

/// What one of these words stands for.
fn one_of<T: Copy, const N: usize>(said: &str, choices: [(&str, T, &str); N]) -> Result<T, String> {
    if let Some((_, value, _)) = choices.iter().find(|c| c.0 == said) {
        return Ok(*value);
    }
    let allowed = choices.map(|(word, _, meaning)| format!("\"{word}\" ({meaning})"));
    let (last, others) = allowed.split_last().expect("there are words");
    Err(format!("“{said}” is not allowed: {} or {last}", others.join(", ")))
}

fn user(raw: RawUser) -> Result<User, String> {
    match raw {
        // The last is no user: the kernel takes it for “unchanged”.
        RawUser::Uid(uid) => match u32::try_from(uid) {
            Ok(uid) if uid < u32::MAX => Ok(User::Uid(uid)),
            _ => Err(format!("{uid} is not a uid: 0 to {}", u32::MAX - 1)),
        },
        RawUser::Name(name) => {
            let odd = |c: char| c == ':' || c.is_whitespace() || c.is_control();
            match name.is_empty() || name.contains(odd) {
                true => Err(format!("“{}” is not the name of a user", name.escape_debug())),
                false => Ok(User::Name(name)),
            }
        }
    }
}

fn path(path: String) -> Result<String, String> {
    match path.starts_with('/') && !path.contains('\0') {
        true => Ok(path),
        false => Err(format!("“{path}” is not an absolute path")),
    }
}

/// Whether Ebb makes files of such names beside its state file.
fn is_own_name(file: &str) -> bool {
    let own = [KSM_NOTE, INTERVALS, HANDS_OFF, HANDED_OVER];
    let name = file.rsplit('/').next().unwrap_or_default();
    name.ends_with(".lock") || name.ends_with(".new") || own.contains(&name)
}

/// The longest path of a socket: `sun_path`, less its end.
const SOCKET_MOST: usize = 107;

fn socket(file: String) -> Result<String, String> {
    match file.len() {
        0..=SOCKET_MOST => path(file),
        n => Err(format!("“{file}” has {n} bytes: the path of a socket has at most {SOCKET_MOST}")),
    }
}

fn state_file(file: String) -> Result<String, String> {
    match is_own_name(&file) {
        true => Err(format!("“{file}” is named like the files that Ebb makes beside it")),
        false => path(file),
    }
}

fn listen(text: String) -> Result<String, String> {
    match text.parse::<std::net::SocketAddr>() {
        Ok(a) if a.ip().is_loopback() => Ok(text),
        _ => Err(format!(
            "“{text}” is not allowed: a loopback address and port, as in \"127.0.0.1:19177\" \
             (the interface has no passwords; publish it through a proxy that has)"
        )),
    }
}

struct Checker<'a> {
    file: &'a str,
    text: &'a str,
}

impl Checker<'_> {
    fn fail(&self, span: Option<Range<usize>>, field: &str, message: String) -> ConfigError {
        ConfigError {
            file: self.file.to_string(),
            line: span.map(|s| line_of(self.text, s.start)),
            field: field.to_string(),
            message,
        }
    }

    /// What a field says; the error of `parse` tells what is allowed.
    fn one<T, U>(
        &self,
        field: &str,
        raw: Spanned<T>,
        parse: impl FnOnce(T) -> Result<U, String>,
    ) -> Result<U, ConfigError> {
        let span = raw.span();
        parse(raw.into_inner()).map_err(|message| self.fail(Some(span), field, message))
    }

    /// What a field says that may be absent, as [`one`](Self::one).
    fn read<T, U>(
        &self,
        field: &str,
        raw: Option<Spanned<T>>,
        parse: impl FnOnce(T) -> Result<U, String>,
    ) -> Result<Option<U>, ConfigError> {
        raw.map(|raw| self.one(field, raw, parse)).transpose()
    }

    /// Puts what a field says, if it is there, in place of its default.
    fn set<T, U>(
        &self,
        to: &mut U,
        field: &str,
        raw: Option<Spanned<T>>,
        parse: impl FnOnce(T) -> Result<U, String>,
    ) -> Result<(), ConfigError> {
        if let Some(said) = self.read(field, raw, parse)? {
            *to = said;
        }
        Ok(())
    }

    fn config(&self, raw: RawConfig) -> Result<Config, ConfigError> {
        let mut c = Config::default();
        let (daemon, host) = (raw.daemon, raw.host);
        let tick = |text: String| duration(&text, TICK);
        self.set(&mut c.tick_ms, "daemon.tick", daemon.tick, tick)?;
        c.fast_tick_ms = c.fast_tick_ms.min(c.tick_ms);
        let span = daemon.fast_tick.as_ref().map(Spanned::span);
        self.set(&mut c.fast_tick_ms, "daemon.fast_tick", daemon.fast_tick, tick)?;
        if c.fast_tick_ms > c.tick_ms {
            let (fast, tick) = (c.fast_tick_ms, c.tick_ms);
            let message = format!("{fast} ms is longer than daemon.tick ({tick} ms)");
            return Err(self.fail(span, "daemon.fast_tick", message));
        }
        c.reserve = self.read("host.reserve", host.reserve, has_unit)?;
        c.defaults = self.vm(DEFAULTS, raw.defaults, &c.defaults)?;
        for (name, section) in raw.vm {
            let settings = self.vm(&format!("vm.{}", name.get_ref()), section, &c.defaults)?;
            c.vms.insert(self.vm_name(name, &c.vms)?, settings);
        }
        self.set(&mut c.listed_only, "host.vms", host.vms, |word| one_of(&word, [ALL, LISTED]))?;
        if c.listed_only {
            // A VM without a section that is still owed memory is given it back.
            (c.defaults.manage, c.defaults.own.manage) = (false, Some(false));
        }
        let span = daemon.socket.as_ref().map(Spanned::span);
        self.set(&mut c.socket, "daemon.socket", daemon.socket, socket)?;
        c.listen = self.read("daemon.listen", daemon.listen, listen)?;
        self.set(&mut c.state_file, "daemon.state_file", daemon.state_file, state_file)?;
        let [socket, state] = [&c.socket, &c.state_file].map(Path::new);
        let is_beside = socket.parent() == state.parent() && is_own_name(&c.socket);
        if socket == state || is_beside {
            let whose = if is_beside { "a file that Ebb makes beside" } else { "also" };
            let message = format!("{} is {whose} daemon.state_file: they need two names", c.socket);
            return Err(self.fail(span, "daemon.socket", message));
        }
        if c.vms.values().any(|vm| vm.qmp.as_deref().map(Path::new) == Some(socket)) {
            let message = format!("{} is also the qmp of a VM: Ebb needs one of its own", c.socket);
            return Err(self.fail(span, "daemon.socket", message));
        }
        c.pool = self.read("host.cgroup", host.cgroup, path)?;
        self.set(&mut c.sockets, "host.sockets", host.sockets, |word| one_of(&word, SOCKETS))?;
        c.libvirt = host.libvirt.unwrap_or(c.libvirt);
        let user = |raw| self.one("host.users", raw, user);
        c.users = host.users.into_iter().map(user).collect::<Result<_, _>>()?;
        let program = |raw| self.one("host.programs", raw, path);
        c.programs = host.programs.into_iter().map(program).collect::<Result<_, _>>()?;
        c.containers = host.containers;
        c.offload = host.offload;
        self.merge(raw.merge, &mut c.merge)?;
        Ok(c)
    }

    fn vm(&self, at: &str, mut raw: RawVm, base: &VmSettings) -> Result<VmSettings, ConfigError> {
        let field = |name: &str| format!("{at}.{name}");
        let identity = self.identity(at, &mut raw)?;
        // Where only `max` is in this section, `min` is that of all VMs.
        let of_min = raw.min.as_ref().map(|min| ("min", min.span()));
        let limit = of_min.or(raw.max.as_ref().map(|max| ("max", max.span())));
        let max = self.read(&field("max"), raw.max, |max| match max.read()? {
            max if max.is_nothing() => Err(no_memory(max)),
            max => Ok(max),
        })?;
        let min = self.read(&field("min"), raw.min, RawAmount::read)?;
        let weight = self.read(&field("weight"), raw.weight, |w| match is_weight(w) {
            true => Ok(w),
            false => Err(format!("{w} is not a weight: a number from 0.001 to 1000")),
        })?;
        let own = Overrides {
            manage: raw.manage,
            min,
            max,
            weight,
            group: raw.group.map(Spanned::into_inner),
            merge: raw.merge,
            zeros: raw.zeros,
            agent: self.read(&field("agent"), raw.agent, |word| one_of(&word, AGENT))?,
        };
        let window_limit = |text: String| duration(&text, ("1ms", "10s"));
        let mut settings = VmSettings {
            qmp: self.read(&field("qmp"), raw.qmp, path)?,
            private_ram: raw.private_ram.unwrap_or(base.private_ram),
            window_limit_ms: self
                .read(&field("window_limit"), raw.window_limit, window_limit)?
                .or(base.window_limit_ms),
            identity,
            ..base.set(&own)
        };
        if at != DEFAULTS {
            settings.own = own;
        }
        let min = settings.min;
        if let Some(max) = settings.max.filter(|max| min.is_above(*max)) {
            let own = &settings.own;
            let [of_min, of_max] = [own.min, own.max].map(|own| match own {
                None if at != DEFAULTS => " (the default)",
                _ => "",
            });
            let message =
                format!("min {min}{of_min} is above max {max}{of_max}: min must not exceed max");
            let (key, span) = limit.unzip();
            return Err(self.fail(span, &field(key.unwrap_or("min")), message));
        }
        Ok(settings)
    }

    fn merge(&self, raw: RawMerge, c: &mut MergeConfig) -> Result<(), ConfigError> {
        let clear_cores = |said: String| share(&said, 0.1);
        self.set(&mut c.settings.floor, "merge.floor", raw.floor, has_unit)?;
        self.set(&mut c.settings.cores, "merge.cpu", raw.cpu, |said| share(&said, 1.0))?;
        self.set(&mut c.settings.clear_cores, "merge.cpu_clear", raw.cpu_clear, clear_cores)?;
        self.set(&mut c.mode, "merge.mode", raw.mode, |word| one_of(&word, MERGE))?;
        self.set(&mut c.scan_ms, "merge.scan", raw.scan, |text| duration(&text, SCAN))?;
        (c.group, c.across_groups) = (raw.group, raw.across_groups);
        (c.advisor, c.hold_khugepaged) = (raw.advisor, raw.hold_khugepaged);
        c.zeros = raw.zeros;
        Ok(())
    }

    fn identity(&self, at: &str, raw: &mut RawVm) -> Result<Identity, ConfigError> {
        let spans = [
            ("user", raw.user.as_ref().map(Spanned::span)),
            ("uuid", raw.uuid.as_ref().map(Spanned::span)),
            ("cgroup", raw.cgroup.as_ref().map(Spanned::span)),
            ("qmp", raw.qmp.as_ref().map(Spanned::span)),
        ];
        let given = spans.into_iter().find(|(_, span)| span.is_some());
        if let (DEFAULTS, Some((field, span))) = (at, given) {
            let message = "this is of one VM only: write it in a [vm.NAME] section";
            return Err(self.fail(span, &format!("{at}.{field}"), message.into()));
        }
        let uuid = |uuid: String| match is_uuid(&uuid) {
            true => Ok(uuid.to_ascii_lowercase()),
            false => Err(UUID.into()),
        };
        Ok(Identity {
            user: self.read(&format!("{at}.user"), raw.user.take(), user)?,
            uuid: self.read(&format!("{at}.uuid"), raw.uuid.take(), uuid)?,
            cgroup: self.read(&format!("{at}.cgroup"), raw.cgroup.take(), path)?,
        })
    }

    /// The name of a section, one by uuid in small letters.
    fn vm_name(
        &self,
        name: Spanned<String>,
        others: &BTreeMap<String, VmSettings>,
    ) -> Result<String, ConfigError> {
        let field = format!("vm.{}", name.get_ref());
        self.one(&field, name, |written| {
            let Some(uuid) = written.strip_prefix(BY_UUID) else { return Ok(written) };
            let name = by_uuid(uuid);
            match () {
                () if !is_uuid(uuid) => Err(format!("after “uuid:” comes the VM's -uuid: {UUID}")),
                () if others.contains_key(&name) => {
                    Err("there is a section of this VM already".into())
                }
                () => Ok(name),
            }
        })
    }
}
