//! Guest RAM as this process has it: what the daemon said, checked against our
//! own maps, and how to read it, ask what is held of it, and give it back.
//!
//! RAM is either private anonymous memory or a shared file on tmpfs (memfd,
//! `/dev/shm`). For anything else the agent stands aside and says why.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use ebb_core::mapping::Mapping;
use ebb_core::wire::Segment;
use ebb_core::wire::abi::{self, MAP_PFNS, MAP_WORDS, PAGE};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstat, fstatfs, major, minor, stat};

use crate::sys::{self, Range};

const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

#[derive(Debug)]
pub enum Kind {
    Anonymous,
    /// A shared file; where the segment begins in it.
    Shared {
        /// The file, open for writing.
        fd: OwnedFd,
        /// Offset of the segment's first byte.
        offset: u64,
    },
}

impl Kind {
    fn is(&self, other: &Kind) -> bool {
        match (self, other) {
            (Kind::Anonymous, Kind::Anonymous) => true,
            (Kind::Shared { fd: a, offset: at }, Kind::Shared { fd: b, offset }) => {
                let file = |fd: &OwnedFd| fstat(fd).ok().map(|file| (file.st_dev, file.st_ino));
                at == offset && file(a).is_some() && file(a) == file(b)
            }
            _ => false,
        }
    }
}

/// A checked piece of RAM.
#[derive(Debug)]
pub struct Piece {
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
    pub hva: u64,
    pub kind: Kind,
}

/// The part of a piece that one map page is about.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub piece: usize,
    /// Bits of the map page, from here.
    pub first: usize,
    pub len: usize,
    /// Address of the page of bit 0, were it there.
    pub base: u64,
}

impl Part {
    /// Addresses of a run of bits.
    pub fn range(&self, first: usize, len: usize) -> Range {
        let start = self.base.wrapping_add(first as u64 * PAGE);
        Range { start, len: len as u64 * PAGE }
    }

    pub fn bit(&self, address: u64) -> usize {
        (address.wrapping_sub(self.base) / PAGE) as usize
    }
}

pub type Bits = [u64; MAP_WORDS];

#[derive(Debug)]
pub struct Ram {
    /// By guest-physical address.
    pub pieces: Vec<Piece>,
    /// Their guest-physical addresses.
    pub ranges: Vec<Range>,
    pagemap: Option<File>,
    memory: Option<File>,
    pidfd: Option<OwnedFd>,
}

impl Ram {
    /// Checks what the daemon said. The error is a reason to stand aside.
    pub fn check(segments: &[Segment]) -> Result<Ram, String> {
        let maps = std::fs::read_to_string("/proc/self/maps")
            .map_err(|e| format!("cannot read /proc/self/maps: {e}"))?;
        let maps = parse_maps(&maps);
        let pieces = segments.iter().map(|s| check_segment(s, &maps));
        let mut pieces: Vec<Piece> = pieces.collect::<Result<_, _>>()?;
        pieces.sort_by_key(|p| p.gpa);
        if pieces.windows(2).any(|w| w[0].gpa + w[0].size > w[1].gpa) {
            return Err("segments of RAM overlap".into());
        }
        if !pieces.first().is_some_and(|p| p.gpa == 0 && p.size >= 16 << 20) {
            return Err("RAM does not begin at 0 with 16 MiB".into());
        }
        let ranges = pieces.iter().map(|p| Range { start: p.gpa, len: p.size }).collect();
        let memory = File::open("/proc/self/mem").ok();
        Ok(Ram { pieces, ranges, pagemap: pagemap(), memory, pidfd: sys::discard_all_probe() })
    }

    /// Whether all of it is where it was when it was checked; the error says what is not.
    pub fn is_still_there(&self) -> Result<(), String> {
        let segment = |p: &Piece| Segment { gpa: p.gpa, size: p.size, hva: p.hva };
        let segments: Vec<Segment> = self.pieces.iter().map(segment).collect();
        let now = Ram::check(&segments)?;
        let other = self.pieces.iter().zip(&now.pieces).find(|(was, is)| !was.kind.is(&is.kind));
        let moved =
            |p: &Piece| format!("RAM at {:#x} ({} MiB): is other memory now", p.gpa, p.size >> 20);
        other.map_or(Ok(()), |(was, _)| Err(moved(was)))
    }

    /// Whether some of it is anonymous.
    pub fn has_anonymous(&self) -> bool {
        self.pieces.iter().any(|p| matches!(p.kind, Kind::Anonymous))
    }

    /// Whether some of it is a shared file, which another process may map as well.
    pub fn has_shared(&self) -> bool {
        self.pieces.iter().any(|p| matches!(p.kind, Kind::Shared { .. }))
    }

    /// Our address of `len` bytes of guest memory that lie in one piece.
    pub fn hva(&self, gpa: u64, len: u64) -> Option<u64> {
        let at = self.ranges.iter().position(|r| r.holds(gpa, len))?;
        Some(self.pieces[at].hva + (gpa - self.pieces[at].gpa))
    }

    pub fn read(&self, gpa: u64, to: &mut [u8]) -> Option<()> {
        let hva = self.hva(gpa, to.len() as u64)?;
        sys::copy_from(&[sys::place(hva, to.len())], to).ok()
    }

    /// Copies the first bytes of pages, `N` of each. `gently`: pages that are merged stay
    /// so, at ten times the cost. To copy as [`sys::copy_from`] does pins a page, and
    /// Linux (5.19 on) copies a shared page for the process that pins it.
    pub fn starts<const N: usize>(
        &self,
        pages: &[Range],
        gently: bool,
    ) -> io::Result<Vec<[u8; N]>> {
        let mut starts = vec![[0; N]; pages.len()];
        match self.memory.as_ref().filter(|_| gently) {
            Some(memory) => {
                let mut one = starts.iter_mut().zip(pages);
                one.try_for_each(|(to, page)| memory.read_exact_at(to, page.start))?;
            }
            None => {
                let places: Vec<_> = pages.iter().map(|p| sys::place(p.start, N)).collect();
                sys::copy_from(&places, starts.as_flattened_mut())?;
            }
        }
        Ok(starts)
    }

    pub fn bits(&self, gpa: u64) -> Option<Bits> {
        let mut bytes = [0u8; PAGE as usize];
        self.read(gpa, &mut bytes)?;
        let mut bits = [0; MAP_WORDS];
        for (word, eight) in bits.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(eight.try_into().unwrap_or_default());
        }
        Some(bits)
    }

    /// The parts of RAM that a map page is about.
    pub fn parts(&self, pfn: u64) -> impl Iterator<Item = Part> + '_ {
        let (start, end) = (pfn * PAGE, (pfn + MAP_PFNS) * PAGE);
        self.pieces.iter().enumerate().filter_map(move |(piece, p)| {
            let (from, to) = (p.gpa.max(start), (p.gpa + p.size).min(end));
            (from < to).then(|| Part {
                piece,
                first: ((from - start) / PAGE) as usize,
                len: ((to - from) / PAGE) as usize,
                base: p.hva.wrapping_sub(p.gpa).wrapping_add(start),
            })
        })
    }

    /// Which pages of a part the host holds, and which of them huge pages map.
    pub fn held(&self, part: &Part, held: &mut Bits, huge: &mut Bits) -> io::Result<()> {
        let range = part.range(part.first, part.len);
        if let (Kind::Anonymous, Some(pagemap)) = (&self.pieces[part.piece].kind, &self.pagemap) {
            return sys::pagemap_scan(pagemap.as_fd(), range, true, |r, is_huge| {
                let (first, len) = (part.bit(r.start), (r.len / PAGE) as usize);
                abi::fill(held, first, len, true);
                if is_huge {
                    abi::fill(huge, first, len, true);
                }
            });
        }
        if let Kind::Shared { fd, offset } = &self.pieces[part.piece].kind {
            let start = offset + (range.start - self.pieces[part.piece].hva);
            return data(fd.as_fd(), start, range.len, |at, len| {
                let first = part.first + ((at - start) / PAGE) as usize;
                abi::fill(held, first, len.div_ceil(PAGE) as usize, true);
            });
        }
        let mut pages = [0u8; MAP_PFNS as usize];
        sys::mincore(range, &mut pages)?;
        for (i, _) in pages[..part.len].iter().enumerate().filter(|(_, p)| **p & 1 == 1) {
            abi::fill(held, part.first + i, 1, true);
        }
        // Cannot tell: what is held whole is taken for huge.
        for (first, len) in blocks(part) {
            if abi::all_set(held, first, len) {
                abi::fill(huge, first, len, true);
            }
        }
        Ok(())
    }

    /// Whether [`Ram::held`] tells of this part what huge pages map, or guesses.
    pub fn tells_huge(&self, part: &Part) -> bool {
        matches!(self.pieces[part.piece].kind, Kind::Anonymous) && self.pagemap.is_some()
    }

    /// The stretches of a range that are in memory, if all of it is anonymous RAM and this
    /// kernel can tell.
    pub fn present(&self, range: Range) -> Option<Vec<Range>> {
        let piece = self.piece_of(range)?;
        let pagemap = self.pagemap.as_ref().filter(|_| matches!(piece.kind, Kind::Anonymous))?;
        let mut found = Vec::new();
        sys::pagemap_scan(pagemap.as_fd(), range, false, |r, _| found.push(r)).ok()?;
        Some(found)
    }

    /// The piece in which all of a range lies.
    pub fn piece_of(&self, range: Range) -> Option<&Piece> {
        let end = range.start.checked_add(range.len)?;
        self.pieces.iter().find(|p| p.hva <= range.start && end <= p.hva + p.size)
    }

    /// Gives ranges of a piece back. `true`: all of it, and for anonymous memory
    /// nothing of it is protected any more.
    ///
    /// Destroys what is there: only for what was proven free.
    pub fn discard(&self, piece: usize, ranges: &[Range]) -> bool {
        let piece = &self.pieces[piece];
        if let Kind::Shared { fd, offset } = &piece.kind {
            let punch = |r: &Range| punch(fd, offset + (r.start - piece.hva), r.len);
            return ranges.iter().all(|r| punch(r).is_ok());
        }
        match &self.pidfd {
            Some(pidfd) if ranges.len() > 1 => ranges.chunks(sys::VECTOR_MAX).all(|chunk| {
                let want: u64 = chunk.iter().map(|r| r.len).sum();
                // What was discarded is not protected any more: it must not be discarded again.
                match sys::discard_all(pidfd, chunk) {
                    Ok(done) => done == want,
                    Err(e) if not_begun(&e) => chunk.iter().all(|r| sys::discard(*r).is_ok()),
                    Err(_) => false,
                }
            }),
            _ => ranges.iter().all(|r| sys::discard(*r).is_ok()),
        }
    }
}

/// Gives back a piece of a shared file: it reads as zeros from now on.
pub fn punch(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(fd, mode, offset, len)?)
}

/// The call was refused before it did anything.
fn not_begun(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS))
}

/// Our own page map, if it can be scanned (Linux 6.7).
pub(crate) fn pagemap() -> Option<File> {
    let page = sys::Mapping::anonymous(PAGE as usize).ok()?;
    let range = Range { start: page.address(), len: PAGE };
    let file = File::open("/proc/self/pagemap").ok()?;
    sys::pagemap_scan(file.as_fd(), range, true, |_, _| ()).ok().map(|()| file)
}

/// Calls `each` with the stretches of a file that hold data, in memory or in swap,
/// mapped or not. The descriptor is our own: no other code uses its position.
fn data(
    fd: BorrowedFd<'_>,
    start: u64,
    len: u64,
    mut each: impl FnMut(u64, u64),
) -> io::Result<()> {
    let (mut at, end) = (start, start + len);
    while at < end {
        at = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(found) => found,
            // No data from here on.
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let hole = rustix::fs::seek(fd, SeekFrom::Hole(at))?.min(end);
        if at < hole {
            each(at, hole - at);
        }
        at = hole.max(at + 1);
    }
    Ok(())
}

/// The 2 MiB blocks (by our addresses) that lie wholly in a part, as bits.
pub fn blocks(part: &Part) -> impl Iterator<Item = (usize, usize)> + use<> {
    const BLOCK: usize = 512;
    let start = part.range(part.first, 0).start;
    let lead = (start.next_multiple_of(BLOCK as u64 * PAGE) - start) / PAGE;
    let (first, end) = (part.first + lead as usize, part.first + part.len);
    (first..end).step_by(BLOCK).filter(move |b| b + BLOCK <= end).map(|b| (b, BLOCK))
}

/// Those of these bits that are of this part.
pub fn within(part: &Part, bits: &Bits) -> Bits {
    let mut mask = [0; abi::MAP_WORDS];
    abi::fill(&mut mask, part.first, part.len, true);
    mask.iter_mut().zip(bits).for_each(|(m, b)| *m &= b);
    mask
}

/// The stretches of a part that have bits set: page tables of the others need not be walked.
/// Few pages between two are walked as well, which takes less than another call.
pub fn stretches(part: &Part, mask: &Bits) -> Vec<Part> {
    let mut found: Vec<Part> = Vec::new();
    for (first, len) in abi::runs(mask) {
        match found.last_mut() {
            Some(last) if first <= last.first + last.len + 128 => {
                last.len = first + len - last.first;
            }
            _ => found.push(Part { first, len, ..*part }),
        }
    }
    found
}

fn parse_maps(text: &str) -> Vec<Mapping<'_>> {
    text.lines().filter_map(Mapping::parse).collect()
}

/// The one mapping that holds a segment, or the mappings, if they are alike: a
/// VMA of anonymous RAM may be split by madvise.
fn check_segment(s: &Segment, maps: &[Mapping<'_>]) -> Result<Piece, String> {
    let name = format!("RAM at {:#x} ({} MiB)", s.gpa, s.size >> 20);
    let whole = |v: u64| v.is_multiple_of(PAGE);
    let (Some(end), Some(_)) = (s.hva.checked_add(s.size), s.gpa.checked_add(s.size)) else {
        return Err(format!("{name}: no such addresses"));
    };
    if s.size == 0 || !whole(s.gpa) || !whole(s.size) || !whole(s.hva) {
        return Err(format!("{name}: not whole pages"));
    }
    let mut at = s.hva;
    let mut kind = None;
    for map in maps.iter().filter(|m| m.start < end && m.end > s.hva) {
        if map.start > at {
            break;
        }
        if !map.is_writable() {
            return Err(format!("{name}: not writable in this process"));
        }
        let this = (map.is_shared(), map.device, map.inode, map.offset.wrapping_sub(map.start));
        let same = (this.0, this.1, this.2, if map.inode == 0 { 0 } else { this.3 });
        if *kind.get_or_insert(same) != same {
            return Err(format!("{name}: made of different mappings"));
        }
        if map.inode == 0 && !(map.path.is_empty() || map.path.starts_with("[anon")) {
            return Err(format!("{name}: is {}", map.path));
        }
        at = map.end;
    }
    let Some((shared, device, inode, delta)) = kind.filter(|_| at >= end) else {
        return Err(format!("{name}: not mapped in this process"));
    };
    let kind = match (shared, inode) {
        (false, 0) => Kind::Anonymous,
        (false, _) => return Err(format!("{name}: a private mapping of a file")),
        (true, _) => {
            let fd = find_file(device, inode).ok_or(format!("{name}: its file is not open"))?;
            check_file(fd.as_fd()).map_err(|e| format!("{name}: {e}"))?;
            Kind::Shared { fd, offset: delta.wrapping_add(s.hva) }
        }
    };
    Ok(Piece { gpa: s.gpa, size: s.size, hva: s.hva, kind })
}

fn check_file(fd: BorrowedFd<'_>) -> Result<(), String> {
    match fstatfs(fd).map(|s| s.f_type & 0xffff_ffff) {
        Ok(TMPFS_MAGIC) => Ok(()),
        Ok(HUGETLBFS_MAGIC) => Err("hugetlbfs: pages cannot be given back one by one".into()),
        Ok(other) => Err(format!("a file on a file system ({other:#x}) other than tmpfs")),
        Err(e) => Err(format!("its file: {e}")),
    }
}

/// Our descriptor of a mapped file, among those this process has open.
fn find_file(device: (u32, u32), inode: u64) -> Option<OwnedFd> {
    for entry in std::fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let path = entry.path();
        let same = stat(&path).is_ok_and(|file| {
            file.st_ino == inode && (major(file.st_dev), minor(file.st_dev)) == device
        });
        if same && let Ok(file) = File::options().read(true).write(true).open(&path) {
            let held = fstat(&file).ok()?;
            return (held.st_ino == inode).then(|| file.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segment(hva: u64, size: u64) -> Segment {
        Segment { gpa: 0, size, hva }
    }

    #[test]
    fn another_file_at_the_same_address_is_other_ram() {
        let file = || rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (fd, other) = (file(), file());
        let is = |fd: &OwnedFd, offset| Kind::Shared { fd: fd.try_clone().unwrap(), offset };
        assert!(is(&fd, 0).is(&is(&fd, 0)) && Kind::Anonymous.is(&Kind::Anonymous));
        for new in [is(&other, 0), is(&fd, 4096), Kind::Anonymous] {
            assert!(!is(&fd, 0).is(&new) && !new.is(&is(&fd, 0)), "{new:?}");
        }
    }

    #[test]
    fn what_is_not_plain_ram_is_a_reason() {
        let anon = "100000-300000 rw-p 00000000 00:00 0\n300000-500000 rw-p 00000000 00:00 0\n";
        let at = |s, m: &str| check_segment(&s, &parse_maps(m)).map(drop).unwrap_err();
        assert!(check_segment(&segment(0x100000, 0x400000), &parse_maps(anon)).is_ok());
        assert!(at(segment(0x100000, 0x400001), anon).contains("whole pages"));
        assert!(at(segment(0x100000, 0x500000), anon).contains("not mapped"));
        assert!(at(segment(u64::MAX - 4095, 0x400000), anon).contains("no such"));
        let hole = "100000-200000 rw-p 00000000 00:00 0\n300000-500000 rw-p 00000000 00:00 0\n";
        assert!(at(segment(0x100000, 0x400000), hole).contains("not mapped"));
        let read = "100000-500000 r--p 00000000 00:00 0\n";
        assert!(at(segment(0x100000, 0x400000), read).contains("not writable"));
        let heap = "100000-500000 rw-p 00000000 00:00 0 [heap]\n";
        assert!(at(segment(0x100000, 0x400000), heap).contains("[heap]"));
        let file = "100000-500000 rw-p 00000000 08:01 7 /ram\n";
        assert!(at(segment(0x100000, 0x400000), file).contains("private mapping of a file"));
        let lost = "100000-500000 rw-s 00000000 ff:ff 7 /ram\n";
        assert!(at(segment(0x100000, 0x400000), lost).contains("not open"));
    }

    #[test]
    fn parts_and_blocks_lie_inside() {
        let piece = |gpa, size, hva| Piece { gpa, size, hva, kind: Kind::Anonymous };
        let pieces = vec![piece(0, 0x900_0000, 0x7f00_0010_0000), piece(1 << 32, 0x10_0000, 0)];
        let ranges = pieces.iter().map(|p| Range { start: p.gpa, len: p.size }).collect();
        let ram = Ram { pieces, ranges, pagemap: None, memory: None, pidfd: None };
        let parts: Vec<_> = ram.parts(MAP_PFNS).collect();
        assert_eq!((parts.len(), parts[0].first, parts[0].len), (1, 0, 4096));
        assert_eq!(parts[0].range(1, 1).start, 0x7f00_0810_1000);
        let found: Vec<_> = blocks(&parts[0]).collect();
        assert_eq!((found.len(), found[0]), (7, (256, 512)));
        assert_eq!(ram.parts(1 << 20).count(), 1);
        assert_eq!(ram.parts(2 * MAP_PFNS).count(), 0);
        assert_eq!(ram.hva(0x900_0000 - 8, 16), None);
    }

    proptest! {
        #[test]
        fn stretches_hold_every_bit_of_a_part_and_no_other_part(
            bits in prop::collection::vec(0..abi::MAP_PFNS as usize, 0..40),
            first in 0..abi::MAP_PFNS as usize, len in 1..abi::MAP_PFNS as usize,
        ) {
            let len = len.min(abi::MAP_PFNS as usize - first);
            let part = Part { piece: 0, first, len, base: 0 };
            let mut mask: Bits = [0; abi::MAP_WORDS];
            let inside = |b: &&usize| (first..first + len).contains(*b);
            bits.iter().filter(inside).for_each(|b| abi::fill(&mut mask, *b, 1, true));
            let found = stretches(&part, &mask);
            for b in bits.iter().filter(inside) {
                let of = |s: &Part| (s.first..s.first + s.len).contains(b);
                prop_assert_eq!(found.iter().filter(|s| of(s)).count(), 1);
            }
            for s in &found {
                prop_assert!(s.len > 0 && s.first >= first && s.first + s.len <= first + len);
                prop_assert!((s.first..s.first + s.len).any(|b| mask[b / 64] >> (b % 64) & 1 == 1));
            }
        }
    }
}
