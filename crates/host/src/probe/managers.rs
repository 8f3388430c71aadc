//! Whose a QMP socket is, by its path: Ebb's own, a known manager's, or unknown.
//!
//! QEMU serves one client on a QMP socket. A manager that opens its socket for each command is
//! locked out by a client that stays. So Ebb stays connected only to sockets that are its own, and
//! visits a manager's socket for the commands of one tick ([`SocketKind::Shared`]).
//!
//! Sources: qemu-server `PVE/QemuServer/Helpers.pm` (`qmp_socket`), Ganeti
//! `lib/hypervisor/hv_kvm/__init__.py` (`_InstanceQmpMonitor`), Lima
//! `pkg/store/filenames/filenames.go` (`QMPSock`), Kata `virtcontainers/qemu.go`.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::{Component, Path};

use ebb_core::config::SocketUse;

use crate::root::Root;

/// A program that starts VMs and controls them over a QMP socket at a path that it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// Proxmox VE: `/var/run/qemu-server/ID.qmp`.
    Proxmox,
    /// Ganeti: `…/ganeti/kvm-hypervisor/ctrl/NAME.qmp`.
    Ganeti,
    /// Lima: `…/.lima/NAME/qmp.sock`.
    Lima,
    /// Kata Containers: `/run/vc/vm/ID/qmp.sock`.
    Kata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// Ebb stays connected: no other program uses it.
    Own,
    /// Ebb connects for the commands of a tick, and leaves.
    Shared,
    /// Ebb does not connect.
    Others,
}

impl Manager {
    /// Whose socket this is, if a known manager makes sockets of such a path.
    pub fn of(path: &Path) -> Option<Manager> {
        let path = bound_as(path);
        let names: Vec<&str> = path.components().filter_map(plain).collect();
        let (file, dirs) = names.split_last()?;
        let ends = |with: &[&str]| path.is_absolute() && dirs.ends_with(with);
        let stem = |ending| file.strip_suffix(ending).filter(|stem| !stem.is_empty());
        let digits = |stem: &str| stem.bytes().all(|b| b.is_ascii_digit());
        if ends(&["run", "qemu-server"]) && stem(".qmp").is_some_and(digits) {
            return Some(Manager::Proxmox);
        }
        if ends(&["ganeti", "kvm-hypervisor", "ctrl"]) && stem(".qmp").is_some() {
            return Some(Manager::Ganeti);
        }
        let dir = dirs.split_last().map(|(_, above)| above).unwrap_or_default();
        match *file == "qmp.sock" && path.is_absolute() {
            true if dir.ends_with(&[".lima"]) => Some(Manager::Lima),
            true if dir.ends_with(&["run", "vc", "vm"]) => Some(Manager::Kata),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Manager::Proxmox => "Proxmox VE",
            Manager::Ganeti => "Ganeti",
            Manager::Lima => "Lima",
            Manager::Kata => "Kata Containers",
        }
    }

    /// Whether it stays connected itself, so that no other client is ever served.
    pub fn stays(self) -> bool {
        self == Manager::Kata
    }
}

/// How the socket at this path may be used. `named`: the configuration names it as this VM's.
pub fn kind(path: &Path, named: bool, sockets: SocketUse) -> SocketKind {
    if let Some(manager) = Manager::of(path) {
        let wanted = named || sockets != SocketUse::Own;
        return if wanted && !manager.stays() { SocketKind::Shared } else { SocketKind::Others };
    }
    match sockets {
        _ if is_ebbs(path) => SocketKind::Own,
        SocketUse::Shared => SocketKind::Shared,
        SocketUse::Own | SocketUse::Known if !named => SocketKind::Others,
        _ => SocketKind::Own,
    }
}

/// The VM's number on Proxmox VE, by which its commands call it.
pub fn proxmox_id(path: &Path) -> Option<String> {
    Manager::of(path).filter(|m| *m == Manager::Proxmox)?;
    Some(path.file_stem()?.to_str()?.to_owned())
}

/// Where Proxmox VE keeps the configuration of this host's VMs.
pub const PROXMOX_CONFIGS: &str = "/etc/pve/qemu-server";

/// What Proxmox VE does to the balloon of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxmoxBalloon {
    Nothing,
    /// `balloon` is above 0 and `shares` are 0: it sets this size, MiB, when the VM starts.
    AtStart(u64),
    /// `balloon` is above 0 and `shares` are not 0: `pvestatd` sets it as well.
    Always,
}

/// What Proxmox VE does to the balloon of the VM with this number, by its configuration. `None`
/// where that cannot be read.
///
/// Sources: qemu-server `PVE/QemuServer.pm` (`vmstatus`, `vm_start_nolock`), pve-manager
/// `PVE/AutoBalloon.pm`.
pub fn proxmox_balloon(root: &Root, id: &str) -> Option<ProxmoxBalloon> {
    let text = root.read(format!("{PROXMOX_CONFIGS}/{id}.conf")).ok()??;
    // Sections of snapshots follow.
    let lines = || text.lines().take_while(|line| !line.starts_with('['));
    let value = |key: &str| lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    let number = |key: &str| value(key).and_then(|v| v.trim().parse::<f64>().ok());
    Some(match (number("balloon"), number("shares")) {
        (None | Some(0.0), _) => ProxmoxBalloon::Nothing,
        (Some(mib), Some(0.0)) if number("memory") == Some(mib) => ProxmoxBalloon::Nothing,
        (Some(mib), Some(0.0)) => ProxmoxBalloon::AtStart(mib as u64),
        _ => ProxmoxBalloon::Always,
    })
}

pub(crate) fn is_ebbs(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("ebb"))
}

fn plain<'a>(part: Component<'a>) -> Option<&'a str> {
    match part {
        Component::Normal(name) => OsStr::to_str(name),
        _ => None,
    }
}

/// The path as the server knows it: without the `/proc/PID/root` through which it is reached
/// in another mount namespace.
pub(crate) fn bound_as(path: &Path) -> Cow<'_, Path> {
    let inside = || {
        let mut parts = path.strip_prefix("/proc").ok()?.components();
        let pid = parts.next()?.as_os_str().as_encoded_bytes();
        let through = parts.next()?.as_os_str() == "root" && pid.iter().all(u8::is_ascii_digit);
        through.then(|| Path::new("/").join(parts.as_path()))
    };
    inside().map_or(Cow::Borrowed(path), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    #[test]
    fn proxmox_sets_balloons_of_vms_with_balloon_at_their_start_or_always() {
        use ProxmoxBalloon::{Always, AtStart, Nothing};
        let root = tree(&[]);
        assert_eq!(proxmox_balloon(&root, "100"), None);
        let sets = |text: &str| {
            root.put("/etc/pve/qemu-server/100.conf", text);
            proxmox_balloon(&root, "100").unwrap()
        };
        assert_eq!(sets("balloon: 1024\nmemory: 4096\n"), Always);
        assert_eq!(sets("balloon: 1024\nshares: 500\n"), Always);
        assert_eq!(sets("balloon: 1024\nmemory: 4096\nshares: 0\n"), AtStart(1024));
        assert_eq!(sets("balloon: 4096\nmemory: 4096\nshares: 0\n"), Nothing);
        assert_eq!(sets("balloon: 0\nmemory: 4096\n"), Nothing);
        assert_eq!(sets("memory: 4096\n\n[before]\nballoon: 1024\n"), Nothing);
    }

    #[test]
    fn a_manager_is_known_by_the_path_of_its_socket() {
        for (path, manager) in [
            ("/var/run/qemu-server/100.qmp", Some(Manager::Proxmox)),
            ("/run/qemu-server/100.qmp", Some(Manager::Proxmox)),
            ("/proc/77/root/run/qemu-server/100.qmp", Some(Manager::Proxmox)),
            ("/run/qemu-server/100-ebb.qmp", None),
            ("/run/qemu-server/.qmp", None),
            ("/run/qemu-server/100.qga", None),
            ("run/qemu-server/100.qmp", None),
            ("/home/a/qemu-server/100.qmp", None),
            ("/var/run/ganeti/kvm-hypervisor/ctrl/webb.example.org.qmp", Some(Manager::Ganeti)),
            ("/var/run/ganeti/kvm-hypervisor/ctrl/webb.example.org.kvmd", None),
            ("/home/a/.lima/default/qmp.sock", Some(Manager::Lima)),
            ("/run/vc/vm/4f2a/qmp.sock", Some(Manager::Kata)),
            ("/run/vc/vm/qmp.sock", None),
            ("/qmp.sock", None),
            ("/", None),
            ("", None),
        ] {
            assert_eq!(Manager::of(Path::new(path)), manager, "{path}");
        }
        assert_eq!(proxmox_id(Path::new("/var/run/qemu-server/100.qmp")).as_deref(), Some("100"));
        assert_eq!(proxmox_id(Path::new("/home/a/.lima/default/qmp.sock")), None);
    }

    /// Whatever the configuration says, no manager is locked out.
    #[test]
    fn a_managers_socket_is_never_kept_and_an_unknown_one_only_at_the_operators_word() {
        use SocketKind::{Others, Own, Shared};
        use SocketUse as Use;
        let all = [Use::Own, Use::Known, Use::Shared, Use::Any];
        for (path, named, kinds) in [
            ("/run/qemu-server/100.qmp", false, [Others, Shared, Shared, Shared]),
            ("/run/qemu-server/100.qmp", true, [Shared; 4]),
            ("/run/ganeti/kvm-hypervisor/ctrl/webb.qmp", false, [Others, Shared, Shared, Shared]),
            ("/run/vc/vm/4f2a/qmp.sock", false, [Others; 4]),
            ("/run/100-ebb.qmp", false, [Own; 4]),
            ("/run/qemu/web1.qmp", false, [Others, Others, Shared, Own]),
            ("/run/qemu/web1.qmp", true, [Own, Own, Shared, Own]),
        ] {
            let found = all.map(|sockets| kind(Path::new(path), named, sockets));
            assert_eq!(found, kinds, "{path} named {named}");
        }
    }

    #[test]
    fn a_path_into_another_mount_namespace_is_compared_as_it_was_bound_there() {
        for (path, bound) in [
            ("/run/q.sock", "/run/q.sock"),
            ("/proc/77/root/run/q.sock", "/run/q.sock"),
            ("/proc/x7/root/run/q.sock", "/proc/x7/root/run/q.sock"),
            ("/proc/77/cwd/run/q.sock", "/proc/77/cwd/run/q.sock"),
            ("/proc/77", "/proc/77"),
            ("run/q.sock", "run/q.sock"),
        ] {
            assert_eq!(bound_as(Path::new(path)), Path::new(bound), "{path}");
        }
    }
}
