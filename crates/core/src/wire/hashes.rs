//! Hashes of pages, asked of the agent by the daemon's scanner.
//!
//! On a socket of their own, which the daemon hands over with
//! [`Command::Hashes`](super::Command::Hashes): a scan delays no command there, and
//! what is sent is numbers, little-endian. One question, one answer:
//!
//! ```text
//! → magic u32, ranges u32, lines u64, secret 192 bytes, then of each range: address u64, bytes u64
//! ← magic u32, pages u32, held u64, free u64, ns u64, then of each page: number u64, hash u128
//! ```
//!
//! `lines` is 1 where only the lines that stand for a page are to be read
//! ([`Key::lines`](crate::page_hash::Key::lines)), else 0.
//!
//! Both sides take the other's numbers for hostile: a side that breaks a rule is disconnected.

use super::abi::{u32_at, u64_at};
use crate::page_hash::SECRET;
use crate::range::Range;
use crate::units::PAGE;

/// Most ranges of one question: every second page of 32 MiB.
pub const RANGES_MAX: usize = 4096;
/// Most pages of one question, 64 MiB: a few milliseconds of work, and 384 KiB to tell.
pub const PAGES_MAX: u64 = 16384;

const MAGIC: u32 = u32::from_le_bytes(*b"EbH2");
const RANGE: usize = 16;
const RECORD: usize = 24;

/// The daemon asks for hashes.
#[derive(Clone, PartialEq, Eq)]
pub struct HashRequest {
    pub secret: [u8; SECRET],
    /// Whether a few lines of each page are enough.
    pub lines: bool,
    /// Whole pages, sorted, apart.
    pub ranges: Vec<Range>,
}

/// The agent answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashReply {
    /// Pages of the ranges that are in memory, the zero page not counted.
    pub held: u64,
    /// Of those, free by the guest's map, and left out.
    pub free: u64,
    pub cpu_ns: u64,
    /// Number (address by size) and hash of each page that was read, by number; 0 stands
    /// for a page of zeros, where whole pages were asked for.
    pub pages: Vec<(u64, u128)>,
}

impl HashRequest {
    /// Bytes before the ranges.
    pub const HEAD: usize = 16 + SECRET;

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HashRequest::HEAD + self.ranges.len() * RANGE);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend((self.ranges.len() as u32).to_le_bytes());
        bytes.extend(u64::from(self.lines).to_le_bytes());
        bytes.extend(self.secret);
        for range in &self.ranges {
            bytes.extend(range.start.to_le_bytes());
            bytes.extend(range.len.to_le_bytes());
        }
        bytes
    }

    /// How many bytes follow a head; `None`: it is none.
    pub fn rest(head: &[u8; HashRequest::HEAD]) -> Option<usize> {
        rest(head, RANGES_MAX, RANGE)
    }

    /// From a head and what follows it, if all of it keeps to the rules.
    pub fn parse(head: &[u8; HashRequest::HEAD], rest: &[u8]) -> Option<HashRequest> {
        if HashRequest::rest(head)? != rest.len() {
            return None;
        }
        let secret = *head.last_chunk()?;
        let lines = [false, true].into_iter().find(|l| u64::from(*l) == u64_at(head, 8))?;
        let range = |r| Range { start: u64_at(r, 0), len: u64_at(r, 8) };
        let ranges: Vec<Range> = rest.chunks_exact(RANGE).map(range).collect();
        let (mut at, mut pages) = (0, 0u64);
        for &Range { start, len } in &ranges {
            let whole = start.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0;
            if !whole || start < at {
                return None;
            }
            at = start.checked_add(len)?;
            pages = pages.saturating_add(len / PAGE);
        }
        (pages <= PAGES_MAX).then_some(HashRequest { secret, lines, ranges })
    }
}

impl std::fmt::Debug for HashRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HashRequest({} ranges)", self.ranges.len())
    }
}

impl HashReply {
    /// Bytes before the pages.
    pub const HEAD: usize = 32;

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HashReply::HEAD + self.pages.len() * RECORD);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend((self.pages.len() as u32).to_le_bytes());
        for n in [self.held, self.free, self.cpu_ns] {
            bytes.extend(n.to_le_bytes());
        }
        for (number, hash) in &self.pages {
            bytes.extend(number.to_le_bytes());
            bytes.extend(hash.to_le_bytes());
        }
        bytes
    }

    /// How many bytes follow a head; `None`: it is none.
    pub fn rest(head: &[u8; HashReply::HEAD]) -> Option<usize> {
        rest(head, PAGES_MAX as usize, RECORD)
    }

    /// The reply, if it can be the answer to a question about these ranges.
    pub fn parse(head: &[u8; HashReply::HEAD], rest: &[u8], ranges: &[Range]) -> Option<HashReply> {
        if HashReply::rest(head)? != rest.len() {
            return None;
        }
        let [held, free, cpu_ns] = [8, 16, 24].map(|at| u64_at(head, at));
        let hash = |r: &[u8]| (u128::from(u64_at(r, 16)) << 64) | u128::from(u64_at(r, 8));
        let pages: Vec<(u64, u128)> =
            rest.chunks_exact(RECORD).map(|r| (u64_at(r, 0), hash(r))).collect();
        let asked: u64 = ranges.iter().map(|r| r.len / PAGE).sum();
        let mut ranges = ranges.iter().map(|r| r.start / PAGE..r.end() / PAGE);
        let mut range = ranges.next();
        let mut next = 0;
        for (number, _) in &pages {
            while range.as_ref().is_some_and(|r| *number >= r.end) {
                range = ranges.next();
            }
            if *number < next || !range.as_ref().is_some_and(|r| r.contains(number)) {
                return None;
            }
            next = number + 1;
        }
        let sums = held <= asked && free <= held && pages.len() as u64 <= held - free;
        sums.then_some(HashReply { held, free, cpu_ns, pages })
    }
}

fn rest(head: &[u8], most: usize, each: usize) -> Option<usize> {
    let count = u32_at(head, 4) as usize;
    (u32_at(head, 0) == MAGIC && count <= most).then_some(count * each)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges(list: &[(u64, u64)]) -> Vec<Range> {
        list.iter().map(|&(start, len)| Range { start, len }).collect()
    }

    fn question(list: &[(u64, u64)]) -> HashRequest {
        HashRequest { secret: [7; SECRET], lines: list.len() > 1, ranges: ranges(list) }
    }

    fn parsed(bytes: &[u8]) -> Option<HashRequest> {
        let (head, rest) = bytes.split_first_chunk()?;
        HashRequest::parse(head, rest)
    }

    fn ask(list: &[(u64, u64)]) -> Option<HashRequest> {
        parsed(&question(list).encode())
    }

    fn told(told: &HashReply, list: &[(u64, u64)]) -> Option<HashReply> {
        let bytes = told.encode();
        let (head, rest) = bytes.split_first_chunk()?;
        HashReply::parse(head, rest, &ranges(list))
    }

    #[test]
    fn questions_and_answers_survive_the_way() {
        let ranges = [(PAGE, 2 * PAGE), (3 * PAGE, PAGE), (1 << 40, PAGE)];
        assert_eq!(ask(&ranges), Some(question(&ranges)));
        assert_eq!(ask(&ranges[..1]), Some(question(&ranges[..1])));
        let pages = vec![(1, 5), (2, 0), (3, u128::MAX - 1), ((1 << 40) / PAGE, 1 << 64)];
        let whole = HashReply { held: 4, free: 0, cpu_ns: u64::MAX, pages };
        assert_eq!(told(&whole, &ranges), Some(whole));
        let most = [(0, PAGES_MAX * PAGE)];
        let pages = (0..PAGES_MAX).map(|p| (p, 1)).collect();
        let most_told = HashReply { held: PAGES_MAX, pages, ..HashReply::default() };
        assert!(ask(&most).is_some() && told(&most_told, &most).is_some());
    }

    #[test]
    fn what_breaks_a_rule_is_refused() {
        for ranges in [
            vec![(1, PAGE)],
            vec![(0, 1)],
            vec![(0, 0)],
            vec![(PAGE, PAGE), (0, PAGE)],
            vec![(0, 2 * PAGE), (PAGE, PAGE)],
            vec![(u64::MAX / PAGE * PAGE, 2 * PAGE)],
            vec![(0, (PAGES_MAX + 1) * PAGE)],
            (0..=RANGES_MAX as u64).map(|i| (2 * i * PAGE, PAGE)).collect(),
        ] {
            assert_eq!(ask(&ranges), None, "{:?}", &ranges[..1]);
        }
        let mut bytes = question(&[(0, PAGE)]).encode();
        bytes[8] = 2;
        assert_eq!(parsed(&bytes), None, "neither whole pages nor lines");
        let ranges = [(PAGE, PAGE), (3 * PAGE, PAGE)];
        for (held, free, pages) in [
            (3, 0, vec![]),
            (1, 2, vec![]),
            (2, 1, vec![(1, 1), (3, 1)]),
            (2, 0, vec![(0, 1)]),
            (2, 0, vec![(2, 1)]),
            (2, 0, vec![(4, 1)]),
            (2, 0, vec![(3, 1), (1, 1)]),
            (2, 0, vec![(1, 1), (1, 1)]),
            (1, 0, vec![(1, 1), (3, 1)]),
        ] {
            assert_eq!(told(&HashReply { held, free, cpu_ns: 0, pages }, &ranges), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..600), right in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if right && bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[5..8].fill(0);
            }
            if let Some((head, rest)) = bytes.split_first_chunk() {
                let _ = HashRequest::parse(head, rest);
            }
            if let Some((head, rest)) = bytes.split_first_chunk() {
                let _ = HashReply::parse(head, rest, &ranges(&[(0, 64 * PAGE)]));
            }
        }
    }
}
