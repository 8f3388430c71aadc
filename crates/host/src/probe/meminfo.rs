//! `/proc/meminfo` (Linux `fs/proc/meminfo.c`).

use ebb_core::sample::Meminfo;
use ebb_core::units::Bytes;

use crate::root::{ParseError, Probed, Root, field, fields};

pub fn read_meminfo(root: &Root) -> Probed<Meminfo> {
    root.parse("/proc/meminfo", parse_meminfo)
}

/// Parses it. `MemTotal`, `MemFree` and `MemAvailable` (Linux 3.14+) must be
/// there; fields that a kernel may be built without count as 0.
pub fn parse_meminfo(text: &str) -> Result<Meminfo, ParseError> {
    let keys = [
        "MemTotal",
        "MemFree",
        "MemAvailable",
        "Buffers",
        "Cached",
        "Shmem",
        "SwapTotal",
        "SwapFree",
        "Hugetlb",
        "Hugepagesize",
    ];
    let [total, free, available, buffers, cached, shmem, swap_total, swap_free, hugetlb, huge] =
        fields(text, keys, parse_kib)?;
    let must = |size: Option<Bytes>, key| size.ok_or_else(|| ParseError::missing(key));
    // Kernels before 4.16 tell only the default size's pool.
    let pages: Option<u64> = field(text, "HugePages_Total", |v| v.parse().ok())?;
    let pool = Bytes(huge.unwrap_or_default().0.saturating_mul(pages.unwrap_or_default()));
    Ok(Meminfo {
        total: must(total, "MemTotal")?,
        free: must(free, "MemFree")?,
        available: must(available, "MemAvailable (Linux 3.14+)")?,
        buffers: buffers.unwrap_or_default(),
        cached: cached.unwrap_or_default(),
        shmem: shmem.unwrap_or_default(),
        swap_total: swap_total.unwrap_or_default(),
        swap_free: swap_free.unwrap_or_default(),
        hugetlb: hugetlb.unwrap_or(pool),
    })
}

/// `   123 kB` or `  123`, both as KiB.
pub(crate) fn parse_kib(text: &str) -> Option<Bytes> {
    let number = text.trim().trim_end_matches("kB").trim_end();
    number.parse().ok().map(Bytes::kib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_bytes_and_the_needed_ones_are_demanded() {
        let text = "MemTotal:  24684324 kB\nMemFree: 100 kB\nMemAvailable: 200 kB\nCached: 5 kB\n\
                    Shmem: 7 kB\nSwapTotal: 8 kB\nSwapFree: 9 kB\nHugePages_Total: 3\n\
                    Hugepagesize: 2048 kB\n";
        let m = parse_meminfo(text).unwrap();
        assert_eq!(m.total, Bytes(24684324 << 10));
        assert_eq!((m.available, m.shmem), (Bytes::kib(200), Bytes::kib(7)));
        assert_eq!(m.hugetlb, Bytes::mib(6));
        let with = parse_meminfo(&format!("{text}Hugetlb: 9000 kB\n")).unwrap();
        assert_eq!(with.hugetlb, Bytes::kib(9000));
        let error = parse_meminfo("MemTotal: 1 kB\nMemFree: x kB\n").unwrap_err();
        assert_eq!(error.line, 2);
        assert!(parse_meminfo("MemTotal: 1 kB\nMemFree: 1 kB\n").is_err());
    }

    #[test]
    fn this_machine_reads() {
        let m = read_meminfo(&Root::default()).unwrap().unwrap();
        assert!(m.total > m.available && m.available > Bytes::mib(1));
    }
}
