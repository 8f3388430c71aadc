//! Which processes are taken for VMs. A name on a command line proves nothing: a user who can
//! start a process can call it `kvm`. So its user must be one that VMs run as, its program a
//! file named like QEMU that only root can change, at a place where QEMU is installed, and
//! it must be in the pid namespace of `/proc` and in Ebb's user namespace. A mount namespace
//! of its own tells nothing (libvirt gives each VM one) as long as only root could make it:
//! in a user namespace any user can mount any file under any path.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use ebb_core::config::User;

use super::process::read_credentials;
use crate::root::{ProbeError, Root};

/// Users that VMs run as: of QEMU's packages, libvirt, OpenNebula, Incus and LXD. One that
/// a host does not have is passed over.
const VM_USERS: [&str; 7] = ["root", "qemu", "libvirt-qemu", "kvm", "oneadmin", "incus", "lxd"];

/// Where QEMU is installed: Debian, Ubuntu, Proxmox, SUSE, Arch; Fedora and RHEL; from source;
/// NixOS; Incus; LXD as a snap; Kata. `*` is one name.
const FOLDERS: [&str; 7] = [
    "/usr/bin",
    "/usr/libexec",
    "/usr/local/bin",
    "/nix/store/*/bin",
    "/opt/incus/bin",
    "/snap/lxd/*/bin",
    "/opt/kata/bin",
];

/// Longest part of a foreign path that is shown.
const SHOWN: usize = 120;

/// What the configuration allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustRules {
    /// Users beside those that VMs always run as; `None`: any user.
    pub users: Option<Vec<User>>,
    /// QEMU programs beside those in the usual folders; `None`: any program.
    pub programs: Option<Vec<String>>,
    /// It may be in a pid namespace of its own.
    pub containers: bool,
}

impl Default for TrustRules {
    fn default() -> TrustRules {
        TrustRules { users: Some(Vec::new()), programs: Some(Vec::new()), containers: false }
    }
}

impl TrustRules {
    /// The uids of the users, by `/etc/passwd`, and what of `users` it does not have.
    pub fn uids(&self, root: &Root) -> Result<Uids, ProbeError> {
        let Some(users) = &self.users else {
            return Ok(Uids { allowed: None, unknown: Vec::new() });
        };
        let passwd = root.read("/etc/passwd")?.unwrap_or_default();
        // Root needs no entry; and Ebb without root sees to its own user's VMs.
        let mut allowed = BTreeSet::from([0, rustix::process::geteuid().as_raw()]);
        allowed.extend(VM_USERS.iter().filter_map(|name| uid_of(&passwd, name)));
        let mut unknown = Vec::new();
        for user in users {
            match (uid(&passwd, user), user) {
                (Some(uid), _) => drop(allowed.insert(uid)),
                (None, User::Name(name)) => unknown.push(name.clone()),
                (None, User::Uid(_)) => {}
            }
        }
        Ok(Uids { allowed: Some(allowed), unknown })
    }

    pub fn check(&self, root: &Root, uids: &Uids, pid: u32) -> Result<ProcessTrust, ProbeError> {
        if uids.allowed.is_some() || !self.containers {
            let Some(whose) = read_credentials(root, pid)? else { return Ok(ProcessTrust::Gone) };
            let stranger = |uid: &&u32| uids.allowed.as_ref().is_some_and(|a| !a.contains(uid));
            if let Some(uid) = whose.uids.iter().find(stranger) {
                let why = format!("it runs as uid {uid}: add it to host.users if it is a VM");
                return Ok(ProcessTrust::Refused(why));
            }
            let users = |of: &str| root.read_link(format!("/proc/{of}/ns/user"));
            let other = match whose.inner {
                _ if self.containers => None,
                Some(_) => Some("pid"),
                None => (users(&pid.to_string())? != users("self")?).then_some("user"),
            };
            if let Some(kind) = other {
                let allows = "host.containers = true allows that";
                return Ok(ProcessTrust::Refused(format!(
                    "it is in another {kind} namespace: {allows}"
                )));
            }
        }
        match &self.programs {
            Some(programs) => program(root, pid, programs),
            None => Ok(ProcessTrust::Trusted),
        }
    }
}

/// Uids of the users that VMs run as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uids {
    /// Them; `None`: any.
    pub allowed: Option<BTreeSet<u32>>,
    /// Users of the configuration that are not in `/etc/passwd`.
    pub unknown: Vec<String>,
}

/// Whether a process is taken for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessTrust {
    Trusted,
    /// Why not, for people.
    Refused(String),
    /// It has ended.
    Gone,
}

/// The program itself: the file that was started, also where it was deleted since.
fn program(root: &Root, pid: u32, programs: &[String]) -> Result<ProcessTrust, ProbeError> {
    let exe = format!("/proc/{pid}/exe");
    let Some(path) = root.read_link(&exe)? else { return Ok(ProcessTrust::Gone) };
    let Some(file) = root.metadata(&exe)? else { return Ok(ProcessTrust::Gone) };
    let path = path.to_string_lossy();
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    let shown: String = path.escape_debug().take(SHOWN).collect();
    let named = programs.iter().any(|p| p == path);
    if !named && !is_qemu(path) {
        return Ok(ProcessTrust::Refused(format!("its program {shown} is not QEMU")));
    }
    if !named && !FOLDERS.iter().any(|folder| is_in(path, folder)) {
        return Ok(ProcessTrust::Refused(format!(
            "its program {shown} is not where QEMU is installed: add it to host.programs if it \
             is a VM"
        )));
    }
    if !file.is_file() || file.uid() != 0 || file.mode() & 0o022 != 0 {
        let (uid, mode) = (file.uid(), file.mode() & 0o7777);
        let why = format!(
            "its program {shown} belongs to uid {uid} with mode {mode:o}: only root may be able to \
             change it"
        );
        return Ok(ProcessTrust::Refused(why));
    }
    Ok(ProcessTrust::Trusted)
}

/// Whether a file is directly in a folder of [`FOLDERS`].
fn is_in(path: &str, folder: &str) -> bool {
    let Some((dir, _)) = path.rsplit_once('/') else { return false };
    let (dir, folder) = (dir.split('/'), folder.split('/'));
    let same = |(d, f): (&str, &str)| f == "*" && !d.is_empty() && d != ".." || d == f;
    dir.clone().count() == folder.clone().count() && dir.zip(folder).all(same)
}

/// Whether a path's file name is QEMU's; NixOS wraps it.
pub fn is_qemu(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let wrapped = name.strip_prefix('.').and_then(|n| n.strip_suffix("-wrapped"));
    let name = wrapped.unwrap_or(name);
    name.starts_with("qemu-system") || name == "qemu-kvm" || name == "kvm"
}

/// A user's uid; by name it is looked up in the text of `/etc/passwd`.
pub fn uid(passwd: &str, user: &User) -> Option<u32> {
    match user {
        User::Uid(uid) => Some(*uid),
        User::Name(name) => uid_of(passwd, name),
    }
}

/// A user's uid in the text of `/etc/passwd`: `name:password:uid:…` (passwd(5)).
fn uid_of(passwd: &str, name: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ANYTHING, Tree, tree};
    use std::os::unix::fs::PermissionsExt;

    /// A machine with one process, 10, and its program.
    fn machine(status: &str, program: &str) -> Tree {
        let passwd = "root:x:0:0::/:/bin/sh\nqemu:x:64055:\nal:x:7:\n";
        let root = tree(&[("/proc/10/status", status), ("/etc/passwd", passwd)]);
        let file = root.path("/bin").join(program);
        root.put(format!("/bin/{program}"), "");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        root.link(&file, "/proc/10/exe");
        root
    }

    fn check(trust: &TrustRules, root: &Root) -> ProcessTrust {
        trust.check(root, &trust.uids(root).unwrap(), 10).unwrap()
    }

    fn refused(trust: ProcessTrust) -> String {
        let ProcessTrust::Refused(why) = trust else { panic!("{trust:?}") };
        why
    }

    fn without_program() -> TrustRules {
        TrustRules { programs: None, ..TrustRules::default() }
    }

    #[test]
    fn a_process_of_a_user_that_vms_do_not_run_as_is_no_vm() {
        let also = |users: Vec<User>| TrustRules { users: Some(users), ..without_program() };
        let trusts = [
            without_program(),
            also(vec![User::Name("al".into())]),
            also(vec![User::Uid(7), User::Name("none".into())]),
            ANYTHING,
        ];
        for (uids, expected) in [
            ("0 0 0 0", [true, true, true, true]),
            ("64055 64055 64055 64055", [true, true, true, true]),
            ("7 7 7 7", [false, true, true, true]),
            ("0 7 0 0", [false, true, true, true]),
            ("7 0 0 0", [false, true, true, true]),
            ("0 0 7 0", [false, true, true, true]),
            ("8 8 8 8", [false, false, false, true]),
        ] {
            let root = machine(&format!("Uid: {uids}\n"), "kvm");
            let found: Vec<bool> =
                trusts.iter().map(|t| check(t, &root) == ProcessTrust::Trusted).collect();
            assert_eq!(found, expected, "{uids}");
        }
        let root = machine("Uid: 8 8 8 8\n", "kvm");
        assert!(refused(check(&trusts[0], &root)).contains("runs as uid 8: add it to host.users"));
        assert_eq!(trusts[2].uids(&root).unwrap().unknown, ["none"]);
    }

    #[test]
    fn a_process_in_a_container_is_a_vm_only_where_that_is_allowed() {
        let root = machine("Uid: 0 0 0 0\nNSpid: 10 1\n", "kvm");
        assert!(refused(check(&without_program(), &root)).contains("host.containers"));
        let allowed = TrustRules { containers: true, ..without_program() };
        assert_eq!(check(&allowed, &root), ProcessTrust::Trusted);
        // In a user namespace of its own a user can mount what it likes at QEMU's path.
        let root = machine("Uid: 0 0 0 0\nNSpid: 10\n", "kvm");
        root.link("user:[1]", "/proc/self/ns/user");
        root.link("user:[1]", "/proc/10/ns/user");
        assert_eq!(check(&without_program(), &root), ProcessTrust::Trusted);
        root.link("user:[2]", "/proc/10/ns/user");
        assert!(refused(check(&without_program(), &root)).contains("another user namespace"));
        assert_eq!(check(&allowed, &root), ProcessTrust::Trusted);
    }

    #[test]
    fn a_program_that_is_not_qemu_or_not_roots_alone_is_no_vm() {
        let mut trust = TrustRules { users: None, ..TrustRules::default() };
        let root = machine("Uid: 0 0 0 0\n", "python3");
        assert!(refused(check(&trust, &root)).contains("is not QEMU"));
        let root = machine("Uid: 0 0 0 0\n", "qemu-system-x86_64");
        assert!(refused(check(&trust, &root)).contains("add it to host.programs"));
        let file = root.path("/bin/qemu-system-x86_64");
        trust.programs = Some(vec![file.display().to_string()]);
        if rustix::process::geteuid().is_root() {
            assert_eq!(check(&trust, &root), ProcessTrust::Trusted);
            for (mode, trusted) in [(0o775, false), (0o757, false), (0o4755, true)] {
                std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
                assert_eq!(check(&trust, &root) == ProcessTrust::Trusted, trusted, "{mode:o}");
            }
            std::os::unix::fs::chown(&file, Some(7), None).unwrap();
        }
        assert!(refused(check(&trust, &root)).contains("only root may be able to change it"));
        // A directory, or what is gone.
        root.remove("/proc/10/exe");
        assert_eq!(check(&trust, &root), ProcessTrust::Gone);
    }

    /// A package upgrade replaces the file under running VMs.
    #[test]
    fn a_program_that_was_deleted_is_what_it_was() {
        if !rustix::process::geteuid().is_root() {
            return; // A file of root's is needed.
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("qemu-system-x86_64");
        std::fs::copy("/bin/sleep", &file).unwrap();
        let mut child = std::process::Command::new(&file).arg("1000").spawn().unwrap();
        std::fs::remove_file(&file).unwrap();
        let programs = Some(vec![file.display().to_string()]);
        let trust = TrustRules { programs, containers: true, ..TrustRules::default() };
        let root = Root::default();
        let found = trust.check(&root, &trust.uids(&root).unwrap(), child.id());
        let link = root.read_link(format!("/proc/{}/exe", child.id())).unwrap().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(link.to_string_lossy().ends_with("(deleted)"), "{}", link.display());
        assert_eq!(found.unwrap(), ProcessTrust::Trusted);
    }

    #[test]
    fn qemu_is_installed_in_known_folders() {
        let known = |path| FOLDERS.iter().any(|folder| is_in(path, folder));
        for path in ["/usr/bin/kvm", "/usr/libexec/qemu-kvm", "/nix/store/abc-qemu-9/bin/kvm"] {
            assert!(known(path), "{path}");
        }
        for path in ["/tmp/kvm", "/usr/bin/x/kvm", "/nix/store/../bin/kvm", "kvm", "/kvm", ""] {
            assert!(!known(path), "{path}");
        }
    }

    #[test]
    fn qemu_is_known_by_its_file_name() {
        for name in ["/usr/bin/qemu-system-x86_64", "qemu-kvm", "/x/.qemu-system-arm-wrapped"] {
            assert!(is_qemu(name), "{name}");
        }
        for name in ["/usr/bin/qemu-img", "/kvm/sh", "kvm-ok", "", ".kvm", "x-wrapped"] {
            assert!(!is_qemu(name), "{name}");
        }
    }
}
