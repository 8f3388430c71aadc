//! Images: a stock distribution kernel and an initramfs around the guest tool.
//!
//! Kernels are Debian packages, downloaded and unpacked by [`crate::setup`] into
//! the cache, never installed. The initramfs is built here when it is first
//! asked for: busybox, the tool (compiled from `guest/tool`), the modules below
//! with what they need, and an init that mounts, starts the tool and starts it
//! again if it dies. Its name holds a hash of all that went in, so it is built
//! anew exactly when one of them changes; it appears by rename, under a lock.
//!
//! To give guests another module, add its name to [`BOOT_MODULES`] (loaded at
//! start) or [`MORE_MODULES`] (there for the tool's `modprobe`).

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{LabError, run};

/// Loaded before the tool opens its port.
pub const BOOT_MODULES: &[&str] = &["virtio_pci", "virtio_balloon", "virtio_console", "virtio_blk"];
/// In the image, loaded on demand.
pub const MORE_MODULES: &[&str] = &["virtio_mem", "zram", "lzo_rle"];

const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t debugfs debugfs /sys/kernel/debug
mount -t tmpfs -o size=100% tmp /tmp
exec </dev/console >/dev/console 2>&1
while :; do
	ebb-guest-tool
	echo "ebb-guest-tool: ended with $?"
	sleep 1
done
"#;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Kernel {
    /// Debian 12's own.
    #[default]
    #[value(name = "6.1")]
    V6_1,
    /// The newer long-term series, from its backports.
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// Every series the lab knows.
    pub const ALL: [Kernel; 2] = [Kernel::V6_1, Kernel::V6_12];

    /// `6.1`, `6.12`.
    pub fn series(self) -> &'static str {
        match self {
            Kernel::V6_1 => "6.1",
            Kernel::V6_12 => "6.12",
        }
    }

    /// Where it was unpacked, if it was.
    pub fn dir(self) -> Option<PathBuf> {
        let link = cached("kernels").join(self.series());
        fs::canonicalize(link).ok().filter(|d| d.join("boot").is_dir())
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.series())
    }
}

/// A file where the lab keeps what it downloaded and built: `$EBB_CACHE`, else
/// `$XDG_CACHE_HOME/ebb`, else `~/.cache/ebb`.
pub fn cached(name: impl AsRef<Path>) -> PathBuf {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let root = var("EBB_CACHE").unwrap_or_else(|| {
        var("XDG_CACHE_HOME")
            .or_else(|| var("HOME").map(|h| h.join(".cache")))
            .unwrap_or_else(std::env::temp_dir)
            .join("ebb")
    });
    root.join(name)
}

/// A directory there, made if need be.
pub fn cache_dir(name: &str) -> Result<PathBuf, LabError> {
    let path = cached(name);
    fs::create_dir_all(&path).map_err(LabError::file(&path))?;
    Ok(path)
}

/// Holds the cache for one builder at a time, across processes.
pub fn lock_cache() -> Result<fs::File, LabError> {
    let path = cache_dir("")?.join("lock");
    let file = fs::File::create(&path).map_err(LabError::file(&path))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|e| LabError::file(&path)(e.into()))?;
    Ok(file)
}

#[derive(Clone, Debug)]
pub struct Image {
    pub kernel: Kernel,
    /// `uname -r` of it.
    pub release: String,
    pub vmlinuz: PathBuf,
    pub initramfs: PathBuf,
    /// The headers' build directory (`M=` goes there), where they were fetched.
    pub headers: Option<PathBuf>,
}

impl Image {
    /// The image of a kernel that was set up; builds the initramfs if it is
    /// missing or old.
    pub fn get(kernel: Kernel) -> Result<Image, LabError> {
        let dir = kernel.dir().ok_or_else(|| {
            LabError::Missing(format!("no kernel {kernel} here yet: run `cargo lab setup`"))
        })?;
        let vmlinuz = find(&dir.join("boot"), |n| n.starts_with("vmlinuz-"))
            .ok_or_else(|| LabError::Missing(format!("no vmlinuz in {}", dir.display())))?;
        let release: String =
            vmlinuz.to_string_lossy().rsplit_once("vmlinuz-").unwrap_or_default().1.into();
        let _lock = lock_cache()?;
        let tool = tool(&cache_dir("tool")?)?;
        let busybox = find_busybox()?;
        let mut hash = DefaultHasher::new();
        for part in [&tool, &busybox, &vmlinuz] {
            let meta = fs::metadata(part).map_err(LabError::file(part))?;
            hash.write(part.as_os_str().as_encoded_bytes());
            hash.write_u64(meta.len());
        }
        hash.write(format!("{INIT}{BOOT_MODULES:?}{MORE_MODULES:?}").as_bytes());
        let name = format!("initramfs-{release}-{:016x}", hash.finish());
        let initramfs = cache_dir("images")?.join(name);
        if !initramfs.exists() {
            let archive = initramfs_of(&dir.join("lib/modules").join(&release), &tool, &busybox)?;
            write_atomically(&initramfs, &archive, 0o644)?;
            remove_old(&initramfs, &release);
        }
        let headers = dir.join("headers/usr/src").join(format!("linux-headers-{release}"));
        let headers = headers.is_dir().then_some(headers);
        Ok(Image { kernel, release, vmlinuz, initramfs, headers })
    }
}

/// An initramfs with further files in it, as (path in the guest, file here): the
/// kernel unpacks one archive after the other.
pub fn with_files(base: &Path, files: &[(String, PathBuf)], to: &Path) -> Result<(), LabError> {
    let mut bytes = fs::read(base).map_err(LabError::file(base))?;
    let mut more = Cpio::default();
    for (name, file) in files {
        let meta = fs::metadata(file).map_err(LabError::file(file))?;
        let content = fs::read(file).map_err(LabError::file(file))?;
        let mode = 0o100000 | (meta.permissions().mode() & 0o777);
        let name = name.trim_start_matches('/');
        for (at, _) in name.match_indices('/') {
            more.add(&name[..at], 0o040755, b"");
        }
        more.add(name, mode, &content);
    }
    bytes.extend(more.finish());
    fs::write(to, bytes).map_err(LabError::file(to))
}

/// Writes a file so that it is there whole or not at all.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> Result<(), LabError> {
    let mode = fs::Permissions::from_mode(mode);
    let temp = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))
        .map_err(LabError::file(path))?;
    fs::write(temp.path(), bytes)
        .and_then(|()| fs::set_permissions(temp.path(), mode))
        .and_then(|()| temp.persist(path).map(drop).map_err(|e| e.error))
        .map_err(LabError::file(path))
}

/// Removes this kernel's images of days before; younger ones may be in use.
fn remove_old(keep: &Path, release: &str) {
    let prefix = format!("initramfs-{release}-");
    for entry in keep.parent().and_then(|d| fs::read_dir(d).ok()).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(&prefix);
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
        if ours && entry.path() != keep && age.is_some_and(|a| a.as_secs() > 86_400) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn find(dir: &Path, wanted: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).collect();
    all.sort();
    all.into_iter().find(|p| p.file_name().is_some_and(|n| wanted(&n.to_string_lossy())))
}

fn find_busybox() -> Result<PathBuf, LabError> {
    ["/usr/bin/busybox", "/bin/busybox"]
        .iter()
        .map(PathBuf::from)
        .find(|p| p.exists())
        .ok_or_else(|| LabError::Missing("no busybox: run `cargo lab setup`".into()))
}

/// Where the tool's sources are.
pub fn tool_sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/tool")
}

/// The guest tool in this directory, compiled if its sources changed.
fn tool(into: &Path) -> Result<PathBuf, LabError> {
    const FLAGS: &[&str] = &["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-static", "-pthread", "-s"];
    const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror"];
    let dir = tool_sources();
    let mut hash = DefaultHasher::new();
    let mut sources = Vec::new();
    let mut files: Vec<PathBuf> =
        fs::read_dir(&dir).map_err(LabError::file(&dir))?.flatten().map(|e| e.path()).collect();
    files.sort();
    for file in files {
        let extension = file.extension().unwrap_or_default().to_os_string();
        if extension != "c" && extension != "h" {
            continue;
        }
        hash.write(&fs::read(&file).map_err(LabError::file(&file))?);
        if extension == "c" {
            sources.push(file);
        }
    }
    hash.write(format!("{FLAGS:?}{WARNINGS:?}").as_bytes());
    let tool = into.join(format!("ebb-guest-tool-{:016x}", hash.finish()));
    if !tool.exists() {
        let temp = tool.with_extension("tmp");
        run(Command::new("cc")
            .args(FLAGS)
            .args(WARNINGS)
            .arg("-o")
            .arg(&temp)
            .args(sources)
            .arg("-lm"))?;
        fs::rename(&temp, &tool).map_err(LabError::file(&tool))?;
    }
    Ok(tool)
}

fn initramfs_of(modules: &Path, tool: &Path, busybox: &Path) -> Result<Vec<u8>, LabError> {
    let mut out = Cpio::default();
    for dir in ["bin", "dev", "proc", "sys", "tmp", "lib", "lib/modules"] {
        out.add(dir, 0o040755, b"");
    }
    let read = |p: &Path| fs::read(p).map_err(LabError::file(p));
    out.add("init", 0o100755, INIT.as_bytes());
    out.add("bin/busybox", 0o100755, &read(busybox)?);
    for applet in run(Command::new(busybox).arg("--list"))?.lines().filter(|a| *a != "busybox") {
        out.add(&format!("bin/{applet}"), 0o120777, b"busybox");
    }
    out.add("bin/ebb-guest-tool", 0o100755, &read(tool)?);
    let (files, list) = closure(modules, &[BOOT_MODULES, MORE_MODULES].concat())?;
    for (name, content) in &files {
        out.add(&format!("lib/modules/{name}.ko"), 0o100644, content);
    }
    out.add("lib/modules/list", 0o100644, list.as_bytes());
    out.add("lib/modules/boot", 0o100644, (BOOT_MODULES.join("\n") + "\n").as_bytes());
    Ok(out.finish())
}

/// The modules with everything they need, unpacked, and the list the tool reads:
/// `name first second … name`. A module that is built in has an empty entry; one
/// that this kernel does not have is left out.
fn closure(dir: &Path, wanted: &[&str]) -> Result<(BTreeMap<String, Vec<u8>>, String), LabError> {
    let mut paths = BTreeMap::new();
    index_modules(&dir.join("kernel"), &mut paths, 0);
    let builtin = fs::read_to_string(dir.join("modules.builtin")).unwrap_or_default();
    let builtin: Vec<String> = builtin.lines().map(module_name).collect();
    let mut files = BTreeMap::new();
    let mut list = String::new();
    for name in wanted {
        let mut order = Vec::new();
        if paths.contains_key(*name) {
            resolve(name, &paths, &mut files, &mut order, 0)?;
        } else if !builtin.iter().any(|b| b == name) {
            continue;
        }
        list += &format!("{name} {}\n", order.join(" "));
    }
    Ok((files, list))
}

fn index_modules(dir: &Path, paths: &mut BTreeMap<String, PathBuf>, depth: u32) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && depth < 12 {
            index_modules(&path, paths, depth + 1);
        } else if path.to_string_lossy().contains(".ko") {
            paths.insert(module_name(&path.to_string_lossy()), path);
        }
    }
}

/// `…/virtio-rng.ko.xz` is `virtio_rng`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn resolve(
    name: &str,
    paths: &BTreeMap<String, PathBuf>,
    files: &mut BTreeMap<String, Vec<u8>>,
    order: &mut Vec<String>,
    depth: u32,
) -> Result<(), LabError> {
    let Some(path) = paths.get(name).filter(|_| depth < 20 && !order.iter().any(|o| o == name))
    else {
        return Ok(());
    };
    if !files.contains_key(name) {
        files.insert(name.to_string(), unpack(path)?);
    }
    for need in needs(&files[name]) {
        resolve(&need, paths, files, order, depth + 1)?;
    }
    order.push(name.to_string());
    Ok(())
}

/// What `.modinfo` says a module depends on.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|w| w == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|b| *b == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value).replace('-', "_");
    value.split(',').filter(|n| !n.is_empty()).map(String::from).collect()
}

fn unpack(path: &Path) -> Result<Vec<u8>, LabError> {
    let program = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).map_err(LabError::file(path)),
    };
    let failed = |message: String| LabError::Command { command: format!("{program} -dc"), message };
    let out = Command::new(program).arg("-dc").arg(path).output();
    let out = out.map_err(|e| failed(e.to_string()))?;
    if !out.status.success() {
        return Err(failed(String::from_utf8_lossy(&out.stderr).into_owned()));
    }
    Ok(out.stdout)
}

/// A cpio archive in the one format the kernel unpacks (`newc`). Owner and times
/// are zero, so that the same parts give the same bytes.
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    inode: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let fields = [self.inode, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields.into_iter().chain([name.len() as u32 + 1, 0]) {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, b"");
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_lists_what_went_in() {
        let mut c = Cpio::default();
        c.add("bin", 0o040755, b"");
        c.add("bin/x", 0o100755, b"hello");
        let bytes = c.finish();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(bytes.windows(6).filter(|w| w == b"070701").count(), 3);
        assert!(bytes.windows(8).any(|w| w == b"hello\0\0\0"));
    }

    #[test]
    fn a_module_comes_after_what_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel/drivers");
        fs::create_dir_all(&kernel).unwrap();
        fs::write(kernel.join("virtio-pci.ko"), b"x\0depends=virtio_ring,virtio\0y").unwrap();
        fs::write(kernel.join("virtio_ring.ko"), b"x\0depends=virtio\0").unwrap();
        fs::write(kernel.join("virtio.ko"), b"x\0depends=\0").unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/drivers/virtio_console.ko\n")
            .unwrap();
        let (files, list) = closure(dir.path(), &["virtio_pci", "virtio_console", "none"]).unwrap();
        assert_eq!(list, "virtio_pci virtio virtio_ring virtio_pci\nvirtio_console \n");
        assert_eq!(files.len(), 3);
    }

    #[test]
    fn the_tool_passes_its_own_tests() {
        let dir = tempfile::tempdir().unwrap();
        let tool = tool(dir.path()).unwrap();
        let said = run(Command::new(tool).arg("--self-test")).unwrap();
        assert!(said.contains("passed"), "{said}");
    }
}
