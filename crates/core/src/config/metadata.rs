//! Settings of a VM that its manager keeps with it: libvirt's metadata of a domain.
//!
//! A key that the VM's section of the configuration sets counts before the metadata, and the
//! metadata before `[defaults]`: the host's file has the last word on its own host, and what is
//! said of one VM counts more than what is said of all.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{AgentUse, Amount, Config, VmSettings, read};
use crate::sample::VmSample;
use crate::text::printable;
use crate::units::Bytes;

/// The namespace of the element that has them. A name and no address: nothing is fetched.
pub const NAMESPACE: &str = "urn:ebb:domain:1";

/// The attributes that there are.
const KEYS: &str = "min, max, weight, group, manage, merge, zeros and agent";
/// Keys of a section that say how the host reaches and trusts a VM.
const ONLY_IN_FILE: [&str; 6] = ["qmp", "user", "uuid", "cgroup", "private_ram", "window_limit"];
/// Most bytes of a group's name.
const MAX_GROUP: usize = 100;
/// Most characters of a value that a message repeats.
const MAX_SAID: usize = 40;

/// What is set of one VM; what is not is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overrides {
    /// As [`VmSettings::manage`], and so on.
    pub manage: Option<bool>,
    pub min: Option<Amount>,
    pub max: Option<Amount>,
    pub weight: Option<f64>,
    pub group: Option<String>,
    pub merge: Option<bool>,
    pub zeros: Option<bool>,
    pub agent: Option<AgentUse>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "what")]
pub enum Metadata {
    /// Nothing, or its manager keeps none.
    #[default]
    None,
    /// It has not been read yet: why. Nothing is taken from the VM until it was.
    Unread(String),
    /// It is wrong: which attribute, and what to do. The VM is left alone.
    Wrong(String),
    Says(Overrides),
}

impl Metadata {
    pub fn is_none(&self) -> bool {
        *self == Metadata::None
    }

    pub fn settings(&self) -> Option<&Overrides> {
        match self {
            Metadata::Says(its) => Some(its),
            _ => None,
        }
    }
}

impl Overrides {
    pub fn is_empty(&self) -> bool {
        *self == Overrides::default()
    }

    /// Reads attributes, by name and value. The error names the attribute and what is allowed.
    pub fn read<'a>(
        attributes: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Overrides, String> {
        let mut all = Overrides::default();
        for (name, value) in attributes {
            let value = value.trim();
            let wrong = |why: String| format!("attribute {}: {why}", printable(name, MAX_SAID));
            match name {
                "manage" => all.manage = Some(yes_or_no(value).map_err(wrong)?),
                "min" => all.min = Some(amount(value).map_err(wrong)?),
                "max" => all.max = Some(amount(value).map_err(wrong)?),
                "weight" => all.weight = Some(weight(value).map_err(wrong)?),
                "group" => all.group = Some(group(value).map_err(wrong)?),
                "merge" => all.merge = Some(yes_or_no(value).map_err(wrong)?),
                "zeros" => all.zeros = Some(yes_or_no(value).map_err(wrong)?),
                "agent" => all.agent = Some(agent(value).map_err(wrong)?),
                _ if ONLY_IN_FILE.contains(&name) => {
                    return Err(wrong("only a [vm.NAME] section of ebb.toml may set it".into()));
                }
                _ => return Err(wrong(format!("there is none of this name, only {KEYS}"))),
            }
        }
        match (all.min, all.max) {
            (_, Some(max)) if max.is_nothing() => {
                Err(format!("attribute max: {}", read::no_memory(max)))
            }
            (Some(min), Some(max)) if min.is_above(max) => {
                Err(format!("attribute min: {min} is above max, which is {max}"))
            }
            _ => Ok(all),
        }
    }

    /// What counts of it beside a section that sets these, in words.
    fn words(&self, section: &Overrides) -> String {
        let (mut counts, mut others) = (Vec::new(), Vec::new());
        let mut add = |key: &str, value: Option<String>, is_set: bool| match value {
            None => {}
            Some(_) if is_set => others.push(key.to_owned()),
            Some(value) => counts.push(format!("{key} {value}")),
        };
        let yes = |b: bool| if b { "yes" } else { "no" }.to_owned();
        add("manage", self.manage.map(yes), section.manage.is_some());
        add("min", self.min.map(|m| m.to_string()), section.min.is_some());
        add("max", self.max.map(|m| m.to_string()), section.max.is_some());
        add("weight", self.weight.map(|w| w.to_string()), section.weight.is_some());
        add("group", self.group.clone(), section.group.is_some());
        add("merge", self.merge.map(yes), section.merge.is_some());
        add("zeros", self.zeros.map(yes), section.zeros.is_some());
        let agent = self.agent.map(|its| read::word(its).to_owned());
        add("agent", agent, section.agent.is_some());
        let (counts, others) = (counts.join(", "), others.join(", "));
        match (counts.is_empty(), others.is_empty()) {
            (_, true) => counts,
            (true, false) => format!("none: its section of ebb.toml sets {others}"),
            (false, false) => format!("{counts} (its section of ebb.toml sets {others})"),
        }
    }
}

impl VmSettings {
    /// With what metadata sets beyond the section's own keys, for a VM with this much RAM. A
    /// ceiling of the metadata does not lower a floor of the section.
    pub fn with(&self, metadata: &Metadata, ram: Bytes) -> Cow<'_, VmSettings> {
        let Some(its) = metadata.settings() else { return Cow::Borrowed(self) };
        let own = &self.own;
        let mut all = self.set(its).set(own);
        if let (Some(least), Some(most), None) = (own.min, its.max, own.max)
            && least.of(ram) > most.of(ram)
        {
            all.max = Some(least);
        }
        Cow::Owned(all)
    }

    /// These settings where nothing else is set.
    pub(super) fn set(&self, its: &Overrides) -> VmSettings {
        VmSettings {
            manage: its.manage.unwrap_or(self.manage),
            min: its.min.unwrap_or(self.min),
            max: its.max.or(self.max),
            weight: its.weight.unwrap_or(self.weight),
            group: its.group.clone().unwrap_or_else(|| self.group.clone()),
            merge: its.merge.or(self.merge),
            zeros: its.zeros.unwrap_or(self.zeros),
            agent: its.agent.unwrap_or(self.agent),
            ..self.clone()
        }
    }
}

impl Config {
    /// The settings of a VM as it was sampled: section, metadata and defaults together.
    pub fn settings_of(&self, vm: &VmSample) -> Cow<'_, VmSettings> {
        let ram = vm.ram.or(vm.balloon.as_ref().map(|b| b.actual)).unwrap_or_default();
        self.settings(vm.given_name(), vm.uuid.as_deref()).with(&vm.metadata, ram)
    }

    /// The share group that a VM's metadata gives it, if that counts.
    pub fn group_by_metadata<'a>(&self, vm: &'a VmSample) -> Option<&'a str> {
        let group = vm.metadata.settings()?.group.as_deref()?;
        let own = &self.settings(vm.given_name(), vm.uuid.as_deref()).own;
        own.group.is_none().then_some(group)
    }

    /// What counts of a VM's metadata, in words; empty: nothing.
    pub fn metadata_words(&self, vm: &VmSample) -> String {
        let Some(its) = vm.metadata.settings() else { return String::new() };
        its.words(&self.settings(vm.given_name(), vm.uuid.as_deref()).own)
    }
}

fn not_allowed(value: &str, allowed: &str) -> String {
    format!("“{}” is not allowed: {allowed}", printable(value, MAX_SAID))
}

fn yes_or_no(value: &str) -> Result<bool, String> {
    match value {
        "yes" | "true" => Ok(true),
        "no" | "false" => Ok(false),
        _ => Err(not_allowed(value, "yes or no")),
    }
}

/// As in the configuration, but a size has a unit: libvirt's own numbers are KiB.
fn amount(value: &str) -> Result<Amount, String> {
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(not_allowed(value, "a size has a unit, as in 512MiB or 25%"));
    }
    read::with_unit(read::amount(value)?)
}

fn weight(value: &str) -> Result<f64, String> {
    let weight = value.parse().ok().filter(|w| read::is_weight(*w));
    weight.ok_or_else(|| not_allowed(value, "a number from 0.001 to 1000"))
}

fn group(value: &str) -> Result<String, String> {
    let good =
        !value.is_empty() && value.len() <= MAX_GROUP && !value.contains(|c: char| c.is_control());
    let allowed = "1 to 100 bytes without control characters";
    good.then(|| value.to_owned()).ok_or_else(|| not_allowed(value, allowed))
}

fn agent(value: &str) -> Result<AgentUse, String> {
    read::agent(value).ok_or_else(|| not_allowed(value, "on, observe or off"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(all: &[(&str, &str)]) -> Result<Overrides, String> {
        Overrides::read(all.iter().copied())
    }

    fn vm(attributes: &[(&str, &str)]) -> VmSample {
        let metadata = Metadata::Says(of(attributes).unwrap());
        VmSample { name: "a".into(), ram: Some(Bytes::gib(1)), metadata, ..VmSample::default() }
    }

    #[test]
    fn a_wrong_attribute_is_named_with_what_is_allowed() {
        for (name, value, expected) in [
            ("min", "512", "attribute min: “512” is not allowed: a size has a unit"),
            ("max", "600B", "attribute max: 600 B is below 1 MiB: write the unit"),
            ("min", "", "attribute min: “” is not a size"),
            ("max", "12 potatoes", "attribute max: “12 potatoes” is not a size"),
            ("min", "120%", "attribute min: “120%” is not a share: 0% to 100%"),
            ("max", "NaN%", "attribute max: “NaN%” is not a share"),
            ("max", "0%", "attribute max: 0% is no memory: max must be above 0"),
            ("max", "0MiB", "attribute max: 0 B is no memory"),
            ("weight", "0", "attribute weight: “0” is not allowed: a number from 0.001"),
            ("weight", "inf", "attribute weight: “inf” is not allowed"),
            ("manage", "maybe", "attribute manage: “maybe” is not allowed: yes or no"),
            ("group", "", "attribute group: “” is not allowed: 1 to 100 bytes"),
            ("agent", "On", "attribute agent: “On” is not allowed: on, observe or off"),
            ("qmp", "/a", "attribute qmp: only a [vm.NAME] section of ebb.toml may set it"),
            ("Min", "1GiB", "attribute Min: there is none of this name, only min, max, weight"),
        ] {
            let e = of(&[(name, value)]).unwrap_err();
            assert!(e.starts_with(expected), "{e}\n not {expected}");
        }
        let e = of(&[("min", "2GiB"), ("max", "1GiB")]).unwrap_err();
        assert_eq!(e, "attribute min: 2 GiB is above max, which is 1 GiB");
        assert_eq!(of(&[]), Ok(Overrides::default()));
    }

    #[test]
    fn the_section_wins_for_each_key_and_the_metadata_over_the_defaults() {
        let text = "[defaults]\nmin = \"10%\"\nweight = 2\ngroup = \"d\"\n[vm.a]\nweight = 3\n";
        let config = Config::parse("f", text).unwrap();
        let a = vm(&[("weight", "5"), ("min", "256MiB"), ("manage", "no"), ("agent", "off")]);
        let s = config.settings_of(&a);
        assert_eq!((s.weight, s.min), (3.0, Amount::Bytes(Bytes::mib(256))));
        assert_eq!((s.manage, s.agent, s.group.as_str()), (false, AgentUse::Off, "d"));
        let words = "manage no, min 256 MiB, agent off (its section of ebb.toml sets weight)";
        assert_eq!(config.metadata_words(&a), words);
        let b = VmSample { name: "b".into(), ..a.clone() };
        assert_eq!(config.settings_of(&b).weight, 5.0);
        assert_eq!(config.metadata_words(&b), "manage no, min 256 MiB, weight 5, agent off");
        let none = VmSample { metadata: Metadata::None, ..b };
        assert_eq!(*config.settings_of(&none), config.defaults);
        let text = "[vm.a]\nmanage = true\nweight = 1\nmin = 0\nagent = \"on\"\n";
        let config = Config::parse("f", text).unwrap();
        assert_eq!(*config.settings_of(&a), config.vms["a"], "also where it sets a default");
    }

    #[test]
    fn a_ceiling_of_the_metadata_does_not_lower_a_floor_of_the_section() {
        let config = Config::parse("f", "[vm.a]\nmin = \"50%\"\n").unwrap();
        let ceiling = |max| config.settings_of(&vm(&[("max", max)])).max;
        assert_eq!(ceiling("256MiB"), Some(Amount::Share(0.5)));
        assert_eq!(ceiling("768MiB"), Some(Amount::Bytes(Bytes::mib(768))));
    }

    #[test]
    fn a_record_keeps_it() {
        let a = vm(&[("min", "25%"), ("group", "g")]);
        let json = serde_json::to_string(&a).unwrap();
        assert_eq!(serde_json::from_str::<VmSample>(&json).unwrap(), a);
        let config = Config::parse("f", "[vm.a]\nweight = 3\n").unwrap();
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
    }

    proptest! {
        #[test]
        fn any_value_is_read_or_refused_in_few_words(name in "(min|max|weight|group|manage|agent|.{0,9})", value in ".{0,200}") {
            match of(&[(&name, &value)]) {
                Ok(all) => prop_assert!(all.weight.is_none_or(read::is_weight)),
                Err(why) => prop_assert!(why.len() < 600 && !why.contains('\n'), "{why}"),
            }
        }
    }
}
