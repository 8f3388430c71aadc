//! Whether a VM is what its section of the configuration says it must be
//! ([`ebb_core::config::Identity`]).

use std::path::Path;

use ebb_core::config::{Config, Identity, User};
use ebb_core::sample::Claim;

use super::cgroup::{Version, read_process_cgroup};
use super::process::read_credentials;
use super::qemu::{QemuProcess, QmpAddress};
use super::trust::uid;
use crate::root::{ProbeError, Root};

/// What a VM's claim to its section is worth. `version` is that of the hierarchy that
/// memory cgroups are in.
pub fn claim(root: &Root, config: &Config, version: Version, process: &QemuProcess) -> Claim {
    let Some(section) = config.section(&process.given, process.args.uuid.as_deref()) else {
        return Claim::Open;
    };
    let identity = &section.identity;
    match differs(root, identity, version, process) {
        Err(e) => Claim::Unread(e.to_string()),
        Ok(Some(why)) => Claim::Refused(why),
        Ok(None) if identity.is_proof() => Claim::Proven,
        Ok(None) => Claim::Open,
    }
}

/// A section that names one of a VM's QMP sockets is that VM's, also while Ebb is not connected.
pub fn name_by_socket(config: &Config, process: &mut QemuProcess) {
    let QmpAddress::Paths(paths) = &process.args.qmp else { return };
    let has = |path: &String| paths.iter().any(|its| its == Path::new(path));
    let mut sections = config.vms.iter();
    let found = sections.find(|(_, section)| section.qmp.as_ref().is_some_and(has));
    if let Some((name, _)) = found {
        // One that has the section by its uuid keeps its name.
        let _ = process.call(name.clone());
    }
}

fn differs(
    root: &Root,
    identity: &Identity,
    version: Version,
    process: &QemuProcess,
) -> Result<Option<String>, ProbeError> {
    let no = |why: String| Ok(Some(why));
    let pid = process.id.pid;
    if let Some(uuid) = &identity.uuid {
        match process.args.uuid.as_deref().map(str::to_ascii_lowercase) {
            Some(its) if its == *uuid => {}
            Some(its) => return no(format!("its uuid is {its}, not {uuid}")),
            None => return no(format!("it has no uuid, and is to have {uuid}")),
        }
    }
    if let Some(user) = &identity.user {
        let passwd = match user {
            User::Name(_) => root.read("/etc/passwd")?.unwrap_or_default(),
            User::Uid(_) => String::new(),
        };
        let Some(uid) = uid(&passwd, user) else {
            return no(format!("there is no user {user}"));
        };
        let Some(whose) = read_credentials(root, pid)? else {
            return no("it has ended".into());
        };
        if let Some(other) = whose.uids.iter().find(|u| **u != uid) {
            return no(format!("it runs as uid {other}, not {uid}"));
        }
    }
    if let Some(cgroup) = &identity.cgroup {
        match read_process_cgroup(root, version, pid)? {
            Some(its) if Path::new(&its).starts_with(cgroup) => {}
            Some(its) => return no(format!("its cgroup is {its}, not below {cgroup}")),
            None => return no("it is in no memory cgroup, or has ended".into()),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::VmId;

    use crate::probe::qemu::QemuArgs;
    use crate::testing::tree;

    const UUID: &str = "11111111-2222-3333-4444-555555555555";

    fn process(name: &str, uuid: Option<&str>) -> QemuProcess {
        let args = QemuArgs { uuid: uuid.map(str::to_owned), ..QemuArgs::default() };
        QemuProcess { args, ..QemuProcess::plain(VmId { pid: 10, start: 7 }, name.into()) }
    }

    #[test]
    fn a_name_is_worth_what_the_host_says_of_the_process() {
        let root = tree(&[("/etc/passwd", "vm-db:x:107:107::/:/bin/false\n")]);
        let status = |uids: &str| root.put("/proc/10/status", format!("Uid: {uids}\n"));
        let cgroup = |path: &str| root.put("/proc/10/cgroup", format!("4:memory:/v1\n0::{path}\n"));
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
        assert_eq!(refused("db", None), "it has ended");
        root.dir("/proc/10/status");
        assert!(matches!(of("db", None), Claim::Unread(why) if why.contains("/proc/10/status")));
        root.remove("/proc/10/status");
        status("107 107 107 107");
        assert!(refused("db", None).contains("no memory cgroup"));
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

    #[test]
    fn a_section_that_names_a_socket_names_its_vm() {
        let text = format!(
            "[vm.db]\nqmp = \"/run/db.qmp\"\nmanage = false\n\
             [vm.\"uuid:{UUID}\"]\nqmp = \"/run/u.qmp\"\n"
        );
        let config = Config::parse("f", &text).unwrap();
        let called = |paths: &[&str], uuid| {
            let paths = paths.iter().map(Into::into).collect();
            let mut process = process("pid-10", uuid);
            process.args.qmp = QmpAddress::Paths(paths);
            name_by_socket(&config, &mut process);
            process.given
        };
        assert_eq!(called(&["/run/x.qmp", "/run/db.qmp"], None), "db");
        assert_eq!(called(&["/run/x.qmp"], None), "pid-10");
        assert_eq!(called(&["/run/u.qmp"], Some(UUID)), "pid-10", "its uuid names it already");
    }
}
