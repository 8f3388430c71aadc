//! `/proc/spl/kstat/zfs/arcstats` (OpenZFS `module/zfs/arc.c`): its cache counts
//! as used in MemAvailable, but shrinks to `c_min` when asked.

use ebb_core::sample::ZfsArc;
use ebb_core::units::Bytes;

use crate::root::{ParseError, Probed, Root, fields};

pub fn read_arcstats(root: &Root) -> Probed<ZfsArc> {
    root.parse("/proc/spl/kstat/zfs/arcstats", parse_arcstats)
}

/// Parses `name type data` lines; both `size` and `c_min` must be there.
pub fn parse_arcstats(text: &str) -> Result<ZfsArc, ParseError> {
    let data = |line: &str| line.split_whitespace().nth(1)?.parse().ok().map(Bytes);
    match fields(text, ["size", "c_min"], data)? {
        [Some(size), Some(min)] => Ok(ZfsArc { size, min }),
        [None, _] => Err(ParseError::missing("size")),
        [_, None] => Err(ParseError::missing("c_min")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_and_floor_are_found_among_the_rest() {
        let text = "13 1 0x01 147 39984 1 2\nname type data\nhits 4 5\nc_min 4 100\nsize 4 900\n";
        let arc = parse_arcstats(text).unwrap();
        assert_eq!(arc, ZfsArc { size: Bytes(900), min: Bytes(100) });
        assert!(parse_arcstats("size 4 900\n").is_err());
        assert_eq!(parse_arcstats("c_min 4\nsize 4 1").unwrap_err().line, 1);
    }
}
