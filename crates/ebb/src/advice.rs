//! What an operator is to know or to do, where several commands say it in the same words: what in
//! the configuration has no effect on this host, and how a domain gets an argument of QEMU's.

use ebb_core::config::{Amount, BY_UUID, Config, LEAST_FLOOR, User, by_uuid};
use ebb_core::model::HostModel;
use ebb_core::sample::VmSample;
use ebb_host::probe::trust::uid;
use ebb_host::root::Root;

/// Names listed in one line; the rest is counted.
pub const NAMES: usize = 10;

/// The header of a VM's section, as TOML takes it.
pub fn header(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    match !name.is_empty() && name.chars().all(bare) {
        true => format!("[vm.{name}]"),
        false => format!("[vm.{name:?}]"),
    }
}

/// How an argument of QEMU's gets into a domain's description.
pub fn in_description(option: &str, value: &str) -> String {
    format!(
        "virsh edit: xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' in <domain>, and \
         before </domain> <qemu:commandline><qemu:arg value='{option}'/>\
         <qemu:arg value='{value}'/></qemu:commandline>"
    )
}

/// What in a valid configuration cannot have an effect here, or not the one that it is written for.
pub fn doubts(config: &Config, root: &Root) -> Vec<String> {
    let passwd = root.read("/etc/passwd").ok().flatten().unwrap_or_default();
    let no_user = |at: String, user: &User| {
        uid(&passwd, user).is_none().then(|| format!("{at}: no user “{user}” in /etc/passwd"))
    };
    let mut all: Vec<String> =
        config.users.iter().filter_map(|user| no_user("host.users".into(), user)).collect();
    // Those of containers are in there.
    let here = config.programs.iter().filter(|_| !config.containers);
    let missing = here.filter(|program| !root.path(program).exists());
    all.extend(missing.map(|program| format!("host.programs: there is no {program}")));
    let sections = config.vms.iter().map(|(name, vm)| (format!("vm.{name}"), vm));
    for (at, vm) in std::iter::once(("defaults".into(), &config.defaults)).chain(sections) {
        let (max, identity) =
            (vm.max.filter(|_| vm.own.max.is_some() || at == "defaults"), &vm.identity);
        if let Some(max @ Amount::Bytes(size)) = max
            && size < LEAST_FLOOR
        {
            all.push(format!(
                "{at}.max: {max} is below {LEAST_FLOOR}, the least that a VM is left"
            ));
        }
        all.extend(identity.user.as_ref().and_then(|user| no_user(format!("{at}.user"), user)));
        let uuids =
            (at.strip_prefix("vm.").and_then(|at| at.strip_prefix(BY_UUID)), &identity.uuid);
        if let (Some(section), Some(its)) = uuids
            && section != its
        {
            all.push(format!("{at}.uuid: {its} is not the section's: no VM has both"));
        }
    }
    let merge = &config.merge.settings;
    if merge.clear_cores > merge.cores {
        all.push("merge.cpu_clear is above merge.cpu, and only that much of it counts".into());
    }
    all
}

/// A reserve that is larger than what counts of it.
fn cut_reserve(config: &Config, host: &HostModel) -> Option<String> {
    let wanted = config.reserve.filter(|r| host.known && *r > host.shown.capacity.share(0.5))?;
    Some(format!(
        "host.reserve = {wanted} is more than half of {} under {}: {} of it counts",
        host.shown.capacity, host.shown.name, host.shown.reserve
    ))
}

/// The sections that may be a VM's.
pub fn sections(vm: &VmSample) -> impl Iterator<Item = String> {
    let uuid = vm.uuid.as_deref().map(by_uuid);
    std::iter::once(vm.given_name().to_string()).chain(uuid)
}

/// Sections `[vm.NAME]` of a VM that has one by its uuid: that one alone counts.
fn shadowed_sections(config: &Config, vms: &[VmSample]) -> Vec<String> {
    if !config.vms.keys().any(|name| name.starts_with(BY_UUID)) {
        return Vec::new();
    }
    let shadowed = |vm: &VmSample| {
        let mut there = sections(vm).filter(|section| config.vms.contains_key(section));
        let (name, uuid) = (there.next()?, there.next()?);
        let said =
            || format!("[vm.{name}] has no effect: [vm.\"{uuid}\"] is of the same VM, and counts");
        (name != uuid).then(said)
    };
    vms.iter().filter_map(shadowed).take(NAMES).collect()
}

/// What in the configuration has no effect here. `unmet`: its sections without a VM.
pub fn without_effect<'a>(
    config: &Config,
    host: &HostModel,
    vms: &[VmSample],
    unmet: impl Iterator<Item = &'a str>,
) -> Vec<String> {
    let once = cut_reserve(config, host).into_iter().chain(unmet_sections(config, unmet));
    once.chain(shadowed_sections(config, vms)).collect()
}

/// Sections `[vm.NAME]` without a VM. Where one says `manage = false`, a VM that was meant is
/// managed all the same.
fn unmet_sections<'a>(config: &Config, unmet: impl Iterator<Item = &'a str>) -> Option<String> {
    let is_managed = |name: &&str| config.vms.get(*name).is_none_or(|vm| vm.manage);
    let (names, off): (Vec<&str>, Vec<&str>) = unmet.partition(is_managed);
    let all = names.len() + off.len();
    if all == 0 {
        return None;
    }
    let off = off.iter().map(|name| format!("{} (manage = false)", header(name)));
    let names = names.iter().map(|name| header(name));
    let listed: Vec<String> = off.chain(names).take(NAMES).collect();
    let rest = all - listed.len();
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    Some(format!(
        "no VM with the name of {}{more} has been seen: it is not started, or spelt otherwise \
         (`ebb status` shows names)",
        listed.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::model::Limit;
    use ebb_core::units::Bytes;

    #[test]
    fn sections_without_a_vm_are_named_and_those_that_protect_one_first() {
        let text = "[vm.web]\n[vm.db]\nmanage = false\n";
        let config = Config::parse("f", text).unwrap();
        assert_eq!(unmet_sections(&config, [].into_iter()), None);
        let said = unmet_sections(&config, ["web", "db"].into_iter()).unwrap();
        assert!(said.starts_with("no VM with the name of [vm.db] (manage = false), [vm.web] has"));
        assert_eq!(["a-b", "a.b", ""].map(header), ["[vm.a-b]", "[vm.\"a.b\"]", "[vm.\"\"]"]);
        let many: Vec<String> = (0..12).map(|n| format!("v{n}")).collect();
        let said = unmet_sections(&config, many.iter().map(String::as_str)).unwrap();
        assert!(said.contains("[vm.v9] and 2 more has"), "{said}");
    }

    const UUID: &str = "6f1ed002-ab5c-4e2e-9d2c-0d4a6f1c5b11";

    #[test]
    fn a_section_beside_one_by_uuid_has_no_effect() {
        let text = format!("[vm.web]\nmanage = false\n[vm.\"uuid:{UUID}\"]\n[vm.db]\n");
        let config = Config::parse("f", &text).unwrap();
        let of = |name: &str, uuid: Option<&str>| {
            let (name, uuid) = (name.into(), uuid.map(Into::into));
            shadowed_sections(&config, &[VmSample { name, uuid, ..VmSample::default() }])
        };
        let said = of("web", Some(UUID));
        assert!(said[0].starts_with("[vm.web] has no effect: [vm.\"uuid:6f1e"), "{said:?}");
        let none = [of("web", None), of("db", Some("u2")), of("other", Some(UUID))];
        assert!(none.iter().all(Vec::is_empty), "{none:?}");
    }

    #[test]
    fn what_is_valid_and_of_no_use_is_doubted() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("etc/passwd"), "al:x:7:7::/:/bin/sh\n").unwrap();
        let said = |text: &str| doubts(&Config::parse("f", text).unwrap(), &Root::at(dir.path()));
        for (text, expected) in [
            (
                "[host]\nusers = [\"al\", 9, \"nosuch\"]",
                "host.users: no user “nosuch” in /etc/passwd",
            ),
            (
                "[host]\nprograms = [\"/etc/passwd\", \"/no/qemu\"]",
                "host.programs: there is no /no/qemu",
            ),
            ("[vm.a]\nuser = \"nosuch\"", "vm.a.user: no user “nosuch” in /etc/passwd"),
            (
                "[vm.a]\nmax = \"1MiB\"\nmin = 0\n[vm.b]",
                "vm.a.max: 1 MiB is below 64 MiB, the least that a VM is left",
            ),
            (
                "[defaults]\nmax = \"1MiB\"\nmin = 0\n[vm.b]",
                "defaults.max: 1 MiB is below 64 MiB, the least that a VM is left",
            ),
            (
                "[merge]\ncpu = \"1%\"\ncpu_clear = \"50%\"",
                "merge.cpu_clear is above merge.cpu, and only that much of it counts",
            ),
        ] {
            assert_eq!(said(text), [expected], "{text}");
        }
        let other = UUID.replace('6', "7");
        let text = format!("[vm.\"uuid:{UUID}\"]\nuuid = \"{other}\"\n");
        assert!(
            said(&text)[0].ends_with("is not the section's: no VM has both"),
            "{:?}",
            said(&text)
        );
        let same = format!("[vm.\"uuid:{UUID}\"]\nuuid = \"{UUID}\"\n[vm.a]\nmax = \"1GiB\"\n");
        assert_eq!(said(&same), Vec::<String>::new());
    }

    #[test]
    fn a_reserve_that_is_cut_is_said_with_both_figures() {
        let config = Config::parse("f", "[host]\nreserve = \"20GiB\"\n").unwrap();
        let (capacity, reserve) = (Bytes::gib(24), Bytes::gib(12));
        let shown = Limit { name: "host".into(), capacity, reserve, ..Limit::default() };
        let mut host = HostModel { known: true, shown, ..HostModel::default() };
        let said = cut_reserve(&config, &host).unwrap();
        let want =
            "host.reserve = 20 GiB is more than half of 24 GiB under host: 12 GiB of it counts";
        assert_eq!(said, want);
        // A limit that holds more than its VMs may take keeps less: that is no fault.
        host.shown.capacity = Bytes::gib(40);
        assert_eq!(cut_reserve(&config, &host), None);
        assert_eq!(cut_reserve(&Config::default(), &HostModel::default()), None);
    }
}
