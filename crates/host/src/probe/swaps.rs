//! `/proc/swaps` (Linux `mm/swapfile.c`, `swap_show`), and which of it is memory after all:
//! zram devices (`Documentation/admin-guide/blockdev/zram.rst`) and zswap
//! (`Documentation/admin-guide/mm/zswap.rst`).

use ebb_core::sample::{SwapArea, Zram};
use ebb_core::units::Bytes;

use crate::root::{ParseError, ProbeError, Probed, Root, unescape_octal};

/// Reads `/proc/swaps` and what its zram devices hold; `None` on a kernel without swap.
pub fn read_swaps(root: &Root) -> Probed<Vec<SwapArea>> {
    let Some(mut areas) = root.parse("/proc/swaps", parse_swaps)? else { return Ok(None) };
    for area in &mut areas {
        if let Some(device) = zram_device(&area.path) {
            let stat = format!("/sys/block/{device}/mm_stat");
            // Still zram, and still memory, where that cannot be read.
            let stat = root.parse(stat, parse_mm_stat).ok().flatten();
            area.zram = Some(stat.unwrap_or_default());
        }
    }
    Ok(Some(areas))
}

/// Whether what is swapped out is compressed and kept in memory first.
pub fn read_zswap(root: &Root) -> Result<bool, ProbeError> {
    let text = root.read("/sys/module/zswap/parameters/enabled")?;
    Ok(text.is_some_and(|t| matches!(t.trim(), "Y" | "y" | "1")))
}

/// `zramN` of `/dev/zramN`.
fn zram_device(path: &str) -> Option<&str> {
    let device = path.strip_prefix("/dev/")?;
    let number = device.strip_prefix("zram")?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(device)
}

/// Parses `mm_stat`: `orig_data_size compr_data_size mem_used_total …`, bytes.
pub fn parse_mm_stat(text: &str) -> Result<Zram, ParseError> {
    let field = |n: usize| text.split_ascii_whitespace().nth(n)?.parse().ok().map(Bytes);
    match (field(0), field(2)) {
        (Some(stored), Some(used)) => Ok(Zram { stored, used }),
        _ => Err(ParseError::new(1, text)),
    }
}

/// Parses it; fields count from the right, sizes are KiB.
pub fn parse_swaps(text: &str) -> Result<Vec<SwapArea>, ParseError> {
    let lines = text.lines().enumerate().skip(1).filter(|(_, l)| !l.trim().is_empty());
    lines.map(|(i, l)| area(l).ok_or_else(|| ParseError::new(i + 1, l))).collect()
}

fn area(line: &str) -> Option<SwapArea> {
    let mut fields = line.split_ascii_whitespace().rev();
    let priority = fields.next()?.parse().ok()?;
    let used = fields.next()?.parse().ok().map(Bytes::kib)?;
    let size = fields.next()?.parse().ok().map(Bytes::kib)?;
    let _kind = fields.next()?;
    let path = unescape_octal(fields.next_back()?);
    Some(SwapArea { path, size, used, priority, zram: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tree;

    #[test]
    fn areas_are_read_with_escaped_paths_and_negative_priorities() {
        let head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        let text =
            format!("{head}/dev/zram0   partition\t1024\t512\t100\n/my\\040swap  file  8\t0\t-2\n");
        let areas = parse_swaps(&text).unwrap();
        assert_eq!(areas[0].used, Bytes::kib(512));
        assert_eq!((areas[1].path.as_str(), areas[1].priority), ("/my swap", -2));
        assert_eq!(parse_swaps(head).unwrap(), []);
        assert_eq!(parse_swaps(&format!("{head}/dev/x partition 1 2\n")).unwrap_err().line, 2);
    }

    #[test]
    fn swap_that_is_memory_is_told_apart() {
        let root = tree(&[]);
        assert_eq!(read_swaps(&root).unwrap(), None);
        assert!(!read_zswap(&root).unwrap());
        root.put(
            "/proc/swaps",
            "Filename Type Size Used Priority\n/dev/zram0 partition 8 4 100\n\
             /dev/zram12 partition 8 4 99\n/dev/sda2 partition 8 4 -2\n/dev/zramp file 8 0 -3\n",
        );
        root.put(
            "/sys/block/zram0/mm_stat",
            "  4096000  1000000  1200000        0  1300000  5  0  0  0\n",
        );
        let zram: Vec<_> = read_swaps(&root).unwrap().unwrap().iter().map(|a| a.zram).collect();
        let first = Zram { stored: Bytes(4_096_000), used: Bytes(1_200_000) };
        assert_eq!(zram, [Some(first), Some(Zram::default()), None, None]);
        for text in ["", "1 2", "1 2 x", "-1 2 3"] {
            assert!(parse_mm_stat(text).is_err(), "{text}");
        }
        for (text, on) in [("Y\n", true), ("N\n", false), ("1\n", true)] {
            root.put("/sys/module/zswap/parameters/enabled", text);
            assert_eq!(read_zswap(&root).unwrap(), on);
        }
    }
}
