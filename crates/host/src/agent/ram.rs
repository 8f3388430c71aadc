//! Where QEMU has the guest's RAM, by what its human monitor says (`info mtree`, `gpa2hva`).
//! A QEMU that puts this in other words is provided for here.

/// A stretch of guest-physical memory as `info mtree -f` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatRange {
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// Name of the memory region, e.g. `pc.ram`.
    pub name: String,
    /// Offset in that region.
    pub offset: u64,
}

/// The RAM of the view `memory` (what the CPUs see), in the text of `info mtree -f`.
///
/// Lines are `  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM`, with
/// ` @0000000000100000` after the name where the offset is not 0. ROM and
/// devices have another word than `ram`. Source: QEMU `softmmu/memory.c`,
/// `mtree_print_flatview`.
pub fn parse_mtree(text: &str) -> Vec<FlatRange> {
    let is_ours = |view: &&str| view.lines().any(|l| l.trim_start().starts_with("AS \"memory\""));
    let ranges = |view: &str| view.lines().filter_map(parse_flat_range).collect::<Vec<_>>();
    let mut views = text.split("\nFlatView").filter(is_ours).map(ranges);
    views.find(|ranges| !ranges.is_empty()).unwrap_or_default()
}

fn parse_flat_range(line: &str) -> Option<FlatRange> {
    let (range, rest) = line.trim_start().split_once(" (prio ")?;
    let (start, last) = range.split_once('-')?;
    let (_, name) = rest.split_once(", ram): ")?;
    let hex = |t: &str| u64::from_str_radix(t, 16).ok();
    let (name, rest) = name.split_once(" @").unwrap_or((name, "0"));
    let offset = hex(rest.split(' ').next()?)?;
    let name = name.trim_end().strip_suffix(" KVM").unwrap_or(name.trim_end());
    let (start, end) = (hex(start)?, hex(last)?.checked_add(1)?);
    (start < end).then(|| FlatRange { start, end, name: name.to_string(), offset })
}

/// Joins stretches of one region that follow each other (PAM and SMRAM cut holes
/// below 1 MiB), and leaves out what is too small to be the VM's RAM.
pub fn main_ram(ranges: &[FlatRange]) -> Vec<FlatRange> {
    // The region at 0 is RAM; DIMMs and the like are large.
    let first = ranges.iter().find(|r| r.start == 0).map(|r| r.name.clone());
    let mut joined: Vec<FlatRange> = Vec::new();
    for r in ranges {
        let main = Some(&r.name) == first.as_ref();
        if !main && (r.end - r.start) < 128 << 20 {
            continue;
        }
        match joined.last_mut() {
            // A hole with the same delta: firmware and video memory below 1 MiB.
            Some(l)
                if l.name == r.name
                    && r.start.wrapping_sub(r.offset) == l.start.wrapping_sub(l.offset)
                    && (r.start == l.end || r.start <= 1 << 20) =>
            {
                l.end = r.end;
            }
            _ => joined.push(r.clone()),
        }
    }
    joined
}

/// The address in `Host virtual address for 0x0 (pc.ram) is 0x7f…`.
pub fn parse_gpa2hva(text: &str) -> Option<u64> {
    let (_, address) = text.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTREE: &str = "FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000 KVM
  00000000000cb000-00000000000fffff (prio 0, ram): pc.ram @00000000000cb000 KVM
  0000000000100000-00000000bfffffff (prio 0, ram): pc.ram @0000000000100000 KVM
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
  0000000100000000-000000013fffffff (prio 0, ram): pc.ram @00000000c0000000 KVM

FlatView #2
 AS \"piix3-ide\", root: bus master container
  0000000000000000-0000000000000fff (prio 0, ram): nothing
";

    #[test]
    fn ram_is_found_in_the_memory_tree() {
        let all = parse_mtree(MTREE);
        assert_eq!(all.len(), 5);
        let ram = main_ram(&all);
        let found: Vec<_> = ram.iter().map(|r| (r.start, r.end, r.offset)).collect();
        assert_eq!(found, [(0, 3 << 30, 0), (4 << 30, 5 << 30, 3 << 30)]);
        assert_eq!(parse_mtree("nonsense\n (prio 0, ram): x\n"), []);
    }

    #[test]
    fn host_addresses_are_read() {
        let said = "Host virtual address for 0x0 (pc.ram) is 0x7f12a0000000\r\n";
        assert_eq!(parse_gpa2hva(said), Some(0x7f12_a000_0000));
        assert_eq!(parse_gpa2hva("No memory is mapped at address 0x0"), None);
    }
}
