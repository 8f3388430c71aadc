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

/// The key of a scanner's hashes.
#[derive(Clone)]
pub struct Key {
    secret: [u8; SECRET],
    zero: u128,
}

impl Key {
    /// From random bytes.
    pub fn new(secret: [u8; SECRET]) -> Key {
        let zero = xxh3_128_with_secret(&[0; PAGE as usize], &secret);
        Key { secret, zero }
    }

    /// What it was made from.
    pub fn secret(&self) -> &[u8; SECRET] {
        &self.secret
    }

    /// The hash of a page's bytes; `None` for a page of zeros.
    pub fn page(&self, bytes: &[u8]) -> Option<u128> {
        Some(xxh3_128_with_secret(bytes, &self.secret)).filter(|hash| *hash != self.zero)
    }

    /// What is mixed into the hashes of a share group, so that pages of two groups
    /// never look alike.
    pub fn group(&self, name: &str) -> u128 {
        xxh3_128_with_secret(name.as_bytes(), &self.secret)
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
    fn two_keys_agree_on_nothing_and_a_key_is_not_printed() {
        let (a, b) = (key(1), key(2));
        let page = [7u8; PAGE as usize];
        assert_ne!(a.page(&page), b.page(&page));
        assert_ne!(a.group("x"), a.group("y"));
        assert_eq!(format!("{a:?}"), "Key(secret)");
    }
}
