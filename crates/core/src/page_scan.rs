//! PAGEMAP_SCAN (Linux 6.7, `fs/proc/task_mmu.c`): which pages of a process are held. What daemon
//! and agent ask alike, and how they go on; the system call itself is theirs.

use crate::range::Range;
use crate::units::PAGE;

/// The number of the request, for `ioctl` on `/proc/PID/pagemap`.
pub const REQUEST: u64 = 0xc060_6610;

/// The kernel's `struct pm_scan_arg`.
pub type Argument = [u64; 12];

const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO_PAGE: u64 = 1 << 5;
/// Mapped by a PMD.
const HUGE: u64 = 1 << 6;
/// Regions of one call. The kernel's own buffer has 512: with no more, a full vector is the only
/// way to end early, and its last region says where.
const REGIONS: usize = 512;

#[repr(C)]
#[derive(Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Calls `each` with every stretch of a range that is held (in memory, not the zero page,
/// or in swap if `swapped`), and whether huge pages map it. `call` makes the request and returns
/// the number of regions that the kernel has written where the argument says.
pub fn scan<E>(
    range: Range,
    swapped: bool,
    mut call: impl FnMut(&mut Argument) -> Result<usize, E>,
    mut each: impl FnMut(Range, bool),
) -> Result<(), E> {
    // A few pages are no more regions: the kernel's buffer is as small then.
    let most = REGIONS.min((range.len / PAGE) as usize).max(1);
    let mut regions = vec![Region { start: 0, end: 0, categories: 0 }; most];
    let any = if swapped { PRESENT | SWAPPED } else { PRESENT };
    let (mut start, end) = (range.start, range.end());
    while start < end {
        let (vec, len) = (regions.as_mut_ptr() as u64, most as u64);
        // size flags start end walk_end vec vec_len max_pages inverted mask anyof return
        let mut argument = [96, 0, start, end, 0, vec, len, 0, ZERO_PAGE, ZERO_PAGE, any, HUGE];
        let n = call(&mut argument)?.min(most);
        for r in &regions[..n] {
            let len = r.end.saturating_sub(r.start);
            each(Range { start: r.start, len }, r.categories & HUGE != 0);
        }
        match regions[..n].last() {
            Some(last) if n == most && last.end > start => start = last.end,
            _ => break,
        }
    }
    Ok(())
}
