//! What stands for a page's content: 128 bits under a key that no guest knows.
//!
//! XXH3 with a random secret. It is no cryptographic hash: a guest that could
//! learn the key could forge pages that look alike here. It cannot, and the worst
//! of a forgery would be a wrong estimate and some of ksmd's time: KSM compares
//! byte for byte before it merges. The key is made anew by every scanner, so no
//! content can be recognised from an old table; agents are told it, and hash the
//! pages of their own VMs with it. What that means is in docs/merging.md.

use xxhash_rust::xxh3::xxh3_128_with_secret;

use crate::units::PAGE;

/// Bytes of the secret: XXH3's own size.
pub const SECRET: usize = 192;
/// Bytes of a line, as processors fetch memory.
pub const LINE: usize = 64;
/// How many lines of a page stand for it at a first look.
pub const LINES: usize = 4;

#[derive(Clone)]
pub struct Key {
    secret: [u8; SECRET],
    zero: u128,
    lines: [usize; LINES],
}

impl Key {
    /// From random bytes.
    pub fn new(secret: [u8; SECRET]) -> Key {
        let zero = xxh3_128_with_secret(&[0; PAGE as usize], &secret);
        let bits = xxh3_128_with_secret(b"which lines stand for a page", &secret);
        let quarter = PAGE as usize / LINES;
        let line = |i: usize| (bits >> (8 * i)) as usize % (quarter / LINE) * LINE;
        let lines = std::array::from_fn(|i| i * quarter + line(i));
        Key { secret, zero, lines }
    }

    /// What it was made from.
    pub fn secret(&self) -> &[u8; SECRET] {
        &self.secret
    }

    /// The hash of a page's bytes; `None` for a page of zeros.
    pub fn page(&self, bytes: &[u8]) -> Option<u128> {
        Some(xxh3_128_with_secret(bytes, &self.secret)).filter(|hash| *hash != self.zero)
    }

    /// Where in a page the lines are that stand for it: one in each quarter.
    pub fn lines(&self) -> [usize; LINES] {
        self.lines
    }

    /// A hash of a page's lines alone, one after the other. Equal pages have the same;
    /// of pages that are not, hardly any.
    pub fn of_lines(&self, bytes: &[u8; LINES * LINE]) -> u128 {
        // Up to 240 bytes XXH3 takes a shorter way.
        let (a, b) = bytes.split_at(LINES * LINE / 2);
        let hash = |half| xxh3_128_with_secret(half, &self.secret);
        hash(a) ^ hash(b).rotate_left(1)
    }

    /// The hash of a page's lines alone, from the whole page.
    pub fn of_page_lines(&self, page: &[u8]) -> u128 {
        let mut bytes = [0; LINES * LINE];
        for (to, at) in bytes.chunks_exact_mut(LINE).zip(self.lines) {
            page.get(at..at + LINE).into_iter().for_each(|line| to.copy_from_slice(line));
        }
        self.of_lines(&bytes)
    }

    /// A number that follows from two others and the key.
    pub fn mix(&self, a: u64, b: u64) -> u64 {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&a.to_ne_bytes());
        bytes[8..].copy_from_slice(&b.to_ne_bytes());
        xxh3_128_with_secret(&bytes, &self.secret) as u64
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u8) -> Key {
        Key::new(std::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ seed))
    }

    #[test]
    fn one_bit_anywhere_makes_another_page_and_zeros_are_known() {
        let key = key(1);
        let mut page = vec![0u8; PAGE as usize];
        assert_eq!(key.page(&page), None);
        let mut seen = std::collections::HashSet::new();
        for bit in (0..PAGE as usize * 8).step_by(61) {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(key.page(&page).unwrap()), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn lines_stand_for_a_page_one_in_each_quarter_and_none_can_be_foreseen() {
        let key = key(1);
        let lines = key.lines();
        let in_its_quarter = |i: usize| lines[i] / 1024 == i && lines[i].is_multiple_of(LINE);
        assert!((0..LINES).all(in_its_quarter), "{lines:?}");
        let page: Vec<u8> = (0..PAGE).map(|i| (i * 7 + i / 256) as u8).collect();
        for at in 0..PAGE as usize {
            let mut other = page.clone();
            other[at] ^= 1;
            let within = lines.iter().any(|l| (*l..l + LINE).contains(&at));
            assert_eq!(key.of_page_lines(&other) != key.of_page_lines(&page), within, "{at}");
        }
        let places: std::collections::HashSet<_> = (0..64).map(|s| self::key(s).lines()).collect();
        assert!(places.len() > 60, "{}", places.len());
    }

    #[test]
    fn two_keys_agree_on_nothing_and_a_key_is_not_printed() {
        let (a, b) = (key(1), key(2));
        let page = [7u8; PAGE as usize];
        assert_ne!(a.page(&page), b.page(&page));
        assert_eq!(format!("{a:?}"), "Key(secret)");
    }
}
