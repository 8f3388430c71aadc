//! Which of a process's mappings can be guest RAM: `/proc/PID/maps` (proc(5)). Cheap beside
//! `regions`: the kernel walks no page tables for it.

use ebb_core::mapping::Mapping;
use ebb_core::range::push;

use crate::root::{ParseError, Probed, Root};
use crate::sys::Range;

/// Mappings smaller than this are QEMU's own, not RAM.
pub(super) const LEAST_MAPPING: u64 = 16 << 20;
/// Linux takes memory that is plugged in blocks of this size at least.
const LEAST_PLUGGED: u64 = 128 << 20;

/// Reads the mappings of a process that can be guest RAM, by address. What lies side by side is
/// one, as ranges that are open to KSM cut RAM up; memory of QEMU's own may be among it.
pub fn read_ram_mappings(root: &Root, pid: u32) -> Probed<Vec<Range>> {
    root.parse(format!("/proc/{pid}/maps"), parse_ram_mappings)
}

/// Reads the mappings of a process that are not guest RAM.
pub fn read_own_mappings(root: &Root, pid: u32) -> Probed<Vec<Range>> {
    root.parse(format!("/proc/{pid}/maps"), parse_own_mappings)
}

/// The mappings of a text, line by line.
fn mappings(text: &str) -> impl Iterator<Item = Result<Mapping<'_>, ParseError>> {
    text.lines()
        .enumerate()
        .map(|(i, line)| Mapping::parse(line).ok_or_else(|| ParseError::new(i + 1, line)))
}

/// Parses them (proc(5)): writable and not executable (translated code is), without
/// a file or in shared memory, and large.
pub fn parse_ram_mappings(text: &str) -> Result<Vec<Range>, ParseError> {
    let mut ranges: Vec<Range> = Vec::new();
    for mapping in mappings(text) {
        let Mapping { start, end, permissions, path, .. } = mapping?;
        let range = Range { start, len: end.saturating_sub(start) };
        let shared = ["/memfd:", "/dev/shm/"].iter().any(|p| path.starts_with(p));
        let private = path.is_empty() || path.starts_with("[anon:");
        let ours = match permissions {
            "rw-p" => private || shared,
            "rw-s" => shared,
            _ => false,
        };
        if ours {
            push(&mut ranges, range);
        }
    }
    ranges.retain(|r| r.len >= LEAST_MAPPING);
    Ok(ranges)
}

/// Parses them: the program, its heap and stacks, translated code, and mappings that are small
/// beside the guest's RAM, as that of a display is. What lies side by side is one, as ranges that
/// are open to KSM cut RAM up.
pub fn parse_own_mappings(text: &str) -> Result<Vec<Range>, ParseError> {
    let (mut own, mut writable): (Vec<Range>, Vec<Range>) = (Vec::new(), Vec::new());
    for mapping in mappings(text) {
        let Mapping { start, end, permissions, path, .. } = mapping?;
        let range = Range { start, len: end.saturating_sub(start) };
        let named = ["[heap", "[stack", "[v"].iter().any(|p| path.starts_with(p));
        match permissions {
            "---p" | "---s" => {}
            "rw-p" | "rw-s" if !named => push(&mut writable, range),
            _ => own.push(range),
        }
    }
    let largest = writable.iter().map(|r| r.len).max().unwrap_or(0);
    let least = (largest / 16).clamp(LEAST_MAPPING, LEAST_PLUGGED);
    own.extend(writable.into_iter().filter(|r| r.len < least));
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0000000-55d0c0800000 r-xp 00000000 fe:00 77 /usr/bin/qemu-system-x86_64\n\
        55d0d0000000-55d0d8000000 rw-p 00000000 00:00 0 [heap]\n\
        7f0000000000-7f0020000000 rw-p 00000000 00:00 0 \n\
        7f0020000000-7f0020400000 rw-p 00000000 00:00 0 \n\
        7f0030000000-7f0040000000 rwxp 00000000 00:00 0 \n\
        7f0050000000-7f0060000000 ---p 00000000 00:00 0 \n\
        7f0070000000-7f0080000000 rw-s 00000000 00:01 99 /memfd:ram (deleted)\n\
        7f0090000000-7f00a0000000 rw-s 00000000 fe:00 98 /var/lib/disk.img\n";

    #[test]
    fn what_is_not_ram_is_the_vmms_own() {
        let starts = |text| {
            let own = parse_own_mappings(text).unwrap();
            own.iter().map(|r| (r.start, r.len >> 20)).collect::<Vec<_>>()
        };
        let own = [(0x55d0c0000000, 8), (0x55d0d0000000, 128), (0x7f0030000000, 256)];
        assert_eq!(starts(MAPS), own, "a file that is mapped for writing may be RAM");
        let small = "7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n\
                     7f0000900000-7f0001100000 rw-p 00000000 00:00 0 \n\
                     7f0001100000-7f0001900000 rw-p 00000000 00:00 0 \n";
        assert_eq!(starts(small), [(0x7f0000000000, 8)], "two that lie side by side are large");
        let display = "7f0000000000-7f0100000000 rw-p 00000000 00:00 0 \n\
                       7f0200000000-7f0204000000 rw-p 00000000 00:00 0 \n\
                       7f0300000000-7f0308000000 rw-p 00000000 00:00 0 \n";
        assert_eq!(starts(display), [(0x7f0200000000, 64)], "beside RAM of 4 GiB and 128 MiB");
        assert_eq!(parse_own_mappings("nonsense\n").unwrap_err().line, 1);
    }

    #[test]
    fn only_what_can_be_ram_is_walked() {
        let range = |start, len| Range { start, len };
        let ram = [range(0x7f0000000000, 0x20400000), range(0x7f0070000000, 0x10000000)];
        assert_eq!(parse_ram_mappings(MAPS).unwrap(), ram);
        assert_eq!(parse_ram_mappings("nonsense\n").unwrap_err().line, 1);
        assert_eq!(parse_ram_mappings("12-zz rw-p 0 0 0\n").unwrap_err().line, 1);
        let cut = "7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n\
                   7f0000800000-7f0001800000 rw-p 00000000 00:00 0 \n";
        assert_eq!(parse_ram_mappings(cut).unwrap(), [range(0x7f0000000000, 24 << 20)]);
        let small = "7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n\
                     7f0000900000-7f0001100000 rw-p 00000000 00:00 0 \n";
        assert_eq!(parse_ram_mappings(small).unwrap(), []);
    }
}
