//! Whether a VM is what its section of the configuration says it must be
//! ([`ebb_core::config::Identity`]). What cannot be read is not so.

use std::path::Path;

use ebb_core::config::{Config, Identity, User};
use ebb_core::sample::Claim;

use super::cgroup::{Version, read_process_cgroup};
use super::process::read_credentials;
use super::qemu::QemuProcess;
use super::trust::uid;
use crate::root::Root;

/// What a VM's claim to its section is worth. `version` is that of the hierarchy that
/// memory cgroups are in.
pub fn claim(root: &Root, config: &Config, version: Version, process: &QemuProcess) -> Claim {
    let Some(section) = config.section(&process.given, process.uuid.as_deref()) else {
        return Claim::Open;
    };
    let identity = &section.identity;
    match differs(root, identity, version, process) {
        Some(why) => Claim::Refused(why),
        None if identity.is_proof() => Claim::Proven,
        None => Claim::Open,
    }
}

fn differs(
    root: &Root,
    identity: &Identity,
    version: Version,
    process: &QemuProcess,
) -> Option<String> {
    let pid = process.id.pid;
    if let Some(uuid) = &identity.uuid {
        match process.uuid.as_deref().map(str::to_ascii_lowercase) {
            Some(its) if its == *uuid => {}
            Some(its) => return Some(format!("its uuid is {its}, not {uuid}")),
            None => return Some(format!("it has no uuid, and is to have {uuid}")),
        }
    }
    if let Some(user) = &identity.user {
        let passwd = match user {
            User::Name(_) => root.read("/etc/passwd").ok().flatten().unwrap_or_default(),
            User::Uid(_) => String::new(),
        };
        let Some(uid) = uid(&passwd, user) else {
            return Some(format!("there is no user {user}"));
        };
        let whose = read_credentials(root, pid).ok().flatten();
        let Some(whose) = whose else { return Some("its user cannot be read".into()) };
        if let Some(other) = whose.uids.iter().find(|u| **u != uid) {
            return Some(format!("it runs as uid {other}, not {uid}"));
        }
    }
    if let Some(cgroup) = &identity.cgroup {
        match read_process_cgroup(root, version, pid).ok().flatten() {
            Some(its) if Path::new(&its).starts_with(cgroup) => {}
            Some(its) => return Some(format!("its cgroup is {its}, not below {cgroup}")),
            None => return Some("its cgroup cannot be read".into()),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::VmId;

    const UUID: &str = "11111111-2222-3333-4444-555555555555";

    fn process(name: &str, uuid: Option<&str>) -> QemuProcess {
        let uuid = uuid.map(str::to_owned);
        QemuProcess { uuid, ..QemuProcess::plain(VmId { pid: 10, start: 7 }, name.into()) }
    }

    #[test]
    fn a_name_is_worth_what_the_host_says_of_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let write = |path: &str, text: &str| {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("/etc/passwd", "vm-db:x:107:107::/:/bin/false\n");
        let status = |uids: &str| write("/proc/10/status", &format!("Uid: {uids}\n"));
        let cgroup = |path: &str| write("/proc/10/cgroup", &format!("4:memory:/v1\n0::{path}\n"));
        let text = format!(
            "[vm.plain]\n[vm.db]\nuser = \"vm-db\"\ncgroup = \"/t/db\"\n[vm.u]\nuuid = \"{UUID}\"\n\
             [vm.none]\nuser = \"nobody-here\"\n"
        );
        let config = Config::parse("f", &text).unwrap();
        let of = |name: &str, uuid| claim(&root, &config, Version::V2, &process(name, uuid));
        let refused = |name: &str, uuid| match of(name, uuid) {
            Claim::Refused(why) => why,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!((of("plain", None), of("other", None)), (Claim::Open, Claim::Open));
        assert!(refused("db", None).contains("user cannot be read"));
        status("107 107 107 107");
        assert!(refused("db", None).contains("cgroup cannot be read"));
        for (path, proven) in [("/t/db/x.scope", true), ("/t/db", true), ("/t/db2", false)] {
            cgroup(path);
            assert_eq!(of("db", None) == Claim::Proven, proven, "{path}");
        }
        cgroup("/t/db");
        status("107 107 0 107");
        assert_eq!(refused("db", None), "it runs as uid 0, not 107");
        assert!(refused("none", None).contains("no user nobody-here"));
        assert!(refused("u", None).contains("has no uuid"));
        assert!(refused("u", Some("1")).contains("its uuid is 1"));
        assert_eq!(of("u", Some(UUID)), Claim::Open, "its QEMU's word proves nothing");
    }
}
