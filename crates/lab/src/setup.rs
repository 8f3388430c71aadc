//! Setting the machine up: programs from its package manager, kernels by
//! download into the cache.
//!
//! Kernels are resolved to the newest package of their series that apt knows,
//! first in the machine's own lists, then in lists of the lab's own (kept in the
//! cache, read from the same mirror, with the backports suite added): nothing in
//! the machine's apt configuration changes, and root is needed for missing
//! programs only. What is there stays, unless an upgrade is asked for.

use std::cmp::Ordering;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{Image, Kernel, cache_dir, cached, lock_cache};
use crate::{LabError, run};

/// A program and the package it comes from.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("busybox", "busybox-static"),
    ("cc", "gcc"),
    ("gcc-12", "gcc-12"),
    ("make", "make"),
    ("strip", "binutils"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("setpriv", "util-linux"),
    ("mkswap", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    ("qemu-img", "qemu-utils"),
    // Which does not make it the machine's: that would be systemd-sysv.
    ("systemctl", "systemd"),
];
/// A file and the package it comes from.
const FILES: &[(&str, &str)] = &[
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "ovmf"),
    ("/usr/lib/x86_64-linux-gnu/libc.a", "libc6-dev"),
    (
        "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so",
        "libvirt-daemon-driver-qemu",
    ),
    // objtool, which builds modules, needs it.
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
];
const SUITE: &str = "bookworm";

/// What a user may ask for.
#[derive(clap::Args)]
pub struct Options {
    /// Also fetch kernel headers, to build modules
    #[arg(long)]
    headers: bool,
    /// Replace kernels that have a newer package
    #[arg(long)]
    upgrade: bool,
}

/// Prepares everything; `say` gets a line for each thing done. Returns the
/// images.
pub fn setup(options: &Options, say: &mut dyn FnMut(&str)) -> Result<Vec<Image>, LabError> {
    install_missing(say)?;
    for kernel in Kernel::ALL {
        let have = kernel.dir();
        let headers = have.as_ref().is_some_and(|d| d.join("headers").is_dir());
        if have.is_none() || options.upgrade || (options.headers && !headers) {
            let _lock = lock_cache()?;
            fetch_kernel(kernel, options.headers, say)?;
        }
    }
    Kernel::ALL.into_iter().map(Image::get).collect()
}

fn on_path(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    path.split(':').any(|d| Path::new(d).join(program).exists())
}

fn install_missing(say: &mut dyn FnMut(&str)) -> Result<(), LabError> {
    let mut missing: Vec<&str> =
        PROGRAMS.iter().filter(|(p, _)| !on_path(p)).map(|(_, package)| *package).collect();
    missing
        .extend(FILES.iter().filter(|(f, _)| !Path::new(f).exists()).map(|(_, package)| *package));
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    if !on_path("apt-get") {
        return Err(LabError::Missing(format!("please install: {}", missing.join(" "))));
    }
    say(&format!("installing {}", missing.join(" ")));
    let apt = |args: &[&str]| {
        let mut c = if rustix::process::geteuid().is_root() {
            Command::new("apt-get")
        } else {
            let mut c = Command::new("sudo");
            c.arg("apt-get");
            c
        };
        run(c.args(args).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    apt(&["update", "-q"])?;
    apt(&[&["install", "-y", "-q", "--no-install-recommends"], missing.as_slice()].concat())?;
    Ok(())
}

/// An apt that answers: the machine's, or one with lists of the lab's own.
struct Apt {
    options: Vec<String>,
}

impl Apt {
    fn command(&self, program: &str) -> Command {
        let mut c = Command::new(program);
        for option in &self.options {
            c.arg("-o").arg(option);
        }
        c
    }

    /// The newest image package of a series.
    fn newest(&self, kernel: Kernel) -> Option<String> {
        let series = kernel.series().replace('.', "\\.");
        let pattern = format!("^linux-image-{series}\\.[0-9].*-cloud-amd64$");
        let found =
            run(self.command("apt-cache").args(["search", "--names-only", &pattern])).ok()?;
        let mut names: Vec<&str> =
            found.lines().filter_map(|l| l.split_whitespace().next()).collect();
        names.sort_by(|a, b| natural(a, b));
        names.into_iter().rev().find(|name| self.has_candidate(name)).map(String::from)
    }

    fn has_candidate(&self, package: &str) -> bool {
        run(self.command("apt-cache").args(["show", "--no-all-versions", package]))
            .is_ok_and(|text| text.contains("\nFilename: "))
    }

    fn download(&self, package: &str, into: &Path) -> Result<(), LabError> {
        run(self
            .command("apt-get")
            .args(["-q", "-o", "APT::Sandbox::User=root", "download", package])
            .current_dir(into))
        .map(|_| ())
    }

    /// What a headers package needs besides itself to build modules.
    fn header_packages(&self, package: &str) -> Result<Vec<String>, LabError> {
        let text = run(self.command("apt-cache").args(["depends", package]))?;
        let needs = text.lines().filter_map(|l| l.trim().strip_prefix("Depends: "));
        let wanted = |n: &&str| n.starts_with("linux-headers-") || n.starts_with("linux-kbuild-");
        Ok(needs.filter(wanted).map(String::from).chain([package.to_string()]).collect())
    }

    /// Lists of the lab's own, from the machine's mirror.
    fn own(say: &mut dyn FnMut(&str)) -> Result<Apt, LabError> {
        let dir = cache_dir("apt")?;
        for sub in ["state/lists/partial", "cache/archives/partial"] {
            cache_dir(&format!("apt/{sub}"))?;
        }
        let list = dir.join("sources.list");
        fs::write(&list, own_sources(&machine_sources())?).map_err(LabError::file(&list))?;
        let option = |key: &str, path: &str| format!("{key}={}", dir.join(path).display());
        let apt = Apt {
            options: vec![
                option("Dir::Etc::sourcelist", "sources.list"),
                "Dir::Etc::sourceparts=/dev/null".into(),
                option("Dir::State", "state"),
                option("Dir::Cache", "cache"),
                "Dir::State::status=/var/lib/dpkg/status".into(),
                "APT::Sandbox::User=root".into(),
            ],
        };
        say("reading package lists of the machine's mirror into the cache");
        run(apt.command("apt-get").args(["update", "-q"]))?;
        Ok(apt)
    }
}

fn fetch_kernel(kernel: Kernel, headers: bool, say: &mut dyn FnMut(&str)) -> Result<(), LabError> {
    let mut apt = Apt { options: Vec::new() };
    let mut package = apt.newest(kernel);
    if package.is_none() {
        apt = Apt::own(say)?;
        package = apt.newest(kernel);
    }
    let package = package
        .ok_or_else(|| LabError::Missing(format!("no package of a Linux {kernel} cloud kernel")))?;
    let kernels = cache_dir("kernels")?;
    let dir = kernels.join(&package);
    if !dir.join("boot").is_dir() {
        say(&format!("downloading {package}"));
        unpack_into(&apt, std::slice::from_ref(&package), &dir)?;
    }
    if headers && !dir.join("headers").is_dir() {
        let names = apt.header_packages(&package.replacen("linux-image", "linux-headers", 1))?;
        say(&format!("downloading {}", names.join(" ")));
        unpack_into(&apt, &names, &dir.join("headers"))?;
    }
    let link = kernels.join(kernel.series());
    let temp = kernels.join(format!(".{kernel}"));
    let _ = fs::remove_file(&temp);
    symlink(&package, &temp).map_err(LabError::file(&temp))?;
    fs::rename(&temp, &link).map_err(LabError::file(&link))
}

/// A package's files, unpacked into the cache and not installed: nothing of it runs.
pub fn package(name: &str) -> Result<PathBuf, LabError> {
    let dir = cached("packages").join(name);
    let names = [name.to_string()];
    let machine = Apt { options: Vec::new() };
    if !dir.is_dir() && unpack_into(&machine, &names, &dir).is_err() {
        unpack_into(&Apt::own(&mut |_| ())?, &names, &dir)?;
    }
    Ok(dir)
}

/// Downloads packages and unpacks them; the directory appears whole.
fn unpack_into(apt: &Apt, packages: &[String], dir: &Path) -> Result<(), LabError> {
    let parent = dir.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(LabError::file(parent))?;
    let temp = tempfile::tempdir_in(parent).map_err(LabError::file(parent))?;
    let debs = temp.path().join("debs");
    let root = temp.path().join("root");
    fs::create_dir_all(&debs).map_err(LabError::file(&debs))?;
    for package in packages {
        apt.download(package, &debs)?;
    }
    for deb in fs::read_dir(&debs).map_err(LabError::file(&debs))?.flatten() {
        run(Command::new("dpkg-deb").arg("-x").arg(deb.path()).arg(&root))?;
    }
    relocate_headers(&root, dir)?;
    fs::rename(&root, dir).map_err(LabError::file(dir))
}

/// Headers name each other by absolute paths below /usr/src: point them at where
/// they will be. The `vmlinux` of newer ones holds type information for BTF, which
/// a module does without and which would need one more program.
fn relocate_headers(root: &Path, to: &Path) -> Result<(), LabError> {
    for entry in fs::read_dir(root.join("usr/src")).into_iter().flatten().flatten() {
        let _ = fs::remove_file(entry.path().join("vmlinux"));
        let makefile = entry.path().join("Makefile");
        let Ok(text) = fs::read_to_string(&makefile) else { continue };
        let text = text.replace("/usr/src/", &format!("{}/usr/src/", to.display()));
        fs::write(&makefile, text).map_err(LabError::file(&makefile))?;
    }
    Ok(())
}

/// Compares names with numbers in them: `6.1.9` before `6.1.10`.
fn natural(a: &str, b: &str) -> Ordering {
    let numbers = |s: &str| -> Vec<u64> {
        s.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    numbers(a).cmp(&numbers(b)).then_with(|| a.cmp(b))
}

fn machine_sources() -> String {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(parts.map(|e| e.path()));
    files.sort();
    let texts = files.iter().filter_map(|f| fs::read_to_string(f).ok());
    texts.collect::<Vec<_>>().join("\n\n")
}

/// A `sources.list` for the lab out of the machine's: the same mirrors, with the
/// suites that hold both kernels. `EBB_DEBIAN_MIRROR` names another mirror.
fn own_sources(machine: &str) -> Result<String, LabError> {
    let mut mirrors = debian_mirrors(machine);
    if let Some(uri) = std::env::var("EBB_DEBIAN_MIRROR").ok().filter(|v| !v.is_empty()) {
        mirrors = vec![uri];
    }
    let mut text = String::new();
    for uri in &mirrors {
        let suites: &[&str] =
            if uri.contains("-security") { &["-security"] } else { &["", "-backports"] };
        for suite in suites {
            text += &format!("deb {uri} {SUITE}{suite} main\n");
        }
    }
    if text.is_empty() {
        return Err(LabError::Missing(
            "this machine's apt sources name no Debian mirror: set EBB_DEBIAN_MIRROR".into(),
        ));
    }
    Ok(text)
}

/// The Debian mirrors that apt sources name, in either format, each once.
fn debian_mirrors(sources: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in sources.lines().map(str::trim).filter(|l| !l.starts_with('#')) {
        let words: &str = match line.split_once(':') {
            Some((key, rest)) if key.eq_ignore_ascii_case("uris") => rest,
            _ if line.starts_with("deb ") => line,
            _ => continue,
        };
        for word in words.split_whitespace() {
            let uri = word.trim_end_matches('/');
            let debian = uri.ends_with("/debian") || uri.ends_with("/debian-security");
            if debian && !found.iter().any(|f| f == uri) {
                found.push(uri.to_string());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_read_in_both_formats() {
        let text = "# deb http://old.example/debian x main\n\
            deb [signed-by=/k.gpg] http://a.example/debian/ bookworm main\n\
            deb http://other.example/apt stable main\n\n\
            Types: deb\nURIs: http://a.example/debian http://b.example/debian-security\nSuites: x\n";
        assert_eq!(
            debian_mirrors(text),
            ["http://a.example/debian", "http://b.example/debian-security"]
        );
        let own = own_sources(text).unwrap();
        assert!(own.contains("a.example/debian bookworm-backports main"), "{own}");
        assert!(own.contains("b.example/debian-security bookworm-security main"), "{own}");
        assert!(own_sources("deb http://a.example/ubuntu noble main").is_err());
    }

    #[test]
    fn the_newest_package_is_found_by_number() {
        let mut names =
            ["linux-image-6.1.0-9-x", "linux-image-6.1.0-56-x", "linux-image-6.1.0-10-x"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names.last(), Some(&"linux-image-6.1.0-56-x"));
    }
}
