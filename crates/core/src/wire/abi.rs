//! Views of what a guest with ebb.ko shows its host (`guest/ebb_abi.h`).
//!
//! Every byte here was written by a guest, which may be hostile: callers copy a
//! piece once and hand it over by value, and nothing that a guest says is used
//! before it is bounded by what the host knows itself, the VM's RAM. What lies
//! outside of that RAM is clipped away, what contradicts itself is refused. A
//! guest that lies well can lose its own pages, and nothing else.

use serde::{Deserialize, Serialize};

use crate::range::Range;

/// The header's first bytes.
pub const MAGIC: [u8; 16] = [
    0xeb, 0xb1, 0x66, 0x72, 0x65, 0x65, 0x6d, 0x61, 0x70, 0x9d, 0x1c, 0x40, 0xd3, 0x7a, 0x05, 0xf4,
];
pub const VERSION: u32 = 1;
/// Guest pages, from 0, among which the header is looked for.
pub const SEARCH_PAGES: u64 = 4096;
/// Pages that carry the magic and are looked at; a guest may fill its memory
/// with copies.
pub const CANDIDATES_MAX: usize = 16;
pub const PAGE: u64 = 4096;
/// Pages whose bits one map page holds: 128 MiB.
pub const MAP_PFNS: u64 = 32768;
/// 64-bit words of a map page.
pub const MAP_WORDS: usize = 512;
pub const HEADER_BYTES: usize = 776;
/// Bytes of it that never change, under the checksum.
pub const STATIC_BYTES: usize = 128;
/// Where [`Facts`] are in the header, and how many bytes.
pub const FACTS_AT: u64 = 512;
pub const FACTS_BYTES: usize = 264;
/// Where the challenge is in the header: the one word the host writes.
pub const CHALLENGE_AT: u64 = 208;
/// Pages of extents at most.
const EXTENT_PAGES_MAX: u32 = 64;
/// Extents in one of them at most.
const EXTENTS_A_PAGE: u32 = 255;
/// Map pages in all at most.
pub const MAP_PAGES_MAX: u32 = 1 << 20;
/// Longest `tick_ms` believed: twice the module's own.
pub const TICK_MS_MAX: u32 = 1000;

/// Why a header, or what it points to, is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Bad {
    /// Written for another host.
    #[error("version {0}, this host speaks {VERSION}")]
    Version(u32),
    /// Extents change right now: look again.
    #[error("extents are changing")]
    Changing,
    /// It is none, or lies.
    #[error("{0}")]
    Wrong(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestState {
    /// First scan: do not use.
    Starting,
    /// The map holds.
    Running,
    /// Cleared for a while.
    Quiet,
    /// Cleared for good.
    Stopped,
    Unknown,
}

impl GuestState {
    fn from_word(word: u32) -> GuestState {
        match word {
            1 => GuestState::Starting,
            2 => GuestState::Running,
            3 => GuestState::Quiet,
            4 => GuestState::Stopped,
            _ => GuestState::Unknown,
        }
    }
}

/// A header that is whole, at the address it claims, of our version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub gpa: u64,
    /// The static part, to notice that it changed.
    pub fixed: [u8; STATIC_BYTES],
    /// For beats and answers.
    pub key: u64,
    /// No pfn from here on is covered.
    pub pfn_limit: u64,
    /// `KERNEL_VERSION(a, b, 0)`.
    pub linux_version: u32,
    /// Printable part of the module's version.
    pub module_version: String,
    /// A page that the kernel never writes to, because the module keeps it or firmware does;
    /// 0: none.
    pub kept_gpa: u64,
    pub live: LivePart,
}

/// The part of the header that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivePart {
    pub state: GuestState,
    /// Longest time between two beats of a running guest, 1 to [`TICK_MS_MAX`].
    pub tick_ms: u32,
    /// Sign of life.
    pub beat: u64,
    pub beat_check: u64,
    /// The answer to the last challenge, 0 for none.
    pub response: u64,
    /// Of the extents; odd while they change.
    pub generation: u64,
    pub extents_gpa: u64,
    pub extent_pages: u32,
}

/// 0 where there are too few bytes, as [`u64_at`].
pub(super) fn u32_at(b: &[u8], at: usize) -> u32 {
    b.get(at..at + 4).and_then(|s| s.try_into().ok()).map_or(0, u32::from_le_bytes)
}

pub(super) fn u64_at(b: &[u8], at: usize) -> u64 {
    b.get(at..at + 8).and_then(|s| s.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// `ebb_mix` of the ABI (splitmix64's finaliser).
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What goes with a beat.
pub fn beat_check(beat: u64, key: u64) -> u64 {
    mix(beat.wrapping_add(key))
}

/// The right answer to a challenge.
pub fn response(challenge: u64, key: u64) -> u64 {
    mix(!challenge ^ key)
}

/// FNV-1a over the static part, the checksum's own bytes as zero.
pub fn checksum(fixed: &[u8; STATIC_BYTES]) -> u64 {
    fixed.iter().enumerate().fold(0xcbf2_9ce4_8422_2325, |sum, (i, b)| {
        let b = if (32..40).contains(&i) { 0 } else { *b };
        (sum ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    })
}

impl LivePart {
    /// From a copy of the whole header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> LivePart {
        LivePart {
            state: GuestState::from_word(u32_at(bytes, 128)),
            tick_ms: u32_at(bytes, 136).clamp(1, TICK_MS_MAX),
            beat: u64_at(bytes, 192),
            beat_check: u64_at(bytes, 200),
            response: u64_at(bytes, 216),
            generation: u64_at(bytes, 256),
            extents_gpa: u64_at(bytes, 264),
            extent_pages: u32_at(bytes, 272),
        }
    }

    /// Whether the beat is one of the module with this key.
    pub fn beats_right(&self, key: u64) -> bool {
        self.beat_check == beat_check(self.beat, key)
    }
}

impl Header {
    /// Checks a copy of the page's first bytes, found at `gpa`.
    pub fn parse(bytes: &[u8; HEADER_BYTES], gpa: u64) -> Result<Header, Bad> {
        if bytes[..16] != MAGIC {
            return Err(Bad::Wrong("no magic"));
        }
        let mut fixed = [0; STATIC_BYTES];
        fixed.copy_from_slice(&bytes[..STATIC_BYTES]);
        let version = u32_at(bytes, 16);
        if version != VERSION {
            return Err(Bad::Version(version));
        }
        if u64_at(bytes, 32) != checksum(&fixed) {
            return Err(Bad::Wrong("wrong checksum"));
        }
        if u64_at(bytes, 24) != gpa {
            return Err(Bad::Wrong("its address is another one"));
        }
        let order = u32_at(bytes, 68);
        let pfn_limit = u64_at(bytes, 72);
        // Later versions of the module may append; less is not version 1.
        let size = u32_at(bytes, 20) as usize;
        let limits = 1..=u64::from(MAP_PAGES_MAX) * MAP_PFNS;
        for (good, why) in [
            ((HEADER_BYTES..=PAGE as usize).contains(&size), "impossible size"),
            (u32_at(bytes, 64) == 12, "impossible page size"),
            (order <= 10, "impossible order"),
            (limits.contains(&pfn_limit), "impossible pfn limit"),
        ] {
            if !good {
                return Err(Bad::Wrong(why));
            }
        }
        let text = bytes[88..112].iter().take_while(|b| b.is_ascii_graphic());
        Ok(Header {
            gpa,
            fixed,
            key: u64_at(bytes, 40),
            pfn_limit,
            linux_version: u32_at(bytes, 80),
            module_version: text.map(|b| *b as char).collect(),
            kept_gpa: u64_at(bytes, 112),
            live: LivePart::parse(bytes),
        })
    }

    /// `6.1` out of the kernel's version.
    pub fn linux(&self) -> String {
        format!("{}.{}", self.linux_version >> 16, self.linux_version >> 8 & 0xff)
    }
}

/// One map page: the bits of [`MAP_PFNS`] pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapPage {
    /// The first pfn that it is about.
    pub pfn: u64,
    pub gpa: u64,
}

/// All map pages that are about pages of the VM, by pfn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The generation that this was read at.
    pub generation: u64,
    /// Sorted, each pfn once, all inside RAM; at most one per 128 MiB of a range
    /// of RAM and one more.
    pub pages: Vec<MapPage>,
}

impl Layout {
    /// Follows the chain of extents. `read` copies a page of guest memory once;
    /// `None` where it cannot. Compare the header's generation afterwards.
    pub fn collect(
        header: &Header,
        ram: &[Range],
        mut read: impl FnMut(u64) -> Option<[u8; PAGE as usize]>,
    ) -> Result<Layout, Bad> {
        let live = &header.live;
        if live.generation % 2 == 1 {
            return Err(Bad::Changing);
        }
        if live.extent_pages > EXTENT_PAGES_MAX {
            return Err(Bad::Wrong("too many extent pages"));
        }
        let mut pages = Vec::new();
        let (mut next, mut total) = (live.extents_gpa, 0u64);
        // Bounded by the count alone: a chain that is a ring ends too.
        for _ in 0..live.extent_pages {
            if next == 0 {
                break;
            }
            if next % PAGE != 0 || !ram.iter().any(|r| r.holds(next, PAGE)) {
                return Err(Bad::Wrong("a page of extents outside of RAM"));
            }
            let page = read(next).ok_or(Bad::Wrong("a page of extents outside of RAM"))?;
            next = u64_at(&page, 0);
            collect_page(&page, header.pfn_limit, ram, &mut pages, &mut total)?;
        }
        pages.sort_unstable_by_key(|p| p.pfn);
        if pages.windows(2).any(|w| w[0].pfn == w[1].pfn) {
            return Err(Bad::Wrong("overlapping extents"));
        }
        let mut places: Vec<u64> = pages.iter().map(|p| p.gpa).collect();
        places.sort_unstable();
        if places.windows(2).any(|w| w[0] == w[1]) {
            return Err(Bad::Wrong("overlapping map pages"));
        }
        Ok(Layout { generation: live.generation, pages })
    }
}

/// Adds what one page of extents says of RAM.
fn collect_page(
    page: &[u8; PAGE as usize],
    pfn_limit: u64,
    ram: &[Range],
    pages: &mut Vec<MapPage>,
    total: &mut u64,
) -> Result<(), Bad> {
    let count = u32_at(page, 8);
    if count > EXTENTS_A_PAGE {
        return Err(Bad::Wrong("too many extents in a page"));
    }
    for i in 0..count as usize {
        let at = 16 + 16 * i;
        let (gpa, first, len) = (u64_at(page, at), u32_at(page, at + 8), u32_at(page, at + 12));
        *total += u64::from(len);
        if len == 0 || *total > u64::from(MAP_PAGES_MAX) {
            return Err(Bad::Wrong("too many map pages"));
        }
        // Both below 2^32 and 2^15: no overflow.
        if (u64::from(first) + u64::from(len)) * MAP_PFNS > pfn_limit {
            return Err(Bad::Wrong("impossible extent beyond the pfn limit"));
        }
        let bytes = u64::from(len) * PAGE;
        if gpa % PAGE != 0 || gpa == 0 || !ram.iter().any(|r| r.holds(gpa, bytes)) {
            return Err(Bad::Wrong("a map page outside of RAM"));
        }
        for k in 0..u64::from(len) {
            let pfn = (u64::from(first) + k) * MAP_PFNS;
            let (start, end) = (pfn * PAGE, (pfn + MAP_PFNS) * PAGE);
            if ram.iter().any(|r| r.overlaps(start, end)) {
                pages.push(MapPage { pfn, gpa: gpa + k * PAGE });
                // Each is 128 MiB of RAM at least in part, if none comes twice.
                if pages.len() as u64 > sections(ram) {
                    return Err(Bad::Wrong("overlapping extents"));
                }
            }
        }
    }
    Ok(())
}

/// Map pages that this RAM can need.
fn sections(ram: &[Range]) -> u64 {
    ram.iter().map(|r| r.len / (MAP_PFNS * PAGE) + 2).sum()
}

/// Makes the struct, and how it is read: each field with its place in the block.
macro_rules! facts {
    ($($(#[$meta:meta])* $place:literal $name:ident;)*) => {
        /// What the guest says of itself; sizes in pages, counters since boot.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Facts {
            $($(#[$meta])* pub $name: u64,)*
        }

        impl Facts {
            /// From a copy of the block and its sequence number read again after it.
            /// `None` while the guest writes. Fields that an older module does not fill
            /// read as zero.
            pub fn parse(bytes: &[u8; FACTS_BYTES], seq_after: u32) -> Option<Facts> {
                let seq = u32_at(bytes, 0);
                if seq != seq_after || seq % 2 == 1 {
                    return None;
                }
                let fields = u32_at(bytes, 4) as usize;
                let f = |i: usize| if i < fields { u64_at(bytes, 8 + 8 * i) } else { 0 };
                Some(Facts { $($name: f($place),)* })
            }
        }
    };
}

facts! {
    /// Boot time clock when they were taken, ns.
    0 time_ns;
    /// Pages of RAM.
    1 total;
    2 free;
    /// Available without swapping.
    3 available;
    /// Page cache without buffers.
    4 cached;
    5 buffers;
    6 shmem;
    7 anon;
    9 swap_free;
    /// Pages allocated.
    10 alloc;
    /// Pages freed.
    11 freed;
    /// Tasks that went into direct reclaim.
    12 alloc_stall;
    /// Pages looked at by direct reclaim.
    13 scan_direct;
    17 refault_anon;
    18 refault_file;
    19 oom_kill;
    20 swap_in;
    21 swap_out;
    22 major_fault;
}

/// Runs of set bits, as `(first, length)`, of words in the map's order.
pub fn runs(words: &[u64]) -> impl Iterator<Item = (usize, usize)> + '_ {
    let bits = words.len() * 64;
    let mut at = 0;
    std::iter::from_fn(move || {
        let first = next_bit(words, at, bits, 0);
        if first >= bits {
            return None;
        }
        at = next_bit(words, first, bits, u64::MAX);
        Some((first, at - first))
    })
}

/// The first bit from `at` on that is set (`flip` 0) or clear (`flip` all ones).
fn next_bit(words: &[u64], at: usize, bits: usize, flip: u64) -> usize {
    let mut word = at / 64;
    if at >= bits {
        return bits;
    }
    let mut value = (words[word] ^ flip) & (u64::MAX << (at % 64));
    while value == 0 {
        word += 1;
        if word == words.len() {
            return bits;
        }
        value = words[word] ^ flip;
    }
    word * 64 + value.trailing_zeros() as usize
}

/// Sets or clears `len` bits from `first` on; what is beyond the words is ignored.
pub fn fill(words: &mut [u64], first: usize, len: usize, on: bool) {
    let end = first.saturating_add(len).min(words.len() * 64);
    let mut at = first;
    while at < end {
        let n = (64 - at % 64).min(end - at);
        let mask = (u64::MAX >> (64 - n)) << (at % 64);
        if on {
            words[at / 64] |= mask;
        } else {
            words[at / 64] &= !mask;
        }
        at += n;
    }
}

/// Whether all `len` bits from `first` on are set.
pub fn all_set(words: &[u64], first: usize, len: usize) -> bool {
    let end = first.saturating_add(len);
    end <= words.len() * 64 && next_bit(words, first, end, u64::MAX) >= end
}

pub fn count(words: &[u64]) -> u64 {
    words.iter().map(|w| u64::from(w.count_ones())).sum()
}

#[cfg(test)]
mod tests;
