//! `/proc/swaps` (Linux `mm/swapfile.c`, `swap_show`).

use ebb_core::sample::SwapArea;
use ebb_core::units::Bytes;

use crate::root::{ParseError, ProbeError, Root, unescape_octal};

/// Most areas read; Linux has at most 29 (`MAX_SWAPFILES`).
const MAX_AREAS: usize = 64;

/// Reads `/proc/swaps`; `None` on a kernel without swap.
pub fn read_swaps(root: &Root) -> Result<Option<Vec<SwapArea>>, ProbeError> {
    root.parse("/proc/swaps", parse_swaps)
}

/// Parses it; fields count from the right, sizes are KiB.
pub fn parse_swaps(text: &str) -> Result<Vec<SwapArea>, ParseError> {
    let lines = text.lines().enumerate().skip(1).filter(|(_, l)| !l.trim().is_empty());
    lines.take(MAX_AREAS).map(|(i, l)| area(l).ok_or_else(|| ParseError::new(i + 1, l))).collect()
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
}
