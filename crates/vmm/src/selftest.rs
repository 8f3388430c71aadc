//! Whether this kernel keeps write-protection over what happens to pages.
//!
//! Linux 6.12 to 6.17 lose it where a huge page is split and parts of it are zeros, unless
//! they have the fix "mm/rmap: fix soft-dirty and uffd-wp bit loss when remapping zero-filled
//! mTHP subpage to shared zeropage" of October 2025. A write to such a page does not wait,
//! and is lost to the discard. So before an agent protects anything of a VM, it protects a
//! huge page of its own, has it split, paged out and read again, and looks at each page.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_core::wire::abi::PAGE;

use crate::sys::{self, Mapping, Range};
use crate::uffd::Uffd;

/// Bytes of a huge page, and pages in it.
const HUGE: usize = 2 << 20;
const PAGES: usize = HUGE / PAGE as usize;
/// Tries to get a huge page.
const TRIES: usize = 4;
/// Bit of an entry in `/proc/PID/pagemap`: write-protected by userfaultfd.
const PROTECTED: u64 = 1 << 57;
/// The switches of huge pages; absent where the kernel has none.
const SWITCHES: &str = "/sys/kernel/mm/transparent_hugepage";

#[derive(Debug)]
pub enum Failed {
    /// It loses protection: never to be tried again.
    Loses(String),
    /// It could not be found out now.
    Unknown(String),
}

/// Tries it with this userfaultfd. Takes some milliseconds.
pub fn keeps_protection(uffd: &Uffd) -> Result<(), Failed> {
    check(uffd, &mut |_| ())
}

/// `disturb` is called where the kernel's loss would be.
fn check(uffd: &Uffd, disturb: &mut dyn FnMut(&Mapping)) -> Result<(), Failed> {
    let unknown = |what: &'static str| {
        move |e: io::Error| Failed::Unknown(format!("the kernel cannot be tested: {what}: {e}"))
    };
    let Some(memory) = huge_page().map_err(unknown("huge page"))? else { return Ok(()) };
    let all = Range { start: memory.address(), len: HUGE as u64 };
    let pagemap = File::open("/proc/self/pagemap").map_err(unknown("pagemap"))?;
    uffd.register(all).map_err(unknown("userfaultfd"))?;
    let mut tested = || -> Result<(), Failed> {
        uffd.protect(all).map_err(unknown("protection"))?;
        whole(&pagemap, all, "it is protected")?;
        // One page of a huge one: the kernel splits it at once.
        sys::cold(Range { start: all.start + PAGE, len: PAGE }).map_err(unknown("MADV_COLD"))?;
        disturb(&memory);
        whole(&pagemap, all, "a huge page of zeros is split")?;
        match sys::advise(all, libc::MADV_PAGEOUT) {
            Ok(()) => whole(&pagemap, all, "it is paged out")?,
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
            Err(e) => return Err(unknown("MADV_PAGEOUT")(e)),
        }
        // Reading brings it back.
        let is_zero = |page: &[AtomicU64]| page[0].load(Relaxed) == 0;
        if !memory.words().chunks(PAGE as usize / 8).all(is_zero) {
            return Err(Failed::Loses("a page came back from swap as another".into()));
        }
        whole(&pagemap, all, "it is read again")
    };
    let done = tested();
    let _ = uffd.unregister(all);
    done
}

/// Whether there can be no huge page in this process, of any size. What cannot be read does not
/// say so.
fn are_off(switches: &Path) -> bool {
    match switches.try_exists() {
        Ok(true) => {}
        Ok(false) => return switches.parent().is_some_and(Path::exists),
        Err(_) => return false,
    }
    let of = |path: &Path| std::fs::read_to_string(path.join("enabled")).unwrap_or_default();
    let all_off = of(switches).contains("[never]");
    let Ok(sizes) = std::fs::read_dir(switches) else { return false };
    let mut sizes =
        sizes.flatten().filter(|s| s.file_name().as_encoded_bytes().starts_with(b"hugepages-"));
    all_off
        && sizes.all(|size| {
            let switch = of(&size.path());
            switch.contains("[never]") || switch.contains("[inherit]")
        })
}

/// A huge page full of zeros; `None` where huge pages are switched off.
fn huge_page() -> io::Result<Option<Mapping>> {
    if sys::huge_pages_are_off() || are_off(Path::new(SWITCHES)) {
        return Ok(None);
    }
    let pagemap = File::open("/proc/self/pagemap")?;
    for _ in 0..TRIES {
        let mut memory = Mapping::anonymous(HUGE)?;
        memory.huge(true)?;
        memory.bytes_mut().chunks_mut(PAGE as usize).for_each(|page| page[0] = 1);
        memory.bytes_mut().chunks_mut(PAGE as usize).for_each(|page| page[0] = 0);
        let all = Range { start: memory.address(), len: HUGE as u64 };
        // Linux 6.1 and later.
        let _ = sys::advise(all, libc::MADV_COLLAPSE);
        let mut huge = false;
        match sys::pagemap_scan(pagemap.as_fd(), all, false, |_, is_huge| huge |= is_huge) {
            Ok(()) if huge => return Ok(Some(memory)),
            Ok(()) => {}
            // Before 6.7 there is no telling; those kernels keep it.
            Err(_) => return Ok(Some(memory)),
        }
    }
    Err(io::Error::other(
        "none was to be had, memory is fragmented: tried again every few seconds; \
         `echo 1 > /proc/sys/vm/compact_memory` helps",
    ))
}

/// Whether all pages are protected.
fn whole(pagemap: &File, all: Range, when: &str) -> Result<(), Failed> {
    let mut entries = [0u8; PAGES * 8];
    pagemap
        .read_exact_at(&mut entries, all.start / PAGE * 8)
        .map_err(|e| Failed::Unknown(format!("the kernel cannot be tested: pagemap: {e}")))?;
    let words = entries.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap_or([0; 8])));
    let lost = words.filter(|entry| entry & PROTECTED == 0).count();
    match lost {
        0 => Ok(()),
        _ => Err(Failed::Loses(format!(
            "this kernel loses write-protection when {when} ({lost} of {PAGES} pages): it needs \
             the fix of October 2025 in mm/rmap (zero-filled pages of split huge pages)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_kernel_whose_huge_pages_are_all_off_is_not_tried() {
        let dir = tempfile::tempdir().unwrap();
        let switches = dir.path().join("mm/transparent_hugepage");
        assert!(!are_off(&switches), "nothing can be read");
        std::fs::create_dir(dir.path().join("mm")).unwrap();
        assert!(are_off(&switches), "a kernel without huge pages");
        std::fs::create_dir_all(switches.join("hugepages-64kB")).unwrap();
        assert!(!are_off(&switches), "its switch cannot be read");
        let set = |file: &str, to| std::fs::write(switches.join(file), to).unwrap();
        set("enabled", "always madvise [never]");
        assert!(!are_off(&switches), "that of a size cannot be read");
        set("hugepages-64kB/enabled", "always [inherit] madvise never");
        assert!(are_off(&switches));
        set("hugepages-64kB/enabled", "[always] inherit madvise never");
        assert!(!are_off(&switches));
        set("hugepages-64kB/enabled", "always inherit madvise [never]");
        set("enabled", "always [madvise] never");
        assert!(!are_off(&switches));
    }

    #[test]
    fn a_kernel_that_loses_protection_is_found() {
        let Ok(uffd) = Uffd::open(None, true) else {
            return eprintln!("skipped: no userfaultfd for this user");
        };
        // The kernels that Ebb is tested on keep it.
        keeps_protection(&uffd).unwrap();
        let lose = |memory: &Mapping| {
            let page = Range { start: memory.address() + 7 * PAGE, len: PAGE };
            uffd.lift(page).unwrap();
        };
        match check(&uffd, &mut |memory| lose(memory)) {
            Err(Failed::Loses(why)) => assert!(why.contains("1 of 512 pages"), "{why}"),
            other => panic!("{other:?}"),
        }
        keeps_protection(&uffd).unwrap();
    }
}
